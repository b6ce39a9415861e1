"""Mirror: the reader's copy of a publisher's stored keys. Pure.

It knows when it may be out of date.

Messages, requests and answers may be lost, repeated, reordered or late, and the publisher may be killed at any point
and restart with other blocks. In all these cases a mirror has the keys that its publisher had at one point of its
epoch, and :meth:`Mirror.is_current` is true only if that was recently the last point.

Rule 1. Events are applied in the order of their numbers, each once. Early ones are kept; missing ones are requested.
Rule 2. If missing events are not kept by the publisher any more, or the epoch changes, a snapshot is requested. Only
        its answer changes the epoch: the numbers of epochs have no order, but a publisher that has ended does not
        answer.
Rule 3. Events that came before a snapshot was requested are in the snapshot, or of an earlier epoch: they are dropped
        then.
Rule 4. One request is under way at a time. Without an answer for ``retry_after``, it becomes one for a snapshot.
        Without events for ``stale_after`` the publisher is asked for new ones, over the connection on which it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import attrs

from ._messages import (
    AllBlocksCleared,
    Answer,
    Batch,
    BlockHash,
    BlockStored,
    EventMessage,
    Replay,
    Request,
    Snapshot,
    unpack_batch,
)

MOST_EARLY: Final = 1_024
"""Most early messages that are kept.

With one more, a snapshot costs less.
"""


@attrs.frozen
class MirrorStatistics:
    """A snapshot of a mirror's state; counters since it was made."""

    epoch: int
    """Epoch of the publisher; 0 before the first snapshot."""
    sequence: int
    """Number of the last applied event message; -1 before the first."""
    blocks: int
    """Keys in the mirror, over all media."""
    applied: int
    """Event messages that were applied."""
    repeated: int
    """Event messages that had been applied before."""
    gaps: int
    """Number of times that messages were missing, or of another epoch."""
    replays: int
    """Requests for missing messages."""
    snapshots: int
    """Requests for a snapshot."""


