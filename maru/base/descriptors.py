"""Region descriptors over a Unix socket: how our own clients get at the memory of a region, and readers only to read it.

A client shows the capability that it got for a span over ZeroMQ, and is handed a descriptor of that region's file: opened
read-only unless the capability is for writing. In the same way it is handed its tenant's shared index to read, and a board to
write, for which its session is enough. Then it can be mapped without its path being known, and a reader cannot
write by accident, whatever its code does. (A hostile process of the same user can open the file itself. This is no
protection against that.)

Rule 1. One message each way per request (SOCK_SEQPACKET keeps them apart); a request has a bounded length.
Rule 2. The kernel tells the user of the peer (SO_PEERCRED), on both sides: only processes of this user are accepted.
Rule 3. A bad request costs its connection. A refused one costs nothing: the next one may be good.
Rule 4. A descriptor that was opened for an answer is closed here, whether or not the answer left.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, Protocol, TypeVar

import attrs
import msgspec
import trio

from .errors import BadMessage, CannotMap, HandlerClosed, NoAnswer, NotOwner, ServerLost, ServerRefused
from .listeners import peer_uid
from .packet_listener import PacketListener, serve_briefly
from .packets import descriptors_in, reachable
from .process_limits import DESCRIPTORS
from .region_file import RegionFile

MAX_MESSAGE_BYTES: Final = 512
MAX_CONNECTIONS: Final = 256
"""A connection lives as long as a client maps regions, which is moments."""
IDLE: Final = 10.0
OPEN_TIME: Final = 10.0
"""A stalled file system: the client is told, and may ask again."""
_MAX_TEXT: Final = 256

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=msgspec.Struct)
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


INDEX: Final = 0
"""In place of a region's id, which none has: to read, the shared index; to write, the session's own board."""


class DescriptorRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a client asks for."""

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Its session's token."""
    region_id: _Number
    offset: _Number
    """Where in the region's file the span begins: as the server said with the capability."""
    length: _Number
    writable: bool
    """Whether to write it: only its owner gets that."""
    capability: Annotated[bytes, msgspec.Meta(max_length=64)]
    """What the server issued for exactly this."""


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    status: int
    """0, or an errno."""
    text: str
    offset: int
    length: int


class Descriptors(Protocol):
    """What the server needs of a pool."""

    def find(self, region_id: int) -> RegionFile | None:
        """Where this region is."""
        ...

    async def open_fd(self, region_id: int, write: bool) -> int:
        """A new descriptor. May be slow. Cancelled, nothing stays open.

        Raises:
            CannotMap: it cannot be opened.
        """
        ...


@attrs.frozen
class DescriptorStatistics:
    """A snapshot of a descriptor server. Counters count from its start."""

    connections: int
    """That are open."""
    turned_away: int
    """Connections that ended for a newer one, or were another user's."""
    granted: int
    """Descriptors handed out."""
    refused: int
    """Requests without the right, or for what is not there."""
    bad: int
    """Messages that were no requests."""


# --- the server ---------------------------------------------------------------------------------------------------


