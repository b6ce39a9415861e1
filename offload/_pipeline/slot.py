"""A slot of the transfer stage, which copies batch after batch.

P3: from the upgrade on nothing is cancelled. P4: the last sweep comes right before it. P5: the copy is of one flat
list.

The steps of a slot with a batch, in this order:

1. Reserve room at the destination. This may wait, and holds nothing while it does. A container that is cancelled
   meanwhile settles at once, and the rest of the batch keeps its place in the queue for room, and its deadline. If the
   destination has no way to ask for less, the rest asks again, without leaving the slot. A destination that is broken
   rejects the batch at once. If loads go first (:mod:`offload._pipeline.priority`), a batch that had to wait for room
   yields to them, with its room.
2. Commit, without a checkpoint: sweep, claim, upgrade, give back the room of blocks that dropped out, and only then
   settle their containers. An exception meanwhile refuses the batch, and then each container of it for itself.
3. Copy, shielded, bounded by ``transfer_timeout`` and more for its bytes. Outcomes or an ordinary exception prove that
   the copy is over, unless there is an :class:`backends.abc.Unproven` in them. Nothing else does, neither a timeout nor
   Ctrl-C, alone or in a group, and the memory that the copy touched is quarantined.
4. Release the resources of the copy, then settle.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from backends.abc import STORED, Failed, Key, Outcome, Reservation, RoomRequest, Unproven
from maru.exception_groups import holds, unwrap

from .._errors import (
    DestinationFull,
    DrainUnproven,
    OffloadError,
    PipelineClosed,
    TierUnavailable,
    TransferFailed,
)
from .._instruments import Hooks
from .container import FlatBlocks, OffloadBatch, OffloadContainer, depths_of
from .containment import escaping_part, give_back, only_cancelled
from .lifecycle import Phase, Status
from .offer import blocks_of
from .outcomes import all_failed, assign_outcomes, unproven_among

if TYPE_CHECKING:
    from .._config import PipelineConfig
    from .transfer import Transfer

_TRANSFERRING = Status.TRANSFERRING
_FAILED = Phase.FAILED
_log = logging.getLogger("offload.pipeline")
_IN_A_ROW = 4
"""Most batches that a slot copies in one tick, if none waits."""
_GIVE_WAY = 3
"""Ticks that a slot leaves to tasks that await a cancellation.

