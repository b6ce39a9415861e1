"""Days of traffic from a trace of an hour: laps with other names, a clock that skips, and nothing left when they are over."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from backends.base.pooled import ThreadLease
from backends.memory import MemoryTier
from offload._replay import leaks
from offload._replay.replayer import Played
from offload._replay.report import Tally
from offload.replay import (
    Laps,
    Percentiles,
    ReplayError,
    ReplayOptions,
    ReplayReport,
    Request,
    SkippingClock,
    TierSpec,
    command,
    replay,
)

BLOCK = 512


def a_trace(conversations: int = 12, turns: int = 6) -> list[Request]:
    """Conversations beside each other, each turn longer than the one before; all begin with the same block."""
    requests = []
    for turn in range(turns):
        for who in range(conversations):
            ids = (0, *[1 + who * 100 + at for at in range(3 * (turn + 1))])
            requests.append(Request(float(1_000 * len(requests)), 512, 9, ids))
    return requests


TRACE = a_trace()
DIFFERENT = len({hash_id for request in TRACE for hash_id in request.hash_ids})


def names(lap: Any) -> set[int]:
    return {hash_id for request in lap for hash_id in request.hash_ids}


# --- laps ---------------------------------------------------------------------------------------------------------


def test_one_lap_is_the_trace() -> None:
    laps = Laps(TRACE)
    assert list(laps) == [TRACE]
    assert (len(laps), laps.unique_blocks) == (len(TRACE), DIFFERENT)


@given(rename=st.floats(0.0, 1.0), count=st.integers(1, 5))
def test_each_lap_keeps_exactly_its_share_of_names_from_the_one_before(rename: float, count: int) -> None:
    laps = Laps(TRACE, count, rename)
    played = list(laps)
    assert len(played) == count and sum(map(len, played)) == len(laps)
    kept = round((1.0 - rename) * DIFFERENT)
    for before, after in pairwise(played):
        assert len(names(before) & names(after)) == kept
        assert len(names(after)) == DIFFERENT
    assert len(set().union(*map(names, played))) == laps.unique_blocks


def test_what_has_gone_does_not_come_back() -> None:
    first, second, third = map(names, Laps(TRACE, 3, 0.5))
    assert first & third <= second


@given(rename=st.floats(0.0, 1.0))
def test_a_block_keeps_its_name_only_with_all_before_it(rename: float) -> None:
    """Or else a prefix would end at a block that was renamed, and what is kept behind it could never hit."""
    before, after = Laps(TRACE, 2, rename)
    for old, new in zip(before, after, strict=True):
        same = [a == b for a, b in zip(old.hash_ids, new.hash_ids, strict=True)]
        assert same == sorted(same, reverse=True)


def test_laps_follow_each_other_at_the_traces_own_pace() -> None:
    laps = Laps(TRACE, 3, 0.8)
    times = [request.timestamp for lap in laps for request in lap]
    assert times == [float(1_000 * at) for at in range(3 * len(TRACE))]
    assert laps.period == 1_000 * len(TRACE)


def test_laps_are_the_same_in_any_process() -> None:
    program = "import tests.commands.test_replay_laps as t; print([r.hash_ids for lap in t.Laps(t.TRACE, 3, 0.7) for r in lap])"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


@pytest.mark.parametrize(("laps", "rename"), [(0, 0.5), (2, -0.1), (2, 1.1)])
def test_no_lap_and_no_share_are_errors(laps: int, rename: float) -> None:
    with pytest.raises(ValueError, match="must be at least 1, and from 0 to 1"):
        Laps(TRACE, laps, rename)
    with pytest.raises(ReplayError, match="must be at least 1, and from 0 to 1"):
        ReplayOptions(laps=laps, rename=rename)


# --- the clock ----------------------------------------------------------------------------------------------------


def test_skipped_minutes_wake_everybody_who_was_due_in_them_and_take_no_time() -> None:
    clock = SkippingClock()
    woken: list[int] = []

    async def beat() -> None:
        while True:
            await trio.sleep(60)
            woken.append(round(trio.current_time()))

    async def main() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            await trio.testing.wait_all_tasks_blocked()
            await clock.skip_to(305)
            now = trio.current_time()
            nursery.cancel_scope.cancel()
        return now

    assert 305 <= trio.run(main, clock=clock) < 315
    # One step of the clock is half a second: nobody oversleeps by more, however much is skipped.
    assert len(woken) == 5
    assert all(60 * beats <= at <= 60 * beats + 1 + beats / 2 for beats, at in enumerate(woken, start=1))


def test_a_time_that_is_over_is_no_skip() -> None:
    clock = SkippingClock()

    async def main() -> None:
        await clock.skip_to(10)
        await clock.skip_to(5)
        assert 10 <= trio.current_time() < 15

    trio.run(main, clock=clock)


def test_a_skip_that_is_cancelled_leaves_the_clock_where_it_is() -> None:
    clock = SkippingClock()

    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await clock.skip_to(100)
        assert trio.current_time() < 50

    trio.run(main, clock=clock)


# --- the playing --------------------------------------------------------------------------------------------------


def played(*tiers: TierSpec, laps: int = 4, **options: Any) -> ReplayReport:
    clock = SkippingClock()
    wanted = ReplayOptions(tiers=tiers, block_bytes=BLOCK, speed=1.0, skip_idle=True, laps=laps, **options)
    return trio.run(replay, TRACE, wanted, lambda done: None, None, "", clock, clock=clock)


MEMORY = TierSpec("memory", None, 60 * BLOCK)
STORE = TierSpec("maru", None, 60 * 4096)


@pytest.mark.parametrize("tiers", [[MEMORY], [STORE], [MEMORY, TierSpec("maru", None, math.inf)]], ids=str)
def test_laps_of_a_full_pool_leave_nothing(tiers: list[TierSpec]) -> None:
    report = played(*tiers)
    assert (report.laps, report.requests) == (4, 4 * len(TRACE))
    assert report.trace_time == 4 * len(TRACE)  # seconds
    assert (report.wrong, report.dropped, report.left_over) == (0, 0, {})
    assert 0 < report.hit_blocks < report.blocks
    assert len(report.resident_bytes) == 5
    assert report.wall_time < 60
    if len(tiers) == 1 and tiers[0] is MEMORY:
        assert report.evicted > 0


def test_what_is_kept_is_hit_in_the_next_lap_and_what_is_renamed_is_not() -> None:
    everything = TierSpec("memory", None, math.inf)
    all_new = played(everything, rename=1.0, laps=2)
    none_new = played(everything, rename=0.0, laps=2)
    half_new = played(everything, rename=0.5, laps=2)
    assert none_new.hit_blocks == all_new.hit_blocks + DIFFERENT
    assert half_new.hit_blocks == all_new.hit_blocks + DIFFERENT // 2
    assert (all_new.unique_blocks, none_new.unique_blocks) == (2 * DIFFERENT, DIFFERENT)
    assert half_new.stored == half_new.unique_blocks


def test_what_if_goes_over_all_laps() -> None:
    report = played(MEMORY, what_if=(1.0,))
    assert report.what_if["1x"] == report.hit_rate


def test_the_tally_says_what_the_list_would() -> None:
    times = [Played(4, 2, 0, 1, 0, 0.5, load, 0.25) for load in (0.0, 3.0, 2.0)]
    tally = Tally(5)
    for one in times:
        tally.add(one)
    assert (tally.requests, tally.blocks, tally.hit, tally.filtered) == (3, 12, 6, 3)
    assert (tally.lookup, tally.load) == (Percentiles(0.5, 0.5), Percentiles(2.0, 3.0))
    assert tally.request == Percentiles.of([one.time for one in times])
    assert Tally(2).load == Percentiles(0.0, 0.0)


# --- that a leak would be seen ------------------------------------------------------------------------------------


def test_a_lease_that_is_not_released_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []

    def forget(self: ThreadLease) -> None:
        forgotten.append(self)

    monkeypatch.setattr(ThreadLease, "release_nowait", forget)
    monkeypatch.setattr(ThreadLease, "release_from_thread", forget)
    report = played(TierSpec("memory", None, math.inf))
    assert report.left_over["memory: held"] > 0
    assert report.left_over["memory: not deleted"] == report.left_over["memory: not free"] > 0


def test_room_that_is_not_given_back_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth block that is deleted keeps its place."""
    deleted = MemoryTier.delete

    async def keep_some(self: MemoryTier, keys: Any) -> Any:
        return await deleted(self, [key for at, key in enumerate(keys) if at % 10])

    monkeypatch.setattr(MemoryTier, "delete", keep_some)
    assert set(played(MEMORY).left_over) == {"memory: not deleted", "memory: not free"}


