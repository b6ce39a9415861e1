"""The facts that a daemon reports to its operator.

They are sections of facts, its tiers, and the sessions of its engines.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs

from maru.base.machine import memlock_limit
from maru.base.memory import huge_pages, pinning
from maru.base.process_limits import find_descriptors
from maru.configuration import as_size

from ._admin_messages import Fact, SessionFacts, TierFacts

if TYPE_CHECKING:
    from .._engine import Engine
    from ._server import Daemon


def described(daemon: Daemon, up_for: float) -> tuple[dict[str, dict[str, Fact]], list[TierFacts], list[SessionFacts]]:
    """Return all current facts. Sizes are in bytes, times in seconds."""
    config = daemon.config
    is_open, most = find_descriptors()
    sections: dict[str, dict[str, Fact]] = {
        "daemon": {
            "version": version(),
            "pid": os.getpid(),
            "state": daemon.state,
            "up_for": up_for,
            "url": daemon.url,
            "admin_url": daemon.admin_url,
            "status": ", ".join(daemon.status_at),
            "block_bytes": daemon.block_bytes,
        },
        "limits": {
            "max_sessions": config.max_sessions,
            "lease": config.lease,
            "drain_timeout": config.drain_timeout,
            "descriptors": most,
            "open_descriptors": is_open,
            "memlock_bytes": _or_none(memlock_limit()),
        },
        "pinning": _pinning(),
        "huge pages": attrs.asdict(huge_pages.statistics()),
        "page store": {"pool_path": daemon.pool_path, "pages_of_engines": daemon.pages_of_engines},
        "tenants": {
            name: f"quota {as_size(daemon.tenants.quotas[name])}" if name in daemon.tenants.quotas else "no quota"
            for name in daemon.tenants.credentials
        },
        "degraded": dict(daemon.degradations.texts()),
        "counters": dict(daemon.statistics()),
    }
    engine = daemon.engine
    return sections, [] if engine is None else _tiers(engine), _sessions(daemon)


def _pinning() -> dict[str, Fact]:
    """Return the amount of memory pinned for CUDA, and reasons for less."""
    found = pinning.statistics()
    return {
        "wanted_bytes": found.wanted_bytes,
        "pinned_bytes": found.pinned_bytes,
        "refused_bytes": found.refused_bytes,
        "why_not": found.lost or found.why_not,
        "copy_call": pinning.copy_call(),
    }


def _or_none(limit: int | None) -> Fact:
    return "none" if limit is None else limit


def _tiers(engine: Engine) -> list[TierFacts]:
    statistics = engine.statistics()
    return [
        TierFacts(
            name,
            type(engine.tiers[name]).__name__,
            tier.capacity_bytes,
            tier.used_bytes,
            tier.blocks,
            tier.held_blocks,
            statistics.health[name].state.value,
        )
        for name, tier in statistics.tiers.items()
    ]


def _sessions(daemon: Daemon) -> list[SessionFacts]:
    now = daemon._service.time.now()
    return [
        SessionFacts(
            session.number,
            session.name,
            session.tenant,
            max(0.0, now - session.heard),
            len(session.requests),
            len(session.holds),
            len(session.caches),
            len(session.announced),
        )
        for session in daemon.sessions
    ]


def version() -> str:
    """Return the version of the package.

    Empty if it is not installed, or no descriptor is left to read it.
    """
    import importlib.metadata  # it takes a tenth of the daemon's start

    try:
        return importlib.metadata.version("trio-offload")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
