"""A daemon and its engines in one trio run: what is stored is found and loaded again, and what ends gives back what it held."""

import contextlib
import errno
import threading

import pytest
import trio
import trio.testing

import offload
from backends.abc import Deletion
from backends.base.slots import PagesDestination
from backends.memory import HostPages, MemoryTier
from backends.testing import FakeTier, payload_of
from maru import ServerConfig
from offload import NO_WAIT, BatchConfig, EngineConfig, HealthState, PipelineConfig, Status
from offload.client import (
    DaemonRefused,
    DaemonTier,
    DaemonTierFailed,
    DaemonUnavailable,
    SharedBlocks,
    SharedMemory,
    open_client,
    open_connection,
)
from offload.daemon import DaemonConfig, DaemonInUse, Dropped, open_daemon
from offload.daemon._messages import (
    Cancel,
    Cancelled,
    Delete,
    Deleted,
    Done,
    Found,
    Load,
    Loaded,
    Lookup,
    Registered,
    RegisterKVCache,
    Release,
    Signal,
    Store,
    Stored,
    TensorLayout,
    UnregisterKVCache,
    packed,
)
from tests.support.daemons import PATIENCE, SIZE, daemon, engine_config
from tests.support.ill_tiers import Ill, RemoteIll
from tests.support.maru_processes import temporary_pool

KEYS = [b"key %d" % at for at in range(8)]


def cache_of(n=32):
    cache = SharedBlocks(SharedMemory(n * SIZE), SIZE)
    for at, key in enumerate(KEYS):
        cache.write(at, payload_of(key, SIZE))
    return cache


async def store(engine, cache, keys=KEYS, first=0):
    handle = await engine.store(cache.external(range(first, first + len(keys)), keys), NO_WAIT)
    return await handle.wait()


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await trio.sleep(1e-3)


def held(server):
    """What a daemon holds for its engines."""
    names = ("requests", "holds", "memories", "caches", "open_hits", "quarantined")
    return {
        name: value
        for name, value in server.statistics().items()
        if value
        and (name in names or name.endswith(("held_blocks", "reserved_blocks", "used_blocks", "pending_marks")))
    }


# --- the path of a block ------------------------------------------------------------------------------------------------


async def test_what_one_engine_has_stored_another_one_loads(path):
    async with daemon(path) as server:
        cache, other = cache_of(), SharedBlocks(SharedMemory(32 * SIZE), SIZE)
        async with open_client(cache, server.url) as engine:
            assert (await store(engine, cache)).completed == tuple(KEYS)
        async with open_client(other, server.url) as engine:
            async with await engine.lookup([*KEYS, b"nowhere"]) as hit:
                assert list(hit.keys) == KEYS and not hit.unavailable
                result = await engine.load(hit, other.into(range(8, 16)))
            assert result.loaded == len(KEYS)
        assert [other.read(8 + at) for at in range(8)] == [payload_of(key, SIZE) for key in KEYS]
        await until(lambda: not server.statistics()["sessions"])
        assert held(server) == {}


async def test_a_client_asks_for_a_load_once_its_precondition_holds(path):
    async with daemon(path) as server:
        cache, computed = cache_of(), trio.Event()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            async with await engine.lookup(KEYS) as hit, trio.open_nursery() as nursery:
                asked, load = [], server._service.reads._load

                async def note(*args):
                    asked.append(args)
                    return await load(*args)

                server._service.reads._load = note
                nursery.start_soon(lambda: engine.load(hit, cache.into(range(8, 16)), precondition=computed))
                async with await engine.lookup(KEYS):  # behind which a message of the load would have come
                    pass
                assert not asked and cache.read(8) == bytes(SIZE)
                computed.set()
            assert len(asked) == 1
            assert [cache.read(8 + at) for at in range(8)] == [payload_of(key, SIZE) for key in KEYS]


async def test_the_first_lookup_in_a_daemon_that_holds_nothing_is_a_miss(path):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine, await engine.lookup(KEYS) as hit:
            assert not hit.keys and not hit.unavailable


async def test_blocks_of_memory_that_the_daemon_cannot_map_pass_through_shared_memory(path):
    async with daemon(path) as server:
        from backends.memory import MemoryTier

        host = MemoryTier(8 * SIZE, SIZE)
        for key in KEYS:
            host.put(key, payload_of(key, SIZE))
        async with offload.open_engine(host, {"daemon": DaemonTier(server.url)}) as engine:
            handle = await engine.store(host.strong(KEYS), NO_WAIT)
            assert (await handle.wait()).status is Status.COMPLETE
            buffers = [bytearray(SIZE) for _ in KEYS]
            async with await engine.lookup(KEYS) as hit:
                assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == len(KEYS)
        assert buffers == [payload_of(key, SIZE) for key in KEYS]


