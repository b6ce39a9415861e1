"""A process that uses CUDA, without a GPU: memory is pinned with the driver in Python."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from maru.base.memory import pinning
from maru.fake_cuda import FakeCuda, use


@contextmanager
def process_with_cuda(fake: FakeCuda | None = None, *, uses: bool = True) -> Iterator[FakeCuda]:
    """Have this process pin its memory with a driver in Python, and look that nothing stays pinned.

    Args:
        fake: the driver; by default one with one device.
        uses: whether the process uses CUDA already, so that memory is pinned without being told to.
    """
    gc.collect()
    fake = FakeCuda() if fake is None else fake
    before, pinning._process = pinning._process, pinning._Process(is_expected=uses, version=object())  # type: ignore[misc]
    tables = pinning._pins, pinning._spans, pinning._later
    pinning._pins, pinning._spans, pinning._later = weakref.WeakSet(), {}, weakref.WeakKeyDictionary()  # type: ignore[misc]
    try:
        with use(fake):
            yield fake
            gc.collect()
            pinning.background.wait_prepared()
            assert not fake.registered
    finally:
        pinning._process = before  # type: ignore[misc]
        pinning._pins, pinning._spans, pinning._later = tables  # type: ignore[misc]
        pinning._process.version = object()
    assert not fake.wrong
