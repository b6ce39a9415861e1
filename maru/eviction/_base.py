"""What the policies that keep several queues share: finding victims, and keeping held keys out of the way.

A held key that is met where victims are taken is *skipped*: put out of the queues, with the place it had. Left in, it would be
met again at every search: moving it to the back of its queue helps LRU, which has one, but not a policy that prefers one of
its queues over others, since it may prefer the one in which everything is held.

A policy is not told that a key is no longer held. So each search first looks at twice as many of the skipped keys as victims
are wanted, in order, and those that are free return to the front of their queue, where they were. A use brings a key back as
well. Only where the queues run empty are all skipped keys looked at, since as many victims as possible must be found. Each key
is skipped once for each time it was used, brought in or returned: this is what makes rule 3 hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final, Generic

from ._candidates import Candidates, P
from ._contract import K

LOOKS: Final = 2
"""Skipped keys looked at for each victim: more than one, so that each is looked at in the end."""


class QueuePolicy(ABC, Generic[K, P]):
    """A policy that keeps its keys in queues, skips those that are held, and of the next ones lets the deepest go first.

    A subclass decides which key is next, and changes its queues for a use.
    """

    def __init__(self) -> None:
        self._skipped: OrderedDict[K, P] = OrderedDict()
        self._depths: dict[K, int] = {}
        self._candidates: Candidates[K, P] = Candidates()
        self._capacity = 0

    def __len__(self) -> int:
        return self._queued() + len(self._skipped) + len(self._candidates)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} keys>"

    def use(self, keys: Sequence[K], depths: Sequence[int | None] | None = None) -> None:
        """Count one use of each of these keys, in order."""
        if depths is not None:
            self._depths.update({key: at for key, at in zip(keys, depths, strict=True) if at is not None})
        if self._candidates:
            for key, place in self._candidates.take_back(keys):
                self._put_back(key, place)
        skipped = self._skipped
        if skipped:
            for key in keys:
                if key in skipped:
                    self._put_back(key, skipped.pop(key))
        self._use_all(keys)

    def discard(self, keys: Iterable[K]) -> None:
        """Forget these keys."""
        if self._depths:
            keys = list(keys)
            for key in keys:
                self._depths.pop(key, None)
            # Back to their queues first: what it means to forget a key only its policy knows.
            for key, place in self._candidates.take_back(keys):
                self._put_back(key, place)
        skipped = self._skipped
        for key in keys:
            if skipped.pop(key, None) is None:
                self._forget(key)

    # --- what a subclass says -----------------------------------------------------------------------------------------

    @abstractmethod
    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """See :class:`EvictionPolicy`."""

    @abstractmethod
    def _queued(self) -> int:
        """How many keys are in the queues."""

    @abstractmethod
    def _use_all(self, keys: Sequence[K]) -> None:
        """Use keys that are in the queues or unknown."""

    @abstractmethod
    def _grown(self) -> None:
        """Adapt to a capacity that was unknown before, or turned out to be larger."""

    @abstractmethod
    def _take(self) -> tuple[K, P] | None:
        """Take the next victim out of its queue. It may turn out to be held, so nothing else may follow from it."""

    @abstractmethod
    def _put_back(self, key: K, place: P) -> None:
        """To the front of the queue it was taken from."""

    @abstractmethod
    def _forget(self, key: K) -> None:
        """Take a key out of the queues, if it is there."""

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Room is wanted: as many keys as there are now must be about what the owner holds."""
        known = len(self)
        if known > self._capacity:
            self._capacity = known
            self._grown()

    def _next(self, held: Container[K]) -> tuple[K, P] | None:
        """Take the next victim, which may be held: the deepest of the next ones if depths are known."""
        depths, candidates = self._depths, self._candidates
        if not depths:
            return self._take()
        known = self._capacity
        while candidates.want(known):
            taken = self._take()
            if taken is None:
                break
            key, place = taken
            depth = depths.get(key)
            # A held one must not take a candidate's place: it may be held for long.
            if depth is None or key in held:
                return taken
            candidates.add(key, depth, place)
        return candidates.pop(known) if candidates else None

    def _return(self, looks: int, held: Container[K]) -> None:
        """Look at so many of the skipped keys; those that are free go back where they were."""
        skipped = self._skipped
        for _ in range(min(looks, len(skipped))):
            key, place = skipped.popitem(last=False)
            if key in held:
                skipped[key] = place
            else:
                self._put_back(key, place)
