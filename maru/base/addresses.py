"""Names in a page store's runtime directory, and of this host. Pure."""

from __future__ import annotations

from typing import Final

LOCK: Final = "maru.lock"
"""The lock of the server."""
IPC_NAME: Final = "maru.sock"
"""The Unix socket of the published protocol."""
CHANNEL_NAME: Final = "channel.sock"
"""The Unix socket of clients of ours on this host; they use it if it is there."""


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach a socket bound to ``host``. Nothing is resolved: only ``localhost`` is known."""
    return host in ("", "localhost", "::1", "[::1]") or (host.startswith("127.") and host.replace(".", "").isdigit())
