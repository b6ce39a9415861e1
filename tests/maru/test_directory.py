"""The directory, rule by rule. `test_maru_directory_model.py` compares it with a model, for whatever nobody thought of."""

import math
import random
import sys
import tracemalloc
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru._directory import Columns, Directory, DropAnswer, GivenBack, Limits, StoreStatus
from maru._directory.image import DirectoryImage, encode_image
from maru._directory.pins import Pins, ReadGrace
from maru._directory.records import (
    Acknowledged,
    Deleted,
    Fenced,
    ReadUnpinned,
    RegionAdded,
    RegionDropped,
    RegionReturned,
    Registered,
    SessionEnded,
    SessionOpened,
    decode,
    encode,
)
from maru._directory.sessions import Fences, Leases, Outbox
from maru.eviction import LRU

PAGE = 16
NEW, DUPLICATE, PINNED, FOREIGN, RANGE, QUOTA, KEY, BUSY = StoreStatus
DELETED, MISSING, HELD, PROTECTED = DropAnswer
EASY = Limits(high_watermark=1.0, low_watermark=1.0)


class World:
    """A directory, who uses it, and time."""

    def __init__(self, limits=EASY, directory=None, eviction=LRU):
        self.limits = limits
        self.directory = Directory(limits, eviction) if directory is None else directory
        self.now = 100.0
        self.tokens = iter(range(1, 1000))

    def __getattr__(self, name):
        return getattr(self.directory, name)

    def session(self, instance="i", tenant="", lease=10.0, region=None, pages=8):
        number = self.directory.open_session(next(self.tokens).to_bytes(16, "big"), instance, tenant, lease, self.now)
        if region:
            self.directory.add_region(number, region, pages * PAGE)
        return number

    def connection(self, instance="published", region=None, pages=8):
        number = self.directory.connect()
        if region:
            self.directory.add_region(number, region, pages * PAGE, instance_id=instance)
        return number

    def store(self, by, keys, region=1, first=0, *, attempt=1, length=PAGE, whole=False, offsets=None):
        """Register keys (one letter each) at neighbouring pages; the statuses."""
        keys = list(keys)
        offsets = [(first + at) * PAGE for at in range(len(keys))] if offsets is None else offsets
        columns = Columns(region, keys, offsets, length, None, attempt if by > 0 else 0)
        source = 0x40, msgspec.msgpack.encode(columns)
        answer = self.directory.register(by, columns, self.now, source=source, whole=whole)
        return answer and answer.statuses

    def find(self, by, keys, **options):
        return self.directory.find(by, list(keys), self.now, **options)

    def there(self, keys):
        """Those of these keys that are there."""
        return "".join(key for key, there in zip(keys, self.directory.exists(keys), strict=True) if there)

    def pin(self, by, keys, **options):
        return self.directory.pin(by, list(keys), **options)

    def delete(self, by, keys, **options):
        return self.directory.delete(by, list(keys), self.now, **options)

    def reclaim(self, by, pages, **options):
        return self.directory.reclaim(by, pages, self.now, **options)

    def pending(self, by, **options):
        """(number, region, offset, attempt) of each return."""
        returns = self.directory.pending(by, self.now, **options)
        if returns is None:
            return []
        numbers = range(returns.first_number, returns.first_number + len(returns.regions))
        return list(zip(numbers, returns.regions, returns.offsets, returns.attempts, strict=True))

    def replayed(self):
        """The directory that comes out of the records so far; those are taken."""
        other = Directory(self.limits)
        for record in self.directory.take_records():
            other.apply(decode(encode(record)), columns_of)
        return other

    def restarted(self, directory=None):
        """The same world after a restart of the server."""
        world = World(self.limits, self.replayed() if directory is None else directory)
        world.now = self.now
        world.tokens = self.tokens
        world.directory.restart(world.now)
        return world


def columns_of(code, payload):
    assert code == 0x40
    return Columns(*msgspec.msgpack.decode(payload))


# --- registering --------------------------------------------------------------------------------------------------


def test_the_first_writer_wins_and_the_location_is_kept():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    assert world.store(a, "xy", attempt=7) == [NEW, NEW]
    before = world.find(b, "xy")
    assert world.store(b, "yxz", region=2) == [DUPLICATE, DUPLICATE, NEW]
    assert world.find(b, "xy") == before
    assert [(at.region_id, at.offset, at.length, at.attempt) for at in before] == [(1, 0, PAGE, 7), (1, PAGE, PAGE, 7)]


def test_a_key_named_twice_is_new_once_and_the_other_page_stays_free():
    world = World()
    a = world.session(region=1)
    assert world.store(a, "xyx") == [NEW, NEW, DUPLICATE]
    assert world.find(a, "x")[0].offset == 0
    assert world.store(a, "z", first=2) == [NEW]
    assert world.there("xyz") == "xyz"


def test_columns_of_their_own_and_one_number_for_all_say_the_same():
    world = World()
    a = world.session(region=1, pages=4)
    world.add_region(a, 2, 4 * PAGE)
    columns = Columns([1, 2, 1], ["x", "y", "z"], [0, 0, PAGE], [1, 2, 3], [7, 8, 9], 5)
    answer = world.register(a, columns, world.now)
    assert answer == ([NEW] * 3, [1, 2, 3], 1, [])
    assert [list(msgspec.structs.astuple(at))[:6] for at in world.find(a, "xyz")] == [
        [1, 0, 1, 1, 7, 5],
        [2, 0, 2, 2, 8, 5],
        [1, PAGE, 3, 3, 9, 5],
    ]
    assert world.statistics().used_bytes == 6


@pytest.mark.parametrize("offset", [-PAGE, 8 * PAGE, 8 * PAGE - 1, 1 << 63])
def test_what_is_not_inside_the_region_is_refused(offset):
    world = World()
    a = world.session(region=1)
    assert world.store(a, "xyz", offsets=[0, offset, PAGE]) == [NEW, RANGE, NEW]
    assert world.store(a, "q", offsets=[offset]) == [RANGE]
    assert world.there("xyzq") == "xz"


@pytest.mark.parametrize("length", [0, -1, 8 * PAGE + 1])
def test_a_length_that_is_none_or_too_long_is_refused(length):
    world = World()
    a = world.session(region=1)
    assert world.store(a, "x", length=length) == [RANGE]
    assert world.store(a, "xy", length=[PAGE, length]) == [NEW, RANGE]


def test_unknown_foreign_and_returned_regions_are_refused():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    c = world.connection(region=3)
    assert world.store(a, "x", region=9) == [FOREIGN]
    assert world.store(a, "x", region=[2]) == [FOREIGN]
    assert world.store(a, "x", region=3) == [FOREIGN]
    assert world.store(c, "x", region=1) == [FOREIGN]
    world.store(b, "y", region=2)
    assert world.give_back_region(b, 2) is GivenBack.DEFERRED
    assert world.store(b, "x", region=2, first=1) == [FOREIGN]
    world.end_session(a, world.now)
    assert world.store(b, "x", region=1) == [FOREIGN]
    assert world.statistics().refused == 6
    assert world.there("xy") == "y"


def test_a_key_beyond_the_limit_is_refused_in_bytes_not_characters():
    world = World(Limits(max_key_bytes=8))
    a = world.session(region=1)
    assert world.store(a, ["12345678", "ääää", "123456789", "ääääx"]) == [NEW, NEW, KEY, KEY]


def test_an_offset_that_an_unpinned_key_holds_drops_that_key():
    world = World()
    for by in (world.session(region=1), world.connection(region=2)):
        region = 1 if by > 0 else 2
        assert world.store(by, "xy", region=region) == [NEW, NEW]
        assert world.store(by, "z", region=region) == [NEW]
        assert world.there("xyz") == "yz"
        assert world.statistics().used_bytes == 2 * PAGE
        assert by < 0 or world.pending(by) == []  # it was the owner who wrote there: nothing comes back to him
        world.forget("yz")


def test_an_offset_that_a_pinned_key_holds_refuses():
    world = World()
    a, reader = world.session(region=1), world.session()
    world.store(a, "xy")
    world.pin(reader, "x")
    assert world.store(a, "zw") == [PINNED, NEW]
    assert world.there("xyzw") == "xw"


def test_entries_are_judged_with_what_those_before_them_have_done():
    world = World()
    a = world.session(region=1)
    world.store(a, "x")
    # z writes over x, so x is no duplicate; then y writes over z at the same place, so the second z is none
    assert world.store(a, "zxyz", offsets=[0, PAGE, 0, 2 * PAGE]) == [NEW] * 4
    assert [at.offset for at in world.find(a, "xyz")] == [PAGE, 0, 2 * PAGE]
    assert world.replayed().dump() == world.dump()


def test_a_bad_entry_refuses_a_whole_batch_where_that_is_asked_for():
    world = World()
    c = world.connection(region=1)
    world.store(c, "x")
    before = world.dump()
    world.take_records()
    assert world.store(c, "yxz", offsets=[PAGE, 2 * PAGE, 99 * PAGE], whole=True) == [NEW, DUPLICATE, RANGE]
    assert world.dump() == before
    assert world.take_records() == []
    assert world.store(c, "yxz", offsets=[PAGE, 2 * PAGE, 3 * PAGE], whole=True) == [NEW, DUPLICATE, NEW]


