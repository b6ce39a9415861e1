"""Locations of keys, registrations, and their answers. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

V = TypeVar("V")


class Location(msgspec.Struct, array_like=True, gc=False):
    """Place of the bytes of one key.

    Nothing in it changes, except the encoded replies that are kept here for other modules.
    """

    region_id: int
    offset: int
    length: int
    generation: int
    """Number of the registration.

    It counts up over the whole directory and is never given twice.
    """
    checksum: int | None
    """Checksum of the bytes, as sent by their writer.

    ``None`` from a published client, which sends none.
    """
    attempt: int
    """The STORE that registered it, as numbered by its session.

    0 from a published client.
    """
    depth: int | None = None
    """Index of the block in its prefix, for the eviction policy.

    ``None`` if its writer did not send it.
    """
    entry: bytes | None = None
    """This location as bytes of a LOOKUP reply, kept for later replies.

    Not part of the state.
    """
    place: bytes | None = None
    """This location as bytes of a FIND reply."""


class Columns(NamedTuple):
    """Entries of a registration, in columns of equal length.

    A number stands for a column of equal ones.
    """

    regions: int | Sequence[int]
    keys: list[str]
    offsets: Sequence[int]
    lengths: int | Sequence[int]
    checksums: Sequence[int | None] | None = None
    attempt: int = 0
    depths: Sequence[int | None] | None = None

    def equally_long(self) -> bool:
        """Return whether all columns have the same length."""
        n = len(self.keys)
        return (
            len(self.offsets) == n
            and (isinstance(self.lengths, int) or len(self.lengths) == n)
            and (isinstance(self.regions, int) or len(self.regions) == n)
            and (self.checksums is None or len(self.checksums) == n)
            and (self.depths is None or len(self.depths) == n)
        )

    def without(self, skipped: Sequence[int]) -> Columns:
        """Return the registration without the entries at these positions."""
        if not skipped:
            return self
        skip = frozenset(skipped)
        return self.at([at for at in range(len(self.keys)) if at not in skip])

    def by_region(self) -> dict[int, Columns]:
        """Split the registration by region.

        Each part is in the order of its entries.
        """
        regions = self.regions
        if isinstance(regions, int):
            return {regions: self}
        if not regions:
            return {}
        if regions.count(regions[0]) == len(regions):
            return {regions[0]: self}
        positions: dict[int, list[int]] = {}
        for at, region_id in enumerate(regions):
            positions.setdefault(region_id, []).append(at)
        return {region_id: self.at(some) for region_id, some in positions.items()}

    def at(self, positions: Sequence[int]) -> Columns:
        """Return the entries at these positions."""
        regions, keys, offsets, lengths, checksums, attempt, depths = self

        def pick(column: Sequence[V]) -> list[V]:
            return [column[at] for at in positions]

        return Columns(
            regions if isinstance(regions, int) else pick(regions),
            pick(keys),
            pick(offsets),
            lengths if isinstance(lengths, int) else pick(lengths),
            None if checksums is None else pick(checksums),
            attempt,
            None if depths is None else pick(depths),
        )


class LocationWatcher(Protocol):
    """Receiver of each registration and each removal of keys.

    It learns of a registration when it is recorded, of a removal when it takes effect.
    """

    def registered(self, columns: Columns, generations: Sequence[int], readable: bool) -> None:
        """Take keys that are registered, and not in the journal yet.

        ``readable``: they can be read without a pin, as their owner is a client of ours.
        """
        ...

    def removed(self, keys: Sequence[str], generations: Sequence[int]) -> None:
        """Take keys that are not registered any more."""
        ...


class Registration(NamedTuple):
    """Answer to a registration, one entry for each key."""

    statuses: list[int]
    """A ``StoreStatus`` for each key, as a number."""
    generations: list[int]
    """The generation of each new key; 0 for the others."""
    first_generation: int
    """Generation of the first new key; the further ones follow on.

    0 if none is new.
    """
    skipped: list[int]
    """Positions of the keys that are not new. Mostly empty."""


class GivenBack(enum.Enum):
    """Result of handing a region back."""

    FREED = "freed"
    """The region had no key: it is dropped."""
    DEFERRED = "deferred"
    """The region is hidden, and dropped with its last key."""
    REFUSED = "refused"
    """The region is unknown, handed back before, or not the caller's."""
