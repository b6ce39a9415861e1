"""Faults of a pipeline and of the tiers below it, each with the rule that random programs find it by.

Those in ``HARMLESS`` change nothing that can be seen, each for its reason.
"""

import math
import sys

import trio

import offload._pipeline.outcomes as outcomes_module
import offload._pipeline.slot as slot_module
from backends.abc import EVICTED, STORED, StrongBlocks
from backends.base.blocks import Registry, _HeldKeys
from backends.base.pooled import Lease, PooledReservation, PooledTier
from backends.base.slots import SlotTier
from offload import OffloadBatch, OffloadContainer, Pipeline, PipelineClosed, PipelineFull, TransferFailed
from offload._pipeline.accumulator import Accumulator
from offload._pipeline.admission import Admission
from offload._pipeline.awaiting import Awaiting
from offload._pipeline.batching import Batching, ReadyChannel
from offload._pipeline.budget import Budget
from offload._pipeline.chain import Chain
from offload._pipeline.channel import CancellableChannel
from offload._pipeline.lifecycle import Phase, Status
from offload._pipeline.marks import PendingMarks
from offload._pipeline.offer import RouteShare
from offload._pipeline.settlement import Settlement
from offload._pipeline.slot import Slot

PLANTS = []
FIRST = {}
"""The seed to try first, where the first that finds a fault is a late one."""


def _plant(rule, first=0):
    """A patch of the real code, and the rule that it breaks."""

    def enlist(patch):
        PLANTS.append((patch, rule))
        FIRST[patch] = first
        return patch

    return enlist


# --- the commit gate ----------------------------------------------------------------------------------------------


@_plant("I4", first=14)
def claim_ignores_cancelled(patch):
    def claim(self):
        for container in self.containers:
            container.phase = Phase.COMMITTED
        return []

    patch.setattr(OffloadBatch, "claim", claim)


@_plant("I9")
def a_neighbour_fails_with_who_is_cancelled(patch):
    sweep = OffloadBatch.sweep_cancelled

    def sweep_cancelled(self):
        swept = sweep(self)
        if swept:
            for container in self.containers:
                container.fail(TransferFailed("one of the batch was cancelled"))
            swept += sweep(self)
        return swept

    patch.setattr(OffloadBatch, "sweep_cancelled", sweep_cancelled)


@_plant("I9", first=23)
def a_waiting_container_is_not_woken_by_its_cancel(patch):
    closed = OffloadContainer._close

    def close(self, phase):
        self.cancel_scope, scope = None, self.cancel_scope
        closed(self, phase)
        self.cancel_scope = scope

    patch.setattr(OffloadContainer, "_close", close)


@_plant("")
def a_cancel_in_a_queue_takes_the_wrong_one(patch):
    withdraw = CancellableChannel.withdraw

    def wrong(self, container):
        first = next(iter(self.parked))
        if first is not container:
            first.phase, container.phase = container.phase, first.phase
        withdraw(self, first)

    patch.setattr(CancellableChannel, "withdraw", wrong)


@_plant("S47")
def shutdown_forgets_what_is_ready(patch):
    """The door is shut, and what waits for a batch commits all the same."""

    def close_door(self):
        self._closed = True
        self._budget.close()
        for container in list(self._settlement.live):
            if container.holder is not self._ready:
                container.fail(PipelineClosed("closed before the commit"))

    patch.setattr(Pipeline, "_stop_intake", close_door)


# --- settling -----------------------------------------------------------------------------------------------------


@_plant("I3")
def confirmed_before_released(patch):
    def settle(self, container):
        self.settle_unproven(container)
        self.release(container)

    patch.setattr(Settlement, "settle", settle)


@_plant("hang")
def nobody_is_told_of_the_end(patch):
    """Of a container that fails: who waits for it waits for ever."""
    settle_unproven = Settlement.settle_unproven

    def silent(self, container):
        if container.error is not None:
            container.confirmed = None
        settle_unproven(self, container)

    patch.setattr(Settlement, "settle_unproven", silent)


@_plant("I1", first=28)
def a_policys_lock_is_forgotten(patch):
    release = Settlement.release

    def forget(self, container):
        container.lease = None
        release(self, container)

    patch.setattr(Settlement, "release", forget)


@_plant("I1", first=109)
def the_lock_of_a_policy_that_did_not_wait_is_forgotten(patch):
    begin = Admission._begin

    def forget(self, policy, container):
        begun = begin(self, policy, container)
        if begun is None:
            container.lease = None
        return begun

    patch.setattr(Admission, "_begin", forget)


