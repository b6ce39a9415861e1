"""The contract of a socket, as far as its users need it: so small that a test can replace it by a lossy one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from ..base.errors import Shortage
from ._waiting import Expected

Message: TypeAlias = list[bytes]
"""The frames of one message. At a ROUTER the first one says of which peer it is; over a channel there is one."""


class MessageSocket(Protocol):
    """Sends messages, and passes received ones to the ``on_messages`` it was opened with."""

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one message; returns whether there is such a peer. Raises :exc:`trio.WouldBlock` if its queue is full."""
        ...

    async def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message, waiting for room in turn. Cancelled, nothing was sent."""
        ...

    def expect(self) -> Expected:
        """Make an :class:`Expected`, which ``on_messages`` delivers and one task waits for."""
        ...

    async def aclose(self) -> None:
        """Close the socket. Tasks that wait get :exc:`trio.ClosedResourceError`."""
        ...


OnMessages: TypeAlias = Callable[[list[Message]], None]
"""Is handed the messages that have come, in their order; synchronous."""

OnLost: TypeAlias = Callable[[Collection[bytes]], None]
"""Is told that a connection is lost, with the frames that were not sent over it."""

OnShortage: TypeAlias = Callable[[bytes, Shortage], object]
"""Called when a waiting frame is dropped, with the reason."""

OpenMessageSocket: TypeAlias = Callable[[OnMessages], AbstractAsyncContextManager[MessageSocket]]
"""How to get a socket that hands its messages on: what a client takes, and a test replaces."""


class BlockingSocket(Protocol):
    """Sends and receives messages, blocking its thread. One thread at a time."""

    losses: int
    """How often a connection was lost, as far as is known: what was sent over it is never answered."""

    def send(self, frames: Sequence[bytes], timeout: float | None = None) -> bool:
        """Send one message, waiting for room for some seconds. Returns whether it was sent, completely or not at all."""
        ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for the next message; ``None`` if there is none in that time, or a connection was lost."""
        ...

    def close(self) -> None:
        """Close the socket. No thread may be waiting in it."""
        ...
