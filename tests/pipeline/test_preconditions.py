import asyncio
import copy
import functools
import gc
import pickle
import signal
import threading
import weakref
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from maru.fake_cuda import FakeCuda, use
from offload import preconditions
from offload.abc import Precondition
from offload.preconditions import (
    NO_WAIT,
    AsyncCallable,
    CudaEvent,
    ThreadEvent,
    TrioEvent,
    all_of,
    any_of,
    as_precondition,
)
from tests.support.maru_processes import eventually


class Fake(Precondition):
    """A precondition whose course the test decides, and which tells whether somebody waits."""

    def __init__(self, *, passive=False, error=None):
        self._event = trio.Event()
        self._passive = passive
        self.error = error
        self.waiting = 0
        self.waits = 0

    def set(self):
        self._event.set()

    def is_set(self):
        return self._event.is_set() and self.error is None

    async def wait(self):
        self.waiting += 1
        self.waits += 1
        try:
            await self._event.wait()
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error

    @property
    def passive(self):
        return self._passive


class FakeCudaEvent:
    """What is used of a torch.cuda.Event. ``watched`` is set once it was queried a few times."""

    def __init__(self):
        self.done = threading.Event()
        self.error = None
        self.queries = 0
        self.watched = ThreadEvent()

    def query(self):
        assert threading.current_thread() is watcher_thread()
        self.queries += 1
        if self.queries >= 3:
            self.watched.set()
        if self.error is not None:
            raise self.error
        return self.done.is_set()

    def synchronize(self):
        raise AssertionError("blocks")


async def test_an_event_whose_device_cannot_be_told_fails_alone():
    class Lost(FakeCudaEvent):
        @property
        def device(self):
            raise RuntimeError("lost")

    other, errors = FakeCudaEvent(), []

    async def wait(event):
        try:
            await CudaEvent(event).wait()
        except RuntimeError as error:
            errors.append(str(error))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, Lost())
            nursery.start_soon(wait, other)
            await other.watched.wait()
            other.done.set()
    assert errors == ["lost"]


