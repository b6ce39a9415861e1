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
import zmq

import maru
from maru._wire import (
    BeatRequest,
    CloseRequest,
    Code,
    DropRequest,
    ErrorReply,
    FindRequest,
    HandshakeRequest,
    ListKeysRequest,
    StoreRequest,
    StoreStatus,
)
from maru.base.descriptors import fetch_board_descriptor
from maru.base.relay.relay import MAX_PENDING_HANDSHAKES
from maru.kv_events import open_mirror
from maru.kv_events._messages import Snapshot, pack_request
from maru.testing import open_test_server
from maru.transport import ChannelConnection
from offload.client import CannotHandOver, DaemonBusy, SharedMemory, open_connection
from offload.daemon import _messages as messages
from offload.daemon._messages import MAX_FRAME_BYTES, Refused, TensorLayout
from tests.daemon.test_daemon import cache_of, registered, until
from tests.daemon.test_hostile import Raw, serves, silent_connections
from tests.maru.test_relay import claim
from tests.support import longest_step
from tests.support.daemons import SIZE, daemon, engine_config
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


@fills("connections that wait for the end of a session", max_sessions=4, block_bytes=SIZE)
async def fill_successors(server, stack):
    over = trio.Event()
    stack.callback(over.set)
    server._service.reads.let_go = lambda hit: over.wait()
    first = stack.enter_context(Raw(server))
    token = (await first.hello()).token
    first.send(messages.Lookup(2, [b"key"], 1.0))
    await first.answer()
    waiting = [stack.enter_context(Raw(server)) for _ in range(6)]
    for before, raw in zip([first, *waiting], waiting, strict=False):
        raw.send(messages.Hello(1, 1, 1, "raw", previous=token))
        assert await before.is_over()
    waiting[-1].send(messages.Hello(2, 1, 1, "raw", previous=token))
    refused = await waiting[-1].answer()
    assert refused.seq == 1 and "a later hello" in refused.text
    assert server.statistics()["connections"] == 1
    over.set()
    assert isinstance(await waiting[-1].answer(), messages.Welcome)


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
    await refusals(server, stack, lambda seq: messages.Exists(seq, [b"key"]), 10, "requests are in progress")


@fills("holds", block_bytes=SIZE)
async def fill_holds(server, stack):
    lower(server, holds=4)
    await refusals(server, stack, lambda seq: messages.Lookup(seq, [b"key"], 1.0), 10, "at most 4 holds")


