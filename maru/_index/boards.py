"""All boards of a server's clients, with the registrations held there. Pure.

A held registration may not be removed, since a client reads it.

Rule 1. A registration that is to go is *claimed* first: its sequence is marked in the index, then all boards are read,
        after a full fence. If it is on none of them, nobody can hold it any more, and it must be removed before
        anything else happens; otherwise it stays.
Rule 2. A board counts until it is closed, which is when the lease of its client has ended. Its contents are checked
        against the registrations: garbage holds nothing.
Rule 3. The number of boards is bounded, and so are the cells of each: reading all of them is bounded, whatever they
        contain. Each opener of sessions has a share of them, so that the boards of one do not keep others from reading
        without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from .board import USES, BoardReader
from .tenants import TenantIndexes

MOST_BOARDS: Final = 256
"""Most clients that hold without a message; all others pin by message.

As many full boards are read in some ten milliseconds.
"""
SHARE: Final = 8
"""Divisor for the share of boards of one opener of sessions.

A client opens one session, so a host has room for many.
"""


@attrs.frozen
class _Open:
    tenant: str
    board: BoardReader
    opener: object


class Boards:
    """Open boards, by the number of the session that holds with them.

    Args:
        indexes: the indexes of the held registrations.
        fence: a full fence of the processor.
    """

    def __init__(self, indexes: TenantIndexes, fence: Callable[[], None]) -> None:
        self._indexes = indexes
        self._fence = fence
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, holder: object) -> bool:
        return holder in self._open

    @property
    def is_full(self) -> bool:
        """Whether there are as many boards as allowed."""
        return len(self._open) >= MOST_BOARDS

    def why_not(self, holder: int, opener: object) -> str:
        """Return the reason why a session can have no board, or "".

        Args:
            holder: the session.
            opener: the connection that opened it.
        """
        if holder in self._open:
            return ""
        if self.is_full:
            return f"{len(self._open)} sessions have a board already, as many as are allowed"
        own, share = [one.opener for one in self._open.values()].count(opener), MOST_BOARDS // SHARE
        if own >= share:
            return f"{own} sessions of one connection have a board already, of at most {share}"
        return ""

    def open(self, holder: int, tenant: str, memory: Any, opener: object = None) -> None:
        """Open the board of a session.

        The pages noted on it count as held.

        Args:
            holder: the session.
            tenant: the tenant that its client belongs to.
            memory: the memory of the board.
            opener: the connection that opened the session, whose share the board counts for until it is closed; that
                may be after the end of the session. ``None``: the session itself.
        """
        self._open[holder] = _Open(tenant, BoardReader(memory), holder if opener is None else opener)

    def close(self, holder: int) -> None:
        """Close the board of this session, which holds nothing any more."""
        self._open.pop(holder, None)

    def close_all(self) -> None:
        """Close all boards."""
        self._open.clear()

    def held(self) -> set[int]:
        """Return the generations on the boards now.

        Numbers that are no generation may be among them.
        """
        held: set[int] = set()
        for one in self._open.values():
            held.update(one.board.held())
        held.discard(0)
        return held

    def holders(self, generation: int) -> int:
        """Return the number of boards that hold this generation."""
        return sum([generation in one.board.held() for one in self._open.values()])

    def claim(self, names: Sequence[str], generations: Sequence[int]) -> set[int]:
        """Let nobody else hold these registrations. Return the generations already held.

        Those stay. All others have to be removed now, or :meth:`give_up` has to be called for them.
        """
        if not self._open:
            return set()
        self._indexes.mark(names, generations)
        # Between a mark and a read of the boards, as between a cell and a read of the index: without it a processor may
        # do both reads before either store is seen.
        self._fence()
        held = self.held().intersection(generations)
        if held:
            stay = [at for at, generation in enumerate(generations) if generation in held]
            self.give_up([names[at] for at in stay], [generations[at] for at in stay])
        return held

    def give_up(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Release the claim on these registrations.

        They can be held again.
        """
        self._indexes.unmark(names, generations)

    def has_uses(self) -> bool:
        """Return whether there are uses that were not taken yet."""
        return any([one.board.has_uses for one in self._open.values()])

    def take_uses(self, by: int | None = None, most: int = USES) -> list[list[str]]:
        """Take names that this session, or each, has used, the deepest first.

        Uses since the last call.

        Args:
            by: the session; ``None``: each in its turn, so that one that has used much leaves a turn to others.
            most: uses that are taken at most. The rest is taken next time.
        """
        found = []
        for holder in list(self._open) if by is None else [by] if by in self._open else []:
            one = self._open[holder]
            uses = one.board.take_uses(most)
            if uses:
                self._open[holder] = self._open.pop(holder)  # after all others
                if names := self._indexes.names_at(one.tenant, uses):
                    found.append(names)
                most -= len(uses)
                if not most:
                    break
        return found
