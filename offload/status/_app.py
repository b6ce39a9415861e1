"""The status page as an ASGI application.

It serves the page, its events, explanations, and whether the process lives and is ready.

Rule 1. All watchers together cost the engine one snapshot a second: one task samples while somebody watches.
Rule 2. Nothing here changes anything: all routes are read.
Rule 3. A page of another site that a browser shows must not read this one: only known names are served (no rebinding of
        names to this host), and the page loads nothing from elsewhere.
Rule 4. A stream of events ends when the server does, or its client; a slow client gets the latest view, not all of
        them. The number of streams is bounded: one connection of HTTP/2 may ask for a hundred.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from math import inf
from typing import Any, Final

import attrs
import msgspec
import trio

try:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError:  # pragma: no cover: the tests' environment has it
    raise ImportError("offload.status needs starlette and hypercorn: pip install 'trio-offload[status]'") from None

from ._source import NoSuchKey, StatusSource, degraded_of

INTERVAL: Final = 1.0
"""Seconds between two views."""
MAP_INTERVAL: Final = 5.0
"""Seconds between two maps of the pool.

A map costs a server with a million keys a second of its processor.
"""
MOST_STREAMS: Final = 64
"""Most streams of events at once."""
HOSTS: Final[Sequence[str]] = ("localhost", "127.0.0.1", "[::1]")
"""Names under which the page is served: see rule 3."""

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}
_TYPES: Final = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_encode: Final = msgspec.json.Encoder().encode
_log = logging.getLogger("offload.status")


@attrs.define(eq=False)
class Sampler:
    """Makes a view each second while somebody watches.

    It makes the pool's map every five seconds.

    Args:
        source: the source of the views.
    """

    source: StatusSource
    latest: dict[str, bytes] = attrs.field(factory=dict)
    """The last event of each kind, encoded: ``status``, ``pool``."""
    _failed: bool = False
    _watchers: int = 0
    _made: trio.Event = attrs.field(factory=trio.Event)
    _wanted: trio.Event = attrs.field(factory=trio.Event)

    async def run(self) -> None:
        """Sample, until cancelled."""
        mapped_at = -MAP_INTERVAL
        while True:
            if not self._watchers:
                self._wanted = trio.Event()
                await self._wanted.wait()
            now = trio.current_time()
            try:
                if now - mapped_at >= MAP_INTERVAL:
                    mapped_at = now
                    self.latest["pool"] = _encode(await self.source.map_pool())
                self.latest["status"] = _encode(self.source.view())
            except Exception as error:  # such as a tier's: the last view stays, and the page is still served
                _log.log(logging.DEBUG if self._failed else logging.WARNING, "no view can be made: %r", error)
                self._failed = True
            else:
                self._failed = False
            made, self._made = self._made, trio.Event()
            made.set()
            await trio.sleep(INTERVAL)

    def status(self) -> bytes:
        """Return the latest view, encoded; a new one if nobody watches."""
        if not self._watchers:
            self.latest["status"] = _encode(self.source.view())
        return self.latest.get("status") or _encode(self.source.view())

    @property
    def watchers(self) -> int:
        """Number of open streams of events."""
        return self._watchers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample while the body runs."""
        self._watchers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._watchers -= 1

    async def wait_made(self) -> None:
        """Wait for the next view."""
        await self._made.wait()


class EventStream(Response):
    """The events of one watcher, until it goes or ``stop`` is set.

    See rule 4.

    Args:
        sampler: makes the events.
        stop: ends the stream in order: the browser gets the end of its answer.
    """

    def __init__(self, sampler: Sampler, stop: trio.Event) -> None:
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        del self.headers["content-length"]
        self._sampler = sampler
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; called by starlette."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, self._stop.wait, nursery.cancel_scope)
            nursery.start_soon(_cancel_after, partial(_wait_disconnect, receive), nursery.cancel_scope)
            with self._sampler.watching():
                await self._send_events(send)
        if self._stop.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        sent: dict[str, bytes] = {}
        while True:
            for kind, data in list(self._sampler.latest.items()):
                if sent.get(kind) is not data:
                    sent[kind] = data
                    text = f"event: {kind}\ndata: ".encode() + data + b"\n\n"
                    await send({"type": "http.response.body", "body": text, "more_body": True})
            await self._sampler.wait_made()


async def _cancel_after(wait: Callable[[], Awaitable[object]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StatusApp:
    """The routes over one source.

    Args:
        source: the source of the views.
        sampler: makes its views; the caller runs its :meth:`Sampler.run`.
        stop: ends all streams of events.
        hosts: names under which the page is served.
        metrics: makes the answer of ``/metrics``, in the text of Prometheus; ``None``: there is none.
    """

    def __init__(
        self,
        source: StatusSource,
        sampler: Sampler,
        stop: trio.Event,
        hosts: Sequence[str] = HOSTS,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        self._source = source
        self._metrics_of = metrics
        self._sampler = sampler
        self._stop = stop
        self._files = {name: (files(__package__) / "page" / name).read_bytes() for name in _TYPES}
        self.asgi: Starlette = Starlette(
            routes=[
                Route("/", self._page),
                Route("/page.css", self._page),
                Route("/page.js", self._page),
                Route("/status", self._status),
                Route("/events", self._events),
                Route("/explain", self._explain),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                *([] if metrics is None else [Route("/metrics", self._metrics)]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        )
        self.asgi.router.redirect_slashes = False
        self._explains_again = 0.0

    async def _page(self, request: Request) -> Response:
        name = request.url.path.strip("/") or "index.html"
        return _respond(self._files[name], _TYPES[name])

    async def _status(self, request: Request) -> Response:
        return _respond(self._sampler.status(), "application/json")

    async def _events(self, request: Request) -> Response:
        if self._sampler.watchers >= MOST_STREAMS:
            return _json({"error": f"{MOST_STREAMS} streams of events are open, as many as allowed: close one"}, 503)
        return EventStream(self._sampler, self._stop)

    async def _explain(self, request: Request) -> Response:
        # It looks through the whole history, and asks for no credential: one at a time, and a fifth of the time at
        # most.
        began = trio.current_time()
        if began < self._explains_again:
            return _json({"error": "another block is being explained: ask again in a moment"}, 503)
        self._explains_again = inf
        try:
            return _json(await self._source.explain(request.query_params.get("key", "")))
        except NoSuchKey as error:
            return _json({"error": str(error)}, 400)
        finally:
            now = trio.current_time()
            self._explains_again = now + 4 * (now - began)

    async def _metrics(self, request: Request) -> Response:
        assert self._metrics_of is not None
        return _respond(self._metrics_of(), "text/plain; version=0.0.4")

    async def _healthz(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        why_not = "stopping" if self._stop.is_set() else self._source.not_ready()
        # Degraded is not unready: an orchestrator that restarts it, or sends its engines elsewhere, would make it
        # worse.
        degraded = degraded_of(self._source)
        about = {"degraded": degraded} if degraded else {}
        return _json({"status": why_not or "ready", **about}, 503 if why_not else 200)


def _respond(body: bytes, media_type: str, status: int = 200) -> Response:
    return Response(body, status, media_type=media_type, headers=_HEADERS)


def _json(answer: Any, status: int = 200) -> Response:
    return _respond(_encode(answer), "application/json", status)
