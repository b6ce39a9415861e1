"""Promises about reading: pins and loads."""

from __future__ import annotations

import threading

import trio
import trio.testing

from ...abc import EVICTED, LOADED, STORED, Deletion, Failed, Missed, ReadLease
from ...base.pages import pages_of
from .._fake import payload_of
from ._trying import BLOCKS, Case, Places, must


async def a_pin_holds(case: Case) -> None:
    keys = await case.fill(4)
    deletes = case.capabilities.deletes
    gone = Deletion.DELETED if deletes else Deletion.UNAVAILABLE
    gap = [keys[0], keys[1], *case.keys(1, "no"), keys[2]]
    lease = await case.tier.pin(gap)
    other = await case.tier.pin(keys[:1])
    must(isinstance(lease, ReadLease), "a lease derives from backends.abc.ReadLease", lease)
    must(list(lease.keys) == keys[:2], "a lease holds the prefix before the first gap", lease.keys)
    must(case.tier.statistics().held_blocks == 2, "held blocks are counted", case.tier.statistics())
    answers = await case.tier.delete([*keys[:3], *case.keys(1, "no")])
    expected = [Deletion.PINNED, Deletion.PINNED, gone, Deletion.MISSING]
    must(answers == expected, "delete answers pinned, missing, deleted, or unavailable where it cannot", answers)
    there = {keys[0], keys[1], keys[3]} if deletes else set(keys)
    must(await case.contains(keys) == there, "a pinned block stays, a deleted one goes")
    await lease.release()
    await lease.release()
    must(await case.tier.delete(keys[:2]) == [Deletion.PINNED, gone], "each lease counts for itself")
    if not other.release_nowait():
        await other.release()
    must(await case.tier.delete(keys[:1]) == [gone], "what nobody holds can be deleted")
    must(case.tier.statistics().deleted == 3 * deletes, "deletions are counted", case.tier.statistics())
    if not deletes:
        await case.holds(keys)
        return
    async with await case.tier.pin(keys[:1]) as empty:
        must(not empty.keys, "what is deleted cannot be pinned")
        must(list(await case.tier.load(empty, Places(1, case.block_bytes))) == [], "nothing held, nothing loaded")
    must(await case.store(keys[:3]) == [STORED] * 3, "what was deleted can be stored anew")
    await case.holds(keys)


async def a_hit_is_loaded_or_missed(case: Case) -> None:
    """Check a load of a held block that another client deletes.

    With pins it cannot; without, the block is missed, and no wrong block is loaded.
    """
    if case.take_away is None:
        return
    keys = await case.fill(3)
    places = Places(3, case.block_bytes)
    async with await case.tier.pin(keys) as lease:
        await case.behind_its_back(case.take_away, keys[1])
        outcomes = await case.tier.load(lease, places)
    missed = [isinstance(outcome, Missed) for outcome in outcomes]
    must(missed == [False, not case.capabilities.pins, False], "pins hold; without them a hit may be missed", outcomes)
    for key, place, outcome in zip(keys, places.buffers, outcomes, strict=True):
        if outcome == LOADED:
            must(bytes(place) == payload_of(key, case.block_bytes), "what is loaded must be what was stored", key)
    if not case.capabilities.pins:
        must(await case.contains(keys) == {keys[0], keys[2]}, "what is gone is not found")
        must(await case.store([keys[1]]) == [STORED], "it can be stored anew")
        await case.holds(keys)


async def a_damaged_block_is_a_miss(case: Case) -> None:
    if case.damage is None:
        return
    keys = await case.fill(4)
    await case.behind_its_back(case.damage, keys[2])
    loaded = await case.load(keys)
    expected = [payload_of(key, case.block_bytes) for key in keys]
    must(loaded[2] is None, "a damaged block must not be loaded")
    must(loaded[:2] + loaded[3:] == expected[:2] + expected[3:], "its neighbours are loaded")
    must(await case.contains(keys) == {keys[0], keys[1], keys[3]}, "it is no longer found")
    statistics = case.tier.statistics()
    must(sum(statistics.missed.values()) == 1 and statistics.loaded == 3, "it is counted", statistics)
    must(await case.store([keys[2]]) == [STORED], "it can be stored anew")
    await case.holds(keys)
    must(await case.room() == BLOCKS - 4, "it takes no room")


