"""The committer: holds replies until their records are written.

The configuration decides how durably:

    never     the records of a step are written with one write(2); then its replies leave
    second    the same; and the journal is flushed to the disk once a second
    each      replies wait for a flush, shared by all requests that came in during the flush before

Rule 1. Replies leave in the order in which they were given, and none before the records of all steps up to its own.
Rule 2. Records that cannot be written are kept, with their replies, and tried again: none is dropped, none overtakes.
Rule 3. A journal that accepts no more records ends :meth:`Committer.run` with its error. Kept replies are never sent.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import trio

from .._config import JournalSync
from .._journal.journal import Journal
from ..base.errors import JournalFailed

Answer: TypeAlias = tuple[bytes, bytes]
"""The connection, and the frame."""

_RETRY: Final = 0.25
"""Seconds until a failed write is tried again.

A full disk does not empty itself at once.
"""
_SECOND: Final = 1.0

_log = logging.getLogger("maru.server")


class Committer:
    """Holds replies until the journal has their records.

    Args:
        journal: ``None``: no records are written.
        sync: when it is flushed.
        send: takes replies that may leave.
        publish: called when all records are written, before the replies to them leave.
        make_room: called when the disk is found full, before the journal is tried again.
    """

    def __init__(
        self,
        journal: Journal | None,
        sync: JournalSync,
        send: Callable[[Sequence[Answer]], None],
        publish: Callable[[], None] = lambda: None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = journal
        self._sync = "never" if journal is None else sync
        self._send = send
        self._publish = publish
        self._make_room = make_room
        self._unwritten: list[bytes] = []
        self._kept: list[Answer] = []
        """Replies held until ``_unwritten`` is written."""
        self._unsynced: list[Answer] = []
        """Replies held until the journal is on the disk."""
        self._broken: JournalFailed | None = None
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def trouble(self) -> str:
        """Reason why replies are held back; empty if they are not."""
        return "" if self._broken is None else str(self._broken)

    @property
    def writable(self) -> bool:
        """Whether all records are written. If not, accept no new requests."""
        return not self._unwritten

    @property
    def idle(self) -> bool:
        """Whether every reply has left."""
        return not self._kept and not self._unsynced and not self._unwritten

    def commit(self, records: list[bytes], answers: Sequence[Answer]) -> bool:
        """Take a step's records and replies; return whether the records are written."""
        if records or self._unwritten:
            self._unwritten += records
            if not self._write():
                self._kept += answers
                return False
            self._publish()
            if self._kept:
                answers, self._kept = [*self._kept, *answers], []
            if self._sync == "each":
                self._unsynced += answers
                self._changed.unpark_all()
                return True
        if self._unsynced:  # no reply may report a change that might still be lost, or overtake one that waits
            self._unsynced += answers
        elif answers:
            self._send(answers)
        return True

    async def wait_writable(self) -> None:
        """Wait until all records are written."""
        while self._unwritten:
            await self._changed.park()
        await trio.lowlevel.checkpoint()

    async def wait_idle(self) -> None:
        """Wait until every reply has left."""
        while not self.idle:
            await self._changed.park()
        await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Write failed records again, and flush, until cancelled.

        Raises:
            JournalFailed: the journal accepts no more records.
        """
        assert self._journal is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._retry)
            if self._sync == "each":
                nursery.start_soon(self._flush_for_each)
            elif self._sync == "second":
                nursery.start_soon(self._flush_now_and_then)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _write(self) -> bool:
        """Append the unwritten records to the journal; return whether it took them."""
        if self._journal is not None:
            before, self._broken = self._broken, None
            try:
                self._journal.append(self._unwritten)
            except JournalFailed as exc:
                self._broken = exc
                if before is None:
                    _log.error("replies are withheld: %s", exc)
                    if getattr(exc.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                        self._make_room()
                    self._changed.unpark_all()
                return False
            if before is not None:
                _log.warning("the journal can be written again")
                self._changed.unpark_all()
        self._unwritten = []
        return True

    async def _retry(self) -> None:
        while True:
            while self._broken is None:
                await self._changed.park()
            if self._broken.lasting:
                raise self._broken
            await trio.sleep(_RETRY)
            self.commit([], [])

    async def _flush_for_each(self) -> None:
        assert self._journal is not None
        while True:
            while not self._unsynced or self._unwritten:
                await self._changed.park()
            answers = len(self._unsynced)
            await self._journal.sync()
            ready, self._unsynced = self._unsynced[:answers], self._unsynced[answers:]
            self._send(ready)
            self._changed.unpark_all()

    async def _flush_now_and_then(self) -> None:
        assert self._journal is not None
        while True:
            await trio.sleep(_SECOND)
            await self._journal.sync()
