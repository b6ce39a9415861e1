"""The server over real sockets: in this process, and as the command. What messages mean is tested in test_maru_service."""

import contextlib
import functools
import gc
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import attrs
import pytest
import trio
import zmq
from xxhash import xxh3_64_intdigest

from maru import ConfigError, JournalFailed, NotOwner, PoolInUse, ServerConfig, open_server
from maru._config import knobs
from maru._pool.pool import open_pool
from maru._server import main as main_module
from maru._server import storage
from maru._wire import (
    AllocRequest,
    BatchRegisterRequest,
    BeatRequest,
    CloseRequest,
    Code,
    ErrorReply,
    FindRequest,
    HandshakeRequest,
    KeyRequest,
    KeysRequest,
    RegionRequest,
    RegisterRequest,
    StoreRequest,
    body_of,
    decode_reply,
    read_header,
    request,
)
from maru.base.descriptors import DescriptorRequest, fetch_descriptor
from maru.testing import open_test_server
from maru.transport import new_key_pair, save_key_pair
from tests.support.maru_processes import PATIENCE
from tests.support.maru_processes import eventually as eventually_blocking
from tests.support.published import PublishedAsyncClient, PublishedClient, PublishedRmClient
from tests.support.published_wire import Ask

MIB = 1 << 20
REGION = 2 * MIB
COMMAND = [sys.executable, "-c", "from maru.server_cli import main; main()"]


