"""Time and memory of importing the package in a new interpreter, beside those of its dependencies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from maru.bench.measure import Effort, Figures, Row, measure

_PROGRAM: Final = """
import time
start = time.perf_counter()
import {modules}
seconds = time.perf_counter() - start
pages = int(open("/proc/self/statm").read().split()[1])
import resource
print(seconds, pages * resource.getpagesize())
"""


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of seconds and resident bytes."""
    subjects = {
        "ours": lambda: _figures("ours", "offload"),
        "beside": lambda: _figures("beside", "trio, attrs, zmq"),
    }
    samples = measure("import", effort.at_most(effort.size(9, 1)), subjects)
    for figure, unit, scale in (("time", "ms", 1e3), ("memory", "MiB", 1 / (1 << 20))):
        name, beside = f"pipeline.import.{figure}", "import trio, attrs, zmq"
        yield samples.row(name, unit, f"ours.{figure}", beside, f"beside.{figure}", scale=scale)


def _figures(name: str, modules: str) -> Figures:
    # -I: the working directory is not a place to import from.
    program = _PROGRAM.format(modules=modules)
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True, process_group=0
    )
    seconds, resident = done.stdout.split()
    return {f"{name}.time": float(seconds), f"{name}.memory": float(resident)}
