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

import enum
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from ._errors import BlockSizeError as BlockSizeError
from ._errors import CapacityError as CapacityError
from ._errors import DamagedBlock as DamagedBlock
from ._errors import DuplicateKeys as DuplicateKeys
from ._errors import Unproven as Unproven
from ._keys import MAX_KEY_BYTES as MAX_KEY_BYTES
from ._keys import check_keys as check_keys
from ._keys import distinct_keys
from .pages import Pages

Key: TypeAlias = bytes
"""The key of a block: an opaque content hash with the tenant's salt already in it (see :func:`offload.block_key`).

At most ``MAX_KEY_BYTES`` long. Public entry points check keys by :func:`check_keys`."""

EVICTED = -1
"""The ref of a block that was no longer there when it was upgraded."""

WhenFull: TypeAlias = Literal["wait", "evict", "partial", "fail"]
"""What a reservation does if the place is full: see :meth:`TransferExecutor.reserve`."""


# --- blocks, as columns -------------------------------------------------------------------------------------------


class Blocks:
    """Blocks of one source that are enqueued together: one value for many blocks. Made by the source.

    Attributes:
        source: the place that has the bytes.
        keys: one key per block, all different.
        refs: what the source needs to find each block's bytes, or ``None`` if that is decided at the upgrade.
    """

    __slots__ = ("__weakref__", "depths", "keys", "refs", "source")

    def __init__(
        self, source: Source, keys: Sequence[Key], refs: list[int] | None, depths: Sequence[int | None] | None = None
    ) -> None:
        """Make blocks from columns.

        Args:
            source: the place that has the blocks.
            keys: one per block.
            refs: the source's reference to each block; ``None`` for weak blocks.
            depths: the index of each block in its prefix, if known; it does not follow from the keys. A full tier evicts the
                deepest among equally old blocks. Without it, the order of the keys is used.

        Raises:
            DuplicateKeys: the keys are not all different.
            TypeError: one of them is not ``bytes``, or this is one key and not a sequence.
            ValueError: one of them is longer than any tier accepts; or ``refs`` or ``depths`` has another length.
        """
        self.source: Source = source
        self.keys: tuple[Key, ...] = distinct_keys(keys)
        self.refs: list[int] | None = refs
        if refs is not None and len(refs) != len(self.keys):
            raise ValueError(f"{len(self.keys)} keys but {len(refs)} block ids")
        self.depths: Sequence[int | None] | None = depths
        if depths is not None and len(depths) != len(self.keys):
            raise ValueError(f"{len(self.keys)} keys but {len(depths)} depths")

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.keys)} blocks in {self.source!r}>"

    def hand_over(self) -> None:
        """Pass ownership of this value to a pipeline. Blocks that hold refs can be passed on once."""

    def release(self) -> None:
        """Release the refs that this value holds in its source, if any. Idempotent."""


class ExternalBlocks(Blocks):
    """Blocks that the engine keeps alive until the handle has settled: block ids and keys."""

    __slots__ = ()


class StrongBlocks(Blocks):
    """Blocks held by counted refs, which prevent eviction until :meth:`release`.

    A pipeline that is given strong blocks owns their refs from that call on, on every path, also when the call
    raises.
    """

    __slots__ = ("_given",)

    def __init__(
        self, source: Source, keys: Sequence[Key], refs: list[int] | None, depths: Sequence[int | None] | None = None
    ) -> None:
        """Make blocks from columns; see :class:`Blocks`."""
        super().__init__(source, keys, refs, depths)
        self._given = False

    def hand_over(self) -> None:
        """Pass ownership of the refs to a pipeline, which releases them.

        Raises:
            ValueError: they were passed on already, or released.
        """
        if self._given or (self.keys and not self.refs):
            raise ValueError(f"{self!r} was given to a pipeline before, or released: its refs are not to be had twice")
        self._given = True

    def release(self) -> None:
        """Release the refs. Idempotent; a block without refs may be evicted."""
        refs = self.refs
        self.refs: list[int] | None = []
        if refs:
            self.source.release(refs)


class WeakBlocks(Blocks):
    """Keys without refs: blocks that are present at the upgrade are transferred, the others count as *evicted*."""

    __slots__ = ()


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

        If it finds a block damaged while it copies, it raises :class:`DamagedBlock`; the caller then copies the others one by
        one.
        """
        ...


class Destination(Protocol):
    """The memory that a load writes blocks to: one place for each block."""

    @property
    def block_bytes(self) -> int:
        """Size of every place, in bytes."""
        ...

    def __len__(self) -> int: ...

    def views(self) -> Pages | None:
        """The addresses of the places, writable, or ``None`` if a place is not one run of host memory."""
        ...

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy ``pages`` into the places from ``start`` on. Called in a worker thread; returns when it is over."""
        ...


# --- answers ------------------------------------------------------------------------------------------------------


class Outcome:
    """The result for one block: one of the subclasses below."""

    __slots__ = ()


@attrs.frozen
class Stored(Outcome):
    """The block is in the tier now and can be found by its key."""


@attrs.frozen
class Duplicate(Outcome):
    """The key was there already; nothing was written. Counts as completed: first writer wins."""


@attrs.frozen
class Loaded(Outcome):
    """The block's bytes are at the destination, verified if the tier keeps checksums."""


@attrs.frozen
class Failed(Outcome):
    """The copy failed and left nothing behind."""

    error: BaseException
    """The reason."""


@attrs.frozen
class Rejected(Outcome):
    """The tier did not take the block; trying again later may work."""

    reason: str
    """The reason in a word: ``full``, ``too large``."""


@attrs.frozen
class Missed(Outcome):
    """The block could not be loaded: it is not there (any more), or its bytes are not those that were stored."""

    reason: str
    """The reason in a word: ``gone``, ``torn``, ``damaged``, ``foreign``, ``version``."""


