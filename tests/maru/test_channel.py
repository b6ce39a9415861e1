"""The same-host channel: whole frames between processes of one user, whoever is at the other end."""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
from array import array

import pytest
import trio
import trio.testing

import maru
from maru import HandlerClosed, PoolUnusable
from maru.base import packet_listener as _packet_listener
from maru.base import packets as _packets
from maru.base.addresses import CHANNEL_NAME
from maru.base.errors import Shortage
from maru.base.packets import INLINE_BYTES, BadPacket, PacketConnection, connect
from maru.testing import open_test_server
from maru.transport import BlockingChannel, ChannelServer, is_channel_peer, open_channel
from tests.support.held_by_process import no_descriptor_left, no_spare_either, open_descriptors, refuse_memory
from tests.support.pools import until

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return str(home / CHANNEL_NAME)


@contextlib.contextmanager
def packets(max_bytes=MIB):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, PacketConnection(other, max_bytes)


@contextlib.contextmanager
def pair(max_bytes=MIB):
    with packets(max_bytes) as (one, other):
        yield PacketConnection(one, max_bytes), other


def memory(content, seals=SEALS):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class Echo:
    """A channel's server in this trio run, that sends back what comes unless told not to."""

    def __init__(self, path, **limits):
        self.gone, self.heard, self.answers = [], [], True
        self.limits = {"most": 8, "max_bytes": MIB, "peer_bytes": MIB, "all_bytes": 4 * MIB, **limits}
        self.path = path

    async def run(self, task_status=trio.TASK_STATUS_IGNORED):
        with ChannelServer(self.path, on_gone=self.gone.append, **self.limits) as self.server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.server.run)
                task_status.started(self)
                while True:
                    for identity, frame in await self.server.receive_batch():
                        self.heard.append((identity, frame))
                        if self.answers:
                            self.server.send(identity, frame)


@contextlib.asynccontextmanager
async def echoing(path, **limits):
    async with trio.open_nursery() as nursery:
        yield await nursery.start(Echo(path, **limits).run)
        nursery.cancel_scope.cancel()


async def dialed(path):
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    await sock.connect(path)
    return sock


# --- one connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 17, INLINE_BYTES, INLINE_BYTES + 1, MIB])
def test_a_frame_comes_whole_whatever_its_size_and_leaves_no_descriptor(size):
    with pair() as (one, other):
        before = open_descriptors()
        frame = os.urandom(size)
        one.send(frame)
        one.send(b"next")
        assert other.receive() == frame
        assert other.receive() == b"next"
        assert open_descriptors() == before
        with pytest.raises(BlockingIOError):
            other.receive()
        one.close()
        with pytest.raises(ConnectionResetError):
            other.receive()


def test_a_peer_that_no_descriptor_is_left_for_is_not_one_without_a_process():
    with pair() as (one, _):
        with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
            one.open_peer()
        descriptor = one.open_peer()
        assert descriptor >= 0
        os.close(descriptor)


def test_an_empty_frame_is_refused_by_its_sender():
    with pair() as (one, _), pytest.raises(ValueError, match="at least one byte"):
        one.send(b"")


def test_a_frame_of_more_than_is_taken_costs_the_connection():
    with pair(max_bytes=256 << 10) as (one, other):
        one.send(b"x" * (256 << 10))
        assert len(other.receive()) == 256 << 10
        one.send(b"x" * ((256 << 10) + 1))
        with pytest.raises(BadPacket, match="are accepted"):
            other.receive()


def test_a_large_frame_leaves_a_process_without_descriptors():
    with pair() as (one, other):
        frame = os.urandom(MIB)
        before = open_descriptors()
        with no_descriptor_left():
            for _ in range(3):
                one.send(frame)
        assert [other.receive() for _ in range(3)] == [frame] * 3
        assert open_descriptors() <= before


def test_a_large_frame_reaches_a_process_without_descriptors():
    with pair() as (one, other):
        frame = os.urandom(MIB)
        before = open_descriptors()
        for _ in range(3):
            one.send(frame)
        with no_descriptor_left():
            assert [other.receive() for _ in range(3)] == [frame] * 3
        assert open_descriptors() <= before


