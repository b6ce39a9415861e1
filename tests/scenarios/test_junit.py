"""JUnit XML, as CI systems read it."""

from xml.etree import ElementTree as Xml

from offload.testing.scenarios import Violation
from offload.testing.scenarios._summary import Case, Suite, lost, played, to_junit
from tests.support.scenario_plays import report_of

GOOD = Case("seed 1", played(report_of(1), 0.25), "offload scenario run a --seed 1")
WRONG = Case(
    "seed 2",
    played(report_of(2, violations=[Violation("I4", "a & b <moved>\nsecond line"), Violation("expect", "no")]), 0.5),
    "offload scenario run a --seed 2",
)
STUCK = Case("seed 3", lost(3, Violation("livelock", "no end after 60 s"), 60.0), "offload scenario run a --seed 3")


def test_a_suite_for_each_file_and_a_case_for_each_seed() -> None:
    root = Xml.fromstring(to_junit([Suite("a.scenario.toml", [GOOD, WRONG, STUCK]), Suite("b.scenario.toml", [GOOD])]))
    assert root.tag == "testsuites"
    assert [suite.get("name") for suite in root] == ["a.scenario.toml", "b.scenario.toml"]
    assert [case.get("name") for case in root[0]] == ["seed 1", "seed 2", "seed 3"]
    assert {case.get("classname") for case in root[0]} == {"a.scenario.toml"}


def test_what_is_counted_agrees_with_what_is_there() -> None:
    root = Xml.fromstring(to_junit([Suite("a", [GOOD, WRONG, STUCK]), Suite("b", [GOOD])]))
    for element in (root, *root):
        cases = list(element.iter("testcase"))
        assert element.get("tests") == str(len(cases))
        assert element.get("failures") == str(len(list(element.iter("failure"))))
        assert element.get("errors") == str(len(list(element.iter("error"))))
        assert float(element.get("time", "")) == sum(float(case.get("time", "")) for case in cases)


def test_a_failure_says_the_rule_the_text_and_the_line_that_repeats_it() -> None:
    root = Xml.fromstring(to_junit([Suite("a", [WRONG])]))
    [failure] = root.iter("failure")
    assert failure.get("type") == "I4"
    assert failure.get("message") == "I4: a & b <moved>"
    assert failure.text is not None
    assert "expect: no" in failure.text
    assert failure.text.endswith("repeat it: offload scenario run a --seed 2")


def test_a_run_that_never_ended_is_an_error() -> None:
    root = Xml.fromstring(to_junit([Suite("a", [STUCK])]))
    assert [error.get("type") for error in root.iter("error")] == ["livelock"]
    assert not list(root.iter("failure"))


def test_characters_that_xml_cannot_have_are_replaced() -> None:
    strange = Case("seed 4", played(report_of(4, violations=[Violation("crash\x00", "\x1b[31mred \ud800 ok")])), "")
    root = Xml.fromstring(to_junit([Suite("a\x07", [strange])]).encode())
    [failure] = root.iter("failure")
    assert failure.text is not None and "red" in failure.text and "\x1b" not in failure.text


def test_no_runs_are_a_document_too() -> None:
    assert Xml.fromstring(to_junit([])).get("tests") == "0"
