"""An engine that computes while its blocks are stored and loaded: on the GPU that torch sees, and on one in Python."""

from __future__ import annotations

import threading

import pytest

from backends.memory import MemoryTier
from offload import NO_WAIT, from_thread

from .devices import BLOCKS, KINDS, device

HALF = BLOCKS // 2
FIRST, SECOND = range(HALF), range(HALF, BLOCKS)
KEYS = [b"block %d" % number for number in FIRST]


@pytest.fixture(params=KINDS)
def there(request):
    with device(request.param) as there:
        yield there


@pytest.fixture
def engine(there):
    host = MemoryTier(BLOCKS * there.tier.block_bytes, there.tier.block_bytes)
    with from_thread.open_engine(there.tier, {"host": host}, shadow_check=0) as engine:
        yield engine


def store(there, engine, precondition):
    return engine.store(there.tier.external(FIRST, KEYS), precondition)


def load(there, engine, precondition):
    with engine.lookup(KEYS, timeout=10) as hit:
        assert len(hit) == HALF
        return engine.load(hit, there.tier.into(SECOND), timeout=10, precondition=precondition)


def test_what_was_computed_before_the_event_is_stored_although_it_is_overwritten_at_once(there, engine):
    there.write(FIRST, 7, late=True)
    future = store(there, engine, there.record())
    there.let_go()
    assert len(future.result(20).completed) == HALF
    there.write(FIRST, 1)
    load(there, engine, NO_WAIT)
    assert there.hold(SECOND) == {7}


def test_a_store_without_the_event_is_stale(there, engine):
    """So that the test above can fail."""
    there.write(FIRST, 6)
    assert there.hold(FIRST) == {6}
    there.write(FIRST, 7, late=True)
    assert len(store(there, engine, NO_WAIT).result(20).completed) == HALF
    there.let_go()
    there.hold(FIRST)
    load(there, engine, NO_WAIT)
    assert 6 in there.hold(SECOND)


def test_a_load_comes_after_work_that_was_queued_for_its_blocks(there, engine):
    there.write(FIRST, 7)
    assert there.hold(FIRST) == {7}
    store(there, engine, NO_WAIT).result(20)
    there.write(SECOND, 0, late=True)
    computed = there.record()
    threading.Timer(0.05, there.let_go).start()
    assert load(there, engine, computed).loaded == HALF
    assert there.hold(SECOND) == {7}


def test_compute_behind_a_load_sees_its_bytes(there, engine):
    there.write(FIRST, 7)
    store(there, engine, there.record()).result(20)
    for _ in range(3):
        there.write(SECOND, 0)
        assert there.hold(SECOND) == {0}
        assert load(there, engine, NO_WAIT).loaded == HALF
        assert there.hold(SECOND) == {7}


def test_stores_and_loads_leave_a_graph_capture_alone(there, engine):
    there.write(FIRST, 7)
    computed = there.record()
    there.hold(FIRST)
    store(there, engine, computed).result(20)  # makes the threads and what they hold
    load(there, engine, computed)
    with there.capturing() as is_well:
        store(there, engine, computed).result(20)
        assert load(there, engine, computed).loaded == HALF
        assert is_well()
