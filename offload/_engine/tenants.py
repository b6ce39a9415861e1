"""The tenants of blocks, for tiers that need them. Pure.

Keys have tags while their blocks move, and an index has their tenants while they are in a tier. A tenant cannot be read
from a key. So keys are tagged with a tenant (:meth:`backends.abc.Tier.carry`) from a store until its handle has
settled, from a lookup until its hit is released, during a promotion, and from an eviction until the block is in the
tier below (:class:`TenantTags`).

An evicted block was stored long ago. If victims move into a tier that needs tenants, or out of one, a
:class:`TenantIndex` remembers the tenant of each block of the tier above, as long as the block is there. It learns the
tenant from the stores:

    on its way --arrived--> a tenant's --evicted, deleted--> forgotten

Rule 1. A block that one tenant brought belongs to that tenant. The first one wins, as its bytes do: a later one changes
        nothing.
Rule 2. A block that several tenants bring at the same time has no tenant, since it is unknown whose bytes arrived.
Rule 3. Neither has a block that was brought without a tag. The empty tenant is a tenant like all others: its blocks
        must not count as untagged, so they are remembered too.
Rule 4. Blocks that are neither in the tier nor on their way there are forgotten. The tier reports its evictions; other
        losses are found by asking the tier before the index has grown to twice its size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final, TypeAlias

from backends.abc import Key, Tier

if TYPE_CHECKING:
    from .._pipeline.container import OffloadContainer
    from .._pipeline.handle import TransferHandle


def nothing() -> None:
    """Do nothing: the end of a tag that was never set."""


class TenantTags:
    """The tags of keys with their tenants, in tiers that need them.

    An instrument of every pipeline into a tier.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = [tier for tier in tiers if tier.capabilities.needs_tenants]
        self._ends: dict[OffloadContainer, Callable[[], None]] = {}
        self._indexes: dict[str, TenantIndex] = {}

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def remember(self, name: str, tier: Tier) -> Callable[[], None]:
        """Keep an index of the tenants of this tier's blocks.

        Returns a function that ends this. The tier is asked without its breaker: a broken tier, too, knows its blocks.
        """
        index = self._indexes[name] = TenantIndex(tier.contains_nowait)
        return tier.on_evicted(index.forget)

    # --- tags of blocks that move ------------------------------------------------------------------------------------------

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with their tenant until the returned function is called.

        They are tagged in all tiers or, if one raises, in none. The empty tenant is tagged like any other: it must not
        be taken for another tenant with the same keys under way. Calling the returned function again does nothing.
        """
        if not self._tiers:
            return nothing
        return _all([(tier.carry, keys, tenant) for tier in self._tiers])

    def bring(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag keys of blocks that are about to arrive in a tier.

        Like :meth:`carry`, but the indexes record them too.
        """
        if not self._indexes:
            return self.carry(keys, tenant)
        carriers = [self.carry, *[index.bring for index in self._indexes.values()]]
        return _all([(carry, keys, tenant) for carry in carriers])

    def bring_up(self, keys: Sequence[Key], tenant: str, name: str, *, verified: bool) -> Callable[[], None]:
        """Tag keys of blocks that this tenant has loaded, for promotion.

        Like :meth:`bring` otherwise.

        Args:
            keys: the blocks.
            tenant: the tenant that loaded them.
            name: the tier they were loaded from.
            verified: whether that tier uses tenants itself, and so has verified this one. Otherwise a block that the
                index has under another tenant, or as untagged, is promoted as untagged.
        """
        index = self._indexes.get(name)
        if index is None or verified:
            return self.bring(keys, tenant)
        his = [key for key in keys if index.of(key) == tenant]
        return _all([(self.carry, keys, tenant), (self.bring, his, tenant)])

    def victims(
        self, name: str, to: Tier
    ) -> Callable[[Sequence[Key]], tuple[Collection[Key], Callable[[], None]]] | None:
        """Return a function that tags victims on their way to another tier.

        See :mod:`offload._pipeline.spill`. ``None`` if the tier has no index.
        """
        index = self._indexes.get(name)
        if index is None:
            return None
        must_know = to.capabilities.needs_tenants

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
        """Call ``end`` once this handle and its later routes have settled.

        These are the routes that its blocks go on to. The call may be made now.
        """
        if end is not nothing:
            if handle.status.terminal:
                handle._container.after_offers(end)
            else:
                self._ends[handle._container] = end
        return handle

    def settled(self, container: OffloadContainer) -> None:
        """End a settled store's tags, once no route has its blocks.

        This is the hook of an instrument.
        """
        end = self._ends.pop(container, None)
        if end is not None:
            container.after_offers(end)


_Carry: TypeAlias = Callable[[Sequence[Key], str], Callable[[], None]]


def _all(many: Iterable[tuple[_Carry, Sequence[Key], str]]) -> Callable[[], None]:
    """Tag in all carriers or, if one raises, in none.

    Returns a function that ends the tags once.
    """
    ends: list[Callable[[], None]] = []

    def end() -> None:
        while ends:
            try:
                ends.pop()()
            except Exception as error:  # an error of one tier: the other tags are ended all the same
                _log.warning("a tier could not end its tags of tenants: %r", error)

    try:
        for carry, keys, tenant in many:
            ends.append(carry(keys, tenant))
    except BaseException:
        end()
        raise
    return end


# --- the tenants of one tier ------------------------------------------------------------------------------------------


_FIRST_CHECK: Final = 64
"""The size of the index at its first check.

Then it asks the tier which of its blocks are still there.
"""
_log = logging.getLogger("offload.engine")


class TenantIndex:
    """The tenants of one tier's blocks.

    Args:
        contains: returns those of some keys that are there.
    """

    def __init__(self, contains: Callable[[Sequence[Key]], AbstractSet[Key]]) -> None:
        self._contains = contains
        self._there: dict[Key, str | None] = {}  # None: untagged
        self._coming: dict[Key, list[str]] = {}  # the tenants that bring it, one entry for each store
        self._most = _FIRST_CHECK

    def __len__(self) -> int:
        return len(self._there) + len(self._coming)

    def of(self, key: Key) -> str | None:
        """Return the tenant of a block; ``None`` if untagged or unknown."""
        if key in self._there:
            return self._there[key]
        return _only(self._coming.get(key, ()))

    def bring(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Record that this tenant brings these blocks.

        That lasts until the returned function is called, which is idempotent.
        """
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
            self._most = max(_FIRST_CHECK, 2 * len(self._there))

    def _ask(self, keys: Sequence[Key], otherwise: Collection[Key]) -> Collection[Key]:
        """Return the ones of these keys that the tier has.

        ``otherwise`` if the tier fails, which is no error of the store or the promotion.
        """
        try:
            return self._contains(keys)
        except Exception as error:
            _log.warning("it is unknown which of %d blocks exist: %r", len(keys), error)
            return otherwise


def _only(tenants: Sequence[str]) -> str | None:
    """Return the tenant, if these are all the same."""
    return tenants[0] if tenants and tenants.count(tenants[0]) == len(tenants) else None
