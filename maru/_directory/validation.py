"""Validation of a registration: the status of each entry, before any change.

Pure. Entries are validated one after the other, each after the effects of those before it: a key that an earlier entry
registers is a duplicate, a key that an earlier entry writes over is none. ``State.enter`` can register the entries that
:func:`validate` finds new.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final, NamedTuple

from .._wire.messages_own import StoreStatus
from .locations import Columns, Location
from .regions import Account, Region
from .sessions import Session

# As plain numbers: looking up `.value` of an enum costs more than all else here.
NEW: Final = StoreStatus.NEW.value
DUPLICATE: Final = StoreStatus.DUPLICATE.value
_PINNED: Final = StoreStatus.PINNED.value
_FOREIGN: Final = StoreStatus.FOREIGN.value
_RANGE: Final = StoreStatus.RANGE.value
_QUOTA: Final = StoreStatus.QUOTA.value
_KEY: Final = StoreStatus.KEY.value
_BUSY: Final = StoreStatus.BUSY.value


class Validation(NamedTuple):
    """Result of validating a registration."""

    statuses: list[int]
    """A ``StoreStatus`` for each entry, as a number."""
    skipped: list[int]
    """Positions of the entries that are not new."""
    refused: int
    """Number of entries that are neither new nor duplicates."""
    written_over: set[str]
    """Existing keys that would give way to entries at their offset."""
    more_bytes: dict[Session, int]
    """Bytes that the entries take, by owner, less those that give way."""
    more_entries: int


class RemainingQuota:
    """Rest of the quotas in keys, and in bytes by account."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._left: dict[Account, int] = {}

    def take(self, session: Session, more_bytes: int, more_entries: int) -> bool:
        """Take so much of the quotas for this session.

        Return False, with nothing taken, if too little is left.
        """
        if more_entries > self._entries:
            return False
        accounts = [account for account in (session.instance, session.tenant_account) if account.quota_bytes]
        left = [self._left.get(account, account.quota_bytes - account.charged_bytes) for account in accounts]
        if left and more_bytes > min(left):
            return False
        self._entries -= more_entries
        for account, bytes_left in zip(accounts, left, strict=True):
            self._left[account] = bytes_left - more_bytes
        return True


def validate(
    columns: Columns,
    regions: Mapping[int, Region],
    located: Mapping[str, Location],
    pinned: Container[str],
    *,
    max_key_bytes: int,
    quiet: bool = False,
    remaining: RemainingQuota | None = None,
) -> Validation:
    """Return the status of each entry.

    Args:
        columns: the registration.
        regions: those in which the requesting session may register.
        located: the locations of all existing keys.
        pinned: the keys that must stay.
        max_key_bytes: a longer key is refused.
        quiet: whether any key may be pinned, unknown to us.
        remaining: the rest of the quotas, which this uses up. ``None``: no limit.
    """
    n = len(columns.keys)
    region_ids = [columns.regions] * n if isinstance(columns.regions, int) else columns.regions
    lengths = [columns.lengths] * n if isinstance(columns.lengths, int) else columns.lengths
    entries = _Entries(regions, located, pinned, max_key_bytes, quiet, remaining)
    status_of = entries.status_of
    statuses = [status_of(*entry) for entry in zip(columns.keys, region_ids, columns.offsets, lengths, strict=True)]
    skipped = [at for at, status in enumerate(statuses) if status]
    refused = len(skipped) - statuses.count(DUPLICATE)
    return Validation(statuses, skipped, refused, entries.written_over, entries.more_bytes, entries.more_entries)


class _Entries:
    """Entries of a registration in order, with their effects so far."""

    __slots__ = (
        "_lies_at", "_located", "_max_key_bytes", "_pinned", "_quiet", "_regions", "_remaining", "_there",
        "more_bytes", "more_entries", "written_over",
    )  # fmt: skip

    def __init__(
        self,
        regions: Mapping[int, Region],
        located: Mapping[str, Location],
        pinned: Container[str],
        max_key_bytes: int,
        quiet: bool,
        remaining: RemainingQuota | None,
    ) -> None:
        self._regions = regions
        self._located = located
        self._pinned = pinned
        self._max_key_bytes = max_key_bytes
        self._quiet = quiet
        self._remaining = remaining
        self._there: dict[str, bool] = {}  # whether a key touched by an entry exists
        self._lies_at: dict[tuple[int, int], tuple[str, int]] = {}  # (key, length) put there by an entry
        self.written_over: set[str] = set()
        self.more_bytes: dict[Session, int] = {}
        self.more_entries = 0

    def status_of(self, key: str, region_id: int, offset: int, length: int) -> int:
        """Return the status of one more entry."""
        region = self._regions.get(region_id)
        if len(key) * 4 > self._max_key_bytes and len(key.encode()) > self._max_key_bytes:
            return _KEY
        if region is None:
            return _FOREIGN
        if length < 1 or offset < 0 or offset + length > region.length:
            return _RANGE
        if self._there.get(key, key in self._located):
            return DUPLICATE
        if offset in region.returning:
            # The owner has not applied the return of this page yet. Once it does, the page is free to it: a key registered
            # there now would have its bytes overwritten by the next store.
            return _BUSY
        return self._status_at(key, region, (region_id, offset), length)

    def _status_at(self, key: str, region: Region, place: tuple[int, int], length: int) -> int:
        """Return the status of an otherwise valid entry.

        Only the key at its place, or a quota, can refuse it.
        """
        old, old_length = "", 0
        if place in self._lies_at:
            old, old_length = self._lies_at[place]
        elif place[1] in region.keys_at:
            old = region.keys_at[place[1]]
            old_length = self._located[old].length
        if old_length and (self._quiet or old in self._pinned):
            # The key there is read, or in quiet time may be: it stays found until its pins are gone.
            return _PINNED
        owner = region.session
        assert owner is not None  # only owned regions can be registered in
        more_bytes, more_entries = length - old_length, 0 if old_length else 1
        if self._remaining is not None and not self._remaining.take(owner, more_bytes, more_entries):
            return _QUOTA
        if old_length:
            self._there[old] = False
            if old in self._located:
                self.written_over.add(old)
        self._there[key] = True
        self._lies_at[place] = key, length
        self.more_bytes[owner] = self.more_bytes.get(owner, 0) + more_bytes
        self.more_entries += more_entries
        return NEW
