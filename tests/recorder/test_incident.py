"""A scenario of a flight recording does what was recorded, and ``offload incident`` saves and prints it."""

import json

import pytest
import trio
import trio.testing
from click.testing import CliRunner

import offload
from backends.abc import Unproven
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from backends.testing import FakeTier
from offload import NO_WAIT
from offload._recorder.recording import read_ring, to_bytes
from offload._recorder.records import BatchReached, CancelRequested, Enqueued, Noted, Settled, Thinned
from offload._recorder.show import lines_of, summary_of
from offload.cli import main
from offload.recorder import FlightRecorder
from offload.testing.scenarios import NothingRecorded, check, from_incident, play, read_text, to_toml

KEYS = [b"key %d" % n for n in range(24)]


@pytest.fixture
def source():
    tier = FakeTier()
    tier.fill(KEYS)
    return tier


@pytest.fixture
def recorder():
    with FlightRecorder(most_share=1.0) as one:
        yield one


def in_virtual_time(live):
    return trio.run(live, clock=trio.testing.MockClock(autojump_threshold=0))


def scenario_of(recorder, **options):
    scenario = from_incident(recorder.recording(), **options)
    assert check(scenario) == []
    assert read_text(to_toml(scenario), "it") == scenario
    return scenario


def statuses(report):
    return {label: outcome.status for label, outcome in report.outcomes.items()}


def test_containers_end_as_they_were_recorded(recorder, source):
    async def live():
        host = FakeTier(latency=0.005)
        async with offload.open_pipeline(source, host, instruments=[recorder], name="main") as pipeline:
            event = trio.Event()
            handles = [await pipeline.enqueue(source.weak(KEYS[:2]), NO_WAIT)]
            handles.append(await pipeline.enqueue(source.strong(KEYS[2:4]), event))
            handles.append(await pipeline.enqueue(source.weak(KEYS[4:6]), trio.Event()))
            await trio.sleep(0.03)
            handles[2].request_cancel()
            event.set()
            await handles[1].wait()
            host.faults.failing = {KEYS[6]: OSError("one block")}
            handles.append(await pipeline.enqueue(source.weak(KEYS[6:8]), NO_WAIT))
            await handles[3].wait()
        return [handle.status.name for handle in handles]

    ended = in_virtual_time(live)
    report = play(scenario_of(recorder))
    assert report.good, report.violations
    assert statuses(report) == {f"c{n}": status for n, status in enumerate(ended, 1)}
    assert set(statuses(report).values()) == {"COMPLETE", "CANCELLED", "FAILED"}
    assert [len(report.outcomes["c4"].completed), len(report.outcomes["c4"].failed)] == [1, 1]


def test_copies_take_as_long_as_they_did(recorder, source):
    async def live():
        host = FakeTier(latency=0.01)
        async with offload.open_pipeline(source, host, instruments=[recorder], name="main") as pipeline:
            for at in range(0, 12, 2):
                host.latency = 0.08 if at == 10 else 0.01
                await (await pipeline.enqueue(source.weak(KEYS[at : at + 2]), NO_WAIT)).wait()

    in_virtual_time(live)
    scenario = scenario_of(recorder)
    assert scenario.tier["main"].latency_ms == 10
    assert [(fault.do, fault.of, fault.ms) for fault in scenario.fault] == [("delay", "c6", 70)]


def test_what_was_evicted_from_the_source_is_evicted_again(recorder, source):
    async def live():
        async with offload.open_pipeline(source, FakeTier(), instruments=[recorder], name="main") as pipeline:
            event = trio.Event()
            handle = await pipeline.enqueue(source.weak(KEYS[:3]), event)
            await trio.testing.wait_all_tasks_blocked()
            source.pool.delete([KEYS[1]])
            event.set()
            await handle.wait()

    in_virtual_time(live)
    report = play(scenario_of(recorder))
    assert report.good, report.violations
    assert report.outcomes["c1"].evicted == (b"k1",)


