"""Stores into a tier that breaks: each of their blocks is rejected, at once, and the pipeline goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

import offload
from backends import DamagedBlock
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import FakeTier
from offload import NO_WAIT, HealthState, Status, TierUnavailable, TransferFailed, open_pipeline, with_breaker
from offload._pipeline.marks import marks_of
from offload.policies import PresenceFilter
from tests.support.ill_tiers import SIZE, Ill, RemoteIll, fail, ill_and_guard
from tests.support.invariants import config_of, keys_of

KEYS = keys_of("k", 4)


def source_of(keys: Any = KEYS) -> FakeTier:
    source = FakeTier(64, SIZE)
    source.fill(keys)
    return source


def store(pipeline: Any, source: Any, keys: Any = KEYS) -> Any:
    return pipeline.enqueue_nowait(source.weak(keys), precondition=NO_WAIT)


def at_rest(pipeline: Any, *tiers: Any) -> bool:
    statistics = pipeline.statistics()
    places = [tier.statistics() for tier in tiers]
    return not any(
        [statistics.inside, statistics.used_blocks, statistics.pending_marks, statistics.quarantined]
        + [place.held_blocks + place.reserved_blocks for place in places]
    )


@pytest.mark.parametrize("when_full", ["wait", "evict", "partial", "fail"])
async def test_every_block_is_rejected_at_once_and_by_name(autojump_clock, when_full) -> None:
    tier, guard = ill_and_guard()
    source = source_of()
    config = config_of(on_destination_full=when_full, flush_interval=0.0)
    async with open_pipeline(source, guard, config=config) as pipeline:
        await fail(guard, tier)
        start = trio.current_time()
        result = await store(pipeline, source).wait()
        assert trio.current_time() == start
        assert result.status is Status.FAILED
        assert isinstance(result.error, TierUnavailable) and result.error.tier == "ill"
        assert dict(result.failed) == dict.fromkeys(KEYS, result.error)
        statistics = pipeline.statistics()
        assert (statistics.blocks_failed, statistics.batches, statistics.failed) == (4, 0, 1)
        assert tier.batches == [] and at_rest(pipeline, source, tier)
        await trio.sleep(1.0)
        assert (await store(pipeline, source).wait()).status is Status.COMPLETE
        assert guard.health.state is HealthState.CLOSED


@pytest.mark.parametrize("kind", [Ill, RemoteIll])
async def test_a_filter_that_asks_a_broken_tier_lets_pass(autojump_clock, kind) -> None:
    """Nobody knows what it has; the store is told by the tier itself, and is the probe when there is to be one."""
    tier, guard = ill_and_guard(kind)
    source = source_of()
    filters = [PresenceFilter(guard)]
    async with open_pipeline(source, guard, policies=filters, config=config_of(flush_interval=0.0)) as pipeline:
        await fail(guard, tier)
        result = await store(pipeline, source).wait()
        assert not result.filtered and isinstance(result.error, TierUnavailable)
        assert pipeline.statistics().policy_errors == 0
        await trio.sleep(1.0)
        assert (await store(pipeline, source).wait()).status is Status.COMPLETE
        assert set((await store(pipeline, source).wait()).filtered.values()) == {"present"}


async def test_three_copies_that_fault_break_it_and_the_fourth_is_not_tried(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    source = source_of()
    tier.faults.error = OSError("gone")
    async with open_pipeline(source, guard, config=config_of(flush_interval=0.0)) as pipeline:
        for _ in range(3):
            result = await store(pipeline, source).wait()
            assert isinstance(result.failed[KEYS[0]], TransferFailed)
        assert isinstance((await store(pipeline, source).wait()).failed[KEYS[0]], TierUnavailable)
        assert len(tier.batches) == 3 and at_rest(pipeline, source, tier)


async def test_a_copy_that_never_ends_is_a_fault_when_its_time_is_over(autojump_clock) -> None:
    tier, guard = ill_and_guard(max_faults=1)
    source = source_of()
    tier.faults.hang = True
    async with open_pipeline(source, guard, config=config_of(flush_interval=0.0, transfer_timeout=10.0)) as pipeline:
        assert (await store(pipeline, source, KEYS[:2]).wait()).status is Status.FAILED
        assert guard.health.state is HealthState.OPEN
        assert isinstance((await store(pipeline, source, KEYS[2:]).wait()).error, TierUnavailable)
        assert pipeline.statistics().quarantined == 1
        for entry in pipeline.quarantine:
            entry.release()


async def test_a_batch_that_waits_for_room_when_it_breaks_is_rejected(autojump_clock) -> None:
    tier, guard = ill_and_guard(capacity=4)
    tier.fill(keys_of("old", 4))
    source = source_of()
    async with open_pipeline(source, guard, config=config_of(flush_interval=0.0)) as pipeline:
        handle = store(pipeline, source)
        await trio.testing.wait_all_tasks_blocked()
        assert not handle.status.terminal
        await fail(guard, tier)
        assert isinstance((await handle.wait()).error, TierUnavailable)
        assert trio.current_time() == guard.health.since
        assert tier.pool.statistics().waiting == 0 and at_rest(pipeline, source, tier)


async def test_a_batch_that_is_committed_when_it_breaks_is_rejected_uncopied(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    source = source_of()
    async with open_pipeline(source, guard, config=config_of(flush_interval=0.0)) as pipeline:

        def breaks(_: Any) -> None:
            for _ in range(3):
                guard._runner.release_with(
                    guard._runner.acquire_nowait(), offload._health.breaker.Call.ASK, OSError("gone")
                )

        pipeline.add_instrument(SimpleNamespace(post_claim=breaks))
        result = await store(pipeline, source).wait()
        assert result.status is Status.FAILED
        assert all(isinstance(error, TierUnavailable) for error in result.failed.values()) and len(result.failed) == 4
        assert tier.batches == [] and at_rest(pipeline, source, tier)


async def test_an_observer_who_cancels_the_next_of_a_rejected_batch_has_it_cancelled(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    source = source_of()
    async with open_pipeline(source, guard, config=config_of(min_batch_size=4)) as pipeline:
        await fail(guard, tier)
        handles = [store(pipeline, source, [key]) for key in KEYS]
        pipeline.add_instrument(SimpleNamespace(settled=lambda container: handles[1].request_cancel()))
        results = [await handle.wait() for handle in handles]
        assert [result.status for result in results] == [Status.FAILED, Status.CANCELLED, Status.FAILED, Status.FAILED]
        assert (results[1].failed, results[1].error) == ({}, None)
        assert at_rest(pipeline, source, tier)


async def test_a_route_to_a_broken_tier_fails_alone(autojump_clock) -> None:
    tier, guard = ill_and_guard()
    source, upper = source_of(), with_breaker(FakeTier(64, SIZE), "upper")
    config = config_of(flush_interval=0.0)
    async with (
        open_pipeline(upper, guard, config=config, name="lower") as route,  # type: ignore[arg-type]
        open_pipeline(source, upper, config=config, chain=[route]) as pipeline,
    ):
        await fail(guard, tier)
        result = await store(pipeline, source).wait()
        assert (result.status, list(result.completed)) == (Status.FAILED, KEYS)
        lower = result.routes["lower"]
        assert isinstance(lower.error, TierUnavailable) and dict(lower.failed) == dict.fromkeys(KEYS, lower.error)
        await trio.sleep(1.0)
        await upper.delete(KEYS)
        assert (await store(pipeline, source).wait()).status is Status.COMPLETE
        assert tier.contains_nowait(KEYS) == set(KEYS)
        assert at_rest(pipeline, source, tier, upper) and at_rest(route)


# --- one place with two names -----------------------------------------------------------------------------------------


async def test_marks_are_the_tiers_whoever_guards_it() -> None:
    tier = FakeTier()
    assert marks_of(with_breaker(tier, "a")) is marks_of(with_breaker(tier, "b")) is marks_of(tier)


@pytest.mark.parametrize("by", ["guard", "tier"])
async def test_blocks_and_routes_may_name_the_tier_or_its_guard(autojump_clock, by) -> None:
    tier = source_of()
    guard: Any = with_breaker(tier, "upper")
    lower, upper = FakeTier(64, SIZE), FakeTier(64, SIZE)
    one, other = (guard, tier) if by == "guard" else (tier, guard)
    config = config_of(flush_interval=0.0)
    async with open_pipeline(one, lower, config=config) as pipeline:
        assert (await store(pipeline, other, KEYS[:2]).wait()).status is Status.COMPLETE
        with pytest.raises(ValueError, match="not of this pipeline's source"):
            store(pipeline, upper)
        async with open_pipeline(source_of([b"new"]), other, config=config, chain=[pipeline]) as first:
            assert (await store(first, first.source, [b"new"]).wait()).status is Status.COMPLETE
        assert lower.contains_nowait([b"new", *KEYS]) == {b"new", *KEYS[:2]}


@pytest.mark.parametrize("destination", ["memory", "file"])
@pytest.mark.parametrize("guards", ["both", "source", "destination", "none"])
async def test_a_damaged_block_is_not_copied_on_whoever_has_a_guard(tmp_path, destination, guards) -> None:
    """Places that know each other's kind take over checksums, and go on doing so behind a guard."""
    source = FakeTier(8, SIZE)
    source.fill(KEYS)
    source.damage(KEYS[1])
    lower: Any = (
        MemoryTier(8 * SIZE, SIZE) if destination == "memory" else FileTier(tmp_path, 64 << 10, block_bytes=SIZE)
    )
    above: Any = with_breaker(source, "source") if guards in ("both", "source") else source
    below: Any = with_breaker(lower, "lower") if guards in ("both", "destination") else lower
    async with open_pipeline(above, below, config=config_of(flush_interval=0.0)) as pipeline:
        result = await store(pipeline, source).wait()
    assert list(result.failed) == [KEYS[1]] and isinstance(result.failed[KEYS[1]], DamagedBlock)
    assert lower.contains_nowait(KEYS) == set(KEYS) - {KEYS[1]}
    if below is not lower:
        assert below.health.faults == 0
    lower.close()


