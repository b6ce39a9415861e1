"""The memory of engines, and all registered caches as one source.

An engine hands over the descriptor of its memory. It may be hostile, or be ended at any moment; its memory must not end
the daemon:

Rule 1. Mapped memory can never shrink: only a memfd that is sealed against it (``F_SEAL_SHRINK``), of ordinary pages,
    is mapped. A page that is gone under a mapping is a SIGBUS, which ends the process.
Rule 2. Any other file in memory, such as one in ``/dev/shm``, is read and written by calls. If it was cut off, the call
    is short: that block fails, and no other.
Rule 3. A session's mappings and open files are a share of this process's limits (:class:`Shares`), taken before, and
    given back with the last reference.
Rule 4. Memory is given back with the last reference to it. A running copy holds one, so ending a session never takes
    memory from under a copy, and a descriptor number is never used for another file while a thread still reads by it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

from backends.abc import DamagedBlock, Destination, ExternalBlocks, Key, Source
from backends.base.pages import Pages, copy_pages, new_pages
from backends.base.slots import Storage
from backends.base.threads import kept_if_unproven
from maru.base.all_bytes import read_all, write_all_at
from maru.base.budget import Budget, Door
from maru.base.errors import CannotMap
from maru.base.memory.memory import Memory
from maru.base.process_limits import ADDRESS_SPACE, DESCRIPTORS, MAPPINGS

from ._layout import BadLayout, CacheLayout
from ._messages import Refusal

_CACHE_SHIFT: Final = 32
"""Bits of a block's number in a reference, below the cache's number."""
_BLOCK_MASK: Final = (1 << _CACHE_SHIFT) - 1


_PIECES: Final = Budget(lambda: 1 << 20)
"""Budget for runs of bytes of all caches' blocks.

Each takes some 300 bytes when listed.
"""


class Shares:
    """Shares of engines and of each session in this process's limits.

    A context manager.
    """

    def __init__(self) -> None:
        self.descriptors: Door = DESCRIPTORS.open(4, each=0.5)
        self.mappings: Door = MAPPINGS.open(1, each=0.5)
        self.address_space: Door = ADDRESS_SPACE.open(1, each=0.5)
        self.pieces: Door = _PIECES.open(1, each=0.125)

    def __enter__(self) -> Shares:
        return self

    def __exit__(self, *exc: object) -> None:
        for door in (self.descriptors, self.mappings, self.address_space, self.pieces):
            door.close()


@contextlib.contextmanager
def granted(door: Door, session: Hashable, amount: int, unit: str) -> Iterator[Callable[[object], None]]:
    """Take a share for an object that the block makes.

    The block passes the object to the yielded function. The share is given back with the last reference to that object,
    since a copy may outlive its session; or at once if none was passed.

    Raises:
        Refusal: the session, or all of them, have as much as may be.
    """
    if not door.take(session, amount):
        raise Refusal(
            "full",
            f"{amount} {unit} exceed the bounds: this session has {door.held_by(session)} of at most {door.each}; all "
            f"sessions have {door.held} of at most {door.most}",
        )
    owned = False

    def keep(owner: object) -> None:
        nonlocal owned
        owned = True
        weakref.finalize(owner, door.give_back, session, amount).atexit = False

    try:
        yield keep
    finally:
        if not owned:
            door.give_back(session, amount)


class CacheStorage(Storage, Protocol):
    """The blocks of one registered cache."""

    block_bytes: int = 0
    """Size of every block, in bytes."""
    device: str = ""
    """UUID of the cache's device; empty for host memory."""

    def let_go(self) -> None:
        """Drop the memory; running copies keep it until they end."""
        return


class EngineMemory(Protocol):
    """Memory that an engine has handed over."""

    size: int

    def storage(self, layout: CacheLayout, memories: Sequence[EngineMemory]) -> CacheStorage:
        """Return the blocks of a cache whose first memory this is.

        The others are of the same kind.
        """
        ...