They wait for its confirmation. Bounded, so that cancelling holds up nothing.
"""


@attrs.define(eq=False)
class Slot:
    """A slot of the transfer stage.

    It has one batch at a time, from its reservation to its end.
    """

    stage: Transfer
    copying: FlatBlocks | None = None
    """The blocks being copied."""
    _block_bytes: int = 0
    """The size of its blocks in bytes.

    Read from the source while that may still refuse the batch.
    """
    _reserving: trio.CancelScope | None = None
    """The scope of a wait for room, or for loads.

    These are the only waits of a slot that a cancel may end.
    """
    _waiting: OffloadBatch | None = None
    """The batch that waits for room, or yields."""
    _request: RoomRequest | None = None
    """The request for room, which shrinks with the batch."""
    _ends_at: float = math.inf
    """The deadline of the copy, in seconds on the pipeline's clock."""
    _bound: trio.CancelScope = attrs.Factory(trio.CancelScope)
    """Bounds the copies, one after the other, until one overruns.

    Entering a scope for each copy was tried, and is expensive.
    """
    _overran: bool = False
    """Whether a copy overran."""

    def withdraw(self, container: OffloadContainer) -> None:
        """Take a cancelled or failed container out of the waiting batch.

        The batch waits for room or yields. In any other step this does nothing: the next sweep finds the container.
        """
        batch = self._waiting
        if batch is None or self._reserving is None or self._reserving.cancel_called:
            return
        left = OffloadBatch([container for container in batch.containers if container.phase.proceeds])
        if left.containers and self._shrink(left.keys):
            batch.keep(left.containers, left.keys)
            self.stage.settlement.settle(container)
        else:
            self._reserving.cancel()

    def _shrink(self, keys: Sequence[Key]) -> bool:
        """Ask the destination for less room, and return whether it can.

        If it raises it cannot, and the caller of cancel does not learn of the error.
        """
        if self._request is None:  # it has its room, and yields to loads with it
            return False
        try:
            return self._request.shrink(keys)
        except Exception:
            _log.exception("%r could not shrink a request", self.stage.destination)
            return False

    def cut_off_at(self, deadline: float) -> None:
        """Wait for nothing past this time."""
        if self._reserving is not None:
            self._reserving.deadline = min(self._reserving.deadline, deadline)
        if self.copying is not None:
            self._ends_at = min(self._ends_at, deadline)
            self.stage.expire_at(self._ends_at)

    def expire(self, now: float) -> float:
        """End the copy if its time is over.

        Returns the time of the next check.
        """
        if self.copying is None:
            return math.inf
        if self._ends_at > now:
            return self._ends_at
        self._overran = True
        self._bound.cancel()
        return math.inf

    async def run(self) -> None:
        """Take batches from the inbound channel and transfer them, for ever."""
        batch: OffloadBatch | None = None
        in_a_row = 0
        while True:
            # This scope is left only if a copy took too long.
            with trio.CancelScope() as self._bound:
                self._overran = False
                while True:
                    if batch is None:
                        if self.stage.settlement.awaited_confirmations:
                            await self._give_way()
                        batch = await self.stage.inbound.receive(self)
                    carried, batch = batch, None
                    await self._carry(carried)
                    if self._overran:
                        break  # the copy ended in the tick in which its time was over: this scope would end the next one's wait
                    # If copies do not wait, a few in the same tick share the price of being scheduled.
                    in_a_row += 1
                    if in_a_row < _IN_A_ROW and not self.stage.settlement.awaited_confirmations:
                        batch = self.stage.inbound.receive_nowait(self)
                    if batch is None:
                        in_a_row = 0  # a tick ends here

    async def _give_way(self) -> None:
        """Let tasks that await a cancellation run before the next batch.

        They wait for its confirmation.
        """
        for _ in range(_GIVE_WAY):
            if not self.stage.settlement.awaited_confirmations:
                return
            await trio.lowlevel.checkpoint()

    async def _carry(self, batch: OffloadBatch) -> None:
        """Transfer one batch.

        However this is left, its containers have settled, or wait in the inbound channel again.
        """
        stage = self.stage
        if stage.hooks.transfer:
            stage.hooks.fire("transfer", batch)
        while batch.containers:
            reservation = flat = None
            try:
                reservation = await self._reserve(batch)
                if reservation is not None:
                    flat = self._commit(batch, reservation)
                elif batch.containers:
                    raise TypeError(f"{stage.destination!r} returned no reservation")
            except Exception as error:  # the source or the destination has broken its contract
                if reservation is not None:
                    give_back(reservation.release)
                self._one_by_one(batch, error)
                continue
            except BaseException as error:
                self._end_all(batch, TransferFailed(f"the transfer stage ended: {error!r}"))
                if (leaving := escaping_part(error)) is not None:
                    raise leaving from leaving.__cause__
            if reservation is not None and flat is not None:
                seconds = stage.config.time_to_copy(len(flat.keys) * self._block_bytes)
                self._ends_at = min(stage.clock.current_time() + seconds, stage.cutoff)
                stage.expire_at(self._ends_at)
                await self._copy(batch, flat, reservation)
            return

    async def carry_reserved(self, batch: OffloadBatch, reservation: Reservation) -> None:
        """Transfer a batch that has its room, and settle it.

        The destination waits for nothing, so there is no time bound.
        """
        stage = self.stage
        if stage.hooks.transfer:
            stage.hooks.fire("transfer", batch)
        try:
            self._block_bytes = stage.source.block_bytes
            flat = self._commit(batch, reservation)
        except Exception as error:
            give_back(reservation.release)
            self._one_by_one(batch, error)
            return
        if flat is not None:
            await self._copy(batch, flat, reservation)

    # -- 1. reserve --------------------------------------------------------------------------------------------------

    async def _reserve(self, batch: OffloadBatch) -> Reservation | None:
        """Reserve room for the rest of the batch.

        ``None`` if nothing is left: all of it has settled then.
        """
        stage = self.stage
        deadline: float | None = None
        while True:
            if swept := batch.sweep_cancelled():
                stage.settlement.settle_all(swept)
            if not batch.containers:
                return None
            if stage.cutoff < math.inf and trio.current_time() >= stage.cutoff:
                self._end(batch, PipelineClosed("the time to drain was over before its copy started"))
                return None
            try:
                self._block_bytes = stage.source.block_bytes
                if deadline is None:
                    return stage.destination.reserve_nowait(
                        RoomRequest(batch.keys, self._block_bytes, stage.config.on_destination_full)
                    )
                reservation = await self._wait_for_room(batch, deadline)
                if reservation is not None:
                    return await self._yield_to_loads(batch, reservation)
                if all(container.phase.proceeds for container in batch.containers):
                    self._end(batch, _no_room(stage.destination, stage.config))
            except Exception as error:
                match unwrap(error):
                    case TierUnavailable() as unavailable:
                        self._reject(batch, unavailable)
                    case trio.WouldBlock() if deadline is None:
                        if stage.priority is not None:
                            stage.priority.release_permit(self)
                        deadline = min(trio.current_time() + stage.config.destination_timeout, stage.cutoff)
                    case alone:
                        self._one_by_one(batch, alone)

    async def _wait_for_room(self, batch: OffloadBatch, deadline: float) -> Reservation | None:
        stage = self.stage
        reservation = None
        self._reserving = trio.CancelScope(deadline=deadline)
        self._waiting = batch
        self._request = RoomRequest(batch.keys, self._block_bytes, stage.config.on_destination_full)
        try:
            with self._reserving:
                reservation = await stage.destination.reserve(self._request)
        finally:
            self._reserving = self._waiting = self._request = None
        return reservation

    async def _yield_to_loads(self, batch: OffloadBatch, reservation: Reservation) -> Reservation | None:
        """Yield to loads that began while the batch waited for room.

        The batch keeps its room. A container that is cancelled meanwhile gives its share of the room back.
        """
        stage = self.stage
        if stage.priority is None:
            return reservation
        while True:
            self._reserving = trio.CancelScope(deadline=stage.cutoff)
            self._waiting = batch
            try:
                with self._reserving:
                    await stage.priority.yield_to_loads(self)
                    return reservation
            except BaseException:
                give_back(reservation.release)
                raise
            finally:
                self._reserving = self._waiting = None
            # Only here if the wait was cancelled: by `withdraw`, or because the drain is over. The room is released
            # before any container settles, since a caller that learns of a cancel may want that room at once.
            swept = batch.sweep_cancelled()
            late = trio.current_time() >= stage.cutoff
            if late or not batch.containers:
                give_back(reservation.release)
            else:
                reservation.keep(batch.keys)
            stage.settlement.settle_all(swept)
            if late:
                self._end(batch, PipelineClosed("the time to drain was over before its copy started"))
            if not batch.containers:
                return None

    def _one_by_one(self, batch: OffloadBatch, error: BaseException) -> None:
        """Try each container of a refused batch alone.

        An error that one container causes in a tier is no reason for another to fail. The first one stays in the batch,
        alone; a batch of one has failed.
        """
        first, *others = batch.containers
        if not others:
            self._end(batch, error)
            return
        for container in reversed(others):
            self.stage.inbound.put_back(container)
        batch.keep([first])

    def _reject(self, batch: OffloadBatch, error: TierUnavailable) -> None:
        """End the batch since the destination is broken.

        Each of its blocks has failed with ``error``.
        """
        containers = batch.containers
        batch.keep([])
        for container in containers:
            keys = container.keys
            container.abandon(error)
            if container.phase is _FAILED:  # not if an observer of the one before has cancelled it
                container.failed = dict.fromkeys(keys, error)
            self.stage.settlement.settle(container)

    def _end(self, batch: OffloadBatch, error: BaseException) -> None:
        """End the batch before anything was reserved.

        An error that is not ours becomes the cause of a TransferFailed.
        """
        if not isinstance(error, OffloadError):
            cause, error = error, TransferFailed(f"the destination refused the batch: {error!r}")
            error.__cause__ = cause
        self._end_all(batch, error)

    def _end_all(self, batch: OffloadBatch, error: BaseException) -> None:
        containers = batch.containers
        batch.keep([])
        for container in containers:
            # One after the other: an observer of the first may cancel the next, which is CANCELLED then, not FAILED.
            container.abandon(error)
            self.stage.settlement.settle(container)

    # -- 2. commit, without a checkpoint -------------------------------------------------------------------------------

    def _commit(self, batch: OffloadBatch, reservation: Reservation) -> FlatBlocks | None:
        stage, hooks = self.stage, self.stage.hooks
        granted = reservation.granted
        short = len(granted) < len(batch.keys)
        if short and stage.config.on_destination_full == "fail":
            _fail_where_short(batch, granted)
        if hooks.pre_claim:
            hooks.fire("pre_claim", batch)
        # No checkpoint from this sweep to the upgrade, so that no task can cancel in between; a container that the hook
        # of an instrument cancels there is dropped by the claim. Dropped containers settle last: their observers may
        # cancel others of the batch.
        dropped = batch.sweep_cancelled()
        if hooks.sweep_claim_gap:
            hooks.fire("sweep_claim_gap", batch)
        dropped += batch.claim()
        if hooks.post_claim:
            _announce(hooks, batch)
        committed, before = batch.containers, len(granted)
        flat = None
        try:
            flat = batch.upgrade(stage.source, granted if short else None)
            if len(flat.keys) < before:
                reservation.keep(flat.keys)
        except Exception:
            if flat is not None:
                give_back(stage.source.release, flat.held)
            give_back(reservation.release)
            for container in committed:  # its keys may be fewer by now than those that were marked on its behalf
                container.keys = [key for key in container.blocks.keys if key not in container.filtered]
                container.evicted, container.failed = (), {}
            batch.keep(committed)
            stage.settlement.settle_all(dropped)
            raise
        if flat.dropped:
            # The mark of an evicted block goes now: a caller that has the block again may store it.
            stage.settlement.marks.release(flat.dropped)
        batch.keep(flat.containers, flat.keys)
        if not flat.keys:
            give_back(reservation.release)
        if dropped:
            stage.settlement.settle_all(dropped)
        if len(flat.containers) < len(committed):
            stage.settlement.settle_all([container for container in committed if not container.keys])
        return flat if flat.keys else None

    # -- 3. copy -----------------------------------------------------------------------------------------------------

    async def _copy(self, batch: OffloadBatch, flat: FlatBlocks, reservation: Reservation) -> None:
        stage, hooks = self.stage, self.stage.hooks
        for container in flat.containers:
            if container.watch is None:
                container.status = _TRANSFERRING  # as in move(), for the common case: it was QUEUED
            else:
                container.move(_TRANSFERRING)
        stage.batches += 1
        self.copying = flat
        if hooks.xfer_start:
            hooks.fire("xfer_start", batch)
        # Until the copy has proven its end: an exception that leaves it in between leaves it unproven.
        outcomes: Sequence[Outcome] | None = None
        cause: BaseException | None = None
        try:
            if stage.chain is not None:
                hold_until_released(reservation)
            note_depths(reservation, flat.containers)
            if stage.sampling is not None:
                await stage.sampling(flat.keys, flat.refs)
            outcomes = list(await reservation.transfer(stage.source, flat.refs))
            if (cause := unproven_among(outcomes)) is not None:
                outcomes = None
        except TierUnavailable as error:  # it broke since it granted room, and nothing was copied
            outcomes = [Failed(error)] * len(flat.keys)
        except Exception as error:
            if holds(error, Unproven):
                cause = error
            else:
                outcomes = all_failed(flat, f"the copy failed: {error!r}", error)
        except BaseException as error:
            # Its time is over, or Ctrl-C: alone or in a group, it left the copy, perhaps with a thread that still
            # writes.
            leaving = escaping_part(error)
            if leaving is None or not only_cancelled(error):
                cause = error
            if leaving is not None:
                raise leaving from leaving.__cause__
        finally:
            self.copying = None
            if hooks.xfer_end:
                hooks.fire("xfer_end", batch)
            if outcomes is None:
                self._give_up(flat, reservation, cause)
            else:
                self._over(flat, reservation, outcomes)

    def _give_up(self, flat: FlatBlocks, reservation: Reservation, cause: BaseException | None) -> None:
        """Quarantine a copy whose end is not proven.

        The memory that it touches is not released, and its containers settle as unproven.
        """
        stage = self.stage
        containers = flat.containers
        reason = f"the end of the copy is unknown: {cause!r}" if cause else "no end of the copy within its time"

        def release() -> None:
            give_back(stage.source.release, flat.held)
            give_back(reservation.release)
            for container in containers:
                stage.settlement.release(container)

        entry = stage.quarantine.add(flat.keys, reason, stage.clock.current_time(), release)
        for container in containers:
            container.error = DrainUnproven(f"{reason}; {entry!r}")
            container.error.__cause__ = cause
            container.failed = {**container.failed, **dict.fromkeys(container.keys, container.error)}
            stage.settlement.settle_unproven(container)

    # -- 4. release and settle -----------------------------------------------------------------------------------------

    def _over(self, flat: FlatBlocks, reservation: Reservation, outcomes: Sequence[Outcome]) -> None:
        """Release a copy's resources, and settle its containers.

        Their outcomes are those of the copy.
        """
        stage = self.stage
        give_back(stage.source.release, flat.held)
        if len(outcomes) != len(flat.keys):
            count = f"{len(outcomes)} outcomes for {len(flat.keys)} blocks"
            outcomes = all_failed(flat, f"{stage.destination!r} returned {count}", None)
        stored = outcomes.count(STORED)
        stage.copied_bytes += stored * self._block_bytes
        stage.settlement.marks.release(flat.keys)
        if stored == len(flat.keys):
            for container in flat.containers:
                container.marked = False
                container.completed = container.keys
        else:
            assign_outcomes(flat, outcomes)
        if stage.chain is None:
            give_back(reservation.release)
            stage.settlement.settle_all(flat.containers)
        else:
            # Held for the routes while the reservation still holds it: in between, it could be evicted.
            stage.chain.hold(flat.containers)
            give_back(reservation.release)
            stage.chain.follow(flat.containers)