def test_a_large_frame_waits_in_the_socket_where_not_even_a_spare_descriptor_is_left():
    with pair() as (one, other):
        one.send(b"x" * MIB)
        one.send(b"small")
        with no_spare_either():
            for _ in range(3):
                with pytest.raises(Shortage, match="no descriptor"):
                    other.receive()
            with pytest.raises(Shortage, match="cannot be sent now"):
                one.send(b"x" * MIB)
        assert (len(other.receive()), other.receive()) == (MIB, b"small")


def test_memory_refused_for_a_large_frame_is_no_end_of_the_connection(monkeypatch):
    with pair() as (one, other):
        before = open_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse_memory)
            with pytest.raises(Shortage, match=f"a frame of {MIB} bytes cannot be sent now"):
                one.send(b"x" * MIB)
        one.send(b"small")
        one.send(b"x" * MIB)
        assert (other.receive(), len(other.receive())) == (b"small", MIB)
        assert open_descriptors() <= before


def test_a_peer_that_has_not_read_is_told_from_one_that_has():
    with pair() as (one, other):
        one.send(b"x" * MIB)
        assert one.most_unread()
        other.receive()
        assert not one.most_unread()


def unsealed():
    return [memory(b"x" * 64, 0)], struct.pack("!Q", 64)


def half_sealed():
    return [memory(b"x" * 64, fcntl.F_SEAL_SHRINK)], struct.pack("!Q", 64)


def shorter_than_said():
    return [memory(b"x" * 64)], struct.pack("!Q", 65)


def longer_than_said():
    return [memory(b"x" * 64)], struct.pack("!Q", 63)


def without_bytes():
    return [memory(b"")], struct.pack("!Q", 0)


def two_of_them():
    return [memory(b"x" * 64), memory(b"x" * 64)], struct.pack("!Q", 64)


def two_hundred():
    one = memory(b"x" * 64)
    return [one, *(os.dup(one) for _ in range(199))], struct.pack("!Q", 64)


def with_a_frame():
    return [memory(b"x" * 64)], b"a frame that needs no descriptor"


def a_pipe():
    reading, writing = os.pipe()
    os.close(writing)
    return [reading], struct.pack("!Q", 64)


def a_file():
    return [os.open(__file__, os.O_RDONLY)], struct.pack("!Q", os.path.getsize(__file__))


def a_directory():
    return [os.open("/", os.O_RDONLY)], struct.pack("!Q", 4096)


HOSTILE = [
    unsealed, half_sealed, shorter_than_said, longer_than_said, without_bytes, two_of_them, two_hundred, with_a_frame,
    a_pipe, a_file, a_directory,
]  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE)
def test_descriptors_that_are_no_frame_cost_the_connection_and_are_closed(make):
    with packets() as (one, reader):
        descriptors, content = make()
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
        one.sendmsg([content], attached)
        for descriptor in descriptors:
            os.close(descriptor)
        before = open_descriptors()
        with pytest.raises(BadPacket):
            reader.receive()
        assert open_descriptors() == before


def test_a_packet_that_is_longer_than_a_frame_may_be_costs_the_connection():
    with packets() as (one, reader):
        one.send(b"x" * (INLINE_BYTES + 1))
        with pytest.raises(BadPacket):
            reader.receive()


def test_nobody_is_talked_to_who_is_another_user(path, monkeypatch):
    with _packets.listen(path):
        connect(path).close()
        monkeypatch.setattr(_packets, "peer_uid", lambda sock: 12345)
        with pytest.raises(PermissionError, match="served by user 12345"):
            connect(path)


def test_a_socket_is_made_in_a_private_directory_only_and_replaces_a_dead_one(tmp_path, path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PoolUnusable, match="others may enter"):
        _packets.listen(str(tmp_path / "open" / "sock"))
    _packets.listen(path).close()
    assert os.stat(path).st_mode & 0o777 == 0o600
    _packets.listen(path).close()
    os.unlink(path)
    with open(path, "w"), pytest.raises(PoolUnusable, match="not a socket"):
        _packets.listen(path)


