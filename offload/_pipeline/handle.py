"""The transfer handle, the result of enqueue.

It shows the state of one container, and can cancel it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import trio

from backends.abc import Key

from .._errors import DrainUnproven
from .lifecycle import Phase, Status
from .result import Progress, TransferResult

if TYPE_CHECKING:
    from trio_util import AsyncValue

    from .container import OffloadContainer


class _Settlement(Protocol):
    awaited_confirmations: int

    def announce_cancel(self, container: OffloadContainer) -> None: ...


class TransferHandle:
    """The state and result of one enqueue. Made by a pipeline only.

    The pipeline does not depend on it: a handle may be dropped.
    """

    __slots__ = ("_container", "_settlement")

    def __init__(self, container: OffloadContainer, settlement: _Settlement) -> None:
        self._container = container
        self._settlement = settlement

    def __repr__(self) -> str:
        return f"<TransferHandle {self.id}: {len(self._container.blocks)} blocks, {self.status.value}>"

    @property
    def id(self) -> int:
        """A number, unique within the pipeline."""
        return self._container.number

    @property
    def status(self) -> Status:
        """The status of the container.

        EVALUATING, QUEUED, TRANSFERRING, then COMPLETE, CANCELLED or FAILED.
        """
        return self._container.status

    @property
    def status_value(self) -> AsyncValue[Status]:
        """The status as a ``trio_util.AsyncValue``.

        A task can wait for a status: ``await handle.status_value.wait_value(Status.TRANSFERRING)``.
        """
        if self._container.watch is None:
            from trio_util import AsyncValue

            self._container.watch = AsyncValue(self._container.status)
        return self._container.watch

    # -- how far ---------------------------------------------------------------------------------------------------

    @property
    def passed_blocks(self) -> Sequence[Key]:
        """The blocks that passed the policies; empty until they have run."""
        container = self._container
        return [key for key in container.blocks.keys if key not in container.filtered] if container.evaluated else ()

    @property
    def filtered_blocks(self) -> Mapping[Key, str]:
        """The filtered blocks, each with the reason."""
        return self._container.filtered

    @property
    def completed_blocks(self) -> Sequence[Key]:
        """The blocks that are at the destination."""
        return self._container.completed

    @property
    def failed_blocks(self) -> Mapping[Key, BaseException]:
        """The blocks whose transfer failed or was rejected, each with the error."""
        return self._container.failed

    @property
    def evicted_blocks(self) -> Sequence[Key]:
        """The weak blocks that were gone when they were upgraded."""
        return self._container.evicted

    @property
    def remaining_blocks(self) -> Sequence[Key]:
        """The blocks without an outcome.

        For a container that was cancelled or failed as a whole, the blocks that never get one.
        """
        container = self._container
        known = {*container.filtered, *container.completed, *container.failed, *container.evicted}
        return [key for key in container.blocks.keys if key not in known]

    @property
    def progress(self) -> Progress:
        """Counts of blocks by state: constant size, cheap to poll."""
        container = self._container
        return Progress(
            total=len(container.blocks),
            passed=len(container.blocks) - len(container.filtered) if container.evaluated else 0,
            filtered=len(container.filtered),
            completed=len(container.completed),
            failed=len(container.failed),
            evicted=len(container.evicted),
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def result(self) -> TransferResult | None:
        """The result, or ``None`` before the end."""
        container = self._container
        if not container.status.terminal:
            return None
        return TransferResult(
            status=container.status,
            completed=tuple(container.completed),
            filtered=container.filtered,
            failed=container.failed,
            evicted=tuple(container.evicted),
            error=container.error,
            routes=container.routes or {},
        )

    async def wait(self) -> TransferResult:
        """Wait for the end and return the result.

        Failures are in the result, not raised. Cancelling this wait changes nothing for the container.
        """
        await self._settled()
        result = self.result
        assert result is not None
        return result

    async def wait_routes(self) -> Mapping[str, TransferResult]:
        """Wait for the optional routes, and return their results by name.

        These are the routes that are not required. They are no part of this handle's own result, which may have been
        there long before. A block that a route dropped because it was behind is ``filtered`` in its result. Cancelling
        this wait changes nothing for the routes.
        """
        await self._settled()
        return {offer.name: await offer.wait() for offer in self._container.offers}

    def request_cancel(self) -> None:
        """Request a cancellation without waiting.

        Synchronous, in constant time, harmless after the end. Before the commit the container ends CANCELLED with
        nothing copied; after it, the copy drains and the container ends by its result.
        """
        self._settlement.announce_cancel(self._container)
        self._container.cancel()

    async def cancel(self) -> None:
        """Request a cancellation and wait until it is confirmed.

        When it returns, no block of the container is referenced, reserved or in flight, whether the container was
        cancelled in time, had ended, or drained. Any number of callers may wait; a caller that is itself cancelled
        leaves the request in effect.

        Raises:
            DrainUnproven: the end of its copy could not be proven in time; its blocks and memory are quarantined.
        """
        self._settlement.announce_cancel(self._container)
        self._container.cancel()
        self._settlement.awaited_confirmations += 1
        try:
            await self._settled()
        finally:
            self._settlement.awaited_confirmations -= 1
        if isinstance(self._container.error, DrainUnproven):
            raise DrainUnproven(*self._container.error.args) from self._container.error

    async def _settled(self) -> None:
        container = self._container
        if container.status.terminal:
            await trio.lowlevel.checkpoint()
            return
        if container.confirmed is None:
            container.confirmed = trio.Event()
        await container.confirmed.wait()

    @property
    def committed(self) -> bool:
        """Whether the container is committed.

        If so, it will end by its result, not as CANCELLED.
        """
        return self._container.phase is Phase.COMMITTED
