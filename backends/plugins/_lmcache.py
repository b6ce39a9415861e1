"""An L2 adapter of LMCache as a tier.

It has three descriptors, and is used by submit and query.

The parts of its L2AdapterInterface that are relied on, and no more:

* ``submit_store_task``, ``submit_lookup_and_lock_task`` and ``submit_load_task`` return an id at once, and read or
  write the objects that they are given until the task is complete.
* ``pop_completed_store_tasks`` and ``query_..._result`` report each task once, and do not report one that is not
  complete.
* A result is there before its descriptor is signalled. So: woken, reset the descriptor, ask for all outstanding tasks.
  An adapter that signals first is asked again after ``rescue_interval``, and the rescue is counted.
* A lookup locks the keys that it finds until ``submit_unlock``. Keys found after the first gap are unlocked at once;
  keys found for a caller that has left are unlocked when the answer comes.
* A store task fails as a whole.
* ``delete``, if an adapter has its own, returns nothing: it is asked before and after. It may block, so it runs in a
  thread.

Methods are called with the arguments that their signatures take: ``group_layout_descs`` comes and goes between
versions. No ``l1_memory_desc`` is offered: the host's memory is not one arena, so an adapter that must register one
(RDMA, NIXL) cannot be hosted.

Adapters are given keys, memory objects and layouts. If LMCache is loaded, as it is if the adapter's module imports it,
these are its own classes, since adapters may compare types and copy metadata. Otherwise they are look-alikes with the
same names and meanings, and LMCache need not be installed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from maru.eviction import EvictionPolicy

from ..abc import Capabilities, Key
from ..base.pages import pages_of
from ._config import HostConfig
from ._errors import PluginFault, PluginTypeError
from ._hosted import HostedTier
from ._operations import Completion, Kind
from ._salts import CacheSalts, salts_of
from .finding import L2_METHODS, accepted, check_call, missing_methods


@attrs.frozen
class ObjectKey:
    """The name of an object in an adapter."""

    chunk_hash: bytes
    """Content hash of the object: the block's key."""
    model_name: str
    """Name of the model; without an ``@``, which adapters join keys with."""
    kv_rank: int
    """Rank of this part of the cache."""
    object_group_id: int = 0
    """Group of layers."""
    cache_salt: str = ""
    """Tenant, if ``cache_salts`` of the host is set; else empty.

    Keys are salted already.
    """


@attrs.frozen
class Layout:
    """Layout of an object."""

    shapes: list[tuple[int, ...]]
    """One shape: the number of bytes."""
    dtypes: list[str]
    """One type: bytes."""


@attrs.frozen
class ObjectMetadata:
    """Facts about an object without its bytes."""

    address: int
    """Address of the first byte."""
    phy_size: int
    """Number of bytes it takes."""
    shape: tuple[int, ...]
    """Number of its bytes."""
    dtype: str = "uint8"
    """Type of the items: bytes."""
    ref_count: int = 1
    """Reference count; the object lives as long as its operation."""
    pin_count: int = 0
    """Pin count; the object is not pinned."""


class MemoryObject:
    """One page of a host's memory.

    Adapters read ``byte_array``, or write into it; it belongs to them until their task is complete.
    """

    def __init__(self, page: memoryview, address: int) -> None:
        """Make an object over one page."""
        self.byte_array: memoryview = page
        """The bytes, writable."""
        self.raw_data: memoryview = page
        """The bytes, writable."""
        self.data_ptr: int = address
        """Address of the first byte."""
        self.meta: ObjectMetadata = ObjectMetadata(address, page.nbytes, (page.nbytes,))
        """Metadata of the object."""
        self.metadata: ObjectMetadata = self.meta
        """Metadata of the object."""

    def __repr__(self) -> str:
        return f"<object of {self.byte_array.nbytes} bytes>"

    def get_size(self) -> int:
        """Return the number of bytes."""
        return self.byte_array.nbytes

    def get_physical_size(self) -> int:
        """Return the number of bytes."""
        return self.byte_array.nbytes

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape: the number of bytes."""
        return self.meta.shape

    def get_shapes(self) -> list[tuple[int, ...]]:
        """Return the only shape."""
        return [self.meta.shape]

    def is_valid(self) -> bool:
        """Return True: the object is valid as long as its operation."""
        return True

    @property
    def tensor(self) -> Any:
        """The bytes as a tensor, without a copy. Imports torch."""
        import torch

        return torch.frombuffer(self.byte_array, dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def raw_tensor(self) -> Any:
        """The bytes as a tensor, like :attr:`tensor`."""
        return self.tensor

    def ref_count_up(self) -> None:
        """Do nothing: the object lives as long as its operation."""

    def ref_count_down(self) -> None:
        """Do nothing: the object lives as long as its operation."""


def key_maker(model_name: str, kv_rank: int, salts: CacheSalts | None) -> Callable[[Key], Any]:
    """Return a function that makes an adapter's key of a block's key."""
    api: Any = sys.modules.get("lmcache.v1.distributed.api")
    make: Any = ObjectKey if api is None else api.ObjectKey
    if salts is None:
        return lambda key: make(chunk_hash=key, model_name=model_name, kv_rank=kv_rank)
    salt_of = salts.of
    return lambda key: make(chunk_hash=key, model_name=model_name, kv_rank=kv_rank, cache_salt=salt_of(key))


def object_maker() -> Callable[[memoryview, int], Any]:
    """Return a function that makes adapters' memory objects of pages."""
    management: Any = sys.modules.get("lmcache.v1.memory_management")
    if management is None:
        return MemoryObject

    import torch  # LMCache has imported it

    def make(page: memoryview, address: int) -> Any:
        tensor = torch.frombuffer(page, dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]
        metadata = management.MemoryObjMetadata(
            shape=tensor.shape, dtype=torch.uint8, address=address, phy_size=page.nbytes, ref_count=1
        )
        return management.TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None)

    return make


