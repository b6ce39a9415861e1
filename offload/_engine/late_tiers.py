"""Tiers that may be absent when an engine opens.

A task enters each such tier later, when it can; a placeholder replaces a tier that could not be made yet. A
:class:`Reconnector` keeps one tier entered:

    wait --> enter, in bounded time --> entered, until the end, or until it ends by itself --.
      ^            | absent                                                                  |
      `------------+-------------------------------------------------------------------------'

:mod:`offload._health.availability` decides when the tier is tried, and how a failed attempt counts; this module has the
clock and the task.

Rule 1. The task that enters a tier also leaves it, since the tier may open a nursery. So one task runs as long as the
        tier is entered.
Rule 2. One attempt at a time, cancelled after ``enter_timeout`` and at the end of the engine. Only the opening of the
        engine waits for an attempt, the first.
Rule 3. A cancel around the engine does not end the tier, since pipelines still drain into it. It is left when they are
        closed, in its order among the tiers; a cancel of the closing then cancels the leaving.
Rule 4. A tier that ends by itself counts as broken and is tried again: no error of the engine. An error while it is
        left is raised, as for any other tier.

A :class:`PlaceholderTier` takes the place of a tier that could not be made, and stays when the tier has been made:
pipelines identify a tier by its object.

Rule 5. It has none of the abilities that some tiers lack, whatever the tier will be.
Rule 6. It is no :class:`~backends.abc.Source`. A tier that is read from, or spilled from, must be there when the engine
        opens.
Rule 7. The tier is made in a thread, one at a time, so that a disk which hangs blocks no other call. A tier that is
        made too late is closed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import attrs
import trio

from backends.abc import Capabilities, Key, Tier
from backends.base.closing import close, close_beside, closing
from backends.base.forwarding import ForwardingTier
from maru.base.threads import run_in_thread

from .._errors import TierTooSlow
from .._health.faults import describe, is_absence
from .._health.runner import BreakerRunner

# --- entering it, again and again -------------------------------------------------------------------------------------


class Reconnector:
    """The keeper of one entered tier. Made and run by :func:`run_reconnector`.

    Args:
        runner: the breaker of the tier.
        enter: returns the context manager that an attempt enters; called for each attempt.
        check_entered: called when the tier is entered. If it raises, the tier is left, and not tried again.
    """

    def __init__(
        self,
        runner: BreakerRunner,
        enter: Callable[[], AbstractAsyncContextManager[object]],
        check_entered: Callable[[], None],
    ) -> None:
        self.tried: trio.Event = trio.Event()
        """An event that is set when the first attempt is over."""
        self.mistake: Exception | None = None
        """The error of the first attempt, if it was no absence."""
        self.failure: Exception | None = None
        """The error of leaving the tier at the end."""
        self._runner = runner
        self._enter = enter
        self._welcome = check_entered
        self._scope = trio.CancelScope(shield=True)
        self._attempt = trio.CancelScope()
        self._closing = trio.Event()
        self._closed = trio.Event()

    async def run(self) -> None:
        """Enter the tier, and again if it ends, until closed or refused."""
        availability = self._runner.availability
        try:
            with self._scope:
                while (delay := availability.delay(trio.current_time())) < math.inf:
                    with trio.move_on_after(delay):
                        await self._closing.wait()
                    if self._closing.is_set():
                        break
                    await self._try()
                    self.tried.set()
        finally:
            self.tried.set()
            self._closed.set()

    async def close(self) -> None:
        """Leave the tier, or stop trying to enter it.

        If cancelled, it cancels the leaving too, and waits for the tier to obey.
        """
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
        """Make one attempt, and stay while the tier is entered."""
        runner, there = self._runner, False
        error: Exception | None = None
        refusal: Exception | None = None
        runner.availability.begin(trio.current_time())
        # Around everything: a scope must not be left before a nursery that was opened within it.
        timeout = runner.config.enter_timeout
        self._attempt = trio.CancelScope(deadline=trio.current_time() + timeout)
        try:
            with self._attempt as scope:
                async with self._enter():
                    if not scope.cancel_called:
                        scope.deadline = math.inf
                        try:
                            self._welcome()
                        except (
                            Exception
                        ) as exc:  # raised again below, outside of a nursery of the tier that would wrap it
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
            self._failed(refusal or error or TierTooSlow(f"it was not there within {timeout:g} s"), refusal is not None)

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
async def run_reconnector(reconnector: Reconnector) -> AsyncIterator[None]:
    """Run a reconnector for the length of an ``async with`` block.

    The block begins after the first attempt.

    Raises:
        Exception: the first attempt showed a wrong configuration; or leaving the tier at the end failed.
    """
    came: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reconnector.run)
        try:
            try:
                await reconnector.tried.wait()
                if reconnector.mistake is not None:
                    raise reconnector.mistake
                yield
            finally:
                await reconnector.close()
        except BaseException as error:  # the body's error leaves as it is, not in a group
            came = error
    try:
        if came is not None:
            raise came
    finally:
        del came  # break the cycle: its traceback holds this frame
        if reconnector.failure is not None:
            raise reconnector.failure


# --- the placeholder --------------------------------------------------------------------------------------------------


class PlaceholderTier(ForwardingTier):
    """A tier in the place of one that could not be made.

    It forwards to that tier once it is made.

    Args:
        make: makes the tier; called in a thread.
        block_bytes: size of every block.
        error: the error of the first attempt to make it.
        seals: whether its wrappers encrypt, so that it needs the tenants of its blocks.
    """

    def __init__(self, make: Callable[[], Any], block_bytes: int, error: Exception, *, seals: bool) -> None:
        # `ForwardingTier.__init__` is not called: the attributes that it sets are computed at each call, see `inner`.
        self.why: str = describe(error)
        """The error of the first attempt to make the tier."""
        self.made: Any = None
        """The tier once it is made."""
        self._make = make
        self._block_bytes = block_bytes
        self._error: Exception | None = error
        self._limiter = trio.CapacityLimiter(1)
        self._tags: dict[_PendingTag, None] = {}
        self._seals = seals

    def __repr__(self) -> str:
        return f"<PlaceholderTier: {self.made if self.made is not None else 'not made yet'!r}>"

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Make the tier, enter it if possible, and leave or close it.

        The first call raises the known error.
        """
        error, self._error = self._error, None
        if error is not None:
            await trio.lowlevel.checkpoint()
            raise error
        made = await _made_in_thread(self._make, self._limiter)
        with closing(made):
            async with made if hasattr(type(made), "__aenter__") else nullcontext():
                with self._forwarding_to(made):
                    yield

    @contextmanager
    def _forwarding_to(self, made: Any) -> Iterator[None]:
        """Forward calls to this tier for the length of a ``with`` block."""
        self.made = made
        try:
            for tag in self._tags:
                tag.pass_on(made)
            yield
        finally:
            for tag in self._tags:
                tag.take_back()
            self.made = None

    # --- the contract -----------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._block_bytes

    @property
    def inner(self) -> Tier:  # type: ignore[override]
        """The tier that calls are forwarded to.

        Raises:
            ConnectionError: it is absent.
        """
        made: Tier | None = self.made
        if made is None:
            raise ConnectionError(f"{self!r} was not made yet")
        return made

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the tier, without most abilities: rules 5 and 6.

        While it is absent, those of any tier. ``needs_tenants`` is kept, as configured.
        """
        made: Tier | None = self.made
        known = Capabilities() if made is None else made.capabilities
        return attrs.evolve(
            known,
            answers_at_once=False,
            needs_tenants=self._seals,
            reports_evictions=False,
            lists_keys=False,
        )

    @property
    def name(self) -> str:
        """The name of the tier; empty while it is absent."""
        made: Tier | None = self.made
        return "" if made is None else made.name

    @property
    def source(self) -> None:
        """``None``: rule 6."""
        return

    @property
    def held_pages(self) -> None:
        """``None``: rule 6."""
        return

    def tell_when_back(self, listener: Callable[[], None]) -> None:
        """Do nothing: the tier is made again when it is back."""

    # --- tenants ------------------------------------------------------------------------------------------------------

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Keep the tags until the tier is there, then pass on."""
        tag = _PendingTag(keys, tenant)
        if self.made is not None:
            tag.pass_on(self.made)
        self._tags[tag] = None

        def end() -> None:
            self._tags.pop(tag, None)
            tag.take_back()

        return end


class _PendingTag:
    """The tenant tag of some keys.

    It has the function that removes the tag from the tier, if it was passed on.
    """

    def __init__(self, keys: Sequence[Key], tenant: str) -> None:
        self._keys = keys
        self._tenant = tenant
        self._end: Callable[[], None] | None = None

    def pass_on(self, tier: Tier) -> None:
        if tier.capabilities.needs_tenants:
            self._end = tier.carry(self._keys, self._tenant)

    def take_back(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


async def _made_in_thread(make: Callable[[], Any], limiter: trio.CapacityLimiter) -> Any:
    """Make a tier in a thread.

    If cancelled, it returns at once, and the tier is closed if it is made later.
    """
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
        await run_in_thread(work, abandon_on_cancel=True, limiter=limiter)
        return made.pop()
    except BaseException as error:
        with lock:
            left = True
        for one in made:
            close_beside(error, one)
        raise
