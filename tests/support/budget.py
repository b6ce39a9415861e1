"""The size of what a reader has to hold, beside a budget for each figure. A change that needs more raises it, with its reason.

python -m tests.support.budget            print figures and budgets
python -m tests.support.budget --write    lower the budgets to the figures
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

import maru.cli
import maru.server_cli
import offload.cli
from tests.support.code_figures import PACKAGES, ROOT, Source
from tests.support.walks import walks

BUDGET = Path(__file__).with_suffix(".toml")


def commands(command: click.Command) -> Iterator[click.Command]:
    """Yield a command and all below it."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from commands(below)


def knobs_in(source: Source) -> int:
    """Count the fields of public classes whose names end in ``Config``."""
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    public = [node for node in classes if node.name.endswith("Config") and not node.name.startswith("_")]
    return sum(isinstance(one, ast.AnnAssign) for node in public for one in node.body)


def sizes() -> dict[str, int]:
    """Count code lines, public names, knobs, commands and their options."""
    found: dict[str, int] = {}
    public = knobs = 0
    for package in PACKAGES:
        sources = [Source(path) for path in sorted((ROOT / package).rglob("*.py"))]
        found[f"code lines of {package}"] = sum(len(source.code) for source in sources)
        knobs += sum(map(knobs_in, sources))
        for source in sources:
            source.path = source.path.relative_to(ROOT)
        public += sum(source.public_names() for source in sources)
    found["public names"] = public
    found["knobs"] = knobs
    every = [one for top in (offload.cli.main, maru.cli.main, maru.server_cli.main) for one in commands(top)]
    found["commands"] = len(every)
    found["options"] = sum(isinstance(one, click.Option) for command in every for one in command.params)
    return found


def lengths() -> dict[str, int]:
    """Count files and functions of each walk."""
    return {
        f"{name}: {what}": n
        for name, counts in walks().items()
        for what, n in zip(("files", "functions"), counts, strict=True)
    }


def budget() -> dict[str, int]:
    """Read the budget of each figure."""
    return tomllib.loads(BUDGET.read_text())


def beyond(found: dict[str, int], slack: float = 0.0) -> list[str]:
    """Return the figures that are over their budget by more than this share of it, or have none."""
    allowed = budget()
    return [
        f"{name}: {n}, of {allowed.get(name)}" for name, n in found.items() if n > (1 + slack) * allowed.get(name, -1)
    ]


def main() -> int:
    """Print the figures, or write them. Exit status 1: some are over their budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="lower the budgets to the figures")
    asked = parser.parse_args()
    found = sizes() | lengths()
    before = budget() if BUDGET.exists() else {}
    if asked.write:
        lowered = {name: min(n, before.get(name, n)) for name, n in found.items()}
        lines = ["# The most of each figure. A commit that needs more raises it here, and says why.", ""]
        BUDGET.write_text("\n".join([*lines, *[f'"{name}" = {n}' for name, n in lowered.items()]]) + "\n")
    print(f"{'':52}{'now':>8}{'budget':>8}")
    for name, n in found.items():
        print(f"{name:52}{n:>8}{budget().get(name, 0):>8}")
    return bool(beyond(found))


if __name__ == "__main__":
    sys.exit(main())
