"""The shared indexes of a server and the boards of its clients.

An index is made when a client asks for one, filled next to all other work, and made larger in time; a board is made for
each session that asks.

`maru._index` decides which keys they show and when; here are the files, the tasks and the permissions for descriptors.

Rule 1. An index is filled piece by piece, between two steps: a reply waits for a few names at most.
Rule 2. Every added key is in the journal: a piece is taken from the directory only while no record waits to be written.
Rule 3. Without an index everything works, by messages. An error with a file costs only the index, and a line in the
        log.
Rule 4. An index goes with the last session of its tenant, and all go when the journal finds the disk full. A new one
        leaves the journal its room.
Rule 5. A file is made for the keys of its tenant, whatever others have. All files together have a bound. Tenants are
        named by clients: if there is no room, indexes of tenants without a key go.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import threading
from collections.abc import Callable
from typing import Final

import attrs
import trio

from .._directory import Directory
from .._index import Boards, IndexStatistics, TenantIndexes, bytes_for, tenant_of
from .._pool.index_files import make_board, make_index_file, open_index_file, remove_index_file, why_not_here
from ..base.errors import CannotMap
from ..base.threads import run_in_thread
from .committer import Committer

LEAST_KEYS: Final = 1 << 14
"""Keys of the smallest index, of 1.5 MiB."""
GROWTH: Final = 4
MOST_TENANTS: Final = 64
"""Most tenants whose readers share an index; all others ask by message."""
_LOOK: Final = 5.0
"""Seconds between two looks for tenants without a session."""
_PIECE: Final = 128
"""Names added at once: a quarter of a millisecond."""
_COUNTED: Final = 4_096
"""Names whose tenant is examined at once: half a millisecond."""

_log = logging.getLogger("maru.server")


_lock = threading.Lock()


def _fence() -> None:
    """Run a full fence: taking any lock is one on x86."""
    with _lock:
        pass


@attrs.define
class _File:
    number: int
    keys: int
    """Number of keys for which it is made."""


@attrs.frozen
class IndexesStatistics:
    """A snapshot of the indexes of a server."""

    handed_out: int
    """Number of descriptors handed out."""
    grown: int
    """Files that were replaced by a larger one."""
    boards: int
    """Number of boards, with which clients hold keys without a message."""
    tenants: dict[str, IndexStatistics]


class Indexes:
    """The indexes of one server.

    Args:
        directory: recovered.
        home: the directory of the files that outlive the server; indexes left there are retired.
        epoch: of the server.
        most_keys: most keys that a file is made for.
        is_on: whether there are to be any.
        keep_free: bytes that a new file leaves in its file system.
        opener_of: returns the connection over which a session was opened; ``None``: the session counts by itself.
    """

    def __init__(
        self,
        directory: Directory,
        home: str,
        epoch: int,
        *,
        most_keys: int,
        is_on: bool,
        keep_free: Callable[[], int] = lambda: 0,
        opener_of: Callable[[int], object] = lambda session: None,
    ) -> None:
        self.why_not = why_not_here() if is_on else "index = off"
        """Reason why there are none; empty if there may be."""
        self._directory = directory
        self._home = home
        self._epoch = epoch
        self._most_keys = max(LEAST_KEYS, most_keys)
        # A file has up to GROWTH times the slots that are in use: less is left for the last to grow if all keys are
        # indexed.
        self._most_bytes = max(2 * bytes_for(self._most_keys), MOST_TENANTS * bytes_for(LEAST_KEYS))
        self._indexes = TenantIndexes()
        self._boards = Boards(self._indexes, _fence)
        self._keep_free = keep_free
        self._opener_of = opener_of
        self._files: dict[str, _File] = {}
        self._unneeded: list[int] = []
        """Numbers of files to be removed."""
        self._is_short = False
        """Whether the last file could not be made."""
        self._emptied_at = -math.inf
        self._numbers = 0
        self._handed_out = self._grown = 0
        self._making = trio.Lock()
        self._due = trio.Event()

    def publish(self) -> None:
        """Show the registered keys in the indexes; the journal has them.

        Call it before the replies leave.
        """
        try:
            is_news = self._indexes.publish()
        except MemoryError:  # an index that lacks a name would report that the key is missing
            self._drop_all("no memory is left for the stored keys")
            return
        if is_news and any(map(self._is_too_small, self._files)):
            self._due.set()

    def statistics(self) -> IndexesStatistics:
        """Return an immutable snapshot."""
        return IndexesStatistics(self._handed_out, self._grown, len(self._boards), self._indexes.statistics())

    def facts(self) -> dict[str, bool | int | float | str | None]:
        """Return facts for a description of the server."""
        each = self._indexes.statistics().values()
        return {
            "used": not self.why_not,
            "why not": self.why_not,
            "tenants": len(self._indexes),
            "handed out": self._handed_out,
            "grown": self._grown,
            "boards": len(self._boards),
            "held": len(self._boards.held()),
            "keys": sum(one.keys for one in each),
            "slots": sum(one.slots for one in each),
            "left out": sum(one.left_out for one in each),
        }

    def close(self) -> None:
        """Release all memory, with its descriptors.

        A garbage collection would not: a server's objects are frozen when it starts.
        """
        self._boards.close_all()
        self._indexes.close()

    async def open_fd(self, session: bytes, write: bool) -> int:
        """Open a descriptor: of the tenant's index, or of a new board.

        The caller has the session. The index is opened to read, the session's own board to write.

        Raises:
            CannotMap: there is none.
        """
        if write:
            await trio.lowlevel.checkpoint()
            return self._open_board(session)
        tenant = self._directory.tenant_of(session)
        if tenant is None or self.why_not:
            await trio.lowlevel.checkpoint()
            raise CannotMap(self.why_not or "there is no such session")
        try:
            async with self._making:
                try:
                    fd = await self._open(tenant)
                except FileNotFoundError:  # removed under this server: its readers look for the next one
                    if tenant in self._files:
                        self._drop(tenant)
                    fd = await self._open(tenant)
        except (OSError, MemoryError) as exc:
            raise CannotMap(f"no index can be made: {str(exc) or 'no memory is left'}") from exc
        self._handed_out += 1
        return fd

    def give_way(self) -> None:
        """Drop all indexes, since the journal has no room.

        Clients look up by message until there is room again.
        """
        self._drop_all(f"the disk of {self._home} is full")

    async def run(self, committer: Committer) -> None:
        """Fill new indexes, enlarge small ones, and remove unused ones, until cancelled."""
        while True:
            with trio.move_on_after(_LOOK):
                await self._due.wait()
            self._due = trio.Event()
            try:
                async with self._making:
                    await self._drop_unused()
            except MemoryError:  # tried again at the next look
                continue
            for tenant in list(self._files):
                try:
                    await self._fill(tenant, committer)
                    await self._grow(tenant, committer)
                except MemoryError:  # the index lacks names, and would never be filled
                    _log.warning("the index of tenant %r is dropped, since no memory is left for its names", tenant)
                    if tenant in self._files:
                        self._drop(tenant)

    # --- below ----------------------------------------------------------------------------------------------------

    def _open_board(self, session: bytes) -> int:
        """Open a new board for a session.

        A session asks before it holds anything: an earlier board of its own was never used.
        """
        holder, tenant = self._directory.session_of(session), self._directory.tenant_of(session)
        if holder is None or tenant is None or self.why_not:
            raise CannotMap(self.why_not or "there is no such session")
        opener = self._opener_of(holder)
        reason = self._boards.why_not(holder, opener)
        if reason:
            raise CannotMap(reason)
        try:
            fd, memory = make_board()
        except (OSError, MemoryError) as exc:
            reason = f"no board can be made: {str(exc) or 'no memory is left'}"
            _log.warning("%s", reason)
            raise CannotMap(reason) from exc
        self._boards.open(holder, tenant, memory, opener)
        self._directory.heed(self._boards)
        return fd

    async def _open(self, tenant: str) -> int:
        """Open this tenant's file, and make it if there is none.

        Call it from one task at a time.

        Raises:
            CannotMap: there is none, and none is to be made now.
            OSError: it cannot be made or opened.
        """
        if tenant not in self._files:
            if not self._has_room():
                await self._drop_unused()
                self._drop_empty()
            if len(self._files) >= MOST_TENANTS:
                raise CannotMap(f"{MOST_TENANTS} tenants already have an index")
            await self._make(tenant, max(LEAST_KEYS, 2 * await self._count_keys(tenant)))
        if tenant not in self._files:  # it gave way while it was made
            raise CannotMap("the disk of the pool is full")
        return await run_in_thread(open_index_file, self._home, self._files[tenant].number)

    def _is_too_small(self, tenant: str) -> bool:
        return tenant in self._files and self._indexes.is_crowded(tenant) and self._files[tenant].keys < self._most_keys

    def _drop(self, tenant: str) -> None:
        self._unneeded.append(self._files.pop(tenant).number)
        self._indexes.drop(tenant)
        self._due.set()

    def _drop_all(self, reason: str) -> None:
        if self._files:
            _log.warning("%d indexes are dropped, since %s", len(self._files), reason)
        for tenant in list(self._files):
            self._drop(tenant)

    def _has_room(self) -> bool:
        """Return whether one tenant more may have an index."""
        return len(self._files) < MOST_TENANTS and self._bytes() + bytes_for(LEAST_KEYS) <= self._most_bytes

    def _bytes(self, *, but: str | None = None) -> int:
        """Return the bytes of all files but this tenant's."""
        return sum(bytes_for(file.keys) for tenant, file in self._files.items() if tenant != but)

    def _drop_empty(self) -> None:
        """Drop the indexes of tenants without a key.

        Not again within seconds: each new one examines all keys.
        """
        now = trio.current_time()
        if now < self._emptied_at + _LOOK:
            return
        self._emptied_at = now
        for tenant in [tenant for tenant in self._files if self._indexes.is_empty(tenant)]:
            self._drop(tenant)

    async def _drop_unused(self) -> None:
        """Drop indexes of tenants without a session; remove all dropped files."""
        if self._files:
            for tenant in self._files.keys() - self._directory.tenants():
                self._drop(tenant)
        while self._unneeded:
            number = self._unneeded.pop()
            try:
                await run_in_thread(remove_index_file, self._home, number)
            except OSError:  # no thread: tried again at the next look
                self._unneeded.append(number)
                return

    async def _make(self, tenant: str, keys: int) -> None:
        """Make a new, empty file for this tenant, and retire its predecessor.

        Raises:
            OSError: there is no room for it, or no thread to make it.
        """
        keys = min(keys, self._most_keys)
        self._numbers += 1
        number = self._numbers
        try:
            if self._bytes(but=tenant) + bytes_for(keys) > self._most_bytes:
                raise OSError(errno.ENOSPC, f"all indexes together have at most {self._most_bytes} bytes")
            memory = await run_in_thread(make_index_file, self._home, number, bytes_for(keys), self._keep_free())
        except OSError as exc:
            if not self._is_short:
                self._is_short = True
                _log.warning("no index can be made in %s, so its clients look up by message: %s", self._home, exc)
            raise
        if self._is_short:
            self._is_short = False
            _log.warning("indexes can be made in %s again", self._home)
        before = self._files.get(tenant)
        self._directory.watch_locations(self._indexes)  # from the first one on; earlier keys are filled in
        try:
            self._directory.note_uses()  # uses are noted in words of the old file, which are of no use in the new
            self._indexes.open(tenant, memory, self._epoch, secrets.randbits(64))
        except MemoryError:
            self._unneeded.append(number)
            raise OSError(errno.ENOMEM, "no memory for the names of an index") from None
        self._files[tenant] = _File(number, keys)
        if before is not None:
            self._unneeded.append(before.number)
        self._due.set()

    async def _fill(self, tenant: str, committer: Committer) -> None:
        if tenant not in self._files or not self._indexes.is_filling(tenant):
            return
        number = self._files[tenant].number
        for names in self._directory.keys_in_pieces(_PIECE):
            while not committer.writable:
                await committer.wait_writable()
            if not self._is_of(
                tenant, number
            ):  # it gave way; there may be another one, which is filled from the beginning
                return
            self._indexes.fill(tenant, self._directory.locate(names))
            await trio.lowlevel.checkpoint()
        if self._is_of(tenant, number):
            self._indexes.end_filling(tenant)

    async def _count_keys(self, tenant: str) -> int:
        """Return the number of keys that this tenant has.

        Other tasks have their turn meanwhile.
        """
        count = 0
        for names in self._directory.keys_in_pieces(_COUNTED):
            count += sum([tenant_of(name) == tenant for name in names])
            await trio.lowlevel.checkpoint()
        return count

    def _is_of(self, tenant: str, number: int) -> bool:
        file = self._files.get(tenant)
        return file is not None and file.number == number

    async def _grow(self, tenant: str, committer: Committer) -> None:
        """Replace a tenant's index by larger ones until it is large enough."""
        while self._is_too_small(tenant):
            try:
                async with self._making:
                    if tenant not in self._files:
                        return
                    await self._make(tenant, GROWTH * self._files[tenant].keys)
            except OSError:
                await trio.sleep(1.0)  # a full disk does not empty itself at once
                return
            self._grown += 1
            await self._fill(tenant, committer)
