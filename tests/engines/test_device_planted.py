"""Faults planted into copies of a device: the tests that look for them find each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from backends import Unproven
from maru.base.memory.cuda import CudaError
from maru.fake_cuda import every_order
from tests.backends import test_copier as copier
from tests.engines import test_vllm_on_a_device as chunks
from tests.maru import test_cuda as calls
from tests.support.planted import device as P

Finder = Callable[..., object]
FOUND = (AssertionError, CudaError, Unproven, pytest.fail.Exception)
LOAD, STORE = chunks.loads_behind_what_is_queued, chunks.stores_what_was_computed

LOAD_WAITS = copier.test_in_every_order_of_streams_a_load_comes_after_what_it_waits_for
STORE_WAITS = copier.test_in_every_order_of_streams_a_store_reads_what_was_computed_before
ONE_CALL_FAILS = copier.test_where_any_one_call_fails_nothing_is_under_way_and_nothing_leaks
SLEEPS = copier.test_a_copy_sleeps_until_its_end_and_does_not_wait_for_the_default_stream
BUFFER = copier.test_the_buffer_is_not_filled_again_before_it_was_read

PLANTED: list[tuple[Callable[[Any], None], Finder]] = [
    (P.a_load_waits_for_nothing, partial(LOAD_WAITS, 12080)),
    (P.a_load_waits_for_nothing, partial(every_order, LOAD, chunks.DEPTH)),
    (P.a_store_waits_for_nothing, STORE_WAITS),
    (P.a_store_waits_for_nothing, partial(every_order, STORE, chunks.DEPTH)),
    (P.nobody_waits_behind_an_error, partial(ONE_CALL_FAILS, "load", registered=True, version=12080)),
    (P.nobody_waits_for_the_end, partial(every_order, STORE, chunks.DEPTH)),
    (P.nobody_waits_for_the_end, partial(every_order, LOAD, chunks.DEPTH)),
    (P.each_thread_is_on_device_0, copier.test_only_its_own_device_gets_a_context),
    (
        P.all_memory_counts_as_registered,
        partial(copier.test_blocks_arrive_as_they_were, registered=False, version=12080),
    ),
    (P.the_buffer_is_used_again_too_early, BUFFER),
    (P.the_buffer_is_filled_behind_its_copy, BUFFER),
    (P.memory_is_pinned_for_one_device, calls.test_memory_is_pinned_for_all_devices),
    (P.copies_wait_for_the_default_stream, partial(SLEEPS, "store")),
    (P.copies_wait_for_the_default_stream, partial(SLEEPS, "load")),
    (P.a_thread_that_waits_for_a_copy_spins, partial(SLEEPS, "store")),
]


@pytest.mark.parametrize(
    ("fault", "finder"),
    [pytest.param(*case, id=f"{case[0].__name__}-{number}") for number, case in enumerate(PLANTED)],
)
def test_a_planted_fault_is_found(
    fault: Callable[[Any], None], finder: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [monkeypatch] if finder is BUFFER else []
    finder(*args)  # it finds nothing where nothing is
    fault(monkeypatch)
    with pytest.raises(FOUND):
        finder(*args)
