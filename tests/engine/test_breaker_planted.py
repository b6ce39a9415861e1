"""Faults planted into breakers and the load_priority of loads: the tests that look for them find each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from offload import TierUnavailable
from tests.engine import test_breaker as pure
from tests.engine import test_breaker_pipeline as pipelines
from tests.engine import test_breaker_tier as behind
from tests.engine import test_load_priority as load_priority
from tests.support.planted import breaker as P

Patch = pytest.MonkeyPatch

PLANTED: list[tuple[Callable[[Patch], None], Callable[..., Any], dict[str, Any]]] = [
    (P.never_closes, behind.test_it_is_tried_again_and_well_if_it_answers, {"name": "pin"}),
    (P.never_opens, behind.test_three_faults_break_it_and_then_it_is_not_asked, {"name": "load"}),
    (
        P.the_permit_of_a_cancelled_probe_is_lost,
        behind.test_a_cancelled_call_is_no_fault_and_gives_its_turn_back,
        {"name": "pin", "state": "half-open"},
    ),
    (P.two_probes_at_once, behind.test_one_probe_while_others_are_told_that_it_is_under_way, {}),
    (P.earlier_generations_count, behind.test_what_was_asked_before_it_broke_says_nothing_afterwards, {}),
    (P.the_wait_does_not_double, pure.test_it_waits_one_second_and_doubles_up_to_thirty, {}),
    (P.the_wait_doubles_for_ever, pure.test_it_waits_one_second_and_doubles_up_to_thirty, {}),
    (P.a_lost_probe_is_waited_for, pure.test_a_probe_that_never_comes_back_counts_as_a_fault, {}),
    (P.any_answer_forgives_all, behind.test_a_tier_that_finds_everything_and_reads_nothing_breaks, {}),
    (
        P.a_cancel_is_a_fault,
        behind.test_a_cancelled_call_is_no_fault_and_gives_its_turn_back,
        {"name": "delete", "state": "closed"},
    ),
    (P.full_is_a_fault, behind.test_a_full_tier_is_not_broken, {}),
    (P.calls_have_no_deadline, behind.test_a_call_that_never_answers_is_cut_off_and_a_fault, {"name": "contains"}),
    (P.a_missing_answer_is_no_fault, behind.test_a_call_that_never_answers_is_cut_off_and_a_fault, {"name": "reserve"}),
    (P.unused_room_keeps_the_permit, behind.test_room_that_is_given_back_unused_gives_the_turn_back, {}),
    (P.waiting_for_room_goes_on_in_a_broken_tier, behind.test_who_waits_for_room_in_a_tier_that_breaks_is_told, {}),
    (P.old_room_is_used_in_a_broken_tier, behind.test_room_of_before_it_broke_is_of_no_use_while_it_is_broken, {}),
    (P.the_source_is_blamed_on_the_tier, behind.test_an_error_of_the_source_is_not_the_tiers, {}),
    (
        P.a_broken_tier_fails_the_batch_as_a_whole,
        pipelines.test_every_block_is_rejected_at_once_and_by_name,
        {"when_full": "wait"},
    ),
    (P.stores_starve, load_priority.test_a_store_that_yielded_for_a_second_gets_one_slot, {}),
    (P.loads_starve, load_priority.test_a_load_meets_the_batches_that_were_copying_and_no_other, {"slots": 2}),
    (P.all_that_waited_go_at_once, load_priority.test_a_store_that_yielded_for_a_second_gets_one_slot, {}),
    (P.the_one_slot_is_not_given_back, load_priority.test_loads_without_an_end_let_a_batch_through_each_second, {}),
    (P.the_one_slot_is_not_given_back, load_priority.test_a_slot_that_goes_for_nothing_does_not_keep_the_others, {}),
    (P.the_one_slot_is_not_given_back, load_priority.test_a_batch_that_waits_for_room_keeps_nobody_else, {}),
    (P.a_crash_keeps_the_one_slot, load_priority.test_a_crash_of_a_pipeline_gives_its_turn_back, {}),
    (P.whoever_leaves_the_line_tells_nobody, load_priority.test_they_go_in_the_order_in_which_they_came, {}),
    (P.a_batch_with_room_does_not_yield, load_priority.test_a_batch_that_got_room_yields_with_it, {}),
]


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def play(test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    if "autojump_clock" not in test.__code__.co_varnames:
        test(**arguments)
        return

    async def main() -> None:
        with trio.fail_after(10_000):
            await test(None, **arguments)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("plant", "test", "arguments"),
    PLANTED,
    ids=[f"{plant.__name__}-{test.__name__.removeprefix('test_')}"[:90] for plant, test, _ in PLANTED],
)
def test_a_planted_fault_is_found(plant: Any, test: Any, arguments: dict[str, Any], monkeypatch: Patch) -> None:
    play(test, arguments)
    plant(monkeypatch)
    with pytest.raises(BaseException) as found:
        play(test, arguments)
    expected = (AssertionError, pytest.fail.Exception, trio.TooSlowError, TierUnavailable, OSError)
    assert any(isinstance(error, expected) for error in leaves(found.value)), found.value
