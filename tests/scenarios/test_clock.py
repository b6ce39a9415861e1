"""A run is a function of its scenario and its seed, in whatever process, and each part of what makes it so is needed."""

import gc
import os
import random
import subprocess
import sys
import weakref

import msgspec
import pytest
import trio
import trio.testing

from offload.testing.scenarios import TICK, After, Fault, Scenario, Step, StoreStep, TierSpec, generate, play, run
from offload.testing.scenarios import _play as playing
from offload.testing.scenarios._clock import ALL, VirtualClock, collected, wait_all_tasks_blocked
from offload.testing.scenarios._trace import hash_of

IN_ANOTHER_PROCESS = """
import logging, sys
logging.disable(logging.CRITICAL)
from offload.testing.scenarios._generate import generate
from offload.testing.scenarios._play import play
from offload.testing.scenarios._trace import hash_of
for start in range(int(sys.argv[1]), int(sys.argv[2]), 25):
    print(start, hash_of([play(generate(seed)) for seed in range(start, min(start + 25, int(sys.argv[2])))]))
"""


def in_fresh_processes(first, last, hash_seeds=("0", "1")):
    """The hashes of the traces of some seeds, once from each of several processes, all at the same time."""
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(first), str(last)]
    running = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in hash_seeds
    ]
    answers = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return answers


def test_the_traces_are_the_same_in_fresh_processes():
    one, other = in_fresh_processes(0, 50)
    assert one == other
    assert one.startswith(f"0 {hash_of([play(generate(seed)) for seed in range(25)])}\n")


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 3_000, 250))
def test_three_thousand_traces_are_the_same_in_fresh_processes(start):
    one, other = in_fresh_processes(start, start + 250)
    assert one == other
    assert len(one.splitlines()) == 10


def crowd(n=8):
    """Many containers that wait for the same, whose times fall together, and whose host is cancelled."""
    return Scenario(
        name="a crowd",
        tier={"host": TierSpec(capacity=4, latency_ms=1)},
        step=[
            Step(store=StoreStep(id=f"a{{0..{n - 1}}}", after=[After(ms=2, made_of="stubborn")])),
            Step(store=StoreStep(id=f"b{{0..{n - 1}}}", after=[After(ms=2, made_of="async")])),
            Step(at_ms=1, store=StoreStep(id=f"c{{0..{n - 1}}}", per=2)),
        ],
        fault=[Fault(do="cancel_host", at_ms=11)],
    )


def shuffle_the_heap():
    """Make the next objects lie at other addresses than the last ones did."""
    rubbish = [bytes(random.randrange(16, 512)) for _ in range(4_000)]
    random.shuffle(rubbish)
    del rubbish[: len(rubbish) // 2]
    return rubbish


def traces(scenario, runs):
    found = set()
    for _ in range(runs):
        rubbish = shuffle_the_heap()
        found.add(play(scenario).trace)
        del rubbish
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_crowded_run_repeats_wherever_its_objects_lie(seed):
    assert len(traces(msgspec.structs.replace(crowd(), seed=seed), 3)) == 1


@pytest.mark.long
def test_fifty_crowded_runs_repeat_wherever_their_objects_lie():
    for seed in range(50):
        assert len(traces(msgspec.structs.replace(crowd(), seed=seed), 4)) == 1


# --- each of the four is needed -----------------------------------------------------------------------------------


async def everything_at_once(order):
    """Eight waiters of one event, eight deadlines that fall together, eight tasks in one cancelled scope."""

    async def waiter(name, event):
        await event.wait()
        order.append(name)

    async def parked(name, deadline=None):
        def abort(_):
            order.append(name)  # runs when the scope is cancelled, not when the task is next scheduled
            return trio.lowlevel.Abort.SUCCEEDED

        with trio.CancelScope(deadline=trio.current_time() + TICK if deadline else float("inf")):
            await trio.lowlevel.wait_task_rescheduled(abort)

    async with trio.open_nursery() as nursery:
        event = trio.Event()
        for n in range(8):
            nursery.start_soon(waiter, f"waiter {n}", event)
            nursery.start_soon(parked, f"late {n}", True)
        await trio.testing.wait_all_tasks_blocked()
        event.set()
    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(parked, f"cancelled {n}")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


def orders(parts, runs=40):
    seen = set()
    for _ in range(runs):
        rubbish = shuffle_the_heap()
        order = []
        run(everything_at_once, order, seed=7, parts=parts)
        seen.add(tuple(order))
        del rubbish
    return len(seen)


def test_with_all_four_a_run_repeats():
    assert orders(ALL) == 1


@pytest.mark.parametrize("missing", sorted(ALL))
def test_without_one_of_them_it_does_not(missing):
    assert orders(ALL - {missing}) > 1


def test_another_seed_goes_another_way():
    scenario = crowd()
    assert len({play(scenario, seed).trace for seed in range(5)}) > 1


# --- the clock ----------------------------------------------------------------------------------------------------


def test_a_run_goes_the_same_way_with_the_clock_of_trio(monkeypatch):
    ours = [play(generate(seed)).trace for seed in range(15)]
    monkeypatch.setattr(playing, "VirtualClock", lambda: trio.testing.MockClock(autojump_threshold=0))
    assert [play(generate(seed)).trace for seed in range(15)] == ours


def test_no_time_passes_while_anybody_has_something_to_do():
    times = []

    async def waits(event, seconds):
        with trio.move_on_after(seconds):
            await event.wait()
        times.append(trio.current_time())

    async def main():
        told = trio.Event()
        token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits, told, 3.0)
            nursery.start_soon(waits, trio.Event(), 5.0)
            await wait_all_tasks_blocked()  # who waits for just that is woken before time passes
            times.append(trio.current_time())
            token.run_sync_soon(told.set)  # as a thread would, and so does an event of a thread
            await trio.sleep(1.0)
            times.append(trio.current_time())

    run(main, clock=VirtualClock())
    assert times == [0.0, 0.0, 1.0, 5.0]


def test_trio_is_as_before_afterwards():
    from trio._core import _run as inside

    def looks():
        return inside._ALLOW_DETERMINISTIC_SCHEDULING, inside.Deadlines.add, inside.CancelStatus.__attrs_post_init__

    before = looks()
    play(generate(1))
    assert looks() == before


def test_nothing_is_collected_within_a_run_and_its_rubbish_is_afterwards():
    class Ring:
        alive = 0

        def __init__(self):
            self.me = self
            Ring.alive += 1

        def __del__(self):
            Ring.alive -= 1

    enabled = gc.isenabled()
    Ring()
    with collected():
        assert not gc.isenabled()
        for _ in range(5_000):
            Ring()
        assert Ring.alive == 5_001
    assert gc.isenabled() == enabled
    assert Ring.alive == 1  # what was there before is for the process itself to collect
    gc.collect()
    assert Ring.alive == 0


def test_the_order_of_a_run_does_not_depend_on_how_many_ran_before():
    first = play(generate(3)).trace
    for seed in range(10, 14):
        play(generate(seed))
    assert play(generate(3)).trace == first


def test_a_run_leaves_nothing_behind_but_its_report(monkeypatch):
    worlds = []

    class Watched(playing.VirtualWorld):
        def __init__(self, *args):
            super().__init__(*args)
            worlds.append(weakref.ref(self))

    monkeypatch.setattr(playing, "VirtualWorld", Watched)
    reports = [play(generate(seed)) for seed in range(6)]
    assert len(reports) == len(worlds) == 6
    assert [world for world in worlds if world() is not None] == []
