"""Files of the journal: their names, headers, and records with checksums.

    DIRECTORY/journal.<n>       a segment: a header, then records in the order in which they took effect
    DIRECTORY/snapshot.<n>      a header, then the image of the directory before the first record of journal.<n>
    DIRECTORY/*.tmp             a snapshot that is being written
    DIRECTORY/lost.journal.<n>  files set aside as unreadable at the last restart that lost something;
    DIRECTORY/lost.snapshot.<n> removed at the next one
    DIRECTORY/compaction.lock   held with flock by the one compaction

Rule 1. A header begins with magic, version and a sum of both, in every version there will be: another version is
        distinguished from damage, and refused.
Rule 2. A record is framed by its length, the sum of its bytes, and the check of these two. One write(2) that a kill
        cuts short leaves a prefix of its bytes, so a record that runs into the end of the file is *torn*: it was never
        acknowledged. Every other mismatch is *damaged*: it may have been acknowledged.
Rule 3. A segment's header records the length of the segment before it. So the tail of a closed segment cannot vanish
        unseen, and bytes after that length are no part of it.
Rule 4. A snapshot gets its name by a rename, after fsync. It begins at a segment, and replaces all that came before.
Rule 5. No other name is ours, whatever it begins with: such files are neither read nor removed.
Rule 6. A segment is begun once its header is whole. A file that ends within its header is no segment yet, and may never
        become one: the last segment that was begun is the live one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from ..base.all_bytes import write_all
from ..base.errors import ForeignJournal

FORMAT_VERSION: Final = 1
"""Format version of headers, frames, records and images together."""

Kind: TypeAlias = Literal["journal", "snapshot"]

# --- headers ------------------------------------------------------------------------------------------------------

_MAGIC: Final[dict[Kind, bytes]] = {"journal": b"\x8bmarujn\n", "snapshot": b"\x8bmarusn\n"}
_PREFIX = struct.Struct("<8sII")  # magic, version, sum of both: rule 1
_HEADER = struct.Struct("<16s16sQQQ")  # pool id, boot id, number, extent, digest
_SUM = struct.Struct("<Q")  # xxh3-64 of all bytes before it
HEADER_BYTES: Final = _PREFIX.size + _HEADER.size + _SUM.size
_LOW: Final = 0xFFFF_FFFF


class Unusable(Exception):
    """Raised if a file cannot be read; the message gives the reason."""


class Header(NamedTuple):
    """Header of a segment or a snapshot."""

    pool_id: bytes
    """Id of the pool, 16 bytes."""
    boot_id: bytes
    """Id of the machine's boot, 16 bytes.

    A segment has the boot in which it was written, a snapshot the boot of its last record.
    """
    number: int
    """Number in the file's name."""
    extent: int
    """Bytes of the previous segment, or of the snapshot's own body.

    0 in a segment if there was none before it.
    """
    digest: int
    """xxh3-64 of a snapshot's body."""


def pack_header(kind: Kind, header: Header) -> bytes:
    """Encode a header: the first bytes of a file."""
    prefix = _PREFIX.pack(_MAGIC[kind], FORMAT_VERSION, 0)[:12]
    head = prefix + (xxh3_64_intdigest(prefix) & _LOW).to_bytes(4, "little") + _HEADER.pack(*header)
    return head + _SUM.pack(xxh3_64_intdigest(head))


def unpack_header(kind: Kind, data: bytes, path: str, pool_id: bytes | None, number: int) -> Header:
    """Decode a header, and check its number and pool.

    Without a ``pool_id`` any pool is accepted.

    Raises:
        Unusable: it is torn or damaged.
        ForeignJournal: it is of another version, or of another pool.
    """
    if len(data) < _PREFIX.size:
        raise Unusable(f"{path} ends within its header")
    magic, version, check = _PREFIX.unpack_from(data)
    if magic != _MAGIC[kind] or check != xxh3_64_intdigest(data[:12]) & _LOW:
        raise Unusable(f"{path} does not begin with the header of a {kind}")
    if version != FORMAT_VERSION:
        raise ForeignJournal(path, f"has format {version}, but this server reads only format {FORMAT_VERSION}")
    if len(data) < HEADER_BYTES:
        raise Unusable(f"{path} ends within its header")
    if _SUM.unpack_from(data, HEADER_BYTES - _SUM.size)[0] != xxh3_64_intdigest(data[: HEADER_BYTES - _SUM.size]):
        raise Unusable(f"the header of {path} is damaged")
    header = Header(*_HEADER.unpack_from(data, _PREFIX.size))
    if pool_id is not None and header.pool_id != pool_id:
        raise ForeignJournal(path, f"belongs to the pool {header.pool_id.hex()}, not to this one, {pool_id.hex()}")
    if header.number != number:
        raise Unusable(f"{path} has number {header.number} in its header, not {number}")
    return header


# --- records ------------------------------------------------------------------------------------------------------

_FRAME = struct.Struct("<III")
FRAME_BYTES: Final = _FRAME.size
_MARK: Final = 0x4D41_5255
"""Part of a frame's check, so that zeros are no valid frame."""


def frame(records: Iterable[bytes]) -> bytes:
    """Encode records as frames of a segment."""
    parts = []
    pack, digest = _FRAME.pack, xxh3_64_intdigest
    for record in records:
        length, total = len(record), digest(record) & _LOW
        parts.append(pack(length, total, length ^ total ^ _MARK))
        parts.append(record)
    return b"".join(parts)


class Tail(NamedTuple):
    """Place at which a journal continues."""

    number: int
    """Number of the segment to begin."""
    previous_end: int
    """Bytes of the segment before it, or 0.

    0 if a snapshot or nothing comes before it.
    """


