"""Another user of this machine, played by a child process: for tests of what must not be believed. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

UID = 65_534
"""That of nobody."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def as_other_user(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process of that user, which has printed a line, and ends with the block: it is to wait at its input."""
    command = [sys.executable, "-c", script, *map(str, args)]
    with subprocess.Popen(
        command, user=UID, group=UID, extra_groups=(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(60)
