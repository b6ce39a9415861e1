"""A walk over the pin boards: a reader that holds a page, and a server and an owner that want it, in every order of their
steps.

The reader is the real one: its search, its board and its second look run over memory that stops at every load and every store.
Another reader has the server pin the page by a message, and a third one does that where its board cannot hold it. At each stop
the server and the owner make no step, one, or more of theirs: all numbers are tried. The server's steps are calls of the real
boards and the real writer, one for each store that a reader can see, and one for its look at the boards. (That look loads
several words. Seen from a reader it is one: what was written before its first load is seen by it, and what is written later may
be.) A message is answered between two requests of the server, however much a reader sees of one that is at work.

Stores are seen in the order in which they are made, by everybody: this is what a processor gives that makes a full fence where
the rules of `maru._index.board` ask for one. That a fence is missing cannot be expressed here.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, Final

import attrs

from maru._client.operations.board_pins import BoardCounters, BoardPins
from maru._client.operations.pinned import Pin
from maru._index import (
    BOARD_BYTES,
    MIN_BYTES,
    Boards,
    BoardWriter,
    Entries,
    IndexReader,
    IndexWriter,
    TenantIndexes,
    header_of_board,
)

NAME: Final = "a"
GENERATION: Final = 7
PAGE_WORDS: Final = 2
HOLDER: Final = 1


@attrs.frozen
class Faults:
    """What is wrong, on purpose."""

    scan_first: bool = False
    """The server looks at the boards before it marks."""
    no_mark: bool = False
    """The server does not mark: it looks, and removes."""
    no_second_look: bool = False
    """The reader believes that it holds what it has put on its board."""
    look_first: bool = False
    """The reader looks again before it puts on its board what it wants to hold."""
    closed_early: bool = False
    """The server does not count the board of a session whose lease lives."""
    no_lease: bool = False
    """The reader does not look whether its lease is over."""
    let_go_early: bool = False
    """The reader lets go before its last load."""
    answers_within: bool = False
    """The server answers a message in the middle of a removal."""
    no_pins: bool = False
    """The server removes what is pinned by a message."""


class Host:
    """A server with one name in its index, the owner of its page, and the reader's board."""

    def __init__(self, faults: Faults, *, lease_ends: bool) -> None:
        self.faults = faults
        self.index = mmap.mmap(-1, MIN_BYTES)
        self.board = mmap.mmap(-1, BOARD_BYTES)
        self.board[: len(header_of_board())] = header_of_board()
        self.page = [GENERATION] * PAGE_WORDS
        self.lease_is_over = False
        self.indexes = TenantIndexes()
        self.indexes.open("", self.index, 1, 1)
        self.indexes.end_filling("")
        self.writer: IndexWriter = self.indexes._writers[""]
        self.writer.add(Entries([NAME], 0, [0], 1, None, [GENERATION]))
        self.boards = Boards(self.indexes, lambda: None)
        self.boards.open(HOLDER, "", self.board)
        self.is_removed = False
        self.is_pinned = False
        """By a message."""
        self._is_at_work = False
        self._steps = self._play(lease_ends)

    def step(self) -> bool:
        """One step of the server's or the owner's; False if there is none left."""
        return next(self._steps, None) is not None

    def find(self) -> bool:
        """Answer a FIND that pins: whether the name is there. What the server has begun it does first."""
        while self._is_at_work and not self.faults.answers_within:
            self.step()
        self.is_pinned = not self.is_removed
        return self.is_pinned

    def unpin(self) -> None:
        """Answer an UNPIN."""
        self.is_pinned = False

    def _play(self, lease_ends: bool) -> Iterator[bool]:
        """Wants the page twice; the second time the lease of the reader is over, or it may have let go."""
        yield from self._claim()
        if self.is_removed:
            return
        if lease_ends:
            self.lease_is_over = True
            yield True
            self.boards.close(HOLDER)
            self.is_pinned = False
        yield from self._claim()

    def _claim(self) -> Iterator[bool]:
        faults = self.faults
        if self.is_pinned and not faults.no_pins:
            return
        held: set[int] = set()
        self._is_at_work = True
        if faults.scan_first:
            held = self.boards.held()
            yield True
        if not faults.no_mark:
            self.indexes.mark([NAME], [GENERATION])
            yield True
        if not faults.scan_first:
            held = set() if faults.closed_early else self.boards.held()
            yield True
        if GENERATION in held:
            self.indexes.unmark([NAME], [GENERATION])
            self._is_at_work = False
            yield True
            return
        self.is_removed = True
        sequence = self.writer._word_of(self._slot())
        self.writer._words[sequence] = 0
        yield True
        self.writer.remove([NAME], [0])
        self._is_at_work = False
        yield True
        for word in range(PAGE_WORDS):  # the owner was told, and writes
            self.page[word] = 99
            yield True

    def _slot(self) -> int:
        return next(slot for slot, name in enumerate(self.writer._names) if name == NAME)


