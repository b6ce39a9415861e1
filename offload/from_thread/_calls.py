"""Calls that the engine's thread answers.

They are lookups and loads that were begun, and calls that a thread waits for. A call is a task in the engine's thread,
in its own cancel scope. Only the thread that removes it from the table of pending calls may answer it. The removal is
one step, so a ``close`` that ran out of time and answers all pending calls answers none twice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from backends.abc import Destination, Key

from .._engine import Advice, BlocksInPlace, LoadResult
from .._engine import Hit as PinnedHit
from ..abc import Precondition
from ._future import Future

if TYPE_CHECKING:
    from ._worker import EngineWorker

T = TypeVar("T")


class CallFuture(Future[T]):
    """The answer of one call.

    A cancellation or a timeout ends the call, and the resources that it has obtained are released.
    """

    __slots__ = (
        "_error",
        "_value",
        "begun",
        "deadline",
        "dispose",
        "function",
        "polled",
        "scope",
        "stop",
        "to_the_end",
    )

    def __init__(
        self,
        worker: EngineWorker,
        function: Callable[[], Awaitable[T]],
        deadline: float,
        *,
        dispose: Callable[[T], None] | None = None,
        to_the_end: bool = False,
        polled: bool = False,
    ) -> None:
        super().__init__(worker, 0)
        self.function: Callable[[], Awaitable[T]] = function
        self.deadline: float = deadline
        """The call's deadline, on the clock of ``time.monotonic``.

        It may have ended by itself before.
        """
        self.dispose: Callable[[T], None] | None = dispose
        """A function that releases the answer of an ended call.

        The call was cancelled or timed out.
        """
        self.to_the_end: bool = to_the_end
        """Whether the call may write to memory of the caller.

        Its end must then be known even after a cancel.
        """
        self.polled: bool = polled
        """Whether a poll returns it.

        True for calls that were begun, false for those that a thread waits for.
        """
        self.begun: bool = False
        """Whether the engine's thread has to answer it."""
        self.scope: trio.CancelScope | None = None
        """The scope of its task in the engine's thread."""
        self.stop: trio.Event | None = None
        """An event that is set by a cancellation."""
        self._value: T | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._state()}>"

    def _state(self) -> str:
        if not self._done:
            return "pending"
        return "done" if self._error is None else repr(self._error)

    def _answer(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _failure(self) -> BaseException | None:
        return self._error

    def _cancel(self) -> None:
        if self.scope is not None and self.stop is not None:
            self.stop.set()
            self.scope.cancel()
        if self._done and self.dispose is not None and self._value is not None:
            self.dispose(self._value)

    def begin(self) -> None:
        """Make the scope of a call that the engine's thread will answer.

        Other calls cost no scope: most are answered in the calling thread.
        """
        self.begun = True
        self.scope, self.stop = trio.CancelScope(), trio.Event()

    def end(self, value: T | None, error: BaseException | None, note: Callable[[Future[Any]], None]) -> None:
        """Set the answer.

        Only for the thread that removed the call from the pending calls.
        """
        self._value, self._error = value, error
        self._finish(note if self.polled else None)


class LookupFuture(CallFuture["Hit"]):
    """A lookup that was begun by :meth:`Engine.begin_lookup`.

    Its :meth:`result` is the :class:`Hit`, pinned until released. A cancelled lookup leaves nothing pinned, also if it
    had found blocks already. If it had no answer yet, its :meth:`result` raises :class:`CallCancelled`.
    """

    __slots__ = ("keys", "tenant")

    def __init__(self, worker: EngineWorker, keys: list[Key], tenant: str, deadline: float, *, polled: bool) -> None:
        super().__init__(
            worker, partial(worker.lookup, keys, tenant, deadline), deadline, dispose=Hit.release, polled=polled
        )
        self.keys: Sequence[Key] = keys
        """The keys that were looked up, in order."""
        self.tenant: str = tenant
        """The tenant, for tiers that need it."""


class LoadFuture(CallFuture[LoadResult]):
    """A load that was begun by :meth:`Engine.begin_load`.

    Until it is done, the engine writes to its destination. After a cancellation or a timeout it is done once no copy
    into ``destination`` is under way. If that cannot be proven, :meth:`result` raises :class:`offload.DrainUnproven`,
    and ``destination`` must not be used again. A load that was cancelled before it had an answer raises
    :class:`CallCancelled`: the destination may be used, its bytes are undefined.
    """

    __slots__ = ("destination", "hit", "precondition")

    def __init__(
        self,
        worker: EngineWorker,
        hit: Hit,
        destination: Destination,
        precondition: Precondition,
        promote: bool | str | None,
        deadline: float,
        *,
        polled: bool,
    ) -> None:
        # The pinned prefix is taken from the hit here: the caller may release the hit as soon as the load has begun.
        load = partial(worker.load, hit.pinned, destination, precondition, promote)
        super().__init__(worker, load, deadline, to_the_end=True, polled=polled)
        self.hit: Hit = hit
        """The hit whose blocks are loaded."""
        self.destination: Destination = destination
        """The destination of the copy."""
        self.precondition: Precondition = precondition
        """The precondition that it waits for before it copies."""


class Hit:
    """The longest prefix that was found, pinned in its tiers.

    It is a context manager, and made by a lookup only.

    Attributes:
        keys: the keys that were found: from the first one requested up to the first that no tier has.
        runs: the tiers of the blocks, in order: the name of a tier, and the number of blocks that are read from it.
        unavailable: the tiers that raised or did not answer, by name, with the error. Not a miss: they may have more of
            the blocks.
    """

    __slots__ = ("__weakref__", "_let_go_of", "_pinned", "_released", "_worker", "keys", "reads", "runs", "unavailable")

    def __init__(self, worker: EngineWorker, pinned: PinnedHit) -> None:
        self._worker = worker
        self._pinned = pinned
        self._let_go_of = False
        self.reads: dict[object, None] = {}  # unfinished loads that threads make themselves
        self.keys: Sequence[Key] = pinned.keys
        self.runs: list[tuple[str, int]] = pinned.runs
        self.unavailable: Mapping[str, Exception] = pinned.unavailable
        self._released = False  # last: see `__del__`

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        where = ", ".join(f"{blocks} in {name}" for name, blocks in self.runs)
        return f"<Hit of {len(self.keys)} blocks: {where or 'nothing'}{', released' if self._released else ''}>"

    @property
    def advice(self) -> Advice | None:
        """The advice how many of the blocks are worth loading.

        ``None`` if that is off (``load_or_recompute``).
        """
        return self._pinned.advice

    def in_place(self) -> BlocksInPlace | None:
        """Return its blocks in place, if all are in this process's memory.

        ``None`` if some are not. A load of this hit into the returned object copies nothing, and verifies the blocks.
        They are to be read only, and as long as this hit is held: see :meth:`begin_reading`.

        Raises:
            ValueError: it was released.
        """
        return self.pinned.in_place()

    @property
    def pinned(self) -> PinnedHit:
        """The engine's object for this hit.

        Raises:
            ValueError: it was released.
        """
        if self._released:
            raise ValueError(f"{self!r} was released")
        return self._pinned

    def begin_reading(self, read: object) -> PinnedHit:
        """Keep the hit pinned until :meth:`end_reading` is called.

        It stays pinned also if it is released meanwhile. ``read`` identifies the read.

        Raises:
            ValueError: it was released; :meth:`end_reading` is due all the same.
        """
        self.reads[read] = None  # before the check of the release: a release sets its flag before it looks here
        return self.pinned

    def end_reading(self, read: object) -> None:
        """End a read. Idempotent."""
        self.reads.pop(read, None)
        if self._released:
            self._let_go()

    def release(self) -> None:
        """Release the blocks. Idempotent; never blocks.

        Loads that were begun before keep their blocks pinned until they end. After the engine's end this does nothing.
        """
        self._released = True
        self._let_go()

    def _let_go(self) -> None:
        # Twice is harmless, and not at all is not: so it is marked as done afterwards, and `__del__` is the second
        # attempt of a thread that a signal has interrupted in here.
        if not self.reads and not self._let_go_of and not self._worker.forked:
            self._worker.reads.release(self._pinned)
            self._let_go_of = True

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        dropped, ends = "", False
        try:
            released = self._released
        except AttributeError:  # a signal has struck while it was made: it holds nothing
            return
        try:
            ends = is_finalizing()  # the engine has gone with the process, and so may the modules that a release uses
            if not ends:
                dropped = repr(self) if not released and self.keys and self._worker.refusal is None else ""
                self.release()  # before the warning, which may be an error
        finally:
            if not ends:
                self.release()  # again: Python ignores an exception that a signal's handler raises here
        if dropped:
            warnings.warn(f"{dropped} was dropped without being released", ResourceWarning, stacklevel=2, source=self)
