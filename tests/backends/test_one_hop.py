"""Seed 000, Maru as the first level: each of its sequence diagrams, step by step, in the order that it draws.

The store, the retrieve with both of its branches, the delete; and the life around them. Recorded are the requests as they
arrive at the server, with how many keys they name; the pages that are allocated and freed; and the copies, which the engine
makes.

With a published server the requests are the very ones of the diagrams. With ours some are merged:

    store       BATCH_EXISTS, free duplicates, BATCH_REGISTER     one STORE, which says new or duplicate; free duplicates
    retrieve    BATCH_PIN, BATCH_LOOKUP                           one FIND, which pins
                BATCH_UNPIN                                       UNPIN
    delete      DELETE for each key                               one DROP, which tells missing from pinned

docs/how-to/use-maru-as-l1.md has the same table.
"""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import trio

from backends.abc import DUPLICATE, STORED, Deletion
from backends.maru.l1 import MaruL1Dispatcher
from backends.testing import payload_of
from maru import CannotMap, NoAnswer
from maru._wire import HEADER_BYTES, Code, read_header
from tests.support.maru_l1_world import DTYPE, KNOWN, MANY, MORE, SHAPES, Site, at_rest, open_site, read, settle, store
from tests.support.maru_world import PAGE, PublishedWorld, World

BACKGROUND = {"BEAT", "HEARTBEAT", "LIST_ALLOCATIONS"}
"""Signs of life, which come whenever it is time."""


class Record:
    """What happened, in order. One for a world and those sites of it that are watched."""

    def __init__(self, world):
        self.lines = []
        self.on = True
        arrive = world.arrive

        def watched(identity, frame):
            self.note(_request(frame))
            return arrive(identity, frame)

        world.arrive = watched

    def note(self, line):
        if self.on and line.split()[0] not in BACKGROUND:
            self.lines.append(line)

    def watch(self, site):
        """Its pages, too."""
        pages = site.handler._state.pages
        allocate, free = pages.allocate, pages._free_again

        def allocating(n):
            got = allocate(n)
            if got:
                self.note(f"allocate {len(got)}")
            return got

        def freeing(some):
            if some:
                self.note(f"free {len(some)}")
            free(some)

        pages.allocate, pages._free_again = allocating, freeing
        return site

    def copy_in(self, key, page):
        page[:] = payload_of(key, PAGE)
        self.note(f"copy {key.decode()}")

    def copy_out(self, key, view):
        assert bytes(view) == payload_of(key, PAGE)
        self.note(f"copy {key.decode()}")

    def take(self):
        lines, self.lines = self.lines, []
        return lines

    @contextlib.contextmanager
    def off(self):
        self.on = False
        try:
            yield
        finally:
            self.on = True


def _request(frame):
    """Its name, and how many keys it names."""
    body = msgspec.msgpack.decode(frame[HEADER_BYTES:]) if len(frame) > HEADER_BYTES else {}
    name = Code(read_header(frame).code).name
    if isinstance(body, dict):
        if name == "DELETE_KV":
            return f"{name} {bytes.fromhex(body['key']).decode()}"
        columns = [body[field] for field in ("keys", "entries") if field in body]
    else:  # ours: in columns, without names
        columns = [field for field in body if isinstance(field, list) and field and isinstance(field[0], str)]
    return f"{name} {len(columns[0])}" if columns else name


@contextlib.asynccontextmanager
async def recorded(world, *, known=()):
    """A record, an engine with its L1 by key, and another instance that has stored some keys."""
    record = Record(world)
    with record.off():
        async with open_site(world) as site, open_site(world, "b", known=known) as other:
            record.watch(site)
            record.on = True
            try:
                yield record, site, other
            finally:
                record.on = False
            await at_rest(world, site, other)


OURS, PUBLISHED = World, PublishedWorld
BOTH = pytest.mark.parametrize("server", [OURS, PUBLISHED], ids=["ours", "published"])


# --- data path: store ---------------------------------------------------------------------------------------------


