"""Operations that allocate pages for new keys, and register them. Pure.

One of our servers stores in one round trip: the answer to STORE reports for each page whether it is new. A published
server is asked in three phases: which keys exist, then the pages of those are free again, then the others are
registered.

Rule 1. A page is REGISTERING from right before its request may leave. Any end of the wait for the answer, except the
        answer itself, makes it IN_DOUBT.
Rule 2. A key named twice, a duplicate and a refusal leave a free page, never a lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import or_
from typing import Any, TypeAlias

from ..._wire import (
    BatchRegisterRequest,
    Code,
    KeysRequest,
    RegisterRequest,
    ResultsReply,
    StoreReply,
    StoreRequest,
    StoreStatus,
)
from ...base.errors import FateUnknown, NoAnswer, ServerLost, ServerRefused
from ..answers import Stored
from ..copying import copy as copy_all
from ..copying import copy_and_sum
from ..page_states import PageEvent, PageState
from .connecting import alone, resolve, settle, steadily
from .effects import Call, Operation, Work
from .pinning import SESSION_GONE, portions
from .reclaiming import expand, make_room, take_first
from .state import ClientState, Former, StoredPage

Column: TypeAlias = int | list[int]
"""One value for each page, or one that stands for all."""
Depths: TypeAlias = list[int | None] | None
"""Index of each block in its prefix, if it is known."""
Copy: TypeAlias = Callable[[Sequence[int], bool], list[int] | None]
RESTORED_AT_ONCE = 64
FATE_TRIES = 3
"""Number of requests for a store's outcome, ``timeout_ms`` each."""


class SessionEnded(ServerLost):
    """The server has ended the session of these pages; none is stored."""


_ANSWERS = {
    StoreStatus.NEW: (PageEvent.NEW, Stored.NEW),
    StoreStatus.DUPLICATE: (PageEvent.REFUSED, Stored.DUPLICATE),
    StoreStatus.PINNED: (PageEvent.DISPUTED, Stored.REFUSED),
    StoreStatus.FOREIGN: (PageEvent.DISPUTED, Stored.REFUSED),
    StoreStatus.RANGE: (PageEvent.REFUSED, Stored.REFUSED),
    StoreStatus.QUOTA: (PageEvent.REFUSED, Stored.QUOTA),
    StoreStatus.KEY: (PageEvent.REFUSED, Stored.KEY),
    StoreStatus.BUSY: (PageEvent.REFUSED, Stored.REFUSED),
}
_UNKNOWN = (PageEvent.DISPUTED, Stored.REFUSED)  # a status of a later server


def allocate(s: ClientState, n: int, *, evict: bool = True) -> Operation[list[int] | None]:
    """Allocate ``n`` pages; ``None`` if there is no room now.

    Sends no message while there are enough free ones.

    Args:
        s: the client.
        n: number of pages.
        evict: whether keys of ours may be evicted for them.

    Raises:
        PoolFull: there never will be.
    """
    pages = yield from _allocate(s, n, evict)
    if pages is None:
        s.check_size(n)
    return pages


def _allocate(s: ClientState, n: int, evict: bool) -> Operation[list[int] | None]:
    s.check_open()
    if s.unsettled:
        yield from settle(s)
    elif s.forgotten:
        s.collect()
    pages = s.pages.allocate(n)
    if pages is None:
        if not s.is_ready():
            yield from settle(s)
        pages = yield from steadily(s, partial(alone, partial(make_room, s, n, evict), for_memory=True))
    return pages


def allocate_most(s: ClientState, n: int, *, evict: bool = True) -> Operation[list[int]]:
    """Allocate ``n`` pages, or as many as there is room for."""
    pages = yield from _allocate(s, n, evict)
    while pages is None:
        n = min(n - 1, s.pages.free)
        pages = s.pages.allocate(n)
    return pages


def take_region(s: ClientState) -> Operation[bool]:
    """Take the first region, with its pages in place.

    Only if the pool has memory for it that is nobody's.

    Returns:
        Whether there is a region.
    """
    s.check_open()
    if not s.is_ready():
        yield from settle(s)
    if s.config.pool_size and not s.pages.regions:
        yield from steadily(s, partial(alone, partial(take_first, s), for_memory=True))
    return bool(s.pages.regions)


