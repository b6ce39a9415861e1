"""Pins, counted for each holder, and recent reads of published clients. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence

from .slices import FORGOTTEN_AT_ONCE


class Pins:
    """Counted pins of holders.

    A holder is a number: a session of ours (positive) or a published connection (negative).

    Rule 1. A key's pins are the sum of its holders' pins; a key without any is not known here.
    Rule 2. A session drops its own pins only. Published connections share theirs: one may drop a pin taken by another.
    Rule 3. A session sends requests in *pin epochs*, which its client numbers upwards. A request of a past epoch does
            nothing, and pins of earlier epochs are kept apart until the client has reported which of them it holds: so
            pins taken by an answer that was lost are found, whatever is pinned meanwhile. One pin less is one of the
            latest epoch, if there is one: for earlier ones the client has reported, or will report, the pins that it
            holds.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Pins of each pinned key, of all holders together."""
        self.entries = 0
        """Number of pinned keys, each counted once for each of its holders.

        So many entries are in memory.
        """
        self._of: dict[int, dict[str, int]] = {}
        self._earlier: dict[int, list[dict[str, int]]] = {}  # taken in earlier epochs, and not confirmed since
        self._epochs: dict[int, int] = {}  # the latest epoch, unless it is 0
        self._leaving: deque[tuple[int, dict[str, int]]] = deque()  # without a holder, but still counted
        self._shared: dict[str, dict[int, None]] = {}  # by key, the published connections that pinned it

    def has(self, holder: int) -> bool:
        """Return whether this holder has a pin."""
        return holder in self._of or holder in self._earlier

    def entries_of(self, holder: int) -> int:
        """Return the number of keys that this holder has pinned.

        Keys of earlier epochs are counted again.
        """
        return len(self._of.get(holder, ())) + sum(map(len, self._earlier.get(holder, ())))

    def add(self, holder: int, keys: Sequence[str]) -> Sequence[str]:
        """Add one pin to each key.

        Return the keys that had none before.
        """
        if not keys:
            return keys
        own = self._of.setdefault(holder, {})
        if holder < 0:
            for key in keys:
                self._shared.setdefault(key, {})[holder] = None
        before = len(own)
        first = self._add(own, keys)
        self.entries += len(own) - before
        return first

    def _add(self, own: dict[str, int], keys: Sequence[str]) -> Sequence[str]:
        counts = self.counts
        if counts.keys().isdisjoint(keys):
            fresh = dict.fromkeys(keys, 1)
            if len(fresh) == len(keys):
                counts.update(fresh)
                own.update(fresh)
                return keys
        first: list[str] = []
        for key in keys:
            count = counts.get(key, 0)
            if not count:
                first.append(key)
            counts[key] = count + 1
            own[key] = own.get(key, 0) + 1
        return first

    def drop(self, holder: int, keys: Iterable[str]) -> tuple[list[bool], list[str]]:
        """Remove one pin from each key.

        Returns:
            Whether each key had one, and the keys that have none any more.
        """
        counts, of = self.counts, self._of
        own = of.get(holder, {})
        parts = self._earlier.get(holder, [])
        before = self.entries_of(holder)
        dropped: list[bool] = []
        last: list[str] = []
        for key in keys:
            count = own.get(key)
            if count is None and parts and _take(parts, key, 1):
                pass
            elif count is None:
                if holder > 0 or not self._drop_another_ones(key):
                    dropped.append(False)
                    continue
            elif count == 1:
                del own[key]
                self._not_shared(holder, key)
            else:
                own[key] = count - 1
            dropped.append(True)
            count = counts[key]
            if count == 1:
                del counts[key]
                last.append(key)
            else:
                counts[key] = count - 1
        if not own:
            of.pop(holder, None)
        self._tidy_earlier(holder)
        self.entries += self.entries_of(holder) - before
        return dropped, last

    def drop_all(self, holder: int) -> list[str]:
        """Remove this holder and its pins.

        Return the keys without a pin now.
        """
        self._epochs.pop(holder, None)
        last = []
        for own in (*self._earlier.pop(holder, ()), self._of.pop(holder, {})):
            last += self._leave(holder, own)
        return last

    def forget(self, keys: Iterable[str]) -> None:
        """Remove the pins of these keys for all holders.

        The keys do not exist any more.
        """
        for key in keys:
            if self.counts.pop(key, 0):
                for _, leaving in self._leaving:
                    self.entries -= key in leaving
                    leaving.pop(key, None)
                self._shared.pop(key, None)
                for holder in [holder for holder, own in self._of.items() if key in own]:
                    own = self._of[holder]
                    del own[key]
                    self.entries -= 1
                    if not own:
                        del self._of[holder]
                for holder in list(self._earlier):
                    for part in self._earlier[holder]:
                        self.entries -= part.pop(key, 0) > 0
                    self._tidy_earlier(holder)

    # --- pin epochs -----------------------------------------------------------------------------------------------

    def enter_pin_epoch(self, holder: int, epoch: int) -> bool:
        """Note that this session is in this pin epoch.

        False if it has sent a later one: then nothing is to be done.
        """
        latest = self._epochs.get(holder, 0)
        if epoch == latest:
            return True
        if epoch < latest:
            return False
        self._epochs[holder] = epoch
        own = self._of.pop(holder, None)
        if own is not None:
            self._add_earlier(holder, own)
        return True

    def _add_earlier(self, holder: int, own: dict[str, int]) -> None:
        """Keep the pins of an epoch as those of an earlier one.

        To merge as many pins as a session may have takes 50 ms. So at most two small parts are merged at once, and no
        part is added while there are two: there are few parts.
        """
        parts = self._earlier.setdefault(holder, [])
        parts.append(own)
        small = [at for at, part in enumerate(parts) if len(part) <= FORGOTTEN_AT_ONCE]
        if len(small) > 1:
            there, more = parts[small[0]], parts.pop(small[1])
            before = len(there) + len(more)
            for key, count in more.items():
                there[key] = there.get(key, 0) + count
            self.entries += len(there) - before

    def _tidy_earlier(self, holder: int) -> None:
        """Forget the empty parts of earlier epochs."""
        parts = self._earlier.get(holder)
        if parts is not None and not all(parts):
            parts[:] = filter(None, parts)
            if not parts:
                del self._earlier[holder]

    def reconcile(self, holder: int, keys: Iterable[str], counts: Iterable[int]) -> None:
        """Keep so many pins that this session took in earlier epochs.

        It cannot hold more than it took.
        """
        parts = self._earlier.get(holder)
        if parts is None:
            return
        before = self.entries_of(holder)
        own = self._of.setdefault(holder, {})
        for key, count in zip(keys, counts, strict=True):
            kept = _take(parts, key, count)
            if kept:
                own[key] = own.get(key, 0) + kept
        if not own:
            del self._of[holder]
        self._tidy_earlier(holder)
        self.entries += self.entries_of(holder) - before

    def drop_earlier(self, holder: int) -> tuple[int, list[str]]:
        """Drop the pins of earlier epochs that the session did not name.

        Returns:
            How many pins, and the keys that have none any more.
        """
        count, last = 0, []
        for part in self._earlier.pop(holder, ()):
            count += sum(part.values())
            last += self._leave(holder, part)
        return count, last

    @property
    def is_leaving(self) -> bool:
        """Whether :meth:`let_go_some` has something to do.

        Many pins that go at once count until then.
        """
        return bool(self._leaving)

    def let_go_some(self) -> list[str]:
        """Release some of the pins without a holder.

        Return the keys without a pin now.
        """
        holder, leaving = self._leaving[0]
        some = dict([leaving.popitem() for _ in range(min(len(leaving), FORGOTTEN_AT_ONCE))])
        if not leaving:
            self._leaving.popleft()
        return self._let_go(holder, some)

    def _leave(self, holder: int, own: dict[str, int]) -> list[str]:
        """Release the pins of an ended session, a few at once.

        Return the keys without a pin.
        """
        if len(own) <= FORGOTTEN_AT_ONCE:
            return self._let_go(holder, own)
        self._leaving.append((holder, own))
        return []

    def _let_go(self, holder: int, own: dict[str, int]) -> list[str]:
        """Remove so many pins of each key.

        Return the keys without a pin now.
        """
        counts = self.counts
        self.entries -= len(own)
        last: list[str] = []
        for key, count in own.items():
            self._not_shared(holder, key)
            left = counts[key] - count
            if left:
                counts[key] = left
            else:
                del counts[key]
                last.append(key)
        return last

    def _drop_another_ones(self, key: str) -> bool:
        """Remove a pin of another published connection, if one has any."""
        for holder in self._shared.get(key, ()):
            own = self._of.get(holder)
            if own is None:  # its pins are being released
                continue
            if own[key] > 1:
                own[key] -= 1
            else:
                del own[key]
                self.entries -= 1
                self._not_shared(holder, key)
                if not own:
                    del self._of[holder]
            return True
        return False

    def _not_shared(self, holder: int, key: str) -> None:
        """Note that this holder has no pin on the key any more."""
        if holder < 0:
            holders = self._shared.get(key)
            if holders is not None:
                holders.pop(holder, None)
                if not holders:
                    del self._shared[key]


def _take(parts: Iterable[dict[str, int]], key: str, count: int) -> int:
    """Take at most so many pins of a key. Return how many."""
    taken = 0
    for own in parts:
        if taken >= count:
            break
        there = own.get(key)
        if there is not None:
            some = min(there, count - taken)
            taken += some
            if some < there:
                own[key] = there - some
            else:
                del own[key]
    return taken


class ReadGrace:
    """Keys that published connections have looked up lately.

    Such connections read without pins, and cannot be asked to stop. Time runs in periods of ``grace`` seconds, and keys
    noted in one period are kept until the next one is over: for one to two times ``grace``. So noting costs nothing but
    the insertion, and forgetting nothing at all.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._period = -math.inf
        self._new: set[str] = set()  # noted in this period
        self._old: set[str] = set()  # noted in the one before

    def __contains__(self, key: object) -> bool:
        return key in self._new or key in self._old

    def note(self, keys: Iterable[str], now: float) -> None:
        """Note that these keys were looked up."""
        if self._grace > 0:
            self.forget_before(now)
            self._new.update(keys)

    def forget_before(self, now: float) -> None:
        """Forget keys that are old enough."""
        period = now // self._grace if self._grace > 0 else 0.0
        if period != self._period:
            self._old = self._new if period == self._period + 1 else set()
            self._new = set()
            self._period = period


class Held:
    """The keys that may not be evicted now.

    An eviction policy queries them.
    """

    __slots__ = ("_also", "_boards", "_grace", "_pins", "passed")

    def __init__(self, pins: Pins, grace: Container[str], also: Container[str], boards: Container[str]) -> None:
        self._pins = pins.counts
        self._grace = grace
        self._also = also
        self._boards = boards
        self.passed = 0
        """Number of queried keys that had to stay."""

    def __contains__(self, key: object) -> bool:
        if key in self._pins or key in self._grace or key in self._also or key in self._boards:
            self.passed += 1
            return True
        return False
