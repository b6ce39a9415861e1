"""The server: what ends a session gives its memory back, and nothing a client does costs another one anything."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from backends.pinned_pool import (
    BlockFreed,
    PinnedPoolClient,
    PinnedPoolConfig,
    PinnedPoolConfigError,
    PinnedPoolServer,
    PoolClosed,
    PoolLost,
    PoolRefused,
    PoolTimeout,
    PoolUnreachable,
    open_server,
    serve,
)
from backends.pinned_pool import _client as client_module
from backends.pinned_pool import _memory as memory_module
from backends.pinned_pool._connection import RemoteConnection
from backends.pinned_pool._memory import PoolMemory
from backends.pinned_pool._messages import (
    MAX_MESSAGE_BYTES,
    MAX_PIECE_BYTES,
    VERSION,
    Allocated,
    AllocateFromPool,
    AllocatePoolMemory,
    Answer,
    BadFrame,
    CopyFromPool,
    CopyToPool,
    FreeFromPool,
    Hello,
    PoolAllocated,
    Refused,
    Welcome,
    decode_answer,
    encode,
    split,
)
from maru.base.descriptors import DescriptorRequest, fetch_descriptor
from maru.fake_cuda import FakeCuda
from maru.transport import BlockingDealer
from tests.support.cuda_process import process_with_cuda
from tests.support.held_by_process import open_descriptors, refuse_memory
from tests.support.maru_processes import PATIENCE, eventually, within
from tests.support.pinned_pools import (
    CHUNK,
    ServerProcess,
    address_of,
    remote_address_of,
    server_in_thread,
    short_directory,
)

MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[PinnedPoolServer]:
    with server_in_thread() as running:
        yield running


def at_rest(server: PinnedPoolServer) -> bool:
    now = server.statistics()
    return now.clients == now.pools == 0 and now.chunks_left == now.chunks


@contextlib.contextmanager
def client_of(server: PinnedPoolServer | ServerProcess, mib: int = 1, **options: Any) -> Iterator[PinnedPoolClient]:
    address = server.address if isinstance(server, ServerProcess) else address_of(server)
    client = PinnedPoolClient(address, **{"timeout": PATIENCE, **options})
    try:
        client.allocate_pool_memory(mib * MIB)
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def impatient(client: PinnedPoolClient) -> Iterator[None]:
    """Where silence is meant to be. Before and after it the client is patient: a call that must succeed may take long."""
    patience, client._timeout = client._timeout, 0.2
    try:
        yield
    finally:
        client._timeout = patience


class Telling:
    """A connection that tells when a thread waits for an answer."""

    def __init__(self, connection: Any, waits: threading.Event) -> None:
        self._connection, self._waits = connection, waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def receive_by(self, deadline: float) -> Any:
        self._waits.set()
        return self._connection.receive_by(deadline)


@contextlib.contextmanager
def asking(client: PinnedPoolClient) -> Iterator[list[BaseException]]:
    """A thread is in a call whose answer does not come; once the block is left and it has ended: what it failed with."""
    failed: list[BaseException] = []
    waits = threading.Event()
    client._connection = Telling(client._connection, waits)  # type: ignore[assignment]

    def ask() -> None:
        try:
            client.get_usage_info()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    assert waits.wait(PATIENCE)
    yield failed
    thread.join(PATIENCE)
    assert not thread.is_alive()


# --- the calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_calls_of_the_protocol(server: PinnedPoolServer, shared: bool) -> None:
    with client_of(server, 2, shared_memory=shared) as client:
        assert client.info.shared is shared
        assert (client.info.nbytes, client.info.chunk_bytes, client.info.chunks) == (2 * MIB, CHUNK, 32)
        allocation = client.allocate_from_pool(MIB + 1)
        assert allocation is not None
        assert (allocation.allocation_id, list(allocation.chunk_indices)) == (0, list(range(17)))
        data = random.Random(0).randbytes(MIB - 99)
        client.copy_to_pool(0, 100, data)
        back = bytearray(len(data))
        client.copy_from_pool(0, 100, back)
        assert back == data
        assert client.allocate_from_pool(MIB) is None
        with pytest.raises(TypeError, match=r"must be a list of ids: \[0\]"):
            client.free_from_pool(0)  # type: ignore[arg-type]
        assert client.free_from_pool([0, 7]) == 1
        assert client.get_usage_info().free_chunks == 32
        for wrong in ((0, 0, 1), (5, 0, 1)):
            with pytest.raises(PoolRefused):
                client.copy_to_pool(wrong[0], wrong[1], bytes(wrong[2]))
        allocation = client.allocate_from_pool(10)
        assert allocation is not None and allocation.allocation_id == 1
        with pytest.raises(PoolRefused, match="are not in"):
            client.copy_from_pool(1, 5, bytearray(6))
        client.check()


def test_streams_are_longer_than_what_is_on_its_way_at_once(server: PinnedPoolServer) -> None:
    with client_of(server, 24, shared_memory=False) as client:
        data = random.Random(0).randbytes(20 * MAX_PIECE_BYTES + 1)
        assert client.allocate_from_pool(len(data)) is not None
        client.copy_to_pool(0, 0, data)
        back = bytearray(len(data))
        client.copy_from_pool(0, 0, back)
        assert back == data
        with pytest.raises(PoolRefused):  # in the middle, with answers on their way
            client.copy_from_pool(9, 0, bytearray(12 * MAX_PIECE_BYTES))
        with pytest.raises(PoolRefused):
            client.copy_to_pool(0, MIB, data)
        assert client.get_usage_info().active_allocations == 1
        client.copy_from_pool(0, 1, memoryview(back)[1:])
        assert back[MIB + 1 : 2 * MIB] == data[1:MIB]  # what the refused one had written before
        assert back[:1] == data[:1]


@pytest.mark.parametrize("sent", [0, 2])
def test_memory_refused_for_bytes_on_their_way_costs_no_block(
    server: PinnedPoolServer, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    made, make = [], os.memfd_create

    def make_some(*args: Any) -> int:
        made.append(args)
        return make(*args) if len(made) <= sent else refuse_memory()

    with client_of(server, 8, shared_memory=False) as client:
        data = random.Random(0).randbytes(5 * MAX_PIECE_BYTES)
        assert client.allocate_from_pool(len(data)) is not None
        client.copy_to_pool(0, 0, data)
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", make_some)
            with pytest.raises(PoolRefused, match="bytes cannot be sent now"):
                client.copy_to_pool(0, 0, data)
        client.check()
        back = bytearray(len(data))
        client.copy_from_pool(0, 0, back)
        assert back == data


def test_one_pool_for_each_client_and_all_of_them_bounded(server: PinnedPoolServer) -> None:
    with client_of(server, 40) as one:
        with pytest.raises(PoolRefused, match="already has its pool"):
            one.allocate_pool_memory(MIB)
        with pytest.raises(PoolRefused, match="are left"), client_of(server, 40):
            pass
        with client_of(server, 24) as two:
            assert two.info.nbytes == 24 * MIB
    assert eventually(lambda: at_rest(server))
    with client_of(server, 64):
        pass


def test_pool_comes_before_blocks(server: PinnedPoolServer) -> None:
    client = PinnedPoolClient(address_of(server))
    try:
        for call in (lambda: client.allocate_from_pool(1), client.get_usage_info, lambda: client.free_from_pool([1])):
            with pytest.raises(PoolRefused, match="send AllocatePoolMemory first"):
                call()
        with pytest.raises(PoolRefused):
            _ = client.info
        with pytest.raises(PoolRefused):
            client.copy_to_pool(0, 0, b"x")
        with pytest.raises(PoolRefused, match="nbytes = 0: must be at least 1"):
            client.allocate_pool_memory(0)
    finally:
        client.close()


# --- the memory ---------------------------------------------------------------------------------------------------


def test_both_sides_have_the_same_memory_and_nobody_else(server: PinnedPoolServer) -> None:
    with client_of(server, 1, shared_memory=True) as one, client_of(server, 1, shared_memory=True) as two:
        for client, letter in ((one, b"1"), (two, b"2")):
            assert client.allocate_from_pool(MIB) is not None
            client.copy_to_pool(0, 0, letter * MIB)
        for client, letter in ((one, b"1"), (two, b"2")):
            assert client.mapping is not None
            # The server, asked over the socket, sees what was written in place.
            seen = bytearray(MIB)
            client.mapping, mapping = None, client.mapping
            client.copy_from_pool(0, 0, seen)
            client.mapping = mapping
            assert seen == letter * MIB


def test_new_pool_shows_nothing_of_an_old_one(server: PinnedPoolServer) -> None:
    for _ in range(3):
        with client_of(server, 60) as client:
            assert client.allocate_from_pool(60 * MIB) is not None
            seen = bytearray(60 * MIB)
            client.copy_from_pool(0, 0, seen)
            assert seen.count(0) == len(seen)
            client.copy_to_pool(0, 0, b"x" * len(seen))
        assert eventually(lambda: at_rest(server))


def test_descriptor_is_for_its_own_session(server: PinnedPoolServer) -> None:
    with client_of(server) as one, client_of(server) as two:
        token, other = one._welcome.token, two._welcome.client_id
        for request in (
            DescriptorRequest(token, other, 0, MIB, True, b""),
            DescriptorRequest(bytes(16), one._welcome.client_id, 0, MIB, True, b""),
            DescriptorRequest(token, 99, 0, MIB, True, b""),
            DescriptorRequest(token, one._welcome.client_id, 0, 2 * MIB, True, b""),
        ):
            with pytest.raises(Exception, match=r"does not permit this request|are not inside region"):
                fetch_descriptor(server.descriptors_path, request, 5.0)


def test_no_client_can_take_pages_from_under_the_server(server: PinnedPoolServer) -> None:
    with client_of(server) as client:
        request = DescriptorRequest(client._welcome.token, client._welcome.client_id, 0, MIB, True, b"")
        fd, _, _ = fetch_descriptor(server.descriptors_path, request, 5.0)
        try:
            for length in (0, 2 * MIB):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, length)
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
        finally:
            os.close(fd)


def test_client_streams_where_it_cannot_map(server: PinnedPoolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from another host: there is no such socket there."""
    real = client_module.fetch_descriptor
    monkeypatch.setattr(client_module, "fetch_descriptor", lambda path, *rest: real(path + "x", *rest))
    with client_of(server) as client:
        assert not client.info.shared
        assert "No such file" in client.info.why_not_shared
        assert client.allocate_from_pool(5) is not None
        client.copy_to_pool(0, 0, b"bytes")
    with pytest.raises(PoolRefused, match="cannot be mapped"), client_of(server, shared_memory=True):
        pass


