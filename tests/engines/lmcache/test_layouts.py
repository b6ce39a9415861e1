"""Whether the planes of LMCache's objects come back where they belong, before the first of them is served."""

import random
import time
import zlib

import pytest
import torch

from offload.engines.lmcache._memory import Span
from tests.engines.lmcache.caches import objects, open_cache
from tests.engines.lmcache.keys import chunks
from tests.support.planted import shadow as P

SHAPE = (2, 2, 32, 16)  # keys and values, layers, tokens, 4 heads of 4
PAGE = 4096
KEYS = chunks(2)


def looking_like(shape=SHAPE, dtype=torch.bfloat16):
    return lambda at: ([torch.Size(shape)], [dtype])


def on_disk(directory, **more):
    return {"engine": {"tiers": {"disk": {"type": "file", "directory": str(directory / "kv")}}}, **more}


def failures(cache):
    return cache.cache.report()["failures"]


def store(cache, keys=KEYS, **options):
    return cache.store(keys, objects(len(keys), PAGE), describe=looking_like(**options))


@pytest.mark.parametrize("shape", [SHAPE, (4, 32, 16), (32, 64), (2048,), (2, 2, 1, 512)])
def test_objects_that_are_read_as_they_are_written_are_served(shape):
    with open_cache() as cache:
        assert store(cache, shape=shape).success
        assert failures(cache) == {}
        assert cache.lookup(KEYS, object_bytes=PAGE, describe=looking_like(shape)).found == [True, True]


@pytest.mark.long  # it looks at the clock
def test_the_first_objects_are_served_within_a_second():
    with open_cache() as cache:
        began = time.perf_counter()
        assert store(cache).success
        assert time.perf_counter() - began < 1


@pytest.mark.parametrize("first", ["store", "lookup", "load"])
@pytest.mark.parametrize(
    "fault",
    [P.lmcache_keys_are_loaded_as_values, P.lmcache_heads_are_loaded_in_another_order],
    ids=lambda f: f.__name__,
)
def test_a_layout_that_is_loaded_otherwise_than_stored_is_found_before_anything_is_served(fault, first, monkeypatch):
    fault(monkeypatch)
    with open_cache() as cache:
        if first == "store":
            assert not store(cache).success
        elif first == "lookup":
            assert cache.lookup(KEYS, object_bytes=PAGE, describe=looking_like()).found == [False, False]
        else:
            assert cache.load(KEYS, objects(2, PAGE), describe=looking_like()) == [False, False]
        assert failures(cache) == {"start: layout": 1, f"{first}: layout": 2}
        assert "planes are swapped" in cache.cache.report()["last_failures"]["layout"]
        assert not store(cache).success
        assert cache.load(KEYS, objects(2, PAGE), describe=looking_like()) == [False, False]


@pytest.mark.parametrize("other", [{"dtype": torch.float16}, {"shape": (2, 2, 16, 32)}, {"shape": (2, 4, 16, 16)}])
@pytest.mark.parametrize("names", ["hashed", "published"])
def test_another_meaning_of_the_same_keys_is_found_before_anything_is_served(names, other, tmp_path):
    """Each of the two servers reads what it has written."""
    parameters = on_disk(tmp_path, key_names=names)
    with open_cache(parameters) as cache:
        assert store(cache).success
        assert failures(cache) == {}
    with open_cache(parameters) as cache:
        assert cache.lookup(KEYS, object_bytes=PAGE, describe=looking_like(**other)).found == [False, False]
        assert "start: layout" in failures(cache)
    with open_cache(parameters) as cache:
        assert cache.lookup(KEYS, object_bytes=PAGE, describe=looking_like()).found == [True, True]


def test_only_the_objects_of_that_rank_are_refused(tmp_path):
    with open_cache(on_disk(tmp_path)) as cache:
        store(cache)
    with open_cache(on_disk(tmp_path)) as cache:
        assert not store(cache, dtype=torch.float16).success
        assert store(cache, chunks(2, kv_rank=7), dtype=torch.float16).success


