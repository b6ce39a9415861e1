"""A plugin's descriptor, as its host listens to it.

Rule 1. It is listened to by a duplicate. So a plugin that closes its own under the host's feet leaves nothing behind that is
        somebody else's: the number may be in use again at once, by whoever opened something next.
Rule 2. It is listened to once. Of two hosts with one descriptor each would take the other's answers.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from typing import TypeAlias

import trio

_Identity: TypeAlias = tuple[int, int, int]

_listened: set[_Identity] = set()
"""What this process listens to."""


class Descriptor:
    """One, until :meth:`close`.

    Args:
        fd: the plugin's.

    Raises:
        OSError: it is closed, or somebody listens to it already.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._identity = _identity_of(fd)
        if self._identity in _listened:
            raise OSError(f"another host listens to descriptor {fd}")
        self._mine = os.dup(fd)
        _listened.add(self._identity)

    async def wait(self) -> None:
        """Wait until it is readable."""
        await trio.lowlevel.wait_readable(self._mine)

    def check(self) -> None:
        """Raise :class:`OSError` if its owner has closed it: nobody will be woken by it any more."""
        if _identity_of(self._fd) != self._identity:
            raise OSError(f"descriptor {self._fd} was closed, and is something else now")

    def reset(self) -> bool:
        """Read what there is to read, so that it is not readable any more. Never blocks. Whether there was anything."""
        poll = select.poll()
        poll.register(self._mine, select.POLLIN)
        if not poll.poll(0):
            return False
        with contextlib.suppress(OSError):
            os.read(self._mine, 4096)
        return True

    def close(self) -> None:
        """Listen no more. In the trio run in which it was waited for."""
        _listened.discard(self._identity)
        trio.lowlevel.notify_closing(self._mine)
        os.close(self._mine)


def _identity_of(fd: int) -> _Identity:
    """What there is behind a number. All eventfds are one inode, but have ids of their own."""
    behind = os.fstat(fd)
    with contextlib.suppress(OSError):  # not Linux
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            name, _, number = line.partition(":")
            if name == "eventfd-id":
                return behind.st_dev, behind.st_ino, int(number)
    return behind.st_dev, behind.st_ino, -1 - fd
