"""Evictions: who is told of them, and the victims that are still there until a spiller has copied them elsewhere. No bytes.

An eviction takes one of two paths. Where no spiller copies what goes, a victim goes at once:

    registered --evict--> reset

With a *spiller* (a chain to a slower place, say), it goes when its copy has settled:

    registered --evict--> leaving --last ref dropped--> reset
         ^                   |
         `------- use -------'

Rule 1. A block that leaves is held by the ref of its :class:`Spill`, and found by its key. So it can be read, is not deleted,
        and its slot is free only once no reader holds it any more, in whatever way its copy ends: a copy holds its own ref.
Rule 2. A use makes it stay: the eviction policy knows it again. Its copy goes on, and is one more copy.
Rule 3. A reservation that waits for room counts on what leaves (it is *coming*), so that no more has to leave than it needs.
        When a spill is over, what others still hold does not count any more: a copy without an end must not keep
        reservations waiting.
Rule 4. A call that must not wait (`put`, `stage`) has nothing spilled: its victims go at once, and the spiller is told so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeAlias, runtime_checkable

from .abc import Key

_log = logging.getLogger("backends.eviction")

Listener: TypeAlias = Callable[[Sequence[Key]], None]
"""Is told which keys have made room, right after they went. Called on the trio thread; must not block."""


class Spill:
    """The victims of one eviction, held until :meth:`over`. Made by a tier only.

    The spiller that is given one copies what is worth it and calls :meth:`over` on every path.
    """

    __slots__ = ("_end", "_slots", "depths", "keys")

    def __init__(
        self,
        keys: Sequence[Key],
        slots: Sequence[int],
        end: Callable[[Sequence[int]], Sequence[Key]],
        depths: Sequence[int | None] | None = None,
    ) -> None:
        self.keys: Sequence[Key] = keys
        """What has to go, the least worthy first."""
        self.depths: Sequence[int | None] | None = depths
        """The index of each in its prefix, where that is known: the spiller passes it on with the copy."""
        self._slots = slots
        self._end = end

    def __repr__(self) -> str:
        return f"<Spill of {len(self.keys)} blocks{'' if self.held else ', over'}>"

    @property
    def held(self) -> bool:
        """Whether the blocks are held by this. If not from the start, they went at once: the call for room could not wait."""
        return bool(self._slots)

    def over(self) -> Sequence[Key]:
        """Release the victims: each that was not used meanwhile goes, once nothing else holds it. Idempotent; never raises.

        Returns:
            The keys that go so, now or with their last ref; not those that stay, or were forgotten as damaged.
        """
        slots, self._slots = self._slots, ()
        return self._end(slots) if slots else ()


@runtime_checkable
class SpillingTier(Protocol):
    """A tier that tells of its evictions, and lets a spiller copy the victims first. Optional: a tier may lack the methods."""

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Tell ``listener`` of every eviction from now on, until the returned function is called."""
        ...

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Give ``spiller`` the victims of every eviction from now on, until the returned function is called.

        It is called on the trio thread, in the midst of a reservation: it takes note and returns. One that raises has let
        the blocks go. What it was given stays its own when it has been taken away.

        Raises:
            ValueError: the tier has one.
        """
        ...


class Evictions:
    """The listeners and the spiller of a registry, and the victims that are still there. Pure, but for the log.

    Attributes:
        spiller: copies victims elsewhere before they go, where there is one.
        listeners: are told of those that went.
        key_of: the slots that leave, each with its key: registered, held, and unknown to the eviction policy.
        coming: those of them that are counted on.
    """

    __slots__ = ("coming", "key_of", "listeners", "spiller")

    def __init__(self) -> None:
        self.spiller: Callable[[Spill], None] | None = None
        self.listeners: tuple[Listener, ...] = ()
        self.key_of: dict[int, Key] = {}
        self.coming: set[int] = set()

    # --- listeners, spiller ----------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell ``listener`` from now on; returns what ends it. Idempotent."""
        ours: Listener = lambda keys: listener(keys)  # noqa: E731 - one of its own for each call of this
        self.listeners = (*self.listeners, ours)
        return lambda: self._remove_listener(ours)

    def divert(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Give ``spiller`` the victims from now on; returns what ends it. Idempotent."""
        if self.spiller is not None:
            raise ValueError(f"what this tier evicts goes to {self.spiller!r} already")
        self.spiller = spiller

        def end() -> None:
            if self.spiller is spiller:
                self.spiller = None

        return end

    def tell(self, keys: Sequence[Key]) -> None:
        """Tell the listeners that these went. One that raises is removed."""
        for listener in self.listeners:
            try:
                listener(keys)
            except Exception:
                _log.exception("a listener for evictions raised, and is not told of any more")
                self._remove_listener(listener)

    def _remove_listener(self, listener: Listener) -> None:
        self.listeners = tuple([other for other in self.listeners if other is not listener])

    # --- which victims are still there ------------------------------------------------------------------------------

    def leave(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Note that these are victims, and held from now on."""
        self.key_of.update(zip(slots, keys, strict=True))
        self.coming.update(slots)

    def stay(self, slots: Sequence[int]) -> None:
        """Note that these were used, or are not found by their key any more: they do not leave."""
        for slot in slots:
            if self.key_of.pop(slot, None) is not None:
                self.coming.discard(slot)

    def count_no_more(self, slots: Sequence[int]) -> list[Key]:
        """Count on these no more, since their copy is over. Returns the keys of those that leave still."""
        self.coming.difference_update(slots)
        return [self.key_of[slot] for slot in slots if slot in self.key_of]

    def gone(self, refs: Sequence[int], held: AbstractSet[int]) -> list[Key]:
        """Take out those that leave and are not held any more, since refs were dropped. Returns their keys: they go now."""
        slots = [slot for slot in dict.fromkeys(refs) if slot in self.key_of and slot not in held]
        self.coming.difference_update(slots)
        return list(map(self.key_of.pop, slots))
