"""Background task that compacts the server's journal in a child process.

Rule 1. One process at a time, and after it a pause of several times its duration: a bounded share of one core.
Rule 2. Cancelling the task kills the process at once. Only its work is lost (see `compaction`).
Rule 3. If the files cannot be read any more, the server writes a snapshot from memory.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from typing import Final, TypeVar

import trio

from .._directory import Directory
from .._directory.image import encode_image
from .._directory.slices import Slices
from ..base.errors import JournalFailed
from ..base.threads import run_process
from .compaction import Outcome
from .journal import Journal

_REST: Final = 4.0
"""Pause after a compaction, in multiples of its duration.

It takes a fifth of a core at most.
"""
_LEAST_REST: Final = 0.25
"""Shortest pause after a compaction, in seconds."""
_LEAST_RETRY: Final = 1.0
_RETRY: Final = 10.0
"""Pause after a failed compaction, in seconds.

A full disk does not empty itself.
"""

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def keep_compacted(
    journal: Journal, directory: Directory, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Compact whenever it is due, until cancelled or the journal is closed.

    Args:
        journal: the open journal of ``directory``.
        directory: written as a snapshot from memory, between two appends, if the files cannot be read.
        task_status: started at once.
    """
    task_status.started()
    while True:
        try:
            await journal.wait_compaction_due()
            began = trio.current_time()
            outcome = await _compact(journal, directory)
        except trio.ClosedResourceError:
            return
        length = trio.current_time() - began
        # If the journal refuses appends until a compaction makes room, the pause is only the shortest one.
        with trio.move_on_after(length * _REST if outcome is Outcome.DONE else _RETRY):
            await trio.sleep(_LEAST_REST if outcome is Outcome.DONE else _LEAST_RETRY)
            try:
                await journal.wait_pressed()
            except trio.ClosedResourceError:
                return


async def _compact(journal: Journal, directory: Directory) -> Outcome:
    try:
        outcome = await run_compaction(journal.path)
        if outcome is Outcome.DAMAGED:
            _log.error("%r: a closed segment cannot be read; a snapshot from memory replaces it", journal)
            return Outcome.DONE if await write_from_memory(journal, directory) else Outcome.FAILED
        journal.survey()
    except (JournalFailed, OSError, MemoryError) as exc:
        _log.warning("%r cannot be compacted now: %s", journal, str(exc) or "no memory is left")
        return Outcome.FAILED
    return outcome


async def write_from_memory(journal: Journal, directory: Directory) -> bool:
    """Write a snapshot of a directory, which may change meanwhile.

    Returns:
        Whether it was written. ``False`` if the journal lacks some of the directory's changes.

    Raises:
        JournalFailed: it could not be written.
        OSError: no thread could be started.
    """
    async with journal.writing_snapshot:
        if journal.behind or directory.records:
            return False  # the directory is ahead of the journal: its pending records would count twice
        try:
            number = journal.cut()  # in one step with the first slice: later records are replayed on top of the image
            with contextlib.closing(directory.dumping()) as slices:
                make = await _end_of(slices)
            await journal.snapshot(lambda: encode_image(make()), number)
        except MemoryError:
            raise JournalFailed("no memory is left for a snapshot of the directory") from None
        return True


async def _end_of(slices: Slices[T]) -> T:
    """Run all slices, with a checkpoint before each, and return their result."""
    try:
        next(slices)
        while True:
            await trio.lowlevel.checkpoint()
            slices.send(0.0)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_compaction(path: str) -> Outcome:
    """Run one compaction to its end, and log its output.

    If cancelled, kill it.

    Raises:
        OSError: no process could be started.
    """
    done = await run_process(
        [sys.executable, "-P", "-m", "maru._journal.compaction", path],
        stdin=subprocess.DEVNULL,
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        deliver_cancel=_kill,
        start_new_session=True,  # an interrupt from the keyboard is for the server
    )
    said = (done.stdout + done.stderr).decode(errors="replace").strip()
    if said:
        _log.warning("the compaction of %s: %s", path, said)
    try:
        return Outcome(done.returncode)
    except ValueError:  # killed
        return Outcome.FAILED


async def _kill(process: trio.Process) -> None:
    process.kill()
