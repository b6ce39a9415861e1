"""The hammer: pages that are rewritten as fast as it goes, and readers in other processes that load them over the shared index.

One process is the server and the owner of all pages: it removes a name, writes into its page for another name, and lets that be
found. Every page says whose registration it is, all over. A reader looks names up, copies their pages, looks again, and then
compares what counts with what the index said. It counts copies, those that had changed meanwhile, and those that were wrong.

    python -m tests.support.index_hammer --rewrites 10000000 --readers 2 [--fault no_check]
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
import time
from pathlib import Path
from typing import Final

from maru._index import Entries, IndexReader, IndexWriter, bytes_for

FAULTS: Final = ("no_check", "publish_first", "tell_first", "torn")
HERE: Final = Path(__file__).parents[2]
PAGE: Final = 16 << 10
PAGES: Final = 24
NAMES: Final = [f"name {number}" for number in range(PAGES + 8)]
AT_ONCE: Final = 4
"""Names that a reader looks up together."""
STOP, STARTED, REWRITES = 0, 1, 2
"""Words of the control file; behind them the journal: the last generation of each name."""
JOURNAL: Final = 3
PATIENCE: Final = 60.0


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


def rewrite(path: Path, rewrites: int, fault: str) -> None:
    """The server and the owner."""
    index, pages, control = (open_memory(path / name, write=True) for name in ("index", "pages", "control"))
    words = memoryview(control).cast("Q")
    writer = (TornWriter if fault == "torn" else IndexWriter)(index, 1, 99)
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
    words[STARTED] = 1
    for done in range(1, rewrites + 1):
        page = int(rng.random() * PAGES)
        at = int(rng.random() * len(absent))
        gone, before = there[page]
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
    copies = changes = wrong = misses = 0
    while not words[STOP]:
        positions = rng.sample(range(len(NAMES)), AT_ONCE)
        found = reader.find([NAMES[position] for position in positions])
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
    print(json.dumps({"copies": copies, "changed": changes, "wrong": wrong, "misses": misses}))


def open_memory(path: Path, *, write: bool = False) -> mmap.mmap:
    wait(path.exists)
    with open(path, "r+b" if write else "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)


def wait(until) -> None:
    ends = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.001)


def hammer(rewrites: int, readers: int = 1, fault: str = "") -> dict[str, float]:
    """Run it in processes of its own: how many pages were rewritten, and what all readers have counted together."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as text:
        path = Path(text)
        for name, size in (("index", bytes_for(64)), ("pages", PAGES * PAGE), ("control", 4096)):
            with open(path / name, "wb") as file:
                file.truncate(size)
        began = time.monotonic()
        common = [sys.executable, "-m", "tests.support.index_hammer", "--path", text, "--fault", fault]
        writing = subprocess.Popen([*common, "--rewrites", str(rewrites)], cwd=HERE)
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
            done = int.from_bytes(file.read(8 * (REWRITES + 1))[8 * REWRITES :], sys.byteorder)
        return {"rewrites": done, "seconds": round(time.monotonic() - began, 1), **total}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rewrites", type=int, default=1_000_000)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--fault", default="", choices=("", *FAULTS))
    parser.add_argument("--path", type=Path)
    parser.add_argument("--reader", type=int)
    asked = parser.parse_args()
    if asked.path is None:
        print(json.dumps(hammer(asked.rewrites, asked.readers, asked.fault)))
    elif asked.reader is None:
        rewrite(asked.path, asked.rewrites, asked.fault)
    else:
        read(asked.path, asked.reader, asked.fault)


if __name__ == "__main__":
    main()
