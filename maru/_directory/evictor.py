"""Choice of keys and regions to evict. Pure.

Keys go by the order of use of their owner, abandoned regions as a whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from .changes import Changes
from .eviction_guard import EvictionGuard
from .pins import Held
from .regions import Region
from .sessions import Session
from .slices import AT_ONCE, LOOKS_AT_ONCE, USES_AT_ONCE, Slices
from .statistics import Counters

# A search that passed over so many held keys and found too little is not repeated at once: it would take as long again.
_LONG_SEARCH: Final = 10_000
_REST: Final = 1e-5  # seconds for each key passed over: some fifty times its cost

_MOST_TURNS: Final = 256
"""Slices in which uses are counted: one for each client.

The rest of a client that notes without end is counted later.
"""

MOST_FOR_ROOM: Final = 2_048
"""Most keys evicted for the quota of one registration.

The rest of a registration that needs more is refused; a repeated request finds more room.
"""


class Evictor:
    """Finds keys that may be evicted, and evicts them.

    Keys of a living published owner are never evicted, and none are in quiet time.
    """

    def __init__(self, changes: Changes, guard: EvictionGuard, counters: Counters) -> None:
        self._changes = changes
        self._state = changes.state
        self._guard = guard
        self._counters = counters
        self._is_noting = False
        """Whether uses are counted in slices."""

    def evict(self, session: Session, n: int, now: float, also: Container[str] = ()) -> int:
        """Evict the ``n`` least recently used keys of this owner.

        Return how many went. Keys that are held or in ``also`` stay. A search passes over a bounded number of held
        keys: the next one goes on after them.
        """
        return self._evict(session, n, now, also)[0] if self._may(session, now) else 0

    def evict_in_slices(self, session: Session, n: int, now: float) -> Slices[int]:
        """Evict ``n`` keys of this owner, passing over any held keys.

        It works as :meth:`evict` otherwise.
        """
        went = looked = 0
        if not self._may(session, now):
            return 0
        known = session.forgetting + sum([len(region.keys_at) for region in session.regions.values()])
        while True:
            gone, passed = self._evict(session, min(AT_ONCE, n - went), now)
            went, looked = went + gone, looked + gone + passed
            if went >= n or not passed + gone:
                return went
            if looked >= known:  # every key was looked at once
                if looked - went > _LONG_SEARCH:
                    session.barren_until = now + (looked - went) * _REST
                return went
            now = yield
            self._changes.settle()
            if self._state.sessions.get(session.number) is not session or not self._may(session, now):
                return went

    def _evict(self, session: Session, n: int, now: float, also: Container[str] = ()) -> tuple[int, int]:
        """Return the number of evicted keys and of held keys passed over."""
        held = self._guard.held(also, now)
        found = self._search(session, n, held, now)
        went = self._remove(found)
        if went < len(found):  # a reader has begun to hold some of them meanwhile: evict others in their place
            went += self._remove(self._search(session, len(found) - went, held, now))
        return went, held.passed

    def evict_bytes(
        self,
        sessions: Iterable[Session],
        wanted_bytes: int,
        also: Container[str],
        now: float,
        most: int = MOST_FOR_ROOM,
    ) -> int:
        """Evict keys of these owners until ``wanted_bytes`` are free. Return how many.

        The keys of the first owner go first.

        Args:
            sessions: the owners whose keys may go.
            wanted_bytes: the bytes to free.
            also: keys that stay, next to those that are held.
            now: the time.
            most: keys that go at most.
        """
        located = self._state.located
        victims: list[str] = []
        for session in sessions:
            if len(victims) >= most:
                break
            if not self._may(session, now):
                continue
            held = self._guard.held(also, now)
            while wanted_bytes > 0 and len(victims) < most and held.passed <= LOOKS_AT_ONCE:
                found = self._search(session, 1, held, now)
                if not found:
                    break
                wanted_bytes -= located[found[0]].length
                victims += found
        return self._remove(victims)

    def abandoned(self, wanted_bytes: int, now: float) -> list[Region]:
        """Return the longest abandoned regions that may go whole, of ``wanted_bytes`` together.

        If they have less together, the list is empty. Nothing is claimed, and no key is looked at.
        """
        self._guard.expire_pins(now)
        if self._guard.is_quiet(now):
            return []
        chosen: list[Region] = []
        for region in self._state.abandoned.values():
            if wanted_bytes <= 0:
                break
            if not region.pinned and region.read_until <= now:
                chosen.append(region)
                wanted_bytes -= region.length
        return chosen if wanted_bytes <= 0 else []

    def note_uses(self, by: int | None = None, most: int = USES_AT_ONCE) -> None:
        """Count uses without a message of one session, or of all.

        Called before victims are chosen. At most ``most`` are counted at once. Of all sessions, the rest is counted in
        slices; until these are done, further calls for all sessions count nothing.
        """
        if by is not None:
            self._note_some(by, most)
        elif not self._is_noting:
            self._note_some(None, most)
            if self._guard.has_uses():
                self._is_noting = True
                self._state.chores.append(self._note_in_slices())

    def _note_in_slices(self) -> Slices[None]:
        try:
            for _ in range(_MOST_TURNS):
                yield
                self._changes.settle()
                self._note_some(None, USES_AT_ONCE)
                if not self._guard.has_uses():
                    return
        finally:
            self._is_noting = False

    def _note_some(self, by: int | None, most: int) -> None:
        located = self._state.located
        for names in self._guard.take_uses(by, most):
            there = [name for name in reversed(names) if name in located]
            self._state.use(there, [located[name] for name in there])
            self._counters.found += len(there)

    def _may(self, session: Session, now: float) -> bool:
        self._guard.expire_pins(now)
        self.note_uses()
        return not (session.published or now < session.barren_until or self._guard.is_quiet(now))

    def _search(self, session: Session, n: int, held: Held, now: float) -> list[str]:
        victims, _ = session.policy.make_room((), n, held)
        if session.forgetting:  # keys of a region that it has handed back, which stays or goes as a whole
            located, regions = self._state.located, session.regions
            own = [key for key in victims if (at := located.get(key)) is not None and at.region_id in regions]
            held.passed += len(victims) - len(own)
            victims = own
        if len(victims) < n and held.passed > _LONG_SEARCH:
            session.barren_until = now + held.passed * _REST
        return victims

    def _remove(self, victims: list[str]) -> int:
        kept = self._guard.claim(victims)
        if kept:  # somebody has begun to hold it since the search: back into the order of use, which has forgotten it
            stay = [key for key in victims if key in kept]
            self._state.use(stay, [self._state.located[key] for key in stay], are_new=True)
            victims = [key for key in victims if key not in kept]
        self._changes.remove(victims)
        self._counters.evicted += len(victims)
        return len(victims)
