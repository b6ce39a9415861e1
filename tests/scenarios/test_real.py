"""Scenarios for real: memory, files, copy threads, full disks and the clock on the wall, judged by the same oracle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offload.testing.scenarios import (
    After,
    Counts,
    Expect,
    Fault,
    KeysStep,
    LoadStep,
    Mix,
    Moment,
    Outcome,
    PipelineSpec,
    Report,
    Scenario,
    ScenarioError,
    Step,
    StoreStep,
    TierSpec,
    Window,
    play,
    play_real,
)
from offload.testing.scenarios import Load as LoadSpec
from offload.testing.scenarios import _real_world as disk_module
from offload.testing.scenarios import _real_world as world
from offload.testing.scenarios._expectations import FinalState, failed_real_expectations
from offload.testing.scenarios._real_world import NoDisk, SmallDisk
from tests.support.scenario_plays import unhurried


def program(
    *steps: Step, faults: Sequence[Fault] = (), expect: Sequence[Expect] = (), kind: Any = "file", **rest: Any
) -> Scenario:
    rest.setdefault("limit_ms", 10_000)
    host = TierSpec(kind=kind, capacity=32, latency_ms=2)
    rest.setdefault("tier", {"host": host})
    rest.setdefault("pipeline", {"main": PipelineSpec(to="host", flush_ms=2)})
    return Scenario(name="a test", step=list(steps), fault=list(faults), expect=list(expect), **rest)


def stores(label: str, at_ms: int = 0, per: int = 2, **rest: Any) -> Step:
    return Step(at_ms=at_ms, store=StoreStep(id=label, per=per, **rest))


def loads(keys: str, at_ms: int) -> Step:
    return Step(at_ms=at_ms, load=LoadStep(id="load", keys=keys))


def good(scenario: Scenario, **rest: Any) -> Report:
    rest.setdefault("pace", unhurried())
    report = play_real(scenario, **rest)
    assert report.good, (report.violations, report.trace)
    return report


# --- the same program ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_holds_in_virtual_time_holds_for_real(kind: str, tmp_path: Path) -> None:
    scenario = program(
        stores("a{0..3}"),
        stores("waits", at_ms=1, after=[After(event="go")], kind="strong"),
        Step(at_ms=40, fire="go"),
        loads("a0.0, a1.1, a2.0", at_ms=150),
        # Not what is loaded, which may last until now, and is held so long; nor is there an end that a load could overrun.
        Step(at_ms=170, delete=KeysStep(keys="a1.0")),
        faults=[Fault(do="cancel", who="a2", at_hook="sweep_claim_gap", of="a2")],
        expect=[
            Expect(
                status={"a0": "COMPLETE", "a1": "COMPLETE", "a2": "CANCELLED", "a3": "COMPLETE", "waits": "COMPLETE"},
                count={"copied": 8, "fired": 1, "loaded": 2, "missed": 1},
                found={"host": "a0.{0..1}, a1.1, a3.{0..1}, waits.{0..1}"},
                missing={"host": "a1.0, a2.{0..1}"},
                time=[Window(event="waits ended", at_least_ms=40)],
            )
        ],
        kind=kind,
    )
    report = good(scenario, workdir=tmp_path)
    assert play(scenario).good
    assert report.fired == {"cancel at sweep_claim_gap": 1}
    assert report.notes == ()
    assert os.listdir(tmp_path) == []  # what was made there is gone
    assert play(scenario).reached - report.reached == set()
    assert {"hook sweep_claim_gap", "state CANCELLED", "state TRANSFERRING"} <= report.reached


def test_a_time_is_a_millisecond_of_the_wall_and_can_be_more() -> None:
    scenario = program(stores("a", after=[After(ms=50)]), kind="memory")
    for pace in (1.0, 4.0):
        began = time.monotonic()
        slow = good(scenario, pace=pace)
        assert time.monotonic() - began >= 0.05 * pace
        ended = next(moment.at_ms for moment in slow.moments if moment.kind == "end")
        assert 50 <= ended < 10_000
    assert all(moment.at_ms == round(moment.at_ms, 3) for moment in slow.moments)


def test_no_copy_thread_is_left() -> None:
    before = set(threading.enumerate())  # those of earlier tests may go meanwhile
    good(
        program(
            stores("a"),
            faults=[Fault(do="stall", at_ms=0, for_ms=60)],
            pipeline={"main": PipelineSpec(to="host", transfer_ms=20)},
        )
    )
    for thread in threading.enumerate():
        if thread.name.startswith("offload-copy"):
            thread.join(60)  # abandoned, and past its gate
    assert set(threading.enumerate()) <= before


def test_a_load_is_unrolled_and_a_trace_of_faults_is_the_seeds() -> None:
    scenario = program(load=LoadSpec(mix=Mix(containers=6, over_ms=20, cancels=0.5, loads=0.5)), kind="memory")
    report = good(scenario, seed=3)
    assert report.scenario.load is None
    assert report.scenario.step == play(scenario, 3).scenario.step


# --- faults, as the real thing ------------------------------------------------------------------------------------


def test_a_full_disk_fails_blocks_until_there_is_room_again() -> None:
    scenario = program(
        stores("before"),
        stores("full", at_ms=100),
        stores("after", at_ms=350),
        faults=[Fault(do="full", at_ms=90, for_ms=150)],
        expect=[
            Expect(status={"before": "COMPLETE", "full": "COMPLETE", "after": "COMPLETE"}, found={"host": "after.0"})
        ],
    )
    report = good(scenario)
    assert report.outcomes["full"].status == "FAILED"
    assert set(report.outcomes["full"].failed.values()) == {"OSError"}
    assert report.fired == {"full": 1}
    # Virtual time has them wait for room; that this is another answer is said.
    assert "not judged in real time: expect[0].status.full: it met a full disk" in report.notes
    assert report.counts["copied"] == 4


def test_where_no_disk_can_be_had_room_is_withheld_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(blocks: int, block_bytes: int) -> SmallDisk:
        raise NoDisk("not on this machine")

    monkeypatch.setattr(world, "disk_for", none)
    scenario = program(
        stores("a", at_ms=20), faults=[Fault(do="full", at_ms=0, for_ms=100)], expect=[Expect(status={"a": "COMPLETE"})]
    )
    report = good(scenario)
    assert "not on this machine" in report.notes[0]
    assert next(moment.at_ms for moment in report.moments if moment.kind == "end") >= 100


def test_a_disk_can_be_filled_to_the_last_byte_and_emptied() -> None:
    disk = disk_module.disk_for(4, 4096)
    try:
        disk.fill()
        with pytest.raises(OSError, match="No space left"), open(f"{disk.path}/a", "wb") as file:
            file.write(bytes(4096))
        disk.empty()
        Path(f"{disk.path}/a").write_bytes(bytes(4096))
        assert os.path.ismount(disk.path) is False  # nobody else sees it
    finally:
        disk.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_flipped_bit_is_a_miss_where_there_are_checksums_and_seen_where_there_are_none(kind: Any) -> None:
    steps = [stores("a", per=3), loads("a.{0..2}", at_ms=150)]
    faults = [Fault(do="flip", at_ms=100, keys="a.1")]
    report = good(program(*steps, faults=faults, expect=[Expect(count={"loaded": 2, "missed": 1})], kind=kind))
    assert report.fired == {"flip": 1}
    unsummed = {"host": TierSpec(kind=kind, latency_ms=2, checksums=False)}
    blind = play_real(program(*steps, faults=faults, tier=unsummed), pace=unhurried())
    assert {violation.rule for violation in blind.violations} == {"bytes"}


def test_one_block_that_fails_meets_a_directory_where_its_file_should_be() -> None:
    report = good(
        program(
            stores("a", per=3),
            faults=[Fault(do="fail", at_hook="xfer_start", keys="a.1", for_ms=200)],
            expect=[
                Expect(status={"a": "FAILED"}, result={"a": Counts(completed=2, failed=1)}, found={"host": "a.0, a.2"})
            ],
        )
    )
    assert dict(report.outcomes["a"].failed) == {b"a.1": "FileExistsError"}  # what the system itself said


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("do", ["fail", "torn", "duplicate", "peer_death"])
def test_a_copy_that_goes_wrong_fails_and_the_next_one_does_not(do: Any, kind: Any) -> None:
    good(
        program(
            stores("a", per=3),
            stores("b", at_ms=200),
            faults=[Fault(do=do, at_hook="xfer_start", of="a", for_ms=60)],
            expect=[Expect(status={"a": "FAILED", "b": "COMPLETE"}, count={"fired": 1})],
            kind=kind,
        )
    )


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("do", ["stall", "delay"])
def test_a_copy_thread_stands_at_its_gate(do: Any, kind: Any) -> None:
    good(
        program(
            stores("a"),
            faults=[Fault(do=do, at_hook="post_claim", for_ms=120, ms=120 if do == "delay" else 1)],
            expect=[Expect(status={"a": "COMPLETE"}, time=[Window(event="a ended", at_least_ms=120)])],
            kind=kind,
        )
    )


@pytest.mark.parametrize("do", ["unproven", "drop"])
def test_a_copy_whose_end_nobody_knows_is_quarantined(do: Any) -> None:
    report = good(
        program(
            stores("a"),
            faults=[Fault(do=do, at_hook="xfer_start", for_ms=100)],
            pipeline={"main": PipelineSpec(to="host", flush_ms=2, transfer_ms=80)},
            expect=[Expect(status={"a": "FAILED"}, result={"a": Counts(error="DrainUnproven")})],
        )
    )
    assert report.counts["copied"] == 0


def test_a_host_scope_that_is_cancelled_drains_the_copy_under_way() -> None:
    good(
        program(
            stores("a"),
            faults=[Fault(do="cancel_host", at_hook="xfer_start")],
            expect=[Expect(status={"a": "COMPLETE"}, found={"host": "a.{0..1}"})],
        )
    )


# --- what cannot be, and what goes on too long --------------------------------------------------------------------


def test_a_clock_that_jumps_is_refused_with_its_place() -> None:
    with pytest.raises(ScenarioError, match=r"^fault\[0\]\.do: the clock on the wall cannot jump"):
        play_real(program(stores("a"), faults=[Fault(do="clock", at_ms=5, ms=100)]))


def test_blocks_that_an_engine_keeps_alive_in_files_are_refused() -> None:
    scenario = program(
        stores("a", kind="external", per=1, keys="k0"),
        tier={"disk": TierSpec(kind="file", holds="k0")},
        pipeline={"main": PipelineSpec(source="disk", to="host")},
    )
    with pytest.raises(ScenarioError, match=r"step\[0\]\.store\.kind"):
        play_real(scenario)


def test_a_run_that_does_not_end_is_given_up_and_says_who_is_left() -> None:
    report = play_real(program(stores("a"), faults=[Fault(do="drop", at_ms=0, for_ms=100)], limit_ms=200))
    assert [violation.rule for violation in report.violations] == ["hang"]
    assert "a was taken" in report.violations[0].text


def test_a_chain_ends_in_files_that_are_a_source_as_well() -> None:
    good(
        program(
            stores("a", per=4),
            loads("a.{0..3}", at_ms=200),
            tier={
                "host": TierSpec(kind="file", capacity=16),
                "deep": TierSpec(kind="file", capacity=16, holds="old.{0..1}"),
            },
            pipeline={
                "main": PipelineSpec(to="host", flush_ms=2, chain=["down"]),
                "down": PipelineSpec(source="host", to="deep", flush_ms=2),
            },
            expect=[Expect(status={"a": "COMPLETE"}, found={"deep": "a.{0..3}, old.{0..1}", "host": "a.{0..3}"})],
        )
    )


# --- what is judged -----------------------------------------------------------------------------------------------


def a_report(expect: Expect, *moments: tuple[float, str, str]) -> Report:
    return Report(
        scenario=program(stores("a, b"), expect=[expect]),
        seed=0,
        moments=tuple([Moment(at, "hook", name, (label,)) for at, label, name in moments]),
        violations=(),
        outcomes={"a": Outcome("COMPLETE")},
        planned=0,
        fired={},
        counts={"copied": 2, "batches": 3},
        reached=frozenset(),
    )


def test_the_order_between_containers_is_not_judged_that_of_one_is() -> None:
    events = [(1.0, "b", "settled"), (2.0, "a", "batching"), (3.0, "a", "settled")]
    wrong, unjudged = failed_real_expectations(
        a_report(Expect(order=["a settled", "b settled"]), *events), FinalState()
    )
    assert wrong == [] and unjudged == ["expect[0].order: between a, b"]
    wrong, _ = failed_real_expectations(
        a_report(Expect(order=["a settled", "b settled", "a batching"]), *events), FinalState()
    )
    assert [one.text.partition(":")[0] for one in wrong] == ["expect[0].order[1]"]
    wrong, _ = failed_real_expectations(a_report(Expect(order=["a never", "b settled"]), *events), FinalState())
    assert len(wrong) == 1 and "never happened" in wrong[0].text


def test_of_times_only_the_least_is_judged() -> None:
    moments = [(10.0, "a", "batching"), (30.4, "a", "settled"), (50.0, "b", "settled")]
    windows = [
        Window(event="a settled", at_least_ms=31, at_most_ms=5),
        Window(event="a settled", since="a batching", at_least_ms=21),
        Window(event="b settled", since="a settled", at_least_ms=900),
    ]
    wrong, unjudged = failed_real_expectations(a_report(Expect(time=windows), *moments), FinalState())
    assert wrong == []
    assert unjudged == ["expect[0].time[0]: at most 5 ms", "expect[0].time[2]: between two containers"]
    early = Expect(time=[Window(event="a settled", at_least_ms=40)])
    wrong, _ = failed_real_expectations(a_report(early, *moments), FinalState())
    assert len(wrong) == 1


def test_counts_that_depend_on_who_came_in_time_are_not_judged() -> None:
    expect = Expect(
        count={"copied": 9, "batches": 1}, at_most={"batches": 1}, at_least={"post_claim": 9}, metric={"main": {"x": 1}}
    )
    wrong, unjudged = failed_real_expectations(a_report(expect), FinalState())
    assert [one.text for one in wrong] == ["expect[0].count.copied: wanted 9, found 2"]
    assert len(unjudged) == 4


def test_what_met_a_full_disk_is_not_judged_the_others_are() -> None:
    expect = Expect(status={"a": "FAILED", "b": "COMPLETE"}, result={"a": Counts(completed=4)})
    wrong, unjudged = failed_real_expectations(a_report(expect), FinalState(), ["a"])
    assert [one.text.partition(":")[0] for one in wrong] == ["expect[0].status.b"]
    assert len(unjudged) == 2
