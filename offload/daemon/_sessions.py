"""The sessions of engines, and the order of giving back. Pure.

A session is one connection of one engine. It ends when the connection does, when the engine has been silent for its
lease, or at an invalid frame. Everything that it held is then given back in this order, each only when nothing of the
one before is left:

    running copies -> holds -> announced pages -> memory -> over

Rule 1. Copies first: a copy reads or writes the engine's memory, and uses blocks that its holds keep from eviction.
Rule 2. From its end on, a session takes no request, and counts as connected to nothing. It is found by its token until
    it is over, so that the engine's next session can wait for that.
Rule 3. Over is not proven over: a request that ended without the end of its copy is remembered beyond its session, and
    named to the next one. Its answer may have been lost with the connection.
Rule 4. Everything that an engine can make grow has a bound (:class:`Limits`). A request that meets one is refused, and
    costs nothing.
"""

from __future__ import annotations

import enum
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from backends.abc import Key
from maru.base.printable import printable

from ._messages import MAX_NUMBERS, TOKEN_BYTES, Refusal

_ANY: Final = 0
"""In place of the number of a request, which none has."""
_REMEMBERED: Final = 1_024
"""Sessions with copies whose ends are not proven.

Each has left a thread, or a device, behind.
"""


@attrs.frozen
class Limits:
    """Limits on engines."""

    sessions: int = 64
    """At once: several engines for each device of a host."""
    requests: int = 1_024
    """Unanswered requests of a session."""
    holds: int = 4_096
    """Holds of a session: more than an engine has requests.

    As many announcements of pages.
    """
    caches: int = 64
    """Caches of a session."""
    memories: int = 1_024
    """Memories of a session: each is a mapping of the daemon."""
    bytes: int = 256 << 20
    """Bytes of a session's unanswered requests, holds and announcements.

    That is 500,000 keys of common length.
    """
    bytes_together: int = 1 << 30
    """Bytes of requests, holds and announcements of all sessions."""
    lease: float = 30.0
    """Seconds that an engine may be silent whose session begins now."""


class Stage(enum.Enum):
    """The next thing that a session has to give back."""

    COPIES = "copies under way"
    HOLDS = "holds"
    PAGES = "announced pages"
    MEMORY = "memory"
    OVER = "nothing"


class HeldKeys:
    """The keys that a session's counted holds have in each tier.

    Counted only if it matters, and once for each hold, since there may be half a million keys.
    """

    def __init__(self) -> None:
        self._in_tier: dict[str, Counter[Key]] = {}
        self._holds: set[int] = set()

    def __contains__(self, hold: int) -> bool:
        return hold in self._holds

    def add(self, hold: int, runs: Iterator[tuple[str, Sequence[Key]]]) -> None:
        """Count a hold."""
        self._holds.add(hold)
        for tier, keys in runs:
            self._in_tier.setdefault(tier, Counter()).update(keys)

    def remove(self, hold: int, runs: Iterator[tuple[str, Sequence[Key]]]) -> None:
        """Remove a hold from the counts, if it was counted."""
        if hold not in self._holds:
            return
        self._holds.remove(hold)
        for tier, keys in runs:
            counts = self._in_tier[tier]
            for key in keys:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]

    def fitting(self, tier: str, keys: Sequence[Key], most: int) -> int:
        """Return how many more leading keys may be held in a tier.

        ``most`` keys may be held there together.
        """
        counts: Mapping[Key, int] = self._in_tier.get(tier, {})
        new: set[Key] = set()
        for at, key in enumerate(keys):
            if key not in counts:
                new.add(key)
            if len(counts) + len(new) > most:
                return at
        return len(keys)


@attrs.define(eq=False)
class Session:
    """The state of one engine in the daemon."""

    number: int
    peer: bytes
    """Its connection."""
    name: str
    tenant: str
    heard: float
    """Time when its engine was heard last, in seconds."""
    token: bytes = attrs.field(factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)
    requests: dict[int, Any] = attrs.field(factory=dict, repr=False)
    """Requests that are not answered, by number."""
    version: int = 1
    """Version of its protocol."""
    holds: dict[int, Any] = attrs.field(factory=dict, repr=False)
    held: int = 0
    """Blocks of its holds, each as often as it is held."""
    held_keys: HeldKeys = attrs.field(factory=HeldKeys, repr=False)
    announced: dict[int, Any] = attrs.field(factory=dict, repr=False)
    """Blocks that it writes into the page store itself, by number."""
    memories: dict[int, Any] = attrs.field(factory=dict, repr=False)
    """Memories that were handed over, by number."""
    caches: set[int] = attrs.field(factory=set, repr=False)
    pending_caches: int = 0
    """Caches that are being registered, or that copies keep from being unregistered."""
    unproven: set[int] = attrs.field(factory=set, repr=False)
    """Its ended requests whose copies may still be running."""
    bytes: int = 0
    """Bytes of its requests, holds and announcements together."""
    lease: float = 30.0
    """Seconds that its engine may be silent, as announced to it.

    A reload changes those of later sessions.
    """
    waiting: int = 0
    """Blocks of its stores that wait for their signal."""
    costs: dict[int, int] = attrs.field(factory=dict, repr=False)
    """Cost of each request that is not answered, by number."""
    held_costs: dict[int, int] = attrs.field(factory=dict, repr=False)
    """Cost of each hold, by number."""
    ended: str = ""
    """Why it has ended; empty while it goes on."""
    successor: Any = None
    """The hello that waits for its end, with its connection.

    One, since each keeps a connection.
    """
    when_over: list[Callable[[], None]] = attrs.field(factory=list, repr=False)
    """Called once nothing of it is left."""

    def __str__(self) -> str:
        return f"session {self.number} ({self.name or 'without a name'})"

    @property
    def due(self) -> Stage:
        """The next stage of giving back: see the module's docstring."""
        if self.requests:
            return Stage.COPIES
        if self.holds:
            return Stage.HOLDS
        if self.announced:
            return Stage.PAGES
        if self.caches or self.memories:
            return Stage.MEMORY
        return Stage.OVER

    def check_cache(self, cache: int) -> None:
        """Raise unless this session has registered a cache under this number.

        Raises:
            Refusal: it has not, or has let go of it.
        """
        if cache not in self.caches:
            raise Refusal("unknown", f"this session has no cache {cache}")


