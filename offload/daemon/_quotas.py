"""The quota accounts of tenants: the keys that each has stored. Pure.

    admitted (coming) --a tier has it--> there --no tier has it any more--> forgotten
          `-----its store has ended-----> forgotten

Rule 1. A block counts once for its tenant, in however many tiers it is: by its key, which begins with the tenant's
    prefix. Blocks on their way count, too; so concurrent stores do not exceed a quota together. A block counts until
    the last of the stores that bring it has ended, even if it was there before: it may go meanwhile, and come.
Rule 2. To make room, the tenant's own least recently used blocks are deleted, and never another tenant's. Held blocks
    stay. If room is still short, the last blocks are refused.
Rule 3. Changes that a tier announces (:class:`maru.kv_events.KeyBook`) are believed, and nothing else is: an answer to
    a deletion may be older than blocks that have come since. In a tier that announces none, such as a page store, a
    block counts until it is deleted, or is missing when it is its turn to go: there, the count is never too low. At the
    start it is asked to list its keys.
Rule 4. A tenant that gets a quota while engines are served is charged in steps; changes that a tier announces meanwhile
    are newer than its list, and so is a deletion.
Rule 5. A quota that was made smaller holds for the next store; until then the excess is deleted as under rule 2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import attrs

from backends.abc import Deletion, Key
from maru.kv_events import KeyBook, list_lazily

from ._tenants import PREFIX_BYTES, prefix_of

REASON: Final = "quota"
"""Reason of a refused block, as reported to its engine."""
_CHARGED: Final = 2_048
"""Keys that are processed in one step: some 3 us each."""
_UNTOLD: Final = 1
"""Bit of all tiers that do not announce changes of their keys."""


@attrs.define(eq=False)
class Account:
    """The account of one tenant: its stored blocks."""

    tenant: str
    quota_bytes: int
    refused: int = 0
    """Blocks that were refused although all that may go was deleted."""
    evicted: int = 0
    """Blocks that were deleted to make room for others of this tenant."""
    is_charged: bool = False
    """Whether the keys of announcing tiers are counted."""
    is_listed: bool = False
    """Whether the other tiers, which can list their keys, were asked."""
    gone: set[Key] | None = attrs.field(default=None, repr=False)
    """Keys deleted during a listing; ``None`` if there is none."""
    _there: OrderedDict[Key, int] = attrs.field(factory=OrderedDict, repr=False)
    """Bits of the tiers that have each key, least recently used first."""
    _coming: dict[Key, int] = attrs.field(factory=dict, repr=False)
    """Number of stores that bring each key."""
    _new: set[Key] = attrs.field(factory=set, repr=False)
    """Keys that are coming, and not there."""

    def __len__(self) -> int:
        return len(self._there) + len(self._new)

    # --- making room ------------------------------------------------------------------------------------------------

    def shortage(self, keys: Iterable[Key], block_bytes: int) -> int:
        """Return how many blocks must be deleted, so that these fit."""
        new = sum(key not in self._there and key not in self._coming for key in dict.fromkeys(keys))
        return max(0, len(self) + new - self.quota_bytes // block_bytes)

    def victims(self, n: int, stays: Collection[Key]) -> list[Key]:
        """Return the ``n`` least recently used blocks, except some that stay."""
        return list(islice((key for key in self._there if key not in stays), n))

    def asked(self, keys: Sequence[Key], answers: Sequence[Deletion]) -> None:
        """Record the answers of all tiers to a deletion that makes room.

        Blocks that stay are used, or may be: they go last.
        """
        for key, answer in zip(keys, answers, strict=True):
            self.evicted += answer is Deletion.DELETED
            if answer in (Deletion.DELETED, Deletion.MISSING):
                self.removed((key,), _UNTOLD)
            if key in self._there:
                self._there.move_to_end(key)

    def admit(self, keys: Sequence[Key], block_bytes: int) -> tuple[list[Key], list[int]]:
        """Admit blocks as far as there is room.

        Returns those, to be :meth:`settled`, and the positions of the refused.
        """
        room = self.quota_bytes // block_bytes - len(self)
        coming: dict[Key, None] = {}
        refused: list[int] = []
        for at, key in enumerate(keys):
            if key in coming:
                continue
            if key not in self._there and key not in self._coming:
                if room <= 0:
                    refused.append(at)
                    continue
                room -= 1
                self._new.add(key)
            coming[key] = None
        for key in coming:
            self._coming[key] = self._coming.get(key, 0) + 1
        self.refused += len(refused)
        return list(coming), refused

    # --- changes of blocks ------------------------------------------------------------------------------------------

    def settled(self, coming: Iterable[Key]) -> None:
        """End the store that these blocks were admitted for.

        Blocks that no other store brings are not coming any more.
        """
        for key in coming:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]
                self._new.discard(key)

    def stored(self, keys: Iterable[Key], place: int) -> None:
        """Record blocks that a tier has, which counts as a use."""
        there, gone = self._there, self.gone if place == _UNTOLD else None
        for key in keys:
            there[key] = there.get(key, 0) | place
            there.move_to_end(key)
            self._new.discard(key)
            if gone:
                gone.discard(key)

    def listed(self, keys: Iterable[Key], place: int) -> None:
        """Count keys that a tier already had.

        They are less recently used than all others.
        """
        there = self._there
        for key in keys:
            is_new = key not in there
            there[key] = there.get(key, 0) | place
            if is_new:
                there.move_to_end(key, last=False)
            self._new.discard(key)

    def removed(self, keys: Iterable[Key], place: int) -> None:
        """Record keys that a tier does not have any more."""
        for key in keys:
            if self.gone is not None and place == _UNTOLD:
                self.gone.add(key)
            places = self._there.get(key, 0) & ~place
            if places:
                self._there[key] = places
            elif self._there.pop(key, None) is not None and key in self._coming:
                self._new.add(key)

    def deleted(self, keys: Sequence[Key], answers: Sequence[Deletion]) -> None:
        """Record the answers to a deletion by the tenant."""
        for key, answer in zip(keys, answers, strict=True):
            if answer in (Deletion.DELETED, Deletion.MISSING):
                self.removed((key,), _UNTOLD)

    def used(self, keys: Iterable[Key]) -> None:
        """Record the use of blocks that were found."""
        for key in keys:
            if key in self._there:
                self._there.move_to_end(key)


class Quotas:
    """The accounts of all tenants with a quota.

    Attributes:
        block_bytes: size of every block; 0 until the tiers are open.
        all_told: whether every tier announces changes of its keys: rule 3.
    """

    def __init__(self) -> None:
        self.block_bytes: int = 0
        self.all_told: bool = True
        self._accounts: dict[bytes, Account] = {}  # by the prefix of the tenant's keys
        self._books: list[KeyBook[Key]] = []
        self._watching = False
        self._gone: tuple[int, set[Key]] = (0, set())
        """Bit of the tier being listed, and keys that left it since."""

    def __iter__(self) -> Iterator[Account]:
        return iter(list(self._accounts.values()))

    def of(self, tenant: str) -> Account | None:
        """Return the account of this tenant; ``None`` if it has no quota."""
        return self._accounts.get(prefix_of(tenant)) if self._accounts else None

    def configure(self, quotas: Mapping[str, int]) -> None:
        """Set the quotas, in bytes by tenant.

        A tenant that had none is to be charged: :meth:`charging`.
        """
        before, self._accounts = self._accounts, {}
        for tenant, quota_bytes in quotas.items():
            prefix = prefix_of(tenant)
            account = before.get(prefix)
            if account is None:
                account = Account(tenant, quota_bytes)
            account.quota_bytes = quota_bytes
            self._accounts[prefix] = account
        self._watch()

    def open(self, block_bytes: int, books: Iterable[KeyBook[Key]], *, all_told: bool) -> None:
        """Charge the blocks in the open tiers, and follow changes.

        Args:
            block_bytes: size of every block.
            books: the tiers that announce changes of their keys.
            all_told: whether every tier does.
        """
        self.block_bytes = block_bytes
        self._books = list(books)
        self.all_told = all_told
        self._watch()
        for account in self:
            account.is_charged = False  # with these books
        for _ in self.charging():  # at once: nobody is served yet
            pass

    def listing(self, account: Account, keys: list[Key]) -> Generator[None, None, None]:
        """Charge an account with listed keys of a page store, in steps.

        The keys are taken from the list. All blocks that were used before the end count as used later, and a key that
        was deleted between two steps is not charged. Close the iterator if it is left before its end.
        """
        gone = account.gone = set()
        try:
            while keys:
                piece = keys[-_CHARGED:]
                del keys[-_CHARGED:]
                account.listed([key for key in reversed(piece) if key not in gone], _UNTOLD)
                yield
        finally:
            account.gone = None

    def settled(self, account: Account, coming: Iterable[Key], there: Iterable[Key]) -> None:
        """Record the end of a store, and its blocks in tiers."""
        account.settled(coming)
        if not self.all_told:
            account.stored(there, _UNTOLD)

    def found(self, tenant: str, keys: Iterable[Key]) -> None:
        """Record blocks that a lookup of this tenant has found.

        If not all tiers announce changes, one may have had them since before.
        """
        account = self.of(tenant)
        if account is not None and self.all_told:
            account.used(keys)
        elif account is not None:
            account.stored(keys, _UNTOLD)

    def deleted(self, tenant: str, keys: Sequence[Key], answers: Sequence[Deletion]) -> None:
        """Record the answers to a tenant's deletion."""
        account = self.of(tenant)
        if account is not None:
            account.deleted(keys, answers)

    def counters(self, tenant: str | None = None) -> dict[str, float]:
        """Return each counter by name: of one tenant, or of all."""
        return {
            f"tenant.{account.tenant}.{name}": value
            for account in self._accounts.values()
            if tenant is None or account.tenant == tenant
            for name, value in (
                ("quota_bytes", account.quota_bytes),
                ("used_bytes", len(account) * self.block_bytes),
                ("evicted_blocks", account.evicted),
                ("refused_blocks", account.refused),
            )
        }

    # --- announcements of tiers -------------------------------------------------------------------------------------

    def charging(self) -> Iterator[None]:
        """Charge accounts not charged yet, in steps: rule 4.

        One caller at a time.
        """
        accounts = {prefix: account for prefix, account in self._accounts.items() if not account.is_charged}
        if not accounts:
            return
        for at, book in enumerate(self._books):
            _, gone = self._gone = (_bit(at), set())
            for keys in _in_pieces(book):
                found: dict[bytes, list[Key]] = {}
                for key in keys:
                    if key[:PREFIX_BYTES] in accounts and key not in gone:
                        found.setdefault(key[:PREFIX_BYTES], []).append(key)
                for prefix, its in found.items():
                    accounts[prefix].listed(reversed(its), _bit(at))
                yield
        self._gone = (0, set())
        for account in accounts.values():
            account.is_charged = True

    def _watch(self) -> None:
        """Follow the tiers from the first quota on.

        Without a quota, changes cost nothing here.
        """
        if self._accounts and self._books and not self._watching:
            self._watching = True
            for at, book in enumerate(self._books):
                book.watch_keys(_Watcher(self, _bit(at)))

    def _by_account(self, keys: Iterable[Key]) -> Iterable[tuple[Account, list[Key]]]:
        found: dict[Account, list[Key]] = {}
        for key in keys:
            account = self._accounts.get(key[:PREFIX_BYTES])
            if account is not None:
                found.setdefault(account, []).append(key)
        return found.items()


def _bit(at: int) -> int:
    return _UNTOLD << 1 + at


def _in_pieces(book: KeyBook[Key]) -> Iterator[Sequence[Key]]:
    """Yield the keys of a tier, the last ones first."""
    keys = list_lazily(book)
    for end in range(len(keys), 0, -_CHARGED):
        yield keys[max(0, end - _CHARGED) : end]


@attrs.frozen(eq=False)
class _Watcher:
    """Follows the keys of one tier."""

    _quotas: Quotas
    _place: int

    def stored(self, keys: Sequence[Key]) -> None:
        place, gone = self._quotas._gone
        if place == self._place:
            gone.difference_update(keys)
        for account, its in self._quotas._by_account(keys):
            account.stored(its, self._place)

    def removed(self, keys: Sequence[Key]) -> None:
        place, gone = self._quotas._gone
        if place == self._place:
            gone.update(keys)
        for account, its in self._quotas._by_account(keys):
            account.removed(its, self._place)
