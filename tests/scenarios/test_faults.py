"""What each fault does to our own pipelines, when it counts as fired, and at which visit of a hook it happens."""

import pytest

from offload.testing.scenarios import (
    After,
    Counts,
    Expect,
    Fault,
    LoadStep,
    PipelineSpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    Window,
    play,
)
from offload.testing.scenarios._program import FAULT_KINDS


def store(names, at_ms=0, **options):
    return Step(at_ms=at_ms, store=StoreStep(id=names, **options))


def played(fault, *expect, step=(), latency_ms=4, pipeline=None, tier=None, **options):
    """One fault in a small scenario."""
    scenario = Scenario(
        name="x",
        tier={"host": TierSpec(latency_ms=latency_ms)} if tier is None else tier,
        pipeline=pipeline or {"main": PipelineSpec(to="host", flush_ms=0, transfer_ms=40)},
        step=list(step) or [store("a", keys="k0, k1", per=2)],
        fault=[fault] if isinstance(fault, Fault) else fault,
        expect=list(expect),
        **options,
    )
    report = play(scenario)
    assert report.violations == (), report.trace
    return report


def done(names, **counts):
    return Expect(result={names: Counts(**counts)})


def at(event, ms):
    return Expect(time=[Window(event=event, at_least_ms=ms, at_most_ms=ms)])


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_kind_of_fault_can_happen(kind):
    who = "a" if "who" in FAULT_KINDS[kind].looks_at else ""
    report = play(Scenario(name="x", step=[store("a", keys="k0, k1", per=2)], fault=[Fault(do=kind, at_ms=1, who=who)]))
    assert [one.name for one in report.moments if one.kind == "fault"] == [kind]
    assert "crash" not in {one.rule for one in report.violations}


# --- to a tier ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [{"at_ms": 2}, {"at_hook": "xfer_start"}, {"at_hook": "transfer"}], ids=str)
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"do": "fail"}, [done("a", failed=2, completed=0)]),
        ({"do": "fail", "keys": "k1"}, [done("a", failed=1, completed=1), Expect(found={"host": "k0"})]),
        ({"do": "torn", "keys": "k1"}, [done("a", failed=2), Expect(missing={"host": "k0, k1"})]),
        ({"do": "unproven"}, [Expect(metric={"main": {"quarantined_total": 1}}), done("a", failed=2)]),
        ({"do": "drop"}, [at("a ended", 40), Expect(status={"a": "FAILED"})]),
        ({"do": "delay", "ms": 7}, [at("a ended", 11), Expect(status={"a": "COMPLETE"})]),
        ({"do": "duplicate"}, [done("a", failed=2), Expect(found={"host": "k0, k1"})]),
        ({"do": "miscount"}, [done("a", failed=2), Expect(found={"host": "k0, k1"})]),
        ({"do": "miscount", "by": -1}, [done("a", failed=2, error=""), Expect(found={"host": "k0, k1"})]),
        ({"do": "miscount", "by": -9}, [done("a", failed=2), Expect(count={"copied": 2})]),
        ({"do": "torn", "keys": "k1", "grouped": True}, [done("a", failed=2), Expect(missing={"host": "k0, k1"})]),
        ({"do": "unproven", "grouped": True}, [Expect(metric={"main": {"quarantined_total": 1}})]),
        ({"do": "peer_death"}, [Expect(status={"a": "FAILED"}, count={"copied": 0})]),
    ],
    ids=lambda value: value.get("do", "") + value.get("keys", "") if isinstance(value, dict) else "",
)
def test_a_copy_under_way_or_about_to_begin_is_hit(when, told, expected):
    if when.get("at_hook") and told["do"] == "fail" and "keys" not in told:
        expected = [done("a", failed=2, completed=0)]  # those of the container it is about
    report = played(Fault(**told, **when), *expected)
    assert report.fired == {" at ".join([told["do"], *([when["at_hook"]] if "at_hook" in when else [])]): 1}
    (line,) = [moment for moment in report.moments if moment.kind == "fault"]
    assert line.fired and line.where == "host"


def test_a_stall_holds_up_only_copies_that_begin():
    at_once = played(Fault(do="stall", at_ms=0, for_ms=9), at("a ended", 13))
    assert at_once.fired == {"stall": 1}
    too_late = played(Fault(do="stall", at_ms=1, for_ms=9), at("a ended", 4))
    assert too_late.fired == {}


