"""Chain: what one pipeline has stored is fed to the next ones, as weak blocks.

The handle of the first enqueue is terminal only after all routes; any route that fails makes it FAILED. A chain never
splits: behind the first commit a cancel changes nothing, so the containers of the routes enter with a committed gate. What
the first copy held was released when it ended; a route's own pipeline holds its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import attrs
import trio

from backends.abc import Blocks, Key, WeakBlocks

from ._container import OffloadContainer
from ._errors import DrainUnproven, PipelineClosed
from ._handle import TransferHandle
from ._lifecycle import Status
from ._result import TransferResult
from ._settling import Settlement


class Route(Protocol):
    """A pipeline, as the chain sees it."""

    @property
    def name(self) -> str:
        """What the result calls it."""
        ...

    async def enqueue_committed(self, blocks: Blocks) -> TransferHandle:
        """Take in blocks whose walk cannot be cancelled any more."""
        ...


class _Shelf(Protocol):
    """A destination that is a source as well."""

    def weak(self, keys: Sequence[Key]) -> WeakBlocks: ...


@attrs.define(eq=False)
class Chain:
    """The pipelines that lead on from one destination."""

    routes: Sequence[Route]
    shelf: _Shelf
    settlement: Settlement
    following: int = 0
    """Containers whose routes are under way."""
    _scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    _nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the parent of those who follow, for ever."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()

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
                for route in self.routes:
                    nursery.start_soon(self._walk, route, container, results)
        finally:
            self.following -= 1
            self._settle(container, results)

    def _settle(self, container: OffloadContainer, results: dict[str, TransferResult]) -> None:
        """Its end, from those of the routes; one that did not get there has failed."""
        if container.completed:
            error = PipelineClosed("the chain ended before this route did")
            for route in self.routes:
                results.setdefault(route.name, _failed(container.completed, error))
            container.routes = results
            container.error = _worst([result for result in results.values() if result.status is Status.FAILED])
        self.settlement.settle(container)

    async def _walk(self, route: Route, container: OffloadContainer, results: dict[str, TransferResult]) -> None:
        try:
            handle = await route.enqueue_committed(self.shelf.weak(container.completed))
        except Exception as error:  # it has closed, or can never hold so many: this route fails, and nobody else
            results[route.name] = _failed(container.completed, error)
        else:
            results[route.name] = await handle.wait()


_NONE: Mapping[str, TransferResult] = MappingProxyType({})


def _worst(failed: Sequence[TransferResult]) -> BaseException | None:
    """Why the chain failed, if it did: before all else that the end of a copy is unproven, which a cancel must say."""
    errors = [result.error or next(iter(result.failed.values()), None) for result in failed]
    return min(errors, key=lambda error: not isinstance(error, DrainUnproven), default=None)


def _failed(keys: Sequence[Key], error: Exception) -> TransferResult:
    return TransferResult(Status.FAILED, (), {}, dict.fromkeys(keys, error), (), error, _NONE)
