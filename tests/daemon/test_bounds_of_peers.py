"""Every bound of what a peer may have: filled to the brim, and a good client is served.

The table is that of SECURITY.md: a bound that is in one of them only fails here.
"""

import contextlib
import os
import re
import socket
from pathlib import Path

import attrs
import pytest
import trio

import maru
from maru.testing import open_test_server
from offload.client import CannotHandOver, DaemonBusy, SharedMemory, open_connection
from offload.daemon import _messages as messages
from offload.daemon._messages import MAX_FRAME_BYTES, Refused, TensorLayout
from tests.daemon.test_daemon import cache_of, registered, until
from tests.daemon.test_hostile import Raw, serves, silent_connections
from tests.support.daemons import SIZE, daemon
from tests.support.pools import until as until_of_pools
from tests.support.published import PublishedRmClient

FILLS = {}


def fills(bound, **knobs):
    """Note what fills a bound of a daemon with these knobs. Left, it lets go."""

    def note(fill):
        FILLS[bound] = (fill, knobs)
        return fill

    return note


def lower(server, **limits):
    """Have smaller bounds, so that they are met soon."""
    sessions = server._service.sessions
    sessions.limits = attrs.evolve(sessions.limits, **limits)


def lower_door(door, most):
    door._most = most


@contextlib.contextmanager
def held(sockets):
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()


# --- connections --------------------------------------------------------------------------------------------------------


@fills("connections at daemon.sock", max_sessions=4)
async def fill_engines(server, stack):
    stack.enter_context(held(await silent_connections(f"{server.directory}/daemon.sock", 40)))
    await trio.sleep(0.05)
    assert server.statistics()["connections"] == 8


@fills("connections at memory.sock")
async def fill_handover(server, stack):
    stack.enter_context(held(await silent_connections(f"{server.directory}/memory.sock", 100)))
    await trio.sleep(0.05)


@fills("connections at admin.sock")
async def fill_operators(server, stack):
    stack.enter_context(held(await silent_connections(server.admin_url.removeprefix("ipc://"), 40)))
    await until(lambda: server.admin._channel.statistics().connections == 16)


def ask_for_events(server, count):
    streams = []
    for _ in range(count):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{server.directory}/status.sock")
        sock.setblocking(False)
        sock.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        streams.append(sock)
    return streams


async def heads(streams):
    """The first line of each answer; empty: closed without one."""
    found = []
    for sock in streams:
        with trio.fail_after(10):
            await trio.lowlevel.wait_readable(sock)
        try:
            found.append(sock.recv(65_536).split(b"\r\n")[0])
        except ConnectionResetError:
            found.append(b"")
    return found


@fills("connections at the status page", status="ipc")
async def fill_page(server, stack):
    streams = ask_for_events(server, 80)
    stack.enter_context(held(streams))
    assert (await heads(streams)).count(b"") >= 80 - 64


@fills("event streams of the status page", status="ipc")
async def fill_streams(server, stack):
    stack.enter_context(pytest.MonkeyPatch.context()).setattr("offload.status._app.MOST_STREAMS", 2)
    first = ask_for_events(server, 2)
    stack.enter_context(held(first))
    assert all(b" 200" in head for head in await heads(first))
    more = ask_for_events(server, 1)
    stack.enter_context(held(more))
    assert b" 503" in (await heads(more))[0]


# --- sessions, and what they hold ---------------------------------------------------------------------------------------


@fills("sessions", max_sessions=4)
async def fill_sessions(server, stack):
    for _ in range(3):
        await stack.enter_context(Raw(server)).hello()
    with Raw(server) as last, Raw(server) as refused:
        await last.hello()
        assert "as many as max_sessions allows" in (await refused.hello()).text


