"""Pins that this client holds. Pure.

The server counts pins for each session and key. Here one :class:`Pin` stands for a registration that is read: by views,
and by calls of ``pin``. It is given back to the server with its last user.

Rule 1. A pin belongs to an *era*: a server's epoch and a session of it. A pin of an era that is over is not given back,
        since the server does not have it any more.
Rule 2. A view that was forgotten is noticed by its finalizer, which may run anywhere, also while a lock is held: it
        only appends to :attr:`Pinned.dropped`. The next call gives back the pins that it finds there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

Place: TypeAlias = tuple[int, int, int, int, int, int | None]
"""Position among the keys, region, offset, length, generation and checksum."""


class Pin(msgspec.Struct, eq=False):
    """A registration that may not go while it is used."""

    key: str
    """Key as the server knows it, with its salt."""
    region_id: int
    offset: int
    length: int
    generation: int
    checksum: int | None
    era: int
    taken: int = 1
    """Number of pins that the server counts for it."""
    users: int = 1
    board: Any = None
    """The `BoardPins` that holds it; ``None``: the server counts it."""
    cell: int = 0

    def is_at(self, region_id: int, offset: int, length: int, generation: int) -> bool:
        """Return whether this is the same registration.

        Its place and generation must be the same; a published server's generations are all 0.
        """
        return (self.region_id, self.offset, self.length, self.generation) == (region_id, offset, length, generation)


class Pinned:
    """All pins of one client."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self._asked: dict[str, list[Pin]] = {}  # by calls of pin
        # By the identity of the list: its era, and the keys that are copied from.
        self._lent: dict[int, tuple[int, list[str]]] = {}
        self.dropped: deque[Pin] = deque()
        """Pins one user of which was forgotten."""
        self.due: list[str] = []
        """Keys of pins to give back, once for each pin."""

    def __len__(self) -> int:
        return len(self._pins)

    def use_all(self, keys: Sequence[str], era: int) -> list[Pin | None] | None:
        """Add a user to the pins of all these keys; return them.

        ``None`` if one of the keys is not pinned in this era.
        """
        known: list[Pin | None] = []
        for key in keys:
            pin = self._pins.get(key)
            if pin is None or pin.era != era:
                return None
            known.append(pin)
        for pin in known:
            assert pin is not None
            pin.users += 1
        return known

    def take(self, keys: Sequence[str], places: Iterable[Place], era: int) -> list[Pin | None]:
        """Record pins that the server has taken, with one more user each.

        Keys with a place were pinned once more, there.
        """
        taken: list[Pin | None] = [None] * len(keys)
        for at, region_id, offset, length, generation, checksum in places:
            key = keys[at]
            pin = self._pins.get(key)
            if pin is not None and pin.era == era:
                if pin.is_at(region_id, offset, length, generation):
                    pin.taken += 1
                    pin.users += 1
                    taken[at] = pin
                    continue
                # Its registration is gone although it was pinned, and its pins with it: giving them back would release
                # the new one's.
                pin.taken = 0
            taken[at] = self._pins[key] = Pin(key, region_id, offset, length, generation, checksum, era)
        return taken

    def release(self, pins: Iterable[Pin | None], era: int) -> None:
        """Remove one user of each pin.

        With the last one its pins are due, or its cell is free.
        """
        left = [pin for pin in pins if pin is not None]
        for board in {pin.board for pin in left} - {None}:
            left = board.release(left)
        for pin in left:
            pin.users -= 1
            assert pin.users >= 0
            if pin.users:
                continue
            if self._pins.get(pin.key) is pin:
                del self._pins[pin.key]
            if pin.era == era:
                self.due += [pin.key] * pin.taken

    def lend(self, keys: list[str], era: int) -> None:
        """Record that the server has pinned each key once, for a copy.

        The pins are held until :meth:`returned` is called with the same list.
        """
        self._lent[id(keys)] = era, keys

    def returned(self, keys: list[str], era: int) -> None:
        """End a copy: its pins are due."""
        taken_in, _ = self._lent.pop(id(keys))
        if taken_in == era:
            self.due += keys

    def held(self, era: int) -> dict[str, int]:
        """Return how many pins we know of each key, without those due."""
        held = {key: pin.taken for key, pin in self._pins.items() if pin.era == era}
        for taken_in, keys in self._lent.values():
            if taken_in == era:
                for key in keys:
                    held[key] = held.get(key, 0) + 1
        return held

    def collect(self, era: int) -> None:
        """Release forgotten pins."""
        dropped = self.dropped
        while dropped:
            self.release((dropped.popleft(),), era)

    # --- calls of pin and unpin -----------------------------------------------------------------------------------

    def ask(self, pins: Iterable[Pin]) -> None:
        """Record pins whose user is a call of ``pin``."""
        for pin in pins:
            self._asked.setdefault(pin.key, []).append(pin)

    def unask(self, key: str, era: int) -> bool:
        """Undo one call of ``pin``.

        Returns:
            Whether there was one whose pin the server still has.
        """
        asked = self._asked.get(key)
        if not asked:
            return False
        pin = asked.pop()
        if not asked:
            del self._asked[key]
        self.release((pin,), era)
        return pin.era == era

    # --- another era ----------------------------------------------------------------------------------------------

    def adopt(self, pins: Iterable[Pin]) -> None:
        """Take over pins of a board from an era that is over.

        They have lapsed as well.
        """
        for pin in pins:
            self._pins.setdefault(pin.key, pin)  # if a key has two pins, the other one is lost, as its era shows

    def lapsed(self, era: int) -> list[str]:
        """Return the keys pinned in an earlier era, and not again since."""
        return [key for key, pin in self._pins.items() if pin.era != era]

    def lose_all(self) -> int:
        """Drop all pins, which cannot be verified any more; return their number."""
        n = len(self._pins)
        self._pins.clear()
        return n

    def retaken(self, key: str, place: tuple[int, int, int, int] | None, era: int) -> bool:
        """Apply the result of pinning a key again in a new era.

        ``place`` is its region, offset, length and generation; ``None`` if it was not found.

        Returns:
            Whether it is the registration that was pinned before. If not, views of that one are lost, and the new pin
            is due.
        """
        pin = self._pins.get(key)
        if pin is not None and pin.era == era:  # pinned again meanwhile: that one stays, and this one is one too many
            if place is not None:
                self.due.append(key)
            return True
        if pin is not None and place is not None and pin.is_at(*place):
            pin.era = era
            pin.taken = 1
            return True
        if pin is not None:
            del self._pins[key]
        if place is not None:
            self.due.append(key)
        return False