class Client:
    """A blocking DEALER, told what to send. One thread at a time."""

    def __init__(self, address, timeout=PATIENCE, connect=True):
        self.address = address
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(timeout * 1000)
        if connect:
            self.socket.connect(address)
        self._sequences = itertools.count(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self._context.term()

    def send(self, code, message=None):
        sequence = next(self._sequences)
        self.socket.send_multipart([b"", request(code, sequence, message)])
        return sequence

    def receive(self):
        """Sequence and answer of whatever comes next."""
        frame = self.socket.recv_multipart()[-1]
        header = read_header(frame)
        return header.sequence, decode_reply(
            Code.HEARTBEAT if header.code == 0x80 else header.code, body_of(frame, header)
        )

    def ask(self, code, message=None):
        sequence = self.send(code, message)
        answered, reply = self.receive()
        assert answered == sequence
        return reply

    def own(self, instance_id="ours", **kwargs):
        """Shake hands as a client of ours does."""
        return self.ask(Code.HANDSHAKE, HandshakeRequest(instance_id=instance_id, extensions=1, **kwargs))

    def region(self, instance_id="theirs", size=REGION, session=None):
        answer = self.ask(Code.REQUEST_ALLOC, AllocRequest(instance_id, size, session))
        assert answer.success, answer.error
        return answer.handle

    def register(self, key, region_id, offset=0, length=1000):
        return self.ask(Code.REGISTER_KV, RegisterRequest(key, region_id, offset, length))


def in_thread(work, *args):
    return trio.to_thread.run_sync(functools.partial(work, *args), abandon_on_cancel=False)


def config_for(path, **kwargs):
    defaults = {"port": 0, "pool_path": str(path), "capacity_bytes": 16 * MIB, "zmq_socket": kwargs.get("ipc", True)}
    return ServerConfig(**{**defaults, **kwargs})


@pytest.fixture
def pool(tmp_path_factory):
    """A short path: a Unix socket's name has 107 bytes."""
    return tmp_path_factory.mktemp("pool") / "p"


@contextlib.asynccontextmanager
async def serving(pool, **kwargs):
    with trio.fail_after(2 * PATIENCE):
        async with open_server(config_for(pool, **kwargs)) as server:
            yield server


def dial(server, transport="ipc", **kwargs):
    [address] = [endpoint for endpoint in server.endpoints if endpoint.startswith(transport)]
    return Client(address, **kwargs)


async def eventually(holds):
    with trio.fail_after(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in other threads and processes
            await trio.sleep(0.005)


# --- answering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_both_endpoints_answer(pool, transport):
    async with serving(pool, host="127.0.0.1") as server:

        def talk():
            with dial(server, transport) as client:
                answer = client.ask(Code.HANDSHAKE, HandshakeRequest())
                assert (answer.success, answer.rm_address, answer.epoch) == (True, server.rm_address, server.epoch)
                assert answer.descriptors == server.descriptors_path
                assert server.epoch != 0
                sections = client.ask(Code.DESCRIBE).sections
                assert sections["server"]["pid"] == os.getpid()
                assert sections["pool"]["home"] == str(pool)
                assert "journal" in sections

        await in_thread(talk)


async def test_nothing_listens_for_tcp_unless_it_is_asked_for(pool):
    async with serving(pool) as server:
        assert server.endpoints == (f"ipc://{pool}/maru.sock",)
        assert server.rm_address == "" and server.statistics().relay is None


async def test_either_endpoint_can_be_switched_off(pool):
    async with serving(pool, host="127.0.0.1", ipc=False, rm_address="") as server:
        assert [endpoint.partition(":")[0] for endpoint in server.endpoints] == ["tcp"]
        assert server.rm_address == ""
    async with serving(pool, rm_address="127.0.0.1:0") as server:
        assert [endpoint.partition(":")[0] for endpoint in server.endpoints] == ["ipc"]
        assert server.rm_address.startswith("127.0.0.1:")


async def test_published_clients_share_pages_through_the_embedded_resource_manager(pool):
    async with serving(pool, host="127.0.0.1") as server:
        [address] = [endpoint for endpoint in server.endpoints if endpoint.startswith("tcp")]

        def talk():
            with (
                PublishedClient(address) as writer,
                PublishedAsyncClient(address) as reader,
                PublishedRmClient(writer.ask(Ask.HANDSHAKE)["rm_address"]) as rm,
                PublishedRmClient(server.rm_address) as other_rm,
            ):
                handle = writer.ask(Ask.REQUEST_ALLOC, instance_id="w", size=REGION)["handle"]
                rm.map(handle)[100:105] = b"bytes"
                entry = {"region_id": handle["region_id"], "kv_offset": 100, "kv_length": 5}
                assert writer.ask(Ask.REGISTER_KV, key="k", **entry)["is_new"]
                found = reader.ask(Ask.LOOKUP_KV, key="k")
                assert found["found"]
                view = other_rm.map(found["handle"])
                assert view[found["kv_offset"] :][: found["kv_length"]] == b"bytes"
                many = [reader.submit(Ask.EXISTS_KV, key="k") for _ in range(64)]
                assert all(future.result(5)["exists"] for future in many)
                assert writer.ask(Ask.RETURN_ALLOC, instance_id="w", region_id=handle["region_id"])["success"]
                assert writer.ask(Ask.DELETE_KV, key="k")["success"]

        await in_thread(talk)
        await eventually(lambda: server.statistics().pool.regions == 0)


async def test_a_region_is_handed_out_for_its_capability_and_readers_cannot_write(pool):
    async with serving(pool) as server:

        def talk():
            with dial(server, "ipc") as owner, dial(server, "ipc") as reader:
                token, other = owner.own("a").session, reader.own("b").session
                region = owner.region("a", session=token)

                def fetch(client, session, write):
                    answer = client.ask(Code.REGION, RegionRequest(session, 0, region.region_id, write))
                    return DescriptorRequest(
                        session, region.region_id, answer.offset, answer.length, answer.writable, answer.capability
                    )

                write, read = fetch(owner, token, True), fetch(reader, other, False)
                fd, offset, length = fetch_descriptor(server.descriptors_path, write, 5)
                with mmap.mmap(fd, length, offset=offset) as memory:
                    memory[:5] = b"bytes"
                os.close(fd)
                fd, offset, length = fetch_descriptor(server.descriptors_path, read, 5)
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, length, offset=offset, prot=mmap.PROT_WRITE)
                with mmap.mmap(fd, length, offset=offset, prot=mmap.PROT_READ) as memory:
                    assert memory[:5] == b"bytes"
                os.close(fd)
                for changed in ({"session": token}, {"writable": True}, {"region_id": region.region_id + 1}):
                    request = DescriptorRequest(
                        *(changed.get(name, getattr(read, name)) for name in DescriptorRequest.__struct_fields__)
                    )
                    with pytest.raises(NotOwner):
                        fetch_descriptor(server.descriptors_path, request, 5)
                reader.ask(Code.CLOSE, CloseRequest(other, 0))
                with pytest.raises(NotOwner):
                    fetch_descriptor(server.descriptors_path, read, 5)

        await in_thread(talk)


async def test_a_full_pool_is_an_answer_and_orphans_make_room(pool):
    async with serving(pool, capacity_bytes=3 * REGION, v1_read_grace=0.0) as server:

        def talk():
            with dial(server) as client:
                token = client.own("a").session
                first = client.region("a", session=token)
                assert client.ask(
                    Code.STORE, StoreRequest(token, 0, 1, first.region_id, ["k"], [0], 100, None)
                ).statuses == [0]
                client.region("b", 2 * REGION, token)
                full = client.ask(Code.REQUEST_ALLOC, AllocRequest("c", REGION))
                assert not full.success and full.error
                assert (pool / f"maru_{first.region_id}.dat").exists()
                client.ask(Code.CLOSE, CloseRequest(token, 0))
                assert client.ask(Code.LOOKUP_KV, KeyRequest("k")).found
                client.region("c", 3 * REGION)
                assert not client.ask(Code.EXISTS_KV, KeyRequest("k")).exists
                assert not (pool / f"maru_{first.region_id}.dat").exists()

        await in_thread(talk)
        assert server.statistics().pool.regions == 1


async def test_the_resource_manager_gives_regions_and_takes_them_back_from_who_got_them(pool):
    async with serving(pool, rm_address="127.0.0.1:0", capacity_bytes=REGION) as server:

        def talk():
            with PublishedRmClient(server.rm_address) as one, PublishedRmClient(server.rm_address, "host:2") as two:
                answer = one.alloc(REGION)
                assert answer.status == 0
                assert two.alloc(REGION).status < 0
                assert two.free(answer.handle) < 0
                assert one.free(answer.handle) == 0
                assert two.alloc(REGION).status == 0

        await in_thread(talk)


async def test_there_are_only_so_many_regions_and_the_refusal_names_the_knob(pool):
    async with serving(pool, max_regions=2, rm_address="127.0.0.1:0") as server:

        def talk():
            with dial(server) as client:
                client.region()
                client.region()
                answer = client.ask(Code.REQUEST_ALLOC, AllocRequest("theirs", REGION))
                assert not answer.success
                assert "2 regions" in answer.error and "max_regions" in answer.error
                with PublishedRmClient(server.rm_address) as rm:
                    assert rm.alloc(REGION).status < 0

        await in_thread(talk)


async def test_with_curve_only_known_clients_come_in(pool, tmp_path, caplog):
    server_pair, friend, stranger = new_key_pair(), new_key_pair(), new_key_pair()
    save_key_pair(tmp_path / "server.key", server_pair)
    (tmp_path / "clients").write_bytes(friend.public + b"  # a friend\n")
    keys = {"curve_key_file": str(tmp_path / "server.key"), "curve_clients_file": str(tmp_path / "clients")}
    async with serving(pool, host="127.0.0.1", **keys) as server:

        def talk(pair):
            with dial(server, "tcp", connect=False) as client:
                client.socket.curve_serverkey = server_pair.public
                if pair is not None:
                    client.socket.curve_publickey, client.socket.curve_secretkey = pair.public, pair.secret
                client.socket.connect(client.address)
                return client.ask(Code.HEARTBEAT).epoch

        assert await in_thread(talk, friend) == server.epoch

        def knock():
            with dial(server) as plain:
                plain.socket.rcvtimeo = 200
                plain.send(Code.HEARTBEAT)
                with pytest.raises(zmq.Again):
                    plain.receive()
            before = server.statistics().socket.refused
            with dial(server, "tcp", connect=False, timeout=0.2) as client:
                client.socket.curve_serverkey = server_pair.public
                client.socket.curve_publickey, client.socket.curve_secretkey = stranger.public, stranger.secret
                client.socket.connect(client.address)
                client.send(Code.HEARTBEAT)
                eventually_blocking(lambda: server.statistics().socket.refused > before)
                with pytest.raises(zmq.Again):
                    client.receive()

        for _ in range(2):
            await in_thread(knock)
        assert await in_thread(talk, friend) == server.epoch
        [said] = [record.getMessage() for record in caplog.records if "CURVE" in record.getMessage()]  # once
        assert stranger.public.decode() in said and "is not on the list" in said


async def test_insecure_is_said(pool, caplog):
    async with serving(pool, host="0.0.0.0", rm_address="0.0.0.0:0", insecure=True) as server:
        assert f"insecure: every process that reaches {server.endpoints[0]}" in caplog.text
        assert "maru.sock" in repr(server)


async def test_a_key_file_that_others_may_read_is_refused(pool, tmp_path):
    save_key_pair(tmp_path / "server.key", new_key_pair())
    (tmp_path / "server.key").chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        async with serving(pool, curve_key_file=str(tmp_path / "server.key")):
            pass


# --- what ends ----------------------------------------------------------------------------------------------------


async def test_a_silent_session_ends_with_its_lease(pool):
    async with serving(pool, session_lease=0.2, min_lease=0.1, lease_grace=0.0) as server:

        def talk():
            with dial(server) as client:
                return client.own().session

        began = trio.current_time()
        token = await in_thread(talk)
        await eventually(lambda: server.statistics().service.directory.sessions == 0)
        assert trio.current_time() - began >= 0.2  # and not with its connection

        def talk_on():
            with dial(server) as client:
                answer = client.ask(Code.BEAT, BeatRequest(token, 0))
                assert isinstance(answer, ErrorReply) and answer.code == "no_session"

        await in_thread(talk_on)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_a_published_owner_ends_with_its_connection_and_not_with_its_silence(pool, transport):
    async with serving(pool, host="127.0.0.1", session_lease=0.1, min_lease=0.1) as server:

        def connect():
            client = dial(server, transport)
            region = client.region("theirs")
            assert client.register("k", region.region_id).is_new
            return client

        client = await in_thread(connect)
        try:
            await trio.sleep(0.5)  # five leases of silence
            assert server.statistics().service.directory.sessions == 1
        finally:
            client.__exit__()
        await eventually(lambda: server.statistics().service.directory.sessions == 0)
        statistics = server.statistics().service
        assert (statistics.peers, statistics.directory.connections) == (0, 0)
        assert statistics.directory.abandoned == 1


async def test_an_allowed_shutdown_asks_the_server_to_end(pool):
    async with serving(pool, allow_shutdown=True) as server:

        def talk():
            with dial(server) as client:
                assert client.ask(Code.SHUTDOWN).success

        await in_thread(talk)
        await server.wait_stopping()


async def test_leaving_the_block_leaves_files_and_no_sockets(pool):
    async with serving(pool, host="127.0.0.1") as server:

        def talk():
            with dial(server) as client:
                region = client.region()
                client.register("k", region.region_id)

        await in_thread(talk)
        assert {path.name for path in pool.iterdir() if stat.S_ISSOCK(path.stat().st_mode)} == {
            "maru.sock",
            "channel.sock",
            "tcp.sock",
            "descriptors.sock",
        }
        for path in pool.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(pool.stat().st_mode) == 0o700
        tcp = server.endpoints[0].rpartition(":")[2]
    assert not [path for path in pool.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert [path.name for path in pool.glob("maru_*.dat")] == ["maru_1.dat"]
    assert list(pool.glob("journal.*"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(tcp)))


async def test_an_error_of_the_block_leaves_as_it_came(pool):
    with pytest.raises(KeyError, match="mine"):
        async with serving(pool):
            raise KeyError("mine")
    with pytest.raises(ExceptionGroup) as group:
        async with serving(pool):
            raise ExceptionGroup("mine", [KeyError("alone")])
    assert group.value.message == "mine"
    with trio.move_on_after(0.05) as scope:
        async with serving(pool):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    async with serving(pool):
        pass


async def test_a_pool_has_one_server(pool):
    async with serving(pool) as server:
        with pytest.raises(PoolInUse, match=str(os.getpid())):
            async with serving(pool):
                pass

        def talk():
            with dial(server) as client:
                assert client.ask(Code.HEARTBEAT).epoch == server.epoch

        await in_thread(talk)


async def test_a_port_that_is_taken_is_an_os_error_and_the_pool_is_free_again(pool):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        async with serving(pool, host="127.0.0.1", port=taken.getsockname()[1]):
            pass
    async with serving(pool):
        pass


async def test_a_path_that_no_socket_fits_into_is_said(tmp_path):
    with pytest.raises(ConfigError, match="runtime_dir"):
        async with serving(tmp_path / ("x" * 100)):
            pass
    with pytest.raises(ConfigError, match="runtime_dir"):
        async with serving(tmp_path / ("x" * 100), ipc=False, host="127.0.0.1"):  # what is relayed goes over one, too
            pass


# --- what goes wrong ----------------------------------------------------------------------------------------------


BAD = [
    b"",
    b"x",
    b"\0" * 16,
    request(Code.HEARTBEAT, 1)[:-1],
    struct.pack("!HBBB3xII", 0xCF00, 1, 1, 0, 1, 0xFFFFFFFF),
    os.urandom(300),
]


async def test_bad_frames_cost_their_sender_and_nobody_else(pool):
    async with serving(pool) as server:

        def talk():
            with dial(server) as good, dial(server) as bad:
                token = good.own().session
                for frame in BAD:
                    for envelope in ([b"", frame], [frame], [b"", b"", frame], [b"", frame, b"more"]):
                        bad.socket.send_multipart(envelope)
                    assert good.ask(Code.BEAT, BeatRequest(token, 0)).lease > 0
                sequence, answer = bad.receive()
                assert (sequence, answer.code) == (0, "malformed")
                # once; and who makes sense again is answered again
                assert isinstance(bad.ask(Code.HEARTBEAT), object)

        await in_thread(talk)
        assert server.statistics().service.bad_frames > 0


async def test_an_oversized_message_ends_its_connection_and_nothing_else(pool):
    async with serving(pool, max_message_bytes=64 << 10) as server:

        def talk():
            with dial(server) as good, dial(server) as bad:
                token = good.own().session
                bad.socket.rcvtimeo = 200
                bad.socket.send_multipart([b"", b"x" * (65 << 10)])
                with pytest.raises(zmq.Again):
                    bad.socket.recv_multipart()
                assert good.ask(Code.BEAT, BeatRequest(token, 0)).lease > 0
                keys = [f"{number:0>100}" for number in range(600)]
                assert len(good.ask(Code.FIND, FindRequest(token, 0, keys, False, False)).found) == 0

        await in_thread(talk)


ZMTP_1 = b"\x01\x00" + b"\x01\x01" + b"\x05\x00abcd"
"""A greeting of an age ago, with a message: ZeroMQ takes it, and does not say over which connection it came."""


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"\0" * 1000, ZMTP_1, ZMTP_1 * 20, os.urandom(1000)],
    ids=["http", "ff", "00", "zmtp1", "much zmtp1", "random"],
)
async def test_garbage_at_the_port_disturbs_nobody(pool, garbage):
    async with serving(pool, host="127.0.0.1") as server:

        def talk():
            port = int(server.endpoints[0].rpartition(":")[2])
            with dial(server) as good:
                token = good.own().session
                for _ in range(3):
                    with socket.create_connection(("127.0.0.1", port)) as raw:
                        raw.sendall(garbage)
                        assert good.ask(Code.BEAT, BeatRequest(token, 0)).lease > 0
                    assert good.ask(Code.BEAT, BeatRequest(token, 0)).lease > 0

        await in_thread(talk)
        await eventually(lambda: server.statistics().service.peers <= 1)


