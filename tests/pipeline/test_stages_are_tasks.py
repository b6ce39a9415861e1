"""Four stages, each a task that knows the next one only by its channel: they may start in any order."""

from itertools import permutations

import pytest
import trio

from backends.abc import WeakBlocks
from backends.testing import FakeTier
from offload import NO_WAIT, OffloadContainer, Pipeline, PipelineConfig, Status, open_pipeline
from offload._pipeline.channel import CancellableChannel
from tests.support.invariants import keys_of

STAGES = ("admission", "awaiting", "batching", "transfer")


def start_in(order, monkeypatch):
    """Have the stages start in this order, ten ticks apart; the last of them long after the first containers came."""
    link = Pipeline._link

    def linked(self, *args):
        link(self, *args)
        for position, name in enumerate(order):
            stage = getattr(self, f"_{name}")
            stages.append(_Late(stage.run, 10 * position))
        self._stages = tuple(stages)

    stages = []
    monkeypatch.setattr(Pipeline, "_link", linked)


class _Late:
    def __init__(self, run, ticks):
        self._run, self._ticks = run, ticks

    async def run(self):
        for _ in range(self._ticks):
            await trio.lowlevel.checkpoint()
        await self._run()


@pytest.mark.parametrize("order", list(permutations(STAGES)), ids="-".join)
async def test_in_any_order_everything_arrives(autojump_clock, monkeypatch, order):
    start_in(order, monkeypatch)
    source, destination = FakeTier(), FakeTier()
    keys = keys_of("a", 8)
    for key in keys:
        source.put(key, b"x" * source.block_bytes)
    event = trio.Event()
    async with open_pipeline(source, destination, config=PipelineConfig()) as pipeline:
        handles = [
            pipeline.enqueue_nowait(source.weak(keys[:4]), precondition=NO_WAIT),
            pipeline.enqueue_nowait(source.weak(keys[4:6]), precondition=event),
            pipeline.enqueue_nowait(source.weak(keys[6:]), precondition=event),
        ]
        for _ in range(15):
            await trio.lowlevel.checkpoint()
        handles[2].request_cancel()
        event.set()
        ends = [(await handle.wait()).status for handle in handles]
    assert ends == [Status.COMPLETE, Status.COMPLETE, Status.CANCELLED]
    assert destination.contains_nowait(keys) == set(keys[:6])


# --- the channel that links them --------------------------------------------------------------------------------------


def container(number):
    blocks = WeakBlocks(None, [b"%d" % number], None)
    return OffloadContainer(number, blocks, None, blocks.keys)


def test_what_is_sent_to_a_stage_that_can_step_it_is_never_parked():
    channel, stepped = CancellableChannel(lambda _: None), []
    containers = [container(i) for i in range(3)]
    with channel.stepped_by(lambda some: stepped.append(list(some))):
        channel.send(containers)
    assert stepped == [containers]
    assert not channel.parked


async def test_what_was_sent_before_is_stepped_first_in_order():
    channel, stepped = CancellableChannel(lambda _: None), []
    containers = [container(i) for i in range(3)]
    channel.send(containers[:2])
    with channel.stepped_by(stepped.extend):
        channel.send(containers[2:])
    assert stepped == containers
    assert all(one.holder is None for one in stepped)


async def test_what_is_cancelled_before_the_stage_starts_settles_at_once_and_is_not_stepped():
    settled, stepped = [], []
    channel = CancellableChannel(settled.append)
    containers = [container(i) for i in range(3)]
    channel.send(containers)
    containers[1].cancel()
    assert settled == [containers[1]]

    def step(some):
        stepped.extend(some)
        containers[2].cancel()  # an observer of the first

    with channel.stepped_by(step):
        pass
    assert settled == containers[1:]
    assert stepped == containers[:1]


async def test_behind_the_end_of_a_stage_it_parks_again():
    channel = CancellableChannel(lambda _: None)
    with channel.stepped_by(lambda some: None):
        pass
    one = container(1)
    channel.send([one])
    assert list(channel.parked) == [one]
    assert one.holder is channel
