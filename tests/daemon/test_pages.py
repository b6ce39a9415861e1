"""Pages of a daemon's page store that engines write and read themselves."""

import contextlib
import gc
import inspect
import json
import sys

import attrs
import pytest
import trio
import trio.lowlevel

from backends.abc import DUPLICATE, LOADED, STORED, Destination, DuplicateKeys, Missed, Rejected, Unproven
from backends.maru.l1 import ReservationOver
from maru import ServerConfig
from offload import NO_WAIT, ConfigError, Route, open_engine
from offload.abc import AsyncPolicy, Leased
from offload.client import (
    BlockingPages,
    DaemonBusy,
    DaemonRefused,
    DaemonTier,
    DaemonUnavailable,
    NoPageStore,
    Pages,
    SharedBlocks,
    SharedMemory,
    open_connection,
    open_pages,
)
from offload.daemon import DaemonConfig, open_daemon
from offload.daemon._messages import (
    MAX_KEYS,
    OLDEST,
    VERSION,
    Commit,
    Done,
    Hello,
    Refused,
    Reserved,
    ReserveWrite,
    Welcome,
    decode_answer,
    encode,
)
from tests.support.daemons import AT_ONCE, PATIENCE, SIZE, daemon, engine_config

POOL = 64 * SIZE
"""Of a region of a client: so many blocks."""
REGION = 2 << 20
"""A region has this many bytes at least: the step of the pool."""


async def until(condition, what):
    """Wait until it holds: what is in this process is looked at as often as the loop turns."""
    with trio.move_on_after(PATIENCE):
        while not condition():
            await trio.lowlevel.checkpoint()
        return
    raise AssertionError(what)


def keys_of(n, name="k"):
    return [b"%s %d" % (name.encode(), at) for at in range(n)]


