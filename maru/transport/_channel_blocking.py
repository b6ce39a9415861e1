"""A client's side of the same-host channel, for a thread without an event loop. It belongs to one thread at a time.

Rule 1. A frame goes out whole or not at all, and comes in whole.
Rule 2. A lost connection is made anew by the next call that needs one. What the server had been sent is not sent again.
Rule 3. Before it sleeps it busy-polls, as the trio side does (`_waiting`, rule 5): sleeping and waking take longer than an
        answer.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Final

from .._errors import HandlerClosed
from ._channel_client import MAX_FRAME_BYTES, RECONNECT_MAX, longer
from ._packets import PacketConnection, connect
from ._waiting import SELDOM, yield_processor

_NEVER: Final = float("inf")
_LONGEST: Final = 1_000.0
"""Seconds of one sleep, so that no time is too long for the kernel."""
_BUSY_POLL: Final = 100e-6


class BlockingChannel:
    """A channel that blocks its thread. A context manager is not needed: its owner closes it.

    Args:
        path: of the server's Unix socket, whether it is there already or not.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False
        self._connection: PacketConnection | None = None
        self._poll = select.poll()
        self._pause = 0.0
        self._skip = self._vain = 0
        self._connect()

    def __repr__(self) -> str:
        return f"<BlockingChannel of {self._path}{': closed' if self._closed else ''}>"

    def send(self, frames: Sequence[bytes], timeout: float | None = None) -> bool:
        """Send the last of these frames, waiting for a server and for room.

        Args:
            frames: ZeroMQ's envelope, which is not sent, and the frame.
            timeout: how long to wait, in seconds; 0 not at all, ``None`` without end.

        Returns:
            Whether it was sent. If not, nothing of it was.

        Raises:
            HandlerClosed: it was closed.
        """
        frame = frames[-1]
        deadline = -1.0
        while True:
            self._check_open()
            connection = self._connection
            if connection is not None:
                try:
                    connection.send(frame)
                    return True
                except BlockingIOError:
                    pass
                except OSError:
                    self._lose()
                    connection = None
            if deadline < 0:
                deadline = _NEVER if timeout is None else perf_counter() + timeout
            if connection is None:
                if not self._connect_before(deadline):
                    return False
            elif not self._wait(select.POLLOUT, deadline):
                return False

    def receive(self, timeout: float | None = None) -> list[bytes] | None:
        """The next frame, in a list; ``None`` if there is none in that time.

        Where the connection is lost there is none: what was asked over it is never answered.

        Raises:
            HandlerClosed: it was closed.
        """
        self._check_open()
        deadline = _NEVER if timeout is None else perf_counter() + timeout
        while (connection := self._connection) is not None:
            if not self._busy_poll(deadline) and not self._wait(select.POLLIN, deadline):
                return None
            try:
                frame = connection.receive()
                self._pause = 0.0
                return [frame]
            except BlockingIOError:
                continue
            except OSError:
                self._lose()
        left = deadline - perf_counter()
        if left > 0:
            sleep(min(left, RECONNECT_MAX))
        return None

    def close(self) -> None:
        """Close it. Nobody may wait in it. Idempotent."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _check_open(self) -> None:
        if self._closed:
            raise HandlerClosed("this socket was closed")

    # --- the connection -------------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        self._pause = longer(self._pause)  # until the server is heard: it may accept and hang up at once
        try:
            connection = PacketConnection(connect(self._path), MAX_FRAME_BYTES)
        except OSError:
            return False
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.descriptor, select.POLLIN)
        return True

    def _connect_before(self, deadline: float) -> bool:
        while True:
            left = deadline - perf_counter()
            if left <= 0:
                return False
            if self._pause:
                sleep(min(left, self._pause))
            if self._connect():
                return True

    def _lose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- waiting --------------------------------------------------------------------------------------------------

    def _wait(self, events: int, deadline: float) -> bool:
        """Wait for the connection, with the interpreter's lock released. Whether it has something to tell."""
        connection = self._connection
        assert connection is not None
        poll = self._poll
        if events != select.POLLIN:
            poll = select.poll()
            poll.register(connection.descriptor, events)
        while True:
            left = deadline - perf_counter()
            if poll.poll(max(0.0, min(left, _LONGEST)) * 1_000):
                return True
            if left <= 0:
                return False

    def _busy_poll(self, deadline: float) -> bool:
        """Poll for a moment. Whether it has something to tell."""
        if self._skip:
            self._skip -= 1
            return False
        now = perf_counter()
        end = min(deadline, now + _BUSY_POLL)
        if now >= end:
            return False
        poll = self._poll.poll
        while not poll(0):
            if perf_counter() >= end:
                self._vain = min(2 * self._vain + 1, SELDOM)
                self._skip = self._vain
                return False
            yield_processor()
        self._vain = 0
        return True
