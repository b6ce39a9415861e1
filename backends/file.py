"""A tier in a directory, with one file per block.

A file is published by a rename, and checked at every load.

Rule 1. Nothing in the directory is trusted. A file that is not the expected block, for one of the reasons in
        :mod:`backends.base.blockfile`, is a miss that is counted, and no longer found.
Rule 2. Of the files found at the start, temporaries and torn files are removed; blocks of another fingerprint, block size
        or version, and those without a checksum if they are verified, are *strangers*: they stay, count as used room,
        and are the first to go when room is needed. Files that are not ours are left alone and not counted.
Rule 3. A file's time is the time of its last use: after a restart the oldest goes first, and of a batch the deepest block. The
        header has the block's depth, if known. Uses are written by the next store's thread, by that of a load if many have
        gathered, and by `close`; a process that is killed forgets those after it.
Rule 4. The trio thread reads and writes no file. Files that are no longer needed are *litter*, removed by the next copy's
        thread, a delete, or `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import ClassVar

import trio

from maru.eviction import AdaptiveLRFU, EvictionPolicy

from ._errors import BlockSizeError, DamagedBlock, PlaceClosed, StrayPath
from ._file_copies import Reading, Writing, note_uses, remove
from ._file_registry import FileRegistry
from .abc import (
    EVICTED,
    Deletion,
    Destination,
    Failed,
    Key,
    Missed,
    RoomRequest,
    Source,
)
from .base.blockfile import (
    MAX_FOUND_NUMBER,
    NAME,
    Directory,
    Refused,
    check_summed,
    layout_digest,
    name_of,
    unpack_header,
)
from .base.copying import StoreCopy
from .base.direct import DirectTier
from .base.keys import MAX_STORED_BYTES
from .base.pages import Pages
from .base.pooled import Lease, PooledReservation, PooledTier
from .base.threads import run_in_thread, run_in_thread_or_leave, run_in_thread_to_the_end

_log = logging.getLogger("backends.file")

_MANY_USES = 1024
"""Uses of blocks that make a load's thread write their times.

Some 3 ms of calls, once for as many loads.
"""

_UNAVAILABLE = Deletion.UNAVAILABLE
_OTHER_SIZE = Missed("size")
"""A stored block whose size is not that of the destination.

