"""Full collections of a server look at what came since the one before, and now and then at everything."""

from __future__ import annotations

import gc
import weakref

import pytest

from maru._server.garbage import THOROUGH_EVERY, short_collections


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def thawed():
    gc.collect()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_a_collection_leaves_out_what_outlived_the_last():
    now = 0.0
    with short_collections(lambda: now):
        ring = Ring()
        kept = weakref.ref(ring)
        gc.collect()
        assert gc.get_freeze_count() and not any(one is ring for one in gc.get_objects())
        del ring
        fresh = weakref.ref(Ring())
        gc.collect()
        assert fresh() is None and kept() is not None
        now = THOROUGH_EVERY
        gc.collect()
        assert kept() is None


@pytest.mark.usefixtures("thawed")
def test_collections_are_as_before_behind_the_block():
    before = list(gc.callbacks)
    with short_collections(lambda: 0.0):
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
