"""What engines commit into the page store of a daemon goes on to the tiers behind it."""

import contextlib

import attrs
import pytest
import trio
import trio.lowlevel
import trio.testing

from backends.abc import DUPLICATE, STORED, Rejected, Unproven
from backends.testing import FakeTier, payload_of
from offload import NO_WAIT, Route, open_engine
from offload.abc import AsyncPolicy
from offload.client import DaemonTier, SharedBlocks, SharedMemory, open_connection
from tests.daemon.test_page_processes import Engine
from tests.daemon.test_pages import (
    bytes_of,
    cancelled_at_each_step,
    fill,
    keys_of,
    nothing_is_reserved,
    opened,
    paged,
    store,
    until,
)
from tests.daemon.test_pages_of_tenants import HERS, HIS, tenants
from tests.daemon.test_processes import counters
from tests.support.daemons import AT_ONCE, PATIENCE, SIZE, directory, serve
from tests.support.daemons import until as until_async
from tests.support.maru_processes import Server, temporary_pool


def told(running, name):
    return running.statistics()[f"pages.{name}_blocks"]


@contextlib.asynccontextmanager
async def chained(path, *, capacity=256, disk=None, routes=(), **options):
    """A daemon whose page store leads on to a tier behind it: the daemon, and that tier."""
    disk = FakeTier(capacity, SIZE) if disk is None else disk
    async with paged(path, behind={"disk": disk}, routes=routes, **options) as running:
        yield running, disk


async def over(running, blocks):
    """Wait until so many blocks have been told and have come to an end, however."""
    ends = ("passed_on", "gone", "not_passed_on")
    await until(lambda: sum(told(running, end) for end in ends) == blocks, "they have come to no end")
    await running._service.onward.wait_over()


async def found(url, keys, **options):
    """What an engine of this daemon finds of these keys: in which tiers, and the bytes, loaded and verified."""
    cache = SharedBlocks(SharedMemory(len(keys) * SIZE), SIZE)
    async with open_engine(cache, [DaemonTier(url, **options)]) as engine, await engine.lookup(keys) as hit:
        assert (await engine.load(hit, cache.into(range(len(hit.keys))))).loaded == len(hit.keys)
        return [cache.read(at) for at in range(len(hit.keys))]


async def test_what_is_committed_is_in_the_disk_when_its_page_is_gone(path, tmp_path):
    disk = {"type": "file", "directory": str(tmp_path / "disk"), "capacity_bytes": "4 MiB"}
    async with paged(path, behind={"disk": disk}) as running, opened(running) as pages:
        assert list(await store(pages, keys_of(4))) == [STORED] * 4
        await over(running, 4)
        await until_async(lambda: _deleted(running.engine.tiers["maru"], keys_of(4)), "a page is held")
        assert await found(running.url, keys_of(5)) == list(map(bytes_of, keys_of(4)))
        assert running.statistics()["tier.disk.stored_blocks"] == 4
        assert running.statistics()["tier.host.stored_blocks"] == 0


async def _deleted(tier, keys):
    return {answer.value for answer in await tier.delete(keys)} <= {"deleted", "missing"}


async def test_what_an_engine_stores_through_the_daemon_goes_the_same_way(path):
    async with chained(path) as (running, disk):
        cache = SharedBlocks(SharedMemory(4 * SIZE), SIZE)
        for at, key in enumerate(keys_of(4)):
            cache.write(at, bytes_of(key))
        async with open_engine(cache, [DaemonTier(running.url)]) as engine:
            await (await engine.store(cache.external(range(4), keys_of(4)), NO_WAIT)).wait()
        await running.engine.drain()
        assert [disk.get(key) for key in keys_of(4)] == list(map(bytes_of, keys_of(4)))
        assert told(running, "passed_on") == 0  # that counts commits


