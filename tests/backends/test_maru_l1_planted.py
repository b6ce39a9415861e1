"""Faults planted into Maru as the first level: the tests that look for them find each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from maru import CannotMap, Damaged, LeaseLost
from tests.backends import test_maru_l1 as real
from tests.backends import test_maru_l1_dispatcher as dispatcher
from tests.backends import test_maru_l1_races as races
from tests.backends import test_one_hop as one_hop
from tests.maru import test_spans_in_use as spans
from tests.support.planted import l1 as P

# --- and which test is to find it ---------------------------------------------------------------------------------

R, H = races, one_hop
EVERY_STEP = R.test_cancelled_at_every_step_it_leaves_no_page_and_no_pin_behind
PLANTED: list[tuple[Callable[[Any], None], Callable[..., Any], dict[str, Any]]] = [
    (P.a_lease_is_not_returned, EVERY_STEP, {"case": R.reading}),
    (P.a_lease_is_not_returned, real.test_a_shutdown_deletes_nothing_and_leaves_no_pin, {}),
    (
        P.a_lease_is_returned_when_it_is_given,
        H.test_retrieve_holds_what_it_found_until_it_is_finished,
        {"server": H.OURS},
    ),
    (
        P.a_lease_is_returned_when_it_is_given,
        R.test_what_is_read_is_not_evicted_and_what_there_is_no_room_for_is_refused,
        {},
    ),
    (P.pins_hold_nothing, R.test_what_is_read_is_not_evicted_and_what_there_is_no_room_for_is_refused, {}),
    (P.an_aborted_page_is_free_at_once, R.test_a_page_that_somebody_can_still_write_is_not_free_before_he_is_over, {}),
    (
        P.an_aborted_page_is_free_at_once,
        real.test_a_tensor_that_is_still_written_keeps_its_page_and_its_memory,
        {},
    ),
    (P.an_abort_forgets_its_pages, R.test_a_body_that_is_cancelled_leaves_the_pages_free_whatever_it_was_doing, {}),
    (P.an_abort_forgets_its_pages, EVERY_STEP, {"case": R.committing}),
    (P.leaving_uncommitted_is_no_abort, H.test_store_that_is_aborted_is_heard_of_by_nobody, {"server": H.OURS}),
    (
        P.leaving_uncommitted_is_no_abort,
        R.test_an_aborted_page_refuses_to_be_written_and_a_name_that_is_left_over_holds_nothing,
        {},
    ),
    (
        P.pages_are_registered_before_they_are_filled,
        H.test_store_shows_nobody_a_page_before_all_of_it_is_copied,
        {"server": H.OURS},
    ),
    (
        P.pages_are_registered_before_they_are_filled,
        H.test_store_reserves_without_a_request_copies_then_registers,
        {"server": H.PUBLISHED, "stored": H.store_typed},
    ),
    (P.a_commit_is_not_shielded, R.test_cancelled_behind_the_message_it_returns_what_became_of_it, {}),
    (
        P.a_commit_is_not_bounded,
        R.test_a_commit_that_takes_too_long_is_unproven_and_its_pages_come_back_when_it_is_known,
        {},
    ),
    (
        P.pages_of_an_unproven_commit_are_free,
        R.test_a_commit_that_takes_too_long_is_unproven_and_its_pages_come_back_when_it_is_known,
        {},
    ),
    (
        P.a_commit_that_is_cancelled_early_is_over,
        R.test_cancelled_before_the_message_nothing_is_sent_and_the_reservation_can_still_be_committed,
        {},
    ),
    (P.a_lost_lease_is_not_noticed, R.test_a_lease_ends_by_this_sides_clock_without_asking_anybody, {}),
    (P.a_lost_lease_is_not_noticed, R.test_a_lease_over_a_restart_is_lost_or_holds_what_it_held, {}),
    (P.views_are_not_taken_back, R.test_released_views_refuse_and_part_of_a_lease_can_be_kept, {}),
    (P.pages_are_not_taken_back, R.test_a_committed_page_refuses_to_be_written, {}),
    (P.a_failed_retrieve_keeps_its_pins, R.test_a_retrieve_that_fails_gives_its_pins_back_at_once, {}),
    (P.a_failed_retrieve_keeps_its_pins, H.test_retrieve_that_fails_behind_the_pins_rolls_them_back, {}),
    (P.what_is_behind_the_prefix_stays_pinned, R.test_keys_behind_the_first_that_cannot_be_mapped_are_let_go_of, {}),
    (
        P.what_is_behind_the_prefix_stays_pinned,
        H.test_retrieve_unpins_what_is_behind_the_first_that_cannot_be_resolved,
        {"server": H.OURS},
    ),
    (
        P.a_region_that_cannot_be_mapped_is_an_error,
        R.test_keys_behind_the_first_that_cannot_be_mapped_are_let_go_of,
        {},
    ),
    (P.a_timeout_is_a_miss, R.test_a_timeout_is_never_a_miss, {"what": "reserve_read"}),
    (P.another_layout_is_read_all_the_same, real.test_a_key_that_another_layout_stored_ends_the_prefix, {}),
    (P.a_second_model_is_taken, real.test_one_instance_holds_one_model_and_says_so, {}),
    (P.the_pool_comes_up_with_the_block, real.test_nothing_is_there_before_the_layout_is_known, {}),
    (P.clear_takes_everybodys, real.test_clear_deletes_what_is_its_own_and_nobody_reads, {}),
    (P.a_shutdown_deletes, real.test_a_shutdown_deletes_nothing_and_leaves_no_pin, {}),
    (P.a_shutdown_deletes, H.test_the_pool_comes_up_with_the_first_layout_and_a_shutdown_deletes_nothing, {}),
    (P.what_is_open_stays_open, real.test_a_shutdown_deletes_nothing_and_leaves_no_pin, {}),
    (P.missing_and_pinned_are_one, H.test_delete_tells_missing_from_pinned, {"server": H.OURS}),
    (P.damage_is_not_looked_for, real.test_damage_is_named_and_nothing_is_deleted_for_it, {}),
    (P.it_stores_what_is_found_again, H.test_nobody_evicts_stores_or_deletes_behind_its_back, {}),
    (
        P.finishing_one_read_finishes_all,
        dispatcher.test_part_of_what_was_reserved_is_finished_and_the_rest_stays_reserved,
        {},
    ),
    (
        P.a_cancelled_finish_keeps_its_pages,
        dispatcher.test_cancelled_at_every_step_what_was_reserved_can_be_given_back,
        {"case": dispatcher.writing},
    ),
    (P.freed_spans_are_free, spans.test_a_copy_that_was_abandoned_writes_into_nobody_elses_page, {"where": "device"}),
    (P.freed_spans_are_free, spans.test_a_stopped_owner_keeps_its_span_until_it_is_killed, {}),
]
FINDS = (AssertionError, pytest.fail.Exception)
"""What a test says that finds a fault. Anything else it may have stumbled over by accident."""
BY_NAME: dict[Any, type[BaseException]] = {  # but for these, which say what is wrong by themselves
    P.finishing_one_read_finishes_all: LeaseLost,
    P.freed_spans_are_free: Damaged,
    P.a_region_that_cannot_be_mapped_is_an_error: CannotMap,
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
