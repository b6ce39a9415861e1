"""Validation of a registration: what would become of each of its entries, before any of it happens. Pure.

Entries are validated one after the other, each with what those before it do: a key that an earlier entry registers is a
duplicate, a key that an earlier entry writes over is none. What :func:`validate` finds new, ``State.enter`` can register.
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
    """What would become of a registration."""

    statuses: list[int]
    """A ``StoreStatus`` each, as a number."""
    skipped: list[int]
    """The positions of those that are not new."""
    refused: int
    """How many are neither new nor duplicates."""
    written_over: set[str]
    """Keys that are there now, and would give way to what is written at their offset."""
    more_bytes: dict[Session, int]
    """What all of it takes, by owner, less what gives way."""
    more_entries: int


class RemainingQuota:
    """What the quotas still allow to be registered: in keys, and in bytes on each account with a quota."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._left: dict[Account, int] = {}

    def take(self, session: Session, more_bytes: int, more_entries: int) -> bool:
        """Use up so much of it for this session; False, and nothing used, where it is not enough."""
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
    """What would become of each entry.

    Args:
        columns: the registration.
        regions: those in which the requesting session may register.
        located: where the keys lie that are there.
        pinned: the keys that must stay.
        max_key_bytes: a longer key cannot be one.
        quiet: whether any key may be pinned, unknown to us.
        remaining: what may still be registered; used up by this. ``None``: anything.
    """
    n = len(columns.keys)
    region_ids = [columns.regions] * n if isinstance(columns.regions, int) else columns.regions
    lengths = [columns.lengths] * n if isinstance(columns.lengths, int) else columns.lengths
    statuses: list[int] = []
    skipped: list[int] = []
    written_over: set[str] = set()
    more_bytes: dict[Session, int] = {}
    more_entries = 0
    there: dict[str, bool] = {}  # what the entries so far change: which key is there, and what lies at a place
    lies_at: dict[tuple[int, int], tuple[str, int]] = {}
    for key, region_id, offset, length in zip(columns.keys, region_ids, columns.offsets, lengths, strict=True):
        region = regions.get(region_id)
        if len(key) * 4 > max_key_bytes and len(key.encode()) > max_key_bytes:
            status = _KEY
        elif region is None:
            status = _FOREIGN
        elif length < 1 or offset < 0 or offset + length > region.length:
            status = _RANGE
        elif there.get(key, key in located):
            status = DUPLICATE
        elif offset in region.returning:
            # The owner has not applied the return of this page yet. Once it does, the page is free to it: a key registered
            # there now would have its bytes overwritten by the next store.
            status = _BUSY
        else:
            place = region_id, offset
            old, old_length = "", 0
            if place in lies_at:
                old, old_length = lies_at[place]
            elif offset in region.keys_at:
                old = region.keys_at[offset]
                old_length = located[old].length
            if old_length and (quiet or old in pinned):
                # What lies there is read, or in quiet time may be: it stays found where it is until its pins are gone.
                status = _PINNED
            else:
                owner = region.session
                assert owner is not None  # it may be registered in
                more = 0 if old_length else 1
                if remaining is not None and not remaining.take(owner, length - old_length, more):
                    status = _QUOTA
                else:
                    status = NEW
                    if old_length:
                        there[old] = False
                        if old in located:
                            written_over.add(old)
                    there[key] = True
                    lies_at[place] = key, length
                    more_bytes[owner] = more_bytes.get(owner, 0) + length - old_length
                    more_entries += more
        if status:
            skipped.append(len(statuses))
        statuses.append(status)
    refused = len(skipped) - statuses.count(DUPLICATE)
    return Validation(statuses, skipped, refused, written_over, more_bytes, more_entries)
