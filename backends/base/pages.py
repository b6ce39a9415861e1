"""Pages: fixed-size slots of host memory, as a column of addresses.

This module also has the copies between two such columns. Bytes pass between tiers as a column of pages instead of an
object per block: a list of addresses, one size, and the object that keeps the memory mapped. Copies run in C with the
GIL released, adjacent pages as one run.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import xxhash

from .._errors import RepeatedPlaces


@attrs.frozen(eq=False, repr=False)
class Pages:
    """``len(addresses)`` pages of ``page_bytes`` bytes each."""

    addresses: Sequence[int]
    """The start of each page. A ``range`` reveals adjacent pages at once."""
    page_bytes: int
    """The size of every page."""
    owner: object
    """Object whose reference keeps the addresses valid."""

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        return f"<Pages {len(self.addresses)} x {self.page_bytes} bytes>"

    def __getitem__(self, index: int) -> memoryview:
        """Return a page as a writable buffer that keeps the owner alive."""
        page: Any = (ctypes.c_char * self.page_bytes).from_address(self.addresses[index])
        page.owner = self.owner
        return memoryview(page).cast("B")

    def __iter__(self) -> Iterator[memoryview]:
        return (self[index] for index in range(len(self)))

    def part(self, start: int, stop: int) -> Pages:
        """Return the pages from ``start`` to ``stop`` (exclusive)."""
        return Pages(self.addresses[start:stop], self.page_bytes, self.owner)

    def at(self, positions: Sequence[int]) -> Pages:
        """Return the pages at these positions, in their order."""
        if positions == range(len(self)):
            return self
        return Pages([self.addresses[position] for position in positions], self.page_bytes, self.owner)


def check_apart(pages: Pages | None) -> None:
    """Raise if two of these pages share memory.

    One would overwrite the other.

    Raises:
        RepeatedPlaces: two of them do; the message names them.
    """
    if pages is None or not pages.page_bytes:
        return
    addresses, size = pages.addresses, pages.page_bytes
    if len(addresses) < 2 or (isinstance(addresses, range) and abs(addresses.step) >= size):
        return
    order = sorted(range(len(addresses)), key=addresses.__getitem__)
    for one, other in itertools.pairwise(order):
        if addresses[other] - addresses[one] < size:
            raise RepeatedPlaces(one, other)


def pages_of(buffers: Sequence[Any]) -> Pages:
    """Return pages over writable buffers of one common size.

    A buffer is a bytearray, mmap, memoryview, numpy array, or torch tensor in host memory.

    Raises:
        TypeError: one of them is no buffer.
        ValueError: the buffers differ in size, one of them is read-only, or a tensor lies on a device or in pieces.
    """
    views = [_bytes_of(buffer) for buffer in buffers]
    sizes = {view.nbytes for view in views}
    if len(sizes) > 1:
        raise ValueError(f"the buffers must have one size, not {sorted(sizes)} bytes")
    if any(view.readonly for view in views):
        raise ValueError("the buffers must be writable")
    addresses = (
        [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views] if sizes != {0} else [0] * len(views)
    )
    return Pages(addresses, sizes.pop() if sizes else 0, views)


def _bytes_of(buffer: Any) -> memoryview:
    """Return the bytes of one buffer, which the view keeps alive."""
    if not hasattr(buffer, "data_ptr"):
        return memoryview(buffer).cast("B")
    # A torch tensor has no buffer interface, and its conversion to numpy does not support bfloat16.
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(f"the tensor must be contiguous host memory, not {tuple(buffer.shape)} on {buffer.device}")
    run: Any = (ctypes.c_char * (buffer.numel() * buffer.element_size())).from_address(buffer.data_ptr())
    run.owner = buffer
    return memoryview(run).cast("B")


def new_pages(n: int, page_bytes: int) -> Pages:
    """Return ``n`` adjacent pages of new host memory.

    It is freed with the last reference to them.

    Like any memory of a process, it is not shared with a forked child: each writes its own copy.
    """
    if not n or not page_bytes:
        return Pages([0] * n, page_bytes, None)
    # Private: by default mmap shares the memory with forked children.
    run = pages_of([mmap.mmap(-1, n * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)])
    start = run.addresses[0]
    return Pages(range(start, start + n * page_bytes, page_bytes), page_bytes, run)


def copy_pages(destination: Pages, source: Pages) -> None:
    """Copy page by page, without the GIL.

    Runs that are adjacent on both sides are one copy.
    """
    size = source.page_bytes
    if destination.page_bytes != size or len(destination) != len(source):
        raise ValueError(f"cannot copy {source!r} to {destination!r}")
    if len(source) == 1 or (_adjacent(destination) and _adjacent(source)):
        ctypes.memmove(destination.addresses[0], source.addresses[0], len(source) * size)
        return
    run_to = run_from = run_bytes = 0
    for to, at in zip(destination.addresses, source.addresses, strict=True):
        if to == run_to + run_bytes and at == run_from + run_bytes:
            run_bytes += size
            continue
        if run_bytes:
            ctypes.memmove(run_to, run_from, run_bytes)
        run_to, run_from, run_bytes = to, at, size
    if run_bytes:
        ctypes.memmove(run_to, run_from, run_bytes)


def _adjacent(pages: Pages) -> bool:
    """Return whether the pages are known to be one run."""
    addresses = pages.addresses
    return isinstance(addresses, range) and addresses.step == pages.page_bytes and len(addresses) > 0


def checksums(pages: Pages) -> list[int]:
    """Return the xxh3-64 of each page.

    Large pages are summed without the GIL; it may be held for one small page at a time.
    """
    if pages.page_bytes > WARM_BYTES:
        return [_checksum(address, pages.page_bytes) for address in pages.addresses]
    digest, page_at = xxhash.xxh3_64_intdigest, (ctypes.c_char * pages.page_bytes).from_address
    return [digest(page_at(address)) for address in pages.addresses]


WARM_BYTES: Final = 256 * 1024
"""Bytes that fit into a core's own cache together with their source.

