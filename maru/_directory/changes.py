"""Changes of a directory's state with their journal records, and their replay.

Pure. Nothing else changes the state of a directory in use, so each change is recorded, in the order in which it
happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .locations import Columns
from .records import (
    Acknowledged,
    AnyRecord,
    Deleted,
    Fenced,
    ReadUnpinned,
    RegionAdded,
    RegionDropped,
    RegionReturned,
    Registered,
    SessionEnded,
    SessionOpened,
)
from .regions import Region
from .sessions import Session
from .slices import FORGOTTEN_AT_ONCE, Slices
from .state import State, depths_of


class Changes:
    """A state and the records of its changes not yet journaled."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.records: list[AnyRecord] = []
        self.deferred: list[tuple[Columns, Mapping[int, Columns], int]] = []
        """Registrations that are recorded and answered, but not applied completely."""

    def open_session(self, token: bytes, instance_id: str, tenant: str, published: bool, lease: float) -> Session:
        """Open a session, with a number that was never used before."""
        number = self.state.last_session + 1
        self.records.append(SessionOpened(number, token, instance_id, tenant, published, lease))
        return self.state.open_session(number, token, instance_id, tenant, published, lease)

    def end_session(self, number: int) -> None:
        """End this session: its regions become orphans, or are dropped."""
        session = self.state.sessions[number]
        returning = [region.returning for region in session.regions.values()]
        keys = session.forgetting + sum([len(region.keys_at) for region in session.regions.values()])
        self.state.end_session(number)
        self.records.append(SessionEnded(number))
        # Freed in slices, not with the session: the order of use of many keys is as many pieces of memory.
        if keys + sum(map(len, returning)) + len(session.outbox) > FORGOTTEN_AT_ONCE:
            self.state.chores.append(_free_in_slices(session, returning))

    def add_region(self, region_id: int, length: int, session: Session) -> None:
        """Add a region to this session.

        An orphan has an owner again.
        """
        orphan = self.state.regions.get(region_id)
        later = orphan is not None and len(orphan.keys_at) > FORGOTTEN_AT_ONCE
        region = self.state.add_region(region_id, length, session.number, session.instance_id, use=not later)
        self.records.append(RegionAdded(region_id, length, session.number, session.instance_id))
        if later:
            self.state.chores.append(self._use(region, session))

    def _use(self, region: Region, session: Session) -> Slices[None]:
        """Count a use of each key of a region owned again.

        Until then these keys are not evicted.
        """
        keys = list(region.keys_at.values())
        located = self.state.located
        for start in range(0, len(keys), FORGOTTEN_AT_ONCE):
            yield
            self.settle()
            if region.session is not session:
                return
            some = [
                key
                for key in keys[start : start + FORGOTTEN_AT_ONCE]
                if (place := located.get(key)) is not None and place.region_id == region.region_id
            ]
            session.policy.use(some, depths_of([located[key] for key in some]))

    def return_region(self, region_id: int) -> None:
        """Hand this region back."""
        region = self.state.regions[region_id]
        session = region.session
        later = session is not None and len(region.keys_at) > FORGOTTEN_AT_ONCE
        keys, returning = list(region.keys_at.values()) if later else [], region.returning
        self.state.return_region(region_id, discard=not later)
        self.records.append(RegionReturned(region_id))
        if session is not None and later:
            self._forget_order(session, keys)
        if len(returning) > FORGOTTEN_AT_ONCE:
            self.state.chores.append(_empty_in_slices(returning))

    def _forget_order(self, session: Session, keys: list[str]) -> None:
        session.forgetting += len(keys)  # counted before the first slice
        self.state.chores.append(self._forget_in_slices(session, keys))

    def _forget_in_slices(self, session: Session, keys: list[str]) -> Slices[None]:
        """Remove keys outside the session's regions from its order of use."""
        located = self.state.located
        for start in range(0, len(keys), FORGOTTEN_AT_ONCE):
            yield
            self.settle()
            some = keys[start : start + FORGOTTEN_AT_ONCE]
            session.forgetting -= len(some)
            places = map(located.get, some)
            session.policy.discard(
                [
                    key
                    for key, place in zip(some, places, strict=True)
                    if place is None or place.region_id not in session.regions
                ]
            )

    def drop_region(self, region_id: int) -> int:
        """Drop this region with every key in it.

        Return the number of keys.
        """
        keys = self.state.drop_region(region_id)
        self.records.append(RegionDropped(region_id))
        return len(keys)

    def enter_fresh(
        self, columns: Columns, parts: Mapping[int, Columns], source: tuple[int, bytes], later: bool
    ) -> int:
        """Register all entries, in owned regions. Return the first generation.

        Args:
            columns: the keys and their locations.
            parts: the same, by region.
            source: code and body of the request.
            later: only record the registration now, and apply it in :meth:`settle`.

        Returns:
            0 if a key or an offset is taken or named twice: then nothing has changed.
        """
        state = self.state
        if not state.is_fresh(columns, parts):
            return 0
        first = state.generation + 1
        state.generation += len(columns.keys)
        self.records.append(Registered(self._owner(next(iter(parts))), *source, first, []))
        if state.location_watcher is not None:
            generations = range(first, first + len(columns.keys))
            state.location_watcher.registered(columns, generations, self._readable(columns))
        # The answer needs only the generations, which are given already. The dictionaries, which cost most, can wait
        # until it has left; every reader of the state calls `settle` first, so the order of events stays as recorded.
        if later:
            self.deferred.append((columns, parts, first))
        else:
            state.enter_fresh(columns, parts, first)
        return first

    def settle(self) -> None:
        """Apply the registrations that were only recorded."""
        deferred, self.deferred = self.deferred, []
        for columns, parts, first in deferred:
            self.state.enter_fresh(columns, parts, first)

    def enter(self, columns: Columns, skipped: list[int], source: tuple[int, bytes]) -> int:
        """Register all but the skipped entries, in order. Return the first generation.

        The regions are owned.
        """
        first = self.state.generation + 1
        rest = columns.without(skipped)
        self.state.enter(rest)
        self.records.append(Registered(self._owner(next(iter(rest.by_region()))), *source, first, skipped))
        if self.state.location_watcher is not None:
            # A key that gave way to a later entry of the same request was reported as removed before it was registered.
            generations = range(first, first + len(rest.keys))
            kept = [at for at, key in enumerate(rest.keys) if self._generation_of(key) == generations[at]]
            self.state.location_watcher.registered(
                rest.at(kept), [generations[at] for at in kept], self._readable(rest)
            )
        return first

    def _generation_of(self, key: str) -> int:
        location = self.state.located.get(key)
        return 0 if location is None else location.generation

    def _readable(self, columns: Columns) -> bool:
        """Return whether these regions can be read without a pin.

        All of them have the same kind of owner. For a client of ours, bytes in them change only after a message that
        allows it.
        """
        region_id = columns.regions if isinstance(columns.regions, int) else columns.regions[0]
        return not self.state.regions[region_id].published

    def _owner(self, region_id: int) -> int:
        session = self.state.regions[region_id].session
        assert session is not None
        return session.number

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these keys."""
        if keys:
            self.state.remove(keys)
            self.records.append(Deleted(list(keys)))

    def fence(self, number: int, attempt: int) -> None:
        """Refuse this attempt of this session from now on."""
        if attempt not in self.state.sessions[number].fences:
            self.state.fence(number, attempt)
            self.records.append(Fenced(number, attempt))

    def acknowledge(self, number: int, upto: int) -> None:
        """Record that this session has applied all returns up to ``upto``."""
        if self.state.acknowledge(number, upto):
            self.records.append(Acknowledged(number, self.state.sessions[number].outbox.acknowledged))

    def read_unpinned(self) -> None:
        """Record that a published client reads.

        The next start has to know.
        """
        if not self.state.read_unpinned:
            self.state.read_unpinned = True
            self.records.append(ReadUnpinned())

    def replay(self, record: AnyRecord, decode: Callable[[int, bytes], Columns]) -> None:
        """Apply this record again, without recording it."""
        state = self.state
        match record:
            case Registered(_, code, payload, first, skipped):
                state.generation = first - 1
                state.enter(decode(code, payload).without(skipped))
            case Deleted(keys):
                state.remove(keys)
            case Acknowledged(number, upto):
                state.acknowledge(number, upto)
            case Fenced(number, attempt):
                state.fence(number, attempt)
            case RegionAdded(region_id, length, number, instance_id):
                state.add_region(region_id, length, number, instance_id)
            case RegionReturned(region_id):
                state.return_region(region_id)
            case RegionDropped(region_id):
                state.drop_region(region_id)
            case SessionOpened(number, token, instance_id, tenant, published, lease):
                state.open_session(number, token, instance_id, tenant, published, lease)
            case SessionEnded(number):
                state.end_session(number)
            case ReadUnpinned():
                state.read_unpinned = True


def _free_in_slices(session: Session, returning: list[dict[int, int]]) -> Slices[None]:
    """Free the order of use and returning pages of an ended session.

    The order gives up its own keys, which are nobody's victims any more, so none of them has to be looked for.
    """
    are_more = True
    while are_more:
        yield
        are_more = len(session.policy.make_room((), FORGOTTEN_AT_ONCE, ())[0]) == FORGOTTEN_AT_ONCE
    pages = session.outbox.pages
    while pages:
        yield
        for _ in range(min(len(pages), FORGOTTEN_AT_ONCE)):
            pages.popleft()
    for places in returning:
        yield from _empty_in_slices(places)


def _empty_in_slices(places: dict[int, int]) -> Slices[None]:
    while places:
        yield
        for _ in range(min(len(places), FORGOTTEN_AT_ONCE)):
            places.popitem()