def test_a_reordered_copy_ends_behind_one_that_began_later():
    report = played(
        Fault(do="reorder", at_ms=1, for_ms=30),
        Expect(order=["b ended", "a ended"]),
        at("a ended", 6),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0, max_concurrent_transfers=2)},
        step=[store("a"), store("b", at_ms=2)],
    )
    assert report.fired == {"reorder": 1}


def test_where_nobody_began_later_a_copy_is_not_held_back():
    report = played(Fault(do="reorder", at_ms=1, for_ms=30), at("a ended", 4))
    assert report.fired == {}


def test_what_a_copy_raises_may_come_in_a_group():
    report = played(
        Fault(do="fail", at_ms=2, grouped=True), done("a", failed=2, completed=0), Expect(status={"a": "FAILED"})
    )
    assert report.fired == {"fail": 1}


@pytest.mark.parametrize(
    ("rule", "status"), [("wait", "COMPLETE"), ("evict", "COMPLETE"), ("fail", "FAILED"), ("partial", "FAILED")]
)
def test_nobody_is_granted_room_while_a_tier_is_full(rule, status):
    report = played(
        Fault(do="full", at_ms=0, for_ms=10),
        Expect(status={"a": status}, time=[Window(event="a ended", at_most_ms=14)]),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0, on_destination_full=rule)},
    )
    assert report.fired == {"full": 1}


def test_a_bit_that_is_flipped_is_found_when_the_block_is_loaded():
    report = played(
        Fault(do="flip", at_ms=9, keys="k1"),
        Expect(count={"loaded": 1, "missed": 1}, missing={"host": "k1"}),
        step=[store("a", keys="k0, k1", per=2), Step(at_ms=20, load=LoadStep(keys="k0, k1"))],
    )
    assert report.fired == {"flip": 1}


def test_a_block_that_was_flipped_is_not_passed_down_a_chain():
    report = played(
        Fault(do="flip", at_hook="pre_claim", of="a", visit=2),
        Expect(missing={"disk": "k0"}, status={"a": "FAILED", "b": "COMPLETE"}, found={"disk": "k1"}),
        tier={"host": TierSpec(latency_ms=2), "disk": TierSpec()},
        pipeline={
            "main": PipelineSpec(to="host", flush_ms=0, chain=["down"]),
            "down": PipelineSpec(source="host", to="disk", flush_ms=2),
        },
        step=[store("a", keys="k0"), store("b", keys="k1")],
    )
    assert report.outcomes["a"].error == "DamagedBlock"


def test_whatever_is_asked_of_a_dead_peer_raises():
    report = played(
        Fault(do="peer_death", at_ms=9, for_ms=5),
        Expect(status={"a": "COMPLETE", "b": "FAILED", "c": "COMPLETE"}, count={"missed": 2, "loaded": 0}),
        step=[
            store("a", keys="k0, k1", per=2),
            store("b", at_ms=10),
            Step(at_ms=11, load=LoadStep(keys="k0, k1")),
            store("c", at_ms=14),
        ],
    )
    assert report.fired == {"peer_death": 1}


# --- to containers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "status"),
    [
        *[(hook, "CANCELLED") for hook in ("admission", "awaiting", "batching", "transfer", "sweep_claim_gap")],
        *[(hook, "COMPLETE") for hook in ("post_claim", "xfer_start", "xfer_end", "settled")],
    ],
)
def test_a_cancel_at_a_hook_is_decided_by_the_commit(hook, status):
    report = played(
        Fault(do="cancel", at_hook=hook),
        Expect(status={"a": status}, order=["a cancel asked", "a confirmed"]),
    )
    assert sum(report.fired.values()) == (hook != "settled")


def test_a_cancel_of_what_has_ended_is_confirmed_and_hits_nothing():
    report = played(Fault(do="cancel", at_ms=9, who="a"), Expect(order=["a ended", "a cancel asked", "a confirmed"]))
    assert report.fired == {}


def test_a_cancel_may_be_asked_for_many_times():
    report = played(
        Fault(do="cancel", at_ms=2, who="a, b", times=5),
        Expect(status={"a": "COMPLETE", "b": "CANCELLED"}, count={"fired": 1}),
        step=[store("a"), store("b", after=[After(do="never")])],
    )
    for label in ("a", "b"):
        assert [one.name for one in report.moments if one.who == (label,)].count("confirmed") == 5


