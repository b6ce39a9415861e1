"""The pages of an owner: which are free, and which wait for an answer. Pure.

The columns here move along the arrows of :mod:`maru._client.page_states` only.

Rule 1. A page is used again only once the fate of its last registration is known. One that was sent and not answered is in
        IN_DOUBT until the server has fenced that attempt and said what became of it; a published server cannot be asked, so
        there it is QUARANTINED until the region ends.
Rule 2. A page that comes back from the server is free only once its number can be acknowledged, that is once every return
        before it has come, too. The request that stores into it anew carries that acknowledgement.
Rule 3. A return may overtake the answer to the STORE it undoes (they travel on two sockets). It names the attempt, so it is
        never taken for a return of what the page held before or holds after.
Rule 4. Free pages are handed out ascending, and as neighbours where possible, so that a copy into them is one run.

A page is a number. The numbers of a region are consecutive, and no two regions are neighbours, so that a run of numbers is a
run of memory. Every method takes and gives whole columns; for a run its moves are slices.
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
    """Its number at the server."""
    first: int
    """The number of its first page."""
    pages: int
    """How many it has."""


@attrs.frozen
class PageStatistics:
    """A snapshot of an owner's pages; counters since it was made."""

    regions: int
    """Regions held."""
    pages: int
    """Pages in them."""
    free: int
    """Can be handed out."""
    allocated: int
    """Being filled."""
    registering: int
    """On the way to the server."""
    registered: int
    """Found by their key, as far as the owner has heard."""
    in_doubt: int
    """Sent and not answered."""
    returning: int
    """Came back, behind a return that has not come yet."""
    quarantined: int
    """Lost until the region ends."""
    returned: int
    """Came back, in all."""
    strays: int
    """Returns that named no page held under that attempt, in all. There should be none."""


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
        """Called whenever pages have become free, with everything in order. Each must only note it."""

    def go_on_from(self, was: OwnedPages) -> None:
        """These take the place of others, of a session that is over: who is told goes on to be, and counters go on."""
        self.on_freed, self._returned, self._strays = was.on_freed, was._returned, was._strays

    def __repr__(self) -> str:
        return f"<OwnedPages {len(self._free)} free of {sum(r.pages for r in self._by_id.values())}>"

    # --- regions --------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> Sequence[OwnedRegion]:
        """Those that are held, in the order in which they were added."""
        return list(self._by_id.values())

    def add_region(self, region_id: int, length: int) -> OwnedRegion:
        """A region of ``length`` bytes is ours: its pages are free. What does not fill a page is not used."""
        if region_id in self._by_id:
            raise ValueError(f"region {region_id} is held already")
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
        """This region is not ours any more: all its pages are orphans, whatever they were."""
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
        """A new session counts its returns from 1. The regions of the old one have been ended."""
        assert not self._by_id
        self._acknowledged = 0
        self._early.clear()

    def region_of(self, page: int) -> OwnedRegion:
        """The region of a page, also of one that has ended."""
        return self._regions[bisect_right(self._firsts, page) - 1]

    def locations(self, pages: Sequence[int]) -> tuple[int | list[int], list[int]]:
        """Region and offset of each page; one region stands for all where there is only one."""
        size = self.page_bytes
        region = self.region_of(pages[0])
        first, end = region.first, region.first + region.pages
        if first <= min(pages) and max(pages) < end:
            return region.region_id, [(page - first) * size for page in pages]
        regions = [self.region_of(page) for page in pages]
        offsets = [(page - region.first) * size for page, region in zip(pages, regions, strict=True)]
        return [region.region_id for region in regions], offsets

    def state(self, page: int) -> PageState:
        """Where this page is; PINNED reads REGISTERED."""
        return PageState(self._states[page])

    def has_ended(self, pages: Sequence[int]) -> bool:
        """Whether one of these pages has ended with its region."""
        return _S.ORPHAN in bytes(map(self._states.__getitem__, pages))

    def registered(self, region_id: int) -> Iterator[int]:
        """The pages of this region that are registered."""
        region = self._by_id[region_id]
        page, end = region.first, region.first + region.pages
        while (page := self._states.find(_S.REGISTERED, page, end)) >= 0:
            yield page
            page += 1

    # --- the way of a page ----------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many can be handed out."""
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """``n`` free pages, ascending; ``None`` if there are not so many. They are ALLOCATED from now on."""
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
        """Allocated pages of which nothing was sent are free again."""
        self._move(pages, _E.CANCEL)
        self._free_again(pages)

    def sent(self, pages: Sequence[int], attempt: int) -> None:
        """Allocated pages are sent to the server, under this attempt."""
        self._move(pages, _E.SEND)
        self._set_attempt(pages, attempt)

    def answered(self, pages: Sequence[int], attempt: int, events: Sequence[PageEvent] | None = None) -> None:
        """The server has answered: NEW, REFUSED or DISPUTED for each page; without ``events`` all are NEW.

        A page whose return came first, and one that has ended, stay as they are.
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
        """No answer came: IN_DOUBT, or QUARANTINED where the server cannot be asked."""
        lost = self._under(attempt, pages, _REGISTERING)
        self._move(lost, _E.UNANSWERED)
        if can_resolve:
            self._set_in_doubt(attempt, [*self._in_doubt.get(attempt, ()), *lost])
        else:
            self._move(lost, _E.UNKNOWABLE)

    @property
    def in_doubt(self) -> Mapping[int, Sequence[int]]:
        """The attempts that must be resolved, each with its pages."""
        return self._in_doubt

    def resolved(self, attempt: int, pages: Sequence[int], held: Sequence[int]) -> None:
        """The server has fenced this attempt and says of each page whether it is held under it (0: it is not)."""
        due = {*self._under(attempt, pages, _IN_DOUBT)}
        kept = [page for page, by in zip(pages, held, strict=True) if by and page in due]
        freed = [page for page, by in zip(pages, held, strict=True) if not by and page in due]
        self._move(kept, _E.HELD)
        self._move(freed, _E.NOT_HELD)
        self._set_in_doubt(attempt, [page for page in self._in_doubt.get(attempt, ()) if page not in due])
        self._free_again(freed)

    def dropped(self, pages: Sequence[int]) -> None:
        """The server that numbers no returns has dropped these registered keys of ours: their pages are free."""
        self._move(pages, _E.DROP)
        self._move(pages, _E.ACKNOWLEDGE)
        self._returned += len(pages)
        self._free_again(pages)

    # --- returns --------------------------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> int:
        """The highest number up to which every return was applied: what the server is told with each request."""
        return self._acknowledged

    @property
    def behind(self) -> bool:
        """Whether a return is missing before one that has come: a BEAT brings it."""
        return bool(self._early)

    def returned(
        self, first_number: int, regions: Sequence[int], offsets: Sequence[int], attempts: Sequence[int]
    ) -> int:
        """Pages that come back, numbered ``first_number`` and on. What was applied before changes nothing.

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
        """Whatever has no gap before it is acknowledged from now on, and its pages are free."""
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
        """An immutable snapshot."""
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
        """Those of these pages that are in this state under this attempt. Mostly all of them."""
        states, attempts = self._states, self._attempts
        if pages and _is_run(pages):
            run, n = slice(pages[0], pages[-1] + 1), len(pages)
            if attempts[run] == [attempt] * n and states[run].count(state) == n:
                return pages
        return [page for page in pages if attempts[page] == attempt and states[page] == state]

    def _move(self, pages: Sequence[int], event: PageEvent) -> None:
        """Move all of these, or raise and move none."""
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
    """Whether these are consecutive and ascending. Told for sorted columns at once, for others after a look at each."""
    n = len(pages)
    return pages[-1] - pages[0] == n - 1 and (n < 3 or list(pages) == list(range(pages[0], pages[0] + n)))
