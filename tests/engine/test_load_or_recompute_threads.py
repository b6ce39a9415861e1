"""Loading or recomputing as threads see it: what a thread reads itself is measured there, and has no deadline to miss."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from backends.abc import Key
from backends.base.pages import Pages
from backends.base.pooled import Lease
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import PacedTier, payload_of
from offload import NO_WAIT, EngineConfig, LoadOrRecompute, from_thread, open_engine
from offload._engine.rates import SETTLED
from tests.engine.test_direct_reads import no_message
from tests.support.engine_places import SIZE, keys_of
from tests.support.maru_processes import eventually

SOON = 60.0


@contextmanager
def opened(
    tiers: dict[str, object], mode: str = "enforce", seconds_per_block: float = 1.0
) -> Iterator[from_thread.Engine]:
    choice = LoadOrRecompute(mode=mode, seconds_per_block=seconds_per_block, probe_interval=0.01)  # type: ignore[arg-type]
    config = EngineConfig(tiers=tiers, chain=False, shadow_check=0, load_or_recompute=choice)  # type: ignore[arg-type]
    with from_thread.open_engine(MemoryTier(64 * SIZE, SIZE), config) as engine:
        yield engine


def filled(keys: Sequence[Key], kind: type[MemoryTier] = MemoryTier) -> MemoryTier:
    tier = kind(64 * SIZE, SIZE)
    for key in keys:
        tier.put(key, payload_of(key, SIZE))
    return tier


def load(engine: from_thread.Engine, keys: Sequence[Key]) -> int:
    buffers = [bytearray(SIZE) for _ in keys]
    with engine.lookup(keys) as hit:
        loaded = engine.load(hit, PagesDestination.over(buffers)).loaded if len(hit) else 0
    assert buffers[:loaded] == [payload_of(key, SIZE) for key in keys[:loaded]]
    return loaded


def observations(engine: from_thread.Engine, tier: str = "host") -> int:
    rate = engine.statistics().engine.load_or_recompute.load_rates.get(tier)
    return 0 if rate is None else rate.observations


def test_memory_that_is_known_well_is_read_without_a_message_and_goes_on_being_measured() -> None:
    keys = keys_of(16)
    with opened({"host": filled(keys)}) as engine:
        while observations(engine) < SETTLED:  # in parts, in the engine's thread
            assert load(engine, keys) == 16
        before = observations(engine)
        with no_message():
            assert load(engine, keys) == 16
        assert observations(engine) == before + 1
        assert engine.statistics().engine.load_or_recompute.advised["load"] >= 2


class SlowMemory(MemoryTier):
    """Memory of which each block takes a hundredth of a second, whatever thread reads it."""

    def load_from_thread(self, lease: Lease, there: Pages, deadline: float) -> bool:
        time.sleep(0.01 * len(there))
        return super().load_from_thread(lease, there, deadline)


def test_what_a_thread_has_measured_it_is_advised_by() -> None:
    keys = keys_of(4)
    with opened({"host": filled(keys, SlowMemory)}, "advise", 0.001) as engine:
        with no_message():
            assert load(engine, keys) == 4
        engine.statistics()  # counted by then
        with no_message(), engine.lookup(keys) as hit:
            assert len(hit) == 4
            assert hit.advice is not None and (hit.advice.verdict, hit.advice.blocks) == ("recompute", 0)
            assert hit.advice.load_seconds == 0.0 and hit.advice.recompute_seconds == pytest.approx(0.004)


def test_a_hit_of_a_thread_ends_where_computing_is_sooner_and_the_tier_is_measured_beside_it() -> None:
    keys = keys_of(8)
    fast, slow = filled(keys[:4]), filled(keys[4:])
    with opened({"fast": fast, "slow": slow}, seconds_per_block=1e-3) as engine:
        choice = engine.call(lambda: engine._worker.engine._choice)
        assert choice is not None

        def teach() -> None:
            for _ in range(SETTLED):
                choice.note_loaded("fast", 4, 1e-6)
                choice.note_loaded("slow", 4, 1.0)

        engine.call(teach)
        with no_message(), engine.lookup(keys) as hit:
            assert hit.runs == [("fast", 4)]
            assert hit.advice is not None and hit.advice.verdict == "part"
        assert engine.call(slow.statistics).held_blocks in (0, 1, 2)  # by a probe, if by anything
        eventually(lambda: engine.statistics().engine.load_or_recompute.probes.get("measured", 0) > 0)
        # And so it is found out that the tier is fast.
        eventually(lambda: load(engine, keys) == 8)
        statistics = engine.statistics()
        assert statistics.engine.load_or_recompute.cut_blocks >= 4
        assert statistics.unreleased_hits == 0
        eventually(lambda: engine.call(slow.statistics).held_blocks == 0)


def test_a_file_is_read_by_the_engine_where_a_load_may_be_given_up(tmp_path: Path) -> None:
    keys = keys_of(8)
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=1.0)
    source, disk = filled(keys), FileTier(tmp_path, capacity_bytes=1 << 20, block_bytes=SIZE)
    config = EngineConfig(tiers={"disk": disk}, shadow_check=0, load_or_recompute=choice)
    with from_thread.open_engine(source, config) as engine:
        engine.store(source.weak(keys), precondition=NO_WAIT).result(SOON)
        while observations(engine, "disk") < SETTLED:
            assert load(engine, keys) == 8
        with engine.lookup(keys) as hit, no_message(), pytest.raises(AssertionError, match="was sent to the engine"):
            engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in keys]))


def test_a_load_of_a_thread_is_given_up_as_any_other() -> None:
    keys = keys_of(16)
    tier = PacedTier(filled(keys), seconds_per_block=float("inf"))
    with opened({"tier": tier}, seconds_per_block=0.01) as engine:
        began = time.monotonic()
        assert load(engine, keys) == 0
        assert time.monotonic() - began < 10.0  # it would never have ended
        assert engine.statistics().engine.load_or_recompute.given_up == {"late": 1}
        assert engine.call(tier.statistics).held_blocks <= 12


def test_computations_are_told_by_any_thread() -> None:
    with opened({"host": filled([])}, seconds_per_block=0.0) as engine:
        engine.computed(10, 0.5, after=4)
        rate = engine.statistics().engine.load_or_recompute.compute_rate
        assert rate is not None and rate.seconds(4, 14) == pytest.approx(0.5)
        with pytest.raises(ValueError, match="must be at least 1, 0, and 0"):
            engine.computed(0, 0.5)
    with pytest.raises(from_thread.EngineClosed):
        engine.computed(10, 0.5)


async def test_in_trio_what_is_read_at_once_is_measured_and_left_out_as_well() -> None:
    keys = keys_of(8)
    fast, slow = filled(keys[:4]), filled(keys[4:])
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=1.0, probe_interval=0.01)
    config = EngineConfig(tiers={"fast": fast, "slow": slow}, chain=False, load_or_recompute=choice)
    async with open_engine(MemoryTier(64 * SIZE, SIZE), config) as engine:
        assert engine.direct.serves

        async def request() -> int:
            async with await engine.lookup(keys) as hit:
                return (await engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in hit.keys]))).loaded

        def measured() -> int:
            rate = engine.statistics().load_or_recompute.load_rates.get("slow")
            return rate.observations if rate is not None and rate.is_settled else 0

        while not measured():
            assert await request() == 8
        before = measured()
        assert await request() == 8 and measured() > before
        known = engine._choice
        assert known is not None
        known.note_late("slow", 0.0)
        assert await request() == 4  # what is suspect is left out
        with trio.fail_after(SOON):
            # A probe counts once it has ended; a rate that it has measured in parts is used before.
            while await request() < 8 or not engine.statistics().load_or_recompute.probes.get("measured"):  # noqa: ASYNC110
                await trio.sleep(0.001)
    assert (fast.statistics().held_blocks, slow.statistics().held_blocks) == (0, 0)