async def test_who_does_not_read_loses_answers_and_holds_nobody_up(pool):
    async with serving(pool, high_water_mark=64) as server:

        def talk():
            with dial(server) as good, dial(server, connect=False) as deaf:
                region = good.region().region_id
                keys = [f"k{number}" for number in range(64)]
                entries = [RegisterRequest(key, region, number * 100, 100) for number, key in enumerate(keys)]
                assert good.ask(Code.BATCH_REGISTER_KV, BatchRegisterRequest(entries)).success
                deaf.socket.rcvhwm = 1
                deaf.socket.connect(deaf.address)
                for _ in range(3000):  # 25 MB of answers: more than all buffers on the way
                    deaf.send(Code.BATCH_LOOKUP_KV, KeysRequest(keys))
                while not server.statistics().unread_answers:
                    assert good.ask(Code.EXISTS_KV, KeyRequest("k1")).exists
                assert good.ask(Code.EXISTS_KV, KeyRequest("k1")).exists
                sequence, answer = deaf.receive()
                assert (sequence, len(answer.entries)) == (1, 64)

        await in_thread(talk)


async def test_a_stalled_pool_stalls_only_who_waits_for_memory(pool, monkeypatch):
    stalled, gate = threading.Event(), threading.Event()

    def reserve(fd, offset, length):
        stalled.set()
        assert gate.wait(PATIENCE)
        os.posix_fallocate(fd, offset, length)

    monkeypatch.setattr(storage, "open_pool", functools.partial(open_pool, reserve=reserve))
    async with serving(pool) as server:

        def talk():
            with dial(server) as waiting, dial(server) as other:
                token = other.own("b").session
                asked = waiting.send(Code.REQUEST_ALLOC, AllocRequest("a", REGION))
                assert stalled.wait(PATIENCE)
                for _ in range(20):
                    assert other.ask(Code.BEAT, BeatRequest(token, 0)).lease > 0
                    assert not other.ask(Code.EXISTS_KV, KeyRequest("k")).exists
                assert waiting.ask(Code.HEARTBEAT).epoch == server.epoch  # overtakes
                gate.set()
                sequence, answer = waiting.receive()
                assert (sequence, answer.success) == (asked, True)

        await in_thread(talk)