async def test_more_blocks_than_the_staging_area_has_room_for_pass_through_it(path, monkeypatch):
    monkeypatch.setattr("offload.client._places.STAGING_BYTES", 3 * SIZE)
    async with daemon(path) as server:
        from backends.memory import MemoryTier

        host = MemoryTier(8 * SIZE, SIZE)
        for key in KEYS:
            host.put(key, payload_of(key, SIZE))
        async with offload.open_engine(host, {"daemon": DaemonTier(server.url)}) as engine:
            assert (await (await engine.store(host.strong(KEYS), NO_WAIT)).wait()).status is Status.COMPLETE
            buffers = [bytearray(SIZE) for _ in KEYS]
            for _ in range(3):
                async with await engine.lookup(KEYS) as hit:
                    assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == len(KEYS)
            assert server.statistics()["caches"] <= 2  # the areas of single loads are forgotten
        assert buffers == [payload_of(key, SIZE) for key in KEYS]


@contextlib.asynccontextmanager
async def stored_from_a_host(path, monkeypatch, slots):
    """An engine whose daemon has its blocks, and whose staging area has so many slots."""
    monkeypatch.setattr("offload.client._places.STAGING_BYTES", slots * SIZE)
    async with daemon(path) as server:
        from backends.memory import MemoryTier

        host = MemoryTier(8 * SIZE, SIZE)
        for key in KEYS:
            host.put(key, payload_of(key, SIZE))
        async with offload.open_engine(host, {"daemon": DaemonTier(server.url)}) as engine:
            assert (await (await engine.store(host.strong(KEYS), NO_WAIT)).wait()).status is Status.COMPLETE
            yield engine, engine.tiers["daemon"]._its_places().staging


async def test_a_load_that_is_cancelled_while_it_waits_for_the_staging_area_has_nothing_of_it(path, monkeypatch):
    async with stored_from_a_host(path, monkeypatch, 4) as (engine, staging):
        others = await staging.take(3)
        with trio.CancelScope() as scope:
            async with await engine.lookup(KEYS[:2]) as hit, trio.open_nursery() as nursery:
                nursery.start_soon(engine.load, hit, PagesDestination.over([bytearray(SIZE) for _ in range(2)]))
                await until(lambda: staging._turn.locked())  # there is one slot, and it waits for another one
                scope.cancel()
        staging.give_back(others)
        assert sorted(staging._free) == [0, 1, 2, 3]


async def test_loads_that_wait_for_the_staging_area_never_wait_for_one_another(path, monkeypatch):
    """Each with one slot of two, nobody would give one back."""
    async with stored_from_a_host(path, monkeypatch, 4) as (engine, staging):
        others = await staging.take(4)
        loaded = []

        async def load():
            async with await engine.lookup(KEYS[:2]) as hit:
                destination = PagesDestination.over([bytearray(SIZE) for _ in range(2)])
                loaded.append((await engine.load(hit, destination)).loaded)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(load)
                await until(lambda: staging._turn.statistics().tasks_waiting == 3)
                for slot in others:
                    staging.give_back([slot])
                    await trio.testing.wait_all_tasks_blocked()
        assert loaded == [2] * 4


