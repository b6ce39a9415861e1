"""The stores that are compared: a name, the module and function that open it, and the environment it is run in.

The noxfile reads this in an environment that has none of their packages, nor ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from .setting import Opener


@attrs.frozen
class Subject:
    """One row of the table."""

    label: str
    """For people."""
    opener: str
    """``module:function``, in this package."""
    environment: str = "ours"
    """Whose packages it needs: a session of the noxfile installs them."""
    in_flight: int = 1
    """Requests at once."""
    shared: bool = False
    """Whether processes share what it stores."""

    def open(self) -> Opener:
        """Import what opens it."""
        module, _, function = self.opener.partition(":")
        opener: Opener = getattr(import_module(f".{module}", __package__), function)
        return opener


SUBJECTS: Final[dict[str, Subject]] = {
    "memory": Subject("our memory tier, trio", "ours:open_memory"),
    "memory-checksums": Subject("the same, with checksums", "ours:open_memory_summed"),
    "memory-default": Subject("the same, with checksums and the default eviction", "ours:open_memory_default"),
    "memory-threads": Subject("our memory tier, from a thread", "ours:open_memory_threads"),
    "store": Subject("our page store, trio", "ours:open_store", shared=True),
    "store-flight4": Subject("the same, four requests in flight", "ours:open_store", in_flight=4, shared=True),
    "store-checksums": Subject("our page store, trio, with checksums", "ours:open_store_summed", shared=True),
    "store-threads": Subject("our page store, from a thread", "ours:open_store_threads", shared=True),
    "store-blocking": Subject("our page store, its blocking client", "ours:open_store_blocking", shared=True),
    "redis": Subject("Redis, Unix socket", "redis_store:open_redis", "redis", shared=True),
    "mooncake": Subject("Mooncake Store, one host", "mooncake_store:open_mooncake", "mooncake", shared=True),
    "published": Subject(
        "the published Maru, client-side LRU", "published_store:open_published", "published", shared=True
    ),
    "lmcache": Subject("LMCache, its first level in process", "lmcache_store:open_lmcache", "lmcache"),
    "lmcache-tasks": Subject("LMCache, its task calls in process", "lmcache_tasks:open_lmcache_tasks", "lmcache"),
}