def adopt(descriptor: int, shares: Shares, session: Hashable) -> EngineMemory:
    """Return the memory for a descriptor.

    The descriptor is taken over, also when this raises.

    Raises:
        BadLayout: it is nothing that can be read and written.
        Refusal: the session, or all of them, have as much as may be.
    """
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size <= 0:
            raise BadLayout("this descriptor is not memory: use a memfd or a file that is not empty")
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise BadLayout("this descriptor must be open for reading and writing")
        if not _never_shrinks(descriptor, status.st_size):
            with granted(shares.descriptors, session, 1, "descriptors") as keep:
                file = FileMemory(os.dup(descriptor), status.st_size)
                keep(file)
            return file
        with (
            granted(shares.mappings, session, 1, "mappings") as keep,
            granted(shares.address_space, session, status.st_size, "bytes of address space") as keep_bytes,
        ):
            memory = Memory(descriptor, 0, status.st_size, write=True)
            keep(memory)
            keep_bytes(memory)
        return MappedMemory(memory)
    except (OSError, CannotMap) as exc:
        raise BadLayout(f"this memory cannot be used: {exc}") from exc
    finally:
        os.close(descriptor)


def _never_shrinks(descriptor: int, size: int) -> bool:
    """Return whether no process can take a page away: rule 1."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        return False
    if not seals & fcntl.F_SEAL_SHRINK or seals & fcntl.F_SEAL_WRITE:
        return False
    if size < 2 * mmap.PAGESIZE:
        return True
    # Huge pages may be used up when one is touched, which is a SIGBUS, too. They cannot be mapped from here on.
    with contextlib.suppress(CannotMap):
        Memory(descriptor, mmap.PAGESIZE, mmap.PAGESIZE, write=True)
        return True
    return False


# --- mapped -------------------------------------------------------------------------------------------------------------


class MappedMemory:
    """Memory that can never shrink, in the address space of the daemon."""

    def __init__(self, memory: Memory) -> None:
        self.memory: Memory = memory
        self.size: int = memory.length

    def storage(self, layout: CacheLayout, memories: Sequence[EngineMemory]) -> CacheStorage:
        """Return the blocks of a cache; see :class:`EngineMemory`.

        Blocks of several pieces are gathered by torch, which is imported here.
        """
        mapped = [memory.memory for memory in memories if isinstance(memory, MappedMemory)]
        if len(mapped) != len(memories):
            raise BadLayout("the tensors of one cache must be all in sealed memory, or all in files")
        if layout.is_one_run:
            return OneRun(mapped[layout.tensors[0].memory], layout)
        return TensorStorage(_host_tensors(layout, mapped), layout)


class OneRun(CacheStorage):
    """Blocks that are one run of mapped bytes each."""

    def __init__(self, memory: Memory, layout: CacheLayout) -> None:
        self.block_bytes: int = layout.block_bytes
        (plane,) = layout.layouts[0].planes
        self._memory = memory
        self._first = memory.address + layout.tensors[0].offset + plane.offset
        self._stride = plane.stride_bytes

    def pages(self, slots: Sequence[int]) -> Pages:
        """Return the pages of slots; see :class:`~backends.base.slots.Storage`."""
        first, stride = self._first, self._stride
        return Pages([first + slot * stride for slot in slots], self.block_bytes, self._memory)

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy slots to pages; see :class:`~backends.base.slots.Storage`."""
        copy_pages(pages, self.pages(slots))

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to slots; see :class:`~backends.base.slots.Storage`."""
        copy_pages(self.pages(slots), pages)


class TensorStorage(CacheStorage):
    """Blocks in torch tensors over mapped memory of an engine."""

    def __init__(self, tensors: Sequence[Any], layout: CacheLayout) -> None:
        from backends.device import DeviceTier

        self._tier = DeviceTier(tensors, block_axis=[tensor.block_axis for tensor in layout.tensors])
        self.block_bytes: int = layout.block_bytes

    def pages(self, slots: Sequence[int]) -> Pages | None:
        """Return the pages of slots; see :class:`~backends.base.slots.Storage`."""
        return self._tier.views(slots)

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy slots to pages; see :class:`~backends.base.slots.Storage`."""
        self._tier.copy_out(slots, pages)

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to slots; see :class:`~backends.base.slots.Storage`."""
        self._tier.into(slots).copy_in(0, pages)


def _host_tensors(layout: CacheLayout, memories: Sequence[Memory]) -> list[Any]:
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [
        torch.frombuffer(
            memories[tensor.memory].buffer(), dtype=kinds[tensor.item_bytes], offset=tensor.offset
        ).as_strided(tensor.shape, tensor.strides)
        for tensor in layout.tensors
    ]


# --- read and written by calls ------------------------------------------------------------------------------------------


class FileMemory:
    """Memory that may shrink at any moment: rule 2. Owns its descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor: int = descriptor
        self.size: int = size

    def __del__(self, close: Any = os.close) -> None:
        close(self.descriptor)

    def storage(self, layout: CacheLayout, memories: Sequence[EngineMemory]) -> CacheStorage:
        """Return the blocks of a cache; see :class:`EngineMemory`."""
        files = [memory for memory in memories if isinstance(memory, FileMemory)]
        if len(files) != len(memories):
            raise BadLayout("the tensors of one cache must be all in sealed memory, or all in files")
        return FileStorage(files, layout)