async def test_large_loads_use_one_area_one_after_the_other_and_the_largest_is_kept(path, monkeypatch):
    made = []

    class Counted(SharedMemory):
        def __init__(self, nbytes, **options):
            made.append(nbytes // SIZE)
            super().__init__(nbytes, **options)

    monkeypatch.setattr("offload.client._places.STAGING_BYTES", 3 * SIZE)
    monkeypatch.setattr("offload.client._places.SPARE_BYTES", 6 * SIZE)
    monkeypatch.setattr("offload.client._places.SharedMemory", Counted)
    async with daemon(path) as server:
        from backends.memory import MemoryTier

        host = MemoryTier(8 * SIZE, SIZE)
        for key in KEYS:
            host.put(key, payload_of(key, SIZE))
        async with offload.open_engine(host, {"daemon": DaemonTier(server.url)}) as engine:
            assert (await (await engine.store(host.strong(KEYS), NO_WAIT)).wait()).status is Status.COMPLETE

            async def load(n):
                buffers = [bytearray(SIZE) for _ in range(n)]
                async with await engine.lookup(KEYS[:n]) as hit:
                    assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == n
                assert buffers == [payload_of(key, SIZE) for key in KEYS[:n]]

            for n in (4, 4, 5, 4, 5, 8, 8, 5):
                await load(n)
            # 3 for the stores; 4, then 5, which takes its place; 8 are too many to be kept.
            assert made == [3, 4, 5, 8, 8]
            assert server.statistics()["caches"] == 2


async def test_tensors_in_pieces_are_copied_in_place(path):
    torch = pytest.importorskip("torch")
    from backends.device import DeviceTier

    memory = SharedMemory(1 << 20)
    layers = [memory.tensor((2, 16, 4, 8), torch.float32, offset=at * 4096) for at in range(4)]
    for layer in layers:
        layer.copy_(torch.arange(layer.numel(), dtype=torch.float32).view(layer.shape))
    device = DeviceTier(layers, block_axis=1)
    async with daemon(path) as server, open_client(device, server.url) as engine:
        handle = await engine.store(device.external(range(8), KEYS), NO_WAIT)
        assert (await handle.wait()).status is Status.COMPLETE
        async with await engine.lookup(KEYS) as hit:
            assert (await engine.load(hit, device.into(range(8, 16)))).loaded == 8
        assert server.statistics()["caches"] == 1  # and no staging area
    assert all(torch.equal(layer[:, :8], layer[:, 8:]) for layer in layers)


async def test_an_engine_config_names_a_daemon_in_place_of_tiers(path):
    async with daemon(path) as server:
        cache = cache_of()
        config = EngineConfig.from_toml(f'[engine]\ndaemon_url = "{server.url}"')
        async with offload.open_engine(cache, config) as engine:
            assert list(engine.tiers) == ["daemon"]
            assert (await store(engine, cache)).completed == tuple(KEYS)
    with pytest.raises(offload.ConfigError, match="daemon_url"):
        EngineConfig(daemon_url="ipc:///x", tiers={"host": "memory"})


async def test_a_block_that_is_there_is_told_and_one_that_is_deleted_is_gone(path):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            tier = engine.tiers["daemon"]
            assert await tier.contains([*KEYS, b"nowhere"]) == set(KEYS)
            async with await engine.lookup(KEYS[:1]):
                assert await engine.delete(KEYS[:2]) == [Deletion.PINNED, Deletion.DELETED]
            assert await engine.delete([*KEYS[:2], b"nowhere"]) == [
                Deletion.DELETED,
                Deletion.MISSING,
                Deletion.MISSING,
            ]
            again = await store(engine, cache, KEYS[2:], first=2)
            assert again.completed == tuple(KEYS[2:])
            assert tier.statistics().duplicates == 6


async def test_a_lookup_pins_until_it_is_released(path):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            hit = await engine.lookup(KEYS)
            assert held(server) == {"holds": 1, "caches": 1, "open_hits": 1, "tier.host.held_blocks": 8}
            await engine.release(hit)
            await until(lambda: held(server) == {"caches": 1})  # its answer is not waited for


# --- signals and cancels over the wire ----------------------------------------------------------------------------------


async def registered(connection, cache):
    session = connection.session
    (memory,) = [await connection.hand_over(cache.memory.descriptor, session)]
    layout = [TensorLayout(memory, 0, 1, [len(cache), SIZE], [SIZE, 1], 0)]
    return (await connection.ask(lambda seq: RegisterKVCache(seq, layout), Registered)).cache


async def begin_store(nursery, connection, number, keys, *, token=0):
    """Store blocks that wait for their signal. Returns the number of the request, and a list for its answer."""
    answers, numbers, sent = [], [], trio.Event()

    def note(seq):
        numbers.append(seq)
        sent.set()

    async def run():
        ids = packed(range(len(keys)))
        answers.append(
            await connection.ask(
                lambda seq: Store(seq, number, list(keys), ids, waits=True, cancel_token=token), Stored, sent=note
            )
        )

    nursery.start_soon(run)
    await sent.wait()
    return numbers[0], answers


async def test_engines_are_served_while_memory_is_populated_behind_the_start(path, monkeypatch):
    begun, over = threading.Event(), threading.Event()
    populate = MemoryTier.populate

    def wait_and_populate(tier, start):
        begun.set()
        assert over.wait(PATIENCE)
        populate(tier, start)

    monkeypatch.setattr(MemoryTier, "populate", wait_and_populate)
    async with daemon(path, block_bytes=SIZE) as server:
        cache = cache_of()
        try:
            async with open_client(cache, server.url) as engine:
                await until(begun.is_set)
                assert server.state == "ready"
                assert (await store(engine, cache)).completed == tuple(KEYS)
                async with await engine.lookup(KEYS) as hit:
                    assert (await engine.load(hit, cache.into(range(16, 24)))).loaded == 8
                assert len(list(server.engine.tiers["host"].unpopulated())) >= 1
        finally:
            over.set()


async def test_memory_behind_wrappers_is_populated(path, monkeypatch):
    populated = []
    monkeypatch.setattr(MemoryTier, "populate", lambda tier, start: populated.append(start))
    host = {"type": "memory", "capacity_bytes": 1 << 20, "wrappers": ["zstd"]}
    async with daemon(path, engine=engine_config(tiers={"host": host}), block_bytes=SIZE):
        with trio.fail_after(PATIENCE):
            await until(lambda: populated == [0])


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptor"), RuntimeError("can't start new thread")])
async def test_daemon_outlives_memory_that_cannot_be_populated(path, monkeypatch, caplog, error):
    async def refuse(*arguments):
        raise error

    monkeypatch.setattr("offload.daemon._engine.run_in_thread", refuse)
    async with daemon(path, block_bytes=SIZE) as server:
        await until(lambda: "is not populated" in caplog.text)
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            assert (await store(engine, cache)).completed == tuple(KEYS)


async def test_a_store_waits_for_its_signal(path):
    async with daemon(path) as server, open_connection(server.url) as connection, trio.open_nursery() as nursery:
        cache = cache_of()
        number = await registered(connection, cache)
        seq, answers = await begin_store(nursery, connection, number, KEYS)
        found = await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)
        assert not found.blocks and not answers
        cache.write(0, payload_of(KEYS[1], SIZE))  # the bytes are read behind the signal
        await connection.ask(lambda s: Signal(s, seq), Done)
        await until(lambda: answers)
        assert answers[0].status == "complete"
        found = await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)
        load = await connection.ask(lambda s: Load(s, found.hold, number, packed(range(8, 16))), Loaded)
        assert load.loaded == 8 and cache.read(8) == payload_of(KEYS[1], SIZE)


