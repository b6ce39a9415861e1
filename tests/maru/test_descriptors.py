"""Region descriptors over a Unix socket: for who shows the right capability, and only to read unless it says more."""

import contextlib
import errno
import fcntl
import os
import random
import resource
import socket
import stat
import sys
import threading
from array import array
from contextlib import asynccontextmanager
from functools import partial
from subprocess import PIPE

import msgspec
import pytest
import trio
import trio.testing

from maru import BadMessage, CannotMap, NoAnswer, NotOwner, PoolUnusable, ServerLost, ServerRefused
from maru._pool.pool import MEMFD, open_pool
from maru._wire.capability import issue, verify
from maru.base import descriptors as descriptors_module
from maru.base.descriptors import DescriptorRequest, DescriptorServer, fetch_descriptor
from maru.base.memory.mapping import map_region
from tests.support.held_by_process import open_descriptors
from tests.support.pools import is_there, until

MIB2 = 2 << 20
EPOCH = 77
ME, OTHER = b"m" * 16, b"o" * 16


@asynccontextmanager
async def a_server(tmp_path, where=None, capacity_bytes=8 * MIB2, *, pool=None, **options):
    async with await open_pool(where or tmp_path / "pool", capacity_bytes, home=tmp_path / "pool") as opened:
        await opened.adopt([])

        def permits(request):
            shown = (request.region_id, request.offset, request.length, request.writable, EPOCH, request.session)
            return request.session != b"ended session..." and verify(opened.secret, request.capability, *shown)

        server = DescriptorServer(pool(opened) if pool else opened, permits, **options)
        server.pool = opened
        async with trio.open_nursery() as nursery:
            server.path = await nursery.start(server.run, str(tmp_path / "pool" / "fds.sock"))
            yield server
            nursery.cancel_scope.cancel()


def request_for(server, region, *, writable=False, session=ME, epoch=EPOCH, **changes):
    capability = issue(server.pool.secret, region.region_id, region.offset, region.length, writable, epoch, session)
    request = DescriptorRequest(session, region.region_id, region.offset, region.length, writable, capability)
    return msgspec.structs.replace(request, **changes)


async def fetch(server, request, within=30.0):
    return await trio.to_thread.run_sync(fetch_descriptor, server.path, request, within)


def access_mode(fd):
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


async def test_the_owner_gets_a_descriptor_to_write_and_a_reader_one_to_read(tmp_path):
    async with a_server(tmp_path) as server:
        region = await server.pool.allocate(MIB2)
        own, offset, length = await fetch(server, request_for(server, region, writable=True))
        foreign, *_ = await fetch(server, request_for(server, region, session=OTHER))
        assert (access_mode(own), access_mode(foreign)) == (os.O_RDWR, os.O_RDONLY)
        assert not os.get_inheritable(own)
        map_region(own, length, offset, write=True).view(3, 5)[:] = b"whole"
        assert bytes(map_region(foreign, length, offset).view(3, 5)) == b"whole"
        with pytest.raises(CannotMap):
            map_region(foreign, length, offset, write=True)
        with pytest.raises(OSError):
            os.pwrite(foreign, b"no", 0)
        os.close(own)
        os.close(foreign)
        assert server.statistics().granted == 2


@pytest.mark.parametrize("kind", ["memfd", "device"])
async def test_regions_without_a_file_of_their_own_are_reached_the_same_way(tmp_path, kind):
    where = MEMFD
    if kind == "device":
        where = tmp_path / "device"
        where.touch(0o600)
        where.write_bytes(bytes(4 * MIB2))
    async with a_server(tmp_path, where) as server:
        await server.pool.allocate(MIB2)
        region = await server.pool.allocate(MIB2)
        own, offset, length = await fetch(server, request_for(server, region, writable=True))
        assert (offset, length) == (MIB2 if kind == "device" else 0, MIB2)
        map_region(own, length, offset, write=True).view(0, 4)[:] = b"seen"
        foreign, *_ = await fetch(server, request_for(server, region))
        assert access_mode(foreign) == os.O_RDONLY
        assert bytes(map_region(foreign, length, offset).view(0, 4)) == b"seen"
        os.close(own)
        os.close(foreign)


