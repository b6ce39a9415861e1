"""``/healthz`` and ``/readyz`` over HTTP: for probes that are no clients. Served by hypercorn in the daemon's own trio run.

``/healthz`` answers as long as the loop turns; ``/readyz`` is 200 while engines are served, and 503 while the daemon opens its
tiers, or drains. Neither needs a credential, or tells more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio


def health_app(state: Callable[[], str]) -> Any:
    """The paths, as an ASGI application that others can be mounted beside."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def healthz(request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> PlainTextResponse:
        now = state()
        return PlainTextResponse(f"{now}\n", 200 if now == "ready" else 503)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz)])


async def serve_health(
    bind: str, state: Callable[[], str], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; started with the addresses once they answer.

    Args:
        bind: ``unix:PATH``, or ``host:port``.
        state: tells how the daemon is.
        task_status: for ``nursery.start``.

    Raises:
        ModuleNotFoundError: hypercorn or starlette is not installed.
        OSError: it cannot listen there.
    """
    from hypercorn.config import Config
    from hypercorn.trio import serve

    config = Config()
    config.bind = [bind]
    config.accesslog = None
    config.errorlog = None
    config.graceful_timeout = 0.0
    await serve(health_app(state), config, shutdown_trigger=trio.sleep_forever, task_status=task_status)
