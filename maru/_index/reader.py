"""Reader of an index, in a process that may not write it.

Pure.

    found = reader.find(names)
    ...                         # copy the bytes that it names, from their mapping
    changed = reader.changed(found)

Rule 1. Copied bytes count if their entry has not changed *after* the copy: its sequence is the same, and the file is
        not retired. x86 lets loads be seen in order, so the bytes were loaded before the sequence was read again.
Rule 2. A sequence is loaded before the rest of its entry. So if it is the same in the end, the rest belonged to it, in
        whatever order that was loaded: the words of one entry are not loaded at once.
Rule 3. A changed entry is neither wrong nor missing. It is to be asked for by message, with a pin.
Rule 4. A name that is not found is not stored, if the file was not retired and left nothing out when the search began.
        A marked name is there: it may go, and is not to be held.
Rule 5. The caller holds a live lease before and after: a server that is gone retires nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from struct import unpack
from typing import Any, Final, TypeVar

import attrs

from .layout import (
    AT_BUCKETS,
    AT_EPOCH,
    AT_LEFT_OUT,
    AT_MAGIC,
    AT_RETIRED,
    AT_SEED,
    AT_VERSION,
    BUCKET_BYTES,
    ENTRY_BYTES,
    FIELDS,
    HASH_BYTES,
    HEADER_BYTES,
    MAGIC,
    MARK,
    MIN_BYTES,
    VERSION,
    NotAnIndex,
    entries_at,
    hash_of,
    slot_of,
    words_of,
)

V = TypeVar("V")

_ENTRY_PER_HASH: Final = ENTRY_BYTES // HASH_BYTES
_GENERATION: Final = MARK - 1
"""Mask of a sequence without its mark."""


@attrs.frozen(eq=False)
class Found:
    """Result of a search, in columns of equal length."""

    positions: Sequence[int]
    """Positions among the names that were looked for."""
    words: Sequence[int]
    """Word of the sequence of each entry."""
    generations: Sequence[int]
    regions: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    checksums: Sequence[int | None]
    is_definite: bool
    """Whether a name that was not found is not stored.

    With ``prefix``: whether the first that was not found is not stored.
    """

    def __len__(self) -> int:
        return len(self.positions)

    def pick(self, at: Sequence[int]) -> Found:
        """Return the entries at these places of the columns."""

        def pick(column: Sequence[V]) -> tuple[V, ...]:
            return tuple([column[place] for place in at])

        return Found(
            pick(self.positions),
            pick(self.words),
            pick(self.generations),
            pick(self.regions),
            pick(self.offsets),
            pick(self.lengths),
            pick(self.checksums),
            self.is_definite,
        )


class IndexReader:
    """Reads an index.

    Args:
        memory: a :class:`mmap.mmap` of the file, for reading.
        hashing: as its writer's.

    Raises:
        NotAnIndex: it is none, or of another version.
    """

    def __init__(self, memory: Any, *, hashing: Callable[[bytes, int], bytes] = hash_of) -> None:
        if len(memory) < MIN_BYTES:
            raise NotAnIndex(f"an index has at least {MIN_BYTES} bytes, not {len(memory)}")
        words = words_of(memory)
        if words[AT_MAGIC] != MAGIC or words[AT_VERSION] != VERSION:
            raise NotAnIndex(f"this is not an index of version {VERSION}")
        buckets = words[AT_BUCKETS]
        entries = entries_at(buckets)
        if not buckets or entries + buckets * (BUCKET_BYTES // HASH_BYTES) * ENTRY_BYTES > len(memory):
            raise NotAnIndex(f"an index of {buckets} buckets does not fit {len(memory)} bytes")
        self._memory = memory
        self._words = words
        self._hash = hashing
        self._buckets = buckets
        self._entries = entries
        self._seed: int = words[AT_SEED]
        self.epoch: int = words[AT_EPOCH]
        """Epoch of the server that writes it."""

    def __repr__(self) -> str:
        return f"<IndexReader of {self._buckets} buckets{' (retired)' if self.is_retired else ''}>"

    @property
    def is_retired(self) -> bool:
        """Whether nobody writes it any more.

        It is never written again; another file may be there.
        """
        return self._words[AT_RETIRED] != 0

    def find(self, names: Sequence[str], *, prefix: bool = False) -> Found:
        """Return the locations of these names.

        Args:
            names: as the server knows them.
            prefix: look for nothing after the first that is not found.
        """
        # The header first (rule 4): a name that is added during this search may be missed, one that was there may not.
        words, memory, buckets, seed, hashing = self._words, self._memory, self._buckets, self._seed, self._hash
        is_definite = not (words[AT_RETIRED] or words[AT_LEFT_OUT])
        search, fields_of = memory.find, FIELDS.unpack
        entries = self._entries - HEADER_BYTES * _ENTRY_PER_HASH
        digests = [hashing(name.encode(), seed) for name in names]
        halves = unpack(f"={2 * len(digests)}Q", b"".join(digests))
        positions: list[int] = []
        places: list[int] = []
        generations: list[int] = []
        rows: list[tuple[int, ...]] = []
        for at, (digest, first) in enumerate(zip(digests, halves[::2], strict=True)):
            begin = HEADER_BYTES + first % buckets * BUCKET_BYTES
            spot = search(digest, begin, begin + BUCKET_BYTES)
            if spot < 0:
                begin = HEADER_BYTES + halves[2 * at + 1] % buckets * BUCKET_BYTES
                spot = search(digest, begin, begin + BUCKET_BYTES)
            if spot & 15:  # not there (-1), or across two hashes
                slot = -1 if spot < 0 else slot_of(memory, digest, first, halves[2 * at + 1], buckets)
                if slot < 0:
                    if prefix:
                        break
                    continue
                spot = HEADER_BYTES + slot * HASH_BYTES
            where = entries + spot * _ENTRY_PER_HASH
            generation = words[where >> 3]  # before the rest (rule 2), which may be loaded in any order
            row = fields_of(memory[where + 8 : where + 8 + FIELDS.size])
            if generation and row[0] == first:
                positions.append(at)
                places.append(where >> 3)
                generations.append(generation & _GENERATION)
                rows.append(row)
            elif prefix:  # removed between the two reads, and perhaps given to another name
                break
        if not rows:
            return Found((), (), (), (), (), (), (), is_definite)
        _, regions, offsets, lengths, checksums, summed = zip(*rows, strict=True)
        if not all(summed):
            checksums = tuple([known if has else None for known, has in zip(checksums, summed, strict=True)])
        return Found(positions, places, tuple(generations), regions, offsets, lengths, checksums, is_definite)

    def changed(self, found: Found, *, marked: bool = False) -> Sequence[int]:
        """Return the column indexes of entries that have changed since the search.

        Call it after a copy.

        Args:
            found: by this reader.
            marked: count marked entries as changed, too: they may go, so they cannot be held.
        """
        where, generations, words = found.words, found.generations, self._words
        if not where:
            return ()
        if words[AT_RETIRED]:
            return range(len(where))
        now = itemgetter(*where, AT_EPOCH)(words)  # one more word: for a single one the getter would return no tuple
        if now[:-1] == generations:
            return ()
        mask = MARK | _GENERATION if marked else _GENERATION
        return [at for at, (was, is_now) in enumerate(zip(generations, now, strict=False)) if was != is_now & mask]
