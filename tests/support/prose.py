"""Count the phrases of our docstrings, pages and messages that a reader trips over. The counts may only fall.

    python -m tests.support.prose            print the counts by folder
    python -m tests.support.prose --write    record them in tests/support/prose.toml

A *first line* is that of a docstring, the line below an attribute included. A *message* is a string that is raised,
warned or logged. Counted are:

    opening     first lines that begin with a word that names nothing: What, Where, It
    long        first lines of more than 12 words
    mood        first lines of functions that do not begin with an imperative verb (rule D401 of ruff)
    what        the word "what" in docstrings, comments and pages: what is stored, of what it has
    tell        forms of "tell" and "say"
    message     both of these in messages, and phrases that no engineer would write: "is no table", "can be had", "anew"
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".toml")
PACKAGES = ("offload", "backends", "maru")
PAGES = ("README.md", "docs/start", "docs/how-to")
LONGEST = 12
OPENING = re.compile(r"(What|Who|Whose|Which|Where|Of|These|It|They|As|The same)\b")
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
TELL = re.compile(r"\b(tells?|told|telling|says?|said|saying)\b", re.IGNORECASE)
QUAINT = re.compile(
    r"(?<!\bthere )\b(is|are) no\b(?! (longer|more)\b)|\b(can|to) be had\b|\b(anew|whoever|somebody|nobody)\b"
    r"|\b(lets?|letting) go\b|\b(hung|hangs) up\b|\bgiven out\b|\bby now\b",
    re.IGNORECASE,
)
LOGS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}
CODE = re.compile(r"^(`{3,}|:{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
"""A block of code in a page, whose text is not ours alone."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield each docstring, those below attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def comments(text: str) -> Iterator[str]:
    """Yield each comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def is_log_call(node: ast.AST) -> bool:
    """Report whether a node logs or warns."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGS


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield each string that is raised, warned or logged; an f-string in its parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or is_log_call(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def count_module(text: str) -> Counter[str]:
    """Count the phrases of a module."""
    found: Counter[str] = Counter()
    tree = ast.parse(text)
    prose = list(docstrings(tree))
    for docstring in prose:
        first = docstring.strip().partition("\n")[0]
        found["opening"] += bool(OPENING.match(first))
        found["long"] += len(first.split()) > LONGEST
    for part in [*prose, *comments(text)]:
        found["what"] += len(WHAT.findall(part))
        found["tell"] += len(TELL.findall(part))
    for message in messages(tree):
        found["message"] += sum(len(phrase.findall(message)) for phrase in (WHAT, TELL, QUAINT))
    return found


def count_page(text: str) -> Counter[str]:
    """Count the phrases of a page, without its blocks of code."""
    prose = CODE.sub("", text)
    return Counter(what=len(WHAT.findall(prose)), tell=len(TELL.findall(prose)))


def moods() -> Counter[str]:
    """Count the first lines that are no imperative, by folder."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "D401",
        "--output-format",
        "json",
        *PACKAGES,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Counter(folder_of(Path(one["filename"]).relative_to(ROOT)) for one in json.loads(done.stdout))


def folder_of(path: Path) -> str:
    """Return the folder that a file counts for: the first two names of its path."""
    return "/".join(path.parts[: min(2, len(path.parts) - 1)]) or path.name


def counts() -> dict[str, dict[str, int]]:
    """Count all phrases, by folder; what is 0 is left out."""
    found: dict[str, Counter[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found.setdefault(folder_of(path.relative_to(ROOT)), Counter()).update(count_module(path.read_text()))
    for place in PAGES:
        for path in [ROOT / place] if place.endswith(".md") else sorted((ROOT / place).rglob("*.md")):
            found.setdefault(folder_of(path.relative_to(ROOT)), Counter()).update(count_page(path.read_text()))
    for folder, number in moods().items():
        found[folder]["mood"] = number
    return {folder: {name: n for name, n in sorted(its.items()) if n} for folder, its in sorted(found.items())}


def recorded() -> dict[str, dict[str, int]]:
    """Read the counts of the record."""
    return tomllib.loads(RECORD.read_text())


def compare(found: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> tuple[list[str], list[str]]:
    """Compare the counts with the record. Returns those that have grown, and those that have fallen."""
    grown, fallen = [], []
    for folder in sorted(found.keys() | allowed.keys()):
        now, then = found.get(folder, {}), allowed.get(folder, {})
        for name in sorted(now.keys() | then.keys()):
            n, most = now.get(name, 0), then.get(name, 0)
            if n != most:
                (grown if n > most else fallen).append(f"{folder}: {name} {most} -> {n}")
    return grown, fallen


def totals(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """Add up the counts of all folders."""
    return dict(sum(map(Counter, found.values()), Counter[str]()))


def write(found: dict[str, dict[str, int]]) -> None:
    """Write the record."""
    lines = ["# The most of each phrase by folder; `python -m tests.support.prose --write` lowers it.", ""]
    for folder, its in found.items():
        lines += [f'["{folder}"]', *[f"{name} = {n}" for name, n in its.items()], ""]
    RECORD.write_text("\n".join(lines[:-1]) + "\n")


def main() -> int:
    """Print the counts, or record them. Exit status 1: some have grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="record the counts, if no total has grown")
    found = counts()
    if parser.parse_args().write:
        # Together: modules may move from one folder to another.
        grown, _ = compare({"all": totals(found)}, {"all": totals(recorded())}) if RECORD.exists() else ([], [])
        if grown:
            print("not recorded, since these have grown:", *grown, sep="\n")
            return 1
        write(found)
    names = ["opening", "long", "mood", "what", "tell", "message"]
    total: Counter[str] = sum(map(Counter, found.values()), Counter())
    print(f"{'':28}" + "".join(f"{name:>9}" for name in names))
    for folder, its in [*found.items(), ("together", total)]:
        print(f"{folder:28}" + "".join(f"{its.get(name, 0):>9}" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
