"""MaruServer: the loop, the timer and the pool around the pure service.

One directory is served at two sockets. Our clients on this host come over a channel (a Unix socket of packets), all
others over ZeroMQ. Each socket is read by a task that runs the same loop, so that neither waits for the other; a frame
means the same whichever way it came.

A *step* is one round: frames are handed to the service, its records are written, and then the replies leave. Nothing in
a step waits: memory is allocated and freed in tasks of their own, which end with a step. Work that grows with the
number of keys is done in slices, one in a step of a task of its own, so that all other requests have a turn in between.

Rule 1. Nothing is acknowledged that is not in the journal (`committer`). While that cannot be written, no frame is
        read.
Rule 2. A region's memory is freed once the journal records that the region is gone, and only then.
Rule 3. The pool may stall: only the requests for memory wait.
Rule 4. Time that passes while no task reads does not count (`maru.base.served_time`).
Rule 5. Closing the server takes at most ``drain_timeout`` and ``linger``. Regions and journal stay; sockets and tasks
        do not.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from time import perf_counter
from typing import Final, TypeVar

import attrs
import trio

from .._config import ServerConfig
from .._directory import PoolMap
from .._journal.compactor import keep_compacted, write_from_memory
from .._journal.journal import JournalStatistics
from .._pool.pool import RegionFile, Totals
from .._pool.state_directory import open_private
from ..base.addresses import CHANNEL_NAME
from ..base.budget import Door
from ..base.descriptors import DescriptorRequest, DescriptorServer, DescriptorStatistics
from ..base.errors import HandlerClosed, JournalFailed, MaruError, PoolFull, PoolUnusable
from ..base.machine import memory_limit
from ..base.memory import huge_pages
from ..base.own_directory import LOOK
from ..base.process_limits import DESCRIPTORS, MOST_OPEN, few_descriptors, find_descriptors
from ..base.relay.lookup import find_user, tells_users
from ..base.relay.supervisor import RelayStatistics, RelaySupervisor
from ..base.served_time import ServedTime
from ..base.threads import run_in_thread
from ..kv_events import KeyBook, PublisherStatistics
from ..transport import (
    ChannelServer,
    ChannelStatistics,
    SocketStatistics,
    TrioSocket,
    check_free,
    is_channel_peer,
    open_socket,
)
from .committer import Answer, Committer
from .endpoints import (
    DESCRIPTORS_NAME,
    RELAYED_NAME,
    addresses,
    socket_options,
    unix_address,
    unlink_sockets,
)
from .indexes import Indexes, IndexesStatistics
from .key_events import KeyEvents
from .resource_manager import ByClient, ResourceManager, ResourceManagerStatistics
from .service import Allocation, Fact, Service, ServiceStatistics
from .storage import Storage, open_storage

T = TypeVar("T")

_log = logging.getLogger("maru.server")

_LOOKS: Final = 2
"""Timer intervals between two readings of the clock, at most.

If more pass, the server stood still.
"""
_BATCH: Final = 64
"""Frames that are read at once."""
_SHARE: Final = 4
"""Weight of each kind of lasting connections in the process's descriptors.

Connections that last for a moment have weight 1.
"""
_ADMISSION: Final = 10.0
"""Seconds until a new channel connection must send a readable frame."""
_STEP_BYTES: Final = 256 << 10
"""Bytes of requests and replies in a step, at most.

They bound the memory of a step.
"""
_STEP_SECONDS: Final = 0.5e-3
"""Seconds until a step ends after its current request.

A client at the other socket, or its sign of life, waits for so long.
"""
_KEYS_AT_ONCE: Final = 256
"""Keys drawn on a map between two steps.

They take a quarter of a millisecond.
"""


@attrs.frozen
class ServerStatistics:
    """A snapshot of a server; its cost is constant."""

    service: ServiceStatistics
    pool: Totals
    journal: JournalStatistics | None
    """The journal's; ``None`` without a journal."""
    resource_manager: ResourceManagerStatistics
    relay: RelayStatistics | None
    """The relay's, for TCP connections without keys; ``None`` without a relay."""
    descriptors: DescriptorStatistics
    indexes: IndexesStatistics
    """Those of the indexes, which clients on this host read without messages."""
    socket: SocketStatistics
    channel: ChannelStatistics | None
    """The channel's, for clients on this host; ``None`` without a channel."""
    kv_events: PublisherStatistics | None
    """The KV-event publisher's; ``None`` without one."""
    unread_answers: int
    """Replies dropped because the client does not read."""


