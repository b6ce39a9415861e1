"""Writer of an index: one for each file, in the server. Pure.

Rule 1. To add a name: its entry, then its sequence, then its hash. A reader that finds the hash finds all of the entry.
Rule 2. To remove a name: its sequence first, then its hash. From the first store on, no copy that is checked again
        counts.
Rule 3. The file is read only to search for a hash: the taken slots are known here.
Rule 4. A name that has no room is *left out*, and counted in the file before any reader can hear of the name.
Rule 5. A registration that the server wants to remove is marked first, so that nobody begins to hold it
        (`maru._index.board`); then it is removed, or its mark is.
Rule 6. Of two names with one hash none is found, and that hash is never used again here. (A name that is nowhere stored
        and has the hash of a stored one would be found: one in 2**128.)

x86 lets other cores see stores in the order in which they were made, which rules 1 and 2 rely on. No lock is taken, no
fence is needed, and no reader is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import attrs

from .layout import (
    AT_BUCKETS,
    AT_EPOCH,
    AT_LEFT_OUT,
    AT_MAGIC,
    AT_RETIRED,
    AT_SEED,
    AT_VERSION,
    BUCKET_SLOTS,
    ENTRY_BYTES,
    FIELDS,
    HALVES,
    HASH_BYTES,
    HEADER_BYTES,
    MAGIC,
    MARK,
    MIN_BYTES,
    VERSION,
    buckets_in,
    entries_at,
    hash_of,
    slot_of,
    words_of,
)

_EMPTY: Final = bytes(HASH_BYTES)
_FULL: Final = (1 << BUCKET_SLOTS) - 1
_TAKEN: Final = bytes([mask.bit_count() for mask in range(_FULL + 1)])
"""Number of taken slots, by the mask of a bucket."""
_FREE: Final = bytes([(~mask & mask + 1).bit_length() - 1 for mask in range(_FULL)] + [0])
"""First free slot, by the mask of a bucket."""


class Entries(NamedTuple):
    """Locations of names, in columns of equal length.

    A number stands for a column of equal ones.
    """

    names: Sequence[str]
    regions: int | Sequence[int]
    offsets: Sequence[int]
    lengths: int | Sequence[int]
    checksums: Sequence[int | None] | None
    generations: Sequence[int]


@attrs.frozen
class IndexStatistics:
    """A snapshot of a writer."""

    keys: int
    """Names that can be found."""
    slots: int
    """Number of names that have a place."""
    left_out: int
    """Stored names that cannot be found here.

    Their buckets were full, or nobody may load them without a pin.
    """
    collided: int
    """Hashes shared by two names."""


class IndexWriter:
    """Writes a new index into memory that is all zeros.

    Args:
        memory: a writable :class:`mmap.mmap` of at least ``MIN_BYTES``, which nobody else writes.
        epoch: of the server; not 0.
        seed: 64 random bits.
        hashing: xxh3-128, unless a test needs hashes that collide.
    """

    def __init__(self, memory: Any, epoch: int, seed: int, *, hashing: Callable[[bytes, int], bytes] = hash_of) -> None:
        assert len(memory) >= MIN_BYTES
        self._memory = memory
        self._words = words_of(memory)
        self._seed = seed
        self._hash = hashing
        self._buckets = buckets_in(len(memory))
        self._entries = entries_at(self._buckets)
        self._taken = bytearray(self._buckets)
        self._names: list[str | None] = [None] * (self._buckets * BUCKET_SLOTS)
        self._keys = 0
        self._left_out: set[str] = set()
        self._collided: set[bytes] = set()
        self._had_no_room = False
        self._marked: dict[int, int] = {}  # generation -> slot, until it is removed or unmarked: a name never moves
        self.is_filling = False
        """Whether stored names are still to be added."""
        words = self._words
        words[AT_VERSION], words[AT_EPOCH], words[AT_BUCKETS], words[AT_SEED] = VERSION, epoch, self._buckets, seed
        words[AT_MAGIC] = MAGIC

    def __len__(self) -> int:
        return self._keys

    def __repr__(self) -> str:
        return f"<IndexWriter of {self._keys} keys in {self._buckets * BUCKET_SLOTS} slots>"

    @property
    def is_crowded(self) -> bool:
        """Whether a larger file is due.

        Four fifths of the slots are taken, or a name had no room.
        """
        return self._had_no_room or self._keys * 5 >= self._buckets * BUCKET_SLOTS * 4

    def statistics(self) -> IndexStatistics:
        """Return an immutable snapshot."""
        return IndexStatistics(self._keys, self._buckets * BUCKET_SLOTS, len(self._left_out), len(self._collided))

    # --- adding names ---------------------------------------------------------------------------------------------

    def add(self, entries: Entries) -> None:
        """Let these names be found, passing over unchanged ones.

        A name that is there under its generation already is unchanged. Call it when the registration is in the journal,
        and before anybody is told of it.
        """
        names, regions, offsets, lengths, checksums, generations = entries
        for name, region, offset, length, checksum, generation in zip(
            names,
            repeat(regions) if isinstance(regions, int) else regions,
            offsets,
            repeat(lengths) if isinstance(lengths, int) else lengths,
            repeat(None) if checksums is None else checksums,
            generations,
            strict=False,  # some columns are endless
        ):
            self._add(name, generation, region, offset, length, checksum)
        self._tell_left_out()

    def leave_out(self, names: Iterable[str]) -> None:
        """Count these stored names, which are not to be found here."""
        self._left_out.update(names)
        self._tell_left_out()

    def _add(self, name: str, generation: int, region: int, offset: int, length: int, checksum: int | None) -> None:
        if self._left_out and name in self._left_out:
            return
        digest = self._hash(name.encode(), self._seed)
        first, second = HALVES.unpack(digest)
        if digest in self._collided or digest == _EMPTY:
            self._left_out.add(name)
            return
        slot = slot_of(self._memory, digest, first, second, self._buckets)
        if slot >= 0:
            if self._words[self._word_of(slot)] & ~MARK != generation:
                self._collided.add(digest)
                self._left_out.add(name)
                self._tell_left_out()  # before the other name cannot be found
                self._clear(slot)
            return
        taken = self._taken
        bucket, other = first % self._buckets, second % self._buckets
        if _TAKEN[taken[other]] < _TAKEN[taken[bucket]]:
            bucket = other
        mask = taken[bucket]
        if mask == _FULL:
            self._had_no_room = True
            self._left_out.add(name)
            return
        place = _FREE[mask]
        taken[bucket] = mask | 1 << place
        slot = bucket * BUCKET_SLOTS + place
        at = self._entries + slot * ENTRY_BYTES
        FIELDS.pack_into(self._memory, at + 8, first, region, offset, length, checksum or 0, checksum is not None)
        self._names[slot] = name
        # From here on in this order: see rule 1.
        self._set_sequence(slot, generation)
        self._set_hash(slot, digest)
        self._keys += 1

    # --- removing names -------------------------------------------------------------------------------------------

    def remove(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Let these registrations be found no more.

        Call it before anybody is told that they go. A name that is not there, or not under that generation, is passed
        over.
        """
        for slot, _ in self._slots_of(names, generations):
            self._clear(slot)
        if self._left_out:
            self._left_out.difference_update(names)
            self._tell_left_out()

    def mark(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Let nobody begin to hold these registrations from now on.

        Copies of them are still right.
        """
        for slot, generation in self._slots_of(names, generations):
            self._set_sequence(slot, generation | MARK)
            self._marked[generation] = slot

    def unmark(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Remove the marks of these registrations, which stay after all."""
        for slot, generation in self._slots_of(names, generations):
            self._set_sequence(slot, generation)

    def name_at(self, word: int, low: int) -> str | None:
        """Return the name whose sequence in this word ends in ``low``.

        A reader may send any word.
        """
        slot, rest = divmod(8 * word - self._entries, ENTRY_BYTES)
        if rest or not 0 <= slot < len(self._names) or self._words[word] & 0xFFFF_FFFF != low:
            return None
        return self._names[slot]

    def _slots_of(self, names: Sequence[str], generations: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the slots of the existing registrations, and their generations."""
        memory, words, buckets, seed, hashing = self._memory, self._words, self._buckets, self._seed, self._hash
        marked = self._marked
        for name, generation in zip(names, generations, strict=True):
            slot = marked.pop(generation, -1) if marked else -1
            if slot < 0:
                digest = hashing(name.encode(), seed)
                first, second = HALVES.unpack(digest)
                slot = slot_of(memory, digest, first, second, buckets)
            if slot >= 0 and words[self._word_of(slot)] & ~MARK == generation:
                yield slot, generation

    def _clear(self, slot: int) -> None:
        self._set_sequence(slot, 0)  # before the hash: see rule 2
        self._set_hash(slot, _EMPTY)
        self._names[slot] = None
        bucket, place = divmod(slot, BUCKET_SLOTS)
        self._taken[bucket] &= ~(1 << place)
        self._keys -= 1

    # --- whole file -----------------------------------------------------------------------------------------------

    def begin_filling(self) -> None:
        """Begin to add the stored names piece by piece.

        Until :meth:`end_filling`, a missing name means nothing.
        """
        self.is_filling = True
        self._tell_left_out()

    def end_filling(self) -> None:
        """Mark the index complete: a miss is now definite.

        Every stored name was added, or left out.
        """
        self.is_filling = False
        self._tell_left_out()

    def retire(self) -> None:
        """Retire this file, so that readers do not use it any more.

        Call it before any change that it does not show.
        """
        self._words[AT_RETIRED] = 1

    # --- single stores --------------------------------------------------------------------------------------------

    def _word_of(self, slot: int) -> int:
        return (self._entries + slot * ENTRY_BYTES) // 8

    def _set_sequence(self, slot: int, sequence: int) -> None:
        # A store into a view of words is one store of the processor: a reader never sees half of it.
        self._words[self._word_of(slot)] = sequence

    def _set_hash(self, slot: int, digest: bytes) -> None:
        # May be seen half. Half a hash matches no name; otherwise the entry would show it.
        at = HEADER_BYTES + slot * HASH_BYTES
        self._memory[at : at + HASH_BYTES] = digest

    def _tell_left_out(self) -> None:
        self._words[AT_LEFT_OUT] = len(self._left_out) + len(self._collided) + self.is_filling