async def test_who_still_waits_for_memory_when_the_server_ends_is_told(pool, monkeypatch):
    gate = threading.Event()
    stalled = threading.Event()
    gone_on = []

    def reserve(fd, offset, length):
        stalled.set()
        gone_on.append(gate.wait(PATIENCE))
        raise OSError(28, "no space")

    monkeypatch.setattr(storage, "open_pool", functools.partial(open_pool, reserve=reserve))
    client = None
    try:
        async with serving(pool, drain_timeout=0.1) as server:

            def talk():
                client = dial(server)
                client.send(Code.REQUEST_ALLOC, AllocRequest("a", REGION))
                assert stalled.wait(PATIENCE)
                return client

            client = await in_thread(talk)
        assert not gone_on  # nobody waited for that thread

        def hear():
            _, answer = client.receive()
            assert (answer.success, answer.error) == (False, "the server is leaving")

        await in_thread(hear)
    finally:
        gate.set()
        if client is not None:
            client.__exit__()
    await eventually(lambda: not list(pool.glob("maru_*")))  # the thread that was stuck cleans up when it is done


async def test_while_the_journal_cannot_be_written_nothing_is_acknowledged(pool):
    async with serving(pool) as server:

        def connect():
            client = dial(server)
            return client, client.own().session

        client, token = await in_thread(connect)
        with client:
            region = await in_thread(client.region, "ours", REGION, token)
            full = True
            append = server._storage.journal.append

            def failing(records):
                if full:
                    raise JournalFailed("no space left")
                append(records)

            server._storage.journal.append = failing
            store = StoreRequest(token, 0, 1, region.region_id, ["k"], [0], 100, None)

            def ask():
                client.socket.rcvtimeo = 300
                sequence = client.send(Code.STORE, store)
                with pytest.raises(zmq.Again):
                    client.receive()
                client.send(Code.HEARTBEAT)
                with pytest.raises(zmq.Again):
                    client.receive()
                return sequence

            sequence = await in_thread(ask)
            full = False

            def hear():
                client.socket.rcvtimeo = int(PATIENCE * 1000)
                answered, answer = client.receive()
                assert (answered, answer.statuses) == (sequence, [0])
                assert client.receive()[0] == sequence + 1

            await in_thread(hear)