async def test_a_signal_that_never_will_be_fails_its_store(path):
    async with daemon(path) as server, open_connection(server.url) as connection, trio.open_nursery() as nursery:
        number = await registered(connection, cache_of())
        seq, answers = await begin_store(nursery, connection, number, KEYS)
        await connection.ask(lambda s: Signal(s, seq, "the forward pass failed"), Done)
        await until(lambda: answers)
        assert answers[0].status == "failed" and "the forward pass failed" in answers[0].error


async def test_a_cancel_is_confirmed_when_the_store_has_ended_and_nothing_of_it_is_there(path):
    async with daemon(path) as server, open_connection(server.url) as connection, trio.open_nursery() as nursery:
        number = await registered(connection, cache_of())
        seq, answers = await begin_store(nursery, connection, number, KEYS)
        confirmed = await connection.ask(lambda s: Cancel(s, [seq]), Cancelled)
        assert (confirmed.count, confirmed.unproven) == (1, 0)
        assert [answer.status for answer in answers] == ["cancelled"]  # its answer came before the confirmation
        assert held(server) == {"caches": 1}
        assert not (await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)).blocks


@pytest.mark.parametrize("ends", ["session", "cancel"])
async def test_leaving_engine_fails_no_block_of_others(path, ends):
    tier, batch = FakeTier(64, SIZE), BatchConfig(max_batch_size=8, min_batch_size=4)
    tier.faults.gate = trio.Event()
    config = engine_config(tiers={"host": tier}, pipeline=PipelineConfig(batch_config=batch))
    async with daemon(path, engine=config, block_bytes=SIZE) as server, open_connection(server.url) as stays:
        answers, asked = [], []

        async def unregister(connection, number):
            with contextlib.suppress(DaemonTierFailed):  # it was cancelled
                await connection.ask(lambda seq: UnregisterKVCache(seq, number), Done, sent=asked.append)

        async def store_two(connection, number, keys):
            ids = packed(range(2))
            answers.append(await connection.ask(lambda seq: Store(seq, number, keys, ids), Stored))

        async with trio.open_nursery() as nursery, open_connection(server.url) as leaves:
            await leaves.wait_session()
            await stays.wait_session()
            ours = server.sessions.by_token(leaves.session.token)
            numbers = [await registered(connection, cache_of()) for connection in (leaves, stays)]
            nursery.start_soon(store_two, stays, numbers[1], KEYS[2:4])
            async with trio.open_nursery() as its_own:
                its_own.start_soon(store_two, leaves, numbers[0], KEYS[:2])
                await until(lambda: tier.batches)  # the blocks of both are in one batch, whose copy waits
                its_own.start_soon(unregister, leaves, numbers[0])
                await until(lambda: len(ours.requests) == 2)
                if ends == "cancel":
                    leaves.tell(lambda s: Cancel(s, asked))
                    await until(lambda: len(ours.requests) == 1)
                its_own.cancel_scope.cancel()
            if ends == "session":
                server._service.end(ours, "its engine has left")
                await trio.testing.wait_all_tasks_blocked()
            tier.faults.gate.set()
        assert [(one.status, one.failed) for one in answers] == [("complete", [])]
        await until(lambda: held(server).get("caches") == 1)


