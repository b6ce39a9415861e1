"""What may not go now, and until when: pins, readers without pins, and the quiet time after a restart. Pure.

None of this is found again after a restart; the quiet time stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from .limits import Limits
from .pins import Held, Pins, ReadGrace
from .sessions import Leases
from .state import State


class Guards:
    """The pins on a state, and all else that keeps its keys from going. Keeps ``pinned`` and ``read_until`` of regions."""

    def __init__(self, state: State, limits: Limits) -> None:
        self._state = state
        self._pins = Pins()
        self.pinned = self._pins.counts
        """The pinned keys."""
        self._grace = ReadGrace(limits.v1_read_grace)
        self._v1_read_grace = limits.v1_read_grace
        self._departed = Leases()  # holders that are gone, and whose pins count on
        self._quiet_until = self._surely_quiet_until = -math.inf
        self._away: set[int] = set()  # sessions of ours from before the restart that have not come back

    # --- pins -----------------------------------------------------------------------------------------------------

    def hold(self, by: int, keys: Sequence[str], region_ids: Collection[int]) -> None:
        """One more pin for each of these keys, which are there, in these regions."""
        first = self._pins.add(by, keys)
        regions, located = self._state.regions, self._state.located
        if len(region_ids) == 1:
            [region_id] = region_ids
            regions[region_id].pinned += len(first)
        else:
            for key in first:
                regions[located[key].region_id].pinned += 1

    def unpin(self, by: int, keys: Iterable[str]) -> list[bool]:
        """One pin less for each; whether there was one."""
        dropped, last = self._pins.drop(by, keys)
        self._released(last)
        return dropped

    def enter(self, session_id: int, turn: int) -> bool:
        """This session speaks in this turn; False if that is over."""
        return self._pins.enter(session_id, turn)

    def vouch(self, session_id: int, keys: Sequence[str], counts: Sequence[int], last: bool) -> int:
        """So many of its pins of earlier turns stay; how many went, as there were no others to be named."""
        self._pins.vouch(session_id, keys, counts)
        if not last:
            return 0
        dropped, gone = self._pins.drop_earlier(session_id)
        self._released(gone)
        return dropped

    def leave(self, holder: int, until: float) -> None:
        """This holder is gone: its pins count until then."""
        if self._pins.has(holder):
            self._departed.set(holder, until)
        else:
            self._pins.drop_all(holder)

    def settle(self, now: float) -> None:
        """Pins of holders that are gone end when their time has come."""
        if self._departed.next() <= now:
            for holder in self._departed.due(now):
                self._released(self._pins.drop_all(holder))

    def next_end(self) -> float:
        """When :meth:`settle` may have something to do, or earlier; ``math.inf`` if there is nothing."""
        return self._departed.next()

    def forget(self, keys: Iterable[str]) -> None:
        """These keys, which are there, are about to go, whoever has pinned them."""
        pinned = [key for key in keys if key in self.pinned]
        self._released(pinned)
        self._pins.forget(pinned)

    def _released(self, keys: Iterable[str]) -> None:
        regions, located = self._state.regions, self._state.located
        for key in keys:
            regions[located[key].region_id].pinned -= 1

    # --- readers without pins -------------------------------------------------------------------------------------

    def note_read(self, keys: Iterable[str], region_ids: Iterable[int], now: float) -> None:
        """A published connection has looked up these keys, which lie in these regions."""
        self._grace.note(keys, now)
        for region_id in region_ids:
            self._state.regions[region_id].read_until = now + self._v1_read_grace

    def held(self, also: Container[str], now: float) -> Held:
        """The keys that may not be evicted now, and ``also`` these."""
        self._grace.forget_before(now)
        return Held(self._pins, self._grace, also)

    # --- quiet time -----------------------------------------------------------------------------------------------

    def begin_quiet(self, ends: Mapping[int, float], surely: float) -> None:
        """It is quiet until all these sessions have come back or have ended; and ``surely`` until then, whoever comes back."""
        self._away.update(ends)
        self._quiet_until = max(ends.values(), default=-math.inf)
        self._surely_quiet_until = surely

    def back(self, number: int) -> None:
        """This session has come back and knows of the restart; or it never will."""
        self._away.discard(number)

    def quiet(self, now: float) -> bool:
        """Whether old views may be in use that nobody here knows of."""
        return now < self._surely_quiet_until or (bool(self._away) and now < self._quiet_until)
