"""Region descriptors passed over a Unix socket to our own clients.

A client presents the capability that it got for a span over ZeroMQ, and receives a descriptor of that region's file:
opened read-only unless the capability is for writing. In the same way it receives its tenant's shared index, read-only,
and a board to write, for which its session is enough. So a client maps memory without knowing its path, and a reader
cannot write by accident, whatever its code does. (A hostile process of the same user can open the file itself. This is
no protection against that.)

Rule 1. One message each way per request (SOCK_SEQPACKET keeps them apart); a request has a bounded length.
Rule 2. Both sides read the peer's user from the kernel (SO_PEERCRED): only processes of this user are accepted.
Rule 3. A bad request ends its connection. A refused one does not: the next one may be good.
Rule 4. A descriptor that was opened for an answer is closed here, whether or not the answer was sent.
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
"""Most open connections.

A connection lives while a client maps regions, which is short.
"""
IDLE: Final = 10.0
OPEN_TIME: Final = 10.0
"""Seconds for opening a file, in case its file system stalls.

The client then gets an error, and may ask again.
"""
_MAX_TEXT: Final = 256

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=msgspec.Struct)
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


INDEX: Final = 0
"""Reserved region id, which no region has.

A request to read it gets the shared index; a request to write it gets the session's own board.
"""


class DescriptorRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A client's request for a descriptor."""

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Token of the client's session."""
    region_id: _Number
    offset: _Number
    """Offset of the span in its file, as the server returned it."""
    length: _Number
    writable: bool
    """Whether the span is to be written; only its owner may."""
    capability: Annotated[bytes, msgspec.Meta(max_length=64)]
    """Capability that the server issued for exactly this span and access."""


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    status: int
    """Status: 0, or an errno."""
    text: str
    offset: int
    length: int


class Descriptors(Protocol):
    """The methods of a pool that the server needs."""

    def find(self, region_id: int) -> RegionFile | None:
        """Return the file of a region; None if it is missing."""
        ...

    async def open_fd(self, region_id: int, write: bool) -> int:
        """Open a new descriptor of a region.

        May be slow. If cancelled, nothing stays open.

        Raises:
            CannotMap: the region cannot be opened.
        """
        ...


@attrs.frozen
class DescriptorStatistics:
    """A snapshot of a descriptor server. Counters count from its start."""

    connections: int
    """Open connections."""
    turned_away: int
    """Connections closed in favour of newer ones, or from another user."""
    granted: int
    """Descriptors sent."""
    refused: int
    """Requests without the right, or for a missing region."""
    bad: int
    """Messages that were not requests."""


# --- the server ---------------------------------------------------------------------------------------------------


class DescriptorServer:
    """A server that sends descriptors of a pool's regions."""

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
        """Prepare a server, without opening its socket.

        Args:
            pool: the regions.
            permits: returns whether the request's capability is valid, and its session alive.
            open_index: opens a new descriptor for this session, of the index, or of its board for writing; raises
                ``CannotMap`` if there is none. ``None``: there is never one, and 0 is a region like any other.
            max_connections: most connections at once, if the share of descriptors allows as many; a new one replaces
                the oldest.
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
        """Serve at this path until cancelled, then remove the socket.

        Once started, ``task_status`` gets the path.

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
        """Return an immutable snapshot."""
        return DescriptorStatistics(self._connections, self._turned_away, self._granted, self._refused, self._bad)

    async def _serve(self, peer: trio.socket.SocketType) -> None:
        self._connections += 1
        try:
            while await self._answer_one(peer):
                pass
        except OSError:  # the peer has gone
            pass
        except Exception:  # a fault of ours, which must not end the other connections
            _log.exception("a connection that asked for descriptors has failed")
        finally:
            self._connections -= 1

    async def _answer_one(self, peer: trio.socket.SocketType) -> bool:
        """Answer one request. Returns whether to keep the connection."""
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
        if request.region_id == INDEX and self._open_index is not None:  # opening it checks the session
            return None
        region = self._pool.find(request.region_id)
        # The capability is checked first, so that a peer without one does not learn which regions exist.
        if not self._permits(request):
            return _Reply(errno.EACCES, "this capability does not permit this request", 0, 0)
        if region is None:
            return _Reply(errno.ENOENT, f"there is no region {request.region_id}", 0, 0)
        if not region.offset <= request.offset <= request.offset + request.length <= region.offset + region.length:
            return _Reply(errno.ERANGE, f"the requested bytes are not inside region {request.region_id}", 0, 0)
        return None

    async def _send(self, peer: trio.socket.SocketType, reply: _Reply, fd: int = -1) -> None:
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))] if fd >= 0 else []
        with trio.move_on_after(self._idle):  # the peer may not read its answer
            await peer.sendmsg([msgspec.msgpack.encode(reply)], attached)


# --- the client ---------------------------------------------------------------------------------------------------


def fetch_descriptor(path: str, request: DescriptorRequest, timeout: float) -> tuple[int, int, int]:
    """Fetch a descriptor for a span of a region. Blocking.

    Args:
        path: path of the server's socket.
        request: the span and access, with the capability for exactly that.
        timeout: seconds for the whole call.

    Returns:
        The descriptor, which the caller owns, opened read-only unless the request was for writing; then the offset and
        the length of the span in the descriptor's file.

    Raises:
        NotOwner: the capability is not for that span and access.
        ServerRefused: the region is not there any more, or cannot be opened now.
        NoAnswer: the server did not answer in time.
        ServerLost: there is no server, or it hung up.
        BadMessage: the peer is not a server of ours, or is another user's.
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
            raise ServerLost(f"{path!r} closed the connection")
        reply = _decode(message, _Reply)
        if reply.status == errno.EACCES:
            raise NotOwner(reply.text)
        if reply.status:
            raise ServerRefused(reply.text, "refused")
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise BadMessage(f"{len(fds)} descriptors were received instead of one; this process may have too few left")
        if (reply.offset, reply.length) != (request.offset, request.length):
            raise BadMessage("the received descriptor does not match the request")
        return fds.pop(), reply.offset, reply.length
    finally:
        for fd in fds:
            os.close(fd)


def fetch_index_descriptor(path: str, session: bytes, timeout: float) -> int:
    """Fetch a read-only descriptor of the shared index. Blocking.

    The caller owns it. Raises the errors of :func:`fetch_descriptor` too.

    Raises:
        ServerRefused: there is no index; the text has the reason.
    """
    return fetch_descriptor(path, DescriptorRequest(session, INDEX, 0, 0, False, b""), timeout)[0]


def fetch_board_descriptor(path: str, session: bytes, timeout: float) -> int:
    """Fetch a descriptor of this session's board, to write. Blocking.

    Otherwise like :func:`fetch_index_descriptor`; an older server's refusal raises ``NotOwner``.
    """
    return fetch_descriptor(path, DescriptorRequest(session, INDEX, 0, 0, True, b""), timeout)[0]


# --- both ---------------------------------------------------------------------------------------------------------


def _decode(message: bytes, kind: type[M]) -> M:
    if len(message) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message has at most {MAX_MESSAGE_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadMessage(f"not a {kind.__name__}: {exc}") from exc