async def test_a_journal_that_takes_nothing_any_more_ends_the_server(pool):
    with pytest.raises(JournalFailed):
        async with serving(pool) as server:

            def failing(records):
                raise JournalFailed("the disk is gone", lasting=True)

            server._storage.journal.append = failing

            def talk():
                with dial(server) as client:
                    client.socket.rcvtimeo = 200
                    client.send(Code.HANDSHAKE, HandshakeRequest(extensions=1))
                    with pytest.raises(zmq.Again):
                        client.receive()

            await in_thread(talk)
            await trio.sleep_forever()


@pytest.mark.parametrize("sync", ["never", "second", "each"])
async def test_every_setting_of_the_journal_answers_and_survives_the_end(pool, sync):
    async with serving(pool, journal_sync=sync) as server:

        def talk():
            with dial(server) as client:
                region = client.region("a")
                for number in range(20):
                    assert client.register(f"k{number}", region.region_id, number * 1000).is_new

        await in_thread(talk)
        if sync == "each":
            assert server.statistics().journal.synced_bytes > 0
    async with serving(pool, journal_sync=sync) as server:
        assert server.statistics().service.directory.entries == 20


# --- a restart ----------------------------------------------------------------------------------------------------


async def test_a_restart_finds_what_was_acknowledged_and_the_session_goes_on(pool):
    async with serving(pool) as server:
        epoch = server.epoch

        def talk():
            with dial(server) as client:
                token = client.own("a").session
                region = client.region("a", session=token)
                stored = client.ask(
                    Code.STORE, StoreRequest(token, 0, 1, region.region_id, ["k", "l"], [0, 5000], 4000, [7, 8])
                )
                assert stored.statuses == [0, 0]
                return token, region, stored.generations

        token, region, generations = await in_thread(talk)
        stray = pool / "maru_77.dat"
        stray.write_bytes(b"nobody's")
    async with serving(pool) as server:
        assert server.epoch != epoch
        assert not stray.exists()

        def talk_on():
            with dial(server) as client:
                again = client.own("a", session=token)
                assert (again.resumed, again.session) == (True, token)
                found = client.ask(Code.FIND, FindRequest(token, 0, ["k", "l"], False, False))
                _, offsets, _, found_generations, checksums = found.columns()
                assert (offsets, checksums, found_generations) == ((0, 5000), (7, 8), tuple(generations))
                looked_up = client.ask(Code.LOOKUP_KV, KeyRequest("k"))
                assert looked_up.handle == region  # the same token, too
                another = client.region("a", session=token)
                assert another.region_id > 77

        await in_thread(talk_on)


