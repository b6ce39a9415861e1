"""The published clients: synchronous, asynchronous, and that of the resource manager. See :mod:`published`."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import zmq

from tests.support.published_wire import (
    IN_FLIGHT,
    IPC_HEADER,
    IPC_MAGIC,
    TIMEOUT,
    Ipc,
    IpcError,
    handle_of,
    pack,
    receive,
    short,
    unpack,
)


def _dial(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    dialled = context.socket(kind)
    dialled.setsockopt(zmq.LINGER, 0)
    dialled.connect(address)
    return dialled


@contextlib.contextmanager
def impatient(client: PublishedClient | PublishedAsyncClient, timeout: float = 0.1) -> Iterator[None]:
    """It waits no longer than this for an answer while the block lasts: for what nobody will answer."""
    patience, client._timeout = client._timeout, timeout
    try:
        yield
    finally:
        client._timeout = patience


class PublishedClient:
    """The synchronous one: a REQ socket, one frame there and one back. Not for several threads."""

    def __init__(self, address: str, timeout: float = TIMEOUT):
        self._address = address
        self._timeout = timeout
        self._context = zmq.Context()
        self._socket = _dial(self._context, zmq.REQ, address)
        self._sequences = itertools.count(1)

    def __enter__(self) -> PublishedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def ask(self, code: int, **body: Any) -> dict[str, Any]:
        """Raises TimeoutError when nothing has come after the timeout. An error of the server is a body like any other."""
        sequence = next(self._sequences)
        self._socket.send(pack(code, sequence, body))
        if not self._socket.poll(round(self._timeout * 1000)):
            # A REQ socket that has no answer may not ask again: there has to be another one.
            self._socket.close()
            self._socket = _dial(self._context, zmq.REQ, self._address)
            raise TimeoutError(f"no answer to {code:#04x}")
        answered, echoed, reply = unpack(self._socket.recv())
        if "error" not in reply:
            assert (answered, echoed) == (code | 0x80, sequence), "an answer to something else"
        return reply


class PublishedAsyncClient:
    """The default one: a DEALER in a thread of its own, up to 64 requests in flight, answers in any order."""

    def __init__(self, address: str, timeout: float = TIMEOUT):
        self._timeout = timeout
        self._places = threading.BoundedSemaphore(IN_FLIGHT)
        self._asked: queue.SimpleQueue[tuple[int, dict[str, Any], Future[dict[str, Any]]] | None] = queue.SimpleQueue()
        self._waking, self._woken = socket.socketpair()
        self._context = zmq.Context()
        self._dealer = _dial(self._context, zmq.DEALER, address)
        self._thread = threading.Thread(target=self._run, name="published async client", daemon=True)
        self._thread.start()

    def __enter__(self) -> PublishedAsyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """What is in flight fails with ConnectionError."""
        self._asked.put(None)
        self._waking.send(b"!")
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the client's thread does not end"
        self._dealer.close()
        self._context.term()
        self._waking.close()
        self._woken.close()

    def submit(self, code: int, **body: Any) -> Future[dict[str, Any]]:
        """From any thread. The future fails with TimeoutError when nothing has come after the timeout."""
        if not self._places.acquire(timeout=self._timeout):
            raise TimeoutError(f"{IN_FLIGHT} requests are in flight")
        future: Future[dict[str, Any]] = Future()
        future.add_done_callback(lambda _: self._places.release())
        self._asked.put((code, body, future))
        self._waking.send(b"!")
        return future

    def ask(self, code: int, **body: Any) -> dict[str, Any]:
        return self.submit(code, **body).result(self._timeout + 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        sequences = itertools.count(1)
        waiting: dict[int, tuple[float, Future[dict[str, Any]]]] = {}
        while True:
            soonest = min((deadline for deadline, _ in waiting.values()), default=time.monotonic() + 1)
            poller.poll(max(0, round((soonest - time.monotonic()) * 1000)))
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096, socket.MSG_DONTWAIT)
            while not self._asked.empty():
                asked = self._asked.get()
                if asked is None:
                    for _, future in waiting.values():
                        future.set_exception(ConnectionError("closed"))
                    return
                code, body, future = asked
                sequence = next(sequences)
                waiting[sequence] = time.monotonic() + self._timeout, future
                self._dealer.send_multipart([b"", pack(code, sequence, body)])
            while self._dealer.poll(0):
                _, sequence, reply = unpack(self._dealer.recv_multipart()[-1])
                if sequence in waiting:  # it is not if it came too late, or answers nobody in particular
                    waiting.pop(sequence)[1].set_result(reply)
            now = time.monotonic()
            for sequence in [sequence for sequence, (deadline, _) in waiting.items() if deadline <= now]:
                waiting.pop(sequence)[1].set_exception(TimeoutError("no answer"))


class PublishedRmClient:
    """Asks a resource manager over TCP, one request at a time, and maps what it names: writable, always.

    A handle is the map of the same name of the metadata protocol.
    """

    def __init__(self, address: str, client_id: str | None = None, timeout: float = TIMEOUT):
        host, port = address.rsplit(":", 1)
        self.client_id = (client_id or f"{socket.gethostname()}:{os.getpid()}").encode()
        self._request_ids = itertools.count(1)
        self._connection = socket.create_connection((host, int(port)), timeout)
        self._mapped: list[mmap.mmap] = []

    def __enter__(self) -> PublishedRmClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        for mapped in self._mapped:
            with contextlib.suppress(BufferError):  # a test that keeps a view keeps the mapping
                mapped.close()

    def ask(self, kind: int, body: bytes) -> tuple[int, bytes]:
        self._connection.sendall(IPC_HEADER.pack(IPC_MAGIC, 2, kind, len(body)) + body)
        magic, version, answered, length = IPC_HEADER.unpack(receive(self._connection, 12))
        assert (magic, version) == (IPC_MAGIC, 2)
        assert length <= 8192
        reply = receive(self._connection, length)
        if answered == Ipc.ERROR_RESP:
            status, n = struct.unpack_from("<iI", reply)
            raise IpcError(status, reply[8 : 8 + n].decode())
        return answered, reply

    def alloc(self, size: int, dax_path: str = "") -> SimpleNamespace:
        """status, access_type, handle, requested_size, path, uuid."""
        path = dax_path.encode()
        body = struct.pack("<QII", size, len(path), 0) + path + short(self.client_id)
        kind, reply = self.ask(Ipc.ALLOC_REQ, body + struct.pack("<Q", next(self._request_ids)))
        assert kind == Ipc.ALLOC_RESP
        status, access_type, *handle, requested = struct.unpack_from("<iI4QQ", reply)
        at = struct.calcsize("<iI4QQ")
        (n,) = struct.unpack_from("<I", reply, at)
        named = reply[at + 4 : at + 4 + n]
        (m,) = struct.unpack_from("<H", reply, at + 4 + n)
        assert at + 4 + n + 2 + m == len(reply)
        return SimpleNamespace(
            status=status,
            access_type=access_type,
            handle=dict(zip(("region_id", "offset", "length", "auth_token"), handle, strict=True)),
            requested_size=requested,
            path=named.decode(),
            uuid=reply[at + 6 + n :].decode(),
        )

    def free(self, handle: dict[str, int]) -> int:
        """The status."""
        body = handle_of(handle) + short(self.client_id) + struct.pack("<Q", next(self._request_ids))
        kind, reply = self.ask(Ipc.FREE_REQ, body)
        assert kind == Ipc.FREE_RESP
        (status,) = struct.unpack("<i", reply)
        return status

    def get_access(self, handle: dict[str, int]) -> SimpleNamespace:
        """status, path, offset, length, uuid."""
        kind, reply = self.ask(Ipc.GET_ACCESS_REQ, handle_of(handle) + short(self.client_id))
        assert kind == Ipc.GET_ACCESS_RESP
        status, n = struct.unpack_from("<iI", reply)
        offset, length, m = struct.unpack_from("<QQH", reply, 8 + n)
        assert 8 + n + 18 + m == len(reply)
        return SimpleNamespace(
            status=status, path=reply[8 : 8 + n].decode(), offset=offset, length=length, uuid=reply[26 + n :].decode()
        )

    def stats(self) -> list[SimpleNamespace]:
        """path, dax_type, total, free and align of each pool."""
        kind, reply = self.ask(Ipc.STATS_REQ, b"")
        assert kind == Ipc.STATS_RESP
        (count,) = struct.unpack_from("<I", reply)
        at, pools = 4, []
        for _ in range(count):
            n, dax_type, total, free, align = struct.unpack_from("<IIQQQ", reply, at)
            path = reply[at + 32 : at + 32 + n].decode()
            pools.append(SimpleNamespace(path=path, dax_type=dax_type, total=total, free=free, align=align))
            at += 32 + n
        assert at == len(reply)
        return pools

    def map(self, handle: dict[str, int]) -> mmap.mmap:
        """The region's bytes, to read and write. They are unmapped when the client is closed."""
        access = self.get_access(handle)
        assert access.status == 0, os.strerror(-access.status)
        fd = os.open(access.path, os.O_RDWR)
        try:
            mapped = mmap.mmap(fd, access.length, offset=access.offset)
        finally:
            os.close(fd)
        self._mapped.append(mapped)
        return mapped
