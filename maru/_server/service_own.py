"""Handlers of messages between our client and our server. Pure.

They are in the order of their codes. Each gets the service, the sender, the header, the message, its bytes and the
time, and returns a whole frame. Every message but DESCRIBE renews its session, acknowledges the pages its client has
got back, and its reply hands over further ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, cast

from .._directory.locations import Location
from .._directory.slices import Slices
from .._index.layout import tenant_of
from .._journal.registrations import columns_of
from .._wire import (
    HEADER_BYTES,
    KEYS_AT_ONCE,
    BeatReply,
    BeatRequest,
    CloseReply,
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    DropReply,
    DropRequest,
    FindReply,
    FindRequest,
    Header,
    ListKeysReply,
    ListKeysRequest,
    OwnRequest,
    PinsReply,
    PinsRequest,
    ReclaimReply,
    ReclaimRequest,
    RegionReply,
    RegionRequest,
    ResolveReply,
    ResolveRequest,
    StoreReply,
    StoreRequest,
    UnpinReply,
    UnpinRequest,
    place,
    reply,
    request,
)
from .._wire.capability import issue
from .parts import in_parts
from .peers import Listing, Peer, Refused, Word

if TYPE_CHECKING:
    from .service import Service


_INFO: Final = 20  # as in `logging`
_LOOKED: Final = 1_024
"""Names examined for one page of a listing.

The longest take a MiB.
"""
_LISTINGS: Final = 4
"""Most listings at once, one per connection. Eight bytes per key each."""
_LISTING_REST: Final = 1.0
"""Seconds without a request after which another listing may end one."""
_LISTING_PAGE: Final = 1e-2
"""Seconds per page after which a listing may be ended as well.

Without it, slow requests could keep a place for hours.
"""
_LISTING_PAUSE: Final = 1e-3
"""Seconds per ``_LOOKED`` keys until a connection may begin another listing.

