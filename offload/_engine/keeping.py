"""Keeping a tier entered: a task of its own enters it, tries again where nobody is there, and leaves it at the end.

    wait --> enter, in bounded time --> there, until the end, or until it ends by itself --.
      ^            | nobody there                                                          |
      `------------+-----------------------------------------------------------------------'

When it is tried, and what a failed attempt means, :mod:`offload._health.availability` decides. Here is the time, and the task.

Rule 1. Whoever enters a tier leaves it, in the same task: it may open a nursery. So one task has it for as long as it is there.
Rule 2. One attempt at a time, cancelled after ``enter_timeout`` and at the end of the engine. Nobody waits for one, but for the
        first: then the engine opens.
Rule 3. The tier outlives what is around the engine being cancelled, as its pipelines do that still drain into it. It is left
        when they are closed, in its place among the others; and if the closing is cancelled, so is the leaving.
Rule 4. One that ends by itself is broken, and tried again: no error of the engine. What goes wrong while it is left is one, as
        for any other place.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from .._errors import TierTooSlow
from .._health.faults import describe, is_absence
from .._health.runner import BreakerRunner


class Keeper:
    """Keeps one tier. Made and run by :func:`keep`.

    Args:
        runner: the breaker of the tier.
        enter: what an attempt enters; called anew for each.
        welcome: called when the tier is there. One that raises has the tier left and refused for good.
    """

    def __init__(
        self,
        runner: BreakerRunner,
        enter: Callable[[], AbstractAsyncContextManager[object]],
        welcome: Callable[[], None],
    ) -> None:
        self.tried: trio.Event = trio.Event()
        """The first attempt is over."""
        self.mistake: Exception | None = None
        """What it came to, if that was no absence."""
        self.failure: Exception | None = None
        """What went wrong while the tier was left at the end."""
        self._runner = runner
        self._enter = enter
        self._welcome = welcome
        self._scope = trio.CancelScope(shield=True)
        self._attempt = trio.CancelScope()
        self._closing = trio.Event()
        self._closed = trio.Event()

    async def run(self) -> None:
        """Enter it, and again, until closed or refused."""
        availability = self._runner.availability
        try:
            with self._scope:
                while (patience := availability.delay(trio.current_time())) < math.inf:
                    with trio.move_on_after(patience):
                        await self._closing.wait()
                    if self._closing.is_set():
                        break
                    await self._try()
                    self.tried.set()
        finally:
            self.tried.set()
            self._closed.set()

    async def close(self) -> None:
        """Leave the tier, or give up entering it. Cancelled, it leaves no later than the tier lets itself be cancelled."""
        self._closing.set()
        if not self._runner.is_available:
            self._attempt.cancel()
        try:
            await self._closed.wait()
        except trio.Cancelled:
            self._scope.cancel()
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self._closed.wait()

    async def _try(self) -> None:
        """One attempt, and all the time that the tier is there if it succeeds."""
        runner, there = self._runner, False
        error: Exception | None = None
        refusal: Exception | None = None
        runner.availability.begin(trio.current_time())
        # Around all of it: a scope within which a nursery was opened must not be left before that.
        patience = runner.config.enter_timeout
        self._attempt = trio.CancelScope(deadline=trio.current_time() + patience)
        try:
            with self._attempt as scope:
                async with self._enter():
                    if not scope.cancel_called:
                        scope.deadline = math.inf
                        try:
                            self._welcome()
                        except Exception as exc:  # raised outside, where no nursery of the tier wraps it
                            refusal = exc
                        else:
                            there = True
                            runner.note_entered()
                            self.tried.set()
                            await self._closing.wait()
        except Exception as exc:
            error = exc
        finally:
            if not there and (self._closing.is_set() or self._scope.cancel_called):
                runner.availability.give_up(trio.current_time())
        if there:
            self._ended(error)
        elif not self._closing.is_set():
            self._failed(
                refusal or error or TierTooSlow(f"it was not there within {patience:g} s"), refusal is not None
            )

    def _failed(self, error: Exception, refused: bool) -> None:
        for_good = refused or not is_absence(error)
        if for_good and not self.tried.is_set():
            self.mistake = error
        self._runner.note_not_entered(error, for_good=for_good)

    def _ended(self, error: Exception | None) -> None:
        if self._closing.is_set():
            self.failure = error
        else:
            self._runner.note_ended("without an error" if error is None else describe(error))


@asynccontextmanager
async def keep(keeper: Keeper) -> AsyncIterator[None]:
    """Have a tier kept, for the length of an ``async with`` block, which begins after the first attempt.

    Raises:
        Exception: what is configured wrongly, if the first attempt shows that; or what went wrong while the tier was left.
    """
    came: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        try:
            try:
                await keeper.tried.wait()
                if keeper.mistake is not None:
                    raise keeper.mistake
                yield
            finally:
                await keeper.close()
        except BaseException as error:  # the body's own: it leaves as it came, not in a group
            came = error
    try:
        if came is not None:
            raise came
    finally:
        del came  # its traceback holds this frame
        if keeper.failure is not None:
            raise keeper.failure