async def test_one_token_cancels_all_stores_that_have_it_and_no_other(path):
    async with daemon(path) as server, open_connection(server.url) as connection, trio.open_nursery() as nursery:
        number = await registered(connection, cache_of())
        _, first = await begin_store(nursery, connection, number, KEYS[:2], token=5)
        _, second = await begin_store(nursery, connection, number, KEYS[2:4], token=5)
        seq, other = await begin_store(nursery, connection, number, KEYS[4:6], token=6)
        assert (await connection.ask(lambda s: Cancel(s, [], 5), Cancelled)).count == 2
        assert [answer.status for answer in first + second] == ["cancelled"] * 2 and not other
        await connection.ask(lambda s: Signal(s, seq), Done)
        await until(lambda: other)
        assert other[0].status == "complete"


async def test_a_cancel_of_what_has_ended_is_confirmed_at_once(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        assert (await connection.ask(lambda s: Cancel(s, [1, 2, 3], 4), Cancelled)).count == 0


async def test_a_lookup_whose_task_was_cancelled_holds_nothing(path):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            connection = engine.tiers["daemon"].connection
            for checkpoints in range(6):
                found = []

                async def look_up(found=found):
                    found.append((await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)).hold)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(look_up)
                    for _ in range(checkpoints):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                for _ in range(2):  # the first reads what has come, and with the second its release has been served
                    await connection.ask(lambda s, found=found: Release(s, found), Done)
                assert held(server) == {"caches": 1}, checkpoints


# --- the end of a session -----------------------------------------------------------------------------------------------


async def test_a_connection_that_ends_gives_back_all_that_it_held(path):
    async with daemon(path) as server:
        async with open_connection(server.url) as connection, trio.open_nursery() as nursery:
            cache = cache_of()
            number = await registered(connection, cache)
            await connection.hand_over(cache.memory.descriptor, connection.session)
            seq, answers = await begin_store(nursery, connection, number, KEYS[:4])
            await connection.ask(lambda s: Signal(s, seq), Done)
            await until(lambda: answers)
            await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)
            await begin_store(nursery, connection, number, KEYS[4:])
            await until(lambda: server.statistics()["requests"])
            assert set(held(server)) >= {"requests", "holds", "memories", "caches", "tier.host.held_blocks"}
            nursery.cancel_scope.cancel()
        await until(lambda: not server.statistics()["sessions"])
        assert held(server) == {} and server.statistics()["sessions_given_back"] == 1


async def test_the_next_session_of_an_engine_begins_when_the_one_before_is_given_back(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        first = connection.session
        server._channel.hang_up(server._service.sessions.by_token(first.token).peer)
        with pytest.raises(DaemonUnavailable):
            await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)
        second = await connection.wait_session()
        assert second is not first and second.epoch == first.epoch
        assert server.statistics()["sessions"] == 1


async def test_a_hit_of_a_session_that_is_over_is_unavailable_and_no_miss(path):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            hit = await engine.lookup(KEYS)
            connection = engine.tiers["daemon"].connection
            server._channel.hang_up(server._service.sessions.by_token(connection.session.token).peer)
            result = await engine.load(hit, cache.into(range(8, 16)))
            assert result.loaded == 0
            assert all(isinstance(outcome.error, DaemonUnavailable) for outcome in result.outcomes)
            await engine.release(hit)
            await connection.wait_session()
            async with await engine.lookup(KEYS) as hit:
                assert (await engine.load(hit, cache.into(range(8, 16)))).loaded == 8


