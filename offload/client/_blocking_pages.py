"""Pages of a daemon's page store for threads without trio.

They live in a thread of their own, and each call waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Final

from backends.abc import Destination, Key, Outcome
from backends.base.trio_thread import TrioThread

from ..abc import PreconditionLike
from ._errors import DaemonUnavailable
from ._pages import POOL_BYTES, PageLease, PageReservation, Pages, open_pages

_CLOSE_TIMEOUT: Final = 60.0
"""Seconds that closing waits for commits under way.

Each of them is bounded by half as much.
"""


class BlockingPages:
    """:class:`Pages` for any thread.

    Use ``with BlockingPages(url, block_bytes=...) as pages``. Reservations and leases are the same. Their pages and
    views are used anywhere; they are ended by the methods of this class.

    Args:
        url: ``ipc://PATH`` of the daemon's socket; by default that of this user's daemon.
        block_bytes: size of every block.
        timeout: seconds after which a call raises :class:`trio.TooSlowError`: it was cancelled then. A commit that was
            sent is bounded by itself.
        name: see :func:`open_pages`, as for the further arguments.
        credential: of :func:`open_pages`.
        pool_bytes: of :func:`open_pages`.
        wait: of :func:`open_pages`.
    """

    def __init__(
        self,
        url: str = "",
        *,
        block_bytes: int,
        timeout: float = 30.0,
        name: str = "",
        credential: str = "",
        pool_bytes: int = POOL_BYTES,
        wait: float = inf,
    ) -> None:
        self._url = url
        opening = partial(
            open_pages, url, block_bytes=block_bytes, name=name, credential=credential, pool_bytes=pool_bytes, wait=wait
        )
        self._home: TrioThread[Pages] = TrioThread(opening, "pages", timeout=timeout, close_timeout=_CLOSE_TIMEOUT)
        self._pages: Pages | None = None

    def __repr__(self) -> str:
        return f"<BlockingPages over {self._pages!r}>"

    def start(self) -> BlockingPages:
        """Start its thread, and connect. Raises the errors of :func:`open_pages`."""
        self._pages = self._home.start()
        return self

    def close(self) -> None:
        """Release all reservations, end the session, join the thread. Idempotent.

        Raises:
            TimeoutError: the thread has not ended in time, and goes on.
        """
        self._pages = None
        self._home.close()

    def __enter__(self) -> BlockingPages:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def block_bytes(self) -> int:
        """Size of every block."""
        return self._opened().block_bytes

    @property
    def tier(self) -> str:
        """Name of the daemon's tier with these pages."""
        return self._opened().tier

    def reserve_write(self, keys: Sequence[Key]) -> PageReservation:
        """Take a page for each of these keys; see :meth:`Pages.reserve_write`."""
        return self._home.wait(self._opened().reserve_write, keys)

    def commit(self, reservation: PageReservation) -> Sequence[Outcome]:
        """Register the filled pages; see :meth:`Pages.commit`."""
        return self._home.wait(self._opened().commit, reservation)

    def reserve_read(self, keys: Sequence[Key]) -> PageLease:
        """Hold the longest prefix of these keys; see :meth:`Pages.reserve_read`."""
        return self._home.wait(self._opened().reserve_read, keys)

    def load(
        self, lease: PageLease, destination: Destination, *, precondition: PreconditionLike | None = None
    ) -> Sequence[Outcome]:
        """Copy the held blocks, and verify them; see :meth:`Pages.load`."""
        return self._home.wait(partial(self._opened().load, lease, destination, precondition=precondition))

    def release(self, reserved: PageReservation | PageLease) -> None:
        """Release a reservation or lease; see :meth:`Pages.release`."""
        self._home.wait(self._opened().release, reserved)

    def _opened(self) -> Pages:
        if self._pages is None:
            raise DaemonUnavailable(self._url, "these pages are not open")
        return self._pages
