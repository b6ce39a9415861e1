"""Bad input, and parts that lie: a typed error or a failed handle, never a dead pipeline."""

import math
import re
import threading
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends import BlockSizeError, DuplicateKeys
from backends.abc import STORED, CapacityError, Reservation
from backends.base.forwarding import ForwardingTier
from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    BatchConfig,
    ConfigError,
    DestinationFull,
    PipelineConfig,
    PipelineFull,
    PolicyFailed,
    Status,
    TransferFailed,
    open_pipeline,
)
from offload._config import from_mapping
from offload.abc import Leased
from tests.support.actors import Answer, Slow
from tests.support.invariants import TICK, World, config_of, keys_of, open_world


async def assert_alive(world):
    """The pipeline still does its work, and nothing of what was before is left in it."""
    assert world.at_rest() == {}
    result = await world.stored("alive", 4)
    assert result.status is Status.COMPLETE, result


# --- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "knob"),
    [
        (lambda: from_mapping({"max_concurrent_transfer": 1}), "max_concurrent_transfer"),
        (lambda: from_mapping({"batch_config": {"max_batchsize": 1}}), "batch_config.max_batchsize"),
        (lambda: PipelineConfig(budget_blocks=-1), "budget_blocks"),
        (lambda: PipelineConfig(policy_timeout=-0.1), "policy_timeout"),
        (lambda: PipelineConfig(transfer_timeout=math.nan), "transfer_timeout"),
        (lambda: PipelineConfig(on_destination_full="retry"), "on_destination_full"),
        (lambda: BatchConfig(max_batch_size=0), "max_batch_size"),
        (lambda: BatchConfig(min_batch_size=65, max_batch_size=64), "min_batch_size"),
        (lambda: PipelineConfig(budget_blocks=8), "batch_config.max_batch_size"),
    ],
)
def test_a_bad_knob_is_named(make, knob):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.knob == knob


def test_an_unknown_keyword_is_no_knob():
    with pytest.raises(ConfigError, match="did you mean max_concurrent_transfers"):
        PipelineConfig(max_concurrent_transfer=1)


@pytest.mark.parametrize("policies", [[Slow], [Slow.evaluate], [lambda: None, 3], [7], [trio.sleep]])
async def test_what_is_no_policy_is_refused_before_anything_opens(policies):
    with pytest.raises(TypeError, match="policy"):
        open_pipeline(FakeTier(), FakeTier(), policies=policies)


@pytest.mark.parametrize(("source", "destination"), [("files", FakeTier()), (FakeTier(), "files")])
async def test_what_is_no_place_is_refused_before_anything_opens(source, destination):
    with pytest.raises(TypeError, match=r"'files'.*backends\.abc\."):
        open_pipeline(source, destination)


async def test_a_chain_must_start_where_the_first_copy_ends():
    source, destination = FakeTier(), FakeTier()
    async with open_pipeline(source, destination) as pipeline:
        with pytest.raises(ValueError, match="starts at"):
            open_pipeline(source, destination, chain=[pipeline])


# --- what is enqueued ---------------------------------------------------------------------------------------------


async def test_duplicate_keys_in_one_container(autojump_clock):
    async with open_world() as world:
        world.source.fill([b"a"])
        for make in (world.source.weak, world.source.strong, lambda keys: world.source.external([0, 0], keys)):
            with pytest.raises(DuplicateKeys):
                make([b"a", b"a"])
        await assert_alive(world)


async def test_blocks_of_another_source(autojump_clock):
    other = FakeTier()
    other.fill([b"a"])
    async with open_world() as world:
        with pytest.raises(ValueError, match="source"):
            world.pipeline.enqueue_nowait(other.strong([b"a"]), precondition=NO_WAIT)
        with pytest.raises(ValueError, match="source"):
            await world.pipeline.enqueue(other.strong([b"a"]), precondition=NO_WAIT)
        assert other.statistics().held_blocks == 0
        await assert_alive(world)


@pytest.mark.parametrize("bad", [None, 3, threading.Event(), lambda: None, "now"])
async def test_what_is_no_precondition(autojump_clock, bad):
    async with open_world() as world:
        with pytest.raises(TypeError):
            world.store("a", 2, kind="strong", precondition=bad)
        with pytest.raises(TypeError):
            await world.enqueue("b", 2, kind="strong", precondition=bad)
        await assert_alive(world)


async def test_a_precondition_must_be_said(autojump_clock):
    async with open_world() as world:
        with pytest.raises(TypeError):
            world.pipeline.enqueue_nowait(world.blocks("a"))
        with pytest.raises(TypeError):
            await world.pipeline.enqueue(world.blocks("a"))


