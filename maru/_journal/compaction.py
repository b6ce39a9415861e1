"""Compaction: a process that folds the closed segments into the next snapshot.

It is `python -m maru._journal.compaction`.

It shares nothing with the server but the directory, and may be killed at any point, as may the server:

| killed | what is left | what a start makes of it |
|---|---|---|
| before the new snapshot has its name | a temporary file | sweeps it |
| after that, before what it replaces is removed | files below the number of the snapshot | reads past them |

Rule 1. The live segment, the last that was begun, is left alone; its header tells where the one before it ends. No segment is
        folded but behind one that has a whole header.
Rule 2. Two compactions never run at once: the second one finds the lock taken and exits. A lock ends with its process.
Rule 3. Files that cannot be read completely are not folded: nothing is written, and the server writes a snapshot from memory.
Rule 4. No part of the server waits for it, neither to start nor to stop.
"""

from __future__ import annotations

import enum
import gc
import os
import sys
from collections.abc import Callable

import msgspec

from ..base.errors import ForeignJournal
from .replay import REFUSED, replay
from .segments import Header, last_begun, list_files, remove, superseded, try_lock, write_snapshot


class Outcome(enum.IntEnum):
    """What became of a compaction: the exit status of its process."""

    DONE = 0
    """Folded, or there was nothing to fold."""
    FAILED = 1
    """Something was in the way, a full disk say. As before."""
    BUSY = 3
    """Another one is at work."""
    DAMAGED = 4
    """A closed segment, or the snapshot, cannot be read."""


def compact(path: str, step: Callable[[str], None] = lambda name: None) -> Outcome:
    """Fold the closed segments of a directory into a snapshot, and remove what that replaces.

    Args:
        path: the directory.
        step: told of each step before it is taken.

    Raises:
        ForeignJournal: it is of another version.
        OSError: something cannot be read, or written. What was there is still there.
        MemoryError, RecursionError: it cannot be loaded now. As before.
    """
    lock = try_lock(path)
    if lock is None:
        return Outcome.BUSY
    try:
        return _compact(path, step)
    finally:
        os.close(lock)


def _compact(path: str, step: Callable[[str], None]) -> Outcome:
    step("sweep")
    listing = list_files(path)
    remove(path, [name for name in listing.leftovers if not name.endswith(".server.tmp")])
    live = last_begun(path, listing.segments)
    newest = listing.snapshots[-1] if listing.snapshots else 0
    # A snapshot above the live segment is the server's, which removes what that replaces.
    if newest > live or not (superseded(listing, newest) or any(newest <= n < live for n in listing.segments)):
        return Outcome.DONE
    step("replay")
    replayed = replay(path, None, before=live)
    if replayed.lost:
        for finding in replayed.lost:
            print(finding, file=sys.stderr)
        return Outcome.DAMAGED
    if replayed.snapshot < live:
        assert replayed.pool_id is not None and replayed.boot_id is not None
        body = msgspec.msgpack.encode(replayed.directory.dump())
        # The boot of what was read and not this one: whether pages may be believed is not for us to say.
        header = Header(replayed.pool_id, replayed.boot_id, live, 0, 0)
        write_snapshot(path, header, body, server=False, step=step)
    for name in superseded(list_files(path), live):
        step(f"remove {name}")
        remove(path, [name])
    step("leave")
    return Outcome.DONE


def main(arguments: list[str]) -> Outcome:
    """Compact the directory that is named."""
    if len(arguments) != 1:
        print("usage: python -m maru._journal.compaction DIRECTORY", file=sys.stderr)
        return Outcome.FAILED
    os.nice(10)
    gc.disable()  # it ends soon, and holds nothing in cycles
    try:
        return compact(arguments[0])
    except (ForeignJournal, *REFUSED) as exc:
        print(str(exc) or "no memory is left", file=sys.stderr)
        return Outcome.FAILED
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
