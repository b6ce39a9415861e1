"""Victims that are copied elsewhere before they go: what a registry promises its spiller, its readers and those who wait."""

from __future__ import annotations

import logging

import attrs
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from backends._file_registry import FileRegistry
from backends.abc import EVICTED, Deletion, RoomRequest
from backends.base.blocks import BlockPool, Registry
from backends.base.leaving import Evictions
from backends.base.room import WaitQueue
from backends.memory import MemoryTier
from maru.eviction import LRU, AdaptiveLRFU, WTinyLFU
from tests.support.spilling_world import keys_of

POLICIES = [LRU, WTinyLFU, AdaptiveLRFU]


def full_pool(text, policy=None):
    """A pool that these fill, the first of which is the next to go, and the spills that its evictions make."""
    pool, spills = BlockPool(len(text), policy), []
    for key in keys_of(text):
        pool.register([key], pool.take(1))
    pool.spill_to(spills.append)
    return pool, spills


def wanted(pool, text):
    with pytest.raises(trio.WouldBlock):
        pool.reserve_nowait(keys_of(text), "evict")


# --- one block ----------------------------------------------------------------------------------------------------


def test_a_pool_has_one_spiller_at_a_time():
    pool, spills = full_pool("abcd")
    with pytest.raises(ValueError, match="already"):
        pool.spill_to(spills.append)


def test_a_victim_is_found_and_its_slot_taken_until_its_spill_is_over():
    pool, spills = full_pool("abcd")
    wanted(pool, "xy")
    [spill] = spills
    assert (list(spill.keys), spill.held) == (keys_of("ab"), True)
    assert pool.contains(keys_of("abcd")) == set(keys_of("abcd"))
    assert (pool.free, pool.statistics().leaving, pool.statistics().evicted) == (0, 2, 0)
    assert list(spill.over()) == keys_of("ab")
    assert pool.contains(keys_of("abcd")) == set(keys_of("cd"))
    assert (pool.free, pool.statistics().leaving, pool.statistics().evicted) == (2, 0, 2)
    assert list(spill.over()) == []
    assert not spill.held
    assert pool.reserve_nowait(keys_of("xy"), "evict") == [0, 1]
    assert len(spills) == 1


def test_no_more_leaves_than_is_needed_however_often_room_is_asked_for():
    pool, spills = full_pool("abcdef")
    wanted(pool, "xy")
    wanted(pool, "xy")
    wanted(pool, "x")
    assert [list(spill.keys) for spill in spills] == [keys_of("ab")]
    wanted(pool, "xyz")
    assert [list(spill.keys) for spill in spills] == [keys_of("ab"), keys_of("c")]


async def test_who_waits_is_served_when_the_spill_is_over(autojump_clock):
    pool, spills = full_pool("abcd")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def store():
            slots = await pool.reserve(RoomRequest(keys_of("xy"), 8, "evict"))
            assert pool.register(keys_of("xy"), slots) == []

        await trio.testing.wait_all_tasks_blocked()
        assert pool.statistics().waiting == 1
        spills[0].over()
    assert pool.contains(keys_of("abcdxy")) == set(keys_of("cdxy"))


async def test_who_waits_and_is_cancelled_ends_no_spill_and_the_next_one_finds_the_room(autojump_clock):
    pool, spills = full_pool("abcd")
    with trio.move_on_after(1):
        await pool.reserve(RoomRequest(keys_of("xy"), 8, "evict"))
    assert pool.statistics().waiting == 0
    assert spills[0].held
    assert pool.contains(keys_of("ab")) == set(keys_of("ab"))
    spills[0].over()
    assert pool.reserve_nowait(keys_of("xy"), "evict") == [0, 1]
    assert len(spills) == 1


# --- what may happen to it meanwhile ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
def test_what_is_used_stays_and_another_one_leaves(policy):
    pool, spills = full_pool("abcd", policy())
    wanted(pool, "x")
    [victim] = spills[0].keys
    pool.use([victim])
    assert list(spills[0].over()) == []
    assert pool.contains([victim]) == {victim}
    assert pool.statistics().leaving == 0
    wanted(pool, "x")
    assert list(spills[1].keys) != [victim]
    spills[1].over()
    assert len(pool.reserve_nowait(keys_of("x"), "evict")) == 1
    # And it can become a victim again, like any other.
    victims, _ = pool._policy.make_room((), 3, ())
    assert victim in victims


