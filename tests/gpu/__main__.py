"""Run the device tests, and ``offload bench device``: ``python -m tests.gpu [FILE for the figures] [arguments of pytest]``.

On a GPU if torch sees one, and over the driver in Python in any case. It needs this repository and what it imports, and no
installation: for machines that are lent for some minutes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .devices import KINDS

TESTS = ("tests/gpu", "tests/maru/test_cuda.py", "tests/backends/test_copier.py", "tests/backends/test_device_tier.py")


def main(arguments: list[str]) -> int:
    """Run all of it; the exit status is that of the tests, or of the bench."""
    figures = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    where = "a GPU, and a driver in Python" if len(KINDS) > 1 else "a driver in Python alone: torch sees no CUDA device"
    print(f"over {where}", flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", *TESTS, *arguments], check=False)
    command = [sys.executable, "-m", "offload", "bench", "device"]
    if figures is None:
        bench = subprocess.run(command, check=False)
    else:
        with figures.open("w") as out:
            bench = subprocess.run([*command, "--json"], stdout=out, check=False)
    print(f"that was over {where}", flush=True)
    return tests.returncode or bench.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
