"""A tier of fixed slots: a block pool over a storage.

The :class:`~backends.base.blocks.BlockPool` decides, the :class:`Storage` copies, and the tier between them is thin.
The steps of a store are

    reserve (slots staged) -> transfer (copy in a thread, checksums there too) -> register, on the trio thread

so that a key is found only once all of its bytes are there. A transfer that is cancelled, or whose end is unproven,
registers nothing and leaves its slots staged until `release`, which a caller that quarantines it does not call.

A pin, a get, a put and a register count as a use for the eviction policy. Copying a block to another tier does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, Protocol, TypeVar, TypeVarTuple

import trio

from maru.eviction import EvictionPolicy
from maru.exception_groups import holds

from .._errors import BlockSizeError, CapacityError, Unproven
from ..abc import (
    DUPLICATE,
    EVICTED,
    STORED,
    Deletion,
    Destination,
    ExternalBlocks,
    Failed,
    Key,
    Missed,
    Outcome,
    RoomRequest,
    Source,
)
from ._unproven import kept_if_unproven
from .blocks import BlockPool
from .copying import StoreCopy, deliver, load_pages, unequal
from .in_place import INLINE_BYTES as INLINE_BYTES
from .in_place import PORTION_BYTES as PORTION_BYTES
from .in_place import CopiesInPlace
from .keys import check_keys
from .pages import Pages, check_apart, checksums, copy_and_sum, copy_pages, new_pages, pages_of
from .pooled import REJECTED, Lease, PooledTier
from .threads import run_in_thread, run_in_thread_to_the_end

_DAMAGED = Missed("damaged")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Storage(Protocol):
    """The bytes of slots, which are numbered from 0.

    The caller owns every column of numbers that it passes.
    """

    @property
    def block_bytes(self) -> int:
        """Size of every slot, in bytes."""
        ...

    def pages(self, slots: Sequence[int]) -> Pages | None:
        """Return the addresses of these slots, or ``None``. Never blocks.

        ``None`` if a slot is not one run of host memory.
        """
        ...

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy slots to pages of their size, in a copy thread.

        It returns when the copy is over.
        """
        ...

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to slots of their size, in a copy thread.

        It returns when the copy is over.
        """
        ...


class SlotTier(PooledTier[BlockPool]):
    """A :class:`~backends.abc.Source` and a :class:`~backends.abc.Tier` of fixed slots.

    All methods are called on one thread (that of the trio run whose pipelines use it), except :meth:`copy_out`.

    Args:
        capacity: number of slots of the storage that belong to the tier.
        storage: the storage of their bytes.
        first: the number of the first slot.
        checksums: keep an xxh3-64 of each block, and verify it when it is loaded or copied elsewhere. A block that the engine
            wrote into the device itself has none until it has passed through host memory.
        eviction: chooses the victims; LRU by default.
    """

    inline_bytes = INLINE_BYTES

    def __init__(
        self,
        capacity: int,
        storage: Storage,
        *,
        first: int = 0,
        checksums: bool = True,
        eviction: EvictionPolicy[Key] | None = None,
    ) -> None:
        self.pool: BlockPool = BlockPool(capacity, eviction, first=first)
        self.block_bytes: int = storage.block_bytes
        self.checksums = checksums
        """Whether blocks are verified when they are loaded."""
        self._storage = storage
        self._sums: dict[int, int] = {}  # slot -> xxh3-64 of its bytes, if known
        self._by_engine: set[int] = set()  # staged by `stage`
        self._in_place = CopiesInPlace()
        self._loaded = 0
        self._missed = {"gone": 0, "damaged": 0}

    def __len__(self) -> int:
        return len(self.pool)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.pool)} of {self.pool.capacity} blocks of {self.block_bytes} bytes>"

    # --- the engine's side ----------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self.pool.free

    def external(
        self, ids: Sequence[int], keys: Sequence[Key], depths: Sequence[int | None] | None = None
    ) -> ExternalBlocks:
        """Return blocks that the engine keeps, by slot number and key.

        The engine keeps them alive until the handle has settled.

        The tier neither holds nor releases them. ``depths`` is the index of each block in its prefix; see
        :class:`backends.abc.Blocks`.
        """
        ids = list(map(index, ids))
        self._check_ids(ids)
        return ExternalBlocks(self, keys, ids, depths)

    def put(self, key: Key, data: bytes | bytearray | memoryview) -> bool:
        """Register one block that an engine wrote.

        A full tier evicts a block that is not held. For tests, and blocks in host memory: the calling thread, with its
        event loop, waits for a device. An engine stores there in a thread of its own.

        Returns:
            Whether it is new: ``False`` means that the key was there, and its bytes were not changed.

        Raises:
            TypeError: the key is not ``bytes``.
            ValueError: the key is longer than any tier takes.
            BlockSizeError: ``data`` is not ``block_bytes`` long.
            CapacityError: every block is held, or the eviction policy rejects this one.
        """
        check_keys((key,))
        view = memoryview(data).cast("B")
        if view.nbytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, view.nbytes)
        if self.pool.contains((key,)):
            self.pool.use((key,))
            self.pool.note_duplicates(1)
            return False
        slots = self.pool.take_at_once((key,))
        if slots is None or slots[0] == EVICTED:
            raise CapacityError(f"{self!r} has no room: {'all blocks are held' if slots is None else REJECTED.reason}")
        try:
            pages = self._storage.pages(slots)
            if pages is not None:
                pages[0][:] = view
            else:
                pages = pages_of([bytearray(view)])
                with kept_if_unproven(pages):
                    self._storage.copy_in(slots, pages)
            if self.checksums:
                self.note_checksums(slots, checksums(pages))
        except BaseException as error:
            if not holds(error, Unproven):  # otherwise the copy may still write to the slots: they are not used again
                self.pool.give_back(slots)
            raise
        self.pool.register((key,), slots)
        return True

    def get(self, key: Key) -> bytes | None:
        """Return a verified copy of one block, or ``None``.

        ``None`` if the block is not here (any more). For tests, and blocks in host memory: the calling thread waits for
        a device, as in :meth:`put`.
        """
        refs = self.pool.upgrade((key,))
        if refs[0] == EVICTED:
            self._missed["gone"] += 1
            return None
        try:
            pages = self._storage.pages(refs)
            if pages is None:
                pages = new_pages(1, self.block_bytes)
                with kept_if_unproven(pages):
                    self._storage.copy_out(refs, pages)
            data = bytes(pages[0])
            sums = checksums(pages) if self.checksums else None
            if self._verify(refs, sums):
                self.forget_damaged((key,), refs)
                return None
            self.pool.use((key,))  # before its release, which may serve a waiting request with this very block
        finally:
            self.pool.release(refs)
        self._loaded += 1
        return data

    def stage(self, n: int) -> list[int]:
        """Stage ``n`` slots for an engine to write to, ascending.

        End with :meth:`register` or :meth:`unstage`.

        Raises:
            CapacityError: too many blocks are held.
        """
        slots = self.pool.take_at_once([b""] * n) if n <= self.pool.capacity else None
        if slots is None or EVICTED in slots:
            self.pool.give_back(slots or ())
            raise CapacityError(f"{self!r} has no room for {n} blocks: the others are held")
        self._by_engine.update(slots)
        return slots

    def register(self, slots: Sequence[int], keys: Sequence[Key]) -> list[Outcome]:
        """Register staged slots that the engine has written.

        Return stored, or duplicate for a slot that is free again.

        Raises:
            TypeError: a key is not ``bytes``. The slots stay staged, here and below.
            ValueError: a slot that was not staged, or named twice; not one key per slot; a key longer than any tier takes.
        """
        check_keys(keys)
        if len(keys) != len(slots):
            raise ValueError(f"{len(keys)} keys but {len(slots)} slots")
        self._unstage(slots)
        if self.checksums:
            pages = self._storage.pages(slots)
            if pages is None:
                self._forget_checksums(slots)
            else:
                self.note_checksums(slots, checksums(pages))
        outcomes: list[Outcome] = [STORED] * len(keys)
        for position in self.pool.register(keys, slots):
            outcomes[position] = DUPLICATE
        return outcomes

    def unstage(self, slots: Sequence[int]) -> None:
        """Give staged slots back.

        Raises:
            ValueError: a slot that was not staged, or named twice.
        """
        self._unstage(slots)
        self.pool.give_back(slots)

    # --- Source ---------------------------------------------------------------------------------------------------

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Return the addresses of these blocks, if in host memory."""
        return self._storage.pages(refs)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position."""
        self._storage.copy_out(refs, pages)

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> list[int | None]:
        """Return the xxh3-64 of each block as it was stored, if known.

        Copies to another place compare it.

        It is not known for a slot that is not found by its key, since an engine may be writing it. A damaged slot has a
        value that no checksum has.
        """
        sums = self._sums
        if not sums and not self.pool.has_doomed:
            return [None] * len(keys)
        slots = self.pool.slots(keys)
        if slots == list(refs):
            return list(map(sums.get, slots))
        pairs = zip(slots, refs, strict=True)
        return [sums.get(ref) if slot == ref else -1 if self.pool.is_doomed(ref) else None for slot, ref in pairs]

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Drop damaged blocks; see :meth:`backends.abc.Source.forget_damaged`."""
        self._missed["damaged"] += len(keys)
        self.pool.forget(keys, refs)

    # --- Tier -----------------------------------------------------------------------------------------------------

    async def _load(self, lease: Lease, destination: Destination, there: Pages | None) -> Mapping[int, Missed | Failed]:
        refs, here, summed = lease.refs, self._storage.pages(lease.refs), self.checksums
        if here is not None:
            sums = await load_pages(
                here, destination, there, summed, self._in_place, run=self.to_the_end, inline_bytes=self.inline_bytes
            )
        else:
            sums = await self.to_the_end(_load, self._storage, refs, destination, there, summed)
        return dict.fromkeys(self._verify(refs, sums), _DAMAGED)

    def load_from_thread(self, lease: Lease, there: Pages, deadline: float) -> bool:
        """Copy leased blocks and verify them, in any thread.

        See :class:`backends.base.direct.DirectTier`.
        """
        if there.page_bytes != self.block_bytes or not lease.is_held:
            return False
        slots = lease.refs
        here = self._storage.pages(slots)
        if here is None:
            return False
        if not self.checksums:
            copy_pages(there, here)
            return True
        return not self._verify(slots, copy_and_sum(there, here))

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys. Cancelled, it deletes nothing.

        A held key is ``PINNED`` and stays.
        """
        await trio.lowlevel.checkpoint()
        return self.pool.delete(keys)

    def _room(self) -> tuple[int, int]:
        size = self.block_bytes
        return self.pool.capacity * size, (self.pool.capacity - self.pool.free) * size

    # --- running copies, which a subclass may override -------------------------------------------------------------

    async def off_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a store's copy; cancelled, return at once."""
        return await run_in_thread(fn, *args)

    async def to_the_end(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a load's copy; cancelled, return when it is over."""
        return await run_in_thread_to_the_end(fn, *args)

    # --- helpers --------------------------------------------------------------------------------------------------

    async def write(
        self, source: Source, refs: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Copy blocks of a source into staged slots.

        Up to ``PORTION_BYTES`` in place, without a checkpoint.

        A block that is damaged in its source fails alone.
        """
        copy, here = StoreCopy(source, keys, refs, summed=self.checksums), self._storage.pages(slots)
        if here is not None:
            failures = await copy.into(here, self._in_place, self.off_thread, self.inline_bytes)
        else:
            await self.off_thread(_store, copy, self._storage, slots)
            failures = copy.settle()
        if self.checksums:
            self.note_checksums(slots, copy.sums)
        return failures

    def note_checksums(self, slots: Sequence[int], sums: Sequence[int]) -> None:
        """Record the checksums of the bytes just written to these slots."""
        self._sums.update(zip(slots, sums, strict=True))

    def _forget_checksums(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._sums.pop(slot, None)

    def _verify(self, slots: Sequence[int], sums: Sequence[int] | None) -> list[int]:
        """Return the positions of damaged blocks, by the checksums of their bytes."""
        return [] if sums is None else unequal(list(map(self._sums.get, slots)), sums)

    def _check(self, request: RoomRequest) -> int:
        if request.block_bytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, request.block_bytes)
        return 1

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.pool.capacity:
            raise ValueError(f"{self!r} has no block {min(ids) if min(ids) < 0 else max(ids)}")

    def _unstage(self, slots: Sequence[int]) -> None:
        staged = set(slots)
        if len(staged) != len(slots) or not staged <= self._by_engine:
            raise ValueError(f"not all of these slots are staged in {self!r}: {sorted(staged - self._by_engine)[:4]}")
        self._by_engine -= staged


# Work of a copy thread if slots are not in host memory: their storage copies.


def _store(copy: StoreCopy, storage: Storage, slots: Sequence[int]) -> None:
    for positions, pages in copy.portions():
        with kept_if_unproven(pages):
            storage.copy_in([slots[at] for at in positions], pages)
        copy.verify(positions, pages)


def _load(
    storage: Storage, slots: Sequence[int], destination: Destination, there: Pages | None, summed: bool
) -> list[int] | None:
    here = new_pages(len(slots), storage.block_bytes) if there is None else there
    with kept_if_unproven(here):
        storage.copy_out(slots, here)
    if there is not None:
        return checksums(there) if summed else None
    return deliver(here, destination, 0, None, summed)


class PagesDestination(Destination):
    """A destination over host memory of the caller."""

    def __init__(self, pages: Pages) -> None:
        check_apart(pages)
        self._pages = pages

    @classmethod
    def over(cls, buffers: Iterable[object]) -> PagesDestination:
        """Return a destination over writable buffers of one size.

        There is one per block.

        Raises:
            TypeError: one buffer in place of a list, or an item that is no buffer.
            ValueError: the buffers differ in size, or one of them is read-only.
            RepeatedPlaces: two of them share memory.
        """
        return cls(pages_of(_listed(buffers)))

    @property
    def block_bytes(self) -> int:
        """Size of every place, in bytes."""
        return self._pages.page_bytes

    def __len__(self) -> int:
        return len(self._pages)

    def views(self) -> Pages:
        """Return the addresses of the places."""
        return self._pages

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into the places from ``start`` on."""
        copy_pages(self._pages.part(start, start + len(pages)), pages)


def _listed(buffers: Iterable[object]) -> list[Any]:
    """Return the buffers as a list.

    A single buffer, which would count as a list of its items, is refused.
    """
    if isinstance(buffers, str | bytes | bytearray) or getattr(buffers, "ndim", 2) < 2:
        raise TypeError(f"buffers must be a list of buffers, one for each block, not one {type(buffers).__name__}")
    listed = list(buffers)
    for at, buffer in enumerate(listed):
        if hasattr(buffer, "data_ptr"):  # a torch tensor, which pages_of accepts
            continue
        try:
            memoryview(buffer)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"buffers[{at}] is {buffer!r:.80}, not a writable buffer") from None
    return listed
