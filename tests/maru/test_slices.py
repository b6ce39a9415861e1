"""Work in slices: each is bounded, and wherever the journal is cut behind one, a restart finds a right directory."""

from __future__ import annotations

import contextlib
import itertools
import time
import tracemalloc

import pytest

from maru._directory import Directory, Limits
from maru._directory.slices import AT_ONCE, FORGOTTEN_AT_ONCE, LOOKS_AT_ONCE, USES_AT_ONCE, Slices
from maru._wire import (
    AllocRequest,
    BeatRequest,
    CloseRequest,
    Code,
    HandshakeRequest,
    KeysRequest,
    ReclaimRequest,
    ResolveRequest,
    StoreRequest,
    body_of,
    decode_reply,
    read_header,
    request,
)
from maru.transport import ChannelConnection
from tests.maru.test_directory import BUSY, NEW, PAGE, World, columns_of, decode, encode
from tests.maru.test_directory_boards import Shared
from tests.support.maru_processes import PATIENCE, Server, temporary_pool

MANY = 4 * AT_ONCE + 7
NAMES = [f"k{at}" for at in range(MANY)]


def in_slices(world: World, slices: Slices, copy: Directory | None = None):
    """What came of it, and the records of each slice, each of which brings a copy to the same state."""
    records, now = [], None
    while True:
        try:
            slices.send(now)
            result, more = None, True
        except StopIteration as end:
            result, more = end.value, False
        records.append(world.directory.take_records())
        if copy is not None:
            for record in records[-1]:
                copy.apply(decode(encode(record)), columns_of)
            assert copy.dump() == world.directory.dump()
        if not more:
            return result, records
        now = world.now


def keys_in(records) -> list[int]:
    return [sum([len(getattr(record, "keys", ())) for record in some]) for some in records]


def stocked(**options):
    """A session with many keys in region 1; and a directory in the same state."""
    world = World(**options)
    a = world.session(region=1, pages=MANY)
    world.store(a, NAMES)
    copy = Directory(world.limits)
    for record in world.directory.take_records():
        copy.apply(decode(encode(record)), columns_of)
    return world, a, copy


def test_a_reclaim_goes_in_slices_with_their_records():
    world, a, copy = stocked()
    dropped, records = in_slices(world, world.reclaiming(a, MANY - 1, world.now), copy)
    assert dropped == MANY - 1 and world.there([NAMES[0]]) == NAMES[0]  # of a batch the head goes last
    assert max(keys_in(records)) == AT_ONCE and sum(keys_in(records)) == MANY - 1


def test_a_reclaim_passes_held_keys_in_slices():
    from maru._directory.lazy_order import LazyOrder

    world = World(eviction=LazyOrder().policy)
    names = [f"k{at}" for at in range(3 * LOOKS_AT_ONCE + 5)]
    a = world.session(region=1, pages=len(names))
    world.store(a, names)
    world.pin(a, names[:-2])
    looks = []
    guard = world.directory._guard
    held = guard.held
    guard.held = lambda *args: looks.append(held(*args)) or looks[-1]
    dropped, records = in_slices(world, world.reclaiming(a, 10, world.now))
    assert dropped == 2 and len(records) >= 3
    assert max(one.passed for one in looks) <= LOOKS_AT_ONCE + 10


def test_a_trim_goes_in_slices_with_their_records():
    world, a, copy = stocked(limits=Limits(high_watermark=0.9, low_watermark=0.1))
    went, records = in_slices(world, world.trimming(a, world.now), copy)
    assert went == len(NAMES) - int(0.1 * MANY * PAGE) // PAGE
    assert max(keys_in(records)) == AT_ONCE


def test_an_abandoned_region_goes_in_slices_with_their_records():
    world, a, copy = stocked()
    world.directory.end_session(a, world.now)
    for record in world.directory.take_records():
        copy.apply(record, columns_of)
    dropped, records = in_slices(world, world.making_room(MANY * PAGE, world.now), copy)
    assert dropped == [1] and world.take_dropped() == [1] and not len(world.directory)
    assert max(keys_in(records)) == AT_ONCE and world.statistics().dropped_with_region == MANY


