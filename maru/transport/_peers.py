"""The connection of each peer, and the end of peers. Pure.

ZeroMQ reports the peer of a message and the descriptor over which it came, and its monitor reports for a descriptor
that a connection began or ended. Neither reports that a peer is gone. Three things make the join harder than a
dictionary:

Rule 1. Messages of a connection may still wait to be read when its end is reported. A peer is gone only when, after
        that, the socket was seen empty: nothing of it comes any more.
Rule 2. Descriptors are reused, at once. So the monitor is read before a new peer is joined to a descriptor; then the
        reports about it are not older than the message.
Rule 3. A connection has one peer. If two claim the same, one of them is of the connection that had the descriptor
        before. Identities that ZeroMQ chose ascend, so it is the older one.
Rule 4. If it is unknown whether a peer's connection is the one that ended or the one that began with its descriptor, it
        counts as the living one: its end will be reported too late, never too early. (It needs a peer that connects,
        sends and leaves before it is read, and another that connects after it with its descriptor and sends nothing.)
Rule 5. An identity that a peer chose may come back on another connection: then the peer is not gone.
"""

from __future__ import annotations

from typing import Final

_AUTOMATIC: Final = 5
"""Bytes of an identity that ZeroMQ chose.

A zero, then a number that ascends and wraps around.
"""


class Peers:
    """The peers of a ROUTER that have sent a message."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}
        """Living peers, and the descriptor of each."""
        self.ending: dict[bytes, None] = {}
        """Peers whose connection has ended.

        Some of their messages may still have to be read.
        """
        self._living: set[int] = set()
        self._peer_on: dict[int, bytes] = {}
        self._unheard: set[int] = set()

    def __len__(self) -> int:
        return len(self.known)

    # --- reports of the monitor -----------------------------------------------------------------------------------

    def connected(self, descriptor: int) -> None:
        """Record that a connection began."""
        if descriptor in self._living:
            self.disconnected(descriptor)
        self._living.add(descriptor)

    def disconnected(self, descriptor: int) -> None:
        """Record that a connection ended."""
        if descriptor in self._living:
            self._living.discard(descriptor)
            peer = self._peer_on.get(descriptor)
            if peer is None:
                self._unheard.add(descriptor)
            else:
                self._end(peer)

    # --- messages -------------------------------------------------------------------------------------------------

    def is_settled(self, peer: bytes) -> bool:
        """Return whether a message of this peer needs no :meth:`heard`.

        It does not if the peer is known, and its identity is never reused.
        """
        return peer in self.known and len(peer) == _AUTOMATIC and peer[0] == 0

    def heard(self, peer: bytes, descriptor: int) -> None:
        """Record a message of this peer, over this descriptor.

        The monitor must have been read since.
        """
        if self.known.get(peer) == descriptor:
            return
        if peer in self.known:  # its end was not reported, but an identity lives on one connection at a time
            self._end(peer)
        if peer in self.ending:
            if _is_automatic(peer):
                return  # a late message of a connection that has ended
            del self.ending[peer]  # not gone; if this connection has ended too, that is reported later
        other = self._peer_on.get(descriptor)
        if descriptor not in self._living or (other is not None and self._is_older(peer, other, descriptor)):
            self.ending[peer] = None
            return
        if other is not None:
            self._end(other)
        self.known[peer] = descriptor
        self._peer_on[descriptor] = peer

    def emptied(self) -> list[bytes]:
        """Return the peers that are gone, each of them once.

        The socket must have been seen empty after the monitor was read.
        """
        gone = list(self.ending)
        self.ending.clear()
        self._unheard.clear()
        return gone

    # --- helpers --------------------------------------------------------------------------------------------------

    def _end(self, peer: bytes) -> None:
        del self._peer_on[self.known.pop(peer)]
        self.ending[peer] = None

    def _is_older(self, peer: bytes, other: bytes, descriptor: int) -> bool:
        if _is_automatic(peer) and _is_automatic(other):
            distance = int.from_bytes(other[1:], "big") - int.from_bytes(peer[1:], "big")
            return 0 < distance & 0xFFFF_FFFF < 0x8000_0000
        return descriptor in self._unheard


def _is_automatic(peer: bytes) -> bool:
    return len(peer) == _AUTOMATIC and peer[0] == 0
