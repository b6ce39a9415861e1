"""An engine over several tiers as a system under test.

Its tiers may break, are left alone, tried again, and used again. The engine is :func:`offload.open_engine`'s, with its
breakers, its lookups over all tiers and its promotions; the tiers are those of our pipelines, in virtual time and for
real. No ledger looks into it: it is judged like any system, by its tickets, loads and tiers, and by its holdings at
rest. Two rules are its own:

Rule 1. A store that is complete has a good end on each of its routes: each block that the first tier took is in the
        next one, or was kept back from it with a reason.
Rule 2. A lookup has a timeout (:func:`lookup_timeout_of`), and is over by then: no silent tier hides the blocks of the
        others.

The faults of a virtual tier apply to every request to it, not only to copies: a dead peer raises, and a stalled one
answers when the stall is over. Without either, a tier that takes no time answers at once an engine that asks so
(`backends.base.direct`), with the probability ``at_once``. A page store is asked over its socket, and needs no such
simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from backends import CapacityError, MissingKeys
from backends.abc import Deletion, Destination, Failed, Key, Outcome, ReadLease, Unproven
from backends.base.direct import DirectTier
from backends.base.pages import Pages, new_pages
from backends.base.slots import PagesDestination
from maru.exception_groups import holds
from offload import NO_WAIT, EngineConfig, LoadOrRecompute, PipelineClosed, PipelineFull, Route, open_engine
from offload._config import BreakerConfig
from offload._engine import Engine, Hit
from offload._health import HealthState
from offload._pipeline.container import OffloadBatch, OffloadContainer
from offload._pipeline.lifecycle import Status
from offload.instruments import Every

from ._fields import config_of
from ._invariants import judge_share
from ._pipeline_system import PipelineSystem
from ._program import TICK, EngineSpec
from ._systems import Refused, System, Ticket
from ._virtual_tier import Unknown, VirtualTier

if TYPE_CHECKING:
    from ._rng import Rng
    from ._systems import World
    from ._virtual_tier import TierModel
    from ._world import VirtualWorld


class FaultyQueries:
    """Mixin for tiers whose answers follow the faults of their model.

    They raise while the peer is dead, and come late while it is stalled.
    """

    if TYPE_CHECKING:
        model: Any
    rng: Rng | None = None
    """Source of the choice which questions are answered at once; ``None``: none."""
    asked_in_vain: int = 0
    """Number of questions to a peer that was dead or stalled."""
    _asked_at_once: int = 0

    async def answer(self) -> None:
        """Wait until the tier would answer.

        Raises:
            OSError: its peer is dead.
        """
        stall = self.model.window("stall")
        self.asked_in_vain += stall is not None or self.model.window("peer_death") is not None
        if stall is not None:
            stall.entry.fired = True
            await trio.sleep_until(stall.until)
        self.model.check_peer()

    async def pin(self, keys: Sequence[Key]) -> Any:
        """Wait until the tier answers, then pin."""
        await self.answer()
        return await super().pin(keys)  # type: ignore[misc]

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Wait until the tier answers, then load."""
        await self.answer()
        return await super().load(lease, destination)  # type: ignore[misc, no-any-return]

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Wait until the tier answers, then delete."""
        await self.answer()
        return await super().delete(keys)  # type: ignore[misc, no-any-return]

    # At once (`backends.base.direct`): a tier answers only if nothing has to wait, whatever the tier below offers.

    def contains_from_thread(self, keys: Sequence[Key]) -> Any:
        """Return the answer at once, or None."""
        return super().contains_from_thread(keys) if self._answers_at_once() else None  # type: ignore[misc]

    def pin_from_thread(self, keys: Sequence[Key]) -> Any:
        """Pin at once, or return None."""
        return super().pin_from_thread(keys) if self._answers_at_once() else None  # type: ignore[misc]

    def load_from_thread(self, lease: Any, there: Pages, deadline: float) -> bool:
        """Load at once; return False for a load that takes time."""
        takes_time = self.model.window("slow_loads") or self.model.duration(len(there) * there.page_bytes)
        if takes_time or not self._answers_at_once():
            return False
        return super().load_from_thread(lease, there, deadline)  # type: ignore[misc, no-any-return]

    def _answers_at_once(self) -> bool:
        """Return whether this question is answered without waiting.

        It is drawn by the scenario's share.

        Raises:
            OSError: its peer is dead.
        """
        if self.rng is None or self.model.window("stall") is not None:
            return False
        self.model.check_peer()
        self._asked_at_once += 1
        return self.rng.chance(self.model.spec.at_once, "at once", self.model.name, self._asked_at_once)


class VirtualEngineTier(FaultyQueries, VirtualTier, DirectTier):
    """Virtual tier behind an engine, with faults of its questions.

    While the end of its copies is unknown, that of its loads is, too.
    """

    def __init__(self, model: TierModel, unproven: list[Pages]) -> None:
        super().__init__(model)
        self._unproven = unproven

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load once the tier answers, unless the end of it is unknown.

        Raises:
            Unknown: it may still write to these places, now and later.
            ExceptionGroup: a group with one of these.
        """
        views = destination.views()
        if views is not None:
            self._begin_load(views)
        window = self.model.window("unproven")
        if window is None or views is None:
            return await super().load(lease, destination)
        window.entry.fired = True
        self._unproven.append(views)
        error = Unknown(f"it is unknown how a load from {self.name} ended")
        raise ExceptionGroup(f"a load from {self.name}", [error]) if window.grouped else error

    def load_from_thread(self, lease: Any, there: Pages, deadline: float) -> bool:
        """Load at once, unless the end of it would be unknown."""
        if self.model.window("unproven") is not None:
            return False
        self._begin_load(there)
        return super().load_from_thread(lease, there, deadline)

    def _begin_load(self, there: Pages) -> None:
        written = {address for pages in self._unproven for address in pages.addresses}
        if not written.isdisjoint(there.addresses):
            self.model.clashes.append(f"{self.name} loads to where a load without a proven end may still write")


