"""Client of a status page, over TCP or a Unix socket."""

from __future__ import annotations

import http.client
import socket
from typing import Final

import msgspec

from ._view import StatusView

TIMEOUT: Final = 5.0
"""Seconds to wait for each answer of an engine."""
_decode: Final = msgspec.json.Decoder(StatusView).decode


class NoStatus(Exception):
    """No status page of a known version at an address."""


def fetch_view(address: str) -> StatusView:
    """Fetch the view of a status page.

    Blocks for at most ``TIMEOUT`` for each answer of the socket.

    Args:
        address: ``http://127.0.0.1:8080``, or ``unix:/path`` of a socket.

    Raises:
        ValueError: that is no address.
        NoStatus: nothing listens there, it does not answer, or its answer is no view.
    """
    connection = _connection(address)
    try:
        connection.request("GET", "/status", headers={"Host": "localhost"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise NoStatus(f"{address} answers with status {answer.status}: is it a status page?")
        return _decode(body)
    except (OSError, http.client.HTTPException) as error:
        raise NoStatus(f"no status page at {address}: {error}") from error
    except msgspec.DecodeError as error:
        raise NoStatus(f"{address} answers in a format that this version cannot read: {error}") from error
    finally:
        connection.close()


def _connection(address: str) -> http.client.HTTPConnection:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("/"):
        return _UnixConnection(rest)
    host, colon, port = rest.removeprefix("//").rstrip("/").rpartition(":")
    if kind != "http" or not colon or not port.isdecimal():
        raise ValueError(f"{address!r} is not an address: use http://127.0.0.1:8080, or unix:/path/of/a/socket")
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
