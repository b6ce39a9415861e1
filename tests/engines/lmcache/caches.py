"""A cache over real tiers, and its operations as calls that wait."""

import os
import queue
from contextlib import contextmanager

from offload.engines.lmcache._cache import ObjectCache
from offload.engines.lmcache._config import CacheConfig
from offload.engines.lmcache._memory import Span
from offload.engines.lmcache._names import naming
from offload.engines.lmcache._opening import LazyEngine

PATIENCE = 60.0
"""Longer than anything here takes on a busy machine."""
PAGE = 4096


def in_memory(capacity="1MiB", **more):
    return {"engine": {"tiers": {"host": {"type": "memory", "capacity_bytes": capacity}}}, **more}


def objects(n, size=PAGE):
    return [bytearray(os.urandom(size)) for _ in range(n)]


def spans_of(buffers):
    return [Span.of(memoryview(buffer)) for buffer in buffers]


class WaitingCache:
    """Begins operations, and waits for their one end."""

    def __init__(self, cache, lazy):
        self.cache = cache
        self.lazy = lazy

    def _wait(self, begin, *args, **options):
        ends = queue.Queue()
        begin(*args, ends.put, **options)
        outcome = ends.get(timeout=PATIENCE)
        assert ends.empty()
        return outcome

    def store(self, keys, buffers, **options):
        return self._wait(self.cache.store, keys, spans_of(buffers), **options)

    def lookup(self, keys, object_bytes=0, **options):
        return self._wait(self.cache.lookup, keys, object_bytes=lambda: object_bytes, **options)

    def load(self, keys, buffers, **options):
        return self._wait(self.cache.load, keys, spans_of(buffers), **options)


@contextmanager
def open_cache(parameters=None, **options):
    """A cache in 1 MiB of memory unless said otherwise."""
    config = CacheConfig.from_dict(in_memory() if parameters is None else parameters)
    lazy = LazyEngine(config.open)
    cache = ObjectCache(
        lazy,
        naming(config.key_names),
        page_bytes=config.chunk_size_bytes,
        page_bytes_of=config.find_page_bytes,
        timeout=PATIENCE,
        **options,
    )
    try:
        yield WaitingCache(cache, lazy)
    finally:
        cache.close()
