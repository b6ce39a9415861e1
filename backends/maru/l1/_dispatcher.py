"""The reservations and leases of a MaruL1, found by key.

It has the method names of the seed document, for callers that keep only keys between two calls. A :class:`MaruL1` does
all the work. This adds the *side channel*: the reservation and the lease that a key belongs to, from ``reserve_...`` to
``finish_...``.

Rule 1. A key is written by one reservation at a time; another caller gets no page for it meanwhile.
Rule 2. A key may be read by any number of leases; ``finish_read`` ends the youngest.
Rule 3. A reservation or lease that is never finished ends with the MaruL1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import takewhile

import trio

from ..._errors import MissingKeys
from ...abc import Deletion, Key, Outcome
from ...base.keys import check_keys
from ._layout import KVLayout
from ._maru_l1 import MaruL1
from ._reading import ViewLease
from ._status import L1Status
from ._writing import WriteReservation, is_there


class MaruL1Dispatcher:
    """A :class:`MaruL1` whose reservations and leases are found by key.

    Args:
        l1: the MaruL1; the caller enters and leaves it.
    """

    def __init__(self, l1: MaruL1) -> None:
        self.l1: MaruL1 = l1
        """The MaruL1 that does the work."""
        self._writing: dict[Key, WriteReservation] = {}
        self._reading: dict[Key, list[ViewLease]] = {}

    def __repr__(self) -> str:
        return f"<MaruL1Dispatcher of {self.l1!r}>"

    async def register_kv_layout(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[object] | object,
        *,
        fmt: object = "",
        chunk_size_in_tokens: int | None = None,
        full_chunk_size_bytes: int | None = None,
    ) -> KVLayout:
        """Set the layout of blocks, which opens the session; see :meth:`MaruL1.register_kv_layout`."""
        return await self.l1.register_kv_layout(
            shapes,
            dtypes,
            fmt=fmt,
            chunk_size_in_tokens=chunk_size_in_tokens,
            full_chunk_size_bytes=full_chunk_size_bytes,
        )

    # --- writing --------------------------------------------------------------------------------------------------

    async def reserve_write(self, keys: Sequence[Key]) -> dict[Key, memoryview]:
        """Take pages for these keys; see :meth:`MaruL1.reserve_write`.

        A key that is being written, or for which there is no room, gets none.
        """
        check_keys(keys)
        reservation = await self.l1.reserve_write([key for key in keys if key not in self._writing])
        # Another task may have reserved these keys while the server was asked.
        taken = [key for key in reservation.keys if key in self._writing]
        if taken:
            reservation.take(taken).abort()
        if not reservation.is_open:  # all of them
            return {}
        self._writing.update(dict.fromkeys(reservation.keys, reservation))
        return dict(zip(reservation.keys, reservation.pages, strict=True))

    async def finish_write(self, keys: Sequence[Key]) -> dict[Key, Outcome]:
        """Register the pages of these keys; see :meth:`WriteReservation.commit`.

        Other keys that were reserved with them stay reserved.

        Cancelled before a message was sent, this gives the pages back.

        Raises:
            MissingKeys: one of them is not being written; nothing was done.
            Unproven: see :meth:`WriteReservation.commit`.
        """
        outcomes: dict[Key, Outcome] = {}
        with ExitStack() as stack:
            parts = self._take(keys)
            for part in parts:
                stack.callback(part.abort)
            for part in parts:
                outcomes.update(zip(part.keys, await part.commit(), strict=True))
        return outcomes

    async def finish_write_and_reserve_read(self, keys: Sequence[Key]) -> dict[Key, memoryview]:
        """Publish, then pin, in one call; see :meth:`WriteReservation.commit_and_read`."""
        outcomes = await self.finish_write(keys)
        return await self.reserve_read(list(takewhile(lambda key: is_there(outcomes[key]), outcomes)))

    def abort_write(self, keys: Sequence[Key]) -> None:
        """Give back the pages of these keys; see :meth:`WriteReservation.abort`.

        For example after a copy that failed.

        Raises:
            MissingKeys: one of them is not being written; nothing was done.
        """
        for part in self._take(keys):
            part.abort()

    def _take(self, keys: Sequence[Key]) -> list[WriteReservation]:
        """Remove these keys from the table; return reservations of exactly these keys."""
        missing = [key for key in keys if key not in self._writing]
        if missing:
            raise MissingKeys(self, missing)
        by: dict[WriteReservation, list[Key]] = {}
        for key in dict.fromkeys(keys):
            by.setdefault(self._writing.pop(key), []).append(key)
        return [reservation.take(some) for reservation, some in by.items()]

    # --- reading --------------------------------------------------------------------------------------------------

    async def reserve_read(self, keys: Sequence[Key]) -> dict[Key, memoryview]:
        """Hold the present prefix of these keys; see :meth:`MaruL1.reserve_read`.

        Return a view of each block.
        """
        lease = await self.l1.reserve_read(keys)
        for key in lease.keys:
            self._reading.setdefault(key, []).append(lease)
        if not lease.keys:
            lease.release_nowait()
            return {}
        return dict(zip(lease.keys, lease.views, strict=True))

    def unsafe_read(self, keys: Sequence[Key]) -> dict[Key, memoryview]:
        """Return the views of these blocks; see :attr:`ViewLease.views`.

        Sends no message.

        Raises:
            MissingKeys: one of them is not reserved.
            maru.LeaseLost: one of them may have changed.
        """
        views: dict[Key, memoryview] = {}
        for lease, some in self._leases(keys).items():
            at = dict(zip(lease.keys, lease.views, strict=True))
            views.update((key, at[key]) for key in some)
        return views

    async def finish_read(self, keys: Sequence[Key]) -> None:
        """Release the blocks of these keys; see :meth:`ViewLease.keep`.

        They are released even when this is cancelled.

        Raises:
            MissingKeys: one of them is not reserved; nothing was done.
        """
        for lease, some in self._leases(keys).items():
            for key in some:
                self._reading[key].pop()
                if not self._reading[key]:
                    del self._reading[key]
            lease.keep([key for key in lease.keys if key not in some])
        await trio.lowlevel.checkpoint()

    # --- the rest -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> dict[Key, Deletion]:
        """Delete these keys; see :meth:`MaruL1.delete`. Return the result for each."""
        return dict(zip(keys, await self.l1.delete(keys), strict=True))

    async def clear(self) -> dict[Key, Deletion]:
        """Delete this instance's stored blocks that are not being read.

        See :meth:`MaruL1.clear`.
        """
        return await self.l1.clear()

    def get_memory_usage(self) -> tuple[int, int]:
        """Return used and total bytes; see :meth:`MaruL1.get_memory_usage`."""
        return self.l1.get_memory_usage()

    def report_status(self) -> L1Status:
        """Return an immutable snapshot; see :meth:`MaruL1.report_status`."""
        return self.l1.report_status()

    def _leases(self, keys: Sequence[Key]) -> dict[ViewLease, list[Key]]:
        missing = [key for key in keys if key not in self._reading]
        if missing:
            raise MissingKeys(self, missing)
        by: dict[ViewLease, list[Key]] = {}
        for key in dict.fromkeys(keys):
            by.setdefault(self._reading[key][-1], []).append(key)
        return by
