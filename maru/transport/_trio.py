"""A ZeroMQ socket for trio, shared by any number of tasks.

They send, wait for room, receive, or wait for expected messages.

Rule 1. A message is sent whole or not at all, and received whole. A cancelled send has sent nothing; a cancelled
        receive has taken nothing.
Rule 2. The leading task reads the socket for all (`_waiting`). A call made while the leader sleeps checks whether it
        has consumed the leader's signal.
Rule 3. Waiting senders go in order, without overtaking: at a ROUTER those to one peer, else all.
Rule 4. Nothing is queued here: messages without a receiver wait in ZeroMQ, whose queues are bounded in messages, and at
        a ROUTER that tracks its peers in bytes as well: a peer that meets that bound and does not read is disconnected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias

import attrs
import trio
import zmq

from ..base.threads import NoThread, run_in_thread
from ._bounded import BoundedWriter
from ._contract import Message, OnMessages
from ._frames import EVENTS, IN, OUT, Port, TooManyFrames
from ._keys import CurveServer
from ._monitor import LinkEvent
from ._options import SocketOptions
from ._peer_tracker import PeerTracker
from ._waiting import Expected, Queued, Waiter, Watch
from ._zap import Authenticator

SocketKind: TypeAlias = Literal["dealer", "router", "pub", "sub"]

_BATCH: Final = 256
"""Most messages delivered at once."""
_TURN: Final = 1_024
"""Messages delivered before the other tasks of the loop have their turn."""


class _Receiver(Queued):
    __slots__ = ("messages", "most")

    def __init__(self, watch: Watch, queue: deque[_Receiver], most: int) -> None:
        super().__init__(watch, queue)
        self.most = most
        self.messages: list[Message] = []


class _Sender(Queued):
    __slots__ = ("frames", "reachable")

    def __init__(self, watch: Watch, queue: deque[_Sender], frames: Sequence[bytes]) -> None:
        super().__init__(watch, queue)
        self.frames = frames
        self.reachable = False


@attrs.frozen
class SocketStatistics:
    """A snapshot of a socket; counters since it was opened."""

    sent: int
    """Messages taken by ZeroMQ."""
    received: int
    """Messages delivered."""
    batches: int
    """Number of batches delivered."""
    unreachable: int
    """Messages for peers that were gone."""
    dropped: int
    """Messages that came with too many frames."""
    waiting: int
    """Tasks that wait: for messages, for room, or for something expected."""
    waiting_senders: int
    """Tasks among these that wait for room."""
    peers: int
    """Peers that have sent something and are not gone.

    They are counted only with ``on_gone``.
    """
    gone: int
    """Peers that are gone."""
    refused: int
    """Connections that were refused for their CURVE key."""
    unread_bytes: int
    """Most bytes that may be waiting for peers.

    They are counted only with ``on_gone``.
    """
    hung_up: int
    """Peers that did not read, and met a bound."""
    sleeps: int
    """Number of sleeps of a task at the descriptor."""
    kicks: int
    """Number of times that a sleeper was woken for a consumed signal.

    Another task had consumed it.
    """
    busy_polls: int
    """Number of busy polls before a sleep."""
    hits: int
    """Number of busy polls that avoided a sleep."""


class TrioSocket:
    """A ZeroMQ socket of one trio run.

    Made by :func:`maru.transport.open_socket` only.
    """

    def __init__(
        self,
        kind: SocketKind,
        options: SocketOptions,
        on_messages: OnMessages | None,
        on_gone: Callable[[bytes], None] | None,
        on_link: Callable[[LinkEvent], None] | None,
    ) -> None:
        self.kind: SocketKind = kind
        self.options: SocketOptions = options
        self._port = port = Port(kind, options)
        self._raw_events = port.get
        self._on_gone = on_gone
        gone = None if on_gone is None else self._forget
        self._tracker = None if on_gone is None and on_link is None else PeerTracker(port, gone, on_link)
        self._read: Callable[[], Message] = port.read
        self._write: Callable[[Sequence[bytes]], bool] = port.write
        self._bounded: BoundedWriter | None = None
        if on_gone is not None and self._tracker is not None:
            self._bounded = BoundedWriter(port, self._tracker, options)
            self._read, self._write = self._tracker.read, self._bounded.write
        self._watch = Watch(port.descriptor, self._drain, self._take, options.busy_poll)
        self._on_messages = on_messages
        self._authenticator: Authenticator | None = None
        if isinstance(options.curve, CurveServer) and options.curve.clients is not None:
            self._authenticator = Authenticator(port, options.curve.clients)
        self._receivers: deque[_Receiver] = deque()
        self._senders: deque[_Sender] = deque()
        self._releasing, self._released = False, trio.Event()
        self._sent = self._received = self._batches = self._unreachable = self._dropped = 0

    def __repr__(self) -> str:
        state = "closed" if self._watch.closed else ", ".join(self.endpoints) or "open"
        return f"<TrioSocket {self.kind}: {state}>"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Bound addresses, with the port chosen for ``tcp://host:*``."""
        return self._port.endpoints

    def renew(self) -> list[str]:
        """Bind removed Unix sockets again; see :meth:`Port.renew`.

        Raises:
            OSError: one cannot be bound.
        """
        return [] if self._watch.closed else self._port.renew()

    # --- sending --------------------------------------------------------------------------------------------------

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one message; synchronous.

        Args:
            frames: its frames; at a ROUTER, the first one names the peer.

        Returns:
            Whether its peer exists. Always true except for a ROUTER that is ``router_mandatory``.

        Raises:
            trio.WouldBlock: the queue is full, or others wait for room in it. Nothing was sent.
            trio.ClosedResourceError: the socket was closed.
            TypeError: a frame is not bytes; ValueError: there is none.
        """
        watch = self._watch
        if watch.closed:
            watch.check_open()
        if self._senders and self._must_queue(frames):
            raise trio.WouldBlock
        try:
            reachable = self._write(frames)
        except zmq.Again:
            raise trio.WouldBlock from None
        finally:
            if watch.sleeper is not None:
                self._settle()
            else:
                watch.touched = True
        if reachable:
            self._sent += 1
        else:
            self._unreachable += 1
        return reachable

    async def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message, waiting for room in turn.

        Always a checkpoint. If cancelled, nothing was sent. Returns and raises the same as :meth:`send_nowait`, but
        never :exc:`trio.WouldBlock`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            reachable = self.send_nowait(frames)
        except trio.WouldBlock:
            pass
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return reachable
        sender = _Sender(self._watch, self._senders, frames)
        try:
            await self._watch.until(sender)
        except BaseException:
            sender.withdraw()
            raise
        return sender.reachable

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive_nowait(self) -> Message:
        """Return the next message; synchronous.

        Raises:
            trio.WouldBlock: there is none, or others wait for it.
            trio.ClosedResourceError: the socket was closed.
            RuntimeError: messages are passed to ``on_messages``.
        """
        self._check_pulls()
        watch = self._watch
        watch.check_open()
        if self._receivers:
            raise trio.WouldBlock
        try:
            while True:
                if not self._is_there(self._raw_events(EVENTS), asked=True):
                    raise trio.WouldBlock
                batch = self._collect(1)
                if batch:
                    return batch[0]
        finally:
            if watch.sleeper is not None:
                self._settle()
            else:
                watch.touched = True

    async def receive(self) -> Message:
        """Wait for the next message, in turn.

        If cancelled, the message stays for the next call.

        Raises:
            trio.ClosedResourceError: the socket was closed.
            RuntimeError: messages are passed to ``on_messages``.
        """
        return (await self.receive_batch(1))[0]

    async def receive_batch(self, most: int = _BATCH) -> list[Message]:
        """Wait for messages. Returns up to ``most`` that are there.

        Otherwise like :meth:`receive`. A server's loop is fastest with this: it reads the socket itself, and no task
        has to be woken.
        """
        self._check_pulls()
        receiver = _Receiver(self._watch, self._receivers, most)
        try:
            await self._watch.until(receiver)
        except BaseException:
            receiver.withdraw()
            raise
        return receiver.messages

    def expect(self) -> Expected:
        """Make an :class:`Expected`, which ``on_messages`` delivers to one task.

        The loop of a client is fastest with this: the waiting task reads the socket itself. Messages are delivered
        while a task waits, for room, in :meth:`run`, or for something expected; otherwise they wait in ZeroMQ.
        """
        return Expected(self._watch)

    async def run(self) -> None:
        """Deliver messages until cancelled, also while no task waits.

        Raises:
            trio.ClosedResourceError: the socket was closed.
        """
        await self._watch.until(Waiter(self._watch))

    # --- closing --------------------------------------------------------------------------------------------------

    def _forget(self, peer: bytes) -> None:
        """Forget a peer that is gone, and report it."""
        assert self._bounded is not None and self._on_gone is not None
        self._bounded.forget(peer)
        self._on_gone(peer)

    def close(self) -> None:
        """Close the socket at once. Call :meth:`aclose` afterwards.

        Tasks that wait get :exc:`trio.ClosedResourceError`.
        """
        if not self._watch.closed:
            self._watch.close()
            if self._tracker is not None:
                self._tracker.close()
            if self._authenticator is not None:
                self._authenticator.close()
            self._port.close()

    async def aclose(self) -> None:
        """Close the socket, and wait until its addresses are free.

        Takes ``linger`` at most.
        """
        self.close()
        if self._releasing:
            await self._released.wait()
            return
        self._releasing = True
        try:
            with trio.CancelScope(shield=True):
                try:
                    await run_in_thread(self._port.release, limiter=trio.CapacityLimiter(1))
                except NoThread:  # so here: at its end a socket may block its loop for ``linger``
                    self._port.release()
        finally:
            self._released.set()

    def statistics(self) -> SocketStatistics:
        """Return an immutable snapshot."""
        watch, tracker = self._watch, self._tracker
        return SocketStatistics(
            sent=self._sent,
            received=self._received,
            batches=self._batches,
            unreachable=self._unreachable,
            dropped=self._dropped,
            waiting=len(watch),
            waiting_senders=len(self._senders),
            peers=0 if tracker is None else len(tracker.peers),
            gone=0 if tracker is None else tracker.gone,
            refused=0 if self._authenticator is None else self._authenticator.refused,
            unread_bytes=0 if self._bounded is None else self._bounded.unread_bytes,
            hung_up=0 if self._bounded is None else self._bounded.hung_up,
            sleeps=watch.sleeps,
            kicks=watch.kicks,
            busy_polls=watch.busy.polls,
            hits=watch.busy.hits,
        )

    # --- reading, by the leading task -----------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Deliver the waiting messages, as the drain of :class:`Watch`.

        Returns whether there may be more.
        """
        left = _TURN
        try:
            while not self._watch.closed:
                events = self._raw_events(EVENTS)
                if self._senders and self._may_flush(events) and self._flush():
                    continue  # sending may have consumed a signal that the earlier events did not have
                if not self._is_there(events):
                    return False
                self._watch.crowded = True  # it was there before we waited, so more may come
                handed_on = self._hand_on()
                if handed_on < 0:
                    return False
                left -= handed_on
                if left <= 0:
                    return True
        except BaseException:
            self.close()
            raise
        return False

    def _take(self) -> None:
        """Deliver one message that is likely there."""
        # With many waiters, and with a task that waits for room, _drain is faster.
        if not self._watch.crowded and not self._senders:
            try:
                self._hand_on()
            except BaseException:
                self.close()
                raise

    def _is_there(self, events: int, asked: bool = False) -> bool:
        """Return whether there is something to read.

        If not, reports the peers that are gone. Not while a task still handles the last received message: a peer's last
        message would come after the report of its end, and count as a new peer's. A caller that requests more has
        handled the last.
        """
        if events & IN:
            return True
        tracker = self._tracker
        if tracker is not None and tracker.peers.ending and (asked or self._on_messages is not None or self._receivers):
            tracker.emptied()
        return False

    def _hand_on(self) -> int:
        """Deliver one batch, and return its size.

        Returns -1 if no task wants any now.
        """
        if self._on_messages is not None:
            batch = self._collect(_BATCH)
            if batch:
                self._on_messages(batch)
        elif self._receivers:
            receiver = self._receivers[0]
            batch = self._collect(receiver.most)
            if batch:
                self._receivers.popleft()
                receiver.messages = batch
                receiver.finish()
        else:
            return -1
        return len(batch)

    def _collect(self, most: int) -> list[Message]:
        """Read up to ``most`` messages; one, unless they are crowded.

        Finding that none is left costs as much as reading four.
        """
        watch, read = self._watch, self._read
        batch: list[Message] = []
        try:
            while len(batch) < most:
                try:
                    message = read()
                except TooManyFrames:
                    self._dropped += 1
                    continue
                batch.append(message)
                if not watch.crowded:
                    break
        except zmq.Again:
            watch.crowded = len(batch) > 1
        if batch:
            self._received += len(batch)
            self._batches += 1
        return batch

    def _flush(self) -> bool:
        """Send the waiting messages, in turn. Returns whether any was sent."""
        full: set[bytes] = set()
        left = False
        for sender in list(self._senders):
            peer = sender.frames[0] if self._port.routes else b""
            if peer in full:
                continue
            try:
                sender.reachable = self._write(sender.frames)
            except zmq.Again:
                full.add(peer)
                if not self._port.routes:
                    break
                continue
            self._senders.remove(sender)
            if sender.reachable:
                self._sent += 1
            else:
                self._unreachable += 1
            sender.finish()
            left = True
        return left

    # --- touching the socket while another task sleeps at it ------------------------------------------------------

    def _settle(self) -> None:
        """Wake the sleeper if the last call has consumed its signal.

        Otherwise it wakes by itself.
        """
        watch = self._watch
        if watch.is_signalled():
            return
        events = self._raw_events(EVENTS)
        wanted = self._on_messages is not None or self._receivers
        if (events & IN and wanted) or (self._senders and self._may_flush(events)):
            watch.kick()

    def _may_flush(self, events: int) -> bool:
        """Return whether a waiting sender might go now.

        A router's events report neither the peer that has room, nor that a peer is gone.
        """
        return self._port.routes or bool(events & OUT)

    def _must_queue(self, frames: Sequence[bytes]) -> bool:
        """Return whether a task waits that must not be overtaken."""
        return not self._port.routes or any(sender.frames[0] == frames[0] for sender in self._senders)

    def _check_pulls(self) -> None:
        if self._on_messages is not None:
            raise RuntimeError("the messages of this socket are handed to on_messages")

    # --- its tasks, only for callers that use them -------------------------------------------------------------------

    def _start(self, nursery: trio.Nursery) -> None:
        if self._authenticator is not None:
            nursery.start_soon(self._to_the_end, self._authenticator.run)
        if self._tracker is not None:
            nursery.start_soon(self._to_the_end, partial(self._tracker.run, self._look))

    async def _to_the_end(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work until the socket is closed.

        It does not end when the scope around it is cancelled: users of the socket may still be active.
        """
        with trio.CancelScope(shield=True):
            await work()

    def _look(self) -> None:
        """Check whether the messages of an ended connection have been read.

        If that is not certain, wake the leader.
        """
        events = self._raw_events(EVENTS)
        self._watch.touched = True  # a leader that is awake now, and about to sleep, must check again
        if self._is_there(events) or (self._senders and self._may_flush(events)):
            self._watch.kick()
