"""vLLM sees no error and no wrong byte, whatever is raised in a function below the hooks of its connector and OffloadSpec."""

from __future__ import annotations

import time
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from backends.memory import MemoryTier
from offload import from_thread
from offload.engines._guard import GUARD_ATTRIBUTE
from offload.engines.vllm import OffloadConnector
from offload.engines.vllm._page_kinds import ChunkPages
from offload.engines.vllm._requests import BlockGroup, RequestTable
from offload.engines.vllm._scheduler import SchedulerHalf
from offload.engines.vllm._settings import Settings
from offload.engines.vllm._spec import HostManager, OffloadSpec, RowWorker
from offload.engines.vllm._worker import WorkerHalf
from tests.engines.raising import ERRORS, raise_in_call
from tests.engines.test_vllm_halves import (
    BLOCK,
    BLOCKS,
    CHUNK,
    NAMING,
    SIZE,
    SOON,
    blocks_from,
    content,
    hashes_of,
    new_cache,
)
from tests.engines.test_vllm_host_memory import bytes_of, disk, opened

TOKENS = 256
NONE = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())


@pytest.mark.parametrize("adapter", [OffloadConnector, HostManager, RowWorker, OffloadSpec])
def test_each_public_method_is_guarded(adapter: type):
    functions = {
        name: one for name, one in vars(adapter).items() if isinstance(one, FunctionType) and not name.startswith("_")
    }
    assert functions
    assert all(hasattr(one, GUARD_ATTRIBUTE) for one in functions.values())