A listing copies all names.
"""


Answered: TypeAlias = bytes | Slices[bytes]
"""A reply frame, or slices if there are many keys."""


def store(service: Service, peer: Peer, header: Header, message: StoreRequest, payload: bytes, now: float) -> Answered:
    """Register pages under keys."""
    session_id = _enter(service, peer, message, now)
    service.check_keys(message.keys)
    if len(message.keys) > KEYS_AT_ONCE:
        return _store_in_parts(service, header, message, session_id, now)
    directory = service.directory
    answer = directory.register(session_id, columns_of(message), now, source=(header.code, payload), later=True)
    if answer is None:
        raise Refused(Word.FENCED, f"attempt {message.attempt} was resolved before it arrived")
    service.filled[session_id] = service.stored[session_id] = None
    return reply(
        header.code,
        header.sequence,
        StoreReply(service.epoch, directory.pending(session_id, now), answer.statuses, answer.generations),
        header.flags,
    )


def _store_in_parts(
    service: Service, header: Header, message: StoreRequest, session_id: int, now: float
) -> Slices[bytes]:
    """Register in parts, each with its own record.

    The effect is as if the client had sent as many requests of one attempt.
    """
    directory = service.directory
    regions, lengths, checksums, depths = message.regions, message.lengths, message.checksums, message.depths

    def handle(at: slice, now: float) -> list[tuple[int, int]]:
        service.check_session(message.session, session_id)
        part = StoreRequest(
            message.session,
            0,
            message.attempt,
            regions if isinstance(regions, int) else regions[at],
            message.keys[at],
            message.offsets[at],
            lengths if isinstance(lengths, int) else lengths[at],
            None if checksums is None else checksums[at],
            None if depths is None else depths[at],
        )
        source = header.code, request(header.code, 0, part)[HEADER_BYTES:]
        answer = directory.register(session_id, columns_of(part), now, source=source, later=True)
        if answer is None:
            raise Refused(Word.FENCED, f"attempt {message.attempt} was resolved before all of it was registered")
        service.filled[session_id] = service.stored[session_id] = None
        return list(zip(answer.statuses, answer.generations, strict=True))

    def answer(results: list[tuple[int, int]]) -> bytes:
        statuses, generations = map(list, zip(*results, strict=True))
        pending = directory.pending(session_id, now)
        return reply(
            header.code, header.sequence, StoreReply(service.epoch, pending, statuses, generations), header.flags
        )

    return in_parts(len(message.keys), handle, answer, now, last_first=True)


def find(service: Service, peer: Peer, header: Header, message: FindRequest, payload: bytes, now: float) -> Answered:
    """Find the locations of keys, and pin them on request."""
    session_id = _enter(service, peer, message, now)
    service.check_keys(message.keys)
    if message.pin:
        service.check_pins(peer, session_id, len(message.keys))
    if len(message.keys) > KEYS_AT_ONCE:
        return _find_in_parts(service, header, message, session_id, now)
    directory = service.directory
    if message.pin:
        _check_pin_epoch(service, session_id, message.turn)
    answers = directory.find(session_id, message.keys, now, pin=message.pin, prefix=message.prefix)
    found: int | list[int] = len(answers)
    there = answers
    if None in answers:
        found = [at for at, location in enumerate(answers) if location is not None]
        there = [location for location in answers if location is not None]
    places = b"".join([location.place or place_of(location) for location in cast("list[Location]", there)])
    answer = FindReply(service.epoch, directory.pending(session_id, now), found, places)
    return reply(header.code, header.sequence, answer, header.flags)


def _find_in_parts(
    service: Service, header: Header, message: FindRequest, session_id: int, now: float
) -> Slices[bytes]:
    """Find in parts; with ``prefix`` no further than the first miss."""
    found: list[int] = []
    misses = 0

    def handle(at: slice, now: float) -> list[bytes]:
        nonlocal misses
        service.check_session(message.session, session_id)
        if message.prefix and misses:
            return []
        if message.pin:
            _check_pin_epoch(service, session_id, message.turn)
        keys = message.keys[at]
        answers = service.directory.find(session_id, keys, now, pin=message.pin, prefix=message.prefix)
        found.extend([at.start + i for i, location in enumerate(answers) if location is not None])
        places = [location.place or place_of(location) for location in answers if location is not None]
        misses += len(keys) - len(places)
        return places

    def answer(places: list[bytes]) -> bytes:
        pending = service.directory.pending(session_id, now)
        which = sorted(found) if misses and not message.prefix else len(found)
        return reply(
            header.code, header.sequence, FindReply(service.epoch, pending, which, b"".join(places)), header.flags
        )

    return in_parts(len(message.keys), handle, answer, now, last_first=not message.prefix)


def unpin(service: Service, peer: Peer, header: Header, message: UnpinRequest, payload: bytes, now: float) -> Answered:
    """Remove one of this session's pins from each key."""
    session_id = _enter(service, peer, message, now)
    service.check_keys(message.keys)
    if len(message.keys) <= KEYS_AT_ONCE:
        _check_pin_epoch(service, session_id, message.turn)
        results = service.directory.unpin(session_id, message.keys)
        pending = service.directory.pending(session_id, now)
        return reply(header.code, header.sequence, UnpinReply(service.epoch, pending, results), header.flags)

    def handle(at: slice, now: float) -> list[bool]:
        service.check_session(message.session, session_id)
        _check_pin_epoch(service, session_id, message.turn)
        return service.directory.unpin(session_id, message.keys[at])

    def answer(results: list[bool]) -> bytes:
        pending = service.directory.pending(session_id, now)
        return reply(header.code, header.sequence, UnpinReply(service.epoch, pending, results), header.flags)

    return in_parts(len(message.keys), handle, answer, now)


