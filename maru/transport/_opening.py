"""The lifetime of a socket: its addresses, its tasks, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import trio

from ..exception_groups import raise_unwrapped
from ._contract import OnMessages
from ._monitor import LinkEvent
from ._options import SocketOptions
from ._trio import SocketKind, TrioSocket


def open_socket(
    kind: SocketKind,
    *,
    bind: Sequence[str] = (),
    connect: Sequence[str] = (),
    topics: Sequence[bytes] = (),
    options: SocketOptions | None = None,
    on_messages: OnMessages | None = None,
    on_gone: Callable[[bytes], None] | None = None,
    on_link: Callable[[LinkEvent], None] | None = None,
) -> AbstractAsyncContextManager[TrioSocket]:
    """Open a ZeroMQ socket, for the length of an ``async with`` block.

    Leaving the block closes it: tasks that wait get :exc:`trio.ClosedResourceError`, and when the block has been left
    its addresses are free again. It can be used until then, also in a scope that was cancelled and a shield.

    Args:
        kind: ``"dealer"`` sends to its connections in turn; ``"router"`` names the peer of each message; ``"pub"``
            sends to all and waits for none: a peer that does not read within ``send_high_water_mark`` messages misses
            the rest; ``"sub"`` receives from one of these.
        bind: addresses to listen at: ``tcp://host:port``, ``tcp://host:*``, ``ipc://path``.
        connect: addresses to connect to; no process need listen there yet.
        topics: subscriptions of a ``"sub"``: messages whose first frame begins with one of these.
        options: bounds, times and keys.
        on_messages: gets all messages, in batches, from the task that reads the socket (see :meth:`TrioSocket.expect`).
            It may send. If it raises, the socket is closed and that task gets the error. Without it, messages are
            received.
        on_gone: called once for each peer that has sent something, after its connection has ended and its last message
            was read.
        on_link: called for each change of a connection.

    Raises:
        OSError: an address cannot be used, or a live server has it.
        ValueError: an address is neither ``tcp://`` nor ``ipc://``, or ``on_gone`` is given for another kind than a
            ROUTER.
    """
    if on_gone is not None and kind != "router":
        raise ValueError(f"on_gone needs kind = 'router', not {kind!r}")
    return _OpenSocket(
        lambda: TrioSocket(kind, options or SocketOptions(), on_messages, on_gone, on_link), (bind, connect, topics)
    )


class _OpenSocket:
    """The lifetime of a socket, as an async context manager."""

    def __init__(
        self, make: Callable[[], TrioSocket], places: tuple[Sequence[str], Sequence[str], Sequence[bytes]]
    ) -> None:
        self._make = make
        self._places = places
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] = trio.open_nursery()

    async def __aenter__(self) -> TrioSocket:
        self._socket = socket = self._make()
        try:
            socket._port.attach(*self._places)
        except BaseException:
            await socket.aclose()
            raise
        self._nursery = await self._nursery_manager.__aenter__()
        socket._start(self._nursery)
        return socket

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with trio.CancelScope(shield=True):
            await self._socket.aclose()
        if not self._nursery.cancel_scope.cancel_called:
            # No task in here failed: an error of the body does not concern the nursery, and propagates unchanged.
            await self._nursery_manager.__aexit__(None, None, None)
            return False
        with raise_unwrapped():
            return bool(await self._nursery_manager.__aexit__(kind, error, trace))
