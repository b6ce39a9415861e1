"""The contract of an eviction policy, with its rules.

A policy receives the keys that are used, and returns the keys to evict. It never holds bytes, slots or counts of
guards: it is one instance per owner, called by that owner on one thread, and knows keys only. The owner determines
which keys must stay.

Rule 1. A key is known from its first use until it is a victim or discarded. A victim is forgotten by the answer itself.
        (Forgotten as a present key: a policy may remember, within bounds, that it once was present.)
Rule 2. Uses come deepest first: of a prefix's blocks the last one first, so that its head is the most recent. A prefix
        is of no use without its head, so the head must go last. A writer that stores a prefix chunk by chunk cannot
        keep to that: it passes the depth of each block with its key, and of those whose turn has nearly come the
        deepest goes first (`_candidates`). Depths that are not passed change nothing.
Rule 3. The cost of an answer does not grow with the number of keys known nor with the number held (amortized).

A policy learns the capacity of its owner from the requests for room: it is the most keys known at such a time. A share
of the capacity, such as a window or a memory of evicted keys, is a share of that.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Policy that chooses the keys to evict.

    One instance per owner; not thread-safe; never blocks.
    """

    def use(self, keys: Sequence[K], depths: Sequence[int | None] | None = None) -> None:
        """Count a use of these keys, the deepest of a prefix first.

        Unknown keys are added.

        Args:
            keys: the used keys.
            depths: the index of each key in its prefix, if known. Without them, a key's earlier depth stays valid.
        """
        ...

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Find ``n`` places for ``incoming``.

        Args:
            incoming: the keys that are to come in, the head of a prefix first; this call does not add them to the known
                keys.
            n: missing places: at most ``len(incoming)``, unless room is made ahead of need.
            held: keys that must stay now; only ``in`` is used on it.

        Returns:
            The victims, which are forgotten, and those of ``incoming`` that are not worth a place (rejected before they
            are copied): ``n`` together, or fewer if the rest is held.
        """
        ...

    def discard(self, keys: Iterable[K]) -> None:
        """Forget these keys, which were deleted and not evicted.

        Unknown ones are ignored.
        """
        ...
