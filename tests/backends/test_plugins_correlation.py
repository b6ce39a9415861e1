"""Completions and what they belong to: the pure core of hosts."""

import pytest

from backends.plugins import PluginFault
from backends.plugins._operations import REMEMBERED, Completion, Correlation, Kind, Operation, judge
from backends.plugins._tombstones import MOST_TOMBSTONES, Tombstones


def submit(correlation, number, kind=Kind.SET, keys=(b"a", b"b"), channel="c"):
    operation = Operation(kind, channel, keys, started=True)
    correlation.begin()
    correlation.submitted(operation, number)
    return operation


def counts(correlation):
    return {name: getattr(correlation, name) for name in ("unknown", "twice", "early", "late", "rejected")}


NOTHING = {"unknown": 0, "twice": 0, "early": 0, "late": 0, "rejected": 0}


@pytest.mark.parametrize(
    ("kind", "ok", "bits", "done", "fault"),
    [
        (Kind.SET, True, None, [True, True], ""),
        (Kind.SET, True, [1, 0], [True, False], ""),
        (Kind.SET, False, None, [False, False], "set failed: why"),
        (Kind.SET, False, [True, True], [False, False], "set failed: why"),
        (Kind.GET, True, None, [True, True], ""),
        (Kind.GET, True, [True, False], [True, False], ""),
        (Kind.GET, False, [True, False], [True, False], ""),
        (Kind.GET, False, None, [False, False], "get failed: why"),
        (Kind.FIND, True, [False, True], [False, True], ""),
        (Kind.FIND, True, None, [False, False], "not which keys it has"),
        (Kind.FIND, False, [True, True], [False, False], "find failed: why"),
        (Kind.DELETE, True, [True, False], [True, False], ""),
        (Kind.DELETE, True, None, [True, True], ""),
        (Kind.DELETE, False, None, [False, False], "delete failed: why"),
        (Kind.GET, True, [True], [False, False], "1 bits for 2 keys"),
        (Kind.FIND, True, [True] * 3, [False, False], "3 bits for 2 keys"),
        (Kind.SET, True, [], [False, False], "0 bits for 2 keys"),
    ],
)
def test_what_a_completion_says(kind, ok, bits, done, fault):
    judged, why = judge(kind, 2, ok, "why", bits)
    assert judged == done
    assert (fault in str(why)) if fault else why is None


def test_a_failure_without_a_reason_says_so():
    _, why = judge(Kind.SET, 1, False, "", None)
    assert "the plugin gave no reason" in str(why)


def test_a_completion_ends_its_operation_once():
    correlation, over = Correlation(), []
    operation = submit(correlation, 7)
    operation.on_over = over.append
    assert correlation.outstanding("c") == [7]
    assert correlation.completed(Completion("c", 7, True)) is operation
    assert (operation.is_over, operation.bits, operation.fault) == (True, [True, True], None)
    assert correlation.completed(Completion("c", 7, False, "again")) is None
    assert (operation.bits, over, len(correlation)) == ([True, True], [operation], 0)
    assert counts(correlation) == {**NOTHING, "twice": 1}


def test_ids_are_of_their_channel():
    correlation = Correlation()
    store, load = submit(correlation, 1, channel="store"), submit(correlation, 1, Kind.GET, channel="load")
    assert correlation.completed(Completion("load", 1, True)) is load
    assert correlation.outstanding("store") == [1]
    assert not store.is_over
    assert correlation.completed(Completion("lookup", 1, True)) is None
    assert counts(correlation) == {**NOTHING, "unknown": 1}


def test_a_completion_may_come_before_its_id():
    correlation = Correlation()
    correlation.begin()
    correlation.begin()
    assert correlation.completed(Completion("c", 2, True)) is None
    assert counts(correlation) == NOTHING
    first, second = Operation(Kind.SET, "c", [b"a"]), Operation(Kind.SET, "c", [b"b"])
    correlation.submitted(second, 2)
    assert second.is_over
    assert not first.is_over
    correlation.submitted(first, 1)
    assert correlation.outstanding("c") == [1]
    assert counts(correlation) == {**NOTHING, "early": 1}


