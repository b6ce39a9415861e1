"""The hammer: pages that are rewritten as fast as it goes, and readers in other processes that load them over the shared index.

One process is the server and the owner of all pages: it removes a name, writes into its page for another name, and lets that be
found. Every page says whose registration it is, all over. A reader looks names up, copies their pages, looks again, and then
compares what counts with what the index said. It counts copies, those that had changed meanwhile, and those that were wrong. In
some turns it holds the pages by its board, and looks at them for longer: what is held must not change, and the writer, which
claims each page before it writes there, takes another one.

    python -m tests.support.index_hammer --rewrites 10000000 --readers 2 [--fault no_check] [--idle SECONDS]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from maru._client.operations.board_pins import BoardCounters, BoardPins
from maru._index import (
    BOARD_BYTES,
    Boards,
    BoardWriter,
    Entries,
    Found,
    IndexReader,
    IndexWriter,
    bytes_for,
    header_of_board,
)

FAULTS: Final = ("no_check", "publish_first", "tell_first", "torn")
HOLDING_FAULTS: Final = ("scan_first", "no_second_look", "let_go_early")
HERE: Final = Path(__file__).parents[2]
PAGE: Final = 16 << 10
PAGES: Final = 24
NAMES: Final = [f"name {number}" for number in range(PAGES + 8)]
AT_ONCE: Final = 4
"""Names that a reader looks up together."""
STOP, STARTED, REWRITES, SPARED = 0, 1, 2, 3
"""Words of the control file; behind them the journal: the last generation of each name."""
JOURNAL: Final = 4
PATIENCE: Final = 60.0
LOOKS: Final = 3
"""Times that a page is looked at while it is held."""


class TornWriter(IndexWriter):
    """Writes a sequence byte by byte, and may be interrupted between two of them."""

    def _set_sequence(self, slot: int, sequence: int) -> None:
        at = 8 * self._word_of(slot)
        for byte in reversed(range(8)):
            self._memory[at + byte] = sequence >> 8 * byte & 0xFF
            if byte == 1:
                os.sched_yield()


def stamp(name: int, generation: int) -> bytes:
    return (generation << 10 | name).to_bytes(8, "little")


def rewrite(path: Path, rewrites: int, readers: int, fault: str, idle: float) -> None:
    """The server and the owner."""
    index, pages, control = (open_memory(path / name, write=True) for name in ("index", "pages", "control"))
    words = memoryview(control).cast("Q")
    writer = (TornWriter if fault == "torn" else IndexWriter)(index, 1, 99)
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    boards = Boards(writer, fence)  # type: ignore[arg-type]  # it marks, and that is all that is asked of it here
    for number in range(1, readers + 1):
        boards.open(number, "", open_memory(path / f"board{number}"))
    rng = random.Random(5)
    absent = list(range(len(NAMES)))
    there: list[tuple[int, int]] = []  # name and generation, by page

    def store(page: int, name: int) -> None:
        if fault != "publish_first":
            words[JOURNAL + name] = generation
        writer.add(Entries([NAMES[name]], 0, [page * PAGE], PAGE, None, [generation]))
        if fault == "publish_first":
            words[JOURNAL + name] = generation

    def write(page: int, name: int) -> None:
        pages[page * PAGE : (page + 1) * PAGE] = stamp(name, generation) * (PAGE // 8)

    for page, generation in zip(range(PAGES), range(1, PAGES + 1), strict=True):
        name = absent.pop()
        write(page, name)
        store(page, name)
        there.append((name, generation))

    def is_claimed(name: int, generation: int) -> bool:
        """Whether this may be removed: marked, and on no board."""
        if fault != "scan_first":
            return not boards.claim([NAMES[name]], [generation])
        held = boards.held()
        os.sched_yield()
        if generation not in held:
            writer.mark([NAMES[name]], [generation])
        return generation not in held

    words[STARTED] = 1
    if idle:
        time.sleep(idle)
        rewrites = 0
    for done in range(1, rewrites + 1):
        page = int(rng.random() * PAGES)
        at = int(rng.random() * len(absent))
        gone, before = there[page]
        if not is_claimed(gone, before):
            words[SPARED] += 1
            continue
        name, absent[at] = absent[at], gone
        generation = done + PAGES
        if fault == "torn":  # what comes differs from what goes in its last byte only, every other time
            generation = generation << 8 if before & 1 else before | 1
        if fault == "tell_first":
            write(page, name)
        writer.remove([NAMES[gone]], [before])
        if fault != "tell_first":
            write(page, name)
        store(page, name)
        there[page] = name, generation
        if not done & 255:
            words[REWRITES] = done
            if words[STOP]:
                break
    words[STOP] = 1


def read(path: Path, seed: int, fault: str) -> None:
    """A reader: prints what it has counted."""
    index, pages, control = (
        open_memory(path / name, write=name == "control") for name in ("index", "pages", "control")
    )
    words = memoryview(control).cast("Q")
    wait(lambda: words[STARTED])
    reader = IndexReader(index)
    rng = random.Random(seed)
    pins = BoardPins(BoardWriter(open_memory(path / f"board{seed}", write=True)), threading.Lock(), 0, BoardCounters())
    copies = changes = wrong = misses = held = turns = 0
    began = time.process_time()
    while not words[STOP]:
        turns += 1
        positions = rng.sample(range(len(NAMES)), AT_ONCE)
        found = reader.find([NAMES[position] for position in positions])
        if (not turns & 15 or fault in HOLDING_FAULTS) and fault in ("", *HOLDING_FAULTS):
            looked, bad = look_under_hold(pins, reader, found, positions, pages, fault)
            held += looked
            wrong += bad
            if bad and fault:
                words[STOP] = 1
            continue
        misses += AT_ONCE - len(found)
        arrived = [pages[offset : offset + length] for offset, length in zip(found.offsets, found.lengths, strict=True)]
        changed = () if fault == "no_check" else reader.changed(found)
        copies += len(found)
        changes += len(changed)
        for at, page in enumerate(arrived):
            if at in changed:
                continue
            name, generation = positions[found.positions[at]], found.generations[at]
            if page != stamp(name, generation) * (PAGE // 8) or words[JOURNAL + name] < generation:
                wrong += 1
                if fault:
                    words[STOP] = 1
    spent = time.process_time() - began
    figures = {"copies": copies, "changed": changes, "held": held, "wrong": wrong, "misses": misses}
    print(json.dumps({**figures, "turns": turns, "us_per_turn": spent / max(turns, 1) * 1e6}))


class Believing:
    """Says that nothing has changed."""

    def changed(self, found: Found, *, marked: bool) -> tuple[int, ...]:
        return ()


def look_under_hold(
    pins: BoardPins, reader: IndexReader, found: Found, positions: list[int], pages: mmap.mmap, fault: str
) -> tuple[int, int]:
    """Hold what was found and look at it for a while: how many pages were looked at, and how many showed something else."""
    names = [NAMES[position] for position in positions]
    looking: Any = Believing() if fault == "no_second_look" else reader
    held = [
        (at, pin) for at, pin in zip(found.positions, pins.hold(names, found, looking), strict=True) if pin is not None
    ]
    if fault == "let_go_early":
        pins.release([pin for _, pin in held])
    bad = 0
    for _ in range(LOOKS):
        for at, pin in held:
            page = pages[pin.offset : pin.offset + pin.length]
            bad += page != stamp(positions[at], pin.generation) * (PAGE // 8)
        os.sched_yield()
    if fault != "let_go_early":
        pins.release([pin for _, pin in held])
    return LOOKS * len(held), bad


def open_memory(path: Path, *, write: bool = False) -> mmap.mmap:
    wait(path.exists)
    with open(path, "r+b" if write else "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)


def wait(until) -> None:
    ends = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.001)


def hammer(rewrites: int, readers: int = 1, fault: str = "", idle: float = 0.0) -> dict[str, float]:
    """Run it in processes of its own: how many pages were rewritten, and what all readers have counted together."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as text:
        path = Path(text)
        for name, size in (("index", bytes_for(64)), ("pages", PAGES * PAGE), ("control", 4096)):
            with open(path / name, "wb") as file:
                file.truncate(size)
        for number in range(1, readers + 1):
            (path / f"board{number}").write_bytes(header_of_board().ljust(BOARD_BYTES, b"\0"))
        began = time.monotonic()
        common = [sys.executable, "-m", "tests.support.index_hammer", "--path", text, "--fault", fault]
        writing = subprocess.Popen(
            [*common, "--rewrites", str(rewrites), "--readers", str(readers), "--idle", str(idle)], cwd=HERE
        )
        reading = [
            subprocess.Popen([*common, "--reader", str(seed)], cwd=HERE, stdout=subprocess.PIPE, text=True)
            for seed in range(1, readers + 1)
        ]
        total: dict[str, float] = {}
        for one in reading:
            out, _ = one.communicate()
            assert one.returncode == 0
            for name, count in json.loads(out).items():
                total[name] = total.get(name, 0) + count
        assert writing.wait(PATIENCE) == 0
        with open(path / "control", "rb") as file:
            counts = memoryview(file.read(8 * JOURNAL)).cast("Q")
        total["us_per_turn"] = round(total["us_per_turn"] / readers, 2)
        return {
            "rewrites": counts[REWRITES], "spared": counts[SPARED], "seconds": round(time.monotonic() - began, 1), **total
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rewrites", type=int, default=1_000_000)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--fault", default="", choices=("", *FAULTS, *HOLDING_FAULTS))
    parser.add_argument("--idle", type=float, default=0.0, help="rewrite nothing, for so many seconds")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--reader", type=int)
    asked = parser.parse_args()
    if asked.path is None:
        print(json.dumps(hammer(asked.rewrites, asked.readers, asked.fault, asked.idle)))
    elif asked.reader is None:
        rewrite(asked.path, asked.rewrites, asked.readers, asked.fault, asked.idle)
    else:
        read(asked.path, asked.reader, asked.fault)


if __name__ == "__main__":
    main()
