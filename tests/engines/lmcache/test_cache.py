"""The cache, over real tiers: what LMCache is told of each object, and what is held for it."""

import queue
import sys
import threading

import pytest

from backends.abc import Failed, Missed
from offload import DrainUnproven, LoadResult, PipelineFull
from offload.engines.lmcache._cache import ObjectCache
from offload.engines.lmcache._memory import MemoryObjects, Span
from offload.engines.lmcache._names import hashed_key
from offload.engines.lmcache._opening import LazyEngine, OpenEngine
from offload.from_thread import WaitTimeout
from tests.backends.test_plugins_salts import Placing
from tests.engines.lmcache.caches import PAGE, in_memory, objects, open_cache, spans_of
from tests.engines.lmcache.keys import chunks

KEYS = chunks(4)


def until(condition):
    while not condition():
        threading.Event().wait(0.001)


# --- what goes right --------------------------------------------------------------------------------------------------


def test_what_was_stored_is_found_and_loaded():
    with open_cache() as cache:
        stored, loaded = objects(4), objects(4)
        assert cache.store(KEYS, stored).success
        assert cache.lookup(KEYS).found == [True] * 4
        assert cache.load(KEYS, loaded) == [True] * 4
        assert loaded == stored


def test_only_what_a_store_has_put_there_counts_as_written():
    with open_cache() as cache:
        buffers = objects(4)
        cache.store(KEYS[:2], buffers[:2])
        outcome = cache.store(KEYS, buffers)
        assert outcome.success
        assert outcome.written == [False, False, True, True]


def test_a_lookup_finds_a_prefix_of_each_row():
    with open_cache() as cache:
        rank0, rank1 = chunks(4, kv_rank=0), chunks(4, kv_rank=1)
        cache.store([rank0[0], rank0[2], *rank1[:3]], objects(5))
        outcome = cache.lookup(rank0 + rank1)
        assert outcome.found == [True, False, False, False, True, True, True, False]
        assert outcome.gone == [False, True, False, False, False, False, False, True]


def test_rows_with_other_salts_share_nothing():
    with open_cache() as cache:
        cache.store(chunks(2, cache_salt="alice"), objects(2))
        assert cache.lookup(chunks(2, cache_salt="bob") + chunks(2)).found == [False] * 4


def test_a_store_of_several_salts_is_one_store():
    with open_cache() as cache:
        mixed = [key for pair in zip(chunks(3, cache_salt="alice"), chunks(3), strict=True) for key in pair]
        assert cache.store(mixed, objects(6)).there == [True] * 6


def test_a_key_that_is_named_twice_is_stored_once():
    with open_cache() as cache:
        buffers = objects(1) * 2
        assert cache.store([KEYS[0], KEYS[0]], buffers).there == [True, True]


def test_a_load_of_part_of_what_was_found_brings_that_part():
    with open_cache() as cache:
        stored, loaded = objects(4), objects(2)
        cache.store(KEYS, stored)
        cache.lookup(KEYS)
        assert cache.load(KEYS[1:3], loaded) == [True, True]
        assert loaded == stored[1:3]


def test_a_load_goes_on_behind_a_gap():
    with open_cache() as cache:
        stored, loaded = objects(4), objects(4)
        cache.store([KEYS[0], KEYS[3]], [stored[0], stored[3]])
        untouched = [bytes(buffer) for buffer in loaded[1:3]]
        assert cache.load(KEYS, loaded) == [True, False, False, True]
        assert (loaded[0], loaded[3]) == (stored[0], stored[3])
        assert loaded[1:3] == untouched


@pytest.mark.parametrize("n", [50, 500, 2_000])
@pytest.mark.parametrize("every", [1, 2])
def test_load_of_many_missing_keys_ends(n, every):
    """With none there, and with each second one there: a lookup for each gap, at whatever recursion limit."""
    with open_cache(in_memory(f"{n + 1}KiB", chunk_size_bytes=64)) as cache:
        many = chunks(n)
        stored = objects(n, 64)
        cache.store(chunks(1, n), objects(1, 64))
        there = [every == 2 and at % 2 == 1 for at in range(n)]
        if every == 2:
            assert cache.store(many[1::2], stored[1::2]).success
        loaded = objects(n, 64)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(300)
        try:
            assert cache.load(many, loaded) == there
        finally:
            sys.setrecursionlimit(limit)
        assert all(loaded[at] == stored[at] for at in range(n) if there[at])


