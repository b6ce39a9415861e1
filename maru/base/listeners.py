"""Queries to the kernel for the user who listens at an address.

They block, but briefly; :mod:`maru.base.peers` decides what follows.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Final, Protocol

from .errors import is_scarcity
from .peers import Listener, users_at

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD: Final = 77
"""Socket option of Linux 6.5, which :mod:`socket` does not define."""
_CONNECT_TIME: Final = 1.0
"""Seconds until connecting to a Unix socket with a full queue fails."""


def find_listener(url: str) -> Listener:
    """Find the listener at ``tcp://host:port`` or ``ipc://path``.

    Failures are reported in the result, never raised.
    """
    kind, _, where = url.partition("://")
    if kind == "ipc":
        return find_unix_listener(where)
    host, _, port = where.rpartition(":")
    return find_tcp_listener(host, int(port))


def find_tcp_listener(host: str, port: int) -> Listener:
    """Find the listener at a TCP address in this network namespace."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        addresses = {socket.inet_pton(family, str(address[0]).partition("%")[0]) for family, *_, address in found}
        users = users_at([_read(table) for table in _TABLES], addresses, port)
    except (OSError, ValueError, IndexError) as exc:
        return Listener(unknown=str(exc))
    if not users:
        return Listener(unknown="the kernel shows this process no such socket")
    return Listener(users)


def find_unix_listener(path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> Listener:
    """Find the listener at a Unix socket of one kind.

    ``@name`` is a socket without a file.
    """
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.settimeout(_CONNECT_TIME)
        try:
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            return Listener(frozenset({peer_uid(sock)}), is_private=_is_private(path))
        except (OSError, ValueError) as exc:
            return Listener(unknown=str(exc))


class UnixSocket(Protocol):
    """The needed part of a socket (standard library or trio)."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return the value of an option."""
        ...


def peer_uid(sock: UnixSocket) -> int:
    """Return the user of the process at a Unix socket's other end.

    It made that end, or listens there.
    """
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def open_peer(sock: UnixSocket) -> int:
    """Open a descriptor of the process at a Unix socket's other end.

    That process made the other end, or listens there; the descriptor becomes readable when it has ended.

    The caller closes it. -1 if none can be opened: the process has ended, or it is of another pid namespace, as in
    another container, and the kernel is older than Linux 6.5, which opens none for a process without a number here.

    Raises:
        OSError: this process, or this host, lacks descriptors or memory: a later call may succeed.
    """
    try:
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder, signed=True)
    except OSError as exc:  # an older kernel, or the process has ended
        if is_scarcity(exc):
            raise
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        return os.pidfd_open(pid) if pid else -1
    except OSError as exc:
        if is_scarcity(exc):
            raise
        return -1


def _is_private(path: str) -> bool:
    """Return whether only this user and root can make sockets there."""
    if path.startswith("@"):
        return False
    status = os.stat(os.path.dirname(os.path.abspath(path)))
    return status.st_uid in (os.geteuid(), 0) and not stat.S_IMODE(status.st_mode) & 0o022


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except FileNotFoundError:  # a kernel without IPv6
        return ""
