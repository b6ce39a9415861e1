"""Registration of keys: usually in bulk, otherwise entry by entry. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from operator import add
from typing import Final

from .changes import Changes
from .eviction_guard import EvictionGuard
from .evictor import Evictor
from .limits import Limits
from .locations import Columns, Registration
from .regions import Account, Region
from .sessions import Session
from .statistics import Counters
from .validation import NEW, RemainingQuota, Validation, validate

_ENTRIES_SHARE: Final = 2
"""Divisor of all entries that bounds an account with a quota.

Keys of one byte each would stay far below its quota of bytes.
"""


class Registrar:
    """Registers keys in regions that the caller may write.

    Makes room for them on the account of the regions' owner.
    """

    def __init__(
        self, changes: Changes, limits: Limits, guard: EvictionGuard, evictor: Evictor, counters: Counters
    ) -> None:
        self._changes = changes
        self._state = changes.state
        self._limits = limits
        self._guard = guard
        self._evictor = evictor
        self._counters = counters

    def register_plain(
        self,
        regions: Mapping[int, Region],
        parts: Mapping[int, Columns],
        columns: Columns,
        source: tuple[int, bytes],
        later: bool,
    ) -> Registration | None:
        """Register all entries in bulk; ``None`` if any entry may be refused."""
        n, total, owners = len(columns.keys), 0, set()
        for region_id, part in parts.items():
            region = regions[region_id]
            part_bytes = self._bytes_if_right(region, part)
            if not part_bytes:
                return None
            total += part_bytes
            owners.add(region.session)
        for owner in owners:
            if owner is None or not self._fits(owner, total, n):
                return None
        first = self._changes.enter_fresh(columns, parts, source, later)
        if not first:
            return None
        self._counters.registered += n
        _count(parts, regions)
        return Registration([NEW] * n, list(range(first, first + n)), first, [])

    def judge(self, regions: Mapping[int, Region], columns: Columns, now: float) -> list[int]:
        """Return a status for each entry, ignoring quotas.

        Nothing is registered, and nothing claimed.
        """
        return self._validate(regions, columns, now, self._guard.pinned_or(())).statuses

    def register(
        self, regions: Mapping[int, Region], columns: Columns, now: float, source: tuple[int, bytes], whole: bool
    ) -> Registration:
        """Register entry by entry, in these regions; see ``Directory.register``."""
        # Claimed before anything is decided: a key that is not held now cannot be held from here on, so the decision
        # stays true.
        lying = _lying_at(regions, columns)
        held = self._guard.claim(lying)
        try:
            return self._register(regions, columns, now, source, whole, self._guard.pinned_or(held))
        finally:
            located = self._state.located
            self._guard.give_up([key for key in lying if key in located and key not in held])

    def _register(
        self,
        regions: Mapping[int, Region],
        columns: Columns,
        now: float,
        source: tuple[int, bytes],
        whole: bool,
        pinned: Container[str],
    ) -> Registration:
        """Register entry by entry, with the keys at these places claimed.

        Those in ``pinned`` stay.
        """
        validation = self._validate(regions, columns, now, pinned)
        if len(validation.skipped) < len(columns.keys) and not (whole and validation.refused):
            validation = self._make_room(regions, columns, validation, now, pinned)
        statuses, skipped, refused = validation.statuses, validation.skipped, validation.refused
        new = len(statuses) - len(skipped)
        self._counters.refused += refused
        if whole and refused:
            return Registration(statuses, [0] * len(statuses), 0, list(range(len(statuses))))
        self._counters.duplicates += len(skipped) - refused
        if not new:
            return Registration(statuses, [0] * len(statuses), 0, skipped)
        first = self._changes.enter(columns, skipped, source)
        self._counters.registered += new
        _count(columns.without(skipped).by_region(), regions)
        fresh = iter(range(first, first + new))
        generations = [0 if status else next(fresh) for status in statuses]
        return Registration(statuses, generations, first, skipped)

    def _bytes_if_right(self, region: Region, part: Columns) -> int:
        """Return the bytes of these entries; 0 if any is invalid.

        It is not checked whether a key or an offset is taken, or named twice.
        """
        keys, offsets, lengths = part.keys, part.offsets, part.lengths
        if isinstance(lengths, int):
            total, least, end = lengths * len(keys), lengths, max(offsets) + lengths
        else:
            total, least, end = sum(lengths), min(lengths), max(map(add, offsets, lengths))
        right = (
            least > 0
            and end <= region.length
            and min(offsets) >= 0
            and max(map(len, keys)) * 4 <= self._limits.max_key_bytes
            and (not region.returning or region.returning.keys().isdisjoint(offsets))
        )
        return total if right else 0

    def _fits(self, owner: Session, more_bytes: int, more_entries: int) -> bool:
        return not (
            owner.instance.excess(more_bytes)
            or owner.tenant_account.excess(more_bytes)
            or self._entries_excess(owner, more_entries)
            or len(self._state.located) + more_entries > self._limits.max_entries
        )

    def _entries_excess(self, owner: Session, more_entries: int) -> int:
        """Return the excess of keys of an account with a quota.

        Such an account may have a part of all entries. Both accounts of this owner are checked. Not negative.
        """
        most = self._limits.max_entries // _ENTRIES_SHARE
        if len(self._state.located) + more_entries <= most:  # nearly always, so nothing is counted
            return 0
        accounts = [account for account in (owner.instance, owner.tenant_account) if account.quota_bytes]
        return max([0, *[account.entries + more_entries - most for account in accounts]])

    def _validate(
        self,
        regions: Mapping[int, Region],
        columns: Columns,
        now: float,
        pinned: Container[str],
        remaining: RemainingQuota | None = None,
    ) -> Validation:
        return validate(
            columns,
            regions,
            self._state.located,
            pinned,
            max_key_bytes=self._limits.max_key_bytes,
            quiet=self._guard.is_quiet(now),
            remaining=remaining,
        )

    def _make_room(
        self,
        regions: Mapping[int, Region],
        columns: Columns,
        validation: Validation,
        now: float,
        pinned: Container[str],
    ) -> Validation:
        """Evict keys beyond the quotas, as far as allowed.

        Return the new validation. It may refuse some entries.
        """
        if self._all_fits(validation):
            return validation
        # Keys named by this batch must stay: an evicted duplicate would be no duplicate any more, but its entry was
        # answered as one. Keys that it writes over give their bytes back anyway, which the validation has counted
        # already.
        stays = validation.written_over.union(columns.keys)
        for account, more in _charges(validation).items():
            excess = account.excess(more)
            if excess:
                sharing = account.sessions.values()
                first = [owner for owner in validation.more_bytes if owner in sharing]
                self._evictor.evict_bytes(dict.fromkeys([*first, *sharing]), excess, stays, now)
        for owner in validation.more_bytes:
            excess = self._entries_excess(owner, validation.more_entries)
            for one in dict.fromkeys([owner, *self._sharing(owner)]):
                if excess > 0:
                    excess -= self._evictor.evict(one, excess, now, stays)
            excess = len(self._state.located) + validation.more_entries - self._limits.max_entries
            if excess > 0:
                self._evictor.evict(owner, excess, now, stays)
        if self._all_fits(validation):
            return validation
        entries = self._limits.max_entries - len(self._state.located)
        for owner in validation.more_bytes:
            entries = min(entries, validation.more_entries - self._entries_excess(owner, validation.more_entries))
        left = RemainingQuota(max(0, entries))
        return self._validate(regions, columns, now, pinned, left)

    def _sharing(self, owner: Session) -> list[Session]:
        """Return the sessions that share a quota with this one."""
        accounts = [account for account in (owner.instance, owner.tenant_account) if account.quota_bytes]
        return [session for account in accounts for session in account.sessions.values()]

    def _all_fits(self, validation: Validation) -> bool:
        if len(self._state.located) + validation.more_entries > self._limits.max_entries:
            return False
        if any([self._entries_excess(owner, validation.more_entries) for owner in validation.more_bytes]):
            return False
        return not any([account.excess(more) for account, more in _charges(validation).items()])


def _lying_at(regions: Mapping[int, Region], columns: Columns) -> list[str]:
    """Return the keys that lie at the places of these entries."""
    if isinstance(columns.regions, int):
        region = regions.get(columns.regions)
        return [] if region is None else _named(map(region.keys_at.get, columns.offsets))
    places = zip(columns.regions, columns.offsets, strict=True)
    return _named([regions[at].keys_at.get(offset) for at, offset in places if at in regions])


def _named(keys: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys([key for key in keys if key is not None]))


def _count(parts: Mapping[int, Columns], regions: Mapping[int, Region]) -> None:
    """Count these registrations for the owners of the regions."""
    for region_id, part in parts.items():
        owner = regions[region_id].session
        assert owner is not None
        owner.registered += len(part.keys)


def _charges(validation: Validation) -> dict[Account, int]:
    """Return the bytes that the new entries take of each account."""
    charges: dict[Account, int] = {}
    for owner, more in validation.more_bytes.items():
        for account in (owner.instance, owner.tenant_account):
            charges[account] = charges.get(account, 0) + more
    return charges
