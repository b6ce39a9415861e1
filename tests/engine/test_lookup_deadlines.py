"""Each tier's part of a lookup has a deadline of its own: what was found in time is the answer, the silent are at fault."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import Deletion, Key, ReadLease
from backends.maru import MaruTier
from backends.testing import FakeTier
from maru import MaruHandler
from offload import EngineConfig, HealthState, TierTooSlow, TierUnavailable, from_thread
from offload._engine.lookup import TimeShares
from tests.support.engine_places import SIZE, Places, cancelled_at_checkpoint, keys_of, room
from tests.support.maru_processes import Server, eventually, temporary_pool

SIZE_IN_POOL = 256 << 10


class Slow(FakeTier):
    """A tier that takes its time over each answer; ``inf``: it never answers."""

    def __init__(self, seconds: float = float("inf")) -> None:
        super().__init__(64, SIZE)
        self.seconds = seconds
        self.asked = 0

    async def pin(self, keys: Sequence[Key]) -> ReadLease:  # type: ignore[override]
        self.asked += 1
        lease = await super().pin(keys)
        try:
            await trio.sleep(self.seconds)
        except trio.Cancelled:
            await lease.release()
            raise
        return lease


class SlowRemote(Slow):
    """The same of a tier that has to be asked what it has, too."""

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        await trio.sleep(self.seconds)
        return await super().delete(keys)

    capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        self.asked += 1
        await trio.sleep(self.seconds)
        return await super().contains(keys)


class Joined(Places):
    """Slow tiers among good ones, by name."""

    def __init__(self, **tiers: FakeTier) -> None:
        self.source = FakeTier(64, SIZE)
        self.tiers = tiers

    def config(self, **knobs: object) -> EngineConfig:
        return EngineConfig(tiers=self.tiers, chain=False, **knobs)  # type: ignore[arg-type]


# --- in virtual time --------------------------------------------------------------------------------------------------


async def test_the_prefix_that_was_found_in_time_is_the_answer(autojump_clock: object) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), silent=Slow(), disk=FakeTier(64, SIZE)), keys_of(6)
    joined["host"].fill(keys[:2])
    joined["silent"].fill(keys)
    joined["disk"].fill(keys[2:4])
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=0.5)) as engine:
        began = trio.current_time()
        async with await engine.lookup(keys) as hit:
            assert trio.current_time() - began == 0.5
            assert hit.runs == [("host", 2), ("disk", 2)] and list(hit.unavailable) == ["silent"]
            assert isinstance(hit.unavailable["silent"], TierTooSlow)
            assert (await engine.load(hit, room(4)[1])).loaded == 4
    joined.assert_at_rest()


async def test_a_tier_that_is_silent_in_lookups_breaks_and_costs_nothing_then(autojump_clock: object) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), silent=Slow()), keys_of(4)
    joined["host"].fill(keys[:2])
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=0.5)) as engine:
        for faults in (1, 2, 3):
            async with await engine.lookup(keys) as hit:
                assert len(hit) == 2
            assert engine.statistics().health["silent"].faults == faults
        assert engine.statistics().health["silent"].state is HealthState.OPEN
        began = trio.current_time()
        async with await engine.lookup(keys) as hit:
            assert len(hit) == 2 and isinstance(hit.unavailable["silent"], TierUnavailable)
        assert trio.current_time() == began
        assert engine.statistics().lookup_failures == {"silent": 4}


async def test_the_timeout_of_a_lookup_lowers_that_of_its_tiers(autojump_clock: object) -> None:
    joined, keys = Joined(one=SlowRemote(), two=SlowRemote(), disk=FakeTier(64, SIZE)), keys_of(4)
    joined["disk"].fill(keys)
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=10.0)) as engine:
        began = trio.current_time()
        async with await engine.lookup(keys, within=0.9) as hit:
            assert hit.runs == [("disk", 4)] and list(hit.unavailable) == ["one", "two"]
        assert trio.current_time() - began == pytest.approx(0.6)  # a third each, and the last one answered at once
        assert [engine.statistics().health[name].faults for name in ("one", "two", "disk")] == [1, 1, 0]


async def test_a_hurried_caller_causes_no_faults(autojump_clock: object) -> None:
    joined, keys = Joined(silent=SlowRemote(), disk=FakeTier(64, SIZE)), keys_of(4)
    joined["disk"].fill(keys)
    breaker = offload.BreakerConfig(call_timeout=5.0)
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=3.0, breaker=breaker)) as engine:
        for _ in range(4):
            async with await engine.lookup(keys, within=5.0, hurried=True) as hit:
                assert list(hit.unavailable) == ["silent"]
            await engine.delete(keys_of(1), within=8.0, hurried=True)
        assert engine.statistics().health["silent"].faults == 0
        await engine.delete(keys_of(1), within=10.0, hurried=True)  # 5 s for each: as long as it may take
        async with await engine.lookup(keys, within=6.0, hurried=True):
            assert engine.statistics().health["silent"].faults == 2


async def test_all_questions_to_one_tier_are_one_part(autojump_clock: object) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), slow=Slow(0.4)), keys_of(8)
    joined["host"].fill(keys[::2])  # every other block: the slow one is asked for each between
    joined["slow"].fill(keys)
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=1.0)) as engine:
        began = trio.current_time()
        async with await engine.lookup(keys) as hit:
            assert trio.current_time() - began == pytest.approx(1.0)
            assert hit.runs == [("host", 1), ("slow", 1)] * 2 + [("host", 1)]
            assert list(hit.unavailable) == ["slow"]
    joined.assert_at_rest()


async def test_a_tier_that_gets_no_time_is_named_and_at_no_fault(autojump_clock: object) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), slow=Slow(0.1)), keys_of(2)
    joined["host"].fill(keys)
    async with offload.open_engine(joined.source, joined.config()) as engine:
        async with await engine.lookup(keys, within=0.0) as hit:
            assert not hit.keys and list(hit.unavailable) == ["host", "slow"]
            assert "no time was left" in str(hit.unavailable["slow"])
        assert joined["slow"].asked == 0  # type: ignore[attr-defined]
        assert engine.statistics().health["slow"].faults == 0


async def test_an_answer_at_the_deadline_leaves_no_pin(autojump_clock: object) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), slow=Slow(0.5)), keys_of(4)
    joined["slow"].fill(keys)
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=0.5)) as engine:
        async with await engine.lookup(keys) as hit:
            assert len(hit) + len(hit.unavailable)
        joined.assert_at_rest()


@pytest.mark.parametrize("seconds", [0.2, float("inf")])
async def test_cancelled_at_any_await_nothing_is_pinned(autojump_clock: object, seconds: float) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), far=SlowRemote(seconds), disk=FakeTier(64, SIZE)), keys_of(6)
    joined["host"].fill(keys[:2])
    joined["far"].fill(keys[:4])
    joined["disk"].fill(keys)
    caught = 0
    breaker = offload.BreakerConfig(max_faults=1_000)
    async with offload.open_engine(joined.source, joined.config(lookup_timeout=0.5, breaker=breaker)) as engine:
        for nth in range(20):

            async def body() -> None:
                async with await engine.lookup(keys):
                    pass

            caught += await cancelled_at_checkpoint(nth, body)
            joined.assert_at_rest()
    assert caught > 5


async def test_a_cancelled_lookup_says_nothing_of_a_tier(autojump_clock: object) -> None:
    joined = Joined(silent=Slow())
    async with offload.open_engine(joined.source, joined.config()) as engine:
        with trio.move_on_after(0.1):
            await engine.lookup(keys_of(1))
        assert engine.statistics().health["silent"].faults == 0


async def test_a_retry_behind_a_damaged_block_is_a_lookup_of_its_own(autojump_clock: object) -> None:
    joined, keys = Joined(host=FakeTier(64, SIZE), silent=Slow(), disk=FakeTier(64, SIZE)), keys_of(4)
    for name in joined.tiers:
        joined[name].fill(keys)
    config = joined.config(lookup_timeout=0.5, on_load_failure="retry")
    async with offload.open_engine(joined.source, config) as engine:
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("host", 4)]
            joined["host"].damage(keys[2])
            began = trio.current_time()
            assert (await engine.load(hit, room(4)[1])).loaded == 4
            assert trio.current_time() - began == pytest.approx(0.5, abs=0.1)
        assert engine.statistics().health["silent"].faults == 1


async def test_a_timeout_that_is_no_number_of_seconds_is_refused() -> None:
    joined = Joined(host=FakeTier(64, SIZE))
    async with offload.open_engine(joined.source, joined.config()) as engine:
        for within in (float("nan"), -1.0):
            with pytest.raises(ValueError, match="within = "):
                await engine.lookup(keys_of(1), within=within)
    joined.assert_at_rest()


async def test_the_time_of_a_delete_is_shared_as_well(autojump_clock: object) -> None:
    joined, keys = Joined(silent=SlowRemote(), disk=FakeTier(64, SIZE)), keys_of(2)
    joined["disk"].fill(keys)
    async with offload.open_engine(joined.source, joined.config()) as engine:
        began = trio.current_time()
        assert await engine.delete(keys, within=1.0) == [Deletion.UNAVAILABLE] * 2
        assert trio.current_time() - began == 0.5 and len(joined["disk"]) == 0
        assert engine.statistics().health["silent"].faults == 1


# --- the decision -----------------------------------------------------------------------------------------------------


def test_what_one_tier_leaves_unused_is_shared_by_those_behind() -> None:
    time = TimeShares(each=10.0, ends=9.0, tiers=3)
    assert time.left("a", 0.0) == 3.0
    time.spend("a", 1.0)
    assert time.left("b", 1.0) == 4.0 and time.left("a", 1.0) == 2.0
    assert time.left("c", 1.0) == 8.0
    assert TimeShares(each=1.0, ends=9.0, tiers=2).left("a", 0.0) == 1.0


def test_the_last_tier_gets_all_that_is_left() -> None:
    time = TimeShares(each=float("inf"), ends=2.0, tiers=1)
    assert time.left("a", 0.5) == 1.5
    assert TimeShares(each=float("inf"), ends=2.0, tiers=1).left("a", 3.0) == 0.0


# --- from a thread ----------------------------------------------------------------------------------------------------


def test_a_thread_gets_what_was_found_and_the_silent_tier_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "offload.from_thread._worker._TIERS_SHARE", 0.002
    )  # of a minute, so that no busy machine meets the rest
    joined, keys = Joined(host=FakeTier(64, SIZE), silent=Slow()), keys_of(4)
    joined["host"].fill(keys[:3])
    with from_thread.open_engine(joined.source, joined.config(lookup_timeout=50.0)) as engine:
        for _ in range(4):
            with engine.lookup(keys, timeout=60.0) as hit:
                assert (hit.runs, list(hit.unavailable)) == ([("host", 3)], ["silent"])
        health = engine.statistics().engine.health["silent"]
        assert (health.state, health.faults) == (HealthState.OPEN, 3)
        assert engine.delete(keys, timeout=60.0) == [Deletion.UNAVAILABLE] * 4
    joined.assert_at_rest()


# --- beside a page store ----------------------------------------------------------------------------------------------


def test_beside_a_page_store_that_stands_still_host_memory_is_found_and_the_breaker_opens() -> None:
    """A real server, stopped by SIGSTOP; then it goes on, and is used again."""
    keys = keys_of(6)
    with temporary_pool() as pool, Server(pool) as server:
        far = MaruTier(
            MaruHandler(
                server_url=server.ipc, pool_size=8 * SIZE_IN_POOL, chunk_size_bytes=SIZE_IN_POOL, timeout_ms=60_000
            ),
            block_bytes=SIZE,
        )
        joined = Joined(host=FakeTier(64, SIZE))
        joined.source.fill(keys)
        joined["host"].fill(keys[:4])
        breaker = offload.BreakerConfig(max_faults=1, call_timeout=60.0)
        config = EngineConfig(tiers={**joined.tiers, "far": far}, chain=False, lookup_timeout=1.0, breaker=breaker)
        with from_thread.open_engine(joined.source, config) as engine:
            with server.process.stopped():
                with engine.lookup(keys, timeout=60.0) as hit:
                    assert (hit.runs, list(hit.unavailable)) == ([("host", 4)], ["far"])
                health = engine.statistics().engine.health["far"]
                assert health.faults == 1 and "did not answer pin within 1 s" in health.cause

            def found_by_all() -> bool:
                with engine.lookup(keys, timeout=60.0) as hit:
                    assert hit.runs == [("host", 4)]
                    return not hit.unavailable

            eventually(found_by_all)
        joined.assert_at_rest()
