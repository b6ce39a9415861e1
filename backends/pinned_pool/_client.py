"""A client of a pinned pool's server, for threads without trio.

It has the requests of the protocol, and the mapped pool. On the server's host the pool is mapped (its descriptor comes
over a Unix socket), and copies are memory copies; the connection carries ids only. From another host, or if configured
so, bytes go through the connection, a few frames ahead.

Rule 1. For any thread. One request is on its way at a time; copies in mapped memory do not wait for it.
Rule 2. A timeout is an error, and the session goes on. Chunks that such a request allocated are freed when its answer
        comes.
Rule 3. Once the connection is over, every call raises. A server that breaks the protocol is disconnected.
Rule 4. A session belongs to the process that began it. A forked child closes its end of the connection at once: it
        cannot disturb the session, nor keep it alive when its parent is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Final, TypeVar

import attrs

from maru.base.descriptors import DescriptorRequest, fetch_descriptor
from maru.base.errors import MaruError, Shortage
from maru.base.forks import belongs_to, watch_forks
from maru.base.memory.mapping import Mapping, map_region

from ._connection import Connection, open_connection
from ._errors import PinnedPoolError, PoolClosed, PoolForked, PoolLost, PoolRefused, PoolTimeout
from ._grants import Grants, Implausible, check_pool, check_welcome
from ._messages import (
    MAX_IDS,
    MAX_PIECE_BYTES,
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
    decode_answer,
    encode,
    split,
    unpacked,
)
from ._table import Allocation, Unknown, Usage, spans_of

_AHEAD: Final = 4
"""Frames of bytes that are on their way at once.

Enough that neither side waits for the other's answer.
"""
_SECONDS_PER_GIB: Final = 5.0
"""Additional seconds for making a pool: allocating, zeroing and pinning memory."""
_NOTHING: Final = memoryview(b"")
_U32: Final = 0xFFFF_FFFF

A = TypeVar("A", bound=Answer)

_log = logging.getLogger(__name__)


@attrs.frozen
class PoolMemoryInfo:
    """The pool that a client was given."""

    nbytes: int
    """Size of the pool, in whole chunks."""
    chunks: int
    chunk_bytes: int
    pinned: str
    """The server's way to pin it: ``cuda``, ``locked`` or ``no``."""
    why_not_pinned: str
    shared: bool
    """Whether it is mapped in this process."""
    why_not_shared: str