async def cancelled_while_waiting(precondition):
    """Wait for it, and cancel the wait once it sleeps."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(precondition.wait)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert nursery.cancel_scope.cancelled_caught


def watcher_thread():
    threads = [thread for thread in threading.enumerate() if thread.name == "offload CUDA events"]
    assert len(threads) <= 1
    return threads[0] if threads else None


def no_watcher_is_left():
    thread = watcher_thread()
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()
    assert not preconditions._watcher._waits


# --- what is taken ------------------------------------------------------------------------------------------------


async def _function():
    await trio.lowlevel.checkpoint()


class _AsyncCall:
    async def __call__(self):
        await trio.lowlevel.checkpoint()


def test_a_precondition_is_taken_as_it_is():
    for value in (NO_WAIT, ThreadEvent(), Fake(), all_of(NO_WAIT)):
        assert as_precondition(value) is value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (trio.Event(), TrioEvent),
        (FakeCudaEvent(), CudaEvent),
        (_function, AsyncCallable),
        (_AsyncCall(), AsyncCallable),
        (functools.partial(_function), AsyncCallable),
        (trio.Event().wait, AsyncCallable),
    ],
)
def test_what_can_be_waited_for_and_cancelled_is_taken(value, kind):
    precondition = as_precondition(value)
    assert type(precondition) is kind
    assert kind.__name__ in repr(precondition)


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        (None, r"use offload\.NO_WAIT"),
        (True, ""),
        (3, ""),
        ("event", ""),
        (threading.Event(), r"offload\.from_thread\.Event is set the same way"),
        (asyncio.Event(), ""),
        (trio.Event, ""),
        (_AsyncCall, ""),
        (print, r"AsyncCallable\(\.\.\.\)"),
        (threading.Event().wait, r"AsyncCallable\(\.\.\.\)"),
        (lambda: None, r"AsyncCallable\(\.\.\.\)"),
    ],
)
def test_anything_else_is_a_type_error_that_says_what_is_taken(bad, hint):
    for take in (as_precondition, all_of, any_of):
        with pytest.raises(TypeError, match=rf"is not a precondition.*{hint}.*Use offload\.NO_WAIT, a trio\.Event"):
            take(bad)


def test_a_coroutine_is_refused_without_a_warning():
    with pytest.raises(TypeError, match="pass the async function itself"):
        as_precondition(_function())
    gc.collect()


# --- no wait ------------------------------------------------------------------------------------------------------


async def test_no_wait_holds_at_once_and_passes_a_checkpoint():
    assert NO_WAIT.is_set()
    assert NO_WAIT.passive
    with trio.testing.assert_checkpoints():
        await NO_WAIT.wait()


def test_there_is_one_no_wait_after_copying_and_pickling_too():
    assert copy.deepcopy(NO_WAIT) is NO_WAIT
    assert pickle.loads(pickle.dumps(NO_WAIT)) is NO_WAIT
    assert repr(NO_WAIT) == "offload.NO_WAIT"


# --- trio events --------------------------------------------------------------------------------------------------


async def test_a_trio_event_holds_once_it_is_set(autojump_clock):
    event = trio.Event()
    precondition = as_precondition(event)
    assert precondition.passive
    assert not precondition.is_set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(precondition.wait)
        await trio.testing.wait_all_tasks_blocked()
        event.set()
    assert precondition.is_set()
    with trio.testing.assert_checkpoints():
        await precondition.wait()


async def test_a_cancelled_wait_for_a_trio_event_leaves_nothing(autojump_clock):
    event = trio.Event()
    await cancelled_while_waiting(TrioEvent(event))
    assert event.statistics().tasks_waiting == 0


# --- thread events ------------------------------------------------------------------------------------------------


async def test_a_thread_event_set_in_another_thread_wakes_all_that_wait():
    event, woken = ThreadEvent(), []

    async def wait(number):
        await event.wait()
        woken.append(number)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
            assert not event.is_set()
            await trio.to_thread.run_sync(event.set)
    assert sorted(woken) == list(range(5))
    assert event.is_set()
    assert event.passive
    assert not event._runs


def test_a_thread_event_set_before_any_run_is_seen_in_every_run():
    event = ThreadEvent()
    assert repr(event) == "<offload.from_thread.Event not set>"
    event.set()
    event.set()
    assert event.is_set()
    assert repr(event) == "<offload.from_thread.Event set>"
    for _ in range(2):
        trio.run(event.wait)


async def test_waiting_for_a_thread_event_that_is_set_is_a_checkpoint():
    event = ThreadEvent()
    event.set()
    with trio.testing.assert_checkpoints():
        await event.wait()
    with trio.CancelScope() as scope:
        scope.cancel()
        await event.wait()
    assert scope.cancelled_caught
    assert not event._runs


def test_a_thread_event_wakes_several_runs_at_once():
    event, ready = ThreadEvent(), threading.Barrier(4)

    async def run():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(event.wait)
            nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            ready.wait(60)  # blocks the run on purpose: it is certain to be asleep when the event is set

    threads = [threading.Thread(target=trio.run, args=(run,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(60)
    event.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not event._runs


def test_a_run_that_is_over_does_not_disturb_the_setter():
    async def token():
        return trio.lowlevel.current_trio_token()

    event = ThreadEvent()
    for _ in range(2):
        event._runs[trio.run(token)] = trio.Event()
    event.set()
    assert not event._runs


async def test_a_cancelled_wait_for_a_thread_event_leaves_nothing_and_disturbs_no_other():
    event = ThreadEvent()
    await cancelled_while_waiting(event)
    assert not event._runs
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            await cancelled_while_waiting(event)
            assert len(event._runs) == 1
            event.set()
    assert not event._runs


class Meddling(dict):
    """The table of a ThreadEvent, in which somebody sets the event at a given moment."""

    def __init__(self, event, moment):
        super().__init__()
        self._event = event
        self._moment = moment

    def _now(self, moment):
        if moment == self._moment:
            self._moment = None
            self._event.set()

    def get(self, *args):
        self._now("before get")
        found = super().get(*args)
        self._now("after get")
        return found

    def __setitem__(self, *args):
        self._now("before entering")
        super().__setitem__(*args)
        self._now("after entering")

    def popitem(self):
        item = super().popitem()
        self._now("after popping")
        return item

    def pop(self, *args):
        self._now("before leaving")
        return super().pop(*args)


@pytest.mark.parametrize("moment", ["before get", "after get", "before entering", "after entering", "before leaving"])
@pytest.mark.parametrize("others", [0, 1])
async def test_no_wake_up_is_lost_at_whatever_moment_the_event_is_set(moment, others):
    event = ThreadEvent()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(others):
                nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            meddling = Meddling(event, moment)
            meddling.update(event._runs)
            event._runs = meddling
            nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            event.set()  # for the moments that have not come
    assert event.is_set()
    assert not event._runs


async def test_two_setters_at_once_wake_everybody():
    event = ThreadEvent()
    event._runs = Meddling(event, "after popping")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            event.set()


def test_a_setter_that_finds_the_table_emptied_under_its_hands_is_content():
    class Emptied(dict):
        def __bool__(self):
            return True

    event = ThreadEvent()
    event._runs = Emptied()
    event.set()
    assert event.is_set()


async def test_no_wake_up_is_lost_between_threads_that_race():
    rounds = 300
    events = [ThreadEvent() for _ in range(rounds)]

    def set_all():
        for event in events:
            event.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(trio.to_thread.run_sync, set_all)
            for event in events:
                async with trio.open_nursery() as inner:
                    inner.start_soon(event.wait)
                    inner.start_soon(event.wait)
    assert not any(event._runs for event in events)


async def test_a_thread_event_may_be_set_in_a_signal_handler():
    event = ThreadEvent()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: event.set())
    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(event.wait)
                await trio.testing.wait_all_tasks_blocked()
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert event.is_set()


# --- CUDA events --------------------------------------------------------------------------------------------------


async def test_a_cuda_event_holds_once_its_query_says_so():
    fake = FakeCudaEvent()
    event = as_precondition(fake)
    assert event.passive
    assert not event.is_set()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(event.wait)
            nursery.start_soon(event.wait)
            await fake.watched.wait()
            fake.done.set()
    assert event.is_set()
    no_watcher_is_left()


async def test_no_thread_but_the_watcher_queries_a_cuda_event():
    fake = FakeCudaEvent()  # its query looks at that
    fake.done.set()
    event = CudaEvent(fake)
    assert not event.is_set() and not fake.queries
    with trio.testing.assert_checkpoints():
        await event.wait()
    assert event.is_set() and fake.queries == 1


async def test_a_cuda_event_that_holds_is_not_queried_again():
    fake = FakeCudaEvent()
    fake.done.set()
    event = CudaEvent(fake)
    await event.wait()
    fake.done.clear()  # the engine records it again for the next step
    assert event.is_set()
    with trio.testing.assert_checkpoints():
        await event.wait()
    assert fake.queries == 1


def test_preconditions_of_one_cuda_event_are_equal():
    fake = FakeCudaEvent()
    one, other = CudaEvent(fake), as_precondition(fake)
    assert one == other and hash(one) == hash(other) and one is not other
    assert one != CudaEvent(FakeCudaEvent()) and one != fake


async def test_an_event_recorded_again_is_not_over_by_a_query_of_before():
    """The engine records its event again while the answer of a query is on its way."""
    second = []

    class RecordedAgain(FakeCudaEvent):
        def query(self):
            done = super().query()
            if done and not second:
                self.done.clear()
                second.append(CudaEvent(self))
            return done

    fake = RecordedAgain()
    first = CudaEvent(fake)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.wait)
            await fake.watched.wait()
            fake.done.set()
        assert first.is_set() and second[0] != first
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second[0].wait)
            asked, fake.watched = fake.queries, ThreadEvent()
            await fake.watched.wait()
            assert fake.queries > asked and not second[0].is_set()
            fake.done.set()
    no_watcher_is_left()


class Clock:
    """Time as the watcher's sleeps pass it."""

    def __init__(self, on_sleep=lambda: None):
        self.now, self._on_sleep = 0.0, on_sleep

    def sleep(self, seconds):
        self.now += seconds
        self._on_sleep()


