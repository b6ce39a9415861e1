"""A disturbance at every step: the one way in which tests cancel (or close, or kill) wherever that is possible.

Virtual time and a seed make a run repeat itself, so what happened before step k is the same in each of its runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from tests.support import determinism


class AtStep(trio.abc.Instrument):
    """Does something before the k-th step of the tasks that count.

    Args:
        k: from 1 on.
        do: what is done. While it is None no step counts, so that a test may set it where it is to begin.
        counts: which tasks count; all of them unless given, trio's own included.
    """

    def __init__(
        self,
        k: int,
        do: Callable[[], Any] | None = None,
        *,
        counts: Callable[[trio.lowlevel.Task], bool] = lambda task: True,
    ) -> None:
        self.left = k
        """Steps to come until then; positive at the end of a run that was not disturbed."""
        self.do = do
        self._counts = counts

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.do is not None and self._counts(task):
            self.left -= 1
            if not self.left:
                self.do()


def at_every_step(run: Callable[[int], bool], *, most: int, least: int = 0, name: str = "") -> None:
    """Call ``run(k)`` for each k from 1 on, until one was not disturbed any more.

    Args:
        run: one run; whether it came to its end undisturbed.
        most: more steps than it has; else it never ends, which is a failure.
        least: fewer steps than it has; else it was not disturbed where it should have been.
        name: what a failure is called, beside its step.
    """
    for k in range(1, most):
        try:
            undisturbed = run(k)
        except BaseException as error:
            error.add_note(f"{name} at step {k}")
            raise
        if undisturbed:
            assert k > least
            return
    raise AssertionError(f"{name} never ended")


def played(play: Callable[..., Any], *args: Any, k: int, seed: int) -> bool:
    """Play once, with an :class:`AtStep` as the last argument, which ``play`` tells when to begin; whether undisturbed."""
    instrument = AtStep(k)
    determinism.run(play, *args, instrument, seed=seed, instruments=[instrument])
    return instrument.left > 0
