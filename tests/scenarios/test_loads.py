"""Loads that nobody wrote down, written out as steps."""

import gzip
import json

import msgspec
import pytest

from offload.testing.scenarios import (
    Expect,
    Load,
    Mix,
    Scenario,
    ScenarioError,
    Step,
    StoreStep,
    TraceLoad,
    check,
    expand,
    play,
    unroll,
)
from offload.testing.scenarios._names import keys_of, stores_of
from offload.testing.scenarios._summary import played


def mixed(**parts):
    return Scenario(name="x", load=Load(mix=Mix(**parts)))


def test_without_a_load_nothing_changes():
    scenario = Scenario(name="x", step=[Step(store=StoreStep(id="a"))])
    assert unroll(scenario, 3) is scenario


def test_a_mix_has_what_it_says():
    scenario = mixed(containers=200, over_ms=10, keys=7, most=3, loads=1.0, cancels=0.5)
    made = unroll(scenario, 1)
    assert made.load is None
    assert check(made) == []
    stores = list(stores_of(made))
    assert sorted([store.id for store in stores], key=lambda one: int(one[1:])) == [f"m{i}" for i in range(200)]
    assert {store.kind for store in stores} == {"weak", "strong"}
    assert {store.per for store in stores} == {0, 1, 2, 3}
    keys = {key for store in stores for of_one in keys_of(store).values() for key in of_one}
    assert keys == {f"k{i}" for i in range(7)}
    assert {step.at_ms for step in made.step if step.store} == set(range(10))
    assert sum(step.load is not None for step in made.step) == sum(store.per > 0 for store in stores)
    assert 70 < len(made.fault) < 130
    assert [step.at_ms for step in made.step] == sorted([step.at_ms for step in made.step])


def test_a_mix_is_a_function_of_the_seed():
    scenario = mixed(cancels=0.5)
    assert unroll(scenario, 1) == unroll(scenario, 1)
    assert unroll(scenario, 1) != unroll(scenario, 2)


def test_one_container_more_leaves_the_others_as_they_were():
    few, more = unroll(mixed(containers=5), 1), unroll(mixed(containers=6), 1)
    assert [step for step in more.step if not (step.store or step.load).id.startswith("m5")] == few.step


def test_blocks_that_the_engine_keeps_are_of_one_container_alone():
    made = unroll(mixed(kinds=["external"], containers=50), 1)
    assert all(store.kind == "external" and not store.keys for store in stores_of(made))
    assert check(made) == []


def test_a_container_never_has_a_key_twice():
    assert check(unroll(mixed(keys=2, most=9, containers=100), 1)) == []


def test_steps_that_are_written_down_stay_and_expectations_see_the_mix():
    scenario = Scenario(
        name="x",
        load=Load(mix=Mix(containers=3, kinds=["strong"], most=1)),
        step=[Step(at_ms=99, store=StoreStep(id="mine"))],
        expect=[Expect(status={"m0": "COMPLETE", "mine": "COMPLETE"}, never=["m1-load missed"])],
    )
    assert check(scenario) == []
    assert unroll(scenario, 5).step[-1] == scenario.step[0]


def test_a_mix_plays():
    report = play(mixed(containers=30, loads=1.0, cancels=0.2), 4)
    assert report.violations == ()
    assert report.counts["loaded"] > 0
    assert report.planned == len(report.scenario.fault) > 0  # the mix's cancels, too


def test_cancels_come_while_their_containers_are_on_their_way():
    made = unroll(mixed(containers=200, over_ms=500, cancels=1.0), 3)
    stored = {step.store.id: step.at_ms for step in made.step if step.store is not None}
    assert {fault.at_ms - stored[fault.who] for fault in made.fault} == set(range(11)), (
        "ten of them it waits for others"
    )
    report = play(made)
    assert sum(report.fired.values()) > 0.4 * len(made.fault), "many are copied at once with others that came before"


