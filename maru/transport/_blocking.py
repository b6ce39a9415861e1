"""A ZeroMQ DEALER for a thread without an event loop.

Its calls take no detour through an event loop. It belongs to one thread at a time. A caller that shares it between
threads must lock around its calls.

Rule 1. A message is sent whole or not at all, and received whole.
Rule 2. It waits at the descriptor, with the interpreter's lock released, and checks the socket again before: each call
        of the socket may have consumed the descriptor's signal.
Rule 3. Before it sleeps it busy-polls (`_descriptor_wait`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Final

import attrs
import zmq

from ..base.errors import HandlerClosed
from ._contract import Message
from ._descriptor_wait import DescriptorWait
from ._frames import EVENTS, IN, OUT, Port, TooManyFrames
from ._options import SocketOptions

_NEVER: Final = float("inf")


@attrs.frozen
class BlockingStatistics:
    """A snapshot of a blocking socket; counters since it was opened."""

    sent: int
    """Messages taken by ZeroMQ."""
    received: int
    """Messages received."""
    dropped: int
    """Messages that came with too many frames."""
    sleeps: int
    """Number of sleeps."""
    busy_polls: int
    """Number of busy polls before a sleep."""
    hits: int
    """Number of busy polls that avoided a sleep."""


class BlockingDealer:
    """A ZeroMQ DEALER that blocks its thread. A context manager.

    Args:
        connect: addresses, ``tcp://host:port`` or ``ipc://path``; no process need listen there yet.
        options: bounds, times and keys.

    Raises:
        OSError: an address cannot be used.
        ValueError: an address is neither ``tcp://`` nor ``ipc://``.
    """

    def __init__(self, connect: str | Sequence[str], options: SocketOptions | None = None) -> None:
        options = options or SocketOptions()
        self.options: SocketOptions = options
        self.losses: int = 0
        """Lost connections: always 0, since ZeroMQ does not report them."""
        self._closed = True  # until there is a socket to close
        self._port = port = Port("dealer", options)
        self._closed = False
        try:
            port.attach((), (connect,) if isinstance(connect, str) else tuple(connect))
        except BaseException:
            self.close()
            raise
        self._get, self._read, self._write = port.get, port.read, port.write
        self._wait = DescriptorWait(port.descriptor, options.busy_poll)
        self._sent = self._received = self._dropped = 0

    def __repr__(self) -> str:
        return f"<BlockingDealer{': closed' if self._closed else ''}>"

    def __enter__(self) -> BlockingDealer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes], timeout: float | None = None) -> bool:
        """Send one message, waiting for room in the queue.

        Args:
            frames: its frames.
            timeout: seconds to wait at most; 0 not at all, ``None`` without end.

        Returns:
            Whether it was sent. If not, no part of it was.

        Raises:
            HandlerClosed: the socket was closed.
            TypeError: a frame is not bytes; ValueError: there is none.
        """
        deadline = _NEVER if timeout is None else perf_counter() + timeout
        while True:
            self._check_open()
            try:
                self._write(frames)
            except zmq.Again:
                pass
            else:
                self._sent += 1
                return True
            # The descriptor signals room; but that signal is consumed already, if EVENTS has it.
            if not self._get(EVENTS) & OUT and not self._wait.sleep(deadline):
                return False

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for the next message; ``None`` if the time is over.

        Args:
            timeout: seconds to wait at most; 0 not at all, ``None`` without end.

        Raises:
            HandlerClosed: the socket was closed.
        """
        self._check_open()
        deadline = _NEVER if timeout is None else perf_counter() + timeout
        found = bool(self._get(EVENTS) & IN)
        while True:
            if found or self._wait.busy_poll(deadline) or self._wait.sleep(deadline):
                found = False
                try:
                    message = self._read()
                except zmq.Again:
                    continue
                except TooManyFrames:
                    self._dropped += 1
                    found = bool(self._get(EVENTS) & IN)
                    continue
                self._received += 1
                return message
            return None

    # --- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket; takes ``linger`` at most.

        No thread may be waiting in it.
        """
        if not self._closed:
            self._closed = True
            self._port.close()
            self._port.release()

    def statistics(self) -> BlockingStatistics:
        """Return an immutable snapshot."""
        return BlockingStatistics(
            sent=self._sent,
            received=self._received,
            dropped=self._dropped,
            sleeps=self._wait.sleeps,
            busy_polls=self._wait.busy.polls,
            hits=self._wait.busy.hits,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise HandlerClosed("this socket was closed")
