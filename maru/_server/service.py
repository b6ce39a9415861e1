"""The service: decides the reply to each frame. Pure.

The directory knows keys; the service knows connections: which connection stands for which session, which requests are
permitted, how they are answered and which actions the shell has to take. The shell around it (`server`) has the
sockets, the clock, the pool and the journal, and keeps an order: it hands in the frames that are there, writes
:meth:`Service.take_records` to the journal, and only then sends the replies and performs the other actions.

Rule 1. Every readable frame is answered once, with its own sequence; with an error if it cannot be served. A request
        that has to wait for memory is answered when that is decided (:meth:`Service.allocated`,
        :meth:`Service.not_allocated`).
Rule 2. A frame whose header cannot be read ends its sender's session and connection here, and is answered once (code
        0x80, sequence 0).
Rule 3. A published client gets extra keys in its replies, and is never asked for anything that it does not know.
Rule 4. A region that has no owner in the end is handed to the shell to be removed, once the records of that are
        written.

Each message is handled by a function in `service_v1` or `service_own`; ``_ACTIONS`` is the table of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

import attrs

from .._config import ServerConfig
from .._directory import Directory, DirectoryStatistics
from .._directory.locations import Location
from .._directory.records import encode
from .._directory.slices import USES_AT_ONCE, Slices
from .._wire import (
    HEADER_BYTES,
    Code,
    Handle,
    HandshakeRequest,
    Header,
    decode_request,
    error_reply,
    handle_bytes,
    lookup_entry,
    read_header,
)
from .._wire.capability import auth_token, verify
from ..base.errors import BadFrame, BadMessage
from . import service_own as own
from . import service_v1 as v1
from .peers import Listing, Peer, Refused, Word
from .reports import Reports

Action: TypeAlias = "Callable[[Service, Peer, Header, Any, bytes, float], bytes | Slices[bytes] | None]"
"""Handler of a message: returns the reply frame, or answers later.

It gets the sender, the header, the message, its bytes and the time. ``None``: the reply comes later. Slices: the reply
comes from :meth:`Service.go_on`.
"""

_SESSIONS_SHARE: Final = 8
"""Largest part of all sessions opened over one connection.

Our client opens one session, a proxy of many clients perhaps more.
"""
_SESSIONS_LEAST: Final = 16
"""Sessions that one connection may open in any case.

A server that is configured to keep few sessions belongs to one client.
"""
_MOST_PINS: Final = 2 << 20
"""Most pinned keys, counted once per holder: some 100 bytes each."""
_PINS_SHARE: Final = 8
"""Largest part of all pins held by sessions of one connection."""
_LOOKED_FOR_ROOM: Final = 64
"""Sessions without a connection that are examined at once to free one."""

MOST_UNDER_WAY: Final = 32 << 20
"""Bytes of frames under way in slices, beyond which none is read.