@pytest.mark.parametrize("place", ["files", "device"])
async def test_after_a_reboot_only_what_verifies_is_kept(pool, tmp_path, place):
    knobs = {}
    if place == "device":
        device = tmp_path / "device"
        device.touch(0o600)
        device.write_bytes(bytes(8 * MIB))
        knobs = {"dax_path": str(device), "capacity_bytes": 0}
    pages = {"right": b"a" * 1000, "wrong": b"b" * 1000, "unknown": b"c" * 1000}
    async with serving(pool, **knobs) as server:

        def talk():
            with dial(server) as client:
                token = client.own("a").session
                handle = client.region("a", session=token)
                region = handle.region_id
                with open(device if knobs else pool / f"maru_{region}.dat", "r+b") as file:
                    file.seek(handle.offset)
                    file.write(b"".join(pages.values()))
                for number, (key, checksum) in enumerate([("right", xxh3_64_intdigest(pages["right"])), ("wrong", 7)]):
                    store = StoreRequest(token, 0, number + 1, region, [key], [1000 * number], 1000, [checksum])
                    assert client.ask(Code.STORE, store).statuses == [0]
                store = StoreRequest(token, 0, 3, region, ["unknown"], [2000], 1000, None)
                assert client.ask(Code.STORE, store).statuses == [0]
                return token

        token = await in_thread(talk)
    state = json.loads((pool / "maru.state").read_text())
    (pool / "maru.state").write_text(json.dumps({**state, "boot_id": "of another boot"}))
    for _ in range(2):
        async with serving(pool, **knobs) as server:

            def look():
                with dial(server) as client:
                    assert client.ask(Code.BATCH_EXISTS_KV, KeysRequest(list(pages))).results == [True, False, False]
                    assert not client.own("a", session=token).resumed

            await in_thread(look)


