"""The server of pinned pools, one pool per connected client.

Clients of this user on this host come over a channel, as those of the page store do; with ``insecure``, all others over
ZeroMQ. A task reads each of the two by the same loop; a frame means the same whichever way it came.

Rule 1. A session is a connection. Its pool and blocks last exactly as long, whatever ends it.
Rule 2. Bad input costs its sender the session at most. Everything that a client can make grow has a bound.
Rule 3. It listens over TCP only with ``insecure``, since clients are not identified there. A pool's descriptor is
        handed out to this user's processes only, and only for the session's own pool.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import math
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from maru.base.descriptors import DescriptorRequest, DescriptorServer
from maru.base.errors import CannotMap, PoolInUse, PoolUnusable
from maru.base.own_directory import LOOK, holder_of_lock
from maru.base.packets import is_served
from maru.base.private_directory import open_private_directory
from maru.base.region_file import RegionFile
from maru.base.workers import Workers
from maru.exception_groups import raise_unwrapped
from maru.transport import ChannelServer, SocketOptions, TrioSocket, is_channel_peer, open_socket

from ._config import PinnedPoolConfig, default_directory
from ._connection import channel_path
from ._errors import PoolRefused, PoolUnreachable
from ._memory import PoolMemory
from ._messages import MAX_FRAME_BYTES, AllocatePoolMemory
from ._sessions import Session, Sessions
from ._table import ChunkTable

_THREADS: Final = 4
"""Threads for making and removing pools.

That takes a moment for each GiB. Nothing else blocks.
"""
_DRAIN: Final = 0.5
"""Seconds to wait at the end for pools that are being removed.

The end of the process removes them anyway.
"""
_UNREAD_BYTES: Final = 16 << 20
"""Bytes of answers that may wait for one client.

More than a client's requests under way can cause.
"""
_UNREAD_BYTES_TOGETHER: Final = 256 << 20
_STEP_BYTES: Final = 4 << 20
"""Bytes copied between two checkpoints: about a millisecond."""
_LOCK_NAME: Final = "pinned-pool.lock"
_LOCK_AGAIN: Final = 0.01
"""Seconds between two attempts to lock the directory."""
_LOCK_PATIENCE: Final = 1.0
"""Seconds after which a start logs the holder of the lock."""
_KEEPALIVE: Final = 15.0
"""Seconds of silence after which TCP probes a client's host, four times."""

_log = logging.getLogger(__name__)


@attrs.frozen
class PinnedPoolStatistics:
    """A snapshot of a server. Counters count from its start."""

    clients: int
    """Connected clients."""
    pools: int
    """Connected clients that have a pool."""
    chunks: int
    """Chunks in total."""
    chunks_left: int
    """Chunks in no pool."""
    turned_away: int
    """Connections closed at once because all places were taken."""
    bad: int
    """Connections that ended because of a bad frame."""


