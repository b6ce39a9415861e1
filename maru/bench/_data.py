"""``maru bench data``: copies into and out of pages, compared with memcpy.

The copies go through the blocking handler.

A *store* copies a batch of buffers into pages and registers them (``batch_put``); in *lockstep*, or *two in flight*:
the next batch is begun before waiting for the previous answer. A *load* finds a batch, copies it into buffers and gives
the pins back (``batch_get_into``); a *retrieve* does so in steps: ``batch_retrieve``, then a copy out of each view, and
the views are dropped. *Pipelined*, the next batch is requested before the current one is copied.

The buffers of a batch are scattered over the source. The limit is one call of memmove per batch, out of one run of as
many bytes into populated shared memory, or back. The pages of all batches together do not fit into a core's own caches.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

import attrs

from .._client.answers import Deleted, Loaded, Stored
from .._client.blocking import MaruHandler, PendingCall
from .._client.views import MemoryInfo
from .._config import MaruConfig
from ._keys import keys_of
from .measure import Effort, Row, measure, rate_of
from .processes import BenchFailed, Server, server

T = TypeVar("T")

_KIB: Final = 1 << 10
_FILLED: Final = 0.75
"""Share of a region that is used.

A server evicts ahead of need from a region that is nearly full.
"""


class _Case(NamedTuple):
    """One size of pages."""

    label: str
    page_bytes: int
    at_once: int
    """Pages in a batch."""
    batches: int
    goals: Mapping[str, float]
    """Least share of memcpy, by subject."""


_CASES: Final = (
    _Case(
        "1MiB",
        1024 * _KIB,
        16,
        8,
        {
            "store.lockstep.plain": 0.75,
            "store.two.plain": 0.88,
            "store.lockstep.checksums": 0.60,
            "retrieve.lockstep.plain": 0.70,
            "retrieve.pipelined.plain": 0.88,
            "load.lockstep.plain": 0.70,
            "load.pipelined.plain": 0.88,
        },
    ),
    _Case("64KiB", 64 * _KIB, 64, 32, {"store.lockstep.plain": 0.40, "store.two.plain": 0.50}),
)


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of all sizes."""
    for case in _CASES:
        if effort.quick:
            case = case._replace(page_bytes=case.page_bytes // 16, batches=3)
        with server(2 * _region_bytes(case)) as running:
            yield from _of_size(case, running, effort)


def _of_size(case: _Case, running: Server, effort: Effort) -> Iterator[Row]:
    memory = _Memory(case)
    config = MaruConfig(
        server_url=running.addresses["ipc"], chunk_size_bytes=case.page_bytes, pool_size=_region_bytes(case)
    )
    with (
        MaruHandler(attrs.evolve(config, checksums=False)) as plain,
        MaruHandler(attrs.evolve(config, checksums=True)) as summed,
    ):
        works = {"plain": _Work(plain, case, memory, "p"), "checksums": _Work(summed, case, memory, "c")}
        subjects: dict[str, Callable[[], float]] = {"memcpy": memory.copy_in}
        for sums, work in works.items():
            subjects[f"store.lockstep.{sums}"] = work.store_lockstep
            subjects[f"store.two.{sums}"] = work.store_two
        stored = measure(f"store, {case.label}", effort, subjects)
        subjects = {"memcpy": memory.copy_out}
        for sums, work in works.items():
            work.fill()
            subjects[f"load.lockstep.{sums}"] = work.load_lockstep
            subjects[f"load.pipelined.{sums}"] = work.load_pipelined
        subjects["retrieve.lockstep.plain"] = works["plain"].retrieve_lockstep
        subjects["retrieve.pipelined.plain"] = works["plain"].retrieve_pipelined
        loaded = measure(f"load, {case.label}", effort, subjects)
    for samples in (stored, loaded):
        for subject in [subject for subject in samples if subject != "memcpy"]:
            way, _, rest = subject.partition(".")
            goal = f"ratio >= {case.goals[subject]:g}" if subject in case.goals else None
            name = f"data.{way}.{case.label}.{rest}"
            yield samples.row(name, "GB/s", subject, "memmove of the same bytes", "memcpy", goal, scale=1e-9)


def _region_bytes(case: _Case) -> int:
    """Return the size of one handler's region, in steps of 2 MiB."""
    return math.ceil(case.page_bytes * case.at_once * case.batches / _FILLED / (2 << 20)) * (2 << 20)


# --- memory ---------------------------------------------------------------------------------------------------------


class _Memory:
    """An engine's memory with the buffers, and shared memory for the limits."""

    def __init__(self, case: _Case) -> None:
        self.batch_bytes = case.page_bytes * case.at_once
        size = self.batch_bytes * case.batches
        self._engine, self._shared = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE), mmap.mmap(-1, size)
        pattern = bytes(range(1, 256)) * (size // 255 + 1)
        self._engine[:], self._shared[:] = pattern[:size], pattern[:size]
        self.address, self._shared_address = (
            ctypes.addressof(ctypes.c_char.from_buffer(some)) for some in (self._engine, self._shared)
        )
        whole = memoryview(self._engine)
        places = random.Random(0).sample(range(0, size, case.page_bytes), size // case.page_bytes)
        buffers = [whole[place : place + case.page_bytes] for place in places]
        self.groups = [buffers[start : start + case.at_once] for start in range(0, len(buffers), case.at_once)]
        """Buffers of each batch."""
        self.addresses = [
            [self.address + place for place in places[start : start + case.at_once]]
            for start in range(0, len(places), case.at_once)
        ]
        """Addresses of those buffers."""
        self._offsets = range(0, size, self.batch_bytes)

    def copy_in(self) -> float:
        """Measure the limit of a store, in bytes per second."""
        return self._copied(self._shared_address, self.address)

    def copy_out(self) -> float:
        """Measure the limit of a load, in bytes per second."""
        return self._copied(self.address, self._shared_address)

    def _copied(self, to: int, at: int) -> float:
        def copy() -> None:
            for offset in self._offsets:
                ctypes.memmove(to + offset, at + offset, self.batch_bytes)

        return rate_of(len(self._offsets) * self.batch_bytes, copy)


# --- through a handler: bytes per second ----------------------------------------------------------------------------


class _Work:
    """The stores and loads through one handler."""

    def __init__(self, handler: MaruHandler, case: _Case, memory: _Memory, prefix: str) -> None:
        self._handler, self._memory = handler, memory
        keys = [prefix + key for key in keys_of(case.at_once * case.batches)]
        self._keys = [keys[start : start + case.at_once] for start in range(0, len(keys), case.at_once)]

    def store_lockstep(self) -> float:
        put = self._handler.batch_put
        return self._stored(lambda: self._lockstep(lambda at: put(self._keys[at], self._memory.groups[at]), _check))

    def store_two(self) -> float:
        begin = self._handler.begin.batch_put
        return self._stored(lambda: self._ahead(lambda at: begin(self._keys[at], self._memory.groups[at]), _check))

    def _stored(self, work: Callable[[], float]) -> float:
        rate = work()
        for at, keys in enumerate(self._keys):
            _check(at, self._handler.batch_delete(keys))
        return rate

    def fill(self) -> None:
        """Store all batches, to be loaded."""
        for at, (keys, buffers) in enumerate(zip(self._keys, self._memory.groups, strict=True)):
            _check(at, self._handler.batch_put(keys, buffers))

    def load_lockstep(self) -> float:
        load = self._handler.batch_get_into
        return self._lockstep(lambda at: load(self._keys[at], self._memory.groups[at]), _check)

    def load_pipelined(self) -> float:
        begin = self._handler.begin.batch_get_into
        return self._ahead(lambda at: begin(self._keys[at], self._memory.groups[at]), _check)

    def retrieve_lockstep(self) -> float:
        return self._lockstep(lambda at: self._handler.batch_retrieve(self._keys[at]), self._copy_out)

    def retrieve_pipelined(self) -> float:
        return self._ahead(lambda at: self._handler.begin.batch_retrieve(self._keys[at]), self._copy_out)

    def _copy_out(self, at: int, infos: Sequence[MemoryInfo | None]) -> None:
        for address, info in zip(self._memory.addresses[at], infos, strict=True):
            if info is None:
                raise BenchFailed("stored keys are missing")
            ctypes.memmove(address, info.address, info.length)
            info.check()

    def _lockstep(self, call: Callable[[int], Sequence[T]], use: Callable[[int, Sequence[T]], None]) -> float:
        """Measure one batch after the other."""
        start = perf_counter()
        for at in range(len(self._keys)):
            use(at, call(at))
        return self._rate(start)

    def _ahead(self, begin: Callable[[int], PendingCall[list[T]]], use: Callable[[int, Sequence[T]], None]) -> float:
        """Measure with each batch begun before the previous one has ended."""
        start = perf_counter()
        ticket = begin(0)
        for at in range(1, len(self._keys)):
            following = begin(at)
            use(at - 1, ticket.result())
            ticket = following
        use(len(self._keys) - 1, ticket.result())
        return self._rate(start)

    def _rate(self, start: float) -> float:
        return len(self._keys) * self._memory.batch_bytes / (perf_counter() - start)


def _check(at: int, answers: Sequence[object]) -> None:
    """Check that every answer is a success, and no duplicate."""
    if not _DONE.issuperset(answers):
        raise BenchFailed(f"not everything was done in batch {at}: {set(answers) - _DONE}")


_DONE: Final[frozenset[object]] = frozenset({Stored.NEW, Loaded.LOADED, Deleted.DELETED})