class Sessions:
    """All sessions of a daemon.

    Attributes:
        turned_away: engines that were refused for lack of places.
        bad: sessions that ended because of an invalid frame.
        given_back: sessions of which nothing is left.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits: Limits = limits
        self.turned_away: int = 0
        self.bad: int = 0
        self.given_back: int = 0
        self._by_peer: dict[bytes, Session] = {}
        self._all: dict[int, Session] = {}
        self._unproven: dict[bytes, list[int]] = {}  # by the token of a session that is forgotten
        self._unknown: list[int] = []  # of other tokens
        self.bytes: int = 0
        """Bytes of the requests, holds and announcements of all sessions."""
        self._last = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Any:
        return iter(list(self._all.values()))

    def begin(
        self, peer: bytes, name: str, tenant: str, now: float, version: int = 1, tenants: Collection[str] = ()
    ) -> Session | None:
        """Begin a session for this connection; ``None`` if all places are taken.

        A place is left for each of ``tenants`` that has no session, in up to half of all: no tenant keeps another one
        out.

        Raises:
            ValueError: the connection has one.
        """
        if peer in self._by_peer:
            raise ValueError("this connection already has a session")
        most, there = self.limits.sessions, {session.tenant for session in self._all.values()}
        if tenant in there:
            most -= min(len(set(tenants) - there), most // 2)
        if len(self._all) >= most:
            self.turned_away += 1
            return None
        self._last += 1
        session = Session(self._last, peer, printable(name), tenant, now, version=version, lease=self.limits.lease)
        self._by_peer[peer] = self._all[session.number] = session
        return session

    def of(self, peer: bytes) -> Session | None:
        """Return the session of this connection."""
        return self._by_peer.get(peer)

    def by_token(self, token: bytes) -> Session | None:
        """Return the session with this token, also while it is given back."""
        return next((session for session in self._all.values() if secrets.compare_digest(session.token, token)), None)

    def unproven(self, token: bytes) -> list[int]:
        """Return the requests of an ended session whose copies may still run.

        A 0 among them stands for any request.
        """
        return self._unproven.get(token, self._unknown)

    def charge(self, session: Session, seq: int, cost: int) -> None:
        """Charge a request, before anything is made of it.

        Raises:
            Refusal: the session, or all of them, have as much as may be.
        """
        limits = self.limits
        if session.bytes + cost > limits.bytes or self.bytes + cost > limits.bytes_together:
            raise Refusal(
                "full",
                f"a request of {cost} bytes: this session has {session.bytes} of at most {limits.bytes} in requests and "
                f"holds, and all sessions {self.bytes} of at most {limits.bytes_together}: release some",
            )
        session.costs[seq] = cost
        session.bytes += cost
        self.bytes += cost

    def refund(self, session: Session, cost: int) -> None:
        """Refund a charge."""
        session.bytes -= cost
        self.bytes -= cost

    def expired(self, now: float) -> list[Session]:
        """Return the sessions whose engines were silent longer than their leases."""
        return [session for session in self._by_peer.values() if session.heard < now - session.lease]

    def end(self, session: Session, why: str) -> bool:
        """End a session; return whether it was going on until now.

        The caller has to give back everything that it holds.
        """
        if session.ended:
            return False
        session.ended = why
        self._by_peer.pop(session.peer, None)
        return True

    def forget(self, session: Session) -> None:
        """Forget a session of which nothing is left, and call its waiters."""
        assert session.ended and session.due is Stage.OVER
        if self._all.pop(session.number, None) is not None:
            self.refund(session, session.bytes)
            self.given_back += 1
            if session.unproven:
                numbers = sorted(session.unproven)
                self._unproven[session.token] = numbers if len(numbers) <= MAX_NUMBERS else [_ANY]
                if len(self._unproven) > _REMEMBERED:
                    del self._unproven[next(iter(self._unproven))]
                    self._unknown = [_ANY]  # it may be that one
            for call in session.when_over:
                call()
