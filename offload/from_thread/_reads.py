"""Reads that a thread makes itself, without the engine's thread.

See :mod:`offload._engine.direct`. Each method is called in any thread. It returns ``None`` if the read cannot be made
so; the read is then requested by a message. Counting is left to the engine's thread, which does it before any message
that is sent later.

The end of an engine releases all hits that it knows of; afterwards its hits hold nothing, and their pages may be those
of other blocks. Two threads may cross there:

    any thread                                     the engine's thread, at the end
    R1  pin, and leave the hit to be noted         E1  not open any more
    R2  if not open any more: release it           E2  note the hits left, and release all hits

R2 sees E1, or else R1 came before E1, and E2 finds the hit. In the same way a load that has copied counts only if the
engine is open after its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from backends.abc import Destination, Key

from .._engine import Hit as PinnedHit
from .._engine import LoadResult
from .._engine.direct import DirectLoad, DirectLookup
from ..abc import Precondition
from ._calls import Hit

if TYPE_CHECKING:
    from ._worker import EngineWorker

SHORT_COPY_BYTES: Final = 256 << 10
"""Most bytes that a begun load copies at once, without waiting.

Copying so much takes the time of beginning the load elsewhere.
"""


class ThreadReads:
    """The reads of one engine that need no message."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    def lookup(self, keys: Sequence[Key], tenant: str) -> Hit | None:
        """Find the longest prefix of these keys, and pin it."""
        worker = self._worker
        if not worker.is_open or worker.refusal is not None:
            return None
        found = worker.engine.direct.find(keys, tenant)
        if found is None:
            return None
        hit = Hit(worker, found.hit)  # dropped at any bytecode from here on, it is released
        # R1. Blocks that were left out have to be measured, by a task that runs when the thread does.
        (worker.mailbox.leave if found.left_out is None else worker.mailbox.call)(partial(self._note, found))
        if self._has_ended:  # R2
            hit.release()
            return None
        return hit

    @property
    def _has_ended(self) -> bool:
        """Whether the engine has begun to end.

        A property: an engine that was open a line before need not be now.
        """
        return not self._worker.is_open

    def _note(self, found: DirectLookup) -> None:
        found.count()
        self._worker.hits[found.hit] = None

    def load(
        self,
        hit: Hit,
        destination: Destination,
        precondition: Precondition,
        promote: bool | str | None,
        deadline: float,
        *,
        waits: bool = True,
    ) -> LoadResult | None:
        """Copy the blocks of a hit, and verify them.

        Args:
            hit: of this engine.
            destination: the destination of the copy.
            precondition: the condition for the copy; if it does not hold yet, this is for the engine's thread.
            promote: whether it is promoted; by default as the engine is configured.
            deadline: on the clock of ``time.monotonic``.
            waits: whether the caller waits for it. Otherwise only a short copy of memory is made.
        """
        worker, read = self._worker, object()
        try:
            pinned = hit.begin_reading(read)
            if not worker.is_open:
                return None
            engine = worker.engine
            up = engine.promote if promote is None else promote
            load = engine.direct.plan(pinned, destination, precondition, up, deadline)
            if load is None or not (waits or (load.size_bytes <= SHORT_COPY_BYTES and not load.waits_for_disk)):
                return None
            result = self._copy(load)
            if result is None or not worker.is_open:
                return None
        finally:
            # Python handles a signal when a function of ours begins, and after a call of one of its own. A signal would
            # keep the method from being run, and the blocks would be held for ever: so the read ends before it is
            # called.
            hit.reads.pop(read, None)
            hit.end_reading(read)
        (worker.mailbox.call if load.promotes else worker.mailbox.leave)(load.count)
        return result

    def _copy(self, load: DirectLoad) -> LoadResult | None:
        if not load.waits_for_disk:
            return load.copy()
        with self._worker.engine.direct.load_priority.loading_in_thread(self._worker.mailbox.call):
            return load.copy()

    def release(self, pinned: PinnedHit) -> None:
        """Have a hit released.

        Never blocks, and wakes the engine's thread only if something there waits for it.
        """
        worker = self._worker
        release = partial(worker.release, pinned)
        # A load of this hit that was begun may still be a message, and has pinned nothing yet: the release goes after
        # it.
        if worker.is_open and worker.has_begun_calls:
            worker.mailbox.call(release)
            return
        direct = worker.engine.direct
        released = direct.release_from_thread(pinned)
        if worker.refusal is not None:
            return  # the end of the engine has released it, or will
        if released and not direct.is_waited_for(pinned):
            worker.mailbox.leave(release)
        else:
            worker.mailbox.call(release)
