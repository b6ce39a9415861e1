"""A chain from a small tier: what was stored is held until it has been copied on; COMPLETE is never said of what is nowhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import Deletion, Key
from backends.base.forwarding import ForwardingTier
from backends.base.pooled import PooledReservation
from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    BatchConfig,
    BreakerConfig,
    DestinationFull,
    PipelineConfig,
    Status,
    TierUnavailable,
    TransferHandle,
    TransferResult,
)
from tests.support.engine_places import SIZE, cancelled_at_checkpoint, keys_of, payloads, required, room

EVICTS = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))


class Stairs:
    """A source, and tiers that feed each other what they store, from the fastest to the slowest."""

    def __init__(self, **capacities: int) -> None:
        self.source = FakeTier(256, SIZE)
        self.tiers = {name: FakeTier(capacity, SIZE) for name, capacity in capacities.items()}

    def __getitem__(self, name: str) -> FakeTier:
        return self.tiers[name]

    def open(self, pipeline: PipelineConfig = EVICTS, **knobs: object):  # type: ignore[no-untyped-def]
        knobs["routes"] = required(self.tiers, knobs.get("routes", ()))  # type: ignore[arg-type]
        config = offload.EngineConfig(tiers=self.tiers, pipeline=pipeline, **knobs)  # type: ignore[arg-type]
        return offload.open_engine(self.source, config)

    def assert_at_rest(self) -> None:
        for tier in (self.source, *self.tiers.values()):
            statistics = tier.statistics()
            assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0), tier

    def nowhere(self, results: Sequence[TransferResult]) -> set[Key]:
        """What a result calls complete, on its route as well, and no tier has."""
        there = set().union(*[tier.pool._slot_of for tier in self.tiers.values()])
        lost: set[Key] = set()
        for result in results:
            lost |= set(result.completed) - set(_failed(result)) - there
        return lost


def _failed(result: TransferResult) -> Iterator[Key]:
    """What has failed on the routes behind this result."""
    for route in result.routes.values():
        yield from [*route.failed, *_failed(route)]


async def store_all(engine: offload.Engine, source: FakeTier, keys: Sequence[Key], per: int) -> list[TransferResult]:
    handles: list[TransferHandle] = []
    for start in range(0, len(keys), per):
        handles.append(await engine.store(source.weak(keys[start : start + per]), precondition=NO_WAIT))
    return [await handle.wait() for handle in handles]


@pytest.mark.parametrize("per", [1, 4, 8])
async def test_all_that_passes_a_small_tier_reaches_the_next_one(autojump_clock: object, per: int) -> None:
    stairs, keys = Stairs(host=8, disk=64), keys_of(48)
    stairs.source.fill(keys)
    stairs["disk"].latency = 0.02
    async with stairs.open() as engine:
        results = await store_all(engine, stairs.source, keys, per)
        assert {result.status for result in results} == {Status.COMPLETE}
        assert stairs["disk"].contains_nowait(keys) == set(keys)
    stairs.assert_at_rest()


async def test_what_is_registered_is_not_evicted_in_that_tick_for_somebody_in_line(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=8, disk=64), keys_of(64)
    stairs.source.fill(keys)
    stairs["host"].latency = stairs["disk"].latency = 0.02
    config = PipelineConfig(
        on_destination_full="evict",
        batch_config=BatchConfig(max_batch_size=4, min_batch_size=1, flush_interval=0.0),
        max_concurrent_transfers=4,
    )
    async with stairs.open(config) as engine:
        results = await store_all(engine, stairs.source, keys, 4)
        assert {result.status for result in results} == {Status.COMPLETE}
        assert stairs["disk"].contains_nowait(keys) == set(keys)
    stairs.assert_at_rest()


async def test_what_another_has_stored_meanwhile_is_held_as_well(autojump_clock: object) -> None:
    """A duplicate is found before the others are copied, and would be evicted while they are."""

    class Slow(FakeTier):
        async def write(self, *args: Any) -> Mapping[int, Exception]:
            await trio.sleep(0.5)
            return await super().write(*args)

    stairs, keys, host = Stairs(host=8, disk=64), keys_of(8), Slow(8, SIZE)
    stairs.tiers["host"] = host
    stairs.source.fill(keys)
    host.fill(keys[:4])
    async with stairs.open(routes=(offload.Route("host", policies=()),)) as engine:
        handle = await engine.store(stairs.source.weak(keys[2:6]), precondition=NO_WAIT)
        await trio.sleep(0.2)
        for key in keys_of(6, "other"):  # room for them is made of what nobody holds
            host.put(key, bytes(SIZE))
        assert (await handle.wait()).status is Status.COMPLETE
        assert stairs["disk"].contains_nowait(keys) == set(keys[2:6])
    stairs.assert_at_rest()


async def test_a_broken_tier_ends_the_route_and_says_which_blocks_and_why(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=4, disk=64), keys_of(12)
    stairs.source.fill(keys)
    stairs["disk"].faults.error = OSError("no disk")
    async with stairs.open(breaker=BreakerConfig(max_faults=1)) as engine:
        [first] = await store_all(engine, stairs.source, keys[:4], 4)
        assert first.status is Status.FAILED and set(first.routes["disk"].failed) == set(keys[:4])
        began = trio.current_time()
        [second] = await store_all(engine, stairs.source, keys[4:8], 4)
        assert trio.current_time() == began  # nobody waits for a broken tier
        assert second.status is Status.FAILED and list(second.completed) == keys[4:8]
        assert all(isinstance(second.routes["disk"].failed[key], TierUnavailable) for key in keys[4:8])
        assert stairs["host"].contains_nowait(keys) == set(keys[4:8])
        await store_all(engine, stairs.source, keys[8:], 4)
        told = (await engine.explain(keys[4])).blocks[0]
        assert told.cause.value == "unavailable"  # the disk may have it, for all that is known while it is broken
        assert "evicted from host" in told.text and "not stored in disk" in told.text and "no disk" in told.text
    stairs.assert_at_rest()


async def test_what_failed_and_is_nowhere_is_explained(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=4), keys_of(2)
    stairs.source.fill(keys)
    stairs["host"].faults.error = OSError("no memory")
    async with stairs.open() as engine:
        await store_all(engine, stairs.source, keys, 2)
        told = (await engine.explain(keys[0])).blocks[0]
        assert told.cause.value == "failed" and "not stored in host" in told.text and "no memory" in told.text


async def test_a_full_tier_makes_stores_wait_and_no_longer_than_its_timeout(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=4, disk=4), keys_of(12)
    stairs.source.fill(keys)
    below = PipelineConfig(destination_timeout=2.0, batch_config=BatchConfig(flush_interval=0.0))
    routes = (offload.Route("disk", pipeline=below),)
    async with stairs.open(routes=routes) as engine:
        began = trio.current_time()
        results = await store_all(engine, stairs.source, keys, 4)
        assert trio.current_time() - began == pytest.approx(4.0)  # two of them found the disk full
        assert [result.status for result in results] == [Status.COMPLETE, Status.FAILED, Status.FAILED]
        for result in results[1:]:
            assert len(result.completed) == 4
            assert all(isinstance(error, DestinationFull) for error in result.routes["disk"].failed.values())
        assert not stairs.nowhere(results)
    stairs.assert_at_rest()


async def test_a_store_that_waits_for_held_blocks_has_a_bound_of_its_own(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=4, disk=64), keys_of(8)
    stairs.source.fill(keys)
    stairs["disk"].faults.hang = True
    first = PipelineConfig(on_destination_full="evict", destination_timeout=3.0)
    async with stairs.open(routes=(offload.Route("host", pipeline=first),)) as engine:
        began = trio.current_time()
        held = await engine.store(stairs.source.weak(keys[:4]), precondition=NO_WAIT)
        [late] = await store_all(engine, stairs.source, keys[4:], 4)
        assert 3.0 <= trio.current_time() - began < 4.0
        assert late.status is Status.FAILED and isinstance(late.error, DestinationFull)
        assert (await held.wait()).status is Status.FAILED  # unproven: what it touches stays in quarantine
        for entry in engine.quarantine:
            entry.release()
    stairs.assert_at_rest()


async def test_a_block_is_let_go_above_when_the_next_tier_has_it(autojump_clock: object) -> None:
    """And not only when the tier behind that has it, too."""
    stairs, keys = Stairs(host=4, disk=64, far=64), keys_of(8)
    stairs.source.fill(keys)
    stairs["far"].latency = 50.0
    async with stairs.open(attrs.evolve(EVICTS, transfer_timeout=60.0)) as engine:
        handle = await engine.store(stairs.source.weak(keys[:4]), precondition=NO_WAIT)
        await trio.sleep(1.0)
        assert stairs["host"].statistics().held_blocks == 0 and stairs["disk"].statistics().held_blocks == 4
        assert await stairs["disk"].delete(keys[:1]) == [Deletion.PINNED]
        assert (await handle.wait()).status is Status.COMPLETE
    stairs.assert_at_rest()


async def test_what_a_tier_could_not_hold_has_failed_on_its_route(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier whose reservations cannot hold evicts between the tiers; then that is said."""
    monkeypatch.delattr(PooledReservation, "hold")
    stairs, keys = Stairs(host=4, disk=64), keys_of(16)
    stairs.source.fill(keys)
    stairs["host"].latency = 0.02
    config = PipelineConfig(
        on_destination_full="evict",
        batch_config=BatchConfig(max_batch_size=4, min_batch_size=1, flush_interval=0.0),
        max_concurrent_transfers=2,
    )
    async with stairs.open(config) as engine:
        results = await store_all(engine, stairs.source, keys, 4)
        gone = [error for result in results for error in result.routes["disk"].failed.values()]
        assert gone and all("gone from" in str(error) for error in gone)
        assert {result.status for result in results} == {Status.COMPLETE, Status.FAILED}
        assert not stairs.nowhere(results)
    stairs.assert_at_rest()


