"""Sessions of clients: leases, fenced attempts, and pages on the way back.

Pure.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

import attrs

from .._wire.messages_own import Returns
from ..eviction import EvictionPolicy

if TYPE_CHECKING:
    from .limits import Limits
    from .regions import Account, Region

_PLAIN: Final = 512
"""Most answers that are remembered without packing.

Packing few costs more than it saves.
"""
_ZLIB: Final = b"x"
"""First byte of packed answers, which no answer is."""
_KEPT: Final = 1 - 1 / 256
"""Share of the pages kept ahead that remains after an answer.

Half of them are left after some 180 answers.
"""


class Leases:
    """End times of numbered leases.

    Setting one costs the same however many there are and however often it is done: a heap of times, whose postponed
    entries are only found when they come up.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._queued: dict[int, float] = {}  # the entry of the heap that counts
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._until)

    def set(self, number: int, until: float) -> None:
        """Set the end of this lease, later or earlier than before."""
        self._until[number] = until
        if until < self._queued.get(number, math.inf):
            self._queued[number] = until
            heapq.heappush(self._heap, (until, number))

    def until(self, number: int) -> float:
        """Return the end of this lease; ``inf`` if it is unknown."""
        return self._until.get(number, math.inf)

    def discard(self, number: int) -> None:
        """Forget the end of this lease."""
        self._until.pop(number, None)

    def next(self) -> float:
        """Return the time of the next end, or an earlier one.

        ``inf`` if there is none.
        """
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float, most: float = math.inf) -> list[int]:
        """Remove and return the numbers whose leases have ended by ``now``.

        They are in the order of their ends, and at most ``most``.
        """
        ended: list[tuple[float, int]] = []
        heap = self._heap
        while heap and heap[0][0] <= now and len(ended) < most:
            at, number = heapq.heappop(heap)
            if self._queued.get(number) != at:
                continue  # an earlier entry took its place, or it came up already
            del self._queued[number]
            until = self._until.get(number)
            if until is None:
                continue
            if until <= now:
                del self._until[number]
                ended.append((until, number))
            else:
                self._queued[number] = until
                heapq.heappush(heap, (until, number))
        ended.sort()
        return [number for _, number in ended]


class Fences:
    """Attempts of one session that are refused if they still arrive.

    At most ``limit`` are kept one by one; beyond that, every attempt up to the lowest of them is refused. An attempt so
    old that a thousand later ones were resolved has been lost on the way.
    """

    def __init__(self, limit: int, attempts: Iterable[int] = (), floor: int = 0) -> None:
        self._limit = limit
        self.attempts = set(attempts)
        self.floor = floor

    def __contains__(self, attempt: int) -> bool:
        return attempt in self.attempts or 0 < attempt <= self.floor

    def add(self, attempt: int) -> None:
        """Refuse this attempt from now on."""
        if attempt > self.floor:
            self.attempts.add(attempt)
        while len(self.attempts) > self._limit:
            self.floor = min(self.attempts)
            self.attempts.remove(self.floor)


class Outbox:
    """Pages on the way back to one owner, until it acknowledges them.

    They have ascending numbers from 1.
    """

    def __init__(self, acknowledged: int = 0, pages: Iterable[tuple[int, int, int]] = ()) -> None:
        self.acknowledged = acknowledged
        """The number up to which the owner has applied them."""
        self.pages: deque[tuple[int, int, int]] = deque(pages)
        """(region_id, offset, attempt) of the pages from ``acknowledged + 1`` on.

        Pages that go back are added at the end.
        """
        self._sent = acknowledged

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def last(self) -> int:
        """The number of the last page."""
        return self.acknowledged + len(self.pages)

    @property
    def unsent(self) -> int:
        """Number of pages not sent to the owner yet."""
        return self.last - self._sent

    @property
    def under_way(self) -> int:
        """Number of pages sent to the owner, but not acknowledged."""
        return self._sent - self.acknowledged

    def acknowledge(self, number: int) -> list[tuple[int, int, int]]:
        """Record that the owner has applied all up to ``number``.

        Return the new ones. Numbers that were never given mean all.
        """
        pop = self.pages.popleft
        news = [pop() for _ in range(min(number - self.acknowledged, len(self.pages)))]
        self.acknowledged += len(news)
        self._sent = max(self._sent, self.acknowledged)
        return news

    def pending(self, resend: bool, limit: int) -> Returns | None:
        """Return the next pages, and mark them as sent; at most ``limit``.

        The next that were not sent yet or, with ``resend``, the first that are not acknowledged. ``None`` if there are
        none.
        """
        before = self.acknowledged if resend else self._sent
        skip = before - self.acknowledged
        if skip == len(self.pages):
            return None
        chosen = list(islice(self.pages, skip, skip + limit))
        self._sent = max(self._sent, before + len(chosen))
        regions, offsets, attempts = map(list, zip(*chosen, strict=True))
        return Returns(before + 1, regions, offsets, attempts)


