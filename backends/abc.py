"""The contracts of a place where blocks live, and the values that cross them.

Four contracts, each with one to five methods:

* :class:`Source`: a pipeline reads blocks from it, in columns. A :class:`ChecksummedSource` knows what they sum up to.
* :class:`TransferExecutor` and its :class:`Reservation`: a pipeline writes blocks into it.
* :class:`ReadableTier`: an executor that can be read back: looked up, pinned, loaded, deleted from. A :class:`Tier` is one
  that knows at once what it contains; any other has to ask, over a wire say.
* :class:`Destination`: where a load puts the bytes.

Everything here speaks of *many* blocks at once. A block is a position in parallel columns (its key, its ref, its
outcome), never an object of its own: one object per block costs more than every decision about it.

An answer is a value, never an exception: a duplicate, a miss, a full tier, a pinned key. An exception from any of these
methods is a broken promise; :class:`Unproven` is the one that says that not even the end of a copy is certain.
"""

from __future__ import annotations

import enum
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
"""A block's name: an opaque content hash with the tenant's salt already in it (see :func:`offload.block_key`).

At most ``MAX_KEY_BYTES`` long. Whoever takes keys from outside checks them, by :func:`check_keys`."""

EVICTED = -1
"""The ref of a block that was no longer there when it was upgraded."""

WhenFull: TypeAlias = Literal["wait", "evict", "partial", "fail"]
"""What a reservation does in a full place: see :meth:`TransferExecutor.reserve`."""


# --- blocks, as columns -------------------------------------------------------------------------------------------


class Blocks:
    """Blocks of one source that are enqueued together: one value for many blocks. Made by the source, not by hand.

    Attributes:
        source: where the bytes are.
        keys: one key per block, all different.
        refs: what the source needs to find each block's bytes, or ``None`` where that is decided at the upgrade.
    """

    __slots__ = ("__weakref__", "depths", "keys", "refs", "source")

    def __init__(
        self, source: Source, keys: Sequence[Key], refs: list[int] | None, depths: Sequence[int | None] | None = None
    ) -> None:
        """Take the columns.

        Args:
            source: where the blocks are.
            keys: of their content.
            refs: how they are held, or where they are; ``None`` where they are not held.
            depths: the index of each in the prefix that it belongs to, where that is known: it does not follow from the keys. A
                place that is full gives up the deepest of what is next to go. Without it, the order of the keys stands for it.

        Raises:
            DuplicateKeys: the keys are not all different.
            TypeError: one of them is not ``bytes``, or this is one key and not a sequence.
            ValueError: one of them is longer than any tier takes; or there is not one ref or one depth for each.
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
        """Hand this value over to a pipeline. One that holds refs can be handed over once."""

    def release(self) -> None:
        """Give back what this value holds in the source. Idempotent; nothing to do unless it holds refs."""


class ExternalBlocks(Blocks):
    """Blocks that the engine itself keeps alive until the handle has settled: block ids and keys."""

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
        """Take the columns; see :class:`Blocks`."""
        super().__init__(source, keys, refs, depths)
        self._given = False

    def hand_over(self) -> None:
        """Hand the refs over to a pipeline, which releases them.

        Raises:
            ValueError: another one has them, or they were released.
        """
        if self._given or (self.keys and not self.refs):
            raise ValueError(f"{self!r} was given to a pipeline before, or released: its refs are not to be had twice")
        self._given = True

    def release(self) -> None:
        """Drop the refs. Idempotent; with the last ref of a block it may be evicted again."""
        refs = self.refs
        self.refs: list[int] | None = []
        if refs:
            self.source.release(refs)


class WeakBlocks(Blocks):
    """Keys without a hold: what is still there at the upgrade is transferred, what is not was *evicted*."""

    __slots__ = ()


@runtime_checkable
class Source(Protocol):
    """Where a pipeline reads from. Called on the trio thread, except :meth:`copy_out`."""

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        ...

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Weak to strong: one counted ref per key that is there, ``EVICTED`` for each that is not. Never blocks."""
        ...

    def release(self, refs: Sequence[int]) -> None:
        """Drop one count of each ref; ``EVICTED`` is ignored. Never blocks, never raises."""
        ...

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Where these blocks lie in host memory, or ``None`` if a block is not one run of host memory."""
        ...

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position. Called in a worker thread; returns when it is over.

        One that finds a block damaged while it copies raises :class:`DamagedBlock`; whoever copies then asks for the others,
        one by one.
        """
        ...


