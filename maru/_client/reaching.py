"""How a client reaches its server: the sockets that its configuration asks for."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from .._config import MaruConfig
from .._listeners import find_listener
from .._peers import Listener
from ..transport import (
    BlockingDealer,
    CurveClient,
    MessageSocket,
    OnMessages,
    SocketOptions,
    load_key_pair,
    open_socket,
)


def open_dealer(config: MaruConfig, on_messages: OnMessages) -> AbstractAsyncContextManager[MessageSocket]:
    """A trio socket to the server."""
    return open_socket("dealer", connect=[config.server_url], options=options_of(config), on_messages=on_messages)


def blocking_dealer(config: MaruConfig) -> BlockingDealer:
    """A blocking socket to the server."""
    return BlockingDealer(config.server_url, options_of(config))


def identify(config: MaruConfig) -> Listener:
    """Who listens at the server's address. Blocking, but briefly."""
    return find_listener(config.server_url)


def options_of(config: MaruConfig) -> SocketOptions:
    """The server may be started later, or again: what is sent meanwhile waits for it, as long as its sender does.

    Raises:
        ConfigError: the key file is none, or others may read it.
        OSError: the key file cannot be read.
    """
    if not config.curve_key_file:
        return SocketOptions()
    return SocketOptions(curve=CurveClient(config.curve_server_key, load_key_pair(config.curve_key_file)))
