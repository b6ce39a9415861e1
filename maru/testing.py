"""Test helpers: a server in this process, and a lossy wire.

For tests of code that uses the page store. Both are the real thing: a :class:`~maru.MaruServer` with a pool of its own,
and sockets between it and its clients::

    async with open_test_server() as server, open_lossy_wire(server.endpoints[0]) as wire:
        async with MaruHandler(server_url=wire.endpoint, timeout_ms=100) as handler:
            wire.decide = lambda code, number: Fate.LOSE_ANSWER if code == Code.STORE else Fate.PASS
"""

from __future__ import annotations

import enum
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from ._client.sockets import open_dealer
from ._config import MaruConfig, ServerConfig
from ._pool.placement import find_place
from ._server.server import MaruServer, open_server
from ._wire import REPLY, read_header
from ._wire import Code as Code
from .base.addresses import CHANNEL_NAME, IPC_NAME
from .base.errors import BadFrame
from .transport import ChannelServer, Message, MessageSocket, TrioSocket, is_channel_peer, open_socket

_CAPACITY_BYTES: Final = 64 << 20
_MOST_CLIENTS: Final = 1_000
_MOST_BYTES: Final = 256 << 20
_MOST_HELD: Final = 4_096
"""Most messages that a wire keeps back; further ones are lost."""


@asynccontextmanager
async def open_test_server(**knobs: Any) -> AsyncIterator[MaruServer]:
    """Run a server in this trio run, with a temporary pool.

    It listens on its Unix socket, and has 64 MiB in memory. With ``host="127.0.0.1"`` it has a port as well, any that
    is free.

    Args:
        knobs: those of :class:`~maru.ServerConfig` with other values than the defaults. With ``pool_path``, the pool
            stays.
    """
    nbytes = knobs.get("capacity_bytes") or _CAPACITY_BYTES
    parent = None if "pool_path" in knobs else find_place(nbytes).parent
    with tempfile.TemporaryDirectory(prefix="maru-test-", dir=parent, ignore_cleanup_errors=True) as path:
        defaults = {"port": 0, "capacity_bytes": _CAPACITY_BYTES, "pool_path": path}
        async with open_server(ServerConfig(**{**defaults, **knobs})) as server:
            yield server


class Fate(enum.Enum):
    """The fate of one request and its answer."""

    PASS = "pass"
    """Both arrive."""
    LOSE_REQUEST = "lose the request"
    """Lost request: the server never receives it."""
    LOSE_ANSWER = "lose the answer"
    """Lost answer: the request is carried out."""
    HOLD_REQUEST = "hold the request"
    """Delayed request: it arrives when :meth:`LossyWire.release` is called."""
    HOLD_ANSWER = "hold the answer"
    """Delayed answer: it arrives when :meth:`LossyWire.release` is called.

    The request is carried out.
    """
    TWICE = "twice"
    """Doubled request: it arrives twice. So do the answers."""


@attrs.frozen
class WireStatistics:
    """A snapshot of a wire.

    It has the requests by their fate, and the messages held back now.
    """

    passed: int
    lost: int
    doubled: int
    held: int
    """Messages that are kept back now."""


