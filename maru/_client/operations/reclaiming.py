"""Operations that make room for more pages. Pure.

In this order: pages known to be free, pages that may turn out to be (IN_DOUBT, returns that went astray), pages that
the server can evict for us, another region, or a smaller one. If none helps, the answer is: full.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..._pool.spans import ALIGN_BYTES
from ..._wire import (
    AllocReply,
    AllocRequest,
    BeatRequest,
    Code,
    Handle,
    ListReply,
    ListRequest,
    ReclaimRequest,
    UsageReply,
)
from ...base.errors import ServerRefused
from .connecting import _map, remember, resolve_pages_in_doubt
from .effects import Call, Operation
from .pinning import SESSION_GONE
from .state import ClientState, Shortfall

RESERVED_PER_SECOND = 256 << 20
"""Bytes per second at which a server reserves memory, for timeouts.

A cold page is cleared by the kernel.
"""


def make_room(s: ClientState, n: int, evict: bool = True) -> Operation[list[int] | None]:
    """Allocate ``n`` pages by any means; ``None`` if that is impossible.

    Run it exclusively.

    Args:
        s: the client.
        n: number of pages.
        evict: whether keys of ours may be evicted for them. If not, the server is asked for pages that came back
            meanwhile.
    """
    if not s.config.pool_size:
        raise ValueError(f"{s!r} is read-only: its pool_size is 0")
    for step in _steps(s, n, evict):
        pages = s.pages.allocate(n)
        if pages is not None:
            return pages
        yield from step
    return s.pages.allocate(n)


def _steps(s: ClientState, n: int, evict: bool) -> Iterator[Operation[None]]:
    if s.own and s.pages.regions:
        if s.pages.in_doubt:
            yield resolve_pages_in_doubt(s)
        if s.pages.behind or not evict:
            yield _catch_up(s)
        if evict:
            yield _reclaim(s, n)
    if not s.pages.regions or s.config.auto_expand:
        if s.doubtful_alloc:
            yield _adopt(s)
        yield expand(s, n)


def take_first(s: ClientState) -> Operation[None]:
    """Take the first region, unless it would displace abandoned ones.

    Run it exclusively.
    """
    if s.doubtful_alloc:
        yield from _adopt(s)
    if s.pages.regions:
        return
    usage: UsageReply = yield Call(Code.GET_USAGE, None)
    if usage.pool_free // ALIGN_BYTES * ALIGN_BYTES >= s.config.pool_size:
        yield from expand(s, 1)


def _catch_up(s: ClientState) -> Operation[None]:
    """Send a BEAT, which brings every return that was not acknowledged."""
    yield Call(Code.BEAT, BeatRequest(s.token, s.pages.acknowledged, s.epoch))


def _reclaim(s: ClientState, n: int) -> Operation[None]:
    """Ask the server to evict our least recently used unpinned keys.

    No more than are missing: the server keeps the requested number free for us from then on, so a client that stores a
    little at a time asks a few times, until that is enough.
    """
    wanted = n - s.pages.free
    if wanted > sum(region.pages for region in s.pages.regions):
        return
    while wanted > 0:
        some = min(wanted, s.max_keys)
        try:
            reply = yield Call(Code.RECLAIM, ReclaimRequest(s.token, s.pages.acknowledged, s.next_request(), some))
        except ServerRefused as exc:
            if exc.word in ("quiet", "no_room"):  # not now: right after a restart no key may go
                return
            raise
        if reply.dropped < some:
            return
        wanted -= some


def expand(s: ClientState, n: int) -> Operation[None]:
    """Take another region, if the pool has memory for it.

    Its pages are free.
    """
    config, pages = s.config, s.pages
    held = pages.regions
    if len(held) >= config.max_regions:
        return
    size = (config.expand_size or config.pool_size) if held else config.pool_size
    size = max(size, (n - pages.free) * pages.page_bytes)
    reply = yield from _request_region(s, size)
    if reply.handle is None:
        reason = reply.error
        usage: UsageReply = yield Call(Code.GET_USAGE, None)
        for less in smaller_sizes(size, usage.pool_total, usage.pool_free, pages.page_bytes, is_first=not held):
            reply = yield from _request_region(s, less)
            if reply.handle is not None:
                break
        granted = 0 if reply.handle is None else reply.handle.length
        s.fell_short(Shortfall(size, granted, usage.pool_total, usage.pool_free, reason))
    if reply.handle is not None:
        yield from _own(s, reply.handle)
        s.doubtful_alloc = False


def _request_region(s: ClientState, size: int) -> Operation[AllocReply]:
    """Request a region.

    If the answer brings one, it is ours, and :attr:`ClientState.doubtful_alloc` until it is used.
    """
    s.doubtful_alloc = s.own  # until the answer is there: a region that we do not know of may be ours
    token = s.token
    reply: AllocReply = yield Call(
        Code.REQUEST_ALLOC,
        AllocRequest(s.instance_id, size, session=s.token or None),
        patience=s.config.timeout_ms / 1e3 + size / RESERVED_PER_SECOND,
    )
    if (
        s.token != token
    ):  # no other task waits for this, so the session may have been lost meanwhile, and the region with it
        s.doubtful_alloc = False
        raise ServerRefused("the session that requested a region has ended", SESSION_GONE)
    if not reply.success:
        reply = AllocReply(False, None, reply.error)
    if reply.handle is None:
        s.doubtful_alloc = False
    return reply


def smaller_sizes(size: int, total: int, free: int, page_bytes: int, *, is_first: bool) -> Iterator[int]:
    """Yield sizes to request after a refused region, largest first. Pure.

    All that the pool has, since abandoned regions may go for it; all that is free. A client without a region can do
    nothing at all, and so continues with halves: the free bytes may lie in pieces, or be promised twice.

    Args:
        size: the refused size.
        total: bytes of the pool, in all.
        free: bytes of the pool that no client has.
        page_bytes: less is of no use.
        is_first: whether it is to be the first region.
    """
    for less in sorted({most // ALIGN_BYTES * ALIGN_BYTES for most in (total, free)}, reverse=True):
        if page_bytes <= less < size:
            yield less
            size = less
    while is_first and (size := size // 2 // ALIGN_BYTES * ALIGN_BYTES) >= max(page_bytes, ALIGN_BYTES):
        yield size


def _adopt(s: ClientState) -> Operation[None]:
    """Adopt our own regions whose answer was lost."""
    everybody: ListReply = yield Call(Code.LIST_ALLOCATIONS, ListRequest(session=s.token))
    others: ListReply = yield Call(
        Code.LIST_ALLOCATIONS, ListRequest(exclude_instance_id=s.instance_id, session=s.token)
    )
    known = {handle.region_id for handle in others.allocations} | {region.region_id for region in s.pages.regions}
    for handle in everybody.allocations:
        if handle.region_id not in known:
            try:
                yield from _own(s, handle)
            except ServerRefused:  # it belongs to another client of the same name
                continue
    s.doubtful_alloc = False


def _own(s: ClientState, handle: Handle) -> Operation[None]:
    """Map a region of ours, and use it."""
    remember(s, [handle])
    span = yield from _map(s, handle.region_id, True)
    s.pages.add_region(handle.region_id, span.length)
    if s.on_region_added is not None:
        s.on_region_added(handle.region_id)
