"""How much there is to read: figures of the code, for a comparison before and after a change of its structure.

    python tests/support/code_figures.py                  this checkout
    python tests/support/code_figures.py --at REVISION    the same of a commit, beside this checkout
    python tests/support/code_figures.py --json

Counted, never aimed at. A line of code is one with a token that is neither comment nor docstring. A function's size is that of
its body, in such lines. A duplicate is a pair of places in two files, or in one, that share six neighbouring lines of code or
more.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("offload", "backends", "maru")
SHARED_LINES = 6
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


_SHARED = {("maru", "base"), ("maru", "bench")}
"""Packages that the three packages share, and that no user is promised."""


def is_public(parts: Sequence[str]) -> bool:
    """Return whether users may import a module, by the parts of its path or of its dotted name."""
    private = any(
        part.startswith("_") and part.removesuffix(".py") not in ("__init__", "__version__") for part in parts
    )
    return not private and tuple(parts[:2]) not in _SHARED


class Source:
    """One file, read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text()
        self.tree = ast.parse(text)
        docstrings = set(_docstring_lines(self.tree))
        self.code: set[int] = set()
        self.comments: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self.comments.add(token.start[0])
            elif token.type not in _LAYOUT:
                self.code.update(range(token.start[0], token.end[0] + 1))
        self.code -= docstrings
        lines = text.splitlines()
        self.written = [(number, " ".join(lines[number - 1].split())) for number in sorted(self.code)]

    def bodies(self) -> Iterator[int]:
        """The size of each function's body."""
        for node in ast.walk(self.tree):
            if isinstance(node, _Function):
                first, last = node.body[0].lineno, node.end_lineno or node.lineno
                yield len(self.code.intersection(range(first, last + 1)))

    def tests(self) -> int:
        """How many functions of it are tests, whatever they are parametrized with."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, _Function))
        return sum(node.name.startswith("test_") for node in functions)

    def public_names(self) -> int:
        """Names that a user may import from it: definitions, and re-exports spelled ``X as X``."""
        if not is_public(self.path.parts):
            return 0
        names: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, _Function | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        for inner in ast.walk(self.tree):
            if isinstance(inner, ast.ImportFrom):
                names.update(alias.name for alias in inner.names if alias.asname == alias.name)
        return sum(not name.startswith("_") for name in names)


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """The lines of docstrings, those below attributes included: every expression that is nothing but a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def duplicates(sources: list[Source]) -> int:
    """How many pairs of places share a run of lines; a longer run is one pair. Imports and lone brackets do not count."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for at, source in enumerate(sources):
        lines = [line for _, line in source.written if len(line) > 3 and not line.startswith(("import ", "from "))]
        for start in range(len(lines) - SHARED_LINES + 1):
            places[tuple(lines[start : start + SHARED_LINES])].append((at, start))
    pairs = {
        (one, other)
        for found in places.values()
        if 1 < len(found) <= 8
        for index, one in enumerate(found)
        for other in found[index + 1 :]
    }
    # A run of more than six lines is found once for each of its windows; what has one right before it is the same run.
    return sum(((one[0], one[1] - 1), (other[0], other[1] - 1)) not in pairs for one, other in pairs)


def figures(root: Path) -> dict[str, float]:
    """The figures of a checkout."""
    packages = [Source(path) for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    tests = [Source(path) for path in sorted((root / "tests").rglob("*.py"))]
    bodies = sorted(size for source in packages for size in source.bodies())
    code = sum(len(source.code) for source in packages)
    for source in packages:
        source.path = source.path.relative_to(root)
    return {
        "files": len(packages),
        "code lines": code,
        "functions": len(bodies),
        "median function": statistics.median(bodies),
        "p99 function": bodies[int(len(bodies) * 0.99)],
        "functions over 40 lines": sum(size > 40 for size in bodies),
        "comment lines per 100 of code": round(100 * sum(len(source.comments) for source in packages) / code, 1),
        "duplicate pairs": duplicates(packages),
        "public names": sum(source.public_names() for source in packages),
        "test files": len(tests),
        "test code lines": sum(len(source.code) for source in tests),
        "test functions": sum(source.tests() for source in tests),
        "duplicate pairs in tests": duplicates(tests),
    }


def figures_at(revision: str) -> dict[str, float]:
    """The same of a commit."""
    packed = subprocess.run(
        ["git", "archive", revision, *PACKAGES, "tests"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as directory, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
        return figures(Path(directory))


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--at", metavar="REVISION", help="a commit to compare with")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    columns = {asked.at: figures_at(asked.at)} if asked.at else {}
    columns["now"] = figures(ROOT)
    if asked.json:
        json.dump(columns, sys.stdout, indent=2)
        print()
        return
    print(" " * 32 + "".join(f"{name[:12]:>14}" for name in columns))
    for name in columns["now"]:
        print(f"{name:<32}" + "".join(f"{values[name]:>14,}" for values in columns.values()))


if __name__ == "__main__":
    main()
