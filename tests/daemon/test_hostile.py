"""Engines that break every rule: each costs its own session, and the daemon serves the next one."""

import contextlib
import os
import random
import socket
import tempfile
import threading
from array import array

import attrs
import msgspec
import pytest
import trio

from maru.transport import ChannelConnection
from offload.client import (
    CannotHandOver,
    DaemonBusy,
    DaemonRefused,
    DaemonUnavailable,
    SharedMemory,
    open_client,
    open_connection,
)
from offload.daemon import _messages as messages
from offload.daemon._messages import Hello, Lookup, Refused, Welcome, decode_answer, encode, packed
from tests.daemon.test_daemon import KEYS, begin_store, cache_of, held, registered, store, until
from tests.daemon.test_messages import SAMPLES
from tests.support.daemons import PATIENCE, SIZE, daemon, engine_config


class Raw:
    """A connection that says whatever a test wants."""

    def __init__(self, server):
        self.connection = ChannelConnection(f"{server.directory}/daemon.sock")

    def send(self, message):
        self.connection.send(message if isinstance(message, bytes) else encode(message))

    async def answer(self):
        while True:
            try:
                return decode_answer(self.connection.receive())
            except BlockingIOError:
                await trio.sleep(1e-3)

    async def hello(self, **fields):
        self.send(Hello(1, 1, 1, "raw", **fields))
        return await self.answer()

    async def is_over(self):
        with trio.fail_after(10):
            while True:
                try:
                    self.connection.receive()
                except BlockingIOError:
                    await trio.sleep(1e-3)
                except OSError:
                    return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.connection.close()


async def serves(server):
    """Another engine is served as if nothing had happened."""
    cache = cache_of()
    async with open_client(cache, server.url) as engine:
        await store(engine, cache)
        async with await engine.lookup(KEYS) as hit:
            assert (await engine.load(hit, cache.into(range(8, 16)))).loaded == 8


async def test_another_version_is_refused_with_the_numbers_of_both_and_may_try_again(path):
    async with daemon(path) as server:
        with Raw(server) as raw:
            raw.send(Hello(1, 7, 9, "from the future"))
            refused = await raw.answer()
            assert isinstance(refused, Refused) and refused.kind == "version"
            assert (refused.oldest, refused.newest) == (messages.OLDEST, messages.VERSION) and "7 to 9" in refused.text
            assert isinstance(await raw.hello(), Welcome)


async def test_a_request_before_hello_is_refused(path):
    async with daemon(path) as server:
        with Raw(server) as raw:
            raw.send(Lookup(1, [b"key"], 1.0))
            assert (await raw.answer()).kind == "session"


async def test_a_frame_that_is_no_message_costs_its_connection_and_all_that_it_held(path):
    async with daemon(path) as server:
        async with open_connection(server.url) as connection:
            await registered(connection, cache_of())
            peer = server._service.sessions.by_token(connection.session.token).peer
            server._service.handle(peer, b"\xc1 no message")
            await until(lambda: held(server) == {})
            assert server.statistics()["bad_frames"] == 1
        await serves(server)


async def test_a_number_that_is_under_way_is_not_given_to_a_second_request(path):
    async with daemon(path) as server:
        with Raw(server) as raw:
            await raw.hello()
            raw.send(messages.Exists(2, [b"key"]))
            raw.send(messages.Cancel(2, []))
            assert await raw.is_over()
        assert server.statistics()["bad_frames"] == 1
        await serves(server)


async def test_mutated_requests_never_hurt_the_daemon(path):
    rng = random.Random(15)
    async with daemon(path) as server:
        await serves(server)
        for _ in range(60):
            with Raw(server) as raw:
                await raw.hello()
                for _ in range(20):
                    frame = bytearray(encode(rng.choice(SAMPLES)))
                    for _ in range(rng.randint(0, 3)):
                        frame[rng.randrange(len(frame))] = rng.randrange(256)
                    try:
                        raw.send(bytes(frame))
                    except OSError:
                        break  # it was hung up on
                    await trio.lowlevel.checkpoint()
        await until(lambda: not server.statistics()["sessions"])
        assert held(server) == {}
        await serves(server)


