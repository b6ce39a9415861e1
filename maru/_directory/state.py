"""State of a directory and its transitions. Pure.

This is the part that a restart restores. Other modules decide whether a change is allowed (`maru._directory`). Here it
is carried out, with everything that follows.

Rule 1. One method for each record of the journal. The same calls give the same state, whatever pins, leases and the
        order of use were: so the journal need not record the consequences (a region that is dropped with its last key).
Rule 2. An offset of a region holds at most one key; a key lies at one offset. All sums are kept with each change.
Rule 3. A page of a key that is removed goes back to the owner of its region, if that is a living session of ours. A
        published owner gets no message: its keys are removed only by its own request.
Rule 4. Work for each key runs in C in the common case: some hundred nanoseconds a key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

from ..eviction import EvictionPolicy
from ..kv_events import KeyWatchers
from .limits import Limits
from .locations import Columns, Location, LocationWatcher
from .regions import Account, Region, RegionState, Usage
from .sessions import Fences, Session
from .slices import Slices


class State:
    """Sessions, regions, and the location of each key."""

    def __init__(self, limits: Limits, eviction: Callable[[], EvictionPolicy[str]]) -> None:
        self._limits = limits
        self._eviction = eviction
        self.located: dict[str, Location] = {}
        self.regions: dict[int, Region] = {}
        self.abandoned: dict[int, Region] = {}
        """Regions without an owner, in the order in which they were abandoned."""
        self.sessions: dict[int, Session] = {}
        self.tokens: dict[bytes, int] = {}
        self.usage: dict[str, Usage] = {}
        self.instances: dict[str, Account] = {}
        self.tenants: dict[str, Account] = {}
        self.generation = 0
        """The last generation given."""
        self.last_session = 0
        """The highest session number given."""
        self.read_unpinned = False
        """Whether published clients have read here.

        After a restart they may still do so, without a message.
        """
        self.used_bytes = 0
        self.allocated_bytes = 0
        self.watchers: KeyWatchers[str] = KeyWatchers()
        """Receivers of added and removed keys."""
        self.location_watcher: LocationWatcher | None = None
        """Receiver of the locations of keys."""
        self.chores: deque[Slices[None]] = deque()
        """Work left after a change, in slices; each yields before it begins."""
        self.gone: list[tuple[str, Location]] | None = None
        """Keys removed since a dump of this state began, with their locations.

        ``None``: there is no dump.
        """
        self.dropped: list[int] = []
        """Regions that were removed, until the pool takes them from here."""

    # --- sessions -------------------------------------------------------------------------------------------------

    def open_session(
        self, number: int, token: bytes, instance_id: str, tenant: str, published: bool, lease: float
    ) -> Session:
        """Open a session with this number, which was never used before."""
        limits = self._limits
        instance = self.instances.get(instance_id)
        if instance is None:
            quota = limits.instance_quotas.get(instance_id, limits.instance_quota_bytes)
            instance = self.instances[instance_id] = Account(quota)
        account = self.tenants.get(tenant)
        if account is None:
            quota = limits.tenant_quotas.get(tenant, limits.tenant_quota_bytes) if tenant else 0
            account = self.tenants[tenant] = Account(quota)
        fences = Fences(limits.max_fences)
        session = Session(
            number, token, instance_id, tenant, published, lease, self._eviction(), instance, account, fences
        )
        instance.sessions[number] = account.sessions[number] = self.sessions[number] = session
        if token:
            self.tokens[token] = number
        self.last_session = max(self.last_session, number)
        return session

    def end_session(self, number: int) -> None:
        """End this session: its regions become orphans, those without keys are dropped."""
        session = self.sessions.pop(number)
        if session.token:
            del self.tokens[session.token]
        for region_id in sorted(session.regions):  # not in the order of the dict: that is no part of the state
            self._abandon(session, session.regions[region_id], RegionState.ORPHAN)
        for accounts, name, account in (
            (self.instances, session.instance_id, session.instance),
            (self.tenants, session.tenant, session.tenant_account),
        ):
            del account.sessions[number]
            if not account.sessions:
                del accounts[name]

    def fence(self, number: int, attempt: int) -> None:
        """Refuse this attempt of this session from now on."""
        self.sessions[number].fences.add(attempt)

    def acknowledge(self, number: int, upto: int) -> bool:
        """Record that the session has applied all returns up to ``upto``.

        Their pages are its own again. Return whether any of them is new.
        """
        news = self.sessions[number].outbox.acknowledge(upto)
        for region_id, offset, _ in news:
            region = self.regions.get(region_id)
            if region is not None:
                region.returning.pop(offset, None)
        return bool(news)

    # --- regions --------------------------------------------------------------------------------------------------

    def add_region(self, region_id: int, length: int, number: int, instance_id: str, *, use: bool = True) -> Region:
        """Add a region to this session, or give an orphan back.

        An orphan's owner has turned out to live on in this session.

        Args:
            region_id: the region.
            length: in bytes.
            number: of the session.
            instance_id: of the session.
            use: count a use of the keys in it; or else the caller does.
        """
        session = self.sessions[number]
        region = self.regions.get(region_id)
        if region is None:
            region = self.new_region(region_id, length, instance_id, session.published)
        self.own(region, session)
        if use:
            keys = list(region.keys_at.values())
            session.policy.use(keys, depths_of([self.located[key] for key in keys]))
        return region

    def new_region(self, region_id: int, length: int, instance_id: str, published: bool) -> Region:
        """Add an empty region without an owner."""
        usage = self.usage.get(instance_id)
        if usage is None:
            usage = self.usage[instance_id] = Usage(instance_id)
        usage.regions += 1
        usage.allocated_bytes += length
        self.allocated_bytes += length
        region = Region(region_id, length, instance_id, published, usage)
        self.regions[region_id] = self.abandoned[region_id] = region
        return region

    def own(self, region: Region, session: Session) -> None:
        """Give an abandoned region this session as its owner."""
        del self.abandoned[region.region_id]
        region.session, region.state = session, RegionState.OWNED
        session.regions[region.region_id] = region
        session.charge(region.length, region.used_bytes)

    def return_region(self, region_id: int, *, discard: bool = True) -> None:
        """Hand this region back.

        It is hidden from now on, and dropped if it has no key.

        Args:
            region_id: the region.
            discard: have the order of use of its owner forget the keys; or else the caller does.
        """
        region = self.regions[region_id]
        session = region.session
        if session is None:
            region.state = RegionState.RETURNED
        else:
            if discard:
                session.policy.discard(region.keys_at.values())
            self._abandon(session, region, RegionState.RETURNED)

    def drop_region(self, region_id: int) -> list[str]:
        """Drop this region with every key in it. Return these keys."""
        region = self.regions[region_id]
        keys = list(region.keys_at.values())
        self._unlocated(keys, [self.located.pop(key) for key in keys])
        self.used_bytes -= region.used_bytes
        region.charge(-region.used_bytes)
        if region.session is not None:
            region.session.policy.discard(keys)
            del region.session.regions[region_id]
            region.session.charge(-region.length, 0)
        region.keys_at.clear()
        self._drop(region)
        if keys:
            self.watchers.removed(keys)
        return keys

    def _abandon(self, session: Session, region: Region, state: RegionState) -> None:
        """Remove the owner of a region.

        Its keys leave the order of use: they are evicted together.
        """
        del session.regions[region.region_id]
        session.charge(-region.length, -region.used_bytes)
        region.session, region.state = None, state
        region.returning = {}  # the caller frees the previous dict in slices
        self.abandoned[region.region_id] = region
        if not region.keys_at:
            self._drop(region)

    def _drop(self, region: Region) -> None:
        """Remove this empty region."""
        del self.regions[region.region_id]
        self.abandoned.pop(region.region_id, None)
        usage = region.usage
        usage.regions -= 1
        usage.allocated_bytes -= region.length
        if not usage.regions:
            del self.usage[usage.instance_id]
        self.allocated_bytes -= region.length
        self.dropped.append(region.region_id)

    # --- keys -----------------------------------------------------------------------------------------------------

    def enter(self, columns: Columns) -> None:
        """Register all entries, in order.

        A key that exists has been replaced by an earlier one of them. Keys at the same offsets are gone; their pages
        are not returned to the owner, who has overwritten them.
        """
        n, parts = len(columns.keys), columns.by_region()
        if self.is_fresh(columns, parts):
            self.generation += n
            self.enter_fresh(columns, parts, self.generation - n + 1)
            return
        regions, keys, offsets, lengths, checksums, attempt, depths = columns
        located = self.located
        for region_id, key, offset, length, checksum, depth in zip(
            [regions] * n if isinstance(regions, int) else regions,
            keys,
            offsets,
            [lengths] * n if isinstance(lengths, int) else lengths,
            [None] * n if checksums is None else checksums,
            [None] * n if depths is None else depths,
            strict=True,
        ):
            region = self.regions[region_id]
            if offset in region.keys_at:
                self._write_over(region, offset)
            self.generation += 1
            located[key] = Location(region_id, offset, length, self.generation, checksum, attempt, depth)
            region.keys_at[offset] = key
            region.charge(length)
            self.used_bytes += length
        present = [key for key in keys if key in located]
        self.use(present, [located[key] for key in present], are_new=True)
        self.watchers.stored(present)

    def is_fresh(self, columns: Columns, parts: Mapping[int, Columns]) -> bool:
        """Return whether all keys and offsets are free and different.

        Args:
            columns: the keys and their locations.
            parts: the same, by region.
        """
        keys = columns.keys
        if len(set(keys)) != len(keys) or not self.located.keys().isdisjoint(keys):
            return False
        for region_id, part in parts.items():
            offsets = part.offsets
            if len(set(offsets)) != len(offsets) or not self.regions[region_id].keys_at.keys().isdisjoint(offsets):
                return False
        return True

    def enter_fresh(self, columns: Columns, parts: Mapping[int, Columns], first: int) -> None:
        """Register all these fresh entries, with generations from ``first`` on.

        The generations were given already.
        """
        regions, keys, offsets, lengths, checksums, attempt, depths = columns
        located, region_of = self.located, self.regions
        locations = map(
            Location,
            repeat(regions) if isinstance(regions, int) else regions,
            offsets,
            repeat(lengths) if isinstance(lengths, int) else lengths,
            range(first, first + len(keys)),
            repeat(None) if checksums is None else checksums,
            repeat(attempt),
            repeat(None) if depths is None else depths,
        )
        located.update(zip(keys, locations, strict=True))
        owners: set[Session | None] = set()
        for region_id, part in parts.items():
            region = region_of[region_id]
            region.keys_at.update(zip(part.offsets, part.keys, strict=True))
            added = part.lengths * len(part.keys) if isinstance(part.lengths, int) else sum(part.lengths)
            region.charge(added)
            self.used_bytes += added
            owners.add(region.session)
        if len(owners) == 1:
            [owner] = owners
            if owner is not None:
                owner.policy.use(keys[::-1], None if depths is None else depths[::-1])
        else:
            self.use(keys, [located[key] for key in keys], are_new=True)
        if self.watchers.all:
            self.watchers.stored(keys)

    def use(self, keys: Sequence[str], locations: Sequence[Location], *, are_new: bool = False) -> set[int]:
        """Count a use of these keys, deepest first.

        Each owner has an order of use.

        Args:
            keys: the used keys.
            locations: the location of each key.
            are_new: pass the depths to the policies, which know those of known keys already.

        Returns:
            The regions of the keys.
        """
        region_ids = {location.region_id for location in locations}
        sessions = {self.regions[region_id].session for region_id in region_ids}
        if len(sessions) == 1:
            [session] = sessions
            if session is not None:
                session.policy.use(keys[::-1], depths_of(locations[::-1]) if are_new else None)
        else:
            pairs = list(zip(keys, locations, strict=True))[::-1]
            for session in sessions:
                if session is not None:
                    own = session.regions
                    mine = [pair for pair in pairs if pair[1].region_id in own]
                    session.policy.use(
                        [key for key, _ in mine], depths_of([location for _, location in mine]) if are_new else None
                    )
        return region_ids

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these keys, each named once.

        Their pages go back to their owners: by regions, then in this order.
        """
        located = self.located
        region_ids = {located[key].region_id for key in keys}
        if len(region_ids) == 1:
            self._take_out(self.regions[region_ids.pop()], keys)
            return
        groups: dict[int, list[str]] = {}
        for key in keys:
            groups.setdefault(located[key].region_id, []).append(key)
        for region_id, group in groups.items():
            self._take_out(self.regions[region_id], group)

    def _take_out(self, region: Region, keys: Sequence[str]) -> None:
        """Remove these keys, which lie in this region."""
        locations = list(map(self.located.pop, keys))
        self._unlocated(keys, locations)
        offsets = [location.offset for location in locations]
        for offset in offsets:
            del region.keys_at[offset]
        if self.watchers.all:
            self.watchers.removed(keys)
        freed = sum([location.length for location in locations])
        region.charge(-freed)
        self.used_bytes -= freed
        session = region.session
        if session is None:
            if not region.keys_at:
                self._drop(region)
            return
        session.policy.discard(keys)
        if not session.published:
            attempts = [location.attempt for location in locations]
            region.returning.update(zip(offsets, attempts, strict=True))
            session.outbox.pages.extend(zip(repeat(region.region_id), offsets, attempts))

    def _write_over(self, region: Region, offset: int) -> None:
        """Remove the key at this offset, if any.

        Its owner has overwritten it.
        """
        key = region.keys_at.pop(offset, None)
        if key is not None:
            location = self.located.pop(key)
            self._unlocated((key,), (location,))
            self.watchers.removed((key,))
            region.charge(-location.length)
            self.used_bytes -= location.length
            if region.session is not None:
                region.session.policy.discard((key,))

    def _unlocated(self, keys: Sequence[str], locations: Sequence[Location]) -> None:
        """Record that these keys are gone from there.

        Called before their pages can be free.
        """
        if self.gone is not None:
            self.gone += zip(keys, locations, strict=True)
        if self.location_watcher is not None:
            self.location_watcher.removed(keys, [location.generation for location in locations])


def depths_of(locations: Sequence[Location]) -> list[int | None] | None:
    """Return the depths of these locations, as a policy takes them.

    ``None`` if none of them is known.
    """
    depths = [location.depth for location in locations]
    return depths if depths.count(None) < len(depths) else None
