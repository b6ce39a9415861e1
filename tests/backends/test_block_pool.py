"""The block pool: slots, refs, room and who waits for it."""

import random

import attrs
import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from backends import CapacityError
from backends.abc import EVICTED, Deletion, RoomRequest
from backends.base.blocks import BlockPool
from tests.support.spilling_world import keys_of

ALL_MODES = ["wait", "evict", "partial", "fail"]


def pool_with(text, capacity=8):
    pool = BlockPool(capacity)
    pool.register(keys_of(text), pool.take(len(text)))
    return pool


def test_slots_are_handed_out_ascending_and_as_neighbours_again_after_an_eviction():
    pool = BlockPool(8)
    first, second = pool.take(3), pool.take(5)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6, 7])
    assert pool.take(1) is None
    pool.register(keys_of("abc"), first)
    pool.register(keys_of("defgh"), second)
    assert pool.take_evicting(keys_of("uvw")) == [0, 1, 2]
    pool.give_back([0, 1, 2])
    assert pool.take(2) == [0, 1]


def test_free_slots_are_listed_when_they_are_needed():
    pool = BlockPool(1 << 40)
    assert pool.free == 1 << 40
    assert pool.take(2) == [0, 1]
    assert pool.take(10_000) == list(range(2, 10_002))
    pool.give_back([1])
    assert pool.take(2) == [1, 10_002]
    assert pool.free == (1 << 40) - 10_003


def test_the_first_slot_may_have_any_number():
    pool = BlockPool(3, first=5)
    assert pool.take(3) == [5, 6, 7]


def test_a_pool_without_slots_holds_nothing():
    pool = BlockPool(0)
    assert pool.reserve_nowait(keys_of("a"), "partial") == []
    with pytest.raises(CapacityError):
        pool.reserve_nowait(keys_of("a"), "wait")
    with pytest.raises(ValueError, match="capacity"):
        BlockPool(-1)


def test_dropping_the_last_ref_makes_a_block_inactive_not_lost():
    pool = pool_with("ab")
    refs = pool.upgrade(keys_of("ab"))
    again = pool.upgrade(keys_of("b"))
    assert pool.delete(keys_of("ab")) == [Deletion.PINNED] * 2
    pool.release(refs)
    assert pool.contains(keys_of("abc")) == set(keys_of("ab"))
    assert pool.delete(keys_of("ab")) == [Deletion.DELETED, Deletion.PINNED]
    pool.release(again)
    assert pool.delete(keys_of("ab")) == [Deletion.MISSING, Deletion.DELETED]


def test_a_key_that_is_not_there_is_evicted_and_a_key_named_twice_is_held_twice():
    pool = pool_with("ab")
    refs = pool.upgrade(keys_of("axb"))
    assert refs == [0, EVICTED, 1]
    twice = pool.upgrade(keys_of("aa"))
    assert pool.statistics().held == 2
    pool.release([*refs, EVICTED])
    pool.release(twice[:1])
    assert pool.statistics().held == 1
    pool.release(twice[1:])
    pool.release(twice)  # nobody holds it any more
    assert pool.statistics().held == 0


def test_a_key_named_twice_while_nothing_is_held_is_held_twice():
    pool = pool_with("ab")
    refs = pool.upgrade(keys_of("abaa"))
    for ref in refs:
        assert pool.statistics().held > 0
        pool.release([ref])
    assert pool.statistics().held == 0


def test_the_first_writer_wins_and_the_other_slot_is_free_again():
    pool = pool_with("ab", capacity=5)
    slots = pool.take(3)
    assert pool.register(keys_of("bcc"), slots) == [0, 2]
    assert pool.slots(keys_of("abc")) == [0, 1, slots[1]]
    statistics = pool.statistics()
    assert (pool.free, statistics.staged, statistics.duplicates, statistics.stored) == (2, 0, 2, 3)
    with pytest.raises(ValueError, match="2 keys but 1 slots"):
        pool.register(keys_of("xy"), [4])


