"""Both handlers, trio and blocking, against a server of ours and a published one: over real sockets and real memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

import maru._client.blocking
import maru._client.driver_trio
import maru._client.handler
from maru import (
    ConfigError,
    Damaged,
    HandlerClosed,
    LeaseLost,
    MaruConfig,
    NoAnswer,
    ServerConfig,
    ServerRefused,
    open_server,
)
from maru._client.answers import Deleted, Loaded, Stored
from maru._client.handler_base import beat_of
from maru._client.operations import Listing
from maru.transport import new_key_pair, save_key_pair
from tests.support.maru_actors import impatient, waits
from tests.support.published import PublishedClient, PublishedServer
from tests.support.published_wire import Ask

PAGE = 4096
SOON = 60.0  # what never takes so long unless it is broken


def value_of(key: str) -> bytes:
    return (f"{key}|" * PAGE).encode()[:PAGE]


def values_of(keys):
    return [bytearray(value_of(key)) for key in keys]


def blank(n):
    return [bytearray(PAGE) for _ in range(n)]


class InThreads:
    """The blocking handler for an async test: what may block is called in a thread."""

    SYNC = ("free", "connected", "instance_id", "config", "set_on_region_added", "statistics", "begin")

    def __init__(self, handler):
        self.handler = handler

    def __getattr__(self, name):
        value = getattr(self.handler, name)
        if name in self.SYNC or name.startswith(("get_chunk", "get_owned", "get_region", "get_buffer", "_")):
            return value
        return functools.partial(trio.to_thread.run_sync, value)

    @contextlib.asynccontextmanager
    async def impatient(self):
        with waits(self.handler):
            yield


@contextlib.asynccontextmanager
async def opened(face: str, url: str, **knobs) -> AsyncIterator:
    knobs = {"pool_size": 64 * PAGE, "chunk_size_bytes": PAGE, "eager_map": False, "timeout_ms": 30_000, **knobs}
    if face == "trio":
        async with maru._client.handler.MaruHandler(MaruConfig(server_url=url, **knobs)) as handler:
            yield handler
    else:
        handler = maru._client.blocking.MaruHandler(MaruConfig(server_url=url, **knobs))
        await trio.to_thread.run_sync(handler.connect)
        try:
            yield InThreads(handler)
        finally:
            await trio.to_thread.run_sync(handler.close)


def server_config(path: Path, **knobs) -> ServerConfig:
    return ServerConfig(port=0, zmq_socket=True, pool_path=str(path / "pool"), capacity_bytes=256 << 20, **knobs)


async def run_server(config: ServerConfig, *, task_status) -> None:
    """A server in a task of its own, which may end before whoever uses it."""
    over = trio.Event()
    with trio.CancelScope() as scope:

        async def stop() -> None:
            scope.cancel()
            await over.wait()

        async with open_server(config) as server:
            task_status.started((server, stop))
            await trio.sleep_forever()
    over.set()


@contextlib.asynccontextmanager
async def serving(kind: str, path: Path, **knobs) -> AsyncIterator[str]:
    """Where a server listens."""
    if kind == "published":
        with PublishedServer(path) as server:
            yield server.address
    else:
        async with open_server(server_config(path, **knobs)) as server:
            yield server.endpoints[-1]


both_faces = pytest.mark.parametrize("face", ["trio", "blocking"])
both_servers = pytest.mark.parametrize("kind", ["ours", "published"])


# --- the way of a key -------------------------------------------------------------------------------------------------


@both_faces
@both_servers
async def test_store_find_read_and_delete(face, kind, tmp_path):
    async with (
        serving(kind, tmp_path) as url,
        opened(face, url, instance_id="w") as writer,
        opened(face, url, pool_size=0) as reader,
    ):
        assert writer.connected and writer.instance_id == "w" and await writer.healthcheck()
        handle = await writer.alloc(100)
        assert (handle.size, len(handle.buf), handle.buf.readonly) == (100, 100, False)
        handle.buf[:] = b"x" * 100
        assert await writer.store("k", handle) is Stored.NEW
        assert await writer.store("k", await writer.alloc(7)) is Stored.DUPLICATE
        assert [await reader.exists(key) for key in ("k", "x")] == [True, False]
        assert await reader.retrieve("x") is None
        with await reader.retrieve("k") as info:
            assert (info.length, bytes(info.view), info.view.readonly) == (100, b"x" * 100, True)
            assert await writer.delete("k") in (Deleted.PINNED, Deleted.MISSING_OR_PINNED)
            info.check()
        with pytest.raises(LeaseLost):
            info.check()
        assert await reader.batch_pin(["k", "x"]) == [True, False]
        assert not await writer.delete("k")
        assert await reader.batch_unpin(["k", "x"]) == [True, False]
        assert await reader.pin("k") and await reader.unpin("k") and not await reader.unpin("k")
        assert await writer.delete("k") is Deleted.DELETED
        assert not await writer.delete("k")
        assert writer.statistics().pages.free == 2 << 20 >> 12 if kind == "published" else True
        spare = await writer.alloc(1)
        writer.free(spare)
        with pytest.raises(HandlerClosed):
            writer.free(spare)


@both_faces
@both_servers
async def test_batches_are_copied_in_and_out(face, kind, tmp_path):
    async with serving(kind, tmp_path) as url, opened(face, url) as writer, opened(face, url) as reader:
        keys = [f"k{at}" for at in range(40)]
        assert await writer.batch_put([*keys, "k3"], values_of([*keys, "k3"])) == [Stored.NEW] * 40 + [Stored.DUPLICATE]
        out = blank(41)
        assert await reader.batch_get_into([*keys, "x"], out) == [Loaded.LOADED] * 40 + [Loaded.MISSING]
        assert out == [*values_of(keys), bytearray(PAGE)]
        assert await reader.batch_exists(["k1", "x"]) == [True, False]
        infos = await reader.batch_retrieve(["k1", "x", "k2"])
        assert [info and bytes(info.view) for info in infos] == [value_of("k1"), None, value_of("k2")]
        for info in infos:
            if info is not None:
                info.release()
                info.release()
        assert writer.statistics().pages.registered == 40
        handles = await writer.batch_alloc(3)
        assert [handle.offset for handle in handles] == sorted(handle.offset for handle in handles)
        for handle, key in zip(handles, "abc", strict=True):
            handle.buf[:] = value_of(key)
        assert await writer.batch_store([*"aba"], handles) == [Stored.NEW, Stored.NEW, Stored.DUPLICATE]
        assert (await writer.get_stats())["kv_manager"]["total_entries"] == 42


def rights_at(address):
    """What the kernel says this process may do there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            return rights
    raise AssertionError