async def test_who_counted_on_what_stays_is_given_another_slot(autojump_clock):
    pool, spills = full_pool("abcd")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.reserve, RoomRequest(keys_of("x"), 8, "evict"))
        await trio.testing.wait_all_tasks_blocked()
        pool.use(keys_of("a"))
        spills[0].over()
        assert [list(spill.keys) for spill in spills] == [keys_of("a"), keys_of("b")]
        spills[1].over()
    assert pool.contains(keys_of("abcd")) == set(keys_of("acd"))


async def test_what_a_copy_holds_leaves_with_it_and_nobody_waits_for_it(autojump_clock):
    """Its spill is over, but a copy is still reading it, and may do so for ever: in quarantine."""
    pool, spills = full_pool("abcd")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.reserve, RoomRequest(keys_of("x"), 8, "evict"))
        await trio.testing.wait_all_tasks_blocked()
        refs = pool.upgrade(keys_of("a"))
        assert list(spills[0].over()) == keys_of("a")
        assert pool.contains(keys_of("a")) == set(keys_of("a"))
        assert list(spills[1].keys) == keys_of("b")
        spills[1].over()
    assert (pool.free, pool.statistics().leaving) == (0, 1)
    pool.release(refs)
    assert (pool.free, pool.statistics().leaving) == (1, 0)
    assert pool.contains(keys_of("abcd")) == set(keys_of("cd"))


def test_a_ref_that_is_dropped_during_the_spill_ends_nothing():
    pool, spills = full_pool("abcd")
    wanted(pool, "x")
    pool.release(pool.upgrade(keys_of("a")))
    assert pool.contains(keys_of("a")) == set(keys_of("a"))
    assert list(spills[0].over()) == keys_of("a")


def test_what_leaves_is_pinned_against_deletion():
    pool, spills = full_pool("ab")
    wanted(pool, "x")
    assert pool.delete(keys_of("ab")) == [Deletion.PINNED, Deletion.DELETED]
    spills[0].over()
    assert pool.free == 2


def test_what_leaves_and_is_stored_again_is_a_duplicate():
    pool, spills = full_pool("abcd")
    wanted(pool, "x")
    spills[0].over()
    [slot] = pool.reserve_nowait(keys_of("x"), "evict")
    wanted(pool, "y")
    assert list(spills[1].keys) == keys_of("b")
    assert pool.register(keys_of("b"), [slot]) == [0]
    assert pool.slots(keys_of("b")) == [1]
    assert pool.free == 1


def test_what_is_found_damaged_while_it_leaves_is_not_found_any_more_and_has_not_left():
    pool, spills = full_pool("ab")
    wanted(pool, "x")
    pool.forget(keys_of("a"), pool.slots(keys_of("a")))
    assert pool.contains(keys_of("a")) == set()
    assert (pool.free, pool.statistics().leaving) == (0, 0)
    assert list(spills[0].over()) == []
    assert (pool.free, pool.statistics().evicted) == (1, 0)


# --- who spills ---------------------------------------------------------------------------------------------------


def test_who_cannot_wait_has_nothing_spilled_and_the_spiller_is_told():
    tier, spills, gone = MemoryTier(4 * 8, 8), [], []
    for key in keys_of("abcd"):
        tier.put(key, key * 8)
    assert tier.capabilities.reports_evictions
    tier.on_evicted(gone.extend)
    end = tier.spill_to(spills.append)
    assert tier.put(b"x", b"x" * 8)
    assert [(list(spill.keys), spill.held, list(spill.over())) for spill in spills] == [(keys_of("a"), False, [])]
    [slot] = tier.stage(1)
    assert list(spills[1].keys) == gone[1:]
    tier.unstage([slot])
    end()
    tier.stage(2)
    assert len(spills) == 2
    assert len(gone) == 3