class DescriptorServer:
    """Hands out descriptors of a pool's regions."""

    def __init__(
        self,
        pool: Descriptors,
        permits: Callable[[DescriptorRequest], bool],
        open_index: Callable[[bytes, bool], Awaitable[int]] | None = None,
        *,
        max_connections: int = MAX_CONNECTIONS,
        idle: float = IDLE,
        open_time: float = OPEN_TIME,
    ) -> None:
        """Hand out what ``permits`` says: whether the request's capability is right, and its session alive.

        Args:
            pool: of the regions.
            permits: see above.
            open_index: a new descriptor for this session: of the index, or to write of its board; raises ``CannotMap`` where
                there is none. ``None``: there never is, and 0 is a region like any other.
            max_connections: at once, where the share of descriptors allows as many; the oldest goes for a newer one.
            idle: seconds that a connection may be silent.
            open_time: seconds that opening may take.
        """
        self._pool = pool
        self._open_index = open_index
        self._permits = permits
        self._max_connections = max_connections
        self._idle = idle
        self._open_time = open_time
        self._connections = self._turned_away = self._granted = self._refused = self._bad = 0
        self._listener: PacketListener | None = None

    async def run(self, path: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve at this path until cancelled. Started, it says the path. Afterwards the socket is gone.

        Raises:
            PoolUnusable: the directory is open to others, or no socket can be made there.
        """
        listener = self._listener = PacketListener(path)
        door = DESCRIPTORS.open(1, most=self._max_connections)
        try:
            task_status.started(path)
            await serve_briefly(listener, door, self._serve, self._turn_away)
        finally:
            listener.close()
            door.close()

    def renew(self) -> list[str]:
        """Listen again if the socket was removed; see :meth:`PacketListener.renew`."""
        return [] if self._listener is None else self._listener.renew()

    def _turn_away(self) -> None:
        self._turned_away += 1

    def statistics(self) -> DescriptorStatistics:
        """An immutable snapshot."""
        return DescriptorStatistics(self._connections, self._turned_away, self._granted, self._refused, self._bad)

    async def _serve(self, peer: trio.socket.SocketType) -> None:
        self._connections += 1
        try:
            while await self._answer_one(peer):
                pass
        except OSError:  # it has gone
            pass
        except Exception:  # ours, and not to be paid by the other connections
            _log.exception("a connection that asked for descriptors has failed")
        finally:
            self._connections -= 1

    async def _answer_one(self, peer: trio.socket.SocketType) -> bool:
        """Whether to go on with this connection."""
        message = b""
        with trio.move_on_after(self._idle):
            message = await peer.recv(MAX_MESSAGE_BYTES + 1)
        if not message:
            return False
        try:
            request = _decode(message, DescriptorRequest)
        except BadMessage as exc:
            self._bad += 1
            await self._send(peer, _Reply(errno.EINVAL, str(exc)[:_MAX_TEXT], 0, 0))
            return False
        refusal = self._judge(request)
        if refusal is not None:
            self._refused += 1
            await self._send(peer, refusal)
            return True
        fd = -1
        try:
            try:
                with trio.fail_after(self._open_time):
                    if request.region_id == INDEX and self._open_index is not None:
                        fd = await self._open_index(request.session, request.writable)
                    else:
                        fd = await self._pool.open_fd(request.region_id, request.writable)
            except (CannotMap, HandlerClosed) as exc:
                self._refused += 1
                await self._send(peer, _Reply(errno.ENOENT, str(exc)[:_MAX_TEXT], 0, 0))
            except trio.TooSlowError:
                self._refused += 1
                await self._send(peer, _Reply(errno.ETIMEDOUT, "the region's file system does not answer", 0, 0))
            else:
                self._granted += 1
                await self._send(peer, _Reply(0, "", request.offset, request.length), fd)
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def _judge(self, request: DescriptorRequest) -> _Reply | None:
        if request.region_id == INDEX and self._open_index is not None:  # whose session it is, opening it asks
            return None
        region = self._pool.find(request.region_id)
        # The capability is checked first, so that a peer without one does not learn which regions exist.
        if not self._permits(request):
            return _Reply(errno.EACCES, "this capability is not for that", 0, 0)
        if region is None:
            return _Reply(errno.ENOENT, f"there is no region {request.region_id}", 0, 0)
        if not region.offset <= request.offset <= request.offset + request.length <= region.offset + region.length:
            return _Reply(errno.ERANGE, f"this is not inside region {request.region_id}", 0, 0)
        return None

    async def _send(self, peer: trio.socket.SocketType, reply: _Reply, fd: int = -1) -> None:
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))] if fd >= 0 else []
        with trio.move_on_after(self._idle):  # it does not read what it has asked for
            await peer.sendmsg([msgspec.msgpack.encode(reply)], attached)


# --- the client ---------------------------------------------------------------------------------------------------


def fetch_descriptor(path: str, request: DescriptorRequest, timeout: float) -> tuple[int, int, int]:
    """Get a descriptor for a span of a region. Blocking: to be called in a thread, or where blocking is right.

    Args:
        path: of the server's socket.
        request: what for, with the capability for exactly that.
        timeout: for all of it.

    Returns:
        The descriptor, which is the caller's, opened read-only unless the request was for writing; and offset and length
        of the span in what it shows.

    Raises:
        NotOwner: the capability is not for that.
        ServerRefused: the region is not there any more, or cannot be opened now.
        NoAnswer: the server did not answer in time.
        ServerLost: there is no server, or it hung up.
        BadMessage: what answers there is no server of ours, or another user's.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.settimeout(timeout)
            with reachable(path) as name:
                sock.connect(name)
            if peer_uid(sock) != os.geteuid():
                raise BadMessage(f"{path!r} is served by another user")
            sock.sendall(msgspec.msgpack.encode(request))
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            message, attached, flags, _ = sock.recvmsg(
                MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except (TimeoutError, BlockingIOError) as exc:
            raise NoAnswer(f"{path!r} did not answer within {timeout:g} s") from exc
        except OSError as exc:
            raise ServerLost(f"{path!r}: {exc}") from exc
    fds = descriptors_in(attached)
    try:
        if not message:
            raise ServerLost(f"{path!r} hung up")
        reply = _decode(message, _Reply)
        if reply.status == errno.EACCES:
            raise NotOwner(reply.text)
        if reply.status:
            raise ServerRefused(reply.text, "refused")
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise BadMessage(f"{len(fds)} descriptors came instead of one; too few may be left in this process")
        if (reply.offset, reply.length) != (request.offset, request.length):
            raise BadMessage("the descriptor that came is for something else")
        return fds.pop(), reply.offset, reply.length
    finally:
        for fd in fds:
            os.close(fd)


def fetch_index_descriptor(path: str, session: bytes, timeout: float) -> int:
    """Get a descriptor of the shared index, to read: the caller's. Blocking, and raises, as :func:`fetch_descriptor`.

    Raises:
        ServerRefused: there is none; the text says why.
    """
    return fetch_descriptor(path, DescriptorRequest(session, INDEX, 0, 0, False, b""), timeout)[0]


def fetch_board_descriptor(path: str, session: bytes, timeout: float) -> int:
    """Get a descriptor of this session's board, to write. The same otherwise; one of an older server raises ``NotOwner``."""
    return fetch_descriptor(path, DescriptorRequest(session, INDEX, 0, 0, True, b""), timeout)[0]


# --- both ---------------------------------------------------------------------------------------------------------


def _decode(message: bytes, kind: type[M]) -> M:
    if len(message) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message has at most {MAX_MESSAGE_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadMessage(f"no {kind.__name__}: {exc}") from exc
