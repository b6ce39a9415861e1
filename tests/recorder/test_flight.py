"""What a flight recorder writes of pipelines and engines, and what that costs."""

import re
import signal
import subprocess
import sys

import pytest
import trio
import trio.testing

import offload
from backends.abc import Unproven
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from backends.testing import FakeTier
from offload import NO_WAIT, ConfigError
from offload._recorder.allowance import RESUME, SAVED, Allowance
from offload._recorder.records import (
    BatchReached,
    CancelRequested,
    Deleted,
    Enqueued,
    Loaded,
    LookedUp,
    Noted,
    Reached,
    Settled,
    Thinned,
)
from offload.recorder import FlightRecorder, read_ring

KEYS = [b"key %d" % n for n in range(4)]


@pytest.fixture
def recorder():
    with FlightRecorder(most_share=1.0) as one:
        yield one


@pytest.fixture
def source():
    tier = FakeTier()
    tier.fill(KEYS)
    return tier


def records(recorder, kind):
    return [entry.record for entry in recorder.recording().entries if isinstance(entry.record, kind)]


async def test_a_store_is_recorded_from_its_enqueue_to_its_end(autojump_clock, recorder, source):
    async with offload.open_pipeline(source, FakeTier(latency=0.5), instruments=[recorder], name="main") as pipeline:
        handle = await pipeline.enqueue(source.weak(KEYS), NO_WAIT)
        await handle.wait()
    kinds = [type(entry.record).__name__ for entry in recorder.recording().entries]
    assert kinds == ["Enqueued", *["BatchReached"] * 4, "Settled"]
    (enqueued,), (settled,) = records(recorder, Enqueued), records(recorder, Settled)
    assert (enqueued.number, enqueued.blocks, enqueued.size, enqueued.waits, len(enqueued.keys)) == (
        1,
        "weak",
        4,
        0,
        32,
    )
    assert (settled.status, settled.completed) == ("COMPLETE", 4)
    assert [one.event for one in records(recorder, BatchReached)] == [
        "transfer",
        "post_claim",
        "xfer_start",
        "xfer_end",
    ]
    times = {
        entry.record.event: entry.at for entry in recorder.recording().entries if type(entry.record) is BatchReached
    }
    assert times["xfer_end"] - times["xfer_start"] == pytest.approx(0.5)


async def test_no_key_is_in_a_recording(recorder, source, tmp_path):
    async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:
        await (await pipeline.enqueue(source.weak(KEYS), NO_WAIT)).wait()
    recorder.save(tmp_path / "saved")
    assert b"key" not in (tmp_path / "saved").read_bytes()
    assert b"key" not in bytes(recorder._ring.memory)


async def test_the_configuration_is_recorded(recorder, source):
    config = offload.PipelineConfig(budget_blocks=77)
    async with offload.open_pipeline(source, FakeTier(8), config=config, instruments=[recorder], name="main"):
        described = recorder.recording().description
    (pipeline,) = described.pipelines
    assert (pipeline.name, pipeline.source, pipeline.to) == ("main", "device", "main")
    assert (pipeline.knobs["budget_blocks"], pipeline.knobs["max_batch_size"]) == (77, 64)
    assert [(tier.name, tier.capacity, tier.block_bytes) for tier in described.tiers] == [
        ("device", 64, 64),
        ("main", 8, 64),
    ]


async def test_a_cancel_is_recorded_before_what_comes_of_it(recorder, source):
    async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:
        event = trio.Event()
        handle = await pipeline.enqueue(source.weak(KEYS), event)
        await trio.testing.wait_all_tasks_blocked()
        await handle.cancel()
        handle.request_cancel()  # after the end: nothing is asked for
    kinds = [type(entry.record) for entry in recorder.recording().entries]
    assert kinds == [Enqueued, Reached, CancelRequested, Settled]
    assert records(recorder, Enqueued)[0].waits


async def test_a_cancel_by_a_token_is_recorded_for_each_container(recorder, source):
    token = offload.CancellationToken()
    async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:
        for key in KEYS[:2]:
            await pipeline.enqueue(source.weak([key]), trio.Event(), cancel_token=token)
        await token.cancel()
    assert [one.number for one in records(recorder, CancelRequested)] == [1, 2]


async def test_stores_that_wait_for_the_same_have_the_same_number(recorder, source):
    event, other = trio.Event(), trio.Event()
    async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:
        for key, waits in zip(KEYS, (event, event, other, other), strict=True):
            await pipeline.enqueue(source.weak([key]), waits)
        event.set(), other.set()
        await pipeline.drain()
    first, second, third, fourth = [one.waits for one in records(recorder, Enqueued)]
    assert first == second != third == fourth


