"""Tasks of one kind: ids, and results that are told once. Pure; the caller holds its lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TaskTable(Generic[T]):
    """The tasks of one kind that are under way, and the results that have not been asked for.

    A result stays until it is asked for, as LMCache does for every task; so the table is as long as LMCache's own.

    Args:
        ids: where ids come from; one sequence for all kinds, so that an id of another kind is never taken for one of this.
    """

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._open: set[int] = set()
        self._results: dict[int, T] = {}

    @property
    def under_way(self) -> int:
        """How many tasks have no result yet."""
        return len(self._open)

    def begin(self) -> int:
        """The id of a new task."""
        task = next(self._ids)
        self._open.add(task)
        return task

    def finish(self, task: int, result: T) -> bool:
        """A task has ended. Whether it had not before: a task ends once, and the first result counts."""
        if task not in self._open:
            return False
        self._open.remove(task)
        self._results[task] = result
        return True

    def take(self, task: int) -> T | None:
        """The result of a task, once; ``None`` before and after."""
        return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """All results that nobody has asked for."""
        results, self._results = self._results, {}
        return results