class Stops:
    """Where the other side may go on: so many steps at each stop, as a script says."""

    def __init__(self, host: Host, script: list[int]) -> None:
        self.host = host
        self.script = script
        self.turn = 0
        self.had_no_more = -1
        """The stop at which there were fewer steps left than the script says."""

    def __call__(self) -> None:
        if self.turn == len(self.script):
            self.script.append(0)
        for _ in range(self.script[self.turn]):
            if not self.host.step():
                self.had_no_more = self.turn
                break
        self.turn += 1


class StoppingWords:
    def __init__(self, words: Any, stop: Callable[[], None]) -> None:
        self.words = words
        self.stop = stop

    def __getitem__(self, at: Any) -> Any:
        self.stop()
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.stop()
        self.words[at] = value


class StoppingMemory:
    def __init__(self, memory: mmap.mmap, stop: Callable[[], None]) -> None:
        self.memory = memory
        self.stop = stop

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, at: Any) -> bytes:
        self.stop()
        return self.memory[at]

    def find(self, sub: bytes, start: int, end: int) -> int:
        self.stop()
        return self.memory.find(sub, start, end)


def read(host: Host, stop: Callable[[], None], way: str) -> str:
    """Hold the page and look at it for a while. What is wrong; empty if nothing is."""
    pins, held = (None, []) if way == "message" else _hold(host, stop)
    if not held:
        if way == "board":
            return ""
        stop()
        if not host.find():
            return ""
    faults = host.faults
    if faults.let_go_early:
        _release(host, pins, held)
    for _ in range(1 if way == "message" else 2):
        words = []
        for word in range(PAGE_WORDS):
            stop()
            words.append(host.page[word])
        stop()
        if host.lease_is_over and not faults.no_lease:
            return ""
        if words != [GENERATION] * PAGE_WORDS:
            return f"{words} was seen under a hold"
    if not faults.let_go_early:
        _release(host, pins, held)
    while host.step():
        pass
    stays = not host.is_removed and host.boards.claim([NAME], [GENERATION])
    return "what was let go of stays for ever" if stays else ""


def _release(host: Host, pins: BoardPins | None, held: list[Pin]) -> None:
    if pins is not None and held:
        pins.release(held)
    else:
        host.unpin()


def _hold(host: Host, stop: Callable[[], None]) -> tuple[BoardPins, list[Pin]]:
    """Hold the page by the board, if that can be."""
    faults = host.faults
    reader = IndexReader(host.index)
    memory, words = StoppingMemory(host.index, stop), StoppingWords(reader._words, stop)
    reader._memory, reader._words = memory, words  # type: ignore[assignment]
    board = BoardWriter(host.board)
    board._words = StoppingWords(board._words, stop)  # type: ignore[assignment]
    board.note_used = lambda places, generations: None  # type: ignore[method-assign]  # no word of it holds anything
    pins = BoardPins(board, nullcontext(), 0, BoardCounters())
    found = reader.find([NAME])
    looking: Any = reader
    if faults.no_second_look or faults.look_first:

        class Believing:
            seen = reader.changed(found, marked=True) if faults.look_first else ()

            def changed(self, found: object, *, marked: bool) -> Any:
                return self.seen

        looking = Believing()
    return pins, [pin for pin in pins.hold([NAME], found, looking) if pin is not None]


def walk(faults: Faults, way: str, *, lease_ends: bool) -> Iterator[str]:
    """Every order of both sides' steps; what was wrong in each."""
    script: list[int] = []
    while True:
        host = Host(faults, lease_ends=lease_ends)
        stop = Stops(host, script)
        wrong = read(host, stop, way)
        if stop.had_no_more < 0:
            yield wrong
            del script[stop.turn :]
        else:  # the same order as the one before: go on at the stop before this one
            del script[stop.had_no_more :]
        if not script:
            return
        script[-1] += 1


def first_wrong(faults: Faults, ways: Sequence[str] = ("message", "board")) -> tuple[str, int]:
    """What is wrong first, and in how many orders it was looked for; the third way is ``both``."""
    orders = 0
    for way, lease_ends in product(ways, (False, True)):
        for wrong in walk(faults, way, lease_ends=lease_ends):
            orders += 1
            if wrong:
                return wrong, orders
    return "", orders