def bytes_of(key):
    return (key + b".") * (SIZE // len(key + b".")) + bytes(SIZE % len(key + b"."))


@contextlib.asynccontextmanager
async def paged(path, *, capacity=64 << 20, maru=None, routes=(), behind=None, engine=None, **knobs):
    """A daemon with host memory and a page store that it runs itself; ``behind``: the tiers behind that."""
    knobs.setdefault("block_bytes", SIZE)
    place = {"type": "maru", "server_url": f"ipc://{path}/maru/maru.sock", "pool_size": POOL, **(maru or {})}
    tiers = {"host": {"type": "memory", "capacity_bytes": 16 << 20}, "maru": place, **(behind or {})}
    server = ServerConfig(rm_address="", pool_path=f"{path}/maru", capacity_bytes=capacity)
    config = DaemonConfig(runtime_dir=path, **knobs)
    async with open_daemon(config, engine_config(tiers=tiers, routes=routes, **(engine or {})), maru=server) as running:
        yield running


def opened(running, **options):
    options.setdefault("pool_bytes", POOL)
    options.setdefault("block_bytes", SIZE)
    return open_pages(running.url, **options)


def fill(reservation):
    for key, page in zip(reservation.keys, reservation.pages, strict=True):
        page[:] = bytes_of(key)


async def store(pages, keys):
    reservation = await pages.reserve_write(keys)
    fill(reservation)
    return await pages.commit(reservation)


async def read(pages, keys):
    """The bytes of the prefix that is there, verified by a load and read in place."""
    lease = await pages.reserve_read(keys)
    blocks = SharedBlocks(SharedMemory(max(1, len(lease.keys)) * SIZE), SIZE)
    assert list(await pages.load(lease, blocks.into(range(len(lease.keys))))) == [LOADED] * len(lease.keys)
    seen = [bytes(view) for view in lease.views]
    assert seen == [blocks.read(at) for at in range(len(lease.keys))]
    await pages.release(lease)
    return dict(zip(lease.keys, seen, strict=True))


# --- one store for all ------------------------------------------------------------------------------------------------


async def test_what_is_committed_is_a_hit_of_the_daemon_with_the_same_bytes(path):
    async with paged(path) as running, opened(running) as pages:
        assert list(await store(pages, keys_of(4))) == [STORED] * 4
        cache = SharedBlocks(SharedMemory(8 * SIZE), SIZE)
        async with open_engine(cache, [DaemonTier(running.url)]) as engine, await engine.lookup(keys_of(5)) as hit:
            assert len(hit.keys) == 4
            assert (await engine.load(hit, cache.into(range(4)))).loaded == 4
        assert [cache.read(at) for at in range(4)] == list(map(bytes_of, keys_of(4)))
        assert running.statistics()["tier.host.stored_blocks"] == 0  # no second copy


async def test_what_the_daemon_has_stored_into_its_page_store_is_read_where_it_lies(path):
    async with paged(path) as running, opened(running) as pages:
        cache = SharedBlocks(SharedMemory(8 * SIZE), SIZE)
        for at, key in enumerate(keys_of(4)):
            cache.write(at, bytes_of(key))
        async with open_engine(cache, [DaemonTier(running.url)]) as engine:
            await (await engine.store(cache.external(range(4), keys_of(4)), NO_WAIT)).wait()
        await running.engine.drain()
        assert await read(pages, keys_of(5)) == {key: bytes_of(key) for key in keys_of(4)}


async def test_another_engine_reads_what_was_committed_and_what_was_not_is_a_miss(path):
    async with paged(path) as running, opened(running) as pages, opened(running, pool_bytes=0) as reader:
        await store(pages, keys_of(2))
        reservation = await pages.reserve_write(keys_of(3, "open"))
        fill(reservation)
        assert await read(reader, keys_of(2)) == {key: bytes_of(key) for key in keys_of(2)}
        assert await read(reader, keys_of(3, "open")) == {}


async def test_a_connection_of_a_tier_serves_for_its_pages(path):
    async with paged(path) as running, DaemonTier(running.url) as tier:
        async with open_pages(tier.connection, block_bytes=SIZE, pool_bytes=POOL) as pages:
            await store(pages, keys_of(1))
            await pages.reserve_write(keys_of(1, "open"))
        assert len(running.sessions) == 1
        await until(lambda: not running.statistics()["pages.announced"], "it was not told")


async def test_pages_go_on_when_the_engine_that_wrote_them_is_gone(path):
    async with paged(path) as running:
        async with opened(running) as pages:
            await store(pages, keys_of(3))
        async with opened(running, pool_bytes=0) as reader:
            assert len(await read(reader, keys_of(3))) == 3


async def test_blocks_that_are_summed_while_they_are_copied_into_pages_are_read_and_verified(path):
    async with paged(path) as running, opened(running) as pages:
        blocks = SharedBlocks(SharedMemory(4 * SIZE), SIZE)
        for at, key in enumerate(keys_of(4)):
            blocks.write(at, bytes_of(key))
        reservation = await pages.reserve_write(keys_of(4))
        for wrong in (blocks.pages([0]), SharedBlocks(SharedMemory(4 * SIZE), SIZE // 2).pages(range(4))):
            with pytest.raises(ValueError, match="cannot be copied"):
                reservation.fill(wrong)
        reservation.fill(blocks.pages(range(4)))
        summed, pages._l1._sums = [], lambda *args: summed.append(args)  # not a second time
        assert list(await pages.commit(reservation)) == [STORED] * 4 and not summed
        assert await read(pages, keys_of(4)) == {key: bytes_of(key) for key in keys_of(4)}
        with pytest.raises(ReservationOver):
            reservation.fill(blocks.pages(range(4)))


async def test_a_page_that_is_written_to_behind_its_sum_is_found_damaged(path):
    async with paged(path) as running, opened(running) as pages:
        blocks = SharedBlocks(SharedMemory(SIZE), SIZE)
        reservation = await pages.reserve_write(keys_of(1))
        reservation.fill(blocks.pages([0]))
        reservation.pages[0][5] = 1
        await pages.commit(reservation)
        lease = await pages.reserve_read(keys_of(1))
        assert list(await pages.load(lease, blocks.into([0]))) == [Missed("damaged")]
        await pages.release(lease)


# --- answers are values -----------------------------------------------------------------------------------------------


async def test_what_is_there_already_is_a_duplicate_before_it_is_copied(path):
    async with paged(path) as running, opened(running) as pages, opened(running) as other:
        await store(pages, keys_of(2))
        reservation = await other.reserve_write(keys_of(3))
        assert dict(reservation.refused) == dict.fromkeys(keys_of(2), DUPLICATE)
        assert list(reservation.keys) == keys_of(3)[2:]
        await other.release(reservation)


async def test_what_is_in_another_tier_is_a_duplicate_as_well(path):
    async with paged(path, maru={"pool_size": 0}) as running, opened(running) as pages:
        cache = SharedBlocks(SharedMemory(2 * SIZE), SIZE)
        async with open_engine(cache, [DaemonTier(running.url)]) as engine:
            await (await engine.store(cache.external([0], keys_of(1)), NO_WAIT)).wait()
        reservation = await pages.reserve_write(keys_of(2))
        assert dict(reservation.refused) == {keys_of(1)[0]: DUPLICATE}


async def test_of_two_that_write_the_same_key_the_second_is_told_that_it_is_a_duplicate(path):
    async with paged(path) as running, opened(running) as one, opened(running) as two:
        first, second = await one.reserve_write(keys_of(1)), await two.reserve_write(keys_of(1))
        fill(first)
        fill(second)
        assert list(await two.commit(second)) == [STORED]
        assert list(await one.commit(first)) == [DUPLICATE]


async def test_pages_that_cannot_be_had_are_refused_as_full_and_the_others_are_granted(path):
    async with paged(path, capacity=3 * REGION, maru={"pool_size": REGION}) as running, opened(running) as pages:
        wanted = keys_of(4 * REGION // SIZE)
        whole = await pages.reserve_write(wanted)
        assert 0 < len(whole.keys) < len(wanted)
        assert set(whole.refused.values()) == {Rejected("full")}
        assert [*whole.keys, *whole.refused] == wanted
        await pages.release(whole)


async def test_a_full_region_makes_room_of_its_own_least_recently_used_blocks(path):
    n = REGION // SIZE
    async with paged(path, capacity=2 * REGION, maru={"pool_size": REGION}) as running, opened(running) as pages:
        await store(pages, keys_of(n))
        assert list(await store(pages, keys_of(8, "new"))) == [STORED] * 8
        assert len(await read(pages, keys_of(8, "new"))) == 8


async def test_keys_are_checked_before_anything_is_asked(path):
    async with paged(path) as running, opened(running) as pages:
        for bad, error in (([b"a", b"a"], DuplicateKeys), (b"one key", TypeError), ([b"x" * 441], ValueError)):
            with pytest.raises(error):
                await pages.reserve_write(bad)
            with pytest.raises(error):
                await pages.reserve_read(bad)
        assert running.statistics()["pages.announced"] == 0


async def test_a_reservation_is_committed_or_released_once(path):
    async with paged(path) as running, opened(running) as pages:
        done, given_up = await pages.reserve_write(keys_of(1)), await pages.reserve_write(keys_of(1, "other"))
        view = done.pages[0]
        await pages.commit(done)
        await pages.release(done)  # changes nothing
        await pages.release(given_up)
        await pages.release(given_up)
        with pytest.raises(ValueError, match="released"):
            view[0] = 1
        for reservation in (done, given_up):
            with pytest.raises(ReservationOver):
                await pages.commit(reservation)
            with pytest.raises(ReservationOver):
                _ = reservation.pages
        assert len(await read(pages, keys_of(1))) == 1
        assert await read(pages, keys_of(1, "other")) == {}


async def test_a_view_is_of_no_use_once_it_is_released(path):
    async with paged(path) as running, opened(running) as pages:
        await store(pages, keys_of(1))
        lease = await pages.reserve_read(keys_of(1))
        view = lease.views[0]
        await pages.release(lease)
        with pytest.raises(ValueError, match="released"):
            view[0]


# --- cancelled --------------------------------------------------------------------------------------------------------


async def nothing_is_reserved(running, pages):
    def is_so():
        pages._connection.look()
        return not running.statistics()["pages.announced"] and not running.statistics()["requests"]

    await until(is_so, "a reservation is left, or a request")
    assert pages._l1.report_status().reserved_pages == 0
    assert pages._l1.report_status().pinned_keys == 0


async def cancelled_at_each_step(act, after, steps=400):
    """Run ``act`` cancelled before it, and then after 0, 1, 2 ticks of the loop, until it is over before; ``after`` looks."""
    for ticks in range(-1, steps):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel(ticks=ticks, scope=scope):
                    for _ in range(ticks):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                if ticks < 0:
                    scope.cancel()
                nursery.start_soon(cancel)
                await act(ticks)
                nursery.cancel_scope.cancel()
        await after(ticks)
        if not scope.cancelled_caught:
            return
    raise AssertionError(f"{steps} ticks were not enough")


@pytest.mark.parametrize("index", ["auto", "off"])  # without an index the daemon has to ask its page store
async def test_a_reservation_that_is_cancelled_anywhere_holds_nothing(path, index):
    async with paged(path, maru={"index": index}) as running, opened(running) as pages:

        async def reserve(ticks):
            reservation = await pages.reserve_write(keys_of(4, f"t{ticks}"))
            await pages.release(reservation)

        await cancelled_at_each_step(reserve, lambda ticks: nothing_is_reserved(running, pages))


async def test_a_commit_that_is_cancelled_anywhere_has_stored_all_of_it_or_is_open_still(path):
    async with paged(path) as running, opened(running) as pages:
        open_still, reservations = [], {}

        async def commit(ticks):
            await pages.commit(reservations[ticks])

        async def prepare(ticks):
            reservations[ticks] = await pages.reserve_write(keys_of(2, f"t{ticks}"))
            fill(reservations[ticks])

        async def look(ticks):
            reservation, there = reservations[ticks], await read(pages, keys_of(2, f"t{ticks}"))
            assert len(there) == (0 if reservation.is_open else 2)
            open_still.append(reservation.is_open)
            await pages.release(reservation)
            await nothing_is_reserved(running, pages)
            await prepare(ticks + 1)

        await prepare(-1)
        await cancelled_at_each_step(commit, look)
        await pages.release(reservations[max(reservations)])
        assert open_still[0] and not open_still[-1]


async def test_a_read_that_is_cancelled_anywhere_holds_nothing(path):
    async with paged(path, maru={"index": "off"}) as running, opened(running) as pages:
        await store(pages, keys_of(4))

        async def reserve(ticks):
            lease = await pages.reserve_read(keys_of(4))
            await pages.release(lease)

        async def look(ticks):
            await until(lambda: pages._l1.report_status().pinned_keys == 0, "blocks are held")

        await cancelled_at_each_step(reserve, look)


async def test_a_load_that_is_cancelled_anywhere_is_over_when_it_returns_and_its_lease_is_released(path):
    async with paged(path) as running, opened(running) as pages:
        await store(pages, keys_of(4))
        blocks = SharedBlocks(SharedMemory(4 * SIZE), SIZE)
        lease = await pages.reserve_read(keys_of(4))

        async def load(ticks):
            await pages.load(lease, blocks.into(range(4)))

        async def look(ticks):
            lease.check()

        await cancelled_at_each_step(load, look)
        with trio.CancelScope() as scope:
            scope.cancel()
            await pages.release(lease)
        assert pages._l1.report_status().pinned_keys == 0


class OnDevice(Destination):
    """Places of a device."""

    on_device, block_bytes = True, SIZE

    def __init__(self, blocks):
        self.blocks = blocks

    def __len__(self):
        return 4

    def views(self):
        return None

    def copy_in(self, start, pages):
        self.blocks.into(range(4)).copy_in(start, pages)


async def test_a_load_to_a_device_waits_for_its_precondition_and_can_be_cancelled_meanwhile(path):
    async with paged(path) as running, opened(running) as pages:
        await store(pages, keys_of(4))
        blocks, computed = SharedBlocks(SharedMemory(4 * SIZE), SIZE), trio.Event()
        lease, there = await pages.reserve_read(keys_of(4)), OnDevice(blocks)
        with pytest.raises(TypeError, match="precondition is missing"):
            await pages.load(lease, there)
        for cancelled in (True, False):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: pages.load(lease, there, precondition=computed))
                for _ in range(10):
                    await trio.lowlevel.checkpoint()
                assert blocks.read(0) == bytes(SIZE)
                if cancelled:
                    nursery.cancel_scope.cancel()
                else:
                    computed.set()
        assert [blocks.read(at) for at in range(4)] == list(map(bytes_of, keys_of(4)))
        await pages.release(lease)


async def test_a_reservation_that_is_released_in_a_cancelled_scope_is_given_back(path):
    async with paged(path) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(2))
        with trio.CancelScope() as scope:
            scope.cancel()
            await pages.release(reservation)
        assert scope.cancelled_caught and not reservation.is_open
        await nothing_is_reserved(running, pages)


async def test_the_first_reservation_of_a_new_session_that_is_cancelled_anywhere_holds_nothing(path):
    async with paged(path) as running, opened(running) as pages:

        async def reserve(ticks):
            await pages.release(await pages.reserve_write(keys_of(2, f"t{ticks}")))

        async def look(ticks):
            await nothing_is_reserved(running, pages)
            session = pages._connection.session
            for one in running.sessions:
                running._service.end(one, "a test")
                running._channel.hang_up(one.peer)
            pages._connection.look()
            await until(lambda: pages._connection.session not in (None, session), "there is no new session")

        await cancelled_at_each_step(reserve, look)


@pytest.mark.long
async def test_opening_that_is_cancelled_anywhere_leaves_no_session_and_no_region(path):
    async with paged(path) as running:

        async def open_them(ticks):
            async with opened(running):
                pass

        async def look(ticks):
            await until(lambda: len(running.sessions) == 0, "a session is left")

        await cancelled_at_each_step(open_them, look, steps=3_000)


# --- the daemon's word ------------------------------------------------------------------------------------------------


async def test_a_daemon_without_a_page_store_says_which_setting_would_give_it_one(path):
    async with daemon(path, block_bytes=SIZE) as running:
        with pytest.raises(NoPageStore, match=r"host \(MemoryTier\).*type = 'maru'.*SharedMemory"):
            async with opened(running):
                pass


async def test_an_operator_is_told_in_which_tier_engines_write_pages_or_why_they_cannot(path):
    async with paged(path) as running, opened(running) as pages:
        assert running.pages_of_engines == "maru"
        reservation = await pages.reserve_write(keys_of(1))
        command = [sys.executable, "-m", "offload", "describe", "--json", "--runtime-dir", path]
        told = json.loads((await trio.run_process(command, capture_stdout=True)).stdout)
        assert told["sections"]["page store"]["pages_of_engines"] == "maru"
        assert [session["announced"] for session in told["sessions"]] == [1]
        await pages.release(reservation)
    async with daemon(f"{path}-2", block_bytes=SIZE) as running:
        assert "type = 'maru'" in running.pages_of_engines


async def test_engines_write_no_pages_where_that_is_switched_off(path):
    async with paged(path, engine_pool_size_gb=0) as running:
        with pytest.raises(NoPageStore, match="engine_pool_size_gb = 0"):
            async with opened(running):
                pass


@pytest.mark.parametrize(
    ("maru", "named"),
    [({"key_names": "text"}, r"maru\.key_names = 'text'"), ({"wrappers": ["zstd"]}, "without wrappers")],
)
async def test_a_page_store_whose_blocks_engines_cannot_write_is_refused_by_its_setting(path, maru, named):
    async with paged(path, maru=maru) as running:
        with pytest.raises(NoPageStore, match=named):
            async with opened(running):
                pass


async def test_blocks_of_another_size_are_refused_with_both_sizes(path):
    async with paged(path) as running:
        with pytest.raises(DaemonRefused, match=f"{2 * SIZE} bytes.*{SIZE}"):
            async with opened(running, block_bytes=2 * SIZE):
                pass
        with pytest.raises(ConfigError, match="pool_bytes"):
            async with opened(running, pool_bytes=1):
                pass


async def test_pages_decide_the_size_of_a_block_where_no_cache_has(path):
    async with paged(path, block_bytes=0) as running:
        assert running.block_bytes == 0
        async with opened(running) as pages:
            await store(pages, keys_of(1))
        assert running.block_bytes == SIZE


async def test_a_daemon_of_the_version_before_is_named_with_the_numbers(path, monkeypatch):
    monkeypatch.setattr("offload.daemon._service.negotiate", lambda oldest, newest: 1)
    async with paged(path) as running:
        with pytest.raises(DaemonRefused, match=f"version 2 .*speaks 1 .*speaks {OLDEST} to {VERSION}"):
            async with opened(running):
                pass
        async with DaemonTier(running.url) as tier:  # all else goes on
            assert tier.connection.session.version == 1


async def test_an_engine_of_the_version_before_is_refused_with_the_numbers(path):
    async with paged(path) as running:
        sent = []
        running._service._send_frame = lambda peer, frame: sent.append(decode_answer(frame)) or True
        running._service.handle(b"old", encode(Hello(1, 1, 1, "old")))
        running._service.handle(b"old", encode(ReserveWrite(2, [b"k"])))
        welcome, refused = sent
        assert isinstance(welcome, Welcome) and welcome.version == 1
        assert isinstance(refused, Refused) and refused.kind == "version"
        assert (refused.oldest, refused.newest) == (OLDEST, VERSION)
        assert "version 2" in refused.text


class Odd:
    """Rejects every second block, and locks what it passes."""

    def __init__(self):
        self.asked = self.locked = 0

    def judge(self, keys):
        self.asked += 1
        self.locked += 1
        return Leased({key: "odd" for key in keys if int(key.split()[-1]) % 2}, self.unlock)

    def unlock(self):
        self.locked -= 1


class OddWhenAsked(Odd, AsyncPolicy):
    """The same, after a while."""

    def __init__(self):
        super().__init__()
        self.go_on = trio.Event()
        self.go_on.set()

    async def evaluate(self, keys):
        await self.go_on.wait()
        return self.judge(keys)


def with_policy(path, policy):
    return paged(path, routes=(Route("host", policies=[policy]),))


@pytest.mark.parametrize("waits", [False, True])
async def test_what_policies_reject_of_a_store_they_reject_of_a_reservation(path, waits):
    odd = OddWhenAsked() if waits else Odd()
    async with with_policy(path, odd if waits else odd.judge) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(4))
        assert list(reservation.keys) == [keys_of(4)[0], keys_of(4)[2]]
        assert set(reservation.refused.values()) == {Rejected("odd")}
        assert (odd.asked, odd.locked) == (1, 1)
        await pages.commit(reservation)
        await until(lambda: not odd.locked, "what was committed is locked")
        lost = await pages.reserve_write(keys_of(4, "lost"))
        assert odd.locked == 1
        for session in running.sessions:
            running._service.end(session, "a test")
        await running._service.wait_given_back()
        assert not odd.locked
        del lost


@pytest.mark.parametrize("waits", [False, True])
async def test_daemon_outlives_lock_whose_release_raises(path, waits):
    class Raising(OddWhenAsked if waits else Odd):
        def unlock(self):
            super().unlock()
            raise RuntimeError("a test")

    raising = Raising()
    async with with_policy(path, raising if waits else raising.judge) as running, opened(running) as pages:
        assert list(await store(pages, keys_of(4))) == [STORED] * 2
        lost = await pages.reserve_write(keys_of(4, "lost"))
        for session in running.sessions:
            running._service.end(session, "a test")
        await running._service.wait_given_back()
        assert raising.asked == 2 and not raising.locked
        del lost


async def test_fault_behind_request_is_its_answer_alone(path, monkeypatch):
    async with paged(path) as running, open_connection(running.url) as connection:

        def broken(*arguments):
            raise OSError("a test")

        monkeypatch.setattr(running._service.pages, "reserve_nowait", broken)
        with pytest.raises(DaemonUnavailable, match="a test"):
            await connection.ask(lambda seq: ReserveWrite(seq, keys_of(2)), Reserved)
        assert not running._service.sessions.bytes
        await connection.ask(lambda seq: Commit(seq, 7, b""), Done)


async def test_a_reservation_that_is_cancelled_while_a_policy_waits_locks_nothing(path):
    odd = OddWhenAsked()
    odd.go_on = trio.Event()
    async with with_policy(path, odd) as running, opened(running) as pages:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pages.reserve_write, keys_of(2))
                await until(lambda: running.statistics()["requests"], "it is not asked")
                scope.cancel()
        odd.go_on.set()
        await nothing_is_reserved(running, pages)
        assert odd.locked == 0


