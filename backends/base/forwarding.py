"""Bases of tiers in front of another tier, and of destinations in front of another one.

A breaker, a placeholder for a tier that is absent, and a chain of wrappers each stand in front of one tier and keep its
contract. :class:`ForwardingTier` forwards the whole contract of :mod:`backends.abc` to that tier; a subclass overrides what
it changes, so that its code shows the differences and nothing else.

Rule 1. Entering it enters the inner tier if that is an async context manager; leaving it leaves the inner tier.
Rule 2. What only some tiers have (to be a :class:`~backends.abc.Tier` or a :class:`~backends.abc.Source`, to report evictions,
        ...) is not forwarded here: a subclass that changes keys or bytes must translate it, and one that changes neither
        forwards it by :meth:`ForwardingTier._forward_optional`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeVar

from ..abc import (
    Capabilities,
    Deletion,
    Destination,
    Key,
    Outcome,
    ReadLease,
    Reservation,
    RoomRequest,
    TierStatistics,
)
from .pages import Pages

Self = TypeVar("Self", bound="ForwardingTier")

OPTIONAL: Final = (
    *("upgrade", "release", "views", "copy_out"),  # Source
    *("checksums_of", "forget_damaged"),  # ChecksummedSource
    "used_bytes",  # PaddedSource
    "carry",  # TenantTier
    "depths_of",  # DepthTier
    *("on_evicted", "spill_to"),  # SpillingTier
    *("list_keys", "watch_keys"),  # KeyBook
)
"""The methods of the optional contracts, by which a tier with them is recognised."""


class ForwardingTier:
    """A tier in front of another one, which forwards every call of the contract to it.

    Attributes:
        inner: the tier behind this one.
    """

    inner: Any

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    async def __aenter__(self: Self) -> Self:
        """Enter the inner tier, if it can be entered."""
        # Looked up on the type, as `async with` does: an attribute of the instance does not make a context manager.
        if hasattr(type(self.inner), "__aenter__"):
            await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """Leave the inner tier, where it was entered."""
        if hasattr(type(self.inner), "__aexit__"):
            await self.inner.__aexit__(*exc)

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        size: int = self.inner.block_bytes
        return size

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner tier."""
        return getattr(self.inner, "capabilities", Capabilities())

    async def reserve(self, request: RoomRequest) -> Reservation:
        """Take room for blocks; see :class:`backends.abc.TransferExecutor`."""
        reservation: Reservation = await self.inner.reserve(request)
        return reservation

    def reserve_nowait(self, request: RoomRequest) -> Reservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        reservation: Reservation = self.inner.reserve_nowait(request)
        return reservation

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that the inner tier had when it was asked; see :class:`backends.abc.ReadableTier`."""
        found: AbstractSet[Key] = await self.inner.contains(keys)
        return found

    async def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Pin the longest prefix of ``keys`` that is there; see :class:`backends.abc.ReadableTier`."""
        lease: ReadLease = await self.inner.pin(keys)
        return lease

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy leased blocks to ``destination``; see :class:`backends.abc.ReadableTier`."""
        outcomes: Sequence[Outcome] = await self.inner.load(lease, destination)
        return outcomes

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys; a held one is ``PINNED`` and stays."""
        answers: list[Deletion] = await self.inner.delete(keys)
        return answers

    def statistics(self) -> TierStatistics:
        """The statistics of the inner tier."""
        statistics: TierStatistics = self.inner.statistics()
        return statistics

    def _forward_optional(self) -> None:
        """Provide the optional methods that the inner tier has.

        They become attributes of this instance, since optional contracts are recognised by their methods, which are looked up
        without ``__getattr__``. And a copy calls the inner tier's method directly, without a call in between.
        """
        for name in OPTIONAL:
            method = getattr(self.inner, name, None)
            if method is not None:
                setattr(self, name, method)


class ForwardingDestination(Destination):
    """A destination in front of another one, which forwards all its abilities.

    Attributes:
        inner: the destination behind this one.
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
