"""Asking the kernel whose connections come in over TCP; see :mod:`maru._relay.users` for what its answers mean."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs
import trio

from .users import TABLES, connections, user_of

FindUser: TypeAlias = Callable[[trio.SocketStream], Awaitable[int | None]]
"""The user at the other end; None for nobody's."""


_log = logging.getLogger(__name__)


def may_enter(user: int | None) -> bool:
    """Whether a user of this host may: this process's, and root, who may do all of it anyway."""
    return user in (os.geteuid(), 0)


class Users:
    """Finds the users of connections, many at a time: the kernel's tables are long, and read once for all that wait."""

    def __init__(self) -> None:
        self._asked = trio.Event()
        self._waiting: list[_Question] = []

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            waiting, self._waiting = self._waiting, []
            try:
                table = await trio.to_thread.run_sync(_read_tables)
            except OSError as exc:  # no descriptor is left, say: then nobody is known, and nobody new comes in
                _log.warning("the kernel's tables of connections cannot be read: %s", exc)
                table = {}
            for question in waiting:
                question.table = table
                question.answered.set()

    async def find(self, stream: trio.SocketStream) -> int | None:
        """The user at the other end of this connection; None for nobody's.

        Raises:
            OSError: it is gone.
        """
        local, remote = stream.socket.getsockname(), stream.socket.getpeername()
        question = _Question()
        self._waiting.append(question)
        self._asked.set()
        await question.answered.wait()
        return user_of(question.table, local[:2], remote[:2])


@attrs.define(eq=False)
class _Question:
    answered: trio.Event = attrs.Factory(trio.Event)
    table: dict[tuple[bytes, bytes], int] = attrs.Factory(dict)


def _read_tables() -> dict[tuple[bytes, bytes], int]:
    """Blocking.

    Raises:
        OSError: the kernel does not tell.
    """
    found = []
    for path in TABLES:
        if os.path.exists(path):  # a kernel without IPv6
            with open(path, "rb") as file:
                found.append(file.read())
    return connections(found)


def tells_users() -> bool:
    """Whether the kernel tells whose connections are whose."""
    return os.access(TABLES[0], os.R_OK)
