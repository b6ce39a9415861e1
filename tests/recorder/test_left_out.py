"""Blocks that are left to be computed, in the flight recorder, in traces, and in the scenario of an incident."""

from itertools import pairwise

import msgspec
import pytest
import trio
import trio.testing
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import offload
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from backends.testing import FakeTier, PacedTier
from offload import NO_WAIT, EngineConfig, LoadOrRecompute
from offload._recorder.records import Loaded, LookedUp, decode, encode
from offload._recorder.show import lines_of
from offload.opentelemetry import SpanInstrument
from offload.recorder import FlightRecorder
from offload.testing.scenarios import Expect, check, from_incident, play, read_text, to_toml
from offload.tracing import PerfettoTrace

KEYS = [b"key %d" % n for n in range(64)]
BLOCK = 0.005
"""Seconds in which a block is computed."""


def expecting(scenario, **figures):
    return msgspec.structs.replace(scenario, expect=[Expect(metric={"slow": figures})])


async def read(engine):
    async with await engine.lookup(KEYS) as hit:
        pages = new_pages(max(1, len(hit)), engine.source.block_bytes)
        return await engine.load(hit, PagesDestination(pages)) if len(hit) else None


async def decided_against(instrument):
    """A tier that is fast at first and hangs behind half of a load; then it is slow, and nothing is loaded from it."""
    source, tier = FakeTier(), PacedTier(FakeTier(latency=0.004), seconds_per_block=BLOCK / 2)
    source.fill(KEYS)
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=BLOCK, probe_interval=0.2)
    config = EngineConfig(tiers={"slow": tier}, shadow_check=0, load_or_recompute=choice)

    async def collapse():
        await trio.sleep(30.25 * tier.seconds_per_block)
        tier.seconds_per_block = float("inf")

    async with offload.open_engine(source, config, instruments=[instrument]) as engine:
        assert (await (await engine.store(source.weak(KEYS), NO_WAIT)).wait()).completed == tuple(KEYS)
        tier.inner.latency = 0.0
        while not ((rate := engine.statistics().load_or_recompute.load_rates.get("slow")) and rate.is_settled):
            await read(engine)
            await trio.sleep(0.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collapse)
            given_up = await read(engine)
        tier.seconds_per_block = 3 * BLOCK
        while (rate := engine.statistics().load_or_recompute.load_rates["slow"]).is_suspect or not rate.is_settled:
            await read(engine)
            await trio.sleep(0.5)
        cut = await engine.lookup(KEYS)
        await cut.__aexit__(None, None, None)
        return given_up.left_out, cut.left_out


def recorded():
    with FlightRecorder(most_share=1.0) as recorder:
        clock = trio.testing.MockClock(autojump_threshold=0)
        given_up, cut = trio.run(decided_against, recorder, clock=clock)
        return recorder.recording(), given_up, cut


def test_a_recording_says_where_and_why_a_load_was_given_up_and_both_estimates():
    recording, given_up, cut = recorded()
    assert (given_up.why, cut.why) == ("late", "recompute")
    records = [entry.record for entry in recording.entries]
    (late,) = [
        one.left
        for one in records
        if isinstance(one, Loaded) and one.left and one.left.why == "late" and one.loaded > 20
    ]
    assert (late.tier, late.start, late.blocks) == ("slow", given_up.start, given_up.blocks)
    last = [one for one in records if isinstance(one, LookedUp)][-1]
    assert (last.segments, last.left.why, last.left.blocks) == ([], "recompute", 64)
    assert last.left.load_seconds == pytest.approx(cut.load_seconds)
    assert last.left.recompute_seconds == pytest.approx(64 * BLOCK)
    lines = "\n".join(lines_of(recording, recording.entries))
    assert f"given up as late, {given_up.blocks} from position {given_up.start} (slow) left to be computed" in lines
    assert "64 from position 0 (slow) left to be computed: loading 960 ms, computing 320 ms" in lines
    assert recording.description.engine.load_or_recompute["mode"] == "enforce"


def test_a_recording_without_these_fields_is_read_as_before():
    old = encode(LookedUp(b"", 0, []))[:-1]  # without the last field, which is nil
    assert decode(bytes([old[0] - 1]) + old[1:]) == LookedUp(b"", 0, [])


def test_a_scenario_of_it_leaves_blocks_out_again():
    scenario = from_incident(recorded()[0])
    assert check(scenario) == []
    assert read_text(to_toml(scenario), "it") == scenario
    assert scenario.engine.recompute_ms == pytest.approx(BLOCK * 1e3, rel=0.01)
    (slow,) = [fault for fault in scenario.fault if fault.do == "slow_loads"]  # from the load that hung until the end
    assert (slow.tier, slow.at_ms) == ("slow", scenario.step[2].at_ms - 1)
    assert slow.at_ms + slow.for_ms > scenario.step[-1].at_ms
    report = play(expecting(scenario, given_up=1, cut_blocks=2 * 64))  # as it was recorded
    assert report.violations == ()
    assert (report.counts["loaded"], report.counts["missed"]) == (64, 3 * 64)


def test_without_load_or_recompute_the_same_scenario_loads_everything():
    scenario = from_incident(recorded()[0])
    off = msgspec.structs.replace(scenario, engine=msgspec.structs.replace(scenario.engine, recompute_ms=0.0))
    assert play(expecting(off, given_up=0, cut_blocks=0)).violations == ()


async def test_a_trace_shows_where_and_why_a_load_was_given_up(autojump_clock):
    trace = PerfettoTrace()
    given_up, cut = await decided_against(trace)
    events = trace.events()
    loads = [event for event in events if event.get("cat") == "load"]
    (late,) = [
        event for event in loads if event["args"].get("why") == "late" and event["args"]["start"] == given_up.start
    ]
    assert late["name"] == f"{given_up.start} of 64 loaded, given up: late"
    assert late["args"]["tier"] == "slow" and late["args"]["recompute_seconds"] == given_up.recompute_seconds
    assert late["dur"] > 30 * BLOCK / 2 * 1e6
    assert {"64 of 64 loaded"} < {event["name"] for event in loads}
    marks = [event for event in events if event.get("cat") == "lookup"]
    assert marks[-1]["ph"] == "i" and marks[-1]["name"] == "64 left to be computed"
    assert marks[-1]["args"]["text"] == str(cut)
    for row in {event["tid"] for event in loads}:
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in loads if event["tid"] == row)
        assert all(before <= after + 1e-3 for (_, before), (after, _) in pairwise(spans))


async def test_spans_of_loads_are_in_the_request_and_say_where_and_why_one_was_given_up(autojump_clock):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("server").start_as_current_span("request") as request:
        given_up, cut = await decided_against(SpanInstrument(provider))
    spans = exporter.get_finished_spans()
    loads = [span for span in spans if span.name == "offload.load"]
    assert {span.parent.span_id for span in loads} == {request.get_span_context().span_id}
    told = [
        dict(event.attributes) for span in loads for event in span.events if event.name == "blocks left to be computed"
    ]
    assert given_up.start in [one["kv_offload.start"] for one in told]
    assert {one["kv_offload.why"] for one in told} <= {"late", "slower"}
    (outer,) = [span for span in spans if span.name == "request"]
    last = dict(outer.events[-1].attributes)
    assert last["kv_offload.why"] == "recompute"
    assert last["kv_offload.load_seconds"] == pytest.approx(cut.load_seconds)
