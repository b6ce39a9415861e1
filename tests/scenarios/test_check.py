"""What only makes sense together."""

from typing import get_args

import attrs
import pytest

from offload import BatchConfig, PipelineConfig
from offload.testing.scenarios import (
    TICK,
    After,
    CloseStep,
    EngineSpec,
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
    TraceLoad,
    Window,
    check,
)
from offload.testing.scenarios._check import COUNTED, demand
from offload.testing.scenarios._fields import FIELD_OF, config_of
from offload.testing.scenarios._names import keys_of, tiers_of
from offload.testing.scenarios._program import FAULT_KINDS, POLICY_KINDS, FaultKind, PolicyKind
from offload.testing.scenarios._systems import SEAMS

A = Step(store=StoreStep(id="a{0..1}"))
CHAIN = {"main": PipelineSpec(to="host", chain=["on"]), "on": PipelineSpec(source="host", to="disk")}
DISK = {"disk": TierSpec()}


def scenario(**parts):
    return Scenario(**{"name": "x", "step": [A], **parts})


def store(**parts):
    return {"step": [Step(store=StoreStep(**{"id": "a0", **parts}))]}


def fault(**parts):
    return {"fault": [Fault(**parts)]}


def expect(**parts):
    return {"expect": [Expect(**parts)]}


def main(**parts):
    return {"pipeline": {"main": PipelineSpec(**{"to": "host", **parts})}}


def test_nothing_is_wrong_with_the_smallest_scenario():
    assert check(scenario()) == []
    assert check(Scenario(name="x")) == []


def test_nothing_is_wrong_with_everything_at_once():
    good = scenario(
        tier={"disk": TierSpec(holds="z")},
        pipeline=CHAIN,
        load=Load(mix=Mix()),
        step=[
            A,
            Step(store=StoreStep(id="b", keys="k{0..2}", per=3, after=[After(event="e"), After(ms=3)], any_of=True)),
            Step(store=StoreStep(id="c", pipeline="on", keys="k0")),
            Step(fire="e"),
            Step(load=LoadStep(id="l", keys="k0", tier="disk")),
            Step(evict=KeysStep(keys="k0", tier="host")),
            Step(delete=KeysStep(keys="k0", tier="disk")),
            Step(drain="on"),
            Step(release="main"),
            Step(at_ms=90, close=CloseStep()),
        ],
        fault=[
            Fault(do="cancel", at_hook="post_claim", of="m3"),
            Fault(do="fail", at_ms=1, tier="disk", keys="k0", for_ms=9),
            Fault(do="evict", at_ms=1, tier="host"),
            Fault(do="flip", at_ms=1, tier="device"),
        ],
        expect=[
            Expect(
                status={"m0": "COMPLETE"}, count={"copied": 3, "post_claim": 1}, never=["l missed", "m0-load missed"]
            ),
            Expect(time=[Window(event="a0 settled", since="a1 cancel asked", at_most_ms=3)], found={"disk": "k0"}),
            Expect(metric={"on": {"batches": 1}}),
        ],
    )
    assert check(good) == []


