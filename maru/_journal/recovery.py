"""Recovery: restore the directory from the journal's files. Blocking.

It decides how much of the directory can be trusted:

    same boot, nothing lost     everything that was acknowledged is there, and clients may resume their sessions
    another boot                every client is gone, and the pages are as the disk has them: a key is kept if the
                                checksum of its page verifies, and every region is an orphan
    same boot, something lost   the later records are lost, including deletions. Pages that those returned may have been
                                overwritten by their owners, which live and may go on writing. So regions that have an
                                owner, or may get it back, are dropped with all their keys; orphans of our own clients,
                                which no process writes, stay

Rule 1. A lookup of an acknowledged key finds the right bytes or misses, never wrong bytes. Losses are in
        `Recovered.lost`, and logged as an error.
Rule 2. No content of a file keeps the server from starting, except another format or another pool: those are refused,
        and the files are left as they are.
Rule 3. In the first case nothing is written at all. In the others the result is written as a snapshot before it is
        used; files that could not be read are kept under ``lost.``, once.
Rule 4. If the environment refuses memory or a descriptor, that is never written down as a loss: that start fails, and
        the next one finds all files as they were.
Rule 5. Generations are never given twice: if one may have been lost, they continue far above.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import attrs
import msgspec
from xxhash import xxh3_64_intdigest

from .._directory import Directory, Limits, Location
from .._directory.image import DirectoryImage
from .._directory.records import Deleted, RegionDropped, SessionEnded
from ..base.errors import JournalFailed
from ..eviction import LRU, EvictionPolicy
from .registrations import recorded_columns
from .replay import REFUSED, replay
from .segments import (
    Header,
    Listing,
    Tail,
    current_boot_id,
    list_files,
    remove,
    set_aside,
    superseded,
    try_lock,
    write_snapshot,
)

_FAR: Final = 1 << 32
"""Generations skipped after a loss: more than any lost journal has given."""

_log = logging.getLogger(__name__)


# --- how much is believed -----------------------------------------------------------------------------------------


class Trust(enum.Enum):
    """How much of a recovered directory is trusted."""

    ALL = "all"
    PAGES_THAT_VERIFY = "pages that verify"
    ORPHANS = "orphans"


def trust_in(*, same_boot: bool, lost: bool) -> Trust:
    """Return how much of a recovered directory to trust (table above)."""
    if not same_boot:
        return Trust.PAGES_THAT_VERIFY
    return Trust.ORPHANS if lost else Trust.ALL


def unverified(
    located: Iterable[tuple[str, Location]],
    region: Callable[[int], memoryview | None],
    checksum: Callable[[memoryview], int] = xxh3_64_intdigest,
) -> list[str]:
    """Return the keys whose page does not have the expected checksum.

    Keys without a checksum, or without their region, are returned too.

    Args:
        located: keys with their locations.
        region: returns the bytes of a region, or ``None`` if it is not there; they are not kept. Raises if it cannot
            know.
        checksum: the function that the writers of the pages used.
    """
    bad: list[str] = []
    views: dict[int, memoryview | None] = {}
    for key, location in located:
        region_id, begin = location.region_id, location.offset
        if region_id not in views:
            views[region_id] = region(region_id)
        view, expected = views[region_id], location.checksum
        if view is None or expected is None or checksum(view[begin : begin + location.length]) != expected:
            bad.append(key)
    return bad


# --- recovery -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Recovered:
    """A recovered directory, with a report of its recovery."""

    directory: Directory
    """The recovered directory. Leases have not begun: call its `restart`."""
    tail: Tail
    """Place at which the journal continues."""
    pool_id: bytes
    """The given pool id, else the files' own, else a new one."""
    trust: Trust
    snapshot: int
    """Number of the snapshot it began with; 0 if there was none."""
    records: int
    """Records replayed on top of the snapshot."""
    cut_bytes: int
    """Bytes of an unfinished record at the time the server was killed.

    It was not acknowledged.
    """
    lost: tuple[str, ...]
    """Losses of acknowledged records, a sentence for each finding. Normally empty."""
    forgotten_keys: int
    """Number of found keys that were dropped because they cannot be trusted."""


