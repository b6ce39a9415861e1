"""An engine that is opened when it is first needed: no thread waits for it, and none overtakes another."""

import threading

import attrs
import pytest

from offload.engines.lmcache._memory import MemoryObjects
from offload.engines.lmcache._opening import LazyEngine, OpenEngine, PageSizeUnknown, Task


class Opening:
    """Opens on request, or fails."""

    def __init__(self):
        self.sizes = []
        self.open = []
        self.proceed = threading.Event()
        self.error = None
        self.closed = 0

    def __call__(self, page_bytes):
        self.sizes.append(page_bytes)
        assert self.proceed.wait(30)
        if self.error is not None:
            raise self.error
        self.open.append(page_bytes)
        return OpenEngine(self, MemoryObjects(page_bytes))

    def close(self, timeout=None):
        self.closed += 1
        self.open.pop()


class Log:
    """What became of tasks, in order."""

    def __init__(self):
        self.begun = []
        self.refused = []
        self.told = threading.Semaphore(0)

    def task(self, name, page_bytes=1, object_bytes=1):
        def begin(opened):
            self.begun.append((name, opened.page_bytes))
            self.told.release()

        def refuse(error):
            self.refused.append((name, str(error)))
            self.told.release()

        return Task(begin, refuse, lambda: page_bytes, object_bytes)

    def wait(self, n=1):
        for _ in range(n):
            assert self.told.acquire(timeout=30)


@pytest.fixture
def opening():
    return Opening()


@pytest.fixture
def log():
    return Log()


def test_nothing_is_opened_before_the_first_task(opening):
    lazy = LazyEngine(opening)
    assert (lazy.state, lazy.opened, opening.sizes) == ("not connected", None, [])


def test_the_first_task_opens_it_for_its_page_size_and_waits_in_no_thread(opening, log):
    lazy = LazyEngine(opening)
    lazy.run(log.task("one", 4096))
    lazy.run(log.task("two", 8192))
    assert (lazy.state, log.begun) == ("opening", [])
    opening.proceed.set()
    log.wait(2)
    assert log.begun == [("one", 4096), ("two", 4096)]
    assert opening.sizes == [4096]


def test_a_task_that_comes_while_others_are_begun_waits_behind_them(opening, log):
    lazy = LazyEngine(opening)
    one = log.task("one")

    def begin_and_add(opened):
        lazy.run(log.task("three"))
        one.begin(opened)

    lazy.run(attrs.evolve(one, begin=begin_and_add))
    lazy.run(log.task("two"))
    opening.proceed.set()
    log.wait(3)
    assert [name for name, _ in log.begun] == ["one", "two", "three"]


def test_an_open_engine_begins_a_task_at_once_in_the_same_thread(opening, log):
    lazy = LazyEngine(opening)
    opening.proceed.set()
    lazy.run(log.task("one"))
    log.wait()
    while lazy.state != "open":
        threading.Event().wait(0.001)
    lazy.run(log.task("two"))
    assert len(log.begun) == 2


def test_one_that_does_not_open_refuses_all_that_wait_and_what_comes_soon_after(opening, log):
    now = [0.0]
    lazy = LazyEngine(opening, clock=lambda: now[0])
    opening.error = OSError("no descriptors left")
    lazy.run(log.task("one"))
    lazy.run(log.task("two"))
    opening.proceed.set()
    log.wait(2)
    lazy.run(log.task("three"))
    assert log.refused == [(name, "no descriptors left") for name in ("one", "two", "three")]
    assert (lazy.state, opening.sizes) == ("failed", [1])


