"""How everything here is measured: in turn with what it is compared with, after a warm-up, as a median.

A machine is never quiet, and what disturbs it lasts longer than a repetition. So the subjects of one comparison take turns,
back and forth, in one process: what disturbs one repetition disturbs its neighbour as well, and a median forgets both.
The garbage of the one before is collected before each repetition; during it the collector runs as usual.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, TypeVarTuple

import attrs
import trio

F = TypeVar("F")
Ts = TypeVarTuple("Ts")

Figures: TypeAlias = Mapping[str, float]
"""What one repetition of a subject has measured, by name."""


@attrs.frozen
class Sample:
    """One figure, once per repetition."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The figure."""
        return statistics.median(self.values)

    @property
    def noise(self) -> float | None:
        """Half of the repetitions lie within this share of the median; None where there were too few to tell."""
        if len(self.values) < 3 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / self.median


def noisiest(*samples: Sample) -> float | None:
    """The noise of a comparison: that of its noisier side."""
    return max((sample.noise for sample in samples if sample.noise is not None), default=None)


@attrs.frozen
class Effort:
    """How long a bench may take."""

    repeat: int = 9
    """Repetitions of each subject."""
    quick: bool = False
    """Whether it is to be seen only that everything runs: the figures are of little use then."""
    progress: Callable[[str], None] = lambda text: None
    """Told what is being measured."""

    def size(self, full: int, quick: int) -> int:
        """How large a subject is made."""
        return quick if self.quick else full

    def at_most(self, repeat: int) -> Effort:
        """The same, for a subject of which one repetition is long."""
        return attrs.evolve(self, repeat=min(self.repeat, repeat))


def in_turn(
    what: str, effort: Effort, subjects: Mapping[str, Callable[[], Figures | float]], *, warm_up: bool = True
) -> dict[str, Sample]:
    """Measure subjects in turn, back and forth. What each returns counts, not how long it takes.

    Args:
        what: the name of the measurement, for the progress display.
        effort: how often.
        subjects: by name.
        warm_up: run each once before it counts, unless in a quick bench. A long one may see to that itself.

    Returns:
        A sample for each subject that returns a number, under its name, and for each figure of one that returns several.
    """
    values: dict[str, list[float]] = {}
    first = 0 if warm_up and not effort.quick else 1
    for number, name in _turns(list(subjects), range(first, effort.repeat + 1)):
        effort.progress(f"{what}: {name}, {f'{number} of {effort.repeat}' if number else 'warming up'}")
        if not effort.quick:
            gc.collect()
        measured = subjects[name]()
        if number:
            for figure, value in (measured if isinstance(measured, Mapping) else {name: measured}).items():
                values.setdefault(figure, []).append(value)
    return {figure: Sample(column) for figure, column in values.items()}


def _turns(names: Sequence[str], numbers: range) -> Iterator[tuple[int, str]]:
    for number in numbers:
        yield from ((number, name) for name in (names if number % 2 else reversed(names)))


def in_trio(subject: Callable[[*Ts], Awaitable[F]], *args: *Ts) -> Callable[[], F]:
    """A subject that is measured in a trio run of its own."""
    return lambda: trio.run(subject, *args)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as this share of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
