"""Measurements of tiers from which requests do not load.

Without them, a tier once decided against would stay so for ever. A lookup that leaves blocks out, and a load that is
given up, pass a few of their keys to the probe. A task for each tier loads these into memory of its own, and no request
waits for it. There is one probe at a time, and none within ``probe_interval`` after one: requests for one meanwhile are
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Final

import attrs
import trio

from backends.abc import LOADED, Key
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from backends.base.threads import kept_if_unproven, leave_after

from .load_choice import LoadChoice
from .loading import raise_unproven
from .lookup import Place
from .rates import SETTLED
from .tenants import TenantTags, nothing

MOST_BLOCKS: Final = 12
"""Most blocks that a probe loads."""
LONGEST: Final = 10.0
"""Most seconds that a probe takes.

A tier that needs longer is slower than any computation.
"""
_LEAVE_AFTER: Final = 10.0
"""Seconds to wait for the end of a cancelled copy.

After that its memory is kept.
"""
_log = logging.getLogger("offload.engine")


def parts_of(blocks: int) -> Sequence[int]:
    """Return the bounds of a probe's loads, enough to settle a rate.

    The loads have different sizes if there are enough blocks, so that latency and bandwidth can be distinguished; and
    they are of different blocks, since a cache below the tier might have blocks that were just read. If there are fewer
    blocks than loads, each load is of all blocks.
    """
    if blocks < SETTLED:
        return [0] * (SETTLED + 1)
    small = max(1, (blocks - 2) // 3)
    return [0, 1, 1 + small, 2 + small, blocks]


@attrs.define(eq=False)
class RateProbe:
    """A probe that measures the tiers of one engine."""

    places: Sequence[Place]
    """The tiers, the fastest first."""
    choice: LoadChoice
    block_bytes: int
    interval: float
    """Seconds between two probes of a tier."""
    tags: TenantTags | None
    """The tags of tenants, or ``None`` if no tier must know them."""
    _wanted: dict[int, trio.MemorySendChannel[tuple[Sequence[Key], str]]] = attrs.Factory(dict)

    def request(self, rank: int, keys: Sequence[Key], tenant: str) -> None:
        """Measure a tier by these blocks, if that is due. Never waits."""
        wanted = self._wanted.get(rank)
        if wanted is not None and keys:
            try:
                wanted.send_nowait((keys[:MOST_BLOCKS], tenant))
            except trio.WouldBlock:  # its task does not wait for work: a probe is under way, or was a short time ago
                return

    async def run(self) -> None:
        """Run until cancelled; then no copy is under way any more."""
        async with trio.open_nursery() as nursery:
            for rank in range(len(self.places)):
                self._wanted[rank], requests = trio.open_memory_channel[tuple[Sequence[Key], str]](0)
                nursery.start_soon(self._serve, rank, requests)

    async def _serve(self, rank: int, requests: trio.MemoryReceiveChannel[tuple[Sequence[Key], str]]) -> None:
        async for keys, tenant in requests:
            try:
                with trio.move_on_after(LONGEST) as scope:
                    ended = await self._probe(rank, keys, tenant)
                if scope.cancelled_caught:
                    ended = "too slow"
            except Exception as error:
                _log.debug("%s could not be measured: %r", self.places[rank][0], error)
                ended = "failed"
            self.choice.note_probe(ended)
            await trio.sleep(self.interval)

    async def _probe(self, rank: int, keys: Sequence[Key], tenant: str) -> str:
        """Load these blocks, part by part, and return the outcome."""
        end = nothing if self.tags is None else self.tags.carry(keys, tenant)
        try:
            for start, stop in pairwise(parts_of(len(keys))):
                if not await self._measure(rank, keys[start:stop] or keys):
                    return "gone"
            return "measured"
        finally:
            end()

    async def _measure(self, rank: int, keys: Sequence[Key]) -> bool:
        """Load these blocks at once, and measure the time.

        Returns whether all of them were loaded.
        """
        name, tier = self.places[rank]
        memory = new_pages(len(keys), self.block_bytes)
        began = trio.current_time()
        with leave_after(_LEAVE_AFTER), kept_if_unproven(memory):
            async with await tier.pin(keys) as lease:
                n = len(lease.keys)
                outcomes = await tier.load(lease, PagesDestination(memory.part(0, n)))
                raise_unproven(outcomes)
        if n < len(keys) or outcomes.count(LOADED) < n:
            return False
        self.choice.note_loaded(name, n, trio.current_time() - began)
        return True


@asynccontextmanager
async def run_probe(probe: RateProbe) -> AsyncIterator[RateProbe]:
    """Run a probe for the length of an ``async with`` block."""
    came: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.run)
        try:
            yield probe
        except BaseException as error:  # the body's error leaves as it is, not in a group
            came = error
        nursery.cancel_scope.cancel()
    try:
        if came is not None:
            raise came
    finally:
        del came  # break the cycle: its traceback holds this frame
