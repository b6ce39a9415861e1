"""Tiers that may be absent when an engine opens: a task enters each when it can; a placeholder stands for one not made yet.

A :class:`Reconnector` keeps one tier entered:

    wait --> enter, in bounded time --> entered, until the end, or until it ends by itself --.
      ^            | absent                                                                  |
      `------------+-------------------------------------------------------------------------'

When it is tried, and what a failed attempt means, :mod:`offload._health.availability` decides. Here is the time, and the task.

Rule 1. The task that enters a tier leaves it, too: the tier may open a nursery. So one task has it for as long as it is there.
Rule 2. One attempt at a time, cancelled after ``enter_timeout`` and at the end of the engine. Only the opening of the engine
        waits for an attempt, the first.
Rule 3. The tier outlives a cancel around the engine, as its pipelines do that still drain into it. It is left when they are
        closed, in its place among the others; and if the closing is cancelled, so is the leaving.
Rule 4. A tier that ends by itself is broken, and tried again: no error of the engine. What goes wrong while it is left is one,
        as for any other place.

A :class:`PlaceholderTier` takes the place of a tier that could not be made, and keeps it for good: pipelines know a place by
its identity.

Rule 5. It is asked as a :class:`~backends.abc.ReadableTier`, whatever it becomes: that is what can be said of any tier.
Rule 6. It is no :class:`~backends.abc.Source`. What is read from, or spilled out of, must be there when the engine opens.
Rule 7. The tier is made in a thread of its own, one at a time: a disk that hangs blocks no other call. What comes too late is
        closed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import trio

from backends.abc import Capabilities, Key, TenantTier
from backends.closing import close, close_beside, closing
from backends.forwarding import ForwardingTier

from .._errors import TierTooSlow
from .._health.faults import describe, is_absence
from .._health.runner import BreakerRunner

# --- entering it, again and again -------------------------------------------------------------------------------------


class Reconnector:
    """Keeps one tier. Made and run by :func:`keep`.

    Args:
        runner: the breaker of the tier.
        enter: what an attempt enters; called anew for each.
        check_entered: called when the tier is there. One that raises has the tier left and refused for good.
    """

    def __init__(
        self,
        runner: BreakerRunner,
        enter: Callable[[], AbstractAsyncContextManager[object]],
        check_entered: Callable[[], None],
    ) -> None:
        self.tried: trio.Event = trio.Event()
        """The first attempt is over."""
        self.mistake: Exception | None = None
        """What it came to, if that was no absence."""
        self.failure: Exception | None = None
        """What went wrong while the tier was left at the end."""
        self._runner = runner
        self._enter = enter
        self._welcome = check_entered
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
async def keep(keeper: Reconnector) -> AsyncIterator[None]:
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


# --- the placeholder --------------------------------------------------------------------------------------------------


class PlaceholderTier(ForwardingTier):
    """Stands for a tier that is only named, and could not be made: forwards to it once it is there.

    Args:
        make: makes it; called in a thread.
        block_bytes: size of every block.
        error: what the first attempt to make it came to.
        seals: whether its wrappers encrypt, so that it must know whose its blocks are.
    """

    carry: Callable[[Sequence[Key], str], Callable[[], None]]
    """Only where a wrapper encrypts; see :class:`backends.abc.TenantTier`."""

    def __init__(self, make: Callable[[], Any], block_bytes: int, error: Exception, *, seals: bool) -> None:
        # `ForwardingTier.__init__` is not called: what it would set is decided anew for each call, see `inner`.
        self.why: str = describe(error)
        """What the first attempt to make it came to."""
        self.made: Any = None
        """The tier, once it is there."""
        self._make = make
        self._block_bytes = block_bytes
        self._error: Exception | None = error
        self._limiter = trio.CapacityLimiter(1)
        self._claims: dict[_Claim, None] = {}
        if seals:
            self.carry = self._carry

    def __repr__(self) -> str:
        return f"<PlaceholderTier: {self.made if self.made is not None else 'not made yet'!r}>"

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Make it, enter it where it can be entered, and leave or close it. The first time this tells what is known already."""
        error, self._error = self._error, None
        if error is not None:
            await trio.lowlevel.checkpoint()
            raise error
        made = await _made_in_thread(self._make, self._limiter)
        with closing(made):
            async with made if hasattr(type(made), "__aenter__") else nullcontext():
                with self._being(made):
                    yield

    @contextmanager
    def _being(self, made: Any) -> Iterator[None]:
        """As long as this lasts, it is what the stand-in stands for."""
        self.made = made
        try:
            for claim in self._claims:
                claim.pass_on(made)
            yield
        finally:
            for claim in self._claims:
                claim.take_back()
            self.made = None

    # --- the contract -----------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._block_bytes

    @property
    def inner(self) -> Any:
        """The tier that calls are forwarded to.

        Raises:
            ConnectionError: it is absent.
        """
        if self.made is None:
            raise ConnectionError(f"{self!r} is not there")
        return self.made

    @property
    def capabilities(self) -> Capabilities:
        """Those of the tier; all of them as long as it is absent."""
        return getattr(self.made, "capabilities", Capabilities())

    # --- whose its blocks are ---------------------------------------------------------------------------------------

    def _carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Kept until the tier is there, and then passed on."""
        claim = _Claim(keys, tenant)
        if self.made is not None:
            claim.pass_on(self.made)
        self._claims[claim] = None

        def end() -> None:
            self._claims.pop(claim, None)
            claim.take_back()

        return end


class _Claim:
    """Whose some keys are, and what ends that where it was passed on."""

    def __init__(self, keys: Sequence[Key], tenant: str) -> None:
        self._keys = keys
        self._tenant = tenant
        self._end: Callable[[], None] | None = None

    def pass_on(self, tier: object) -> None:
        if isinstance(tier, TenantTier):
            self._end = tier.carry(self._keys, self._tenant)

    def take_back(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


async def _made_in_thread(make: Callable[[], Any], limiter: trio.CapacityLimiter) -> Any:
    """Make it in a thread, where it may block. Cancelled, it leaves at once, and what is made nonetheless is closed."""
    made: list[Any] = []
    lock, left = threading.Lock(), False

    def work() -> None:
        one = make()
        with lock:
            if not left:
                made.append(one)
                return
        close(one)

    try:
        await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
        return made.pop()
    except BaseException as error:
        with lock:
            left = True
        for one in made:
            close_beside(error, one)
        raise