class Connector:
    """An instance of vLLM: what it calls in a step, and what it makes of the answers."""

    def __init__(self, engine: from_thread.Engine, source: Any, cache: torch.Tensor) -> None:
        face = self.face = OffloadConnector.__new__(OffloadConnector)
        face._connector_metadata = None
        face._groups, face._events, face._reader, face._facts = [BlockGroup(BLOCK)], None, None, None
        face._hit_sources = {}
        face._pages = ChunkPages(face._groups, CHUNK)
        face._settings = Settings()
        face._worker = WorkerHalf(engine, source, NAMING, lookup_timeout=SOON, load_timeout=SOON, room_knob="")
        table = RequestTable(face._groups, CHUNK, BLOCK)
        face._scheduler = SchedulerHalf(engine, [NAMING], table, lookup_timeout=SOON)
        self.cache = cache
        self.blocks: dict[str, list[int]] = {}

    def request(self, name: str, prompt: str) -> Any:
        return SimpleNamespace(
            request_id=name,
            block_hashes=hashes_of(prompt, TOKENS),
            num_tokens=TOKENS,
            lora_request=None,
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )

    def step(self, new: str = "", computed: int = 0, forward: str = "", finished: frozenset[str] = frozenset()) -> Any:
        started = (
            [SimpleNamespace(req_id=new, num_computed_tokens=computed, block_ids=[self.blocks[new]])] if new else []
        )
        meta = self.face.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=started,
                scheduled_cached_reqs=NONE,
                num_scheduled_tokens={new: TOKENS - computed},
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: [self.blocks[name]]),
                preempted_req_ids=set(),
            )
        )
        assert isinstance(meta, KVConnectorMetadata)
        self.face._connector_metadata = meta
        self.face.handle_preemptions(meta)
        if forward:
            for at, block in list(enumerate(self.blocks[new]))[computed // BLOCK :]:
                self.cache[:, block] = content(forward, at)
        self.face.start_load_kv(None)
        self.face.wait_for_save()
        results = self.face.get_transfer_results(set(finished))
        lost = self.face.get_block_ids_with_load_errors()
        output = SimpleNamespace(
            finished_recving=results.finished_recving, invalid_block_ids=lost, failed_recving=results.failed_recving
        )
        self.face.update_connector_output(output)
        return output

    def run(self, name: str, prompt: str, blocks: list[int]) -> int:
        """Run a request as vLLM does. Returns how many tokens it took from the cache."""
        request, self.blocks[name] = self.request(name, prompt), blocks
        self.face.on_new_request(request)
        deadline = time.monotonic() + 20
        while True:
            tokens, is_async = self.face.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                break
            assert time.monotonic() < deadline, "vLLM asks for ever"
            self.step()
        given = SimpleNamespace(get_block_ids=lambda: [blocks])
        self.face.update_state_after_alloc(request, given, tokens)
        computed, lost = tokens, set()
        while is_async:
            output = self.step()
            lost |= output.invalid_block_ids
            if name in (output.finished_recving or ()):
                break
            assert time.monotonic() < deadline, "vLLM waits for ever"
        if lost & set(blocks):
            computed = min(at for at, block in enumerate(blocks) if block in lost) * BLOCK
        self.step(new=name, computed=computed, forward=prompt)
        for at, block in enumerate(blocks):
            assert (self.cache[:, block] == content(prompt, at)).all(), f"block {at} of {name}"
        self.face.request_finished_all_groups(request, (blocks,))
        self.step(finished=frozenset([name]))
        return computed


@pytest.mark.parametrize("error", ERRORS)
def test_vllm_goes_on_with_right_bytes(error: type[BaseException]):
    """Every prompt is stored by one request and wanted by the next, into blocks that an earlier store may still read."""
    cache, source = new_cache()
    with from_thread.open_engine(source, [MemoryTier(2048 * SIZE, SIZE)], when_full="drop") as engine:
        one = Connector(engine, source, cache)
        for n in range(400):
            where = []
            for request in range(3):
                with raise_in_call(n, error) as raising:
                    one.run(f"{n}/{request}", f"p{n}", blocks_from(request * 16 % BLOCKS))
                where.append(raising.where)
            if not any(where):
                break
        else:
            raise AssertionError("there is no end of functions")
        assert n > 40
        one.run("last", "prompt", blocks_from(0))
        engine.drain(SOON)
        assert one.run("and again", "prompt", blocks_from(16)) == TOKENS - CHUNK
        assert not one.face._scheduler._loading and not one.face._worker._loads
        one.face._scheduler.close()
        assert engine.statistics().unreleased_hits == 0
        engine.drain(SOON)
        assert not source._chunks


def test_decode_context_parallelism_is_refused_by_its_option():
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=2), kv_transfer_config=SimpleNamespace()
    )
    groups = SimpleNamespace(kv_cache_groups=[])
    with pytest.raises(ValueError, match="decode_context_parallel_size = 2: must be 1"):
        OffloadConnector(config, KVConnectorRole.WORKER, groups)


def test_workers_with_other_weights_are_refused():
    face = OffloadConnector.__new__(OffloadConnector)
    face._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    fact = {"names": [], "chunk_bytes": 1, "process": 0, "name": ""}
    facts = {(0, rank): SimpleNamespace(**fact, weights=f"weights {rank}") for rank in range(2)}
    with pytest.raises(ValueError, match="the workers have different weights"):
        face.set_xfer_handshake_metadata_pp_aware(facts)


def test_events_are_recorded_only_beside_a_scheduler_that_takes_them():
    cache, source = new_cache()
    with from_thread.open_engine(source, [MemoryTier(64 * SIZE, SIZE)], when_full="drop") as engine:
        face = Connector(engine, source, cache).face
        face._hash_tokens = BLOCK
        face._settings = Settings({"tiers": {"host": {"type": "memory"}}}, chunk_tokens=CHUNK)
        face._kv_transfer_config = SimpleNamespace(engine_id="events", is_kv_producer=True, is_kv_consumer=True)
        face._vllm_config = SimpleNamespace(
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True), parallel_config=SimpleNamespace(world_size=1)
        )
        pages = SimpleNamespace(source=source, naming=NAMING, parts=[NAMING], canary=None)
        face._open_worker({"layer": cache}, engine, pages, NAMING)
        worker = face._worker
        assert worker.events is None, "the scheduler may be in another process"
        face.set_xfer_handshake_metadata_pp_aware({(0, 0): face.get_handshake_metadata()})
        assert worker.events is not None
        assert worker.events is face._events
        face.shutdown()


