"""No page names a file, a test or a command that is not there."""

import re
from pathlib import Path

import click
import pytest

from maru.cli import main as maru
from offload.cli import main as offload
from tests.support.code_figures import is_public

ROOT = Path(__file__).parents[2]
PACKAGES = ("offload", "backends", "maru")
NAMED = re.compile(rf"\b(?:{'|'.join([*PACKAGES, 'tests'])})/[\w/]*\w\.py\b")
MODULES = sorted(
    str(file.relative_to(ROOT))
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
    if file.stat().st_size
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def named(page: Path) -> list[str]:
    return NAMED.findall(page.read_text())


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [name for name in named(page) if not (ROOT / name).exists()]
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(missing)}"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", page.read_text())
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(missing)}"


def commands(text: str) -> set[tuple[str, ...]]:
    """The commands that a text names between backticks, with the words behind them."""
    return {tuple(found.split()) for found in re.findall(r"`((?:offload|maru)(?: [a-z][a-z-]*)+)", text)}


def is_there(words: tuple[str, ...]) -> bool:
    command: click.Command | None = {"offload": offload, "maru": maru}[words[0]]
    for word in words[1:]:
        if not isinstance(command, click.Group):  # what stands behind a command is its own
            return True
        command = command.get_command(click.Context(command), word)
    return command is not None


def test_a_command_that_is_not_there_is_seen() -> None:
    assert commands("`maru top`, `maru stats --json` and `maru.cli`") == {("maru", "top"), ("maru", "stats")}
    assert [is_there(("maru", word)) for word in ("top", "stats")] == [True, False]
    assert [is_there(("offload", "bench", word)) for word in ("daemon", "deamon")] == [True, False]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_commands_that_a_page_names_exist(page: Path) -> None:
    missing = [" ".join(words) for words in sorted(commands(page.read_text())) if not is_there(words)]
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(missing)}"


def test_the_reference_has_every_public_module() -> None:
    """And nothing but public modules."""
    page = (ROOT / "docs" / "reference.md").read_text()
    documented = set(re.findall(r"^\.\. public:: ([\w.]+)$", page, re.M))
    public = {
        module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for module in MODULES
        if is_public(module.split("/"))
    }
    assert documented == public - COMMANDS


COMMANDS = {
    "maru.bench",
    "maru.cli",
    "maru.server_cli",
    "offload.cli",
    "offload.replay",
    "offload.scenario",
    "offload.bench",
    "offload.testing",
}
"""Used from the command line, or only a name: what they can do is said elsewhere."""
