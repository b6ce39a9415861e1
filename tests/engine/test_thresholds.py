"""Thresholds of an engine that are changed while it runs."""

import attrs
import pytest
import trio
import trio.testing

from backends.testing import FakeTier
from offload import BreakerConfig, EngineConfig, HealthState, LoadOrRecompute, open_engine
from tests.support.ill_tiers import SIZE, Ill, ill_and_guard

KEYS = [b"key %d" % at for at in range(4)]


def config_of(tier, **options):
    return EngineConfig(tiers={"ill": tier}, **options)


def set_thresholds(engine, config):
    engine.set_thresholds(
        lookup_timeout=config.lookup_timeout, breaker=config.breaker, load_or_recompute=config.load_or_recompute
    )


async def lookups_until_it_breaks(engine):
    for n in range(1, 20):
        async with await engine.lookup(KEYS):
            pass
        if engine.statistics().health["ill"].state is not HealthState.CLOSED:
            return n
    return None


async def test_a_tier_counts_as_broken_by_the_number_that_holds_now(autojump_clock):
    tier = Ill()
    config = config_of(tier, breaker=BreakerConfig(max_faults=5))
    async with open_engine(FakeTier(8, SIZE), config) as engine:
        tier.fill(KEYS)
        tier.ill = OSError("the disk")
        set_thresholds(engine, attrs.evolve(config, breaker=BreakerConfig(max_faults=2)))
        assert await lookups_until_it_breaks(engine) == 2


async def test_a_tier_that_came_with_a_breaker_keeps_its_own(autojump_clock):
    tier, guard = ill_and_guard(max_faults=4)
    config = config_of(guard)
    async with open_engine(FakeTier(8, SIZE), config) as engine:
        tier.fill(KEYS)
        tier.ill = OSError("the disk")
        set_thresholds(engine, attrs.evolve(config, breaker=BreakerConfig(max_faults=1)))
        assert await lookups_until_it_breaks(engine) == 4


async def test_a_lookup_waits_as_long_as_was_said_when_it_began(autojump_clock):
    tier = Ill()
    config = config_of(tier, lookup_timeout=2.0)
    async with open_engine(FakeTier(8, SIZE), config) as engine, trio.open_nursery() as nursery:
        tier.fill(KEYS)
        tier.hang = True
        took = []

        async def look():
            began = trio.current_time()
            async with await engine.lookup(KEYS) as hit:
                assert "ill" in hit.unavailable
            took.append(trio.current_time() - began)

        nursery.start_soon(look)
        await trio.testing.wait_all_tasks_blocked()
        set_thresholds(engine, attrs.evolve(config, lookup_timeout=0.25))
        await look()
    assert took == pytest.approx([0.25, 2.0])


async def test_what_a_load_may_lose_and_when_a_tier_is_measured_are_those_of_now(autojump_clock):
    choice = LoadOrRecompute(mode="enforce", seconds_per_block=1.0)
    config = config_of(FakeTier(8, SIZE), load_or_recompute=choice)
    async with open_engine(FakeTier(8, SIZE), config) as engine:
        before = engine._choice.budget(4, 0.0)
        other = attrs.evolve(choice, max_loss=0.5, probe_interval=7.0)
        set_thresholds(engine, attrs.evolve(config, load_or_recompute=other))
        after = engine._choice.budget(4, 0.0)
        assert (before.left(0, 0.0), after.left(0, 0.0)) == pytest.approx((0.02 * 4, 0.5 * 4))
        assert engine._probe.interval == 7.0
