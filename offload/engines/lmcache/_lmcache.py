"""The names of LMCache 0.5 that are used here.

They are declared for type checkers.

LMCache is installed where the adapter runs, not where its types are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class Bitmap:
        """A boolean for each of a number of positions."""

        def __init__(self, size: int) -> None: ...
        def set(self, index: int) -> None:
            """Set one bit to true."""

    class ObjectKey:
        """The key of an object."""

        chunk_hash: bytes
        model_name: str
        kv_rank: int
        object_group_id: int
        cache_salt: str

        def to_encoded_object_key(self) -> object:
            """Return the key in its JSON form."""

    class KeyEntry:
        """A key and its size."""

        def __init__(self, key: object, size_bytes: int) -> None: ...

    class KeyListPage:
        """A page of a list of keys."""

        def __init__(self, entries: tuple[KeyEntry, ...], next_page_token: str | None) -> None: ...

    class MemoryLayoutDesc:
        """The layout of an object."""

        shapes: Sequence[Any]
        dtypes: Sequence[Any]

    class L1MemoryDesc:
        """The address of the first level, and its alignment."""

        align_bytes: int

    class MemoryObj:
        """An object in host memory."""

        data_ptr: int

        def get_size(self) -> int:
            """Return the number of bytes without padding."""
            ...

        def get_shapes(self) -> Sequence[Any]:
            """Return the shapes of its tensors, in their order in memory."""
            ...

        def get_dtypes(self) -> Sequence[Any]:
            """Return the dtypes of its tensors, in their order in memory."""
            ...

        def get_physical_size(self) -> int:
            """Return the number of allocated bytes."""
            ...

    class L2StoreResult:
        """The result of a store."""

        def __init__(self, success: bool, bytes_transferred: int) -> None: ...

    class AdapterUsage:
        """The space that an adapter uses."""

        total_bytes_used: int
        total_capacity_bytes: int

    class L2AdapterConfigBase:
        """The configuration of an adapter."""

        affinity_tag: str

    class L2AdapterInterface:
        """Base class of adapters."""

        def __init__(self, max_capacity_bytes: int = 0) -> None: ...

        def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None: ...
        def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None: ...
        def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None: ...

        def get_usage(self) -> AdapterUsage:
            """Return the bytes that listeners were notified of."""
            ...

    registered_configs: dict[str, type]
    registered_factories: dict[str, Callable[..., Any]]

    def register_l2_adapter_type(name: str, config: type) -> None:
        """Add a type and its configuration."""

    def register_l2_adapter_factory(name: str, factory: Callable[..., Any]) -> None:
        """Add the function that makes an adapter of a type."""

else:
    from lmcache.lmcache_native import Bitmap as Bitmap
    from lmcache.v1.distributed.api import KeyEntry as KeyEntry
    from lmcache.v1.distributed.api import KeyListPage as KeyListPage
    from lmcache.v1.distributed.api import MemoryLayoutDesc as MemoryLayoutDesc
    from lmcache.v1.distributed.api import ObjectKey as ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc as L1MemoryDesc
    from lmcache.v1.distributed.internal_api import L2StoreResult as L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface as L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import _L2_ADAPTER_CONFIG_REGISTRY as registered_configs  # noqa: F401
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase as L2AdapterConfigBase
    from lmcache.v1.distributed.l2_adapters.config import register_l2_adapter_type as register_l2_adapter_type
    from lmcache.v1.distributed.l2_adapters.factory import _L2_ADAPTER_FACTORY_REGISTRY as registered_factories  # noqa: F401
    from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory as register_l2_adapter_factory
    from lmcache.v1.memory_management import MemoryObj as MemoryObj
