"""A directory for the length of a block, which is gone behind it whatever ends the block, a signal at any moment included."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scratch(prefix: str, parent: str = "") -> Iterator[str]:
    """A directory of this process, for its user alone, for as long as the block lasts; its path.

    ``tempfile`` tells a name after the directory is made, so that a signal in between leaves it behind. Here the name is first.

    Args:
        prefix: what its name begins with; the number of the process and a random number follow.
        parent: where it is made; by default where temporary files are.
    """
    name = f"{prefix}-{os.getpid()}-{secrets.token_hex(4)}"  # short, since the paths of sockets have a bound
    path = os.path.join(parent or tempfile.gettempdir(), name)
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
