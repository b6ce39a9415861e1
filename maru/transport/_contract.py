"""What is asked of a socket by those who use one: little enough that a test can put a lossy wire in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from ._frames import Message
from ._waiting import Expected


class MessageSocket(Protocol):
    """Sends messages; those that come are handed to the ``on_messages`` it was opened with."""

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one message; whether there is such a peer. Raises :exc:`trio.WouldBlock` where its queue is full."""
        ...

    async def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message, waiting for room in turn. Cancelled, nothing was sent."""
        ...

    def expect(self) -> Expected:
        """Something that is to come: ``on_messages`` delivers it, one task waits for it."""
        ...

    async def aclose(self) -> None:
        """Close it. Whoever waits gets :exc:`trio.ClosedResourceError`."""
        ...


OnMessages: TypeAlias = Callable[[list[Message]], None]
"""Is handed the messages that have come, in their order; synchronous."""

OpenMessageSocket: TypeAlias = Callable[[OnMessages], AbstractAsyncContextManager[MessageSocket]]
"""How to get a socket that hands its messages on: what a client takes, and a test replaces."""
