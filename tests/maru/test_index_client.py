"""Lookups and loads over the shared index, from both faces: without a message, and never anything but what is stored."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager

import attrs
import pytest

import maru._client.handler_operations
from maru import Loaded, MaruConfig, NoAnswer, Stored
from maru.blocking import MaruHandler
from tests.support.maru_processes import DESCRIBE, Server, temporary_pool
from tests.support.published import Ask, PublishedClient

PAGE = 32 << 10
PAGES = 64


def value(key: str) -> bytes:
    return key.encode().ljust(PAGE, b".")


def blank(n: int) -> list[bytearray]:
    return [bytearray(PAGE) for _ in range(n)]


@pytest.fixture
def server():
    with temporary_pool() as pool, Server(pool) as server:
        yield server


@contextmanager
def client(server: Server, **knobs):
    knobs = {
        "pool_size": PAGES * PAGE,
        "chunk_size_bytes": PAGE,
        "auto_expand": False,
        "timeout_ms": 30_000,
        **knobs,
    }
    handler = MaruHandler(MaruConfig(server_url=f"ipc://{server.pool}/maru.sock", **knobs))
    handler.connect()
    try:
        yield handler
    finally:
        handler.close()


def put(handler: MaruHandler, keys: list[str]) -> None:
    assert handler.batch_put(keys, [value(key) for key in keys]) == [Stored.NEW] * len(keys)


def settled(handler: MaruHandler) -> None:
    """From here on the index says of every miss that it is one."""
    ends = time.monotonic() + 30
    while True:
        asked = handler.statistics().counters.asked_anyway
        assert not handler.exists("nobody")
        if handler.statistics().counters.asked_anyway == asked and not handler.statistics().why_no_index:
            return
        assert time.monotonic() < ends, handler.statistics()
        time.sleep(0.001)


def requests(server: Server) -> int:
    """How many the server has had, this one included."""
    with PublishedClient(f"ipc://{server.pool}/maru.sock") as asking:
        return asking.ask(DESCRIBE)["sections"]["server"]["requests"]


# --- without a message --------------------------------------------------------------------------------------------


def test_lookups_and_loads_send_nothing(server: Server) -> None:
    with client(server, lease=60.0) as handler:
        keys = [f"k{number}" for number in range(16)]
        put(handler, keys)
        settled(handler)
        before = requests(server)
        for _ in range(10):
            buffers = blank(17)
            assert handler.batch_exists([*keys, "never"]) == [True] * 16 + [False]
            assert handler.exists("k3") and not handler.exists("never")
            assert handler.batch_get_into([*keys, "never"], buffers) == [Loaded.LOADED] * 16 + [Loaded.MISSING]
            assert buffers == [value(key) for key in keys] + [bytes(PAGE)]
        assert requests(server) == before + 1
        assert handler.statistics().counters.found_here >= 10 * 33


def test_another_ones_pages_are_loaded_as_well(server: Server) -> None:
    with client(server) as writer, client(server, pool_size=0) as reader:
        put(writer, ["k"])
        settled(reader)
        buffers = blank(1)
        for _ in range(2):  # the first maps its region
            assert reader.batch_get_into(["k"], buffers) == [Loaded.LOADED]
        assert reader.statistics().counters.found_here >= 1
        assert buffers[0] == value("k")


@pytest.mark.parametrize("off", ["client", "server"])
def test_whoever_is_told_so_asks_by_message_and_says_why(off: str) -> None:
    with (
        temporary_pool() as pool,
        Server(pool, *(["--index", "off"] if off == "server" else [])) as server,
        client(server, index="off" if off == "client" else "auto") as handler,
    ):
        put(handler, ["k"])
        assert handler.batch_exists(["k", "never"]) == [True, False]
        assert handler.batch_get_into(["k"], blank(1)) == [Loaded.LOADED]
        assert handler.statistics().why_no_index == "index = off"
        assert not handler.statistics().counters.found_here


def test_keys_of_published_owners_are_asked_for(server_with_tcp: Server) -> None:
    server = server_with_tcp
    with client(server) as handler, PublishedClient(server.tcp) as published:
        settled(handler)
        handle = published.ask(Ask.REQUEST_ALLOC, instance_id="theirs", size=1 << 20)["handle"]
        entry = {"key": "theirs", "region_id": handle["region_id"], "kv_offset": 0, "kv_length": PAGE}
        assert published.ask(Ask.REGISTER_KV, **entry)["is_new"]
        put(handler, ["k"])
        assert handler.batch_exists(["k", "theirs", "never"]) == [True, True, False]
        assert handler.batch_get_into(["theirs", "never"], blank(2)) == [Loaded.LOADED, Loaded.MISSING]


# --- what changes -------------------------------------------------------------------------------------------------


def test_what_goes_while_it_is_copied_is_asked_for_and_nothing_else_is(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_and_sum = maru._client.handler_operations.copy_and_sum
    with client(server) as reader, client(server) as other:
        keys = ["stays", "goes", "is there anew"]
        put(other, keys)
        settled(reader)
        assert reader.batch_get_into(keys, blank(3)) == [Loaded.LOADED] * 3

        ends = time.monotonic() + 30

        def copying(*columns):
            monkeypatch.undo()
            for key in ("goes", "is there anew"):
                while not other.delete(key):  # the pins of the load before are given back, and nobody waits for that
                    assert time.monotonic() < ends
            put(other, ["another", "is there anew"])  # into the pages that came back
            return copy_and_sum(*columns)

        monkeypatch.setattr(maru._client.handler_operations, "copy_and_sum", copying)
        buffers = blank(3)
        before = reader.statistics().counters
        assert reader.batch_get_into(keys, buffers) == [Loaded.LOADED, Loaded.MISSING, Loaded.LOADED]
        assert (buffers[0], buffers[2]) == (value("stays"), value("is there anew"))
        after = reader.statistics().counters
        assert after.changed_in_copy - before.changed_in_copy == 2
        assert after.asked_anyway - before.asked_anyway == 2


def test_a_server_that_is_killed_and_started_again_while_pages_are_copied_makes_none_of_them_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_and_sum = maru._client.handler_operations.copy_and_sum
    with client(server, lease=60.0) as owner, client(server, lease=60.0, pool_size=0) as reader:
        put(owner, ["a", "b"])
        settled(reader)
        assert reader.batch_get_into(["a", "b"], blank(2)) == [Loaded.LOADED] * 2  # maps the region

        def copying(*columns):
            monkeypatch.undo()
            sums = copy_and_sum(*columns)
            server.restart()
            return sums

        monkeypatch.setattr(maru._client.handler_operations, "copy_and_sum", copying)
        buffers = blank(2)
        before = reader.statistics().counters
        assert reader.batch_get_into(["a", "b"], buffers) == [Loaded.LOADED] * 2
        assert buffers == [value("a"), value("b")]
        after = reader.statistics().counters
        assert after.changed_in_copy - before.changed_in_copy == 2
        assert after.asked_anyway - before.asked_anyway == 2


def test_what_is_copied_while_the_lease_ends_does_not_count(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_and_sum = maru._client.handler_operations.copy_and_sum
    with client(server, lease=2.0, timeout_ms=300) as handler:
        put(handler, ["k"])
        settled(handler)
        state = handler._state
        assert handler.batch_get_into(["k"], blank(1)) == [Loaded.LOADED]
        before = handler.statistics().counters

        def copying(*columns):
            monkeypatch.undo()
            sums = copy_and_sum(*columns)
            server.process.send(signal.SIGSTOP)  # nobody prolongs the lease
            ends = time.monotonic() + 30
            while state.clock() < state.deadline:
                assert time.monotonic() < ends
                time.sleep(0.01)
            return sums

        monkeypatch.setattr(maru._client.handler_operations, "copy_and_sum", copying)
        try:
            with pytest.raises(NoAnswer):
                handler.batch_get_into(["k"], blank(1))
        finally:
            server.process.send(signal.SIGCONT)
        after = handler.statistics().counters
        assert after.changed_in_copy - before.changed_in_copy == 1
        assert after.found_here == before.found_here


def test_bytes_that_are_not_what_was_stored_are_told_as_damaged(server: Server) -> None:
    with client(server) as handler:
        put(handler, ["k"])
        settled(handler)
        info = handler.retrieve("k")
        handler._state.spans[info.region_id].view(info.offset, 1)[0] ^= 1  # its owner's map
        info.release()
        assert handler.batch_get_into(["k"], blank(1)) == [Loaded.DAMAGED]
        assert handler.statistics().counters.damaged == 1


def test_an_entry_that_is_half_of_two_is_no_address(server: Server) -> None:
    with client(server) as handler:
        put(handler, ["k"])
        settled(handler)
        reader = handler._state.index.reader

        class Torn:
            epoch, is_retired = reader.epoch, False
            changed = staticmethod(reader.changed)

            def find(self, names):
                return attrs.evolve(reader.find(names), offsets=(1 << 62,))

        handler._state.index.reader = Torn()
        buffers = blank(1)
        assert handler.batch_get_into(["k"], buffers) == [Loaded.LOADED]
        assert buffers == [value("k")]


# --- what the server must know ------------------------------------------------------------------------------------


def test_what_was_loaded_over_the_index_is_not_evicted_next(server: Server) -> None:
    with client(server) as handler:
        keys = [f"k{number}" for number in range(PAGES)]
        for key in keys:
            put(handler, [key])
        settled(handler)
        used = [key for key in keys[: PAGES // 2] if handler.exists(key)]  # the least recently stored
        assert len(used) > 10
        assert handler.batch_get_into(used, blank(len(used))) == [Loaded.LOADED] * len(used)
        for number in range(PAGES // 4):
            put(handler, [f"new {number}"])
        assert handler.batch_exists(used) == [True] * len(used)


# --- a server that is gone ----------------------------------------------------------------------------------------


def test_loads_go_on_until_the_lease_ends_when_the_server_is_down(server: Server) -> None:
    with client(server, lease=3.0, timeout_ms=300) as handler:
        put(handler, ["k"])
        settled(handler)
        server.kill()
        buffers = blank(1)
        assert handler.batch_get_into(["k"], buffers) == [Loaded.LOADED] and buffers == [value("k")]
        ends = time.monotonic() + 30
        with pytest.raises(NoAnswer):
            while time.monotonic() < ends:
                assert handler.batch_get_into(["k"], buffers) == [Loaded.LOADED]
                time.sleep(0.01)
        server.start()
        settled(handler)
        assert handler.batch_get_into(["k"], buffers) == [Loaded.LOADED] and buffers == [value("k")]


@pytest.fixture
def server_with_tcp():
    with temporary_pool() as pool, Server(pool, "--host", "127.0.0.1") as server:
        yield server