It stays, if it was stored in this process.
"""


class FileTier(PooledTier[FileRegistry], DirectTier):
    """A tier in a directory, of which it is the only user.

    The blocks found in the directory at the start can be loaded again, the oldest file as the least recently used. This reads
    each file's header, so it takes time in proportion to the number of files; an empty directory costs nothing.

    Args:
        directory: made if it is missing, but not its parent; it must belong to this user, and be closed to others. An empty
            directory is closed to others here.
        capacity_bytes: bytes of blocks to keep. A file takes a header of 512 bytes in addition, and the rounding of the
            file system.
        fingerprint: the meaning of the bytes: model, dtype, layout. Blocks written under another one are not found.
        checksums: write an xxh3-64 of each block's bytes, and verify it at every load. Blocks that were written without one are
            then not found, and counted as missed, ``unsummed``.
        fsync: make blocks durable before they count as stored.
        block_bytes: the only block size to take. ``None``: any. To be the *source* of a pipeline, a tier of any size must have
            blocks: the first one found or stored decides the size, others count as evicted.
        eviction: chooses the victims; :class:`~maru.eviction.AdaptiveLRFU` by default.

    Raises:
        ValueError: a size that is not positive.
        StrayPath: the directory cannot be made, opened or read, its parent is missing (is the disk mounted?), it belongs to
            another user, or others may enter it.
        PlaceInUse: another tier owns it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        fingerprint: str = "",
        checksums: bool = True,
        fsync: bool = False,
        block_bytes: int | None = None,
        eviction: EvictionPolicy[Key] | None = None,
    ) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes is {capacity_bytes}, but must be at least 1")
        if block_bytes is not None and block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}, but must be at least 1")
        self.pool: FileRegistry = FileRegistry(capacity_bytes, AdaptiveLRFU() if eviction is None else eviction)
        self.checksums = checksums
        """Whether blocks are verified when they are loaded."""
        self.fsync = fsync
        """Whether blocks are durable before they count as stored."""
        self._only_bytes = block_bytes
        self.block_bytes: int = block_bytes or 0
        """Size of every block of this source, in bytes; 0 while unknown."""
        self._seen_bytes: int | None = None  # the first block's
        self._mixed = False
        self._last_found = 0
        self._said_old = self._said_stuck = False
        self._layout = layout_digest(fingerprint)
        self._suspects: dict[int, tuple[Key, str]] = {}  # found bad by a thread, and why; the trio thread drops them
        self._loaded = 0
        self._missed: dict[str, int] = {
            "gone": 0,
            "torn": 0,
            "damaged": 0,
            "foreign": 0,
            "version": 0,
            "size": 0,
            "unsummed": 0,
        }
        self._open: Directory | None = Directory(os.fspath(directory))
        try:
            self._sweep()
        except OSError as exc:
            self._open.close()
            raise StrayPath(f"{os.fspath(directory)!r} cannot be read as a directory of blocks: {exc}") from exc

    def __repr__(self) -> str:
        where = self._open.path if self._open else "closed"
        return f"<FileTier {where!r} {len(self.pool)} blocks in {self.pool.used_bytes} of {self.pool.capacity_bytes} bytes>"

    def __len__(self) -> int:
        return len(self.pool)

    @property
    def blocks_directory(self) -> str:
        """Path of the directory; empty once it is closed."""
        return self._open.path if self._open else ""

    def close(self) -> None:
        """Remove unneeded files and unlock the directory. Idempotent.

        It waits for no thread: the directory is unlocked once none works in it. Using the tier afterwards raises
        :class:`~backends.PlaceClosed`. In a forked child it touches no file.
        """
        directory, self._open = self._open, None
        if directory is not None:
            if not directory.is_inherited:  # in a forked child the files, and the unneeded ones, belong to the parent
                remove(directory, self.pool.take_litter())
                note_uses(directory, self._uses())
            directory.close()

    # --- Source ---------------------------------------------------------------------------------------------------

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take refs; see :class:`backends.abc.Source`.

        A block of another size than ``block_bytes`` counts as evicted.
        """
        refs = self.pool.upgrade(keys)
        if self._mixed:
            sizes, size = self.pool.sizes, self.block_bytes
            odd = {ref for ref in refs if ref != EVICTED and sizes[ref] != size}
            self.pool.release([ref for ref in refs if ref in odd])
            refs = [EVICTED if ref in odd else ref for ref in refs]
        return refs

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref, and drop damaged blocks.

        These are the blocks that a thread has found damaged.
        """
        self._forget_suspects()
        self.pool.release(refs)

    def views(self, refs: Sequence[int]) -> None:
        """Return ``None``: blocks are in files, not in host memory."""
        return

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Read and verify blocks.

        Raises:
            DamagedBlock: one of them is damaged; it is no longer found once its ref is released.
        """
        directory, keys = self._open_directory(), self.pool.keys
        with directory.in_use():
            for ref, page in zip(refs, pages, strict=True):
                key = keys[ref]
                try:
                    directory.read(name_of(key, ref), self._layout, key, page, self.checksums)
                except Refused as exc:
                    self._suspects[ref] = key, exc.reason
                    raise DamagedBlock(self, key, exc.reason) from None

    # --- TransferExecutor -----------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> PooledReservation:
        """Take room for a request; see :class:`backends.abc.TransferExecutor`. Always a checkpoint."""
        if self.pool.stuck:
            await self._remove_litter(self._open_directory())
        return await super().reserve(request)

    async def write(
        self, source: Source, refs: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Write blocks of a source to files.

        A block that cannot be written, on a full disk for example, fails alone.
        """
        directory = self._open_directory()
        self._see(source.block_bytes)
        self.pool.keys.update(zip(slots, keys, strict=True))
        names = list(map(name_of, keys, slots))
        copy = StoreCopy(source, keys, refs, summed=self.checksums)
        depths = [self.pool.slot_depths.pop(slot, None) for slot in slots]
        job = Writing(
            directory, self._layout, self.checksums, self.fsync, self.pool.take_litter(), self._uses(), depths
        )
        try:
            await run_in_thread(job.run, copy, keys, names)
            self._removed(job.litter, job.left)
            return copy.settle()
        except BaseException:
            job.abandoned = True
            self.pool.litter.update(job.litter)  # also if the job never began
            self.pool.keep_uses(job.uses)
            raise

    def note_depths(self, keys: Sequence[Key], slots: Sequence[int], depths: Mapping[Key, int]) -> None:
        """Write these depths into the headers of the files."""
        self.pool.slot_depths.update(
            {slot: depths[key] for key, slot in zip(keys, slots, strict=True) if key in depths and slot != EVICTED}
        )

    def _check(self, request: RoomRequest) -> int:
        self._open_directory()
        block_bytes = request.block_bytes
        if block_bytes < 1 or (self._only_bytes is not None and block_bytes != self._only_bytes):
            raise BlockSizeError(self, self._only_bytes or 1, block_bytes)
        longest = max(map(len, request.keys), default=0)
        if longest > MAX_STORED_BYTES:
            raise ValueError(f"{self!r} takes keys of at most {MAX_STORED_BYTES} bytes, not of {longest}")
        return block_bytes

    # --- Tier -----------------------------------------------------------------------------------------------------

    kept_reasons: ClassVar[frozenset[str]] = frozenset({"size"})

    def _place_bytes(self, destination: Destination) -> int:
        self._open_directory()  # once closed, the load raises instead of failing each block
        return destination.block_bytes  # a block of another size is missed

    async def _load(self, lease: Lease, destination: Destination, there: Pages | None) -> Mapping[int, Missed | Failed]:
        blocks = list(zip(lease.keys, lease.refs, strict=True))
        work = Reading(self._open_directory(), self._layout, self.checksums, blocks, {})
        sizes, size = self.pool.sizes, destination.block_bytes
        if len(self.pool.uses) >= _MANY_USES:
            work.uses = self._uses()
        work.bad = {at: _OTHER_SIZE for at, (_, slot) in enumerate(blocks) if sizes[slot] != size}
        try:
            await run_in_thread_or_leave(work.run, destination, there)
        except BaseException:
            self.pool.keep_uses(work.uses)
            raise
        return work.bad

    def _note_bad(self, lease: Lease, bad: Mapping[int, Missed | Failed]) -> None:
        super()._note_bad(lease, bad)
        # Blocks of an earlier process, and of its block size: as long as they are found, no store replaces them.
        old = [at for at, outcome in bad.items() if outcome is _OTHER_SIZE and lease.refs[at] <= self._last_found]
        if old:
            if not self._said_old:
                self._said_old = True
                _log.warning(
                    "%r: blocks that were stored before this tier was opened have another size: each is dropped when it is "
                    "looked up, and stored again",
                    self,
                )
            lease.forget(old)

    waits_for_disk: ClassVar[bool] = True

    def load_from_thread(self, lease: Lease, there: Pages, deadline: float) -> bool:
        """See :class:`backends.base.direct.DirectTier`."""
        directory, sizes, size = self._open, self.pool.sizes, there.page_bytes
        if directory is None or not lease.is_held or any(sizes.get(slot) != size for slot in lease.refs):
            return False
        blocks = list(zip(lease.keys, lease.refs, strict=True))
        with contextlib.suppress(PlaceClosed):
            return Reading(directory, self._layout, self.checksums, blocks, {}).run_until(deadline, there)
        return False

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys and remove their files.

        A held key is ``PINNED`` and stays. A key whose file cannot be removed is ``UNAVAILABLE``: a tier that opens the
        directory later would find it. Cancelled before it began, it deletes nothing; later, the keys are deleted all
        the same.

        Raises:
            OSError: no thread can be started. The keys are not found any more, and their files are removed with the next ones.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        directory = self._open_directory()
        files = {key: name_of(key, slot) for key, slot in zip(keys, self.pool.slots(keys), strict=True)}
        answers = self.pool.delete(keys)
        if not self.pool.litter:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return answers
        there = await self._remove_litter(directory)
        return [_UNAVAILABLE if files[key] in there else answer for key, answer in zip(keys, answers, strict=True)]

    def _room(self) -> tuple[int, int]:
        return self.pool.capacity_bytes, self.pool.used_bytes + self.pool.stranger_bytes

    # --- helpers --------------------------------------------------------------------------------------------------

    def _open_directory(self) -> Directory:
        if self._open is None:
            raise PlaceClosed("this directory of blocks was closed")
        return self._open

    async def _remove_litter(self, directory: Directory) -> frozenset[str]:
        """Remove unneeded files. Return those that could not be removed."""
        litter = self.pool.take_litter()
        try:
            left = await run_in_thread_to_the_end(remove, directory, litter)
        except BaseException:  # no thread: they are removed with the next ones
            self.pool.litter.update(litter)
            raise
        self._removed(litter, left)
        return frozenset(left)

    def _removed(self, litter: Mapping[str, int], left: Sequence[str]) -> None:
        self.pool.removed(litter, left)
        if left and not self._said_stuck:
            _log.error(
                "%r: %d files could not be removed, such as %s. They take room until then, and their blocks are found "
                "again by the next process that opens this directory",
                self, len(left), left[0],
            )  # fmt: skip
        self._said_stuck = bool(left)

    def _uses(self) -> dict[int, Key]:
        uses, self.pool.uses = self.pool.uses, {}
        return uses

    def _see(self, block_bytes: int) -> None:
        if self._seen_bytes is None:
            self._seen_bytes = block_bytes
            self.block_bytes = self._only_bytes or block_bytes
        elif block_bytes != self._seen_bytes:
            self._mixed = True

    def _forget_suspects(self) -> None:
        while self._suspects:
            number, (key, reason) = self._suspects.popitem()
            # Not dropped at once: the caller may read a damaged file once more to get at its neighbours.
            if self.pool.slots((key,)) == [number]:
                self._missed[reason] += 1
                self.pool.forget((key,), (number,))

    def _sweep(self) -> None:
        """Register the blocks found in the directory: rule 3."""
        directory, pool = self._open_directory(), self.pool
        blocks: list[tuple[int, int, Key, int, int | None]] = []
        strangers: list[tuple[int, str, int]] = []
        unread: list[OSError] = []
        for name, status in directory.scan():
            match = NAME.fullmatch(name, pos=len("3f/"))
            assert match is not None
            number = int(match[2], 16)
            if number <= MAX_FOUND_NUMBER:
                pool.next_number = max(pool.next_number, number + 1)
            if match[3]:
                directory.remove(name)
                continue
            try:
                header = unpack_header(directory.head(name), status.st_size, self._layout)
                if name != name_of(header.key, number):
                    raise Refused("torn")
                if header.payload_bytes != (self._only_bytes or header.payload_bytes):
                    raise Refused("size")
                if self.checksums:
                    check_summed(header)
            except FileNotFoundError:
                continue
            except OSError as exc:
                unread.append(exc)
                strangers.append((status.st_mtime_ns, name, status.st_size))
                continue
            except Refused as exc:
                self._missed[exc.reason] += 1
                if exc.reason == "torn":
                    directory.remove(name)
                else:
                    strangers.append((status.st_mtime_ns, name, status.st_size))
                continue
            blocks.append((status.st_mtime_ns, -number, header.key, header.payload_bytes, header.depth))
        for _, name, nbytes in sorted(strangers):
            pool.strangers.append((name, nbytes))
            pool.stranger_bytes += nbytes
        blocks.sort(key=lambda block: block[:2])  # numbers are all different
        newest = {key: number for _, number, key, _, _ in blocks}
        for _, number, key, nbytes, depth in blocks:
            if newest[key] == number:
                pool.find(key, -number, nbytes, depth)
                self._see(nbytes)
            else:
                directory.remove(name_of(key, -number))
        pool.shrink()
        self._last_found = pool.next_number - 1
        if strangers:
            reasons = {**self._missed, "torn": 0, f"unread: {unread[0] if unread else ''}": len(unread)}
            why = ", ".join(f"{n} {reason}" for reason, n in reasons.items() if n)
            _log.warning(
                "%r: %d blocks of %d bytes are not found, as they do not fit this tier (%s); they go first when room is needed",
                self, len(strangers), pool.stranger_bytes, why,
            )  # fmt: skip
        litter = pool.take_litter()
        self._removed(litter, remove(directory, litter))