Each such frame is kept, decoded, until it is answered.
"""

DEBUG: Final = 10
INFO: Final = 20
WARNING: Final = 30
"""Levels as in `logging`, which no pure module imports."""

Fact: TypeAlias = bool | int | float | str | None
Facts: TypeAlias = Mapping[str, Mapping[str, Fact]]

_ACTIONS: Final[dict[int, Action]] = {
    Code.REQUEST_ALLOC: v1.request_alloc,
    Code.RETURN_ALLOC: v1.return_alloc,
    Code.LIST_ALLOCATIONS: v1.list_allocations,
    Code.REGISTER_KV: v1.register,
    Code.LOOKUP_KV: v1.lookup,
    Code.EXISTS_KV: v1.exists,
    Code.DELETE_KV: v1.delete,
    Code.PIN_KV: v1.pin,
    Code.UNPIN_KV: v1.unpin,
    Code.BATCH_REGISTER_KV: v1.batch_register,
    Code.BATCH_LOOKUP_KV: v1.batch_lookup,
    Code.BATCH_EXISTS_KV: v1.batch_exists,
    Code.BATCH_PIN_KV: v1.batch_pin,
    Code.BATCH_UNPIN_KV: v1.batch_unpin,
    Code.STORE: own.store,
    Code.FIND: own.find,
    Code.UNPIN: own.unpin,
    Code.DROP: own.drop,
    Code.RECLAIM: own.reclaim,
    Code.RESOLVE: own.resolve,
    Code.BEAT: own.beat,
    Code.CLOSE: own.close,
    Code.REGION: own.region,
    Code.DESCRIBE: own.describe,
    Code.PINS: own.pins,
    Code.LIST_KEYS: own.list_keys,
    Code.GET_STATS: v1.get_stats,
    Code.HEARTBEAT: v1.heartbeat,
    Code.REPORT_STATS: v1.report_stats,
    Code.GET_USAGE: v1.get_usage,
    Code.HANDSHAKE: v1.handshake,
    Code.SHUTDOWN: v1.shutdown,
}


_LIMITS: Final = (
    "max_keys",
    "max_key_bytes",
    "max_message_bytes",
    "max_entries",
    "max_sessions",
    "session_lease",
    "max_lease",
    "v1_read_grace",
    "high_watermark",
    "low_watermark",
    "quota_instance_bytes",
    "quota_tenant_bytes",
)
"""Settings that a description of the server lists."""


class Allocation(NamedTuple):
    """Request for memory, for the shell to pass to the pool."""

    ticket: int
    """Number under which the shell reports the result."""
    size: int
    """Bytes."""


class Event(NamedTuple):
    """Line for the log."""

    level: int
    """Level as in `logging`."""
    text: str


class _UnderWay(NamedTuple):
    """A request that is processed in slices."""

    identity: bytes
    header: Header
    slices: Slices[bytes | None]


class _Waiting(NamedTuple):
    """A request for memory that is not answered yet."""

    peer: Peer
    header: Header
    instance_id: str
    token: bytes | None
    """Token of the session, if it is one of our client's."""


@attrs.frozen
class ServiceStatistics:
    """A snapshot of a service; its cost is constant."""

    peers: int
    """Connections that have sent something."""
    requests: int
    """Frames handed in."""
    refused: int
    """Requests answered with an error."""
    bad_frames: int
    """Frames with an unreadable header."""
    allocating: int
    """Requests that wait for memory."""
    directory: DirectoryStatistics


