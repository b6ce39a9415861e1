"""The adapter that LMCache's controllers call.

It uses only the names of LMCache that :mod:`._lmcache` lists. In LMCache's configuration it is a ``plugin``, or, after
:func:`register`, of the type ``maru``::

    {"type": "plugin", "module_path": "offload.engines.lmcache", "class_name": "MaruL2Adapter",
     "adapter_params": {"server_url": "ipc:///run/user/1000/maru/maru.sock", "pool_size_gb": 4}}
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress, count
from typing import Any, Final, TypeVar

from .._guard import NOTHING, Hook, guard_faults, guarded, nothing
from ._cache import ObjectCache
from ._config import CacheConfig
from ._events import EventFd
from ._lmcache import (
    Bitmap,
    KeyEntry,
    KeyListPage,
    L1MemoryDesc,
    L2AdapterConfigBase,
    L2AdapterInterface,
    L2StoreResult,
    MemoryLayoutDesc,
    MemoryObj,
    ObjectKey,
    register_l2_adapter_factory,
    register_l2_adapter_type,
    registered_configs,
    registered_factories,
)
from ._memory import Span
from ._names import naming
from ._opening import LazyEngine
from ._operations import LookupOutcome, StoreOutcome
from ._residents import Residents
from ._tasks import TaskTable

R = TypeVar("R")

TYPE_NAME = "maru"
"""The type that :func:`register` adds to LMCache's registry."""


class MaruL2AdapterConfig(L2AdapterConfigBase):
    """The configuration of the adapter, as LMCache makes it."""

    def __init__(self, cache: CacheConfig) -> None:
        self.cache: CacheConfig = cache

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> MaruL2AdapterConfig:
        """Make the configuration from the parameters in LMCache's configuration.

        Raises:
            ValueError: an unknown key, or a value that cannot be; the text names it.
        """
        return cls(CacheConfig.from_dict(d))

    @classmethod
    def help(cls) -> str:
        """Describe each key of the configuration."""
        return f"L2 in the page store, or in the tiers of an engine:\n{CacheConfig.help()}"


_NOT_STORED: Final = L2StoreResult(False, 0)


def _unlock_again(adapter: MaruL2Adapter, keys: list[ObjectKey]) -> None:
    adapter._cache.unlock(keys)


def _status_unknown(adapter: MaruL2Adapter) -> dict[str, Any]:
    return {"type": type(adapter).__name__, "is_healthy": False, **guard_faults(adapter).report()}


_HOOKS: Final = {
    "get_store_event_fd": Hook(lambda adapter: adapter._store_event.fd),
    "get_lookup_and_lock_event_fd": Hook(lambda adapter: adapter._lookup_event.fd),
    "get_load_event_fd": Hook(lambda adapter: adapter._load_event.fd),
    # A task that could not begin: LMCache sees it end like any other.
    "submit_store_task": Hook(lambda one, *args: one._ended(one._stores, _NOT_STORED, one._store_event)),
    "submit_lookup_and_lock_task": Hook(
        lambda one, keys, *args: one._ended(one._lookups, Bitmap(len(keys)), one._lookup_event)
    ),
    "submit_load_task": Hook(lambda one, keys, *args: one._ended(one._loads, Bitmap(len(keys)), one._load_event)),
    # LMCache asks once for each signal, so signal again.
    "pop_completed_store_tasks": Hook(lambda adapter: {}, lambda adapter: adapter._store_event.signal()),
    "query_lookup_and_lock_result": Hook(nothing, lambda adapter, task: adapter._lookup_event.signal()),
    "query_load_result": Hook(nothing, lambda adapter, task: adapter._load_event.signal()),
    "submit_unlock": Hook(nothing, _unlock_again),
    "delete": NOTHING,
    "close": NOTHING,
    "list_l2_keys": Hook(lambda *args, **more: KeyListPage((), None), passes=(ValueError,)),
    "get_memory_tags": Hook(lambda adapter: adapter._tags),
    "report_status": Hook(_status_unknown),
}


