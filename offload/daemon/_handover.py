"""The handover of engines' memory by file descriptor.

Each packet has the token of a session, and the descriptor attached. The socket is separate from the channel, whose
frames carry no descriptors of others: a descriptor attached there is a frame itself.

Rule 1. Only processes of this user connect, as the kernel checks. An invalid packet costs its connection.
Rule 2. Every descriptor that arrives is closed here, unless a session has taken it.
Rule 3. Connections are a share of the descriptors of this process, and none lasts; silence keeps no other engine out.
Rule 4. Nothing is asked of a file system, which may not answer (FUSE, NFS): the kernel shows which files are memory,
    and others are closed in a thread. While ``_MOST`` such threads hang, nothing is received, so no descriptor is
    opened here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from array import array
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

import msgspec
import trio

from maru.base.listeners import peer_uid
from maru.base.packet_listener import PacketListener, serve_briefly
from maru.base.packets import descriptors_in, reachable
from maru.base.process_limits import DESCRIPTORS

from ._layout import BadLayout
from ._messages import TOKEN_BYTES, Refusal, cut

_MAX_BYTES: Final = 2_048
_MOST: Final = 64
"""Connections at once. Each lasts for a moment."""
_IDLE: Final = 10.0
"""Seconds that a connection may be silent."""

_log = logging.getLogger("offload.daemon")


class _HandOver(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class _Taken(msgspec.Struct, array_like=True, frozen=True):
    memory: int
    """Its number; -1: refused."""
    kind: str
    text: str


class CannotHandOver(OSError):
    """The daemon did not take the memory; the text has the reason."""


class Handover:
    """The daemon's side: listens from its construction until it is closed.

    Args:
        path: of the Unix socket, in a directory that only this user enters.
        take: keeps the memory behind a descriptor for the session with this token, and returns its number. The
            descriptor is its own to close, also when it raises ``Refusal`` or ``BadLayout``.

    Raises:
        PoolUnusable: no socket can be made there.
    """

    def __init__(self, path: str, take: Callable[[bytes, int], int]) -> None:
        self.path: str = path
        self._take = take
        self._listener = PacketListener(path)
        self._door = DESCRIPTORS.open(1, most=_MOST)
        self._closing: set[object] = set()
        """A token for each thread that closes a non-memory file."""

    def __enter__(self) -> Handover:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        self._door.close()

    def renew(self) -> list[str]:
        """Listen again if the socket was removed; return its path then."""
        return self._listener.renew()

    async def run(self) -> None:
        """Take descriptors until cancelled."""
        await serve_briefly(self._listener, self._door, self._serve, lambda: None)

    async def _serve(self, sock: trio.socket.SocketType) -> None:
        try:
            with trio.move_on_after(_IDLE):
                while len(self._closing) < _MOST:
                    message, attached, _, _ = await sock.recvmsg(
                        _MAX_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
                    )
                    answer = self._answer(message, descriptors_in(attached))
                    if not message:  # it has hung up
                        break
                    await sock.send(msgspec.msgpack.encode(answer))
        except (OSError, msgspec.MsgspecError) as exc:
            _log.info("a connection that hands memory over has ended: %s", exc)

    def _answer(self, message: bytes, descriptors: list[int]) -> _Taken:
        try:
            if not message:
                return _Taken(-1, "invalid", "nothing came")
            request = msgspec.msgpack.decode(message, type=_HandOver)
            if len(descriptors) != 1:
                return _Taken(-1, "invalid", f"{len(descriptors)} descriptors were sent, but one at a time is taken")
            if not _is_memory(descriptors[0]):
                return _Taken(-1, "invalid", "this descriptor is not memory: use a memfd or a file in /dev/shm")
            return _Taken(self._take(request.token, descriptors.pop()), "", "")
        except Refusal as exc:
            return _Taken(-1, exc.kind, cut(exc))
        except BadLayout as exc:
            return _Taken(-1, "invalid", cut(exc))
        finally:
            for descriptor in descriptors:
                if _is_memory(descriptor):
                    os.close(descriptor)
                else:
                    self._close_in_thread(descriptor)

    def _close_in_thread(self, descriptor: int) -> None:
        token = object()
        self._closing.add(token)
        try:
            trio.lowlevel.start_thread_soon(partial(os.close, descriptor), lambda _: self._closing.discard(token))
        except RuntimeError:  # no thread can be started
            self._closing.discard(token)
            os.close(descriptor)


def _is_memory(descriptor: int) -> bool:
    """Return whether a descriptor is a memfd, or a file of ``tmpfs``.

    No other can be sealed, nor asked for its seals.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


async def hand_over(path: str, token: bytes, descriptor: int) -> int:
    """Hand a descriptor over, as an engine. Returns the memory's number.

    The descriptor stays the caller's.

    Raises:
        PermissionError: another user's process listens there. Nothing was sent.
        CannotHandOver: it was refused.
        OSError: there is no daemon, or it hung up.
    """
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        with reachable(path) as name:
            await sock.connect(name)
        if peer_uid(sock) not in (os.geteuid(), 0):
            raise PermissionError(f"{path!r} is served by another user")
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        await sock.sendmsg([msgspec.msgpack.encode(_HandOver(token))], attached)
        answer = await sock.recv(_MAX_BYTES)
    if not answer:
        raise CannotHandOver(f"{path!r} closed the connection")
    taken = msgspec.msgpack.decode(answer, type=_Taken)
    if taken.memory < 0:
        raise CannotHandOver(taken.text)
    return taken.memory
