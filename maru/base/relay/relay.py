"""The relay from TCP connections to the server's Unix socket.

Rule 1. The server's socket sees a peer only after its handshake, and no byte of that handshake (`handshake`).
Rule 2. A connection to the server lives exactly as long as its peer's, since the server takes it for the peer.
Rule 3. The cost of a connection is bounded: a handshake by its bytes and its time, the rest by one buffer in each
        direction. The relay does not read from a peer that does not read. The number of connections is bounded, too
        (`limits`).
Rule 4. On this host only the server's own user and root may connect. Another user could learn keys, and take memory.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Hashable
from typing import Final

import attrs
import trio

from .handshake import BadHandshake, Handshake, Introduction, greeting, ready
from .limits import ConnectionQuota, PendingHandshakes
from .lookup import FindUser, may_enter

PIECE_BYTES: Final = 32 << 10
"""Most bytes to read at once, and to write before reading more."""
HANDSHAKE_TIME: Final = 5.0
"""Seconds from the first byte to a connection with the server.

ZeroMQ has the same limit.
"""
MAX_PENDING_HANDSHAKES: Final = 256
"""Most unfinished handshakes."""
_RETRY: Final = 0.01
"""Seconds until a connection is tried again after a full backlog."""
_KEEPALIVE: Final = 30
"""Seconds of silence until TCP probes the other host."""
CLIENTS: Final = {b"ROUTER": frozenset({b"REQ", b"DEALER"}), b"PUB": frozenset({b"SUB", b"XSUB"})}
"""Accepted socket types of peers, by the server's socket type."""
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)

_log = logging.getLogger(__name__)


@attrs.define
class Counts:
    """Outcomes of connections, counted from the start of the relay."""

    relayed: int = 0
    """Connections joined to the server."""
    malformed: int = 0
    """Connections without a valid handshake in time."""
    strangers: int = 0
    """Connections of other users' processes."""
    crowded: int = 0
    """Connections over a limit."""
    unserved: int = 0
    """Connections that the server did not accept in time."""
    failed: int = 0
    """Connections ended by a fault of the relay."""