@pytest.mark.parametrize("budget", [4, 64])
async def test_a_chain_that_is_cut_off_holds_nothing(autojump_clock: object, budget: int) -> None:
    """Also where the route has no room in its budget, so that its blocks have not been taken in."""
    stairs, keys = Stairs(host=16, disk=64), keys_of(12)
    stairs.source.fill(keys)
    stairs["disk"].latency = 2.0
    small = BatchConfig(max_batch_size=4, min_batch_size=1, flush_interval=0.0)
    below = PipelineConfig(budget_blocks=budget, batch_config=small)
    above = PipelineConfig(drain_timeout=0.5, on_destination_full="evict", batch_config=small)
    async with stairs.open(above, routes=(offload.Route("disk", pipeline=below),)) as engine:
        handles = [
            await engine.store(stairs.source.weak(keys[start : start + 4]), precondition=NO_WAIT) for start in (0, 4, 8)
        ]
        await trio.sleep(1.0)
    assert {(await handle.wait()).status for handle in handles} <= {Status.COMPLETE, Status.FAILED}
    stairs.assert_at_rest()


async def test_cancelled_at_any_await_of_a_store_nothing_stays_held(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=8, disk=256), keys_of(160)
    stairs.source.fill(keys)
    caught = 0
    async with stairs.open() as engine:
        for nth in range(10):

            async def body() -> None:
                await store_all(engine, stairs.source, keys[16 * nth : 16 * nth + 16], 4)  # noqa: B023

            caught += await cancelled_at_checkpoint(nth, body)
            await engine.drain()
            stairs.assert_at_rest()
    assert caught > 5


