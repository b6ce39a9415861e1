"""Several instances that store, read, delete and are cancelled at random, while answers are lost and the server restarts.

What somebody reads under a lease that holds is what was stored under that key; and when it is over, every page is free and
nobody is pinned. (Answers to FIND and UNPIN are late here, but not lost: a pin that nobody heard of ends with its session.)
"""

from __future__ import annotations

import contextlib
import random

import pytest
import trio

from backends import BackendError
from backends.testing import payload_of
from maru import LeaseLost, MaruError
from maru._wire import Code
from tests.support import determinism
from tests.support.maru_l1_world import ALL, at_rest, fill, open_site
from tests.support.maru_world import PAGE, World

LOSABLE = {Code.STORE, Code.RESOLVE, Code.RECLAIM, Code.DROP, Code.REGION, Code.BATCH_EXISTS_KV}
LATE = {Code.FIND, Code.UNPIN}


class TimedWorld(World):
    """Its clock is that of the run: leases end."""

    @property
    def now(self):
        return 1000 + trio.current_time()

    @now.setter
    def now(self, value):
        pass


class Seen:
    """What the run has done, so that no run proves nothing."""

    def __init__(self):
        self.read = self.stored = self.cancelled = self.failed = self.refused = self.restarts = 0


def some(dice, keys=ALL):
    return dice.sample(keys, dice.randint(1, 5))


async def write(site, dice, seen):
    async with await site.l1.reserve_write(some(dice)) as reservation:
        seen.refused += len(reservation.refused)
        await trio.sleep(dice.random() * 0.01)
        fill(reservation)
        if dice.random() < 0.2:
            return
        if dice.random() < 0.5:
            seen.stored += len(await reservation.commit())
            return
        async with await reservation.commit_and_read() as lease:
            await look(lease, dice, seen)


async def read(site, dice, seen):
    async with await site.l1.reserve_read(some(dice)) as lease:
        await look(lease, dice, seen)
        if lease.keys and dice.random() < 0.5:
            lease.keep(dice.sample(lease.keys, dice.randint(0, len(lease.keys))))
            if lease.is_open:
                await look(lease, dice, seen)


async def look(lease, dice, seen):
    """What a reader does, slowly: look, and then ask whether it was worth anything."""
    with contextlib.suppress(LeaseLost):
        for key, view in zip(lease.keys, lease.views, strict=True):
            first = bytes(view[: PAGE // 2])
            await trio.sleep(dice.random() * 0.01)
            found = first + bytes(view[PAGE // 2 :])
            lease.check()
            assert found == payload_of(key, PAGE), key
            seen.read += 1


async def delete(site, dice, seen):
    await site.l1.delete(some(dice))


async def clear(site, dice, seen):
    await site.l1.clear()


async def live(site, dice, seen, ops):
    for _ in range(ops):
        [what] = dice.choices([write, read, delete, clear], [10, 10, 4, 1])
        with trio.move_on_after(dice.choice([0, 0.002, 0.005, 60, 60, 60])) as scope:
            try:
                await what(site, dice, seen)
            except (MaruError, BackendError):
                seen.failed += 1
        seen.cancelled += scope.cancelled_caught
        await trio.sleep(dice.random() * 0.02)


async def disturb(world, sites, dice, seen):
    def fate(code):
        if dice.random() > 0.05:
            return None
        return dice.choice(["lost", "cut", "late"]) if code in LOSABLE else "late" if code in LATE else None

    for site in sites:
        site.socket.fate = fate
    while True:
        await trio.sleep(0.3 + dice.random() / 2)
        world.restart(forgets=dice.random() < 0.2)
        seen.restarts += 1


async def play(seed, seen, ops):
    dice = random.Random(seed)
    world = TimedWorld(capacity_regions=8)
    async with contextlib.AsyncExitStack() as stack:
        sites = [
            await stack.enter_async_context(open_site(world, name, timeout_ms=200, pool_size=6 * PAGE))
            for name in "abc"
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb, world, sites, dice, seen)
            async with trio.open_nursery() as actors:
                for site in sites:
                    for _ in range(2):
                        actors.start_soon(live, site, dice, seen, ops)
            nursery.cancel_scope.cancel()
        for site in sites:
            site.socket.fate = lambda code: None
        await trio.sleep(120)  # what is late arrives; a session that was cancelled in its handshake ends
        await at_rest(world, *sites)


def run_one(seed, ops):
    seen = Seen()
    try:
        determinism.run(play, seed, seen, ops, seed=seed)
    except BaseException as exc:
        exc.add_note(f"seed {seed}: {vars(seen)}")
        raise
    assert all(vars(seen).values()), vars(seen)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_nobody_reads_another_keys_bytes_and_nothing_stays_behind(seed):
    run_one(seed, 60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 130))
def test_the_same_for_longer(seed):
    run_one(seed, 150)