class VirtualEngineParts(PipelineSystem):
    """Tiers and stored blocks of an engine in virtual time."""

    def __init__(self, world: VirtualWorld) -> None:
        self._unproven: list[Pages] = []
        super().__init__(world)

    def _tier(self, model: TierModel) -> VirtualTier:
        return VirtualEngineTier(model, self._unproven)


class _HookInstrument(Every):
    """Instrument that reports events of users' containers to the world."""

    def __init__(self, parts: PipelineSystem) -> None:
        self._parts = parts
        self.engine: Engine | None = None
        """Engine, once it is open."""

    def saw(self, hook: str, subject: OffloadContainer | OffloadBatch | Sequence[OffloadContainer]) -> None:
        if isinstance(subject, OffloadContainer):
            if hook == "settled" and subject.status is Status.COMPLETE and subject.routes:
                self._all_went_on(subject)
            if hook == "settled":
                self._owes_nothing_to_routes(subject)
            self._holds_no_more_than_shares()
            containers: Sequence[OffloadContainer] = [subject]
        else:
            containers = subject.containers if isinstance(subject, OffloadBatch) else subject
        stored = self._parts._stored
        labels = [stored[container.blocks] for container in containers if container.blocks in stored]
        if labels:
            self._parts.world.hook(hook, labels, "")

    def _owes_nothing_to_routes(self, container: OffloadContainer) -> None:
        """Check that no optional route has failed a store."""
        spec = self._parts.world.scenario.engine
        assert spec is not None
        if spec.required or container.blocks not in self._parts._stored:
            return
        whole = len(container.completed) == len(container.blocks) - len(container.filtered) - len(container.evicted)
        if container.routes or (whole and container.completed and container.status is not Status.COMPLETE):
            self._parts.world.wrong("I9", f"{container!r} is in the first tier, and waited for, or failed by, a route")

    def _holds_no_more_than_shares(self) -> None:
        """Check that optional routes keep to their share of the tier above."""
        spec = self._parts.world.scenario.engine
        assert spec is not None
        for pipeline in () if spec.required or self.engine is None else self.engine.pipelines[1:]:
            judge_share(self._parts.world, pipeline)

    def _all_went_on(self, container: OffloadContainer) -> None:
        """Check rule 1: a complete store's blocks went on along each route."""
        for name, route in (container.routes or {}).items():
            lost = set(container.completed).difference(route.completed, route.filtered)
            if lost:
                told = ", ".join(sorted(key.decode(errors="backslashreplace") for key in lost))
                self._parts.world.wrong(
                    "I5", f"{container!r} is complete, and on its route to {name} {told} went nowhere"
                )


