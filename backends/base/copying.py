"""Copies between a source, the pages of a tier, and a destination.

Every tier uses them. A tier computes a checksum of the bytes that arrived, and trusts it from then on. So these bytes
are compared with the checksum of their source before they can be found: otherwise damage would be copied on, with a
checksum that fits.

Rule 1. The source is asked for checksums (:meth:`backends.abc.Source.checksums_of`) on the trio thread before the copy;
        they are compared in the thread of the copy; and damaged blocks are reported to the source on the trio thread,
        after the copy.
Rule 2. A damaged or unreadable block fails alone. If the source finds it itself, and raises for the whole copy, the
        other blocks are copied once more, one by one.
Rule 3. The bytes that arrived are compared, not those in the source, so that a bit that flips on the way is found as
        well.
Rule 4. Memory that a copy passes through is kept if the end of the copy is not proven: see
        :mod:`backends.base._unproven`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, TypeAlias

from maru.base.memory.memory import Memory
from maru.base.memory.pinning import Pin, uses_cuda
from maru.exception_groups import holds, leaves

from .._errors import BlockSizeError, DamagedBlock, Unproven, UnreadableBlock
from ..abc import Destination, Key, Source
from ._unproven import kept_if_unproven
from .in_place import INLINE_BYTES, CopiesInPlace
from .pages import Pages, check_apart, checksums, copy_and_sum, copy_pages, new_pages
from .threads import run_beside, run_halves, run_in_thread, run_in_thread_to_the_end

BOUNCE_BYTES: Final = 8 << 20
"""Bytes of blocks outside of host memory that are staged at once.

A larger block is staged alone.
"""

BESIDE_BYTES: Final = 4 << 20
"""Bytes of a load from which on a second thread helps.

A request waits for a load, and starting a thread takes a tenth of such a copy. A store, for which no request waits,
leaves the other processors to the engine.
"""

RunInThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Function that runs a tier's work in a thread: ``await run(fn, *args)``."""


_BUFFER_BYTES: Final = BOUNCE_BYTES
_KEPT: Final = 4
"""Buffers that are kept for later copies.

Pinning one takes longer than a copy through it.
"""
_spare: deque[Memory] = deque(maxlen=_KEPT)
_lent: dict[int, Memory] = {}
"""Buffers in use, by address.

They are kept here: if they were part of a cycle of garbage with their user, they would be unmapped with it, though its
finalizer gives them back.
"""


_pins: weakref.WeakKeyDictionary[Memory, Pin] = weakref.WeakKeyDictionary()


class _Buffer:
    """A staging buffer, pinned if this process uses CUDA.

    Another copy may use it once nothing refers to it any more.
    """

    def __init__(self) -> None:
        try:
            memory = _spare.popleft()
        except IndexError:
            memory = Memory.private(_BUFFER_BYTES)
        if uses_cuda() and memory not in _pins:  # including a buffer from before CUDA was used
            _pins[memory] = Pin(memory)
            _pins[memory].pin()
        self._pid = os.getpid()
        self.address: int = memory.address
        _lent[self.address] = memory

    def __del__(
        self,
        lent: dict[int, Memory] = _lent,
        spare: deque[Memory] = _spare,
        getpid: Callable[[], int] = os.getpid,
    ) -> None:
        memory = lent.pop(getattr(self, "address", 0), None)
        if memory is not None and getpid() == self._pid:  # in a forked child it may be pinned, and not be mapped
            spare.append(memory)


os.register_at_fork(after_in_child=_spare.clear)  # a child has no pinned memory


