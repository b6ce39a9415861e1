"""The committer: an answer leaves once what it says is written down, as durably as was asked for.

    never     the records of a step are written with one write(2); then its answers leave
    second    the same; and the journal is flushed to the disk once a second
    each      answers wait for a flush, which all that came in during the one before share

Rule 1. Answers leave in the order in which they were given, and none before the records of all steps up to its own.
Rule 2. Where records cannot be written they are kept, with the answers, and tried again: none is given up, none overtakes.
Rule 3. A journal that will take nothing any more ends :meth:`Committer.run` with its error. What is kept is never answered.
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
"""To which connection, and the frame."""

_RETRY: Final = 0.25
"""A full disk does not empty itself at once."""
_SECOND: Final = 1.0

_log = logging.getLogger("maru.server")


class Committer:
    """The way of answers through the journal.

    Args:
        journal: ``None``: nothing is written down.
        sync: when it is flushed.
        send: takes answers that may leave.
        publish: called when all that happened is written, before what says so leaves.
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
        """Until ``_unwritten`` is written."""
        self._unsynced: list[Answer] = []
        """Until the journal is on the disk."""
        self._broken: JournalFailed | None = None
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def trouble(self) -> str:
        """Reason why answers are kept back; empty if they are not."""
        return "" if self._broken is None else str(self._broken)

    @property
    def writable(self) -> bool:
        """Whether all that was to be written is. If not, nothing new should be taken on."""
        return not self._unwritten

    @property
    def idle(self) -> bool:
        """Whether every answer has left."""
        return not self._kept and not self._unsynced and not self._unwritten

    def commit(self, records: list[bytes], answers: Sequence[Answer]) -> bool:
        """Take one step's records and answers; whether its records are written."""
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
        if self._unsynced:  # nobody is told of what might still be lost, nor overtakes who waits
            self._unsynced += answers
        elif answers:
            self._send(answers)
        return True

    async def wait_writable(self) -> None:
        """Wait until all that was to be written is."""
        while self._unwritten:
            await self._changed.park()
        await trio.lowlevel.checkpoint()

    async def wait_idle(self) -> None:
        """Wait until every answer has left."""
        while not self.idle:
            await self._changed.park()
        await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Try again what could not be written, and flush, until cancelled.

        Raises:
            JournalFailed: it will take nothing any more.
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
        """Have the journal take what is unwritten; whether it did."""
        if self._journal is not None:
            before, self._broken = self._broken, None
            try:
                self._journal.append(self._unwritten)
            except JournalFailed as exc:
                self._broken = exc
                if before is None:
                    _log.error("answers are kept back: %s", exc)
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
