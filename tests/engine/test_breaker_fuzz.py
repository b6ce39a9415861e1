"""A tier that falls ill and recovers at random, under stores, loads and cancels: in the end it is well, and nothing is held."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

from backends.abc import Unproven
from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    DrainUnproven,
    HealthState,
    LoadPriority,
    Status,
    TierTooSlow,
    TierUnavailable,
    open_pipeline,
)
from offload.policies import PresenceFilter
from tests.support.ill_tiers import SIZE, Ill, RemoteIll, ill_and_guard, places
from tests.support.invariants import config_of, keys_of

ILLNESSES = (OSError("gone"), TimeoutError("late"), trio.BrokenResourceError("torn"))


@pytest.mark.parametrize("kind", [Ill, RemoteIll])
@pytest.mark.parametrize("seed", range(12))
async def test_in_the_end_it_is_well_and_nothing_is_held(autojump_clock, seed: int, kind: Any) -> None:
    dice = random.Random(seed)
    tier, guard = ill_and_guard(kind, capacity=12, load_timeout=8.0)
    source = FakeTier(256, SIZE)
    load_priority = LoadPriority()
    filters = [PresenceFilter(guard)]
    ends: list[Status] = []

    async def store(pipeline: Any, at: float, which: int, n: int, patience: float) -> None:
        await trio.sleep(at)
        keys = keys_of(f"{which}-", n)
        source.fill(keys)
        handle = pipeline.enqueue_nowait(source.weak(keys), precondition=NO_WAIT)
        with trio.move_on_after(patience):
            ends.append((await handle.wait()).status)
            return
        with suppress(DrainUnproven):
            await handle.cancel()
        ends.append(handle.status)

    async def load(at: float, which: int, between: float, patience: float) -> None:
        await trio.sleep(at)
        with trio.move_on_after(patience), load_priority.loading():
            try:
                async with await guard.pin(keys_of(f"{which}-", 4)) as lease:
                    await trio.sleep(between)
                    await guard.load(lease, places(4))
            except (TierUnavailable, TierTooSlow, *map(type, ILLNESSES)):
                pass

    async def sicken(dice: random.Random) -> None:
        for _ in range(25):
            await trio.sleep(dice.uniform(0.2, 4.0))
            tier.hang = dice.random() < 0.2
            tier.ill = dice.choice([None, None, *ILLNESSES])
            tier.faults.error = dice.choice([None, None, OSError("gone"), Unproven("?")])
            tier.faults.hang = dice.random() < 0.1
        tier.hang, tier.ill, tier.faults.error, tier.faults.hang = False, None, None, False

    config = config_of(
        flush_interval=0.0,
        on_destination_full=dice.choice(["wait", "evict", "partial", "fail"]),
        destination_timeout=5.0,
        transfer_timeout=6.0,
        max_concurrent_transfers=dice.choice([1, 2]),
        max_batch_size=4,
        min_batch_size=1,
    )
    with trio.fail_after(10_000):
        async with (
            open_pipeline(source, guard, policies=filters, config=config, load_priority=load_priority) as one,
            open_pipeline(source, guard, config=config, load_priority=load_priority) as two,
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sicken, random.Random(-seed - 1))
                for _ in range(60):
                    where, patience = dice.choice([one, two]), dice.choice([0.1, 1.0, 1e6])
                    nursery.start_soon(
                        store, where, dice.uniform(0, 50), dice.randrange(8), dice.randrange(1, 5), patience
                    )
                    patience = dice.choice([0.1, 3.0, 1e6])
                    nursery.start_soon(load, dice.uniform(0, 50), dice.randrange(8), dice.choice([0.0, 0.5]), patience)
            for entry in [*one.quarantine, *two.quarantine]:
                entry.release()
            await trio.sleep(120.0)  # longer than any wait
            await tier.delete(keys_of("old", 1))
            for n in range(8):
                await tier.delete(keys_of(f"{n}-", 5))
            source.fill([b"last"])
            last = await one.enqueue(source.weak([b"last"]), precondition=NO_WAIT)
            assert (await last.wait()).status is Status.COMPLETE
            assert len(ends) == 60
    assert (guard.health.state, guard.health.next_probe) == (HealthState.CLOSED, None)
    assert tier.at_rest() and source.statistics().held_blocks == 0
    statistics = load_priority.statistics()
    assert (statistics.loads, statistics.yielding, load_priority._queue.exception) == (0, 0, None)
    assert not guard._runner._waiting
    assert guard._runner.breaker.generation > 6  # it broke, and was tried again, more than once
