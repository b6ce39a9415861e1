"""File names in a page store's runtime directory, and loopback addresses. Pure."""

from __future__ import annotations

from typing import Final

LOCK: Final = "maru.lock"
"""Lock file of the server."""
IPC_NAME: Final = "maru.sock"
"""The Unix socket of the published protocol."""
CHANNEL_NAME: Final = "channel.sock"
"""Unix socket for our own clients on this host.

A client prefers it to TCP if it exists.
"""


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach a socket bound to ``host``.

    Nothing is resolved: ``localhost`` is the only known name.
    """
    return host in ("", "localhost", "::1", "[::1]") or (host.startswith("127.") and host.replace(".", "").isdigit())