@pytest.mark.parametrize(
    "changes",
    [
        {"region_id": 2},
        {"region_id": (1 << 63) - 1},
        {"offset": 4096},
        {"length": MIB2 // 2},
        {"length": 4 * MIB2},
        {"writable": True},
        {"session": OTHER},
        {"session": b"ended session..."},
        {"capability": bytes(32)},
        {"capability": b""},
    ],
)
async def test_a_capability_for_anything_else_is_refused_and_the_connection_goes_on(tmp_path, changes):
    async with a_server(tmp_path) as server:
        region, _ = await server.pool.allocate(MIB2), await server.pool.allocate(MIB2)
        right = request_for(server, region)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(server.path)
            for request, status in [(msgspec.structs.replace(right, **changes), errno.EACCES), (right, 0)]:
                sock.send(msgspec.msgpack.encode(request))
                message, fds, *_ = await trio.to_thread.run_sync(socket.recv_fds, sock, 512, 4)
                assert msgspec.msgpack.decode(message)[0] == status
                assert len(fds) == (not status)
                for fd in fds:
                    os.close(fd)
        with pytest.raises(NotOwner, match="does not permit this request"):
            await fetch(server, msgspec.structs.replace(right, **changes))
        assert server.statistics().refused == 2


async def test_a_capability_of_another_server_start_is_refused(tmp_path):
    async with a_server(tmp_path) as server:
        region = await server.pool.allocate(MIB2)
        with pytest.raises(NotOwner):
            await fetch(server, request_for(server, region, epoch=EPOCH + 1))


async def test_a_right_to_what_is_gone_or_was_never_inside_is_of_no_use(tmp_path):
    async with a_server(tmp_path) as server:
        region = await server.pool.allocate(MIB2)
        secret = server.pool.secret
        too_long = DescriptorRequest(
            ME, region.region_id, MIB2, MIB2, False, issue(secret, region.region_id, MIB2, MIB2, False, EPOCH, ME)
        )
        with pytest.raises(ServerRefused, match="not inside"):
            await fetch(server, too_long)
        await server.pool.free(region.region_id)
        with pytest.raises(ServerRefused, match="there is no region"):
            await fetch(server, request_for(server, region))


async def test_a_bad_request_costs_its_connection_and_nobody_else(tmp_path):
    async with a_server(tmp_path) as server:
        region = await server.pool.allocate(MIB2)
        good = request_for(server, region)
        encoded = msgspec.msgpack.encode(good)
        rng = random.Random(5)
        bad = [b"x", b"\x90", b"\xc1", encoded[:-1], encoded + b"x", encoded * 20, bytes(600)]
        bad += [msgspec.msgpack.encode([*msgspec.to_builtins(good, builtin_types=(bytes,))[:5], list(range(9))])]
        for _ in range(100):
            mutated = bytearray(encoded)
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] ^= rng.randrange(1, 256)
            if mutated != encoded:
                bad.append(bytes(mutated))
        for message in bad:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(server.path)
                sock.send(message)
                answer, fds, *_ = await trio.to_thread.run_sync(socket.recv_fds, sock, 512, 4)
                status = msgspec.msgpack.decode(answer)[0]
                assert status in (errno.EINVAL, errno.EACCES) and not fds, message
                if status == errno.EINVAL:
                    assert not await trio.to_thread.run_sync(sock.recv, 512)
        assert server.statistics().bad >= 8
        fd, *_ = await fetch(server, good)
        os.close(fd)


async def test_the_socket_has_mode_0600_in_a_directory_of_mode_0700(tmp_path):
    old = os.umask(0)
    try:
        async with a_server(tmp_path) as server:
            assert stat.S_IMODE(os.stat(server.path).st_mode) == 0o600
        assert not is_there(server.path)
        server = DescriptorServer(None, lambda request: False)
        open_to_others = tmp_path / "open"
        open_to_others.mkdir(mode=0o755)
        with pytest.raises(PoolUnusable, match="mode 0700"):
            await server.run(str(open_to_others / "fds.sock"))
        with pytest.raises(PoolUnusable, match="no socket can be made"):
            await server.run(str(tmp_path / "not there" / "fds.sock"))
    finally:
        os.umask(old)


