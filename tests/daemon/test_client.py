"""What a client does at the end of a request: a load that is cancelled, a release whose answer nothing waits for."""

import contextlib
import gc
import os
import subprocess
import threading
from types import SimpleNamespace

import attrs
import pytest
import trio
import trio.testing

from backends.abc import LOADED, STORED, RoomRequest, Unproven
from backends.base.forwarding import ForwardingTier
from backends.base.slots import PagesDestination
from backends.base.threads import leave_after, run_in_thread_or_leave
from backends.memory import MemoryTier
from backends.testing import FakeTier
from maru.transport import ChannelClient
from offload import BreakerConfig, HealthState, open_engine
from offload.client import (
    DaemonBusy,
    DaemonRefused,
    DaemonTier,
    DaemonUnavailable,
    SharedMemory,
    open_client,
    open_connection,
)
from offload.daemon._messages import (
    Counters,
    Done,
    Found,
    Load,
    Loaded,
    Lookup,
    Refusal,
    Release,
    Signal,
    Stats,
    Store,
    TensorLayout,
    encode,
    packed,
)
from offload.daemon._tenants import Tenants
from tests.daemon.test_daemon import KEYS, begin_store, cache_of, held, registered, store, until
from tests.support.daemons import AT_ONCE, PATIENCE, SIZE, daemon, engine_config
from tests.support.held_by_process import no_descriptor_left, refuse_memory

SHORT, LONG = 0.05, 60.0
MANY = [b"%040d" % number for number in range(8_000)]
"""Keys that make a frame too large for a packet."""


async def test_a_cancel_in_the_tick_of_the_loss_keeps_no_slot(tmp_path):
    async with (
        daemon(str(tmp_path / "run"), block_bytes=SIZE) as server,
        DaemonTier(server.url, block_bytes=SIZE) as client,
    ):
        host = MemoryTier(16 * SIZE, SIZE)
        for key in KEYS:
            host.put(key, bytes(SIZE))

        async def transfer():
            reservation = await client.reserve(RoomRequest(KEYS, SIZE, "fail"))
            await reservation.transfer(host, host.upgrade(KEYS))

        await transfer()
        staging, connection = client._its_places().staging, client.connection
        free, end_lost = len(staging._free), connection._end_lost
        server._service._handlers[Store] = lambda session, request: None  # it does not answer
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer)
            await until(lambda: len(staging._free) < free and connection._calls)

            def cancel_first(*args):
                nursery.cancel_scope.cancel()
                end_lost(*args)

            connection._end_lost = cancel_first
            [session] = server._service.sessions
            server._service._hang_up(session.peer)
        await until(lambda: len(staging._free) == free)


async def stored(connection, cache):
    """Store all keys; the number of the cache, and a hold on them."""
    number = await registered(connection, cache)
    async with trio.open_nursery() as nursery:
        seq, answers = await begin_store(nursery, connection, number, KEYS)
        await connection.ask(lambda s: Signal(s, seq), Done)
        await until(lambda: answers)
    return number, (await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)).hold


def load(connection, number, hold, leave_after):
    ids = packed(range(8, 16))
    return connection.ask_to_the_end(
        lambda seq: Load(seq, hold, number, ids), Loaded, session=connection.session, leave_after=leave_after
    )


def loads(server):
    """The loads that are under way; a cancel that is confirmed later is none."""
    return [one for session in server._service.sessions for one in session.requests.values() if one.cache]


def slow_loads(server, *, shielded=False):
    """Have loads of this daemon wait for the second event, even when they are cancelled if they are shielded."""
    began, end = trio.Event(), trio.Event()

    async def wait(hit, destination, session, request):
        with trio.CancelScope(shield=shielded):
            began.set()
            await end.wait()

    server._service.reads._load = wait
    return began, end


