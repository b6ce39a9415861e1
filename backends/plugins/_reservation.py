"""Room for some blocks in a hosted plugin, and the walk of a store through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._errors import BlockSizeError
from ..abc import EVICTED, Key, Outcome, Rejected, Source

if TYPE_CHECKING:
    from ._hosted import HostedTier

NOT_ADMITTED = Rejected("not admitted")
"""The eviction policy thinks less of the block than of what it would push out."""


class HostedReservation:
    """Room in the books of a host. Made by :meth:`HostedTier.reserve`."""

    __slots__ = ("_slots", "_tier", "_used", "granted")

    def __init__(self, tier: HostedTier, keys: Sequence[Key], slots: list[int]) -> None:
        """Not to be called: a tier makes them."""
        self._tier = tier
        self._slots = slots
        self._used = False
        self.granted: Sequence[Key] = keys
        """The keys there is room for."""

    def __repr__(self) -> str:
        return f"<room for {len(self.granted)} blocks in {self._tier!r}>"

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys``, a subsequence of ``granted``. Never blocks."""
        if len(keys) == len(self.granted):
            return
        wanted = set(keys)
        pairs = list(zip(self.granted, self._slots, strict=True))
        kept = [slot for key, slot in pairs if key in wanted]
        if len(kept) != len(keys):
            raise ValueError(f"{len(keys)} keys to keep, of which {len(kept)} were granted")
        self.granted, self._slots = keys, kept
        self._tier.books.give_back([slot for key, slot in pairs if key not in wanted])

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Copy the blocks from ``source`` into the host's memory, and have the plugin store them.

        Cancelled, it leaves at once, and nothing is found until the plugin has said what became of it.

        Raises:
            ValueError: not one ref per granted key, or a second call.
            BlockSizeError: the source's blocks are of another size.
            NoAnswer: the plugin did not say what it has. Nothing was stored.
            Unproven: it did not say that it has stored them, and may go on. The source is free all the same; the keys are not.
        """
        tier, keys, slots = self._tier, self.granted, self._slots
        if self._used or len(refs) != len(keys) or len(slots) != len(keys):
            raise ValueError(f"a transfer takes one ref per kept block, once: {len(refs)} refs for {self!r}")
        if source.block_bytes != tier.block_bytes:
            raise BlockSizeError(tier, tier.block_bytes, source.block_bytes)
        self._used = True
        outcomes: list[Outcome] = [NOT_ADMITTED] * len(keys)
        admitted = [at for at, slot in enumerate(slots) if slot != EVICTED]
        if admitted:
            stored = await tier.store([keys[at] for at in admitted], source, [refs[at] for at in admitted])
            for at, outcome in zip(admitted, stored, strict=True):
                outcomes[at] = outcome
            self._settle(keys, outcomes)
        return outcomes

    def release(self) -> None:
        """Give back the room of what was not stored. Idempotent; never blocks, never raises."""
        slots, self._slots = self._slots, []
        if slots:
            self._tier.books.give_back(slots)

    def _settle(self, keys: Sequence[Key], outcomes: Sequence[Outcome]) -> None:
        """What was stored is in the books now; the room of everything else is free."""
        slots, self._slots = self._slots, []
        self._tier.enter(keys, slots, outcomes)
