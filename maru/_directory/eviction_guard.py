"""Which keys must not be evicted or deleted now: pinned ones, recently read ones, and all keys after a restart. Pure.

None of this is journaled. After a restart the earlier pins are unknown, so no key may go during the quiet time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from .limits import Limits
from .pins import Held, Pins, ReadGrace
from .sessions import Leases
from .state import State


class EvictionGuard:
    """The pins on the keys of a state, the reads of published clients, and the quiet time after a restart.

    It alone keeps ``pinned`` and ``read_until`` of the regions, from which is seen at once whether one may be evicted whole.
    """

    def __init__(self, state: State, limits: Limits) -> None:
        self._state = state
        self._pins = Pins()
        self.pinned = self._pins.counts
        """The pinned keys, with their pins."""
        self._grace = ReadGrace(limits.v1_read_grace)
        self._v1_read_grace = limits.v1_read_grace
        # Holders that have ended, whose pins count until then: a reader stops using its views by its own clock, which may be
        # late by the server's, and it may have ended without knowing (its session was lost, its connection was cut).
        self._ended_holders = Leases()
        self._quiet_until = self._surely_quiet_until = -math.inf
        self._awaited: set[int] = set()  # sessions of ours from before the restart that have not said the new epoch

    # --- pins -----------------------------------------------------------------------------------------------------

    def pin(self, by: int, keys: Sequence[str], region_ids: Collection[int]) -> None:
        """Add one pin to each of these keys, all of which are there, in these regions."""
        first = self._pins.add(by, keys)
        regions, located = self._state.regions, self._state.located
        if len(region_ids) == 1:
            [region_id] = region_ids
            regions[region_id].pinned += len(first)
        else:
            for key in first:
                regions[located[key].region_id].pinned += 1

    def unpin(self, by: int, keys: Iterable[str]) -> list[bool]:
        """Remove one pin from each key; whether there was one."""
        dropped, last = self._pins.drop(by, keys)
        self._note_unpinned(last)
        return dropped

    def enter_pin_epoch(self, session_id: int, pin_epoch: int) -> bool:
        """Note that this session asks in this pin epoch; False if it has been heard in a later one."""
        return self._pins.enter_pin_epoch(session_id, pin_epoch)

    def reconcile_pins(self, session_id: int, keys: Sequence[str], counts: Sequence[int], last: bool) -> int:
        """Keep as many pins of earlier epochs as the session says it holds; see ``Directory.settle_pins``.

        Returns:
            With ``last``, how many others were removed.
        """
        self._pins.reconcile(session_id, keys, counts)
        # Only the last part may remove anything: what a part does not name may be named by the next one.
        if not last:
            return 0
        dropped, gone = self._pins.drop_earlier(session_id)
        self._note_unpinned(gone)
        return dropped

    def keep_pins_until(self, holder: int, until: float) -> None:
        """This holder has ended: its pins count until then."""
        if self._pins.has(holder):
            self._ended_holders.set(holder, until)
        else:
            self._pins.drop_all(holder)

    def expire_pins(self, now: float) -> None:
        """Remove the pins of ended holders whose time has come."""
        if self._ended_holders.next() <= now:
            for holder in self._ended_holders.due(now):
                self._note_unpinned(self._pins.drop_all(holder))

    def next_expiry(self) -> float:
        """When :meth:`expire_pins` may have something to do, or earlier; ``math.inf`` if there is nothing."""
        return self._ended_holders.next()

    def drop_pins(self, keys: Iterable[str]) -> None:
        """Remove all pins of these keys, which are about to go whatever protects them."""
        pinned = [key for key in keys if key in self.pinned]
        # Before the keys lose their locations, from which their regions are known.
        self._note_unpinned(pinned)
        self._pins.forget(pinned)

    def _note_unpinned(self, keys: Iterable[str]) -> None:
        regions, located = self._state.regions, self._state.located
        for key in keys:
            regions[located[key].region_id].pinned -= 1

    # --- readers without pins -------------------------------------------------------------------------------------

    def note_read(self, keys: Iterable[str], region_ids: Iterable[int], now: float) -> None:
        """A published connection has looked up these keys, which lie in these regions: they stay for ``v1_read_grace``."""
        self._grace.note(keys, now)
        for region_id in region_ids:
            self._state.regions[region_id].read_until = now + self._v1_read_grace

    def held(self, also: Container[str], now: float) -> Held:
        """The keys that may not be evicted now, and ``also`` these."""
        self._grace.forget_before(now)
        return Held(self._pins, self._grace, also)

    # --- quiet time -----------------------------------------------------------------------------------------------

    def begin_quiet(self, ends: Mapping[int, float], surely: float) -> None:
        """Begin the quiet time after a restart.

        Args:
            ends: the sessions of ours, each with the time when it would end. It is quiet until all have come back or ended.
            surely: until then it is quiet in any case: published clients cannot say that they have come back.
        """
        self._awaited.update(ends)
        self._quiet_until = max(ends.values(), default=-math.inf)
        self._surely_quiet_until = surely

    def note_returned(self, session_id: int) -> None:
        """This session knows of the restart, and has dropped what it knew from before; or it has ended."""
        self._awaited.discard(session_id)

    def is_quiet(self, now: float) -> bool:
        """Whether views from before the restart may be in use, of which nothing is known here."""
        return now < self._surely_quiet_until or (bool(self._awaited) and now < self._quiet_until)
