"""Engines at a daemon for ten minutes, some of which are killed again and again: nothing grows, and nothing is left."""

import contextlib
import statistics
import time
from pathlib import Path

import pytest
import trio

from offload.client import open_connection
from offload.daemon._messages import Counters, Stats
from tests.support.daemons import descriptors, engine_process, host_only, mapped, serve, until

ENGINES, KILLED = 4, 4
"""Those that stay, and those that are killed."""
LIVES = 15.0
"""Seconds of one that is killed."""
GROWTH = 2 << 20
"""Bytes that what is measured every second may differ by, without growing: the arenas of the allocator."""


def resident(pid):
    """Bytes of memory of its own that a process has touched."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


async def stays(url, name, rounds):
    with engine_process(url, name) as engine:
        while True:
            event = await trio.to_thread.run_sync(engine.event, abandon_on_cancel=True)
            rounds[name] = event["round"]


async def is_killed(url, name, kills):
    while True:
        kills.append(name)
        with engine_process(url, f"{name} {len(kills)}") as engine, trio.move_on_after(LIVES):
            while True:
                await trio.to_thread.run_sync(engine.event, abandon_on_cancel=True)


async def held(url):
    async with open_connection(url) as connection:
        told = (await connection.ask(lambda seq: Stats(seq), Counters)).values
    names = ("holds", "memories", "caches", "open_hits", "quarantined")
    ends = ("held_blocks", "reserved_blocks", "used_blocks", "pending_marks")
    return {name: value for name, value in told.items() if value and (name in names or name.endswith(ends))}


@pytest.mark.parametrize("seconds", [pytest.param(600, marks=pytest.mark.long)])
async def test_a_soak_grows_nothing_and_leaves_nothing(path, seconds):
    with serve(path, host_only(path)) as daemon:
        url, rounds, kills = f"ipc://{path}/daemon.sock", {}, []
        assert await held(url) == {}
        before = descriptors(daemon.pid)
        sizes, opened = [], []
        async with trio.open_nursery() as nursery:
            for number in range(ENGINES):
                nursery.start_soon(stays, url, f"stays {number}", rounds)
            for number in range(KILLED):
                nursery.start_soon(is_killed, url, f"killed {number}", kills)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await trio.sleep(1)
                sizes.append(resident(daemon.pid))
                opened.append(len(descriptors(daemon.pid)))
            nursery.cancel_scope.cancel()
        # The first quarter fills what is bounded: tables of what was evicted, histories of what was asked for.
        quarter = len(sizes) // 4
        grown = statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter])
        print(
            f"{rounds}, {len(kills)} kills, {sizes[0]} to {sizes[-1]} bytes, grown {grown}, {max(opened)} descriptors"
        )
        assert len(rounds) == ENGINES and min(rounds.values()) > seconds / 10
        assert grown < GROWTH, sizes[:: max(1, quarter // 8)]
        await until(lambda: mapped(daemon.pid) == 0, "memory of engines stays mapped")
        with contextlib.suppress(AssertionError):
            await until(lambda: descriptors(daemon.pid) == before, "descriptors")
        assert descriptors(daemon.pid) == before
        assert await held(url) == {}
