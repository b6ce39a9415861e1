"""The contracts of a tier, and the values that cross them.

Four contracts, each with one to five methods:

* :class:`Source`: a pipeline reads blocks from it, in columns. A :class:`ChecksummedSource` also knows their checksums.
* :class:`TransferExecutor` and its :class:`Reservation`: a pipeline writes blocks into it.
* :class:`ReadableTier`: an executor that can be read back: looked up, pinned, loaded, deleted from. A :class:`Tier` knows
  without waiting what it contains; any other tier has to ask, a server for example.
* :class:`Destination`: the memory that a load writes to.

All methods take *many* blocks at once. A block is a position in parallel columns (its key, its ref, its outcome), never an
object: one object per block costs more than every decision about it.

An answer is a value, never an exception: a duplicate, a miss, a full tier, a pinned key. An exception from any of these
methods breaks the contract; :class:`Unproven` says that not even the end of a copy is certain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, runtime_checkable

from ._errors import BlockSizeError as BlockSizeError
from ._errors import CapacityError as CapacityError
from ._errors import DamagedBlock as DamagedBlock
from ._errors import DuplicateKeys as DuplicateKeys
from ._errors import Unproven as Unproven
from ._errors import UnreadableBlock as UnreadableBlock
from ._values import DUPLICATE as DUPLICATE
from ._values import EVICTED as EVICTED
from ._values import LOADED as LOADED
from ._values import STORED as STORED
from ._values import Blocks as Blocks
from ._values import Capabilities as Capabilities
from ._values import Deletion as Deletion
from ._values import Duplicate as Duplicate
from ._values import ExternalBlocks as ExternalBlocks
from ._values import Failed as Failed
from ._values import Key as Key
from ._values import Loaded as Loaded
from ._values import Missed as Missed
from ._values import Outcome as Outcome
from ._values import Rejected as Rejected
from ._values import RoomRequest as RoomRequest
from ._values import Stored as Stored
from ._values import StrongBlocks as StrongBlocks
from ._values import TierStatistics as TierStatistics
from ._values import WeakBlocks as WeakBlocks
from ._values import WhenFull as WhenFull
from .base.keys import MAX_KEY_BYTES as MAX_KEY_BYTES
from .base.keys import check_keys as check_keys
from .base.pages import Pages


@runtime_checkable
class Source(Protocol):
    """Where a pipeline reads from. Called on the trio thread, except :meth:`copy_out`."""

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        ...

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take one counted ref for each key that is present; ``EVICTED`` for each that is not. Never blocks."""
        ...

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref; ``EVICTED`` is ignored. Never blocks, never raises."""
        ...

    def views(self, refs: Sequence[int]) -> Pages | None:
        """The addresses of these blocks, or ``None`` if a block is not one run of host memory."""
        ...

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position. Called in a worker thread; returns when it is over.

        If it finds a block damaged while it copies, it raises :class:`DamagedBlock`, or :class:`UnreadableBlock` if it cannot
        be read; the caller then copies the others one by one.
        """
        ...


