"""Operations that find, pin and load keys. Pure.

Rule 1. Bytes are read under a pin, at the server or on our board (or over the index: see `indexed`). Whether that still
        holds is checked without a message, before and after a copy: the server drops no pin before the lease ends.
Rule 2. An unanswered FIND may have pinned keys. Its late answer names them, and they are given back.
Rule 3. Pins left by a cancel or an error are given back with the next call.

A published server pins and finds in two requests: pinning first, so that a found key stays at its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from ..._wire import (
    BatchLookupReply,
    Code,
    FindReply,
    KeyRequest,
    KeysRequest,
    LookupReply,
    ResultsReply,
)
from ...base.errors import CannotMap, LeaseLost, NotOwner, ServerRefused
from ..answers import Loaded
from .connecting import remember, settle, span_of, steadily
from .effects import Call, Operation, Work
from .indexed import Copy, exist_here, hold_here, load_here
from .pinned import Pin, Place
from .pinning import FENCED, find_call, give_back_pins, portions
from .state import ClientState

T = TypeVar("T")

ATTEMPTS = 4
"""Most attempts to find keys until they may be used.

A restart costs one, and so does a claim of pins.
"""


# --- without a pin ------------------------------------------------------------------------------------------------


def exists(s: ClientState, key: str) -> Operation[bool]:
    """Return whether a key is there. Does not count as a use."""
    name, there = s.salt + key, [False]
    if not (yield from exist_here(s, [name], there)):
        return there[0]
    if not s.is_ready():
        yield from settle(s)
    reply = yield Call(Code.EXISTS_KV, KeyRequest(name))
    found: bool = reply.exists
    return found


def exist(s: ClientState, keys: list[str]) -> Operation[list[bool]]:
    """Return whether each key is there. Does not count as a use."""
    names, there = s.names(keys), [False] * len(keys)
    left = yield from exist_here(s, names, there)
    if not left:
        return there
    if not s.is_ready():
        yield from settle(s)
    found: list[bool] = []
    for some in portions([names[at] for at in left], s.max_keys):
        reply: ResultsReply = yield Call(Code.BATCH_EXISTS_KV, KeysRequest(some))
        found += reply.results
    for at, is_there in zip(left, found, strict=True):
        there[at] = is_there
    return there


# --- pins ---------------------------------------------------------------------------------------------------------


def pin(s: ClientState, keys: list[str]) -> Operation[list[bool]]:
    """Pin these keys up to the first that is missing, until `unpin`."""
    names = s.names(keys)
    pins = yield from _hold(s, names, prefix=True)
    found = [one for one in pins if one is not None]
    s.pinned.ask(found)
    return [True] * len(found) + [False] * (len(keys) - len(found))


def unpin(s: ClientState, keys: list[str]) -> Operation[list[bool]]:
    """Undo a call of `pin` for each key.

    Returns:
        False for each key without one, or whose pin has gone with a lease.
    """
    s.check_open()
    names = s.names(keys)
    results = [s.pinned.unask(name, s.era) for name in names]
    if not s.own:  # there, a pin may be undone by another client than the one that took it
        others = [name for name, done in zip(names, results, strict=True) if not done]
        if others:
            if not s.is_ready():
                yield from settle(s)
            told: list[bool] = []
            for some in portions(others, s.max_keys):
                reply: ResultsReply = yield Call(Code.BATCH_UNPIN_KV, KeysRequest(some))
                told += reply.results
            left = iter(told)
            results = [done or next(left) for done in results]
    if not s.is_ready():
        yield from settle(s)
    return results


def hold(s: ClientState, keys: list[str], *, prefix: bool = False) -> Operation[list[Pin | None]]:
    """Pin keys with one more user each, and map their regions.

    Args:
        s: the client.
        keys: the keys to find.
        prefix: hold nothing after the first that is missing.

    Returns:
        A pin for each key; ``None`` if it is missing.
    """
    pins = yield from _hold(s, s.names(keys), prefix=prefix)
    try:
        yield from _map_regions(s, {one.region_id for one in pins if one is not None})
    except BaseException:
        s.pinned.release(pins, s.era)
        raise
    return pins


def hold_first(s: ClientState, keys: list[str]) -> Operation[tuple[list[Pin], list[Pin], Exception | None]]:
    """Hold a prefix as `hold` does, up to the first unmappable region.

    Returns:
        The pins of the prefix; those after it, which are the caller's to give back; and the error, if there are any.
    """
    pins = [one for one in (yield from _hold(s, s.names(keys), prefix=True)) if one is not None]
    at, end, why = 0, len(pins), None
    try:
        while at < end:
            if pins[at].region_id in s.spans:
                at += 1
                continue
            try:
                yield from steadily(s, partial(span_of, s, pins[at].region_id))
            except (CannotMap, NotOwner, ServerRefused) as exc:
                end, why = at, exc
            at = 0  # meanwhile an earlier one may have been unmapped
    except BaseException:
        s.pinned.release(pins, s.era)
        raise
    return pins[:end], pins[end:], why


def _map_regions(s: ClientState, region_ids: Collection[int]) -> Operation[None]:
    """Map all of these regions, to have them mapped together.

    While one is mapped, another may be unmapped.
    """
    while missing := [region_id for region_id in region_ids if region_id not in s.spans]:
        for region_id in missing:
            yield from steadily(s, partial(span_of, s, region_id))


def release(s: ClientState, pins: Sequence[Pin]) -> Operation[None]:
    """Remove one user of each pin; give back pins without users.

    Waits until the server has answered.
    """
    s.pinned.release(pins, s.era)
    if s.is_connected and not s.is_closed and not s.is_ready():
        yield from settle(s)


def _hold(s: ClientState, names: list[str], *, prefix: bool) -> Operation[list[Pin | None]]:
    """Pin keys by our board, or by message if it cannot.

    Returns:
        A pin with one more user for each key; ``None`` if it is missing.
    """
    s.check_open()
    if s.clock() < s.deadline and (known := s.pinned.use_all(names, s.era)) is not None:
        return known  # pinned keys need no request
    pins, left = yield from hold_here(s, names, prefix=prefix)
    if not left:
        return pins
    try:
        if not s.is_ready():
            yield from settle(s, wait=False)
        for some in portions([names[at] for at in left], s.max_keys):
            places = yield from steadily(s, partial(_find, s, some, prefix))
            got = s.pinned.take(some, places, s.era)
            for at, one in zip(left, got, strict=False):
                pins[at] = one
            del left[: len(some)]
            if prefix and None in got:
                break
    except BaseException:
        s.pinned.release(pins, s.era)
        raise
    return pins


def _find(s: ClientState, names: list[str], prefix: bool) -> Operation[list[Place]]:
    """Find keys and pin them.

    If the answer is the first that was heard of another server, the request is repeated once that is settled: until
    then, a region mapped here under its number may be of another pool. It is repeated, too, if a pin epoch has begun
    meanwhile, since its pins were not claimed.
    """
    for _ in range(ATTEMPTS):
        pin_epoch, own = s.pin_epochs.current, s.own
        try:
            if own:
                reply: FindReply = yield find_call(s, names, prefix=prefix)
                epoch = reply.epoch
                places = list(zip(reply.positions, *reply.columns(), strict=True))
            else:
                places = yield from _find_published(s, names, prefix)
                epoch = s.epoch
        except ServerRefused as exc:
            if exc.word == FENCED and pin_epoch != s.pin_epochs.current:
                continue
            raise
        if pin_epoch == s.pin_epochs.current and not s.unsettled:
            return places
        s.disown(pin_epoch, epoch, [names[place[0]] for place in places])
        if s.unsettled:
            yield from settle(s)
    raise LeaseLost(f"{s!r}: the server keeps restarting")


def _find_published(s: ClientState, names: list[str], prefix: bool) -> Operation[list[Place]]:
    """Pin the keys that are there, and then look up their places.

    A published server pins up to the first miss.
    """
    pinned: list[int] = []
    left = list(range(len(names)))
    while left:
        reply: ResultsReply = yield Call(Code.BATCH_PIN_KV, KeysRequest([names[at] for at in left]))
        n = reply.results.index(False) if False in reply.results else len(left)
        pinned += left[:n]
        left = left[n + 1 :]
        if prefix:
            break
        if left:
            there: ResultsReply = yield Call(Code.BATCH_EXISTS_KV, KeysRequest([names[at] for at in left]))
            left = [at for at, is_there in zip(left, there.results, strict=True) if is_there]
    if not pinned:
        return []
    try:
        found: BatchLookupReply = yield Call(Code.BATCH_LOOKUP_KV, KeysRequest([names[at] for at in pinned]))
    except BaseException:
        s.pinned.due += [names[at] for at in pinned]
        raise
    places: list[Place] = []
    for at, entry in zip(pinned, found.entries, strict=True):
        place = _place(s, at, entry)
        if place is None:
            s.pinned.due.append(names[at])
        else:
            places.append(place)
    return places


def _place(s: ClientState, at: int, entry: LookupReply) -> Place | None:
    if not entry.found or entry.handle is None:
        return None
    remember(s, [entry.handle])
    return at, entry.handle.region_id, entry.kv_offset, entry.kv_length, entry.generation, entry.checksum


# --- loading ------------------------------------------------------------------------------------------------------


def load(
    s: ClientState,
    keys: list[str],
    sizes: Sequence[int],
    copy: Copy,
) -> Operation[list[Loaded]]:
    """Copy the bytes of these keys to the caller's destinations.

    It uses the index, and pins for keys that the index cannot decide.

    Args:
        s: the client.
        keys: one for each destination.
        sizes: of the destinations; the stored bytes must fit.
        copy: copies from addresses, of sizes, to the destinations at these positions; on request it returns the sum of
            each as it arrived.

    Raises:
        LeaseLost: the server restarted, or the lease ended, twice while this was copied.
        ValueError: the stored bytes are more than their destination has.
    """
    names = s.names(keys)
    answers = [Loaded.MISSING] * len(names)
    left = yield from load_here(s, names, sizes, copy, answers)
    for start in reversed(range(0, len(left), s.max_keys)):  # so the head of a prefix is used last
        some = left[start : start + s.max_keys]
        attempt = partial(_load, s, [names[at] for at in some], some, sizes, copy, answers)
        try:
            yield from attempt()
        except LeaseLost:
            yield from attempt()
    return answers


def _load(
    s: ClientState,
    names: list[str],
    of: Sequence[int],
    sizes: Sequence[int],
    copy: Copy,
    answers: list[Loaded],
) -> Operation[None]:
    """Load these names under pins, to the destinations at these positions."""
    if not s.is_ready():
        yield from settle(s, wait=False)
    places = yield from steadily(s, partial(_find, s, names, False))
    era = s.era
    if not places:
        return
    lent = [names[place[0]] for place in places]
    s.pinned.lend(lent, era)
    try:
        positions = [of[place[0]] for place in places]
        lengths = [place[3] for place in places]
        for at, length in zip(positions, lengths, strict=True):
            if length > sizes[at]:
                raise ValueError(f"a stored value has {length} bytes, but its destination has {sizes[at]}")
        spans, regions = s.spans, {place[1] for place in places}
        yield from _map_regions(s, regions)
        s.check_era(era)
        at_addresses = [spans[place[1]].address + place[2] for place in places]
        checked = s.config.checksums and any([place[5] is not None for place in places])
        keep = [spans[region_id] for region_id in regions]
        sums = yield Work(partial(copy, positions, at_addresses, lengths, checked), sum(lengths), keep)
        s.check_era(era)
    finally:
        s.pinned.returned(lent, s.era)
    for index, (at, place) in enumerate(zip(positions, places, strict=True)):
        if sums is not None and place[5] is not None and sums[index] != place[5]:
            s.counters.damaged += 1
            answers[at] = Loaded.DAMAGED
        else:
            answers[at] = Loaded.LOADED
    yield from give_back_pins(s, wait=False)


# --- figures ------------------------------------------------------------------------------------------------------


def simply(s: ClientState, code: int, message: Any = None) -> Operation[Any]:
    """Send a request that is independent of the session."""
    s.check_open()
    return (yield Call(code, message))
