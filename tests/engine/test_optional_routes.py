"""Routes that are not required: a slow, full, broken or hanging tier costs the tier above no more than a share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import Key
from backends.testing import FakeTier
from offload import NO_WAIT, BatchConfig, BreakerConfig, EngineConfig, HealthState, PipelineConfig, Route, Status
from tests.support.engine_places import SIZE, Places, cancelled_at_checkpoint, keys_of

EVICTS = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))
BREAKER = BreakerConfig(max_faults=3)


class Tiers(Places):
    """A source of 256 blocks, and tiers named ``host`` and ``disk``."""

    def __init__(self, host: int = 16, disk: int = 256, **more: int) -> None:
        self.source = FakeTier(256, SIZE)
        capacities = {"host": host, "disk": disk, **more}
        self.tiers = {name: FakeTier(capacity, SIZE) for name, capacity in capacities.items()}

    def open(self, pipeline: PipelineConfig = EVICTS, **knobs: Any) -> Any:
        knobs.setdefault("breaker", BREAKER)
        return offload.open_engine(self.source, EngineConfig(tiers=self.tiers, pipeline=pipeline, **knobs))

    def held(self) -> int:
        return self["host"].statistics().held_blocks


async def store(engine: Any, keys: Sequence[Key]) -> Any:
    engine.source.fill(keys)
    return await engine.store(engine.source.weak(keys), precondition=NO_WAIT)


@pytest.mark.parametrize("fault", ["broken", "full", "slow", "hangs"])
async def test_store_completes_whatever_the_route_does(autojump_clock: object, fault: str) -> None:
    tiers = Tiers(host=16, disk=2 if fault == "full" else 256)
    faults = tiers["disk"].faults
    if fault == "broken":
        faults.error = OSError("no disk")
    elif fault == "slow":
        tiers["disk"].latency = 4.0
    elif fault == "hangs":
        faults.hang = True
    routes = [Route("disk", pipeline=attrs.evolve(EVICTS, on_destination_full="fail"))]
    async with tiers.open(routes=routes) as engine:
        for at in range(40):
            keys = keys_of(4, str(at))
            began = trio.current_time()
            handle = await store(engine, keys)
            result = await handle.wait()
            assert (result.status, dict(result.routes)) == (Status.COMPLETE, {})
            assert trio.current_time() == began
            assert tiers["host"].contains_nowait(keys) == set(keys) and tiers.held() <= 8
            await trio.sleep(0.5)
        told = await handle.wait_routes()
        disk = engine.statistics().pipelines["disk"]
        assert (disk.held_blocks, disk.share_blocks) <= (8, 8)
        if fault in ("broken", "full", "hangs"):
            assert told["disk"].status is Status.FAILED or told["disk"].filtered
            assert disk.blocks_failed or disk.blocks_dropped
        if fault == "hangs":
            # Three copies of a quarter of the share at most: it breaks before its share is used up.
            assert engine.statistics().health["disk"].state is not HealthState.CLOSED
            assert len(engine.quarantine) >= 3 and disk.held_blocks <= 8
    for entry in engine.quarantine:
        entry.release()
    assert engine.statistics().pipelines["disk"].held_blocks == 0
    tiers.assert_at_rest()


async def test_blocks_that_have_room_by_now_do_not_count_as_waiting(autojump_clock: object) -> None:
    tiers = Tiers(host=16)
    tiers["disk"].latency = 1.0
    async with tiers.open(attrs.evolve(EVICTS, route_patience=30.0)) as engine:
        handle = await store(engine, keys_of(16))
        await handle.wait()
        seen = []
        await trio.sleep(0.5)  # between two copies, then and later
        while True:
            await trio.sleep(1.0)
            disk = engine.statistics().pipelines["disk"]
            if not disk.held_blocks:
                break
            assert disk.offered_blocks == 16 - disk.blocks_completed - disk.held_blocks
            seen.append(disk.offered_blocks)
        assert len(set(seen)) > 2
        assert len((await handle.wait_routes())["disk"].completed) == 16


async def test_blocks_beyond_the_share_wait_and_are_dropped(autojump_clock: object) -> None:
    tiers, keys = Tiers(host=16), keys_of(16)
    gate = tiers["disk"].faults.gate = trio.Event()
    async with tiers.open(attrs.evolve(EVICTS, route_patience=2.0, transfer_timeout=60.0)) as engine:
        handle = await store(engine, keys)
        assert (await handle.wait()).status is Status.COMPLETE
        disk = engine.statistics().pipelines["disk"]
        assert (disk.held_blocks, disk.offered_blocks, tiers.held()) == (8, 8, 8)
        await trio.sleep(1.9)
        assert engine.statistics().pipelines["disk"].blocks_dropped == 0
        await trio.sleep(0.2)
        disk = engine.statistics().pipelines["disk"]
        assert (disk.held_blocks, disk.offered_blocks, disk.blocks_dropped) == (8, 0, 8)
        gate.set()
        told = (await handle.wait_routes())["disk"]
        assert (list(told.completed), told.filtered) == (keys[:8], dict.fromkeys(keys[8:], "behind"))
        await tiers["host"].delete(keys)
        assert "kept back from disk" in str(await engine.explain(keys[9]))
        assert "behind" in str(await engine.explain(keys[9]))
    tiers.assert_at_rest()


async def test_waiting_blocks_go_when_room_comes(autojump_clock: object) -> None:
    tiers, keys = Tiers(host=16), keys_of(16)
    tiers["disk"].latency = 0.2
    async with tiers.open() as engine:
        handle = await store(engine, keys)
        await handle.wait()
        await engine.drain()
        assert tiers["disk"].contains_nowait(keys) == set(keys)
        assert (await handle.wait_routes())["disk"].status is Status.COMPLETE
    tiers.assert_at_rest()


async def test_blocks_evicted_while_they_wait_are_counted(autojump_clock: object) -> None:
    tiers, keys, others = Tiers(host=16), keys_of(16), keys_of(8, "other")
    gate = tiers["disk"].faults.gate = trio.Event()
    async with tiers.open(attrs.evolve(EVICTS, transfer_timeout=60.0)) as engine:
        first = await store(engine, keys)
        await first.wait()
        await (await store(engine, others)).wait()  # its room is made of what waits, and is not held
        gate.set()
        told = (await first.wait_routes())["disk"]
        assert list(told.completed) == keys[:8] and told.filtered == dict.fromkeys(keys[8:], "gone")
    tiers.assert_at_rest()


async def test_two_routes_divide_the_share(autojump_clock: object) -> None:
    tiers = Tiers(host=16, disk=64, tape=64)
    for name in ("disk", "tape"):
        tiers[name].faults.hang = True
    routes = [Route("disk"), Route("tape", source="host")]
    async with tiers.open(routes=routes) as engine:
        for at in range(8):
            assert (await (await store(engine, keys_of(8, str(at)))).wait()).status is Status.COMPLETE
            shares = engine.statistics().pipelines
            assert shares["disk"].held_blocks <= 4 and shares["host-tape"].held_blocks <= 4 and tiers.held() <= 8
            await trio.sleep(2.0)
        for entry in engine.quarantine:
            entry.release()
    tiers.assert_at_rest()


async def test_leaving_waits_for_routes_for_drain_timeout(autojump_clock: object) -> None:
    for latency, arrives in ((1.0, True), (50.0, False)):
        tiers, keys = Tiers(), keys_of(4)
        tiers["disk"].latency = latency
        async with tiers.open(attrs.evolve(EVICTS, drain_timeout=3.0, transfer_timeout=60.0)) as engine:
            await (await store(engine, keys)).wait()
            began = trio.current_time()
        assert trio.current_time() - began <= 6.1
        assert (tiers["disk"].contains_nowait(keys) == set(keys)) is arrives
        for entry in engine.quarantine:
            entry.release()
        tiers.assert_at_rest()


async def test_required_route_fails_the_store(autojump_clock: object) -> None:
    tiers, keys = Tiers(), keys_of(4)
    tiers["disk"].faults.error = OSError("no disk")
    async with tiers.open(routes=[Route("disk", required=True)]) as engine:
        handle = await store(engine, keys)
        result = await handle.wait()
        assert result.status is Status.FAILED and set(result.routes["disk"].failed) == set(keys)
        assert await handle.wait_routes() == {}
    tiers.assert_at_rest()


async def test_routes_behind_a_route_are_waited_for(autojump_clock: object) -> None:
    tiers, keys = Tiers(host=16, disk=64, far=64), keys_of(8)
    tiers["disk"].latency = tiers["far"].latency = 0.5
    async with tiers.open() as engine:
        await store(engine, keys)
        await engine.pipelines[0].drain()
        assert tiers["far"].contains_nowait(keys) == set(keys)
    tiers.assert_at_rest()


@pytest.mark.parametrize("chain", ["on_store", "on_evict"])
async def test_cancelled_anywhere_nothing_stays_held(autojump_clock: object, chain: str) -> None:
    tiers, caught = Tiers(host=8), 0
    tiers["disk"].latency = 0.1
    async with tiers.open(chain=chain) as engine:
        for nth in range(12):

            async def body() -> None:
                for at in range(4):
                    handle = await store(engine, keys_of(4, f"{nth}.{at}"))  # noqa: B023
                    await handle.wait()
                    await handle.wait_routes()

            caught += await cancelled_at_checkpoint(nth, body)
            await engine.drain()
            await trio.sleep(5.0)
            tiers.assert_at_rest()
    assert caught > 3


# --- what is evicted --------------------------------------------------------------------------------------------------


async def test_hanging_spills_leave_the_rest_of_a_tier(autojump_clock: object) -> None:
    tiers, dark = Tiers(host=16), 0.0
    tiers["disk"].faults.hang = True
    async with tiers.open(chain="on_evict") as engine:
        for at in range(60):
            keys = keys_of(4, str(at))
            began = trio.current_time()
            assert (await (await store(engine, keys)).wait()).status is Status.COMPLETE
            dark = max(dark, trio.current_time() - began)
            assert sum(len(entry.keys) for entry in engine.quarantine) <= 8
            await trio.sleep(0.3)
        assert dark <= 15.1  # as long as it takes to break it
        dropped = engine.statistics().spills["disk"].dropped
        assert set(dropped) <= {"unproven", "unavailable", "late"} and sum(dropped.values()) > 100
        for entry in engine.quarantine:
            entry.release()
    tiers.assert_at_rest()


async def test_optional_spill_drops_victims_beyond_its_share(autojump_clock: object) -> None:
    tiers = Tiers(host=16)
    tiers["disk"].latency = 3.0
    async with tiers.open(
        attrs.evolve(EVICTS, route_share=0.25), chain="on_evict", routes=[Route("disk", required=False)]
    ) as engine:
        handles = [await store(engine, keys_of(8, str(at))) for at in range(8)]
        for handle in handles:
            assert (await handle.wait()).status is Status.COMPLETE
        await engine.drain()
        spills = engine.statistics().spills["disk"]
        assert spills.dropped.keys() <= {"behind", "late"} and spills.dropped and spills.spilled
    tiers.assert_at_rest()


# --- the time of a copy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("megabytes", "seconds"), [(0, 5.0), (49, 5.0), (50, 6.0), (1_000, 25.0)])
def test_time_of_a_copy_grows_with_its_bytes(megabytes: int, seconds: float) -> None:
    assert PipelineConfig().time_to_copy(megabytes * 1_000_000) == seconds
    assert PipelineConfig(transfer_bytes_per_second=0).time_to_copy(megabytes * 1_000_000) == 5.0
