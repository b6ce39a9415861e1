"""Metrics of an engine for Prometheus: collectors over its statistics.

Needs the extra ``metrics``. Nothing is counted here: a scrape takes one snapshot, which the engine keeps anyhow, and
the tables below map its fields to series. So the hot path has no part in it. Only the time in each stage needs an
instrument, which :class:`StageCollector` reads. The rules:

Rule 1. Every series exists from the first scrape, at 0: each label value that is known beforehand (tiers, pipelines,
        statuses, reasons) is written, whether it has been counted or not. A reason of a policy's or plugin's own
        appears with its first block.
Rule 2. A counter of a part stands next to a counter of the whole: hit blocks next to asked blocks.
Rule 3. A name has one meaning: a gauge has the present value, and a name that ends with ``_total`` only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias, get_args

import attrs

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )
    from prometheus_client.metrics_core import Metric
except ImportError:  # pragma: no cover: the tests' environment has it
    raise ImportError("offload.metrics needs prometheus_client: pip install 'trio-offload[metrics]'") from None

from backends.abc import TierStatistics

from ._engine.config import EngineConfig
from ._engine.load_or_recompute import GiveUp, Verdict
from ._engine.rates import ComputeRate, LoadRate
from ._engine.statistics import EngineStatistics
from ._health import Health, HealthState
from ._pipeline.statistics import PipelineStatistics
from .instruments import Histogram, StageStatistics

_Values: TypeAlias = Mapping[Any, float]
"""The values of one metric, by the tuple of its label values.

A mapping's keys are invariant, hence not ``tuple[str, ...]``.
"""

PREFIX: Final = "kv_offload_"
"""The prefix of each metric's name."""

PROMOTION_REASONS: Final[Sequence[str]] = ("duplicate", "full", "busy", "gone", "unavailable", "failed", "closed")
"""The reasons of :attr:`offload.EngineStatistics.promotions_refused`."""

FILTER_REASONS: Final[Sequence[str]] = (
    "present",
    "pending",
    "timeout",
    "error",
    "overflow",
    "behind",
    "gone",
    "closed",
)
"""Reasons for which blocks are filtered, without those of other policies.

``present`` is the reason of :class:`offload.PresenceFilter`.
"""

DROP_REASONS: Final[Sequence[str]] = (
    "full", "too large", "unavailable", "late", "failed", "unproven", "pending", "at once", "tenant unknown", "closed",
)  # fmt: skip
"""The reasons of :class:`offload.SpillStatistics`, without those of policies."""

MISS_REASONS: Final[Sequence[str]] = ("gone", "damaged", "size", "lease")
"""Reasons for which a tier's blocks could not be loaded.

``damaged`` counts checksums that did not match. A plugin may have more.
"""

LOAD_FAILURE_REASONS: Final[Sequence[str]] = (*MISS_REASONS, "mismatch", "withheld", "failed", "given up")
"""The reasons of :attr:`offload.EngineStatistics.load_failures`."""

INCONCLUSIVE_REASONS: Final[Sequence[str]] = (
    "too slow", "no planes at the destination", "planes not read", "a part of a block", "not recomputed",
    "destination not readable", "not read again", "gone when read again",
)  # fmt: skip
"""Reasons for which a shadow check had no result."""

PROBE_ENDS: Final[Sequence[str]] = ("measured", "gone", "failed", "too slow")
"""Outcomes of a load that measures a tier and serves no request."""

COMPARISONS: Final[Sequence[str]] = ("stored", "recomputed", "read again")
"""References of a shadow check.

A mismatch with ``layout`` is found by :meth:`offload.Engine.check_layout` alone.
"""

FAILED_BY: Final[Sequence[str]] = (
    "PolicyFailed", "PreconditionFailed", "DestinationFull", "TierUnavailable", "TransferFailed", "DrainUnproven",
    "PipelineClosed",
)  # fmt: skip
"""The errors of this package because of which blocks are not stored.

An executor may have more.
"""