@_plant("I3")
def strong_guards_are_not_released(patch):
    patch.setattr(StrongBlocks, "release", lambda self: None)


@_plant("I3")
def drain_returns_early(patch):
    async def drain(self):
        self._ready.flush(True)
        await trio.lowlevel.checkpoint()
        self._ready.flush(False)

    patch.setattr(Pipeline, "drain", drain)


# --- refs and slots ---------------------------------------------------------------------------------------------


@_plant("I3")
def guards_go_when_a_cancel_is_asked_for(patch):
    """Free on cancel: also while a copy reads the blocks."""
    cancel = OffloadContainer.cancel

    def cancel_and_free(self):
        cancel(self)
        if self.status is Status.TRANSFERRING and self.blocks.refs is not None:
            self.blocks.source.release(self.blocks.refs)

    patch.setattr(OffloadContainer, "cancel", cancel_and_free)


@_plant("I3")
def guards_are_released_twice(patch):
    """Somebody else's ref of the same block goes with it."""
    release = Registry.release

    def twice(self, refs):
        release(self, refs)
        release(self, refs)

    patch.setattr(Registry, "release", twice)


@_plant("I3")
def weak_blocks_are_not_held(patch):
    """The upgrade is skipped: the copy knows where they are, and has no ref."""
    upgrade = OffloadBatch.upgrade

    def look_up(self, source, granted=None):
        flat = upgrade(self, source, granted)
        source.release(flat.held)
        flat.held = []
        return flat

    patch.setattr(OffloadBatch, "upgrade", look_up)


@_plant("I1")
def room_of_evicted_blocks_is_kept(patch):
    def keep(self, keys):
        slots = dict(zip(self.granted, self._slots, strict=True))
        self.granted, self._slots = keys, [slots[key] for key in keys]

    patch.setattr(PooledReservation, "keep", keep)


@_plant("bytes")
def the_first_two_blocks_are_copied_crosswise(patch):
    copy = PooledReservation._copy

    async def crosswise(self, source, keys, refs):
        refs = list(refs)
        refs[:2] = reversed(refs[:2])
        return await copy(self, source, keys, refs)

    patch.setattr(PooledReservation, "_copy", crosswise)


@_plant("model")
def published_before_the_commit(patch):
    """Who has room has its blocks found."""
    reserve = PooledTier.reserve_nowait

    def reserve_nowait(self, request):
        reservation = reserve(self, request)
        _publish(self, reservation)
        return reservation

    patch.setattr(PooledTier, "reserve_nowait", reserve_nowait)


def _publish(tier, reservation):
    if EVICTED not in reservation._slots and not tier.contains_nowait(reservation.granted):
        tier.pool._slot_of.update(zip(reservation.granted, reservation._slots, strict=True))


@_plant("model")
def the_blocks_of_a_failed_copy_are_found(patch):
    def give_up(self):
        slots, self._slots = self._slots, []
        good = [(key, slot) for key, slot in zip(self.granted, slots, strict=False) if slot != EVICTED]
        self._tier.pool.register([key for key, _ in good], [slot for _, slot in good])

    patch.setattr(PooledReservation, "release", give_up)


@_plant("bytes")
def checksums_are_not_verified(patch):
    patch.setattr(SlotTier, "_verify", lambda self, refs, sums: [])


@_plant("bytes")
def a_load_answers_for_its_neighbour(patch):
    """It says loaded of what it did not find damaged, and missed of the block before."""
    load = SlotTier.load

    async def shifted(self, lease, destination):
        outcomes = list(await load(self, lease, destination))
        return outcomes[-1:] + outcomes[:-1]

    patch.setattr(SlotTier, "load", shifted)


# --- readers ------------------------------------------------------------------------------------------------------


@_plant("model", first=22)
def a_lease_is_let_go_after_the_first_read(patch):
    """What a reader still holds is deleted, or makes room, and somebody else's block is read in its place."""
    load = SlotTier.load

    async def reading(self, lease, destination):
        outcomes = await load(self, lease, destination)
        self.release(lease.refs)
        return outcomes

    patch.setattr(SlotTier, "load", reading)
    patch.setattr(Lease, "release_nowait", lambda self: None)


@_plant("model", first=33)
def who_makes_room_does_not_ask_who_is_held(patch):
    patch.setattr(_HeldKeys, "__contains__", lambda self, key: False)
    patch.setattr(Registry, "_inactive", lambda self: len(self._slot_of))


