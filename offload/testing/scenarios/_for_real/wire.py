"""Messages between a real run and the process that its pipelines live in: lists in msgpack, over a socket of a pair.

Both sides read in two ways: a task waits, or the whole thread does, within a hook. What the thread reads and leaves, wakes the
task: the socket does not announce it again.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import Any, Final

import msgspec
import trio

_PATIENCE: Final = 30.0
_HEAD: Final = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Wire:
    """One end. What is sent to an end that is gone raises ``OSError``; what is read from it, ``ConnectionResetError``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._read = bytearray()
        self._later: deque[list[Any]] = deque()
        self._parked: trio.CancelScope | None = None

    def send(self, *message: object) -> None:
        """Blocks for as long as the other side does not read: never for long, since it always does."""
        data = _encode(message)
        left = memoryview(len(data).to_bytes(_HEAD, "big") + data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                select.select([], [self._socket], [], _PATIENCE)

    def receive(self, seconds: float = _PATIENCE) -> list[Any]:
        """The next message; the whole thread waits for it.

        Raises:
            TimeoutError: there is none.
        """
        while (message := self._next()) is None:
            if not select.select([self._socket], [], [], seconds)[0]:
                raise TimeoutError(f"no message within {seconds:g} s")
            self._fill()
        self._wake()  # what else has been read, nothing will announce
        return message

    def keep(self, message: list[Any]) -> None:
        """Who waits as a task is to have this one."""
        self._later.append(message)
        self._wake()

    async def wait(self) -> list[Any]:
        """The next message; this task waits for it."""
        while True:
            message = self._later.popleft() if self._later else self._next()
            if message is not None:
                return message
            with trio.CancelScope() as self._parked:
                await trio.lowlevel.wait_readable(self._socket)
            self._parked = None
            self._fill()

    def _wake(self) -> None:
        if self._parked is not None:
            self._parked.cancel()

    def close(self) -> None:
        """Idempotent. Nobody may wait in it."""
        self._socket.close()

    def _next(self) -> list[Any] | None:
        if len(self._read) < _HEAD:
            return None
        end = _HEAD + int.from_bytes(self._read[:_HEAD], "big")
        if len(self._read) < end:
            return None
        message: list[Any] = _decode(bytes(self._read[_HEAD:end]))
        del self._read[:end]
        return message

    def _fill(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the other side is gone")
        self._read += data
