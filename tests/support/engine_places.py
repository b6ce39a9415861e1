"""Fakes around an engine: places, destinations, and a scope that is cancelled at a chosen checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

import attrs
import trio
import trio.abc

import offload
from backends.abc import Key
from backends.base.slots import PagesDestination
from backends.testing import FakeTier, payload_of
from offload import Engine, Route, open_engine

SIZE = 64


def keys_of(n: int, salt: str = "") -> list[Key]:
    return [offload.block_key(b"%d" % i, salt=salt) for i in range(n)]


def room(n: int) -> tuple[list[bytearray], PagesDestination]:
    buffers = [bytearray(SIZE) for _ in range(n)]
    return buffers, PagesDestination.over(buffers)


def payloads(keys: Sequence[Key]) -> list[bytearray]:
    return [bytearray(payload_of(key, SIZE)) for key in keys]


def required(tiers: Iterable[str], routes: Iterable[Route] = ()) -> tuple[Route, ...]:
    """These routes, and one from each tier to the next, required: a store ends when all tiers have its blocks."""
    named = {route.to: route for route in routes}
    more = [Route(name) for name in list(tiers)[1:] if name not in named]
    return tuple(attrs.evolve(route, required=True) for route in [*named.values(), *more])


class Places:
    """A source and tiers named ``a``, ``b``, ... from the fastest to the slowest."""

    def __init__(self, n: int = 2, *, capacity: int = 64, latency: float = 0.0) -> None:
        self.source = FakeTier(64, SIZE)
        self.tiers = {"abcdef"[at]: FakeTier(capacity, SIZE, latency=latency) for at in range(n)}

    def __getitem__(self, name: str) -> FakeTier:
        return self.tiers[name]

    def open(self, **options: object) -> AbstractAsyncContextManager[Engine]:
        return open_engine(self.source, self.tiers, **options)  # type: ignore[call-overload,no-any-return]

    def assert_at_rest(self) -> None:
        for place in (self.source, *self.tiers.values()):
            statistics = place.statistics()
            assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0), place

    async def assert_sound(self, name: str, keys: Sequence[Key]) -> None:
        """Each of these that this tier has is what was stored under its key."""
        for key in keys:
            data = self.tiers[name].get(key)
            assert data is None or data == payload_of(key, SIZE)


async def cancelled_at_checkpoint(nth: int, body: Callable[[], Awaitable[object]]) -> bool:
    """Run ``body`` with its scope cancelled at its ``nth`` checkpoint. Returns whether it came to that."""
    reached = 0
    task = trio.lowlevel.current_task()

    class Watch(trio.abc.Instrument):
        def before_task_step(self, stepped: trio.lowlevel.Task) -> None:
            nonlocal reached
            if stepped is task:
                reached += 1
                if reached == nth:
                    scope.cancel()

    watch = Watch()
    with trio.CancelScope() as scope:
        if nth == 0:
            scope.cancel()
        trio.lowlevel.add_instrument(watch)
        try:
            await body()
        finally:
            trio.lowlevel.remove_instrument(watch)
    return scope.cancelled_caught
