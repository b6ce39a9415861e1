"""An engine under random use: whatever happens, no wrong byte, nothing held at rest, and every block accounted for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio

from backends.abc import Deletion
from backends.testing import payload_of
from offload import NO_WAIT, BreakerConfig, Engine, PipelineConfig
from tests.support.engine_places import Places, keys_of, payloads, room

KEYS = keys_of(24)
SEEDS = range(20)


class Trouble:
    """Things that go wrong in a tier for a while, and what a user does meanwhile."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.places = Places(3, capacity=dice.choice([8, 16, 32]), latency=dice.choice([0.0, 0.2]))
        self.places.source.fill(KEYS)
        for name in "bc":
            self.places[name].fill(dice.sample(KEYS, 8))
        self.said = Counter[str]()

    def open(self) -> Engine:
        dice = self.dice
        return self.places.open(  # type: ignore[return-value]
            on_load_failure=dice.choice(["miss", "retry", "retry"]),
            promote=dice.choice([True, "b", False]),
            config=PipelineConfig(on_destination_full=dice.choice(["evict", "partial"]), drain_timeout=5.0),
            breaker=BreakerConfig(
                max_faults=dice.choice([1, 3, 100]), first_wait=0.5, longest_wait=2.0, load_timeout=30.0
            ),
        )

    async def use(self, engine: Engine) -> None:
        for _ in range(25):
            await self.dice.choice([self.store, self.read, self.read, self.read, self.delete, self.harm])(engine)
            await trio.sleep(self.dice.choice([0.0, 0.05, 0.3]))

    async def store(self, engine: Engine) -> None:
        start = self.dice.randrange(20)
        handle = await engine.store(self.places.source.weak(KEYS[start : start + 4]), precondition=NO_WAIT)
        if self.dice.random() < 0.3:
            handle.request_cancel()

    async def read(self, engine: Engine) -> None:
        start = self.dice.randrange(20)
        keys = KEYS[start : start + self.dice.randrange(1, 12)]
        with trio.move_on_after(self.dice.choice([0.1, 0.5, 100.0])):
            async with await engine.lookup(keys) as hit:
                buffers, destination = room(len(hit))
                promote = self.dice.choice([None, True, "b", False])
                result = await engine.load(hit, destination, promote=promote)
                assert buffers[: result.loaded] == payloads(keys[: result.loaded])
                self.said["loaded"] += result.loaded

    async def delete(self, engine: Engine) -> None:
        answers = await engine.delete(self.dice.sample(KEYS, 2))
        assert set(answers) <= set(Deletion)

    async def harm(self, engine: Engine) -> None:
        tier = self.places[self.dice.choice("abc")]
        match self.dice.randrange(5):
            case 0:
                there = sorted(tier.contains_nowait(KEYS))
                if there:
                    tier.damage(self.dice.choice(there))
            case 1:
                tier.faults.load_error = OSError("disk")
            case 2:
                tier.faults.error = OSError("disk")
            case 3:
                tier.faults.missing = {self.dice.choice(KEYS): "torn"}
            case 4:
                tier.faults = type(tier.faults)()

    def end(self) -> None:
        for tier in self.places.tiers.values():
            tier.faults = type(tier.faults)()

    async def check(self, engine: Engine) -> None:
        self.places.assert_at_rest()
        for name, tier in self.places.tiers.items():
            there = tier.contains_nowait(KEYS)
            for key in there:
                data = tier.get(key)
                assert data is None or data == payload_of(key, len(data)), name
        statistics = engine.statistics()
        assert statistics.open_hits == statistics.promoting_blocks == 0
        assert statistics.recovered_blocks <= statistics.retried_blocks
        routes_up = engine._promoter.routes_up.values()
        assert not any(route_up.staging._there or route_up.staging._held or route_up._ends for route_up in routes_up)
        self.said["promoted"] += statistics.promoted_blocks
        self.said["recovered"] += statistics.recovered_blocks
        self.said["refused"] += sum(statistics.promotions_refused.values())


@pytest.mark.parametrize("clean", [True, False])
async def test_whatever_happens_no_byte_is_wrong_and_nothing_is_left(clean: bool, autojump_clock: object) -> None:
    said = Counter[str]()
    for seed in SEEDS:
        trouble = Trouble(seed)
        with trio.fail_after(10_000):
            async with trouble.open() as engine:  # type: ignore[attr-defined]
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(trouble.use, engine)
                trouble.end()
                if clean:
                    await engine.drain()
        await trouble.check(engine)
        said += trouble.said
    assert min(said[word] for word in ("loaded", "promoted", "recovered", "refused")) > 0, said
