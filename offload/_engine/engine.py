"""The public engine: store, lookup, load, delete, explain.

It checks arguments, counts, and calls the other modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType

import attrs
import trio

from backends.abc import (
    Blocks,
    BlockSizeError,
    Canary,
    Deletion,
    Destination,
    Failed,
    Key,
    Source,
    Tier,
    check_keys,
)
from backends.base.pages import check_apart

from .._config import BreakerConfig
from .._health import BreakerTier
from .._instruments import EngineHooks
from .._keys import BlockKey
from .._pipeline.cancellation import CancellationToken
from .._pipeline.containment import give_back
from .._pipeline.handle import TransferHandle
from .._pipeline.pipeline import Pipeline
from .._pipeline.priority import LoadPriority
from .._pipeline.quarantine import Quarantined
from .._pipeline.spill import Spilling
from ..abc import EngineInstrument, Mismatch, PreconditionLike
from ..preconditions import NO_WAIT, as_precondition
from .concluding import Conclusions
from .config import EngineConfig, LoadOrRecompute, OnLoadFailure
from .direct import DirectReads
from .explain import BlockInspector, Explanation, keys_in_question
from .history import History
from .layout_check import LayoutCheck, LayoutChecker
from .load_choice import LoadChoice
from .load_or_recompute import check_computed
from .loading import GIVEN_UP, LoadFailed, Loading, LoadResult, precondition_of, wait_for
from .lookup import Hit, Place, Segment, TimeShares, find, release_segments
from .onward import OnwardRoutes
from .promotion import Promoter
from .rate_probe import RateProbe
from .routes import PlannedRoute
from .shadow import ShadowCheck
from .statistics import ChoiceStatistics, Counts, EngineStatistics, ShadowStatistics
from .tenants import TenantTags

_NOTHING: Mapping[str, Exception] = MappingProxyType({})
_log = logging.getLogger("offload.engine")


@attrs.frozen(eq=False)
class OpenRoute:
    """A route of an engine with its open pipeline."""

    plan: PlannedRoute
    pipeline: Pipeline

    def __str__(self) -> str:
        return f"{self.plan.name} (from {self.plan.above})"


@attrs.frozen(eq=False)
class EngineParts:
    """The parts of an engine, made by :mod:`offload._engine.opening`."""

    source: Source
    tiers: Mapping[str, Tier]
    """The tiers, the fastest first."""
    breaker_tiers: Mapping[str, BreakerTier]
    """The tiers behind their breakers."""
    routes: Sequence[OpenRoute]
    """The routes, upstream first."""
    spills: Mapping[str, Spilling]
    """The spilling of each route, by the route's name.

    Only with a chain on eviction.
    """
    history: History
    tenant_tags: TenantTags
    promoter: Promoter
    load_priority: LoadPriority
    counts: Counts
    inspector: BlockInspector
    shadow: ShadowCheck | None
    """The shadow check, or ``None`` if no load is compared."""
    choice: LoadChoice | None
    """The choice between loading and recomputing, or ``None`` if it is off."""
    probe: RateProbe | None
    """The probe of rates, or ``None`` if the choice is not enforced."""


class Engine:
    """A cache that stores a source's blocks in tiers, and loads them.

    Made by :func:`open_engine` only.

    Attributes:
        source: the place from which blocks are stored.
        tiers: the tiers that store them, by name, from the fastest to the slowest.
        pipelines: between the source and the tiers; the first one leads from the source to the first tier.
        on_load_failure: the action of a load for a block that was found and cannot be loaded.
        promote: the tier into which a load also writes blocks of slower tiers, unless the call decides that itself.
        direct: reads that wait for nothing, in any calling thread.
        onward: copies on blocks that another process has stored in a tier.
    """

    def __init__(self, parts: EngineParts, config: EngineConfig) -> None:
        """Use :func:`open_engine` instead."""
        self.source: Source = parts.source
        self.tiers: Mapping[str, Tier] = parts.tiers
        self.pipelines: Sequence[Pipeline] = [route.pipeline for route in parts.routes]
        self.on_load_failure: OnLoadFailure = config.on_load_failure
        self.promote: bool | str = config.promote
        self._lookup_timeout = config.lookup_timeout
        self._breaker = config.breaker
        self._block_tokens = config.block_tokens
        self._breaker_tiers = parts.breaker_tiers
        self._places: list[Place] = list(parts.breaker_tiers.items())
        self._routes = parts.routes
        self._spills = parts.spills
        self._inspector = parts.inspector
        self._shadow = parts.shadow
        self._choice = parts.choice
        self._probe = parts.probe
        # None if no tier must know tenants, which is most often: then a store or a lookup has nothing to tag.
        self._tags: TenantTags | None = parts.tenant_tags or None
        self.onward: OnwardRoutes = OnwardRoutes(parts.tiers, parts.routes, self._tags)
        self._promoter = parts.promoter
        self._load_priority = parts.load_priority
        self._counts = parts.counts
        self._live_hits: dict[Hit, None] = {}
        self._hooks = EngineHooks()
        self._conclusions = Conclusions(
            self._counts, self._choice, self._probe, self._inspector.history, self._promoter, self._hooks
        )
        self.direct: DirectReads = DirectReads(
            self._places,
            self._live_hits,
            self._tags,
            self._shadow,
            self._promoter,
            self._load_priority,
            self._choice,
            self._conclusions,
        )

    def __repr__(self) -> str:
        return f"<Engine: {self.source!r} to {', '.join(self.tiers)}>"

    # --- storing --------------------------------------------------------------------------------------------------

    async def store(
        self,
        blocks: Blocks,
        precondition: PreconditionLike,
        *,
        tenant: str = "",
        to: str | None = None,
        cancel_token: CancellationToken | None = None,
    ) -> TransferHandle:
        """Store blocks, after waiting for room; see :meth:`offload.Pipeline.enqueue`.

        The handle settles when the blocks are in the first tier and, with a chain, in the tiers after it.

        Args:
            blocks: of the source; with ``to``, of the place where the route there starts.
            precondition: the condition for reading the bytes.
            tenant: the tenant, for tiers that need it (the keys are salted with it already).
            to: the tier to store in, if it is not the first.
            cancel_token: cancels this store together with others, of this engine or of another one.

        Raises:
            ValueError: no route leads from the source of the blocks to that tier.
        """
        pipeline = self.pipelines[0] if to is None else self._pipeline_to(to, blocks)
        if self._tags is None:
            return await pipeline.enqueue(blocks, precondition, cancel_token=cancel_token)
        end = self._tag(self._tags, blocks, tenant)
        try:
            handle = await pipeline.enqueue(blocks, precondition, cancel_token=cancel_token)
        except BaseException:
            end()
            raise
        return self._tags.until_settled(handle, end)

    def store_nowait(
        self,
        blocks: Blocks,
        precondition: PreconditionLike,
        *,
        tenant: str = "",
        to: str | None = None,
        cancel_token: CancellationToken | None = None,
    ) -> TransferHandle:
        """Store blocks as :meth:`store` does, without waiting for room.

        Raises:
            PipelineFull: there is no room.
        """
        pipeline = self.pipelines[0] if to is None else self._pipeline_to(to, blocks)
        if self._tags is None:
            return pipeline.enqueue_nowait(blocks, precondition, cancel_token=cancel_token)
        end = self._tag(self._tags, blocks, tenant)
        try:
            handle = pipeline.enqueue_nowait(blocks, precondition, cancel_token=cancel_token)
        except BaseException:
            end()
            raise
        return self._tags.until_settled(handle, end)

    @property
    def stores_at_once(self) -> bool:
        """Whether some stores can be made by :meth:`store_at_once`."""
        return self._tags is None and self.pipelines[0].stores_at_once

    def store_at_once(self, blocks: Blocks) -> TransferHandle | None:
        """Store blocks that may be read now, if that waits for nothing.

        See :meth:`Pipeline.enqueue_at_once`.
        """
        return self.pipelines[0].enqueue_at_once(blocks) if self._tags is None else None

    async def drain(self) -> None:
        """Wait until the earlier stores have settled in all of their tiers.

        It also waits for the end of the promotions under way. If cancelled, it cancels nothing.
        """
        for (
            pipeline
        ) in self.pipelines:  # the first one waits for its chain; the others may have had stores of their own
            await pipeline.drain()
        await self._promoter.drain()

    # --- loading --------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[Key], *, tenant: str = "", within: float = inf, hurried: bool = False) -> Hit:
        """Find the longest prefix of ``keys`` over all tiers, and pin it.

        Each block is found in the fastest tier that has it. The prefix may change between tiers any number of times. A
        tier that raises, or does not answer within ``lookup_timeout``, is left out and named in
        :attr:`Hit.unavailable`: the result is the prefix that was found without it, and its breaker counts a fault. If
        cancelled, nothing is pinned, and no breaker counts anything. The caller releases the hit: ``async with await
        engine.lookup(keys) as hit``. With ``load_or_recompute``, :attr:`Hit.advice` has the number of blocks worth
        loading, and if that is enforced the hit ends there.

        Args:
            keys: the keys, in order.
            tenant: the tenant, for tiers that need it, until the hit is released.
            within: seconds for all tiers together; they share it, so it lowers ``lookup_timeout`` for each. Unlike a
                cancel scope around the call, it ends with a result.
            hurried: a tier that does not answer in a time that ``within`` has shortened has no fault.

        Raises:
            TypeError: a key is not ``bytes``, or this is one key and not a sequence.
            ValueError: ``within`` is negative or not a number; or a key is longer than any tier accepts.
        """
        check_keys(keys)
        within = _checked(within)
        if self.direct.serves:
            await trio.lowlevel.checkpoint_if_cancelled()
            if (found_here := self.direct.find(keys, tenant)) is not None:
                found_here.count()
                await trio.lowlevel.cancel_shielded_checkpoint()
                return found_here.hit
        asked, shadow = keys, self._shadow
        since = 0 if shadow is None else shadow.withheld.total
        if shadow is not None and len(shadow.withheld) and (wrong := shadow.withheld.among(keys)):
            await shadow.purge(wrong, within)
            keys = shadow.withheld.prefix_before(keys)
        end = None if self._tags is None else self._tags.carry(keys, tenant)
        try:
            segments, unavailable = await find(
                self._places, keys, lookup_timeout=self._lookup_timeout, within=within, hurried=hurried
            )
        except BaseException:
            if end is not None:
                end()
            raise
        advice, left, slower = None, None, None
        rest: list[Segment] = []
        if self._choice is not None:
            advice = self._choice.advise(segments)
            segments, rest = self._choice.split(segments, advice)
        kept = sum([segment.blocks for segment in segments])
        if self._choice is not None and rest:
            left = self._choice.leave_out(rest, kept)
            slower = rest[0].rank, keys[kept : kept + rest[0].blocks]
        hit = Hit(keys[:kept], segments, unavailable or _NOTHING, self._live_hits, tenant, end, since, advice, left)
        self._conclusions.conclude_lookup(asked, hit, slower)
        if rest:
            try:
                await release_segments(rest)
            except BaseException:
                await hit.__aexit__(None, None, None)
                raise
        return hit

    async def load(
        self,
        hit: Hit,
        destination: Destination,
        *,
        precondition: PreconditionLike | None = None,
        promote: bool | str | None = None,
    ) -> LoadResult:
        """Copy the blocks of a hit to ``destination`` and verify them.

        They are copied position by position, segment by segment, and no further than the first block that cannot be
        loaded; with ``on_load_failure = "retry"`` that block is looked up again in the slower tiers. With
        ``shadow_check``, one load in so many is compared as well with something else than checksums, and ends before a
        block that differs from its key's content. With ``load_or_recompute`` enforced it also ends when computing the
        rest is sooner; the outcome of the rest is ``given up``, which is no failure. If cancelled, it leaves only when
        no copy into ``destination`` is under way any more. A hit that is released meanwhile stays pinned until this is
        over.

        Args:
            hit: the result of a lookup.
            destination: addresses, numpy arrays or torch tensors, one for each block.
            precondition: the condition for writing to the destination. Required if that lies on a device, where queued
                work may still write to the same blocks: an event recorded after it, or ``NO_WAIT``. By default, in host
                memory, ``NO_WAIT``.
            promote: whether blocks from a slower tier are also written into a faster one, after the load has returned:
                into the fastest, or the one named. By default the engine's ``promote``.

        Raises:
            LoadFailed: a block could not be loaded, and ``on_load_failure`` is ``fail``.
            PreconditionFailed: the precondition has failed; nothing was copied.
            BlockSizeError: the blocks of the destination have another size.
            TypeError: the destination lies on a device and ``precondition`` is missing, or is no precondition.
            ValueError: the hit was released, the destination is too small, or no tier has the name in ``promote``.
            RepeatedPlaces: two blocks of the destination share memory.
            Unproven: a copy may still be going on: ``destination`` must not be used again.
        """
        ready = precondition_of(destination, precondition)
        up = self.promote if promote is None else promote
        if self.direct.serves:
            await trio.lowlevel.checkpoint_if_cancelled()
            if (loaded_here := self.direct.load(hit, destination, ready, up)) is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return loaded_here
        wanted = len(hit.keys)
        if hit.released:
            raise ValueError(f"{hit!r} was released")
        if wanted > len(destination):
            raise ValueError(f"{wanted} blocks do not fit into {len(destination)} places")
        if wanted and destination.block_bytes != self.source.block_bytes:
            raise BlockSizeError(self, self.source.block_bytes, destination.block_bytes)
        check_apart(destination.views())  # checked here, since each tier sees only its own part
        if isinstance(up, str):
            self._promoter.check(up)
        retry = self.on_load_failure == "retry"
        loading = Loading(hit.keys, destination, self._places, self._counts, retry, self._lookup_timeout, self._choice)
        segments = hit._begin_load()
        try:
            await wait_for(ready)
            began = trio.current_time()
            with self._load_priority.loading():
                await loading.load(segments)
                drawn = None if self._shadow is None else self._shadow.draw(hit.keys, hit._since)
                if self._shadow is not None and drawn is not None:
                    await self._shadow.check(loading, segments, hit._since, drawn=drawn)
        finally:
            await hit._end_load()
        result = loading.conclude()
        if self._probe is not None and loading.given_up_at is not None:
            self._probe.request(loading.given_up_at, hit.keys[result.loaded :], hit._tenant)
        self._conclusions.conclude_load(hit, result, loading.origins, up, trio.current_time() - began)
        if result.loaded < wanted and self.on_load_failure == "fail":
            first = result.outcomes[result.loaded]
            if first == GIVEN_UP:
                return result
            raise LoadFailed(result) from (first.error if isinstance(first, Failed) else None)
        return result

    def computed(self, blocks: int, seconds: float, *, after: int = 0) -> None:
        """Record how long computing blocks of a prompt took.

        It is for ``load_or_recompute``; if that is off, this does nothing.

        Args:
            blocks: the number of blocks that were computed.
            seconds: the time that this took.
            after: the position of the first of them, as in the keys of a lookup: those further back take longer.

        Raises:
            ValueError: less than one block, or a time or a position below 0.
        """
        check_computed(blocks, seconds, after)
        if self._choice is not None:
            self._choice.note_computed(after, after + blocks, seconds)

    async def release(self, hit: Hit) -> None:
        """Release a hit. Idempotent; also released if this is cancelled."""
        await hit.__aexit__(None, None, None)
        await trio.lowlevel.checkpoint()

    async def delete(
        self,
        keys: Sequence[Key],
        *,
        within: float = inf,
        hurried: bool = False,
        why: str = "",
        together: bool = False,
    ) -> list[Deletion]:
        """Delete these keys in all tiers, the fastest first.

        A tier that raises is logged, and the others go on. If cancelled, some tiers may have deleted keys. A block that
        is on its way to a tier is not deleted, and will arrive.

        Args:
            keys: the keys to delete.
            within: seconds for all tiers together, which share it. A tier that does not answer within its share has a
                fault, and its answer is ``UNAVAILABLE``.
            hurried: it has none if its share is below ``call_timeout``.
            why: the reason in a word or two, for :meth:`explain`.
            together: ask the slowest tier first, and keep in the others the blocks that one keeps: ``PINNED`` or
                ``UNAVAILABLE``.

        Returns:
            One answer per key, for all tiers together: ``PINNED`` if one of them has the block pinned (it stays there,
            and is deleted in the others), else ``UNAVAILABLE`` if one could not be asked, or cannot delete, and so may
            still have it, else ``DELETED`` if one had it, else ``MISSING``.

        Raises:
            TypeError: a key is not ``bytes``, or this is one key and not a sequence.
            ValueError: ``within`` is negative or not a number; or a key is longer than any tier accepts.
        """
        check_keys(keys)
        time = TimeShares(inf, trio.current_time() + _checked(within), len(self._places))
        answers = [Deletion.MISSING] * len(keys)
        asked: Sequence[int] = range(len(keys))
        for name, tier in reversed(self._places) if together else self._places:
            left = time.left(name, trio.current_time())
            told = await self._delete_in(name, tier, [keys[at] for at in asked], left, hurried, why)
            for at, one in zip(asked, told, strict=True):
                answers[at] = max(answers[at], one, key=_WEIGHT.__getitem__)
            if together:
                asked = [at for at in asked if answers[at] in (_DELETED, Deletion.MISSING)]
        if self._hooks.deleted:
            self._hooks.fire("deleted", keys)
        return answers

    async def _delete_in(
        self, name: str, tier: BreakerTier, keys: Sequence[Key], within: float, hurried: bool, why: str
    ) -> Sequence[Deletion]:
        """Delete keys in one tier; answer ``UNAVAILABLE`` if it raises."""
        try:
            told = await tier.delete(keys, within=within, hurried=hurried)
            if len(told) != len(keys):
                raise RuntimeError(f"{tier!r} returned {len(told)} deletions for {len(keys)} keys")
        except Exception as error:
            _log.warning("%s could not be asked to delete %d blocks: %r", name, len(keys), error)
            told = [Deletion.UNAVAILABLE] * len(keys)
        if Deletion.PINNED in told:
            held = told.count(Deletion.PINNED)
            _log.info("%s keeps %d of %d blocks that were to be deleted: they are held", name, held, len(keys))
        deleted = [key for key, one in zip(keys, told, strict=True) if one is _DELETED]
        self._inspector.history.deleted(name, deleted, why)
        if self._tags is not None:
            self._tags.forget(name, deleted)
        return told

    # --- whether loaded blocks are the stored ones --------------------------------------------------------------------

    async def check_layout(
        self, canary: Canary, layout: str, *, precondition: PreconditionLike = NO_WAIT
    ) -> LayoutCheck:
        """Store and load a pattern, and check that its planes come back.

        It is for the time before the first request. The check is made once under a key of its own, and once under the
        name of the layout, under which another process may have stored the pattern in another layout. It takes some
        milliseconds. If cancelled, it returns when nothing reads or writes the block any more; the pattern of this
        check may stay in the tiers until it is evicted.

        Args:
            canary: owns a free block of the cache; :meth:`backends.device.DeviceTier.canary` makes one.
            layout: the name of the layout, as in the keys: processes with the same name must have the same planes.
            precondition: holds once the device has done its earlier work on the block: an event recorded behind it.

        Raises:
            LayoutCheckFailed: keys came back as values, or one head as another one: no block that is loaded can be
                used.
            PreconditionFailed: the precondition has failed; nothing was written.
            DrainUnproven: the block may still be read.
            Unproven: the block may still be written to.
        """
        return await LayoutChecker(self, canary, layout, as_precondition(precondition)).run()

    # --- watching ---------------------------------------------------------------------------------------------------------

    def add_instrument(self, instrument: EngineInstrument | object) -> None:
        """Call the engine's hooks of an instrument from now on.

        The hooks of its pipelines are added to the pipelines.
        """
        self._hooks.add(instrument)

    def _announce(self, mismatch: Mismatch) -> None:
        if self._shadow is not None:
            self._shadow.announce(mismatch)

    # --- the state of blocks ------------------------------------------------------------------------------------------

    async def explain(
        self,
        what: Key | Sequence[Key] | Sequence[int],
        *,
        naming: BlockKey | None = None,
        others: Sequence[BlockKey] = (),
        tenant: str = "",
        operator: bool = False,
    ) -> Explanation:
        """Explain why blocks are, or are not, in the tiers.

        The explanation names the tiers that have them, the pipelines that have them on their way, or the time and
        reason of their loss. It pins nothing, and does not count as a use of the blocks. It inspects everything inside
        the engine and its history, which takes milliseconds: for people and tests, not for each request.

        Args:
            what: a key, several keys, or the tokens of a prompt. For tokens the result also names other keys under
                which they are stored.
            naming: makes the keys of these tokens.
            others: other namings (layouts, ranks, tenants) of the same tokens to try. Those of other tenants are left
                out, unless ``operator`` is true.
            tenant: the tenant of the caller.
            operator: whether the caller may see the blocks of all tenants.

        Raises:
            TypeError: tokens without a naming.
            PermissionError: the naming belongs to another tenant.
        """
        keys, made = keys_in_question(what, naming, others, tenant, operator=operator)
        return await self._inspector.explain(keys, made)

    @property
    def quarantine(self) -> Sequence[Quarantined]:
        """Copies of stores, loads and promotions without a proven end. See :attr:`offload.Pipeline.quarantine`."""
        return list(self.quarantine_by_name().values())

    def quarantine_by_name(self) -> Mapping[str, Quarantined]:
        """Return the quarantined copies, each with a name for operators.

        The name is that of its pipeline, and a number.
        """
        ways = [(pipeline.name, pipeline) for pipeline in self.pipelines]
        ways += [(f"promote-{tier}", pipeline) for tier, pipeline in self._promoter.pipelines]
        return {f"{name}/{entry.number}": entry for name, pipeline in ways for entry in pipeline.quarantine}

    @property
    def withheld(self) -> Sequence[Key]:
        """Keys under which the shadow check found a wrong block.

        They are not served until they are stored again.
        """
        return [] if self._shadow is None else list(self._shadow.withheld)

    def serve_again(self, keys: Sequence[Key]) -> int:
        """Serve withheld keys again, and return how many were withheld.

        An operator calls it who knows that their blocks are right.
        """
        if self._shadow is None:
            return 0
        withheld = self._shadow.withheld.among(keys)
        self._shadow.withheld.release(withheld)
        return len(withheld)

    def statistics(self) -> EngineStatistics:
        """Return an immutable snapshot of counters, tiers and pipelines."""
        counts = self._counts
        return EngineStatistics(
            pipelines={pipeline.name: pipeline.statistics() for pipeline in self.pipelines},
            tiers={name: breaker_tier.statistics() for name, breaker_tier in self._breaker_tiers.items()},
            health={name: breaker_tier.health for name, breaker_tier in self._breaker_tiers.items()},
            lookups=counts.lookups,
            asked_blocks=counts.asked,
            hit_blocks=counts.hit,
            loads=counts.loads,
            loaded_blocks=counts.loaded,
            load_failures=dict(counts.load_failures),
            lookup_failures=dict(counts.lookup_failures),
            load_faults=dict(counts.load_faults),
            retried_blocks=counts.retried,
            recovered_blocks=counts.recovered,
            promoted_blocks=counts.promoted,
            promotions_refused=dict(counts.refused),
            promoting_blocks=self._promoter.in_flight,
            spills={name: spilling.statistics() for name, spilling in self._spills.items()},
            open_hits=len(self._live_hits),
            quarantined=len(self.quarantine),
            shadow=ShadowStatistics() if self._shadow is None else self._shadow.statistics(),
            load_or_recompute=ChoiceStatistics() if self._choice is None else self._choice.statistics(),
            hits_by_tier={name: counts.hits_by_tier[name] for name in self._breaker_tiers},
            block_tokens=self._block_tokens,
        )

    def set_thresholds(
        self, *, lookup_timeout: float, breaker: BreakerConfig, load_or_recompute: LoadOrRecompute
    ) -> None:
        """Change the settings that an operator may change in a running engine.

        Calls under way keep the settings with which they began.

        Args:
            lookup_timeout: the time that a tier may take for its part of a lookup.
            breaker: the conditions under which a tier counts as broken and is retried. A tier that came with a breaker
                keeps it.
            load_or_recompute: only ``max_loss`` and ``probe_interval`` are read, if the choice is not off.
        """
        self._lookup_timeout = lookup_timeout
        for tier in self._breaker_tiers.values():
            tier.replace_breaker(self._breaker, breaker)
        self._breaker = breaker
        if self._choice is not None:
            self._choice.set_max_loss(load_or_recompute.max_loss)
        if self._probe is not None:
            self._probe.interval = load_or_recompute.probe_interval

    # --- helpers --------------------------------------------------------------------------------------------------

    @staticmethod
    def _tag(tags: TenantTags, blocks: Blocks, tenant: str) -> Callable[[], None]:
        """Tag blocks with their tenant.

        Returns a function that removes the tags.
        """
        try:
            return tags.bring(blocks.keys, tenant)
        except BaseException:
            _drop(blocks)
            raise

    def _pipeline_to(self, to: str, blocks: Blocks) -> Pipeline:
        """Return the pipeline from the source of the blocks to that tier."""
        for route in self._routes:
            if to in (route.plan.to, route.plan.name) and route.pipeline.starts_at(blocks.source):
                return route.pipeline
        there = ", ".join(map(str, self._routes))
        _drop(blocks)
        raise ValueError(
            f"to = {to!r}: there is no route to it from {blocks.source!r}, only {there}; declare one: "
            f"routes=[offload.Route({to!r}, source='source')]"
        )


def _drop(blocks: Blocks) -> None:
    """Release strong blocks that were not stored.

    They belong to the engine from the call on, also when it raises.
    """
    blocks.hand_over()
    give_back(blocks.release)


def _checked(within: float) -> float:
    if not within >= 0:
        raise ValueError(f"within = {within!r}: must be seconds, at least 0")
    return within


_DELETED = Deletion.DELETED
_WEIGHT = {Deletion.MISSING: 0, Deletion.DELETED: 1, Deletion.UNAVAILABLE: 2, Deletion.PINNED: 3}
"""Weights of answers: the heavier of two tiers' answers counts."""
