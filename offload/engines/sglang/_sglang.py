"""What is used of SGLang, by name: the class that a backend derives from, and what it is configured with.

For a type checker, which does not have SGLang, what is used of them is written down here; the signatures are compared with
those of the released package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    class HiCacheStorageConfig:
        """Which process a backend is for, and what a user has said."""

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
        """What a call is told beside its keys, which is not used."""

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
            """The page that starts with this token."""
            ...

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            """A flat page to load into."""
            ...

        def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
            """Put a flat page where it belongs."""

        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            """Where the runs of these pages start, and how large they are."""
            ...

    class HiCacheStorage:
        """A storage backend: what it inherits."""

        def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
            """Told of the pool once, before all calls."""

        def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
            """Told of each pool, where there are several."""

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
            """Whether a page is there."""
            ...

        def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
            """How many leading pages are there."""
            ...

        def clear(self) -> None:
            """Forget everything."""

else:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as HiCacheStorage
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as HiCacheStorageConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo as HiCacheStorageExtraInfo

    HostKVCache = Any
