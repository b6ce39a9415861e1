"""The shared indexes of a server and the boards of its clients.

An index is made when somebody asks for one, filled beside everything else, and made larger in time; a board is made for each
session that asks.

What they show and when is decided in `maru._index`; here are the files, the tasks and who may have a descriptor.

Rule 1. An index is filled piece by piece, between two steps: nobody waits longer for an answer than for a few names.
Rule 2. What is added is in the journal: a piece is taken from the directory only while nothing waits to be written.
Rule 3. Without an index everything works, by messages. Whatever goes wrong with a file costs that, and a line in the log.
Rule 4. An index goes with the last session of its tenant, and all go when the journal finds the disk full. A new one leaves the
        journal its room.
Rule 5. A file is made for the keys of its tenant, whatever others have. All files together have a bound. Tenants are what
        clients say: if there is no room, indexes of tenants without a key go.
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
"""1.5 MiB."""
GROWTH: Final = 4
MOST_TENANTS: Final = 64
"""Whose readers share an index; all others ask by message."""
_LOOK: Final = 5.0
"""Seconds between two looks for tenants without a session."""
_PIECE: Final = 128
"""Names that are added at once: a quarter of a millisecond."""
_COUNTED: Final = 4_096
"""Names whose tenant is looked at, at once: half a millisecond."""

_log = logging.getLogger("maru.server")


_lock = threading.Lock()


def _fence() -> None:
    """A full fence, as each taking of a lock is on x86."""
    with _lock:
        pass


@attrs.define
class _File:
    number: int
    keys: int
    """For how many it is made."""


@attrs.frozen
class IndexesStatistics:
    """A snapshot of the indexes of a server."""

    handed_out: int
    """Descriptors."""
    grown: int
    """Files that were replaced by a larger one."""
    boards: int
    """By which clients hold without a message."""
    tenants: dict[str, IndexStatistics]


class Indexes:
    """The indexes of one server.

    Args:
        directory: recovered.
        home: the directory of what outlives the server; what was left there is retired.
        epoch: of the server.
        most_keys: that a file is made for.
        is_on: whether there are to be any.
        keep_free: bytes that a new file leaves in its file system.
        opener_of: over which connection a session was opened; ``None``: it is its own.
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
        """Why there are none; empty if there may be."""
        self._directory = directory
        self._home = home
        self._epoch = epoch
        self._most_keys = max(LEAST_KEYS, most_keys)
        # A file has up to GROWTH times the slots that are taken: less is left for the last to grow if all keys are indexed.
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
        """The journal has all that was registered: let it be found. To be called before the answers leave."""
        try:
            is_news = self._indexes.publish()
        except MemoryError:  # an index that lacks a name would say that it is not there
            self._drop_all("no memory is left for what was stored")
            return
        if is_news and any(map(self._is_too_small, self._files)):
            self._due.set()

    def statistics(self) -> IndexesStatistics:
        """An immutable snapshot."""
        return IndexesStatistics(self._handed_out, self._grown, len(self._boards), self._indexes.statistics())

    def facts(self) -> dict[str, bool | int | float | str | None]:
        """What a description of the server says."""
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
        """Let go of all memory, and of its descriptors. A collection would not: what a server has is frozen when it starts."""
        self._boards.close_all()
        self._indexes.close()

    async def open_fd(self, session: bytes, write: bool) -> int:
        """A descriptor for whoever has this session: of its tenant's index, to read, or of its own board, to write.

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
                except FileNotFoundError:  # it was removed under this server: its readers look for the next one
                    if tenant in self._files:
                        self._drop(tenant)
                    fd = await self._open(tenant)
        except (OSError, MemoryError) as exc:
            raise CannotMap(f"no index can be made: {str(exc) or 'no memory is left'}") from exc
        self._handed_out += 1
        return fd

    def give_way(self) -> None:
        """Drop all indexes: the journal has no room. Clients look up by message until there is room again."""
        self._drop_all(f"the disk of {self._home} is full")

    async def run(self, committer: Committer) -> None:
        """Fill what was made, make what is too small larger, and remove what nobody needs, until cancelled."""
        while True:
            with trio.move_on_after(_LOOK):
                await self._due.wait()
            self._due = trio.Event()
            try:
                async with self._making:
                    await self._drop_unused()
            except MemoryError:  # at the next look
                continue
            for tenant in list(self._files):
                try:
                    await self._fill(tenant, committer)
                    await self._grow(tenant, committer)
                except MemoryError:  # it lacks names, and would never be filled
                    _log.warning("the index of tenant %r is dropped, since no memory is left for its names", tenant)
                    if tenant in self._files:
                        self._drop(tenant)

    # --- below ----------------------------------------------------------------------------------------------------

    def _open_board(self, session: bytes) -> int:
        """A new one. A session asks before it holds anything: one that it had before was never used."""
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
        """Open this tenant's file, made if there is none. To be called by one at a time.

        Raises:
            CannotMap: there is none, and is not to be one now.
            OSError: it cannot be made or opened.
        """
        if tenant not in self._files:
            if not self._has_room():
                await self._drop_unused()
                self._drop_empty()
            if len(self._files) >= MOST_TENANTS:
                raise CannotMap(f"{MOST_TENANTS} tenants have an index already")
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
        """Whether one tenant more may have an index."""
        return len(self._files) < MOST_TENANTS and self._bytes() + bytes_for(LEAST_KEYS) <= self._most_bytes

    def _bytes(self, *, but: str | None = None) -> int:
        """Return the bytes of all files but this tenant's."""
        return sum(bytes_for(file.keys) for tenant, file in self._files.items() if tenant != but)

    def _drop_empty(self) -> None:
        """Drop the indexes of tenants without a key. Not again at once: each new one looks at all keys."""
        now = trio.current_time()
        if now < self._emptied_at + _LOOK:
            return
        self._emptied_at = now
        for tenant in [tenant for tenant in self._files if self._indexes.is_empty(tenant)]:
            self._drop(tenant)

    async def _drop_unused(self) -> None:
        """Drop the indexes of tenants without a session, and remove the files of all that were dropped."""
        if self._files:
            for tenant in self._files.keys() - self._directory.tenants():
                self._drop(tenant)
        while self._unneeded:
            number = self._unneeded.pop()
            try:
                await run_in_thread(remove_index_file, self._home, number)
            except OSError:  # no thread: at the next look
                self._unneeded.append(number)
                return

    async def _make(self, tenant: str, keys: int) -> None:
        """Make a new file for this tenant, empty; the one before is retired.

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
        self._directory.watch_locations(self._indexes)  # from the first one on; what came earlier is filled in
        try:
            self._directory.note_uses()  # they are told by words of the file before, which say nothing of another one
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
        """Return the number of keys that this tenant has. Others have their turn meanwhile."""
        count = 0
        for names in self._directory.keys_in_pieces(_COUNTED):
            count += sum([tenant_of(name) == tenant for name in names])
            await trio.lowlevel.checkpoint()
        return count

    def _is_of(self, tenant: str, number: int) -> bool:
        file = self._files.get(tenant)
        return file is not None and file.number == number

    async def _grow(self, tenant: str, committer: Committer) -> None:
        """Replace it by larger ones until it is large enough."""
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