@attrs.frozen
class Foreseen:
    """The loss that a start would find."""

    lost: tuple[str, ...]
    """Losses, as in `Recovered.lost`."""
    trust: Trust
    regions: tuple[int, int]
    """Number of regions that would be dropped, and number of all regions."""
    keys: tuple[int, int]
    """Number of keys that would be dropped, and number of all keys."""

    def __str__(self) -> str:
        """Return the loss as one paragraph; empty if nothing is lost."""
        if not self.lost:
            return ""
        if self.trust is Trust.PAGES_THAT_VERIFY:
            cost = f"a start trusts only pages that verify, of {self.keys[1]} keys in {self.regions[1]} regions"
        else:
            cost = "a start discards {} of {} regions, and {} of {} keys".format(*self.regions, *self.keys)
        return f"{'; '.join(self.lost)}; {cost}"


def foresee(
    path: str,
    pool_id: bytes,
    limits: Limits | None = None,
    eviction: Callable[[], EvictionPolicy[str]] = LRU,
    boot_id: bytes | None = None,
) -> Foreseen:
    """Find errors and losses that `recover` would report, without writing.

    Raises:
        ForeignJournal: a file is of another version, or another pool.
        JournalFailed: a file cannot be read.
    """
    with _refusals_of(path):
        replayed = replay(path, pool_id, limits, eviction)
        trust = trust_in(
            same_boot=replayed.boot_id in (None, boot_id or current_boot_id()),
            lost=bool(replayed.lost),
        )
        before = after = replayed.directory.dump()
        if trust is Trust.ORPHANS:
            after = _give_up(replayed.directory, trust, None)
    regions, keys = len(before.regions), len(before.keys)
    return Foreseen(
        tuple(replayed.lost), trust, (regions - len(after.regions), regions), (keys - len(after.keys), keys)
    )


@contextlib.contextmanager
def _refusals_of(path: str) -> Iterator[None]:
    """Translate errors of the environment to `JournalFailed`: rule 4."""
    try:
        yield
    except REFUSED as exc:
        raise JournalFailed(
            f"the journal in {path} cannot be recovered: {str(exc) or 'no memory is left'}. Nothing was discarded: fix the "
            "cause, and start the server again"
        ) from exc


def recover(
    path: str | os.PathLike[str],
    *,
    pool_id: bytes | None = None,
    boot_id: bytes | None = None,
    limits: Limits | None = None,
    eviction: Callable[[], EvictionPolicy[str]] = LRU,
    region: Callable[[int], memoryview | None] | None = None,
    suspect: bool = False,
) -> Recovered:
    """Restore the directory from the files, as far as they are trusted.

    The caller holds the lock of the pool; a compaction may be running. All objects that exist on return are frozen
    (`gc.freeze`): collections would traverse 500,000 entries otherwise.

    Args:
        path: the directory.
        pool_id: refuse files of another pool. ``None``: accept any one pool.
        boot_id: of this boot. ``None``: ask the system.
        limits: of the directory.
        eviction: of the directory.
        region: returns the bytes of a region, to verify pages after a reboot. ``None``: no page survives one.
        suspect: verify pages as after a reboot.

    Raises:
        ForeignJournal: a file is of another version, or another pool.
        JournalFailed: a file cannot be read, or the dropped regions and keys cannot be written down.
        PoolUnusable: a region that is there cannot be opened, as ``region`` reports.
    """
    path = os.fspath(path)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _refusals_of(path):
            recovered = _recover(path, pool_id, boot_id or current_boot_id(), limits, eviction, region, suspect)
    finally:
        if collecting:
            gc.enable()
    gc.freeze()
    return recovered


