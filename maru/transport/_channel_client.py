"""A client's side of the same-host channel, for trio.

Any number of tasks send, and wait for expected frames.

Rule 1. A frame is sent whole or not at all. If :meth:`ChannelClient.send` is cancelled before it returns, nothing was
        sent.
Rule 2. The waiting tasks read the connection themselves (`_waiting`). One small task next to them connects, connects
        again, and sends frames that found no room; an established connection costs it nothing.
Rule 3. Frames sent while there is no server wait for one, within bounds, as with ZeroMQ. A frame that a server had
        received when it died is not sent again: it is unknown whether it was handled, and its caller is notified at
        once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from ..base.errors import Shortage
from ..base.packets import PacketConnection, connect
from ..exception_groups import raise_unwrapped
from ._contract import OnLost, OnMessages, OnShortage
from ._waiting import Expected, Watch

MAX_FRAME_BYTES: Final = 16 << 20
"""Largest frame that is received."""
RECONNECT: Final = 0.01
RECONNECT_MAX: Final = 0.5
"""Seconds between two attempts to connect: the first ones, and at most."""
SHORTAGE: Final = 0.1
"""Seconds until a frame that lacked a descriptor is tried again."""
_OUTBOX: Final = 1_024
"""Most frames that wait for the server, or for room."""
_OUTBOX_BYTES: Final = 32 << 20
_BATCH: Final = 256
_TURN: Final = 1_024
"""Most frames delivered before other tasks have their turn."""
_BUSY_POLL: Final = 100e-6


def longer(pause: float) -> float:
    """Return the pause before the next attempt to connect.

    Args:
        pause: the previous pause.
    """
    return min(max(RECONNECT, 2 * pause), RECONNECT_MAX)


class ChannelClient:
    """A connection to a server on this host that reconnects when lost.

    Made by :func:`open_channel`.
    """

    def __init__(self, path: str, on_messages: OnMessages, on_lost: OnLost, on_shortage: OnShortage) -> None:
        self._path = path
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._on_shortage = on_shortage
        self._idle = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # never readable: a place to sleep offline
        self._watch = Watch(self._idle, self._drain, partial(self._hand_on, 1), _BUSY_POLL)
        self._connection: PacketConnection | None = None
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._room = trio.lowlevel.ParkingLot()
        self._work = trio.Event()
        self._is_short = False  # the next frame waits in the socket for a descriptor
        self._pause = 0.0  # before the next attempt to connect; 0 once the server has sent a frame

    def __repr__(self) -> str:
        state = "closed" if self._watch.closed else "connected" if self._connection else "not connected"
        return f"<ChannelClient of {self._path}: {state}>"

    @property
    def is_connected(self) -> bool:
        """Whether a server is connected, as far as is known."""
        return self._connection is not None

    def open_peer(self) -> int:
        """Open a descriptor of the serving process; -1 if there is none.

        Raises:
            OSError: this process, or this host, has no free descriptor now.
        """
        return -1 if self._connection is None else self._connection.open_peer()

    # --- sending --------------------------------------------------------------------------------------------------

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one frame, the last of these.

        The frames before it are ZeroMQ's envelope, which a channel does not need.

        Raises:
            trio.WouldBlock: too many frames wait already. Nothing was sent.
            Shortage: there is no descriptor or memory for so large a frame. Nothing was sent, and the connection goes
                on.
            trio.ClosedResourceError: the channel was closed.
        """
        watch = self._watch
        if watch.closed:
            watch.check_open()
        frame = frames[-1]
        is_over = False
        if not self._outbox and self._connection is not None:
            try:
                self._connection.send(frame)
            except BlockingIOError:
                pass
            except OSError:
                is_over = True
            else:
                return True
        if len(self._outbox) >= _OUTBOX or self._outbox_bytes + len(frame) > _OUTBOX_BYTES:
            raise trio.WouldBlock
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        self._work.set()
        if is_over:
            self._lose()  # last: this frame is not among those that are lost with the connection
        return True

    async def send(self, frames: Sequence[bytes]) -> bool:
        """Send one frame, waiting for room.

        Always a checkpoint. If cancelled, nothing was sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                sent = self.send_nowait(frames)
            except trio.WouldBlock:
                await self._room.park()
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return sent

    async def wait_room(self) -> None:
        """Wait until there may be room, or the channel is closed.

        For a caller whose send has just raised :exc:`trio.WouldBlock`. Unlike in :meth:`send`, it can check its earlier
        decision again: there may be another connection.
        """
        await self._room.park()

    def drop_unsent(self) -> None:
        """Drop the waiting frames, and wake the tasks that wait for room.

        ``on_lost`` may call it.
        """
        self._outbox.clear()
        self._outbox_bytes = 0
        self._room.unpark_all()

    def reconnect(self) -> None:
        """Give up this connection, and make another.

        For a server whose frames cannot be understood. ``on_lost`` is called.
        """
        self._lose()

    # --- receiving ------------------------------------------------------------------------------------------------

    def expect(self) -> Expected:
        """Make an :class:`Expected`, which ``on_messages`` delivers to one task."""
        return Expected(self._watch)

    def _drain(self) -> bool:
        """Deliver the waiting frames, as the drain of :class:`Watch`.

        Returns whether there may be more.
        """
        left = _TURN
        # Checked by a poll: an empty receive costs an exception, which is three times as much.
        while self._connection is not None and self._watch.is_signalled():
            self._watch.crowded = True
            left -= self._hand_on(_BATCH)
            if left <= 0:
                return True
        return False

    def _hand_on(self, most: int) -> int:
        connection = self._connection
        if connection is None:
            return 0
        batch: list[list[bytes]] = []
        try:
            while len(batch) < most:
                batch.append([connection.receive()])
        except BlockingIOError:
            self._watch.crowded = len(batch) > 1
        except Shortage:
            self._is_short = True
            self._watch.move_to(self._idle)  # else waiting tasks would find it there again and again
            trio.lowlevel.notify_closing(connection.descriptor)
            self._work.set()
        except OSError:
            self._lose()
        if batch:
            self._pause = 0.0
            try:
                self._on_messages(batch)
            except BaseException:
                self.close()
                raise
        return len(batch)

    def look(self) -> None:
        """Deliver received frames, and notice a lost connection, without waiting.

        While no task waits, nothing else does so.
        """
        if not self._watch.closed:
            self._drain()

    # --- the connection -------------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        """Try to connect, at once. Returns whether it succeeded."""
        try:
            connection = PacketConnection(connect(self._path), MAX_FRAME_BYTES)
        except OSError:
            self._pause = longer(self._pause)
            return False
        # A server that accepts and hangs up at once has sent nothing, so the pauses grow.
        self._pause = longer(self._pause)
        self._watch.move_to(connection.descriptor)
        self._connection = connection
        self._flush()
        return True

    def _lose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._watch.move_to(self._idle)
            trio.lowlevel.notify_closing(connection.descriptor)
            connection.close()
            self._work.set()
            self._on_lost(self._outbox)

    def _flush(self) -> None:
        """Send the waiting frames, in order, as far as there is room."""
        outbox = self._outbox
        while outbox and self._connection is not None:
            shortage = None
            try:
                self._connection.send(outbox[0])
            except BlockingIOError:
                break
            except Shortage as exc:
                shortage = exc
            except OSError:
                self._lose()
                break
            frame = outbox.popleft()
            self._outbox_bytes -= len(frame)
            if shortage is not None:  # only this frame fails: later ones do not wait for it
                self._on_shortage(frame, shortage)
        self._room.unpark_all()

    async def _keep(self) -> None:
        """Connect, reconnect and send waiting frames, until closed."""
        while not self._watch.closed:
            connection = self._connection
            if connection is None:
                await trio.sleep(self._pause)
                if not self._watch.closed:
                    self._connect()
            elif self._is_short:
                self._is_short = False
                await trio.sleep(SHORTAGE)
                if self._connection is connection:
                    self._watch.move_to(connection.descriptor)
            elif self._outbox:
                try:
                    await trio.lowlevel.wait_writable(connection.descriptor)
                except trio.ClosedResourceError:
                    continue  # lost while waiting
                self._flush()
            else:
                self._work = trio.Event()
                await self._work.wait()

    def close(self) -> None:
        """Close the channel. Idempotent.

        Tasks that wait get :exc:`trio.ClosedResourceError`.
        """
        if self._watch.closed:
            return
        self._watch.close()
        if self._connection is not None:
            trio.lowlevel.notify_closing(self._connection.descriptor)
            self._connection.close()
            self._connection = None
        os.close(self._idle)
        self._outbox.clear()
        self._room.unpark_all()

    async def aclose(self) -> None:
        """Close the channel, as :meth:`close` does, and pass a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_channel(
    path: str,
    on_messages: OnMessages,
    on_lost: OnLost = lambda unsent: None,
    on_shortage: OnShortage = lambda frame, shortage: None,
) -> AsyncIterator[ChannelClient]:
    """Open a channel to the server at this path, in a block.

    The server need not be there yet.

    Args:
        path: path of the server's Unix socket.
        on_messages: gets the received frames, each as a list of one, in the task that waits for one. If it raises, the
            channel is closed and that task gets the error.
        on_lost: called with the unsent frames when the connection is lost: they are sent over the next one, unless it
            drops them. Frames that were sent are never answered. Synchronous; must not raise.
        on_shortage: called with a waiting frame that cannot be sent, and the error: the frame is dropped. Must not
            raise.
    """
    client = ChannelClient(path, on_messages, on_lost, on_shortage)
    # Shielded: when the scope around it is cancelled, users of the channel may go on for a while in a shield of their
    # own.
    keeping = trio.CancelScope(shield=True)

    async def keep() -> None:
        with keeping:
            await client._keep()

    client._connect()
    try:
        with raise_unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep)
                try:
                    yield client
                finally:
                    client.close()
                    keeping.cancel()
    finally:
        client.close()