def store(
    s: ClientState,
    keys: list[str],
    pages: list[int],
    lengths: Column,
    checksums: list[int] | None,
    depths: Depths = None,
) -> Operation[list[Stored]]:
    """Register filled pages under these keys.

    Afterwards none of the pages is ALLOCATED.

    Raises:
        NoAnswer: it is unknown which are stored. The pages are used again only once that is known.
        ServerLost: the pages are not ours any more.
    """
    try:
        names = s.names(keys)
        if not s.is_ready():
            yield from settle(s)
    except BaseException:
        s.free(pages)
        raise
    return (yield from _register(s, names, pages, lengths, checksums, depths))


def _register(
    s: ClientState,
    names: list[str],
    pages: list[int],
    lengths: Column,
    checksums: list[int] | None,
    depths: Depths = None,
) -> Operation[list[Stored]]:
    register = _store_own if s.own else _store_published
    most = s.max_keys
    if len(names) <= most:
        return (yield from register(s, names, pages, lengths, checksums, depths))
    answers: list[Stored] = []
    start = 0
    try:
        # The last part first: so the head of a prefix is used last, and is evicted last.
        for start in reversed(range(0, len(names), most)):
            part = slice(start, start + most)
            some = yield from register(
                s,
                names[part],
                pages[part],
                lengths if isinstance(lengths, int) else lengths[part],
                None if checksums is None else checksums[part],
                None if depths is None else depths[part],
            )
            answers = some + answers
    except BaseException:
        s.free(pages[:start])
        raise
    return answers


def store_surely(
    s: ClientState,
    keys: list[str],
    pages: list[int],
    lengths: Column,
    checksums: list[int] | None,
    depths: Depths = None,
) -> Operation[list[Stored | None]]:
    """Store as `store` does; if no answer comes, ask for the outcome.

    ``None`` in the result is not stored, for good.

    Raises:
        SessionEnded: the pages are not ours any more, and none is stored.
        FateUnknown: it did not answer that either, again and again, or it cannot be asked. It may be stored, or may be
            yet; the pages are IN_DOUBT, or QUARANTINED.
        NoAnswer: nothing was sent, and the pages are free.
    """
    try:
        return list((yield from store(s, keys, pages, lengths, checksums, depths)))
    except SessionEnded:
        raise
    except (NoAnswer, ServerLost, ServerRefused) as exc:
        attempts = [attempt for attempt, some in s.pages.in_doubt.items() if not set(some).isdisjoint(pages)]
        if not attempts:  # nothing was sent, or it was to a published server, which cannot be asked
            if PageState.QUARANTINED in map(s.pages.state, pages):
                raise FateUnknown(f"{exc}; this server cannot report the outcome of the store") from exc
            raise
    for left in range(FATE_TRIES - 1, -1, -1):
        try:
            return (yield from _fate(s, keys, pages, attempts))
        except NoAnswer as exc:
            if not left:
                raise FateUnknown(f"{exc}; the outcome of a store is unknown") from exc
    raise AssertionError("unreachable")


def _fate(s: ClientState, keys: list[str], pages: list[int], attempts: list[int]) -> Operation[list[Stored | None]]:
    """Fence these attempts, and return the outcome of each page.

    A page is stored if it is held under one of the attempts; otherwise its key is a duplicate, or not stored.
    """
    if not s.is_ready():
        yield from settle(s)
    _check_pages(s, pages)
    held = [False] * len(pages)
    for attempt in attempts:
        held = list(map(or_, held, (yield from alone(partial(resolve, s, attempt, pages)))))
    names = s.names(keys)
    missing = [name for name, is_held in zip(names, held, strict=True) if not is_held]
    there = dict(zip(missing, (yield from _exist(s, missing)), strict=True))
    return [
        Stored.NEW if is_held else Stored.DUPLICATE if there[name] else None
        for name, is_held in zip(names, held, strict=True)
    ]


def _exist(s: ClientState, names: list[str]) -> Operation[list[bool]]:
    found: list[bool] = []
    for some in portions(names, s.max_keys):
        reply: ResultsReply = yield Call(Code.BATCH_EXISTS_KV, KeysRequest(some))
        found += reply.results
    return found


def put(s: ClientState, keys: list[str], lengths: Column, copy: Copy) -> Operation[list[Stored]]:
    """Copy into pages of our own and register them.

    Args:
        s: the client.
        keys: one for each buffer.
        lengths: of the buffers.
        copy: copies the first buffers to as many addresses; on request it returns the sum of each.
    """
    try:
        return (yield from _put(s, keys, lengths, copy))
    except SessionEnded:  # the caller still has the bytes: once more, into a region of the new session
        return (yield from _put(s, keys, lengths, copy))


