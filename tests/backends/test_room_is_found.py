"""Room is found for whatever fits, under every policy and in every tier, where nothing is held."""

import random

import pytest

from backends import FileTier, MemoryTier
from backends.abc import EVICTED
from backends.plugins import HostConfig, NativeTier
from maru.eviction import LRU, AdaptiveLRFU, WTinyLFU
from tests.support.plugin_faults import PlayedConnector

SIZE = 12


def pool_of_files(directory, blocks, eviction):
    return FileTier(directory, blocks * SIZE, eviction=eviction).pool, (SIZE, SIZE, 4, 5)


def pool_of_memory(directory, blocks, eviction):
    return MemoryTier(blocks * SIZE, SIZE, eviction=eviction).pool, (1,)


def pool_of_a_connector(directory, blocks, eviction):
    config = HostConfig(capacity_bytes=blocks * SIZE)
    return NativeTier(PlayedConnector(deletes=True), SIZE, config, eviction=eviction).registry, (1,)


def use_at_random(pool, sizes, rng):
    """Store and use blocks, as far as there is room for them."""
    universe = [b"%d" % number for number in range(rng.choice([5, 20, 100]))]
    for _ in range(rng.choice([50, 300])):
        keys, size = rng.sample(universe, rng.randint(1, 5)), rng.choice(sizes)
        known = [key for key in keys if pool.slots([key]) != [EVICTED]]
        if rng.random() < 0.6:
            new = [key for key in keys if key not in known]
            if not new or not pool.could_hold(len(new), size):
                continue
            slots = pool.reserve_nowait(new, "evict", size)
            pairs = [(key, slot) for key, slot in zip(new, slots, strict=True) if slot != EVICTED]
            if isinstance(getattr(pool, "keys", None), dict):  # the files' names
                pool.keys.update((slot, key) for key, slot in pairs)
            if pairs:
                pool.register([key for key, _ in pairs], [slot for _, slot in pairs])
        elif known:
            pool.use(known)


@pytest.mark.parametrize("policy", [LRU, AdaptiveLRFU, WTinyLFU], ids=lambda policy: policy.__name__)
@pytest.mark.parametrize(
    "pool_of", [pool_of_files, pool_of_memory, pool_of_a_connector], ids=lambda make: make.__name__
)
def test_a_request_never_waits_for_nothing(pool_of, policy, tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        blocks = rng.choice([3, 8, 40])
        pool, sizes = pool_of(tmp_path / str(seed), blocks, policy())
        use_at_random(pool, sizes, rng)  # none of its requests waits either
        statistics = pool.statistics()
        assert (statistics.held, statistics.staged, statistics.waiting) == (0, 0, 0)
        slots = pool.reserve_nowait([b"new %d" % at for at in range(blocks)], "evict", sizes[0])
        pool.give_back(slots)
