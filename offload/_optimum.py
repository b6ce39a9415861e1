"""The most hits that any eviction policy could have had: Belady's optimum, for prefixes. Pure.

Belady's rule, "who is needed last goes first", needs to know the future, which a trace has. Three things are as in a place of
ours:

- *Prefix-closed*: a block is of no use without those before it. A hash id names a block with all before it, so that whoever
  asks for a block asks for its head as well: a head is needed no later than what hangs on it. Among equals the deepest goes.
- *Storing may be skipped*: what is needed later than all that is there does not come in. (A policy may reject, too.)
- What is never needed again is not kept, and takes no room.

No policy that decides when a block is asked for can do better at any capacity, whatever it is told.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Final

_NEVER: Final = -1


def most_hits(requests: Sequence[Sequence[Hashable]], capacity: int) -> int:
    """How many blocks would have been hit in a place of ``capacity`` blocks that knows what comes."""
    needed = _needed_again(requests)
    kept: dict[Hashable, int] = {}  # and by which request it is needed next
    latest: list[tuple[int, int, int, Hashable]] = []  # needed last, then deepest, first; entries may be out of date
    hits = order = 0
    for keys, nexts in zip(requests, needed, strict=True):
        for key in keys:
            if key not in kept:
                break
            hits += 1
        for depth, (key, next_at) in enumerate(zip(keys, nexts, strict=True)):
            if next_at == _NEVER:
                kept.pop(key, None)
                continue
            kept[key] = next_at
            order += 1  # keys themselves are never compared
            heappush(latest, (-next_at, -depth, order, key))
        while len(kept) > capacity:
            next_at, _, _, key = heappop(latest)
            if kept.get(key) == -next_at:
                del kept[key]
    return hits


def _needed_again(requests: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """For each block of each request, the number of the next request that asks for it."""
    later: dict[Hashable, int] = {}
    needed: list[list[int]] = []
    for at in range(len(requests) - 1, -1, -1):
        keys = requests[at]
        needed.append([later.get(key, _NEVER) for key in keys])
        later.update(dict.fromkeys(keys, at))
    needed.reverse()
    return needed
