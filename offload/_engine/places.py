"""Making and entering the source and the tiers of an engine.

An absent tier may come later. The rules:

Rule 1. A tier that the engine may open without (``on_enter_failure``) is entered by its own task (:mod:`.late_tiers`),
        whether it is there at first or not; the task that opens the engine enters the others.
Rule 2. The properties of a tier that routes depend on are decided before it is entered: whether it must be awaited, can
        be read as a source, reports its evictions, needs tenants. A tier that has other properties once it is entered,
        or another block size, is refused.
Rule 3. A tier that could not be made has a placeholder, which cannot be read as a source.
Rule 4. A tier that was made here is closed here, last of all, whether it was entered or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs

from backends.abc import BlockSizeError, Source, Tier
from backends.base.closing import closing

from .._errors import ConfigError, TierNotEntered
from .._health import BreakerTier, with_breaker
from .._health.faults import describe, is_absence
from .._pipeline.page_hold import origin_of
from .config import EngineConfig, TierLike
from .factories import make_source, make_tier, needs_tenants
from .history import History
from .late_tiers import PlaceholderTier, Reconnector, run_reconnector


@attrs.frozen(eq=False)
class Places:
    """The tiers of an engine."""

    source: Source
    tiers: Mapping[str, Tier]
    """The tiers by name, the fastest first."""
    breaker_tiers: Mapping[str, BreakerTier]
    """The tiers behind their breakers, by name."""


async def enter_places(stack: AsyncExitStack, config: EngineConfig, history: History) -> Places:
    """Enter the source and the tiers of an engine in order.

    Closing ``stack`` leaves them.

    Raises:
        TierNotEntered: a tier is absent, and the engine does not open without it.
        Exception: making or entering a tier raised it.
    """
    made = make_source(config)
    if made is not config.source:
        stack.enter_context(closing(made))
        await _enter(stack, made)
    source = origin_of(made)
    tiers: dict[str, Tier] = {}
    breaker_tiers: dict[str, BreakerTier] = {}
    for name, configured in config.tiers.items():
        tier = tiers[name] = _made(name, configured, source.block_bytes, config)
        if tier is not configured:
            stack.enter_context(closing(tier))  # first in, so it is closed after it was left, also if entering fails
        if config.opens_without(name) and (isinstance(tier, PlaceholderTier) or _can_be_entered(tier)):
            breaker_tiers[name] = await _enter_by_reconnector(stack, name, tier, source, config, history)
        else:
            breaker_tiers[name] = _breaker_tier(name, tier, config)
            await _enter_or_raise(stack, name, tier)
    there = {name: tier for name, tier in tiers.items() if breaker_tiers[name].health.entered}
    if there:
        check_places(source, there)
    return Places(source, tiers, breaker_tiers)


def check_places(source: object, tiers: Mapping[str, object]) -> None:
    """Check that these places can be joined.

    An absent tier is checked when it is entered.

    Raises:
        ValueError: there is no tier, or one place is given twice.
        BlockSizeError: a tier has another block size than the source.
    """
    if not tiers:
        raise ValueError("an engine needs at least one tier")
    there = [place for place in (source, *tiers.values()) if isinstance(place, Source | Tier)]
    sources = [place.source if isinstance(place, Tier) else place for place in there]
    blocks = [place if its is None else its for place, its in zip(there, sources, strict=True)]
    if len(set(map(id, blocks))) != len(blocks):
        raise ValueError(f"the source and the tiers must be different places: {source!r}, {list(tiers.values())!r}")
    wanted = source.block_bytes if isinstance(source, Source | Tier) else 0
    for tier in tiers.values():
        if wanted and isinstance(tier, Tier) and tier.block_bytes not in (0, wanted):  # 0: not known yet
            raise BlockSizeError(tier, tier.block_bytes, wanted)


def check_placeholders(tiers: Mapping[str, object], config: EngineConfig) -> None:
    """Check that no route starts at a tier not made yet.

    Raises:
        ConfigError: one does, or would if the tier can be read from.
    """
    names = list(tiers)
    for at, (name, tier) in enumerate(tiers.items()):
        if not isinstance(tier, PlaceholderTier):
            continue
        if any(route.source == name for route in config.routes) or (config.chain != "none" and at + 1 < len(names)):
            raise ConfigError(
                f"on_enter_failure.{name}",
                "miss",
                f"{name} could not be made, so it is unknown whether it can be read from, which a route that starts there "
                f"needs: put it last, or set chain = 'none' and no route from it ({tier.why})",
            )


def _made(name: str, configured: TierLike, block_bytes: int, config: EngineConfig) -> Tier:
    """Make a tier, or a placeholder for a permitted absent tier."""
    knob = f"tiers.{name}"
    make = partial(make_tier, knob, configured, block_bytes)
    try:
        return make()
    except Exception as error:
        if not is_absence(error):
            raise
        if not config.opens_without(name):
            raise TierNotEntered(name, describe(error)) from error
        return PlaceholderTier(make, block_bytes, error, seals=needs_tenants(knob, configured))


async def _enter_by_reconnector(
    stack: AsyncExitStack, name: str, tier: Any, source: Source, config: EngineConfig, history: History
) -> BreakerTier:
    """Start a tier's reconnector, and wait for its first attempt.

    Returns the tier behind its breaker.
    """
    kind = _kind_of(name, tier)
    breaker_tier = _breaker_tier(name, tier, config)
    runner = breaker_tier._runner
    runner.availability.leave_out()

    def check_entered() -> None:
        if isinstance(tier, PlaceholderTier):
            if tier.made.capabilities.needs_tenants and not tier.capabilities.needs_tenants:
                raise TypeError("it needs tenants, which could not be known before it was made")
            history.watch_tier(
                name, tier.made
            )  # as soon as it is made; its evictions can be watched before it is entered
        elif (now := _kind_of(name, tier)) != kind:
            raise TypeError(f"its kind changed when it was entered: {now}, not {kind}")
        size: int = (tier.made if isinstance(tier, PlaceholderTier) else tier).block_bytes
        if size and source.block_bytes and size != source.block_bytes:
            raise BlockSizeError(tier, size, source.block_bytes)

    await stack.enter_async_context(
        run_reconnector(
            Reconnector(runner, tier.enter if isinstance(tier, PlaceholderTier) else lambda: tier, check_entered)
        )
    )
    return breaker_tier


@attrs.frozen
class _Kind:
    """The properties of a tier that routes depend on."""

    remote: bool
    source: bool
    spills: bool
    of_tenants: bool


def _kind_of(name: str, tier: Tier) -> _Kind:
    try:
        able = tier.capabilities
        return _Kind(
            not able.answers_at_once,
            tier.source is not None,
            able.reports_evictions,
            able.needs_tenants,
        )
    except Exception as error:
        raise ConfigError(
            f"on_enter_failure.{name}",
            "miss",
            f"the kind of {tier!r} is unknown before it is entered: {error!r}",
        ) from error


def _breaker_tier(name: str, tier: Tier, config: EngineConfig) -> BreakerTier:
    """Return this tier with its breaker, or with a new one."""
    return with_breaker(tier, name, breaker=config.breaker)


async def _enter_or_raise(stack: AsyncExitStack, name: str, tier: object) -> None:
    """Enter a tier that the engine does not open without.

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
    """Enter a place, if possible, until the stack is closed."""
    if _can_be_entered(place):
        await stack.enter_async_context(place)


def _can_be_entered(place: object) -> bool:
    return hasattr(type(place), "__aenter__")
