"""What could not be decoded, until it is gone: of tiers below that cannot be told so while it is held. No bytes.

A tier that can (:class:`backends.abc.ForgettingLease`) drops the very block that was read, and nothing is remembered here. Of
any other, only its key can be deleted, later, and somebody else may have deleted it by then and stored it anew.

Rule 1. It is no longer found here, and deleted as soon as nobody holds it.
Rule 2. Right before that it is read once more, as whose it was read before. What can be decoded now was stored anew: it stays,
        and is found again. So is what is another tenant's now: to him it may be good. What is stored anew behind that
        and before the deletion arrives, goes with it.
Rule 3. As many at a time as are worth a copy: who asks for something must not wait for a long reading of what is of no use. And
        one who does so for each: a second deletion on the way would find what was stored anew behind the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from ..abc import DUPLICATE, STORED, Deletion, Key, Outcome, Rejected
from ._contract import Context

DAMAGED: Final = Rejected("damaged")
"""Why a block is not stored anew yet: what could not be decoded under its key is still held by somebody."""

MOST_CONDEMNED: Final = 65_536
"""So many keys are remembered as condemned, where the tier below does not delete them. The oldest is then found again."""


class Condemned:
    """Those of one wrapped tier, each with what was known of it when it was read."""

    def __init__(self) -> None:
        self._contexts: dict[Key, Context] = {}
        self._in_hand: set[Key] = set()  # being read once more, or deleted

    def __len__(self) -> int:
        return len(self._contexts)

    def __contains__(self, key: object) -> bool:
        return key in self._contexts

    def add(self, contexts: Iterable[Context]) -> None:
        """These could not be decoded."""
        self._contexts.update((context.key, context) for context in contexts)
        while len(self._contexts) > MOST_CONDEMNED:
            del self._contexts[next(iter(self._contexts))]

    def before(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Those of ``keys`` that stand before the first of these."""
        return keys[: next((at for at, key in enumerate(keys) if key in self._contexts), len(keys))]

    @contextmanager
    def in_hand(self, n: int) -> Iterator[list[Context]]:
        """So many at most, for nobody else meanwhile: those that were condemned, or asked for in vain, the longest ago."""
        free = (context for key, context in self._contexts.items() if key not in self._in_hand)
        some = list(islice(free, n))
        self._in_hand.update(context.key for context in some)
        try:
            yield some
        finally:
            self._in_hand.difference_update(context.key for context in some)

    def acquit(self, contexts: Iterable[Context]) -> None:
        """What lies there under these keys is something else now."""
        for context in contexts:
            if self._contexts.get(context.key) is context:
                del self._contexts[context.key]

    def asked(self, contexts: Sequence[Context], answers: Sequence[Deletion]) -> None:
        """What became of these, which were to be deleted. What stays has its next turn behind the others."""
        for context, answer in zip(contexts, answers, strict=True):
            if self._contexts.get(context.key) is context:
                del self._contexts[context.key]
                if answer not in (Deletion.DELETED, Deletion.MISSING):
                    self._contexts[context.key] = context

    def deleted(self, keys: Sequence[Key], answers: Sequence[Deletion]) -> None:
        """Somebody has deleted these by request."""
        for key, answer in zip(keys, answers, strict=True):
            if answer in (Deletion.DELETED, Deletion.MISSING):
                self._contexts.pop(key, None)

    def judge(self, keys: Sequence[Key], outcomes: list[Outcome]) -> None:
        """What is new is not what was condemned; and a duplicate of that is none: the store may be tried again."""
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=False)):
            if outcome == STORED:
                self._contexts.pop(key, None)
            elif outcome == DUPLICATE and key in self._contexts:
                outcomes[at] = DAMAGED