WRONG = {
    "name": ({"name": " "}, "name", "in a few words"),
    "tier": (main(to="hots"), "pipeline.main.to", "did you mean 'host'?"),
    "source": (main(source="devise"), "pipeline.main.from", "did you mean 'device'?"),
    "same tier": (main(source="host"), "pipeline.main.to", "name another"),
    "block sizes": (
        {"tier": {"device": TierSpec(block_bytes=32), "host": TierSpec()}, **main()},
        "pipeline.main.to",
        "'device' has blocks of 32 bytes, 'host' of 64",
    ),
    "tier's name": ({"tier": {"a b": TierSpec()}}, 'tier."a b"', "no space"),
    "pipeline's name": ({"pipeline": {"": PipelineSpec(to="host")}}, 'pipeline.""', "must not be empty"),
    "holds too much": ({"tier": {"host": TierSpec(capacity=1, holds="k0, k1")}}, "tier.host.holds", "capacity = 1"),
    "holds twice": ({"tier": {"host": TierSpec(holds="k0, k0")}}, "tier.host.holds", "'k0' is named twice"),
    "source too small": ({"tier": {"device": TierSpec(capacity=1)}}, "tier.device.capacity", "set capacity = 2"),
    "knob": (main(max_batch_size=0), "pipeline.main.max_batch_size", "0: must be an integer from 1 to"),
    "time": (main(policy_ms=1), "pipeline.main.policy_ms", "1: must be from 2 to 3686400 virtual milliseconds"),
    "knobs together": (main(min_batch_size=9, max_batch_size=4), "pipeline.main.min_batch_size", "at most max_batch_size, 4"),
    "batch over budget": (main(max_batch_size=9, budget_blocks=4), "pipeline.main.max_batch_size", "budget_blocks, 4"),
    "policy's tier": (
        main(policies=[PolicySpec(do="present", tier="hots")]),
        "pipeline.main.policies[0].tier",
        "did you mean 'host'?",
    ),
    "policy's who": (main(policies=[PolicySpec(do="cancel")]), "pipeline.main.policies[0].who", 'who = "a0"'),
    "policy's field": (
        main(policies=[PolicySpec(do="raise", who="a0")]),
        "pipeline.main.policies[0].who",
        "no meaning for 'raise': it looks at keys, ms",
    ),
    "unknown route": (main(chain=["mian"]), "pipeline.main.chain[0]", "did you mean 'main'?"),
    "route to itself": (main(chain=["main"]), "pipeline.main.chain[0]", "leads to itself"),
    "route twice": (
        {"tier": DISK, "pipeline": {**CHAIN, "main": PipelineSpec(to="host", chain=["on", "on"])}},
        "pipeline.main.chain[1]",
        "named twice",
    ),
    "route from elsewhere": (
        {"tier": DISK, "pipeline": {**CHAIN, "on": PipelineSpec(to="disk")}},
        "pipeline.main.chain[0]",
        'needs from = "host"',
    ),
    "a chain that goes round": (
        {"pipeline": {"a": PipelineSpec(to="host", chain=["b"]), "b": PipelineSpec(source="host", to="device", chain=["a"])}},
        "pipeline.b.chain",
        "a -> b -> a",
    ),
    "two verbs": ({"step": [Step(fire="e", drain="main")]}, "step[0]", "does fire and drain: must have exactly one of store,"),
    "no verb": ({"step": [Step()]}, "step[0]", "does nothing"),
    "too late": ({"step": [Step(at_ms=9, fire="e")], "limit_ms": 5}, "step[0].at_ms", "limit_ms = 5"),
    "twice the same": ({"step": [A, A]}, "step[1].store.id", "'a0' is there already, from step[0].store.id"),
    "like one of the mix": (
        {"load": Load(mix=Mix()), **store(id="m3")},
        "step[0].store.id",
        "'m3' is there already, from load.mix",
    ),
    "load like a container": (
        {"step": [A, Step(load=LoadStep(id="a0", keys="k"))]},
        "step[1].load.id",
        "'a0' is there already",
    ),
    "no id": (store(id=""), "step[0].store.id", "is empty"),
    "range": (store(id="a{3..0}"), "step[0].store.id", "write {0..3}"),
    "keys that do not deal out": (store(id="a, b", keys="k{0..2}"), "step[0].store.keys", "name 2 keys"),
    "keys for more": (store(id="a", keys="k{0..2}"), "step[0].store.keys", "set per = 3"),
    "a key twice": (store(id="a", keys="k, k", per=2), "step[0].store.keys", "'k' is named twice"),
    "far too many": (store(per=1 << 21), "step[0].store.per", "name fewer"),
    "more than the budget": (
        {**main(budget_blocks=4), **store(per=5)},
        "step[0].store.per",
        "its budget_blocks = 4",
    ),
    "unknown pipeline": (store(pipeline="mian"), "step[0].store.pipeline", "did you mean 'main'?"),
    "external in a chain": (
        {"tier": DISK, "pipeline": CHAIN, **store(pipeline="on", kind="external")},
        "step[0].store.kind",
        'kind = "weak"',
    ),
    "nobody fires": (store(after=[After(event="e")]), "step[0].store.after[0].event", 'fire = "e"'),
    "nobody fires that": (
        {"step": [Step(fire="even"), Step(store=StoreStep(id="a0", after=[After(event="evan")]))]},
        "step[1].store.after[0].event",
        "did you mean 'even'?",
    ),
    "never, then": (store(after=[After(do="never", ms=3)]), "step[0].store.after[0]", "leave out event and ms"),
    "any of nothing": (store(any_of=True), "step[0].store.any_of", "set after"),
    "load of nothing": ({"step": [Step(load=LoadStep(keys=""))]}, "step[0].load.keys", "is empty"),
    "load from nowhere": ({"step": [Step(load=LoadStep(keys="k", tier="x"))]}, "step[0].load.tier", "only device, host"),
    "held, or computed": (
        {"engine": EngineSpec(tiers=["host"], recompute_ms=5), "step": [Step(load=LoadStep(keys="k", hold_ms=3))]},
        "step[0].load.hold_ms",
        "set one of both",
    ),
    "several loads": ({"step": [Step(load=LoadStep(id="a, b", keys="k"))]}, "step[0].load.id", "a load is one"),
    "evict from no source": ({"step": [Step(evict=KeysStep(keys="k", tier="host"))]}, "step[0].evict.tier", "is not a source"),
    "delete again": ({"step": [Step(delete=KeysStep(keys="k", again=True))]}, "step[0].delete.again", "applies to evict"),
    "drain": ({"step": [Step(drain="mian")]}, "step[0].drain", "did you mean 'main'?"),
    "release": ({"step": [Step(release="mian")]}, "step[0].release", "did you mean 'main'?"),
    "event's name": ({"step": [Step(fire="e f")]}, "step[0].fire", "no space"),
    "load": ({"load": Load()}, "load", "set load.mix or load.trace"),
    "trace": ({"load": Load(trace=TraceLoad(path=""))}, "load.trace.path", "relative to this one"),
    "fault without time": (fault(do="cancel", who="a0"), "fault[0]", "has no time"),
    "fault with two times": (
        fault(do="cancel", who="a0", at_ms=1, at_hook="settled"),
        "fault[0]",
        "both at_ms and at_hook",
    ),
    "fault too late": ({**fault(do="cancel_host", at_ms=9), "limit_ms": 5}, "fault[0].at_ms", "never comes"),
    "hook": (fault(do="cancel_host", at_hook="settle"), "fault[0].at_hook", "did you mean 'settled'?"),
    "visit of no hook": (fault(do="cancel_host", at_ms=1, visit=2), "fault[0].visit", "set at_hook as well"),
    "of without a hook": (fault(do="cancel_host", at_ms=1, of="a0"), "fault[0].of", "set at_hook as well"),
    "who": (fault(do="cancel", at_ms=1, who="a9"), "fault[0].who", "did you mean 'a"),
    "nobody": (fault(do="cancel", at_ms=1), "fault[0].who", "name the container that 'cancel' hits"),
    "abandon at a hook": (fault(do="abandon", at_hook="settled"), "fault[0].who", "waits for room"),
    "field of another kind": (fault(do="cancel", at_ms=1, who="a0", ms=3), "fault[0].ms", "it looks at who"),
    "field of no kind": (fault(do="shut_down", at_ms=1, keys="k"), "fault[0].keys", "leave it out"),
    "no miscount": (fault(do="miscount", at_ms=1, by=0), "fault[0].by", "set 1, or -1"),
    "blocks in a group": (fault(do="fail", at_ms=1, keys="k", grouped=True), "fault[0].grouped", "nothing is raised"),
    "hook in a group": (fault(do="fail", at_hook="xfer_start", grouped=True), "fault[0].grouped", "set at_ms without keys"),
    "group of nothing": (fault(do="stall", at_ms=1, grouped=True), "fault[0].grouped", "it looks at tier, for_ms"),
    "times of a tier": (fault(do="stall", at_ms=1, times=2), "fault[0].times", "it looks at tier, for_ms"),
    "fault's tier": (fault(do="fail", at_ms=1, tier="hots"), "fault[0].tier", "did you mean 'host'?"),
    "copies into a source": (fault(do="stall", at_ms=1, tier="device"), "fault[0].tier", "nothing is copied into 'device'"),
    "evict from a destination": (fault(do="evict", at_ms=1, tier="host"), "fault[0].tier", "not a source of a pipeline"),
    "expect nothing": (expect(), "expect[0]", "expects nothing"),
    "status of nobody": (expect(status={"b": "COMPLETE"}), "expect[0].status.b", "there is no container 'b'"),
    "result of nobody": (expect(result={"x y": {}}), 'expect[0].result."x y"', "there is no container 'x y'"),
    "count": (expect(count={"copyed": 1}), "expect[0].count.copyed", "did you mean 'copied'?"),
    "at most": (expect(at_most={"pre_clam": 1}), "expect[0].at_most.pre_clam", "did you mean 'pre_claim'?"),
    "event": (expect(order=["a0"]), "expect[0].order[0]", 'as in "a0 settled"'),
    "event of nobody": (expect(never=["b settled"]), "expect[0].never[0]", "there is no container 'b'"),
    "no such event": (expect(order=["a0 setled"]), "expect[0].order[0]", "did you mean 'settled'?"),
    "window": (expect(time=[Window(event="a0 x")]), "expect[0].time[0].event", "there is no event 'x'"),
    "window since": (expect(time=[Window(event="a0 settled", since="b settled")]), "expect[0].time[0].since", "'b'"),
    "window upside down": (
        expect(time=[Window(event="a0 settled", at_least_ms=3, at_most_ms=2)]),
        "expect[0].time[0]",
        "at least 3 and at most 2",
    ),
    "found where": (expect(found={"hots": "k"}), "expect[0].found.hots", "did you mean 'host'?"),
    "found what": (expect(missing={"host": "a b"}), "expect[0].missing.host", "no space"),
    "metric of": (expect(metric={"mian": {"batches": 1}}), "expect[0].metric.mian", "did you mean 'main'?"),
    "metric": (expect(metric={"main": {"baches": 1}}), "expect[0].metric.main.baches", "did you mean 'batches'?"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "path", "said"), WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_said_with_its_place_and_a_way_out(parts, path, said):
    (problem,) = check(scenario(**parts))
    assert problem.path == path
    assert said in problem.text


def test_everything_that_is_wrong_is_found_at_once():
    problems = check(scenario(**main(to="x"), **fault(do="cancel", at_ms=1, who="nobody"), **expect(count={"x": 1})))
    assert [problem.path for problem in problems] == ["pipeline.main.to", "fault[0].who", "expect[0].count.x"]


def test_demand_raises_the_first_and_tells_the_others():
    demand(scenario())
    with pytest.raises(ScenarioError) as caught:
        demand(scenario(**main(to="hots"), **expect(count={"x": 1})))
    assert str(caught.value) == "pipeline.main.to: there is no tier 'hots'; did you mean 'host'?"
    assert caught.value.line is None
    assert len(caught.value.others) == 1


# --- seams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_a_fault_whose_seam_is_missing_is_refused(kind):
    who = "a0" if "who" in FAULT_KINDS[kind].looks_at else ""
    timed, hooked = Fault(do=kind, who=who, at_ms=1), Fault(do=kind, who=who, at_hook="theirs")
    needed = FAULT_KINDS[kind].needs
    assert check(scenario(fault=[timed]), needed) == []
    assert check(scenario(fault=[hooked]), [*needed, "hook"]) == []
    assert [one.path for one in check(scenario(fault=[timed]), [])] == ["fault[0].do"] * len(needed)
    assert "fault[0].at_hook" in [one.path for one in check(scenario(fault=[hooked]), needed)]


def test_a_step_whose_seam_is_missing_is_refused():
    steps = [
        Step(evict=KeysStep(keys="k")), Step(delete=KeysStep(keys="k")), Step(drain="main"), Step(close=CloseStep()),
        Step(store=StoreStep(id="a", after=[After()])),
    ]  # fmt: skip
    problems = check(scenario(step=steps, **expect(found={"host": ""})), [])
    assert [one.path for one in problems] == [
        "step[0].evict", "step[1].delete", "step[2].drain", "step[3].close", "step[4].store.after", "expect[0].found.host",
    ]  # fmt: skip
    assert check(scenario(step=steps, **expect(found={"host": ""})), SEAMS) == []


def test_the_hooks_of_another_system_are_its_own_affair_unless_they_are_known():
    theirs = scenario(
        **fault(do="cancel", at_hook="theirs", who="a0"), **expect(count={"theirs": 1}, order=["a0 theirs"])
    )
    assert check(theirs, SEAMS) == []
    assert check(theirs, SEAMS, hooks=["theirs"]) == []
    assert len(check(theirs, SEAMS, hooks=["others"])) == 3
    assert len(check(theirs)) == 3


def test_every_kind_of_fault_and_of_policy_says_what_it_looks_at():
    assert set(FAULT_KINDS) == set(get_args(FaultKind)) and set(POLICY_KINDS) == set(get_args(PolicyKind))
    known = set(Fault.__struct_fields__) - {"do", "at_ms", "at_hook", "of", "visit", "p"}
    assert {name for kind in FAULT_KINDS.values() for name in kind.looks_at} == known
    known = set(PolicySpec.__struct_fields__) - {"do", "p"}
    assert {name for kind in POLICY_KINDS.values() for name in kind.looks_at} == known


# --- knobs --------------------------------------------------------------------------------------------------------


def test_every_knob_has_its_field():
    knobs = [
        one.name for cls in (PipelineConfig, BatchConfig) for one in attrs.fields(cls) if one.name != "batch_config"
    ]
    assert sorted(FIELD_OF) == sorted(knobs)
    not_knobs = {"source", "to", "policies", "chain", "optional_chain"}
    assert sorted(FIELD_OF.values()) == sorted(set(PipelineSpec.__struct_fields__) - not_knobs)


def test_every_field_sets_its_knob():
    for knob, field in FIELD_OF.items():
        usual = config_of(PipelineSpec(to="host"))
        value = "fail" if field == "on_policy_error" else "evict" if field == "on_destination_full" else "drop"
        number = 0.07 if field == "route_share" else 7
        changed = config_of(PipelineSpec(to="host", **{field: value if field.startswith("on_") else number}))
        flat = [{**attrs.asdict(one), **attrs.asdict(one.batch_config)} for one in (usual, changed)]
        assert flat[1][knob] == (7 * TICK if field.endswith("_ms") else value if field.startswith("on_") else number)
        assert flat[0][knob] != flat[1][knob]


def test_what_is_not_said_falls_on_whole_virtual_milliseconds():
    config = config_of(PipelineSpec(to="host"))
    values = attrs.asdict(config, recurse=False) | attrs.asdict(config.batch_config)
    times = [value for knob, value in values.items() if isinstance(value, float) and knob != "route_share"]
    assert len(times) == 8
    assert all((time / TICK).is_integer() for time in times)


def test_a_small_batch_or_budget_needs_no_word_about_the_others():
    assert config_of(PipelineSpec(to="host", max_batch_size=2)).batch_config.min_batch_size == 2
    small = config_of(PipelineSpec(to="host", budget_blocks=3)).batch_config
    assert (small.max_batch_size, small.min_batch_size) == (3, 3)


# --- what is not said ---------------------------------------------------------------------------------------------


def test_a_source_that_nobody_described_has_room_for_all():
    assert tiers_of(scenario(**store(per=1000)))["device"].capacity == 1000
    assert tiers_of(scenario())["device"] == TierSpec()


def test_tiers_that_nobody_described_have_blocks_of_the_usual_size():
    assert {one.block_bytes for one in tiers_of(scenario(tier={"host": TierSpec(block_bytes=16)})).values()} == {16}


def test_keys_are_dealt_out_in_order():
    assert keys_of(StoreStep(id="a, b", keys="k{0..3}", per=2)) == {"a": ("k0", "k1"), "b": ("k2", "k3")}
    assert keys_of(StoreStep(id="a, b", per=2)) == {"a": ("a.0", "a.1"), "b": ("b.0", "b.1")}
    assert keys_of(StoreStep(id="a", per=0)) == {"a": ()}


def test_what_is_counted_is_told():
    assert set(COUNTED) == {"copied", "batches", "loaded", "missed", "fired"}
