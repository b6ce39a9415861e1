"""Layout of an index file. Pure.

    header    128 bytes, as 16 words of 64 bits: see the constants below
    hashes    16 bytes a slot, the xxh3-128 of the name under the file's seed; eight slots are a bucket
    entries   64 bytes a slot, as 8 words: see below

A name lies in one of two buckets, which the halves of its hash name: in the emptier one when it came. It never moves,
so a reader that searches one and then the other misses no name that was there all the time. A slot whose name is
removed is empty at once; there are no tombstones, since no search goes on past a bucket.

Rule 1. All words are native: every reader is on the same host. A word that a reader may read meanwhile is written by
        one 8-byte store, so that it is the old one or the new one.
Rule 2. The sequence of an entry is the generation of the registration: never 0, never given twice in the life of a
        pool. So it is never the same again, whatever the slot is used for.
Rule 3. An entry identifies its name (by half of the hash). A reader that has found the hash and reads the entry after
        the slot was given to another name sees that by the entry alone.
"""

from __future__ import annotations

import struct
from typing import Any, Final, Protocol

import xxhash

MAGIC: Final = int.from_bytes(b"maruindx", "little")
VERSION: Final = 1

# Words of the header.
AT_MAGIC: Final = 0
AT_VERSION: Final = 1
AT_EPOCH: Final = 2
"""Word of the epoch of the server that writes it."""
AT_BUCKETS: Final = 3
AT_SEED: Final = 4
"""Word of the seed of the hashes.

It is random, so that nobody who names keys can choose their buckets.
"""
AT_RETIRED: Final = 8
"""Word that is not 0 once nobody writes the file any more.

Its entries may be outdated then. In a cache line with the next word, apart from the others.
"""
AT_LEFT_OUT: Final = 9
"""Word with the number of reasons for missing names.

0: a name that is not found is not stored.
"""

MARK: Final = 1 << 63
"""Bit of a sequence whose registration is about to be removed.

Nobody may begin to hold such a registration. Bytes loaded meanwhile are still right.
"""

HEADER_BYTES: Final = 128
HASH_BYTES: Final = 16
ENTRY_BYTES: Final = 64
BUCKET_SLOTS: Final = 8
BUCKET_BYTES: Final = BUCKET_SLOTS * HASH_BYTES
_SLOT_BYTES: Final = HASH_BYTES + ENTRY_BYTES
_KEY_BYTES: Final = 96
"""Bytes of a file for each of its keys: 1.2 slots.

If it has so many keys, one in a thousand finds no room.
"""

MIN_BYTES: Final = HEADER_BYTES + BUCKET_SLOTS * _SLOT_BYTES

FIELDS: Final = struct.Struct("=6Q")
"""Words of an entry after the sequence.

Half of the hash, region, offset, length, checksum, whether there is a checksum.
"""
HALVES: Final = struct.Struct("=2Q")

hash_of = xxhash.xxh3_128_digest


class NotAnIndex(ValueError):
    """The file is no index, has another version, or is too short.

    It is shorter than its header declares.
    """


class Memory(Protocol):
    """Memory of an index: a :class:`mmap.mmap`.

    Unlike a view, it can search for a hash in place.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, at: slice) -> bytes: ...

    def find(self, sub: bytes, start: int, end: int) -> int:
        """Search in place, as :meth:`bytes.find`."""
        ...


def bytes_for(keys: int) -> int:
    """Return the size of a file for so many keys."""
    return max(_KEY_BYTES * keys, MIN_BYTES)


def buckets_in(length: int) -> int:
    """Return the number of buckets in a file of so many bytes."""
    return (length - HEADER_BYTES) // (BUCKET_SLOTS * _SLOT_BYTES)


def entries_at(buckets: int) -> int:
    """Return the offset of the column of entries."""
    return HEADER_BYTES + buckets * BUCKET_BYTES


def words_of(memory: Any) -> memoryview:
    """Return all of the memory as words.

    A word is read or written at once (the module `struct` does not promise that).
    """
    view = memoryview(memory)
    return view[: len(view) // 8 * 8].cast("Q")


def slot_of(memory: Memory, digest: bytes, first: int, second: int, buckets: int) -> int:
    """Return the slot of this hash; -1 if it is absent.

    The hash may lie in either bucket.
    """
    for half in (first, second):
        begin = HEADER_BYTES + half % buckets * BUCKET_BYTES
        end = begin + BUCKET_BYTES
        spot = memory.find(digest, begin, end)
        while spot >= 0 and spot % HASH_BYTES:  # the end of one hash and the beginning of the next
            spot = memory.find(digest, spot + 1, end)
        if spot >= 0:
            return (spot - HEADER_BYTES) // HASH_BYTES
    return -1


def tenant_of(name: str) -> str:
    """Return the tenant of a name of the page store.

    See ``salt_of`` of a client. Empty: no tenant, or no salt.
    """
    if not name.startswith("\x1f"):
        return ""
    length, colon, rest = name[1:].partition(":")
    if not colon or not length.isascii() or not length.isdecimal() or len(length) > 9 or int(length) > len(rest):
        return ""
    return rest[: int(length)]
