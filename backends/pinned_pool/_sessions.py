"""The sessions of a server, without sockets and waiting.

Each has its pool, and one answer for each request.

Rule 1. A session begins with Hello and ends with its connection, or with the first frame that is no request. After
        that, nothing more is read from the connection.
Rule 2. A request is answered at once, except the one that makes a pool, which takes a moment for each GiB. It is passed
        on (:meth:`Sessions.take_wanted`), and its session may end meanwhile.
Rule 3. Bytes are copied here, in the server's loop: at most a MiB for each request, which is some tenths of a
        millisecond.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import attrs
import trio

from maru.base.printable import printable

from ._errors import PoolRefused
from ._memory import PoolMemory
from ._messages import (
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
    packed,
    split,
)
from ._table import ChunkTable, Unknown

_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Session:
    """A client that has sent Hello, and its pool.

    The pool lives as long as the client is connected.
    """

    client: int
    peer: bytes
    """Peer of its connection."""
    name: str
    """Name of the client, for logs."""
    token: bytes = attrs.field(factory=lambda: secrets.token_bytes(16), repr=False)
    """Secret that must be shown to get the pool's descriptor."""
    memory: PoolMemory | None = None
    making: trio.CancelScope = attrs.field(factory=trio.CancelScope, repr=False)
    """Scope of the task that makes its pool.

    Cancelled when the session is over.
    """
    is_over: bool = False

    def __str__(self) -> str:
        return f"client {self.client} ({self.name or 'without a name'})"

    def view(self) -> memoryview:
        """Return the bytes of its pool.

        Raises:
            PoolRefused: it is still being made.
        """
        if self.memory is None or self.memory.memory is None:
            raise PoolRefused("the memory of this pool is still being made")
        return self.memory.memory.buffer()


