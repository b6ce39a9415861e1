"""What the adapter costs: store and load beside memmove in one run, and single small objects in microseconds.

    nox -s lmcache -- measure

A share is the time of memmove divided by that of the adapter, from submitting to the signal: 1.0 is as fast as copying. Medians
of rounds that take turns, so that a machine that is busy for a while slows all of them alike.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmcache.v1.distributed.l2_adapters.mock_l2_adapter import MockL2Adapter, MockL2AdapterConfig

from offload.engines.lmcache import MaruL2Adapter
from tests.engines.lmcache.real.memory import Driver, keys_of, layout, memory_object
from tests.support.maru_processes import Server, temporary_pool

OBJECTS = 32
LARGE = 4 << 20
SMALL = 4 << 10
ROUNDS = 15
SINGLES = 2_000


@contextmanager
def adapters() -> Iterator[dict[str, Any]]:
    """What is measured, by name."""
    with temporary_pool() as pool, Server(pool, "--capacity-bytes", "1GiB") as server:
        made: dict[str, Any] = {"LMCache's mock": MockL2Adapter(MockL2AdapterConfig(1, 1e6))}
        for checksums in (False, True):
            said = "checksums on" if checksums else "checksums off"
            host = {"type": "memory", "capacity_bytes": "320MiB", "checksums": checksums}
            made[f"memory tier, {said}"] = MaruL2Adapter({"engine": {"tiers": {"host": host}}})
            made[f"page store, {said}"] = MaruL2Adapter(
                {"server_url": server.ipc, "pool_size_gb": 0.25, "checksums": checksums, "instance_id": said}
            )
        try:
            yield made
        finally:
            for adapter in made.values():
                adapter.close()


def timed(function: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def large(made: dict[str, Any]) -> None:
    """32 objects of 4 MiB."""
    sources = [memory_object(LARGE) for _ in range(OBJECTS)]
    places = [memory_object(LARGE) for _ in range(OBJECTS)]
    keys = {name: keys_of(OBJECTS, at * OBJECTS) for at, name in enumerate(made)}
    times: dict[tuple[str, str], list[float]] = {}

    def memmove() -> None:
        for place, source in zip(places, sources, strict=True):
            ctypes.memmove(place.data_ptr, source.data_ptr, LARGE)

    for warm in (False, *[True] * ROUNDS):
        measured = {("memmove", ""): timed(memmove)}
        for name, adapter in made.items():
            driver, mine = Driver(adapter), keys[name]
            measured[name, "store"] = timed(driver.store, mine, sources)
            assert driver.lookup(mine, {0: layout(LARGE)}) == [True] * OBJECTS
            measured[name, "load"] = timed(driver.load, mine, places)
            adapter.submit_unlock(mine)
            adapter.delete(mine)
        if warm:
            for what, seconds in measured.items():
                times.setdefault(what, []).append(seconds)
    base = statistics.median(times.pop(("memmove", "")))
    print(f"\n{OBJECTS} x {LARGE >> 20} MiB; memmove {OBJECTS * LARGE / base / 1e9:.1f} GB/s; shares of it:")
    for name in made:
        shares = [base / statistics.median(times[name, what]) for what in ("store", "load")]
        print(f"  {name:28} store {shares[0]:.2f}   load {shares[1]:.2f}")


def small(made: dict[str, Any]) -> None:
    """One object of 4 KiB at a time."""
    source, place = memory_object(SMALL), memory_object(SMALL)
    print(f"\none object of {SMALL >> 10} KiB, microseconds (median of {SINGLES}):")
    for name, adapter in made.items():
        driver = Driver(adapter)
        times: dict[str, list[float]] = {"store": [], "lookup": [], "load": []}
        for key in keys_of(SINGLES, 1 << 20):
            times["store"].append(timed(driver.store, [key], [source]))
            times["lookup"].append(timed(driver.lookup, [key], {0: layout(SMALL)}))
            times["load"].append(timed(driver.load, [key], [place]))
            adapter.submit_unlock([key])
        print(
            f"  {name:28} " + "   ".join(f"{what} {statistics.median(all_) * 1e6:.0f}" for what, all_ in times.items())
        )


def main() -> None:
    """Print both tables."""
    with adapters() as made:
        large(made)
    with adapters() as made:
        small(made)


if __name__ == "__main__":
    main()