def test_who_cannot_wait_does_not_count_on_what_leaves():
    tier, spills = MemoryTier(4 * 8, 8), []
    for key in keys_of("abcd"):
        tier.put(key, key * 8)
    tier.spill_to(spills.append)
    with pytest.raises(trio.WouldBlock):
        tier.reserve_nowait(RoomRequest(keys_of("xyz"), 8, "evict"))
    assert tier.put(b"u", b"u" * 8)
    assert tier.contains_nowait(keys_of("abcdu")) == set(keys_of("abcu"))


def test_a_spiller_that_raises_has_let_the_blocks_go(caplog):
    pool = BlockPool(2)
    pool.register(keys_of("ab"), pool.take(2))

    def broken(spill):
        raise RuntimeError("never")

    pool.spill_to(broken)
    assert len(pool.reserve_nowait(keys_of("x"), "evict")) == 1
    assert pool.statistics().evicted == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_spiller_that_lets_go_at_once_serves_each_waiter_once(autojump_clock):
    pool = BlockPool(4)
    pool.register(keys_of("abcd"), pool.take(4))
    refs = pool.upgrade(keys_of("abcd"))
    pool.spill_to(lambda spill: spill.over())
    taken = []
    async with trio.open_nursery() as nursery:

        async def store(text):
            taken.append(await pool.reserve(RoomRequest(keys_of(text), 8, "evict")))

        nursery.start_soon(store, "x")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(store, "yz")
        await trio.testing.wait_all_tasks_blocked()
        pool.release(refs)
    assert sorted([len(slots) for slots in taken]) == [1, 2]  # they are woken in the same tick, in any order
    assert pool.statistics().staged == 3
    assert len(pool) == 1


def test_when_the_spiller_is_gone_blocks_go_at_once_also_while_a_spill_is_under_way():
    pool, spills = BlockPool(2), []
    pool.register(keys_of("ab"), pool.take(2))
    end = pool.spill_to(spills.append)
    wanted(pool, "x")
    end()
    end()
    [slot] = pool.reserve_nowait(keys_of("x"), "evict")
    leaving = set(spills[0].keys)
    assert pool.contains(keys_of("ab")) == leaving
    pool.give_back([slot])
    spills[0].over()
    assert pool.free == 2
    pool.spill_to(spills.append)


def test_listeners_are_told_of_what_went_and_one_that_raises_is_told_no_more(caplog):
    pool, spills = full_pool("abcd")
    told = []

    def broken(keys):
        raise RuntimeError("never")

    pool.on_evicted(broken)
    end = pool.on_evicted(told.append)
    twice = pool.on_evicted(told.append)
    twice()
    wanted(pool, "xy")
    assert told == []
    spills[0].over()
    assert told == [keys_of("ab")]
    assert len(caplog.records) == 1
    pool.reserve_nowait(keys_of("xy"), "evict")
    wanted(pool, "z")
    end()
    end()
    spills[1].over()
    assert told == [keys_of("ab")]
    assert len(caplog.records) == 1


def test_without_anybody_who_wants_to_know_nothing_more_is_done_for_an_eviction(monkeypatch):
    """Counted: of what is new nothing is called, whatever is reserved, registered, used and released."""
    called = []
    for name in ("tell", "leave", "stay", "count_no_more", "gone", "listen", "divert"):
        monkeypatch.setattr(Evictions, name, lambda *args, name=name: called.append(name))
    pool = BlockPool(8)
    for start in range(20):
        keys = [b"%d" % (start * 4 + at) for at in range(4)]
        pool.register(keys, pool.reserve_nowait(keys, "evict"))
        pool.use(keys)
        pool.release(pool.upgrade(keys))
    assert pool.statistics().evicted == 72
    assert called == []


# --- in bytes -----------------------------------------------------------------------------------------------------


def file_registry(*sizes):
    registry, spills = FileRegistry(sum(sizes)), []
    for at, size in enumerate(sizes):
        registry.register([b"%d" % at], registry.take(1, size))
    registry.spill_to(spills.append)
    return registry, spills


