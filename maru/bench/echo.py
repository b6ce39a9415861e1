"""Bare echoes, whose cost is the limit of every request.

They measure ZeroMQ and pyzmq, or a Unix socket of packets, without our code.

A ROUTER in a separate process sends back every message of a DEALER: in *lockstep*, one message after the other, or
*pipelined*, with several in flight. Frames are those of the protocol, an empty one and the message, so that the same
bytes travel. A second echo sends back packets of a Unix socket, as the channel carries them. With the transport, this
is the only module that imports zmq.
"""

from __future__ import annotations

import json
import socket as sockets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType

import zmq

from .measure import Clock
from .processes import PATIENCE, Child, home

_PACKET_BYTES = 64 << 10


class Echo(Child):
    """The echo's process.

    It listens over TCP, over a Unix socket of ZeroMQ's, and over one of packets.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(["-m", "maru.bench.echo", "tcp://127.0.0.1:*", f"ipc://{directory}/echo", f"{directory}/seq"])
        tcp, ipc, packets = self.ready["endpoints"]
        self.addresses: dict[str, str] = {"tcp": tcp, "ipc": ipc, "channel": packets}
        """Addresses of the echo, by transport."""


@contextmanager
def echo() -> Iterator[Echo]:
    """Run an echo for a block."""
    with home(0) as directory, Echo(directory) as running:  # the path of temporary files may be too long for a socket
        assert isinstance(running, Echo)
        yield running


class Caller:
    """A DEALER at an echo. A context manager."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = self._socket.rcvtimeo = round(PATIENCE * 1000)
        self._socket.connect(address)
        self.lockstep([b"hello"])

    def lockstep(self, messages: Sequence[bytes], clock: Clock = perf_counter) -> float:
        """Send each message and wait for its echo.

        Returns messages per second of this clock.
        """
        send, receive = self._socket.send_multipart, self._socket.recv_multipart
        start = clock()
        for message in messages:
            send((b"", message))
            receive()
        return len(messages) / (clock() - start)

    def pipelined(self, messages: Sequence[bytes], window: int) -> float:
        """Keep ``window`` messages in flight. Returns messages per second."""
        send, receive = self._socket.send_multipart, self._socket.recv_multipart
        start = perf_counter()
        for message in messages[:window]:
            send((b"", message))
        for message in messages[window:]:
            receive()
            send((b"", message))
        for _ in messages[:window]:
            receive()
        return len(messages) / (perf_counter() - start)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PacketCaller:
    """A Unix socket of packets at an echo. A context manager."""

    def __init__(self, path: str) -> None:
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(path)
        self._socket.setblocking(True)  # a timeout would cost a poll for each packet

    def lockstep(self, messages: Sequence[bytes], clock: Clock = perf_counter) -> float:
        """Send each message and wait for its echo.

        Returns messages per second of this clock.
        """
        send, receive = self._socket.send, self._socket.recv
        start = clock()
        for message in messages:
            send(message)
            receive(_PACKET_BYTES)
        return len(messages) / (clock() - start)

    def __enter__(self) -> PacketCaller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def _echo_packets(listener: sockets.socket) -> None:
    while True:
        peer, _ = listener.accept()
        with peer:
            while packet := peer.recv(_PACKET_BYTES):
                peer.send(packet)


def _main(addresses: Sequence[str]) -> None:
    """Echo until SIGTERM ends the process; there is nothing to clean up."""
    *addresses, path = addresses
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    # In a thread: while one of the echoes is measured, the other waits without the interpreter's lock.
    threading.Thread(target=_echo_packets, args=(listener,), daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    socket.linger = 0
    endpoints = []
    for address in addresses:
        socket.bind(address)
        endpoints.append(socket.get_string(zmq.LAST_ENDPOINT))
    print(json.dumps({"endpoints": [*endpoints, path]}), flush=True)
    send, receive = socket.send_multipart, socket.recv_multipart
    while True:
        send(receive())


if __name__ == "__main__":
    _main(sys.argv[1:])