async def test_a_policy_that_fails_or_is_late_rejects_a_reservation(path):
    def broken(keys):
        raise RuntimeError("a test")

    async with with_policy(path, broken) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(1))
        assert list(reservation.refused.values()) == [Rejected("error")]
    late = OddWhenAsked()
    late.go_on = trio.Event()
    async with with_policy(f"{path}-2", late) as running, opened(running) as pages:
        running.engine.pipelines[0]._admission.config = attrs.evolve(AT_ONCE, policy_timeout=0.01)
        reservation = await pages.reserve_write(keys_of(1))
        assert list(reservation.refused.values()) == [Rejected("timeout")]


async def test_a_session_may_have_so_many_reservations_and_no_more(path):
    async with paged(path) as running, opened(running) as pages:
        running.sessions.limits = attrs.evolve(running.sessions.limits, holds=2)
        first, second = await pages.reserve_write(keys_of(1)), await pages.reserve_write(keys_of(1, "second"))
        with pytest.raises(DaemonBusy):
            await pages.reserve_write(keys_of(1, "third"))
        await pages.release(first)
        await until(lambda: running.statistics()["pages.announced"] == 1, "it was not told")
        third = await pages.reserve_write(keys_of(1, "third"))
        assert second.is_open and third.is_open


async def test_a_reservation_that_is_forgotten_is_given_back(path):
    async with paged(path) as running, opened(running) as pages:
        await pages.reserve_write(keys_of(2))  # in this thread, or in whichever one collects garbage
        reservation = await pages.reserve_write(keys_of(2, "other"))

        def forget(one):
            del one
            gc.collect()

        held = [reservation]
        del reservation
        await trio.to_thread.run_sync(forget, held.pop())
        await nothing_is_reserved(running, pages)