def test_what_a_mix_plans_is_counted_when_it_has_been_drawn():
    report = play(mixed(containers=30, cancels=0.5), 4)
    short = played(report)
    assert sum(short.planned.values()) == report.planned == len(report.scenario.fault) > 5
    assert set(short.planned) == {"cancel"}


def test_a_mix_that_goes_on_for_longer_than_the_run_is_an_error_and_no_hang():
    mix = Mix(over_ms=100, loads=0.5)
    late = Scenario(name="x", limit_ms=298, load=Load(mix=mix))
    (problem,) = check(late)
    assert problem.path == "load.mix.over_ms"
    assert "may come as late as 299, but the run ends at limit_ms = 298: set less, or a larger limit_ms" in problem.text
    assert check(Scenario(name="x", limit_ms=299, load=Load(mix=mix))) == []
    assert check(Scenario(name="x", limit_ms=99, load=Load(mix=Mix(over_ms=100, loads=0.0)))) == []
    assert play(Scenario(name="x", limit_ms=299, load=Load(mix=mix)), 2).violations == ()


# --- traces -------------------------------------------------------------------------------------------------------


def line(timestamp, *hash_ids):
    return json.dumps({"timestamp": timestamp, "input_length": 9, "output_length": 1, "hash_ids": hash_ids})


REQUESTS = "\n".join([line(1000, 0, 1, 2), line(1005, 0, 1, 7), line(1012, 0, 1, 7)])


def traced(path="trace.jsonl", **parts):
    return Scenario(name="x", load=Load(trace=TraceLoad(path=str(path), **parts)))


def told(scenario):
    return [
        (step.at_ms, (step.store or step.load).id, expand((step.store or step.load).keys)) for step in scenario.step
    ]


def test_a_request_stores_what_is_new_and_loads_the_rest(tmp_path):
    (tmp_path / "trace.jsonl").write_text(REQUESTS)
    made = unroll(traced(), 0, tmp_path)
    assert check(made) == []
    assert told(made) == [
        (0, "r0", ("b0", "b1", "b2")),
        (5, "r1-load", ("b0", "b1")),
        (5, "r1", ("b7",)),
        (12, "r2-load", ("b0", "b1", "b7")),
    ]


def test_a_trace_may_be_a_part_of_one_compressed_and_faster(tmp_path):
    (tmp_path / "t.gz").write_bytes(gzip.compress(REQUESTS.encode()))
    made = unroll(traced("t.gz", skip=1, limit=2, speed=2.0), 0, tmp_path)
    assert told(made) == [(0, "r0", ("b0", "b1", "b7")), (3, "r1-load", ("b0", "b1", "b7"))]
    assert unroll(traced("t.gz", skip=9), 0, tmp_path).step == []


def test_a_trace_plays(tmp_path):
    (tmp_path / "trace.jsonl").write_text(REQUESTS)
    report = play(traced(), base=tmp_path)
    assert report.violations == ()
    assert report.counts["copied"] == 4


def test_a_trace_that_cannot_be_read_is_an_error_of_the_scenario(tmp_path):
    with pytest.raises(ScenarioError, match=r"load\.trace\.path: .*nowhere cannot be read: .*: name a path relative"):
        unroll(traced("nowhere"), 0, tmp_path)
    (tmp_path / "bad").write_text(line(0, 1, 1))
    with pytest.raises(ScenarioError, match="line 1: hash_ids: 1 is named twice"):
        unroll(traced("bad"), 0, tmp_path)
    (tmp_path / "long").write_text(REQUESTS)
    with pytest.raises(
        ScenarioError, match=r"load\.trace\.limit: r2 comes at 12, but .* limit_ms = 11: set fewer requests"
    ):
        unroll(msgspec.structs.replace(traced("long"), limit_ms=11), 0, tmp_path)
    assert unroll(msgspec.structs.replace(traced("long"), limit_ms=12), 0, tmp_path).step
    (tmp_path / "back").write_text(f"{line(5, 1)}\n{line(3, 1)}")
    with pytest.raises(ScenarioError, match="r1 came 2 ms before the first request: sort"):
        unroll(traced("back"), 0, tmp_path)
