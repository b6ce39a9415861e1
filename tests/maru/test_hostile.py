"""Peers that are broken, or mean it: whatever they send, the server goes on, and costs nobody else anything."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from maru import BadFrame, NoAnswer, NotOwner
from maru._wire import (
    AllocRequest,
    BatchRegisterRequest,
    BeatRequest,
    Code,
    DropRequest,
    ErrorReply,
    FindRequest,
    HandshakeRequest,
    KeyRequest,
    KeysRequest,
    PinsRequest,
    ReclaimRequest,
    RegionRequest,
    RegisterRequest,
    ResolveRequest,
    ReturnRequest,
    StoreRequest,
    UnpinRequest,
    body_of,
    decode_reply,
    read_header,
    request,
)
from maru.base.descriptors import DescriptorRequest, fetch_descriptor
from maru.transport import new_key_pair, save_key_pair, save_public_key
from tests.support import wire_vectors
from tests.support.maru_actors import FACES, REGION, PublishedOwner, client
from tests.support.maru_processes import PATIENCE, TCP, Server, eventually, temporary_pool
from tests.support.mutations import Mutations
from tests.support.published import PublishedClient, PublishedRmClient
from tests.support.published_wire import IPC_HEADER, IPC_MAGIC, Ask, Ipc

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL".ljust(64, b"\0")
"""Of ZMTP 3.1: signature, version and mechanism."""


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


class Attacker:
    """A bare DEALER."""

    def __init__(self, address: str, **options: int):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, round(PATIENCE * 1e3)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(address)
        self._sequences = itertools.count(1)
        self.others = 0
        """Answers that came while another was waited for."""

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()

    def send(self, frame: bytes) -> bool:
        """Whether it left; not at all if it would have to wait for long."""
        try:
            self.socket.send_multipart([b"", frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def drain(self) -> int:
        """How many answers have come."""
        n = 0
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv_multipart(zmq.NOBLOCK)
                n += 1
        return n

    def ask(self, code: int, message: Any = None) -> Any:
        sequence = next(self._sequences)
        self.socket.send_multipart([b"", request(code, sequence, message)])
        while True:
            frame = self.socket.recv_multipart()[-1]
            header = read_header(frame)
            if header.sequence == sequence and header.code == code | 0x80:
                return decode_reply(header.code, body_of(frame, header))
            self.others += 1

    def session(self, **options: Any) -> bytes:
        session = self.session_if_there_is_room(**options)
        assert session is not None
        return session

    def session_if_there_is_room(self, **options: Any) -> bytes | None:
        answer = self.ask(Code.HANDSHAKE, HandshakeRequest(instance_id="attacker", extensions=1, **options))
        return None if isinstance(answer, ErrorReply) else answer.session


class Good:
    """A good client at work in a thread, for as long as the block lasts. Any error it meets is raised at the end."""

    def __init__(self, server: Server, face: str = "blocking"):
        self._server, self._face = server, face
        self._ends = threading.Event()
        self._failure: BaseException | None = None
        self.rounds, self.worst = 0, 0.0
        self._handler: Any = None
        self._thread = threading.Thread(target=self._run, name="good client", daemon=True)

    def __enter__(self) -> Good:
        self._thread.start()
        eventually(lambda: self.rounds or self._failure)
        return self

    def __exit__(self, *_: object) -> None:
        before = self.rounds
        eventually(lambda: self.rounds > before or self._failure)  # it is answered at the end, too
        self._ends.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def is_alone(self) -> bool:
        """Whether the server has its connections and no others, but for the one over which that is asked."""
        connections = self._server.facts("server")["connections"]
        # A sign of life that is due in the middle of a round has one of its own, and then there are two.
        return connections <= 1 + self._handler.statistics().calls.sockets

    def _run(self) -> None:
        try:
            with client(self._face, self._server.ipc, lease=60.0) as good:
                self._handler = good.handler
                good.put(["pinned"])
                good.hold("pinned")
                while not self._ends.is_set():
                    began = time.monotonic()
                    key = f"good {self.rounds}"
                    assert good.put([key]) == ["NEW"]
                    assert good.get([key, "pinned"]) == ["right", "right"]
                    assert good.looks("pinned") == "right"
                    assert good.delete([key]) == ["DELETED"]
                    self.worst = max(self.worst, time.monotonic() - began)
                    self.rounds += 1
                    self._ends.wait(0.002)
                assert good.handler.statistics().counters.sessions_lost == 0
        except BaseException as exc:
            self._failure = exc


# --- mutated frames ----------------------------------------------------------------------------------------------------


def corpus(attacker: Attacker, region_id: int) -> list[bytes]:
    """Frames that mean something here and now: with a session that lives, a region that is its own, and keys that are there."""
    session = eventually(attacker.session_if_there_is_room)
    region = attacker.ask(Code.REQUEST_ALLOC, AllocRequest("attacker", REGION, session)).handle
    own = region_id if region is None else region.region_id
    keys = ["a", "b", "c", "k1"]
    messages = [
        *((Code.STORE, StoreRequest(session, 0, at, own, keys, [0, 100, 200, 300], 100, None)) for at in range(10, 16)),
        (Code.STORE, StoreRequest(session, 0, 20, [own, region_id], ["d", "e"], [400, 500], [7, 8], [1, 2])),
        *[(Code.FIND, FindRequest(session, 0, keys, True, False))] * 3,
        *[(Code.UNPIN, UnpinRequest(session, 0, keys))] * 2,
        (Code.FIND, FindRequest(session, 0, keys, True, False, 1)),
        (Code.PINS, PinsRequest(session, 0, 1, keys, [1, 2, 0, 1], True)),
        *((Code.DROP, DropRequest(session, 1, at, keys)) for at in range(1, 4)),
        (Code.RECLAIM, ReclaimRequest(session, 1, 5, 3)),
        (Code.BEAT, BeatRequest(session, 0)),
        (Code.REGION, RegionRequest(session, 0, own, True)),
        (Code.REGISTER_KV, RegisterRequest("k1", region_id, 0, 10)),
        (Code.BATCH_REGISTER_KV, BatchRegisterRequest([RegisterRequest(key, region_id, 50, 10) for key in keys])),
        (Code.LOOKUP_KV, KeyRequest("k1")),
        (Code.DELETE_KV, KeyRequest("k1")),
        (Code.BATCH_PIN_KV, KeysRequest(keys)),
        (Code.BATCH_UNPIN_KV, KeysRequest(keys)),
    ]
    living = [request(code, 7, message) for code, message in messages]
    rare = [
        request(Code.RESOLVE, 7, ResolveRequest(session, 1, 10, [own], [0])),
        request(Code.REQUEST_ALLOC, 7, AllocRequest("attacker", REGION, session)),
        request(Code.RETURN_ALLOC, 7, ReturnRequest("attacker", own, session)),
        request(Code.HANDSHAKE, 7, HandshakeRequest(instance_id="mutant", extensions=1, lease=0.1)),
        *(wire_vectors.frame(code, 1, body) for code, body, _ in wire_vectors.REQUESTS),
    ]
    return living * 8 + rare


NUMBERS = [0, 1, -1, 2, 7, 100, 4096, REGION, REGION - 1, -(2**63), 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = ["", "k1", "a", "x" * 1024, "x" * 1025, "\0", "\x1f1:a\x1f", "../..", "\N{SNOWMAN}" * 300, "attacker", "theirs"]


def absurd(dice: random.Random, value: Any) -> Any:
    """The same message, well formed, with some of its values replaced: by what nobody would send."""
    chance = dice.random()
    if isinstance(value, dict):
        return {key: absurd(dice, one) for key, one in value.items() if dice.random() > 0.02}
    if isinstance(value, list):
        if chance < 0.05:
            return []
        if chance < 0.1 and len(value) < 100:
            value = value * dice.choice((2, 3, 40))
        return [absurd(dice, one) for one in value]
    if chance < 0.75:
        return value
    if isinstance(value, bool) or value is None:
        return dice.choice((True, False, None))
    if isinstance(value, int):
        return dice.choice((*NUMBERS, value + 1, dice.randrange(10)))
    if isinstance(value, str):
        return dice.choice((*TEXTS, f"{dice.randrange(5_000)}"))
    if isinstance(value, float):
        return dice.choice((0.0, -1.0, float("inf"), float("nan"), 1e300, 5))
    return value if chance < 0.97 else dice.randbytes(len(value))


def throw(server: Server, region_id: int, n: int, seed: int) -> int:
    """So many frames, from two connections at a time: bytes changed in one half, values in the other. How many answers came.

    What has no readable header costs its sender the session, so it comes from another one: or else all that follows would
    be refused at the door.
    """
    answers = 0
    dice = random.Random(seed)
    for batch in range(n // 1000):
        with Attacker(server.ipc, sndhwm=5_000, rcvhwm=5_000) as known, Attacker(server.ipc) as unknown:
            good = corpus(known, region_id)
            frames = Mutations(good, seed + batch)
            for at in range(1000):
                if at % 2:
                    frame = dice.choice(good)
                    body = msgspec.msgpack.encode(absurd(dice, msgspec.msgpack.decode(frame[16:])))
                    frame = wire_vectors.frame(frame[3], at, body)
                else:
                    frame = next(frames)
                try:
                    read_header(frame)
                    sender = known
                except BadFrame:
                    sender = unknown
                envelope = dice.choice(
                    ([b"", frame], [b"", frame], [b"", frame], [frame], [b"", frame, frame], [frame] * 9)
                )
                sender.socket.send_multipart(envelope)
                if at % 100 == 99:
                    answers += known.drain() + unknown.drain()
            known.ask(Code.HEARTBEAT)
            unknown.ask(Code.HEARTBEAT)
            answers += known.others + unknown.others
    return answers


def assert_fuzz(pool: Path, n: int) -> None:
    options = ["--max-entries", "2000", "--max-sessions", "300", "--session-lease", "0.3", "--max-lease", "30"]
    options += ["--capacity-bytes", "16MiB", "--lease-grace", "0.05", "--v1-read-grace", "0.1", "--log-level", "error"]
    with Server(pool, *options, skips=True) as server, PublishedOwner(server.ipc, "theirs") as owner:
        with Good(server) as good:
            throw(server, owner.handle["region_id"], max(3_000, n // 10), seed=1)
            before = server.process.private_bytes()
            answers = throw(server, owner.handle["region_id"], n, seed=10_000)
            after = server.process.private_bytes()
        facts = server.facts("server")
        print(
            f"\n{n} frames, {answers} answers, {facts['refused']} refused, {facts['bad frames']} bad; the good client"
        )
        print(
            f"went round {good.rounds} times, {good.worst * 1e3:.0f} ms at worst; memory grew by {(after - before) >> 10} KiB"
        )
        assert n / 10 < facts["refused"] < 0.8 * n and facts["bad frames"] > n / 50 and answers > n / 10
        assert after - before < min(8 << 20, (2 << 20) + 64 * n)
        assert server.process.alive
        server.skip(60.0)
        eventually(lambda: server.facts()["sessions"] <= 1)
        # What they did, and was taken, is in the journal as everything else is.
        kept = server.facts()
        assert kept["registered"] > n / 1000
        server.restart()
        assert (server.ready["keys"], server.ready["regions"]) == (kept["entries"], kept["regions"])
    assert "Traceback" not in server.text and "lost" not in server.text, server.text


def test_thirty_thousand_mutated_frames_harm_nobody(pool):
    assert_fuzz(pool, 30_000)


@pytest.mark.long
def test_a_hundred_thousand_mutated_frames_harm_nobody(pool):
    assert_fuzz(pool, 100_000)


@pytest.mark.long
def test_a_million_mutated_frames_harm_nobody(pool):
    assert_fuzz(pool, 1_000_000)


@pytest.mark.parametrize("checksum", [-1, -(2**63)])
def test_a_checksum_that_cannot_be_one_is_refused(pool, checksum):
    """Found by the fuzz: the answer to a FIND of it could not be packed, and the server ended."""
    with Server(pool) as server, Good(server), Attacker(server.ipc) as attacker:
        session = attacker.session()
        region = attacker.ask(Code.REQUEST_ALLOC, AllocRequest("attacker", REGION, session)).handle.region_id
        stored = attacker.ask(Code.STORE, StoreRequest(session, 0, 1, region, ["k"], [0], 100, [checksum]))
        assert isinstance(stored, ErrorReply)
        assert attacker.ask(Code.FIND, FindRequest(session, 0, ["k"], False, False)).found == []
        largest = 2**64 - 1
        assert attacker.ask(Code.STORE, StoreRequest(session, 0, 2, region, ["k"], [0], 100, [largest])).statuses == [0]
        assert attacker.ask(Code.FIND, FindRequest(session, 0, ["k"], False, False)).columns()[4] == (largest,)


def test_mutated_frames_at_the_resource_manager_and_the_descriptors_harm_nobody(pool):
    with Server(pool, "--capacity-bytes", "16MiB", "--log-level", "error") as server, Good(server):
        host, _, port = server.ready["rm_address"].rpartition(":")
        at = {"length_at": slice(8, 12), "length_order": "little"}
        frames = Mutations([wire_vectors.RM_MAGIC + rest for rest, _ in wire_vectors.RM_REQUESTS], 3, **at)
        before = server.process.descriptors()
        for _ in range(300):
            with socket.create_connection((host, int(port)), PATIENCE) as peer, contextlib.suppress(ConnectionError):
                for frame in itertools.islice(frames, 10):
                    peer.sendall(frame)
        noise = random.Random(3)
        for _ in range(300):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, contextlib.suppress(ConnectionError):
                peer.settimeout(PATIENCE)
                peer.connect(server.ready["descriptors"])
                peer.send(noise.randbytes(noise.randrange(1, 600)))
                peer.recv(600)
        with PublishedRmClient(server.ready["rm_address"]) as rm:
            eventually(lambda: server.process.descriptors() <= before + 2)
            assert rm.stats()[0].total == 16 << 20
    assert "Traceback" not in server.text


def test_reports_that_add_up_to_more_than_can_be_said_harm_nobody(pool):
    """Found by the fuzz: the answer to GET_STATS could not be encoded, and the server ended."""
    with Server(pool) as server, Good(server), PublishedClient(server.ipc) as raw:
        report = {"client_id": "c", "op_type": "store", "result": "hit"}
        possible = [(2**63 - 1, 1e14), (2**63 - 1, 1e14), (2**63 - 1, 1.0)]
        impossible = [
            (5, 1e308),
            (5, 1e308),
            (5, float("inf")),
            (5, float("nan")),
            (5, -1.0),
            (2**64 - 1, 1.0),
            (-1, 1.0),
        ]
        for size, latency in possible + impossible:
            assert "error" not in raw.ask(Ask.REPORT_STATS, entries=[{**report, "size": size, "latency_us": latency}])
        tally = raw.ask(Ask.GET_STATS)["stats_manager"]["clients"]["_all"]["operations"]["store"]
        assert (tally["count"], tally["total_bytes"]) == (3, 2**63 - 1)
        assert tally["latency_sum_us"] < float("inf")


# --- frames that are too much ------------------------------------------------------------------------------------------


def test_an_oversized_frame_costs_its_connection_and_no_memory(pool):
    with Server(pool, "--max-message-bytes", "64KiB") as server, Good(server):
        before = server.process.private_bytes()
        for _ in range(10):
            with Attacker(server.ipc) as attacker:
                assert attacker.ask(Code.HEARTBEAT)
                attacker.socket.send_multipart([b"", b"x" * (8 << 20)])
                attacker.socket.setsockopt(zmq.RCVTIMEO, 30)
                with pytest.raises(zmq.Again):
                    attacker.socket.recv_multipart()
        assert server.process.private_bytes() - before < 4 << 20


def test_lengths_that_lie_cost_an_error_and_no_memory(pool):
    head = struct.Struct("!HBBBBBBII")
    with Server(pool) as server, Good(server), Attacker(server.ipc) as attacker:
        attacker.ask(Code.HEARTBEAT)
        before = server.process.private_bytes()
        lies = [
            b"\xdd\xff\xff\xff\xff",
            b"\x81\xa4keys\xdd\x7f\xff\xff\xff",
            b"\x81\xa3key\xdb\xff\xff\xff\xff",
            b"\x91" * 60_000,
        ]
        for sequence in range(2_000):
            body = lies[sequence % len(lies)]
            attacker.socket.send_multipart(
                [b"", head.pack(0xCF00, 1, Code.BATCH_LOOKUP_KV, 0, 0, 0, 0, sequence, len(body)) + body]
            )
            assert attacker.socket.poll(round(PATIENCE * 1e3))
            answered = read_header(attacker.socket.recv_multipart()[-1])
            assert answered.sequence == sequence
        assert server.process.private_bytes() - before < 4 << 20


def test_an_invalid_header_costs_its_sender_the_session_and_nobody_else(pool):
    with Server(pool) as server, Good(server), Attacker(server.ipc) as bad, Attacker(server.ipc) as other:
        mine, theirs = bad.session(), other.session()
        assert bad.ask(Code.BEAT, BeatRequest(mine, 0)).lease > 0
        bad.send(b"\xcf\x00\x02" + bytes(20))
        frame = bad.socket.recv_multipart()[-1]
        header = read_header(frame)
        assert (header.code, header.sequence) == (0x80, 0)
        assert getattr(bad.ask(Code.BEAT, BeatRequest(mine, 0)), "code", "") == "no_session"
        assert other.ask(Code.BEAT, BeatRequest(theirs, 0)).lease > 0


# --- peers that do not play their part ---------------------------------------------------------------------------------


def test_who_asks_and_never_reads_costs_neither_memory_nor_anybody_else(pool):
    with Server(pool, "--high-water-mark", "64") as server, Good(server) as good:
        before = server.process.private_bytes()
        flooders = [Attacker(server.ipc, rcvhwm=1, sndhwm=100, rcvbuf=4096) for _ in range(4)]
        try:
            frame = request(Code.DESCRIBE, 1, None)
            asked = 0

            def ask_more() -> bool:
                nonlocal asked
                for _ in range(500):
                    asked += sum(flooder.send(frame) for flooder in flooders)
                return asked > 2_000 and server.facts("server")["requests"] > 1_000

            eventually(ask_more)
            assert server.process.private_bytes() - before < 24 << 20
        finally:
            for flooder in flooders:
                flooder.__exit__()
        eventually(good.is_alone)


def test_connections_that_are_half_open_keep_nobody_out(pool):
    with Server(pool, *TCP) as server, Good(server):
        before = server.process.descriptors()
        port = int(server.tcp.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for number in range(150):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
                peer.sendall((b"", GREETING[:3], GREETING[:20], GREETING, GREETING + b"\x04")[number % 5])
            for _ in range(50):
                host, _, rm_port = server.ready["rm_address"].rpartition(":")
                peer = stack.enter_context(socket.create_connection((host, int(rm_port)), PATIENCE))
                peer.sendall(IPC_HEADER.pack(IPC_MAGIC, 2, Ipc.ALLOC_REQ, 100))
            eventually(lambda: server.process.descriptors() > before + 40)
            with client("blocking", server.tcp, pool_size=0) as newcomer:
                assert newcomer.exist("pinned") == [True]
            with PublishedRmClient(server.ready["rm_address"]) as rm:
                assert rm.stats()
        eventually(lambda: server.process.descriptors() <= before)


@pytest.mark.long
def test_who_never_says_who_he_is_is_hung_up_on(pool):
    with Server(pool, *TCP) as server:
        port = int(server.tcp.rpartition(":")[2])
        for sent in (b"", GREETING[:20], GREETING):
            with socket.create_connection(("127.0.0.1", port), PATIENCE) as peer:
                peer.sendall(sent)
                poll = select.poll()
                poll.register(peer, select.POLLRDHUP)
                assert poll.poll(15_000), sent


def test_a_thousand_connections_that_come_and_go_leave_nothing_behind(pool):
    with Server(pool, *TCP, "--log-level", "error") as server, Good(server) as good:
        port = int(server.tcp.rpartition(":")[2])
        host, _, rm_port = server.ready["rm_address"].rpartition(":")

        def come_and_go(n: int) -> None:
            for number in range(n):
                kind = number % 5
                if kind == 0:
                    with PublishedClient(server.tcp) as published:
                        published.ask(Ask.EXISTS_KV, key="x")
                elif kind == 1:
                    with Attacker(server.ipc) as ours:
                        ours.session(lease=0.05)
                elif kind == 2:
                    with socket.create_connection((host, int(rm_port)), PATIENCE):
                        pass
                elif kind == 3:
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                        peer.connect(server.ready["descriptors"])
                else:
                    with socket.create_connection(("127.0.0.1", port), PATIENCE) as peer:
                        peer.sendall(GREETING)

        come_and_go(100)
        eventually(good.is_alone)
        descriptors, memory = server.process.descriptors(), server.process.private_bytes()
        come_and_go(1_000)
        eventually(good.is_alone)
        eventually(lambda: server.process.descriptors() <= descriptors + 2)
        eventually(lambda: server.facts()["sessions"] == 1)
        assert server.process.private_bytes() - memory < 6 << 20


# --- rights ------------------------------------------------------------------------------------------------------------


def test_a_capability_is_good_for_its_region_its_epoch_and_its_session_only(pool):
    with Server(pool) as server, Attacker(server.ipc) as one, Attacker(server.ipc) as two:
        mine, theirs = one.session(), two.session()
        region = one.ask(Code.REQUEST_ALLOC, AllocRequest("one", REGION, mine)).handle
        other = two.ask(Code.REQUEST_ALLOC, AllocRequest("two", REGION, theirs)).handle
        given = one.ask(Code.REGION, RegionRequest(mine, 0, region.region_id, False))
        right = (mine, region.region_id, given.offset, given.length, False, given.capability)

        def fetch(*shown: Any) -> None:
            fd, _, _ = fetch_descriptor(server.ready["descriptors"], DescriptorRequest(*shown), PATIENCE)
            try:
                with pytest.raises(OSError):
                    os.write(fd, b"x")
            finally:
                os.close(fd)

        fetch(*right)
        for at, changed in (
            (0, theirs),
            (1, other.region_id),
            (2, 4096),
            (3, given.length * 2),
            (4, True),
            (5, bytes(32)),
            (5, b""),
            (5, two.ask(Code.REGION, RegionRequest(theirs, 0, other.region_id, True)).capability),
        ):
            with pytest.raises(NotOwner):
                fetch(*right[:at], changed, *right[at + 1 :])
        assert two.ask(Code.REGION, RegionRequest(theirs, 0, region.region_id, True)).code == "refused"
        fetch(*right)
        server.restart()
        again = one.ask(Code.HANDSHAKE, HandshakeRequest(instance_id="one", extensions=1, session=mine))
        assert (again.resumed, again.session) == (True, mine)
        with pytest.raises(NotOwner):  # of the epoch before
            fetch(*right)
        given = one.ask(Code.REGION, RegionRequest(mine, 0, region.region_id, False))
        fetch(*right[:5], given.capability)


def test_files_and_sockets_are_for_their_owner_alone(pool):
    runtime = pool.parent / "runtime"
    old = os.umask(0)
    try:
        with (
            Server(pool, "--runtime-dir", str(runtime), "--segment-bytes", "64KiB") as server,
            client("blocking", server.ipc) as owner,
        ):
            for number in range(400):
                owner.put([f"{number:0>900}"])
            eventually(lambda: list(pool.glob("snapshot.*")))
            seen = set()
            for directory in (pool, runtime):
                assert stat.S_IMODE(directory.stat().st_mode) == 0o700
                for path in directory.iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
                        seen.add(path.name.split(".")[0].split("_")[0])
            assert {"maru", "journal", "snapshot", "descriptors"} <= seen
            sockets = {path.name for path in runtime.iterdir() if stat.S_ISSOCK(path.stat().st_mode)}
            assert sockets == {"maru.sock", "channel.sock", "descriptors.sock"}
    finally:
        os.umask(old)


@pytest.mark.parametrize("option", ["--pool-path", "--runtime-dir"])
def test_a_directory_that_others_may_enter_is_refused(pool, option):
    others = pool.parent / "others"
    others.mkdir()
    others.chmod(0o755)
    (others / "somebody's").touch()
    with pytest.raises(AssertionError, match="others may enter"), Server(pool, option, str(others)):
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "192.0.2.1", "example.com"])
def test_nobody_listens_beyond_this_host_without_keys(pool, host):
    with pytest.raises(AssertionError, match="curve_key_file or insecure"), Server(pool, "--host", host):
        pass
    elsewhere = f"[{host}]:0" if ":" in host else f"{host}:0"
    with pytest.raises(AssertionError, match=r"--rm-address.*must be"), Server(pool, rm_address=elsewhere):
        pass


# --- CURVE -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Key files: of the server, of a client that may come in, and of one that may not."""
    paths = {}
    publics = {}
    for name in ("server", "friend", "stranger"):
        pair = new_key_pair()
        paths[name] = str(tmp_path / name)
        publics[name] = pair.public.decode()
        save_key_pair(paths[name], pair)
    save_public_key(tmp_path / "clients", publics["friend"].encode())
    return {**paths, "clients": str(tmp_path / "clients"), "public": publics["server"]}