def test_in_bytes_no_more_leaves_than_is_needed():
    registry, spills = file_registry(1, 1, 1, 1, 4)
    for _ in range(2):
        with pytest.raises(trio.WouldBlock):
            registry.reserve_nowait([b"x"], "evict", 3)
    assert [list(spill.keys) for spill in spills] == [[b"0"], [b"1"], [b"2"]]
    assert registry.used_bytes == 8
    for spill in spills[1:]:
        spill.over()
    with pytest.raises(trio.WouldBlock):
        registry.reserve_nowait([b"x"], "evict", 3)
    spills[0].over()
    assert len(registry.reserve_nowait([b"x"], "evict", 3)) == 1
    assert len(spills) == 3


def test_in_bytes_what_cannot_be_made_room_for_evicts_nothing():
    registry, spills = file_registry(1, 1, 4)
    refs = registry.upgrade([b"2"])
    with pytest.raises(trio.WouldBlock):
        registry.reserve_nowait([b"x"], "evict", 3)
    assert spills == []
    registry.release(refs)


# --- against a model ------------------------------------------------------------------------------------------------


@attrs.define
class Room:
    keys: list
    numbers: list


class AgainstAModel(RuleBasedStateMachine):
    """A pool with a spiller against dictionaries and counting, with everything that may be asked of it in any order."""

    CAPACITY = 6
    rooms = Bundle("rooms")
    holds = Bundle("holds")
    spills = Bundle("spills")
    columns = st.lists(st.sampled_from(keys_of("abcdefghij")), min_size=1, max_size=4, unique=True)

    def __init__(self):
        super().__init__()
        self.policy = LRU()
        self.pool = BlockPool(self.CAPACITY, self.policy)
        self.registered = {}
        self.staged = set()
        self.refs = {}
        self.doomed = set()
        self.leaving = set()  # slots
        self.coming = set()
        self.told = []
        self.new = []
        self.pool.spill_to(self.new.append)
        self.pool.on_evicted(self.told.extend)

    def key_in(self, slot):
        return next(key for key, there in self.registered.items() if there == slot)

    def inactive(self):
        return [key for key, slot in self.registered.items() if not self.refs.get(slot)]

    def free(self):
        return self.CAPACITY - len(self.registered) - len(self.staged) - len(self.doomed)

    def dropped(self, slots):
        """A ref of each was dropped."""
        for slot in slots:
            if slot == EVICTED:
                continue
            self.refs[slot] -= 1
            if not self.refs[slot]:
                self.doomed.discard(slot)
                if slot in self.leaving:
                    self.leaving.discard(slot)
                    self.coming.discard(slot)
                    key = self.key_in(slot)
                    del self.registered[key]
                    assert key in self.told
                    self.told.remove(key)

    @rule(target=rooms, keys=columns)
    def reserve_and_evict(self, keys):
        free, coming, inactive = self.free(), len(self.coming), self.inactive()
        need = len(keys) - free - coming
        before = len(self.new)
        try:
            slots = self.pool.reserve_nowait(keys, "evict")
        except trio.WouldBlock:
            assert len(keys) > free
            leaves = need if 0 < need <= len(inactive) else 0
            assert sum(len(spill.keys) for spill in self.new[before:]) == leaves
            return multiple()
        assert len(slots) == len(keys) <= free
        assert len(self.new) == before
        self.staged.update(slots)
        return Room(keys, slots)

    @rule(target=spills)
    def a_spill_begins(self):
        new, self.new[:] = list(self.new), []
        for spill in new:
            assert spill.held
        return multiple(*new)

    @rule(spill=consumes(spills))
    def a_spill_is_over(self, spill):
        slots = list(spill._slots)
        goes = [self.key_in(slot) for slot in slots if slot in self.leaving]
        self.coming.difference_update(slots)
        assert list(spill.over()) == goes
        self.dropped(slots)

    @rule(target=rooms, n=st.integers(1, 3))
    def take_at_once(self, n):
        keys = [b"engine%d" % at for at in range(n)]
        before = set(self.registered)
        slots = self.pool.take_at_once(keys)
        gone = [key for key in before if not self.pool.contains([key])]
        if slots is None:
            assert gone == []
            return multiple()
        spills, self.new[:] = [spill for spill in self.new if not spill.held], [s for s in self.new if s.held]
        assert sorted(key for spill in spills for key in spill.keys) == sorted(gone)
        for key in gone:
            assert not self.refs.get(self.registered.pop(key))
            self.told.remove(key)
        self.staged.update(slots)
        return Room(keys, slots)

    @rule(room=consumes(rooms))
    def give_back(self, room):
        self.pool.give_back(room.numbers)
        self.staged -= set(room.numbers)

    @rule(room=consumes(rooms))
    def register(self, room):
        duplicates = self.pool.register(room.keys, room.numbers)
        assert duplicates == [at for at, key in enumerate(room.keys) if key in self.registered]
        for at, (key, slot) in enumerate(zip(room.keys, room.numbers, strict=True)):
            self.staged.discard(slot)
            if at not in duplicates:
                self.registered[key] = slot

    @rule(keys=columns)
    def use(self, keys):
        there = [key for key in keys if key in self.registered]
        self.pool.use(there)
        for key in there:
            self.leaving.discard(self.registered[key])
            self.coming.discard(self.registered[key])

    @rule(target=holds, keys=columns)
    def upgrade(self, keys):
        refs = self.pool.upgrade(keys)
        assert refs == [self.registered.get(key, EVICTED) for key in keys]
        for ref in refs:
            if ref != EVICTED:
                self.refs[ref] = self.refs.get(ref, 0) + 1
        return Room(keys, refs)

    @rule(hold=consumes(holds))
    def release(self, hold):
        self.pool.release(hold.numbers)
        self.dropped(hold.numbers)

    @rule(keys=columns)
    def delete(self, keys):
        expected = []
        for key in keys:
            slot = self.registered.get(key)
            if slot is None:
                expected.append(Deletion.MISSING)
            elif self.refs.get(slot):
                expected.append(Deletion.PINNED)
            else:
                expected.append(Deletion.DELETED)
                del self.registered[key]
        assert self.pool.delete(keys) == expected

    @rule(key=st.sampled_from(keys_of("abcdefghij")))
    def forget(self, key):
        [slot] = self.pool.slots([key])
        self.pool.forget([key], [slot])
        if slot != EVICTED:
            assert self.registered.pop(key) == slot
            self.leaving.discard(slot)
            self.coming.discard(slot)
            if self.refs.get(slot):
                self.doomed.add(slot)

    @invariant()
    def agrees(self):
        for spill in self.new:  # what has just become a victim
            for slot in spill._slots:
                if slot not in self.leaving and not self.refs.get(slot):
                    self.leaving.add(slot)
                    self.coming.add(slot)
                    self.refs[slot] = 1
        every = [*keys_of("abcdefghij"), *[b"engine%d" % at for at in range(3)]]
        statistics = self.pool.statistics()
        assert self.pool.contains(every) == set(self.registered)
        assert self.pool.slots(every) == [self.registered.get(key, EVICTED) for key in every]
        assert (self.pool.free, statistics.staged) == (self.free(), len(self.staged))
        assert statistics.held == sum(1 for count in self.refs.values() if count)
        assert statistics.leaving == len(self.leaving)
        assert set(self.pool._leaving) == self.leaving
        assert self.pool._evictions.coming == self.coming
        assert len(self.policy._order) == len(self.registered) - len(self.leaving)
        assert self.told == []


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


