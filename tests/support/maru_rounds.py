"""How long rounds of requests take, and how much of that is waiting for a processor: beside them, rounds of a bare echo.

Attackers, servers and clients of a test share the processors with each other and with whatever else runs. For each thread the
kernel counts how long it could have run and did not (the second number of `/proc/PID/task/TID/schedstat`), so a round
can be told without what its client and its server waited for that. What is left is what the server makes its client wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import attrs
import trio

from maru.transport import ChannelServer
from tests.support.maru_processes import act

REST = 0.002
"""Seconds between two rounds."""


class ProcessorWait:
    """Seconds that a thread was ready to run and did not, since it began.

    Args:
        process: whose.
        thread: of it; the main one unless it is said.
    """

    def __init__(self, process: int, thread: int = 0):
        self._file = os.open(f"/proc/{process}/task/{thread or process}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def close(self) -> None:
        os.close(self._file)


class Rounds:
    """Rounds of a thread that asks the main thread of another process. A context manager."""

    def __init__(self, server: int):
        self._waits = [ProcessorWait(os.getpid(), threading.get_native_id()), ProcessorWait(server)]
        self.took: list[tuple[float, float]] = []
        """Of each round: seconds, and how many of them its client and its server waited for a processor."""

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *_: object) -> None:
        for wait in self._waits:
            wait.close()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """The round in this block, and a rest behind it."""
        waited, began = self._waited(), time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.took.append((took, min(took, self._waited() - waited)))
        time.sleep(REST)

    def _waited(self) -> float:
        return sum(wait.seconds() for wait in self._waits)


@attrs.frozen
class Percentiles:
    """The 99th of some rounds, in seconds."""

    all: float
    """As a user sees them."""
    served: float
    """Without the time for which client or server had no processor."""

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Percentiles:
        return cls(_p99([took for took, _ in rounds]), _p99([took - waited for took, waited in rounds]))

    def __str__(self) -> str:
        return f"{self.all * 1e3:.1f} ms, {self.served * 1e3:.1f} without the waits for a processor"


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[round(0.99 * (len(seconds) - 1))]


# --- the bare echo ------------------------------------------------------------------------------------------------


def echo(channel: int, path: str) -> None:
    """The same-host channel with nothing behind it: every frame goes back, until the process is killed."""

    async def run() -> None:
        server = ChannelServer(
            path, most=8, max_bytes=1 << 20, peer_bytes=1 << 20, all_bytes=1 << 20, on_gone=lambda identity: None
        )
        with server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                os.write(channel, b'["ready", null]\n')
                while True:
                    for identity, frame in await server.receive_batch():
                        server.send(identity, frame)

    trio.run(run)


class EchoClient:
    """A client of an echo, for :func:`maru_processes.act`."""

    def __init__(self, path: str, server: int):
        self._path, self._server = path, server

    def go_round(self, times: int) -> list[tuple[float, float]]:
        """Three frames there and back, so often: as many as a client's round of storing, looking and deleting."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller, Rounds(self._server) as rounds:
            caller.connect(self._path)
            for _ in range(times):
                with rounds.one():
                    for _ in range(3):
                        caller.send(b"x" * 100)
                        assert len(caller.recv(1_000)) == 100
            return rounds.took


def be_echo_client(channel: int, path: str, server: int) -> None:
    act(channel, EchoClient(path, server))


ECHO = f"{__name__}:echo"
ECHO_CLIENT = f"{__name__}:be_echo_client"
