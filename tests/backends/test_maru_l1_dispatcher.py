"""The flow of the document by key: the side channel, over a server in virtual time."""

from __future__ import annotations

import pytest
import trio

from backends import MissingKeys
from backends.abc import DUPLICATE, STORED, Deletion
from backends.maru.l1 import KVLayout, MaruL1Dispatcher
from backends.testing import payload_of
from maru import LeaseLost
from tests.support.maru_l1_world import ALL, KNOWN, MANY, MORE, at_rest, open_site, settle, store
from tests.support.maru_world import PAGE, World
from tests.support.steps import at_every_step, played


def fill(pages):
    for key, page in pages.items():
        page[:] = payload_of(key, PAGE)


def assert_right(views):
    for key, view in views.items():
        assert bytes(view) == payload_of(key, PAGE), key


async def test_the_flow_of_the_document_by_key(autojump_clock):
    world = World()
    async with open_site(world) as site, open_site(world, "b") as other:
        writer, reader = MaruL1Dispatcher(site.l1), MaruL1Dispatcher(other.l1)
        pages = await writer.reserve_write(MORE)
        assert list(pages) == MORE
        fill(pages)
        assert await writer.finish_write(MORE) == dict.fromkeys(MORE, STORED)
        views = await reader.reserve_read([*MORE, *KNOWN])
        assert list(views) == MORE
        sent = other.socket.sent
        assert_right(reader.unsafe_read(MORE[:2]))
        assert_right(reader.unsafe_read(MORE[2:]))
        assert other.socket.sent == sent
        assert await writer.delete([MORE[0], KNOWN[0]]) == {MORE[0]: Deletion.PINNED, KNOWN[0]: Deletion.MISSING}
        await reader.finish_read(MORE)
        assert writer.get_memory_usage() == (3 * PAGE, 8 * PAGE)
        assert writer.report_status().stored == 3
        await trio.sleep(0.01)  # nobody waits for the answer to an unpin
        assert await writer.clear() == dict.fromkeys(MORE, Deletion.DELETED)
        await at_rest(world, site, other)


async def test_part_of_what_was_reserved_is_finished_and_the_rest_stays_reserved(autojump_clock):
    world = World()
    async with open_site(world) as site:
        l1 = MaruL1Dispatcher(site.l1)
        pages = {**await l1.reserve_write(MORE), **await l1.reserve_write(KNOWN)}
        fill(pages)
        assert await l1.finish_write([MORE[2], KNOWN[0], MORE[0]]) == {
            MORE[0]: STORED,
            MORE[2]: STORED,
            KNOWN[0]: STORED,
        }
        assert site.l1.report_status().reserved_pages == 3
        with pytest.raises(MissingKeys, match="does not have 2"):
            await l1.finish_write(MORE)
        assert site.l1.report_status().reserved_pages == 3  # nothing was done
        assert list(await l1.finish_write_and_reserve_read([MORE[1]])) == [MORE[1]]
        l1.abort_write(KNOWN[1:])
        assert site.l1.report_status().reserved_pages == 0
        with pytest.raises(MissingKeys):
            l1.abort_write(KNOWN[1:])
        assert_right(await l1.reserve_read([*MORE, KNOWN[0]]))
        assert_right(l1.unsafe_read(MORE))
        await l1.finish_read([MORE[1], MORE[1]])  # named twice is finished once
        assert_right(l1.unsafe_read([MORE[0], MORE[2]]))
        assert await l1.delete([MORE[0]]) == {MORE[0]: Deletion.PINNED}
        await l1.finish_read([*MORE, KNOWN[0]])
        with pytest.raises(MissingKeys):
            await l1.finish_read([MORE[1]])
        await at_rest(world, site)


async def test_a_key_is_written_by_one_at_a_time(autojump_clock):
    world = World()
    async with open_site(world) as site:
        l1 = MaruL1Dispatcher(site.l1)
        got = {}

        async def reserve(name, keys):
            got[name] = await l1.reserve_write(keys)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserve, "a", MORE)
            nursery.start_soon(reserve, "b", [*MORE, KNOWN[0]])
        assert sorted([*got["a"], *got["b"]]) == sorted([*MORE, KNOWN[0]])
        assert await l1.reserve_write(MORE) == {}
        assert site.l1.report_status().reserved_pages == 4
        l1.abort_write([*MORE, KNOWN[0]])
        await at_rest(world, site)


