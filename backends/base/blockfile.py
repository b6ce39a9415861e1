"""Blocks as files: the format, and a locked directory of them.

Blocking; knows no tier.

    DIRECTORY/offload.lock              held with flock, as DIRECTORY is, for as long as the directory is open
    DIRECTORY/3f/KEY.NUMBER.kv          a block: a header of 512 bytes, then the payload
    DIRECTORY/3f/KEY.NUMBER.kv.tmp      a block that is being written

KEY is the key in hexadecimal. NUMBER is never used again, so that a block that was evicted and stored again is another
file, and a removal that is still to come cannot hit it. The directory belongs to this user alone.

Rule 1. A name that ends in ``.kv`` is given only to a file that is complete, by a rename. (Without ``fsync`` a crash of
        the machine may still leave one with holes; the checksums find that.)
Rule 2. No file is trusted. A header that does not fit the file is *torn*, a payload that does not fit its checksum is
        *damaged*, another layout fingerprint or key is *foreign*, another format is a *version*, and if checksums are
        required a payload without one is *unsummed*.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import xxhash

from maru.base.all_bytes import read_head, read_up_to, write_all
from maru.base.forks import belongs_to, watch_forks
from maru.base.own_directory import lock_directory
from maru.base.private_directory import check_private_directory, open_private_directory

from .._errors import PlaceClosed, PlaceInUse, StrayPath
from ..abc import Key
from .keys import MAX_STORED_BYTES

# --- the format ---------------------------------------------------------------------------------------------------

FORMAT_VERSION = 1
HEADER_BYTES = 512
"""Size of a header, in bytes."""

_MAGIC = b"\x8bkvblk\n\x1a"
# magic, version, flags, key length, depth + 1 (0: not known), size, sum, layout, key
_HEADER = struct.Struct(f"<8sHHHHQQ32s{MAX_STORED_BYTES}s")
_MAX_DEPTH = (1 << 16) - 2  # the largest value of its field; deeper blocks have this depth
_SUM = struct.Struct("<Q")  # xxh3-64 of all before it
_SUMMED = 1  # flag: the payload has a checksum
assert _HEADER.size + _SUM.size == HEADER_BYTES

_MAX_NAMED_BYTES = 100
"""Bytes of the longest key that is written out in names."""
_SHARD = re.compile(r"[0-9a-f]{2}")
_NOT_OURS = {errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENOENT}
"""Errors of a name that is no shard.

It is a file, a link, or a directory that is closed to this user.
"""
NAME = re.compile(r"([0-9a-f]*|long-[0-9a-f]{64})\.([0-9a-f]{1,15})\.kv(\.tmp)?")
"""Names of this tier's files.

A file with a longer number than any tier assigns is not one of them.
"""
MAX_FOUND_NUMBER = 1 << 56
"""Bound on the numbers that are continued.

New files get the number after the largest that was found below this. A file with a larger number is a block too, but
the numbers after it could become too long for a name: 2**56 stores are more than there will be.
"""


class Refused(Exception):
    """A file that is not the expected block: rule 2."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    """The header of a block's file."""

    key: Key
    payload_bytes: int
    payload_sum: int | None
    depth: int | None = None


