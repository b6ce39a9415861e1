"""Policies, preconditions and executors that behave badly in one chosen way, for the scenarios and the fuzz."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio

from backends.abc import Key
from offload.abc import AsyncPolicy, Leased, Reasons


class Answer:
    """A policy that never waits, and answers by a function of the keys."""

    def __init__(self, answer: Callable[[Sequence[Key]], Any] = lambda keys: {}) -> None:
        self.calls: list[tuple[Key, ...]] = []
        self.answer = answer

    def __call__(self, keys: Sequence[Key]) -> Any:
        self.calls.append(tuple(keys))
        return self.answer(keys)


class Slow(AsyncPolicy):
    """Sleeps, then answers; counts how many evaluations were begun, ended and cancelled."""

    def __init__(
        self,
        seconds: float | Callable[[Sequence[Key]], float],
        answer: Callable[[Sequence[Key]], Any] = lambda keys: {},
    ) -> None:
        self.seconds = seconds
        self.answer = answer
        self.begun: list[tuple[Key, ...]] = []
        self.ended: list[tuple[Key, ...]] = []
        self.running = self.most = 0

    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        self.begun.append(tuple(keys))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(self.seconds(keys) if callable(self.seconds) else self.seconds)
            answer = self.answer(keys)
        finally:
            self.running -= 1
        self.ended.append(tuple(keys))
        return answer  # type: ignore[no-any-return]


class Lock(AsyncPolicy):
    """Takes a lock for each container after a while; the container gives it back. Cancelled, it has taken none."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.held = 0
        self.taken = 0

    async def evaluate(self, keys: Sequence[Key]) -> Leased:
        await trio.sleep(self.seconds)
        self.held += 1
        self.taken += 1
        return Leased({}, self._give_back)

    def _give_back(self) -> None:
        self.held -= 1


class LockNow:
    """The same, without waiting."""

    def __init__(self) -> None:
        self.held = 0
        self.taken = 0

    def __call__(self, keys: Sequence[Key]) -> Leased:
        self.held += 1
        self.taken += 1
        return Leased({}, self._give_back)

    def _give_back(self) -> None:
        self.held -= 1


class Unwinding:
    """An async callable that never returns, and takes its time to unwind when it is cancelled."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.unwound = False

    async def __call__(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.seconds)
            self.unwound = True