@pytest.mark.parametrize("exit_error", [SystemExit, KeyboardInterrupt])
def test_exits_pass_and_leave_nothing_held(exit_error: type[BaseException]):
    cache, source = new_cache()
    with from_thread.open_engine(source, [MemoryTier(2048 * SIZE, SIZE)], when_full="drop") as engine:
        for n in range(0, 200, 7):
            one = Connector(engine, source, cache)
            try:
                with raise_in_call(n, exit_error) as raising:
                    one.run(f"{n}", "p", blocks_from(0))
            except exit_error:
                pass
            else:
                assert not raising.where or raising.where.startswith("_faults"), raising.where
            one.face._scheduler.close()
            one.face._worker.withdraw()
        engine.drain(SOON)
        assert engine.statistics().unreleased_hits == 0
        assert not source._chunks


@pytest.mark.parametrize("error", ERRORS)
def test_spec_goes_on_with_right_bytes(tmp_path: Path, error: type[BaseException]):
    """Chunks are stored by one request and wanted by the next. Only what was promised and is lost may raise."""
    with opened(disk(tmp_path), rows=1024) as memory:  # a fault may cost the rows of what it met
        manager = HostManager.__new__(HostManager)
        manager.memory, manager._events, manager._is_off = memory, [], False
        manager._hit_sources = {"": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        nothing_happened = SimpleNamespace(preempted_req_ids=(), new_req_ids=())

        def run(name: str, keys: list[bytes]) -> int:
            context = SimpleNamespace(req_id=name, get_offload_key_position=keys.index)
            manager.on_new_request(context)
            deadline, found = time.monotonic() + 20, 0
            while True:  # vLLM asks for all of them in one step, and loads in the same
                answers = [manager.lookup(key, context) for key in keys]
                found = next((at for at, one in enumerate(answers) if one is not LookupResult.HIT), len(keys))
                if found == len(keys) or answers[found] is LookupResult.MISS:
                    break
                manager.on_schedule_end(nothing_happened)
                assert time.monotonic() < deadline, f"vLLM asks for ever: {where()}"
            for key in keys[:found]:
                assert isinstance(manager.get_load_source(key, context), CacheHitSource)
            if found:
                try:
                    places = manager.prepare_load(keys[:found], context)
                except error:  # vLLM was told of a hit, and has no word for one that is none
                    assert where()
                else:
                    pages = rows_of(places)
                    assert [bytes(page) for page in pages] == [bytes_of(key) for key in keys[:found]], where()
                    manager.complete_load(keys[:found], context)
            wanted = manager.prepare_store(keys, context)
            if wanted is not None:
                for key, page in zip(wanted.keys_to_store, rows_of(wanted.store_spec), strict=True):
                    page[:] = bytes_of(key)
                manager.complete_store(wanted.keys_to_store, context)
            manager.touch(keys, context)
            manager.on_request_finished(context)
            manager.on_schedule_end(nothing_happened)
            assert isinstance(list(manager.take_events()), list)
            return found

        def rows_of(places: Any) -> list[Any]:
            """As a worker sees them: nothing raises there."""
            return [memory.arena._pages[row] for row in places.block_ids.tolist()]

        def where() -> str:
            return raising.where

        for n in range(400):
            keys = [f"{n}/{at}".encode() for at in range(3)]
            raised = []
            for request in range(3):
                with raise_in_call(n, error) as raising:
                    run(f"{n}/{request}", keys)
                raised.append(raising.where)
            if not any(raised):
                break
        else:
            raise AssertionError("there is no end of functions")
        assert n > 40
        assert run("last", keys) == 3
        memory.engine.drain(SOON)
        manager.on_schedule_end(nothing_happened)
        manager.reset_cache()
        assert run("behind a reset", keys) == 0