async def test_a_region_whose_memory_is_gone_is_dropped_with_its_keys(pool):
    async with serving(pool) as server:

        def talk():
            with dial(server) as client:
                for name in ("a", "b"):
                    region = client.region(name)
                    assert client.register(name, region.region_id).is_new

        await in_thread(talk)
    (pool / "maru_1.dat").unlink()
    for _ in range(2):
        async with serving(pool) as server:

            def look():
                with dial(server) as client:
                    assert client.ask(Code.BATCH_EXISTS_KV, KeysRequest(["a", "b"])).results == [False, True]

            await in_thread(look)


async def test_without_a_journal_a_restart_begins_empty(pool):
    for _ in range(2):
        async with serving(pool, journal=False) as server:
            assert server.statistics().journal is None

            def talk():
                with dial(server) as client:
                    assert not client.ask(Code.EXISTS_KV, KeyRequest("k")).exists
                    assert client.register("k", client.region().region_id).is_new

            await in_thread(talk)
    assert not list(pool.glob("journal.*"))


async def test_a_memfd_pool_is_gone_with_its_server(pool):
    for _ in range(2):
        async with serving(pool, dax_path="memfd") as server:
            assert server.statistics().service.directory.entries == 0

            def talk():
                with dial(server) as client:
                    assert client.register("k", client.region().region_id).is_new

            await in_thread(talk)


async def test_a_device_holds_the_regions_where_one_is_named(pool, tmp_path):
    device = tmp_path / "device"
    device.touch(0o600)
    device.write_bytes(bytes(8 * MIB))
    for again in (False, True):
        async with serving(pool, rm_address="127.0.0.1:0", dax_path=str(device), capacity_bytes=0) as server:

            def talk(again=again, server=server):
                with dial(server) as client, PublishedRmClient(server.rm_address) as rm:
                    if not again:
                        client.region("x")
                        handle = client.region("a")
                        assert client.register("k", handle.region_id).is_new
                        rm.map({name: getattr(handle, name) for name in handle.__struct_fields__})[:5] = b"bytes"
                    found = client.ask(Code.LOOKUP_KV, KeyRequest("k")).handle
                    assert found.offset > 0
                    assert rm.map({name: getattr(found, name) for name in found.__struct_fields__})[:5] == b"bytes"

            await in_thread(talk)


async def test_a_span_that_cannot_be_cleared_fails_one_request(pool, tmp_path):
    device = tmp_path / "device"
    device.touch(0o600)
    device.write_bytes(bytes(8 * MIB))
    async with serving(pool, dax_path=str(device), capacity_bytes=0) as server:
        os.truncate(device, REGION)

        def talk():
            with dial(server) as client:
                answer = client.ask(Code.REQUEST_ALLOC, AllocRequest("a", 2 * REGION, None))
                assert not answer.success and "no region can be made" in answer.error
                assert client.register("k", client.region("a").region_id).is_new

        await in_thread(talk)


# --- the command --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Process:
    """The command, ready."""

    process: subprocess.Popen
    ready: dict

    @property
    def ipc(self):
        return self.ready["endpoints"][-1]


