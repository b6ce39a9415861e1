"""Hit rates by simulation, without moving bytes. Pure.

There is the rate of any policy at any capacity, and the highest possible one.

:func:`simulate` runs the block pools of the tiers, without their bytes. It is exact, not modelled: the same pools and
the same eviction decide as in a replay over memory, in the same order. A trace of 288,500 blocks takes a tenth of a
second for each capacity.

:func:`most_hits` is Belady's optimum, for prefixes. Belady's rule, to evict the block that is needed last, requires the
future, which a trace has. Three things follow the caches of this project:

- *Prefix-closed*: a block is of no use without those before it. A hash id names a block with all before it, so a
request for a
  block also requests the blocks before it, and those are needed no later. Of blocks needed at the same time the deepest
      goes.
- *Storing may be skipped*: a block that is needed later than all those present is not stored. (A policy may reject,
too.)
- A block that is never needed again is not kept, and takes no room.

No policy that decides online can do better at any capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby
from typing import Final

from backends.abc import EVICTED, Key
from backends.base.blocks import BlockPool
from maru.eviction import LRU, EvictionPolicy

from ..abc import Policy


def simulate(
    requests: Iterable[Sequence[Key]],
    capacities: Sequence[int],
    policies: Sequence[Policy] = (),
    *,
    presence: bool = True,
    eviction: Sequence[Callable[[], EvictionPolicy[Key]]] | None = None,
    chunk: int | None = None,
    depths: bool = False,
) -> int:
    """Replay requests against tiers, and count the blocks that are hit.

    Each request looks up its longest prefix, block by block in the first tier that has it, and stores the rest: in the
    first tier the blocks that are not present there, and blocks that were stored there in the next tier, if they are
    not present.

    Args:
        requests: the keys of each.
        capacities: of each tier, in blocks, from the fastest to the slowest.
        policies: asked, after presence, about the blocks to store. None may answer with a lease.
        presence: whether blocks in the first tier are kept from being stored again, which would take room for a moment.
        eviction: makes the policy of each tier; LRU everywhere unless given.
        chunk: number of blocks of a request that are stored together, the head of its prefix first; all of them unless
            given.
        depths: whether each block is stored with its depth, its index in its prefix.
    """
    policies_of = [LRU] * len(capacities) if eviction is None else eviction
    pools = [BlockPool(capacity, made()) for capacity, made in zip(capacities, policies_of, strict=True)]
    hits = 0
    for keys in requests:
        hit = _lookup(pools, keys)
        hits += hit
        depth_of = {key: depth for depth, key in enumerate(keys)} if depths else None
        for start in range(hit, len(keys), chunk or max(1, len(keys))):
            rest = keys[start : start + chunk] if chunk else keys[start:]
            for pool in pools:
                if presence or pool is not pools[0]:
                    rest = _absent(pool, rest)
                if policies and pool is pools[0]:
                    rest = _admitted(policies, rest)
                rest = _store(pool, rest, depth_of)
    return hits


def _lookup(pools: Sequence[BlockPool], keys: Sequence[Key]) -> int:
    if len(pools) == 1:
        hit = pools[0].prefix(keys)
        if hit:
            pools[0].use(keys[:hit])
        return hit
    owners: list[BlockPool] = []
    for key in keys:
        owner = next((pool for pool in pools if pool.contains((key,))), None)
        if owner is None:
            break
        owners.append(owner)
    start = 0
    for _, run in groupby(owners, key=id):
        stop = start + len(list(run))
        owners[start].use(keys[start:stop])
        start = stop
    return start


def _absent(pool: BlockPool, keys: Sequence[Key]) -> Sequence[Key]:
    present = pool.contains(keys)
    return [key for key in keys if key not in present] if present else keys


def _admitted(policies: Sequence[Policy], keys: Sequence[Key]) -> Sequence[Key]:
    for policy in policies:
        if keys:
            rejected = policy(keys)
            assert isinstance(rejected, Mapping)
            keys = [key for key in keys if key not in rejected]
    return keys


def _store(pool: BlockPool, keys: Sequence[Key], depth_of: Mapping[Key, int] | None) -> Sequence[Key]:
    if not keys or len(keys) > pool.capacity:
        return ()
    slots = pool.take_evicting(keys)
    assert slots is not None, "nothing is held here"
    if EVICTED in slots:  # not admitted
        keys = [key for key, slot in zip(keys, slots, strict=True) if slot != EVICTED]
        slots = [slot for slot in slots if slot != EVICTED]
    pool.register(keys, slots, depths=None if depth_of is None else [depth_of[key] for key in keys])
    return keys


# --- the most that was possible ---------------------------------------------------------------------------------------


_NEVER: Final = -1


def most_hits(requests: Sequence[Sequence[Hashable]], capacity: int) -> int:
    """Count the hits of a cache that knows all future requests.

    Its capacity is in blocks.
    """
    needed = _needed_again(requests)
    kept: dict[Hashable, int] = {}  # with the request that needs it next
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
    """Return the next request for each block of each request."""
    later: dict[Hashable, int] = {}
    needed: list[list[int]] = []
    for at in range(len(requests) - 1, -1, -1):
        keys = requests[at]
        needed.append([later.get(key, _NEVER) for key in keys])
        later.update(dict.fromkeys(keys, at))
    needed.reverse()
    return needed
