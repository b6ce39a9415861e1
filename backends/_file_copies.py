"""What :class:`~backends.file.FileTier` has done in a copy thread: writing, reading, and removing files. Nothing of trio."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import attrs
import xxhash

from ._blockfile import Directory, Refused, name_of, pack_header
from ._unproven import kept_if_unproven
from .abc import Destination, Failed, Key, Missed, PaddedSource, Source
from .pages import Pages, new_pages

_BOUNCE_BYTES = 8 << 20
"""Blocks that are not in host memory, or not to go there, pass through so much of it at a time."""


@attrs.define(eq=False)
class Writing:
    """One transfer's work, and whether anybody still waits for it."""

    directory: Directory
    layout: bytes
    checksums: bool
    fsync: bool
    litter: list[str]
    expected: Sequence[int | None] | None = None
    """The xxh3-64 of each block as it was stored where it comes from, where that is known."""
    damaged: list[int] = attrs.Factory(list)
    """Blocks that are not what was stored there, by position: a file's own checksum would make them believed."""
    abandoned: bool = False

    def run(
        self, source: Source, guards: Sequence[int], views: Pages | None, keys: Sequence[Key], names: Sequence[str]
    ) -> dict[int, Exception]:
        """Write the blocks one by one. What cannot be written fails alone; what cannot be read fails all."""
        with self.directory:
            return self._run(source, guards, views, keys, names)

    def _run(
        self, source: Source, guards: Sequence[int], views: Pages | None, keys: Sequence[Key], names: Sequence[str]
    ) -> dict[int, Exception]:
        remove(self.directory, self.litter)
        now = time.time_ns()
        failures: dict[int, Exception] = {}
        used_bytes = source.used_bytes if isinstance(source, PaddedSource) else None
        for start, pages in _portions(source, guards, views):
            for at in range(start, start + len(pages)):
                if self.abandoned:
                    return failures
                page = pages[at - start]
                digest = xxhash.xxh3_64_intdigest(page) if self.checksums else None
                if self.expected is not None and self.expected[at] not in (None, digest):
                    self.damaged.append(at)
                    continue
                try:
                    self._write(keys[at], names[at], page, digest, now - at, used_bytes and used_bytes(page))
                except OSError as exc:
                    failures[at] = exc
        if self.fsync:
            bad = {*failures, *self.damaged}
            self.directory.sync([name for at, name in enumerate(names) if at not in bad])
        return failures

    def _write(
        self, key: Key, name: str, page: memoryview, digest: int | None, mtime_ns: int, used_bytes: int | None
    ) -> None:
        head = pack_header(key, page.nbytes, digest, self.layout)
        self.directory.write(name, head, page, mtime_ns, self.fsync, used_bytes)


@attrs.define(eq=False)
class Reading:
    """One load's work."""

    directory: Directory
    layout: bytes
    checksums: bool
    blocks: list[tuple[Key, int]]
    bad: dict[int, Missed | Failed]
    """What is known to be bad, by position; grows."""

    def run(self, destination: Destination, views: Pages | None) -> None:
        """Read all blocks that are good to their places."""
        with self.directory:
            self._run(destination, views)

    def _run(self, destination: Destination, views: Pages | None) -> None:
        n = len(self.blocks)
        if views is not None:
            for at in range(n):
                self._read(at, views[at])
            return
        size = destination.block_bytes
        step = max(1, _BOUNCE_BYTES // max(1, size))
        bounce = new_pages(min(step, n), size)
        with kept_if_unproven(bounce):
            for start in range(0, n, step):
                stop = min(n, start + step)
                for at in range(start, stop):
                    self._read(at, bounce[at - start])
                destination.copy_in(start, bounce.part(0, stop - start))

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


def remove(directory: Directory, names: Sequence[str]) -> None:
    with directory:
        for name in names:
            directory.remove(name)


def _portions(source: Source, guards: Sequence[int], views: Pages | None) -> Iterator[tuple[int, Pages]]:
    """The source's blocks in host memory, as they are there or a few at a time."""
    if views is not None:
        yield 0, views
        return
    size = source.block_bytes
    step = max(1, _BOUNCE_BYTES // max(1, size))
    bounce = new_pages(min(step, len(guards)), size)
    for start in range(0, len(guards), step):
        part = guards[start : start + step]
        pages = bounce.part(0, len(part))
        with kept_if_unproven(bounce):
            source.copy_out(part, pages)
        yield start, pages
