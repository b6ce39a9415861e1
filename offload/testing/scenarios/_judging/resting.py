"""What is looked at when everything is over: first while the system is still open, if it is left in peace, then behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from .._contract import System
from .._house import first_destination
from .._program import TICK
from .causes import Causes
from .expecting import Rest

if TYPE_CHECKING:
    from .._world.world import VirtualWorld

_AT_ONCE: Final = 8
"""Blocks in a load of what an engine has: few, since it gives a tier so long to answer and no longer."""


async def look(world: VirtualWorld) -> Rest:
    """Everything has ended and the system is still open: what it holds, what it has, and whether that can be loaded."""
    if world.ledger is not None:  # what is ours is looked at from inside, when it has closed
        return Rest()
    await world.quiet()
    for place in world.places.values():
        place.calm()
    system = world.system
    engine = world.scenario.engine
    if engine is not None:
        await system.drain(world.first)  # type: ignore[attr-defined]  # nobody waits for what is on its way up
        if not world.slow:  # by then, no tier is left alone any more
            await trio.sleep(engine.longest_wait_ms * TICK)
    _release(world)
    _judge_held(world, system)
    rest = Rest(_found(world, system), _metrics(world, system))
    await _load_all(world, system)
    return rest


def look_after(world: VirtualWorld, before: Rest) -> Rest:
    """The system has closed. Returns what it has and its figures, for the expectations."""
    rest = before
    if world.stuck:  # whatever else is wrong comes of that
        return rest
    for parcel in world.parcels.values():  # what ended with the system, nobody was there to see
        world.look(parcel)
    world.oracle.judge_tickets()
    if world.ledger is not None:
        figures = _metrics(world, world.system)
        rest = Rest(_found(world, world.system), figures)
        world.ledger.close()
        for text in world.ledger.violations:
            rule, colon, what = text.partition(": ")
            if colon and " " not in rule:
                world.wrong(rule, what)
            else:
                world.wrong("crash", text)
        _judge_held(world, world.system)
        for rule, text in Causes(world, world.oracle).all():
            world.wrong(rule, text)
    else:
        for place in world.places.values():
            for clash in place.clashes:
                world.wrong("I7", clash)
        if not rest.found:  # it was closed before its time: what it may still say is for the expectations alone
            return _last_words(world)
    if rest.found:
        for tier in world.oracle.tiers:
            world.oracle.judge_found(tier, {key.encode() for key in rest.found.get(tier, ())})
    return rest


def _last_words(world: VirtualWorld) -> Rest:
    """What a system says that has closed, if it still answers: nobody promised that."""
    found: Mapping[str, Any] = {}
    metrics: Mapping[str, Any] = {}
    with contextlib.suppress(Exception):
        found = _found(world, world.system)
    with contextlib.suppress(Exception):
        metrics = _metrics(world, world.system)
    with contextlib.suppress(Exception):
        _release(world)
        _judge_held(world, world.system)
    return Rest(found, metrics)


def _release(world: VirtualWorld) -> None:
    """As an operator would, who knows that all copies are over."""
    release: Callable[[str], object] | None = getattr(world.system, "release", None)
    if release is not None:
        for pipeline in world.pipelines:
            release(pipeline)


def _judge_held(world: VirtualWorld, system: System) -> None:
    if not hasattr(system, "release") and any(place.unknown for place in world.places.values()):
        return  # what such a copy holds is in quarantine, and nobody can let it go
    held = {what: amount for what, amount in system.audit().items() if amount}
    if held:
        world.wrong("I1", "at rest it still holds " + ", ".join([f"{what}: {n}" for what, n in sorted(held.items())]))


def _found(world: VirtualWorld, system: System) -> Mapping[str, Any]:
    found: Callable[[str], Any] | None = getattr(system, "found", None)
    if found is None:
        return {}
    return {tier: frozenset([key.decode(errors="backslashreplace") for key in found(tier)]) for tier in world.tiers}


def _metrics(world: VirtualWorld, system: System) -> Mapping[str, Any]:
    statistics: Callable[[str], Any] | None = getattr(system, "statistics", None)
    if statistics is None:
        return {}
    return {pipeline: _figures(statistics(pipeline)) for pipeline in world.pipelines}


def _figures(statistics: Any) -> Mapping[str, Any]:
    if isinstance(statistics, Mapping):
        return dict(statistics)
    return attrs.asdict(statistics) if attrs.has(type(statistics)) else dict(vars(statistics))


async def _load_all(world: VirtualWorld, system: System) -> None:
    """Load everything that must be there: what it is, is compared."""
    tier, oracle = first_destination(world.scenario), world.oracle
    keys = oracle.must(tier)
    at_once = _AT_ONCE if world.scenario.engine is not None else max(len(keys), 1)
    for start in range(0, len(keys), at_once):
        load = oracle.loading(tier, keys[start : start + at_once])
        try:
            found = await system.load(load.keys)
        except OSError as error:
            oracle.ends(load)
            world.wrong("model", f"{tier} cannot be read, though nothing goes wrong any more: {error!r}")
        else:
            oracle.loaded(load, found)
