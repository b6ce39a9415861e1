"""Pages that engines of tenants write and read themselves: quotas, misses that tell nothing, and KV events."""

import pytest
import trio

from backends.abc import STORED, Rejected
from maru.kv_events import list_lazily, open_mirror
from offload.client import DaemonUnavailable, SharedBlocks, SharedMemory, open_client, open_connection
from offload.daemon import _page_keys, event_name
from offload.daemon._messages import Commit, Counters, Done, Reserved, ReserveWrite, Stats
from offload.daemon._page_keys import PageKeys
from tests.daemon.test_pages import keys_of, opened, paged, read, store, until
from tests.support.daemons import PATIENCE, SIZE

HIS, HERS = "a" * 16, "b" * 16
ROOM = 8


def tenants(directory, quota=ROOM * SIZE):
    file = directory / "tenants.toml"
    file.write_text(f'[tenants.a]\ncredential = "{HIS}"\nquota = {quota}\n[tenants.b]\ncredential = "{HERS}"\n')
    file.chmod(0o600)
    return str(file)


def used(running):
    return running.statistics()["tenant.a.used_bytes"] // SIZE


async def test_what_a_tenant_has_committed_is_a_miss_of_another_one_like_what_nobody_has(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
        opened(running, credential=HERS) as hers,
    ):
        await store(his, keys_of(3))
        assert await read(hers, keys_of(3)) == await read(hers, keys_of(3, "nobody")) == {}
        reservation = await hers.reserve_write(keys_of(3))  # nor is it a duplicate to her
        assert len(reservation.keys) == 3 and not reservation.refused
        await hers.release(reservation)
        cache = SharedBlocks(SharedMemory(SIZE), SIZE)
        async with (
            open_client(cache, running.url, credential=HERS) as engine,
            await engine.lookup(keys_of(3)) as hit,
        ):
            assert not hit.keys and not hit.unavailable


async def test_room_for_a_prompt_does_not_cost_its_own_prefix(path, tmp_path):
    async with paged(path, tenants_file=tenants(tmp_path)) as running, opened(running, credential=HIS) as pages:
        there = keys_of(ROOM)
        await store(pages, there)  # the quota is full
        prompt = [*there[:2], b"another"]
        assert await store(pages, prompt) == [STORED]
        assert list(await read(pages, prompt)) == prompt


async def test_without_a_credential_there_are_no_pages(path, tmp_path):
    async with paged(path, tenants_file=tenants(tmp_path)) as running:
        with pytest.raises(Exception, match="credential"):
            async with opened(running):
                pass


async def test_what_is_reserved_counts_and_what_is_given_up_does_not_any_more(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
    ):
        first, second = await his.reserve_write(keys_of(5)), await his.reserve_write(keys_of(5, "other"))
        assert used(running) == ROOM
        assert list(second.refused.values()) == [Rejected("quota")] * 2
        await his.release(first)
        await until(lambda: used(running) == 3, "it counts still")
        await his.commit(second)
        await until(lambda: not running.statistics()["pages.announced"], "it was not told")
        assert used(running) == 3
        assert running.statistics()["tenant.a.refused_blocks"] == 2


async def test_what_a_tenant_reserves_beyond_its_quota_makes_its_oldest_pages_go_and_no_others(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
        opened(running, credential=HERS) as hers,
    ):
        await store(hers, keys_of(20))
        for at in range(0, 12, 4):
            assert list(await store(his, keys_of(12)[at : at + 4])) == [STORED] * 4
        assert used(running) == ROOM
        assert await read(his, keys_of(4)) == {}
        assert len(await read(his, keys_of(12)[4:])) == ROOM
        assert len(await read(hers, keys_of(20))) == 20
        assert running.statistics()["tenant.a.evicted_blocks"] == 4


async def test_pages_count_for_their_tenant_though_their_commit_is_never_told(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
    ):
        his._tell = lambda session, number, fates: (
            None
        )  # as of an engine that is killed right behind the page store's answer
        await store(his, keys_of(3))
        lost = await his.reserve_write(keys_of(2, "lost"))
        assert used(running) == 5 and running.statistics()["pages.announced"] == 2
        for session in running.sessions:
            running._service.end(session, "a test")
        await running._service.wait_given_back()
        assert used(running) == 3
        assert running.statistics()["pages.unknown_blocks"] == 5
        del lost


async def test_where_the_page_store_does_not_tell_what_is_committed_counts_by_its_engines_word(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
    ):
        running._engine.page_store = None  # as if others ran it
        running._service._opened(running.engine)
        running._service.quotas._watching = False
        assert not running._service.quotas.all_told
        await store(his, keys_of(3))
        await until(lambda: not running.statistics()["pages.announced"], "it was not told")
        assert used(running) == 3


