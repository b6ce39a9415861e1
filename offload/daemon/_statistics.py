"""The counters that engines and operators get, by name.

They are of the daemon, of its tiers, and of the session that asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from backends.abc import TierStatistics

from .._engine import ChoiceStatistics, EngineConfig, EngineStatistics, ShadowStatistics
from .._engine.routes import plan
from .._errors import ConfigError
from .._health import Health, HealthState
from .._pipeline.statistics import PipelineStatistics

if TYPE_CHECKING:
    from ._engine import DaemonEngine
    from ._service import Service
    from ._sessions import Session


_NOTHING_IN: Final = TierStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0)
_NOT_ENTERED: Final = Health(HealthState.CLOSED, 0.0, 0, "", None, entered=False)


def before_opening(config: EngineConfig) -> EngineStatistics:
    """Return the statistics of an engine whose tiers are not open yet.

    All later counters are 0, under their later names. A pipeline that turns out not to exist, since its tier cannot be
    read from, is named here as well.
    """
    tiers = list(config.tiers)
    try:
        pipelines = [route.name for route in plan(tiers, tiers, config.routes, config.chain)]
    except ConfigError:  # it is reported when the tiers are opened
        pipelines = []
    nothing: dict[str, int] = {field.name: 0 for field in attrs.fields(EngineStatistics) if str(field.type) == "int"}
    return EngineStatistics(
        **nothing | {"block_tokens": config.block_tokens},
        pipelines={name: _nothing_through() for name in pipelines},
        tiers=dict.fromkeys(tiers, _NOTHING_IN),
        health=dict.fromkeys(tiers, _NOT_ENTERED),
        load_failures={},
        lookup_failures={},
        load_faults={},
        promotions_refused={},
        spills={},
        shadow=ShadowStatistics(),
        load_or_recompute=ChoiceStatistics(),
        hits_by_tier=dict.fromkeys(tiers, 0),
    )


def _nothing_through() -> PipelineStatistics:
    counts: dict[str, int] = {field.name: 0 for field in attrs.fields(PipelineStatistics) if str(field.type) == "int"}
    return PipelineStatistics(**counts, blocking_policy="")


def counters(service: Service, session: Session | None, daemon_engine: DaemonEngine) -> dict[str, float]:
    """Return each current counter by name.

    A session of a tenant gets only its own: the rest includes those of others.
    """
    if session is not None and session.tenant:
        return _of_session(session) | service.quotas.counters(session.tenant)
    sessions = list(service.sessions)
    values: dict[str, float] = {
        "sessions": len(sessions),
        "requests": service.under_way,
        "holds": sum(len(one.holds) for one in sessions),
        "memories": sum(len(one.memories) for one in sessions),
        "caches": len(daemon_engine.caches),
        "device_allocations": service.devices.openings.count,
        "failed_device_closes": service.devices.openings.failed_closes,
        "bad_frames": service.sessions.bad,
        "turned_away": service.sessions.turned_away,
        "sessions_given_back": service.sessions.given_back,
    }
    values |= {f"pages.{name}": count for name, count in (service.pages.counts | service.onward.counts).items()}
    values["pages.announced"] = sum(len(one.announced) for one in sessions)
    values |= service.quotas.counters()
    if session is not None:
        values |= _of_session(session)
    engine = daemon_engine.engine
    if engine is None:
        return values
    statistics = engine.statistics()
    values |= {
        "lookups": statistics.lookups,
        "asked_blocks": statistics.asked_blocks,
        "hit_blocks": statistics.hit_blocks,
        "loads": statistics.loads,
        "loaded_blocks": statistics.loaded_blocks,
        "open_hits": statistics.open_hits,
        "quarantined": statistics.quarantined,
    }
    for name, pipeline in statistics.pipelines.items():
        values |= {
            f"pipeline.{name}.used_blocks": pipeline.used_blocks,
            f"pipeline.{name}.pending_marks": pipeline.pending_marks,
            f"pipeline.{name}.completed_blocks": pipeline.blocks_completed,
        }
    for name, tier in statistics.tiers.items():
        values |= {
            f"tier.{name}.capacity_bytes": tier.capacity_bytes,
            f"tier.{name}.used_bytes": tier.used_bytes,
            f"tier.{name}.blocks": tier.blocks,
            f"tier.{name}.held_blocks": tier.held_blocks,
            f"tier.{name}.reserved_blocks": tier.reserved_blocks,
            f"tier.{name}.stored_blocks": tier.stored,
            f"tier.{name}.evicted_blocks": tier.evicted,
        }
    return values


def _of_session(session: Session) -> dict[str, float]:
    return {
        "session.requests": len(session.requests),
        "session.holds": len(session.holds),
        "session.announced": len(session.announced),
        "session.caches": len(session.caches),
        "session.memories": len(session.memories),
    }
