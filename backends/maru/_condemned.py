"""What was found damaged in the page store, until it is gone: keys, each with the registration that was read. Pure.

Rule 1. It is not found here any more, and deleted as soon as nobody holds it.
Rule 2. That registration is meant and no other. What was stored anew under its key, in whatever process, has another
        generation, and is neither deleted nor hidden for longer than it takes to ask.
Rule 3. A generation is of one *era* of the handler: another server may count anew. Nothing is known of what was found before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ..abc import DUPLICATE, STORED, Deletion, Key, Outcome, Rejected

DAMAGED: Final = Rejected("damaged")
"""Why a block is not stored anew yet: what was found damaged under its key is still held by somebody."""


class Condemned:
    """Those of one tier."""

    def __init__(self) -> None:
        self._generation: dict[Key, int] = {}
        self._era = 0

    def __len__(self) -> int:
        return len(self._generation)

    def __contains__(self, key: object) -> bool:
        return key in self._generation

    def add(self, blocks: Iterable[tuple[Key, int]], era: int) -> None:
        """These were found damaged, each in this generation."""
        self._begin(era)
        self._generation.update(blocks)

    def before(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Those of ``keys`` that stand before the first of these."""
        return keys[: next((at for at, key in enumerate(keys) if key in self._generation), len(keys))]

    def columns(self, era: int) -> tuple[list[Key], list[int]]:
        """The keys and their generations, in this era."""
        self._begin(era)
        return list(self._generation), list(self._generation.values())

    def asked(self, keys: Sequence[Key], generations: Sequence[int], answers: Sequence[Deletion]) -> None:
        """What became of these, which were to be deleted."""
        for key, generation, answer in zip(keys, generations, answers, strict=True):
            if answer is not Deletion.PINNED and self._generation.get(key) == generation:
                del self._generation[key]

    def judge(self, keys: Sequence[Key], outcomes: list[Outcome]) -> int:
        """What is new is not what was found damaged; and a duplicate of that is none: the store may be tried again.

        Returns:
            How many duplicates are none.
        """
        none = 0
        if self._generation:
            for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
                if outcome == STORED:
                    self._generation.pop(key, None)
                elif outcome == DUPLICATE and key in self._generation:
                    outcomes[at] = DAMAGED
                    none += 1
        return none

    def _begin(self, era: int) -> None:
        if era != self._era:
            self._era = era
            self._generation.clear()
