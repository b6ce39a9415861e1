"""The plan of the routes between the tiers of an engine. Pure.

It decides which routes there are, which route feeds which, and which ones store evicted blocks. The rules:

Rule 1. A route leads down: from the source, or from a tier to a slower one. So there is no cycle, and routes sorted by
        their destination are upstream first.
Rule 2. The first route leads from the source to the first tier, whatever else is configured.
Rule 3. With a chain there is a route from each tier to the next, as long as each tier can be read as a source. A page
        store can, but not with ``on_evict``: it does not report its evictions.
Rule 4. With ``chain = "on_evict"`` a route that starts at a tier stores the blocks which that tier evicts, and nothing
        else by itself. So only one route may start at a tier, and the tier must report its evictions.
Rule 5. A tier that feeds others by eviction must evict: the routes into it have ``on_destination_full = "evict"``. If
        there are several, the one with the shortest wait sets the pace.
Rule 6. A tier that needs the tenants of its blocks may be below or above: then the tenants are indexed in every tier
        whose victims come there, directly or not, so that victims keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from backends.abc import Tier

from .._config import PipelineConfig
from .._errors import ConfigError
from .._pipeline.spill_route import check_config, config_below
from .config import SOURCE, Chain, EngineConfig, Route


@attrs.frozen
class PlannedRoute:
    """One route of an engine."""

    name: str
    """The name of its pipeline.

    It is the name of the tier that it leads to, if it starts at the default place for that tier.
    """
    to: str
    """The tier that it leads to."""
    above: str
    """The tier that it starts at, or ``source``."""
    route: Route
    """Its configuration."""
    feeds: tuple[str, ...]
    """The names of the routes that pass on its stored blocks."""
    required: bool = False
    """Whether the routes that feed it wait for it."""


def plan(tiers: Sequence[str], sources: Collection[str], routes: Sequence[Route], chain: Chain) -> list[PlannedRoute]:
    """Plan the routes of an engine, upstream first.

    Args:
        tiers: the names, from the fastest to the slowest; at least one.
        sources: the ones of them that can be read as a source.
        routes: the configured routes; their tiers exist.
        chain: the blocks that are stored in the next tier.

    Raises:
        ConfigError: a route leads up, starts at a tier that cannot be read from, is given twice, or has the name of a
            tier.
    """
    configured = _by_ends(tiers, sources, routes)
    wanted = {(SOURCE, tiers[0]): Route(tiers[0])}
    if chain != "none":
        for above, to in pairwise(tiers):
            if above not in sources:
                break
            wanted[above, to] = Route(to)
    wanted.update(configured)
    order = {name: at for at, name in enumerate([SOURCE, *tiers])}
    ends = sorted(wanted, key=lambda ends: (order[ends[1]], order[ends[0]]))
    names = {end: end[1] if end[0] == _above(tiers, sources, end[1]) else f"{end[0]}-{end[1]}" for end in ends}
    _check_distinct(names)
    return [
        PlannedRoute(names[end], end[1], end[0], way, _fed(end, way, names, chain), _is_required(way, chain))
        for end, way in ((end, wanted[end]) for end in ends)
    ]


def _is_required(route: Route, chain: Chain) -> bool:
    return chain == "on_evict" if route.required is None else route.required


def _check_distinct(names: Mapping[tuple[str, str], str]) -> None:
    """Check that no route has the name of another route.

    A route that does not start at its default is named after both ends, which may be the name of a tier.

    Raises:
        ConfigError: two routes have one name.
    """
    called: dict[str, tuple[str, str]] = {}
    for end, name in names.items():
        other = called.setdefault(name, end)
        if other != end:
            above, to = max(end, other, key=lambda one: one[1] != name)
            raise ConfigError("tiers", name, f"must be another name: the route from {above} to {to} has this one")


def _fed(end: tuple[str, str], route: Route, names: Mapping[tuple[str, str], str], chain: Chain) -> tuple[str, ...]:
    if chain != "on_store" or not route.auto_chain:
        return ()
    return tuple(name for (above, _), name in names.items() if above == end[1])


def _by_ends(tiers: Sequence[str], sources: Collection[str], routes: Sequence[Route]) -> dict[tuple[str, str], Route]:
    """Return the configured routes, by start and destination."""
    configured: dict[tuple[str, str], Route] = {}
    for at, route in enumerate(routes):
        above = route.source or _above(tiers, sources, route.to)
        if above != SOURCE:
            if tiers.index(above) >= tiers.index(route.to):
                raise ConfigError(f"routes[{at}].source", above, f"must be faster than {route.to}: a route leads down")
            if above not in sources:
                raise ConfigError(
                    f"routes[{at}].source", above, "cannot be read as a source; set 'source' to start at the engine's"
                )
        if (above, route.to) in configured:
            raise ConfigError(f"routes[{at}]", route.to, f"there is already a route from {above} to {route.to}")
        configured[above, route.to] = route
    return configured


def _above(tiers: Sequence[str], sources: Collection[str], to: str) -> str:
    """Return the default start of a route to this tier."""
    at = tiers.index(to)
    return tiers[at - 1] if at and tiers[at - 1] in sources else SOURCE


# --- the routes of victims --------------------------------------------------------------------------------------------


def spill_configs(
    planned: Sequence[PlannedRoute], tiers: Mapping[str, Any], config: EngineConfig
) -> dict[str, PipelineConfig]:
    """Return the settings of the routes that store evicted blocks, by name.

    There are such routes only with ``on_evict``.

    Args:
        planned: all routes, upstream first.
        tiers: the tiers, by name.
        config: the engine's configuration.

    Raises:
        ConfigError: one of the rules above is broken.
    """
    knobs: dict[str, PipelineConfig] = {}
    if config.chain != "on_evict":
        return knobs
    carried: set[str] = set()
    for route in planned:
        ways = [way for way in planned if way.to == route.above and way.route.auto_chain]
        if not ways:  # the route starts at the source, or no chained route feeds the tier
            continue
        if route.above in carried:
            raise ConfigError(
                "routes",
                route.name,
                f"with chain = 'on_evict' only one route may start at a tier: {route.above} already has one",
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


def _check(route: PlannedRoute, tiers: Mapping[str, Tier]) -> None:
    if not tiers[route.above].capabilities.reports_evictions:
        raise ConfigError("chain", "on_evict", f"{route.above} does not report its evictions: {tiers[route.above]!r}")


def tiers_to_index(planned: Sequence[PlannedRoute], spilling: Collection[str], of_tenants: Collection[str]) -> set[str]:
    """Return the tiers that need an index of their blocks' tenants.

    Their victims go to a tier that needs tenants, or come from one.

    Args:
        planned: all routes, upstream first.
        spilling: the routes that store evicted blocks, by name.
        of_tenants: the tiers that need tenants.
    """
    found: set[str] = set()
    for route in reversed(planned):
        if route.name in spilling and not {route.above, route.to}.isdisjoint({*of_tenants, *found}):
            found.add(route.above)
    return found