class FileStorage(CacheStorage):
    """Blocks in files, piece by piece."""

    def __init__(self, files: Sequence[FileMemory], layout: CacheLayout) -> None:
        self.block_bytes: int = layout.block_bytes
        self._pieces = [
            (files[tensor.memory], tensor.offset + plane.offset, plane.stride_bytes, plane.run_bytes)
            for tensor, planes in zip(layout.tensors, layout.layouts, strict=True)
            for plane in planes.planes
        ]

    def pages(self, slots: Sequence[int]) -> None:
        """Return ``None``: they are not mapped."""

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy slots to pages; see :class:`~backends.base.slots.Storage`.

        Raises:
            OSError: the file ends before a block does.
        """
        for slot, page in zip(slots, pages, strict=True):
            start = 0
            for file, offset, stride, size in self._pieces:
                read_all(file.descriptor, page[start : start + size], offset + slot * stride)
                start += size

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to slots; see :class:`~backends.base.slots.Storage`.

        Raises:
            OSError: the file ends before a block does.
        """
        for slot, page in zip(slots, pages, strict=True):
            start = 0
            for file, offset, stride, size in self._pieces:
                at = offset + slot * stride
                if os.fstat(file.descriptor).st_size < at + size:  # a write would make it longer again
                    raise OSError(f"the file of an engine ends before byte {at + size}")
                write_all_at(file.descriptor, page[start : start + size], at)
                start += size


# --- all of them --------------------------------------------------------------------------------------------------------


