"""Which peer is gone: the join of messages and monitor, against a world that behaves like ZeroMQ, and for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import contextmanager

import attrs
import pytest
import trio
import trio.testing
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru.transport import Link, SocketOptions, open_socket
from maru.transport._peers import Peers
from tests.support.held_by_process import zmq_is_idle
from tests.support.maru_sockets import PATIENCE, echo, echo_server, eventually


def automatic(number):
    return b"\0" + (number & 0xFFFF_FFFF).to_bytes(4, "big")


# --- purely -------------------------------------------------------------------------------------------------------


def test_a_peer_is_gone_once_nothing_of_it_is_left():
    peers = Peers()
    peers.connected(7)
    peers.heard(automatic(1), 7)
    assert peers.is_settled(automatic(1))
    assert peers.emptied() == []
    peers.disconnected(7)
    assert not peers.is_settled(automatic(1))
    peers.heard(automatic(1), 7)  # its last message
    assert peers.emptied() == [automatic(1)]
    assert peers.emptied() == []
    assert len(peers) == 0


def test_a_descriptor_that_is_used_again_is_another_connection():
    peers = Peers()
    for number in range(5):
        peers.connected(7)
        peers.heard(automatic(number), 7)
        assert list(peers.known) == [automatic(number)]
        peers.disconnected(7)
        assert peers.emptied() == [automatic(number)]


def test_a_peer_that_was_never_heard_is_not_missed():
    peers = Peers()
    peers.connected(7)
    peers.disconnected(7)
    peers.disconnected(8)
    assert peers.emptied() == []


def test_a_late_message_does_not_take_the_descriptor_of_the_next_peer():
    """Both are first heard when the older one has gone; its message is read last."""
    peers = Peers()
    peers.connected(7)
    peers.disconnected(7)
    peers.connected(7)
    old, new = automatic(-1), automatic(0)  # identities wrap around
    peers.heard(new, 7)
    peers.heard(old, 7)
    assert list(peers.known) == [new]
    assert peers.emptied() == [old]
    peers.disconnected(7)
    assert peers.emptied() == [new]


def test_who_is_taken_for_living_is_found_out_when_the_next_one_speaks():
    peers = Peers()
    peers.connected(7)
    peers.disconnected(7)
    peers.connected(7)
    peers.heard(automatic(1), 7)  # of the connection that has ended, but who could tell?
    assert peers.emptied() == []
    peers.heard(automatic(2), 7)
    assert peers.emptied() == [automatic(1)]
    assert list(peers.known) == [automatic(2)]


def test_a_message_of_a_connection_that_nobody_knows_is_of_one_that_has_ended():
    peers = Peers()
    peers.heard(automatic(1), 7)
    assert peers.emptied() == [automatic(1)]


def test_a_chosen_identity_that_comes_back_is_not_gone():
    peers = Peers()
    peers.connected(7)
    peers.heard(b"me", 7)
    assert not peers.is_settled(b"me")
    for descriptor in (9, 9, 7):
        peers.disconnected(peers.known[b"me"])
        peers.connected(descriptor)
        peers.heard(b"me", descriptor)
        assert peers.known == {b"me": descriptor}
        assert peers.emptied() == []
    peers.connected(8)
    peers.heard(b"me", 8)  # though the end of the other connection was not told
    peers.connected(8)  # nor was the end of this one
    assert peers.emptied() == [b"me"]


def test_two_chosen_identities_on_one_descriptor():
    peers = Peers()
    peers.connected(7)
    peers.disconnected(7)
    peers.connected(7)
    peers.heard(b"new", 7)
    peers.heard(b"old", 7)  # of the connection that ended unheard
    assert peers.emptied() == [b"old"]
    peers.heard(b"newer", 7)  # whose beginning was not told
    assert peers.emptied() == [b"new"]


@attrs.define(eq=False)
class Connection:
    """One connection of the world: what of it waits to be read."""

    identity: bytes
    descriptor: int
    pipe: deque = attrs.field(factory=deque)
    open: bool = True
    heard: bool = False
    gone: int = 0


class AgainstTheWorld(RuleBasedStateMachine):
    """Connections come and go with the lowest free descriptor, as the kernel gives them; messages and events wait."""

    def __init__(self):
        super().__init__()
        self.peers = Peers()
        self.events = deque()
        self.connections = []
        self.told_early = 0

    def living(self):
        return [each for each in self.connections if each.open]

    @rule(speaks=st.booleans())
    def connect(self, speaks):
        taken = {each.descriptor for each in self.living()}
        descriptor = next(n for n in range(len(taken) + 1) if n not in taken)
        new = Connection(automatic(len(self.connections) - 3), descriptor)
        self.connections.append(new)
        self.events.append((self.peers.connected, descriptor))
        if speaks:
            new.pipe.append("x")

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def speak(self, data):
        data.draw(st.sampled_from(self.living())).pipe.append("x")

    @precondition(lambda self: self.living())
    @rule(data=st.data(), last=st.booleans())
    def disconnect(self, data, last):
        ends = data.draw(st.sampled_from(self.living()))
        if last:
            ends.pipe.append("x")
        ends.open = False
        self.events.append((self.peers.disconnected, ends.descriptor))

    @rule()
    def read_the_monitor(self):
        while self.events:
            tell, descriptor = self.events.popleft()
            tell(descriptor)

    @precondition(lambda self: any(each.pipe for each in self.connections))
    @rule(data=st.data())
    def read_a_message(self, data):
        speaker = data.draw(st.sampled_from([each for each in self.connections if each.pipe]))
        speaker.pipe.popleft()
        speaker.heard = True
        assert not speaker.gone, "a message of a peer that was said to be gone"
        if not self.peers.is_settled(speaker.identity):
            self.read_the_monitor()
            self.peers.heard(speaker.identity, speaker.descriptor)

    @rule()
    def see_it_empty(self):
        self.read_the_monitor()
        while any(each.pipe for each in self.connections):
            for each in self.connections:
                while each.pipe:
                    each.pipe.popleft()
                    each.heard = True
                    if not self.peers.is_settled(each.identity):
                        self.read_the_monitor()
                        self.peers.heard(each.identity, each.descriptor)
        self.say_gone()

    def say_gone(self):
        by_identity = {each.identity: each for each in self.connections}
        for identity in self.peers.emptied():
            gone = by_identity[identity]
            gone.gone += 1
            assert not gone.open, "said to be gone, and lives"
            assert gone.heard and gone.gone == 1

    @invariant()
    def a_connection_has_one_peer(self):
        assert len(set(self.peers.known.values())) == len(self.peers.known)

    def teardown(self):
        for each in self.living():
            each.open = False
            self.events.append((self.peers.disconnected, each.descriptor))
        self.see_it_empty()
        for each in self.connections:
            assert each.gone == each.heard, "nobody is forgotten"
        assert not self.peers.known


TestAgainstTheWorld = AgainstTheWorld.TestCase
TestAgainstTheWorld.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# --- for real -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/socket"


@pytest.fixture
def ipc_path(tmp_path):
    return f"ipc://{tmp_path}/socket"


class Server:
    """A router that notes what it is told, in order."""

    def __init__(self):
        self.notes = []
        self.router = None

    @property
    def gone(self):
        return [peer for what, peer in self.notes if what == "gone"]

    async def serve(self):
        while True:
            for peer, *rest in await self.router.receive_batch():
                self.notes.append((rest[-1], peer))
                self.router.send_nowait([peer, *rest])


@contextmanager
def client_named(name, place):
    """A foreign client with an identity of its own choice."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = int(PATIENCE * 1_000)
        client.identity = name
        client.connect(place)
        yield client