class PinnedPoolClient:
    """One session with a server.

    Args:
        server: ``host:port`` or ``ipc://path``.
        timeout: seconds to wait for an answer.
        shared_memory: whether to map the pool: None to map it if possible, True to fail otherwise, False to stream.
        server_uid: the user that the server must belong to; by default this process's. Root's servers are accepted too.

    Raises:
        PoolUnreachable: there is no server.
        PoolUntrusted: on this host, another user's process listens there. Nothing was sent.
        PoolTimeout: it does not answer.
        PoolLost: the process that answers there is no pinned pool.
    """

    def __init__(
        self,
        server: str = "127.0.0.1:8073",
        *,
        timeout: float = 10.0,
        shared_memory: bool | None = None,
        server_uid: int | None = None,
    ) -> None:
        self.server: Final = server
        self._timeout = timeout
        self._wants_shared = shared_memory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._seq = 0
        self._unanswered: deque[int] = deque()
        """Numbers of unanswered requests, in their order.

        A pool's answer may come after later ones.
        """
        self._late: deque[int] = deque()
        """Allocations whose request had timed out; they are freed."""
        self._pool_asked: tuple[int, int] | None = None
        """Number and bytes of the request for a pool.

        Set until :meth:`allocate_pool_memory` has had its answer.
        """
        self._late_pool: PoolAllocated | None = None
        """The answer to that request, if it came after a time-out."""
        self._books = threading.Lock()
        self._grants: Grants | None = None
        """The chunks of this client's allocations. Under the lock above."""
        self._info: PoolMemoryInfo | None = None
        self.mapping: Mapping | None = None
        """The mapped pool; None if it is not mapped."""
        self._closed = False
        self._connection: Connection = open_connection(
            server, timeout, os.geteuid() if server_uid is None else server_uid
        )
        watch_forks(self, PinnedPoolClient._after_fork)
        try:
            self._welcome = self._call(Welcome, Hello(0, VERSION, f"process {self._pid}"))
            with self._judging():
                check_welcome(self._welcome, VERSION)
        except PoolRefused as exc:
            self._connection.close()
            raise PoolLost(f"{server}: {exc}") from exc
        except BaseException:
            self._connection.close()
            raise

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else "" if self._connection.is_open else " (lost)"
        return f"<PinnedPoolClient of {self.server}{state}>"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_connection") and not is_finalizing():
            self._connection.close()

    def close(self) -> None:
        """End the session. Idempotent.

        The server frees the pool and its blocks. Mapped memory stays under its views.
        """
        # The flag first: a thread that the interrupt wakes must see a closed pool, not a lost server. The interrupt comes
        # before the lock, since that thread holds the lock while it waits.
        self._closed = True
        self._connection.interrupt()  # wakes a thread that waits for an answer
        with self._lock:
            self._connection.close()
            if self.mapping is not None:
                self.mapping.close()

    def _after_fork(self) -> None:
        """Close this end only, in a forked child.

        The lock may be held by a thread that does not exist here.
        """
        self._connection.close()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise unless the session is alive, as far as known.

        The kernel knows of a closed connection. Sends no message; any thread.

        Raises:
            PoolClosed: it was closed.
            PoolForked: it belongs to another process.
            PoolLost: the server has disconnected.
        """
        if os.getpid() != self._pid:
            raise PoolForked(belongs_to(self._pid, f"the pool of {self.server}"))
        if self._closed:
            raise PoolClosed(f"the pool of {self.server} was closed")
        if not self._connection.is_open:
            raise PoolLost(f"the connection to {self.server} is lost, and its blocks with it")

    @property
    def info(self) -> PoolMemoryInfo:
        """The pool that this client was given.

        Raises:
            PoolRefused: it has none yet.
        """
        if self._info is None:
            raise PoolRefused("this client has no pool: call allocate_pool_memory first")
        return self._info

    def _ask_for_pool(self, nbytes: int, deadline: float) -> PoolAllocated:
        """Ask for a pool, or await the earlier request's answer."""
        with self._turn(deadline):
            if self._pool_asked is None:
                self._pool_asked = self._send(AllocatePoolMemory(0, nbytes), _NOTHING, deadline), nbytes
            seq, asked = self._pool_asked
            if self._late_pool is None:
                try:
                    self._late_pool = self._of_kind(PoolAllocated, self._receive(seq, None, deadline))
                except PoolRefused:
                    self._pool_asked = None
                    raise
            if asked != nbytes:
                raise PoolRefused(
                    f"this client already has its pool: an earlier request, for {asked} bytes, was granted after its "
                    f"time-out; ask for {asked} bytes to use it"
                )
            given, self._late_pool, self._pool_asked = self._late_pool, None, None
            return given

    # --- the protocol -----------------------------------------------------------------------------------------------

    def allocate_pool_memory(self, nbytes: int) -> PoolMemoryInfo:
        """Get this client's pool, in whole chunks, and map it.

        Raises:
            PoolRefused: not enough is left, this client has a pool already, or it must be mapped and cannot be.
        """
        patience = self._timeout + _SECONDS_PER_GIB * nbytes / (1 << 30)
        given = self._ask_for_pool(nbytes, perf_counter() + patience)
        with self._judging():
            check_pool(given, nbytes, self._welcome.chunk_bytes)
        why_not = self._map(given.nbytes)
        if why_not and self._wants_shared:
            self.check()  # a server that has gone did not refuse the descriptor
            raise PoolRefused(f"the pool of {self.server} cannot be mapped here: {why_not}")
        self._grants = Grants(given.chunks, self._welcome.chunk_bytes)
        self._info = PoolMemoryInfo(
            given.nbytes,
            given.chunks,
            self._welcome.chunk_bytes,
            given.pinned,
            given.why_not,
            self.mapping is not None,
            why_not,
        )
        return self._info

    def allocate_from_pool(self, nbytes: int) -> Allocation | None:
        """Allocate chunks for ``nbytes`` bytes; None if not enough are free."""
        self._free_late()
        answer = self._call((Allocated, PoolFull), AllocateFromPool(0, nbytes))
        if isinstance(answer, PoolFull):
            return None
        assert isinstance(answer, Allocated)
        with self._judging(), self._books:
            if self._grants is None:
                raise Implausible("it granted an allocation without a pool")
            return self._grants.add(answer.allocation_id, unpacked(answer.chunk_indices), nbytes)

    def free_from_pool(self, allocation_ids: Iterable[int]) -> int:
        """Free allocations. Return how many were freed.

        Unknown ids are skipped.
        """
        self.check()
        if isinstance(allocation_ids, int):
            raise TypeError(f"allocation_ids is {allocation_ids}, but must be a list of ids: [{allocation_ids}]")
        ids, freed = list(allocation_ids), 0
        for start in range(0, len(ids), MAX_IDS):
            some = ids[start : start + MAX_IDS]
            # Before the request: the server may grant these chunks to another thread's request as soon as it has read
            # this one, and they would look like chunks that two allocations share.
            with self._books:
                if self._grants is not None:
                    self._grants.discard(some)
            count = self._call(Done, FreeFromPool(0, some)).count
            with self._judging():
                if count > len(some):
                    raise Implausible(f"it freed {count} of {len(some)} allocations")
            freed += count
        return freed

    def copy_to_pool(self, allocation_id: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes into an allocation, across the borders of its chunks.

        Raises:
            PoolRefused: it is not there, or has fewer bytes.
        """
        view = memoryview(data).cast("B")
        self.check()
        if self.mapping is not None:
            for run, at in self._runs(self.mapping, allocation_id, offset, len(view)):
                run[:] = view[at : at + len(run)]
            return
        steps = range(0, len(view), MAX_PIECE_BYTES)
        self._stream((CopyToPool(0, allocation_id, offset + at), view[at : at + MAX_PIECE_BYTES], None) for at in steps)

    def copy_from_pool(self, allocation_id: int, offset: int, into: bytearray | memoryview) -> None:
        """Copy bytes out of an allocation, across the borders of its chunks.

        Raises:
            PoolRefused: it is not there, or has fewer bytes.
        """
        view = memoryview(into).cast("B")
        self.check()
        if self.mapping is not None:
            for run, at in self._runs(self.mapping, allocation_id, offset, len(view)):
                view[at : at + len(run)] = run
            return
        steps = range(0, len(view), MAX_PIECE_BYTES)
        pieces = (view[at : at + MAX_PIECE_BYTES] for at in steps)
        self._stream(
            (CopyFromPool(0, allocation_id, offset + at, len(piece)), _NOTHING, piece)
            for at, piece in zip(steps, pieces, strict=True)
        )

    def get_usage_info(self) -> Usage:
        """Return how full the pool is, as the server counts."""
        self._free_late()
        usage = self._call(UsageInfo, GetUsageInfo(0))
        with self._judging():
            if self._grants is None:
                raise Implausible("it reported the usage of a pool that does not exist")
            self._grants.check_usage(usage)
        return Usage(usage.active_allocations, usage.allocated_chunks, usage.free_chunks, usage.allocated_bytes)

    # --- the memory -------------------------------------------------------------------------------------------------

    def _map(self, nbytes: int) -> str:
        """Map the pool. Return an empty text, or the reason against it."""
        if self._wants_shared is False:
            return "shared_memory = False"
        welcome = self._welcome
        if not welcome.descriptors:
            return "the server hands out none"
        request = DescriptorRequest(welcome.token, welcome.client_id, 0, nbytes, True, b"")
        try:
            fd, offset, length = fetch_descriptor(welcome.descriptors, request, self._timeout)
            try:
                self.mapping = map_region(fd, length, offset, write=True, pin=None)
            finally:
                os.close(fd)
        except (MaruError, OSError) as exc:
            # Another host has no such socket, root's may not be entered, another server does not know the token.
            _log.warning("the pool of %s is not mapped, bytes go through the socket: %s", self.server, exc)
            return str(exc)
        return ""

    def _runs(self, mapping: Mapping, allocation_id: int, offset: int, length: int) -> Iterator[tuple[memoryview, int]]:
        """Yield each run of these bytes in the pool, with its offset."""
        with self._books:
            allocation = None if self._grants is None else self._grants.get(allocation_id)
        if allocation is None:
            raise PoolRefused(f"there is no allocation {allocation_id}")
        at = 0
        try:
            for start, n in spans_of(allocation, self._welcome.chunk_bytes, offset, length):
                yield mapping.view(start, n), at
                at += n
        except Unknown as exc:
            raise PoolRefused(str(exc)) from exc

    # --- requests and answers ---------------------------------------------------------------------------------------

    def _call(self, kind: type[A] | tuple[type[A], ...], request: Request, *, timeout: float | None = None) -> A:
        deadline = perf_counter() + (self._timeout if timeout is None else timeout)
        with self._turn(deadline):
            seq = self._send(request, _NOTHING, deadline)
            answer = self._receive(seq, None, deadline)
        return self._of_kind(kind, answer)

    def _of_kind(self, kind: type[A] | tuple[type[A], ...], answer: Answer) -> A:
        with self._judging():
            if not isinstance(answer, kind):
                raise Implausible(f"it answered with {type(answer).__name__}, which was not requested")
        return answer

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """Treat an implausible answer as the end of the session.

        No further answer of that server is read.
        """
        try:
            yield
        except (Implausible, BadFrame) as exc:
            self._connection.interrupt()  # not closed: another thread may use it
            raise PoolLost(f"{self.server} is not a pinned pool: {exc}") from exc

    def _stream(self, entries: Iterator[tuple[Request, memoryview, memoryview | None]]) -> None:
        """Send requests with their bytes, a few ahead of their answers.

        The bytes of an answer go into the buffer of its entry.
        """
        waiting: deque[tuple[int, memoryview | None]] = deque()
        with self._turn(perf_counter() + self._timeout):
            for request, payload, into in entries:
                # A timeout for each frame, since the duration of all of them is unknown.
                waiting.append((self._send(request, payload, perf_counter() + self._timeout), into))
                if len(waiting) >= _AHEAD:
                    self._receive(*waiting.popleft(), perf_counter() + self._timeout)
            while waiting:
                self._receive(*waiting.popleft(), perf_counter() + self._timeout)

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """Take the turn of this thread; one thread at a time."""
        if not self._lock.acquire(timeout=max(0.0, deadline - perf_counter())):
            raise PoolTimeout(f"{self.server} has not yet answered another thread of this process")
        try:
            self.check()
            yield
        finally:
            self._lock.release()

    def _send(self, request: Request, payload: memoryview, deadline: float) -> int:
        self._seq = seq = self._seq % _U32 + 1  # never 0, which the server uses in answers to unreadable frames
        request = type(request)(seq, *(getattr(request, name) for name in request.__struct_fields__[1:]))
        with self._telling_loss():
            if not self._connection.send_by(encode(request, payload), deadline):
                raise PoolTimeout(f"{self.server} does not read requests")
        self._unanswered.append(seq)
        return seq

    def _receive(self, seq: int, into: memoryview | None, deadline: float) -> Answer:
        while True:
            with self._telling_loss():
                frame = self._connection.receive_by(deadline)
            if frame is None:
                raise PoolTimeout(f"{self.server} did not answer in time")
            with self._judging():
                body, payload = split(frame)
                answer = decode_answer(body)
            if isinstance(answer, Refused) and not answer.seq:  # an unreadable request, or an unknown client
                self._connection.interrupt()
                raise PoolLost(f"{self.server}: {answer.text}")
            with self._judging():
                if answer.seq not in self._unanswered:
                    raise Implausible(f"answer {answer.seq} belongs to no request")
            self._unanswered.remove(answer.seq)  # the oldest, except for a pool, which takes its server long
            if answer.seq == seq:
                break
            if isinstance(answer, Allocated):
                self._late.append(answer.allocation_id)
            elif self._pool_asked is not None and answer.seq == self._pool_asked[0]:
                self._late_pool = answer if isinstance(answer, PoolAllocated) else None
                self._pool_asked = self._pool_asked if self._late_pool is not None else None
        if into is not None and isinstance(answer, Done):
            with self._judging():
                if len(payload) != len(into):
                    raise Implausible(f"it sent {len(payload)} bytes instead of {len(into)}")
            into[:] = payload
        if isinstance(answer, Refused):
            raise PoolRefused(answer.text)
        return answer

    @contextlib.contextmanager
    def _telling_loss(self) -> Iterator[None]:
        """Treat an error of the connection as the end of the session."""
        try:
            yield
        except PinnedPoolError:
            raise
        except Shortage as exc:
            raise PoolRefused(f"no request can be sent to {self.server}: {exc}") from exc
        except OSError as exc:
            self._connection.interrupt()
            raise PoolLost(f"{self.server} has disconnected: {exc}") from exc

    def _free_late(self) -> None:
        ids = []
        with contextlib.suppress(IndexError):
            while True:
                ids.append(self._late.popleft())
        if not ids:
            return
        try:
            self.free_from_pool(ids)
        except BaseException:
            self._late += ids  # the next call tries again: ids that are gone are skipped
            raise
