"""StageTimes: in virtual time the time in each stage is exact, and every container and block is counted where it ended."""

from __future__ import annotations

import pytest
import trio

import offload
from backends.testing import FakeTier
from offload.instruments import Histogram, StageTimes
from tests.support.engine_places import keys_of

SIZE = 64


class SlowPolicy(offload.abc.AsyncPolicy):
    """Answers after two seconds, and keeps the keys it was told back."""

    def __init__(self, rejected=()):
        self.rejected = rejected

    async def evaluate(self, keys):
        await trio.sleep(2)
        return {key: "too hot" for key in keys if key in self.rejected}


def patient(flush_interval: float = 0.0) -> offload.PipelineConfig:
    """A configuration that waits for a slow policy."""
    batches = offload.BatchConfig(flush_interval=flush_interval)
    return offload.PipelineConfig(policy_timeout=10.0, batch_config=batches)


def totals(times: StageTimes) -> dict[str, float]:
    return {stage: histogram.total for stage, histogram in times.statistics().seconds.items()}


def ended(times: StageTimes) -> dict[tuple[str, str], int]:
    return {where: n for where, n in times.statistics().ended.items() if n}


def of_one(value: float) -> Histogram:
    """The histogram of a single value."""
    times = StageTimes()
    times._copies.add(value)
    return times.statistics().copies


async def test_each_stage_has_the_time_that_a_container_was_in_it(autojump_clock):
    source, destination, times = FakeTier(), FakeTier(latency=3), StageTimes()
    keys = keys_of(4)
    source.fill(keys)
    ready = trio.Event()
    config = patient(flush_interval=1.0)
    async with offload.open_pipeline(
        source, destination, policies=[SlowPolicy()], config=config, instruments=[times]
    ) as pipeline:
        handle = await pipeline.enqueue(source.weak(keys), precondition=ready)
        await trio.sleep(7)  # two of them with the policy
        ready.set()
        await handle.wait()
    assert totals(times) == {"admission": 2, "awaiting": 5, "batching": 1, "transfer": 3, "chain": 0}
    assert times.statistics().copies == of_one(3)
    assert ended(times) == {("chain", "complete"): 1}


async def cancel_in(stage, times):
    """Cancel a container in that stage, and return its pipeline's time until then."""
    source, destination = FakeTier(), FakeTier()
    source.fill(keys_of(2))
    destination.faults.room = trio.Event()
    policies = [SlowPolicy()] if stage == "admission" else []
    condition = trio.Event() if stage == "awaiting" else offload.NO_WAIT
    config = patient(flush_interval=30.0 if stage == "batching" else 0.0)
    async with offload.open_pipeline(
        source, destination, policies=policies, config=config, instruments=[times]
    ) as pipeline:
        handle = await pipeline.enqueue(source.weak(keys_of(2)), precondition=condition)
        await trio.sleep(1)
        await handle.cancel()


@pytest.mark.parametrize("stage", ["admission", "awaiting", "batching", "transfer"])
async def test_a_cancelled_container_is_counted_in_the_stage_that_it_was_in(stage, autojump_clock):
    times = StageTimes()
    await cancel_in(stage, times)
    assert ended(times) == {(stage, "cancelled"): 1}
    assert totals(times)[stage] == 1
    assert times._inside == {}


async def test_blocks_are_counted_by_the_reason_for_which_they_are_not_stored(autojump_clock):
    source, destination, times = FakeTier(), FakeTier(), StageTimes()
    keys = keys_of(6)
    source.fill(keys[:5])
    destination.fill(keys[1:2])
    destination.faults.failing = {keys[2]: ValueError("on purpose")}
    policies = [offload.PresenceFilter(destination), SlowPolicy(rejected=keys[:1])]
    async with offload.open_pipeline(
        source, destination, policies=policies, config=patient(), instruments=[times]
    ) as pipeline:
        handle = await pipeline.enqueue(source.weak(keys), precondition=offload.NO_WAIT)
        result = await handle.wait()
    statistics = times.statistics()
    assert statistics.filtered == {"too hot": 1, "present": 1}
    assert statistics.failed == {type(result.failed[keys[2]]).__name__: 1}
    assert statistics.evicted == 1  # the sixth was never in the source


async def test_a_precondition_that_fails_takes_all_its_blocks_with_it(autojump_clock):
    source, destination, times = FakeTier(), FakeTier(), StageTimes()
    source.fill(keys_of(3))

    async def fail():
        raise ValueError("the forward pass crashed")

    async with offload.open_pipeline(source, destination, instruments=[times]) as pipeline:
        handle = await pipeline.enqueue(source.weak(keys_of(3)), precondition=fail)
        await handle.wait()
    assert times.statistics().failed == {"PreconditionFailed": 3}
    assert ended(times) == {("awaiting", "failed"): 1}


def test_a_histogram_counts_a_value_at_its_bound_and_one_above_all_of_them():
    assert of_one(0.1).counts[of_one(0.1).bounds.index(0.1)] == 1
    assert of_one(1e9).counts[-1] == 1


async def test_reasons_that_nobody_bounds_are_counted_together(autojump_clock):
    source, destination, times = FakeTier(256), FakeTier(256), StageTimes()
    keys = keys_of(100)
    source.fill(keys)

    def refuse(asked):
        return {key: f"reason {key.hex()}" for key in asked}

    async with offload.open_pipeline(source, destination, policies=[refuse], instruments=[times]) as pipeline:
        await (await pipeline.enqueue(source.weak(keys), precondition=offload.NO_WAIT)).wait()
    filtered = times.statistics().filtered
    assert (len(filtered), filtered["other"], sum(filtered.values())) == (65, 36, 100)


async def test_added_while_containers_are_inside_it_counts_their_ends(autojump_clock):
    source, destination, times = FakeTier(), FakeTier(), StageTimes()
    source.fill(keys_of(1))
    ready = trio.Event()
    async with offload.open_pipeline(source, destination) as pipeline:
        handle = await pipeline.enqueue(source.weak(keys_of(1)), precondition=ready)
        await trio.testing.wait_all_tasks_blocked()
        pipeline.add_instrument(times)
        ready.set()
        await handle.wait()
    assert sum(ended(times).values()) == 1
    assert sum(totals(times).values()) == 0


async def test_what_is_inside_is_listed_from_the_oldest_on(autojump_clock):
    source, destination, times = FakeTier(), FakeTier(), StageTimes()
    keys = keys_of(3)
    source.fill(keys)
    ready = trio.Event()
    async with offload.open_pipeline(
        source, destination, policies=[SlowPolicy()], config=patient(), instruments=[times]
    ) as pipeline:
        for key in keys:
            await pipeline.enqueue(source.weak([key]), precondition=ready)
            await trio.sleep(1.5)
        listed = [(one.container.number, one.stage, one.seconds, one.age) for one in times.inside(2)]
        assert listed == [(1, "awaiting", 2.5, 4.5), (2, "awaiting", 1.0, 3.0)]
        ready.set()
    assert times.inside(10) == []
