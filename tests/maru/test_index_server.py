"""The shared index of a server that runs: who gets it, what it shows when, and what becomes of it."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from maru import Deleted, Loaded, MaruConfig, MaruHandler, ServerConfig, ServerRefused, Stored, open_server
from maru._index import IndexReader, bytes_for
from maru.base.descriptors import fetch_index_descriptor
from tests.support.maru_processes import Server
from tests.support.published import Ask, PublishedClient

PAGE = 32 << 10
PAGES = 64


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def config(pool: Path, **knobs) -> ServerConfig:
    return ServerConfig(pool_path=str(pool), capacity_bytes=64 << 20, **knobs)


@asynccontextmanager
async def client(pool: Path, **knobs):
    url = f"ipc://{pool}/maru.sock"
    async with MaruHandler(
        MaruConfig(server_url=url, pool_size=PAGES * PAGE, chunk_size_bytes=PAGE, timeout_ms=30_000, **knobs)
    ) as handler:
        yield handler


async def fetch(handler: MaruHandler) -> IndexReader:
    state = handler._state
    fd = await trio.to_thread.run_sync(fetch_index_descriptor, state.descriptors, state.token, 10.0)
    try:
        return IndexReader(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)


async def filled(handler: MaruHandler) -> IndexReader:
    """One whose misses say something: what was there has been filled in."""
    reader = await fetch(handler)
    await until(lambda: reader.find(["nobody"]).is_definite)
    return reader


async def until(holds) -> None:
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110 - memory tells nobody that it has changed
            await trio.sleep(0.001)


def list_indexes(pool: Path) -> list[Path]:
    return list(pool.glob("maru.index.*"))


def names_of(handler: MaruHandler, keys: list[str]) -> list[str]:
    return handler._state.names(keys)


async def put(handler: MaruHandler, keys: list[str]) -> None:
    answers = await handler.batch_put(keys, [key.encode().ljust(PAGE, b".") for key in keys])
    assert answers == [Stored.NEW] * len(keys)


def bytes_of(handler: MaruHandler, found) -> list[bytes]:
    spans = handler._state.spans
    return [
        bytes(spans[region].view(offset, length))
        for region, offset, length in zip(found.regions, found.offsets, found.lengths, strict=True)
    ]


# --- what it shows ------------------------------------------------------------------------------------------------


async def test_what_was_stored_is_found_when_the_answer_comes_and_what_was_deleted_is_not(pool: Path) -> None:
    async with open_server(config(pool)), client(pool) as handler:
        reader = await filled(handler)
        keys = [f"k{number}" for number in range(8)]
        for key in keys:
            await put(handler, [key])
            assert len(reader.find([key])) == 1
        found = reader.find(keys)
        assert bytes_of(handler, found) == [key.encode().ljust(PAGE, b".") for key in keys]
        assert found.checksums[0] is not None
        assert await handler.delete("k3") is Deleted.DELETED
        assert list(reader.changed(found)) == [3]
        again = reader.find(keys)
        assert list(again.positions) == [0, 1, 2, 4, 5, 6, 7] and again.is_definite


async def test_what_is_evicted_is_gone_before_its_owner_writes_there(pool: Path) -> None:
    async with open_server(config(pool)), client(pool) as handler:
        reader = await filled(handler)
        keys = [f"k{number}" for number in range(3 * PAGES)]
        for start in range(0, len(keys), 4):
            before = reader.find(keys)
            await put(handler, keys[start : start + 4])
            wrong = [
                at
                for at, page in enumerate(bytes_of(handler, before))
                if page != keys[before.positions[at]].encode().ljust(PAGE, b".")
            ]
            assert set(wrong) <= set(reader.changed(before))
        assert len(reader.find(keys)) <= PAGES


async def test_a_removed_file_is_made_again(pool: Path) -> None:
    async with open_server(config(pool)), client(pool) as handler:
        await put(handler, ["k"])
        before = await filled(handler)
        for path in list_indexes(pool):
            path.unlink()
        after = await filled(handler)
        assert len(after.find(["k"])) == 1
        assert before.is_retired
        async with client(pool) as other:
            assert len((await filled(other)).find(["k"])) == 1


async def test_what_is_there_already_is_filled_in(pool: Path) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        keys = [f"k{number}" for number in range(PAGES // 2)]
        await put(handler, keys)
        reader = await filled(handler)
        assert len(reader.find(keys)) == len(keys)
        assert server.statistics().indexes.tenants[""].keys == len(keys)


async def test_an_index_grows_into_a_new_file_and_the_old_one_says_so(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maru._server.indexes.LEAST_KEYS", 16)
    async with open_server(config(pool)) as server, client(pool) as handler:
        old = await filled(handler)
        keys = [f"k{number}" for number in range(PAGES - 4)]
        for key in keys:
            await put(handler, [key])
        await until(lambda: old.is_retired)
        assert not old.find(["nobody"]).is_definite
        new = await filled(handler)
        assert len(new.find(keys)) == len(keys)
        assert server.statistics().indexes.grown >= 1
        await until(lambda: len(list_indexes(pool)) == 1)


async def test_an_index_is_sized_for_the_keys_of_its_tenant(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru._server.indexes.LEAST_KEYS", 8)
    async with open_server(config(pool)) as server, client(pool, tenant="many") as many, client(pool) as none:
        keys = [f"k{number}" for number in range(PAGES)]
        await put(many, keys)
        await filled(none)
        assert len((await filled(many)).find(names_of(many, keys))) == PAGES
        await until(lambda: not server._indexes.statistics().tenants["many"].left_out)
        slots = {tenant: one.slots for tenant, one in server.statistics().indexes.tenants.items()}
        assert PAGES <= slots["many"] <= 4 * PAGES
        assert slots[""] <= 16


async def test_tenants_without_a_key_leave_their_indexes_to_others(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru._server.indexes.MOST_TENANTS", 2)
    async with open_server(config(pool)) as server, client(pool, tenant="a") as a, client(pool, tenant="b") as b:
        for made_up in (a, b):
            await filled(made_up)
        async with client(pool, tenant="good") as good:
            await put(good, ["k"])
            assert len((await filled(good)).find(names_of(good, ["k"]))) == 1
            assert "good" in server.statistics().indexes.tenants
            with pytest.raises(ServerRefused, match="2 tenants already have an index"):
                for made_up in (a, b):
                    await fetch(made_up)


async def test_a_file_that_is_named_like_an_index_is_left_alone(pool: Path) -> None:
    os.mkdir(pool, 0o700)
    names = ["maru.index.notes.md", "maru.index.", "maru.index.1.bak", "maru.index.-1"]
    for name in names:
        (pool / name).write_text("an operator's " * 100)
    (pool / "maru.index.7").write_bytes(bytes(4096))  # as an earlier server has left it
    async with open_server(config(pool)):
        assert not (pool / "maru.index.7").exists()
    assert {(pool / name).read_text() for name in names} == {"an operator's " * 100}


async def test_all_index_files_together_have_a_bound(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru._server.indexes.LEAST_KEYS", 16)
    monkeypatch.setattr("maru._server.indexes.MOST_TENANTS", 3)
    async with open_server(config(pool, max_entries=16)) as server, client(pool, tenant="a") as a, client(pool) as b:
        for one in (a, b):
            await put(one, ["k"])
            await filled(one)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server._indexes, "_most_bytes", 2 * bytes_for(16))
            async with client(pool, tenant="c") as c:
                with pytest.raises(ServerRefused, match="together have at most"):
                    await fetch(c)
        async with client(pool, tenant="c") as c:
            await filled(c)


async def test_uses_that_were_noted_before_an_index_grew_are_counted(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maru._server.indexes.LEAST_KEYS", 16)
    rarely = 1.0  # else the server counts them of itself, before the index grows
    async with open_server(config(pool, watermark_interval=rarely)) as server, client(pool) as handler:
        early = [f"early {number}" for number in range(8)]
        await put(handler, early)
        used = early[:4]
        await handler.batch_exists(early)  # gets the index
        await filled(handler)
        assert await handler.batch_get_into(used, [bytearray(PAGE) for _ in used]) == [Loaded.LOADED] * len(used)
        assert server.statistics().indexes.grown == 0
        later = [f"later {number}" for number in range(PAGES - 16)]
        await put(handler, later)
        await until(lambda: server.statistics().indexes.grown > 0)
        await put(handler, [f"last {number}" for number in range(20)])  # 8 of them have no room
        there = await handler.batch_exists(early)
        assert there[:4] == [True] * 4 and not all(there[4:])


async def test_uses_are_counted_behind_the_next_store_of_who_noted_them(pool: Path) -> None:
    rarely = 1.0
    async with open_server(config(pool, watermark_interval=rarely)) as server, client(pool) as handler:
        keys = [f"k{number}" for number in range(4)]
        await put(handler, keys)
        await handler.batch_exists(keys)  # gets the index
        await filled(handler)
        before = server.statistics().service.directory.found
        assert await handler.batch_get_into(keys, [bytearray(PAGE) for _ in keys]) == [Loaded.LOADED] * len(keys)
        await put(handler, ["new"])
        assert server.statistics().service.directory.found == before + len(keys)


async def test_a_tenant_sees_its_own_names_only(pool: Path) -> None:
    async with (
        open_server(config(pool)),
        client(pool, tenant="one") as one,
        client(pool, tenant="two", namespace="n") as two,
    ):
        first, second = await filled(one), await filled(two)
        await put(one, ["k"])
        await put(two, ["k", "l"])
        assert [len(first.find(names_of(each, ["k", "l"]))) for each in (one, two)] == [1, 0]
        assert [len(second.find(names_of(each, ["k", "l"]))) for each in (one, two)] == [0, 2]


async def test_pages_of_published_owners_are_left_out_and_a_miss_says_so(pool: Path) -> None:
    async with open_server(config(pool, host="127.0.0.1", port=0)) as server, client(pool) as handler:
        reader = await filled(handler)

        def publish() -> None:
            with PublishedClient(server.endpoints[0]) as published:
                handle = published.ask(Ask.REQUEST_ALLOC, instance_id="theirs", size=1 << 20)["handle"]
                entry = {"key": "theirs", "region_id": handle["region_id"], "kv_offset": 0, "kv_length": PAGE}
                assert published.ask(Ask.REGISTER_KV, **entry)["is_new"]

        await trio.to_thread.run_sync(publish)
        found = reader.find(["theirs"])
        assert not found and not found.is_definite
        assert await handler.exists("theirs")


# --- who gets it --------------------------------------------------------------------------------------------------


async def test_only_a_session_gets_it_and_only_to_read(pool: Path) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        state = handler._state
        fd = await trio.to_thread.run_sync(fetch_index_descriptor, state.descriptors, state.token, 10.0)
        with pytest.raises(OSError, match="denied"):
            mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        os.close(fd)
        with pytest.raises(ServerRefused, match="no such session"):
            await trio.to_thread.run_sync(fetch_index_descriptor, state.descriptors, bytes(16), 10.0)
        assert server.statistics().indexes.handed_out == 1


async def test_a_server_that_is_told_so_has_none(pool: Path) -> None:
    async with open_server(config(pool, index="off")), client(pool) as handler:
        with pytest.raises(ServerRefused, match="index = off"):
            await fetch(handler)
        assert not any(name.startswith("maru.index.") for name in os.listdir(pool))


async def test_without_room_for_a_file_there_is_none_and_everything_else_works(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with open_server(config(pool)), client(pool) as handler:
        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(ServerRefused, match="No space left"):
            await fetch(handler)
        monkeypatch.undo()
        await put(handler, ["k"])
        assert len((await filled(handler)).find(["k"])) == 1


async def test_index_goes_with_the_last_session(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru._server.indexes._LOOK", 0.05)
    monkeypatch.setattr("maru._server.indexes.MOST_TENANTS", 2)
    async with open_server(config(pool)) as server:
        for number in range(4):
            async with client(pool, tenant=f"t{number}") as handler:
                await put(handler, ["k"])
                left = await filled(handler)
            await until(lambda: not server.statistics().indexes.tenants)
            assert left.is_retired
        await until(lambda: not any(name.startswith("maru.index.") for name in os.listdir(pool)))


async def test_indexes_leave_the_journal_its_room(
    pool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        await put(handler, ["k"])
        free, fields = [server._storage.journal.room_bytes - 1], list(os.statvfs(pool))
        monkeypatch.setattr(
            "os.fstatvfs",
            lambda fd: os.statvfs_result([fields[0], 1, *fields[2:4], free[0], *fields[5:]]),
        )
        for _ in range(2):
            with pytest.raises(ServerRefused, match="kept for the journal"):
                await fetch(handler)
        async with client(pool) as other:  # no region is made either, and it reads all the same
            assert await other.exists("k")
            assert await other.batch_put(["l"], [bytes(PAGE)]) == [Stored.FULL]
        free[0] += 8 << 20
        assert len((await filled(handler)).find(["k"])) == 1
    assert caplog.text.count("no index can be made") == 1
    assert caplog.text.count("can be made in") == 2


async def test_indexes_give_way_to_a_full_journal(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        await put(handler, ["k"])
        reader = await filled(handler)
        journal, refusals = server._storage.journal, [None]
        write = journal._write

        def full(fd: int, data: bytes) -> int:
            if refusals:
                refusals.pop()
                raise OSError(28, "No space left on device")
            return write(fd, data)

        monkeypatch.setattr(journal, "_write", full)
        await put(handler, ["l"])
        assert reader.is_retired and not refusals
        assert await handler.batch_exists(["k", "l"]) == [True, True]
        await until(lambda: not any(name.startswith("maru.index.1") for name in os.listdir(pool)))
        assert len((await filled(handler)).find(["k", "l"])) == 2


@pytest.fixture
def short_once(monkeypatch: pytest.MonkeyPatch):
    """Have a method of an object find no memory, once."""

    def patch(owner: object, name: str) -> None:
        method, calls = getattr(owner, name), []

        def short(*args: object) -> object:
            if not calls:
                calls.append(args)
                raise MemoryError
            return method(*args)

        monkeypatch.setattr(owner, name, short)

    return patch


@pytest.mark.parametrize("what", ["fill", "end_filling"])
async def test_an_index_that_finds_no_memory_for_names_goes_alone(
    pool: Path, caplog: pytest.LogCaptureFixture, short_once, what: str
) -> None:
    async with (
        open_server(config(pool)) as server,
        client(pool, tenant="good") as good,
        client(pool, tenant="short") as short,
    ):
        await put(good, ["k"])
        await put(short, ["k"])
        stays = await filled(good)
        short_once(server._indexes._indexes, what)
        gone = await fetch(short)
        await until(lambda: gone.is_retired)
        assert await short.exists("k")  # by message
        assert len((await filled(short)).find(names_of(short, ["k"]))) == 1
        assert not stays.is_retired and len(stays.find(names_of(good, ["k"]))) == 1
    assert caplog.text.count("the index of tenant 'short' is dropped") == 1


async def test_indexes_without_memory_for_what_was_stored_go_and_the_store_is_answered(
    pool: Path, caplog: pytest.LogCaptureFixture, short_once
) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        gone = await filled(handler)
        short_once(server._indexes._indexes, "publish")
        await put(handler, ["k"])
        assert gone.is_retired and await handler.exists("k")
        assert len((await filled(handler)).find(["k"])) == 1
    assert caplog.text.count("no memory is left") == 1


async def test_an_index_for_which_there_is_no_memory_is_refused(pool: Path, short_once) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        short_once(server._indexes, "_count_keys")
        with pytest.raises(ServerRefused, match="no memory is left"):
            await fetch(handler)
        await filled(handler)


async def test_a_region_for_which_there_is_no_memory_is_refused_alone(pool: Path, short_once) -> None:
    async with open_server(config(pool)) as server, client(pool) as handler:
        short_once(server, "_make_region")
        assert await handler.batch_put(["k"], [bytes(PAGE)]) == [Stored.FULL]
        await put(handler, ["l"])


# --- restarts -----------------------------------------------------------------------------------------------------


async def test_the_next_server_retires_it_and_shows_the_same_keys(pool: Path) -> None:
    async with client(pool, auto_connect=True) as handler:
        async with open_server(config(pool)):
            await put(handler, ["k"])
            old = await filled(handler)
            found = old.find(["k"])
        assert not old.is_retired  # nobody changes anything
        async with open_server(config(pool)) as server:
            assert old.is_retired and list(old.changed(found)) == [0]
            assert await handler.exists("k")
            await handler.batch_put(["l"], [bytes(PAGE)])  # by now it has said the new epoch
            new = await filled(handler)
            assert new.epoch == server.epoch != old.epoch
            assert len(new.find(["k", "l"])) == 2


def test_a_killed_server_leaves_an_index_that_the_next_one_retires_before_it_is_ready(pool: Path) -> None:
    with Server(pool) as server:
        left = trio.run(_put_and_fetch, pool)
        server.kill()
        assert len(left.find(["k"])) == 1 and not left.is_retired
        server.start()
        assert left.is_retired
        assert not any(name.startswith("maru.index.") for name in os.listdir(pool))


async def _put_and_fetch(pool: Path) -> IndexReader:
    async with client(pool) as handler:
        await put(handler, ["k"])
        return await filled(handler)


async def test_a_server_that_has_ended_keeps_no_memory_open_although_what_it_had_is_frozen(pool):
    def open_descriptors():
        return len(os.listdir("/proc/self/fd"))

    async def once():
        async with open_server(config(pool)), client(pool) as handler:
            await filled(handler)

    await once()
    before = open_descriptors()
    for _ in range(3):
        await once()
    assert open_descriptors() == before