# --- a server of many -------------------------------------------------------------------------------------------------


async def test_each_peer_gets_its_own_answers_and_its_end_is_told_once(path):
    async with echoing(path) as echo:
        socks = [await dialed(path) for _ in range(3)]
        for at, sock in enumerate(socks):
            await sock.send(b"from %d" % at)
        for at, sock in enumerate(socks):
            assert await sock.recv(100) == b"from %d" % at
        assert all(is_channel_peer(identity) for identity, _ in echo.heard)
        assert len({identity for identity, _ in echo.heard}) == 3
        socks[1].close()
        await until(lambda: echo.gone)
        assert echo.gone == [identity for identity, frame in echo.heard if frame == b"from 1"]
        assert not echo.server.send(echo.gone[0], b"too late")
        await socks[0].send(b"still there")
        assert await socks[0].recv(100) == b"still there"
        for sock in socks:
            sock.close()


async def test_the_end_of_a_peer_is_told_after_its_last_message(path):
    order = []
    with ChannelServer(path, most=4, max_bytes=MIB, peer_bytes=MIB, all_bytes=MIB, on_gone=order.append) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            sock = await dialed(path)
            await sock.send(b"one")
            await sock.send(b"two")
            sock.close()
            while len(order) < 3:
                for identity, frame in await server.receive_batch(1):
                    order.append(frame)
                    last = identity
                if len(order) == 2:
                    nursery.start_soon(server.receive_batch)  # nothing comes any more: it only tells
                    await until(lambda: len(order) == 3)
            nursery.cancel_scope.cancel()
    assert order == [b"one", b"two", last]


async def test_a_cancelled_reader_takes_nothing(path):
    with ChannelServer(path, most=4, max_bytes=MIB, peer_bytes=MIB, all_bytes=MIB, on_gone=lambda _: None) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            sock = await dialed(path)
            for number in range(40):
                with trio.CancelScope() as scope:
                    if number % 2:
                        scope.cancel()
                    else:
                        nursery.start_soon(cancel_soon, scope)
                    assert await server.receive_batch() == []
                assert scope.cancelled_caught
            await sock.send(b"hello")
            with trio.CancelScope() as scope:
                scope.cancel()
                await server.receive_batch()
            [[_, frame]] = await server.receive_batch()
            assert frame == b"hello"
            sock.close()
            nursery.cancel_scope.cancel()


async def test_one_frame_does_not_wait_behind_all_that_others_have_sent(path):
    with ChannelServer(path, most=24, max_bytes=MIB, peer_bytes=MIB, all_bytes=MIB, on_gone=lambda _: None) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            *others, mine = [await dialed(path) for _ in range(20)]
            for number in range(30):
                for other in others:
                    await other.send(b"%d" % number)
            await mine.send(b"mine")
            order = []
            while b"mine" not in order:
                order += [frame for _, frame in await server.receive_batch()]
            assert order.index(b"mine") < 2 * 20
            for sock in (*others, mine):
                sock.close()
            nursery.cancel_scope.cancel()


async def test_who_asks_for_little_goes_before_those_who_ask_for_much(path):
    """However early these have asked, and whatever their descriptors are."""
    with ChannelServer(path, most=100, max_bytes=MIB, peer_bytes=MIB, all_bytes=MIB, on_gone=lambda _: None) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            others = [await dialed(path) for _ in range(10)]
            mine = await dialed(path)
            for sock in (*others, mine):
                await sock.send(b"hello")
            heard = []
            while len(heard) < 11:
                heard += await server.receive_batch()
            for identity, _ in heard[:-1]:
                server.send(identity, bytes(50_000))
            server.send(heard[-1][0], b"little")
            for _ in range(2):
                for sock in others:
                    await sock.send(b"theirs")
            await heard_all(server, [b"theirs"] * 10)
            await mine.send(b"mine")
            assert (await server.receive_batch(3))[0][1] == b"mine"
            for sock in (*others, mine):
                sock.close()
            nursery.cancel_scope.cancel()