async def test_an_engine_outlives_its_daemon_and_says_that_it_is_gone(path):
    cache = cache_of()
    async with trio.open_nursery() as nursery:
        ended = trio.Event()

        async def serve(task_status):
            async with daemon(path) as server:
                with trio.CancelScope() as scope:
                    task_status.started((server, scope))
                    await trio.sleep_forever()
            ended.set()

        server, scope = await nursery.start(serve)
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            hit = await engine.lookup(KEYS)
            epoch = engine.tiers["daemon"].connection.session.epoch
            scope.cancel()
            await ended.wait()
            gone = await engine.lookup(KEYS)
            assert "daemon" in gone.unavailable and not gone.keys
            await engine.release(gone)
            server, scope = await nursery.start(serve)
            connection = engine.tiers["daemon"].connection
            session = await connection.wait_session()
            assert session.epoch != epoch
            result = await engine.load(hit, cache.into(range(8, 16)))  # of the old epoch
            assert result.loaded == 0 and isinstance(result.outcomes[0].error, DaemonUnavailable)
            await engine.release(hit)
            assert (await store(engine, cache)).status is Status.COMPLETE
        nursery.cancel_scope.cancel()


async def test_failing_tier_keeps_client_breaker_closed(path):
    ill = Ill(64, SIZE)
    tiers = {"host": MemoryTier(16 * SIZE, SIZE), "ill": ill}
    cache = cache_of()
    config = engine_config(tiers=tiers, chain="none")
    async with daemon(path, engine=config) as server, open_client(cache, server.url) as engine:
        assert (await store(engine, cache)).status is Status.COMPLETE
        ill.ill = OSError("the disk is gone")
        for _ in range(5):  # more than break a tier
            unknown = await engine.lookup([b"nowhere"])
            assert isinstance(unknown.unavailable["daemon"], DaemonTierFailed)
            await engine.release(unknown)
        async with await engine.lookup(KEYS) as hit:
            assert list(hit.keys) == KEYS and not hit.unavailable
        assert engine.statistics().health["daemon"].state is HealthState.CLOSED


async def test_silent_tiers_are_no_miss(path):
    ill, ill_too = RemoteIll(64, SIZE), RemoteIll(64, SIZE)
    ill.hang = ill_too.hang = True
    tiers = {"host": MemoryTier(8 * SIZE, SIZE), "ill": ill, "ill too": ill_too}
    cache = cache_of()
    config = engine_config(tiers=tiers, chain="none", lookup_timeout=0.3)
    async with daemon(path, engine=config) as server, open_client(cache, server.url) as engine:
        assert (await store(engine, cache)).status is Status.COMPLETE
        tier = engine.tiers["daemon"]
        asked = len(ill.asked)
        assert await tier.contains(KEYS) == set(KEYS)  # the memory tier has them all
        assert len(ill.asked) == asked
        began = trio.current_time()
        with pytest.raises(DaemonTierFailed, match=r"1 of 9 keys .* silent tier \(.*ill: .*; .*ill too: TierTooSlow"):
            await tier.contains([*KEYS, b"nowhere"])
        assert trio.current_time() - began < 0.55  # side by side
        assert await offload.PresenceFilter(tier).evaluate([b"nowhere"]) == {}
        ill.hang = ill_too.hang = False
        ill.ill = OSError("the disk is gone")
        with pytest.raises(DaemonTierFailed, match="OSError: the disk is gone"):
            await tier.contains([b"nowhere"])


async def test_cancelled_contains_leaves_nothing(path):
    ill = RemoteIll(64, SIZE)
    ill.hang = True
    tiers = {"host": MemoryTier(8 * SIZE, SIZE), "ill": ill}
    async with daemon(path, engine=engine_config(tiers=tiers, chain="none"), block_bytes=SIZE) as server:
        with trio.move_on_after(0.05) as scope:
            await server._engine.contains([b"nowhere"])
        assert scope.cancelled_caught and ill.asked == ["contains"]
        ill.hang = False
        assert await server._engine.contains([b"nowhere"]) == [False]