class Bounce:
    """A buffer in host memory that blocks pass through in portions.

    For one thread at a time; allocated when needed.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = BOUNCE_BYTES if most_bytes is None else most_bytes
        self._portions: dict[int, Pages] = {}

    def portion(self, n: int, page_bytes: int) -> Pages:
        """Return pages of this size for a portion of ``n`` blocks."""
        n = min(n, max(1, self._most_bytes // max(1, page_bytes)))
        pages = self._portions.get(page_bytes)
        if pages is None or len(pages) < n:
            if 0 < n * page_bytes <= _BUFFER_BYTES:
                buffer = _Buffer()
                start, stop = buffer.address, buffer.address + n * page_bytes
                pages = Pages(range(start, stop, page_bytes), page_bytes, buffer)
            else:
                pages = new_pages(n, page_bytes)
            self._portions[page_bytes] = pages
        return pages.part(0, n)


def unequal(expected: Sequence[int | None], found: Sequence[int | None]) -> list[int]:
    """Return the positions at which a checksum is known and differs."""
    if expected == found:
        return []
    pairs = enumerate(zip(expected, found, strict=True))
    return [at for at, (was, now) in pairs if was is not None and was != now]


# --- into a tier ------------------------------------------------------------------------------------------------------


class StoreCopy:
    """The copy of blocks from a source into a tier.

    Made on the trio thread, for one transfer.

    Args:
        source: the place that has the blocks.
        keys: their keys.
        refs: the source's refs to them.
        summed: whether the tier keeps checksums. Those of the source are compared in any case.
    """

    __slots__ = ("_different", "_expected", "_keys", "_summed", "failed", "refs", "source", "sums", "views")

    def __init__(self, source: Source, keys: Sequence[Key], refs: Sequence[int], *, summed: bool) -> None:
        self.source: Source = source
        self.refs: Sequence[int] = refs
        self.views: Pages | None = source.views(refs)
        """Addresses of the blocks, if they are in host memory."""
        self.sums: list[int] = []
        """Checksums of the blocks that arrived, by position, after the copy.

        They are xxh3-64. Empty if no checksums were needed.
        """
        self.failed: dict[int, Exception] = {}
        """Errors of blocks that must not be stored, by position.

        It grows during the copy.
        """
        self._keys = keys
        self._expected = _known_checksums(source, keys, refs)
        self._summed = summed or self._expected is not None
        self._different: list[int] = []  # damaged blocks to be reported to the source

    def __len__(self) -> int:
        return len(self._keys)

    # --- all of it, into pages of a place -------------------------------------------------------------------------

    async def into(
        self,
        pages: Pages,
        in_place: CopiesInPlace,
        run: RunInThread = run_in_thread,
        inline_bytes: int = INLINE_BYTES,
    ) -> dict[int, Exception]:
        """Copy all blocks into pages, in place or in a thread.

        Cancelled, it returns at once, even if a thread still copies.

        Returns:
            The errors of blocks that must not be stored; the source has dropped those.
        """
        views = self.views
        if views is not None and in_place.takes(len(pages), pages.page_bytes, inline_bytes):
            self._compare(range(len(self._keys)), await in_place.copy(pages, views, self._summed))
        else:
            await run(self.copy_to, pages)
        return self.settle()

    def copy_to(self, pages: Pages) -> None:
        """Copy all blocks into pages. In a copy thread."""
        everything = range(len(self._keys))
        if self.views is not None:
            self._compare(everything, _copied(pages, self.views, self._summed))
        else:
            self._have_copied(everything, pages)
            self.verify(everything, pages)

    # --- a part of it at a time -----------------------------------------------------------------------------------

    def portions(
        self, positions: Sequence[int] | None = None, bounce: Bounce | None = None
    ) -> Iterator[tuple[Sequence[int], Pages]]:
        """Yield the blocks at these positions in host memory, in portions.

        In a copy thread. Blocks in host memory are yielded in place, others a few at a time in a buffer.

        They are not verified yet: the caller calls :meth:`verify` before it publishes them, and leaves out those in
        :attr:`failed`.
        """
        wanted = range(len(self._keys)) if positions is None else positions
        if self.views is not None:
            yield wanted, self.views.at(wanted)
            return
        bounce, start = Bounce() if bounce is None else bounce, 0
        while start < len(wanted):
            pages = bounce.portion(len(wanted) - start, self.source.block_bytes)
            portion = wanted[start : start + len(pages)]
            self._have_copied(portion, pages)
            yield portion, pages
            start += len(portion)

    def verify(self, positions: Sequence[int], pages: Pages) -> None:
        """Compare blocks that arrived with the checksums of their source.

        Runs in the thread of the copy.
        """
        if self._summed:
            self._compare(positions, checksums(pages))

    # --- the end of it --------------------------------------------------------------------------------------------

    def settle(self) -> dict[int, Exception]:
        """Report damaged blocks to the source, after the copy. Idempotent.

        On the trio thread.

        Returns:
            The errors of blocks that must not be stored, by position.
        """
        different, self._different = self._different, []
        if different:
            self.source.forget_damaged([self._keys[at] for at in different], [self.refs[at] for at in different])
        return self.failed

    # --- helpers --------------------------------------------------------------------------------------------------

    def _have_copied(self, positions: Sequence[int], pages: Pages) -> None:
        """Let the source copy these blocks: rule 2."""
        try:
            with kept_if_unproven(pages):
                self.source.copy_out([self.refs[at] for at in positions], pages)
            return
        except Exception as error:
            of_blocks = [leaf for leaf in leaves(error) if isinstance(leaf, (DamagedBlock, UnreadableBlock))]
            if not of_blocks or holds(error, Unproven):
                raise
        if len(positions) == 1:
            self.failed[positions[0]] = of_blocks[0]
            return
        for row, at in enumerate(positions):
            self._have_copied([at], pages.part(row, row + 1))

    def _compare(self, positions: Sequence[int], found: list[int] | None) -> None:
        if found is None:
            return
        expected = self._expected
        if positions == range(len(self._keys)):
            self.sums = found
        else:
            self.sums = self.sums or [0] * len(self._keys)
            for at, value in zip(positions, found, strict=True):
                self.sums[at] = value
            expected = None if expected is None else [expected[at] for at in positions]
        for row in () if expected is None else unequal(expected, found):
            at = positions[row]
            if at not in self.failed:
                self.failed[at] = DamagedBlock(self.source, self._keys[at], "damaged")
                self._different.append(at)


def _known_checksums(source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Sequence[int | None] | None:
    """Return the checksums that a source knows of these blocks.

    ``None`` if it knows none.
    """
    expected = source.checksums_of(keys, refs)
    return None if expected is None or expected.count(None) == len(expected) else expected


# --- out of a tier ----------------------------------------------------------------------------------------------------


def places_for(place: object, n: int, block_bytes: int, destination: Destination) -> Pages | None:
    """Return the addresses of a destination's first ``n`` places.

    ``None`` if they are not in host memory. Call this before the copy.

    Raises:
        BlockSizeError: they have another size than this tier's blocks.
        ValueError: there are fewer.
        RepeatedPlaces: two of them share memory.
    """
    if destination.block_bytes != block_bytes:
        raise BlockSizeError(place, block_bytes, destination.block_bytes)
    if len(destination) < n:
        raise ValueError(f"{n} blocks do not fit into {len(destination)} places")
    there = destination.views()
    if there is not None and len(there) != n:
        there = there.part(0, n)
    check_apart(there)
    return there


async def load_pages(
    pages: Pages,
    destination: Destination,
    there: Pages | None,
    summed: bool,
    in_place: CopiesInPlace,
    *,
    start: int = 0,
    run: RunInThread = run_in_thread_to_the_end,
    inline_bytes: int = INLINE_BYTES,
) -> list[int] | None:
    """Copy pages of a tier into ``there`` or into a destination.

    If ``there`` is ``None`` the destination copies them into its places from ``start`` on. The copy is made in place,
    or in a thread when it is its turn. Cancelled, it returns when the copy is over.

    Returns:
        The xxh3-64 of each block, if wanted.
    """
    if there is None:
        sums: list[int] | None = await run(deliver, pages, destination, start, None, summed)
        return sums
    if in_place.takes(len(pages), pages.page_bytes, inline_bytes):
        return await in_place.copy(there, pages, summed)
    return await in_place.run_beside(run, _copied_to, there, pages, summed)


def deliver(pages: Pages, destination: Destination, start: int, there: Pages | None, summed: bool) -> list[int] | None:
    """Copy pages into ``there``, or let the destination copy them.

    Runs in a copy thread. Returns checksums if ``summed``.
    """
    if there is not None:
        return _copied_to(there, pages, summed, alone=True)
    beside = _is_large(pages)
    if summed and destination.sums_pages:
        with kept_if_unproven(pages):
            return destination.copy_in_and_sum(start, pages)
    with run_beside(checksums, pages) if summed and beside else nullcontext(partial(checksums, pages)) as sums:
        with kept_if_unproven(pages):
            destination.copy_in(start, pages)
        return sums() if summed else None


def _is_large(pages: Pages) -> bool:
    return len(pages) > 1 and len(pages) * pages.page_bytes >= BESIDE_BYTES


def _copied_to(destination: Pages, source: Pages, summed: bool, alone: bool) -> list[int] | None:
    # While other copies run, a second thread has no processor of its own.
    return (_copied_by_halves if alone and _is_large(source) else _copied)(destination, source, summed)


def _copied_by_halves(destination: Pages, source: Pages, summed: bool) -> list[int] | None:
    def copied(start: int, stop: int) -> list[int] | None:
        return _copied(destination.part(start, stop), source.part(start, stop), summed)

    first, second = run_halves(copied, len(source))
    return None if first is None or second is None else first + second


def _copied(destination: Pages, source: Pages, summed: bool) -> list[int] | None:
    if summed:
        return copy_and_sum(destination, source)
    copy_pages(destination, source)
    return None
