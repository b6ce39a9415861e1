"""Owner of the handler of a MaruL1.

The handler opens when a layout is registered, in any task, and closes last of all. It has tasks of its own, so it has
to be opened and closed in the same task. This module starts that task, whose parent is the ``async with`` block of the
MaruL1.

Rule 1. Cancelling the surrounding scope does not end the handler: a commit may be going on in a shield. Leaving the
        block does.
Rule 2. If the opening is cancelled, nothing stays open, and the handler can be opened again.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from maru import HandlerClosed, MaruConfig, MaruHandler
from maru.exception_groups import raise_unwrapped

from ._errors import NoLayout


class HandlerOwner:
    """A task that opens the handler and closes it.

    Args:
        make: function that makes the handler.
        at_end: called right before the handler is closed.
    """

    def __init__(self, make: Callable[[MaruConfig], MaruHandler], at_end: Callable[[], object]) -> None:
        self._make = make
        self._at_end = at_end
        self._nursery: trio.Nursery | None = None
        self._handler: MaruHandler | None = None
        self._closing = trio.Event()

    @property
    def handler(self) -> MaruHandler | None:
        """The handler, if it is open."""
        return self._handler

    def require_handler(self, who: object) -> MaruHandler:
        """Return the handler, or raise if it is not open.

        Raises:
            NoLayout: the handler was not opened yet.
            HandlerClosed: the block was left, or not entered.
        """
        self.check_open(who)
        if self._handler is None:
            raise NoLayout(f"{who!r}: call register_kv_layout first, which sets the size of a page")
        return self._handler

    def check_open(self, who: object) -> trio.Nursery:
        """Return the nursery of the handler, or raise outside of the block.

        Raises:
            HandlerClosed: this is called outside of the block.
        """
        if self._nursery is None:
            raise HandlerClosed(f"{who!r} is used outside of its `async with` block")
        return self._nursery

    async def open(self, who: object, config: MaruConfig) -> None:
        """Open the handler.

        Cancelled, or without an answer of the server, it stays closed.
        """
        self._handler = await self.check_open(who).start(self._run_handler, config)

    async def _run_handler(self, config: MaruConfig, *, task_status: trio.TaskStatus[MaruHandler]) -> None:
        handler = self._make(config)
        with trio.CancelScope() as scope:
            async with handler:
                task_status.started(handler)
                # If the task that awaits `started` was cancelled in the same instant, it has done nothing, and this
                # task must end. In a shield it would not.
                scope.shield = trio.current_effective_deadline() > -math.inf
                await self._closing.wait()

    def run(self) -> AbstractAsyncContextManager[None]:
        """Return the block in which the handler can be opened.

        An exception of its body leaves it unchanged.
        """
        return self._run()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        error: BaseException | None = None
        with raise_unwrapped():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    yield
                except BaseException as exc:
                    if nursery.cancel_scope.cancel_called:  # the handler has failed
                        raise
                    error = exc
                finally:
                    self._at_end()
                    self._nursery = None
                    self._closing.set()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