class Sessions:
    """All sessions of a server.

    Args:
        table: the pools and their allocations.
        most: largest number of sessions at once.
    """

    def __init__(self, table: ChunkTable, most: int) -> None:
        self.descriptors_path: str = ""
        """Path of the descriptor socket that is sent to clients."""
        self._wanted: list[tuple[Session, AllocatePoolMemory]] = []
        self._ended: list[Session] = []
        self.bad: int = 0
        """Sessions that ended because of a bad frame."""
        self.turned_away: int = 0
        """Clients that were refused because all places were taken."""
        self.draining: bool = False
        """Whether new clients and new pools are refused.

        The server is about to end then.
        """
        self._table: Final = table
        self._most = most
        self._by_peer: dict[bytes, Session | None] = {}  # None: its session has ended
        self._by_client: dict[int, Session] = {}
        self._next_client = 0

    def __len__(self) -> int:
        return len(self._by_client)

    def get(self, client: int) -> Session | None:
        """Return the session of this client."""
        return self._by_client.get(client)

    # --- frames ---------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, frame: bytes) -> bytes | None:
        """Return the answer to a frame; None if there is none yet."""
        if peer in self._by_peer and self._by_peer[peer] is None:
            return None
        session = self._by_peer.get(peer)
        seq = 0
        try:
            body, payload = split(frame)
            request = decode_request(body)
            if payload and not isinstance(request, CopyToPool):
                raise BadFrame(f"a {type(request).__name__} is followed by bytes")
            seq = request.seq
            if isinstance(request, Hello):
                return encode(self._greet(peer, request))
            if session is None:
                raise BadFrame("the first request must be Hello")
            if isinstance(request, AllocatePoolMemory):
                self._want_pool(session, request)
                return None
            if isinstance(request, CopyFromPool):
                return self._copy_from_pool(session, request)
            if isinstance(request, CopyToPool):
                return encode(self._copy_to_pool(session, request, payload))
            return encode(self._answer(session, request))
        except BadFrame as exc:
            self.bad += 1
            _log.warning("%s is disconnected: %s", session or "a client", exc)
            self._end(peer)
            self._by_peer[peer] = None
            return encode(Refused(0, f"this is not a request: {exc}"[:512]))
        except (Unknown, ValueError, PoolRefused) as exc:
            return encode(Refused(seq, str(exc)[:512]))
        except MemoryError:
            return encode(Refused(seq, "no memory is left in this process"))

    def is_over(self, peer: bytes) -> bool:
        """Return whether no frame of this peer is read any more."""
        return peer in self._by_peer and self._by_peer[peer] is None

    def gone(self, peer: bytes) -> None:
        """End the session of a connection that has ended."""
        self._end(peer)

    def end_all(self) -> None:
        """End all sessions, when the server ends."""
        for peer in list(self._by_peer):
            self._end(peer)

    def take_wanted(self) -> list[tuple[Session, AllocatePoolMemory]]:
        """Return the pools that were requested since the last call."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_ended(self) -> list[Session]:
        """Return the sessions that ended since the last call.

        Their pools are to be freed.
        """
        ended, self._ended = self._ended, []
        return ended

    def _end(self, peer: bytes) -> None:
        session = self._by_peer.pop(peer, None)
        if session is not None:
            session.is_over = True
            del self._by_client[session.client]  # from here on its descriptor is not handed out
            self._ended.append(session)

    def _greet(self, peer: bytes, request: Hello) -> Answer:
        if request.version != VERSION:
            raise PoolRefused(f"this server speaks version {VERSION}, not {request.version}")
        self._check_stays()
        session = self._by_peer.get(peer)
        if session is None:
            if len(self) >= self._most:
                self.turned_away += 1
                return Refused(0, f"there are already {self._most} clients, as many as max_clients allows")
            session = Session(self._next_client, peer, printable(request.name))
            self._by_peer[peer] = self._by_client[session.client] = session
            self._next_client += 1
        return Welcome(
            request.seq, VERSION, session.client, session.token, self.descriptors_path, self._table.chunk_bytes
        )

    def _answer(self, session: Session, request: Request) -> Answer:
        seq, table, client = request.seq, self._table, session.client
        if isinstance(request, AllocateFromPool):
            allocation = table.allocate(client, request.nbytes)
            if allocation is None:
                return PoolFull(seq, table.usage(client).free_chunks)
            return Allocated(seq, allocation.allocation_id, packed(allocation.chunk_indices))
        if isinstance(request, FreeFromPool):
            return Done(seq, table.free(client, request.allocation_ids))
        assert isinstance(request, GetUsageInfo)
        usage = table.usage(client)
        return UsageInfo(
            seq, usage.active_allocations, usage.allocated_chunks, usage.free_chunks, usage.allocated_bytes
        )

    # --- pools ------------------------------------------------------------------------------------------------------

    def _want_pool(self, session: Session, request: AllocatePoolMemory) -> None:
        self._check_stays()
        table = self._table
        if table.open_pool(session.client, request.nbytes) is None:
            wanted = table.chunks_for(request.nbytes)
            raise PoolRefused(
                f"a pool of {wanted} chunks of {table.chunk_bytes} bytes does not fit: {table.left} of {table.chunks} are left"
            )
        self._wanted.append((session, request))

    def _check_stays(self) -> None:
        if self.draining:
            raise PoolRefused("this server is shutting down")

    def made(self, session: Session, request: AllocatePoolMemory, memory: PoolMemory) -> bytes:
        """Add a pool that was made. Return the answer to its request.

        The session must not be over.
        """
        session.memory = memory
        chunk_bytes = self._table.chunk_bytes
        _log.info("%s has a pool of %d bytes, pinned: %s", session, memory.nbytes, memory.pinned)
        return encode(
            PoolAllocated(request.seq, memory.nbytes, memory.nbytes // chunk_bytes, memory.pinned, memory.why_not[:512])
        )

    def not_made(self, session: Session, request: AllocatePoolMemory, why: str) -> bytes:
        """Return the answer to a request whose pool could not be made.

        The session must not be over.
        """
        self._table.close_pool(session.client)
        return encode(Refused(request.seq, why[:512]))

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _copy_to_pool(self, session: Session, request: CopyToPool, payload: memoryview) -> Answer:
        view, at = None, 0
        for start, length in self._table.spans(session.client, request.allocation_id, request.offset, len(payload)):
            view = session.view() if view is None else view
            view[start : start + length] = payload[at : at + length]
            at += length
        return Done(request.seq, len(payload))

    def _copy_from_pool(self, session: Session, request: CopyFromPool) -> bytes:
        spans = self._table.spans(session.client, request.allocation_id, request.offset, request.length)
        view = session.view() if spans else memoryview(b"")
        payload = b"".join([view[start : start + length] for start, length in spans])
        return encode(Done(request.seq, request.length), payload)
