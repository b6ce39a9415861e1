"""Drives any cache with the requests of a trace, with equal timing.

    keys -> load the longest prefix -> check the loaded blocks -> write the missing blocks -> store them, answered

A comparison stands on the driver: `offload bench replay` and `tests/peers` use it for caches of ours, for a dictionary
that makes the same copies (:mod:`.baseline`), and for other projects' stores.

Rule 1. All of it is timed, keys included. The substitute for the forward pass, the writing of the missing blocks, is a
    stamp at both ends of each: a fiftieth of a copy of 64 KiB.
Rule 2. Loaded blocks are checked in the same way for each cache: their stamps are those of their keys. A block that is
    another one, or is not all there, is counted as wrong. A cache may verify more than that; that is its own time.
Rule 3. Requests begin in the order of the trace. Of several in flight, each has memory of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Final, Protocol, TypeVar

import attrs
import trio

from backends.abc import Key
from backends.memory import HostPages

T = TypeVar("T")

STAMP_BYTES: Final = 32
"""Bytes of the key stamped at both ends of a block."""
_NONE: Final = bytes(STAMP_BYTES)


class Cache(Protocol):
    """A cache to drive. One trio run's tasks call both methods."""

    async def load(self, keys: Sequence[Key], to: Sequence[int]) -> int:
        """Copy the blocks of the longest prefix of ``keys`` to these addresses.

        Returns their number.
        """
        ...

    async def store(self, keys: Sequence[Key], at: Sequence[int]) -> int:
        """Store the blocks at these addresses.

        Returns the number of new blocks once all of them can be found.
        """
        ...


@attrs.define(eq=False)
class Driven:
    """The results of a cache for requests, in the order they began."""

    seconds: list[float] = attrs.Factory(list)
    """Seconds of each request: keys, load, check, store."""
    found: list[int] = attrs.Factory(list)
    """Blocks that each request found."""
    stored: list[int] = attrs.Factory(list)
    """New blocks of each request."""
    wrong: int = 0
    """Loaded blocks that differ from the stored ones."""
    elapsed: float = 0.0
    """Seconds from the first request to the last.

    The time between two calls of :func:`drive` does not count.
    """

    @property
    def hits(self) -> int:
        """Number of blocks found."""
        return sum(self.found)

    @property
    def stores(self) -> int:
        """Number of blocks stored."""
        return sum(self.stored)


class Place:
    """Host memory for the blocks of one request.

    They are stored from one part, and loaded to the other.

    Args:
        here: addresses of the blocks that are stored.
        there: addresses that blocks are loaded to.
        block_bytes: of a block.
        owner: kept alive as long as this is.
    """

    def __init__(self, here: Sequence[int], there: Sequence[int], block_bytes: int, owner: object = None) -> None:
        assert block_bytes >= 2 * STAMP_BYTES
        self.here = here
        self.there = there
        self._written = [_view(address, block_bytes) for address in here]
        self._loaded = [_view(address, block_bytes) for address in there]
        self._owner = owner

    def write(self, keys: Sequence[Key]) -> None:
        """Stamp the first places with these keys."""
        for key, view in zip(keys, self._written, strict=False):
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = key[:STAMP_BYTES].ljust(STAMP_BYTES, b".")

    def count_wrong(self, keys: Sequence[Key]) -> int:
        """Count the first places without the stamps of these keys.

        The stamps are removed.
        """
        wrong = 0
        for key, view in zip(keys, self._loaded, strict=False):
            stamp = key[:STAMP_BYTES].ljust(STAMP_BYTES, b".")
            wrong += view[:STAMP_BYTES] != stamp or view[-STAMP_BYTES:] != stamp
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = _NONE  # a block from an earlier request must not pass for loaded
        return wrong


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def make_places(in_flight: int, most_blocks: int, block_bytes: int) -> list[Place]:
    """Make places for concurrent requests, in populated memory of their own."""
    memory = HostPages(in_flight * 2 * most_blocks, block_bytes)
    addresses = memory.pages(range(in_flight * 2 * most_blocks)).addresses
    parts = [addresses[at : at + most_blocks] for at in range(0, len(addresses), most_blocks)]
    return [Place(here, there, block_bytes, memory) for here, there in zip(parts[::2], parts[1::2], strict=True)]


async def drive(
    cache: Cache,
    requests: Sequence[T],
    places: Sequence[Place],
    driven: Driven,
    keys_of: Callable[[T], Sequence[Key]],
) -> None:
    """Send requests to a cache, one per place, and add results.

    Args:
        cache: the cache to drive.
        requests: their keys are made of them.
        places: memory for each request in flight.
        driven: the results to add to.
        keys_of: makes the keys of a request, as an engine does: again for each request.
    """
    at = len(driven.seconds)
    driven.seconds += [0.0] * len(requests)
    driven.found += [0] * len(requests)
    driven.stored += [0] * len(requests)
    waiting = iter(enumerate(requests, at))
    began = perf_counter()
    if len(places) == 1:
        await _drive(cache, waiting, places[0], driven, keys_of)
    else:
        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(_drive, cache, waiting, place, driven, keys_of)
    driven.elapsed += perf_counter() - began


async def _drive(
    cache: Cache,
    waiting: Iterator[tuple[int, T]],
    place: Place,
    driven: Driven,
    keys_of: Callable[[T], Sequence[Key]],
) -> None:
    here, there = place.here, place.there
    for at, request in waiting:
        began = perf_counter()
        keys = keys_of(request)
        found = await cache.load(keys, there)
        driven.wrong += place.count_wrong(keys[:found])
        missing = keys[found:]
        if missing:
            place.write(missing)
            driven.stored[at] = await cache.store(missing, here[: len(missing)])
        driven.found[at] = found
        driven.seconds[at] = perf_counter() - began
