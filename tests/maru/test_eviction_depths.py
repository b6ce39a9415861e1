"""Of what is next to go, the deepest goes first: a writer that stores chunk by chunk does not lose the head of its prefix."""

import msgspec
import pytest

from maru._directory import Directory
from maru._journal.registrations import columns_of, recorded_columns
from maru._wire import AllocRequest, Code, FindRequest, StoreRequest, StoreStatus
from maru.eviction import LRU, AdaptiveLRFU, WTinyLFU
from maru.eviction._candidates import Candidates
from tests.maru.test_hostile import Attacker
from tests.support.maru_actors import REGION
from tests.support.maru_processes import Server, temporary_pool

CAPACITY = 160  # of which a sixteenth, ten, are candidates
with_depths = pytest.mark.parametrize("policy", [AdaptiveLRFU, LRU])


def written(policy, n, depths=True, held=()):
    """The keys 0 to n - 1 are one prefix, stored one by one into a place that is full after CAPACITY of them: what stays."""
    there = []
    for key in range(n):
        if len(there) == CAPACITY:
            victims, rejected = policy.make_room([key], 1, held)
            if rejected:
                continue
            there.remove(*victims)
        policy.use([key], [key] if depths else None)
        there.append(key)
    return there


def prefix(there):
    return next((at for at in range(len(there) + 1) if at not in there), 0)


@with_depths
def test_what_is_stored_chunk_by_chunk_keeps_its_head(policy):
    there = written(policy(), 3 * CAPACITY // 2)
    assert prefix(there) >= 9, "all but one of the candidates are the head"
    assert len(there) == CAPACITY


@pytest.mark.parametrize("policy", [LRU, WTinyLFU])
def test_without_depths_the_head_goes_first(policy):
    assert prefix(written(policy(), 3 * CAPACITY // 2, depths=False)) == 0


def test_what_wtinylfu_lets_go_for_a_newcomer_is_the_deepest_of_what_is_next():
    policy = WTinyLFU()
    there = written(policy, 3 * CAPACITY // 2)
    assert prefix(there) >= 9 and len(there) == CAPACITY
    gone, _ = policy.make_room([], 10, {0, 5})
    assert not {0, 5} & set(gone), "held"
    policy.use([1])
    gone, _ = policy.make_room([], CAPACITY, ())
    assert len(policy) == 0 and {0, 1, 5} <= set(gone), "nothing is lost among the candidates"


@with_depths
def test_stored_together_and_stored_one_by_one_lose_the_deepest_first(policy):
    together = policy()
    together.use(range(CAPACITY)[::-1], range(CAPACITY)[::-1])
    gone, _ = together.make_room(range(20), 20, ())
    assert 0 not in gone
    alone = policy()
    for key in range(CAPACITY):
        alone.use([key], [key])
    gone, _ = alone.make_room(range(20), 20, ())
    assert gone[0] == 9, "the deepest of ten candidates"
    assert not set(gone) & set(range(9))


@with_depths
def test_a_use_takes_a_candidate_back(policy):
    one = policy()
    written(one, CAPACITY)
    [victim], _ = one.make_room(["new"], 1, ())
    assert victim == 9
    one.use([0])
    known = len(one)
    gone, _ = one.make_room(range(CAPACITY), known - 1, ())
    assert len(gone) == known - 1 and len(one) == 1
    if policy is LRU:
        assert 0 not in gone


@with_depths
def test_a_candidate_that_is_held_stays_and_one_that_is_discarded_is_gone(policy):
    one = policy()
    written(one, CAPACITY)
    one.make_room(["new"], 1, ())
    one.discard([8, 7])
    assert len(one) == CAPACITY - 3
    gone, _ = one.make_room(range(CAPACITY), CAPACITY, {5, 6})
    assert sorted(gone) == sorted(set(range(CAPACITY)) - {9, 8, 7, 6, 5})
    gone, _ = one.make_room(range(2), 2, ())
    assert sorted(gone) == [5, 6]


@with_depths
def test_a_key_without_a_depth_goes_when_its_turn_has_come(policy):
    one = policy()
    one.use(["plain"])
    for key in range(CAPACITY):
        one.use([key], [key])
    [victim], _ = one.make_room(["new"], 1, ())
    assert victim == "plain"


def test_heads_that_nothing_uses_any_more_do_not_stay():
    candidates = Candidates()
    for key in range(3):
        candidates.add(f"head {key}", 0, None)
    gone = []
    for at in range(100):
        candidates.add(at, 5, None)
        gone.append(candidates.pop(known=40)[0])
    assert {"head 0", "head 1", "head 2"} <= set(gone)
    assert gone.index("head 0") == 40


def test_what_is_taken_back_leaves_no_more_behind_than_there_are_candidates():
    candidates = Candidates()
    for at in range(1000):
        candidates.add("key", at, None)
        assert candidates.take_back(["key"]) == [("key", None)]
    assert len(candidates._heap) <= 65 and not candidates


# --- the server's directory ---------------------------------------------------------------------------------------

PAGE = 4096
TOKEN = b"t" * 16


def test_the_page_store_evicts_the_deepest_of_what_was_stored_one_by_one_also_after_a_restart():
    directory = Directory()
    session = directory.open_session(TOKEN, "instance", "", 10.0, 0.0)
    directory.add_region(session, 1, CAPACITY * PAGE)
    for at in range(CAPACITY):
        message = StoreRequest(TOKEN, 0, at + 1, 1, [str(at)], [at * PAGE], PAGE, None, [at])
        source = Code.STORE, msgspec.msgpack.encode(message)
        directory.register(session, columns_of(message), 0.0, source=source)
    records = directory.take_records()
    loaded = Directory.load(directory.dump())
    replayed = Directory()
    for record in records:
        replayed.apply(record, recorded_columns)
    for one in (directory, loaded, replayed):
        assert one.reclaim(session, 20, 0.0) == 20
        there = one.exists([str(at) for at in range(CAPACITY)])
        assert all(there[:9]), "the head stays"
        assert there.count(False) == 20


def test_a_client_of_the_version_before_which_knows_no_depths_is_served_also_after_a_restart():
    """Its STORE ends where the column begins. Another one, which says depths, shares its server."""
    with (
        temporary_pool() as pool,
        Server(pool, "--capacity-bytes", "64MiB") as server,
        Attacker(server.ipc) as old,
        Attacker(server.ipc) as new,
    ):
        sessions = {}
        for peer, name, depths in ((old, "old", None), (new, "new", [1, 0])):
            session = sessions[peer] = peer.session(lease=60.0)
            region = peer.ask(Code.REQUEST_ALLOC, AllocRequest(name, REGION, session)).handle.region_id
            keys = [name, f"{name} next"]
            store = msgspec.to_builtins(StoreRequest(b"", 0, 1, region, keys, [0, PAGE], PAGE, None, depths))
            without_the_column = store[1:-1] if peer is old else store[1:]
            answer = peer.ask(Code.STORE, [session, *without_the_column])
            assert answer.statuses == [StoreStatus.NEW, StoreStatus.NEW]
        server.kill()
        server.start()
        for peer, session in sessions.items():
            found = peer.ask(Code.FIND, FindRequest(session, 0, ["old", "old next", "new", "new next"], False, False))
            assert list(found.positions) == [0, 1, 2, 3]