class EngineSystem:
    """An engine as a system under test."""

    def __init__(self, parts: PipelineSystem, engine: Engine, patience: float) -> None:
        self._parts = parts
        self._engine = engine
        self._world = parts.world
        self._patience = patience

    def __repr__(self) -> str:
        return f"<{self._engine!r} under test>"

    # -- the contract --------------------------------------------------------------------------------------------------

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> Ticket:
        """Store a container into the first tier, and down from there."""
        request, parts = self._world.requests[label], self._parts
        parts._keep_alive(request)
        blocks = None
        try:
            blocks = parts._blocks(parts.tiers[self._world.pipelines[request.pipeline].source], request)
            return await self._engine.store(blocks, precondition=request.after or NO_WAIT)
        except (PipelineFull, PipelineClosed, CapacityError, MissingKeys, ValueError) as error:
            parts.ended(label)
            raise Refused(type(error).__name__) from error
        except BaseException:
            parts.ended(label)
            raise

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Load blocks from any tier, prefix by prefix.

        Raises:
            OSError: a block was not found, and a tier that may have it could not be asked.
        """
        found: dict[Key, bytes | None] = dict.fromkeys(keys)
        todo = list(keys)
        while todo:
            async with await self._lookup(todo) as hit:
                loaded, end = await self._read(hit, todo)
            found.update(loaded)
            todo = todo[max(end, len(loaded) + 1) :]
        return found

    async def load_from(self, tier: str, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Load from one tier, without asking the engine."""
        return await self._parts.load_from(tier, keys)

    @asynccontextmanager
    async def hold(self, tier: str, keys: Sequence[Key]) -> AsyncIterator[Callable[[], Awaitable[Mapping[Key, bytes]]]]:
        """Hold the blocks of a lookup, or of one tier if named."""
        if tier:
            async with self._parts.hold(tier, keys) as read:
                yield read
            return
        async with await self._lookup(keys) as hit:
            yield lambda: self._read_again(hit, keys)

    async def _lookup(self, keys: Sequence[Key]) -> Hit:
        """Look keys up, and check rule 2: the lookup ends in time."""
        began = trio.current_time()
        hit = await self._engine.lookup(keys, within=self._patience)
        took, jumps = trio.current_time() - began, self._world.jumps
        if took > self._patience + TICK / 2 and not any(began <= to and since <= began + took for since, to in jumps):
            self._world.wrong("model", f"a lookup with patience for {self._patience:g} s took {took:g} s")
        return hit

    async def _read_again(self, hit: Hit, asked: Sequence[Key]) -> dict[Key, bytes]:
        return (await self._read(hit, asked))[0]

    async def _read(self, hit: Hit, asked: Sequence[Key]) -> tuple[dict[Key, bytes], int]:
        """Load a hit's blocks; return them and where the left-out blocks end.

        Blocks that are left to be computed need not be loaded.

        Raises:
            OSError: fewer blocks were loaded than requested, and a tier that may have the rest could not be asked.
        """
        n = len(hit.keys)
        pages = new_pages(n, self._engine.source.block_bytes)
        try:
            result = await self._engine.load(hit, PagesDestination(pages)) if n else None
        except Exception as error:
            if not holds(error, Unproven):
                raise
            raise ConnectionResetError(f"the content of these places is unknown: {error!r}") from error
        loaded = result.loaded if result is not None else 0
        keys = hit.keys[:loaded]
        if self._engine.promote:
            self._world.oracle.may_arrive(list(self._engine.tiers)[:-1], keys)
        left = [one for one in (hit.left_out, None if result is None else result.left_out) if one is not None]
        end = max([one.start + one.blocks for one in left], default=0)
        self._world.oracle.excuse(asked[loaded:end])
        if max(loaded, end) < len(asked):
            failed = result is not None and any(isinstance(outcome, Failed) for outcome in result.outcomes)
            if failed or hit.unavailable:
                raise ConnectionResetError(f"not all tiers could be asked: {hit.unavailable or result}")
        return {key: bytes(pages[at]) for at, key in enumerate(keys)}, end

    async def delete(self, tier: str, keys: Sequence[Key]) -> None:
        """Delete keys of one tier."""
        await self._parts.delete(tier, keys)

    async def drain(self, pipeline: str) -> None:
        """Wait until everything inside has settled, promotions included."""
        await self._engine.drain()

    def evict(self, tier: str, keys: Sequence[Key], again: bool) -> Sequence[Key]:
        """Take keys out of a source."""
        return self._parts.evict(tier, keys, again)

    def release(self, pipeline: str) -> None:
        """Release all quarantined entries."""
        for entry in self._engine.quarantine:
            entry.release()

    def found(self, tier: str) -> AbstractSet[Key]:
        """Return the keys that can be found in a tier."""
        return self._parts.found(tier)

    def audit(self) -> Mapping[str, int]:
        """Return the resources that are still held."""
        held: Counter[str] = Counter()
        statistics = self._engine.statistics()
        held["open hits"] = statistics.open_hits
        held["blocks on their way up"] = statistics.promoting_blocks
        for name, one in statistics.pipelines.items():
            held[f"budget of {name}"] = one.used_blocks
            held[f"inside {name}"] = one.inside
            held[f"waiting for room in {name}"] = one.waiting_enqueues
        for name, tier in self._parts.tiers.items():
            pool = tier.pool.statistics()
            held[f"refs in {name}"] = pool.held
            held[f"reservations in {name}"] = pool.staged
            held[f"copies into {name}"] = tier.copying
        return held

    def statistics(self, pipeline: str) -> Mapping[str, Any]:
        """Return figures of the pipeline into a tier, and of its health.

        See :data:`ENGINE_FIGURES`.
        """
        statistics = self._engine.statistics()
        health = statistics.health[pipeline]
        return {
            **attrs.asdict(statistics.pipelines[pipeline]),
            "well": int(health.state is HealthState.CLOSED),
            "faults": health.faults,
            "asked_in_vain": getattr(self._parts.tiers[pipeline], "asked_in_vain", 0),
            "left_out": statistics.lookup_failures.get(pipeline, 0),
            "promoted": statistics.promoted_blocks,
            "given_up": sum(statistics.load_or_recompute.given_up.values()),
            "cut_blocks": statistics.load_or_recompute.cut_blocks,
        }