BEGINNING: Final = Tail(1, 0)
"""Tail of an empty directory."""


class Frames(NamedTuple):
    """Records read from a segment."""

    records: list[memoryview]
    """Records before the first that is not whole."""
    ends: list[int]
    """Offset at which each record ends."""
    verdict: Literal["whole", "torn", "damaged"]
    """Bytes after the records: none, a record's beginning, or no record."""


def read_frames(data: memoryview, begin: int = HEADER_BYTES) -> Frames:
    """Read the whole records, up to the first that is not."""
    records: list[memoryview] = []
    ends: list[int] = []
    at, size = begin, len(data)
    unpack, digest = _FRAME.unpack_from, xxh3_64_intdigest
    while at < size:
        body = at + FRAME_BYTES
        if body > size:
            return Frames(records, ends, "torn")
        length, total, check = unpack(data, at)
        if length ^ total ^ _MARK != check:
            return Frames(records, ends, "damaged")
        at = body + length
        if at > size:
            return Frames(records, ends, "torn")
        record = data[body:at]
        if digest(record) & _LOW != total:
            return Frames(records, ends, "damaged")
        records.append(record)
        ends.append(at)
    return Frames(records, ends, "whole")


# --- the directory ------------------------------------------------------------------------------------------------

_LOCK: Final = "compaction.lock"
_PIECE: Final = 1 << 20
_NAME = re.compile(r"(journal|snapshot)\.([1-9][0-9]{0,17})")  # the number after a longer one may fit no name
_SET_ASIDE = re.compile(r"lost\.(journal|snapshot)\.[1-9][0-9]{0,17}")
_LEFTOVER = re.compile(r"snapshot\.[1-9][0-9]{0,17}(\.server)?\.tmp")


class Listing(NamedTuple):
    """Files in a directory, ascending."""

    segments: list[int]
    snapshots: list[int]
    leftovers: list[str]
    """Names of temporary files.

    A server's have ``.server`` in the name, the others are a compaction's.
    """

    @property
    def last(self) -> int:
        """The highest number in use, 0 if there is none."""
        return max(self.segments[-1:] + self.snapshots[-1:], default=0)


def list_files(path: str) -> Listing:
    """List the journal's files in a directory."""
    listing = Listing([], [], [])
    for name in os.listdir(path):
        if match := _NAME.fullmatch(name):
            (listing.segments if match[1] == "journal" else listing.snapshots).append(int(match[2]))
        elif _LEFTOVER.fullmatch(name):
            listing.leftovers.append(name)
    for names in (listing.segments, listing.snapshots, listing.leftovers):
        names.sort()
    return listing


def set_aside(path: str) -> list[str]:
    """List the files that an earlier restart set aside as unreadable."""
    return [name for name in os.listdir(path) if _SET_ASIDE.fullmatch(name)]


def last_begun(path: str, numbers: Iterable[int]) -> int:
    """Return the last segment that has a whole header, or 0.

    This is the live one.

    The segment before a file without a header is still appended to: while that file is being begun, and for good if it
    could be neither begun nor removed.
    """
    for number in sorted(numbers, reverse=True):
        with contextlib.suppress(FileNotFoundError), open(path_of(path, "journal", number), "rb") as file:
            if is_begun(file.read(HEADER_BYTES)):
                return number
    return 0


def is_begun(data: bytes) -> bool:
    """Return whether a segment with these first bytes was begun.

    Nothing is appended to one without a header.
    """
    return len(data) >= HEADER_BYTES


def path_of(path: str, kind: Kind, number: int) -> str:
    """Return the path of a segment or a snapshot."""
    return f"{path}/{kind}.{number}"


def remove(path: str, names: Iterable[str]) -> None:
    """Remove files.

    Any that cannot be removed is found again the next time.
    """
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}/{name}")


def superseded(listing: Listing, by: int) -> list[str]:
    """List the files that snapshot ``by`` replaces.

    Snapshots come first, so that after an interrupted removal the rest is read as if these had never been written.
    """
    return [f"snapshot.{n}" for n in listing.snapshots if n < by] + [f"journal.{n}" for n in listing.segments if n < by]


def try_lock(path: str) -> int | None:
    """Take the compaction lock and return its descriptor, or ``None``.

    ``None`` means that another compaction holds it.

    Closing the descriptor releases the lock.
    """
    fd = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_snapshot(
    path: str, header: Header, body: bytes, *, server: bool, step: Callable[[str], None] = lambda name: None
) -> None:
    """Write a snapshot and publish it; on return it survives power loss.

    After an error nothing is left of it.

    Args:
        path: the directory.
        header: without extent and digest, which are computed here.
        body: the image.
        server: whether the server itself writes it; then no compaction removes the temporary file.
        step: called with the name of each step before it is taken.
    """
    final = path_of(path, "snapshot", header.number)
    temporary = f"{final}.server.tmp" if server else f"{final}.tmp"
    step("open")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            step("write header")
            write_all(fd, pack_header("snapshot", header._replace(extent=len(body), digest=xxh3_64_intdigest(body))))
            for begin in range(0, len(body), _PIECE):
                step(f"write {begin}")
                write_all(fd, memoryview(body)[begin : begin + _PIECE])
            step("fsync")
            os.fsync(fd)
        finally:
            os.close(fd)
        step("rename")
        os.rename(temporary, final)
    except OSError:
        remove(path, [os.path.basename(temporary)])
        raise
    step("sync directory")
    sync_directory(path)


def open_directory(path: str) -> int:
    """Open a directory, to make its names durable. Returns the descriptor."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def current_boot_id() -> bytes:
    """Return the id of this boot of the machine: 16 bytes."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return bytes.fromhex(file.read().strip().replace(b"-", b"").decode())
