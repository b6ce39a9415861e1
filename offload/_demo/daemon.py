"""``offload demo --daemon``: a daemon keeps the blocks of killed engines.

It is killed in the end as well.

1. Engine A reads the document, has its blocks stored, answers a question, and is killed (SIGKILL) in the middle of the
next
one. 2. The daemon gives back all that A held. Engine B finds A's blocks there, and loads them instead of computing
them.
3. The daemon is killed (SIGKILL) while B computes. B names it as unavailable, and goes on without it.
4. A new daemon has the blocks that its page store has kept. B finds them there, and loads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import trio

from maru.base.scratch import scratch

from ..client import open_connection
from ..daemon._messages import Counters, Stats
from .processes import PROCESS_TIMEOUT, DemoFailed, Options, Stage, child, place_of, region_bytes

_HELD = ("requests", "holds", "memories", "caches", "open_hits", "quarantined")
_HELD_IN_TIERS = ("held_blocks", "reserved_blocks", "used_blocks", "pending_marks")
_GIB = 1 << 30
_GIVE_BACK = 20.0
"""Seconds for a daemon to release an engine's blocks.

The machine may be busy.
"""


async def a_and_b(stage: Stage) -> dict[str, Any]:
    """Run A and B over two daemons.

    Return their report with its checks.
    """
    options, sheet = stage.options, stage.sheet
    home = place_of(None, 4 * region_bytes(options), sheet)
    with scratch("offload-demo", home) as parent, trio.fail_after(PROCESS_TIMEOUT):
        runtime = f"{parent}/run"
        async with daemon_process(runtime, options) as daemon:
            sheet.print("Engine A computes, and is killed ...")
            async with stage.engine("a", daemon.url) as engine:
                await engine.ask("reach")
                await engine.answer()
                await engine.begin_answer()
                await engine.kill()
            a = {"answers": engine.answers, "stored_blocks": engine.answers[0]["stored_blocks"]}
            a["at_rest"] = await counters_at_rest(daemon.url)
            sheet.print("Engine B loads what A had stored; the daemon is killed ...")
            async with stage.engine("b", daemon.url) as engine:
                await engine.ask("reach")
                await engine.answer()
                await engine.begin_answer()
                await daemon.kill()
                await engine.end_answer()
                unavailable = (await engine.ask("miss"))["unavailable"]
                sheet.print("A new daemon serves what the page store has kept ...")
                async with daemon_process(runtime, options) as daemon:
                    await engine.ask("reach")
                    await engine.answer()
                    b = await engine.finish()
                    left = await counters_at_rest(daemon.url)
                    code = await daemon.end()
    figures = {"unavailable": unavailable, "at_rest": left, "exit_code": code}
    return {"a": a, "b": b, "daemon": figures, "checks": verify(a, b, figures)}


def verify(a: dict[str, Any], b: dict[str, Any], daemon: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the daemons, by name."""
    before, during, after = b["answers"]
    return {
        "nothing of A was left after it was killed": not a["at_rest"],
        "B loaded what A had stored": before["loaded_blocks"] > 0,
        "B answered although the daemon was killed": len(during["tokens"]) > 0,
        "B was told that the daemon was unavailable": len(daemon["unavailable"]) == 1,
        "B loaded from the new daemon what the page store had kept": after["loaded_blocks"] > 0,
        "nothing of B was left at the end": not daemon["at_rest"],
        "the daemon ended without dropping anything": daemon["exit_code"] == 0,
    }


class DaemonProcess:
    """A daemon in a process of its own."""

    def __init__(self, url: str, process: trio.Process) -> None:
        self.url = url
        self._process = process

    async def kill(self) -> None:
        """Kill the daemon by SIGKILL."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> int:
        """End the daemon by SIGTERM. Return its exit code."""
        self._process.terminate()
        return await self._process.wait()


@contextlib.asynccontextmanager
async def daemon_process(runtime: str, options: Options) -> AsyncIterator[DaemonProcess]:
    """Run ``offload serve`` during a block, which begins when it is ready."""
    pool = region_bytes(options)
    command = ["offload", "serve", "--runtime-dir", runtime, "--host-bytes", str(pool)]
    command += ["--maru-pool-size-gb", str(pool / _GIB), "--log-level", "error"]
    async with child(*command) as (process, lines):
        if b"is ready" not in await anext(lines, b""):
            raise DemoFailed("the daemon did not start")
        yield DaemonProcess(f"ipc://{runtime}/daemon.sock", process)


async def counters_at_rest(url: str) -> dict[str, float]:
    """Wait until a daemon holds nothing for its engines.

    Return the counters that stayed above zero.
    """
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