def _announce(hooks: Hooks, batch: OffloadBatch) -> None:
    """Announce the containers that are committed now.

    Not announced again are those that were refused after their commit and are tried again.
    """
    news = [container for container in batch.containers if not container.announced]
    for container in news:
        container.announced = True
    if news or not batch.containers:  # also if none was left to be claimed
        hooks.fire("post_claim", news)


def hold_until_released(reservation: Reservation) -> None:
    """Have a reservation hold its stored blocks until it is released."""
    reservation.hold()


def note_depths(reservation: Reservation, containers: Sequence[OffloadContainer]) -> None:
    """Pass the known depths of new blocks to the destination."""
    depths = depths_of(containers)
    if depths:
        reservation.note_depths(depths)


def _no_room(destination: object, config: PipelineConfig) -> DestinationFull:
    """Return the error of a batch that waited for room in vain.

    Its text has the wait, and the settings that would make room.
    """
    text = f"no room in {destination!r} within destination_timeout = {config.destination_timeout:g} s"
    blocks = blocks_of(destination)
    if blocks:
        text += f": it has room for {blocks:,} blocks in all"
    if config.on_destination_full == "wait":
        return DestinationFull(
            f'{text}, and on_destination_full = "wait" evicts nothing: set "evict", delete blocks, or give it more room '
            "(capacity_bytes; with a page store that of its server, or pool_size if auto_expand is off)"
        )
    return DestinationFull(f"{text}, and too many of its blocks are held: give it more room, or hold fewer")


def _fail_where_short(batch: OffloadBatch, granted: Sequence[Key]) -> None:
    """Fail containers without all of their room before the claim.

    ``on_destination_full`` is ``fail``. If a route of a chain is committed already, only the blocks without room fail.
    """
    room = len(granted)
    for container in batch.containers:
        room -= len(container.keys)
        if room < 0:
            container.fail(DestinationFull("the destination is full"))
