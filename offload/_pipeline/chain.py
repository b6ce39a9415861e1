"""A chain of pipelines: later ones copy on the stored blocks.

They read the blocks from the destination of the first. A route is such a next pipeline. The rules:

Rule 1. The handle of the first enqueue is terminal only after all required routes; any of these that fails makes it
        FAILED. Routes that are not required change nothing for it: they are offered the stored blocks, and take or drop
        them (:mod:`offload._pipeline.offer`).
Rule 2. A chain never splits: after the first commit a cancel changes nothing, so the containers of the routes enter
        with a committed gate.
Rule 3. Stored blocks are held until they have been copied on, once for each route: from the tick in which they are
        registered (their reservation holds them, :meth:`backends.abc.Reservation.hold`) to the end of that route's
        copy, whose pipeline has the refs. So they are not evicted between two tiers. A block that is gone all the same
        (from a tier that cannot hold) has failed. A page store has to be asked: there each route holds the blocks that
        have passed its policies (:mod:`offload._pipeline.page_hold`). A route that is not required holds no more than
        its share, and nothing while it waits for room there.
Rule 4. A hold always ends: a broken tier rejects the copy at once, a full one within ``destination_timeout``, and the
        copy itself has ``transfer_timeout``. Copies wait for room below only, never for room above. So stores that wait
        for held blocks wait for something that ends, and they themselves wait for ``destination_timeout`` at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import trio

from backends.abc import Blocks, Key, Source, Tier, WeakBlocks

from .._errors import DrainUnproven, PipelineClosed, TransferFailed
from .container import OffloadContainer, depths_of
from .containment import give_back
from .handle import TransferHandle
from .lifecycle import Status
from .offer import Offer, Offers, OptionalRoute
from .result import TransferResult
from .settlement import Settlement


class Route(Protocol):
    """A pipeline that copies on, with the methods that the chain calls."""

    @property
    def name(self) -> str:
        """The route's name in the result of the first enqueue."""
        ...

    async def enqueue_committed(self, blocks: Blocks) -> TransferHandle:
        """Enqueue blocks that can no longer be cancelled.

        Raises if this pipeline has closed, or can never hold so many.
        """
        ...

    async def enqueue_pages(self, blocks: WeakBlocks) -> TransferHandle:
        """Enqueue blocks of a page store, whose pages the route holds itself.

        Raises like :meth:`enqueue_committed`.
        """
        ...


