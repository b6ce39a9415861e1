"""The cancellation token for threads: cancels any number of stores together.

It needs no lock, because of the order of two steps: a store adds itself first and reads the flag second; a cancellation
sets the flag first and reads the set of stores second. So at least one of the two sees the other, and a second request
changes nothing.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from .._errors import DrainUnproven

if TYPE_CHECKING:
    from ._future import StoreFuture


class CancellationToken:
    """A cancellation that is shared by any number of stores.

    Pass it to ``engine.store(..., cancel_token=token)``, any number of times. It is for an inference engine that aborts
    a request, for any thread, and for stores of any number of engines. A store leaves the token when it has ended. A
    store with a token that was cancelled before is CANCELLED at once, without policies or room.
    """

    __slots__ = ("_called", "_futures")

    def __init__(self) -> None:
        self._called = False
        self._futures: dict[StoreFuture, None] = {}

    def __repr__(self) -> str:
        return f"<CancellationToken: {'cancelled' if self._called else 'not cancelled'}, {len(self._futures)} stores>"

    @property
    def cancel_called(self) -> bool:
        """Whether a cancellation was requested."""
        return self._called

    def request_cancel(self) -> None:
        """Request the cancellation of all stores that have the token.

        Never blocks; idempotent.
        """
        self._called = True
        for future in list(self._futures):
            future.request_cancel()

    def cancel(self, timeout: float | None = None) -> None:
        """Cancel all stores that have the token, and await confirmation.

        Args:
            timeout: how long to wait for all of them together, in seconds; by default the engine's timeout for each.

        Raises:
            WaitTimeout: one is not confirmed yet; the request stays in effect.
            DrainUnproven: the end of one copy cannot be proven; its blocks and its destination are quarantined.
            ExceptionGroup: of DrainUnproven, if there are several.
            EngineForked: this is a forked child, in which no store ends.
        """
        futures = list(self._futures)
        self.request_cancel()
        deadline = None if timeout is None else monotonic() + timeout
        errors = [
            future.result(None if deadline is None else max(0.0, deadline - monotonic())).error for future in futures
        ]
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
