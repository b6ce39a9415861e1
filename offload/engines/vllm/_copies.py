"""A worker's copies between its cache and shared places.

They serve vLLM's own offloading.

A place is a row of host memory, or a page of a tier if the scheduler is in this process. The scheduler names a place
only if it may be written, or its bytes are verified and held. So these copies are memory to memory, and cannot fail for
want of a block. An error is a fault of this host: a load that fails ends vLLM, which would otherwise compute with wrong
bytes, and rows that were not written are marked as such. A copy whose end is not proven ends vLLM either way: its rows,
or blocks, would be given out again while it may still write them.

A copy of a device waits on the device for all work that vLLM has started there before its job: no thread waits for
that.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

import attrs

from backends import Unproven
from backends.base.copier import Event
from backends.base.pages import Pages
from backends.base.threads import kept_if_unproven
from maru.base.flags import Flag
from maru.base.threads import start_thread
from maru.exception_groups import holds

from ._arena import Arena
from ._chunks import ChunkSource, Parts, copy_chunks_in, copy_chunks_out
from ._placed import Placed

ATTEMPTS: Final = 3
"""Attempts at a copy.

vLLM ends if a load fails, and memory that is short may be available a moment later.
"""
_log = logging.getLogger("vllm.offload")

IDLE_WAIT: Final = 0.005
"""Seconds that a step without a forward pass waits for a copy.

Otherwise vLLM would return at once and keep the interpreter from the copying threads.
"""

LONGEST_END: Final = 10.0
"""Seconds that the end of a worker waits for running copies."""

Columns = Sequence[tuple[ChunkSource, list[list[int | None]], list[int]]]
"""Chunks of each group of KV caches, their blocks and places.

