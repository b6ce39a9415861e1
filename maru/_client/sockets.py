"""How a client reaches its server: over the channel of a server on this host, where there is one, otherwise over ZeroMQ.

Rule 1. The channel is beside the Unix socket of ZeroMQ that ``server_url`` names, under a name of its own. Where that file is
        not, and ZeroMQ's is, the server has none: it speaks the published protocol only, wants CURVE keys, or is older.
Rule 2. A client that was told to use keys, or the published protocol, speaks ZeroMQ: what is asked for is not replaced by
        something else, even if that would do.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from .._config import MaruConfig
from ..base.addresses import CHANNEL_NAME, IPC_NAME
from ..base.errors import Shortage
from ..base.listeners import find_listener, find_unix_listener
from ..base.peers import Listener
from ..transport import BlockingChannel, open_channel

if TYPE_CHECKING:
    from ..transport import BlockingSocket, MessageSocket, OnLost, OnMessages, SocketOptions


def open_dealer(
    config: MaruConfig,
    on_messages: OnMessages,
    on_lost: OnLost = lambda unsent: None,
    on_shortage: Callable[[bytes, Shortage], object] = lambda frame, shortage: None,
) -> AbstractAsyncContextManager[MessageSocket]:
    """A trio socket to the server. A channel tells of a lost connection; ZeroMQ keeps that to itself."""
    channel = channel_path(config)
    if channel:
        return open_channel(channel, on_messages, on_lost, on_shortage)
    from ..transport import open_socket  # and with it ZeroMQ, which a client of this host does without

    return open_socket("dealer", connect=[config.server_url], options=options_of(config), on_messages=on_messages)


def blocking_dealer(config: MaruConfig) -> BlockingSocket:
    """A blocking socket to the server."""
    channel = channel_path(config)
    if channel:
        return BlockingChannel(channel)
    from ..transport import BlockingDealer

    return BlockingDealer(config.server_url, options_of(config))


def channel_path(config: MaruConfig) -> str:
    """The channel to talk to the server over; empty where ZeroMQ is to be used."""
    kind, _, path = config.server_url.partition("://")
    directory, name = os.path.split(path)
    if kind != "ipc" or name != IPC_NAME or config.curve_key_file or config.protocol == "published":
        return ""
    channel = f"{directory}/{CHANNEL_NAME}"
    # A server makes its channel before the socket of ZeroMQ. So where neither is, there is no server yet, and ours is to come.
    return channel if _is_socket(channel) or not _is_socket(path) else ""


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def identify(config: MaruConfig) -> Listener:
    """Who listens where this client talks to its server. Blocking, but briefly."""
    channel = channel_path(config)
    # The channel itself is asked: beside ZeroMQ's socket of this user there might be a channel of somebody else's.
    return find_unix_listener(channel, socket.SOCK_SEQPACKET) if channel else find_listener(config.server_url)


def options_of(config: MaruConfig) -> SocketOptions:
    """The server may be started later, or again: what is sent meanwhile waits for it, as long as its sender does.

    Raises:
        ConfigError: the key file is none, or others may read it.
        OSError: the key file cannot be read.
    """
    from ..transport import CurveClient, SocketOptions, load_key_pair

    if not config.curve_key_file:
        return SocketOptions()
    return SocketOptions(curve=CurveClient(config.curve_server_key, load_key_pair(config.curve_key_file)))
