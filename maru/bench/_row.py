"""A row: one figure, the limit that was measured beside it, and whether the goal drawn from both is met.

The form is the same on the screen and in ``--json``. What could not be measured is a row without a value, never a row
that is left out: a goal that was not measured is not a goal that was met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Json: TypeAlias = "str | float | bool | None"


@attrs.frozen
class Goal:
    """What a row should come to."""

    of: Literal["ratio", "value"]
    """Which of its figures."""
    sign: Literal["<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{self.of} {self.sign} {self.bound:.12g}"

    def met_by(self, figure: float) -> bool:
        """Whether this figure is good enough."""
        return figure <= self.bound if self.sign == "<=" else figure >= self.bound


@attrs.frozen
class Row:
    """One figure beside its limit."""

    name: str
    """What was measured, from the bench down to the case: ``cancel.parked.awaiting.p99``."""
    value: float | None
    """The median over the repetitions; None where it could not be measured."""
    unit: str
    """Of the value and of the limit."""
    limit_name: str | None = None
    """What it is compared with."""
    limit_value: float | None = None
    """The same measure of that, from the same run."""
    goal: Goal | None = None
    """What the figure should come to; None for one that is there to be seen."""
    noise: float | None = None
    """How far the middle half of the repetitions is spread, as a share of the median, on the noisier side."""
    why_not: str = ""
    """Why it could not be measured."""

    @property
    def ratio(self) -> float | None:
        """The value divided by the limit."""
        return self.value / self.limit_value if self.value is not None and self.limit_value else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none, or where it was not measured."""
        if self.goal is None:
            return None
        figure = self.ratio if self.goal.of == "ratio" else self.value
        return None if figure is None else self.goal.met_by(figure)

    def as_json(self) -> dict[str, Json]:
        """For machines."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "limit_name": self.limit_name,
            "limit_value": self.limit_value,
            "ratio": self.ratio,
            "goal": None if self.goal is None else str(self.goal),
            "met": self.met,
        }


def noise_of(row: Row) -> Iterator[Row]:
    """The row that says how noisy another one is, where that is known. For machines; people have a column for it."""
    if row.noise is not None:
        yield Row(f"{row.name}.noise", row.noise, "share of the median")


def table_of(rows: Iterable[Row], title: str) -> Table:
    """For people."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for heading in ("figure", "value", "unit", "beside it", "", "ratio", "noise", "goal", ""):
        right = heading in ("value", "ratio", "noise")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading == "figure")
    table.columns[4].justify = "right"
    for row in rows:
        table.add_row(
            row.name,
            _figure(row.value),
            row.unit,
            row.limit_name or "",
            _figure(row.limit_value),
            _figure(row.ratio),
            "" if row.noise is None else f"{row.noise:.0%}",
            "" if row.goal is None else str(row.goal),
            _met(row),
        )
    return table


def _met(row: Row) -> Text:
    from rich.text import Text

    if row.value is None:
        return Text("not measured", "yellow")
    return {True: Text("met", "green"), False: Text("missed", "red"), None: Text("")}[row.met]


def lines_of(rows: Iterable[Row], title: str) -> Iterator[Text]:
    """For terminals that are too narrow for the table: the name of each row in a line of its own."""
    from rich.text import Text

    yield Text(title, "bold")
    for row in rows:
        yield Text(row.name)
        words = [f"{_figure(row.value)} {row.unit}"] if row.value is not None else []
        if row.limit_name is not None and row.limit_value is not None:
            words.append(f"{row.limit_name} {_figure(row.limit_value)}")
        if row.ratio is not None:
            words.append(f"ratio {_figure(row.ratio)}")
        if row.noise is not None:
            words.append(f"noise {row.noise:.0%}")
        if row.goal is not None:
            words.append(f"goal {row.goal}")
        figures = Text(", ".join(words) + " " if words else "")
        yield Text("    ").append_text(figures).append_text(_met(row))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
