"""CancellationToken of the thread face: cancels any number of stores together.

No lock is needed, by the order of two steps: a store joins first and looks at the flag second, a cancellation sets the flag
first and looks at the stores second. So one of the two sees the other; both may, and a second request changes nothing.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from .._errors import DrainUnproven

if TYPE_CHECKING:
    from ._future import StoreFuture


class CancellationToken:
    """Cancels any number of stores together: hand it in at ``engine.store(..., cancel_token=token)``, as often as you like.

    What an inference engine calls when a request is aborted. For any thread, and any number of engines. A store leaves the
    token when it has ended. One whose token was cancelled before is done as CANCELLED: no policy is asked, no room is needed.
    """

    __slots__ = ("_called", "_futures")

    def __init__(self) -> None:
        self._called = False
        self._futures: dict[StoreFuture, None] = {}

    def __repr__(self) -> str:
        return f"<CancellationToken: {'cancelled' if self._called else 'not cancelled'}, {len(self._futures)} stores>"

    @property
    def cancel_called(self) -> bool:
        """Whether a cancellation was asked for."""
        return self._called

    def request_cancel(self) -> None:
        """Ask for the cancellation of all stores that have it. Never blocks; harmless when repeated."""
        self._called = True
        for future in list(self._futures):
            future.request_cancel()

    def cancel(self, timeout: float | None = None) -> None:
        """Ask for the cancellation of all stores that have it, and wait until each is confirmed.

        Args:
            timeout: how long to wait for all of them together, in seconds; by default as long for each as its engine was told.

        Raises:
            WaitTimeout: one is not confirmed yet; the request stands.
            DrainUnproven: the end of one copy cannot be proven, and what it touched is quarantined.
            ExceptionGroup: of DrainUnproven, where there are several.
            EngineForked: they never will be, in this process.
        """
        futures = list(self._futures)
        self.request_cancel()
        by = None if timeout is None else monotonic() + timeout
        errors = [future.result(None if by is None else max(0.0, by - monotonic())).error for future in futures]
        unproven = [DrainUnproven(*error.args) for error in errors if isinstance(error, DrainUnproven)]
        if len(unproven) == 1:
            raise unproven[0]
        if unproven:
            raise ExceptionGroup("the end of several copies could not be proven", unproven)

    def _join(self, future: StoreFuture) -> None:
        self._futures[future] = None
        if self._called:
            future.request_cancel()

    def _leave(self, future: StoreFuture) -> None:
        self._futures.pop(future, None)