class MaruServer:
    """A running server, made by :func:`open_server`; belongs to one trio run."""

    def __init__(self, config: ServerConfig, storage: Storage) -> None:
        self.config = config
        self.endpoints: tuple[str, ...] = ()
        """Addresses for clients: TCP, if configured, then ``ipc:///dev/shm/maru-0/maru.sock``."""
        self._storage, self._pool = storage, storage.pool
        self._began = trio.current_time()
        self._unlinked = ""
        """Sentence about this server's files that are gone; empty if none are."""
        self._descriptors_open = (0, 1)
        """Number of open descriptors at the last look, and the limit."""
        self._time = ServedTime(trio.current_time, _LOOKS * config.watermark_interval)
        storage.directory.restart(self._time.now())
        self._service = service = Service(
            config,
            storage.directory,
            epoch=secrets.randbits(64) or 1,
            secret=storage.pool.secret,
            new_token=lambda: secrets.token_bytes(16),
            totals=self._totals,
            version="maru",
            anew_until=self._time.now() + config.max_lease if storage.begins_anew else -math.inf,
        )
        service.facts = self._facts
        for region_id in storage.directory.region_ids():
            region = storage.pool.find(region_id)
            assert region is not None, "the pool and the directory agree"
            service.place(region_id, region.offset, region.length)
        self._indexes = Indexes(
            storage.directory,
            storage.pool.home,
            service.epoch,
            most_keys=config.max_entries,
            is_on=config.index == "auto",
            keep_free=lambda: 0 if storage.journal is None else storage.journal.room_bytes,
            opener_of=service.opener_of,
        )
        self._committer = Committer(
            storage.journal, config.journal_sync, self._send, self._indexes.publish, self._indexes.give_way
        )
        self._doors, self._most_connections = _open_doors(config)
        asks = (config.relayed or config.rm_host) and not config.insecure
        self._find_user = find_user if asks and tells_users() else None
        self._resource_manager = ResourceManager(
            storage.pool,
            ByClient(self._make_region, storage.pool.free),
            max_connections=self._most_connections,
            find_user=self._find_user,
        )
        self._relay: RelaySupervisor | None = None
        self._descriptors = DescriptorServer(storage.pool, self._permits, self._indexes.open_fd)
        self._nursery: trio.Nursery
        self._router: TrioSocket
        self._channel: ChannelServer | None = None
        self._events = KeyEvents(config, storage.directory, self._most_connections)
        self._reading = trio.CancelScope()
        self._allocating = self._freeing = self._unread = 0
        self._freed = trio.lowlevel.ParkingLot()
        self._under_way, self._less_under_way = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        self._stopping = trio.Event()

    def __repr__(self) -> str:
        return f"<MaruServer at {', '.join(self.endpoints)} over {self._pool!r}>"

    @property
    def epoch(self) -> int:
        """Number of this start of the server: random, and not 0."""
        return self._service.epoch

    @property
    def rm_address(self) -> str:
        """``host:port`` of the resource manager; empty without one."""
        return self._service.rm_address

    @property
    def descriptors_path(self) -> str:
        """Path of the socket that hands out regions to our clients."""
        return self._service.descriptors

    @property
    def channel_path(self) -> str:
        """Path of the channel's Unix socket; empty without a channel."""
        return "" if self._channel is None else self._channel.path

    @property
    def keys(self) -> KeyBook[str]:
        """The stored keys, with their changes, for readers in this process."""
        return self._storage.directory

    @property
    def kv_events(self) -> tuple[str, str] | None:
        """Addresses of KV events and of requests for missed ones.

        ``None`` if no events are published.
        """
        return self._events.endpoints

    async def wait_stopping(self) -> None:
        """Wait until a permitted client has asked this server to end."""
        await self._stopping.wait()

    @property
    def memory_bytes(self) -> int:
        """Memory that its regions may take, in bytes.

        0 for a pool on a disk or a device.
        """
        is_memory = self._pool.kind == "memfd" or self._pool.path.startswith("/dev/shm/")
        return self._pool.totals().total_bytes if is_memory else 0

    @property
    def journal_trouble(self) -> str:
        """Reason why replies are held back; empty if they are not.

        They are held back until the journal can be written.
        """
        return self._committer.trouble

    def statistics(self) -> ServerStatistics:
        """Return an immutable snapshot."""
        journal = self._storage.journal
        return ServerStatistics(
            self._service.statistics(),
            self._pool.totals(),
            None if journal is None else journal.statistics(),
            self._resource_manager.statistics(),
            None if self._relay is None else self._relay.statistics(),
            self._descriptors.statistics(),
            self._indexes.statistics(),
            self._router.statistics(),
            None if self._channel is None else self._channel.statistics(),
            self._events.statistics(),
            self._unread,
        )

    async def map_pool(self, *, cells: int = 512) -> PoolMap:
        """Draw the pool: its pages by owner, fill and age.

        Always a checkpoint; requests are answered meanwhile.

        Args:
            cells: most cells per region.
        """
        await trio.lowlevel.checkpoint()
        drawing = self._storage.directory.map_pool(cells, _KEYS_AT_ONCE)
        while True:
            try:
                next(drawing)
            except StopIteration as end:
                drawn: PoolMap = end.value
                return drawn
            await trio.lowlevel.checkpoint()

    # --- from start to end ----------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or :meth:`aclose`.

        ``task_status.started`` is called once requests are answered.

        Raises:
            OSError: it cannot listen at its address.
            PoolUnusable: the directory of the sockets is open to others.
            JournalFailed: the journal accepts no more records.
        """
        config = self.config
        descriptor, runtime = open_private(config.runtime_dir or self._pool.home)
        os.close(descriptor)
        # The channel first: a client that finds ZeroMQ's socket and no channel assumes that there is none.
        try:
            with self._open_channel(f"{runtime}/{CHANNEL_NAME}") as self._channel:
                if self._channel is not None:
                    self._service.admit, self._service.dismiss = self._channel.admit, self._channel.dismiss
                async with open_socket(
                    "router", bind=addresses(config, runtime), options=socket_options(config), on_gone=self._gone
                ) as self._router:
                    relayed = f"ipc://{runtime}/{RELAYED_NAME}"
                    bound = [one for one in self._router.endpoints if one != relayed]
                    self.endpoints = tuple(dict.fromkeys([*bound, *unix_address(config, runtime)]))
                    await self._run_tasks(runtime, task_status)
        finally:
            unlink_sockets([*self.endpoints, f"ipc://{runtime}/{RELAYED_NAME}"])

    def _open_channel(self, path: str) -> AbstractContextManager[ChannelServer | None]:
        """Open the channel, unless it is off or clients must show keys.

        A client over the channel shows no key.
        """
        config = self.config
        if not config.ipc or config.curve_key_file:
            return nullcontext()
        check_free(path, socket.SOCK_SEQPACKET)  # another server, with a pool of its own, may have the same runtime_dir
        return ChannelServer(
            path,
            most=config.max_connections,
            weight=_SHARE,
            admission=_ADMISSION,
            max_bytes=config.max_message_bytes,
            peer_bytes=config.max_unread_bytes,
            all_bytes=config.max_unread_bytes_together,
            on_gone=self._gone,
        )

    async def _run_tasks(self, runtime: str, task_status: trio.TaskStatus[None]) -> None:
        config, journal = self.config, self._storage.journal
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            if config.rm_host:
                self._service.rm_address = await nursery.start(self._run_resource_manager)
            if config.relayed:
                self._relay = RelaySupervisor(
                    f"{runtime}/{RELAYED_NAME}", most=self._most_connections, anybody=config.insecure
                )
                tcp = await nursery.start(self._relay.run, config.host, config.port)
                self.endpoints = (tcp, *self.endpoints)
            self._warn()
            self._service.descriptors = await nursery.start(self._descriptors.run, f"{runtime}/{DESCRIPTORS_NAME}")
            if journal is not None:
                nursery.start_soon(self._committer.run)
                nursery.start_soon(keep_compacted, journal, self._storage.directory)
            nursery.start_soon(self._tick)
            nursery.start_soon(self._keep_files, runtime)
            nursery.start_soon(self._work)
            # Now, and in a thread: otherwise the first request for a description would block the loop for it.
            nursery.start_soon(_find_version)
            nursery.start_soon(self._indexes.run, self._committer)
            if config.kv_events:
                await nursery.start(self._events.run, runtime)
            task_status.started()
            with self._reading:
                async with trio.open_nursery() as readers:
                    if self._channel is not None:
                        readers.start_soon(self._channel.run)
                        readers.start_soon(self._read, self._channel)
                    await self._read(self._router)

    def _warn(self) -> None:
        """Log warnings that the operator should see from the start."""
        config, everywhere = self.config, ", ".join(self.endpoints)
        total, limit = self.memory_bytes, memory_limit()
        if limit is not None and total > limit:
            _log.warning(
                "capacity_bytes = %d: this container may use %d bytes of memory, and the kernel kills its processes beyond "
                "that; lower capacity_bytes, or raise the memory limit",
                total, limit,
            )  # fmt: skip
        if config.insecure:
            _log.warning("insecure: every process that reaches %s may read and drop keys, and map regions", everywhere)
        if not (config.relayed or config.rm_host):
            return
        if self._find_user is None and not config.insecure:
            _log.warning(
                "the users of connections cannot be determined: every user of this host may use %s", everywhere
            )
        if self._most_connections < config.max_connections:
            _log.warning(
                "max_connections = %d: at most %d over TCP, and as many to the resource manager, since this process may have "
                "no more descriptors; raise `ulimit -n`",
                config.max_connections, self._most_connections,
            )  # fmt: skip

    async def _run_resource_manager(self, *, task_status: trio.TaskStatus[str]) -> None:
        config = self.config
        await self._resource_manager.run(
            config.rm_host, config.rm_port, insecure=config.insecure, task_status=task_status
        )

    async def aclose(self) -> None:
        """Stop reading, drain for at most ``drain_timeout``, and end all tasks.

        Draining waits for allocations, requests under way and journal writes.
        """
        self._service.closed = True
        self._reading.cancel()
        with trio.move_on_after(self.config.drain_timeout, shield=True):
            while self._allocating or self._service.is_busy:
                await self._freed.park()
            await self._committer.wait_idle()
        self._nursery.cancel_scope.cancel()

    async def _read(self, source: TrioSocket | ChannelServer) -> None:
        """Read frames and answer them in steps, with checkpoints between."""
        service, receive, committer = self._service, source.receive_batch, self._committer
        handle = service.handle
        # The next client to ask waits for all frames read before. So no more are read at once than the last step that
        # was too long had time for, and one more after each batch that was short.
        most = _BATCH
        while True:
            messages = await receive(most)
            most = min(most + 1, _BATCH)
            if not committer.writable:
                await committer.wait_writable()
            now = self._time.look()
            answers: list[Answer] = []
            handled, size, ends = 0, 0, perf_counter() + _STEP_SECONDS
            for message in messages:
                # A task that loses its processor may find the time over before the first request: one is handled all
                # the same, or none would be read any more.
                if handled and (size > _STEP_BYTES or perf_counter() > ends):
                    self._step(answers)
                    answers, most = [], min(most, handled)
                    await trio.lowlevel.checkpoint()
                    while service.is_crowded:
                        await self._less_under_way.park()
                    if not committer.writable:
                        await committer.wait_writable()
                    now = self._time.look()
                    handled, size, ends = 0, 0, perf_counter() + _STEP_SECONDS
                identity, frame = message[0], message[-1]
                size += len(frame)
                answer = handle(identity, frame, now)
                handled += 1
                if answer is not None:
                    answers.append((identity, answer))
                    size += len(answer)
            if handled and perf_counter() > ends:
                most = min(most, handled)
            self._step(answers)
            while service.is_crowded:
                await self._less_under_way.park()

    async def _work(self) -> None:
        """Run requests and chores under way, one slice in each step."""
        service, committer = self._service, self._committer
        while True:
            while not service.is_busy:
                self._freed.unpark_all()
                await self._under_way.park()
            await committer.wait_writable()  # always a checkpoint
            answer = service.go_on(self._time.now())
            self._step([] if answer is None else [answer])
            if not service.is_crowded:
                self._less_under_way.unpark_all()

    def _gone(self, identity: bytes) -> None:
        self._service.disconnected(identity, self._time.now())

    # --- a step ---------------------------------------------------------------------------------------------------

    def _step(self, answers: Sequence[Answer] = ()) -> None:
        """Journal the changes, send the replies, and start the longer work."""
        service = self._service
        written = self._committer.commit(service.take_records(), answers)
        for allocation in service.take_allocations():
            self._allocating += 1
            self._start(self._allocate, allocation)
        if written:
            dropped = service.take_dropped()
            if dropped:
                self._freeing += 1
                self._start(self._free, dropped)
        for level, text in service.take_events():
            _log.log(level, "%s", text)
        if service.stopping:
            self._stopping.set()
        service.begin_chores()
        if service.is_busy:
            self._under_way.unpark_all()
        # Half of the work of registering, on which no reply depends.
        self._storage.directory.settle()
        self._storage.order.settle()
        if service.stored:
            service.keep_ahead(self._time.now())
            self._committer.commit(service.take_records(), ())

    async def _tick(self) -> None:
        """Expire leases and check watermarks, once per interval."""
        service, served = self._service, self._time
        while True:
            await trio.sleep(self.config.watermark_interval)
            await self._committer.wait_writable()  # until then nothing is read, so no client counts as silent
            away = served.away
            now = served.look()
            if served.away > away:
                # Frames sent meanwhile are still in the sockets: they are read before the next tick ends anything.
                _log.log(
                    logging.WARNING if served.away - away > 1.0 else logging.DEBUG,
                    "the server was stopped for %.1f s: all leases are extended by it",
                    served.away - away,
                )
            else:
                while now >= service.next_expiry():
                    service.expire(now)
                    self._step()
                    await self._committer.wait_writable()
            if service.filled:
                service.trim(now)
            self._storage.directory.note_uses()  # or else long reads without an eviction overwrite themselves
            self._step()

    async def _keep_files(self, runtime: str) -> None:
        """Make files again that were removed under this server.

        Each loss is logged once, and once more when the file can be made again.

        Raises:
            PoolInUse: another server has the pool by now.
        """
        failed, lost = False, 0
        while True:
            await trio.sleep(LOOK)
            with suppress(OSError, MemoryError):  # no thread
                self._descriptors_open = await run_in_thread(find_descriptors)
            try:
                made, without = await self._pool.renew()
                made += self._renew_sockets(runtime)
                if await self._renew_journal():
                    made.append(f"{self._pool.home}/journal")
            except (PoolUnusable, JournalFailed, OSError, MemoryError) as exc:
                reason = str(exc) or "no memory is left"
                self._unlinked = f"files of this server were removed, and cannot be made again yet: {reason}"
                if not failed:
                    failed = True
                    _log.error("%s", self._unlinked)
                continue
            except HandlerClosed:
                return
            failed, self._unlinked = False, ""
            if made:
                _log.warning(
                    "%s: removed under this server, and made again. systemd's RemoveIPC and cleaners of temporary files do "
                    "that: set RemoveIPC=no, or keep the pool elsewhere (pool_path, runtime_dir)",
                    ", ".join(made),
                )
            if without:
                self._unlinked = (
                    f"the files of {without} regions were removed: only processes that have them mapped can read them, and the "
                    "next start drops their keys"
                )
            if without > lost:
                _log.warning("%s", self._unlinked)
            lost = without

    def _renew_sockets(self, runtime: str) -> list[str]:
        os.close(open_private(runtime)[0])  # made, if it was removed as well
        listeners = (self._channel, self._descriptors, self._router)
        return [path for listener in listeners if listener is not None for path in listener.renew()]

    async def _renew_journal(self) -> bool:
        """Write a snapshot from memory if files of the journal were removed.

        Returns:
            Whether they were removed and are written again.
        """
        journal, directory = self._storage.journal, self._storage.directory
        if journal is None or not await run_in_thread(journal.is_lost):
            return False
        while not self._committer.writable:
            await self._committer.wait_writable()
        self._step()
        return await write_from_memory(journal, directory)  # or else at the next look

    # --- memory ---------------------------------------------------------------------------------------------------

    async def _allocate(self, allocation: Allocation) -> None:
        """Allocate one region, and reply."""
        service, ticket = self._service, allocation.ticket
        answer: Answer | None = None
        region: RegionFile | None = None
        reason = "the server is leaving"
        try:
            region = await self._make_region(allocation.size)
        except (MaruError, OSError, MemoryError) as exc:  # on any error one request fails, and the server continues
            reason = str(exc) or "no memory is left"
        finally:  # also if cancelled: the waiting client gets a reply
            if region is None:
                answer = service.not_allocated(ticket, reason)
            else:
                answer = service.allocated(ticket, region.region_id, region.offset, region.length, self._time.now())
            self._allocating -= 1
            self._step([] if answer is None else [answer])
            self._freed.unpark_all()

    async def _make_region(self, length: int) -> RegionFile:
        """Allocate a region from the pool; if full, abandoned regions make room.

        Raises:
            PoolFull: there is no room for it, and none that could be made.
            PoolUnusable: the file system failed.
            HandlerClosed: the pool was closed.
        """
        while True:
            try:
                if self._pool.totals().regions >= self.config.max_regions:
                    raise PoolFull(
                        f"there are {self.config.max_regions} regions already, as many as max_regions allows"
                    )
                return await self._pool.allocate(length)
            except PoolFull:
                if not self._freeing:  # or else there may be room in a moment
                    missing = length - self._pool.totals().free_bytes
                    if not await self._make_room(missing if missing > 0 else length):
                        raise
            while self._freeing:
                await self._freed.park()
            await trio.lowlevel.checkpoint()

    async def _make_room(self, wanted_bytes: int) -> bool:
        """Drop abandoned regions in slices, and free their memory.

        Only one task drops regions at a time: ``_freeing``.

        Returns:
            Whether any was dropped.
        """
        self._freeing += 1
        try:
            slices = self._service.make_room(wanted_bytes, self._time.now())
            now: float | None = None
            while True:
                try:
                    slices.send(now)  # type: ignore[arg-type]  # None begins it
                except StopIteration as end:
                    dropped: list[int] = end.value
                    break
                await self._committer.wait_writable()
                self._step()
                now = self._time.now()
            await self._committer.wait_writable()
            self._step()
            return bool(dropped)
        finally:
            self._freeing -= 1
            self._freed.unpark_all()

    async def _free(self, region_ids: Iterable[int]) -> None:
        try:
            for region_id in region_ids:
                await self._pool.free(region_id)
        finally:
            self._freeing -= 1
            self._freed.unpark_all()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _permits(self, request: DescriptorRequest) -> bool:
        return self._service.permits(
            request.session, request.capability, request.region_id, request.offset, request.length, request.writable
        )

    def _send(self, answers: Sequence[Answer]) -> None:
        """Send replies.

        A client that is gone misses nothing; one that leaves thousands unread gets no more.
        """
        send, channel = self._router.send_nowait, self._channel
        for identity, frame in answers:
            if channel is not None and is_channel_peer(identity):
                channel.send(identity, frame)
                continue
            try:
                send((identity, b"", frame))
            except trio.WouldBlock:
                self._unread += 1

    def _start(self, work: Callable[[T], Awaitable[object]], argument: T) -> None:
        self._nursery.start_soon(work, argument)

    def _totals(self) -> tuple[int, int]:
        totals = self._pool.totals()
        return totals.total_bytes, totals.free_bytes

    def _facts(self) -> dict[str, dict[str, Fact]]:
        """Return facts about the server that the service does not have."""
        pool, journal = self._pool, self._storage.journal
        sections: dict[str, dict[str, Fact]] = {
            "server": {
                "version": _version(),
                "pid": os.getpid(),
                "endpoints": ", ".join(self.endpoints),
                "channel": self.channel_path,
                "zmq_socket": self.config.zmq_on_unix,
                "up for": trio.current_time() - self._began,
                "stood still for": self._time.away,
            },
            "pool": {"kind": pool.kind, "path": pool.path, "home": pool.home, **attrs.asdict(pool.totals())},
            "huge pages": {"used": self.config.huge_pages, **attrs.asdict(huge_pages.statistics())},
        }
        sections["degraded"] = self._degraded()
        sections["index"] = self._indexes.facts()
        if self._relay is not None:
            sections["relay"] = attrs.asdict(self._relay.statistics())
        if journal is not None:
            sections["journal"] = {"sync": self.config.journal_sync, **attrs.asdict(journal.statistics())}
        return sections

    def _degraded(self) -> dict[str, Fact]:
        """Return the degradations as a daemon names them.

        A journal that cannot be written holds this reply back as well.
        """
        found: dict[str, Fact] = {}
        if self._unlinked:
            found["unlinked_files"] = self._unlinked
        is_open, most = self._descriptors_open
        if is_open > MOST_OPEN * most:
            found["few_descriptors"] = few_descriptors(is_open, most)
        return found


async def _find_version() -> None:
    with suppress(OSError, MemoryError):  # no thread is available: the first request for it waits
        await run_in_thread(_version, abandon_on_cancel=True)


@functools.cache
def _version() -> str:
    """Return the version of the distribution.

    Looking it up takes 15 ms and more, which neither a start nor the loop should wait for.
    """
    import importlib.metadata

    try:
        return importlib.metadata.version("trio-offload")
    except importlib.metadata.PackageNotFoundError:  # run from a tree that was never installed
        return "unknown"


def _open_doors(config: ServerConfig) -> tuple[list[Door], int]:
    """Reserve the descriptors of connections that this process does not accept itself.

    ZeroMQ ends the process if it has no descriptor to accept a connection with. Over TCP, a relay counts connections;
    those of this user at its Unix sockets are not counted, so a share is left for each socket that is configured.

    Returns:
        The reservations, and the most connections over TCP.
    """
    over_tcp = config.relayed or config.rm_host or config.kv_events_relayed
    tcp = DESCRIPTORS.open(_SHARE if over_tcp else 0, most=config.max_connections)
    asked_for = [bool(config.rm_host and config.relayed), config.zmq_on_unix, bool(config.kv_events)]
    doors = [tcp, *[DESCRIPTORS.open(_SHARE) for is_asked_for in asked_for if is_asked_for]]
    later = [
        DESCRIPTORS.open(_SHARE),
        DESCRIPTORS.open(1),
    ]  # the channel, and requests for regions: their sockets open their own
    most = tcp.most
    for door in later:
        door.close()
    return doors, most


@asynccontextmanager
async def open_server(config: ServerConfig | None = None) -> AsyncIterator[MaruServer]:
    """Run a server for the length of an ``async with`` block.

    It answers when the block begins. Leaving the block reads no more, drains, and ends (see :meth:`MaruServer.aclose`).
    Regions and journal stay in the pool.

    Args:
        config: the settings.

    Raises:
        PoolInUse: another server has the pool.
        PoolUnusable: the pool or the directory of the sockets cannot be used.
        ForeignJournal: the journal is of another version, or of another pool.
        JournalFailed: the journal cannot be read, or accepts no more records.
        OSError: it cannot listen at its address.
    """
    config = config or ServerConfig()
    async with open_storage(config) as storage:
        server = MaruServer(config, storage)
        came: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                try:
                    yield server
                except BaseException as exc:
                    came = exc
                    raise
                finally:
                    await server.aclose()
        except BaseExceptionGroup as group:
            # A single error is raised without the groups that nurseries put around it.
            alone: BaseException = group
            while isinstance(alone, BaseExceptionGroup) and len(alone.exceptions) == 1:
                alone = alone.exceptions[0]
                if isinstance(came, BaseExceptionGroup) and getattr(alone, "exceptions", None) == came.exceptions:
                    raise came from came.__cause__  # trio has made a new group of it
            if alone is group:
                raise
            raise alone from alone.__cause__
        finally:
            server._indexes.close()
            for door in server._doors:
                door.close()