def test_server_without_shared_memory() -> None:
    with server_in_thread(shared_memory=False) as server:
        assert server.descriptors_path == ""
        with client_of(server) as client:
            assert client.info.why_not_shared == "the server hands out none"


def test_mapped_memory_stays_when_the_session_ends(server: PinnedPoolServer) -> None:
    with client_of(server, shared_memory=True) as client:
        client.allocate_from_pool(MIB)
        client.copy_to_pool(0, 0, b"x" * MIB)
        assert client.mapping is not None
        view = client.mapping.view()
    assert eventually(lambda: at_rest(server))
    assert view[:3] == b"xxx"
    with pytest.raises(PoolClosed):
        client.check()


# --- pinning ------------------------------------------------------------------------------------------------------


def test_pool_is_pinned_with_cuda_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "has_device", lambda: True)
    with process_with_cuda(uses=False) as cuda, server_in_thread() as server:
        with client_of(server) as client:
            assert (client.info.pinned, client.info.why_not_pinned) == ("cuda", "")
            assert [span.nbytes for span in cuda.registered.values()] == [MIB]
        assert eventually(lambda: at_rest(server) and not cuda.registered)


def test_pool_that_cuda_refuses_is_locked_instead_unless_cuda_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "has_device", lambda: True)
    with process_with_cuda(FakeCuda(most_registered=0)):
        memory = PoolMemory(MIB, "auto")
        assert memory.pinned in ("locked", "no")
        memory.close()
        with pytest.raises(PoolRefused, match="OUT_OF_MEMORY"):
            PoolMemory(MIB, "cuda")