async def test_an_explanation_says_where_it_has_gone_and_that_it_is_on_its_way(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    async with chained(path, disk=disk) as (running, _), opened(running) as pages:
        await store(pages, keys_of(1))
        await until(lambda: disk.copying, "it is not being copied")
        assert str(await running.engine.explain(keys_of(1))) == "in maru, on its way to disk"
        disk.faults.gate.set()
        await over(running, 1)
        assert str(await running.engine.explain(keys_of(1))) == "in maru and disk"


async def test_a_page_that_was_written_to_behind_its_commit_is_not_passed_on_and_counted(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    async with chained(path, disk=disk) as (running, _), opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(3))
        fill(reservation)
        late = memoryview(reservation.pages[1]).cast("B")
        await pages.commit(reservation)
        late[7] ^= 1
        await until(lambda: disk.copying, "it is not being copied")
        disk.faults.gate.set()
        await over(running, 3)
        assert disk.contains_nowait(keys_of(3)) == {keys_of(3)[0], keys_of(3)[2]}
        assert (told(running, "passed_on"), told(running, "not_passed_on")) == (2, 1)
        assert running.engine.statistics().tiers["maru"].missed["damaged"] == 1
        assert list((await pages.reserve_read(keys_of(3))).keys) in (keys_of(1), keys_of(3))


async def test_what_is_gone_before_it_is_copied_is_counted_as_gone(path):
    class Slow(AsyncPolicy):
        """A policy of the route: the pages are held behind it."""

        def __init__(self):
            self.go_on = trio.Event()

        async def evaluate(self, keys):
            await self.go_on.wait()
            return {}

    slow = Slow()
    config = attrs.evolve(AT_ONCE, policy_timeout=60.0)
    routes = (Route("disk", policies=(slow,), pipeline=config),)
    async with chained(path, routes=routes) as (running, disk), opened(running) as pages:
        await store(pages, keys_of(4))
        await until(lambda: running.engine.onward.of("maru")[0].statistics().in_admission, "it was not told")
        assert await _deleted(running.engine.tiers["maru"], keys_of(2))
        slow.go_on.set()
        await over(running, 4)
        assert (told(running, "passed_on"), told(running, "gone")) == (2, 2)
        assert disk.contains_nowait(keys_of(4)) == set(keys_of(4)[2:])
        assert "not copied to disk: gone" in str(await running.engine.explain(keys_of(1)))


async def test_a_tier_without_room_takes_what_it_can_and_the_pages_stay(path):
    routes = (Route("disk", pipeline=attrs.evolve(AT_ONCE, on_destination_full="partial")),)
    async with chained(path, capacity=2, routes=routes) as (running, _), opened(running) as pages:
        await store(pages, keys_of(4))
        await over(running, 4)
        assert (told(running, "passed_on"), told(running, "not_passed_on")) == (2, 2)
        assert await found(running.url, keys_of(4)) == list(map(bytes_of, keys_of(4)))


async def test_an_announcement_waits_while_what_was_committed_has_no_room_in_the_routes(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    narrow = attrs.evolve(AT_ONCE, budget_blocks=64, transfer_timeout=600.0)
    async with (
        chained(path, disk=disk, routes=(Route("disk", pipeline=narrow, required=True),), capacity=64 << 20) as (
            running,
            _,
        ),
        opened(running, pool_bytes=256 * SIZE) as pages,
    ):
        await store(pages, keys_of(64))
        await store(pages, keys_of(1, "more"))
        with trio.move_on_after(0.05) as scope:
            await pages.reserve_write(keys_of(1, "late"))
        assert scope.cancelled_caught
        assert running.statistics()["pages.announced"] == 0
        disk.faults.gate.set()
        await pages.release(await pages.reserve_write(keys_of(1, "late")))
        await over(running, 65)
        assert told(running, "passed_on") == 65


async def test_a_route_that_drops_what_it_has_no_room_for_makes_nobody_wait_and_counts_it(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    drops = attrs.evolve(AT_ONCE, budget_blocks=64, transfer_timeout=600.0, on_overflow="drop")
    async with (
        chained(path, disk=disk, routes=(Route("disk", pipeline=drops),)) as (running, _),
        opened(running, pool_bytes=256 * SIZE) as pages,
    ):
        await store(pages, keys_of(64))
        await store(pages, keys_of(2, "more"))
        await until(lambda: told(running, "not_passed_on") == 2, "it was not dropped")
        assert list(await store(pages, keys_of(1, "late"))) == [STORED]
        await until(lambda: told(running, "not_passed_on") == 3, "it was not dropped")
        disk.faults.gate.set()
        await over(running, 67)
        assert (told(running, "passed_on"), told(running, "not_passed_on")) == (64, 3)


async def test_an_announcement_that_waits_for_the_routes_is_cancelled_anywhere_and_leaves_nothing(path):
    disk = FakeTier(256, SIZE)
    disk.faults.gate = trio.Event()
    narrow = attrs.evolve(AT_ONCE, budget_blocks=64, transfer_timeout=600.0)
    async with (
        chained(path, disk=disk, routes=(Route("disk", pipeline=narrow, required=True),)) as (running, _),
        opened(running, pool_bytes=256 * SIZE) as pages,
    ):
        for name in ("k", "more"):
            reservation = await pages.reserve_write(keys_of(64, name))
            fill(reservation)
            await pages.commit(reservation)
            if name == "k":
                await until(lambda: disk.copying, "it is not being copied")

        async def reserve(ticks):
            if ticks == 30:  # it waits behind that, whatever it is cancelled at
                disk.faults.gate.set()
            await pages.release(await pages.reserve_write(keys_of(2, f"t{ticks}")))

        async def look(ticks):
            await nothing_is_reserved(running, pages)

        await cancelled_at_each_step(reserve, look)
        await over(running, 128)
        assert told(running, "passed_on") == 128


async def test_a_duplicate_goes_on_once_and_what_was_given_up_does_not(path):
    async with chained(path) as (running, disk), opened(running) as one, opened(running) as two:
        first, second = await one.reserve_write(keys_of(2)), await two.reserve_write(keys_of(2))
        given_up = await one.reserve_write(keys_of(2, "given up"))
        fill(first)
        fill(second)
        assert list(await two.commit(second)) == [STORED] * 2
        assert list(await one.commit(first)) == [DUPLICATE] * 2
        await one.release(given_up)
        await nothing_is_reserved(running, one)
        await over(running, 2)
        assert disk.contains_nowait(keys_of(2)) == set(keys_of(2)) == set(disk.copied)
        assert (told(running, "passed_on"), told(running, "gone"), told(running, "not_passed_on")) == (2, 0, 0)


async def test_of_what_nobody_can_say_that_goes_on_which_is_there(path, monkeypatch):
    async with chained(path) as (running, disk), opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(2))

        async def unanswered(keys, handles, sums):
            raise Unproven("a test")

        monkeypatch.setattr(pages._l1, "_register", unanswered)
        with pytest.raises(Unproven):
            await pages.commit(reservation)
        await until(lambda: told(running, "gone") == 2, "it was not looked for")
        assert not disk.contains_nowait(keys_of(2))


async def test_what_an_engine_has_committed_and_not_told_goes_on_when_its_session_is_over(path):
    async with chained(path) as (running, disk):
        async with opened(running) as pages:
            left = await pages.reserve_write(keys_of(2, "left"))
            reservation = await pages.reserve_write(keys_of(2))
            fill(reservation)
            pages._tell = lambda *args: None
            assert list(await pages.commit(reservation)) == [STORED] * 2 and left.is_open
        await until(lambda: told(running, "passed_on") == 2, "it was not passed on")
        assert disk.contains_nowait([*keys_of(2), *keys_of(2, "left")]) == set(keys_of(2))
        assert told(running, "gone") == 0  # what was reserved only was never there


async def test_a_killed_engine_s_blocks_go_on_and_what_it_had_only_reserved_does_not(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    async with chained(path, disk=disk) as (running, _):
        with await trio.to_thread.run_sync(Engine, path, "e") as engine:
            await engine.do("store 4")
            await until(lambda: disk.copying, "it is not being copied")
            await engine.do("reserve 16")
            await engine.do("fill")
            engine.kill()
            engine.wait()
        await until(lambda: not running.statistics()["sessions"], "its session goes on")
        disk.faults.gate.set()
        await over(running, 4)
        keys = [b"e %d" % at for at in range(16)]
        assert [disk.get(key) for key in keys] == [payload_of(key, SIZE) for key in keys[:4]] + [None] * 12
        assert (told(running, "passed_on"), told(running, "gone")) == (4, 0)


async def test_a_daemon_that_drains_waits_for_what_was_committed(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    async with chained(path, disk=disk) as (running, _), opened(running) as pages:
        await store(pages, keys_of(4))
        await until(lambda: disk.copying, "it is not being copied")
        async with trio.open_nursery() as nursery:
            drained = trio.Event()

            async def drain():
                assert not await running.drain()
                drained.set()

            nursery.start_soon(drain)
            await until(lambda: not running.statistics()["sessions"], "its session goes on")
            await trio.testing.wait_all_tasks_blocked()
            assert not drained.is_set()
            disk.faults.gate.set()
        assert disk.contains_nowait(keys_of(4)) == set(keys_of(4))


async def test_a_daemon_that_drains_does_not_wait_for_ever_for_a_tier_that_hangs(path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    hasty = attrs.evolve(AT_ONCE, transfer_timeout=0.2, drain_timeout=0.2)
    routes = (Route("disk", pipeline=hasty),)
    async with chained(path, disk=disk, routes=routes, drain_timeout=0.05) as (running, _), opened(running) as pages:
        await store(pages, keys_of(4))
        await until(lambda: disk.copying, "it is not being copied")
        with trio.fail_after(PATIENCE):
            await running.drain()
        assert told(running, "passed_on") == 0
        assert await running.engine.tiers["maru"].contains(keys_of(4)) == set(keys_of(4))


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_a_daemon_that_ends_at_any_moment_has_copied_right_blocks_or_none(path, ticks):
    disk = FakeTier(64, SIZE)
    async with chained(path, disk=disk) as (running, _), opened(running) as pages:
        await store(pages, keys_of(4))
        await until(lambda: told(running, "stored") == 4, "it was not told")
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
    for key in keys_of(4):
        assert disk.get(key) in (None, bytes_of(key))
    assert disk.statistics().reserved_blocks == 0


# --- tenants ----------------------------------------------------------------------------------------------------------


async def test_a_tenant_s_blocks_count_once_and_are_found_by_it_alone_also_behind_the_page_store(path, tmp_path):
    async with (
        chained(path, tenants_file=tenants(tmp_path, 8 * SIZE)) as (running, disk),
        opened(running, credential=HIS) as his,
        opened(running, credential=HERS) as hers,
    ):
        await store(his, keys_of(4))
        await store(hers, keys_of(1, "hers"))
        await over(running, 5)
        assert running.statistics()["tenant.a.used_bytes"] == 4 * SIZE  # in two tiers
        maru = running.engine.tiers["maru"]
        await until_async(lambda: _deleted(maru, list(disk.list_keys())), "a page is held")
        assert running.statistics()["tenant.a.used_bytes"] == 4 * SIZE
        assert await found(running.url, keys_of(4), credential=HIS) == list(map(bytes_of, keys_of(4)))
        assert await found(running.url, keys_of(4), credential=HERS) == []


async def test_blocks_that_are_being_copied_stay_where_the_quota_wants_room(path, tmp_path):
    disk = FakeTier(64, SIZE)
    disk.faults.gate = trio.Event()
    async with (
        chained(path, disk=disk, tenants_file=tenants(tmp_path, 4 * SIZE)) as (running, _),
        opened(running, credential=HIS) as his,
    ):
        await store(his, keys_of(4))
        await until(lambda: disk.copying, "it is not being copied")
        reservation = await his.reserve_write(keys_of(1, "new"))
        assert set(reservation.refused.values()) == {Rejected("quota")}
        await his.release(reservation)
        disk.faults.gate.set()
        await over(running, 4)
        assert list(await store(his, keys_of(1, "new"))) == [STORED]
        assert running.statistics()["tenant.a.used_bytes"] <= 4 * SIZE


# --- real processes ---------------------------------------------------------------------------------------------------


async def test_what_was_passed_on_survives_a_daemon_and_a_page_store_that_are_killed(tmp_path):
    with directory() as path, temporary_pool() as pool:
        file = tmp_path / "daemon.toml"
        file.write_text(
            f"""
            [daemon]
            block_bytes = {SIZE}
            [engine.tiers.maru]
            type = "maru"
            server_url = "ipc://{pool}/maru.sock"
            pool_size = "2 MiB"
            [engine.tiers.disk]
            type = "file"
            directory = "{tmp_path}/disk"
            capacity_bytes = "4 MiB"
            """
        )
        keys, url = [b"e %d" % at for at in range(8)], f"ipc://{path}/daemon.sock"
        with Server(pool) as server, serve(path, str(file)) as daemon:
            with await trio.to_thread.run_sync(Engine, path, "e") as engine:
                assert await engine.do("store 8") == {"stored": 8}

                async def are_passed_on():
                    async with open_connection(url) as connection:
                        return (await counters(connection))["pages.passed_on_blocks"] == 8

                await until_async(are_passed_on, "they were not passed on")
                daemon.kill()
                daemon.wait()
            server.kill()
        with Server(pool), serve(path, str(file)):
            assert await found(url, keys) == [payload_of(key, SIZE) for key in keys]
