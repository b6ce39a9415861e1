"""Promotion: writes blocks of a slower tier into a faster one.

The blocks were loaded from the slower tier; they are written after the load has returned.

    load -------------------------------> answer
      '--> faster tier's own pipeline: is it there already? --> read it again, verified, into host memory --> copy in

A promotion is a store whose precondition is that its bytes have been read. So every promise of a store holds for it:
blocks that are present are filtered, blocks that another pipeline brings are not copied twice, its reading can be
cancelled and its copy drains, and the end of the engine waits for it no longer than for any other store.

Rule 1. A load never waits for it, and the caller's cancel does not reach it: it begins once the result of the load is
        known, by a call that does not wait, and runs in a pipeline of the engine.
Rule 2. It uses no memory of the caller, who may reuse the destination once the load is over. So the bytes are read from
        the slower tier again, under their own lease, and only bytes that this tier has verified are written.
Rule 3. It waits for room only if everything in the faster tier is pinned: that tier evicts if its route does; otherwise
        blocks that do not fit are refused, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from backends.abc import EVICTED, LOADED, Destination, Key, Source, Tier
from backends.base.pages import Pages, copy_and_sum, copy_pages, new_pages
from backends.base.threads import kept_if_unproven, leave_after

from .._config import BatchConfig, PipelineConfig
from .._errors import DestinationFull, PipelineClosed, PipelineFull, PreconditionFailed, TierUnavailable
from .._pipeline.container import OffloadContainer
from .._pipeline.handle import TransferHandle
from .._pipeline.opening import open_pipeline
from .._pipeline.pipeline import Pipeline
from .._pipeline.priority import LoadPriority
from .factories import presence_filter
from .loading import raise_unproven
from .lookup import Place
from .statistics import Counts, count
from .tenants import TenantTags, nothing

_LONGEST_WAIT = 1.0
"""Seconds that a promotion waits for room if everything is pinned.

That is long enough for a load to release its hit.
"""
_log = logging.getLogger("offload.engine")


def promotion_config(config: PipelineConfig, blocks: int) -> PipelineConfig:
    """Return the settings of the pipeline that promotes into a tier.

    They are derived from those of the tier's route, for a budget of ``blocks``.
    """
    batches = config.batch_config
    most = min(batches.max_batch_size, blocks)
    return attrs.evolve(
        config,
        batch_config=BatchConfig(
            most, min(batches.min_batch_size, most), 0.0
        ),  # do not wait for a fuller batch: each block takes memory meanwhile
        max_concurrent_transfers=1,
        on_destination_full="evict" if config.on_destination_full == "evict" else "partial",
        destination_timeout=min(config.destination_timeout, _LONGEST_WAIT),
        budget_blocks=blocks,
        on_overflow="wait",
    )


class StagingBuffer(Destination):
    """New host memory into which blocks are read.

    Checksums are computed as blocks arrive, in the copy thread.
    """

    def __init__(self, n: int, block_bytes: int) -> None:
        self._pages = new_pages(n, block_bytes)
        self._sums = [0] * n

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, at: int) -> StagedBlock:
        return StagedBlock(self._pages.part(at, at + 1), self._sums[at])

    @property
    def block_bytes(self) -> int:
        """Size of every place, in bytes."""
        return self._pages.page_bytes

    def views(self) -> None:
        """Return ``None``, so that the tier calls :meth:`copy_in`. That method computes checksums."""
        return

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages to the blocks from ``start`` on."""
        stop = start + len(pages)
        self._sums[start:stop] = copy_and_sum(self._pages.part(start, stop), pages)


@attrs.frozen
class StagedBlock:
    """A block that has been read, and its checksum."""

    page: Pages
    checksum: int
    """xxh3-64 of the bytes as they arrived."""


