"""Our own pipelines behind the contract: who is who, what the engine keeps alive, and what the ledger and the causes see."""

import pytest

from offload import OffloadBatch, PipelineClosed, Status, TransferFailed
from offload.testing.scenarios import (
    After,
    CloseStep,
    Expect,
    Fault,
    KeysStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    generate,
    play,
)
from tests.support.planted.pipeline import a_policys_lock_is_forgotten, nobody_is_told_of_the_end


def store(names, at_ms=0, **options):
    return Step(at_ms=at_ms, store=StoreStep(id=names, **options))


def played(step, *expect, fault=(), **options):
    options.setdefault("tier", {"host": TierSpec(latency_ms=4)})
    options.setdefault("pipeline", {"main": PipelineSpec(to="host", flush_ms=0)})
    return play(Scenario(name="x", step=step, fault=list(fault), expect=list(expect), **options))


def rules(report):
    return {violation.rule for violation in report.violations}


@pytest.mark.parametrize(("kind", "status"), [("weak", 1), ("strong", 0), ("external", 0)])
def test_only_weak_blocks_can_be_evicted_before_their_commit(kind, status):
    step = [store("a", keys="k0", kind=kind, after=[After(ms=5)]), Step(at_ms=2, evict=KeysStep(keys="k0"))]
    report = played(step)
    assert report.violations == ()
    assert len(report.outcomes["a"].evicted) == status


def test_an_external_block_can_be_evicted_once_its_container_has_ended():
    fault = [Fault(do="evict", at_ms=2, keys="k0"), Fault(do="evict", at_ms=9, keys="k0")]
    report = played([store("a", keys="k0", kind="external")], fault=fault)
    assert report.violations == ()
    assert [one.fired for one in report.moments if one.kind == "fault"] == [False, True]


def test_what_an_empty_container_settles_within_has_its_name():
    report = played([store("a", per=0)], Expect(status={"a": "COMPLETE"}, order=["a settled", "a taken"]))
    assert report.violations == ()


def test_many_are_taken_in_with_one_call_and_each_has_its_name():
    report = played(
        [store("a, b", keys="k0, k1", how="many", kind="strong"), store("none", per=0, how="many")],
        Expect(status={"a": "COMPLETE", "b": "COMPLETE", "none": "COMPLETE"}, found={"host": "k0, k1"}),
        Expect(order=["a asked", "b asked", "a taken", "b taken"]),
    )
    assert report.violations == ()


def test_of_many_none_is_taken_in_where_not_all_can_be():
    report = played(
        [store("a, b, c", keys="k0, gone, k1", how="many", kind="strong", after=[After(ms=1)])],
        Expect(status={"a": "REFUSED", "b": "REFUSED", "c": "REFUSED"}, missing={"host": "k0, k1"}),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0, budget_blocks=2)},
    )
    assert report.violations == ()
    assert {one.note for one in report.moments if one.name == "refused"} == {"PipelineFull"}


def test_many_whose_blocks_are_gone_are_refused_and_hold_nothing():
    report = played(
        [store("first", keys="k0"), store("a, b", at_ms=30, keys="k0, k1", how="many", kind="strong", pipeline="down")],
        Expect(status={"first": "COMPLETE", "a": "REFUSED", "b": "REFUSED"}),
        tier={"host": TierSpec(), "disk": TierSpec()},
        pipeline={
            "main": PipelineSpec(to="host", flush_ms=0), "down": PipelineSpec(source="host", to="disk", flush_ms=0)
        },
    )  # fmt: skip
    assert report.violations == ()
    assert {one.note for one in report.moments if one.name == "refused"} == {"MissingKeys"}


def test_who_is_refused_says_by_what():
    report = played(
        [store("a", per=2, after=[After(ms=9)]), store("b", per=2, how="now")],
        pipeline={"main": PipelineSpec(to="host", budget_blocks=2, max_batch_size=2)},
    )
    assert report.violations == ()
    assert [one.note for one in report.moments if one.name == "refused"] == ["PipelineFull"]


def test_what_is_shut_down_with_a_chain_drains_from_the_first_to_the_last():
    report = played(
        [store("a", keys="k0"), Step(at_ms=2, close=CloseStep(how="close"))],
        Expect(status={"a": "COMPLETE"}, found={"disk": "k0"}),
        tier={"host": TierSpec(latency_ms=4), "disk": TierSpec(latency_ms=4)},
        pipeline={
            "main": PipelineSpec(to="host", flush_ms=0, chain=["down"]),
            "down": PipelineSpec(source="host", to="disk", flush_ms=0),
        },
    )
    assert report.violations == ()


def test_states_and_errors_that_were_reached_are_reported():
    wanted = {f"hook {name}" for name in ("admission", "awaiting", "batching", "transfer", "settled")}
    wanted |= {f"state {status.name}" for status in Status}
    wanted |= {"state REFUSED", "end PipelineClosed", "end PreconditionFailed", "end evicted", "filtered pending"}
    for seed in range(120):
        wanted -= play(generate(seed)).reached
        if not wanted:
            break
    assert not wanted


# --- it bites -----------------------------------------------------------------------------------------------------


def test_a_cancel_that_came_in_time_and_did_nothing_is_found(monkeypatch):
    monkeypatch.setattr(OffloadBatch, "sweep_cancelled", lambda self: [])
    monkeypatch.setattr(OffloadBatch, "claim", lambda self: [])
    report = played([store("a{0..1}")], fault=[Fault(do="cancel", at_hook="pre_claim", who="a0")])
    assert rules(report) >= {"I4"}


def test_an_end_for_which_nobody_gave_a_reason_is_found(monkeypatch):
    sweep = OffloadBatch.sweep_cancelled

    def fails_the_others(self):
        swept = sweep(self)
        for container in self.containers if swept else ():
            container.fail(TransferFailed("one of the batch was cancelled"))
        return swept + sweep(self)

    monkeypatch.setattr(OffloadBatch, "sweep_cancelled", fails_the_others)
    pipeline = {"main": PipelineSpec(to="host", flush_ms=3)}
    report = played([store("a{0..1}")], fault=[Fault(do="cancel", at_hook="pre_claim", who="a0")], pipeline=pipeline)
    assert rules(report) == {"I9"}
    assert "a1 failed with TransferFailed" in report.violations[0].text


def test_what_is_held_behind_the_end_is_found(monkeypatch):
    a_policys_lock_is_forgotten(monkeypatch)
    report = played(
        [store("a")], pipeline={"main": PipelineSpec(to="host", flush_ms=0, policies=[PolicySpec(do="lock")])}
    )
    assert rules(report) == {"I1"}


def test_a_lost_wake_up_is_found_in_virtual_time(monkeypatch):
    nobody_is_told_of_the_end(monkeypatch)
    report = played([store("a", after=[After(ms=1, do="raise", made_of="async")])])
    assert rules(report) == {"hang"}


def test_a_pipeline_that_refuses_without_having_been_closed_is_found(monkeypatch):
    from offload import Pipeline

    def refuses(self, blocks, **_):
        raise PipelineClosed("not today")

    monkeypatch.setattr(Pipeline, "enqueue_nowait", refuses)
    monkeypatch.setattr(Pipeline, "enqueue_many", refuses)
    assert rules(played([store("a", how="now")])) == {"I9"}
