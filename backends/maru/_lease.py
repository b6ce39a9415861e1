"""Leases of pinned pages, wherever they lie, until they are released.

No message is needed to know whether the pages are unchanged: the server frees nothing before the session's lease is
over, and this side's clock ends it earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ..abc import Key
from ..base.direct import PlacedLease
from ..base.pages import Pages
from ..base.tier_base import TierLease

if TYPE_CHECKING:
    from maru import HeldBatch

    from ._tier import MaruTier


class MaruLease(TierLease["MaruTier"], PlacedLease):
    """A hold on the prefix of some keys. Made by :meth:`MaruTier.pin`."""

    __slots__ = ("held",)

    def __init__(self, tier: MaruTier, keys: Sequence[Key], held: HeldBatch) -> None:
        """Use :meth:`MaruTier.pin` instead."""
        super().__init__(tier, keys)
        self.held: HeldBatch = held
        """The pins, as the client holds them."""

    @property
    def is_held(self) -> bool:
        """Always true; see :meth:`check` for pins that the server has lost.

        If it has, a load misses.
        """
        return True

    @property
    def expires(self) -> float:
        """Time at which the lease ends unless the server is heard before.

        On the monotonic clock (:func:`time.monotonic`).
        """
        return self.held.expires

    def check(self) -> None:
        """Raise unless the views still show the pinned blocks.

        Sends no message; any thread. Call it before and after a use.

        Raises:
            maru.LeaseLost: the lease was released; or the server restarted, or was silent for longer than it holds a
                pin.
        """
        self.held.check()

    @property
    def views(self) -> Sequence[memoryview]:
        """The blocks in place, read-only and without a copy.

        They are not verified: a load verifies.

        They stay readable for ever, and are meaningless once :meth:`check` raises.
        """
        return [page.toreadonly() for page in self.pages]

    @property
    def pages(self) -> Pages:
        """Addresses of the blocks, to be read only.

        Writing another owner's page ends the process.
        """
        return Pages(self.held.addresses, self.tier.block_bytes, self.held)

    @property
    def checksums(self) -> Sequence[int | None]:
        """The checksum of each block, as its writer computed it."""
        return self.held.checksums

    @property
    def generations(self) -> Sequence[int]:
        """The generation of each block.

        It is a number that changes when a block is stored again under its key.
        """
        return self.held.generations

    def forget(self, positions: Sequence[int]) -> bool:
        """Drop the damaged blocks at these positions; see :meth:`backends.abc.ReadLease.forget`."""
        era = self.tier.handler.era
        self.tier.damaged.add(DamagedPage(self.keys[at], self.generations[at], era) for at in positions)
        return True

    def release_nowait(self) -> bool:
        """Release the blocks. Idempotent.

        The server is notified; its answer is not awaited. False if damaged blocks are still to be purged.
        """
        self.held.release()
        self.tier.wake_first()  # the released blocks may be evicted now
        return not self.tier.damaged

    async def __aexit__(self, *exc: object) -> None:
        if not self.release_nowait():
            await self.tier.purge()


class MaruThreadLease(MaruLease):
    """A hold by the pin board, which any thread may release.

    Made by :meth:`MaruTier.pin_from_thread`. Blocks found damaged through it are purged before the next question to the
    server, not by its release.
    """

    __slots__ = ()

    def release_from_thread(self) -> bool:
        """Release the blocks, in any thread. Idempotent; no message."""
        self.held.release()
        return True

    def release_nowait(self) -> bool:
        """Release the blocks. Idempotent."""
        super().release_nowait()
        return True


@attrs.frozen
class DamagedPage:
    """A damaged block; see :class:`backends.base.damaged_blocks.DamagedBlocks`.

    It stands for one registration. A block stored again under its key, in any process, has another generation, and is
    neither deleted nor hidden for longer than one question takes.
    """

    key: Key
    """Key of the block."""
    generation: int
    """Generation of its registration."""
    era: int
    """Era of the handler in which the generation is valid.

    Another server may count from the start, and then nothing is known of the block.
    """
