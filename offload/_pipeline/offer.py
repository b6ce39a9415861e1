"""Offers of stored blocks to routes for which no store waits.

Such a route is not required. It may hold a share of the tier above it; the result of an offer is read separately.

    stored above --> room in the route's share? --yes--> held, and a container of the route
                              | no: wait for some, at most ``route_patience``, and hold nothing meanwhile
                              `--> none came: dropped, which is a container of the route that is filtered

Rule 1. No outcome of an offer changes the store that it comes from, which has ended.
Rule 2. A route holds at most its share of the tier above (``route_share``) and never more than its budget, copies in
        quarantine included. So a route that hangs leaves the rest of that tier to others.
Rule 3. A container of a route has at most a quarter of the share: a tier that hangs breaks by its ``max_faults`` (3)
        copies before the share is used up, and later containers are rejected at once.
Rule 4. A dropped block is counted and explained as any other block that is filtered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import trio

from backends.abc import EVICTED, Blocks, HeldSource, Key, Source, StrongBlocks, Tier, WeakBlocks

from .._errors import PipelineClosed, PipelineFull
from .budget import Budget
from .lifecycle import Status
from .page_hold import held_pages_of, origin_of
from .result import TransferResult

if TYPE_CHECKING:
    from .._config import PipelineConfig
    from .container import OffloadContainer
    from .handle import TransferHandle

BEHIND: Final = "behind"
"""The reason of blocks without room in the share in time."""
GONE: Final = "gone"
"""The reason of blocks evicted before their route could hold them."""
CLOSED: Final = "closed"
"""The reason of blocks offered to a route that has closed."""
_PARTS: Final = 4
_log = logging.getLogger("offload.pipeline")
_NO_ROUTES: Mapping[str, TransferResult] = MappingProxyType({})


class RouteShare(Budget):
    """Room for the blocks that a route holds in the tier above.

    Args:
        place: the tier above.
        config: the configuration of the route.
    """

    __slots__ = ("_config", "_known", "_place", "complained", "offered")

    def __init__(self, place: object, config: PipelineConfig) -> None:
        super().__init__(config.budget_blocks)
        self._place: Any = place
        self._config = config
        self._known = False
        self.offered: int = 0
        """Number of blocks that wait for room here."""
        self.complained: bool = False
        """Whether the log has reported that blocks do not arrive."""

    def measure(self) -> int:
        """Return the most blocks for one container.

        The share is computed once the size of the tier above is known.
        """
        if not self._known:
            blocks = blocks_of(self._place)
            if blocks:  # else bounded by the budget alone
                self._known = True
                self.total: int = min(self.total, max(1, int(blocks * self._config.route_share)))
        return max(1, self.total // _PARTS) if self._known else self.total

    def take_some(self, most: int) -> int:
        """Take room for as many blocks as possible, at most ``most``.

        None is taken while a task waits for room.
        """
        taken = 0 if self.waiting else max(0, min(most, self.total - self.used))
        self.used: int = self.used + taken
        return taken


def blocks_of(place: Any) -> int:
    """Return the capacity of a tier in blocks; 0 if unknown.

    It is unknown for a source without statistics, or an absent tier.
    """
    try:
        return int(place.statistics().capacity_bytes // (place.block_bytes or 1))
    except Exception:
        return 0


@attrs.define(eq=False)
class Offer:
    """Blocks of one container that one route was offered."""

    name: str
    """The name of the route."""
    rest: Sequence[Key]
    """Blocks that the route has neither taken nor dropped."""
    depths: Mapping[Key, int]
    """The known depths of the offered blocks."""
    held: list[tuple[Sequence[Key], Blocks]] = attrs.Factory(list)
    """Blocks held for the route until it has them.

    Each entry has the keys, and the held blocks without those that were gone by then.
    """
    handles: list[TransferHandle] = attrs.Factory(list)
    """The containers of the route with blocks of this offer.

    Some of them only count blocks as dropped.
    """
    left: int = attrs.field(init=False)
    """Number of blocks whose end is not known yet."""
    waiting: int = 0
    """Number of blocks counted as waiting for room in the share."""
    _changed: trio.Event | None = None
    _then: list[Callable[[], None]] = attrs.Factory(list)

    def __attrs_post_init__(self) -> None:
        self.left = len(self.rest)

    async def wait(self) -> TransferResult:
        """Wait until all blocks have ended on this route; return the result."""
        while self.rest:
            if self._changed is None:
                self._changed = trio.Event()
            await self._changed.wait()
        return _joined([await handle.wait() for handle in self.handles])

    def note_dealt_with(self) -> None:
        """Wake the waiting tasks if all blocks are taken or dropped."""
        if not self.rest and self._changed is not None:
            self._changed.set()

    def note_ended(self, n: int) -> None:
        """Record the end of so many blocks. Must not raise."""
        self.left -= n
        if not self.left:
            then, self._then = self._then, []
            for call in then:
                call()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call a function when all blocks have ended, which may be now.

        They must have ended on the routes after this one as well.
        """
        if self.left:
            self._then.append(call)
        else:
            call()


