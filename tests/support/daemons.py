"""Daemons and engine processes for tests: real processes, started by a test and ended by it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import trio

from offload import BatchConfig, EngineConfig, PipelineConfig
from offload.daemon import DaemonConfig, open_daemon

SIZE = 4096
PATIENCE = 60.0
"""Seconds for anything that has to come, on a machine that others use as well."""

AT_ONCE = PipelineConfig(batch_config=BatchConfig(min_batch_size=1), on_destination_full="evict")


def engine_config(**options):
    """One memory tier, which has room for a few thousand blocks."""
    tiers = options.pop("tiers", {"host": {"type": "memory", "capacity_bytes": 16 << 20}})
    return EngineConfig(tiers=tiers, pipeline=options.pop("pipeline", AT_ONCE), **options)


@contextlib.contextmanager
def directory() -> Iterator[str]:
    """A directory of a short name, in memory."""
    with tempfile.TemporaryDirectory(prefix="dmn") as path:
        yield f"{path}/run"


@contextlib.asynccontextmanager
async def daemon(path: str, *, engine=None, **knobs):
    """A daemon in this process."""
    async with open_daemon(DaemonConfig(runtime_dir=path, **knobs), engine or engine_config()) as running:
        yield running


class Process:
    """A child process that says one JSON object, or one line, at a time. ``within`` is a command that starts it, and stays."""

    def __init__(self, *command: str, environ: dict[str, str] | None = None, within: Sequence[str] = ()) -> None:
        # A file, and no pipe: what nothing reads would stop a process that has said much.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*within, sys.executable, "-X", "faulthandler", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **(environ or {})},
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(PATIENCE)
            raise AssertionError(f"it ended with {self.process.returncode}: {self.errors()[-4000:]}")
        return line

    def event(self) -> dict:
        return json.loads(self.line())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def errors(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._said.close()


def serve(path: str, *options: str, counts_at: str = "") -> Process:
    """``offload serve``, once it is ready. ``counts_at``: where it tells what it holds; see `tests.support.object_counts`."""
    program = (
        f"from tests.support.object_counts import answer; answer({counts_at!r})\nfrom offload.cli import main; main()"
    )
    command = ("-c", program) if counts_at else ("-m", "offload")
    process = Process(*command, "serve", "--runtime-dir", path, *options)
    try:
        assert "is ready" in process.line()
    except BaseException:
        process.__exit__()
        raise
    return process


class KillableDaemon:
    """``offload serve`` that is killed with -9, and started again at the same place.

    Args:
        path: its directory.
        block_bytes: of its blocks; 0: the first cache decides.
    """

    def __init__(self, path: str, block_bytes: int = SIZE) -> None:
        self.path, self.url = path, f"ipc://{path}/daemon.sock"
        self._file = host_only(path, block_bytes)
        self.start()

    def start(self) -> None:
        self.process = serve(self.path, self._file)

    def kill(self) -> None:
        self.process.kill()
        self.process.__exit__()


def host_only(path: str, block_bytes: int = SIZE) -> str:
    """A file with one memory tier. Without a size of a block the first cache decides it."""
    file = Path(path).parent / "daemon.toml"
    file.write_text(
        f'[daemon]\nblock_bytes = {block_bytes}\n[engine.tiers.host]\ntype = "memory"\ncapacity_bytes = "32 MiB"\n'
    )
    return str(file)


def engine_process(url: str, name: str, *, stores: int = 1_000_000) -> Process:
    """An engine that stores, looks up and loads without end, and verifies what it loads."""
    return Process("-m", "tests.support.daemon_engine", url, name, str(stores))


def descriptors(pid: int) -> list[str]:
    """What this process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return sorted(found)


def mapped(pid: int) -> int:
    """How many mappings of engines' memory it has."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:offload-cache")


async def until(condition, what: str) -> None:
    """Wait until it holds, as real processes take their time."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if hasattr(value, "__await__"):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, what
        await trio.sleep(0.01)