def test_what_has_no_proven_end_is_not_confirmed():
    played(
        [Fault(do="unproven", at_ms=0), Fault(do="cancel", who="a", at_ms=2)],
        Expect(order=["a cancel asked", "a ended", "a unconfirmed"], never=["a confirmed"]),
    )


def test_who_waits_for_room_can_give_up():
    report = played(
        Fault(do="abandon", who="b", at_ms=2),
        Expect(status={"b": "ABANDONED", "c": "COMPLETE"}),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0, budget_blocks=2, max_batch_size=2)},
        step=[store("a", per=2), store("b", per=2, at_ms=1), store("c", per=1, at_ms=1)],
    )
    assert report.fired == {"abandon": 1}


def test_a_waiter_that_gives_up_changes_nothing_for_its_container():
    report = played(
        [Fault(do="cancel", who="a", at_ms=2), Fault(do="cancel_waiter", who="a", at_ms=3)],
        Expect(status={"a": "COMPLETE"}, never=["a waited", "a confirmed"], order=["a waiter gone", "a ended"]),
    )
    assert [moment.name for moment in report.moments].count("waiter gone") == 2


# --- to the system ------------------------------------------------------------------------------------------------


def test_the_scope_around_the_system_can_be_cancelled():
    report = played(
        Fault(do="cancel_host", at_hook="xfer_start"),
        Expect(status={"a": "COMPLETE", "b": "FAILED"}),
        step=[store("b", after=[After(do="never")]), store("a")],
    )
    assert report.fired == {"cancel_host at xfer_start": 1}


def test_a_jump_of_the_clock_brings_together_what_was_due_in_between():
    report = played(
        Fault(do="clock", at_ms=1, ms=20),
        at("a batching", 21),
        at("b batching", 21),
        step=[store("a", after=[After(ms=5)]), store("b", after=[After(ms=9)])],
    )
    assert report.fired == {"clock": 1}


# --- when ---------------------------------------------------------------------------------------------------------


def fired_at(fault, step):
    report = play(Scenario(name="x", pipeline={"main": PipelineSpec(to="host", flush_ms=0)}, step=step, fault=[fault]))
    lines = [moment for moment in report.moments if moment.kind == "fault"]
    hooks = [moment.who for moment in report.moments[: report.moments.index(lines[0])] if moment.kind == "hook"]
    return lines[0].who, hooks[-1]


def test_a_fault_at_a_hook_counts_only_visits_that_are_about_whom_it_says():
    step = [store("a", at_ms=0), store("b", at_ms=3), store("c", at_ms=6)]
    assert fired_at(Fault(do="cancel", at_hook="admission"), step) == (("a",), ("a",))
    assert fired_at(Fault(do="cancel", at_hook="admission", visit=2), step) == (("b",), ("b",))
    assert fired_at(Fault(do="cancel", at_hook="admission", who="c"), step) == (("c",), ("c",))
    assert fired_at(Fault(do="cancel", at_hook="admission", who="c", of="b"), step) == (("c",), ("b",))
    assert fired_at(Fault(do="cancel", at_hook="admission", of="b, c", visit=2), step) == (("c",), ("c",))


def test_a_hook_about_several_containers_is_one_visit_and_hits_them_all():
    report = played(
        Fault(do="cancel", at_hook="pre_claim"),
        Expect(status={"a0": "CANCELLED", "a1": "CANCELLED"}, count={"copied": 0}),
        pipeline={"main": PipelineSpec(to="host", flush_ms=5)},
        step=[store("a{0..1}")],
    )
    assert report.fired == {"cancel at pre_claim": 1}


def test_whether_a_fault_happens_at_all_is_drawn_from_the_seed():
    scenario = Scenario(name="x", step=[store("a")], fault=[Fault(do="cancel", who="a", at_ms=0, p=0.5)])
    happened = [any(moment.kind == "fault" for moment in play(scenario, seed).moments) for seed in range(40)]
    assert 10 < sum(happened) < 30
    for seed in range(10):
        report = play(scenario, seed)
        assert len(report.scenario.fault) == happened[seed]
        assert play(report.scenario, seed + 1_000).fired == report.fired


def test_a_fault_whose_moment_never_comes_is_in_the_trace_as_idle():
    report = played(Fault(do="cancel", at_hook="xfer_start", visit=9))
    assert report.planned == 1
    assert report.moments[-1].line().endswith("idle")
    assert report.moments[-1].note == "never came"
