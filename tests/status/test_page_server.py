"""The status page over HTTP: what each route answers, who may ask, and how a stream of events ends."""

from __future__ import annotations

import functools
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import h11
import pytest
import trio

from backends.testing import FakeTier
from maru import PoolMap
from offload import open_engine
from offload.instruments import StageTimes
from offload.status import EngineStatus, NoSuchKey, StatusView, ViewMaker, serve_status


class Source:
    """A source of its own, which counts what it is asked."""

    def __init__(self, view: StatusView) -> None:
        self._view = view
        self.views = self.maps = 0
        self.why_not = ""

    def view(self) -> StatusView:
        self.views += 1
        return self._view

    async def map_pool(self) -> PoolMap | None:
        await trio.lowlevel.checkpoint()
        self.maps += 1
        return PoolMap([], self.maps)

    async def explain(self, key: str) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        if key != "6b":
            raise NoSuchKey("no such key")
        return {"key": key, "cause": "found", "text": "in <b>host</b>"}

    def not_ready(self) -> str:
        return self.why_not


async def empty_view() -> StatusView:
    async with open_engine(FakeTier(8, 64), [FakeTier(8, 64)]) as engine:
        return ViewMaker("an engine", 0.0).make(engine.statistics(), [], 1.0)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Source, str, trio.Nursery]]:
    """A server over such a source, and its address."""
    source = Source(await empty_view())
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(functools.partial(serve_status, source, **options))
        yield source, address, nursery
        nursery.cancel_scope.cancel()