async def test_what_a_policy_filtered_and_what_was_evicted_is_recorded(recorder, source):
    def no(keys):
        return {KEYS[0]: "not this"}

    async with offload.open_pipeline(source, FakeTier(), policies=[no], instruments=[recorder]) as pipeline:
        event = trio.Event()
        handle = await pipeline.enqueue(source.weak(KEYS), event)
        await trio.testing.wait_all_tasks_blocked()
        source.pool.delete([KEYS[1]])
        event.set()
        await handle.wait()
    (settled,) = records(recorder, Settled)
    assert [(reason, len(column)) for reason, column in settled.filtered] == [("not this", 8)]
    assert (len(settled.evicted), settled.completed) == (8, 2)
    (enqueued,) = records(recorder, Enqueued)
    assert settled.evicted == enqueued.keys[8:16]


async def test_a_record_is_bounded_however_many_blocks_there_are(recorder):
    keys = [b"%d" % n for n in range(9_000)]
    source = FakeTier(len(keys))
    source.fill(keys)

    def no(keys):
        return {key: f"reason {at % 40} {'x' * 300}" for at, key in enumerate(keys)}

    config = offload.PipelineConfig(budget_blocks=10_000)
    options = {"config": config, "policies": [no], "instruments": [recorder]}
    async with offload.open_pipeline(source, FakeTier(), **options) as pipeline:
        await (await pipeline.enqueue(source.weak(keys), NO_WAIT)).wait()
    (enqueued,), (settled,) = records(recorder, Enqueued), records(recorder, Settled)
    assert (enqueued.size, len(enqueued.keys)) == (9_000, 2_048 * 8)
    assert (settled.size, len(settled.filtered)) == (9_000, 16)


async def test_a_recorder_that_cannot_watch_keeps_no_pipeline_from_opening(source, caplog):
    class Broken:
        def watch(self, opened):
            raise ValueError("broken on purpose")

    async with offload.open_pipeline(source, FakeTier(), instruments=[Broken()]) as pipeline:
        assert (await (await pipeline.enqueue(source.weak(KEYS), NO_WAIT)).wait()).completed
    assert "could not watch" in caplog.text


async def test_of_an_error_only_the_class_is_recorded(recorder, source):
    host = FakeTier()
    host.faults.error = OSError("key 1 could not be written")
    async with offload.open_pipeline(source, host, instruments=[recorder]) as pipeline:
        await (await pipeline.enqueue(source.weak(KEYS), NO_WAIT)).wait()
    (settled,) = records(recorder, Settled)
    assert settled.status == "FAILED"
    assert [text for text, _ in settled.failed] == ["TransferFailed/OSError"]


async def test_a_copy_without_a_proven_end_is_noted(recorder, source):
    class Unknown(Unproven, OSError):
        pass

    host = FakeTier()
    host.faults.error = Unknown("who knows")
    async with offload.open_pipeline(source, host, instruments=[recorder]) as pipeline:
        await (await pipeline.enqueue(source.weak(KEYS), NO_WAIT)).wait()
    assert [one.rule for one in records(recorder, Noted)] == ["unproven"]
    assert [text for text, _ in records(recorder, Settled)[0].failed] == ["DrainUnproven/Unproven"]


async def test_lookups_loads_and_deletions_of_an_engine_are_recorded(recorder, source):
    async with offload.open_engine(source, {"host": FakeTier()}, instruments=[recorder], shadow_check=0) as engine:
        await (await engine.store(source.weak(KEYS), NO_WAIT)).wait()
        async with await engine.lookup([*KEYS, b"another"]) as hit:
            await engine.load(hit, PagesDestination(new_pages(4, 64)))
        await engine.delete(KEYS[:1])
    (looked_up,), (loaded,), (deleted,) = [records(recorder, kind) for kind in (LookedUp, Loaded, Deleted)]
    assert (looked_up.asked, looked_up.segments) == (5, [("host", 4)])
    assert (loaded.asked, loaded.loaded) == (4, 4)
    assert deleted.keys == looked_up.keys[:8] == records(recorder, Enqueued)[0].keys[:8]


async def test_an_engine_is_described_with_its_tiers(recorder, source):
    async with offload.open_engine(source, {"host": FakeTier(), "disk": FakeTier()}, instruments=[recorder]):
        described = recorder.recording().description
    assert described.engine.tiers == ["host", "disk"]
    assert {one.name: one.chain for one in described.pipelines} == {"host": ["disk"], "disk": []}


# --- when something is wrong ----------------------------------------------------------------------------------------------


async def test_a_violation_saves_the_recording_and_at_most_eight_are_saved(tmp_path, source):
    with FlightRecorder(incidents=tmp_path, clock=lambda: 1.0) as recorder:
        for number in range(10):
            recorder.note("I3", f"number {number}")
        assert recorder.statistics().incidents == 8
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8
    (first,) = read_ring(files[0].read_bytes()).entries
    assert (first.record.rule, first.record.text) == ("I3", "number 0")


def test_an_exception_that_leaves_the_block_is_noted(tmp_path):
    with pytest.raises(ZeroDivisionError), FlightRecorder(tmp_path / "ring", clock=lambda: 0.0):
        1 // 0  # noqa: B018
    (entry,) = read_ring((tmp_path / "ring").read_bytes()).entries
    assert (entry.record.rule, entry.record.text) == ("exception", "ZeroDivisionError")


