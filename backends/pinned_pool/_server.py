"""The server: keeps a pool of pinned memory for each client that is connected.

Rule 1. A session is a connection. Its pool and blocks are there as long as it is, whatever ended it.
Rule 2. Bad input costs its sender the session at most. Everything a client can make grow has a bound.
Rule 3. It listens on this host alone unless told ``insecure``: nobody is asked who they are. A pool's descriptor is handed out
        to this user's processes only, and only for the session's own pool.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from maru._errors import CannotMap, PoolUnusable
from maru._pool.backing import RegionFile
from maru._pool.descriptors import DescriptorRequest, DescriptorServer
from maru._pool.state_directory import open_private
from maru._pool.threads import Workers

from ._config import PinnedPoolConfig
from ._errors import PoolRefused, PoolUnreachable
from ._memory import PoolMemory
from ._session import Session
from ._table import ChunkTable

_THREADS: Final = 4
"""For making and removing pools, which is moments for each GiB. Nothing else blocks."""
_DRAIN: Final = 0.5
"""Seconds that the end waits for pools that are being removed. A process that ends removes them anyway."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A client whose host has vanished is noticed after a minute; a process that has ended is noticed at once."""

_log = logging.getLogger(__name__)


@attrs.frozen
class PinnedPoolStatistics:
    """A snapshot of a server. Counters count from its start."""

    clients: int
    """Connected now."""
    pools: int
    """Of them, that have a pool."""
    chunks: int
    """In all."""
    chunks_left: int
    """In no pool."""
    turned_away: int
    """Connections closed at once: too many."""
    bad: int
    """Connections that ended because of what they sent."""


