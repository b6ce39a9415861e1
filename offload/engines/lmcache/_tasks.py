"""Tasks of one kind: ids, and results that are returned once. Pure.

The caller holds its lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TaskTable(Generic[T]):
    """The running tasks of one kind, and results not yet taken.

    A result stays until it is taken, as LMCache does for every task; so the table is as long as LMCache's own.

    Args:
        ids: source of ids; one sequence for all kinds, so that an id of another kind is never taken for one of this.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._open: set[int] = set()
        self._results: dict[int, T] = {}

    @property
    def under_way(self) -> int:
        """Number of tasks without a result."""
        return len(self._open)

    def begin(self) -> int:
        """Return the id of a new task."""
        task = next(self._ids)
        self._open.add(task)
        return task

    def finish(self, task: int, result: T) -> bool:
        """Record the result of a task.

        Returns:
            Whether the task was still running: a task ends once, and the first result counts.
        """
        if task not in self._open:
            return False
        self._open.remove(task)
        self._results[task] = result
        return True

    def take(self, task: int) -> T | None:
        """Return the result of a task, once; ``None`` before and after."""
        return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """Return all results that nobody has taken."""
        results, self._results = self._results, {}
        return results