@_plant("model", first=35)
def two_readers_of_a_block_count_as_one(patch):
    """The first to let go lets go for both."""

    def pin_nowait(self, keys):
        prefix = keys[: self.pool.prefix(keys)]
        refs = self.pool.slots(prefix)
        self.pool._held.update(refs)
        return Lease(self, prefix, refs)

    patch.setattr(PooledTier, "pin_nowait", pin_nowait)


@_plant("model", first=35)
def a_block_that_is_found_damaged_is_free_while_another_reads_it(patch):
    def forget(self, keys, slots):
        for key, slot in zip(keys, slots, strict=True):
            if self._slot_of.get(key) == slot:
                self._policy.discard((key,))
                self._held.discard(slot)
                self._more.pop(slot, None)
                self._free_taken((key,), self._take_out((key,)))

    patch.setattr(Registry, "forget", forget)


@_plant("I1")
def a_reader_that_is_cancelled_does_not_let_go(patch):
    async def leave(self, kind, *error):
        if kind is not trio.Cancelled:
            self.release_nowait()

    patch.setattr(Lease, "__aexit__", leave)


# --- marks --------------------------------------------------------------------------------------------------------


@_plant("I7")
def pending_marks_go_early(patch):
    mark = PendingMarks.mark

    def mark_and_forget(self, keys):
        lost = mark(self, keys)
        self.release(set(keys).difference(lost))
        return lost

    patch.setattr(PendingMarks, "mark", mark_and_forget)


@_plant("I7")
def a_mark_of_another_is_taken_off(patch):
    """A container that lost a key to another takes the other's mark with it when it goes."""
    release = PendingMarks.release

    def release_all(self, keys):
        release(self, list(self._pending) if keys else keys)

    patch.setattr(PendingMarks, "release", release_all)


@_plant("I3")
def marks_of_evicted_blocks_stay(patch):
    upgrade = OffloadBatch.upgrade

    def keeping(self, source, granted=None):
        flat = upgrade(self, source, granted)
        flat.dropped = ()
        return flat

    patch.setattr(OffloadBatch, "upgrade", keeping)


# --- the budget ---------------------------------------------------------------------------------------------------


@_plant("I1")
def the_budget_is_given_back_twice(patch):
    give_back = Budget.give_back

    def twice(self, blocks):
        give_back(self, blocks)
        give_back(self, blocks)

    patch.setattr(Budget, "give_back", twice)


@_plant("I1")
def a_failed_container_keeps_its_budget(patch):
    settle_unproven = Settlement.settle_unproven

    def keeping(self, container):
        size = len(container.blocks.keys) if container.error is not None else 0
        settle_unproven(self, container)
        self.budget.used += size

    patch.setattr(Settlement, "settle_unproven", keeping)


@_plant("I1")
def who_gives_up_waiting_for_room_has_it_all_the_same(patch):
    take = Budget.take

    async def taking(self, blocks):
        try:
            await take(self, blocks)
        except trio.Cancelled:
            self.used += blocks
            raise

    patch.setattr(Budget, "take", taking)


@_plant("I1", first=77)
def who_is_refused_keeps_the_budget(patch):
    """The pipeline closed while it waited for room, or had just been granted some."""
    take = Budget.take

    async def taking(self, blocks):
        try:
            await take(self, blocks)
        except PipelineClosed:
            self.used += blocks
            raise

    patch.setattr(Budget, "take", taking)


@_plant("I1", first=21)
def of_many_room_is_taken_for_the_first_only(patch):
    enqueue_many = Pipeline.enqueue_many

    def taking(self, many, *, precondition):
        handles = enqueue_many(self, many, precondition=precondition)
        if len(handles) > 1 and not handles[-1].status.terminal:
            self._budget.used -= len(many[-1].keys)
        return handles

    patch.setattr(Pipeline, "enqueue_many", taking)


@_plant("model", first=39)
def of_many_those_who_fit_are_taken_in_before_it_raises(patch):
    enqueue_many = Pipeline.enqueue_many

    def some_of_them(self, many, *, precondition):
        if self._closed or sum(len(blocks.keys) for blocks in many) <= self._budget.total - self._budget.used:
            return enqueue_many(self, many, precondition=precondition)
        return [self.enqueue_nowait(blocks, precondition=precondition) for blocks in many]

    patch.setattr(Pipeline, "enqueue_many", some_of_them)