@contextlib.contextmanager
def command(pool, *options, **kwargs):
    arguments = [
        *COMMAND,
        "--port",
        "0",
        "--pool-path",
        str(pool),
        "--capacity-bytes",
        "16MiB",
        "--json",
        "--zmq-socket",
        *options,
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Process(process, json.loads(line))
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_the_command_and_leaves_no_sockets(pool):
    with command(pool) as running, Client(running.ipc) as client:
        region = client.region()
        assert client.register("k", region.region_id).is_new
        assert running.ready["event"] == "ready"
        assert running.ready["pid"] == running.process.pid
        for _ in range(10):
            client.send(Code.BATCH_LOOKUP_KV, KeysRequest(["k"] * 100))
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0
        lines = [json.loads(line) for line in running.process.stderr.read().splitlines()]
        assert "SIGTERM: leaving" in [line["message"] for line in lines]
        assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    names = sorted(path.name for path in pool.iterdir())
    assert [name for name in names if not name.startswith(("journal.", "snapshot.", "maru."))] == ["maru_1.dat"]
    assert "maru.sock" not in names


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_within_a_second(pool, number):
    """Where nobody else computes."""
    with command(pool) as running, Client(running.ipc) as client:
        assert client.register("k", client.region().region_id).is_new
        began = time.monotonic()
        running.process.send_signal(number)
        assert running.process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 1


def test_kill_minus_nine_loses_nothing_that_was_acknowledged(pool):
    keys = [f"key {number}" for number in range(3000)]
    with command(pool) as running, Client(running.ipc) as client:
        region = client.region().region_id
        for start in range(0, len(keys), 100):
            entries = [
                RegisterRequest(key, region, 600 * (start + at), 600)
                for at, key in enumerate(keys[start : start + 100])
            ]
            assert client.ask(Code.BATCH_REGISTER_KV, BatchRegisterRequest(entries)).results == [True] * 100
        first = running.ready["epoch"]
        running.process.kill()
        running.process.wait()
    with command(pool) as running, Client(running.ipc) as client:
        assert running.ready["keys"] == len(keys)
        assert running.ready["epoch"] != first
        entries = client.ask(Code.BATCH_LOOKUP_KV, KeysRequest(keys)).entries
        assert [entry.kv_offset for entry in entries] == [600 * at for at in range(len(keys))]
        assert client.ask(Code.HEARTBEAT).epoch == int(running.ready["epoch"], 16)


def test_the_command_ends_when_it_is_asked_to_and_may_be(pool):
    with command(pool, "--allow-shutdown") as running, Client(running.ipc) as client:
        assert client.ask(Code.SHUTDOWN).success
        assert running.process.wait(PATIENCE) == 0


async def test_garbage_is_collected_again_once_the_command_is_ready(pool, capsys):
    logger = logging.getLogger("maru")
    before = logger.handlers[:], logger.propagate, logger.level
    gc.disable()  # as the command does, for a quick start
    try:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(main_module.serve, config_for(pool, allow_shutdown=True, json_logs=True))
                await eventually(lambda: (pool / "maru.sock").exists())
                line = ""
                while not line:
                    await trio.sleep(0.005)
                    line = capsys.readouterr().out
                assert gc.isenabled()

                def ask_to_end():
                    with Client(json.loads(line)["endpoints"][0]) as client:
                        assert client.ask(Code.SHUTDOWN).success

                await in_thread(ask_to_end)
    finally:
        gc.enable()
        logger.handlers[:], logger.propagate = before[0], before[1]
        logger.setLevel(before[2])


def run_command(*arguments, **kwargs):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE, **kwargs)


def test_a_second_command_on_the_same_pool_says_who_has_it(pool):
    with command(pool) as running:
        done = run_command("--pool-path", str(pool))
        assert done.returncode == 3
        assert str(running.process.pid) in done.stderr
        assert "Traceback" not in done.stderr


def test_help_shows_every_knob():
    done = run_command("--help")
    assert done.returncode == 0
    for knob in knobs():
        assert f"--{knob.name.removeprefix('server.').replace('_', '-')}" in done.stdout
        assert knob.variable in done.stdout.replace("\n", "").replace(" ", "")
    for published in ("--host", "--port", "--log-level", "--dax-path", "--rm-address"):
        assert published in done.stdout


def test_the_configuration_is_printed_as_a_file_that_gives_it_again(tmp_path):
    first = run_command(
        "--print-config", "--port", "7", "--log-level", "INFO", "--tenant-quotas", "a=1GiB,b=2", "--no-journal"
    )
    assert first.returncode == 0
    path = tmp_path / "maru.toml"
    path.write_text(first.stdout)
    again = run_command("--print-config", "--config", str(path), env={**os.environ, "MARU_SERVER__PORT": "8"})
    assert again.stdout == first.stdout.replace("port = 7", "port = 8")
    assert 'log_level = "info"' in first.stdout
    assert 'tenant_quotas = ["a=1GiB", "b=2"]' in first.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--port", "70000"], 2, "--port = 70000: must be an integer"),
        (["--host", "0.0.0.0"], 2, "unless curve_key_file or insecure is set"),
        (["--prot", "1"], 2, "No such option"),
        (["--config", "/no/such/file"], 2, "/no/such/file"),
        (["--pool-path", "/proc/nowhere"], 3, "/proc/nowhere"),
        (["--dax-path", "/dev/dax-nowhere"], 3, "there is no device"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_status(arguments, status, said):
    done = run_command(*arguments)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_imports_nothing_it_does_not_need(pool):
    program = (
        "import sys; from maru import server_cli; from maru._server import server, main;"
        "unwanted = {'torch', 'numpy', 'rich', 'asyncio', 'click.testing', 'tomllib', 'importlib.metadata'};"
        "print(*sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


async def test_capacity_beyond_the_containers_memory_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("maru._server.server.memory_limit", lambda: 32 << 20)
    async with open_test_server():
        pass
    text = f"capacity_bytes = {64 << 20}: this container may use {32 << 20} bytes of memory"
    assert caplog.text.count(text) == 1
    caplog.clear()
    async with open_test_server(capacity_bytes=16 << 20):
        pass
    assert "this container" not in caplog.text
