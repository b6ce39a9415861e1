"""One client's connection: requests in, answers out, one after the other; bytes straight into its chunks and out of them."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from typing import TYPE_CHECKING, Final

import trio

from ._errors import PoolRefused
from ._memory import PoolMemory
from ._messages import (
    HEADER,
    VERSION,
    Allocated,
    AllocateFromPool,
    AllocatePoolMemory,
    Answer,
    BadFrame,
    CopyFromPool,
    CopyToPool,
    Done,
    FreeFromPool,
    GetUsageInfo,
    Hello,
    PoolAllocated,
    PoolFull,
    Refused,
    Request,
    UsageInfo,
    Welcome,
    decode_request,
    encode,
    lengths,
    packed,
)
from ._table import Unknown

if TYPE_CHECKING:
    from ._server import PinnedPoolServer

_MAX_REQUEST_BYTES: Final = 64 << 10
"""Only answers are larger."""
_DISCARD_BYTES: Final = 64 << 10

_log = logging.getLogger(__name__)


class Session:
    """A connection, and the pool that lives as long as it does."""

    def __init__(self, server: PinnedPoolServer, client: int, sock: trio.socket.SocketType) -> None:
        self.client: Final = client
        self.token: Final = secrets.token_bytes(16)
        self.memory: PoolMemory | None = None
        self.bad = False
        """Whether it ended because of what was sent."""
        self.name = ""
        self._view: memoryview | None = None
        self._server = server
        self._sock = sock
        self._patience = server.config.patience
        self._greeted = False

    def __repr__(self) -> str:
        return f"client {self.client} ({self.name or 'without a name'})"

    async def run(self) -> None:
        """Answer until the client hangs up, or sends what nobody can read."""
        try:
            while await self._answer_one():
                pass
        except BadFrame as exc:
            self.bad = True
            _log.warning("%s is sent away: %s", self, exc)
            with contextlib.suppress(trio.TooSlowError):
                await self._send(Refused(0, f"this is no request: {exc}"[:512]))
        except trio.TooSlowError:
            self.bad = True
            _log.warning("%s is sent away: half a frame, or an answer unread, for %g s", self, self._patience)
        finally:
            self._view = None  # or the memory would stay mapped with this object

    async def _answer_one(self) -> bool:
        """Whether to go on."""
        header = await self._frame_begins()
        if not header:
            return False
        with trio.fail_after(self._patience):
            message_bytes, payload_bytes = lengths(header)
            if message_bytes > _MAX_REQUEST_BYTES:
                raise BadFrame(f"a request of {message_bytes} bytes")
            body = bytearray(message_bytes)
            if not await self._fill(memoryview(body)):
                return False
            request = decode_request(bytes(body))
            if not self._greeted and not isinstance(request, Hello):
                raise BadFrame("Hello comes first")
            if isinstance(request, CopyToPool):
                return await self._copy_to_pool(request, payload_bytes)
        if payload_bytes:
            raise BadFrame(f"bytes behind a {type(request).__name__}")
        if isinstance(request, CopyFromPool):
            await self._copy_from_pool(request)
            return True
        try:
            answer = await self._answer(request)
        except (Unknown, ValueError, PoolRefused) as exc:
            answer = Refused(request.seq, str(exc)[:512])
        await self._send(answer)
        return True

    async def _answer(self, request: Request) -> Answer:
        seq, table = request.seq, self._server.table
        if isinstance(request, Hello):
            if request.version != VERSION:
                raise PoolRefused(f"this server speaks version {VERSION}, not {request.version}")
            self.name, self._greeted = request.name, True
            path, chunk_bytes = self._server.descriptors_path, table.chunk_bytes
            return Welcome(seq, VERSION, self.client, self.token, path, chunk_bytes)
        if isinstance(request, AllocatePoolMemory):
            return await self._allocate_pool(request)
        if isinstance(request, AllocateFromPool):
            allocation = table.allocate(self.client, request.nbytes)
            if allocation is None:
                return PoolFull(seq, table.usage(self.client).free_chunks)
            return Allocated(seq, allocation.allocation_id, packed(allocation.chunk_indices))
        if isinstance(request, FreeFromPool):
            return Done(seq, table.free(self.client, request.allocation_ids))
        assert isinstance(request, GetUsageInfo)
        usage = table.usage(self.client)
        return UsageInfo(
            seq, usage.active_allocations, usage.allocated_chunks, usage.free_chunks, usage.allocated_bytes
        )

    async def _allocate_pool(self, request: AllocatePoolMemory) -> Answer:
        table = self._server.table
        chunks = table.open_pool(self.client, request.nbytes)
        if chunks is None:
            wanted = table.chunks_for(request.nbytes)
            raise PoolRefused(
                f"a pool of {wanted} chunks of {table.chunk_bytes} bytes: {table.left} of {table.chunks} are left"
            )
        nbytes = chunks * table.chunk_bytes
        try:
            self.memory = await self._server.make_memory(nbytes)
        except PoolRefused:
            table.close_pool(self.client)
            raise
        assert self.memory.memory is not None
        self._view = self.memory.memory.buffer()
        _log.info("%s has a pool of %d bytes, pinned: %s", self, nbytes, self.memory.pinned)
        return PoolAllocated(request.seq, nbytes, chunks, self.memory.pinned, self.memory.why_not[:512])

    # --- bytes ------------------------------------------------------------------------------------------------------

    async def _copy_to_pool(self, request: CopyToPool, nbytes: int) -> bool:
        try:
            spans = self._server.table.spans(self.client, request.allocation_id, request.offset, nbytes)
        except Unknown as exc:
            if not await self._discard(nbytes):
                return False
            await self._send(Refused(request.seq, str(exc)[:512]))
            return True
        assert self._view is not None
        for start, length in spans:
            if not await self._fill(self._view[start : start + length]):
                return False
        await self._send(Done(request.seq, nbytes))
        return True

    async def _copy_from_pool(self, request: CopyFromPool) -> None:
        try:
            spans = self._server.table.spans(self.client, request.allocation_id, request.offset, request.length)
        except Unknown as exc:
            await self._send(Refused(request.seq, str(exc)[:512]))
            return
        assert self._view is not None
        pieces = [self._view[start : start + length] for start, length in spans]
        await self._send(Done(request.seq, request.length), *pieces)

    async def _frame_begins(self) -> bytes:
        """The header of the next frame, for which a client may take its time once it has greeted; empty at the end."""
        with trio.fail_after(math.inf if self._greeted else self._patience):
            first = await self._sock.recv(HEADER.size)
        if not first or len(first) == HEADER.size:
            return first
        rest = bytearray(HEADER.size - len(first))
        with trio.fail_after(self._patience):
            return first + rest if await self._fill(memoryview(rest)) else b""

    async def _fill(self, view: memoryview) -> bool:
        """Read until the view is full. False if the client hung up before."""
        while view:
            n = await self._sock.recv_into(view)
            if not n:
                return False
            view = view[n:]
        return True

    async def _discard(self, nbytes: int) -> bool:
        scratch = memoryview(bytearray(min(nbytes, _DISCARD_BYTES)))
        while nbytes:
            n = await self._sock.recv_into(scratch[: min(nbytes, len(scratch))])
            if not n:
                return False
            nbytes -= n
        return True

    async def _send(self, answer: Answer, *pieces: memoryview) -> None:
        with trio.fail_after(self._patience):
            for view in (memoryview(encode(answer, sum(map(len, pieces)))), *pieces):
                while view:
                    view = view[await self._sock.send(view) :]
