"""States of an owner's pages: free, used, or awaiting answers. Pure.

Pages move along the arrows of :mod:`maru._client.page_states` only.

Rule 1. A page is used again only once the fate of its last registration is known. One that was sent and not answered is
        IN_DOUBT until the server has fenced that attempt and reported its outcome; a published server cannot be asked,
        so there it is QUARANTINED until the region ends.
Rule 2. A page that comes back from the server is free only once its number can be acknowledged, that is once every
        return before it has come, too. The request that stores into it again carries that acknowledgement.
Rule 3. A return may overtake the answer to the STORE it undoes (they travel on two sockets). It names the attempt, so
        it is never taken for a return of an earlier or later content of the page.
Rule 4. Free pages are handed out ascending, and as neighbours if possible, so that a copy into them is one run.

A page is a number. The numbers of a region are consecutive, and no two regions are neighbours, so that a run of numbers
is a run of memory. Every method takes and returns whole columns; for a run its moves are slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from .page_states import NOWHERE, IllegalMove, PageEvent, PageState

_S, _E = PageState, PageEvent


_FREE, _REGISTERING, _IN_DOUBT = _S.FREE, _S.REGISTERING, _S.IN_DOUBT


@attrs.frozen
class OwnedRegion:
    """A region of this owner."""

    region_id: int
    """Number of the region at the server."""
    first: int
    """Number of its first page."""
    pages: int
    """Number of its pages."""


@attrs.frozen
class PageStatistics:
    """A snapshot of an owner's pages; counters count from its creation."""

    regions: int
    """Regions held."""
    pages: int
    """Pages in these regions."""
    free: int
    """Pages that can be handed out."""
    allocated: int
    """Pages being filled."""
    registering: int
    """Pages on the way to the server."""
    registered: int
    """Registered pages, as far as the owner has heard."""
    in_doubt: int
    """Pages sent and not answered."""
    returning: int
    """Pages that came back before an earlier return, which is missing."""
    quarantined: int
    """Pages lost until their region ends."""
    returned: int
    """Pages that came back, in all."""
    strays: int
    """Returns of pages not held under that attempt, in all.

    There should be none.
    """


