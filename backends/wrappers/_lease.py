"""What a read of a wrapped tier holds: the blocks of the tier below, and whose they were said to be when they were found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..abc import Key, ReadLease
from ._contract import Context

if TYPE_CHECKING:
    from ._tier import WrappedPlace


class WrappedLease:
    """A hold on the prefix of some keys. Made by :meth:`WrappedPlace.pin`."""

    __slots__ = ("contexts", "inner", "keys", "tier")

    def __init__(self, tier: WrappedPlace, contexts: Sequence[Context], inner: ReadLease) -> None:
        """Not to be called: a tier makes them."""
        self.tier: WrappedPlace = tier
        self.contexts: Sequence[Context] = contexts
        """What is needed to decode each block, the tenant included: who comes later changes nothing for this read."""
        self.inner: ReadLease = inner
        """The hold on the encoded blocks."""
        self.keys: Sequence[Key] = [context.key for context in contexts]
        """What is held."""

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self.tier!r}>"

    def forget(self, positions: Sequence[int]) -> None:
        """The blocks at these positions are not what was stored; see :class:`backends.abc.ForgettingLease`."""
        self.tier.forget(self, positions)

    async def release(self) -> None:
        """Let go. Idempotent; it has let go even when cancelled."""
        await self.inner.release()
        await self.tier.bury()

    async def __aenter__(self) -> WrappedLease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(None, None, None)
        await self.tier.bury()