async def store_by_key(record, l1, keys):
    l1 = MaruL1Dispatcher(l1)
    pages = await l1.reserve_write(keys)
    record.note("reserved")
    for key, page in pages.items():
        record.copy_in(key, page)
    return list((await l1.finish_write(keys)).values())


async def store_typed(record, l1, keys):
    async with await l1.reserve_write(keys) as reservation:
        record.note("reserved")
        for key, page in zip(reservation.keys, reservation.pages, strict=True):
            record.copy_in(key, page)
        return await reservation.commit()


STORE = {
    OURS: ["allocate 3", "reserved", "copy m0", "copy m1", "copy m2", "STORE 3"],
    PUBLISHED: [
        "allocate 3",
        "reserved",
        "copy m0",
        "copy m1",
        "copy m2",
        "BATCH_EXISTS_KV 3",
        "BATCH_REGISTER_KV 3",
    ],
}


@pytest.mark.parametrize("stored", [store_by_key, store_typed])
@BOTH
async def test_store_reserves_without_a_request_copies_then_registers(server, stored, autojump_clock):
    async with recorded(server()) as (record, site, other):
        assert await stored(record, site.l1, MORE) == [STORED] * 3
        assert record.take() == STORE[server]
        with record.off():
            assert await read(other.l1, MORE) == MORE


STORE_OF_A_DUPLICATE = {
    OURS: ["allocate 3", "reserved", "copy m0", "copy k0", "copy m1", "STORE 3", "free 1"],
    PUBLISHED: [
        "allocate 3",
        "reserved",
        "copy m0",
        "copy k0",
        "copy m1",
        "BATCH_EXISTS_KV 3",  # phase 1: which are there?
        "free 1",  # phase 2: here, and nobody is told
        "BATCH_REGISTER_KV 2",  # phase 3: the others
    ],
}


@pytest.mark.parametrize("stored", [store_by_key, store_typed])
@BOTH
async def test_store_frees_the_page_of_a_duplicate_here_without_telling_anybody(server, stored, autojump_clock):
    async with recorded(server(), known=KNOWN) as (record, site, _):
        outcomes = await stored(record, site.l1, [MORE[0], KNOWN[0], MORE[1]])
        assert outcomes == [STORED, DUPLICATE, STORED]
        assert record.take() == STORE_OF_A_DUPLICATE[server]


@BOTH
async def test_store_shows_nobody_a_page_before_all_of_it_is_copied(server, autojump_clock):
    async with recorded(server()) as (record, site, other):
        l1 = MaruL1Dispatcher(site.l1)
        pages = await l1.reserve_write(MORE)
        for key, page in pages.items():
            with record.off():
                assert await read(other.l1, MORE) == []
            record.copy_in(key, page)
        with record.off():
            assert await read(other.l1, MORE) == []
        await l1.finish_write(MORE)
        assert record.take() == [line for line in STORE[server] if line != "reserved"]


@BOTH
async def test_store_that_is_aborted_is_heard_of_by_nobody(server, autojump_clock):
    async with recorded(server()) as (record, site, _):
        async with await site.l1.reserve_write(MORE) as reservation:
            record.copy_in(MORE[0], reservation.pages[0])
        assert record.take() == ["allocate 3", "copy m0", "free 1", "free 1", "free 1"]


# --- data path: retrieve ------------------------------------------------------------------------------------------


async def retrieve_by_key(record, l1, keys):
    l1 = MaruL1Dispatcher(l1)
    found = list(await l1.reserve_read(keys))
    record.note("reserved")
    for key, view in l1.unsafe_read(found).items():
        record.copy_out(key, view)
    await l1.finish_read(found)
    return found


async def retrieve_typed(record, l1, keys):
    async with await l1.reserve_read(keys) as lease:
        record.note("reserved")
        for key, view in zip(lease.keys, lease.views, strict=True):
            record.copy_out(key, view)
        lease.check()
    return list(lease.keys)