class Relay:
    """Acceptor of connections for one server.

    Args:
        server: its Unix socket.
        kind: type of that socket, as ZeroMQ names it: a key of ``CLIENTS``.
        most: most connections at once; a peer has at most half of them.
        find_user: returns the user of a peer's process; None if every user may connect.
    """

    def __init__(
        self,
        server: str,
        *,
        kind: bytes = b"ROUTER",
        most: int,
        find_user: FindUser | None,
        most_handshakes: int = MAX_PENDING_HANDSHAKES,
        handshake_time: float = HANDSHAKE_TIME,
    ) -> None:
        self.counts: Counts = Counts()
        self._server, self._kind = server, kind
        self._find_user = find_user
        self._quota = ConnectionQuota(most)
        self._handshakes: PendingHandshakes[trio.CancelScope] = PendingHandshakes(most_handshakes)
        self._handshake_time = handshake_time

    async def run(self, listener: trio.SocketListener) -> None:
        """Relay connections until cancelled, which ends all of them."""
        await trio.serve_listeners(self._serve, [listener])

    # --- one connection -------------------------------------------------------------------------------------------

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                peer = await self._introduce(stream)
                if peer is not None:
                    await self._join(stream, *peer)
        except BadHandshake:
            self.counts.malformed += 1
        except _BROKEN:
            pass
        except Exception:  # a fault of ours, which must not end the other connections
            self.counts.failed += 1
            if self.counts.failed == 1:
                _log.exception("a connection has failed")

    async def _introduce(self, stream: trio.SocketStream) -> tuple[Introduction, Hashable] | None:
        """Read a peer's handshake and identify it; None if it is refused.

        Raises:
            BadHandshake: it sent something else, or was too slow.
        """
        with trio.CancelScope(deadline=trio.current_time() + self._handshake_time) as scope:
            oldest = self._handshakes.admit(scope)
            if oldest is not None:
                oldest.cancel()
            try:
                _keep_alive(stream)
                await stream.send_all(greeting())
                introduction = await _read_handshake(stream, CLIENTS[self._kind])
                peer = self._identify(stream)
            finally:
                self._handshakes.release(scope)
            if peer is None:
                self.counts.strangers += 1
                return None
            return introduction, peer
        raise BadHandshake("the handshake took too long")

    def _identify(self, stream: trio.SocketStream) -> Hashable | None:
        """Return a peer's key in the limits; None if refused.

        The key is a user of this host, or another host.
        """
        if self._find_user is None:
            host: str = stream.socket.getpeername()[0]
            return host
        user = self._find_user(stream)
        return user if may_enter(user) else None

    async def _join(self, stream: trio.SocketStream, introduction: Introduction, peer: Hashable) -> None:
        """Relay while both ends are connected."""
        if not self._quota.take(peer):
            self.counts.crowded += 1
            return
        try:
            server = await self._connect(introduction)
            if server is None:
                self.counts.unserved += 1
                return
            async with server[0]:
                self.counts.relayed += 1
                server_stream, answered = server
                await _relay(stream, introduction.rest, server_stream, ready(self._kind) + answered)
        except (BadHandshake, *_BROKEN):
            pass
        finally:
            self._quota.give_back(peer)

    async def _connect(self, introduction: Introduction) -> tuple[trio.SocketStream, bytes] | None:
        """Connect to the server, and exchange handshakes.

        Returns the stream and the bytes that followed its handshake; None if that took too long.

        Raises:
            OSError: there is no server.
            BadHandshake: the process that listens there is not a server.
        """
        with trio.move_on_after(self._handshake_time):
            stream = await _open_unix(self._server)
            try:
                # Separately: ZeroMQ fails if a message comes in one piece with the handshake.
                await stream.send_all(greeting(introduction.minor) + ready(introduction.socket_type))
                return stream, (await _read_handshake(stream, frozenset({self._kind}))).rest
            except BaseException:
                trio.lowlevel.notify_closing(stream.socket)
                stream.socket.close()
                raise
        return None


# --- streams ------------------------------------------------------------------------------------------------------


async def _read_handshake(stream: trio.SocketStream, socket_types: frozenset[bytes]) -> Introduction:
    handshake = Handshake(socket_types)
    while True:
        data = await stream.receive_some(PIECE_BYTES)
        if not data:
            raise BadHandshake("the peer disconnected")
        introduction = handshake.receive(data)
        if introduction is not None:
            return introduction


async def _open_unix(path: str) -> trio.SocketStream:
    """Connect to a Unix socket, waiting while its backlog is full.

    trio's own connect would take a full backlog for a connection.

    Raises:
        OSError: no process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            await trio.lowlevel.checkpoint()
            try:
                sock.connect(path)
            except BlockingIOError:
                await trio.sleep(_RETRY)
            else:
                return trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    except BaseException:
        sock.close()
        raise


async def _relay(peer: trio.SocketStream, said: bytes, server: trio.SocketStream, answered: bytes) -> None:
    """Copy bytes both ways until either end is gone."""
    async with trio.open_nursery() as nursery:
        gone = nursery.cancel_scope.cancel
        nursery.start_soon(_carry, peer, server, said, gone)
        nursery.start_soon(_carry, server, peer, answered, gone)


async def _carry(source: trio.SocketStream, sink: trio.SocketStream, data: bytes, gone: Callable[[], None]) -> None:
    try:
        if data:
            await sink.send_all(data)
        while data := await source.receive_some(PIECE_BYTES):
            await sink.send_all(data)
    except _BROKEN:
        pass
    gone()


def _keep_alive(stream: trio.SocketStream) -> None:
    """Enable keepalive, so that the kernel ends connections of vanished hosts.

    They would count against the limits for ever.
    """
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE // 4)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
