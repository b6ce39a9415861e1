"""A client's side of the same-host channel, for threads without event loop.

It belongs to one thread at a time.

Rule 1. A frame is sent whole or not at all, and received whole.
Rule 2. A :class:`BlockingChannel` reports a lost connection, and the next call that needs one connects again. Frames
        that were sent to the server are not sent again. A :class:`ChannelConnection` that is lost is over: for clients
        whose state the server keeps as long as they are connected.
Rule 3. Before a thread sleeps it busy-polls (`_descriptor_wait`).
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Final

from ..base.errors import HandlerClosed, Shortage
from ..base.packets import PacketConnection, connect
from ._channel_client import MAX_FRAME_BYTES, RECONNECT_MAX, SHORTAGE, longer
from ._descriptor_wait import DescriptorWait

_NEVER: Final = float("inf")
_BUSY_POLL: Final = 100e-6


class ChannelConnection(PacketConnection):
    """One connection to a server, with waits for it.

    Args:
        path: path of the server's Unix socket.

    Raises:
        PermissionError: another user's process listens there. Nothing was sent.
        BlockingIOError: more clients wait for the server than the kernel allows.
        OSError: no process listens there.
    """

    __slots__ = ("_wait",)

    def __init__(self, path: str) -> None:
        super().__init__(connect(path), MAX_FRAME_BYTES)
        self._wait = DescriptorWait(self.descriptor, _BUSY_POLL)

    def send_by(self, frame: bytes, deadline: float) -> bool:
        """Send one frame, waiting for room until the deadline.

        The deadline is a time of ``perf_counter``. Returns whether it was sent.

        Raises:
            Shortage: there is no descriptor or memory for so large a frame. The connection goes on.
            OSError: the connection is over.
            ValueError: the frame is empty.
        """
        while True:
            try:
                self.send(frame)
                return True
            except BlockingIOError:
                if not DescriptorWait(self.descriptor, events=select.POLLOUT).sleep(deadline):
                    return False

    def receive_by(self, deadline: float) -> bytes | None:
        """Receive the next frame; None if none comes before the deadline.

        The deadline is a time of ``perf_counter``.

        Raises:
            OSError: the connection is over.
        """
        wait = self._wait
        while wait.busy_poll(deadline) or wait.sleep(deadline):
            try:
                return self.receive()
            except BlockingIOError:
                continue
            except Shortage:  # the frame stays in the socket
                sleep(max(0.0, min(SHORTAGE, deadline - perf_counter())))
                if perf_counter() >= deadline:
                    break
        return None


class BlockingChannel:
    """A channel that blocks its thread.

    A context manager is not needed: its owner closes it.

    Args:
        path: path of the server's Unix socket, which need not exist yet.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False
        self._connection: ChannelConnection | None = None
        self._pause = 0.0
        self.losses: int = 0
        self._connect()

    def __repr__(self) -> str:
        return f"<BlockingChannel of {self._path}{': closed' if self._closed else ''}>"

    def send(self, frames: Sequence[bytes], timeout: float | None = None) -> bool:
        """Send one frame, waiting for a server and for room.

        Args:
            frames: ZeroMQ's envelope, which is not sent as a channel needs none, and the frame at the end.
            timeout: seconds to wait at most; 0 not at all, ``None`` without end.

        Returns:
            Whether it was sent. If not, no part of it was.

        Raises:
            HandlerClosed: the channel was closed.
            Shortage: there is no descriptor or memory for so large a frame. Nothing was sent.
        """
        deadline = _NEVER if timeout is None else perf_counter() + timeout
        while True:
            self._check_open()
            if self._connection is None and not self._connect_before(deadline):
                return False
            try:
                assert self._connection is not None
                return self._connection.send_by(frames[-1], deadline)
            except OSError:
                self._lose()

    def receive(self, timeout: float | None = None) -> list[bytes] | None:
        """Wait for the next frame, in a list; ``None`` if none comes.

        If the connection is lost, ``None`` is returned at once: requests sent over it are never answered
        (:attr:`losses`).

        Raises:
            HandlerClosed: the channel was closed.
        """
        self._check_open()
        deadline = _NEVER if timeout is None else perf_counter() + timeout
        if self._connection is not None:
            try:
                frame = self._connection.receive_by(deadline)
            except OSError:
                self._lose()
                return None
            self._pause = 0.0 if frame is not None else self._pause
            return None if frame is None else [frame]
        left = deadline - perf_counter()
        if left > 0:
            sleep(min(left, RECONNECT_MAX))
        return None

    def close(self) -> None:
        """Close the channel. No thread may be waiting in it. Idempotent."""
        self._closed = True
        self._lose()

    def _check_open(self) -> None:
        if self._closed:
            raise HandlerClosed("this socket was closed")

    # --- the connection -------------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        self._pause = longer(self._pause)  # until a frame is received: the server may accept and hang up at once
        try:
            self._connection = ChannelConnection(self._path)
        except OSError:
            return False
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
            self.losses += 1
            connection.close()
