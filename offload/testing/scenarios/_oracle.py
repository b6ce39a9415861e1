"""Oracle for any system: an independent model of each tier's contents.

It also compares the bytes of every load. It knows the scenario's actions and the world's copies, and trusts only the
tickets of the system. Each key in each tier is in one of three states: it *must* be there, it *may* be, or it must not.

    must    held from the start, or completed by a container, and not taken away since
    may     on its way; or it was there, and was deleted while it might be held, or had a bit flipped,
            or the tier may evict
    not     everything else: a key that was never completed must not be found
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import attrs

from ._names import expand, routes_of, shown
from ._systems import Outcome
from ._trace import NoOutcome, outcome_of

if TYPE_CHECKING:
    from backends.abc import Key

    from ._world import Request, VirtualWorld


@attrs.define(eq=False)
class Load:
    """A load in progress."""

    tier: str
    """Tier of the load; empty: any of them."""
    keys: Sequence[Key]
    must: set[Key] = attrs.Factory(set)
    """Keys present when it began, and unchanged since."""
    must_not: set[Key] = attrs.Factory(set)
    """Keys absent when it began, and unchanged since."""


class Oracle:
    """Expected contents of every tier that is stored into."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._tiers = list(dict.fromkeys([spec.to for spec in world.pipelines.values()]))
        self._must: dict[str, dict[Key, None]] = {tier: {} for tier in self._tiers}
        self._may: dict[str, dict[Key, None]] = {tier: {} for tier in self._tiers}
        self._moment = 0
        self._gone: dict[tuple[str, Key], int] = {}
        """Moment at which a key was last taken away."""
        self._asked: dict[str, int] = {}
        self._last_asked: dict[tuple[str, Key], int] = {}
        """Moment at which a key's store was last requested."""
        self._loads: dict[Load, None] = {}
        self._unasked: set[tuple[str, Key]] = set()
        """Keys that a promotion may have written without a request."""
        self._on_the_way: dict[str, dict[Key, int]] = {tier: {} for tier in self._tiers}
        self._below: dict[str, tuple[str, ...]] = {}
        self._evicting: dict[str, bool] = {}
        self._late = {
            tier for spec in world.pipelines.values() for route in spec.optional_chain for tier in self.below(route)
        }
        """Tiers that keys may reach after the store has ended."""

    def begin(self) -> None:
        """Mark the keys that tiers hold from the start as present."""
        for tier in self._tiers:
            self._evicting[tier] = self._evicts(tier)
            held = [key.encode() for key in expand(self._world.tiers[tier].holds)]
            (self._may if self._evicting[tier] else self._must)[tier].update(dict.fromkeys(held))

    def _evicts(self, tier: str) -> bool:
        world = self._world
        if any(spec.on_destination_full == "evict" for spec in world.pipelines.values() if spec.to == tier):
            return True
        # A foreign system may make room by its own rules; ours does so only if it is configured to.
        known = set(expand(world.tiers[tier].holds)).union([key.decode() for key in world.all_keys])
        return world.ledger is None and len(known) > world.tiers[tier].capacity

    def below(self, pipeline: str) -> tuple[str, ...]:
        """Return the tiers that a pipeline's stored keys may reach.

        Its own destination, and those of its routes.
        """
        found = self._below.get(pipeline)
        if found is None:
            spec = self._world.pipelines[pipeline]
            routes = [tier for route in routes_of(spec) for tier in self.below(route)]
            found = self._below[pipeline] = tuple(dict.fromkeys([spec.to, *routes]))
        return found

    def required_below(self, pipeline: str) -> tuple[str, ...]:
        """Return the tiers that a store through a pipeline waits for.

        Its own destination, and those of its chain.
        """
        spec = self._world.pipelines[pipeline]
        return (spec.to, *[tier for route in spec.chain for tier in self.required_below(route)])

    # -- events --------------------------------------------------------------------------------------------------------

    def _touch(self, tier: str, keys: Iterable[Key]) -> None:
        """Make the outcome of loads in progress uncertain for these keys."""
        self._moment += 1
        for key in keys if self._loads else ():
            for load in self._loads:
                if load.tier in (tier, ""):
                    load.must.discard(key)
                    load.must_not.discard(key)

    def asked(self, request: Request) -> None:
        """Mark a container as on its way, until it ends.

        A refusal ends it as well.
        """
        for tier in self.below(request.pipeline):
            self._touch(tier, request.keys)
            way = self._on_the_way[tier]
            for key in request.keys:
                way[key] = way.get(key, 0) + 1
        self._asked[request.label] = self._moment
        for tier in self.below(request.pipeline):
            for key in request.keys:
                self._last_asked[tier, key] = self._moment

    def not_taken(self, request: Request) -> None:
        """Record that a container was refused, or abandoned before acceptance."""
        self._arrived(request)

    def ended(self, request: Request) -> None:
        """Record the end of a container: completed keys must be present.

        Other keys are as before.
        """
        self._arrived(request)
        assert request.outcome is not None
        self._end(request.pipeline, request.outcome, request.result, self._asked.get(request.label, 0))

    def _arrived(self, request: Request) -> None:
        for tier in self.below(request.pipeline):
            way = self._on_the_way[tier]
            for key in request.keys:
                way[key] -= 1

    def _end(self, pipeline: str, outcome: Outcome, result: Any, asked: int) -> None:
        world, spec = self._world, self._world.pipelines[pipeline]
        tier, model = spec.to, world.tier_models[spec.to]
        must, may = self._must[tier], self._may[tier]
        for key in outcome.completed:
            sure = self._gone.get((tier, key), 0) <= asked
            if key in model.flipped or not sure or self._evicting[tier]:
                must.pop(key, None)
                may[key] = None
            else:
                may.pop(key, None)
                must[key] = None
        for key, error in outcome.failed.items():
            if key not in must and model.arrived.get(key):
                may[key] = None
            if error == "PipelineClosed":
                # Copies of a chain that were in progress when it was cut off may still arrive: its routes go on to
                # their own end.
                for lower in self.below(pipeline):
                    if key not in self._must[lower]:
                        self._may[lower][key] = None
        self._touch(tier, outcome.completed)
        engine = world.scenario.engine
        if engine is not None and not engine.required:
            self.may_arrive(engine.tiers[1:], outcome.completed)
        for route in spec.optional_chain:
            self.may_arrive(self.below(route), outcome.completed)
        for name, route in (getattr(result, "routes", None) or {}).items():
            self._end(name, outcome_of(route), route, asked)

    def taken_away(self, tier: str, keys: Iterable[Key]) -> None:
        """Record that these may be gone: they were evicted, or flipped."""
        if tier not in self._must:
            return
        keys = list(keys)
        self._touch(tier, keys)
        for key in keys:
            self._gone[tier, key] = self._moment
            if key in self._must[tier]:
                del self._must[tier][key]
                self._may[tier][key] = None

    def deleting(self, tier: str, keys: Sequence[Key]) -> Mapping[Key, bool]:
        """Record the start of a delete; return the keys on their way.

        A delete may take any time.
        """
        self.taken_away(tier, keys)
        way = self._on_the_way.get(tier, {})
        return {key: bool(way.get(key)) for key in keys}

    def deleted(self, tier: str, keys: Sequence[Key], before: Mapping[Key, bool]) -> None:
        """Record the end of a delete: the keys are gone.

        Keys that may have been held or stored meanwhile are uncertain.
        """
        if tier not in self._must:
            return
        began = min([self._gone.get((tier, key), 0) for key in keys], default=0)
        self.taken_away(tier, keys)
        engine = self._world.scenario.engine  # each tier of an engine holds the keys that the next one lacks
        source = any(spec.source == tier for spec in self._world.pipelines.values())
        # A route that is not required may bring it to the last tier later.
        source = source or (engine is not None and tier in engine.tiers[: -1 if engine.required else None])
        source = source or tier in self._late
        for key in keys:
            held = source or self._on_the_way[tier].get(key) or any(key in load.keys for load in self._loads)
            held = held or before.get(key) or self._last_asked.get((tier, key), 0) > began
            if not held:
                self._may[tier].pop(key, None)

    def may_arrive(self, tiers: Iterable[str], keys: Iterable[Key]) -> None:
        """Record that these keys may be promoted to these tiers.

        A promotion writes them without a request.
        """
        keys = list(keys)
        for tier in tiers:
            self._touch(tier, keys)
            for key in keys:
                self._unasked.add((tier, key))
                if key not in self._must[tier]:
                    self._may[tier][key] = None

    # -- loads ---------------------------------------------------------------------------------------------------------

    def loading(self, tier: str, keys: Sequence[Key]) -> Load:
        """Record the start of a load, with its required and forbidden keys."""
        load = Load(tier, keys)
        tiers = self._tiers if not tier else [tier] if tier in self._must else []
        for key in keys if tiers else ():
            if any(key in self._must[one] and key not in self._world.tier_models[one].flipped for one in tiers):
                load.must.add(key)
            elif not any(
                key in self._must[one] or key in self._may[one] or self._on_the_way[one].get(key) for one in tiers
            ):
                load.must_not.add(key)
        self._loads[load] = None
        return load

    def excuse(self, keys: Sequence[Key]) -> None:
        """Excuse loads in progress from these keys, left to be computed."""
        for load in self._loads:
            load.must.difference_update(keys)

    def ends(self, load: Load) -> None:
        """Record the end of a load, with its hold.

        A load that raised proves nothing.
        """
        self._loads.pop(load, None)

    def loaded(self, load: Load, found: Mapping[Key, bytes | None]) -> None:
        """Record the end of a load, and compare its blocks."""
        self.ends(load)
        self.brought(load, found, load.keys)

    def brought(self, load: Load, found: Mapping[Key, bytes | None], keys: Sequence[Key]) -> None:
        """Compare a load's blocks for these keys.

        It may go on holding them.
        """
        world, flipped = self._world, self.flipped(load)
        tiers = [load.tier] if load.tier else self._tiers
        where = load.tier or "one of " + ", ".join(tiers)
        for key in keys:
            data = found.get(key)
            if data is None:
                if key in load.must and key not in flipped:
                    world.wrong("model", f"{shown([key])} must be in {where}, and was not loaded")
                if key in flipped:
                    for tier in tiers:
                        self.taken_away(tier, [key])
                continue
            if bytes(data) != world.payload(key, load.tier):
                world.wrong("bytes", f"{shown([key])} was loaded from {where}, and is not what was stored")
            if key in load.must_not:
                world.wrong("model", f"{shown([key])} was loaded from {where}, and nobody has completed it")

    def held_on(self, load: Load, first: Mapping[Key, bytes], again: Mapping[Key, bytes]) -> Sequence[Key]:
        """Return the held keys whose second read differs from the first."""
        flipped, lost, short = self.flipped(load), [], False
        for key in load.keys:
            had, has = first.get(key), again.get(key)
            if key in flipped and (had is None or has is None):
                short = True  # found to be damaged, and its reader may read no further
            elif had != has and not (short and (had is None or has is None)):
                lost.append(key)
        return lost

    def flipped(self, load: Load) -> AbstractSet[Key]:
        """Return the blocks with a flipped bit in a load's tiers."""
        tier_models = self._world.tier_models
        tiers = [load.tier] if load.tier else self._tiers
        return set().union(*[tier_models[tier].flipped for tier in tiers if tier in tier_models])

    # -- when it is over -----------------------------------------------------------------------------------------------

    def must(self, tier: str) -> Sequence[Key]:
        """Return the keys that must be found in a tier now."""
        flipped = self._world.tier_models[tier].flipped
        return [key for key in self._must[tier] if key not in flipped]

    @property
    def tiers(self) -> Sequence[str]:
        """Tiers that the oracle models."""
        return self._tiers

    def judge_found(self, tier: str, found: Collection[Key]) -> None:
        """Compare the keys that a tier reports with the expected ones."""
        missing = [key for key in self.must(tier) if key not in found]
        if missing:
            self._world.wrong("model", f"{shown(missing, ', ')} must be in {tier}, and cannot be found")
        must, may, way = self._must[tier], self._may[tier], self._on_the_way[tier]
        strange = sorted([key for key in found if key not in must and key not in may and not way.get(key)])
        if strange:
            self._world.wrong("model", f"{shown(strange, ', ')} can be found in {tier}, and nobody has completed it")

    def judge_tickets(self) -> None:
        """Check that the tickets show possible and stable results."""
        for request in self._world.requests.values():
            if request.ticket is not None:
                for rule, text in self._ticket(request):
                    self._world.wrong(rule, text)

    def _ticket(self, request: Request) -> Iterator[tuple[str, str]]:
        world, label, outcome = self._world, request.label, request.outcome
        assert request.ticket is not None
        if outcome is None:
            yield "I2", f"{label} never ended"
            return
        try:
            now = outcome_of(request.ticket.result)
        except NoOutcome as error:
            yield "I2", f"{label} has lost its result: {error}"
            return
        if now != outcome:
            yield "I2", f"{label} ended {outcome}, and now says {now}"
        ends = (outcome.completed, tuple(outcome.filtered), tuple(outcome.failed), outcome.evicted)
        known = [key for end in ends for key in end]
        if len(set(known)) != len(known) or not set(known) <= set(request.keys):
            yield "I5", f"{label}: its blocks did not end once each: {outcome}"
        if outcome.status == "COMPLETE":
            if outcome.failed or outcome.error:
                yield "I5", f"{label} is complete, but {outcome}"
            if known and len(known) != len(request.keys):
                yield "I6", f"{label} is complete, and says nothing of {len(request.keys) - len(known)} of its blocks"
        model = world.tier_models[world.pipelines[request.pipeline].to]
        if outcome.status == "CANCELLED":
            if outcome.completed:
                yield "I4", f"{label} was cancelled, and completed {shown(outcome.completed, ', ')}"
            moved = [key for key in request.keys if model.begun.get(key) and self._only(request, key)]
            if moved:
                yield "I4", f"{label} was cancelled, and {shown(moved, ', ')} was copied into {model.name}"
        held = set(expand(model.spec.holds))
        if any(one.batches for one in world.tier_models.values()):  # all of its copies go through the world
            for key in outcome.completed:
                if not model.arrived.get(key) and key.decode(errors="replace") not in held:
                    yield "model", f"{label} completed {shown([key])}, which was never copied into {model.name}"

    def _only(self, request: Request, key: Key) -> bool:
        """Return whether no other container had this key."""
        if (self._world.pipelines[request.pipeline].to, key) in self._unasked:
            return False
        return all(other is request or other.state == "" for other in self._world.labels_of([key]))
