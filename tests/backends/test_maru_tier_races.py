"""Races between reserving, copying and committing, in virtual time: cancelled at every step, lost answers, restarts, deaths.

After each: free pages equal total pages once all keys are deleted, nobody is pinned, and what is found has the right bytes.
"""

from __future__ import annotations

import contextlib

import pytest
import trio

from backends.abc import DUPLICATE, LOADED, STORED, Deletion, Failed, Missed, RoomRequest
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from maru import LeaseLost, MaruError, NoAnswer, ServerLost
from maru._client.operations import beat
from maru._wire import Code
from tests.support.maru_l1_world import ALL, KNOWN, MANY, MORE
from tests.support.maru_world import PAGE, Joined, World
from tests.support.steps import at_every_step, played


def source_of(keys):
    source = MemoryTier(len(keys) * PAGE, PAGE)
    for key in keys:
        source.put(key, payload_of(key, PAGE))
    return source


async def store(tier, keys, when_full="fail"):
    source = source_of(keys)
    reservation = await tier.reserve(RoomRequest(keys, PAGE, when_full))
    try:
        reservation.keep(list(reservation.granted))
        return list(await reservation.transfer(source, source.upgrade(list(reservation.granted))))
    finally:
        reservation.release()


async def load(tier, keys):
    buffers = [bytearray(PAGE) for _ in keys]
    async with await tier.pin(keys) as lease:
        outcomes = list(await tier.load(lease, PagesDestination.over(buffers)))
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=False):
        assert outcome != LOADED or buffer == payload_of(key, PAGE), key
    return outcomes


async def at_rest(world, *tiers):
    """Both sides agree; then all is deleted, and every page is free."""
    for _ in range(4):
        for tier in tiers:
            await tier.handler._driver.run(beat(tier.handler._state))
        await trio.sleep(0.01)
    for tier in tiers:
        found = [key for key in ALL if key in await tier.contains(ALL)]
        for key in found:
            assert await load(tier, [key]) == [LOADED]
    await trio.sleep(0.01)  # the world's wire does not keep the order of an unpin and a deletion
    for tier in tiers:
        await tier.delete(ALL)
    for tier in tiers:
        await tier.handler._driver.run(beat(tier.handler._state))
    for tier in tiers:
        pages, statistics = tier.handler.statistics().pages, tier.statistics()
        assert pages.free == pages.pages
        assert (statistics.reserved_blocks, statistics.held_blocks, statistics.blocks, pages.strays) == (0, 0, 0, 0)
        assert len(tier._waiters) == 0
    assert world.service.directory.statistics().pinned == 0


# --- cancelled at every step --------------------------------------------------------------------------------------


async def a_store(tier, other):
    assert await store(tier, MORE) == [STORED] * 3


async def a_store_of_what_is_there(tier, other):
    assert await store(tier, [*KNOWN[:1], *MORE[:1]]) == [DUPLICATE, STORED]


async def a_store_that_evicts(tier, other):
    assert await store(tier, MANY, "evict") == [STORED] * 8


async def a_store_that_waits(tier, other):
    held = await tier.reserve(RoomRequest(MANY[:5], PAGE, "fail"))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store, tier, MORE, "wait")
            await trio.sleep(0.2)
            held.keep(MANY[:1])
    finally:
        held.release()


async def a_load(tier, other):
    assert await load(tier, KNOWN) == [LOADED] * 3


async def a_load_of_anothers(tier, other):
    assert await load(other, [*KNOWN, *MORE]) == [LOADED] * 3


async def a_deletion(tier, other):
    assert await other.delete([*KNOWN[:2], MORE[0]]) == [Deletion.DELETED, Deletion.DELETED, Deletion.MISSING]


async def a_store_over_a_restart(tier, other):
    reservation = await tier.reserve(RoomRequest(MORE, PAGE, "fail"))
    try:
        tier.world.restart()
        source = source_of(MORE)
        assert list(await reservation.transfer(source, source.upgrade(MORE))) == [STORED] * 3
    finally:
        reservation.release()


