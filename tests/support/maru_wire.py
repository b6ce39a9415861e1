"""A wire between clients and a server that a test can hold, cut and listen to: a TCP relay in a thread."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

from tests.support.maru_processes import PATIENCE


class Link:
    """One connection through the wire."""

    def __init__(self, client: socket.socket, server: socket.socket):
        self.client, self.server = client, server
        self.up = self.down = 0
        """Bytes that came from the client, and from the server; held ones included."""
        self.up_held = self.down_held = False
        self._waiting_up = self._waiting_down = b""

    def flush(self) -> None:
        if not self.up_held and self._waiting_up:
            self.server.sendall(self._waiting_up)
            self._waiting_up = b""
        if not self.down_held and self._waiting_down:
            self.client.sendall(self._waiting_down)
            self._waiting_down = b""

    def came(self, at: socket.socket) -> bool:
        """Take what has come there; whether the connection goes on."""
        try:
            data = at.recv(1 << 16)
        except OSError:
            return False
        if not data:
            return False
        if at is self.client:
            self.up += len(data)
            self._waiting_up += data
        else:
            self.down += len(data)
            self._waiting_down += data
        return True


class Wire:
    """Relays to ``target`` (``tcp://host:port`` or ``ipc://path``). A context manager; the thread ends with it."""

    def __init__(self, target: str):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.links: list[Link] = []
        self._lock = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the wire does not end"
        self._listener.close()
        for link in list(self.links):
            self._end(link)

    # --- what a test does -----------------------------------------------------------------------------------------

    def hold(self, link: Link, *, up: bool = False, down: bool = False) -> None:
        """From now on nothing goes that way. It is kept."""
        with self._lock:
            link.up_held, link.down_held = up, down

    def let_go(self, link: Link) -> None:
        """What was held goes, and whatever follows."""
        with self._lock:
            link.up_held = link.down_held = False
            with contextlib.suppress(OSError):
                link.flush()

    def cut(self) -> None:
        """End every connection, with what it holds."""
        with self._lock:
            for link in list(self.links):
                self._end(link)

    def wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, "nothing comes over the wire"
            time.sleep(0.002)

    # --- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                ends = {end: link for link in self.links for end in (link.client, link.server)}
            try:
                readable, _, _ = select.select([self._listener, *ends], [], [], 0.02)
            except (OSError, ValueError):  # one was cut meanwhile
                continue
            with self._lock:
                for end in readable:
                    if end is self._listener:
                        self._accept()
                    elif ends[end] in self.links:
                        self._relay(ends[end], end)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = _connect(self._target)
        except OSError:
            client.close()
            return
        for end in (client, server):
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links.append(Link(client, server))

    def _relay(self, link: Link, end: socket.socket) -> None:
        try:
            goes_on = link.came(end)
            link.flush()
        except OSError:
            goes_on = False
        if not goes_on:
            self._end(link)

    def _end(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)
        link.client.close()
        link.server.close()


def _connect(target: str) -> socket.socket:
    kind, _, where = target.partition("://")
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    try:
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection
