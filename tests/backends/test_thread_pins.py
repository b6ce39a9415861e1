"""Pins that other threads take in a registry, in every order against its own operations, and against real threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from random import Random
from typing import Any

import pytest

from backends.abc import Deletion, RoomRequest
from backends.base.blocks import BlockPool
from backends.base.pooled import ThreadLease
from backends.memory import MemoryTier
from maru.eviction import LRU

SIZE = 64
KEYS = [b"%d" % n for n in range(4)]


def tier_of(blocks: int, keys: list[bytes]) -> MemoryTier:
    tier = MemoryTier(blocks * SIZE, SIZE, eviction=LRU())
    for key in keys:
        tier.put(key, key * SIZE)
    return tier


def read(tier: MemoryTier, lease: ThreadLease) -> list[bytes]:
    pages = tier.views(lease.refs)
    assert pages is not None
    return [bytes(page[:1]) for page in pages]


# --- every order ------------------------------------------------------------------------------------------------------


def evict(tier: MemoryTier) -> Iterator[None]:
    """Take the room of two, in as many steps as a thread may come between."""
    slots = tier.pool.take_at_once([b"new-0", b"new-1"])
    yield
    if slots is not None:
        for slot in slots:
            pages = tier.views([slot])
            assert pages is not None
            pages[0][:] = b"x" * SIZE  # the new owner writes: what a lease holds must not be among these
        yield
        tier.pool.register([b"new-0", b"new-1"], slots)


def delete(tier: MemoryTier) -> Iterator[None]:
    answers = tier.pool.delete(KEYS[:2])
    assert Deletion.MISSING not in answers
    yield


def forget(tier: MemoryTier) -> Iterator[None]:
    tier.pool.forget(KEYS[:2], tier.pool.slots(KEYS[:2]))
    yield


def watch(tier: MemoryTier) -> Iterator[None]:
    tier.statistics()
    yield


def look(tier: MemoryTier, wrong: list[object]) -> Iterator[None]:
    """Another thread: pin, read, read again, release."""
    lease = tier.pin_from_thread(KEYS)
    yield
    for _ in range(2):
        if read(tier, lease) != list(lease.keys):
            wrong.append(lease.keys)
        yield
    lease.release_from_thread()


def orders(first: int, second: int) -> Iterator[list[int]]:
    """All orders of so many steps of one and of another."""
    for chosen in combinations(range(first + second), first):
        yield [0 if at in chosen else 1 for at in range(first + second)]


@pytest.mark.parametrize("own", [evict, delete, forget, watch])
def test_in_every_order_a_lease_reads_what_it_has_found_and_holds_nothing_behind_it(
    own: Callable[[MemoryTier], Iterator[None]],
) -> None:
    ran = 0
    for order in orders(3, 5):
        tier = tier_of(4, KEYS)
        wrong: list[object] = []
        steps: list[Iterator[None]] = [own(tier), look(tier, wrong)]
        for one in order:
            next(steps[one], None)
        for rest in steps:
            for _ in rest:
                pass
        assert not wrong, order
        statistics = tier.statistics()
        assert statistics.held_blocks == statistics.reserved_blocks == 0
        tier.pool.take_at_once([b"all"] * 4)
        assert tier.pool.statistics().staged == 4  # every slot came back
        ran += 1
    assert ran == 56


def test_a_victim_that_is_chosen_without_the_threads_is_read_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what threads have pinned is not looked at."""
    monkeypatch.setattr(BlockPool, "_hold_pinned", lambda self: self._thread_pins.pinned.clear())
    tier, wrong = tier_of(4, KEYS), list[object]()
    reading, own = look(tier, wrong), evict(tier)
    next(reading)
    for _ in own:
        pass
    for _ in reading:
        pass
    assert wrong


# --- what ends a pin --------------------------------------------------------------------------------------------------


def test_a_lease_that_is_dropped_is_released() -> None:
    tier = tier_of(4, KEYS)
    lease = tier.pin_from_thread(KEYS)
    assert tier.statistics().held_blocks == 4
    del lease
    gc.collect()
    assert tier.statistics().held_blocks == 0


def test_a_lease_that_is_dropped_before_it_was_noted_counts_as_a_use_and_holds_nothing() -> None:
    tier = tier_of(4, KEYS)
    del_me = tier.pin_from_thread(KEYS[:1])
    del del_me
    tier.put(b"new", b"n" * SIZE)
    assert tier.contains_nowait(KEYS) == {KEYS[0], *KEYS[2:]}


def test_a_release_twice_releases_once() -> None:
    tier = tier_of(4, KEYS)
    one, other = tier.pin_from_thread(KEYS), tier.pin_from_thread(KEYS)
    tier.statistics()
    one.release_from_thread()
    one.release_from_thread()
    one.release_nowait()
    assert tier.statistics().held_blocks == 4
    other.release_nowait()
    assert tier.statistics().held_blocks == 0


async def test_a_release_between_a_full_tier_and_the_wait_for_room_is_seen(autojump_clock: object) -> None:
    """The thread finds nobody in the queue, and so wakes nobody; the request joins it behind that."""
    tier = tier_of(4, KEYS)
    lease = tier.pin_from_thread(KEYS)
    joins = tier.pool._waiters.join

    def join(*args: Any) -> Any:
        assert not tier.is_waited_for
        lease.release_from_thread()
        return joins(*args)

    tier.pool._waiters.join = join  # type: ignore[method-assign]
    (await tier.reserve(RoomRequest([b"a"] * 1, SIZE, "evict"))).release()


# --- real threads -----------------------------------------------------------------------------------------------------


def read_in_threads(seed: int, turns: int) -> int:
    """Threads pin, read and release while this one evicts and stores; how many blocks were read, all of which were right."""
    names = [bytes([n]) for n in range(1, 33)]
    tier = MemoryTier(8 * SIZE, SIZE, checksums=False)
    wrong: list[bytes] = []
    over = threading.Event()
    read_blocks = [0, 0]

    def look(reader: int) -> None:
        random = Random(f"{seed}/{reader}")
        while not over.is_set():
            start = random.randrange(len(names) - 4)
            lease = tier.pin_from_thread(names[start : start + 4])
            wrong.extend(key for key, got in zip(lease.keys, read(tier, lease), strict=True) if got != key)
            read_blocks[reader] += len(lease.keys)
            lease.release_from_thread()

    threads = [threading.Thread(target=look, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    random = Random(seed)
    for _ in range(turns):
        slots = tier.pool.take_at_once([key := random.choice(names)])
        if slots is not None:
            pages = tier.views(slots)
            assert pages is not None
            pages[0][:] = key * SIZE
            tier.pool.register([key], slots)
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.statistics().held_blocks == 0
    return sum(read_blocks)


@pytest.mark.parametrize("turns", [6_000, pytest.param(60_000, marks=pytest.mark.long)])
def test_blocks_that_threads_read_while_others_come_and_go_are_right(turns: int) -> None:
    assert read_in_threads(seed=1, turns=turns) > 0
