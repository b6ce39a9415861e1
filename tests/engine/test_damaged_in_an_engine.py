"""A bit flips in a tier of an engine, and the block is copied on: what is loaded is right or missed, wherever it lies then."""

from collections.abc import Sequence

import pytest
import trio

from backends.abc import LOADED, Key
from backends.base.slots import PagesDestination
from backends.memory import MemoryTier
from maru.eviction import LRU
from offload import NO_WAIT, BatchConfig, PipelineConfig, Status, open_engine
from tests.support.damaged_places import DESTINATIONS, SIZE, fill, flip, opened, payload

KEYS = [b"key %d" % number for number in range(12)]
BAD = KEYS[1]
BELOW = [("memory", lower) for lower in DESTINATIONS] + [
    (upper, lower) for upper in ("file", "wrapped memory", "wrapped file") for lower in ("memory", "maru", "hosted")
]
"""A tier that is a source, and one below it."""
ABOVE = [(upper, "memory") for upper in DESTINATIONS] + [
    ("memory", lower) for lower in ("file", "maru", "hosted", "wrapped file")
]
"""A tier, and one that it is promoted from."""
CONFIG = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))


def source_of(keys: Sequence[Key]) -> MemoryTier:
    source = MemoryTier(len(keys) * SIZE, SIZE, eviction=LRU())
    for key in keys:
        source.put(key, payload(key))
    return source


async def store(engine, keys):
    for key in keys:
        handle = await engine.store(engine.source.weak([key]), precondition=NO_WAIT)
        assert (await handle.wait()).status is Status.COMPLETE, handle


async def what_is_loaded(engine, keys):
    """The keys whose blocks are loaded, each alone; their bytes must be right."""
    there = []
    for key in keys:
        places = [bytearray(SIZE)]
        async with await engine.lookup([key]) as hit:
            result = await engine.load(hit, PagesDestination.over(places[: len(hit)]))
        if list(result.outcomes) == [LOADED]:
            assert bytes(places[0]) == payload(key), key
            there.append(key)
    return there


async def until(holds):
    with trio.fail_after(60):
        while not holds():  # noqa: ASYNC110  # a copy thread brings it about
            await trio.sleep(0.001)


@pytest.mark.parametrize(("upper", "lower"), BELOW)
async def test_what_is_spilled_is_right_or_gone(upper, lower, tmp_path):
    async with (
        opened(upper, tmp_path / "upper", 4) as above,
        opened(lower, tmp_path / "lower", 32) as below,
        open_engine(source_of(KEYS), {"above": above, "below": below}, chain="on_evict", config=CONFIG) as engine,
    ):
        await store(engine, KEYS[:4])
        flip(above, BAD)
        await store(engine, KEYS[4:])
        await until(lambda: not above.contains_nowait(KEYS[:4]))
        loaded = await what_is_loaded(engine, KEYS)
        assert set(KEYS) - set(loaded) == {BAD}  # alone: none of its neighbours is lost with it


@pytest.mark.parametrize("lower", DESTINATIONS)
async def test_what_is_damaged_in_the_source_is_stored_nowhere(lower, tmp_path):
    async with opened("memory", tmp_path / "upper", 16) as above, opened(lower, tmp_path / "lower", 32) as below:
        source = source_of(KEYS)
        async with open_engine(source, {"above": above, "below": below}, chain="on_store") as engine:
            flip(source, BAD)
            handle = await engine.store(source.weak(KEYS), precondition=NO_WAIT)
            result = await handle.wait()
            assert list(result.failed) == [BAD]
            assert set(result.completed) == set(KEYS) - {BAD}
            await engine.drain()
            assert set(KEYS) - set(await what_is_loaded(engine, KEYS)) == {BAD}


@pytest.mark.parametrize(("upper", "lower"), BELOW)
async def test_what_a_chain_takes_from_a_damaged_tier_is_right_or_missing(upper, lower, tmp_path):
    async with opened(upper, tmp_path / "upper", 16) as above, opened(lower, tmp_path / "lower", 32) as below:
        gate = trio.Event()
        transfer = below.reserve

        async def reserve(*args):
            await gate.wait()  # the route down takes room only when the block above it has been damaged
            return await transfer(*args)

        below.reserve, below.reserve_nowait = reserve, would_block
        async with open_engine(source_of(KEYS), {"above": above, "below": below}, chain="on_store") as engine:
            await engine.store(engine.source.weak(KEYS), precondition=NO_WAIT)
            await until(lambda: above.contains_nowait(KEYS) == set(KEYS))
            flip(above, BAD)
            gate.set()
            await engine.drain()
            await above.delete(KEYS)
            assert set(KEYS) - set(await what_is_loaded(engine, KEYS)) == {BAD}


def would_block(*args):
    raise trio.WouldBlock


@pytest.mark.parametrize(("upper", "lower"), ABOVE)
async def test_what_is_promoted_is_right_or_refused(upper, lower, tmp_path):
    """The bit flips in the promotion's own memory, between the read below and the copy above."""
    keys = KEYS[:4]
    async with opened(lower, tmp_path / "lower") as below, opened(upper, tmp_path / "upper") as above:
        await fill(below, keys)
        async with open_engine(source_of(keys), {"above": above, "below": below}) as engine:
            route_up = engine._promoter.routes_up["above"]
            upgrade = route_up.staging.upgrade

            def flipped(keys):
                refs = upgrade(keys)
                for key, page in zip(keys, route_up.staging.views(refs), strict=True):
                    page[1] ^= key == BAD
                return refs

            route_up.staging.upgrade = flipped
            places = [bytearray(SIZE) for _ in keys]
            async with await engine.lookup(keys) as hit:
                result = await engine.load(hit, PagesDestination.over(places), promote=True)
            assert list(result.outcomes) == [LOADED] * 4
            await engine.drain()
            assert engine.statistics().promoted_blocks == 3
            assert dict(engine.statistics().promotions_refused) == {"failed": 1}
            await below.delete(keys)
            assert set(keys) - set(await what_is_loaded(engine, keys)) == {BAD}
