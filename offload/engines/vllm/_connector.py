"""The connector that vLLM calls, in either role, over the two halves.

Only this module, ``_spec`` and ``_kernels`` import vLLM.

Tried with vLLM 0.32.0. vLLM makes the worker's connector first, registers the cache with it, then makes the scheduler's
and passes it the workers' descriptions of themselves (the handshake): how each names its chunks, and in which process
it is. If that is the scheduler's own process, both halves use one engine; otherwise the scheduler opens one that only
looks up.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ... import from_thread
from ..._errors import DrainUnproven
from ...abc import PreconditionLike
from ...preconditions import NO_WAIT, as_precondition
from .._guard import NOTHING, Hook, guarded, nothing
from .._weights import AdapterWeights, config_text, weights_text
from ._chunks import NoChunks, layout_of_caches
from ._device_events import record_event
from ._kernels import kernel_text
from ._key_events import KeyEvent, KeyEvents
from ._naming import ChunkNaming, Naming
from ._page_kinds import PageKind, WorkerPages, kind_of
from ._plans import StepPlan
from ._requests import BlockGroup, RequestTable
from ._scheduler import Scheduled, SchedulerHalf
from ._settings import SECTION, MaruSettings, Settings, hit_sources
from ._worker import WorkerHalf, check_layout, close_engine

_log = logging.getLogger(
    "vllm.offload"
)  # below vLLM's own logger, so that an operator sees it without any configuration

_WORKERS: Final[dict[str, WorkerHalf]] = {}
"""The workers' halves in this process, by engine id and rank."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's plan, which vLLM carries from scheduler to workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """A worker's description of itself, for the handshake."""

    names: Sequence[Naming]
    chunk_bytes: int
    process: int
    name: str
    weights: str = ""


def _withdraw(connector: OffloadConnector, *args: Any) -> None:
    if connector._worker is not None:
        connector._worker.withdraw()


def _leave_cache(connector: OffloadConnector) -> None:
    if connector._worker is not None:
        connector._worker.leave_cache()


def _end_loads(connector: OffloadConnector, *args: Any, **kwargs: Any) -> None:
    if connector._worker is not None:
        connector._worker.end_loads(connector._plan)


def _forget(connector: OffloadConnector, request: Any, *args: Any) -> None:
    if connector._scheduler is not None:
        connector._scheduler.forget(request.request_id)


def _refuse_load(connector: OffloadConnector, request: Any, blocks: Any, num_external_tokens: int) -> None:
    if connector._scheduler is not None and num_external_tokens:
        connector._scheduler.refuse_load(request.request_id, blocks.get_block_ids())


def _drop(connector: OffloadConnector, output: Any) -> None:
    if connector._scheduler is not None:
        connector._scheduler.drop(output.finished_recving or ())


def _close_all(connector: OffloadConnector) -> None:
    worker = None if connector._worker is None else connector._worker.engine
    for engine in (connector._reader, worker):
        if engine is not None:
            close_engine(engine)


_HOOKS: Final = {
    # A wrong setting ends vLLM's start, with a text that names it. Other faults of a start: nothing is offloaded. A
    # copy without a proven end might write to a block that vLLM gives out, or fall into a capture.
    "register_kv_caches": Hook(nothing, passes=(ValueError, DrainUnproven)),
    "set_xfer_handshake_metadata_pp_aware": Hook(nothing, passes=(ValueError,)),
    # Their memory goes next, so that a running copy has to end here; vLLM must not free it under one that may go on.
    "unregister_kv_caches": Hook(nothing, _leave_cache, passes=(DrainUnproven,)),
    "restore_kv_caches": NOTHING,
    "get_handshake_metadata": NOTHING,
    "handle_preemptions": Hook(nothing, _withdraw),
    "start_load_kv": Hook(nothing, _end_loads),
    "wait_for_layer_load": NOTHING,
    "save_kv_layer": NOTHING,
    "wait_for_save": NOTHING,
    # Finished requests are reported in the next step.
    "get_finished": Hook(lambda *args: (None, set())),
    "get_transfer_results": Hook(lambda *args: KVConnectorTransferResults()),
    "get_block_ids_with_load_errors": Hook(lambda one: set() if one._worker is None else one._worker.failed),
    "on_new_request": Hook(nothing, _forget),
    "get_num_new_matched_tokens": Hook(lambda *args: (0, False), _forget),
    "update_state_after_alloc": Hook(nothing, _refuse_load),
    "get_external_cache_hit_sources": Hook(lambda *args: {}),
    # Loads are planned in the next step.
    "build_connector_meta": Hook(lambda *args: StepMetadata(StepPlan(all_overwritten=True))),
    "update_connector_output": Hook(nothing, _drop),
    "request_finished_all_groups": Hook(lambda *args: (False, None), _forget),
    "reset_cache": Hook(lambda *args: False),
    "take_events": Hook(lambda *args: []),
    "shutdown": Hook(nothing, _close_all),
}


