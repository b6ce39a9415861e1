"""Pages that the caller fills by himself, and then commits or aborts.

Rule 1. Nobody finds a key before all of its bytes are in its page: commit is the caller's word that they are, and the first
        thing that the server hears of it.
Rule 2. What ends uncommitted is aborted: by leaving the block, by a cancellation, by forgetting the reservation, by the end of
        the MaruL1. An aborted page is free again when nobody can write it any more, not before: a copy that was abandoned
        holds its view, or its tensor, and with it the page.
Rule 3. A commit is over when its outcome is known. From when it is sent it is shielded, and bounded; what nobody knows then is
        ``Unproven``, and its pages wait in doubt until the server has said what became of them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Collection, Sequence
from itertools import takewhile
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from ...abc import Duplicate, Key, Outcome, Stored
from ...base.pages import Pages, copy_and_sum, copy_pages
from ._errors import ReservationOver
from ._tensors import tensors_over

if TYPE_CHECKING:
    import torch

    from maru import AllocHandle

    from ._maru_l1 import MaruL1
    from ._reading import ViewLease


def is_there(outcome: Outcome) -> bool:
    """Whether a key with this outcome can be found."""
    return isinstance(outcome, Stored | Duplicate)


class _State(enum.Enum):
    OPEN = enum.auto()
    COMMITTING = enum.auto()
    OVER = enum.auto()


class WriteReservation:
    """A page for each of some keys, to be filled: ``async with await l1.reserve_write(keys) as reservation``.

    Made by :meth:`MaruL1.reserve_write`. Used on the trio thread; its pages may be filled anywhere.
    """

    __slots__ = ("__weakref__", "_handles", "_l1", "_state", "_sums", "_views", "keys", "outcomes", "refused")

    def __init__(
        self, l1: MaruL1, keys: Sequence[Key], handles: Sequence[AllocHandle], refused: Sequence[Key] = ()
    ) -> None:
        """Not to be called: a MaruL1 makes them."""
        self._l1 = l1
        self._state = _State.OPEN
        self._handles = list(handles)
        self._views = [handle.buf for handle in handles]
        self._sums: list[int] | None = None
        self.keys: Sequence[Key] = tuple(keys)
        """What there is a page for: the first of those that were asked for."""
        self.refused: Sequence[Key] = tuple(refused)
        """The others: no page is free for them, and none could be made free."""
        self.outcomes: Sequence[Outcome] | None = None
        """What :meth:`commit` has returned."""

    def __repr__(self) -> str:
        return f"<reservation of {len(self.keys)} pages in {self._l1!r}, {self._state.name.lower()}>"

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor aborted, and is not being committed."""
        return self._state is _State.OPEN

    @property
    def pages(self) -> Sequence[memoryview]:
        """A page for each key, writable, of exactly a block. Unusable once this is committed or aborted.

        Raises:
            ReservationOver: it was.
        """
        self._check()
        return tuple(self._views)

    def tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """For each key the tensors of the layout, in its page: to be written, and forgotten before :meth:`commit`.

        Raises:
            ReservationOver: it was committed or aborted.
            ImportError: the torch extra is not installed.
        """
        self._check()
        return tensors_over(self._views, self._l1._known_layout())

    def fill(self, blocks: Pages) -> None:
        """Copy blocks into the pages, one for each, and sum them on the way: :meth:`commit` need not read them again.

        In any thread. The pages may not be written any more, since the sums would not be theirs.

        Raises:
            ReservationOver: it was committed or aborted.
            ValueError: not one block for each page, or blocks of another size.
        """
        self._check()
        there = Pages([handle.address for handle in self._handles], self._l1._known_layout().block_bytes, self._handles)
        if (len(blocks), blocks.page_bytes) != (len(there), there.page_bytes):
            raise ValueError(f"{blocks!r} cannot be copied to {there!r}")
        if self._l1.config.checksums:
            self._sums = copy_and_sum(there, blocks)
        else:
            copy_pages(there, blocks)

    def take(self, keys: Collection[Key]) -> WriteReservation:
        """Split off a reservation for some of the keys, which this one then lacks. Itself, if it is all of them.

        Raises:
            ReservationOver: it was committed or aborted.
            ValueError: it has no page for one of them.
        """
        self._check()
        wanted = set(keys)
        if not wanted.issubset(self.keys):
            raise ValueError(f"{self!r} has no page for {len(wanted.difference(self.keys))} of these keys")
        if len(wanted) == len(self.keys):
            return self
        self._sums = None
        columns = list(zip(self.keys, self._handles, self._views, strict=True))
        part = WriteReservation(self._l1, [key for key in self.keys if key in wanted], ())
        part._handles, part._views = [], []
        self._handles, self._views = [], []
        for key, handle, view in columns:
            owner = part if key in wanted else self
            owner._handles.append(handle)
            owner._views.append(view)
        self.keys = tuple(key for key in self.keys if key not in wanted)
        self._l1._opened_write(part)
        return part

    # --- the end --------------------------------------------------------------------------------------------------

    async def commit(self) -> list[Outcome]:
        """Register the pages, which are filled: one message for all. They may not be written any more.

        Cancelled before that message is sent, nothing has happened, and the reservation is open still. From then on it is
        shielded: it returns what became of it, and the next checkpoint is cancelled.

        Returns:
            For each key ``STORED``; ``DUPLICATE``: somebody was first, and the page is free; ``Rejected`` or ``Failed``:
            it is not stored, and the page is free.

        Raises:
            ReservationOver: it was committed or aborted, or is being committed.
            Unproven: nobody knows: no answer came, nor one to the question what became of it. It may be stored, or may be
                yet; its pages are in doubt, and are used again once that is known.
            maru.ServerLost: the session has ended, and with it the pages. Nothing is stored.
            maru.NoAnswer: the server was silent before anything was sent. Nothing is stored, and the pages are free.
        """
        self._check()
        self._state = _State.COMMITTING
        try:
            sums = self._sums
            if sums is None:
                sums = await self._l1._sums([handle.address for handle in self._handles], self._handles)
            else:
                await trio.lowlevel.checkpoint()
        except BaseException:
            self._state = _State.OPEN
            raise
        self._state = _State.OVER
        handles = self._end()
        self.outcomes = await self._l1._register(self.keys, handles, sums)
        return list(self.outcomes)

    async def commit_and_read(self) -> ViewLease:
        """Commit, and pin what is stored up to the first key that is not, in one call.

        The document calls it ``finish_write_and_reserve_read``. Cancelled between the two, the keys are stored and nothing is
        held. :attr:`outcomes` says what became of each.

        Raises:
            ReservationOver: see :meth:`commit`, which raises all else, too.
        """
        outcomes = await self.commit()
        there = list(takewhile(is_there, outcomes))
        return await self._l1.reserve_read(self.keys[: len(there)])

    def abort(self) -> None:
        """Give the pages back. Idempotent; no message, never blocks. One that can still be written is free after that.

        Not while it is being committed: then it is decided.
        """
        if self._state is _State.OPEN:
            self._state = _State.OVER
            self._end()  # with the last reference to a handle its page is free
            self._l1._collect()

    async def __aenter__(self) -> WriteReservation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort, unless it was committed. No checkpoint."""
        self.abort()

    def _check(self) -> None:
        if self._state is not _State.OPEN:
            raise ReservationOver(f"{self!r}")

    def _end(self) -> list[AllocHandle]:
        """Take back what was given out, as far as that is possible: a view that is in use stays, and holds its page."""
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        handles, self._handles, self._views = self._handles, [], []
        self._l1._closed_write(self)
        return handles
