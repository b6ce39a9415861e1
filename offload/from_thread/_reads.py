"""Reads that a thread makes itself, in memory, while the engine's thread rests: see :mod:`offload._engine.direct`.

Each method is called in any thread. What cannot be done so is ``None``, and asked for by a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from backends.abc import Destination, Key

from .._engine import Hit as PinnedHit
from .._engine import LoadResult
from .._engine.direct import MOST_BYTES
from ._calls import Hit
from ._resting import RestingLoop

if TYPE_CHECKING:
    from ._worker import EngineWorker

SHORT_COPY_BYTES: Final = 256 << 10
"""A load that is begun and not waited for copies so much at once: in the time that it would take to begin it elsewhere."""


class ThreadReads:
    """The reads of one engine that need no message."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self.resting: RestingLoop = RestingLoop(worker.mailbox.wake)
        """Says when the engine's thread rests."""

    def lookup(self, keys: Sequence[Key]) -> Hit | None:
        """Find all of these keys in memory, and pin them."""
        return self.resting.read(partial(self._find, keys))

    def _find(self, keys: Sequence[Key]) -> Hit | None:
        worker = self._worker
        if not worker.is_open or worker.refusal is not None:
            return None
        found = worker.engine.direct.find(keys)
        if found is None:
            return None
        pinned, hold = found
        hit = Hit(worker, pinned)  # before it holds anything: dropped at any bytecode from here on, it is released
        self.resting.leave(partial(self._hold, pinned, hold))
        return hit

    def _hold(self, pinned: PinnedHit, hold: Callable[[], None]) -> None:
        hold()
        self._worker.hits[pinned] = None

    def load(self, hit: Hit, destination: Destination, most_bytes: int = MOST_BYTES) -> LoadResult | None:
        """Copy what a hit holds, and verify it, if all of it lies in memory and it is not more than so many bytes."""
        if len(hit) * destination.block_bytes > most_bytes:
            return None
        worker = self._worker
        with hit.reading() as pinned:
            if not worker.is_open:
                return None
            load = self.resting.read(partial(worker.engine.direct.plan, pinned, destination))
            result = None if load is None else load.copy()
            # When an engine ends its hits hold nothing any more: what was copied then may be of other blocks.
            if load is None or not worker.is_open:
                return None
        if result is not None:
            self.resting.leave(load.count)
        return result

    def release(self, pinned: PinnedHit) -> None:
        """Have a hit released. Never blocks, and wakes the engine's thread only if something there waits for it."""
        release = partial(self._worker.release, pinned)
        # A load of this hit that was begun may still be a message. What is left here is done before messages are read, and so
        # would release what that load has not pinned yet; a message comes behind it.
        if self._worker.has_begun_calls or not self.resting.read(partial(self._release_late, pinned, release), wait=0):
            self._worker.mailbox.call(release)

    def _release_late(self, pinned: PinnedHit, release: Callable[[], None]) -> bool:
        late = self._worker.engine.direct.may_release_late(pinned)
        if late:
            self.resting.leave(release)
        return late