def test_what_is_early_for_nobody_is_unknown_in_the_end():
    correlation = Correlation()
    correlation.begin()
    correlation.completed(Completion("c", 4711, True))
    correlation.completed(Completion("c", 4711, True))
    assert counts(correlation) == {**NOTHING, "twice": 1}
    correlation.not_submitted()
    assert counts(correlation) == {**NOTHING, "twice": 1, "unknown": 1}


def test_what_is_kept_is_bounded():
    correlation = Correlation()
    correlation.begin()
    for number in range(REMEMBERED + 10):
        correlation.completed(Completion("c", number, True))
    assert correlation.unknown == 10
    correlation.not_submitted()
    assert correlation.unknown == REMEMBERED + 10
    for number in range(2 * REMEMBERED):
        submit(correlation, number)
        correlation.completed(Completion("c", number, True))
    correlation.completed(Completion("c", 0, True))  # forgotten by now
    correlation.completed(Completion("c", 2 * REMEMBERED - 1, True))
    assert counts(correlation) == {**NOTHING, "unknown": REMEMBERED + 11, "twice": 1}


def test_an_id_may_be_used_again_once_it_is_over():
    correlation = Correlation()
    submit(correlation, 1)
    correlation.completed(Completion("c", 1, True))
    again = submit(correlation, 1)
    assert correlation.completed(Completion("c", 1, True)) is again
    assert counts(correlation) == NOTHING


def test_an_id_is_not_used_twice_at_once():
    correlation = Correlation()
    first = submit(correlation, 1)
    with pytest.raises(PluginFault, match="the id 1 was returned twice"):
        submit(correlation, 1)
    assert len(correlation) == 1
    assert correlation.completed(Completion("c", 1, True)) is first


def test_who_has_left_is_told_of_all_the_same():
    correlation = Correlation()
    operation = submit(correlation, 1)
    assert (operation.may_go_on, operation.is_in_doubt, correlation.in_doubt) == (True, False, 0)
    operation.waited_for = False
    assert (operation.is_in_doubt, correlation.in_doubt) == (True, 1)
    correlation.completed(Completion("c", 1, True))
    assert (operation.may_go_on, operation.is_in_doubt, correlation.in_doubt) == (False, False, 0)
    assert counts(correlation) == {**NOTHING, "late": 1}


def test_what_was_never_started_cannot_go_on():
    assert not Operation(Kind.SET, "c", [b"a"]).may_go_on


# --- hidden keys ----------------------------------------------------------------------------------------------------------


def test_why_a_key_is_hidden():
    tombstones = Tombstones()
    tombstones.writing[b"w"] = object()
    tombstones.in_doubt.add(b"l")
    tombstones.deleting.add(b"d")
    tombstones.note_evicted([b"e"])
    tombstones.note_bad([b"b"])
    assert all(key in tombstones for key in (b"w", b"l", b"d", b"e", b"b"))
    assert b"x" not in tombstones
    assert len(tombstones) == 5
    assert [tombstones.is_idle(key) for key in (b"w", b"l", b"d", b"e", b"x")] == [False, False, False, True, True]


def test_what_is_to_be_purged_is_so_until_it_is_gone_or_stored_anew():
    tombstones = Tombstones()
    tombstones.note_evicted([b"e1", b"e2"])
    tombstones.note_bad([b"b1", b"b2", b"b3"])
    tombstones.note_purged([b"e1", b"e2", b"b1", b"b2"], [True, False, True, False])
    assert list(tombstones.to_purge) == [b"b2", b"b3"]  # a victim that stays is merely a block; a damaged one is not
    tombstones.clear([b"b3", b"x"])
    assert list(tombstones.to_purge) == [b"b2"]


def test_what_is_to_be_purged_is_bounded():
    tombstones = Tombstones()
    tombstones.note_bad(b"%d" % number for number in range(MOST_TOMBSTONES + 3))
    assert len(tombstones) == MOST_TOMBSTONES
    assert b"2" not in tombstones
    assert b"3" in tombstones