@fills("blocks in the pipeline that wait for a signal", block_bytes=SIZE)
async def fill_budget(server, stack):
    pipeline = server.engine.pipelines[0]
    budget = pipeline.config.budget_blocks
    for at in range(2):
        connection = await stack.enter_async_context(open_connection(server.url))
        number = await registered(connection, cache_of())
        for start in range(0, budget, 32):
            keys = [b"%d of %d" % (start + one, at) for one in range(32)]
            args = number, keys, messages.packed(range(32)), True
            connection.tell(lambda seq, args=args: messages.Store(seq, *args))
        await connection.ask(messages.Status, messages.State)
    assert [session.waiting for session in server.sessions] == [budget // 2, budget // 4]
    assert pipeline.statistics().used_blocks == budget * 3 // 4


@fills(
    "held blocks of a tier that is no page store",
    block_bytes=SIZE,
    engine=engine_config(tiers={"host": {"type": "memory", "capacity_bytes": 32 * SIZE}}),
)
async def fill_held_blocks(server, stack):
    connection = await stack.enter_async_context(open_connection(server.url))
    number, keys = await registered(connection, cache_of()), [b"block %d" % at for at in range(32)]
    await connection.ask(lambda seq: messages.Store(seq, number, keys, messages.packed(range(32))), messages.Stored)
    found = []
    for start, stop in ((0, 10), (0, 10), (0, 32), (20, 32), (0, 16)):
        part = keys[start:stop]
        answer = await connection.ask(lambda seq, part=part: messages.Lookup(seq, part, 60.0), messages.Found)
        found.append(answer.blocks)
    assert found == [10, 10, 16, 0, 16]  # the same blocks count once
    assert server.engine.statistics().tiers["host"].held_blocks == 16
    assert next(iter(server.sessions)).held == sum(found)


@fills("announcements of pages", block_bytes=SIZE)
async def fill_announcements(server, stack):
    lower(server, holds=0)
    await refusals(server, stack, lambda seq: messages.ReserveWrite(seq, [b"key"]), 2, "at most 0 reservations")
    lower(server, holds=16)


@fills("bytes of requests, holds, announcements", block_bytes=SIZE)
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
    await hand_over_until_refused(server, stack, file, "descriptors exceed the bounds: this session has 4")


@fills("mappings of memory")
async def fill_mappings(server, stack):
    lower_door(server._service.shares.mappings, 8)
    await hand_over_until_refused(server, stack, SharedMemory(SIZE), "mappings exceed the bounds: this session has")


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
    await register_cut(server, stack, 3, DaemonBusy, "pieces of blocks exceed the bounds: this session has")


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


def a_client(server, **knobs):
    return maru.MaruHandler(server_url=server.endpoints[-1], pool_size=1 << 20, chunk_size_bytes=SIZE, **knobs)


async def serves_clients(server):
    async with a_client(server) as handler:
        assert not await handler.exists("key")


async def read_index(server, handler):
    os.close(await server._indexes.open_fd(handler._state.token, False))


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


def ask_from_thread(server, stack):
    """A connection to a page store that says whatever a test wants."""
    connection = ChannelConnection(server.channel_path)
    stack.callback(connection.close)
    return longest_step.Stage(longest_step.Steps(), connection, 0)


async def fill_returns(server, stack):
    directory = server._storage.directory
    directory._limits = attrs.evolve(directory._limits, max_unacknowledged=8)

    def store_and_have_dropped():
        asks = ask_from_thread(server, stack)
        owner, region = asks.session("k", 8)
        other, _ = asks.session("other")
        asks.ask(Code.DROP, DropRequest(other, 0, 1, [f"k{at}" for at in range(8)]))
        asks.ask(Code.BEAT, BeatRequest(owner, 0, 0))
        return [
            asks.ask(Code.STORE, StoreRequest(token, 0, 1 << 20, of, ["new"], [9], 1, None)).statuses
            for token, of in ((owner, region), asks.session("o", 1))
        ]

    mine, _ = await trio.to_thread.run_sync(store_and_have_dropped)
    assert list(mine) == [StoreStatus.BUSY]


async def fill_readers(server, stack):
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr("maru.kv_events._publisher._MOST_READERS", 2)
    patch.setattr("maru.kv_events._log.MOST_HASHES", 1)  # or else ZeroMQ's queue takes all of an answer
    keys = [f"{at:01000x}" for at in range(4_096)]

    def store_keys():
        asks = ask_from_thread(server, stack)
        owner, region = asks.session("k", 1)
        for at in range(0, len(keys), 512):
            some = list(range(at + 1, at + 513))
            asks.ask(Code.STORE, StoreRequest(owner, 0, at + 2, region, keys[at : at + 512], some, 1, None))

    await trio.to_thread.run_sync(store_keys)
    context = stack.enter_context(zmq.Context())
    for _ in range(6):
        mute = stack.enter_context(context.socket(zmq.DEALER))
        mute.linger, mute.rcvhwm = 0, 1
        mute.connect(server.kv_events[1])
        mute.send_multipart(pack_request(Snapshot()))
    await until_of_pools(lambda: server.statistics().kv_events.given_up >= 4)  # two have the places
    async with open_mirror(*server.kv_events) as mirror:
        await mirror.wait(lambda mirror: mirror.is_current and mirror.prefix([bytes.fromhex(keys[-1])]) == 1)


async def dial_tcp(server, stack, count):
    host, _, port = server.endpoints[0].removeprefix("tcp://").rpartition(":")
    for _ in range(count):
        peer = await trio.to_thread.run_sync(socket.create_connection, (host, int(port)))
        yield stack.enter_context(peer)


async def fill_relay(server, stack):
    async for peer in dial_tcp(server, stack, 8):
        peer.sendall(claim(b""))
    await until_of_pools(lambda: server.statistics().relay.crowded == 6)
    assert server.statistics().relay.relayed == 2


async def fill_handshakes(server, stack):
    async for _ in dial_tcp(server, stack, MAX_PENDING_HANDSHAKES + 8):
        pass
    await until_of_pools(lambda: server.statistics().relay.malformed == 8)


async def fill_sessions_of_page_store(server, stack):
    def shake_hands():
        asks = ask_from_thread(server, stack)
        return [
            asks.ask(Code.HANDSHAKE, HandshakeRequest(instance_id=f"i{at}", extensions=1, lease=3600.0))
            for at in range(80)
        ]

    answers = await trio.to_thread.run_sync(shake_hands)
    assert [type(one) for one in answers].count(ErrorReply) == 80 - 16


async def fill_pins(server, stack):
    stack.enter_context(pytest.MonkeyPatch.context()).setattr("maru._server.service._MOST_PINS", 64)

    def pin():
        asks = ask_from_thread(server, stack)
        _, _ = asks.session("k", 16)
        keys = [f"k{at}" for at in range(16)]
        readers = [asks.session(f"reader{at}")[0] for at in range(4)]
        return [asks.ask(Code.FIND, FindRequest(reader, 0, keys[:4], True, False)) for reader in readers]

    answers = await trio.to_thread.run_sync(pin)
    assert [type(one) for one in answers].count(ErrorReply) == 2


async def fill_answers_of_page_store(server, stack):
    directory = server._storage.directory

    def drop():
        asks = ask_from_thread(server, stack)
        token, _ = asks.session("k")
        for at in range(80):
            asks.ask(Code.DROP, DropRequest(token, 0, 1 + at, [f"missing{number}" for number in range(512)]))
        return token

    token = await trio.to_thread.run_sync(drop)
    answers = directory._state.sessions[directory.session_of(token)].answers
    assert len(answers) == 64 and sum(map(len, answers.values())) <= 64 << 10


async def fill_listings(server, stack):
    def list_keys():
        owner = ask_from_thread(server, stack)
        owner.session("k", 2_048)
        listers = [ask_from_thread(server, stack) for _ in range(5)]
        tokens = [asks.session(f"lister{at}")[0] for at, asks in enumerate(listers)]
        pages = [
            asks.ask(Code.LIST_KEYS, ListKeysRequest(token, 0, "", 0))
            for asks, token in zip(listers, tokens, strict=True)
        ]
        return pages, listers[0].ask(Code.LIST_KEYS, ListKeysRequest(tokens[0], 0, "", 1024))

    (*pages, refused), oldest = await trio.to_thread.run_sync(list_keys)
    assert all(page.cursor for page in pages) and isinstance(refused, ErrorReply) and not isinstance(oldest, ErrorReply)


async def fill_entries(server, stack):
    def store():
        asks = ask_from_thread(server, stack)
        token, region = asks.session("k", 32)
        some = list(range(32, 48))
        return asks.ask(
            Code.STORE, StoreRequest(token, 0, 99, region, [f"k{at}" for at in some], some, 1, None)
        ).statuses

    assert not any(await trio.to_thread.run_sync(store))
    assert len(server._storage.directory) == 32


async def fill_indexes(server, stack):
    least = await stack.enter_async_context(a_client(server, tenant="a"))
    await read_index(server, least)
    server._indexes._most_bytes = 1 << 20
    other = await stack.enter_async_context(a_client(server, tenant="b"))
    with pytest.raises(maru.CannotMap, match="all indexes together have at most"):
        await read_index(server, other)
    assert not await other.exists("key")  # by message


async def fill_boards(server, stack):
    stack.enter_context(pytest.MonkeyPatch.context()).setattr("maru._index.boards.MOST_BOARDS", 32)

    def get_boards():
        asks = ask_from_thread(server, stack)
        tokens = [asks.session(f"reader{at}")[0] for at in range(5)]
        for token in tokens[:4]:
            os.close(fetch_board_descriptor(server.descriptors_path, token, 10.0))
        asks.ask(Code.CLOSE, CloseRequest(tokens[0], 0))  # its board counts until its lease is over
        with pytest.raises(maru.ServerRefused, match="4 sessions of one connection have a board already, of at most 4"):
            fetch_board_descriptor(server.descriptors_path, tokens[4], 10.0)
        assert not asks.ask(Code.FIND, FindRequest(tokens[4], 0, ["key"], True, False)).positions  # by message

    await trio.to_thread.run_sync(get_boards)
    good = await stack.enter_async_context(a_client(server))
    os.close(await server._indexes.open_fd(good._state.token, True))


OF_PAGE_STORES = {
    "unacknowledged returns of a session": (fill_returns, {}),
    "readers of KV events that are answered": (fill_readers, {"kv_events": "ipc"}),
    "connections at the TCP relay of a page store": (fill_relay, {"host": "127.0.0.1", "max_connections": 4}),
    "handshakes at the TCP relay of a page store": (fill_handshakes, {"host": "127.0.0.1"}),
    "connections at channel.sock of a page store": (fill_channel, {"max_connections": 4}),
    "connections at descriptors.sock of a page store": (fill_region_descriptors, {}),
    "connections to the resource manager of a page store": (
        fill_resource_manager,
        {"host": "127.0.0.1", "max_connections": 4},
    ),
    "sessions of a page store": (fill_sessions_of_page_store, {"max_sessions": 64}),
    "pins of a page store, some 100 bytes each": (fill_pins, {}),
    "remembered answers of a page store": (fill_answers_of_page_store, {}),
    "listings of keys of a page store, 8 bytes a key": (fill_listings, {}),
    "keys of a page store": (fill_entries, {"max_entries": 64, "quota_instance_bytes": "1 MiB"}),
    "bytes of the shared indexes of a page store": (fill_indexes, {}),
    "boards of a page store": (fill_boards, {}),
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
