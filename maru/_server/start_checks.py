"""Checks of whether a server would start, and with which losses.

``maru doctor`` runs them.

Rule 1. Each check calls the server's own function, or raises the same error: both use the same words. A loss that does
        not keep a server from starting is a finding as well.
Rule 2. Nothing is changed. A directory that had to be made for a check, a port, a device's lock are released at once.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import trio

from .._config import ServerConfig, default_pool_path
from .._directory.lazy_order import LazyOrder
from .._journal.recovery import foresee
from .._pool.pool import check_pool
from .._pool.state_directory import ID_BYTES, check_private, identity_of
from ..base.addresses import CHANNEL_NAME
from ..base.errors import MaruError
from ..base.packets import check_socket
from ..base.relay.tcp import open_listener
from ..base.threads import run_in_thread
from ..transport import check_free
from .endpoints import DESCRIPTORS_NAME, addresses, event_addresses, socket_options, unix_address
from .storage import limits_of


class Refusal(NamedTuple):
    """An error that would keep a server from starting, or a loss."""

    what: str
    """Name of the check, such as ``start: pool``."""
    text: str
    """Message that the server would log."""
    way_out: str
    """Advice for the operator."""
    refuses: bool = True
    """Whether it keeps a server from starting; otherwise a start loses data."""


async def refusals(config: ServerConfig, *, is_served: bool = False) -> list[Refusal]:
    """Find all errors and losses of a start, in the server's order.

    Args:
        config: valid in itself.
        is_served: a server has this pool already. Then only checks whose result does not change meanwhile are run.
    """
    found = []
    for what, check, way_out in _CHECKS:
        if is_served and check is not _check_keys:
            continue
        try:
            loss = await check(config)
        except (MaruError, OSError) as exc:
            found.append(Refusal(what, str(exc), way_out))
        else:
            if loss:
                found.append(Refusal(what, loss, _WAY_OUT_OF_LOSS, refuses=False))
    return found


def _home(config: ServerConfig) -> str:
    return config.pool_path or default_pool_path()


async def _check_pool(config: ServerConfig) -> None:
    def check() -> None:
        check_pool(config.dax_path or _home(config), config.capacity_bytes or None, home=_home(config))

    await run_in_thread(check)


async def _check_journal(config: ServerConfig) -> str:
    home = _home(config)

    def check() -> str:
        if not config.journal or not os.path.isdir(home):
            return ""
        # A pool whose identity is lost or damaged gets a new one, to which an existing journal does not belong.
        pool_id = identity_of(home) or secrets.token_bytes(ID_BYTES)
        return str(foresee(os.path.realpath(home), pool_id, limits_of(config), LazyOrder().policy))

    return await run_in_thread(check)


async def _check_keys(config: ServerConfig) -> None:
    await trio.lowlevel.checkpoint()
    socket_options(config)


async def _check_sockets(config: ServerConfig) -> None:
    def check() -> None:
        runtime = os.path.realpath(config.runtime_dir or _home(config))
        if config.runtime_dir:
            check_private(runtime)
        for place in (*addresses(config, runtime), *event_addresses(config, runtime)):
            if place.startswith("ipc://"):
                check_free(place.removeprefix("ipc://"))
        unix_address(config, runtime)
        for name in (DESCRIPTORS_NAME, CHANNEL_NAME):
            check_socket(f"{runtime}/{name}")
        check_free(f"{runtime}/{CHANNEL_NAME}", socket.SOCK_SEQPACKET)

    await run_in_thread(check)


async def _check_tcp(config: ServerConfig) -> None:
    await trio.lowlevel.checkpoint()
    if config.host:
        await (await open_listener(config.host, config.port)).aclose()
    for place in event_addresses(config, ""):
        if place.startswith("tcp://"):
            host, _, port = place.removeprefix("tcp://").rpartition(":")
            await (await open_listener(host.strip("[]"), int(port))).aclose()


async def _check_resource_manager(config: ServerConfig) -> None:
    await trio.lowlevel.checkpoint()
    if config.rm_host:
        await (await open_listener(config.rm_host, config.rm_port)).aclose()


_WAY_OUT_OF_LOSS: Final = (
    "put back what is damaged or missing from a copy before a start, which sets it aside as lost.*"
)
_CHECKS: tuple[tuple[str, Callable[[ServerConfig], Awaitable[str | None]], str], ...] = (
    ("start: pool", _check_pool, "correct pool_path or dax_path, or end the server that has it"),
    ("start: journal", _check_journal, "another pool_path, or the way out in the message"),
    ("start: keys", _check_keys, "correct curve_key_file and curve_clients_file"),
    ("start: sockets", _check_sockets, "another runtime_dir, or end the server that has it"),
    ("start: TCP", _check_tcp, "another port or host, or end the process that has it"),
    ("start: resource manager", _check_resource_manager, "another rm_address, or port 0 in it"),
)