async def test_failed_stores_keep_client_breaker_closed(path):
    ill = Ill(64, SIZE)
    cache = cache_of()
    config = engine_config(tiers={"ill": ill})
    async with daemon(path, engine=config) as server, open_client(cache, server.url) as engine:
        assert (await store(engine, cache)).status is Status.COMPLETE
        for at in range(5):
            ill.faults.failing[b"new %d" % at] = OSError("the disk is broken")
            result = await store(engine, cache, [b"new %d" % at])
            assert isinstance(result.failed[b"new %d" % at], DaemonTierFailed)
        assert engine.statistics().health["daemon"].state is HealthState.CLOSED


async def test_an_engine_in_a_hurry_breaks_no_tier_for_others(path):
    tier = RemoteIll(32, SIZE)
    tier.fill(KEYS)
    async with (
        daemon(path, engine=engine_config(tiers={"slow": tier}), block_bytes=SIZE) as server,
        open_connection(server.url) as hurried,
        open_connection(server.url) as other,
    ):
        tier.hang = True
        for _ in range(5):
            found = await hurried.ask(lambda seq: Lookup(seq, KEYS, 0.001), Found)
            assert "slow" in found.unavailable
            await hurried.ask(lambda seq: Delete(seq, [b"none"], 0.001), Deleted)
        tier.hang = False
        assert (await other.ask(lambda seq: Lookup(seq, KEYS, 60.0), Found)).blocks == len(KEYS)


# --- what is refused ----------------------------------------------------------------------------------------------------


async def test_stores_beyond_a_share_of_the_budget_wait_outside_of_it(path):
    small = PipelineConfig(budget_blocks=8, batch_config=BatchConfig(min_batch_size=1, max_batch_size=8))
    cache = cache_of()
    async with (
        daemon(path, engine=engine_config(pipeline=small), block_bytes=SIZE) as server,
        open_connection(server.url) as connection,
        trio.open_nursery() as nursery,
    ):
        number = await registered(connection, cache)
        inside, first = await begin_store(nursery, connection, number, KEYS[:4])
        outside, second = await begin_store(nursery, connection, number, KEYS[4:])
        _, third = await begin_store(nursery, connection, number, [b"never"], token=7)
        async with open_client(cache, server.url) as other:
            assert len((await store(other, cache, [b"other"])).completed) == 1
        assert (await connection.ask(lambda seq: Cancel(seq, [], 7), Cancelled)).count == 1
        for seq in (outside, inside):
            await connection.ask(lambda number, seq=seq: Signal(number, seq), Done)
        await until(lambda: first and second and third)
        assert [answers[0].status for answers in (first, second, third)] == ["complete", "complete", "cancelled"]
        assert next(iter(server.sessions)).waiting == 0
        assert {*server.engine.tiers["host"].contains_nowait(KEYS)} == {*KEYS}


async def test_an_engine_of_another_block_size_is_refused_and_told_both(path):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
        small = SharedBlocks(SharedMemory(8 * 512), 512)
        async with open_connection(server.url) as connection:
            memory = await connection.hand_over(small.memory.descriptor, connection.session)
            layout = [TensorLayout(memory, 0, 1, [8, 512], [512, 1], 0)]
            with pytest.raises(DaemonRefused, match=r"512 bytes.*4096"):
                await connection.ask(lambda seq: RegisterKVCache(seq, layout), Registered)


async def test_the_first_cache_decides_no_tiny_blocks(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        small = SharedMemory(SIZE)
        memory = await connection.hand_over(small.descriptor, connection.session)
        layout = [TensorLayout(memory, 0, 1, [8, 511], [511, 1], 0)]
        with pytest.raises(DaemonRefused, match=r"511 bytes.*at least 512"):
            await connection.ask(lambda seq: RegisterKVCache(seq, layout), Registered)
        assert await registered(connection, cache_of()) == 1


async def test_tiers_that_cannot_hold_the_first_cache_are_said_so_and_the_next_may_fit(path):
    tiers = {"host": {"type": "memory", "capacity_bytes": 2 * SIZE}}
    async with daemon(path, engine=engine_config(tiers=tiers)) as server, open_connection(server.url) as connection:
        large = SharedMemory(16 * SIZE)
        memory = await connection.hand_over(large.descriptor, connection.session)
        layout = [TensorLayout(memory, 0, 1, [2, 8 * SIZE], [8 * SIZE, 1], 0)]
        with pytest.raises(DaemonRefused, match="capacity_bytes"):
            await connection.ask(lambda seq: RegisterKVCache(seq, layout), Registered)
        assert await registered(connection, cache_of()) == 1


async def test_a_tenant_sees_no_key_of_another_one_and_is_refused_without_a_credential(path, tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants]\na = "credential of tenant a"\nb = "credential of tenant b"\n')
    file.chmod(0o600)
    async with daemon(path, tenants_file=str(file)) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential="credential of tenant a") as engine:
            await store(engine, cache)
            async with await engine.lookup(KEYS) as hit:
                assert len(hit.keys) == 8
        async with open_client(cache, server.url, credential="credential of tenant b") as engine:
            await store(engine, cache, [b"own"], first=9)
            async with await engine.lookup(KEYS) as hit:
                assert not hit.keys and not hit.unavailable
            assert await engine.delete(KEYS[:1]) == [Deletion.MISSING]
            assert await engine.tiers["daemon"].contains(KEYS) == set()
        with pytest.raises(DaemonRefused, match="credential"):
            async with open_connection(server.url, credential="of nobody"):
                pass


