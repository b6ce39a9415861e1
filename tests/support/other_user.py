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

_BECOME = f"""
import os

def become_other_user():
    os.setgroups([])
    os.setresgid({UID}, {UID}, {UID})
    os.setresuid({UID}, {UID}, {UID})
"""


@contextmanager
def other_user(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that calls ``become_other_user()`` once it has imported what it needs: only root may read that.

    It is killed when the block ends.
    """
    command = [sys.executable, "-c", _BECOME + script, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
