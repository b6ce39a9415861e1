"""EventLog: the publisher's half of KV events. It numbers what happened, keeps the last of it, and tells what is held. Pure.

Rule 1. The first batch of an epoch says that nothing is held. So readers that know no epochs forget what an earlier run told.
Rule 2. A snapshot stands at the last sequence number given: whatever was collected before it is numbered first, and nothing may
        happen between that and looking at what is held.
Rule 3. Everything is bounded: a batch in hashes, what is kept for replays in bytes.
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
"""In one batch."""


class EventLog:
    """What happened in one epoch.

    Args:
        epoch: of this run of the publisher: random, and not 0.
        rank: the engine's data-parallel rank, where it has one.
        block_size: tokens in a block, where that is known.
        kept_bytes: of payloads that can be asked for again.
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
        """The last sequence number given; -1 before the first."""
        return self._last

    # --- recording ------------------------------------------------------------------------------------------------

    def stored(self, medium: str, hashes: Sequence[BlockHash]) -> None:
        """These can be found in this medium from now on."""
        self._collect(BlockStored, medium, hashes)

    def removed(self, medium: str, hashes: Sequence[BlockHash]) -> None:
        """These cannot be found in this medium any more."""
        self._collect(BlockRemoved, medium, hashes)

    def _collect(self, kind: type[BlockStored | BlockRemoved], medium: str, hashes: Sequence[BlockHash]) -> None:
        if not hashes:
            return
        # One event for what happened in one go: an order between a store and a removal of the same block must stay, one between
        # two stores says nothing.
        if self._collected and self._collected[-1][:2] == (kind, medium):
            self._collected[-1][2].extend(hashes)
        else:
            self._collected.append((kind, medium, list(hashes)))

    # --- publishing -----------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[EventMessage]:
        """Number what was collected. Each message must be sent, in order."""
        messages = [] if self._begun else [self._number(now, [AllBlocksCleared()])]
        self._begun = True
        collected, self._collected = self._collected, []
        for kind, medium, hashes in collected:
            messages += [self._number(now, [self._event(kind, medium, some)]) for some in _parts(hashes)]
        return messages

    def heartbeat(self, now: float) -> EventMessage:
        """A sign of life, once :meth:`take` was called: it tells the last number, and that nothing happened since."""
        return EventMessage(self._last, self._pack(now, []))

    def replay(self, start: int, now: float) -> Iterator[Answer]:
        """What was told from ``start`` on, as far as it is kept, and the end."""
        kept, end = list(self._kept), Answer(None, self._pack(now, []))
        return chain((Answer(*message) for message in kept if message.sequence >= start), (end,))

    def snapshot(
        self, held: Mapping[str, KeyList[K]], now: float, names: Callable[[Sequence[K]], Sequence[BlockHash]]
    ) -> Iterator[Answer]:
        """Everything that is held now, in parts, and the end. Nothing may be left in the collection: :meth:`take` goes first.

        What it says is decided by this call, whenever the parts are taken. Making one costs the same whatever is held.

        Args:
            held: what can be found, by medium; not to be changed until the last part was taken.
            now: the time, in seconds since 1970.
            names: names some of these.
        """
        assert self._begun and not self._collected, "what was collected would be told after what it led to"
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