def test_a_directory_of_the_callers_is_not_emptied(tmp_path: Path) -> None:
    report = played(TierSpec("file", str(tmp_path / "blocks"), 60 * 4096), laps=2)
    assert report.left_over == {}
    assert sum(one.is_file() for one in (tmp_path / "blocks").rglob("*.kv")) > 0


def test_the_audit_that_is_cancelled_says_nothing() -> None:
    async def main() -> None:
        tier = MemoryTier(8 * BLOCK, BLOCK)
        with trio.CancelScope() as scope:
            scope.cancel()
            await leaks.left_over({"memory": tier}, ReplayOptions(block_bytes=BLOCK), Laps(TRACE, 2, 0.8))
            raise AssertionError("it was cancelled")
        tier.close()

    trio.run(main)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": r.timestamp, "input_length": 1, "output_length": 1, "hash_ids": r.hash_ids})
        for r in TRACE
    ]
    path.write_text("\n".join(lines))
    return path


def invoke(*args: object) -> Any:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def test_the_command_plays_laps_and_says_how_long_they_are(trace_file: Path) -> None:
    done = invoke(trace_file, "--laps", 3, "--rename", 0.5, "--block-bytes", BLOCK, "--capacity", 60 * BLOCK)
    assert done.exit_code == 0, done.output
    for word in ("laps", "simulated", "0.06 hours", "left when all is over", "nothing"):
        assert word in done.output
    report = json.loads(invoke(trace_file, "--laps", 2, "--json").stdout)
    assert (report["laps"], report["trace_time"], report["left_over"]) == (2, 144.0, {})