async def test_a_fate_for_each_block_is_wanted_and_a_commit_of_nothing_is_ignored(path):
    async with paged(path) as running, open_connection(running.url) as connection:
        reserved = await connection.ask(lambda seq: ReserveWrite(seq, keys_of(2)), Reserved)
        for bad in (b"\1", b"\1\1\1", b"\1\x09"):
            with pytest.raises(DaemonRefused):
                await connection.ask(lambda seq, bad=bad: Commit(seq, reserved.reservation, bad), Done)
        assert running.statistics()["pages.announced"] == 1
        done = await connection.ask(lambda seq: Commit(seq, reserved.reservation, b"\1\0"), Done)
        assert done.count == 2
        assert (await connection.ask(lambda seq: Commit(seq, reserved.reservation, b"\1\0"), Done)).count == 0


async def test_keys_beyond_one_message_are_refused(path):
    async with paged(path) as running, opened(running) as pages:
        keys = keys_of(MAX_KEYS + 1)
        reservation = await pages.reserve_write(keys)
        assert reservation.refused[keys[-1]].reason == f"over {MAX_KEYS} keys at once"
        await pages.release(reservation)
        assert running.statistics()["sessions"] == 1


async def test_reads_count_though_the_channel_was_full(path):
    async with paged(path) as running, open_connection(running.url) as connection:
        connection.read_blocks = 1_000
        send, refusals = connection._channel.send_nowait, [trio.WouldBlock()]

        def full_once(frames):
            if refusals:
                raise refusals.pop()
            return send(frames)

        connection._channel.send_nowait = full_once
        connection.tell_status()
        connection._tell_due()
        await until(lambda: running.statistics()["pages.read_blocks"] == 1_000, "reads were not told")


