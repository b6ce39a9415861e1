"""A scenario from a file: TOML, with every error at its line.

Rule 1. Nothing is ignored: a name that nobody knows is an error that names the nearest one that somebody does.
Rule 2. What is read makes sense as a whole (:func:`check`), or it is not read.
Rule 3. Whatever is wrong is one :class:`ScenarioError`: file, line, path within, what is wrong, and the way out.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec

from .._contract import Seam
from .._program import Scenario
from .checking import check
from .complaints import Problem
from .complaints import ScenarioError as ScenarioError
from .misfits import misfits
from .toml_lines import lines_of, nearest_line, parse_path

SUFFIX: Final = ".scenario.toml"
"""What the name of a scenario's file ends with."""


def read(
    path: str | os.PathLike[str], seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None
) -> Scenario:
    """The scenario of a file.

    Args:
        path: of the file.
        seams: see :func:`check`.
        hooks: see :func:`check`.

    Raises:
        ScenarioError: it cannot be read, it is not TOML, no scenario, or one that makes no sense.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise ScenarioError(name, None, "", f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ScenarioError(name, line, "", "is not UTF-8: save it as such") from error
    return read_text(text, name, seams, hooks=hooks)


def read_text(
    text: str,
    name: str = "<text>",
    seams: Collection[Seam] | None = None,
    *,
    hooks: Collection[str] | None = None,
) -> Scenario:
    """The scenario of a text; ``name`` is what errors call its file. See :func:`read`."""
    document = _parse(text, name)
    try:
        scenario = msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        found = list(misfits(document))
        raise _error(text, name, found or [Problem("", str(error))]) from None
    problems = check(scenario, seams, hooks=hooks)
    if problems:
        raise _error(text, name, problems)
    return scenario


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        at = _AT.search(said)
        line = int(at[1]) if at and at[1] else text.count("\n") + 1
        raise ScenarioError(name, line, "", f"is not TOML: {_AT.sub('', said)}") from error
    except RecursionError as error:
        raise ScenarioError(name, None, "", "is nested too deeply: no scenario is") from error


_AT: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def _error(text: str, name: str, problems: list[Problem]) -> ScenarioError:
    """All of them as one, in the order of the file."""
    lines = lines_of(text.replace("\r\n", "\n"))
    placed = sorted([(nearest_line(lines, parse_path(one.path)), i) for i, one in enumerate(problems)])
    (line, first), *others = placed
    more = [f"{name}:{line}: {problems[i].path}: {problems[i].text}" for line, i in others]
    return ScenarioError(name, line, problems[first].path, problems[first].text, more)
