"""Races between reserving, filling, committing and reading, in virtual time: cancelled anywhere, lost answers, restarts.

After each: free pages equal total pages once all keys are deleted, nobody is pinned, and what is found has the right bytes.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import trio
import trio.testing

from backends.abc import DUPLICATE, STORED, Deletion, Failed, Unproven
from backends.maru.l1 import ReservationOver
from backends.testing import payload_of
from maru import FateUnknown, LeaseLost, MaruError, NoAnswer, ServerLost
from maru._wire import Code
from tests.support.maru_l1_world import (
    DTYPE,
    KNOWN,
    MANY,
    MORE,
    SHAPES,
    Site,
    at_rest,
    fill,
    open_site,
    read,
    settle,
    store,
)
from tests.support.maru_world import PAGE, PublishedWorld, World
from tests.support.steps import at_every_step, played

# --- cancelled at every step --------------------------------------------------------------------------------------


async def reserving_and_aborting(site, other):
    async with await site.l1.reserve_write(MORE) as reservation:
        fill(reservation)
        await trio.sleep(0.1)


async def reserving_where_others_must_go(site, other):
    async with await site.l1.reserve_write(MANY) as reservation:
        assert len(reservation.keys) == 8
        fill(reservation)


async def committing(site, other):
    assert await store(site.l1, MORE) == [STORED] * 3


async def committing_what_is_there(site, other):
    assert await store(site.l1, [KNOWN[0], MORE[0]]) == [DUPLICATE, STORED]


async def committing_and_reading(site, other):
    async with await site.l1.reserve_write(MORE) as reservation:
        fill(reservation)
        async with await reservation.commit_and_read() as lease:
            assert [bytes(view) for view in lease.views] == [payload_of(key, PAGE) for key in MORE]


async def committing_after_a_restart(site, other):
    async with await site.l1.reserve_write(MORE) as reservation:
        fill(reservation)
        site.world.restart()
        assert await reservation.commit() == [STORED] * 3


async def committing_without_an_answer(site, other):
    def once(code):
        if code == Code.STORE:
            site.socket.fate = lambda code: None
            return "cut"
        return None

    site.socket.fate = once
    assert await store(site.l1, MORE) == [STORED] * 3


async def reading(site, other):
    assert await read(site.l1, KNOWN) == KNOWN


async def reading_anothers(site, other):
    assert await read(other.l1, [*KNOWN, *MORE]) == KNOWN


async def reading_part_of_it(site, other):
    async with await other.l1.reserve_read(KNOWN) as lease:
        lease.keep(KNOWN[1:2])
        assert bytes(lease.views[0]) == payload_of(KNOWN[1], PAGE)
        await lease.release()


async def verifying(site, other):
    async with await other.l1.reserve_read(KNOWN) as lease:
        assert await lease.damaged() == []


async def reading_after_a_restart(site, other):
    site.world.restart()
    assert await read(other.l1, KNOWN) == KNOWN


async def deleting(site, other):
    answers = await other.l1.delete([*KNOWN[:2], MORE[0]])
    assert answers == [Deletion.DELETED, Deletion.DELETED, Deletion.MISSING]


async def clearing(site, other):
    assert await site.l1.clear() == dict.fromkeys(KNOWN, Deletion.DELETED)


CASES = [
    reserving_and_aborting,
    reserving_where_others_must_go,
    committing,
    committing_what_is_there,
    committing_and_reading,
    committing_after_a_restart,
    committing_without_an_answer,
    reading,
    reading_anothers,
    reading_part_of_it,
    verifying,
    reading_after_a_restart,
    deleting,
    clearing,
]


async def play(case, instrument):
    world = World(capacity_regions=6)
    async with open_site(world, known=KNOWN) as site, open_site(world, "b") as other:
        with trio.CancelScope() as scope:
            instrument.do = scope.cancel
            await case(site, other)
        instrument.do = None
        site.socket.fate = lambda code: None
        await at_rest(world, site, other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cancelled_at_every_step_it_leaves_no_page_and_no_pin_behind(case):
    at_every_step(lambda k: played(play, case, k=k, seed=k), most=2_000, least=2, name=case.__name__)


async def play_registering(instrument):
    world = World(capacity_regions=6)
    site = Site(world)
    async with site.l1 as l1:
        with trio.CancelScope() as scope:
            instrument.do = scope.cancel
            await l1.register_kv_layout(SHAPES, DTYPE)
        instrument.do = None
        await l1.register_kv_layout(SHAPES, DTYPE)
        assert l1.get_memory_usage() == (0, 8 * PAGE)
        assert await store(l1, MORE) == [STORED] * 3
        await at_rest(world, site)


def test_registering_a_layout_can_be_cancelled_at_every_step_and_done_again():
    at_every_step(lambda k: played(play_registering, k=k, seed=k), most=200, least=3, name="play_registering")


# --- the gate of a commit -----------------------------------------------------------------------------------------


async def test_cancelled_before_the_message_nothing_is_sent_and_the_reservation_can_still_be_committed(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            fill(reservation)
            sent = site.socket.sent
            with trio.CancelScope() as scope:
                scope.cancel()
                await reservation.commit()
            assert scope.cancelled_caught
            assert site.socket.sent == sent
            assert reservation.is_open
            assert await reservation.commit() == [STORED] * 3
        await at_rest(world, site)


async def test_cancelled_behind_the_message_it_returns_what_became_of_it(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            fill(reservation)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    sent = site.socket.sent

                    async def cancel_when_sent():
                        while site.socket.sent == sent:
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    nursery.start_soon(cancel_when_sent)
                    await reservation.commit()
                    assert scope.cancel_called
                    await trio.lowlevel.checkpoint()
            assert scope.cancelled_caught
            assert reservation.outcomes == [STORED] * 3
        assert await read(site.l1, MORE) == MORE
        await at_rest(world, site)


async def test_a_commit_that_takes_too_long_is_unproven_and_its_pages_come_back_when_it_is_known(autojump_clock):
    world = World()
    async with open_site(world, timeout_ms=60_000) as site, open_site(world, "b") as other:
        site.l1.commit_timeout = 5.0
        site.socket.fate = lambda code: "cut" if code == Code.STORE else None
        began = trio.current_time()
        with pytest.raises(Unproven, match="3 blocks"):
            await store(site.l1, MORE)
        assert trio.current_time() - began == pytest.approx(5.0)
        status = site.l1.report_status()
        assert (status.in_doubt_pages, status.unproven, status.stored, status.reservations) == (3, 3, 0, 0)
        site.socket.fate = lambda code: None
        await settle(site)
        assert site.l1.report_status().in_doubt_pages == 0
        assert await read(other.l1, MORE) == MORE  # it was done, after all
        await at_rest(world, site, other)


async def test_a_commit_that_nobody_can_say_anything_about_is_unproven(autojump_clock):
    world = World()
    async with open_site(world) as site:
        site.socket.fate = lambda code: "lost" if code in (Code.STORE, Code.RESOLVE) else None
        with pytest.raises(Unproven) as unproven:
            await store(site.l1, MORE)
        assert isinstance(unproven.value.__cause__, FateUnknown)
        assert site.l1.report_status().in_doubt_pages == 3
        site.socket.fate = lambda code: None
        await settle(site)
        assert await read(site.l1, MORE) == []
        await at_rest(world, site)


async def test_a_server_that_is_silent_before_anything_was_sent_has_nothing_and_the_pages_are_free(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            fill(reservation)
            world.restart()
            site.handler._state.unsettled = True  # as if the restart had been heard of: it has to attach again first
            site.socket.fate = lambda code: "lost"
            with pytest.raises(NoAnswer):
                await reservation.commit()
            site.socket.fate = lambda code: None
            await settle(site)
            assert site.l1.report_status().in_doubt_pages == 0
        await at_rest(world, site)


async def test_with_a_published_server_an_unanswered_commit_is_unproven_and_its_pages_are_quarantined(autojump_clock):
    world = PublishedWorld()
    async with open_site(world) as site:
        site.socket.fate = lambda code: "cut" if code == Code.BATCH_REGISTER_KV else None
        with pytest.raises(Unproven):
            await store(site.l1, MORE)
        site.socket.fate = lambda code: None
        assert site.l1.report_status().quarantined_pages == 3
        await at_rest(world, site, quarantined=3)


@pytest.mark.parametrize("fate", ["lost", "cut"])
async def test_a_lost_commit_ends_as_the_server_says_what_became_of_it(fate, autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        lost = []

        def once(code):
            if code == Code.STORE and not lost:
                lost.append(code)
                return fate
            return None

        site.socket.fate = once
        outcomes = await store(site.l1, [*MORE, KNOWN[0]])
        if fate == "cut":
            assert outcomes == [STORED] * 3 + [DUPLICATE]
        else:
            assert all(isinstance(outcome, Failed) for outcome in outcomes[:3])
            assert outcomes[3] == DUPLICATE
        assert site.l1.report_status().in_doubt_pages == 0
        await at_rest(world, site)


# --- who still writes ---------------------------------------------------------------------------------------------


async def test_a_page_that_somebody_can_still_write_is_not_free_before_he_is_over(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            abandoned = memoryview(reservation.pages[1])[8:]  # what a copy thread holds that nobody waits for any more
        free = site.l1.report_status().free_pages
        assert free == 7
        async with await site.l1.reserve_write(MANY) as others:
            fill(others)
            abandoned[:] = b"?" * len(abandoned)
            assert len(others.keys) == 7
            assert [bytes(page) for page in others.pages] == [payload_of(key, PAGE) for key in others.keys]
        del abandoned
        site.l1._collect()
        assert site.l1.report_status().free_pages == 8
        await at_rest(world, site)


async def test_an_aborted_page_refuses_to_be_written_and_a_name_that_is_left_over_holds_nothing(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            for page in reservation.pages:  # noqa: B007  # what is left behind by the loop
                pass
        assert site.l1.report_status().free_pages == 8
        with pytest.raises(ValueError, match="released"):
            page[0] = 1
        with pytest.raises(ReservationOver):
            _ = reservation.pages
        with pytest.raises(ReservationOver):
            await reservation.commit()
        reservation.abort()
        await at_rest(world, site)


async def test_a_committed_page_refuses_to_be_written(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            fill(reservation)
            pages = reservation.pages
            await reservation.commit()
            with pytest.raises(ValueError, match="released"):
                pages[0][0] = 1
        await at_rest(world, site)


async def test_a_forgotten_reservation_and_a_forgotten_lease_give_back_what_they_hold(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        await site.l1.reserve_write(MORE)
        await site.l1.reserve_read(KNOWN)
        gc.collect()
        status = site.l1.report_status()
        assert (status.reservations, status.leases) == (0, 0)
        await at_rest(world, site)


async def test_what_is_open_at_the_end_is_ended_and_nothing_is_deleted(autojump_clock):
    world = World()
    async with open_site(world, "b") as other:
        async with open_site(world, known=KNOWN) as site:
            reservation, lease = await site.l1.reserve_write(MORE), await site.l1.reserve_read(KNOWN)
        assert not reservation.is_open and not lease.is_open
        world.now += 1_000  # this wire does not keep the order of an unpin and a farewell; a real one does
        assert await read(other.l1, [*KNOWN, *MORE]) == KNOWN
        await at_rest(world, other)


async def test_a_body_that_is_cancelled_leaves_the_pages_free_whatever_it_was_doing(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        with trio.move_on_after(1) as scope:
            async with await site.l1.reserve_write(MORE) as reservation, await site.l1.reserve_read(KNOWN):
                fill(reservation)
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert site.l1.report_status().free_pages == 5
        await at_rest(world, site)


# --- restarts and deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_restart_between_reserve_and_commit_stores_or_says_so(forgets, autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            fill(reservation)
            world.restart(forgets=forgets)
            try:
                outcomes = await reservation.commit()
            except ServerLost:
                assert forgets  # the session has ended, and with it the pages
            else:
                assert outcomes == ([STORED] * 3 if not forgets else outcomes)
                assert not (forgets and STORED in outcomes)
        await settle(site)
        assert await read(site.l1, MORE) == ([] if forgets else MORE)
        await at_rest(world, site)


async def test_pages_of_a_session_that_was_lost_meanwhile_are_not_stored(autojump_clock):
    world = World()
    async with open_site(world) as site:
        async with await site.l1.reserve_write(MORE) as reservation:
            fill(reservation)
            world.restart(forgets=True)
            with contextlib.suppress(MaruError):
                await settle(site)  # it is heard of before the commit
            with pytest.raises(ServerLost):
                await reservation.commit()
        assert await read(site.l1, MORE) == []
        await at_rest(world, site)


async def test_a_lease_over_a_restart_is_lost_or_holds_what_it_held(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site, open_site(world, "b") as other:
        for forgets in (False, True):
            async with await other.l1.reserve_read(KNOWN) as lease:
                assert lease.keys == tuple(KNOWN)
                world.restart(forgets=forgets)
                lease.check()  # nobody has heard of it yet, and nothing has gone
                await settle(site, other)
                if forgets:
                    with pytest.raises(LeaseLost):
                        lease.check()
                else:
                    lease.check()
                    assert [bytes(view) for view in lease.views] == [payload_of(key, PAGE) for key in KNOWN]
        await at_rest(world, site, other)


async def test_a_lease_ends_by_this_sides_clock_without_asking_anybody(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site, open_site(world, "b") as other:
        lease = await other.l1.reserve_read(KNOWN)
        lease.check()
        other.socket.fate = lambda code: "lost"
        assert trio.current_time() < lease.expires
        await trio.sleep_until(lease.expires)
        sent = other.socket.sent
        with pytest.raises(LeaseLost):
            lease.check()
        with pytest.raises(LeaseLost):
            _ = lease.views
        assert other.socket.sent == sent
        await lease.release()
        other.socket.fate = lambda code: None
        with contextlib.suppress(MaruError):
            await settle(other)
        await at_rest(world, site, other)


async def test_reading_needs_no_message(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        lease = await site.l1.reserve_read(KNOWN)
        sent = site.socket.sent
        for _ in range(3):
            lease.check()
            assert [bytes(view) for view in lease.views] == [payload_of(key, PAGE) for key in KNOWN]
        assert site.socket.sent == sent
        await lease.release()
        with pytest.raises(LeaseLost):
            lease.check()
        await at_rest(world, site)


async def test_released_views_refuse_and_part_of_a_lease_can_be_kept(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        async with await site.l1.reserve_read(KNOWN) as lease:
            first, second, third = lease.views
            with pytest.raises(ValueError, match="does not hold"):
                lease.keep(MORE)
            lease.keep(KNOWN[1:2])
            for view in (first, third):
                with pytest.raises(ValueError, match="released"):
                    bytes(view)
            assert bytes(second) == payload_of(KNOWN[1], PAGE)
            await trio.sleep(0.1)
            assert world.service.directory.statistics().pinned == 1
            assert await site.l1.delete(KNOWN) == [Deletion.DELETED, Deletion.PINNED, Deletion.DELETED]
            lease.keep([])
            assert not lease.is_open
        await at_rest(world, site)


async def test_an_owner_that_dies_between_reserve_and_commit_leaves_nothing(autojump_clock):
    world = World()
    async with open_site(world, "b") as other:
        async with open_site(world) as site:
            reservation = await site.l1.reserve_write(KNOWN)
            fill(reservation)
            site.socket.fate = lambda code: "lost"  # it is not heard any more
        world.now += 1_000
        world.service.expire(world.now)
        assert await read(other.l1, KNOWN) == []
        assert await store(other.l1, KNOWN) == [STORED] * 3
        await at_rest(world, other)


async def test_a_reader_of_an_owner_that_died_goes_on(autojump_clock):
    world = World()
    async with open_site(world, "b") as other:
        async with open_site(world, known=KNOWN) as site:
            lease = await other.l1.reserve_read(KNOWN)
            site.socket.fate = lambda code: "lost"
        await settle(other)
        lease.check()
        assert [bytes(view) for view in lease.views] == [payload_of(key, PAGE) for key in KNOWN]
        await lease.release()
        await at_rest(world, other)


async def test_a_block_that_is_evicted_while_pages_are_reserved_is_a_miss_and_no_page_is_given_twice(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site, open_site(world, "b") as other:
        async with await site.l1.reserve_write(MORE) as first, await site.l1.reserve_write(MANY[:5]) as second:
            assert len(second.keys) == 5
            assert await read(other.l1, KNOWN) == []
            fill(first)
            fill(second)
            assert [bytes(page) for page in first.pages] == [payload_of(key, PAGE) for key in MORE]
            assert await first.commit() == [STORED] * 3
        await at_rest(world, site, other)


async def test_what_is_read_is_not_evicted_and_what_there_is_no_room_for_is_refused(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site, open_site(world, "b") as other:
        async with await other.l1.reserve_read(KNOWN) as lease:
            async with await site.l1.reserve_write(MANY) as reservation:
                assert reservation.keys == tuple(MANY[:5])
                assert reservation.refused == tuple(MANY[5:])
                fill(reservation)
                assert await reservation.commit() == [STORED] * 5
            assert [bytes(view) for view in lease.views] == [payload_of(key, PAGE) for key in KNOWN]
            lease.check()
        assert site.l1.report_status().refused == 3
        await at_rest(world, site, other)


async def test_two_writers_of_one_key_and_one_wins(autojump_clock):
    world = World()
    async with open_site(world) as site, open_site(world, "b") as other:
        outcomes = {}

        async def write(name, l1):
            outcomes[name] = await store(l1, MORE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, "a", site.l1)
            nursery.start_soon(write, "b", other.l1)
        assert sorted(map(repr, outcomes["a"] + outcomes["b"])) == ["Duplicate()"] * 3 + ["Stored()"] * 3
        await at_rest(world, site, other)


# --- what goes wrong inside ---------------------------------------------------------------------------------------


async def test_a_handler_that_fails_ends_the_block_with_its_own_error(autojump_clock, monkeypatch):
    async def fail(self):
        await trio.sleep(1)
        raise OSError("broken")

    monkeypatch.setattr("maru._client.driver_trio.Driver.keep_lease", fail)
    with pytest.raises(OSError, match="broken"):
        async with open_site(World()) as site, await site.l1.reserve_write(MORE):
            await trio.sleep_forever()


async def test_two_errors_at_once_leave_as_a_group(autojump_clock, monkeypatch):
    async def fail(self):
        await trio.sleep(1)
        raise OSError("broken")

    monkeypatch.setattr("maru._client.driver_trio.Driver.keep_lease", fail)
    with pytest.raises(ExceptionGroup) as group:
        async with open_site(World()):
            try:
                await trio.sleep_forever()
            finally:
                raise LookupError("and this")
    assert group.group_contains(OSError, match="broken")
    assert group.group_contains(LookupError, match="and this")


async def test_without_checksums_nobody_can_tell_what_is_damaged(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN, checksums=False) as site:
        async with await site.l1.reserve_read(KNOWN) as lease:
            assert await lease.damaged() == []
        await at_rest(world, site)


async def test_damage_is_looked_for_in_vain_where_the_lease_is_cut_meanwhile(autojump_clock, monkeypatch):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        async with await site.l1.reserve_read(KNOWN) as lease:
            sums = site.l1._sums

            async def cut(*args, **more):
                lease.keep(KNOWN[:1])
                return await sums(*args, **more)

            monkeypatch.setattr(site.l1, "_sums", cut)
            with pytest.raises(LeaseLost, match="keys were released"):
                await lease.damaged()
            lease.keep(KNOWN[:1])  # of all of them: nothing changes
        await at_rest(world, site)


# --- reading that fails -------------------------------------------------------------------------------------------


async def test_a_retrieve_that_fails_gives_its_pins_back_at_once(autojump_clock):
    """With a published server pinning and looking up are two requests: the second one fails."""
    world = PublishedWorld()
    async with open_site(world, known=KNOWN) as site:
        site.socket.fate = lambda code: "lost" if code == Code.BATCH_LOOKUP_KV else None
        with pytest.raises(NoAnswer):
            await site.l1.reserve_read(KNOWN)
        assert world.asked[-1] != Code.HEARTBEAT
        await trio.sleep(0.1)
        assert not +world.pins
        site.socket.fate = lambda code: None
        await at_rest(world, site)


async def test_keys_behind_the_first_that_cannot_be_mapped_are_let_go_of(autojump_clock):
    world = World()
    async with (
        open_site(world, known=KNOWN[:1]) as site,
        open_site(world, "b", known=KNOWN[1:]) as second,
        open_site(world, "c") as reader,
    ):
        gone = second.handler.get_owned_region_ids()[0]
        mapping = reader.handler._driver.map

        async def cannot(effect):
            if effect.region_id == gone:
                from maru import CannotMap

                raise CannotMap("no descriptor is left")
            return await mapping(effect)

        reader.handler._driver.map = cannot
        async with await reader.l1.reserve_read(KNOWN) as lease:
            assert lease.keys == tuple(KNOWN[:1])
            assert "no descriptor is left" in str(lease.unresolved)
            await trio.sleep(0.1)
            assert world.service.directory.statistics().pinned == 1
        assert reader.l1.report_status().unresolved == 1
        reader.handler._driver.map = mapping
        assert await read(reader.l1, KNOWN) == KNOWN
        await at_rest(world, site, second, reader)


async def test_a_timeout_while_a_region_is_mapped_is_no_miss_and_gives_all_pins_back(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site, open_site(world, "b") as other:
        other.socket.fate = lambda code: "lost" if code == Code.REGION else None
        with pytest.raises(NoAnswer):
            await other.l1.reserve_read(KNOWN)
        await trio.sleep(0.1)
        assert world.service.directory.statistics().pinned == 0
        other.socket.fate = lambda code: None
        await at_rest(world, site, other)


@pytest.mark.parametrize("what", ["reserve_read", "delete", "clear"])
async def test_a_timeout_is_never_a_miss(what, autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        site.socket.fate = lambda code: "lost" if code not in (Code.BEAT, Code.HANDSHAKE) else None
        with pytest.raises(NoAnswer):
            await getattr(site.l1, what)(*([] if what == "clear" else [KNOWN]))
        site.socket.fate = lambda code: None
        await at_rest(world, site)


async def test_a_late_answer_gives_back_what_it_pinned(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        site.socket.fate = lambda code: "late" if code == Code.FIND else None
        site.socket.latency = 0.003
        with pytest.raises(NoAnswer):
            await site.l1.reserve_read(KNOWN)
        assert world.service.directory.statistics().pinned == 3
        site.socket.fate = lambda code: None
        site.socket.latency = 0.001
        await trio.sleep(3)
        await at_rest(world, site)


async def test_pins_of_an_answer_that_is_lost_for_good_end_with_the_session(autojump_clock):
    world = World()
    async with open_site(world, known=KNOWN) as site:
        async with open_site(world, "b") as other:
            other.socket.fate = lambda code: "cut" if code == Code.FIND else None
            with pytest.raises(NoAnswer):
                await other.l1.reserve_read(KNOWN)
            assert world.service.directory.statistics().pinned == 3
        world.now += 1_000
        await at_rest(world, site)
