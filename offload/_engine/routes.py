"""Which routes there are between the places of an engine, what feeds each, and which carry what a tier evicts. Pure.

Rule 1. A route leads down: from the source, or from a tier to a slower one. So there is no cycle, and routes in the order of
        where they lead stand upstream first.
Rule 2. The first route leads from the source to the first tier, whatever else is configured.
Rule 3. With a chain there is a route from each tier to the next, as far as one tier after the other can be read as a source.
Rule 4. With ``chain = "on_evict"`` each route that starts at a tier carries what that tier evicts, and nothing else by
        itself. So one route leads on from a tier, and the tier tells of its evictions.
Rule 5. What is to be evicted must be evicted: a way into such a tier has ``on_destination_full = "evict"``. Where there are
        several, the one that waits the shortest sets the pace.
Rule 6. A tier that must know the tenant of its blocks may stand below, or above: then the tenants are indexed in every tier
        whose victims come there, by whatever way, so that victims keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from backends.leaving import SpillingTier

from .._config import PipelineConfig
from .._errors import ConfigError
from .._pipeline.spill_route import check_config, config_below
from .config import SOURCE, Chain, EngineConfig, Route


@attrs.frozen
class PlannedRoute:
    """One route of an engine."""

    name: str
    """What its pipeline is called: the tier that it leads to, if it starts where a route there starts by default."""
    to: str
    """The tier that it leads to."""
    above: str
    """The tier that it starts at, or ``source``."""
    route: Route
    """What was said about it."""
    feeds: tuple[str, ...]
    """The routes, by name, that are fed what it has stored."""


def plan(tiers: Sequence[str], sources: Collection[str], routes: Sequence[Route], chain: Chain) -> list[PlannedRoute]:
    """The routes of an engine, upstream first.

    Args:
        tiers: the names, from the fastest to the slowest; at least one.
        sources: those of them that can be read as a source.
        routes: what was said, by tiers that there are.
        chain: what feeds one tier from another.

    Raises:
        ConfigError: a route leads up, starts where nothing can be read from, is named twice, or is called as a tier is.
    """
    said = _by_ends(tiers, sources, routes)
    wanted = {(SOURCE, tiers[0]): Route(tiers[0])}
    if chain != "none":
        for above, to in pairwise(tiers):
            if above not in sources:
                break
            wanted[above, to] = Route(to)
    wanted.update(said)
    order = {name: at for at, name in enumerate([SOURCE, *tiers])}
    ends = sorted(wanted, key=lambda ends: (order[ends[1]], order[ends[0]]))
    names = {end: end[1] if end[0] == _above(tiers, sources, end[1]) else f"{end[0]}-{end[1]}" for end in ends}
    _check_distinct(names)
    return [PlannedRoute(names[end], end[1], end[0], wanted[end], _fed(end, wanted[end], names, chain)) for end in ends]


def _check_distinct(names: Mapping[tuple[str, str], str]) -> None:
    """A route that does not start where one does by default is called by both of its ends: no tier may be called so."""
    called: dict[str, tuple[str, str]] = {}
    for end, name in names.items():
        other = called.setdefault(name, end)
        if other != end:
            above, to = max(end, other, key=lambda one: one[1] != name)
            raise ConfigError("tiers", name, f"must be another name: the route from {above} to {to} is called so")


def _fed(end: tuple[str, str], route: Route, names: Mapping[tuple[str, str], str], chain: Chain) -> tuple[str, ...]:
    if chain != "on_store" or not route.auto_chain:
        return ()
    return tuple(name for (above, _), name in names.items() if above == end[1])


def _by_ends(tiers: Sequence[str], sources: Collection[str], routes: Sequence[Route]) -> dict[tuple[str, str], Route]:
    """What was said, by where it starts and leads to."""
    said: dict[tuple[str, str], Route] = {}
    for at, route in enumerate(routes):
        above = route.source or _above(tiers, sources, route.to)
        if above != SOURCE:
            if tiers.index(above) >= tiers.index(route.to):
                raise ConfigError(f"routes[{at}].source", above, f"must be faster than {route.to}: a route leads down")
            if above not in sources:
                raise ConfigError(
                    f"routes[{at}].source", above, "cannot be read as a source; say 'source' to start at the engine's"
                )
        if (above, route.to) in said:
            raise ConfigError(f"routes[{at}]", route.to, f"there is another route from {above} to {route.to}")
        said[above, route.to] = route
    return said


def _above(tiers: Sequence[str], sources: Collection[str], to: str) -> str:
    """Where a route to this tier starts by default."""
    at = tiers.index(to)
    return tiers[at - 1] if at and tiers[at - 1] in sources else SOURCE


# --- what carries victims ---------------------------------------------------------------------------------------------


def spill_configs(
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
        if not ways:  # from the source; or no route that feeds the tier is chained
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


def tiers_to_index(planned: Sequence[PlannedRoute], spilling: Collection[str], of_tenants: Collection[str]) -> set[str]:
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
