"""Faults of the page store as the first level of a cache, and of what lies below it."""

from __future__ import annotations

import trio
import trio.testing

from backends.abc import Deletion
from backends.maru.l1 import MaruL1, MaruL1Dispatcher, ViewLease, WriteReservation
from backends.maru.l1 import _layout as layout_module
from backends.maru.l1 import _maru_l1 as l1_module
from backends.maru.l1 import _reading as reading_module
from backends.maru.l1 import _writing as writing_module
from backends.maru.l1._handler_owner import HandlerOwner
from maru import HeldBatch, MaruHandler, NoAnswer
from maru._client import columns
from maru._client.pages import OwnedPages
from maru._directory.eviction_guard import EvictionGuard
from maru._pool import device as device_module
from tests.backends import test_maru_l1 as real

# --- what is planted ----------------------------------------------------------------------------------------------


def a_lease_is_not_returned(patch):
    def release(self):
        self._pins = []

    patch.setattr(HeldBatch, "release", release)


def a_lease_is_returned_when_it_is_given(patch):
    """A page freed under a reader: here."""
    reserve = MaruL1.reserve_read

    async def reserve_and_release(self, keys):
        lease = await reserve(self, keys)
        pins, lease._held._pins = lease._held._pins, []
        lease._held._give_back(pins)
        lease._held._pins = pins
        lease._held._give_back = lambda pins: None
        await trio.sleep(0.01)
        return lease

    patch.setattr(MaruL1, "reserve_read", reserve_and_release)


def pins_hold_nothing(patch):
    """A page freed under a reader: at the server."""
    patch.setattr(EvictionGuard, "pin", lambda self, by, keys, *rest: None)


def an_aborted_page_is_free_at_once(patch):
    """A page freed under a writer."""
    end = WriteReservation._end

    def abort(self):
        if self.is_open:
            self._state = writing_module._State.OVER
            for handle in end(self):
                self._l1._handler_owner.handler.free(handle)

    patch.setattr(WriteReservation, "abort", abort)


def an_abort_forgets_its_pages(patch):
    lost = []

    def abort(self):
        if self.is_open:
            self._state = writing_module._State.OVER
            lost.append(self._end())

    patch.setattr(WriteReservation, "abort", abort)


def leaving_uncommitted_is_no_abort(patch):
    async def leave(self, *exc):
        pass

    patch.setattr(WriteReservation, "__aexit__", leave)


def pages_are_registered_before_they_are_filled(patch):
    reserve = MaruL1.reserve_write

    async def reserve_and_register(self, keys):
        reservation = await reserve(self, keys)
        handler, handles = self._handler_owner.handler, reservation._handles
        views = [handle.buf for handle in handles]
        self.early = await handler.store_pages(
            [key.hex() for key in reservation.keys], handler.gather(handles), self._known_layout().block_bytes, None
        )
        reservation._views = views
        return reservation

    async def already(self, keys, handles, sums):
        return l1_module.outcomes_of(self, keys, self.early)

    patch.setattr(MaruL1, "reserve_write", reserve_and_register)
    patch.setattr(MaruL1, "_register", already)


def a_commit_is_not_shielded(patch):
    scope = trio.CancelScope

    def bare(*, shield=False, **bounds):
        return scope(**bounds)

    patch.setattr(l1_module, "trio", _Instead(trio, CancelScope=bare))


def a_commit_is_not_bounded(patch):
    scope = trio.CancelScope

    def unbounded(*, shield=False, **bounds):
        return scope(shield=shield)

    patch.setattr(l1_module, "trio", _Instead(trio, CancelScope=unbounded))


def pages_of_an_unproven_commit_are_free(patch):
    unanswered = OwnedPages.unanswered

    def free_them(self, pages, attempt, *, can_resolve):
        unanswered(self, pages, attempt, can_resolve=True)
        self.resolved(attempt, pages, [0] * len(pages))

    patch.setattr(OwnedPages, "unanswered", free_them)


def a_commit_that_is_cancelled_early_is_over(patch):
    commit = WriteReservation.commit

    async def once(self):
        try:
            return await commit(self)
        except trio.Cancelled:
            self._state = writing_module._State.OVER
            raise

    patch.setattr(WriteReservation, "commit", once)


