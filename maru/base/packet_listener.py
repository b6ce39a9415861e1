"""Acceptance of SOCK_SEQPACKET connections from this user's processes.

Used by every server of this project that has a Unix socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from .budget import Door
from .errors import PoolInUse
from .listeners import peer_uid
from .own_directory import is_socket_at
from .packets import listen
from .spare_descriptor import SPARE

_PAUSE: Final = 0.1
"""Seconds between attempts to accept without a free descriptor.

Without a pause the loop would spin, since the listener stays readable.
"""

_log = logging.getLogger(__name__)


async def serve_briefly(
    listener: PacketListener,
    door: Door,
    serve: Callable[[trio.socket.SocketType], Awaitable[object]],
    turn_away: Callable[[], object],
) -> None:
    """Serve short connections until cancelled, each in a task.

    A good client's connection is over in milliseconds, so the oldest is ended before a newcomer is refused: idle peers
    keep no one out.

    Args:
        listener: closed by the caller.
        door: the connections' share of the descriptors of this process.
        serve: serves a connection, which is closed afterwards. Must not raise.
        turn_away: called for each connection that was closed at once, or ended for a newer one.
    """
    scopes: dict[trio.CancelScope, None] = {}

    def end(scope: trio.CancelScope) -> None:
        del scopes[scope]
        door.give_back()

    async def run(sock: socket.socket, scope: trio.CancelScope) -> None:
        try:
            with trio.socket.from_stdlib_socket(sock) as peer, scope:
                await serve(peer)
        finally:
            if scope in scopes:
                end(scope)

    async with trio.open_nursery() as nursery:

        def take(sock: socket.socket) -> bool:
            while not door.take():
                if not scopes:
                    return False
                oldest = next(iter(scopes))
                end(oldest)
                oldest.cancel()
                turn_away()
            scope = trio.CancelScope()
            scopes[scope] = None
            nursery.start_soon(run, sock, scope)
            return True

        await listener.run(take, turn_away)


class PacketListener:
    """A listening socket (mode 0600) in a private directory (mode 0700).

    A socket left there by a dead server is replaced.

    Raises:
        PoolUnusable: the directory is open to others, or no socket can be made there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._listening = listen(path)
        self._inode = os.stat(path).st_ino
        SPARE.keep()
        self._is_short = False
        self._accepting: trio.socket.SocketType | None = None

    async def run(self, take: Callable[[socket.socket], bool], turn_away: Callable[[], object]) -> None:
        """Accept connections until cancelled.

        Args:
            take: receives each connection of this user's processes, and owns it if it returns True. An ``OSError``
                means that it refuses the connection.
            turn_away: called for each connection that was closed at once: another user's, refused, or without a
                descriptor.
        """
        while True:
            listening = self._accepting = trio.socket.from_stdlib_socket(self._listening)
            try:
                peer, _ = await listening.accept()
            except (OSError, trio.ClosedResourceError) as exc:
                if self._accepting is not listening or self._listening.fileno() != listening.fileno():
                    continue  # `renew` replaced it
                if not isinstance(exc, OSError) or exc.errno == errno.EBADF:  # `close` closed it
                    raise
                self._note_shortage(exc)
                if self._hang_up_on_one():
                    turn_away()
                await trio.sleep(_PAUSE)
                continue
            # The kernel recorded the peer's user when it connected: nothing that the peer does afterwards changes it.
            accepted = socket.socket(fileno=peer.detach())
            try:
                taken = peer_uid(accepted) == os.geteuid() and take(accepted)
                if taken and self._is_short:
                    self._is_short = False
                    _log.warning("%s: clients are accepted again", self.path)
            except OSError as exc:
                taken = False
                self._note_shortage(exc)
            if not taken:
                turn_away()
                accepted.close()

    def renew(self) -> list[str]:
        """Listen again if the socket was removed. Returns its path then.

        The caller holds the lock of the directory.

        Raises:
            PoolInUse: another server has put its socket there.
            PoolUnusable: no socket can be made there.
        """
        is_there = is_socket_at(self.path, self._inode)
        if is_there:
            return []
        if is_there is not None:
            raise PoolInUse(f"{self.path!r} now belongs to another server")
        listening = listen(self.path)
        self._inode = os.stat(self.path).st_ino
        before, self._listening = self._listening, listening
        if self._accepting is not None:
            self._accepting.close()  # its task goes on with the new one
        before.close()
        return [self.path]

    def _note_shortage(self, exc: OSError) -> None:
        """Log a refusal, if the previous connection was accepted."""
        if not self._is_short:
            self._is_short = True
            _log.warning("%s: clients are refused until descriptors are free: %s; raise `ulimit -n`", self.path, exc)

    def _hang_up_on_one(self) -> bool:
        """Accept one client with the spare descriptor, and hang up.

        The client gets an error at once, instead of a time-out.
        """
        with SPARE.given_up():
            try:
                self._listening.accept()[0].close()
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close the socket and remove its file. Idempotent.

        A file that a successor has put there stays.
        """
        self._listening.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