def test_a_layout_is_tried_once_and_again_later_where_no_tier_has_answered(monkeypatch):
    with open_cache() as cache:
        checks = []
        check = cache.cache.layouts.check
        monkeypatch.setattr(cache.cache.layouts, "check", lambda due, opened: (checks.append(due), check(due, opened)))
        store(cache)
        store(cache, chunks(4))
        assert [[layout.shapes for layout in due] for due in checks] == [[(SHAPE,)]]
        now = time.monotonic()
        larger = (*SHAPE[:-1], 2 * SHAPE[-1])  # than its page: what cannot even be made is not tried
        store(cache, chunks(1, kv_rank=7), shape=larger)
        assert failures(cache) == {"start: layout not checked": 1}
        store(cache, chunks(1, kv_rank=7))
        assert len(checks) == 2
        monkeypatch.undo()
        cache.cache.layouts._clock = lambda: now + 60
        store(cache, chunks(1, kv_rank=7))
        assert failures(cache) == {"start: layout not checked": 1}
        assert not cache.cache.layouts.due(chunks(1, kv_rank=7), [range(1)], looking_like())


# --- while it runs ----------------------------------------------------------------------------------------------------


def computed(prompt, n=4):
    """Objects of a prompt, the same each time."""
    generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
    return [torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for _ in range(n)]


def keys_of(prompt, n=4):
    return chunks(n, start=zlib.crc32(prompt.encode()) % (1 << 27) * 16)


class TypedCache:
    """A cache of 64 objects, that compares one load in 20, and its objects as LMCache has them: with a dtype."""

    def __init__(self, cache):
        self._cache = cache

    @property
    def failures(self):
        return failures(self._cache)

    def store(self, prompt):
        self._wait(self._cache.cache.store, prompt, computed(prompt))

    def load(self, prompt):
        places = [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(4)]
        return self._wait(self._cache.cache.load, prompt, places), places

    def _wait(self, begin, prompt, tensors):
        spans = [Span(one.data_ptr(), one.nbytes, one.nbytes, one, one.dtype) for one in tensors]
        return self._cache._wait(lambda finish: begin(keys_of(prompt), spans, finish))


def comparing():
    host = {"type": "memory", "capacity_bytes": 96 * PAGE}
    return {"engine": {"tiers": {"host": host}, "shadow_check": 20, "pipeline": {"on_destination_full": "evict"}}}


@pytest.mark.parametrize(
    "fault",
    [
        P.lmcache_keys_are_loaded_as_values,
        P.lmcache_heads_are_loaded_in_another_order,
        P.a_stale_page_is_served,
        P.another_requests_page_is_served,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_planted_fault_is_found_within_200_loads(fault, monkeypatch):
    rng = random.Random(1)
    with open_cache(comparing()) as opened:
        cache = TypedCache(opened)
        prompts = [f"{number}" for number in range(20)]
        for prompt in prompts:
            cache.store(prompt)
        fault(monkeypatch)
        for load in range(200):
            prompts = [*prompts[1:], f"later {load}"]
            cache.store(prompts[-1])
            cache.load(rng.choice(prompts))
            if cache.failures:
                break
        assert cache.failures.keys() == {"load: mismatch"}


@pytest.mark.parametrize("loads", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_clean_loads_raise_no_alarm(loads):
    """Evicted and stored anew, and loaded again and again; one in 20 is compared."""
    rng = random.Random(0)
    with open_cache(comparing()) as opened:
        cache, loaded = TypedCache(opened), 0
        while loaded < loads:
            prompt = f"{rng.randrange(36)}"
            come, places = cache.load(prompt)
            if all(come):
                assert loaded % 50 or all(map(torch.equal, places, computed(prompt)))
            else:
                cache.store(prompt)
            loaded += all(come)
        assert cache.failures == {}
