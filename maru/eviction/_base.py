"""Common code of policies with several queues: victims and held keys.

A held key that is met while taking victims is *skipped*: removed from the queues, with its place recorded. If it
stayed, it would be met again at every search: moving it to the back of its queue helps LRU, which has one, but not a
policy that prefers one of its queues over others, since it may prefer the one in which everything is held.

A policy is not notified when a key is no longer held. So each search first checks twice as many of the skipped keys as
victims are needed, in order, and the free ones return to the front of their queue, their former place. A use brings a
key back as well. Only if the queues run empty are all skipped keys checked, since as many victims as possible must be
found. Each key is skipped once for each time it was used, brought in or returned: this is what makes rule 3 hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final, Generic

from ._candidates import Candidates, P
from ._contract import K

LOOKS: Final = 2
"""Skipped keys checked for each victim.

More than one, so that each is checked in the end.
"""


class QueuePolicy(ABC, Generic[K, P]):
    """A policy with several queues, which skips held keys.

    Of the next victims the deepest goes first. A subclass decides which key is next, and changes its queues for a use.
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
            # Back to their queues first: only the subclass knows how to forget a key.
            for key, place in self._candidates.take_back(keys):
                self._put_back(key, place)
        skipped = self._skipped
        for key in keys:
            if skipped.pop(key, None) is None:
                self._forget(key)

    # --- methods of a subclass ----------------------------------------------------------------------------------------

    @abstractmethod
    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Choose victims and rejected newcomers: see :class:`EvictionPolicy`."""

    @abstractmethod
    def _queued(self) -> int:
        """Return the number of keys in the queues."""

    @abstractmethod
    def _use_all(self, keys: Sequence[K]) -> None:
        """Use keys that are in the queues or unknown."""

    @abstractmethod
    def _grown(self) -> None:
        """Adapt to a capacity that has become known, or has grown."""

    @abstractmethod
    def _take(self) -> tuple[K, P] | None:
        """Take the next victim out of its queue.

        It may turn out to be held, so nothing else may follow from it.
        """

    @abstractmethod
    def _put_back(self, key: K, place: P) -> None:
        """Put a key back at the front of its former queue."""

    @abstractmethod
    def _forget(self, key: K) -> None:
        """Take a key out of the queues, if it is there."""

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Update the capacity before making room.

        The owner is full then, so the number of known keys is about its capacity.
        """
        known = len(self)
        if known > self._capacity:
            self._capacity = known
            self._grown()

    def _next(self, held: Container[K]) -> tuple[K, P] | None:
        """Take the next victim, which may be held.

        If depths are known, it is the deepest of the next ones.
        """
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
            # A held key must not take a candidate's place: it may be held for long.
            if depth is None or key in held:
                return taken
            candidates.add(key, depth, place)
        return candidates.pop(known) if candidates else None

    def _return(self, looks: int, held: Container[K]) -> None:
        """Check ``looks`` skipped keys, and return the free ones to their places."""
        skipped = self._skipped
        for _ in range(min(looks, len(skipped))):
            key, place = skipped.popitem(last=False)
            if key in held:
                skipped[key] = place
            else:
                self._put_back(key, place)