async def heard_all(server, frames):
    """Read so many."""
    heard = []
    while len(heard) < len(frames):
        heard += [frame for _, frame in await server.receive_batch(1)]
    assert heard == frames


async def cancel_soon(scope):
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()


async def test_two_tasks_cannot_read_one_channel(path):
    async with echoing(path) as echo:
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await echo.server.receive_batch()


async def test_who_comes_beyond_the_limit_is_turned_away(path):
    async with echoing(path, most=2) as echo:
        socks = [await dialed(path) for _ in range(3)]
        await socks[0].send(b"x")
        assert await socks[0].recv(10) == b"x"
        assert await socks[2].recv(10) == b""
        assert echo.server.statistics().turned_away == 1
        for sock in socks:
            sock.close()


async def test_another_users_process_is_turned_away(path, monkeypatch):
    monkeypatch.setattr(_packet_listener, "peer_uid", lambda sock: 12345)
    async with echoing(path) as echo:
        sock = await dialed(path)
        assert await sock.recv(10) == b""
        assert (echo.server.statistics().turned_away, echo.heard) == (1, [])
        sock.close()


@pytest.mark.parametrize("make", HOSTILE)
async def test_who_sends_descriptors_that_are_no_frame_goes_and_nobody_else_notices(path, make):
    async with echoing(path) as echo:
        good, bad = await dialed(path), await dialed(path)
        descriptors, content = make()
        await bad.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])
        for descriptor in descriptors:
            os.close(descriptor)
        assert await bad.recv(10) == b""
        await good.send(b"x")
        assert await good.recv(10) == b"x"
        assert (echo.server.statistics().bad, [frame for _, frame in echo.heard]) == (1, [b"x"])
        good.close()
        bad.close()


async def test_who_floods_and_does_not_read_is_hung_up_on_and_another_is_answered_meanwhile(path):
    async with echoing(path, peer_bytes=256 << 10, all_bytes=MIB) as echo:
        good, bad = await dialed(path), await dialed(path)
        with pytest.raises(OSError):  # BrokenPipeError or ConnectionResetError, as it falls
            for _ in range(100_000):
                await bad.send(b"x" * 1000)
        await good.send(b"x")
        assert await good.recv(10) == b"x"
        statistics = echo.server.statistics()
        assert (statistics.hung_up, statistics.connections, statistics.unread_bytes) == (1, 1, 0)
        good.close()
        bad.close()


async def test_frames_in_memory_that_nobody_reads_count_as_unread(path):
    """A socket takes hundreds of them, each a descriptor, so its buffer does not bound what the kernel holds."""
    async with echoing(path, peer_bytes=2 * MIB, all_bytes=8 * MIB) as echo:
        echo.answers = False
        bad = await dialed(path)
        await bad.send(b"x")
        await until(lambda: echo.heard)
        identity = echo.heard[0][0]
        sent = 0
        while echo.server.send(identity, b"y" * (512 << 10)):
            sent += 1
        assert sent == 4
        assert echo.server.statistics().hung_up == 1
        bad.close()


async def test_a_server_without_descriptors_takes_large_frames_up_again_later(path):
    async with echoing(path, peer_bytes=4 * MIB) as echo:
        good, other = (PacketConnection(connect(path), MIB) for _ in range(2))
        good.send(b"first")
        await trio.lowlevel.wait_readable(good.descriptor)
        assert good.receive() == b"first"
        good.send(b"x" * MIB)
        with no_spare_either():
            await until(lambda: echo.server._put_off)
            good.send(b"second")
            other.send(b"served meanwhile")
            await trio.lowlevel.wait_readable(other.descriptor)
            assert other.receive() == b"served meanwhile"
            await trio.sleep(0.25)
            assert len(echo.heard) == 2
        await until(lambda: len(echo.heard) == 4)
        answers = []
        while len(answers) < 2:
            await trio.lowlevel.wait_readable(good.descriptor)
            answers.append(good.receive())
        assert answers == [b"x" * MIB, b"second"]
        assert not echo.gone
        for connection in (good, other):
            trio.lowlevel.notify_closing(connection.descriptor)
            connection.close()
        await until(lambda: len(echo.gone) == 2)