So the copy is read again from the cache.
"""


class PageSum:
    """The xxh3-64 of a page that is read part by part.

    Each part is read while it is in cache.
    """

    __slots__ = ("_digest",)

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, address: int, nbytes: int) -> None:
        """Add the next part. A large one is read without the GIL."""
        self._digest.update((ctypes.c_char * nbytes).from_address(address))

    def value(self) -> int:
        """Return the checksum of all parts, in the order they were added."""
        return self._digest.intdigest()


def _checksum(address: int, nbytes: int) -> int:
    """Return the xxh3-64 of one large page.

    Summing it at once would hold the GIL, as xxhash does before its version 4.
    """
    page_sum = PageSum()
    page_sum.add(address, nbytes)
    return page_sum.value()


def copy_and_sum(destination: Pages, source: Pages) -> list[int]:
    """Copy page by page. Return the xxh3-64 of each page on arrival.

    It works in portions that are still in cache when they are read for the second time: a fifth to a third faster than
    copying all and then summing all, and the GIL is released between portions.
    """
    n, size = len(source), source.page_bytes
    if len(destination) != n or destination.page_bytes != size:
        raise ValueError(f"cannot copy {source!r} to {destination!r}")
    if size > WARM_BYTES:
        pairs = zip(destination.addresses, source.addresses, strict=True)
        return [_copy_and_sum_page(to, at, size) for to, at in pairs]
    step = max(1, WARM_BYTES // max(1, size))
    if n <= step:
        copy_pages(destination, source)
        return checksums(destination)
    sums: list[int] = []
    for start in range(0, n, step):
        arrived = destination.part(start, start + step)
        copy_pages(arrived, source.part(start, start + step))
        sums += checksums(arrived)
    return sums


def _copy_and_sum_page(to: int, at: int, nbytes: int) -> int:
    """Copy one page. Return its xxh3-64 on arrival."""
    page_sum = PageSum()
    for start in range(0, nbytes, WARM_BYTES):
        part = min(WARM_BYTES, nbytes - start)
        ctypes.memmove(to + start, at + start, part)
        page_sum.add(to + start, part)
    return page_sum.value()
