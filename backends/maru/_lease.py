"""What a read holds: pinned pages, wherever they lie, until it is released.

Whether they still are what they were is told without asking anybody: the server lets go of nothing before the session's lease
is over, and this side's clock ends it earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from ..abc import Key
from ..pages import Pages

if TYPE_CHECKING:
    from maru import HeldBatch

    from ._tier import MaruTier


class MaruLease:
    """A hold on the prefix of some keys. Made by :meth:`MaruTier.pin`."""

    __slots__ = ("_held", "keys", "tier")

    def __init__(self, tier: MaruTier, keys: Sequence[Key], held: HeldBatch) -> None:
        """Not to be called: a tier makes them."""
        self.tier: MaruTier = tier
        self.keys: Sequence[Key] = keys
        """What is held."""
        self._held = held

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self.tier!r}>"

    @property
    def expires(self) -> float:
        """When it ends unless the server is heard before, on the monotonic clock (:func:`time.monotonic`)."""
        return self._held.expires

    def check(self) -> None:
        """Raise unless the views still show what was found. Asks nobody; any thread. Before a use of them, and after.

        Raises:
            maru.LeaseLost: released; or the server restarted, or was silent for longer than it holds a pin.
        """
        self._held.check()

    @property
    def views(self) -> Sequence[memoryview]:
        """The blocks where they lie, read-only and without a copy. Not verified: a load verifies.

        They stay readable for ever, and mean nothing once :meth:`check` raises.
        """
        return [page.toreadonly() for page in self.pages]

    @property
    def pages(self) -> Pages:
        """The same as columns, to be read only: writing another owner's page ends the process."""
        return Pages(self._held.addresses, self.tier.block_bytes, self._held)

    @property
    def checksums(self) -> Sequence[int | None]:
        """What each block's writer has summed it up to."""
        return self._held.checksums

    @property
    def generations(self) -> Sequence[int]:
        """The registration of each block: what is stored anew under its key has another one."""
        return self._held.generations

    def forget(self, positions: Sequence[int]) -> None:
        """The blocks at these positions are not what was stored; see :class:`backends.abc.ForgettingLease`."""
        blocks = [(self.keys[at], self.generations[at]) for at in positions]
        self.tier.condemned.add(blocks, self.tier.handler.era)

    def release_nowait(self) -> None:
        """Let go. Idempotent; the server is told, and nobody waits for its answer."""
        self._held.release()
        self.tier.let_go()

    async def release(self) -> None:
        """Let go. Idempotent; it has let go even when cancelled."""
        self.release_nowait()
        await trio.lowlevel.checkpoint()
        await self.tier.bury()

    async def __aenter__(self) -> MaruLease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()
        await self.tier.bury()
