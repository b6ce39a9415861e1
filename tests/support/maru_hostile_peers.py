"""What hostile peers do at every listener of a page store, one act at a time: connections and frames, well formed or not.

Bare sockets, so that nothing checks what is sent. Each act says how many connections and frames it was.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from maru._wire import (
    Code,
    HandshakeRequest,
    KeysRequest,
    ListRequest,
    ReportEntry,
    ReportRequest,
    request,
)
from tests.support.published_wire import IPC_HEADER, IPC_MAGIC, Ipc

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL".ljust(64, b"\0")
"""Of ZMTP 3.1: signature, version and mechanism."""
OLD_GREETINGS = (b"\x01\0", b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\0", b"\xff\0\0\0\0\0\0\0\x01\x7f\x02\x05\0\0\0")
"""Of ZMTP 1.0 and 2.0."""
_IMPATIENCE = 2.0
"""Seconds for a server to take what is sent; it may well not."""
_LINGERING = 40
"""Connections that are left open at a time."""

_MUCH_TO_ANSWER = (
    request(Code.GET_STATS, 1, None),
    request(Code.LIST_ALLOCATIONS, 1, ListRequest()),
    request(Code.DESCRIBE, 1, None),
    request(Code.GET_USAGE, 1, None),
    request(Code.BATCH_LOOKUP_KV, 1, KeysRequest(["pinned"] * 1_000)),
)
"""Requests that are small to ask and large to answer."""


def ready(identity: bytes) -> bytes:
    """The READY command of a DEALER that claims this identity."""
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack("!I", len(value)) + value for name, value in properties
    )
    return (b"\x04" + bytes([len(body)]) if len(body) < 256 else b"\x06" + struct.pack("!Q", len(body))) + body


def message(frame: bytes) -> bytes:
    """A message of ours as a DEALER sends it: an empty frame, and this one."""
    return b"\x01\0" + b"\x02" + struct.pack("!Q", len(frame)) + frame


class HostilePeers:
    """Peers of one server.

    Args:
        addresses: where it speaks ZeroMQ: ``tcp://host:port``, ``ipc://path``.
        rm_address: of its resource manager; empty: none.
        descriptors: the socket that hands out regions.
        channel: the socket of the same-host channel.
        good: frames that mean something to it.
        seed: of all choices.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rm_address: str,
        descriptors: str,
        channel: str,
        good: Sequence[bytes],
        seed: int,
    ):
        self._dice = random.Random(seed)
        self._channel = channel
        self._addresses, self._rm_address, self._descriptors = addresses, rm_address, descriptors
        self._good = list(good) or [request(Code.HEARTBEAT, 1, None)]
        self._lingering: deque[socket.socket] = deque()
        self._acts: list[Callable[[], int]] = [
            self.greet_by_halves,
            self.claim_identities,
            self.send_noise,
            self.send_mutated_frames,
            self.ask_and_never_read,
            self.fill_tables,
            self.come_and_go,
            self.ask_for_descriptors,
            self.send_packets_that_are_none,
            self.ask_by_packets_and_never_read,
        ]
        if rm_address:
            self._acts += [self.trouble_the_resource_manager, self.take_regions_and_leave]
        self.counts: dict[str, int] = {act.__name__: 0 for act in self._acts}
        """Connections and frames, by act."""

    def __enter__(self) -> HostilePeers:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    @property
    def total(self) -> int:
        """Connections and frames so far."""
        return sum(self.counts.values())

    def act(self) -> None:
        """One of them, by chance."""
        act = self._dice.choice(self._acts)
        with contextlib.suppress(OSError):  # it hangs up, or does not take it: which is its good right
            self.counts[act.__name__] += act()

    def let_go(self) -> None:
        """Close what was left open."""
        while self._lingering:
            self._lingering.popleft().close()

    # --- acts -----------------------------------------------------------------------------------------------------

    def greet_by_halves(self) -> int:
        """A handshake that is never finished: of this version, of older ones, with a READY or half of one."""
        whole = self._dice.choice((GREETING + ready(b""), *OLD_GREETINGS))
        with self._connect() as peer:
            peer.sendall(whole[: self._dice.randrange(len(whole))])
            self._leave(peer)
        return 2

    def claim_identities(self) -> int:
        """Names that others have, over and over, and too long ones. (None of ZeroMQ's own: see SECURITY.md.)"""
        dice = self._dice
        identity = dice.choice((b"x", b"maru", dice.randbytes(4).replace(b"\0", b"a") + b"b", b"y" * 255, b"z" * 300))
        with self._connect() as peer:
            peer.sendall(GREETING + ready(identity) + message(self._frame()))
            self._leave(peer)
        return 3

    def send_noise(self) -> int:
        """Whatever, behind a good handshake or without one."""
        with self._connect() as peer:
            start = self._dice.choice((b"", GREETING, GREETING + ready(b"")))
            peer.sendall(start + self._dice.randbytes(self._dice.randrange(1, 2_000)))
        return 2

    def send_mutated_frames(self) -> int:
        """Frames that nearly mean something."""
        dice = self._dice
        with self._connect() as peer:
            frames = []
            for _ in range(20):
                frame = bytearray(self._frame())
                for _ in range(dice.randrange(4)):
                    frame[dice.randrange(len(frame))] = dice.randrange(256)
                frames.append(message(bytes(frame)))
            peer.sendall(GREETING + ready(b"") + b"".join(frames))
        return 21

    def ask_and_never_read(self) -> int:
        """What is small to ask and large to answer."""
        peer = self._stay(self._connect())
        peer.sendall(GREETING + ready(b"") + message(self._dice.choice(_MUCH_TO_ANSWER)) * 30)
        return 31

    def fill_tables(self) -> int:
        """Reports and sessions under names that nobody had before."""
        dice = self._dice
        name = f"{dice.randrange(10**9)} " + "n" * 200
        reports = ReportRequest([ReportEntry(name, f"{at} " + "o" * 200, "hit", 1, 1.0) for at in range(40)])
        with self._connect() as peer:
            peer.sendall(
                GREETING
                + ready(b"")
                + message(request(Code.REPORT_STATS, 1, reports))
                + message(request(Code.HANDSHAKE, 2, HandshakeRequest(instance_id=name, extensions=1, lease=0.05)))
                + message(request(Code.GET_STATS, 3, None))
            )
            self._leave(peer)
        return 4

    def come_and_go(self) -> int:
        """Connections, and nothing else."""
        for _ in range(5):
            self._connect().close()
        return 5

    def ask_for_descriptors(self) -> int:
        """At the socket of the regions: noise, silence, requests without a right."""
        dice = self._dice
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_IMPATIENCE)
            peer.connect(self._descriptors)
            for _ in range(dice.randrange(4)):
                peer.send(dice.randbytes(dice.randrange(1, 600)))
        return 4

    def send_packets_that_are_none(self) -> int:
        """At the channel: frames that nearly mean something, noise, and descriptors that nobody asked for."""
        dice = self._dice
        with self._packets() as peer:
            for _ in range(6):
                frame = bytearray(self._frame())
                frame[dice.randrange(len(frame))] = dice.randrange(256)
                peer.send(dice.choice((bytes(frame), dice.randbytes(dice.randrange(1, 900)))))
            with open("/dev/null", "rb") as unasked:
                socket.send_fds(peer, [struct.pack("!Q", dice.randrange(1 << 40))], [unasked.fileno()])
            self._leave(peer)
        return 8

    def ask_by_packets_and_never_read(self) -> int:
        """At the channel: what is small to ask and large to answer."""
        peer = self._stay(self._packets())
        peer.setblocking(False)  # the server leaves unread what comes behind its bound
        for sent in range(30):
            try:
                peer.send(self._dice.choice(_MUCH_TO_ANSWER))
            except BlockingIOError:
                return 1 + sent
        return 31

    def trouble_the_resource_manager(self) -> int:
        """Half a header, a length that lies, noise."""
        dice = self._dice
        header = IPC_HEADER.pack(IPC_MAGIC, 2, dice.choice((Ipc.ALLOC_REQ, Ipc.FREE_REQ, 9, 77)), dice.randrange(9_000))
        with self._dial(self._rm_address) as peer:
            peer.sendall((header + dice.randbytes(100))[: dice.randrange(1, 112)])
            self._leave(peer)
        return 2

    def take_regions_and_leave(self) -> int:
        """Regions that nobody will give back."""
        name = b"host:1"
        body = struct.pack("<QII", 2 << 20, 0, 0) + struct.pack("<H", len(name)) + name + struct.pack("<Q", 1)
        with self._dial(self._rm_address) as peer:
            peer.sendall(IPC_HEADER.pack(IPC_MAGIC, 2, Ipc.ALLOC_REQ, len(body)) + body)
            if self._dice.random() < 0.5:
                peer.recv(1_000)
        return 2

    # --- below ----------------------------------------------------------------------------------------------------

    def _frame(self) -> bytes:
        return self._dice.choice(self._good)

    def _connect(self) -> socket.socket:
        address = self._dice.choice(self._addresses)
        if address.startswith("tcp://"):
            return self._dial(address.removeprefix("tcp://"))
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(_IMPATIENCE)
        try:
            peer.connect(address.removeprefix("ipc://"))
        except BaseException:
            peer.close()
            raise
        return peer

    def _packets(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(_IMPATIENCE)
        try:
            peer.connect(self._channel)
        except BaseException:
            peer.close()
            raise
        return peer

    def _dial(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), _IMPATIENCE)

    def _leave(self, peer: socket.socket) -> None:
        """Half of them stay for a while."""
        if self._dice.random() < 0.5:
            self._stay(socket.socket(fileno=peer.detach()))

    def _stay(self, peer: socket.socket) -> socket.socket:
        self._lingering.append(peer)
        while len(self._lingering) > _LINGERING:
            self._lingering.popleft().close()
        return peer
