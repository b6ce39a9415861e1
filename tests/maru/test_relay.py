"""TCP without keys: whoever comes in meets the relay, and never what could end the server."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import zmq

from maru.base.relay import lookup
from maru.base.relay import supervisor as relay_supervisor
from maru.base.relay.handshake import greeting, ready
from maru.base.relay.relay import Relay
from maru.base.relay.supervisor import RelaySupervisor
from maru.testing import open_test_server
from maru.transport import open_socket
from tests.support.maru_actors import client
from tests.support.maru_processes import PATIENCE, TCP, Server, eventually, temporary_pool
from tests.support.published import PublishedClient, PublishedRmClient
from tests.support.published_wire import Ask

HEARTBEAT = struct.pack("!HBBBBBBII", 0xCF00, 1, 0xF1, 0, 0, 0, 0, 1, 1) + b"\x80"
MESSAGE = b"\x01\x00\x00" + bytes([len(HEARTBEAT)]) + HEARTBEAT
REPLY = b"\xcf\x00"


@pytest.fixture
def pool() -> Iterator[Path]:
    with temporary_pool() as path:
        yield path


def claim(identity: bytes, kind: bytes = b"DEALER") -> bytes:
    """A handshake that claims this routing id."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return greeting() + (bytes([4, len(body)]) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))) + body


def routing_id(number: int) -> bytes:
    """As ZeroMQ gives it."""
    return b"\0" + struct.pack(">I", number & 0xFFFF_FFFF)


def hear(peer: socket.socket, what: bytes) -> bool:
    """Whether these bytes come before the end."""
    said = b""
    while what not in said:
        try:
            more = peer.recv(4096)
        except ConnectionError:
            return False
        if not more:
            return False
        said += more
    return True


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def dial(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(address)), PATIENCE)


# --- the routing id that comes next -------------------------------------------------------------------------------

SERVER = """
import sys, trio, maru
from maru._server.service import Service

handle, seen = Service.handle, set()

def told(self, identity, frame, now):
    if identity not in seen:
        seen.add(identity)
        print(identity.hex(), flush=True)
    return handle(self, identity, frame, now)

Service.handle = told

async def main():
    config = maru.ServerConfig(host="127.0.0.1", port=0, pool_path=sys.argv[1], capacity_bytes="16 MiB")
    async with maru.open_server(config) as server:
        print(server.endpoints[0].rpartition(":")[2], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""
"""A server that says which routing id ZeroMQ gave to each peer: a guess may take longer, and finds the same."""


def test_nobody_takes_the_routing_id_that_the_server_gives_next(pool):
    """Nineteen connections were enough to end it: assertion failed, socket_base.cpp."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(pool)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    over = threading.Timer(PATIENCE, server.kill)
    over.start()
    try:
        assert server.stdout is not None and server.stdin is not None
        address = f":{server.stdout.readline().strip()}"
        with contextlib.ExitStack() as stack:

            def answers(identity: bytes) -> bool:
                peer = stack.enter_context(dial(address))
                peer.sendall(claim(identity))
                if not hear(peer, b"READY"):
                    return False
                peer.sendall(MESSAGE)
                return hear(peer, REPLY)

            assert answers(b"")
            first = int(server.stdout.readline()[2:], 16)
            for step in range(1, 18):
                assert answers(routing_id(first + step))
            assert answers(b"")
            assert server.poll() is None
        server.stdin.close()
        assert server.wait(PATIENCE) == 0
    finally:
        over.cancel()
        server.kill()
        server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                pipe.close()


# --- crowds that mean it ------------------------------------------------------------------------------------------


