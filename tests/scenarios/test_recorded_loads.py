"""A replay written down as a scenario: the same blocks hit and miss in virtual time, whatever the pressure."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from offload.replay import ReplayError, ReplayOptions, ReplayReport, Request, TierSpec, command, replay
from offload.testing.scenarios import Scenario, check, play, read, read_text, to_toml
from offload.testing.scenarios._loads import RecordedRequest as Done
from offload.testing.scenarios._loads import RecordedTier, modelled, recorded

BLOCK = 256


def a_trace(seed: int, requests: int) -> list[Request]:
    """Conversations that go on, branch off from each other and come back, as those of users do."""
    rng = random.Random(seed)
    conversations: list[list[int]] = [[0, 1]]
    made: list[Request] = []
    next_id = 2
    for number in range(requests):
        past = rng.choice(conversations[-12:]) if rng.random() < 0.8 else [0, 1]
        kept = past[: rng.randint(1, len(past))] if rng.random() < 0.3 else past
        new = rng.randint(0, 6)
        blocks = [*kept, *range(next_id, next_id + new)][:60]
        next_id += new
        conversations.append(blocks)
        made.append(Request(number * 3, len(blocks) * 512, 9, tuple(blocks)))
    return made


def recording(requests: Sequence[Request], tiers: Sequence[TierSpec], **options: Any) -> tuple[ReplayReport, Scenario]:
    found: list[Scenario] = []
    wanted = ReplayOptions(tiers=tiers, block_bytes=BLOCK, **options)
    report = trio.run(replay, requests, wanted, lambda done: None, found.append, "a test")
    return report, found[0]


def memory(blocks: float) -> TierSpec:
    return TierSpec("memory", None, blocks * BLOCK)


@pytest.mark.parametrize("capacity", [20, 64, 150, 4_000])
def test_the_same_blocks_hit_and_miss_whatever_the_pressure(capacity: int) -> None:
    requests = a_trace(3, 300)
    real, scenario = recording(requests, [memory(capacity)])
    report = play(scenario)
    assert report.good, report.violations  # which compares the counts as well
    assert report.counts["loaded"] == real.hit_blocks
    assert report.counts["copied"] == real.stored
    assert report.counts["missed"] == sum(
        label.who[0].startswith("r") and label.name == "missed" for label in report.moments
    )
    if capacity < 4_000:
        assert real.evicted > 0  # or else it would show nothing
    assert real.hit_blocks > 100


@pytest.mark.parametrize("policy", ["pass-all", "frequency:1"])
def test_what_a_policy_kept_back_stays_out(policy: str) -> None:
    real, scenario = recording(a_trace(4, 200), [memory(60)], policy=policy)
    report = play(scenario)
    assert report.good, report.violations
    assert report.counts["loaded"] == real.hit_blocks > 0


def test_several_tiers_are_a_chain_and_each_is_read_where_it_was(tmp_path: Path) -> None:
    tiers = [memory(30), TierSpec("file", str(tmp_path / "blocks"), 120 * BLOCK)]
    real, scenario = recording(a_trace(5, 150), tiers)
    assert list(scenario.tier) == ["host", "disk"] and scenario.tier["disk"].kind == "file"
    report = play(scenario)
    assert report.good, report.violations
    assert report.counts["loaded"] == real.hit_blocks
    assert {one.where for one in report.moments if one.name == "loaded"} == {"host", "disk"}


def test_a_recording_is_a_scenario_that_makes_sense_and_is_small() -> None:
    requests = a_trace(6, 200)
    _, scenario = recording(requests, [memory(64)])
    assert check(scenario) == []
    text = to_toml(scenario)
    assert read_text(text, "it") == scenario
    assert len(scenario.step) <= 2 * len(requests)
    assert len(text) < 110 * len(scenario.step) + 2_000
    spec = scenario.tier["host"]
    assert (spec.capacity, spec.block_bytes, spec.bytes_per_ms > 0) == (64, BLOCK, True)
    times = [step.at_ms for step in scenario.step]
    assert times == sorted(times)


def test_a_tier_that_was_not_empty_is_refused(tmp_path: Path) -> None:
    tiers = [TierSpec("file", str(tmp_path / "blocks"), 100 * BLOCK)]
    recording(a_trace(1, 5), tiers)
    with pytest.raises(ReplayError, match="already has blocks"):
        recording(a_trace(1, 5), tiers)


def test_the_command_writes_a_file_that_can_be_played(tmp_path: Path) -> None:
    trace, out = tmp_path / "a.jsonl", tmp_path / "out.scenario.toml"
    lines = [
        {"timestamp": r.timestamp, "input_length": 1, "output_length": 1, "hash_ids": r.hash_ids}
        for r in a_trace(7, 40)
    ]
    trace.write_text("".join([json.dumps(line) + "\n" for line in lines]))
    done = CliRunner().invoke(
        command, [str(trace), "--capacity", "40KiB", "--block-bytes", "1KiB", "--record", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert f"recorded: {out}" in done.output
    scenario = read(out)
    assert scenario.name == "a replay of a.jsonl"
    assert play(scenario).good


def test_the_model_is_the_line_through_what_was_measured() -> None:
    assert modelled([(1_000, 0.005 + 0.001), (2_000, 0.005 + 0.002), (4_000, 0.005 + 0.004)]) == (5, 1_000)
    assert modelled([(1_000, 0.001)] * 3) == (0, 1_000)
    assert modelled([]) == (0, 0)
    assert modelled([(0, 0.1), (100, 0.0)]) == (0, 0)


def test_a_step_waits_for_the_modelled_end_of_the_one_before() -> None:
    requests = [
        Done(0.0, [1, 2, 3], [], store_time=0.004),
        Done(0.4, [1, 2, 9], [(0, 2)], store_time=0.004),
        Done(50.0, [1, 2, 3], [(0, 3)]),
    ]
    scenario = recorded("it", [RecordedTier("memory", 8, 1_000)], requests, {"loaded": 5, "missed": 2, "copied": 4})
    assert [(step.at_ms, (step.store or step.load).keys) for step in scenario.step] == [  # type: ignore[union-attr]
        (0, "b1"),
        (scenario.step[1].at_ms, "b{1..3}"),
        (scenario.step[2].at_ms, "b1, b2, b9"),
        (scenario.step[3].at_ms, "b9"),
        (50, "b{1..3}"),
    ]
    assert scenario.step[3].at_ms > scenario.step[2].at_ms > scenario.step[1].at_ms
    report = play(scenario)
    assert report.good, report.violations