class PinnedPoolServer:
    """A running server. Made by :func:`open_server` and :func:`serve`.

    It belongs to one trio run.

    Attributes:
        address: for clients of this user: ``127.0.0.1:PORT``, or ``ipc://PATH`` with another directory than the
            default.
        host: the host that it listens on over TCP; empty without.
        port: the actual port.
        descriptors_path: the Unix socket that hands out pools to this host's clients; empty without one.
    """

    def __init__(self, config: PinnedPoolConfig, make_memory: Callable[..., PoolMemory]) -> None:
        """Use :func:`open_server` instead."""
        self.config: Final = config
        self.address: str = ""
        self.host: str = config.host
        self.port: int = config.port
        self.descriptors_path: str = ""
        self.table: Final = ChunkTable(config.total_chunks, config.chunk_size)
        self.workers: Final = Workers(_THREADS)
        self._make_memory = make_memory
        self._sessions = Sessions(self.table, config.max_clients)
        self._channel: ChannelServer
        self._router: TrioSocket | None = None
        self._handing: DescriptorServer | None = None
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        return f"<PinnedPoolServer at {self.address}, {len(self._sessions)} clients>"

    def statistics(self) -> PinnedPoolStatistics:
        """Return an immutable snapshot."""
        table, sessions, channel = self.table, self._sessions, self._channel.statistics()
        return PinnedPoolStatistics(
            clients=len(sessions),
            pools=table.clients,
            chunks=table.chunks,
            chunks_left=table.left,
            turned_away=sessions.turned_away + channel.turned_away,
            bad=sessions.bad + channel.bad + channel.hung_up,
        )

    def drain(self) -> None:
        """Refuse new clients and new pools from now on.

        Existing sessions go on until the server ends.
        """
        self._sessions.draining = True

    # --- used by the descriptor server ------------------------------------------------------------------------------

    def find(self, region_id: int) -> RegionFile | None:
        """Return the pool of this client; None without one."""
        session = self._sessions.get(region_id)
        if session is None or session.memory is None:
            return None
        return RegionFile(region_id, session.memory.nbytes, "", 0)

    async def open_fd(self, region_id: int, write: bool) -> int:
        """Return a new descriptor of this client's pool.

        Raises:
            CannotMap: the client has no pool.
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
        """Return whether the request has the pool's session token."""
        session = self._sessions.get(request.region_id)
        return session is not None and hmac.compare_digest(session.token, request.session)

    # --- from start to end ----------------------------------------------------------------------------------------

    async def _run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled.

        It is started when it answers. At the end all sessions end and all pools are freed.
        """
        config = self.config
        directory = _directory(config)
        async with AsyncExitStack() as stack:
            if config.insecure:
                await self._open_router(stack)
            async with _locked(directory):
                self.port, self._channel = _open_channel(directory, self.port, config.max_clients, self._gone)
            stack.enter_context(self._channel)
            usual = directory == default_directory()
            self.address = f"127.0.0.1:{self.port}" if usual else f"ipc://{self._channel.path}"
            try:
                await self._run_tasks(directory, task_status)
            finally:
                with trio.move_on_after(_DRAIN, shield=True):
                    await self.workers.wait_idle()

    async def _run_tasks(self, directory: str, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            if self.config.shared_memory:
                handing = self._handing = DescriptorServer(self, self.permits, max_connections=self.config.max_clients)
                path = f"{directory}/{self.port}-descriptors.sock"
                self.descriptors_path = self._sessions.descriptors_path = await nursery.start(handing.run, path)
            nursery.start_soon(self._channel.run)
            nursery.start_soon(self._keep_files, directory)
            nursery.start_soon(self._read, self._channel)
            if self._router is not None:
                nursery.start_soon(self._read, self._router)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                # Before the nursery ends, which starts no task afterwards: freeing a pool runs to its end even if
                # cancelled early.
                self._sessions.end_all()
                self._settle()

    async def _open_router(self, stack: AsyncExitStack) -> None:
        """Open the socket for clients of other users and other hosts."""
        options = SocketOptions(
            max_message_bytes=MAX_FRAME_BYTES,
            max_unread_bytes=_UNREAD_BYTES,
            max_unread_bytes_together=_UNREAD_BYTES_TOGETHER,
            tcp_keepalive=_KEEPALIVE,
        )
        address = f"tcp://{self.host}:{self.port or '*'}"
        try:
            opening = open_socket("router", bind=[address], options=options, on_gone=self._gone)
            self._router = await stack.enter_async_context(opening)
        except OSError as exc:
            raise PoolUnreachable(f"cannot listen at {self.host}:{self.port}: {exc}") from exc
        _log.warning("listening on %s without identifying clients (insecure)", self.host)
        self.port = int(self._router.endpoints[0].rpartition(":")[2])

    async def _keep_files(self, directory: str) -> None:
        """Make sockets again that are removed under this server.

        Raises:
            PoolUnreachable: another server has one of them by now.
        """
        failed = False
        while True:
            await trio.sleep(LOOK)
            try:
                made = await self._renew_sockets(directory)
            except PoolInUse as exc:
                raise PoolUnreachable(str(exc)) from exc
            except (PoolUnusable, OSError) as exc:
                if not failed:
                    failed = True
                    _log.error("sockets of this server were removed, and cannot be made again yet: %s", exc)
                continue
            failed = False
            if made:
                _log.warning(
                    "%s: removed under this server, and made again. systemd's RemoveIPC and cleaners of temporary files do "
                    "that: set RemoveIPC=no, or another runtime_dir",
                    ", ".join(made),
                )

    async def _renew_sockets(self, directory: str) -> list[str]:
        paths = filter(None, (self._channel.path, self.descriptors_path))
        async with nullcontext() if all(map(os.path.exists, paths)) else _made_and_locked(directory):
            return self._channel.renew() + ([] if self._handing is None else self._handing.renew())

    # --- frames ---------------------------------------------------------------------------------------------------

    async def _read(self, source: ChannelServer | TrioSocket) -> None:
        """Read frames and answer them, with a checkpoint between two batches."""
        sessions = self._sessions
        while True:
            copied = 0
            for message in await source.receive_batch():
                peer, frame = message[0], message[-1]
                answer = sessions.handle(peer, frame)
                if answer is not None:
                    self._send(peer, answer)
                    if sessions.is_over(peer):
                        self._channel.hang_up(peer)
                self._settle()
                copied += len(frame) + len(answer or b"")
                if copied > _STEP_BYTES:
                    copied = 0
                    await trio.lowlevel.checkpoint()

    def _send(self, peer: bytes, answer: bytes) -> None:
        """Send an answer.

        For a client that has gone it is dropped; a client that does not read is disconnected.
        """
        if is_channel_peer(peer):
            self._channel.send(peer, answer)
        elif self._router is not None:
            with suppress(trio.WouldBlock):
                self._router.send_nowait([peer, b"", answer])

    def _gone(self, peer: bytes) -> None:
        self._sessions.gone(peer)
        self._settle()

    def _settle(self) -> None:
        """Start tasks for requested pools and for pools to be freed."""
        for session, request in self._sessions.take_wanted():
            self._nursery.start_soon(self._make_pool, session, request)
        for session in self._sessions.take_ended():
            self._give_back(session)

    # --- pools ------------------------------------------------------------------------------------------------------

    async def _make_pool(self, session: Session, request: AllocatePoolMemory) -> None:
        """Make a pool, and answer.

        If the session ends meanwhile, or this is cancelled, the memory is freed.
        """
        if self._sessions.get(session.client) is None:  # it has ended before this task began
            return
        nbytes = self.table.chunks_for(request.nbytes) * self.table.chunk_bytes
        try:
            # A scope of its own: a client that was refused may ask again.
            with trio.CancelScope() as session.making:
                memory = await self.workers.make(
                    lambda go_on: self._make_memory(nbytes, self.config.pin, go_on),
                    lambda memory: memory.close(),
                )
                if session.is_over:  # it ended in the tick in which its memory was made
                    await self.workers.do(memory.close)
                else:
                    self._send(session.peer, self._sessions.made(session, request, memory))
        except (PoolRefused, OSError, MemoryError) as exc:  # the system refuses this pool, and no other one
            answer = self._sessions.not_made(session, request, str(exc) or "no memory is left in this process")
            if not session.is_over:
                self._send(session.peer, answer)

    def _give_back(self, session: Session) -> None:
        """Free the pool of a session that is over.

        In a thread, since unmapping a GiB takes a tenth of a second.
        """
        session.making.cancel()
        # Out of the session before the thread unmaps it: a frame that is handled meanwhile must not access the memory.
        memory, session.memory = session.memory, None
        if memory is not None:
            self._nursery.start_soon(self.workers.do, memory.close)
        chunks = self.table.close_pool(session.client)
        if chunks:
            _log.info("%s disconnected; %d chunks were freed", session, chunks)


@asynccontextmanager
async def open_server(
    config: PinnedPoolConfig | None = None, *, make_memory: Callable[..., PoolMemory] | None = None, **knobs: Any
) -> AsyncIterator[PinnedPoolServer]:
    """Run a server while the ``async with`` block lasts.

    Leaving it ends every session and frees every pool.

    Args:
        config: all settings; or else
        make_memory: function that makes a pool's memory; replaced in tests.
        knobs: those of :class:`~backends.pinned_pool.PinnedPoolConfig`, one by one.

    Raises:
        PinnedPoolConfigError: a knob is out of range.
        PoolUnreachable: it cannot listen at its address.
    """
    config = PinnedPoolConfig(**knobs) if config is None else attrs.evolve(config, **knobs)
    if make_memory is None:
        make_memory = partial(PoolMemory, huge_pages=config.huge_pages)
    server = PinnedPoolServer(config, make_memory)
    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(server._run)
            yield server
            nursery.cancel_scope.cancel()


async def serve(
    host: str = "127.0.0.1",
    port: int = 8073,
    pool_memory_size: int = 4096,
    *,
    task_status: trio.TaskStatus[PinnedPoolServer] = trio.TASK_STATUS_IGNORED,
    **knobs: Any,
) -> None:
    """Serve pinned memory until cancelled.

    Started with ``nursery.start``, it returns the server.

    Args:
        host: the host to listen on; beyond this host only with ``insecure=True``.
        port: 0 for any free one.
        pool_memory_size: MiB of all clients' pools together.
        task_status: for ``nursery.start``.
        knobs: the other knobs of :class:`~backends.pinned_pool.PinnedPoolConfig`.

    Raises:
        PinnedPoolConfigError: a knob is out of range.
        PoolUnreachable: it cannot listen there.
    """
    async with open_server(host=host, port=port, pool_memory_size=pool_memory_size, **knobs) as server:
        task_status.started(server)
        await trio.sleep_forever()


def _open_private(path: str) -> tuple[int, str]:
    """Open the directory of a pool, making it if needed.

    See :func:`maru.base.private_directory.open_private_directory`.
    """
    return open_private_directory(path, PoolUnusable, purpose="the directory of a pool")


def _directory(config: PinnedPoolConfig) -> str:
    """Return the directory of the Unix sockets.

    Raises:
        PoolUnreachable: it cannot be made, or others may enter it.
    """
    try:
        fd, path = _open_private(config.runtime_dir or default_directory())
    except PoolUnusable as exc:
        raise PoolUnreachable(str(exc)) from exc
    os.close(fd)
    return path


def _open_channel(directory: str, port: int, most: int, gone: Callable[[bytes], None]) -> tuple[int, ChannelServer]:
    """Open the channel of a port; 0 for any free one.

    Its directory must be locked.

    Raises:
        PoolUnreachable: a live server has it, or it cannot be made.
    """
    while not port or is_served(channel_path(directory, port)):
        if port:
            raise PoolUnreachable(f"cannot listen at {channel_path(directory, port)}: another server listens there")
        port = random.SystemRandom().randrange(1024, 65_536)
        if os.path.exists(channel_path(directory, port)):
            port = 0
    try:
        return port, ChannelServer(
            channel_path(directory, port),
            most=most,
            max_bytes=MAX_FRAME_BYTES,
            peer_bytes=_UNREAD_BYTES,
            all_bytes=_UNREAD_BYTES_TOGETHER,
            on_gone=gone,
        )
    except PoolUnusable as exc:
        raise PoolUnreachable(str(exc)) from exc


@asynccontextmanager
async def _made_and_locked(directory: str) -> AsyncIterator[None]:
    """Hold the lock of a directory, made again if it was removed."""
    os.close(_open_private(directory)[0])
    async with _locked(directory):
        yield


@asynccontextmanager
async def _locked(directory: str) -> AsyncIterator[None]:
    """Hold the lock while a server makes its own channel.

    Otherwise two servers could find the same channel free.
    """
    path = f"{directory}/{_LOCK_NAME}"
    # A stopped process may hold the lock for hours, and a thread that waits for it could not be cancelled.
    patience = trio.current_time() + _LOCK_PATIENCE
    while (fd := _lock_file(path)) is None:
        if trio.current_time() > patience:
            patience = math.inf
            holder = holder_of_lock(path)
            _log.warning(
                "%s is locked by %s: waiting for it", path, f"process {holder}" if holder else "another process"
            )
        await trio.sleep(_LOCK_AGAIN)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def _lock_file(path: str) -> int | None:
    """Lock a file until the returned descriptor is closed.

    ``None`` if another process has locked it.

    A file, and not the directory itself, which may be locked for as long as a daemon or a page store lives.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:  # the server that had it has removed it
            pass
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
