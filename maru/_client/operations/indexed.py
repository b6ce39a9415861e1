"""Operations on the shared index of the server, without messages. Pure.

Rule 1. The index is read while the lease of our session lives, and while its epoch is the last that was heard of. After
        a copy the index is checked again, and so are the lease and the era.
Rule 2. Keys that the index cannot decide are left to be requested by message: those that have changed meanwhile, those
        not found if some are left out, those in a region that is not mapped here.
Rule 3. No value of the index is used as an address before it is seen to lie in a region: it may be half of two entries.
Rule 4. A load and a hold are uses, and evictions go by uses: they are noted on our board, where the server sees them
        before it evicts. One that is lost costs a little of the order, never a byte.
Rule 5. An index is used together with a board and not without. Functions without effects (`hold_nowait`,
        `exist_nowait`) may be called in any thread: they change nothing of the client but its board.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..._index import Found, IndexReader, NotAnIndex
from ...base.errors import MaruError
from ..answers import Loaded
from .board_pins import BoardPins
from .effects import Alone, MapIndex, Operation, Work
from .pinned import Pin
from .pinning import give_back_pins
from .state import ClientState

Copy = Callable[[Sequence[int], Sequence[int], Sequence[int], bool], list[int] | None]
"""Copies from addresses, of sizes, to the destinations at these positions.

On request it returns the sum of each as it arrived.
"""

ASK_AGAIN = 1.0
"""Seconds until an index is requested again.

It is if there was none, or the last one is retired.
"""


# --- lookups, loads and holds -------------------------------------------------------------------------------------


def exist_here(s: ClientState, names: list[str], there: list[bool]) -> Operation[list[int]]:
    """Set whether each name is there, if the index can decide.

    Returns:
        Positions of the names that only the server can decide.
    """
    yield from look_after_index(s)
    left = exist_nowait(s, names, there)
    s.counters.found_here += there.count(True)
    s.counters.asked_anyway += len(left)
    return left


def exist_nowait(s: ClientState, names: list[str], there: list[bool]) -> list[int]:
    """Look up names as :func:`exist_here` does. Any thread."""
    reader, _ = index_of(s)
    if reader is None:
        return list(range(len(names)))
    found = reader.find(names)
    for position in found.positions:
        there[position] = True
    return [] if found.is_definite else [position for position, is_there in enumerate(there) if not is_there]


def hold_here(s: ClientState, names: list[str], *, prefix: bool) -> Operation[tuple[list[Pin | None], list[int]]]:
    """Hold the pages that the index shows under these names.

    With ``prefix`` nothing is held after the first that is not.

    Returns:
        A pin or ``None`` for each name, and the positions of those to be requested by message.
    """
    yield from look_after_index(s)
    pins, left = hold_nowait(s, names, prefix=prefix)
    s.counters.asked_anyway += len(left)
    return pins, left


def hold_nowait(s: ClientState, names: list[str], *, prefix: bool) -> tuple[list[Pin | None], list[int]]:
    """Hold pages as :func:`hold_here` does. Any thread."""
    n = len(names)
    reader, board = index_of(s)
    if reader is None or board is None:
        return [None] * n, list(range(n))
    found = reader.find(names, prefix=prefix)
    held = board.hold(names, found, reader)
    if prefix:
        k = len(held)
        if None in held:
            k = held.index(None)
            board.release([pin for pin in held[k:] if pin is not None])
        is_over = k == n or (k == len(held) and found.is_definite)
        return held[:k] + [None] * (n - k), [] if is_over else list(range(k, n))
    pins: list[Pin | None] = [None] * n
    for position, pin in zip(found.positions, held, strict=True):
        pins[position] = pin
    asked = range(n) if not found.is_definite else found.positions
    return pins, [position for position in asked if pins[position] is None]


def load_here(
    s: ClientState, names: list[str], sizes: Sequence[int], copy: Copy, answers: list[Loaded]
) -> Operation[list[int]]:
    """Copy the pages that the index shows under these names.

    Args:
        s: the client.
        names: one for each destination.
        sizes: of the destinations.
        copy: copies. A destination that is left may have been written.
        answers: outcome for each name; those of names that are left stay.

    Returns:
        Positions of the names to be requested by message: nothing valid was copied for these.
    """
    yield from look_after_index(s)
    reader, board = index_of(s)
    if reader is None or board is None:
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
    _judge(s, found, sums, answers)
    board.note_used(found)
    done = set(found.positions)
    expected = every.positions if every.is_definite else range(len(names))
    left = [position for position in expected if position not in done]
    s.counters.asked_anyway += len(left)
    return left


def _in_reach(s: ClientState, found: Found, sizes: Sequence[int]) -> tuple[Found, list[int]]:
    """Return the pages that fit their destinations, with their addresses."""
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


def _judge(s: ClientState, found: Found, sums: Sequence[int] | None, answers: list[Loaded]) -> None:
    """Set the answers of copied pages that had not changed."""
    s.counters.found_here += len(found)
    for at, position in enumerate(found.positions):
        expected = found.checksums[at]
        if sums is not None and expected is not None and sums[at] != expected:
            s.counters.damaged += 1
            answers[position] = Loaded.DAMAGED
        else:
            answers[position] = Loaded.LOADED


# --- the index ----------------------------------------------------------------------------------------------------


def look_after_index(s: ClientState) -> Operation[None]:
    """Request the index if need be, and release forgotten pages and pins.

    Otherwise a client that sends no message for long would keep them.
    """
    if not (s.index.is_wanted and s.own and s.is_connected) or s.is_closed:
        return
    if s.pinned.dropped or s.forgotten:
        s.collect()
    if s.pinned.due and not s.unsettled:
        yield from give_back_pins(s, wait=False)
    if _is_due(s):
        yield Alone(partial(_open, s))


def index_of(s: ClientState) -> tuple[IndexReader | None, BoardPins | None]:
    """Return the index reader, if usable now, and the board. Any thread."""
    index = s.index
    # The board first: it is of one era. If that ends after this line nothing is held by it any more, and a page found
    # by a reader of that time is retired, or the lease is over.
    board, reader = index.board, index.reader
    if board is None or reader is None or s.is_closed or not s.is_connected:
        return None, None
    if reader.epoch != s.epoch or reader.is_retired or s.clock() >= s.deadline:
        return None, None
    return reader, board


def _is_due(s: ClientState) -> bool:
    """Return whether to request an index now.

    In each era once, and again after a while.
    """
    index, reader = s.index, s.index.reader
    if s.unsettled:
        return False
    if index.board is not None and reader is not None and reader.epoch == s.epoch and not reader.is_retired:
        return False
    asked = index.asked_at
    return asked is None or asked[0] != s.era or s.clock() >= asked[1] + ASK_AGAIN


def _open(s: ClientState) -> Operation[None]:
    """Request the index, and a board unless there is one.

    Run it exclusively. Without an index, everything is requested by message.
    """
    if not _is_due(s):
        return
    index, era = s.index, s.era
    index.asked_at, index.reader = (era, s.clock()), None
    try:
        reader, board = yield MapIndex(era, index.counters, with_board=index.board is None)
    except (MaruError, NotAnIndex, OSError) as exc:
        index.why_not = str(exc)
        return
    if era != s.era:  # the board is of a session that is over
        return
    index.reader, index.why_not = reader, ""
    if board is not None:
        index.board = board
