"""Metrics: every counter of the statistics is a series, each is there from the start at 0, and a run's are what happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from backends.base.slots import PagesDestination
from backends.testing import FakeTier, PacedTier
from offload import (
    NO_WAIT,
    ChoiceStatistics,
    ComputeRate,
    Engine,
    EngineConfig,
    EngineStatistics,
    Health,
    HealthState,
    LoadOrRecompute,
    LoadRate,
    SpillStatistics,
    open_engine,
)
from offload.instruments import StageTimes
from offload.metrics import FAILED_BY, FILTER_REASONS, PREFIX, ConfigCollector, EngineCollector, StageCollector
from tests.support.engine_places import keys_of

SIZE = 64
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(statistics: EngineStatistics) -> Series:
    """What a scraper reads: the text format, through prometheus_client's own parser."""
    return read(EngineCollector(lambda: statistics))


def read(collector: EngineCollector | StageCollector | ConfigCollector) -> Series:
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    series = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(series) == len(samples)
    return series


def of(series: Series, name: str, **labels: str) -> float:
    return series[PREFIX + name, frozenset(labels.items())]


async def snapshot(**options: Any) -> EngineStatistics:
    async with open_engine(FakeTier(64, SIZE), [FakeTier(64, SIZE), FakeTier(64, SIZE)], **options) as engine:
        return engine.statistics()


def changed(statistics: Any) -> Iterator[tuple[str, Any]]:
    """The snapshot once for each number in it, with that number one larger, at any depth."""
    for field in attrs.fields(type(statistics)):
        value = getattr(statistics, field.name)
        if type(value) is int:
            yield field.name, attrs.evolve(statistics, **{field.name: value + 1})
        elif attrs.has(type(value)):
            for name, inner in changed(value):
                yield f"{field.name}.{name}", attrs.evolve(statistics, **{field.name: inner})
        elif isinstance(value, Mapping) and any(attrs.has(type(one)) for one in value.values()):
            for key, one in value.items():
                for name, inner in changed(one):
                    yield f"{field.name}[{key}].{name}", attrs.evolve(statistics, **{field.name: {**value, key: inner}})
        elif isinstance(value, Mapping):
            yield field.name, attrs.evolve(statistics, **{field.name: {**value, "a reason": 7}})


async def test_every_number_of_the_statistics_is_a_series() -> None:
    choice = ChoiceStatistics(load_rates={"faketier": LoadRate(0.1, 0.2, 0.5, 4)}, compute_rate=ComputeRate(0.3))
    statistics = attrs.evolve(await snapshot(), spills={"down": SpillStatistics(0, 0, 0, {})}, load_or_recompute=choice)
    before = scrape(statistics)
    silent = [name for name, other in changed(statistics) if scrape(other) == before]
    assert silent == []


async def test_every_series_exists_at_0_from_the_start() -> None:
    series = scrape(await snapshot())
    assert {value for (name, _), value in series.items() if name.endswith("_total")} == {0}
    for reason in ("duplicate", "full", "busy", "gone", "unavailable", "failed", "closed"):
        assert of(series, "promotions_refused_total", reason=reason) == 0
    for stage in ("admission", "awaiting", "batching", "transfer", "chain"):
        assert of(series, "pipeline_stage_containers", pipeline="faketier", stage=stage) == 0
    for reason in ("gone", "damaged", "mismatch", "withheld", "failed", "given up"):
        assert of(series, "load_failures_total", reason=reason) == 0
    for tier in ("faketier", "faketier-2"):
        assert of(series, "tier_missed_total", tier=tier, reason="damaged") == 0
        assert of(series, "load_faults_total", tier=tier) == 0
        assert of(series, "load_seconds_per_block", tier=tier) == of(series, "load_seconds_fixed", tier=tier) == 0
        assert of(series, "tier_hit_tokens_total", tier=tier) == 0
    for advice in ("load", "part", "recompute", "unknown"):
        assert of(series, "advised_lookups_total", advice=advice) == 0
    for reason in ("late", "slower"):
        assert of(series, "given_up_loads_total", reason=reason) == 0
    assert of(series, "recompute_seconds_per_block") == of(series, "cut_blocks_total") == 0


