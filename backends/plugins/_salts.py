"""Salts: whose a block is, in the keys of a plugin that is to know, as one that places blocks by their user. Pure.

Our keys are salted already, so nothing depends on it but where the plugin puts a block. A plugin's key is made of ours and the
salt, so both must be the same whenever the block is asked for. An engine says whose a block is while it is stored or looked up
(:class:`backends.abc.TenantTier`); later, when it is unlocked, evicted or deleted, that is remembered.

Rule 1. The last tenant that has said it of a key is the one that is remembered: another one looks in its own place, and misses.
Rule 2. Where two tenants say it of one key at the same time, the second one is refused. Keys that are salted never have two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..abc import Key
from ._config import HostConfig

_FORBIDDEN: Final = frozenset("@/\\\x00")
"""What LMCache allows in no salt: adapters join keys by it, make paths of it, or hand it to C."""
_LONGEST: Final = 128


class CacheSalts:
    """The salts of a host's keys.

    Args:
        most: how many are remembered; the oldest is forgotten first, and then is as if it had none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._salts: dict[Key, str] = {}
        self._claims: dict[Key, int] = {}

    def of(self, key: Key) -> str:
        """The salt of a key; empty where nothing is known of it."""
        return self._salts.get(key, "")

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """These keys are this tenant's; nobody else may say so until the returned function is called. Idempotent.

        Raises:
            ValueError: another tenant has one of them under way, or the tenant's name cannot be a salt.
        """
        if len(tenant) > _LONGEST or _FORBIDDEN.intersection(tenant):
            raise ValueError(
                f"the tenant {tenant!r:.60} cannot be a cache_salt: at most {_LONGEST} characters, none of @ / \\ and NUL"
            )
        for key in keys:
            if key in self._claims and self._salts.get(key, "") != tenant:
                raise ValueError(f"the key {key.hex()} is under way for another tenant than {tenant!r}")
        carried = list(keys)
        for key in carried:
            self._claims[key] = self._claims.get(key, 0) + 1
            self._salts.pop(key, None)  # to the end of the dict: it is the newest
            if tenant:
                self._salts[key] = tenant
        # None that is under way is among the oldest, but for more of them than are remembered in all.
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
    """The salts of a host that is to hand them on."""
    # As many as there may be blocks: one whose salt was forgotten would be looked for in the wrong place.
    blocks = (config.capacity_bytes or 0) // max(1, block_bytes)
    return CacheSalts(max(config.most_known, blocks)) if config.cache_salts else None
