"""Whether a scenario makes sense as a whole: every name it uses is defined, and nothing in it contradicts the rest. Pure.

Rule 1. Everything that is wrong is found at once, each with its path in the file (``fault[2].who``).
Rule 2. An unknown name comes with the nearest known one. Whatever is wrong comes with a way out.
Rule 3. What could never have an effect is wrong as well: a fault at a time that never comes, a field that the kind of fault
        does not look at, an expectation of a figure that nobody keeps.
"""

from __future__ import annotations

from collections.abc import Collection

from offload.instruments import HOOKS

from .._contract import Seam
from .._program import Scenario
from .check_engine import check_engine
from .check_expect import check_expectations
from .check_faults import check_faults
from .check_house import check_pipelines, check_rooms, check_tiers
from .check_page_stores import check_page_stores
from .check_steps import check_load, check_steps, collect_labels
from .complaints import Complaints as Complaints
from .complaints import Problem as Problem
from .complaints import ScenarioError as ScenarioError


def check(
    scenario: Scenario, seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None
) -> list[Problem]:
    """Everything that makes no sense.

    Args:
        scenario: of one's own making, or read from a file.
        seams: those that the system under test has; ``None`` for ours, which has all of them.
        hooks: the names of its hooks; ``None`` for ours, or, with ``seams``, for hooks that nobody knows beforehand.
    """
    c = Complaints(scenario, seams, HOOKS if hooks is None and seams is None else hooks)
    if not scenario.name.strip():
        c.wrong("name", "is empty: say in a few words what the scenario shows")
    collect_labels(c)
    check_tiers(c)
    check_pipelines(c)
    check_load(c)
    check_steps(c)
    check_engine(c)
    if not c.problems:  # or else it would complain about the same again
        check_rooms(c)
    check_faults(c)
    check_page_stores(c)
    check_expectations(c)
    return c.problems


def demand(scenario: Scenario, seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None) -> None:
    """Insist that a scenario makes sense: see :func:`check`.

    Raises:
        ScenarioError: it does not.
    """
    problems = check(scenario, seams, hooks=hooks)
    if problems:
        first, *others = problems
        raise ScenarioError("", None, first.path, first.text, [f"{one.path}: {one.text}" for one in others])