def test_objects_smaller_than_a_page_come_back_as_they_were():
    with open_cache(in_memory(chunk_size_bytes=PAGE)) as cache:
        stored, loaded = objects(4, PAGE // 2), objects(4, PAGE // 2)
        assert cache.store(KEYS, stored).success
        assert cache.load(KEYS, loaded) == [True] * 4
        assert loaded == stored


def test_nothing_to_do_ends_at_once_and_connects_nothing():
    with open_cache() as cache:
        assert cache.store([], []).success
        assert cache.lookup([]).found == []
        assert cache.load([], []) == []
        assert cache.lazy.state == "not connected"


def test_parameters_and_salts_reach_an_adapter_that_is_hosted_as_a_tier():
    params = {"device": "/dev/ng0n1", "placement_strategy": "by_cache_salt"}
    drive = {
        "type": "plugin",
        "module_path": Placing.__module__,
        "class_name": "Placing",
        "cache_salts": True,
        "adapter_params": params,
    }
    with open_cache({"engine": {"tiers": {"drive": drive}}}) as cache:
        stored, loaded = objects(2), objects(2)
        mine, other = chunks(1, cache_salt="alice"), chunks(1)
        assert cache.store([*mine, *other], stored).success
        assert cache.lookup([*mine, *other]).found == [True, True]
        assert cache.load([*mine, *other], loaded) == [True, True]
        assert loaded == stored
        assert Placing.last.params == params
        expected = {(hashed_key(mine[0]), "alice"), (hashed_key(other[0]), "")}
        assert [Placing.last.seen[what] for what in ("store", "load")] == [expected] * 2


# --- what is held -----------------------------------------------------------------------------------------------------


def test_what_was_found_survives_a_delete_until_it_is_unlocked():
    with open_cache() as cache:
        stored, loaded = objects(4), objects(4)
        cache.store(KEYS, stored)
        cache.lookup(KEYS)
        assert cache.cache.delete(KEYS) == [False] * 4
        assert cache.load(KEYS, loaded) == [True] * 4
        cache.cache.unlock(KEYS)
        assert cache.cache.locked == 0
        assert cache.cache.delete(KEYS) == [True] * 4
        assert cache.lookup(KEYS).found == [False] * 4


def test_what_was_found_is_not_evicted_until_it_is_unlocked():
    with open_cache(in_memory(4 * PAGE)) as cache:
        stored, loaded = objects(4), objects(4)
        cache.store(KEYS, stored)
        cache.lookup(KEYS[:3])
        assert cache.store(chunks(1, 9), objects(1)).success  # in the place of the one that is not held
        assert cache.load(KEYS, loaded) == [True, True, True, False]
        assert loaded[:3] == stored[:3]


def test_two_lookups_of_one_key_hold_it_twice():
    with open_cache() as cache:
        cache.store(KEYS, objects(4))
        cache.lookup(KEYS)
        cache.lookup(KEYS[:2])
        cache.cache.unlock(KEYS)
        assert cache.cache.delete(KEYS[:2]) == [False, False]
        cache.cache.unlock(KEYS[:2])
        assert cache.cache.delete(KEYS) == [True] * 4


def test_unlock_and_delete_without_a_connection_do_nothing():
    with open_cache() as cache:
        cache.cache.unlock(KEYS)
        assert cache.cache.delete(KEYS) == [False] * 4
        assert cache.lazy.state == "not connected"


# --- how large a page is ----------------------------------------------------------------------------------------------


def test_the_first_object_says_how_large_a_page_is():
    with open_cache() as cache:
        cache.store(KEYS[:1], objects(1, 512))
        assert cache.lazy.opened.page_bytes == 512


def test_the_status_says_what_groups_of_two_sizes_take():
    with open_cache(in_memory(chunk_size_bytes=64 << 10)) as cache:
        assert cache.cache.report()["page_bytes_per_stored_byte"] is None
        cache.store(chunks(4, object_group_id=0), objects(4, 64 << 10))
        assert cache.cache.report()["page_bytes_per_stored_byte"] == 1.0
        cache.store(chunks(4, object_group_id=1), objects(4, 8 << 10))
        assert cache.cache.report()["page_bytes_per_stored_byte"] == 1.78


def test_the_first_object_that_is_loaded_says_so_too():
    with open_cache() as cache:
        assert cache.load(KEYS[:1], objects(1, 512)) == [False]
        assert cache.lazy.opened.page_bytes == 512


def test_a_configured_size_wins():
    with open_cache(in_memory(chunk_size_bytes=2 * PAGE)) as cache:
        cache.store(KEYS[:1], objects(1))
        assert cache.lazy.opened.page_bytes == 2 * PAGE


def test_a_lookup_connects_with_what_its_layout_takes_rounded_up():
    with open_cache(align_bytes=4096) as cache:
        assert cache.lookup(KEYS, object_bytes=5000).found == [False] * 4
        assert cache.lazy.opened.page_bytes == 8192


def test_an_object_that_is_larger_than_was_guessed_is_stored_all_the_same():
    with open_cache() as cache:
        cache.lookup(KEYS, object_bytes=100)
        assert cache.store(KEYS, objects(4)).success
        assert cache.lazy.opened.page_bytes == PAGE


def test_a_lookup_that_knows_no_size_finds_nothing_and_says_why():
    with open_cache() as cache:
        assert cache.lookup(KEYS).found == [False] * 4
        assert cache.cache.report()["failures"] == {"lookup: page size unknown": 4}


def test_an_object_that_fits_no_page_fails_and_names_the_knob():
    with open_cache(in_memory(chunk_size_bytes=PAGE)) as cache:
        assert not cache.store(KEYS, objects(4, 2 * PAGE)).success
        assert cache.load(KEYS[:1], objects(1, 2 * PAGE)) == [False]
        assert "chunk_size_bytes" in cache.cache.report()["last_failures"]["object too large"]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_tiers_that_cannot_be_made_refuse_everything_and_say_why():
    with open_cache({"engine": {"tiers": {"host": {"type": "memory", "capacity_bytes": 1}}}}) as cache:
        assert cache.store(KEYS, objects(4)).there == [False] * 4
        assert cache.lookup(KEYS).found == [False] * 4
        report = cache.cache.report()
        assert not report["is_healthy"]
        assert "capacity_bytes" in report["open_error"]


def test_a_server_that_is_away_is_not_there_and_unavailable():
    parameters = {"server_url": "ipc:///nowhere/maru.sock", "timeout_ms": 50, "chunk_size_bytes": PAGE}
    with open_cache(parameters) as cache:
        assert not cache.store(KEYS, objects(4)).success
        outcome = cache.lookup(KEYS)
        assert outcome.found == outcome.gone == [False] * 4  # nobody said that they are not there
        assert cache.load(KEYS, objects(4)) == [False] * 4
        report = cache.cache.report()
        assert not report["is_healthy"]
        assert list(report["unavailable_tiers"]) == ["maru"]
        assert {name.partition(":")[0] for name in report["failures"]} == {"store", "lookup"}


def test_after_the_end_everything_is_refused():
    with open_cache() as cache:
        cache.store(KEYS, objects(4))
    assert cache.lookup(KEYS).found == [False] * 4
    assert not cache.store(KEYS, objects(4)).success
    assert cache.load(KEYS, objects(4)) == [False] * 4
    cache.cache.unlock(KEYS)
    cache.cache.close()


# --- with an engine that is played ------------------------------------------------------------------------------------


class Future:
    def __init__(self):
        self.callbacks = []

    def add_done_callback(self, function):
        self.callbacks.append(function)

    def result(self, timeout=None):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def request_cancel(self):
        """What it has found is released."""

    def end(self, answer):
        self.answer = answer
        for callback in self.callbacks:
            callback(self)


class Hit:
    def __init__(self, keys, unavailable=None):
        self.keys = keys
        self.unavailable = unavailable or {}
        self.released = 0

    def __len__(self):
        return len(self.keys)

    def release(self):
        self.released += 1


class PlayedEngine:
    """Answers when it is told to."""

    def __init__(self):
        self.begun = queue.Queue()
        self.refusal = None

    def _begin(self, *what):
        if self.refusal is not None:
            raise self.refusal
        future = Future()
        self.begun.put((future, *what))
        return future

    def store(self, blocks, precondition, *, tenant):
        return self._begin(blocks, tenant)

    def begin_lookup(self, keys, *, tenant, timeout):
        return self._begin(keys, tenant)

    def begin_load(self, hit, destination):
        return self._begin(hit, destination)

    def delete(self, keys, timeout):
        raise WaitTimeout("no answer")

    def close(self, timeout=None):
        pass


@pytest.fixture
def engine():
    return PlayedEngine()


@pytest.fixture
def cache(engine):
    return ObjectCache(LazyEngine(lambda size: OpenEngine(engine, MemoryObjects(size))), hashed_key, page_bytes=PAGE)


def names(keys):
    return list(map(hashed_key, keys))


def test_a_salt_reaches_the_tiers_as_the_tenant(cache, engine):
    ends = []
    cache.store(chunks(1, cache_salt="alice"), spans_of(objects(1)), ends.append)
    assert engine.begun.get(timeout=30)[2] == "alice"
    cache.lookup(chunks(1, cache_salt="bob"), ends.append)
    assert engine.begun.get(timeout=30)[2] == "bob"
    cache.load(chunks(1, cache_salt="carol"), spans_of(objects(1)), ends.append)
    assert engine.begun.get(timeout=30)[2] == "carol"


def test_a_lookup_ends_when_its_last_row_has(cache, engine):
    ends = []
    cache.lookup(chunks(2, kv_rank=0) + chunks(2, kv_rank=1), ends.append)
    first, keys, _ = engine.begun.get(timeout=30)
    second, *_ = engine.begun.get(timeout=30)
    second.end(Hit([]))
    assert ends == []
    first.end(Hit(keys))
    assert ends[0].found == [True, True, False, False]


def test_a_load_of_what_was_locked_asks_nobody_again(cache, engine):
    ends = []
    cache.lookup(KEYS, ends.append)
    future, keys, _ = engine.begun.get(timeout=30)
    hit = Hit(keys)
    future.end(hit)
    cache.load(KEYS, spans_of(objects(4)), ends.append)
    _, loaded, destination = engine.begun.get(timeout=30)
    assert loaded is hit
    assert len(destination) == 4


def test_a_lookup_that_runs_out_of_time_finds_nothing_and_knows_nothing(cache, engine):
    ends = []
    cache.lookup(KEYS, ends.append)
    engine.begun.get(timeout=30)[0].end(WaitTimeout("it took too long"))
    assert ends[0].found == ends[0].gone == [False] * 4
    assert cache.report()["failures"] == {"lookup: timeout": 4}


def test_a_tier_without_which_a_lookup_was_answered_is_unavailable_until_it_answers(cache, engine):
    ends = []
    cache.lookup(KEYS, ends.append)
    engine.begun.get(timeout=30)[0].end(Hit([], {"maru": TimeoutError("no answer")}))
    assert ends[0].gone == [False] * 4
    assert not cache.report()["is_healthy"]
    cache.lookup(KEYS, ends.append)
    engine.begun.get(timeout=30)[0].end(Hit([]))
    assert cache.report()["is_healthy"]


def test_an_empty_hit_is_released_at_once_and_a_found_one_with_its_last_key(cache, engine):
    hits = [Hit([]), Hit(names(KEYS))]
    for hit in hits:
        cache.lookup(KEYS, lambda outcome: None)
        engine.begun.get(timeout=30)[0].end(hit)
    assert [hit.released for hit in hits] == [1, 0]
    cache.unlock(KEYS[:3])
    assert hits[1].released == 0
    cache.unlock(KEYS[3:])
    assert hits[1].released == 1


@pytest.mark.parametrize("error", [PipelineFull("no room"), RuntimeError("anything")])
def test_an_engine_that_refuses_ends_every_operation(cache, engine, error):
    engine.refusal = error
    ends = queue.Queue()
    cache.store(KEYS, spans_of(objects(4)), ends.put)
    cache.lookup(KEYS, ends.put)
    cache.load(KEYS, spans_of(objects(4)), ends.put)
    stored, found, loaded = (ends.get(timeout=30) for _ in range(3))
    assert not any(stored.there) and not any(found.found) and not any(loaded)
    until(lambda: cache.report()["stores_under_way"] == 0)
    assert cache.delete(KEYS) == [False] * 4


def test_a_load_whose_end_is_unproven_never_ends(cache, engine):
    ends = []
    cache.load(KEYS, spans_of(objects(4)), ends.append)
    engine.begun.get(timeout=30)[0].end(Hit(names(KEYS)))
    engine.begun.get(timeout=30)[0].end(DrainUnproven("a copy may still be going on"))
    assert ends == []
    assert cache.report()["failures"] == {"load: unproven": 4}


def test_blocks_that_were_found_and_did_not_come_are_missing_and_named(cache, engine):
    ends = []
    cache.load(KEYS, spans_of(objects(4)), ends.append)
    own = Hit(names(KEYS))
    engine.begun.get(timeout=30)[0].end(own)
    failed = [Missed("damaged"), Failed(OSError("disk")), Missed("behind a gap"), Missed("behind a gap")]
    engine.begun.get(timeout=30)[0].end(LoadResult(0, failed))
    assert ends == [[False] * 4]
    assert own.released == 1
    assert cache.report()["failures"] == {"load: damaged": 1, "load: unavailable": 1, "load: behind a gap": 2}


def test_a_load_without_its_tiers_is_not_asked_again_key_by_key(cache, engine):
    ends = []
    cache.load(KEYS, spans_of(objects(4)), ends.append)
    engine.begun.get(timeout=30)[0].end(Hit([], {"maru": TimeoutError("no answer")}))
    assert ends == [[False] * 4]


def test_objects_of_one_store_are_lent_until_it_has_ended(cache, engine):
    ends = []
    cache.store(KEYS, [Span.of(memoryview(buffer)) for buffer in objects(4)], ends.append)
    future, _, _ = engine.begun.get(timeout=30)
    until(lambda: cache.report()["stores_under_way"] == 4)
    future.end(WaitTimeout("whatever"))
    assert cache.report()["stores_under_way"] == 0
    assert not ends[0].success


def test_the_end_lets_go_of_what_is_locked(cache, engine):
    cache.lookup(KEYS, lambda outcome: None)
    hit = Hit(names(KEYS))
    engine.begun.get(timeout=30)[0].end(hit)
    cache.close()
    assert hit.released == 1