def test_an_unproven_end_is_unproven_again(recorder, source):
    async def live():
        class Unknown(Unproven, OSError):
            pass

        host = FakeTier()
        host.faults.error = Unknown("who knows")
        async with offload.open_pipeline(source, host, instruments=[recorder], name="main") as pipeline:
            await (await pipeline.enqueue(source.weak(KEYS[:3]), NO_WAIT)).wait()

    in_virtual_time(live)
    report = play(scenario_of(recorder))
    assert report.outcomes["c1"].error == "DrainUnproven"


def test_filters_filter_again_and_present_blocks_are_held(recorder, source):
    async def live():
        host = FakeTier()
        host.fill(KEYS[:1])

        def no(keys):
            return {key: "not this" for key in keys if key == KEYS[1]}

        policies = [offload.PresenceFilter(host), no]
        async with offload.open_pipeline(
            source, host, policies=policies, instruments=[recorder], name="main"
        ) as pipeline:
            await (await pipeline.enqueue(source.weak(KEYS[:3]), NO_WAIT)).wait()

    in_virtual_time(live)
    scenario = scenario_of(recorder)
    assert scenario.tier["main"].holds == "k0"
    report = play(scenario)
    assert report.outcomes["c1"].filtered == {b"k0": "present", b"k1": "not this"}


def test_lookups_become_loads_that_hold_as_long(recorder, source):
    async def live():
        async with offload.open_engine(source, {"host": FakeTier()}, instruments=[recorder], shadow_check=0) as engine:
            await (await engine.store(source.weak(KEYS[:3]), NO_WAIT)).wait()
            async with await engine.lookup(KEYS[:4]) as hit:
                await trio.sleep(0.02)
                await engine.load(hit, PagesDestination(new_pages(3, 64)))
            await engine.delete(KEYS[:1])

    in_virtual_time(live)
    scenario = scenario_of(recorder)
    assert scenario.engine is None
    (load,) = [step.load for step in scenario.step if step.load is not None]
    assert (load.keys, load.tier) == ("k{0..2}", "host")
    assert load.hold_ms >= 20
    report = play(scenario)
    assert report.good, report.violations
    assert report.counts["loaded"] >= 3


def test_an_engine_that_promotes_is_played_as_an_engine(recorder, source):
    async def live():
        tiers = {"host": FakeTier(), "disk": FakeTier()}
        async with offload.open_engine(source, tiers, instruments=[recorder], promote=True, shadow_check=0) as engine:
            await (await engine.store(source.weak(KEYS[:3]), NO_WAIT)).wait()
            await tiers["host"].delete(KEYS[:3])
            async with await engine.lookup(KEYS[:3]) as hit:
                await engine.load(hit, PagesDestination(new_pages(3, 64)))
            await engine.drain()

    in_virtual_time(live)
    scenario = scenario_of(recorder)
    assert scenario.engine is not None
    assert (scenario.engine.tiers, scenario.engine.promote) == (["host", "disk"], True)
    report = play(scenario)
    assert report.good, report.violations


def test_what_a_chain_was_fed_is_not_stored_by_a_user(recorder, source):
    async def live():
        async with offload.open_engine(
            source, {"host": FakeTier(), "disk": FakeTier()}, instruments=[recorder]
        ) as engine:
            await (await engine.store(source.weak(KEYS[:3]), NO_WAIT)).wait()

    in_virtual_time(live)
    scenario = scenario_of(recorder)
    assert [step.store.id for step in scenario.step if step.store is not None] == ["c1"]
    report = play(scenario)
    assert report.good, report.violations
    assert report.counts["copied"] == 6


def test_only_the_last_seconds_are_played_if_that_is_asked_for(recorder, source):
    async def live():
        async with offload.open_pipeline(source, FakeTier(), instruments=[recorder], name="main") as pipeline:
            for at in range(3):
                await (await pipeline.enqueue(source.weak(KEYS[at : at + 1]), NO_WAIT)).wait()
                await trio.sleep(10)
            await (await pipeline.enqueue(source.weak(KEYS[5:6]), NO_WAIT)).wait()

    in_virtual_time(live)
    scenario = scenario_of(recorder, last=5)
    assert [step.store.id for step in scenario.step if step.store is not None] == ["c4"]


