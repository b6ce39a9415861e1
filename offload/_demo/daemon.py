"""``offload demo --daemon``: engines come and go, and are killed; the daemon keeps their blocks, until it is killed as well.

1. Engine A reads the document, has its blocks stored, answers a question, and is killed (SIGKILL) in the middle of the next
one. 2. The daemon gives back all that A held. Engine B finds A's blocks there, and loads them instead of computing them.
3. The daemon is killed (SIGKILL) while B computes. B says that it is unavailable, and goes on without it.
4. A new daemon has what the page store behind it has kept. B finds it there, and loads it.

B also runs the model without any cache, and every token and every bit of KV is compared. This module starts the processes,
kills them, and verifies; ``daemon_engine.py`` is an engine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import trio

from maru.base.scratch import scratch
from maru.exception_groups import raise_unwrapped

from ..client import open_connection
from ..daemon._messages import Counters, Stats
from .document import document
from .processes import PROCESS_TIMEOUT, DemoFailed, Options, lines_of, place_of, region_bytes, working_directory

_QUESTIONS = {
    "a": ["What is a block?", "Who may cancel a store, and until when?"],
    "b": ["When may the bytes be read?", "What is left behind by a transfer that failed?", "Is a hit a promise?"],
}
_HELD = ("requests", "holds", "memories", "caches", "open_hits", "quarantined")
_HELD_IN_TIERS = ("held_blocks", "reserved_blocks", "used_blocks", "pending_marks")
_GIB = 1 << 30
_GIVE_BACK = 20.0
"""Seconds that a daemon has to give back what an engine held, on a machine that is busy."""


class Engine:
    """An engine process, driven line by line."""

    def __init__(self, role: str, process: trio.Process, lines: AsyncGenerator[bytes]) -> None:
        self.role = role
        self._process = process
        self._lines = lines

    async def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind; others are skipped."""
        async for line in self._lines:
            event: dict[str, Any] = json.loads(line)
            if event.pop("event") == kind:
                return event
        raise DemoFailed(f"engine {self.role.upper()} ended without saying {kind}")

    async def say(self, what: Literal["answer", "notice", "go on"]) -> None:
        """Have it answer its next question; behind that, notice that the daemon is gone, or go on."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(f"{what}\n".encode())

    async def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        await self._process.wait()


async def run(options: Options, sheet: Any) -> dict[str, Any]:
    """Run the four parts and check what came of them."""
    start = time.perf_counter()
    with working_directory(options.keep) as directory, trio.fail_after(PROCESS_TIMEOUT):
        text, source = document(options.document_bytes)
        (directory / "document.txt").write_bytes(text)
        home = place_of(None, 4 * region_bytes(options), sheet)
        with contextlib.ExitStack() as stack:
            runtime = stack.enter_context(private_directory(home))
            sheet.print("Engine A computes, and is killed ...")
            async with daemon_process(runtime, options) as first:
                a = await part_of_a(directory, first.url, options)
                at_rest = await counters_at_rest(first.url)
                sheet.print("Engine B loads what A had stored; the daemon is killed ...")
                async with engine_process("b", directory, first.url, options) as engine:
                    b = [await answered(engine)]
                    await engine.say("go on")
                    await engine.say("answer")
                    await engine.event("prefill")
                    await first.kill()
                    b.append(await engine.event("answer"))
                    await engine.say("notice")
                    noticed = (await engine.event("noticed"))["unavailable"]
                    sheet.print("A new daemon serves what the page store has kept ...")
                    async with daemon_process(runtime, options) as second:
                        b.append(await answered(engine))
                        await engine.say("go on")
                        uncached = (await engine.event("outcome"))["uncached"]
                        left = await counters_at_rest(second.url)
                        code = await second.end()
    checks = verify(a, b, noticed, uncached, at_rest, left, code)
    return {
        "document": {"bytes": len(text), "source": source},
        "a": a,
        "b": b,
        "at_rest": left,
        "checks": checks,
        "verified": all(checks.values()),
        "seconds": time.perf_counter() - start,
    }


async def part_of_a(directory: Path, url: str, options: Options) -> dict[str, Any]:
    """Engine A answers a question, and is killed while it computes the next one."""
    async with engine_process("a", directory, url, options) as engine:
        answer = await answered(engine)
        await engine.say("go on")
        await engine.say("answer")
        await engine.event("prefill")
        await engine.kill()
    return answer


async def answered(engine: Engine) -> dict[str, Any]:
    """Ask an engine, and wait for its answer."""
    await engine.say("answer")
    return await engine.event("answer")


def verify(
    a: dict[str, Any],
    b: list[dict[str, Any]],
    noticed: list[str],
    uncached: list[dict[str, Any]],
    at_rest: dict[str, float],
    left: dict[str, float],
    code: int,
) -> dict[str, bool]:
    """The checks by name, each with whether it held."""
    before, during, after = b
    return {
        "B's tokens are those computed without a cache": [one["tokens"] for one in b]
        == [one["tokens"] for one in uncached],
        "B's KV is that computed without a cache, to the bit": [one["kv"] for one in b]
        == [one["kv"] for one in uncached],
        "A stored what it computed": a["stored_blocks"] >= a["blocks"],
        "nothing of A was left after it was killed": not at_rest,
        "B loaded what A had stored": before["loaded_blocks"] > 0,
        "B answered although the daemon was killed": len(during["tokens"]) > 0,
        "B was told that the daemon was unavailable": len(noticed) == 1,
        "B loaded from the new daemon what the page store had kept": after["loaded_blocks"] > 0,
        "nothing of B was left at the end": not left,
        "the daemon ended without dropping anything": code == 0,
    }


# --- processes ------------------------------------------------------------------------------------------------------------


class DaemonProcess:
    """A daemon in a process of its own."""

    def __init__(self, url: str, process: trio.Process) -> None:
        self.url = url
        self._process = process

    async def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> int:
        """End it by SIGTERM; its exit code."""
        self._process.terminate()
        return await self._process.wait()


@contextlib.asynccontextmanager
async def daemon_process(runtime: str, options: Options) -> AsyncIterator[DaemonProcess]:
    """``offload serve``, once it is ready; killed at the end if it still runs."""
    pool = region_bytes(options)
    command = [sys.executable, "-P", "-m", "offload", "serve", "--runtime-dir", runtime, "--host-bytes", str(pool)]
    command += ["--maru-pool-size-gb", str(pool / _GIB), "--log-level", "error"]
    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(trio.run_process, command, stdout=subprocess.PIPE, check=False, process_group=0)  # noqa: TID251
            )
            try:
                async with aclosing(lines_of(process)) as lines:
                    if b"is ready" not in await anext(lines, b""):
                        raise DemoFailed("the daemon did not start")
                    yield DaemonProcess(f"ipc://{runtime}/daemon.sock", process)
            finally:
                nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def engine_process(role: str, directory: Path, url: str, options: Options) -> AsyncIterator[Engine]:
    """An engine process, once it is ready; killed at the end if it still runs."""
    job = {
        "role": role,
        "directory": str(directory),
        "store": url,
        "document": str(directory / "document.txt"),
        "questions": _QUESTIONS[role],
        "answer_tokens": options.answer_tokens,
        "checksums": True,
        "region_bytes": 0,
    }
    command = [sys.executable, "-P", "-m", "offload._demo.daemon_engine", json.dumps(job)]
    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,  # noqa: TID251
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    check=False,
                    process_group=0,
                )
            )
            try:
                async with aclosing(lines_of(process)) as lines:
                    engine = Engine(role, process, lines)
                    await engine.event("ready")
                    yield engine
            finally:
                nursery.cancel_scope.cancel()


async def counters_at_rest(url: str) -> dict[str, float]:
    """What a daemon holds for its engines, once it is nothing, or else after a while."""
    held: dict[str, float] = {}
    async with open_connection(url, name="demo", wait=PROCESS_TIMEOUT) as connection:
        with trio.move_on_after(_GIVE_BACK):
            while True:
                values = (await connection.ask(lambda seq: Stats(seq), Counters)).values
                held = {
                    name: value
                    for name, value in values.items()
                    if value and (name in _HELD or name.endswith(_HELD_IN_TIERS))
                }
                if not held:
                    break
                await trio.sleep(0.01)
    return held


@contextlib.contextmanager
def private_directory(home: str) -> Iterator[str]:
    """A directory for the sockets and the pool, which goes at the end."""
    with scratch("offload-demo", home) as path:
        yield f"{path}/run"


def show(report: dict[str, Any], sheet: Any) -> None:
    """What came of it, for people."""
    from rich.text import Text

    for name, answer in [("A", report["a"]), *[("B", answer) for answer in report["b"]]]:
        sheet.print(
            f"{name}: {answer['question']:<50} {answer['loaded_blocks']:>4} of {answer['blocks']} blocks loaded, "
            f"first token after {answer['first_token']:.2f} s"
        )
    for check, holds in report["checks"].items():
        sheet.print(Text("yes  ", "green").append(check, "none") if holds else Text("NO   ", "bold red").append(check))
    verdict = Text("\nverified", "bold green") if report["verified"] else Text("\nNOT VERIFIED", "bold red")
    sheet.print(verdict.append(f" in {report['seconds']:.1f} s", "none"))
