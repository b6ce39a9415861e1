"""Playing a scenario with our own pipelines: steps, ends, what is given up, and what a report says."""

import msgspec
import pytest
import trio

from offload.testing.scenarios import (
    After,
    CloseStep,
    Counts,
    Expect,
    Fault,
    KeysStep,
    Load,
    LoadStep,
    Mix,
    PipelineSpec,
    PolicySpec,
    Scenario,
    ScenarioError,
    Step,
    StoreStep,
    TierSpec,
    Window,
    generate,
    play,
    read_text,
)
from offload.testing.scenarios import _play as playing
from tests.support.scenario_caches import careful

S20 = """
format = 1
name = "S20 cancel one of four in a batch"
seed = 7
[tier.host]
capacity = 64
latency_ms = 2
[pipeline.main]
to = "host"
flush_ms = 2
[[step]]
at_ms = 0
store = { id = "a{0..3}", keys = "k{0..3}", per = 1 }
[[fault]]
at_hook = "sweep_claim_gap"
who = "a2"
do = "cancel"
[[expect]]
status = { a0 = "COMPLETE", a1 = "COMPLETE", a2 = "CANCELLED", a3 = "COMPLETE" }
[[expect]]
count = { copied = 3, batches = 1 }
[[expect]]
order = ["a2 confirmed", "a0 settled"]
"""


def played(*expect, step=(), fault=(), pipeline=None, tier=None, **options):
    """A scenario's report; its expectations hold."""
    scenario = Scenario(
        name="x",
        tier={"host": TierSpec(latency_ms=2)} if tier is None else tier,
        pipeline=pipeline or {"main": PipelineSpec(to="host", flush_ms=0)},
        step=list(step),
        fault=list(fault),
        expect=list(expect),
        **options,
    )
    report = play(scenario)
    assert report.violations == (), report.trace
    return report


def store(names, at_ms=0, **options):
    return Step(at_ms=at_ms, store=StoreStep(id=names, **options))


# --- the run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_file_is_played_as_it_reads(seed):
    report = play(read_text(S20), seed)
    assert report.violations == ()
    assert report.fired == {"cancel at sweep_claim_gap": 1}
    assert report.outcomes["a1"].completed == (b"k1",)
    assert report.counts["post_claim"] == 1
    assert report.reached >= {"hook pre_claim", "state CANCELLED", "state TRANSFERRING"}


def test_an_expectation_that_does_not_hold_is_a_violation():
    scenario = msgspec.structs.replace(read_text(S20), expect=[Expect(status={"a2": "COMPLETE"})])
    assert [one.text for one in play(scenario).violations] == ["expect[0].status.a2: wanted COMPLETE, found CANCELLED"]


def test_what_falls_together_happens_in_the_order_of_the_file():
    for seed in range(8):
        scenario = Scenario(name="x", step=[store("a{0..3}"), store("b{0..1}", how="now"), store("c")])
        asked = [one.who[0] for one in play(scenario, seed).moments if one.name == "taken"]
        assert asked == ["a0", "a1", "a2", "a3", "b0", "b1", "c"]


def test_a_scenario_that_makes_no_sense_is_refused():
    with pytest.raises(ScenarioError, match="no container 'b'"):
        play(Scenario(name="x", step=[store("a")], fault=[Fault(do="cancel", at_ms=0, who="b")]))


def test_a_load_is_written_out_in_the_report():
    report = play(Scenario(name="x", load=Load(mix=Mix(containers=5))))
    assert report.violations == ()
    assert report.scenario.load is None
    assert len(report.outcomes) == 5
    assert play(report.scenario, report.seed).trace == report.trace


def test_what_was_played_can_be_played_again_from_its_report():
    for seed in range(12):
        report = play(generate(seed))
        assert play(report.scenario, report.seed).trace == report.trace


# --- steps --------------------------------------------------------------------------------------------------------


def test_what_is_stored_can_be_loaded_and_what_is_deleted_cannot():
    report = played(
        Expect(count={"loaded": 3, "missed": 1}, found={"host": "k1"}, missing={"host": "k0"}),
        step=[
            store("a", keys="k0, k1", per=2),
            Step(at_ms=10, load=LoadStep(id="first", keys="k0, k1")),
            Step(at_ms=20, delete=KeysStep(keys="k0")),
            Step(at_ms=30, load=LoadStep(id="second", keys="k{0..1}")),
        ],
    )
    assert [one.name for one in report.moments if one.who == ("second",)] == ["loaded", "missed"]


