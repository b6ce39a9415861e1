"""Programs played one after the other in a process of its own: what hangs there, or ends that process, ends nothing here."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias, cast

import attrs

from .._contract import SEAMS
from .._files.checking import demand
from .._making.loads import unroll
from .._playing.systems import factory_of
from .._program import Scenario
from .._report import Report
from .many import Crew, Playing
from .summing import Played

PATIENCE: Final = 5.0
"""Real seconds that a program may take; most take milliseconds."""

Task: TypeAlias = tuple[Scenario, int]
"""A program, and the seed that it is played with."""


@attrs.frozen
class _Tasks:
    """Plays what it is given."""

    base: Path | None
    system: str

    def warm(self) -> None:
        Playing(None, self.base, self.system).warm()

    def __call__(self, task: Task) -> Report:
        scenario, seed = task
        return Playing(scenario, self.base, self.system)(seed)


class Aside:
    """Plays programs in another process, as :data:`~._shrinking.shrinking.Play` does in this one. To be used in a ``with``.

    A program that takes longer than its patience is a livelock; one whose process dies is a crash. The next one gets a new
    process.

    Args:
        system: ``module:factory``; empty: ours.
        base: the directory that paths in programs are relative to.
        patience: real seconds that a program may take.
    """

    def __init__(self, system: str = "", base: Path | None = None, *, patience: float = PATIENCE) -> None:
        self._tasks = _Tasks(base, system)
        self._patience = patience
        self._todo: deque[Task] = deque()
        self._played: Generator[Played, None, None] | None = None

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._played is not None:
            self._played.close()
            self._played = None

    def __call__(self, scenario: Scenario, seed: int) -> Report:
        """One run.

        Raises:
            ScenarioError: the program makes no sense.
        """
        # Found here, it costs no process.
        demand(scenario, SEAMS if factory_of(self._tasks.system) is not None else None)
        if self._played is None:
            crew = Crew(self._tasks, self._given(), 1, self._patience, None, keep=True, chunk=1)
            self._played = cast("Generator[Played, None, None]", crew.results())
        self._todo.append((scenario, seed))
        try:
            one = next(self._played)
        except BaseException:
            self._played = None
            self._todo.clear()
            raise
        return one.report or self._lost(scenario, seed, one)

    def _given(self) -> Iterator[Task]:
        while self._todo:
            yield self._todo.popleft()

    def _lost(self, scenario: Scenario, seed: int, one: Played) -> Report:
        """All that is known of a run that never came back."""
        return Report(
            scenario=unroll(scenario, seed, self._tasks.base),
            seed=seed,
            moments=(),
            violations=one.violations,
            outcomes={},
            planned=len(scenario.fault),
            fired={},
            counts={},
            reached=frozenset(),
        )