class Destination(ABC):
    """The memory that a load writes blocks to: one place for each block.

    A subclass defines the first four members. All others are abilities, which a destination lacks by default. A destination
    in front of another one is a :class:`backends.base.forwarding.ForwardingDestination`, which forwards all of them.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Size of every place, in bytes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def views(self) -> Pages | None:
        """Return the writable addresses of the places.

        ``None`` if a place is not one run of host memory.
        """

    @abstractmethod
    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy ``pages`` into the places from ``start`` on. In a worker thread."""

    @property
    def on_device(self) -> bool:
        """Whether the places lie on a device.

        Earlier work of the device may still write to them, so a load waits for its precondition first.
        """
        return False

    def numbered(self) -> tuple[object, Sequence[int]]:
        """Return the numbered place of the blocks and their numbers, or ``None``.

        See :class:`NumberedSource`.
        """
        return None, ()

    @property
    def sums_pages(self) -> bool:
        """Whether :meth:`copy_in_and_sum` sums pages while they are in the processor's cache."""
        return False

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        """Copy as :meth:`copy_in` does, and return the xxh3-64 of each page.

        The sum is of the whole page, also if only a part of it is copied.
        """
        raise NotImplementedError

    @property
    def is_readable(self) -> bool:
        """Whether :meth:`copy_out` reads the places back.

        Places in host memory need not: they are read through :meth:`views`.
        """
        return False

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy the places at these positions into pages. In a worker thread."""
        raise NotImplementedError

    @property
    def plane_names(self) -> Sequence[str]:
        """The names of the planes of a block; empty if it cannot be read so.

        See :class:`PlanarPlace`.
        """
        return ()

    def plane_samples(self, positions: Sequence[int]) -> Sequence[array[float] | None]:
        """Return the samples of the blocks at these positions. Any thread.

        See :class:`PlanarPlace`.
        """
        raise NotImplementedError


# --- writing ------------------------------------------------------------------------------------------------------


class Reservation(Protocol):
    """Room for some blocks in a tier. Ends with :meth:`transfer`, :meth:`release`, or both."""

    @property
    def granted(self) -> Sequence[Key]:
        """The keys that have room: a prefix of those requested (all of them under ``wait`` and ``evict``)."""
        ...

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys`` (a subsequence of ``granted``). Never blocks."""
        ...

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Copy the kept blocks (``refs`` in their order) and publish them. Called at most once, after the commit.

        Returns one outcome per block, in order; an ordinary exception means that all of them failed and that the copy
        is over. A block is found by its key only once all of its bytes are there. A block that its source knows to be damaged
        (:class:`ChecksummedSource`) is not stored: it is :class:`Failed` with :class:`DamagedBlock`, the others go on, and the
        source forgets it. It may pass no checkpoint if it need not wait. The caller shields and bounds it: if it is cancelled
        all the same, it returns at once, even with a copy still under way, and the caller quarantines it.

        Raises:
            Unproven: the copy may still be going on.
        """
        ...

    def release(self) -> None:
        """Give back the room that was not published. Idempotent; never blocks, never raises."""
        ...


@runtime_checkable
class HoldingReservation(Protocol):
    """A reservation that can hold what it stores until that is copied on. Optional; of a tier that is a :class:`Source`."""

    def hold(self) -> None:
        """Before the transfer: hold each block that it stores, or finds stored, until :meth:`Reservation.release`.

        A block that has just been stored may be evicted at once for a waiting request. Held, it is still there when the
        transfer has returned, so that the caller can take its own refs (:meth:`Source.upgrade`).
        """
        ...


@runtime_checkable
class DepthReservation(Protocol):
    """A reservation that stores the depths of its blocks. Optional; recognised by the method."""

    def note_depths(self, depths: Mapping[Key, int]) -> None:
        """Note the depth of each block (its index in its prefix, where known) for the eviction policy. Before the transfer."""
        ...


@runtime_checkable
class DepthTier(Protocol):
    """A tier that knows the depths of its blocks: they go with a block that is promoted. Optional; recognised by the method."""

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """The depth of each block (its index in its prefix), where it is known; ``None`` where none is. Never blocks."""
        ...


class TransferExecutor(Protocol):
    """A place that blocks can be written to. All methods are called on the trio thread."""

    async def reserve(self, request: RoomRequest) -> Reservation:
        """Take room for the blocks of a request, which may shrink while this waits.

        ``wait`` waits until there is room for all; ``evict`` makes room by evicting blocks that are not held, and waits only
        if everything is held; ``partial`` and ``fail`` never wait and grant the prefix that fits (the caller decides about the
        rest). Waiting requests are served in order. Cancelled while waiting, it holds nothing.

        Raises:
            BlockSizeError: this place holds blocks of another size.
            CapacityError: it could not hold so many blocks even if it were empty.
        """
        ...

    def reserve_nowait(self, request: RoomRequest) -> Reservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        ...


# --- reading back -------------------------------------------------------------------------------------------------


class ReadLease(Protocol):
    """A hold on a prefix of some keys: none of its blocks is evicted or deleted until it is released."""

    @property
    def keys(self) -> Sequence[Key]:
        """The held keys: the longest prefix of those requested that is there."""
        ...

    async def release(self) -> None:
        """Release the blocks. Idempotent."""
        ...

    async def __aenter__(self) -> ReadLease: ...

    async def __aexit__(self, *exc: object) -> None:
        """Release, also when cancelled."""
        ...


class ForgettingLease(ReadLease, Protocol):
    """A lease that can drop damaged blocks: for a tier that decodes what it reads, and finds the damage only then.

    A delete by key could hit a new block that was stored under the key in between.
    """

    def forget(self, positions: Sequence[int]) -> None:
        """Drop the damaged blocks at these positions: no longer found, and freed when they are no longer held.

        A new block under the same key stays. Not counted as deleted. Never blocks; call it before the lease is released.
        """
        ...


@runtime_checkable
class ReadableTier(TransferExecutor, Protocol):
    """A :class:`TransferExecutor` that can also be read.

    One that is not a :class:`Tier` must ask a server, which has other clients too. Its
    :meth:`~TransferExecutor.reserve_nowait` raises :class:`trio.WouldBlock` if it would have to ask, also under ``partial``
    and ``fail``; :meth:`~TransferExecutor.reserve` asks, and then grants what fits.
    """

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that the tier had when it was asked. Does not count as a use. An exception is not a miss."""
        ...

    async def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Pin the longest prefix of ``keys`` that is there (possibly none). Cancelled, it pins nothing."""
        ...

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks to ``destination``, position by position, and verify them. It may be written from the call on.

        One outcome per key of the lease: ``LOADED``, :class:`Missed` or :class:`Failed`. A damaged block is missed, counted,
        and no longer found. Cancelled, it returns only when the copy is over: however it ends, the caller may use the
        destination again.
        """
        ...

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys; a held one is ``PINNED`` and stays. Returns one answer per key."""
        ...

    def statistics(self) -> TierStatistics:
        """An immutable snapshot."""
        ...


@runtime_checkable
class Tier(ReadableTier, Protocol):
    """A :class:`ReadableTier` that knows without waiting what it contains. ``isinstance`` tells it from any other."""

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that are there now. Never blocks."""
        ...