@pytest.mark.parametrize("face", FACES)
def test_with_curve_friends_come_in_and_nobody_else(pool, keys, face):
    options = ("--curve-key-file", keys["server"], "--curve-clients-file", keys["clients"])
    with Server(pool, *TCP, *options) as server:
        right = {"curve_key_file": keys["friend"], "curve_server_key": keys["public"]}
        for address in (server.tcp, server.ipc):
            with (
                client(face, address, **right) as owner,
                client("blocking", address, pool_size=0, **right) as reader,
            ):
                assert owner.put([address]) == ["NEW"]
                assert reader.get([address]) == ["right"]
                assert reader.hold(address) == [True]
        wrong_key = new_key_pair().public.decode()
        for knobs in (
            {},
            {**right, "curve_key_file": keys["stranger"]},
            {**right, "curve_server_key": wrong_key},
        ):
            with pytest.raises(NoAnswer):
                client(face, server.tcp, timeout_ms=150, **knobs)
        with PublishedClient(server.tcp, timeout=0.15) as published, pytest.raises(TimeoutError):
            published.ask(Ask.HANDSHAKE)
        with client(face, server.ipc, **right) as owner:
            assert owner.put(["l"]) == ["NEW"]


def test_with_curve_what_goes_over_the_wire_shows_no_key(pool, keys):
    from tests.support.maru_wire import Wire

    seen = bytearray()

    class Listening(Wire):
        def _relay(self, link, end):
            up, down = link._waiting_up, link._waiting_down
            peeked = end.recv(1 << 16, socket.MSG_PEEK)
            assert up == down == b""
            seen.extend(peeked)
            super()._relay(link, end)

    secret = "a key that nobody else shall see"
    for options, knobs in (
        ((), {}),
        (
            ("--curve-key-file", keys["server"]),
            {"curve_key_file": keys["stranger"], "curve_server_key": keys["public"]},
        ),
    ):
        seen.clear()
        with Server(pool, *options) as server, Listening(server.ipc) as wire:
            with client("blocking", wire.address, **knobs) as owner:
                assert owner.put([secret])[0] in ("NEW", "DUPLICATE")
            assert (secret.encode() in seen) is (not options)
