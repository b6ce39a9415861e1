"""TCP listening sockets, for every part of the server."""

from __future__ import annotations

import errno
import ipaddress
from typing import Final

import trio

_BACKLOG: Final = 512
_LAST_BREATH: Final = 1.0
"""Seconds after which a port counts as another server's.

A dead server's relay releases it within milliseconds.
"""


async def open_listener(host: str, port: int) -> trio.SocketListener:
    """Listen at one address. If cancelled, nothing listens.

    The relay of a killed server has the port until it notices the server's end: this waits for it.

    Args:
        host: a name or an address; ``*`` for all addresses of this host.
        port: 0 for any free port.

    Raises:
        OSError: it cannot listen there; the text names the address.
    """
    deadline = trio.current_time() + _LAST_BREATH
    while True:
        try:
            listeners = await trio.open_tcp_listeners(port, host=_bindable(host), backlog=_BACKLOG)
            break
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or trio.current_time() > deadline:
                raise OSError(exc.errno, f"cannot listen at tcp://{host}:{port}: {exc.strerror or exc}") from exc
            await trio.sleep(_LAST_BREATH / 50)
    for other in listeners[1:]:  # `localhost` may be two addresses; with any port, they would have two ports
        await other.aclose()
    return listeners[0]


def address_of(listener: trio.SocketListener) -> str:
    """Return the address of a listener, as ``host:port``."""
    host, port = listener.socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(listener: trio.SocketListener) -> bool:
    """Return whether only this host can reach a listener."""
    return ipaddress.ip_address(listener.socket.getsockname()[0]).is_loopback


def _bindable(host: str) -> str:
    """Convert a host in ZeroMQ's notation to the operating system's."""
    return "0.0.0.0" if host == "*" else host.strip("[]")