# --- what only some places have -----------------------------------------------------------------------------------


class HeldSource(Source, Protocol):
    """The blocks of a tier that are held, as a source: a pipeline copies them from where they lie."""

    def take(self, lease: ReadLease) -> StrongBlocks:
        """The blocks of a lease of that tier, held until the receiver of the value releases them.

        The lease belongs to this source from then on. What is held can be held once more by its key
        (:meth:`Source.upgrade`), until nobody holds it.
        """
        ...


@runtime_checkable
class PageTier(Protocol):
    """A tier that has to be asked for its blocks, and whose held blocks are a source. Optional; recognised by the attribute.

    No pipeline could take refs of its blocks when it commits, as of a :class:`Source`: that must not wait. So a pipeline that
    starts there pins what it will copy before (:meth:`ReadableTier.pin`).
    """

    @property
    def held_pages(self) -> HeldSource:
        """Its blocks, as far as they are held."""
        ...


@runtime_checkable
class TenantTier(Protocol):
    """A tier that needs the tenants of its blocks, such as one that encrypts. Optional; recognised by the method."""

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with their tenant until the returned function is called. Calling that again does nothing.

        A store calls this before the copy and ends it after; a read calls it before the pin, and ends it when the lease is
        released. If two tenants tag one key at the same time it has no tenant: a store of it fails, a load misses.
        """
        ...


@runtime_checkable
class ChecksummedSource(Source, Protocol):
    """A source that knows the checksums of its blocks. Optional; recognised by the methods.

    A copy out of it compares what has arrived, and stores no damaged block: under a new checksum the damage would count as
    correct from then on. So every wrapper of such a source must forward both methods. A source that verifies its blocks itself
    in :meth:`copy_out`, and raises :class:`DamagedBlock` there, needs neither.
    """

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> Sequence[int | None]:
        """The xxh3-64 of each block as it was stored, ``None`` if it is not known. Never blocks.

        For a block that is known to be damaged a value that no checksum has, such as ``-1``.
        """
        ...

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Drop blocks that a copy has found damaged: count them, and do not find them any more.

        A new block under the same key in another slot stays. Never blocks; call it before the refs are released.
        """
        ...


@runtime_checkable
class PaddedSource(Source, Protocol):
    """A source whose blocks mostly need less than ``block_bytes``. Optional; recognised by the method.

    A destination may leave out the unused bytes, and read zeros there.
    """

    def used_bytes(self, page: memoryview) -> int:
        """How many leading bytes of a page filled by :meth:`copy_out` are used; the others are zero. For any thread."""
        ...


@runtime_checkable
class PlanarPlace(Protocol):
    """A source of which each block can be read plane by plane (:mod:`backends.base.planes`). Optional.

    What is copied is compared with it now and then: whether each plane of a block came to where it belongs.
    """

    @property
    def plane_names(self) -> Sequence[str]:
        """The name of each plane of a block, in order: ``layer 0 kv 1 head 2``. None: this one cannot be read so."""
        ...

    def plane_samples(self, refs: Sequence[int]) -> Sequence[array[float] | None]:
        """The samples of each of these blocks. Any thread.

        ``None`` where a block cannot be read so, since only a part of it is copied, say.
        """
        ...


@runtime_checkable
class NumberedSource(Source, Protocol):
    """A source whose blocks have numbers that another process knows them by. Optional; recognised by the method.

    For a tier of another process that has mapped this place as well, and reads there itself.
    """

    def numbers_of(self, refs: Sequence[int]) -> tuple[object, Sequence[int]]:
        """The place itself, whatever proxy it was reached by, and the number of each of these blocks."""
        ...


class Canary(Protocol):
    """A free block of a cache, through which a pattern goes to see whether its planes come back as they were stored."""

    def write(self, key: Key, seed: str) -> tuple[Blocks, array[float]]:
        """Write the pattern of ``seed`` into the block; returns the block to be stored under ``key``, and its samples."""
        ...

    def clear(self) -> Destination:
        """Write zeros into the block; returns it as a place to load into."""
        ...
