"""EventLog: the publisher's half of KV events. Pure.

It numbers the events, keeps the last ones, and makes snapshots of the stored keys.

Rule 1. The first batch of an epoch clears all blocks. So readers that do not know epochs forget the events of an
        earlier run.
Rule 2. A snapshot is taken at the last sequence number: changes collected before it are numbered first, and nothing may
        happen between that and listing the stored keys.
Rule 3. Everything is bounded: a batch in hashes, the messages kept for replays in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

from ._books import KeyList
from ._messages import (
    AllBlocksCleared,
    Answer,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventMessage,
    pack_batch,
)

K = TypeVar("K")

MOST_HASHES: Final = 1_024
"""Most hashes in one batch."""


class EventLog:
    """The events of one epoch.

    Args:
        epoch: number of this run of the publisher: random, and not 0.
        rank: the engine's data-parallel rank, if it has one.
        block_size: tokens in a block, if known.
        kept_bytes: most bytes of payloads that can be requested again.
    """

    def __init__(self, epoch: int, *, rank: int | None = None, block_size: int = 0, kept_bytes: int = 16 << 20) -> None:
        self.epoch = epoch
        self._rank, self._block_size, self._most_bytes = rank, block_size, kept_bytes
        self._collected: list[tuple[type[BlockStored | BlockRemoved], str, list[BlockHash]]] = []
        self._begun = False
        self._last = -1
        self._kept: deque[EventMessage] = deque()
        self._kept_bytes = 0

    @property
    def last(self) -> int:
        """Last sequence number given; -1 before the first."""
        return self._last

    # --- recording ------------------------------------------------------------------------------------------------

    def stored(self, medium: str, hashes: Sequence[BlockHash]) -> None:
        """Record that these blocks can now be found in this medium."""
        self._collect(BlockStored, medium, hashes)

    def removed(self, medium: str, hashes: Sequence[BlockHash]) -> None:
        """Record that these blocks cannot be found in this medium any more."""
        self._collect(BlockRemoved, medium, hashes)

    def _collect(self, kind: type[BlockStored | BlockRemoved], medium: str, hashes: Sequence[BlockHash]) -> None:
        if not hashes:
            return
        # One event for consecutive changes of a kind: the order of a store and a removal of the same block matters,
        # that of two stores does not.
        if self._collected and self._collected[-1][:2] == (kind, medium):
            self._collected[-1][2].extend(hashes)
        else:
            self._collected.append((kind, medium, list(hashes)))

    # --- publishing -----------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[EventMessage]:
        """Assign numbers to the collected changes, and return the messages.

        Each message must be sent, in order.
        """
        messages = [] if self._begun else [self._number(now, [AllBlocksCleared()])]
        self._begun = True
        collected, self._collected = self._collected, []
        for kind, medium, hashes in collected:
            messages += [self._number(now, [self._event(kind, medium, some)]) for some in _parts(hashes)]
        return messages

    def heartbeat(self, now: float) -> EventMessage:
        """Return a message without events, once :meth:`take` was called.

        It carries the last number, and shows that nothing happened since.
        """
        return EventMessage(self._last, self._pack(now, []))

    def replay(self, start: int, now: float) -> Iterator[Answer]:
        """Return the kept events from ``start`` on, and the end."""
        kept, end = list(self._kept), Answer(None, self._pack(now, []))
        return chain((Answer(*message) for message in kept if message.sequence >= start), (end,))

    def snapshot(
        self, held: Mapping[str, KeyList[K]], now: float, names: Callable[[Sequence[K]], Sequence[BlockHash]]
    ) -> Iterator[Answer]:
        """Return all stored keys, in parts, and the end.

        No change may be uncollected: call :meth:`take` first. The contents are determined by this call, however late
        the parts are taken. Its cost does not depend on the number of keys.

        Args:
            held: the stored keys, by medium; not to be changed until the last part was taken.
            now: the time, in seconds since 1970.
            names: returns the block hashes of some keys.
        """
        assert self._begun and not self._collected, "collected changes must be published before an answer"
        return self._answers(held, now, names, self._last)

    def _answers(
        self,
        held: Mapping[str, KeyList[K]],
        now: float,
        names: Callable[[Sequence[K]], Sequence[BlockHash]],
        last: int,
    ) -> Iterator[Answer]:
        part = 0
        for medium, keys in held.items():
            for some in _parts(keys):
                if hashes := names(some):
                    yield Answer(last, self._pack(now, [self._event(BlockStored, medium, hashes)], last), part)
                    part += 1
        yield Answer(None, self._pack(now, [], last), part)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _event(self, kind: type[BlockStored | BlockRemoved], medium: str, hashes: Sequence[BlockHash]) -> Event:
        if kind is BlockStored:
            return BlockStored(list(hashes), medium, block_size=self._block_size)
        return BlockRemoved(list(hashes), medium)

    def _number(self, now: float, events: list[Event]) -> EventMessage:
        self._last += 1
        message = EventMessage(self._last, self._pack(now, events))
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        while self._kept_bytes > self._most_bytes:
            self._kept_bytes -= len(self._kept.popleft().payload)
        return message

    def _pack(self, now: float, events: list[Event], last: int | None = None) -> bytes:
        return pack_batch(Batch(now, events, self._rank, self.epoch, self._last if last is None else last))


def _parts(hashes: KeyList[K]) -> Iterator[Sequence[K]]:
    return (hashes[at : at + MOST_HASHES] for at in range(0, len(hashes), MOST_HASHES))
