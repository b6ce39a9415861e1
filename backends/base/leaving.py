"""Evictions: listeners, and victims that a spiller copies elsewhere first.

No bytes.

An eviction takes one of two paths. Without a spiller a victim goes at once:

    registered --evict--> reset

With a *spiller* (a chain to a slower tier, for example), it goes when its copy has settled:

    registered --evict--> leaving --last ref dropped--> reset
         ^                   |
         `------- use -------'

Rule 1. A block that leaves is held by the ref of its :class:`Spill`, and found by its key. So it can be read, is not
        deleted, and its slot is free only once no reader holds it any more, however its copy ends: a copy holds its own
        ref.
Rule 2. A use keeps the block: it is added to the eviction policy again. Its copy goes on, so the block is in both
        tiers.
Rule 3. A reservation that waits for room counts on leaving blocks (they are *coming*), so that no more have to leave
        than it needs. When a spill is over, blocks that are still held do not count any more: a copy without an end
        must not keep reservations waiting.
Rule 4. A call that must not wait (`put`, `stage`) spills nothing: its victims go at once, and the spiller is notified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from ..abc import Key

_log = logging.getLogger("backends.eviction")

Listener: TypeAlias = Callable[[Sequence[Key]], None]
"""Function called with evicted keys, right after their eviction.

On the trio thread; must not block.
"""


class Spill:
    """The victims of one eviction, held until :meth:`over`.

    Only a tier makes one.

    The spiller copies those that are worth it, and calls :meth:`over` on every path.
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
        """The keys of the victims, the least useful first."""
        self.depths: Sequence[int | None] | None = depths
        """The index of each block in its prefix, if known.

        The spiller passes it on with the copy.
        """
        self._slots = slots
        self._end = end

    def __repr__(self) -> str:
        return f"<Spill of {len(self.keys)} blocks{'' if self.held else ', over'}>"

    @property
    def held(self) -> bool:
        """Whether it holds the blocks.

        If it does not from the start, they went at once, since the request for room could not wait.
        """
        return bool(self._slots)

    def over(self) -> Sequence[Key]:
        """Release the victims. Idempotent; never raises.

        Each that was not used meanwhile goes, once it is not held any more.

        Returns:
            The keys that go, now or with their last ref; not those that stay, or were dropped as damaged.
        """
        slots, self._slots = self._slots, ()
        return self._end(slots) if slots else ()


class Evictions:
    """The listeners and spiller of a registry, and its leaving victims.

    Pure, except for the log.

    Attributes:
        spiller: copies victims elsewhere before they go, or ``None``.
        listeners: called with the keys of victims that went.
        key_of: the slots that leave, each with its key: registered, held, and unknown to the eviction policy.
        coming: those slots of them that waiting reservations count on.
    """

    __slots__ = ("coming", "key_of", "listeners", "spiller")

    def __init__(self) -> None:
        self.spiller: Callable[[Spill], None] | None = None
        self.listeners: tuple[Listener, ...] = ()
        self.key_of: dict[int, Key] = {}
        self.coming: set[int] = set()

    # --- listeners, spiller ----------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener. Return an idempotent function that removes it."""
        ours: Listener = lambda keys: listener(keys)  # noqa: E731 - one of its own for each call of this
        self.listeners = (*self.listeners, ours)
        return lambda: self._remove_listener(ours)

    def divert(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Set the spiller. Return an idempotent function that removes it."""
        if self.spiller is not None:
            raise ValueError(f"evicted blocks of this tier already go to {self.spiller!r}")
        self.spiller = spiller

        def end() -> None:
            if self.spiller is spiller:
                self.spiller = None

        return end

    def tell(self, keys: Sequence[Key]) -> None:
        """Call the listeners with these keys. Remove one that raises."""
        for listener in self.listeners:
            try:
                listener(keys)
            except Exception:
                _log.exception("a listener for evictions raised, and was removed")
                self._remove_listener(listener)

    def _remove_listener(self, listener: Listener) -> None:
        self.listeners = tuple([other for other in self.listeners if other is not listener])

    # --- victims that are still there -------------------------------------------------------------------------------

    def leave(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Add victims, which are held from now on."""
        self.key_of.update(zip(slots, keys, strict=True))
        self.coming.update(slots)

    def stay(self, slots: Sequence[int]) -> None:
        """Remove slots that do not leave any more.

        They were used, or are not found by their key any more.
        """
        for slot in slots:
            if self.key_of.pop(slot, None) is not None:
                self.coming.discard(slot)

    def count_no_more(self, slots: Sequence[int]) -> list[Key]:
        """Stop counting on these slots, since their copy is over.

        Return the keys of those that still leave.
        """
        self.coming.difference_update(slots)
        return [self.key_of[slot] for slot in slots if slot in self.key_of]

    def gone(self, refs: Sequence[int], held: AbstractSet[int]) -> list[Key]:
        """Remove leaving slots that lost their last ref. Return their keys."""
        slots = [slot for slot in dict.fromkeys(refs) if slot in self.key_of and slot not in held]
        self.coming.difference_update(slots)
        return list(map(self.key_of.pop, slots))
