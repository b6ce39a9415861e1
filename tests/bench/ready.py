"""``python -m tests.bench ready``: the time until a server that was killed with -9 serves its 100,000 keys again.

From the start of the process to the answer to a LOOKUP of one of the keys, over a new connection: the interpreter, what it
imports, the journal, the memory of the region, the sockets. Before the first kill, the snapshots that were under way are
waited for, as they are done long before a server has stored the next 100,000 keys. Beside it stands a fresh interpreter that
imports the packages this one stands on, and does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from maru._wire import Code, DescribeReply, KeyRequest, LookupReply
from maru.bench._bare import Bare
from maru.bench._keys import keys_of
from maru.bench.measure import Effort, Row, measure, seconds_of
from maru.bench.processes import PATIENCE, BenchFailed, Server, environment, home
from maru.blocking import MaruHandler

KEYS: Final = 100_000
_AT_ONCE: Final = 64
_PAGE_BYTES: Final = 64
_BARE_START: Final = "import trio, zmq, attrs, msgspec, xxhash, click"


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the row of the start."""
    keys = keys_of(effort.size(KEYS, 1_000))
    capacity_bytes = len(keys) * _PAGE_BYTES + (8 << 20)
    with home(capacity_bytes) as path:
        with Server(path, capacity_bytes) as first:
            _fill(first, keys)
            _wait_settled(first)
            first.kill()
        subjects: dict[str, Callable[[], float]] = {
            "ready": lambda: _start(path, capacity_bytes, keys),
            "bare": partial(seconds_of, _bare_start),
        }
        samples = measure("start after kill -9", effort.at_most(effort.size(9, 1)), subjects)
    limit_name = "an interpreter with the same packages"
    yield samples.row("rpc.ready.after-kill", "ms", "ready", limit_name, "bare", "value <= 300", scale=1e3)


def _fill(server: Server, keys: Sequence[str]) -> None:
    """Store all of these, some at a time."""
    page = bytes(range(_PAGE_BYTES))
    with MaruHandler(
        server_url=server.addresses["ipc"], chunk_size_bytes=_PAGE_BYTES, pool_size=len(keys) * _PAGE_BYTES
    ) as handler:
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            if not all(handler.batch_put(some, [page] * len(some))):
                raise BenchFailed("the keys to be found again could not be stored")


def _wait_settled(server: Server) -> None:
    """Wait until there is nothing to be folded into the snapshot but the last segments, which do not pay yet."""
    deadline = time.monotonic() + PATIENCE
    with Bare(server.addresses["ipc"]) as client:
        while True:
            told = client.ask(Code.DESCRIBE, None)
            assert isinstance(told, DescribeReply)
            closed = told.sections["journal"]["closed_segments"]
            assert isinstance(closed, int)
            if closed <= 1:
                return
            if time.monotonic() > deadline:
                raise BenchFailed(f"{closed} segments of the journal are not folded after {PATIENCE:g} s")
            time.sleep(0.1)


def _start(path: str, capacity_bytes: int, keys: Sequence[str]) -> float:
    """Start it, ask, and kill it again; seconds."""
    begin = time.perf_counter()
    with Server(path, capacity_bytes) as server:
        with Bare(server.addresses["ipc"]) as client:
            answer = client.ask(Code.LOOKUP_KV, KeyRequest(keys[-1]))
            seconds = time.perf_counter() - begin
        server.kill()
    if not isinstance(answer, LookupReply) or not answer.found or server.ready["keys"] != len(keys):
        raise BenchFailed(f"{server.ready['keys']} of {len(keys)} keys were found again")
    return seconds


def _bare_start() -> None:
    subprocess.run(
        [sys.executable, "-P", "-c", _BARE_START], check=True, timeout=PATIENCE, env=environment(), process_group=0
    )
