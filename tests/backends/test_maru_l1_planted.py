"""Faults planted into Maru as the first level: the tests that look for them find each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from backends.abc import Deletion
from backends.maru.l1 import MaruL1, MaruL1Dispatcher, ViewLease, WriteReservation
from backends.maru.l1 import _layout as layout_module
from backends.maru.l1 import _maru_l1 as l1_module
from backends.maru.l1 import _reading as reading_module
from backends.maru.l1 import _writing as writing_module
from backends.maru.l1._home import Home
from maru import CannotMap, Damaged, HeldBatch, LeaseLost, MaruHandler, NoAnswer
from maru._client import columns
from maru._client.pages import OwnedPages
from maru._directory.guards import Guards
from maru._pool import device as device_module
from tests.backends import test_maru_l1 as real
from tests.backends import test_maru_l1_dispatcher as dispatcher
from tests.backends import test_maru_l1_races as races
from tests.backends import test_one_hop as one_hop
from tests.maru import test_spans_in_use as spans

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
    patch.setattr(Guards, "hold", lambda self, by, keys, *rest: None)


def an_aborted_page_is_free_at_once(patch):
    """A page freed under a writer."""
    end = WriteReservation._end

    def abort(self):
        if self.is_open:
            self._state = writing_module._State.OVER
            for handle in end(self):
                self._l1._home.handler.free(handle)

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
        handler, handles = self._home.handler, reservation._handles
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
    init = Home.__init__
    patch.setattr(Home, "__init__", lambda self, make, at_end: init(self, make, lambda: None))


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


# --- and which test is to find it ---------------------------------------------------------------------------------

R, H = races, one_hop
EVERY_STEP = R.test_cancelled_at_every_step_it_leaves_no_page_and_no_pin_behind
PLANTED: list[tuple[Callable[[Any], None], Callable[..., Any], dict[str, Any]]] = [
    (a_lease_is_not_returned, EVERY_STEP, {"case": R.reading}),
    (a_lease_is_not_returned, real.test_a_shutdown_deletes_nothing_and_leaves_no_pin, {}),
    (
        a_lease_is_returned_when_it_is_given,
        H.test_retrieve_holds_what_it_found_until_it_is_finished,
        {"server": H.OURS},
    ),
    (
        a_lease_is_returned_when_it_is_given,
        R.test_what_is_read_is_not_evicted_and_what_there_is_no_room_for_is_refused,
        {},
    ),
    (pins_hold_nothing, R.test_what_is_read_is_not_evicted_and_what_there_is_no_room_for_is_refused, {}),
    (an_aborted_page_is_free_at_once, R.test_a_page_that_somebody_can_still_write_is_not_free_before_he_is_over, {}),
    (
        an_aborted_page_is_free_at_once,
        real.test_a_tensor_that_is_still_written_keeps_its_page_and_its_memory,
        {},
    ),
    (an_abort_forgets_its_pages, R.test_a_body_that_is_cancelled_leaves_the_pages_free_whatever_it_was_doing, {}),
    (an_abort_forgets_its_pages, EVERY_STEP, {"case": R.committing}),
    (leaving_uncommitted_is_no_abort, H.test_store_that_is_aborted_is_heard_of_by_nobody, {"server": H.OURS}),
    (
        leaving_uncommitted_is_no_abort,
        R.test_an_aborted_page_refuses_to_be_written_and_a_name_that_is_left_over_holds_nothing,
        {},
    ),
    (
        pages_are_registered_before_they_are_filled,
        H.test_store_shows_nobody_a_page_before_all_of_it_is_copied,
        {"server": H.OURS},
    ),
    (
        pages_are_registered_before_they_are_filled,
        H.test_store_reserves_without_a_request_copies_then_registers,
        {"server": H.PUBLISHED, "stored": H.store_typed},
    ),
    (a_commit_is_not_shielded, R.test_cancelled_behind_the_message_it_returns_what_became_of_it, {}),
    (
        a_commit_is_not_bounded,
        R.test_a_commit_that_takes_too_long_is_unproven_and_its_pages_come_back_when_it_is_known,
        {},
    ),
    (
        pages_of_an_unproven_commit_are_free,
        R.test_a_commit_that_takes_too_long_is_unproven_and_its_pages_come_back_when_it_is_known,
        {},
    ),
    (
        a_commit_that_is_cancelled_early_is_over,
        R.test_cancelled_before_the_message_nothing_is_sent_and_the_reservation_can_still_be_committed,
        {},
    ),
    (a_lost_lease_is_not_noticed, R.test_a_lease_ends_by_this_sides_clock_without_asking_anybody, {}),
    (a_lost_lease_is_not_noticed, R.test_a_lease_over_a_restart_is_lost_or_holds_what_it_held, {}),
    (views_are_not_taken_back, R.test_released_views_refuse_and_part_of_a_lease_can_be_kept, {}),
    (pages_are_not_taken_back, R.test_a_committed_page_refuses_to_be_written, {}),
    (a_failed_retrieve_keeps_its_pins, R.test_a_retrieve_that_fails_gives_its_pins_back_at_once, {}),
    (a_failed_retrieve_keeps_its_pins, H.test_retrieve_that_fails_behind_the_pins_rolls_them_back, {}),
    (what_is_behind_the_prefix_stays_pinned, R.test_keys_behind_the_first_that_cannot_be_mapped_are_let_go_of, {}),
    (
        what_is_behind_the_prefix_stays_pinned,
        H.test_retrieve_unpins_what_is_behind_the_first_that_cannot_be_resolved,
        {"server": H.OURS},
    ),
    (
        a_region_that_cannot_be_mapped_is_an_error,
        R.test_keys_behind_the_first_that_cannot_be_mapped_are_let_go_of,
        {},
    ),
    (a_timeout_is_a_miss, R.test_a_timeout_is_never_a_miss, {"what": "reserve_read"}),
    (another_layout_is_read_all_the_same, real.test_a_key_that_another_layout_stored_ends_the_prefix, {}),
    (a_second_model_is_taken, real.test_one_instance_holds_one_model_and_says_so, {}),
    (the_pool_comes_up_with_the_block, real.test_nothing_is_there_before_the_layout_is_known, {}),
    (clear_takes_everybodys, real.test_clear_deletes_what_is_its_own_and_nobody_reads, {}),
    (a_shutdown_deletes, real.test_a_shutdown_deletes_nothing_and_leaves_no_pin, {}),
    (a_shutdown_deletes, H.test_the_pool_comes_up_with_the_first_layout_and_a_shutdown_deletes_nothing, {}),
    (what_is_open_stays_open, real.test_a_shutdown_deletes_nothing_and_leaves_no_pin, {}),
    (missing_and_pinned_are_one, H.test_delete_tells_missing_from_pinned, {"server": H.OURS}),
    (damage_is_not_looked_for, real.test_damage_is_named_and_nothing_is_deleted_for_it, {}),
    (it_stores_what_is_found_again, H.test_nobody_evicts_stores_or_deletes_behind_its_back, {}),
    (
        finishing_one_read_finishes_all,
        dispatcher.test_part_of_what_was_reserved_is_finished_and_the_rest_stays_reserved,
        {},
    ),
    (
        a_cancelled_finish_keeps_its_pages,
        dispatcher.test_cancelled_at_every_step_what_was_reserved_can_be_given_back,
        {"case": dispatcher.writing},
    ),
    (freed_spans_are_free, spans.test_a_copy_that_was_abandoned_writes_into_nobody_elses_page, {"where": "device"}),
    (freed_spans_are_free, spans.test_a_stopped_owner_keeps_its_span_until_it_is_killed, {}),
]
FINDS = (AssertionError, pytest.fail.Exception)
"""What a test says that finds a fault. Anything else it may have stumbled over by accident."""
BY_NAME: dict[Any, type[BaseException]] = {  # but for these, which say what is wrong by themselves
    finishing_one_read_finishes_all: LeaseLost,
    freed_spans_are_free: Damaged,
    a_region_that_cannot_be_mapped_is_an_error: CannotMap,
}


def id_of(planted):
    fault, test, arguments = planted
    return "-".join([fault.__name__, test.__name__, *(getattr(one, "__name__", one) for one in arguments.values())])


@pytest.mark.parametrize(("fault", "test", "arguments"), PLANTED, ids=map(id_of, PLANTED))
def test_it_is_found(fault, test, arguments, monkeypatch, tmp_path):
    """The test passes without the fault (it does, in its own file), and fails with it."""
    fault(monkeypatch)
    given = {**arguments, "autojump_clock": None, "tmp_path": tmp_path}
    if "device" in inspect.signature(test).parameters:
        given["device"] = tmp_path / "device"
        given["device"].touch(0o600)
        given["device"].write_bytes(bytes(2 * spans.MIB2))
    wanted = {name: given[name] for name in inspect.signature(test).parameters}
    with pytest.raises(BaseException) as found:
        run(test, wanted)
    assert isinstance(alone(found.value), (*FINDS, BY_NAME.get(fault, AssertionError))), found.value
    print(f"found: {alone(found.value)!r:.200}")


def run(test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    if inspect.iscoroutinefunction(test):
        clock = trio.testing.MockClock(autojump_threshold=0) if "autojump_clock" in arguments else None
        trio.run(partial(test, **arguments), clock=clock)
    else:
        test(**arguments)


def alone(error: BaseException) -> BaseException:
    """The first of a group, whatever is around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