async def test_what_an_engine_that_is_lost_may_have_stored_counts_where_the_page_store_does_not_answer(
    path, tmp_path, monkeypatch
):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
    ):
        running._engine.page_store = None
        running._service._opened(running.engine)
        lost = await his.reserve_write(keys_of(2))

        async def silent(keys):
            raise DaemonUnavailable("", "a test")

        monkeypatch.setattr(running.engine.tiers["maru"], "contains", silent)
        for session in running.sessions:
            running._service.end(session, "a test")
        await running._service.wait_given_back()
        assert used(running) == 2
        del lost


async def test_a_reservation_whose_room_is_awaited_when_it_is_cancelled_counts_nothing(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        open_connection(running.url, credential=HIS) as connection,
        opened(running, credential=HIS) as his,
    ):
        await store(his, keys_of(ROOM))
        asked, go_on = trio.Event(), trio.Event()
        delete = running.engine.delete

        async def slow(keys, **options):
            asked.set()
            await go_on.wait()
            return await delete(keys, **options)

        running.engine.delete = slow
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.ask, lambda seq: ReserveWrite(seq, keys_of(2, "new")), Reserved)
            await asked.wait()
            nursery.cancel_scope.cancel()
        go_on.set()
        await until(lambda: not running.statistics()["requests"], "a request is left")
        assert running.statistics()["pages.announced"] == 0 and used(running) <= ROOM
        assert (await connection.ask(lambda seq: Commit(seq, 1, b"\1\1"), Done)).count == 0


async def test_a_tenant_is_told_its_own_reservations(path, tmp_path):
    async with (
        paged(path, tenants_file=tenants(tmp_path)) as running,
        open_connection(running.url, credential=HIS) as his,
        open_connection(running.url, credential=HERS) as hers,
    ):
        await his.ask(lambda seq: ReserveWrite(seq, keys_of(2)), Reserved)
        told = [(await one.ask(lambda seq: Stats(seq), Counters)).values["session.announced"] for one in (his, hers)]
        assert told == [1, 0]


async def test_pages_that_come_and_go_are_told_as_events_of_their_tier(path):
    async with (
        paged(path, kv_events="ipc") as running,
        opened(running) as pages,
        open_mirror(*running.events_at) as mirror,
    ):
        await store(pages, keys_of(3))
        with trio.fail_after(PATIENCE):
            await mirror.wait(lambda one: one.is_current and set(one.held().get("maru", ())) == set(keys_of(3)))
            await running.engine.delete(keys_of(1))
            await mirror.wait(lambda one: set(one.held().get("maru", ())) == set(keys_of(3)[1:]))


async def test_of_a_tenants_pages_others_are_told_no_key(path, tmp_path):
    async with (
        paged(path, kv_events="ipc", tenants_file=tenants(tmp_path)) as running,
        opened(running, credential=HIS) as his,
        open_mirror(*running.events_at) as mirror,
    ):
        await store(his, keys_of(1))
        with trio.fail_after(PATIENCE):
            await mirror.wait(lambda one: set(one.held().get("maru", ())) == {event_name(HIS, keys_of(1)[0])})


def test_names_that_are_no_keys_of_a_daemon_are_passed_over():
    class Names:
        def list_keys(self):
            return ["6b", "6B", "6 b", "model@1", "\x1f1:a1:b\x1f6b", ""]

        def watch_keys(self, watcher):
            watcher.stored(["6b", "x"])
            watcher.removed(["x"])
            return lambda: None

    class Watcher:
        def __init__(self):
            self.told = []

        def stored(self, keys):
            self.told.append(keys)

        removed = stored

    book, watcher = PageKeys(Names()), Watcher()
    assert book.list_keys() == [b"k", b""]
    assert [list(list_lazily(book)[at : at + 2]) for at in range(0, 6, 2)] == [[b"k"], [], [b""]]
    book.watch_keys(watcher)
    assert watcher.told == [[b"k"]]


def test_names_are_made_keys_when_they_are_asked_for(monkeypatch):
    class Names:
        def list_keys(self):
            return [f"{at:02x}" for at in range(100)]

    made, key_of = [], _page_keys._key
    monkeypatch.setattr(_page_keys, "_key", lambda name: made.append(name) or key_of(name))
    keys = list_lazily(PageKeys(Names()))
    assert len(keys) == 100 and not made
    assert keys[16:18] == [b"\x10", b"\x11"] and made == ["10", "11"]