async def test_a_load_that_is_cancelled_returns_when_the_daemon_has_ended_it(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began, _ = slow_loads(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, connection, number, hold, LONG)
            await began.wait()
            assert len(loads(server)) == 1
            nursery.cancel_scope.cancel()
        assert not loads(server)
        assert (await load_again(server, connection, number, hold)).loaded == len(KEYS)


async def load_again(server, connection, number, hold):
    del server._service.reads._load  # the method of its class again
    return await load(connection, number, hold, LONG)


async def test_a_load_can_be_cancelled_at_every_step_and_the_next_one_is_right(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        cache = cache_of()
        number, hold = await stored(connection, cache)
        for step in range(30):
            done = []
            async with trio.open_nursery() as nursery:

                async def run(done=done):
                    done.append(await load(connection, number, hold, LONG))

                nursery.start_soon(run)
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert not loads(server)
            if done:
                break
        assert done and step > 1
        assert (await load(connection, number, hold, LONG)).loaded == len(KEYS)
        assert cache.read(8) == cache.read(0)


async def test_an_answer_that_cannot_be_read_ends_its_session(path):
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        before = connection.session
        send = server._service._send_frame
        server._service._send_frame = lambda peer, frame: send(peer, b"\xc1")
        with trio.fail_after(PATIENCE), pytest.raises(DaemonUnavailable):
            await connection.ask(lambda seq: Lookup(seq, KEYS, 1.0), Found)
        server._service._send_frame = send
        assert await connection.wait_session() is not before


async def test_hold_of_a_cancelled_lookup_is_released_before_a_heartbeat(path):
    async with daemon(path, lease=3600.0) as server, open_connection(server.url) as connection:
        _, hold = await stored(connection, cache_of())
        connection.tell(lambda seq: Release(seq, [hold]))

        async def look_up():
            found = await connection.ask(lambda seq: Lookup(seq, KEYS, 1.0), Found)
            connection.tell(lambda seq: Release(seq, [found.hold]))

        for step in range(8):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look_up)
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            with trio.fail_after(PATIENCE):
                await until(lambda: "holds" not in held(server))


async def test_next_store_has_the_slots_of_a_cancelled_one_before_a_heartbeat(path):
    async with daemon(path, lease=3600.0, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        staging, source = client._its_places().staging, MemoryTier(16 * SIZE, SIZE)
        staging._free = staging._free[:2]
        await (await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))).transfer(
            source, range(2)
        )  # which registers it
        for step in range(30):
            reservation = await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reservation.transfer, source, range(2))
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            with trio.fail_after(PATIENCE):
                staging.give_back(await staging.take(2, 2))


