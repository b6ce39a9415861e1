"""Tasks, locks and residents: the tables, which decide without a thread."""

import random
import time
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.engines.lmcache._locks import LockTable
from offload.engines.lmcache._residents import Residents
from offload.engines.lmcache._tasks import TaskTable
from tests.engines.lmcache.keys import chunks

# --- tasks ------------------------------------------------------------------------------------------------------------


def test_a_result_is_told_once():
    tasks = TaskTable(count())
    task = tasks.begin()
    assert tasks.take(task) is None
    tasks.finish(task, "done")
    assert tasks.take(task) == "done"
    assert tasks.take(task) is None


def test_a_task_ends_once_and_the_first_result_counts():
    tasks = TaskTable(count())
    task = tasks.begin()
    assert tasks.finish(task, 1)
    assert not tasks.finish(task, 2)
    assert not tasks.finish(99, 3)
    assert tasks.take_all() == {task: 1}
    assert tasks.take_all() == {}


def test_tables_that_share_their_ids_never_share_one():
    ids = count()
    stores, loads = TaskTable(ids), TaskTable(ids)
    assert len({stores.begin(), loads.begin(), stores.begin()}) == 3
    assert (stores.under_way, loads.under_way) == (2, 1)


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_hit_is_over_when_all_of_its_keys_are_unlocked():
    locks = LockTable()
    locks.lock("hit", [b"a", b"b"])
    assert locks.unlock([b"b"]) == []
    assert locks.unlock([b"a"]) == ["hit"]
    assert len(locks) == 0


def test_a_key_that_is_not_locked_is_ignored():
    locks = LockTable()
    locks.lock("hit", [b"a"])
    assert locks.unlock([b"x", b"a", b"a"]) == ["hit"]


def test_a_hit_is_found_by_exactly_its_keys():
    locks = LockTable()
    locks.lock("long", [b"a", b"b"])
    locks.lock("short", [b"a"])
    assert locks.find([b"a", b"b"]) == "long"
    assert locks.find([b"a"]) == "short"
    assert locks.find([b"b"]) is None
    assert locks.find([]) is None


def test_a_hit_of_which_a_key_was_unlocked_is_not_found():
    locks = LockTable()
    locks.lock("hit", [b"a", b"b"])
    locks.unlock([b"b"])
    assert locks.find([b"a", b"b"]) is None


def test_clearing_gives_every_hit_once():
    locks = LockTable()
    locks.lock("one", [b"a", b"b"])
    locks.lock("two", [b"b"])
    assert sorted(locks.clear()) == ["one", "two"]
    assert locks.clear() == []


@given(st.lists(st.integers(1, 4), max_size=6), st.randoms())
def test_a_key_is_held_by_a_hit_as_long_as_one_lock_of_it_is_left(lengths, random):
    locks, alive = LockTable(), {}
    left = []
    for hit, length in enumerate(lengths):
        keys = [bytes([at]) for at in range(length)]
        locks.lock(hit, keys)
        alive[hit] = set(keys)
        left += keys
    random.shuffle(left)
    while left:
        key = left.pop()
        for hit in locks.unlock([key]):
            del alive[hit]
        assert all(any(other in keys for keys in alive.values()) for other in left)
    assert not alive


# --- residents --------------------------------------------------------------------------------------------------------


def test_a_key_that_is_stored_again_takes_no_further_bytes():
    residents = Residents()
    assert residents.add([("a", 5), ("b", 6)]) == ([("a", 5), ("b", 6)], [])
    assert residents.add([("a", 7)]) == ([], [])
    assert residents.remove(["a", "x"]) == [("a", 5)]


def test_the_oldest_are_forgotten_where_there_are_too_many():
    residents = Residents(most=2)
    residents.add([("a", 1), ("b", 2)])
    assert residents.add([("c", 3)]) == ([("c", 3)], [("a", 1)])
    assert len(residents) == 2
    assert "a" not in residents


