"""Shares of a process's limits: by door and by holder."""

import threading

import pytest

from maru.base.budget import Budget


def test_reserve_is_granted_to_no_peer():
    budget = Budget(lambda: 1_000, reserved=0.25, least=64)
    assert budget.total == 750
    assert Budget(lambda: 100, reserved=0.25, least=64).total == 36
    assert Budget(lambda: 10, reserved=0.25, least=64).total == 0


def test_doors_share_the_limit_by_weight():
    budget = Budget(lambda: 100)
    large, small = budget.open(3), budget.open(1)
    assert (large.most, small.most) == (75, 25)
    large.close()
    large.close()
    assert (large.most, small.most) == (0, 100)


def test_one_door_takes_nothing_from_another():
    budget = Budget(lambda: 100)
    large, small = budget.open(3), budget.open(1)
    while large.take():
        pass
    assert large.held == 75 and large.refused == 1
    assert all(small.take() for _ in range(25)) and not small.take()


def test_bound_of_a_door_holds_below_its_share():
    door = Budget(lambda: 100).open(1, most=3)
    assert [door.take() for _ in range(4)] == [True, True, True, False]


def test_one_holder_leaves_room_for_others():
    door = Budget(lambda: 10).open(1, each=0.5)
    assert all(door.take("greedy") for _ in range(5)) and not door.take("greedy")
    assert door.take("good") and door.held_by("greedy") == 5


def test_a_share_is_never_nothing():
    door = Budget(lambda: 4, least=64).open(1, each=0.1)
    assert door.take("one") and not door.take("other")


def test_a_refused_amount_changes_nothing():
    door = Budget(lambda: 10).open(1)
    assert door.take("one", 8) and not door.take("one", 3)
    assert door.held == 8 and door.take("other", 2)


def test_a_limit_that_has_changed_counts_at_once():
    limit = 4
    door = Budget(lambda: limit).open(1)
    assert door.take("one", 4)
    limit = 2
    assert not door.take("one") and door.held == 4
    door.give_back("one", 3)
    assert door.take("one")


def test_grants_come_back_from_any_thread():
    door = Budget(lambda: 100).open(1)
    assert door.take("one", 100)
    threads = [threading.Thread(target=door.give_back, args=("one", 10)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert door.held == 0 and door.take("other", 100)


@pytest.mark.parametrize("each", [0.1, 0.5, 1.0])
def test_holders_never_have_more_than_their_door(each):
    door = Budget(lambda: 64).open(1, each=each)
    for holder in range(100):
        while door.take(holder):
            pass
    assert door.held == 64 and max(door.held_by(holder) for holder in range(100)) <= door.each
