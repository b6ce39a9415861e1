"""Which tenant blocks belong to, for tiers that must know: tags while blocks move, an index while they lie in a tier. Pure.

Keys do not tell a tenant: they are opaque. So a tenant is tagged onto keys (:meth:`backends.abc.TenantTier.carry`) from a store
until its handle has settled, from a lookup until its hit is released, with a promotion until that is over, and with what a tier
evicts until it is in the tier below (:class:`TenantTags`).

What a tier evicts was stored long ago. Where victims move into a tier that must know, or out of one, a :class:`TenantIndex`
remembers the tenant of each block of the tier above, for as long as it has it. The one that brings a block knows:

    on its way --arrived--> a tenant's --evicted, deleted--> forgotten

Rule 1. What was brought by one tenant is that tenant's. The first one wins, as its bytes do: a later one changes nothing.
Rule 2. What several tenants bring at the same time has no tenant, as everywhere: it is unknown whose bytes arrived.
Rule 3. Nor has what lies there and was brought without a tag. The empty tenant is one like all others: its blocks must not pass
        for untagged ones, so they are remembered, too.
Rule 4. Nothing is remembered of what the tier does not have, or is not on its way there. It tells of its evictions; what went
        in another way is found out before there is as much of that again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from backends.abc import Key, TenantTier
from backends.leaving import SpillingTier

if TYPE_CHECKING:
    from .._pipeline.container import OffloadContainer
    from .._pipeline.handle import TransferHandle


def nothing() -> None:
    """The end of no tag."""


class TenantTags:
    """Tags tenants onto keys in all tiers of an engine that must know them. An instrument of every pipeline into a tier."""

    def __init__(self, tiers: Iterable[object]) -> None:
        self._tiers = [tier for tier in tiers if isinstance(tier, TenantTier)]
        self._ends: dict[OffloadContainer, Callable[[], None]] = {}
        self._indexes: dict[str, TenantIndex] = {}

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def remember(self, name: str, tier: SpillingTier) -> Callable[[], None]:
        """Remember the tenants of this tier's blocks; returns what ends that.

        The tier is asked without its breaker: a broken tier, too, says what it has.
        """
        place: Any = tier
        index = self._indexes[name] = TenantIndex(place.contains_nowait)
        return tier.on_evicted(index.forget)

    # --- tags of blocks that move ------------------------------------------------------------------------------------------

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with their tenant until the returned function is called: in all tiers or, where it raises, in none.

        The empty tenant is tagged as any other: it must not pass for another tenant that has the same keys under way. Calling
        the function again does nothing.
        """
        if not self._tiers:
            return nothing
        return _all([(tier.carry, keys, tenant) for tier in self._tiers])

    def bring(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """The same for blocks that are about to arrive in a tier, also in the indexes."""
        if not self._indexes:
            return self.carry(keys, tenant)
        carriers = [self.carry, *[index.bring for index in self._indexes.values()]]
        return _all([(carry, keys, tenant) for carry in carriers])

    def bring_up(self, keys: Sequence[Key], tenant: str, name: str, *, verified: bool) -> Callable[[], None]:
        """The same for blocks that this tenant has loaded from a tier, to be promoted.

        Args:
            keys: the blocks.
            tenant: the tenant that loaded them.
            name: the tier they were loaded from.
            verified: whether that tier knows tenants itself, and so has verified this one. Otherwise a block that the index has
                as another tenant's, or as untagged, is promoted as untagged.
        """
        index = self._indexes.get(name)
        if index is None or verified:
            return self.bring(keys, tenant)
        his = [key for key in keys if index.of(key) == tenant]
        return _all([(self.carry, keys, tenant), (self.bring, his, tenant)])

    def victims(
        self, name: str, to: object
    ) -> Callable[[Sequence[Key]], tuple[Collection[Key], Callable[[], None]]] | None:
        """How victims of a tier keep their tenant on their way to another one (:mod:`offload._pipeline.spill`)."""
        index = self._indexes.get(name)
        if index is None:
            return None
        must_know = isinstance(to, TenantTier)

        def claim(keys: Sequence[Key]) -> tuple[Collection[Key], Callable[[], None]]:
            of: dict[str | None, list[Key]] = {}
            for key in keys:
                of.setdefault(index.of(key), []).append(key)
            untagged = of.pop(None, [])
            ours = [(self.bring, brought, tenant) for tenant, brought in of.items() if tenant is not None]
            return set(untagged) if must_know else (), _all(ours)

        return claim

    def forget(self, name: str, keys: Collection[Key]) -> None:
        """Forget the tenants of blocks that were deleted from a tier."""
        if name in self._indexes:
            self._indexes[name].forget(keys)

    # --- lifetimes --------------------------------------------------------------------------------------------------

    def until_settled(self, handle: TransferHandle, end: Callable[[], None]) -> TransferHandle:
        """Call ``end`` once this handle has settled, which may be now."""
        if end is not nothing:
            if handle.status.terminal:
                end()
            else:
                self._ends[handle._container] = end
        return handle

    def settled(self, container: OffloadContainer) -> None:
        """The hook of an instrument: a store has settled, so its tags end."""
        end = self._ends.pop(container, None)
        if end is not None:
            end()


_Carry: TypeAlias = Callable[[Sequence[Key], str], Callable[[], None]]


def _all(many: Iterable[tuple[_Carry, Sequence[Key], str]]) -> Callable[[], None]:
    """Tag in all of them or, where one raises, in none; returns what ends it, once."""
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


# --- whose the blocks of one tier are ---------------------------------------------------------------------------------


_FEW: Final = 64
"""So many blocks are remembered before it is looked whether they are still there."""
_log = logging.getLogger("offload.engine")


class TenantIndex:
    """The tenants of one tier's blocks.

    Args:
        contains: says which of some keys are there.
    """

    def __init__(self, contains: Callable[[Sequence[Key]], AbstractSet[Key]]) -> None:
        self._contains = contains
        self._there: dict[Key, str | None] = {}  # None: untagged
        self._coming: dict[Key, list[str]] = {}  # who brings it, once for each time
        self._most = _FEW

    def __len__(self) -> int:
        return len(self._there) + len(self._coming)

    def of(self, key: Key) -> str | None:
        """The tenant of a block; ``None`` if it is untagged, or nothing is known of it."""
        if key in self._there:
            return self._there[key]
        return _only(self._coming.get(key, ()))

    def bring(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Note that this tenant brings these until the returned function is called: what is there then is its. Idempotent."""
        there = self._ask(keys, otherwise=keys)
        for key in keys:
            if key in there and key not in self._coming:
                self._there.setdefault(key, None)
            elif key not in there:
                self._there.pop(key, None)
            self._coming.setdefault(key, []).append(tenant)
        coming = list(keys)

        def end() -> None:
            if coming:
                self._arrived(coming, tenant)
                coming.clear()

        return end

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the tenants of blocks that have left the tier."""
        for key in keys:
            self._there.pop(key, None)

    def _arrived(self, keys: Sequence[Key], tenant: str) -> None:
        arrived = self._ask(keys, otherwise=())
        for key in keys:
            if key in arrived and key not in self._there:
                self._there[key] = _only(self._coming[key])
            brought = self._coming[key]
            brought.remove(tenant)
            if not brought:
                del self._coming[key]
        if len(self._there) > self._most:
            still = self._ask(list(self._there), otherwise=self._there)
            self.forget([key for key in self._there if key not in still])
            self._most = max(_FEW, 2 * len(self._there))

    def _ask(self, keys: Sequence[Key], otherwise: Collection[Key]) -> Collection[Key]:
        """What the tier has of these; a tier that fails is no error of the store or the promotion."""
        try:
            return self._contains(keys)
        except Exception as error:
            _log.warning("it is unknown which of %d blocks are there: %r", len(keys), error)
            return otherwise


def _only(tenants: Sequence[str]) -> str | None:
    """The one tenant of these, if there is one."""
    return tenants[0] if tenants and tenants.count(tenants[0]) == len(tenants) else None
