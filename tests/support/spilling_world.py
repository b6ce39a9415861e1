"""Stairs of fakes joined by chains on eviction, and a watch that sees every block at every step of the scheduler."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from backends.abc import Key
from backends.testing import FakeTier, payload_of
from maru.eviction import LRU
from offload import NO_WAIT, BatchConfig, PipelineConfig, open_pipeline
from offload._pipeline.spill import spill
from offload._pipeline.spill_route import config_below, what_is_new
from offload.policies import PresenceFilter

SIZE = 16


def keys_of(text: str) -> list[Key]:
    return [letter.encode() for letter in text]


class Watch(trio.abc.Instrument):
    """After each step: whatever was stored is in some tier, unless it was dropped and said to be, or left the last one.

    What is on its way down, as the last tier has it already, and is evicted there meanwhile, has left the last one.
    """

    def __init__(self, tiers: list[FakeTier]) -> None:
        self.tiers = tiers
        self.known: set[Key] = set()
        self.dropped: list[tuple[Key, str]] = []
        self.gone: set[Key] = set()  # what may be nowhere
        self.excused: set[Key] = set()  # the same, for ever: damaged by the test
        self.problems: list[str] = []
        tiers[-1].on_evicted(self.gone.update)

    def told(self, keys: Any, reason: str) -> None:
        self.dropped += [(key, reason) for key in keys]
        self.gone.update(keys)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        there: set[Key] = set()
        settled: set[Key] = set()
        for tier in self.tiers:
            keys = tier.pool._slot_of.keys()
            there |= keys
            settled |= keys - set(tier.pool._leaving.values())
        self.problems += [f"{key!r} is nowhere" for key in self.known - there - self.gone - self.excused]
        self.known |= there
        self.known -= self.gone - there
        self.gone -= settled


class Stairs:
    """A source and two or more tiers, each of which evicts to the next."""

    def __init__(self, *capacities: int, knobs: dict[str, Any] | None = None, latency: float = 0.0) -> None:
        self.source = FakeTier(256, SIZE)
        self.tiers = [FakeTier(capacity, SIZE, eviction=LRU(), latency=latency) for capacity in capacities]
        self.upper, self.lower = self.tiers[0], self.tiers[1]
        self.watch = Watch(self.tiers)
        defaults = {"on_destination_full": "evict", "batch_config": BatchConfig(flush_interval=0.0)}
        self.config = PipelineConfig(**{**defaults, **(knobs or {})})
        self.spillings: list[Any] = []
        self.routes: list[Any] = []
        self.into: Any = None
        self.faces: dict[int, Any] = {}  # as whom a tier is written to, where that is not itself

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Stairs]:
        trio.lowlevel.add_instrument(self.watch)
        try:
            async with AsyncExitStack() as stack:
                await self._enter(stack)
                yield self
        finally:
            trio.lowlevel.remove_instrument(self.watch)

    async def _enter(self, stack: AsyncExitStack) -> None:
        configs = [self.config]
        for _ in self.tiers[1:]:
            configs.append(config_below(configs[-1]))
        for at in range(len(self.tiers) - 1, 0, -1):
            above, below = self.tiers[at - 1], self.faces.get(at, self.tiers[at])
            route = await stack.enter_async_context(
                open_pipeline(
                    above, below, config=configs[at], policies=[what_is_new(below, configs[at])], name=f"tier-{at}"
                )
            )
            self.routes.insert(0, route)
            self.spillings.insert(0, await stack.enter_async_context(spill(above, route, dropped=self.watch.told)))
        self.into = await stack.enter_async_context(
            open_pipeline(
                self.source, self.upper, config=self.config, policies=[PresenceFilter(self.upper)], name="tier-0"
            )
        )

    @property
    def spilling(self) -> Any:
        return self.spillings[0]

    def store(self, keys: list[Key]) -> Any:
        self.source.fill([key for key in keys if not self.source.contains_nowait([key])])
        return self.into.enqueue_nowait(self.source.weak(keys), precondition=NO_WAIT)

    async def stored(self, keys: list[Key]) -> Any:
        return await self.store(keys).wait()

    def judge(self) -> list[str]:
        """At rest: what went wrong. Nothing is held or reserved, and what went is counted as what became of it."""
        problems = list(self.watch.problems)
        for at, tier in enumerate(self.tiers):
            pool = tier.pool.statistics()
            if (pool.staged, pool.held, pool.waiting, pool.leaving) != (0, 0, 0, 0):
                problems.append(f"tier {at} is not at rest: {pool}")
            if tier.pool.free + len(tier) != tier.pool.capacity:
                problems.append(f"tier {at} has lost {tier.pool.capacity - tier.pool.free - len(tier)} slots")
            for key in tier.pool._slot_of:
                if tier.get(key) != payload_of(key, SIZE):
                    problems.append(f"{key!r} has other bytes in tier {at}")
        for at, spilling in enumerate(self.spillings):
            statistics, evicted = spilling.statistics(), self.tiers[at].pool.statistics().evicted
            if statistics.under_way:
                problems.append(f"{statistics.under_way} blocks are under way for ever")
            if statistics.spilled + sum(statistics.dropped.values()) != evicted:
                problems.append(f"tier {at} evicted {evicted}, of which are told: {statistics}")
        told = sum(sum(spilling.statistics().dropped.values()) for spilling in self.spillings)
        if told != len(self.watch.dropped):
            problems.append(f"{told} dropped, {len(self.watch.dropped)} told")
        return problems


async def play(seed: int) -> list[str]:
    """Stores, reads, cancels, and a lower tier that is slow, full, broken or stuck, in an order drawn from the seed."""
    chance = random.Random(seed)
    knobs = {"destination_timeout": 0.4, "transfer_timeout": 0.5, "drain_timeout": 2.0, "max_concurrent_transfers": 2}
    capacities = chance.choice([(8, 12), (6, 40), (6, 8, 30)])
    stairs = Stairs(*capacities, knobs=knobs, latency=chance.choice([0.0, 0.002, 0.01]))
    names = [b"%d" % number for number in range(30)]
    async with stairs.open(), trio.open_nursery() as nursery:

        async def stores() -> None:
            for _ in range(12):
                handle = stairs.store(chance.sample(names, chance.randrange(1, 7)))
                await trio.sleep(chance.choice([0.0, 0.001, 0.004, 0.02]))
                if chance.random() < 0.25:
                    await handle.cancel()

        async def reads() -> None:
            for _ in range(15):
                tier = chance.choice(stairs.tiers)
                async with await tier.pin(chance.sample(names, 3)):
                    await trio.sleep(chance.choice([0.0, 0.002, 0.03]))

        async def breaks() -> None:
            for _ in range(6):
                faults = chance.choice(stairs.tiers[1:]).faults
                fault = chance.choice(["gate", "error", "failing", "room", "none"])
                if fault == "gate":
                    faults.gate = trio.Event()
                elif fault == "room":
                    faults.room = trio.Event()
                elif fault == "error":
                    faults.error = OSError("broken")
                elif fault == "failing":
                    faults.failing = dict.fromkeys(chance.sample(names, 8), OSError("torn"))
                await trio.sleep(chance.choice([0.003, 0.02, 0.3]))
                for event in (faults.gate, faults.room):
                    if event is not None:
                        event.set()
                faults.gate = faults.room = faults.error = None
                faults.failing = {}

        for task in (stores, stores, reads, breaks):
            nursery.start_soon(task)
        if chance.random() < 0.2:
            await trio.sleep(chance.choice([0.01, 0.05]))
            nursery.cancel_scope.cancel()
    for route in [*stairs.routes, stairs.into]:
        for quarantined in route.quarantine:
            quarantined.release()
    return stairs.judge()