class LossyWire:
    """A relay between clients and one server.

    Made by :func:`open_lossy_wire`; belongs to one trio run. Each client has a connection of its own to the server, as
    it would without the wire.

    Attributes:
        endpoint: address for clients to connect to.
        decide: returns the fate of a request, given its code and its number, counted from 0 over all clients.
            Synchronous. A message without a readable header passes.
    """

    def __init__(self, front: TrioSocket, channel: ChannelServer, server: str, nursery: trio.Nursery) -> None:
        self.endpoint: str = front.endpoints[0]
        self.decide: Callable[[int, int], Fate] = lambda code, number: Fate.PASS
        self._front, self._channel = front, channel
        self._server, self._nursery = server, nursery
        self._backs: dict[bytes, MessageSocket] = {}
        self._fates: dict[tuple[bytes, int], Fate] = {}
        self._held: list[Callable[[], object]] = []
        self._number = self._passed = self._lost = self._doubled = 0

    def __repr__(self) -> str:
        return f"<LossyWire from {self.endpoint} to {self._server}, {len(self._held)} messages held>"

    def release(self) -> int:
        """Deliver the messages that were held back, in order. Returns their number."""
        held, self._held = self._held, []
        for deliver in held:
            deliver()
        return len(held)

    def statistics(self) -> WireStatistics:
        """Return an immutable snapshot."""
        return WireStatistics(self._passed, self._lost, self._doubled, len(self._held))

    async def _carry(self, front: TrioSocket | ChannelServer) -> None:
        """Carry requests to the server."""
        while True:
            for identity, *frames in await front.receive_batch():
                back = self._backs.get(identity)
                if back is None:
                    back = self._backs[identity] = await self._nursery.start(self._answer, identity)
                # A peer of the channel may be forwarded over ZeroMQ, whose messages begin with an empty frame.
                self._send_on(identity, back, frames if len(frames) > 1 else [b"", *frames])

    def _send_on(self, identity: bytes, back: MessageSocket, frames: Sequence[bytes]) -> None:
        try:
            header = read_header(frames[-1])
        except BadFrame:
            back.send_nowait(frames)
            return
        fate = self.decide(header.code, self._number)
        self._number += 1
        if fate is Fate.LOSE_REQUEST:
            self._lost += 1
            return
        if fate is Fate.HOLD_REQUEST:
            self._hold(lambda: back.send_nowait(frames))
            return
        if fate in (Fate.LOSE_ANSWER, Fate.HOLD_ANSWER):
            self._fates[identity, header.sequence] = fate
        elif fate is Fate.TWICE:
            self._doubled += 1
            back.send_nowait(frames)
        else:
            self._passed += 1
        back.send_nowait(frames)

    async def _answer(self, identity: bytes, *, task_status: trio.TaskStatus[MessageSocket]) -> None:
        """Carry answers to one client.

        It reaches the server as it would without the wire.
        """

        def on_messages(messages: list[Message]) -> None:
            for frames in messages:
                self._send_back(identity, frames)

        config = MaruConfig(server_url=self._server)
        if not is_channel_peer(identity):
            config = attrs.evolve(config, protocol="published")
        async with open_dealer(config, on_messages) as back:
            task_status.started(back)
            await back.expect().wait()  # never delivered; the wait passes on all other messages

    def _send_back(self, identity: bytes, frames: Message) -> None:
        header = read_header(frames[-1])
        assert header.code & REPLY, "only answers come from a server"
        fate = self._fates.pop((identity, header.sequence), Fate.PASS)

        def deliver() -> None:
            if is_channel_peer(identity):
                self._channel.send(identity, frames[-1])
            else:
                self._front.send_nowait([identity, *frames])

        if fate is Fate.LOSE_ANSWER:
            self._lost += 1
        elif fate is Fate.HOLD_ANSWER:
            self._hold(deliver)
        else:
            deliver()

    def _hold(self, deliver: Callable[[], object]) -> None:
        if len(self._held) < _MOST_HELD:
            self._held.append(deliver)
        else:
            self._lost += 1


@asynccontextmanager
async def open_lossy_wire(server: str) -> AsyncIterator[LossyWire]:
    """Run a relay to a server, for an ``async with`` block.

    Messages held back at the end are lost.

    Args:
        server: the server's endpoint, ``ipc://...`` or ``tcp://127.0.0.1:5555``. It must not require CURVE.
    """
    # In a private directory: a stranger at a port could end this process (SECURITY.md).
    with tempfile.TemporaryDirectory(prefix="maru-wire-") as path:
        async with _open_wire(path, server) as wire:
            yield wire


@asynccontextmanager
async def _open_wire(path: str, server: str) -> AsyncIterator[LossyWire]:
    came: BaseException | None = None
    channel = ChannelServer(
        f"{path}/{CHANNEL_NAME}",
        most=_MOST_CLIENTS,
        max_bytes=_MOST_BYTES,
        peer_bytes=_MOST_BYTES,
        all_bytes=_MOST_BYTES,
        on_gone=lambda identity: None,
    )
    with channel:
        async with open_socket("router", bind=[f"ipc://{path}/{IPC_NAME}"]) as front, trio.open_nursery() as nursery:
            wire = LossyWire(front, channel, server, nursery)
            nursery.start_soon(channel.run)
            nursery.start_soon(wire._carry, front)
            nursery.start_soon(wire._carry, channel)
            try:
                yield wire
            except BaseException as exc:
                if nursery.cancel_scope.cancel_called:  # the wire itself has failed
                    raise
                came = exc  # the body's own error leaves unchanged
            nursery.cancel_scope.cancel()
    if came is not None:
        try:
            raise came
        finally:
            del came  # its traceback holds this frame
