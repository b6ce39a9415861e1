"""Copies that hang: the call ends in time, and behind it SGLang's memory is read and written by nobody."""

import time
from contextlib import contextmanager

import torch

from tests.engines.sglang.backends import LayerFirstPool, extra_config, hashes, open_backend, tokens
from tests.engines.sglang.tiers import IN, OUT
from tests.support.maru_processes import eventually

HANGING = {"drive": {"type": "tests.engines.sglang.tiers:gated_tier", "blocks": 8}}
LONG = 20.0
"""Seconds that a call which hangs takes, and none of these may: less than the engine itself would wait for a copy."""


@contextmanager
def shut(gate):
    """What was shut is opened, whatever happens: else the engine's end would wait for the copy."""
    gate.shut()
    try:
        yield
    finally:
        gate.open()


def timed(function, *args):
    began = time.monotonic()
    answer = function(*args)
    return answer, time.monotonic() - began


def test_a_load_that_is_late_writes_to_no_page():
    pool = LayerFirstPool()
    pool.fill(0)
    with open_backend(pool, extra_config(HANGING, load_timeout=0.3)) as backend:
        assert backend.batch_set_v1(hashes(1), tokens(0)) == [True]
        with shut(OUT):
            answer, seconds = timed(backend.batch_get_v1, hashes(1), tokens(5))
            assert answer == [False] and seconds < LONG / 4
            assert OUT.waiting.is_set()
            assert backend.report_status()["failures"] == {"load: timeout": 1}
        # The late copy is over when the same drive has served another.
        assert eventually(lambda: backend.batch_get_v1(hashes(1), tokens(6)) == [True])
    assert not pool.page(5).any()
    assert torch.equal(pool.page(6), pool.page(0))


def test_a_store_that_is_late_reads_no_page():
    """Pages of 6 MiB pass one by one: when the first one hangs, the others have not been read."""
    pool = LayerFirstPool(4, head_dim=1 << 16)
    for page in range(3):
        pool.fill(page)
    keys, first = hashes(3), pool.page(0)
    with open_backend(pool, extra_config(HANGING, store_timeout=0.3)) as backend:
        with shut(IN):
            answer, seconds = timed(backend.batch_set_v1, keys, tokens(0, 1, 2))
            assert answer == [False] * 3 and seconds < LONG / 4
            assert IN.waiting.is_set()
            pool.kv_buffer.fill_(-1)  # SGLang gives them to another request
        eventually(lambda: backend.report_status()["stores_under_way"] == 0)
        assert backend.batch_exists(keys[1:]) == 0
        assert backend.batch_get_v1(keys[:1], tokens(3)) == [False] or torch.equal(pool.page(3), first)
        assert backend.report_status()["failures"]["store: timeout"] == 3