async def test_a_silent_answer_to_what_is_there_keeps_nothing_back_from_a_route(autojump_clock: object) -> None:
    class Remote(ForwardingTier):
        """A tier that is only asked for what it has in vain."""

        capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)

        async def contains(self, keys: Sequence[Key]) -> set[Key]:
            await trio.sleep_forever()
            raise AssertionError

    stairs, keys, far = Stairs(host=8), keys_of(8), FakeTier(64, SIZE)
    stairs.source.fill(keys)
    stairs.tiers["far"] = Remote(far)  # type: ignore[assignment]
    async with stairs.open() as engine:
        [result] = await store_all(engine, stairs.source, keys, 8)
        assert result.status is Status.COMPLETE and len(far) == 8 and not result.routes["far"].filtered


async def test_bytes_arrive_as_they_were_stored(autojump_clock: object) -> None:
    stairs, keys = Stairs(host=4, disk=64), keys_of(32)
    stairs.source.fill(keys)
    async with stairs.open() as engine:
        await store_all(engine, stairs.source, keys, 4)
        buffers, places = room(32)
        async with await engine.lookup(keys) as hit:
            assert (await engine.load(hit, places)).loaded == 32
        assert buffers == payloads(keys)


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_the_sizes_and_faults_all_stores_end_in_time_and_say_what_became(
    autojump_clock: object, seed: int
) -> None:
    dice = random.Random(seed)
    names = ["host", "disk", "far"][: dice.randint(2, 3)]
    stairs = Stairs(**{name: dice.choice([4, 8, 16]) * (4**at) for at, name in enumerate(names)})
    keys = keys_of(96)
    stairs.source.fill(keys)
    for name in names:
        stairs[name].latency = dice.choice([0.0, 0.01, 0.2])
    config = PipelineConfig(
        on_destination_full=dice.choice(["evict", "evict", "wait", "partial", "fail"]),
        destination_timeout=2.0,
        transfer_timeout=5.0,
        max_concurrent_transfers=dice.randint(1, 3),
        budget_blocks=dice.choice([8, 4096]),
        batch_config=BatchConfig(max_batch_size=dice.choice([4, 8]), min_batch_size=1, flush_interval=0.0),
    )
    evicted: set[Key] = set()
    stairs[names[-1]].on_evicted(evicted.update)
    with trio.fail_after(2_000):
        async with stairs.open(config) as engine, trio.open_nursery() as nursery:
            results: list[TransferResult] = []

            async def some(part: Sequence[Key], per: int) -> None:
                results.extend(await store_all(engine, stairs.source, part, per))

            for at in range(3):
                nursery.start_soon(some, keys[32 * at : 32 * at + 32], dice.choice([1, 2, 4]))
            if dice.random() < 0.5:
                await trio.sleep(dice.random() * 0.3)
                stairs[names[-1]].faults.error = OSError("gone")
                await trio.sleep(dice.random())
                stairs[names[-1]].faults.error = None
        assert stairs.nowhere(results) <= evicted
    stairs.assert_at_rest()
