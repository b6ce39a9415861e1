"""Bounds of the bytes that wait for a ROUTER's peers. Pure.

For each peer, and for all together. ZeroMQ counts its queue in messages, and does not report how many are left. But it
holds no more than its high-water mark: messages before the last so many have left. So the sizes of those bound its
queue.

Rule 1. The bound is for the worst case: a peer that reads may have read all of it. A peer at a limit is checked first,
        and forgotten if the kernel has nothing for it either.
Rule 2. Over the limit of all, the peer with the most goes first.
"""

from __future__ import annotations

from collections import deque


class Unread:
    """The sizes of the last messages to each peer.

    Args:
        messages: most messages of one peer that ZeroMQ queues.
        peer_bytes: most bytes that may wait for one peer.
        all_bytes: most bytes that may wait for all of them.
    """

    def __init__(self, messages: int, peer_bytes: int, all_bytes: int) -> None:
        self._messages = messages
        self._peer_bytes, self._all_bytes = peer_bytes, all_bytes
        self._sizes: dict[bytes, deque[int]] = {}
        self._bytes: dict[bytes, int] = {}
        self.total = 0
        """Bytes that may wait, of all peers."""

    def __len__(self) -> int:
        return len(self._sizes)

    def of(self, peer: bytes) -> int:
        """Return the bytes that may wait for a peer."""
        return self._bytes.get(peer, 0)

    def sent(self, peer: bytes, size: int) -> None:
        """Record a message of ``size`` bytes that ZeroMQ took for a peer."""
        sizes = self._sizes.get(peer)
        if sizes is None:
            sizes = self._sizes[peer] = deque()
            self._bytes[peer] = 0
        sizes.append(size)
        if len(sizes) > self._messages:
            size -= sizes.popleft()
        self._bytes[peer] += size
        self.total += size

    def forget(self, peer: bytes) -> None:
        """Forget a peer that has read everything, or is gone."""
        if self._sizes.pop(peer, None) is not None:
            self.total -= self._bytes.pop(peer)

    def crowd_out(self, peer: bytes, size: int) -> list[bytes]:
        """Return the peers to check before sending ``size`` more bytes.

        They are to be checked one by one, until this is empty. Mostly there are none.
        """
        if self.of(peer) + size > self._peer_bytes and peer in self._bytes:
            return [peer]
        if self.total + size > self._all_bytes and self._bytes:
            return sorted(self._bytes, key=self._bytes.__getitem__, reverse=True)
        return []