async def a_failing_destination_leaves_all(case: Case) -> None:
    keys = await case.fill(3)
    places = Places(3, case.block_bytes, in_host=False)
    places.error = OSError("the destination is broken")
    async with await case.tier.pin(keys) as lease:
        try:
            outcomes = await case.tier.load(lease, places)
        except Exception:
            pass
        else:
            must(all(isinstance(outcome, Failed) for outcome in outcomes), "nothing was loaded", outcomes)
    await case.holds(keys)


async def a_cancelled_load_leaves_when_it_is_over(case: Case) -> None:
    keys = await case.fill(3)
    places = Places(3, case.block_bytes, in_host=False)
    async with await case.tier.pin(keys) as lease:
        with trio.CancelScope() as scope:
            if case.threads:
                places.started, places.go_on = threading.Event(), threading.Event()
                over = trio.Event()

                async def load() -> None:
                    try:
                        await case.tier.load(lease, places)
                    finally:
                        over.set()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(load)
                    await trio.to_thread.run_sync(places.started.wait)  # noqa: TID251
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await trio.testing.wait_all_tasks_blocked()
                        must(not over.is_set(), "a load may not leave while the destination is written")
                        places.go_on.set()
            else:
                scope.cancel()
                await case.tier.load(lease, places)
        must(scope.cancelled_caught or not case.threads, "a load lets the cancellation through when it is over")
    places.started = places.go_on = None
    await case.holds(keys)


async def async_means_checkpoint(case: Case) -> None:
    keys = await case.fill(2)
    places = Places(2, case.block_bytes)
    with trio.testing.assert_checkpoints():
        reservation = await case.reserve(case.keys(1, "b"))
    reservation.release()
    with trio.testing.assert_checkpoints():
        lease = await case.tier.pin(keys)
    with trio.testing.assert_checkpoints():
        await case.tier.load(lease, places)
    with trio.testing.assert_checkpoints():
        await lease.release()
    with trio.testing.assert_checkpoints():
        await case.tier.delete(keys[:1])
    room = await case.room()
    with trio.CancelScope() as scope:
        scope.cancel()
        await case.reserve(case.keys(1, "b"))
    must(scope.cancelled_caught and await case.room() == room, "a cancelled reserve holds nothing")
    with trio.CancelScope() as scope:
        scope.cancel()
        await case.tier.pin(keys[1:])
    must(scope.cancelled_caught and case.tier.statistics().held_blocks == 0, "a cancelled pin holds nothing")


async def is_a_source(case: Case) -> None:
    tier = case.tier.source
    if tier is None:
        return
    keys = await case.fill()
    must(tier.block_bytes == case.block_bytes, "a source says how large its blocks are", tier.block_bytes)
    refs = tier.upgrade([keys[0], *case.keys(1, "no"), keys[1]])
    must(refs[1] == EVICTED and refs[0] != EVICTED != refs[2], "what is not there is EVICTED", refs)
    again = tier.upgrade(keys[:1])
    held = [refs[0], refs[2]]
    views = tier.views(held)
    pages = pages_of([bytearray(case.block_bytes) for _ in held])
    await trio.to_thread.run_sync(tier.copy_out, held, pages)  # noqa: TID251
    for shown in (pages, views):
        if shown is not None:
            expected = [payload_of(key, case.block_bytes) for key in keys[:2]]
            must([bytes(page) for page in shown] == expected, "a source shows the bytes of its refs")
    await case.store(case.keys(BLOCKS - 2, "b"), "evict")
    must(await case.contains(keys) == set(keys[:2]), "a ref prevents eviction")
    tier.release(refs)
    answers = await case.tier.delete(keys[:2])
    must(answers == [Deletion.PINNED, Deletion.DELETED], "refs are counted", answers)
    tier.release(again)
    must(await case.tier.delete(keys[:1]) == [Deletion.DELETED], "without a ref a block can go")
