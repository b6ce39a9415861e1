"""How many bytes may wait for the peers of a ROUTER: for each, and for all together. Pure.

ZeroMQ counts what it queues in messages, and does not say how many are left. But it holds no more than its high-water mark:
what it took before the last so many has left. So the sizes of those bound what it holds.

Rule 1. The bound is for the worst case: a peer that reads may have read all of it. A peer at a limit is looked at first, and
        forgotten if the kernel has nothing for it either.
Rule 2. Over the limit of all, the one with the most goes first.
"""

from __future__ import annotations

from collections import deque


class Unread:
    """The last messages to each peer, by their sizes.

    Args:
        messages: of one peer that ZeroMQ queues at most.
        peer_bytes: that may wait for one peer.
        all_bytes: that may wait for all of them.
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
        """Bytes that may wait for this one."""
        return self._bytes.get(peer, 0)

    def sent(self, peer: bytes, size: int) -> None:
        """ZeroMQ has taken a message of so many bytes for it."""
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
        """It has read everything, or is gone."""
        if self._sizes.pop(peer, None) is not None:
            self.total -= self._bytes.pop(peer)

    def crowd_out(self, peer: bytes, size: int) -> list[bytes]:
        """Peers to look at before ``size`` more bytes are sent to this one, one by one, until this is empty. Mostly none."""
        if self.of(peer) + size > self._peer_bytes and peer in self._bytes:
            return [peer]
        if self.total + size > self._all_bytes and self._bytes:
            return sorted(self._bytes, key=self._bytes.__getitem__, reverse=True)
        return []
