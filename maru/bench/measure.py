"""Measurement of subjects in turn, as medians, each next to its limit.

A machine is never quiet, and a disturbance lasts longer than a repetition. So the subjects of one comparison take
turns, back and forth, in one process: a disturbance of one repetition is one of its neighbour as well, and a median
ignores both. Before them comes a warm-up. The garbage of the previous repetition is collected before each one; during
it the collector runs as usual.

A row has the same form on the screen and in ``--json``. A figure that could not be measured is a row without a value,
never a missing row: a goal that was not measured is not a goal that was met.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

Clock: TypeAlias = Callable[[], float]
"""Clock in seconds: of elapsed or of processor time."""
Figures: TypeAlias = Mapping[str, float]
"""Figures of one repetition, by name."""
Json: TypeAlias = "str | float | bool | None"


@attrs.frozen
class Row:
    """One figure next to its limit."""

    name: str
    """Name, from the bench down to the case: ``cancel.parked.awaiting.p99``."""
    value: float | None
    """Median over the repetitions; None if it could not be measured."""
    unit: str
    """Unit of the value and of the limit."""
    limit_name: str | None = None
    """Subject that the value is compared with."""
    limit_value: float | None = None
    """Measure of that subject, from the same run."""
    goal: str | None = None
    """Goal: ``ratio`` or ``value``, ``<=`` or ``>=``, and a number.

    None for a figure without a goal.
    """
    noise: float | None = None
    """Spread of the repetitions' middle half, as a share of the median.

    The noisier of the value and the limit counts.
    """
    why_not: str = ""
    """Reason why it could not be measured."""

    @property
    def ratio(self) -> float | None:
        """Value divided by the limit."""
        return self.value / self.limit_value if self.value is not None and self.limit_value else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a value."""
        if self.goal is None:
            return None
        of, sign, bound = self.goal.split()
        figure = {"ratio": self.ratio, "value": self.value}[of]
        if figure is None:
            return None
        return {"<=": figure <= float(bound), ">=": figure >= float(bound)}[sign]

    def as_json(self) -> dict[str, Json]:
        """Return the row for machines."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "limit_name": self.limit_name,
            "limit_value": self.limit_value,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
        }


@attrs.frozen
class Sample:
    """The values of one figure, one per repetition."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    @property
    def noise(self) -> float | None:
        """Spread of the values' middle half, as a share of the median.

        None for fewer than three values.
        """
        if len(self.values) < 3 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / self.median


def noisiest(*samples: Sample) -> float | None:
    """Return the noise of a comparison's noisier side."""
    return max((sample.noise for sample in samples if sample.noise is not None), default=None)


class Samples(dict[str, Sample]):
    """The samples of one measurement, by name; or the reason for none."""

    def __init__(self, samples: Mapping[str, Sample] | None = None, *, why_not: str = "") -> None:
        super().__init__(samples or {})
        self.why_not = why_not

    def row(
        self,
        name: str,
        unit: str,
        figure: str,
        limit_name: str | None = None,
        limit: str | None = None,
        goal: str | None = None,
        *,
        scale: float = 1.0,
    ) -> Row:
        """Put a sample next to the one that limits it.

        Args:
            name: name of the row.
            unit: unit of value and limit.
            figure: name of the sample.
            limit_name: name of the limit, for readers.
            limit: name of the limiting sample.
            goal: goal of the row, as :attr:`Row.goal`.
            scale: factor that converts the medians into the unit.
        """
        if self.why_not:
            return Row(name, None, unit, limit_name, goal=goal, why_not=self.why_not)
        ours = self[figure]
        if limit is None:
            return Row(name, ours.median * scale, unit, goal=goal, noise=ours.noise)
        beside = self[limit]
        noise = noisiest(ours, beside)
        return Row(name, ours.median * scale, unit, limit_name, beside.median * scale, goal, noise)


@attrs.frozen
class Effort:
    """The effort of a bench: its repetitions and sizes."""

    repeat: int = 9
    """Repetitions of each subject."""
    quick: bool = False
    """Whether to show only that everything runs, with meaningless figures."""
    progress: Callable[[str], None] = lambda text: None
    """Callback that shows the name of the running measurement."""

    def size(self, full: int, quick: int) -> int:
        """Return the size of a subject."""
        return quick if self.quick else full

    def at_most(self, repeat: int) -> Effort:
        """Return an effort with at most this many repetitions, for slow subjects."""
        return attrs.evolve(self, repeat=min(self.repeat, repeat))


def measure(
    what: str, effort: Effort, subjects: Mapping[str, Callable[[], Figures | float]], *, warm_up: bool = True
) -> Samples:
    """Measure subjects in turn, back and forth, by the values they return.

    Args:
        what: the name of the measurement, for the progress display.
        effort: number of repetitions.
        subjects: functions that return the figure, or several figures, by name.
        warm_up: whether to run each once before it counts, unless in a quick bench. A long subject may warm up itself.

    Returns:
        A sample for each subject that returns a number, under its name, and for each figure of one that returns
        several.
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
    return Samples({figure: Sample(column) for figure, column in values.items()})


def _turns(names: Sequence[str], numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
    for number in numbers:
        yield from ((number, name) for name in (names if number % 2 else reversed(names)))


def seconds_of(call: Callable[[], object], times: int = 1, clock: Clock = time.perf_counter) -> float:
    """Return the average seconds of a call."""
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) / times


def rate_of(amount: float, call: Callable[[], object], times: int = 1) -> float:
    """Return the amount per second of a call, averaged over the calls."""
    return amount / seconds_of(call, times)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least this share of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