def test_a_tier_has_what_it_holds_from_the_start():
    played(
        Expect(at_least={"loaded": 2}, result={"a": Counts(completed=2)}),
        tier={"host": TierSpec(holds="k{0..1}")},
        step=[store("a", keys="k0, k1", per=2), Step(at_ms=9, load=LoadStep(keys="k0, k1"))],
    )


@pytest.mark.parametrize("made_of", ["trio", "thread", "async", "stubborn"])
def test_what_is_stored_after_an_event_moves_when_it_is_fired(made_of):
    played(
        Expect(time=[Window(event="a xfer_start", at_least_ms=5, at_most_ms=5)]),
        Expect(time=[Window(event="b xfer_start", at_least_ms=7, at_most_ms=7)]),
        Expect(result={"c": Counts(error="PreconditionFailed")}, status={"d": "CANCELLED"}),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0, max_concurrent_transfers=2)},
        step=[
            store("a", after=[After(event="e", made_of=made_of)]),
            store("b", after=[After(ms=7, made_of=made_of), After(made_of=made_of)]),
            store("c", after=[After(ms=3, do="raise", made_of=made_of)]),
            store("d", after=[After(do="never", made_of=made_of)]),
            Step(at_ms=5, fire="e"),
        ],
        fault=[Fault(do="cancel", who="d", at_ms=9)],
    )


def test_the_first_of_an_event_and_a_time_wins():
    played(
        Expect(time=[Window(event="a batching", at_most_ms=4, at_least_ms=4)]),
        Expect(time=[Window(event="b batching", at_most_ms=6, at_least_ms=6)]),
        step=[
            store("a", after=[After(event="e", ms=4)]),
            store("b", after=[After(event="e", ms=60)]),
            Step(at_ms=6, fire="e"),
        ],
    )


def test_any_of_several_is_enough_where_that_is_said():
    played(
        Expect(time=[Window(event="a batching", at_least_ms=3, at_most_ms=3)]),
        step=[store("a", after=[After(ms=3), After(do="never")], any_of=True)],
    )


def test_evicted_keys_are_not_copied_unless_they_are_there_again():
    played(
        Expect(result={"a": Counts(completed=1, evicted=1), "b": Counts(completed=1, evicted=0)}),
        step=[
            store("a", keys="k0, k1", per=2, after=[After(ms=5)]),
            store("b", keys="k2", after=[After(ms=5)]),
            Step(at_ms=2, evict=KeysStep(keys="k1")),
            Step(at_ms=2, evict=KeysStep(keys="k2", again=True)),
        ],
    )


def test_a_drain_sends_off_what_waits_for_company():
    played(
        Expect(time=[Window(event="a xfer_start", at_least_ms=3, at_most_ms=3)]),
        pipeline={"main": PipelineSpec(to="host", flush_ms=500, min_batch_size=8)},
        step=[store("a"), Step(at_ms=3, drain="main")],
    )


def test_an_operator_releases_what_is_in_quarantine():
    played(
        Expect(status={"a": "FAILED"}, result={"a": Counts(error="DrainUnproven")}),
        Expect(metric={"main": {"quarantined": 0, "quarantined_total": 1}}),
        step=[store("a"), Step(at_ms=50, release="main")],
        fault=[Fault(do="unproven", at_ms=0, for_ms=9)],
    )


def test_a_chain_is_followed_and_its_containers_keep_their_names():
    report = played(
        Expect(found={"host": "k0", "disk": "k0"}, order=["a settled", "a settled"]),
        Expect(time=[Window(event="a ended", at_least_ms=5)]),
        tier={"host": TierSpec(latency_ms=2), "disk": TierSpec(latency_ms=3)},
        pipeline={
            "main": PipelineSpec(to="host", flush_ms=0, chain=["route"]),
            "route": PipelineSpec(source="host", to="disk", flush_ms=0),
        },
        step=[store("a", keys="k0")],
    )
    assert [one.where for one in report.moments if one.name == "settled"] == ["route", "main"]


def test_two_pipelines_share_what_is_pending_at_their_destination():
    played(
        Expect(count={"copied": 1}, result={"b": Counts(filtered=1, reasons=["pending"])}),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0), "twin": PipelineSpec(to="host", flush_ms=0)},
        step=[store("a", keys="k0"), store("b", keys="k0", at_ms=1, pipeline="twin")],
    )


