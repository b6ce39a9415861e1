"""Kernel query for the user at a TCP connection's other end. Pure.

Rule 1. Only a connection that both ends hold counts. For one that its process has closed the kernel names root as the
        user, and bytes sent over it may still be read.
Rule 2. A connection that the kernel does not know has no user.

The query is for one connection, by both of its addresses (``sock_diag(7)``, ``inet_diag_req_v2``). The text in
``/proc/net/tcp`` has the same for all connections of the host at once: after a flood of short ones, of tens of
thousands.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, TypeAlias

Address: TypeAlias = tuple[str, int]
"""Numeric host, and port."""

_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST: Final = struct.Struct("=BBxxI")  # family, protocol, states
_ENDS: Final = struct.Struct("!HH16s16s")  # ports and addresses of the queried socket: its own first
_ANY_INTERFACE_OR_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_STATE_AT, _USER_AT = 1, 64
_USER: Final = struct.Struct("=II")  # user and inode
_BY_FAMILY, _ERROR = 20, 2
_REQUEST_FLAG: Final = 1
_ESTABLISHED: Final = 1
_NO_INODE: Final = 0


def question(local: Address, remote: Address) -> bytes:
    """Encode the query for our connection's other end.

    Args:
        local: our address.
        remote: the other end's address.
    """
    family = socket.AF_INET6 if ":" in remote[0] else socket.AF_INET
    hosts = [socket.inet_pton(family, host.partition("%")[0]) for host, _ in (remote, local)]
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0xFFFFFFFF)
    body += _ENDS.pack(remote[1], local[1], *hosts) + _ANY_INTERFACE_OR_COOKIE
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_FLAG, 0, 0) + body


def user_in(answer: bytes) -> int | None:
    """Return the user at the other end; None if it is closed.

    Raises:
        ValueError: the bytes are not an answer.
    """
    if len(answer) < _HEADER.size:
        raise ValueError(f"an answer of {len(answer)} bytes")
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _ERROR:  # there is no such connection
        return None
    body = answer[_HEADER.size :]
    if kind != _BY_FAMILY or len(body) < _USER_AT + _USER.size:
        raise ValueError(f"an answer of type {kind}, of {len(answer)} bytes")
    user, inode = _USER.unpack_from(body, _USER_AT)
    return int(user) if body[_STATE_AT] == _ESTABLISHED and inode != _NO_INODE else None
