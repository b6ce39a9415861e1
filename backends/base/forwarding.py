"""Bases of tiers, sources and destinations in front of another one.

A breaker, a placeholder for a tier that is absent, and a chain of wrappers each stand in front of one tier and keep its
contract. :class:`ForwardingTier` forwards the whole contract of :mod:`backends.abc` to that tier; a subclass overrides the
parts that it changes, so that its code shows the differences and nothing else.

Rule 1. Entering it enters the inner tier if that is an async context manager; leaving it leaves the inner tier.
Rule 2. All abilities are forwarded except :attr:`~backends.abc.Tier.direct`: a read in another thread would pass by the tier in
        front. A subclass that changes keys or bytes translates every ability that deals in them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from maru.kv_events import KeyWatcher

from ..abc import (
    Capabilities,
    Deletion,
    Destination,
    HeldSource,
    Key,
    Outcome,
    ReadLease,
    Reservation,
    RoomRequest,
    Source,
    Tier,
    TierStatistics,
)
from .leaving import Listener, Spill
from .pages import Pages

Self = TypeVar("Self", bound="ForwardingTier")


class ForwardingTier(Tier):
    """A tier in front of another one, which forwards every call.

    Attributes:
        inner: the tier that is forwarded to.
    """

    inner: Tier

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    async def __aenter__(self: Self) -> Self:
        """Enter the inner tier, if it can be entered."""
        # Looked up on the type, as `async with` does: an attribute of the instance does not make a context manager.
        inner: Any = self.inner
        if hasattr(type(inner), "__aenter__"):
            await inner.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """Leave the inner tier, if it can be left."""
        inner: Any = self.inner
        if hasattr(type(inner), "__aexit__"):
            await inner.__aexit__(*exc)

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self.inner.block_bytes

    @property
    def name(self) -> str:
        """The name of the inner tier."""
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner tier."""
        return self.inner.capabilities

    async def reserve(self, request: RoomRequest) -> Reservation:
        """Take room for blocks; see :class:`backends.abc.TransferExecutor`."""
        return await self.inner.reserve(request)

    def reserve_nowait(self, request: RoomRequest) -> Reservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        return self.inner.reserve_nowait(request)

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that the inner tier has.

        See :class:`backends.abc.Tier`.
        """
        return await self.inner.contains(keys)

    async def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Pin the longest prefix of ``keys`` that is there; see :class:`backends.abc.Tier`."""
        return await self.inner.pin(keys)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy leased blocks to ``destination``; see :class:`backends.abc.Tier`."""
        return await self.inner.load(lease, destination)

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys; a held one is ``PINNED`` and stays."""
        return await self.inner.delete(keys)

    def statistics(self) -> TierStatistics:
        """Return the statistics of the inner tier."""
        return self.inner.statistics()

    # --- abilities ------------------------------------------------------------------------------------------------

    @property
    def source(self) -> Source | None:
        """The blocks of the inner tier as a source."""
        return self.inner.source

    @property
    def held_pages(self) -> HeldSource | None:
        """The held blocks of the inner tier as a source."""
        return self.inner.held_pages

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that are there now."""
        return self.inner.contains_nowait(keys)

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """Return the depth of each block, if known."""
        return self.inner.depths_of(keys)

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with their tenant until the returned function is called."""
        return self.inner.carry(keys, tenant)

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` at every eviction until the returned function is called."""
        return self.inner.on_evicted(listener)

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Call ``spiller`` with all victims until the returned function is called."""
        return self.inner.spill_to(spiller)

    def list_keys(self) -> list[Key]:
        """Return all keys that are stored, in any order."""
        return self.inner.list_keys()

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Report every change to ``watcher`` until the returned function is called."""
        return self.inner.watch_keys(watcher)

    def tell_when_back(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the inner tier is back after an absence."""
        self.inner.tell_when_back(listener)


class ForwardingDestination(Destination):
    """A destination in front of another one, which forwards all its abilities.

    Attributes:
        inner: the destination that is forwarded to.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: Destination) -> None:
        self.inner: Destination = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def block_bytes(self) -> int:
        """Size of every place, in bytes."""
        return self.inner.block_bytes

    @property
    def on_device(self) -> bool:
        """Whether the places lie on a device."""
        return self.inner.on_device

    @property
    def sums_pages(self) -> bool:
        """Whether the inner destination sums pages as it copies them."""
        return self.inner.sums_pages

    @property
    def is_readable(self) -> bool:
        """Whether the inner destination can be read back."""
        return self.inner.is_readable

    @property
    def plane_names(self) -> Sequence[str]:
        """The names of the planes of a block."""
        return self.inner.plane_names

    def views(self) -> Pages | None:
        """Return the writable addresses of the places, or ``None``."""
        return self.inner.views()

    def numbered(self) -> tuple[object, Sequence[int]]:
        """Return the numbered place of the blocks and their numbers, or ``None``."""
        return self.inner.numbered()

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into the places from ``start`` on."""
        self.inner.copy_in(start, pages)

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        """Copy pages into the places, and return their sums."""
        return self.inner.copy_in_and_sum(start, pages)

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy the places at these positions into pages."""
        self.inner.copy_out(positions, pages)

    def plane_samples(self, positions: Sequence[int]) -> Sequence[array[float] | None]:
        """Return the samples of the blocks at these positions."""
        return self.inner.plane_samples(positions)


class ForwardingSource(Source):
    """A source in front of another one, which forwards all its abilities.

    Attributes:
        inner: the source that is forwarded to.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: Source) -> None:
        self.inner: Source = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self.inner.block_bytes

    @property
    def plane_names(self) -> Sequence[str]:
        """The names of the planes of a block."""
        return self.inner.plane_names

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position."""
        self.inner.copy_out(refs, pages)

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Return the addresses of these blocks, or ``None``."""
        return self.inner.views(refs)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take one counted ref for each key that is present."""
        return self.inner.upgrade(keys)

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref."""
        self.inner.release(refs)

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> Sequence[int | None] | None:
        """Return the checksums of the blocks, as far as they are known."""
        return self.inner.checksums_of(keys, refs)

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Drop blocks that a copy has found damaged."""
        self.inner.forget_damaged(keys, refs)

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> bool:
        """Drop blocks that the caller has found damaged."""
        return self.inner.forget_held(keys, refs)

    def used_bytes(self, page: memoryview) -> int | None:
        """Return the number of used leading bytes of a page, or ``None``."""
        return self.inner.used_bytes(page)

    def numbers_of(self, refs: Sequence[int]) -> tuple[object, Sequence[int]]:
        """Return the numbered place of these blocks and their numbers, or ``None``."""
        return self.inner.numbers_of(refs)

    def plane_samples(self, refs: Sequence[int]) -> Sequence[array[float] | None]:
        """Return the samples of each of these blocks."""
        return self.inner.plane_samples(refs)
