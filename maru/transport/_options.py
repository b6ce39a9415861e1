"""Options of a socket: the bounds of its queues, times and keys.

Everything is bounded: if ZeroMQ reads 0 as "without limit", 0 is refused. Two things that it cannot bound are named in
:mod:`maru.transport`.
"""

from __future__ import annotations

from typing import Final

import attrs
import zmq

from ..base.errors import ConfigError
from ..configuration import Knobs
from ._keys import CurveClient, CurveServer

_knob: Final = Knobs("MARU", ConfigError)


@attrs.frozen
class SocketOptions:
    """The options of a socket.

    A value out of range raises :class:`maru.ConfigError`.
    """

    send_high_water_mark: int = _knob.integer(
        1_024, 1, 1 << 20, "Messages queued to one peer; at this number send waits and send_nowait raises."
    )
    """Messages that wait to be sent to one peer.

    When there are as many, ``send`` waits and ``send_nowait`` raises.
    """
    receive_high_water_mark: int = _knob.integer(
        1_024, 1, 1 << 20, "Received messages of one peer that are queued; at this number its sender waits."
    )
    """Messages of one peer that wait to be received.

    When there are as many, its sender waits.
    """
    max_message_bytes: int = _knob.size(
        16 << 20, 64, 256 << 20, "Largest frame. A peer that sends a larger one is disconnected, and the frame dropped."
    )
    """Largest frame in bytes.

    A peer that sends a larger one is disconnected, and the frame is dropped.
    """
    max_unread_bytes: int = _knob.size(
        64 << 20,
        4 << 10,
        1 << 40,
        "Unread bytes to one peer of a ROUTER that tracks them: then the peer is disconnected.",
    )
    """Bytes that may wait for one peer of a ROUTER with ``on_gone``.

    A peer that exceeds this and does not read is disconnected.
    """
    max_unread_bytes_together: int = _knob.size(
        256 << 20,
        4 << 10,
        1 << 40,
        "Unread bytes to all peers. Beyond it, non-readers are disconnected, the one with the most first.",
    )
    """Bytes that may wait for all of its peers together.

    If they exceed this, peers that do not read are disconnected, the one with the most first.
    """
    max_frames: int = _knob.integer(16, 2, 1_024, "Frames of a message; a message with more is dropped and counted.")
    """Frames of a message; one with more is dropped and counted."""
    linger: float = _knob.seconds(
        0.0, 0.0, 10.0, "Time to send queued messages after closing; closing takes at most as long."
    )
    """Seconds for sent messages to leave after closing.

    Closing takes at most as long.
    """
    reconnect_interval: float = _knob.seconds(
        0.01, 0.001, 60.0, "Wait before the first attempt to connect again; each further wait is twice as long."
    )
    """Seconds before the first attempt to connect again.

    Each further wait is twice as long.
    """
    reconnect_interval_max: float = _knob.seconds(0.5, 0.001, 600.0, "Longest wait before an attempt to connect again.")
    """Most seconds of such a wait."""
    handshake_timeout: float = _knob.seconds(
        5.0, 0.01, 600.0, "Time for the handshake of a connection; a slower connection is dropped."
    )
    """Most seconds of a connection's handshake, before it is dropped."""
    backlog: int = _knob.integer(512, 1, 65_535, "Connections that may wait to be accepted.")
    """Connections that wait to be accepted."""
    heartbeat_interval: float = _knob.seconds(
        0.0, 0.0, 3_600.0, "Time between heartbeats. 0: none. A stopped process does not answer, and is disconnected."
    )
    """Seconds between two heartbeats to the peer; 0: none.

    A stopped process does not answer, and is disconnected.
    """
    heartbeat_timeout: float = _knob.seconds(5.0, 0.01, 3_600.0, "Time to wait for the answer to a heartbeat.")
    """Seconds to wait for the answer to a heartbeat."""
    tcp_keepalive: float = _knob.seconds(
        30.0, 0.0, 86_400.0, "Silence after which TCP probes the other host, four times. 0: never."
    )
    """Seconds of silence until TCP probes the other host; 0: never.

    It does so four times. A stopped process still passes.
    """
    immediate: bool = _knob.flag(False, "Queue only for connected peers. Off: also for peers to come.")
    """Whether to queue only for peers that are connected.

    Otherwise messages wait for the connection.
    """
    router_mandatory: bool = _knob.flag(
        True, "Raise in a ROUTER if a peer is gone or its queue is full. Off: drop the message silently."
    )
    """Whether a ROUTER reports a gone peer or a full queue.

    Otherwise it drops the message silently.
    """
    busy_poll: float = _knob.seconds(
        100e-6,
        0.0,
        0.01,
        "Time that a lone waiter polls for its message before it sleeps. 0: none. Sleeping and waking take longer "
        "than a reply of a near peer; if replies take longer than this, fewer and fewer waits begin with polling.",
    )
    """Seconds that a lone waiter polls before it sleeps; 0: none.

    See :mod:`maru.transport`.
    """
    curve: CurveServer | CurveClient | None = None
    """Encryption, and the clients that may connect.

    ``None`` means no encryption, and that every client may connect.
    """

    def __attrs_post_init__(self) -> None:
        if self.reconnect_interval > self.reconnect_interval_max:
            raise ConfigError(
                "reconnect_interval",
                self.reconnect_interval,
                f"must be at most reconnect_interval_max, {self.reconnect_interval_max:g}",
            )


def apply(options: SocketOptions, socket: zmq.Socket[bytes], kind: str) -> None:
    """Set all options, before the socket binds or connects."""
    for option, number in {
        zmq.SNDHWM: options.send_high_water_mark,
        zmq.RCVHWM: options.receive_high_water_mark,
        zmq.MAXMSGSIZE: options.max_message_bytes,
        zmq.LINGER: milliseconds(options.linger),
        zmq.RECONNECT_IVL: milliseconds(options.reconnect_interval),
        zmq.RECONNECT_IVL_MAX: milliseconds(options.reconnect_interval_max),
        zmq.HANDSHAKE_IVL: milliseconds(options.handshake_timeout),
        zmq.BACKLOG: options.backlog,
        zmq.IMMEDIATE: int(options.immediate),
        zmq.IPV6: 0,
    }.items():
        socket.set(option, number)
    if options.heartbeat_interval:
        socket.set(zmq.HEARTBEAT_IVL, milliseconds(options.heartbeat_interval))
        socket.set(zmq.HEARTBEAT_TIMEOUT, milliseconds(options.heartbeat_timeout))
        socket.set(zmq.HEARTBEAT_TTL, milliseconds(options.heartbeat_interval + options.heartbeat_timeout))
    if options.tcp_keepalive:
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, max(1, round(options.tcp_keepalive)))
        socket.set(zmq.TCP_KEEPALIVE_INTVL, max(1, round(options.tcp_keepalive / 4)))
        socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
    if kind == "router":
        socket.set(zmq.ROUTER_MANDATORY, int(options.router_mandatory))
        # Otherwise a stranger could take a live peer's identity, and with it that one's replies.
        socket.set(zmq.ROUTER_HANDOVER, 0)
    match options.curve:
        case CurveServer(pair, _):
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, pair.secret)
        case CurveClient(server_key, pair):
            socket.set(zmq.CURVE_SERVERKEY, server_key)
            socket.set(zmq.CURVE_PUBLICKEY, pair.public)
            socket.set(zmq.CURVE_SECRETKEY, pair.secret)


def milliseconds(seconds: float) -> int:
    """Convert seconds to ZeroMQ's milliseconds; only 0 becomes 0."""
    return max(1, round(seconds * 1000)) if seconds else 0