async def test_a_large_answer_that_memory_is_refused_for_is_sent_later(path, monkeypatch):
    async with echoing(path, peer_bytes=4 * MIB) as echo:
        echo.answers = False
        reader = PacketConnection(connect(path), MIB)
        reader.send(b"x")
        await until(lambda: echo.heard)
        identity = echo.heard[0][0]
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse_memory)
            assert echo.server.send(identity, b"y" * MIB)
            assert echo.server.send(identity, b"z")
            await trio.sleep(0.25)
            with pytest.raises(BlockingIOError):
                reader.receive()
        for size in (MIB, 1):
            await trio.lowlevel.wait_readable(reader.descriptor)
            assert len(reader.receive()) == size
        await until(lambda: echo.server.statistics().sent == 2)
        trio.lowlevel.notify_closing(reader.descriptor)
        reader.close()


async def test_a_peer_that_hangs_up_while_it_is_left_alone_costs_no_time(path):
    async with echoing(path) as echo:
        echo.answers = False
        sock = PacketConnection(connect(path), MIB)
        sock.send(b"here")
        await until(lambda: echo.heard)
        sock.send(b"x" * MIB)
        with no_spare_either():
            await until(lambda: echo.server._put_off)
            sock.interrupt()
            before = echo.server._watch.sleeps
            await trio.sleep(0.25)
            assert echo.server._watch.sleeps - before < 20
        await until(lambda: echo.gone)
        assert len(echo.heard) == 2
        sock.close()


async def test_a_peer_that_reads_large_frames_is_never_hung_up_on(path):
    async with echoing(path, peer_bytes=2 * MIB, all_bytes=2 * MIB) as echo:
        reader = PacketConnection(connect(path), MIB)
        for _ in range(20):
            reader.send(b"z" * (512 << 10))
            await trio.lowlevel.wait_readable(reader.descriptor)
            assert len(reader.receive()) == 512 << 10
        assert (echo.server.statistics().hung_up, echo.server.statistics().sent) == (0, 20)
        trio.lowlevel.notify_closing(reader.descriptor)
        reader.close()


async def test_a_peer_that_reads_with_some_frames_always_on_their_way_is_not_hung_up_on(path):
    async with echoing(path, peer_bytes=2 * MIB, all_bytes=2 * MIB) as echo:
        reader = PacketConnection(connect(path), MIB)
        for sent in range(22):
            if sent < 20:
                reader.send(b"z" * (512 << 10))
            if sent >= 2:
                await trio.lowlevel.wait_readable(reader.descriptor)
                assert len(reader.receive()) == 512 << 10
        assert echo.server.statistics().hung_up == 0
        trio.lowlevel.notify_closing(reader.descriptor)
        reader.close()


async def test_the_bound_of_all_peers_takes_the_one_with_the_most(path):
    async with echoing(path, peer_bytes=4 * MIB, all_bytes=2 * MIB) as echo:
        echo.answers = False
        socks = [await dialed(path) for _ in range(3)]
        for sock in socks:
            await sock.send(b"x")
        await until(lambda: len(echo.heard) == 3)
        few, most, other = (identity for identity, _ in echo.heard)
        assert echo.server.send(few, b"y" * (256 << 10))
        assert echo.server.send(most, b"y" * MIB)
        assert echo.server.send(other, b"y" * MIB)
        assert not echo.server.send(most, b"y")
        assert echo.server.send(few, b"y")
        assert echo.server.statistics().hung_up == 1
        for sock in socks:
            sock.close()


async def test_what_found_no_room_arrives_in_its_order_when_the_peer_reads_on(path):
    async with echoing(path, peer_bytes=64 * MIB, all_bytes=64 * MIB) as echo:
        echo.answers = False
        sock = await dialed(path)
        await sock.send(b"x")
        await until(lambda: echo.heard)
        identity = echo.heard[0][0]
        for number in range(2_000):
            assert echo.server.send(identity, number.to_bytes(4, "big") * 250)
        assert echo.server.statistics().unread_bytes > 0
        for number in range(2_000):
            assert (await sock.recv(2_000))[:4] == number.to_bytes(4, "big")
        await until(lambda: echo.server.statistics().unread_bytes == 0)
        sock.close()