class Destination(Protocol):
    """Where a load puts blocks: a column of places, as many as there are blocks to load."""

    @property
    def block_bytes(self) -> int:
        """Size of every place, in bytes."""
        ...

    def __len__(self) -> int: ...

    def views(self) -> Pages | None:
        """The places in host memory, writable, or ``None`` if a place is not one run of host memory."""
        ...

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy ``pages`` into the places from ``start`` on. Called in a worker thread; returns when it is over."""
        ...


# --- answers ------------------------------------------------------------------------------------------------------


class Outcome:
    """What became of one block: one of the subclasses below."""

    __slots__ = ()


@attrs.frozen
class Stored(Outcome):
    """The block is in the place now and can be found by its key."""


@attrs.frozen
class Duplicate(Outcome):
    """The key was there already; nothing was written. Counts as completed: first writer wins."""


@attrs.frozen
class Loaded(Outcome):
    """The block's bytes are at the destination, verified where the place keeps checksums."""


@attrs.frozen
class Failed(Outcome):
    """The copy failed and left nothing behind."""

    error: BaseException
    """Why."""


@attrs.frozen
class Rejected(Outcome):
    """The place did not take the block; trying again later may work."""

    reason: str
    """Why, in a word: ``full``, ``too large``."""


@attrs.frozen
class Missed(Outcome):
    """The block could not be loaded: it is not there (any more), or what was there was not what was stored."""

    reason: str
    """Why, in a word: ``gone``, ``torn``, ``damaged``, ``foreign``, ``version``."""


STORED = Stored()
DUPLICATE = Duplicate()
LOADED = Loaded()


class Deletion(enum.Enum):
    """What a delete did with one key."""

    DELETED = "deleted"
    MISSING = "missing"
    PINNED = "pinned"
    UNAVAILABLE = "unavailable"
    """Nobody knows whether it is still there: who may have it could not be asked, or deletes nothing."""


# --- writing ------------------------------------------------------------------------------------------------------


class Reservation(Protocol):
    """Room for some blocks in a place. Ends with exactly one of :meth:`transfer` or :meth:`release`, or both."""

    @property
    def granted(self) -> Sequence[Key]:
        """The keys there is room for: a prefix of those asked for (all of them under ``wait`` and ``evict``)."""
        ...

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys`` (a subsequence of ``granted``). Never blocks."""
        ...

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Copy the kept blocks (``refs`` in their order) and publish them. Called at most once, after the commit.

        Returns one outcome per block, in order; an ordinary exception means that all of them failed and that the copy
        is over. A block is found by its key only once all of its bytes are there. One that its source knows to be damaged
        (:class:`ChecksummedSource`) is not stored: it has :class:`Failed` alone, with :class:`DamagedBlock`, and the source
        forgets it. Where nothing is to be waited for, it
        may pass no checkpoint. The caller shields and bounds it: when it is cancelled all the same, it leaves at once,
        even with a copy still under way, and the caller quarantines it.

        Raises:
            Unproven: the copy may still be going on.
        """
        ...

    def release(self) -> None:
        """Give back the room of what was not published. Idempotent; never blocks, never raises."""
        ...


