"""Held pages of the page store as a source.

    pin -> take -> the pipeline upgrades, copies, releases -> the holder of the blocks releases -> the pin is over

A pipeline copies the blocks from where they lie. Only the server knows where each block lies. So a block is pinned
before it is copied, by a caller that can wait for the answer. A block that is not held is ``EVICTED`` here, though it
may be in the page store.

Rule 1. A pin ends with the last ref to the last block of its lease.
Rule 2. A copy is compared with the checksum that the writer of a block has computed. A damaged block is not copied on,
        is counted, and is no longer found.
Rule 3. A pin may be lost: the server restarts, or is silent for too long. Then the bytes read are meaningless. A
        checksum reveals that; a block without one is copied by this module alone, which checks the lease before and
        after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from maru import LeaseLost

from ..abc import EVICTED, HeldSource, Key, Missed, ReadLease, StrongBlocks
from ..base.pages import Pages, copy_pages
from ._lease import MaruLease

if TYPE_CHECKING:
    from ._tier import MaruTier

_LOST: Final = -1
"""A checksum that no block has."""


@attrs.define(eq=False)
class _Holding:
    """Blocks of one lease, as columns."""

    lease: MaruLease
    first: int
    """The ref of the first block; the others follow."""
    counts: list[int]
    """Number of refs to each block."""
    left: int
    """Number of blocks that are held."""
    checksums: Sequence[int | None]
    addresses: Sequence[int]

    def is_lost(self) -> bool:
        """Return whether the pages may hold other blocks than the pinned ones."""
        try:
            self.lease.check()
        except LeaseLost:
            return True
        return False


class HeldPages(HeldSource):
    """Source of a tier's held blocks; see :attr:`MaruTier.held_pages`.

    Called on the trio thread, except :meth:`copy_out`.
    """

    def __init__(self, tier: MaruTier) -> None:
        self._tier = tier
        self._holdings: dict[int, _Holding] = {}  # by ref
        self._refs: dict[Key, list[int]] = {}  # one for each lease that holds the block
        self._next = 0

    def __repr__(self) -> str:
        return f"<{len(self)} held blocks of {self._tier!r}>"

    def __len__(self) -> int:
        return len(self._holdings)

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._tier.block_bytes

    def take(self, lease: ReadLease) -> StrongBlocks:
        """Return the blocks of a lease, held until they are released.

        See :class:`backends.abc.HeldSource`.

        Raises:
            ValueError: the lease is not of this tier.
        """
        held = MaruLease.held_in(self._tier, lease)
        n, first = len(held.keys), self._next
        self._next += n
        sums = held.checksums if self._tier.checksums else [None] * n
        holding = _Holding(held, first, [1] * n, n, sums, held.held.addresses)
        refs = list(range(first, first + n))
        self._holdings.update(dict.fromkeys(refs, holding))
        for key, ref in zip(held.keys, refs, strict=True):
            self._refs.setdefault(key, []).append(ref)
        if not n:
            held.release_nowait()
        return StrongBlocks(self, held.keys, refs)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take one more ref for each held block, ``EVICTED`` for others."""
        refs = [self._refs[key][-1] if key in self._refs else EVICTED for key in keys]
        for ref in refs:
            if ref != EVICTED:
                holding = self._holdings[ref]
                holding.counts[ref - holding.first] += 1
        return refs

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref, ignoring ``EVICTED``."""
        for ref in refs:
            if ref == EVICTED:
                continue
            holding = self._holdings[ref]
            at = ref - holding.first
            holding.counts[at] -= 1
            if not holding.counts[at]:
                self._forget(holding, at)

    def _forget(self, holding: _Holding, at: int) -> None:
        ref, key = holding.first + at, holding.lease.keys[at]
        del self._holdings[ref]
        self._refs[key].remove(ref)
        if not self._refs[key]:
            del self._refs[key]
        holding.left -= 1
        if not holding.left:
            holding.lease.release_nowait()

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Return the addresses of these blocks, to be read only.

        ``None`` if one of them has no checksum: rule 3.
        """
        return None if None in self.checksums_of((), refs) else self._pages(refs)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position.

        Called in a worker thread; returns when the copy is over.

        Raises:
            maru.LeaseLost: one of them is not held any more; the copied bytes are meaningless.
        """
        leases = {holding.lease for holding in map(self._holdings.__getitem__, refs)}
        for lease in leases:
            lease.check()
        copy_pages(pages, self._pages(refs))
        for lease in leases:
            lease.check()

    def _pages(self, refs: Sequence[int]) -> Pages:
        holdings = [self._holdings[ref] for ref in refs]
        addresses = [one.addresses[ref - one.first] for ref, one in zip(refs, holdings, strict=True)]
        return Pages(addresses, self.block_bytes, [one.lease.held for one in dict.fromkeys(holdings)])

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> list[int | None]:
        """Return the checksum of each block as its writer computed it.

        ``None`` if the writer computed none.
        """
        lost = {one for one in dict.fromkeys(map(self._holdings.__getitem__, refs)) if one.is_lost()}
        found: list[int | None] = []
        for ref in refs:
            holding = self._holdings[ref]
            found.append(_LOST if holding in lost else holding.checksums[ref - holding.first])
        return found

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Count and drop blocks that a copy has found damaged.

        A block whose lease was lost is counted as such, and is not dropped.
        """
        positions: dict[_Holding, list[int]] = {}
        for ref in refs:
            holding = self._holdings[ref]
            positions.setdefault(holding, []).append(ref - holding.first)
        for holding, some in positions.items():
            why = "lease" if holding.is_lost() else "damaged"
            self._tier._note_bad(holding.lease, dict.fromkeys(some, Missed(why)))
