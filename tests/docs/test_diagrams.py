"""The documentation's pictures show the tables of the code, arrow for arrow, and the path with every hook of it."""

import enum
import html
import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from maru import _config as maru_config
from maru._client.page_states import MOVES as PAGE_MOVES
from maru._client.page_states import PageEvent, PageState
from maru.configuration import as_size
from offload import PipelineConfig, knobs
from offload._pipeline.lifecycle import GATE, MOVES, Phase, Status
from offload.instruments import HOOKS

ROOT = Path(__file__).parents[2]
EXT = ROOT / "docs" / "_ext"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drawing = _load("drawing")
sys.modules.setdefault("drawing", drawing)
chart = _load("chart")
architecture = _load("architecture")


class Drawn:
    """A picture of a table, read back."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg.replace('xmlns="http://www.w3.org/2000/svg"', ""))
        self.boxes: dict[str, tuple[float, float, float, float]] = {}
        for group in self.root.iter("g"):
            if name := group.get("data-state"):
                x, y, width, height = (float(group.find("rect").get(side)) for side in ("x", "y", "width", "height"))
                self.boxes[name] = (x, y, x + width, y + height)
                assert group.find("text").text == name
        self.arrows = [group for group in self.root.iter("g") if group.get("data-from")]

    def side(self, x: float, y: float) -> str:
        """Whose edge this point lies on."""
        for name, (left, top, right, bottom) in self.boxes.items():
            if left <= x <= right and top <= y <= bottom and (x in (left, right) or y in (top, bottom)):
                return name
        raise AssertionError(f"nothing is drawn at {x}, {y}")


def ends(arrow: ElementTree.Element) -> tuple[tuple[float, float], tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", arrow.find("path").get("d"))]
    tip = arrow.find("polygon").get("points").split()[-1]
    assert [float(number) for number in tip.split(",")] == numbers[-2:], "the head is not at the end of its arrow"
    return (numbers[0], numbers[1]), (numbers[-2], numbers[-1])


def drawn(states: list[str], arrows: object) -> Drawn:
    return Drawn(drawing.draw_table("a table", states, arrows))


def test_status_diagram_has_exactly_the_arrows_of_the_table() -> None:
    picture = drawn([status.name for status in Status], drawing.arrows_of_moves())
    assert set(picture.boxes) == {status.name for status in MOVES}
    expected = sorted((old.name, new.name) for old, row in MOVES.items() for new in row)
    assert sorted((a.get("data-from"), a.get("data-to")) for a in picture.arrows) == expected
    for arrow in picture.arrows:  # and they are drawn where they say
        start, end = ends(arrow)
        assert (picture.side(*start), picture.side(*end)) == (arrow.get("data-from"), arrow.get("data-to"))


def test_gate_diagram_has_exactly_the_answers_of_the_table() -> None:
    picture = drawn([phase.name for phase in Phase], drawing.arrows_of_gate())
    answers = {
        (arrow.get("data-from"), what, arrow.get("data-to"))
        for arrow in picture.arrows
        for what in arrow.get("data-label").split(", ")
    }
    assert answers == {(p.name, k.value, after.name) for p, row in GATE.items() for k, after in row.items()}
    assert len(picture.arrows) == len({(arrow.get("data-from"), arrow.get("data-to")) for arrow in picture.arrows})
    for arrow in picture.arrows:
        start, end = ends(arrow)
        assert (picture.side(*start), picture.side(*end)) == (arrow.get("data-from"), arrow.get("data-to"))
        assert arrow.find("text").text == arrow.get("data-label")


def test_page_diagram_has_exactly_the_moves_of_the_table() -> None:
    picture = Drawn(chart.draw_pages())
    assert set(picture.boxes) == {state.name for state in PageState}
    moves = {
        (source, what, arrow.get("data-to"))
        for arrow in picture.arrows
        for source in arrow.get("data-from").split()
        for what in arrow.get("data-label").split(" | ")
    }
    assert moves == {(s.name, event.value, after.name) for s, row in PAGE_MOVES.items() for event, after in row.items()}
    words = " ".join(text.text for text in picture.root.iter("text"))
    for event in PageEvent:
        assert event.value in words, f"nobody reads {event.value!r}"
    for arrow in picture.arrows:
        start, end = ends(arrow)
        assert picture.side(*end) == arrow.get("data-to")
        if " " not in arrow.get("data-from"):
            assert picture.side(*start) == arrow.get("data-from")


def test_a_page_state_that_does_not_end_like_the_others_gets_an_arrow_of_its_own() -> None:
    moves = {state: dict(row) for state, row in PAGE_MOVES.items()}
    del moves[PageState.QUARANTINED][PageEvent.END]
    moves[PageState.FREE][PageEvent.DROP] = PageState.PINNED  # a move for which nobody chose a way
    picture = Drawn(chart.draw_pages(moves))
    drawn_moves = {(arrow.get("data-from"), arrow.get("data-to")) for arrow in picture.arrows}
    assert {("FREE", "ORPHAN"), ("IN_DOUBT", "ORPHAN"), ("FREE", "PINNED")} <= drawn_moves
    assert not any(source == "QUARANTINED" or " " in source for source, _ in drawn_moves)


def test_another_table_gives_another_diagram() -> None:
    class Step(enum.Enum):
        A = "a"
        B = "b"
        C = "c"
        D = "d"

    moves = {Step.A: {Step.B, Step.C}, Step.B: {Step.C, Step.A}, Step.C: {Step.A, Step.D, Step.C}, Step.D: set()}
    picture = drawn([step.name for step in Step], drawing.arrows_of_moves(moves))
    expected = {("A", "B"), ("A", "C"), ("B", "C"), ("B", "A"), ("C", "A"), ("C", "D"), ("C", "C")}
    assert {(arrow.get("data-from"), arrow.get("data-to")) for arrow in picture.arrows} == expected
    for arrow in picture.arrows:
        start, end = ends(arrow)
        assert (picture.side(*start), picture.side(*end)) == (arrow.get("data-from"), arrow.get("data-to"))


def test_nothing_is_drawn_outside_the_picture() -> None:
    for svg in (
        drawing.draw_table("moves", [status.name for status in Status], drawing.arrows_of_moves()),
        drawing.draw_table("gate", [phase.name for phase in Phase], drawing.arrows_of_gate()),
        drawing.draw_container_path(),
        chart.draw_pages(),
        architecture.draw_architecture(),
    ):
        root = Drawn(svg).root
        _, _, width, height = map(float, root.get("viewBox").split())
        for element in root.iter():
            if element.get("x"):
                assert 0 <= float(element.get("x")) <= width and 0 <= float(element.get("y")) <= height


def test_the_packages_are_drawn_with_what_is_in_them_and_no_arrow_leads_back() -> None:
    root = ElementTree.fromstring(architecture.draw_architecture().replace('xmlns="http://www.w3.org/2000/svg"', ""))
    boxes = {group.get("data-package") for group in root.iter("g")} - {None, *architecture.PACKAGES}
    there = {f"{init.parent.parent.name}.{init.parent.name}" for init in ROOT.glob("*/*/__init__.py")}
    assert boxes == {name for name in there if name.partition(".")[0] in architecture.PACKAGES}
    arrows = {(arrow.get("data-from"), arrow.get("data-to")) for arrow in root.iter("g") if arrow.get("data-from")}
    assert arrows == {("offload", "backends"), ("offload", "maru"), ("backends", "maru")}


def test_the_path_names_every_hook_in_its_order_and_knobs_that_exist() -> None:
    assert tuple(step.hook for step in drawing.PATH if step.hook) == HOOKS
    names = {knob.name.rpartition(".")[2] for knob in knobs(PipelineConfig)}
    bounds = {word for step in drawing.PATH for word in re.findall(r"\w+_(?:timeout|interval)", step.waits)}
    assert bounds == {name for name in names if name.endswith(("_timeout", "_interval"))} - {
        "drain_timeout",
        "sweep_interval",
    }
    statuses = [step.status for step in drawing.PATH if step.status]
    assert statuses == [status.name for status in Status if not status.terminal] + ["terminal"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What Sphinx makes of the directives."""
    pytest.importorskip("sphinx")
    source = tmp_path_factory.mktemp("docs")
    (source / "conf.py").write_text(f"import sys\nsys.path.insert(0, {str(EXT)!r})\nextensions = ['directives']\n")
    (source / "index.rst").write_text(
        "Page\n====\n\n.. status-moves::\n\n.. commit-gate::\n\n.. page-moves::\n\n.. container-path::\n\n.. packages::\n\n"
        ".. knobs::\n"
        "\n.. knobs:: server\n\n.. knobs:: client\n"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(source), str(source / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return (source / "out" / "index.html").read_text()


def test_the_page_has_the_pictures(page: str) -> None:
    assert [page.count(f"<title>{title}</title>") for title in ("The status of a handle", "The commit gate")] == [1, 1]
    moves = sum(len(row) for row in MOVES.values())
    gate = len({(phase, after) for phase, answers in GATE.items() for after in answers.values()})
    ends_alike = sum(PageState.ORPHAN in row.values() for row in PAGE_MOVES.values())
    pages = len({(state, after) for state, row in PAGE_MOVES.items() for after in row.values()}) - ends_alike + 1
    assert page.count("<title>The states of a page</title>") == page.count("<title>The packages</title>") == 1
    assert page.count('class="arrow ') == moves + gate + pages + 3


def test_the_page_has_every_knob_with_its_default_bound_and_reason(page: str) -> None:
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("’", "'"))
    server = maru_config.knobs(maru_config.ServerConfig, section="server")
    client = maru_config.knobs(maru_config.MaruConfig, section="client")
    for knob in (*knobs(), *server, *client):
        default = directives_default(knob)
        name = re.sub(r"^(pipeline|server|client)\.", "", knob.name)
        assert re.sub(r"\s+", " ", f"{name} {default} {knob.bound} {knob.reason}") in text, knob.name
        assert knob.variable in text
    assert "pool_size 100 MiB bytes from" in text  # with its unit


def directives_default(knob: maru_config.Knob) -> str:
    """As it stands in a file: a size with its unit, a flag as TOML has it."""
    if isinstance(knob.default, bool):
        return "true" if knob.default else "false"
    if isinstance(knob.default, int) and knob.bound.startswith("bytes"):
        return as_size(knob.default)
    return "" if knob.default == () else str(knob.default)