async def test_one_bad_set_of_many_takes_none_in(autojump_clock):
    other = FakeTier()
    async with open_world() as world:
        many = [world.blocks("a", 2, kind="strong"), other.weak([b"x"]), world.blocks("b", 2, kind="strong")]
        with pytest.raises(ValueError, match="source"):
            world.pipeline.enqueue_many(many, precondition=NO_WAIT)
        assert world.pipeline.statistics().enqueued == 0
        await assert_alive(world)


async def test_strong_blocks_that_were_given_away_before(autojump_clock):
    async with open_world() as world:
        blocks = world.blocks("a", 2, kind="strong")
        handle = world.ledger.took(world.pipeline, world.pipeline.enqueue_nowait(blocks, precondition=NO_WAIT))
        await handle.wait()
        neighbour = world.store("b", 2)
        with pytest.raises(ValueError, match="released"):
            world.pipeline.enqueue_nowait(blocks, precondition=NO_WAIT)
        assert (await neighbour.wait()).status is Status.COMPLETE
        await assert_alive(world)


async def test_strong_blocks_that_are_given_twice_at_once(autojump_clock):
    async with open_world(latency=10 * TICK) as world:
        blocks = world.blocks("a", 2, kind="strong")
        first = world.ledger.took(world.pipeline, world.pipeline.enqueue_nowait(blocks, precondition=NO_WAIT))
        with pytest.raises(ValueError, match="released"):
            world.ledger.took(world.pipeline, world.pipeline.enqueue_nowait(blocks, precondition=NO_WAIT))
        assert world.source.statistics().held_blocks == 2
        assert (await first.wait()).status is Status.COMPLETE


async def test_strong_blocks_that_are_given_twice_in_one_burst(autojump_clock):
    async with open_world() as world:
        blocks = world.blocks("a", 2, kind="strong")
        with pytest.raises(ValueError, match="can be taken only once"):
            world.pipeline.enqueue_many([blocks, world.blocks("b"), blocks], precondition=NO_WAIT)
        assert world.pipeline.statistics().enqueued == 0
        await assert_alive(world)


async def test_external_blocks_that_do_not_exist(autojump_clock):
    async with open_world() as world:
        for ids in ([-1], [10_000]):
            with pytest.raises(ValueError, match="no block"):
                world.source.external(ids, [b"a"])


async def test_blocks_of_a_size_that_the_destination_does_not_hold(autojump_clock):
    world = World()
    world.destination = FakeTier(64, 32)
    async with open_world(world=world) as world:
        handles = [world.store("a", 4, kind="strong"), world.store("b", 4)]
        for handle in handles:
            result = await handle.wait()
            assert result.status is Status.FAILED
            assert isinstance(result.error, TransferFailed)
            assert isinstance(result.error.__cause__, BlockSizeError)
        assert world.at_rest() == {}


# --- policies -----------------------------------------------------------------------------------------------------


class Hostile(dict):
    """A mapping that breaks when it is looked at."""

    def __contains__(self, key):
        raise RuntimeError("look elsewhere")


async def not_awaited():
    """Nobody awaits this."""


