"""The connector and OffloadSpec as vLLM makes them for a cache on a device, over a driver in Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from backends.base.block_layout import TensorMemory
from backends.base.pages import new_pages
from offload import from_thread
from offload.engines.vllm import OffloadConnector, _connector, _spec
from offload.engines.vllm._arena import Arena
from offload.engines.vllm._connector import StepMetadata
from offload.engines.vllm._page_kinds import ChunkPages
from offload.engines.vllm._plans import LoadPlan, StepPlan, StorePlan
from offload.engines.vllm._requests import BlockGroup
from offload.engines.vllm._settings import Settings
from offload.engines.vllm._spec import Places, RowWorker
from tests.engines.test_vllm_halves import NAMING
from tests.engines.test_vllm_on_a_device import There, device, host

SOON = 20.0


@attrs.frozen(eq=False)
class OnDevice:
    """A tensor of vLLM's cache on a device, in all that is asked of it."""

    memory: TensorMemory
    device = torch.device("cuda", 0)
    dtype = torch.uint8

    @property
    def shape(self) -> Sequence[int]:
        return self.memory.shape

    def stride(self) -> Sequence[int]:
        return self.memory.strides

    def data_ptr(self) -> int:
        return self.memory.address

    def element_size(self) -> int:
        return self.memory.item_bytes


class Cuda:
    """The events of torch, behind the work of vLLM's stream."""

    def __init__(self, there: There) -> None:
        self.there, self.captures = there, False

    def event(self) -> Any:
        made = SimpleNamespace(cuda_event=0, device=torch.device("cuda", 0), synchronize=None)

        def record() -> None:
            recorded = self.there.record()
            made.cuda_event, made.query, made.synchronize = recorded.cuda_event, recorded.query, recorded.synchronize

        made.record = record
        return made


@contextmanager
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[There, dict[str, Any], Cuda]]:
    """A device whose work is done as late as it may be, with a cache, and torch's events."""
    with device() as there, monkeypatch.context() as patch:
        source = there.source(1)
        pages = new_pages(1, source.block_bytes)
        source.copy_blocks_out([[0]], pages)
        source.copy_in([[0]], pages)
        # Made after those of the copier: its work is done later if nothing waits for it.
        there.compute = there.driver.stream()
        events = Cuda(there)
        patch.setattr(torch.cuda, "Event", events.event)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: events.captures)
        yield there, {name: OnDevice(layer) for name, layer in there.layers.items()}, events


def compute(there: There, block: int, byte: int) -> None:
    """Start a kernel that writes a block."""
    there.fake.kernel(there.compute, lambda: there.fill(block, byte))


# --- the connector --------------------------------------------------------------------------------------------------


@contextmanager
def connector(there: There, layers: dict[str, Any]) -> Iterator[OffloadConnector]:
    one = OffloadConnector.__new__(OffloadConnector)
    one._groups = [BlockGroup(there.sizes["N"])]
    one._settings, one._kv_transfer_config = Settings(), SimpleNamespace(engine_id="on a device")
    pages = ChunkPages(one._groups, there.sizes["N"]).of_worker([layers], there.sizes["B"], NAMING)
    tier = host(pages.source)
    with from_thread.open_engine(pages.source, [tier], when_full="drop", shadow_check=0) as engine:
        one._open_worker(layers, engine, pages, NAMING)
        try:
            yield one
        finally:
            _connector._WORKERS.pop(f"on a device/{NAMING.rank}")


def step(one: OffloadConnector, **plan: Any) -> None:
    one._connector_metadata = StepMetadata(StepPlan(**plan))
    one.start_load_kv(None)
    one.wait_for_save()


def store(one: OffloadConnector, block: int) -> None:
    step(one, stores=[StorePlan("first", [b"hash"], [[block]], 0)])
    assert one._worker is not None
    one._worker.engine.drain(SOON)


def load(one: OffloadConnector, block: int) -> set[int]:
    """Load the chunk into a block; returns the blocks that have to be computed."""
    step(one, loads=[LoadPlan("second", [b"hash"], [[block]])])
    deadline = time.monotonic() + SOON
    while not (one.get_transfer_results(set()).finished_recving or ()):
        assert time.monotonic() < deadline
    return one.get_block_ids_with_load_errors()


def connector_stores_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, _), connector(there, layers) as one:
        compute(there, 3, 7)
        store(one, 3)
        assert load(one, 5) == set()
        assert there.block(5) == bytes([7]) * len(there.block(5))