def test_a_key_named_twice_in_one_registration_is_a_duplicate_of_itself():
    pool = BlockPool(4)
    assert pool.register(keys_of("aab"), pool.take(3)) == [1]
    assert pool.slots(keys_of("ab")) == [0, 2]
    assert pool.free == 2


def test_what_turns_out_bad_is_not_found_and_its_slot_waits_for_the_last_ref():
    pool = pool_with("ab", capacity=2)
    [slot] = refs = pool.upgrade(keys_of("a"))
    pool.forget(keys_of("a"), refs)
    assert pool.contains(keys_of("ab")) == set(keys_of("b"))
    assert pool.free == 0
    assert pool.reserve_nowait(keys_of("a"), "evict") == [1]  # b went: a's old slot is still held
    with pytest.raises(trio.WouldBlock):
        pool.reserve_nowait(keys_of("c"), "evict")
    pool.register(keys_of("a"), [1])
    pool.forget(keys_of("a"), [slot])  # that one was forgotten already: a lies elsewhere now
    assert pool.contains(keys_of("a"))
    pool.release(refs)
    assert pool.free == 1
    pool.forget(keys_of("a"), [1])
    assert pool.free == 2


def test_the_longest_prefix_ends_at_the_first_gap():
    pool = pool_with("abc")
    assert [pool.prefix(keys_of(text)) for text in ("abc", "abx", "xab", "", "abcd")] == [3, 2, 0, 0, 3]


def test_a_hit_is_a_use_and_copying_away_is_none():
    pool = pool_with("abc", capacity=3)
    pool.release(pool.upgrade(keys_of("c")))
    assert pool.take_evicting(keys_of("x")) == [2]  # published deepest first: c is the oldest
    pool.use(keys_of("b"))
    assert pool.take_evicting(keys_of("y")) == [0]


@pytest.mark.parametrize("when_full", ["partial", "fail"])
def test_partial_and_fail_grant_what_fits_and_nothing_past_a_waiter(when_full):
    pool = BlockPool(3)
    assert pool.reserve_nowait(keys_of("abcd"), when_full) == [0, 1, 2]
    assert pool.reserve_nowait(keys_of("abcd"), when_full) == []


async def test_waiters_are_served_in_order_and_nobody_passes_them():
    pool = BlockPool(4)
    slots = pool.take(4)
    served = []

    async def wait(name, n):
        got = await pool.reserve(RoomRequest(keys_of("x" * n), 8, "wait"))
        served.append((name, len(got)))

    async with trio.open_nursery() as nursery:
        for name, n in (("large", 3), ("small", 1)):
            nursery.start_soon(wait, name, n)
            await trio.testing.wait_all_tasks_blocked()
        pool.give_back(slots[:1])
        await trio.testing.wait_all_tasks_blocked()
        assert served == []
        assert pool.reserve_nowait(keys_of("y"), "partial") == []
        for mode in ("wait", "evict"):
            with pytest.raises(trio.WouldBlock):
                pool.reserve_nowait(keys_of("y"), mode)
        pool.give_back(slots[1:3])
        await trio.testing.wait_all_tasks_blocked()
        assert served == [("large", 3)]
        pool.give_back(slots[3:])
    assert served == [("large", 3), ("small", 1)]


