"""Which routes of an engine carry what their tier evicts, and with which knobs. Pure.

Rule 1. With ``chain = "on_evict"`` each route that starts at a tier carries what that tier evicts, and nothing else by
        itself. So one route leads on from a tier, and the tier tells of its evictions.
Rule 2. What is to be evicted must be evicted: a way into such a tier has ``on_destination_full = "evict"``. Where there are
        several, the one that waits the shortest sets the pace.
Rule 3. A tier that must know whose its blocks are may stand below, or above: then it is remembered whose they are in every tier
        whose victims come there, by whatever way, so that they are carried on as theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from backends.leaving import SpillingTier

from .._config import PipelineConfig
from .._errors import ConfigError
from .._pipeline.spill_route import check_config, config_below
from .config import EngineConfig
from .routes import PlannedRoute


def spill_knobs(
    planned: Sequence[PlannedRoute], tiers: Mapping[str, Any], config: EngineConfig
) -> dict[str, PipelineConfig]:
    """The routes that carry what their tier evicts, by name, each with the knobs of its pipeline. None but with ``on_evict``.

    Args:
        planned: all routes, upstream first.
        tiers: the places, by name.
        config: what was said.

    Raises:
        ConfigError: against one of the rules above.
    """
    knobs: dict[str, PipelineConfig] = {}
    if config.chain != "on_evict":
        return knobs
    carried: set[str] = set()
    for route in planned:
        ways = [way for way in planned if way.to == route.above and way.route.auto_chain]
        if not ways:  # from the source; or nobody wants below what goes from there
            continue
        if route.above in carried:
            raise ConfigError(
                "routes", route.name, f"with chain = 'on_evict' one route leads on from a tier: {route.above} has one"
            )
        carried.add(route.above)
        _check(route, tiers)
        into = [knobs.get(way.name) or way.route.pipeline or config.pipeline for way in ways]
        evicting = [one for one in into if one.on_destination_full == "evict"]
        if not evicting:
            check_config(into[0])
        hastiest = min(evicting, key=lambda one: one.destination_timeout)
        knobs[route.name] = config_below(hastiest, route.route.pipeline)
    return knobs


def _check(route: PlannedRoute, tiers: Mapping[str, Any]) -> None:
    if not isinstance(tiers[route.above], SpillingTier):
        raise ConfigError("chain", "on_evict", f"{route.above} tells nobody of what it evicts: {tiers[route.above]!r}")


def remembering(planned: Sequence[PlannedRoute], spilling: Collection[str], of_tenants: Collection[str]) -> set[str]:
    """The tiers of which must be known whose their blocks are: their victims come into a tier that must know, or from one.

    Args:
        planned: all routes, upstream first.
        spilling: those that carry what their tier evicts, by name.
        of_tenants: the tiers that must know.
    """
    found: set[str] = set()
    for route in reversed(planned):
        if route.name in spilling and not {route.above, route.to}.isdisjoint({*of_tenants, *found}):
            found.add(route.above)
    return found