def test_cuda_is_used_where_a_device_is_and_it_is_not_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "has_device", lambda: False)
    with process_with_cuda():
        pools = [PoolMemory(4096, "auto"), PoolMemory(4096, "cuda")]
        assert [pool.pinned for pool in pools][1] == "cuda" != pools[0].pinned
        monkeypatch.setattr(memory_module, "has_device", lambda: True)
        pools += [PoolMemory(4096, "auto"), PoolMemory(4096, "lock"), PoolMemory(4096, "none")]
        assert pools[2].pinned == "cuda" != pools[3].pinned
        assert pools[4].pinned == "no"
        for pool in pools:
            pool.close()
        del pools, pool


def test_a_pool_whose_server_ends_while_it_is_pinned_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru.base.memory.pinning.CHUNK_BYTES", 2 * MIB)
    with process_with_cuda() as cuda:

        def end() -> None:
            if cuda.registered:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            PoolMemory(8 * MIB, "cuda", end)


def test_memory_beyond_the_limit_is_used_unpinned_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ctypes
    import errno

    def refuse(address: int, length: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(memory_module, "_mlock", refuse)
    monkeypatch.setattr(memory_module.resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    memory = PoolMemory(4096, "lock")
    assert memory.pinned == "no"
    assert memory.why_not == f"mlock of 4096 bytes: the limit (ulimit -l) is {8 * MIB} bytes"
    assert "is not pinned" in caplog.text
    memory.close()


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    before = open_descriptors(collect=True)
    monkeypatch.setattr(memory_module.os, "posix_fallocate", full)
    with pytest.raises(PoolRefused, match="No space left"):
        PoolMemory(4096, "none")
    with server_in_thread() as server, pytest.raises(PoolRefused, match="No space left"), client_of(server):
        pass
    assert open_descriptors() <= before


# --- ends of sessions ---------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from backends.pinned_pool import PinnedPoolClient

client = PinnedPoolClient(sys.argv[1])
client.allocate_pool_memory(60 << 20)
client.allocate_from_pool(20 << 20)
print("ready", flush=True)
time.sleep(1000)
"""


def test_killed_client_loses_its_pool(server: PinnedPoolServer) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", HOLDER, address_of(server)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
                assert server.statistics().chunks_left == 4 * MIB // CHUNK
            finally:
                holder.kill()
        assert eventually(lambda: at_rest(server))


def test_client_that_is_forgotten_hangs_up(server: PinnedPoolServer) -> None:
    client = PinnedPoolClient(address_of(server))
    client.allocate_pool_memory(MIB)
    del client
    assert eventually(lambda: at_rest(server))


def test_fork_does_not_use_its_parents_session(server: PinnedPoolServer) -> None:
    with client_of(server) as client:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                client.get_usage_info()
            except PoolClosed:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get_usage_info().active_allocations == 0


def test_killed_server_is_a_clear_error() -> None:
    with ServerProcess() as process:
        for shared in (True, False):
            assert PinnedPoolClient(process.address, shared_memory=shared) is not None
        with client_of(process, shared_memory=True) as mapped, client_of(process, shared_memory=False) as streamed:
            for client in (mapped, streamed):
                client.allocate_from_pool(10)
            process.send(signal.SIGKILL)
            process.process.wait(PATIENCE)
            for client in (mapped, streamed):
                for call in (
                    functools.partial(client.allocate_from_pool, 1),
                    functools.partial(client.copy_to_pool, 0, 0, b"x"),
                    functools.partial(client.copy_from_pool, 0, 0, bytearray(1)),
                    functools.partial(client.free_from_pool, [0]),
                    client.get_usage_info,
                    client.check,
                ):
                    with pytest.raises(PoolLost):
                        within(PATIENCE, call)
        with pytest.raises(PoolUnreachable):
            PinnedPoolClient(process.address)


def test_server_killed_while_somebody_waits_for_it() -> None:
    with ServerProcess() as process, client_of(process) as client:
        with process.stopped(), asking(client) as failed:
            process.send(signal.SIGKILL)
        [error] = failed
        assert isinstance(error, PoolLost)


def test_stopped_server_is_a_timeout_and_the_session_goes_on() -> None:
    with ServerProcess() as process, client_of(process, shared_memory=True) as client:
        assert client.allocate_from_pool(2 * CHUNK) is not None
        with process.stopped(), impatient(client):
            for call in (lambda: client.allocate_from_pool(CHUNK), client.get_usage_info):
                with pytest.raises(PoolTimeout):
                    within(PATIENCE, call)
            client.copy_to_pool(0, 0, b"mapped memory needs no server")
            with pytest.raises(PoolTimeout):
                PinnedPoolClient(process.address, timeout=0.2)
        # What the lost answer brought is given back: nobody knows of it.
        assert client.get_usage_info().active_allocations in (1, 2)
        assert client.get_usage_info().active_allocations == 1
        assert client.allocate_from_pool(MIB - 2 * CHUNK) is not None


def test_a_late_allocation_is_freed_after_another_timeout() -> None:
    with ServerProcess() as process, client_of(process, shared_memory=True) as client:
        with process.stopped(), impatient(client), pytest.raises(PoolTimeout):
            within(PATIENCE, lambda: client.allocate_from_pool(CHUNK))
        assert client.get_usage_info().active_allocations == 1  # with this answer came the late one
        with client._lock, impatient(client), pytest.raises(PoolTimeout):  # of another thread, which waits for long
            within(PATIENCE, client.get_usage_info)  # it frees first, and is not even sent
        assert client.get_usage_info().active_allocations == 0


def test_server_that_stops_in_the_middle_of_bytes_costs_the_session() -> None:
    with ServerProcess() as process, client_of(process, 64, shared_memory=False) as client:
        client.allocate_from_pool(64 * MIB)
        with process.stopped(), impatient(client), pytest.raises((PoolLost, PoolTimeout)):
            within(PATIENCE, lambda: client.copy_to_pool(0, 0, bytes(64 * MIB)))


def test_closing_wakes_whoever_waits() -> None:
    """Sooner than the answer would be waited for."""
    with ServerProcess() as process, client_of(process, timeout=1000.0) as client, process.stopped():
        with asking(client) as failed:
            within(PATIENCE, client.close)
        assert isinstance(failed[0], (PoolLost, PoolClosed))


# --- bad input ----------------------------------------------------------------------------------------------------


def connected(server: PinnedPoolServer) -> socket.socket:
    """A connection over which anything can be said, a frame a packet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(server.address.removeprefix("ipc://"))  # waits where many others come just now
    except OSError:
        sock.close()
        raise
    sock.settimeout(PATIENCE)
    return sock


def talk(server: PinnedPoolServer, *frames: bytes) -> list[Answer]:
    """What is answered to these frames, until the server hangs up."""
    with connected(server) as sock:
        answers = []
        with contextlib.suppress(ConnectionError):
            for frame in frames:
                sock.send(frame)
            while frame := sock.recv(65_536):
                answers.append(decode_answer(split(frame)[0]))
        return answers


HELLO = encode(Hello(1, VERSION, "test"))


@pytest.mark.parametrize(
    "frames",
    [
        [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        [bytes(100)],
        [b"\xff" * 100],
        [b"\0\0"],
        [b"\0\0\0\4" + b"\xff\xff\xff\xff"],
        [b"\0\0\0\4" + b"\xff\xff\xff"],
        [HELLO, encode(AllocateFromPool(1, -1))],
        [HELLO, b"\0\0\0\3" + msgspec.msgpack.encode([99, 1])],
        [HELLO, encode(AllocateFromPool(1, 1), b"12345")],
        [HELLO, encode(CopyFromPool(1, 0, 0, MAX_PIECE_BYTES + 1))],
        [HELLO, encode(FreeFromPool(1, list(range(5000))))],
        [encode(AllocatePoolMemory(1, MIB))],
        [HELLO, struct.pack("!I", 60_000) + b"\x91" * 60_000],
    ],
)
def test_garbage_costs_its_sender_the_session(server: PinnedPoolServer, frames: list[bytes]) -> None:
    with client_of(server) as client:
        answers = within(PATIENCE, lambda: talk(server, *frames))
        assert isinstance(answers[-1], Refused)
        assert client.get_usage_info().active_allocations == 0
        assert eventually(lambda: server.statistics().clients == 1)
        assert server.statistics().bad == 1


@pytest.mark.parametrize(("message", "payload"), [(MAX_MESSAGE_BYTES, 0), (10, MAX_PIECE_BYTES + 1)])
def test_a_frame_of_more_than_its_bound_is_none(message: int, payload: int) -> None:
    with pytest.raises(BadFrame):
        split(struct.pack("!I", message) + bytes(message + payload))


def test_random_frames_never_hurt_anybody(server: PinnedPoolServer) -> None:
    rng = random.Random(7)
    good = [
        HELLO,
        encode(AllocatePoolMemory(2, MIB)),
        encode(AllocateFromPool(3, 3 * CHUNK)),
        encode(CopyToPool(4, 0, 10), bytes(100)),
        encode(CopyFromPool(5, 0, 1, CHUNK)),
        encode(FreeFromPool(6, [0, 1])),
    ]
    with client_of(server) as client:
        for _ in range(150):
            frames = [bytearray(frame) for frame in good[: rng.randrange(1, 7)]]
            for _ in range(rng.randrange(0, 4)):
                frame = rng.choice(frames)
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            frames[-1] = frames[-1][: rng.randrange(1, len(frames[-1]) + 1)]
            with connected(server) as sock, contextlib.suppress(ConnectionError):
                for frame in frames:
                    sock.send(frame)
        assert client.get_usage_info().active_allocations == 0
    assert eventually(lambda: at_rest(server))


def test_refused_request_costs_nothing(server: PinnedPoolServer) -> None:
    frames = (
        HELLO,
        encode(CopyToPool(2, 9, 0), bytes(100_000)),
        encode(CopyFromPool(3, 9, 0, 1)),
        encode(Hello(4, 99, "from the future")),
    )
    with connected(server) as sock:
        for frame in frames:
            sock.send(frame)
        answers = [decode_answer(split(sock.recv(65_536))[0]) for _ in frames]
        assert [answer.seq for answer in answers] == [1, 2, 3, 4]
        assert all(isinstance(answer, Refused) for answer in answers[1:])


def test_a_pool_that_is_being_made_has_no_bytes_yet() -> None:
    go = threading.Event()

    def slowly(nbytes: int, *_: Any) -> PoolMemory:
        assert go.wait(PATIENCE)
        return PoolMemory(nbytes, "none")

    with server_in_thread(make_memory=slowly) as server, connected(server) as sock:
        for frame in (
            HELLO,
            encode(AllocatePoolMemory(2, MIB)),
            encode(AllocateFromPool(3, CHUNK)),
            encode(CopyToPool(4, 0, 0), b"early"),
            encode(CopyFromPool(5, 0, 0, 5)),
        ):
            sock.send(frame)
        answers = [decode_answer(split(sock.recv(65_536))[0]) for _ in range(4)]
        assert [type(answer) for answer in answers] == [Welcome, Allocated, Refused, Refused]
        go.set()
        assert isinstance(decode_answer(split(sock.recv(65_536))[0]), PoolAllocated)


def test_a_client_that_ends_while_its_pool_is_made_leaves_nothing() -> None:
    begun, go, made = threading.Event(), threading.Event(), list[PoolMemory]()

    def slowly(nbytes: int, *_: Any) -> PoolMemory:
        begun.set()
        assert go.wait(PATIENCE)
        made.append(PoolMemory(nbytes, "none"))
        return made[-1]

    with server_in_thread(make_memory=slowly) as server:
        with connected(server) as sock:
            sock.send(HELLO)
            sock.send(encode(AllocatePoolMemory(2, MIB)))
            assert begun.wait(PATIENCE)
        assert eventually(lambda: at_rest(server))
        go.set()
        assert eventually(lambda: made and made[0].memory is None)


def test_a_pool_that_came_too_late_is_had_by_the_next_request() -> None:
    go = threading.Event()

    def slowly(nbytes: int, *_: Any) -> PoolMemory:
        assert go.wait(PATIENCE)
        return PoolMemory(nbytes, "none")

    with server_in_thread(make_memory=slowly) as server:
        client = PinnedPoolClient(server.address, timeout=PATIENCE, shared_memory=False)
        client._timeout = 0.01
        with pytest.raises(PoolTimeout):
            client.allocate_pool_memory(MIB)
        client._timeout = PATIENCE
        go.set()
        with pytest.raises(PoolRefused, match=f"for {MIB} bytes, was granted"):
            client.allocate_pool_memory(2 * MIB)
        assert client.allocate_pool_memory(MIB).nbytes == MIB
        client.close()


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), MemoryError(), RuntimeError("can't start new thread")]
)
def test_refused_pool_ends_no_other_pool(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [error]

    def make(nbytes: int, *arguments: Any) -> PoolMemory:
        if refusals and not isinstance(error, RuntimeError):
            raise refusals.pop()
        return PoolMemory(nbytes, "none")

    start = trio.lowlevel.start_thread_soon

    def start_thread(work: Any, deliver: Any, name: str | None = None) -> None:
        if name == "maru-worker" and refusals and isinstance(error, RuntimeError):
            raise refusals.pop()
        start(work, deliver, name)

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", start_thread)
    with server_in_thread(make_memory=make) as server, connected(server) as sock, connected(server) as other:
        for one in (sock, other):
            one.send(HELLO)
            assert isinstance(decode_answer(split(one.recv(65_536))[0]), Welcome)
        sock.send(encode(AllocatePoolMemory(2, MIB)))
        refused = decode_answer(split(sock.recv(65_536))[0])
        assert isinstance(refused, Refused) and refused.text
        for one in (other, sock):
            one.send(encode(AllocatePoolMemory(3, MIB)))
            assert isinstance(decode_answer(split(one.recv(65_536))[0]), PoolAllocated)


def test_answers_that_nobody_reads_are_not_kept() -> None:
    with server_in_thread() as server, connected(server) as sock:
        for frame in (HELLO, encode(AllocatePoolMemory(2, MIB)), encode(AllocateFromPool(3, MIB))):
            sock.send(frame)
        sock.setblocking(False)
        number = 4
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(ConnectionError):
            while not server.statistics().bad:
                assert time.monotonic() < deadline
                with contextlib.suppress(BlockingIOError):
                    sock.send(encode(CopyFromPool(number, 0, 0, MIB)))
                    number += 1
        assert eventually(lambda: server.statistics().bad == 1 and at_rest(server))


def test_too_many_clients_are_turned_away() -> None:
    with server_in_thread(max_clients=2) as server:
        with client_of(server), client_of(server):
            with pytest.raises((PoolLost, PoolTimeout)):
                PinnedPoolClient(address_of(server))
            assert server.statistics().turned_away == 1
        assert eventually(lambda: at_rest(server))
        with client_of(server):
            pass


def test_what_is_no_pinned_pool_is_told_as_that() -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{directory}/mail.sock")
        listening.listen()

        def greet() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(100)
                peer.send(b"220 mail.example ESMTP ready\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(PoolLost, match="is not a pinned pool"):
            PinnedPoolClient(f"ipc://{directory}/mail.sock")
        thread.join()
    for wrong in ("nowhere", "host:", ":1", "host:99999", "host:x"):
        with pytest.raises(ValueError, match="not host:port"):
            PinnedPoolClient(wrong)


# --- from another host ------------------------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Iterator[PinnedPoolServer]:
    """A server that listens over TCP as well. A client that names its port finds no channel in the usual directory."""
    with server_in_thread(insecure=True) as running:
        yield running


@contextlib.contextmanager
def remote_client_of(server: PinnedPoolServer, mib: int = 1) -> Iterator[PinnedPoolClient]:
    client = PinnedPoolClient(remote_address_of(server), timeout=PATIENCE, shared_memory=False)
    try:
        client.allocate_pool_memory(mib * MIB)
        yield client
    finally:
        client.close()


def test_bytes_travel_over_tcp(remote: PinnedPoolServer) -> None:
    data = random.Random(1).randbytes(5 * MIB + 3)
    with remote_client_of(remote, 8) as client:
        assert isinstance(client._connection, RemoteConnection)
        assert client.allocate_from_pool(len(data)) is not None
        client.copy_to_pool(0, 0, data)
        back = bytearray(len(data))
        client.copy_from_pool(0, 0, back)
        assert back == data
        assert client.free_from_pool([0]) == 1
    assert eventually(lambda: at_rest(remote))


def test_killed_remote_client_loses_its_pool(remote: PinnedPoolServer) -> None:
    command = [sys.executable, "-c", HOLDER, remote_address_of(remote)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            assert remote.statistics().clients == 1
        finally:
            holder.kill()
    assert eventually(lambda: at_rest(remote))


def test_a_remote_client_of_a_server_that_was_restarted_is_told_that_its_pool_is_lost() -> None:
    with server_in_thread(insecure=True) as first:
        port = first.port
        client = PinnedPoolClient(remote_address_of(first), timeout=PATIENCE, shared_memory=False)
        client.allocate_pool_memory(MIB)
    with server_in_thread(insecure=True, port=port), pytest.raises(PoolLost, match="the first request must be Hello"):
        client.get_usage_info()
    client.close()


def test_closing_wakes_who_waits_for_a_remote_server() -> None:
    with ServerProcess("--insecure") as process:
        address = f"127.0.0.1:{process.ready['port']}"
        client = PinnedPoolClient(address, timeout=1000.0, shared_memory=False)
        with process.stopped(), asking(client) as failed:
            within(PATIENCE, client.close)
        assert isinstance(failed[0], (PoolLost, PoolClosed))


def test_garbage_over_tcp_costs_its_sender_the_session(remote: PinnedPoolServer) -> None:
    with remote_client_of(remote) as client, BlockingDealer(f"tcp://{remote_address_of(remote)}") as dealer:
        dealer.send([b"", b"garbage"])
        answer = dealer.receive(PATIENCE)
        assert answer is not None and isinstance(decode_answer(split(answer[-1])[0]), Refused)
        dealer.send([b"", HELLO])
        assert client.get_usage_info().active_allocations == 0
        assert (remote.statistics().clients, remote.statistics().bad) == (1, 1)


# --- serving ------------------------------------------------------------------------------------------------------


async def test_cancelled_serve_leaves_nothing() -> None:
    with short_directory() as directory:
        async with trio.open_nursery() as nursery:
            server = await nursery.start(
                functools.partial(serve, "127.0.0.1", 0, 8, chunk_size=CHUNK, runtime_dir=directory)
            )
            assert isinstance(server, PinnedPoolServer)
            assert os.listdir(directory)
            sock = connected(server)
            sock.send(HELLO)
            sock.send(encode(AllocatePoolMemory(2, MIB)))
            await trio.to_thread.run_sync(sock.recv, 1000)
            nursery.cancel_scope.cancel()
        assert os.listdir(directory) == []
        while sock.recv(1000):
            pass
        sock.close()
        assert at_rest(server)
        with pytest.raises(FileNotFoundError):
            connected(server)


async def test_cancel_while_a_pool_is_made_leaves_nothing() -> None:
    made: list[PoolMemory] = []
    begun, go = threading.Event(), threading.Event()

    def slowly(nbytes: int, pin: Any, go_on: Any) -> PoolMemory:
        begun.set()
        go.wait(PATIENCE)
        made.append(PoolMemory(nbytes, "none"))
        return made[-1]

    with short_directory() as directory:
        async with open_server(port=0, runtime_dir=directory, pool_memory_size=8, make_memory=slowly) as server:
            with connected(server) as sock:
                sock.send(HELLO)
                sock.send(encode(AllocatePoolMemory(2, MIB)))
                await trio.to_thread.run_sync(begun.wait)
            go.set()
        assert at_rest(server)
        assert made[0].memory is None


@pytest.mark.parametrize("shared", [True, False])
def test_end_while_clients_copy_is_told_to_all_of_them(shared: bool) -> None:
    """Wherever the server's tasks are when it is cancelled."""
    rng = random.Random(3)
    told: list[BaseException] = []

    def copy(server: PinnedPoolServer) -> None:
        data = bytes(3 * MIB + 1)
        try:
            with client_of(server, 8, shared_memory=shared) as client:
                while True:
                    allocation = client.allocate_from_pool(len(data))
                    assert allocation is not None
                    client.copy_to_pool(allocation.allocation_id, 0, data)
                    client.copy_from_pool(allocation.allocation_id, 0, bytearray(data))
                    client.free_from_pool([allocation.allocation_id])
        except BaseException as exc:
            told.append(exc)

    for _ in range(4):
        with server_in_thread() as server:
            threads = [threading.Thread(target=copy, args=(server,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.0, 0.3))
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert at_rest(server)
    assert len(told) == 12
    # Refused: the Unix socket has gone a moment before the connection.
    assert {type(error) for error in told} <= {PoolLost, PoolUnreachable, PoolRefused}, told


async def test_address_in_use_is_told() -> None:
    with short_directory() as directory:
        async with open_server(port=0, runtime_dir=directory) as server:
            with pytest.raises(PoolUnreachable, match="cannot listen"):
                await serve(port=server.port, runtime_dir=directory)


async def test_lock_of_a_stopped_server_blocks_no_loop(monkeypatch, caplog) -> None:
    monkeypatch.setattr("backends.pinned_pool._server._LOCK_PATIENCE", 0.01)
    with short_directory() as directory:
        fd = os.open(f"{directory}/pinned-pool.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with trio.move_on_after(0.1) as scope:
            await serve(port=0, runtime_dir=directory)
        assert scope.cancelled_caught
        assert (
            caplog.text.count(f"{directory}/pinned-pool.lock is locked by process {os.getpid()}: waiting for it") == 1
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, os.close, fd)
            async with open_server(port=0, runtime_dir=directory) as server:
                assert os.listdir(directory)
        assert at_rest(server)


async def test_directory_that_others_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "file").touch()
    with pytest.raises(PoolUnreachable, match="others may enter"):
        await serve(port=0, runtime_dir=str(tmp_path / "open"))


def test_server_stays_on_this_host_unless_told() -> None:
    with pytest.raises(PinnedPoolConfigError, match="must be of this host"):
        PinnedPoolConfig(host="0.0.0.0")
    with server_in_thread() as server, pytest.raises(PoolUnreachable):
        PinnedPoolClient(remote_address_of(server))
    assert PinnedPoolConfig(host="0.0.0.0", insecure=True).insecure
    with pytest.raises(PinnedPoolConfigError, match="power of two"):
        PinnedPoolConfig(chunk_size=5000)
    with pytest.raises(PinnedPoolConfigError, match="at most pool_memory_size"):
        PinnedPoolConfig(pool_memory_size=1, chunk_size="4 MiB")
    assert attrs.asdict(PinnedPoolConfig())["pool_memory_size"] == 4096
    assert PinnedPoolConfig().port == 8073


def test_errors_say_who_must_act() -> None:
    assert issubclass(PoolTimeout, TimeoutError)
    for error in (PoolLost, PoolTimeout, PoolRefused, PoolUnreachable, PoolClosed, BlockFreed):
        assert issubclass(error, RuntimeError)
        assert error.__doc__
