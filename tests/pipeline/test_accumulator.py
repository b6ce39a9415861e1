"""When a batch leaves, against a naive model; and, in a pipeline, that no wake-up is lost."""

import math

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import BatchConfig, Status
from offload._pipeline.accumulator import Accumulator
from tests.support import determinism
from tests.support.invariants import TICK, World, keys_of, open_world
from tests.support.steps import AtStep

configs = st.builds(
    lambda most, least, flush: BatchConfig(most, min(least, most), flush * TICK),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([0, 1, 4, 10]),
)


class Naive:
    """Keeps all containers in a list, and thinks about them from the start each time."""

    def __init__(self, config):
        self.config = config
        self.ready = []  # (size, since)
        self.flushing = False

    def due(self, now):
        if not self.ready:
            return False
        return (
            self.flushing
            or sum(size for size, _ in self.ready) >= self.config.min_batch_size
            or now - self.ready[0][1] >= self.config.flush_interval
        )

    def take(self):
        batch = [self.ready.pop(0)]
        while self.ready and sum(size for size, _ in batch) + self.ready[0][0] <= self.config.max_batch_size:
            batch.append(self.ready.pop(0))
        return [size for size, _ in batch]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 15)),
        st.tuples(st.just("withdraw"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.integers(0, 6)),
        st.tuples(st.just("flush"), st.booleans()),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=60,
)


@given(configs, steps)
@settings(max_examples=400, deadline=None)
def test_it_decides_as_one_who_counts_from_the_start(config, steps):
    accumulator, naive = Accumulator(config), Naive(config)
    ready = []
    now = 0.0
    for what, n in steps:
        if what == "put":
            ready.append((n, now))
            naive.ready.append((n, now))
            accumulator.blocks += n
        elif what == "withdraw" and ready:
            size, _ = ready.pop(n % len(ready))
            naive.ready.pop(n % len(naive.ready))
            accumulator.blocks -= size
        elif what == "wait":
            now += n * TICK
        elif what == "flush":
            accumulator.flushing = naive.flushing = bool(n)
        elif what == "take" and ready and accumulator.leaves_at(ready[0][1]) <= now:
            batch = []
            while ready and accumulator.fits(sum(batch), ready[0][0]):
                batch.append(ready.pop(0)[0])
            accumulator.blocks -= sum(batch)
            assert batch == naive.take()
            assert sum(batch) <= config.max_batch_size or len(batch) == 1
        assert accumulator.blocks == sum(size for size, _ in ready)
        if ready:
            assert (accumulator.leaves_at(ready[0][1]) <= now) == naive.due(now)


@given(configs, st.integers(0, 30), st.integers(0, 100))
def test_it_leaves_now_or_after_the_flush_interval(config, blocks, since):
    accumulator = Accumulator(config, blocks)
    assert accumulator.leaves_at(since * TICK) in (-math.inf, since * TICK + config.flush_interval)


@given(configs, st.integers(1, 100))
def test_the_first_container_always_fits(config, blocks):
    assert Accumulator(config).fits(0, blocks)


# --- in a pipeline: hand-over by call, mixed with wake-ups --------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2)]])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("survivor", [0, 3, 7])
def test_one_of_eight_survives_and_leaves_in_time(slots, survivor, seed):
    """Eight blocks are due, a slot is woken, and before it runs seven of them are cancelled."""

    async def main():
        async with open_world(
            world=world, max_concurrent_transfers=slots, min_batch_size=8, flush_interval=10 * TICK
        ) as opened:
            await trio.testing.wait_all_tasks_blocked()
            opened.store("0-", 1)
            for i in range(1, 8):
                opened.store(f"{i}-", 1)
            with trio.fail_after(1.0):
                result = await opened.handles[f"{survivor}-"].wait()
            assert result.status is Status.COMPLETE
            assert trio.current_time() <= 10 * TICK

    for k in range(1, 200):
        world = World()

        def cancel(world=world):
            for label, handle in world.handles.items():
                if label != f"{survivor}-":
                    handle.request_cancel()

        instrument = AtStep(k, cancel)
        try:
            determinism.run(main, seed=seed, instruments=[instrument])
        except BaseException as error:
            error.add_note(f"cancelled before step {k}, seed {seed}")
            raise
        if instrument.left > 0:
            break
    else:
        raise AssertionError("it never ended")


@pytest.mark.parametrize("slots", [1, 2, 3])
async def test_every_container_leaves_when_it_is_due_while_slots_are_idle(autojump_clock, slots):
    """Copies take no time: whoever is ready leaves within the flush interval, and full batches at once."""
    async with open_world(
        capacity=512, max_concurrent_transfers=slots, min_batch_size=4, max_batch_size=6, flush_interval=5 * TICK
    ) as world:
        waited = {}

        async def one(i, at, n):
            await trio.sleep(at)
            start = trio.current_time()
            await world.stored(f"{i}-", n)
            waited[i] = trio.current_time() - start

        async with trio.open_nursery() as nursery:
            for i in range(120):
                nursery.start_soon(one, i, (i * 7 % 90) * TICK, 1 + i % 4)
        assert len(waited) == 120
        assert max(waited.values()) <= 5 * TICK
        assert all(waited[i] == 0.0 for i in waited if 1 + i % 4 >= 4)


async def test_what_was_cancelled_no_longer_counts(autojump_clock):
    async with open_world(min_batch_size=8, flush_interval=10 * TICK) as world:
        handles = [world.store(label, n) for label, n in (("a", 4), ("b", 3))]
        await trio.testing.wait_all_tasks_blocked()
        await handles[0].cancel()
        world.store("c", 4)
        await trio.sleep(5 * TICK)
        assert world.destination.batches == []  # 3 + 4 blocks wait for company, 11 would not
        await handles[1].wait()
        assert trio.current_time() == 10 * TICK


async def test_a_slot_that_gives_up_its_place_hands_its_alarm_on(autojump_clock):
    async with open_world(max_concurrent_transfers=2, flush_interval=10 * TICK, latency=3 * TICK) as world:
        start = trio.current_time()
        first = world.store("a", 2)
        await trio.sleep(9 * TICK)
        world.store("b", 8)  # due at once: takes the slot whose alarm was set
        second = world.store("c", 1)
        await first.wait()
        await second.wait()
        assert trio.current_time() - start <= (9 + 10 + 3) * TICK
        assert world.found() == set(keys_of("a", 2) + keys_of("b", 8) + keys_of("c", 1))
