"""Hosts whose plugins answer in any order, at any time, with or without a signal, also in the very tick in which nobody waits
any more: in virtual time, on a grid of whole seconds, so that this happens all the time.

What is loaded is right, and when all is answered nothing is held, locked, hidden, outstanding or in quarantine.
"""

import math
import random

import pytest
import trio
import trio.testing

from backends import Unproven
from backends.abc import LOADED, STORED, Missed, RoomRequest
from backends.base.slots import PagesDestination
from backends.plugins import HostConfig, LMCacheTier, NativeTier, NoAnswer, PluginFault
from backends.testing import FakeTier, payload_of
from tests.support import determinism
from tests.support.plugin_faults import PlayedAdapter, PlayedConnector
from tests.support.plugin_play import SIZE, of_host, settle

KEYS = [b"%02d" % number for number in range(10)]
DEADLINE = 8


def native(**knobs):
    connector = PlayedConnector(deletes=True)
    return connector, NativeTier(connector, SIZE, HostConfig(capacity_bytes=6 * SIZE, **knobs))


def adapted(**knobs):
    adapter = PlayedAdapter()
    return adapter, LMCacheTier(adapter, SIZE, HostConfig(**knobs))


class Play:
    """One plugin, several users, and whoever answers."""

    def __init__(self, seed, make):
        self.dice = random.Random(seed)
        self.plugin, self.tier = make(deadline=DEADLINE, close_deadline=100, rescue_interval=3)
        self.plugin.automatic = False
        self.source = FakeTier(len(KEYS), SIZE)
        self.source.fill(KEYS)
        self.stored = self.loaded = 0

    async def store(self, keys):
        reservation = await self.tier.reserve(RoomRequest(keys, SIZE, self.dice.choice(["fail", "evict", "wait"])))
        refs = self.source.upgrade(list(reservation.granted))
        try:
            outcomes = await reservation.transfer(self.source, refs)
        finally:
            self.source.release(refs)
            reservation.release()
        self.stored += outcomes.count(STORED)

    async def load(self, keys):
        async with await self.tier.pin(keys) as lease:
            buffers = [bytearray(SIZE) for _ in keys]
            outcomes = await self.tier.load(lease, PagesDestination.over(buffers))
        for key, outcome, buffer in zip(lease.keys, outcomes, buffers, strict=False):
            assert outcome in (LOADED, Missed("gone")), outcome
            assert outcome != LOADED or buffer == payload_of(key, SIZE), key
        self.loaded += outcomes.count(LOADED)

    async def contains(self, keys):
        assert await self.tier.contains(keys) <= set(keys)

    async def delete(self, keys):
        await self.tier.delete(keys)

    async def use(self):
        doings = [self.store, self.store, self.load, self.load, self.load, self.contains]
        if isinstance(self.plugin, PlayedConnector):  # an adapter deletes in a thread, where time is real
            doings.append(self.delete)
        for _ in range(50):
            keys = sorted(self.dice.sample(KEYS, self.dice.randrange(1, 5)))
            with trio.move_on_after(self.dice.choice([0, 1, 4, DEADLINE, 2 * DEADLINE, 100, 100])):
                try:
                    await self.dice.choice(doings)(keys)
                except (NoAnswer, PluginFault, Unproven):
                    await trio.lowlevel.checkpoint()

    async def answer(self):
        while True:
            await trio.sleep(self.dice.choice([0, 0, 0, 1, 1, 2, DEADLINE]))
            for _ in range(self.dice.randrange(1, 5)):
                if waiting := self.plugin.waiting:
                    waiting.insert(0, waiting.pop(self.dice.randrange(len(waiting))))
                    self.plugin.answer(signal=self.dice.random() < 0.8)

    async def run(self, clock):
        clock.autojump_threshold = 0
        async with self.tier:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.answer)
                async with trio.open_nursery() as users:
                    for _ in range(4):
                        users.start_soon(self.use)
                nursery.cancel_scope.cancel()
            while of_host(self.tier, "outstanding") != (0,):
                while self.plugin.waiting:
                    self.plugin.answer()
                await settle()
                await trio.sleep(4)  # what has lost its signal is found
            self.check()
            clock.autojump_threshold = math.inf  # it is closed in a thread, where time is real

    def check(self):
        tombstones, staging = self.tier._state.tombstones, self.tier._state.staging
        assert (tombstones.writing, tombstones.in_doubt, tombstones.deleting) == ({}, set(), set())
        assert of_host(self.tier, "in_doubt", "quarantined_bytes", "failed_unlocks", "raised") == (0, 0, 0, 0)
        assert of_host(self.tier, "unknown", "twice", "wrong_bits") == (0, 0, 0)
        assert len(set(map(id, staging._spare))) == len(staging._spare)
        assert getattr(self.plugin, "locks", {}) == {}
        statistics = self.tier.statistics()
        assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make", [native, adapted])
def test_whatever_is_answered_whenever(make, seed):
    async def run():
        play = Play(seed, make)
        await play.run(clock)
        return play

    clock = trio.testing.MockClock()
    with determinism.deterministic(seed):  # by chance, nothing might be loaded
        play = trio.run(run, clock=clock)
    assert play.stored and play.loaded


@pytest.mark.long
@pytest.mark.parametrize("make", [native, adapted])
async def test_whatever_is_answered_whenever_for_long(make, mock_clock):
    for seed in range(100, 300):
        await Play(seed, make).run(mock_clock)