async def test_an_engine_that_never_reads_is_hung_up_on(path, monkeypatch):
    monkeypatch.setattr("offload.daemon._server._UNREAD_BYTES", 64 << 10)
    async with daemon(path) as server:
        with Raw(server) as raw:
            await raw.hello()
            seq = 1
            with trio.fail_after(30), pytest.raises(OSError):
                while True:
                    seq += 1
                    try:
                        raw.send(messages.Stats(seq))
                    except BlockingIOError:
                        await trio.sleep(1e-3)
                    await trio.lowlevel.checkpoint()
        await until(lambda: not server.statistics()["sessions"])
        await serves(server)


async def test_more_requests_than_a_session_may_have_are_refused(path, monkeypatch):
    async with daemon(path) as server, open_connection(server.url) as connection:
        cache = cache_of()
        number = await registered(connection, cache)
        server._service.sessions.limits = attrs.evolve(server._service.sessions.limits, requests=2)
        peer = server._service.sessions.by_token(connection.session.token).peer
        for seq in (1001, 1002):
            key = KEYS[seq - 1001]
            server._service.handle(peer, encode(messages.Store(seq, number, [key], messages.packed([0]), waits=True)))
        with pytest.raises(DaemonBusy, match="in progress, as many as are allowed"):
            await connection.ask(lambda s: Lookup(s, KEYS, 1.0), messages.Found)