@guarded(_HOOKS, _log)
class OffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads into the tiers of an ``engine`` table; see docs/how-to/vllm.md."""

    settings_type: ClassVar[type[Settings] | type[MaruSettings]] = Settings

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _check_parallel(vllm_config.parallel_config)
        groups = kv_cache_config.kv_cache_groups
        self._groups: list[BlockGroup] = [_block_group(group) for group in groups]
        sizes = [group.block_size for group in self._groups]
        self._hash_tokens: int = getattr(kv_cache_config, "hash_block_size", None) or math.gcd(*sizes)
        aligned = math.lcm(*sizes)  # tokens that are whole blocks in every group
        aligned_bytes = sum(aligned // group.kv_cache_spec.block_size * _block_bytes(group) for group in groups)
        extra = self._kv_transfer_config.kv_connector_extra_config
        layers = sum(len(group.layer_names) for group in groups)
        self._settings: Settings = self.settings_type.read(extra, aligned, aligned_bytes, layers)
        workers = vllm_config.parallel_config.world_size
        self._pages: PageKind = kind_of(self._settings, self._groups, self._hash_tokens, workers)
        self._adapters = AdapterWeights(self._settings.weights_check)
        self._hit_sources: dict[str, str] = hit_sources(self._settings.engine_config())
        self._scheduler: SchedulerHalf | None = None
        self._reader: from_thread.Engine | None = None
        self._worker: WorkerHalf | None = None
        self._facts: WorkerFacts | None = None
        self._events: KeyEvents | None = None
        if role is KVConnectorRole.SCHEDULER and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # A block that a cache cannot bring is a miss. vLLM's default, which suits the hand-over between prefill and
            # decode, would end the request with an error.
            _log.info("kv_load_failure_policy: recompute, since blocks that cannot be loaded are computed")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped is a later miss, no error."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return true: before the cache goes, its copies are ended.

        vLLM asks from 0.33 on.
        """
        return True

    # --- the worker's half ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the engine over vLLM's cache."""
        n_blocks, chunk_tokens = self._kv_cache_config.num_blocks, self._settings.chunk_tokens
        caches = [
            {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
            for group in self._kv_cache_config.kv_cache_groups
        ]
        naming = self._naming(layout_of_caches(caches, n_blocks, chunk_tokens))
        pages = self._pages.of_worker(caches, n_blocks, naming)  # all blocks are free: no request has come yet
        engine = from_thread.open_engine(pages.source, self._settings.engine_config(), when_full="drop").start()
        try:
            self._open_worker(kv_caches, engine, pages, naming)
        except BaseException:
            self._worker = self._facts = None
            close_engine(engine)
            raise

    def _open_worker(
        self, kv_caches: dict[str, torch.Tensor], engine: from_thread.Engine, pages: WorkerPages, naming: ChunkNaming
    ) -> None:
        on_device = next(iter(kv_caches.values())).device.type == "cuda"
        computed = _forward_pass if on_device else _no_wait
        self._worker = WorkerHalf(
            engine,
            pages.source,
            pages.naming,
            lookup_timeout=self._settings.lookup_timeout,
            load_timeout=self._settings.load_timeout,
            computed=computed,
            tenant=self._settings.tenant,
            room_knob=self.settings_type.room_knob,
        )
        name = f"{self._kv_transfer_config.engine_id}/{naming.rank}"
        _WORKERS[name] = self._worker
        self._facts = WorkerFacts(pages.parts, pages.source.block_bytes, os.getpid(), name, naming.model)
        if pages.canary is not None:
            check_layout(engine, pages.canary, naming, computed())

    def unregister_kv_caches(self) -> None:
        """Stop using the cache before sleep. Idempotent.

        vLLM calls it from 0.33 on.
        """
        if self._worker is not None:
            self._worker.leave_cache()

    def restore_kv_caches(self) -> None:
        """Do nothing after sleep: vLLM's cache is empty.

        It is at the same addresses.
        """

    def _naming(self, layout: str) -> ChunkNaming:
        model, parallel, settings = self._vllm_config.model_config, self._vllm_config.parallel_config, self._settings
        # The name of a commit in the configuration of a model that comes from the hub.
        commit = getattr(model.hf_config, "_commit_hash", None) or ""
        weights = weights_text(
            model.model,
            revision=model.revision or "",
            version=settings.weights_version,
            check=settings.weights_check,
            commit=commit,
        )
        ranks = f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}"
        if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            ranks += f"x{parallel.prefill_context_parallel_size}"
        # From these files, but computed differently: with scaled positions, for example.
        configs = {id(one): one.to_dict() for one in (model.hf_config, model.hf_text_config)}
        computed = f"{model.quantization or ''}{config_text(*configs.values(), tokens=model.max_model_len)}"
        return ChunkNaming(
            model=f"{weights}/{computed}",
            dtype=f"{model.dtype}/{self._vllm_config.cache_config.cache_dtype}",
            layout=f"{self._kv_cache_config.kv_cache_layout or ''}{kernel_text(model.dtype)}/{ranks}/{layout}",
            rank=parallel.rank,
            tenant=settings.tenant,
            name=f"{model.model}/{computed}",
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the worker's data for the scheduler's half."""
        return self._facts

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """End the reads of blocks that are about to be overwritten."""
        if self._worker is not None:
            self._worker.protect(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        if self._worker is not None:
            self._worker.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are stored together."""

    def wait_for_save(self) -> None:
        """Begin the stores of this step, after the forward pass."""
        if self._worker is not None:
            self._worker.store(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads are over.

        Blocks that are being stored are not held back, but watched; see rule 3.
        """
        if self._worker is None:
            return None, None
        self._worker.finished(frozenset(finished_req_ids))
        return None, self._worker.received(frozenset(finished_req_ids))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads are over, and the failed ones.

        Those have to be computed from the start.

        With several groups vLLM does not accept single failed blocks: it raises.
        """
        if self._worker is None:
            return KVConnectorTransferResults()
        self._worker.finished(frozenset(finished_req_ids))
        received, failed = self._worker.results(frozenset(finished_req_ids))
        return KVConnectorTransferResults(
            finished_recving=received, failed_recving=failed if len(self._groups) > 1 else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded and must be computed.

        If there is one group, the others are kept.
        """
        failed: set[int] = set()
        if self._worker is not None:
            # Nothing is called here: if it failed, vLLM would take these blocks for loaded.
            failed, self._worker.failed = self._worker.failed, failed
        return failed if len(self._groups) == 1 else set()

    @property
    def _plan(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata().plan
        return plan

    # --- the scheduler's half -------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], WorkerFacts]) -> None:
        """Open the scheduler's lookup engine, after the workers have opened theirs."""
        workers = [facts for _, facts in sorted(metadata.items())]
        if len(workers) < self._vllm_config.parallel_config.world_size:
            # Without a part of one rank nothing could be loaded, and vLLM would wait for that rank for ever.
            _log.error("nothing is offloaded: only %d workers have opened their tiers", len(workers))
            return
        first = workers[0]
        different = sorted({facts.weights for facts in workers})
        if len(different) > 1:
            raise ValueError(
                f"the workers have different weights, and would share no chunk: {', '.join(different)}. Give all hosts the "
                f"same checkpoint, or set {SECTION}.weights_version"
            )
        if first.process == os.getpid():
            worker = _WORKERS[first.name]
            engine = worker.engine
            worker.events = self._events = self._watched(engine)
        else:
            source: Any = NoChunks(first.chunk_bytes)
            engine = self._reader = from_thread.open_engine(source, self._settings.reader_config()).start()
        self._scheduler = SchedulerHalf(
            engine,
            [naming for facts in workers for naming in facts.names],
            RequestTable(self._groups, self._settings.chunk_tokens, self._hash_tokens),
            lookup_timeout=self._settings.lookup_timeout,
            stores=self._kv_transfer_config.is_kv_producer,
            loads=self._kv_transfer_config.is_kv_consumer,
            tenant=self._settings.tenant,
            version_file=self._settings.weights_version_file,
        )

    def _watched(self, engine: from_thread.Engine) -> KeyEvents | None:
        """Watch the keys in this process's worker's tiers, for vLLM's events.

        Returns nothing if vLLM publishes no events. Workers in other processes are not watched: nobody takes their keys.
        """
        config = self._vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events or not self._pages.names_blocks:
            return None
        events = KeyEvents(threading.Lock())
        told = engine.watch_keys(events.watcher)
        untold = sorted(set(self._settings.tiers) - set(told))
        if untold:
            _log.info("KV events cover %s, but not %s, which keep no record of keys", told or "no tier", untold)
        return events

    def on_new_request(self, request: Any) -> None:
        """Begin the lookup of a request."""
        if self._scheduler is not None:
            hashes, adapter = self._pages.hashes(request), self._adapter(request)
            self._scheduler.added(request.request_id, hashes, request.num_tokens, adapter)

    def _adapter(self, request: Any) -> str:
        """Return the identity of the adapter of a request.

        Empty if it has none.
        """
        lora = request.lora_request
        if lora is None:
            return ""
        return self._adapters.text(lora.lora_int_id, lora.lora_name, lora.lora_path, is_replaced=lora.load_inplace)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of loadable tokens after those computed already."""
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched(
            request.request_id,
            self._pages.hashes(request),
            request.num_tokens,
            num_computed_tokens,
            ""
            if request.lora_request is None
            else self._scheduler.adapter_of(request.request_id) or self._adapter(request),
        )
        # Never within the step: vLLM 0.32 counts the blocks of such a load as cached before their bytes are there. If the load
        # fails and the request is aborted, the next request with this prefix would read blocks that were never loaded.
        return matched, bool(matched)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks that a request got."""
        if self._scheduler is not None:
            self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return the number of tokens to load, by kind of tier.

        It is for vLLM's metrics.
        """
        found: dict[CacheHitSource, int] = {}
        if self._scheduler is not None:
            for tier, tokens in self._scheduler.sources(request.request_id, num_external_tokens).items():
                source = CacheHitSource(self._hit_sources[tier])
                found[source] = found.get(source, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Make the workers' plan of this step."""
        if self._scheduler is None:
            return StepMetadata()
        return StepMetadata(self._scheduler.plan(_scheduled(scheduler_output, self._groups)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' results of a step."""
        received = connector_output.finished_recving
        if self._scheduler is not None and received:
            blocks, requests = connector_output.invalid_block_ids, connector_output.failed_recving
            self._scheduler.received(sorted(received), frozenset(blocks), frozenset(requests))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request.

        Its blocks may be freed at once; see rule 3.
        """
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id, request.status.name == "FINISHED_ABORTED")
        return False, None

    def reset_cache(self) -> bool | None:
        """Make this engine find nothing that was stored until now.

        Other engines keep their stored blocks. If names have no place for a generation, as those of published pages, it
        returns false.
        """
        if self._scheduler is None or not self._pages.has_generations:
            return False
        self._scheduler.reset()
        if self._events is not None:
            self._events.reset()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the changes in the worker's tiers since the last call.

        The worker must be in this process.
        """
        return [] if self._events is None else [self._event(one) for one in self._events.take()]

    def _event(self, event: KeyEvent) -> KVCacheEvent:
        hashes = [maybe_convert_block_hash(one) for one in event.hashes]
        if not event.stored:
            return BlockRemoved(block_hashes=hashes, medium=event.medium)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=self._settings.chunk_tokens,
            lora_id=None,
            medium=event.medium,
            lora_name=None,
        )

    # --- both -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for running stores, and close the engine."""
        if self._scheduler is not None:
            self._scheduler.close()
            _log.info("offload, scheduler: %s", self._scheduler.counts)
        if self._reader is not None:
            close_engine(self._reader)
        if self._worker is not None and self._facts is not None:
            _WORKERS.pop(self._facts.name, None)
            self._worker.close()
            _log.info("offload, worker: %s", self._worker.counts)


class MaruKVConnector(OffloadConnector):
    """Offloads into the page store, with the published parameters; see docs/how-to/vllm.md."""

    settings_type: ClassVar[type[Settings] | type[MaruSettings]] = MaruSettings


def _check_parallel(parallel: Any) -> None:
    """Refuse blocks with the tokens of one rank only.

    A chunk would have other tokens than its key stands for.

    Raises:
        ValueError: decode context parallelism is on.
    """
    ranks = getattr(parallel, "decode_context_parallel_size", 1)
    if ranks > 1:
        raise ValueError(
            f"decode_context_parallel_size = {ranks}: must be 1 with this connector; use vLLM's OffloadingConnector with "
            "OffloadSpec"
        )


def _block_group(group: Any) -> BlockGroup:
    """Return the scheduler half's description of a group of KV caches.

    Raises:
        ValueError: its blocks are not those of tokens, one after the other, as with a state of Mamba.
    """
    spec = group.kv_cache_spec
    kind = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    strange = group.host_resident or not group.enable_kv_transfer or isinstance(kind, (RSWASpec, HiddenStateCacheSpec))
    if isinstance(kind, SlidingWindowSpec) and not strange:
        return BlockGroup(spec.block_size, kind.sliding_window + kind.extra_retained_tokens)
    if isinstance(kind, FullAttentionSpec) and not strange:
        return BlockGroup(spec.block_size)
    raise ValueError(
        f"a group of KV caches of {type(kind).__name__} is not supported: use vLLM's OffloadingConnector with OffloadSpec"
    )


def _block_bytes(group: Any) -> int:
    """Return the bytes of a block in all layers of a group."""
    spec = group.kv_cache_spec
    n: int = spec.page_size_bytes
    return n if isinstance(spec, UniformTypeKVCacheSpecs) else n * len(group.layer_names)


def _scheduled(output: Any, groups: Sequence[BlockGroup]) -> Scheduled:
    """Return the decisions of vLLM's scheduler."""
    computed: dict[str, int] = {}
    overwritten: set[int] = set()
    for new in output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        for group, blocks in zip(groups, new.block_ids, strict=True):
            overwritten.update(blocks[new.num_computed_tokens // group.block_size :])
    cached = output.scheduled_cached_reqs
    for request_id, before, given in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        computed[request_id] = before + output.num_scheduled_tokens[request_id]
        if given is not None:  # for a resumed request these are all its blocks, and the first hold its earlier tokens
            had = before if request_id in cached.resumed_req_ids else 0
            for group, blocks in zip(groups, given, strict=True):
                overwritten.update(blocks[had // group.block_size :])
    state = output.kv_connector_block_state
    return Scheduled(
        computed=computed,
        blocks_of=state.get_block_ids,
        overwritten=frozenset(overwritten),
        cancelled=frozenset(output.preempted_req_ids or ()),
    )


def _no_wait() -> PreconditionLike:
    """Return a precondition that holds: work in host memory is over."""
    return NO_WAIT


def _forward_pass() -> PreconditionLike:
    """Return a precondition for the end of this thread's stream's work.

    One for all stores or loads of a step, so that they share one wait.
    """
    return as_precondition(record_event())