@pytest.mark.parametrize("stores", [1, 64])
async def test_a_wait_of_a_second_is_two_thousand_queries_at_most_for_any_number_of_stores(monkeypatch, stores):
    class Second(FakeCudaEvent):
        def query(self):
            if clock.now >= 1.0:
                self.done.set()
            return super().query()

    clock, fake = Clock(), Second()
    monkeypatch.setattr(preconditions, "time", clock)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(stores):
                nursery.start_soon(as_precondition(fake).wait)
    assert 1000 < fake.queries <= 2000
    no_watcher_is_left()


async def test_an_event_that_is_added_makes_queries_of_the_others_no_more_frequent(monkeypatch):
    late = [FakeCudaEvent() for _ in range(64)]
    waits = []

    def add():
        if fake.queries % 20 == 0 and len(waits) < len(late):
            waits.append(object())
            preconditions._watcher.add(waits[-1], CudaEvent(late[len(waits) - 1]))

    class Second(FakeCudaEvent):
        def query(self):
            if clock.now >= 1.0:
                self.done.set()
                for other in late:
                    other.done.set()
            return super().query()

    clock, fake = Clock(add), Second()
    monkeypatch.setattr(preconditions, "time", clock)
    with trio.fail_after(60):
        await CudaEvent(fake).wait()
    assert len(waits) == 64 and fake.queries <= 2000
    for wait in waits:
        preconditions._watcher.discard(wait)
    no_watcher_is_left()


