"""Changes of a socket's connections, as ZeroMQ's monitor reports them.

The monitor's queue has no bound: at a bound ZeroMQ's I/O thread would wait for its reader, and with it all traffic of
the socket (seen at 2,003 events). It grows with the connections that begin and end while the event loop is blocked.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Final

import attrs
import zmq

from ._frames import EVENTS, IN, NOW, Port

_ADDRESS: Final = "inproc://monitor"
_EVENT: Final = struct.Struct("=Hi")


class Link(enum.Enum):
    """The kinds of changes of a connection."""

    ACCEPTED = int(zmq.EVENT_ACCEPTED)
    """The peer has connected to us."""
    CONNECTED = int(zmq.EVENT_CONNECTED)
    """We have connected to a peer."""
    READY = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    """Both ends have completed the handshake: messages flow.

    They speak the same protocol and, with CURVE, know each other.
    """
    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The other end refuses this key."""
    FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """The handshake was malformed, or the keys do not fit."""
    GIVEN_UP = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """The connection ended before the handshake was complete."""
    DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
    """The connection ended."""
    RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
    """No process listens there; the next attempt comes after a wait."""
    NOT_ACCEPTED = int(zmq.EVENT_ACCEPT_FAILED)
    """No peer could connect, mostly for lack of descriptors."""


@attrs.frozen
class LinkEvent:
    """A change of a connection."""

    link: Link
    """Kind of the change."""
    endpoint: str
    """Address that was bound or connected to."""
    detail: int
    """Descriptor, milliseconds, errno or code, depending on the kind.

    The descriptor for ACCEPTED, CONNECTED and DISCONNECTED; milliseconds for RETRIED; an errno or a code otherwise.
    """


class Monitor:
    """Reader of a port's monitor.

    Made before the port is attached to any address, so that nothing is missed.
    """

    def __init__(self, port: Port, tell: Callable[[LinkEvent], None]) -> None:
        self._watched = port.raw
        self._tell = tell
        self._links = {link.value: link for link in Link}
        port.raw.monitor(_ADDRESS, sum(self._links))
        self._raw = port.context.socket(zmq.PAIR)
        self._raw.set(zmq.LINGER, 0)
        self._raw.set(zmq.RCVHWM, 0)
        self._raw.connect(_ADDRESS)
        self.descriptor: int = self._raw.FD

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._raw.closed

    def read(self) -> None:
        """Report all waiting events."""
        raw = self._raw
        while not raw.closed and int(raw.get(EVENTS)) & IN:
            number, detail = _EVENT.unpack(raw.recv(NOW))
            endpoint = raw.recv(NOW).decode("utf-8", "replace")
            link = self._links.get(number)
            if link is not None:
                self._tell(LinkEvent(link, endpoint, detail))

    def close(self) -> None:
        """Stop the monitor.

        In this order, or ZeroMQ's I/O thread waits for ever for a reader of its last event.
        """
        if not self._raw.closed:
            self._watched.disable_monitor()
            self._raw.close()