# --- a client of trio -------------------------------------------------------------------------------------------------


class Client:
    def __init__(self):
        self.came = []
        self.expected = None

    def on_messages(self, batch):
        self.came += [frame for [frame] in batch]
        if self.expected is not None:
            self.expected.deliver(self.came[-1])

    async def ask(self, channel, frame):
        self.expected = channel.expect()
        await channel.send((b"", frame))
        with trio.fail_after(30):
            return await self.expected.wait()


async def test_a_client_may_come_first_and_what_it_sent_waits_for_the_server(path):
    client = Client()
    async with open_channel(path, client.on_messages) as channel, trio.open_nursery() as nursery:
        assert not channel.is_connected
        nursery.start_soon(client.ask, channel, b"early")
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with echoing(path):
            await until(lambda: client.came)
        assert client.came == [b"early"]


async def test_a_client_comes_back_to_a_server_that_was_started_again(path):
    client = Client()
    async with open_channel(path, client.on_messages) as channel:
        for number in range(5):
            async with echoing(path):
                assert await client.ask(channel, b"%d" % number) == b"%d" % number
                assert await client.ask(channel, bytes([number]) * MIB) == bytes([number]) * MIB


async def test_too_much_that_waits_for_a_server_is_refused_and_a_cancelled_send_was_not_sent(path):
    client = Client()
    async with open_channel(path, client.on_messages) as channel:
        with pytest.raises(trio.WouldBlock):
            for number in range(5_000):
                channel.send_nowait((b"", b"%d" % number))
        for seconds in (0, 0.01):
            with trio.move_on_after(seconds) as scope:
                await channel.send((b"", b"never"))
            assert scope.cancelled_caught
        async with echoing(path):
            assert await client.ask(channel, b"last") in client.came
            while b"last" not in client.came:  # frames are handed on while somebody waits for one
                client.expected = channel.expect()
                await client.expected.wait()
        assert client.came == [b"%d" % number for number in range(len(client.came) - 1)] + [b"last"]
        assert len(client.came) > 1_000


async def test_a_cancelled_wait_leaves_the_channel_to_the_others(path):
    client = Client()
    async with echoing(path) as echo, open_channel(path, client.on_messages) as channel:
        for number in range(20):
            echo.answers = False
            with trio.move_on_after(0.001 * (number % 3)) as scope:
                expected = channel.expect()
                await channel.send((b"", b"in vain"))
                await expected.wait()
            assert scope.cancelled_caught
            echo.answers = True
            assert await client.ask(channel, b"%d" % number) == b"%d" % number


async def test_closing_a_channel_wakes_who_waits_and_leaves_no_descriptor(path):
    before = open_descriptors()
    client = Client()
    async with echoing(path) as echo:
        echo.answers = False
        async with trio.open_nursery() as nursery, open_channel(path, client.on_messages) as channel:

            async def wait():
                with pytest.raises(trio.ClosedResourceError):
                    await channel.expect().wait()

            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await channel.aclose()
            await channel.aclose()
            with pytest.raises(trio.ClosedResourceError):
                channel.send_nowait((b"", b"x"))
            with pytest.raises(trio.ClosedResourceError):
                await channel.send((b"", b"x"))
    assert open_descriptors() == before


async def test_memory_refused_for_a_frame_fails_its_sender_only(path, monkeypatch):
    client = Client()
    async with echoing(path), open_channel(path, client.on_messages) as channel:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse_memory)
            with pytest.raises(Shortage):
                channel.send_nowait((b"", b"x" * MIB))
            with pytest.raises(Shortage):
                await channel.send((b"", b"x" * MIB))
        assert await client.ask(channel, b"small") == b"small"
        assert client.came == [b"small"]