def breaker_of(spec: EngineSpec) -> BreakerConfig:
    """Return the breakers that a scenario asks for."""
    return BreakerConfig(
        max_faults=spec.max_faults,
        first_wait=spec.first_wait_ms * TICK,
        longest_wait=spec.longest_wait_ms * TICK,
        call_timeout=spec.call_ms * TICK,
        load_timeout=spec.load_ms * TICK,
    )


def choice_of(spec: EngineSpec) -> LoadOrRecompute:
    """Return a scenario's choice between loading and computing blocks."""
    seconds = spec.recompute_ms * TICK
    return LoadOrRecompute(mode="enforce" if seconds else "off", seconds_per_block=seconds)


def lookup_timeout_of(spec: EngineSpec) -> float:
    """Return the timeout of a lookup over all tiers, in seconds."""
    return min(spec.call_ms, spec.lookup_ms) * len(spec.tiers) * TICK


@asynccontextmanager
async def running_engine(parts: PipelineSystem, patience: float = math.inf) -> AsyncIterator[EngineSystem]:
    """Open an engine over a scenario's tiers.

    In a real run lookups have no bound.
    """
    world = parts.world
    spec = world.scenario.engine
    assert spec is not None
    world.ledger = None  # it is judged like any other system
    tiers = {name: parts.tiers[name] for name in spec.tiers}
    for tier in tiers.values():
        if isinstance(tier, FaultyQueries):
            tier.rng = world.rng
    config = EngineConfig(
        tiers=tiers,
        pipeline=config_of(world.pipelines[world.first]),
        routes=tuple(Route(name, required=spec.required) for name in spec.tiers[1:]),
        promote=spec.promote,
        on_load_failure=spec.on_load_failure,
        breaker=breaker_of(spec),
        load_or_recompute=choice_of(spec),
    )
    source = parts.tiers[world.pipelines[world.first].source]
    hooks = _HookInstrument(parts)
    async with open_engine(source, config, instruments=[hooks]) as engine:
        hooks.engine = engine
        yield EngineSystem(parts, engine, patience)


@asynccontextmanager
async def open_engine_system(world: World) -> AsyncIterator[System]:
    """Open the engine of a scenario, in virtual time."""
    virtual: VirtualWorld = world  # type: ignore[assignment]
    assert virtual.scenario.engine is not None
    async with running_engine(VirtualEngineParts(virtual), lookup_timeout_of(virtual.scenario.engine)) as system:
        yield system