def said(value):
    """Its repr without the address in it: what a test is called is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


NONSENSE = [
    None,
    False,
    0,
    7,
    [],
    "no",
    [b"a0"],
    {b"a0"},
    Leased(None, lambda: None),
    Leased([b"a0"], lambda: None),
    Hostile(a0="no"),
    object(),
]


@pytest.mark.parametrize("answer", NONSENSE, ids=said)
@pytest.mark.parametrize("kind", ["plain", "async", "joined"])
async def test_a_policy_that_answers_nonsense(autojump_clock, answer, kind):
    def lie(keys):
        return answer if keys[0].startswith(b"a0") else {}

    policies = {"plain": [lie], "async": [Slow(TICK, lie)], "joined": [Answer(), lie]}[kind]
    async with open_world(policies=policies, on_policy_error="fail") as world:
        result = await world.stored("a", 4, kind="strong")
        assert result.status is Status.FAILED
        assert isinstance(result.error, PolicyFailed)
        await assert_alive(world)
        statistics = world.pipeline.statistics()
        assert (statistics.policy_errors, statistics.policy_timeouts) == (1, 0)


async def test_a_policy_that_answers_with_a_coroutine(autojump_clock):
    async with open_world(policies=[lambda keys: not_awaited()]) as world:
        result = await world.stored("a", 4)
        assert result.filtered == dict.fromkeys(keys_of("a", 4), "error")


async def test_a_policy_that_rejects_what_it_was_not_asked_about(autojump_clock):
    async with open_world(policies=[lambda keys: {b"elsewhere": "no", keys[0]: "yes"}]) as world:
        result = await world.stored("a", 2)
        assert result.filtered == {b"a0": "yes"}
        assert list(result.completed) == [b"a1"]


async def test_a_lease_that_cannot_be_given_back(autojump_clock, caplog):
    def broken():
        raise RuntimeError("the lock server is gone")

    async with open_world(policies=[lambda keys: Leased({}, broken)]) as world:
        assert (await world.stored("a", 2)).status is Status.COMPLETE
        assert "lease" in caplog.text


async def test_a_policy_that_hangs_and_swallows_its_cancel(autojump_clock):
    class Stubborn(Slow):
        async def evaluate(self, keys):
            if keys[0].startswith(b"a"):
                with trio.CancelScope(shield=True):
                    await trio.sleep(5.0)
            return {}

    async with open_world(policies=[Stubborn(0.0)], policy_timeout=2 * TICK) as world:
        handle = world.store("a", 2)
        assert (await world.stored("b", 2)).status is Status.COMPLETE
        await handle.wait()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_only_a_base_exception_of_a_policy_leaves(autojump_clock, error, kind):
    def interrupt(keys):
        if keys[0].startswith(b"a"):
            raise error
        return {}

    waits = Slow(lambda keys: 1_000.0 if keys[0].startswith(b"w") else 0.0, interrupt)
    world = World()
    with pytest.raises(type(error)):
        async with open_world(world=world, policies=[interrupt if kind == "plain" else waits], policy_timeout=2_000.0):
            world.store("w", 2, kind="strong", precondition=trio.Event())
            await wait_all_tasks_blocked()
            world.store("a", 2, kind="strong")
            await trio.sleep_forever()
    for handle in world.handles.values():
        assert handle.status is Status.FAILED, handle.result


# --- watchers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", ["admission", "batching", "pre_claim", "post_claim", "xfer_start", "xfer_end", "settled"]
)
async def test_an_instrument_that_raises_is_removed(autojump_clock, hook, caplog):
    async with open_world() as world:

        def broken(subject):
            raise RuntimeError("look away")

        world.pipeline.add_instrument(SimpleNamespace(**{hook: broken}))
        assert (await world.stored("a", 8)).status is Status.COMPLETE
        assert "look away" in caplog.text
        await assert_alive(world)


@pytest.mark.parametrize("status", [Status.QUEUED, Status.TRANSFERRING, Status.COMPLETE])
async def test_a_predicate_on_the_status_that_raises(autojump_clock, status, caplog):
    async with open_world(policies=[Slow(TICK)], latency=TICK) as world:
        handle = world.store("a", 8, kind="strong")

        def predicate(value):
            if value is status:
                raise RuntimeError("my predicate is wrong")
            return False

        async with trio.open_nursery() as nursery:

            async def watch():
                await handle.status_value.wait_value(predicate)

            nursery.start_soon(watch)
            await wait_all_tasks_blocked()
            assert (await handle.wait()).status is Status.COMPLETE
            nursery.cancel_scope.cancel()
        await assert_alive(world)


async def test_a_predicate_on_the_status_that_cancels(autojump_clock):
    async with open_world(policies=[Slow(TICK)]) as world:
        handle = world.store("a", 8, kind="strong")
        async with trio.open_nursery() as nursery:

            async def watch():
                await handle.status_value.wait_value(lambda value: value is Status.QUEUED and handle.request_cancel())

            nursery.start_soon(watch)
            await wait_all_tasks_blocked()
            assert (await handle.wait()).status is Status.CANCELLED
            nursery.cancel_scope.cancel()


# --- executors ----------------------------------------------------------------------------------------------------


class Liar(ForwardingTier):
    """Wraps a tier: its first reservation differs in one method."""

    def __init__(self, tier, **lies):
        super().__init__(tier)
        self.lies = lies
        self.reservation = None

    def reserve_nowait(self, *args):
        real = self.inner.reserve_nowait(*args)
        if self.reservation is not None:
            return real
        self.reservation = real
        parts = {name: getattr(real, name) for name in ("granted", "keep", "transfer", "release")}

        class Lying(Reservation):
            granted = property(lambda _: parts["granted"])
            keep = transfer = release = None

        made = Lying()
        for name, part in parts.items():
            if name != "granted":
                setattr(made, name, self.lies.get(name, part))
        if "granted" in self.lies:
            Lying.granted = property(lambda _: self.lies["granted"]())
        return made


def raising(*args):
    raise RuntimeError("a broken promise")


def transfer_that_answers(answer):
    async def transfer(source, refs):
        await trio.lowlevel.checkpoint()
        return answer

    return transfer


@pytest.mark.parametrize("answer", [None, 7, object(), [], [STORED] * 9, "stored", [None] * 8, {}], ids=said)
async def test_a_transfer_that_answers_nonsense_is_over_and_has_failed(autojump_clock, answer):
    world = World()
    tier = world.destination
    world.destination = Liar(tier, transfer=transfer_that_answers(answer))
    async with open_pipeline(world.source, world.destination, config=config_of()) as world.pipeline:
        handles = [world.store("a", 4, kind="strong"), world.store("b", 4)]
        for handle in handles:
            result = await handle.wait()
            assert result.status is Status.FAILED
            assert {type(error) for error in result.failed.values()} == {TransferFailed}
            assert len(result.failed) == 4
        assert world.pipeline.statistics().quarantined == 0
        assert world.source.statistics().held_blocks == tier.statistics().reserved_blocks == 0
        assert (await world.stored("c", 4)).status is Status.COMPLETE


@pytest.mark.parametrize("lie", ["keep", "granted"])
async def test_a_reservation_that_raises_is_asked_for_again_for_each_container_of_its_batch(autojump_clock, lie):
    world = World()
    tier = world.destination
    world.destination = Liar(tier, **{lie: raising})
    async with open_pipeline(world.source, world.destination, config=config_of()) as world.pipeline:
        handles = [world.store("a", 4, kind="strong"), world.store("b", 4)]
        world.evict(b"b0")
        for handle, n in zip(handles, (4, 3), strict=True):
            result = await handle.wait()
            assert result.status is Status.COMPLETE
            assert len(result.completed) == n
        assert world.source.statistics().held_blocks == 0
        assert tier.statistics().reserved_blocks == 0
        assert world.pipeline.statistics().pending_marks == 0
        assert (await world.stored("c", 4)).status is Status.COMPLETE


@pytest.mark.parametrize("error", [RuntimeError("bug"), CapacityError("never"), trio.WouldBlock()])
async def test_a_destination_whose_reserve_raises(autojump_clock, error):
    async with open_world() as world:

        async def reserve(*args):
            raise error

        world.faults.room = trio.Event()
        world.destination.reserve = reserve
        for handle in (world.store("a", 4, kind="strong"), world.store("b", 4)):
            result = await handle.wait()
            assert result.status is Status.FAILED
            assert isinstance(result.error, TransferFailed)
        world.faults.room = None
        await assert_alive(world)


@pytest.mark.parametrize("face", ["reserve", "reserve_nowait"])
async def test_a_destination_that_answers_no_reservation(autojump_clock, face):
    async with open_world() as world:

        async def reserve(*args):
            await trio.lowlevel.checkpoint()

        real = world.destination.reserve_nowait
        if face == "reserve":
            world.faults.room = trio.Event()
            world.destination.reserve = reserve
        else:
            world.destination.reserve_nowait = lambda *args: None
        with trio.fail_after(100.0):
            result = await world.stored("a", 4, kind="strong")
        assert result.status is Status.FAILED
        assert isinstance(result.error, TransferFailed | DestinationFull)
        world.faults.room = None
        world.destination.reserve_nowait = real
        await assert_alive(world)


async def test_one_that_is_cancelled_while_the_destination_refuses_is_not_parked_again(autojump_clock):
    async with open_world(min_batch_size=4) as world:

        async def reserve(*args):
            await trio.sleep(TICK)
            handles[1].request_cancel()
            raise CapacityError("too many at once")

        world.faults.room = trio.Event()
        world.destination.reserve = reserve
        handles = [world.store(label, 2) for label in "ab"]
        assert (await handles[1].wait()).status is Status.CANCELLED
        assert trio.current_time() == TICK
        assert (await handles[0].wait()).status is Status.FAILED


async def test_a_source_that_raises_in_the_middle_of_an_upgrade(autojump_clock):
    async with open_world(min_batch_size=6) as world:
        upgrade = world.source.upgrade
        calls = []

        def broken(keys):
            calls.append(keys)
            if len(calls) == 2:
                raise RuntimeError("the index is damaged")
            return upgrade(keys)

        handles = [world.store("a", 2), world.store("b", 2, kind="strong"), world.store("c", 2)]
        world.source.upgrade = broken
        for handle in handles:  # committed: every block has an end; here they are asked for again, each for itself
            result = await handle.wait()
            assert result.status is Status.COMPLETE
            assert len(result.completed) == 2
        assert len(calls) == 4
        assert world.source.statistics().held_blocks == 0
        del world.source.upgrade
        await assert_alive(world)


async def test_full_is_an_answer_and_no_error(autojump_clock):
    assert issubclass(PipelineFull, trio.WouldBlock)
    async with open_world(budget_blocks=4) as world:
        with pytest.raises(PipelineFull):
            world.store("a", 4, precondition=trio.Event())
            world.store("b", 1)
