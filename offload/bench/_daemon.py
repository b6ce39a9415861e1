"""``offload bench daemon``: eight engine processes at one daemon, and an enqueue.

The processes are compared with memmove, the enqueue with an echo. Daemon and engines are processes of their own, the
daemon as ``offload serve`` runs it, over one memory tier that has room for a round. All engines begin at once, store
new blocks, and then load all of them, each with some requests under way, as engines have; a rate is that of all blocks
until the last engine is done. *In lockstep* each load ends before the next one is looked up. A store is checksummed by
the daemon, a load is verified. The memmove copies as many bytes on one thread, from and to memory that was written to
before and does not fit into a processor's cache.

On a machine that is busy otherwise, ten processes get more of its time than one that copies. So each rate has the
processor time of daemon and engines together, for a block, next to that of memmove.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from maru.base.scratch import scratch
from maru.bench.echo import PacketCaller, echo
from maru.bench.measure import Effort, Figures, Row, Samples, measure
from maru.bench.processes import BenchFailed, Child, processor_time

from ._daemon_client import CACHE_BYTES

CLIENTS: Final = 8
_KIB: Final = 1 << 10
_SIZES: Final = ((4, 125_000, 64, 3), (256, 256, 32, 9), (1024, 64, 16, 9))
"""Sizes and counts of the blocks of each case.

KiB of a block, blocks of a client, blocks of a request, most repeats. The blocks are those of a round: 1,000,000 of 4
KiB in all.
"""
_SPARE: Final = 1.25
"""Room in the tier for each byte of a round.

Each round deletes the blocks that it has stored.
"""
_OF_MEMMOVE: Final = "ratio >= 0.4"
_OF_ECHO: Final = "ratio <= 2"
_ENQUEUED_BYTES: Final = 128
"""Bytes of the echoed packets.

Each is as long as the frame of a store of one block.
"""
_MOVED: Final = 1 << 30
"""Most bytes of one measurement of memmove."""
_PATIENCE: Final = 600.0


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rates of eight clients and of one.

    The rates are by size of block; then follows the cost of one store.
    """
    for kib, blocks, each, repeat in _SIZES:
        yield from _rates(kib, effort.size(blocks, 4), effort.size(each, 2), effort.at_most(repeat))
    yield from _pages_at_once(effort)
    yield from _ways(effort)
    yield from _one_store(effort)


def _rates(kib: int, blocks: int, each: int, effort: Effort) -> Iterator[Row]:
    block_bytes = kib * _KIB
    round_bytes = CLIENTS * blocks * block_bytes
    lockstep = ("load_lockstep",) if kib > 4 else ()  # a million blocks would take a minute each time
    commands = ("store", "load", *lockstep, "delete")
    with (
        _daemon(block_bytes, int(_SPARE * round_bytes)) as daemon,
        _clients(daemon, CLIENTS, block_bytes, blocks, each) as clients,
    ):
        rounds = itertools.count()
        subjects: dict[str, Callable[[], Figures]] = {
            f"{n} clients": partial(_one_round, commands, daemon, clients[:n], rounds, blocks) for n in (CLIENTS, 1)
        }
        memmove = _memmove(min(round_bytes, _MOVED), block_bytes)
        samples = measure(f"daemon, {kib} KiB", effort, {**subjects, "memmove": memmove})
    for what, n in itertools.product(commands[:-1], (CLIENTS, 1)):
        goal = _OF_MEMMOVE if kib > 4 and n == CLIENTS and what != "load_lockstep" else None
        yield from _rows(kib, f"{what}.{n}", f"daemon.{kib}KiB.clients{n}.{what.replace('_', '.')}", goal, samples)


