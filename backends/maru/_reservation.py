"""Pages that are filled in one hop and registered by one message.

A transfer ends in one of these ways:

* The copy fails: all blocks failed, and every page is free once the reservation is released.
* A block differs from the one stored in its source: it fails alone, and its page is free at once.
* The transfer is cancelled during the copy: it returns at once. A thread may still write, so the pages stay with this
  reservation, which a caller that quarantines it does not release. If the reservation is dropped, they are free when
  the thread is over, not before.
* The server answers new, duplicate, refused, no quota: ``STORED``, ``DUPLICATE``, ``Rejected``. Pages without a new
  block are free at once.
* The server does not answer: the handler asks for the result of that attempt, and the answer fences it. Then the
  outcome is ``STORED`` or ``DUPLICATE`` as usual, or ``Failed`` with nothing left behind.
* That question is not answered either: :class:`maru.NoAnswer`, which a pipeline turns into ``Failed``. The copy is
  over, so the source is free and nothing needs quarantine; the pages are *in doubt*, and the client asks for them again
  with each sign of life. If they turn out to be registered, they are found, with the right bytes. The same happens if
  the transfer is cancelled meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from maru import Stored

from ..abc import Key, Outcome, Source
from ..base.copying import StoreCopy
from ..base.pages import Pages
from ..base.tier_base import TierReservation
from ._answers import outcomes_of

if TYPE_CHECKING:
    from maru import AllocBatch

    from ._tier import MaruTier


class MaruReservation(TierReservation["MaruTier"]):
    """Pages for some keys. Made by :meth:`MaruTier.reserve`.

    A transfer raises :class:`maru.NoAnswer` if its result is unknown: the client keeps its pages in doubt until it is
    known. It raises :class:`maru.ServerLost` if the session, and with it the pages, has ended. The copy is over in both
    cases.
    """

    __slots__ = ("_batch", "_sums")

    def __init__(self, tier: MaruTier, keys: Sequence[Key], batch: AllocBatch | None) -> None:
        """Use :meth:`MaruTier.reserve` instead."""
        super().__init__(tier, keys, tier.block_bytes)
        self._batch = batch
        self._sums: Sequence[int] = ()

    @property
    def pages(self) -> Pages:
        """Addresses that the granted blocks are to be written to."""
        batch = self._batch
        return Pages([] if batch is None else batch.addresses, self.block_bytes, batch)

    def release(self) -> None:
        """Give back the pages that were not registered.

        Idempotent; never blocks, never raises.
        """
        if self._batch is not None:
            self._batch.free()

    def _size(self) -> int:
        return 0 if self._batch is None else len(self._batch)

    def _keep(self, positions: Sequence[int]) -> None:
        if self._batch is not None:
            self._batch.keep(positions)
        if self._sums:  # of a copy that is over
            self._sums = [self._sums[at] for at in positions]

    async def _copy(self, source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Mapping[int, Exception]:
        tier = self._tier
        copy = StoreCopy(source, keys, refs, summed=tier.checksums)
        failed = await copy.into(self.pages, tier.in_place)
        self._sums = copy.sums
        return failed

    async def _register(self, keys: Sequence[Key]) -> Sequence[Outcome]:
        batch, tier = self._batch, self._tier
        assert batch is not None
        sums = list(self._sums) if tier.checksums else None
        answers = await tier.handler.store_pages(
            tier.naming.names(keys), batch, self.block_bytes, sums, depths=self.depths_of(keys)
        )
        outcomes = outcomes_of(tier, keys, answers)
        tier.stored += answers.count(Stored.NEW)
        tier.duplicates += answers.count(Stored.DUPLICATE) - tier.damaged.note_stored(keys, outcomes)
        return outcomes
