"""Opening an engine whose only tier is a daemon."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from backends.abc import Source

from .._engine import Engine, open_engine
from .._engine.config import DAEMON
from ._tier import DaemonTier


def open_client(
    source: Source, url: str = "", *, name: str = "", credential: str = "", **options: Any
) -> AbstractAsyncContextManager[Engine]:
    """Open an engine that stores into a daemon and loads from it.

    It is :func:`offload.open_engine` with one tier, ``daemon``, and so the same engine, for the length of an ``async
    with`` block. The daemon itself looks for the blocks that it has already, so it is not asked before each store.

    Args:
        source: the place from which blocks are stored: a :class:`~backends.device.DeviceTier` over
            :class:`SharedMemory` or a CUDA device is copied in place, any other by way of a staging area.
        url: ``ipc://PATH`` of the daemon's socket; by default that of this user's daemon.
        name: of this engine, for the daemon's log.
        credential: identifies the tenant, if the daemon has tenants.
        options: those of :func:`offload.open_engine`.
    """
    tier = DaemonTier(url, block_bytes=source.block_bytes, name=name, credential=credential)
    return open_engine(source, {DAEMON: tier}, **options)
