"""What all tests share."""

from __future__ import annotations

import os

# Before torch is imported by any of them: with a thread per core, OpenMP spins for the core that another process has, and
# a test of a second takes a minute on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