async def refusals(server, stack, make, count, text):
    """Send so many requests; some are refused with this text."""
    raw = stack.enter_context(Raw(server))
    raw.send(messages.Hello(1, 1, messages.VERSION, "raw"))
    await raw.answer()
    for seq in range(2, 2 + count):
        raw.send(make(seq))
    answers = [await raw.answer() for _ in range(count)]
    refused = [one for one in answers if isinstance(one, Refused)]
    assert refused and all(one.kind == "full" for one in refused) and text in refused[0].text
    return answers


@fills("requests under way", block_bytes=SIZE)
async def fill_requests(server, stack):
    lower(server, requests=4)
    await refusals(server, stack, lambda seq: messages.Exists(seq, [b"key"]), 10, "requests are under way")


@fills("holds", block_bytes=SIZE)
async def fill_holds(server, stack):
    lower(server, holds=4)
    await refusals(server, stack, lambda seq: messages.Lookup(seq, [b"key"], 1.0), 10, "at most 4 holds")


@fills("announcements of pages", block_bytes=SIZE)
async def fill_announcements(server, stack):
    lower(server, holds=0)
    await refusals(
        server, stack, lambda seq: messages.ReserveWrite(seq, [b"key"]), 2, "announces pages at most 0 times"
    )
    lower(server, holds=16)


@fills("bytes of keys in requests, holds, announcements", block_bytes=SIZE)
async def fill_keys(server, stack):
    lower(server, bytes=1 << 16, bytes_together=1 << 17)
    keys = [at.to_bytes(2, "big") * 100 for at in range(100)]
    await refusals(server, stack, lambda seq: messages.Exists(seq, keys), 5, "at most 65536 in requests and holds")


async def hand_over_until_refused(server, stack, memory, text):
    descriptor = memory.descriptor if isinstance(memory, SharedMemory) else memory
    connection = await stack.enter_async_context(open_connection(server.url))
    session = await connection.wait_session()
    with pytest.raises(CannotHandOver, match=text):
        for _ in range(64):
            await connection.hand_over(descriptor, session)


@fills("memories")
async def fill_memories(server, stack):
    lower(server, memories=4)
    await hand_over_until_refused(server, stack, SharedMemory(SIZE), "at most 4 memories")


@fills("caches")
async def fill_caches(server, stack):
    lower(server, caches=2)
    connection = await stack.enter_async_context(open_connection(server.url))
    await connection.wait_session()
    with pytest.raises(DaemonBusy, match="at most 2 caches"):
        for _ in range(3):
            await registered(connection, cache_of())


@fills("descriptors of memory in files")
async def fill_descriptors(server, stack):
    lower_door(server._service.shares.descriptors, 8)
    file = os.memfd_create("unsealed")
    stack.callback(os.close, file)
    os.ftruncate(file, SIZE)
    await hand_over_until_refused(server, stack, file, "descriptors for memory of this session, which has 4")


@fills("mappings of memory")
async def fill_mappings(server, stack):
    lower_door(server._service.shares.mappings, 8)
    await hand_over_until_refused(server, stack, SharedMemory(SIZE), "mappings for memory of this session")


@fills("address space of memory")
async def fill_address_space(server, stack):
    lower_door(server._service.shares.address_space, 64 * SIZE)
    await hand_over_until_refused(server, stack, SharedMemory(4 * SIZE), "bytes of address space")


async def register_cut(server, stack, count, error, text):
    connection = await stack.enter_async_context(open_connection(server.url))
    session, memory = await connection.wait_session(), SharedMemory(4 * SIZE)
    with pytest.raises(error, match=text):
        for _ in range(count):
            number = await connection.hand_over(memory.descriptor, session)
            cut = TensorLayout(number, 0, 1, [1, SIZE, 1], [2 * SIZE, 2, 1], 0)
            await connection.ask(lambda seq, one=cut: messages.RegisterKVCache(seq, [one]), messages.Registered)


