"""The values that cross the contracts of :mod:`backends.abc`, which exports them.

They are blocks, outcomes, requests for room and figures. A block is a position in parallel columns (its key, its ref,
its outcome), never an object of its own. An answer is a value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

from .base.keys import distinct_keys

if TYPE_CHECKING:
    from .abc import Source

Key: TypeAlias = bytes
"""Key of a block: an opaque hash of content and tenant.

At most ``MAX_KEY_BYTES`` long; see :func:`offload.block_key`. Public entry points check keys by :func:`check_keys`.
"""

EVICTED = -1
"""The ref of a block that was gone when it was upgraded."""

WhenFull: TypeAlias = Literal["wait", "evict", "partial", "fail"]
"""The behaviour of a reservation in a full place.

See :meth:`TransferExecutor.reserve`.
"""


# --- blocks, as columns -------------------------------------------------------------------------------------------


class Blocks:
    """Blocks of one source that are enqueued together, as columns.

    The source makes them.

    Attributes:
        source: the place that has the bytes.
        keys: one key per block, all different.
        refs: the source's reference to each block, or ``None`` if it is taken at the upgrade.
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
        """Pass ownership of this value to a pipeline.

        Blocks that hold refs can be passed on once.
        """

    def release(self) -> None:
        """Release the refs that this value holds, if any. Idempotent."""


class ExternalBlocks(Blocks):
    """Blocks, by their numbers, that the engine keeps until their handle settles."""

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
            raise ValueError(f"{self!r} was already given to a pipeline, or released: its refs can be taken only once")
        self._given = True

    def release(self) -> None:
        """Release the refs. Idempotent; a block without refs may be evicted."""
        refs = self.refs
        self.refs: list[int] | None = []
        if refs:
            self.source.release(refs)


class WeakBlocks(Blocks):
    """Keys without refs.

    Blocks that are present at the upgrade are transferred; the others count as *evicted*.
    """

    __slots__ = ()


# --- answers ------------------------------------------------------------------------------------------------------


class Outcome:
    """The result for one block: an instance of a subclass below."""

    __slots__ = ()


@attrs.frozen
class Stored(Outcome):
    """The block was stored, and can be found by its key."""


@attrs.frozen
class Duplicate(Outcome):
    """The key was there already, so nothing was written.

    It counts as completed: the first writer wins.
    """


@attrs.frozen
class Loaded(Outcome):
    """The block's bytes are at the destination.

    They are verified if the tier keeps checksums.
    """


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
    """The block could not be loaded.

    It is not there (any more), or its bytes are not those that were stored.
    """

    reason: str
    """The reason in a word: ``gone``, ``torn``, ``damaged``, ``foreign``, ``version``, ``unsummed``."""


STORED = Stored()
DUPLICATE = Duplicate()
LOADED = Loaded()


class Deletion(enum.Enum):
    """The answer of a delete for one key."""

    DELETED = "deleted"
    MISSING = "missing"
    PINNED = "pinned"
    UNAVAILABLE = "unavailable"
    """Unknown: the tier could not be asked, or cannot delete."""


# --- room ---------------------------------------------------------------------------------------------------------


class RoomRequest:
    """A request for room, which can shrink while it waits.

    It then keeps its place in the queue.

    One request is given to one :meth:`TransferExecutor.reserve` at a time. Used on one thread.

    Attributes:
        keys: the blocks; fewer after a :meth:`shrink`.
        block_bytes: size of every block.
        when_full: the behaviour if there is not room for all, see :meth:`TransferExecutor.reserve`.
        waits: whether it waits for room: ``wait`` and ``evict`` do, ``partial`` and ``fail`` never.
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
        """Reduce the request to ``keys``, a subsequence of :attr:`keys`. Never blocks.

        It keeps its place in the queue.

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
        """Let :meth:`shrink` call ``shrunk`` while the ``with`` block lasts.

        A place puts its wait into this block.

        A place that does not use this cannot be asked for less, and need not support it.

        Args:
            shrunk: looks at :attr:`keys` again and may grant them; returns False if it no longer waits for them.
        """
        self._shrunk = shrunk
        try:
            yield
        finally:
            self._shrunk = None


# --- figures ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Capabilities:
    """The kept parts of the contract, and the abilities of a tier.

    See :attr:`backends.abc.TransferExecutor.capabilities`; :func:`backends.testing.check_tier` tests all that are declared.
    """

    pins: bool = True
    """Whether a leased block stays until the lease ends.

    Without it, a hit is a hint: the block may be gone when it is loaded, and is then :class:`Missed`. A lease still
    keeps this process from evicting and deleting it.
    """
    deletes: bool = True
    """Whether blocks can be deleted, and so evicted.

    Without it, stored blocks stay: :meth:`Tier.delete` answers ``UNAVAILABLE``, and ``wait`` and ``evict`` raise
    :class:`CapacityError` if only an eviction could make room.
    """
    asked_first: bool = True
    """Whether a store asks which blocks are there before it offers them.

    Without it, all are offered, and present ones come back as duplicates: for a tier that is as slow to ask as to offer
    to.
    """
    per_key_outcomes: bool = True
    """Whether a block that cannot be stored fails alone.

    Without it, all blocks that were copied with it fail too.
    """
    answers_at_once: bool = False
    """Whether :meth:`TransferExecutor.contains_nowait` answers.

    Such a tier knows its keys without asking a server, for example.
    """
    needs_tenants: bool = False
    """Whether the tier needs :meth:`Tier.carry`, to encrypt for example."""
    reports_evictions: bool = False
    """Whether :meth:`Tier.on_evicted` and :meth:`Tier.spill_to` work."""
    lists_keys: bool = False
    """Whether :meth:`Tier.list_keys` and :meth:`Tier.watch_keys` work."""


@attrs.frozen
class TierStatistics:
    """A snapshot of one tier; counters count blocks since it was made."""

    capacity_bytes: int
    """Capacity, in bytes."""
    used_bytes: int
    """Bytes of blocks and reservations."""
    blocks: int
    """Keys that can be found."""
    held_blocks: int
    """Blocks held by refs or leases."""
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
