"""Copying on blocks that another process has stored in a tier.

They go into the tiers after it, as blocks that a route has stored there.

    another process --stores--> page store --its daemon learns of it--> pass_on --> the routes that start there

A route that stores into a tier feeds the next ones itself (:mod:`offload._pipeline.chain`). Blocks that another process
stores in a page store pass no route of this engine; so the code that learns of them calls :meth:`OnwardRoutes.pass_on`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import trio

from backends.abc import Key, Tier, WeakBlocks, check_keys

from .._pipeline.handle import TransferHandle
from .._pipeline.offer import Offers
from .._pipeline.page_hold import held_pages_of
from .._pipeline.pipeline import Pipeline
from .tenants import TenantTags, nothing

if TYPE_CHECKING:
    from .engine import OpenRoute


class OnwardRoutes:
    """The routes of an engine that lead on from a tier.

    Made by the engine (:attr:`offload.Engine.onward`). With ``chain = "on_store"`` there is one from each tier to the
    next that can be read, and those that were configured.
    """

    def __init__(self, tiers: Mapping[str, Tier], routes: Sequence[OpenRoute], tags: TenantTags | None) -> None:
        """Use :attr:`offload.Engine.onward` instead."""
        named = {route.plan.name: route.pipeline for route in routes}
        self._required = [route.pipeline for route in routes if route.plan.required]
        fed: dict[str, dict[str, None]] = {}
        for route in routes:
            fed.setdefault(route.plan.to, {}).update(dict.fromkeys(route.plan.feeds))
        # Required routes first: one that is not may wait for its share of the tier.
        self._pipelines: dict[str, list[Pipeline]] = {
            tier: sorted([named[name] for name in names], key=lambda pipeline: pipeline not in self._required)
            for tier, names in fed.items()
        }
        self._tiers = tiers
        self._tags = tags

    def __repr__(self) -> str:
        return f"<OnwardRoutes from {', '.join(tier for tier, fed in self._pipelines.items() if fed) or 'no tier'}>"

    def of(self, tier: str) -> Sequence[Pipeline]:
        """Return the pipelines that lead on from this tier."""
        return self._pipelines.get(tier, ())

    def waits(self, tier: str) -> bool:
        """Return whether a required route leads on from this tier.

        If so, :meth:`pass_on` waits for room there.
        """
        return any(pipeline in self._required for pipeline in self.of(tier))

    async def pass_on(self, tier: str, keys: Sequence[Key], *, tenant: str = "") -> Sequence[TransferHandle]:
        """Copy on blocks that another process has stored in a page store.

        They are copied along each route that leads on from there. Waits for room in these routes, not for the copies; a
        route that is not required drops blocks without room within its ``route_patience``. If cancelled while it waits,
        the portions that had room go on.

        Args:
            tier: the name of a tier with :attr:`held_pages <backends.abc.Tier.held_pages>`.
            keys: of the blocks, all different.
            tenant: of the blocks, for tiers that need it.

        Returns:
            The handles, one for each route and portion of the keys, with the outcomes of the blocks: one that is not
            stored counts as evicted. There is none if no route leads on.

        Raises:
            ValueError: no page store has this name, or a key is longer than any tier accepts.
            backends.abc.DuplicateKeys: a key is named twice.
            TypeError: a key is not ``bytes``, or this is one key and not a sequence.
            PipelineClosed: the engine is closing.
        """
        check_keys(keys)
        held_pages = held_pages_of(self._tiers.get(tier))
        if held_pages is None:
            raise ValueError(f"tier = {tier!r}: must be a page store, one of {', '.join(self._tiers)}")
        await trio.lowlevel.checkpoint_if_cancelled()
        handles: list[TransferHandle] = []
        for pipeline in self.of(tier):
            if pipeline not in self._required:
                handles += await self._offered(pipeline, Offers(self._tiers[tier]), keys, tenant)
                continue
            most = pipeline.config.budget_blocks
            for start in range(0, len(keys), most):
                portion = WeakBlocks(held_pages, keys[start : start + most], None)
                handles.append(await self._enqueue(pipeline, portion, tenant))
        if not handles:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return handles

    async def _offered(
        self, pipeline: Pipeline, offers: Offers, keys: Sequence[Key], tenant: str
    ) -> Sequence[TransferHandle]:
        """Offer blocks to a route that is not required."""
        end = nothing if self._tags is None else self._tags.bring(keys, tenant)
        offer = offers.make(pipeline, keys, {})
        try:
            if not offers.give(pipeline, offer):
                await offers.give_rest(pipeline, offer)
        finally:
            offer.when_ended(end)
        return offer.handles

    async def _enqueue(self, pipeline: Pipeline, blocks: WeakBlocks, tenant: str) -> TransferHandle:
        if self._tags is None:
            return await pipeline.enqueue_pages(blocks)
        end = self._tags.bring(blocks.keys, tenant)
        try:
            handle = await pipeline.enqueue_pages(blocks)
        except BaseException:
            end()
            raise
        return self._tags.until_settled(handle, end)
