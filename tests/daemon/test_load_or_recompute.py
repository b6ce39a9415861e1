"""Behind a daemon an engine chooses between loading and recomputing as over its own tiers: the daemon is one of them."""

import time

import pytest
import trio
from click.testing import CliRunner

from backends.memory import MemoryTier
from backends.testing import PacedTier, payload_of
from offload import EngineConfig, LoadOrRecompute, open_engine
from offload.cli import main
from offload.client import SharedBlocks, SharedMemory
from tests.daemon.test_daemon import KEYS, cache_of, held, store, until
from tests.support.daemons import SIZE, daemon, engine_config

BLOCK = 0.02
"""Seconds in which a block is computed."""


def client(url, **knobs):
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=BLOCK, probe_interval=0.01, **knobs)
    return EngineConfig(daemon_url=url, shadow_check=0, load_or_recompute=choice)


async def load(engine, cache):
    """Look all keys up, and load what the hit has; how many came."""
    async with await engine.lookup(KEYS) as hit:
        loaded = (await engine.load(hit, cache.into(range(8, 8 + len(hit))))).loaded
    assert [cache.read(8 + at) for at in range(loaded)] == [payload_of(key, SIZE) for key in KEYS[:loaded]]
    return loaded


async def until_loads(engine, cache, blocks):
    with trio.fail_after(30):
        while await load(engine, cache) != blocks:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_load_from_a_daemon_that_falls_behind_is_given_up_and_tried_again_when_the_daemon_is_well(path):
    tier = PacedTier(MemoryTier(64 * SIZE, SIZE))
    async with daemon(path, engine=engine_config(tiers={"host": tier})) as server:
        cache = cache_of()
        async with open_engine(cache, client(server.url)) as engine:
            assert (await store(engine, cache)).completed == tuple(KEYS)
            tier.seconds_per_block = 0.3
            began = time.monotonic()
            assert await load(engine, cache) == 0
            assert time.monotonic() - began < 8 * 0.3
            assert await load(engine, cache) == 0  # now it is suspect
            counted = engine.statistics().load_or_recompute
            assert counted.given_up == {"late": 1} and counted.cut_blocks == 8
            tier.seconds_per_block = 0.0
            await until_loads(engine, cache, 8)
        await until(lambda: not server.statistics()["sessions"])
        assert held(server) == {}


@pytest.mark.parametrize("share", [0.02, 4.0])
async def test_the_better_way_is_taken_over_the_tier_of_a_daemon(path, share):
    tier = PacedTier(MemoryTier(64 * SIZE, SIZE))
    async with daemon(path, engine=engine_config(tiers={"host": tier})) as server:
        cache, other = cache_of(), SharedBlocks(SharedMemory(32 * SIZE), SIZE)
        async with open_engine(cache, client(server.url, max_loss=0.5)) as engine:
            await store(engine, cache)
        tier.seconds_per_block = share * BLOCK
        async with open_engine(other, client(server.url, max_loss=0.5)) as engine:
            for _ in range(6):
                await load(engine, other)
                await trio.sleep(0.2)
            await until_loads(engine, other, 8 if share < 1 else 0)
        await until(lambda: not server.statistics()["sessions"])
        assert held(server) == {}


async def test_a_daemon_that_decides_itself_explains_what_it_has_left_out(path):
    tier = PacedTier(MemoryTier(64 * SIZE, SIZE))
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=BLOCK)
    async with daemon(path, engine=engine_config(tiers={"host": tier}, load_or_recompute=choice)) as server:
        cache = cache_of()
        async with open_engine(cache, EngineConfig(daemon_url=server.url, shadow_check=0)) as engine:
            assert (await store(engine, cache)).completed == tuple(KEYS)
            tier.seconds_per_block = 0.3
            assert await load(engine, cache) == 0
        arguments = ["explain", "--text", KEYS[0].decode(), "--runtime-dir", path]
        told = (await trio.to_thread.run_sync(CliRunner().invoke, main, arguments)).output
    assert "in host; left to be computed" in told and "given up as late" in told and "computing them" in told
