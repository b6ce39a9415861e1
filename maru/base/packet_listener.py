"""Accepting SOCK_SEQPACKET connections of this user's processes, for every server of this project that has a Unix socket."""

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
"""Seconds until a process without a free descriptor tries to accept again: the listener stays readable, and would spin."""

_log = logging.getLogger(__name__)


async def serve_briefly(
    listener: PacketListener,
    door: Door,
    serve: Callable[[trio.socket.SocketType], Awaitable[object]],
    turn_away: Callable[[], object],
) -> None:
    """Accept connections that last for moments, until cancelled, and serve each in a task.

    A good client's is over in milliseconds, so the oldest is ended before a newcomer is refused: silence keeps no one out.

    Args:
        listener: closed by the caller.
        door: their share of the descriptors of this process.
        serve: serves one, which is closed behind it. Must not raise.
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
    """Listens at a path (mode 0600), in a directory that only this user enters (mode 0700), until closed.

    A socket that a dead server left there is replaced.

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
            take: is handed each connection of a process of this user, which is its own from then on; whether it has taken it.
                An ``OSError`` of it means that it has not.
            turn_away: called for each connection that was closed at once: another user's, not taken, or without a descriptor.
        """
        while True:
            listening = self._accepting = trio.socket.from_stdlib_socket(self._listening)
            try:
                peer, _ = await listening.accept()
            except (OSError, trio.ClosedResourceError) as exc:
                if self._accepting is not listening or self._listening.fileno() != listening.fileno():
                    continue  # it was made again
                if not isinstance(exc, OSError) or exc.errno == errno.EBADF:  # it was closed
                    raise
                self._note_shortage(exc)
                if self._hang_up_on_one():
                    turn_away()
                await trio.sleep(_PAUSE)
                continue
            # The kernel noted the peer's user when it connected: nothing that the peer does afterwards changes it.
            accepted = socket.socket(fileno=peer.detach())
            try:
                taken = peer_uid(accepted) == os.geteuid() and take(accepted)
                if taken and self._is_short:
                    self._is_short = False
                    _log.warning("%s: clients are taken again", self.path)
            except OSError as exc:
                taken = False
                self._note_shortage(exc)
            if not taken:
                turn_away()
                accepted.close()

    def renew(self) -> list[str]:
        """Listen again if the socket was removed. Return its path then. To be called under the lock of its directory.

        Raises:
            PoolInUse: another server has put its socket there.
            PoolUnusable: none can be made there.
        """
        is_there = is_socket_at(self.path, self._inode)
        if is_there:
            return []
        if is_there is not None:
            raise PoolInUse(f"{self.path!r} is another server's by now")
        listening = listen(self.path)
        self._inode = os.stat(self.path).st_ino
        before, self._listening = self._listening, listening
        if self._accepting is not None:
            self._accepting.close()  # and its task goes on with the new one
        before.close()
        return [self.path]

    def _note_shortage(self, exc: OSError) -> None:
        """Log the first refusal of a row."""
        if not self._is_short:
            self._is_short = True
            _log.warning(
                "%s: clients are turned away until there are descriptors: %s; raise `ulimit -n`", self.path, exc
            )

    def _hang_up_on_one(self) -> bool:
        """Accept one client with the spare descriptor and hang up: it learns at once what it would else time out on."""
        with SPARE.given_up():
            try:
                self._listening.accept()[0].close()
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Listen no more; the file goes, unless a successor has replaced it. Idempotent."""
        self._listening.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
