"""A page that tells a story is lived through, from its first block to its last, in one directory.

- ``file=NAME`` in a block's info string: the block is that file; ``continued``: it stands behind what the file has;
  ``replaces``: of two parts with ``---`` between them, the second replaces the first in the file (comments at the ends of its
  lines do not count).
- A ``console story`` block: its commands run, and end with ``exits=N`` (0, where it is not said). Its other lines are what they
  print, in this order; ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_documentation import PAGES, ROOT, Block, blocks, told_in_a_story

STORIES = [page for page in PAGES if any(told_in_a_story(block) for block in blocks(page))]
PROGRAMS = {
    "offload": [sys.executable, "-m", "offload"],
    "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in STORIES])
def test_the_story_goes_as_it_is_told(page: Path, tmp_path: Path) -> None:
    told = [block for block in blocks(page) if told_in_a_story(block)]
    assert any(block.info[:1] == ["console"] for block in told), f"{page}: files that nobody looks at"
    for block in told:
        if name := said(block, "file"):
            write(tmp_path / name, block)
        else:
            live(block, tmp_path)


def said(block: Block, word: str) -> str:
    return next((info.removeprefix(f"{word}=") for info in block.info if info.startswith(f"{word}=")), "")


def write(path: Path, block: Block) -> None:
    if "continued" in block.info:
        path.write_text(path.read_text() + "\n" * path.name.endswith(".py") + block.text)
    elif "replaces" in block.info:
        old, new = block.text.split("---\n")
        pattern = "".join([rf"{re.escape(line)}( *#.*)?\n" for line in old.splitlines()])
        text, count = re.subn(pattern, lambda _: new, path.read_text())
        assert count == 1, f"{block.name}: {path.name} has this {count} times"
        path.write_text(text)
    else:
        path.write_text(block.text)


def live(block: Block, directory: Path) -> None:
    environ = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    environ.pop("PYTEST_ADDOPTS", None)
    shown: list[str] = []
    output = ""
    for line in [*block.text.splitlines(), "$"]:
        if not line.startswith("$"):
            shown.append(line)
            continue
        assert matches(shown, output), f"{block.name}: it printed\n{output}"
        if line == "$":
            return
        shown = []
        program, *arguments = shlex.split(line[1:])
        done = subprocess.run(
            [*PROGRAMS[program], *arguments],
            cwd=directory,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        output = done.stdout
        assert done.returncode == int(said(block, "exits") or 0), f"{block.name} {line}\n{output}"


def matches(shown: list[str], output: str) -> bool:
    pattern = r"\n".join(
        r"(.*\n)*.*" if line.strip() == "..." else ".*".join(map(re.escape, line.split("..."))) + " *" for line in shown
    )
    return not shown or re.fullmatch(pattern.replace(r"\ ", " "), output.rstrip("\n")) is not None


def test_what_a_story_shows_must_be_printed() -> None:
    assert matches(["a", "..."], "a\nb\nc") and matches(["...", "b", "..."], "a\nb\nc")
    assert (
        not matches(["b", "..."], "a\nb\nc")
        and not matches(["a"], "a\nb")
        and not matches(["...", "d", "..."], "a\nb\nc")
    )
    assert matches(["is ... ok"], "is it ok") and not matches(["is ... ok"], "is it\nok")
