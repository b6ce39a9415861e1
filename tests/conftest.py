"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

# A shell has what it starts in the background ignore Ctrl-C, and children inherit that: those that a test interrupts as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported by any of them: with a thread per core, OpenMP spins for the core that another process has, and
# a test of a second takes a minute on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is: by default 0.2 s are a failure, and so is a second of making them.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


_MANY_DESCRIPTORS: Final = 300
"""A server that starts in this process freezes what is alive (`maru._journal.recovery`), garbage of earlier tests included."""


_look_at = [_MANY_DESCRIPTORS]


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: each collection that a test asks for would look through all of them."""
    gc.collect()
    gc.freeze()
    # What a test makes is mostly gone by its end, by counting alone: to look for cycles after every 700 new objects takes one
    # twentieth of all the time.
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> Iterator[None]:
    """Fail a test that leaves collection off, and collect what was frozen before descriptors run out."""
    yield
    if not gc.isenabled():
        gc.enable()
        pytest.fail("garbage collection is off behind this test")
    if len(os.listdir("/proc/self/fd")) > _look_at[0]:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _look_at[0] = len(os.listdir("/proc/self/fd")) + _MANY_DESCRIPTORS