class RoomAhead:
    """Number of pages to keep free for an owner.

    The owner then need not ask for them. It asks when it has too few, and for how many: so many are kept for it from
    then on, as far as its registrations and returns show. Pages handed back with an answer come with the next one: an
    owner that needs them sooner asks once more, and the pages under way then are kept in addition. Free pages hold no
    block that could be found, so their number fades: pages needed once in some hundred stores are asked for.
    """

    def __init__(self) -> None:
        self.level = 0.0
        """Number of pages to keep free.

        0: the owner has never asked, or always for more than is worth it.
        """
        self._base = 0

    def asked(self, pages: int, under_way: int, flow: int, most: int) -> None:
        """Record that the owner has asked for pages, and has none.

        Args:
            pages: how many it asked for.
            under_way: pages on the way back to it, of which it cannot know yet.
            flow: pages that ever went back to it, less those that it has registered.
            most: most pages that may be kept for it. An owner that needs more, now and then or always, asks then.
        """
        if under_way + pages <= most:
            self.level = max(self.level, under_way + pages)
        self._base = flow - under_way

    def missing(self, flow: int) -> int:
        """Return the number of pages to send back now, after an answer.

        Not negative.
        """
        self.level *= _KEPT
        return max(0, round(self.level) - (flow - self._base)) if self.level else 0


@attrs.define(eq=False)
class Session:
    """One client process of ours, or all connections of a published client.

    The latter sent one instance_id.
    """

    number: int
    token: bytes
    """Name given to the session by its client.

    Empty for a published one.
    """
    instance_id: str
    tenant: str
    published: bool
    lease: float
    policy: EvictionPolicy[str]
    """The order of use of the keys in its regions."""
    instance: Account
    tenant_account: Account
    fences: Fences
    outbox: Outbox = attrs.field(factory=Outbox)
    regions: dict[int, Region] = attrs.field(factory=dict)
    """Regions that it owns."""
    connections: set[int] = attrs.field(factory=set)
    """Living connections that joined it, if it is a published one."""
    allocated_bytes: int = 0
    """Bytes of the regions that it owns."""
    used_bytes: int = 0
    """Bytes of the keys in them."""
    answers: dict[tuple[str, int], bytes | list[int]] = attrs.field(factory=dict)
    """Answers by operation and request id, for repeated requests; oldest first."""
    ahead: RoomAhead = attrs.field(factory=RoomAhead)
    registered: int = 0
    """Keys that it has registered since this server started."""
    under_way: set[tuple[str, int]] = attrs.field(factory=set)
    """Operation and request id of each request not answered yet."""
    forgetting: int = 0
    """Number of keys that its order of use still has to forget.

    They lay in a region that it does not own any more.
    """
    is_reclaiming: bool = False
    """Whether a RECLAIM of it is under way.

    A second one evicts nothing.
    """
    barren_until: float = -math.inf
    """Time until which no key is expected to be evictable."""

    @property
    def flow(self) -> int:
        """Pages that went back to it, less those that it has registered."""
        return self.outbox.last - self.registered

    def charge(self, allocated_bytes: int, used_bytes: int) -> None:
        """Add bytes of regions and keys to this session's accounts.

        Negative numbers remove them.
        """
        self.allocated_bytes += allocated_bytes
        self.used_bytes += used_bytes
        # Quotas are charged with values, as published, and not with pages, whose size no message carries; nor with
        # regions: the first one of a client may be larger than the quota of its tenant, which could not store at all if
        # it was refused.
        self.instance.charged_bytes += used_bytes
        self.tenant_account.charged_bytes += used_bytes

    def remember(self, asked: tuple[str, int], answer: bytes | list[int], limits: Limits) -> None:
        """Keep this answer; beyond the limits the oldest goes."""
        answers = self.answers
        answers[asked] = answer
        while len(answers) > limits.max_answers or (
            len(answers) > 1 and sum(map(len, answers.values())) > limits.max_answer_bytes
        ):
            del answers[next(iter(answers))]


def pack(answers: list[int]) -> bytes:
    """Return answers to DROP in their remembered form.

    The answers of many keys are mostly alike.
    """
    packed = bytes(answers)
    return zlib.compress(packed, 1) if len(answers) > _PLAIN else packed


def unpack(packed: bytes | list[int]) -> list[int]:
    """Return the answers that were packed."""
    return list(zlib.decompress(packed) if isinstance(packed, bytes) and packed[:1] == _ZLIB else packed)