async def test_a_load_whose_end_is_not_told_in_time_is_unproven(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began, end = slow_loads(server, shielded=True)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def run():
                    with pytest.raises(Unproven):
                        await load(connection, number, hold, SHORT)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(run)
                await began.wait()
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught and len(loads(server)) == 1
        end.set()


class Left(ForwardingTier):
    """Memory whose copies stand still, and are left in their threads when they are cancelled."""

    def __init__(self):
        super().__init__(MemoryTier(1 << 20, SIZE))
        self.begun, self.end, self.is_ill = trio.Event(), threading.Event(), False

    async def _stand_still(self):
        self.begun.set()
        with leave_after(0.01):
            await run_in_thread_or_leave(self.end.wait, PATIENCE)

    async def load(self, lease, destination):
        if self.is_ill:
            await self._stand_still()
        return await super().load(lease, destination)

    async def reserve(self, request):
        return LeftReservation(self, await super().reserve(request))

    def reserve_nowait(self, request):
        return LeftReservation(self, super().reserve_nowait(request))


class LeftReservation:
    def __init__(self, tier, inner):
        self.tier, self.inner = tier, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def transfer(self, source, refs):
        if self.tier.is_ill:
            await self.tier._stand_still()
        return await self.inner.transfer(source, refs)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("verb", ["load", "store"])
async def test_a_copy_left_by_a_lost_session_is_unproven(path, verb, is_shared):
    """The daemon gives the session back, and has left the copy: its client is told when it comes again."""
    tier = Left()
    config = attrs.evolve(AT_ONCE, drain_timeout=0.05, transfer_timeout=0.1)
    engine = engine_config(tiers={"slow": tier}, pipeline=config)
    async with daemon(path, engine=engine, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        cache = cache_of() if is_shared else MemoryTier(16 * SIZE, SIZE)
        errors = []

        async def transfer(keys):
            reservation = await client.reserve(RoomRequest(keys, SIZE, "evict"))
            return await reservation.transfer(cache, range(len(keys)))

        async def work():
            try:
                if verb == "store":
                    await transfer(KEYS[4:])
                else:
                    to = cache.into([8, 9]) if is_shared else PagesDestination.over([bytearray(SIZE), bytearray(SIZE)])
                    async with await client.pin(KEYS[:2]) as lease:
                        await client.load(lease, to)
            except Unproven as exc:
                errors.append(exc)

        assert await transfer(KEYS[:2]) == [STORED] * 2
        free = sorted(client._its_places().staging._free)
        tier.is_ill = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                await tier.begun.wait()
                [session] = server._service.sessions
                server._service._hang_up(session.peer)
                server._service.end(session, "a test")
                with trio.fail_after(PATIENCE):
                    await until(lambda: errors)
            used = 0 if is_shared else len(KEYS[4:]) if verb == "store" else 2
            assert len(client._its_places().staging._free) == len(free) - used  # the copy may still use them
        finally:
            tier.end.set()


async def test_a_cancelled_load_that_was_left_is_unproven(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began = trio.Event()

        async def leave(hit, destination, session, request):
            try:
                began.set()
                await trio.sleep_forever()
            finally:
                session.requests[request.seq].unproven = True
                server._service._send(session.peer, Loaded(request.seq, server.epoch, 0, [], [], unproven=True))

        server._service.reads._load = leave
        async with trio.open_nursery() as nursery:

            async def run():
                with pytest.raises(Unproven):
                    await load(connection, number, hold, LONG)

            nursery.start_soon(run)
            await began.wait()
            nursery.cancel_scope.cancel()


async def test_a_load_left_by_its_cancel_is_unproven(path, monkeypatch):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began = trio.Event()

        async def leave(hit, destination, **options):
            began.set()
            try:
                await trio.sleep_forever()
            except trio.Cancelled as cancelled:  # as a nursery has it, in which one of several copies is left
                raise BaseExceptionGroup("copies", [cancelled, Unproven("left")]) from None

        monkeypatch.setattr(server._service.reads._engine.require(), "load", leave)
        async with trio.open_nursery() as nursery:

            async def run():
                with pytest.raises(Unproven):
                    await load(connection, number, hold, LONG)

            nursery.start_soon(run)
            await began.wait()
            nursery.cancel_scope.cancel()
        [session] = server._service.sessions
        assert len(session.unproven) == 1


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(OSError("a disk"), False), (Unproven("left"), True), (ExceptionGroup("", [Unproven("left"), OSError()]), True)],
    ids=["failed", "unproven", "group"],
)
async def test_slots_stay_taken_behind_a_copy_that_was_left(path, monkeypatch, error, is_kept):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as client:

        async def fail(self, *arguments):
            raise error

        monkeypatch.setattr("offload.client._tier.StoreCopy.into", fail)
        staging = client._its_places().staging
        before = len(staging._free)
        reservation = await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))
        with contextlib.suppress(Exception):
            await reservation.transfer(MemoryTier(16 * SIZE, SIZE), range(2))
        assert len(staging._free) == before - 2 * is_kept


async def test_slot_of_damaged_block_goes_back_although_the_store_is_refused(path):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        staging, source = client._its_places().staging, FakeTier(16, SIZE)
        source.fill(KEYS)
        await client._have_opened(client._session())
        before = len(staging._free)
        source.damage(KEYS[0])
        server.sessions.limits = attrs.evolve(server.sessions.limits, bytes=10)
        async with await source.pin(KEYS[:2]) as lease:
            reservation = await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))
            with pytest.raises(DaemonBusy):
                await reservation.transfer(source, lease.refs)
        assert len(staging._free) == before


async def test_an_engine_that_waits_for_its_session_is_judged_again(path):
    """Its credential may be taken away while the session before is given back."""
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began, end = slow_loads(server, shielded=True)
        errors = []

        async def run():
            with pytest.raises(DaemonUnavailable) as caught:
                await load(connection, number, hold, LONG)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await began.wait()
            [session] = server._service.sessions
            server._service._hang_up(session.peer)
            await until(lambda: session.when_over)  # its next hello waits
            server._service.tenants = Tenants({"a": b"secret of a"})
            end.set()
            with pytest.raises(DaemonRefused, match="no tenant has this credential"), trio.fail_after(PATIENCE):
                await connection.wait_session()
            assert connection.sessions == 1
            server._service.tenants = Tenants()
            await until(lambda: errors)
        assert connection.sessions == 2


