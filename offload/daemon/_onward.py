"""Committed blocks on their way to the tiers behind the page store.

    commit --reported--> room in each route that leads on --> its pipeline holds the pages and copies --> counted

Committed blocks are in the page store already, so it is not the engine that waits if a required route has no room: the
next announcement does (:meth:`OnwardCommits.wait_room`), as a store waits for the room of its chain. For routes that
are not required nothing waits: they drop blocks that they have no room for.

Rule 1. Nothing here ends before its copies have, so that a daemon that drains can wait for all of it.
Rule 2. A block that was not copied on is in the page store as before. It is counted by the reason: gone from there
    before its turn, or not taken by the tier behind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from backends.abc import Key

from .._engine.onward import OnwardRoutes
from .._pipeline.handle import TransferHandle
from ._engine import DaemonEngine

_log = logging.getLogger("offload.daemon")
_THERE: Final = ("present", "pending")
"""Reasons not to copy a block: the next tier has it.

It may also be on its way there.
"""


class OnwardCommits:
    """Passes on the blocks that engines have committed.

    Args:
        engine: the tiers and pipelines.
        nursery: of the tasks.

    Attributes:
        counts: blocks, once for each route, by result.
    """

    def __init__(self, engine: DaemonEngine, nursery: trio.Nursery) -> None:
        self.counts: dict[str, int] = dict.fromkeys(("passed_on_blocks", "gone_blocks", "not_passed_on_blocks"), 0)
        self._engine = engine
        self._nursery = nursery
        self._waiting = 0  # commits that wait for room
        self._under_way = 0
        self._changed = trio.Event()
        self._complained = False

    @property
    def has_room(self) -> bool:
        """Whether all committed blocks are in the routes by now."""
        return not self._waiting

    async def wait_room(self) -> None:
        """Wait until all committed blocks are in the routes.

        Always a checkpoint.
        """
        await trio.lowlevel.checkpoint()
        while self._waiting:
            await self._changed.wait()

    async def wait_over(self) -> None:
        """Wait until nothing is running any more. Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self._under_way:
            await self._changed.wait()

    def leads_on(self, tier: str) -> bool:
        """Return whether a route leads on from the blocks of this tier."""
        engine = self._engine.engine
        return engine is not None and bool(engine.onward.of(tier))

    def begin(self, tier: str, keys: Sequence[Key], tenant: str) -> None:
        """Pass on blocks of a page store, if a route leads on.

        Returns at once; never raises.
        """
        engine = self._engine.engine
        if engine is not None and keys and self.leads_on(tier):
            waits = engine.onward.waits(tier)
            self._waiting += waits
            self._under_way += 1
            self._nursery.start_soon(self._pass_on, engine.onward, tier, keys, tenant, waits)

    async def _pass_on(self, routes: OnwardRoutes, tier: str, keys: Sequence[Key], tenant: str, waits: bool) -> None:
        try:
            for handle in await self._enqueued(routes, tier, keys, tenant, waits):
                await handle.wait()
                self._count(tier, handle)
        finally:
            self._under_way -= 1
            self._wake()

    async def _enqueued(
        self, routes: OnwardRoutes, tier: str, keys: Sequence[Key], tenant: str, waits: bool
    ) -> Sequence[TransferHandle]:
        try:
            return await routes.pass_on(tier, keys, tenant=tenant)
        except Exception as error:  # the engine may be closing; the blocks stay in the page store
            self.counts["not_passed_on_blocks"] += len(keys)
            _log.warning("%d blocks of %s are not passed on: %r", len(keys), tier, error)
            return ()
        finally:
            self._waiting -= waits
            self._wake()

    def _count(self, tier: str, handle: TransferHandle) -> None:
        progress = handle.progress
        unwanted = sum(reason not in _THERE for reason in handle.filtered_blocks.values())
        failed = progress.failed + progress.remaining + unwanted
        self.counts["passed_on_blocks"] += progress.completed
        self.counts["gone_blocks"] += progress.evicted
        self.counts["not_passed_on_blocks"] += failed
        # Once for each time that it begins: a tier that is down for an hour is one line, not one for each commit.
        if failed:
            level = logging.DEBUG if self._complained else logging.WARNING
            _log.log(level, "%d blocks of %s were not passed on: %r", failed, tier, handle)
        if failed or progress.completed:
            self._complained = failed > 0

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