def layouts(block_bytes: int) -> dict[int, Any]:
    """Return the layouts of objects by group: there is one."""
    api: Any = sys.modules.get("lmcache.v1.distributed.api")
    described: Any = getattr(api, "MemoryLayoutDesc", None)
    if described is None:
        return {0: Layout([(block_bytes,)], ["uint8"])}

    import torch  # LMCache has imported it

    return {0: described(shapes=[torch.Size([block_bytes])], dtypes=[torch.uint8])}


def bits_of(bitmap: Any) -> list[bool]:
    """Return a bitmap as a list.

    A bitmap has ``test`` and a length (or ``size``), or is a sequence.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(bitmap, Sequence):
        return [bool(bit) for bit in bitmap]
    n = len(bitmap) if hasattr(type(bitmap), "__len__") else int(bitmap.size())
    return [bool(bitmap.test(at)) for at in range(n)]


_NEWS: Final = 4096
"""Notifications that are kept until the tier is used.

The effects of dropped ones are noticed when their keys are looked up.
"""

_CHANNELS: Final = {Kind.SET: "store", Kind.FIND: "lookup", Kind.GET: "load"}
_DESCRIPTORS: Final = {
    "store": "get_store_event_fd",
    "lookup": "get_lookup_and_lock_event_fd",
    "load": "get_load_event_fd",
}


class LMCacheTier(HostedTier):
    """An L2 adapter as a :class:`~backends.abc.Tier`.

    Open it by ``async with LMCacheTier(adapter, 4096) as tier``.

    Args:
        adapter: an object with the methods of LMCache's L2AdapterInterface. This tier owns it, and closes it in the
            end.
        block_bytes: size of every block.
        config: settings of the host.
        model_name: model name in the adapter's keys.
        kv_rank: rank in the adapter's keys.
        eviction: chooses the victims if there is a ``capacity_bytes``; :class:`~maru.eviction.AdaptiveLRFU` by default.

    Raises:
        PluginTypeError: the adapter lacks a method, or one cannot be called.
        ValueError: a size or name that makes no sense.
    """

    def __init__(
        self,
        adapter: object,
        block_bytes: int,
        config: HostConfig | None = None,
        *,
        model_name: str = "trio-offload",
        kv_rank: int = 0,
        eviction: EvictionPolicy[Key] | None = None,
    ) -> None:
        if "@" in model_name:
            raise ValueError(f"model_name is {model_name!r}, but must be without '@', which adapters join keys with")
        config = HostConfig() if config is None else config
        salts = salts_of(config, block_bytes)
        self._plugin = L2Plugin(adapter, block_bytes, key_maker(model_name, kv_rank, salts))
        super().__init__(self._plugin, block_bytes, config, eviction, salts)
        self._plugin.moment = lambda: self.registry.registrations
        self.adapter: object = adapter

    @property
    def tells(self) -> bool:
        """Whether the adapter takes a listener for its own deletions.

        It does if it has called its base class's ``__init__``; it may still not notify. Without a listener, deleted
        keys are noticed when they are looked up.
        """
        return self._plugin.tells

    def _apply_news(self) -> None:
        gone = self._plugin.gone
        while gone:
            self.registry.note_gone_by(*gone.popleft())


class L2Plugin:
    """An adapter as a :class:`~backends.plugins._operations.Plugin`."""

    deletes_by_call = True
    resets = False

    def __init__(self, adapter: object, block_bytes: int, key_of: Callable[[Key], Any]) -> None:
        missing = missing_methods(adapter, L2_METHODS)
        if missing:
            raise PluginTypeError(f"{adapter!r} is not an L2 adapter: it lacks {', '.join(missing)}")
        known: Any = adapter
        self._adapter = known
        self._key_of = key_of
        self._object_of = object_maker()
        self.name: str = type(adapter).__name__
        self.capabilities: Capabilities = Capabilities(pins=True, deletes=_deletes(adapter), per_key_outcomes=False)
        look_up: Any = self._adapter.submit_lookup_and_lock_task
        self._lookup_more = accepted(look_up, {"group_layout_descs": layouts(block_bytes)})
        check_call(look_up, f"{self.name}.submit_lookup_and_lock_task", [], **self._lookup_more)
        self.moment: Callable[[], int] = lambda: 0
        """Function that returns the moment of a notification.

        See :meth:`HostRegistry.note_gone_by`.
        """
        self.gone: deque[tuple[list[Key], int]] = deque(maxlen=_NEWS)
        """Keys that the adapter reports as deleted, and when.

        Its own threads append to it.
        """
        self.tells: bool = self._listen()

    def channels(self) -> Mapping[str, int]:
        """Return the adapter's three descriptors.

        Raises:
            PluginTypeError: they are not three different descriptors.
        """
        fds = {channel: getattr(self._adapter, method)() for channel, method in _DESCRIPTORS.items()}
        for channel, fd in fds.items():
            if isinstance(fd, bool) or not isinstance(fd, int) or fd < 0:
                raise PluginTypeError(f"{self.name}: {_DESCRIPTORS[channel]}() returned {fd!r}, not a descriptor")
        if len(set(fds.values())) < len(fds):
            raise PluginTypeError(f"{self.name} must have three different descriptors, but has {fds}")
        return fds

    def channel_of(self, kind: Kind) -> str:
        """Return the channel of this kind of operation."""
        return _CHANNELS[kind]

    def submit(self, kind: Kind, keys: Sequence[Key], buffers: Sequence[memoryview]) -> object:
        """Submit an operation, without waiting."""
        names = [self._key_of(key) for key in keys]
        if kind is Kind.FIND:
            return self._adapter.submit_lookup_and_lock_task(names, **self._lookup_more)
        addresses = pages_of(buffers).addresses
        objects = [self._object_of(page, address) for page, address in zip(buffers, addresses, strict=True)]
        if kind is Kind.SET:
            return self._adapter.submit_store_task(names, objects)
        return self._adapter.submit_load_task(names, objects)

    def poll(self, channel: str, outstanding: Sequence[int], completions: list[Completion]) -> None:
        """Append the completions.

        The descriptor was reset before: a signal after that wakes again.
        """
        if channel == "store":
            unreadable: Exception | None = None
            for number, result in self._adapter.pop_completed_store_tasks().items():
                try:
                    completions.append(Completion(channel, int(number), *_succeeded(result)))
                except Exception as exc:  # an item without an id must not lose the others that came with it
                    unreadable = exc
            if unreadable is not None:
                raise PluginFault(f"{self.name}: pop_completed_store_tasks has a task without an id") from unreadable
            return
        query = self._adapter.query_lookup_and_lock_result if channel == "lookup" else self._adapter.query_load_result
        failure: Exception | None = None
        for number in outstanding:
            try:
                bitmap = query(number)
            except Exception as exc:  # a task that cannot be asked for must not hold up the others
                failure = exc
                continue
            if bitmap is None:
                continue
            try:
                completions.append(Completion(channel, number, True, bits=bits_of(bitmap)))
            except (TypeError, AttributeError) as exc:
                completions.append(Completion(channel, number, False, f"{bitmap!r} is not a bitmap: {exc}"))
        if failure is not None:
            raise failure

    def unlock(self, keys: Sequence[Key]) -> None:
        """Release the locks of a lookup."""
        self._adapter.submit_unlock([self._key_of(key) for key in keys])

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete keys. In a thread: some adapters wait for it."""
        self._adapter.delete([self._key_of(key) for key in keys])

    def close(self) -> None:
        """Close the adapter. In a thread."""
        self._adapter.close()

    def _listen(self) -> bool:
        register = getattr(self._adapter, "register_listener", None)
        if not callable(register):
            return False
        try:
            register(_Listener(self))
        except Exception:  # its base class was not initialised, most likely
            return False
        return True


