"""Operations: connecting, staying connected, coming back after a restart, and closing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from ..._config import HOW_TO_REACH
from ..._wire import (
    BeatRequest,
    CloseRequest,
    Code,
    Handle,
    HandshakeReply,
    HandshakeRequest,
    KeysRequest,
    ListReply,
    ListRequest,
    RegionRequest,
    ReportEntry,
    ReportRequest,
    ResolveRequest,
    ReturnRequest,
    raw_scalar,
)
from ...base.errors import BadMessage, MaruError, NoAnswer, ServerLost, ServerRefused, UntrustedServer
from ...base.peers import Listener, may_be_published, why_untrusted
from .effects import Alone, Call, Identify, Map, Operation, Span
from .pinning import SESSION_GONE, claim_pins, give_back_pins, portions, retake_pins
from .state import ClientState, is_own

T = TypeVar("T")

VERSION = "trio-offload"
CLOSE_PATIENCE = 0.5
"""Seconds to wait for the answer to CLOSE.

The lease ends without it, too.
"""
FORGET_EVERY = 8
"""Beats between two checks of foreign regions: some half a minute."""


# --- requests in any state ----------------------------------------------------------------------------------------


def settle(s: ClientState, *, wait: bool = True) -> Operation[None]:
    """Make the client ready for requests.

    Forgotten pages and pins are released; if the server restarted or forgot us, the client reattaches.

    Args:
        s: the client.
        wait: until the server has removed the forgotten pins. A caller that only reads need not.
    """
    s.check_open()
    if s.unsettled:
        yield Alone(partial(reattach, s))
    if not s.own and s.looked_after != s.counters.unanswered:
        yield Alone(partial(look_after_silence, s))
    if s.pinned.dropped or s.forgotten:
        s.collect()
    if s.pin_epochs.is_lost:
        yield Alone(partial(claim_pins, s))
    if s.pinned.due:
        yield from give_back_pins(s, wait=wait)


def steadily(s: ClientState, operation: Callable[[], Operation[T]]) -> Operation[T]:
    """Run an operation; if its session is unknown, reattach and repeat it.

    A server that does not know the session has done nothing, so asking again repeats nothing.
    """
    try:
        return (yield from operation())
    except ServerRefused as exc:
        if exc.word != SESSION_GONE:
            raise
    s.unsettled = True
    yield Alone(partial(reattach, s))
    return (yield from operation())


def alone(operation: Callable[[], Operation[T]], *, for_memory: bool = False) -> Operation[T]:
    """Run an operation exclusively, as the effect `Alone`."""
    result: T = yield Alone(operation, for_memory=for_memory)
    return result


# --- connecting ---------------------------------------------------------------------------------------------------


def connect(s: ClientState) -> Operation[None]:
    """Greet the server and, if so configured, map the regions of others."""
    try:
        yield Alone(partial(reattach, s))
    except NoAnswer as exc:
        # The address first: the rest may be cut off if this is one of several reasons. The caller knows who asks.
        why = str(exc).removeprefix(f"{s!r}: ")
        raise NoAnswer(f"No server answers at {s.config.server_url}: {HOW_TO_REACH} ({why})") from exc
    if s.config.eager_map:
        yield from map_others(s)


def reattach(s: ClientState) -> Operation[None]:
    """Greet the server, with the session that we have.

    Anything that its epoch may have ended is checked.
    """
    if not s.unsettled:
        return
    sent_at = s.clock()
    reply: HandshakeReply = yield Call(Code.HANDSHAKE, greeting(s))
    if not reply.success:
        raise ServerRefused("the handshake was refused")
    if reply.session is not None and not reply.lease > 0:
        raise BadMessage(f"{s!r}: the handshake has an invalid lease, {reply.lease} s")
    yield from check_server(s, reply)
    goes_on = s.shook_hands(reply, sent_at)
    s.unsettled = False
    try:
        if goes_on:
            yield from check_regions(s)
            yield Call(Code.BEAT, BeatRequest(s.token, s.pages.acknowledged, s.epoch))
            yield from resolve_pages_in_doubt(s)
        if s.own:
            yield from retake_pins(s)
    except BaseException:
        s.unsettled = True
        raise


def greeting(s: ClientState) -> HandshakeRequest:
    """Return our handshake request; empty for the published protocol."""
    config = s.config
    if config.protocol == "published":
        return HandshakeRequest()
    return HandshakeRequest(
        client_version=raw_scalar(VERSION),
        instance_id=s.instance_id,
        extensions=1,
        session=s.token or None,
        tenant=config.tenant or None,
        lease=config.lease,
        readonly=not config.pool_size,
    )


def check_server(s: ClientState, reply: HandshakeReply) -> Operation[None]:
    """Raise unless the process that answered a handshake can be trusted.

    No part of its answer is used before. Checked after the answer, not before the request: the process that answers has
    a socket there now.

    Raises:
        UntrustedServer: another user's process has answered, or one that speaks a protocol that is not configured.
    """
    config = s.config
    listener = yield from check_listener(s)
    if is_own(reply) or config.protocol == "published":
        return
    if config.protocol == "own" or not may_be_published(listener, s.uid):
        raise UntrustedServer(
            f"protocol = {config.protocol!r}: the server at {config.server_url!r} speaks only the published protocol, "
            "over which a server names the files that are mapped and written. Set protocol='published' if that is meant, or "
            "server_url to the Unix socket of a server of this user"
        )


def check_listener(s: ClientState) -> Operation[Listener]:
    """Return the process that listens at the server's address.

    It is not looked up if the server is known by its key.

    Raises:
        UntrustedServer: another user's process listens. The next operation begins with a handshake.
    """
    config = s.config
    if config.curve_server_key:
        return Listener(unknown="its key proves who it is")
    listener: Listener = yield Identify()
    why = why_untrusted(listener, s.uid)
    if why:
        s.unsettled = True
        raise UntrustedServer(
            f"server_url = {config.server_url!r}: {why}. Start the server as this user, or give both sides keys "
            "(curve_key_file, curve_server_key)"
        )
    s.doubt_server(listener.unknown)
    return listener


def check_regions(s: ClientState) -> Operation[None]:
    """Give up our regions that the server does not list.

    A published server has forgotten them. One of ours continues our session, and has dropped a region without memory:
    some of its keys may have been deleted before, in returns that have not come, so none is registered again.
    """
    ours = {region.region_id for region in s.pages.regions}  # one that is added meanwhile need not be listed yet
    if not ours:
        return
    listed: ListReply = yield Call(Code.LIST_ALLOCATIONS, ListRequest(session=s.token or None))
    lost = ours.difference([handle.region_id for handle in listed.allocations])
    for region in s.pages.regions:
        if region.region_id in lost:
            s.lose_region(region.region_id, forgotten=not s.own)


def look_after_silence(s: ClientState) -> Operation[None]:
    """Check a published server that did not answer for a restart.

    A restarted one has forgotten everything, and has no epoch to show it. It would accept stores for regions that it
    does not know, and no reader would ever find them.
    """
    unanswered = s.counters.unanswered
    if s.own or s.looked_after == unanswered:
        return
    reply: HandshakeReply = yield Call(Code.HANDSHAKE, HandshakeRequest())
    yield from check_server(s, reply)
    if reply.codes and s.config.protocol != "published":  # it is one of ours by now
        s.unsettled = True
        yield from reattach(s)
    else:
        s.rm_address = reply.rm_address or s.config.rm_address
        yield from check_regions(s)
    s.looked_after = unanswered


# --- staying connected --------------------------------------------------------------------------------------------


def beat(s: ClientState) -> Operation[None]:
    """Send a beat, and do the work that waits for one."""
    yield from settle(s)
    yield from steadily(s, partial(_beat, s))
    if s.doubts_pins():
        yield Alone(partial(claim_pins, s))
    s.beats += 1
    if s.beats % FORGET_EVERY == 0:
        yield from forget_regions(s)
    if s.reports:
        yield from report(s)


def _beat(s: ClientState) -> Operation[None]:
    try:
        if s.own:
            yield Call(Code.BEAT, BeatRequest(s.token, s.pages.acknowledged, s.epoch))
        else:
            yield Call(Code.HEARTBEAT, None)
    except (NoAnswer, ServerLost):
        s.unsettled = True  # it may be another server by now, without BEAT: every server knows a handshake
        raise
    if not s.own:
        yield from check_listener(s)  # no epoch shows that it is another one
        yield Alone(partial(check_regions, s))
    elif s.pages.in_doubt:
        yield Alone(partial(resolve_pages_in_doubt, s))


def report(s: ClientState) -> Operation[None]:
    """Report this client's calls to the server's statistics."""
    entries = [
        ReportEntry(s.instance_id, what, result, size, latency * 1e6)
        for what, result, size, latency in (s.reports.popleft() for _ in range(min(len(s.reports), s.max_keys)))
    ]
    yield Call(Code.REPORT_STATS, ReportRequest(entries))


def resolve_pages_in_doubt(s: ClientState) -> Operation[None]:
    """Resolve every page that was sent and not answered.

    Their attempts are fenced.
    """
    for attempt, pages in [(attempt, list(pages)) for attempt, pages in s.pages.in_doubt.items()]:
        if attempt not in s.pages.in_doubt:  # a session was lost meanwhile
            continue
        yield from resolve(s, attempt, pages)


def resolve(s: ClientState, attempt: int, pages: list[int]) -> Operation[list[bool]]:
    """Fence an attempt, and return whether each page is held under it.

    A repeated request gets the same answer.
    """
    regions, offsets = s.pages.locations(pages)
    if isinstance(regions, int):
        regions = [regions] * len(pages)
    reply = yield Call(Code.RESOLVE, ResolveRequest(s.token, s.pages.acknowledged, attempt, regions, offsets))
    s.pages.resolved(attempt, pages, reply.held)
    return list(map(bool, reply.held))


def close(s: ClientState) -> Operation[None]:
    """End the session at the server, if it answers in time.

    If it does not, no error is raised.
    """
    if s.is_closed:
        return
    s.is_closed = True
    if not s.is_connected:
        return
    try:
        if s.own:
            yield Call(Code.CLOSE, CloseRequest(s.token, s.pages.acknowledged), patience=CLOSE_PATIENCE)
            return
        pinned = s.pinned
        held = [key for key, taken in pinned.held(s.era).items() for _ in range(taken)]
        for some in portions([*pinned.due, *held], s.max_keys):
            yield Call(Code.BATCH_UNPIN_KV, KeysRequest(some), patience=CLOSE_PATIENCE)
        for region in s.pages.regions:
            message = ReturnRequest(s.instance_id, region.region_id)
            yield Call(Code.RETURN_ALLOC, message, patience=CLOSE_PATIENCE)
    except (NoAnswer, ServerLost, ServerRefused):
        pass


# --- regions ------------------------------------------------------------------------------------------------------


def map_others(s: ClientState) -> Operation[None]:
    """Map every region of other owners, as far as possible now.

    The rest is mapped when it is read.
    """
    listed: ListReply = yield Call(
        Code.LIST_ALLOCATIONS, ListRequest(exclude_instance_id=s.instance_id, session=s.token or None)
    )
    remember(s, listed.allocations)
    for handle in listed.allocations:
        try:
            yield from span_of(s, handle.region_id)
        except (MaruError, OSError):
            continue


def remember(s: ClientState, handles: Iterable[Handle]) -> None:
    """Keep handles, which a request to the resource manager needs."""
    for handle in handles:
        s.handles[handle.region_id] = handle


def span_of(s: ClientState, region_id: int, *, write: bool = False) -> Operation[Span]:
    """Return a region in memory, mapped if it is not."""
    span = s.spans.get(region_id)
    if span is None:
        span = yield Alone(partial(_map, s, region_id, write))
    return span


def _map(s: ClientState, region_id: int, write: bool) -> Operation[Span]:
    mapped = s.spans.get(region_id)
    # One that is mapped to be read was another owner's: the server decides whether it may be written.
    if mapped is not None and (mapped.writable or not write):
        return mapped
    span: Span
    if s.own and s.descriptors:
        reply = yield Call(Code.REGION, RegionRequest(s.token, s.pages.acknowledged, region_id, write))
        span = yield Map(region_id, reply.offset, reply.length, write=write, capability=reply.capability)
    else:
        handle = s.handles.get(region_id)
        if handle is None:
            listed: ListReply = yield Call(Code.LIST_ALLOCATIONS, ListRequest(session=s.token or None))
            remember(s, listed.allocations)
            handle = s.handles.get(region_id)
        if handle is None:
            raise ServerRefused(f"region {region_id} is gone")
        span = yield Map(region_id, handle.offset, handle.length, write=write, capability=None, handle=handle)
    s.spans[region_id] = span
    if not write and s.on_region_added is not None:
        s.on_region_added(region_id)
    return span


def forget_regions(s: ClientState) -> Operation[None]:
    """Unmap foreign regions that the server does not list any more.

    Mapped here, they would take memory for nothing. Views of them stay valid for as long as their pins do: the memory
    goes with the last of them.
    """
    own = {region.region_id for region in s.pages.regions}
    foreign = [region_id for region_id in s.spans if region_id not in own]
    if not foreign:
        return
    listed: ListReply = yield Call(Code.LIST_ALLOCATIONS, ListRequest(session=s.token or None))
    known = {handle.region_id for handle in listed.allocations}
    for region_id in foreign:
        if region_id not in known:
            s.spans.pop(region_id, None)
            s.handles.pop(region_id, None)
