"""An engine whose tiers are chained on eviction: over memory, files and pages."""

from __future__ import annotations

import random

import attrs
import pytest
import trio

from backends.abc import LOADED, Deletion, Key
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import FakeTier, payload_of
from maru import MaruHandler
from maru.eviction import LRU
from maru.testing import open_test_server
from offload import NO_WAIT, BatchConfig, ConfigError, EngineConfig, PipelineConfig, Route, Status, open_engine
from offload._pipeline.spill import Spilling
from tests.support import determinism

SIZE = 4096
NAMES = [b"block %d" % number for number in range(12)]
CONFIG = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))


def memory(blocks: int) -> MemoryTier:
    return MemoryTier(blocks * SIZE, SIZE, eviction=LRU())


def source_of(keys: list[Key]) -> MemoryTier:
    source = memory(len(keys))
    for key in keys:
        source.put(key, payload_of(key, SIZE))
    return source


async def store_one_by_one(engine, keys):
    for key in keys:
        handle = await engine.store(engine.source.weak([key]), precondition=NO_WAIT)
        assert (await handle.wait()).status is Status.COMPLETE


async def all_are_found(engine, keys):
    """In one prefix, wherever they lie, with the right bytes."""
    buffers = [bytearray(SIZE) for _ in keys]
    async with await engine.lookup(keys) as hit:
        assert list(hit.keys) == keys, hit
        result = await engine.load(hit, PagesDestination.over(buffers))
        assert list(result.outcomes) == [LOADED] * len(keys)
        runs = hit.runs
    assert buffers == [bytearray(payload_of(key, SIZE)) for key in keys]
    return runs


def at_rest(engine):
    for tier in engine.tiers.values():
        statistics = tier.statistics()
        assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0)
    for name, spills in engine.statistics().spills.items():
        assert (spills.under_way, spills.dropped) == (0, {}), name


async def test_memory_over_files(tmp_path):
    disk = FileTier(tmp_path / "blocks", 64 * SIZE)
    async with open_engine(source_of(NAMES), [memory(4), disk], chain="on_evict") as engine:
        await store_one_by_one(engine, NAMES)
        assert await all_are_found(engine, NAMES) == [("filetier", 8), ("memorytier", 4)]
        assert engine.statistics().spills["filetier"].spilled == 8
        assert disk.statistics().stored == 8
        at_rest(engine)
    disk.close()


async def test_memory_over_pages():
    async with open_test_server() as server:
        handler = MaruHandler(server_url=server.endpoints[0], chunk_size_bytes=SIZE, pool_size=2 << 20)
        tiers = [memory(4), MaruTier(handler)]
        async with open_engine(source_of(NAMES), tiers, chain="on_evict", config=CONFIG) as engine:
            await store_one_by_one(engine, NAMES)
            assert await all_are_found(engine, NAMES) == [("maru", 8), ("memorytier", 4)]
            assert engine.statistics().spills["maru"].spilled == 8
            at_rest(engine)


async def test_memory_over_files_over_pages(tmp_path):
    disk = FileTier(tmp_path / "blocks", 4 * SIZE, eviction=LRU())
    async with open_test_server() as server:
        handler = MaruHandler(server_url=server.endpoints[0], chunk_size_bytes=SIZE, pool_size=2 << 20)
        tiers = [memory(4), disk, MaruTier(handler)]
        async with open_engine(source_of(NAMES), tiers, chain="on_evict", config=CONFIG) as engine:
            await store_one_by_one(engine, NAMES)
            assert await all_are_found(engine, NAMES) == [("maru", 4), ("filetier", 4), ("memorytier", 4)]
            spills = engine.statistics().spills
            assert (spills["filetier"].spilled, spills["maru"].spilled) == (8, 4)
            at_rest(engine)
    disk.close()


async def test_a_batch_as_large_as_the_tier_pushes_all_of_the_others_down(autojump_clock):
    upper, lower, source = FakeTier(64, SIZE, eviction=LRU()), FakeTier(256, SIZE), FakeTier(128, SIZE)
    keys = [b"%d" % number for number in range(128)]
    source.fill(keys)
    async with open_engine(source, [upper, lower], chain="on_evict") as engine:
        for half in (keys[:64], keys[64:]):
            handle = await engine.store(source.weak(half), precondition=NO_WAIT)
            assert (await handle.wait()).status is Status.COMPLETE
        assert lower.contains_nowait(keys) == set(keys[:64])
        assert upper.contains_nowait(keys) == set(keys[64:])
        at_rest(engine)


