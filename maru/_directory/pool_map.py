"""Map of a pool: owner, use and age of cells. Pure.

Rule 1. A picture has no use for a million pages, so a region is divided into at most so many *cells* of adjacent pages.
Rule 2. Age is an order, not a time: the directory knows no clock, but generations count up over the whole pool.
Rule 3. It is drawn piece by piece, between two steps of a server: keys that come or go meanwhile may be on it or not.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import islice

import attrs

from .regions import Region, RegionState
from .state import State


@attrs.frozen
class RegionMap:
    """One region of a pool, in cells."""

    region_id: int
    owner: str
    """The instance_id that it was allocated for."""
    state: str
    """``owned``; or without an owner: ``orphan``, ``returned``."""
    published: bool
    """Whether a published client owns it."""
    length: int
    """Length in bytes."""
    cell_bytes: int
    """Bytes of each cell; the last may be shorter."""
    used: Sequence[float]
    """The share of each cell that keys take."""
    age: Sequence[float]
    """Age of the newest key in each cell, 0.0 to 1.0.

    0.0 is the newest in the pool, 1.0 the oldest. Compared with all keys of the pool. Without a meaning for a cell
    without keys.
    """


@attrs.frozen
class PoolMap:
    """The regions of a pool, by number."""

    regions: Sequence[RegionMap]
    entries: int
    """Number of keys on the map."""


def map_pool(state: State, cells: int, piece: int) -> Generator[None, None, PoolMap]:
    """Draw a map; yields after every ``piece`` keys.

    Args:
        state: of the directory.
        cells: most cells of a region.
        piece: how many keys are looked at between two yields.
    """
    drawn: list[tuple[Region, int, list[int], list[int]]] = []
    oldest, newest, entries = state.generation, 0, 0
    for region in list(state.regions.values()):
        cell_bytes = max(1, -(-region.length // cells))
        used = [0] * -(-region.length // cell_bytes)
        latest = [0] * len(used)
        keys = iter(list(region.keys_at.values()))
        while names := list(islice(keys, piece)):
            for name in names:
                location = state.located.get(name)
                if location is None or location.region_id != region.region_id:
                    continue
                _spread(used, location.offset, location.length, cell_bytes)
                at, generation = location.offset // cell_bytes, location.generation
                latest[at] = max(latest[at], generation)
                oldest, newest = min(oldest, generation), max(newest, generation)
                entries += 1
            yield
        drawn.append((region, cell_bytes, used, latest))
    span = max(1, newest - oldest)
    return PoolMap([_region_map(*one, newest=newest, span=span) for one in drawn], entries)


def _spread(used: list[int], offset: int, length: int, cell_bytes: int) -> None:
    """Add the bytes of one key to the cells under it."""
    at, end = offset // cell_bytes, offset + length
    while offset < end:
        stop = min(end, (at + 1) * cell_bytes)
        used[at] += stop - offset
        at, offset = at + 1, stop


def _region_map(
    region: Region, cell_bytes: int, used: list[int], latest: list[int], *, newest: int, span: int
) -> RegionMap:
    sizes = [min(cell_bytes, region.length - at * cell_bytes) for at in range(len(used))]
    return RegionMap(
        region.region_id,
        region.instance_id,
        RegionState(region.state).name.lower(),
        region.published,
        region.length,
        cell_bytes,
        [round(taken / size, 3) for taken, size in zip(used, sizes, strict=True)],
        [round((newest - generation) / span, 3) if generation else 0.0 for generation in latest],
    )