def drop(
    service: Service, peer: Peer, header: Header, message: DropRequest, payload: bytes, now: float
) -> Slices[bytes]:
    """Delete keys, unless they are held.

    A repeated request gets the same answer again.
    """
    session_id = _enter(service, peer, message, now)
    service.check_keys(message.keys)
    asked, meant = message.request_id, message.generations
    answers = yield from service.directory.deleting(session_id, message.keys, now, request_id=asked, generations=meant)
    service.check_session(message.session, session_id)
    pending = service.directory.pending(session_id, now)
    return reply(header.code, header.sequence, DropReply(service.epoch, pending, answers), header.flags)


def reclaim(
    service: Service, peer: Peer, header: Header, message: ReclaimRequest, payload: bytes, now: float
) -> Slices[bytes]:
    """Evict this owner's least recently used keys.

    Their pages return to the owner.
    """
    session_id = _enter(service, peer, message, now)
    if service.directory.quiet(now):
        raise Refused(Word.QUIET, "the server has restarted: keys that were being read may not be evicted yet")
    pages = max(0, message.pages)
    dropped = yield from service.directory.reclaiming(session_id, pages, now, request_id=message.request_id)
    service.check_session(message.session, session_id)
    pending = service.directory.pending(session_id, now)
    return reply(header.code, header.sequence, ReclaimReply(service.epoch, pending, dropped), header.flags)


def resolve(
    service: Service, peer: Peer, header: Header, message: ResolveRequest, payload: bytes, now: float
) -> Slices[bytes]:
    """Return which pages an attempt has registered, and end the attempt.

    It can register nothing from now on.
    """
    session_id = _enter(service, peer, message, now)

    def handle(at: slice, now: float) -> list[int]:
        service.check_session(message.session, session_id)
        return service.directory.resolve(session_id, message.attempt, message.regions[at], message.offsets[at])

    def answer(held: list[int]) -> bytes:
        pending = service.directory.pending(session_id, now)
        return reply(header.code, header.sequence, ResolveReply(service.epoch, pending, held), header.flags)

    return in_parts(len(message.regions), handle, answer, now)


def beat(service: Service, peer: Peer, header: Header, message: BeatRequest, payload: bytes, now: float) -> bytes:
    """Renew the session, and resend returned pages that are not acknowledged.

    The answer that carried them may have been lost.
    """
    session_id = _enter(service, peer, message, now)
    if message.epoch == service.epoch:
        # The client knows this start. Any other message, even a handshake, may have been sent before it knew of the
        # restart.
        service.directory.attach(session_id, now)
    pending = service.directory.pending(session_id, now, resend=True)
    lease = service.directory.remaining(session_id, now)
    return reply(header.code, header.sequence, BeatReply(service.epoch, pending, lease), header.flags)


def close(service: Service, peer: Peer, header: Header, message: CloseRequest, payload: bytes, now: float) -> bytes:
    """End the session.

    Its regions stay readable for as long as there is room.
    """
    session_id = _enter(service, peer, message, now)
    service.end_session(session_id, now)
    return reply(header.code, header.sequence, CloseReply(service.epoch, None), header.flags)


def region(service: Service, peer: Peer, header: Header, message: RegionRequest, payload: bytes, now: float) -> bytes:
    """Return a capability for a region; only its owner may write.

    The client presents it at the socket that hands out descriptors.
    """
    session_id = _enter(service, peer, message, now)
    there = service.directory.region(message.region_id)
    if there is None:
        raise Refused(Word.REFUSED, f"there is no region {message.region_id}")
    length, owner = there
    if message.write and owner != session_id:
        raise Refused(Word.REFUSED, f"region {message.region_id} belongs to another client: it can only be read")
    offset = service.handle_of(message.region_id).offset
    capability = issue(service.secret, message.region_id, offset, length, message.write, service.epoch, message.session)
    pending = service.directory.pending(session_id, now)
    return reply(
        header.code,
        header.sequence,
        RegionReply(service.epoch, pending, capability, offset, length, message.write),
        header.flags,
    )


