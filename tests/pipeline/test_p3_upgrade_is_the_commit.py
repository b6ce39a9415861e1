"""P3: upgrading is the point of no return."""

import pytest
import trio

from offload import Status
from tests.support.invariants import TICK, keys_of, open_world


async def test_before_it_nothing_is_held_and_behind_it_everything(autojump_clock):
    seen = []

    def look(hook):
        def saw(subject):
            source, destination = world.source.statistics(), world.destination.statistics()
            seen.append((hook, handle.committed, source.held_blocks, destination.reserved_blocks))

        return saw

    async with open_world(latency=TICK) as world:
        handle = world.store("a", 8)
        for hook in ("batching", "transfer", "pre_claim", "sweep_claim_gap", "post_claim", "xfer_start", "settled"):
            world.at(hook, look(hook))
        await handle.wait()
    assert seen == [
        ("batching", False, 0, 0),
        ("transfer", False, 0, 0),
        ("pre_claim", False, 0, 8),  # a waiting reserve holds nothing, a granted one holds room
        ("sweep_claim_gap", False, 0, 8),
        ("post_claim", True, 0, 8),
        ("xfer_start", True, 8, 8),
        ("settled", True, 0, 0),
    ]


@pytest.mark.parametrize("hook", ["post_claim", "xfer_start", "xfer_end"])
async def test_behind_it_a_cancel_tears_nothing_down(autojump_clock, hook):
    async with open_world(latency=TICK) as world:
        handles = [world.store(label, 4) for label in "ab"]
        world.at(hook, lambda subject: handles[0].request_cancel())
        for label, handle in zip("ab", handles, strict=True):
            assert list((await handle.wait()).completed) == keys_of(label, 4)


async def test_nothing_runs_between_the_last_sweep_and_the_upgrade(autojump_clock):
    """No other task takes a step from the sweep to the start of the copy: all of it is one step."""
    steps = []

    class Steps(trio.abc.Instrument):
        def before_task_step(self, task):
            steps.append(task.name)

    async with open_world() as world, trio.open_nursery() as nursery:

        async def busy():
            while True:
                await trio.lowlevel.checkpoint()

        nursery.start_soon(busy)
        world.at("pre_claim", lambda batch: trio.lowlevel.add_instrument(instrument))
        world.at("xfer_start", lambda batch: trio.lowlevel.remove_instrument(instrument))
        instrument = Steps()
        await world.stored("a", 8)
        assert steps == []
        nursery.cancel_scope.cancel()


async def test_the_claim_is_announced_once_per_batch_with_all_of_its_containers(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        handles = [world.store(label) for label in "abcd"]
        world.at("sweep_claim_gap", lambda batch: handles[1].request_cancel())
        for handle in handles:
            await handle.wait()
        assert world.happened("post_claim") == [(1, 3, 4)]


async def test_a_committed_container_ends_by_its_result(autojump_clock):
    async with open_world(latency=2 * TICK) as world:
        world.faults.error = OSError("torn")
        handle = world.store("a", 8)
        await handle.status_value.wait_value(Status.TRANSFERRING)
        await handle.cancel()
        assert handle.status is Status.FAILED


async def test_room_at_the_destination_is_awaited_before_it(autojump_clock):
    async with open_world() as world:
        world.faults.room = trio.Event()
        handle = world.store("a", 8)
        await trio.sleep(1.0)
        assert not handle.committed
        assert world.source.statistics().held_blocks == 0
        await handle.cancel()
        assert handle.status is Status.CANCELLED
