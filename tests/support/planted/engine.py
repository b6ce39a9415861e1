"""Faults of an engine and of its breakers, each with the rule that random programs find it by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

import offload._engine.engine as engine_module
import offload._engine.loading as loading_module
import offload._engine.routes as routes_module
from backends.abc import LOADED, WeakBlocks
from backends.base._thread_pins import ThreadPin, ThreadPins
from backends.base.pages import copy_pages
from backends.base.pooled import ThreadLease
from backends.base.slots import SlotTier
from offload import BreakerTier, Engine, HealthState, Hit
from offload._engine.direct import DirectReads, _DirectQueries
from offload._engine.loading import Loading
from offload._engine.promotion import Promoter, Staging
from offload._health.breaker import Breaker, Call, Verdict
from offload._pipeline.chain import Chain
from offload._pipeline.marks import place_of
from offload._pipeline.offer import RouteShare

from . import Fault

PLANTS: list[tuple[Fault, str]] = []
FIRST: dict[Fault, int] = {}
"""The seed to try first, where the first that finds a plant is a late one."""


def _plant(rule: str, first: int = 0) -> Callable[[Fault], Fault]:
    """A patch of the real code, and the rule that it breaks."""

    def enlist(patch: Fault) -> Fault:
        PLANTS.append((patch, rule))
        FIRST[patch] = first
        return patch

    return enlist


@_plant("model", first=29)
def a_breaker_never_closes(patch: Any) -> None:
    """Its probe is answered, and it is left alone for good."""
    release = Breaker.release

    def never(self: Breaker, turn: int, call: Call, verdict: Verdict, now: float, cause: str = "") -> None:
        if self.state is HealthState.HALF_OPEN and verdict is Verdict.ANSWERED:
            verdict = Verdict.FAULT
        release(self, turn, call, verdict, now, cause)

    patch.setattr(Breaker, "release", never)


@_plant("model", first=29)
def a_breaker_never_tries_again(patch: Any) -> None:
    """Whoever is alone once is so for good."""
    acquire = Breaker.acquire
    patch.setattr(
        Breaker, "acquire", lambda self, now: acquire(self, now) if self.state is HealthState.CLOSED else None
    )


@_plant("model")
def a_tier_that_could_not_be_asked_is_not_told_of(patch: Any) -> None:
    find = engine_module.find

    async def silent(*args: Any, **options: Any) -> Any:
        runs, _ = await find(*args, **options)
        return runs, {}

    patch.setattr(engine_module, "find", silent)


@_plant("I1")
def a_hit_is_not_released(patch: Any) -> None:
    async def leave(self: Hit, *error: object) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(Hit, "__aexit__", leave)


@_plant("I1")
def what_is_looked_for_once_more_stays_pinned(patch: Any) -> None:
    async def keep(runs: object) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(loading_module, "release_segments", keep)


@_plant("bytes", first=41)
def what_is_looked_for_once_more_comes_into_its_neighbours_place(patch: Any) -> None:
    search = Loading._search

    async def beside(self: Loading, behind: int, start: int, stop: int) -> Any:
        off = min(start, 1)
        return await search(self, behind, start - off, stop - off)

    patch.setattr(Loading, "_search", beside)


@_plant("bytes", first=37)
def a_prefix_goes_on_behind_a_gap(patch: Any) -> None:
    patch.setattr(loading_module, "_leading", lambda outcomes: outcomes.count(LOADED))


@_plant("I7", first=138)
def what_a_copy_may_still_write_to_is_loaded_into(patch: Any) -> None:
    """As it was, where a tier says so in a group."""
    patch.setattr(loading_module, "holds", isinstance)


@_plant("bytes")
def two_blocks_on_their_way_up_are_taken_for_each_other(patch: Any) -> None:
    views = Staging.views

    def crosswise(self: Staging, refs: Any) -> Any:
        refs = list(refs)
        refs[:2] = reversed(refs[:2])
        return views(self, refs)

    patch.setattr(Staging, "views", crosswise)
    # Else whoever copies from there compares, and finds them damaged.
    patch.setattr(Staging, "checksums_of", lambda self, keys, refs: [None] * len(refs))


@_plant("I1", first=25)
def nobody_is_shown_what_a_promotion_left_in_quarantine(patch: Any) -> None:
    """As it was before this mix found it: the room it took in the faster tier was gone for good."""
    patch.setattr(
        Engine, "quarantine", property(lambda self: [entry for one in self.pipelines for entry in one.quarantine])
    )


@_plant("I5")
def a_chain_holds_nothing_and_calls_it_complete(patch: Any) -> None:
    """As it was: what a small tier evicts before it has gone on is nowhere."""

    def hold(self: Chain, containers: Any) -> None:
        for container in containers:
            container.onward = [WeakBlocks(place_of(self.tier), container.completed, None) for _ in self.routes]

    patch.setattr(Chain, "hold", hold)
    patch.setattr(Chain, "_without", lambda self, result, *_: result)


@_plant("I9")
def store_waits_for_optional_routes(patch: Any) -> None:
    """As it was: a store failed, or waited, wherever a tier behind the first one did."""
    patch.setattr(routes_module, "_is_required", lambda route, chain: True)


@_plant("I1")
def route_holds_more_than_its_share(patch: Any) -> None:
    patch.setattr(RouteShare, "measure", lambda self: self.total)


@_plant("model")
def a_silent_tier_is_waited_for_longer_than_the_lookup_has(patch: Any) -> None:
    """As it was: each call has the deadline of its breaker, whatever the caller's."""
    pin = BreakerTier.pin
    patch.setattr(BreakerTier, "pin", lambda self, keys, within: pin(self, keys))


# --- what is answered at once -------------------------------------------------------------------------------------------


@_plant("bytes", first=155)
def what_is_loaded_at_once_is_not_compared(patch: Any) -> None:
    patch.setattr(SlotTier, "load_from_thread", _loaded_unseen)


def _loaded_unseen(self: Any, lease: Any, there: Any, deadline: float) -> bool:
    copy_pages(there, self._storage.pages(lease.refs))
    return True


@_plant("I1")
def what_is_found_at_once_is_not_released(patch: Any) -> None:
    kept: list[object] = []  # else the pin would end with its lease
    patch.setattr(ThreadLease, "release_nowait", lambda self: kept.append(self))


@_plant("I1", first=29)
def what_is_pinned_at_once_stays_pinned_where_the_rest_must_be_waited_for(patch: Any) -> None:
    kept: list[object] = []
    patch.setattr(_DirectQueries, "release", lambda self: kept.append(self.segments))


@_plant("model", first=34)
def what_is_pinned_at_once_is_not_held(patch: Any) -> None:
    """It is evicted, or deleted, under its reader."""
    patch.setattr(ThreadPins, "pin", _pinned_by_nobody)


def _pinned_by_nobody(self: ThreadPins, lease: Any, keys: Any, slots: Any) -> ThreadPin:
    return ThreadPin(lease, lambda pin: None, keys, slots)


@_plant("model", first=22)
def a_broken_tier_that_is_left_out_at_once_is_not_told_of(patch: Any) -> None:
    find = DirectReads.find

    def silent(self: DirectReads, keys: Any, tenant: str) -> Any:
        found = find(self, keys, tenant)
        if found is not None:
            found.hit.unavailable = {}
        return found

    patch.setattr(DirectReads, "find", silent)


def a_promotion_never_comes(patch: Any) -> None:
    """What is loaded from a slower tier stays there alone. Only a scenario that expects promotion can tell."""
    patch.setattr(Promoter, "promote", lambda self, *args, **options: None)
