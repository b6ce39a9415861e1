"""Copies between host pages are made on the trio thread, in portions, and can be left between them."""

from __future__ import annotations

import trio
import trio.testing

from backends.abc import LOADED, STORED, RoomRequest
from backends.base import slots
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads, thread_statistics
from backends.memory import MemoryTier
from backends.testing import payload_of

SIZE = slots.PORTION_BYTES // 4
KEYS = tuple(b"%032d" % number for number in range(10))  # three portions, the last one short


def filled(checksums: bool = True) -> MemoryTier:
    tier = MemoryTier(len(KEYS) * SIZE, SIZE, checksums=checksums)
    for key in KEYS:
        tier.put(key, payload_of(key, SIZE))
    return tier


async def store(source: MemoryTier, tier: MemoryTier, keys: tuple[bytes, ...] = KEYS) -> list[object]:
    refs = source.upgrade(keys)
    reservation = tier.reserve_nowait(RoomRequest(keys, SIZE, "fail"))
    try:
        return list(await reservation.transfer(source, refs))
    finally:
        reservation.release()
        source.release(refs)


async def test_a_copy_in_portions_is_whole_and_starts_no_thread() -> None:
    for checksums in (True, False):
        source, tier = filled(checksums), MemoryTier(len(KEYS) * SIZE, SIZE, checksums=checksums)
        assert await store(source, tier) == [STORED] * len(KEYS)
        buffers = [bytearray(SIZE) for _ in KEYS]
        async with await tier.pin(KEYS) as lease:
            assert await tier.load(lease, PagesDestination.over(buffers)) == [LOADED] * len(KEYS)
        assert buffers == [bytearray(payload_of(key, SIZE)) for key in KEYS]
        assert thread_statistics().started == 0


async def test_others_run_between_portions() -> None:
    source, tier = filled(), MemoryTier(len(KEYS) * SIZE, SIZE)
    turns = 0

    async def other(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        nonlocal turns
        task_status.started()
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await nursery.start(other)
        before = turns
        await store(source, tier)
        assert turns > before
        nursery.cancel_scope.cancel()


async def test_a_store_cancelled_between_portions_registers_nothing() -> None:
    source, tier = filled(), MemoryTier(len(KEYS) * SIZE, SIZE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store, source, tier)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    statistics = tier.statistics()
    assert (statistics.blocks, statistics.reserved_blocks, statistics.used_bytes) == (0, 0, 0)
    assert source.statistics().held_blocks == 0
    assert await store(source, tier) == [STORED] * len(KEYS)


async def test_a_load_cancelled_between_portions_writes_nothing_more() -> None:
    tier = filled()
    buffers = [bytearray(SIZE) for _ in KEYS]
    async with await tier.pin(KEYS) as lease:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.load, lease, PagesDestination.over(buffers))
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        before = [bytes(buffer) for buffer in buffers]
        assert bytes(SIZE) in before
        await trio.testing.wait_all_tasks_blocked()
        assert [bytes(buffer) for buffer in buffers] == before
    assert tier.statistics().held_blocks == 0


async def test_a_second_copy_at_the_same_time_takes_a_thread() -> None:
    source, tier = filled(), MemoryTier(2 * len(KEYS) * SIZE, SIZE)
    others = tuple(b"%032d" % number for number in range(100, 110))
    second = MemoryTier(len(KEYS) * SIZE, SIZE)
    for key in others:
        second.put(key, payload_of(key, SIZE))
    async with keep_threads():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store, source, tier, KEYS)
            nursery.start_soon(store, second, tier, others)
        assert thread_statistics().started == 1
    assert len(tier) == 20
    for key in (*KEYS, *others):
        assert tier.get(key) == payload_of(key, SIZE)
