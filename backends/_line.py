"""Who waits for room in a place, in turn: rule 3 of :mod:`backends.blocks`. What room is, a subclass says.

Room is granted in the order in which it was asked for. While somebody waits, nobody is granted room past him. Who asks for less
keeps his turn. Room granted to a waiter that was cancelled in the same tick is given back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

import attrs
import trio

from ._errors import CapacityError
from .abc import Key, WhenFull


@attrs.define(eq=False)
class _Waiter:
    """Somebody waits for room for all of ``keys``."""

    keys: Sequence[Key]
    size: int
    evict: bool
    granted: trio.Event = attrs.field(factory=trio.Event)
    slots: list[int] | None = None


class Line(ABC):
    """All who wait for room in one place. ``size`` is what one block takes of it, in the unit of the subclass."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._serving = False

    # --- what a subclass says -------------------------------------------------------------------------------------

    @abstractmethod
    def could_hold(self, n: int, size: int = 1) -> bool:
        """Whether ``n`` blocks fit into an empty place."""

    @abstractmethod
    def fitting(self, n: int, size: int = 1) -> int:
        """How many of ``n`` blocks fit into what is free now."""

    @abstractmethod
    def take(self, n: int, size: int = 1) -> list[int] | None:
        """``n`` slots, which are staged from now on; ``None`` if there is no room for all of them."""

    @abstractmethod
    def take_evicting(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """A staged slot for each key, making room for what is missing; ``None`` if too much is held.

        A key that the eviction policy rejects gets ``EVICTED`` instead of a slot. The other slots ascend.
        """

    @abstractmethod
    def give_back(self, slots: Sequence[int]) -> None:
        """Staged slots that were not registered are free again. ``EVICTED`` is ignored."""

    # --- room -----------------------------------------------------------------------------------------------------

    def reserve_nowait(self, keys: Sequence[Key], when_full: WhenFull, size: int = 1) -> list[int]:
        """A staged slot for each key, or for a prefix of them under ``partial`` and ``fail``.

        Raises:
            trio.WouldBlock: there is no room now, or others wait for it.
            CapacityError: under ``wait`` and ``evict``: they would not fit if all the place were free.
        """
        if when_full == "partial" or when_full == "fail":
            room = 0 if self._waiters else self.fitting(len(keys), size)
            return self.take(room, size) or []
        if not self.could_hold(len(keys), size):
            raise CapacityError(f"{self!r} cannot hold {len(keys)} more blocks, even if it were empty")
        slots = None if self._waiters else self._try(keys, size, when_full == "evict")
        if slots is None:
            raise trio.WouldBlock
        return slots

    async def reserve(self, keys: Sequence[Key], when_full: WhenFull, size: int = 1) -> list[int]:
        """Like :meth:`reserve_nowait`, but waits for room, in turn. A checkpoint; cancelled, it holds nothing."""
        _, slots = await self.reserve_narrowed(keys, when_full, size)
        return slots

    async def reserve_narrowed(
        self, keys: Sequence[Key], when_full: WhenFull, size: int = 1
    ) -> tuple[Sequence[Key], list[int]]:
        """Like :meth:`reserve`; returns also the keys the slots are for, fewer than asked after a :meth:`narrow`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            slots = self.reserve_nowait(keys, when_full, size)
        except trio.WouldBlock:
            pass
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return keys[: len(slots)], slots
        waiter = _Waiter(keys, size, when_full == "evict")
        self._waiters[waiter] = None
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.slots is None:
                del self._waiters[waiter]
                self._serve()  # the next in line may need less
            else:
                self.give_back(waiter.slots)  # granted and cancelled in the same tick
            raise
        assert waiter.slots is not None
        return waiter.keys, waiter.slots

    def narrow(self, asked: Sequence[Key], keys: Sequence[Key]) -> bool:
        """Whoever waits for ``asked``, that very object, waits for ``keys`` from now on, in the same turn.

        False where nobody waits for it (any more).
        """
        waiter = next((waiter for waiter in self._waiters if waiter.keys is asked), None)
        if waiter is None:
            return False
        waiter.keys = keys
        self._serve()  # fewer may fit already, and then the next in line
        return True

    # --- below ----------------------------------------------------------------------------------------------------

    def _try(self, keys: Sequence[Key], size: int, evict: bool) -> list[int] | None:
        return self.take_evicting(keys, size) if evict else self.take(len(keys), size)

    def _serve(self) -> None:
        """Grant room to whoever waited longest, as long as there is enough for him."""
        if self._serving:  # a spiller that lets go at once: whoever is being served tries again himself
            return
        waiters = self._waiters
        self._serving = True
        try:
            while waiters:
                waiter = next(iter(waiters))
                slots = self._try(waiter.keys, waiter.size, waiter.evict)
                if slots is None:
                    return
                del waiters[waiter]
                waiter.slots = slots
                waiter.granted.set()
        finally:
            self._serving = False
