"""LMCache's second level (L2) in any tier, and its first (L1).

L1 is kept in the page store.

For L2 there is an adapter for its ``plugin`` type, and a connector for its ``native_plugin`` type. L1 is for programs
that make LMCache's storage manager themselves.

Rule 1. LMCache never sees an exception from here. If a server is away, a pool is full or a timeout passes, a lookup
    finds nothing, a load or a store fails, and the failure is counted and named in the status.
Rule 2. A task ends once. Its listeners are notified first, then its result is recorded, then its descriptor is
    signalled.
Rule 3. Objects that a lookup found stay pinned until each of their keys is unlocked, even if deleted meanwhile.
Rule 4. A load that may still write into the caller's memory has no result: that memory must not be used again.

LMCache calls ``_adapter``, or ``_connector``, an interface with six methods; both call ``_cache``, which begins
``_operations`` and joins the parts that decide without LMCache: names of objects, tasks, locks, resident objects.
``_l1`` is the first level, ``_allocator`` its interface without keys. Only ``_lmcache`` and ``_lmcache_l1`` import
``lmcache``.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._adapter import MaruL2Adapter as MaruL2Adapter
    from ._adapter import MaruL2AdapterConfig as MaruL2AdapterConfig
    from ._adapter import register as register
    from ._l1 import MaruL1Manager as MaruL1Manager
    from ._allocator import MaruMemoryAllocator as MaruMemoryAllocator
    from ._connector import MaruConnector as MaruConnector
    from ._names import object_key_to_string as object_key_to_string

_HOMES = {
    "MaruL2Adapter": "._adapter",
    "MaruL2AdapterConfig": "._adapter",
    "register": "._adapter",
    "MaruL1Manager": "._l1",
    "MaruMemoryAllocator": "._allocator",
    "MaruConnector": "._connector",
    "object_key_to_string": "._names",
}

lazily(__name__, _HOMES)
