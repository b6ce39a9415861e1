"""Batches of pages as columns, without an object for each page.

For one page each, see `views`.

Rule 1. Allocated pages belong to their :class:`AllocBatch` until they are stored or freed; if it is forgotten, they are
        free again. Memory stays mapped for as long as some thread may still write there, whatever became of the
        session.
Rule 2. Held pages are pinned until their :class:`HeldBatch` is released or forgotten. :meth:`HeldBatch.check` raises
        once they do not hold any more; it sends no message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import HandlerClosed, LeaseLost
from .answers import Stored
from .keys import list_keys
from .operations import (
    ClientState,
    Operation,
    Pin,
    addresses,
    allocate,
    allocate_most,
    exist_nowait,
    hold,
    hold_first,
    hold_nowait,
    store_surely,
)


class AllocBatch:
    """Pages to fill, as columns. Made by ``alloc_pages``.

    Write at :attr:`addresses`, then pass it to ``store_pages``.
    """

    __slots__ = ("__weakref__", "_memory", "_pages", "_state", "addresses", "page_bytes")

    def __init__(self, state: Any, pages: list[int]) -> None:
        """Set up the columns. Not to be called: a handler makes them."""
        self._pages = pages
        self._state: ClientState = state
        self._memory = [span.owner for span in state.spans.values() if span.writable] if pages else []
        self.page_bytes: int = state.pages.page_bytes
        """Size of every page, in bytes."""
        self.addresses: Sequence[int] = addresses(state, pages) if pages else ()
        """Address of each page, a ``range`` if they are neighbours.

        Valid while this is held.
        """

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"<AllocBatch of {len(self._pages)} pages of {self.page_bytes} bytes>"

    def keep(self, positions: Sequence[int]) -> None:
        """Give back all pages except those at these positions, ascending."""
        kept = [self._pages[at] for at in positions]
        staying = set(kept)
        back = [page for page in self._pages if page not in staying]
        self._pages = kept
        at = self.addresses
        run = len(kept) and positions[-1] - positions[0] == len(kept) - 1
        self.addresses = at[positions[0] : positions[-1] + 1] if run else [at[position] for position in positions]
        self._state.free(back)

    def free(self) -> None:
        """Give back the pages that were not stored. Idempotent.

        No thread may still be writing there.
        """
        pages, self._pages = self._pages, []
        if pages:
            self._state.free(pages)

    def _use(self, state: ClientState, n: int) -> list[int]:
        """Hand over its pages: the caller gives them back or stores them."""
        if self._state is not state or len(self._pages) != n:
            raise HandlerClosed(f"{self!r} was stored or freed, belongs to another handler, or does not have {n} pages")
        pages, self._pages = self._pages, []
        return pages

    def __del__(self) -> None:
        pages = getattr(self, "_pages", None)
        if pages:
            self._state.forgotten.extend(pages)


class HeldBatch:
    """The pinned pages of the longest prefix found, as columns.

    Made by ``hold_pages``.
    """

    __slots__ = (
        "__weakref__",
        "_columns",
        "_give_back",
        "_memory",
        "_pins",
        "_state",
        "addresses",
        "lengths",
        "unresolved",
    )

    def __init__(
        self,
        state: Any,
        pins: list[Pin],
        give_back: Callable[[list[Pin]], object],
        unresolved: Exception | None = None,
    ) -> None:
        """Set up the columns. Not to be called: a handler makes them."""
        self.unresolved: Exception | None = unresolved
        """Error in mapping the first page not held; ``None`` without one.

        Only with ``partial``.
        """
        spans = {region_id: state.spans[region_id] for region_id in {pin.region_id for pin in pins}}
        self._state: ClientState = state
        self._give_back = give_back
        self._pins = self._columns = pins
        self._memory = [span.owner for span in spans.values()]
        self.addresses: Sequence[int] = [spans[pin.region_id].address + pin.offset for pin in pins]
        """Address of each page.

        To be read only, and valid while this is held.
        """
        self.lengths: Sequence[int] = [pin.length for pin in pins]
        """Bytes of each page."""

    @property
    def checksums(self) -> Sequence[int | None]:
        """The xxh3-64 of each page, if its writer has taken one."""
        return [pin.checksum for pin in self._columns]

    @property
    def generations(self) -> Sequence[int]:
        """Registration number of each page.

        A page that is stored again under the key has another one.
        """
        return [pin.generation for pin in self._columns]

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """Region and offset in bytes of each page."""
        return [(pin.region_id, pin.offset) for pin in self._columns]

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"<HeldBatch of {len(self.lengths)} pages{'' if self._pins or not self.lengths else ' (released)'}>"

    @property
    def expires(self) -> float:
        """Time at which these bytes become invalid unless the server answers before.

        On the monotonic clock.
        """
        return self._state.deadline

    def check(self) -> None:
        """Raise unless the bytes are still those that were found.

        Sends no message; any thread. Call it before and after a copy.

        Raises:
            LeaseLost: released; or the server restarted, or was silent for so long that it may have dropped the pins.
        """
        if not self._pins and self.lengths:
            raise LeaseLost(f"{self!r}")
        for era in {pin.era for pin in self._pins}:
            self._state.check_era(era)

    def keep_first(self, n: int) -> None:
        """Give back all except the first ``n``."""
        self.keep(range(min(n, len(self))))

    def keep(self, positions: Sequence[int]) -> None:
        """Give back all except those at these positions, ascending."""
        staying = set(positions)
        back = [pin for at, pin in enumerate(self._pins) if at not in staying]
        if not back:
            return
        self._pins = self._columns = [self._pins[at] for at in positions]
        self.addresses = [self.addresses[at] for at in positions]
        self.lengths = [self.lengths[at] for at in positions]
        self._give_back(back)

    def release(self) -> None:
        """Give back the pins; the server learns of it at once. Idempotent."""
        pins, self._pins = self._pins, []
        if pins:
            self._give_back(pins)

    def __del__(self) -> None:
        pins = getattr(self, "_pins", None)
        if pins:
            self._state.pinned.dropped.extend(pins)


def alloc_pages_nowait(s: ClientState, n: int) -> AllocBatch | None:
    """Take ``n`` pages, if so many are known to be free."""
    if not s.is_connected and s.config.auto_connect and not s.is_closed:
        return None  # a call that asks the server connects
    s.check_open()
    if s.forgotten:
        s.collect()
    pages = None if s.unsettled else s.pages.allocate(n)
    return None if pages is None else AllocBatch(s, pages)


def alloc_pages(s: ClientState, n: int, evict: bool, partial: bool) -> Operation[AllocBatch | None]:
    """Take ``n`` pages, or with ``partial`` as many as possible."""
    pages = yield from (allocate_most if partial else allocate)(s, n, evict=evict)
    return None if pages is None else AllocBatch(s, pages)


def store_pages(
    s: ClientState,
    keys: Sequence[str],
    batch: AllocBatch,
    size: int,
    checksums: list[int] | None,
    depths: Sequence[int | None] | None = None,
) -> Operation[list[Stored | None]]:
    """Register filled pages."""
    keys = list_keys(keys)
    if not 0 < size <= batch.page_bytes:
        raise ValueError(f"size = {size}: must be from 1 to chunk_size_bytes, {batch.page_bytes}")
    if depths is not None and len(depths) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(depths)} depths")
    s.check_open()
    pages = batch._use(s, len(keys))
    of_each = None if depths is None else list(depths)
    return (yield from store_surely(s, keys, pages, size, checksums, of_each)) if keys else []


def hold_pages(
    s: ClientState, keys: Sequence[str], give_back: Callable[[list[Pin]], object], partial: bool
) -> Operation[HeldBatch]:
    """Hold pages up to the first missing key.

    With ``partial``, up to the first that is missing or cannot be mapped.
    """
    if not partial:
        pins = yield from hold(s, list_keys(keys), prefix=True)
        return HeldBatch(s, [pin for pin in pins if pin is not None], give_back)
    first, behind, unresolved = yield from hold_first(s, list_keys(keys))
    if behind:
        give_back(behind)
    return HeldBatch(s, first, give_back, unresolved)


def hold_pages_here(s: ClientState, keys: Sequence[str], give_back: Callable[[list[Pin]], object]) -> HeldBatch | None:
    """Hold pages up to the first missing key, without a message.

    ``None`` if that is not possible.
    """
    pins, left = hold_nowait(s, s.names(list_keys(keys)), prefix=True)
    held = [pin for pin in pins if pin is not None]
    if not left:
        try:
            return HeldBatch(s, held, give_back)
        except KeyError:  # a region that is not mapped here: asking for it takes a message
            pass
    give_back(held)
    return None


def exist_here(s: ClientState, keys: Sequence[str]) -> list[bool] | None:
    """Return whether each key is there, if the index here can decide."""
    there = [False] * len(keys)
    return None if exist_nowait(s, s.names(list_keys(keys)), there) else there