async def test_another_start_of_a_daemon_proves_nothing(path):
    """Only the end of its process says that a daemon of before has left this process's memory alone."""
    async with daemon(path) as server, open_connection(server.url) as connection:
        with subprocess.Popen(["sleep", "600"]) as process:  # noqa: ASYNC220
            calls = []
            for descriptor in (-1, os.pidfd_open(process.pid)):
                before = attrs.evolve(connection.session, epoch=server.epoch + 1, process=descriptor)
                number, call = await connection._begin(lambda seq: Release(seq, [0]), None, touches_memory=True)
                del connection._calls[number]  # lost with its session
                call.session = before
                connection._unproven.append(call)
                connection._nursery.start_soon(connection._until_dead, before)
                calls.append(call)
            [session] = server._service.sessions
            server._service._hang_up(session.peer)
            connection._channel.look()  # else it would be found with the next sign of life
            await until(lambda: connection.sessions == 2)
            with pytest.raises(Unproven):
                await calls[0].expected.wait()
            await trio.sleep(0.05)
            assert not calls[1].expected.done
            process.kill()
            with pytest.raises(DaemonUnavailable):
                await calls[1].expected.wait()


async def test_a_load_is_unproven_when_the_connection_is_closed_under_it(path):
    async with daemon(path) as server, trio.open_nursery() as nursery:
        errors = []

        async def run(*arguments):
            try:
                await load(*arguments)
            except Unproven as exc:
                errors.append(exc)

        async with open_connection(server.url) as connection:
            number, hold = await stored(connection, cache_of())
            began, _ = slow_loads(server)
            nursery.start_soon(run, connection, number, hold, LONG)
            await began.wait()
        await until(lambda: errors)
        await until(lambda: held(server) == {})


async def test_a_large_load_can_be_cancelled_at_every_step_and_leaves_nothing_registered_that_is_not_used(
    path, monkeypatch
):
    """It has an area of its own, which is registered at its first use."""
    monkeypatch.setattr("offload.client._places.STAGING_BYTES", len(KEYS) * SIZE)

    async def read(tier, done):
        async with await tier.pin(KEYS) as lease:
            done += await tier.load(lease, PagesDestination.over([bytearray(SIZE) for _ in KEYS]))

    async with daemon(path) as server:
        cache = cache_of()
        for step in range(100):
            async with open_client(cache, server.url) as engine:
                if not step:
                    await store(engine, cache)
                tier, done = engine.tiers["daemon"], []
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, tier, done)
                    for _ in range(step):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                over = bool(done)
                await read(tier, again := [])
                assert again == [LOADED] * len(KEYS)
                at_rest = {"caches": 1 + (not step), "memories": 0}  # the area of the load, and the cache of the store
                with trio.fail_after(5):
                    await until(lambda wanted=at_rest: wanted.items() <= server.statistics().items())
            if over:
                break
        assert over and step > 5


class TwoMemories:
    """A cache of two tensors, each in a memory of its own."""

    def __init__(self):
        self.memories = [SharedMemory(8 * SIZE) for _ in range(2)]

    def description(self):
        half = SIZE // 2
        tensors = [TensorLayout(at, 0, 1, [8, half], [half, 1], 0) for at in range(2)]
        return SimpleNamespace(tensors=tensors, memories=self.memories, cuda=())


async def test_a_store_that_finds_all_places_taken_is_busy(path, monkeypatch):
    monkeypatch.setattr("offload.client._places.MAX_PLACES", 2)
    source = MemoryTier(SIZE, SIZE)
    source.put(KEYS[0], bytes(SIZE))
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url, block_bytes=SIZE) as client:
        session = await client.connection.wait_session()
        caches = [cache_of(8) for _ in range(2)]
        for cache in caches:
            assert await client._its_places().cache_of(cache, session)
        reservation = await client.reserve(RoomRequest(KEYS[:1], SIZE, "fail"))
        with pytest.raises(DaemonBusy, match="caches are registered, and a store from another place needs one more"):
            await reservation.transfer(source, source.upgrade(KEYS[:1]))
        reservation.release()


