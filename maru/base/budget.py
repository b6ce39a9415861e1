"""Shares of a limit of this process among its peers. Pure.

Limits are numbers of descriptors or mappings, or bytes.

    limit of the process, open doors, holder and amount  ->  granted or refused

A *door* is a listener, or another place where peers make a process take resources: connections of engines, their
memory.

Rule 1. A door asks before it accepts, opens, maps or expands anything for a peer. A grant is given back once.
Rule 2. A part of the limit is reserved for the process itself. The doors share the rest by weight, so that peers at one
        door never use up the share of another. A closed door leaves its share to the others.
Rule 3. One holder has at most a part of its door, so that it does not keep all others out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable


class Budget:
    """A limit of a process, and the doors that share it.

    Args:
        limit: returns the current limit.
        reserved: fraction of the limit that is reserved for the process itself.
        least: least amount to reserve.
    """

    def __init__(self, limit: Callable[[], int], *, reserved: float = 0.0, least: int = 0) -> None:
        self._limit = limit
        self._reserved, self._least = reserved, least
        self._weights: Counter[Door] = Counter()

    @property
    def total(self) -> int:
        """Amount for all doors together."""
        limit = self._limit()
        return max(0, limit - max(self._least, int(limit * self._reserved)))

    def open(self, weight: int, *, most: int | None = None, each: float = 1.0) -> Door:
        """Open a door, which the caller closes.

        Args:
            weight: the door's share of the total is its weight divided by the sum of all weights.
            most: an upper bound, if lower than that share.
            each: fraction of the door that one holder may have.
        """
        door = Door(self, most, each)
        self._weights[door] = weight
        return door

    def share(self, door: Door) -> int:
        """Return the amount for one door: at least 1, 0 once closed."""
        weight = self._weights[door]
        return max(1, self.total * weight // self._weights.total()) if weight else 0

    def close(self, door: Door) -> None:
        """Leave the share of a door to the others. Idempotent."""
        self._weights.pop(door, None)


class Door:
    """The peers of one kind, and the amount that each holds.

    Made by :meth:`Budget.open`.
    """

    def __init__(self, budget: Budget, most: int | None, each: float) -> None:
        self._budget = budget
        self._most = most
        self._each = each
        self._held: Counter[Hashable] = Counter()
        self._returned: deque[tuple[Hashable, int]] = deque()
        self.refused: int = 0
        """Number of refused requests."""

    @property
    def most(self) -> int:
        """Amount that all holders together may have now."""
        share = self._budget.share(self)
        return share if self._most is None else min(share, self._most)

    @property
    def each(self) -> int:
        """Amount that one holder may have now."""
        return max(1, int(self.most * self._each))

    @property
    def held(self) -> int:
        """Amount that all holders have now."""
        self._settle()
        return self._held.total()

    def held_by(self, holder: Hashable) -> int:
        """Return the amount that one holder has."""
        self._settle()
        return self._held[holder]

    def take(self, holder: Hashable = None, amount: int = 1) -> bool:
        """Grant an amount to a holder if there is room for it.

        A grant is given back once; a refusal changes nothing.
        """
        if self.held + amount > self.most or self._held[holder] + amount > self.each:
            self.refused += 1
            return False
        self._held[holder] += amount
        return True

    def give_back(self, holder: Hashable = None, amount: int = 1) -> None:
        """Give back a granted amount.

        Callable from any thread, and from finalizers: the amount is subtracted at the next query.
        """
        self._returned.append((holder, amount))

    def close(self) -> None:
        """Leave this share to the other doors. Idempotent."""
        self._budget.close(self)

    def _settle(self) -> None:
        while self._returned:
            holder, amount = self._returned.popleft()
            self._held[holder] -= amount
            if self._held[holder] <= 0:
                del self._held[holder]
