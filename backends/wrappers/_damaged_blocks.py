"""Damaged blocks of a wrapped tier: what could not be decoded, until it is deleted. No bytes.

A tier below that can be told so while the block is held (:class:`backends.abc.ForgettingLease`) drops the very block that was
read, and nothing is remembered here. In any other only a key can be deleted, later, and what lies under it may have been
deleted and stored anew by then.

Rule 1. A damaged block is no longer found, and is deleted once it is not held any more.
Rule 2. Right before that it is read once more, for the tenant it was read for before. What can be decoded now was stored
        anew: it stays, and is found again. So is what belongs to another tenant now, who can decode it. What is stored anew
        between that reading and the deletion is deleted, and costs a miss.
Rule 3. Of many, as many at a time as are worth one copy: a caller must not wait for a long reading of what is of no use. And
        each is claimed by one caller: a second deletion on the way would delete what was stored anew behind the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from ..abc import DUPLICATE, STORED, Deletion, Key, Outcome, Rejected
from ._chain import Context

DAMAGED: Final = Rejected("damaged")
"""Why a block is not stored anew yet: what could not be decoded under its key is still held."""

MOST_DAMAGED: Final = 65_536
"""How many keys are remembered where the tier below does not delete them. Beyond it the oldest is found again."""


class DamagedBlocks:
    """The damaged blocks of one wrapped tier, each with what was known of it when it was read."""

    def __init__(self) -> None:
        self._contexts: dict[Key, Context] = {}
        self._claimed: set[Key] = set()  # being read once more, or deleted

    def __len__(self) -> int:
        return len(self._contexts)

    def __contains__(self, key: object) -> bool:
        return key in self._contexts

    def add(self, contexts: Iterable[Context]) -> None:
        """These could not be decoded."""
        self._contexts.update((context.key, context) for context in contexts)
        while len(self._contexts) > MOST_DAMAGED:
            del self._contexts[next(iter(self._contexts))]

    def prefix_before(self, keys: Sequence[Key]) -> Sequence[Key]:
        """The longest prefix of ``keys`` without a damaged block."""
        return keys[: next((at for at, key in enumerate(keys) if key in self._contexts), len(keys))]

    @contextmanager
    def claim(self, n: int) -> Iterator[list[Context]]:
        """At most ``n`` of them, for the caller alone meanwhile: those first that were added, or asked for, the longest ago."""
        free = (context for key, context in self._contexts.items() if key not in self._claimed)
        some = list(islice(free, n))
        self._claimed.update(context.key for context in some)
        try:
            yield some
        finally:
            self._claimed.difference_update(context.key for context in some)

    def clear(self, contexts: Iterable[Context]) -> None:
        """What lies under these keys is something else now."""
        for context in contexts:
            if self._contexts.get(context.key) is context:
                del self._contexts[context.key]

    def note_purged(self, contexts: Sequence[Context], answers: Sequence[Deletion]) -> None:
        """What the deletion of these came to. What stays goes behind the others."""
        for context, answer in zip(contexts, answers, strict=True):
            if self._contexts.get(context.key) is context:
                del self._contexts[context.key]
                if answer not in (Deletion.DELETED, Deletion.MISSING):
                    self._contexts[context.key] = context

    def note_deleted(self, keys: Sequence[Key], answers: Sequence[Deletion]) -> None:
        """These were deleted by request."""
        for key, answer in zip(keys, answers, strict=True):
            if answer in (Deletion.DELETED, Deletion.MISSING):
                self._contexts.pop(key, None)

    def note_stored(self, keys: Sequence[Key], outcomes: list[Outcome]) -> None:
        """What is stored anew is not damaged; a duplicate of a damaged block is none, and may be stored again later."""
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=False)):
            if outcome == STORED:
                self._contexts.pop(key, None)
            elif outcome == DUPLICATE and key in self._contexts:
                outcomes[at] = DAMAGED