@pytest.mark.parametrize("what", ["pin", "read", "own again"])
def test_a_region_that_is_read_between_slices_stays(what):
    world = World()
    theirs = world.connection("p", region=1, pages=MANY)
    world.store(theirs, NAMES)
    world.directory.disconnect(theirs, world.now)
    world.now += 100.0
    world.directory.expire(world.now)
    slices = world.making_room(MANY * PAGE, world.now)
    next(slices)
    left = NAMES[-1]
    if what == "pin":
        world.pin(world.session(), [left])
    elif what == "read":
        world.find(world.connection(), [left])
    else:
        again = world.connection()
        world.store(again, ["new"], offsets=[0])
    dropped, _ = in_slices(world, slices_after(slices, world))
    assert dropped == [] and world.there([left]) == left and 1 in world.region_ids()


def slices_after(slices: Slices, world: World) -> Slices:
    """What is left of slices that were begun."""
    now = world.now
    while True:
        try:
            slices.send(now)
        except StopIteration as end:
            return end.value
        now = yield


def test_a_session_that_ends_between_slices_ends_its_reclaim():
    world, a, _ = stocked()
    slices = world.reclaiming(a, MANY, world.now)
    next(slices)
    world.directory.end_session(a, world.now)
    with pytest.raises(StopIteration) as end:
        slices.send(world.now)
    assert end.value.value == AT_ONCE and len(world.directory) == MANY - AT_ONCE


def test_a_second_reclaim_of_a_session_evicts_nothing():
    world, a, _ = stocked()
    slices = world.reclaiming(a, MANY, world.now, request_id=1)
    next(slices)
    assert world.reclaim(a, MANY, request_id=1) == 0 and world.reclaim(a, MANY, request_id=2) == 0
    assert in_slices(world, slices_after(slices, world))[0] == MANY
    assert world.reclaim(a, MANY, request_id=1) == MANY


def test_room_that_cannot_be_made_claims_no_key():
    world, a, _ = stocked()
    index = Shared(world)
    world.directory.end_session(a, world.now)
    claimed = []
    index.boards.claim = lambda names, generations: claimed.append(names) or set()
    assert world.make_room(MANY * PAGE + 1, world.now) == []
    assert not claimed and len(world.directory) == MANY


def test_a_region_with_a_held_key_keeps_all_keys():
    world, a, _ = stocked()
    index, b = Shared(world, keys=2 * MANY), world.session()
    index.hold(b, [NAMES[-1]])
    world.directory.end_session(a, world.now)
    assert world.make_room(MANY * PAGE, world.now) == [] and len(world.directory) == MANY
    assert index.marked() == []


def test_a_resolve_never_searches_the_returns():
    world, a, _ = stocked()
    world.delete(world.session(), NAMES)
    outbox = world.directory._state.sessions[a].outbox

    class Pages:
        """Returns that are not searched."""

        def __len__(self):
            return MANY

    outbox.pages = Pages()
    offsets = [at * PAGE for at in range(MANY)]
    assert set(world.resolve(a, 1, [1] * MANY, offsets)) == {world.directory._state.generation}
    assert set(world.resolve(a, 2, [1] * MANY, offsets)) == {0}


