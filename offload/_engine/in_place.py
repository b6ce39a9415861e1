"""The blocks of a hit in place: pinned in this process's memory.

Any thread may read them. They are a destination of a load: "copied" into it, each page is summed in place, and the tier
compares the sums as it does with any copy. So a caller who can use the pages as they are makes no copy, and still uses
none that was not verified. The rules:

Rule 1. The pages are of use as long as the hit is pinned, and its tiers confirm that the pages still are those of the
        blocks.
Rule 2. A tier that lost touch with its pages, by a silence of its server, reports that once for all pages. Then each
        page is summed again: if it has its old sum before and after a copy, the copy is of the stored block.
Rule 3. A slower tier may show a page of its own instead of a damaged one. Pages that are not those of the hit are
        summed, and not kept.
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
    """The blocks of a hit in place; a destination for its load.

    Made by ``Hit.in_place``.
    """

    _leases: Sequence[PlacedLease]
    pages: Pages
    """The pages of the blocks. To be read only."""
    _sums: dict[int, int] = attrs.Factory(dict)  # of the blocks that a load has passed in, by position

    @property
    def block_bytes(self) -> int:
        """Size of a block, in bytes."""
        return self.pages.page_bytes

    def __len__(self) -> int:
        return len(self.pages)

    # --- a load ---------------------------------------------------------------------------------------------------

    def views(self) -> None:
        """Return ``None``: nothing may be written to these pages."""

    def copy_in(self, start: int, pages: Pages) -> None:
        """Sum these pages in place. See :class:`backends.abc.Destination`."""
        self.copy_in_and_sum(start, pages)

    @property
    def sums_pages(self) -> bool:
        """True."""
        return True

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        """Sum these pages in place; many bytes in two threads."""
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
        """Return the number of leading blocks that are here in place.

        ``loaded`` is the number of leading blocks that a load has brought.
        """
        return next((at for at in range(loaded) if at not in self._sums), loaded)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Return whether the pages still are those of the blocks.

        Any thread may call it.
        """
        try:
            for lease in self._leases:
                lease.check()
        except Exception:  # whatever a tier has lost, the pages must not be used any more
            return False
        return True

    def unchanged(self, positions: Sequence[int]) -> bool:
        """Return whether these blocks have not changed since their load: rule 2.

        A load has verified them. Any thread may call it.
        """
        return self.holds() or checksums(self.pages.at(positions)) == [self._sums[at] for at in positions]