A block that is ``None`` is not copied.
"""
InPlace = Mapping[int, tuple[Placed, int]]
"""Blocks, and position in them, of each place in a tier."""
NOWHERE: Final[InPlace] = {}
Copy: TypeAlias = Callable[[Parts, Sequence[Event]], None]


class LostInPlace(RuntimeError):
    """Pages of a tier were reassigned while they were copied.

    Its server was silent for longer than its lease.
    """


@attrs.frozen
class Copied:
    """The result of a job."""

    job_id: int
    error: BaseException | None
    nbytes: int
    seconds: float


@attrs.define(eq=False)
class _Job:
    """A copy to make, and its result once it has ended."""

    job_id: int
    make: Callable[[], Copied]
    copied: Copied | None = None


class _CopyThread:
    """A thread that makes jobs in order.

    vLLM ends by signals, whose handlers raise in its thread, which waits here for a job. So it waits in queues, which
    are C, and no exception leaves a lock held. The thread is a daemon: a copy that never ends, since the device does not,
    keeps no process from ending.
    """

    _is_closed = False

    def __init__(self, name: str, wakes: SimpleQueue[None]) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._wakes = wakes
        self._over = Flag()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    def begin(self, job: _Job) -> None:
        """Make this job after the earlier ones.

        Raises:
            RuntimeError: the thread ends.
        """
        if self._is_closed:
            raise RuntimeError("the copies of this worker have ended")
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the running job.

        Jobs that have not begun fail.
        """
        self._is_closed = True
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the running job. Return whether it came."""
        return self._over.wait(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._is_closed:
                    raise RuntimeError("withdrawn, since the worker ends")
                job.copied = job.make()
            except BaseException as error:  # reported, or vLLM would wait for it for ever
                job.copied = Copied(job.job_id, error, 0, 0.0)
            self._wakes.put(None)
            del job  # a thread that waits holds nobody's memory
        self._over.set()


class RowCopies:
    """The copies of one worker: a thread for loads, one for stores.

    Args:
        arena: the rows.
        offset: start of this worker's part of each row.
        groups: of each group of KV caches, the chunks of its blocks.
        computed: returns events of the device, as ``torch.cuda.Event`` is one, that hold once all work that was started
            there until now is over; called when a job is begun. None in host memory: there a forward pass is over when
            it returns.
    """

    def __init__(
        self, arena: Arena, offset: int, groups: Sequence[ChunkSource], computed: Callable[[], Sequence[Any]]
    ) -> None:
        self._arena, self._offset, self._groups, self._computed = arena, offset, groups, computed
        self._wakes: SimpleQueue[None] = SimpleQueue()  # one for each job that has ended
        self._stores = _CopyThread("offload store", self._wakes)
        try:
            self._loads = _CopyThread("offload load", self._wakes)
        except BaseException:
            self._stores.close()
            raise
        self._jobs: dict[int, _Job] = {}
        self._stored_rows: dict[int, Sequence[int]] = {}  # of each store, until it has ended
        self.ended: list[Copied] = []
        """Jobs that have ended, and that :meth:`finished` has not returned yet."""

    def store(
        self, job_id: int, blocks: Sequence[int], sizes: Sequence[int], firsts: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Begin to copy blocks into rows; see :meth:`columns` for the arguments."""
        self._stored_rows[job_id] = rows
        self._begin(self._stores, job_id, self.columns(blocks, sizes, firsts, rows), copy_chunks_out)

    def fail_store(self, job_id: int, rows: Sequence[int]) -> None:
        """End a store that could not begin; mark its rows unwritten."""
        self._arena.mark_unwritten(rows)
        if job_id not in self._jobs:
            self._stored_rows.pop(job_id, None)
            self.ended.append(Copied(job_id, None, 0, 0.0))

    def distrust(self, job_ids: Iterable[int]) -> None:
        """Mark the rows of these stores as unwritten.

        Their blocks may be overwritten before the stores end.
        """
        for job_id in job_ids:
            self._arena.mark_unwritten(self._stored_rows.get(job_id, ()))

    def load(
        self,
        job_id: int,
        blocks: Sequence[int],
        sizes: Sequence[int],
        firsts: Sequence[int],
        places: Sequence[int],
        in_place: InPlace,
    ) -> None:
        """Begin to copy from places into blocks.

        ``in_place`` has the addresses of the places that are no rows.
        """
        columns = self.columns(blocks, sizes, firsts, places)
        self._begin(self._loads, job_id, columns, copy_chunks_in, in_place)

    def columns(
        self, blocks: Sequence[int], sizes: Sequence[int], firsts: Sequence[int], rows: Sequence[int]
    ) -> Columns:
        """Return the chunks of a job.

        Args:
            blocks: numbers of the blocks to be copied, group by group.
            sizes: number of blocks in each group.
            firsts: the position in the sequence of each group's first one: a chunk may begin before it.
            rows: of the chunks, group by group.

        Raises:
            ValueError: there are not as many rows as these blocks have chunks.
        """
        columns, at, row = [], 0, 0
        for group, size, first in zip(self._groups, sizes, firsts, strict=True):
            per_chunk = group.blocks_per_chunk
            skipped = first % per_chunk if size else 0
            places: list[int | None] = [*[None] * skipped, *blocks[at : at + size]]
            places += [None] * (-len(places) % per_chunk)
            chunks = [places[start : start + per_chunk] for start in range(0, len(places), per_chunk)]
            columns.append((group, chunks, list(rows[row : row + len(chunks)])))
            at, row = at + size, row + len(chunks)
        if (at, row) != (len(blocks), len(rows)):
            raise ValueError(f"{len(blocks)} blocks and {len(rows)} rows, not {at} and {row}")
        return columns

    def finished(self, *, idle: bool) -> list[Copied]:
        """Return the jobs that have ended since the last call.

        If the step is ``idle``, it waits a little for the first one.
        """
        if idle and self._jobs and not self.ended and not any(job.copied for job in self._jobs.values()):
            with suppress(Empty):
                self._wakes.get(timeout=IDLE_WAIT)
        # One by one, so that an error in between loses none: vLLM would wait for it for ever.
        for job_id, job in [*self._jobs.items()]:
            if job.copied is not None:
                self.ended.append(job.copied)
                del self._jobs[job_id]
                self._stored_rows.pop(job_id, None)
                with suppress(Empty):
                    self._wakes.get_nowait()
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until these jobs have ended; :meth:`finished` returns them later."""
        for job in [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]:
            while job.copied is None:
                self._wakes.get()

    def close(self) -> None:
        """Withdraw the queued copies, and wait for the running ones.

        It waits for :data:`LONGEST_END` at most. The thread of a copy that takes longer keeps its memory.
        """
        threads, deadline = (self._stores, self._loads), time.monotonic() + LONGEST_END
        for thread in threads:
            thread.close()
        if not all([thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]):
            _log.error("a copy between the cache and host memory has not ended within %g s", LONGEST_END)

    def _begin(
        self, thread: _CopyThread, job_id: int, columns: Columns, copy: Copy, in_place: InPlace = NOWHERE
    ) -> None:
        job = _Job(job_id, partial(self._copy, job_id, self._computed(), columns, copy, in_place))
        thread.begin(job)
        self._jobs[job_id] = job

    def _copy(self, job_id: int, events: Sequence[Any], columns: Columns, copy: Copy, in_place: InPlace) -> Copied:
        began, nbytes = time.perf_counter(), 0
        error: BaseException | None = None
        for _ in range(ATTEMPTS):
            try:
                # Until the copy is over, the events, the source and the target are kept.
                with kept_if_unproven((self._arena, events, columns, in_place)):
                    nbytes = self._copy_all(columns, copy, in_place, [Event(event.cuda_event) for event in events])
                _check_unchanged(in_place)
            except LostInPlace as raised:  # another attempt would read changed pages, too
                error = raised
                break
            except BaseException as raised:
                error = raised
                if holds(raised, Unproven):
                    break
            else:
                error = None
                break
        if error is not None and copy is copy_chunks_out:
            # A failed store cannot be reported to vLLM; the scheduler checks the marks.
            self._arena.mark_unwritten([row for _, _, rows in columns for row in rows])
            _log.error("copy %d from the cache to host memory has failed: %r", job_id, error)
            error, nbytes = error if holds(error, Unproven) else None, 0
        return Copied(job_id, error, nbytes, time.perf_counter() - began)

    def _copy_all(self, columns: Columns, copy: Copy, in_place: InPlace, after: Sequence[Event]) -> int:
        """Make the copies of a job; return their bytes."""
        if copy is copy_chunks_out:
            self._clear_ends(columns)
        parts = [
            (group, chunks, self._pages(rows, in_place, group.block_bytes)) for group, chunks, rows in columns if rows
        ]
        copy(parts, after)
        return sum(len(pages) * pages.page_bytes for _, _, pages in parts)

    def _clear_ends(self, columns: Columns) -> None:
        """Clear the end of each row after a narrower chunk.

        Otherwise it would store the old bytes of another request with it.
        """
        widest = max(group.block_bytes for group in self._groups)
        for group, _, rows in columns:
            unused = widest - group.block_bytes
            if unused:
                for address in self._arena.pages(rows, self._offset + group.block_bytes, unused).addresses:
                    ctypes.memset(address, 0, unused)

    def _pages(self, places: Sequence[int], in_place: InPlace, nbytes: int) -> Pages:
        """Return this worker's part of these places."""
        if not in_place:
            return self._arena.pages(places, self._offset, nbytes)
        rows = self._arena.pages([place for place in places if place >= 0], self._offset, nbytes)
        left, addresses = iter(rows.addresses), []
        for place in places:
            if place >= 0:
                addresses.append(next(left))
            else:
                blocks, position = in_place[place]
                addresses.append(blocks.pages.addresses[position] + self._offset)
        return Pages(addresses, nbytes, (rows.owner, in_place))


def _check_unchanged(in_place: InPlace) -> None:
    """Raise unless the bytes that were read in place are unchanged.

    Called after the copy, with the places that were verified before.
    """
    by_pin: dict[int, tuple[Placed, list[int]]] = {}
    for blocks, position in in_place.values():
        by_pin.setdefault(id(blocks), (blocks, []))[1].append(position)
    for blocks, positions in by_pin.values():
        if not blocks.unchanged(positions):
            raise LostInPlace(f"{len(positions)} chunks were overwritten in their tier while they were loaded")