@_plant("I3", first=55)
def of_many_that_are_refused_the_guards_stay(patch):
    enqueue_many = Pipeline.enqueue_many

    def keeping(self, many, *, precondition):
        kept = [list(blocks.refs) for blocks in many if isinstance(blocks, StrongBlocks)]
        try:
            return enqueue_many(self, many, precondition=precondition)
        except PipelineFull:
            self.source.pool.upgrade([key for blocks in many for key in blocks.keys][: sum(map(len, kept))])
            raise

    patch.setattr(Pipeline, "enqueue_many", keeping)


@_plant("I9")
def of_many_the_handles_come_in_another_order(patch):
    enqueue_many = Pipeline.enqueue_many
    patch.setattr(Pipeline, "enqueue_many", lambda self, many, **rest: enqueue_many(self, many, **rest)[::-1])


# --- waiting ------------------------------------------------------------------------------------------------------


@_plant("hang")
def the_policy_timeout_is_not_kept_to(patch):
    evaluate = Admission._evaluate

    async def patient(self, begun, container, scope, permits):
        scope.deadline = math.inf
        await evaluate(self, begun, container, scope, permits)

    patch.setattr(Admission, "_evaluate", patient)


@_plant("bytes")
def a_precondition_is_not_waited_for(patch):
    patch.setattr(Awaiting, "_holds", lambda self, container: True)


@_plant("bytes")
def a_precondition_that_raised_holds(patch):
    fail = Awaiting._fail

    def forgiving(self, container, error):
        if isinstance(error, trio.TooSlowError) or not container.phase.proceeds:
            fail(self, container, error)
        else:
            self.outbound.send([container])

    patch.setattr(Awaiting, "_fail", forgiving)


@_plant("hang")
def only_the_first_who_waits_for_an_event_is_told(patch):
    step = Batching.step

    def first_only(self, containers):
        step(self, containers[:1])

    patch.setattr(Batching, "step", first_only)


# --- batches ------------------------------------------------------------------------------------------------------


@_plant("hang")
def a_batch_is_taken_inside_the_scope_of_the_flush_timer(patch):
    async def receive(self, owner):
        while True:
            deadline = self.accumulator.leaves_at(next(iter(self.parked)).ready_at) if self.parked else math.inf
            batch = None
            with trio.CancelScope(deadline=deadline):
                while not self._due():
                    await self._sleep()
                batch = self._take(owner)
                await trio.lowlevel.checkpoint()
                return batch

    patch.setattr(ReadyChannel, "receive", receive)


@_plant("S38")
def the_last_who_is_ready_goes_first(patch):
    def take(self, owner):
        batch, size = [], 0
        while self.parked and size < self.accumulator.config.max_batch_size:
            container, _ = self.parked.popitem(last=True)
            if not self.accumulator.fits(size, len(container.keys)):
                self.put(container)
                break
            size += len(container.keys)
            container.holder = owner
            batch.append(container)
        self.accumulator.blocks -= size
        return OffloadBatch(batch)

    patch.setattr(ReadyChannel, "_take", take)


@_plant("S36")
def a_batch_may_be_larger_than_the_largest(patch):
    patch.setattr(Accumulator, "fits", lambda self, batch_blocks, blocks: True)


@_plant("I9")
def the_flush_interval_is_forgotten(patch):
    def leaves_at(self, oldest):
        if self.flushing or self.blocks >= self.config.min_batch_size:
            return -math.inf
        return oldest + 1.0

    patch.setattr(Accumulator, "leaves_at", leaves_at)


# --- copies -------------------------------------------------------------------------------------------------------


@_plant("I9")
def unproven_is_taken_for_failed(patch):
    """Quarantine is not entered, and what the copy touches is free."""
    for module in (slot_module, outcomes_module):
        patch.setattr(module, "holds", lambda error, kind: False)


@_plant("I9")
def unproven_in_a_group_is_taken_for_failed(patch):
    for module in (slot_module, outcomes_module):
        patch.setattr(module, "holds", isinstance)


@_plant("I9", first=29)
def a_copy_in_a_nursery_that_overruns_is_taken_for_over(patch):
    """As it was: the slots are free, and an abandoned thread may still write there."""
    give_up = Slot._give_up

    def over(self, flat, reservation, cause):
        if isinstance(sys.exception(), BaseExceptionGroup):
            outcomes = outcomes_module.all_failed(flat, "the copy was torn down", sys.exception())
            self._over(flat, reservation, outcomes)
        else:
            give_up(self, flat, reservation, cause)

    patch.setattr(Slot, "_give_up", over)


