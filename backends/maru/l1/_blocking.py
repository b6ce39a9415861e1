"""A MaruL1 for threads that do not use trio.

It lives in a thread of its own, and each call waits for its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar, TypeVarTuple

from maru import HandlerClosed, MaruConfig

from ...abc import Deletion, Key, Outcome
from ...base.trio_thread import TrioThread
from ._layout import KVLayout
from ._maru_l1 import MaruL1
from ._reading import ViewLease
from ._status import L1Status
from ._writing import WriteReservation

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOSE_TIMEOUT: Final = 30.0
"""Seconds that closing waits for commits under way.

Each of these is bounded by as much.
"""


class BlockingMaruL1:
    """A :class:`MaruL1` for any thread: ``with BlockingMaruL1(config) as l1``.

    Reservations and leases are those of the MaruL1. Their pages and views can be used in any thread; they are ended
    through this class, since they belong to the thread of the MaruL1.

    Args:
        config: the settings of its handler; also as keywords.
        timeout: seconds after which a call raises :class:`trio.TooSlowError`; it then has had no effect. A commit has a
            bound of its own.
        knobs: see :class:`maru.MaruConfig`.
    """

    def __init__(self, config: MaruConfig | None = None, *, timeout: float = 30.0, **knobs: Any) -> None:
        self._l1 = MaruL1(config, **knobs)
        self._home = TrioThread(lambda: self._l1, "maru l1", timeout=timeout, close_timeout=CLOSE_TIMEOUT)

    def __repr__(self) -> str:
        return f"<BlockingMaruL1 of {self._l1!r}>"

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> BlockingMaruL1:
        """Start its thread. Nothing is connected before the layout is registered."""
        self._home.start()
        return self

    def close(self) -> None:
        """Abort open reservations, release leases, end the session. Idempotent.

        Then join the thread.

        Raises:
            TimeoutError: the thread has not ended in time, and goes on.
        """
        self._home.close()

    def __enter__(self) -> BlockingMaruL1:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- calls ----------------------------------------------------------------------------------------------------

    def register_kv_layout(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[object] | object, **more: Any
    ) -> KVLayout:
        """Set the layout of blocks, which opens the session; see :meth:`MaruL1.register_kv_layout`."""
        return self._wait(lambda: self._l1.register_kv_layout(shapes, dtypes, **more))

    def reserve_write(self, keys: Sequence[Key]) -> WriteReservation:
        """Take a page for each of these keys; see :meth:`MaruL1.reserve_write`."""
        return self._wait(self._l1.reserve_write, keys)

    def take(self, reservation: WriteReservation, keys: Collection[Key]) -> WriteReservation:
        """Split off a reservation for some of the keys; see :meth:`WriteReservation.take`."""
        return self._do(reservation.take, keys)

    def commit(self, reservation: WriteReservation) -> list[Outcome]:
        """Register the filled pages; see :meth:`WriteReservation.commit`."""
        return self._wait(reservation.commit)

    def abort(self, reservation: WriteReservation) -> None:
        """Give the pages back; see :meth:`WriteReservation.abort`."""
        self._do(reservation.abort)

    def reserve_read(self, keys: Sequence[Key]) -> ViewLease:
        """Pin the longest prefix of these keys; see :meth:`MaruL1.reserve_read`."""
        return self._wait(self._l1.reserve_read, keys)

    def keep(self, lease: ViewLease, keys: Collection[Key]) -> None:
        """Release all blocks but these; see :meth:`ViewLease.keep`."""
        self._do(lease.keep, keys)

    def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys; see :meth:`MaruL1.delete`."""
        return self._wait(self._l1.delete, keys)

    def clear(self) -> dict[Key, Deletion]:
        """Delete stored blocks that are not being read; see :meth:`MaruL1.clear`."""
        return self._wait(self._l1.clear)

    def get_memory_usage(self) -> tuple[int, int]:
        """Return used and total bytes; see :meth:`MaruL1.get_memory_usage`.

        ``(0, 0)`` after the end.
        """
        return (0, 0) if self._home.token is None else self._do(self._l1.get_memory_usage)

    def report_status(self) -> L1Status:
        """Return an immutable snapshot; see :meth:`MaruL1.report_status`."""
        return self._do(self._l1.report_status)

    @property
    def config(self) -> MaruConfig:
        """The settings of its handler."""
        return self._l1.config

    @property
    def layout(self) -> KVLayout | None:
        """The registered layout; ``None`` before that."""
        return self._l1.layout

    # --- below ----------------------------------------------------------------------------------------------------

    def _wait(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        return self._open().wait(function, *args)

    def _do(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return self._open().call(function, *args)

    def _open(self) -> TrioThread[MaruL1]:
        if self._home.token is None:
            raise HandlerClosed(f"{self!r} is not open")
        return self._home