def test_an_exception_that_comes_when_no_trio_runs_leaves_the_block_as_it_is(tmp_path):
    async def record() -> float:
        recorder.note("I3")
        return trio.current_time()

    with pytest.raises(ZeroDivisionError), FlightRecorder(tmp_path / "ring") as recorder:
        before = trio.run(record)
        1 // 0  # noqa: B018
    first, last = read_ring((tmp_path / "ring").read_bytes()).entries
    assert last.record.text == "ZeroDivisionError"
    assert last.at == first.at <= before
    with pytest.raises(ZeroDivisionError), FlightRecorder(tmp_path / "another"):
        1 // 0  # noqa: B018
    (only,) = read_ring((tmp_path / "another").read_bytes()).entries
    assert (only.record.text, only.at) == ("ZeroDivisionError", 0.0)


def test_after_it_was_closed_nothing_is_recorded():
    recorder = FlightRecorder(clock=lambda: 0.0)
    recorder.close()
    recorder.close()
    recorder.note("I3")


KILLED = """
import os, signal, sys, trio, offload
from backends.testing import FakeTier
from offload.recorder import FlightRecorder

async def main():
    source = FakeTier()
    source.fill([b"%d" % n for n in range(40)])
    recorder = FlightRecorder(sys.argv[1], most_share=1.0)
    async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:
        for n in range(40):
            handle = await pipeline.enqueue(source.weak([b"%d" % n]), offload.NO_WAIT)
            await handle.wait()
            print(recorder.statistics().records, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main)
"""


def test_kill_9_loses_nothing_that_was_recorded(tmp_path):
    ring = tmp_path / "ring"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(ring)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    recording = read_ring(ring.read_bytes())
    assert recording.entries[-1].number == int(done.stdout.split()[-1])
    assert sum(isinstance(entry.record, Settled) for entry in recording.entries) == 40
    assert (recording.lost, recording.torn) == (0, False)


# --- what it may cost -----------------------------------------------------------------------------------------------------


def test_an_allowance_accrues_a_share_of_the_time_up_to_what_can_be_saved():
    allowance = Allowance(0.01, saved=0.0)
    assert allowance.pay(10.0, 0.0) == 0.0  # it begins
    assert allowance.pay(10.1, 0.0005) == pytest.approx(0.0005)
    assert allowance.pay(1_000.0, 0.0) == SAVED
    assert allowance.pay(1_000.0, SAVED + 0.001) == pytest.approx(-0.001)
    assert allowance.resumes_at(1_000.0) == pytest.approx(1_000.0 + (RESUME + 0.001) / 0.01)


@pytest.mark.parametrize("most_share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_is_a_share(most_share):
    with pytest.raises(ConfigError, match="most_share"):
        FlightRecorder(most_share=most_share)


async def test_what_costs_too_much_is_counted_and_details_come_back(autojump_clock, source):
    now = [100.0]
    recorder = FlightRecorder()
    recorder._timer = lambda: now[0]
    recorder._record_cost = 0.001  # the whole of what can be saved, twice
    async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:

        async def store(key):
            await (await pipeline.enqueue(source.weak([key]), NO_WAIT)).wait()

        await store(KEYS[0])
        assert recorder.statistics().thinned
        before = recorder.statistics().records
        await store(KEYS[1])
        await store(KEYS[2])
        assert recorder.statistics().records == before
        recorder._record_cost = 1e-6
        now[0] += 60.0
        await trio.sleep(60)  # nothing has to happen for that
        assert not recorder.statistics().thinned
        before = recorder.statistics().records
        await store(KEYS[3])
        assert recorder.statistics().records > before
    (thinned,) = records(recorder, Thinned)
    assert (thinned.seconds, thinned.containers) == (60.0, 2)
    assert recorder.statistics().thinned_containers == 2
    recorder.close()


def test_details_come_back_in_the_run_behind_the_one_in_which_they_cost_too_much(source):
    now = [100.0]
    with FlightRecorder() as recorder:
        recorder._timer = lambda: now[0]

        async def run(seconds):
            recorder._record_cost = 0.001
            async with offload.open_pipeline(source, FakeTier(), instruments=[recorder]) as pipeline:
                await (await pipeline.enqueue(source.weak(KEYS[:1]), NO_WAIT)).wait()
                now[0] += seconds
                await trio.sleep(seconds)
                return recorder.statistics().thinned

        assert trio.run(run, 0.0, clock=trio.testing.MockClock(autojump_threshold=0))
        assert not trio.run(run, 60.0, clock=trio.testing.MockClock(autojump_threshold=0))


def test_its_repr_says_where_it_records(tmp_path):
    assert repr(FlightRecorder(clock=lambda: 0.0)) == "<FlightRecorder in memory: 0 pipelines>"
    with FlightRecorder(tmp_path / "ring", clock=lambda: 0.0) as recorder:
        assert re.search(r"ring: 0 pipelines>$", repr(recorder))
