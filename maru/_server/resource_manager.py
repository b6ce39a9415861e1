"""Endpoint of the resource manager: allocates and maps regions for published clients.

TCP, IPC v2.

Rule 1. One task per connection, one request at a time on each: no connection waits for the request of another.
Rule 2. A peer's statements about a region are not trusted: the handle must be the one it was given, token included, and
        only the client that allocated a region frees it. (A peer chooses its *client id*: that stops mistakes, not
        lies.)
Rule 3. A region that was requested here belongs to its connection, which is its lease: it is freed with it. One whose
        reply did not leave is freed at once: no client knows it.
Rule 4. A bad frame gets an ERROR_RESP. If its end is unknown, its connection is closed.
Rule 5. Only this user's and root's processes are admitted. The number of connections, their bytes and the time to send
        them are bounded. Silence between two requests is not a fault, and is allowed for long: published clients keep a
        connection open. A connection that has a region may be silent for ever.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, assert_never

import attrs
import trio

from .._pool.pool import Pool, RegionFile
from .._wire.capability import auth_token, verify_auth_token
from .._wire.resource_manager import (
    HEADER_BYTES,
    DaxType,
    RmAccessRequest,
    RmAccessResponse,
    RmAllocRequest,
    RmAllocResponse,
    RmErrorResponse,
    RmFreeRequest,
    RmFreeResponse,
    RmHandle,
    RmPool,
    RmRequest,
    RmResponse,
    RmStatsRequest,
    RmStatsResponse,
    decode_rm_request,
    encode_rm,
    read_rm_header,
)
from ..base.errors import BadFrame, BadMessage, HandlerClosed, MaruError, NotOwner, PoolFull, PoolUnusable
from ..base.relay.lookup import FindUser, may_enter
from ..base.relay.tcp import address_of, is_loopback, open_listener

MAX_CONNECTIONS: Final = 1_000
"""Most connections at once.

Each is a task and a descriptor; a host has some hundred processes that map regions.
"""
IDLE: Final = 3_600.0
"""Seconds of silence between two requests."""
FRAME_TIME: Final = 10.0
"""Seconds from a request's first byte to its last.

