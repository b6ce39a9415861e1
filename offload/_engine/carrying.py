"""Whose blocks they are, for tiers that must know.

A tenant is carried from a store until its handle has settled, from a lookup until its hit is released, with a promotion until
that is over, and with what a tier evicts until it is below. Keys do not tell: they are opaque. So where victims are carried
into such a tier, or out of one, it is remembered whose a block is (:mod:`offload._engine.owners`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

from backends.abc import Key, TenantTier
from backends.leaving import SpillingTier

from .._pipeline.container import OffloadContainer
from .._pipeline.handle import TransferHandle
from .._pipeline.marks import place_of
from .owners import Owners


def nothing() -> None:
    """The end of what nobody carries."""


class Carrying:
    """All tiers of an engine that must know. An instrument of every pipeline that carries something into them."""

    def __init__(self, tiers: Iterable[object]) -> None:
        self._tiers = [tier for tier in tiers if isinstance(tier, TenantTier)]
        self._ends: dict[OffloadContainer, Callable[[], None]] = {}
        self._owners: dict[str, Owners] = {}

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def remember(self, name: str, tier: SpillingTier) -> Callable[[], None]:
        """Remember whose the blocks of this tier are; returns what ends that."""
        place: Any = place_of(tier)  # a broken tier, too, says what it has
        owners = self._owners[name] = Owners(place.contains_nowait)
        return tier.on_evicted(owners.forget)

    # --- what is carried ------------------------------------------------------------------------------------------

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Until the returned function is called these keys are this tenant's: in all of the tiers or, where it raises, in none.

        The empty tenant is carried as any other: it must not pass for one who has the same keys under way. Calling the function
        again does nothing.
        """
        if not self._tiers:
            return nothing
        return _all([(tier.carry, keys, tenant) for tier in self._tiers])

    def bring(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """The same for blocks that are about to arrive somewhere, where it is remembered."""
        if not self._owners:
            return self.carry(keys, tenant)
        carriers = [self.carry, *[owners.bring for owners in self._owners.values()]]
        return _all([(carry, keys, tenant) for carry in carriers])

    def bring_up(self, keys: Sequence[Key], tenant: str, name: str, tier: object) -> Callable[[], None]:
        """The same for blocks that this tenant has loaded from a tier.

        His is what that has verified, or what nobody knows better: what is another's there, or nobody's, is nobody's above.
        """
        owners = self._owners.get(name)
        if owners is None or isinstance(place_of(tier), TenantTier):
            return self.bring(keys, tenant)
        his = [key for key in keys if owners.of(key) == tenant]
        return _all([(self.carry, keys, tenant), (self.bring, his, tenant)])

    def victims(
        self, name: str, to: object
    ) -> Callable[[Sequence[Key]], tuple[Collection[Key], Callable[[], None]]] | None:
        """How victims of a tier are carried to another one, as theirs whose they are (:mod:`offload._pipeline.spill`)."""
        owners = self._owners.get(name)
        if owners is None:
            return None
        must_know = isinstance(to, TenantTier)

        def claim(keys: Sequence[Key]) -> tuple[Collection[Key], Callable[[], None]]:
            of: dict[str | None, list[Key]] = {}
            for key in keys:
                of.setdefault(owners.of(key), []).append(key)
            nobodys = of.pop(None, [])
            ours = [(self.bring, brought, tenant) for tenant, brought in of.items() if tenant is not None]
            return set(nobodys) if must_know else (), _all(ours)

        return claim

    def forget(self, name: str, keys: Collection[Key]) -> None:
        """These were deleted from a tier."""
        if name in self._owners:
            self._owners[name].forget(keys)

    # --- until when -------------------------------------------------------------------------------------------------

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


_Carry: TypeAlias = Callable[[Sequence[Key], str], Callable[[], None]]


def _all(many: Iterable[tuple[_Carry, Sequence[Key], str]]) -> Callable[[], None]:
    """Tell all of them or, where one raises, none; returns what ends it, once."""
    ends: list[Callable[[], None]] = []

    def end() -> None:
        while ends:
            ends.pop()()

    try:
        for carry, keys, tenant in many:
            ends.append(carry(keys, tenant))
    except BaseException:
        end()
        raise
    return end