def _recover(
    path: str,
    pool_id: bytes | None,
    boot_id: bytes,
    limits: Limits | None,
    eviction: Callable[[], EvictionPolicy[str]],
    region: Callable[[int], memoryview | None] | None,
    suspect: bool,
) -> Recovered:
    replayed = replay(path, pool_id, limits, eviction)
    directory, lost = replayed.directory, replayed.lost
    pool_id = pool_id or replayed.pool_id or os.urandom(16)
    trust = trust_in(same_boot=replayed.boot_id in (None, boot_id) and not suspect, lost=bool(lost))
    if replayed.cut_bytes:
        _log.info("%s: %d bytes of an unfinished write were cut off", path, replayed.cut_bytes)
    for finding in lost:
        _log.error("%s", finding)
    tail, forgotten = replayed.tail, 0
    _sweep(path, replayed.listing, [] if lost else [n for n in replayed.listing.segments if n >= tail.number])
    if trust is not Trust.ALL:
        before = directory.statistics().entries
        image = _give_up(directory, trust, region)
        forgotten = before - len(image.keys)
        _log.error("%s: %d of %d keys were discarded: only %s are trusted", path, forgotten, before, trust.value)
        image.generation += _FAR
        tail = Tail(replayed.listing.last + 1, 0)
        body = msgspec.msgpack.encode(image)
        write_snapshot(path, Header(pool_id, boot_id, tail.number, 0, 0), body, server=True)
        _set_aside(path, tail.number, keep=bool(lost))
        directory = Directory.load(image, limits, eviction)
    return Recovered(
        directory=directory,
        tail=tail,
        pool_id=pool_id,
        trust=trust,
        snapshot=replayed.snapshot,
        records=replayed.records,
        cut_bytes=replayed.cut_bytes,
        lost=tuple(lost),
        forgotten_keys=forgotten,
    )


def _give_up(directory: Directory, trust: Trust, region: Callable[[int], memoryview | None] | None) -> DirectoryImage:
    """Drop untrusted regions and keys, and return the image of the rest.

    The image has no session: no client shares this state.

    Earlier readers may still hold views, by pins that are no longer recorded. Their mapped bytes stay as they are: no
    process writes a file of a region that is dropped, and a span of a device waits for them (see `maru._pool.writers`).
    """
    image = directory.dump()
    if trust is Trust.ORPHANS:
        for place in image.regions:
            # A published orphan too: the lost records may include that its owner came back and writes on.
            if place.session or (place.published and not place.returned):
                directory.apply(RegionDropped(place.region_id), recorded_columns)
    for session in image.sessions:
        directory.apply(SessionEnded(session.number), recorded_columns)
    if trust is Trust.PAGES_THAT_VERIFY:
        keys = directory.dump().keys
        located = [(key, at) for key, at in zip(keys, directory.find(0, keys, 0.0), strict=True) if at is not None]
        bad = unverified(located, region or (lambda region_id: None))
        if bad:
            directory.apply(Deleted(bad), recorded_columns)
    return directory.dump()


def _sweep(path: str, listing: Listing, never_begun: list[int]) -> None:
    """Remove unfinished files of servers and compactions, except a running compaction's."""
    ours = [name for name in listing.leftovers if name.endswith(".server.tmp")]
    remove(path, ours + [f"journal.{number}" for number in never_begun])
    if len(ours) < len(listing.leftovers):
        lock = try_lock(path)
        if lock is not None:
            try:
                remove(path, listing.leftovers)
            finally:
                os.close(lock)


def _set_aside(path: str, number: int, *, keep: bool) -> None:
    """Remove the files that a snapshot replaces, or keep the latest.

    They are kept for inspection.
    """
    names = superseded(list_files(path), number)
    if keep:
        remove(path, set_aside(path))
        for name in names:
            os.rename(f"{path}/{name}", f"{path}/lost.{name}")
    else:
        remove(path, names)
