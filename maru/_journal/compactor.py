"""The task beside the server's loop that runs a compaction in a child process when it is worth it.

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
"""Times the length of a compaction: it takes a fifth of a core at most."""
_LEAST_REST: Final = 0.25
"""Seconds between two that the journal waits for."""
_LEAST_RETRY: Final = 1.0
_RETRY: Final = 10.0
"""Rest after one that did not work, in seconds: a full disk does not empty itself."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def keep_compacted(
    journal: Journal, directory: Directory, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Compact whenever it is due, until cancelled, or the journal is closed.

    Args:
        journal: open, and of ``directory``.
        directory: for a snapshot from memory, taken between two appends.
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
        # One that makes the room for what waits to be written rests no longer than it must.
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
    """Write a snapshot of a directory, which goes on in between; whether the directory was written down to its last change.

    Raises:
        JournalFailed: it could not be written.
        OSError: no thread could be started.
    """
    async with journal.writing_snapshot:
        if journal.behind or directory.records:
            return False  # the directory is ahead of the journal: what is written later would count twice
        try:
            number = journal.cut()  # in one step with the first slice: what is appended later comes on top of the image
            with contextlib.closing(directory.dumping()) as slices:
                make = await _end_of(slices)
            await journal.snapshot(lambda: encode_image(make()), number)
        except MemoryError:
            raise JournalFailed("no memory is left for a snapshot of the directory") from None
        return True


async def _end_of(slices: Slices[T]) -> T:
    """Do all slices, with everybody else in between; what came of them."""
    try:
        next(slices)
        while True:
            await trio.lowlevel.checkpoint()
            slices.send(0.0)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_compaction(path: str) -> Outcome:
    """Run one compaction to its end; what it says goes to the log. Cancelled, it is killed.

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