async def test_a_socket_that_a_dead_server_left_is_replaced_and_a_file_is_not(tmp_path):
    (tmp_path / "pool").mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(tmp_path / "pool" / "fds.sock"))
    left.close()
    async with a_server(tmp_path) as server:
        os.close((await fetch(server, request_for(server, await server.pool.allocate(1))))[0])
    (tmp_path / "pool" / "fds.sock").write_bytes(b"mine")
    with pytest.raises(PoolUnusable, match="is not a socket"):
        await DescriptorServer(None, lambda request: False).run(str(tmp_path / "pool" / "fds.sock"))
    assert (tmp_path / "pool" / "fds.sock").read_bytes() == b"mine"


async def test_a_path_longer_than_a_sockets_address_is_reached_all_the_same(tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir(mode=0o700)
    async with a_server(deep) as server:
        assert len(server.path) > 107
        os.close((await fetch(server, request_for(server, await server.pool.allocate(1))))[0])


async def test_another_users_process_is_turned_away_on_both_sides(tmp_path, monkeypatch):
    async with a_server(tmp_path) as server:
        request = request_for(server, await server.pool.allocate(1))
        monkeypatch.setattr(descriptors_module.os, "geteuid", lambda: 12345)
        with pytest.raises(BadMessage, match="served by another user"):
            await fetch(server, request)
        monkeypatch.setattr(descriptors_module, "peer_uid", lambda sock: 12345)
        with pytest.raises(ServerLost):
            await fetch(server, request)
        await until(lambda: server.statistics().turned_away)
        assert server.statistics().granted == 0


async def test_silent_connections_end_in_time_and_before_newer_ones(tmp_path, autojump_clock):
    async with a_server(tmp_path, max_connections=2, idle=10) as server:
        began = trio.current_time()
        socks = [trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        for sock in socks:
            await sock.connect(server.path)
        assert await socks[0].recv(1) == b"" and trio.current_time() == began
        assert await socks[2].recv(1) == b"" and trio.current_time() - began == pytest.approx(10)
        assert server.statistics().turned_away == 1
        for sock in socks:
            sock.close()
        await trio.testing.wait_all_tasks_blocked()
        assert server.statistics().connections == 0


async def test_full_process_hangs_up_and_goes_on(tmp_path, caplog):
    async with a_server(tmp_path) as server:
        request = request_for(server, await server.pool.allocate(1))
        client = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        taken = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/", os.O_PATH))
            with trio.fail_after(30):
                await client.connect(server.path)
                assert await client.recv(1) == b""
                client.close()
                client = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                await client.connect(server.path)
                assert await client.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
            client.close()
        assert server.statistics().turned_away == 2
        fd, _, _ = await fetch(server, request)
        os.close(fd)
    assert caplog.text.count("clients are refused until descriptors are free") == 1
    assert caplog.text.count("clients are accepted again") == 1


class Slow:
    """A pool whose descriptors come only once they are let go."""

    def __init__(self, pool):
        self._pool = pool
        self.gate = trio.Event()
        self.opened = []

    def find(self, region_id):
        return self._pool.find(region_id)

    async def open_fd(self, region_id, write):
        if region_id == 1:
            await self.gate.wait()
        self.opened.append(await self._pool.open_fd(region_id, write))
        return self.opened[-1]


async def test_a_region_that_is_slow_to_open_stalls_its_own_client_only(tmp_path):
    async with a_server(tmp_path, pool=Slow) as server:
        slow, quick = [await server.pool.allocate(1) for _ in range(2)]
        async with trio.open_nursery() as nursery:

            async def wait_for_it():
                os.close((await fetch(server, request_for(server, slow)))[0])

            nursery.start_soon(wait_for_it)
            await trio.testing.wait_all_tasks_blocked()
            os.close((await fetch(server, request_for(server, quick)))[0])
            assert server.statistics().granted == 1
            server._pool.gate.set()
        assert server.statistics().granted == 2


async def test_a_stalled_file_system_is_told_in_time(tmp_path):
    async with a_server(tmp_path, pool=Slow, open_time=0.01) as server:
        slow = await server.pool.allocate(1)
        with pytest.raises(ServerRefused, match="does not answer"):
            await fetch(server, request_for(server, slow))
        with pytest.raises(NoAnswer, match=r"did not answer within 0.01 s"):
            server._open_time = 60
            await fetch(server, request_for(server, slow), within=0.01)


async def test_no_descriptor_stays_open_here_whether_or_not_the_answer_left(tmp_path):
    async with a_server(tmp_path, pool=Slow) as server:
        regions = [await server.pool.allocate(1) for _ in range(2)]
        before = open_descriptors(collect=True)
        for region in regions:  # the first one's client has gone before there is an answer
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(server.path)
                sock.send(msgspec.msgpack.encode(request_for(server, region)))
                await trio.testing.wait_all_tasks_blocked()
            server._pool.gate.set()
            await until(lambda: not server.statistics().connections)
        assert len(server._pool.opened) == 2
        assert open_descriptors() <= before


def answer_once(path, answer):
    """A server that is none of ours: takes one request and answers as told."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen()

    def serve():
        with listening, listening.accept()[0] as peer:
            peer.recv(512)
            answer(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def reply(status=0, text="", offset=0, length=MIB2, fds=()):
    message = msgspec.msgpack.encode([status, text, offset, length])
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    return lambda peer: peer.sendmsg([message], attached)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (lambda peer: None, ServerLost, "closed the connection"),
        (lambda peer: peer.send(b"\xc1"), BadMessage, "not a _Reply"),
        (lambda peer: peer.send(bytes(1_000)), BadMessage, "at most 512"),
        (reply(), BadMessage, "0 descriptors"),
        (reply(fds=[0, 1]), BadMessage, "2 descriptors"),
        (reply(fds=[0, 1, 2, 0, 1, 2, 0, 1]), BadMessage, "descriptors were received instead"),
        (reply(offset=4096, fds=[0]), BadMessage, "does not match the request"),
        (reply(status=errno.EIO, text="broken", fds=[0]), ServerRefused, "broken"),
    ],
)
def test_a_client_believes_no_odd_answer_and_keeps_no_descriptor_of_it(tmp_path, answer, error, text):
    before = open_descriptors(collect=True)
    path = str(tmp_path / "fds.sock")
    thread = answer_once(path, answer)
    with pytest.raises(error, match=text):
        fetch_descriptor(path, DescriptorRequest(ME, 1, 0, MIB2, False, bytes(32)), 30)
    thread.join()
    assert open_descriptors() <= before


def test_a_server_that_is_not_there_is_lost(tmp_path):
    with pytest.raises(ServerLost, match=r"fds\.sock"):
        fetch_descriptor(str(tmp_path / "fds.sock"), DescriptorRequest(ME, 1, 0, MIB2, False, bytes(32)), 1)


async def test_another_process_maps_what_it_was_handed(tmp_path):
    """End to end: the reader knows neither the path of the region nor how to write it."""
    script = """
import sys
from maru.base.descriptors import DescriptorRequest, fetch_descriptor
from maru.base.memory.mapping import map_region
path, region_id, length, capability = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
fd, offset, length = fetch_descriptor(path, DescriptorRequest(b"m" * 16, region_id, 0, length, False, capability), 30)
view = map_region(fd, length, offset).view(0, 5)
print(flush=True)
sys.stdin.readline()
sys.stdout.write(f"{bytes(view).decode()} {view.readonly}\\n")  # in one piece, however the interpreter buffers
sys.stdout.flush()
"""

    async with a_server(tmp_path) as server:
        region = await server.pool.allocate(1)
        request = request_for(server, region)
        arguments = [server.path, str(region.region_id), str(region.length), request.capability.hex()]
        async with trio.open_nursery() as nursery:
            reader = await nursery.start(
                partial(trio.run_process, [sys.executable, "-c", script, *arguments], stdin=PIPE, stdout=PIPE)
            )
            assert await reader.stdout.receive_some() == b"\n"
            map_region(region.path, region.length, write=True).view(0, 5)[:] = b"later"
            await reader.stdin.send_all(b"\n")
            assert await reader.stdout.receive_some() == b"later True\n"