@guarded(_HOOKS)
class MaruL2Adapter(L2AdapterInterface):
    """LMCache's second level in the page store, or in other tiers. Thread-safe.

    It connects when it is first needed, in a thread of its own, and retries as long as the server is away.

    Args:
        config: the adapter's configuration, or its parameters.
        l1_memory_desc: LMCache's first level, whose alignment rounds the sizes of objects up.
        more: unused; accepts arguments that later versions of LMCache add.

    Raises:
        ValueError: a parameter is invalid.
    """

    config_class_name = "MaruL2AdapterConfig"

    def __init__(
        self,
        config: MaruL2AdapterConfig | Mapping[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
        **more: object,
    ) -> None:
        if not isinstance(config, MaruL2AdapterConfig):
            config = MaruL2AdapterConfig.from_dict(config)
        super().__init__(max_capacity_bytes=config.cache.capacity_bytes)
        self.config: MaruL2AdapterConfig = config
        self._cache = ObjectCache(
            LazyEngine(config.cache.open),
            naming(config.cache.key_names, config.cache.weights_version),
            page_bytes=config.cache.chunk_size_bytes,
            page_bytes_of=config.cache.find_page_bytes,
            align_bytes=1 if l1_memory_desc is None else l1_memory_desc.align_bytes,
            timeout=config.cache.timeout,
        )
        self._tags = (config.affinity_tag,)
        ids = count(1)
        self._lock = threading.Lock()
        self._stores: TaskTable[L2StoreResult] = TaskTable(ids)
        self._lookups: TaskTable[Bitmap] = TaskTable(ids)
        self._loads: TaskTable[Bitmap] = TaskTable(ids)
        self._residents: Residents[ObjectKey] = Residents()
        self._store_event, self._lookup_event, self._load_event = EventFd(), EventFd(), EventFd()

    # --- descriptors ----------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Return a descriptor that is readable when a store has ended."""
        return self._store_event.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that is readable when a lookup has ended."""
        return self._lookup_event.fd

    def get_load_event_fd(self) -> int:
        """Return a descriptor that is readable when a load has ended."""
        return self._load_event.fd

    # --- down -----------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Copy objects into the tier.

        They are read until the task has ended.
        """
        spans = list(map(_span, objects))
        task = self._begin(self._stores)
        try:
            finish = partial(self._stored, task, list(keys), spans)
            self._cache.store(keys, spans, finish, describe=lambda at: _described(objects[at]))
        except Exception as error:
            self._fail(task, self._stores, _NOT_STORED, self._store_event, error)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of stores that ended since the last call."""
        with self._lock:
            return self._stores.take_all()

    def _stored(self, task: int, keys: list[ObjectKey], spans: list[Span], outcome: StoreOutcome) -> None:
        result = L2StoreResult(outcome.success, sum(span.used for span in compress(spans, outcome.written)))
        try:
            self._found(keys, spans, outcome.there)
        finally:
            self._finish(self._stores, task, result, self._store_event)

    def _found(self, keys: list[ObjectKey], spans: list[Span], there: Sequence[bool]) -> None:
        """Record objects that are in the tiers, stored by any process.

        LMCache measures its use by them.
        """
        objects = [(key, span.used) for key, span in compress(zip(keys, spans, strict=True), there)]
        with self._lock:
            new, forgotten = self._residents.add(objects)
        self._tell(self._notify_keys_stored, new)
        self._tell(self._notify_keys_deleted, forgotten)

    # --- back -----------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc] | None = None
    ) -> int:
        """Find the prefix of each row of keys, and lock it."""
        nothing_found = Bitmap(len(keys))
        with self._lock:
            task, began = self._lookups.begin(), self._residents.mark()
        try:
            layouts = group_layout_descs or {}
            self._cache.lookup(
                keys,
                partial(self._looked_up, task, began, list(keys)),
                object_bytes=lambda: max(map(_bytes_of, layouts.values()), default=0),
                describe=lambda at: _described_by(layouts.get(keys[at].object_group_id)),
            )
        except Exception as error:
            self._fail(task, self._lookups, nothing_found, self._lookup_event, error)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a lookup, once; ``None`` until it has ended."""
        with self._lock:
            return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Drop one lock of each key."""
        self._cache.unlock(keys)

    def _looked_up(self, task: int, began: int, keys: list[ObjectKey], outcome: LookupOutcome) -> None:
        found = _bitmap(outcome.found)
        try:
            with self._lock:
                # Keep objects that were stored since the lookup began: they may be there although the tiers reported a
                # miss.
                gone = self._residents.remove(compress(keys, outcome.gone), before=began)
            self._tell(self._notify_keys_deleted, gone)
        finally:
            self._finish(self._lookups, task, found, self._lookup_event)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Copy objects out of the tier.

        Their memory is written until the task has ended.
        """
        spans, nothing_loaded = list(map(_span, objects)), Bitmap(len(keys))
        task = self._begin(self._loads)
        try:
            finish = partial(self._loaded, task, list(keys), spans)
            self._cache.load(keys, spans, finish, describe=lambda at: _described(objects[at]))
        except Exception as error:
            self._fail(task, self._loads, nothing_loaded, self._load_event, error)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a load, once; ``None`` until it has ended."""
        with self._lock:
            return self._loads.take(task_id)

    def _loaded(self, task: int, keys: list[ObjectKey], spans: list[Span], loaded: list[bool]) -> None:
        came = _bitmap(loaded)
        try:
            hits = list(compress(keys, loaded))
            if hits:
                self._found(keys, spans, loaded)
                self._guarded(self._notify_keys_accessed, hits)
        finally:
            self._finish(self._loads, task, came, self._load_event)

    # --- away -----------------------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and wait for it up to the lookup timeout.

        Locked objects stay, and keep their locks.
        """
        gone = self._cache.delete(keys)
        with self._lock:
            removed = self._residents.remove(compress(keys, gone))
        self._tell(self._notify_keys_deleted, removed)

    def close(self) -> None:
        """End all tasks, close the engine and the descriptors. Idempotent."""
        try:
            self._cache.close()
        finally:
            for event in (self._store_event, self._lookup_event, self._load_event):
                event.close()

    # --- resident objects ------------------------------------------------------------------------------------------

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Return a page of the resident objects that this process knows.

        Raises:
            ValueError: the page size is not positive, or the cursor is invalid.
        """
        with self._lock:
            page = self._residents.page(page_size, cursor, model_name)
        entries = tuple(KeyEntry(key.to_encoded_object_key(), size) for key, size in page.entries)
        return KeyListPage(entries, page.cursor)

    def get_memory_tags(self) -> tuple[str, ...]:
        """Return the tag of the first-level memory that this adapter serves.

        The configuration names it.
        """
        return self._tags

    def report_status(self) -> dict[str, Any]:
        """Return the adapter's health: stored and locked objects, and failures by name."""
        with self._lock:
            stored = len(self._residents)
            under_way = {
                "store": self._stores.under_way,
                "lookup": self._lookups.under_way,
                "load": self._loads.under_way,
            }
        usage = self.get_usage()
        return {
            "type": type(self).__name__,
            **self._cache.report(),
            "stored_object_count": stored,
            "current_size_bytes": usage.total_bytes_used,
            "max_capacity_bytes": usage.total_capacity_bytes,
            "tasks_under_way": under_way,
        }

    # --- below ----------------------------------------------------------------------------------------------------

    def _fail(self, task: int, tasks: TaskTable[R], result: R, event: EventFd, error: Exception) -> None:
        """End a task that could not begin, or not deliver its result."""
        with contextlib.suppress(Exception):
            self._cache.faults.note("submit", error)
        self._finish(tasks, task, result, event)

    def _ended(self, tasks: TaskTable[R], result: R, event: EventFd) -> int:
        """Return a task that has ended with this result."""
        task = self._begin(tasks)
        self._finish(tasks, task, result, event)
        return task

    def _begin(self, tasks: TaskTable[Any]) -> int:
        with self._lock:
            return tasks.begin()

    def _finish(self, tasks: TaskTable[R], task: int, result: R, event: EventFd) -> None:
        # The result first: LMCache asks once for each signal, and would wait for the next one.
        with self._lock:
            tasks.finish(task, result)
        event.signal()

    def _tell(self, notify: Callable[[list[ObjectKey], list[int]], None], objects: list[tuple[ObjectKey, int]]) -> None:
        if objects:
            keys, sizes = zip(*objects, strict=True)
            self._guarded(notify, list(keys), list(sizes))

    def _guarded(self, notify: Callable[..., None], *args: object) -> None:
        """Call a listener.

        If it raises, only count the fault, so that the task still ends.
        """
        try:
            notify(*args)
        except Exception as error:
            self._cache.faults.note("notify", error)


def register() -> None:
    """Add the type ``maru`` to LMCache's own registry. Idempotent.

    It is used as ``--l2-adapter '{"type": "maru", ...}'``. Call it in the process of LMCache's server before its
    arguments are read.

    Raises:
        ValueError: another adapter has that name.
    """
    if registered_configs.get(TYPE_NAME) is MaruL2AdapterConfig:
        return
    if TYPE_NAME in registered_factories:
        raise ValueError(f"LMCache already has an adapter of the type {TYPE_NAME!r}")
    register_l2_adapter_type(TYPE_NAME, MaruL2AdapterConfig)
    register_l2_adapter_factory(TYPE_NAME, _make)


def _make(config: L2AdapterConfigBase, l1_memory_desc: L1MemoryDesc | None = None) -> L2AdapterInterface:
    assert isinstance(config, MaruL2AdapterConfig)
    return MaruL2Adapter(config, l1_memory_desc=l1_memory_desc)


def _span(item: MemoryObj) -> Span:
    described = _described(item)
    # If there are several dtypes, it is unknown where each begins in a padded object.
    dtype = described[1][0] if described is not None and len(described[1]) == 1 else None
    return Span(item.data_ptr, item.get_physical_size(), item.get_size(), item, dtype)


def _described(item: MemoryObj) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Return an object's shapes and dtypes; ``None`` if it is only bytes."""
    try:
        shapes: Sequence[Any] = item.get_shapes()
        dtypes: Sequence[Any] = item.get_dtypes()
    except (AssertionError, ValueError):  # LMCache's own objects without dtypes raise these.
        return None
    return None if None in dtypes else (shapes, dtypes)


def _described_by(layout: MemoryLayoutDesc | None) -> tuple[Sequence[Any], Sequence[Any]] | None:
    return None if layout is None else (layout.shapes, layout.dtypes)


def _bytes_of(layout: MemoryLayoutDesc) -> int:
    """Return the bytes of an object of this layout, without padding."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))


def _bitmap(truths: Any) -> Bitmap:
    bits = Bitmap(len(truths))
    for at, truth in enumerate(truths):
        if truth:
            bits.set(at)
    return bits
