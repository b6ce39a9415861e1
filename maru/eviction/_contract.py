"""The contract of an eviction policy, and the rules that every one keeps.

A policy is told which keys are used and answers which must go. It never holds bytes, slots or counts of guards: it is one
instance per owner, called by that owner on one thread, and knows keys only. The owner says which keys must stay.

Rule 1. A key is known from its first use until it is a victim or discarded. A victim is forgotten by the answer itself.
        (Forgotten as something that is there: a policy may remember, within bounds, that it once was.)
Rule 2. Uses come deepest first: of a prefix's blocks the last one first, so that its head is the most recent. A
        prefix is of no use without its head, so the head must go last.
        A writer that stores a prefix chunk by chunk cannot keep to that: it says the depth of each block beside its key,
        and of those whose turn has nearly come the deepest goes first (`_candidates`). Depths that are not said change nothing.
Rule 3. The cost of an answer does not grow with the number of keys known nor with the number held (amortized).

A policy learns how much its owner holds from being asked for room: the most keys it ever knew by then. What is a share of
the capacity, a window or a memory of the evicted, is a share of that.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Chooses the keys to evict for others. One instance per owner; not thread-safe; never blocks."""

    def use(self, keys: Sequence[K], depths: Sequence[int | None] | None = None) -> None:
        """Count a use of these keys, the deepest of a prefix first. Unknown keys are added.

        Args:
            keys: what was used.
            depths: the index of each in its prefix, where that is known. Without the column, what was said of a key before
                stands.
        """
        ...

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Find ``n`` places for ``incoming``.

        Args:
            incoming: the keys that are to come in, the head of a prefix first; they are not known by this call.
            n: how many places are missing: at most ``len(incoming)``, unless room is made ahead of need.
            held: keys that may not go now; only ``in`` is asked of it.

        Returns:
            The victims, which are forgotten, and those of ``incoming`` that are not worth a place (rejected before they
            are copied): ``n`` together, or fewer where the rest is held.
        """
        ...

    def discard(self, keys: Iterable[K]) -> None:
        """Forget these keys, which were deleted and not evicted. Unknown ones are ignored."""
        ...
