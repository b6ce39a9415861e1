"""The handshake of ZMTP 3 with the NULL mechanism. Pure.

Bytes go in and come out. A peer sends a *greeting* of 64 bytes and then a READY command with properties. Only its
socket type is read here; its other properties are not forwarded, least of all its routing id: libzmq lets a peer claim
the id that its ROUTER is about to give to another one, and ends the process when it gets there.

Rule 1. Reading is bounded: a greeting, and a READY of :data:`MAX_READY_BYTES`. The first byte that cannot be right ends
        the handshake.
Rule 2. Nothing that the peer sent is forwarded: :func:`greeting` and :func:`ready` build new bytes.
Rule 3. Bytes after READY are kept unchanged, for the relay.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

GREETING_BYTES: Final = 64
MAX_READY_BYTES: Final = 2_048
"""Most bytes of a peer's properties.

Its socket type, a routing id of at most 255 bytes, and an application's own.
"""

_SIGNATURE: Final = b"\xff\0\0\0\0\0\0\0\x01\x7f"
_FIRST, _LAST, _MAJOR, _MINOR = 0, 9, 10, 11
_MECHANISM: Final = slice(12, 32)
_COMMAND, _LONG_COMMAND = 0x04, 0x06
_SOCKET_TYPE: Final = b"socket-type"


class BadHandshake(Exception):
    """The peer's handshake is invalid, or its socket type is refused.

    It must speak ZMTP 3 with the NULL mechanism.
    """


@attrs.frozen
class Introduction:
    """The result of a handshake."""

    socket_type: bytes
    """``REQ`` or ``DEALER`` of a client, ``ROUTER`` of a server."""
    minor: int
    """Minor version: 3.0 or 3.1."""
    rest: bytes
    """Bytes received after the handshake."""


class Handshake:
    """A parser of one peer's handshake, however it is cut into pieces."""

    def __init__(self, socket_types: Collection[bytes]) -> None:
        """Expect a peer with one of these socket types."""
        self._socket_types = socket_types
        self._buffer = bytearray()

    def receive(self, data: bytes) -> Introduction | None:
        """Parse more bytes. Returns the result once it is complete.

        Raises:
            BadHandshake: the bytes are not a valid handshake; nothing more must be read from this peer.
        """
        self._buffer += data
        _check_greeting(self._buffer)
        body = _ready_in(self._buffer)
        if body is None:
            return None
        socket_type = _socket_type(bytes(self._buffer[body]))
        if socket_type not in self._socket_types:
            raise BadHandshake(f"a socket of type {socket_type!r}")
        minor = 1 if self._buffer[_MAJOR] > 3 else min(self._buffer[_MINOR], 1)
        return Introduction(socket_type, minor, bytes(self._buffer[body.stop :]))


def greeting(minor: int = 1) -> bytes:
    """Return the first 64 bytes of either end: ZMTP 3, no keys."""
    return (_SIGNATURE + bytes([3, minor]) + b"NULL").ljust(GREETING_BYTES, b"\0")


def ready(socket_type: bytes) -> bytes:
    """Return the READY command of a socket with an empty identity."""
    body = b"\x05READY" + _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    return bytes([_COMMAND, len(body)]) + body


# --- reading ------------------------------------------------------------------------------------------------------


def _check_greeting(said: bytearray) -> None:
    """Check the part of the greeting that has been received."""
    if (said and said[_FIRST] != 0xFF) or (len(said) > _LAST and said[_LAST] != 0x7F):
        raise BadHandshake("not a greeting of ZMTP")
    if len(said) > _MAJOR and said[_MAJOR] < 3:
        raise BadHandshake(f"version {said[_MAJOR]} of ZMTP, which has no READY")
    if len(said) >= _MECHANISM.stop and said[_MECHANISM] != b"NULL".ljust(20, b"\0"):
        raise BadHandshake("a mechanism other than NULL")


def _ready_in(said: bytearray) -> slice | None:
    """Return the place of the READY body once it is complete."""
    if len(said) <= GREETING_BYTES:
        return None
    flags = said[GREETING_BYTES]
    if flags not in (_COMMAND, _LONG_COMMAND):
        raise BadHandshake("something other than READY")
    begin = GREETING_BYTES + (2 if flags == _COMMAND else 9)
    if len(said) < begin:
        return None
    size = int.from_bytes(said[GREETING_BYTES + 1 : begin])
    if size > MAX_READY_BYTES:
        raise BadHandshake(f"a READY of {size} bytes")
    return slice(begin, begin + size) if len(said) >= begin + size else None


def _socket_type(body: bytes) -> bytes:
    """Return the socket type that a READY body names."""
    name, rest = _take(body, 1)
    if name != b"READY":
        raise BadHandshake("a command other than READY")
    found = []
    while rest:
        name, rest = _take(rest, 1)
        value, rest = _take(rest, 4)
        if name.lower() == _SOCKET_TYPE:
            found.append(value)
    if len(found) != 1:
        raise BadHandshake(f"{len(found)} socket types instead of one")
    return found[0]


def _take(body: bytes, prefix: int) -> tuple[bytes, bytes]:
    """Split off a text whose length precedes it in ``prefix`` bytes.

    Returns the text and the rest.
    """
    end = prefix + int.from_bytes(body[:prefix])
    if len(body) < max(prefix, end):
        raise BadHandshake("a truncated READY")
    return body[prefix:end], body[end:]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value
