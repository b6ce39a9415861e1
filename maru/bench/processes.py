"""Child processes of a bench, ended by the code that started them.

A child prints one line when it is ready. Every wait has a bound. Files that a server leaves in /dev/shm are removed
after the bench, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from .._pool.placement import find_place
from ..base.all_bytes import read_some
from ..base.ending import EnvironmentFault
from ..base.errors import PoolUnusable
from ..base.scratch import scratch

PATIENCE: Final = 30.0
"""Seconds until a start, an end, or an answer counts as failed."""
SERVER: Final = ("-c", "from maru.server_cli import main; main()")


def environment() -> dict[str, str]:
    """Return this process's environment, with bytecode caching enabled.

    Installed packages have bytecode, and without it a start takes half as long again.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def processor_time(*processes: int) -> float:
    """Return the processor seconds that these processes have used until now.

    The clock's number is the one that Linux gives to another process.
    """
    return sum(time.clock_gettime((~process << 3) | 2) for process in processes)


class BenchFailed(EnvironmentFault):
    """A measured process did not answer, so nothing is measured."""


class Child:
    """A process that writes one line of JSON once it is ready.

    A context manager, which ends the process.

    Args:
        arguments: arguments of the interpreter.
        said: decoder of its line; by default of JSON.
    """

    def __init__(self, arguments: Sequence[str], said: Callable[[bytes], Any] = json.loads) -> None:
        self._said: Any = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment(),
            process_group=0,  # an interrupt from the keyboard is for this process, which ends it
        )
        try:
            self.ready: Any = said(self._line(PATIENCE))
            """Decoded line that the process printed."""
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, patience: float = PATIENCE) -> Any:
        """Return the JSON of its next line.

        Raises:
            BenchFailed: it ended, or has printed nothing for ``patience`` seconds.
        """
        return json.loads(self._line(patience))

    def _line(self, patience: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        line, deadline = b"", time.monotonic() + patience
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise BenchFailed(f"{self._process.args!r} has printed nothing for {patience:g} s")
            part = read_some(descriptor, 1 << 16)
            if not part:
                self._said.seek(0)
                raise BenchFailed(f"{self._process.args!r}: {self._said.read()[-1000:].decode('utf-8', 'replace')}")
            line += part
        return line

    def kill(self) -> None:
        """End the process at once, with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Request the process to end, and wait until it has. Idempotent."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return
        try:
            self._process.send_signal(number)
            self._process.wait(PATIENCE)
        except BaseException:
            self._process.kill()
            self._process.wait(PATIENCE)
            raise
        finally:
            assert self._process.stdout is not None and self._process.stdin is not None
            self._process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Server(Child):
    """A ``maru-server`` with a pool of its own and its journal on.

    Other settings have their defaults.
    """

    def __init__(self, home: str, capacity_bytes: int) -> None:
        super().__init__(
            [
                *SERVER,
                "--pool-path",
                home,
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--capacity-bytes",
                str(capacity_bytes),
                "--zmq-socket",
                "--json",
            ]
        )
        tcp, ipc = self.ready["endpoints"]
        self.addresses: dict[str, str] = {"tcp": tcp, "ipc": ipc}
        """Addresses of the server, by transport."""


@contextmanager
def home(capacity_bytes: int) -> Iterator[str]:
    """Make a directory for a pool of this size, removed afterwards.

    It is in shared memory, if there is room.
    """
    try:
        place = find_place(capacity_bytes)
    except PoolUnusable as error:
        raise BenchFailed(str(error)) from error
    if place.note:
        print(place.note, file=sys.stderr)
    with scratch("maru-bench", str(place.parent)) as path:
        yield path


@contextmanager
def server(capacity_bytes: int) -> Iterator[Server]:
    """Run a server for a block."""
    with home(capacity_bytes) as path, Server(path, capacity_bytes) as running:
        assert isinstance(running, Server)
        yield running