def _pages_at_once(effort: Effort) -> Iterator[Row]:
    """Yield the rates of eight clients that use shared pages.

    The clients write and read these pages of the daemon's page store themselves.
    """
    kib, blocks, each, repeat = _SIZES[1]
    blocks, each = effort.size(blocks, 4), effort.size(each, 2)
    block_bytes = kib * _KIB
    round_bytes = CLIENTS * blocks * block_bytes
    with (
        _daemon_with_pages(block_bytes, block_bytes, CLIENTS) as daemon,
        _clients(daemon, CLIENTS, block_bytes, blocks, each, "pages") as clients,
    ):
        subjects = {"pages": partial(_one_way, "pages", daemon, clients, itertools.count(), blocks)}
        memmove = _memmove(min(round_bytes, _MOVED), block_bytes)
        samples = measure(f"daemon, pages of {kib} KiB", effort.at_most(repeat), {**subjects, "memmove": memmove})
    for what in ("store", "load"):
        name = f"daemon.{kib}KiB.clients{CLIENTS}.pages.{what}"
        yield from _rows(kib, f"pages.{what}", name, _OF_MEMMOVE, samples)


def _ways(effort: Effort) -> Iterator[Row]:
    """Yield the cost of a block by each way to the daemon.

    The cost is that of one client, in processor time of both processes.
    """
    kib, blocks, each, repeat = _SIZES[1]
    blocks, each = effort.size(blocks, 4), effort.size(each, 2)
    block_bytes = kib * _KIB
    round_bytes = blocks * block_bytes
    with ExitStack() as stack:
        rounds = itertools.count()
        subjects: dict[str, Callable[[], Figures]] = {}
        for way in ("shared", "private", "pages"):
            opening = _daemon_with_pages if way == "pages" else _daemon
            daemon = stack.enter_context(opening(block_bytes, int(2 * _SPARE * round_bytes)))  # a session holds half
            clients = stack.enter_context(_clients(daemon, 1, block_bytes, blocks, each, way))
            subjects[way] = partial(_one_way, way, daemon, clients, rounds, blocks)
        memmove = _memmove(min(round_bytes, _MOVED), block_bytes)
        samples = measure(f"daemon, ways of {kib} KiB", effort.at_most(repeat), {**subjects, "memmove": memmove})
    for way, what in itertools.product(("shared", "private", "pages"), ("store", "load")):
        yield _processor_row(f"daemon.{kib}KiB.{way}.{what}", f"{way}.{what}", samples)


def _one_way(way: str, daemon: Child, clients: Sequence[Child], rounds: Iterator[int], blocks: int) -> Figures:
    """Store and load the blocks of a round.

    They are deleted, but for pages: there is room for those of some rounds.
    """
    number = next(rounds)
    return {
        f"{way}.{what}.{figure}": value
        for what in (("store", "load") if way == "pages" else ("store", "load", "delete"))
        for figure, value in _at_once(daemon, clients, f"{what} {number}", blocks).items()
    }


def _rows(kib: int, figure: str, name: str, goal: str | None, samples: Samples) -> Iterator[Row]:
    beside, rate = "memmove of the same bytes", f"{figure}.rate"
    yield samples.row(name, "GB/s", rate, beside, "memmove.rate", goal, scale=kib * _KIB / 1e9)
    if kib == 4:
        yield samples.row(f"{name}.blocks", "blocks/s", rate)
    yield _processor_row(name, figure, samples)


def _processor_row(name: str, figure: str, samples: Samples) -> Row:
    processor, limit = f"{figure}.processor", "memmove.processor"
    return samples.row(f"{name}.processor", "us/block", processor, "memmove of a block", limit, scale=1e6)


def _one_round(
    commands: Sequence[str], daemon: Child, clients: Sequence[Child], rounds: Iterator[int], blocks: int
) -> Figures:
    """Have all clients do these with a round's blocks, at once.

    Return the figures by command.
    """
    number = next(rounds)
    figures: dict[str, float] = {}
    for what in commands:
        for figure, value in _at_once(daemon, clients, f"{what} {number}", blocks).items():
            figures[f"{what}.{len(clients)}.{figure}"] = value
    return figures


def _at_once(daemon: Child, clients: Sequence[Child], command: str, blocks: int) -> Figures:
    """Have all clients do this at once.

    Return the blocks per second of all together, and the seconds of processor time for each block.
    """
    pids = [daemon.pid, *(client.pid for client in clients)]
    worked, begun = processor_time(*pids), time.perf_counter()
    for client in clients:
        client.say(command)
    done = sum(client.hear(_PATIENCE)["blocks"] for client in clients)
    seconds = time.perf_counter() - begun
    if done != len(clients) * blocks:
        raise BenchFailed(f"{command}: {done} blocks of {len(clients) * blocks}")
    return {"rate": done / seconds, "processor": (processor_time(*pids) - worked) / done}


