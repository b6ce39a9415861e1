"""Pages that the caller fills, and then commits or aborts.

Rule 1. No key is found before all of its bytes are in its page: by the commit the caller guarantees that they are, and
        it is the first message to the server.
Rule 2. A reservation that ends uncommitted is aborted: by leaving the block, by a cancellation, by dropping the
        reservation, by the end of the MaruL1. An aborted page is free again when nobody can write it any more, not
        before: an abandoned copy holds its view, or its tensor, and with it the page.
Rule 3. A commit is over when its outcome is known. From its message on it is shielded, and bounded; an outcome that is
        unknown then is ``Unproven``, and its pages wait in doubt until the server has reported it.
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
    """Return whether a key with this outcome can be found."""
    return isinstance(outcome, Stored | Duplicate)


class _State(enum.Enum):
    OPEN = enum.auto()
    COMMITTING = enum.auto()
    OVER = enum.auto()


class WriteReservation:
    """Pages to be filled, one for each of some keys.

    Open it by ``async with await l1.reserve_write(keys) as reservation``.

    :meth:`MaruL1.reserve_write` makes it. Used on the trio thread; its pages may be filled in any thread.
    """

    __slots__ = ("__weakref__", "_handles", "_l1", "_state", "_sums", "_views", "keys", "outcomes", "refused")

    def __init__(
        self, l1: MaruL1, keys: Sequence[Key], handles: Sequence[AllocHandle], refused: Sequence[Key] = ()
    ) -> None:
        """Use :meth:`MaruL1.reserve_write` instead."""
        self._l1 = l1
        self._state = _State.OPEN
        self._handles = list(handles)
        self._views = [handle.buf for handle in handles]
        self._sums: list[int] | None = None
        self.keys: Sequence[Key] = tuple(keys)
        """Keys that have a page: the first of those requested."""
        self.refused: Sequence[Key] = tuple(refused)
        """The other keys: no page is free, and none could be freed."""
        self.outcomes: Sequence[Outcome] | None = None
        """The outcomes that :meth:`commit` has returned."""

    def __repr__(self) -> str:
        return f"<reservation of {len(self.keys)} pages in {self._l1!r}, {self._state.name.lower()}>"

    @property
    def is_open(self) -> bool:
        """Whether it is neither committed, nor being committed, nor aborted."""
        return self._state is _State.OPEN

    @property
    def pages(self) -> Sequence[memoryview]:
        """A writable page for each key, of exactly one block.

        Unusable once this is committed or aborted.

        Raises:
            ReservationOver: it was committed or aborted.
        """
        self._check()
        return tuple(self._views)

    def tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of each key in its page, to be written.

        They are in the order of the layout. Drop them before :meth:`commit`.

        Raises:
            ReservationOver: it was committed or aborted.
            ImportError: the torch extra is not installed.
        """
        self._check()
        return tensors_over(self._views, self._l1._known_layout())

    def fill(self, blocks: Pages) -> None:
        """Copy blocks into the pages, one for each, and sum them.

        :meth:`commit` then need not read them again.

        In any thread. The pages may not be written any more, since the sums would be wrong.

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
        """Split off a reservation for some of the keys.

        This one then lacks them. Return this one if it is for all of them.

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
        """Register the filled pages by one message.

        They may not be written any more.

        Cancelled before that message is sent, it has no effect, and the reservation stays open. From then on it is
        shielded: it returns its outcomes, and the next checkpoint is cancelled.

        Returns:
            For each key ``STORED``; ``DUPLICATE``: another client was first, and the page is free; ``Rejected`` or
            ``Failed``: it is not stored, and the page is free.

        Raises:
            ReservationOver: it was committed or aborted, or is being committed.
            Unproven: the outcome is unknown: no answer came, nor one to the question about the attempt. A block may be
                stored, or may be later; its pages are in doubt, and are used again once that is known.
            maru.ServerLost: the session has ended, and with it the pages. Nothing is stored.
            maru.NoAnswer: the server was silent before a message was sent. Nothing is stored, and the pages are free.
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
        """Commit, and pin the stored prefix of the keys.

        The seed document calls it ``finish_write_and_reserve_read``. Cancelled between the two, the keys are stored and
        nothing is held. :attr:`outcomes` has the outcome of each.

        Raises:
            ReservationOver: see :meth:`commit`, which raises all else, too.
        """
        outcomes = await self.commit()
        there = list(takewhile(is_there, outcomes))
        return await self._l1.reserve_read(self.keys[: len(there)])

    def abort(self) -> None:
        """Give the pages back. Idempotent; sends no message, never blocks.

        A page that can still be written is free after that.

        While it is being committed, this does nothing.
        """
        if self._state is _State.OPEN:
            self._state = _State.OVER
            self._end()  # a page is free with the last reference to its handle
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
        """Release the views as far as possible, and return the handles.

        A view that is in use stays, and holds its page.
        """
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        handles, self._handles, self._views = self._handles, [], []
        self._l1._closed_write(self)
        return handles
