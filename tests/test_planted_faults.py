"""Faults planted into the real code: what looks for bugs must find them. (Without them, every seed is clean.)

Equivalent to no fault, and therefore not here: leaving out the sweep while the claim is honoured changes nothing that can
be seen.
"""

import fuzz
import pytest

from backends.abc import StrongBlocks
from backends.testing import FakeTier
from offload import OffloadBatch, TransferFailed
from offload._budget import Budget
from offload._channel import CancellableChannel
from offload._lifecycle import Phase
from offload._marks import PendingMarks
from offload._settling import Settlement
from offload._waiting import Waiter

SEEDS = 250


def claim_ignores_cancelled(patch):
    def claim(self):
        for container in self.containers:
            container.phase = Phase.COMMITTED
        return []

    patch.setattr(OffloadBatch, "claim", claim)
    return "I4"


def confirmed_before_released(patch):
    def settle(self, container):
        self.settle_unproven(container)
        self.release(container)

    patch.setattr(Settlement, "settle", settle)
    return "I3"


def room_of_evicted_blocks_is_kept(patch):
    def keep(self, keys):
        slots = dict(zip(self.granted, self._slots, strict=True))
        self.granted, self._slots = keys, [slots[key] for key in keys]

    patch.setattr(type(FakeTier().reserve_nowait([], 64, "wait")), "keep", keep)
    return "I1"


def pending_marks_go_early(patch):
    mark = PendingMarks.mark

    def mark_and_forget(self, keys):
        lost = mark(self, keys)
        self.release(set(keys).difference(lost))
        return lost

    patch.setattr(PendingMarks, "mark", mark_and_forget)
    return "I7"


def a_mark_of_another_is_taken_off(patch):
    """A container that lost a key to another takes the other's mark with it when it goes."""
    release = PendingMarks.release

    def release_all(self, keys):
        release(self, list(self._pending) if keys else keys)

    patch.setattr(PendingMarks, "release", release_all)
    return "I7"


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
    return "I9"


def the_budget_is_given_back_twice(patch):
    give_back = Budget.give_back

    def twice(self, blocks):
        give_back(self, blocks)
        give_back(self, blocks)

    patch.setattr(Budget, "give_back", twice)
    return "I1"


def strong_guards_are_not_released(patch):
    patch.setattr(StrongBlocks, "release", lambda self: None)
    return "I3"


def a_policys_lock_is_forgotten(patch):
    release = Settlement.release

    def forget(self, container):
        container.lease = None
        release(self, container)

    patch.setattr(Settlement, "release", forget)
    return "I1"


def a_waiting_container_is_not_woken_by_its_cancel(patch):
    patch.setattr(Waiter, "withdraw", lambda self, container: None)
    return "I9"


def a_cancel_in_a_queue_takes_the_wrong_one(patch):
    withdraw = CancellableChannel.withdraw

    def wrong(self, container):
        first = next(iter(self.parked))
        if first is not container:
            first.phase, container.phase = container.phase, first.phase
        withdraw(self, first)

    patch.setattr(CancellableChannel, "withdraw", wrong)
    return ""


FAULTS = [
    claim_ignores_cancelled,
    confirmed_before_released,
    room_of_evicted_blocks_is_kept,
    pending_marks_go_early,
    a_mark_of_another_is_taken_off,
    a_neighbour_fails_with_who_is_cancelled,
    the_budget_is_given_back_twice,
    strong_guards_are_not_released,
    a_policys_lock_is_forgotten,
    a_waiting_container_is_not_woken_by_its_cancel,
    a_cancel_in_a_queue_takes_the_wrong_one,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_fuzz_finds(plant, monkeypatch):
    invariant = plant(monkeypatch)
    for seed in range(SEEDS):
        report = fuzz.play(seed)
        # The right finding, not just any: a fault must not be found by accident.
        if any(violation.startswith(invariant) for violation in report.violations):
            return
    raise AssertionError(f"none of {SEEDS} seeds found it")


@pytest.mark.long
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_fuzz_finds_it_more_than_once(plant, monkeypatch):
    plant(monkeypatch)
    bad, _ = fuzz.play_many(range(SEEDS))
    assert len(bad) > 2