async def test_a_frame_that_has_waited_and_cannot_be_sent_is_reported_and_holds_up_no_other(path, monkeypatch):
    client, lost, refused = Client(), [], []
    monkeypatch.setattr(os, "memfd_create", refuse_memory)
    async with open_channel(
        path, client.on_messages, lost.append, lambda frame, why: refused.append((frame, type(why)))
    ) as channel:
        channel.send_nowait((b"", b"x" * MIB))
        async with echoing(path):
            assert await client.ask(channel, b"small") == b"small"
        assert refused == [(b"x" * MIB, Shortage)]
        assert not lost


async def test_a_large_answer_waits_for_a_descriptor(path):
    client, lost = Client(), []
    with _packets.listen(path) as listening:
        async with open_channel(path, client.on_messages, lost.append) as channel:
            with listening.accept()[0] as sock:
                server = PacketConnection(sock, MIB)
                server.send(b"x" * MIB)
                client.expected = channel.expect()
                with no_spare_either():
                    with trio.move_on_after(0.25) as scope:
                        await client.expected.wait()
                    assert scope.cancelled_caught
                    assert channel._watch.sleeps < 20
                with trio.fail_after(30):
                    await client.expected.wait()
                server.send(b"next")
                client.expected = channel.expect()
                with trio.fail_after(30):
                    await client.expected.wait()
    assert [len(frame) for frame in client.came] == [MIB, 4]
    assert not lost


async def test_a_server_that_hangs_up_at_once_is_asked_ever_more_seldom(path):
    client = Client()
    async with echoing(path, most=0) as echo, open_channel(path, client.on_messages) as channel:
        with trio.move_on_after(0.5):
            channel.send_nowait((b"", b"x"))
            await channel.expect().wait()
        assert 3 <= echo.server.statistics().turned_away <= 8


async def test_an_error_of_who_is_handed_frames_comes_out_where_they_are_waited_for(path):
    def fails(batch):
        raise ZeroDivisionError

    async with echoing(path):
        with pytest.raises(ZeroDivisionError):
            async with open_channel(path, fails) as channel:
                expected = channel.expect()
                await channel.send((b"", b"x"))
                await expected.wait()


# --- a client that blocks ---------------------------------------------------------------------------------------------


async def test_a_blocking_client_asks_waits_and_comes_back(path):
    def ask(channel, frame):
        assert channel.send((b"", frame), 10)
        return channel.receive(10)

    channel = BlockingChannel(path)
    try:
        assert not channel.send((b"", b"x"), 0.05)
        assert channel.receive(0.01) is None
        for number in range(3):
            async with echoing(path) as echo:
                for frame in (b"%d" % number, b"x" * MIB):
                    assert await trio.to_thread.run_sync(ask, channel, frame) == [frame]
                echo.answers = False
                assert channel.send((b"", b"x"))
                assert channel.receive(0.01) is None
            assert channel.receive(0.01) is None
    finally:
        channel.close()
    channel.close()
    with pytest.raises(HandlerClosed):
        channel.send((b"", b"x"))
    with pytest.raises(HandlerClosed):
        channel.receive()


def test_a_blocking_client_without_descriptors_waits_for_a_large_answer(path):
    with _packets.listen(path) as listening:
        channel = BlockingChannel(path)
        with listening.accept()[0] as sock:
            PacketConnection(sock, MIB).send(b"x" * MIB)
            with no_spare_either():
                assert channel.receive(0.0) is None
                assert channel.receive(0.15) is None
            assert channel.receive(30) == [b"x" * MIB]
            assert not channel.losses
        channel.close()


def test_a_blocking_client_that_is_not_read_waits_as_long_as_it_was_told(path):
    with _packets.listen(path):
        channel = BlockingChannel(path)
        sent = 0
        while channel.send((b"", b"x" * 1_000), 0.01):
            sent += 1
        assert 50 < sent < 10_000
        channel.close()


# --- handlers and servers ---------------------------------------------------------------------------------------------