async def test_memory_handed_over_in_part_is_used_by_the_next_attempt(path, monkeypatch):
    pytest.importorskip("torch")
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        place, connection, session = TwoMemories(), client.connection, client._session()
        hand_over, taken = connection.hand_over, []

        async def fail_once(descriptor, its_session):
            if len(taken) == 1:
                taken.append(0)
                raise OSError("no memory")
            taken.append(await hand_over(descriptor, its_session))
            return taken[-1]

        monkeypatch.setattr(connection, "hand_over", fail_once)
        with pytest.raises(DaemonUnavailable, match="no memory"):
            await client._its_places().cache_of(place, session)
        assert await client._its_places().cache_of(place, session)
        assert len(taken) == 3 and server.statistics()["memories"] == 0


@pytest.mark.parametrize("in_a_thread", [False, True])
async def test_a_cache_whose_owner_is_collected_is_given_back(path, in_a_thread):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            tier: DaemonTier = engine.tiers["daemon"]
            others = [cache_of()]
            async with await tier.pin(KEYS) as lease:
                assert await tier.load(lease, others[0].into(range(len(KEYS)))) == [LOADED] * len(KEYS)
            before = server.statistics()
            drop = others.clear  # the last reference to it
            await trio.to_thread.run_sync(drop) if in_a_thread else drop()
            gc.collect()
            with trio.fail_after(5):
                await until(lambda: server.statistics()["caches"] == before["caches"] - 1)
            async with await tier.pin(KEYS) as lease:  # that of the engine is there still
                assert await tier.load(lease, cache.into(range(len(KEYS)))) == [LOADED] * len(KEYS)


@contextlib.contextmanager
def full_channel(connection):
    """Whatever is sent over this connection finds no room."""

    def full(frames):
        raise trio.WouldBlock

    channel = connection._channel
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "send_nowait", full)
            yield
    finally:
        channel._flush()


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_release_reaches_the_daemon_and_is_not_waited_for(path, is_full, cancelled):
    """Where its frame finds no room, it is sent later."""
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            tier: DaemonTier = engine.tiers["daemon"]
            leases = [await tier.pin(KEYS) for _ in range(3)]
            assert server.statistics()["holds"] == 3
            with trio.fail_after(1), full_channel(tier.connection) if is_full else contextlib.nullcontext():
                for lease in leases:
                    with trio.CancelScope() as scope:
                        if cancelled:
                            scope.cancel()
                        await lease.release()
            await until(lambda: held(server) == {"caches": 1})


