"""Compaction: a process that folds the closed segments into the next snapshot.

Run it as `python -m maru._journal.compaction DIRECTORY`.

It shares only the directory with the server. Either process may be killed at any point:

| killed | files left | effect on the next start |
|---|---|---|
| before the new snapshot has its name | a temporary file | removes it |
| after that, before the replaced files are removed | files below the number of the snapshot | skips them |

Rule 1. The live segment, the last one begun, is left alone; its header records where the previous segment ends. A
        segment is folded only if a later one has a whole header.
Rule 2. Two compactions never run at once: the second one finds the lock taken and exits. A lock ends with its process.
Rule 3. Files that cannot be read completely are not folded: nothing is written, and the server writes a snapshot from
        memory.
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
    """Outcome of a compaction: the exit status of its process."""

    DONE = 0
    """Folded, or there was nothing to fold."""
    FAILED = 1
    """Failed, on a full disk for example; the directory is unchanged."""
    BUSY = 3
    """Another compaction is running."""
    DAMAGED = 4
    """A closed segment, or the snapshot, cannot be read."""


def compact(path: str, step: Callable[[str], None] = lambda name: None) -> Outcome:
    """Fold a directory's closed segments into a snapshot; remove the replaced files.

    Args:
        path: the directory.
        step: called with the name of each step before it is taken.

    Raises:
        ForeignJournal: a file is of another version.
        OSError: a file cannot be read or written. All earlier files are still there.
        MemoryError, RecursionError: a file cannot be loaded now. All earlier files are still there.
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
    # A snapshot above the live segment is the server's; the server itself removes the files that it replaces.
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
        # The boot in which the records were written, not this one: a start decides whether to trust the pages.
        header = Header(replayed.pool_id, replayed.boot_id, live, 0, 0)
        write_snapshot(path, header, body, server=False, step=step)
    for name in superseded(list_files(path), live):
        step(f"remove {name}")
        remove(path, [name])
    step("leave")
    return Outcome.DONE


def main(arguments: list[str]) -> Outcome:
    """Compact the directory given as the only argument."""
    if len(arguments) != 1:
        print("usage: python -m maru._journal.compaction DIRECTORY", file=sys.stderr)
        return Outcome.FAILED
    os.nice(10)
    gc.disable()  # the process ends soon, and holds nothing in cycles
    try:
        return compact(arguments[0])
    except (ForeignJournal, *REFUSED) as exc:
        print(str(exc) or "no memory is left", file=sys.stderr)
        return Outcome.FAILED
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
