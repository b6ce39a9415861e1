"""A temporary directory that is removed however a block ends, signals included."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scratch(prefix: str, parent: str = "") -> Iterator[str]:
    """Make a private directory for a block. Yields its path.

    ``tempfile`` returns a name after the directory is made, so a signal in between leaves it behind. Here the name is
    known first.

    Args:
        prefix: beginning of its name; the number of the process and a random number follow.
        parent: the directory to make it in; by default that of temporary files.
    """
    name = f"{prefix}-{os.getpid()}-{secrets.token_hex(4)}"  # short, since the paths of sockets have a bound
    path = os.path.join(parent or tempfile.gettempdir(), name)
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
