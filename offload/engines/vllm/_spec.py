"""``OffloadSpec``: our tiers behind vLLM's own OffloadingConnector.

That connector asserts that no transfer fails. So a worker's transfers are copies between its cache and host memory that
the manager holds: a chunk is a hit only once its bytes lie there, verified. vLLM makes a spec in each of its processes;
they share the arena, which has the name of the engine. A worker in the process of the scheduler reads pages of tiers,
too. Only this module, ``_connector`` and ``_kernels`` import vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, Final

from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .._guard import NOTHING, PASSES, Hook, guarded, nothing
from .._weights import weights_text
from ._arena import Arena
from ._chunks import ChunkSource, GroupCaches
from ._copies import NOWHERE, Copied, InPlace, RowCopies
from ._device_events import record_event
from ._kernels import kernel_text
from ._manager import HostMemory, open_host_memory
from ._naming import ChunkNaming
from ._rows import Answer
from ._settings import SpecSettings, hit_sources

_log = logging.getLogger("vllm.offload")

_RESULTS: Final = {
    Answer.HERE: LookupResult.HIT,
    Answer.COMING: LookupResult.HIT_PENDING,
    Answer.ASKED: LookupResult.RETRY,
    Answer.MISSING: LookupResult.MISS,
}


_ONLY_WORKERS: Final[set[str]] = set()
"""The engines whose only worker is in this process."""


class Places(BlockIDsLoadStoreSpec):
    """Places in host memory, which vLLM carries from scheduler to workers.

    Args:
        places: a row each, or a number below zero.
        in_place: addresses of the latter. None leave this process.
    """

    def __init__(self, places: list[int], in_place: InPlace = NOWHERE) -> None:
        super().__init__(places)
        self.in_place = in_place


@guarded({"get_manager": PASSES, "get_worker": PASSES}, _log)
class OffloadSpec(OffloadingSpec):
    """Host memory with any tiers behind it; see docs/how-to/vllm.md."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._part_bytes: int = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        self._row_bytes: int = self._part_bytes * config.parallel.world_size
        if config.canonical_layout:
            raise ValueError("OffloadSpec keeps the layout of the workers: canonical_layout must be off")
        self._settings = SpecSettings.read(config.extra_config, self._row_bytes)

    def get_manager(self) -> OffloadingManager:
        """Return the manager, which runs in the scheduler."""
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the part that runs in a worker."""
        rows, rank = self._settings.cpu_bytes_to_use // self._row_bytes, self.config.parallel.rank
        arena = Arena(self.config.engine_id, rows, self._row_bytes, rank, huge_pages=self._settings.huge_pages)
        return RowWorker(arena, self._part_bytes, kv_caches, self.config)

    @cached_property
    def _manager(self) -> HostManager:
        name = self.config.engine_id
        memory = open_host_memory(
            name, self._row_bytes, self._naming, self._settings, in_place=lambda: name in _ONLY_WORKERS
        )
        return HostManager(memory, self.config, self._settings)

    @property
    def _naming(self) -> ChunkNaming:
        config, parallel, settings = self.config, self.config.parallel, self._settings
        ranks = f"{parallel.tp_size}x{parallel.pp_size}x{parallel.pcp_size}x{parallel.dcp_size}"
        kernels = kernel_text(config.model.dtype)
        groups = ";".join(f"{group.tokens_per_block}:{','.join(group.layer_names)}" for group in config.groups)
        return ChunkNaming(
            model=weights_text(config.model.name, version=settings.weights_version, check=settings.weights_check),
            dtype=config.model.dtype,
            layout=f"rows/{config.kv_cache_layout}{kernels}/{ranks}/{config.cache.blocks_per_chunk}x{self._part_bytes}/{groups}",
            tenant=settings.tenant,
            name=config.model.name,
        )


def _lose_track(manager: HostManager, *args: Any) -> None:
    manager.memory.has_lost_track = True


def _end_request(manager: HostManager, req_context: ReqContext) -> None:
    manager.memory.has_lost_track = True
    manager.memory.table.end(req_context.req_id)


def _let_go(manager: HostManager, keys: Collection[Any], req_context: ReqContext) -> None:
    manager.memory.table.loaded(req_context.req_id, map(bytes, keys))


def _not_written(manager: HostManager, keys: Collection[Any], *args: Any, **more: Any) -> None:
    manager.memory.not_written([bytes(key) for key in keys])


def _switch_off(manager: HostManager) -> None:
    manager._is_off = True


_MANAGER_HOOKS: Final = {
    "on_new_request": Hook(lambda *args: RequestOffloadingContext()),
    "on_request_finished": Hook(nothing, _end_request),
    "on_schedule_end": Hook(nothing, _lose_track),
    "lookup": Hook(lambda *args: LookupResult.MISS, _lose_track),
    "get_load_source": Hook(lambda *args: CacheHitSource.HOST),
    # A hit was reported to vLLM, which cannot be withdrawn: wrong bytes would be worse than the end of vLLM.
    "prepare_load": PASSES,
    "complete_load": Hook(nothing, _let_go),
    "touch": NOTHING,
    "prepare_store": Hook(nothing, _lose_track),
    "complete_store": Hook(nothing, _not_written),
    "stored": NOTHING,
    "removed": NOTHING,
    "take_events": Hook(lambda *args: []),
    "reset_cache": Hook(nothing, _switch_off),
    "shutdown": NOTHING,
}


@guarded(_MANAGER_HOOKS, _log)
class HostManager(OffloadingManager):
    """vLLM's manager, over the rows of host memory."""

    def __init__(self, memory: HostMemory, config: OffloadingConfig, settings: SpecSettings) -> None:
        self.memory = memory
        self._hit_sources = {"": CacheHitSource.HOST}  # of a row that no tier was asked for
        for name, source in hit_sources(settings.engine_config()).items():
            self._hit_sources[name] = CacheHitSource(source)
        self._events: list[OffloadingEvent] = []
        self._is_off = False  # switched off if chunks from before a reset could be found
        if config.enable_kv_cache_events:
            memory.table.pool.watch_keys(self)

    # --- requests -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request."""
        self.memory.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request."""
        self.memory.end(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End the planning of a step."""
        self.memory.planned(context.preempted_req_ids, context.new_req_ids)
        self.memory.arena.unlink()  # the workers have opened it

    # --- lookups --------------------------------------------------------------------------------------------------

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        """Return the state of a chunk.

        A hit stays one until it is loaded, or the request has ended.
        """
        if self._is_off:
            return LookupResult.MISS
        position = req_context.get_offload_key_position(key) or 0
        return _RESULTS[self.memory.where(req_context.req_id, bytes(key), position)]

    def get_load_source(self, key: Any, req_context: ReqContext) -> CacheHitSource:
        """Return a hit's source before it came into host memory.

        It is for this request, and for vLLM's metrics.
        """
        return self._hit_sources[self.memory.source(req_context.req_id, bytes(key))]

    def prepare_load(self, keys: Collection[Any], req_context: ReqContext) -> Places:
        """Return the places of hits."""
        places = self.memory.load(req_context.req_id, [bytes(key) for key in keys])
        return Places(places, self.memory.table.placed.where(places))

    def complete_load(self, keys: Collection[Any], req_context: ReqContext) -> None:
        """Release chunks that the workers have loaded."""
        self.memory.loaded(req_context.req_id, map(bytes, keys))

    def touch(self, keys: Collection[Any], req_context: ReqContext) -> None:
        """Mark chunks as used."""
        self.memory.table.use(map(bytes, keys))

    # --- stores ---------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[Any], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Return rows for chunks that are not there, while there is room."""
        if self._is_off:
            return None
        taken = self.memory.take_for_store([bytes(key) for key in keys], req_context.req_id)
        if taken is None:
            return None
        stored, rows, evicted = taken
        try:
            return PrepareStoreOutput(keys_to_store=stored, store_spec=Places(rows), evicted_keys=evicted)
        except BaseException:
            self.memory.not_written(stored)
            raise

    def complete_store(self, keys: Collection[Any], req_context: ReqContext, success: bool = True) -> None:
        """Record chunks that the workers have written."""
        self.memory.stored(map(bytes, keys), success=success)

    # --- events and the end ---------------------------------------------------------------------------------------

    def stored(self, keys: Any) -> None:
        """Record keys that lie in rows now (as a watcher)."""
        self._events.append(OffloadingEvent(list(keys), Medium.CPU, removed=False))

    def removed(self, keys: Any) -> None:
        """Record keys that lie in no row any more (as a watcher)."""
        self._events.append(OffloadingEvent(list(keys), Medium.CPU, removed=True))

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the changes in host memory since the last call."""
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Make all stored chunks unfindable for this instance."""
        self.memory.reset()

    def shutdown(self) -> None:
        """Wait for running stores, and close the engine."""
        self.memory.close()
        _log.info("offload, host memory: %s", self.memory.counts)


