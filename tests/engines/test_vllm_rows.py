"""Which row of host memory holds which chunk: the table behind the spec of vLLM's own offloading."""

from __future__ import annotations

import random

import pytest

from backends.base.blocks import BlockPool
from offload.engines.vllm._rows import WITHHELD_STEPS, Answer, Fill, Question, RowTable

KEYS = [f"key-{at}".encode() for at in range(64)]


def table_of(rows: int, *requests: str) -> RowTable:
    table = RowTable(BlockPool(rows))
    for request in requests:
        table.begin(request)
    return table


def ask(table: RowTable, request: str, keys: list[bytes]) -> list[Answer]:
    return [table.where(request, key, at) for at, key in enumerate(keys)]


def question(table: RowTable) -> Question:
    (one,) = table.questions()
    return one


def filled(table: RowTable, keys: list[bytes], request: str = "r") -> Fill:
    """These are found in a tier, and filled."""
    ask(table, request, keys)
    fill = table.found(question(table), len(keys))
    assert fill is not None
    table.filled(fill, len(keys))
    return fill


def write(table: RowTable, keys: list[bytes]) -> list[int]:
    """These are written by a worker, and copied into the tiers."""
    taken, _, _ = table.take_for_store(keys)
    rows = table.stored(taken)[1]
    table.let_go(rows)
    return rows


def held(table: RowTable) -> int:
    return table.pool.statistics().held


def test_a_chunk_is_here_only_once_it_is_filled():
    table = table_of(8, "r")
    assert ask(table, "r", KEYS[:3]) == [Answer.ASKED] * 3
    fill = table.found(question(table), 2)
    assert fill is not None and fill.keys == KEYS[:2]
    assert ask(table, "r", KEYS[:3]) == [Answer.COMING, Answer.COMING, Answer.MISSING]
    table.filled(fill, 2)
    assert ask(table, "r", KEYS[:3]) == [Answer.HERE, Answer.HERE, Answer.MISSING]
    assert table.load("r", KEYS[:2]) == list(fill.rows)


def test_what_a_request_was_told_to_be_here_stays_until_it_was_loaded():
    table = table_of(4, "r")
    filled(table, KEYS[:4])
    assert table.take_for_store(KEYS[10:12]) == ([], [], [])
    rows = table.load("r", KEYS[:4])
    table.end("r")
    assert table.take_for_store(KEYS[10:12]) == ([], [], []), "it is being loaded"
    table.loaded("r", KEYS[:4])
    assert held(table) == 0
    taken, new, evicted = table.take_for_store(KEYS[10:12])
    assert taken == KEYS[10:12] and set(new) <= set(rows) and len(evicted) == 2


def test_what_a_request_that_is_computed_has_not_loaded_is_held_no_more_and_neither_is_what_comes_then():
    table = table_of(8, "r")
    filled(table, KEYS[:2])
    ask(table, "r", KEYS[2:4])
    fill = table.found(question(table), 2)
    assert fill is not None and held(table) == 2
    table.run("r")
    assert held(table) == 0
    table.filled(fill, 2)
    assert held(table) == 0
    table.begin("r")  # preempted
    assert ask(table, "r", KEYS[:4]) == [Answer.HERE] * 4 and held(table) == 4


def test_a_request_asks_once_and_again_when_it_was_preempted():
    table = table_of(8, "r")
    ask(table, "r", KEYS[:2])
    assert question(table).keys == KEYS[:2]
    ask(table, "r", KEYS[:2])
    assert table.questions() == []
    table.begin("r")
    ask(table, "r", KEYS[:2])
    asked = question(table)
    assert table.found(asked, 0) is None
    assert ask(table, "r", KEYS[:2]) == [Answer.MISSING] * 2
    assert table.questions() == []


def test_an_answer_to_what_a_request_was_before_it_was_preempted_changes_nothing():
    table = table_of(8, "r")
    ask(table, "r", KEYS[:2])
    before = question(table)
    table.begin("r")
    ask(table, "r", KEYS[:2])
    assert table.found(before, 0) is None
    assert ask(table, "r", KEYS[:2]) == [Answer.ASKED] * 2


def test_what_has_no_room_is_missing_and_waits_for_nobody():
    table = table_of(4, "r", "other")
    filled(table, KEYS[:3])
    ask(table, "other", KEYS[10:13])
    fill = table.found(question(table), 3)
    assert fill is not None and fill.keys == KEYS[10:11] and table.refused == 2
    table.filled(fill, 1)
    assert ask(table, "other", KEYS[10:13]) == [Answer.HERE, Answer.MISSING, Answer.MISSING]