async def test_a_store_settles_in_the_first_tier_and_what_fits_goes_no_further(autojump_clock):
    upper, lower, source = FakeTier(64, SIZE), FakeTier(256, SIZE), FakeTier(64, SIZE)
    source.fill(NAMES)
    async with open_engine(source, [upper, lower], chain="on_evict", config=CONFIG) as engine:
        handle = await engine.store(source.weak(NAMES), precondition=NO_WAIT)
        result = await handle.wait()
        assert (result.status, dict(result.routes)) == (Status.COMPLETE, {})
        await engine.drain()
    assert lower.batches == []


async def test_what_is_promoted_pushes_others_down(autojump_clock):
    upper, lower, source = FakeTier(4, SIZE, eviction=LRU()), FakeTier(64, SIZE), FakeTier(64, SIZE)
    source.fill(NAMES)
    async with open_engine(source, [upper, lower], chain="on_evict", config=CONFIG, promote=True) as engine:
        await store_one_by_one(engine, NAMES)
        assert upper.contains_nowait(NAMES) == set(NAMES[8:])
        assert await all_are_found(engine, NAMES[:2]) == [("faketier-2", 2)]
        await engine.drain()
        assert upper.contains_nowait(NAMES) == {*NAMES[:2], *NAMES[10:]}
        assert lower.contains_nowait(NAMES) == set(NAMES[:10])
        assert engine.statistics().promoted_blocks == 2
        at_rest(engine)


async def test_what_leaves_is_not_deleted_and_what_has_left_is(autojump_clock):
    upper, lower, source = FakeTier(2, SIZE, eviction=LRU()), FakeTier(64, SIZE), FakeTier(64, SIZE)
    source.fill(NAMES)
    async with open_engine(source, [upper, lower], chain="on_evict", config=CONFIG) as engine:
        await store_one_by_one(engine, NAMES[:2])
        gate = lower.faults.gate = trio.Event()
        handle = await engine.store(source.weak(NAMES[2:3]), precondition=NO_WAIT)
        await trio.testing.wait_all_tasks_blocked()
        assert await engine.delete(NAMES[:1]) == [Deletion.PINNED]
        gate.set()
        await handle.wait()
        assert await engine.delete(NAMES[:1]) == [Deletion.DELETED]
        assert not lower.contains_nowait(NAMES[:1])


async def test_a_broken_lower_tier_is_no_error_of_the_engine(autojump_clock):
    upper, lower, source = FakeTier(4, SIZE, eviction=LRU()), FakeTier(64, SIZE), FakeTier(64, SIZE)
    source.fill(NAMES)
    lower.faults.error = OSError("the disk is gone")
    async with open_engine(source, [upper, lower], chain="on_evict", config=CONFIG) as engine:
        await store_one_by_one(engine, NAMES)
        dropped = dict(engine.statistics().spills["faketier-2"].dropped)
        assert sum(dropped.values()) == 8
        assert dropped.keys() <= {"failed", "unavailable"}
        assert upper.contains_nowait(NAMES) == set(NAMES[8:])


async def never_a_miss(seed: int) -> dict[str, int]:
    """What was stored is found by every lookup and loaded right, whatever is stored, spilled and promoted meanwhile."""
    chance = random.Random(seed)
    keys = [b"%d" % number for number in range(30)]
    upper, lower = FakeTier(6, SIZE, eviction=LRU()), FakeTier(64, SIZE, latency=chance.choice([0.0, 0.003]))
    middle = [FakeTier(chance.choice([5, 9]), SIZE, eviction=LRU(), latency=0.001)] if chance.random() < 0.5 else []
    source = FakeTier(64, SIZE)
    source.fill(keys)
    stored: list[Key] = []
    async with open_engine(
        source, [upper, *middle, lower], chain="on_evict", config=CONFIG, promote=chance.random() < 0.7
    ) as engine:

        async def stores() -> None:
            for _ in range(15):
                chosen = chance.sample(keys, chance.randrange(1, 6))
                handle = await engine.store(source.weak(chosen), precondition=NO_WAIT)
                await trio.sleep(chance.choice([0.0, 0.002, 0.01]))
                if chance.random() < 0.3:
                    await handle.cancel()
                else:
                    result = await handle.wait()
                    assert result.status is Status.COMPLETE
                    # What somebody else was bringing ("pending") may have been cancelled after all.
                    stored.extend([key for key in chosen if result.filtered.get(key, "present") == "present"])

        async def reads() -> None:
            for _ in range(30):
                await trio.sleep(chance.choice([0.0, 0.001, 0.005]))
                wanted = list(dict.fromkeys(chance.choices(stored, k=4))) if stored else []
                buffers = [bytearray(SIZE) for _ in wanted]
                async with await engine.lookup(wanted) as hit:
                    assert list(hit.keys) == wanted, (seed, hit, wanted)
                    await trio.sleep(chance.choice([0.0, 0.004]))
                    result = await engine.load(hit, PagesDestination.over(buffers))
                    assert result.loaded == len(wanted), (seed, result)
                assert buffers == [bytearray(payload_of(key, SIZE)) for key in wanted], seed

        async with trio.open_nursery() as nursery:
            for task in (stores, stores, reads, reads):
                nursery.start_soon(task)
        await engine.drain()
        at_rest(engine)
        statistics = engine.statistics()
        return {
            "spilled": sum(spills.spilled for spills in statistics.spills.values()),
            "stayed": sum(spills.stayed for spills in statistics.spills.values()),
            "promoted": statistics.promoted_blocks,
        }


