"""The faults that are hit in live processes, recorded, and replayed from the recording: ``tests/recorder/test_replayed.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from .planted import pipeline


@attrs.frozen
class LiveFault:
    """A planted fault, and the load that it needs."""

    patch: Callable[[Any], None]
    evicts: bool = True
    """Whether the destination is too small for all keys."""
    hangs: bool = False
    """Whether some copies never end."""
    late: bool = False
    """Whether a batch that waits for half a second beside an idle slot is too late: on a busy machine it may be any."""
    patience: float = 60.0
    """Seconds after which a container that has not ended never will."""
    closes: bool = False
    """Whether the engine is closed with stores inside."""
    drivers: tuple[str, ...] = ("trio", "threads")


def nothing(patch: Any) -> None:
    """No fault."""


FAULTS = {
    fault.patch.__name__: fault
    for fault in [
        LiveFault(pipeline.a_cancel_in_a_queue_takes_the_wrong_one),
        LiveFault(pipeline.confirmed_before_released),
        LiveFault(pipeline.nobody_is_told_of_the_end, patience=4.0),
        LiveFault(pipeline.strong_guards_are_not_released, drivers=("trio",)),
        LiveFault(pipeline.guards_go_when_a_cancel_is_asked_for),
        LiveFault(pipeline.guards_are_released_twice),
        LiveFault(pipeline.weak_blocks_are_not_held),
        LiveFault(pipeline.room_of_evicted_blocks_is_kept, drivers=("trio",)),
        LiveFault(pipeline.the_first_two_blocks_are_copied_crosswise, drivers=("trio",)),
        LiveFault(pipeline.who_makes_room_does_not_ask_who_is_held, drivers=("trio",)),
        LiveFault(pipeline.pending_marks_go_early),
        LiveFault(pipeline.a_mark_of_another_is_taken_off),
        LiveFault(pipeline.marks_of_evicted_blocks_stay, drivers=("trio",)),
        LiveFault(pipeline.the_budget_is_given_back_twice),
        LiveFault(pipeline.a_failed_container_keeps_its_budget, drivers=("trio",)),
        LiveFault(pipeline.a_precondition_is_not_waited_for),
        LiveFault(pipeline.only_the_first_who_waits_for_an_event_is_told, patience=4.0, drivers=("trio",)),
        LiveFault(pipeline.the_last_who_is_ready_goes_first),
        LiveFault(pipeline.a_batch_may_be_larger_than_the_largest),
        LiveFault(pipeline.the_flush_interval_is_forgotten, late=True),
        LiveFault(pipeline.unproven_is_taken_for_failed),
        LiveFault(pipeline.shutdown_forgets_what_is_ready, closes=True, drivers=("trio",)),
        LiveFault(pipeline.a_copy_may_take_for_ever, hangs=True, patience=4.0, drivers=("trio",)),
    ]
}
NOTHING = LiveFault(nothing)
