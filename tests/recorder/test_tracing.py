"""Live pipelines as a file for Perfetto, and as spans of OpenTelemetry."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

import offload
from backends.testing import FakeTier
from offload import NO_WAIT, ConfigError
from offload.opentelemetry import SpanInstrument
from offload.tracing import PerfettoTrace

KEYS = [b"key %d" % n for n in range(12)]


@pytest.fixture
def source():
    tier = FakeTier()
    tier.fill(KEYS)
    return tier


# --- Perfetto -------------------------------------------------------------------------------------------------------------


async def stored(source, trace, *, latency=0.5, error=None):
    """Three containers: one that waits for an event, one beside it, one that is cancelled."""
    host = FakeTier(latency=latency)
    host.faults.error = error
    async with offload.open_pipeline(source, host, instruments=[trace], name="main") as pipeline:
        event = trio.Event()
        first = await pipeline.enqueue(source.weak(KEYS[:8]), NO_WAIT)
        await pipeline.enqueue(source.weak(KEYS[8:11]), event)
        cancelled = await pipeline.enqueue(source.weak(KEYS[11:]), event)
        await trio.sleep(0.25)
        await cancelled.cancel()
        event.set()
        await first.wait()
        await pipeline.drain()


async def test_each_container_is_a_slice_with_its_stages_inside(autojump_clock, source):
    trace = PerfettoTrace()
    await stored(source, trace)
    slices = [event for event in trace.events() if event["ph"] == "X"]
    containers = {event["name"]: event for event in slices if event["cat"] == "container"}
    assert set(containers) == {"1 COMPLETE", "2 COMPLETE", "3 CANCELLED"}
    assert containers["1 COMPLETE"]["args"]["completed"] == 8
    stages = {event["name"]: event for event in slices if event["cat"] == "stage" and event["args"]["container"] == 2}
    assert set(stages) == {"admission", "awaiting", "batching", "transfer", "copy", "settlement"}
    assert stages["awaiting"]["dur"] == pytest.approx(2.5e5)
    for event in slices:
        if event["cat"] == "stage":
            whole = next(one for name, one in containers.items() if name.startswith(f"{event['args']['container']} "))
            assert event["tid"] == whole["tid"]
            assert whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 1e-3


async def test_slices_of_one_row_do_not_overlap_and_copies_have_rows_of_their_own(autojump_clock, source):
    trace = PerfettoTrace()
    await stored(source, trace)
    rows = {}
    for event in trace.events():
        if event["ph"] == "X" and event["cat"] != "stage":
            rows.setdefault((event["cat"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for (_, before), (after, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert before <= after + 1e-3
    copies = [event for event in trace.events() if event.get("cat") == "copy"]
    assert [event["dur"] for event in copies] == pytest.approx([5e5, 5e5])
    assert not {tid for cat, tid in rows if cat == "copy"} & {tid for cat, tid in rows if cat == "container"}


async def test_what_is_saved_is_a_trace_event_file(autojump_clock, source, tmp_path):
    trace = PerfettoTrace()
    await stored(source, trace)
    trace.save(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert saved["traceEvents"] == trace.events()
    names = {event["args"]["name"] for event in saved["traceEvents"] if event["ph"] == "M"}
    assert {"pipeline main", "copy 1", "containers 1"} <= names
    levels = [event["args"]["value"] for event in saved["traceEvents"] if event["ph"] == "C"]
    assert (max(levels), levels[-1]) == (3, 0)


async def test_only_the_latest_containers_are_kept(autojump_clock, source):
    trace = PerfettoTrace(most_containers=2)
    await stored(source, trace)
    assert len([event for event in trace.events() if event.get("cat") == "container"]) == 2
    with pytest.raises(ConfigError, match="most_containers"):
        PerfettoTrace(most_containers=0)


async def test_an_engine_has_a_process_for_each_pipeline_and_one_for_its_loads(autojump_clock, source):
    trace = PerfettoTrace()
    async with offload.open_engine(source, {"host": FakeTier(), "disk": FakeTier()}, instruments=[trace]) as engine:
        await (await engine.store(source.weak(KEYS[:2]), NO_WAIT)).wait()
    names = [event["args"]["name"] for event in trace.events() if event["name"] == "process_name"]
    assert names == ["pipeline host", "pipeline disk", "loads from host, disk"]


# --- spans ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    one = TracerProvider()
    one.add_span_processor(SimpleSpanProcessor(exporter))
    return one


def spans_of(exporter):
    finished = exporter.get_finished_spans()
    return [span for span in finished if span.name == "offload.store"], finished


async def test_a_container_is_a_span_with_its_stages_inside(autojump_clock, source, provider, exporter):
    await stored(source, SpanInstrument(provider))
    containers, finished = spans_of(exporter)
    ends = {span.attributes["kv_offload.container"]: span.attributes["kv_offload.status"] for span in containers}
    assert ends == {1: "complete", 2: "complete", 3: "cancelled"}
    (second,) = [span for span in containers if span.attributes["kv_offload.container"] == 2]
    stages = [span for span in finished if span.parent is not None and span.parent.span_id == second.context.span_id]
    assert [span.name for span in stages] == ["admission", "awaiting", "batching", "transfer", "copy", "settlement"]
    assert stages[0].start_time == second.start_time
    assert stages[-1].end_time == second.end_time
    assert all(before.end_time == after.start_time for before, after in pairwise(stages))


async def test_the_attributes_are_numbers_and_names(autojump_clock, source, provider, exporter):
    await stored(source, SpanInstrument(provider))
    (first,) = [span for span in spans_of(exporter)[0] if span.attributes["kv_offload.container"] == 1]
    assert dict(first.attributes) == {
        "kv_offload.pipeline": "main",
        "kv_offload.source": "device",
        "kv_offload.destination": "main",
        "kv_offload.container": 1,
        "kv_offload.status": "complete",
        "kv_offload.blocks": 8,
        "kv_offload.blocks.completed": 8,
        "kv_offload.blocks.filtered": 0,
        "kv_offload.blocks.failed": 0,
        "kv_offload.blocks.evicted": 0,
    }


async def test_a_span_is_linked_to_the_request_and_not_its_child(autojump_clock, source, provider, exporter):
    with provider.get_tracer("server").start_as_current_span("request") as request:
        await stored(source, SpanInstrument(provider))
    for span in spans_of(exporter)[0]:
        assert [link.context.span_id for link in span.links] == [request.get_span_context().span_id]
        assert span.parent is None
        assert span.context.trace_id != request.get_span_context().trace_id


async def test_a_cancel_is_an_event_of_the_span(autojump_clock, source, provider, exporter):
    await stored(source, SpanInstrument(provider))
    events = {
        span.attributes["kv_offload.container"]: [event.name for event in span.events] for span in spans_of(exporter)[0]
    }
    assert events == {1: [], 2: [], 3: ["cancel requested"]}


async def test_of_an_error_only_the_class_is_told(autojump_clock, source, provider, exporter):
    await stored(source, SpanInstrument(provider), error=OSError("key 1 could not be written"))
    (first,) = [span for span in spans_of(exporter)[0] if span.attributes["kv_offload.container"] == 1]
    assert first.status.status_code is StatusCode.ERROR
    assert (first.status.description, first.attributes["error.type"]) == ("TransferFailed", "TransferFailed")
    assert "key 1" not in first.to_json()


async def test_what_the_sampler_leaves_out_is_not_followed(autojump_clock, source):
    instrument = SpanInstrument(TracerProvider(sampler=ALWAYS_OFF))
    await stored(source, instrument)  # nothing is there to be looked at: no exporter, and nothing raised


def test_nothing_of_it_is_imported_with_the_package():
    code = "import sys, offload.tracing, offload.recorder; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