class PinnedPoolServer:
    """A running server. Made by :func:`open_server` and :func:`serve`; belongs to one trio run."""

    def __init__(self, config: PinnedPoolConfig, make_memory: Callable[..., PoolMemory]) -> None:
        """Not to be called: see :func:`open_server`."""
        self.config: Final = config
        self.host: str = config.host
        self.port: int = config.port
        """Where it listens: the real one."""
        self.descriptors_path: str = ""
        """The Unix socket that hands out pools to this host's clients; empty where there is none."""
        self.table: Final = ChunkTable(config.total_chunks, config.chunk_size)
        self.workers: Final = Workers(_THREADS)
        self._make_memory = make_memory
        self._sessions: dict[int, Session] = {}
        self._next_client = 0
        self._turned_away = self._bad = 0

    def __repr__(self) -> str:
        return f"<PinnedPoolServer at {self.host}:{self.port}, {len(self._sessions)} clients>"

    def statistics(self) -> PinnedPoolStatistics:
        """An immutable snapshot."""
        table = self.table
        return PinnedPoolStatistics(
            len(self._sessions), table.clients, table.chunks, table.left, self._turned_away, self._bad
        )

    # --- what sessions need -----------------------------------------------------------------------------------------

    async def make_memory(self, nbytes: int) -> PoolMemory:
        """Memory for a pool. Cancelled, nothing stays behind.

        Raises:
            PoolRefused: there is none, or it cannot be pinned as it was to be.
        """
        return await self.workers.make(
            lambda go_on: self._make_memory(nbytes, self.config.pin, go_on), lambda memory: memory.close()
        )

    # --- what descriptors need --------------------------------------------------------------------------------------

    def find(self, region_id: int) -> RegionFile | None:
        """The pool of this client."""
        session = self._sessions.get(region_id)
        if session is None or session.memory is None:
            return None
        return RegionFile(region_id, session.memory.nbytes, "", 0)

    async def open_fd(self, region_id: int, write: bool) -> int:
        """A new descriptor of this client's pool.

        Raises:
            CannotMap: it has none.
        """
        await trio.lowlevel.checkpoint()
        session = self._sessions.get(region_id)
        if session is None or session.memory is None:
            raise CannotMap("this client has no pool")
        try:
            return session.memory.open_fd()
        except (PoolRefused, OSError) as exc:
            raise CannotMap(str(exc)) from exc

    def permits(self, request: DescriptorRequest) -> bool:
        """Whether this is the token of the session whose pool is asked for."""
        session = self._sessions.get(request.region_id)
        return session is not None and hmac.compare_digest(session.token, request.session)

    # --- below ------------------------------------------------------------------------------------------------------

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends."""
        if len(self._sessions) >= self.config.max_clients:
            self._turned_away += 1
            return
        client, self._next_client = self._next_client, self._next_client + 1
        session = self._sessions[client] = Session(self, client, stream.socket)
        try:
            _keep_alive(stream.socket)
            await session.run()
        except OSError as exc:
            _log.debug("client %d has gone: %s", client, exc)
        except Exception:  # ours, and not to be paid by the other clients
            _log.exception("the session of client %d has failed", client)
        finally:
            self._bad += session.bad
            memory, session.memory = session.memory, None
            del self._sessions[client]  # from here on nobody gets its descriptor
            try:
                if memory is not None:
                    # In a thread: to unmap a GiB takes a tenth of a second. Cancelled, it is done all the same.
                    await self.workers.do(memory.close)
            finally:
                chunks = self.table.close_pool(client)
                if chunks:
                    _log.info("%s has gone, and %d chunks with it", session, chunks)


@asynccontextmanager
async def open_server(
    config: PinnedPoolConfig | None = None, *, make_memory: Callable[..., PoolMemory] = PoolMemory, **knobs: Any
) -> AsyncIterator[PinnedPoolServer]:
    """A server for as long as the block lasts. When it is left, every session has ended and every pool is gone.

    Args:
        config: what can be set; or else
        make_memory: makes a pool's memory; a stand-in for tests.
        knobs: those of :class:`~backends.pinned_pool.PinnedPoolConfig`, one by one.

    Raises:
        PinnedPoolConfigError: a knob is set to what it cannot be.
        PoolUnreachable: it cannot listen where it should.
    """
    config = PinnedPoolConfig(**knobs) if config is None else attrs.evolve(config, **knobs)
    server = PinnedPoolServer(config, make_memory)
    listeners = await _listen(config)
    server.host, server.port = listeners[0].socket.getsockname()[:2]
    if config.insecure:
        _log.warning("listening on %s without asking anybody who they are (insecure)", server.host)
    try:
        directory = _directory(config)
        async with trio.open_nursery() as nursery:
            if directory:
                path = os.path.join(directory, f"{server.host.replace(':', '_')}-{server.port}.sock")
                handing = DescriptorServer(server, server.permits, max_connections=config.max_clients)
                server.descriptors_path = await nursery.start(handing.run, path)
            nursery.start_soon(functools.partial(trio.serve_listeners, server.handle, listeners))
            try:
                yield server
            finally:
                nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.socket.close()
        with trio.move_on_after(_DRAIN, shield=True):
            await server.workers.wait_idle()


async def serve(
    host: str = "127.0.0.1",
    port: int = 8073,
    pool_memory_size: int = 4096,
    *,
    task_status: trio.TaskStatus[PinnedPoolServer] = trio.TASK_STATUS_IGNORED,
    **knobs: Any,
) -> None:
    """Serve pinned memory until cancelled. Started with ``nursery.start``, it says the server.

    Args:
        host: where to listen; beyond this host only with ``insecure=True``.
        port: 0 for any free one.
        pool_memory_size: MiB of all clients' pools together.
        task_status: for ``nursery.start``.
        knobs: the other knobs of :class:`~backends.pinned_pool.PinnedPoolConfig`.

    Raises:
        PinnedPoolConfigError: a knob is set to what it cannot be.
        PoolUnreachable: it cannot listen there.
    """
    async with open_server(host=host, port=port, pool_memory_size=pool_memory_size, **knobs) as server:
        task_status.started(server)
        await trio.sleep_forever()


async def _listen(config: PinnedPoolConfig) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(config.port, host=config.host)
    except OSError as exc:
        raise PoolUnreachable(f"nobody can listen at {config.host}:{config.port}: {exc}") from exc


def _directory(config: PinnedPoolConfig) -> str:
    """Where the Unix socket is made; empty for none: then the bytes go through the other one, and a line says so."""
    if not config.shared_memory:
        return ""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"
    try:
        fd, path = open_private(config.runtime_dir or f"{memory}/pinned-pool-{os.geteuid()}")
    except PoolUnusable as exc:
        if config.runtime_dir:
            raise PoolUnreachable(str(exc)) from exc
        _log.warning("no shared memory, every byte will go through the socket: %s", exc)
        return ""
    os.close(fd)
    return path


def _keep_alive(sock: trio.socket.SocketType) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