@fills("pieces of the blocks of a cache", block_bytes=SIZE)
async def fill_cache_with_pieces(server, stack):
    stack.enter_context(pytest.MonkeyPatch.context()).setattr("offload.daemon._layout.MAX_PIECES", SIZE - 1)
    await register_cut(server, stack, 1, Exception, f"{SIZE} pieces: at most {SIZE - 1}")


@fills("pieces of the blocks of all caches", block_bytes=SIZE)
async def fill_all_with_pieces(server, stack):
    lower_door(server._service.shares.pieces, 16 * SIZE)
    await register_cut(server, stack, 3, DaemonBusy, "pieces of blocks for memory of this session")


# --- bytes --------------------------------------------------------------------------------------------------------------


@fills("bytes of a frame")
async def fill_frame(server, stack):
    raw = stack.enter_context(Raw(server))
    await raw.hello()
    raw.send(bytes(MAX_FRAME_BYTES + 1))
    assert await raw.is_over()


@fills("answers that are not read")
async def fill_answers(server, stack):
    server._channel._peer_bytes = 64 << 10
    raw = stack.enter_context(Raw(server))
    await raw.hello()
    with trio.fail_after(30), contextlib.suppress(OSError):
        for seq in range(2, 1 << 30):
            try:
                raw.send(messages.Stats(seq))
            except BlockingIOError:
                await trio.sleep(1e-3)
    assert server._channel.statistics().hung_up == 1


@pytest.mark.parametrize("bound", [*FILLS])
async def test_a_good_engine_is_served_at_the_brim(bound, path):
    fill, knobs = FILLS[bound]
    async with daemon(path, **knobs) as server:
        with trio.fail_after(60):
            async with contextlib.AsyncExitStack() as stack:
                await fill(server, stack)
                await serves(server)


# --- the page store -----------------------------------------------------------------------------------------------------


async def serves_clients(server):
    async with maru.MaruHandler(server_url=server.endpoints[-1], pool_size=1 << 20, chunk_size_bytes=SIZE) as handler:
        assert not await handler.exists("key")


async def fill_channel(server, stack):
    stack.enter_context(held(await silent_connections(server.channel_path, 12)))
    await until_of_pools(lambda: server.statistics().channel.connections == 4)


async def fill_region_descriptors(server, stack):
    stack.enter_context(held(await silent_connections(server.descriptors_path, 300)))
    await until_of_pools(lambda: server.statistics().descriptors.turned_away > 40)


async def fill_resource_manager(server, stack):
    host, _, port = server.rm_address.rpartition(":")
    for _ in range(8):
        stack.enter_context(await trio.to_thread.run_sync(socket.create_connection, (host, int(port))))
    await until_of_pools(lambda: server.statistics().resource_manager.refused == 4)

    def ask():
        with PublishedRmClient(server.rm_address) as client:
            client.stats()

    await trio.to_thread.run_sync(ask)


OF_PAGE_STORES = {
    "connections at channel.sock of a page store": (fill_channel, {"max_connections": 4}),
    "connections at descriptors.sock of a page store": (fill_region_descriptors, {}),
    "connections to the resource manager of a page store": (
        fill_resource_manager,
        {"host": "127.0.0.1", "max_connections": 4},
    ),
}


@pytest.mark.parametrize("bound", [*OF_PAGE_STORES])
async def test_a_good_client_is_served_at_the_brim(bound):
    fill, knobs = OF_PAGE_STORES[bound]
    async with open_test_server(**knobs) as server:
        with trio.fail_after(60):
            async with contextlib.AsyncExitStack() as stack:
                await fill(server, stack)
                await serves_clients(server)


def test_the_table_of_the_docs_has_the_same_bounds():
    section = (Path(__file__).parents[2] / "SECURITY.md").read_text().partition("\n## Bounds\n")[2]
    rows = re.findall(r"^\| (?!Bound \||-)(.+?) \|", section, flags=re.MULTILINE)
    assert sorted(rows) == sorted([*FILLS, *OF_PAGE_STORES])