async def test_what_loading_takes_stands_beside_what_computing_takes(autojump_clock: object) -> None:
    inner, keys = FakeTier(64, SIZE), keys_of(8)
    inner.fill(keys)
    tiers = {"tier": PacedTier(inner, seconds_per_block=0.3)}
    choice = LoadOrRecompute(mode="enforce")
    config = EngineConfig(tiers=tiers, chain=False, load_or_recompute=choice)  # type: ignore[arg-type]
    async with open_engine(FakeTier(64, SIZE), config) as engine:
        async with await engine.lookup(keys) as hit:
            await engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in keys]))
        engine.computed(8, 0.8)
        for _ in range(2):
            assert len(await engine.lookup(keys)) == 0
        await trio.sleep(0.5)  # a probe is under way
        series = scrape(engine.statistics())
    assert of(series, "load_seconds_per_block", tier="tier") == pytest.approx(0.3)
    assert of(series, "recompute_seconds_per_block") == pytest.approx(0.1)
    assert of(series, "advised_lookups_total", advice="unknown") == 1
    assert of(series, "advised_lookups_total", advice="recompute") == 2
    assert of(series, "cut_blocks_total") == 16
    assert of(series, "hit_blocks_total") == 24
    assert of(series, "tier_hit_blocks_total", tier="tier") == 8  # what is computed instead is no hit of a tier
    assert of(series, "load_observations", tier="tier") == 2  # the first load of the probe, too


@pytest.mark.parametrize("state", HealthState)
async def test_a_breaker_is_in_one_state(state: HealthState) -> None:
    health = {"faketier": Health(state, 0.0, 3, "timeout", None)}
    series = scrape(attrs.evolve(await snapshot(), health=health))
    for other in HealthState:
        assert of(series, "breaker_state", tier="faketier", state=other.name.lower()) == (other is state)
    assert of(series, "breaker_faults", tier="faketier") == 3


async def test_series_say_what_happened(autojump_clock: object) -> None:
    source, upper, lower = FakeTier(64, SIZE), FakeTier(64, SIZE), FakeTier(64, SIZE)
    keys = keys_of(10)
    source.fill(keys[:4])
    lower.fill(keys[4:6])
    async with open_engine(source, [upper, lower], promote=False) as engine:
        await run_four_stores_and_one_load(engine, source, keys)
        series = scrape(engine.statistics())
    told = {
        "lookups_total": 1, "asked_blocks_total": 10, "hit_blocks_total": 6, "loads_total": 1, "loaded_blocks_total": 6,
        "open_hits": 0, "promoted_blocks_total": 0, "quarantined": 0,
    }  # fmt: skip
    assert {name: of(series, name) for name in told} == told
    assert of(series, "pipeline_enqueued_total", pipeline="faketier") == 1
    assert of(series, "pipeline_settled_total", pipeline="faketier", status="complete") == 1
    assert of(series, "pipeline_blocks_total", pipeline="faketier", outcome="completed") == 4
    assert of(series, "pipeline_copied_bytes_total", pipeline="faketier") == 4 * SIZE
    assert of(series, "tier_loaded_total", tier="faketier") == 4
    assert of(series, "tier_loaded_total", tier="faketier-2") == 2


