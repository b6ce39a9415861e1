"""Whose key is it? What callers have said, for as long as they say it. Pure.

A key belongs to whoever carries it. Where two tenants claim one key at the same time nobody can be told apart by it, so it is
nobody's: a store fails, a load misses. (Keys are salted by tenant, so this takes a mistake or an attempt.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..abc import Key

NOBODY: Final = ""
"""The tenant of a key that nobody carries."""


class Tenants:
    """The keys that are somebody's right now."""

    def __init__(self) -> None:
        self._claims: dict[Key, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """These keys are this tenant's until the returned function is called. Calling that again does nothing."""
        carried: list[Key] = list(keys)
        for key in carried:
            claims = self._claims.setdefault(key, {})
            claims[tenant] = claims.get(tenant, 0) + 1

        def end() -> None:
            while carried:
                self._drop(carried.pop(), tenant)

        return end

    def of(self, key: Key) -> str | None:
        """Whose it is: :data:`NOBODY` if nobody carries it, None if several do."""
        claims = self._claims.get(key)
        if claims is None:
            return NOBODY
        return next(iter(claims)) if len(claims) == 1 else None

    def _drop(self, key: Key, tenant: str) -> None:
        claims = self._claims[key]
        claims[tenant] -= 1
        if not claims[tenant]:
            del claims[tenant]
            if not claims:
                del self._claims[key]