def test_generations_count_up_over_all_and_are_never_given_twice():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    world.store(a, "xy")
    world.store(b, "yz", region=2)
    assert [at.generation for at in world.find(a, "xyz")] == [1, 2, 3]
    world.delete(a, "xyz")
    image = world.dump()
    for again in (world.restarted(), World(directory=Directory.load(image))):
        again.tokens = iter(range(50, 60))
        a = again.session(region=3)
        again.store(a, "q", region=3)
        assert again.find(a, "q")[0].generation == 4


def test_an_empty_batch_is_one():
    world = World()
    a = world.session(region=1)
    assert (len(world.directory), repr(world.directory)) == (0, "<Directory of 0 keys in 1 regions>")
    world.take_records()
    for regions in (1, [], 9):
        assert world.register(a, Columns(regions, [], [], PAGE), 0.0) == ([], [], 0, [])
    assert world.take_records() == []


def test_what_breaks_a_promise_raises_and_changes_nothing():
    world = World()
    a = world.session(region=1)
    world.store(a, "x")
    gone = world.session()
    world.end_session(gone, world.now)
    world.take_records()
    before = world.dump()
    for columns in (
        Columns(1, ["y", "z"], [0], PAGE),
        Columns([1], ["y", "z"], [0, PAGE], PAGE),
        Columns(1, ["y", "z"], [0, PAGE], [PAGE]),
        Columns(1, ["y", "z"], [0, PAGE], PAGE, [7]),
    ):
        with pytest.raises(ValueError, match="different lengths"):
            world.register(a, columns, 0.0)
    with pytest.raises(ValueError, match="region 1 already"):
        world.add_region(a, 1, PAGE)
    for token in (b"", (1).to_bytes(16, "big")):
        with pytest.raises(ValueError, match="token"):
            world.open_session(token, "i", "", 1.0, 0.0)
    for stranger in (gone, 99, -99):
        for call in (
            lambda by: world.store(by, "z"),
            lambda by: world.find(by, "x"),
            lambda by: world.pin(by, "x"),
            lambda by: world.unpin(by, "x"),
            lambda by: world.delete(by, "x"),
            lambda by: world.add_region(by, 9, PAGE, instance_id="i"),
            lambda by: world.give_back_region(by, 1, instance_id="i"),
            lambda by: world.reclaim(by, 1),
            lambda by: world.trim(by, 0.0),
            lambda by: world.renew(by, 0.0),
            lambda by: world.end_session(by, 0.0),
            lambda by: world.resolve(by, 1, [], []),
            lambda by: world.acknowledge(by, 1),
            lambda by: world.pending(by),
            lambda by: world.fenced(by, 1),
        ):
            with pytest.raises(KeyError):
                call(stranger)
    assert world.dump() == before
    assert world.take_records() == []


@pytest.mark.parametrize(
    "look",
    [
        lambda world, a: world.statistics().entries == world.statistics().used_bytes // PAGE == 2,
        lambda world, a: world.usage()[0].used_bytes == 2 * PAGE,
        lambda world, a: len(world.directory) == 2,
        lambda world, a: world.dump().keys == ["x", "y"],
        lambda world, a: [at.generation for at in world.find(a, "xy", pin=True)] == [1, 2],
        lambda world, a: world.exists("xy") == [True, True],
        lambda world, a: world.pin(a, "xy") == [True, True],
        lambda world, a: world.unpin(a, "xy") == [False, False],
        lambda world, a: world.delete(a, "xy") == [DELETED, DELETED],
        lambda world, a: world.reclaim(a, 2) == 2,
        lambda world, a: world.trim(a, world.now) == 2,
        lambda world, a: world.resolve(a, 1, [1, 1], [0, PAGE]) == [1, 2],
        lambda world, a: world.store(a, "yzx", first=1) == [DUPLICATE, NEW, DUPLICATE],
        lambda world, a: world.store(a, "z", first=1) == [NEW] and world.exists("xy") == [True, False],
        lambda world, a: world.give_back_region(a, 1) is GivenBack.DEFERRED,
        lambda world, a: world.drop_region(1) == 2,
        lambda world, a: world.forget("xy") == 2,
        lambda world, a: world.end_session(a, world.now) or world.make_room(1, world.now) == [1],
        lambda world, a: world.expire(world.now + 100.0) == [a] and world.make_room(1, world.now) == [1],
    ],
)
def test_what_is_registered_later_is_there_for_whoever_looks(look):
    world = World(Limits(high_watermark=0.0, low_watermark=0.0))
    a = world.session(region=1)
    columns = Columns(1, ["x", "y"], [0, PAGE], PAGE, None, 1)
    source = 0x40, msgspec.msgpack.encode(columns)
    answer = world.register(a, columns, world.now, source=source, later=True)
    assert answer == ([NEW, NEW], [1, 2], 1, [])
    assert isinstance(world.records[-1], Registered)
    assert not world.directory._located
    assert look(world, a)
    assert not world.directory._changes.deferred
    assert world.replayed().dump() == world.dump()


# --- finding and the order of use ---------------------------------------------------------------------------------


def test_finding_is_a_use_and_the_deepest_of_a_prefix_goes_first():
    world = World()
    a, reader = world.session(region=1), world.session()
    world.store(a, "abcd")
    assert world.reclaim(a, 1) == 1
    assert world.there("abcd") == "abc"
    world.find(reader, "bc")
    world.reclaim(a, 1)
    assert world.there("abc") == "bc"
    world.reclaim(a, 1)
    assert world.there("bc") == "b"


def test_asking_whether_a_key_exists_is_no_use():
    world = World()
    a = world.session(region=1)
    world.store(a, "ab")
    assert world.exists(["b", "z", "a"]) == [True, False, True]
    world.reclaim(a, 1)
    assert world.there("ab") == "a"


def test_the_order_of_use_is_each_owners_own():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    world.store(a, "ab")
    world.store(b, "xy", region=2)
    world.find(a, "xbya")  # of both in one request
    assert world.reclaim(b, 1) == 1
    assert world.there("abxy") == "abx"
    assert world.reclaim(a, 1) == 1
    assert world.there("abx") == "bx"


def test_a_prefix_ends_before_the_first_miss():
    world = World()
    a = world.session(region=1)
    world.store(a, "abd")
    assert [at and at.offset for at in world.find(a, "abcd")] == [0, PAGE, None, 2 * PAGE]
    assert [at.offset for at in world.find(a, "abcd", prefix=True, pin=True)] == [0, PAGE]
    assert world.find(a, "cab", prefix=True, pin=True) == []
    assert world.unpin(a, "abcd") == [True, True, False, False]
    assert world.pin(a, "abcd", prefix=True) == [True, True, False, False]
    assert world.unpin(a, "abcd") == [True, True, False, False]
    assert world.pin(a, "abcd") == [True, True, False, True]
    assert (world.statistics().found, world.statistics().missed) == (5, 3)


def test_any_eviction_policy_may_decide():
    made = []

    class MostRecentFirst(LRU):
        def __init__(self):
            super().__init__()
            made.append(self)

        def make_room(self, incoming, n, held):
            assert incoming == ()
            victims = [key for key in reversed(self._order) if key not in held][:n]
            self.discard(victims)
            return victims, []

    world = World(eviction=MostRecentFirst)
    a = world.session(region=1)
    world.session()
    assert len(made) == 2
    world.store(a, "abc")
    world.pin(a, "a")
    world.reclaim(a, 1)
    assert world.there("abc") == "ac"


# --- pins ---------------------------------------------------------------------------------------------------------


def test_pins_count_and_one_too_many_unpins_is_false():
    world = World()
    a, b = world.session(region=1), world.session()
    world.store(a, "x")
    assert world.pin(a, "xx") == [True, True]
    assert world.find(b, "x", pin=True)
    assert world.unpin(a, "xxx") == [True, True, False]
    assert world.delete(a, "x") == [HELD]
    assert world.unpin(b, "x") == [True]
    assert world.unpin(b, "xq") == [False, False]
    assert world.statistics().pinned == 0
    assert world.delete(a, "x") == [DELETED]
    assert world.pin(a, "x") == [False]


def test_a_session_of_ours_drops_nobody_elses_pin():
    world = World()
    a, b, c = world.session(region=1), world.session(), world.connection()
    world.store(a, "x")
    world.pin(b, "x")
    world.pin(c, "x")
    assert world.unpin(a, "x") == [False]
    assert world.unpin(c, "xx") == [True, False]
    assert world.unpin(b, "x") == [True]