# (field, help) of one class of statistics: an integer field, which becomes a series of the same name.
_ENGINE_COUNTERS: Final = (
    ("lookups", "Lookups that returned"),
    ("asked_blocks", "Blocks that lookups asked for; the whole of hit_blocks"),
    ("hit_blocks", "Blocks that lookups found"),
    ("loads", "Loads that returned"),
    ("loaded_blocks", "Blocks that they loaded"),
    ("retried_blocks", "Blocks looked up again behind a tier that failed; the whole of recovered_blocks"),
    ("recovered_blocks", "Blocks of these that were loaded"),
    ("promoted_blocks", "Blocks written into a faster tier after a load"),
)
_ENGINE_GAUGES: Final = (
    ("promoting_blocks", "Blocks that are being promoted"),
    ("open_hits", "Hits that are not released: their blocks are pinned"),
    ("quarantined", "Copies without a proven end; what they touched stays taken"),
    ("block_tokens", "Tokens that a block stands for; 0: the configuration does not say"),
)
_PIPELINE_COUNTERS: Final = (
    ("enqueued", "Containers taken in; the whole of settled"),
    ("batches", "Copies started"),
    ("copied_bytes", "Bytes stored"),
    ("blocks_dropped", "Filtered blocks that were dropped as the pipeline, or the share of its route, was full"),
    ("policy_errors", "Policies that raised"),
    ("policy_timeouts", "Containers whose policies overran their time"),
    ("policies_blocked", "Times that a plain policy held the loop too long"),
    ("swept_late", "Cancelled containers found by the safety net; more than 0 is a bug"),
    ("quarantined_total", "Copies whose end was never proven"),
)
_PIPELINE_GAUGES: Final = (
    ("budget_blocks", "Blocks that may be inside; the whole of used_blocks"),
    ("used_blocks", "Blocks inside"),
    ("waiting_enqueues", "Tasks that wait for room"),
    ("inside", "Containers that have not settled"),
    ("pending_marks", "Keys on their way to the destination"),
    ("quarantined", "Copies whose end is unknown"),
    ("offered_blocks", "Blocks that wait for room in the share of a route that is not required"),
    ("held_blocks", "Blocks that such a route holds in the tier above"),
    ("share_blocks", "Blocks that such a route may hold there; the whole of held_blocks"),
)
_TIER_COUNTERS: Final = (
    ("stored", "Blocks published"),
    ("duplicates", "Blocks not written, as the key was there"),
    ("evicted", "Blocks evicted"),
    ("loaded", "Blocks loaded, also by promotions and spills"),
    ("deleted", "Blocks deleted by request"),
)
_TIER_GAUGES: Final = (
    ("capacity_bytes", "Capacity; the whole of used_bytes"),
    ("used_bytes", "Bytes of blocks and reservations"),
    ("blocks", "Keys that can be found"),
    ("held_blocks", "Blocks held by refs or leases"),
    ("reserved_blocks", "Blocks reserved and not yet published"),
)
# A dot precedes the fields of a part that not every daemon has; without the part their value is 0.
_DAEMON_GAUGES: Final = (
    ("sessions", "Engines that have a session"),
    ("requests", "Requests that are not answered yet"),
    ("holds", "Hits that engines hold"),
    ("memories", "Pieces of memory of engines that are mapped"),
    ("caches", "Caches that are registered"),
    ("degraded.broken_tier", "Tiers that are left alone, as calls to them have failed"),
    ("degraded.full_disk", "Tiers whose disk has no room for their next blocks"),
    ("degraded.failing_route", "Routes in which blocks could not be stored in the last minute"),
    ("degraded.dropping_route", "Routes that dropped blocks in the last minute, as they are behind"),
    ("degraded.quarantined_copies", "Routes with copies whose end is unknown"),
    ("degraded.late_policies", "Routes whose policies took too long in the last minute"),
    ("degraded.few_descriptors", "Whether nine tenths of the file descriptors are open"),
    ("degraded.stuck_journal", "Whether the embedded page store waits for its journal"),
    ("degraded.unlinked_files", "Files of the daemon that were removed while it runs"),
    ("degraded.unpinned_memory", "Whether CUDA has refused to pin memory, or lost its context"),
    ("pages.announced", "Announcements of pages that engines write themselves, and have not told the end of"),
    ("connections", "Connections"),
    ("unread_bytes", "Answers that engines have not read"),
    ("pinned_pool.clients", "Clients of the pinned pool"),
    ("pinned_pool.pools", "Clients of these that have a pool"),
    ("pinned_pool.chunks", "Chunks of pinned memory; the whole of the next"),
    ("pinned_pool.chunks_left", "Chunks in no pool"),
)
_DAEMON_COUNTERS: Final = (
    ("bad_frames", "Frames that were no message"),
    ("turned_away", "Engines that were refused a session"),
    ("sessions_given_back", "Sessions that are over, and of which nothing is held any more"),
    ("pages.stored_blocks", "Blocks that engines have written into the page store themselves"),
    ("pages.duplicate_blocks", "Those that were there before, when they were committed"),
    ("pages.unknown_blocks", "Those of which nobody has said what became of them"),
    ("pages.given_up_blocks", "Those that their engine has given up"),
    ("pages.filtered_blocks", "Blocks that were to be announced, and were there already or not wanted"),
    ("pages.read_blocks", "Blocks that engines have read in the page store themselves, as told every third of a lease"),
    (
        "pages.passed_on_blocks",
        "Blocks of engines that were copied on from the page store, once for each tier behind it",
    ),
    ("pages.gone_blocks", "Those that were gone from the page store before they were copied on"),
    ("pages.not_passed_on_blocks", "Those that a tier behind did not take, or that were damaged"),
    ("events.batches", "Batches of KV events in this epoch"),
    ("events.heartbeats", "Batches without events"),
    ("events.replays", "Requests for missed KV events that were answered"),
    ("events.snapshots", "Requests for all keys that were answered"),
    ("events.bad_requests", "Frames of readers of KV events that were no request"),
    ("events.given_up", "Answers that a reader of KV events did not take in time"),
    ("pinned_pool.turned_away", "Clients of the pinned pool that were refused for lack of places"),
    ("pinned_pool.bad", "Connections to the pinned pool that ended because of a bad frame"),
)
_TENANT_GAUGES: Final = (
    ("quota_bytes", "Bytes that a tenant may have stored; the whole of used_bytes"),
    ("used_bytes", "Bytes that it has stored, or has on their way"),
)
_TENANT_COUNTERS: Final = (
    ("evicted_blocks", "Blocks that went to make room for others of the same tenant"),
    ("refused_blocks", "Blocks that did not fit into the tenant's quota"),
)
_NO_LOADS: Final = LoadRate(0.0, 0.0, 0.0, 0)
_NOTHING_COMPUTED: Final = ComputeRate(0.0)
_STAGES: Final = ("admission", "awaiting", "batching", "transfer", "chain")
_STATUSES: Final = ("complete", "cancelled", "failed")
_OUTCOMES: Final = ("completed", "filtered", "failed", "evicted")