@_plant("S34")
def a_wrong_number_of_outcomes_is_believed(patch):
    """As far as there are some; the others are thought to be stored."""
    over = Slot._over

    def trusting(self, flat, reservation, outcomes):
        over(self, flat, reservation, [*outcomes, *[STORED] * len(flat.keys)][: len(flat.keys)])

    patch.setattr(Slot, "_over", trusting)


@_plant("hang")
def a_copy_may_take_for_ever(patch):
    copy = Slot._copy

    async def patient(self, batch, flat, reservation):
        with trio.CancelScope(shield=True):
            await copy(self, batch, flat, reservation)

    patch.setattr(Slot, "_copy", patient)


@_plant("model", first=50)
def outcomes_are_sorted_out_backwards(patch):
    sort_out = slot_module.assign_outcomes
    patch.setattr(slot_module, "assign_outcomes", lambda flat, outcomes: sort_out(flat, list(reversed(outcomes))))


@_plant("model")
def failed_blocks_are_reported_as_stored(patch):
    sort_out = slot_module.assign_outcomes
    patch.setattr(slot_module, "assign_outcomes", lambda flat, outcomes: sort_out(flat, [STORED] * len(outcomes)))


# --- chains -------------------------------------------------------------------------------------------------------


@_plant("I5")
def a_chain_stops_before_its_last_route(patch):
    settle = Chain._settle

    async def follow(self, container):
        results = {}
        self.following += 1
        try:
            async with trio.open_nursery() as nursery:
                onward, container.onward = container.onward, container.onward[-1:]
                for route, blocks in zip(self.routes[:-1], onward[:-1], strict=True):
                    nursery.start_soon(self._run_route, route, blocks, container, results)
        finally:
            self.following -= 1
            routes, self.routes = self.routes, self.routes[:-1]
            settle(self, container, results)
            self.routes = routes

    patch.setattr(Chain, "_follow", follow)


@_plant("I5")
def a_chain_knows_one_route_only(patch):
    settle = Chain._settle

    def forgetful(self, container, results):
        routes, self.routes = self.routes, self.routes[:1]
        settle(self, container, {name: result for name, result in results.items() if name == routes[0].name})
        self.routes = routes

    patch.setattr(Chain, "_settle", forgetful)


@_plant("I9")
def a_route_that_fails_is_not_told_of(patch):
    settle = Chain._settle

    def cheerful(self, container, results):
        settle(self, container, {name: result for name, result in results.items() if result.status is Status.COMPLETE})

    patch.setattr(Chain, "_settle", cheerful)


@_plant("I5")
def optional_routes_are_waited_for(patch):
    hold = Chain.hold

    def hold_for_all(self, containers):
        self.routes, self.optional = [*self.routes, *self.optional], ()
        hold(self, containers)

    patch.setattr(Chain, "hold", hold_for_all)


@_plant("I1", first=151)
def optional_routes_hold_more_than_their_share(patch):
    def take_all(self, most):
        self.used += most
        return most

    patch.setattr(RouteShare, "take_some", take_all)


# --- what is no fault ---------------------------------------------------------------------------------------------


def the_last_sweep_is_left_out(patch):
    """The claim refuses what was cancelled, and what it refuses settles the same way."""
    commit, sweep = Slot._commit, OffloadBatch.sweep_cancelled
    committing = []

    def unswept(self, batch, reservation):
        committing.append(batch)
        try:
            return commit(self, batch, reservation)
        finally:
            committing.pop()

    patch.setattr(Slot, "_commit", unswept)
    patch.setattr(OffloadBatch, "sweep_cancelled", lambda self: [] if self in committing else sweep(self))


def the_safety_net_is_switched_off(patch):
    """Cancellation is event-driven, and the net finds nothing."""

    async def sleep(self):
        await trio.sleep_forever()

    patch.setattr(Pipeline, "_sweep", sleep)


def slots_do_not_give_way(patch):
    """To those who wait for a confirmation: it is about microseconds, and virtual time has none."""

    async def at_once(self):
        pass

    patch.setattr(Slot, "_give_way", at_once)


def what_is_put_back_wakes_nobody(patch):
    """Who puts back is a slot, which asks for its next batch itself."""

    def put_back(self, container):
        if container.phase.proceeds:
            CancellableChannel.put_back(self, container)
            self.accumulator.blocks += len(container.keys)
        else:
            self._settlement.settle(container)

    patch.setattr(ReadyChannel, "put_back", put_back)


HARMLESS = [
    the_last_sweep_is_left_out,
    the_safety_net_is_switched_off,
    slots_do_not_give_way,
    what_is_put_back_wakes_nobody,
]
