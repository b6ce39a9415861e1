"""Tracking of a ROUTER's peers, by its messages and its monitor.

The joining itself is in `_peers`; here are the socket and the task around it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio
import zmq

from ._contract import Message
from ._frames import NOW, Port
from ._monitor import Link, LinkEvent, Monitor
from ._peers import Peers

_INT: Final = struct.Struct("i")
_SIOCOUTQNSD: Final = 0x894B  # linux/sockios.h; neither `socket` nor `termios` names it


class PeerTracker:
    """Reader of a ROUTER's messages that reports the peers that are gone."""

    def __init__(
        self, port: Port, on_gone: Callable[[bytes], None] | None, on_link: Callable[[LinkEvent], None] | None
    ) -> None:
        self.peers = Peers()
        self.gone = 0
        self._inodes: dict[bytes, int] = {}  # of each known peer's connection: its descriptor may be reused
        self._port = port
        self._on_gone, self._on_link = on_gone, on_link
        self._monitor = Monitor(port, self._note)

    def read(self) -> Message:
        """Read one message.

        Raises:
            zmq.Again: there is none.
            TooManyFrames: there was one, and it is dropped.
        """
        port = self._port
        peer = port.receive_bytes(NOW)
        frame = port.receive_frame(NOW, False)
        message = [peer, frame.bytes]
        while frame.more:
            if len(message) >= port.most_frames:
                port.skip()
            frame = port.receive_frame(NOW, False)
            message.append(frame.bytes)
        if not self.peers.is_settled(peer):
            # Every frame has its connection's descriptor; looked up only if that is unknown.
            self._monitor.read()
            descriptor = _descriptor_of(frame)
            self.peers.heard(peer, descriptor)
            if peer in self.peers.known:
                self._inodes[peer] = _inode_of(descriptor)
        return message

    def emptied(self) -> None:
        """Report the peers that are gone, as the socket was seen empty."""
        for peer in self.peers.emptied():
            self.gone += 1
            self._inodes.pop(peer, None)
            if self._on_gone is not None:
                self._on_gone(peer)

    def has_read_all(self, peer: bytes) -> bool:
        """Return whether nothing waits in the kernel for this peer.

        False if its connection is not known.
        """
        descriptor = self.peers.known.get(peer, -1)
        try:
            waiting = _unsent_bytes(descriptor)
        except (OSError, ValueError):
            return False
        return not waiting and _inode_of(descriptor) == self._inodes.get(peer)

    def hang_up(self, peer: bytes) -> bool:
        """End a peer's connection. Returns whether it is known.

        ZeroMQ has no call for it, but handles it as if the peer had gone.
        """
        with suppress(OSError, ValueError):
            descriptor = os.dup(self.peers.known.get(peer, -1))
            with socket.socket(fileno=descriptor) as connection:
                if _inode_of(descriptor) == self._inodes.get(peer):  # else it is another one's by now
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
        return False

    async def run(self, look: Callable[[], None]) -> None:
        """Report ended connections until closed.

        Args:
            look: makes sure that the socket is seen empty soon.
        """
        monitor = self._monitor
        while not monitor.closed:
            monitor.read()
            if self.peers.ending:
                look()
            try:
                await trio.lowlevel.wait_readable(monitor.descriptor)
            except trio.ClosedResourceError:
                return

    def close(self) -> None:
        """Stop reporting."""
        self.peers.ending.clear()
        if not self._monitor.closed:
            trio.lowlevel.notify_closing(self._monitor.descriptor)
            self._monitor.close()

    def _note(self, event: LinkEvent) -> None:
        if event.link is Link.ACCEPTED or event.link is Link.CONNECTED:
            self.peers.connected(event.detail)
        elif event.link is Link.DISCONNECTED:
            self.peers.disconnected(event.detail)
        if self._on_link is not None:
            self._on_link(event)


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of a frame's connection.

    If ZeroMQ does not report it, -1, which is no living connection. It does not for a peer that speaks ZMTP 1.0, as
    garbage at the port may seem to: that peer counts as gone once its message was read.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _unsent_bytes(descriptor: int) -> int:
    """Return the kernel's bytes that the peer has not read.

    Over TCP those that were not sent, since the peer's window is closed. Bytes that were sent and not acknowledged do
    not count: a peer may acknowledge up to 200 ms after it has read.
    """
    try:
        answer = fcntl.ioctl(descriptor, _SIOCOUTQNSD, _INT.pack(0))
    except OSError:  # a Unix socket, whose peer has all sent bytes
        answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, _INT.pack(0))
    (waiting,) = _INT.unpack(answer)
    return int(waiting)


def _inode_of(descriptor: int) -> int:
    """Return the inode of a descriptor's connection; -1 if there is none.

    It distinguishes a connection from the next one under the same descriptor.
    """
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1
