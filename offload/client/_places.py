"""Places of this process that a daemon can copy from and to.

These are caches that it has mapped, and a staging area for all others.

Rule 1. A source whose tensors lie in :class:`SharedMemory`, or on a CUDA device, is registered when blocks of it are
        first stored or loaded, once for each session. The daemon then copies it in place.
Rule 2. Blocks of any other place pass through a staging area, which is such memory: one copy more, here.
Rule 3. A slot of the staging area is used again only when the daemon is done with it for certain.
Rule 4. A registration goes on when the load or store that began it is cancelled. So it is known which memory the daemon
        has taken: it is there for the next registration, or is given back.
Rule 5. A cache whose owner is garbage collected is given back at once. Collection may come in any thread, and in the
        middle of anything, so that it only schedules that in the trio thread.
Rule 6. A cache on a device that cannot be shared, or that the daemon cannot open, passes through the staging area as
        well. The reason is logged, once for each session.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import attrs
import msgspec
import trio

from backends.base.block_layout import TensorMemory
from backends.base.pages import Pages
from backends.base.threads import run_in_thread

from ..daemon._messages import CudaMemory, Registered, RegisterKVCache, TensorLayout, UnregisterKVCache
from ._connection import DaemonConnection, Session
from ._errors import DaemonTierFailed, DaemonUnavailable
from ._shared import SharedMemory, memory_of

STAGING_BYTES: Final = 32 << 20
"""Bytes of the staging area: more than a batch."""
_FEWEST: Final = 2
"""Fewest blocks of the staging area.

One is filled while the daemon stores the other.
"""
SPARE_BYTES: Final = 256 << 20
"""Most bytes of a large load's area kept for the next.