def test_of_nothing_no_scenario_is_made():
    with FlightRecorder(clock=lambda: 0.0) as recorder, pytest.raises(NothingRecorded):
        from_incident(recorder.recording())


def run_offload(*words, code=0):
    done = CliRunner().invoke(main, list(words), prog_name="offload")
    assert done.exit_code == code, done.output
    return done.output


# --- commands -------------------------------------------------------------------------------------------------------------


async def recorded(path, source):
    with FlightRecorder(path, most_share=1.0) as recorder:
        async with offload.open_pipeline(source, FakeTier(), instruments=[recorder], name="main") as pipeline:
            await (await pipeline.enqueue(source.weak(KEYS[:3]), NO_WAIT)).wait()
        recorder.note("I3", "seen by a test")


def test_a_ring_is_saved_shown_and_made_a_scenario_of(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trio.run(recorded, "ring", source)
    assert "saved it.incident: 7 records" in run_offload("incident", "save", "ring", "--out", "it.incident")
    shown = run_offload("incident", "show", "it.incident")
    assert "pipeline main: device -> main" in shown
    assert "main#1 enqueued: 3 weak blocks" in shown
    assert "main#1 COMPLETE: 3 of 3" in shown
    assert "NOTED I3: seen by a test" in shown
    documents = [json.loads(line) for line in run_offload("incident", "show", "it.incident", "--json").splitlines()]
    assert [one["kind"] for one in documents[1:]] == ["Enqueued", *["BatchReached"] * 4, "Settled", "Noted"]
    made = run_offload("scenario", "from-incident", "it.incident")
    assert "saved it.scenario.toml: 1 step, 0 faults" in made
    assert "ok  from it.incident" in run_offload("scenario", "run", "it.scenario.toml")


def test_something_else_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("no recording")
    told = run_offload("incident", "show", str(tmp_path / "text"), code=2)
    assert "is not a flight recording" in told
    assert "cannot be read" in run_offload("incident", "save", str(tmp_path / "nothing"), code=2)
    with FlightRecorder(clock=lambda: 0.0) as recorder:
        recorder.save(tmp_path / "empty")
    told = run_offload("scenario", "from-incident", str(tmp_path / "empty"), code=2)
    assert "nothing can be replayed" in told


def test_each_kind_of_record_has_a_line():
    with FlightRecorder(clock=lambda: 0.0) as recorder:
        for record in (
            Enqueued(3, 1, "strong", 2, 7, bytes(48)),
            BatchReached(0, "xfer_start", [1, 2]),
            CancelRequested(0, 1),
            Settled(0, 1, "FAILED", 3, 1, "TransferFailed", [("no", bytes(8))], [("OSError", bytes(8))], bytes(8)),
            Noted("I1", ""),
            Thinned(1.5, 1_000, 10),
        ):
            recorder._write(record, 0)
        recording = recorder.recording()
        lines = [line.partition("  ")[2] for line in lines_of(recording, recording.entries)]
    assert lines == [
        "pipeline 3#1 enqueued: 2 strong blocks, with a precondition [0000000000000000 0000000000000000 0000000000000000 "
        "0000000000000000 ...]",
        "pipeline 0 xfer_start: 1, 2",
        "pipeline 0#1 cancel requested",
        "pipeline 0#1 FAILED: 1 of 3, 1 filtered (no), 1 failed (OSError), 1 evicted, TransferFailed",
        "NOTED I1",
        "counted only, for 1.5 s: 1,000 containers in 10 batches",
    ]
    assert summary_of(recording).startswith("6 records of 0 s by process ")
    assert read_ring(to_bytes(recording)) == recording