class Staging(Source):
    """A source of blocks that were read into host memory.

    They wait to be written. A missing block was gone. The source has their checksums: a block that changes while it
    waits is not written.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._there: dict[Key, StagedBlock] = {}
        self._held: dict[int, StagedBlock] = {}
        self._refs = 0

    def __repr__(self) -> str:
        return f"<{len(self._there)} blocks on their way up>"

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._block_bytes

    def put(self, key: Key, block: StagedBlock) -> None:
        """Add a block that has been read."""
        self._there[key] = block

    def forget(self, keys: Sequence[Key]) -> None:
        """Remove blocks that were written, or will not be.

        Memory that a copy still reads is kept until the copy ends.
        """
        for key in keys:
            self._there.pop(key, None)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take a ref for each block that has been read."""
        refs: list[int] = []
        for key in keys:
            block = self._there.get(key)
            if block is None:
                refs.append(EVICTED)
            else:
                self._refs += 1
                self._held[self._refs] = block
                refs.append(self._refs)
        return refs

    def release(self, refs: Sequence[int]) -> None:
        """Release these refs."""
        for ref in refs:
            self._held.pop(ref, None)

    def views(self, refs: Sequence[int]) -> Pages:
        """Return the memory of these blocks."""
        pages = [self._held[ref].page for ref in refs]
        return Pages([page.addresses[0] for page in pages], self._block_bytes, pages)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy blocks to pages of their size. Called in a copy thread."""
        copy_pages(pages, self.views(refs))

    def checksums_of(self, keys: Sequence[Key], refs: Sequence[int]) -> list[int | None]:
        """Return the checksum of each block from when it was read."""
        return [self._held[ref].checksum for ref in refs]

    def forget_damaged(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Remove blocks that have changed since they were read."""
        self.forget(keys)


@attrs.define(eq=False)
class PromotionRoute:
    """The route of promotions into one tier.

    As an instrument of its pipeline it counts the outcome of each.
    """

    pipeline: Pipeline
    staging: Staging
    counts: Counts
    turns: trio.Semaphore = attrs.Factory(lambda: trio.Semaphore(1))
    """A semaphore that lets one promotion read at a time.

    Loads take precedence, and use the slower tiers too.
    """
    _ends: dict[OffloadContainer, Callable[[], None]] = attrs.Factory(dict)

    def begin(self, tier: Tier, keys: Sequence[Key], end: Callable[[], None]) -> None:
        """Promote as many of these blocks as there is room for.

        ``end`` is called when that is over. Never waits.
        """
        statistics = self.pipeline.statistics()
        room = max(0, statistics.budget_blocks - statistics.used_blocks)
        if len(keys) > room:
            count(self.counts.refused, "busy", len(keys) - room)
            keys = keys[:room]
        if not keys:
            end()
            return
        reading = _ReadFromSlowerTier(self, tier)
        blocks = self.staging.weak(keys, _depths_of(tier, keys))
        try:
            reading.handle = self.pipeline.enqueue_nowait(blocks, precondition=reading)
        except (PipelineClosed, PipelineFull) as error:
            count(self.counts.refused, "busy" if isinstance(error, PipelineFull) else "closed", len(keys))
            end()
        else:
            self._ends[reading.handle._container] = end

    def settled(self, container: OffloadContainer) -> None:
        """Count a promotion that has settled, and free its memory.

        This is the hook of an instrument.
        """
        keys = container.blocks.keys
        self.staging.forget([key for key in keys if key not in container.filtered])
        self.counts.promoted += len(container.completed)
        refused = self.counts.refused
        for reason in container.filtered.values():
            count(refused, "duplicate" if reason in ("present", "pending") else "failed")
        for error in container.failed.values():
            count(refused, _word(error))
        if container.evicted:
            count(refused, "gone", len(container.evicted))
        known = len(container.completed) + len(container.filtered) + len(container.failed) + len(container.evicted)
        if known < len(keys):
            count(refused, _word(container.error), len(keys) - known)
        self._ends.pop(container, nothing)()


def _depths_of(tier: Tier, keys: Sequence[Key]) -> Sequence[int | None] | None:
    """Return the depths of these blocks in their prefixes, if known.

    The tier may know them. An error of the tier is logged.
    """
    try:
        depths = tier.depths_of(keys)
        if depths is not None and len(depths) != len(keys):
            raise RuntimeError(f"{tier!r} returned {len(depths)} depths for {len(keys)} keys")
    except Exception:
        _log.exception("%d blocks are promoted without their depths", len(keys))
        return None
    return depths


def _word(error: BaseException | None) -> str:
    """Return the reason for which blocks did not arrive, in a word."""
    if isinstance(error, PreconditionFailed):
        error = error.__cause__
    words: tuple[tuple[type[Exception], str], ...] = (
        (DestinationFull, "full"),
        (TierUnavailable, "unavailable"),
        (PipelineClosed, "closed"),
    )
    return next((word for kind, word in words if isinstance(error, kind)), "failed")