def open_server(server, address, **more):
    return open_socket("router", bind=[address], on_gone=lambda peer: server.notes.append(("gone", peer)), **more)


async def test_each_peer_is_gone_once_after_its_last_message(address):
    server = Server()
    with trio.fail_after(PATIENCE):
        async with open_server(server, address) as server.router, trio.open_nursery() as nursery:
            nursery.start_soon(server.serve)
            [place] = server.router.endpoints
            async with open_socket("dealer", connect=[place]) as stays:
                await stays.send([b"stays"])
                await stays.receive()
                for number in range(20):  # the kernel gives them all the same descriptor
                    options = SocketOptions(linger=10.0)
                    async with open_socket("dealer", connect=[place], options=options) as dealer:
                        await dealer.send([b"hello %d" % number])
                        await dealer.receive()
                        assert server.router.statistics().peers == 2
                        await dealer.send([b"bye %d" % number])
                await eventually(lambda: len(server.gone) == 20)
                assert server.router.statistics().peers == 1
                await stays.send([b"stays"])
                await stays.receive()
            await eventually(lambda: len(server.gone) == 21)
            nursery.cancel_scope.cancel()
    peers = [peer for _, peer in server.notes]
    for number in range(20):
        words = [b"hello %d" % number, b"bye %d" % number, "gone"]
        [peer] = {peer for what, peer in server.notes if what in words[:2]}
        assert [what for what, each in server.notes if each == peer] == words
    assert len(set(peers)) == 21