Its reply may take as long to leave.
"""
_UNDO_TIME: Final = 1.0
_PARTING_BYTES: Final = 1 << 20
_PARTING_TIME: Final = 1.0

_log = logging.getLogger(__name__)


class Regions(Protocol):
    """Keeper of the owners of regions, for all ways to request one."""

    async def allocate(self, client_id: str, length: int) -> RegionFile:
        """Allocate a region of at least ``length`` bytes for this client.

        If cancelled, nothing is left.

        Raises:
            PoolFull: there is no room for it.
            PoolUnusable: the pool is gone.
        """
        ...

    async def free(self, client_id: str, region_id: int) -> None:
        """Free a region of this client.

        Raises:
            NotOwner: it belongs to another client.
        """
        ...


class ByClient:
    """Regions by the client that requested them here.

    They belong to no instance, and to no client after a restart.
    """

    def __init__(
        self, allocate: Callable[[int], Awaitable[RegionFile]], free: Callable[[int], Awaitable[None]]
    ) -> None:
        self._allocate, self._free = allocate, free
        self._owners: dict[int, str] = {}

    async def allocate(self, client_id: str, length: int) -> RegionFile:
        """Allocate a region; see :class:`Regions`."""
        region = await self._allocate(length)
        self._owners[region.region_id] = client_id
        return region

    async def free(self, client_id: str, region_id: int) -> None:
        """Free a region; see :class:`Regions`."""
        if self._owners.get(region_id) != client_id:
            raise NotOwner(f"region {region_id} does not belong to {client_id!r}")
        del self._owners[region_id]
        await self._free(region_id)


@attrs.frozen
class ResourceManagerStatistics:
    """A snapshot of an endpoint. Counters count from its start."""

    connections: int
    """Number of open connections."""
    refused: int
    """Connections closed at the limit: new ones, or older silent ones."""
    requests: int
    """Requests answered."""
    bad: int
    """Frames that were no requests."""
    strangers: int
    """Connections of other users, closed at once."""


class ResourceManager:
    """The endpoint over one pool."""

    def __init__(
        self,
        pool: Pool,
        regions: Regions,
        *,
        max_connections: int = MAX_CONNECTIONS,
        idle: float = IDLE,
        frame_time: float = FRAME_TIME,
        find_user: FindUser | None = None,
    ) -> None:
        """Serve one pool.

        Args:
            pool: the pool.
            regions: the keeper of their owners.
            max_connections: at once.
            idle: how long a connection may be silent between two requests.
            frame_time: from the first byte of a request to its last, and for its reply to leave.
            find_user: returns the user of the process at the other end of a connection; None: any user is admitted.
        """
        self._pool = pool
        self._regions = regions
        self._max_connections = max_connections
        self._idle = idle
        self._frame_time = frame_time
        self._find_user = find_user
        self._silent: dict[trio.CancelScope, None] = {}
        """Connections without a request yet, the oldest first.

        The oldest is closed before a newer one is refused.
        """
        self._connections = self._refused = self._requests = self._bad = self._strangers = 0

    async def run(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        insecure: bool = False,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled.

        ``task_status.started`` gets the address: ``host:port``.

        Args:
            host: of the loopback interface: the endpoint knows no keys.
            port: 0 for any that is free.
            insecure: any host will do.

        Raises:
            ValueError: the host is not of the loopback interface.
            OSError: it cannot listen there.
        """
        async with await open_listener(host, port) as listener:
            if not insecure and not is_loopback(listener):
                raise ValueError(f"{host!r} is reachable from other hosts, but the resource manager supports no keys")
            async with trio.open_nursery() as nursery:
                task_status.started(address_of(listener))
                await trio.serve_listeners(self._serve, [listener], handler_nursery=nursery)

    def statistics(self) -> ResourceManagerStatistics:
        """Return an immutable snapshot."""
        return ResourceManagerStatistics(self._connections, self._refused, self._requests, self._bad, self._strangers)

    # --- a connection ---------------------------------------------------------------------------------------------

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self._connections >= self._max_connections:
            self._refused += 1
            if not self._silent:
                return
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
        self._connections += 1
        scope = trio.CancelScope()
        self._silent[scope] = None
        leased: dict[int, str] = {}
        try:
            if self._find_user is None or may_enter(self._find_user(stream)):
                with scope:
                    await self._talk(_Reader(stream), stream, leased, scope)
            else:
                self._strangers += 1
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, _Over):
            pass
        except Exception:  # a fault of ours, which other connections must not suffer from
            _log.exception("a connection to the resource manager has failed")
        finally:
            self._connections -= 1
            self._silent.pop(scope, None)
            await self._release(leased)

    async def _release(self, leased: dict[int, str]) -> None:
        """Free the regions that were requested over a connection that ended.

        If cancelled, the next start removes them.
        """
        for region_id, client_id in leased.items():
            try:
                await self._regions.free(client_id, region_id)
            except MaruError as exc:
                _log.warning("region %d of a connection that has ended is not freed: %s", region_id, exc)

    async def _talk(
        self, reader: _Reader, stream: trio.SocketStream, leased: dict[int, str], scope: trio.CancelScope
    ) -> None:
        """Answer requests until the connection ends; update ``leased``.

        It has the regions of this connection, with the client ids that requested them.
        """
        while True:
            with trio.move_on_after(math.inf if leased else self._idle):
                await reader.wait()
            if not reader.ready:
                return
            self._silent.pop(scope, None)
            try:
                with trio.fail_after(self._frame_time):
                    header = read_rm_header(await reader.take(HEADER_BYTES))
                    body = await reader.take(header.length)
                request = decode_rm_request(header.kind, body)
            except trio.TooSlowError:
                return
            except BadMessage as exc:
                self._bad += 1
                await self._send(stream, RmErrorResponse(-errno.EINVAL, str(exc)))
            except BadFrame as exc:
                self._bad += 1
                await self._send(stream, RmErrorResponse(-errno.EPROTO, str(exc)))
                await _part(stream)
                return
            else:
                self._requests += 1
                await self._answer(request, stream, leased)

    async def _answer(self, request: RmRequest, stream: trio.SocketStream, leased: dict[int, str]) -> None:
        match request:
            case RmAllocRequest():
                response = await self._allocate_while_there(request, stream)
                sent = False
                try:
                    await self._send(stream, response)
                    sent = True
                finally:
                    if not sent and not response.status:
                        with trio.move_on_after(_UNDO_TIME, shield=True):
                            await self._regions.free(request.client_id, response.handle.region_id)
                if not response.status:
                    leased[response.handle.region_id] = request.client_id
            case RmFreeRequest():
                status = await self._free(request)
                if not status:
                    leased.pop(request.handle.region_id, None)
                await self._send(stream, RmFreeResponse(status))
            case RmAccessRequest():
                await self._send(stream, self._access(request))
            case RmStatsRequest():
                await self._send(stream, self._stats())
            case _:
                assert_never(request)

    async def _send(self, stream: trio.SocketStream, response: RmResponse) -> None:
        with trio.move_on_after(self._frame_time) as sending:
            await stream.send_all(encode_rm(response))
        if sending.cancelled_caught:  # the peer does not read its reply
            raise _Over

    async def _allocate_while_there(self, request: RmAllocRequest, stream: trio.SocketStream) -> RmAllocResponse:
        """Allocate a region, or give it up if the peer leaves.

        It may take long, and published clients wait two seconds.
        """
        response = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, nursery.cancel_scope)
            response = await self._allocate(request)
            nursery.cancel_scope.cancel()
        if response is None:
            raise _Over
        return response

    # --- requests -------------------------------------------------------------------------------------------------

    async def _allocate(self, request: RmAllocRequest) -> RmAllocResponse:
        if not request.size:
            return RmAllocResponse(-errno.EINVAL)
        if request.dax_path not in ("", self._pool.path):
            return RmAllocResponse(-errno.ENODEV)
        try:
            region = await self._regions.allocate(request.client_id, request.size)
        except PoolFull:
            return RmAllocResponse(-errno.ENOMEM)
        except PoolUnusable as exc:
            _log.warning("no region for %r: %s", request.client_id, exc)
            return RmAllocResponse(-errno.EIO)
        except HandlerClosed:
            return RmAllocResponse(-errno.ESHUTDOWN)
        token = auth_token(self._pool.secret, region.region_id, region.length)
        handle = RmHandle(region.region_id, region.offset, region.length, token)
        return RmAllocResponse(0, self._dax_type, handle, request.size, region.path)

    async def _free(self, request: RmFreeRequest) -> int:
        code = self._judge(request.handle)
        if code:
            return -code
        try:
            await self._regions.free(request.client_id, request.handle.region_id)
        except NotOwner:
            return -errno.EPERM
        except MaruError as exc:
            _log.warning("region %d is not freed: %s", request.handle.region_id, exc)
            return -errno.EIO
        return 0

    def _access(self, request: RmAccessRequest) -> RmAccessResponse:
        code = self._judge(request.handle)
        region = self._pool.find(request.handle.region_id)
        if code or region is None:
            return RmAccessResponse(-code)
        return RmAccessResponse(0, region.path, region.offset, region.length)

    def _stats(self) -> RmStatsResponse:
        pool, totals = self._pool, self._pool.totals()
        return RmStatsResponse(
            (RmPool(pool.path, self._dax_type, totals.total_bytes, totals.free_bytes, pool.align),),
        )

    def _judge(self, handle: RmHandle) -> int:
        """Return 0, or the errno of a handle's fault."""
        region = self._pool.find(handle.region_id)
        if region is None:
            return errno.ENOENT
        if handle.offset != region.offset or handle.length != region.length:
            return errno.EINVAL
        right = verify_auth_token(self._pool.secret, region.region_id, region.length, handle.auth_token)
        return 0 if right else errno.EACCES

    @property
    def _dax_type(self) -> DaxType:
        return DaxType.DEV_DAX if self._pool.kind == "device" else DaxType.FS_DAX


