"""Sending to the peers of a ROUTER within a bound of bytes: a peer that meets it and does not read is disconnected."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from ._frames import Port
from ._options import SocketOptions
from ._peer_tracker import PeerTracker
from ._unread import Unread


class BoundedWriter:
    """What a ROUTER writes to, where it tracks its peers.

    Attributes:
        hung_up: peers that did not read, and met a bound.
    """

    def __init__(self, port: Port, tracker: PeerTracker, options: SocketOptions) -> None:
        self._port = port
        self._tracker = tracker
        self._unread = Unread(options.send_high_water_mark, options.max_unread_bytes, options.max_unread_bytes_together)
        self.hung_up = 0

    @property
    def unread_bytes(self) -> int:
        """Bytes that may wait for peers, at most."""
        return self._unread.total

    def write(self, frames: Sequence[bytes]) -> bool:
        """Send one message, if so many bytes more may wait for its peer; whether there is such a peer.

        Raises:
            zmq.Again: its queue is full, or as much as may wait for it does.
        """
        size = sum(map(len, frames))
        peer = frames[0]
        if peer not in self._tracker.peers.known:
            # It is gone; or ZeroMQ does not say over which connection it came, so nothing could be bounded.
            return False
        crowd = self._unread.crowd_out(peer, size)
        if crowd:
            self._make_room(crowd, peer, size)
        reachable = self._port.write(frames)
        if reachable:
            self._unread.sent(peer, size)
        else:
            self._unread.forget(peer)
        return reachable

    def forget(self, peer: bytes) -> None:
        """This peer is gone."""
        self._unread.forget(peer)

    def _make_room(self, crowd: list[bytes], peer: bytes, size: int) -> None:
        """Disconnect those of these peers that have not read everything. Raises :exc:`zmq.Again` if that is not enough."""
        unread, tracker = self._unread, self._tracker
        for other in crowd:
            if tracker.has_read_all(other):
                unread.forget(other)
            elif tracker.hang_up(other):
                self.hung_up += 1
                unread.forget(other)
            if not unread.crowd_out(peer, size):
                return
        raise zmq.Again  # there are no descriptors left to hang up with