class EngineCollector:
    """A collector that shows an engine to Prometheus.

    Register it: ``REGISTRY.register(EngineCollector(engine.statistics))``. A scrape calls ``statistics`` in the thread
    that scrapes. With a trio engine that is the engine's own thread. Otherwise pass a function that asks
    :mod:`offload.from_thread`: ``lambda: engine.statistics().engine``.

    Args:
        statistics: returns a snapshot.
    """

    def __init__(self, statistics: Callable[[], EngineStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of one snapshot."""
        statistics = self._statistics()
        yield from _of_engine(statistics)
        yield from _of_pipelines(statistics.pipelines)
        yield from _of_tiers(statistics.tiers)
        yield from _of_health(statistics.health)
        yield from _of_spills(statistics)
        yield from _of_shadow(statistics)
        yield from _of_load_or_recompute(statistics)


class StageCollector:
    """A collector that shows the stages of pipelines to Prometheus.

    Shown are the time in each stage, the stages in which containers end, and the reasons why blocks are not stored.

        times = offload.instruments.StageTimes()
        open_engine(..., instruments=[times])
        REGISTRY.register(StageCollector(times.statistics))

    Args:
        statistics: returns a snapshot. It is called in the thread that scrapes.
    """

    def __init__(self, statistics: Callable[[], StageStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of one snapshot."""
        statistics = self._statistics()
        stages = {(stage,): histogram for stage, histogram in statistics.seconds.items()}
        yield _histogram("stage_seconds", "Time of containers in each stage", stages, ["stage"])
        yield _histogram("copy_seconds", "Time of each copy of a batch", {(): statistics.copies})
        yield _counter("ended", "Containers by the stage in which they ended", statistics.ended, ["stage", "status"])
        yield _reasons("filtered_blocks", "Blocks that were not to be stored", FILTER_REASONS, statistics.filtered)
        yield _reasons("failed_blocks", "Blocks not stored because of an error", FAILED_BY, statistics.failed)
        yield _counter("evicted_blocks", "Blocks gone before they were copied", {(): statistics.evicted})


class DaemonCollector:
    """A collector that shows a daemon's counters of sessions to Prometheus.

    The names begin with ``kv_offload_daemon_``: ``kv_offload_daemon_sessions``, and so on.

    Args:
        counters: returns the daemon's statistics. Those of its engine and its tiers are for :class:`EngineCollector`.
    """

    def __init__(self, counters: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of one snapshot."""
        values = self._counters()
        for field, text in _DAEMON_GAUGES:
            yield _gauge(_daemon_name(field), text, {(): int(_daemon_value(values, field))})
        for field, text in _DAEMON_COUNTERS:
            yield _counter(_daemon_name(field), text, {(): int(_daemon_value(values, field))})
        for field, text in _TENANT_GAUGES:
            yield _gauge(f"daemon_tenant_{field}", text, _by_tenant(values, field), ["tenant"])
        for field, text in _TENANT_COUNTERS:
            yield _counter(f"daemon_tenant_{field}", text, _by_tenant(values, field), ["tenant"])


def _daemon_name(field: str) -> str:
    return f"daemon_{field.replace('.', '_')}"


def _daemon_value(values: Mapping[str, float], field: str) -> float:
    return values.get(field, 0) if "." in field else values[field]


def _by_tenant(values: Mapping[str, float], field: str) -> _Values:
    """Return the counter ``tenant.NAME.field`` of all tenants with a quota."""
    start, end = "tenant.", f".{field}"
    return {
        (name[len(start) : -len(end)],): int(value)
        for name, value in values.items()
        if name.startswith(start) and name.endswith(end)
    }


class ConfigCollector:
    """A collector that shows the settings of an engine to Prometheus.

    They are the labels of one series, ``kv_offload_config_info``, so that a chart shows whether two engines that behave
    differently are configured alike.

    Args:
        config: the engine's configuration, or a function that returns it if it changes. A setting that is a number, a
            word or a switch is shown. A setting of a nested configuration has that configuration's name in front of its
            own (``pipeline_budget_blocks``). Objects and tables are not shown.
    """

    def __init__(self, config: EngineConfig | Callable[[], EngineConfig]) -> None:
        self._config = config

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the one metric."""
        config = self._config() if callable(self._config) else self._config
        yield InfoMetricFamily(f"{PREFIX}config", "The knobs of the engine", value=dict(_knobs("", config)))


def _knobs(before: str, config: attrs.AttrsInstance) -> Iterator[tuple[str, str]]:
    for field in attrs.fields(type(config)):
        name, value = f"{before}{field.name}", getattr(config, field.name)
        if isinstance(value, bool):
            yield name, str(value).lower()
        elif isinstance(value, int | float | str):
            yield name, str(value)
        elif attrs.has(type(value)):
            yield from _knobs(f"{name}_", value)


# --- the metrics of a snapshot
# --------------------------------------------------------------------------------------------


def _of_engine(statistics: EngineStatistics) -> Iterator[Metric]:
    for field, text in _ENGINE_COUNTERS:
        yield _counter(field, text, {(): getattr(statistics, field)})
    for field, text in _ENGINE_GAUGES:
        yield _gauge(field, text, {(): getattr(statistics, field)})
    tiers = list(statistics.tiers)
    tokens, hits = statistics.block_tokens, _known(tiers, statistics.hits_by_tier)
    yield _counter(
        "asked_tokens", "Tokens that lookups asked for, with block_tokens", {(): tokens * statistics.asked_blocks}
    )
    yield _counter("tier_hit_blocks", "Blocks that lookups found, by the tier they are read from", hits, ["tier"])
    yield _counter(
        "tier_hit_tokens",
        "The same in tokens, with block_tokens; the part of asked_tokens",
        {labels: tokens * blocks for labels, blocks in hits.items()},
        ["tier"],
    )
    yield _reasons(
        "load_failures", "Blocks found that could not be loaded", LOAD_FAILURE_REASONS, statistics.load_failures
    )
    yield _counter(
        "lookup_failures",
        "Lookups that left a tier out as it raised",
        _known(tiers, statistics.lookup_failures),
        ["tier"],
    )
    yield _counter(
        "load_faults", "Blocks that a tier found and did not deliver", _known(tiers, statistics.load_faults), ["tier"]
    )
    yield _reasons("promotions_refused", "Blocks not promoted", PROMOTION_REASONS, statistics.promotions_refused)


def _of_pipelines(pipelines: Mapping[str, PipelineStatistics]) -> Iterator[Metric]:
    for field, text in _PIPELINE_COUNTERS:
        values = {(name,): getattr(of_one, field) for name, of_one in pipelines.items()}
        yield _counter(f"pipeline_{field.removesuffix('_total')}", text, values, ["pipeline"])
    for field, text in _PIPELINE_GAUGES:
        # The count of all copies has the name without a suffix; the number of open ones gets a suffix.
        name = "quarantined_now" if field == "quarantined" else field
        values = {(pipeline,): getattr(of_one, field) for pipeline, of_one in pipelines.items()}
        yield _gauge(f"pipeline_{name}", text, values, ["pipeline"])
    for name, text, label, words, prefix, family in (
        ("stage_containers", "Containers by the stage they are in", "stage", _STAGES, "in_", _gauge),
        ("settled", "Containers by how they ended", "status", _STATUSES, "", _counter),
        ("blocks", "Blocks by how they ended", "outcome", _OUTCOMES, "blocks_", _counter),
    ):
        by_word = {(p, word): getattr(s, prefix + word) for p, s in pipelines.items() for word in words}
        yield family(f"pipeline_{name}", text, by_word, ["pipeline", label])


def _of_tiers(tiers: Mapping[str, TierStatistics]) -> Iterator[Metric]:
    for field, text in _TIER_COUNTERS:
        yield _counter(
            f"tier_{field}", text, {(tier,): getattr(of_one, field) for tier, of_one in tiers.items()}, ["tier"]
        )
    for field, text in _TIER_GAUGES:
        yield _gauge(
            f"tier_{field}", text, {(tier,): getattr(of_one, field) for tier, of_one in tiers.items()}, ["tier"]
        )
    missed = {
        (tier, reason): n
        for tier, of_one in tiers.items()
        for (reason,), n in _known(MISS_REASONS, of_one.missed).items()
    }
    yield _counter("tier_missed", "Blocks that could not be loaded; see tier_loaded", missed, ["tier", "reason"])


def _of_health(health: Mapping[str, Health]) -> Iterator[Metric]:
    states = {
        (tier, state.name.lower()): int(of_one.state is state)
        for tier, of_one in health.items()
        for state in HealthState
    }
    yield _gauge("breaker_state", "1 for the state that a tier's breaker is in", states, ["tier", "state"])
    yield _gauge(
        "breaker_faults", "Faults in a row", {(tier,): of_one.faults for tier, of_one in health.items()}, ["tier"]
    )
    entered = {(tier,): int(of_one.entered) for tier, of_one in health.items()}
    yield _gauge("tier_entered", "Whether the tier has been entered", entered, ["tier"])


def _of_spills(statistics: EngineStatistics) -> Iterator[Metric]:
    spills = statistics.spills
    under_way = {(route,): of_one.under_way for route, of_one in spills.items()}
    yield _gauge("spill_under_way", "Victims whose copy has not settled", under_way, ["route"])
    spilled = {(route,): of_one.spilled for route, of_one in spills.items()}
    yield _counter("spill_spilled", "Victims that are in the tier below", spilled, ["route"])
    stayed = {(route,): of_one.stayed for route, of_one in spills.items()}
    yield _counter("spill_stayed", "Victims that were used in time, and stayed", stayed, ["route"])
    dropped = {
        (route, reason): n
        for route, of_one in spills.items()
        for (reason,), n in _known(DROP_REASONS, of_one.dropped).items()
    }
    yield _counter("spill_dropped", "Victims that went without a copy", dropped, ["route", "reason"])


def _of_shadow(statistics: EngineStatistics) -> Iterator[Metric]:
    shadow = statistics.shadow
    yield _counter("shadow_checked_loads", "Loads of which blocks were compared", {(): shadow.checked_loads})
    yield _counter("shadow_compared", "Blocks compared", _known(COMPARISONS, shadow.compared), ["with"])
    mismatches = _known((*COMPARISONS, "layout"), shadow.mismatches)
    yield _counter("shadow_mismatches", "Comparisons that found another block", mismatches, ["with"])
    yield _reasons("shadow_inconclusive", "Checks that came to no answer", INCONCLUSIVE_REASONS, shadow.inconclusive)
    yield _gauge("shadow_withheld", "Keys that are not served", {(): shadow.withheld})


def _of_load_or_recompute(statistics: EngineStatistics) -> Iterator[Metric]:
    choice, tiers = statistics.load_or_recompute, statistics.tiers
    advised = _known(get_args(Verdict), choice.advised)
    yield _counter("advised_lookups", "Lookups that found blocks, by what was advised", advised, ["advice"])
    yield _counter(
        "cut_blocks", "Blocks found and left, as computing is sooner; see hit_blocks", {(): choice.cut_blocks}
    )
    yield _counter("given_up_loads", "Loads given up; see loads", _known(get_args(GiveUp), choice.given_up), ["reason"])
    yield _counter("rate_probes", "Loads to measure a tier alone", _known(PROBE_ENDS, choice.probes), ["ended"])
    yield _gauge("given_up_slowest_end_seconds", "Longest copy behind its deadline", {(): choice.slowest_end})
    rates = {name: choice.load_rates.get(name, _NO_LOADS) for name in tiers}
    for field, text in (
        ("fixed", "Seconds that a load takes whatever its size"),
        ("per_block", "Seconds that a load takes for each block; beside recompute_seconds_per_block"),
    ):
        yield _gauge(
            f"load_seconds_{field}", text, {(name,): getattr(of, field) for name, of in rates.items()}, ["tier"]
        )
    observations = {(name,): of.observations for name, of in rates.items()}
    yield _gauge("load_observations", "Loads behind that estimate", observations, ["tier"])
    suspect = {(name,): int(of.is_suspect) for name, of in rates.items()}
    yield _gauge("load_suspect", "Whether a load was given up, and none measured since", suspect, ["tier"])
    compute = choice.compute_rate or _NOTHING_COMPUTED
    for field, text in (
        ("per_block", "Seconds in which a block is computed; 0: not known"),
        ("growth", "Seconds that this grows with each block before it"),
    ):
        yield _gauge(f"recompute_seconds_{field}", text, {(): getattr(compute, field)})
    yield _gauge("recompute_observations", "Computations behind that estimate", {(): compute.observations})


# --- families -------------------------------------------------------------------------------------------------------------


def _known(words: Iterable[str], counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    """Return the counts by label, with 0 for words without one."""
    return {(word,): counts.get(word, 0) for word in dict.fromkeys([*words, *counts])}


def _reasons(name: str, text: str, known: Sequence[str], counts: Mapping[str, int]) -> Metric:
    return _counter(name, text, _known(known, counts), ["reason"])


def _counter(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=list(labels))
    for of_labels, value in values.items():
        family.add_metric(list(of_labels), value)
    return family


def _gauge(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
    for of_labels, value in values.items():
        family.add_metric(list(of_labels), value)
    return family


def _histogram(name: str, text: str, values: Mapping[Any, Histogram], labels: Sequence[str] = ()) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=list(labels))
    for of_labels, histogram in values.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(list(of_labels), buckets, histogram.total)
    return family