class OptionalRoute(Protocol):
    """A pipeline that is not required, as the chain sees it."""

    share: RouteShare
    config: PipelineConfig

    @property
    def name(self) -> str:
        """The route's name in the result of ``handle.wait_routes()``."""
        ...

    def enqueue_offered(self, blocks: Blocks, hold: Callable[[OffloadContainer], Callable[[], None]]) -> TransferHandle:
        """Enqueue blocks that can no longer be cancelled.

        Raises if there is no room.
        """
        ...

    def drop_offered(self, blocks: WeakBlocks, reason: str) -> TransferHandle:
        """Count blocks that are not taken in."""
        ...

    async def drain(self) -> None:
        """Wait until all containers inside have settled."""
        ...


class Offers:
    """The offers of one tier's stored blocks to routes.

    Args:
        tier: the tier; a source, or a page store.

    Raises:
        TypeError: it cannot be read as a source.
    """

    def __init__(self, tier: Source | Tier) -> None:
        self.held_pages: HeldSource | None = held_pages_of(tier)
        """The source of a page store's held pages; ``None`` for other tiers."""
        self._source = origin_of(tier)

    def make(self, route: OptionalRoute, keys: Sequence[Key], depths: Mapping[Key, int]) -> Offer:
        """Offer blocks to a route, and hold those with room.

        To be called in the tick in which the blocks are stored.
        """
        offer, share = Offer(route.name, keys, depths), route.share
        while n := share.take_some(min(share.measure(), len(offer.rest))):
            offer.held.append(self._next(offer, n))
        return offer

    def _next(self, offer: Offer, n: int) -> tuple[Sequence[Key], Blocks]:
        """Take the next blocks of an offer, and hold those still stored."""
        keys, offer.rest = offer.rest[:n], offer.rest[n:]
        return keys, self.hold(keys, offer.depths)

    def hold(self, keys: Sequence[Key], depths: Mapping[Key, int]) -> Blocks:
        """Hold those of these blocks that are still stored.

        A block that is gone is left out, and has failed when the route ends.
        """
        if self.held_pages is not None:
            return WeakBlocks(self.held_pages, keys, None, list(map(depths.get, keys)) if depths else None)
        source = self._source
        try:
            refs = source.upgrade(keys)
        except Exception:
            _log.exception("%r could not hold the stored blocks, so they are not passed on", source)
            refs = [EVICTED] * len(keys)
        if EVICTED in refs:
            keys = [key for key, ref in zip(keys, refs, strict=True) if ref != EVICTED]
            refs = [ref for ref in refs if ref != EVICTED]
        return StrongBlocks(source, keys, refs, list(map(depths.get, keys)) if depths else None)

    def give(self, route: OptionalRoute, offer: Offer) -> bool:
        """Give a route the blocks held for it.

        Returns whether it has all blocks; otherwise :meth:`give_rest` must be called.
        """
        held, offer.held = offer.held, []
        for keys, blocks in held:
            self._enqueue(route, offer, keys, blocks)
        # Waiting blocks are not held, but take memory: at most the route's budget of blocks may wait.
        if offer.rest and route.share.offered + len(offer.rest) > route.config.budget_blocks:
            self.drop_rest(route, offer)
        offer.waiting = len(offer.rest)
        route.share.offered += offer.waiting
        return not offer.rest

    async def give_rest(self, route: OptionalRoute, offer: Offer) -> None:
        """Give a route the rest of an offer as room comes.

        Blocks without room within ``route_patience``, or at a cancel, are dropped.
        """
        share = route.share
        try:
            while offer.rest:
                n = min(share.measure(), len(offer.rest))
                if not share.take_nowait(n):
                    with trio.move_on_after(route.config.route_patience) as patience:
                        await share.take(n)
                    if patience.cancelled_caught:
                        break
                # No checkpoint since there was room, or it would be lost to a cancel.
                share.offered -= n
                offer.waiting -= n
                self._enqueue(route, offer, *self._next(offer, n))
        except PipelineClosed:
            pass
        finally:
            self.drop_rest(route, offer)

    def _enqueue(self, route: OptionalRoute, offer: Offer, keys: Sequence[Key], blocks: Blocks) -> None:
        """Give a route blocks that have room in its share.

        Blocks that are gone already are dropped.
        """
        n, share = len(blocks.keys), route.share
        if n < len(keys):
            share.give_back(len(keys) - n)
            there = set(blocks.keys)
            self._drop(route, offer, [key for key in keys if key not in there], GONE)
        if not n:
            return

        def hold(container: OffloadContainer) -> Callable[[], None]:
            def release() -> None:
                share.give_back(n)
                _log_end(route, container)
                container.after_offers(lambda: offer.note_ended(n))

            return release

        try:
            offer.handles.append(route.enqueue_offered(blocks, hold))
        except Exception as error:
            share.give_back(n)
            # Others have filled its budget, or it has closed.
            self._drop(route, offer, blocks.keys, BEHIND if isinstance(error, PipelineFull) else CLOSED)

    def drop_rest(self, route: OptionalRoute, offer: Offer) -> None:
        """Drop the blocks of an offer that the route has not taken."""
        route.share.offered -= offer.waiting
        offer.waiting = 0
        rest, offer.rest = offer.rest, ()
        self._drop(route, offer, rest, BEHIND)
        offer.note_dealt_with()

    def _drop(self, route: OptionalRoute, offer: Offer, keys: Sequence[Key], reason: str) -> None:
        if keys:
            blocks = WeakBlocks(self._source if self.held_pages is None else self.held_pages, keys, None)
            offer.handles.append(route.drop_offered(blocks, reason))
            _log_once(route, len(keys), f"it is behind, so they are dropped: {reason}")
            offer.note_ended(len(keys))


