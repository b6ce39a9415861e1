"""Whose blocks they are, for tiers that must know.

A tenant is carried from a store until its handle has settled, from a lookup until its hit is released, and with a promotion
until that is over. Keys do not tell: they are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from backends.abc import Key, TenantTier

from .._container import OffloadContainer
from .._handle import TransferHandle


def nothing() -> None:
    """The end of what nobody carries."""


class Carrying:
    """All tiers of an engine that must know. An instrument of every pipeline that carries something into them."""

    def __init__(self, tiers: Iterable[object]) -> None:
        self._tiers = [tier for tier in tiers if isinstance(tier, TenantTier)]
        self._ends: dict[OffloadContainer, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Until the returned function is called these keys are this tenant's: in all of the tiers or, where it raises, in none.

        The empty tenant is carried as any other: it must not pass for one who has the same keys under way. Calling the function
        again does nothing.
        """
        if not self._tiers:
            return nothing
        ends: list[Callable[[], None]] = []

        def end() -> None:
            while ends:
                ends.pop()()

        try:
            for tier in self._tiers:
                ends.append(tier.carry(keys, tenant))
        except BaseException:
            end()
            raise
        return end

    def until_settled(self, handle: TransferHandle, end: Callable[[], None]) -> TransferHandle:
        """Call ``end`` once this handle has settled, which may be now."""
        if end is not nothing:
            if handle.status.terminal:
                end()
            else:
                self._ends[handle._container] = end
        return handle

    def settled(self, container: OffloadContainer) -> None:
        """The hook: somebody's blocks have arrived, or will not."""
        end = self._ends.pop(container, None)
        if end is not None:
            end()