def _put(s: ClientState, keys: list[str], lengths: Column, copy: Copy) -> Operation[list[Stored]]:
    pages = yield from allocate_most(s, len(keys))
    n = len(pages)
    if not n:
        return [Stored.FULL] * len(keys)
    try:
        size = n * lengths if isinstance(lengths, int) else sum(lengths[:n])
        sums = yield Work(partial(copy, addresses(s, pages), s.config.checksums), size, list(s.spans.values()))
    except BaseException:
        s.free(pages)
        raise
    if n == len(keys):
        return (yield from store(s, keys, pages, lengths, sums))
    answers = yield from store(s, keys[:n], pages, lengths if isinstance(lengths, int) else lengths[:n], sums)
    return answers + [Stored.FULL] * (len(keys) - n)


def restore(s: ClientState) -> Operation[None]:
    """Register missing keys of lost regions again, without evicting others.

    Their bytes are still mapped here. A checksum is made once, from the bytes that are stored: a page that does not
    match it any more is lost. Were it summed again, its damage would be valid from then on.
    """
    while s.former:
        former = s.former[-1]
        if not former.pages:
            s.former.pop()
            continue
        some = former.pages[: min(RESTORED_AT_ONCE, s.max_keys)]
        names = [stored[0] for _, stored in some]
        there = yield Call(Code.BATCH_EXISTS_KV, KeysRequest(names))
        if former not in s.former:  # the next session was lost, too, to a server that knows of later deletions
            continue
        missing = [one for one, is_there in zip(some, there.results, strict=True) if not is_there]
        summed = [one for one in missing if one[1][2] is not None]
        groups = [summed, [one for one in missing if one[1][2] is None]]  # one STORE has sums for all or none
        former.pages[: len(some)] = chain(*groups)
        s.counters.keys_kept += len(some) - len(missing)
        for group in groups:
            if group and former in s.former:
                yield from _restore(s, former, group)
                del former.pages[: len(group)]  # at once: the next group may fail, and is then tried again alone


def _restore(s: ClientState, former: Former, some: list[tuple[int, StoredPage]]) -> Operation[None]:
    span = former.span
    pages = s.pages.allocate(len(some))
    if pages is None:
        yield from steadily(s, partial(alone, partial(expand, s, len(some)), for_memory=True))
        if former not in s.former:
            return
        pages = s.pages.allocate(min(len(some), s.pages.free)) or []
    kept = some[: len(pages)]
    if not kept:
        s.counters.keys_lost += len(some)
        return
    offsets = [offset for offset, _ in kept]
    names, sizes, expected, depths = map(list, zip(*[stored for _, stored in kept], strict=True))
    is_summed = expected[0] is not None
    copy = copy_and_sum if is_summed else copy_all
    try:
        at = [span.address + offset for offset in offsets]
        keep = [span, *s.spans.values()]
        sums = yield Work(partial(copy, addresses(s, pages), at, sizes), sum(sizes), keep)
    except BaseException:
        s.free(pages)
        raise
    whole = [at for at in range(len(kept)) if not is_summed or sums[at] == expected[at]]
    if len(whole) < len(kept):
        s.free([pages[at] for at in {*range(len(kept))}.difference(whole)])
        pages, names, sizes, expected, depths = (
            [column[at] for at in whole] for column in (pages, names, sizes, expected, depths)
        )
    answers = (yield from _register(s, names, pages, sizes, expected if is_summed else None, depths)) if whole else []
    # Not before: if there is no answer, all of these are tried again.
    registered = sum(map(bool, answers))
    s.counters.damaged += len(kept) - len(whole)
    s.counters.keys_kept += registered
    s.counters.keys_lost += len(some) - registered


def addresses(s: ClientState, pages: Sequence[int]) -> Sequence[int]:
    """Return the addresses of our own pages."""
    size = s.pages.page_bytes
    region = s.pages.region_of(pages[0])
    base = s.spans[region.region_id].address
    first, end = region.first, region.first + region.pages
    if first <= pages[0] and pages[-1] < end and pages[-1] - pages[0] == len(pages) - 1:
        start = base + (pages[0] - first) * size
        return range(start, start + len(pages) * size, size)
    found: list[int] = []
    for page in pages:
        if not first <= page < end:
            region = s.pages.region_of(page)
            base = s.spans[region.region_id].address
            first, end = region.first, region.first + region.pages
        found.append(base + (page - first) * size)
    return found


# --- one request --------------------------------------------------------------------------------------------------


def _check_pages(s: ClientState, pages: Sequence[int]) -> None:
    """Raise if the session was lost since the pages were allocated."""
    if s.pages.has_ended(pages):
        raise SessionEnded(f"{s!r}: the server has ended the session of these pages; store them again")


