"""TransferHandle: what enqueue returns. A view of one container, with the power to cancel it."""

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


class TransferHandle:
    """What became, or will become, of the blocks of one enqueue. Made by a pipeline only.

    Nothing depends on a handle being kept: a dropped one changes nothing.
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
        """Where the container is: EVALUATING, QUEUED, TRANSFERRING, then COMPLETE, CANCELLED or FAILED."""
        return self._container.status

    @property
    def status_value(self) -> AsyncValue[Status]:
        """The status as a ``trio_util.AsyncValue``: ``await handle.status_value.wait_value(Status.TRANSFERRING)``."""
        if self._container.watch is None:
            from trio_util import AsyncValue

            self._container.watch = AsyncValue(self._container.status)
        return self._container.watch

    # -- how far ---------------------------------------------------------------------------------------------------

    @property
    def passed_blocks(self) -> Sequence[Key]:
        """The blocks the policies let through; empty until they have run."""
        container = self._container
        return [key for key in container.blocks.keys if key not in container.filtered] if container.evaluated else ()

    @property
    def filtered_blocks(self) -> Mapping[Key, str]:
        """The blocks kept back, each with the reason."""
        return self._container.filtered

    @property
    def completed_blocks(self) -> Sequence[Key]:
        """The blocks that are in the destination."""
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
        """The blocks of which nothing is known yet, or ever will be, where the container was cancelled or failed whole."""
        container = self._container
        known = {*container.filtered, *container.completed, *container.failed, *container.evicted}
        return [key for key in container.blocks.keys if key not in known]

    @property
    def progress(self) -> Progress:
        """How many blocks are where: constant size, cheap to poll."""
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
        """The result, or None while there is none."""
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
        """Wait for the end and return the result, whatever it is; failures are in it, not raised.

        Cancelling the waiter changes nothing for the container.
        """
        await self._settled()
        result = self.result
        assert result is not None
        return result

    def request_cancel(self) -> None:
        """Ask for a cancellation without waiting. Synchronous, in constant time, harmless after the end.

        Before the commit the container ends CANCELLED with nothing copied; after it, the copy drains and the container
        ends by its result.
        """
        self._container.cancel()

    async def cancel(self) -> None:
        """Ask for a cancellation and wait until it is confirmed.

        When it returns, nothing of the container is referenced, reserved or in flight any more, whether it was
        cancelled in time, or had ended, or drained. Any number of callers may wait; a waiter that is itself cancelled
        leaves the request standing.

        Raises:
            DrainUnproven: the end of its copy could not be proven in time; what it touched is quarantined.
        """
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
        """Whether the point of no return is behind it: it will end by its result, not CANCELLED."""
        return self._container.phase is Phase.COMMITTED
