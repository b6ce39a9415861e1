"""The two halves of the vLLM connector over a real engine, driven as vLLM drives them, without vLLM.

``Loop`` is vLLM's part: one step after the other, a cache of torch tensors, and a forward pass that writes what each block
should hold.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from backends import Unproven
from backends.memory import MemoryTier
from backends.testing import FakeTier, PacedTier
from offload import NO_WAIT, BatchConfig, DrainUnproven, EngineConfig, LoadOrRecompute, PipelineConfig, from_thread
from offload.abc import AsyncPolicy
from offload.engines.vllm import _worker
from offload.engines.vllm._chunks import ChunkSource, GroupCaches, NoChunks
from offload.engines.vllm._naming import ChunkNaming
from offload.engines.vllm._plans import LoadPlan, StepPlan
from offload.engines.vllm._requests import BlockGroup, RequestTable, State
from offload.engines.vllm._scheduler import Scheduled, SchedulerHalf
from offload.engines.vllm._settings import MaruSettings
from offload.engines.vllm._worker import WorkerHalf
from tests.engines.test_vllm_host_memory import Waits
from tests.support.maru_processes import eventually

BLOCKS, BLOCK, CHUNK = 64, 16, 64
SOON = 30.0
OF_LOOP = ("lookup_timeout", "load_timeout", "computed", "naming", "version_file")
NAMING = ChunkNaming("model", "float32", "layout")


def hashes_of(prompt: str, tokens: int) -> list[bytes]:
    """Hashes of a prompt's blocks: equal prompts, equal hashes."""
    return [f"{prompt}/{at}".encode().ljust(32) for at in range(tokens // BLOCK)]


def content(prompt: str, block: int) -> float:
    return float(hash((prompt, block)) % 65_521)


class Loop:
    """One instance of vLLM."""

    def __init__(
        self,
        engine: from_thread.Engine,
        source: ChunkSource,
        cache: torch.Tensor,
        naming: ChunkNaming = NAMING,
        **timeouts: Any,
    ) -> None:
        self.cache = cache
        lookup, load = timeouts.get("lookup_timeout", SOON), timeouts.get("load_timeout", SOON)
        computed = timeouts.get("computed", lambda: NO_WAIT)  # by default the forward pass is over when it returns
        self.worker = WorkerHalf(
            engine,
            source,
            naming,
            lookup_timeout=lookup,
            load_timeout=load,
            room_knob=MaruSettings.room_knob,
            computed=computed,
        )
        self.table = RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK)
        version = timeouts.get("version_file", "")
        self.scheduler = SchedulerHalf(engine, [naming], self.table, lookup_timeout=lookup, version_file=version)
        self.received: set[str] = set()
        self.failed: set[int] = set()

    def step(
        self,
        computed: dict[str, int] | None = None,
        blocks: dict[str, Sequence[int]] | None = None,
        *,
        overwritten: Sequence[int] = (),
        cancelled: Sequence[str] = (),
        forward: Callable[[], None] = lambda: None,
        finished: Sequence[str] = (),
    ) -> StepPlan:
        """One step: plan, protect, load, forward pass, store, and what the worker says goes back to the scheduler's half."""
        given = blocks or {}
        plan = self.scheduler.plan(
            Scheduled(computed or {}, lambda request: [given[request]], frozenset(overwritten), frozenset(cancelled))
        )
        self.worker.protect(plan)
        if not plan.idle:
            forward()
        self.worker.load(plan)
        self.worker.store(plan)
        self.worker.finished(frozenset(finished))
        received, failed = self.worker.received(frozenset(finished)), self.worker.failed_blocks()
        self.scheduler.received(sorted(received), frozenset(failed))
        self.received |= received
        self.failed |= failed
        return plan

    def compute(self, request: str, tokens: int, blocks: Sequence[int], start: int = 0) -> None:
        """Run a whole prompt in one step."""

        def forward() -> None:
            for at in range(start, tokens // BLOCK):
                self.cache[:, blocks[at]] = content(request, at)

        self.step({request: tokens}, {request: blocks}, overwritten=blocks[start:], forward=forward)

    def matched(self, request: str, tokens: int, computed: int = 0, name: str = "") -> int:
        """Ask until there is an answer."""
        deadline = time.monotonic() + SOON
        hashes = hashes_of(request, tokens)
        while (found := self.scheduler.matched(name or request, hashes, tokens, computed)) is None:
            assert time.monotonic() < deadline
            self.step()
        return found

    def load(self, request: str, tokens: int, blocks: Sequence[int], computed: int = 0, name: str = "") -> int:
        """Match a prompt, give it blocks, and run empty steps until it has arrived."""
        name = name or request
        found = self.matched(request, tokens, computed, name)
        self.scheduler.allocated(name, [blocks], found)
        deadline = time.monotonic() + SOON
        while found and name not in self.received:
            assert time.monotonic() < deadline
            self.step()
        return found

    def assert_content(self, request: str, blocks: Sequence[int], until: int) -> None:
        for at in range(until // BLOCK):
            assert (self.cache[:, blocks[at]] == content(request, at)).all(), at


def new_cache() -> tuple[torch.Tensor, ChunkSource]:
    """A cache of two layers, and its chunks."""
    cache = torch.zeros(2, BLOCKS, 2, BLOCK, 4)
    layers = {f"layer {at}": cache[at] for at in range(2)}
    return cache, ChunkSource([GroupCaches(layers, BLOCKS, CHUNK // BLOCK)])


@contextmanager
def instance(tier: Any, **options: Any) -> Iterator[Loop]:
    timeouts = {name: options.pop(name) for name in OF_LOOP if name in options}
    cache, source = new_cache()
    tiers = tier if isinstance(tier, EngineConfig) else [tier]
    with from_thread.open_engine(source, tiers, when_full="drop", **options) as engine:
        loop = Loop(engine, source, cache, **timeouts)
        yield loop
        loop.scheduler.close()
        statistics = engine.statistics()
        assert statistics.unreleased_hits == 0, loop.scheduler.counts
        assert not loop.worker._source._chunks


SIZE = 2 * CHUNK * 2 * 4 * 4


def memory(chunks: int = 64) -> MemoryTier:
    return MemoryTier(chunks * SIZE, SIZE)


def blocks_from(start: int, tokens: int = 256) -> list[int]:
    return list(range(start, start + tokens // BLOCK))


# --- the way of a prompt --------------------------------------------------------------------------------------------


def test_what_one_request_has_computed_another_one_loads():
    with instance(memory()) as vllm:
        vllm.scheduler.added("first", hashes_of("p", 256), 256)
        assert vllm.matched("p", 256, name="first") == 0
        vllm.scheduler.allocated("first", [blocks_from(0)], 0)
        vllm.table.records["first"].hashes = hashes_of("p", 256)
        vllm.step(
            {"first": 256},
            {"first": blocks_from(0)},
            overwritten=blocks_from(0),
            forward=lambda: [vllm.cache[:, at].fill_(content("p", at)) for at in range(16)] and None,
        )
        vllm.worker.engine.drain()
        vllm.scheduler.finished("first", aborted=False)
        assert vllm.load("p", 256, blocks_from(32), name="second") == 192  # but the chunk that holds the last token
        vllm.assert_content("p", blocks_from(32), 192)
        assert vllm.failed == set()
        assert vllm.table.records["second"].state is State.ADMITTED
        assert vllm.worker.counts.snapshot()["chunks loaded"] == 3
        assert vllm.scheduler.counts.snapshot()["tokens hit in memorytier"] == 192


def stored(vllm: Loop, prompt: str = "p", tokens: int = 256, blocks: Sequence[int] = ()) -> Sequence[int]:
    """A prompt that was computed, stored, and finished."""
    blocks = blocks or blocks_from(0, tokens)
    vllm.matched(prompt, tokens)
    vllm.scheduler.allocated(prompt, [blocks], 0)
    vllm.compute(prompt, tokens, blocks)
    vllm.worker.engine.drain()
    vllm.scheduler.finished(prompt, aborted=False)
    vllm.step(finished=[prompt])
    return blocks


def test_a_partial_hit_is_loaded_and_completed():
    with instance(memory()) as vllm:
        stored(vllm, tokens=128)
        assert vllm.load("p", 256, blocks_from(32), name="longer") == 128
        vllm.compute("longer", 256, blocks_from(32), start=8)
        vllm.worker.engine.drain()
        assert vllm.worker.counts.snapshot()["chunks stored"] == 4
        assert vllm.matched("p", 320, name="third") == 256


@pytest.mark.parametrize(("finished", "waits"), [((), 1), (("before",), 1), (("second",), 0)])
def test_a_step_that_only_loads_waits_for_it_unless_it_is_given_up(finished: Sequence[str], waits: int):
    with instance(memory()) as vllm:
        stored(vllm)
        arrived = vllm.worker._arrived = Waits()
        vllm.scheduler.allocated("second", [blocks_from(32)], vllm.matched("p", 256, name="second"))
        vllm.step(finished=finished)
        assert arrived.count == waits


def test_what_vllm_has_itself_is_not_written_to():
    with instance(memory()) as vllm:
        stored(vllm)
        vllm.cache[:, 32:37] = -1.0
        assert vllm.load("p", 320, blocks_from(32, 320), computed=80, name="second") == 176
        assert (vllm.cache[:, 32:37] == -1.0).all()
        for at in range(5, 16):
            assert (vllm.cache[:, 32 + at] == content("p", at)).all()


def test_a_chunk_counts_only_if_every_rank_has_it():
    with instance(memory()) as vllm:
        stored(vllm)
        other = ChunkNaming("model", "float32", "layout", rank=1)
        of_two = SchedulerHalf(
            vllm.worker.engine, [NAMING, other], RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK), lookup_timeout=SOON
        )
        assert of_two.matched("x", hashes_of("p", 256), 256, 0) is None
        while (found := of_two.matched("x", hashes_of("p", 256), 256, 0)) is None:
            of_two.plan(Scheduled({}, lambda _: [], frozenset(), frozenset()))
        assert found == 0
        of_two.close()


def test_a_role_that_only_stores_or_only_loads_does_that():
    with instance(memory()) as vllm:
        stored(vllm)
        engine = vllm.worker.engine
        consumer = SchedulerHalf(
            engine, [NAMING], RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK), lookup_timeout=SOON, stores=False
        )
        consumer.added("q", hashes_of("q", 256), 256)
        assert consumer.plan(Scheduled({"q": 256}, lambda _: blocks_from(0), frozenset(), frozenset())).stores == []
        producer = SchedulerHalf(
            engine, [NAMING], RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK), lookup_timeout=SOON, loads=False
        )
        producer.added("p", hashes_of("p", 256), 256)
        assert producer.matched("p", hashes_of("p", 256), 256, 0) == 0
        consumer.close()


def test_a_reset_cache_is_not_found_any_more():
    with instance(memory()) as vllm:
        stored(vllm)
        vllm.scheduler.reset()
        assert vllm.matched("p", 256, name="second") == 0
        stored(vllm, "q")
        assert vllm.load("q", 256, blocks_from(40), name="third") == 192


@pytest.mark.parametrize("preempted", [False, True])
def test_no_chunk_of_a_request_that_outlives_a_reset_is_stored(preempted: bool):
    with instance(memory()) as vllm:
        assert vllm.matched("p", 256) == 0
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 128, blocks_from(0))
        vllm.scheduler.reset()
        if preempted:
            assert vllm.matched("p", 256) == 0
            vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0), 0 if preempted else 8)
        vllm.worker.engine.drain(SOON)
        assert vllm.worker.counts.snapshot()["chunks stored"] == (2 + 4 if preempted else 2)


def test_no_chunk_of_a_load_that_outlives_a_reset_is_stored():
    with instance(memory()) as vllm:
        stored(vllm)
        assert vllm.matched("p", 256, name="second") == 192
        vllm.scheduler.allocated("second", [blocks_from(40)], 192)
        before = vllm.worker.counts.snapshot()["chunks stored"]
        vllm.scheduler.reset()
        deadline = time.monotonic() + SOON
        while "second" not in vllm.received:
            assert time.monotonic() < deadline
            vllm.step()
        vllm.step({"second": 256}, {"second": blocks_from(40)})
        vllm.worker.engine.drain(SOON)
        assert vllm.worker.counts.snapshot()["chunks stored"] == before


@pytest.mark.parametrize("answered", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("prompt", ["p", "missing"])
def test_requests_that_wait_are_looked_up_after_a_reset(prompt: str, answered: bool):
    with instance(memory(), lookup_timeout=1.0) as vllm:
        stored(vllm)
        vllm.scheduler.added("waits", hashes_of(prompt, 256), 256)
        if answered:
            assert vllm.matched(prompt, 256, name="waits") == (192 if prompt == "p" else 0)
        vllm.scheduler.reset()
        stored(vllm, "missing")  # by another request, with the weights after the reset
        assert vllm.matched(prompt, 256, name="waits") == (192 if prompt == "missing" else 0)
        vllm.scheduler.finished("waits", aborted=True)


# --- requests that wait ---------------------------------------------------------------------------------------------

QUEUE = [f"p{at}" for at in range(8)]


def evicting(chunks: int) -> EngineConfig:
    return EngineConfig(tiers={"host": memory(chunks)}, pipeline=PipelineConfig(on_destination_full="evict"))


def full(vllm: Loop) -> None:
    """Fill a tier of 32 chunks with the prompts of a queue, and have longer ones that repeat them arrive."""
    for prompt in QUEUE:
        stored(vllm, prompt)
    for prompt in QUEUE:
        vllm.scheduler.added(f"{prompt} waits", hashes_of(prompt, 320), 320)


def answers(vllm: Loop) -> dict[str, int | None]:
    """Ask for all that wait, as vLLM does in one step, and plan it."""
    asked = {p: vllm.scheduler.matched(f"{p} waits", hashes_of(p, 320), 320, 0) for p in QUEUE}
    vllm.step()
    return asked


def test_requests_that_wait_leave_room_for_stores():
    with instance(evicting(32)) as vllm:
        full(vllm)
        before = vllm.worker.counts.snapshot()["chunks stored"]
        stored(vllm, "other")
        assert vllm.worker.counts.snapshot()["chunks stored"] == before + 4


def test_requests_that_wait_keep_half_of_a_tier_however_often_vllm_asks():
    with instance(evicting(32)) as vllm:
        full(vllm)
        for _ in range(3):
            found = answers(vllm)
            assert [p for p in QUEUE if found[p] is None] == QUEUE[4:]
            held = vllm.worker.engine.statistics().engine.tiers["host"].held_blocks
            assert held == 16


def test_requests_put_off_have_their_hits_when_it_is_their_turn():
    with instance(evicting(32)) as vllm:
        full(vllm)
        assert vllm.scheduler.counts.snapshot()[
            "lookups put off, since requests that wait keep their share of the tiers"
        ]
        for prompt in QUEUE:
            assert vllm.load(prompt, 320, blocks_from(32, 320), name=f"{prompt} waits") == 256
            vllm.scheduler.finished(f"{prompt} waits", aborted=False)


def test_requests_that_vllm_skips_keep_nobody_waiting():
    with instance(evicting(32)) as vllm:
        full(vllm)
        answers(vllm)
        last = QUEUE[-1]
        for _ in range(3):
            found = vllm.scheduler.matched(f"{last} waits", hashes_of(last, 320), 320, 0)
            vllm.step()
        assert found == 256
        assert vllm.load(QUEUE[0], 320, blocks_from(32, 320), name=f"{QUEUE[0]} waits") == 256


def test_prompt_longer_than_its_share_is_looked_up():
    with instance(memory(4)) as vllm:
        stored(vllm)
        assert vllm.load("p", 256, blocks_from(32), name="second") == 192


def test_lookups_without_an_answer_count_as_found():
    tier = FakeTier(32, SIZE)
    with instance(tier, lookup_timeout=0.5) as vllm:
        stored(vllm)

        async def silent(keys: Sequence[bytes]) -> Any:
            await trio.sleep_forever()

        tier.pin = silent  # type: ignore[method-assign]
        asked = vllm.scheduler.counts.snapshot()["chunks asked for"]
        for at in range(20):
            vllm.scheduler.added(f"{at}", hashes_of("p", 256), 256)
        assert vllm.scheduler.counts.snapshot()["chunks asked for"] - asked == 18
        assert vllm.matched("p", 256, name="19") == 0, "each of them ends, and makes room"


def test_waiting_for_one_prompt_keeps_its_blocks_once():
    with instance(memory(8)) as vllm:
        stored(vllm)
        for at in range(20):
            vllm.scheduler.added(f"{at}", hashes_of("p", 256), 256)
        found = [vllm.scheduler.matched(f"{at}", hashes_of("p", 256), 256, 0) for at in range(20)]
        assert found == [192] * 20


# --- rule 3: what is read is not overwritten ------------------------------------------------------------------------


class Gated(FakeTier):
    """A copy into it takes until its gate is open, whoever has given up."""

    def __init__(self) -> None:
        super().__init__(64, SIZE)


def began() -> tuple[Any, threading.Event]:
    class CopyBegan:
        event = threading.Event()

        def xfer_start(self, batch: object) -> None:
            self.event.set()

    return CopyBegan(), CopyBegan.event


def test_trainers_version_shares_after_a_reset(tmp_path: Path):
    """Of two instances that start with different weights, and get the same ones by an update in memory."""
    version, tier = (
        tmp_path / "version",
        {"host": {"type": "file", "directory": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}},
    )
    config = {"tiers": tier, "pipeline": {"on_destination_full": "evict"}}

    def opened(model: str) -> Any:
        naming = ChunkNaming(model, "float32", "layout", name="org/model")
        return instance(EngineConfig.from_mapping(config), naming=naming, version_file=str(version))

    def store(vllm: Loop) -> None:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.worker.engine.drain(SOON)

    with opened("weights 1") as first:
        store(first)
        first.scheduler.reset()
        version.write_text("run 7, step 100")
        assert first.matched("p", 256, name="again") == 0
        first.scheduler.allocated("again", [blocks_from(16)], 0)
        first.step({"again": 256}, {"again": blocks_from(16)}, overwritten=blocks_from(16))
        first.worker.engine.drain(SOON)
    with opened("weights 2") as second:
        assert second.matched("p", 256) == 0, "its own weights, of the start"
        second.scheduler.reset()
        assert second.matched("p", 256, name="updated") == 192
        second.scheduler.reset()
        version.write_text("run 7, step 200")
        assert second.matched("p", 256, name="updated again") == 0


def test_adapters_with_other_weights_share_nothing():
    with instance(memory()) as vllm:
        hashes = hashes_of("p", 256)
        vllm.scheduler.matched("p", hashes, 256, 0, "weights of adapter 1")
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.worker.engine.drain(SOON)
        for adapter, found in (("weights of adapter 1", 192), ("weights of adapter 2", 0), ("", 0)):
            name = f"with {adapter}"
            while (matched := vllm.scheduler.matched(name, hashes, 256, 0, adapter)) is None:
                vllm.step()
            assert matched == found
        vllm.scheduler.close()
        plan = vllm.step()
        assert not plan.loads


def test_a_forward_pass_waits_for_a_copy_that_reads_its_blocks():
    tier = Gated()
    instrument, copying = began()
    gate = tier.faults.gate = trio.Event()
    with instance(tier, instruments=[instrument]) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        assert copying.wait(SOON)
        overwritten = threading.Event()

        def step() -> None:
            vllm.step({"q": 64}, {"q": [1, 2, 3, 4]}, overwritten=[1, 2, 3, 4], forward=overwritten.set)

        vllm.scheduler.added("q", hashes_of("q", 64), 64)
        thread = threading.Thread(target=step)
        thread.start()
        assert not overwritten.wait(0.1)
        vllm.worker.engine.call(gate.set)
        assert overwritten.wait(SOON)
        thread.join(SOON)
        vllm.worker.engine.drain()


def falls_asleep_behind(gate: trio.Event, vllm: Loop) -> None:
    """Check that the cache is left, and overwritten, once a gate is open and not before."""
    asleep = threading.Event()

    def sleep() -> None:
        vllm.worker.leave_cache()
        vllm.cache.zero_()
        asleep.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    assert not asleep.wait(0.1)
    vllm.worker.engine.call(gate.set)
    assert asleep.wait(SOON)
    thread.join(SOON)


def test_before_the_cache_goes_to_sleep_the_copies_that_read_it_are_waited_for():
    tier = Gated()
    instrument, copying = began()
    gate = tier.faults.gate = trio.Event()
    with instance(tier, instruments=[instrument]) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        assert copying.wait(SOON)
        falls_asleep_behind(gate, vllm)
        assert not vllm.worker._stores
        tier.faults.gate = None
        stored(vllm, "q", blocks=blocks_from(20))
        assert vllm.load("q", 256, blocks_from(40), name="awake") == 192
        vllm.assert_content("q", blocks_from(40), 192)


def test_before_the_cache_goes_to_sleep_the_copies_that_write_it_are_ended():
    tier = SlowToLoad()
    with instance(tier) as vllm:
        stored(vllm)
        gate = tier.gate = trio.Event()
        vllm.scheduler.allocated("second", [blocks_from(32)], vllm.matched("p", 256, name="second"))
        vllm.step()
        eventually(lambda: tier.waiting)
        falls_asleep_behind(gate, vllm)
        vllm.step()
        assert vllm.received == {"second"} and vllm.failed == set(blocks_from(32)[:12])
        assert not vllm.cache.any()


def test_a_load_that_has_not_begun_when_the_cache_goes_to_sleep_does_not_begin():
    passes = Passes()
    with instance(memory(), computed=passes.record) as vllm:
        stored(vllm)
        passes.over_at_once = False
        vllm.scheduler.allocated("second", [blocks_from(32)], vllm.matched("p", 256, name="second"))
        vllm.step()
        vllm.worker.leave_cache()
        vllm.cache.zero_()
        passes.events[-1].set()
        vllm.step()
        assert vllm.received == {"second"} and vllm.failed == set(blocks_from(32)[:12])
        assert not vllm.cache.any()


def test_the_cache_does_not_go_to_sleep_under_a_store_without_a_proven_end(monkeypatch):
    tier = Gated()
    instrument, copying = began()
    gate = tier.faults.gate = trio.Event()
    pipeline = PipelineConfig(drain_timeout=0.05)
    config = EngineConfig(tiers={"host": tier}, pipeline=pipeline)
    with instance(config, instruments=[instrument]) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        assert copying.wait(SOON)
        for _ in range(2):  # the second time, when the store has long ended
            with pytest.raises(DrainUnproven):
                vllm.worker.leave_cache()
        vllm.worker.engine.call(gate.set)


def test_a_store_stays_in_the_list_until_its_unproven_end_is_known():
    unproven = []

    class Stores(dict):
        def pop(self, *args):
            unproven.append(vllm.worker._unproven)
            return super().pop(*args)

    tier = FakeTier(64, SIZE)
    tier.faults.error = Unproven("the device does not answer")
    with instance(tier) as vllm:
        vllm.worker._stores = Stores()
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        assert eventually(lambda: unproven)
        assert isinstance(unproven[-1], DrainUnproven)
        with pytest.raises(DrainUnproven):
            vllm.worker.leave_cache()


class Hanging:
    """The end of a load that never comes. A wait for it advances a clock."""

    now = 0.0
    is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        assert seconds is not None
        Hanging.now += seconds
        return False


def test_loads_that_do_not_end_keep_the_cache_awake_no_longer_than_one(monkeypatch):
    with instance(memory()) as vllm:
        monkeypatch.setattr(Hanging, "now", 0.0)
        monkeypatch.setattr(_worker, "time", SimpleNamespace(monotonic=lambda: Hanging.now))
        plan = LoadPlan("p", (), ())
        vllm.worker._loads = {name: _worker._Load(plan, over=Hanging()) for name in ("a", "b", "c")}
        for _ in range(3):  # as the connector's guard does
            with pytest.raises(DrainUnproven):
                vllm.worker.leave_cache()
        vllm.worker._loads = {}
        assert Hanging.now == _worker.LONGEST_END


def test_a_store_that_was_not_copied_yet_is_cancelled_where_its_blocks_are_given_out():
    with instance(memory(), computed=from_thread.Event) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.step({}, overwritten=[3])
        assert not vllm.worker._stores
        assert vllm.worker.counts.snapshot().get("chunks stored", 0) == 0


def test_a_store_may_end_before_its_blocks_are_given_out(monkeypatch):
    """What a window has passed is given out in the next step, before a batch is full."""
    monkeypatch.setattr(_worker, "STORE_GRACE", SOON)
    with instance(memory()) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.step({}, overwritten=[3])
        assert vllm.worker.counts.snapshot()["chunks stored"] == 4


def test_what_is_stored_of_an_aborted_or_preempted_request_is_cancelled():
    for how in ("aborted", "preempted"):
        with instance(memory(), computed=from_thread.Event) as vllm:
            vllm.matched("p", 256)
            vllm.scheduler.allocated("p", [blocks_from(0)], 0)
            vllm.compute("p", 256, blocks_from(0))
            (store,) = vllm.worker._stores
            if how == "aborted":
                vllm.scheduler.finished("p", aborted=True)
                vllm.step(finished=["p"])
            else:
                vllm.step(cancelled=["p"])
            store.cancel(SOON)
            assert store.result(0).status.value == "cancelled"


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_damaged_chunk_is_computed_and_not_used():
    tier = FakeTier(64, SIZE)
    with instance(tier) as vllm:
        stored(vllm)
        tier.damage(NAMING.keys([hashes_of("p", 256)[7]])[0])
        vllm.cache[:, 32:48] = -1.0
        assert vllm.load("p", 256, blocks_from(32), name="second") == 192
        assert vllm.failed == set(range(36, 44))  # from the damaged chunk on
        vllm.assert_content("p", blocks_from(32), 64)
        assert vllm.table.records["second"].state is State.FAILED
        assert vllm.matched("p", 256, name="second") == 0  # not tried again
        vllm.compute("second", 256, blocks_from(32))
        vllm.worker.engine.drain()


def test_a_tier_that_is_broken_is_named_and_nothing_waits_for_it(caplog):
    tier = FakeTier(64, SIZE)
    with instance(tier) as vllm, caplog.at_level(logging.WARNING):
        stored(vllm)

        async def broken(keys: Sequence[bytes]) -> Any:
            raise ConnectionError("the server is gone")

        tier.pin = broken  # type: ignore[method-assign]
        for number in range(3):
            assert vllm.matched("p", 256, name=str(number)) == 0
        counts = vllm.scheduler.counts.snapshot()
        assert counts["lookups without faketier, which is unavailable"] == 3
    assert caplog.text.count("the server is gone") >= 1
    assert len([one for one in caplog.records if "lookups without faketier" in one.message]) == 1


def test_a_tier_that_is_silent_costs_a_request_its_lookup_timeout_and_is_named():
    tier = FakeTier(64, SIZE)
    with instance(tier, lookup_timeout=1.0) as vllm:
        stored(vllm)

        async def silent(keys: Sequence[bytes]) -> Any:
            await trio.sleep_forever()

        tier.pin = silent  # type: ignore[method-assign]
        assert vllm.matched("p", 256, name="second") == 0
        assert vllm.scheduler.counts.snapshot()["lookups without faketier, which is unavailable"] == 1


def test_a_load_out_of_its_time_is_ended_and_computed():
    tier = PacedTier(memory())
    with instance(tier, load_timeout=0.1) as vllm:
        stored(vllm)
        tier.seconds_per_block = math.inf
        assert vllm.load("p", 256, blocks_from(32), name="second") == 192
        assert vllm.failed == set(range(32, 44))
        computed = "chunks not loaded, and computed instead"
        assert vllm.worker.counts.report()["failures"] == {computed: 3}
        assert "took too long" in vllm.worker.counts.report()["last_failures"][computed]


class Passes:
    """What the device is given: each event stands for all that was queued before it."""

    def __init__(self) -> None:
        self.events: list[from_thread.Event] = []
        self.over_at_once = True

    def record(self) -> from_thread.Event:
        self.events.append(event := from_thread.Event())
        if self.over_at_once:
            event.set()
        return event


def test_loads_of_a_step_wait_for_what_the_device_was_given_before():
    passes = Passes()
    with instance(memory(), computed=passes.record) as vllm:
        stored(vllm)
        passes.events.clear()
        passes.over_at_once = False
        found = {name: vllm.matched("p", 256, name=name) for name in ("second", "third")}
        for name, start in (("second", 20), ("third", 40)):
            vllm.scheduler.allocated(name, [blocks_from(start)], found[name])
        assert not passes.events, "steps without a load record nothing"
        vllm.step()
        assert len(passes.events) == 1
        vllm.worker.engine.call(lambda: None)  # the loads have begun
        vllm.cache[:, 20:56] = 0.0  # queued before them: zeroes new blocks
        vllm.step()
        assert not vllm.received
        passes.events[0].set()
        eventually(lambda: vllm.step() and vllm.received == {"second", "third"}, SOON)
        for start in (20, 40):
            vllm.assert_content("p", blocks_from(start), 192)
        assert not vllm.failed and len(passes.events) == 1


def test_a_load_that_waits_for_the_device_is_ended_with_its_request():
    passes = Passes()
    with instance(memory(), computed=passes.record) as vllm:
        stored(vllm)
        passes.over_at_once = False
        vllm.scheduler.allocated("second", [blocks_from(32)], vllm.matched("p", 256, name="second"))
        vllm.step()
        vllm.worker.engine.call(lambda: None)
        vllm.cache[:, 32:44] = -1.0
        vllm.scheduler.finished("second", aborted=True)
        vllm.step(finished=["second"])
        eventually(lambda: vllm.step() and vllm.received == {"second"}, SOON)
        assert (vllm.cache[:, 32:44] == -1.0).all()


def test_what_goes_between_match_and_load_is_computed():
    tier = FakeTier(64, SIZE)
    with instance(tier) as vllm:
        stored(vllm)
        assert vllm.matched("p", 256, name="second") == 192

        async def nothing(lease: Any, destination: Any) -> Any:
            raise OSError("cannot be read")

        tier.load = nothing  # type: ignore[method-assign]
        vllm.scheduler.allocated("second", [blocks_from(32)], 192)
        while "second" not in vllm.received:
            vllm.step()
        assert vllm.failed == set(range(32, 44))


def test_an_engine_that_is_closed_is_a_cache_without_anything():
    with instance(memory()) as vllm:
        stored(vllm)
        assert vllm.matched("p", 256, name="matched before") == 192
        vllm.worker.engine.close()
        assert vllm.matched("p", 256, name="second") == 0
        vllm.scheduler.allocated("matched before", [blocks_from(32)], 192)
        vllm.step()
        assert vllm.received == {"matched before"} and vllm.failed == set(range(32, 44))
        vllm.compute("second", 256, blocks_from(40))
        assert vllm.worker.counts.snapshot()["chunks not stored"] == 4
        vllm.worker.engine.statistics = lambda: type("S", (), {"unreleased_hits": 0})()  # type: ignore[method-assign]


def test_a_full_pool_is_named_with_what_is_to_be_raised(caplog):
    config = PipelineConfig(on_destination_full="fail", batch_config=BatchConfig(min_batch_size=1))
    with instance(FakeTier(2, SIZE), config=config) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", blocks_from(0), 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.worker.engine.drain(SOON)
        assert vllm.worker.counts.snapshot()["chunks not stored"] > 0
    assert any("no room: raise maru_pool_size" in record.getMessage() for record in caplog.records)


def test_too_many_stores_are_dropped_and_counted():
    config = PipelineConfig(budget_blocks=4, batch_config=BatchConfig(max_batch_size=4, min_batch_size=1))
    with instance(memory(), config=config, computed=from_thread.Event) as vllm:
        for number, start in enumerate((0, 16)):
            vllm.matched(f"p{number}", 256)
            vllm.scheduler.allocated(f"p{number}", blocks_from(start), 0)
            vllm.compute(f"p{number}", 256, blocks_from(start))
        assert vllm.worker.counts.snapshot()["chunks dropped, since too many are on their way"] == 4
        vllm.step(overwritten=range(32))


@pytest.mark.parametrize(("budget", "stored"), [(3, 3), (2, 2)])
def test_store_larger_than_budget_is_split(budget: int, stored: int):
    config = PipelineConfig(
        budget_blocks=budget, batch_config=BatchConfig(max_batch_size=1, min_batch_size=1, flush_interval=0.0)
    )
    with instance(memory(), config=config, computed=from_thread.Event) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        counts = vllm.worker.counts.snapshot()
        assert counts["chunks offered"] == 4
        assert counts["chunks dropped, since too many are on their way"] == 4 - stored
        vllm.step(overwritten=range(16))


def test_chunks_that_a_policy_keeps_back_are_counted():
    class Late(AsyncPolicy):
        async def evaluate(self, keys: Sequence[bytes]) -> Any:
            await trio.sleep(30)

    with instance(memory(), policies=[Late()]) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.worker.engine.drain(SOON)
        assert vllm.worker.counts.snapshot()["chunks not stored"] == 4


def test_chunk_larger_than_budget_is_dropped():
    """A chunk of published pages has a page for each layer."""
    config = PipelineConfig(budget_blocks=1, batch_config=BatchConfig(max_batch_size=1, min_batch_size=1))
    with instance(memory(), config=config) as vllm:
        vllm.worker._source.pages_per_chunk = 2
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        assert vllm.worker.counts.snapshot() == {"chunks dropped, since too many are on their way": 4}


def test_an_aborted_request_that_is_being_loaded_is_told_of_when_its_load_is_over():
    tier = SlowToLoad()
    with instance(tier) as vllm:
        stored(vllm)
        gate = tier.gate = trio.Event()
        assert vllm.matched("p", 256, name="second") == 192
        vllm.scheduler.allocated("second", [blocks_from(32)], 192)
        vllm.step()
        vllm.worker.engine.statistics()
        vllm.scheduler.finished("second", aborted=True)
        vllm.step(finished=["second"])
        assert vllm.received == set()  # its blocks are written to
        vllm.worker.engine.call(gate.set)
        while "second" not in vllm.received:
            vllm.step()
        assert vllm.failed == set()  # nobody computes them


class SlowToLoad(FakeTier):
    gate: trio.Event | None = None
    waiting = False

    def __init__(self) -> None:
        super().__init__(64, SIZE)

    async def load(self, lease: Any, destination: Any) -> Any:
        if self.gate is not None:
            self.waiting = True
            with trio.CancelScope(shield=True):
                await self.gate.wait()
        return await super().load(lease, destination)


def test_a_load_without_a_proven_end_withholds_the_blocks(monkeypatch):
    monkeypatch.setattr("offload.from_thread._worker.LEAVE_TIMEOUT", 0.05)
    tier = SlowToLoad()
    with instance(tier, load_timeout=0.05) as vllm:
        stored(vllm)
        gate = tier.gate = trio.Event()
        assert vllm.matched("p", 256, name="second") == 192
        vllm.scheduler.allocated("second", [blocks_from(32)], 192)
        unproven = "loads without a proven end, whose requests and blocks are withheld"
        while unproven not in vllm.worker.counts.snapshot():
            vllm.step()
        assert vllm.received == set()
        with pytest.raises(DrainUnproven):
            vllm.worker.leave_cache()  # vLLM would free it
        vllm.worker.engine.call(gate.set)
        vllm.scheduler.received(["second"], frozenset())


def test_aborted_while_it_is_looked_up_nothing_stays_pinned():
    with instance(memory()) as vllm:
        stored(vllm)
        vllm.scheduler.added("second", hashes_of("p", 256), 256)
        vllm.scheduler.finished("second", aborted=True)
        assert vllm.matched("p", 256, name="third") == 192
        vllm.scheduler.finished("third", aborted=True)
        assert vllm.worker.engine.statistics().unreleased_hits == 0


def test_the_end_of_a_worker_lets_arrive_what_is_being_stored(monkeypatch):
    tier = memory()
    with instance(tier) as vllm:
        vllm.matched("p", 256)
        vllm.scheduler.allocated("p", [blocks_from(0)], 0)
        vllm.compute("p", 256, blocks_from(0))
        vllm.scheduler.close()
        vllm.worker.close()
        assert len(tier) == 4
        vllm.worker.engine.statistics = lambda: type("S", (), {"unreleased_hits": 0})()  # type: ignore[method-assign]
    assert _worker.DRAIN_TIMEOUT > 1
    assert NoChunks(4).block_bytes == 4


# --- loading or recomputing -----------------------------------------------------------------------------------------


def deciding(tier: Any, seconds_per_block: float) -> EngineConfig:
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=seconds_per_block, probe_interval=0.01)
    return EngineConfig(
        tiers={"tier": tier},
        pipeline=PipelineConfig(batch_config=BatchConfig(min_batch_size=1)),
        shadow_check=0,
        load_or_recompute=choice,
    )


def test_what_is_computed_sooner_is_reported_as_not_loaded_and_then_not_matched():
    tier = PacedTier(memory())
    with instance(deciding(tier, 0.02)) as vllm:
        blocks = stored(vllm)
        tier.seconds_per_block = 0.3
        assert vllm.load("p", 256, blocks_from(32), name="second") == 192  # a tier that nobody knows is tried
        assert vllm.failed == set(blocks_from(32)[:12])
        assert vllm.table.records["second"].state is State.FAILED
        assert vllm.worker.counts.snapshot()["chunks not loaded, and computed instead"] == 3
        assert vllm.matched("p", 256, name="third") == 0  # it is suspect
        tier.seconds_per_block = 0.0
        names = (f"later {at}" for at in itertools.count())
        eventually(lambda: vllm.matched("p", 256, name=next(names)) == 192)  # and has been measured again
        assert blocks == blocks_from(0)
