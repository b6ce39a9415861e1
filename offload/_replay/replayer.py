"""Plays requests through an engine, as an inference engine would its prompts.

One after another, or several at once. The steps of a request::

    lookup -> load the found blocks -> [compare them with the stored ones] -> [write the missing blocks] -> store

The store is complete once it has settled. The steps in brackets are not timed: in production the forward pass takes
their place. A block's content is a function of its key, so that every loaded block can be compared in full with the
stored one.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from time import perf_counter

import attrs

from backends.abc import CapacityError, Key, Tier
from backends.base.pages import Pages
from backends.base.slots import PagesDestination
from backends.memory import HostPages, MemoryTier
from backends.testing import payload_of

from .._engine import Engine, Route, open_engine
from .._engine.factories import leads_on
from .._engine.opening import _named
from .._errors import DestinationFull
from .._keys import block_key
from .._pipeline.lifecycle import Status
from .._pipeline.result import TransferResult
from ..abc import AsyncPolicy, Policy
from ..preconditions import NO_WAIT
from .engine_cache import engine_config
from .trace import Request

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


class TraceKeys:
    """The keys of a trace's hash ids, each made once."""

    def __init__(self) -> None:
        self._key_of: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def of(self, request: Request) -> tuple[Key, ...]:
        """Return one key per block of the prompt."""
        key_of = self._key_of
        try:
            return tuple([key_of[hash_id] for hash_id in request.hash_ids])
        except KeyError:
            for hash_id in request.hash_ids:
                if hash_id not in key_of:
                    key_of[hash_id] = block_key(b"%d" % hash_id, salt="offload.replay")
            return self.of(request)


def keys_of(request: Request) -> list[Key]:
    """Make the keys of a request's blocks again.

    An engine pays for this at each request.
    """
    return [block_key(b"%d" % hash_id, salt="offload.replay") for hash_id in request.hash_ids]


class Buffer:
    """Host memory for the blocks of one request.

    They are written and compared as a function of their keys.
    """

    def __init__(self, addresses: Sequence[int], block_bytes: int) -> None:
        self.addresses = addresses
        self.block_bytes = block_bytes

    def write(self, keys: Sequence[Key]) -> None:
        """Put the blocks of these keys into the first places."""
        size = self.block_bytes
        for key, address in zip(keys, self.addresses, strict=False):
            ctypes.memmove(address, payload_of(key, size), size)

    def count_wrong(self, keys: Sequence[Key]) -> int:
        """Count the first places that differ from their key's block.

        All bytes are compared.
        """
        size = self.block_bytes
        return sum(
            _memcmp(address, payload_of(key, size), size) != 0
            for key, address in zip(keys, self.addresses, strict=False)
        )


@attrs.frozen
class Played:
    """The result of one request.

    Times in seconds, of the cache operations only.
    """

    blocks: int
    """Blocks of its prompt."""
    hit: int
    """Blocks that were found and loaded: its prefix."""
    wrong: int
    """Loaded blocks that differ from the stored ones."""
    filtered: int
    """Blocks that a policy filtered."""
    dropped: int
    """Blocks that were not stored for lack of room, or an error."""
    lookup_time: float
    """Seconds of looking up and pinning the prefix."""
    load_time: float
    """Seconds of loading and releasing it; 0.0 if nothing was found."""
    store_time: float
    """Seconds of storing the missing blocks, until settled; 0.0 if none."""
    began: float = 0.0
    """Time when the request began, on the clock of the other times."""
    runs: Sequence[tuple[str, int]] = ()
    """Tiers of its prefix, in order, with numbers of blocks."""
    kept_back: Sequence[Key] = ()
    """Filtered blocks that were not present already."""
    failures: Mapping[str, int] = attrs.field(factory=dict)
    """Blocks that were not stored because of an error, by cause.

    It may be in any tier. A full tier is not an error.
    """

    @property
    def time(self) -> float:
        """Sum of lookup, load and store, in seconds."""
        return self.lookup_time + self.load_time + self.store_time


@attrs.frozen
class Seat:
    """The memory of one request on both sides of an engine.

    Requests in flight at once have a seat each.
    """

    ids: Sequence[int]
    """Numbers of its blocks in the engine's source."""
    pages: Pages
    """Pages that its blocks are loaded to."""
    source: Buffer
    """Memory of its blocks before they are stored."""
    target: Buffer
    """``pages``, to be compared."""