@runtime_checkable
class HoldingReservation(Protocol):
    """A reservation that can hold what it stores, until that is copied on. Optional; of a tier that is a :class:`Source`."""

    def hold(self) -> None:
        """Before the transfer: hold each block that it stores, or finds stored, until :meth:`Reservation.release`.

        What has just been stored may be evicted at once, for somebody who waits for room. Held, it is still there when the
        transfer has returned, so that whoever called it can take refs of his own (:meth:`Source.upgrade`).
        """
        ...


class RoomRequest:
    """Room wanted for some blocks: an object that can shrink while it waits, and keeps its place in the queue.

    One request is given to one :meth:`TransferExecutor.reserve` at a time. Used on one thread.

    Attributes:
        keys: what room is wanted for; fewer after a :meth:`shrink`.
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
        """Want room for ``keys`` only, a subsequence of :attr:`keys`, from now on at the same place in the queue. Never blocks.

        What is left of a batch must not queue behind requests that came later because one of it was cancelled.

        Returns:
            Whether it waits for ``keys`` now (and may have been granted them). False: nothing was changed, since it does not
            wait (any more), or waits in a place that cannot do this; the caller then cancels and asks again.
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
        """Have :meth:`shrink` call ``shrunk`` once :attr:`keys` are fewer, while inside: used by a place around its wait.

        A place that does not use this cannot be asked for less, and need not know how.

        Args:
            shrunk: looks at :attr:`keys` again and may grant them; false where it no longer waits for them.
        """
        self._shrunk = shrunk
        try:
            yield
        finally:
            self._shrunk = None


@runtime_checkable
class DepthReservation(Protocol):
    """A reservation that takes the depths of its blocks along. Optional; recognised by the method."""

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
    """A place blocks can be written to. All of it is called on the trio thread."""

    async def reserve(self, request: RoomRequest) -> Reservation:
        """Take room for the blocks of a request, as it is when it is granted: it may shrink while this waits.

        ``wait`` waits until there is room for all; ``evict`` makes room by evicting what is not held, and waits only
        where everything is held; ``partial`` and ``fail`` never wait and grant the prefix that fits (the caller knows
        what to do with the rest). Waiting requests are served in order. Cancelled while waiting, it holds nothing.

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
    """A hold on the contiguous prefix of some keys: none of them is evicted or deleted until it is released."""

    @property
    def keys(self) -> Sequence[Key]:
        """What is held: the longest prefix of the keys asked for that is there."""
        ...

    async def release(self) -> None:
        """Release the blocks. Idempotent."""
        ...

    async def __aenter__(self) -> ReadLease: ...

    async def __aexit__(self, *exc: object) -> None:
        """Release, also when cancelled."""
        ...


class ForgettingLease(ReadLease, Protocol):
    """A lease that can be told that what was read is not what was stored: by a tier that decodes what it reads.

    Whoever has only keys could merely delete them later, and with that what was stored anew under them in between.
    """

    def forget(self, positions: Sequence[int]) -> None:
        """Forget the damaged blocks at these positions: no longer found, and dropped when they are no longer held.

        These, and not what lies under their keys by then. Not counted as deleted. Never blocks; before the lease is released.
        """
        ...


@attrs.frozen
class Capabilities:
    """How much of the contract a tier keeps: all of it, unless it declares less, as its attribute ``capabilities``.

    What a tier cannot do is answered, never guessed. :func:`backends.testing.check_tier` tests what is declared.
    """

    pins: bool = True
    """A leased block stays until the lease ends. Without it, a hit is a hint: the block may be gone when it is loaded, and
    then is :class:`Missed`. A lease still keeps this process from evicting and deleting it."""
    deletes: bool = True
    """Blocks can be deleted, and so evicted. Without it, what is stored stays: :meth:`ReadableTier.delete` answers
    ``UNAVAILABLE``, and ``wait`` and ``evict`` raise :class:`CapacityError` where only an eviction could make room."""
    per_key_outcomes: bool = True
    """A block that cannot be stored fails alone. Without it, it fails all blocks that were copied with it."""


@attrs.frozen
class TierStatistics:
    """A snapshot of one tier; counters count blocks since it was made."""

    capacity_bytes: int
    """What it may hold."""
    used_bytes: int
    """What it holds, reservations included."""
    blocks: int
    """Keys that can be found."""
    held_blocks: int
    """Of these, held by refs or leases."""
    reserved_blocks: int
    """Places reserved and not yet published or given back."""
    stored: int
    """Published."""
    duplicates: int
    """Not written, as the key was there."""
    evicted: int
    """Made room."""
    loaded: int
    """Copied out and, with checksums, verified."""
    missed: Mapping[str, int]
    """Could not be loaded, by reason."""
    deleted: int
    """Deleted by request."""


@runtime_checkable
class ReadableTier(TransferExecutor, Protocol):
    """A :class:`TransferExecutor` that can also be read.

    One that is not a :class:`Tier` must ask, and others change it, too. Under ``partial`` and ``fail`` as well, its
    :meth:`~TransferExecutor.reserve_nowait` raises :class:`trio.WouldBlock` where it would have to ask;
    :meth:`~TransferExecutor.reserve` asks, and then grants what fits.
    """

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that could be found when it was asked. Does not count as a use. An exception is not a miss."""
        ...

    async def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Hold the longest prefix of ``keys`` that is there (possibly none)."""
        ...

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks to ``destination``, position by position, and verify them.

        One outcome per key of the lease: ``LOADED``, :class:`Missed` or :class:`Failed`. A block that is damaged is
        missed, counted, and no longer found. Cancelled, it leaves only when the copy is over: the destination
        is the caller's again when it returns, in whatever way.
        """
        ...

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Forget these keys; a held one is ``PINNED`` and stays."""
        ...

    def statistics(self) -> TierStatistics:
        """An immutable snapshot."""
        ...


@runtime_checkable
class Tier(ReadableTier, Protocol):
    """A :class:`ReadableTier` of this process: it knows at once what it contains. ``isinstance`` tells it from any other."""

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that can be found right now. Never blocks."""
        ...