class OwnedPages:
    """The pages of all regions of one owner, as columns.

    Args:
        page_bytes: the size of every page.
    """

    def __init__(self, page_bytes: int) -> None:
        if page_bytes < 1:
            raise ValueError(f"page_bytes is {page_bytes}, but must be positive")
        self.page_bytes = page_bytes
        self._regions: list[OwnedRegion] = []  # in the order of `first`, ended ones too
        self._firsts: list[int] = []
        self._by_id: dict[int, OwnedRegion] = {}  # those that are held
        self._states = bytearray()
        self._attempts: list[int] = []  # under which a page was sent last; 0: it is not at the server
        # A stack: the end is handed out next. Descending, so that slices taken from the end ascend when sorted.
        self._free: list[int] = []
        self._in_doubt: dict[int, list[int]] = {}  # by attempt
        self._acknowledged = 0
        self._early: dict[int, int] = {}  # number -> page of the returns that came before one that is missing
        self._returned = self._strays = 0
        self.on_freed: list[Callable[[], object]] = []
        """Callbacks for freed pages, called with all columns in order.

        Each must only take note of it.
        """

    def go_on_from(self, was: OwnedPages) -> None:
        """Continue from the pages of an ended session.

        Callbacks and counters are taken over.
        """
        self.on_freed, self._returned, self._strays = was.on_freed, was._returned, was._strays

    def __repr__(self) -> str:
        return f"<OwnedPages {len(self._free)} free of {sum(r.pages for r in self._by_id.values())}>"

    # --- regions --------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> Sequence[OwnedRegion]:
        """Held regions, in the order in which they were added."""
        return list(self._by_id.values())

    def add_region(self, region_id: int, length: int) -> OwnedRegion:
        """Add a region of ``length`` bytes, with free pages.

        A rest that does not fill a page is not used.
        """
        if region_id in self._by_id:
            raise ValueError(f"region {region_id} is already held")
        first = len(self._states)
        region = OwnedRegion(region_id, first, length // self.page_bytes)
        self._states += bytes([_FREE]) * region.pages
        self._attempts += [0] * region.pages
        self._states.append(_S.ORPHAN)  # so that no two regions are neighbours
        self._attempts.append(0)
        self._regions.append(region)
        self._firsts.append(first)
        self._by_id[region_id] = region
        # Below those that are free already: they are warm.
        self._free[:0] = range(first + region.pages - 1, first - 1, -1)
        self._tell()
        return region

    def end_region(self, region_id: int) -> None:
        """End a region: all its pages become orphans, in any state."""
        region = self._by_id.pop(region_id)
        ended = range(region.first, region.first + region.pages)
        column = slice(ended.start, ended.stop)
        self._states[column] = bytes([_S.ORPHAN]) * region.pages
        self._attempts[column] = [0] * region.pages
        self._free = [page for page in self._free if page not in ended]
        self._early = {number: -1 if page in ended else page for number, page in self._early.items()}
        for attempt, pages in list(self._in_doubt.items()):
            self._set_in_doubt(attempt, [page for page in pages if page not in ended])

    def new_session(self) -> None:
        """Begin a new session, which counts its returns from 1.

        The regions of the old one have been ended.
        """
        assert not self._by_id
        self._acknowledged = 0
        self._early.clear()

    def region_of(self, page: int) -> OwnedRegion:
        """Return the region of a page, even of an ended one."""
        return self._regions[bisect_right(self._firsts, page) - 1]

    def locations(self, pages: Sequence[int]) -> tuple[int | list[int], list[int]]:
        """Return region and offset of each page.

        If all are in one region, its number stands for all.
        """
        size = self.page_bytes
        region = self.region_of(pages[0])
        first, end = region.first, region.first + region.pages
        if first <= min(pages) and max(pages) < end:
            return region.region_id, [(page - first) * size for page in pages]
        regions = [self.region_of(page) for page in pages]
        offsets = [(page - region.first) * size for page, region in zip(pages, regions, strict=True)]
        return [region.region_id for region in regions], offsets

    def state(self, page: int) -> PageState:
        """Return the state of a page; PINNED reads REGISTERED."""
        return PageState(self._states[page])

    def has_ended(self, pages: Sequence[int]) -> bool:
        """Return whether one of these pages has ended with its region."""
        return _S.ORPHAN in bytes(map(self._states.__getitem__, pages))

    def registered(self, region_id: int) -> Iterator[int]:
        """Yield the registered pages of a region."""
        region = self._by_id[region_id]
        page, end = region.first, region.first + region.pages
        while (page := self._states.find(_S.REGISTERED, page, end)) >= 0:
            yield page
            page += 1

    # --- moves of a page ------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Number of pages that can be handed out."""
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """Take ``n`` free pages, ascending, which become ALLOCATED.

        ``None`` if there are not so many.
        """
        free = self._free
        if n > len(free):
            return None
        if n <= 0:
            return []
        pages = free[-n:]
        pages.sort()  # mostly one descending run: linear
        self._move(pages, _E.ALLOCATE)
        del free[-n:]
        return pages

    def cancel(self, pages: Sequence[int]) -> None:
        """Free allocated pages that were not sent."""
        self._move(pages, _E.CANCEL)
        self._free_again(pages)

    def sent(self, pages: Sequence[int], attempt: int) -> None:
        """Mark allocated pages as sent to the server, under this attempt."""
        self._move(pages, _E.SEND)
        self._set_attempt(pages, attempt)

    def answered(self, pages: Sequence[int], attempt: int, events: Sequence[PageEvent] | None = None) -> None:
        """Apply the server's answer: NEW, REFUSED or DISPUTED for each page.

        Without ``events`` all are NEW. A page whose return came first, and one that has ended, stay as they are.
        """
        waiting = self._under(attempt, pages, _REGISTERING)
        if events is None:
            self._move(waiting, _E.NEW)
            return
        due = {*waiting}
        for event in (_E.NEW, _E.REFUSED, _E.DISPUTED):
            moved = [page for page, one in zip(pages, events, strict=True) if one is event and page in due]
            self._move(moved, event)
            if event is _E.REFUSED:
                self._free_again(moved)

    def unanswered(self, pages: Sequence[int], attempt: int, *, can_resolve: bool) -> None:
        """Mark pages without an answer as IN_DOUBT.

        They become QUARANTINED if the server cannot be asked.
        """
        lost = self._under(attempt, pages, _REGISTERING)
        self._move(lost, _E.UNANSWERED)
        if can_resolve:
            self._set_in_doubt(attempt, [*self._in_doubt.get(attempt, ()), *lost])
        else:
            self._move(lost, _E.UNKNOWABLE)

    @property
    def in_doubt(self) -> Mapping[int, Sequence[int]]:
        """Pages of each attempt that must be resolved."""
        return self._in_doubt

    def resolved(self, attempt: int, pages: Sequence[int], held: Sequence[int]) -> None:
        """Apply the outcome of a fenced attempt to its pages.

        ``held`` has a number for each page: 0 if it is not held under this attempt.
        """
        due = {*self._under(attempt, pages, _IN_DOUBT)}
        kept = [page for page, by in zip(pages, held, strict=True) if by and page in due]
        freed = [page for page, by in zip(pages, held, strict=True) if not by and page in due]
        self._move(kept, _E.HELD)
        self._move(freed, _E.NOT_HELD)
        self._set_in_doubt(attempt, [page for page in self._in_doubt.get(attempt, ()) if page not in due])
        self._free_again(freed)

    def dropped(self, pages: Sequence[int]) -> None:
        """Free registered pages whose keys the server has dropped.

        For a server that numbers no returns.
        """
        self._move(pages, _E.DROP)
        self._move(pages, _E.ACKNOWLEDGE)
        self._returned += len(pages)
        self._free_again(pages)

    # --- returns --------------------------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        """The highest number up to which every return was applied.

        Each request to the server carries it.
        """
        return self._acknowledged

    @property
    def behind(self) -> bool:
        """Whether a return is missing before one that has come.

        A BEAT brings it.
        """
        return bool(self._early)

    def returned(
        self, first_number: int, regions: Sequence[int], offsets: Sequence[int], attempts: Sequence[int]
    ) -> int:
        """Apply returns of pages, numbered from ``first_number`` on.

        Returns that were applied before change nothing.

        Returns:
            How many pages of these are free now.
        """
        skip = max(0, self._acknowledged + 1 - first_number)
        if skip:
            first_number += skip
            regions, offsets, attempts = regions[skip:], offsets[skip:], attempts[skip:]
        if not regions:
            return 0
        before = len(self._free)
        dropped = _E.DROP.leads_to
        for number, region_id, offset, attempt in zip(
            range(first_number, first_number + len(regions)), regions, offsets, attempts, strict=True
        ):
            if number in self._early:
                continue
            page = self._page_at(region_id, offset)
            if page is not None and self._attempts[page] == attempt:
                after = dropped[self._states[page]]
                if after != NOWHERE:
                    if self._states[page] == _IN_DOUBT:
                        self._set_in_doubt(attempt, [other for other in self._in_doubt[attempt] if other != page])
                    self._states[page] = after
                    self._returned += 1
                    self._early[number] = page
                    continue
            self._strays += 1
            self._early[number] = -1
        self._acknowledge()
        return len(self._free) - before

    def _acknowledge(self) -> None:
        """Acknowledge all returns without a gap before them, and free their pages."""
        early, number = self._early, self._acknowledged
        back: list[int] = []
        while (page := early.pop(number + 1, None)) is not None:
            number += 1
            if page >= 0:
                back.append(page)
        self._acknowledged = number
        if back:
            self._move(back, _E.ACKNOWLEDGE)
            self._free_again(back)

    def _page_at(self, region_id: int, offset: int) -> int | None:
        region = self._by_id.get(region_id)
        index, rest = divmod(offset, self.page_bytes)
        if region is None or rest or not 0 <= index < region.pages:
            return None
        return region.first + index

    # --- below ----------------------------------------------------------------------------------------------------

    def statistics(self) -> PageStatistics:
        """Return an immutable snapshot."""
        count = self._states.count
        return PageStatistics(
            regions=len(self._by_id),
            pages=sum(region.pages for region in self._by_id.values()),
            free=len(self._free),
            allocated=count(_S.ALLOCATED),
            registering=count(_S.REGISTERING),
            registered=count(_S.REGISTERED),
            in_doubt=count(_S.IN_DOUBT),
            returning=count(_S.RETURNING),
            quarantined=count(_S.QUARANTINED),
            returned=self._returned,
            strays=self._strays,
        )

    def _under(self, attempt: int, pages: Sequence[int], state: PageState) -> Sequence[int]:
        """Return the pages that are in this state under this attempt.

        Mostly these are all of them.
        """
        states, attempts = self._states, self._attempts
        if pages and _is_run(pages):
            run, n = slice(pages[0], pages[-1] + 1), len(pages)
            if attempts[run] == [attempt] * n and states[run].count(state) == n:
                return pages
        return [page for page in pages if attempts[page] == attempt and states[page] == state]

    def _move(self, pages: Sequence[int], event: PageEvent) -> None:
        """Move all of these pages, or raise and move none."""
        if not pages:
            return
        states = self._states
        after: bytes | bytearray
        if _is_run(pages):
            run = slice(pages[0], pages[-1] + 1)
            after = states[run].translate(event.leads_to)
            if NOWHERE in after:
                raise self._illegal(pages, event)
            states[run] = after
            return
        after = bytes(map(states.__getitem__, pages)).translate(event.leads_to)
        if NOWHERE in after or len(set(pages)) != len(pages):
            raise self._illegal(pages, event)
        for page, state in zip(pages, after, strict=True):
            states[page] = state

    def _illegal(self, pages: Iterable[int], event: PageEvent) -> IllegalMove:
        told = ", ".join(f"{page} ({PageState(self._states[page]).name})" for page in list(pages)[:8])
        return IllegalMove(f"{event.name} of pages {told}")

    def _free_again(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        self._set_attempt(pages, 0)
        self._free += reversed(pages)  # ascending columns come back as the descending run that they were
        self._tell()

    def _tell(self) -> None:
        for call in self.on_freed:
            call()

    def _set_attempt(self, pages: Sequence[int], attempt: int) -> None:
        attempts = self._attempts
        if _is_run(pages):
            attempts[pages[0] : pages[-1] + 1] = [attempt] * len(pages)
        else:
            for page in pages:
                attempts[page] = attempt

    def _set_in_doubt(self, attempt: int, pages: list[int]) -> None:
        if pages:
            self._in_doubt[attempt] = pages
        else:
            self._in_doubt.pop(attempt, None)


def _is_run(pages: Sequence[int]) -> bool:
    """Return whether these pages are consecutive and ascending.

    Sorted columns are decided at once, others after a look at each page.
    """
    n = len(pages)
    return pages[-1] - pages[0] == n - 1 and (n < 3 or list(pages) == list(range(pages[0], pages[0] + n)))
