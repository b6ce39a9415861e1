"""Chain: what one pipeline has stored is fed to the next ones.

Rule 1. The handle of the first enqueue is terminal only after all routes; any route that fails makes it FAILED.
Rule 2. A chain never splits: behind the first commit a cancel changes nothing, so the containers of the routes enter with a
        committed gate.
Rule 3. What was stored is held until it has been copied on, once for each route: from the tick in which it is registered (its
        reservation holds it, :class:`backends.abc.HoldingReservation`) to the end of that route's copy, whose pipeline has
        the refs. So it is not evicted between two tiers. What is gone all the same (a tier that cannot hold) has failed.
Rule 4. A hold ends, whatever happens: a broken tier rejects the copy at once, a full one within ``destination_timeout``, and
        the copy itself has ``transfer_timeout``. Copies wait for room below only, never for room above. So stores that wait
        for what is held wait for something that ends, and they themselves for ``destination_timeout`` at most.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import attrs
import trio

from backends.abc import EVICTED, Blocks, Key, Source, StrongBlocks

from .._errors import DrainUnproven, PipelineClosed, TransferFailed
from .container import OffloadContainer, depths_of
from .containment import give_back
from .handle import TransferHandle
from .lifecycle import Status
from .marks import place_of
from .result import TransferResult
from .settlement import Settlement

_log = logging.getLogger("offload.pipeline")


class Route(Protocol):
    """A pipeline, as the chain sees it."""

    @property
    def name(self) -> str:
        """What the result calls it."""
        ...

    async def enqueue_committed(self, blocks: Blocks) -> TransferHandle:
        """Take in blocks that cannot be cancelled any more."""
        ...


@attrs.define(eq=False)
class Chain:
    """The pipelines that lead on from one destination."""

    routes: Sequence[Route]
    tier: Source
    """The destination, which is a source as well."""
    settlement: Settlement
    following: int = 0
    """Containers whose routes are under way."""
    _scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    _nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the parent of the tasks that follow containers, for ever."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()

    def hold(self, containers: Sequence[OffloadContainer]) -> None:
        """Their first copy is over: hold what it has stored, for each route. To be followed in the same tick."""
        for container in containers:
            if container.completed:
                depths = depths_of([container])
                container.onward = [self._held(container.completed, depths) for _ in self.routes]

    def _held(self, keys: Sequence[Key], depths: Mapping[Key, int]) -> StrongBlocks:
        """Those of these blocks that are there."""
        place = place_of(self.tier)
        try:
            refs = place.upgrade(keys)
        except Exception:
            _log.exception("%r could not hold what it has stored, so it is not passed on", place)
            refs = [EVICTED] * len(keys)
        if EVICTED in refs:
            keys = [key for key, ref in zip(keys, refs, strict=True) if ref != EVICTED]
            refs = [ref for ref in refs if ref != EVICTED]
        return StrongBlocks(place, keys, refs, list(map(depths.get, keys)) if depths else None)

    def follow(self, containers: list[OffloadContainer]) -> None:
        """Their first copy is over: settle those that have nothing to pass on, follow the others."""
        for container in containers:
            if container.completed and not self._scope.cancel_called:
                self.settlement.release(container)
                assert self._nursery is not None
                self._nursery.start_soon(self._follow, container)
            else:
                self._settle(container, {})

    def cut_off(self) -> None:
        """Stop following: what is not over settles as FAILED. The routes themselves go on to their own end."""
        self._scope.cancel()

    async def _follow(self, container: OffloadContainer) -> None:
        results: dict[str, TransferResult] = {}
        self.following += 1
        try:
            async with trio.open_nursery() as nursery:
                onward, container.onward = container.onward, ()
                for route, blocks in zip(self.routes, onward, strict=True):
                    nursery.start_soon(self._walk, route, blocks, container, results)
        finally:
            self.following -= 1
            self._settle(container, results)

    def _settle(self, container: OffloadContainer, results: dict[str, TransferResult]) -> None:
        """Its end, from those of the routes; one that did not get there has failed."""
        for blocks in container.onward:  # no route took them
            give_back(blocks.release)
        if container.completed:
            error = PipelineClosed("the chain ended before this route did")
            for route in self.routes:
                results.setdefault(route.name, _failed(container.completed, error))
            container.routes = results
            container.error = _worst([result for result in results.values() if result.status is Status.FAILED])
        self.settlement.settle(container)

    async def _walk(
        self, route: Route, blocks: StrongBlocks, container: OffloadContainer, results: dict[str, TransferResult]
    ) -> None:
        """One route, which has these blocks from now on."""
        try:
            handle = await route.enqueue_committed(blocks)
        except Exception as error:  # it has closed, or can never hold so many: this route fails, and no other
            results[route.name] = _failed(container.completed, error)
        else:
            results[route.name] = self._without(await handle.wait(), container.completed, blocks.keys)

    def _without(self, result: TransferResult, stored: Sequence[Key], held: Sequence[Key]) -> TransferResult:
        """The end of a route, on which what was gone has failed."""
        gone = set(stored).difference(held).union(result.evicted)
        if not gone:
            return result
        error = TransferFailed(f"gone from {self.tier!r} before it could be passed on")
        failed = {**result.failed, **{key: error for key in stored if key in gone}}
        return attrs.evolve(result, status=Status.FAILED, failed=failed, evicted=())


_NONE: Mapping[str, TransferResult] = MappingProxyType({})


def _worst(failed: Sequence[TransferResult]) -> BaseException | None:
    """Why the chain failed, if it did: before all else that the end of a copy is unproven, which a cancel must say."""
    errors = [result.error or next(iter(result.failed.values()), None) for result in failed]
    return min(errors, key=lambda error: not isinstance(error, DrainUnproven), default=None)


def _failed(keys: Sequence[Key], error: Exception) -> TransferResult:
    return TransferResult(Status.FAILED, (), {}, dict.fromkeys(keys, error), (), error, _NONE)