# --- what only some places have -----------------------------------------------------------------------------------


@runtime_checkable
class TenantTier(Protocol):
    """A tier that must know to which tenant blocks belong, such as one that encrypts. Optional; recognised by the method."""

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Note that these keys are this tenant's, until the returned function is called. Calling that again does nothing.

        Whoever stores calls this before, and ends it when the copy is over; whoever reads, before the pin, and ends it when the
        lease is released. Where two tenants claim one key at the same time it is nobody's: a store fails, a load misses.
        """
        ...


@runtime_checkable
class ChecksummedSource(Source, Protocol):
    """A source that knows what its blocks sum up to. Optional; recognised by the methods.

    Whoever copies its blocks compares what has arrived, and stores nothing that is damaged: with a checksum of its own it would
    be believed from then on. So whatever stands between such a source and a place passes both methods on. A source that
    verifies its blocks itself while :meth:`copy_out` runs, and raises :class:`DamagedBlock` there, needs neither.
    """

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> Sequence[int | None]:
        """The xxh3-64 of each of these blocks as it was stored, ``None`` where that is not known. Never blocks.

        One that no bytes have, as ``-1``, where a block is known to be damaged.
        """
        ...

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Forget blocks that a copy has found damaged: count them, and find them no more.

        What lies under a key by then in another slot stays. Never blocks; before the refs are released.
        """
        ...


@runtime_checkable
class PaddedSource(Source, Protocol):
    """A source whose blocks mostly need less than ``block_bytes``. Optional; recognised by the method.

    A place that writes somewhere else may leave out what is not used, and read zeros there.
    """

    def used_bytes(self, page: memoryview) -> int:
        """How many leading bytes of a page that :meth:`copy_out` has filled are used; all others are zero. Any thread."""
        ...
