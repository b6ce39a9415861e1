"""``offload demo --page-store``: engines A and B map the same shared pages.

The page store runs in the process of the demo, over a pool in /dev/shm that is removed afterwards. A and B have a
region of it each; B reads A's pages in place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maru.base.scratch import scratch

from .processes import Stage, place_of, region_bytes

if TYPE_CHECKING:
    from maru import MaruServer

_POOL_BYTES = 1 << 30
"""Capacity of the page store for each byte of its regions.

A smaller page store would evict ahead of need.
"""
_SHARING = 2
"""Engine processes that have a region each."""


async def a_and_b(stage: Stage) -> dict[str, Any]:
    """Run A and B over a page store.

    Return their report with its checks.
    """
    options = stage.options
    pool = stage.directory / "pool" if options.keep else None
    home = place_of(pool, _SHARING * region_bytes(options), stage.sheet)
    async with page_store(home, pool) as server:
        a = await two_answers(stage, "a", server)
        damaged = damage(server, options.damage, a["block_bytes"])
        b = await two_answers(stage, "b", server)
        held = page_counts(server)
    return {"a": a, "b": b, "damaged": damaged, "page_store": held, "checks": verify(a, b, held, damaged)}


async def two_answers(stage: Stage, role: str, server: MaruServer) -> dict[str, Any]:
    """Run an engine that answers two questions. Return its outcome."""
    async with stage.engine(role, server.endpoints[-1]) as engine:
        await engine.answer()
        await engine.answer()
        return await engine.finish()


def verify(a: dict[str, Any], b: dict[str, Any], held: dict[str, int], damaged: int) -> dict[str, bool]:
    """Return the checks of the shared pages, by name."""
    stored = a["stored_blocks"] + b["stored_blocks"]
    return {
        "B read from A's pages, in place": b["pages"]["regions_of_others"] > 0,
        # A second copy of a loaded block in B's region would add a page. Blocks found damaged are stored again.
        "each block lies in one page": held["keys"] == stored if not damaged else held["keys"] <= stored,
        "no page is held any more": not held["pinned"],
    }


@contextlib.asynccontextmanager
async def page_store(parent: str, pool: Path | None = None) -> AsyncIterator[MaruServer]:
    """Run a page store in this process.

    Args:
        parent: the directory for its socket, and for a temporary pool.
        pool: the directory of a pool that stays.
    """
    from maru import ServerConfig, open_server

    with scratch("offload-demo", parent) as home:
        config = ServerConfig(
            host="",  # a Unix socket is enough
            rm_address="",
            runtime_dir=home,
            pool_path=str(pool or home),
            capacity_bytes=_POOL_BYTES,
            log_level="error",
        )
        async with open_server(config) as server:
            yield server


def damage(server: MaruServer, n: int, page_bytes: int) -> int:
    """Flip a bit in the first ``n`` pages of A's region.

    Return their number.
    """
    if not n:
        return 0
    [region] = Path(server.config.pool_path).glob("maru_*.dat")
    n = min(n, page_counts(server)["keys"])
    with region.open("r+b") as file:
        for page in range(n):  # pages are handed out ascending
            file.seek((page + 1) * page_bytes - 1)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([last ^ 1]))
    return n


def page_counts(server: MaruServer) -> dict[str, int]:
    """Count keys, bytes, regions and pins of the page store."""
    directory = server.statistics().service.directory
    return {
        "keys": directory.entries,
        "bytes": directory.used_bytes,
        "regions": directory.regions,
        "pinned": directory.pinned,
    }
