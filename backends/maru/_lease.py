"""What a read holds: pinned pages, wherever they lie, until it is released.

Whether they still are what they were is told without asking anybody: the server lets go of nothing before the session's lease
is over, and this side's clock ends it earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ..abc import Key
from ..base.direct import DirectLease, PlacedLease
from ..base.pages import Pages
from ..base.tier_base import TierLease

if TYPE_CHECKING:
    from maru import HeldBatch

    from ._tier import MaruTier


class MaruLease(TierLease["MaruTier"], PlacedLease):
    """A hold on the prefix of some keys. Made by :meth:`MaruTier.pin`."""

    __slots__ = ("held",)

    def __init__(self, tier: MaruTier, keys: Sequence[Key], held: HeldBatch) -> None:
        """Not to be called: a tier makes them."""
        super().__init__(tier, keys)
        self.held: HeldBatch = held
        """The pins, as the client has them."""

    @property
    def is_held(self) -> bool:
        """Always true: whether the server still keeps the pins is told by :meth:`check`; if not, a load misses."""
        return True

    @property
    def expires(self) -> float:
        """When it ends unless the server is heard before, on the monotonic clock (:func:`time.monotonic`)."""
        return self.held.expires

    def check(self) -> None:
        """Raise unless the views still show what was found. Sends no message; any thread. Call it before and after a use.

        Raises:
            maru.LeaseLost: released; or the server restarted, or was silent for longer than it holds a pin.
        """
        self.held.check()

    @property
    def views(self) -> Sequence[memoryview]:
        """The blocks where they lie, read-only and without a copy. Not verified: a load verifies.

        They stay readable for ever, and mean nothing once :meth:`check` raises.
        """
        return [page.toreadonly() for page in self.pages]

    @property
    def pages(self) -> Pages:
        """Where the blocks lie, as columns, to be read only: writing another owner's page ends the process."""
        return Pages(self.held.addresses, self.tier.block_bytes, self.held)

    @property
    def checksums(self) -> Sequence[int | None]:
        """The checksum of each block, as its writer computed it."""
        return self.held.checksums

    @property
    def generations(self) -> Sequence[int]:
        """The generation of each block: a number that differs for what is stored anew under its key."""
        return self.held.generations

    def forget(self, positions: Sequence[int]) -> bool:
        """Forget the damaged blocks at these positions; see :meth:`backends.abc.ReadLease.forget`."""
        era = self.tier.handler.era
        self.tier.damaged.add(DamagedPage(self.keys[at], self.generations[at], era) for at in positions)
        return True

    def release_nowait(self) -> None:
        """Release the blocks. Idempotent; the server is told, and its answer is not waited for."""
        self.held.release()
        self.tier.wake_first()  # what it held may be evicted now

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()
        if self.tier.damaged:
            await self.tier.purge()


class MaruThreadLease(MaruLease, DirectLease):
    """A hold by the pin board, which any thread may release. Made by :meth:`MaruTier.pin_from_thread`.

    What is found damaged through it is purged by the next question, and not by its release.
    """

    __slots__ = ()

    def release_from_thread(self) -> None:
        """Release the blocks, in any thread. Idempotent; no message."""
        self.held.release()


@attrs.frozen
class DamagedPage:
    """A block that was found damaged in the page store; see :class:`backends.base.damaged_blocks.DamagedBlocks`.

    Its registration is meant and no other. What was stored anew under its key, in whatever process, has another generation,
    and is neither deleted nor hidden for longer than it takes to ask.
    """

    key: Key
    """What it is called."""
    generation: int
    """Its registration."""
    era: int
    """The era of the handler in which that means something: another server may count anew, and then nothing is known of it."""