async def test_stores_spills_uses_and_cancels_in_any_order_lose_no_room(autojump_clock):
    """Stores wait for what spills take their time over; nothing is lost, and at the end everything is free or found."""
    import random

    for seed in range(25):
        chance = random.Random(seed)
        pool = BlockPool(8, LRU())
        stored = set()
        async with trio.open_nursery() as spilling:

            async def carry(spill, chance=chance):
                await trio.sleep(chance.randrange(1, 6) / 1024)
                spill.over()

            pool.spill_to(lambda spill, spilling=spilling, carry=carry: spilling.start_soon(carry, spill))
            async with trio.open_nursery() as nursery:

                async def user(number, chance=chance, pool=pool, stored=stored):
                    keys = [b"%d.%d" % (number, at) for at in range(chance.randrange(1, 7))]
                    with trio.move_on_after(chance.randrange(1, 20) / 1024):
                        slots = await pool.reserve(RoomRequest(keys, 8, "evict"))
                        try:
                            await trio.sleep(chance.randrange(0, 4) / 1024)
                        except trio.Cancelled:
                            pool.give_back(slots)
                            raise
                        pool.register(keys, slots)
                        stored.update(keys)

                async def reader(chance=chance, pool=pool, stored=stored):
                    for _ in range(10):
                        await trio.sleep(chance.randrange(0, 3) / 1024)
                        there = sorted(pool.contains(list(stored)))
                        if there:
                            key = chance.choice(there)
                            if chance.random() < 0.5:
                                pool.use([key])
                            refs = pool.upgrade([key])
                            await trio.sleep(chance.randrange(0, 3) / 1024)
                            pool.release(refs)

                for number in range(16):
                    nursery.start_soon(user, number)
                    if number % 4 == 0:
                        nursery.start_soon(reader)
                    await trio.sleep(chance.randrange(0, 3) / 1024)
        statistics = pool.statistics()
        assert (statistics.staged, statistics.held, statistics.waiting, statistics.leaving) == (0, 0, 0, 0), seed
        assert pool.free + len(pool) == 8, seed
        assert statistics.evicted + len(pool) == len(stored), seed
        assert statistics.evicted > 0 or len(stored) <= 8, seed


