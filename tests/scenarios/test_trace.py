"""Where two runs part."""

import attrs
import msgspec
import pytest

from offload.testing.scenarios import Moment
from offload.testing.scenarios._trace import NamedTrace, NotATrace, first_difference, load_trace, save_trace, trace_of
from tests.support.scenario_plays import report_of


def moments(*names: str) -> list[Moment]:
    return [Moment(float(i), "hook", name, ("a0",), "main") for i, name in enumerate(names)]


def trace(*names: str) -> NamedTrace:
    return trace_of(report_of(moments=moments(*names)))


def test_the_same_do_not_part() -> None:
    assert first_difference(trace("x", "y"), trace("x", "y")) is None


def test_the_first_difference_is_found_with_what_is_around_it() -> None:
    parting = first_difference(trace(*"abcdefgh"), trace(*"abcdefXh"), before=2, after=5)
    assert parting is not None
    assert parting.at == 6
    assert [line.split("\t")[2] for line in parting.before] == ["e", "f"]
    assert [tuple(line and line.split("\t")[2] for line in pair) for pair in parting.after] == [("g", "X"), ("h", "h")]
    assert parting.fields == ("name",)


@pytest.mark.parametrize("shorter", [0, 1])
def test_one_that_ends_sooner_parts_where_it_ends(shorter: int) -> None:
    pair = [trace(*"abc"), trace(*"abc")]
    pair[shorter] = trace(*"ab")
    parting = first_difference(*pair)
    assert parting is not None and parting.at == 2
    assert parting.after[0][shorter] is None and parting.after[0][1 - shorter] is not None
    assert parting.fields == ()


def test_every_field_that_differs_is_named() -> None:
    one = report_of(moments=[Moment(1.0, "fault", "cancel", ("a0",), "", "", True)])
    other = report_of(moments=[Moment(2.0, "fault", "cancel", ("a1",), "", "", False)])
    parting = first_difference(trace_of(one), trace_of(other))
    assert parting is not None
    assert parting.fields == ("at_ms", "who", "fired")


def test_a_saved_trace_is_the_trace() -> None:
    report = report_of(moments=[*moments("x"), Moment(3.0, "end", "ended", ("a0",), "", "odd\x1cnote\nof two lines")])
    loaded = load_trace(save_trace(report), "run.trace")
    assert loaded.lines == trace_of(report).lines
    assert first_difference(loaded, trace_of(report)) is None
    assert loaded.name == "run.trace"


def test_something_else_is_no_saved_trace() -> None:
    with pytest.raises(NotATrace, match=r"x\.trace is not a saved trace.*--save-trace x\.trace"):
        load_trace("format = 1\n", "x.trace")


def test_a_name_with_a_line_break_spoils_no_saved_trace() -> None:
    report = report_of(moments=moments("x"))
    report = attrs.evolve(report, scenario=msgspec.structs.replace(report.scenario, name="a\nb"))
    assert load_trace(save_trace(report), "run.trace").lines == trace_of(report).lines
