"""Addresses of a server and options of its sockets, from its configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from .._config import ServerConfig
from ..base.addresses import IPC_NAME
from ..base.errors import ConfigError
from ..transport import CurveServer, SocketOptions, load_key_pair, load_public_keys

RELAYED_NAME: Final = "tcp.sock"
"""Unix socket to which connections without keys are relayed.

It is in the runtime directory, like the others.
"""
DESCRIPTORS_NAME: Final = "descriptors.sock"
"""Unix socket that hands out regions."""
EVENTS_NAME: Final = "kv-events.sock"
ANSWERS_NAME: Final = "kv-answers.sock"
_UNREAD_HERE: Final = 64
"""Unread messages of one client beyond which it waits.

A client has as many under way.
"""
_LONGEST_PATH: Final = 107
"""Most bytes of a Unix socket's name."""


def addresses(config: ServerConfig, runtime: str) -> list[str]:
    """Return the addresses of the server's ZeroMQ socket.

    It listens at TCP itself with keys only: without, no stranger may reach it, who could end it.

    Raises:
        ConfigError: the name of a Unix socket would be too long.
    """
    found = []
    if config.host and not config.relayed:
        found.append(f"tcp://{config.host}:{config.port or '*'}")
    if config.zmq_on_unix:
        found.append(_unix_address(runtime, IPC_NAME))
    if config.relayed:
        found.append(_unix_address(runtime, RELAYED_NAME))
    return found


def unix_address(config: ServerConfig, runtime: str) -> list[str]:
    """Return the address for clients on this host.

    ZeroMQ may not listen there: our clients use the channel next to it.

    Raises:
        ConfigError: the name of a Unix socket would be too long.
    """
    return [_unix_address(runtime, IPC_NAME)] if config.ipc else []


def event_addresses(config: ServerConfig, runtime: str) -> list[str]:
    """Return the addresses of KV events and of requests for missed ones.

    Empty if no events are published. Without keys only Unix sockets: a stranger at sockets over TCP could end the
    server (:func:`event_ports`).

    Raises:
        ConfigError: the name of a Unix socket would be too long.
    """
    if not config.kv_events:
        return []
    if config.kv_events == "ipc" or config.kv_events_relayed:
        return [_unix_address(runtime, EVENTS_NAME), _unix_address(runtime, ANSWERS_NAME)]
    host, _, second = event_ports(config)
    return [f"tcp://{config.kv_events}", f"tcp://{f'[{host}]' if ':' in host else host}:{second}"]


def event_ports(config: ServerConfig) -> tuple[str, int, int]:
    """Return host and ports of KV events over TCP.

    The second port is that of requests for missed events.
    """
    host, _, port = config.kv_events.rpartition(":")
    return host.strip("[]"), int(port), int(port) + 1


def _unix_address(runtime: str, name: str) -> str:
    path = f"{runtime}/{name}"
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError("runtime_dir", runtime, f"must be shorter: {path} has over {_LONGEST_PATH} bytes")
    return f"ipc://{path}"


def socket_options(config: ServerConfig) -> SocketOptions:
    """Return the bounds of the socket, and its keys.

    Raises:
        ConfigError: a key file holds none, or others may read the secret one.
        OSError: a key file cannot be read.
    """
    return SocketOptions(
        send_high_water_mark=config.high_water_mark,
        receive_high_water_mark=_UNREAD_HERE,
        max_unread_bytes=config.max_unread_bytes,
        max_unread_bytes_together=config.max_unread_bytes_together,
        max_message_bytes=config.max_message_bytes,
        linger=config.linger,
        curve=_curve(config),
    )


def unlink_sockets(endpoints: Iterable[str]) -> None:
    """Remove the Unix sockets, which ZeroMQ leaves.

    Call it while the pool is locked, so that they are not a successor's.
    """
    for endpoint in endpoints:
        if endpoint.startswith("ipc://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(endpoint.removeprefix("ipc://"))


def _curve(config: ServerConfig) -> CurveServer | None:
    if not config.curve_key_file:
        return None
    clients = load_public_keys(config.curve_clients_file) if config.curve_clients_file else None
    return CurveServer(load_key_pair(config.curve_key_file), clients)