async def test_two_reads_of_one_key_are_two(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        l1 = MaruL1Dispatcher(site.l1)
        await l1.reserve_read(KNOWN)
        await l1.reserve_read(KNOWN[:1])
        await l1.finish_read(KNOWN[:1])
        assert await l1.delete(KNOWN[:1]) == {KNOWN[0]: Deletion.PINNED}
        assert_right(l1.unsafe_read(KNOWN))
        await l1.finish_read(KNOWN)
        await at_rest(world, site)


async def test_a_read_that_was_lost_says_so_and_can_still_be_finished(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        l1 = MaruL1Dispatcher(site.l1)
        await l1.reserve_read(KNOWN)
        world.restart(forgets=True)
        await settle(site)
        with pytest.raises(LeaseLost):
            l1.unsafe_read(KNOWN)
        await l1.finish_read(KNOWN)
        await at_rest(world, site)


async def test_what_is_there_already_is_a_duplicate_and_can_be_read(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN[1:2]) as site:
        l1 = MaruL1Dispatcher(site.l1)
        fill(await l1.reserve_write(KNOWN))
        assert list(await l1.finish_write_and_reserve_read(KNOWN)) == KNOWN
        assert site.l1.report_status().duplicates == 1
        await l1.finish_read(KNOWN)
        assert await l1.reserve_read(MORE) == {}
        await at_rest(world, site)


async def test_it_passes_the_layout_on(autojump_clock):
    world = World()
    async with open_site(world) as site:
        layout = await MaruL1Dispatcher(site.l1).register_kv_layout([(PAGE // 8,)], "int64", full_chunk_size_bytes=PAGE)
        assert isinstance(layout, KVLayout) and layout == site.l1.layout


# --- cancelled ----------------------------------------------------------------------------------------------------


async def writing(l1):
    fill(await l1.reserve_write(MORE))
    assert set((await l1.finish_write(MORE)).values()) <= {STORED, DUPLICATE}


async def writing_and_reading(l1):
    fill(await l1.reserve_write(MORE[:2]))
    assert_right(await l1.finish_write_and_reserve_read(MORE[:2]))
    await l1.finish_read(MORE[:2])


async def reading(l1):
    assert_right(await l1.reserve_read(KNOWN))
    await l1.finish_read(KNOWN[1:])
    await l1.finish_read(KNOWN[:1])


async def play(case, instrument):
    world = World(capacity_regions=6)
    async with open_site(world) as site:
        await store(site.l1, KNOWN)
        l1 = MaruL1Dispatcher(site.l1)
        with trio.CancelScope() as scope:
            instrument.do = scope.cancel
            await case(l1)
        instrument.do = None
        l1.abort_write([key for key in ALL if key in l1._writing])  # what its caller would do, who keeps keys
        await l1.finish_read([key for key in ALL if key in l1._reading])
        assert not l1._writing and not l1._reading
        await at_rest(world, site)


@pytest.mark.parametrize("case", [writing, writing_and_reading, reading], ids=lambda case: case.__name__)
def test_cancelled_at_every_step_what_was_reserved_can_be_given_back(case):
    assert len(MANY) == 8
    at_every_step(lambda k: played(play, case, k=k, seed=k), most=500, least=2, name=case.__name__)


@pytest.mark.parametrize("keys", [["text"], "text", b"key", [7], [bytes(441)]])
async def test_what_is_no_key_is_refused_before_a_page_is_taken(autojump_clock, keys):
    world = World()
    async with open_site(world) as site:
        for face in (MaruL1Dispatcher(site.l1), site.l1):
            for call in (face.reserve_write, face.reserve_read, face.delete):
                with pytest.raises((TypeError, ValueError), match="key"):
                    await call(keys)
        await at_rest(world, site)