async def test_a_cancelled_waiter_lets_the_next_one_pass():
    pool = BlockPool(4)
    pool.take(3)
    scope = trio.CancelScope()

    async def large():
        with scope:
            await pool.reserve(RoomRequest(keys_of("xy"), 8, "wait"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(large)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pool.reserve, RoomRequest(keys_of("z"), 8, "wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert pool.statistics().waiting == 2
        scope.cancel()
    assert pool.statistics().waiting == 0
    assert pool.free == 0


@pytest.mark.parametrize("order", ["grant first", "cancel first"])
async def test_room_granted_and_cancelled_in_the_same_tick_is_given_back(order):
    pool = BlockPool(2)
    slots = pool.take(2)
    scope = trio.CancelScope()
    got = []

    async def wait():
        with scope:
            got.append(await pool.reserve(RoomRequest(keys_of("ab"), 8, "wait")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        if order == "cancel first":
            scope.cancel()
        pool.give_back(slots)
        scope.cancel()
    assert pool.free == (0 if got else 2)
    assert bool(got) == (order == "grant first")  # what was delivered is the caller's, what was not is given back


@pytest.mark.parametrize("frees", ["release", "register", "delete", "forget"])
async def test_everything_that_frees_room_serves_the_waiters(frees):
    pool = pool_with("ab", capacity=3)
    refs = pool.upgrade(keys_of("ab"))
    staged = pool.take(1)
    if frees in ("delete", "forget"):
        pool.release(refs)
    async with trio.open_nursery() as nursery:
        mode = "wait" if frees in ("delete", "forget") else "evict"
        nursery.start_soon(pool.reserve, RoomRequest(keys_of("x"), 8, mode))
        await trio.testing.wait_all_tasks_blocked()
        assert pool.statistics().waiting == 1
        match frees:
            case "release":
                pool.release(refs)
            case "register":
                pool.register(keys_of("c"), staged)
            case "delete":
                pool.delete(keys_of("a"))
            case "forget":
                pool.forget(keys_of("a"), pool.slots(keys_of("a")))
    assert pool.statistics().waiting == 0


async def test_a_request_that_shrinks_keeps_its_turn():
    pool, request = BlockPool(4), RoomRequest(keys_of("abc"), 8, "wait")
    held = pool.take(4)
    got = []

    async def wait(request):
        slots = await pool.reserve(request)
        got.append((request.keys, slots))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, request)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, RoomRequest(keys_of("x"), 8, "wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert request.shrink(request.keys[1:])
        assert request.shrink(request.keys[1:])
        pool.give_back(held[:1])
        assert not request.shrink(()), "it was granted in this tick, for the keys that it had"
        await trio.testing.wait_all_tasks_blocked()
        assert got == [(keys_of("c"), held[:1])]
        assert not request.shrink(()) and request.keys == keys_of("c")
        pool.give_back(held[1:2])
    assert got[1:] == [(keys_of("x"), held[1:2])]


async def test_less_that_fits_is_granted_at_once_and_so_is_the_next_in_the_queue():
    pool, request = BlockPool(4), RoomRequest(keys_of("abcd"), 8, "wait")
    held = pool.take(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.reserve, request)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pool.reserve, RoomRequest(keys_of("x"), 8, "wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert request.shrink(keys_of("a"))
        assert not pool._waiters.requests
    assert pool.free == 0
    pool.give_back(held)


async def test_a_place_that_raises_when_a_request_shrinks_leaves_it_as_it_was():
    def broken():
        raise OSError("broken on purpose")

    request = RoomRequest(keys_of("abc"), 8, "wait")
    with request.waiting(broken), pytest.raises(OSError, match="on purpose"):
        request.shrink(())
    with request.waiting(lambda: False):
        assert not request.shrink(())
    assert request.keys == keys_of("abc") and not request.shrink(())


async def test_reserve_is_a_checkpoint_and_a_cancelled_one_takes_nothing():
    pool = BlockPool(1)
    with trio.testing.assert_checkpoints():
        pool.give_back(await pool.reserve(RoomRequest(keys_of("a"), 8, "wait")))
    with trio.CancelScope() as scope:
        scope.cancel()
        await pool.reserve(RoomRequest(keys_of("a"), 8, "wait"))
    assert scope.cancelled_caught
    assert pool.free == 1


class Picky:
    """Evicts in the order of publication and refuses the keys it is told to."""

    def __init__(self, refuse):
        self.known = {}
        self.refuse = refuse

    def use(self, keys):
        self.known.update(dict.fromkeys(keys))

    def make_room(self, incoming, n, held):
        rejected = [key for key in incoming if key in self.refuse][:n]
        victims = [key for key in self.known if key not in held][: n - len(rejected)]
        self.discard(victims)
        return victims, rejected

    def discard(self, keys):
        for key in keys:
            self.known.pop(key, None)


def test_a_key_that_the_policy_rejects_gets_no_slot():
    pool = BlockPool(3, Picky(keys_of("y")))
    pool.register(keys_of("abc"), pool.take(3))
    slots = pool.take_evicting(keys_of("xyz"))
    assert slots[1] == EVICTED
    assert EVICTED not in (slots[0], slots[2])
    assert pool.statistics().evicted == 2
    pool.give_back(slots)
    assert (pool.free, pool.statistics().staged) == (2, 0)


@attrs.define
class Room:
    """What the machine holds: a staged column, or refs."""

    keys: list
    numbers: list


class AgainstAModel(RuleBasedStateMachine):
    """A pool against dictionaries and counting, with everything that may be asked of it in any order."""

    CAPACITY = 6
    rooms = Bundle("rooms")
    holds = Bundle("holds")
    columns = st.lists(st.sampled_from(keys_of("abcdefghij")), min_size=1, max_size=4, unique=True)

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.CAPACITY)
        self.registered = {}
        self.staged = set()
        self.refs = {}
        self.doomed = set()

    def inactive(self):
        return [key for key, slot in self.registered.items() if not self.refs.get(slot)]

    def free(self):
        return self.CAPACITY - len(self.registered) - len(self.staged) - len(self.doomed)

    @rule(target=rooms, keys=columns, mode=st.sampled_from(ALL_MODES))
    def reserve(self, keys, mode):
        free, inactive = self.free(), self.inactive()
        try:
            slots = self.pool.reserve_nowait(keys, mode)
        except trio.WouldBlock:
            assert mode in ("wait", "evict")
            assert len(keys) > free + (len(inactive) if mode == "evict" else 0)
            return multiple()
        if mode in ("partial", "fail"):
            assert len(slots) == min(free, len(keys))
        else:
            assert len(slots) == len(keys)
        gone = [key for key in self.registered if not self.pool.contains([key])]
        assert len(gone) == (max(0, len(keys) - free) if mode == "evict" else 0)
        assert set(gone) <= set(inactive)
        for key in gone:
            del self.registered[key]
        assert slots == sorted(set(slots))
        assert self.staged.isdisjoint(slots)
        assert not set(slots) & set(self.registered.values())
        self.staged.update(slots)
        return Room(keys[: len(slots)], slots)

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
        for ref in hold.numbers:
            if ref != EVICTED:
                self.refs[ref] -= 1
                if not self.refs[ref]:
                    self.doomed.discard(ref)

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
            if self.refs.get(slot):
                self.doomed.add(slot)

    @invariant()
    def agrees(self):
        every = keys_of("abcdefghij")
        statistics = self.pool.statistics()
        assert self.pool.contains(every) == set(self.registered)
        assert self.pool.slots(every) == [self.registered.get(key, EVICTED) for key in every]
        assert (self.pool.free, statistics.staged) == (self.free(), len(self.staged))
        assert statistics.held == sum(1 for count in self.refs.values() if count)


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


async def test_waiters_and_cancels_in_any_order_lose_no_room(autojump_clock):
    chance = random.Random(20240611)
    for _ in range(30):
        pool = BlockPool(5)
        live = 0

        async def user(pool=pool):
            nonlocal live
            with trio.move_on_after(chance.randrange(1, 9) / 1024):
                slots = await pool.reserve(RoomRequest(keys_of("abcd")[: chance.randrange(1, 5)], 8, "wait"))
                live += len(slots)
                assert live <= 5
                try:
                    await trio.sleep(chance.randrange(1, 4) / 1024)
                finally:
                    live -= len(slots)
                    pool.give_back(slots)

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(user)
                await trio.sleep(chance.randrange(0, 3) / 1024)
        assert (pool.free, pool.statistics().waiting, live) == (5, 0, 0)