def _store_own(
    s: ClientState, names: list[str], pages: list[int], lengths: Column, checksums: list[int] | None, depths: Depths
) -> Operation[list[Stored]]:
    attempt = s.next_attempt()
    regions, offsets = s.pages.locations(pages)
    message = StoreRequest(s.token, s.pages.acknowledged, attempt, regions, names, offsets, lengths, checksums, depths)
    reply: StoreReply = yield from _send(
        s, Call(Code.STORE, message), names, pages, lengths, checksums, depths, attempt
    )
    if not any(reply.statuses) and len(reply.statuses) == len(pages):
        s.pages.answered(pages, attempt)
        return [Stored.NEW] * len(pages)
    answers = [_ANSWERS.get(status, _UNKNOWN) for status in reply.statuses]  # type: ignore[call-overload]
    answers += [_UNKNOWN] * (len(pages) - len(answers))
    s.pages.answered(pages, attempt, [event for event, _ in answers[: len(pages)]])
    return [answer for _, answer in answers[: len(pages)]]


def _send(
    s: ClientState,
    call: Call,
    names: list[str],
    pages: list[int],
    lengths: Column,
    checksums: list[int] | None,
    depths: Depths,
    attempt: int,
) -> Operation[Any]:
    """Send a request to register pages, and leave none of them REGISTERING."""
    left = False

    def sending() -> None:
        nonlocal left
        _check_pages(s, pages)
        s.pages.sent(pages, attempt)
        n = len(pages)
        of_each = repeat(lengths, n) if isinstance(lengths, int) else lengths
        sums = repeat(None, n) if checksums is None else checksums
        s.stored.update(zip(pages, zip(names, of_each, sums, depths or repeat(None, n), strict=True), strict=True))
        left = True

    call.sending = sending
    try:
        return (yield call)
    except BaseException as exc:
        # An error is no proof that nothing was done: it may have struck between doing and answering. Only the server's
        # refusal for an unknown session is one, and then no page is ours.
        if left:
            s.pages.unanswered(pages, attempt, can_resolve=s.own)
        else:  # pages allocated now may be another call's: these have come back meanwhile
            s.free(pages)
        if isinstance(exc, ServerRefused) and exc.word == SESSION_GONE:
            s.unsettled = True
            raise SessionEnded(f"{s!r}: the server has ended the session; store again") from exc
        raise


def _store_published(
    s: ClientState, names: list[str], pages: list[int], lengths: Column, checksums: list[int] | None, depths: Depths
) -> Operation[list[Stored]]:
    # Its messages have no place for checksums and depths. They are kept here, for a server that has.
    try:
        there = yield Call(Code.BATCH_EXISTS_KV, KeysRequest(names))
    except BaseException:
        s.free(pages)
        raise
    answers = [Stored.DUPLICATE] * len(names)
    taken = {name for name, is_there in zip(names, there.results, strict=True) if is_there}
    new: list[int] = []
    for at, name in enumerate(names):
        if name not in taken:
            taken.add(name)
            new.append(at)
    sending = {*new}
    s.free([page for at, page in enumerate(pages) if at not in sending])
    if not new:
        return answers
    attempt = s.next_attempt()
    sizes = [lengths] * len(names) if isinstance(lengths, int) else lengths
    regions, offsets = s.pages.locations(pages)
    if isinstance(regions, int):
        regions = [regions] * len(pages)
    entries = [RegisterRequest(names[at], regions[at], offsets[at], sizes[at]) for at in new]
    sent, named = [pages[at] for at in new], [names[at] for at in new]
    reply = yield from _send(
        s,
        Call(Code.BATCH_REGISTER_KV, BatchRegisterRequest(entries)),
        named,
        sent,
        [sizes[at] for at in new],
        None if checksums is None else [checksums[at] for at in new],
        None if depths is None else [depths[at] for at in new],
        attempt,
    )
    results = reply.results if reply.success else [None] * len(new)
    events = [PageEvent.NEW if is_new else PageEvent.REFUSED for is_new in results]
    s.pages.answered(sent, attempt, events)
    for at, is_new in zip(new, results, strict=True):
        if is_new:
            # Another client may have deleted this key since we stored it last: then the server kept our old page for
            # nothing, and would not have reported it.
            before = s.page_of.get(names[at])
            if before is not None and s.pages.state(before) is PageState.REGISTERED:
                s.pages.dropped([before])
            s.page_of[names[at]] = pages[at]
        answers[at] = Stored.NEW if is_new else Stored.REFUSED if is_new is None else Stored.DUPLICATE
    return answers
