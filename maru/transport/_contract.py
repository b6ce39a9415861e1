"""The contract of a socket, as its users need it.

So small that a test can replace it by a lossy one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from ..base.errors import Shortage
from ._waiting import Expected

Message: TypeAlias = list[bytes]
"""Frames of one message.

At a ROUTER the first one is the identity of the peer; over a channel there is one.
"""


class MessageSocket(Protocol):
    """Socket that passes received messages to its ``on_messages``."""

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one message. Returns whether its peer exists.

        Raises:
            trio.WouldBlock: the peer's queue is full.
        """
        ...

    async def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message, waiting for room in turn.

        If cancelled, nothing was sent.
        """
        ...

    def expect(self) -> Expected:
        """Make an :class:`Expected`, which ``on_messages`` delivers to one task."""
        ...

    async def aclose(self) -> None:
        """Close the socket.

        Tasks that wait get :exc:`trio.ClosedResourceError`.
        """
        ...


OnMessages: TypeAlias = Callable[[list[Message]], None]
"""Callback for received messages, in order; synchronous."""

OnLost: TypeAlias = Callable[[Collection[bytes]], None]
"""Callback for a lost connection, with the frames not sent over it."""

OnShortage: TypeAlias = Callable[[bytes, Shortage], object]
"""Callback for a dropped waiting frame, with the reason."""

OpenMessageSocket: TypeAlias = Callable[[OnMessages], AbstractAsyncContextManager[MessageSocket]]
"""Function that opens a socket; clients take one, and tests replace it."""


class BlockingSocket(Protocol):
    """Socket that blocks its thread. One thread at a time."""

    losses: int
    """Lost connections, as far as is known.

    Requests sent over a lost connection are never answered.
    """

    def send(self, frames: Sequence[bytes], timeout: float | None = None) -> bool:
        """Send one message, waiting ``timeout`` seconds for room.

        Returns whether it was sent, completely or not at all.
        """
        ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for the next message.

        ``None`` if there is none in that time, or a connection was lost.
        """
        ...

    def close(self) -> None:
        """Close the socket. No thread may be waiting in it."""
        ...