async def get(address: str, path: str, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    """What a GET is answered."""

    def ask() -> tuple[int, Mapping[str, str], bytes]:
        request = urllib.request.Request(address + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    return await trio.to_thread.run_sync(ask)


@asynccontextmanager
async def event_stream(address: str) -> AsyncIterator[trio.SocketStream]:
    """An open stream of events, behind the head of its answer."""
    host, port = address.removeprefix("http://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method="GET", target="/events", headers=[("Host", host)])
        await stream.send_all(connection.send(request) + connection.send(h11.EndOfMessage()))
        yield stream


async def read_until(stream: trio.SocketStream, wanted: bytes) -> bytes:
    """What comes up to and with these bytes; all of it, if the stream ends before."""
    read = b""
    with trio.fail_after(10):
        while wanted not in read and (more := await stream.receive_some()):
            read += more
    return read


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")]
)
async def test_the_page_and_its_parts_are_there_and_load_nothing_from_elsewhere(path: str, kind: str) -> None:
    async with served() as (_, address, _):
        status, headers, body = await get(address, path)
    assert status == 200
    assert headers["Content-Type"].startswith(kind)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"http://" not in body and b"https://" not in body


@pytest.mark.parametrize("path", ["/../page.js", "/page.js/", "/index", "/static/x"])
async def test_what_is_not_there_is_404(path: str) -> None:
    async with served() as (_, address, _):
        status, _, _ = await get(address, path)
    assert status == 404


async def test_a_page_of_another_name_that_leads_to_this_host_is_not_served() -> None:
    async with served() as (_, address, _):
        status, _, body = await get(address, "/status", Host="evil.example")
        allowed, _, _ = await get(address, "/status", Host="localhost:1")
    assert (status, allowed) == (400, 200)
    assert b"an engine" not in body


async def test_health_is_that_it_answers_and_readiness_is_what_the_source_says() -> None:
    async with served() as (source, address, _):
        assert (await get(address, "/healthz"))[0] == 200
        assert (await get(address, "/readyz"))[0] == 200
        source.why_not = "not entered yet: maru"
        status, _, body = await get(address, "/readyz")
        assert (status, json.loads(body)) == (503, {"status": "not entered yet: maru"})
        assert (await get(address, "/healthz"))[0] == 200


async def test_a_key_is_explained_and_what_is_none_is_the_askers_fault() -> None:
    async with served() as (_, address, _):
        status, _, body = await get(address, "/explain?key=6b")
        assert (status, json.loads(body)["text"]) == (200, "in <b>host</b>")
        status, _, body = await get(address, "/explain")
        assert (status, json.loads(body)["error"]) == (400, "no such key")


async def test_one_block_is_explained_at_a_time() -> None:
    async with served() as (source, address, nursery):
        asked, told = trio.Event(), trio.Event()

        async def explain(key: str) -> Mapping[str, Any]:
            asked.set()
            await told.wait()
            return {"key": key}

        source.explain = explain  # type: ignore[method-assign]
        first: list[int] = []

        async def ask() -> None:
            first.append((await get(address, "/explain?key=6b"))[0])
            told_first.set()

        told_first = trio.Event()
        nursery.start_soon(ask)
        await asked.wait()
        status, _, body = await get(address, "/explain?key=6b")
        assert status == 503 and "ask again" in json.loads(body)["error"]
        told.set()
        await told_first.wait()
        assert first == [200]


async def test_nothing_is_sampled_while_nobody_watches(autojump_clock: object) -> None:
    source = Source(await empty_view())
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(serve_status, source))
        await trio.sleep(60)
        assert (source.views, source.maps) == (0, 0)
        nursery.cancel_scope.cancel()


async def test_a_watcher_gets_views_and_maps_and_none_once_it_is_gone() -> None:
    async with served() as (source, address, _):
        async with event_stream(address) as stream:
            told = await read_until(stream, b"event: status")
            assert b"event: pool" in told and b"text/event-stream" in told
            await read_until(stream, b"event: status")
        with trio.fail_after(10):
            while True:  # until the server has seen that it is gone, and a second has passed without a view
                before = source.views
                await trio.sleep(1.5)
                if source.views == before:
                    break


async def test_several_watchers_cost_one_view_a_second() -> None:
    async with served() as (source, address, _), event_stream(address) as first, event_stream(address) as second:
        for _ in range(3):
            await read_until(first, b"event: status")
            await read_until(second, b"event: status")
        assert source.views <= 5


async def test_streams_end_in_order_when_the_server_stops() -> None:
    stop = trio.Event()
    async with served(stop=stop) as (_, address, _), event_stream(address) as stream:
        await read_until(stream, b"event: status")
        stop.set()
        with trio.fail_after(10):
            assert (await read_until(stream, b"0\r\n\r\n")).endswith(b"0\r\n\r\n")  # the end of a chunked answer
            assert await stream.receive_some() == b""


async def test_cancelled_while_somebody_watches_it_is_over_at_once() -> None:
    async with served() as (_, address, nursery), event_stream(address) as stream:
        await read_until(stream, b"event: status")
        nursery.cancel_scope.cancel()
    assert not nursery.child_tasks


async def test_a_tier_that_has_not_been_entered_is_not_ready() -> None:
    class Late(FakeTier):
        async def __aenter__(self) -> FakeTier:
            raise OSError("no such server")

        async def __aexit__(self, *exc: object) -> None: ...

    tiers = {"host": FakeTier(8, 64), "maru": Late(8, 64)}
    async with open_engine(FakeTier(8, 64), tiers, on_enter_failure="miss") as engine:
        assert EngineStatus(engine, StageTimes()).not_ready() == "not entered yet: maru"


async def test_connections_of_other_users_leave_room_for_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP any user of the host may connect and ask for events, which do not end."""
    monkeypatch.setattr("offload.status._server.MOST", 8)
    async with served() as (_, address, _), AsyncExitStack() as stack:
        with monkeypatch.context() as other:
            other.setattr("offload.status._server.find_user", lambda stream: 65_534)
            streams = [await stack.enter_async_context(event_stream(address)) for _ in range(20)]
            heads = [await read_until(stream, b"event: status") for stream in streams]
        assert [bool(head) for head in heads] == [True] * 4 + [False] * 16
        status, _, _ = await get(address, "/readyz")
        assert status == 200


async def test_a_connection_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(stream: trio.SocketStream) -> int:
        raise OSError("gone")

    async with served() as (_, address, _):
        with monkeypatch.context() as going:
            going.setattr("offload.status._server.find_user", gone)
            async with event_stream(address) as stream:
                assert await read_until(stream, b"event") == b""
        assert (await get(address, "/healthz"))[0] == 200


async def test_streams_of_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.status._app.MOST_STREAMS", 1)
    async with served() as (_, address, _), event_stream(address) as first:
        assert b"event: status" in await read_until(first, b"event: status")
        status, _, body = await get(address, "/events")
        assert status == 503 and b"1 streams of events are open" in body
        assert (await get(address, "/status"))[0] == 200
