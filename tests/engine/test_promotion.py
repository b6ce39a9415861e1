"""Promotion: what a load brings from a slower tier is written into a faster one, behind the load's back, or counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing

import offload
from backends.abc import Key, Missed
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from backends.wrappers import Zstd, slot_bytes, wrap
from offload import NO_WAIT, Engine, EngineStatistics, LoadFailed, PipelineConfig, Status, open_engine, open_pipeline
from tests.support.engine_places import SIZE, Places, cancelled_at_checkpoint, keys_of, payloads, room

EVICTING = PipelineConfig(on_destination_full="evict")


async def load(engine: Engine, keys: Sequence[Key], **options: object) -> offload.LoadResult:
    """Look up and load; the bytes must be right."""
    async with await engine.lookup(keys) as hit:
        buffers, destination = room(len(hit))
        result = await engine.load(hit, destination, **options)  # type: ignore[arg-type]
        assert buffers[: result.loaded] == payloads(keys[: result.loaded])
        return result


def ups(statistics: EngineStatistics) -> tuple[int, dict[str, int], int]:
    """Promoted, refused, under way."""
    return statistics.promoted_blocks, dict(statistics.promotions_refused), statistics.promoting_blocks


def assert_nothing_staged(engine: Engine) -> None:
    for route_up in engine._promoter.routes_up.values():
        assert not route_up.staging._there and not route_up.staging._held and not route_up._ends


# --- what goes up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("promote", [True, "a"])
async def test_what_comes_from_a_slower_tier_is_in_the_faster_one_afterwards(promote: bool | str) -> None:
    places, keys = Places(), keys_of(8)
    places["a"].fill(keys[:3])
    places["b"].fill(keys[1:])
    async with places.open() as engine:
        assert (await load(engine, keys, promote=promote)).loaded == 8
        await engine.drain()
        assert ups(engine.statistics()) == (5, {}, 0)
        assert places["a"].contains_nowait(keys) == set(keys) and places["a"].copied == keys[3:]
        await places.assert_sound("a", keys)
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("a", 8)]
        assert_nothing_staged(engine)
    places.assert_at_rest()


@pytest.mark.parametrize(
    ("default", "said", "up"),
    [
        (False, None, None),
        (False, False, None),
        (True, False, None),
        (True, None, "a"),
        ("b", None, "b"),
        (False, True, "a"),
        (True, "b", "b"),
        (False, "c", None),  # it is there
    ],
)
async def test_where_to_is_said_by_the_load_or_by_the_engine(
    default: bool | str, said: bool | str | None, up: str | None
) -> None:
    places, keys = Places(3), keys_of(4)
    places["c"].fill(keys)
    async with places.open(promote=default) as engine:
        await load(engine, keys, promote=said)
        await engine.drain()
        assert [name for name in "ab" if places[name].contains_nowait(keys)] == ([up] if up else [])
        assert ups(engine.statistics()) == (4 if up else 0, {}, 0)


async def test_each_run_goes_up_from_where_it_came() -> None:
    places, keys = Places(3), keys_of(9)
    places["a"].fill(keys[:2])
    places["b"].fill(keys[2:4] + keys[7:])
    places["c"].fill(keys[4:7])
    async with places.open() as engine:
        await load(engine, keys, promote="b")
        await engine.drain()
        assert places["b"].contains_nowait(keys) == set(keys[2:])
        await load(engine, keys, promote=True)
        await engine.drain()
        assert places["a"].contains_nowait(keys) == set(keys)
        assert ups(engine.statistics()) == (3 + 7, {}, 0)
        await places.assert_sound("a", keys)


async def test_an_unknown_tier_is_refused_before_anything_is_loaded() -> None:
    places, keys = Places(), keys_of(2)
    places["b"].fill(keys)
    async with places.open() as engine, await engine.lookup(keys) as hit:
        with pytest.raises(ValueError, match="promote = 'z': must be true, false, or one of a, b"):
            await engine.load(hit, room(2)[1], promote="z")
        assert engine.statistics().loads == 0
    with pytest.raises(offload.ConfigError, match="promote = 'z'"):
        places.open(promote="z")


async def test_a_promoted_block_is_not_fed_down_again() -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    async with places.open(promote=True) as engine:
        await load(engine, keys)
        await engine.drain()
        assert engine.statistics().pipelines["b"].enqueued == 0
        assert places["b"].copied == []


async def test_only_the_usable_prefix_goes_up() -> None:
    places, keys = Places(), keys_of(6)
    places["b"].fill(keys)
    places["b"].damage(keys[2])
    async with places.open(promote=True, on_load_failure="fail") as engine:
        with pytest.raises(LoadFailed):
            await load(engine, keys)
        await engine.drain()
        assert places["a"].contains_nowait(keys) == set(keys[:2])
        assert ups(engine.statistics()) == (2, {}, 0)


# --- a load does not wait for it ----------------------------------------------------------------------------------


async def test_the_answer_does_not_wait_for_the_copy(autojump_clock: object) -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    places["a"].faults.gate = gate = trio.Event()
    async with places.open(promote=True) as engine:
        assert (await load(engine, keys)).loaded == 4
        await trio.testing.wait_all_tasks_blocked()
        assert ups(engine.statistics()) == (0, {}, 4)
        gate.set()
        await engine.drain()
        assert ups(engine.statistics()) == (4, {}, 0)


async def test_the_places_of_a_load_are_the_callers_again_at_once() -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    places["a"].faults.gate = gate = trio.Event()
    async with places.open() as engine:
        async with await engine.lookup(keys) as hit:
            buffers, destination = room(4)
            await engine.load(hit, destination, promote=True)
            for buffer in buffers:
                buffer[:] = bytes(SIZE)
        gate.set()
        await engine.drain()
        assert places["a"].contains_nowait(keys) == set(keys)
        await places.assert_sound("a", keys)


async def test_a_load_that_was_cancelled_promotes_nothing(autojump_clock: object) -> None:
    places, keys = Places(latency=1.0), keys_of(4)
    places["b"].fill(keys)
    async with places.open(promote=True) as engine:
        async with await engine.lookup(keys) as hit:
            with trio.move_on_after(0.5) as scope:
                await engine.load(hit, room(4)[1])
        assert scope.cancelled_caught
        await engine.drain()
        assert ups(engine.statistics()) == (0, {}, 0)
        assert not places["a"].contains_nowait(keys)


async def test_the_callers_cancel_does_not_reach_it(autojump_clock: object) -> None:
    places, keys = Places(latency=1.0), keys_of(4)
    places["b"].fill(keys)
    async with places.open(promote=True) as engine:
        with trio.CancelScope() as scope:
            await load(engine, keys)
            scope.cancel()
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        await engine.drain()
        assert ups(engine.statistics()) == (4, {}, 0)
        await places.assert_sound("a", keys)
        assert places["a"].contains_nowait(keys) == set(keys)


async def test_one_promotion_reads_at_a_time(autojump_clock: object) -> None:
    places = Places(latency=1.0)
    groups = [keys_of(2, salt) for salt in "xyz"]
    reading = most = 0
    tier_load = places["b"].load

    async def counted(lease, destination):  # type: ignore[no-untyped-def]
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            return await tier_load(lease, destination)
        finally:
            reading -= 1

    async with places.open(promote=True) as engine:
        async with trio.open_nursery() as nursery:
            for keys in groups:
                places["b"].fill(keys)
                nursery.start_soon(load, engine, keys)
        places["b"].load = counted  # type: ignore[method-assign]
        await engine.drain()
        assert ups(engine.statistics()) == (6, {}, 0) and most == 1


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PipelineConfig(), PipelineConfig(on_destination_full="fail")])
async def test_a_full_tier_refuses_what_does_not_fit(config: PipelineConfig) -> None:
    places, keys, others = Places(capacity=16), keys_of(4), keys_of(14, "other")
    places["a"].fill(others)
    places["b"].fill(keys)
    async with places.open(promote=True, config=config) as engine:
        await load(engine, keys)
        await engine.drain()
        assert ups(engine.statistics()) == (2, {"full": 2}, 0)
        assert places["a"].contains_nowait(keys) == set(keys[:2])
        assert places["a"].contains_nowait(others) == set(others)


async def test_a_tier_whose_route_evicts_does_so_for_a_promotion() -> None:
    places, keys, others = Places(capacity=16), keys_of(4), keys_of(16, "other")
    places["a"].fill(others)
    places["b"].fill(keys)
    async with places.open(promote=True, config=EVICTING) as engine:
        await load(engine, keys)
        await engine.drain()
        promoted, refused, _ = ups(engine.statistics())
        assert promoted + refused.get("full", 0) == 4  # what its eviction policy does not admit is refused
        assert len(places["a"].contains_nowait(keys)) == promoted > 0
        await places.assert_sound("a", keys)


async def test_where_everything_is_held_a_promotion_gives_up(autojump_clock: object) -> None:
    places, keys, others = Places(capacity=4), keys_of(4), keys_of(4, "other")
    places["a"].fill(others)
    places["b"].fill(keys)
    async with places.open(promote=True, config=EVICTING) as engine, await engine.lookup(others):
        await load(engine, keys)
        before = trio.current_time()
        await engine.drain()
        assert trio.current_time() - before <= 1.1
        assert ups(engine.statistics()) == (0, {"full": 4}, 0)
        assert_nothing_staged(engine)


async def test_what_is_there_already_is_not_read_again() -> None:
    places, keys = Places(3), keys_of(4)
    places["c"].fill(keys)
    places["a"].fill(keys[1:3])
    async with places.open() as engine:
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("c", 1), ("a", 2), ("c", 1)]
            places["a"].pool.delete([keys[0]])
            await engine.load(hit, room(4)[1], promote=True)
            places["a"].fill(keys[:1])  # somebody was faster
        await engine.drain()
        assert ups(engine.statistics()) == (1, {"duplicate": 1}, 0)
        assert places["c"].statistics().loaded == 2 + 1


async def test_what_another_pipeline_brings_is_not_brought_twice(autojump_clock: object) -> None:
    places, keys = Places(), keys_of(4)
    places.source.fill(keys)
    places["b"].fill(keys)
    places["a"].faults.gate = gate = trio.Event()
    async with places.open() as engine:
        stored = await engine.store(places.source.weak(keys), precondition=NO_WAIT)
        await trio.testing.wait_all_tasks_blocked()
        await load(engine, keys, promote=True)
        await trio.testing.wait_all_tasks_blocked()
        assert ups(engine.statistics()) == (0, {"duplicate": 4}, 0)
        gate.set()
        assert (await stored.wait()).status is Status.COMPLETE
    assert places["a"].copied == keys


async def test_no_more_than_promotion_blocks_are_under_way(autojump_clock: object) -> None:
    source_places, keys = Places(), keys_of(12)
    source_places["b"].fill(keys)
    config = offload.EngineConfig(tiers=source_places.tiers, promote=True, promotion_blocks=5)
    source_places["a"].faults.gate = gate = trio.Event()
    async with offload.open_engine(source_places.source, config) as engine:
        await load(engine, keys[:8])
        assert ups(engine.statistics()) == (0, {"busy": 3}, 5)
        await load(engine, keys[8:])
        assert ups(engine.statistics()) == (0, {"busy": 7}, 5)
        gate.set()
        await engine.drain()
        assert ups(engine.statistics()) == (5, {"busy": 7}, 0)
        assert source_places["a"].contains_nowait(keys) == set(keys[:5])


def lost(places: Places, key: Key) -> None:
    places["b"].pool.delete([key])


def damaged(places: Places, key: Key) -> None:
    places["b"].damage(key)


def missed(places: Places, key: Key) -> None:
    places["b"].faults.missing[key] = "torn"


@pytest.mark.parametrize(("happens", "arrive"), [(lost, 2), (damaged, 3), (missed, 3)])
async def test_what_is_lost_or_damaged_meanwhile_does_not_go_up(
    happens: Callable[[Places, Key], None], arrive: int
) -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    async with places.open(promote=True) as engine:
        await load(engine, keys)
        happens(places, keys[2])  # before the promotion reads it: nothing has run since the load's answer
        await engine.drain()
        assert ups(engine.statistics()) == (arrive, {"gone": 4 - arrive}, 0)
        assert keys[2] not in places["a"].contains_nowait(keys)
        await places.assert_sound("a", keys)
        assert_nothing_staged(engine)
    places.assert_at_rest()


@pytest.mark.parametrize("where", ["reading", "copying", "asking"])
async def test_a_tier_that_fails_is_counted_and_no_error(where: str) -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)

    async def no_pin(keys: Sequence[Key]) -> None:
        raise OSError("gone")

    async with places.open(promote=True) as engine:
        if where == "copying":
            places["a"].faults.error = OSError("disk")
        await load(engine, keys)
        if where == "reading":
            places["b"].faults.load_error = OSError("disk")
        elif where == "asking":
            places["b"].pin = no_pin  # type: ignore[method-assign,assignment]
        await engine.drain()
        assert ups(engine.statistics()) == (0, {"failed": 4}, 0)
        assert_nothing_staged(engine)
    assert not places["a"].contains_nowait(keys)
    places.assert_at_rest()


# --- the end ------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_engine_ends_what_is_being_read(autojump_clock: object) -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    async with places.open(promote=True) as engine:
        await load(engine, keys)
        places["b"].latency = 3.0
        await trio.testing.wait_all_tasks_blocked()
        before = trio.current_time()
    assert trio.current_time() - before <= 3.0  # the copy of a load cannot be left
    assert ups(engine.statistics()) == (0, {"closed": 4}, 0)
    assert_nothing_staged(engine)
    places.assert_at_rest()


async def test_the_end_of_the_engine_waits_for_what_is_being_copied(autojump_clock: object) -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    places["a"].latency = 3.0
    async with places.open(promote=True) as engine:
        await load(engine, keys)
        await trio.testing.wait_all_tasks_blocked()
    assert ups(engine.statistics()) == (4, {}, 0)
    await places.assert_sound("a", keys)
    assert places["a"].contains_nowait(keys) == set(keys)
    places.assert_at_rest()


async def test_a_copy_that_never_ends_does_not_keep_the_engine(autojump_clock: object) -> None:
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    places["a"].faults.hang = True
    async with places.open(promote=True, config=PipelineConfig(drain_timeout=2.0)) as engine:
        await load(engine, keys)
        await trio.testing.wait_all_tasks_blocked()
        before = trio.current_time()
    assert trio.current_time() - before == pytest.approx(2.0)
    assert ups(engine.statistics()) == (0, {"failed": 4}, 0)
    assert not places["a"].contains_nowait(keys)


async def test_what_a_promotion_without_an_end_holds_is_shown_and_can_be_released(autojump_clock: object) -> None:
    """The ways up are no routes: their quarantine was nowhere to be seen, and the room in the faster tier gone for good."""
    places, keys = Places(), keys_of(4)
    places["b"].fill(keys)
    places["a"].faults.hang = True
    async with places.open(promote=True, config=PipelineConfig(transfer_timeout=2.0)) as engine:
        assert engine.quarantine == [] and engine.statistics().quarantined == 0
        await load(engine, keys)
        await engine.drain()
        assert [list(entry.keys) for entry in engine.quarantine] == [keys]
        assert engine.statistics().quarantined == 1
        assert places["a"].statistics().reserved_blocks == 4
        for entry in engine.quarantine:
            entry.release()
        assert engine.quarantine == [] and engine.statistics().quarantined == 0
    places.assert_at_rest()


async def test_cancelled_at_any_await_a_load_promotes_all_or_nothing(autojump_clock: object) -> None:
    caught = 0
    for nth in range(30):
        places, keys = Places(latency=0.5), keys_of(8)
        places["a"].fill(keys[:2])
        places["b"].fill(keys[2:])
        async with places.open(promote=True) as engine:

            async def body(engine: Engine = engine, keys: Sequence[Key] = keys) -> None:
                await load(engine, keys)

            with trio.fail_after(60):
                caught += await cancelled_at_checkpoint(nth, body)
            await engine.drain()
            assert ups(engine.statistics()) in [(0, {}, 0), (6, {}, 0)]
            assert len(places["a"]) == 2 + engine.statistics().promoted_blocks
            await places.assert_sound("a", keys)
            assert_nothing_staged(engine)
            places.assert_at_rest()
    assert 1 <= caught < 30


async def test_wherever_the_engine_ends_nothing_of_a_promotion_is_left(autojump_clock: object) -> None:
    """Its own awaits: every tick at which the end can come while it is under way."""
    promoted = set()
    for nth in range(40):
        places, keys = Places(latency=0.5), keys_of(6)
        places["b"].fill(keys)
        async with places.open(promote=True) as engine:
            await load(engine, keys)
            for _ in range(nth):
                await trio.sleep(0.05)
        assert_nothing_staged(engine)
        places.assert_at_rest()
        await places.assert_sound("a", keys)
        statistics = engine.statistics()
        assert statistics.promoted_blocks == len(places["a"]) and statistics.promoting_blocks == 0
        assert statistics.promoted_blocks + sum(statistics.promotions_refused.values()) == 6
        assert places["b"].contains_nowait(keys) == set(keys)
        promoted.add(statistics.promoted_blocks)
    assert promoted == {0, 6}


async def test_the_copy_is_what_the_slower_tier_has_verified() -> None:
    """With no checksum of its own the faster tier would believe anything."""
    places, keys = Places(), keys_of(3)
    places["a"].checksums = False
    places["b"].fill(keys)
    async with places.open(promote=True) as engine:
        async with await engine.lookup(keys) as hit:
            assert Missed("damaged") not in (await engine.load(hit, room(3)[1])).outcomes
        places["b"].damage(keys[1])
        await engine.drain()
        assert [places["a"].get(key) for key in keys] == [
            payload_of(keys[0], SIZE),
            None,
            payload_of(keys[2], SIZE),
        ]


# --- over real memory and files -----------------------------------------------------------------------------------


async def test_blocks_come_up_from_files_unharmed(tmp_path: Path) -> None:
    size, keys = 1 << 16, keys_of(40)
    source, host = MemoryTier(size, size), MemoryTier(64 * size, size)
    disk = FileTier(str(tmp_path), capacity_bytes=1 << 24, block_bytes=size)
    shelf = MemoryTier(64 * size, size)
    for key in keys:
        shelf.put(key, payload_of(key, size))
    async with offload.open_pipeline(shelf, disk) as pipeline:
        await (await pipeline.enqueue(shelf.weak(keys), precondition=NO_WAIT)).wait()
    async with offload.open_engine(source, [host, disk], promote=True) as engine:
        buffers = [bytearray(size) for _ in keys]
        for start in (0, 20):
            async with await engine.lookup(keys[start : start + 20]) as hit:
                result = await engine.load(hit, PagesDestination.over(buffers[start : start + 20]))
                assert result.loaded == 20
        assert buffers == [bytearray(payload_of(key, size)) for key in keys]
        await engine.drain()
        assert ups(engine.statistics()) == (40, {}, 0)
        assert [host.get(key) for key in keys] == [payload_of(key, size) for key in keys]
        assert_nothing_staged(engine)
    for tier in (host, disk):
        statistics = tier.statistics()
        assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0)
    disk.close()


# --- depths -------------------------------------------------------------------------------------------------------


async def test_what_goes_up_has_the_depths_that_the_slower_tier_knows() -> None:
    """Behind wrappers and the engine's breaker, too: what was stored chunk by chunk goes deepest first up there as well."""
    source, fast = MemoryTier(8 * SIZE, SIZE), MemoryTier(8 * SIZE, SIZE)
    size = slot_bytes(SIZE, Zstd())
    slow = wrap(MemoryTier(8 * size, size), Zstd(), block_bytes=SIZE)
    keys = keys_of(4)
    for key in keys:
        source.put(key, payload_of(key, SIZE))
    async with open_pipeline(source, slow) as pipeline:
        for start in (0, 2):
            await pipeline.enqueue_nowait(
                source.weak(keys[start : start + 2], depths=[start, start + 1]), NO_WAIT
            ).wait()
    async with open_engine(source, {"fast": fast, "slow": slow}, promote=True) as engine:
        assert (await load(engine, keys)).loaded == 4
        await engine.drain()
        assert engine.statistics().promoted_blocks == 4
    assert fast.depths_of(keys) == [0, 1, 2, 3]


async def test_a_tier_that_fails_at_its_depths_costs_nobody_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    places, keys = Places(), keys_of(3)
    places["b"].fill(keys)
    monkeypatch.setattr(places["b"], "depths_of", lambda keys: [1])
    async with places.open(promote=True) as engine:
        assert (await load(engine, keys)).loaded == 3
        await engine.drain()
        assert places["a"].contains_nowait(keys) == set(keys)
