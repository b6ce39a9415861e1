"""A directory whose clients hold by boards: every way that removes a page, or lets it be written again, respects them."""

from __future__ import annotations

import mmap
import threading

from maru._client.operations.board_pins import BoardCounters, BoardPins
from maru._index import BOARD_BYTES, Boards, BoardWriter, IndexReader, TenantIndexes, bytes_for, header_of_board
from maru.eviction import WTinyLFU
from tests.maru.test_directory import BUSY, DELETED, HELD, NEW, PAGE, PINNED, PROTECTED, World


class Shared:
    """A world with an index, and readers that hold by boards of theirs."""

    def __init__(self, world: World, keys: int = 256) -> None:
        self.world = world
        self.indexes = TenantIndexes()
        self.boards = Boards(self.indexes, lambda: None)
        memory = mmap.mmap(-1, bytes_for(keys))
        self.indexes.open("", memory, 1, 1)
        self.indexes.fill("", world.locate(world.list_keys()))
        self.indexes.end_filling("")
        world.watch_locations(self.indexes)
        world.heed(self.boards)
        self.reader = IndexReader(memory)
        self.pins: dict[int, BoardPins] = {}

    def hold(self, session: int, names: str) -> list:
        self.indexes.publish()
        if session not in self.pins:
            memory = mmap.mmap(-1, BOARD_BYTES)
            memory[:16] = header_of_board()
            self.boards.open(session, "", memory)
            self.pins[session] = BoardPins(BoardWriter(memory), threading.Lock(), 0, BoardCounters())
        held = self.pins[session].hold(list(names), self.reader.find(list(names)), self.reader)
        assert None not in held and len(held) == len(names)
        return held

    def marked(self) -> list[str]:
        names = self.world.list_keys()
        found = self.reader.find(names)
        return [names[found.positions[at]] for at in self.reader.changed(found, marked=True)]


def shared(**knobs) -> tuple[World, Shared]:
    world = World(**knobs)
    return world, Shared(world)


def test_what_is_held_is_not_reclaimed_and_others_go_in_its_place():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    assert world.store(a, "abcd") == [NEW] * 4
    held = index.hold(b, "cd")
    assert world.reclaim(a, 4) == 2 and world.there("abcd") == "cd"
    assert world.inspect("c").pins == 1 and world.statistics().pinned == 2
    index.pins[b].release(held)
    assert world.reclaim(a, 2) == 2 and not world.there("abcd")
    assert index.marked() == []


def test_what_a_reader_begins_to_hold_behind_the_search_stays_and_another_goes():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "abcdefgh")
    index.hold(b, "a")
    first_look, seen = index.boards.held, []

    def held():
        seen.append(1)
        return set() if len(seen) == 1 else first_look()  # the first look comes too early

    index.boards.held = held
    assert world.reclaim(a, 1) == 1
    del index.boards.held
    assert world.there("ah") == "a" and index.marked() == []
    assert world.reclaim(a, 8) == 6 and world.there("abcdefgh") == "a"


def test_what_is_held_is_not_deleted_and_can_be_held_by_others():
    world, index = shared()
    a, b, c = world.session(region=1), world.session(), world.session()
    world.store(a, "xyz")
    held = index.hold(b, "xy")
    assert world.delete(a, "xyz") == [HELD, HELD, DELETED]
    index.hold(c, "x")
    index.pins[b].release(held)
    assert world.delete(b, "xy") == [HELD, DELETED]


def test_what_is_held_is_not_written_over():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "x")
    held = index.hold(b, "x")
    assert world.store(a, "y") == [PINNED]
    index.pins[b].release(held)
    assert world.store(a, "y") == [NEW]


def test_what_is_about_to_be_written_over_can_be_held_by_nobody_any_more():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "wx")
    held_before = index.hold(b, "x")
    index.pins[b].release(held_before)
    looked, tried = index.boards.held, []

    def held():
        seen = looked()
        tried.append(index.pins[b].hold(["x"], index.reader.find(["x"]), index.reader))  # right behind the look
        return seen

    index.boards.held = held
    assert world.store(a, "yz") == [NEW, NEW] and tried == [[None]]
    del index.boards.held
    assert world.there("wxyz") == "yz" and index.marked() == []


