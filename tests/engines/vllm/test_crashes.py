"""A real vLLM that is killed with -9 while it stores and loads, again and again: behind its lease nothing of it is left."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import attrs
import trio

from offload.client import open_connection
from tests.daemon.test_processes import at_rest
from tests.engines.crashes import a_few_and_fifty, page_store
from tests.support.daemons import KillableDaemon, directory
from tests.support.maru_processes import Server, eventually

from .instances import SHARED, any_tiers, external_hits, generate, over_daemon, prompt, run, spec, started

LEASE = 2.0
MIB = 1 << 20
CAPACITY = 64 * MIB
"""Of the page store: fewer regions than there are crashes."""
ARENAS = Path(f"/dev/shm/offload-{os.geteuid()}")
"""Where a starting instance's host memory is found."""


@attrs.frozen
class Left:
    """What is there behind a crash."""

    descriptors: tuple[int, int]
    """Of the page store's server, and of the daemon."""
    private_bytes: tuple[int, int]
    """Memory of these two that nobody shares."""
    regions: int
    region_bytes: int


def left(server: Server, daemon: KillableDaemon) -> Left:
    files = [server.pool / name for name in server.region_files()]
    daemon_fds = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    smaps = Path(f"/proc/{daemon.process.pid}/smaps_rollup").read_text()
    private = next(int(line.split()[1]) << 10 for line in smaps.splitlines() if line.startswith("Private_Dirty:"))
    return Left(
        (server.process.descriptors(), daemon_fds),
        (server.process.private_bytes(), private),
        len(files),
        sum(file.stat().st_blocks * 512 for file in files if file.exists()),
    )


def nothing_is_held(server: Server, daemon: KillableDaemon) -> bool:
    """Nothing but what is stored: no pin, no session, no memory of an engine, no link to its host memory."""

    async def daemon_is_at_rest() -> bool:
        async with open_connection(daemon.url, name="the test", wait=60.0) as connection:
            return bool(await at_rest(connection))

    facts = server.facts()
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    links = os.listdir(ARENAS) if ARENAS.exists() else []
    return not (facts["pinned"] or facts["sessions"] or "memfd:offload-" in maps or links) and trio.run(
        daemon_is_at_rest
    )


def crash(said: dict[str, Any], scratch: Path, number: int) -> None:
    """Start an instance, and kill it in the middle of a round that follows one that is whole."""
    rng, rounds = random.Random(number), scratch / f"rounds-{number}"
    step = {"do": "run until killed", "shared": SHARED, "seed": number, "rounds": str(rounds)}
    log = scratch / f"log-{number}"
    with started({**said, "steps": [step]}, log) as process:
        eventually(lambda: rounds.exists() or process.poll() is not None, patience=600.0)
        time.sleep(rng.uniform(0.0, 0.4))  # anywhere in the rounds that follow: which they are is not to be known
        assert process.poll() is None, log.read_text()[-4000:]


@a_few_and_fifty
def test_crashes_leave_nothing_behind_but_what_is_stored(model: str, tmp_path: Path, crashes: int) -> None:
    with page_store("--capacity-bytes", "64MiB", lease=LEASE) as server, directory() as path:
        daemon = KillableDaemon(path, block_bytes=0)
        store = {"type": "maru", "server_url": server.ipc, "pool_size": "16M", "lease": LEASE}
        ways = [any_tiers(maru=store), over_daemon(daemon.url), spec(maru=store)]
        behind: list[Left] = []
        for number in range(crashes):
            crash({"model": model, "transfer": ways[number % len(ways)]}, tmp_path, number)
            eventually(lambda: nothing_is_held(server, daemon), patience=60.0)
            behind.append(left(server, daemon))
            print(number, behind[-1], flush=True)
        assert max(one.region_bytes for one in behind) <= CAPACITY
        settled = behind[len(ways) - 1 :]  # each way has left what it stores
        for at in range(2):
            assert max(one.descriptors[at] for one in settled) <= settled[0].descriptors[at] + 4
            grown = max(one.private_bytes[at] for one in settled) - settled[0].private_bytes[at]
            assert grown <= 32 * MIB, f"{grown} bytes in {crashes} crashes"  # the daemon's tier has as many, and fills
        # What the killed ones have stored is whole, and is what it should be.
        asked = prompt(1024, 40, 7)
        reference = run({"model": model, "steps": [generate([asked])]})
        for way in ways:
            answer = run({"model": model, "transfer": way, "steps": [generate([asked])]})
            assert answer["answers"][0]["tokens"] == reference["answers"][0]["tokens"]
            assert external_hits(answer) == 1024
        daemon.kill()