async def a_store_without_an_answer(tier, other):
    def fate(code):
        if code == Code.STORE:
            tier.socket.fate = lambda code: None
            return "cut"
        return None

    tier.socket.fate = fate
    assert await store(tier, MORE) == [STORED] * 3


CASES = [
    a_store,
    a_store_of_what_is_there,
    a_store_that_evicts,
    a_store_that_waits,
    a_load,
    a_load_of_anothers,
    a_deletion,
    a_store_over_a_restart,
    a_store_without_an_answer,
]


@contextlib.asynccontextmanager
async def two_tiers(world, **config):
    first, second = Joined(world, "a", auto_expand=False, **config), Joined(world, "b", auto_expand=False, **config)
    async with MaruTier(first.handler) as tier, MaruTier(second.handler) as other:
        tier.world, tier.socket, other.socket = world, first.socket, second.socket
        assert await store(tier, KNOWN) == [STORED] * 3
        yield tier, other


async def play(case, instrument):
    world = World(capacity_regions=6)
    async with two_tiers(world) as (tier, other):
        with trio.CancelScope() as scope:
            instrument.do = scope.cancel
            await case(tier, other)
        instrument.do = None
        tier.socket.fate = lambda code: None
        await at_rest(world, tier, other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cancelled_at_every_step_it_leaves_no_page_and_no_pin_behind(case):
    at_every_step(lambda k: played(play, case, k=k, seed=k), most=2_000, least=3, name=case.__name__)


# --- answers that do not come -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["lost", "cut"])
async def test_a_lost_store_ends_as_the_server_says_what_became_of_it(fate, autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        lost = []

        def once(code):
            if code == Code.STORE and not lost:
                lost.append(code)
                return fate
            return None

        tier.socket.fate = once
        outcomes = await store(tier, [*MORE, KNOWN[0]])
        assert lost
        if fate == "cut":  # it was done, and nobody told: now it is told
            assert outcomes == [STORED] * 3 + [DUPLICATE]
        else:
            assert all(isinstance(outcome, Failed) for outcome in outcomes[:3])
            assert "the answer to its store was lost" in str(outcomes[0].error)
            assert outcomes[3] == DUPLICATE
        assert tier.statistics().reserved_blocks == 0
        await at_rest(world, tier, other)


async def test_a_store_that_nobody_can_say_anything_about_is_no_answer_and_its_pages_wait(autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        tier.socket.fate = lambda code: "cut" if code == Code.STORE else "lost" if code == Code.RESOLVE else None
        began = trio.current_time()
        with pytest.raises(NoAnswer):
            await store(tier, MORE)
        assert (
            7.9 < trio.current_time() - began < 14.1
        )  # the store, three questions, and the handler's own in turn with them
        assert tier.statistics().reserved_blocks == 3  # in doubt: not free, since they may be read under these keys
        tier.socket.fate = lambda code: None
        await tier.handler._driver.run(beat(tier.handler._state))
        assert tier.statistics().reserved_blocks == 0
        assert await load(other, MORE) == [LOADED] * 3
        await at_rest(world, tier, other)


@pytest.mark.parametrize("what", ["contains", "pin", "delete"])
async def test_a_timeout_is_never_a_miss(what, autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        tier.socket.fate = lambda code: "lost" if code not in (Code.BEAT, Code.HANDSHAKE) else None
        with pytest.raises(NoAnswer):
            await getattr(tier, what)(KNOWN)
        tier.socket.fate = lambda code: None
        assert tier.statistics().missed == {"damaged": 0, "lease": 0, "size": 0}
        await at_rest(world, tier, other)


async def test_a_reservation_that_must_ask_a_silent_server_fails_as_such(autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        assert await store(tier, MANY[:5]) == [STORED] * 5
        tier.socket.fate = lambda code: "lost" if code not in (Code.BEAT, Code.HANDSHAKE) else None
        with pytest.raises(NoAnswer):
            await tier.reserve(RoomRequest(MORE, PAGE, "evict"))
        tier.socket.fate = lambda code: None
        await at_rest(world, tier, other)


# --- restarts and deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["reserved", "copied"])
@pytest.mark.parametrize("forgets", [False, True])
async def test_a_restart_while_storing_stores_or_says_so(when, forgets, autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        reservation = await tier.reserve(RoomRequest(MORE, PAGE, "fail"))
        source = source_of(MORE)
        store_pages = tier.handler.store_pages

        async def restarting(*arguments, **options):
            world.restart(forgets=forgets)
            return await store_pages(*arguments, **options)

        if when == "reserved":
            world.restart(forgets=forgets)
        else:
            tier.handler.store_pages = restarting
        try:
            outcomes = list(await reservation.transfer(source, source.upgrade(MORE)))
        except ServerLost:
            assert forgets  # the session has ended, and with it the pages
            outcomes = []
        finally:
            reservation.release()
        if forgets:
            assert STORED not in outcomes
        else:
            assert outcomes == [STORED] * 3
        vars(tier.handler).pop("store_pages", None)
        await at_rest(world, tier, other)


async def test_a_reader_of_an_owner_that_died_goes_on_and_the_pages_go_when_it_is_done(autojump_clock):
    world = World()
    async with Joined(world, "b") as handler, MaruTier(handler) as other:
        async with MaruTier(Joined(world, "a").handler) as tier:
            assert await store(tier, KNOWN) == [STORED] * 3
        async with await other.pin(KNOWN) as lease:
            assert [bytes(view) for view in lease.views] == [payload_of(key, PAGE) for key in KNOWN]
            lease.check()
        assert await load(other, KNOWN) == [LOADED] * 3
        await at_rest(world, other)


async def test_an_owner_that_dies_between_reserve_and_commit_leaves_nothing(autojump_clock):
    world = World()
    async with Joined(world, "b") as handler, MaruTier(handler) as other:
        async with MaruTier(Joined(world, "a").handler) as tier:
            await tier.reserve(RoomRequest(KNOWN, PAGE, "fail"))
        assert await other.contains(KNOWN) == set()
        assert await store(other, KNOWN) == [STORED] * 3
        await at_rest(world, other)


async def test_a_block_that_is_evicted_while_others_are_reserved_is_not_found_and_no_page_is_given_twice(
    autojump_clock,
):
    world = World()
    async with two_tiers(world) as (tier, other):
        first = await tier.reserve(RoomRequest(MORE, PAGE, "evict"))
        second = await tier.reserve(RoomRequest(MANY[:5], PAGE, "evict"))
        assert not set(first.pages.addresses) & set(second.pages.addresses)
        assert await tier.contains(KNOWN) == set()
        source = source_of(MORE)
        assert list(await first.transfer(source, source.upgrade(MORE))) == [STORED] * 3
        for reservation in (first, second):
            reservation.release()
        await at_rest(world, tier, other)


async def test_a_lease_that_was_lost_is_known_without_asking_and_misses(autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        buffers = [bytearray(PAGE) for _ in KNOWN]
        async with await other.pin(KNOWN) as lease:
            lease.check()
            assert trio.current_time() < lease.expires
            other.socket.fate = lambda code: "lost"
            sent = other.socket.sent
            await trio.sleep_until(lease.expires)
            with pytest.raises(LeaseLost):
                lease.check()
            beats = other.socket.sent
            assert await other.load(lease, PagesDestination.over(buffers)) == [Missed("lease")] * 3
            assert other.socket.sent == beats > sent  # signs of life only
        assert other.statistics().missed["lease"] == 3
        other.socket.fate = lambda code: None
        with contextlib.suppress(MaruError):
            await other.contains(KNOWN)
        await at_rest(world, tier, other)


async def test_two_writers_of_one_key_and_one_wins(autojump_clock):
    world = World()
    async with two_tiers(world) as (tier, other):
        outcomes = {}

        async def write(name, tier):
            outcomes[name] = await store(tier, MORE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, "a", tier)
            nursery.start_soon(write, "b", other)
        assert sorted(map(repr, outcomes["a"] + outcomes["b"])) == ["Duplicate()"] * 3 + ["Stored()"] * 3
        await at_rest(world, tier, other)