class _InANursery(Ill):
    """Its copies run in a nursery: one whose time is over raises a group of Cancelled."""

    async def _take_time(self, nbytes: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()


async def test_copies_in_a_nursery_that_never_end_are_faults(autojump_clock) -> None:
    _, guard = ill_and_guard(_InANursery, max_faults=2)
    source = source_of()
    async with open_pipeline(source, guard, config=config_of(flush_interval=0.0, transfer_timeout=10.0)) as pipeline:
        for at in (0, 1):
            assert (await store(pipeline, source, KEYS[at : at + 1]).wait()).status is Status.FAILED
        assert guard.health.state is HealthState.OPEN
        assert "no end of a copy within its time" in guard.health.cause
        for entry in pipeline.quarantine:
            entry.release()


@pytest.mark.parametrize(
    ("also", "state"), [(ValueError("the source"), HealthState.CLOSED), (OSError("the tier"), HealthState.OPEN)]
)
async def test_a_group_is_the_sources_only_where_all_in_it_is(autojump_clock, also, state) -> None:
    """A tier that copies in two tasks: both meet the source's error, or one of them fails by itself."""
    tier, guard = ill_and_guard(max_faults=1)
    source = source_of()

    class Reservation:
        granted = KEYS[:1]

        def keep(self, keys: Any) -> None: ...
        def release(self) -> None: ...
        async def transfer(self, source: Any, guards: Any) -> Any:
            errors = []
            for _ in range(2):
                try:
                    source.copy_out(guards, None)
                except OSError as error:
                    errors.append(error)
            raise ExceptionGroup("of two tasks", [*errors, *([also] if isinstance(also, OSError) else [])])

    def broken(guards: Any, pages: Any) -> None:
        raise OSError("the source is broken")

    source.copy_out = broken  # type: ignore[method-assign]
    tier.reserve_nowait = lambda *args: Reservation()  # type: ignore[method-assign,assignment]
    async with open_pipeline(source, guard, config=config_of(flush_interval=0.0)) as pipeline:
        assert (await store(pipeline, source, KEYS[:1]).wait()).status is Status.FAILED
        assert guard.health.state is state
