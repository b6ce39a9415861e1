"""The backend class that SGLang calls.

It uses only the names of SGLang that :mod:`._sglang` lists. In SGLang's configuration it is a ``dynamic`` backend::

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "offload", "module_path": "offload.engines.sglang", "class_name": "HiCacheOffload", "interface_v1": 1,
        "engine": {"tiers": {"maru": {"type": "maru", "pool_size": "4 GiB"}}}}'
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import torch

from backends.base.planes import TensorPlanes

from ... import from_thread
from ..._errors import ConfigError, LayoutCheckFailed
from .._faults import AdapterError, FaultLog
from .._guard import NOTHING, Hook, guard_faults, guarded, nothing
from ._naming import Form, PageNaming, layout_text, untagged
from ._pages import HostPages, LentPages, WrongPages
from ._planes import FlatPage, PageCanary, free_page, pool_planes
from ._settings import SECTION, Settings
from ._sglang import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, HostKVCache
from ._storage import PageStorage

_log = logging.getLogger("offload.engines.sglang")

_LONGEST_CHECK: Final = 5.0
"""Seconds that SGLang's start waits for the layout check.

It waits that long if a tier is slow to answer.
"""


class NoPool(AdapterError):
    """SGLang has not registered its pool, or has closed the backend."""

    fault_name = "no pool"

    def __init__(self) -> None:
        super().__init__("no pool is registered with the backend")


class WrongLayout(AdapterError):
    """Planes of a page do not come back as they were stored."""

    fault_name = "layout"


@attrs.frozen(eq=False)
class _Pool:
    """SGLang's pool, and the storage for it."""

    memory: HostKVCache
    planes: TensorPlanes | None
    naming: PageNaming
    storage: PageStorage

    def lend(self, keys: Sequence[str], indices: torch.Tensor) -> LentPages:
        """Return pages of the pool, by the numbers of all their tokens."""
        if len(indices) != len(keys) * self.memory.page_size:
            raise WrongPages(f"{len(indices)} tokens are not {len(keys)} pages of {self.memory.page_size}")
        return self.lend_pages(len(keys), indices)

    def lend_pages(self, n: int, indices: torch.Tensor) -> LentPages:
        """Return ``n`` pages of the pool, by the numbers of their tokens."""
        size = self.memory.page_size
        addresses, sizes = self.memory.get_page_buffer_meta(indices)
        numbers = [] if self.planes is None else [first // size for first in indices[::size].tolist()]
        block_bytes = self.storage.source.block_bytes
        return LentPages(addresses, sizes, n, block_bytes, self.memory, planes=self.planes, numbers=numbers)

    def lend_tensors(self, tensors: Sequence[torch.Tensor]) -> LentPages:
        """Return flat pages, each in a tensor of its own."""
        for tensor in tensors:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise WrongPages(f"a flat page must be a contiguous tensor in host memory, not {type(tensor).__name__}")
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return LentPages(addresses, sizes, len(tensors), self.storage.source.block_bytes, tensors)


def _none_come(backend: HiCacheOffload, keys: list[str], *args: Any, **more: Any) -> list[bool]:
    return [False] * len(keys)


def _no_pool(backend: HiCacheOffload, *args: Any) -> None:
    backend._pool = None


_HOOKS: Final = {
    # A wrong setting ends SGLang's attaching, with a text that names it. Other faults: no page is there.
    "register_mem_pool_host": Hook(nothing, _no_pool, passes=(ValueError,)),
    "register_mem_host_pool_v2": Hook(nothing, passes=(ConfigError,)),
    "close": Hook(nothing, _no_pool),
    "clear": Hook(nothing, passes=(NotImplementedError,)),
    "report_status": Hook(lambda backend: {"is_open": False, "counts": {}, **guard_faults(backend, _log).report()}),
    "exists": Hook(lambda *args: False),
    "batch_exists": Hook(lambda *args, **more: 0),
    "batch_get_v1": Hook(_none_come),
    "batch_set_v1": Hook(_none_come),
    "get": NOTHING,
    "batch_get": Hook(lambda backend, keys, *args, **more: [None] * len(keys)),
    "set": Hook(lambda *args, **more: False),
    "batch_set": Hook(lambda *args, **more: False),
}


@guarded(_HOOKS, _log)
class HiCacheOffload(HiCacheStorage):
    """SGLang's HiCache in the tiers of an engine. Thread-safe.

    The engine is opened when SGLang registers its pool, which determines the size of a page. It opens although a tier
    is away, and finds it again later.

    Args:
        storage_config: the process's ranks and model, and the user's settings.
        kwargs: unused; accepts arguments that later versions of SGLang pass.

    Raises:
        offload.ConfigError: a name is unknown, or a value invalid; the text names it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self.settings: Settings = Settings.read(extra)
        self.faults: FaultLog = FaultLog("HiCache", _log)
        self._config = storage_config
        self.settings.model_name(storage_config.model_name)  # check the model now, not when a pool is known
        self._pool: _Pool | None = None
        self._why_not: AdapterError = NoPool()
        if not extra.get("interface_v1"):
            _log.warning("interface_v1 is not set in %s: each page takes one more copy, through a tensor", SECTION)

    # --- start and end --------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Open the engine for the pages of this pool.

        Waits until each tier is there or known to be away. Before any request a pattern is stored from a free page and
        loaded into it. If its planes come back in other places, that is logged, and nothing is stored nor loaded: any
        page that came back would be wrong.

        Raises:
            offload.ConfigError: a setting is invalid for such pages.
            ValueError: the same. If the engine does not open for another reason, that is logged, and no page is there.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        _, run_bytes = mem_pool_host.get_page_buffer_meta(torch.arange(mem_pool_host.page_size))
        naming = PageNaming(
            model=self.settings.model_name(untagged(self._config.model_name, mem_pool_host)),
            dtype=self.settings.dtype_name(mem_pool_host.dtype),
            layout=layout_text(mem_pool_host, run_bytes),
            ranks=self._config,
            tenant=self.settings.tenant,
        )
        planes = pool_planes(mem_pool_host)
        source = HostPages(sum(run_bytes), () if planes is None else planes.plane_names)
        config = attrs.evolve(self.settings.engine_config(source.block_bytes), source=source)
        engine = from_thread.open_engine(config).start()
        try:
            pool = _Pool(mem_pool_host, planes, naming, PageStorage(engine, source, self.settings, self.faults))
            self._check_layout(pool, engine)
        except LayoutCheckFailed as error:
            self._why_not = WrongLayout(f"nothing is stored, and nothing loaded: {error}")
            self.faults.note("start", self._why_not)
            engine.close()
        except BaseException:
            engine.close()
            raise
        else:
            self._pool = pool

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Accept the pool of KV pages, which is registered already.

        Refuse all others.

        Raises:
            offload.ConfigError: it is another one, such as the states of a hybrid model.
        """
        if str(host_pool_name) != "kv":
            raise ConfigError(
                "hicache_storage_backend",
                "dynamic",
                f"stores only pages of KV, not of SGLang's pool {host_pool_name}",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def close(self) -> None:
        """Close the engine. Calls find nothing until a pool is registered again."""
        pool, self._pool = self._pool, None
        self._why_not = NoPool()
        if pool is not None:
            pool.storage.close()
            _log.info("HiCache: %s", self.faults)

    def clear(self) -> None:
        """Raise: clearing is not supported, as others use the pages, too.

        Raises:
            NotImplementedError: always. SGLang then answers that it has cleared nothing.
        """
        raise NotImplementedError("the tiers are shared with other processes: they are not cleared from here")

    def report_status(self) -> dict[str, Any]:
        """Return counts of completed work and of failures, and the unavailable tiers."""
        if self._pool is None:
            return {"is_open": False, "counts": self.faults.snapshot(), **self.faults.report()}
        return {"is_open": True, **self._pool.storage.report()}

    # --- lookups --------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of leading pages that are stored."""
        pool = self._pool
        if pool is None:
            self.faults.note("lookup", self._why_not, len(keys))
            return 0
        # SGLang asks for pages and then reads them by the configured interface, so they are named for it.
        return pool.storage.find(pool.naming.keys(keys, self._form)) if keys else 0

    # --- pages of the pool ----------------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages into the pool.

        No page after a missing one is copied.

        Returns:
            Whether each page was copied.
        """
        try:
            pool = self._open_pool()
            return pool.storage.load(pool.naming.keys(keys), pool.lend(keys, host_indices)) if keys else []
        except Exception as error:
            self.faults.note("load", error, len(keys))
            return [False] * len(keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages out of the pool. Returns whether each page is stored."""
        try:
            pool = self._open_pool()
            return pool.storage.store(pool.naming.keys(keys), pool.lend(keys, host_indices)) if keys else []
        except Exception as error:
            self.faults.note("store", error, len(keys))
            return [False] * len(keys)

    # --- flat pages -----------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        """Copy a page into this tensor, and return that.

        ``None`` if it is not stored.
        """
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Copy pages into these tensors.

        Returns:
            The tensor of each page, or ``None`` if the page, or one before it, is missing.
        """
        try:
            tensors = list(target_locations or ())
            if len(tensors) != len(keys):
                raise WrongPages(f"{len(tensors)} tensors for {len(keys)} pages")
            pool = self._open_pool()
            loaded = pool.storage.load(pool.naming.keys(keys, "flat"), pool.lend_tensors(tensors)) if keys else []
            return [tensor if has_come else None for tensor, has_come in zip(tensors, loaded, strict=True)]
        except Exception as error:
            self.faults.note("load", error, len(keys))
            return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store the content of this tensor. Returns whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store the contents of these tensors. Returns whether all are stored."""
        try:
            tensors = list(values or ())
            if len(tensors) != len(keys):
                raise WrongPages(f"{len(tensors)} tensors for {len(keys)} pages")
            pool = self._open_pool()
            return all(pool.storage.store(pool.naming.keys(keys, "flat"), pool.lend_tensors(tensors))) if keys else True
        except Exception as error:
            self.faults.note("store", error, len(keys))
            return False

    # --- below ----------------------------------------------------------------------------------------------------

    @property
    def _form(self) -> Form:
        return "runs" if (self._config.extra_config or {}).get("interface_v1") else "flat"

    def _open_pool(self) -> _Pool:
        if self._pool is None:
            raise self._why_not
        return self._pool

    def _check_layout(self, pool: _Pool, engine: from_thread.Engine) -> None:
        """Send a pattern through a store and a load.

        Raises:
            offload.LayoutCheckFailed: its planes came back in other places. A check without a result is only logged.
        """
        layout = pool.naming.title(self._form)
        try:
            with free_page(pool.memory) as page:
                why = self._try_page(pool, engine, page, layout)
        except LayoutCheckFailed:
            raise
        except Exception as error:
            why = f"{error!r}"
        if why:
            self.faults.count("start", "layout not checked", why)

    def _try_page(self, pool: _Pool, engine: from_thread.Engine, page: torch.Tensor | None, layout: str) -> str:
        """Check the layout with a free page.

        Returns why the check has no result, or nothing.
        """
        if pool.planes is None:
            return f"the axes of a pool with layout {getattr(pool.memory, 'layout', None)} are unknown"
        if page is None:
            return "no page of the pool is free"
        first = int(page[0])
        store: Callable[[], LentPages]
        load: Callable[[], LentPages]
        if self._form == "runs":
            store = load = partial(pool.lend_pages, 1, page)
        else:
            store = partial(_flat, pool, first)
            load = partial(FlatPage, pool.memory, pool.planes, first, pool.storage.source.block_bytes)
        number = first // pool.memory.page_size
        canary = PageCanary(pool.storage.source, pool.planes, number, store, load)
        try:
            return engine.check_layout(canary, layout, timeout=_LONGEST_CHECK).inconclusive
        finally:
            canary.end()


def _flat(pool: _Pool, first: int) -> LentPages:
    """Return the page with this first token as a flat page.

    SGLang passes pages like this without its zero-copy interface.
    """
    return pool.lend_tensors([pool.memory.get_data_page(first, flat=True).contiguous()])
