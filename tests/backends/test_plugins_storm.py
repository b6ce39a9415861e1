"""Hosts under load: stores, loads, deletions and cancellations at once, with real threads. What is loaded is right, and in the
end nothing is held, locked, outstanding or in quarantine."""

import random

import pytest
import trio

from backends.abc import DUPLICATE, LOADED, STORED, Failed, Missed, Rejected, RoomRequest
from backends.base.slots import PagesDestination
from backends.plugins import HostConfig, LMCacheTier, NativeTier
from backends.testing import FakeTier, payload_of
from tests.support.plugin_peers import DeletingConnector, LoopAdapter, ThreadConnector

SIZE = 512
KEYS = [b"%02d" % number for number in range(24)]
ROOM = 16


@pytest.mark.parametrize("submit_in_thread", [False, True], ids=["", "submitted in a thread"])
@pytest.mark.parametrize(
    ("host", "make_plugin", "capacity"),
    [
        pytest.param(NativeTier, lambda directory: ThreadConnector(), None, id="native"),
        pytest.param(NativeTier, lambda directory: DeletingConnector(), ROOM * SIZE, id="native that evicts"),
        pytest.param(
            LMCacheTier, lambda directory: LoopAdapter({"directory": directory}), ROOM * SIZE, id="L2 adapter"
        ),
    ],
)
async def test_a_storm_leaves_nothing_behind(host, make_plugin, capacity, submit_in_thread, tmp_path):
    dice = random.Random(7)
    plugin = make_plugin(tmp_path)
    source = FakeTier(len(KEYS), SIZE)
    source.fill(KEYS)
    tier = host(plugin, SIZE, HostConfig(capacity_bytes=capacity, submit_in_thread=submit_in_thread))
    counts = dict.fromkeys(("stored", "loaded", "cancelled"), 0)

    async def store(keys):
        reservation = await tier.reserve(RoomRequest(keys, SIZE, "evict" if capacity else "fail"))
        refs = source.upgrade(keys)
        try:
            outcomes = await reservation.transfer(source, refs)
        finally:
            source.release(refs)
            reservation.release()
        assert all(isinstance(outcome, Rejected | Failed) or outcome in (STORED, DUPLICATE) for outcome in outcomes)
        counts["stored"] += outcomes.count(STORED)

    async def load(keys):
        buffers = [bytearray(SIZE) for _ in keys]
        async with await tier.pin(keys) as lease:
            outcomes = await tier.load(lease, PagesDestination.over(buffers))
        for key, outcome, buffer in zip(keys, outcomes, buffers, strict=False):
            assert outcome == LOADED or outcome == Missed("gone"), outcome
            if outcome == LOADED:
                assert bytes(buffer) == payload_of(key, SIZE)
        counts["loaded"] += len(outcomes)

    async def one(what, keys, patience):
        with trio.move_on_after(patience) as scope:
            await what(keys)
        counts["cancelled"] += scope.cancelled_caught

    async def worker(n):
        for _ in range(n):
            what = dice.choice([store] * 4 + [load] * 6 + [tier.contains, tier.delete])
            keys = dice.sample(KEYS, 1 if what in (load, tier.delete) else dice.randrange(1, 5))
            await one(what, keys, dice.choice([0, 0.0005, 0.002, 5, 5, 5]))

    with trio.fail_after(60):
        async with tier:
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(worker, 40)
            await load(KEYS[:1])
            while tier.host_statistics().outstanding:  # noqa: ASYNC110  # a thread says when
                await trio.sleep(0.01)
            after, books = tier.host_statistics(), tier.statistics()
            assert (books.held_blocks, books.reserved_blocks) == (0, 0)
            assert (after.unknown, after.twice, after.raised, after.wrong_bits, after.failed_unlocks) == (0, 0, 0, 0, 0)
            await tier.delete(KEYS)
            await store(KEYS[:4])  # whoever needs memory takes back what threads have let go of
            assert tier.host_statistics().quarantined_bytes == 0
            if capacity:
                assert books.used_bytes <= capacity
    assert counts["stored"] > 0, counts
    assert counts["loaded"] > 0, counts
    assert counts["cancelled"] > 0, counts
    assert plugin.closed
    assert getattr(plugin, "locks", {}) == {}