def layout_digest(fingerprint: str) -> bytes:
    """Return the digest of a layout in a header: 32 bytes."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=32).digest()


def pack_header(
    key: Key, payload_bytes: int, payload_sum: int | None, layout: bytes, depth: int | None = None
) -> bytes:
    """Return the header of one block."""
    flags, digest = (0, 0) if payload_sum is None else (_SUMMED, payload_sum)
    known = 0 if depth is None else min(depth, _MAX_DEPTH) + 1
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, flags, len(key), known, payload_bytes, digest, layout, key)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def unpack_header(head: bytes | bytearray, file_bytes: int, layout: bytes) -> Header:
    """Read a header from the first bytes of a file."""
    if len(head) < HEADER_BYTES or head[: len(_MAGIC)] != _MAGIC:
        raise Refused("torn")
    _, version, flags, key_bytes, known, payload_bytes, digest, found_layout, key = _HEADER.unpack_from(head)
    if version != FORMAT_VERSION:
        raise Refused("version")
    if _SUM.unpack_from(head, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(head[: _HEADER.size]):
        raise Refused("torn")
    if file_bytes != HEADER_BYTES + payload_bytes:
        raise Refused("torn")
    if found_layout != layout:
        raise Refused("foreign")
    depth = known - 1 if known else None
    return Header(key[:key_bytes], payload_bytes, digest if flags & _SUMMED else None, depth)


def check_summed(header: Header) -> None:
    """Raise :class:`Refused` unless the payload has a checksum."""
    # A sum made now would confirm whatever the file has become since it was written, and reading it twice proves only
    # that the disk returns the same twice. So such a block is a miss, and is stored again.
    if header.payload_sum is None:
        raise Refused("unsummed")


def name_of(key: Key, number: int) -> str:
    """Return the file of one block, relative to the directory."""
    spelled = key.hex() if len(key) <= _MAX_NAMED_BYTES else "long-" + hashlib.blake2b(key, digest_size=32).hexdigest()
    return f"{xxhash.xxh3_64_hexdigest(key)[:2]}/{spelled}.{number:x}.kv"


# --- the directory, as far as it is files -------------------------------------------------------------------------


_LOCK: Final = "offload.lock"


def check_directory(path: str) -> None:
    """Raise the errors of opening a :class:`Directory`, changing nothing.

    Raises:
        StrayPath: it cannot be used.
        PlaceInUse: another tier owns it.
    """
    check_private_directory(path, StrayPath, purpose="a directory of blocks")
    if os.path.lexists(path) and not os.access(path, os.W_OK):
        raise StrayPath(f"{path!r} cannot be used as a directory of blocks: this user may not write to it")
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StrayPath(f"{path!r} cannot be used as a directory of blocks: {exc}") from exc
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise _in_use(path) from exc
    finally:
        os.close(directory)


def _in_use(path: str) -> PlaceInUse:
    return PlaceInUse(f"{path!r} is in use by another tier, here or in another process")


class Directory:
    """An open, locked directory.

    Threads work in it within :meth:`in_use`, so that it is not closed meanwhile.

    It belongs to this process: in a forked child it is closed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.root: int = -1
        self.lock: int = -1
        self._why_closed = f"the directory {path!r} was closed"
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._users: dict[object, None] = {}
        self._closing = False
        self._durable: set[str] = set()  # shards whose entry in the root is
        self.root, _ = open_private_directory(path, StrayPath, purpose="a directory of blocks")
        try:
            # The directory is locked as well: removing the lock file does not let a second tier in.
            self.lock = lock_directory(self.root, _LOCK, lambda holder: _in_use(path), patience=0.0)
        except OSError as exc:
            raise StrayPath(f"{path!r} cannot be used as a directory of blocks: {exc}") from exc
        watch_forks(self, Directory._after_fork)

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return os.getpid() != self._pid

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the directory open while the ``with`` block lasts.

        Raises:
            PlaceClosed: it was closed.
        """
        # A generator: an exception that a signal raises between its first half and the block, or between the block and its
        # second half, still ends in the ``finally``.
        user = object()
        try:
            with self._mutex:
                if self._closing:
                    raise PlaceClosed(self._why_closed)
                self._users[user] = None
            yield
        finally:
            self._users.pop(user, None)
            with self._mutex:
                if self._closing and not self._users:
                    self._close()

    def close(self) -> None:
        """Close the directory, or let its last thread do so. Idempotent."""
        with self._mutex:
            self._closing = True
            if not self._users:
                self._close()

    def _after_fork(self) -> None:
        """Close the directory in a forked child.

        The lock stays with the parent, so that only one process writes the files.
        """
        self._mutex = threading.Lock()
        self._why_closed = belongs_to(self._pid, f"the directory {self.path!r}")
        self._closing = True
        self._close()

    def _close(self) -> None:
        for fd in {self.lock, self.root} - {-1}:
            os.close(fd)
        self.lock = self.root = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._close()

    def scan(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files with this tier's kind of name.

        Names are relative to the root.
        """
        for shard in sorted(os.listdir(self.root)):
            if not _SHARD.fullmatch(shard):
                continue
            try:
                fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.root)
            except OSError as exc:
                if exc.errno in _NOT_OURS:
                    continue
                raise  # its blocks would take room that is not counted
            try:
                for name in os.listdir(fd):
                    if NAME.fullmatch(name):
                        with contextlib.suppress(FileNotFoundError):
                            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                yield f"{shard}/{name}", status
            finally:
                os.close(fd)

    def head(self, name: str) -> bytes:
        """Return the header of one file, or all of a shorter file."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.root)
        try:
            return read_head(fd, HEADER_BYTES)
        finally:
            os.close(fd)

    def write(
        self, name: str, head: bytes, payload: memoryview, mtime_ns: int, fsync: bool, used_bytes: int | None = None
    ) -> None:
        """Write one block and publish it.

        After an error no file is left.

        After ``used_bytes`` the payload must be zero: a hole in the file reads the same.
        """
        temporary = name + ".tmp"
        fd = self._create(temporary)
        try:
            try:
                write_all(fd, head, payload[:used_bytes])
                if used_bytes is not None:
                    os.ftruncate(fd, len(head) + payload.nbytes)
                os.utime(fd, ns=(mtime_ns, mtime_ns))
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self.root, dst_dir_fd=self.root)
        except BaseException:
            self.remove(temporary)
            raise

    def read(self, name: str, layout: bytes, key: Key, page: memoryview, verify: bool) -> None:
        """Read one block's payload into a page, or raise :class:`Refused`.

        The page has the size of the payload.
        """
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.root)
        except FileNotFoundError:
            raise Refused("gone") from None
        try:
            head = bytearray(HEADER_BYTES)
            got = read_up_to(fd, head, page, at=0)
            header = unpack_header(head[:got], os.fstat(fd).st_size, layout)
        finally:
            os.close(fd)
        if header.key != key:
            raise Refused("foreign")
        if got != HEADER_BYTES + page.nbytes or header.payload_bytes != page.nbytes:
            raise Refused("torn")
        if verify:
            check_summed(header)
            if header.payload_sum != xxhash.xxh3_64_intdigest(page):
                raise Refused("damaged")

    def touch(self, name: str, mtime_ns: int) -> None:
        """Set the time of a file. Errors are ignored.

        The file may be gone, or be removed now.
        """
        with contextlib.suppress(OSError):
            os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=self.root, follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Remove one file. Return whether it is gone.

        A file that is left would be found at the next start.
        """
        try:
            os.unlink(name, dir_fd=self.root)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def sync(self, names: Sequence[str]) -> None:
        """Make renames durable, and the directories of the files."""
        shards = {name[:2] for name in names}
        for shard in shards:
            fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.root)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        if not shards <= self._durable:  # made since, or found at the start: its entry may not have been synced before
            os.fsync(self.root)
            self._durable |= shards

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(name, flags, 0o600, dir_fd=self.root)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name[:2], 0o700, dir_fd=self.root)
            return os.open(name, flags, 0o600, dir_fd=self.root)
