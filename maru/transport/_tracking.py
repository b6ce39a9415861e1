"""The peers of a ROUTER while it runs: its messages, its monitor, and who is told what.

The joining itself is in `peers`; here are the socket and the task around it.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
import zmq

from ._frames import NOW, Message, Port
from ._monitor import Link, LinkEvent, Monitor
from ._peers import Peers


class Tracker:
    """Reads messages of peers whose connections are known, and tells of their ends."""

    def __init__(
        self, port: Port, on_gone: Callable[[bytes], None] | None, on_link: Callable[[LinkEvent], None] | None
    ) -> None:
        self.peers = Peers()
        self.gone = 0
        self._port = port
        self._on_gone, self._on_link = on_gone, on_link
        self._monitor = Monitor(port, self._note)

    def read(self) -> Message:
        """One message.

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
            # Every frame says over which descriptor it came; looked up only where that is not known.
            self._monitor.read()
            self.peers.heard(peer, _descriptor_of(frame))
        return message

    def emptied(self) -> None:
        """The socket was seen empty: tell who is gone."""
        for peer in self.peers.emptied():
            self.gone += 1
            if self._on_gone is not None:
                self._on_gone(peer)

    async def run(self, look: Callable[[], None]) -> None:
        """Tell of connections until closed.

        Args:
            look: sees to it that the socket is seen empty soon.
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
        """Tell nothing any more."""
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
    """Over which connection it came; -1, which is none that lives, where ZeroMQ does not say.

    It does not of a peer that speaks ZMTP 1.0, as garbage at the port may seem to: that one is gone as soon as it was heard.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
