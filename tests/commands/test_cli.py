"""The command line: quick to start, and clear where something is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from offload.cli import Commands, main


def test_help_lists_the_commands_without_importing_them() -> None:
    program = """
import sys
from click.testing import CliRunner
from offload.cli import main
done = CliRunner().invoke(main, ["--help"])
assert done.exit_code == 0
assert all(name in done.output for name in ("demo", "replay", "bench"))
loaded = {"torch", "numpy", "rich", "offload.replay", "offload.bench", "offload._demo", "backends.memory"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_distribution() -> None:
    done = subprocess.run([sys.executable, "-m", "offload", "--version"], capture_output=True, text=True)
    assert done.stdout.split()[0] == "trio-offload"
    assert done.returncode == 0


def test_unknown_command_is_an_error() -> None:
    done = CliRunner().invoke(main, ["nonsense"])
    assert done.exit_code == 2
    assert "nonsense" in done.output


@pytest.mark.parametrize("name", ["replay", "bench", "demo"])
def test_every_command_has_help(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Usage:")


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("offload.nothing_like_it:command", "not part of this installation"),
        ("nothing_like_it:command", "not part of this installation"),
    ],
)
def test_a_command_whose_module_is_missing_says_so(place: str, complaint: str) -> None:
    group = Commands("offload", places={"lost": (place, "Lost.")})
    done = CliRunner().invoke(group, ["lost"])
    assert done.exit_code == 3
    assert complaint in done.output
    assert "Traceback" not in done.output


def test_a_command_that_lacks_a_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, complaint in (("torch", "trio-offload[torch]"), ("left_pad", "the package left_pad is not installed")):
        error = ModuleNotFoundError(f"No module named {missing!r}", name=missing)

        def broken(name: str, error: ModuleNotFoundError = error) -> object:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(importlib, "import_module", broken)
            done = CliRunner().invoke(main, ["replay"])
        assert done.exit_code == 3
        assert complaint in done.output
