"""All that was said about an engine, in arguments or in a configuration, as one configuration; and whether it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backends.abc import BlockSizeError, Source

from .._config import BreakerConfig, PipelineConfig
from .._errors import ConfigError
from ..abc import AsyncPolicy, Policy
from .config import SOURCE, Chain, EngineConfig, OnEnterFailure, OnLoadFailure, Route, TierLike


def gather(
    source: Source | EngineConfig,
    tiers: Sequence[TierLike] | Mapping[str, TierLike] | EngineConfig,
    policies: Sequence[Policy | AsyncPolicy] | None,
    config: PipelineConfig | None,
    chain: bool | Chain,
    on_load_failure: OnLoadFailure,
    routes: Sequence[Route],
    promote: bool | str,
    breaker: BreakerConfig | None,
    on_enter_failure: OnEnterFailure | Mapping[str, OnEnterFailure] = "fail",
) -> EngineConfig:
    """The arguments of :func:`open_engine`, but for the instruments, as one configuration with a source.

    Raises:
        ValueError: as :func:`open_engine`.
        TypeError: something is said beside a config that says all.
    """
    said = (policies, config, chain, on_load_failure, tuple(routes), promote, breaker, on_enter_failure)
    if isinstance(source, EngineConfig) or isinstance(tiers, EngineConfig):
        whole = source if isinstance(source, EngineConfig) else tiers
        if said != (None, None, True, "miss", (), False, None, "fail") or (whole is source and tiers != ()):
            raise TypeError(
                "an EngineConfig says all but the instruments: attrs.evolve(config, ...) changes what it says"
            )
        assert isinstance(whole, EngineConfig)
        if not isinstance(source, EngineConfig):
            whole = _with_source(whole, source)
    else:
        named = tiers if isinstance(tiers, Mapping) else _named(tiers)
        if policies is not None:
            routes = _first_route(named, routes, policies)
        whole = EngineConfig(
            source=source,
            tiers=named,
            routes=tuple(routes),
            chain=chain,  # type: ignore[arg-type]  # a bool is converted
            on_load_failure=on_load_failure,
            promote=promote,
            breaker=breaker or BreakerConfig(),
            on_enter_failure=on_enter_failure,
            pipeline=config or PipelineConfig(on_destination_full="evict" if chain == "on_evict" else "wait"),
        )
    if whole.source is None:
        raise ConfigError("source", None, "must be a place: open_engine(source, config), or name one in the config")
    check_places(whole.source, whole.tiers)
    return whole


def _with_source(config: EngineConfig, source: Source) -> EngineConfig:
    if config.source is not None:
        raise TypeError(f"the config names a source already: {config.source!r}")
    return attrs.evolve(config, source=source)


def _first_route(
    tiers: Mapping[str, object], routes: Sequence[Route], policies: Sequence[Policy | AsyncPolicy]
) -> list[Route]:
    """``policies`` are those of the route to the first tier."""
    first = next(iter(tiers), "")
    if any(route.to == first for route in routes):
        raise TypeError(f"policies = {policies!r}: the route to {first} has its own; say them there")
    return [Route(first, policies=tuple(policies)), *routes]


def check_places(source: object, tiers: Mapping[str, object]) -> None:
    """Whether these can be joined, as far as they are there yet."""
    if not tiers:
        raise ValueError("an engine needs at least one tier")
    there = [place for place in (source, *tiers.values()) if place is not None and not isinstance(place, str | Mapping)]
    if len({id(place) for place in there}) != len(there):
        raise ValueError(f"the source and the tiers must be different places: {source!r}, {list(tiers.values())!r}")
    wanted: int = getattr(source, "block_bytes", 0)
    for tier in tiers.values():
        size: int = getattr(tier, "block_bytes", 0)  # 0: any, so far
        if wanted and size and size != wanted:
            raise BlockSizeError(tier, size, wanted)


def _named(tiers: Sequence[TierLike]) -> dict[str, TierLike]:
    """A name of its own for each tier: the one it has, or its type's."""
    named: dict[str, TierLike] = {}
    for tier in tiers:
        name = stem = _name_of(tier)
        number = 1
        while name in named or name == SOURCE:
            number += 1
            name = f"{stem}-{number}"
        named[name] = tier
    return named


def _name_of(tier: TierLike) -> str:
    if isinstance(tier, Mapping):
        tier = str(tier.get("type", "tier"))
    if isinstance(tier, str):
        return tier.rpartition(":")[2].lower()
    return str(getattr(tier, "name", "") or type(tier).__name__.lower())
