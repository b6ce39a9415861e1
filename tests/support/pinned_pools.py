"""Servers of pinned memory for tests: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from backends.pinned_pool import PinnedPoolServer, open_server
from tests.support.maru_processes import PATIENCE, eventually

CHUNK = 64 << 10
"""Small chunks: many borders in few bytes."""


@contextlib.contextmanager
def short_directory() -> Iterator[str]:
    """A directory whose path fits into a socket's name."""
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield path


@contextlib.contextmanager
def server_in_thread(**knobs: Any) -> Iterator[PinnedPoolServer]:
    """A server beside blocking code. Look at its ``statistics()`` only: the rest belongs to its thread."""
    started, box = threading.Event(), dict[str, Any]()

    async def main() -> None:
        async with open_server(**knobs) as server:
            box.update(server=server, token=trio.lowlevel.current_trio_token(), leave=trio.Event())
            started.set()
            await box["leave"].wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as exc:
            box["error"] = exc
        finally:
            started.set()

    with short_directory() as directory:
        defaults = {"port": 0, "pool_memory_size": 64, "chunk_size": CHUNK, "runtime_dir": directory}
        knobs = {**defaults, **knobs}
        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(PATIENCE)
        try:
            if "server" not in box:
                raise box["error"]
            yield box["server"]
        finally:
            with contextlib.suppress(trio.RunFinishedError, KeyError):
                box["token"].run_sync_soon(box["leave"].set)
            thread.join(PATIENCE)
            assert not thread.is_alive()
        if "error" in box:
            raise box["error"]


def address_of(server: PinnedPoolServer) -> str:
    """Where a client of this user finds it."""
    return server.address


def remote_address_of(server: PinnedPoolServer) -> str:
    """Where others find it, if it is ``insecure``."""
    return f"{server.host}:{server.port}"


class ServerProcess:
    """``offload pinned-pool`` as it is run."""

    def __init__(self, *options: str) -> None:
        self._stack = contextlib.ExitStack()
        directory = self._stack.enter_context(short_directory())
        command = [sys.executable, "-W", "error", "-m", "offload", "pinned-pool", "--json", "--port", "0"]
        command += ["--pool-memory-size", "64", "--chunk-size", str(CHUNK), "--runtime-dir", directory, *options]
        self.process = self._stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        self._stack.callback(self._end)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._end()
            assert self.process.stderr is not None
            raise AssertionError(self.process.stderr.read())
        self.ready: dict[str, Any] = json.loads(line)

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)  # not yet waited for, so nobody else has this number

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.send(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] in "Tt")
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def _end(self) -> None:
        self.process.kill()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