def test_what_was_to_be_written_over_and_stays_can_be_held_again():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "wx")
    index.hold(b, "x")
    assert world.store(a, "yz", whole=True)[1] == PINNED
    assert world.there("wxyz") == "wx" and index.marked() == []
    index.hold(b, "w")


def test_two_names_for_one_page_in_one_registration_are_judged_as_without_a_board():
    """Found by the fuzz: the second one writes over what is not there yet."""
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "x")
    index.hold(b, "x")
    assert world.store(a, "yz", offsets=[PAGE, PAGE]) == [NEW, NEW]
    assert world.there("xyz") == "xz"


def test_an_orphaned_region_goes_only_when_nothing_of_it_is_held():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "xyz")
    held = index.hold(b, "y")
    world.end_session(a, world.now)
    assert world.make_room(PAGE, world.now) == [] and index.marked() == []
    index.pins[b].release(held)
    world.now += 1.1  # it is not looked at again at once
    assert world.make_room(PAGE, world.now) == [1] and not world.there("xyz")


def test_what_was_claimed_for_room_that_is_not_enough_stays_and_can_be_held():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "xyz")
    index.indexes.publish()
    index.boards.open(b, "", mmap.mmap(-1, BOARD_BYTES))
    world.end_session(a, world.now)
    assert world.make_room(100 * PAGE, world.now) == []
    assert index.marked() == [] and world.there("xyz") == "xyz"
    index.hold(world.session(), "xyz")


def test_a_board_counts_until_the_lease_of_its_session_ends_and_no_longer():
    world, index = shared()
    a, b = world.session(region=1, lease=100.0), world.session(lease=10.0)
    world.store(a, "x")
    index.hold(b, "x")
    world.end_session(b, world.now)  # it said farewell: its views may be in use until its lease is over
    assert world.delete(a, "x") == [HELD]
    world.now += 10.0 + world.limits.lease_grace
    assert world.next_expiry() <= world.now
    assert world.delete(a, "x") == [DELETED] and b not in index.boards


def test_a_board_of_a_silent_session_ends_with_it():
    world, index = shared()
    a, b = world.session(region=1, lease=100.0), world.session(lease=10.0)
    world.store(a, "x")
    index.hold(b, "x")
    world.now += 10.0 + world.limits.lease_grace
    assert world.expire(world.now) == [b]
    assert world.delete(a, "x") == [DELETED]


def test_after_a_restart_nothing_goes_before_the_readers_are_back_whatever_their_boards_say():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    world.store(a, "x")
    index.hold(b, "x")
    world = world.restarted()
    assert world.delete(a, "x") == [PROTECTED] and world.reclaim(a, 1) == 0
    assert world.store(a, "y") == [PINNED]
    for session in (a, b):
        world.attach(session, world.now)  # they have let go of what they held, or pinned it here
    assert world.delete(a, "x") == [DELETED]
    assert world.store(a, "z") == [BUSY]


def test_uses_on_a_board_count_before_anything_is_evicted():
    world, index = shared()
    a, b = world.session(region=1), world.session()
    for key in "abcd":
        world.store(a, key, first="abcd".index(key))
    held = index.hold(b, "ab")
    index.pins[b].release(held)
    assert world.reclaim(a, 2) == 2 and world.there("abcd") == "ab"
    assert world.statistics().found >= 2


def test_a_policy_takes_back_what_stays():
    world, index = shared(eviction=WTinyLFU)
    a, b = world.session(region=1, pages=64), world.session()
    keys = [chr(0x100 + at) for at in range(60)]
    world.store(a, keys)
    held = index.hold(b, "".join(keys[10:20]))
    assert world.reclaim(a, 60) == 50 and world.there(keys) == "".join(keys[10:20])
    index.pins[b].release(held)
    assert world.reclaim(a, 60) == 10


