"""The contracts of a tier, and the values that cross them.

Four contracts:

* :class:`Source`: a pipeline reads blocks from it, in columns.
* :class:`TransferExecutor` and its :class:`Reservation`: a pipeline writes blocks into it.
* :class:`Tier`: an executor that can be read back: looked up, pinned, loaded, deleted from.
* :class:`Destination`: the memory that a load writes to.

Each is a base class: its required members are abstract, and each optional ability is declared there once, with a
default that means "no". So no caller has to ask whether a method exists.

All methods take *many* blocks at once. A block is a position in parallel columns (its key, its ref, its outcome), never an
object: one object per block costs more than every decision about it.

An answer is a value, never an exception: a duplicate, a miss, a full tier, a pinned key. An exception from any of these
methods breaks the contract; after :class:`Unproven`, even the end of a copy is uncertain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

from ._errors import BlockSizeError as BlockSizeError
from ._errors import CapacityError as CapacityError
from ._errors import DamagedBlock as DamagedBlock
from ._errors import DuplicateKeys as DuplicateKeys
from ._errors import MissingKeys
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

if TYPE_CHECKING:
    from maru.kv_events import KeyWatcher

    from .base.direct import DirectTier
    from .base.leaving import Listener, Spill


class Source(ABC):
    """The place that a pipeline reads blocks from.

    A subclass defines the first two members. All others are abilities, which a source lacks by default. Called on the trio
    thread, except :meth:`copy_out`, :meth:`used_bytes` and :meth:`plane_samples`. A source in front of another one is a
    :class:`backends.base.forwarding.ForwardingSource`, which forwards all of them.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""

    @abstractmethod
    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position.

        Called in a worker thread; it returns when the copy is over.

        It raises :class:`DamagedBlock` for a block that it finds damaged while it copies, and :class:`UnreadableBlock` for one
        that cannot be read. The caller then copies the others one by one.
        """

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Return the addresses of these blocks, or ``None``.

        ``None`` if a block is not one run of host memory.
        """
        return None

    # --- blocks that are found by their keys ----------------------------------------------------------------------

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take one counted ref for each key that is present.

        A key that is absent has ``EVICTED``. Never blocks.

        A source without keys, whose owner names blocks by their numbers (:class:`ExternalBlocks`), has none.
        """
        return [EVICTED] * len(keys)

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref, ignoring ``EVICTED``.

        Never blocks, never raises.
        """
        return

    def weak(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> WeakBlocks:
        """Return these blocks without refs.

        A block that is gone at the commit is reported as evicted.
        """
        return WeakBlocks(self, keys, None, depths)

    def strong(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> StrongBlocks:
        """Return these blocks, each with a counted ref.

        The receiver of the value must release the refs.

        Raises:
            MissingKeys: not all of them are here; none is held then.
            DuplicateKeys: a key is named twice; none is held then.
        """
        check_keys(keys)
        refs = self.upgrade(keys)
        try:
            if EVICTED in refs:
                raise MissingKeys(self, [key for key, ref in zip(keys, refs, strict=True) if ref == EVICTED])
            return StrongBlocks(self, keys, refs, depths)
        except BaseException:
            self.release(refs)
            raise

    # --- checksums ------------------------------------------------------------------------------------------------

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> Sequence[int | None] | None:
        """Return the xxh3-64 of each block as it was stored. Never blocks.

        ``None`` for each that is not known, or for all if none is. A block that is known to be damaged has a value that
        no checksum has, such as ``-1``.

        A copy out of the source compares the bytes that arrived, and stores no damaged block: under a new checksum the
        damage would count as correct from then on. A source that verifies its blocks itself in :meth:`copy_out`, and
        raises :class:`DamagedBlock` there, need not know any.
        """
        return None

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Drop and count blocks whose copy differed from :meth:`checksums_of`.

        They are no longer found. A new block under the same key in another slot stays. Never blocks; called before the
        refs are released.
        """
        return

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> bool:
        """Drop damaged blocks without counting them. Return whether the source can.

        For a source in front of this one that decodes its blocks. Otherwise like :meth:`forget_damaged`.
        """
        return False

    # --- blocks that are known in other ways ----------------------------------------------------------------------

    def used_bytes(self, page: memoryview) -> int | None:
        """Return the number of leading bytes in use of a page.

        :meth:`copy_out` has filled the page. Called in any thread.

        The others are zero, so that a destination may leave them out, and read zeros there. ``None``: all are in use.
        """
        return None

    def numbers_of(self, refs: Sequence[int]) -> tuple[object, Sequence[int]]:
        """Return the numbered place of these blocks and their numbers, or ``None``.

        A tier of another process that has mapped the place as well reads the blocks there by their numbers.
        """
        return None, ()

    @property
    def plane_names(self) -> Sequence[str]:
        """The names of the planes of a block, in order.

        For example ``layer 0 kv 1 head 2``. Empty if a block cannot be read by planes. A copy is compared plane by
        plane now and then, to see whether each plane came to where it belongs (:mod:`backends.base.planes`).
        """
        return ()

    def plane_samples(self, refs: Sequence[int]) -> Sequence[array[float] | None]:
        """Return the samples of each of these blocks. Any thread.

        ``None`` for a block that cannot be read by planes, for example because only a part of it is copied.
        """
        raise NotImplementedError(f"{self!r} has no plane_samples: see Source.plane_names")


class Destination(ABC):
    """The memory that a load writes to: one place per block.

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

        See :meth:`Source.numbers_of`.
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
        raise NotImplementedError(f"{self!r} has no copy_in_and_sum: see Destination.sums_pages")

    @property
    def is_readable(self) -> bool:
        """Whether :meth:`copy_out` reads the places back.

        Places in host memory need not: they are read through :meth:`views`.
        """
        return False

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy the places at these positions into pages. In a worker thread."""
        raise NotImplementedError(f"{self!r} has no copy_out: see Destination.is_readable")

    @property
    def plane_names(self) -> Sequence[str]:
        """The names of a block's planes; empty if it has none.

        See :attr:`Source.plane_names`.
        """
        return ()

    def plane_samples(self, positions: Sequence[int]) -> Sequence[array[float] | None]:
        """Return the samples of the blocks at these positions. Any thread.

        See :attr:`Source.plane_names`.
        """
        raise NotImplementedError(f"{self!r} has no plane_samples: see Destination.plane_names")


# --- writing ------------------------------------------------------------------------------------------------------


class Reservation(ABC):
    """Room for some blocks in a tier.

    It ends with :meth:`transfer`, :meth:`release`, or both.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def granted(self) -> Sequence[Key]:
        """The keys that have room: a prefix of those requested.

        All of them under ``wait`` and ``evict``.
        """

    @abstractmethod
    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of granted keys that are not in ``keys``.

        ``keys`` is a subsequence of ``granted``. Never blocks.
        """

    @abstractmethod
    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Copy the kept blocks (``refs`` in their order) and publish them.

        Called at most once, after the commit.

        Returns one outcome per block, in order; an ordinary exception means that all of them failed and that the copy
        is over. A block is found by its key only once all of its bytes are there. A block that its source knows to be damaged
        (:meth:`Source.checksums_of`) is not stored: it is :class:`Failed` with :class:`DamagedBlock`, the others go on, and the
        source forgets it. It may pass no checkpoint if it need not wait. The caller shields and bounds it: if it is cancelled
        all the same, it returns at once, even with a copy still under way, and the caller quarantines it.

        Raises:
            Unproven: the copy may still be going on.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back the room of blocks that were not published.

        Idempotent; never blocks, never raises.
        """

    def hold(self) -> None:
        """Hold stored blocks, and blocks found stored, until :meth:`release`.

        Called before the transfer. A block that has just been stored may be evicted at once for a waiting request. A
        held one is still there when the transfer has returned, so that the caller can take its own refs
        (:meth:`Source.upgrade`). A tier that is no source holds nothing.
        """
        return

    def note_depths(self, depths: Mapping[Key, int]) -> None:
        """Record the depths of blocks for the eviction, before the transfer.

        A depth is the index of a block in its prefix, if known.

        A tier that keeps no depths ignores them.
        """
        return


class TransferExecutor(ABC):
    """A place that blocks can be written to.

    All methods are called on the trio thread.
    """

    __slots__ = ()

    @abstractmethod
    async def reserve(self, request: RoomRequest) -> Reservation:
        """Take room for a request, which may shrink while this waits.

        ``wait`` waits until there is room for all; ``evict`` makes room by evicting blocks that are not held, and waits only
        if everything is held; ``partial`` and ``fail`` never wait and grant the prefix that fits (the caller decides about the
        rest). Waiting requests are served in order. Cancelled while waiting, it holds nothing.

        Raises:
            BlockSizeError: this place holds blocks of another size.
            CapacityError: it could not hold so many blocks even if it were empty.
        """

    @abstractmethod
    def reserve_nowait(self, request: RoomRequest) -> Reservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting.

        A tier that must ask a server also raises it under ``partial`` and ``fail``; :meth:`reserve` then asks.
        """

    @property
    def name(self) -> str:
        """The name in statistics, logs and hits; empty means the class's."""
        return ""

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes; 0 while any size is taken."""
        return 0

    @property
    def capabilities(self) -> Capabilities:
        """The kept parts of the contract, and the abilities."""
        return Capabilities()

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that are there now. Never blocks.

        Only if :attr:`Capabilities.answers_at_once`.
        """
        raise NotImplementedError(f"{self!r} has no contains_nowait: see Capabilities.answers_at_once")


# --- reading back -------------------------------------------------------------------------------------------------


class ReadLease(ABC):
    """A hold on a prefix of some keys.

    None of its blocks is evicted or deleted until it is released.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def keys(self) -> Sequence[Key]:
        """The held keys: the longest prefix of those requested that is there."""

    @abstractmethod
    async def release(self) -> None:
        """Release the blocks. Idempotent."""

    async def __aenter__(self) -> ReadLease:
        return self

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None:
        """Release, also when cancelled."""

    def forget(self, positions: Sequence[int]) -> bool:
        """Drop the damaged blocks at these positions. Return whether the lease can.

        For a reader that decodes the blocks, and finds the damage only then. A delete by key could hit a new block that
        was stored under the key in between; that block stays here. The dropped blocks are no longer found, are freed
        when they are no longer held, and are not counted as deleted. Never blocks; called before the lease is released.
        """
        return False

    def release_nowait(self) -> bool:
        """Release the blocks if that waits for nothing. Return whether it has.

        Idempotent, in the tier's own thread. After false, :meth:`release` is due.
        """
        return False

    def release_from_thread(self) -> bool:
        """Release the blocks if any thread may. Return whether it has.

        Idempotent; never blocks. After false, :meth:`release` is due.
        """
        return False

    @property
    def bare(self) -> ReadLease:
        """The tier's own lease, without a breaker in front of it."""
        return self


class Tier(TransferExecutor):
    """A :class:`TransferExecutor` that can also be read.

    A subclass defines the seven abstract methods. All others are abilities, which a tier lacks by default;
    :class:`Capabilities` declares those that cannot be recognised by their answer. A tier in front of another one is a
    :class:`backends.base.forwarding.ForwardingTier`, which forwards all of them.
    """

    __slots__ = ()

    @abstractmethod
    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that the tier has.

        It may have changed since. This does not count as a use. An exception is not a miss.
        """

    @abstractmethod
    async def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Pin the longest present prefix of ``keys`` (possibly none).

        Cancelled, it pins nothing.
        """

    @abstractmethod
    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks to ``destination``, position by position, and verify them.

        The destination may be written to from the call on. One outcome per key of the lease: ``LOADED``,
        :class:`Missed` or :class:`Failed`. A damaged block is missed, counted, and no longer found. Cancelled, it
        raises ``Cancelled`` once the copy is over: however it ends, the caller may use the destination again.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys. Return one answer per key.

        A held key is ``PINNED`` and stays.
        """

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Return an immutable snapshot."""

    # --- its blocks as a source -----------------------------------------------------------------------------------

    @property
    def source(self) -> Source | None:
        """The blocks as a source: often the tier itself.

        ``None``: they are only read by :meth:`load`.
        """
        return None

    @property
    def held_pages(self) -> HeldSource | None:
        """The held blocks as a source, if the tier must be asked.

        Otherwise ``None``. A pipeline cannot take refs of the blocks of such a tier when it commits, since that must
        not wait. So a pipeline that starts there pins the blocks first (:meth:`pin`).
        """
        return None

    # --- abilities ------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> DirectTier | None:
        """The tier itself if other threads may read it.

        See :mod:`backends.base.direct`.
        """
        return None

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """Return the depth of each block, if known. Never blocks.

        The depth is the index of a block in its prefix; ``None`` for all if none is known. Depths go with a block that
        is promoted.
        """
        return None

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with a tenant until the returned function is called.

        Calling that function again does nothing. Only called if :attr:`Capabilities.needs_tenants`. A store calls this
        before the copy and ends it after; a read calls it before the pin, and ends it when the lease is released. If
        two tenants tag one key at the same time it has no tenant: a store of it fails, a load misses.
        """
        return _no_tag

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` at every eviction until the returned function is called.

        Only if :attr:`Capabilities.reports_evictions`.
        """
        raise NotImplementedError(f"{self!r} has no on_evicted: see Capabilities.reports_evictions")

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Call ``spiller`` at every eviction until the returned function is called.

        It gets the victims. It is called on the trio thread, during a reservation, so it must record the victims and
        return. If it raises, the victims are evicted. When it is removed, it still owns the victims that it was given.
        Only if :attr:`Capabilities.reports_evictions`.

        Raises:
            ValueError: the tier has a spiller.
        """
        raise NotImplementedError(f"{self!r} has no spill_to: see Capabilities.reports_evictions")

    def list_keys(self) -> list[Key]:
        """Return all keys that are stored, in any order. Only if :attr:`Capabilities.lists_keys`."""
        raise NotImplementedError(f"{self!r} has no list_keys: see Capabilities.lists_keys")

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Report every change to ``watcher`` until the returned function is called.

        Only if :attr:`Capabilities.lists_keys`.
        """
        raise NotImplementedError(f"{self!r} has no watch_keys: see Capabilities.lists_keys")

    def tell_when_back(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a tier that was gone is back.

        A tier that cannot know it never calls.
        """
        return


def _no_tag() -> None:
    """Do nothing: no tag was set."""


class HeldSource(Source):
    """The held blocks of a tier, as a source.

    A pipeline copies them from where they lie.
    """

    __slots__ = ()

    @abstractmethod
    def take(self, lease: ReadLease) -> StrongBlocks:
        """Return the blocks of a lease of that tier.

        They are held until the receiver of the value releases them. The lease belongs to this source from then on. A
        held block can be held once more by its key (:meth:`Source.upgrade`).
        """


class Canary(Protocol):
    """A free block of a cache, used to check its planes.

    A pattern is written to it, stored and loaded, to see whether its planes come back as they were stored.
    """

    def write(self, key: Key, seed: str) -> tuple[Blocks, array[float]]:
        """Write the pattern of ``seed`` into the block.

        Return the block to be stored under ``key``, and its samples.
        """
        ...

    def clear(self) -> Destination:
        """Write zeros into the block; return it as a destination."""
        ...
