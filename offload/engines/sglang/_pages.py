"""Pages in SGLang's memory as a source and a destination.

They are columns of runs, revoked after use.

SGLang gives the memory of a call that has ended to another request. So pages are lent for one call, and revoked at its
end: a late copy, in a thread that nobody could end, finds nothing to read or to write. That is why neither shows the
addresses of its
pages: a holder of addresses would copy without asking. The meaning of a page's bytes (:mod:`._planes`) may be read as
well, while it is lent.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count
from types import TracebackType
from typing import Any, Self

from backends.abc import Destination, ExternalBlocks, Key, Source
from backends.base.pages import Pages
from backends.base.planes import TensorPlanes

from .._faults import AdapterError


class Revoked(AdapterError):
    """The call that lent these pages has ended."""

    fault_name = "revoked"

    def __init__(self) -> None:
        super().__init__("the call that lent these pages has ended")


class WrongPages(AdapterError):
    """Pages that SGLang passes differ from the description of its pool."""

    fault_name = "wrong pages"


class LentPages(Destination):
    """Pages for one call, as a context: revoked at its exit.

    Also a load's destination.

    Args:
        addresses: start of each run, page after page.
        sizes: of each run, in bytes.
        n: number of pages.
        block_bytes: the size of a page, all its runs together.
        owner: object that keeps the memory alive.
        planes: of the pages of the pool, if they lie in it and its layout is known.
        numbers: numbers of these pages in the pool.

    Raises:
        WrongPages: they are not ``n`` pages of that size.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        n: int,
        block_bytes: int,
        owner: object = None,
        *,
        planes: TensorPlanes | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        runs = len(addresses) // n if n else 0
        if len(addresses) != runs * n or len(sizes) != len(addresses):
            raise WrongPages(f"{len(addresses)} runs of {len(sizes)} sizes are not {n} pages")
        self._runs: list[list[tuple[int, int, int]]] = []  # for each page: address, offset in the block, size
        for start in range(0, len(addresses), runs or 1):
            here = sizes[start : start + runs]
            if sum(here) != block_bytes:
                raise WrongPages(f"a page has {sum(here)} bytes, but must have {block_bytes}")
            offsets = accumulate(here, initial=0)
            self._runs.append(list(zip(addresses[start : start + runs], offsets, here, strict=False)))
        self._block_bytes = block_bytes
        self._owner = owner
        self._planes = planes
        self._numbers = numbers
        self._lock = threading.Lock()
        self._copies: set[threading.Lock] = set()  # for each, a lock that is held until it is over
        self._revoked = False

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def block_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self._block_bytes

    # --- lending --------------------------------------------------------------------------------------------------

    def revoke(self) -> None:
        """Revoke the pages: nothing reads or writes them after the return.

        It waits for the pages that are being copied, one per thread.
        """
        with self._lock:
            self._revoked = True
        interruption = None
        while self._copies:
            try:
                for copy in [*self._copies]:
                    copy.acquire()
            except (KeyboardInterrupt, SystemExit) as error:  # of a signal: the copies go on, and are waited for
                interruption = interruption or error
        self._owner = None
        if interruption is not None:
            raise interruption

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revoke()

    # --- copies, in copy threads ----------------------------------------------------------------------------------

    def read(self, at: int, address: int) -> None:
        """Copy a page to this address.

        Raises:
            Revoked: it is not lent any more.
        """
        with self._in_use():
            for run, offset, size in self._runs[at]:
                ctypes.memmove(address + offset, run, size)

    def write(self, at: int, address: int) -> None:
        """Copy the bytes at this address into a page.

        Raises:
            Revoked: it is not lent any more.
        """
        with self._in_use():
            for run, offset, size in self._runs[at]:
                ctypes.memmove(run, address + offset, size)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the pages lent until the context exits.

        Raises:
            Revoked: they are not lent any more.
        """
        copy = threading.Lock()
        copy.acquire()
        with self._lock:
            if self._revoked:
                raise Revoked
            self._copies.add(copy)
        try:
            yield
        finally:
            self._copies.discard(copy)
            copy.release()

    # --- the contract of a destination ----------------------------------------------------------------------------

    def views(self) -> None:
        """Return nothing: the addresses are not revealed."""

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into these, from ``start`` on. Runs in a copy thread."""
        for at, address in enumerate(pages.addresses, start):
            self.write(at, address)

    # --- samples, in any thread ------------------------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        """True."""
        return True

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy the pages at these positions.

        They are compared with the content of a tier.
        """
        for at, address in zip(positions, pages.addresses, strict=True):
            self.read(at, address)

    @property
    def plane_names(self) -> Sequence[str]:
        """The planes of a page in a pool of known layout."""
        return self._planes.plane_names if self._planes is not None and self._numbers else ()

    def plane_samples(self, positions: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of the pages at these positions.

        ``None`` if they were revoked.
        """
        planes, numbers = self._planes, self._numbers
        if planes is None or not numbers:
            return [None] * len(positions)
        try:
            with self._in_use():
                return list(planes.samples([numbers[at] for at in positions]))
        except Revoked:
            return [None] * len(positions)


class HostPages(Source):
    """The source that an engine stores from: pages lent for stores.

    Nothing is found by key, since SGLang keeps its pages until their store has ended.

    Args:
        block_bytes: the size of a page.
        plane_names: the planes of a page, if the layout of the pool is known.
    """

    plane_names: Sequence[str] = ()
    """The names of the planes of a page."""

    def __init__(self, block_bytes: int, plane_names: Sequence[str] = ()) -> None:
        self._block_bytes = block_bytes
        self.plane_names = plane_names
        self._refs = count()
        self._lent: dict[int, tuple[LentPages, int]] = {}

    def __repr__(self) -> str:
        return f"<HostPages: {len(self._lent)} of {self.block_bytes} bytes are being stored>"

    def __len__(self) -> int:
        """Return the number of pages that are being stored."""
        return len(self._lent)

    @property
    def block_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self._block_bytes

    def lend(self, keys: Sequence[Key], pages: LentPages, positions: Sequence[int]) -> ExternalBlocks:
        """Lend some of these pages for one store. Thread-safe."""
        # Steps of the counter and of the dict are atomic, so two threads may lend at once.
        refs = [next(self._refs) for _ in positions]
        blocks = ExternalBlocks(self, keys, refs)
        self._lent.update({ref: (pages, at) for ref, at in zip(refs, positions, strict=True)})
        return blocks

    def take_back(self, blocks: ExternalBlocks, _: Any = None) -> None:
        """Take pages back when their store has ended. Thread-safe."""
        for ref in blocks.refs or ():
            self._lent.pop(ref, None)

    # --- the contract of a source ---------------------------------------------------------------------------------

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each page. Runs in a copy thread.

        Raises:
            Revoked: the call that lent one of them has ended.
        """
        for ref, address in zip(refs, pages.addresses, strict=True):
            lent = self._lent.get(ref)
            if lent is None:
                raise Revoked
            there, at = lent
            there.read(at, address)

    def plane_samples(self, refs: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of pages that are being stored.

        ``None`` if their call has ended.
        """
        found: list[array[float] | None] = []
        for ref in refs:
            lent = self._lent.get(ref)
            found += [None] if lent is None else lent[0].plane_samples([lent[1]])
        return found