def test_published_pins_belong_to_whoever_unpins_first():
    world = World()
    a, one, other = world.session(region=1), world.connection(), world.connection()
    world.store(a, "xy")
    world.pin(one, "xxy")
    assert world.unpin(other, "xy") == [True, True]
    assert world.delete(a, "xy") == [HELD, DELETED]
    assert world.unpin(one, "xy") == [True, False]
    assert world.unpin(other, "x") == [False]
    assert world.delete(a, "x") == [DELETED]


def test_a_pinned_key_stays_whoever_wants_it_gone():
    world = World(Limits(instance_quotas={"i": 2 * PAGE}, high_watermark=0.2, low_watermark=0.0))
    a, reader = world.session(region=1), world.session("reader")
    world.store(a, "xy")
    world.pin(reader, "xy")
    assert world.delete(a, "xy") == [HELD, HELD]
    assert world.reclaim(a, 2) == 0
    assert world.trim(a, world.now) == 0
    assert world.store(a, "z", first=2) == [QUOTA]
    assert world.store(a, "z") == [QUOTA] or world.store(a, "z") == [PINNED]
    world.end_session(a, world.now)
    assert world.make_room(1, world.now) == []
    assert world.there("xy") == "xy"
    world.unpin(reader, "x")
    assert world.make_room(1, world.now) == []
    world.unpin(reader, "y")
    assert world.make_room(1, world.now) == [1]


def test_the_pins_of_a_session_end_with_its_lease_and_the_grace_not_before():
    world = World(Limits(lease_grace=1.0))
    a, reader = world.session(region=1, lease=100.0), world.session(lease=10.0)
    world.store(a, "x")
    world.pin(reader, "x")
    world.now += 4.0
    world.renew(reader, world.now)
    world.now += 10.99
    assert world.expire(world.now) == []
    assert world.delete(a, "x") == [HELD]
    assert world.remaining(reader, world.now) == 0.0
    world.now += 0.02
    assert world.next_expiry() <= world.now
    assert world.expire(world.now) == [reader]
    assert world.delete(a, "x") == [DELETED]


def test_the_pins_of_a_session_that_closes_count_until_its_lease_would_have_ended():
    world = World(Limits(lease_grace=1.0))
    a, reader = world.session(region=1, lease=100.0), world.session(lease=10.0)
    world.store(a, "xy")
    world.pin(reader, "xy")
    world.end_session(reader, world.now)
    world.now += 10.9
    assert world.delete(a, "x") == [HELD]
    assert world.reclaim(a, 2) == 0
    assert world.next_expiry() > world.now
    world.now += 0.2
    assert world.next_expiry() <= world.now
    assert world.delete(a, "x") == [DELETED]  # also before anybody calls expire
    assert world.expire(world.now) == []
    assert world.statistics().pinned == 0


def test_the_pins_of_a_published_connection_outlive_it_by_the_read_grace():
    world = World(Limits(v1_read_grace=30.0))
    a, c, other = world.session(region=1, lease=100.0), world.connection(), world.connection()
    world.store(a, "xy")
    world.pin(c, "xy")
    world.disconnect(c, world.now)
    assert world.unpin(other, "y") == [True]
    world.now += 29.0
    assert world.delete(a, "xy") == [HELD, DELETED]
    world.now += 1.0
    assert world.delete(a, "x") == [DELETED]


def test_a_pin_taken_twice_by_one_connection_takes_two_unpins_of_another():
    world = World()
    a, one, other = world.session(region=1), world.connection(), world.connection()
    world.store(a, "x")
    world.pin(one, "xx")
    assert world.unpin(other, "x") == [True]
    assert world.delete(a, "x") == [HELD]
    assert world.unpin(other, "xx") == [True, False]
    assert world.delete(a, "x") == [DELETED]


def test_what_has_no_pins_leaves_nothing_behind():
    world = World()
    a, reader, c = world.session(region=1), world.session(lease=1.0), world.connection()
    world.store(a, "xy")
    for by in (reader, c):
        world.pin(by, "xy")
        world.unpin(by, "yx")
        world.find(by, "xy", pin=True)
    world.end_session(reader, world.now)
    world.disconnect(c, world.now)
    world.expire(world.now + 50.0)
    assert world.statistics().pinned == 0
    assert not world.directory._guard._pins._of
    assert [region.pinned for region in world.directory._state.regions.values()] == [0]


# --- sessions, leases, connections --------------------------------------------------------------------------------


def test_a_session_is_found_by_its_token_while_it_lives():
    world = World()
    number = world.session()
    token = (1).to_bytes(16, "big")
    assert world.session_of(token) == number
    assert world.session_of(b"other") is None
    world.end_session(number, world.now)
    assert world.session_of(token) is None
    assert world.session() == number + 1


def test_sessions_end_in_the_order_of_their_leases():
    world = World(Limits(lease_grace=1.0))
    slow, quick, renewed = world.session(lease=5.0), world.session(lease=2.0), world.session(lease=1.0)
    assert world.next_expiry() == world.now + 2.0
    world.renew(renewed, world.now + 4.5)
    assert world.expire(world.now + 2.5) == []
    assert world.expire(world.now + 6.0) == [quick, slow]
    assert world.expire(world.now + 6.4) == []
    assert world.expire(world.now + 6.5) == [renewed]
    assert world.next_expiry() == math.inf


def test_silence_never_ends_a_published_session_and_its_last_connection_does():
    world = World(Limits(published_lease=5.0))
    one, other = world.connection("p", region=1), world.connection("p", region=2)
    assert world.statistics().sessions == 1
    world.store(one, "x")
    world.now += 1e6
    assert world.expire(world.now) == []
    world.disconnect(one, world.now)
    world.now += 1e6
    assert world.expire(world.now) == []
    world.disconnect(other, world.now)
    assert world.expire(world.now + 4.9) == []
    assert len(world.expire(world.now + 5.0)) == 1
    assert world.take_dropped() == [2]  # empty; the other one is an orphan
    assert world.regions() == [(1, 8 * PAGE)]
    assert (world.statistics().connections, world.statistics().sessions) == (0, 0)


def test_a_published_client_that_makes_its_socket_anew_keeps_its_session():
    world = World(Limits(published_lease=5.0))
    c = world.connection("p", region=1)
    world.store(c, "x")
    world.disconnect(c, world.now)
    world.now += 4.0
    c = world.connection()
    assert world.delete(c, "x") == [PROTECTED]  # who is that?
    assert world.store(c, "y", first=1) == [NEW]  # the owner: who else knows of that region
    assert world.delete(c, "x") == [DELETED]
    world.now += 1e6
    assert world.expire(world.now) == []
    assert world.statistics().sessions == 1


def test_a_published_client_that_comes_back_late_has_its_orphan_back():
    world = World(Limits(published_lease=5.0))
    c = world.connection("p", region=1)
    world.add_region(c, 2, PAGE, instance_id="p")
    world.store(c, "x")
    world.store(c, "y", region=2)
    world.disconnect(c, world.now)
    world.now += 5.0
    world.expire(world.now)
    c = world.connection()
    assert world.store(c, "z", first=1) == [NEW]
    assert world.statistics().abandoned == 1  # region 2 is known to nobody so far
    [session] = world.directory._state.sessions.values()
    assert list(session.policy._order) == ["x", "z"]
    assert session.used_bytes == 2 * PAGE
    assert world.make_room(8 * PAGE, world.now) == []
    assert world.make_room(PAGE, world.now) == [2]
    assert world.replayed().dump() == world.dump()


def test_a_namesake_does_not_inherit_what_it_does_not_know_of():
    world = World(Limits(published_lease=5.0))
    c = world.connection("p", region=1)
    world.store(c, "x")
    world.disconnect(c, world.now)
    world.connection("p", region=2)  # the process was started again, and asks for a region of its own
    world.expire(world.now + 5.0)
    assert world.make_room(PAGE, world.now + 5.0) == [1]


def test_one_connection_may_speak_for_two_instances():
    world = World()
    c = world.connection("p", region=1)
    world.add_region(c, 2, PAGE, instance_id="q")
    assert world.store(c, "xy", region=[1, 2], offsets=[0, 0]) == [NEW, NEW]
    world.disconnect(c, world.now)
    assert len(world.expire(world.now + 100.0)) == 2


# --- published owners and readers -----------------------------------------------------------------------------------


def test_keys_of_a_connected_published_owner_go_only_if_it_asks():
    world = World(Limits(instance_quotas={"published": 2 * PAGE}, high_watermark=0.0, low_watermark=0.0))
    a, c, other = world.session(region=1), world.connection(region=2), world.connection("other", region=3)
    owner = world.region(2)[1]
    world.store(c, "xy", region=2)
    assert world.delete(a, "x") == world.delete(other, "x") == world.delete(0, "x") == [PROTECTED]
    assert world.reclaim(owner, 2) == 0
    assert world.trim(owner, world.now) == 0
    assert world.store(c, "z", region=2, first=2) == [QUOTA]
    assert world.delete(c, "x") == [DELETED]
    assert world.store(c, "z", region=2, first=2) == [NEW]
    world.disconnect(c, world.now)
    assert world.delete(a, "y") == [PROTECTED]  # it may be back
    world.expire(world.now + 10.0)
    assert world.delete(a, "y") == [DELETED]


