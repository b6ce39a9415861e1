"""Where a key's bytes lie, what a registration says, and the answers to it. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

V = TypeVar("V")


class Location(msgspec.Struct, array_like=True, gc=False):
    """Where the bytes of one key lie. Never changed, but for what is kept here for others."""

    region_id: int
    offset: int
    length: int
    generation: int
    """Of the registration: counts up over the whole directory and is never given twice."""
    checksum: int | None
    """Of the bytes, as their writer said; ``None`` from a published client, which says none."""
    attempt: int
    """The STORE that registered it, as its session numbers them; 0 from a published client."""
    depth: int | None = None
    """The index of the block in its prefix, where its writer said it: for the eviction policy."""
    entry: bytes | None = None
    """This location as bytes of a LOOKUP reply, kept for later replies. No part of the state."""
    place: bytes | None = None
    """The same for FIND."""


class Columns(NamedTuple):
    """What a registration says, in columns of equal length. A number stands for a column of equal ones."""

    regions: int | Sequence[int]
    keys: list[str]
    offsets: Sequence[int]
    lengths: int | Sequence[int]
    checksums: Sequence[int | None] | None = None
    attempt: int = 0
    depths: Sequence[int | None] | None = None

    def equally_long(self) -> bool:
        """Whether it can be read as entries."""
        n = len(self.keys)
        return (
            len(self.offsets) == n
            and (isinstance(self.lengths, int) or len(self.lengths) == n)
            and (isinstance(self.regions, int) or len(self.regions) == n)
            and (self.checksums is None or len(self.checksums) == n)
            and (self.depths is None or len(self.depths) == n)
        )

    def without(self, skipped: Sequence[int]) -> Columns:
        """The same registration but for the entries at these positions."""
        if not skipped:
            return self
        skip = frozenset(skipped)
        return self.at([at for at in range(len(self.keys)) if at not in skip])

    def by_region(self) -> dict[int, Columns]:
        """The same registration apart, for each region that is named, each in the order of its entries."""
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
        """The entries at these positions."""
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
    """Is told where keys lie: of each registration when it is recorded, of each removal when it takes effect."""

    def registered(self, columns: Columns, generations: Sequence[int], readable: bool) -> None:
        """These are registered, and not in the journal yet. ``readable``: without a pin, as their owner is one of ours."""
        ...

    def removed(self, keys: Sequence[str], generations: Sequence[int]) -> None:
        """These are not registered any more."""
        ...


class Registration(NamedTuple):
    """The answer to a registration, one entry for each key."""

    statuses: list[int]
    """A ``StoreStatus`` each, as a number."""
    generations: list[int]
    """The generation of each new key; 0 for the others."""
    first_generation: int
    """Of the first new key; the further ones follow on. 0 if none is new."""
    skipped: list[int]
    """The positions of those that are not new. Mostly empty."""


class GivenBack(enum.Enum):
    """What became of a region that was to be handed back."""

    FREED = "freed"
    """No key lived in it: it is dropped."""
    DEFERRED = "deferred"
    """Hidden from now on, and dropped with its last key."""
    REFUSED = "refused"
    """Unknown, handed back before, or not the caller's."""
