"""What a flight recorder costs a burst of containers, in instructions.

``python -m offload.bench._recorder_instructions [CONTAINERS]``, with Debian's valgrind. ``offload bench pipeline`` compares
processor times in its row ``pipeline.watched.recorder``, whose noise is above the hundredth that is in question; callgrind
counts. The recorder's clock is the thread's processor time there, slowed down as all else is: so it has no more to spend where
the machine does other things. What is counted is the difference of a long burst and of a short one, without what making their
containers takes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Final

from .._recorder import flight
from ._burst import Burst

_SLOWNESS: Final = 50.0
"""How much slower callgrind is, about."""


def run(containers: int, what: str) -> None:
    """Make a burst, and run it with a recorder that watches it, or beside one that does not."""
    flight.perf_counter = lambda: time.thread_time() / _SLOWNESS  # type: ignore[attr-defined]  # it imports that by name
    burst = Burst.of(containers)
    with flight.FlightRecorder(most_share=0.01) as recorder:
        if what != "made":
            burst.ours(instruments=[recorder] if what == "watched" else [])


def instructions(containers: int, what: str) -> int:
    """Instructions of a process that does so."""
    arguments = [sys.executable, "-m", "offload.bench._recorder_instructions", "--run", str(containers), what]
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return int(re.findall(r"Collected : (\d+)", said)[-1])


def main(containers: int) -> None:
    """Print both sides and their ratio."""
    sides: dict[str, float] = {}
    for what in ("made", "plain", "watched"):
        long, short = instructions(2 * containers, what), instructions(containers, what)
        sides[what] = (long - short) / containers - sides.get("made", 0)
        print(f"{what}: {sides[what]:,.0f} instructions a container", flush=True)
    print(f"ratio {sides['watched'] / sides['plain']:.4f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(int(sys.argv[2]), sys.argv[3])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
