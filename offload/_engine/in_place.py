"""The blocks of a hit where they lie: in memory of this process, pinned, read by any thread.

They are a destination of a load: "copied" into it, each page is summed where it lies, and the tier compares the sums as it
does with any copy. So whoever can use the pages as they are makes no copy, and still uses none that was not verified.

Rule 1. They are of use as long as the hit is pinned, and its tiers say that the pages still are those of the blocks.
Rule 2. A tier that lost touch with its pages, by a silence of its server, says so once for all. Then each page is summed again:
        what has the sum that it had before and behind a copy was read as it was stored.
Rule 3. Other pages than those of the hit, as a slower tier shows them instead of a damaged one, are summed, and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from backends.abc import Destination
from backends.base.copying import BESIDE_BYTES
from backends.base.direct import PlacedLease
from backends.base.pages import Pages, checksums, copy_pages
from backends.base.threads import run_halves


@attrs.define(eq=False)
class BlocksInPlace(Destination):
    """The blocks of a hit where they lie; a destination for the load of that hit. Made by ``Hit.in_place``."""

    _leases: Sequence[PlacedLease]
    pages: Pages
    """Where they lie. To be read only."""
    _sums: dict[int, int] = attrs.Factory(dict)  # of those that a load has shown, by position

    @property
    def block_bytes(self) -> int:
        """Size of a block, in bytes."""
        return self.pages.page_bytes

    def __len__(self) -> int:
        return len(self.pages)

    # --- a load ---------------------------------------------------------------------------------------------------

    def views(self) -> None:
        """Nothing is to be written to these pages."""

    def copy_in(self, start: int, pages: Pages) -> None:
        """Sum these pages where they lie. See :class:`backends.abc.Destination`."""
        self.copy_in_and_sum(start, pages)

    @property
    def sums_pages(self) -> bool:
        """True."""
        return True

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        """Sum these pages where they lie; where it is much, in two threads."""
        if len(pages) < 2 or len(pages) * pages.page_bytes < BESIDE_BYTES:
            sums = checksums(pages)
        else:
            first, second = run_halves(lambda begin, end: checksums(pages.part(begin, end)), len(pages))
            sums = first + second
        shown = zip(range(start, start + len(pages)), pages.addresses, sums, strict=True)
        self._sums.update((at, value) for at, address, value in shown if address == self.pages.addresses[at])
        return sums

    @property
    def is_readable(self) -> bool:
        """True."""
        return True

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy these blocks into pages."""
        copy_pages(pages, self.pages.at(positions))

    def leading(self, loaded: int) -> int:
        """Of so many leading blocks that a load has brought, how many leading ones are here in place."""
        return next((at for at in range(loaded) if at not in self._sums), loaded)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether the pages still are those of the blocks. In any thread."""
        try:
            for lease in self._leases:
                lease.check()
        except Exception:  # whatever a tier has lost, they are not to be used any more
            return False
        return True

    def unchanged(self, positions: Sequence[int]) -> bool:
        """Whether these blocks, which a load has verified, are what they were until now: rule 2. In any thread."""
        return self.holds() or checksums(self.pages.at(positions)) == [self._sums[at] for at in positions]
