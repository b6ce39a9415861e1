"""What a flight recorder costs a burst of containers, in instructions.

``python -m offload.bench._recorder_instructions [CONTAINERS]``, with Debian's valgrind. ``offload bench pipeline`` compares
processor times in its row ``pipeline.watched.recorder``, whose noise is above the hundredth that is in question; callgrind
counts. All is slower there by about the same factor, also what the recorder measures a record to cost. Its clock is the
thread's processor time here, so that what else the machine does gives it no more to spend. Each side is the difference of a
long burst and of a short one, without the start of the interpreter and what the recorder had saved up before.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

from .._recorder import flight
from ._burst import Burst


def run(containers: int, *, watched: bool) -> None:
    """One burst, with a recorder that watches it or beside one that does not."""
    flight.perf_counter = time.thread_time  # type: ignore[attr-defined]  # which it imports for itself
    burst = Burst.of(containers)
    with flight.FlightRecorder(most_share=0.01) as recorder:
        burst.ours(instruments=[recorder] if watched else [])


def instructions(containers: int, watched: str) -> int:
    """Instructions of a process that does so."""
    arguments = [sys.executable, "-m", "offload.bench._recorder_instructions", "--run", str(containers), watched]
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return int(re.findall(r"Collected : (\d+)", said)[-1])


def main(containers: int) -> None:
    """Print both sides and their ratio."""
    sides = {}
    for watched in ("", "watched"):
        long, short = instructions(2 * containers, watched), instructions(containers, watched)
        sides[watched] = (long - short) / containers
        print(f"{watched or 'not watched'}: {sides[watched]:,.0f} instructions a container", flush=True)
    print(f"ratio {sides['watched'] / sides['']:.4f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(int(sys.argv[2]), watched=bool(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 30_000)
