"""Removal of keys and regions by request. Pure.

Keys are deleted, reclaimed and trimmed.

Rule 1. A request that is repeated with the same request id gets the first answer, and is not carried out again: the
        answer was lost, and the keys may have been stored again.
Rule 2. A delete refuses nothing silently: each key has its answer, and one that stays has a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

from .._wire.frames import KEYS_AT_ONCE
from .._wire.messages_own import DropAnswer
from .changes import Changes
from .eviction_guard import EvictionGuard
from .evictor import Evictor
from .limits import Limits
from .regions import Region
from .sessions import Session, pack, unpack
from .slices import AT_ONCE, Slices
from .statistics import Counters

_AHEAD: Final = 64
"""Divisor of an owner's keys that bounds evictions ahead of need.

An owner asks for room for larger batches.
"""
_LOOKED_AT: Final = 8_192
"""Keys that are compared with the boards in one slice.

Each costs a tenth of a microsecond, and the boards are read once.
"""


class Remover:
    """Removes keys and regions on request, and counts them."""

    def __init__(
        self, changes: Changes, limits: Limits, guard: EvictionGuard, evictor: Evictor, counters: Counters
    ) -> None:
        self._changes = changes
        self._state = changes.state
        self._limits = limits
        self._guard = guard
        self._evictor = evictor
        self._counters = counters

    def delete(
        self,
        by: int,
        session: Session | None,
        keys: Iterable[str],
        now: float,
        request_id: int,
        generations: Sequence[int] | None = None,
    ) -> list[int]:
        """Delete keys; see ``Directory.delete``."""
        asked = "delete", request_id
        if session is not None and asked in session.answers:
            return unpack(session.answers[asked])
        self._guard.expire_pins(now)
        quiet = self._guard.is_quiet(now)
        located, pinned, regions = self._state.located, self._guard.pinned, self._state.regions
        answers: list[int] = []
        gone: dict[str, int] = {}
        meant: Iterable[int | None] = repeat(None) if generations is None else generations
        for key, generation in zip(keys, meant, strict=False):
            location = located.get(key)
            if location is None or key in gone or generation not in (None, location.generation):
                answer = DropAnswer.MISSING
            elif key in pinned:
                answer = DropAnswer.PINNED
            elif quiet or _protected(regions[location.region_id], by):
                answer = DropAnswer.PROTECTED
            else:
                answer = DropAnswer.DELETED
                gone[key] = len(answers)
            answers.append(answer.value)
        for key in self._guard.claim(list(gone)):
            answers[gone.pop(key)] = DropAnswer.PINNED.value
        self._changes.remove(list(gone))
        self._counters.deleted += len(gone)
        if session is not None and request_id:
            session.remember(asked, pack(answers), self._limits)
        return answers

    def delete_in_slices(
        self,
        by: int,
        session: Session,
        keys: Sequence[str],
        now: float,
        request_id: int,
        generations: Sequence[int] | None,
    ) -> Slices[list[int]]:
        """Delete keys, as :meth:`delete`. A repeated request waits for the last slice."""
        if len(keys) <= KEYS_AT_ONCE:
            return self.delete(by, session, keys, now, request_id, generations)
        asked = "delete", request_id
        while asked in session.under_way:
            now = yield
        if asked in session.answers:
            return unpack(session.answers[asked])
        answers: list[int] = []
        session.under_way.add(asked)
        try:
            for start in range(0, len(keys), AT_ONCE):
                if start:
                    now = yield
                    self._changes.settle()
                at = slice(start, start + AT_ONCE)
                answers += self.delete(by, None, keys[at], now, 0, None if generations is None else generations[at])
        finally:
            session.under_way.discard(asked)
        if request_id:
            session.remember(asked, pack(answers), self._limits)
        return answers

    def reclaim(self, session: Session, pages: int, now: float, request_id: int) -> Slices[int]:
        """Delete keys of a session that are not held; see ``Directory.reclaim``."""
        asked = "reclaim", request_id
        if asked in session.answers:
            return session.answers[asked][0]  # the current count
        if session.is_reclaiming or self._guard.is_quiet(now):
            return 0
        keys = sum([len(region.keys_at) for region in session.regions.values()])
        session.ahead.asked(pages, session.outbox.unsent, session.flow, keys // _AHEAD)
        went = [0]
        if request_id:  # now, so that it is not begun a second time
            session.remember(asked, went, self._limits)
        session.is_reclaiming = True
        try:
            went[0] = yield from self._evictor.evict_in_slices(session, pages, now)
        finally:
            session.is_reclaiming = False
        return went[0]

    def keep_ahead(self, session: Session, now: float) -> int:
        """Evict keys to keep pages free for this session.

        Return how many. Do nothing for a session that never had to ask for room.
        """
        missing = min(AT_ONCE, session.ahead.missing(session.flow))  # the rest follows after its next registration
        return self._evictor.evict(session, missing, now) if missing else 0

    def trim(self, session: Session, now: float) -> Slices[int]:
        """Delete keys above the high watermark down to the low one.

        Return how many.
        """
        went = 0
        if session.used_bytes <= self._limits.high_watermark * session.allocated_bytes:
            return went
        now = yield  # many sessions are looked at in one step
        while self._state.sessions.get(session.number) is session:
            excess = session.used_bytes - int(self._limits.low_watermark * session.allocated_bytes)
            some = self._evictor.evict_bytes([session], excess, (), now, AT_ONCE)
            went += some
            if some < AT_ONCE:
                break
            now = yield
            self._changes.settle()
        return went

    def forget(self, keys: Iterable[str]) -> int:
        """Drop these keys in spite of any protection.

        Return how many existed.
        """
        gone = [key for key in dict.fromkeys(keys) if key in self._state.located]
        self._guard.drop_pins(gone)
        self._changes.remove(gone)
        return len(gone)

    def drop_region(self, region_id: int) -> int:
        """Drop a region with every key in it, pinned or not.

        Return the number of keys. An unknown region has none.
        """
        region = self._state.regions.get(region_id)
        if region is None:
            return 0
        if region.pinned:
            self._guard.drop_pins(region.keys_at.values())
        keys = self._changes.drop_region(region_id)
        self._counters.dropped_with_region += keys
        return keys

    def make_room(self, wanted_bytes: int, now: float) -> Slices[list[int]]:
        """Drop abandoned regions whole, if that frees ``wanted_bytes``. Return their ids.

        The longest abandoned go first. If they do not free so much, none is dropped.
        """
        while chosen := self._evictor.abandoned(wanted_bytes, now):
            # Before the first key goes: a region that stays keeps all its keys.
            for region in chosen:
                if (yield from self._find_held(region, now)):
                    break
            else:
                dropped = []
                for region in chosen:
                    if (yield from self._drop_if_free(region, now)):
                        dropped.append(region.region_id)
                return dropped
        return []

    def _find_held(self, region: Region, now: float) -> Slices[bool]:
        """Return whether a board holds something in this region."""
        keys = list(region.keys_at.values())
        for start in range(0, len(keys), _LOOKED_AT):
            if start:
                now = yield
                self._changes.settle()
            if self._guard.is_any_held(region, keys[start : start + _LOOKED_AT], now):
                return True
        return False

    def _drop_if_free(self, region: Region, now: float) -> Slices[bool]:
        """Drop an abandoned region unless it is read or owned again.

        Return whether it is gone. Its keys go slice by slice, each with its record: wherever the journal is cut, a
        smaller region is left.
        """
        region_id = region.region_id
        keys = list(region.keys_at.values())
        for start in range(0, max(1, len(keys)), AT_ONCE):
            if start:
                now = yield
                self._changes.settle()
            if self._state.regions.get(region_id) is not region:  # its last key went meanwhile
                return True
            if region.session is not None or region.pinned or region.read_until > now:
                return False
            there = region.keys_at
            some = [key for key in keys[start : start + AT_ONCE] if self._lies_in(key, region_id)]
            held = self._guard.claim(some)
            if held:
                self._guard.give_up([key for key in some if key not in held])
                self._guard.look_later(region, now)
                return False
            if len(some) == len(there):
                self.drop_region(region_id)
                return True
            self._changes.remove(some)
            self._counters.dropped_with_region += len(some)
        return self._state.regions.get(region_id) is not region

    def _lies_in(self, key: str, region_id: int) -> bool:
        location = self._state.located.get(key)
        return location is not None and location.region_id == region_id


def _protected(region: Region, by: int) -> bool:
    """Return whether the region has a living published owner other than ``by``."""
    owner = region.session
    return owner is not None and owner.published and by not in owner.connections