def test_a_page_that_its_published_owner_deleted_is_its_own_again_at_once():
    world = World()
    c = world.connection(region=1)
    world.store(c, "x")
    world.delete(c, "x")
    assert world.store(c, "y") == [NEW]


def test_what_a_published_reader_looked_up_is_not_evicted_for_the_read_grace():
    world = World(Limits(v1_read_grace=30.0))
    a, c = world.session(region=1, lease=1000.0), world.connection()
    world.store(a, "xyz")
    world.find(c, "xq")
    assert world.reclaim(a, 3) == 2
    assert world.there("xyz") == "x"
    world.now += 29.9
    assert world.reclaim(a, 3) == 0
    world.now += 30.1
    assert world.reclaim(a, 3) == 1


def test_finding_by_a_client_of_ours_holds_nothing():
    world = World()
    a = world.session(region=1)
    world.store(a, "x")
    world.find(a, "x")
    assert world.reclaim(a, 1) == 1


def test_a_key_that_a_published_reader_looked_up_may_still_be_deleted():
    world = World()
    a, c = world.session(region=1), world.connection()
    world.store(a, "x")
    world.find(c, "x")
    assert world.delete(a, "x") == [DELETED]


# --- regions ------------------------------------------------------------------------------------------------------


def test_only_its_owner_hands_back_a_region():
    world = World()
    a, b, c = world.session("i", region=1), world.session("i", region=2), world.connection("p", region=3)
    assert world.give_back_region(b, 1) is GivenBack.REFUSED
    assert world.give_back_region(a, 3) is GivenBack.REFUSED
    assert world.give_back_region(c, 1, instance_id="i") is GivenBack.REFUSED
    assert world.give_back_region(c, 3, instance_id="q") is GivenBack.REFUSED
    assert world.give_back_region(a, 9) is GivenBack.REFUSED
    assert world.give_back_region(a, 1) is GivenBack.FREED
    assert world.give_back_region(a, 1) is GivenBack.REFUSED
    assert world.give_back_region(world.connection(), 3, instance_id="p") is GivenBack.FREED
    assert world.take_dropped() == [1, 3]
    assert world.take_dropped() == []
    assert world.region_ids() == {2}


def test_a_returned_region_is_hidden_readable_and_goes_with_its_last_key():
    world = World()
    a = world.session(region=1)
    world.store(a, "xy")
    world.reclaim(a, 1)
    assert world.give_back_region(a, 1) is GivenBack.DEFERRED
    assert world.regions() == []
    assert world.region_ids() == {1}
    assert world.region(1) == (8 * PAGE, 0)
    assert world.find(a, "x")[0].region_id == 1
    assert world.reclaim(a, 1) == 0  # its page would be of no use
    assert world.take_dropped() == []
    assert world.delete(a, "x") == [DELETED]
    assert world.take_dropped() == [1]
    assert len(world.pending(a)) == 1  # of the time before
    assert world.replayed().dump() == world.dump()


def test_a_published_client_may_hand_back_what_has_become_an_orphan():
    world = World(Limits(published_lease=5.0))
    c = world.connection("p", region=1)
    world.store(c, "x")
    world.disconnect(c, world.now)
    world.expire(world.now + 5.0)
    c = world.connection()
    assert world.give_back_region(c, 1, instance_id="q") is GivenBack.REFUSED
    assert world.give_back_region(c, 1, instance_id="p") is GivenBack.DEFERRED
    assert world.give_back_region(c, 1, instance_id="p") is GivenBack.REFUSED
    assert world.regions() == []
    assert world.store(c, "y", first=1) == [FOREIGN]
    assert world.delete(c, "x") == [DELETED]
    assert world.take_dropped() == [1]
    assert world.region(1) is None
    assert world.replayed().dump() == world.dump()


def test_regions_of_an_ended_session_are_readable_orphans_and_the_empty_ones_go_at_once():
    world = World()
    a, reader = world.session("a", region=1), world.session("b")
    world.add_region(a, 2, PAGE)
    world.store(a, "xy")
    world.end_session(a, world.now)
    assert world.take_dropped() == [2]
    assert world.regions() == [(1, 8 * PAGE)]
    assert world.regions(exclude_instance_id="a") == []
    assert all(world.find(reader, "xy"))
    assert world.delete(reader, "x") == [DELETED]
    assert world.take_dropped() == []
    assert world.delete(reader, "y") == [DELETED]
    assert world.take_dropped() == [1]


def test_room_is_made_of_whole_orphans_the_longest_abandoned_first():
    world = World()
    numbers = [world.session(region=region, pages=region) for region in (1, 2, 3, 4)]
    for number, region, key in zip(numbers, (1, 2, 3, 4), "abcd", strict=True):
        world.store(number, key, region=region)
    for number in (numbers[2], numbers[0], numbers[3]):
        world.end_session(number, world.now)
    assert world.make_room(9 * PAGE, world.now) == []  # more than there is: nothing is given up for nothing
    assert world.there("abcd") == "abcd"
    assert world.make_room(PAGE, world.now) == [3]
    assert world.make_room(2 * PAGE, world.now) == [1, 4]
    assert world.there("abcd") == "b"
    assert world.take_dropped() == [3, 1, 4]
    assert world.make_room(0, world.now) == []
    assert world.statistics().dropped_with_region == 3


def test_an_orphan_that_a_published_reader_looked_into_stays_for_the_read_grace():
    world = World(Limits(v1_read_grace=30.0))
    a, c = world.session(region=1), world.connection()
    world.store(a, "xy")
    world.end_session(a, world.now)
    world.find(c, "x")
    assert world.make_room(1, world.now + 29.0) == []
    assert world.make_room(1, world.now + 30.0) == [1]


def test_a_region_that_is_lost_goes_with_its_pinned_keys():
    world = World()
    a, reader = world.session(region=1), world.session()
    world.store(a, "xy")
    world.pin(reader, "x")
    assert world.drop_region(1) == 2
    assert world.drop_region(1) == 0
    assert world.unpin(reader, "x") == [False]
    assert world.statistics().pinned == 0
    assert world.take_dropped() == [1]
    assert world.usage() == []
    world.add_region(a, 2, PAGE)
    assert world.store(a, "x", region=2) == [NEW]


def test_keys_whose_bytes_are_bad_can_be_dropped_whatever_protects_them():
    world = World()
    c, reader = world.connection(region=1), world.session(region=2)
    world.store(c, "x")
    world.store(reader, "y", region=2)
    world.pin(reader, "xy")
    assert world.forget(["x", "y", "x", "q"]) == 2
    assert world.there("xy") == ""
    assert world.unpin(reader, "xy") == [False, False]
    assert [page[1:3] for page in world.pending(reader)] == [(2, 0)]


# --- returns ------------------------------------------------------------------------------------------------------


def test_every_page_that_goes_comes_back_to_its_owner_under_a_number():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    world.store(a, "xyz", attempt=3)
    world.store(b, "w", region=2, attempt=8)
    assert world.delete(b, "yw") == [DELETED, DELETED]
    assert world.delete(a, "x") == [DELETED]
    assert world.reclaim(a, 5) == 1
    assert world.pending(a) == [(1, 1, PAGE, 3), (2, 1, 0, 3), (3, 1, 2 * PAGE, 3)]
    assert world.pending(b) == [(1, 2, 0, 8)]


def test_a_return_is_sent_once_and_again_on_demand_until_it_is_acknowledged():
    world = World(Limits(max_returns=2))
    a = world.session(region=1)
    world.store(a, "vwxyz")
    world.delete(a, "vwx")
    assert [page[0] for page in world.pending(a)] == [1, 2]
    assert [page[0] for page in world.pending(a)] == [3]
    assert world.pending(a) == []
    assert [page[0] for page in world.pending(a, resend=True)] == [1, 2]
    assert world.pending(a) == []
    world.acknowledge(a, 1)
    world.acknowledge(a, 0)
    assert [page[0] for page in world.pending(a, resend=True)] == [2, 3]
    world.delete(a, "y")
    assert [page[0] for page in world.pending(a)] == [4]
    world.acknowledge(a, 10**9)  # nobody gave that number: all there are
    assert world.pending(a, resend=True) == []
    world.delete(a, "z")
    assert [page[0] for page in world.pending(a)] == [5]


def test_a_page_on_the_way_back_is_not_registered_before_it_is_acknowledged():
    world = World()
    a = world.session(region=1)
    world.store(a, "xy")
    world.delete(a, "x")
    assert world.store(a, "z") == [BUSY]
    assert world.store(a, "qz", offsets=[5 * PAGE, 0]) == [NEW, BUSY]
    world.pending(a)
    assert world.store(a, "z") == [BUSY]
    world.acknowledge(a, 1)
    assert world.store(a, "z") == [NEW]


