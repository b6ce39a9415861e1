"""The daemon: owns a host's tiers and pipelines, and serves its engines.

    engine process                                     daemon process
    tensors ---- descriptor, once (memory.sock) ---->  mapped
    client ----- frames of numbers (daemon.sock) --->  service -> one engine: pipelines, tiers
    blocks <======= copied by the daemon's threads =======>

One task reads all connections, a task takes descriptors, one looks for silent engines, one keeps the tiers open;
requests that take time have a task each. Blocks outlive the engines that stored them, as long as the daemon or a tier
behind it lives.

Rule 1. One daemon for a directory: it holds a lock there until its last copy is over. Files of a dead daemon are
    replaced.
Rule 2. The end first refuses new work, waits for running requests for ``drain_timeout``, gives all sessions back, and
    closes the tiers last. Dropped requests are counted (:class:`Dropped`).
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import trio

from maru.base.addresses import CHANNEL_NAME as POOL_CHANNEL
from maru.base.addresses import LOCK as POOL_LOCK
from maru.base.errors import PoolUnusable
from maru.base.own_directory import LOOK, lock_directory, renew_directory
from maru.base.private_directory import open_private_directory
from maru.exception_groups import raise_unwrapped
from maru.transport import ChannelServer

from .._engine import Engine, EngineConfig
from .._errors import ConfigError, OffloadError
from .._stage_times import StageTimes
from ._admin import Admin, open_admin, read_token
from ._config import ADMISSION, CHANNEL_NAME, HANDOVER_NAME, STATUS_NAME, DaemonConfig, read_tenants
from ._degraded import Degradations
from ._dropped import Dropped
from ._engine import CannotOpen, DaemonEngine
from ._handover import Handover
from ._instruments import open_instruments
from ._memory import Shares
from ._messages import MAX_FRAME_BYTES, Refusal
from ._service import Service, look_interval
from ._sessions import Sessions
from ._statistics import counters
from ._tenants import Tenants

if TYPE_CHECKING:
    from backends.pinned_pool import PinnedPoolConfig, PinnedPoolServer
    from maru import MaruServer, ServerConfig

    from ._events import DaemonEvents

LOCK_NAME: Final = "daemon.lock"
_UNREAD_BYTES: Final = 16 << 20
"""Bytes of answers that may wait for one engine.

One that reads so little is hung up on.
"""
_UNREAD_BYTES_TOGETHER: Final = 256 << 20
_LATE: Final = 2
"""Intervals that may pass between two looks for silent engines.

After more than that, the daemon stood still.
"""
_GIVE_BACK: Final = 0.25
"""Seconds at the end for giving sessions back.