class Service:
    """State and decisions of a server, without I/O.

    Args:
        config: the settings.
        directory: recovered, with `restart` called.
        epoch: of this start of the server: random, not 0.
        secret: of the pool.
        new_token: makes the 16 random bytes of a session.
        totals: returns the pool's bytes, and how many are free.
        version: of the server, for people.
        anew_until: time until which handshakes report that an earlier start may have acknowledged keys that are not in
            the directory. Owners that live come back within their leases. Later, a key may have been stored and deleted
            here meanwhile.
    """

    def __init__(
        self,
        config: ServerConfig,
        directory: Directory,
        *,
        epoch: int,
        secret: bytes,
        new_token: Callable[[], bytes],
        totals: Callable[[], tuple[int, int]],
        version: str = "",
        anew_until: float = -math.inf,
    ) -> None:
        self.config = config
        self.directory = directory
        self.epoch = epoch
        self.anew_until = anew_until
        self.secret = secret
        self.new_token = new_token
        self.totals = totals
        self.version = version
        self.rm_address = ""
        """``host:port`` of the resource manager that published clients map through."""
        self.descriptors = ""
        """Path of the Unix socket that hands out regions to our clients."""
        self.admit: Callable[[bytes], object] = bool
        """Called with each connection that begins to speak for a client.

        It may then stay for longer than a new connection that sends nothing.
        """
        self.dismiss: Callable[[bytes], object] = bool
        """Called with each connection whose session is over."""
        self.facts: Callable[[], Facts] = dict
        """Returns the shell's facts for a description of the server."""
        self.reports = Reports()
        self.filled: dict[int, None] = {}
        """Sessions that have stored since the watermarks were checked."""
        self.stored: dict[int, None] = {}
        """Sessions that have stored since the last eviction ahead of need."""
        self.stopping = False
        """Whether a permitted client has asked this server to end."""
        self.closed = False
        self.listings: dict[Peer, Listing] = {}
        """Listings under way, by connection; the most recently used is last."""
        self._peers: dict[bytes, Peer] = {}
        self._peers_of: dict[int, dict[Peer, None]] = {}
        """Connections that last spoke for each session.

        A session without any has no entry.
        """
        self._silent: dict[int, None] = {}
        """Our clients' sessions without a connection, the longest silent first."""
        self._openers: dict[int, Peer] = {}
        """The connection over which each session was opened."""
        self._handles: dict[int, Handle] = {}
        self._handle_bytes: dict[int, bytes] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._under_way_bytes = 0
        self._last_ticket = 0
        self._allocations: list[Allocation] = []
        self._unowned: list[int] = []
        self._events: list[Event] = []
        self._requests = self._refused = self._bad_frames = 0

    # --- frames ---------------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, frame: bytes, now: float) -> bytes | None:
        """Return the reply to a frame; ``None``: later, or never."""
        self._requests += 1
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = Peer(identity)
        try:
            header = read_header(frame)
        except BadFrame as exc:
            return self._unreadable(peer, exc, now)
        code, flags, sequence, length = header
        try:
            action = _ACTIONS.get(code)
            if action is None:
                raise Refused(Word.UNKNOWN_CODE, f"there is no message {code:#04x}")
            payload = frame[HEADER_BYTES : HEADER_BYTES + length]
            try:
                message = decode_request(code, payload)
            except MemoryError:
                raise Refused(Word.NO_ROOM, "the server has no memory left to read this request") from None
            answer = action(self, peer, header, message, payload, now)
            if answer is None or type(answer) is bytes:
                return answer
            self._under_way_bytes += length
            return self._advance(_UnderWay(identity, header, cast("Slices[bytes | None]", answer)), None)
        except BadMessage as exc:
            text, word = str(exc), Word.MALFORMED
        except Refused as exc:
            text, word = str(exc), exc.word
        except MemoryError:
            self._note_unanswered(code)
            return None
        self._refused += 1
        return error_reply(code, sequence, text, word, self.epoch, flags)

    # --- requests in several steps ------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a request or chore is under way in slices."""
        return bool(self._under_way)

    @property
    def is_crowded(self) -> bool:
        """Whether too many bytes are under way to take another frame."""
        return self._under_way_bytes > MOST_UNDER_WAY

    def go_on(self, now: float) -> tuple[bytes, bytes] | None:
        """Run one slice of the longest-waiting request.

        Returns:
            Receiver and reply, if that slice was the last; else ``None``.
        """
        one = self._under_way.popleft()
        peer = self._peers.get(one.identity)
        if peer is not None and peer.session:  # its client waits for the answer, and is not silent
            self.directory.renew(peer.session, now)
        answer = self._advance(one, now)
        return None if answer is None else (one.identity, answer)

    def _advance(self, one: _UnderWay, now: float | None) -> bytes | None:
        code, flags, sequence, length = one.header
        try:
            one.slices.send(now)  # type: ignore[arg-type]  # None begins it
        except StopIteration as end:
            answer: bytes | None = end.value
        except Refused as exc:
            self._refused += 1
            answer = error_reply(code, sequence, str(exc), exc.word, self.epoch, flags)
        except MemoryError:
            self._note_unanswered(code)
            answer = None
        else:
            self._under_way.append(one)
            return None
        self._under_way_bytes -= length
        return answer

    def _note_unanswered(self, code: int) -> None:
        # The request may have taken effect, so "refused" could be wrong: without a reply its client finds out (RESOLVE,
        # PINS).
        self.note(WARNING, f"no memory left for a request of code {code:#04x}: it is not answered")

    def begin_chores(self) -> None:
        """Schedule the directory's postponed work as slices."""
        for chore in self.directory.take_chores():
            self._begin(chore)

    def _begin(self, slices: Slices[None]) -> None:
        """Schedule slices whose result nobody waits for."""
        self._advance(_UnderWay(b"", Header(0, 0, 0, 0), slices), None)

    def disconnected(self, identity: bytes, now: float) -> None:
        """Forget a connection that has ended.

        Sessions outlive it; a published client's pins and regions last as long as the directory's rules allow.
        """
        peer = self._peers.pop(identity, None)
        if peer is None:
            return
        self._fall_silent(peer)
        self.listings.pop(peer, None)
        if peer.connection:
            self.directory.disconnect(peer.connection, now)
            self.note(DEBUG, f"the published connection {-peer.connection} is gone")

    def _unreadable(self, peer: Peer, exc: BadFrame, now: float) -> bytes | None:
        self._bad_frames += 1
        if peer.connection:
            self.directory.disconnect(peer.connection, now)
            peer.connection = 0
        if peer.session:
            self.end_session(peer.session, now)
        if peer.complained:
            return None
        peer.complained = True
        self.note(WARNING, f"a frame that cannot be read, from {peer.identity.hex()}: {exc}")
        return error_reply(0, 0, str(exc), Word.MALFORMED, self.epoch)

    # --- peers ----------------------------------------------------------------------------------------------------

    def speaker(self, peer: Peer) -> int:
        """Return the number of the session or connection that speaks version 1."""
        if peer.session:
            return peer.session
        if not peer.connection:
            peer.connection = self.directory.connect()
            self.admit(peer.identity)
        return peer.connection

    def session_of(self, peer: Peer, token: bytes, now: float) -> int:
        """Return a token's session, renew its lease, and record its connection."""
        session_id = self.directory.session_of(token)
        if session_id is None:
            raise Refused(Word.NO_SESSION, "this session is unknown, or its lease is over")
        self.directory.renew(session_id, now)
        self._speak(peer, session_id)
        return session_id

    def _speak(self, peer: Peer, session_id: int) -> None:
        """Record that this connection speaks for this session from now on."""
        if peer.session == session_id:
            return
        self._fall_silent(peer)
        peer.session = session_id
        self._peers_of.setdefault(session_id, {})[peer] = None
        self._silent.pop(session_id, None)
        self.admit(peer.identity)

    def _fall_silent(self, peer: Peer) -> None:
        """Record that this connection speaks for no session any more."""
        session_id, peer.session = peer.session, 0
        peers = self._peers_of.get(session_id)
        if peers is not None:
            del peers[peer]
            if not peers:
                del self._peers_of[session_id]
                self._silent[session_id] = None

    def check_session(self, token: bytes, session_id: int) -> None:
        """Refuse to continue for a session that has ended between two slices."""
        if self.directory.session_of(token) != session_id:
            raise Refused(Word.NO_SESSION, "this session has ended")

    def check_peer(self, peer: Peer) -> None:
        """Refuse to continue for a connection that has ended between two slices.

        It would be taken for a new one.
        """
        if self._peers.get(peer.identity) is not peer:
            raise Refused(Word.CLOSED, "this connection has ended")

    def open_session(self, peer: Peer, message: HandshakeRequest, now: float) -> tuple[bytes, bool, float]:
        """Open or resume a session of our client.

        Returns:
            Its token, whether it was resumed, and how long it may be silent.
        """
        directory, config, token = self.directory, self.config, message.session
        session_id = None if token is None else directory.session_of(token)
        resumed = session_id is not None
        if session_id is None:
            reason = self.why_no_session(peer, now)
            if reason:
                raise Refused(Word.TOO_MANY, reason)
            lease = config.session_lease if message.lease is None else message.lease
            if not 0 < lease < math.inf:
                raise Refused(Word.MALFORMED, f"lease = {lease}: must be positive and finite")
            lease = min(max(lease, config.min_lease), config.max_lease)
            token = self.new_token()
            instance_id = message.instance_id or token.hex()
            session_id = directory.open_session(token, instance_id, message.tenant or "", lease, now)
            self._opened(peer, session_id)
            self.note(INFO, f"session {session_id} of {instance_id!r} has begun")
        else:
            directory.renew(session_id, now)
            self.note(INFO, f"session {session_id} is back")
        assert token is not None
        self._speak(peer, session_id)
        return token, resumed, directory.remaining(session_id, now)

    def _opened(self, peer: Peer, session_id: int) -> None:
        peer.opened[session_id] = None
        self._openers[session_id] = peer

    def opener_of(self, session_id: int) -> Peer | None:
        """Return the connection that opened a session.

        After a restart, return one that uses it.
        """
        return self._openers.get(session_id) or next(iter(self._peers_of.get(session_id, ())), None)

    def why_no_session(self, peer: Peer, now: float) -> str:
        """Return why this connection may open no session; empty if it may.

        If there is no room, a silent session is ended.
        """
        most = self.config.max_sessions
        each = max(_SESSIONS_LEAST, most // _SESSIONS_SHARE)
        if len(peer.opened) >= each:
            return f"{each} sessions were already opened over this connection, as many as may be"
        if self.directory.session_count >= most and not self._end_silent(now):
            return f"there are {most} sessions already, as many as max_sessions of the server allows"
        return ""

    def _end_silent(self, now: float) -> bool:
        """End a silent session that holds nothing; return whether there was one.

        A session is silent if no connection speaks for it.
        """
        for _ in range(min(len(self._silent), _LOOKED_FOR_ROOM)):
            session_id = next(iter(self._silent))
            if self.directory.holds_nothing(session_id, now):
                self.end_session(session_id, now)
                self.note(INFO, f"session {session_id} is over: it was silent, held nothing, and its place was needed")
                return True
            del self._silent[session_id]
            self._silent[session_id] = None
        return False

    def why_no_standing(self, peer: Peer, instance_id: str, now: float) -> str:
        """Return why a published client may have no session; empty if allowed.

        It may if a session of its name is there already.
        """
        return "" if self.directory.is_there(instance_id) else self.why_no_session(peer, now)

    def end_session(self, session_id: int, now: float) -> None:
        """End a session that has closed or misbehaved."""
        self.directory.end_session(session_id, now)
        self._ended(session_id)

    def _ended(self, session_id: int) -> None:
        self.filled.pop(session_id, None)
        self._silent.pop(session_id, None)
        for peer in [peer for peer, listing in self.listings.items() if listing.session_id == session_id]:
            del self.listings[peer]
        opener = self._openers.pop(session_id, None)
        if opener is not None:
            del opener.opened[session_id]
        for peer in self._peers_of.pop(session_id, ()):
            peer.session = 0
            self.dismiss(peer.identity)

    def check_pins(self, peer: Peer, holder: int, more: int) -> None:
        """Refuse a number of pins that exceeds a limit.

        There is one for all holders together, and one for the holders of each connection.
        """
        directory = self.directory
        pinned, each = directory.pin_entries() + more, _MOST_PINS // _PINS_SHARE
        if pinned <= each:  # nearly always
            return
        opener = self._openers.get(holder, peer)
        own = sum(map(directory.pin_entries, {*opener.opened, opener.connection, holder} - {0})) + more
        if own > each or pinned > _MOST_PINS:
            raise Refused(Word.TOO_MANY, f"one connection would have {own} pins, of at most {each}; all have {pinned}")

    def check_keys(self, keys: list[str]) -> None:
        """Refuse a batch that is larger than configured."""
        if len(keys) > self.config.max_keys:
            raise Refused(Word.TOO_MANY, f"{len(keys)} keys at once; at most {self.config.max_keys} are allowed")

    # --- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, peer: Peer, header: Header, size: int, instance_id: str, token: bytes | None) -> None:
        """Ask the shell for memory; the reply follows when it is decided."""
        if peer.allocating >= self.config.max_in_flight:
            raise Refused(Word.TOO_MANY, f"{peer.allocating} requests for memory are already waiting")
        if self.closed:
            raise Refused(Word.CLOSED, "the server is leaving")
        peer.allocating += 1
        self._last_ticket += 1
        self._waiting[self._last_ticket] = _Waiting(peer, header, instance_id, token)
        self._allocations.append(Allocation(self._last_ticket, size))

    def make_room(self, size: int, now: float) -> Slices[list[int]]:
        """Remove abandoned regions, since the pool is full, and return their numbers.

        If any was removed, asking the pool again is of use.
        """
        return self.directory.making_room(size, now)

    def allocated(
        self, ticket: int, region_id: int, offset: int, length: int, now: float
    ) -> tuple[bytes, bytes] | None:
        """Give a new region to its requester.

        Returns:
            The receiver and the reply; ``None`` if the receiver is gone.
        """
        peer, header, instance_id, token = self._waiting.pop(ticket)
        peer.allocating -= 1
        if self._peers.get(peer.identity) is not peer:  # its client would never learn about the region
            self._unowned.append(region_id)
            return None
        directory = self.directory
        by = self.speaker(peer) if token is None else directory.session_of(token)
        if by is None:
            self._unowned.append(region_id)
            return peer.identity, error_reply(
                header.code, header.sequence, "this session has ended", Word.NO_SESSION, self.epoch, header.flags
            )
        if token is None and by < 0:  # other sessions may have been opened while the pool was asked
            reason = self.why_no_standing(peer, instance_id, now)
            if reason:
                self._unowned.append(region_id)
                return peer.identity, v1.alloc_reply(self, header, None, reason)
        self.place(region_id, offset, length)
        sessions = directory.session_count
        owner = directory.add_region(by, region_id, length, instance_id=instance_id)
        if directory.session_count > sessions:
            self._opened(peer, owner)
        self.note(INFO, f"region {region_id} of {length} bytes belongs to {instance_id!r}")
        return peer.identity, v1.alloc_reply(self, header, self._handles[region_id])

    def not_allocated(self, ticket: int, reason: str) -> tuple[bytes, bytes] | None:
        """Return the receiver and the reply after the pool made no region."""
        peer, header, _, _ = self._waiting.pop(ticket)
        peer.allocating -= 1
        if self._peers.get(peer.identity) is not peer:
            return None
        return peer.identity, v1.alloc_reply(self, header, None, reason)

    def place(self, region_id: int, offset: int, length: int) -> None:
        """Record a region's place in its file, before any client learns it."""
        handle = Handle(region_id, offset, length, auth_token(self.secret, region_id, length))
        self._handles[region_id] = handle
        self._handle_bytes[region_id] = handle_bytes(handle)

    def handle_of(self, region_id: int) -> Handle:
        """Return the handle of a region, as clients get it."""
        return self._handles[region_id]

    def permits(
        self, token: bytes, capability: bytes, region_id: int, offset: int, length: int, writable: bool
    ) -> bool:
        """Return whether a capability covers this span and its session lives.

        The capability must have been issued for exactly this span.
        """
        return self.directory.session_of(token) is not None and verify(
            self.secret, capability, region_id, offset, length, writable, self.epoch, token
        )

    def entry_of(self, location: Location) -> bytes:
        """Encode a location for published clients, and keep the bytes."""
        entry = lookup_entry(
            self._handle_bytes[location.region_id],
            location.offset,
            location.length,
            location.generation,
            location.checksum,
        )
        location.entry = entry
        return entry

    # --- time -----------------------------------------------------------------------------------------------------

    def next_expiry(self) -> float:
        """Return when :meth:`expire` is due next; ``inf`` if nothing is pending."""
        return self.directory.next_expiry()

    def expire(self, now: float) -> None:
        """End expired sessions and pins, a bounded number at once.

        :meth:`next_expiry` returns whether there are more.
        """
        for session_id in self.directory.expire(now):
            self._ended(session_id)
            self.note(INFO, f"session {session_id} is over: its client was silent for its lease")

    def trim(self, now: float) -> None:
        """Begin evictions for sessions that have stored beyond the watermarks."""
        while self.filled:
            session_id, _ = self.filled.popitem()
            self._begin(self._trim(session_id, now))

    def _trim(self, session_id: int, now: float) -> Slices[None]:
        count = yield from self.directory.trimming(session_id, now)
        if count:
            self.note(DEBUG, f"evicted {count} keys of session {session_id} ahead of need")

    def keep_ahead(self, now: float) -> None:
        """Record reads and evict ahead of need, for sessions that have stored.

        These are the sessions that have stored since the last call. Their next reply reports the evicted pages.
        """
        most = USES_AT_ONCE // max(
            1, len(self.stored)
        )  # if many sessions store in one step, reads beyond this are counted the next time
        while self.stored:
            session_id, _ = self.stored.popitem()
            # After it has stored: so the head of a prefix is used later than its end, as it has to be.
            self.directory.note_uses(session_id, max(1, most))
            self.directory.keep_ahead(session_id, now)

    # --- results for the shell -------------------------------------------------------------------------------------

    def take_records(self) -> list[bytes]:
        """Return the records that must be journaled before any reply is sent."""
        return [encode(record) for record in self.directory.take_records()] if self.directory.records else []

    def take_allocations(self) -> list[Allocation]:
        """Return the requests for memory, and forget them."""
        if not self._allocations:
            return []
        allocations, self._allocations = self._allocations, []
        return allocations

    def take_dropped(self) -> list[int]:
        """Return the regions to be removed once the records are written."""
        dropped = self.directory.take_dropped()
        if self._unowned:
            dropped += self._unowned
            self._unowned = []
        for region_id in dropped:
            self._handles.pop(region_id, None)
            self._handle_bytes.pop(region_id, None)
        return dropped

    def note(self, level: int, text: str) -> None:
        """Add a line for the log."""
        self._events.append(Event(level, text))

    def take_events(self) -> list[Event]:
        """Return the lines for the log, and forget them."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def describe(self, now: float, key: str | None = None) -> dict[str, dict[str, Fact]]:
        """Return facts for people, by section and name.

        If a key is named, its facts are added.
        """
        mine = self.statistics()
        server: dict[str, Fact] = {
            "version": self.version,
            "resource manager": self.rm_address,
            "descriptors": self.descriptors,
            "quiet after a restart": self.directory.quiet(now),
            "connections": mine.peers,
            "requests": mine.requests,
            "refused": mine.refused,
            "bad frames": mine.bad_frames,
            "waiting for memory": mine.allocating,
        }
        sections: dict[str, dict[str, Fact]] = {
            "server": server,
            "directory": attrs.asdict(mine.directory),
            "limits": {name: getattr(self.config, name) for name in _LIMITS},
        }
        for name, facts in self.facts().items():
            sections.setdefault(name, {}).update(facts)
        if key is not None:
            there = self.directory.inspect(key)
            sections["key"] = {"found": there is not None, **({} if there is None else attrs.asdict(there))}
        return sections

    def statistics(self) -> ServiceStatistics:
        """Return an immutable snapshot."""
        return ServiceStatistics(
            len(self._peers),
            self._requests,
            self._refused,
            self._bad_frames,
            len(self._waiting),
            self.directory.statistics(),
        )
