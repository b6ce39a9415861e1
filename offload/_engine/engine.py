"""The public engine: store, lookup, load, delete, explain. It checks arguments, counts, and calls the other modules."""

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
    """The same tiers behind their breakers."""
    routes: Sequence[OpenRoute]
    """Upstream first."""
    spills: Mapping[str, Spilling]
    """With a chain on eviction: what moves the victims along each route, by the route's name."""
    history: History
    tenant_tags: TenantTags
    promoter: Promoter
    load_priority: LoadPriority
    counts: Counts
    inspector: BlockInspector
    shadow: ShadowCheck | None
    """``None`` where no load is compared."""
    choice: LoadChoice | None
    """``None`` where loading is not compared with recomputing."""
    probe: RateProbe | None
    """``None`` where that is not enforced."""


class Engine:
    """Stores blocks of one source into tiers, and finds and loads them again. Made by :func:`open_engine` only.

    Attributes:
        source: where blocks are stored from.
        tiers: where they are stored, by name, from the fastest to the slowest.
        pipelines: between the source and the tiers; the first one leads from the source to the first tier.
        on_load_failure: what a load does about a block that was found and cannot be loaded.
        promote: where a load also writes what comes from slower tiers, unless it says so itself.
        direct: reads that wait for nothing, in whichever thread asks.
        onward: copies on what another process has stored in a tier.
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
        # None where no tier must know tenants, which is most often: then a store or a lookup has nothing to tag.
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

        The handle settles when they are in the first tier and, with a chain, in the tiers behind it.

        Args:
            blocks: of the source; with ``to``, of the place where the route there starts.
            precondition: what must hold before the bytes may be read.
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
        """Store blocks as :meth:`store` does, or raise :class:`offload.PipelineFull` if there is no room."""
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
        """Store blocks that may be read now in this call, if that waits for nothing: see :meth:`Pipeline.enqueue_at_once`."""
        return self.pipelines[0].enqueue_at_once(blocks) if self._tags is None else None

    async def drain(self) -> None:
        """Wait until everything stored before this call has settled in all of its tiers, and promotions under way have ended.

        Cancelled, it cancels nothing.
        """
        for (
            pipeline
        ) in self.pipelines:  # the first one waits for its chain; the others may have had stores of their own
            await pipeline.drain()
        await self._promoter.drain()

    # --- loading --------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[Key], *, tenant: str = "", within: float = inf, hurried: bool = False) -> Hit:
        """Find the longest prefix of ``keys`` over all tiers, each block in the fastest tier that has it, and pin it.

        The prefix may change between tiers any number of times. A tier that raises, or does not answer within
        ``lookup_timeout``, is left out and named in :attr:`Hit.unavailable`: the result is the prefix that was found without
        it, and its breaker counts a fault. Cancelled, nothing is pinned, and no breaker counts anything. The caller releases
        the hit: ``async with await engine.lookup(keys) as hit``. With ``load_or_recompute``, :attr:`Hit.advice` says how much
        of it is worth loading, and where that is enforced the hit ends there.

        Args:
            keys: the keys, in order.
            tenant: the tenant, for tiers that need it, until the hit is released.
            within: seconds for all tiers together; they share it, so it lowers ``lookup_timeout`` for each. Unlike a cancel
                scope around the call, it ends with a result.
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
        """Copy the blocks of a hit to ``destination``, position by position, and verify them.

        Segment by segment, and no further than the first block that cannot be loaded; with ``on_load_failure = "retry"`` that
        is looked for once more in the slower tiers. With ``shadow_check``, one load in so many is compared as well with
        something else than checksums, and ends before a block that is not what its key stands for. With ``load_or_recompute``
        enforced it also ends where computing the rest is sooner; what is left is missed as ``given up``, which is no failure.
        Cancelled, it leaves only when no copy into ``destination`` is under way any more. A hit that is released meanwhile
        stays pinned until this is over.

        Args:
            hit: the result of a lookup.
            destination: addresses, numpy arrays or torch tensors, one for each block.
            precondition: what must hold before the destination may be written. Required if that lies on a device, where queued
                work may still write to the same blocks: an event recorded behind it, or ``NO_WAIT``. By default, in host
                memory, ``NO_WAIT``.
            promote: whether blocks from a slower tier are also written into a faster one, after the load has returned: into
                the fastest, or the one named. By default the engine's ``promote``.

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
        check_apart(destination.views())  # here, since each tier sees only its own part of it
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
        """Tell how long computing blocks of a prompt took, for ``load_or_recompute``. Does nothing where that is off.

        Args:
            blocks: how many were computed.
            seconds: how long that took.
            after: the position of the first of them, as in the keys of a lookup: those further back take longer.

        Raises:
            ValueError: less than one block, or a time or a position below 0.
        """
        check_computed(blocks, seconds, after)
        if self._choice is not None:
            self._choice.note_computed(after, after + blocks, seconds)

    async def release(self, hit: Hit) -> None:
        """Give back what a hit holds. Idempotent; it has given it back even when cancelled."""
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

        Returns one answer per key, for all tiers together: ``PINNED`` if one of them has the block pinned (it stays there, and
        is deleted in the others), else ``UNAVAILABLE`` if one could not be asked, or cannot delete, and so may still have it,
        else ``DELETED`` if one had it, else ``MISSING``. A tier that raises is logged, and the others go on. Cancelled, some
        tiers may have deleted keys. A block that is on its way to a tier is not deleted, and will arrive.

        Args:
            keys: the keys to delete.
            within: seconds for all tiers together, which share it. A tier that does not answer within its share has a fault,
                and its answer is ``UNAVAILABLE``.
            hurried: it has none if its share is below ``call_timeout``.
            why: the reason in a word or two, for :meth:`explain`.
            together: ask the slowest tier first, and keep in the others what one keeps: ``PINNED`` or ``UNAVAILABLE``.

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
        """Delete keys in one tier; ``UNAVAILABLE`` if it raises."""
        try:
            told = await tier.delete(keys, within=within, hurried=hurried)
            if len(told) != len(keys):
                raise RuntimeError(f"{tier!r} answered {len(told)} deletions for {len(keys)} keys")
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

    # --- whether it is what was stored ------------------------------------------------------------------------------

    async def check_layout(self, canary: Canary, layout: str) -> LayoutCheck:
        """Send a pattern through a store and a load, before the first request, and see whether its planes come back.

        Once under a key of its own, and once under the name of the layout, under which another process may have stored it in
        another layout. Some milliseconds. Cancelled, it returns when nothing reads or writes the block any more; the pattern of
        this check may stay in the tiers until it is evicted.

        Args:
            canary: owns a free block of the cache; :meth:`backends.device.DeviceTier.canary` makes one.
            layout: the name of the layout, as in the keys: processes with the same name must have the same planes.

        Raises:
            LayoutCheckFailed: keys came back as values, or one head as another one: nothing that is loaded can be used.
            DrainUnproven: it was cancelled, and the block may still be read.
            Unproven: the block may still be written to.
        """
        return await LayoutChecker(self, canary, layout).run()

    # --- watching ---------------------------------------------------------------------------------------------------------

    def add_instrument(self, instrument: EngineInstrument | object) -> None:
        """Call the engine's hooks of an instrument from now on; those of its pipelines are added to them."""
        self._hooks.add(instrument)

    def _announce(self, mismatch: Mismatch) -> None:
        if self._shadow is not None:
            self._shadow.announce(mismatch)

    # --- what there is --------------------------------------------------------------------------------------------------

    async def explain(
        self,
        what: Key | Sequence[Key] | Sequence[int],
        *,
        naming: BlockKey | None = None,
        others: Sequence[BlockKey] = (),
        tenant: str = "",
        operator: bool = False,
    ) -> Explanation:
        """Explain why blocks are, or are not, in the tiers: where they are, on their way, or when and why they were lost.

        Pins nothing, and does not count as a use of the blocks. It inspects everything inside the engine and its history, which
        takes milliseconds: for people and tests, not for each request.

        Args:
            what: a key, several keys, or the tokens of a prompt. For tokens it also says whether they are stored under another
                key.
            naming: how keys are made of these tokens.
            others: other namings (layouts, ranks, tenants) of the same tokens to try. Those of other tenants are left out,
                unless ``operator`` is true.
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
        """Copies of stores, loads and promotions without a proven end: see :attr:`offload.Pipeline.quarantine`."""
        return list(self.quarantine_by_name().values())

    def quarantine_by_name(self) -> Mapping[str, Quarantined]:
        """The same, each with a name for operators: its pipeline, and a number."""
        ways = [(pipeline.name, pipeline) for pipeline in self.pipelines]
        ways += [(f"promote-{tier}", pipeline) for tier, pipeline in self._promoter.pipelines]
        return {f"{name}/{entry.number}": entry for name, pipeline in ways for entry in pipeline.quarantine}

    @property
    def withheld(self) -> Sequence[Key]:
        """Keys under which the shadow check has found something wrong, and that are not served until they are stored anew."""
        return [] if self._shadow is None else list(self._shadow.withheld)

    def serve_again(self, keys: Sequence[Key]) -> int:
        """Serve withheld keys again, when an operator knows that they are right. Returns how many were withheld."""
        if self._shadow is None:
            return 0
        withheld = self._shadow.withheld.among(keys)
        self._shadow.withheld.release(withheld)
        return len(withheld)

    def statistics(self) -> EngineStatistics:
        """An immutable snapshot of counters, tiers and pipelines."""
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
        """Change what an operator may want to change while this runs; what is under way keeps what it began with.

        Args:
            lookup_timeout: how long a tier may take for its part of a lookup.
            breaker: when a tier counts as broken, and how it is tried again. A tier that came with a breaker keeps it.
            load_or_recompute: of this ``max_loss`` and ``probe_interval``, where the choice is not off.
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
        """Tag blocks with their tenant. Returns a function that removes the tags."""
        try:
            return tags.bring(blocks.keys, tenant)
        except BaseException:
            _drop(blocks)
            raise

    def _pipeline_to(self, to: str, blocks: Blocks) -> Pipeline:
        """The pipeline of the route from the source of the blocks to that tier."""
        for route in self._routes:
            if to in (route.plan.to, route.plan.name) and route.pipeline.starts_at(blocks.source):
                return route.pipeline
        there = ", ".join(map(str, self._routes))
        _drop(blocks)
        raise ValueError(
            f"to = {to!r}: no route leads there from {blocks.source!r}, only {there}; declare one: "
            f"routes=[offload.Route({to!r}, source='source')]"
        )


def _drop(blocks: Blocks) -> None:
    """Release strong blocks that were not stored: they belong to the engine from the call on, also when it raises."""
    blocks.hand_over()
    give_back(blocks.release)


def _checked(within: float) -> float:
    if not within >= 0:
        raise ValueError(f"within = {within!r}: must be seconds, at least 0")
    return within


_DELETED = Deletion.DELETED
_WEIGHT = {Deletion.MISSING: 0, Deletion.DELETED: 1, Deletion.UNAVAILABLE: 2, Deletion.PINNED: 3}
"""Of the answers of two tiers, the one that counts for both."""
