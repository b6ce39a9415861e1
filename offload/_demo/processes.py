"""Engine processes of the demo, driven line by line.

The demo starts one after the other.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import click
import trio

from maru.base.ending import EnvironmentFault
from maru.base.scratch import scratch
from maru.exception_groups import raise_unwrapped

from .display import ProgressBars

if TYPE_CHECKING:
    from rich.console import Console


QUESTIONS = {
    "a": ["What is a block?", "Who may cancel a store, and until when?"],
    "b": ["When may the bytes be read?", "What is left behind by a transfer that failed?", "Is a hit a promise?"],
    "c": ["Is a cancelled store really over?"],
}

_BLOCK_TOKENS, _BLOCK_BYTES = 16, 64 << 10
"""Tokens and bytes of a block.

Repeated here, since the model's module imports torch, which takes seconds.
"""
_SPARE = 1.25
"""Memory for each byte of blocks.

The page store evicts ahead of need from a region that is nearly full.
"""
_REGION_STEP = 2 << 20

PROCESS_TIMEOUT = 300.0
"""Seconds for one engine process. A healthy one takes about ten."""

Request: TypeAlias = Literal["answer", "cancel", "reach", "miss", "finish"]
"""A line that an engine process reads: see ``main`` in ``engine_process.py``."""


class DemoFailed(EnvironmentFault):
    """An engine process exited without an outcome, or could not be run."""


@attrs.frozen
class Options:
    """The command's options."""

    document_bytes: int = 6000
    answer_tokens: int = 24
    damage: int = 0
    checksums: bool = True
    keep: Path | None = None
    daemon: bool = False


class Engine:
    """An engine process.

    Each request is a line that it reads; its reply is an event of the same name.
    """

    def __init__(self, role: str, process: trio.Process, lines: AsyncGenerator[bytes], bars: ProgressBars) -> None:
        self.role = role
        self.answers: list[dict[str, Any]] = []
        self._process = process
        self._lines = lines
        self._bars = bars

    async def ask(self, request: Request) -> dict[str, Any]:
        """Send a request. Return the reply."""
        await self.send(request)
        return await self.event(request)

    async def answer(self) -> None:
        """Ask its next question, and wait for the answer."""
        await self.send("answer")
        await self.end_answer()

    async def begin_answer(self) -> None:
        """Ask its next question, and wait for the first progress.

        A part of the prompt is computed then.
        """
        await self.send("answer")
        await self.event("prefill")

    async def end_answer(self) -> None:
        """Wait for the answer to the question that it was asked."""
        self.answers.append(await self.event("answer"))

    async def finish(self) -> dict[str, Any]:
        """Ask it to end. Return its outcome with all of its answers."""
        outcome = await self.ask("finish")
        await self._process.wait()
        return {"answers": self.answers, **outcome}

    async def kill(self) -> None:
        """Kill the process by SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def send(self, request: Request) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError):  # it has exited: `event` raises that, with its status
            await self._process.stdin.send_all(f"{request}\n".encode())

    async def event(self, kind: str) -> dict[str, Any]:
        """Show the progress until the next event of this kind.

        Return that event.
        """
        async for line in self._lines:
            event: dict[str, Any] = json.loads(line)
            name = event.pop("event")
            self._bars(self.role, name, event)
            if name == kind:
                return event
        status = await self._process.wait()
        raise DemoFailed(f"engine process {self.role.upper()} ended with status {status}, without an outcome")


@attrs.frozen
class Stage:
    """The demo around the engine processes."""

    directory: Path
    """The directory for the document, and for C's files."""
    options: Options
    sheet: Console
    bars: ProgressBars

    @contextlib.asynccontextmanager
    async def engine(self, role: str, url: str = "") -> AsyncIterator[Engine]:
        """Run an engine process during a block.

        The block begins when it is ready.

        Args:
            role: ``a``, ``b`` or ``c``.
            url: the endpoint of the page store or daemon that keeps its blocks. C has tiers of its own.
        """
        job = {
            "role": role,
            "daemon": self.options.daemon,
            "url": url,
            "directory": str(self.directory / "files"),
            "document": str(self.directory / "document.txt"),
            "questions": QUESTIONS[role],
            "answer_tokens": self.options.answer_tokens,
            "checksums": self.options.checksums,
            "region_bytes": region_bytes(self.options),
        }
        with trio.move_on_after(PROCESS_TIMEOUT) as scope:
            async with child("offload._demo.engine_process", json.dumps(job)) as (process, lines):
                engine = Engine(role, process, lines, self.bars)
                await engine.event("ready")
                yield engine
        if scope.cancelled_caught:
            raise DemoFailed(f"engine process {role.upper()} took more than {PROCESS_TIMEOUT:g} s")


@contextlib.asynccontextmanager
async def child(*command: str) -> AsyncIterator[tuple[trio.Process, AsyncGenerator[bytes]]]:
    """Run a module in a process during a block.

    Yield the process and the lines that it writes.
    """
    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,  # noqa: TID251
                    [sys.executable, "-P", "-m", *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    check=False,
                    process_group=0,
                )
            )
            try:
                async with aclosing(lines_of(process)) as lines:
                    yield process, lines
            finally:
                nursery.cancel_scope.cancel()


async def lines_of(process: trio.Process) -> AsyncGenerator[bytes]:
    """Yield the lines that a process writes, until it ends."""
    assert process.stdout is not None
    rest = b""
    async for part in process.stdout:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def region_bytes(options: Options) -> int:
    """Return the bytes for the blocks of one engine process.

    The blocks are computed and recomputed.
    """
    longest = max(len(question) for questions in QUESTIONS.values() for question in questions)
    blocks = -(-(options.document_bytes + longest + options.answer_tokens) // _BLOCK_TOKENS)
    nbytes = int(_SPARE * (2 * blocks + 8) * _BLOCK_BYTES)
    return -(-nbytes // _REGION_STEP) * _REGION_STEP


def place_of(pool: Path | None, nbytes: int, sheet: Console) -> str:
    """Return the directory for temporary files.

    Print a note if it is on a disk.

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
