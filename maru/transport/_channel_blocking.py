"""A client's side of the same-host channel, for a thread without an event loop. It belongs to one thread at a time.

Rule 1. A frame goes out whole or not at all, and comes in whole.
Rule 2. A lost connection is made anew by the next call that needs one. What the server had been sent is not sent again.
Rule 3. Before it sleeps it busy-polls (`_descriptor_wait`).
        answer.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Final

from .._errors import HandlerClosed
from ._channel_client import MAX_FRAME_BYTES, RECONNECT_MAX, longer
from ._descriptor_wait import DescriptorWait
from ._packets import PacketConnection, connect

_NEVER: Final = float("inf")
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
        self._wait: DescriptorWait | None = None
        self._pause = 0.0
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
            elif not DescriptorWait(connection.descriptor, events=select.POLLOUT).sleep(deadline):
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
            wait = self._wait
            assert wait is not None, "made with each connection"
            if not wait.busy_poll(deadline) and not wait.sleep(deadline):
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
        self._wait = DescriptorWait(connection.descriptor, _BUSY_POLL)
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