async def test_a_peer_is_not_gone_while_its_last_message_is_being_seen_to(ipc_path):
    server = Server()
    with trio.fail_after(PATIENCE):
        async with open_server(server, ipc_path) as server.router, trio.open_nursery() as nursery:
            with client_named(b"\1", ipc_path) as client:
                client.send(b"hello")
                assert len(await server.router.receive_batch()) == 1
            # Its end has been told, and nothing of it waits to be read.
            await eventually(lambda: not server.router.statistics().peers and zmq_is_idle())
            assert server.notes == []
            nursery.start_soon(server.router.receive)
            await eventually(lambda: server.gone == [b"\1"])
            nursery.cancel_scope.cancel()


async def test_a_message_that_comes_as_a_connection_ends_is_not_slept_through(ipc_path):
    """Who looks after a connection swallows the signal of a message, while the leader lets the others have their turn."""
    with trio.fail_after(PATIENCE):
        async with (
            open_socket(
                "router", bind=[ipc_path], options=SocketOptions(busy_poll=1e-4), on_gone=lambda peer: None
            ) as router,
            trio.open_nursery() as nursery,
        ):
            with client_named(b"\1", ipc_path) as client:
                client.send(b"hello")
                await router.receive()

                async def connection_ends():
                    client.send(b"meanwhile")
                    while not router._raw_events(zmq.EVENTS) & zmq.POLLIN:  # it comes over another thread
                        pass
                    router._look()

                for _ in range(20):  # of two tasks, either may be the first to run
                    nursery.start_soon(connection_ends)
                    router._watch.crowded, router._watch._turn_ends = False, 0.0  # now it is the others' turn
                    assert (await router.receive())[1:] == [b"meanwhile"]


async def test_descriptors_are_used_again_between_two_readings(ipc_path):
    """Peers come, speak and leave while nobody reads: all of that is told in the right order."""
    server = Server()
    with trio.fail_after(PATIENCE):
        async with open_server(server, ipc_path) as server.router:

            def come_and_go():
                for number in range(30):
                    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
                        client.linger = int(PATIENCE * 1_000)
                        client.connect(ipc_path)
                        client.send(b"%d" % number)

            come_and_go()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.serve)
                await eventually(lambda: len(server.gone) >= 29)
                async with open_socket("dealer", connect=[ipc_path]) as dealer:
                    await dealer.send([b"30"])
                    await dealer.receive()
                await eventually(lambda: len(server.gone) == 31)
                nursery.cancel_scope.cancel()
    for number in range(31):
        [peer] = {peer for what, peer in server.notes if what == b"%d" % number}
        assert [what for what, each in server.notes if each == peer] == [b"%d" % number, "gone"]


