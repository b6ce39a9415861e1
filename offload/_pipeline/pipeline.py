"""The pipeline: four stages, their channels, and one nursery.

This is the only module that knows the order of the stages.

    enqueue -> admission -> awaiting -> batching -> transfer -> settled
               (policies)   (preconditions)         (sweep, claim, upgrade, copy)

Each stage is a task, ``run()``, and knows the next one only by its channel; they may start in any order. A container
that need not wait in a stage passes straight through (see :class:`offload._pipeline.channel.CancellableChannel`); the
tasks are there for containers that must wait.

The stages run in one shielded child of the pipeline's nursery: cancelling the scope around ``async with`` never tears a
copy apart, and the caller's own body is never shielded. Leaving the block refuses new blocks, asks every container's
gate to fail (shutdown against commit is decided there, like a cancel), drains the committed containers within
``drain_timeout``, and leaves no task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

import trio

from backends.abc import Blocks, Key, Source, Tier, TransferExecutor, WeakBlocks
from backends.base.threads import keep_threads

from .._config import PipelineConfig
from .._errors import PipelineClosed, PipelineFull
from .._instruments import Hooks
from ..abc import AsyncPolicy, Instrument, Policy, Precondition, PreconditionLike, Reasons
from ..preconditions import NO_WAIT, as_precondition
from .admission import Admission
from .at_once import AtOnce
from .awaiting import Awaiting
from .batching import Batching, ReadyChannel
from .budget import Budget
from .cancellation import CancellationToken
from .chain import Chain
from .channel import CancellableChannel
from .container import OffloadContainer
from .handle import TransferHandle
from .marks import marks_of, place_of
from .offer import RouteShare
from .page_hold import PageHold, origin_of
from .priority import LoadPriority, PriorityReceiver
from .quarantine import Quarantined
from .settlement import Settlement
from .statistics import PipelineStatistics
from .transfer import Sampling, Transfer

_SWEPT = 64
"""Parked containers that the safety net checks in each channel, per round."""


class _Stage(Protocol):
    async def run(self) -> None: ...


class Pipeline:
    """A pipeline that copies blocks from a source to a destination.

    Made by :func:`open_pipeline` only.
    """

    def __init__(
        self,
        source: Source | Tier,
        destination: TransferExecutor,
        policies: Sequence[Policy | AsyncPolicy],
        config: PipelineConfig,
        chain: Sequence[Pipeline],
        instruments: Sequence[Instrument | object],
        name: str,
        load_priority: LoadPriority | None = None,
        optional: Sequence[Pipeline] = (),
    ) -> None:
        self.name: str = name
        self.config: PipelineConfig = config
        self.source: Source | Tier = source
        self.destination: TransferExecutor = destination
        self.hooks: Hooks = Hooks(instruments)
        self._policies = policies
        self._budget = Budget(config.budget_blocks)
        self._marks = marks_of(destination)
        self._settlement = Settlement(self._marks, self._budget, self.hooks)
        self.share: RouteShare = RouteShare(place_of(source), config)
        self._chain: Chain | None = None
        if chain or optional:
            self._chain = Chain(chain, destination, self._settlement, optional)  # type: ignore[arg-type]
        self._origin = origin_of(source)
        self._page_store = source if isinstance(source, Tier) and source.held_pages is not None else None
        self._link(load_priority)
        self._closed = False
        self._enqueued = self._dropped = self._swept_late = 0
        self._draining = 0
        self._busy = trio.Event()
        self._sweeper_sleeps = False
        self._scope = trio.CancelScope(shield=True)

    def _link(self, load_priority: LoadPriority | None) -> None:
        """Make the channels, and the stages that they link."""
        config, settlement, hooks = self.config, self._settlement, self.hooks
        enqueued, admitted, awaited = [CancellableChannel(settlement.settle) for _ in range(3)]
        self._ready = ready = ReadyChannel(config.batch_config, settlement)
        self._channels: Sequence[CancellableChannel] = (enqueued, admitted, awaited, ready)
        self._priority = None if load_priority is None else PriorityReceiver(load_priority, ready)
        self._admission = Admission(self._policies, config, settlement, hooks, inbound=enqueued, outbound=admitted)
        self._awaiting = Awaiting(config, settlement, hooks, inbound=admitted, outbound=awaited)
        self._batching = Batching(config, settlement, hooks, inbound=awaited, outbound=ready)
        self._transfer = Transfer(
            self._origin,
            self.destination,
            config,
            settlement,
            hooks,
            inbound=self._priority or ready,
            chain=self._chain,
            priority=self._priority,
        )
        self._at_once = AtOnce(config, settlement, hooks, self._admission, self._transfer, load_priority)
        self._stages: Sequence[_Stage] = (self._admission, self._awaiting, self._batching, self._transfer)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {self._budget.used} blocks inside>"

    # -- in ----------------------------------------------------------------------------------------------------------

    def enqueue_nowait(
        self, blocks: Blocks, precondition: PreconditionLike, *, cancel_token: CancellationToken | None = None
    ) -> TransferHandle:
        """Store blocks, or raise if there is no room.

        Synchronous: no stage has run when it returns. Strong blocks belong to the pipeline from this call on, also when
        it raises.

        Args:
            blocks: from the pipeline's source: its ``weak(keys)``, ``strong(keys)`` or ``external(ids, keys)``.
            precondition: the condition for reading the bytes: :data:`offload.NO_WAIT`, an event of trio, of a thread or
                of CUDA, an async callable, or several (:func:`offload.all_of`, :func:`offload.any_of`).
            cancel_token: cancels these blocks together with others. With a token that was cancelled before, the handle
                is CANCELLED at once, without room or policies.

        Raises:
            PipelineFull: there is no room in the budget (unless ``on_overflow`` is ``drop``).
            PipelineClosed: the pipeline is shutting down.
            ValueError: the blocks are of another source, exceed the budget, or are strong and were given away before.
            TypeError: ``precondition`` is not a precondition.
        """
        if blocks.refs is not None:
            blocks.hand_over()
        try:
            awaited = self._check(blocks, precondition)
            size = len(blocks.keys)
            if not self._budget.take_nowait(size) and not self._needs_no_room(size, cancel_token):
                return self._overflow(blocks)
        except BaseException:
            blocks.release()
            raise
        return self._admit(blocks, awaited, cancel_token)

    @property
    def stores_at_once(self) -> bool:
        """Whether :meth:`enqueue_at_once` can store anything here."""
        return self._at_once.is_possible

    def starts_at(self, source: Source) -> bool:
        """Return whether this pipeline reads from that source."""
        return source is self._origin

    def enqueue_at_once(self, blocks: Blocks) -> TransferHandle | None:
        """Store blocks now, if no stage has to wait.

        All stages run in this call. Otherwise ``None`` is returned. For a thread that has the pipeline to itself, if
        need be another one than its own (:mod:`offload._pipeline.at_once`). A handle that has not ended was admitted
        and has found no room: the trio thread must call :meth:`resume` with it.
        """
        size = len(blocks.keys)
        ours = self.starts_at(blocks.source)
        if self._closed or not ours or not self._at_once.allows(blocks) or not self._budget.take_nowait(size):
            return None
        self._enqueued += 1
        container = OffloadContainer(self._enqueued, blocks, None, blocks.keys)
        self._settlement.live[container] = None
        if self.hooks.enqueued:
            self.hooks.fire("enqueued", container)
        self._at_once.carry(container)
        return TransferHandle(container, self._settlement)

    def resume(self, handle: TransferHandle) -> None:
        """Continue a store of :meth:`enqueue_at_once` in the ordinary way.

        Called on the trio thread.
        """
        container = handle._container
        if not container.status.terminal:
            self._admission.outbound.send([container])
            if self._sweeper_sleeps:
                self._busy.set()

    def enqueue_many(
        self, many: Iterable[Blocks], precondition: PreconditionLike, *, cancel_token: CancellationToken | None = None
    ) -> list[TransferHandle]:
        """Store several sets of blocks, one container each.

        All of them or, if it raises, none. For bursts.
        """
        many = list(many)
        handed: list[Blocks] = []
        try:
            for blocks in many:
                blocks.hand_over()
                handed.append(blocks)
            checked = [self._check(blocks, precondition) for blocks in many]
            need = sum(len(blocks.keys) for blocks in many)
            if self._drops(many):
                return [self.enqueue_nowait(blocks, precondition, cancel_token=cancel_token) for blocks in many]
            if not self._budget.take_nowait(need) and not self._needs_no_room(need, cancel_token):
                raise PipelineFull(
                    f"{self!r} has no room for {need} more blocks (budget_blocks = {self._budget.total})"
                )
        except BaseException:
            for blocks in handed:
                blocks.release()
            raise
        return [self._admit(blocks, awaited, cancel_token) for blocks, awaited in zip(many, checked, strict=True)]

    @trio.lowlevel.enable_ki_protection
    async def enqueue(
        self, blocks: Blocks, precondition: PreconditionLike, *, cancel_token: CancellationToken | None = None
    ) -> TransferHandle:
        """Store blocks, after waiting for room in the budget.

        Otherwise like :meth:`enqueue_nowait`. Waiting calls are served in order. If cancelled while it waits, it stores
        nothing and releases strong blocks. If its ``cancel_token`` is cancelled meanwhile, it returns a handle that is
        CANCELLED.
        """
        taken, size = 0, len(blocks.keys)
        blocks.hand_over()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            awaited = self._check(blocks, precondition)
            if cancel_token is not None and cancel_token.cancel_called:
                await trio.lowlevel.cancel_shielded_checkpoint()
            elif self._budget.take_nowait(size):
                taken = size
                # Shielded, as the room would be lost otherwise: a checkpoint is promised, not that it can be cancelled.
                await trio.lowlevel.cancel_shielded_checkpoint()
            elif self._drops([blocks]):
                await trio.lowlevel.cancel_shielded_checkpoint()
                self._check(blocks, precondition)  # it may have closed meanwhile
                return self._overflow(blocks)
            elif cancel_token is None:
                await self._budget.take(size)
                taken = size
            else:
                with cancel_token.scope():
                    await self._budget.take(size)
                    taken = size
            if self._closed:
                raise PipelineClosed(f"{self!r} closed meanwhile")
        except BaseException:
            self._budget.give_back(taken)
            blocks.release()
            raise
        # If no room was taken, the token is cancelled: the container gives this back within the next call.
        self._budget.used += size - taken
        return self._admit(blocks, awaited, cancel_token)

    @trio.lowlevel.enable_ki_protection
    async def enqueue_committed(self, blocks: Blocks) -> TransferHandle:
        """Store blocks of a chain, whose gate is committed from the start.

        Otherwise like :meth:`enqueue`.
        """
        handle = await self.enqueue(blocks, NO_WAIT)
        handle._container.claim()  # no checkpoint since it was put into the first channel: nobody has seen it open
        return handle

    @trio.lowlevel.enable_ki_protection
    async def enqueue_pages(self, blocks: WeakBlocks) -> TransferHandle:
        """Store blocks of the page store at which this pipeline starts.

        Like :meth:`enqueue`, but their pages are held meanwhile, from when the policies have passed them. A block that
        is gone by then counts as evicted.
        """
        assert self._page_store is not None
        hold = PageHold(self._page_store)
        handle = await self.enqueue(blocks, hold)
        hold.container = handle._container  # no checkpoint since it was put into the first channel: no stage has had it
        return handle

    @trio.lowlevel.enable_ki_protection
    def enqueue_offered(self, blocks: Blocks, hold: Callable[[OffloadContainer], Callable[[], None]]) -> TransferHandle:
        """Store blocks of a chain's offer, or raise without room.

        Synchronous; otherwise like :meth:`enqueue_committed`.

        Args:
            blocks: held in a tier of this process; weak ones of a page store, which are held as by
                :meth:`enqueue_pages`.
            hold: returns a function, which is called once nothing of the container is held.
        """
        pages = None if self._page_store is None else PageHold(self._page_store)
        blocks.hand_over()
        try:
            awaited = self._check(blocks, NO_WAIT if pages is None else pages)
            if not self._budget.take_nowait(len(blocks.keys)):
                raise PipelineFull(f"{self!r} has no room for {len(blocks)} blocks")
        except BaseException:
            blocks.release()
            raise
        handle = self._admit(blocks, awaited, hold=hold)
        if pages is None:
            handle._container.claim()
        else:
            pages.container = handle._container
        return handle

    def drop_offered(self, blocks: WeakBlocks, reason: str) -> TransferHandle:
        """Count offered blocks that are not taken in as filtered."""
        return self._filtered(blocks, reason)

    def _needs_no_room(self, size: int, cancel_token: CancellationToken | None) -> bool:
        """Return whether the token is cancelled already.

        The budget is charged for the blocks here, and gets them back within the same call.
        """
        if cancel_token is None or not cancel_token.cancel_called:
            return False
        self._budget.used += size
        return True

    def _check(self, blocks: Blocks, precondition: PreconditionLike) -> Precondition | None:
        if self._closed:
            raise PipelineClosed(f"{self!r} is closed")
        if not self.starts_at(blocks.source):
            raise ValueError(f"{blocks!r} are not of this pipeline's source, {self.source!r}")
        if len(blocks.keys) > self._budget.total:
            raise ValueError(f"{len(blocks.keys)} blocks at once are more than budget_blocks = {self._budget.total}")
        return None if precondition is NO_WAIT else as_precondition(precondition)

    def _admit(
        self,
        blocks: Blocks,
        precondition: Precondition | None,
        cancel_token: CancellationToken | None = None,
        hold: Callable[[OffloadContainer], Callable[[], None]] | None = None,
    ) -> TransferHandle:
        """Put blocks that have room into the first channel.

        If nothing is to be done with them, they settle at once.
        """
        self._enqueued += 1
        container = OffloadContainer(self._enqueued, blocks, precondition, blocks.keys)
        if hold is not None:  # before any stage has it: one that filters all of it ends it within this call
            container.lease = hold(container)
        self._settlement.live[container] = None
        if self.hooks.enqueued:
            self.hooks.fire("enqueued", container)
        if cancel_token is not None:
            # Before it is put anywhere: a token that was cancelled closes its gate here, and no stage sees it.
            container.cancel_token = cancel_token
            cancel_token.join(container, self._settlement)
        if blocks.keys and container.phase.proceeds:
            self._admission.inbound.put(container)
        else:
            container.evaluated = not blocks.keys
            self._settlement.settle(container)
        if self._sweeper_sleeps:
            self._busy.set()
        return TransferHandle(container, self._settlement)

    def _drops(self, many: Sequence[Blocks]) -> bool:
        return self.config.on_overflow == "drop" and all(type(blocks) is WeakBlocks for blocks in many)

    def _overflow(self, blocks: Blocks) -> TransferHandle:
        """Drop a weak store if so configured; otherwise raise PipelineFull."""
        if not self._drops([blocks]):
            raise PipelineFull(f"{self!r} has no room for {len(blocks)} blocks (budget_blocks = {self._budget.total})")
        return self._filtered(blocks, "overflow")

    def _filtered(self, blocks: Blocks, reason: str) -> TransferHandle:
        """Settle a container all of which is dropped."""
        self._enqueued += 1
        self._dropped += len(blocks.keys)
        container = OffloadContainer(self._enqueued, blocks, None, blocks.keys, evaluated=True)
        container.filter(dict.fromkeys(blocks.keys, reason))
        self._settlement.live[container] = None
        self._budget.used += len(blocks.keys)  # given back at once, by settle()
        self._settlement.settle(container)
        return TransferHandle(container, self._settlement)

    async def ask_policies(self, keys: Sequence[Key]) -> tuple[Reasons, Callable[[], None] | None]:
        """Ask the policies about blocks that are not stored through here.

        An engine of a daemon writes such blocks into pages itself. If this is cancelled, no lock is held.

        Returns:
            The rejected keys with their reasons, and a function that releases a lock that came with the answer, to be
            called once.
        """
        return await self._admission.ask(keys)

    def ask_policies_nowait(self, keys: Sequence[Key]) -> tuple[Reasons, Callable[[], None] | None] | None:
        """Ask the policies like :meth:`ask_policies`, without waiting.

        ``None`` if they cannot answer without waiting.
        """
        return self._admission.ask_nowait(keys)

    # -- watching ----------------------------------------------------------------------------------------------------

    @property
    def quarantine(self) -> Sequence[Quarantined]:
        """The copies whose end is unknown.

        An operator who knows that one is over calls its ``release()``.
        """
        return list(self._transfer.quarantine)

    @property
    def quarantined_blocks(self) -> int:
        """Number of blocks of the copies whose end is unknown."""
        return sum(len(entry.keys) for entry in self._transfer.quarantine)

    def add_instrument(self, instrument: Instrument | object) -> None:
        """Call the hooks of an instrument from now on."""
        self.hooks.add(instrument)

    def sample_with(self, sampling: Sampling) -> None:
        """Have some blocks read at the source, too, before each copy."""
        self._transfer.sampling = sampling

    def remove_instrument(self, instrument: Instrument | object) -> None:
        """Stop calling an instrument.

        Raises:
            KeyError: it was not added, or it raised and was removed.
        """
        self.hooks.remove(instrument)

    def statistics(self) -> PipelineStatistics:
        """Return an immutable snapshot, in constant time."""
        settlement, transfer = self._settlement, self._transfer
        return PipelineStatistics(
            budget_blocks=self._budget.total,
            used_blocks=self._budget.used,
            waiting_enqueues=self._budget.waiting,
            inside=len(settlement.live),
            in_admission=len(self._admission.inbound.parked) + self._admission.waiting,
            in_awaiting=self._awaiting.waiting,
            in_batching=len(self._ready.parked),
            in_transfer=sum(len(slot.copying.containers) for slot in transfer.slots if slot.copying is not None),
            in_chain=self._chain.following if self._chain is not None else 0,
            offered_blocks=self.share.offered,
            held_blocks=self.share.used,
            share_blocks=self.share.total,
            pending_marks=len(self._marks),
            enqueued=self._enqueued,
            complete=settlement.complete,
            cancelled=settlement.cancelled,
            failed=settlement.failed,
            blocks_completed=settlement.blocks["completed"],
            blocks_filtered=settlement.blocks["filtered"],
            blocks_failed=settlement.blocks["failed"],
            blocks_evicted=settlement.blocks["evicted"],
            blocks_dropped=self._dropped,
            batches=transfer.batches,
            copied_bytes=transfer.copied_bytes,
            policy_errors=self._admission.errors,
            policy_timeouts=self._admission.timeouts,
            policies_blocked=self._admission.blocked,
            blocking_policy=self._admission.blocking,
            swept_late=self._swept_late,
            quarantined=len(transfer.quarantine),
            quarantined_total=transfer.quarantine.total,
        )

    # -- out ---------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until every container inside has settled.

        The containers on the routes that have their blocks must have settled, too. Meanwhile batches leave without
        waiting for more blocks. Blocks may be enqueued meanwhile and afterwards. If cancelled, it stops waiting; no
        container is cancelled.
        """
        self._draining += 1
        self._ready.flush(True)
        try:
            await self._settlement.wait_settled()
            if self._chain is not None:
                await self._chain.drain()
        finally:
            self._draining -= 1
            self._ready.flush(bool(self._draining))

    async def aclose(self) -> None:
        """Shut down within ``drain_timeout``.

        Containers that are not committed settle as FAILED; those that are drain. Copies that still run after
        ``drain_timeout`` are quarantined. Must not be cancelled; idempotent. Leaving ``async with`` calls it.
        """
        deadline = trio.current_time() + self.config.drain_timeout
        with trio.CancelScope(shield=True):
            self._stop_intake()
            self._transfer.cut_off_at(deadline)
            if self._priority is not None:
                self._priority.stop_yielding()
            self._draining += 1
            self._ready.flush(True)
            with trio.move_on_at(deadline) as drained:
                await self._settlement.wait_settled()
                if self._chain is not None:
                    await self._chain.drain()
            if drained.cancelled_caught or self._settlement.live:
                self._cut_off()
                await self._settlement.wait_settled()

    def _stop_intake(self) -> None:
        """Refuse new blocks, and ask every open gate to fail.

        It is one step: nothing commits any more.
        """
        self._closed = True
        self._budget.close()
        self.share.close()
        error = PipelineClosed(f"{self!r} closed before the commit")
        for container in list(self._settlement.live):
            container.fail(error)

    def _cut_off(self) -> None:
        """End the containers still parked when the time to drain is over.

        Copies have their own deadlines.
        """
        if self._chain is not None:
            self._chain.cut_off()
        # A list: a settling container may run an observer that cancels another one that is parked.
        for container in [container for channel in self._channels for container in channel.parked]:
            container.abandon(PipelineClosed(f"{self!r} closed before it was its turn"))
            assert container.holder is not None
            container.holder.withdraw(container)

    # -- the tasks ---------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the stages until the pipeline has closed.

        Shielded; the parent of every task of this pipeline.
        """
        try:
            with self._scope:
                async with keep_threads(), trio.open_nursery() as nursery:
                    if self._chain is not None:
                        await nursery.start(self._chain.run)
                    # In any order: containers sent to a stage that does not run yet are parked in its channel.
                    for stage in self._stages:
                        nursery.start_soon(stage.run)
                    nursery.start_soon(self._sweep)
                    task_status.started()
        finally:
            self._finish_all()

    def stop(self) -> None:
        """End the stages. No method may be called afterwards."""
        self._scope.cancel()

    def _finish_all(self) -> None:
        """Settle the remaining containers after the stages have ended.

        So waiting tasks end. After a clean end no container remains.
        """
        if self._priority is not None:
            self._priority.close()
        self._stop_intake()
        for container in list(self._settlement.live):
            if not container.status.terminal:
                container.abandon(container.error or PipelineClosed("a stage of the pipeline crashed"))
                self._settlement.settle(container)

    async def _sweep(self) -> None:
        """Look for parked containers that should have gone.

        This is the safety net under cancellation, which is event-driven. It runs while there are containers inside, and
        counts those it finds, of which there should be none.
        """
        while True:
            if not self._settlement.live:
                self._busy = trio.Event()
                self._sweeper_sleeps = True
                await self._busy.wait()
                self._sweeper_sleeps = False
            await trio.sleep(self.config.sweep_interval)
            for channel in self._channels:
                # Containers that are parked for long come to the front: a look at the front is enough, and costs the
                # same for any queue.
                front = list(islice(channel.parked, _SWEPT))
                for container in [container for container in front if not container.phase.proceeds]:
                    self._swept_late += 1
                    channel.withdraw(container)
