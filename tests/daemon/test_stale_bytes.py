"""No byte that one tenant has stored comes into the memory of another one, however copies fail, and wherever pages go."""

import errno
import os
import random
import tempfile
from functools import partial
from pathlib import Path

import pytest
import trio

from backends.base.slots import SlotTier
from backends.base.threads import run_in_thread_to_the_end
from offload import NO_WAIT
from offload.client import SharedBlocks, SharedMemory, open_client, open_connection
from offload.daemon._messages import (
    Cancel,
    Cancelled,
    Found,
    Load,
    Loaded,
    Lookup,
    Registered,
    RegisterKVCache,
    Store,
    Stored,
    TensorLayout,
    packed,
)
from offload.daemon._tenants import stored_keys
from tests.daemon.test_daemon import registered
from tests.daemon.test_quotas import HERS, HIS, found, keys_of, store, tenants
from tests.support.daemons import SIZE, daemon, engine_config

SECRET = b"of tenant a alone."
ROOM = 8
"""Blocks in each tier: every page changes its tenant again and again."""


def tiers(tmp_path, kind):
    memory = {"type": "memory", "capacity_bytes": ROOM * SIZE}
    disk = {"type": "file", "directory": str(tmp_path / "disk"), "capacity_bytes": 4 * ROOM * SIZE}
    (tmp_path / "disk").mkdir(exist_ok=True, mode=0o700)
    return {"memory": {"host": memory}, "file": {"disk": disk}, "both": {"host": memory, "disk": disk}}[kind]


def cache_full_of(pattern, n=ROOM):
    cache = SharedBlocks(SharedMemory(n * SIZE), SIZE)
    for at in range(n):
        cache.write(at, (pattern * SIZE)[:SIZE])
    return cache


def memory_of(cache):
    return bytes(cache.memory.buffer())


async def fill(server, keys, pattern=SECRET):
    """Tenant a stores these, and leaves."""
    cache = cache_full_of(pattern)
    async with open_client(cache, server.url, credential=HIS) as his:
        assert len((await store(his, cache, keys)).completed) == len(keys)