async def test_stores_reads_and_what_was_given_up_are_counted(path):
    async with paged(path) as running:
        async with opened(running) as pages, opened(running) as other:
            await store(pages, keys_of(3))
            late, first = await other.reserve_write(keys_of(1, "x")), await pages.reserve_write(keys_of(1, "x"))
            fill(first)
            fill(late)
            await pages.commit(first)
            await other.commit(late)
            await pages.release(await pages.reserve_write(keys_of(5)))
            await read(pages, keys_of(3))
        await until(lambda: running.statistics()["pages.read_blocks"] == 3, "reads were not told")
        told = running.statistics()
        assert {name: told[f"pages.{name}_blocks"] for name in ("stored", "duplicate", "given_up", "filtered")} == {
            "stored": 4,
            "duplicate": 1,
            "given_up": 2,
            "filtered": 3,
        }


async def test_a_daemon_that_drains_refuses_new_pages_and_takes_those_that_were_reserved(path):
    async with paged(path) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(1))
        running._service.draining = True
        with pytest.raises(DaemonUnavailable, match="the daemon is shutting down"):
            await pages.reserve_write(keys_of(1, "late"))
        fill(reservation)
        assert list(await pages.commit(reservation)) == [STORED]


# --- lost and late ----------------------------------------------------------------------------------------------------