def test_returns_and_acknowledgements_survive_a_restart():
    world = World()
    a = world.session(region=1)
    world.store(a, "xyz")
    world.delete(a, "xyz")
    world.acknowledge(a, 1)
    image = world.dump()
    for again in (world.restarted(), World(directory=Directory.load(image, EASY))):
        again.attach(a, again.now)
        assert again.store(a, "uv") == [NEW, BUSY]
        assert [page[0] for page in again.pending(a)] == [2, 3]


# --- attempts -----------------------------------------------------------------------------------------------------


def test_resolve_says_what_an_attempt_holds_and_refuses_it_from_then_on():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    world.store(a, "xy", attempt=3)
    world.store(b, "q", region=2, attempt=3)
    assert world.resolve(a, 3, [1, 1, 1, 2, 9], [0, PAGE, 5 * PAGE, 0, 0]) == [1, 2, 0, 0, 0]
    assert world.resolve(a, 4, [1], [0]) == [0]
    assert world.fenced(a, 3) and world.fenced(a, 4) and not world.fenced(a, 5)
    before = world.dump()
    assert world.store(a, "z", first=5, attempt=4) is None  # it arrives after all
    assert world.dump() == before
    assert world.store(b, "z", region=2, first=5, attempt=4) == [NEW]  # attempts are each session's own
    world.delete(a, "x")
    assert world.resolve(a, 3, [1], [0]) != [0]  # on its way back: not to be used before it is there
    world.acknowledge(a, 1)
    assert world.resolve(a, 3, [1], [0]) == [0]


def test_fences_hold_after_a_restart():
    world = World()
    a = world.session(region=1)
    world.resolve(a, 4, [], [])
    image = world.dump()
    for again in (world.restarted(), World(directory=Directory.load(image, EASY))):
        assert again.store(a, "z", attempt=4) is None


def test_beyond_the_bound_all_attempts_below_the_lowest_fence_are_fenced():
    fences = Fences(3)
    for attempt in (10, 40, 20, 30):
        fences.add(attempt)
    assert [attempt for attempt in range(50) if attempt in fences] == [*range(1, 11), 20, 30, 40]
    fences.add(5)
    assert fences.attempts == {20, 30, 40}


# --- request ids --------------------------------------------------------------------------------------------------


def test_delete_and_reclaim_asked_again_answer_again_and_do_nothing():
    world = World(Limits(max_answers=3))
    a = world.session(region=1)
    world.store(a, "vwxyz")
    assert world.delete(a, "v", request_id=1) == [DELETED]
    assert world.reclaim(a, 1, request_id=1) == 1  # numbers of each kind are their own
    assert world.there("vwxyz") == "wxy"
    assert world.delete(a, "v", request_id=1) == [DELETED]
    assert world.reclaim(a, 1, request_id=1) == 1
    assert world.there("vwxyz") == "wxy"
    assert world.delete(a, "v") == [MISSING]
    assert world.delete(a, "w", request_id=2) == world.delete(a, "x", request_id=3) == [DELETED]
    assert world.delete(a, "v", request_id=1) == [MISSING]  # only so many are remembered


# --- quotas, watermarks -------------------------------------------------------------------------------------------


def test_an_instance_beyond_its_quota_gives_up_its_own_least_recently_used_keys():
    world = World(Limits(instance_quotas={"i": 3 * PAGE}))
    a, other = world.session("i", region=1), world.session("j", region=2)
    world.store(other, "o", region=2)
    world.store(a, "xyz")
    world.find(a, "z")
    world.take_records()
    assert world.store(a, "vw", first=3) == [NEW, NEW]
    assert world.there("oxyzvw") == "ozvw"
    assert [page[2] for page in world.pending(a)] == [PAGE, 0]
    assert [type(record) for record in world.take_records()] == [Deleted, Registered]


def test_what_does_not_fit_a_quota_is_refused_and_the_rest_is_registered():
    world = World(Limits(instance_quota_bytes=3 * PAGE))
    a = world.session(region=1)
    world.store(a, "xy")
    world.pin(a, "xy")
    assert world.store(a, "vxw", first=3, attempt=2) == [NEW, DUPLICATE, QUOTA]
    assert world.store(a, "vwq", first=3, length=[PAGE, 1, PAGE], attempt=3) == [DUPLICATE, QUOTA, QUOTA]
    world.unpin(a, "x")
    # What a batch names makes no room for it: x goes, v stays.
    assert world.store(a, "vwq", first=5, attempt=4) == [DUPLICATE, NEW, QUOTA]
    assert world.there("vwxyq") == "vwy"


def test_a_tenants_instances_share_its_quota_and_the_one_that_stores_gives_up_first():
    world = World(Limits(tenant_quotas={"t": 3 * PAGE}))
    a, b = world.session("a", "t", region=1), world.session("b", "t", region=2)
    none = world.session("c", "", region=3)
    world.store(a, "xy")
    world.store(b, "z", region=2)
    world.store(none, "n", region=3)
    assert world.store(b, "w", region=2, first=1) == [NEW]
    assert world.there("xyzwn") == "xywn"
    assert world.store(b, "vu", region=2, first=2, attempt=2) == [NEW, NEW]
    assert world.there("xywvun") == "xvun"  # w first, then one of a's


@pytest.mark.parametrize(("instance", "tenant"), [(2, 3), (3, 2)])
def test_of_two_quotas_the_tighter_one_counts(instance, tenant):
    world = World(Limits(instance_quotas={"a": instance * PAGE}, tenant_quotas={"t": tenant * PAGE}))
    a = world.session("a", "t", region=1)
    world.store(a, "x")
    world.pin(a, "x")
    assert world.store(a, "yz", first=1) == [NEW, QUOTA]


def test_orphans_are_on_nobodys_account_and_still_in_the_usage():
    world = World(Limits(instance_quotas={"i": PAGE}))
    a = world.session("i", region=1)
    world.store(a, "x")
    world.end_session(a, world.now)
    again = world.session("i", region=2)
    assert world.store(again, "y", region=2) == [NEW]
    assert world.there("xy") == "xy"
    [usage] = world.usage()
    assert (usage.instance_id, usage.regions, usage.allocated_bytes, usage.used_bytes) == ("i", 2, 16 * PAGE, 2 * PAGE)


def test_beyond_the_entries_there_may_be_the_owner_gives_up_its_own():
    world = World(Limits(max_entries=3))
    a, b = world.session(region=1), world.session(region=2)
    world.store(a, "xy")
    world.store(b, "z", region=2)
    assert world.store(b, "w", region=2, first=1) == [NEW]
    assert world.there("xyzw") == "xyw"
    assert world.store(b, "uv", region=2, first=2, attempt=2) == [NEW, QUOTA]
    assert world.store(a, "q", offsets=[PAGE]) == [NEW]  # over y: as many as before
    assert world.there("xyuq") == "xuq"


def test_above_the_high_watermark_keys_go_down_to_the_low_one():
    world = World(Limits(high_watermark=0.75, low_watermark=0.5))
    a = world.session(region=1)
    world.store(a, "abcdef")
    assert world.trim(a, world.now) == 0
    world.store(a, "g", first=6)
    assert world.trim(a, world.now) == 3
    assert world.there("abcdefg") == "abcg"
    assert world.trim(a, world.now) == 0
    assert world.statistics().evicted == 3


def test_a_long_search_in_vain_is_not_repeated_at_once():
    world = World()
    a = world.session(region=1, pages=10_100)
    keys = [str(number) for number in range(10_100)]
    world.store(a, keys)
    world.pin(a, keys)
    assert world.reclaim(a, 1) == 0
    world.unpin(a, keys)
    assert world.reclaim(a, 1) == 0
    world.now += 0.11
    assert world.reclaim(a, 1) == 1


# --- restart ------------------------------------------------------------------------------------------------------


def test_after_a_restart_nothing_goes_until_every_session_has_shaken_hands():
    world = World(Limits(instance_quotas={"a": PAGE}, high_watermark=0.0, low_watermark=0.0))
    a, b = world.session("a", region=1), world.session("b", lease=60.0)
    gone = world.session("gone", region=2)
    c = world.connection(region=3)
    world.store(a, "x")
    world.store(gone, "y", region=2)
    world.end_session(gone, world.now)
    world = world.restarted()
    c = world.connection()
    assert world.quiet(world.now)
    for back in (a, b, None):
        if back:
            world.attach(back, world.now)
        world.renew(a, world.now)
        assert world.delete(a, "x") == [PROTECTED]
        assert world.delete(a, "q") == [MISSING]
        assert world.reclaim(a, 1) == 0
        assert world.trim(a, world.now) == 0
        assert world.make_room(1, world.now) == []
        assert world.store(a, "z") == [PINNED]
        assert world.store(a, "z", first=1) == [QUOTA]
        assert world.quiet(world.now)
    world.store(c, "w", region=3)  # the published owner: that may have been sent before the restart
    assert world.quiet(world.now)
    world.now += 11.0  # what a published session has left, with the grace
    world.renew(a, world.now)
    assert not world.quiet(world.now)
    assert world.make_room(1, world.now) == [2]
    assert world.trim(a, world.now) == 1


