"""The places of an engine, entered: what was only named is made, what can be entered is entered, what is absent may come later.

Rule 1. A tier that an engine may open without (``on_enter_failure``) is entered by a task of its own (:mod:`.late_tiers`),
        whether it is there at first or not; the others are entered by the task that opens the engine.
Rule 2. How a tier is asked is decided before it is there: whether it must be awaited, can be read from, tells of its evictions,
        must know the tenant of its blocks. Routes are made by that. One that turns out to be of another kind once it is
        entered, or to hold blocks of another size, is refused.
Rule 3. A tier that could not even be made has a placeholder, which nothing can be read from as a source.
Rule 4. What was made here is closed here, last of all, whether it was entered or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs

from backends.abc import BlockSizeError, ReadableTier, Source, TenantTier, Tier
from backends.closing import closing
from backends.leaving import SpillingTier

from .._errors import ConfigError, TierNotEntered
from .._health import BreakerTier, with_breaker
from .._health.faults import describe, is_absence
from .config import EngineConfig, TierLike
from .factories import is_source, make_source, make_tier, needs_tenants
from .history import History
from .late_tiers import PlaceholderTier, Reconnector, keep


@attrs.frozen(eq=False)
class Places:
    """All of an engine's."""

    source: Source
    tiers: Mapping[str, ReadableTier]
    """By name, the fastest first."""
    breaker_tiers: Mapping[str, BreakerTier]
    """The same, as they are asked."""


async def enter_places(stack: AsyncExitStack, config: EngineConfig, history: History) -> Places:
    """The source and the tiers of an engine, entered in their order, to be left when ``stack`` is closed.

    Raises:
        TierNotEntered: a tier is absent, and the engine does not open without it.
        Exception: whatever making and entering them raises.
    """
    source = make_source(config)
    if source is not config.source:
        stack.enter_context(closing(source))
        await _enter(stack, source)
    tiers: dict[str, ReadableTier] = {}
    breaker_tiers: dict[str, BreakerTier] = {}
    for name, said in config.tiers.items():
        tier = tiers[name] = _made(name, said, source.block_bytes, config)
        if tier is not said:
            stack.enter_context(closing(tier))  # whatever comes next, and after it was left
        if config.opens_without(name) and (isinstance(tier, PlaceholderTier) or _can_be_entered(tier)):
            breaker_tiers[name] = await _keep(stack, name, tier, source, config, history)
        else:
            breaker_tiers[name] = _breaker_tier(name, tier, config)
            await _enter_or_say(stack, name, tier)
    there = {name: tier for name, tier in tiers.items() if breaker_tiers[name].health.entered}
    if there:
        check_places(source, there)
    return Places(source, tiers, breaker_tiers)


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


def check_placeholders(tiers: Mapping[str, object], config: EngineConfig) -> None:
    """Whether no route starts at a tier that could not be made.

    Raises:
        ConfigError: one does, or would if the tier could be read from.
    """
    names = list(tiers)
    for at, (name, tier) in enumerate(tiers.items()):
        if not isinstance(tier, PlaceholderTier):
            continue
        if any(route.source == name for route in config.routes) or (config.chain != "none" and at + 1 < len(names)):
            raise ConfigError(
                f"on_enter_failure.{name}",
                "miss",
                f"{name} could not be made, so it is unknown whether it can be read from, as a route that leads on from "
                f"there needs: put it last, or say chain = 'none' and no route from it ({tier.why})",
            )


def _made(name: str, said: TierLike, block_bytes: int, config: EngineConfig) -> ReadableTier:
    """A tier; or its placeholder, if it is absent and may be."""
    knob = f"tiers.{name}"
    make = partial(make_tier, knob, said, block_bytes)
    try:
        return make()
    except Exception as error:
        if not is_absence(error):
            raise
        if not config.opens_without(name):
            raise TierNotEntered(name, describe(error)) from error
        return PlaceholderTier(make, block_bytes, error, seals=needs_tenants(knob, said))


async def _keep(
    stack: AsyncExitStack, name: str, tier: Any, source: Source, config: EngineConfig, history: History
) -> BreakerTier:
    """Have a tier kept, and begin with its first attempt. The tier behind its breaker."""
    kind = _kind_of(name, tier)
    breaker_tier = _breaker_tier(name, tier, config)
    runner = breaker_tier._runner
    runner.availability.leave_out()

    def check_entered() -> None:
        if isinstance(tier, PlaceholderTier):
            if isinstance(tier.made, TenantTier) and not isinstance(tier, TenantTier):
                raise TypeError("it must know whose its blocks are, which could not be known before it was made")
            history.watch_tier(
                name, tier.made
            )  # while it is made: it is entered by no other place, so its listener ends with it
        elif (now := _kind_of(name, tier)) != kind:
            raise TypeError(f"it is of another kind than before it was entered: {now}, not {kind}")
        size: int = getattr(tier.made if isinstance(tier, PlaceholderTier) else tier, "block_bytes", 0)
        if size and source.block_bytes and size != source.block_bytes:
            raise BlockSizeError(tier, size, source.block_bytes)

    await stack.enter_async_context(
        keep(Reconnector(runner, tier.enter if isinstance(tier, PlaceholderTier) else lambda: tier, check_entered))
    )
    return breaker_tier


@attrs.frozen
class _Kind:
    """How a tier is asked, and what routes are made by."""

    remote: bool
    source: bool
    spills: bool
    of_tenants: bool


def _kind_of(name: str, tier: Any) -> _Kind:
    try:
        return _Kind(
            not isinstance(tier, Tier),
            is_source(tier),
            isinstance(tier, SpillingTier),
            isinstance(tier, TenantTier),
        )
    except Exception as error:
        raise ConfigError(
            f"on_enter_failure.{name}",
            "miss",
            f"{tier!r} does not say what kind of tier it is before it is entered: {error!r}",
        ) from error


def _breaker_tier(name: str, tier: ReadableTier, config: EngineConfig) -> BreakerTier:
    """A breaker before this tier; one that has its own already keeps it."""
    return with_breaker(tier, name, breaker=config.breaker)


async def _enter_or_say(stack: AsyncExitStack, name: str, tier: object) -> None:
    """Have a tier that the engine does not open without.

    Raises:
        TierNotEntered: it is absent.
    """
    try:
        await _enter(stack, tier)
    except Exception as error:
        if not is_absence(error):
            raise
        raise TierNotEntered(name, describe(error)) from error


async def _enter(stack: AsyncExitStack, place: Any) -> None:
    """Have a place for as long, if it can be entered."""
    if _can_be_entered(place):
        await stack.enter_async_context(place)


def _can_be_entered(place: object) -> bool:
    return hasattr(type(place), "__aenter__")
