"""An async context manager that lives in a trio thread.

It is for callers that do not use trio: each call of a blocking API is one call here, which waits for its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from time import monotonic
from typing import Final, Generic, TypeVar, TypeVarTuple

import trio

from maru.base.flags import Flag
from maru.base.threads import start_thread

_LONGEST_END: Final = 10.0
"""Seconds that an interrupted call may take to end."""

M = TypeVar("M")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TrioThread(Generic[M]):
    """Enters a context manager in a thread, until :meth:`close`.

    Args:
        make: function that makes the context manager.
        name: name of the thread.
        timeout: seconds after which a call raises :class:`trio.TooSlowError`: it was cancelled then.
        close_timeout: seconds that closing waits for the end.

    Attributes:
        token: token of the trio run; ``None`` while nothing is entered.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[M]], name: str, *, timeout: float, close_timeout: float
    ) -> None:
        self.token: trio.lowlevel.TrioToken | None = None
        self._make, self._name = make, name
        self._timeout, self._close_timeout = timeout, close_timeout
        self._thread: threading.Thread | None = None
        self._leave: trio.Event
        self._entered: M
        self._error: BaseException | None = None

    def start(self) -> M:
        """Enter the context manager, and raise its exception here."""
        settled, self._over = Flag(), Flag()
        thread = threading.Thread(target=self._run, args=(settled,), name=self._name, daemon=True)
        start_thread(thread)
        self._thread = thread  # not before: a thread that could not be started cannot be joined
        settled.wait()
        if self.token is None and self._error is not None:
            raise self._error
        return self._entered

    def close(self) -> None:
        """Leave the context manager, and join the thread. Idempotent.

        Raises:
            TimeoutError: the thread has not ended within ``close_timeout``, and goes on.
            Exception: leaving raised it.
        """
        thread, self._thread = self._thread, None
        token, self.token = self.token, None
        if thread is None:
            return
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._leave.set)
        if not self._over.wait(self._close_timeout):
            raise TimeoutError(f"{thread.name} has not ended within {self._close_timeout:g} s, and goes on")
        if self._error is not None:
            raise self._error

    def wait(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call an async function in the thread, and wait for its result.

        Interrupted by a signal, it cancels the call, and waits for its end, bounded.
        """
        scope, begun, over, value = trio.CancelScope(), Flag(), Flag(), list[T]()

        async def bounded() -> None:
            begun.set()
            try:
                with scope, trio.fail_after(self._timeout):
                    value.append(await function(*args))
            finally:
                over.set()

        try:
            trio.from_thread.run(bounded, trio_token=self.token)
        except BaseException as error:
            # An error of a call that has not begun is a refusal: the thread has ended, or this one may not wait.
            if (begun.is_set or not isinstance(error, Exception)) and not self._has_ended(scope, over):
                error.add_note("a call was cancelled and has not ended: memory that it writes may still be written to")
            raise
        return value[0]

    def _has_ended(self, scope: trio.CancelScope, over: Flag) -> bool:
        deadline = monotonic() + _LONGEST_END
        while not over.is_set and monotonic() < deadline:
            with suppress(KeyboardInterrupt, SystemExit):  # the first one is raised at the end
                if self.token is not None:
                    with suppress(trio.RunFinishedError):
                        self.token.run_sync_soon(scope.cancel, idempotent=True)
                over.wait(deadline - monotonic())
        return over.is_set

    def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function in the thread."""
        return trio.from_thread.run_sync(function, *args, trio_token=self.token)

    def _run(self, settled: Flag) -> None:
        try:
            trio.run(self._main, settled)
        except BaseException as exc:
            self._error = exc
        finally:
            settled.set()
            self._over.set()

    async def _main(self, settled: Flag) -> None:
        self._leave = trio.Event()
        async with self._make() as self._entered:
            self.token = trio.lowlevel.current_trio_token()
            settled.set()
            await self._leave.wait()
