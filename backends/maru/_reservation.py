"""Pages for some blocks: filled from their source in one hop, then registered by one message.

What can end a transfer, and how each end is told:

* The copy fails: all blocks failed, and every page is free once this is released.
* A block is not what was stored in its source: it fails alone, and its page is free at once.
* It is cancelled during the copy: it leaves at once. A thread may still write, so the pages stay with this reservation, which
  whoever quarantines it does not release. Forgotten, they are free again when the thread is over, not before.
* The server says new, duplicate, refused, no quota: ``STORED``, ``DUPLICATE``, ``Rejected``. Those pages are free at once.
* The server does not answer: the handler asks it what became of that very attempt, and the answer fences it. Then the
  outcome is ``STORED`` or ``DUPLICATE`` as if it had been told, or ``Failed`` with nothing left behind.
* It does not answer that either: :class:`maru.NoAnswer`, of which a pipeline makes ``Failed``. The copy is over, so the source
  is free and nothing needs quarantine; the pages are in the client's limbo, which each sign of life tries to resolve again. If
  it turns out that they were registered, they are found, with the right bytes. The same where this is cancelled meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._copying import StoreCopy
from ..abc import BlockSizeError, Failed, Key, Outcome, Source
from ..pages import Pages

if TYPE_CHECKING:
    from maru import AllocBatch

    from ._tier import MaruTier


class MaruReservation:
    """Pages for some keys. Made by :meth:`MaruTier.reserve`."""

    __slots__ = ("_batch", "_tier", "_used", "block_bytes", "granted")

    def __init__(self, tier: MaruTier, keys: Sequence[Key], batch: AllocBatch | None) -> None:
        """Not to be called: a tier makes them."""
        self._tier = tier
        self._batch = batch
        self._used = False
        self.block_bytes: int = tier.block_bytes
        self.granted: Sequence[Key] = keys
        """The keys there is room for."""

    def __repr__(self) -> str:
        return f"<pages for {len(self.granted)} blocks in {self._tier!r}>"

    @property
    def pages(self) -> Pages:
        """Where the granted blocks are to be written."""
        batch = self._batch
        return Pages([] if batch is None else batch.addresses, self.block_bytes, batch)

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the page of every granted key not in ``keys``, a subsequence of ``granted``. Never blocks."""
        if len(keys) == len(self.granted):
            return
        wanted = set(keys)
        positions = [at for at, key in enumerate(self.granted) if key in wanted]
        if len(positions) != len(keys):
            raise ValueError(f"{len(keys)} keys to keep, of which {len(positions)} were granted")
        self.granted = keys
        if self._batch is not None:
            self._batch.keep(positions)

    async def transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        """Copy the blocks from ``source`` into their pages and register them; see :class:`backends.abc.Reservation`.

        Raises:
            ValueError: not one guard per granted key, or a second call.
            BlockSizeError: the source's blocks are of another size than what was reserved.
            maru.NoAnswer: nobody knows what became of it, and the client's limbo will tell. The copy is over.
            maru.ServerLost: the session has ended, and with it the pages. Nothing is stored.
        """
        tier, keys, batch = self._tier, self.granted, self._batch
        if self._used or len(guards) != len(keys) or (batch is not None and len(batch) != len(keys)):
            raise ValueError(f"a transfer takes one guard per kept block, once: {len(guards)} guards for {self!r}")
        if source.block_bytes != self.block_bytes:
            raise BlockSizeError(tier, self.block_bytes, source.block_bytes)
        self._used = True
        if batch is None or not keys:
            return []
        copy = StoreCopy(source, keys, guards, summed=tier.checksums)
        failed = await tier.copy_in(copy, self.pages)
        if not failed:
            return await tier.register(keys, batch, copy.sums)
        good = [at for at in range(len(keys)) if at not in failed]
        batch.keep(good)  # the copy is over: nobody writes into the others any more
        sums = [copy.sums[at] for at in good] if copy.sums else ()
        stored = iter(await tier.register([keys[at] for at in good], batch, sums) if good else ())
        return [Failed(failed[at]) if at in failed else next(stored) for at in range(len(keys))]

    def release(self) -> None:
        """Give back the pages of what was not registered. Idempotent; never blocks, never raises."""
        if self._batch is not None:
            self._batch.free()
