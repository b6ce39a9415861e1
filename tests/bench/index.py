"""``python -m tests.bench index``: the cost of lookups in shared memory, and of its upkeep; beside a message, and a dict.

A request of an engine names 28 blocks. What a client does is measured with a server of the bench's own, by the blocking
handler, whose calls with ``index = "off"`` stand beside it; what the index itself does, in this process, with 100,000 keys in
it, beside the same for a dict. Times of a client are elapsed, those of the index processor time. So are those of readers in
processes of their own, alone and four beside a writer, and what the server spends for the lookups of four.
"""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from time import process_time
from typing import Final

from maru import MaruConfig
from maru._client.operations import BoardCounters, BoardPins
from maru._index import (
    BOARD_BYTES,
    Boards,
    BoardWriter,
    Entries,
    IndexReader,
    IndexWriter,
    bytes_for,
    header_of_board,
)
from maru.bench._keys import keys_of
from maru.bench.measure import Effort, Figures, Row, measure, seconds_of
from maru.bench.processes import BenchFailed, Child, processor_time, server
from maru.blocking import MaruHandler

AT_ONCE: Final = 28
"""Keys of one lookup: a request of the conversation trace, with 16 tokens a block."""
_BLOCK_BYTES: Final = 64 << 10
_CLIENTS: Final = 8
"""That hold 28 blocks each while the server wants to remove as many others."""
_READERS: Final = 4
_PAGE_BYTES: Final = 4 << 10
_MILLION: Final = 1_000_000
_PATIENCE: Final = 30.0


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of a client, then those of the index itself."""
    yield from _client(effort)
    yield from _readers(effort.at_most(3))
    yield from _inside(effort)
    yield Row(
        "index.bytes-per-key",
        bytes_for(_MILLION) / _MILLION,
        "bytes",
        "a hash and an entry",
        80.0,
        "value <= 96",
    )


def _client(effort: Effort) -> Iterator[Row]:
    calls = effort.size(500, 5)
    keys, missing = keys_of(AT_ONCE), keys_of(AT_ONCE, "missing")
    buffers = [bytearray(_BLOCK_BYTES) for _ in keys]
    with server(256 << 20) as ours:
        config = MaruConfig(server_url=ours.addresses["ipc"], pool_size=64 << 20, chunk_size_bytes=_BLOCK_BYTES)
        with MaruHandler(config) as over_index, MaruHandler(config, pool_size=0, index="off") as by_message:
            over_index.batch_put(keys, buffers)
            _wait_filled(over_index, missing)
            faces = {"index": over_index, "message": by_message}
            for handler in faces.values():
                handler.batch_get_into(keys, buffers)  # maps the region
            for what, goal, call in (
                ("lookup28.there", "value <= 100", lambda one: one.batch_exists(keys)),
                ("lookup28.missing", None, lambda one: one.batch_exists(missing)),
                ("hold28", None, lambda one: _hold(one, keys)),
                ("load28.64KiB", None, lambda one: one.batch_get_into(keys, buffers)),
            ):
                name = f"index.{what}"
                subjects = {face: partial(seconds_of, partial(call, one), calls) for face, one in faces.items()}
                samples = measure(name, effort, subjects)
                yield samples.row(name, "us", "index", "by message", "message", goal, scale=1e6)


def _hold(handler: MaruHandler, keys: list[str]) -> None:
    """Hold what is stored there, and let go of it."""
    for info in handler.batch_retrieve(keys):
        assert info is not None
        info.release()


def _readers(effort: Effort) -> Iterator[Row]:
    """Whether readers are slowed by one another and a writer, and what their lookups cost the server."""
    seconds = effort.size(3, 0) or 0.2
    keys = keys_of(AT_ONCE)
    with server(256 << 20) as ours:
        address = ours.addresses["ipc"]
        config = MaruConfig(server_url=address, pool_size=4 << 20, chunk_size_bytes=_PAGE_BYTES)
        with MaruHandler(config) as owner, MaruHandler(config, pool_size=1 << 20) as writer:
            owner.batch_put(keys, [bytes(_PAGE_BYTES)] * AT_ONCE)
            _wait_filled(owner, keys_of(AT_ONCE, "missing"))
            written = count()

            def write() -> None:
                some = [f"{next(written)} written" for _ in range(AT_ONCE)]
                writer.batch_put(some, [bytes(_PAGE_BYTES)] * AT_ONCE)

            def idle() -> None:
                time.sleep(0.05)

            def read(readers: int, meanwhile: Callable[[], None]) -> Callable[[], dict[str, float]]:
                name = "alone" if readers == 1 else "written" if meanwhile is write else "still"
                return lambda: _read(address, readers, seconds, meanwhile, ours.pid, name)

            samples = measure(
                "index.readers",
                effort,
                {"alone": read(1, idle), "written": read(_READERS, write), "still": read(_READERS, idle)},
                warm_up=False,
            )
    yield samples.row("index.readers4.lookup28", "us", "written", "a reader alone", "alone", "ratio <= 1.2")
    # With the costs of their start: they connect, and map its memory.
    yield samples.row("index.readers4.server", "us", "still.server", "a lookup", "still")


def _read(
    address: str, readers: int, seconds: float, meanwhile: Callable[[], None], server_pid: int, name: str
) -> dict[str, float]:
    """Processor time of a lookup in so many readers at once, and of the server for each of them, in microseconds."""
    arguments = (str(Path(__file__).with_name("reader.py")), address, str(AT_ONCE), str(seconds))
    before = processor_time(server_pid)
    with ThreadPoolExecutor(readers) as threads:
        children = [threads.submit(Child, arguments) for _ in range(readers)]
        while not all([child.done() for child in children]):
            meanwhile()
    spent = processor_time(server_pid) - before
    said = [child.result().ready for child in children]
    for child in children:
        child.result().stop()
    lookups = sum([one["lookups"] for one in said])
    if asked := sum([one["asked"] for one in said]):
        raise BenchFailed(f"{asked} of {lookups} lookups were asked for by message: the index has changed meanwhile")
    return {name: statistics.median([one["us"] for one in said]), f"{name}.server": spent / lookups * 1e6}


def _inside(effort: Effort) -> Iterator[Row]:
    n = effort.size(100_000, 1_000)
    calls = effort.size(500, 5)
    names = keys_of(n)
    memory = mmap.mmap(-1, bytes_for(2 * n))
    writer, reader = IndexWriter(memory, 1, 1), IndexReader(memory)
    writer.add(Entries(names, 1, range(n), 1, [7] * n, range(1, n + 1)))
    some = names[:: n // AT_ONCE][:AT_ONCE]
    found = reader.find(some)
    new = keys_of(256, "new")
    generations = range(n + 1, n + 257)
    there = dict.fromkeys(names)

    def add() -> None:
        writer.add(Entries(new, 1, range(256), 1, [7] * 256, generations))

    def add_to_dict() -> None:
        for name in new:
            there[name] = None

    def remove_from_dict() -> None:
        for name in new:
            del there[name]

    def in_both(add: Callable[[], object], remove: Callable[[], object], names: str) -> Callable[[], Figures]:
        return lambda: {
            names.format("add"): seconds_of(add, 1, process_time) / len(new),
            names.format("remove"): seconds_of(remove, 1, process_time) / len(new),
        }

    boards = Boards(writer, _fence)  # type: ignore[arg-type]  # it marks, and that is all that is asked of it here
    for number in range(_CLIENTS):
        board = mmap.mmap(-1, BOARD_BYTES)
        board[: len(header_of_board())] = header_of_board()
        boards.open(number, "", board)
        pins = BoardPins(BoardWriter(board), threading.Lock(), 0, BoardCounters())
        pins.hold(names[1 :: n // AT_ONCE][:AT_ONCE], reader.find(names[1 :: n // AT_ONCE][:AT_ONCE]), reader)

    def hold() -> None:
        pins.release([pin for pin in pins.hold(some, reader.find(some), reader) if pin is not None])

    def claim() -> None:
        boards.claim(some, found.generations)
        boards.give_up(some, found.generations)

    calls_of: dict[str, Callable[[], object]] = {
        "find28": lambda: reader.find(some),
        "recheck28": lambda: reader.changed(found),
        "board.hold28": hold,
        "board.claim28": claim,
    }
    subjects: dict[str, Callable[[], Figures | float]] = {}
    for name, call in calls_of.items():
        subjects[name] = partial(seconds_of, call, calls, process_time)
        subjects[f"dict {name}"] = partial(seconds_of, lambda: [there.get(name) for name in some], calls, process_time)
    subjects["both"] = in_both(add, lambda: writer.remove(new, generations), "{}")
    subjects["dict"] = in_both(add_to_dict, remove_from_dict, "dict {}")
    samples = measure("index", effort, subjects)
    for name in (*calls_of, "add", "remove"):
        goal = "value <= 50" if name == "find28" else None
        yield samples.row(f"index.{name}", "us", name, "a dict", f"dict {name}", goal, scale=1e6)


def _wait_filled(handler: MaruHandler, missing: list[str]) -> None:
    """Until a miss is one without a message."""
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends:
        before = handler.statistics().counters.asked_anyway
        handler.batch_exists(missing)
        if handler.statistics().counters.asked_anyway == before:
            return
        time.sleep(0.01)
    raise BenchFailed(f"the index is not used: {handler.statistics().why_no_index or 'it is never filled'}")


_lock = threading.Lock()


def _fence() -> None:
    with _lock:
        pass
