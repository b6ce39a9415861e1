"""Drives any cache with the requests of a trace, and times the same things for each.

    keys -> load the longest prefix -> look at what was loaded -> write what is missing -> store it, answered

The driver is what a comparison stands on: `offload bench replay` and `tests/peers` use it for caches of ours, for a dictionary
that makes the same copies (:mod:`.baseline`), and for other projects' stores.

Rule 1. All of it is timed, keys included. What takes the place of the forward pass, the writing of the missing blocks, is a
        stamp at both ends of each: a fiftieth of a copy of 64 KiB.
Rule 2. What was loaded is looked at in the same way for each cache: its stamps are those of its key. A block that is another
        one, or is not all there, is counted as wrong. A cache may verify more than that; that is its own time.
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
"""At both ends of a block: its key."""
_NONE: Final = bytes(STAMP_BYTES)


class Cache(Protocol):
    """What is driven. Both methods are called by the tasks of one trio run."""

    async def load(self, keys: Sequence[Key], to: Sequence[int]) -> int:
        """Copy the blocks of the longest prefix of ``keys`` to these addresses, and return how many there are."""
        ...

    async def store(self, keys: Sequence[Key], at: Sequence[int]) -> int:
        """Store the blocks at these addresses, and return how many were new once all of them can be found."""
        ...


@attrs.define(eq=False)
class Driven:
    """What a cache did with some requests. Requests are in the order in which they began."""

    seconds: list[float] = attrs.Factory(list)
    """Each request's: keys, load, look, store."""
    found: list[int] = attrs.Factory(list)
    """Blocks that each found."""
    stored: list[int] = attrs.Factory(list)
    """Blocks that were new of each."""
    wrong: int = 0
    """Blocks that were loaded and are not what was stored."""
    elapsed: float = 0.0
    """From the first request to the last, in seconds, without what is between two calls of :func:`drive`."""

    @property
    def hits(self) -> int:
        """Blocks found."""
        return sum(self.found)

    @property
    def stores(self) -> int:
        """Blocks stored."""
        return sum(self.stored)


class Place:
    """Host memory for the blocks of one request: where they are stored from, and where they are loaded to.

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
        """How many of the first places do not have the stamps of these keys. The stamps are taken off again."""
        wrong = 0
        for key, view in zip(keys, self._loaded, strict=False):
            stamp = key[:STAMP_BYTES].ljust(STAMP_BYTES, b".")
            wrong += view[:STAMP_BYTES] != stamp or view[-STAMP_BYTES:] != stamp
            view[:STAMP_BYTES] = view[-STAMP_BYTES:] = (
                _NONE  # what an earlier request has left must not pass for loaded
            )
        return wrong


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def make_places(in_flight: int, most_blocks: int, block_bytes: int) -> list[Place]:
    """Places for so many requests at once, in populated memory of their own."""
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
    """Send requests to a cache, as many at once as there are places, and add what it did.

    Args:
        cache: what is driven.
        requests: what keys are made of.
        places: memory for each request in flight.
        driven: what is added to.
        keys_of: makes the keys of a request, as an engine does: for each request anew.
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
