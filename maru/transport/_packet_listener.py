"""Accepting SOCK_SEQPACKET connections of this user's processes, for every server of this project that has a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Final

import trio

from .._listeners import peer_uid
from ._packets import listen

_BUSY: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE: Final = 0.1
"""Seconds until a process without a free descriptor tries to accept again: the listener stays readable, and would spin."""

_log = logging.getLogger(__name__)


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

    async def run(self, take: Callable[[socket.socket], bool], turn_away: Callable[[], object]) -> None:
        """Accept connections until cancelled.

        Args:
            take: is handed each connection of a process of this user, which is its own from then on; whether it has taken it.
            turn_away: called for each connection that was closed at once: another user's, or not taken.
        """
        listening = trio.socket.from_stdlib_socket(self._listening)
        while True:
            try:
                peer, _ = await listening.accept()
            except OSError as exc:
                if exc.errno not in _BUSY:
                    raise
                _log.warning("no descriptor left to talk to a client with: %s", exc)
                await trio.sleep(_PAUSE)
                continue
            # The kernel noted the peer's user when it connected: nothing that the peer does afterwards changes it.
            accepted = socket.socket(fileno=peer.detach())
            if peer_uid(accepted) != os.geteuid() or not take(accepted):
                turn_away()
                accepted.close()

    def close(self) -> None:
        """Listen no more; the file goes, unless a successor has replaced it. Idempotent."""
        self._listening.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