def _fail_store(worker: RowWorker, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any, **more: Any) -> None:
    worker._copies.fail_store(job_id, dst_spec.block_ids.tolist())


def _distrust(worker: RowWorker, job_ids: set[int]) -> None:
    worker._copies.distrust(job_ids)


_WORKER_HOOKS: Final = {
    # vLLM asserts that a job succeeds. A store that fails is known by the marks of its rows.
    "submit_store": Hook(lambda *args, **more: True, _fail_store),
    # A failed load must not be taken for a successful one: vLLM ends.
    "submit_load": Hook(lambda *args, **more: False),
    "get_finished": Hook(lambda *args: []),
    "wait": Hook(nothing, _distrust),
    "shutdown": NOTHING,
}


@guarded(_WORKER_HOOKS, _log)
class RowWorker(OffloadingWorker):
    """vLLM's worker, over its part of the rows.

    Raises:
        ValueError: vLLM passes only a part of a block, or more than the scheduler expects.
    """

    def __init__(self, arena: Arena, part_bytes: int, kv_caches: CanonicalKVCaches, config: OffloadingConfig) -> None:
        # With heads outside of blocks, vLLM 0.32 takes the first head of the first layer for the whole block.
        handed_over = sum(one.page_size_bytes for one in kv_caches.tensors)
        if config.kv_cache_layout == "LHBNC" and handed_over < config.worker_kv_bytes_per_block:
            raise ValueError(
                "in layout LHBNC vLLM passes only the first head of the first layer to OffloadSpec, which is "
                f"{handed_over} of {config.worker_kv_bytes_per_block} bytes of each block: use OffloadConnector, which takes "
                "this layout, or set VLLM_KV_CACHE_LAYOUT to LBHNC"
            )
        groups = [
            ChunkSource(
                [
                    GroupCaches(
                        {str(at): kv_caches.tensors[at].tensor for at in sorted({ref.tensor_idx for ref in refs})},
                        kv_caches.tensors[0].tensor.shape[0],
                        config.cache.blocks_per_chunk,
                    )
                ]
            )
            for refs in kv_caches.group_data_refs
        ]
        widest = max(group.block_bytes for group in groups)
        if widest > part_bytes:
            raise ValueError(f"a chunk of this worker has {widest} bytes, but the scheduler expects {part_bytes}")
        on_device = kv_caches.tensors[0].tensor.device.type == "cuda"
        self._arena = arena
        self._engine_id = config.engine_id
        if config.parallel.world_size == 1:
            _ONLY_WORKERS.add(config.engine_id)
        offset = config.parallel.rank * part_bytes
        self._copies = RowCopies(arena, offset, groups, _started_on_device if on_device else tuple)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any, **more: Any) -> bool:
        """Begin to copy blocks into rows."""
        rows = dst_spec.block_ids.tolist()
        self._copies.store(job_id, src_spec.block_ids.tolist(), src_spec.group_sizes, src_spec.block_indices, rows)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, **more: Any) -> bool:
        """Begin to copy places into blocks."""
        places, blocks = src_spec.block_ids.tolist(), dst_spec.block_ids.tolist()
        sizes, firsts = dst_spec.group_sizes, dst_spec.block_indices
        self._copies.load(job_id, blocks, sizes, firsts, places, src_spec.in_place)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the copies that are over."""
        # Without a forward pass vLLM would return at once, and keep the interpreter from the threads that copy.
        idle = is_forward_context_available() and get_forward_context().attn_metadata is None
        ended = self._copies.finished(idle=idle)
        try:
            return [self._result(copied) for copied in ended]
        except BaseException:
            self._copies.ended[:0] = ended
            raise

    @staticmethod
    def _result(copied: Copied) -> TransferResult:
        if copied.error is not None:
            _log.error("copy %d from host memory to the cache has failed: %r", copied.job_id, copied.error)
        return TransferResult(copied.job_id, copied.error is None, copied.nbytes, copied.seconds)

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these copies are over."""
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        """End the running copies."""
        _ONLY_WORKERS.discard(self._engine_id)
        self._copies.close()
        self._arena.unlink()


def _started_on_device() -> Sequence[Any]:
    """Return an event for the end of this thread's stream's work."""
    return [record_event()]