def describe(
    service: Service, peer: Peer, header: Header, message: DescribeRequest, payload: bytes, now: float
) -> bytes:
    """Describe this server and, if named, a key, for people.

    This does not count as a use of the key.
    """
    return reply(
        header.code,
        header.sequence,
        DescribeReply(service.epoch, service.version, service.describe(now, message.key)),
        header.flags,
    )


def pins(
    service: Service, peer: Peer, header: Header, message: PinsRequest, payload: bytes, now: float
) -> Slices[bytes]:
    """Compare a session's pins with its client's, and drop any others.

    The replies that reported those never reached the client.
    """
    session_id = _enter(service, peer, message, now)
    service.check_keys(message.keys)

    def handle(at: slice, now: float) -> list[int]:
        service.check_session(message.session, session_id)
        _check_pin_epoch(service, session_id, message.turn)
        last = message.last and at.stop >= len(message.keys)
        return [service.directory.settle_pins(session_id, message.keys[at], message.counts[at], last=last)]

    def answer(dropped_of_each: list[int]) -> bytes:
        dropped = sum(dropped_of_each)
        if dropped:
            service.note(_INFO, f"session {session_id} had {dropped} pins that its client did not know of")
        pending = service.directory.pending(session_id, now)
        return reply(header.code, header.sequence, PinsReply(service.epoch, pending, dropped), header.flags)

    return in_parts(len(message.keys), handle, answer, now)


def list_keys(
    service: Service, peer: Peer, header: Header, message: ListKeysRequest, payload: bytes, now: float
) -> bytes:
    """List one page of the tenant's keys that begin with a prefix."""
    session_id = _enter(service, peer, message, now)
    directory, listings = service.directory, service.listings
    if not message.cursor:
        if now < peer.listing_due:
            raise Refused(Word.TOO_MANY, "this connection began a listing a moment ago: ask again later")
        listings.pop(peer, None)
        if len(listings) >= _LISTINGS and not _end_slow_listing(listings, now):
            raise Refused(Word.TOO_MANY, f"{_LISTINGS} clients are already listing keys: ask again later")
        listing = Listing(session_id, directory.list_keys(), now)
        peer.listing_due = now + len(listing.names) // _LOOKED * _LISTING_PAUSE
    else:
        there = listings.pop(peer, None)
        if there is None or there.session_id != session_id:
            raise Refused(Word.FENCED, "this listing is over: begin again")
        listing = there
    listing.asked = now
    listings[peer] = listing
    names = listing.names
    tenant, ends = directory.tenant_of(message.session), message.cursor + _LOOKED
    found = [name for name in names[message.cursor : ends] if name.startswith(message.prefix)]
    keys = [name for name in found if tenant_of(name) == tenant]
    if ends >= len(names):
        ends = 0
        del listings[peer]
    pending = directory.pending(session_id, now)
    return reply(header.code, header.sequence, ListKeysReply(service.epoch, pending, keys, ends), header.flags)


def _end_slow_listing(listings: dict[Peer, Listing], now: float) -> bool:
    """End a resting or long-lasting listing; return whether there was one."""
    for peer, listing in listings.items():  # the least recently used first
        longest = _LISTING_REST + len(listing.names) // _LOOKED * _LISTING_PAGE
        if now - listing.asked >= _LISTING_REST or now - listing.begun >= longest:
            del listings[peer]
            return True
    return False


def place_of(location: Location) -> bytes:
    """Encode a location for our clients, and keep the bytes."""
    made = place(location.region_id, location.offset, location.length, location.generation, location.checksum)
    location.place = made
    return made


def _check_pin_epoch(service: Service, session_id: int, pin_epoch: int) -> None:
    if not service.directory.enter_pin_epoch(session_id, pin_epoch):
        raise Refused(Word.FENCED, f"pin epoch {pin_epoch} was over before this request arrived")


def _enter(service: Service, peer: Peer, message: OwnRequest, now: float) -> int:
    session_id = service.session_of(peer, message.session, now)
    if message.ack:
        service.directory.acknowledge(session_id, message.ack)
    return session_id