async def test_a_session_with_all_the_requests_that_it_may_have_can_still_signal_cancel_and_release(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        cache = cache_of()
        number = await registered(connection, cache)
        session = server._service.sessions.by_token(connection.session.token)
        found = await connection.ask(lambda s: Lookup(s, KEYS, 1.0), messages.Found)
        server._service.sessions.limits = attrs.evolve(server._service.sessions.limits, requests=2)
        for seq in (1001, 1002):
            key = KEYS[seq - 1001]
            request = messages.Store(seq, number, [key], messages.packed([0]), waits=True)
            server._service.handle(session.peer, encode(request))
        assert (await connection.ask(lambda s: messages.Release(s, [found.hold]), messages.Done)).count == 1
        assert (await connection.ask(lambda s: messages.Signal(s, 1001), messages.Done)).count == 1
        assert (await connection.ask(lambda s: messages.Cancel(s, [1002]), messages.Cancelled)).count == 1
        await until(lambda: not session.requests)
        for seq in range(2001, 2006):  # nor may it have more of these than its bound
            server._service.handle(session.peer, encode(messages.Cancel(seq, [])))
        assert len(session.requests) == 4


async def test_engines_beyond_max_sessions_are_turned_away(path):
    async with daemon(path, max_sessions=1) as server:
        async with open_connection(server.url):
            with Raw(server) as raw:
                assert (await raw.hello()).kind == "full"
            assert server.statistics()["turned_away"] == 1
        await until(lambda: not server.statistics()["sessions"])
        await serves(server)


# --- memory -------------------------------------------------------------------------------------------------------------


def hand_over_raw(server, message, descriptors):
    """The answer to one packet at the socket that takes memory; ``None`` if it hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(f"{server.directory}/memory.sock")
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        sock.sendmsg([message], attached)
        answer = sock.recv(4096)
        return msgspec.msgpack.decode(answer) if answer else None


async def test_memory_is_taken_for_a_session_only_and_one_descriptor_at_a_time(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        token = connection.session.token
        shared = SharedMemory(SIZE)
        reading, writing = os.pipe()
        before = len(os.listdir("/proc/self/fd"))

        async def says(message, *descriptors):
            return await trio.to_thread.run_sync(hand_over_raw, server, message, list(descriptors))

        good = msgspec.msgpack.encode([token])
        fd = shared.descriptor
        assert (await says(msgspec.msgpack.encode([bytes(16)]), fd))[0] == -1
        assert (await says(good))[0] == -1
        assert (await says(good, fd, fd))[0] == -1
        assert await says(b"\xc1", fd) is None
        assert await says(msgspec.msgpack.encode([token, 1]), fd) is None
        assert (await says(good, reading))[0] == -1
        assert (await says(good, fd))[0] > 0
        with pytest.raises(CannotHandOver):
            await connection.hand_over(writing, connection.session)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # (the last connections are about to be closed)
        os.close(reading)
        os.close(writing)


async def handed_over(connection, memory, session):
    with contextlib.suppress(OSError):
        return await connection.hand_over(memory.descriptor, session)


async def test_a_file_system_that_does_not_answer_holds_up_no_daemon(path, monkeypatch, tmp_path):
    """Neither its attributes nor its end are asked for in the loop."""
    (tmp_path / "file").write_bytes(bytes(SIZE))
    loop, go_on, stuck = threading.get_ident(), threading.Event(), []
    fstat, close, device = os.fstat, os.close, os.stat(tmp_path).st_dev

    def no_fstat(descriptor):
        status = fstat(descriptor)
        assert status.st_dev != device
        return status

    def slow_close(descriptor):
        if fstat(descriptor).st_dev == device:
            assert threading.get_ident() != loop
            stuck.append(descriptor)
            assert go_on.wait(PATIENCE)
        close(descriptor)

    async with daemon(path) as server, open_connection(server.url) as connection:
        session = await connection.wait_session()
        shared = SharedMemory(SIZE)
        with (tmp_path / "file").open("r+b") as file, monkeypatch.context() as patch:
            patch.setattr("offload.daemon._handover._MOST", 3)
            patch.setattr(os, "fstat", no_fstat)
            patch.setattr(os, "close", slow_close)
            for _ in range(3):
                with pytest.raises(CannotHandOver, match="this descriptor is not memory"):
                    await connection.hand_over(file.fileno(), session)
            await until(lambda: len(stuck) == 3)
            with pytest.raises(OSError, match=r"closed the connection|reset"):
                await connection.hand_over(file.fileno(), session)
            go_on.set()
            with trio.fail_after(PATIENCE):
                while not await handed_over(connection, shared, session):  # noqa: ASYNC110 - until a thread ends
                    await trio.sleep(1e-3)
        await serves(server)
    assert len(stuck) == 3


async def test_an_engine_that_cuts_its_memory_off_in_the_middle_fails_alone(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        descriptor = os.memfd_create("cut", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 8 * SIZE)
        memory = await connection.hand_over(descriptor, connection.session)
        layout = [messages.TensorLayout(memory, 0, 1, [8, SIZE], [SIZE, 1], 0)]
        cache = (await connection.ask(lambda s: messages.RegisterKVCache(s, layout), messages.Registered)).cache
        ids = messages.packed(range(8))
        answer = await connection.ask(lambda s: messages.Store(s, cache, KEYS, ids), messages.Stored)
        assert answer.status == "complete"
        found = await connection.ask(lambda s: Lookup(s, KEYS, 1.0), messages.Found)
        os.ftruncate(descriptor, 2 * SIZE)
        load = await connection.ask(lambda s: messages.Load(s, found.hold, cache, ids), messages.Loaded)
        assert load.loaded == 0 and load.failed
        keys = [b"cut %d" % at for at in range(8)]
        answer = await connection.ask(lambda s: messages.Store(s, cache, keys, ids), messages.Stored)
        assert answer.status == "failed" and [at for at, _ in answer.failed] == list(range(2, 8))
        await serves(server)


async def test_a_cache_over_memory_of_another_session_is_refused(path):
    shared = SharedMemory(SIZE)
    async with daemon(path) as server, open_connection(server.url) as one, open_connection(server.url) as other:
        memory = await one.hand_over(shared.descriptor, one.session)
        layout = [messages.TensorLayout(memory, 0, 1, [1, SIZE], [SIZE, 1], 0)]
        with pytest.raises(DaemonRefused, match="not handed over"):
            await other.ask(lambda s: messages.RegisterKVCache(s, layout), messages.Registered)


@pytest.mark.parametrize("why", ["size", "unknown", "full", "requests", "draining"])
async def test_a_refused_registration_leaves_no_memory(path, why):
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        session, memory = await connection.wait_session(), SharedMemory(2 * SIZE)
        number = await connection.hand_over(memory.descriptor, session)
        assert server.statistics()["memories"] == 1
        size = 2 * SIZE if why == "size" else SIZE
        layout = [messages.TensorLayout(number, 0, 1, [1, size], [size, 1], 0)]
        if why == "unknown":
            layout.append(messages.TensorLayout(number + 1, 0, 1, [1, size], [size, 1], 0))
        elif why == "draining":
            server._service.draining = True
        elif why != "size":
            lowered = {"caches": 0} if why == "full" else {"requests": 0}
            server.sessions.limits = attrs.evolve(server.sessions.limits, **lowered)
        with pytest.raises((DaemonRefused, DaemonBusy, DaemonUnavailable)):
            await connection.ask(lambda s: messages.RegisterKVCache(s, layout), messages.Registered)
        assert server.statistics()["memories"] == 0
        await until(lambda: not server._service.shares.address_space.held)


# --- bounds that belong to a holder -------------------------------------------------------------------------------------


async def silent_connections(path, most):
    """So many connections that say nothing."""
    held = []
    for _ in range(most):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        held.append(sock)
        while sock.connect_ex(path):  # noqa: ASYNC110  # its backlog is full
            await trio.sleep(1e-3)
    return held


@pytest.mark.parametrize("name", ["daemon.sock", "memory.sock"])
async def test_silent_connections_keep_no_engine_out(path, name):
    async with daemon(path, max_sessions=4) as server:
        held = await silent_connections(f"{server.directory}/{name}", 80)
        await trio.sleep(0.05)
        await serves(server)
        assert server.statistics()["connections"] <= 8
        for sock in held:
            sock.close()


async def test_a_connection_without_a_session_ends_in_time(path, monkeypatch):
    monkeypatch.setattr("offload.daemon._server.ADMISSION", 0.2)
    async with daemon(path) as server:
        with Raw(server) as good, Raw(server) as silent:
            await good.hello()
            silent.send(messages.Status(1))  # answered without a session, and no reason to stay
            assert isinstance(await silent.answer(), messages.State)
            assert await silent.is_over()
            good.send(messages.Status(2))
            assert isinstance(await good.answer(), messages.State)


async def test_an_engine_collects_no_connections_by_new_sessions(path):
    async with daemon(path, max_sessions=2) as server:
        with Raw(server) as one, Raw(server) as two:
            first = await one.hello()
            assert isinstance(await two.hello(previous=first.token), Welcome) and await one.is_over()


async def test_one_session_leaves_descriptors_to_others(path, monkeypatch):
    monkeypatch.setattr("maru.base.process_limits.DESCRIPTORS._limit", lambda: 256)
    async with daemon(path) as server:
        async with open_connection(server.url) as greedy, open_connection(server.url) as good:
            with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
                file.truncate(SIZE)
                session, taken = await greedy.wait_session(), 0
                with pytest.raises(CannotHandOver, match="descriptors exceed the bounds: this session has"):
                    while taken < 256:
                        await greedy.hand_over(file.fileno(), session)
                        taken += 1
                assert taken == server._service.shares.descriptors.each < 100
                assert await good.hand_over(file.fileno(), await good.wait_session())
        await serves(server)
        await until(lambda: not server._service.shares.descriptors.held)


async def test_caches_that_are_being_registered_count(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        server.sessions.limits = attrs.evolve(server.sessions.limits, caches=4)
        session, memory, refused = await connection.wait_session(), SharedMemory(SIZE), []
        numbers = [await connection.hand_over(memory.descriptor, session) for _ in range(9)]

        async def register(number):
            layout = [messages.TensorLayout(number, 0, 1, [1, SIZE], [SIZE, 1], 0)]
            try:
                await connection.ask(lambda seq: messages.RegisterKVCache(seq, layout), messages.Registered)
            except DaemonBusy as exc:
                refused.append(exc)

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(register, number)
        assert server.statistics()["caches"] == 4 and len(refused) == 5
        [ours] = server.sessions
        assert not ours.pending_caches


async def test_a_cache_counts_until_it_is_unregistered(path):
    async with daemon(path) as server, open_connection(server.url) as connection, trio.open_nursery() as nursery:
        server.sessions.limits = attrs.evolve(server.sessions.limits, caches=1)
        await connection.wait_session()
        cache = await registered(connection, cache_of())
        [ours] = server.sessions
        await begin_store(nursery, connection, cache, KEYS)
        connection.tell(lambda seq: messages.UnregisterKVCache(seq, cache))  # waits for the store
        with pytest.raises(DaemonBusy, match="at most 1 caches"):
            await registered(connection, cache_of())
        assert not ours.caches
        nursery.cancel_scope.cancel()


async def test_pieces_of_one_frame_are_counted_before_the_work(path):
    async with daemon(path) as server:
        async with open_connection(server.url) as connection:
            session, memory = await connection.wait_session(), SharedMemory(2 << 16)
            number = await connection.hand_over(memory.descriptor, session)
            cut = messages.TensorLayout(number, 0, 1, [1, 1 << 16, 1], [0, 2, 1], 0)
            with pytest.raises(DaemonRefused, match=f"{512 << 16} pieces: at most 65536"):
                await connection.ask(lambda seq: messages.RegisterKVCache(seq, [cut] * 512), messages.Registered)
        await serves(server)


async def test_finely_cut_caches_of_one_session_are_bounded_together(path):
    async with daemon(path, block_bytes=1 << 16) as server, open_connection(server.url) as connection:
        session, cut = await connection.wait_session(), []
        shares = server._service.shares
        with pytest.raises(DaemonBusy, match="pieces of blocks exceed the bounds: this session has"):
            while len(cut) < 64:
                memory = SharedMemory(2 << 16)
                number = await connection.hand_over(memory.descriptor, session)
                tensor = messages.TensorLayout(number, 0, 1, [1, 1 << 16, 1], [1 << 17, 2, 1], 0)
                cut.append(
                    await connection.ask(
                        lambda seq, one=tensor: messages.RegisterKVCache(seq, [one]), messages.Registered
                    )
                )
        assert len(cut) == 2 and shares.pieces.held == 2 << 16
        await connection.ask(lambda seq: messages.UnregisterKVCache(seq, cut[0].cache), messages.Done)
        await until(lambda: shares.pieces.held == 1 << 16)


async def test_keys_that_wait_are_bounded_for_a_session(path):
    """Stores that wait for a signal keep their keys, and so do holds: as many as may be would be gigabytes."""
    async with daemon(path, block_bytes=SIZE) as server:
        sessions = server._service.sessions
        sessions.limits = attrs.evolve(sessions.limits, bytes=1 << 20, bytes_together=3 << 19)
        keys = [at.to_bytes(4, "big") * 100 for at in range(1_000)]
        with Raw(server) as raw, trio.fail_after(30):
            await raw.hello()
            for seq in range(2, 12):  # a tier that is asked answers later than the next request comes
                raw.send(messages.Exists(seq, keys))
            kinds = [await raw.answer() for _ in range(10)]
            refused = [one for one in kinds if isinstance(one, Refused)]
            assert refused and all(one.kind == "full" for one in refused)
            assert "of at most 1048576 in requests and holds" in refused[0].text
            await serves(server)
        await until(lambda: not len(sessions) and not sessions.bytes)


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda seq: messages.Load(seq, 1, 1, packed(range(32))), 32 * 64),
        (lambda seq: messages.Store(seq, 1, KEYS, packed(range(8)), depths=packed(range(8))), 24 * 64),
        (lambda seq: messages.RegisterKVCache(seq, [messages.TensorLayout(1, 0, 1, [1], [1], 0)] * 100), 100 << 10),
    ],
    ids=["load", "store", "register"],
)
async def test_columns_of_a_request_count_for_its_session(path, make, least):
    """Numbers take many times the bytes of their frame once they are unpacked."""
    async with daemon(path) as server, open_connection(server.url) as connection:
        await registered(connection, cache_of())
        server.sessions.limits = attrs.evolve(server.sessions.limits, bytes=least)
        with pytest.raises(DaemonBusy, match="a request of"):
            await connection.ask(make, messages.Loaded)
        assert not server.sessions.bytes


async def test_explanations_are_made_one_at_a_time(path, monkeypatch):
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        await connection.wait_session()
        engine, at_once, most = server._service.reads._engine.require(), 0, 0
        explain = engine.explain

        async def counted(*args, **options):
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await trio.lowlevel.checkpoint()
            at_once -= 1
            return await explain(*args, **options)

        monkeypatch.setattr(engine, "explain", counted)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(connection.ask, lambda seq: messages.Explain(seq, KEYS), messages.Explained)
        assert most == 1


async def test_a_hold_counts_until_it_is_released(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        sessions, cache = server._service.sessions, cache_of()
        await connection.wait_session()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
        await until(lambda: not sessions.bytes)
        held = await connection.ask(lambda seq: Lookup(seq, KEYS, 1.0), messages.Found)
        assert held.blocks == len(KEYS) and sessions.bytes > 64 * len(KEYS)
        nothing = await connection.ask(lambda seq: Lookup(seq, [b"not there"], 1.0), messages.Found)
        before = sessions.bytes
        await connection.ask(lambda seq: messages.Release(seq, [nothing.hold]), messages.Done)
        assert sessions.bytes == before
        await connection.ask(lambda seq: messages.Release(seq, [held.hold, held.hold]), messages.Done)
        assert sessions.bytes == 0


async def test_a_session_holds_at_most_half_of_a_tier(path):
    small = engine_config(tiers={"host": {"type": "memory", "capacity_bytes": 16 * SIZE}})
    keys = [b"key %d" % at for at in range(16)]

    async with daemon(path, engine=small) as server, open_connection(server.url) as connection:
        cache = cache_of()

        async def look_up(*numbers):
            wanted = [keys[at] for at in numbers]
            return await connection.ask(lambda seq: Lookup(seq, wanted, 1.0), messages.Found)

        await connection.wait_session()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache, keys)
            first = await look_up(*range(6))
            assert first.blocks == 6
            again = await look_up(*range(6), 6, 7, 8)  # those that are held already count once
            assert again.blocks == 8
            assert (await look_up(8)).blocks == 0
            await connection.ask(lambda seq: messages.Release(seq, [first.hold]), messages.Done)
            assert (await look_up(8)).blocks == 0 and (await look_up(0)).blocks == 1  # again has them still
            await connection.ask(lambda seq: messages.Release(seq, [again.hold]), messages.Done)
            assert (await look_up(*range(1, 9))).blocks == 7
            assert len((await store(engine, cache, [b"other %d" % at for at in range(8)])).completed) == 8


async def test_a_daemon_that_stood_still_ends_no_session(path, caplog):
    async with daemon(path) as server, open_connection(server.url) as connection:
        session = await connection.wait_session()
        service, ahead = server._service, [0.0]
        service.time._clock = lambda: trio.current_time() + ahead[0]
        ours = service.sessions.by_token(session.token)
        ahead[0] += 10 * ours.lease
        service.end_silent()
        assert not ours.ended and "the daemon was stopped for" in caplog.text
        for _ in range(int(ours.lease)):  # now it listens, and hears nothing
            ahead[0] += 1.0
            service.end_silent()
        assert ours.ended == "its engine was silent for 30 s"


@pytest.mark.parametrize("ends", [False, True])
async def test_a_lookup_near_half_of_a_tier_holds_nothing_once_cancelled(path, ends):
    small = engine_config(tiers={"host": {"type": "memory", "capacity_bytes": len(KEYS) * SIZE}})
    async with daemon(path, engine=small) as server, open_connection(server.url) as connection:
        session = await connection.wait_session()
        service, cache = server._service, cache_of()
        ours = service.sessions.by_token(session.token)
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
        first = await connection.ask(lambda seq: Lookup(seq, KEYS[:2], 1.0), messages.Found)
        service.handle(ours.peer, encode(Lookup(1_000_000, KEYS, 1.0)))
        assert list(ours.requests) == [1_000_000]
        if ends:
            service.end(ours, "a test")
        else:
            service.handle(ours.peer, encode(messages.Cancel(1_000_001, [1_000_000])))
        await until(lambda: not ours.requests)
        if not ends:
            await connection.ask(lambda seq: messages.Release(seq, [first.hold]), messages.Done)
        await until(lambda: not ours.holds)
        statistics = server.engine.statistics()
        assert (statistics.open_hits, statistics.tiers["host"].held_blocks) == (0, 0)


@pytest.mark.parametrize("ends", [False, True])
async def test_many_holds_are_released_in_steps(path, monkeypatch, ends):
    monkeypatch.setattr("offload.daemon._reads._RELEASED", 2 * len(KEYS))
    async with daemon(path) as server, open_connection(server.url) as connection:
        session = await connection.wait_session()
        ours, cache = server._service.sessions.by_token(session.token), cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
        holds = [(await connection.ask(lambda seq: Lookup(seq, KEYS, 1.0), messages.Found)).hold for _ in range(5)]
        engine = server.engine
        server._service.handle(ours.peer, encode(messages.Release(1_000_000, [*holds, *holds])))
        assert not ours.holds and engine.statistics().open_hits == 3
        if ends:
            server._service.end(ours, "a test")
        await until(lambda: not ours.requests)
        assert engine.statistics().open_hits == 0 and engine.statistics().tiers["host"].held_blocks == 0