def test_a_damaged_chunk_is_missing_and_its_row_is_free():
    table = table_of(4, "r")
    ask(table, "r", KEYS[:4])
    fill = table.found(question(table), 4)
    assert fill is not None
    table.filled(fill, 1)
    assert ask(table, "r", KEYS[:4]) == [Answer.HERE] + [Answer.MISSING] * 3
    assert table.pool.free == 3


def test_rows_that_a_copy_may_still_write_to_are_never_used_again():
    table = table_of(4, "r")
    ask(table, "r", KEYS[:4])
    fill = table.found(question(table), 4)
    assert fill is not None
    table.filled(fill, 0, safe=False)
    table.end("r")
    assert table.take_for_store(KEYS[10:12]) == ([], [], [])


def test_what_a_worker_has_written_is_here_at_once_and_stays_until_it_is_stored():
    table = table_of(2, "r")
    taken, rows, evicted = table.take_for_store(KEYS[:2])
    assert (taken, evicted) == (KEYS[:2], [])
    assert ask(table, "r", KEYS[:1]) == [Answer.COMING]
    assert table.take_for_store(KEYS[:2]) == ([], [], []), "it is being written"
    there, held_rows = table.stored(KEYS[:2])
    assert (there, held_rows) == (KEYS[:2], rows)
    assert table.take_for_store(KEYS[2:4]) == ([], [], []), "it is being stored"
    table.let_go(held_rows)
    assert sorted(table.take_for_store(KEYS[2:4])[2]) == KEYS[:2]


def test_what_a_worker_has_failed_to_write_is_not_here():
    table = table_of(2, "r")
    table.take_for_store(KEYS[:2])
    assert table.stored(KEYS[:2], success=False) == ([], [])
    assert table.pool.free == 2 and ask(table, "r", KEYS[:1]) == [Answer.ASKED]


def test_two_requests_that_find_the_same_chunks_fill_them_once():
    table = table_of(8, "a", "b")
    ask(table, "a", KEYS[:2])
    ask(table, "b", KEYS[:3])
    of_a, of_b = table.questions()
    fill = table.found(of_a, 2)
    more = table.found(of_b, 3)
    assert fill is not None and more is not None
    assert (fill.keys, more.keys) == (KEYS[:2], KEYS[2:3])
    table.filled(more, 1)
    table.filled(fill, 2)
    assert ask(table, "b", KEYS[:3]) == [Answer.HERE] * 3
    for request in "ab":
        table.end(request)
    assert held(table) == 0


def test_a_window_that_is_asked_for_from_its_end_is_a_question_for_each_chunk():
    table = table_of(8, "r")
    for position in (2, 1, 0):
        table.where("r", KEYS[position], position)
    assert [one.keys for one in table.questions()] == [[KEYS[2]], [KEYS[1]], [KEYS[0]]]


def test_all_requests_wait_until_one_of_them_has_its_answers():
    table = table_of(8, "a", "b")
    assert not table.waits()
    ask(table, "a", KEYS[:2])
    ask(table, "b", KEYS[4:6])
    of_a, of_b = table.questions()
    assert table.waits()
    fill = table.found(of_a, 1)
    table.found(of_b, 0)
    assert not table.waits()
    assert fill is not None
    table.end("b")
    assert table.waits(), "rows are being filled for it"
    table.filled(fill, 1)
    assert not table.waits()


@pytest.mark.parametrize("loading", [False, True])
def test_no_chunk_of_a_request_that_outlives_a_reset_is_stored(loading: bool):
    table = table_of(8, "r")
    if loading:
        filled(table, KEYS[:2])
        table.load("r", KEYS[:2])
    else:
        table.run("r")
    table.reset()
    table.start_over()
    assert table.take_for_store(KEYS[2:4], "r") == ([], [], [])
    table.begin("s")
    assert table.take_for_store(KEYS[2:4], "s")[0] == KEYS[2:4]
    table.begin("r")  # it was preempted
    assert table.take_for_store(KEYS[4:6], "r")[0] == KEYS[4:6]


def test_nothing_is_here_after_a_reset_and_rows_that_are_copied_are_withheld():
    table = table_of(8, "r")
    filled(table, KEYS[:2])
    table.load("r", KEYS[:2])
    table.take_for_store(KEYS[2:4])
    write(table, KEYS[4:6])
    ask(table, "r", KEYS[6:8])
    fill = table.found(question(table), 2)
    assert fill is not None
    table.reset()
    assert ask(table, "r", KEYS[:8]) == [Answer.ASKED] * 8
    assert table.pool.free == 2
    table.filled(fill, 2)
    assert table.stored(KEYS[2:4]) == ([], [])
    table.loaded("r", KEYS[:2])
    assert ask(table, "r", KEYS[6:8]) == [Answer.ASKED] * 2, "what was under way is not here either"
    for _ in range(WITHHELD_STEPS - 1):
        table.step()
    assert len(table.take_for_store(KEYS[20:40])[0]) == 4
    table.step()
    assert len(table.take_for_store(KEYS[40:60])[0]) == 4