@both_faces
async def test_two_handlers_share_pages_without_a_copy_and_a_reader_cannot_write(face, tmp_path):
    async with serving("ours", tmp_path) as url, opened(face, url) as writer, opened(face, url) as reader:
        await writer.batch_put(["k"], values_of("k"))
        with await reader.retrieve("k") as info:
            view = info.view
            [region_id] = writer.get_owned_region_ids()
            writer.get_buffer_view(region_id, info.offset, 1)[0] = ord("!")
            assert view[0] == ord("!")
            assert reader.get_buffer_view(region_id, info.offset, 1).readonly
            assert rights_at(info.address) == "r--s"
        assert reader.get_owned_region_ids() == []
        assert writer.get_region_page_count(region_id) == (2 << 20) // PAGE
        assert reader.get_region_page_count(99) is reader.get_buffer_view(99, 0, 1) is None
        assert writer.get_chunk_size() == PAGE


@both_faces
@both_servers
async def test_regions_are_mapped_when_connecting_or_when_first_read(face, kind, tmp_path):
    async with serving(kind, tmp_path) as url, opened(face, url, instance_id="w") as writer:
        added = []
        writer.set_on_region_added(lambda region_id, pages: added.append((region_id, pages)))
        await writer.batch_put(["k"], values_of("k"))
        assert added == [(writer.get_owned_region_ids()[0], (2 << 20) // PAGE)]
        async with opened(face, url, eager_map=True) as eager, opened(face, url) as lazy:
            assert (eager.statistics().regions, lazy.statistics().regions) == (1, 0)
            lazy.set_on_region_added(lambda region_id, pages: added.append("lazy"))
            assert await lazy.batch_get_into(["k"], blank(1)) == [Loaded.LOADED]
            assert lazy.statistics().regions == 1
        assert added[1:] == ["lazy"]


@both_faces
async def test_a_page_whose_bytes_have_changed_is_damaged(face, tmp_path):
    async with serving("ours", tmp_path) as url, opened(face, url) as writer, opened(face, url) as reader:
        await writer.batch_put([*"kl"], values_of("kl"))
        info = await reader.retrieve("k")
        writer.get_buffer_view(info.region_id, info.offset, 1)[0] = 0
        with pytest.raises(Damaged, match="'k'"):
            _ = info.view
        info.release()
        assert await reader.batch_get_into([*"kl"], blank(2)) == [Loaded.DAMAGED, Loaded.LOADED]
        assert reader.statistics().counters.damaged == 2


@both_faces
async def test_what_is_forgotten_is_given_back_by_the_next_call(face, tmp_path):
    async with serving("ours", tmp_path) as url, opened(face, url) as handler:
        await handler.batch_put([*"k"], values_of("k"))
        free = handler.statistics().pages.free
        handle = await handler.alloc(10)
        view = handle.buf
        del handle
        gc.collect()
        await handler.exists("k")
        assert handler.statistics().pages.free == free - 1  # the view may still be written
        del view
        gc.collect()
        await handler.exists("k")
        assert handler.statistics().pages.free == free
        part = (await handler.retrieve("k")).view[10:20]
        gc.collect()
        assert not await handler.delete("k")
        del part
        gc.collect()
        assert await handler.delete("k")


@both_faces
async def test_a_batch_that_makes_no_sense_is_refused_and_costs_nothing(face, tmp_path):
    async with serving("ours", tmp_path) as url, opened(face, url) as handler:
        await handler.batch_put([*"k"], values_of("k"))
        before = handler.statistics()
        handle = await handler.alloc(1)
        for wrong, error in [
            (lambda: handler.alloc(PAGE + 1), ValueError),
            (lambda: handler.alloc(0), ValueError),
            (lambda: handler.batch_alloc(-1), ValueError),
            (lambda: handler.batch_put([*"ab"], blank(1)), ValueError),
            (lambda: handler.batch_put([*"a"], [bytearray(PAGE + 1)]), ValueError),
            (lambda: handler.batch_put([*"a"], [b""]), ValueError),
            (lambda: handler.batch_put([*"a"], [3]), TypeError),
            (lambda: handler.batch_put([b"a"], blank(1)), TypeError),
            (lambda: handler.batch_store([*"ab"], [handle, handle]), ValueError),
            (lambda: handler.batch_get_into([*"k"], [b"read-only" * 500]), BufferError),
            (lambda: handler.batch_get_into([*"k"], [bytearray(5)]), ValueError),
            (lambda: handler.exists(3), TypeError),
            (lambda: handler.batch_exists([3]), TypeError),
        ]:
            with pytest.raises(error):
                await wrong()
        handler.free(handle)
        await handler.exists("k")
        assert handler.statistics().pages == before.pages
        assert await handler.delete("k")
    with pytest.raises(TypeError):
        pickle.dumps(handler if face == "trio" else handler.handler)
    with pytest.raises(ConfigError):
        maru._client.blocking.MaruHandler(timeout_ms=0)


@both_faces
async def test_tensors_are_buffers_too(face, tmp_path):
    torch = pytest.importorskip("torch")
    async with serving("ours", tmp_path) as url, opened(face, url) as handler:
        tensors = [torch.full((PAGE // 4,), float(at)) for at in range(4)]
        assert all(await handler.batch_put([*"abcd"], tensors))
        out = [torch.zeros(PAGE // 4) for _ in range(4)]
        assert all(await handler.batch_get_into([*"abcd"], out))
        assert all(torch.equal(*pair) for pair in zip(tensors, out, strict=True))
        with pytest.raises(ValueError, match="contiguous"):
            await handler.batch_put([*"e"], [torch.zeros(8, 8).t()])
        assert bytes(memoryview(tensors[2].numpy()).cast("B")) == bytes((await handler.retrieve("c")).view)


# --- peers ------------------------------------------------------------------------------------------------------------


@both_faces
async def test_a_published_client_reads_what_our_handler_stores(face, tmp_path):
    async with serving("ours", tmp_path) as url, opened(face, url) as handler:
        await handler.batch_put([*"k"], values_of("k"))

        def ask():
            with PublishedClient(url) as client:
                return client.ask(Ask.LOOKUP_KV, key="k")

        found = await trio.to_thread.run_sync(ask)
        assert (found["found"], found["kv_length"]) == (True, PAGE)
        assert found["handle"]["region_id"] == handler.get_owned_region_ids()[0]


@both_faces
@both_servers
async def test_what_a_handler_does_is_reported_if_asked_for(face, kind, tmp_path):
    async with serving(kind, tmp_path) as url, opened(face, url, enable_stats=True, instance_id="me") as handler:
        await handler.batch_put([*"kl"], values_of("kl"))
        (await handler.retrieve("k")).release()
        assert await handler.retrieve("x") is None
        assert await handler.batch_exists([*"kx"]) == [True, False]
        run = handler._driver.run
        beat = maru._client.blocking.operations.beat(handler._state)
        await (run(beat) if face == "trio" else trio.to_thread.run_sync(run, beat))
        told = (await handler.get_stats())["stats_manager"]["clients"]["me"]["operations"]
        assert told["retrieve"]["count"] == 2
        assert (told["retrieve"]["hit_count"], told["retrieve"]["miss_count"]) == (1, 1)
        assert told["batch_put"]["total_bytes"] == 2 * PAGE


@both_faces
async def test_over_curve(face, tmp_path):
    server, client = new_key_pair(), new_key_pair()
    save_key_pair(tmp_path / "server", server)
    save_key_pair(tmp_path / "client", client)
    async with open_server(server_config(tmp_path, curve_key_file=str(tmp_path / "server"))) as running:
        knobs = {"curve_key_file": str(tmp_path / "client"), "curve_server_key": server.public.decode()}
        async with opened(face, running.endpoints[0], **knobs) as handler:
            await handler.batch_put([*"k"], values_of("k"))
            assert await handler.exists("k")


# --- no answer --------------------------------------------------------------------------------------------------------


@both_faces
async def test_many_clients_list_their_keys_at_once(face, tmp_path, monkeypatch):
    monkeypatch.setattr("maru._server.service_own._LISTINGS", 1)
    monkeypatch.setattr("maru._server.service_own._LOOKED", 8)
    keys = [f"k{at:02}" for at in range(60)]
    listed = []

    async def list_keys(url):
        async with opened(face, url) as handler:
            listed.append(await handler.list_stored("k"))

    async with open_server(server_config(tmp_path)) as server:
        url = server.endpoints[0]
        async with opened(face, url) as owner:
            await owner.batch_put(keys, values_of(keys))
            with trio.fail_after(SOON):
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(list_keys, url)
        assert server._service._refused, "there was no place for all"
    assert listed == [keys] * 4


def test_a_refused_listing_is_begun_again_for_a_while():
    listing, now, refused = Listing(), 100.0, ServerRefused("later", "too_many")
    assert not listing.take(["a"], 1024)
    pauses = [listing.begin_again(refused, now), listing.begin_again(ServerRefused("over", "fenced"), now)]
    assert 0 < pauses[0] < pauses[1] and (listing.keys, listing.cursor) == ([], 0)
    assert listing.take(["b"], 0) and listing.keys == ["b"]
    with pytest.raises(ServerRefused, match="no"):
        listing.begin_again(ServerRefused("no", "refused"), now)
    with pytest.raises(ServerRefused, match="later"):
        listing.begin_again(refused, now + 60.0)


@both_faces
async def test_nobody_there_is_no_answer(face, tmp_path):
    with pytest.raises(NoAnswer):
        async with opened(face, f"ipc://{tmp_path}/nobody", timeout_ms=100):
            pass


@both_faces
async def test_a_server_that_does_not_answer_costs_no_page_and_is_never_a_miss(face, tmp_path):
    with PublishedServer(tmp_path) as server:
        async with opened(face, server.address, auto_expand=False) as handler:
            await handler.batch_put([*"k"], values_of("k"))
            pages = handler.statistics().pages
            server.mute = True
            async with impatient(handler) if face == "trio" else InThreads.impatient(handler):
                for ask in (
                    lambda: handler.exists("k"),
                    lambda: handler.batch_exists([*"kx"]),
                    lambda: handler.retrieve("k"),
                    lambda: handler.batch_get_into([*"k"], blank(1)),
                    lambda: handler.batch_put([*"l"], values_of("l")),
                    lambda: handler.delete("x"),
                    lambda: handler.pin("k"),
                    lambda: handler.unpin("k"),
                ):
                    with pytest.raises(NoAnswer):
                        await ask()
                assert not await handler.healthcheck()
            server.mute = False
            assert handler.statistics().pages == pages
            assert await handler.healthcheck()
            out = blank(1)
            assert await handler.batch_get_into([*"k"], out) == [Loaded.LOADED]
            assert out == values_of("k")


@both_faces
async def test_closing_does_not_wait_for_a_server_that_says_nothing(face, tmp_path):
    assert await closing(face, tmp_path) < SOON  # half of what any call would wait


@pytest.mark.long  # a machine that has more to do than this may take longer
@both_faces
async def test_closing_is_over_within_a_second_whatever_the_server_does(face, tmp_path):
    assert await closing(face, tmp_path) < 1.5


async def closing(face, tmp_path):
    """How long that takes when the server has fallen silent."""
    with PublishedServer(tmp_path) as server:
        async with opened(face, server.address, timeout_ms=round(2 * SOON * 1e3)) as handler:
            await handler.batch_put([*"k"], values_of("k"))
            info = await handler.retrieve("k")
            view = info.view
            server.mute = True
            began = time.monotonic()
        took = time.monotonic() - began
        assert bytes(view) == value_of("k")  # the memory stays
        info.release()
        for ask in (lambda: handler.exists("k"), lambda: handler.alloc(1), lambda: handler.delete("k")):
            with pytest.raises(HandlerClosed):
                await ask()
        assert not handler.connected
    return took


@both_faces
async def test_a_restarted_server_goes_on_with_the_session(face, tmp_path):
    config = server_config(tmp_path)
    async with trio.open_nursery() as nursery:
        server, stop = await nursery.start(run_server, config)
        async with opened(face, server.endpoints[-1]) as handler:
            await handler.batch_put([*"kl"], values_of("kl"))
            info = await handler.retrieve("k")
            await stop()
            await nursery.start(run_server, config)
            out = blank(2)
            assert await handler.batch_get_into([*"kl"], out) == [Loaded.LOADED] * 2
            assert out == values_of("kl")
            assert await handler.batch_put([*"m"], values_of("m")) == [Stored.NEW]
            await handler.exists("k")
            info.check()
            assert not await handler.delete("k")  # it is pinned again
            counters = handler.statistics().counters
            assert (counters.restarts, counters.sessions_lost, counters.views_lost) == (1, 0, 0)
            info.release()
            assert await handler.delete("k")
        nursery.cancel_scope.cancel()


@both_faces
async def test_the_lease_is_renewed_also_while_the_caller_is_busy(face, tmp_path, monkeypatch):
    """At its own pace, which here is not a third of the lease: that would be too long to wait for, or too short to be kept."""
    for module in (maru._client.blocking, maru._client.driver_trio):
        assert module.beat_of is beat_of
        monkeypatch.setattr(module, "beat_of", lambda standing: 0.05)
    async with open_server(server_config(tmp_path)) as server, opened(face, server.endpoints[-1]) as handler:
        await handler.batch_put([*"k"], values_of("k"))
        assert beat_of(handler._state) == handler.config.lease / 3
        info = await handler.retrieve("k")
        [session] = server._storage.directory._state.sessions.values()
        leases = server._storage.directory._leases
        for _ in range(4):
            before = leases.until(session.number)
            with trio.fail_after(SOON):
                while leases.until(session.number) <= before:  # noqa: ASYNC110
                    await trio.sleep(0.01)
        info.check()
        assert handler.statistics().counters.sessions_lost == 0
        info.release()


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def published_server(tmp_path):
    with PublishedServer(tmp_path) as server:
        yield server


@contextlib.contextmanager
def blocking(server, **knobs):
    knobs = {"pool_size": 64 * PAGE, "chunk_size_bytes": PAGE, "eager_map": False, "timeout_ms": 30_000, **knobs}
    with maru._client.blocking.MaruHandler(server_url=server.address, **knobs) as handler:
        yield handler


async def test_many_threads_use_one_handler(tmp_path):
    async with serving("ours", tmp_path) as url, opened("blocking", url, pool_size=8 << 20) as handler:
        blocking_handler, failures = handler.handler, []

        def work(name):
            try:
                for turn in range(20):
                    keys = [f"{name}.{turn}.{at}" for at in range(5)]
                    assert all(blocking_handler.batch_put(keys, values_of(keys)))
                    out = blank(5)
                    assert all(blocking_handler.batch_get_into(keys, out))
                    assert out == values_of(keys)
                    with blocking_handler.retrieve(keys[0]) as info:
                        assert info.view == value_of(keys[0])
                    assert all(blocking_handler.batch_delete(keys))
            except BaseException as exc:
                failures.append(exc)

        async with trio.open_nursery() as nursery:
            for name in range(6):
                nursery.start_soon(trio.to_thread.run_sync, work, name)
        assert failures == []
        await handler.exists("k")
        statistics = handler.statistics()
        assert (statistics.pages.registered, statistics.pages.allocated, statistics.pinned) == (0, 0, 0)
        assert 1 <= statistics.calls.sockets <= 7


async def test_calls_may_be_begun_and_waited_for_later_in_any_order_and_thread(tmp_path):
    async with serving("ours", tmp_path) as url, opened("blocking", url) as handler:

        def work():
            begin = handler.begin
            stores = [begin.batch_put([f"{at}"], values_of(f"{at}")) for at in range(8)]
            assert [ticket.result() for ticket in reversed(stores)] == [[Stored.NEW]] * 8
            with pytest.raises(HandlerClosed):
                stores[0].result()
            asked = [begin.exists(f"{at}") for at in range(100)]  # more than the window
            assert [ticket.result() for ticket in asked] == [True] * 8 + [False] * 92
            out = blank(8)
            loads = [begin.batch_get_into([f"{at}"], [out[at]]) for at in range(8)]
            assert [ticket.result() for ticket in loads] == [[Loaded.LOADED]] * 8
            assert out == values_of("01234567")
            [[info]] = [begin.batch_retrieve([*"3"]).result()]
            info.release()
            assert begin.batch_exists([*"3x"]).result() == [True, False]
            assert begin.batch_pin([*"3x"]).result() == [True, False]
            assert handler.handler.unpin("3")
            assert begin.delete("3").result() is Deleted.DELETED
            ticket = begin.exists("4")
            answers = []
            thread = threading.Thread(target=lambda: answers.append(ticket.result()))
            thread.start()
            thread.join(SOON)
            assert answers == [True]
            with pytest.raises(ValueError):
                begin.batch_put([*"a"], [b""])

        await trio.to_thread.run_sync(work)


async def test_a_store_that_was_begun_and_forgotten_costs_no_page(tmp_path):
    async with serving("ours", tmp_path) as url, opened("blocking", url) as handler:
        await handler.batch_put([*"k"], values_of("k"))

        def begin_and_forget():
            handler.begin.batch_put([*"l"], values_of("l"))
            gc.collect()

        await trio.to_thread.run_sync(begin_and_forget)
        await handler.exists("k")
        assert handler.statistics().pages.in_doubt == 1
        await trio.to_thread.run_sync(handler._driver.run, maru._client.blocking.operations.beat(handler._state))
        pages = handler.statistics().pages
        assert (pages.in_doubt, pages.registering, pages.registered) == (0, 0, 2)
        assert await handler.exists("l")


def test_closing_ends_whoever_waits(published_server):
    with blocking(published_server, timeout_ms=round(4 * SOON * 1e3)) as handler:
        published_server.mute = True
        ended = []

        def ask():
            try:
                handler.exists("k")
            except HandlerClosed:
                ended.append(True)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while handler.statistics().calls.waiting < 3:
            time.sleep(0.01)
    for thread in threads:
        thread.join(SOON)  # far sooner than any of their calls would end
    assert ended == [True] * 3


def test_a_forgotten_handler_ends_its_thread_and_its_sockets(published_server):
    handler = maru._client.blocking.MaruHandler(server_url=published_server.address, chunk_size_bytes=PAGE)
    handler.connect()
    heart, lines = handler._heart, handler._driver.connections
    assert heart.is_alive() and heart.daemon
    handler._stop.set()  # its next look is ten seconds away
    heart.join(SOON)
    del handler
    gc.collect()
    assert lines.is_closed


def test_handler_without_thread_for_its_lease_is_not_connected(published_server, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    handler = maru._client.blocking.MaruHandler(server_url=published_server.address, auto_connect=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="new thread"):
            handler.connect()
        assert not handler.connected
    assert not handler.exists("k")
    assert handler.connected and handler._heart.is_alive()
    handler.close()
    never = maru._client.blocking.MaruHandler(server_url=published_server.address)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(threading.Thread, "start", refuse)
        never.connect()
    never.close()


def test_it_connects_when_first_used_if_told_to(published_server):
    handler = maru._client.blocking.MaruHandler(server_url=published_server.address, auto_connect=True)
    assert not handler.connected
    assert not handler.exists("k")
    assert handler.connected
    assert handler.connect()
    handler.close()
    handler.close()
    with pytest.raises(HandlerClosed):
        handler.exists("k")
    lazy = maru._client.blocking.MaruHandler(server_url=published_server.address)
    with pytest.raises(HandlerClosed, match="connect"):
        lazy.exists("k")


def test_a_forked_child_is_told_so_and_touches_nothing(published_server):
    script = f"""
        import os, sys, warnings
        from maru._client.blocking import MaruHandler
        from maru.base.errors import HandlerClosed

        handler = MaruHandler(server_url={published_server.address!r}, chunk_size_bytes=4096, pool_size=2 << 20)
        handler.connect()
        handler.batch_put(["k"], [b"x"])
        info = handler.retrieve("k")
        child = os.fork()
        if not child:
            warnings.simplefilter("ignore", ResourceWarning)  # of sockets that are the parent's to close
            try:
                handler.exists("k")
            except HandlerClosed as exc:
                assert "forked" in str(exc)
                info.release()
                handler.close()
                assert not handler.connected
                sys.exit(7)  # with all that happens at an exit
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert bytes(info.view) == b"x"
        info.release()
        assert handler.delete("k")
        handler.close()
        print("well")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=SOON,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.stdout, done.stderr) == ("well\n", "")


def test_an_interpreter_ends_with_an_open_handler(published_server):
    script = f"""
        from maru._client.blocking import MaruHandler

        handler = MaruHandler(server_url={published_server.address!r}, chunk_size_bytes=4096, pool_size=2 << 20)
        handler.connect()
        handler.batch_put(["k"], [b"x"])
        view = handler.retrieve("k").view
        print(bytes(view))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=SOON,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.stdout, done.stderr, done.returncode) == ("b'x'\n", "", 0)


def test_a_server_that_comes_later_is_connected_to_by_another_try(tmp_path):
    handler = maru._client.blocking.MaruHandler(
        server_url=f"ipc://{tmp_path}/later", timeout_ms=10_000, chunk_size_bytes=PAGE, pool_size=2 << 20
    )
    with waits(handler), pytest.raises(NoAnswer):
        handler.connect()
    assert not handler.connected
    with PublishedServer(tmp_path, f"ipc://{tmp_path}/later"):
        deadline = time.monotonic() + SOON
        while not handler.connected and time.monotonic() < deadline:
            with contextlib.suppress(NoAnswer):
                handler.connect()
        assert handler.batch_put(["k"], [b"x"]) == [Stored.NEW]
        handler.close()


def test_an_interrupted_wait_leaves_the_handler_usable(published_server, monkeypatch):
    with blocking(published_server, checksums=False) as handler:
        handler.batch_put(["k"], values_of("k"))
        line = handler._driver.connections._all[0]
        receive, struck = line._dealer.receive, []

        def interrupted(timeout):
            if len(struck) < 2:
                struck.append(True)
                raise KeyboardInterrupt
            return receive(timeout)

        monkeypatch.setattr(line._dealer, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handler.batch_put(["l"], values_of("l"))
        with pytest.raises(KeyboardInterrupt):
            handler.retrieve("k")
        out = blank(1)
        assert handler.batch_get_into(["k"], out) == [Loaded.LOADED]
        assert out == values_of("k")
        pages = handler.statistics().pages
        assert (pages.allocated, pages.registering) == (0, 0)
        assert handler.statistics().calls.late >= 1
