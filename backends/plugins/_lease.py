"""What a read of a hosted plugin holds: keys that this process neither evicts nor deletes, and the plugin's locks, if any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from ..abc import Key

if TYPE_CHECKING:
    from ._hosted import HostedTier


class HostedLease:
    """A hold on the prefix of some keys. Made by :meth:`HostedTier.pin`."""

    __slots__ = ("_held", "_refs", "keys", "tier")

    def __init__(self, tier: HostedTier, keys: Sequence[Key]) -> None:
        """Not to be called: a tier makes them, once the plugin has said that it has these keys."""
        self.tier: HostedTier = tier
        self.keys: Sequence[Key] = keys
        """What is held."""
        self._held = bool(keys)
        self._refs = tier.books.lease(keys) if keys else []

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self.tier!r}>"

    @property
    def is_held(self) -> bool:
        """Whether it has not been released."""
        return self._held or not self.keys

    def release_nowait(self) -> None:
        """Let go. Idempotent."""
        if self._held:
            self._held = False
            refs, self._refs = self._refs, []
            self.tier.line.unlock(self.keys)
            self.tier.books.unlease(self.keys, refs)

    async def release(self) -> None:
        """Let go. Idempotent; it has let go even when cancelled."""
        self.release_nowait()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> HostedLease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()