class Crowd:
    """Connections that are broken, or mean it, each kind in turn; some of them stay for a while."""

    def __init__(self, address: str, seed: int) -> None:
        self._address, self._dice = address, random.Random(seed)
        self._kinds = itertools.cycle(
            (self.claim_id, self.half, self.garbage, self.huge, self.deaf, self.leave, self.flood, self.bad_frames)
        )
        self._here: list[socket.socket] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._here:
            peer.close()

    def come(self, n: int, stay: int = 100) -> None:
        for _ in range(n):
            peer = dial(self._address)
            self._here.append(peer)
            with contextlib.suppress(OSError):
                next(self._kinds)(peer)
            while len(self._here) > stay:
                self._here.pop(self._dice.randrange(len(self._here))).close()

    def claim_id(self, peer: socket.socket) -> None:
        peer.sendall(claim(routing_id(self._dice.getrandbits(32))))
        if hear(peer, b"READY"):
            peer.sendall(MESSAGE)

    def half(self, peer: socket.socket) -> None:
        peer.sendall(claim(b"me")[: self._dice.randrange(100)])

    def garbage(self, peer: socket.socket) -> None:
        peer.sendall(self._dice.randbytes(self._dice.randrange(1, 2_000)))

    def huge(self, peer: socket.socket) -> None:
        peer.sendall(greeting() + b"\x06" + struct.pack(">Q", 1 << 40) + bytes(100_000))

    def deaf(self, peer: socket.socket) -> None:
        """Asks, and reads nothing."""
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(claim(b""))
        peer.setblocking(False)
        peer.sendall(MESSAGE * 200)

    def leave(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._here.remove(peer)
        peer.close()

    def flood(self, peer: socket.socket) -> None:
        peer.sendall(claim(b"x" * 255) + MESSAGE * 50)

    def bad_frames(self, peer: socket.socket) -> None:
        peer.sendall(claim(b""))
        if hear(peer, b"READY"):
            peer.sendall(b"\x02" + b"\xff" * 8 + bytes(1_000))


def withstand(pool: Path, connections: int, threads: int) -> None:
    """So many hostile connections, while a published client and one of ours go on."""
    failures: list[BaseException] = []
    with Server(pool, *TCP, "--log-level", "error") as server:
        before = server.process.private_bytes()

        def attack(seed: int) -> None:
            try:
                with Crowd(server.tcp, seed) as crowd:
                    crowd.come(connections // threads)
            except BaseException as exc:
                failures.append(exc)

        with client("blocking", server.ipc, lease=60.0) as ours:
            crowds = [threading.Thread(target=attack, args=(seed,)) for seed in range(threads)]
            for crowd in crowds:
                crowd.start()
            served = 0
            for number in itertools.count():
                assert ours.put([f"{number}"]) == ["NEW"]
                assert ours.get([f"{number}"]) == ["right"]
                with PublishedClient(server.tcp, timeout=PATIENCE) as published:
                    assert published.ask(Ask.EXISTS_KV, key="nowhere")["exists"] is False
                    served += 1
                if not any(crowd.is_alive() for crowd in crowds):
                    break
            for crowd in crowds:
                crowd.join(PATIENCE)
        assert not failures, failures
        relay = server.facts("relay")
        assert served and relay["starts"] == 1 and relay["failed"] == 0
        assert server.starts == 1 and server.process.alive
        assert server.process.private_bytes() - before < 64 << 20


def test_a_crowd_of_hostile_connections_ends_nothing(pool):
    withstand(pool, 240, threads=4)


@pytest.mark.long
def test_ten_thousand_hostile_connections_end_nothing(pool):
    withstand(pool, 10_000, threads=8)


def test_connections_take_no_more_than_their_part_of_the_descriptors(pool):
    """ZeroMQ ends a process that cannot accept a connection for want of one: all of them were to be had from outside."""
    with Server(pool, *TCP, setup="tests.support.maru_setups:limit:400") as server, contextlib.ExitStack() as stack:
        for _ in range(450):
            with contextlib.suppress(ConnectionError):
                peer = stack.enter_context(dial(server.tcp))
                peer.sendall(claim(b""))
                stack.enter_context(dial(server.ready["rm_address"]))
        for _ in range(40):
            ours = stack.enter_context(socket.socket(socket.AF_UNIX))
            ours.connect(server.ipc.removeprefix("ipc://"))
        with client("blocking", server.ipc) as one:
            assert one.put(["k"]) == ["NEW"]
        assert server.process.descriptors() < 400
        assert "max_connections = 1000: at most 70 over TCP" in server.log()


@pytest.mark.parametrize(("descriptors", "most"), [(20_000, 1_000), (1_024, 236), (400, 92), (128, 19)])
async def test_connections_over_tcp_are_a_share_of_descriptors(monkeypatch, descriptors, most):
    monkeypatch.setattr("maru.base.process_limits.DESCRIPTORS._limit", lambda: descriptors)
    async with open_test_server(host="127.0.0.1") as server:
        assert server._most_connections == most


# --- its life -----------------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def relay_of(server: Server) -> int:
    return int(eventually(lambda: server.facts("relay")["pid"]))


def test_a_relay_that_is_killed_is_started_again_and_ours_do_not_notice(pool):
    with (
        Server(pool, *TCP) as server,
        client("blocking", server.ipc, lease=60.0) as ours,
        PublishedClient(server.tcp, timeout=PATIENCE) as published,
    ):
        assert ours.put(["k"]) == ["NEW"]
        assert published.ask(Ask.EXISTS_KV, key="k")["exists"] is True
        before = relay_of(server)
        os.kill(before, signal.SIGKILL)
        assert ours.get(["k"]) == ["right"]
        eventually(lambda: relay_of(server) != before)
        eventually(lambda: published.ask(Ask.EXISTS_KV, key="k")["exists"] is True)
        with PublishedClient(server.tcp, timeout=PATIENCE) as another:
            assert another.ask(Ask.EXISTS_KV, key="k")["exists"] is True
        assert server.facts("relay")["starts"] == 2
        assert server.starts == 1
    assert f"the relay of TCP connections has ended (status {-signal.SIGKILL})" in server.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_relay_ends_with_its_server_and_leaves_the_port(pool, number):
    with Server(pool, *TCP) as server:
        relay = relay_of(server)
        server._hang_up()
        server.process.send(number)
        server.process.wait()
        eventually(lambda: not is_running(relay))
        server.start()  # at the same port
        with PublishedClient(server.tcp, timeout=PATIENCE) as published:
            assert published.ask(Ask.EXISTS_KV, key="k")["exists"] is False


def test_a_server_is_up_again_at_its_port_while_its_relay_is_still_dying(pool):
    with Server(pool, *TCP) as server:
        relay = relay_of(server)
        os.kill(relay, signal.SIGSTOP)
        goes_on = threading.Timer(0.3, os.kill, (relay, signal.SIGCONT))
        goes_on.start()
        try:
            server.kill()
            server.start()
        finally:
            goes_on.join()


def test_a_server_is_up_again_at_its_port_while_its_relay_is_still_starting(pool, tmp_path):
    """A server killed soon after its start, on a busy machine: its relay was still importing, and had the port."""
    program = tmp_path / "stands-still"
    program.write_text(f'#!/bin/sh\nkill -STOP $$\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    relays = []
    with Server(pool, *TCP, setup=f"tests.support.maru_setups:stop_relays:{program}") as server:
        try:
            for _ in range(3):
                relays.append(relay_of(server))
                server.restart()
            relays.append(relay_of(server))
            for relay in relays:
                os.kill(relay, signal.SIGCONT)
            eventually(lambda: not any(map(is_running, relays[:-1])))
            with PublishedClient(server.tcp, timeout=PATIENCE) as published:
                assert published.ask(Ask.EXISTS_KV, key="k")["exists"] is False
        finally:
            for relay in filter(is_running, relays):
                os.kill(relay, signal.SIGKILL)


async def test_the_relay_of_a_server_in_a_program_ends_with_its_block():
    async with open_test_server(host="127.0.0.1") as server:

        def ask() -> object:
            with PublishedClient(server.endpoints[0], timeout=PATIENCE) as published:
                return published.ask(Ask.EXISTS_KV, key="k")["exists"]

        assert await trio.to_thread.run_sync(ask) is False
        relay = server.statistics().relay
        assert relay is not None and relay.pid and is_running(relay.pid)
    assert not is_running(relay.pid)


async def test_a_relay_that_cannot_be_started_is_tried_again_ever_later(tmp_path, monkeypatch, caplog, autojump_clock):
    waits: list[float] = []
    monkeypatch.setattr(relay_supervisor.sys, "executable", str(tmp_path / "nothing"))

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 9:
            nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(relay_supervisor.trio, "sleep", sleep)
    keeper = RelaySupervisor(str(tmp_path / "tcp.sock"), most=4, anybody=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run, "127.0.0.1", 0)
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert keeper.statistics().starts == 9 and keeper.statistics().pid == 0
    assert "it cannot be started" in caplog.text


def test_what_was_turned_away_is_counted_and_said(pool):
    with Server(pool, *TCP) as server:
        with dial(server.tcp) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
            hear(peer, b"nothing of the kind")
        eventually(lambda: server.facts("relay")["malformed"] == 1)
        eventually(lambda: "TCP connections refused: 1 malformed" in server.log())


# --- other users --------------------------------------------------------------------------------------------------

STRANGER = """
import encodings.idna, os, socket, sys
os.setgid(65534); os.setuid(65534)
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60)
peer.sendall(bytes.fromhex(sys.argv[2]))
if sys.argv[3] == "leave":      # of a connection that its process has closed the kernel says that it is root's
    sys.exit()
said = b""
try:
    while b"READY" not in said and (more := peer.recv(4096)):
        said += more
except ConnectionError:
    pass
print(said.hex())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_of_this_host_is_turned_away(pool):
    stores = claim(b"") + MESSAGE

    def come(port: int, said: bytes, then: str = "stay") -> bytes:
        command = [sys.executable, "-c", STRANGER, str(port), said.hex(), then]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return bytes.fromhex(done.stdout.strip())

    with Server(pool, *TCP) as server:
        assert come(port_of(server.tcp), stores) == greeting()
        come(port_of(server.tcp), stores, "leave")
        assert come(port_of(server.ready["rm_address"]), b"any") == b""
        eventually(lambda: server.facts("relay")["strangers"])
        eventually(lambda: "of other users" in server.log())
        assert server.facts("relay")["relayed"] == 0
        with PublishedClient(server.tcp) as published, PublishedRmClient(server.ready["rm_address"]) as rm:
            assert published.ask(Ask.EXISTS_KV, key="k")["exists"] is False
            assert rm.stats()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_insecure_lets_other_users_in(pool):
    with Server(pool, *TCP, "--insecure") as server:
        command = [sys.executable, "-c", STRANGER, str(port_of(server.tcp)), claim(b"").hex(), "stay"]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True)
        assert b"READY".hex().encode() in done.stdout


async def test_where_the_kernel_cannot_be_asked_nobody_new_comes_in(monkeypatch, caplog):
    def fail(local: object, remote: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(lookup, "_ask", fail)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.testing.open_stream_to_socket_listener(listener) as stream:
        assert lookup.find_user(stream) is None
    assert "Too many open files" in caplog.text


# --- one relay in this process ------------------------------------------------------------------------------------


class Place:
    """A relay before a real ROUTER, both in this trio run."""

    def __init__(self, relay: Relay, router: object, port: int) -> None:
        self.relay, self.router, self.port = relay, router, port

    async def dial(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    def is_empty(self) -> bool:
        return not len(self.relay._quota) and not len(self.relay._handshakes)


def nobody(stream: trio.SocketStream) -> int | None:
    return 0


@contextlib.asynccontextmanager
async def relaying_here(tmp_path: Path, path: str = "", **options):
    path = path or f"{tmp_path}/tcp.sock"
    options = {"most": 10, "find_user": nobody, **options}
    with trio.fail_after(PATIENCE):
        async with open_socket("router", bind=[f"ipc://{tmp_path}/tcp.sock"]) as router, trio.open_nursery() as nursery:
            relay = Relay(path, **options)
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(relay.run, listener)
            yield Place(relay, router, listener.socket.getsockname()[1])
            nursery.cancel_scope.cancel()
        assert not len(relay._quota) and not len(relay._handshakes)


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for happens in the kernel
        await trio.sleep(0.002)


async def receive_all(stream: trio.SocketStream) -> bytes:
    said = b""
    with contextlib.suppress(trio.BrokenResourceError):
        while more := await stream.receive_some():
            said += more
    return said


async def test_bytes_go_both_ways_and_nothing_of_the_handshake_does(tmp_path):
    async with relaying_here(tmp_path) as place, await place.dial() as peer:
        for byte in claim(b"mine"):
            await peer.send_all(bytes([byte]))
        await peer.send_all(b"\x00\x05hello")
        identity, message = await place.router.receive()
        assert (identity[:1], len(identity), message) == (b"\0", 5, b"hello")
        await place.router.send([identity, b"there"])
        said = b""
        while not said.endswith(b"there"):
            said += await peer.receive_some()
        assert said == greeting() + ready(b"ROUTER") + b"\x00\x05there"


async def test_a_connection_to_the_server_lives_as_long_as_its_peer(tmp_path):
    async with relaying_here(tmp_path) as place:
        peer = await place.dial()
        await peer.send_all(claim(b""))
        await until(lambda: place.relay.counts.relayed)
        await peer.aclose()
        await until(place.is_empty)
        async with await place.dial() as another:
            await another.send_all(claim(b""))
            await until(lambda: place.relay.counts.relayed == 2)
            await place.router.aclose()
            assert (await receive_all(another)).startswith(greeting())


async def test_half_a_handshake_ends_in_time_and_garbage_at_once(tmp_path):
    async with relaying_here(tmp_path, handshake_time=0.05) as place:
        for said in (b"", greeting(), claim(b"")[:-1], b"GET"):
            async with await place.dial() as peer:
                await peer.send_all(said)
                assert await receive_all(peer) in (greeting(), b"")
        await until(lambda: place.relay.counts.malformed == 4)


async def test_the_oldest_half_handshake_goes_where_there_are_too_many(tmp_path):
    async with (
        relaying_here(tmp_path, most_handshakes=2) as place,
        await place.dial() as first,
        await place.dial() as second,
    ):
        await until(lambda: len(place.relay._handshakes) == 2)
        async with await place.dial() as third:
            assert await receive_all(first) == greeting()
            await third.send_all(claim(b""))
            await until(lambda: place.relay.counts.relayed)
        await second.send_all(claim(b""))
        await until(lambda: place.relay.counts.relayed == 2)


async def test_a_stranger_meets_a_greeting_and_no_more(tmp_path):
    def stranger(stream: trio.SocketStream) -> int | None:
        return None

    async with relaying_here(tmp_path, find_user=stranger) as place, await place.dial() as peer:
        await peer.send_all(claim(b"") + MESSAGE)
        assert await receive_all(peer) == greeting()
        assert place.relay.counts.strangers == 1 and not place.relay.counts.relayed


async def test_one_peer_has_half_of_the_places(tmp_path):
    async with relaying_here(tmp_path, most=4) as place, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            peer = await stack.enter_async_context(await place.dial())
            await peer.send_all(claim(b""))
        await until(lambda: place.relay.counts.crowded and place.relay.counts.relayed == 2)


@pytest.mark.parametrize("what", ["nobody", "no answer", "another"])
async def test_a_server_that_is_not_there_costs_its_peer_the_connection(tmp_path, what):
    path = f"{tmp_path}/other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        if what != "nobody":
            other.bind(path)
            other.listen(0)
        async with relaying_here(tmp_path, path=path, handshake_time=0.1) as place, trio.open_nursery() as nursery:

            async def be_another() -> None:
                listening = trio.socket.from_stdlib_socket(other)
                while True:
                    connection, _ = await listening.accept()
                    with connection:
                        await connection.send(b"HTTP/1.1 400\r\n")

            if what == "another":
                nursery.start_soon(be_another)
            peers = [await place.dial() for _ in range(4)]  # more than its backlog takes
            for peer in peers:
                await peer.send_all(claim(b""))
            for peer in peers:
                assert await receive_all(peer) in (greeting(), b"")
                await peer.aclose()
            assert not place.relay.counts.relayed
            await until(place.is_empty)
            nursery.cancel_scope.cancel()


async def test_who_does_not_read_is_not_read_for(tmp_path):
    """What the server says to him waits at the server, whose queues are bounded."""
    async with relaying_here(tmp_path) as place, await place.dial() as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await deaf.send_all(claim(b"") + b"\x00\x01d")
        identity, _ = await place.router.receive()
        sent = 0
        with contextlib.suppress(trio.WouldBlock):
            while sent < 512 << 20:
                await trio.lowlevel.checkpoint()
                place.router.send_nowait([identity, bytes(1 << 20)])
                sent += 1 << 20
        async with await place.dial() as good:  # only now: who is silent for long is hung up on
            await good.send_all(claim(b"") + b"\x00\x01g")
            another, message = await place.router.receive()
            assert message == b"g"
            await place.router.send([another, b"x"])
            said = b""
            while not said.endswith(b"\x00\x01x"):
                said += await good.receive_some()


STAGES = ["connected", "greeted", "connecting", "relayed", "deaf"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_relay_that_is_cancelled_leaves_no_connection(tmp_path, stage):
    asked = trio.Event()

    def find(stream: trio.SocketStream) -> int | None:
        asked.set()
        return 0

    silent = f"{tmp_path}/silent.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(silent)
        listening.listen(0)
        path = silent if stage == "connecting" else ""
        before = set(os.listdir("/proc/self/fd"))
        async with relaying_here(tmp_path, path=path, find_user=find) as place:
            peer = await place.dial()
            if stage == "connected":
                await until(lambda: len(place.relay._handshakes))
            elif stage == "greeted":
                await peer.send_all(greeting())
                await trio.testing.wait_all_tasks_blocked()
            else:
                await peer.send_all(claim(b"") + b"\x00\x01x")
                await asked.wait()
                if stage in ("relayed", "deaf"):
                    identity, _ = await place.router.receive()
                if stage == "deaf":
                    with contextlib.suppress(trio.WouldBlock):
                        for _ in range(64):
                            place.router.send_nowait([identity, bytes(1 << 20)])
                    await trio.sleep(0.01)
                await trio.testing.wait_all_tasks_blocked()
        with contextlib.suppress(trio.BrokenResourceError):
            await receive_all(peer)  # it ends
        await peer.aclose()
        assert len(set(os.listdir("/proc/self/fd"))) <= len(before)


# --- clients that are as published ones are -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_sockets_of_zeromq_are_served_whatever_they_are_called(pool, kind):
    with Server(pool, *TCP) as server, zmq.Context() as context:
        for name in (b"", b"engine-0", b"\0abcd", b"x" * 255):
            with context.socket(kind) as sock:
                sock.linger, sock.rcvtimeo = 0, round(PATIENCE * 1e3)
                if name.startswith(b"\0"):  # which libzmq itself does not let a socket be called
                    continue
                if name:
                    sock.routing_id = name
                sock.connect(server.tcp)
                sock.send_multipart([HEARTBEAT] if kind == zmq.REQ else [b"", HEARTBEAT])
                assert sock.recv_multipart()[-1].startswith(REPLY)


def test_a_published_client_that_leaves_is_missed(pool):
    """Its lease is its connection: the server hears of its end through the relay."""
    with Server(pool, *TCP, "--session-lease", "0.1", "--lease-grace", "0") as server:
        with PublishedClient(server.tcp, timeout=PATIENCE) as published:
            published.ask(Ask.REQUEST_ALLOC, instance_id="theirs", size=2 << 20)
            assert server.facts("directory")["regions"] == 1
        eventually(lambda: server.facts("directory")["regions"] == 0)


def test_messages_of_a_megabyte_and_thousands_in_a_row_pass(pool):
    with Server(pool, *TCP) as server, zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger, sock.rcvtimeo = 0, round(PATIENCE * 1e3)
        sock.connect(server.tcp)
        answered = []
        for start in range(0, 2_000, 200):  # no client has more under way
            for number in range(start, start + 200):
                sock.send_multipart([b"", HEARTBEAT[:8] + struct.pack("!I", number) + HEARTBEAT[12:]])
            answered += [struct.unpack_from("!I", sock.recv_multipart()[-1], 8)[0] for _ in range(200)]
        assert answered == list(range(2_000))
        large = struct.pack("!HBBBBBBII", 0xCF00, 1, 0xF1, 0, 0, 0, 0, 7, 1) + b"\x80" + bytes(1 << 20)
        sock.send_multipart([b"", large])
        assert struct.unpack_from("!I", sock.recv_multipart()[-1], 8)[0] == 7
