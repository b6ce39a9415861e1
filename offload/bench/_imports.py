"""Time and memory of importing the package in a new interpreter, beside those of its dependencies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from maru.bench._measure import Effort, Figures, in_turn, noisiest
from maru.bench._row import Row

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
    """Seconds and resident bytes."""
    subjects = {
        "ours": lambda: _figures("ours", "offload"),
        "beside": lambda: _figures("beside", "trio, attrs, zmq"),
    }
    samples = in_turn("import", effort.at_most(effort.size(9, 1)), subjects)
    for figure, unit, scale in (("time", "ms", 1e3), ("memory", "MiB", 1 / (1 << 20))):
        ours, beside = samples[f"ours.{figure}"], samples[f"beside.{figure}"]
        yield Row(
            f"pipeline.import.{figure}",
            ours.median * scale,
            unit,
            "import trio, attrs, zmq",
            beside.median * scale,
            noise=noisiest(ours, beside),
        )


def _figures(name: str, modules: str) -> Figures:
    # -I: the working directory is not a place to import from.
    program = _PROGRAM.format(modules=modules)
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True, process_group=0
    )
    seconds, resident = done.stdout.split()
    return {f"{name}.time": float(seconds), f"{name}.memory": float(resident)}