class Mirror:
    """A copy of an event publisher's keys, by medium.

    Args:
        stale_after: seconds without news after which the publisher is asked, and the mirror is not current any more.
        retry_after: seconds after which an unanswered request is given up.
    """

    def __init__(self, *, stale_after: float = 3.0, retry_after: float = 1.0) -> None:
        self._stale_after, self._retry_after = stale_after, retry_after
        self._epoch = 0
        self._next = 0  # the number that is applied next
        self._last = -1  # the highest number that is known to have been given in this epoch
        self._held: dict[str | None, set[BlockHash]] = {}
        self._early: dict[int, Batch] = {}
        self._early_epoch = 0  # epoch of the messages kept while a snapshot is under way
        self._parts: dict[int, Batch] = {}
        self._parts_of = (0, -1)  # epoch and last number of the snapshot that the parts belong to
        self._parts_wanted = -1  # -1 until the end has come
        self._asked: Request | None = None
        self._asked_at = self._heard_at = float("-inf")
        self._to_send: Request | None = None
        self._applied = self._repeated = self._gaps = self._replays = self._snapshots = 0

    # --- queries --------------------------------------------------------------------------------------------------

    def is_current(self, now: float) -> bool:
        """Return whether the copy was complete a short time ago.

        That is at most ``stale_after`` and a round trip ago.
        """
        return self._epoch != 0 and self._asked is None and now - self._heard_at <= self._stale_after

    def held(self) -> Mapping[str | None, AbstractSet[BlockHash]]:
        """Return the keys by medium, as a live view.

        It changes with the mirror.
        """
        return self._held

    def media_of(self, block_hash: BlockHash) -> frozenset[str | None]:
        """Return the media that have this block."""
        return frozenset([medium for medium, hashes in self._held.items() if block_hash in hashes])

    def prefix(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading keys that are in any medium."""
        media = [*self._held.values()]
        for length, block_hash in enumerate(block_hashes):
            if not any(block_hash in hashes for hashes in media):
                return length
        return len(block_hashes)

    def statistics(self) -> MirrorStatistics:
        """Return an immutable snapshot."""
        return MirrorStatistics(
            epoch=self._epoch,
            sequence=self._next - 1,
            blocks=sum(map(len, self._held.values())),
            applied=self._applied,
            repeated=self._repeated,
            gaps=self._gaps,
            replays=self._replays,
            snapshots=self._snapshots,
        )

    # --- requests -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Update the time: repeat an unanswered request, and query a silent publisher."""
        if self._asked is not None:
            if now - self._asked_at >= self._retry_after:
                self._ask_snapshot(now)
        elif not self._epoch:
            self._ask_snapshot(now)
        elif now - self._heard_at > self._stale_after:
            self._ask(Replay(self._next), now)
            self._replays += 1

    def take_request(self) -> Request | None:
        """Return the request to send to the publisher now, if any.

        It may be lost.
        """
        request, self._to_send = self._to_send, None
        return request

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, message: EventMessage, now: float) -> None:
        """Apply an event message, published or replayed.

        Raises:
            BadEvent: the message is malformed. Nothing has changed.
        """
        number, batch = message.sequence, unpack_batch(message.payload)
        if isinstance(self._asked, Snapshot):
            self._keep(number, batch)
        elif batch.epoch != self._epoch:
            self._gaps += 1
            self._ask_snapshot(now)
        else:
            self._take(number, batch, now)

    def receive_answer(self, answer: Answer, now: float) -> None:
        """Apply a part of an answer.

        Raises:
            BadEvent: the part is malformed. Nothing has changed.
        """
        if answer.part is not None:
            self._receive_part(answer, answer.part, now)
        elif answer.sequence is not None:
            if isinstance(self._asked, Replay):
                self._asked_at = now
            self.receive(EventMessage(answer.sequence, answer.payload), now)
        elif isinstance(self._asked, Replay):
            batch = unpack_batch(answer.payload)
            self._asked = None
            if batch.epoch != self._epoch or max(batch.last, self._last) >= self._next:
                self._ask_snapshot(now)  # the missing events are not kept any more
            else:
                self._heard_at = now

    def _receive_part(self, answer: Answer, part: int, now: float) -> None:
        batch = unpack_batch(answer.payload)
        if not isinstance(self._asked, Snapshot):
            return  # the snapshot is complete already
        self._asked_at = now
        if (batch.epoch, batch.last) != self._parts_of:
            # If a request was given up, several are under way. Changes may lie between their answers, which must not
            # mix: parts of the same epoch and number have the same contents.
            self._parts.clear()
            self._parts_of, self._parts_wanted = (batch.epoch, batch.last), -1
        if answer.sequence is None:
            self._parts_wanted = part
        else:
            self._parts[part] = batch
        if len(self._parts) == self._parts_wanted:
            self._begin(batch, now)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _take(self, number: int, batch: Batch, now: float) -> None:
        """Apply a message of this epoch, with no snapshot under way."""
        self._last = max(self._last, number, batch.last)
        if not batch.events:
            pass
        elif number < self._next:
            self._repeated += 1
        else:
            self._early[number] = batch
            self._apply_early()
        if self._last < self._next:
            # No number is missing: this may have answered the request.
            self._heard_at = now
            self._asked = None
        elif len(self._early) > MOST_EARLY:
            self._ask_snapshot(now)
        elif self._asked is None:
            self._gaps += 1
            self._replays += 1
            self._ask(Replay(self._next), now)

    def _apply_early(self) -> None:
        while (batch := self._early.pop(self._next, None)) is not None:
            self._apply(batch)
            self._next += 1
            self._applied += 1

    def _apply(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._held.clear()
            elif isinstance(event, BlockStored):
                self._held.setdefault(event.medium, set()).update(event.block_hashes)
            elif (hashes := self._held.get(event.medium)) is not None:
                hashes.difference_update(event.block_hashes)
                if not hashes:
                    del self._held[event.medium]

    def _keep(self, number: int, batch: Batch) -> None:
        """Keep a message that came while a snapshot is under way.

        It may continue after the snapshot. Of several epochs the latest one seen is kept: other messages will be
        requested, or are of an earlier epoch.
        """
        if batch.epoch != self._early_epoch or len(self._early) >= MOST_EARLY:
            self._early.clear()
            self._early_epoch = batch.epoch
        if batch.events:
            self._early[number] = batch

    def _begin(self, batch: Batch, now: float) -> None:
        """Replace the keys by those of the complete snapshot."""
        self._held.clear()
        for part in self._parts.values():
            self._apply(part)
        self._epoch, self._next, self._last = batch.epoch, batch.last + 1, batch.last
        self._asked, self._heard_at = None, now
        early, self._early, self._parts = self._early, {}, {}
        if self._early_epoch not in (0, self._epoch):
            # The messages came after the snapshot was requested. Whether they are of the run that answered last is
            # unknown.
            self._gaps += 1
            self._ask_snapshot(now)
            return
        for number in sorted(early):
            self._take(number, early[number], now)

    def _ask_snapshot(self, now: float) -> None:
        self._early.clear()
        self._parts.clear()
        self._early_epoch, self._parts_of, self._parts_wanted = 0, (0, -1), -1
        self._snapshots += 1
        self._ask(Snapshot(), now)

    def _ask(self, request: Request, now: float) -> None:
        self._asked = self._to_send = request
        self._asked_at = now
