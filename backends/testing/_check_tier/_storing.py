"""Promises about storing: the blocks that are there afterwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import trio

from maru.kv_events import KeyBook

from ...abc import DUPLICATE, STORED, DamagedBlock, Failed, Key, Outcome, Reservation, UnreadableBlock
from ...base.threads import wait_abandoned
from .._fake import payload_of
from ._trying import BLOCKS, Bytes, Case, KnownBytes, must

_BRIEFLY = 0.1


async def stores_and_loads(case: Case) -> None:
    for name, in_host in (("here", True), ("there", False)):
        keys = case.keys(3, name)
        must(await case.contains(keys) == set(), "an empty tier contains nothing")
        must(await case.store(keys, in_host=in_host) == [STORED] * 3, "new blocks must be STORED")
        await case.holds(keys)
        expected = [payload_of(key, case.block_bytes) for key in keys]
        must(await case.load(keys, in_host=False) == expected, "a destination that is not in host memory is asked")
    statistics = case.tier.statistics()
    must((statistics.stored, statistics.blocks, statistics.loaded) == (6, 6, 12), "blocks are counted", statistics)


async def publishes_only_after_the_copy(case: Case) -> None:
    keys = case.keys(3)
    reservation = await case.reserve(keys)
    must(await case.contains(keys) == set(), "what is only reserved must not be found")
    must(case.tier.statistics().reserved_blocks == 3, "reserved places are counted", case.tier.statistics())
    async with await case.tier.pin(keys) as lease:
        must(not lease.keys, "what is only reserved cannot be pinned")
    reservation.release()
    reservation.release()
    must(await case.contains(keys) == set() and await case.room() == BLOCKS, "release gives the room back, once")


async def keeps_a_part(case: Case) -> None:
    keys = case.keys(BLOCKS)
    reservation = await case.reserve(keys)
    must(await case.room() == 0, "all is reserved")
    kept = [keys[1], keys[4], keys[5]]
    reservation.keep(kept)
    must(list(reservation.granted) == kept, "what is granted is what was kept")
    must(await case.room() == BLOCKS - 3, "keep gives the rest back at once")
    source = Bytes(case.block_bytes)
    outcomes = await reservation.transfer(source, source.upgrade(kept))
    reservation.release()
    must(list(outcomes) == [STORED] * 3, "kept blocks are STORED", outcomes)
    must(await case.contains(keys) == set(kept), "only kept blocks are there")
    await case.holds(kept)
    nothing = await case.reserve(case.keys(2, "b"))
    nothing.keep([])
    nothing.release()
    must(await case.room() == BLOCKS - 3, "nothing kept is nothing held")


async def first_writer_wins(case: Case) -> None:
    keys = await case.fill(4)
    mixed = [*case.keys(2, "b"), keys[1], keys[3]]
    reservation = await case.reserve(mixed)
    source = Bytes(case.block_bytes)
    refs = source.upgrade(mixed)
    source.buffers[2:] = [bytearray(case.block_bytes)] * 2  # other bytes under the same keys
    outcomes = await reservation.transfer(source, refs)
    must(list(outcomes) == [STORED, STORED, DUPLICATE, DUPLICATE], "a key that is there is a DUPLICATE", outcomes)
    reservation.release()
    await case.holds([*mixed[:2], *keys])
    must(await case.room() == BLOCKS - 6, "a duplicate takes no room")
    must(case.tier.statistics().duplicates == 2, "duplicates are counted", case.tier.statistics())
    late = case.keys(1, "late")
    first, second = await case.reserve(late), await case.reserve(late)
    for reservation, outcome in ((first, STORED), (second, DUPLICATE)):
        refs = source.upgrade(late)
        must(list(await reservation.transfer(source, refs)) == [outcome], "of two writers one wins")
        reservation.release()
    await case.holds(late)


async def of_two_copies_at_once_one_wins(case: Case) -> None:
    """Check two copies of one key that overlap."""
    if not case.threads:
        return
    keys, outcomes, second_ended = case.keys(2), list[Outcome](), trio.Event()
    first, second = await case.reserve(keys), await case.reserve(keys)
    slow, fast = Bytes(case.block_bytes, in_host=False), Bytes(case.block_bytes)
    slow.started, slow.go_on = threading.Event(), threading.Event()

    async def store(reservation: Reservation, source: Bytes, ended: trio.Event) -> None:
        outcomes.extend(await reservation.transfer(source, source.upgrade(keys)))
        reservation.release()
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store, first, slow, trio.Event())
        await trio.to_thread.run_sync(slow.started.wait)  # noqa: TID251
        nursery.start_soon(store, second, fast, second_ended)
        with trio.move_on_after(_BRIEFLY):  # a tier may copy one batch after the other
            await second_ended.wait()
        slow.go_on.set()
    must(outcomes.count(STORED) == outcomes.count(DUPLICATE) == 2, "of two copies of a key one is stored", outcomes)
    await case.holds(keys)
    must(await case.room() == BLOCKS - 2, "the other takes no room")


async def a_block_that_its_source_cannot_read_fails_alone(case: Case) -> None:
    keys = case.keys(4)
    for at, error in enumerate((DamagedBlock("its source", keys[0], "damaged"), UnreadableBlock("not now"))):
        source = Bytes(case.block_bytes, in_host=False)
        source.error, source.unreadable = error, [keys[at]]
        try:
            outcomes = await case.store([keys[at], keys[at + 2]], source=source)
        except (DamagedBlock, UnreadableBlock) as raised:
            outcomes = [Failed(raised)] * 2
        must(isinstance(outcomes[0], Failed), "a block that cannot be read has failed", outcomes)
        must(outcomes[1] == STORED, "the others of its batch are copied one by one", outcomes)
    await case.holds(keys[2:])


async def a_failing_source_leaves_nothing(case: Case) -> None:
    keys = case.keys(3)
    reservation = await case.reserve(keys)
    source = Bytes(case.block_bytes, in_host=False)
    source.error = OSError("the source is broken")
    refs = source.upgrade(keys)
    try:
        outcomes = await reservation.transfer(source, refs)
    except Exception:
        pass
    else:
        must(all(isinstance(outcome, Failed) for outcome in outcomes), "nothing was stored", outcomes)
    reservation.release()
    must(await case.contains(keys) == set(), "what failed is not found")
    must(await case.room() == BLOCKS, "what failed takes no room")
    await case.fill(3)


async def what_a_source_knows_to_be_damaged_is_not_stored(case: Case) -> None:
    for name, in_host in (("here", True), ("there", False)):
        keys, room = case.keys(4, name), await case.room()
        bad, good = keys[1], [keys[0], *keys[2:]]
        source = KnownBytes(case.block_bytes, [bad], in_host=in_host)
        try:
            outcomes = await case.store(keys, source=source)
        except DamagedBlock as error:
            outcomes = [Failed(error)] * len(keys)
        must(len(outcomes) == 4 and _is_damaged(outcomes[1]), "what is damaged has Failed with DamagedBlock", outcomes)
        must(outcomes[:1] + outcomes[2:] == [STORED] * 3, "it fails alone", outcomes)
        must(source.forgotten == [bad], "its source is told, once, to forget it", source.forgotten)
        must(await case.contains(keys) == set(good), "what failed is not found")
        must(await case.room() == room - 3, "what failed takes no room")
        await case.holds(good)
        outcomes = await case.store([bad], source=KnownBytes(case.block_bytes, [bad], in_host=in_host))
        must(list(map(_is_damaged, outcomes)) == [True], "where all are damaged nothing is stored", outcomes)
        must(await case.store([bad]) == [STORED], "it can be stored once its bytes are right")
        await case.holds(keys)


def _is_damaged(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed) and isinstance(outcome.error, DamagedBlock)


async def a_cancelled_store_leaves_nothing(case: Case) -> None:
    keys = case.keys(3)
    reservation = await case.reserve(keys)
    source = Bytes(case.block_bytes, in_host=False)
    refs = source.upgrade(keys)
    cut_off = True
    with trio.CancelScope() as scope:
        if case.threads:
            source.started, source.go_on = threading.Event(), threading.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reservation.transfer, source, refs)
                await trio.to_thread.run_sync(source.started.wait)  # noqa: TID251
                must(await case.contains(keys) == set(), "a block must not be found before its bytes are there")
                scope.cancel()  # it leaves at once: its thread cannot end before go_on
        else:
            scope.cancel()
            await reservation.transfer(source, refs)
            cut_off = False  # a copy that waits for nothing may be over first
    if cut_off:
        must(await case.contains(keys) == set(), "nothing of a cancelled copy may be found")
        must(await case.room() == BLOCKS - 3, "its room is not reused before its end is proven")
    if source.go_on is not None:
        source.go_on.set()
        await trio.to_thread.run_sync(source.copied.wait)  # noqa: TID251
        await wait_abandoned()  # the thread's work after the source, such as encoding, still writes there
    reservation.release()
    if cut_off:
        must(await case.room() == BLOCKS, "then it is given back")
        await case.fill(3)
    await case.holds(keys)


async def a_block_that_cannot_be_stored_fails(case: Case) -> None:
    if case.spoil is None:
        return
    keys = case.keys(3)
    await case.behind_its_back(case.spoil, keys[1])
    outcomes = await case.store(keys)
    must(len(outcomes) == 3 and isinstance(outcomes[1], Failed), "what could not be stored has Failed", outcomes)
    others = [outcomes[0], outcomes[2]]
    if case.capabilities.per_key_outcomes:
        must(others == [STORED] * 2, "it fails alone", outcomes)
        await case.holds([keys[0], keys[2]])
    else:
        must(all(isinstance(outcome, Failed) for outcome in others), "what failed together fails together", outcomes)
    there = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == STORED]
    must(await case.contains(keys) == set(there), "what failed is not found")
    must(await case.room() == BLOCKS - len(there), "what failed takes no room")


async def tells_which_keys_it_has(case: Case) -> None:
    book = case.tier
    if not book.capabilities.lists_keys:
        return
    before = await case.fill(3)
    must(set(book.list_keys()) == set(before), "the keys that can be found are listed", book.list_keys())
    told = _Told(book)
    end = book.watch_keys(told)
    keys = case.keys(BLOCKS, "told")
    must(await case.store(keys, "evict") == [STORED] * BLOCKS, "blocks that nobody holds make room")
    must(told.keys == set(book.list_keys()) == set(keys), "what came and what made room is told", told.keys)
    await case.tier.delete(keys[:3])
    must(told.keys == set(book.list_keys()) == set(keys[3:]), "what was deleted is told", told.keys)
    if case.damage is not None:
        await case.behind_its_back(case.damage, keys[4])
        await case.load([keys[4]])
        must(told.keys == set(book.list_keys()) == {keys[3], *keys[5:]}, "what was damaged is told", told.keys)
    end()
    end()
    last = set(told.keys)
    await case.tier.delete(keys)
    must(told.keys == last, "who ended it is told no more")


async def knows_the_depths_that_were_said(case: Case) -> None:
    tier = case.tier
    plain, deep = case.keys(2, "plain"), case.keys(3, "deep")
    await case.store(plain)
    must(tier.depths_of(plain) is None, "no depth is known that was not said", tier.depths_of(plain))
    reservation = await case.reserve(deep)
    reservation.note_depths({deep[0]: 4, deep[2]: 6})
    source = Bytes(case.block_bytes)
    outcomes = await reservation.transfer(source, source.upgrade(deep))
    reservation.release()
    must(list(outcomes) == [STORED] * 3, "blocks with depths are STORED", outcomes)
    depths = tier.depths_of([*deep, *plain, *case.keys(1, "unknown")])
    if depths is None:  # a tier that keeps none
        return
    must(list(depths or ()) == [4, None, 6, None, None, None], "each depth is that of its block", depths)
    await case.tier.delete(deep)
    if case.capabilities.deletes:
        must(tier.depths_of(deep) is None, "the depth of what was deleted is forgotten", tier.depths_of(deep))


class _Told:
    """A watcher that keeps the reported keys."""

    def __init__(self, book: KeyBook[Key]) -> None:
        self.book = book
        self.keys = set(book.list_keys())

    def stored(self, keys: Sequence[Key]) -> None:
        must(self.keys.isdisjoint(keys), "what is there is not told to come", keys)
        self.keys |= set(keys)
        self._check()

    def removed(self, keys: Sequence[Key]) -> None:
        must(self.keys >= set(keys), "what is not there is not told to go", keys)
        self.keys -= set(keys)
        self._check()

    def _check(self) -> None:
        must(self.keys == set(self.book.list_keys()), "what is listed is what the changes told have led to")