async def test_hits_are_told_by_the_tier_they_come_from_in_blocks_and_in_tokens(autojump_clock: object) -> None:
    source, upper, lower = FakeTier(64, SIZE), FakeTier(64, SIZE), FakeTier(64, SIZE)
    keys = keys_of(10)
    source.fill(keys[:4])
    lower.fill(keys[4:6])
    config = EngineConfig(source=source, tiers={"host": upper, "disk": lower}, chain="none", block_tokens=16)
    async with open_engine(config) as engine:
        await run_four_stores_and_one_load(engine, source, keys)
        statistics = engine.statistics()
    assert statistics.hits_by_tier == {"host": 4, "disk": 2}
    assert sum(statistics.hits_by_tier.values()) == statistics.hit_blocks
    series = scrape(statistics)
    assert [of(series, "tier_hit_blocks_total", tier=tier) for tier in ("host", "disk")] == [4, 2]
    assert [of(series, "tier_hit_tokens_total", tier=tier) for tier in ("host", "disk")] == [64, 32]
    assert (of(series, "asked_tokens_total"), of(series, "block_tokens")) == (160, 16)


async def run_four_stores_and_one_load(engine: Engine, source: FakeTier, keys: list[bytes]) -> None:
    handle = await engine.store(source.weak(keys[:4]), precondition=NO_WAIT)
    await handle.wait()
    async with await engine.lookup(keys) as hit:
        await engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in range(len(hit.keys))]))


async def test_a_damaged_block_is_a_failed_load(autojump_clock: object) -> None:
    tier, keys = FakeTier(64, SIZE), keys_of(3)
    tier.fill(keys)
    tier.faults.missing[keys[1]] = "damaged"
    async with open_engine(FakeTier(64, SIZE), [tier]) as engine:
        async with await engine.lookup(keys) as hit:
            await engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in keys]))
        series = scrape(engine.statistics())
    assert of(series, "load_failures_total", reason="damaged") == 1
    assert of(series, "loaded_blocks_total") == 1  # the prefix before the gap


def test_every_series_of_the_stages_exists_at_0_from_the_start() -> None:
    series = read(StageCollector(StageTimes().statistics))
    assert set(series.values()) == {0}
    for stage in ("admission", "awaiting", "batching", "transfer", "chain"):
        assert of(series, "stage_seconds_count", stage=stage) == 0
        for status in ("complete", "cancelled", "failed"):
            assert of(series, "ended_total", stage=stage, status=status) == 0
    assert {of(series, "filtered_blocks_total", reason=reason) for reason in FILTER_REASONS} == {0}
    assert {of(series, "failed_blocks_total", reason=reason) for reason in FAILED_BY} == {0}


async def test_the_buckets_of_a_stage_are_cumulative(autojump_clock: object) -> None:
    source, tier, times = FakeTier(64, SIZE), FakeTier(64, SIZE, latency=0.02), StageTimes()
    source.fill(keys_of(4))
    async with open_engine(source, [tier], instruments=[times]) as engine:
        await (await engine.store(source.weak(keys_of(4)), precondition=NO_WAIT)).wait()
    series = read(StageCollector(times.statistics))
    assert of(series, "copy_seconds_sum") == pytest.approx(0.02)
    assert of(series, "copy_seconds_bucket", le="0.01") == 0
    assert of(series, "copy_seconds_bucket", le="0.025") == 1
    assert of(series, "copy_seconds_bucket", le="+Inf") == of(series, "copy_seconds_count") == 1


def test_the_knobs_are_labels_of_one_series_those_of_the_pipeline_among_them() -> None:
    tiers = {"host": {"type": "memory", "capacity_bytes": 1 << 20, "block_bytes": SIZE}}
    config = EngineConfig(source=FakeTier(8, SIZE), tiers=tiers, promote=False, shadow_check=20)
    (((name, labels), value),) = read(ConfigCollector(config)).items()
    knobs = dict(labels)
    assert (name, value) == ("kv_offload_config_info", 1)
    assert (knobs["promote"], knobs["shadow_check"]) == ("false", "20")
    assert knobs["pipeline_budget_blocks"] == str(config.pipeline.budget_blocks)
    assert "tiers" not in knobs and "source" not in knobs