def test_what_was_stored_since_is_not_given_up_by_who_looked_before():
    residents = Residents()
    residents.add([("a", 1), ("b", 2)])
    began = residents.mark()
    residents.add([("c", 3), ("b", 2)])  # b was written again, so it had gone
    assert residents.remove(["a", "b", "c"], before=began) == [("a", 1)]
    assert residents.remove(["b", "c"], before=residents.mark()) == [("b", 2), ("c", 3)]


def test_pages_tell_every_key_once_in_order_of_storing():
    residents = Residents()
    residents.add([(key, 1) for key in range(7)])
    told, cursor = [], None
    while True:
        page = residents.page(3, cursor)
        told += [key for key, _ in page.entries]
        cursor = page.cursor
        if cursor is None:
            break
    assert told == list(range(7))


def test_a_page_looks_at_no_object_before_it():
    class Key:
        compared = 0

        def __init__(self, model_name: str) -> None:
            self._model_name = model_name

        @property
        def model_name(self) -> str:
            Key.compared += 1
            return self._model_name

    residents: Residents[Key] = Residents()
    residents.add([(Key("other"), 1) for _ in range(20_000)])
    last = [(Key("mine"), 1) for _ in range(100)]
    residents.add(last)
    told, cursors, cursor = [], 0, None
    while True:
        page = residents.page(60, cursor, "mine")
        told += page.entries
        cursor, cursors = page.cursor, cursors + 1
        if cursor is None:
            break
    assert told == last
    assert cursors > 3, "no page looks at all objects"
    assert Key.compared <= 20_100


def test_a_late_page_takes_no_longer_than_an_early_one():
    residents: Residents[int] = Residents()
    residents.add((key, 1) for key in range(200_000))

    def seconds(cursor: str | None) -> float:
        began = time.process_time()
        residents.page(100, cursor)
        return time.process_time() - began

    assert min(seconds("199800") for _ in range(9)) < 20 * min(seconds(None) for _ in range(9))


@pytest.mark.parametrize("seed", range(20))
def test_pages_agree_with_a_plain_list(seed: int):
    rng, residents, plain = random.Random(seed), Residents(most=1500), dict[int, int]()
    for _ in range(300):
        keys = [rng.randrange(3000) for _ in range(rng.randrange(40))]
        if rng.random() < 0.6:
            new, forgotten = residents.add((key, key) for key in keys)
            assert {key for key, _ in new} == set(keys) - set(plain)
            for key in keys:
                plain.pop(key, None)
                plain[key] = key
            for key, _ in forgotten:
                assert key == next(iter(plain))
                del plain[key]
        else:
            assert residents.remove(keys) == [(key, key) for key in dict.fromkeys(keys) if key in plain]
            for key in keys:
                plain.pop(key, None)
        told, cursor = list[int](), None
        while True:
            page = residents.page(rng.randrange(1, 900), cursor)
            told += [key for key, _ in page.entries]
            cursor = page.cursor
            if cursor is None:
                break
        assert told == list(plain)
        assert len(residents) == len(plain)


def test_what_is_stored_and_deleted_between_two_pages_moves_no_other():
    residents = Residents()
    residents.add([(key, 1) for key in range(4)])
    page = residents.page(2)
    residents.remove([0, 2])
    residents.add([(9, 1)])
    assert residents.page(5, page.cursor).entries == [(3, 1), (9, 1)]


def test_a_page_of_one_model():
    residents = Residents()
    mine, other = chunks(2), chunks(2, model_name="other")
    residents.add([(key, 8) for pair in zip(mine, other, strict=True) for key in pair])
    page = residents.page(1, None, "other")
    assert page.entries == [(other[0], 8)]
    assert residents.page(1, page.cursor, "other").entries == [(other[1], 8)]
    assert residents.page(1, page.cursor, "other").cursor is None


@pytest.mark.parametrize(("most", "cursor"), [(0, None), (-1, None), (1, "x"), (1, "-1"), (1, "")])
def test_a_page_size_or_a_cursor_that_cannot_be_is_refused(most, cursor):
    with pytest.raises(ValueError, match=r"page_size|cursor"):
        Residents().page(most, cursor)