RETRIEVE = {
    OURS: (["FIND 4", "reserved"], ["copy k0", "copy k1", "copy k2", "UNPIN 3"]),
    PUBLISHED: (
        ["BATCH_PIN_KV 4", "BATCH_LOOKUP_KV 3", "reserved"],
        ["copy k0", "copy k1", "copy k2", "BATCH_UNPIN_KV 3"],
    ),
}


@pytest.mark.parametrize("retrieved", [retrieve_by_key, retrieve_typed])
@BOTH
async def test_retrieve_pins_and_finds_reads_without_a_request_then_unpins(server, retrieved, autojump_clock):
    async with recorded(server(), known=KNOWN) as (record, site, _):
        with record.off():
            await read(site.l1, KNOWN[:1])  # the region is mapped by now
            await trio.sleep(0.01)
        assert await retrieved(record, site.l1, [*KNOWN, MORE[0]]) == KNOWN
        await trio.sleep(0.01)
        reserving, reading = RETRIEVE[server]
        assert record.take() == [*reserving, *reading]


@BOTH
async def test_retrieve_holds_what_it_found_until_it_is_finished(server, autojump_clock):
    async with recorded(server(), known=KNOWN) as (record, site, other):
        l1 = MaruL1Dispatcher(site.l1)
        await l1.reserve_read(KNOWN)
        with record.off():
            assert await other.l1.delete(KNOWN) == [Deletion.PINNED] * 3
        assert list(l1.unsafe_read(KNOWN)) == KNOWN
        await l1.finish_read(KNOWN)
        await trio.sleep(0.01)
        with record.off():
            assert await other.l1.delete(KNOWN) == [Deletion.DELETED] * 3


async def test_retrieve_that_fails_behind_the_pins_rolls_them_back(autojump_clock):
    """The first branch: pinning and finding are two requests with a published server only, and the second one fails."""
    world = PublishedWorld()
    async with recorded(world, known=KNOWN) as (record, site, _):
        site.socket.fate = lambda code: "cut" if code == Code.BATCH_LOOKUP_KV else None
        with pytest.raises(NoAnswer):
            await MaruL1Dispatcher(site.l1).reserve_read(KNOWN)
        await trio.sleep(0.01)
        site.socket.fate = lambda code: None
        lines = record.take()
        assert lines[:2] == ["BATCH_PIN_KV 3", "BATCH_LOOKUP_KV 3"]
        assert lines[-1] == "BATCH_UNPIN_KV 3"
        assert not +world.pins


UNRESOLVED = {
    OURS: ["FIND 3", "UNPIN 1", "UNPIN 2"],
    PUBLISHED: ["BATCH_PIN_KV 3", "BATCH_LOOKUP_KV 3", "BATCH_UNPIN_KV 1", "BATCH_UNPIN_KV 2"],
}


@BOTH
async def test_retrieve_unpins_what_is_behind_the_first_that_cannot_be_resolved(server, autojump_clock):
    """The second branch: of three keys the last lies in a region that cannot be mapped here."""
    world = server()
    async with recorded(world, known=KNOWN[:2]) as (record, site, _):
        with record.off():
            await read(site.l1, KNOWN[:1])
            async with open_site(world, "c", known=KNOWN[2:]) as third:
                mapping, gone = site.handler._driver.map, third.handler.get_owned_region_ids()[0]

                async def cannot(effect):
                    if effect.region_id == gone:
                        raise CannotMap("gone")
                    return await mapping(effect)

                site.handler._driver.map = cannot
                record.on = True
                async with await site.l1.reserve_read(KNOWN) as lease:
                    assert list(lease.keys) == KNOWN[:2]
                    await trio.sleep(0.01)
                await trio.sleep(0.01)
                record.on = False
                site.handler._driver.map = mapping
                assert await third.l1.clear() == {KNOWN[2]: Deletion.DELETED}
        assert [line for line in record.take() if line != "REGION"] == UNRESOLVED[server]


# --- both at once -------------------------------------------------------------------------------------------------

