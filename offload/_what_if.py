"""What would other capacities have given? The block pools of the tiers, without their bytes. Pure.

Exact, not modelled: the same pools and the same eviction decide as in a replay over memory, in the same order. A trace of
288,500 blocks takes a tenth of a second for each capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from backends.abc import EVICTED, Key
from backends.blocks import BlockPool
from maru.eviction import LRU, EvictionPolicy

from .abc import Policy


def simulate(
    requests: Iterable[Sequence[Key]],
    capacities: Sequence[int],
    policies: Sequence[Policy] = (),
    *,
    presence: bool = True,
    eviction: Sequence[Callable[[], EvictionPolicy[Key]]] | None = None,
) -> int:
    """Replay requests against tiers of so many blocks each, and count the blocks that are hit.

    Each request looks up its longest prefix, block by block in the first tier that has it, and stores all that follows:
    into the first tier what is not there, and what was stored there into the next one, if it is not there.

    Args:
        requests: the keys of each.
        capacities: of each tier, in blocks, from the fastest to the slowest.
        policies: what is asked, after presence, about what is to be stored. None may answer with a lease.
        presence: whether what the first tier has is kept from being stored again, which would take room for a moment.
        eviction: what makes the policy of each tier; LRU everywhere unless given.
    """
    policies_of = [LRU] * len(capacities) if eviction is None else eviction
    pools = [BlockPool(capacity, made()) for capacity, made in zip(capacities, policies_of, strict=True)]
    hits = 0
    for keys in requests:
        hit = _lookup(pools, keys)
        hits += hit
        rest = keys[hit:]
        for pool in pools:
            if presence or pool is not pools[0]:
                rest = _absent(pool, rest)
            if policies and pool is pools[0]:
                rest = _admitted(policies, rest)
            rest = _store(pool, rest)
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


def _store(pool: BlockPool, keys: Sequence[Key]) -> Sequence[Key]:
    if not keys or len(keys) > pool.capacity:
        return ()
    slots = pool.take_evicting(keys)
    assert slots is not None, "nothing is held here"
    if EVICTED in slots:  # not admitted
        keys = [key for key, slot in zip(keys, slots, strict=True) if slot != EVICTED]
        slots = [slot for slot in slots if slot != EVICTED]
    pool.register(keys, slots)
    return keys