# --- faults planted into the pool: each is found by the tests above ---------------------------------------------------


def planted_victim_not_held(patch):
    """The victim is found while it is copied, but nothing holds it."""
    evict = Registry._evict

    def unheld(self, incoming, n):
        rejected = evict(self, incoming, n)
        self._held.difference_update(self._leaving)
        return rejected

    patch.setattr(Registry, "_evict", unheld)


def planted_slot_freed_before_its_copy_settled(patch):
    """What leaves goes with the spill, whoever else reads it."""
    gone = Evictions.gone
    patch.setattr(Evictions, "gone", lambda self, refs, held: gone(self, refs, frozenset()))


def planted_what_leaves_is_not_counted_on(patch):
    """Each question for room has more leave."""
    spill_to = Registry.spill_to

    def counting_on_nothing(self, spiller):
        end = spill_to(self, spiller)
        self._coming = frozenset()
        return end

    patch.setattr(Registry, "spill_to", counting_on_nothing)


def planted_what_somebody_holds_is_counted_on_for_ever(patch):
    """A copy without an end keeps everybody waiting."""
    patch.setattr(
        Evictions, "count_no_more", lambda self, slots: [self.key_of[slot] for slot in slots if slot in self.key_of]
    )


def planted_a_use_does_not_make_it_stay(patch):
    """What was hit while it was copied goes, and the policy still believes in it."""
    patch.setattr(Evictions, "stay", lambda self, slots: None)


def planted_waiters_are_not_told(patch):
    """The room is there, and who waits for it sleeps on."""
    patch.setattr(Registry, "_over", lambda self, slots: _quietly(self, slots))


def _quietly(pool, slots):
    leaving = pool._evictions.count_no_more(slots)
    waiters, pool._waiters = pool._waiters, WaitQueue(lambda: None)
    pool.release(slots)
    pool._waiters = waiters
    return leaving


PLANTED = [
    (planted_victim_not_held, test_a_ref_that_is_dropped_during_the_spill_ends_nothing),
    (planted_slot_freed_before_its_copy_settled, test_what_a_copy_holds_leaves_with_it_and_nobody_waits_for_it),
    (planted_what_leaves_is_not_counted_on, test_no_more_leaves_than_is_needed_however_often_room_is_asked_for),
    (planted_what_somebody_holds_is_counted_on_for_ever, test_what_a_copy_holds_leaves_with_it_and_nobody_waits_for_it),
    (planted_a_use_does_not_make_it_stay, test_who_counted_on_what_stays_is_given_another_slot),
    (planted_waiters_are_not_told, test_who_waits_is_served_when_the_spill_is_over),
]


@pytest.mark.parametrize(("plant", "finds"), PLANTED, ids=[plant.__name__[8:] for plant, _ in PLANTED])
async def test_a_planted_fault_is_found(plant, finds, autojump_clock, monkeypatch):
    import inspect

    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError, BaseExceptionGroup, trio.TooSlowError)):
        if inspect.iscoroutinefunction(finds):
            with trio.fail_after(60):
                await finds(autojump_clock)
        else:
            finds()