# --- room ahead of need -------------------------------------------------------------------------------------------


def fill(world: World, a: int, n: int, first: int = 0) -> None:
    world.store(a, [f"k{first + at}" for at in range(n)], offsets=[(first + at) * PAGE for at in range(n)])


def test_what_an_owner_registers_is_made_up_for_once_it_had_to_ask_for_room():
    world = World()
    a = world.session(region=1, pages=256)
    fill(world, a, 256)
    assert world.keep_ahead(a, world.now) == 0  # it has never asked
    assert world.reclaim(a, 4) == 4
    assert world.keep_ahead(a, world.now) == 0  # it has them
    back = [place[2] for place in world.pending(a)]
    world.acknowledge(a, 4)
    assert world.store(a, ["n0", "n1", "n2", "n3"], offsets=back) == [NEW] * 4
    assert world.keep_ahead(a, world.now) == 4
    assert world.keep_ahead(a, world.now) == 0
    assert len(world.pending(a)) == 4


def test_an_owner_that_asks_while_pages_are_under_way_has_those_kept_besides_and_asks_no_more():
    world = World()
    a = world.session(region=1, pages=640)
    fill(world, a, 640)
    free: list[int] = []
    asked = 0
    for turn in range(10):
        if len(free) < 4:
            asked += 1
            assert world.reclaim(a, 4) == 4
            free += [place[2] for place in world.pending(a)]
            world.acknowledge(a, 1 << 40)
        assert world.store(a, [f"n{turn}{at}" for at in range(4)], offsets=free[:4]) == [NEW] * 4
        del free[:4]
        free += [place[2] for place in world.pending(a)]  # with the answer
        world.acknowledge(a, 1 << 40)
        world.keep_ahead(a, world.now)  # behind it
    assert asked == 2 and len(world.list_keys()) == 640 - 8


def test_for_a_batch_that_is_large_beside_what_there_is_nothing_goes_ahead():
    world = World()
    a = world.session(region=1, pages=16)
    fill(world, a, 16)
    assert world.reclaim(a, 8) == 8
    offsets = [place[2] for place in world.pending(a)]
    world.acknowledge(a, 1 << 40)
    world.store(a, [f"n{at}" for at in range(8)], offsets=offsets)
    assert world.keep_ahead(a, world.now) == 0 and len(world.list_keys()) == 16


def test_an_owner_that_asks_for_much_once_goes_on_to_have_what_it_needs_as_a_rule():
    world = World()
    a = world.session(region=1, pages=256)
    fill(world, a, 256)
    assert world.reclaim(a, 4) == 4
    assert world.reclaim(a, 20) == 20  # more than is worth it
    back = [place[2] for place in world.pending(a)]
    world.acknowledge(a, 1 << 40)
    assert world.store(a, [f"n{at}" for at in range(24)], offsets=back) == [NEW] * 24
    assert world.keep_ahead(a, world.now) == 4


def test_what_is_kept_ahead_fades_while_nobody_asks():
    world = World()
    a = world.session(region=1, pages=4096)
    fill(world, a, 4096)
    assert world.reclaim(a, 48) == 48
    free: list[int] = []
    kept = []
    for turn in range(800):
        free += [place[2] for place in world.pending(a)]
        world.acknowledge(a, 1 << 40)
        assert world.store(a, [f"n{turn}"], offsets=[free.pop()]) == [NEW]
        world.keep_ahead(a, world.now)
        kept.append(4096 - len(world.list_keys()))
    assert kept == sorted(kept, reverse=True) and kept[0] == 48 and 20 <= kept[180] <= 28 and kept[-1] <= 4


def test_a_session_that_has_ended_gets_nothing_ahead():
    world = World()
    a = world.session(region=1, pages=64)
    fill(world, a, 64)
    world.reclaim(a, 4)
    world.end_session(a, world.now)
    assert world.keep_ahead(a, world.now) == 0
