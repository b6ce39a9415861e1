"""The sessions of clients: leases, fenced attempts, and the pages on the way back to their owner. Pure."""

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
"""Answers that are remembered as they are: packing few costs more than it saves."""
_ZLIB: Final = b"x"
"""First byte of what is packed, which no answer is."""
_KEPT: Final = 1 - 1 / 256
"""Of the pages that are kept ahead, from one answer to the next: half of them after some 180."""


class Leases:
    """Until when each of some numbers lives. Setting costs the same however many there are and however often it is done.

    A heap of times, of which those that were put off are only found out when they come up.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._queued: dict[int, float] = {}  # the entry of the heap that counts
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._until)

    def set(self, number: int, until: float) -> None:
        """It lives until then, be that later or earlier than it was."""
        self._until[number] = until
        if until < self._queued.get(number, math.inf):
            self._queued[number] = until
            heapq.heappush(self._heap, (until, number))

    def until(self, number: int) -> float:
        """When it ends; ``inf`` if that is not known here."""
        return self._until.get(number, math.inf)

    def discard(self, number: int) -> None:
        """It has no end here any more."""
        self._until.pop(number, None)

    def next(self) -> float:
        """The time of the next end, or an earlier one; ``inf`` if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float, most: float = math.inf) -> list[int]:
        """Those that have ended by ``now``, in the order of their ends, at most so many. They are forgotten."""
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
    """The attempts of one session that are refused should they still arrive.

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
        """Refuse this one from now on."""
        if attempt > self.floor:
            self.attempts.add(attempt)
        while len(self.attempts) > self._limit:
            self.floor = min(self.attempts)
            self.attempts.remove(self.floor)


class Outbox:
    """The pages on the way back to one owner, under ascending numbers from 1, until it acknowledges them."""

    def __init__(self, acknowledged: int = 0, pages: Iterable[tuple[int, int, int]] = ()) -> None:
        self.acknowledged = acknowledged
        """The number up to which the owner has applied them."""
        self.pages: deque[tuple[int, int, int]] = deque(pages)
        """(region_id, offset, attempt) of the numbers from ``acknowledged + 1`` on. What goes back is added at the end."""
        self._sent = acknowledged

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def last(self) -> int:
        """The number of the last page."""
        return self.acknowledged + len(self.pages)

    @property
    def unsent(self) -> int:
        """Pages that its owner was not told of yet."""
        return self.last - self._sent

    @property
    def under_way(self) -> int:
        """Pages that its owner was told of, and has not acknowledged."""
        return self._sent - self.acknowledged

    def acknowledge(self, number: int) -> list[tuple[int, int, int]]:
        """The owner has applied all up to ``number``; those that are news. Numbers that were never given mean all."""
        pop = self.pages.popleft
        news = [pop() for _ in range(min(number - self.acknowledged, len(self.pages)))]
        self.acknowledged += len(news)
        self._sent = max(self._sent, self.acknowledged)
        return news

    def pending(self, resend: bool, limit: int) -> Returns | None:
        """The next pages that were not sent yet, or the first that are not acknowledged; at most ``limit``. Now sent."""
        before = self.acknowledged if resend else self._sent
        skip = before - self.acknowledged
        if skip == len(self.pages):
            return None
        chosen = list(islice(self.pages, skip, skip + limit))
        self._sent = max(self._sent, before + len(chosen))
        regions, offsets, attempts = map(list, zip(*chosen, strict=True))
        return Returns(before + 1, regions, offsets, attempts)


class RoomAhead:
    """How many pages an owner is to have free, so that it need not ask before it stores.

    It has asked when it had too few, and for how many: so many are kept for it from then on, as far as what it registers and
    what goes back to it tells. What is handed back behind an answer comes with the next one: an owner that needs them sooner
    asks once more, and what was under way then is kept besides. Pages that are free hold no block that could be found, so what
    is kept fades: what was needed once in some hundred stores is asked for.
    """

    def __init__(self) -> None:
        self.level = 0.0
        """So many pages. 0: it has never asked, or always for more than is worth it."""
        self._base = 0

    def asked(self, pages: int, under_way: int, flow: int, most: int) -> None:
        """It has asked for pages, and has none.

        Args:
            pages: for how many.
            under_way: pages on the way back to it, of which it cannot know yet.
            flow: pages that ever went back to it, less those that it has registered.
            most: that may be kept for it. One that needs more than that, now and then or always, asks then.
        """
        if under_way + pages <= most:
            self.level = max(self.level, under_way + pages)
        self._base = flow - under_way

    def missing(self, flow: int) -> int:
        """How many it should get back now, behind an answer; not negative."""
        self.level *= _KEPT
        return max(0, round(self.level) - (flow - self._base)) if self.level else 0


@attrs.define(eq=False)
class Session:
    """One client process of ours, or all connections of a published one that said one instance_id."""

    number: int
    token: bytes
    """What its client names it by; empty for a published one."""
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
    """Those that it owns."""
    connections: set[int] = attrs.field(factory=set)
    """Of a published one: those that joined and are there."""
    allocated_bytes: int = 0
    """Of the regions that it owns."""
    used_bytes: int = 0
    """Of the keys in them."""
    answers: dict[tuple[str, int], bytes | list[int]] = attrs.field(factory=dict)
    """By what was asked for under which request id, should it ask again; the oldest first."""
    ahead: RoomAhead = attrs.field(factory=RoomAhead)
    registered: int = 0
    """Keys that it has registered since this server started."""
    under_way: set[tuple[str, int]] = attrs.field(factory=set)
    """What was asked for under which request id, and is not answered yet."""
    forgetting: int = 0
    """Keys that its order of use still has to forget: they lay in a region that it does not own any more."""
    is_reclaiming: bool = False
    """Whether a RECLAIM of it is under way: a second one evicts nothing."""
    barren_until: float = -math.inf
    """Until when it is believed that none of its keys can go."""

    @property
    def flow(self) -> int:
        """Pages that went back to it, less those that it has registered."""
        return self.outbox.last - self.registered

    def charge(self, allocated_bytes: int, used_bytes: int) -> None:
        """It owns regions of so many bytes more (or less), and its keys take so many more: on all accounts."""
        self.allocated_bytes += allocated_bytes
        self.used_bytes += used_bytes
        # Quotas are charged with values, as published, and not with pages, whose size no message says; nor with regions: the
        # first one of a client may be larger than the quota of its tenant, which could not store at all if it was refused.
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
    """Return answers to DROP as they are remembered: those of many keys are mostly alike."""
    packed = bytes(answers)
    return zlib.compress(packed, 1) if len(answers) > _PLAIN else packed


def unpack(packed: bytes | list[int]) -> list[int]:
    """Return the answers that were packed."""
    return list(zlib.decompress(packed) if isinstance(packed, bytes) and packed[:1] == _ZLIB else packed)