@asynccontextmanager
async def open_promotion_route(
    name: str,
    tier: Tier,
    block_bytes: int,
    config: PipelineConfig,
    counts: Counts,
    load_priority: LoadPriority,
) -> AsyncIterator[PromotionRoute]:
    """Open the route of promotions into this tier, until the block ends."""
    staging = Staging(block_bytes)
    async with open_pipeline(
        staging,
        tier,
        policies=[presence_filter(tier)],
        config=config,
        name=f"up to {name}",
        load_priority=load_priority,
    ) as pipeline:
        route_up = PromotionRoute(pipeline, staging, counts)
        pipeline.add_instrument(route_up)
        yield route_up


@attrs.define(eq=False)
class _ReadFromSlowerTier:
    """The precondition of a promotion: its bytes were read and verified."""

    route_up: PromotionRoute
    tier: Tier
    handle: TransferHandle | None = None

    async def __call__(self) -> None:
        """Read the blocks into host memory.

        If cancelled, nothing is pinned, and no copy is under way any more, except for a copy from a disk that hangs:
        this returns after ``drain_timeout``, and the memory into which it reads is kept.
        """
        assert self.handle is not None
        keys, staging = self.handle.passed_blocks, self.route_up.staging
        async with self.route_up.turns, await self.tier.pin(keys) as lease:
            arrivals = StagingBuffer(len(lease.keys), staging.block_bytes)
            with leave_after(self.route_up.pipeline.config.drain_timeout), kept_if_unproven(arrivals):
                outcomes = await self.tier.load(lease, arrivals)
                raise_unproven(outcomes)
            for at, (key, outcome) in enumerate(zip(lease.keys, outcomes, strict=True)):
                if outcome == LOADED:
                    staging.put(key, arrivals[at])


@attrs.define(eq=False)
class Promoter:
    """The decision which blocks are promoted into which tier."""

    places: Sequence[Place]
    """The tiers, the fastest first."""
    routes_up: dict[str, PromotionRoute]
    """The routes of promotions, by the tier that they lead to."""
    tenant_tags: TenantTags

    def check(self, promote: bool | str) -> None:
        """Raise :class:`ValueError` if no tier has this name."""
        if isinstance(promote, str) and promote not in dict(self.places):
            names = ", ".join(name for name, _ in self.places)
            raise ValueError(f"promote = {promote!r}: must be true, false, or one of {names}")

    def promote(self, keys: Sequence[Key], origins: Sequence[int], to: bool | str, tenant: str) -> None:
        """Begin to write these blocks into a faster tier.

        It is the fastest tier, or the one named. Blocks that come from it, or from a faster one, are left out.

        Args:
            keys: blocks that were loaded.
            origins: the position of the tier that each of them came from.
            to: the name of a tier; True is the fastest, False none.
            tenant: the tenant of the blocks.
        """
        target = next((at for at, (name, _) in enumerate(self.places) if to is True or to == name), None)
        if not to or target is None:
            return
        start = 0
        for at in range(1, len(keys) + 1):
            if at == len(keys) or origins[at] != origins[start]:
                if origins[start] > target:
                    self._begin(
                        self.places[origins[start]], self.routes_up[self.places[target][0]], keys[start:at], tenant
                    )
                start = at

    def _begin(self, origin: Place, route_up: PromotionRoute, keys: Sequence[Key], tenant: str) -> None:
        keys = list(dict.fromkeys(keys))
        name, tier = origin
        try:
            end = self.tenant_tags.bring_up(keys, tenant, name, verified=tier.capabilities.needs_tenants)
        except Exception:
            _log.exception("%d blocks are not promoted: their tenant cannot be tagged", len(keys))
            count(route_up.counts.refused, "failed", len(keys))
        else:
            route_up.begin(tier, keys, end)

    @property
    def pipelines(self) -> list[tuple[str, Pipeline]]:
        """The pipelines of promotions, each with the tier that it leads to."""
        return [(name, route_up.pipeline) for name, route_up in self.routes_up.items()]

    async def drain(self) -> None:
        """Wait until every promotion has ended."""
        for route_up in self.routes_up.values():
            await route_up.pipeline.drain()

    @property
    def in_flight(self) -> int:
        """Blocks that are being promoted."""
        return sum([route_up.pipeline.statistics().used_blocks for route_up in self.routes_up.values()])