def _log_end(route: OptionalRoute, container: OffloadContainer) -> None:
    """Log the first failure of a container's blocks since some arrived."""
    failed = len(container.failed) or (len(container.keys) if container.error is not None else 0)
    if failed:
        why = container.error or next(iter(container.failed.values()))
        _log_once(route, failed, f"{type(why).__name__}: {why}" + (f" ({why.__cause__})" if why.__cause__ else ""))
    elif container.completed and route.share.complained:
        route.share.complained = False
        _log.info("%s accepts blocks again", route.name)


def _log_once(route: OptionalRoute, blocks: int, why: str) -> None:
    # Once for each outage: a tier that is down for an hour is one line, not one for each store.
    level = logging.DEBUG if route.share.complained else logging.WARNING
    route.share.complained = True
    _log.log(level, "%d blocks are not copied on to %s, and stay above: %s", blocks, route.name, why)


def _joined(results: Sequence[TransferResult]) -> TransferResult:
    """Join the results of the containers of one offer."""
    if len(results) == 1:
        return results[0]
    failed = [result for result in results if result.status is not Status.COMPLETE]
    return TransferResult(
        Status.FAILED if failed else Status.COMPLETE,
        tuple(key for result in results for key in result.completed),
        {key: reason for result in results for key, reason in result.filtered.items()},
        {key: error for result in results for key, error in result.failed.items()},
        tuple(key for result in results for key in result.evicted),
        next((result.error for result in failed if result.error is not None), None),
        _NO_ROUTES,
    )
