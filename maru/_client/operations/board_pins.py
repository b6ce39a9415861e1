"""What this client holds by its board, without a message: in any thread. Pure.

Rule 1. Everything here happens under one lock, and nothing that waits or lets another thread run does. To release that lock is
        a full fence on x86: what was written under it is seen by others before what is loaded behind it.
Rule 2. What is held is looked at again behind the fence, also where another thread has put it on the board.
Rule 3. A board belongs to an *era* (see `pinned`). When that ends, nothing is held by it any more, and what was is pinned
        again by message: :meth:`BoardPins.end` hands it over.
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
    """What happened to the boards of a client, in all."""

    held: int = 0
    """Keys that were held without a message."""
    changed: int = 0
    """Keys that went, or were about to, between the look that found them and the one behind the fence: asked for by message."""
    full: int = 0
    """Keys for which there was no cell: pinned by message."""


class BoardPins:
    """The pins on one board.

    Args:
        board: which nobody else writes.
        lock: a plain one.
        era: of the client, in which the board was had.
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
        """Hold what was found: a pin with one more user for each; ``None`` where it went, or has no cell. Any thread.

        Args:
            names: those that were looked for.
            found: where they lie.
            reader: which has found them, to look again.
        """
        n, era, known = len(found), self.era, self._pins
        looked = names if n == len(names) else [names[position] for position in found.positions]
        columns = (looked, found.regions, found.offsets, found.lengths, found.generations, found.checksums)
        pins: list[Pin | None] = []
        with self._lock:
            if self._board is None:
                return [None] * n
            # Mostly nothing of it is held already. Then all pins are made by one call in C: half of what the loop takes.
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
        # The lock was released: the fence. From here on the server has removed it, which shows, or sees that it is held.
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
        """What was found was read."""
        with self._lock:
            if self._board is not None:
                self._board.note_used(found.words, found.generations)

    def release(self, pins: Iterable[Pin]) -> list[Pin]:
        """One user less of each; those that were handed over meanwhile, which are to be released otherwise. Any thread."""
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
        """Hold nothing by it from now on; what was held, which is its caller's."""
        with self._lock:
            pins = list(self._pins.values())
            self._pins = {}
            self._board = None
            for pin in pins:
                pin.board = None
        return pins

    def after_fork(self) -> None:
        """In a forked child, which has the parent's memory: what is held there is let go of there."""
        self._lock = nullcontext()
        self._board = None