def test_quiet_time_ends_with_the_longest_lease_and_the_grace():
    world = World(Limits(lease_grace=1.0, published_lease=3.0))
    a, b = world.session(region=1, lease=5.0), world.session(lease=20.0)
    world.connection(region=2)
    world.store(a, "xy")
    world.delete(a, "y")
    world = world.restarted()
    assert world.pending(a) == []
    world.now += 5.9
    assert world.expire(world.now) == [3]
    world.renew(a, world.now)
    assert world.quiet(world.now + 15.0)
    assert not world.quiet(world.now + 15.1)
    world.now += 15.1
    assert world.expire(world.now) == [a, b]
    world = world.restarted(Directory.load(world.dump()))
    assert not world.quiet(world.now)  # there is nobody to wait for


def test_a_message_of_an_old_session_does_not_end_the_quiet_time_and_its_handshake_does():
    world = World()
    a = world.session(region=1)
    world.store(a, "x")
    world = world.restarted()
    world.renew(a, world.now)
    world.find(a, "x")
    assert world.quiet(world.now)
    world.attach(a, world.now)
    assert not world.quiet(world.now)
    assert world.delete(a, "x") == [DELETED]


def test_a_session_that_closes_in_quiet_time_is_not_waited_for():
    world = World()
    a = world.session(region=1)
    world.store(a, "x")
    world = world.restarted()
    world.end_session(a, world.now)
    assert not world.quiet(world.now)


def test_the_quiet_time_wakes_nobody_for_published_sessions_that_never_come_back():
    world = World(Limits(lease_grace=1.0, published_lease=3.0))
    c = world.connection(region=1)
    world.store(c, "x")
    world = world.restarted()
    assert world.quiet(world.now + 3.9)
    assert world.expire(world.now + 4.0) == [1]
    assert not world.quiet(world.now + 4.0)
    assert world.make_room(1, world.now + 4.0) == [1]


@pytest.mark.parametrize("how", ["find", "pin"])
def test_what_a_published_client_was_reading_stays_for_its_grace_after_a_restart(how):
    """Whoever owns it may be back at once; the reader says nothing, and reads on."""
    world = World(Limits(v1_read_grace=30.0, high_watermark=0.0, low_watermark=0.0))
    a = world.session(region=1)
    world.store(a, "xy")
    getattr(world, how)(world.connection(), "x")
    for again in (world.restarted(Directory.load(world.dump(), world.limits)), world.restarted()):
        again.attach(a, again.now)
        assert again.reclaim(a, 1) == 0
        assert again.trim(a, again.now) == 0
        assert again.delete(a, "x") == [PROTECTED]
        assert again.make_room(1, again.now) == []
        assert again.quiet(again.now + 29.9)
        again.now += 30.0
        assert not again.quiet(again.now)
        assert again.delete(a, "x") == [DELETED]


def test_a_pool_that_no_published_client_has_read_is_quiet_no_longer_than_its_own_clients_need():
    world = World(Limits(v1_read_grace=30.0))
    a = world.session(region=1)
    world.store(a, "xy")
    world.find(world.connection(), "q")  # it found nothing, so it reads nothing
    world.find(a, "x")
    world = world.restarted()
    world.attach(a, world.now)
    assert not world.quiet(world.now)


def test_that_a_pool_was_read_by_published_clients_is_written_down_once():
    world = World()
    a = world.session(region=1)
    world.store(a, "xy")
    world.take_records()
    reader = world.connection()
    for _ in range(3):
        world.find(reader, "x")
        world.pin(reader, "y")
    assert world.take_records() == [ReadUnpinned()]


# --- records, image -----------------------------------------------------------------------------------------------


def test_what_happens_is_recorded_in_order_and_what_is_refused_leaves_no_record():
    world = World(Limits(published_lease=5.0, instance_quotas={"i": PAGE}))
    a = world.session("i", "t", region=1)
    world.store(a, "x", attempt=2)
    world.store(a, "y", first=1, attempt=3)
    world.pin(a, "y")
    world.store(a, "yz", first=2, attempt=4)
    world.delete(a, "yq")
    world.unpin(a, "y")
    world.acknowledge(a, 1)
    world.acknowledge(a, 1)
    world.resolve(a, 9, [], [])
    world.resolve(a, 9, [], [])
    world.give_back_region(a, 1)
    world.give_back_region(a, 1)
    world.make_room(1, world.now)
    world.end_session(a, world.now)
    c = world.connection("p", region=2)
    world.store(c, "v", region=2)
    token = (1).to_bytes(16, "big")
    records = world.take_records()
    assert [msgspec.structs.replace(one, payload=b"") if isinstance(one, Registered) else one for one in records] == [
        SessionOpened(1, token, "i", "t", False, 10.0),
        RegionAdded(1, 8 * PAGE, 1, "i"),
        Registered(1, 0x40, b"", 1, []),
        Deleted(["x"]),
        Registered(1, 0x40, b"", 2, []),
        Acknowledged(1, 1),
        Fenced(1, 9),
        RegionReturned(1),
        RegionDropped(1),
        SessionEnded(1),
        SessionOpened(2, b"", "p", "", True, 5.0),
        RegionAdded(2, 8 * PAGE, 2, "p"),
        Registered(2, 0x40, b"", 3, []),
    ]
    assert world.records == []


def test_a_record_names_what_was_skipped():
    world = World()
    a = world.session(region=1)
    world.store(a, "b")
    world.take_records()
    assert world.store(a, "abcad", first=3) == [NEW, DUPLICATE, NEW, DUPLICATE, NEW]
    [record] = world.take_records()
    assert (record.first_generation, record.skipped) == (2, [1, 3])


def test_replay_drops_what_follows_without_a_record_of_its_own():
    world = World()
    a, b = world.session(region=1), world.session(region=2)
    world.store(b, "x", region=2)
    world.give_back_region(b, 2)
    world.end_session(a, world.now)
    world.delete(b, "x")
    assert world.region_ids() == set()
    replayed = world.replayed()
    assert replayed.region_ids() == set()
    replayed.restart(0.0)
    assert replayed.take_dropped() == []  # what the pool has beyond `region_ids` is stale anyway


def test_an_image_holds_all_but_pins_and_the_order_of_use():
    world = World()
    a, b = world.session("a", "t", region=1), world.session("b", region=2)
    world.add_region(a, 3, 8 * PAGE)
    c = world.connection(region=4)
    world.store(a, "uvw", region=[3, 1, 3], offsets=[0, 0, PAGE], length=[1, 2, 3])
    world.store(b, "xy", region=2)
    world.store(c, "z", region=4)
    world.delete(a, "v")
    world.resolve(a, 5, [], [])
    world.end_session(b, world.now)
    image = world.dump()
    body = msgspec.msgpack.encode(image)
    loaded = Directory.load(msgspec.msgpack.decode(body, type=DirectoryImage), EASY)
    assert loaded.dump() == image == world.replayed().dump()
    assert loaded.find(0, list("uwxyz"), 0.0) == world.find(0, "uwxyz")
    assert loaded.statistics().used_bytes == world.statistics().used_bytes
    assert loaded.usage() == world.usage()


def test_what_happens_after_loading_is_what_would_have_happened_without():
    world = World(Limits(published_lease=5.0))
    c = world.connection("p", region=1)
    world.connection("q", region=2)
    world.store(c, "x")
    world.end_session(world.session(), world.now)
    world.disconnect(c, world.now)
    world.expire(world.now + 5.0)
    loaded = World(directory=Directory.load(world.dump(), world.limits))
    for one in (world, loaded):
        one.tokens = iter([50])
        assert one.store(one.connection(), "y", first=1) == [NEW]
        assert one.session() == 5
    assert loaded.dump() == world.dump()


def test_keys_of_several_regions_are_loaded_as_used_in_the_order_of_their_registration():
    world = World()
    a = world.session(region=1)
    world.add_region(a, 2, 8 * PAGE)
    for at, key in enumerate("abcd"):
        world.store(a, key, region=2 - at % 2, first=at)
    loaded = World(directory=Directory.load(world.dump(), EASY))
    loaded.reclaim(a, 2)
    assert loaded.there("abcd") == "cd"


@pytest.mark.parametrize("damage", ["regions", "sessions", "keys", "generations"])
def test_an_image_that_does_not_hold_together_is_refused(damage):
    world = World()
    world.store(world.session(region=1), "xy")
    image = world.dump()
    getattr(image, damage).clear()
    with pytest.raises((KeyError, ValueError)):
        Directory.load(image)


# --- five hundred thousand keys -----------------------------------------------------------------------------------