def connector_loads_behind_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, _), connector(there, layers) as one:
        there.fill(3, 7)
        store(one, 3)
        compute(there, 5, 0)
        assert load(one, 5) == set()
        there.fake.progress()
        assert there.block(5) == bytes([7]) * len(there.block(5))


def connector_checks_behind_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, _):
        done: list[int] = []
        there.fake.kernel(there.compute, lambda: done.append(there.fake.calls.count("cuMemcpyBatchAsync")))
        begun = there.fake.calls.count("cuMemcpyBatchAsync")
        with connector(there, layers):
            assert done == [begun]


# --- OffloadSpec ----------------------------------------------------------------------------------------------------


@contextmanager
def row_worker(there: There, layers: dict[str, Any]) -> Iterator[tuple[RowWorker, Arena]]:
    tensors = [CanonicalKVCacheTensor(layer, 48) for layer in layers.values()]
    caches = CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(at, 48) for at in range(len(tensors))]])
    config: Any = SimpleNamespace(
        kv_cache_layout=there.order,
        worker_kv_bytes_per_block=len(there.block(0)),
        cache=SimpleNamespace(blocks_per_chunk=1),
        engine_id="",
        parallel=SimpleNamespace(world_size=2, rank=0),
    )
    arena = Arena(f"rows {there.address}", 2, len(there.block(0)))
    arena.unlink()
    there.driver.register(arena.memory.memory.address, arena.memory.memory.length)
    worker = RowWorker(arena, len(there.block(0)), caches, config)
    try:
        yield worker, arena
    finally:
        worker.shutdown()
        there.driver.unregister(arena.memory.memory.address)


def ended(worker: RowWorker, job_id: int) -> bool:
    """Wait for a copy; returns whether it has succeeded."""
    worker.wait({job_id})
    (result,) = worker.get_finished()
    assert result.job_id == job_id
    return bool(result.success)


def worker_stores_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, _), row_worker(there, layers) as (worker, arena):
        compute(there, 3, 7)
        assert worker.submit_store(1, GPULoadStoreSpec([3], [1], [0]), Places([1]))
        assert ended(worker, 1)
        assert bytes(arena.pages([1])[0]) == bytes([7]) * arena.block_bytes


def worker_loads_behind_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, _), row_worker(there, layers) as (worker, arena):
        arena.pages([1])[0][:] = bytes([7]) * arena.block_bytes
        compute(there, 5, 0)
        assert worker.submit_load(1, Places([1]), GPULoadStoreSpec([5], [1], [0]))
        assert ended(worker, 1)
        there.fake.progress()
        assert there.block(5) == bytes([7]) * arena.block_bytes


ORDERS = [
    connector_stores_what_was_computed,
    connector_loads_behind_what_is_queued,
    connector_checks_behind_what_is_queued,
    worker_stores_what_was_computed,
    worker_loads_behind_what_is_queued,
]


@pytest.mark.parametrize("order", ORDERS)
def test_copies_come_behind_the_work_that_vllm_has_started(
    order: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    order(monkeypatch)


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_that_waits_for_nothing_is_found(
    order: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies between vLLM's cache and host memory come before what vLLM has started.
    monkeypatch.setattr(_connector, "_forward_pass", _connector._no_wait)
    monkeypatch.setattr(_spec, "_started_on_device", tuple)
    with pytest.raises(AssertionError):
        order(monkeypatch)


# --- while vLLM captures a graph --------------------------------------------------------------------------------------


def test_the_connector_neither_stores_nor_loads_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, events), connector(there, layers) as one:
        store(one, 3)
        events.captures, recorded = True, len(there.fake.events)
        before = there.block(5)
        store(one, 4)
        assert load(one, 5) == {5}
        assert there.block(5) == before and len(there.fake.events) == recorded


def test_a_worker_marks_rows_and_refuses_loads_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(monkeypatch) as (there, layers, events), row_worker(there, layers) as (worker, arena):
        events.captures, recorded = True, len(there.fake.events)
        assert worker.submit_store(1, GPULoadStoreSpec([3], [1], [0]), Places([1]))
        assert arena.take_unwritten([0, 1]) == {1}
        assert not worker.submit_load(2, Places([1]), GPULoadStoreSpec([5], [1], [0]))
        assert len(there.fake.events) == recorded
