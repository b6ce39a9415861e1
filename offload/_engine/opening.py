"""Opening: tiers are given names, pipelines lead from one to the next, and all of it ends in the right order.

First in, last out: the places are entered first, then the routes between them, the last one first, since a route is opened
before what leads to it, then the ways up. At the end the hits go before the pipelines, and these before the places they are of.
A tier that cannot be entered yet has its turn in that order all the same: who keeps it entered stands there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, overload

import attrs

from backends.abc import ReadableTier, Source, TenantTier

from .._config import BreakerConfig, PipelineConfig
from .._health import BreakerTier
from .._pipeline.pipeline import Pipeline, open_pipeline
from .._pipeline.priority import Precedence
from .._pipeline.spill import Spilling, spill
from .._pipeline.spill_route import what_is_new
from ..abc import AsyncPolicy, Instrument, Policy
from .carrying import Carrying
from .config import SOURCE, Chain, EngineConfig, OnEnterFailure, OnLoadFailure, Route, TierLike
from .engine import Engine, OpenRoute, Parts
from .entering import check_late, enter_places
from .explaining import History
from .gathering import gather
from .hits import release_forgotten
from .making import is_source, make_policies
from .promoting import Ascent, Promoter, open_ascent, promotion_config
from .routes import PlannedRoute, plan
from .spills import remembering, spill_knobs
from .statistics import Counts


@overload
def open_engine(
    source: EngineConfig, *, instruments: Sequence[Instrument | object] = ()
) -> AbstractAsyncContextManager[Engine]: ...
@overload
def open_engine(
    source: Source, tiers: EngineConfig, *, instruments: Sequence[Instrument | object] = ()
) -> AbstractAsyncContextManager[Engine]: ...
@overload
def open_engine(
    source: Source,
    tiers: Sequence[TierLike] | Mapping[str, TierLike],
    *,
    policies: Sequence[Policy | AsyncPolicy] | None = None,
    config: PipelineConfig | None = None,
    chain: bool | Chain = True,
    instruments: Sequence[Instrument | object] = (),
    on_load_failure: OnLoadFailure = "miss",
    routes: Sequence[Route] = (),
    promote: bool | str = False,
    breaker: BreakerConfig | None = None,
    on_enter_failure: OnEnterFailure | Mapping[str, OnEnterFailure] = "fail",
) -> AbstractAsyncContextManager[Engine]: ...
def open_engine(
    source: Source | EngineConfig,
    tiers: Sequence[TierLike] | Mapping[str, TierLike] | EngineConfig = (),
    *,
    policies: Sequence[Policy | AsyncPolicy] | None = None,
    config: PipelineConfig | None = None,
    chain: bool | Chain = True,
    instruments: Sequence[Instrument | object] = (),
    on_load_failure: OnLoadFailure = "miss",
    routes: Sequence[Route] = (),
    promote: bool | str = False,
    breaker: BreakerConfig | None = None,
    on_enter_failure: OnEnterFailure | Mapping[str, OnEnterFailure] = "fail",
) -> AbstractAsyncContextManager[Engine]:
    """Join tiers by pipelines, for the length of an ``async with`` block.

    ``open_engine(source, [host, disk])`` joins two; ``open_engine(source, config)`` and ``open_engine(config)`` join what an
    :class:`EngineConfig` says, which then says all but the instruments.

    A pipeline leads from the source to the first tier and, with a chain, from each tier that can be read from as a
    :class:`~backends.abc.Source` to the next one, which is fed everything that is stored before it. A tier that no
    pipeline leads to is only read. Leaving the block closes all of them, the first one first, as
    :func:`offload.open_pipeline` says; to have everything arrive, ``await engine.drain()`` before.

    Args:
        source: where the blocks are that an inference engine's forward pass writes.
        tiers: from the fastest to the slowest; all of the source's block size. One that is only named
            (:func:`backends.plugins.make_tier`) is made when the block is entered, and closed when it is left; one that is an
            async context manager, as :class:`backends.maru.MaruTier`, is entered for as long.
        policies: what may leave the source for the first tier; by default what that does not have yet. Behind it, a tier is
            offered what it does not have.
        config: the knobs of every pipeline.
        chain: feed what one tier has stored to the next (``on_store``, or true), or only what it evicts, before it goes
            (``on_evict``; then ``on_destination_full`` is ``evict`` unless a config is given), or nothing (``none``, or false).
        instruments: observers of every pipeline between the source and the tiers.
        on_load_failure: what a load does about a block that was found and cannot be loaded.
        routes: those that are not as by default, or not there by default.
        promote: whether a load writes what comes from a slower tier into the fastest as well, or into the one named.
        breaker: when a tier counts as broken, and is left alone for a while.
        on_enter_failure: what to do about a tier that cannot be entered, since nobody is there: ``fail``, or ``miss``: go on,
            with the tier as a broken one until it can be; or that by the names of tiers. One that is not named fails.

    Raises:
        TierNotEntered: a tier cannot be entered; see ``on_enter_failure``.
        ValueError: no tier, one twice, the source as a tier, or a knob that is set to what it cannot be (then
            :class:`offload.ConfigError`).
        BlockSizeError: a tier holds blocks of another size than the source.
        TypeError: something is said beside a config that says all.
    """
    whole = gather(source, tiers, policies, config, chain, on_load_failure, routes, promote, breaker, on_enter_failure)
    return _open(whole, instruments)


@asynccontextmanager
async def _open(config: EngineConfig, instruments: Sequence[Instrument | object]) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        history = History()
        places = await enter_places(stack, config, history)
        opening = _Opening(stack, config, instruments, places.source, places.tiers, places.guards, history)
        routes, spills = await opening.enter_routes()
        promoter = Promoter(list(opening.guards.items()), await opening.enter_ascents(routes), opening.carrying)
        engine = Engine(opening.parts(routes, spills, promoter), config)
        # Called first, and also when the block is cancelled.
        stack.push_async_callback(partial(release_forgotten, engine._live_hits))
        yield engine


@attrs.define(eq=False)
class _Opening:
    """What is shared by all that is opened for one engine."""

    stack: AsyncExitStack
    config: EngineConfig
    instruments: Sequence[Instrument | object]
    source: Source
    tiers: Mapping[str, ReadableTier]
    guards: Mapping[str, BreakerTier]
    history: History
    carrying: Carrying = attrs.field(init=False)
    precedence: Precedence = attrs.field(init=False)
    counts: Counts = attrs.Factory(Counts)

    def __attrs_post_init__(self) -> None:
        self.carrying = Carrying(self.tiers.values())
        self.precedence = Precedence(patience=self.config.store_patience)

    async def enter_routes(self) -> tuple[list[OpenRoute], dict[str, Spilling]]:
        """Open the routes, each before what feeds it, and what carries the victims of their tiers."""
        config, tiers = self.config, self.tiers
        for name, place in [(SOURCE, self.source), *tiers.items()]:
            self.stack.callback(self.history.watch_tier(name, place))
        check_late(tiers, config)
        planned = plan(list(tiers), [name for name in tiers if is_source(tiers[name])], config.routes, config.chain)
        below = spill_knobs(planned, tiers, config)
        of_tenants = [name for name, tier in tiers.items() if isinstance(tier, TenantTier)]
        for name in remembering(planned, below, of_tenants):
            self.stack.callback(self.carrying.remember(name, tiers[name]))  # type: ignore[arg-type]
        pipelines: dict[str, Pipeline] = {}
        spills: dict[str, Spilling] = {}
        for route in reversed(planned):
            # The place itself: its breaker is for those who ask it, and what is copied out of it tells nothing about it.
            above: Any = self.source if route.above == SOURCE else tiers[route.above]
            leaving = below.get(route.name)  # where the route carries what its tier evicts
            fed = [pipelines[name] for name in route.feeds]
            pipeline = await self.stack.enter_async_context(self._route(route, above, fed, leaving))
            pipelines[route.name] = pipeline
            self.history.watch_pipeline(route.to, pipeline)
            if leaving is not None:
                dropped = self.history.dropped(route.above, route.to)
                claim = self.carrying.victims(route.above, tiers[route.to])
                spills[route.name] = await self.stack.enter_async_context(
                    spill(above, pipeline, dropped=dropped, claim=claim)
                )
        return [OpenRoute(route, pipelines[route.name]) for route in planned], spills

    def _route(
        self, route: PlannedRoute, above: Any, feeds: Sequence[Pipeline], leaving: PipelineConfig | None
    ) -> AbstractAsyncContextManager[Pipeline]:
        said, tier = route.route, self.guards[route.to]
        knobs = leaving or said.pipeline or self.config.pipeline
        if (
            route.above != SOURCE and said.policies is None
        ):  # a tier that does not say what it has in time keeps nothing back
            policies = [what_is_new(tier, knobs)]
        else:
            policies = make_policies(said.policies, tier, route.name)
        return open_pipeline(
            above,
            tier,
            policies=policies,
            config=knobs,
            chain=feeds,
            instruments=[*self.instruments, self.carrying] if self.carrying else self.instruments,
            name=route.name,
            precedence=self.precedence,
        )

    async def enter_ascents(self, routes: Sequence[OpenRoute]) -> dict[str, Ascent]:
        """Open the ways up, into all tiers but the slowest."""
        ascents: dict[str, Ascent] = {}
        for name in list(self.tiers)[:-1]:
            down = next((route.plan.route.pipeline for route in routes if route.plan.to == name), None)
            knobs = promotion_config(down or self.config.pipeline, self.config.promotion_blocks)
            ascents[name] = await self.stack.enter_async_context(
                open_ascent(name, self.guards[name], self.source.block_bytes, knobs, self.counts, self.precedence)
            )
        return ascents

    def parts(self, routes: Sequence[OpenRoute], spills: Mapping[str, Spilling], promoter: Promoter) -> Parts:
        """All of it, for the engine."""
        return Parts(
            source=self.source,
            tiers=self.tiers,
            guards=self.guards,
            routes=routes,
            spills=spills,
            history=self.history,
            carrying=self.carrying,
            promoter=promoter,
            precedence=self.precedence,
            counts=self.counts,
        )
