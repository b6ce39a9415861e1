"""The relay's process, started by the server.

    python -m maru.base.relay SERVER KIND MOST PARENT ANYBODY

Its standard input is a socket of the server's, over which it requests the listening TCP socket.

It ends with its parent, however that one ends: the parent's pidfd becomes readable. (A parent-death signal would come
when the *thread* that started this process ends; a pipe may stay open in a process that the parent has forked.) It
writes its counts to its standard output, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from array import array
from typing import Final

import attrs
import trio

from ..all_bytes import write_all
from .lookup import find_user, tells_users
from .relay import MAX_PENDING_HANDSHAKES, Counts, Relay

_OWN_DESCRIPTORS: Final = 32
_INTERVAL: Final = 1.0
"""Seconds between two reports."""
_INPUT: Final = 0
_OUTPUT: Final = 1


async def serve(server: str, kind: bytes, most: int, parent: int, any_user: bool) -> None:
    """Relay until the parent has ended.

    Args:
        server: the server's Unix socket.
        kind: type of the socket that listens there, ``ROUTER`` or ``PUB``.
        most: most connections at once.
        parent: the server's process.
        any_user: whether every user may connect.
    """
    try:
        alive = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() != parent:  # the parent had ended, and another process has its number
        return
    relay = Relay(
        server,
        kind=kind,
        most=min(most, (_descriptors() - MAX_PENDING_HANDSHAKES - _OWN_DESCRIPTORS) // 2),
        find_user=None if any_user or not tells_users() else find_user,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_report, relay.counts)
        nursery.start_soon(_listen, relay)
        await trio.lowlevel.wait_readable(alive)
        os._exit(0)  # the server is gone, and its successor needs the port


async def _listen(relay: Relay) -> None:
    """Request the port from the server, and accept connections there."""
    try:
        with trio.socket.fromfd(_INPUT, socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            await asking.send(b"?")
            _, attached, _, _ = await asking.recvmsg(1, socket.CMSG_SPACE(array("i").itemsize))
        [(_, _, listening)] = attached
    except (OSError, ValueError):  # the server has gone
        return
    sock = socket.socket(fileno=array("i", listening)[0])
    await relay.run(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))


def _descriptors() -> int:
    """Raise the limit of open descriptors, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


async def _report(counts: Counts) -> None:
    """Write the counts to the standard output whenever they have changed."""
    os.set_blocking(_OUTPUT, False)  # do not wait for a server that is stopped
    said: Counts | None = None
    while True:
        if counts != said:
            with contextlib.suppress(OSError):
                write_all(
                    _OUTPUT, json.dumps(attrs.asdict(counts)).encode() + b"\n"
                )  # a short line: a pipe takes it whole
                said = attrs.evolve(counts)
        await trio.sleep(_INTERVAL)


if __name__ == "__main__":
    _server, _kind, _most, _parent, _users = sys.argv[1:]
    trio.run(serve, _server, _kind.encode(), int(_most), int(_parent), _users == "anybody")
