"""What the metrics count of a scenario is what the scenario knows: of each run, from its trace and its outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import msgspec
import pytest

from offload.instruments import StageStatistics, StageTimes
from offload.testing.scenarios import TICK, Report, Scenario, generate, open_pipelines, play, read

STAGE_OF = {"admission": 0, "awaiting": 1, "batching": 2, "transfer": 3, "xfer_end": 4}
STAGES = ("admission", "awaiting", "batching", "transfer", "chain")
CATALOGUE = sorted(Path(__file__).parent.glob("up-*.scenario.toml"))


@attrs.define
class Measured:
    """Our own pipelines, with an instrument in each, and what they say of themselves at the end."""

    times: dict[str, StageTimes] = attrs.Factory(dict)
    told: dict[str, object] = attrs.Factory(dict)

    @asynccontextmanager
    async def open(self, world):
        pipelines = {}
        try:
            async with open_pipelines(world) as ours:
                pipelines = ours.pipelines
                for name, pipeline in pipelines.items():
                    self.times[name] = StageTimes()
                    pipeline.add_instrument(self.times[name])
                yield ours
        finally:  # some scenarios end with an error of their own
            self.told = {name: pipeline.statistics() for name, pipeline in pipelines.items()}


def times_by_the_trace(report: Report) -> dict[str, dict[str, float]]:
    """The time of all containers in each stage of each pipeline, in milliseconds."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(STAGES, 0.0))
    inside: dict[tuple[str, str], tuple[int, float]] = {}
    for moment in report.moments:
        if moment.kind != "hook" or moment.name not in (*STAGE_OF, "settled"):
            continue
        for label in moment.who:
            where = moment.where, label
            if where in inside:
                stage, since = inside.pop(where)
                seconds[moment.where][STAGES[stage]] += moment.at_ms - since
            elif moment.name != "admission":
                continue
            if moment.name != "settled":
                inside[where] = STAGE_OF[moment.name], moment.at_ms
    return seconds


def differences(measured: Measured, report: Report) -> list[str]:
    """What the instruments count and the run does not show, or the other way round."""
    found = []
    by_trace = times_by_the_trace(report)
    for name, times in measured.times.items():
        statistics = times.statistics()
        for stage, histogram in statistics.seconds.items():
            if histogram.total != by_trace[name][stage] * TICK:  # exact: a tick is a power of two
                found.append(f"{name}, {stage}: {histogram.total / TICK} ms, by the trace {by_trace[name][stage]}")
        found += against_the_pipeline(name, statistics, measured.told[name])
    return found + against_the_outcomes(measured, report)


def against_the_pipeline(name: str, statistics: StageStatistics, told) -> list[str]:
    ended = Counter()
    for (_, end), n in statistics.ended.items():
        ended[end] += n
    counted = {
        "complete": ended["complete"], "cancelled": ended["cancelled"], "failed": ended["failed"],
        "blocks_filtered": sum(statistics.filtered.values()), "blocks_evicted": statistics.evicted,
        "batches": sum(statistics.copies.counts),
    }  # fmt: skip
    return [f"{name}, {what}: {n}, {getattr(told, what)}" for what, n in counted.items() if n != getattr(told, what)]


def against_the_outcomes(measured: Measured, report: Report) -> list[str]:
    """Reasons, where no route leads on: then each container of the scenario is one of the pipeline's."""
    if any(spec.chain for spec in report.scenario.pipeline.values()):
        return []
    filtered: Counter[str] = Counter()
    for outcome in report.outcomes.values():
        filtered.update(outcome.filtered.values())
    counted: Counter[str] = Counter()
    for times in measured.times.values():
        counted.update(times.statistics().filtered)
    return [] if counted == filtered else [f"filtered: {dict(counted)}, by the outcomes {dict(filtered)}"]


def measure(scenario: Scenario) -> tuple[Measured, Report]:
    measured = Measured()
    return measured, play(scenario, factory=measured.open, base=Path(__file__).parent)


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.name.partition(".")[0])
def test_the_metrics_of_the_catalogue_are_what_happened(path: Path) -> None:
    measured, report = measure(read(path))
    assert differences(measured, report) == []


def test_the_metrics_of_random_programs_are_what_happened() -> None:
    for seed in range(60):
        program = generate(seed)
        # A clock that jumps in the middle of a hook shows one time to the trace, and another to the next instrument.
        faults = [fault for fault in program.fault if fault.do != "clock"]
        measured, report = measure(msgspec.structs.replace(program, fault=faults))
        assert differences(measured, report) == [], seed


def test_a_counter_that_is_one_too_high_is_found() -> None:
    measured, report = measure(generate(1))
    measured.times["main"]._filtered["on purpose"] = 1
    assert len(differences(measured, report)) == 1
