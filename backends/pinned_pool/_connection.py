"""A client's connection to a server.

A server of this user on this host is reached by its channel, any other by ZeroMQ. ``HOST:PORT`` of this host names the
channel that a server with this port has made in its usual directory. Without one, and for another host, it is an
address of TCP. ``ipc://PATH`` names a channel by its path.

Rule 1. A session is a connection. A channel shows its end at once. ZeroMQ hides it and reconnects: then the server does
        not know the client and answers so, which ends the session as well.
Rule 2. Another user's server is refused, unless it is named. The kernel reports the user: over the channel that of the
        connection itself, over TCP that of the listener, which is checked before anything is sent.
        itself, over TCP that of the listener, which is asked before anything is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from ipaddress import ip_address
from time import perf_counter, sleep
from typing import Final, Protocol

from maru.base.listeners import find_tcp_listener
from maru.base.peers import why_untrusted
from maru.transport import BlockingDealer, ChannelConnection, SocketOptions

from ._config import default_directory
from ._errors import PoolLost, PoolTimeout, PoolUnreachable, PoolUntrusted
from ._messages import MAX_FRAME_BYTES

_LOOK_UP: Final = 0.05
"""Seconds between a ZeroMQ wait's checks for an interruption."""

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """Sends and receives whole frames, for one thread at a time.

    Time limits are on the clock ``perf_counter``.
    """

    @property
    def is_open(self) -> bool:
        """Whether the peer is connected, as far as this process knows.

        For any thread; sends nothing.
        """
        ...

    def send_by(self, frame: bytes, deadline: float) -> bool:
        """Send one frame. Return whether it was sent in time.

        Raises:
            Shortage: there is no descriptor or memory for so large a frame. The connection goes on.
            OSError: the connection is over.
        """
        ...

    def receive_by(self, deadline: float) -> bytes | None:
        """Return the next frame; None if none came in time.

        :exc:`OSError`: the connection is over.
        """
        ...

    def interrupt(self) -> None:
        """End the wait of another thread, as if the connection were over.

        For any thread.
        """
        ...

    def close(self) -> None:
        """Close this process's end. Idempotent."""
        ...


class RemoteConnection:
    """A connection over ZeroMQ. Made by :func:`open_connection`.

    It is made after a check of the listener's user.
    """

    def __init__(self, host: str, port: int) -> None:
        self._dealer = BlockingDealer(f"tcp://{host}:{port}", SocketOptions(max_message_bytes=MAX_FRAME_BYTES))
        self._over = threading.Event()

    @property
    def is_open(self) -> bool:
        """Whether it was not ended here.

        The server's end shows only with the next answer.
        """
        return not self._over.is_set()

    def send_by(self, frame: bytes, deadline: float) -> bool:
        """Send one frame. Return whether it was sent in time."""
        self._check()
        return self._dealer.send([b"", frame], max(0.0, deadline - perf_counter()))

    def receive_by(self, deadline: float) -> bytes | None:
        """Return the next frame; None if none came in time."""
        while True:
            self._check()
            left = max(0.0, deadline - perf_counter())
            message = self._dealer.receive(min(left, _LOOK_UP))
            if message is not None:
                return message[-1]
            if not left:
                return None

    def interrupt(self) -> None:
        """End the wait of another thread soon.

        Another thread must not close a ZeroMQ socket that is in use.
        """
        self._over.set()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._over.set()
        self._dealer.close()

    def _check(self) -> None:
        if self._over.is_set():
            raise ConnectionAbortedError("it was closed")


def open_connection(server: str, timeout: float, uid: int) -> Connection:
    """Open a connection to a server.

    Args:
        server: ``host:port`` or ``ipc://path``.
        timeout: seconds to wait for the server.
        uid: the user that the server must belong to, besides root.

    Raises:
        ValueError: the address is invalid.
        PoolUntrusted: another user's process listens there. Nothing was sent.
        PoolUnreachable: no process listens there.
        PoolTimeout: it does not answer.
    """
    path = server.removeprefix("ipc://")
    if path == server:
        host, port = parse_address(server)
        path = channel_path(default_directory(), port) if _is_of_this_host(host) else ""
        if not _is_socket(path):
            return _open_remote(server, host, port, timeout, uid)
    return _open_channel(server, path, perf_counter() + timeout)


def parse_address(server: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises:
        ValueError: the text is no such address.
    """
    host, colon, port = server.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{server!r} is not host:port")
    return host.strip("[]"), int(port)


def channel_path(directory: str, port: int) -> str:
    """Return the path of a server's channel in its directory."""
    return f"{directory}/{port}.sock"


def _is_of_this_host(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _open_channel(server: str, path: str, deadline: float) -> ChannelConnection:
    while True:
        try:
            return ChannelConnection(path)
        except PermissionError as exc:
            raise PoolUntrusted(f"{server} belongs to another user: start a server of your own ({exc})") from exc
        except BlockingIOError as exc:  # the backlog of connections is full
            if perf_counter() > deadline:
                raise PoolTimeout(f"the pinned pool at {server} accepts no connections") from exc
            sleep(_LOOK_UP)
        except OSError as exc:
            raise PoolUnreachable(f"there is no pinned pool at {server}: {exc}") from exc


def _open_remote(server: str, host: str, port: int, timeout: float, uid: int) -> RemoteConnection:
    """Connect over TCP, after checking the listener's user.

    ZeroMQ would wait for a server to come.
    """
    try:
        with socket.create_connection((host, port), timeout) as sock:
            found, port = sock.getpeername()[:2]
    except TimeoutError as exc:
        raise PoolTimeout(f"no pinned pool at {server} answered within {timeout:g} s") from exc
    except OSError as exc:
        raise PoolUnreachable(f"there is no pinned pool at {server}: {exc}") from exc
    listener = find_tcp_listener(found, port)
    if why_untrusted(listener, uid):
        other = min(listener.uids - {uid, 0})
        raise PoolUntrusted(
            f"{server} is served by user {other}, not by user {uid}: start a server of your own, or set "
            f"server_uid = {other} if that one is meant"
        )
    if listener.unknown and _is_of_this_host(found):
        _log.warning("the user of the process that listens at %s is unknown: %s", server, listener.unknown)
    try:
        return RemoteConnection(f"[{found}]" if ":" in found else found, port)
    except OSError as exc:
        raise PoolLost(f"the connection to {server} is over: {exc}") from exc