# --- helpers ------------------------------------------------------------------------------------------------------


class _Over(Exception):
    """The peer has gone, or does not keep to the protocol."""


class _Reader:
    """Frames from a stream.

    Holds at most the bytes of one call of receive beyond the frame.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    @property
    def ready(self) -> bool:
        return bool(self._buffer)

    async def wait(self) -> None:
        """Wait for the first byte of a frame, or the end."""
        if not self._buffer:
            self._buffer += await self._stream.receive_some()

    async def take(self, n: int) -> bytes:
        while len(self._buffer) < n:
            more = await self._stream.receive_some()
            if not more:
                raise _Over
            self._buffer += more
        taken = bytes(self._buffer[:n])
        del self._buffer[:n]
        return taken


async def _watch(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancel the scope when the peer has gone.

    Further bytes that it has sent are no end, and are left unread.
    """
    await trio.lowlevel.wait_readable(stream.socket)
    try:
        gone = not await stream.socket.recv(1, trio.socket.MSG_PEEK)
    except OSError:
        gone = True
    if gone:
        scope.cancel()


async def _part(stream: trio.SocketStream) -> None:
    """Let the last reply arrive before the connection is closed.

    Closing with unread bytes would make the kernel take it back (a reset).
    """
    with trio.move_on_after(_PARTING_TIME):
        await stream.send_eof()
        left = _PARTING_BYTES
        while left > 0 and (more := await stream.receive_some()):
            left -= len(more)
