"""Listening for TCP, as all of the server does it."""

from __future__ import annotations

import errno
import ipaddress
from typing import Final

import trio

_BACKLOG: Final = 512
_LAST_BREATH: Final = 1.0
"""Seconds after which a port is another server's. It takes milliseconds."""


async def open_listener(host: str, port: int) -> trio.SocketListener:
    """Listen at one address. Cancelled, nothing listens.

    The relay of a server that was killed has the port for as long as it takes to see that: it is waited for.

    Args:
        host: a name or an address; ``*`` for all that this host has.
        port: 0 for any that is free.

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
    """``host:port`` of what listens."""
    host, port = listener.socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(listener: trio.SocketListener) -> bool:
    """Whether only this host can reach it."""
    return ipaddress.ip_address(listener.socket.getsockname()[0]).is_loopback


def _bindable(host: str) -> str:
    """As the operating system takes a host that ZeroMQ takes."""
    return "0.0.0.0" if host == "*" else host.strip("[]")
