"""Who waits for pages, in turn. No page is granted here: whoever is first tries for himself.

A place of its own memory grants room the moment it comes back. Here room may have to be asked for, which takes a while and may
be cancelled; so the first in line asks, and all others wait for his turn to end. Whoever asks for less keeps his turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import attrs
import trio

from ..abc import Key


@attrs.define(eq=False)
class Turn:
    """One who waits."""

    keys: Sequence[Key]
    """What for; fewer after a :meth:`Turns.narrow`."""
    news: trio.Event = attrs.field(factory=trio.Event)
    """Set when trying again may be of use."""


class Turns:
    """All who wait for pages of one tier."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Turn, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, keys: Sequence[Key]) -> Turn:
        """Stand at the end of the line."""
        turn = Turn(keys)
        self._waiting[turn] = None
        return turn

    def leave(self, turn: Turn) -> None:
        """Done, or not waiting any more. The next in line may need less."""
        del self._waiting[turn]
        self.wake()

    def is_first(self, turn: Turn) -> bool:
        """Whether it is his turn."""
        return next(iter(self._waiting)) is turn

    def narrow(self, asked: Sequence[Key], keys: Sequence[Key]) -> bool:
        """Whoever waits for ``asked``, that very object, waits for ``keys`` from now on. False where nobody does."""
        turn = next((turn for turn in self._waiting if turn.keys is asked), None)
        if turn is None:
            return False
        turn.keys = keys
        self.wake()
        return True

    def wake(self) -> None:
        """Something has changed: the first in line tries again."""
        if self._waiting:
            next(iter(self._waiting)).news.set()
