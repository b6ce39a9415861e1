"""Reports the daemon's state to systemd, if started with ``Type=notify``.

One datagram for each state.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Literal


def notify(state: Literal["READY", "RELOADING", "STOPPING"], status: str) -> None:
    """Send a state, without waiting, if a service manager asks.

    Never raises: it is a courtesy.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    lines = [f"{state}=1", f"STATUS={status}"]
    if state == "RELOADING":
        lines.append(f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto("\n".join(lines).encode(), f"\0{path[1:]}" if path.startswith("@") else path)
