"""The published protocols as bytes, for the published actors: written from the specification, with struct and msgpack."""

from __future__ import annotations

import enum
import socket
import struct
from typing import Any

import msgspec

TIMEOUT = 30.0
"""Seconds after which an answer that must come will not: far more than a busy machine takes. A test of silence says less."""
IN_FLIGHT = 64


class Ask(enum.IntEnum):
    """What the metadata server is asked for."""

    REQUEST_ALLOC = 0x01
    RETURN_ALLOC = 0x03
    LIST_ALLOCATIONS = 0x04
    REGISTER_KV = 0x10
    LOOKUP_KV = 0x11
    EXISTS_KV = 0x12
    DELETE_KV = 0x13
    PIN_KV = 0x14
    UNPIN_KV = 0x15
    BATCH_REGISTER_KV = 0x20
    BATCH_LOOKUP_KV = 0x21
    BATCH_EXISTS_KV = 0x22
    BATCH_PIN_KV = 0x23
    BATCH_UNPIN_KV = 0x24
    GET_STATS = 0xF0
    HEARTBEAT = 0xF1
    REPORT_STATS = 0xF2
    GET_USAGE = 0xF3
    HANDSHAKE = 0xFE
    SHUTDOWN = 0xFF


HEADER = struct.Struct("!HBBBBBBII")


def pack(code: int, sequence: int, body: dict[str, Any]) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    return HEADER.pack(0xCF00, 1, code, 0, 0, 0, 0, sequence, len(encoded)) + encoded


def unpack(frame: bytes) -> tuple[int, int, dict[str, Any]]:
    """Code, sequence and body. Raises ValueError or msgspec's errors for anything else."""
    if len(frame) < 16:
        raise ValueError("short")
    magic, version, code, _, _, _, _, sequence, length = HEADER.unpack_from(frame)
    if (magic, version) != (0xCF00, 1) or len(frame) < 16 + length:
        raise ValueError("header")
    return code, sequence, msgspec.msgpack.decode(frame[16 : 16 + length], type=dict[str, Any])


# --- the resource manager's protocol ---

IPC_HEADER = struct.Struct("<IHHI")
IPC_MAGIC = 0x4D415255


class Ipc(enum.IntEnum):
    """The types of the resource manager's messages."""

    ALLOC_REQ = 1
    ALLOC_RESP = 2
    FREE_REQ = 3
    FREE_RESP = 4
    STATS_REQ = 5
    STATS_RESP = 6
    GET_ACCESS_REQ = 9
    GET_ACCESS_RESP = 10
    ERROR_RESP = 255


class IpcError(Exception):
    """The resource manager answered with ERROR_RESP. Arguments: status and message."""


def receive(connection: socket.socket, n: int) -> bytes:
    received = b""
    while len(received) < n:
        more = connection.recv(n - len(received))
        if not more:
            raise ConnectionError("the other side has hung up")
        received += more
    return received


def short(encoded: bytes) -> bytes:
    return struct.pack("<H", len(encoded)) + encoded


def long(encoded: bytes) -> bytes:
    return struct.pack("<I", len(encoded)) + encoded


def handle_of(body: dict[str, int]) -> bytes:
    return struct.pack("<4Q", body["region_id"], body["offset"], body["length"], body["auth_token"])
