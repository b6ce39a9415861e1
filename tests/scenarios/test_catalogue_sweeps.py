"""Rows of the catalogue at every hook, for every container, in every size: the files of the rows, with one thing changed."""

import msgspec
import pytest

from offload.testing.scenarios import Expect, play
from tests.scenarios.test_catalogue import SCENARIOS


def changed_fault(name, **changes):
    """The scenario of a file whose only fault is another one, and which expects nothing but the invariants."""
    scenario = SCENARIOS[name]
    [fault] = scenario.fault
    return msgspec.structs.replace(scenario, expect=[], fault=[msgspec.structs.replace(fault, **changes)])


def ends_of(scenario):
    """How each container ended in a run that violated nothing."""
    report = play(scenario)
    assert not report.violations, report.violations
    return {label: outcome.status for label, outcome in report.outcomes.items()}


@pytest.mark.parametrize("hook", ["batching", "transfer", "pre_claim", "sweep_claim_gap"])
@pytest.mark.parametrize("who", ["a0", "a1", "a2", "a3"])
def test_s20_cancel_any_one_of_four_at_any_point(hook, who):
    ends = ends_of(changed_fault("s20-cancel-one-of-four", at_hook=hook, who=who))
    assert ends == {label: "CANCELLED" if label == who else "COMPLETE" for label in ("a0", "a1", "a2", "a3")}


@pytest.mark.parametrize("hook", ["transfer", "pre_claim", "sweep_claim_gap"])
def test_s21_cancel_all_in_a_batch(hook):
    scenario = changed_fault("s21-cancel-all-in-a-batch", at_hook=hook)
    scenario = msgspec.structs.replace(scenario, expect=SCENARIOS["s21-cancel-all-in-a-batch"].expect)
    assert not play(scenario).violations


@pytest.mark.parametrize("hook", ["pre_claim", "sweep_claim_gap"])
@pytest.mark.parametrize("free", [1, 2, 3, 4, 5])
def test_s31_partial_and_a_container_that_was_granted_room_is_cancelled(hook, free):
    """What is granted is a prefix of what was asked for, not of what is left."""
    scenario = changed_fault("s31f-full-partial-and-a-cancel", at_hook=hook)
    host = msgspec.structs.replace(scenario.tier["host"], capacity=1 + free)
    granted = [f"{label}.{i}" for label in "abc" for i in range(2)][:free]
    stored = [key for key in granted if not key.startswith("a")]
    scenario = msgspec.structs.replace(
        scenario,
        tier={"host": host},
        step=[
            *scenario.step[:1],
            msgspec.structs.replace(scenario.step[1], store=_store_of(scenario, free - len(stored))),
        ],
        expect=[Expect(found={"host": ", ".join(["old", *stored])}, status={"a": "CANCELLED", "d": "COMPLETE"})],
    )
    report = play(scenario)
    assert not report.violations, report.violations
    assert sorted(key.decode() for label in "bc" for key in report.outcomes[label].completed) == sorted(stored)


def _store_of(scenario, per):
    return msgspec.structs.replace(scenario.step[1].store, per=per)


@pytest.mark.parametrize("by", [-8, -1, 1, 5])
def test_s34_a_wrong_number_of_outcomes(by):
    scenario = changed_fault("s34b-too-few-outcomes", by=by)
    scenario = msgspec.structs.replace(scenario, expect=SCENARIOS["s34b-too-few-outcomes"].expect)
    assert not play(scenario).violations


@pytest.mark.parametrize("hook", ["transfer", "pre_claim", "sweep_claim_gap"])
def test_s47_shutdown_just_before_the_commit_wins(hook):
    assert ends_of(changed_fault("s47a-shutdown-just-before-the-commit", at_hook=hook)) == {"a": "FAILED"}


@pytest.mark.parametrize("hook", ["post_claim", "xfer_start"])
def test_s47_shutdown_just_after_the_commit_drains(hook):
    assert ends_of(changed_fault("s47b-shutdown-just-after-the-commit", at_hook=hook)) == {"a": "COMPLETE"}