def test_task_without_thread_is_refused_alone(opening, log, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    lazy = LazyEngine(opening)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        lazy.run(log.task("one"))
    [(name, why)] = log.refused
    assert name == "one" and "can't start new thread" in why
    opening.proceed.set()
    lazy.run(log.task("two", 2))
    log.wait(2)
    assert log.begun == [("two", 2)]
    lazy.close()


def test_it_is_tried_again_a_while_later_and_the_while_grows(opening, log):
    now = [0.0]
    lazy = LazyEngine(opening, clock=lambda: now[0])
    opening.error = OSError("no descriptors left")
    opening.proceed.set()
    lazy.run(log.task("one"))
    log.wait()
    now[0] = 1.5
    lazy.run(log.task("two"))
    log.wait()
    now[0] = 3.0  # the second wait is twice the first
    lazy.run(log.task("three"))
    log.wait()
    assert len(opening.sizes) == 2
    now[0] = 4.0
    opening.error = None
    lazy.run(log.task("four"))
    log.wait()
    assert log.begun == [("four", 1)]
    assert lazy.failure is None


def until(lazy, state):
    while lazy.state != state:
        threading.Event().wait(0.001)


def test_what_a_lookup_has_guessed_is_put_right_by_the_first_object_that_does_not_fit(opening, log):
    lazy = LazyEngine(opening)
    lazy.on_replaced = lambda: log.begun.append("let go")
    opening.proceed.set()
    lazy.run(log.task("lookup", 4096, object_bytes=0))
    log.wait()
    until(lazy, "open")
    lazy.run(log.task("smaller", 1024, object_bytes=1000))
    lazy.run(log.task("larger", 8192, object_bytes=8000))
    log.wait(2)
    until(lazy, "open")
    lazy.run(log.task("too large", 16384, object_bytes=16000))  # what the first object said stands
    log.wait()
    assert log.begun == [("lookup", 4096), ("smaller", 4096), "let go", ("larger", 8192), ("too large", 8192)]
    assert (opening.open, opening.closed) == ([8192], 1)


def test_a_guess_is_put_right_also_while_it_opens(opening, log):
    lazy = LazyEngine(opening)
    lazy.run(log.task("lookup", 4096, object_bytes=0))
    lazy.run(log.task("larger", 8192, object_bytes=8000))
    opening.proceed.set()
    log.wait(2)
    assert log.begun == [("lookup", 4096), ("larger", 8192)]
    assert opening.open == [8192]


def test_a_page_that_cannot_be_known_yet_refuses_that_task_alone(opening, log):
    lazy = LazyEngine(opening)
    opening.proceed.set()
    lazy.run(log.task("lookup", 0, object_bytes=0))
    log.wait()
    assert log.refused == [("lookup", str(PageSizeUnknown()))]
    until(lazy, "not connected")
    lazy.run(log.task("store", 4096))
    log.wait()
    assert log.begun == [("store", 4096)]


def test_closing_waits_for_the_opening_and_closes_what_it_opened(opening, log):
    lazy = LazyEngine(opening)
    lazy.run(log.task("one"))
    closing = threading.Thread(target=lazy.close)
    closing.start()
    opening.proceed.set()
    closing.join(30)
    assert not closing.is_alive()
    assert (opening.closed, lazy.state) == (1, "closed")
    lazy.close()
    assert opening.closed == 1


def test_what_opens_after_a_close_gave_up_is_closed(opening, log):
    lazy = LazyEngine(opening)
    lazy.run(log.task("one"))
    opener = lazy._opener
    lazy.close(timeout=0.01)
    opening.proceed.set()
    opener.join(30)
    assert (opening.closed, lazy.opened, log.begun) == (1, None, [])
    assert log.refused == [("one", "the adapter was closed")]


def test_a_close_in_the_last_moment_leaves_no_task_begun(opening, log, monkeypatch):
    lazy, found = LazyEngine(opening), LazyEngine._closed_meanwhile

    def close_first(self):
        closing = threading.Thread(target=lazy.close, kwargs={"timeout": 0.01})
        closing.start()
        closing.join(30)
        return found(self)

    monkeypatch.setattr(LazyEngine, "_closed_meanwhile", close_first)
    opening.proceed.set()
    lazy.run(log.task("one"))
    log.wait()
    assert (opening.closed, log.begun, log.refused) == (1, [], [("one", "the adapter was closed")])


def test_a_closed_one_refuses(opening, log):
    lazy = LazyEngine(opening)
    lazy.close()
    lazy.run(log.task("one"))
    assert log.refused == [("one", "the adapter was closed")]
