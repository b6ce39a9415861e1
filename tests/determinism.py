"""A trio run that goes the same way every time: virtual time, and no order that depends on addresses or on chance.

Four things are needed, and each alone is not enough (``test_determinism.py`` fails when one is removed):

* the scheduler's random source is seeded;
* a batch of runnable tasks is sorted before it is shuffled (what trio does for Hypothesis);
* deadlines that fall together expire in the order in which they were registered, not by the address of their scope;
* the tasks and the children of a cancelled scope are woken in the order in which they came, not in that of a set.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator
from heapq import heappush
from typing import Any, TypeVar

import trio
import trio.testing
from trio._core import _run as inside

T = TypeVar("T")

ALL = frozenset({"seed", "sort", "deadlines", "scopes"})


class _Ordered(dict[Any, None]):
    """As much of a set as trio needs, in the order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def discard(self, item: Any) -> None:
        self.pop(item, None)


@contextlib.contextmanager
def deterministic(seed: int, parts: Collection[str] = ALL) -> Iterator[None]:
    """Every trio run inside is a function of ``seed`` and of its code."""
    with contextlib.ExitStack() as stack:
        if "seed" in parts:
            stack.callback(inside._r.setstate, inside._r.getstate())
            inside._r.seed(seed)
        # pytest-trio has set it already, where Hypothesis is installed.
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


def run(
    main: Callable[..., Awaitable[T]], *args: Any, seed: int = 0, instruments: Collection[Any] = (), **options: Any
) -> T:
    """Run ``main`` in virtual time, the same way for the same seed."""
    with deterministic(seed, **options):
        return trio.run(
            functools.partial(main, *args),
            clock=trio.testing.MockClock(autojump_threshold=0),
            instruments=list(instruments),
        )
