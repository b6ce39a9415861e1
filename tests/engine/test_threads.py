"""Copy threads: joined when nobody keeps them, left at once by a cancelled wait, and never a descriptor too many."""

import contextlib
import gc
import os
import signal
import threading

import pytest
import trio
import trio.testing

from backends import Unproven
from backends.base import threads
from backends.base.threads import (
    keep_threads,
    leave_after,
    run_in_thread,
    run_in_thread_or_leave,
    run_in_thread_to_the_end,
    thread_statistics,
    wait_abandoned,
)
from tests.support.held_by_process import open_descriptors


def copy_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("offload-copy")]


@pytest.fixture(autouse=True)
def _leaves_nothing():
    descriptors = open_descriptors(collect=True)
    yield
    for thread in copy_threads():
        thread.join()
    assert open_descriptors() <= descriptors


@pytest.fixture(params=["eventfd", "pipe"])
def bell(request, monkeypatch):
    """Both ways to announce the end."""
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)


RUNNERS = [run_in_thread, run_in_thread_to_the_end]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.usefixtures("bell")
async def test_returns_what_the_function_returns_and_raises_what_it_raises(run):
    assert await run(divmod, 7, 3) == (2, 1)
    assert await run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await run(divmod, 7, 0)
    with pytest.raises(SystemExit):
        await run(lambda: exec("raise SystemExit"))
    assert thread_statistics().busy == 0


async def test_kept_threads_are_used_again_and_joined_when_the_last_keeper_leaves():
    async with keep_threads():
        async with keep_threads():
            first = await run_in_thread(threading.get_ident)
        assert await run_in_thread(threading.get_ident) == first
        assert thread_statistics() == threads.ThreadStatistics(1, 1, 0, 1, 0, 0)
        assert len(copy_threads()) == 1
    assert copy_threads() == []


async def test_without_a_keeper_a_thread_ends_with_its_work():
    await run_in_thread(int)
    assert copy_threads() == []
    await run_in_thread_to_the_end(int)
    assert copy_threads() == []


async def test_two_copies_at_once_have_two_threads_and_idle_ones_are_joined():
    both = threading.Barrier(2)
    async with keep_threads():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_in_thread, both.wait)
            nursery.start_soon(run_in_thread_to_the_end, both.wait)
        assert thread_statistics().idle == 2
    assert copy_threads() == []


async def test_a_thread_that_is_busy_when_the_last_keeper_leaves_is_joined_by_whoever_waits_for_it():
    go_on = threading.Event()
    async with trio.open_nursery() as nursery:
        async with keep_threads():
            nursery.start_soon(run_in_thread, go_on.wait)
            await trio.testing.wait_all_tasks_blocked()
        assert len(copy_threads()) == 1
        go_on.set()
    assert copy_threads() == []


@pytest.mark.usefixtures("bell")
async def test_a_cancelled_wait_leaves_at_once_and_abandons_the_thread():
    go_on = threading.Event()
    async with keep_threads():
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_in_thread, go_on.wait)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        statistics = thread_statistics()
        assert (statistics.abandoned, statistics.abandoned_running, statistics.busy, statistics.idle) == (1, 1, 0, 0)
        [abandoned] = copy_threads()
        assert await run_in_thread(threading.get_ident) != abandoned.ident  # never used again
    assert copy_threads() == [abandoned]  # nor joined
    go_on.set()
    abandoned.join()
    assert thread_statistics().abandoned_running == 0


async def test_the_end_of_what_was_abandoned_can_be_waited_for():
    go_on, over = threading.Event(), []
    for _ in range(2):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_in_thread, lambda: over.append(go_on.wait()))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_abandoned)
            await trio.testing.wait_all_tasks_blocked()
            assert over == []
            scope.cancel()
    assert scope.cancelled_caught  # the waiting is left at once, as the copy was
    go_on.set()
    with trio.testing.assert_checkpoints():
        await wait_abandoned()
    assert over == [True, True]
    assert thread_statistics().abandoned_running == 0
    with trio.testing.assert_checkpoints():
        await wait_abandoned()


async def test_an_abandoned_thread_that_ends_at_once_loses_nothing():
    for _ in range(50):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_in_thread, int)
                await trio.lowlevel.checkpoint()  # it runs to its wait, and its thread may be over by now or not
                scope.cancel()
    assert thread_statistics().busy == 0


@pytest.mark.parametrize("run", RUNNERS)
async def test_cancelled_before_it_began_nothing_is_called(run):
    called = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await run(called.append, 1)
    assert scope.cancelled_caught
    assert called == []
    assert thread_statistics().started == 0


