"""The names of SGLang that are used here.

These are the backend's base class and its configuration.

For a type checker, which does not have SGLang, the parts of them that are used are declared here; the signatures are
compared with those of the released package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    class HiCacheStorageConfig:
        """Configuration of a backend: ranks, model, and the user's settings."""

        tp_rank: int
        tp_size: int
        pp_rank: int
        pp_size: int
        attn_cp_rank: int
        attn_cp_size: int
        is_mla_model: bool
        model_name: str | None
        extra_config: dict[str, Any] | None

    class HiCacheStorageExtraInfo:
        """Further arguments of a call, which are not used."""

    class HostKVCache:
        """SGLang's pool of pages in host memory."""

        page_size: int
        dtype: torch.dtype
        layout: str
        kv_buffer: torch.Tensor

        def alloc(self, need_size: int) -> torch.Tensor | None:
            """Take as many tokens, in whole pages."""
            ...

        def free(self, indices: torch.Tensor) -> int:
            """Give tokens back."""
            ...

        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            """Return the page that starts with this token."""
            ...

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            """Return a flat page to load into."""
            ...

        def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
            """Put a flat page into the pool."""

        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            """Return the addresses and the sizes of the runs of these pages."""
            ...

    class HiCacheStorage:
        """Base class of storage backends."""

        def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
            """Register the pool, once, before all other calls."""

        def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
            """Register a further pool, if there are several."""

        def batch_get_v1(
            self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
        ) -> list[bool]:
            """Copy pages into the pool."""
            ...

        def batch_set_v1(
            self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
        ) -> list[bool]:
            """Copy pages out of the pool."""
            ...

        def get(
            self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
        ) -> torch.Tensor | None:
            """Copy a page into a tensor."""
            ...

        def batch_get(
            self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
        ) -> list[torch.Tensor | None] | int:
            """Copy pages into tensors."""
            ...

        def set(
            self,
            key: str,
            value: Any | None = None,
            target_location: Any | None = None,
            target_sizes: Any | None = None,
        ) -> bool:
            """Store a tensor."""
            ...

        def batch_set(
            self,
            keys: list[str],
            values: Any | None = None,
            target_locations: Any | None = None,
            target_sizes: Any | None = None,
        ) -> bool:
            """Store tensors."""
            ...

        def exists(self, key: str) -> bool:
            """Return whether a page is stored."""
            ...

        def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
            """Return the number of leading pages that are stored."""
            ...

        def clear(self) -> None:
            """Delete everything."""

else:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as HiCacheStorage
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as HiCacheStorageConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo as HiCacheStorageExtraInfo

    HostKVCache = Any