class Caches(Source):
    """All registered caches, as the one source of the daemon's engine.

    Only for the trio thread, except :meth:`copy_out`.
    """

    block_bytes: int = 0
    """Size of every block, in bytes."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._storages: dict[int, CacheStorage] = {}
        self._blocks: dict[int, int] = {}
        self._last = 0

    def __repr__(self) -> str:
        return f"<{len(self._storages)} registered caches>"

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, storage: CacheStorage, blocks: int) -> int:
        """Register a cache. Returns its number, which is never given twice."""
        self._last += 1
        self._storages[self._last] = storage
        self._blocks[self._last] = blocks
        return self._last

    def device_of(self, cache: int) -> str:
        """Return the UUID of a cache's device; empty for host memory."""
        storage = self._storages.get(cache)
        return "" if storage is None else storage.device

    def remove(self, cache: int) -> None:
        """Forget a cache. Running copies hold its memory until they end."""
        storage = self._storages.pop(cache, None)
        self._blocks.pop(cache, None)
        if storage is not None:
            storage.let_go()

    def blocks(
        self, cache: int, ids: Sequence[int], keys: Sequence[Key], depths: Sequence[int] | None
    ) -> ExternalBlocks:
        """Return blocks of a cache, which its engine keeps as they are.

        Raises:
            ValueError: there is no such block, or the columns do not fit together.
        """
        self._check(cache, ids)
        return ExternalBlocks(self, keys, [cache << _CACHE_SHIFT | block for block in ids], depths or None)

    def into(self, cache: int, ids: Sequence[int]) -> CacheBlocks:
        """Return blocks of a cache to load into.

        Raises:
            ValueError: there is no such block, or one is named twice.
        """
        self._check(cache, ids)
        if len(set(ids)) != len(ids):
            raise ValueError("a block of the cache is named twice")
        return CacheBlocks(self._storages[cache], list(ids))

    def _check(self, cache: int, ids: Sequence[int]) -> None:
        blocks = self._blocks.get(cache)
        if blocks is None:
            raise ValueError(f"there is no cache {cache}")
        if ids and max(ids) >= blocks:
            raise ValueError(f"cache {cache} has no block {max(ids)}")

    # --- Source ---------------------------------------------------------------------------------------------------

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Return the addresses of these blocks, if they have one.

        All of them must be mapped runs of registered caches.
        """
        by_cache = self._by_cache(refs)
        if any(cache not in self._storages for cache, _, _ in by_cache):
            return None  # the copy finds which blocks cannot be read, and fails those alone
        parts = [(self._storages[cache].pages(ids), at) for cache, at, ids in by_cache]
        if len(parts) == 1:
            return parts[0][0]
        addresses = [0] * len(refs)
        for pages, at in parts:
            if pages is None:
                return None
            for position, address in zip(at, pages.addresses, strict=True):
                addresses[position] = address
        return Pages(addresses, self.block_bytes, [pages for pages, _ in parts])

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into its page. Runs in a copy thread.

        Raises:
            DamagedBlock: its engine has cut a block off, or is gone. The caller copies the others one by one: a batch
                may be of several engines, and must not cost another one its blocks.
            UnreadableBlock: a device did not copy it; likewise.
        """
        for cache, at, ids in self._by_cache(refs):
            storage = self._storages.get(cache)
            try:
                if storage is None:
                    raise OSError("its engine is gone")
                storage.copy_out(ids, pages.at(at))
            except (OSError, RuntimeError) as exc:  # RuntimeError is torch's
                raise DamagedBlock(self, b"", f"not readable: {exc}") from exc

    def _by_cache(self, refs: Sequence[int]) -> list[tuple[int, Sequence[int], list[int]]]:
        """Return each cache's number, positions in the column, and blocks."""
        caches = {ref >> _CACHE_SHIFT for ref in refs}
        if len(caches) == 1:
            return [(caches.pop(), range(len(refs)), [ref & _BLOCK_MASK for ref in refs])]
        parts: list[tuple[int, Sequence[int], list[int]]] = []
        for cache in sorted(caches):
            at = [position for position, ref in enumerate(refs) if ref >> _CACHE_SHIFT == cache]
            parts.append((cache, at, [refs[position] & _BLOCK_MASK for position in at]))
        return parts


class CacheBlocks(Destination):
    """Blocks of a cache as a destination."""

    def __init__(self, storage: CacheStorage, ids: list[int]) -> None:
        self._storage = storage
        self._ids = ids

    @property
    def block_bytes(self) -> int:
        return self._storage.block_bytes

    @property
    def on_device(self) -> bool:
        return bool(self._storage.device)

    def __len__(self) -> int:
        return len(self._ids)

    def views(self) -> Pages | None:
        return self._storage.pages(self._ids)

    def copy_in(self, start: int, pages: Pages) -> None:
        self._storage.copy_in(self._ids[start : start + len(pages)], pages)

    def clear(self, positions: Sequence[int]) -> None:
        """Overwrite these blocks with zeros. Runs in a copy thread.

        Raises:
            OSError: their engine has cut off its memory, or a device does not copy. The others are zeros.
            Unproven: a device may still be copying.
        """
        zeros, error = new_pages(1, self.block_bytes), None
        for at in positions:  # one by one: it may have cut off the first one alone
            try:
                with kept_if_unproven(zeros):
                    self._storage.copy_in([self._ids[at]], zeros)
            except (OSError, RuntimeError) as exc:  # RuntimeError is torch's
                error = exc
        if error is not None:
            raise error