def _memmove(nbytes: int, block_bytes: int) -> Callable[[], Figures]:
    """Return a function that copies this many bytes by blocks."""
    size = min(nbytes, CACHE_BYTES)
    memories = [mmap.mmap(-1, size) for _ in range(2)]
    for memory in memories:
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))
    source, into = ((ctypes.c_char * size).from_buffer(memory) for memory in memories)  # these keep their memory alive
    blocks = nbytes // block_bytes

    def copy() -> Figures:
        worked, begun = time.thread_time(), time.perf_counter()
        for number in range(blocks):
            at = number * block_bytes % size
            ctypes.memmove(ctypes.byref(into, at), ctypes.byref(source, at), block_bytes)
        seconds = time.perf_counter() - begun
        return {"memmove.rate": blocks / seconds, "memmove.processor": (time.thread_time() - worked) / blocks}

    return copy


def _one_store(effort: Effort) -> Iterator[Row]:
    times = effort.size(500, 20)
    with (
        _daemon(4 * _KIB, 64 << 20) as daemon,
        _clients(daemon, 1, 4 * _KIB, 1, 1) as (client,),
        echo() as echoing,
        PacketCaller(echoing.addresses["channel"]) as caller,
    ):
        packets = [bytes(_ENQUEUED_BYTES)] * times

        def store() -> Figures:
            client.say(f"enqueue {times}")
            told: Figures = client.hear(_PATIENCE)
            return told

        samples = measure("daemon, one store", effort, {"store": store, "echo": lambda: 1e6 / caller.lockstep(packets)})
    for figure, name, goal in (
        ("burst", "daemon.enqueue.burst.p50", _OF_ECHO),
        ("first", "daemon.enqueue.first.p50", _OF_ECHO),
        ("whole", "daemon.one-store.p50", None),
    ):
        yield samples.row(name, "us", figure, "an echo of packets", "echo", goal)


@contextmanager
def _daemon(block_bytes: int, capacity_bytes: int) -> Iterator[Child]:
    """Run a daemon as a child process, over one memory tier."""
    with scratch("offload-bench") as directory:
        with open(f"{directory}/daemon.toml", "w") as file:
            file.write(
                f'[daemon]\nblock_bytes = {block_bytes}\nlog_level = "error"\n'
                f'[engine.tiers.host]\ntype = "memory"\ncapacity_bytes = {capacity_bytes // block_bytes * block_bytes}\n'
            )
        command = ["-m", "offload", "serve", f"{directory}/daemon.toml", "--runtime-dir", f"{directory}/run"]
        with Child(command, said=_url) as daemon:
            yield daemon


@contextmanager
def _daemon_with_pages(block_bytes: int, capacity_bytes: int, clients: int = 1) -> Iterator[Child]:
    """Run a daemon without a configuration file, with a page store.

    It has room for the regions of these clients.
    """
    with scratch("offload-bench") as directory:
        command = ["-m", "offload", "serve", "--runtime-dir", f"{directory}/run", "--log-level", "error"]
        command += ["--block-bytes", str(block_bytes), "--host-bytes", str(capacity_bytes // block_bytes * block_bytes)]
        command += ["--maru-pool-size-gb", "0.01", "--engine-pool-size-gb", str(clients / 2)]
        with Child(command, said=_url) as daemon:
            yield daemon


def _url(line: bytes) -> str:
    """Return the address of a daemon, from its ready line."""
    return line.decode().partition(" at ")[2].partition(" ")[0]


@contextmanager
def _clients(
    daemon: Child, n: int, block_bytes: int, blocks: int, each: int, way: str = "shared"
) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Child(
                    [
                        *("-m", "offload.bench._daemon_client", daemon.ready, f"c{number}", way),
                        *map(str, (block_bytes, blocks, each)),
                    ]
                )
            )
            for number in range(n)
        ]