Their copies were waited for before.
"""

_log = logging.getLogger("offload.daemon")


class DaemonInUse(OffloadError, OSError):
    """Another daemon has this directory.

    An operator must act: end that one, or choose another ``runtime_dir``.
    """


class Daemon:
    """A running daemon. Made by :func:`open_daemon`; belongs to one trio run.

    Attributes:
        url: the URL for engines.
        epoch: this start of it: a random number, in every answer.
        status_at: addresses of its status page over HTTP.
        pinned_pool: the server of pinned memory that it hosts, if it does.
        drain_asked: set when its end was asked for; the code that has opened it then leaves.
    """

    def __init__(
        self,
        config: DaemonConfig,
        engine: EngineConfig,
        maru: ServerConfig | None,
        pinned_pool: PinnedPoolConfig | None,
    ) -> None:
        """Use :func:`open_daemon` instead."""
        self.status_at: list[str] = []
        self.pinned_pool: PinnedPoolServer | None = None
        self._events: DaemonEvents | None = None
        self._maru, self._pool_config = maru, pinned_pool
        self.drain_asked: trio.Event = trio.Event()
        self.admin: Admin | None = None
        self._dropped: Dropped | None = None
        self._tell_drained: list[Callable[[Dropped], None]] = []
        self._nursery: trio.Nursery
        self.config: DaemonConfig = config
        self.degradations: Degradations = Degradations(
            lambda: self.engine, self._journal_trouble, lambda: self._service.devices.lost
        )
        """The degradations: services that it does not fully provide."""
        self.epoch: int = secrets.randbits(62) | 1
        self.url: str = ""
        self.directory: str = ""
        self._times: StageTimes | None = StageTimes() if config.status else None
        self._engine = DaemonEngine(engine, config.block_bytes, [self._times] if self._times is not None else ())
        self._service: Service
        self._channel: ChannelServer

    def __repr__(self) -> str:
        return f"<Daemon at {self.url}, {len(self._service.sessions)} sessions>"

    @property
    def state(self) -> str:
        """State: ``starting``, ``ready``, or ``draining``."""
        return "draining" if self._service.draining else self._engine.state

    @property
    def events_at(self) -> tuple[str, ...]:
        """Addresses of KV events, and for missed ones; empty if not published."""
        return () if self._events is None else self._events.endpoints

    @property
    def admin_url(self) -> str:
        """URL for operators; empty if there is none."""
        return "" if self.admin is None else self.admin.url

    @property
    def engine(self) -> Engine | None:
        """Engine of its tiers; ``None`` until they are open."""
        return self._engine.engine

    def require_engine(self) -> Engine:
        """Return the engine of the tiers, or refuse until they are open.

        See :meth:`DaemonEngine.require`.
        """
        return self._engine.require()

    @property
    def block_bytes(self) -> int:
        """Size of every block in bytes; 0: not known yet."""
        return self._engine.block_bytes

    @property
    def sessions(self) -> Sessions:
        """Sessions of its engines."""
        return self._service.sessions

    @property
    def tenants(self) -> Tenants:
        """Its tenants."""
        return self._service.tenants

    @property
    def pool_path(self) -> str:
        """Pool directory of the embedded page store; empty without one."""
        return "" if self._maru is None else self._maru.pool_path

    @property
    def pages_of_engines(self) -> str:
        """Tier in which engines write pages, or the reason for none."""
        try:
            return self._service.pages.tier_name
        except Refusal as refusal:
            return f"none: {refusal}"

    def statistics(self) -> dict[str, float]:
        """Return the counters, as engines get them."""
        channel = self._channel.statistics()
        return {
            **counters(self._service, None, self._engine),
            **self._hosted(),
            **self.degradations.counters(),
            "connections": channel.connections,
            "unread_bytes": channel.unread_bytes,
        }

    def _hosted(self) -> dict[str, float]:
        """Return the counters of servers that the daemon hosts."""
        values = {} if self._events is None else self._events.counters()
        if self.pinned_pool is not None:
            told = attrs.asdict(self.pinned_pool.statistics())
            values |= {f"pinned_pool.{name}": value for name, value in told.items()}
        return values

    def reload(self, config: DaemonConfig, engine: EngineConfig | None = None) -> None:
        """Apply the settings that can change while it runs.

        Sessions of tenants that are gone end.

        Args:
            config: of the daemon.
            engine: of its tiers, for the thresholds; ``None``: they stay.

        Raises:
            offload.ConfigError: the tenants, or the token of operators, cannot be read. Nothing was changed.
            OSError: the same.
        """
        tenants = read_tenants(config.tenants_file)
        if self.admin is not None and config.admin_token_file:
            self.admin.operators.change(read_token(config.admin_token_file))
        if self.admin is not None and not config.admin_path(self.directory):  # engines of tenants could read its token
            self._nursery.start_soon(self.admin.end)
            self.admin = None
            self.degradations.keep(*self._own_files())
        service = self._service
        before, service.tenants = service.tenants, tenants
        service.quotas.configure(tenants.quotas)
        self._nursery.start_soon(service.charge_later)  # for the blocks in a page store of a tenant that had no quota
        service.stores.trim()
        service.sessions.limits = attrs.evolve(service.sessions.limits, lease=config.lease)
        self.config = config
        if engine is not None:
            self._engine.set_thresholds(engine)
        if self._events is not None:
            self._events.rename(tenants)
        for session in service.sessions:
            if before.credentials.get(session.tenant) != tenants.credentials.get(session.tenant) or (
                bool(before.credentials) != bool(tenants.credentials)
            ):
                service.end(session, "its tenant's credential has changed")
                self._channel.hang_up(session.peer)

    async def drain(self) -> Dropped:
        """Refuse new work, wait for running requests, and end all sessions.

        It waits for ``drain_timeout``. If cancelled, this returns, and the drain goes on.
        """
        over = trio.Event()
        self.ask_drain(lambda dropped: over.set())
        await over.wait()
        assert self._dropped is not None
        return self._dropped

    def ask_drain(self, tell: Callable[[Dropped], None]) -> None:
        """Begin to drain, unless begun; call the function when drained."""
        if self._dropped is not None:
            tell(self._dropped)
            return
        self._tell_drained.append(tell)
        if not self.drain_asked.is_set():
            self.drain_asked.set()
            self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        service = self._service
        service.draining = True
        if self.pinned_pool is not None:
            self.pinned_pool.drain()
        with trio.move_on_after(self.config.drain_timeout) as patience:
            for session in service.sessions:
                for under_way in list(session.requests.values()):
                    await under_way.over.wait()
        left = [under_way for session in service.sessions for under_way in session.requests.values()]
        stores = sum(bool(under_way.keys) for under_way in left)
        with trio.move_on_after(_GIVE_BACK):
            for under_way in left:
                under_way.cancel()
            for under_way in left:  # their engines get an answer
                await under_way.over.wait()
            for session in service.sessions:
                service.end(session, "the daemon ends")
            await service.wait_given_back()
        with trio.move_on_at(patience.deadline):
            await service.onward.wait_over()
        self._dropped = Dropped(stores, len(left) - stores)
        for tell in self._tell_drained:
            tell(self._dropped)

    async def _run(self, *, task_status: trio.TaskStatus[None]) -> None:
        config = self.config
        tenants = read_tenants(config.tenants_file)
        with _own_directory(config.runtime_dir) as own:
            self.directory = own.path
            channel = ChannelServer(
                f"{self.directory}/{CHANNEL_NAME}",
                most=2 * config.max_sessions,
                max_bytes=MAX_FRAME_BYTES,
                peer_bytes=_UNREAD_BYTES,
                all_bytes=_UNREAD_BYTES_TOGETHER,
                on_gone=lambda peer: self._service.gone(peer),
                admission=ADMISSION,
            )
            handover = Handover(
                f"{self.directory}/{HANDOVER_NAME}",
                lambda token, descriptor: self._service.take_memory(token, descriptor),
            )
            with (
                channel,
                handover,
                Shares() as shares,
                open_admin(self) as self.admin,
                open_instruments(config) as instruments,
            ):
                self._engine.instruments += instruments
                self._channel, self.url = channel, f"ipc://{channel.path}"
                # The page store outlives the tier that is its client; pinned memory, the engines that the daemon
                # drains.
                async with (
                    _page_store(self._maru) as page_store,
                    _pinned_pool(self._pool_config) as self.pinned_pool,
                    trio.open_nursery() as self._nursery,
                ):
                    nursery = self._nursery
                    self._engine.page_store = page_store
                    self._service = Service(
                        self._engine,
                        epoch=self.epoch,
                        limits=config.limits,
                        tenants=tenants,
                        send=channel.send,
                        hang_up=channel.hang_up,
                        admit=channel.admit,
                        nursery=nursery,
                        engine_pages=bool(config.engine_pool_size_gb),
                        shares=shares,
                    )
                    self._service.handover_path = handover.path
                    self._service.hosted = self._hosted
                    # First: engines are answered, though not served, while the tiers are opened.
                    nursery.start_soon(channel.run)
                    nursery.start_soon(handover.run)
                    nursery.start_soon(self._read)
                    nursery.start_soon(self._look_for_silent)
                    nursery.start_soon(self._keep_files, own, channel, handover)
                    if config.kv_events:
                        from ._events import DaemonEvents  # it brings ZeroMQ

                        self._events = DaemonEvents(config, self.directory, self._engine, tenants)
                        await nursery.start(self._events.run)
                    if self.admin is not None:
                        nursery.start_soon(self.admin.run)
                    self.degradations.keep(*self._own_files())
                    nursery.start_soon(self.degradations.run)
                    if self._times is not None:
                        await self._start_status(nursery, self._times, page_store)
                    await nursery.start(self._engine.run)
                    task_status.started()

    async def _start_status(self, nursery: trio.Nursery, times: StageTimes, page_store: MaruServer | None) -> None:
        from ..status import serve_status  # only a daemon with a status page needs a web server
        from ._status import DaemonStatus, metrics_of

        ipc = self.config.status == "ipc"
        bind = f"unix:{self.directory}/{STATUS_NAME}" if ipc else self.config.status
        status = DaemonStatus(
            self._engine,
            times,
            lambda: self.state,
            server=page_store,
            name=f"daemon at {self.url}",
            has_tenants=lambda: bool(self.tenants.credentials),
            degraded=self.degradations.texts,
        )
        serving = partial(serve_status, status, bind, metrics=metrics_of(self._engine, times, self.statistics))
        addresses: list[str] = await nursery.start(serving)
        self.status_at = [bind] if ipc else addresses

    async def _read(self) -> None:
        """Read frames and serve them, with a checkpoint between two batches."""
        channel, handle = self._channel, self._service.handle
        while True:
            for peer, frame in await channel.receive_batch():
                handle(peer, frame)

    def _journal_trouble(self) -> str:
        page_store = self._engine.page_store
        return "" if page_store is None else page_store.journal_trouble

    def _own_files(self) -> list[str]:
        """Return the paths that engines and operators need to find it."""
        paths = [f"{self.directory}/{name}" for name in (CHANNEL_NAME, HANDOVER_NAME, LOCK_NAME)]
        if self.admin is not None:
            paths.append(self.admin.url.removeprefix("ipc://"))
        return paths + ([f"{self.pool_path}/{POOL_LOCK}", f"{self.pool_path}/{POOL_CHANNEL}"] if self.pool_path else [])

    async def _look_for_silent(self) -> None:
        service = self._service
        while True:
            interval = look_interval(service.sessions.limits.lease)
            service.time.longest = _LATE * interval
            await trio.sleep(interval)
            service.end_silent()

    async def _keep_files(self, own: _OwnDirectory, channel: ChannelServer, handover: Handover) -> None:
        """Make files again that were removed from the directory.

        Raises:
            DaemonInUse: another daemon holds the directory by now.
            PoolInUse: another process has one of the sockets.
        """
        failed = False
        while True:
            await trio.sleep(LOOK)
            try:
                made = own.renew()
                for listener in (channel, handover, self.admin):
                    made += [] if listener is None else listener.renew()
            except DaemonInUse:
                raise
            except (ConfigError, PoolUnusable, OSError) as exc:
                if not failed:
                    failed = True
                    _log.error("files of this daemon were removed, and cannot be made again yet: %s", exc)
                continue
            failed = False
            if made:
                _log.warning(
                    "%s: removed under this daemon, and made again. systemd's RemoveIPC and cleaners of temporary files do "
                    "that: set RemoveIPC=no, or another runtime_dir",
                    ", ".join(made),
                )


def _page_store(config: ServerConfig | None) -> AbstractAsyncContextManager[MaruServer | None]:
    """Open the embedded page store, if there is one."""
    if config is None:
        return nullcontext()
    from maru import open_server  # it brings ZeroMQ

    return open_server(config)


@asynccontextmanager
async def _pinned_pool(config: PinnedPoolConfig | None) -> AsyncIterator[PinnedPoolServer | None]:
    """Open the hosted server of pinned memory, if there is one.

    Raises:
        CannotOpen: it cannot listen at its address.
    """
    if config is None:
        yield None
        return
    from backends.pinned_pool import PoolUnreachable, open_server  # only a daemon that hosts it imports it

    async with AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(open_server(config))
        except PoolUnreachable as exc:
            raise CannotOpen(str(exc)) from exc
        yield server


@asynccontextmanager
async def open_daemon(
    config: DaemonConfig,
    engine: EngineConfig,
    *,
    maru: ServerConfig | None = None,
    pinned_pool: PinnedPoolConfig | None = None,
) -> AsyncIterator[Daemon]:
    """Run a daemon for the length of an ``async with`` block.

    Leaving it ends every session, and then the tiers.

    Args:
        config: the settings of the daemon.
        engine: its tiers and routes; the source is replaced by the caches of its engines.
        maru: a page store to run in this process, which a tier is a client of.
        pinned_pool: a server of pinned memory to run in this process, in whose directory clients look for it.

    Raises:
        offload.ConfigError: the directory or the tenants' file cannot be used, or an instrument cannot be made.
        DaemonInUse: another daemon has the directory.
        offload.recorder.RecorderBusy: another process has the file of the flight recorder.
        CannotOpen: the tiers of the configured block size cannot be opened, or the server of pinned memory cannot
            listen.
    """
    daemon = Daemon(config, engine, maru, pinned_pool)
    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(daemon._run)
            yield daemon
            # Not all of it: the tier that is a client of the page store signs off, and waits a second for an answer.
            daemon._nursery.cancel_scope.cancel()


class _OwnDirectory:
    """The directory of a daemon, locked from the start to :meth:`close`.

    Raises:
        offload.ConfigError: others may enter it, or it cannot be made.
        DaemonInUse: another daemon holds it.
    """

    def __init__(self, path: str) -> None:
        self._refuse = partial(ConfigError, "daemon.runtime_dir", path)
        self._fd, self.path = open_private_directory(path, self._refuse, purpose="the directory of a daemon")
        try:
            self._lock = lock_directory(self._fd, LOCK_NAME, self._in_use)
        except BaseException:
            os.close(self._fd)
            raise

    def renew(self) -> list[str]:
        """Make its removed files again. Returns their paths.

        Raises:
            DaemonInUse: another daemon holds it by now.
            offload.ConfigError: it is not this user's alone any more.
        """
        return renew_directory(self._fd, self._lock, self.path, LOCK_NAME, self._refuse, self._in_use)

    def close(self) -> None:
        """Unlock the directory for another daemon."""
        os.close(self._lock)
        os.close(self._fd)

    def _in_use(self, holder: str) -> DaemonInUse:
        return DaemonInUse(f"{self.path!r} is in use by another daemon, process {holder}: end it, or set runtime_dir")


@contextmanager
def _own_directory(path: str) -> Iterator[_OwnDirectory]:
    """Hold the lock of a directory that is this user's alone.

    Raises:
        offload.ConfigError: others may enter it, or it cannot be made.
        DaemonInUse: another daemon holds it.
    """
    own = _OwnDirectory(path)
    try:
        yield own
    finally:
        with suppress(FileNotFoundError):
            os.unlink(f"{own.path}/{STATUS_NAME}")  # the web server leaves it
        own.close()
