"""Mutation check: faults made on purpose in the code that keeps the promises, one at a time, and whether a test finds each.

    python tests/support/mutants.py                       all mutants, on the working tree
    python tests/support/mutants.py --at REVISION         on a commit
    python tests/support/mutants.py --only gate pages     of these areas, or of these names

The mutants are in tests/support/mutants.toml. Each is made in a copy of the tree, in a temporary directory; the tests of its
area run there until the first fails. Killed: a test failed, or none could be collected. Survived: all passed, so that either a
test is missing or the edit changes nothing that was promised. The exit code is 1 if one survived, or could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
HANG = 90
"""Seconds that one test may take: a fault may well be that a wait has no end."""
LIMIT = 1200
"""Seconds for all tests of one mutant."""
PYTEST = [
    *("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not long", "--hypothesis-seed=0"),
    *("-o", f"faulthandler_timeout={HANG}", "-o", "faulthandler_exit_on_timeout=true"),
]


@attrs.frozen
class Mutant:
    """One fault, and where it is looked for."""

    name: str
    area: str
    breaks: str
    """The promise that it breaks."""
    edits: Sequence[tuple[str, str]]
    """Old and new text: one for each form that the code has had."""


@attrs.frozen
class Verdict:
    """What became of a mutant."""

    mutant: str
    area: str
    breaks: str
    outcome: str
    """``killed``, ``survived`` or ``not made``."""
    by: str
    """The first test that failed, or why the mutant could not be made."""
    seconds: float


def read_table() -> tuple[dict[str, Any], list[Mutant]]:
    """The areas and the mutants."""
    table = tomllib.loads(TABLE.read_text())
    mutants = [
        Mutant(row["name"], row["area"], row["breaks"], [(edit["old"], edit["new"]) for edit in row["edit"]])
        for row in table["mutant"]
    ]
    return table["area"], mutants


def files_of(tree: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a tree that match, in the order of the patterns; each once."""
    return list(dict.fromkeys(path for pattern in patterns for path in sorted(tree.glob(pattern))))


def tests_of(tree: Path, areas: dict[str, Any], area: str) -> list[Path]:
    """The tests that are asked, as far as the tree has them."""
    rows = areas[area]
    return files_of(tree, areas[rows["same_tests_as"]]["tests"] if "same_tests_as" in rows else rows["tests"])


def place_of(tree: Path, code: Sequence[str], mutant: Mutant) -> tuple[Path, str] | None:
    """The file that is changed, and its text afterwards; ``None`` if no edit's old text stands exactly once in the code."""
    sources = {path: path.read_text() for path in files_of(tree, code)}
    for old, new in mutant.edits:
        found = [path for path, text in sources.items() if old in text]
        if len(found) == 1 and sources[found[0]].count(old) == 1:
            return found[0], sources[found[0]].replace(old, new)
    return None


def copy_tree(revision: str | None, to: Path) -> None:
    """A commit, or the working tree as git sees it."""
    if revision is None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        names = b"\0".join(name for name in listed.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists())
        packed = subprocess.run(
            ["tar", "-c", "--null", "--files-from=-"], cwd=ROOT, check=True, capture_output=True, input=names
        ).stdout
    else:
        packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=to, check=True, input=packed)


def first_failure(tree: Path, tests: Sequence[Path]) -> str | None:
    """Run these tests until one fails: what failed; ``None`` if all passed."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # forty runs over one tree: compiled once
    command = [sys.executable, *PYTEST, *(str(path.relative_to(tree)) for path in tests)]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not over within {LIMIT} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed:
        return failed[1].removeprefix("tests/")
    if "Timeout (" in done.stderr:
        return f"a test hangs: not over within {HANG} s"
    return f"exit {done.returncode}: " + " / ".join((done.stdout + done.stderr).splitlines()[-3:])


def check(tree: Path, areas: dict[str, Any], mutant: Mutant) -> Verdict:
    """Make this mutant, ask the tests, and put the tree back as it was."""
    began = time.monotonic()

    def verdict(outcome: str, by: str) -> Verdict:
        return Verdict(mutant.name, mutant.area, mutant.breaks, outcome, by, round(time.monotonic() - began, 1))

    place = place_of(tree, areas[mutant.area]["code"], mutant)
    if place is None:
        return verdict("not made", "no edit's old text stands exactly once in the code of its area")
    path, text = place
    original = path.read_text()
    try:
        rewrite(path, text)
        failure = first_failure(tree, tests_of(tree, areas, mutant.area))
    finally:
        rewrite(path, original)
    return verdict("survived" if failure is None else "killed", failure or "")


def rewrite(path: Path, text: str) -> None:
    """Write a module, and drop its bytecode, which is told by second and size only."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def run(revision: str | None, only: Sequence[str]) -> Iterator[Verdict]:
    """The verdicts, one by one."""
    areas, mutants = read_table()
    chosen = [mutant for mutant in mutants if not only or mutant.name in only or mutant.area in only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory)
        copy_tree(revision, tree)
        for mutant in chosen:
            yield check(tree, areas, mutant)


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--at", metavar="REVISION", help="a commit in place of the working tree")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="areas, or names of mutants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there, too, as they come")
    asked = parser.parse_args()
    verdicts: list[Verdict] = []
    for verdict in run(asked.at, asked.only):
        verdicts.append(verdict)
        print(f"{verdict.outcome:<9} {verdict.area:<11} {verdict.mutant:<58} {verdict.by}", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps([attrs.asdict(one) for one in verdicts], indent=1) + "\n")
    killed = sum(verdict.outcome == "killed" for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} killed")
    sys.exit(killed < len(verdicts))


if __name__ == "__main__":
    main()