def a_lost_lease_is_not_noticed(patch):
    patch.setattr(HeldBatch, "check", lambda self: None)


def views_are_not_taken_back(patch):
    patch.setattr(reading_module, "_take_back", lambda views: None)


def pages_are_not_taken_back(patch):
    def end(self):
        handles, self._handles, self._views = self._handles, [], []
        self._l1._closed_write(self)
        return handles

    patch.setattr(WriteReservation, "_end", end)


def a_failed_retrieve_keeps_its_pins(patch):
    patch.setattr(MaruHandler, "collect", lambda self: None)


def what_is_behind_the_prefix_stays_pinned(patch):
    first = columns.hold_first

    def and_keep_the_rest(s, keys):
        held, _, why = yield from first(s, keys)
        return held, [], why

    patch.setattr(columns, "hold_first", and_keep_the_rest)


def a_region_that_cannot_be_mapped_is_an_error(patch):
    hold = MaruHandler.hold_pages
    patch.setattr(MaruHandler, "hold_pages", lambda self, keys, *, partial=False: hold(self, keys))


def a_timeout_is_a_miss(patch):
    reserve = MaruL1.reserve_read

    async def reserve_or_miss(self, keys):
        try:
            return await reserve(self, keys)
        except NoAnswer:
            return await reserve(self, [])

    patch.setattr(MaruL1, "reserve_read", reserve_or_miss)


def another_layout_is_read_all_the_same(patch):
    patch.setattr(HeldBatch, "keep_first", lambda self, n: None)


def a_second_model_is_taken(patch):
    patch.setattr(layout_module.KVLayout, "__ne__", lambda self, other: False)


def the_pool_comes_up_with_the_block(patch):
    enter = MaruL1.__aenter__

    async def and_register(self):
        l1 = await enter(self)
        await l1.register_kv_layout(real.SHAPES, real.DTYPE)
        return l1

    patch.setattr(MaruL1, "__aenter__", and_register)


def clear_takes_everybodys(patch):
    async def clear(self):
        keys = [*real.keys_of(4), *real.keys_of(2, "o")]
        return dict(zip(keys, await self.delete(keys), strict=True))

    patch.setattr(MaruL1, "clear", clear)


def a_shutdown_deletes(patch):
    leave = MaruL1.__aexit__

    async def clear_and_leave(self, *exc):
        await self.clear()
        return await leave(self, *exc)

    patch.setattr(MaruL1, "__aexit__", clear_and_leave)


def what_is_open_stays_open(patch):
    init = HandlerOwner.__init__
    patch.setattr(HandlerOwner, "__init__", lambda self, make, at_end: init(self, make, lambda: None))


def missing_and_pinned_are_one(patch):
    async def conflated(handler, names, answers):
        return [Deletion.DELETED if answer else Deletion.MISSING for answer in answers]

    patch.setattr(l1_module, "deletions_of", conflated)


def damage_is_not_looked_for(patch):
    async def none(self):
        return []

    patch.setattr(ViewLease, "damaged", none)


def it_stores_what_is_found_again(patch):
    """Somebody behind its back."""
    reserve = MaruL1.reserve_write

    async def and_prefetch(self, keys):
        reservation = await reserve(self, keys)
        await self.delete([b"whoever"])
        return reservation

    patch.setattr(MaruL1, "reserve_write", and_prefetch)


def finishing_one_read_finishes_all(patch):
    patch.setattr(ViewLease, "keep", lambda self, keys: self.release_nowait())


def a_cancelled_finish_keeps_its_pages(patch):
    kept = []

    async def finish(self, keys):
        outcomes = {}
        for part in self._take(keys):
            kept.append(part)
            outcomes.update(zip(part.keys, await part.commit(), strict=True))
        return outcomes

    patch.setattr(MaruL1Dispatcher, "finish_write", finish)


def freed_spans_are_free(patch):
    patch.setattr(device_module, "may_write", lambda fd, offset, length: None)


class _Instead:
    """A module, but for some names."""

    def __init__(self, module, **names):
        self.__dict__.update(vars(module), **names)
