"""A context manager in a trio thread of its own."""

import contextlib
import signal
import threading
import time

import pytest
import trio
import trio.lowlevel

from backends.base.trio_thread import TrioThread


def thread(make, timeout=10.0):
    return TrioThread(make, "a test", timeout=timeout, close_timeout=10.0)


@contextlib.asynccontextmanager
async def nothing(log):
    log.append("in")
    try:
        yield "it"
    finally:
        log.append("out")


def test_it_is_entered_once_used_and_left():
    log = []
    home = thread(lambda: nothing(log))
    assert home.start() == "it" and log == ["in"]

    async def double(n):
        await trio.lowlevel.checkpoint()
        return 2 * n

    assert home.wait(double, 2) == 4 and home.call(len, "abc") == 3
    home.close()
    home.close()
    assert log == ["in", "out"]


@pytest.mark.parametrize("presses", [1, 3])
def test_an_interrupted_call_has_ended_when_it_raises(presses):
    """The memory of an interrupted load belongs to the caller again."""
    home, over, began = thread(lambda: nothing([])), threading.Event(), threading.Event()
    home.start()

    async def copy():
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.1)  # a copy comes to its end
            over.set()

    def press():
        began.wait()
        for _ in range(presses):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.01)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        home.wait(copy)
    assert over.is_set() and not hasattr(raised.value, "__notes__")
    pressing.join()
    home.close()


def test_a_refused_call_is_not_waited_for(monkeypatch):
    home, waits = thread(lambda: nothing([])), []
    monkeypatch.setattr(home, "_has_ended", lambda *call: waits.append(call))
    home.start()

    async def call():
        raise AssertionError("it has begun")

    async def in_trio():
        home.wait(call)

    with pytest.raises(RuntimeError, match="blocking function"):
        trio.run(in_trio)
    home.close()
    with pytest.raises(RuntimeError, match="trio_token"):
        home.wait(call)
    assert not waits


def test_a_call_that_does_not_end_is_said_to_go_on(monkeypatch):
    monkeypatch.setattr("backends.base.trio_thread._LONGEST_END", 0.05)
    home, go_on = thread(lambda: nothing([])), threading.Event()
    home.start()

    async def copy():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(go_on.wait)

    with pytest.raises(KeyboardInterrupt) as raised:
        home.wait(copy)
    assert "may still be written to" in raised.value.__notes__[0]
    go_on.set()
    home.close()


def test_what_entering_raises_is_raised_by_start():
    @contextlib.asynccontextmanager
    async def broken():
        raise ValueError("no")
        yield

    home = thread(broken)
    with pytest.raises(ValueError, match="no"):
        home.start()
    assert home.token is None


def test_a_refused_thread_leaves_nothing_to_close(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    home = thread(lambda: nothing([]))
    with pytest.raises(OSError, match="start new thread: raise"):
        home.start()
    home.close()


def test_what_leaving_raises_is_raised_by_close():
    @contextlib.asynccontextmanager
    async def broken():
        yield
        raise ValueError("no")

    home = thread(broken)
    home.start()
    with pytest.raises(ValueError, match="no"):
        home.close()


def test_a_call_that_takes_too_long_is_cancelled():
    log = []

    async def forever():
        try:
            await trio.sleep_forever()
        finally:
            log.append("cancelled")

    home = thread(lambda: nothing(log), timeout=0.01)
    home.start()
    with pytest.raises(trio.TooSlowError):
        home.wait(forever)
    home.close()
    assert log == ["in", "cancelled", "out"]


def test_a_close_that_ran_out_of_time_is_told():
    go = threading.Event()

    @contextlib.asynccontextmanager
    async def slow_to_leave():
        yield
        await trio.to_thread.run_sync(go.wait)

    home = TrioThread(slow_to_leave, "a test", timeout=10.0, close_timeout=0.01)
    home.start()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
        home.close()
    go.set()
