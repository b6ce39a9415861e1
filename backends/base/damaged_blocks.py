"""Damaged blocks of a tier, remembered until they are deleted.

For a tier that cannot drop them at once. No bytes.

A tier of this process drops a damaged block when its last holder releases it. In a page store, a plugin or a tier below, a
later delete is all that can be done, and by then the block under the key may be a new one. So each key is kept with something
that identifies the damaged block: see ``B`` below.

Rule 1. A damaged block is no longer found, and is deleted once it is not held any more.
Rule 2. Only that block is meant. A block that is stored again under its key is found, and not deleted if the tier can
        distinguish it.
Rule 3. Each is claimed by one caller at a time: a second delete on the way could hit a block that was stored after the
        first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

from ..abc import DUPLICATE, STORED, Deletion, Key, Outcome, Rejected

DAMAGED: Final = Rejected("damaged")
"""Outcome of a store whose key has a held damaged block."""

MOST_DAMAGED: Final = 65_536
"""Most damaged blocks that are remembered.

A tier may refuse to delete them. Beyond this number the oldest is found again.
"""


class Damaged(Protocol):
    """A damaged block: its key, and its difference from a new block."""

    @property
    def key(self) -> Key:
        """The key of the block."""
        ...


B = TypeVar("B", bound=Damaged)


class DamagedBlocks(Generic[B]):
    """The damaged blocks of one tier. Pure; used on the trio thread.

    Args:
        most: number of blocks that are remembered.
    """

    def __init__(self, most: int = MOST_DAMAGED) -> None:
        self._most = most
        self._blocks: dict[Key, B] = {}
        self._claimed: set[Key] = set()  # being deleted

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[B]:
        return iter(self._blocks.values())

    def add(self, blocks: Iterable[B]) -> None:
        """Add blocks that were found damaged."""
        self._blocks.update((block.key, block) for block in blocks)
        while len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]

    def prefix_before(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Return the longest prefix of ``keys`` without a damaged block."""
        return keys[: next((at for at, key in enumerate(keys) if key in self._blocks), len(keys))]

    @contextmanager
    def claim(self, most: int = MOST_DAMAGED) -> Iterator[list[B]]:
        """Claim up to ``most`` damaged blocks for the caller alone.

        The first are those that were added, or claimed, the longest ago.
        """
        free = (block for key, block in self._blocks.items() if key not in self._claimed)
        some = list(islice(free, most))
        self._claimed.update(block.key for block in some)
        try:
            yield some
        finally:
            self._claimed.difference_update(block.key for block in some)

    def clear(self, blocks: Iterable[B]) -> None:
        """Remove these damaged blocks, since new ones have their keys."""
        for block in blocks:
            # By identity: meanwhile another block may have been found damaged under the same key, and that one stays.
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]

    def note_purged(self, blocks: Sequence[B], answers: Sequence[Deletion]) -> None:
        """Record the answers to their deletion.

        Blocks that stay go to the end of the queue, so that all are tried in turn.
        """
        for block, answer in zip(blocks, answers, strict=True):
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]
                if answer not in (Deletion.DELETED, Deletion.MISSING):
                    self._blocks[block.key] = block

    def note_deleted(self, keys: Sequence[Key], answers: Sequence[Deletion]) -> None:
        """Record that these keys were deleted by request."""
        for key, answer in zip(keys, answers, strict=True):
            if answer in (Deletion.DELETED, Deletion.MISSING):
                self._blocks.pop(key, None)

    def note_stored(self, keys: Sequence[Key], outcomes: list[Outcome]) -> int:
        """Record new blocks, which are not damaged.

        A duplicate of a damaged block does not count as stored.

        Returns:
            Number of duplicates of damaged blocks; ``outcomes`` has :data:`DAMAGED` for them.
        """
        if not self._blocks:
            return 0
        refused = 0
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=False)):
            if outcome == STORED:
                self._blocks.pop(key, None)
            elif outcome == DUPLICATE and key in self._blocks:
                outcomes[at] = DAMAGED
                refused += 1
        return refused
