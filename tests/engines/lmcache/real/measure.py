"""What the adapter costs: store and load beside memmove in one run, and single small objects in microseconds.

    nox -s lmcache -- measure

A share is the time of memmove divided by that of the adapter, from submitting to the signal: 1.0 is as fast as copying. Medians
of rounds that take turns, so that a machine that is busy for a while slows all of them alike.

Everything is called in a thread of its own, as LMCache's controllers are: in the main thread, where signals strike, no store
is made at once. Beside single objects stands what no adapter can do without: the calls and the signal of LMCache's controllers
(an adapter that does nothing), the same with a message to an engine's thread between, and, for the page store, an echo of as
many bytes over a socket of its channel's kind.
"""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.l2_adapters.mock_l2_adapter import MockL2Adapter, MockL2AdapterConfig

from offload.engines.lmcache import MaruL2Adapter
from tests.engines.lmcache.real.memory import Driver, keys_of, layout, memory_object
from tests.support.maru_processes import Server, temporary_pool

OBJECTS = 32
LARGE = 4 << 20
SMALL = 4 << 10
ROUNDS = 15
SINGLES = 2_000


REQUEST = bytes(128)
"""About what a request for one page has."""
NOTHING = "an adapter that does nothing"
MESSAGE = "the same, by a message"
ECHO = "an echo of the channel"


class Nothing:
    """Answers at once, and does nothing: what is left is LMCache's own way of asking."""

    def __init__(self, call: Callable[[Callable[[], None]], None] = lambda function: function()) -> None:
        self._call = call
        self._fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
        self._results: dict[int, Any] = {}
        self.get_store_event_fd, self.get_lookup_and_lock_event_fd, self.get_load_event_fd = [
            lambda fd=fd: fd for fd in self._fds
        ]

    def _answer(self, fd: int, result: Any) -> int:
        self._results[fd] = result
        self._call(lambda: os.eventfd_write(fd, 1))
        return fd

    def submit_store_task(self, keys: Any, objects: Any) -> int:
        return self._answer(self._fds[0], True)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._results

    def submit_lookup_and_lock_task(self, keys: Any, layouts: Any) -> int:
        return self._answer(self._fds[1], Bitmap(len(keys)))

    def submit_load_task(self, keys: Any, objects: Any) -> int:
        return self._answer(self._fds[2], Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task: int) -> Any:
        return self._results[task]

    query_load_result = query_lookup_and_lock_result

    def submit_unlock(self, keys: Any) -> None:
        pass


@contextmanager
def echo() -> Iterator[Callable[[], object]]:
    """A process that sends packets back, and how to send it one and wait for it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import socket; s = socket.socket(fileno=0)\nwhile p := s.recv(4096): s.send(p)"
    with here, there, subprocess.Popen([sys.executable, "-c", code], stdin=there.fileno()):
        yield lambda: here.send(REQUEST) and here.recv(4096)
        here.shutdown(socket.SHUT_WR)


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
    with echo() as send_and_receive:
        memory = made["memory tier, checksums off"]
        Driver(memory).store(keys_of(1), [source])  # which opens its engine
        message = Nothing(memory._cache._lazy.opened.engine._worker.mailbox.call)
        for at, (name, adapter) in enumerate({NOTHING: Nothing(), MESSAGE: message, **made}.items()):
            driver = Driver(adapter)
            times: dict[str, list[float]] = {"store": [], "lookup": [], "load": [], ECHO: []}
            # Keys of its own: what is there already, in the store that two of them share, is not copied again.
            for key in keys_of(SINGLES, (1 << 20) + at * SINGLES):
                times["store"].append(timed(driver.store, [key], [source]))
                times["lookup"].append(timed(driver.lookup, [key], {0: layout(SMALL)}))
                times["load"].append(timed(driver.load, [key], [place]))
                adapter.submit_unlock([key])
                times[ECHO].append(timed(send_and_receive))
            medians = {what: statistics.median(all_) * 1e6 for what, all_ in times.items()}
            beside = medians.pop(ECHO)
            said = "   ".join(f"{what} {median:.0f}" for what, median in medians.items())
            if name.startswith("page store"):
                in_echoes = " / ".join(f"{median / beside:.1f}" for median in medians.values())
                said += f"   (in echoes of the channel, {beside:.0f} each: {in_echoes})"
            print(f"  {name:28} {said}")


def main() -> None:
    """Print both tables."""
    for table in (large, small):
        with adapters() as made, ThreadPoolExecutor(1) as controller:
            controller.submit(table, made).result()


if __name__ == "__main__":
    main()