async def test_an_event_lives_until_its_wait_is_over():
    fake = FakeCudaEvent()
    gone, watched, done = weakref.ref(fake), fake.watched, fake.done
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(CudaEvent(fake).wait)
            del fake
            await watched.wait()
            gc.collect()
            assert gone() is not None
            done.set()
    no_watcher_is_left()
    gc.collect()
    assert gone() is None


class DeviceEvent:
    """A torch.cuda.Event of a device of a driver in Python."""

    def __init__(self, driver, device):
        driver.attach(device)
        self.stream, self.cuda_event = driver.stream(), driver.event()
        self.device = SimpleNamespace(type="cuda", index=device)
        self._driver = driver
        driver.record(self.cuda_event, self.stream)

    def query(self):
        return self._driver.query(self.cuda_event)

    def synchronize(self):
        raise AssertionError("blocks")


async def test_queries_use_the_device_of_the_event_and_leave_a_capture_alone():
    fake, ready = FakeCuda(devices=3), threading.Event()
    with use(fake) as driver:
        events = [DeviceEvent(driver, device) for device in (1, 2)]
        captured, begun, over = driver.stream(), threading.Event(), threading.Event()

        def capture():  # alive to the end, since the number of a thread that has ended is given to another one
            fake.capture(captured)
            begun.set()
            over.wait()

        engine = threading.Thread(target=capture)
        engine.start()
        begun.wait()
        for event in events:
            fake.kernel(event.stream, bool, ready)
            driver.attach(event.device.index)
            driver.record(event.cuda_event, event.stream)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for event in events:
                    nursery.start_soon(CudaEvent(event).wait)
                await trio.to_thread.run_sync(lambda: eventually(lambda: fake.calls.count("cuEventQuery") > 6))
                fake.open_gate(ready)
                fake.progress()
        no_watcher_is_left()
        over.set()
        engine.join()
    assert not fake.invalidated and not fake.wrong
    assert fake.contexts == {1, 2}  # none on device 0


async def test_queries_of_an_event_without_a_device_leave_a_capture_alone():
    modes, fake = [], FakeCuda()

    class Event(FakeCudaEvent):
        def query(self):
            modes.append(fake._of_thread.mode)
            return True

    with use(fake):
        await CudaEvent(Event()).wait()
        no_watcher_is_left()
    assert modes == [1]  # thread-local


async def test_one_thread_watches_all_cuda_events_and_ends_with_the_last():
    fakes = [FakeCudaEvent() for _ in range(5)]
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for fake in fakes:
                nursery.start_soon(CudaEvent(fake).wait)
            for fake in fakes:
                await fake.watched.wait()
            thread = watcher_thread()
            for fake in fakes[1:]:
                fake.done.set()
            asked = fakes[0].queries
            fakes[0].watched = ThreadEvent()
            await fakes[0].watched.wait()
            assert fakes[0].queries > asked
            assert watcher_thread() is thread
            fakes[0].done.set()
    no_watcher_is_left()
    again = FakeCudaEvent()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(CudaEvent(again).wait)
            await again.watched.wait()
            assert watcher_thread() is not thread
            again.done.set()
    no_watcher_is_left()


