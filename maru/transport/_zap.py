"""Authentication of CURVE clients at each handshake, by a task.

ZeroMQ sends the requests, within the process. The protocol is ZAP 1.0 (https://rfc.zeromq.org/spec/27/). While the
event loop is blocked no new client is accepted; a handshake that waits longer than ``handshake_timeout`` is dropped and
tried again by its client.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

import trio
import zmq
from zmq.utils import z85

from ._frames import EVENTS, IN, Port, TooManyFrames
from ._options import SocketOptions

_ADDRESS: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"maru"
_REQUEST_FRAMES: Final = 9
_KEY_BYTES: Final = 32
_LOG_INTERVAL: Final = 10.0
"""Seconds between two log lines about refused clients.

They may try again any number of times.
"""

_log = logging.getLogger(__name__)


class Authenticator:
    """Authenticator of one context, which admits the listed public keys."""

    def __init__(self, port: Port, clients: Collection[bytes]) -> None:
        self._keys = {z85.decode(key): key for key in clients}
        # Fail closed: while nothing answers, because this is not running yet or has ended, ZeroMQ accepts no
        # connection.
        port.raw.set(zmq.ZAP_DOMAIN, _DOMAIN)
        port.raw.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._port = Port("router", SocketOptions(), port.context)
        self._port.raw.bind(_ADDRESS)
        self.refused = 0
        self._said_at = -_LOG_INTERVAL

    def close(self) -> None:
        """Stop answering."""
        if not self._port.raw.closed:
            trio.lowlevel.notify_closing(self._port.descriptor)
            self._port.close()

    async def run(self) -> None:
        """Answer until closed."""
        port = self._port
        while True:
            while not port.raw.closed and port.get(EVENTS) & IN:
                try:
                    request = port.read()
                except TooManyFrames:  # pragma: no cover - the library itself sends the requests
                    continue
                port.write(self._answer(request))
            if port.raw.closed:
                return
            try:
                await trio.lowlevel.wait_readable(port.descriptor)
            except trio.ClosedResourceError:
                return

    def _answer(self, request: list[bytes]) -> list[bytes]:
        asker, delimiter, version, request_id, _domain, address, _identity, mechanism, key = request[:_REQUEST_FRAMES]
        user = self._keys.get(key) if mechanism == b"CURVE" else None
        if user is None:
            self.refused += 1
            self._say(address, key)
            return [asker, delimiter, version, request_id, b"400", b"this key is not on the list", b"", b""]
        return [asker, delimiter, version, request_id, b"200", b"OK", user, b""]

    def _say(self, address: bytes, key: bytes) -> None:
        """Log the unknown public key, so that it can be added."""
        now = trio.current_time()
        if now - self._said_at < _LOG_INTERVAL:
            return
        self._said_at = now
        shown = z85.encode(key).decode() if len(key) == _KEY_BYTES else "none"
        _log.warning(
            "%d CURVE clients were refused until now, the last one from %s: its public key, %s, is not on the list",
            self.refused, address.decode(errors="replace") or "a Unix socket", shown,
        )  # fmt: skip