def test_rows_that_workers_copy_stay_when_the_table_starts_over():
    table = table_of(6, "r")
    filled(table, KEYS[:2])
    loading = table.load("r", KEYS[:2])
    _, writing, _ = table.take_for_store(KEYS[2:4])
    write(table, KEYS[4:6])
    table.start_over()
    for _ in range(2 * WITHHELD_STEPS):
        table.step()
    assert ask(table, "r", KEYS[:6]) == [*[Answer.ASKED] * 2, *[Answer.COMING] * 2, *[Answer.ASKED] * 2]
    assert table.take_for_store(KEYS[2:4]) == ([], [], []), "another worker is still writing them"
    assert set(table.take_for_store(KEYS[20:40])[1]).isdisjoint(loading + writing)
    assert table.stored(KEYS[2:4]) == (KEYS[2:4], writing)
    table.loaded("r", KEYS[:2])
    assert set(table.take_for_store(KEYS[40:60])[1]) == set(loading)


@pytest.mark.parametrize("seed", range(200))
def test_no_row_has_two_owners_whatever_happens(seed: int):
    """Whatever is written, filled, loaded and reset in whatever order: a row that somebody copies is nobody else's."""
    rng = random.Random(seed)
    table = table_of(rng.randrange(1, 12))
    requests, fills, writing = [f"r{at}" for at in range(4)], [], {}
    loading: dict[str, dict[bytes, int]] = {}
    contents: dict[int, bytes] = {}  # what each row was filled or written with

    def some() -> list[bytes]:
        start = rng.randrange(20)
        return KEYS[start : start + rng.randrange(1, 6)]

    def exclusive(rows: list[int], keys: list[bytes]) -> None:
        busy = {row for fill in fills for row in fill.rows} | set(writing.values())
        busy |= {row for job in loading.values() for row in job.values()}
        assert busy.isdisjoint(rows)
        contents.update(zip(rows, keys, strict=True))

    for _ in range(300):
        request = rng.choice(requests)
        what = rng.randrange(10)
        if what == 0:
            if request not in loading:
                table.begin(request)
        elif what == 1:
            table.end(request)
        elif what == 2:
            keys = some()
            answers = ask(table, request, keys)
            leading = next((at for at, answer in enumerate(answers) if answer is not Answer.HERE), len(answers))
            if leading and request not in loading:
                rows = table.load(request, keys[:leading])
                assert [contents[row] for row in rows] == keys[:leading]
                loading[request] = dict(zip(keys[:leading], rows, strict=True))
        elif what == 3:
            for one in table.questions():
                fill = table.found(one, rng.randrange(len(one.keys) + 1))
                if fill is not None:
                    exclusive(list(fill.rows), list(fill.keys))
                    fills.append(fill)
        elif what == 4 and fills:
            fill = fills.pop(rng.randrange(len(fills)))
            table.filled(fill, rng.randrange(len(fill.keys) + 1))
        elif what == 5:
            keys, rows, _ = table.take_for_store(some())
            exclusive(rows, keys)
            writing.update(zip(keys, rows, strict=True))
        elif what == 6 and writing:
            keys = rng.sample(sorted(writing), rng.randrange(1, len(writing) + 1))
            _, rows = table.stored(keys, success=rng.random() < 0.9)
            table.let_go(rows)
            for key in keys:
                del writing[key]
        elif what == 7 and loading:
            request, job = loading.popitem()
            assert [contents[row] for row in job.values()] == list(job), "the row was overwritten while it was loaded"
            table.loaded(request, job)
        elif what == 8:
            table.run(request)
        elif what == 9 and rng.random() < 0.1:
            if rng.random() < 0.5:
                table.start_over()
            else:
                table.reset()
                loading.clear()
                writing.clear()
            for _ in range(WITHHELD_STEPS):
                table.step()
    for fill in fills:
        table.filled(fill, 0)
    table.let_go(table.stored(writing)[1])
    for request, job in loading.items():
        table.loaded(request, job)
    for request in requests:
        table.end(request)
    table.reset()
    for _ in range(WITHHELD_STEPS):
        table.step()
    assert table.pool.free == table.pool.capacity