async def test_nothing_is_committed_in_a_session_that_is_over(path):
    async with paged(path) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(1))
        fill(reservation)
        session = pages._connection.session
        for one in running.sessions:
            running._service.end(one, "a test")
            running._channel.hang_up(one.peer)
        with pytest.raises(DaemonUnavailable, match="the pages are freed"):
            await pages.commit(reservation)
        await until(lambda: pages._connection.session not in (None, session), "there is no new session")
        assert await read(pages, keys_of(1)) == {}
        assert list(await store(pages, keys_of(1))) == [STORED]  # and it goes on
        await nothing_is_reserved(running, pages)


async def test_nothing_is_committed_behind_the_lease_even_where_the_daemon_has_not_seen_its_end(path):
    async with paged(path) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(1))
        fill(reservation)
        pages._connection.session.expires = trio.current_time()  # as of a process that was stopped
        with pytest.raises(DaemonUnavailable, match="the pages are freed"):
            await pages.commit(reservation)
        assert await read(pages, keys_of(1)) == {}


async def test_a_page_that_was_written_to_behind_its_commit_is_missed_and_not_found_any_more(path):
    async with paged(path) as running, opened(running) as pages, opened(running, pool_bytes=0) as reader:
        reservation = await pages.reserve_write(keys_of(2))
        fill(reservation)
        late = memoryview(reservation.pages[1]).cast("B")  # what a thread that is late has in its hands
        await pages.commit(reservation)
        late[7] ^= 1
        lease = await reader.reserve_read(keys_of(2))
        blocks = SharedBlocks(SharedMemory(2 * SIZE), SIZE)
        assert list(await reader.load(lease, blocks.into([0, 1]))) == [LOADED, Missed("damaged")]
        await reader.release(lease)
        assert list((await reader.reserve_read(keys_of(2))).keys) == keys_of(1)


