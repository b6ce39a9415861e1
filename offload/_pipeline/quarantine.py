"""Quarantine: the resources of copies whose end could not be proven.

They are listed, counted, and released by an operator only. Until then a copy's source refs, marks, locks and room at
the destination stay taken: nothing it may still read or write is reused. The containers have settled as FAILED with
:class:`DrainUnproven`; the promise is broken loudly, never silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import attrs

from backends.abc import Key

_log = logging.getLogger("offload.pipeline")


@attrs.define(eq=False, repr=False)
class Quarantined:
    """One copy whose end is unknown."""

    number: int
    """The copy's number, counted up within a pipeline from 1."""
    keys: Sequence[Key]
    """The keys of the blocks that it copied."""
    reason: str
    """The reason why its end is unknown."""
    since: float
    """The time when it was abandoned, on trio's clock, in seconds."""
    _give_back: Callable[[], None]
    _home: dict[int, Quarantined]

    def __repr__(self) -> str:
        return f"<Quarantined {self.number}: {len(self.keys)} blocks, {self.reason}>"

    def release(self) -> None:
        """Release everything that the copy held.

        An operator calls it who knows that the copy is over. Idempotent, on the trio thread.
        """
        if self._home.pop(self.number, None) is not None:
            self._give_back()


@attrs.define(eq=False)
class Quarantine:
    """All copies of one pipeline whose end is unknown."""

    total: int = 0
    """Number of copies quarantined so far."""
    _entries: dict[int, Quarantined] = attrs.Factory(dict)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Quarantined]:
        return iter(list(self._entries.values()))

    def add(self, keys: Sequence[Key], reason: str, since: float, give_back: Callable[[], None]) -> Quarantined:
        """Add a copy; ``give_back`` releases all its resources."""
        self.total += 1
        entry = Quarantined(self.total, list(keys), reason, since, give_back, self._entries)
        self._entries[entry.number] = entry
        _log.error("quarantined %d blocks: %s", len(keys), reason)
        return entry