STORED = Stored()
DUPLICATE = Duplicate()
LOADED = Loaded()


class Deletion(enum.Enum):
    """The answer of a delete for one key."""

    DELETED = "deleted"
    MISSING = "missing"
    PINNED = "pinned"
    UNAVAILABLE = "unavailable"
    """It is unknown whether the block is still there: the tier could not be asked, or cannot delete."""


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


class RoomRequest:
    """A request for room for some blocks. It can shrink while it waits, and keeps its place in the queue.

    One request is given to one :meth:`TransferExecutor.reserve` at a time. Used on one thread.

    Attributes:
        keys: the blocks; fewer after a :meth:`shrink`.
        block_bytes: size of every block.
        when_full: what to do where there is not room for all, see :meth:`TransferExecutor.reserve`.
        waits: whether it waits for room where there is none: ``wait`` and ``evict`` do, ``partial`` and ``fail`` never.
    """

    __slots__ = ("_shrunk", "block_bytes", "keys", "waits", "when_full")

    def __init__(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> None:
        self.keys: Sequence[Key] = keys
        self.block_bytes: int = block_bytes
        self.when_full: WhenFull = when_full
        self.waits: bool = when_full == "wait" or when_full == "evict"
        self._shrunk: Callable[[], bool] | None = None

    def __repr__(self) -> str:
        return f"<request for {len(self.keys)} blocks of {self.block_bytes} bytes, {self.when_full}>"

    def shrink(self, keys: Sequence[Key]) -> bool:
        """Reduce the request to ``keys``, a subsequence of :attr:`keys`, at the same place in the queue. Never blocks.

        So a batch keeps its place when one of its containers is cancelled.

        Returns:
            Whether it waits for ``keys`` now (and may have been granted them). False: nothing was changed, since it does not
            wait (any more), or the place does not support this; the caller then cancels and asks again.
        """
        if self._shrunk is None:
            return False
        before, self.keys = self.keys, keys
        shrunk = False
        try:
            shrunk = self._shrunk()
        finally:
            if not shrunk:
                self.keys = before
        return shrunk

    @contextmanager
    def waiting(self, shrunk: Callable[[], bool]) -> Iterator[None]:
        """Let :meth:`shrink` call ``shrunk`` while the block lasts. A place puts its wait into this block.

        A place that does not use this cannot be asked for less, and need not support it.

        Args:
            shrunk: looks at :attr:`keys` again and may grant them; returns False if it no longer waits for them.
        """
        self._shrunk = shrunk
        try:
            yield
        finally:
            self._shrunk = None


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


@attrs.frozen
class Capabilities:
    """The optional parts of the contract that a tier keeps, as its attribute ``capabilities``. All of them by default.

    :func:`backends.testing.check_tier` tests what is declared.
    """

    pins: bool = True
    """A leased block stays until the lease ends. Without it, a hit is a hint: the block may be gone when it is loaded, and
    then is :class:`Missed`. A lease still keeps this process from evicting and deleting it."""
    deletes: bool = True
    """Blocks can be deleted, and so evicted. Without it, stored blocks stay: :meth:`ReadableTier.delete` answers
    ``UNAVAILABLE``, and ``wait`` and ``evict`` raise :class:`CapacityError` if only an eviction could make room."""
    per_key_outcomes: bool = True
    """A block that cannot be stored fails alone. Without it, all blocks that were copied with it fail too."""


@attrs.frozen
class TierStatistics:
    """A snapshot of one tier; counters count blocks since it was made."""

    capacity_bytes: int
    """Its capacity."""
    used_bytes: int
    """Bytes of its blocks and reservations."""
    blocks: int
    """Keys that can be found."""
    held_blocks: int
    """Blocks of these that are held by refs or leases."""
    reserved_blocks: int
    """Blocks reserved and not yet published or given back."""
    stored: int
    """Blocks that were published."""
    duplicates: int
    """Blocks that were not written, since the key was there."""
    evicted: int
    """Blocks that were evicted."""
    loaded: int
    """Blocks that were loaded and, with checksums, verified."""
    missed: Mapping[str, int]
    """Blocks that could not be loaded, by reason."""
    deleted: int
    """Blocks that were deleted by request."""


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
        """Copy the leased blocks to ``destination``, position by position, and verify them.

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
    """A source, or a destination, of which each block can be read plane by plane (:mod:`backends.planes`). Optional.

    What is copied is compared with it now and then: whether each plane of a block came to where it belongs.
    """

    @property
    def plane_names(self) -> Sequence[str]:
        """The name of each plane of a block, in order: ``layer 0 kv 1 head 2``. None: this one cannot be read so."""
        ...

    def plane_samples(self, refs: Sequence[int]) -> Sequence[array[float] | None]:
        """The samples of each of these blocks: of a source by their refs, of a destination by their positions. Any thread.

        ``None`` where a block cannot be read so, since only a part of it is copied, say.
        """
        ...


@runtime_checkable
class ReadableDestination(Destination, Protocol):
    """A destination that can be read back. Optional: one whose places are host memory is read there."""

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy the places at these positions into pages. Called in a worker thread; returns when it is over."""
        ...


class PlanarDestination(Destination, PlanarPlace, Protocol):
    """A destination whose blocks can be read plane by plane."""


class Canary(Protocol):
    """A free block of a cache, through which a pattern goes to see whether its planes come back as they were stored."""

    def write(self, key: Key, seed: str) -> tuple[Blocks, array[float]]:
        """Write the pattern of ``seed`` into the block; returns the block to be stored under ``key``, and its samples."""
        ...

    def clear(self) -> PlanarDestination:
        """Write zeros into the block; returns it as a place to load into."""
        ...