async def test_a_cancel_reaches_the_daemon_over_a_full_channel(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began, _ = slow_loads(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, connection, number, hold, LONG)
            await began.wait()
            with full_channel(connection):
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
        assert not loads(server)


async def test_no_request_overtakes_a_release(path):
    """Else a delete behind it finds the blocks held."""
    async with daemon(path) as server, open_connection(server.url) as connection:
        _, hold = await stored(connection, cache_of())
        with full_channel(connection):
            connection.tell(lambda seq: Release(seq, [hold]))
        counters = await connection.ask(Stats, Counters)
        assert counters.values["holds"] == 0


async def test_a_release_is_sent_if_room_came_at_once(path):
    """Not with the next heartbeat: the channel has room before the task that waits for some has begun."""
    async with daemon(path) as server, open_connection(server.url) as connection:
        _, hold = await stored(connection, cache_of())
        with full_channel(connection):
            connection.tell(lambda seq: Release(seq, [hold]))
        with trio.fail_after(1):
            await until(lambda: held(server) == {"caches": 1})


async def test_a_release_refused_for_now_is_sent_again(path, monkeypatch):
    async with daemon(path) as server, open_connection(server.url) as connection:
        _, hold = await stored(connection, cache_of())
        release, refused = server._service.reads.release, []

        def full(session, request):
            if len(refused) < 2:
                refused.append(request)
                raise Refusal("full", "a test")
            return release(session, request)

        monkeypatch.setitem(server._service._handlers, Release, full)
        connection.tell(lambda seq: Release(seq, [hold]))
        with trio.fail_after(PATIENCE):
            await until(lambda: held(server) == {"caches": 1})
        assert len(refused) == 2


async def test_nothing_waits_for_room_into_another_session(path):
    """Its numbers would name what is another hold or cache there."""
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        errors, asked = [], []
        server._service.reads._load = lambda *arguments: asked.append(arguments)

        async def run():
            with pytest.raises(DaemonUnavailable) as caught:
                await load(connection, number, hold, LONG)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            with full_channel(connection):
                nursery.start_soon(run)
                connection.tell(lambda seq: Release(seq, [hold]))
                await trio.testing.wait_all_tasks_blocked()
                [session] = server._service.sessions
                server._service._hang_up(session.peer)
                await until(lambda: connection.look() or connection.session is None)
            await until(lambda: errors)
        await connection.wait_session()
        assert connection.sessions == 2 and not asked and not connection._due


async def test_nothing_waits_for_room_to_a_daemon_that_is_gone(path):
    async with open_connection_to_daemon_that_ends(path) as (connection, end):
        errors = []

        async def run():
            with pytest.raises(DaemonUnavailable) as caught:
                await connection.ask(lambda seq: Lookup(seq, KEYS, 1.0), Found)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            with full_channel(connection):
                nursery.start_soon(run)
                await trio.testing.wait_all_tasks_blocked()
                await end()
                with trio.fail_after(PATIENCE):
                    await until(lambda: connection.look() or errors)


async def test_client_that_waits_for_place_outlives_daemon(path):
    """Its greeting is not sent twice: the daemon would refuse the second one as that of a connection with a session."""
    waiting = []

    async def wait_for_place():
        async with open_connection(f"ipc://{path}/daemon.sock") as connection:
            waiting.append(connection)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        async with daemon(path, max_sessions=1) as server, open_connection(server.url):
            nursery.start_soon(wait_for_place)
            await until(lambda: server.sessions.turned_away)
        async with daemon(path):
            with trio.fail_after(PATIENCE):
                await until(lambda: waiting and waiting[0].session is not None)
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def open_connection_to_daemon_that_ends(path):
    """A connection, and what ends its daemon."""
    ends, ended = trio.Event(), trio.Event()

    async def serve(*, task_status):
        async with daemon(path) as server:
            task_status.started(server)
            await ends.wait()
        ended.set()

    async def end():
        ends.set()
        await ended.wait()

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve)
        async with open_connection(server.url) as connection:
            yield connection, end
        ends.set()


class SlowSource(MemoryTier):
    """A copy out of it waits until it is told to go on."""

    def __init__(self, n):
        super().__init__(n * SIZE, SIZE)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def views(self, refs):
        return None

    def copy_out(self, refs, pages):
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        super().copy_out(refs, pages)


async def test_slots_of_cancelled_copy_go_back_once_it_is_over(path):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        staging, source = client._its_places().staging, SlowSource(16)
        before = len(staging._free)
        reservation = await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reservation.transfer, source, range(2))
            await until(source.begun.is_set)
            nursery.cancel_scope.cancel()
        assert len(staging._free) == before - 2  # a thread writes to them
        source.go_on.set()
        await until(lambda: len(staging._free) == before)


async def test_store_can_be_cancelled_at_every_step_and_keeps_no_slot(path):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        staging, source = client._its_places().staging, MemoryTier(16 * SIZE, SIZE)
        before = len(staging._free)
        for step in range(30):
            reservation = await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reservation.transfer, source, range(2))
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            with trio.fail_after(PATIENCE):
                await until(lambda: len(staging._free) == before)


async def test_store_cancelled_before_it_is_sent_gives_slots_back(path):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as client:
        staging = client._its_places().staging
        before = len(staging._free)
        source = MemoryTier(16 * SIZE, SIZE)
        first = await client.reserve(RoomRequest(KEYS[:2], SIZE, "evict"))
        await first.transfer(source, range(2))  # from here on the staging area is registered
        second = await client.reserve(RoomRequest(KEYS[2:4], SIZE, "evict"))
        with full_channel(client.connection):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(second.transfer, source, range(2))
                await until(lambda: client.connection._channel._room.statistics().tasks_waiting)
                nursery.cancel_scope.cancel()
        assert len(staging._free) == before


async def test_a_tier_without_a_size_of_blocks_has_that_of_its_daemon(path):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as tier:
        assert tier.block_bytes == SIZE  # else its first load makes a staging area of single bytes


