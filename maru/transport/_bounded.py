"""Sending to the peers of a ROUTER within a bound of bytes.

A peer that meets the bound and does not read is disconnected.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from ._frames import Port
from ._options import SocketOptions
from ._peer_tracker import PeerTracker
from ._unread import Unread


class BoundedWriter:
    """Writer of a ROUTER that tracks its peers.

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
        """Most bytes that may be waiting for peers."""
        return self._unread.total

    def write(self, frames: Sequence[bytes]) -> bool:
        """Send one message, if its size is within the bounds.

        Returns whether its peer exists.

        Raises:
            zmq.Again: the peer's queue is full, or a bound is met.
        """
        size = sum(map(len, frames))
        peer = frames[0]
        if peer not in self._tracker.peers.known:
            # It is gone; or ZeroMQ does not report its connection, so nothing could be bounded.
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
        """Forget a peer that is gone."""
        self._unread.forget(peer)

    def _make_room(self, crowd: list[bytes], peer: bytes, size: int) -> None:
        """Disconnect peers in turn that have not read everything, to make room.

        Raises:
            zmq.Again: there is still no room.
        """
        unread, tracker = self._unread, self._tracker
        for other in crowd:
            if tracker.has_read_all(other):
                unread.forget(other)
            elif tracker.hang_up(other):
                self.hung_up += 1
                unread.forget(other)
            if not unread.crowd_out(peer, size):
                return
        raise zmq.Again  # no descriptor is left to hang up with
