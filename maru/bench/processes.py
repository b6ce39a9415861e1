"""Child processes of a bench: they print one line when they are ready, and are ended by the code that started them.

Every wait has a bound. What a server leaves in /dev/shm is removed when the bench is done with it, whatever happened.
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
"""Seconds until something has gone wrong: a start, an end, or an answer."""
SERVER: Final = ("-c", "from maru.server_cli import main; main()")


def environment() -> dict[str, str]:
    """Ours, but that bytecode is kept: what is installed has it, and without it a start takes half as long again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def processor_time(*processes: int) -> float:
    """Seconds that all threads of these processes have worked until now, as Linux names the clock of another process."""
    return sum(time.clock_gettime((~process << 3) | 2) for process in processes)


class BenchFailed(EnvironmentFault):
    """What was to be measured did not answer. Nothing is measured."""


class Child:
    """A process that writes one line of JSON once it is ready. A context manager, which ends it.

    Args:
        arguments: of the interpreter.
        said: what its line says; by default JSON.
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
            """What it said."""
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, patience: float = PATIENCE) -> Any:
        """The JSON of its next line.

        Raises:
            BenchFailed: it ended, or has said nothing for so many seconds.
        """
        return json.loads(self._line(patience))

    def _line(self, patience: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        line, deadline = b"", time.monotonic() + patience
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise BenchFailed(f"{self._process.args!r} has said nothing for {patience:g} s")
            part = read_some(descriptor, 1 << 16)
            if not part:
                self._said.seek(0)
                raise BenchFailed(f"{self._process.args!r}: {self._said.read()[-1000:].decode('utf-8', 'replace')}")
            line += part
        return line

    def kill(self) -> None:
        """End it at once, without its knowledge."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and see that it does. Idempotent."""
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
    """A ``maru-server`` over a pool of its own, with the journal on and all else as it is by default."""

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
        """Where it listens, by transport."""


@contextmanager
def home(capacity_bytes: int) -> Iterator[str]:
    """A directory for a pool of so many bytes, in shared memory where there is room for it; removed afterwards."""
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
    """A server for as long as the block lasts."""
    with home(capacity_bytes) as path, Server(path, capacity_bytes) as running:
        assert isinstance(running, Server)
        yield running
