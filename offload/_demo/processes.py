"""The page store of a demo, and the engine processes that it starts, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
import trio

from maru.base.ending import EnvironmentFault
from maru.base.scratch import scratch

from .display import ProgressBars

if TYPE_CHECKING:
    from rich.console import Console

    from maru import MaruServer


QUESTIONS = {
    "a": ["What is a block?", "Who may cancel a store, and until when?"],
    "b": ["When may the bytes be read?", "What is left behind by a transfer that failed?"],
    "c": ["Is a cancelled store really over?"],
}

_BLOCK_TOKENS, _BLOCK_BYTES = 16, 64 << 10
"""Tokens and bytes of a block. Repeated here, since the model's module imports torch, which takes seconds."""
_SPARE = 1.25
"""Memory for each byte of blocks: the page store evicts ahead of need from a region that is nearly full."""
_REGION_STEP = 2 << 20
_POOL_BYTES = 1 << 30
"""Capacity of the page store for each byte of its regions: with less it would evict ahead of need."""
SHARING = 2
"""Engine processes that have a region each."""

PROCESS_TIMEOUT = 300.0
"""The longest time of one engine process, in seconds. A healthy one takes about ten."""


class DemoFailed(EnvironmentFault):
    """An engine process exited without an outcome."""


@attrs.frozen
class Options:
    """The command's options."""

    document_bytes: int = 6000
    answer_tokens: int = 24
    damage: int = 0
    checksums: bool = True
    keep: Path | None = None


async def run_engine_process(
    role: str, directory: Path, server: MaruServer, options: Options, bars: ProgressBars
) -> dict[str, Any]:
    """Run an engine process, show its progress, and return its outcome. When cancelled, it kills the process."""
    job = {
        "role": role,
        "directory": str(directory / "files"),
        "store": server.endpoints[-1],
        "document": str(directory / "document.txt"),
        "questions": QUESTIONS[role],
        "answer_tokens": options.answer_tokens,
        "checksums": options.checksums,
        "region_bytes": region_bytes(options),
    }
    command = [sys.executable, "-P", "-m", "offload._demo.engine_process", json.dumps(job)]
    outcome: dict[str, Any] | None = None
    status: int | None = None
    with trio.move_on_after(PROCESS_TIMEOUT) as scope:
        async with trio.open_nursery() as nursery:  # leaving it in any way kills the process
            process: trio.Process = await nursery.start(
                partial(trio.run_process, command, stdout=subprocess.PIPE, check=False, process_group=0)  # noqa: TID251
            )
            async for line in lines_of(process):
                event: dict[str, Any] = json.loads(line)
                kind = event.pop("event")
                if kind == "outcome":
                    outcome = event
                else:
                    bars(role, kind, event)
            status = await process.wait()
    if scope.cancelled_caught:
        raise DemoFailed(f"engine process {role.upper()} took more than {PROCESS_TIMEOUT:g} s")
    if outcome is None:
        raise DemoFailed(f"engine process {role.upper()} ended with status {status}, without an outcome")
    return outcome


async def lines_of(process: trio.Process) -> AsyncGenerator[bytes]:
    """The lines that a process writes, until it ends."""
    assert process.stdout is not None
    rest = b""
    async for part in process.stdout:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def region_bytes(options: Options) -> int:
    """Bytes for the blocks of one engine process, computed and recomputed."""
    longest = max(len(question) for questions in QUESTIONS.values() for question in questions)
    blocks = -(-(options.document_bytes + longest + options.answer_tokens) // _BLOCK_TOKENS)
    nbytes = int(_SPARE * (2 * blocks + 8) * _BLOCK_BYTES)
    return -(-nbytes // _REGION_STEP) * _REGION_STEP


def place_of(pool: Path | None, nbytes: int, sheet: Console) -> str:
    """The directory for temporary files. Prints a note if a pool in it is not in memory.

    Raises:
        DemoFailed: there is no room for a pool anywhere.
    """
    from maru.base.errors import PoolUnusable
    from maru.doctor import find_place

    try:
        place = find_place(nbytes, [str(pool.parent)] if pool else ())
    except PoolUnusable as error:
        raise DemoFailed(str(error)) from error
    if place.note:
        sheet.print(place.note, soft_wrap=True)
    return place.parent if pool is None else tempfile.gettempdir()


@contextlib.asynccontextmanager
async def page_store(parent: str, pool: Path | None = None) -> AsyncIterator[MaruServer]:
    """A page store in this process, over a temporary pool in a directory, or over one that stays."""
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
    """Flip a bit in each of the first ``n`` pages of A's region, past the page store. Returns how many there were."""
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
    """What the page store holds: keys, bytes and pins."""
    directory = server.statistics().service.directory
    return {
        "keys": directory.entries,
        "bytes": directory.used_bytes,
        "regions": directory.regions,
        "pinned": directory.pinned,
    }


@contextlib.contextmanager
def working_directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with scratch("offload-demo") as directory:
            yield Path(directory)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise click.UsageError(f"--keep: {keep} is not empty")
        yield keep