async def test_to_the_end_waits_for_the_end_and_then_lets_the_cancellation_through():
    started, go_on, ended = threading.Event(), threading.Event(), []

    def copy():
        started.set()
        go_on.wait()
        ended.append(True)

    async def run():
        await run_in_thread_to_the_end(copy)
        raise AssertionError("the cancellation must come through")

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.to_thread.run_sync(started.wait)
            scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            assert not ended
            go_on.set()
    assert scope.cancelled_caught
    assert ended
    assert thread_statistics().abandoned == 0


@pytest.mark.parametrize("run", RUNNERS)
async def test_is_a_checkpoint(run):
    with trio.testing.assert_checkpoints():
        await run(int)


async def test_the_function_and_its_arguments_are_not_kept_alive_by_an_idle_thread():
    class Pages:
        pass

    async with keep_threads():
        pages = Pages()
        died = threading.Event()
        finalizer = __import__("weakref").finalize(pages, died.set)
        await run_in_thread(id, pages)
        await run_in_thread(int)
        del pages
        gc.collect()
        assert died.is_set()
        assert not finalizer.alive


def test_ctrl_c_abandons_a_store_and_waits_for_the_end_of_a_load():
    ended = []

    def copy(go_on):
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait()
        ended.append(True)

    go_on = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        trio.run(run_in_thread, copy, go_on)
    assert not ended
    go_on.set()
    [abandoned] = copy_threads()
    abandoned.join()
    ended.clear()

    later = threading.Event()
    timer = threading.Timer(0.05, later.set)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        trio.run(run_in_thread_to_the_end, copy, later)
    timer.join()
    assert ended


def test_a_thread_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    async def main():
        await run_in_thread(int)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="start new thread"):
        trio.run(main)


def test_each_run_has_threads_of_its_own():
    async def main():
        async with keep_threads():
            await run_in_thread(int)
            return thread_statistics().started

    assert [trio.run(main), trio.run(main)] == [1, 1]


# --- left, after a while ------------------------------------------------------------------------------------------


async def test_who_may_leave_waits_for_the_end_for_a_while_and_then_leaves(autojump_clock):
    go = threading.Event()
    before = thread_statistics().abandoned
    began = trio.current_time()
    told = pytest.raises(Unproven, match="a cancelled copy went on for 2 s")
    with trio.move_on_after(1.0) as scope, leave_after(2.0), told:
        await run_in_thread_or_leave(go.wait, 5)
    assert scope.cancel_called and trio.current_time() - began == 3.0
    assert thread_statistics().abandoned == before + 1
    go.set()
    await wait_abandoned()


async def test_who_may_leave_stays_where_the_end_comes_in_time():
    go, began = threading.Event(), threading.Event()
    ended = []

    def work():
        began.set()
        ended.append(go.wait(60))

    async with keep_threads(), trio.open_nursery() as nursery:

        async def ask():
            with leave_after(60.0):
                await run_in_thread_or_leave(work)

        nursery.start_soon(ask)
        assert await trio.to_thread.run_sync(began.wait, 60)
        nursery.cancel_scope.cancel()
        go.set()
    assert ended == [True]
    assert thread_statistics().busy == 0


@pytest.mark.parametrize("patience", [None, 1.0])
async def test_who_may_leave_gets_what_it_asked_for(patience):
    def fail():
        raise ValueError("no")

    with leave_after(patience) if patience else contextlib.nullcontext():
        assert await run_in_thread_or_leave(lambda: 7) == 7
        with pytest.raises(ValueError, match="no"):
            await run_in_thread_or_leave(fail)
    with trio.CancelScope() as scope, leave_after(1.0):
        scope.cancel()
        await run_in_thread_or_leave(fail)  # nothing is called
    assert scope.cancelled_caught


async def test_ctrl_c_while_it_waits_for_the_end_is_told_once_it_is_over(monkeypatch):
    go = threading.Event()
    over, calls = threads._CopyThread.over, []

    async def interrupted(self):
        calls.append(self)
        if len(calls) < 3:
            raise KeyboardInterrupt
        go.set()
        await over(self)

    monkeypatch.setattr(threads._CopyThread, "over", interrupted)
    with pytest.raises(KeyboardInterrupt), leave_after(60.0):
        await run_in_thread_or_leave(go.wait, 5)
    assert len(calls) == 3 and thread_statistics().busy == 0