async def test_a_cancelled_wait_for_a_cuda_event_ends_its_watching():
    fake = FakeCudaEvent()
    event = CudaEvent(fake)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(event.wait)
            await fake.watched.wait()
            nursery.cancel_scope.cancel()
        no_watcher_is_left()
        async with trio.open_nursery() as nursery:  # another wait goes on when one of two is cancelled
            nursery.start_soon(event.wait)
            await cancelled_while_waiting(event)
            assert list(preconditions._watcher._waits.values()) == [event]
            fake.done.set()
    no_watcher_is_left()


async def test_work_that_failed_is_raised_to_all_that_wait():
    fake, errors = FakeCudaEvent(), []
    event = CudaEvent(fake)

    async def wait():
        with pytest.raises(RuntimeError, match="illegal address") as raised:
            await event.wait()
        errors.append(raised.value)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await fake.watched.wait()
            fake.error = RuntimeError("illegal address")
    assert errors == [fake.error] * 2
    assert not event.is_set()
    no_watcher_is_left()


async def test_a_watcher_that_cannot_start_leaves_nothing(monkeypatch):
    def no_thread(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    event = CudaEvent(FakeCudaEvent())
    with monkeypatch.context() as patch:
        patch.setattr(preconditions.threading, "Thread", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            await event.wait()
    no_watcher_is_left()


def test_a_cuda_event_that_was_never_recorded_is_refused():
    fake = FakeCudaEvent()
    fake.cuda_event = 0  # what torch shows; a query would say that it is done
    with pytest.raises(ValueError, match="never recorded"):
        as_precondition(fake)
    fake.cuda_event = 0x7F00
    assert not as_precondition(fake).is_set()


def test_a_torch_event_that_was_never_recorded_is_refused():
    fake = FakeCudaEvent()
    fake.event_id = 0  # of a torch.Event, which has no cuda_event
    with pytest.raises(ValueError, match="never recorded"):
        as_precondition(fake)
    fake.event_id = 0x7F00
    assert not as_precondition(fake).is_set()
    fake.event_id, fake.cuda_event = 0, 0x7F00  # a torch.cuda.Event has both
    assert not as_precondition(fake).is_set()


# --- async functions ----------------------------------------------------------------------------------------------


async def test_an_async_function_is_called_once_it_is_waited_for(autojump_clock):
    calls = []

    async def forward_pass():
        calls.append("started")
        await trio.sleep(3)
        calls.append("done")

    precondition = as_precondition(forward_pass)
    assert not precondition.passive
    assert not precondition.is_set()
    assert calls == []
    await precondition.wait()
    assert precondition.is_set()
    with trio.testing.assert_checkpoints():
        await precondition.wait()
    assert calls == ["started", "done"]


async def test_an_async_function_is_cancelled_and_may_be_called_again(autojump_clock):
    unwound = []

    async def forward_pass():
        try:
            await trio.sleep(3)
        finally:
            unwound.append(True)

    precondition = AsyncCallable(forward_pass)
    await cancelled_while_waiting(precondition)
    assert unwound == [True]
    assert not precondition.is_set()
    await precondition.wait()
    assert precondition.is_set()


async def test_what_an_async_function_raises_is_raised():
    async def forward_pass():
        raise ValueError("poisoned")

    precondition = AsyncCallable(forward_pass)
    with pytest.raises(ValueError, match="poisoned"):
        await precondition.wait()
    assert not precondition.is_set()


async def test_a_function_that_gives_something_to_await_is_taken_when_it_is_said():
    event = trio.Event()
    event.set()
    precondition = AsyncCallable(lambda: event.wait())
    await precondition.wait()
    with pytest.raises(TypeError, match="cannot be awaited"):
        await AsyncCallable(lambda: None).wait()


@pytest.mark.parametrize("bad", [None, 3, trio.Event])
def test_what_cannot_be_called_is_no_async_function(bad):
    with pytest.raises(TypeError, match="is not an async function"):
        AsyncCallable(bad)


# --- several ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [all_of, any_of])
def test_no_member_is_an_error(several):
    with pytest.raises(ValueError, match=f"{several.__name__} needs at least one precondition"):
        several()


@pytest.mark.parametrize("several", [all_of, any_of])
def test_several_are_passive_if_all_members_are(several):
    assert several(trio.Event(), ThreadEvent(), NO_WAIT).passive
    assert not several(trio.Event(), _function).passive
    assert "TrioEvent" in repr(several(trio.Event()))


async def test_all_of_holds_once_all_hold(autojump_clock):
    members = [Fake(), Fake(), Fake()]
    both = all_of(*members)
    async with trio.open_nursery() as nursery:

        async def wait():
            await both.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait)
        for member in members:
            await trio.testing.wait_all_tasks_blocked()
            assert not both.is_set()
            assert not nursery.cancel_scope.cancel_called
            member.set()
        await trio.testing.wait_all_tasks_blocked()
        pytest.fail("it did not return")
    assert both.is_set()


async def test_all_of_waits_only_for_those_that_do_not_hold():
    first, second = Fake(), Fake()
    first.set()
    second.set()
    with trio.testing.assert_checkpoints():
        await all_of(first, second, NO_WAIT).wait()
    assert first.waits == second.waits == 0


async def test_all_of_fails_as_soon_as_one_raises_and_cancels_the_others():
    poisoned, never = Fake(error=ValueError("poisoned")), Fake()
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(ValueError, match="poisoned"):  # itself, not in a group
                await all_of(never, poisoned, never).wait()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert never.waiting == 2
        poisoned.set()
    assert never.waiting == 0


@pytest.mark.parametrize("several", [all_of, any_of])
async def test_an_error_of_one_that_unwinds_is_raised_too(several):
    async def raises():
        raise ValueError("first")

    async def raises_when_cancelled():
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("second")

    with pytest.raises(ExceptionGroup, match="several preconditions failed") as raised:
        await several(raises_when_cancelled, raises).wait()
    assert [type(error) for error in raised.value.exceptions] == [ValueError, KeyError]


async def test_any_of_holds_once_one_holds_and_cancels_the_losers():
    winner, loser = Fake(), Fake()
    either = any_of(loser, winner, loser)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(either.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert loser.waiting == 2
        assert not either.is_set()
        winner.set()
    assert loser.waiting == 0
    assert either.is_set()


async def test_any_of_that_holds_starts_nothing():
    never = Fake()
    either = any_of(never, NO_WAIT)
    assert either.is_set()
    with trio.testing.assert_checkpoints():
        await either.wait()
    assert never.waits == 0


async def test_any_of_fails_as_soon_as_one_raises():
    never = Fake()
    poisoned = Fake(error=ValueError("poisoned"))
    poisoned.set()
    with pytest.raises(ValueError, match="poisoned"):
        await any_of(never, poisoned).wait()
    assert never.waiting == 0


@pytest.mark.parametrize("several", [all_of, any_of])
@pytest.mark.parametrize("count", [1, 2])
async def test_several_leave_nothing_behind_when_cancelled(several, count):
    members = [Fake() for _ in range(count)]
    await cancelled_while_waiting(several(*members))
    assert [(member.waits, member.waiting) for member in members] == [(1, 0)] * count


@pytest.mark.parametrize("several", [all_of, any_of])
async def test_what_is_no_exception_is_not_kept(several):
    interrupted = Fake(error=KeyboardInterrupt())
    interrupted.set()
    with pytest.raises(BaseExceptionGroup) as raised:
        await several(interrupted, Fake()).wait()
    assert raised.group_contains(KeyboardInterrupt)


async def test_several_nest_and_mix_kinds(autojump_clock):
    trio_event, thread_event, cuda = trio.Event(), ThreadEvent(), FakeCudaEvent()
    cuda.done.set()
    mixed = all_of(any_of(trio_event, _function), thread_event, cuda)
    thread_event.set()
    assert not mixed.is_set()
    await mixed.wait()
    assert mixed.is_set()
