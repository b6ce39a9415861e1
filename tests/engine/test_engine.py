"""The engine: what is found, what is held, what is usable, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import LOADED, Deletion, Failed, Key, Missed, ReadLease, Tier
from backends.base.slots import PagesDestination
from backends.memory import MemoryTier
from backends.testing import FakeTier, payload_of
from backends.wrappers import Zstd, slot_bytes, wrap
from offload import NO_WAIT, Engine, LoadFailed, Status, open_engine
from tests.support.engine_places import cancelled_at_checkpoint, keys_of

SIZE = 64


class Places:
    """A source and two tiers, and somewhere to load to."""

    def __init__(self, latency: float = 0.0) -> None:
        self.source = FakeTier(64, SIZE)
        self.upper = FakeTier(64, SIZE, latency=latency)
        self.lower = FakeTier(64, SIZE, latency=latency)

    def open(self, **options: object):  # type: ignore[no-untyped-def]
        return open_engine(self.source, [self.upper, self.lower], **options)  # type: ignore[arg-type]

    def assert_at_rest(self) -> None:
        for place in (self.source, self.upper, self.lower):
            statistics = place.statistics()
            assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0)


def room(n: int) -> tuple[list[bytearray], PagesDestination]:
    buffers = [bytearray(SIZE) for _ in range(n)]
    return buffers, PagesDestination.over(buffers)


def payloads(keys: Sequence[Key]) -> list[bytearray]:
    return [bytearray(payload_of(key, SIZE)) for key in keys]


# --- lookup -------------------------------------------------------------------------------------------------------


async def test_prefix_changes_tiers_as_often_as_needed() -> None:
    places, keys = Places(), keys_of(10)
    places.upper.fill(keys[0:2] + keys[5:7])
    places.lower.fill(keys[1:9])
    async with places.open() as engine, await engine.lookup(keys) as hit:
        assert hit.runs == [("faketier", 2), ("faketier-2", 3), ("faketier", 2), ("faketier-2", 2)]
        assert list(hit.keys) == keys[:9]
        buffers, destination = room(9)
        result = await engine.load(hit, destination)
        assert (result.loaded, result.outcomes) == (9, [LOADED] * 9)
        assert buffers == payloads(keys[:9])
    places.assert_at_rest()


async def test_a_gap_ends_the_prefix_whatever_lies_behind_it() -> None:
    places, keys = Places(), keys_of(6)
    places.upper.fill(keys[:2] + keys[3:])
    async with places.open() as engine, await engine.lookup(keys) as hit:
        assert len(hit) == 2
    async with places.open() as engine, await engine.lookup(keys[2:]) as hit:
        assert (len(hit), hit.runs) == (0, [])


async def test_a_block_in_both_tiers_is_read_from_the_faster_one() -> None:
    places, keys = Places(), keys_of(4)
    places.upper.fill(keys)
    places.lower.fill(keys)
    async with places.open() as engine, await engine.lookup(keys) as hit:
        assert hit.runs == [("faketier", 4)]
        assert places.lower.statistics().held_blocks == 0


async def test_lookup_of_nothing_finds_nothing() -> None:
    async with Places().open() as engine, await engine.lookup([]) as hit:
        result = await engine.load(hit, room(0)[1])
        assert (len(hit), result.loaded, list(result.outcomes)) == (0, 0, [])


class BrokenTier(FakeTier):
    async def pin(self, keys):  # type: ignore[no-untyped-def]
        await trio.lowlevel.checkpoint()
        raise OSError("the disk is gone")


async def test_lookup_leaves_out_a_broken_tier_and_names_it() -> None:
    source, upper, broken = FakeTier(), FakeTier(), BrokenTier()
    keys = keys_of(4)
    upper.fill(keys[:3])
    async with open_engine(source, [broken, upper]) as engine:
        async with await engine.lookup(keys) as hit:
            assert len(hit) == 3
            assert list(hit.unavailable) == ["brokentier"]
        assert engine.statistics().lookup_failures == {"brokentier": 1}


# --- pins ---------------------------------------------------------------------------------------------------------


async def test_a_hit_holds_its_blocks_against_deletion_and_eviction() -> None:
    source, upper = FakeTier(8), FakeTier(4)
    keys, others = keys_of(4), keys_of(4, "other")
    upper.fill(keys)
    source.fill(others)
    config = offload.PipelineConfig(on_destination_full="evict")
    async with open_engine(source, [upper], config=config) as engine:
        hit = await engine.lookup(keys)
        assert await engine.delete(keys) == [Deletion.PINNED] * 4
        handle = await engine.store(source.weak(others), precondition=NO_WAIT)
        await trio.testing.wait_all_tasks_blocked()
        assert not handle.status.terminal
        await engine.release(hit)
        assert (await handle.wait()).status is Status.COMPLETE
        assert upper.contains_nowait(keys) == set()


async def test_release_is_idempotent_and_releases_once() -> None:
    places, keys = Places(), keys_of(4)
    places.upper.fill(keys)
    async with places.open() as engine:
        first, second = await engine.lookup(keys), await engine.lookup(keys)
        await engine.release(first)
        await engine.release(first)
        assert first.released
        assert places.upper.statistics().held_blocks == 4
        async with second:
            pass
        places.assert_at_rest()
        with pytest.raises(ValueError, match="released"):
            await engine.load(first, room(4)[1])


async def test_a_hit_released_during_a_load_is_held_until_the_load_is_over(autojump_clock: object) -> None:
    places, keys = Places(latency=1.0), keys_of(4)
    places.upper.fill(keys)
    async with places.open() as engine:
        hit = await engine.lookup(keys)
        buffers, destination = room(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.load, hit, destination)
            await trio.testing.wait_all_tasks_blocked()
            await engine.release(hit)
            assert places.upper.statistics().held_blocks == 4
        assert buffers == payloads(keys)
        places.assert_at_rest()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_end_of_an_engine_releases_forgotten_hits_and_says_so(
    cancelled: bool, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    source, tier = FakeTier(), FakeTier()
    keys = [b"%d" % number for number in range(4)]
    tier.fill(keys)
    broken = await tier.pin(keys[:1])
    with trio.CancelScope() as scope:
        async with open_engine(source, [tier]) as engine:
            async with await engine.lookup(keys):
                pass
            first = await engine.lookup(keys)
            await engine.lookup(keys[:2])
            assert engine.statistics().open_hits == 2

            async def refuses(*args: object) -> None:
                raise OSError("not now")

            first._segments[0] = attrs.evolve(first._segments[0], lease=SimpleNamespace(__aexit__=refuses, keys=keys))
            if cancelled:
                scope.cancel()
    assert engine.statistics().open_hits == 0
    assert "2 hits were never released" in caplog.text and "could not be released" in caplog.text
    await broken.release()
    assert tier.statistics().held_blocks == len(keys)  # those whose release was refused: a broken tier, not a leak


async def test_a_lease_that_cannot_be_released_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    places, keys = Places(), keys_of(4)
    places.upper.fill(keys[:2])
    places.lower.fill(keys[2:])

    pin = places.upper.pin

    class Stuck(ReadLease):
        keys: Sequence[Key] = ()

        def __init__(self, lease: ReadLease) -> None:
            self.keys = lease.keys
            self.lease = lease

        async def release(self) -> None:
            await self.__aexit__()

        async def __aexit__(self, *exc: object) -> None:
            await self.lease.release()
            raise OSError("stuck")

    async def pin_for_ever(keys: Sequence[Key]) -> Stuck:
        return Stuck(await pin(keys))

    places.upper.pin = pin_for_ever  # type: ignore[method-assign,assignment]
    async with places.open() as engine:
        hit = await engine.lookup(keys)
        await engine.release(hit)  # a tier that fails is no error of whoever lets go
        places.assert_at_rest()
    assert "could not release a lease: OSError: stuck" in caplog.text


# --- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_tier", [True, False])
async def test_a_damaged_block_ends_what_is_usable(in_one_tier: bool) -> None:
    places, keys = Places(), keys_of(6)
    places.upper.fill(keys if in_one_tier else keys[:4])
    places.lower.fill(keys[4:])
    places.upper.damage(keys[2])
    async with places.open() as engine:
        async with await engine.lookup(keys) as hit:
            assert len(hit) == 6
            result = await engine.load(hit, room(6)[1])
            assert result.loaded == 2
            assert result.outcomes[2] == Missed("damaged")
            assert len(result.outcomes) == 6
            if not in_one_tier:
                assert list(result.outcomes[4:]) == [Missed("behind a gap")] * 2
                assert places.lower.statistics().loaded == 0
        async with await engine.lookup(keys) as again:
            assert len(again) == 2
        statistics = engine.statistics()
        assert statistics.load_failures == {"damaged": 1}
        assert (statistics.lookups, statistics.asked_blocks, statistics.hit_blocks) == (2, 12, 8)
        assert (statistics.loads, statistics.loaded_blocks) == (1, 2)
    places.assert_at_rest()


async def test_a_failing_tier_is_a_miss_or_an_error_as_chosen() -> None:
    places, keys = Places(), keys_of(4)
    places.upper.fill(keys[:1])
    places.lower.fill(keys[1:])
    places.lower.faults.load_error = OSError("read error")
    async with places.open() as engine, await engine.lookup(keys) as hit:
        result = await engine.load(hit, room(4)[1])
        assert result.loaded == 1
        assert isinstance(result.outcomes[1], Failed)
        assert engine.statistics().load_failures == {"failed": 3}
    async with places.open(on_load_failure="fail") as engine, await engine.lookup(keys) as hit:
        with pytest.raises(LoadFailed) as caught:
            await engine.load(hit, room(4)[1])
        assert caught.value.result.loaded == 1
        assert isinstance(caught.value.__cause__, OSError)
    places.assert_at_rest()


async def test_a_tier_that_answers_too_few_outcomes_loads_nothing() -> None:
    class Terse(FakeTier):
        async def load(self, lease, destination):  # type: ignore[no-untyped-def]
            return (await super().load(lease, destination))[1:]

    source, terse, keys = FakeTier(), Terse(), keys_of(3)
    terse.fill(keys)
    async with open_engine(source, [terse]) as engine, await engine.lookup(keys) as hit:
        assert (await engine.load(hit, room(3)[1])).loaded == 0


async def test_bad_destinations_are_refused_and_release_nothing() -> None:
    places, keys = Places(), keys_of(3)
    places.upper.fill(keys)
    async with places.open() as engine, await engine.lookup(keys) as hit:
        with pytest.raises(ValueError, match="do not fit"):
            await engine.load(hit, room(2)[1])
        with pytest.raises(ValueError, match="blocks of"):
            await engine.load(hit, PagesDestination.over([bytearray(SIZE * 2) for _ in keys]))
        buffers, destination = room(5)
        assert (await engine.load(hit, destination)).loaded == 3
        assert buffers == [*payloads(keys), bytearray(SIZE), bytearray(SIZE)]


# --- storing ------------------------------------------------------------------------------------------------------


async def test_a_store_reaches_every_tier_of_the_chain() -> None:
    places, keys = Places(), keys_of(12)
    places.source.fill(keys)
    async with places.open() as engine:
        assert [pipeline.name for pipeline in engine.pipelines] == ["faketier", "faketier-2"]
        handle = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        await engine.drain()
        assert handle.status is Status.COMPLETE
        assert places.lower.contains_nowait(keys) == set(keys)
        assert not (await handle.wait()).routes and list(await handle.wait_routes()) == ["faketier-2"]
        assert await engine.delete(keys[:2]) == [Deletion.DELETED] * 2
        async with await engine.lookup(keys) as hit:
            assert len(hit) == 0
        await places.upper.delete(keys[2:4])
        async with await engine.lookup(keys[2:]) as hit:
            assert hit.runs == [("faketier-2", 2), ("faketier", 8)]
    places.assert_at_rest()


async def test_without_a_chain_only_the_first_tier_is_fed() -> None:
    places, keys = Places(), keys_of(8)
    places.source.fill(keys)
    async with places.open(chain=False) as engine:
        engine.store_nowait(places.source.weak(keys), precondition=NO_WAIT)
        await engine.drain()
        assert len(engine.pipelines) == 1
        assert len(places.upper) == 8
        assert len(places.lower) == 0


async def test_by_default_what_is_present_is_not_stored_again() -> None:
    places, keys = Places(), keys_of(8)
    places.source.fill(keys)
    places.upper.fill(keys[:5])
    async with places.open() as engine:
        handle = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        assert (await handle.wait()).filtered == dict.fromkeys(keys[:5], "present")
    async with places.open(policies=[lambda keys: dict.fromkeys(keys, "no")]) as engine:
        handle = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        assert (await handle.wait()).filtered == dict.fromkeys(keys, "no")


async def test_delete_answers_for_all_tiers() -> None:
    places, keys = Places(), keys_of(4)
    places.upper.fill([keys[0], keys[1]])
    places.lower.fill([keys[1], keys[2]])
    async with places.open() as engine:
        lease = await places.lower.pin([keys[1]])
        assert await engine.delete(keys) == [Deletion.DELETED, Deletion.PINNED, Deletion.DELETED, Deletion.MISSING]
        await lease.release()
        assert await engine.delete(keys) == [Deletion.MISSING, Deletion.DELETED, Deletion.MISSING, Deletion.MISSING]


# --- leaving ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("body"), KeyError("x")])
async def test_errors_of_the_body_come_out_as_they_are(error: Exception) -> None:
    places = Places()
    places.source.fill(keys_of(4))

    async def body() -> None:
        async with places.open() as engine:
            await engine.store(places.source.weak(keys_of(4)), precondition=trio.Event())
            raise error

    with pytest.raises(type(error)) as caught:
        await body()
    assert caught.value is error
    places.assert_at_rest()


async def test_a_store_behind_the_end_is_refused() -> None:
    places = Places()
    async with places.open() as engine:
        pass
    with pytest.raises(offload.PipelineClosed):
        await engine.store(places.source.weak([]), precondition=NO_WAIT)


@pytest.mark.parametrize(
    ("tiers", "complaint"),
    [
        (lambda source: [], "at least one"),
        (lambda source: [source], "different places"),
        (lambda source: [FakeTier()] * 2, "different places"),
        (lambda source: [FakeTier(block_bytes=SIZE * 2)], "blocks of"),
    ],
)
def test_tiers_that_cannot_be_joined_are_refused(tiers: Callable[[Tier], list[Tier]], complaint: str) -> None:
    source = FakeTier()
    with pytest.raises(ValueError, match=complaint):
        open_engine(source, tiers(source))


async def test_the_blocks_of_a_tier_are_not_stored_into_it() -> None:
    tier = wrap(MemoryTier(8 * slot_bytes(SIZE, Zstd()), slot_bytes(SIZE, Zstd())), Zstd(), block_bytes=SIZE)
    assert tier.source is not None
    with pytest.raises(ValueError, match="different places"):
        async with offload.open_engine(tier.source, [tier]):
            raise AssertionError("it opened")


def test_an_unknown_way_to_fail_is_refused() -> None:
    with pytest.raises(ValueError, match="on_load_failure"):
        open_engine(FakeTier(), [FakeTier()], on_load_failure="again")  # type: ignore[arg-type]


# --- cancelled at every await -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["lookup", "load", "release", "delete", "with"])
async def test_cancelled_at_any_await_nothing_is_held(verb: str, autojump_clock: object) -> None:
    places, keys = Places(latency=0.5), keys_of(8)
    places.upper.fill(keys[:2] + keys[5:7])
    places.lower.fill(keys[2:5] + keys[7:])
    caught = 0
    async with places.open() as engine:
        for nth in range(40):
            _, destination = room(8)

            async def body(destination: PagesDestination = destination) -> None:
                if verb == "delete":
                    await engine.delete([])
                    return
                if verb == "with":
                    async with await engine.lookup(keys) as hit:
                        await engine.load(hit, destination)
                    return
                hit = await engine.lookup(keys)
                if verb == "lookup":
                    with trio.CancelScope(shield=True):
                        await engine.release(hit)
                    return
                try:
                    if verb == "load":
                        await engine.load(hit, destination)
                finally:
                    await engine.release(hit)

            with trio.fail_after(60):
                caught += await cancelled_at_checkpoint(nth, body)
            places.assert_at_rest()
    assert 1 <= caught < 40  # somewhere it was cancelled, and at last it was not


async def test_cancelled_delete_leaves_each_tier_consistent() -> None:
    for nth in range(6):
        places, keys = Places(), keys_of(4)
        places.upper.fill(keys)
        places.lower.fill(keys)
        async with places.open() as engine:

            async def body(engine: Engine = engine, keys: list[Key] = keys) -> None:
                await engine.delete(keys)

            await cancelled_at_checkpoint(nth, body)
            assert len(places.upper) in (0, 4)
            assert len(places.lower) in (0, 4)
        places.assert_at_rest()


async def test_cancelled_load_keeps_the_destination_until_the_copy_is_over(autojump_clock: object) -> None:
    places, keys = Places(latency=1.0), keys_of(4)
    places.upper.fill(keys)
    _, destination = room(4)
    async with places.open() as engine, await engine.lookup(keys) as hit:
        with trio.move_on_after(0.5):
            await engine.load(hit, destination)
        assert trio.current_time() >= 1.0
    places.assert_at_rest()


# --- over real memory ---------------------------------------------------------------------------------------------


async def test_blocks_pass_through_host_memory_unharmed() -> None:
    size, keys = 1 << 16, keys_of(24)
    source = MemoryTier(32 * size, size)
    host, below = MemoryTier(32 * size, size), MemoryTier(32 * size, size, checksums=False)
    for key in keys:
        source.put(key, payload_of(key, size))
    async with open_engine(source, [host, below]) as engine:
        handles = [await engine.store(source.weak(keys[at : at + 8]), precondition=NO_WAIT) for at in range(0, 24, 8)]
        await engine.drain()
        assert [handle.status for handle in handles] == [Status.COMPLETE] * 3
        await host.delete(keys[5:9])
        buffers = [bytearray(size) for _ in keys]
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("memorytier", 5), ("memorytier-2", 4), ("memorytier", 15)]
            assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == 24
        assert buffers == [bytearray(payload_of(key, size)) for key in keys]
        for tier in (source, host, below):
            assert tier.statistics().held_blocks == 0
