"""A tier that fails is never an error of the engine: it is left alone, named, and tried again; loads go before stores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

import offload
from backends.abc import Deletion, Key
from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    BreakerConfig,
    Engine,
    HealthState,
    PipelineConfig,
    Status,
    TierTooSlow,
    TierUnavailable,
    with_breaker,
)
from tests.support.engine_places import SIZE, Places, cancelled_at_checkpoint, keys_of, payloads, room

BREAKER = BreakerConfig(max_faults=3, first_wait=1.0, longest_wait=8.0, call_timeout=0.5, load_timeout=2.0)


class Moody(FakeTier):
    """A tier that stops answering, or raises, when told to."""

    def __init__(self) -> None:
        super().__init__(64, SIZE)
        self.silent = False
        self.raises: Exception | None = None
        self.asked = 0

    async def _mood(self) -> None:
        self.asked += 1
        if self.silent:
            await trio.sleep_forever()
        if self.raises is not None:
            raise self.raises

    async def pin(self, keys):  # type: ignore[no-untyped-def]
        await self._mood()
        return await super().pin(keys)

    async def delete(self, keys):  # type: ignore[no-untyped-def]
        await self._mood()
        return await super().delete(keys)


class Joined(Places):
    """A moody tier before, between or behind good ones."""

    def __init__(self, order: Sequence[str] = ("good", "moody")) -> None:
        self.source = FakeTier(64, SIZE)
        self.tiers = {name: Moody() if name == "moody" else FakeTier(64, SIZE) for name in order}

    @property
    def moody(self) -> Moody:
        tier = self.tiers["moody"]
        assert isinstance(tier, Moody)
        return tier


async def look(engine: Engine, keys: list[Key]) -> tuple[int, list[str], float]:
    """How many are found, who is left out, and how long it took."""
    before = trio.current_time()
    async with await engine.lookup(keys) as hit:
        buffers, destination = room(len(hit))
        assert (await engine.load(hit, destination)).loaded == len(hit)
        assert buffers == payloads(keys[: len(hit)])
        return len(hit), list(hit.unavailable), trio.current_time() - before


async def test_a_silent_tier_opens_its_breaker_is_left_alone_and_a_probe_closes_it(autojump_clock: object) -> None:
    joined, keys = Joined(), keys_of(6)
    joined["good"].fill(keys[:4])
    joined.moody.fill(keys)
    async with joined.open(breaker=BREAKER) as engine:
        assert await look(engine, keys) == (6, [], 0.0)
        joined.moody.silent = True
        for _ in range(3):
            assert await look(engine, keys) == (4, ["moody"], 0.5)
        health = engine.statistics().health
        assert (health["good"].state, health["moody"].state) == (HealthState.CLOSED, HealthState.OPEN)
        assert health["moody"].next_probe == trio.current_time() + 1.0 and "pin" in health["moody"].cause

        asked = joined.moody.asked
        assert await look(engine, keys) == (4, ["moody"], 0.0)  # at once, and named
        assert joined.moody.asked == asked
        async with await engine.lookup(keys) as hit:
            assert isinstance(hit.unavailable["moody"], TierUnavailable)

        await trio.sleep(1.0)
        assert await look(engine, keys) == (4, ["moody"], 0.5)  # a probe in vain
        await trio.sleep(1.5)
        assert await look(engine, keys) == (4, ["moody"], 0.0)  # the wait has doubled
        joined.moody.silent = False
        await trio.sleep(0.5)
        assert await look(engine, keys) == (6, [], 0.0)
        assert engine.statistics().health["moody"].state is HealthState.CLOSED
        assert engine.statistics().lookup_failures == {"moody": 7}
    joined.assert_at_rest()


async def test_a_tier_that_stops_delivering_is_a_fault_and_the_retry_goes_behind_it(autojump_clock: object) -> None:
    joined, keys = Joined(("moody", "good")), keys_of(6)
    joined["good"].fill(keys)
    joined.moody.fill(keys[:3])
    async with joined.open(breaker=BREAKER, on_load_failure="retry") as engine:
        joined.moody.faults.load_error = OSError("disk")
        for _ in range(3):
            assert (await look(engine, keys))[:2] == (6, [])
        assert engine.statistics().load_faults == {"moody": 9} and engine.statistics().load_failures == {}
        assert await look(engine, keys) == (6, ["moody"], 0.0)
        assert engine.statistics().health["moody"].state is HealthState.OPEN
    joined.assert_at_rest()


@pytest.mark.parametrize("order", [("moody", "good"), ("good", "moody")])
async def test_a_delete_says_what_nobody_knows(
    order: Sequence[str], autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    joined, keys = Joined(order), keys_of(4)
    joined["good"].fill(keys[:2])
    joined.moody.fill(keys[1:3])
    async with joined.open(breaker=BREAKER) as engine:
        lease = await joined["good"].pin(keys[:1])
        joined.moody.raises = OSError("no")
        assert await engine.delete(keys) == [Deletion.PINNED, *[Deletion.UNAVAILABLE] * 3]
        assert "moody could not be asked to delete 4 blocks: OSError('no')" in caplog.text
        await lease.release()
        joined.moody.raises, joined.moody.silent = None, True
        assert await engine.delete(keys) == [Deletion.UNAVAILABLE] * 4
        assert len(joined["good"]) == 0
        joined.moody.silent = False
        assert await engine.delete(keys) == [Deletion.MISSING, *[Deletion.DELETED] * 2, Deletion.MISSING]
        for _ in range(3):
            joined.moody.raises = OSError("no")
            await engine.delete(keys)
        joined.moody.raises = None
        assert await engine.delete(keys) == [Deletion.UNAVAILABLE] * 4  # its breaker is open


async def test_a_delete_together_keeps_in_all_tiers_what_the_slowest_keeps() -> None:
    joined, keys = Joined(), keys_of(4)
    joined["good"].fill(keys[:3])
    joined.moody.fill(keys[:2])
    async with joined.open(breaker=BREAKER) as engine:
        async with await joined.moody.pin(keys[:1]):
            gone = [Deletion.PINNED, Deletion.DELETED, Deletion.DELETED, Deletion.MISSING]
            assert await engine.delete(keys, together=True) == gone
        joined.moody.raises = OSError("no")
        assert await engine.delete(keys, together=True) == [Deletion.UNAVAILABLE] * 4
        assert len(joined["good"]) == len(joined.moody) == 1


async def test_a_tier_that_answers_a_delete_with_nonsense_is_one_that_fails() -> None:
    class Terse(FakeTier):
        async def delete(self, keys):  # type: ignore[no-untyped-def]
            return (await super().delete(keys))[1:]

    terse, other, keys = Terse(), FakeTier(), keys_of(2)
    other.fill(keys)
    async with offload.open_engine(FakeTier(), [terse, other]) as engine:
        assert await engine.delete(keys) == [Deletion.UNAVAILABLE] * 2
        assert len(other) == 0


async def test_a_promotion_into_or_out_of_a_broken_tier_is_counted(autojump_clock: object) -> None:
    joined, keys = Joined(("good", "moody")), keys_of(4)
    joined.moody.fill(keys)
    async with joined.open(breaker=BREAKER, promote=True) as engine:
        async with await engine.lookup(keys) as hit:
            await engine.load(hit, room(4)[1])
            joined.moody.raises = OSError("no")
            for _ in range(3):  # before the promotion has run
                with pytest.raises(OSError, match="no"):
                    await engine._breaker_tiers["moody"].pin(keys)
        await engine.drain()
        assert engine.statistics().promoted_blocks == 0
        assert sum(engine.statistics().promotions_refused.values()) == 4
        assert set(engine.statistics().promotions_refused) <= {"unavailable", "failed"}
    joined.assert_at_rest()


async def test_a_store_to_a_broken_tier_fails_there_and_the_next_one_probes_it(autojump_clock: object) -> None:
    joined, keys = Joined(("good", "moody")), keys_of(24)
    joined.source.fill(keys)
    async with joined.open(breaker=BREAKER) as engine:
        joined.moody.faults.error = OSError("no")
        ended = []
        for start in range(0, 20, 4):
            handle = await engine.store(joined.source.weak(keys[start : start + 4]), precondition=NO_WAIT)
            ended.append((await handle.wait_routes())["moody"].status)
        assert ended == [Status.FAILED] * 5
        assert engine.statistics().health["moody"].state is HealthState.OPEN
        assert joined.moody.batches == [tuple(keys[start : start + 4]) for start in (0, 4, 8)]  # then it was left alone
        assert joined["good"].contains_nowait(keys) == set(keys[:20])
        joined.moody.faults.error = None
        await trio.sleep(1.0)
        handle = await engine.store(joined.source.weak(keys[20:]), precondition=NO_WAIT)
        assert (await handle.wait_routes())["moody"].status is Status.COMPLETE
        assert engine.statistics().health["moody"].state is HealthState.CLOSED
    joined.assert_at_rest()


async def test_a_sync_answer_that_raises_leaves_the_tier_out() -> None:
    places, keys = Places(2), keys_of(3)
    places["a"].fill(keys[:1])
    places["b"].fill(keys)

    def no_answer(keys: Sequence[Key]) -> set[Key]:
        raise OSError("no")

    async with places.open() as engine:
        places["a"].contains_nowait = no_answer  # type: ignore[method-assign]
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("a", 1), ("b", 2)] and list(hit.unavailable) == ["a"]
    places.assert_at_rest()


async def test_a_tier_that_has_a_guard_keeps_it(autojump_clock: object) -> None:
    moody, keys = Moody(), keys_of(2)
    guard = with_breaker(moody, "mine", breaker=BREAKER)
    async with offload.open_engine(FakeTier(64, SIZE), {"a": guard}) as engine:
        moody.silent = True
        async with await engine.lookup(keys) as hit:
            assert isinstance(hit.unavailable["a"], TierTooSlow)
        assert engine.statistics().health["a"] == guard.health and guard.health.faults == 1


async def test_cancelled_at_any_await_with_a_silent_tier_nothing_is_held(autojump_clock: object) -> None:
    joined, keys = Joined(("good", "moody")), keys_of(6)
    joined["good"].fill(keys[:3])
    joined.moody.fill(keys)
    caught = 0
    async with joined.open(breaker=BREAKER, on_load_failure="retry", promote=True) as engine:
        for nth in range(24):
            joined.moody.silent = bool(nth % 2)

            async def body() -> None:
                await look(engine, keys)
                await engine.delete([])

            with trio.fail_after(60):
                caught += await cancelled_at_checkpoint(nth, body)
                await engine.drain()
            joined.assert_at_rest()
    assert caught


# --- loads before stores ------------------------------------------------------------------------------------------


async def test_a_store_stands_back_for_a_load_and_no_longer_than_its_patience(autojump_clock: object) -> None:
    places, keys, others = Places(), keys_of(4), keys_of(4, "other")
    places.source.fill(others)
    places["a"].fill(keys)
    places["a"].latency = 5.0
    config = offload.EngineConfig(
        tiers=places.tiers, store_patience=2.0, pipeline=PipelineConfig(transfer_timeout=60.0)
    )
    async with offload.open_engine(places.source, config) as engine, trio.open_nursery() as nursery:
        hit = await engine.lookup(keys)
        nursery.start_soon(engine.load, hit, room(4)[1])
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        handle = await engine.store(places.source.weak(others), precondition=NO_WAIT)
        await handle.status_value.wait_value(Status.TRANSFERRING)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)
        assert (await handle.wait()).status is Status.COMPLETE
        await engine.release(hit)


async def test_a_store_goes_as_soon_as_the_load_is_over(autojump_clock: object) -> None:
    places, keys, others = Places(), keys_of(4), keys_of(4, "other")
    places.source.fill(others)
    places["a"].fill(keys)
    places["a"].latency = 0.5
    async with places.open() as engine, trio.open_nursery() as nursery:
        hit = await engine.lookup(keys)
        nursery.start_soon(engine.load, hit, room(4)[1])
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        handle = await engine.store(places.source.weak(others), precondition=NO_WAIT)
        await handle.status_value.wait_value(Status.TRANSFERRING)
        assert trio.current_time() - began == pytest.approx(0.5, abs=0.02)
        await handle.wait()
        await engine.release(hit)
