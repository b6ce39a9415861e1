"""The opening of an engine: configuration, tiers, and pipelines.

The arguments become one configuration, the tiers are entered, and pipelines lead from one to the next.

First in, last out: the tiers are entered first, then the routes between them are opened, the last one first, since a
route opens before the one that feeds it, then the routes of promotions. At the end the hits are released before the
pipelines close, and the pipelines close before the tiers. The Reconnector of a tier that may be absent takes the tier's
position in this order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast, overload

import attrs

from backends.abc import Source, Tier

from .._config import BreakerConfig, PipelineConfig
from .._errors import ConfigError
from .._health import BreakerTier
from .._instruments import attach
from .._pipeline.marks import place_of
from .._pipeline.offer import RouteShare, blocks_of
from .._pipeline.opening import open_pipeline
from .._pipeline.page_hold import held_pages_of
from .._pipeline.pipeline import Pipeline
from .._pipeline.priority import LoadPriority
from .._pipeline.spill import Spilling, spill
from .._pipeline.spill_route import what_is_new
from ..abc import HOOKS, AsyncPolicy, EngineInstrument, Instrument, Policy, Recompute, Watcher
from .config import SHADOW_CHECK, SOURCE, Chain, EngineConfig, OnEnterFailure, OnLoadFailure, Route, TierLike
from .engine import Engine, EngineParts, OpenRoute
from .explain import BlockInspector
from .factories import leads_on, make_policies
from .history import GoneWatch, History
from .load_choice import LoadChoice
from .lookup import release_forgotten
from .places import check_placeholders, check_places, enter_places
from .promotion import Promoter, PromotionRoute, open_promotion_route, promotion_config
from .rate_probe import RateProbe, run_probe
from .routes import PlannedRoute, plan, spill_configs, tiers_to_index
from .shadow import ShadowCheck, StoredSamples
from .statistics import Counts
from .tenants import TenantTags
from .withheld import WithheldKeys


@overload
def open_engine(
    source: EngineConfig, *, instruments: Sequence[Instrument | object] = (), recompute: Recompute | None = None
) -> AbstractAsyncContextManager[Engine]: ...
@overload
def open_engine(
    source: Source,
    tiers: EngineConfig,
    *,
    instruments: Sequence[Instrument | object] = (),
    recompute: Recompute | None = None,
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
    shadow_check: int = SHADOW_CHECK,
    recompute: Recompute | None = None,
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
    shadow_check: int = SHADOW_CHECK,
    recompute: Recompute | None = None,
) -> AbstractAsyncContextManager[Engine]:
    """Join tiers by pipelines, for the length of an ``async with`` block.

    ``open_engine(source, [host, disk])`` joins two tiers; ``open_engine(source, config)`` and ``open_engine(config)``
    take an :class:`EngineConfig`, which then replaces all other arguments except the instruments.

    A pipeline leads from the source to the first tier and, with a chain, from each tier that can be read as a
    :class:`~backends.abc.Source` to the next one, which stores everything that is stored in the tier before it. A tier
    that no pipeline leads to is only read. Leaving the block closes all pipelines, the first one first, as
    :func:`offload.open_pipeline` does; ``await engine.drain()`` before that stores everything.

    Args:
        source: the place from which blocks are stored, such as the device tier that an engine's forward pass writes.
        tiers: from the fastest to the slowest; all with the source's block size. A tier that is only named
            (:func:`backends.plugins.make_tier`) is made when the block is entered, and closed when it is left; one that
            is an async context manager, as :class:`backends.maru.MaruTier`, is entered for as long.
        policies: decide which blocks may leave the source for the first tier; by default those that it does not have
            yet. Each later tier is offered the blocks that it does not have.
        config: the settings of every pipeline.
        chain: feed the blocks that one tier has stored to the next (``on_store``, or true), or only those that it
            evicts, before they go (``on_evict``; then ``on_destination_full`` is ``evict`` unless a config is given),
            or none (``none``, or false).
        instruments: observers of every pipeline between the source and the tiers; the method ``mismatch`` of one is
            called with the results of the shadow check (:class:`offload.abc.EngineInstrument`).
        on_load_failure: the action of a load for a block that was found and cannot be loaded.
        routes: routes besides the default ones, or with other settings.
        promote: whether a load also writes blocks of a slower tier into the fastest one, or into the one named.
        breaker: the conditions under which a tier counts as broken, and is left alone for a while.
        on_enter_failure: the action for a tier that cannot be entered, since it is absent: ``fail``, or ``miss``: go
            on, with the tier as a broken one until it can be; or that by the names of tiers. One that is not named
            fails.
        shadow_check: one in so many loads is read again, or recomputed, and compared; 0: none is.
        recompute: computes blocks again, for the shadow check.

    Raises:
        TierNotEntered: a tier cannot be entered; see ``on_enter_failure``.
        ValueError: no tier, a tier given twice, the source as a tier, or a setting out of range (then
            :class:`offload.ConfigError`).
        BlockSizeError: a tier has another block size than the source.
        TypeError: an argument that the config replaces was given too.
    """
    whole = configuration_of(
        source,
        tiers,
        policies,
        config,
        chain,
        on_load_failure,
        routes,
        promote,
        breaker,
        on_enter_failure,
        shadow_check,
    )
    return _open(whole, instruments, recompute)


@asynccontextmanager
async def _open(
    config: EngineConfig, instruments: Sequence[Instrument | object], recompute: Recompute | None
) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        history = History()
        places = await enter_places(stack, config, history)
        builder = _EngineBuilder(
            stack, config, instruments, recompute, places.source, places.tiers, places.breaker_tiers, history
        )
        routes, spills = await builder.enter_routes()
        promoter = Promoter(
            list(builder.breaker_tiers.items()), await builder.enter_promotion_routes(routes), builder.tenant_tags
        )
        choice, probe = await builder.enter_choice()
        engine = Engine(builder.parts(routes, spills, promoter, choice, probe), config)
        # Runs first at the end, also when the block is cancelled: pins must be released while pipelines and tiers are open.
        stack.push_async_callback(partial(release_forgotten, engine._live_hits))
        attach(instruments, engine)
        yield engine


@attrs.define(eq=False)
class _EngineBuilder:
    """The state shared by the steps of opening one engine."""

    stack: AsyncExitStack
    config: EngineConfig
    instruments: Sequence[Instrument | object]
    recompute: Recompute | None
    source: Source
    tiers: Mapping[str, Tier]
    breaker_tiers: Mapping[str, BreakerTier]
    history: History
    tenant_tags: TenantTags = attrs.field(init=False)
    load_priority: LoadPriority = attrs.field(init=False)
    counts: Counts = attrs.Factory(Counts)

    def __attrs_post_init__(self) -> None:
        self.tenant_tags = TenantTags(self.tiers.values())
        self.load_priority = LoadPriority(patience=self.config.store_patience)

    async def enter_routes(self) -> tuple[list[OpenRoute], dict[str, Spilling]]:
        """Open the routes, and the spilling of their tiers.

        Each route is opened before the one that feeds it.
        """
        config, tiers = self.config, self.tiers
        for name, place in [(SOURCE, self.source), *tiers.items()]:
            self.stack.callback(self.history.watch_tier(name, place))
        check_placeholders(tiers, config)
        sources = [name for name, tier in tiers.items() if leads_on(tier, config.chain)]
        planned = plan(list(tiers), sources, config.routes, config.chain)
        below = spill_configs(planned, tiers, config)
        of_tenants = [name for name, tier in tiers.items() if tier.capabilities.needs_tenants]
        for name in tiers_to_index(planned, below, of_tenants):
            self.stack.callback(self.tenant_tags.remember(name, place_of(tiers[name])))
        pipelines: dict[str, Pipeline] = {}
        spills: dict[str, Spilling] = {}
        for route in reversed(planned):
            above = self._start_of(route)
            leaving = below.get(route.name)  # set if this route stores its tier's evicted blocks
            pipeline = await self.stack.enter_async_context(self._route(route, above, pipelines, planned, leaving))
            pipelines[route.name] = pipeline
            self.history.watch_pipeline(route.to, pipeline)
            if held_pages_of(above) is not None:
                pipeline.add_instrument(GoneWatch(self.history.dropped(route.above, route.to)))
            if leaving is not None:
                dropped = self.history.dropped(route.above, route.to)
                claim = self.tenant_tags.victims(route.above, tiers[route.to])
                spills[route.name] = await self.stack.enter_async_context(
                    spill(above, pipeline, dropped=dropped, claim=claim, required=route.required)
                )
        return [OpenRoute(route, pipelines[route.name]) for route in planned], spills

    def _start_of(self, route: PlannedRoute) -> Any:
        """Return the place that a route starts at."""
        if route.above == SOURCE:
            return self.source
        # Without the breaker: that is for calls to the tier, and copies out of it prove nothing about its answers. A
        # page store is called: it is asked for the pages that are copied out of it.
        tier = self.tiers[route.above]
        return tier if held_pages_of(tier) is None else self.breaker_tiers[route.above]

    def _route(
        self,
        route: PlannedRoute,
        above: Any,
        below: Mapping[str, Pipeline],
        planned: Sequence[PlannedRoute],
        leaving: PipelineConfig | None,
    ) -> AbstractAsyncContextManager[Pipeline]:
        configured, tier = route.route, self.breaker_tiers[route.to]
        knobs = self._sharing(route, planned, leaving or configured.pipeline or self.config.pipeline)
        required = {one.name for one in planned if one.required}
        if route.above != SOURCE and configured.policies is None:  # a tier that does not answer in time filters nothing
            policies = [what_is_new(tier, knobs)]
        else:
            policies = make_policies(configured.policies, tier, route.name)
        return open_pipeline(
            above,
            tier,
            policies=policies,
            config=knobs,
            chain=[below[name] for name in route.feeds if name in required],
            optional_chain=[below[name] for name in route.feeds if name not in required],
            instruments=[*self._watching_pipelines, self.tenant_tags] if self.tenant_tags else self._watching_pipelines,
            name=route.name,
            load_priority=self.load_priority,
        )

    def _sharing(self, route: PlannedRoute, planned: Sequence[PlannedRoute], knobs: PipelineConfig) -> PipelineConfig:
        """Return a route's settings with its share of the tier above.

        That share is divided among the routes that start there, and no batch may need more than there may be.
        """
        batches = knobs.batch_config
        most = batches.max_batch_size
        if route.above != SOURCE:
            beside = sum(one.above == route.above for one in planned)
            if beside > 1:
                knobs = attrs.evolve(knobs, route_share=max(0.001, knobs.route_share / beside))
            if self.config.chain == "on_store" and not route.required:
                most = min(most, RouteShare(place_of(self.tiers[route.above]), knobs).measure())
        blocks = blocks_of(place_of(self.tiers[route.to]))
        stuck = [
            int(blocks * (one.route.pipeline or self.config.pipeline).route_share)
            for one in planned
            if one.above == route.to and (self.config.chain == "on_evict" or not one.required)
        ]
        if blocks and stuck:  # the routes that lead on from there may hold so much of it for as long as they hang
            most = min(most, max(1, blocks - max(stuck)))
        if most == batches.max_batch_size:
            return knobs
        least = min(batches.min_batch_size, most)
        return attrs.evolve(knobs, batch_config=attrs.evolve(batches, max_batch_size=most, min_batch_size=least))

    @property
    def _watching_pipelines(self) -> list[Instrument | object]:
        """The instruments of pipelines.

        They are all but those that observe the engine alone, or add themselves.
        """
        return [
            one
            for one in self.instruments
            if not isinstance(one, Watcher)
            and (not hasattr(one, "mismatch") or any(map(one.__class__.__dict__.get, HOOKS)))
        ]

    async def enter_promotion_routes(self, routes: Sequence[OpenRoute]) -> dict[str, PromotionRoute]:
        """Open the routes of promotions, into all tiers but the slowest."""
        routes_up: dict[str, PromotionRoute] = {}
        for name in list(self.tiers)[:-1]:
            down = next((route.plan.route.pipeline for route in routes if route.plan.to == name), None)
            knobs = promotion_config(down or self.config.pipeline, self.config.promotion_blocks)
            routes_up[name] = await self.stack.enter_async_context(
                open_promotion_route(
                    name, self.breaker_tiers[name], self.source.block_bytes, knobs, self.counts, self.load_priority
                )
            )
        return routes_up

    async def enter_choice(self) -> tuple[LoadChoice | None, RateProbe | None]:
        """Return the choice between loading and recomputing, and its probe.

        ``None`` for each that is not configured.
        """
        settings = self.config.load_or_recompute
        if settings.mode == "off":
            return None, None
        choice = LoadChoice(settings)
        if not choice.enforces:
            return choice, None
        places = list(self.breaker_tiers.items())
        tags = self.tenant_tags or None
        probe = RateProbe(places, choice, self.source.block_bytes, settings.probe_interval, tags)
        return choice, await self.stack.enter_async_context(run_probe(probe))

    def parts(
        self,
        routes: Sequence[OpenRoute],
        spills: Mapping[str, Spilling],
        promoter: Promoter,
        choice: LoadChoice | None,
        probe: RateProbe | None,
    ) -> EngineParts:
        """Return all parts of the engine."""
        places, withheld = list(self.breaker_tiers.items()), WithheldKeys()
        ways = [(route.plan.to, route.pipeline) for route in routes] + promoter.pipelines
        inspector = BlockInspector(places, ways, self.history, withheld)
        return EngineParts(
            source=self.source,
            tiers=self.tiers,
            breaker_tiers=self.breaker_tiers,
            routes=routes,
            spills=spills,
            history=self.history,
            tenant_tags=self.tenant_tags,
            promoter=promoter,
            load_priority=self.load_priority,
            counts=self.counts,
            inspector=inspector,
            shadow=self._shadow_check(routes, inspector, withheld),
            choice=choice,
            probe=probe,
        )

    def _shadow_check(
        self, routes: Sequence[OpenRoute], inspector: BlockInspector, withheld: WithheldKeys
    ) -> ShadowCheck | None:
        every = self.config.shadow_check
        if not every:
            return None
        stored = None
        if self.source.plane_names:
            stored = StoredSamples(self.source, every)
            for route in routes:
                if place_of(route.pipeline.source) is self.source:
                    route.pipeline.sample_with(stored.note)
        return ShadowCheck(
            every=every,
            places=inspector.places,
            history=self.history,
            counts=self.counts,
            withheld=withheld,
            in_flight=inspector.in_flight,
            stored=stored,
            recompute=self.recompute,
            observers=[cast("EngineInstrument", one) for one in self.instruments if hasattr(one, "mismatch")],
        )


# --- the arguments as one configuration -------------------------------------------------------------------------------


def configuration_of(
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
    shadow_check: int = SHADOW_CHECK,
) -> EngineConfig:
    """Return the arguments of :func:`open_engine` as one configuration.

    It has a source, and no instruments.

    Raises:
        ValueError: as :func:`open_engine`.
        TypeError: an argument that the config replaces was given too.
    """
    said = (policies, config, chain, on_load_failure, tuple(routes), promote, breaker, on_enter_failure, shadow_check)
    if isinstance(source, EngineConfig) or isinstance(tiers, EngineConfig):
        whole = source if isinstance(source, EngineConfig) else tiers
        if said != (None, None, True, "miss", (), False, None, "fail", SHADOW_CHECK) or (
            whole is source and tiers != ()
        ):
            raise TypeError(
                "an EngineConfig replaces all arguments but the instruments: use attrs.evolve(config, ...) to change it"
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
            shadow_check=shadow_check,
            pipeline=config or PipelineConfig(on_destination_full="evict" if chain == "on_evict" else "wait"),
        )
    if whole.source is None:
        raise ConfigError("source", None, "must be a source: open_engine(source, config), or name one in the config")
    check_places(whole.source, whole.tiers)
    return whole


def _with_source(config: EngineConfig, source: Source) -> EngineConfig:
    if config.source is not None:
        raise TypeError(f"the config has a source already: {config.source!r}")
    return attrs.evolve(config, source=source)


def _first_route(
    tiers: Mapping[str, object], routes: Sequence[Route], policies: Sequence[Policy | AsyncPolicy]
) -> list[Route]:
    """Return the routes with ``policies`` on the one to the first tier."""
    first = next(iter(tiers), "")
    if any(route.to == first for route in routes):
        raise TypeError(f"policies = {policies!r}: the route to {first} already has policies; set them there")
    return [Route(first, policies=tuple(policies)), *routes]


def _named(tiers: Sequence[TierLike]) -> dict[str, TierLike]:
    """Return a distinct name for each tier: its ``name``, or its type's."""
    named: dict[str, TierLike] = {}
    for tier in tiers:
        name = stem = _name_of(tier)
        number = 1
        while name in named or name == SOURCE:
            number += 1
            name = f"{stem}-{number}"
        named[name] = tier
    return named


def _name_of(tier: object) -> str:
    if isinstance(tier, Mapping):
        tier = str(tier.get("type", "tier"))
    if isinstance(tier, str):
        return tier.rpartition(":")[2].lower()
    kind = type(tier).__name__.lower()
    return tier.name or kind if isinstance(tier, Tier) else kind  # anything else is refused, by this name