FINISH_AND_RESERVE = {
    OURS: ["STORE 3", "FIND 3"],
    PUBLISHED: ["BATCH_EXISTS_KV 3", "BATCH_REGISTER_KV 3", "BATCH_PIN_KV 3", "BATCH_LOOKUP_KV 3"],
}


@BOTH
async def test_finish_write_and_reserve_read_is_the_one_and_then_the_other(server, autojump_clock):
    async with recorded(server()) as (record, site, _):
        l1 = MaruL1Dispatcher(site.l1)
        for key, page in (await l1.reserve_write(MORE)).items():
            record.copy_in(key, page)
        record.take()
        assert list(await l1.finish_write_and_reserve_read(MORE)) == MORE
        assert record.take() == FINISH_AND_RESERVE[server]
        for key, view in l1.unsafe_read(MORE).items():
            record.copy_out(key, view)
        assert record.take() == ["copy m0", "copy m1", "copy m2"]
        await l1.finish_read(MORE)


# --- data path: delete --------------------------------------------------------------------------------------------

DELETE = {
    OURS: ["DROP 3", "free 1"],
    PUBLISHED: ["DELETE_KV k0", "free 1", "DELETE_KV m0", "DELETE_KV k1", "BATCH_EXISTS_KV 3"],
}


@BOTH
async def test_delete_tells_missing_from_pinned(server, autojump_clock):
    """The document takes both for the same. A published server does so, too, and is asked once more."""
    async with recorded(server(), known=KNOWN[1:2]) as (record, site, other):
        with record.off():
            await store(site.l1, KNOWN[:1])
            lease = await other.l1.reserve_read(KNOWN[1:2])
        answers = await MaruL1Dispatcher(site.l1).delete([KNOWN[0], MORE[0], KNOWN[1]])
        assert answers == {KNOWN[0]: Deletion.DELETED, MORE[0]: Deletion.MISSING, KNOWN[1]: Deletion.PINNED}
        assert record.take() == DELETE[server]
        with record.off():
            await lease.release()


async def test_delete_of_its_own_frees_the_pages_with_the_answer(autojump_clock):
    async with recorded(World()) as (record, site, _):
        with record.off():
            await store(site.l1, MORE)
        await site.l1.delete(MORE)
        assert record.take() == ["DROP 3", "free 3"]


# --- the life around it -------------------------------------------------------------------------------------------


async def test_the_pool_comes_up_with_the_first_layout_and_a_shutdown_deletes_nothing(autojump_clock):
    world = World()
    record = Record(world)
    site = Site(world)
    async with site.l1 as l1:
        await trio.sleep(100)
        assert (record.take(), l1.get_memory_usage()) == ([], (0, 0))
        await l1.register_kv_layout(SHAPES, DTYPE)
        assert record.take() == ["HANDSHAKE", "REQUEST_ALLOC", "REGION"]
        await l1.register_kv_layout(SHAPES, DTYPE)
        assert record.take() == []
        await store(l1, MORE)
        record.take()
    assert record.take() == ["CLOSE"]
    with record.off():
        async with open_site(world, "b") as other:
            assert await read(other.l1, MORE) == MORE
            await at_rest(world, other)


async def test_nobody_evicts_stores_or_deletes_behind_its_back(autojump_clock):
    """What the document switches off. A full pool is the server's to make room in; an idle hour has signs of life only."""
    async with recorded(World()) as (record, site, _):
        for keys in (KNOWN, MANY, MORE):
            async with await site.l1.reserve_write(keys) as reservation:
                assert len(reservation.keys) == len(keys)
                for key, page in zip(reservation.keys, reservation.pages, strict=True):
                    record.copy_in(key, page)
                await reservation.commit()
        assert [line for line in record.take() if not line.startswith(("copy", "allocate", "free"))] == [
            "STORE 3",
            "RECLAIM",  # "make room for so many": which go, the server's own order of use says
            "STORE 8",
            "RECLAIM",
            "STORE 3",
        ]
        await trio.sleep(3600)
        assert record.take() == []
        await settle(site)