def test_returns_that_nobody_acknowledges_are_bounded():
    """The session that acknowledges nothing stores nothing more; no page is lost, and others store on."""
    limits = Limits(max_unacknowledged=24, max_returns=8)
    world = World(limits=limits)
    a, b = world.session(region=1, pages=1000), world.session(region=2)
    stored = most = 0
    returned = []
    for turn in range(40):
        keys = [f"{turn}/{at}" for at in range(10)]
        statuses = world.store(a, keys, first=10 * turn, attempt=turn)
        assert len(set(statuses)) == 1
        stored += statuses.count(NEW)
        returned += world.pending(a)
        world.delete(b, keys)
        most = max(most, len(world.directory._state.sessions[a].outbox))
    assert statuses == [BUSY] * 10 and stored < 60 and most <= 60
    assert world.store(b, "x", region=2) == [NEW]
    while len(returned) < stored:  # what it acknowledges is followed by the rest
        world.acknowledge(a, returned[-1][0])
        returned += world.pending(a)
    assert [(number, offset // PAGE) for number, _, offset, _ in returned] == [(at + 1, at) for at in range(stored)]
    assert world.store(a, "y", first=999, attempt=99) == [NEW]


def test_an_acknowledgement_is_taken_in_bounded_parts():
    world = World(limits=Limits(max_unacknowledged=24, max_returns=8))
    a = world.session(region=1, pages=100)
    world.store(a, [f"k{at}" for at in range(100)])
    world.delete(a, [f"k{at}" for at in range(100)])
    outbox = world.directory._state.sessions[a].outbox
    for left in (76, 52, 28, 4, 0):
        world.acknowledge(a, 1 << 40)
        assert len(outbox) == left


# --- what is left for later -----------------------------------------------------------------------------------------

LARGE = 2 * FORGOTTEN_AT_ONCE + 5
LARGE_NAMES = [f"k{at}" for at in range(LARGE)]


def crowded() -> tuple[World, int]:
    world = World()
    a = world.session(region=1, pages=LARGE)
    world.store(a, LARGE_NAMES)
    return world, a


def do_chores(world: World) -> int:
    """How many slices they took."""
    done = 0
    for chore in world.take_chores():
        done += sum(1 for _ in chore)
    return done


def test_keys_of_a_region_handed_back_leave_the_order_in_slices():
    world, a = crowded()
    world.directory.add_region(a, 2, 8 * PAGE)
    policy = world.directory._state.sessions[a].policy
    assert world.give_back_region(a, 1).name == "DEFERRED" and len(policy) == LARGE
    world.store(a, "xyz", region=2)
    world.delete(a, LARGE_NAMES[:1])
    world.store(a, LARGE_NAMES[:1], region=2, first=3)  # a key of both regions: it is not forgotten
    assert world.reclaim(a, 2) == 2  # and none of what was handed back
    assert world.there(LARGE_NAMES) == "".join(LARGE_NAMES)
    assert do_chores(world) == 3
    assert len(policy) == 2 and world.reclaim(a, 5) == 2
    assert world.there(LARGE_NAMES[:1]) == "" and len(world.directory) == LARGE - 1


def test_the_order_of_a_session_that_ended_is_freed_in_slices():
    world, a = crowded()
    world.directory.add_region(a, 2, LARGE * PAGE)
    world.store(a, [f"l{at}" for at in range(LARGE)], region=2)
    world.delete(a, [f"l{at}" for at in range(LARGE)])
    session = world.directory._state.sessions[a]
    world.end_session(a, world.now)
    assert do_chores(world) >= 6
    assert not len(session.policy) and not session.outbox.pages
    assert world.make_room(LARGE * PAGE, world.now) == [1]


class Unread(dict):
    """What lies in a region, of which only the number is asked."""

    def _refuse(self, *_):
        raise AssertionError("this takes as long as there are keys")

    __iter__ = keys = values = items = clear = _refuse


@pytest.mark.parametrize("how", ["end", "expire"])
def test_the_end_of_a_session_looks_at_none_of_its_keys(how):
    world, a = crowded()
    world.directory.add_region(a, 2, LARGE * PAGE)
    world.store(a, [f"l{at}" for at in range(LARGE)], region=2)
    world.delete(a, [f"l{at}" for at in range(LARGE)])
    session, region, emptied = (
        world.directory._state.sessions[a],
        world.directory._state.regions[1],
        world.directory._state.regions[2],
    )
    plain, region.keys_at = region.keys_at, Unread(region.keys_at)
    emptied.returning = places = Unread(emptied.returning)
    if how == "end":
        world.end_session(a, world.now)
    else:
        world.now += 1_000.0
        assert world.expire(world.now) == [a]
    region.keys_at = plain
    assert len(session.policy) == len(places) == LARGE
    chores = world.take_chores()
    for chore in chores:
        left = len(session.policy) + len(session.outbox.pages) + len(places)
        for _ in chore:
            before, left = left, len(session.policy) + len(session.outbox.pages) + len(places)
            assert before - left <= FORGOTTEN_AT_ONCE
    assert not len(session.policy) and not session.outbox.pages and not len(places)
    assert world.there(LARGE_NAMES) == "".join(LARGE_NAMES)


def test_pages_on_the_way_back_of_a_region_handed_back_are_freed_in_slices():
    world, a = crowded()
    world.delete(a, LARGE_NAMES[1:])
    places = world.directory._state.regions[1].returning
    assert world.give_back_region(a, 1).name == "DEFERRED" and len(places) == LARGE - 1
    assert do_chores(world) == 3 and not places


def test_keys_of_a_region_owned_again_are_used_in_slices():
    world = World()
    theirs = world.connection("p", region=1, pages=LARGE)
    world.store(theirs, LARGE_NAMES)
    world.directory.disconnect(theirs, world.now)
    world.now += 100.0
    world.directory.expire(world.now)
    do_chores(world)
    again = world.connection()
    world.store(again, ["new"], offsets=[0])
    [session] = world.directory._state.sessions.values()
    assert do_chores(world) == 3 and len(session.policy) == LARGE


def test_what_left_a_region_owned_again_is_not_used_and_it_takes_no_memory_for_each_key():
    world = World()
    theirs = world.connection("p", region=1, pages=LARGE)
    world.store(theirs, LARGE_NAMES)
    world.directory.disconnect(theirs, world.now)
    world.now += 100.0
    world.directory.expire(world.now)
    do_chores(world)
    again = world.connection()
    world.store(again, ["new"], offsets=[0])
    [session] = world.directory._state.sessions.values()
    [chore] = world.directory.take_chores()
    tracemalloc.start()
    next(chore)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * LARGE, "bytes: a reference of 8 for each key, and no object"
    other = world.session(region=2, pages=1)
    world.forget(LARGE_NAMES[2:4])
    world.store(other, LARGE_NAMES[3:4])
    with contextlib.suppress(StopIteration):
        while True:
            chore.send(world.now)
    assert len(session.policy) == LARGE - 2


@pytest.mark.parametrize("how", ["end", "epoch"])
def test_many_pins_are_let_go_of_in_slices(how):
    world, a = crowded()
    b, c = world.session(), world.session()
    world.pin(b, LARGE_NAMES)
    world.pin(c, LARGE_NAMES[:1])
    if how == "end":
        world.end_session(b, world.now)
        world.now += 100.0
        world.renew(a, world.now)
        world.renew(c, world.now)
        world.expire(world.now)
    else:
        world.enter_pin_epoch(b, 1)
        assert world.settle_pins(b, LARGE_NAMES[1:2], [1], last=True) == LARGE - 1
    assert world.statistics().pinned == LARGE  # they hold a moment longer
    world.forget(LARGE_NAMES[2:3])  # whatever protects it, and it comes back under other pins
    world.acknowledge(a, 1)
    world.store(a, LARGE_NAMES[2:3], first=2)
    world.pin(c, LARGE_NAMES[2:3])
    assert do_chores(world) == 3
    kept = [0, 2] if how == "end" else [0, 1, 2]
    assert [at for at in range(LARGE) if world.inspect(LARGE_NAMES[at]).pins] == kept
    assert world.directory._state.regions[1].pinned == len(kept)


def noted(clients: int) -> tuple[World, Shared, list[int]]:
    """A world of which so many clients have read all that their boards can note; and their sessions."""
    world = World()
    world.store(world.session(region=1), "ab")
    index = Shared(world)
    readers = [world.session() for _ in range(clients)]
    for reader in readers:
        index.hold(reader, "")
        for _ in range(4):
            index.pins[reader].note_used(index.reader.find(["a"] * (USES_AT_ONCE // 4)))
    return world, index, readers


def test_what_all_clients_have_read_is_counted_in_slices():
    world, index, readers = noted(4)
    world.note_uses()
    assert world.statistics().found == USES_AT_ONCE
    index.pins[readers[0]].note_used(index.reader.find(["b"]))
    for _ in range(2):  # the rest is a chore already
        world.note_uses()
        assert world.reclaim(world.session(), 1) == 0
        assert world.statistics().found == USES_AT_ONCE
    [chore] = world.take_chores()
    for slices in range(1, 5):
        next(chore, None)
        assert world.statistics().found <= slices * USES_AT_ONCE + 1
    assert next(chore, None) is None and world.statistics().found == 4 * USES_AT_ONCE + 1
    assert world.take_chores() == []


def test_uses_that_are_noted_without_end_keep_no_chore_and_leave_others_their_turn(monkeypatch):
    monkeypatch.setattr("maru._directory.evictor._MOST_TURNS", 8)
    world, index, [*noisy, other] = noted(3)
    world.note_uses()
    [chore] = world.take_chores()
    much, turns = index.reader.find(["a"] * USES_AT_ONCE), 0
    for _ in chore:
        turns += 1
        for reader in noisy:
            index.pins[reader].note_used(much)
    assert turns == 8 and world.statistics().found == 9 * USES_AT_ONCE
    assert index.boards.take_uses(other) == [] != index.boards.take_uses()


# --- kill -9 ------------------------------------------------------------------------------------------------------


class Raw:
    """A client of the channel that says what it is told to."""

    def __init__(self, server: Server):
        self.connection = ChannelConnection(f"{server.pool}/channel.sock")
        self._sequences = itertools.count(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def ask(self, code, message):
        sequence = next(self._sequences)
        end = time.perf_counter() + PATIENCE
        assert self.connection.send_by(request(code, sequence, message), end)
        while True:
            frame = self.connection.receive_by(end)
            assert frame is not None, f"no answer to {code!r}"
            header = read_header(frame)
            if header.sequence == sequence:
                return decode_reply(header.code, body_of(frame, header))


@pytest.mark.parametrize("what", ["reclaim", "region"])
def test_a_kill_at_each_slice_loses_nothing_else(what):
    """Keys that are left are found, and every other page is on its way back to its owner."""
    left = []
    for kill_at in range(1, 2 + MANY // AT_ONCE):
        with (
            temporary_pool() as pool,
            Server(pool, "--capacity-bytes", "4MiB", "--high-watermark", "1.0", "--low-watermark", "1.0", "--max-lease", "60",
                   setup=f"tests.support.maru_setups:end_at_slice:{kill_at}") as server,
        ):  # fmt: skip
            with Raw(server) as raw:
                shaken = raw.ask(Code.HANDSHAKE, HandshakeRequest(instance_id="a", extensions=1, lease=60.0))
                token = shaken.session
                region = raw.ask(Code.REQUEST_ALLOC, AllocRequest("a", 4 << 20, session=token)).handle.region_id
                stored = raw.ask(Code.STORE, StoreRequest(token, 0, 1, region, NAMES, list(range(MANY)), 1, None))
                assert not any(stored.statuses)
                with contextlib.suppress(OSError, AssertionError):
                    if what == "reclaim":
                        raw.ask(Code.RECLAIM, ReclaimRequest(token, 0, 1, MANY))
                    else:
                        raw.ask(Code.CLOSE, CloseRequest(token, 0))
                        raw.ask(Code.REQUEST_ALLOC, AllocRequest("b", 4 << 20))
            server.restart()
            with Raw(server) as raw:
                there = raw.ask(Code.BATCH_EXISTS_KV, KeysRequest(NAMES)).results
                left.append(sum(there))
                assert left[-1] == MANY - AT_ONCE * (kill_at - 1)
                if what == "region":
                    continue
                assert there == [True] * left[-1] + [False] * (MANY - left[-1])
                epoch = raw.ask(Code.HANDSHAKE, HandshakeRequest(instance_id="a", extensions=1, session=token)).epoch
                back, numbers = [], 0
                while (returns := raw.ask(Code.BEAT, BeatRequest(token, numbers, epoch)).returns) is not None:
                    back += returns.offsets
                    numbers += len(returns.offsets)
                assert back == list(range(MANY - 1, left[-1] - 1, -1))
                resolved = raw.ask(Code.RESOLVE, ResolveRequest(token, numbers, 1, [region] * MANY, list(range(MANY))))
                assert list(map(bool, resolved.held)) == there
    assert len(set(left)) == len(left), "each kill is to find another slice"
