"""The resource manager's endpoint: published clients ask it for regions, and for what they have to map. TCP, IPC v2.

Rule 1. One task per connection, one request at a time on each: what a connection waits for, no other one waits for.
Rule 2. Nothing is believed that a peer says of a region: the handle must be the one it was given, token included, and only
        who allocated a region frees it. (A *client id* is what the peer says it is: that stops mistakes, not lies.)
Rule 3. A region that was asked for here belongs to its connection, which is its lease: it is freed with it. One whose answer
        did not leave is freed at once: nobody knows of it.
Rule 4. A bad frame costs its sender an ERROR_RESP. One of which nobody knows where it ends costs its connection.
Rule 5. Who comes in is this user's, or root's. Connections, what they say, and how long they take to say it are bounded.
        Silence between two requests is not a fault, and is allowed for long: published clients keep a connection open.
        Whoever has a region may be silent for ever.
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
"""Each is a task and a descriptor; a host has some hundred processes that map regions."""
IDLE: Final = 3_600.0
"""Between two requests."""
FRAME_TIME: Final = 10.0
"""From the first byte of a request to its last, and for its answer to leave."""
_UNDO_TIME: Final = 1.0
_PARTING_BYTES: Final = 1 << 20
_PARTING_TIME: Final = 1.0

_log = logging.getLogger(__name__)


class Regions(Protocol):
    """Who keeps account of whose region is whose, for all ways to ask for one."""

    async def allocate(self, client_id: str, length: int) -> RegionFile:
        """A region of at least ``length`` bytes for this client. Cancelled, it leaves nothing.

        Raises:
            PoolFull: there is no room for it.
            PoolUnusable: there is a pool no more.
        """
        ...

    async def free(self, client_id: str, region_id: int) -> None:
        """This client gives its region back.

        Raises:
            NotOwner: it is not its own.
        """
        ...


class ByClient:
    """Regions by who asked for them here: they belong to no instance, and to nobody after a restart."""

    def __init__(
        self, allocate: Callable[[int], Awaitable[RegionFile]], free: Callable[[int], Awaitable[None]]
    ) -> None:
        self._allocate, self._free = allocate, free
        self._owners: dict[int, str] = {}

    async def allocate(self, client_id: str, length: int) -> RegionFile:
        """See :class:`Regions`."""
        region = await self._allocate(length)
        self._owners[region.region_id] = client_id
        return region

    async def free(self, client_id: str, region_id: int) -> None:
        """See :class:`Regions`."""
        if self._owners.get(region_id) != client_id:
            raise NotOwner(f"region {region_id} is not one of {client_id!r}")
        del self._owners[region_id]
        await self._free(region_id)


@attrs.frozen
class ResourceManagerStatistics:
    """A snapshot of an endpoint. Counters count from its start."""

    connections: int
    """That are open."""
    refused: int
    """Connections closed for being too many: at once, or silent ones before newer ones."""
    requests: int
    """Answered."""
    bad: int
    """Frames that were no requests."""
    strangers: int
    """Connections closed at once, being of other users."""


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
            regions: who keeps account of them.
            max_connections: at once.
            idle: how long a connection may be silent between two requests.
            frame_time: from the first byte of a request to its last, and for its answer to leave.
            find_user: whose process is at the other end of a connection; None: anybody may come in.
        """
        self._pool = pool
        self._regions = regions
        self._max_connections = max_connections
        self._idle = idle
        self._frame_time = frame_time
        self._find_user = find_user
        self._silent: dict[trio.CancelScope, None] = {}
        """Connections that have not begun a request yet, the oldest first: it goes before a newer one is refused."""
        self._connections = self._refused = self._requests = self._bad = self._strangers = 0

    async def run(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        insecure: bool = False,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled. Started, it says its address: ``host:port``.

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
                raise ValueError(f"{host!r} is reached from other hosts, and the resource manager knows no keys")
            async with trio.open_nursery() as nursery:
                task_status.started(address_of(listener))
                await trio.serve_listeners(self._serve, [listener], handler_nursery=nursery)

    def statistics(self) -> ResourceManagerStatistics:
        """An immutable snapshot."""
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
        except Exception:  # ours, and not to be paid by the other connections
            _log.exception("a connection to the resource manager has failed")
        finally:
            self._connections -= 1
            self._silent.pop(scope, None)
            await self._release(leased)

    async def _release(self, leased: dict[int, str]) -> None:
        """Free what was asked for over a connection that has ended. Cancelled, it is the next start that removes it."""
        for region_id, client_id in leased.items():
            try:
                await self._regions.free(client_id, region_id)
            except MaruError as exc:
                _log.warning("region %d of a connection that has ended is not freed: %s", region_id, exc)

    async def _talk(
        self, reader: _Reader, stream: trio.SocketStream, leased: dict[int, str], scope: trio.CancelScope
    ) -> None:
        """Answer what comes; ``leased`` is kept: the regions of this connection, and who asked for them."""
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
        if sending.cancelled_caught:  # it does not read what it has asked for
            raise _Over

    async def _allocate_while_there(self, request: RmAllocRequest, stream: trio.SocketStream) -> RmAllocResponse:
        """Allocate, or give it up when the peer leaves: it may take long, and published clients wait two seconds."""
        response = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, nursery.cancel_scope)
            response = await self._allocate(request)
            nursery.cancel_scope.cancel()
        if response is None:
            raise _Over
        return response

    # --- what is asked --------------------------------------------------------------------------------------------

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
        """0, or what is wrong with a handle, as an errno."""
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
    """The peer has gone, or does not play its part."""


class _Reader:
    """Frames out of a stream. Holds at most what one call of receive brings beyond the frame."""

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
    """Cancel when the peer has gone. That it has sent more says nothing, and is left where it is."""
    await trio.lowlevel.wait_readable(stream.socket)
    try:
        gone = not await stream.socket.recv(1, trio.socket.MSG_PEEK)
    except OSError:
        gone = True
    if gone:
        scope.cancel()


async def _part(stream: trio.SocketStream) -> None:
    """Let the last answer arrive: closing with bytes unread would make the kernel take it back (a reset)."""
    with trio.move_on_after(_PARTING_TIME):
        await stream.send_eof()
        left = _PARTING_BYTES
        while left > 0 and (more := await stream.receive_some()):
            left -= len(more)