Memory that is mapped and was touched takes long to get.
"""
MAX_PLACES: Final = 32
"""Most caches that are registered at once; an engine has one."""

_log = logging.getLogger("offload.client")
_STAGED: Final = "blocks of a cache on a device pass through host memory, since the daemon cannot use its memory: %s"


@attrs.frozen(eq=False)
class CacheDescription:
    """Tensors of a cache, and the memory that they lie in."""

    tensors: Sequence[TensorLayout]
    """Tensors, whose ``memory`` is a position in one of the next two."""
    memories: Sequence[SharedMemory] = ()
    cuda: Sequence[CudaMemory] = ()


class SharedPlace(Protocol):
    """Place that can be registered and is no :class:`~backends.device.DeviceTier`.

    Recognised by the method.
    """

    def description(self) -> CacheDescription:
        """Return the tensors and memories of its blocks."""
        ...


def describe(place: Any) -> CacheDescription | Callable[[], CacheDescription | None] | None:
    """Describe the memory of a place that a daemon can map.

    ``None`` for a place that it cannot. For memory on a device, return a function that does so, for a thread: it asks
    the driver.
    """
    if hasattr(place, "description"):
        description: CacheDescription = place.description()
        return description
    lying, axes = getattr(place, "tensors", None), getattr(place, "block_axes", None)
    if lying is None or axes is None:
        return None
    if lying[0].device is not None:
        return partial(_describe_on_device, lying, axes)
    memories: list[SharedMemory] = []
    tensors: list[TensorLayout] = []
    for tensor, axis in zip(lying, axes, strict=True):
        shape, strides = list(tensor.shape), list(tensor.strides)
        extent = (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1) * tensor.item_bytes
        found = memory_of(tensor.address, extent)
        if found is None:
            return None
        memory, offset = found
        if memory not in memories:
            memories.append(memory)
        number = memories.index(memory)
        tensors.append(TensorLayout(number, offset, tensor.item_bytes, shape, strides, axis % len(shape)))
    return CacheDescription(tensors, memories)


def _describe_on_device(lying: Sequence[TensorMemory], axes: Sequence[int]) -> CacheDescription | None:
    from ..daemon._cuda import CannotShare, describe_cuda

    try:
        tensors, cuda = describe_cuda(lying, axes)
    except CannotShare as exc:
        _log.warning(_STAGED, exc)
        return None
    return CacheDescription(tensors, cuda=cuda)


@attrs.define(eq=False)
class _Registration:
    """One attempt to register a cache.

    It goes on when the load or store that began it is cancelled: rule 4.
    """

    session: Session
    over: trio.Event = attrs.field(factory=trio.Event)
    cache: int = 0
    """Number of the cache in its session; 0 if it is staged.

    The daemon cannot copy a staged cache in place.
    """
    error: Exception | None = None
    is_wanted: bool = True
    """Whether the cache is used when it is registered."""
    numbers: list[int] = attrs.field(factory=list)
    """Memories that were handed over, and not named to the daemon yet.

    Another attempt hands over only the others.
    """


@attrs.define(eq=False)
class _Entry:
    description: CacheDescription | Callable[[], CacheDescription | None] | None
    registration: _Registration | None = None


class Places:
    """The registered caches of one connection, and its staging area."""

    def __init__(self, connection: DaemonConnection, block_bytes: int, *, huge_pages: bool = True) -> None:
        self._connection = connection
        self._trio = trio.lowlevel.current_trio_token()
        self._entries: dict[weakref.ref[object], _Entry] = {}
        """Entries by owner.

        It works as a ``WeakKeyDictionary``, whose entries would go without notice.
        """
        self.staging: Staging = Staging(block_bytes, huge_pages=huge_pages)
        self._spare: Staging | None = None

    def take_area(self, slots: int) -> Staging:
        """Return an area with so many free slots, for one load alone."""
        spare = self._spare
        if spare is None or spare.slots < slots:
            return Staging(self.staging.block_bytes, slots, huge_pages=self.staging.huge_pages)
        self._spare = None
        return spare

    def give_back_area(self, area: Staging, session: Session) -> None:
        """Keep an area for the next load, or forget it.

        The daemon is done with it for certain.
        """
        unused: Staging | None = area
        if area.nbytes <= SPARE_BYTES and (self._spare is None or self._spare.slots < area.slots):
            unused, self._spare = self._spare, area
        if unused is not None:
            self.forget(unused, session)

    async def cache_of(self, place: object, session: Session) -> int | None:
        """Return the number of a place's cache in this session.

        ``None`` if the daemon cannot map it. No checkpoint if it is registered: a request follows, which is one.

        Raises:
            DaemonUnavailable: the session is over.
            DaemonRefused: the daemon does not take this cache.
        """
        entry = self._entries.get(weakref.ref(place))
        if entry is None:
            if len(self._entries) >= MAX_PLACES:
                return None
            entry = self._entries[weakref.ref(place, self._collected)] = _Entry(describe(place))
        if entry.description is None:
            return None
        registration = entry.registration
        if registration is None or registration.session is not session or registration.error is not None:
            handed_over = registration.numbers if registration and registration.session is session else []
            registration = entry.registration = _Registration(session, numbers=handed_over)
            self._connection.start(self._run, entry, registration)
        if not registration.over.is_set():  # two first stores at once register it once
            await registration.over.wait()
        if registration.error is not None:
            raise registration.error
        return registration.cache or None

    def forget(self, place: object, session: Session) -> None:
        """Unregister a cache that is not used any more."""
        self._drop(weakref.ref(place), session)

    def _collected(self, owner: weakref.ref[object]) -> None:
        """Unregister the cache of a collected owner: rule 5. Any thread."""
        with suppress(trio.RunFinishedError):
            self._trio.run_sync_soon(self._drop, owner, None)

    def _drop(self, owner: weakref.ref[object], session: Session | None) -> None:
        """Unregister the cache of this owner.

        Only if it is registered in this session; ``None``: in any session.
        """
        entry = self._entries.pop(owner, None)
        registration = None if entry is None else entry.registration
        if registration is not None and (session is None or registration.session is session):
            registration.is_wanted = False
            self._unregister(registration)

    def _unregister(self, registration: _Registration) -> None:
        is_there = registration.cache and registration.session is self._connection.session
        if is_there and not registration.is_wanted:
            self._connection.tell(lambda seq: UnregisterKVCache(seq, registration.cache))

    async def _run(self, entry: _Entry, registration: _Registration) -> None:
        try:
            registration.cache = await self._begin(entry, registration)
            self._unregister(registration)
        except Exception as exc:
            registration.error = exc
        except BaseException:
            registration.error = DaemonUnavailable(self._connection.url, "the connection was closed")
            raise
        finally:
            registration.over.set()

    async def _begin(self, entry: _Entry, registration: _Registration) -> int:
        """Register a cache. Return its number; 0: rule 6."""
        if callable(entry.description):
            entry.description = await run_in_thread(entry.description)
        description = entry.description
        if description is None:
            return 0
        try:
            return await self._register(description, registration)
        except DaemonTierFailed as exc:
            if not description.cuda:
                raise
            _log.warning(_STAGED, exc)
            return 0

    async def _register(self, description: CacheDescription, registration: _Registration) -> int:
        session, numbers = registration.session, registration.numbers
        tensors, cuda = list(description.tensors), list(description.cuda)
        if not cuda:
            try:
                for memory in description.memories[len(numbers) :]:
                    numbers.append(await self._connection.hand_over(memory.descriptor, session))
            except OSError as exc:
                raise DaemonUnavailable(self._connection.url, f"it did not accept the memory: {exc}") from exc
            tensors = [msgspec.structs.replace(tensor, memory=numbers[tensor.memory]) for tensor in tensors]
            registration.numbers = []  # the daemon takes them, and gives them back if it refuses
        registered = await self._connection.ask(
            lambda seq: RegisterKVCache(seq, tensors, cuda), Registered, session=session
        )
        session.block_bytes = registered.block_bytes
        return registered.cache


class Staging:
    """Shared memory that blocks of other places pass through.

    It is a place itself, made at its first use.
    """

    def __init__(self, block_bytes: int, slots: int = 0, *, huge_pages: bool = True) -> None:
        self.block_bytes = block_bytes
        self.huge_pages: bool = huge_pages
        """Whether its memory gets huge pages as far as available."""
        self.slots: int = slots or max(_FEWEST, STAGING_BYTES // max(1, block_bytes))
        """Blocks that pass through at once; further ones wait."""
        self._memory: SharedMemory | None = None
        self._free = list(range(self.slots))
        self._turn = trio.Lock()
        self._returned = trio.Event()

    def description(self) -> CacheDescription:
        """Return its description: one run of bytes for each block."""
        memory, size = self.memory, self.block_bytes
        return CacheDescription([TensorLayout(0, 0, 1, [self.slots, size], [size, 1], 0)], [memory])

    @property
    def nbytes(self) -> int:
        """Size of all slots in bytes."""
        return self.slots * self.block_bytes

    @property
    def memory(self) -> SharedMemory:
        """The memory, made at its first use."""
        if self._memory is None:
            self._memory = SharedMemory(self.nbytes, populate=True, huge_pages=self.huge_pages)
        return self._memory

    def pages(self, slots: Sequence[int]) -> Pages:
        """Return the addresses of these slots."""
        return self.memory.pages(self.block_bytes).at(slots)

    async def take(self, most: int, least: int = 1) -> list[int]:
        """Take ``least`` to ``most`` slots, waiting for them in turn.

        Cancelled, none is taken. A task that needs several takes them at once: two tasks with a part each would wait
        for one another.
        """
        async with self._turn:
            while len(self._free) < least:
                await self._returned.wait()
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Give back slots that the daemon is done with."""
        self._free += slots
        self._returned.set()
        self._returned = trio.Event()
