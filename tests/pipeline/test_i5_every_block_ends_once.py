"""I5: committed implies every block ends in exactly one of completed, failed, evicted."""

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.testing import FakeTier
from offload import Status, open_pipeline
from tests.support.invariants import TICK, World, config_of, keys_of, open_world

fates = st.lists(st.sampled_from(["stored", "duplicate", "failing", "evicted", "filtered"]), min_size=1, max_size=8)


@given(st.lists(fates, min_size=1, max_size=4), st.sampled_from(["evict", "partial", "wait"]))
@settings(max_examples=60, deadline=None)
def test_whatever_becomes_of_each(several, when_full):
    async def main():
        world = World(capacity=200)
        expected = {}
        plan = {}
        for i, column in enumerate(several):
            for key, fate in zip(keys_of(f"{i}-", len(column)), column, strict=True):
                plan[key] = fate
                expected[key] = {"stored": "completed", "duplicate": "completed", "failing": "failed"}.get(fate, fate)

        def reject(keys):
            return {key: "no" for key in keys if plan[key] == "filtered"}

        async with open_world(world=world, policies=[reject], on_destination_full=when_full) as opened:
            handles = [opened.store(f"{i}-", len(column)) for i, column in enumerate(several)]
            opened.evict(*[key for key, fate in plan.items() if fate == "evicted"])
            duplicates = [key for key, fate in plan.items() if fate == "duplicate"]
            opened.destination.fill(duplicates)
            opened.ledger.before[opened.destination].update(duplicates)
            opened.faults.failing.update({key: OSError() for key, fate in plan.items() if fate == "failing"})
            ends = {}
            for handle in handles:
                result = await handle.wait()
                for name in ("completed", "failed", "evicted", "filtered"):
                    for key in getattr(result, name):
                        assert key not in ends
                        ends[key] = name
                assert result.status is (Status.FAILED if result.failed else Status.COMPLETE)
            assert ends == expected

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("what", ["raises", "too few", "too many"])
async def test_where_the_executor_breaks_its_promise_all_have_failed(autojump_clock, what):
    async with open_world() as world:
        if what == "raises":
            world.faults.error = RuntimeError("bug")
        else:
            world.faults.extra_outcomes = -3 if what == "too few" else 3
        handles = [world.store("a", 4), world.store("b", 4)]
        world.evict(b"a0")
        assert list((await handles[0].wait()).evicted) == [b"a0"]
        assert set(handles[0].result.failed) == {b"a1", b"a2", b"a3"}
        assert set((await handles[1].wait()).failed) == set(keys_of("b", 4))


async def test_a_block_that_was_there_already_counts_as_completed(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 2)
        world.at("xfer_start", lambda batch: world.destination.fill([b"a0"]))
        world.at("post_claim", lambda batch: world.ledger.before[world.destination].add(b"a0"))
        result = await handle.wait()
        assert list(result.completed) == keys_of("a", 2)
        assert world.destination.statistics().duplicates == 1


@pytest.mark.parametrize("free", range(0, 7))
async def test_partial_room(autojump_clock, free):
    world = World(capacity=6)
    world.destination.fill(keys_of("old", 6 - free))
    async with open_world(world=world, on_destination_full="partial", min_batch_size=6):
        handles = [world.store(label, 2, kind=kind) for label, kind in zip("abc", KINDS, strict=True)]
        world.evict(b"a1")
        results = [await handle.wait() for handle in handles]
        ends = [len(result.completed) + len(result.failed) + len(result.evicted) for result in results]
        assert ends == [2, 2, 2]
        # Room that was granted to an evicted block is given back, not passed on.
        assert sum(len(result.completed) for result in results) == max(0, free - (free >= 2))


KINDS = ("weak", "strong", "external")


async def test_a_route_of_a_chain_is_committed_from_the_start(autojump_clock):
    world = World()
    below = FakeTier(4, 16)
    config = config_of(destination_timeout=2 * TICK, on_destination_full="wait")
    try:
        async with open_pipeline(world.destination, below, config=config, name="route") as route:
            world.ledger.watch(route)
            async with open_world(world=world, chain=[route]):
                below.fill(keys_of("old", 4))
                world.ledger.before[below].update(keys_of("old", 4))
                result = await world.stored("a", 2)
                assert set(result.routes["route"].failed) == set(keys_of("a", 2))
    finally:
        world.ledger.judge()
