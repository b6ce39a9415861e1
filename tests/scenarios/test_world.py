"""What the world offers to any system: seams that take modelled time and go wrong as planted, and their traces."""

from contextlib import asynccontextmanager

import pytest
import trio

from backends.testing import payload_of
from offload.testing.scenarios import (
    TICK,
    Fault,
    Outcome,
    PipelineSpec,
    PolicySpec,
    Refused,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    play,
)


class Ticket:
    result = Outcome("COMPLETE")

    async def wait(self):
        await trio.lowlevel.checkpoint()

    cancel = wait

    def request_cancel(self):
        pass


class Bare:
    """Nothing but a world and a story: what a test does with it when something is stored."""

    def __init__(self, world, story):
        self.world, self.story = world, story

    async def store(self, keys, after, label):
        await self.story(self.world, keys)
        return Ticket()

    async def load(self, keys):
        return {}

    def audit(self):
        return {"things": 0}


def told(story, **options):
    """Play a scenario in which one container is stored, and a story is told of it."""

    @asynccontextmanager
    async def opened(world):
        yield Bare(world, story)

    options.setdefault("step", [Step(store=StoreStep(id="a", keys="k0, k1", per=2))])
    return play(Scenario(name="x", **options), factory=opened)


def story(**options):
    """Tell a story and insist that nothing was wrong with it."""

    def tell(function):
        report = told(function, **options)
        assert report.violations == (), report.violations
        return report

    return tell


async def copied(world, keys):
    return await world.copy("host", keys, [world.payload(key) for key in keys])


def test_a_copy_takes_the_time_of_its_tier_in_whole_milliseconds():
    async def main(world, keys):
        assert await copied(world, keys) == [payload_of(key, 100) for key in keys]
        assert trio.current_time() == (3 + 4) * TICK  # 200 bytes, 64 of them in a millisecond

    tier = TierSpec(latency_ms=3, bytes_per_ms=64, block_bytes=100)
    report = story(tier={"host": tier})(main)
    assert [one.line() for one in report.moments if one.kind == "tier"] == [
        "0\ttier\tcopy\t\thost\tk0,k1",
        "7\ttier\tcopied\t\thost\tk0,k1",
    ]
    assert report.counts["copied"] == 2 and report.counts["batches"] == 1


@pytest.mark.parametrize("kind", ["fail", "torn", "unproven", "peer_death"])
def test_a_copy_that_goes_wrong_raises_what_the_contract_says(kind):
    async def main(world, keys):
        with pytest.raises(OSError):
            await copied(world, keys)

    report = story(fault=[Fault(do=kind, at_ms=0)], step=[Step(at_ms=0, store=StoreStep(id="a"))])(
        lambda world, keys: _later(main, world, keys)
    )
    assert report.fired == {kind: 1}
    assert report.counts["copied"] == 0


async def _later(main, world, keys):
    """Behind the faults of the same time."""
    await trio.sleep(0.5 * TICK)
    await main(world, keys)


def test_a_copy_whose_end_is_announced_twice_answers_twice():
    async def main(world, keys):
        await trio.sleep(0.5 * TICK)
        assert await copied(world, keys) == [world.payload(key) for key in keys] * 2

    story(fault=[Fault(do="duplicate", at_ms=0)])(main)


def test_a_dropped_end_never_comes_and_is_left_when_it_is_cancelled():
    async def main(world, keys):
        await trio.sleep(0.5 * TICK)
        with trio.move_on_after(50 * TICK) as scope:
            await copied(world, keys)
        assert scope.cancelled_caught

    report = story(fault=[Fault(do="drop", at_ms=0)])(main)
    assert [one.name for one in report.moments if one.kind == "tier"] == ["copy", "dropped"]


def test_a_bit_is_flipped_on_the_way_of_the_next_copy():
    async def main(world, keys):
        await trio.sleep(0.5 * TICK)
        first, second = await copied(world, keys)
        assert first == world.payload(keys[0])
        assert second[1:] == world.payload(keys[1])[1:] and second[0] != world.payload(keys[1])[0]
        assert (await copied(world, keys))[1] == world.payload(keys[1])

    assert story(fault=[Fault(do="flip", at_ms=0, keys="k1")])(main).fired == {"flip": 1}


@pytest.mark.parametrize(("rule", "answer"), [(None, True), ("evict", True), ("fail", False), ("partial", False)])
def test_room_is_withheld_or_refused_as_the_pipeline_has_it(rule, answer):
    async def main(world, keys):
        await trio.sleep(0.5 * TICK)
        assert await world.reserve("host", keys) is answer
        assert trio.current_time() == (5 * TICK if answer else 0.5 * TICK)

    pipeline = {"main": PipelineSpec(to="host", on_destination_full=rule)}
    story(fault=[Fault(do="full", at_ms=0, for_ms=5)], pipeline=pipeline)(main)


def test_there_is_never_room_for_more_than_a_tier_holds():
    async def main(world, keys):
        assert await world.reserve("host", keys[:1])
        assert not await world.reserve("host", keys)

    story(tier={"host": TierSpec(capacity=1)})(main)


def test_the_policies_of_the_first_pipeline_are_asked_of_all_keys():
    async def main(world, keys):
        assert await world.policy(keys) == {b"k1": "cold"}
        assert trio.current_time() == 2 * TICK

    policies = [PolicySpec(do="reject", keys="k1", reason="cold"), PolicySpec(do="sleep", ms=2), PolicySpec(do="lock")]
    story(pipeline={"main": PipelineSpec(to="host", policies=policies)})(main)


def test_a_key_that_is_copied_twice_at_the_same_time_is_a_violation():
    async def main(world, keys):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copied, world, keys)
            nursery.start_soon(copied, world, keys[1:])

    report = told(main, tier={"host": TierSpec(latency_ms=1)})
    assert [one.rule for one in report.violations] == ["I7"]
    assert "k1 copied into host twice" in report.violations[0].text


def test_who_is_refused_says_why():
    async def main(world, keys):
        raise Refused("no room")

    report = story()(main)
    assert [one.line() for one in report.moments] == ["0\tstep\tasked\ta\t\t", "0\tstep\trefused\ta\t\tno room"]
    assert report.reached == {"state REFUSED"}


def test_what_a_system_raises_instead_is_a_crash():
    async def main(world, keys):
        raise LookupError("which shelf?")

    assert [one.rule for one in told(main).violations] == ["crash"]


def test_a_hook_of_any_name_is_a_place_for_faults():
    async def main(world, keys):
        world.hook("thinking", "a")
        world.hook("thinking", ["a", "b"], "upstairs")

    report = story(fault=[Fault(do="clock", at_hook="thinking", visit=2, ms=5)])(main)
    assert [one.line() for one in report.moments if one.kind in ("hook", "fault")] == [
        "0\thook\tthinking\ta\t\t",
        "0\thook\tthinking\ta,b\tupstairs\t",
        "0\tfault\tclock\t\tupstairs\t5 ms\tidle",
    ]
    assert report.counts["thinking"] == 2


def test_a_fault_that_cannot_be_done_to_a_system_is_a_violation_and_does_not_stop_it():
    async def main(world, keys):
        world.hook("thinking", "a")

    report = told(main, fault=[Fault(do="shut_down", at_hook="thinking")])
    assert [one.rule for one in report.violations] == ["crash"]
    assert report.outcomes["a"].status == "COMPLETE"