def test_a_leak_fails_the_command(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leak(*args: object) -> dict[str, int]:
        return {"memory: held": 3}

    monkeypatch.setattr("offload._replay.session.left_over", leak)
    done = invoke(trace_file, "--laps", 2)
    assert done.exit_code == 1
    assert "at rest, memory: held: 3 blocks" in done.output


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--laps", "0"], "laps"),
        (["--rename", "1.5"], "rename"),
        (["--laps", "2", "--record", "x.scenario.toml"], "a scenario cannot repeat laps"),
    ],
)
def test_laps_that_cannot_be_are_said(trace_file: Path, args: list[str], complaint: str) -> None:
    done = invoke(trace_file, *args)
    assert done.exit_code in (1, 2)
    assert complaint in " ".join(done.output.split())


def test_to_skip_needs_a_pace() -> None:
    with pytest.raises(ReplayError, match="there is no idle time to skip"):
        ReplayOptions(skip_idle=True)


# --- the real trace -----------------------------------------------------------------------------------------------

REAL = os.environ.get("OFFLOAD_TRACE", "")


@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="OFFLOAD_TRACE is not set")
@pytest.mark.parametrize("tier", ["memory", "maru"])
def test_24_hours_of_a_full_pool_under_the_real_trace(tier: str) -> None:
    """25 laps of 59 minutes: nothing wrong, nothing left, and the memory of the last lap is that of the second."""
    args = [REAL, "--laps", "25", "--rename", "0.8", "--tier", tier, "--capacity", "64MiB", "--json"]
    done = subprocess.run([sys.executable, "-m", "offload", "replay", *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["trace_time"] >= 24 * 3_600
    assert (report["requests"], report["wrong"], report["dropped"], report["left_over"]) == (25 * 12_031, 0, 0, {})
    assert report["evicted"] > 1_000_000
    _, _, second, *_, last = report["resident_bytes"]
    assert last < second + (32 << 20)


def test_options_of_one_lap_are_those_of_before() -> None:
    assert attrs.evolve(ReplayOptions(), laps=1) == ReplayOptions()
    assert not ReplayOptions().skip_idle