@attrs.define(eq=False)
class Chain:
    """The pipelines that copy on from one destination, and their containers."""

    routes: Sequence[Route]
    """The required routes."""
    tier: Source | Tier
    """The destination, which is a source as well, or a page store."""
    settlement: Settlement
    optional: Sequence[OptionalRoute] = ()
    """The routes that are not required."""
    following: int = 0
    """Number of containers whose required routes are under way."""
    _waiting: int = 0
    _none_waits: trio.Event = attrs.Factory(trio.Event)
    _offers: Offers = attrs.Factory(lambda chain: Offers(chain.tier), takes_self=True)
    _scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    _nursery: trio.Nursery | None = None

    @property
    def names(self) -> list[str]:
        """The names of all routes."""
        return [*[route.name for route in self.routes], *[route.name for route in self.optional]]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the tasks that follow containers, until :meth:`cut_off`."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()

    def hold(self, containers: Sequence[OffloadContainer]) -> None:
        """Hold the blocks that the first copy stored, once for each route.

        A route that is not required holds only as many as it has room for. Must be called before the reservation of
        that copy is released, and `follow` in the same tick.
        """
        for container in containers:
            if container.completed:
                depths = depths_of([container])
                container.onward = [self._offers.hold(container.completed, depths) for _ in self.routes]
                container.offers = [self._offers.make(route, container.completed, depths) for route in self.optional]

    def follow(self, containers: list[OffloadContainer]) -> None:
        """Settle these containers, those with a required route when it has ended.

        A container without such a route settles at once.
        """
        for container in containers:
            for route, offer in zip(self.optional, container.offers, strict=False):
                self._pass(route, offer)
            if self.routes and container.completed and not self._scope.cancel_called:
                # The first copy is over, and each route has its own hold on the stored blocks: the caller's blocks are
                # not needed any more, and need not wait for the slowest route.
                self.settlement.release(container)
                assert self._nursery is not None
                self._nursery.start_soon(self._follow, container)
            else:
                self._settle(container, {})

    async def drain(self) -> None:
        """Wait until the routes that are not required have ended all offers.

        Always a checkpoint.
        """
        await trio.lowlevel.checkpoint()
        while self._waiting:
            self._none_waits = trio.Event()
            await self._none_waits.wait()
        for route in self.optional:
            await route.drain()

    def cut_off(self) -> None:
        """Settle the followed containers as FAILED, and drop waiting offers.

        Dropped are the blocks that wait for room in a route. The routes go on to their own end.
        """
        self._scope.cancel()

    # -- routes that are not required ----------------------------------------------------------------------------------

    def _pass(self, route: OptionalRoute, offer: Offer) -> None:
        """Give a route its held blocks; the rest waits for room."""
        if self._offers.give(route, offer):
            return
        if self._scope.cancel_called:
            self._offers.drop_rest(route, offer)
            return
        assert self._nursery is not None
        self._waiting += 1
        self._nursery.start_soon(self._wait_for_share, route, offer)

    async def _wait_for_share(self, route: OptionalRoute, offer: Offer) -> None:
        try:
            await self._offers.give_rest(route, offer)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._none_waits.set()

    # -- required routes -----------------------------------------------------------------------------------------------

    async def _follow(self, container: OffloadContainer) -> None:
        results: dict[str, TransferResult] = {}
        self.following += 1
        try:
            async with trio.open_nursery() as nursery:
                onward, container.onward = container.onward, ()
                for route, blocks in zip(self.routes, onward, strict=True):
                    nursery.start_soon(self._run_route, route, blocks, container, results)
        finally:
            # Also when `cut_off` cancels this: a handle that is never settled would let its caller wait for ever.
            self.following -= 1
            self._settle(container, results)

    def _settle(self, container: OffloadContainer, results: dict[str, TransferResult]) -> None:
        """Settle a container with the results of its routes.

        A route without a result has failed.
        """
        for blocks in container.onward:  # no route took them
            give_back(blocks.release)
        if container.completed:
            error = PipelineClosed("the chain ended before this route did")
            for route in self.routes:
                results.setdefault(route.name, _failed(container.completed, error))
            container.routes = results
            container.error = _worst([result for result in results.values() if result.status is Status.FAILED])
        self.settlement.settle(container)

    async def _run_route(
        self, route: Route, blocks: Blocks, container: OffloadContainer, results: dict[str, TransferResult]
    ) -> None:
        """Enqueue these blocks on one route and wait for its end.

        The route owns the holds on the blocks from now on.
        """
        enqueue: Any = route.enqueue_committed if self._offers.held_pages is None else route.enqueue_pages
        try:
            handle = await enqueue(blocks)
        except Exception as error:  # it has closed, or can never hold so many: only this route fails
            results[route.name] = _failed(container.completed, error)
        else:
            results[route.name] = self._without(await handle.wait(), container.completed, blocks.keys)

    def _without(self, result: TransferResult, stored: Sequence[Key], held: Sequence[Key]) -> TransferResult:
        """Return a route's result, with blocks that were gone as failed.

        These were gone before they were copied.
        """
        gone = set(stored).difference(held).union(result.evicted)
        if not gone:
            return result
        error = TransferFailed(f"gone from {self.tier!r} before it could be passed on")
        failed = {**result.failed, **{key: error for key in stored if key in gone}}
        return attrs.evolve(result, status=Status.FAILED, failed=failed, evicted=())


_NONE: Mapping[str, TransferResult] = MappingProxyType({})


def _worst(failed: Sequence[TransferResult]) -> BaseException | None:
    """Return the error to report for all routes, if one failed.

    An unproven end of a copy goes before all others.
    """
    errors = [result.error or next(iter(result.failed.values()), None) for result in failed]
    return min(errors, key=lambda error: not isinstance(error, DrainUnproven), default=None)


def _failed(keys: Sequence[Key], error: Exception) -> TransferResult:
    return TransferResult(Status.FAILED, (), {}, dict.fromkeys(keys, error), (), error, _NONE)
