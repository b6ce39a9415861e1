"""All eviction policies over one trace, at several capacities, beside the most hits that were possible.

Each pair of policy and capacity is a simulation of its own, by :func:`offload._what_if.simulate`, in a process of its own where
there are several processors: they share nothing but the trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any, Final

import attrs

from backends.abc import Key
from maru.eviction import ARC, LFU, LRU, S3FIFO, AdaptiveLRFU, EvictionPolicy, WTinyLFU

from ._optimum import most_hits
from ._what_if import simulate

POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy[Key]]]] = MappingProxyType(
    {
        "AdaptiveLRFU": AdaptiveLRFU,
        "LRU": LRU,
        "LFU": LFU,
        "S3-FIFO": S3FIFO,
        "ARC": ARC,
        "W-TinyLFU": WTinyLFU,
    }
)
"""What is compared, by the name it is shown under; the default first."""

LIMIT: Final = "Belady"
"""What is shown as the limit."""

SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5)
"""The capacities, unless others are asked for: of the trace's different blocks."""


@attrs.frozen
class Comparison:
    """Hit rates of the policies at some capacities."""

    requests: int
    """Requests of the trace."""
    blocks: int
    """Blocks of their prompts."""
    unique_blocks: int
    """Different ones of these."""
    capacities: Sequence[int]
    """In blocks, ascending."""
    hit_rates: Mapping[str, Sequence[float]]
    """Of each policy, at each capacity."""
    limit: Sequence[float]
    """The highest hit rate that was possible, at each capacity."""

    @property
    def shares(self) -> list[float]:
        """The capacities, of the different blocks."""
        return [capacity / self.unique_blocks for capacity in self.capacities]

    def best(self, at: int) -> list[str]:
        """The policies with the highest hit rate at this capacity, as it is shown: mostly one."""
        rates = {name: round(rates[at], 4) for name, rates in self.hit_rates.items()}
        return [name for name, rate in rates.items() if rate == max(rates.values())]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return attrs.asdict(self) | {"shares": self.shares}


def compare(
    requests: Sequence[Sequence[Key]],
    capacities: Sequence[int],
    progress: Callable[[int], None] = lambda done: None,
    *,
    processes: int | None = None,
) -> Comparison:
    """Simulate every policy, and the limit, at each of these capacities.

    Args:
        requests: the keys of each.
        capacities: in blocks.
        progress: told how many simulations are done, after each; there are ``simulations(capacities)``.
        processes: how many to use; as many as there are processors unless given. With 1, none but this one.
    """
    capacities = sorted(set(capacities))
    tasks = [(name, capacity) for capacity in reversed(capacities) for name in [LIMIT, *POLICIES]]
    processes = processes or len(os.sched_getaffinity(0))
    hits: dict[tuple[str, int], int] = {}
    if processes == 1:
        for done, task in enumerate(tasks, 1):
            hits[task] = _hits(requests, *task)
            progress(done)
    else:
        # Spawned, since a fork of a process that has threads may hang.
        with ProcessPoolExecutor(
            min(processes, len(tasks)), mp_context=get_context("spawn"), initializer=_remember, initargs=(requests,)
        ) as pool:
            running: dict[Future[int], tuple[str, int]] = {pool.submit(_hits_of, *task): task for task in tasks}
            for done, future in enumerate(as_completed(running), 1):
                hits[running[future]] = future.result()
                progress(done)
    blocks = sum(map(len, requests))
    rates = {task: found / (blocks or 1) for task, found in hits.items()}
    return Comparison(
        requests=len(requests),
        blocks=blocks,
        unique_blocks=len({key for keys in requests for key in keys}),
        capacities=capacities,
        hit_rates={name: [rates[name, capacity] for capacity in capacities] for name in POLICIES},
        limit=[rates[LIMIT, capacity] for capacity in capacities],
    )


def simulations(capacities: Sequence[int]) -> int:
    """How many simulations a comparison takes."""
    return (len(POLICIES) + 1) * len(set(capacities))


def _hits(requests: Sequence[Sequence[Key]], name: str, capacity: int) -> int:
    if name == LIMIT:
        return most_hits(requests, capacity)
    return simulate(requests, [capacity], eviction=[POLICIES[name]])


# --- in a process of its own --------------------------------------------------------------------------------------

_requests: Sequence[Sequence[Key]] = ()


def _remember(requests: Sequence[Sequence[Key]]) -> None:
    global _requests
    _requests = requests


def _hits_of(name: str, capacity: int) -> int:
    return _hits(_requests, name, capacity)
