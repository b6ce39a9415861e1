"""A tier that could not be made yet, since nobody was there: the place that it will take.

What an engine knows of a tier only from its name it knows once that is made: a stand-in takes its place until then, and for
good, since pipelines know a place by what it is.

Rule 1. It is asked as a :class:`~backends.abc.ReadableTier`, whatever it becomes: that is what can be said of any tier.
Rule 2. It is no :class:`~backends.abc.Source`. What is to be read from, or spilled out of, must be there when the engine opens.
Rule 3. It is made in a thread of its own, one at a time: a disk that hangs holds up nobody. What comes too late is closed.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import trio

from backends.abc import (
    Deletion,
    Destination,
    Key,
    Outcome,
    ReadLease,
    Reservation,
    RoomRequest,
    TenantTier,
    TierStatistics,
)
from backends.closing import close, close_beside, closing

from .._health.faults import describe


class LateTier:
    """Stands for a tier that is only named, and could not be made.

    Args:
        make: makes it; called in a thread.
        block_bytes: size of every block.
        error: what the first attempt to make it came to.
        seals: whether its wrappers encrypt, so that it must know whose its blocks are.
    """

    carry: Callable[[Sequence[Key], str], Callable[[], None]]
    """Only where a wrapper encrypts; see :class:`backends.abc.TenantTier`."""

    def __init__(self, make: Callable[[], Any], block_bytes: int, error: Exception, *, seals: bool) -> None:
        self.why: str = describe(error)
        """What the first attempt to make it came to."""
        self.made: Any = None
        """The tier, once it is there."""
        self._make = make
        self._block_bytes = block_bytes
        self._error: Exception | None = error
        self._limiter = trio.CapacityLimiter(1)
        self._claims: dict[_Claim, None] = {}
        if seals:
            self.carry = self._carry

    def __repr__(self) -> str:
        return f"<LateTier: {self.made if self.made is not None else 'not made yet'!r}>"

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Make it, enter it where it can be entered, and leave or close it. The first time this tells what is known already."""
        error, self._error = self._error, None
        if error is not None:
            await trio.lowlevel.checkpoint()
            raise error
        made = await _made_in_thread(self._make, self._limiter)
        with closing(made):
            async with made if hasattr(type(made), "__aenter__") else nullcontext():
                with self._being(made):
                    yield

    @contextmanager
    def _being(self, made: Any) -> Iterator[None]:
        """As long as this lasts, it is what the stand-in stands for."""
        self.made = made
        try:
            for claim in self._claims:
                claim.pass_on(made)
            yield
        finally:
            for claim in self._claims:
                claim.take_back()
            self.made = None

    # --- the contract -----------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._block_bytes

    @property
    def _there(self) -> Any:
        if self.made is None:
            raise ConnectionError(f"{self!r} is not there")
        return self.made

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that could be found when it was asked."""
        return await self._there.contains(keys)  # type: ignore[no-any-return]

    async def pin(self, keys: Sequence[Key]) -> ReadLease:
        """See :class:`backends.abc.ReadableTier`."""
        return await self._there.pin(keys)  # type: ignore[no-any-return]

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """See :class:`backends.abc.ReadableTier`."""
        return await self._there.load(lease, destination)  # type: ignore[no-any-return]

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """See :class:`backends.abc.ReadableTier`."""
        return await self._there.delete(keys)  # type: ignore[no-any-return]

    async def reserve(self, request: RoomRequest) -> Reservation:
        """See :class:`backends.abc.TransferExecutor`."""
        return await self._there.reserve(request)  # type: ignore[no-any-return]

    def reserve_nowait(self, request: RoomRequest) -> Reservation:
        """See :class:`backends.abc.TransferExecutor`."""
        return self._there.reserve_nowait(request)  # type: ignore[no-any-return]

    def statistics(self) -> TierStatistics:
        """The tier's own."""
        return self._there.statistics()  # type: ignore[no-any-return]

    # --- whose its blocks are ---------------------------------------------------------------------------------------

    def _carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Kept until the tier is there, and then passed on."""
        claim = _Claim(keys, tenant)
        if self.made is not None:
            claim.pass_on(self.made)
        self._claims[claim] = None

        def end() -> None:
            self._claims.pop(claim, None)
            claim.take_back()

        return end


class _Claim:
    """Whose some keys are, and what ends that where it was passed on."""

    def __init__(self, keys: Sequence[Key], tenant: str) -> None:
        self._keys = keys
        self._tenant = tenant
        self._end: Callable[[], None] | None = None

    def pass_on(self, tier: object) -> None:
        if isinstance(tier, TenantTier):
            self._end = tier.carry(self._keys, self._tenant)

    def take_back(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


async def _made_in_thread(make: Callable[[], Any], limiter: trio.CapacityLimiter) -> Any:
    """Make it where blocking hurts nobody. Cancelled, it leaves at once, and what is made nonetheless is closed."""
    made: list[Any] = []
    lock, left = threading.Lock(), False

    def work() -> None:
        one = make()
        with lock:
            if not left:
                made.append(one)
                return
        close(one)

    try:
        await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
        return made.pop()
    except BaseException as error:
        with lock:
            left = True
        for one in made:
            close_beside(error, one)
        raise
