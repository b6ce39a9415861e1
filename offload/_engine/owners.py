"""Whose the blocks of a tier are, for as long as it has them, so that what it evicts can be carried on as theirs. No bytes.

A tier that is no :class:`~backends.abc.TenantTier` does not know, and keys do not tell. Who brings a block knows:

    on its way --arrived--> somebody's --evicted, deleted--> forgotten

Rule 1. What was brought by one tenant is his. The first one wins, as his bytes do: who brings it later changes nothing.
Rule 2. What several tenants bring at the same time is nobody's, as everywhere: nobody can say whose bytes arrived.
Rule 3. So is what lies there and was brought by nobody who said so. The empty tenant is one like all others: what is his must
        not pass for what nobody knows anything of, so his blocks are remembered, too.
Rule 4. Nothing is remembered of what the tier does not have, or is not on its way there. It tells of its evictions; what went
        in another way is found out before there is as much of that again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from backends.abc import Key

_FEW: Final = 64
"""So many blocks are remembered before it is looked whether they are still there."""
_log = logging.getLogger("offload.engine")


class Owners:
    """Those of one tier's blocks.

    Args:
        contains: says which of some keys are there.
    """

    def __init__(self, contains: Callable[[Sequence[Key]], AbstractSet[Key]]) -> None:
        self._contains = contains
        self._there: dict[Key, str | None] = {}  # None: nobody's
        self._coming: dict[Key, list[str]] = {}  # who brings it, once for each time
        self._most = _FEW

    def __len__(self) -> int:
        return len(self._there) + len(self._coming)

    def of(self, key: Key) -> str | None:
        """Whose it is; ``None`` if it is nobody's, or nothing is known of it."""
        if key in self._there:
            return self._there[key]
        return _only(self._coming.get(key, ()))

    def bring(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """This tenant brings these, until the returned function is called: what is there then was brought. Idempotent."""
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
        """These have gone."""
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
        """What the tier has of these; a tier that fails is no error of whoever brings something."""
        try:
            return self._contains(keys)
        except Exception as error:
            _log.warning("nobody knows which of %d blocks are there: %r", len(keys), error)
            return otherwise


def _only(tenants: Sequence[str]) -> str | None:
    """The one tenant of these, if there is one."""
    return tenants[0] if tenants and tenants.count(tenants[0]) == len(tenants) else None
