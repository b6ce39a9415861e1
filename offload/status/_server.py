"""HTTP server of the status page, in its source's trio run.

Hypercorn handles the connections.

Rule 1. Connections are a share of the descriptors of this process (:mod:`maru.base.budget`), asked for before one is
        served: over TCP any user of the host may connect, and a connection too many ends a process with ZeroMQ. Users
        other than this process's own and root have half of them together.
Rule 2. A connection without a request is closed after ``keep_alive_timeout`` of hypercorn, 5 s.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import trio

from maru.base.listeners import peer_uid
from maru.base.process_limits import DESCRIPTORS
from maru.base.relay.lookup import find_user, may_enter

try:
    # Not hypercorn's own `serve`: it accepts without a bound.
    from hypercorn.config import Config
    from hypercorn.trio.tcp_server import TCPServer
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import ConnectionState
    from hypercorn.utils import repr_socket_addr, wrap_app
except ImportError:  # pragma: no cover: the tests' environment has it
    raise ImportError("offload.status needs starlette and hypercorn: pip install 'trio-offload[status]'") from None

from ._app import HOSTS, Sampler, StatusApp
from ._source import StatusSource

_GRACE: Final = 1.0
"""Seconds for answers under way when the server ends.

Streams of events end at once.
"""
MOST: Final = 64
"""Most connections at once.

Browsers of some operators, six each, and a collector of metrics.
"""

_log = logging.getLogger("offload.status")


async def serve_status(
    source: StatusSource,
    bind: str = "127.0.0.1:0",
    *,
    hosts: Sequence[str] = HOSTS,
    stop: trio.Event | None = None,
    metrics: Callable[[], bytes] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the status page until ``stop`` is set, or until cancelled.

    ``task_status.started`` has the addresses, as ``http://127.0.0.1:8080``. It listens only at ``bind``, and knows no
    users: anybody who reaches it sees the page. On ``stop``, streams of events end, and other answers have a second; on
    a cancel all connections are closed at once.

    Args:
        source: the source of the views, in this trio run.
        bind: ``host:port``, port 0 for a free one; or ``unix:/path``.
        hosts: names under which browsers may ask for it.
        stop: ends it in order.
        metrics: makes the answer of ``/metrics``: ``lambda: prometheus_client.generate_latest(registry)``.

    Raises:
        OSError: it cannot listen there.
    """
    stop = trio.Event() if stop is None else stop
    sampler = Sampler(source)
    app = StatusApp(source, sampler, stop, hosts, metrics)
    config = Config()
    config.bind = [bind]
    config.umask = 0o077  # mode of a Unix socket
    config.errorlog = _log
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler.run)
        await _serve(cast("Any", app.asgi), config, stop, task_status)
        nursery.cancel_scope.cancel()


async def _serve(app: Any, config: Config, stop: trio.Event, task_status: trio.TaskStatus[list[str]]) -> None:
    """Accept connections until ``stop`` is set.

    The open connections then have a second.
    """
    door = DESCRIPTORS.open(1, most=MOST, each=0.5)
    context, wrapped = WorkerContext(None), wrap_app(app, config.wsgi_max_body_size, "asgi")

    async def handle(stream: trio.SocketStream) -> None:
        try:
            holder = _holder(stream)
        except OSError:  # its peer has gone
            holder = ""
        if not holder or not door.take(holder):
            await trio.aclose_forcefully(stream)
            return
        try:
            await TCPServer(wrapped, config, context, ConnectionState({}), cast("Any", stream)).run()
        finally:
            door.give_back(holder)

    try:
        sockets = config.create_sockets().insecure_sockets
    except OSError as error:
        raise OSError(error.errno, f"the status page cannot listen there: {error.strerror}", config.bind[0]) from error
    try:
        for sock in sockets:
            sock.listen(config.backlog)
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(partial(trio.serve_listeners, handle, listeners, handler_nursery=connections))
                task_status.started([f"http://{repr_socket_addr(sock.family, sock.getsockname())}" for sock in sockets])
                await stop.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + _GRACE
    finally:
        for sock in sockets:
            sock.close()
        door.close()


def _holder(stream: trio.SocketStream) -> str:
    """Return the holder that a connection counts for: rule 1."""
    unix = stream.socket.family == socket.AF_UNIX
    return "own" if may_enter(peer_uid(stream.socket) if unix else find_user(stream)) else "others"
