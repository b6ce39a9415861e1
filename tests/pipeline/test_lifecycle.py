"""The two tables: every move of a status, every request to a gate."""

import itertools

import pytest

from backends.abc import WeakBlocks
from backends.testing import FakeTier
from offload import OffloadContainer, Status
from offload._pipeline.lifecycle import GATE, MOVES, IllegalMove, Phase, Request, ask, check_move

EVERY_MOVE = list(itertools.product(Status, Status))
ARROWS = {
    (Status.EVALUATING, Status.QUEUED),
    (Status.EVALUATING, Status.COMPLETE),
    (Status.EVALUATING, Status.CANCELLED),
    (Status.EVALUATING, Status.FAILED),
    (Status.QUEUED, Status.TRANSFERRING),
    (Status.QUEUED, Status.COMPLETE),
    (Status.QUEUED, Status.CANCELLED),
    (Status.QUEUED, Status.FAILED),
    (Status.TRANSFERRING, Status.COMPLETE),
    (Status.TRANSFERRING, Status.FAILED),
}


def container(status=Status.EVALUATING, phase=Phase.OPEN):
    blocks = WeakBlocks(FakeTier(), [b"a", b"b"], None)
    return OffloadContainer(1, blocks, None, blocks.keys, phase, status)


def name(value):
    return getattr(value, "name", None)


def test_the_table_has_these_arrows_and_no_other():
    assert {(old, new) for old, row in MOVES.items() for new in row} == ARROWS
    assert set(MOVES) == set(Status)


@pytest.mark.parametrize(("old", "new"), EVERY_MOVE, ids=name)
def test_every_move_follows_the_table_or_changes_nothing(old, new):
    one = container(old)
    before = (one.status, one.phase, one.error, one.watch)
    if (old, new) in ARROWS:
        check_move(old, new)
        one.move(new)
        assert one.status is new
    else:
        with pytest.raises(IllegalMove):
            check_move(old, new)
        with pytest.raises(IllegalMove):
            one.move(new)
        assert (one.status, one.phase, one.error, one.watch) == before


def test_terminal_is_what_has_no_arrow():
    assert {status for status in Status if status.terminal} == {Status.COMPLETE, Status.CANCELLED, Status.FAILED}
    assert all(status.terminal == (not MOVES[status]) for status in Status)


def test_no_status_is_reached_twice_on_any_walk():
    def walks(walk):
        yield walk
        for status in MOVES[walk[-1]]:
            assert status not in walk
            yield from walks([*walk, status])

    ends = [walk[-1] for walk in walks([Status.EVALUATING]) if walk[-1].terminal]
    assert set(ends) == {Status.COMPLETE, Status.CANCELLED, Status.FAILED}
    assert all(Status.CANCELLED not in walk or Status.TRANSFERRING not in walk for walk in walks([Status.EVALUATING]))


@pytest.mark.parametrize(("phase", "what"), list(itertools.product(Phase, Request)), ids=name)
def test_a_gate_leaves_open_once_and_never_moves_again(phase, what):
    after = ask(phase, what)
    assert after is GATE[phase][what]
    if phase is Phase.OPEN:
        opened = {Request.CLAIM: Phase.COMMITTED, Request.CANCEL: Phase.CANCELLED, Request.FAIL: Phase.FAILED}
        assert after is opened[what]
    else:
        assert after is phase


@pytest.mark.parametrize("first", list(Request), ids=name)
@pytest.mark.parametrize("then", list(Request), ids=name)
def test_the_first_request_to_a_gate_decides(first, then):
    one = container()
    error, later = ValueError("first"), ValueError("then")
    requests = {
        Request.CLAIM: lambda _: one.claim(),
        Request.CANCEL: lambda _: one.cancel(),
        Request.FAIL: lambda error: one.fail(error),
    }
    requests[first](error)
    phase = one.phase
    assert phase is GATE[Phase.OPEN][first]
    requests[then](later)
    assert one.phase is phase
    assert one.error is (error if first is Request.FAIL else None)
    assert one.phase.proceeds == (first is Request.CLAIM)
    assert one.claim() == (first is Request.CLAIM)


@pytest.mark.parametrize("status", [status for status in Status if status.terminal], ids=name)
def test_nothing_closes_the_gate_of_what_has_ended(status):
    one = container(status)
    one.cancel()
    assert one.phase is Phase.OPEN


@pytest.mark.parametrize("phase", list(Phase), ids=name)
def test_only_an_open_gate_tells_its_holder(phase):
    told = []

    class Holder:
        def withdraw(self, container):
            told.append(container)

    one = container(phase=phase)
    one.holder = Holder()
    one.cancel()
    one.fail(ValueError())
    assert told == ([one] if phase is Phase.OPEN else [])


@pytest.mark.parametrize("phase", list(Phase), ids=name)
def test_an_abandoned_container_has_failed_unless_it_was_cancelled(phase):
    one = container(phase=phase)
    error = OSError("gone")
    one.completed = [b"a"] if phase is Phase.COMMITTED else ()
    one.abandon(error)
    if phase is Phase.OPEN:
        assert (one.phase, one.error, dict(one.failed)) == (Phase.FAILED, error, {})
    elif phase is Phase.COMMITTED:
        assert (one.phase, one.error, dict(one.failed)) == (phase, error, {b"b": error})
    else:
        assert (one.phase, one.error, dict(one.failed)) == (phase, None, {})