def test_what_was_stored_is_never_a_miss() -> None:
    seen = dict.fromkeys(["spilled", "stayed", "promoted"], 0)
    for seed in range(8):
        for what, n in determinism.run(never_a_miss, seed, seed=seed).items():
            seen[what] += n
    assert all(seen.values()), seen


def test_a_spill_that_lets_go_too_early_is_a_miss_that_this_finds(monkeypatch) -> None:
    carry = Spilling._carry

    async def eager(self, victims):
        self.tier.pool._over(victims._slots)
        victims._slots = ()
        await carry(self, victims)

    monkeypatch.setattr(Spilling, "_carry", eager)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        test_what_was_stored_is_never_a_miss()


# --- what can be said -------------------------------------------------------------------------------------------------


def on_evict(source, tiers, **said):
    return open_engine(source, tiers, **{"chain": "on_evict", "config": CONFIG, **said})


@pytest.mark.parametrize("mode", ["wait", "partial", "fail"])
async def test_a_tier_that_evicts_nothing_is_refused(mode):
    config = attrs.evolve(CONFIG, on_destination_full=mode)
    with pytest.raises(ConfigError, match="must be evict"):
        async with on_evict(FakeTier(), [FakeTier(), FakeTier()], config=config):
            raise AssertionError("it must not open")


async def test_two_routes_from_one_tier_are_refused():
    tiers = {"host": FakeTier(), "disk": FakeTier(), "far": FakeTier()}
    with pytest.raises(ConfigError, match="only one route may start at a tier: host already has one"):
        async with on_evict(FakeTier(), tiers, routes=[Route("far", source="host")]):
            raise AssertionError("it must not open")


async def test_a_tier_that_tells_nobody_of_its_evictions_is_refused():
    class Silent(FakeTier):
        capabilities = attrs.evolve(FakeTier.capabilities, reports_evictions=False)

    with pytest.raises(ConfigError, match="does not report its evictions"):
        async with on_evict(FakeTier(), [Silent(), FakeTier()]):
            raise AssertionError("it must not open")


async def test_a_route_that_says_so_spills_nothing(autojump_clock):
    tiers = {"host": FakeTier(2, SIZE, eviction=LRU()), "disk": FakeTier(64, SIZE)}
    source = FakeTier(64, SIZE)
    source.fill(NAMES)
    async with on_evict(source, tiers, routes=[Route("host", auto_chain=False)]) as engine:
        assert engine.statistics().spills == {}
        await store_one_by_one(engine, NAMES)
    assert len(tiers["disk"]) == 0


async def test_a_route_keeps_its_own_knobs_but_waits_no_longer_than_who_waits_for_it():
    own = PipelineConfig(on_destination_full="fail", max_concurrent_transfers=3, destination_timeout=600.0)
    tiers = {"host": FakeTier(), "disk": FakeTier()}
    async with on_evict(FakeTier(), tiers, routes=[Route("disk", pipeline=own)]) as engine:
        knobs = engine.pipelines[1].config
    assert (knobs.on_destination_full, knobs.max_concurrent_transfers, knobs.destination_timeout) == ("fail", 3, 15.0)


async def test_where_several_ways_lead_into_a_tier_the_hastiest_sets_the_pace():
    tiers = {"host": FakeTier(), "disk": FakeTier(), "far": FakeTier()}
    async with on_evict(FakeTier(), tiers, routes=[Route("disk", source="source")]) as engine:
        timeouts = {pipeline.name: pipeline.config.destination_timeout for pipeline in engine.pipelines}
    assert timeouts == {"host": 30.0, "source-disk": 30.0, "disk": 15.0, "far": 7.5}


async def test_a_configuration_says_it_too(autojump_clock):
    config = EngineConfig(
        tiers={"host": FakeTier(2, SIZE, eviction=LRU()), "disk": FakeTier(64, SIZE)},
        chain="on_evict",
        pipeline=PipelineConfig(on_destination_full="evict"),
    )
    source = FakeTier(64, SIZE)
    source.fill(NAMES)
    async with open_engine(source, config) as engine:
        await store_one_by_one(engine, NAMES)
        assert engine.statistics().spills["disk"].spilled == len(NAMES) - 2


async def test_an_engine_with_one_tier_chains_nothing():
    async with on_evict(FakeTier(), [FakeTier()]) as engine:
        assert engine.statistics().spills == {}