async def test_a_killed_process_is_gone(address):
    program = (
        "import sys, zmq\n"
        "client = zmq.Context().socket(zmq.REQ); client.connect(sys.argv[1])\n"
        "client.send(b'hello'); client.recv(); print('there', flush=True); sys.stdin.read()"
    )
    server = Server()
    with trio.fail_after(PATIENCE):
        async with open_server(server, address) as server.router, trio.open_nursery() as nursery:
            nursery.start_soon(server.serve)
            [place] = server.router.endpoints
            run = [sys.executable, "-c", program, place]
            with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
                await trio.to_thread.run_sync(process.stdout.readline)
                assert not server.gone
                os.kill(process.pid, signal.SIGKILL)
                await eventually(lambda: server.gone)
            nursery.cancel_scope.cancel()
    assert server.notes == [(b"hello", server.gone[0]), ("gone", server.gone[0])]


async def test_a_chosen_identity_may_come_back(ipc_path):
    server = Server()
    with trio.fail_after(PATIENCE):
        async with open_server(server, ipc_path) as server.router, trio.open_nursery() as nursery:
            nursery.start_soon(server.serve)
            for life in range(1, 4):
                with client_named(b"me", ipc_path) as client:
                    client.send(b"hello")
                    await eventually(lambda: client.poll(0))
                await eventually(lambda: len(server.gone) == life)  # noqa: B023
            nursery.cancel_scope.cancel()
    assert server.notes == [(b"hello", b"me"), ("gone", b"me")] * 3


async def test_a_live_identity_cannot_be_taken(ipc_path):
    with trio.fail_after(PATIENCE):
        async with open_socket("router", bind=[ipc_path]) as router, trio.open_nursery() as nursery:
            nursery.start_soon(echo, router)
            with client_named(b"me", ipc_path) as mine:
                mine.send(b"1")
                await eventually(lambda: mine.poll(0))
                assert mine.recv() == b"1"
                with client_named(b"me", ipc_path) as thief:
                    thief.send(b"2")
                    await trio.sleep(0.05)
                    mine.send(b"3")
                    await eventually(lambda: mine.poll(0))
                    assert mine.recv() == b"3"
                    assert not thief.poll(0)
            nursery.cancel_scope.cancel()


async def test_only_a_router_knows_its_peers(ipc_path):
    with pytest.raises(ValueError, match="on_gone needs kind = 'router', not 'dealer'"):
        open_socket("dealer", connect=[ipc_path], on_gone=print)


async def test_a_monitor_that_is_not_read_stalls_nobody(ipc_path):
    """More events than ZeroMQ's queues hold by default; at a bound its I/O thread would wait for us."""
    links = []

    def knock():
        import socket

        path = ipc_path.removeprefix("ipc://")
        for _ in range(1_500):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(PATIENCE)
                client.connect(path)
                client.recv(1)

    async with open_socket("router", bind=[ipc_path], on_link=lambda event: links.append(event.link)):
        knock()  # in this thread: the loop stands still
        await eventually(lambda: links.count(Link.DISCONNECTED) == 1_500)
    assert links.count(Link.ACCEPTED) == 1_500


async def test_peers_are_told_apart_while_many_come_and_go(ipc_path):
    with trio.fail_after(PATIENCE):
        gone = []
        async with (
            open_socket("router", bind=[ipc_path], on_gone=gone.append) as router,
            trio.open_nursery() as nursery,
        ):
            heard = set()

            async def serve():
                while True:
                    for message in await router.receive_batch():
                        assert message[0] not in gone
                        heard.add(message[0])
                        router.send_nowait(message)

            async def visitor():
                for _ in range(5):
                    async with open_socket("dealer", connect=[ipc_path]) as dealer:
                        for _ in range(3):
                            await dealer.send([b"x"])
                            await dealer.receive()

            nursery.start_soon(serve)
            async with trio.open_nursery() as visitors:
                for _ in range(8):
                    visitors.start_soon(visitor)
            await eventually(lambda: len(gone) == 40)
            assert sorted(gone) == sorted(heard)
            nursery.cancel_scope.cancel()


async def test_an_echo_is_told_of_nobody_who_lives(address):
    gone = []
    with echo_server(address, on_gone=gone.append) as place, trio.fail_after(5 * PATIENCE):
        async with open_socket("dealer", connect=[place]) as dealer:
            for _ in range(2_000):
                dealer.send_nowait([b"x"])
                await dealer.receive()
            assert not gone
