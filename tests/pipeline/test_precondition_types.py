"""What a type checker says of ``precondition=``: yes to what can be waited for, no to what cannot, before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BEGIN = """
import threading
import trio
import offload
import offload.from_thread
from offload.abc import PreconditionLike

class Cuda:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

async def ready() -> None: ...
async def wants(one: int) -> None: ...
def plain() -> int:
    return 1

def take(precondition: PreconditionLike) -> None: ...

event = offload.from_thread.Event()
"""
TAKEN = ["offload.NO_WAIT", "trio.Event()", "event", "Cuda()", "ready", "offload.all_of(ready, trio.Event())"]
REFUSED = ["None", "threading.Event()", "plain", "wants", "ready()", "7", "offload.any_of(None)", "threading.Event"]


@pytest.mark.long
def test_none_and_threading_events_do_not_pass_the_type_checker(tmp_path: Path) -> None:
    """A program of a user's, checked from the outside, as strictly as we check ourselves."""
    lines = BEGIN.splitlines() + [f"take({value})" for value in TAKEN]
    first = len(lines) + 1
    lines += [f"take({value})" for value in REFUSED]
    program = tmp_path / "program.py"
    program.write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(program),
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    complaints = [line for line in said.stdout.splitlines() if ": error:" in line]
    assert [int(line.split(":")[1]) for line in complaints] == list(range(first, first + len(REFUSED))), said.stdout
