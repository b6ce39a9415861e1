"""The server's side of the same-host channel, read by one task.

It has any number of connections of this user's processes.

Rule 1. All connections are in one epoll set, at which one task waits: a message costs no task of its own. Of the ready
        connections, the least served goes first (`_fair_share`), so that a client with many requests does not delay the
        others.
Rule 2. Frames that cannot leave at once wait here, bounded in bytes for each peer and for all of them. A peer that
        meets a bound and does not read is disconnected. The loop itself never waits for a peer. If this process has no
        descriptor or memory for a connection's next frame, it skips the connection for a moment.
Rule 3. The end of a connection is reported once, after the messages that were read from it have been handled: if
        reported earlier, its last message would count as a new peer's.
Rule 4. Connections are a share of the descriptors of this process (:mod:`maru.base.budget`). One that is not admitted
        and silent is ended, and the longest silent one ends before a newcomer is refused: silence costs nobody else a
        place.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import Final

import attrs
import trio

from ..base.errors import Shortage
from ..base.packet_listener import PacketListener
from ..base.packets import INLINE_BYTES, PacketConnection
from ..base.process_limits import DESCRIPTORS
from ._channel_client import SHORTAGE
from ._fair_share import FairShares, Share
from ._waiting import Waiter, Watch

_BATCH: Final = 64
_READY: Final = 64
"""Most connections that are read in one round."""
_EACH: Final = 16
"""Frames read in a round from all ready connections together.

At least one is read from each.
"""
_BATCH_BYTES: Final = 1 << 20
"""Bytes after which a batch is delivered.

Frames in separate memory are large, and all of a batch is here at once.
"""
_OVERHEAD: Final = 64
"""Bytes that an unread frame costs in addition to its own.

For many small frames they are the larger part.
"""
_EACH_COSTS: Final = 256
"""Fixed cost of a frame and its answer, in bytes.

Counted in the share of a connection. For small ones it is the larger part of the time.
"""
_BUSY_POLL: Final = 100e-6
_PREFIX: Final = b"\0chan"
"""First bytes of a channel's identities.

ZeroMQ's identities have five bytes and begin with a zero, or their peer chose them and they do not begin with a zero.
"""


def is_channel_peer(identity: bytes) -> bool:
    """Return whether an identity is of a channel, not of ZeroMQ."""
    return identity.startswith(_PREFIX) and len(identity) == len(_PREFIX) + 8


@attrs.frozen
class ChannelStatistics:
    """A snapshot of a channel's server; counters since it was opened."""

    connections: int
    """Open connections."""
    turned_away: int
    """Connections closed at once: over the limit, or another user's."""
    received: int
    """Frames received."""
    sent: int
    """Frames accepted by the kernel."""
    unreachable: int
    """Frames for peers that were gone."""
    bad: int
    """Connections ended because of a malformed packet."""
    hung_up: int
    """Connections ended because their peer did not read."""
    unread_bytes: int
    """Bytes that wait for peers."""
    unadmitted: int = 0
    """Connections ended because they were silent and not admitted.

    After the time limit, or in favour of a newcomer.
    """


class _Connection:
    __slots__ = ("identity", "in_memory", "is_put_off", "outbox", "packets", "share", "unread")

    def __init__(self, identity: bytes, packets: PacketConnection, share: Share) -> None:
        self.identity = identity
        self.packets = packets
        self.share = share
        self.is_put_off = False
        self.outbox: deque[bytes] = deque()
        """Frames that wait for room in the socket."""
        self.unread = 0
        """Bytes that count against the bounds.

        They are those of the outbox, and of frames in memory that the peer may not have read.
        """
        self.in_memory: deque[int] = deque()
        """Sizes of the frames in memory, the oldest first."""


