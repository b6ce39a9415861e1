"""Pins on a client's board, taken without messages in any thread. Pure.

Rule 1. Everything here happens under one lock, and nothing that waits or lets another thread run does. To release that
        lock is a full fence on x86: writes under it are seen by others before loads after it.
Rule 2. Held pages are checked again after the fence, also if another thread has put them on the board.
Rule 3. A board belongs to an *era* (see `pinned`). When that ends, nothing is held by it any more, and its pins are
        taken again by message: :meth:`BoardPins.end` hands them over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat

import attrs

from ..._index import BoardWriter, Found, IndexReader
from .pinned import Pin


@attrs.define
class BoardCounters:
    """Counts of events of a client's boards, in all."""

    held: int = 0
    """Keys that were held without a message."""
    changed: int = 0
    """Keys that went, or were about to, before the second check.

    That is the one after the fence. They were found before it, and are then requested by message.
    """
    full: int = 0
    """Keys for which there was no cell: pinned by message."""


class BoardPins:
    """The pins on one board.

    Args:
        board: written by no other object.
        lock: a plain one.
        era: of the client, to which the board belongs.
        counters: are added to.
    """

    def __init__(
        self, board: BoardWriter, lock: AbstractContextManager[object], era: int, counters: BoardCounters
    ) -> None:
        self._board: BoardWriter | None = board
        self._lock = lock
        self._pins: dict[str, Pin] = {}
        self._counters = counters
        self.era = era

    def __len__(self) -> int:
        return len(self._pins)

    def hold(self, names: Sequence[str], found: Found, reader: IndexReader) -> list[Pin | None]:
        """Hold found pages, with one more user of each pin. Any thread.

        Args:
            names: of the lookup.
            found: their places.
            reader: of the lookup, to check again.

        Returns:
            A pin for each found page; ``None`` if it went, or has no cell.
        """
        n, era, known = len(found), self.era, self._pins
        looked = names if n == len(names) else [names[position] for position in found.positions]
        columns = (looked, found.regions, found.offsets, found.lengths, found.generations, found.checksums)
        pins: list[Pin | None] = []
        with self._lock:
            if self._board is None:
                return [None] * n
            # Mostly no page is held already. Then all pins are made by one call in C: half the time of the loop.
            fresh: list[Pin] = []
            if known.keys().isdisjoint(looked):
                fresh = list(map(Pin, *columns, repeat(era), repeat(0), repeat(1), repeat(self)))
                pins += fresh
            else:
                for name, region_id, offset, length, generation, checksum in zip(*columns, strict=True):
                    pin = known.get(name)
                    if pin is not None and pin.generation == generation:
                        pin.users += 1
                    else:
                        pin = Pin(name, region_id, offset, length, generation, checksum, era, 0, 1, self)
                        fresh.append(pin)
                    pins.append(pin)
            cells = self._board.put([pin.generation for pin in fresh])
            for pin, cell in zip(fresh, cells, strict=False):
                pin.cell = cell
                known[pin.key] = pin
            if len(cells) < len(fresh):
                without = {id(pin) for pin in fresh[len(cells) :]}
                pins = [None if id(pin) in without else pin for pin in pins]
                self._counters.full += len(without)
            self._board.note_used(found.words, found.generations)
        # The lock was released: the fence. From here on the server has removed a page, which shows, or sees that it is
        # held.
        changed = reader.changed(found, marked=True)
        gone = [pin for at in changed if (pin := pins[at]) is not None]
        if gone:
            pins = list(pins)
            for at in changed:
                pins[at] = None
            self.release(gone)
        whole = not changed and len(cells) == len(fresh)
        with self._lock:
            self._counters.changed += len(changed)
            self._counters.held += n if whole else n - pins.count(None)
        return pins

    def note_used(self, found: Found) -> None:
        """Record reads of found pages."""
        with self._lock:
            if self._board is not None:
                self._board.note_used(found.words, found.generations)

    def release(self, pins: Iterable[Pin]) -> list[Pin]:
        """Remove one user of each pin. Any thread.

        Returns:
            Pins that were handed over meanwhile, which are to be released otherwise.
        """
        left: list[Pin] = []
        cells: list[int] = []
        with self._lock:
            for pin in pins:
                if pin.board is not self:
                    left.append(pin)
                    continue
                pin.users -= 1
                assert pin.users >= 0
                if not pin.users:
                    cells.append(pin.cell)
                    if self._pins.get(pin.key) is pin:
                        del self._pins[pin.key]
            if self._board is not None:
                self._board.clear(cells)
        return left

    def end(self) -> list[Pin]:
        """Hold nothing by this board from now on; return its pins.

        The caller is to hold them otherwise.
        """
        with self._lock:
            pins = list(self._pins.values())
            self._pins = {}
            self._board = None
            for pin in pins:
                pin.board = None
        return pins

    def after_fork(self) -> None:
        """Forget the board in a forked child.

        It has the parent's memory: pins are released in the parent.
        """
        self._lock = nullcontext()
        self._board = None