async def test_clients_of_this_host_come_over_the_channel_and_zeromq_is_idle():
    async with open_test_server() as server:
        async with maru.MaruHandler(server_url=server.endpoints[0], chunk_size_bytes=4096, pool_size=16384) as handler:
            handle = await handler.alloc(4096)
            handle.buf[:] = b"x" * 4096
            await handler.store("k", handle)
            assert await handler.exists("k")

        def in_a_thread():
            import maru.blocking

            with maru.blocking.MaruHandler(server_url=server.endpoints[0], pool_size=0) as blocking:
                return blocking.exists("k"), blocking.exists("nothing")

        assert await trio.to_thread.run_sync(in_a_thread) == (True, False)
        statistics = server.statistics()
        assert statistics.channel.received > 5
        assert statistics.socket.received == 0
        assert server.channel_path.endswith(CHANNEL_NAME)


async def test_zeromq_listens_at_no_unix_socket_unless_asked():
    async with open_test_server() as server:
        path = server.endpoints[0].removeprefix("ipc://")
        assert os.path.basename(path) == "maru.sock" and not await trio.Path(path).exists()
        async with maru.MaruHandler(server_url=server.endpoints[0], pool_size=0) as handler:
            assert not await handler.exists("k")
        asked = maru.MaruHandler(server_url=server.endpoints[0], pool_size=0, protocol="published", timeout_ms=50)
        with pytest.raises(maru.NoAnswer, match="--zmq-socket"):
            async with asked:
                pass


async def test_silent_connections_keep_no_client_out_of_a_page_store(monkeypatch):
    monkeypatch.setattr("maru.base.process_limits.DESCRIPTORS._limit", lambda: 128)
    async with open_test_server() as server:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(contextlib.closing(connect(server.channel_path)))
            await trio.sleep(0.05)
            async with maru.MaruHandler(server_url=server.endpoints[0], pool_size=0) as handler:
                assert not await handler.exists("k")
                assert server.statistics().channel.connections < 60


@pytest.mark.parametrize("ask", ["published", "moved"])
async def test_zeromq_is_spoken_where_it_is_asked_for_and_where_there_is_no_channel(ask):
    async with open_test_server(zmq_socket=True) as server:
        options = {"protocol": "published"} if ask == "published" else {}
        if ask == "moved":
            os.unlink(server.channel_path)
        async with maru.MaruHandler(server_url=server.endpoints[0], pool_size=0, **options) as handler:
            assert not await handler.exists("k")
        assert server.statistics().channel.received == 0
        assert server.statistics().socket.received > 0


def test_a_client_of_this_host_needs_no_zeromq():
    code = (
        "import sys, maru, maru.blocking\n"
        "maru.blocking.MaruHandler(server_url='ipc:///nowhere/maru.sock', pool_size=0)\n"
        "maru.MaruHandler(server_url='ipc:///nowhere/maru.sock', pool_size=0)\n"
        "assert 'zmq' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_frames_that_cannot_be_read_cost_their_sender_at_most(path):
    """Over the channel as over ZeroMQ: one answer with sequence 0, and everybody else goes on."""
    async with open_test_server() as server, maru.MaruHandler(server_url=server.endpoints[0], pool_size=0) as handler:
        bad = await dialed(server.channel_path)
        for frame in (b"x", os.urandom(16), os.urandom(INLINE_BYTES), b"\xcf\x00" + bytes(14)):
            with contextlib.suppress(OSError):
                await bad.send(frame)
        with trio.fail_after(30):
            answer = await bad.recv(1_000)
        assert answer[3] == 0x80 or answer[:1] == b"\xcf"
        assert not await handler.exists("k")
        bad.close()
        await until(lambda: server.statistics().service.peers <= 1)


def test_threads_share_a_handler_over_the_channel():
    """Each thread that waits has a connection of its own."""
    results = []

    async def main():
        async with open_test_server() as server:

            def engine():
                import maru.blocking

                with maru.blocking.MaruHandler(server_url=server.endpoints[0], pool_size=0) as handler:

                    def some():
                        results.extend(handler.exists(f"k{number}") for number in range(50))

                    threads = [threading.Thread(target=some) for _ in range(8)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()

            await trio.to_thread.run_sync(engine)

    trio.run(main)
    assert results == [False] * 400
