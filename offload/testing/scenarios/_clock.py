"""Deterministic trio runs: virtual time, and no order by address or chance.

Four changes are needed, and none suffices alone (``tests/scenarios/test_clock.py`` fails when one is removed):

* the scheduler's random source is seeded;
* a batch of runnable tasks is sorted before it is shuffled (as trio does for Hypothesis);
* equal deadlines expire in the order in which they were registered, not by the address of their scope;
* the tasks and the children of a cancelled scope are woken in the order in which they came, not in that of a set.

A fifth makes it fast: a :class:`VirtualClock` jumps to the next deadline at once; trio's own goes through a round of
its loop for that.

Rule 1. Everything that is private to trio is used in this module only.
Rule 2. The garbage collector does not run by itself during a run: whether a weak reference is still alive must not
        depend on how much the process allocated before. Objects that existed before a run are excluded from the
        collection that follows it, so that a run costs as much in a large process as in a small one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterator
from heapq import heappush
from typing import Any, Final, Literal, TypeAlias, TypeVar

import trio
from trio._core import _run as inside

# `trio.testing` has it, too, and imports pytest if that is installed: a tenth of a second for each worker process.
from trio._core._generated_run import wait_all_tasks_blocked as wait_all_tasks_blocked

T = TypeVar("T")

Part: TypeAlias = Literal["seed", "sort", "deadlines", "scopes"]
ALL: Final[frozenset[Part]] = frozenset({"seed", "sort", "deadlines", "scopes"})
"""All parts that are needed. A test leaves one out."""


class _Ordered(dict[Any, None]):
    """The subset of a set's methods that trio needs, in insertion order."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def discard(self, item: Any) -> None:
        self.pop(item, None)


@contextlib.contextmanager
def deterministic(seed: int, parts: Collection[Part] = ALL) -> Iterator[None]:
    """Make every trio run inside a function of ``seed`` and its code."""
    with contextlib.ExitStack() as stack:
        if "seed" in parts:
            stack.callback(inside._r.setstate, inside._r.getstate())
            inside._r.seed(seed)
        # pytest-trio has set it already, if Hypothesis is installed.
        _set(stack, inside, "_ALLOW_DETERMINISTIC_SCHEDULING", "sort" in parts)
        if "deadlines" in parts:
            numbers = itertools.count()

            def add(self: Any, deadline: float, cancel_scope: trio.CancelScope) -> None:
                heappush(self._heap, (deadline, next(numbers), cancel_scope))
                self._active += 1

            _set(stack, inside.Deadlines, "add", add)
        if "scopes" in parts:
            attach = inside.CancelStatus.__attrs_post_init__

            def __attrs_post_init__(self: Any) -> None:
                self._children, self._tasks = _Ordered(), _Ordered()
                attach(self)

            _set(stack, inside.CancelStatus, "__attrs_post_init__", __attrs_post_init__)
        yield


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Disable garbage collection in the block, except :func:`gc.collect` calls.

    Garbage of the block is collected at its end.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()


class VirtualClock(trio.abc.Clock):
    """Virtual time: it stands still while a task can run, then jumps.

    It jumps to the next deadline, and waits for neither sockets nor threads. If a system may have some, use a
    :class:`trio.testing.MockClock`, which gives them a turn before it jumps; otherwise a run goes the same way with
    both.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __repr__(self) -> str:
        return f"<virtual time {self.now}>"

    def start_clock(self) -> None:
        """Do nothing: virtual time needs no start."""

    def current_time(self) -> float:
        """Return the seconds since the run began."""
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the deadline, since no task can run.

        It does not jump if a task waits for just that, or a call came from a thread or a signal.
        """
        if self.now < deadline < math.inf:
            runner = inside.GLOBAL_RUN_CONTEXT.runner
            if runner.waiting_for_idle or runner.entry_queue.size():
                return math.inf
            self.now = deadline
        return deadline - self.now

    def jump(self, seconds: float) -> None:
        """Advance the time by so many seconds."""
        self.now += seconds


def run(
    main: Callable[..., Awaitable[T]],
    *args: Any,
    seed: int = 0,
    instruments: Collection[Any] = (),
    clock: trio.abc.Clock | None = None,
    **options: Any,
) -> T:
    """Run ``main`` in virtual time, the same way for the same seed."""
    if clock is None:
        from trio.testing import MockClock

        clock = MockClock(autojump_threshold=0)
    with deterministic(seed, **options):
        return trio.run(functools.partial(main, *args), clock=clock, instruments=list(instruments))


# --- a run that does not end --------------------------------------------------------------------------------------


def tasks() -> Iterator[trio.lowlevel.Task]:
    """Yield all tasks of this run, parents first, then in starting order."""
    root = trio.lowlevel.current_root_task()
    todo = [root] if root is not None else []
    while todo:
        task = todo.pop()
        yield task
        for nursery in task.child_nurseries:
            todo += sorted(nursery.child_tasks, key=lambda child: child._counter, reverse=True)


def unshield() -> None:
    """Remove the shield of every scope that a task is in.

    For a run that was cancelled and does not end by that.
    """
    for task in tasks():
        status: Any = task._cancel_status
        while status is not None:
            if status._scope.shield:
                status._scope.shield = False
            status = status._parent
