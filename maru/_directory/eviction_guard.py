"""Keys that must not be evicted or deleted now. Pure.

A key is *pinned* by a message, and *held* by a board, which is known only when the board is read. So a key that is to
go is claimed (:meth:`EvictionGuard.claim`) right before it goes: it stays if a reader has begun to hold it meanwhile.
Keys that published clients have read lately stay, too.

None of this is journaled. After a restart the earlier pins are unknown, so no key may go during the quiet time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from typing import Final, Protocol

from .limits import Limits
from .locations import Location
from .pins import Held, Pins, ReadGrace
from .regions import Region
from .sessions import Leases
from .slices import HOLDERS_AT_ONCE, Slices
from .state import State

_LOOK_AGAIN: Final = 1.0
"""Seconds until an abandoned region with a held key is checked again.

Each of its keys has to be checked.
"""


class Holds(Protocol):
    """Keys that clients hold without a message; see `maru._index.boards`."""

    def __contains__(self, holder: object) -> bool: ...

    def close(self, holder: int) -> None:
        """Release everything that this session holds."""
        ...

    def held(self) -> Set[int]:
        """Return the held generations."""
        ...

    def holders(self, generation: int) -> int:
        """Return the number of clients that hold this generation."""
        ...

    def claim(self, names: Sequence[str], generations: Sequence[int]) -> Container[int]:
        """Let nobody begin to hold these keys. Return the generations already held."""
        ...

    def give_up(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Release the claim on these keys, which are not held but stay."""
        ...

    def has_uses(self) -> bool:
        """Return whether there are uses that were not taken yet."""
        ...

    def take_uses(self, by: int | None, most: int) -> Iterable[Sequence[str]]:
        """Take at most ``most`` uses of one session, or of all.

        Sessions take turns. The uses of a client come with the deepest block of a prefix first.
        """
        ...