class _Listener:
    """A listener that an adapter calls in its own threads."""

    def __init__(self, plugin: L2Plugin) -> None:
        self._plugin = plugin

    def on_l2_keys_stored(self, keys: Sequence[Any], *more: object) -> None:
        """Do nothing: the host knows the keys it has stored."""

    def on_l2_keys_accessed(self, keys: Sequence[Any], *more: object) -> None:
        """Do nothing: the host has an order of use of its own."""

    def on_l2_keys_deleted(self, keys: Sequence[Any], *more: object) -> None:
        """Record the keys that were deleted, by request or not.

        It may be handled late, when the same key was stored again.
        """
        self._plugin.gone.append(([key.chunk_hash for key in keys], self._plugin.moment()))


def _deletes(adapter: object) -> bool:
    """Return whether an adapter has a ``delete`` of its own.

    That of LMCache's base class does nothing.
    """
    delete = getattr(type(adapter), "delete", None)
    return callable(delete) and getattr(delete, "__qualname__", "") != "L2AdapterInterface.delete"


def _succeeded(result: Any) -> tuple[bool, str]:
    """Return whether a store task succeeded, and an error text.

    A result is an object with ``is_successful``, or a plain truth value, depending on the version.
    """
    try:
        is_successful = getattr(result, "is_successful", None)
        return bool(is_successful() if callable(is_successful) else result), ""
    except Exception as exc:
        return False, f"{type(result).__name__} is not a result: {exc!r}"
