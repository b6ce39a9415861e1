"""Salts: a block's tenant in the keys of a plugin. Pure.

A plugin may use it to place blocks by user, for example. Keys are salted already, so only the plugin's placement of a
block depends on this salt. A plugin's key is made of the key and the salt, so both must be the same for every operation
on the block. An engine tags blocks with a tenant while they are stored or looked up (:meth:`backends.abc.Tier.carry`);
for a later unlock, eviction or delete the salt is remembered.

Rule 1. The last tenant that a key was tagged with is remembered: another tenant looks in its own place, and misses.
Rule 2. If two tenants tag one key at the same time, the second one is refused. Salted keys never have two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..abc import Key
from ._config import HostConfig

_FORBIDDEN: Final = frozenset("@/\\\x00")
"""Characters that LMCache forbids in a salt.

Adapters join keys by them, make paths of them, or pass them to C.
"""
_LONGEST: Final = 128


class CacheSalts:
    """The salts of a host's keys.

    Args:
        most: number of salts that are remembered; the oldest is forgotten first, and its key then has no salt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._salts: dict[Key, str] = {}
        self._claims: dict[Key, int] = {}

    def of(self, key: Key) -> str:
        """Return the salt of a key; empty if it is unknown."""
        return self._salts.get(key, "")

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with a tenant until the returned function is called.

        That function is idempotent.

        Raises:
            ValueError: another tenant has one of them under way, or the tenant's name cannot be a salt.
        """
        if len(tenant) > _LONGEST or _FORBIDDEN.intersection(tenant):
            raise ValueError(
                f"the tenant {tenant!r:.60} cannot be a cache_salt: at most {_LONGEST} characters, none of @ / \\ and NUL"
            )
        for key in keys:
            if key in self._claims and self._salts.get(key, "") != tenant:
                raise ValueError(f"the key {key.hex()} is in use for another tenant than {tenant!r}")
        carried = list(keys)
        for key in carried:
            self._claims[key] = self._claims.get(key, 0) + 1
            self._salts.pop(key, None)  # to the end of the dict: it is the newest
            if tenant:
                self._salts[key] = tenant
        # Keys under way are not among the oldest, unless there are more of them than are remembered.
        while len(self._salts) > self._most:
            del self._salts[next(iter(self._salts))]

        def end() -> None:
            while carried:
                key = carried.pop()
                self._claims[key] -= 1
                if not self._claims[key]:
                    del self._claims[key]

        return end


def salts_of(config: HostConfig, block_bytes: int) -> CacheSalts | None:
    """Return the salts of a host; ``None`` without ``cache_salts``."""
    # As many as there may be blocks: a block whose salt was forgotten would be looked up in the wrong place.
    blocks = (config.capacity_bytes or 0) // max(1, block_bytes)
    return CacheSalts(max(config.most_known, blocks)) if config.cache_salts else None
