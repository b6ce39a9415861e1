"""Runs as JUnit XML, as CI systems read it: a suite for each file, a case for each seed. Pure.

What the format says of a failure is one message and a text; the message is the first violation, the text all of them and the
line that repeats the run. A run that never ended, or whose process died, is an error rather than a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final
from xml.etree import ElementTree as Xml

import attrs

from .summing import Played

_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write."""
_ERRORS: Final = frozenset({"crash", "livelock"})


@attrs.frozen
class Case:
    """One run, and its name."""

    name: str
    played: Played
    repeat: str
    """The line that repeats it."""


@attrs.frozen
class Suite:
    """The runs of one file."""

    name: str
    """The file."""
    cases: Sequence[Case]


def to_junit(suites: Iterable[Suite], name: str = "offload scenario") -> str:
    """The document, with its XML declaration."""
    root = Xml.Element("testsuites", name=name)
    every: list[Case] = []
    for suite in suites:
        _count(Xml.SubElement(root, "testsuite", name=_clean(suite.name)), suite.cases)
        every.extend(suite.cases)
        for case in suite.cases:
            _add_case(root[-1], suite.name, case)
    _count(root, every)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _count(element: Xml.Element, cases: Sequence[Case]) -> None:
    errors = sum(_is_error(case.played) for case in cases)
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(bool(case.played.violations) for case in cases) - errors))
    element.set("errors", str(errors))
    element.set("skipped", "0")
    element.set("time", f"{sum(case.played.seconds for case in cases):.3f}")


def _is_error(one: Played) -> bool:
    return bool(one.violations) and one.violations[0].rule in _ERRORS


def _add_case(suite: Xml.Element, classname: str, case: Case) -> None:
    one = case.played
    element = Xml.SubElement(
        suite, "testcase", classname=_clean(classname), name=_clean(case.name), time=f"{one.seconds:.3f}"
    )
    if not one.violations:
        return
    first = one.violations[0]
    failure = Xml.SubElement(
        element,
        "error" if _is_error(one) else "failure",
        message=_clean(f"{first.rule}: {first.text}".splitlines()[0]),
        type=_clean(first.rule),
    )
    lines = [f"{violation.rule}: {violation.text}" for violation in one.violations]
    failure.text = _clean("\n".join([*lines, f"repeat it: {case.repeat}"]))


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