class EvictionGuard:
    """Pins, reads of published clients, and the quiet time.

    The quiet time follows a restart. Only this class changes ``pinned`` and ``read_until`` of the regions, which show
    at once whether a region may be evicted whole.
    """

    def __init__(self, state: State, limits: Limits) -> None:
        self._state = state
        self._pins = Pins()
        self._is_letting_go = False
        self.pinned = self._pins.counts
        """The pinned keys, with their pins."""
        self.boards: Holds | None = None
        """Keys that are held without a message; ``None``: none."""
        self._grace = ReadGrace(limits.v1_read_grace)
        self._v1_read_grace = limits.v1_read_grace
        # Ended holders, whose pins count until the given time: a reader stops using its views by its own clock, which
        # may be late by the server's, and it may have ended without knowing (its session was lost, its connection was
        # cut).
        self._ended_holders = Leases()
        self._quiet_until = self._surely_quiet_until = -math.inf
        self._awaited: set[int] = set()  # sessions of ours from before the restart that have not sent the new epoch

    # --- pins -----------------------------------------------------------------------------------------------------

    def pin(self, by: int, keys: Sequence[str], region_ids: Collection[int]) -> None:
        """Add one pin to each of these existing keys.

        They lie in these regions.
        """
        first = self._pins.add(by, keys)
        regions, located = self._state.regions, self._state.located
        if len(region_ids) == 1:
            [region_id] = region_ids
            regions[region_id].pinned += len(first)
        else:
            for key in first:
                regions[located[key].region_id].pinned += 1

    def unpin(self, by: int, keys: Iterable[str]) -> list[bool]:
        """Remove one pin from each key. Return whether each had one."""
        dropped, last = self._pins.drop(by, keys)
        self._note_unpinned(last)
        return dropped

    def pin_entries(self, holder: int | None) -> int:
        """Return the number of keys that this holder, or all, have pinned."""
        return self._pins.entries if holder is None else self._pins.entries_of(holder)

    def enter_pin_epoch(self, session_id: int, pin_epoch: int) -> bool:
        """Note that this session is in this pin epoch.

        False if the epoch is over.
        """
        return self._pins.enter_pin_epoch(session_id, pin_epoch)

    def reconcile_pins(self, session_id: int, keys: Sequence[str], counts: Sequence[int], last: bool) -> int:
        """Keep as many pins of earlier epochs as the session reports.

        See ``Directory.settle_pins``.

        Returns:
            With ``last``, how many others were removed.
        """
        self._pins.reconcile(session_id, keys, counts)
        # Only the last part may remove anything: what a part does not name may be named by the next one.
        if not last:
            return 0
        dropped, gone = self._pins.drop_earlier(session_id)
        self._note_unpinned(gone)
        self._let_go_later()
        return dropped

    def keep_pins_until(self, holder: int, until: float) -> None:
        """Keep the pins and holds of an ended holder until ``until``."""
        if self.holds_nothing(holder):
            self._pins.drop_all(holder)
        else:
            self._ended_holders.set(holder, until)

    def holds_nothing(self, holder: int) -> bool:
        """Return whether this holder has neither a pin nor a board."""
        return not self._pins.has(holder) and (self.boards is None or holder not in self.boards)

    def expire_pins(self, now: float) -> None:
        """Remove the pins of some ended holders whose time has come.

        The pins of others count until the next call.
        """
        if self._ended_holders.next() <= now:
            for holder in self._ended_holders.due(now, HOLDERS_AT_ONCE):
                self._note_unpinned(self._pins.drop_all(holder))
                if self.boards is not None:
                    self.boards.close(holder)
            self._let_go_later()

    def _let_go_later(self) -> None:
        """Release pins without a holder slice by slice, since there are many."""
        if self._pins.is_leaving and not self._is_letting_go:
            self._is_letting_go = True
            self._state.chores.append(self._let_go())

    def _let_go(self) -> Slices[None]:
        try:
            while self._pins.is_leaving:
                yield
                self._note_unpinned(self._pins.let_go_some())
        finally:
            self._is_letting_go = False

    def next_expiry(self) -> float:
        """Return when :meth:`expire_pins` may have something to do, or an earlier time.

        ``math.inf`` if there is nothing.
        """
        return self._ended_holders.next()

    def drop_pins(self, keys: Iterable[str]) -> None:
        """Remove all pins of these keys.

        The keys are about to be removed regardless of protection.
        """
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
        """Protect keys that a published connection has looked up for ``v1_read_grace``.

        They lie in these regions.
        """
        self._grace.note(keys, now)
        for region_id in region_ids:
            self._state.regions[region_id].read_until = now + self._v1_read_grace

    def held(self, also: Container[str], now: float) -> Held:
        """Return the keys that may not be evicted now, including ``also``."""
        self._grace.forget_before(now)
        return Held(self._pins, self._grace, also, _OnBoards(self._state.located, self.boards))

    def pinned_or(self, held: Container[str]) -> Held:
        """Return the pinned keys, and those found held by a claim."""
        return Held(self._pins, (), (), held)

    # --- holds without a message ----------------------------------------------------------------------------------

    def claim(self, keys: Sequence[str]) -> set[str]:
        """Claim keys that are to go: nobody may begin to hold them.

        Return the held ones. The held ones stay; the others must go at once.
        """
        if self.boards is None or not keys:
            return set()
        located = self._state.located
        generations = [located[key].generation for key in keys]
        held = self.boards.claim(keys, generations)
        return {key for key, generation in zip(keys, generations, strict=True) if generation in held}

    def is_any_held(self, region: Region, keys: Iterable[str], now: float) -> bool:
        """Return whether a board holds one of these keys of a region.

        If so, the region is left alone for a while. Nothing is claimed: a key may be held a moment later.
        """
        if self.boards is None or not (held := self.boards.held()):
            return False
        located = self._state.located
        if held.isdisjoint([located[key].generation for key in keys if key in located]):
            return False
        self.look_later(region, now)
        return True

    def look_later(self, region: Region, now: float) -> None:
        """Leave this region alone for a while.

        Something in it is held.
        """
        region.read_until = max(region.read_until, now + _LOOK_AGAIN)

    def give_up(self, keys: Sequence[str]) -> None:
        """Release the claim on these keys, which stay after all."""
        if self.boards is not None and keys:
            self.boards.give_up(keys, [self._state.located[key].generation for key in keys])

    def count_held(self) -> int:
        """Return the number of held registrations, as far as the boards show."""
        return 0 if self.boards is None else len(self.boards.held())

    def pins_of(self, key: str) -> int:
        """Return the number of a key's pins and board holders."""
        location, boards = self._state.located.get(key), self.boards
        held = 0 if boards is None or location is None else boards.holders(location.generation)
        return self.pinned.get(key, 0) + held

    def has_uses(self) -> bool:
        """Return whether there are new uses without a message.

        New ones were not taken yet.
        """
        return self.boards is not None and self.boards.has_uses()

    def take_uses(self, by: int | None, most: int) -> Iterable[Sequence[str]]:
        """Take at most ``most`` uses without a message, as :meth:`Holds.take_uses`."""
        return () if self.boards is None else self.boards.take_uses(by, most)

    # --- quiet time -----------------------------------------------------------------------------------------------

    def begin_quiet(self, ends: Mapping[int, float], surely: float) -> None:
        """Begin the quiet time after a restart.

        Args:
            ends: the sessions of ours, each with the time when it would end. It is quiet until all have come back or
                ended.
            surely: until then it is quiet in any case: published clients cannot report that they have come back.
        """
        self._awaited.update(ends)
        self._quiet_until = max(ends.values(), default=-math.inf)
        self._surely_quiet_until = surely

    def note_returned(self, session_id: int) -> None:
        """Stop waiting for a session that has returned or ended.

        A returned session has dropped everything that it knew from before.
        """
        self._awaited.discard(session_id)

    def is_quiet(self, now: float) -> bool:
        """Return whether views from before the restart may be in use.

        The directory knows nothing of them.
        """
        return now < self._surely_quiet_until or (bool(self._awaited) and now < self._quiet_until)


class _OnBoards:
    """The keys that were held on boards at the first query."""

    def __init__(self, located: Mapping[str, Location], boards: Holds | None) -> None:
        self._located = located
        self._boards = boards
        self._held: Collection[int] | None = () if boards is None else None

    def __contains__(self, key: object) -> bool:
        if self._held is None:
            assert self._boards is not None
            self._held = self._boards.held()
        if not self._held:
            return False
        location = self._located.get(key)  # type: ignore[call-overload]  # a registration may name its own new keys
        return location is not None and location.generation in self._held
