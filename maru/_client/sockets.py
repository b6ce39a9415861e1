"""Sockets of a client: a local server's channel, or ZeroMQ.

Rule 1. The channel is next to the Unix socket of ZeroMQ that ``server_url`` names, under a name of its own. If that
        file is missing, and ZeroMQ's is there, the server has no channel: it speaks the published protocol only, wants
        CURVE keys, or is older.
Rule 2. A client that is configured for keys, or for the published protocol, speaks ZeroMQ: its choice is not replaced
        by another, even if that would do.
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
    """Open a trio socket to the server.

    A channel reports a lost connection; ZeroMQ does not.
    """
    channel = channel_path(config)
    if channel:
        return open_channel(channel, on_messages, on_lost, on_shortage)
    from ..transport import open_socket  # imports ZeroMQ, which a client on this host does without

    return open_socket("dealer", connect=[config.server_url], options=options_of(config), on_messages=on_messages)


def blocking_dealer(config: MaruConfig) -> BlockingSocket:
    """Open a blocking socket to the server."""
    channel = channel_path(config)
    if channel:
        return BlockingChannel(channel)
    from ..transport import BlockingDealer

    return BlockingDealer(config.server_url, options_of(config))


def channel_path(config: MaruConfig) -> str:
    """Return the path of the server's channel; empty for ZeroMQ."""
    kind, _, path = config.server_url.partition("://")
    directory, name = os.path.split(path)
    if kind != "ipc" or name != IPC_NAME or config.curve_key_file or config.protocol == "published":
        return ""
    channel = f"{directory}/{CHANNEL_NAME}"
    # A server makes its channel before the socket of ZeroMQ. So if neither is there, there is no server yet, and ours
    # is to come.
    return channel if _is_socket(channel) or not _is_socket(path) else ""


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def identify(config: MaruConfig) -> Listener:
    """Find the process that listens at the server's address. Blocking, but briefly."""
    channel = channel_path(config)
    # The channel itself is asked: next to ZeroMQ's socket of this user there might be a channel of another user.
    return find_unix_listener(channel, socket.SOCK_SEQPACKET) if channel else find_listener(config.server_url)


def options_of(config: MaruConfig) -> SocketOptions:
    """Return the options of a ZeroMQ socket to the server.

    The server may be started later, or again: frames sent meanwhile wait for it, as long as their senders do.

    Raises:
        ConfigError: the key file is none, or others may read it.
        OSError: the key file cannot be read.
    """
    from ..transport import CurveClient, SocketOptions, load_key_pair

    if not config.curve_key_file:
        return SocketOptions()
    return SocketOptions(curve=CurveClient(config.curve_server_key, load_key_pair(config.curve_key_file)))
