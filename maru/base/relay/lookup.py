"""Queries to the kernel for the user of a TCP connection.

See :mod:`maru.base.relay.users` for the meaning of the answers.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

import trio

from .users import Address, question, user_in

FindUser: TypeAlias = Callable[[trio.SocketStream], int | None]
"""Function that returns the user at the other end, or None.

Never waits.
"""

_NETLINK_SOCK_DIAG: Final = 4
_ANSWER_BYTES: Final = 4096

_log = logging.getLogger(__name__)


def may_enter(user: int | None) -> bool:
    """Return whether a user may connect: this process's user or root."""
    return user in (os.geteuid(), 0)


def find_user(stream: trio.SocketStream) -> int | None:
    """Return the user at a connection's other end, or None.

    Takes some 20 microseconds.

    Raises:
        OSError: the connection is gone.
    """
    local, remote = stream.socket.getsockname(), stream.socket.getpeername()
    try:
        return _ask(local[:2], remote[:2])
    except (OSError, ValueError) as exc:  # out of descriptors, for example: then no new connection is accepted
        _log.warning("the user of a connection cannot be determined: %s", exc)
        return None


def tells_users() -> bool:
    """Return whether the kernel reports the users of connections.

    Tries it with a connection of our own.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as ours,
        ):
            return _ask(listener.getsockname(), ours.getsockname()) == os.geteuid()
    except (OSError, ValueError):
        return False


def _ask(local: Address, remote: Address) -> int | None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # the kernel answers within the call that sends the request
        kernel.sendto(question(local, remote), (0, 0))
        return user_in(kernel.recv(_ANSWER_BYTES))