async def test_one_daemon_has_a_directory(path):
    async with daemon(path):
        with pytest.raises(DaemonInUse, match="process"):
            async with daemon(path):
                pass
    async with daemon(path) as server:
        assert server.state == "ready"


async def test_a_daemon_that_is_not_there_is_unavailable_within_the_time_that_was_said(path):
    with pytest.raises(DaemonUnavailable):
        async with open_connection(f"ipc://{path}/daemon.sock", wait=0.05):
            pass
    with pytest.raises(ValueError, match="daemon_url"):
        async with open_connection("tcp://elsewhere:1"):
            pass


async def test_a_daemon_that_drains_refuses_what_begins_work_and_counts_what_it_drops(path):
    async with daemon(path, drain_timeout=0.05) as server, open_connection(server.url) as connection:
        number = await registered(connection, cache_of())
        with trio.move_on_after(10):
            async with trio.open_nursery() as nursery:
                await begin_store(nursery, connection, number, KEYS)
                await until(lambda: server.statistics()["requests"])
                nursery.start_soon(drained, server, nursery)
        assert server.state == "draining"


async def drained(server, nursery):
    dropped = await server.drain()
    assert (dropped.stores, dropped.others) == (1, 0)
    assert held(server) == {}
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("stores", "others", "code"), [(0, 0, 0), (2, 0, 5), (0, 1, 6), (3, 1, 7)])
def test_the_exit_code_says_what_was_dropped(stores, others, code):
    assert Dropped(stores, others).exit_code == code


async def test_memory_beyond_the_containers_limit_is_logged(path, monkeypatch, caplog):
    monkeypatch.setattr("offload.daemon._engine.memory_limit", lambda: 1 << 20)
    async with daemon(path, block_bytes=SIZE):
        pass
    assert caplog.text.count(f"capacity_bytes of host: {16 << 20} bytes, and this container may use {1 << 20}") == 1


@pytest.mark.parametrize("more", [{"populate": True}, {"wrappers": ["zstd"]}])
async def test_memory_is_checked_before_it_is_populated(path, monkeypatch, caplog, more):
    logged = []

    class Watched(HostPages):
        def __init__(self, *args, **options):
            logged.append(caplog.text)
            super().__init__(*args, **options)

    monkeypatch.setattr("offload.daemon._engine.memory_limit", lambda: 1 << 20)
    monkeypatch.setattr("backends.memory.HostPages", Watched)
    tiers = {"host": {"type": "memory", "capacity_bytes": "16MiB", **more}}
    async with daemon(path, block_bytes=SIZE, engine=engine_config(tiers=tiers)):
        pass
    assert f"capacity_bytes of host: {16 << 20} bytes, and this container may use {1 << 20}" in logged[0]


async def test_tiers_and_page_store_count_together(path, monkeypatch, caplog):
    monkeypatch.setattr("offload.daemon._engine.memory_limit", lambda: 40 << 20)
    monkeypatch.setattr("maru._server.server.memory_limit", lambda: 40 << 20)
    with temporary_pool() as pool:
        store = ServerConfig(pool_path=str(pool), capacity_bytes=32 << 20)
        async with open_daemon(DaemonConfig(runtime_dir=path, block_bytes=SIZE), engine_config(), maru=store):
            pass
    text = (
        f"capacity_bytes of host and the embedded page store: {48 << 20} bytes, and this container may use {40 << 20}"
    )
    assert caplog.text.count(text) == 1