class CutOff:
    """The memory of an engine in a file that the daemon cannot map, and that ends in the middle of its second block."""

    def __init__(self, blocks=4):
        self.file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115 - removed with this object
        self.path = Path(self.file.name)
        self.path.write_bytes(b"b" * (blocks * SIZE))
        self.blocks = blocks

    async def register(self, connection):
        number = await connection.hand_over(self.file.fileno(), connection.session)
        layout = [TensorLayout(number, 0, 1, [self.blocks, SIZE], [SIZE, 1], 0)]
        cache = (await connection.ask(lambda seq: RegisterKVCache(seq, layout), Registered)).cache
        os.truncate(self.path, SIZE + SIZE // 2)
        return cache


async def write_in_part(path, tmp_path, kind):
    """Pages of tenant a are evicted for blocks of b, whose memory ends in the second one. What b finds, and reads."""
    async with daemon(
        path, engine=engine_config(tiers=tiers(tmp_path, kind)), tenants_file=tenants(tmp_path)
    ) as server:
        await fill(server, keys_of(ROOM))
        keys = keys_of(4, 100)
        async with open_connection(server.url, credential=HERS) as connection:
            number = await CutOff().register(connection)
            answer = await connection.ask(lambda seq: Store(seq, number, keys, packed(range(4))), Stored)
        cache = cache_full_of(b"\0")
        async with open_client(cache, server.url, credential=HERS) as hers:
            finds = [len((await found(hers, key)).keys) for key in keys]
            async with await hers.lookup(keys) as hit:
                await hers.load(hit, cache.into(range(len(hit.keys))))
        return [at for at, _ in answer.failed], finds, memory_of(cache)


@pytest.mark.parametrize("kind", ["memory", "file", "both"])
async def test_a_page_of_another_tenant_that_was_written_in_part_is_never_found(path, tmp_path, kind):
    failed, finds, read = await write_in_part(path, tmp_path, kind)
    assert failed == [1, 2, 3] and finds == [1, 0, 0, 0]
    assert read == b"b" * SIZE + bytes((ROOM - 1) * SIZE)


async def test_where_a_copy_that_failed_were_published_the_secret_would_be_read(path, tmp_path, monkeypatch):
    """A fault that is planted: without it, the test above could not fail."""
    write = SlotTier.write

    async def careless(self, *args):
        await write(self, *args)
        return {}

    monkeypatch.setattr(SlotTier, "write", careless)
    monkeypatch.setattr(SlotTier, "_verify", lambda *args: [])
    assert SECRET in (await write_in_part(path, tmp_path, "memory"))[2]


def store_cut_off(cache, keys, seq):
    return Store(seq, cache, keys, packed(range(len(keys))))


@pytest.mark.parametrize("kind", ["memory", "file", "both"])
async def test_whatever_fails_no_byte_of_another_tenant_comes_into_ones_memory(path, tmp_path, kind):
    dice = random.Random(7)
    async with daemon(
        path, engine=engine_config(tiers=tiers(tmp_path, kind)), tenants_file=tenants(tmp_path)
    ) as server:
        secret, cache, loads = cache_full_of(SECRET), cache_full_of(b"b"), 0
        async with (
            open_client(secret, server.url, credential=HIS) as his,
            open_client(cache, server.url, credential=HERS) as hers,
            open_connection(server.url, credential=HERS) as connection,
        ):
            number = await CutOff().register(connection)
            for round_ in range(30):
                await store(his, secret, keys_of(dice.randrange(1, ROOM), dice.randrange(20)))
                keys = keys_of(dice.randrange(1, 4), dice.randrange(20))
                match dice.randrange(3):
                    case 0:
                        await connection.ask(partial(store_cut_off, number, keys), Stored)
                    case 1:
                        with trio.move_on_after(dice.random() * 2e-3):
                            handle = await hers.store(cache.external(range(len(keys)), keys), NO_WAIT)
                            await handle.wait()
                            handle.request_cancel()
                    case 2:
                        await store(hers, cache, keys)
                        async with await hers.lookup(keys) as hit:
                            if dice.random() < 0.5:
                                await his.delete(keys_of(30))
                            result = await hers.load(hit, cache.into(range(3, 3 + len(hit.keys))))
                            loads += result.loaded
                assert SECRET not in memory_of(cache), round_
        assert loads  # (where nothing is loaded, nothing can be wrong)


async def test_bytes_that_a_late_copy_of_another_tenant_has_put_into_a_page_are_overwritten_with_zeros(path, tmp_path):
    """A copy without a proven end, whose page an operator has released too early, is the one way for such bytes."""
    async with daemon(
        path, engine=engine_config(tiers=tiers(tmp_path, "memory")), tenants_file=tenants(tmp_path)
    ) as server:
        mine = cache_full_of(b"b")
        async with open_client(mine, server.url, credential=HERS) as hers:
            keys = keys_of(3)
            await store(hers, mine, keys)
            tier = server._engine.engine.tiers["host"]
            (slot,) = tier.pool.slots(stored_keys("b", keys[1:2]))
            tier._storage.pages([slot])[0][:] = (SECRET * SIZE)[:SIZE]
            into = cache_full_of(b"x")
            async with open_client(into, server.url, credential=HERS) as other, await other.lookup(keys) as hit:
                result = await other.load(hit, into.into(range(3)))
                assert result.loaded == 1
            assert into.read(0) == b"b" * SIZE
            assert into.read(1) == bytes(SIZE)  # and not the secret


async def test_load_that_failed_is_answered_behind_its_zeros(path, tmp_path, monkeypatch):
    """Also where there is no thread to write them for a while."""
    async with daemon(
        path, engine=engine_config(tiers=tiers(tmp_path, "memory")), tenants_file=tenants(tmp_path)
    ) as server:
        mine, refused = cache_full_of(b"b"), []

        async def scarce(function, *arguments):
            if len(refused) < 2:
                refused.append(function)
                raise OSError(errno.EMFILE, "no descriptor")
            return await run_in_thread_to_the_end(function, *arguments)

        monkeypatch.setattr("offload.daemon._reads.run_in_thread_to_the_end", scarce)
        async with open_client(mine, server.url, credential=HERS) as hers:
            keys = keys_of(3)
            await store(hers, mine, keys)
            tier = server._engine.engine.tiers["host"]
            (slot,) = tier.pool.slots(stored_keys("b", keys[1:2]))
            tier._storage.pages([slot])[0][:] = (SECRET * SIZE)[:SIZE]
            into = cache_full_of(b"x")
            async with open_client(into, server.url, credential=HERS) as other, await other.lookup(keys) as hit:
                assert (await other.load(hit, into.into(range(3)))).loaded == 1
            assert len(refused) == 2 and SECRET not in memory_of(into)


async def test_a_load_that_is_cancelled_leaves_zeros_and_is_confirmed_behind_them(path, tmp_path, monkeypatch):
    async with daemon(path, tenants_file=tenants(tmp_path)) as server:
        mine = cache_full_of(b"b")
        async with open_client(mine, server.url, credential=HERS) as hers:
            await store(hers, mine, keys_of(3))
        into, engine, began = cache_full_of(b"x"), server._engine.engine, trio.Event()
        load = engine.load

        async def slowly(hit, destination, **options):
            await load(hit, destination, **options)
            began.set()
            await trio.sleep_forever()

        monkeypatch.setattr(engine, "load", slowly)
        async with open_connection(server.url, credential=HERS) as connection, trio.open_nursery() as nursery:
            number = await registered(connection, into)
            hold = await connection.ask(lambda seq: Lookup(seq, keys_of(3), 1.0), Found)

            @nursery.start_soon
            async def ask():
                with pytest.raises(Exception, match="cancelled"):
                    await connection.ask(
                        lambda seq: sent.append(seq) or Load(seq, hold.hold, number, packed(range(3))), Loaded
                    )

            sent = []
            await began.wait()
            assert into.read(0) == b"b" * SIZE
            confirmed = await connection.ask(lambda seq: Cancel(seq, sent[:1]), Cancelled)
            assert confirmed.unproven == 0
            assert memory_of(into)[: 3 * SIZE] == bytes(3 * SIZE)


async def test_memory_that_its_engine_has_cut_off_stays_as_it_is(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path)) as server:
        mine = cache_full_of(b"b")
        async with open_client(mine, server.url, credential=HERS) as hers:
            await store(hers, mine, keys_of(3))
        async with open_connection(server.url, credential=HERS) as connection:
            file = CutOff()
            number = await file.register(connection)
            hold = await connection.ask(lambda seq: Lookup(seq, keys_of(3), 1.0), Found)
            answer = await connection.ask(lambda seq: Load(seq, hold.hold, number, packed(range(3))), Loaded)
            assert answer.loaded <= 1 and len(answer.failed) + answer.loaded == 3
            assert file.path.stat().st_size == SIZE + SIZE // 2
