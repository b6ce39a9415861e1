"""Subscriber of KV events: a mirror that a SUB socket keeps current.

It requests missed events over a DEALER.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio

from ..exception_groups import raise_unwrapped
from ..transport import Message, SocketOptions, TrioSocket, open_socket
from ._messages import BadEvent, BlockHash, pack_request, unpack_answer, unpack_message
from ._mirror import Mirror, MirrorStatistics

_TICK: Final = 0.1
"""Seconds between two updates of the mirror's time."""


class EventMirror:
    """A copy of a publisher's keys, kept up to date.

    Made by :func:`open_mirror` only.
    """

    def __init__(self, mirror: Mirror, events: TrioSocket, answers: TrioSocket) -> None:
        self._mirror, self._events, self._answers = mirror, events, answers
        self._changed = trio.lowlevel.ParkingLot()
        self.bad_messages: int = 0
        """Received messages that were not KV event messages."""

    def __repr__(self) -> str:
        told = self._mirror.statistics()
        return f"<EventMirror of {told.blocks} blocks, {'current' if self.is_current else 'not current'}>"

    @property
    def is_current(self) -> bool:
        """Whether the copy was complete a short time ago.

        That is at most ``stale_after`` and a round trip ago.
        """
        return self._mirror.is_current(trio.current_time())

    def held(self) -> Mapping[str | None, AbstractSet[BlockHash]]:
        """Return the keys by medium, as a live view.

        It changes with the mirror.
        """
        return self._mirror.held()

    def media_of(self, block_hash: BlockHash) -> frozenset[str | None]:
        """Return the media that have this block."""
        return self._mirror.media_of(block_hash)

    def prefix(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading keys that are in any medium."""
        return self._mirror.prefix(block_hashes)

    def statistics(self) -> MirrorStatistics:
        """Return an immutable snapshot."""
        return self._mirror.statistics()

    async def wait(self, holds: Callable[[EventMirror], bool]) -> None:
        """Wait until ``holds(self)`` is true.

        It is called after each message and ten times a second.
        """
        while not holds(self):
            await self._changed.park()
        await trio.lowlevel.checkpoint()

    async def wait_current(self) -> None:
        """Wait until this mirror is current."""
        await self.wait(lambda mirror: mirror.is_current)

    async def _follow(self, socket: TrioSocket, receive: Callable[[Message, float], None]) -> None:
        while True:
            for frames in await socket.receive_batch():
                try:
                    receive(frames, trio.current_time())
                except BadEvent:
                    self.bad_messages += 1
            self._ask()

    def _receive_event(self, frames: Message, now: float) -> None:
        self._mirror.receive(unpack_message(frames), now)

    def _receive_answer(self, frames: Message, now: float) -> None:
        self._mirror.receive_answer(unpack_answer(frames), now)

    async def _tick(self) -> None:
        while True:
            self._mirror.tick(trio.current_time())
            self._ask()
            await trio.sleep(_TICK)

    def _ask(self) -> None:
        request = self._mirror.take_request()
        if request is not None:
            with suppress(trio.WouldBlock):  # the publisher is not there; the request is repeated later
                self._answers.send_nowait(pack_request(request))
        self._changed.unpark_all()


@asynccontextmanager
async def open_mirror(
    endpoint: str,
    answers_endpoint: str,
    *,
    topic: str = "",
    stale_after: float = 3.0,
    retry_after: float = 1.0,
    options: SocketOptions | None = None,
) -> AsyncIterator[EventMirror]:
    """Open a mirror of a publisher of KV events, in a block.

    The publisher need not be there yet, and may come back as another one. Until :attr:`EventMirror.is_current`, the
    mirror is no evidence: a missing block is not a miss then.

    Args:
        endpoint: address at which the publisher publishes.
        answers_endpoint: address at which it answers requests.
        topic: the prefix of the topics to follow.
        stale_after: seconds without news after which the mirror is not current; more than the publisher's heartbeat.
        retry_after: seconds to wait for an answer.
        options: bounds and CURVE keys of both sockets.
    """
    options = SocketOptions(immediate=True) if options is None else options
    async with (
        open_socket("sub", connect=[endpoint], topics=[topic.encode()], options=options) as events,
        open_socket("dealer", connect=[answers_endpoint], options=options) as answers,
    ):
        with raise_unwrapped():
            async with trio.open_nursery() as nursery:
                mirror = EventMirror(Mirror(stale_after=stale_after, retry_after=retry_after), events, answers)
                nursery.start_soon(mirror._follow, events, mirror._receive_event)
                nursery.start_soon(mirror._follow, answers, mirror._receive_answer)
                nursery.start_soon(mirror._tick)
                yield mirror
                nursery.cancel_scope.cancel()