def test_who_waits_for_room_in_the_budget_is_served_in_order():
    played(
        Expect(order=["a0 taken", "a1 asked", "a2 asked", "a0 ended", "a1 taken", "a2 taken"]),
        pipeline={"main": PipelineSpec(to="host", flush_ms=0, budget_blocks=2, max_batch_size=2)},
        step=[store("a{0..2}", per=2)],
    )


def test_policies_are_the_scenarios():
    played(
        Expect(result={"a": Counts(completed=1, filtered=1, reasons=["cold"])}),
        Expect(result={"b": Counts(filtered=1, reasons=["present"])}),
        Expect(result={"c": Counts(filtered=1, reasons=["error"])}),
        Expect(result={"d": Counts(filtered=1, reasons=["timeout"])}, status={"e": "CANCELLED"}),
        tier={"host": TierSpec(holds="k9", latency_ms=1)},
        pipeline={
            "main": PipelineSpec(
                to="host",
                policy_ms=8,
                policies=[
                    PolicySpec(do="reject", keys="k1", reason="cold"),
                    PolicySpec(do="present", tier="host"),
                    PolicySpec(do="lock", ms=1),
                    PolicySpec(do="raise", keys="k3"),
                    PolicySpec(do="hang", keys="k4"),
                    PolicySpec(do="cancel", keys="k5", who="e"),
                    PolicySpec(do="sleep", keys="k6", ms=2),
                ],
            )
        },
        step=[
            store("a", keys="k0, k1", per=2),
            store("b", keys="k9"),
            store("c", keys="k3"),
            store("d", keys="k4"),
            store("e", after=[After(do="never")]),
            store("f", keys="k5"),
        ],
    )


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "statuses"),
    [
        ("leave", {"a": "COMPLETE", "b": "FAILED"}),
        ("close", {"a": "COMPLETE", "b": "FAILED", "c": "REFUSED"}),
        ("cancel", {"a": "COMPLETE", "b": "FAILED"}),
        ("raise", {"a": "COMPLETE", "b": "FAILED"}),
    ],
)
def test_however_a_pipeline_is_left_what_is_committed_drains_and_the_rest_fails(how, statuses):
    report = played(
        Expect(status=statuses),
        tier={"host": TierSpec(latency_ms=6)},
        step=[
            store("a"),
            store("b", after=[After(do="never")]),
            Step(at_ms=3, close=CloseStep(how=how)),
            store("c", at_ms=5),
        ],
    )
    assert report.outcomes["b"].error == "PipelineClosed"
    assert ("c" in statuses) == any(one.who == ("c",) for one in report.moments)


def test_shutting_down_at_a_hook_happens_at_that_hook():
    played(
        Expect(status={"a": "FAILED"}, count={"copied": 0}, result={"a": Counts(error="PipelineClosed")}),
        step=[store("a")],
        fault=[Fault(do="shut_down", at_hook="sweep_claim_gap", of="a")],
    )


# --- what does not end --------------------------------------------------------------------------------------------


class Stuck:
    """Never ends, in one way or another."""

    def __init__(self, world, how):
        self.world, self.how = world, how

    async def store(self, keys, after, label):
        return self

    result = None

    async def wait(self):
        with trio.CancelScope(shield=True):
            while True:
                if self.how == "sleeps":
                    await trio.sleep_forever()
                await trio.lowlevel.checkpoint()

    async def load(self, keys):
        return {}

    def audit(self):
        return {}


@pytest.mark.parametrize(("how", "rule"), [("sleeps", "hang"), ("spins", "livelock")])
def test_a_run_that_does_not_end_is_given_up_even_behind_a_shield(how, rule, monkeypatch):
    from contextlib import asynccontextmanager

    monkeypatch.setattr(playing, "STEPS", 1_000)

    @asynccontextmanager
    async def opened(world):
        yield Stuck(world, how)

    report = play(Scenario(name="x", step=[store("a")], limit_ms=500), factory=opened)
    assert [one.rule for one in report.violations] == [rule]
    if rule == "hang":
        assert report.violations[0].text == "it is not over after 500 ms: a was taken"
    assert report.moments[-1].at_ms < 8_000_000


def test_what_raises_at_the_end_of_a_run_is_a_crash():
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened(world):
        async with careful(world) as ours:
            yield ours
        raise ZeroDivisionError("at the door")

    report = play(Scenario(name="x", step=[store("a")]), factory=opened)
    assert [one.rule for one in report.violations] == ["crash"]


def test_an_interrupt_is_not_a_finding():
    def opened(world):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(Scenario(name="x"), factory=opened)