class Replayer:
    """An engine with memory for one request or more on both sides.

    Made by :func:`open_replayer`.

    Attributes:
        engine: the engine that requests are played through.
        seats: the memory of each request in flight.
    """

    def __init__(self, engine: Engine, source: MemoryTier, most_blocks: int, in_flight: int, check: bool) -> None:
        self.engine = engine
        size, most = source.block_bytes, max(most_blocks, 1)
        self._memory = HostPages(in_flight * most, size)
        self._source = source
        self._check = check
        written = source.views(range(in_flight * most))
        assert written is not None
        self.seats: list[Seat] = []
        for start in range(0, in_flight * most, most):
            ids = range(start, start + most)
            pages = self._memory.pages(ids)
            here = Buffer(written.addresses[start : start + most], size)
            self.seats.append(Seat(ids, pages, here, Buffer(pages.addresses, size)))

    async def play(self, keys: Sequence[Key], clock: Callable[[], float] = perf_counter, seat: int = 0) -> Played:
        """Play one request until everything it stored has settled.

        Args:
            keys: of its blocks.
            clock: measures times, in seconds.
            seat: number of the memory to use; no two requests in flight may use the same.
        """
        engine, here = self.engine, self.seats[seat]
        began = clock()
        hit = await engine.lookup(keys)
        found_at = loaded_at = clock()
        loaded, runs = len(hit), tuple(hit.runs)
        if loaded:
            async with hit:
                result = await engine.load(hit, PagesDestination(here.pages.part(0, loaded)))
            loaded_at = clock()
            loaded = result.loaded
        else:
            await engine.release(hit)
        wrong = here.target.count_wrong(keys[:loaded]) if loaded and self._check else 0
        missing = keys[loaded:]
        if not missing:
            return Played(len(keys), loaded, wrong, 0, 0, found_at - began, loaded_at - found_at, 0.0, began, runs)
        here.source.write(missing)
        store_at = clock()
        blocks = self._source.external(here.ids[: len(missing)], missing)
        handle = engine.store_nowait(blocks, precondition=NO_WAIT)
        answer = await handle.wait()
        settled_at = clock()
        filtered = len(answer.filtered)
        dropped = 0 if answer.status is Status.COMPLETE else len(missing) - filtered - len(answer.completed)
        return Played(
            blocks=len(keys),
            hit=loaded,
            wrong=wrong,
            filtered=filtered,
            dropped=dropped,
            lookup_time=found_at - began,
            load_time=loaded_at - found_at,
            store_time=settled_at - store_at,
            began=began,
            runs=runs,
            kept_back=[key for key, reason in answer.filtered.items() if reason != "present"] if filtered else (),
            failures=_failures_of(answer, len(missing)) if answer.status is Status.FAILED else {},
        )


def _failures_of(answer: TransferResult, blocks: int) -> Counter[str]:
    """Count the failed blocks by the operating system's message.

    They may have failed in the first tier or further down the chain.
    """
    errors = list(answer.failed.values())
    failures: Counter[str] = Counter()
    for route in answer.routes.values():
        failures.update(_failures_of(route, len(answer.completed)))
    if answer.error is not None and not errors and not answer.routes:
        errors = [answer.error] * blocks  # the container as a whole
    failures.update(
        [
            _said_of(error)
            for error in errors
            if not isinstance(error, DestinationFull) and not isinstance(error.__cause__, CapacityError)
        ]
    )
    return failures


def _said_of(error: BaseException) -> str:
    """Return the operating system's message, or the error's class.

    Only an ``OSError`` has such a message.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__
    return type(error).__name__


@asynccontextmanager
async def open_replayer(
    tiers: Sequence[Tier],
    block_bytes: int,
    most_blocks: int,
    *,
    policies: Sequence[Policy | AsyncPolicy] | None = None,
    in_flight: int = 1,
    check: bool = True,
) -> AsyncIterator[Replayer]:
    """Open an engine over these tiers, with room for the largest request.

    Args:
        tiers: from the fastest to the slowest.
        block_bytes: size of every block.
        most_blocks: blocks of the largest request.
        policies: decide which blocks are stored; by default those that the first tier does not have.
        in_flight: number of requests that may be played at once.
        check: compare loaded blocks with the stored ones.
    """
    size = in_flight * max(most_blocks, 1)
    source = MemoryTier(size * block_bytes, block_bytes, checksums=False)
    config = engine_config(size)
    named = dict(zip(_named(tiers), tiers, strict=True))
    # Required, so that a replay finds the same blocks each time, however fast a disk is today.
    routes = [Route(name, required=True) for above, name in pairwise(named) if leads_on(named[above], "on_store")]
    async with open_engine(source, named, policies=policies, config=config, routes=routes) as engine:
        yield Replayer(engine, source, most_blocks, in_flight, check)