class ChannelServer:
    """The server's side of the channels of one path. A context manager.

    It listens from its construction until it is closed.

    Args:
        path: path of the Unix socket, in a directory that only this user may enter.
        most: most connections at once, if the share of descriptors allows as many; further ones are refused.
        max_bytes: largest frame; a peer that sends a larger one loses the connection.
        peer_bytes: most bytes that may wait for one peer, beyond those that the kernel holds in its socket (about 200
            kB).
        all_bytes: the same for all peers together; the peer with the most goes first.
        on_gone: called for each connection that has ended, once, after its last message.
        weight: share of the process's descriptors: see :class:`maru.base.budget.Budget`.
        admission: seconds for which a connection may be silent until it is admitted (:meth:`admit`); ``inf``: it is
            admitted as soon as it is there.

    Raises:
        PoolUnusable: the directory is open to others, or no socket can be made there.
    """

    def __init__(
        self,
        path: str,
        *,
        most: int,
        max_bytes: int,
        peer_bytes: int,
        all_bytes: int,
        on_gone: Callable[[bytes], None],
        weight: int = 4,
        admission: float = inf,
    ) -> None:
        self._listener = PacketListener(path)
        self.path: str = path
        self._admission = admission
        self._unadmitted: dict[bytes, float] = {}
        """Time when each unadmitted connection last sent a frame, the oldest first."""
        self._max_bytes = max_bytes
        self._peer_bytes, self._all_bytes = peer_bytes, all_bytes
        self._on_gone = on_gone
        self._epoll = select.epoll()
        self._door = DESCRIPTORS.open(weight, most=most)
        self._watch = Watch(self._epoll.fileno(), self._drain, self._take, _BUSY_POLL)
        self._buffer = bytearray(INLINE_BYTES)
        self._shares = FairShares()
        self._connections: dict[bytes, _Connection] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._gone: list[bytes] = []
        self._put_off: list[_Connection] = []
        self._short = trio.Event()
        self._receiver: Waiter | None = None
        self._batch: list[list[bytes]] = []
        self._wanted = 0
        self._last = self._unread = 0
        self._turned_away = self._received = self._sent = self._unreachable = self._bad = self._hung_up = 0
        self._ended_unadmitted = 0

    def __repr__(self) -> str:
        return f"<ChannelServer at {self.path}, {len(self._connections)} connections>"

    def __enter__(self) -> ChannelServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def renew(self) -> list[str]:
        """Listen again if the socket was removed; see :meth:`PacketListener.renew`."""
        return self._listener.renew()

    async def run(self) -> None:
        """Accept clients until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._admission < inf:
                nursery.start_soon(self._end_late)
            nursery.start_soon(self._take_up)
            await self._listener.run(self._accept, self._turn_away)

    # --- receiving ------------------------------------------------------------------------------------------------

    async def receive_batch(self, most: int = _BATCH) -> list[list[bytes]]:
        """Wait for frames. Returns up to ``most``, each as [identity, frame].

        If cancelled, they are there for the next call. First reports the peers that are gone.

        Raises:
            trio.BusyResourceError: another task waits here.
            trio.ClosedResourceError: the server was closed.
        """
        if self._receiver is not None:
            raise trio.BusyResourceError("another task already reads this channel")
        self._receiver = receiver = Waiter(self._watch)
        self._wanted, self._batch = most, []
        try:
            await self._watch.until(receiver)
        finally:
            self._receiver = None
        self._received += len(self._batch)
        return self._batch

    def _drain(self) -> bool:
        """Read the ready frames, as the drain of :class:`Watch`.

        Returns whether to read again before sleeping.
        """
        self._tell_gone()
        # Frames found without waiting came while the previous batch was answered, so more may come.
        self._watch.crowded = True
        self._read()
        return bool(self._gone)  # the report of a gone peer would otherwise wait for the end of a sleep

    def _take(self) -> None:
        self._read()

    def _read(self) -> None:
        batch, watch = self._batch, self._watch
        ready = self._find_ready()
        # A lone client's frames are read together. If many are ready, each has one turn after the other: a client that
        # sends much would otherwise have sixteen requests answered before the next client's first.
        each = max(1, _EACH // len(ready)) if watch.crowded and ready else 1
        size = 0
        for connection in ready:
            if len(batch) >= self._wanted or size >= _BATCH_BYTES:
                break  # the rest is ready in the next round as well
            identity, receive = connection.identity, connection.packets.receive
            if identity in self._unadmitted:
                self.dismiss(identity)  # its silence begins again
            try:
                for _ in range(each):
                    frame = receive()
                    batch.append([identity, frame])
                    connection.share.serve(len(frame) + _EACH_COSTS)
                    size += len(frame)
                    if len(batch) >= self._wanted or size >= _BATCH_BYTES:
                        break
            except BlockingIOError:
                pass
            except Shortage:
                self._leave_alone(connection)
            except (OSError, MemoryError) as exc:
                self._bad += type(exc).__name__ == "BadPacket"
                self._end(connection)
        watch.crowded = len(batch) > 1
        if batch and self._receiver is not None:
            self._receiver.finish()

    def _find_ready(self) -> list[_Connection]:
        """Return the readable connections, the least served first.

        Flushes those that can be written to.
        """
        ready = []
        for descriptor, events in self._epoll.poll(0, _READY):
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                continue
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT:
                ready.append(connection)
        if len(ready) > 1:
            ready.sort(key=lambda connection: connection.share.start)
        return ready

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send one frame, now or as soon as its peer reads.

        Never waits; returns whether the peer exists.
        """
        connection = self._connections.get(identity)
        if connection is None:
            self._unreachable += 1
            return False
        connection.share.add(len(frame))
        if not connection.outbox and self._write(connection, frame):
            return True
        if identity not in self._connections:  # writing has found that the peer is gone
            self._unreachable += 1
            return False
        return self._put_back(connection, frame)

    def _write(self, connection: _Connection, frame: bytes) -> bool:
        """Hand one frame to the kernel. Returns whether it was accepted.

        A frame that the kernel holds in separate memory counts as unread.
        """
        size = len(frame)
        if size > INLINE_BYTES and not self._has_room(connection, size):
            return False
        try:
            connection.packets.send(frame)
        except BlockingIOError:
            return False
        except Shortage:
            self._leave_alone(connection)
            return False
        except OSError:
            self._end(connection)
            return False
        self._sent += 1
        if size > INLINE_BYTES:
            connection.in_memory.append(size)
            self._count(connection, size)
        return True

    def _put_back(self, connection: _Connection, frame: bytes) -> bool:
        size = len(frame) + _OVERHEAD
        if not self._has_room(connection, size):
            return False
        connection.outbox.append(frame)
        if len(connection.outbox) == 1:
            self._arm(connection)
        self._count(connection, size)
        return True

    def _flush(self, connection: _Connection) -> None:
        outbox = connection.outbox
        while outbox:
            size = len(outbox[0]) + _OVERHEAD
            self._count(connection, -size)  # before it is counted as held by the kernel
            if not self._write(connection, outbox[0]):
                if connection.identity in self._connections:
                    self._count(connection, size)
                return
            outbox.popleft()
        self._arm(connection)

    def _arm(self, connection: _Connection) -> None:
        """Set the events of this connection in the epoll set."""
        if connection.is_put_off:
            events = select.EPOLLONESHOT  # its end, once: without this flag, again and again
        else:
            events = select.EPOLLIN | (select.EPOLLOUT if connection.outbox else 0)
        self._epoll.modify(connection.packets.descriptor, events)

    def _leave_alone(self, connection: _Connection) -> None:
        """Skip this connection for a moment."""
        if not connection.is_put_off:
            connection.is_put_off = True
            self._arm(connection)
            self._put_off.append(connection)
            self._short.set()

    async def _take_up(self) -> None:
        """Read skipped connections again, until cancelled."""
        while True:
            await self._short.wait()
            await trio.sleep(SHORTAGE)
            self._short = trio.Event()
            put_off, self._put_off = self._put_off, []
            for connection in put_off:
                connection.is_put_off = False
                if connection.identity in self._connections:
                    self._arm(connection)

    def hang_up(self, identity: bytes) -> None:
        """Disconnect a peer, if it is there.

        Sent frames that fit into its buffer still arrive.
        """
        connection = self._connections.get(identity)
        if connection is not None:
            self._end(connection)

    # --- bounds ---------------------------------------------------------------------------------------------------

    def _has_room(self, connection: _Connection, size: int) -> bool:
        """Return whether ``size`` more bytes may wait for this peer.

        Disconnects peers that are found not to read.
        """
        if connection.unread + size > self._peer_bytes:
            self._look(connection)
            if connection.unread + size > self._peer_bytes:
                self._hang_up(connection)
                return False
        if self._unread + size > self._all_bytes:
            # The peer with the most bytes goes first; checked before, since it may have caught up.
            for other in sorted(self._by_descriptor.values(), key=lambda one: one.unread, reverse=True):
                self._look(other)
                if self._unread + size > self._all_bytes and other.unread:
                    self._hang_up(other)
                if self._unread + size <= self._all_bytes:
                    break
        return connection.identity in self._connections

    def _look(self, connection: _Connection) -> None:
        """Forget the frames in memory that its peer has read by now.

        Not only when it has read all: a peer with frames in flight at all times would never have, and would be
        disconnected.
        """
        unread = connection.packets.most_unread() if connection.in_memory else 0
        while len(connection.in_memory) > unread:
            self._count(connection, -connection.in_memory.popleft())

    def _count(self, connection: _Connection, size: int) -> None:
        connection.unread += size
        self._unread += size

    def _hang_up(self, connection: _Connection) -> None:
        self._hung_up += 1
        self._end(connection)

    # --- connections ----------------------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket) -> bool:
        while not self._door.take():
            if not self._unadmitted:
                return False
            self._end_unadmitted(next(iter(self._unadmitted)))
        self._last += 1
        identity = _PREFIX + self._last.to_bytes(8, "big")
        connection = _Connection(identity, PacketConnection(sock, self._max_bytes, self._buffer), Share(self._shares))
        try:
            self._epoll.register(connection.packets.descriptor, select.EPOLLIN)  # first: it may be refused
        except BaseException:
            self._door.give_back()
            raise
        self._connections[identity] = self._by_descriptor[connection.packets.descriptor] = connection
        if self._admission < inf:
            self._unadmitted[identity] = trio.current_time()
        return True

    def admit(self, identity: bytes) -> None:
        """Exempt a connection from the time limit for silence.

        The caller has checked its peer.
        """
        self._unadmitted.pop(identity, None)

    def dismiss(self, identity: bytes) -> None:
        """Apply the time limit for silence to a connection again."""
        if self._admission < inf and identity in self._connections:
            self._unadmitted.pop(identity, None)
            self._unadmitted[identity] = trio.current_time()

    async def _end_late(self) -> None:
        """End silent connections that are not admitted, until cancelled."""
        while True:
            await trio.sleep(self._admission / 4)
            since = trio.current_time() - self._admission
            for identity in [one for one, came in self._unadmitted.items() if came <= since]:
                self._end_unadmitted(identity)

    def _end_unadmitted(self, identity: bytes) -> None:
        self._ended_unadmitted += 1
        self._end(self._connections[identity])

    def _turn_away(self) -> None:
        self._turned_away += 1

    def _end(self, connection: _Connection) -> None:
        """End a connection. Its end is reported later.

        That is after the messages that were read from it have been handled.
        """
        if self._connections.pop(connection.identity, None) is None:
            return
        self._unadmitted.pop(connection.identity, None)
        self._door.give_back()
        del self._by_descriptor[connection.packets.descriptor]
        self._epoll.unregister(connection.packets.descriptor)
        connection.packets.close()
        connection.outbox.clear()
        self._count(connection, -connection.unread)
        self._gone.append(connection.identity)
        self._watch.touched = True
        self._watch.kick()  # wakes the task that sleeps at the epoll set

    def _tell_gone(self) -> None:
        while self._gone:
            self._on_gone(self._gone.pop())

    def close(self) -> None:
        """Close all connections.

        Tasks that wait get :exc:`trio.ClosedResourceError`.
        """
        if not self._watch.closed:
            self._listener.close()
            self._watch.close()
            for connection in self._connections.values():
                connection.packets.close()
            self._connections.clear()
            self._by_descriptor.clear()
            self._epoll.close()
            self._door.close()

    def statistics(self) -> ChannelStatistics:
        """Return an immutable snapshot."""
        return ChannelStatistics(
            connections=len(self._connections),
            turned_away=self._turned_away,
            received=self._received,
            sent=self._sent,
            unreachable=self._unreachable,
            bad=self._bad,
            hung_up=self._hung_up,
            unread_bytes=self._unread,
            unadmitted=self._ended_unadmitted,
        )