def calls_in(what):
    """How many calls, of Python and of C, this takes: the same on every machine, unlike its time."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return calls


def test_the_cost_of_a_request_does_not_grow_with_the_keys_there_are():
    world = World(Limits(instance_quotas={"i": 500_032 * PAGE}))
    a, c = world.session("i", region=1, pages=600_000), world.connection()
    world.directory._changes.read_unpinned()  # once in the life of a pool
    costs = []
    for stored in range(0, 500_032, 64):
        keys = [f"key {number}" for number in range(stored, stored + 64)]
        columns = Columns(1, keys, [number * PAGE for number in range(stored, stored + 64)], PAGE, None, stored + 1)
        if stored not in (64 * 10, 64 * 7000):
            world.register(a, columns, world.now)
        else:
            registering = calls_in(lambda columns=columns: world.register(a, columns, world.now))
            old = [f"key {number}" for number in range(64, 128)]
            costs.append(
                [
                    registering,
                    calls_in(lambda old=old: world.find(a, old)),
                    calls_in(lambda old=old: world.find(c, old)),
                    calls_in(lambda old=old: world.pin(a, old)),
                    calls_in(lambda old=old: world.unpin(a, old)),
                    calls_in(lambda keys=keys: world.delete(a, keys[:2])),
                    calls_in(lambda: world.reclaim(a, 2)),
                    calls_in(lambda: world.acknowledge(a, 10**9)),
                    calls_in(lambda: world.trim(a, world.now)),
                    calls_in(lambda: world.expire(world.now)),
                    calls_in(world.statistics),
                    calls_in(world.usage),
                ]
            )
        world.take_records()
    assert costs[0] == costs[1]
    statistics = world.statistics()
    assert statistics.entries == 500_032 - 8
    assert statistics.used_bytes == statistics.entries * PAGE
    assert statistics.registered == 500_032
    more = Columns(1, [f"more {n}" for n in range(64)], [(500_100 + n) * PAGE for n in range(64)], PAGE, None, 10**9)
    assert world.register(a, more, world.now + 100.0).statuses == [NEW] * 64  # 56 go for it
    assert world.statistics().entries == 500_032


# --- the small things in it ---------------------------------------------------------------------------------------

times = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(st.sampled_from(["set", "discard", "due"]), st.integers(0, 4), times), max_size=40))
def test_leases_agree_with_a_dict(steps):
    leases, model = Leases(), {}
    for what, number, time in steps:
        if what == "set":
            leases.set(number, time)
            model[number] = time
        elif what == "discard":
            leases.discard(number)
            model.pop(number, None)
        else:
            ended = sorted((until, number) for number, until in model.items() if until <= time)
            assert leases.due(time) == [number for _, number in ended]
            model = {number: until for number, until in model.items() if until > time}
        assert leases.next() <= min(model.values(), default=math.inf)
        assert [leases.until(number) for number in range(5)] == [model.get(number, math.inf) for number in range(5)]
        assert len(leases) == len(model)


def test_leases_that_are_put_off_do_not_pile_up():
    leases = Leases()
    for number in range(10):
        for time in range(1000):
            leases.set(number, 10.0 + time)
    assert len(leases._heap) == 10
    assert leases.due(500.0) == []
    assert len(leases._heap) == 10


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from([0.1, 1.0, 4.0, 5.0, 9.0, 30.0])), max_size=30)
)
def test_what_is_noted_is_kept_for_one_to_two_times_the_grace(steps):
    grace, now, noted = ReadGrace(5.0), 0.0, {}
    for note, key, later in steps:
        now += later
        if note:
            grace.note([str(key)], now)
            noted[key] = now
        else:
            grace.forget_before(now)
        for key, when in noted.items():
            if now - when < 5.0:
                assert str(key) in grace
            if now - when >= 10.0:
                assert str(key) not in grace


def test_without_a_grace_nothing_is_noted():
    grace = ReadGrace(0.0)
    grace.note(["x"], 1.0)
    assert "x" not in grace


def test_returns_are_numbered_on_whatever_was_acknowledged():
    outbox = Outbox(7, [(1, 0, 3), (1, 16, 4)])
    assert outbox.pending(False, 10).first_number == 8
    assert outbox.pending(False, 10) is None
    assert outbox.acknowledge(8) == [(1, 0, 3)]
    assert outbox.acknowledge(3) == []
    assert len(outbox) == 1
    assert outbox.pending(True, 10).attempts == [4]


def test_pins_are_known_by_holder():
    pins = Pins()
    assert list(pins.add(1, ["x", "y"])) == ["x", "y"]
    assert list(pins.add(2, ["x"])) == []
    assert pins.has(2) and not pins.has(3)
    assert list(pins.add(2, [])) == []
    pins.forget(["x", "z"])
    assert not pins.has(2)
    assert pins.counts == {"y": 1}
    assert pins.drop_all(1) == ["y"]
    assert pins.drop_all(1) == []
    pins.add(1, ["x", "x"])
    pins.add(2, ["x", "x"])
    assert pins.drop_all(1) == []
    assert pins.drop(2, ["x"]) == ([True], [])
    assert pins.drop(2, ["x"]) == ([True], ["x"])


# --- pin epochs -----------------------------------------------------------------------------------------------------


def test_what_was_pinned_in_earlier_epochs_goes_unless_it_is_named():
    world = World()
    a, reader, other = world.session(region=1), world.session(), world.session()
    world.store(a, "wxyz")
    world.pin(reader, "wxxy")
    world.pin(other, "y")
    assert world.enter_pin_epoch(reader, 3)
    world.pin(reader, "xz")
    assert world.settle_pins(reader, ["x"], [1], last=False) == 0
    assert world.statistics().pinned == 4  # nothing goes before the last part
    assert world.settle_pins(reader, ["a", "z", "x"], [1, 5, 0], last=True) == 3
    assert world.unpin(reader, "xxxwz") == [True, True, False, False, True]
    assert world.delete(a, "wxyz") == [DELETED, DELETED, HELD, DELETED]
    assert world.unpin(other, "y") == [True]


def test_nothing_is_done_in_an_epoch_that_is_over():
    world = World()
    reader = world.session(region=1)
    assert world.enter_pin_epoch(reader, 0)
    assert world.enter_pin_epoch(reader, 5)
    assert not world.enter_pin_epoch(reader, 4)
    assert not world.enter_pin_epoch(reader, 0)
    assert world.enter_pin_epoch(reader, 5)
    with pytest.raises(KeyError):
        world.enter_pin_epoch(99, 1)
    with pytest.raises(KeyError):
        world.settle_pins(99, [], [], last=True)


def test_a_pin_less_is_one_of_the_latest_epoch_first():
    world = World()
    reader = world.session(region=1)
    world.store(reader, "x")
    world.pin(reader, "x")
    world.enter_pin_epoch(reader, 1)
    world.pin(reader, "x")
    assert world.unpin(reader, "x") == [True]
    assert world.settle_pins(reader, [], [], last=True) == 1
    assert world.unpin(reader, "x") == [False]


def test_pin_epochs_leave_nothing_behind():
    world = World()
    a = world.session(region=1)
    world.store(a, "xy")
    readers = [world.session(lease=1.0) for _ in range(3)]
    for reader, keys in zip(readers, ["xy", "x", ""], strict=True):
        world.pin(reader, keys)
        world.enter_pin_epoch(reader, 7)
    world.settle_pins(readers[0], ["y"], [1], last=True)
    pins = world.directory._guard._pins
    assert pins.has(readers[1])
    assert not pins.has(readers[2])
    for reader in readers:
        world.end_session(reader, world.now)
    world.expire(world.now + 5.0)
    assert (pins.counts, pins._of, pins._earlier, pins._epochs) == ({}, {}, {}, {})
    assert [region.pinned for region in world.directory._state.regions.values()] == [0]


def test_pins_of_a_key_that_is_forgotten_are_of_no_epoch():
    world = World()
    reader = world.session(region=1)
    world.store(reader, "xy")
    world.pin(reader, "xy")
    world.enter_pin_epoch(reader, 1)
    world.pin(reader, "x")
    world.directory.forget(["x"])
    assert world.settle_pins(reader, ["x"], [2], last=True) == 1
    assert world.statistics().pinned == 0
    world.directory.forget(["y"])
    assert world.directory._guard._pins._earlier == {}


@pytest.mark.parametrize("first", [1, 3000])
def test_an_epoch_with_many_pins_begins_without_a_pass_over_them(first):
    pins = Pins()
    pins.add(1, [f"first{at}" for at in range(first)])
    pins.enter_pin_epoch(1, 1)
    pins.add(1, [f"k{at}" for at in range(20_000)])
    tracemalloc.start()
    pins.enter_pin_epoch(1, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096
    assert pins.entries == pins.entries_of(1) == first + 20_000


def test_pins_of_many_earlier_epochs_are_in_few_parts(monkeypatch):
    monkeypatch.setattr("maru._directory.pins.FORGOTTEN_AT_ONCE", 4)
    pins, most = Pins(), 0
    for epoch in range(1, 200):
        keys = [f"{epoch} {at}" for at in range(9)]
        pins.add(1, keys)
        pins.enter_pin_epoch(1, epoch)
        if epoch > 2:
            pins.drop(1, [f"{epoch - 2} {at}" for at in range(8)])  # one of each epoch stays
        most = max(most, len(pins._earlier[1]))
    assert pins.entries == len(pins.counts) == 197 + 18
    assert most <= 1 + pins.entries // 4


@pytest.mark.parametrize("seed", range(40))
def test_earlier_epochs_count_as_one_whatever_their_parts(monkeypatch, seed):
    monkeypatch.setattr("maru._directory.pins.FORGOTTEN_AT_ONCE", 1)
    dice, pins, epoch = random.Random(seed), Pins(), 0
    own, earlier, other = Counter(), Counter(), Counter()
    for _ in range(200):
        keys = dice.choices("abcdefgh", k=dice.randrange(6))
        match dice.randrange(8):
            case 0 | 1:
                pins.add(1, keys)
                own.update(keys)
            case 2:
                pins.add(2, keys)
                other.update(keys)
            case 3:
                answers = []
                for key in keys:
                    there = own if own[key] else earlier
                    answers.append(there[key] > 0)
                    there[key] -= there[key] > 0
                assert pins.drop(1, keys)[0] == answers
            case 4:
                epoch += 1
                pins.enter_pin_epoch(1, epoch)
                earlier, own = earlier + own, Counter()
            case 5:
                named = dict.fromkeys(keys, dice.randrange(4))
                pins.reconcile(1, named.keys(), named.values())
                kept = earlier & Counter(named)
                own, earlier = own + kept, earlier - kept
            case 6 if dice.random() < 0.3:
                assert pins.drop_earlier(1)[0] == earlier.total()
                earlier = Counter()
            case 7:
                pins.forget(dict.fromkeys(keys[:1]))
                for counter in (own, earlier, other):
                    del counter[keys[0] if keys else ""]
        while pins.is_leaving:
            pins.let_go_some()
        assert pins.counts == dict(+(own + earlier + other))
        assert pins.entries == pins.entries_of(1) + pins.entries_of(2)
        assert pins.has(1) == bool((own + earlier).total())
        assert all(map(all, pins._earlier.values()))
    pins.drop_all(1)
    while pins.is_leaving:
        pins.let_go_some()
    assert pins.counts == dict(+other) and not pins._earlier


# --- what pins take -----------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "drop", "drop_all", "epoch", "reconcile", "drop_earlier", "forget"]),
            st.sampled_from([1, 2, -1, -2]),
            st.lists(st.sampled_from("abcd"), max_size=4),
        ),
        max_size=30,
    )
)
def test_kept_pins_are_counted(calls):
    pins, epoch = Pins(), 0
    for name, holder, keys in calls:
        match name:
            case "add" | "drop":
                getattr(pins, name)(holder, keys)
            case "drop_all" | "drop_earlier":
                getattr(pins, name)(holder)
            case "epoch":
                epoch += 1
                pins.enter_pin_epoch(abs(holder), epoch)
            case "reconcile":
                pins.reconcile(abs(holder), keys, [1] * len(keys))
            case _:
                pins.forget(dict.fromkeys(keys))
        assert pins.entries == sum(pins.entries_of(holder) for holder in (1, 2, -1, -2))
        assert {key: set(holders) for key, holders in pins._shared.items()} == {
            key: {holder for holder in (-1, -2) if key in pins._of.get(holder, ())}
            for key in {key for holder in (-1, -2) for key in pins._of.get(holder, ())}
        }


def test_another_ones_pin_is_found_without_a_search():
    """Each look at a holder would be counted."""
    pins, looked = Pins(), []

    class Looked(dict):
        def __contains__(self, key):
            looked.append(key)
            return super().__contains__(key)

    for holder in range(-900, 0):
        pins.add(holder, [f"of {holder}"])
        pins._of[holder] = Looked(pins._of[holder])
    pins.add(1, [f"k{at}" for at in range(100)])
    assert pins.drop(-1, [f"k{at}" for at in range(100)])[0] == [False] * 100
    assert pins.drop(-1, [f"of {holder}" for holder in range(-900, -800)])[0] == [True] * 100
    assert len(looked) <= 200


def test_remembered_answers_have_a_bound_of_bytes():
    directory = Directory(Limits(max_answer_bytes=2_000))
    session = directory.open_session(b"token", "i", "", 10.0, 0.0)
    keys = [f"missing{at}" for at in range(600)]
    for asked in range(1, 9):
        directory.delete(session, keys[: 100 * asked], 0.0, request_id=asked)
    answers = directory._state.sessions[session].answers
    assert sum(map(len, answers.values())) <= 2_000
    assert directory.delete(session, keys, 0.0, request_id=8) == [DropAnswer.MISSING.value] * 600


def test_an_account_with_a_quota_has_half_of_the_entries():
    directory = Directory(Limits(max_entries=8, tenant_quotas={"bad": 1 << 20}))
    bad, other = (directory.open_session(name, name.decode(), name.decode(), 10.0, 0.0) for name in (b"bad", b"other"))
    for by, region in ((bad, 1), (other, 2)):
        directory.add_region(by, region, 1 << 20)
    for at in range(8):
        answer = directory.register(bad, Columns(1, [f"b{at}"], [at], 1, None, 0, None), 0.0)
        assert answer.statuses == [StoreStatus.NEW]
    assert directory.exists([f"b{at}" for at in range(8)]) == [False] * 4 + [True] * 4
    answer = directory.register(other, Columns(2, [f"o{at}" for at in range(4)], list(range(4)), 1, None, 0, None), 0.0)
    assert answer.statuses == [StoreStatus.NEW] * 4
    directory.pin(bad, [f"b{at}" for at in range(4, 8)])
    answer = directory.register(bad, Columns(1, ["b8"], [8], 1, None, 0, None), 0.0)
    assert answer.statuses == [StoreStatus.QUOTA]


# --- an image in slices -------------------------------------------------------------------------------------------


def test_an_image_in_slices_is_of_the_time_at_which_it_began(monkeypatch):
    monkeypatch.setattr("maru._directory.image.LOOKS_AT_ONCE", 4)
    directory = Directory()
    one, two = (directory.open_session(name, name.decode(), "", 10.0, 0.0) for name in (b"one", b"two"))
    for by, region in ((one, 1), (two, 2)):
        directory.add_region(by, region, 1 << 20)
        directory.register(by, Columns(region, [f"{region}.{at}" for at in range(10)], list(range(10)), 1), 0.0)
    directory.delete(one, ["1.3"], 0.0)
    before = directory.dump()
    happens = [
        lambda: directory.delete(one, ["1.0", "2.9"], 0.0),
        lambda: directory.register(one, Columns(1, ["1.0", "new"], [30, 31], 1), 0.0, later=True),
        lambda: directory.register(two, Columns(2, ["over"], [5], 1), 0.0),  # where 2.5 lies
        lambda: (directory.end_session(two, 0.0), directory.drop_region(2)),
    ]
    slices = directory.dumping()
    next(slices)
    for change in happens:
        change()
        try:
            slices.send(0.0)
        except StopIteration as end:
            make = end.value
    assert make() == before
    assert directory.dump() != before
    assert make() == before


def test_keys_are_listed_in_pieces_those_of_a_region_in_its_turn():
    directory = Directory()
    by = directory.open_session(b"one", "", "", 10.0, 0.0)
    for region in (1, 2, 3, 4):
        directory.add_region(by, region, 1 << 20)
    for region in (1, 2, 4):
        directory.register(by, Columns(region, [f"{region}.{at}" for at in range(5)], list(range(5)), 1), 0.0)
    pieces = directory.keys_in_pieces(4)
    listed = [next(pieces)]
    directory.delete(by, ["1.4", "2.0"], 0.0)
    directory.register(by, Columns(4, ["4.5"], [5], 1), 0.0)
    listed += pieces
    assert [len(piece) for piece in listed] == [4, 4, 4, 3]
    assert [key for piece in listed for key in piece] == [
        *(f"1.{at}" for at in range(5)),
        *(f"2.{at}" for at in range(1, 5)),
        *(f"4.{at}" for at in range(6)),
    ]
    assert list(Directory().keys_in_pieces(4)) == []


def test_an_image_that_is_given_up_leaves_nothing(monkeypatch):
    monkeypatch.setattr("maru._directory.image.LOOKS_AT_ONCE", 1)
    directory = Directory()
    by = directory.open_session(b"one", "", "", 10.0, 0.0)
    directory.add_region(by, 1, 1 << 20)
    directory.register(by, Columns(1, ["a", "b"], [0, 1], 1), 0.0)
    slices = directory.dumping()
    next(slices)
    slices.close()
    assert directory.dump() == directory.dump()


@pytest.mark.parametrize("count", [0, 15, 16, 17, 33])
def test_an_image_is_encoded_in_parts_as_at_once(count, monkeypatch):
    monkeypatch.setattr("maru._directory.image._ENCODED_AT_ONCE", 16)
    directory = Directory()
    by = directory.open_session(b"one", "", "", 10.0, 0.0)
    directory.add_region(by, 1, 1 << 20)
    directory.register(by, Columns(1, [f"k{at}" for at in range(count)], list(range(count)), 1), 0.0)
    image = directory.dump()
    assert msgspec.msgpack.decode(encode_image(image), type=DirectoryImage) == image
