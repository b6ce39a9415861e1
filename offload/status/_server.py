"""Serves the status page over HTTP: hypercorn's trio worker, in the trio run of what is looked at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import trio

try:
    from hypercorn.config import Config
    from hypercorn.trio import serve
except ImportError:  # pragma: no cover: the tests' environment has it
    raise ImportError("offload.status needs starlette and hypercorn: pip install 'trio-offload[status]'") from None

from ._app import HOSTS, Sampler, StatusApp
from ._source import StatusSource

_GRACE: Final = 1.0
"""Seconds that an answer under way has when the server ends. Streams of events end at once."""

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

    ``task_status.started`` has the addresses, as ``http://127.0.0.1:8080``. It listens only where it is told to, and knows no
    users: whoever reaches it sees what it shows. On ``stop``, streams of events end, and other answers have a second; on a
    cancel all connections are closed at once.

    Args:
        source: what is looked at, in this trio run.
        bind: ``host:port``, port 0 for a free one; or ``unix:/path``.
        hosts: names under which browsers may ask for it.
        stop: ends it in order.
        metrics: what ``/metrics`` answers: ``lambda: prometheus_client.generate_latest(registry)``.

    Raises:
        OSError: it cannot listen there.
    """
    stop = trio.Event() if stop is None else stop
    sampler = Sampler(source)
    app = StatusApp(source, sampler, stop, hosts, metrics)
    config = Config()
    config.bind = [bind]
    config.umask = 0o077  # of a Unix socket
    config.errorlog = _log
    config.graceful_timeout = _GRACE
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler.run)
        await serve(cast("Any", app.asgi), config, shutdown_trigger=stop.wait, task_status=task_status)
        nursery.cancel_scope.cancel()