async def test_an_engine_is_back_with_its_session_after_a_restart(path):
    """A breaker that has doubled its wait while the daemon was gone would stay away for as long again."""
    cache, breaker = cache_of(), BreakerConfig(max_faults=1, first_wait=30.0, longest_wait=60.0)

    async def serve_until(ends, *, task_status=trio.TASK_STATUS_IGNORED):
        async with daemon(path, block_bytes=SIZE) as server:
            task_status.started(server)
            await ends.wait()

    async with trio.open_nursery() as nursery:
        first, second = trio.Event(), trio.Event()
        server = await nursery.start(serve_until, first)
        async with open_client(cache, server.url, breaker=breaker) as engine:
            assert (await store(engine, cache)).status.value == "complete"
            first.set()
            with trio.fail_after(PATIENCE):
                gone = False
                while not gone:
                    async with await engine.lookup(KEYS) as hit:
                        gone = bool(hit.unavailable)
                assert engine.statistics().health["daemon"].state is HealthState.OPEN
                sessions = engine.tiers["daemon"].connection.sessions
                await nursery.start(serve_until, second)
                await until(lambda: engine.tiers["daemon"].connection.sessions > sessions)
                async with await engine.lookup(KEYS) as hit:
                    assert not hit.unavailable
            assert engine.statistics().health["daemon"].state is HealthState.CLOSED
            second.set()


async def test_a_daemon_whose_tiers_are_not_open_is_not_broken(path):
    """Its tiers may have kept blocks, so a lookup is no miss; and nothing is wrong with the daemon, so it is asked again."""
    async with (
        daemon(path) as server,
        open_engine(MemoryTier(8 * SIZE, SIZE), {"daemon": DaemonTier(server.url)}) as engine,
    ):
        for _ in range(5):
            async with await engine.lookup(KEYS) as hit:
                assert not hit.keys and "set block_bytes in [daemon]" in str(hit.unavailable["daemon"])
        assert engine.statistics().health["daemon"].state is HealthState.CLOSED
        cache = cache_of()
        async with open_client(cache, server.url) as other:
            await store(other, cache)
        async with await engine.lookup(KEYS) as hit:
            assert len(hit.keys) == len(KEYS)


async def test_memory_refused_for_a_large_request_fails_it_alone(path, monkeypatch):
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        session = connection.session
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse_memory)
            with pytest.raises(DaemonBusy, match="bytes cannot be sent now"):
                await connection.ask(lambda s: Lookup(s, MANY, 1.0), Found)
        assert (await connection.ask(lambda s: Lookup(s, MANY, 1.0), Found)).blocks == 0
        assert connection.session is session


async def test_memory_refused_for_a_large_request_that_has_waited_fails_it_alone(path, monkeypatch):
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        session, channel = connection.session, connection._channel
        monkeypatch.setattr(os, "memfd_create", refuse_memory)
        channel._outbox.append(encode(Stats(77)))  # what has found no room
        channel._outbox_bytes += len(channel._outbox[0])
        with pytest.raises(DaemonBusy, match="bytes cannot be sent now"), trio.fail_after(PATIENCE):
            await connection.ask(lambda s: Lookup(s, MANY, 1.0), Found)
        await connection.ask(Stats, Counters)
        assert connection.session is session


async def test_a_large_request_is_answered_without_descriptor_left(path):
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        session = connection.session
        with no_descriptor_left():
            for _ in range(3):
                assert (await connection.ask(lambda s: Lookup(s, MANY, 1.0), Found)).blocks == 0
        await connection.ask(Stats, Counters)
        assert connection.session is session


async def test_a_session_whose_daemon_cannot_be_watched_for_now_is_begun_again(path, monkeypatch):
    """Else the end of the daemon's process would prove nothing, and what a copy touches never be used again."""
    asked, open_peer = [], ChannelClient.open_peer

    def open_at_third(channel):
        asked.append(channel)
        with no_descriptor_left() if len(asked) < 3 else contextlib.nullcontext():
            return open_peer(channel)

    monkeypatch.setattr(ChannelClient, "open_peer", open_at_third)
    async with daemon(path, block_bytes=SIZE) as server, open_connection(server.url, wait=PATIENCE) as connection:
        assert (len(asked), connection.sessions) == (3, 1)
        assert connection.session.process >= 0
        await until(lambda: len(server._service.sessions) == 1)
        await stored(connection, cache_of())