async def test_a_commit_that_nobody_answers_is_unproven_and_counts_as_there(path, monkeypatch):
    async with paged(path) as running, opened(running) as pages:
        reservation = await pages.reserve_write(keys_of(2))

        async def unanswered(keys, handles, sums):
            raise Unproven("a test")

        monkeypatch.setattr(pages._l1, "_register", unanswered)
        with pytest.raises(Unproven):
            await pages.commit(reservation)
        await until(lambda: running.statistics()["pages.unknown_blocks"] == 2, "it was not told")


# --- in a thread that knows no trio ------------------------------------------------------------------------------------

VERBS = ("reserve_write", "commit", "reserve_read", "load", "release")


def test_both_faces_have_the_same_verbs_with_the_same_arguments():
    for verb in VERBS:
        plain, waiting = (inspect.signature(getattr(face, verb)) for face in (BlockingPages, Pages))
        assert list(plain.parameters) == list(waiting.parameters)
        assert inspect.iscoroutinefunction(getattr(Pages, verb))


async def test_a_thread_that_knows_no_trio_writes_and_reads_pages(path):
    def use(url):
        with BlockingPages(url, block_bytes=SIZE, pool_bytes=POOL) as pages:
            reservation = pages.reserve_write(keys_of(4))
            fill(reservation)
            assert list(pages.commit(reservation)) == [STORED] * 4
            with pytest.raises(ReservationOver):
                pages.commit(reservation)
            pages.release(pages.reserve_write(keys_of(6)))
            lease = pages.reserve_read(keys_of(6))
            blocks = SharedBlocks(SharedMemory(4 * SIZE), SIZE)
            assert list(pages.load(lease, blocks.into(range(4)))) == [LOADED] * 4
            assert [bytes(view) for view in lease.views] == list(map(bytes_of, keys_of(4)))
            pages.release(lease)
            assert (pages.tier, pages.block_bytes) == ("maru", SIZE)
        with pytest.raises(DaemonUnavailable):
            pages.reserve_read(keys_of(1))

    async with paged(path) as running:
        await trio.to_thread.run_sync(use, running.url)
        await until(lambda: not len(running.sessions), "a session is left")
        with pytest.raises(DaemonUnavailable):
            await trio.to_thread.run_sync(BlockingPages(f"ipc://{path}/nowhere", block_bytes=SIZE, wait=0.01).start)


async def test_a_call_in_a_thread_that_takes_too_long_leaves_nothing_reserved(path):
    async with paged(path) as running, opened(running) as watcher:
        pages = BlockingPages(running.url, block_bytes=SIZE, pool_bytes=POOL, timeout=0.05)
        await trio.to_thread.run_sync(pages.start)
        asked = running._service.pages.reserve

        async def slow(session, request, epoch):
            await trio.sleep_forever()

        running._service.pages.reserve = slow
        with pytest.raises(trio.TooSlowError):
            await trio.to_thread.run_sync(pages.reserve_write, keys_of(2))
        running._service.pages.reserve = asked
        await until(lambda: not running.statistics()["requests"], "a request is left")
        await trio.to_thread.run_sync(pages.close)
        await nothing_is_reserved(running, watcher)
