"""Work of :class:`~backends.file.FileTier` in a copy thread, without trio.

Writes, reads and removes files.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Mapping, Sequence

import attrs

from .abc import Destination, Failed, Key, Missed
from .base._unproven import kept_if_unproven
from .base.blockfile import Directory, Refused, name_of, pack_header
from .base.copying import Bounce, StoreCopy
from .base.pages import Pages


@attrs.define(eq=False)
class Writing:
    """Work of one transfer, and whether a task still waits for it."""

    directory: Directory
    layout: bytes
    checksums: bool
    fsync: bool
    litter: Mapping[str, int]
    """Files to remove first."""
    uses: Mapping[int, Key]
    """Blocks used since the times of their files were written.

    The most recently used block is last.
    """
    depths: Sequence[int | None]
    """Depth of each block in its prefix, if known."""
    abandoned: bool = False
    left: Sequence[str] = ()
    """Litter that could not be removed."""

    def run(self, copy: StoreCopy, keys: Sequence[Key], names: Sequence[str]) -> None:
        """Write the blocks one by one.

        A block that is damaged or cannot be written fails alone. A failed read fails all.
        """
        with self.directory.in_use():
            self._run(copy, keys, names)

    def _run(self, copy: StoreCopy, keys: Sequence[Key], names: Sequence[str]) -> None:
        self.left = remove(self.directory, self.litter)
        note_uses(self.directory, self.uses)
        now = time.time_ns()
        for positions, pages in copy.portions():
            for row, at in enumerate(positions):
                if self.abandoned:
                    return
                page = pages[row]
                copy.verify([at], pages.part(row, row + 1))
                if at in copy.failed:
                    continue
                digest = copy.sums[at] if self.checksums else None
                try:
                    head = pack_header(keys[at], page.nbytes, digest, self.layout, self.depths[at])
                    self.directory.write(names[at], head, page, now - at, self.fsync, copy.source.used_bytes(page))
                except OSError as exc:
                    copy.failed[at] = exc
                self._keep_if_awaited(names[at])
        if self.fsync:
            self.directory.sync([name for at, name in enumerate(names) if at not in copy.failed])

    def _keep_if_awaited(self, name: str) -> None:
        """Remove a published file if its store was cancelled meanwhile.

        The task that abandoned the store may have removed the name before the file existed.
        """
        if self.abandoned:
            self.directory.remove(name)


@attrs.define(eq=False)
class Reading:
    """Work of one load."""

    directory: Directory
    layout: bytes
    checksums: bool
    blocks: list[tuple[Key, int]]
    bad: dict[int, Missed | Failed]
    """Blocks known to be bad, by position; it grows during the load."""
    uses: Mapping[int, Key] = attrs.Factory(dict)
    """Uses to write, as for :class:`Writing`, if there are many."""

    def run_until(self, deadline: float, pages: Pages) -> bool:
        """Read blocks to their places, up to the first bad one.

        Return whether all were read before the deadline.
        """
        with self.directory.in_use():
            for at in range(len(self.blocks)):
                if time.monotonic() > deadline:
                    return False
                self._read(at, pages[at])
                if self.bad:
                    return False
        return True

    def run(self, destination: Destination, views: Pages | None) -> None:
        """Read all other blocks to their places.

        Blocks known to be bad are left out.
        """
        with self.directory.in_use():
            self._run(destination, views)
            note_uses(self.directory, self.uses)

    def _run(self, destination: Destination, views: Pages | None) -> None:
        n = len(self.blocks)
        if views is not None:
            for at in range(n):
                self._read(at, views[at])
            return
        bounce, start = Bounce(), 0
        while start < n:
            pages = bounce.portion(n - start, destination.block_bytes)
            with kept_if_unproven(pages):
                for at, page in enumerate(pages, start):
                    self._read(at, page)
                    if at in self.bad:  # the buffer may hold blocks of another tenant
                        ctypes.memset(pages.addresses[at - start], 0, page.nbytes)
                destination.copy_in(start, pages)
            start += len(pages)

    def _read(self, at: int, page: memoryview) -> None:
        if at in self.bad:
            return
        key, number = self.blocks[at]
        try:
            self.directory.read(name_of(key, number), self.layout, key, page, self.checksums)
        except Refused as exc:
            self.bad[at] = Missed(exc.reason)
        except OSError as exc:
            self.bad[at] = Failed(exc)


def note_uses(directory: Directory, uses: Mapping[int, Key]) -> None:
    """Write the times of these files.

    They preserve the order of use for a restart.
    """
    first = time.time_ns() - len(uses)
    for at, (number, key) in enumerate(uses.items()):
        directory.touch(name_of(key, number), first + at)


def remove(directory: Directory, names: Iterable[str]) -> list[str]:
    """Remove files. Return those that could not be removed."""
    with directory.in_use():
        return [name for name in names if not directory.remove(name)]
