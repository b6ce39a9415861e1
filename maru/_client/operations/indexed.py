"""Operations: lookups and loads over the shared index of the server, which ask nobody. Pure.

Rule 1. The index is read while the lease of our session lives, and while its epoch is the last that was heard of. Behind a copy
        the index is looked at again, and so are the lease and the era.
Rule 2. What the index cannot say is left to be asked for by message: what has changed meanwhile, what is not found where
        something is left out, what lies in a region that is not mapped here.
Rule 3. Nothing that the index says is used as an address before it is seen to lie in a region: it may be half of two entries.
Rule 4. A load is a use, and evictions go by uses: many loads are told together, in a FIND without a pin whose answer nobody
        waits for. One that is lost costs a little of the order, never a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..._errors import MaruError
from ..._index import Found, IndexReader, NotAnIndex
from ..._wire import Code, FindRequest
from ..answers import Loaded
from .effects import Alone, Call, MapIndex, Operation, Work
from .pinning import give_back_pins
from .state import ClientState

Copy = Callable[[Sequence[int], Sequence[int], Sequence[int], bool], list[int] | None]
"""Copies to the destinations at these positions from addresses, of sizes. Told to, it returns the sum of each as it arrived."""

TOLD_AT_ONCE = 256
"""Names of one message that tells of uses: some ten loads."""
ASK_AGAIN = 1.0
"""Seconds until another index is asked for, where there was none or the one that there was is retired."""


# --- lookups and loads --------------------------------------------------------------------------------------------


def exist_here(s: ClientState, names: list[str], there: list[bool]) -> Operation[list[int]]:
    """Note which of these names are there; the positions of those of which only the server can tell."""
    reader = yield from reader_of(s)
    if reader is None:
        return list(range(len(names)))
    found = reader.find(names)
    for position in found.positions:
        there[position] = True
    left = [] if found.is_definite else [position for position, is_there in enumerate(there) if not is_there]
    s.counters.found_here += len(found)
    s.counters.asked_anyway += len(left)
    return left


def load_here(
    s: ClientState, names: list[str], sizes: Sequence[int], copy: Copy, answers: list[Loaded]
) -> Operation[list[int]]:
    """Copy what the index shows under these names; the positions of those that are to be asked for, as nothing was copied.

    Args:
        s: the client.
        names: one for each destination.
        sizes: of the destinations.
        copy: copies. To a destination that is left it may have copied something.
        answers: what became of each; those of what is left stay.
    """
    reader = yield from reader_of(s)
    if reader is None:
        return list(range(len(names)))
    era = s.era
    every = reader.find(names)
    found, addresses = _in_reach(s, every, sizes)
    sums = None
    if found:
        checked = s.config.checksums and found.checksums.count(None) < len(found)
        keep = [s.spans[region_id] for region_id in set(found.regions)]
        sums = yield Work(partial(copy, found.positions, addresses, found.lengths, checked), sum(found.lengths), keep)
    changed = reader.changed(found) if era == s.era and s.clock() < s.deadline else range(len(found))
    if changed:
        s.counters.changed_in_copy += len(changed)
        kept = [at for at in range(len(found)) if at not in changed]
        found, sums = found.pick(kept), None if sums is None else [sums[at] for at in kept]
    _judge(s, names, found, sums, answers)
    done = set(found.positions)
    expected = every.positions if every.is_definite else range(len(names))
    left = [position for position in expected if position not in done]
    s.counters.asked_anyway += len(left)
    if len(s.index.used) >= TOLD_AT_ONCE:
        yield from tell_used(s)
    return left


def _in_reach(s: ClientState, found: Found, sizes: Sequence[int]) -> tuple[Found, list[int]]:
    """What can be copied to its destination, and from which addresses."""
    spans = s.spans
    inside: list[int] = []
    addresses: list[int] = []
    for at, (position, region_id, offset, length) in enumerate(
        zip(found.positions, found.regions, found.offsets, found.lengths, strict=True)
    ):
        span = spans.get(region_id)
        if span is not None and offset + length <= span.length and length <= sizes[position]:
            inside.append(at)
            addresses.append(span.address + offset)
    return found if len(inside) == len(found) else found.pick(inside), addresses


def _judge(s: ClientState, names: list[str], found: Found, sums: Sequence[int] | None, answers: list[Loaded]) -> None:
    """What became of what was copied, and had not changed."""
    s.counters.found_here += len(found)
    for at, position in enumerate(found.positions):
        expected = found.checksums[at]
        if sums is not None and expected is not None and sums[at] != expected:
            s.counters.damaged += 1
            answers[position] = Loaded.DAMAGED
        else:
            answers[position] = Loaded.LOADED
            s.index.used[names[position]] = None


def tell_used(s: ClientState) -> Operation[None]:
    """Tell the server what was loaded since it was told last. Nobody waits for the answer."""
    used = s.index.used
    while used and s.own and not s.unsettled:
        some = list(used)[: s.max_keys]
        for name in some:
            del used[name]
        request = FindRequest(s.token, s.pages.acknowledged, some, False, False, s.pin_epochs.current)
        yield Call(Code.FIND, request, is_awaited=False)


# --- the index ----------------------------------------------------------------------------------------------------


def reader_of(s: ClientState) -> Operation[IndexReader | None]:
    """What reads the index, if it may be believed now. Asked for if need be."""
    index = s.index
    if not (index.is_wanted and s.own and s.is_connected) or s.is_closed:
        return None
    if s.pinned.dropped or s.forgotten:  # whoever asks nobody for long lets go all the same
        s.collect()
    if s.pinned.due and not s.unsettled:
        yield from give_back_pins(s, wait=False)
    if _is_due(s):
        yield Alone(partial(_open, s))
    reader = index.reader
    if reader is None or reader.epoch != s.epoch or reader.is_retired or s.clock() >= s.deadline:
        return None
    return reader


def _is_due(s: ClientState) -> bool:
    """Whether to ask for an index: in each era once, and again after a while."""
    index, reader = s.index, s.index.reader
    if s.unsettled or (reader is not None and reader.epoch == s.epoch and not reader.is_retired):
        return False
    asked = index.asked_at
    return asked is None or asked[0] != s.era or s.clock() >= asked[1] + ASK_AGAIN


def _open(s: ClientState) -> Operation[None]:
    """Ask for it. To be run alone. Without one, everything is asked for by message, as before there was any."""
    if not _is_due(s):
        return
    index = s.index
    index.asked_at, index.reader = (s.era, s.clock()), None
    try:
        reader: Any = yield MapIndex()
    except (MaruError, NotAnIndex, OSError) as exc:
        index.why_not = str(exc)
        return
    index.reader, index.why_not = reader, ""
