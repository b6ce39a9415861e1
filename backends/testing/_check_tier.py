"""The contract of a place as a test, for every place: what :mod:`backends.abc` promises, tried one promise at a time.

Each check gets a tier of its own, stores blocks whose bytes follow from their keys, and ends with the tier at rest: no
room is reserved and no block is held. No check sleeps or races: what must come first is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

import attrs
import trio
import trio.testing

from .._errors import BlockSizeError, CapacityError
from ..abc import (
    DUPLICATE,
    EVICTED,
    LOADED,
    STORED,
    Deletion,
    Failed,
    Key,
    Missed,
    Outcome,
    RemoteTier,
    Reservation,
    Source,
    Tier,
    WhenFull,
)
from ..pages import Pages, copy_pages, pages_of
from ._fake import payload_of

MakeTier: TypeAlias = Callable[[int, int], Tier | RemoteTier]
"""``make_tier(blocks, block_bytes)``: an empty tier for so many blocks of this size. Entered if it is an async context manager,
closed if it has a ``close``."""

_BLOCKS = 8
"""How many blocks the tier of a check holds."""

_PATIENCE = 5.0
"""Seconds until what a tier has to ask for should have come."""


def _must(holds: bool, promise: str, *details: object) -> None:
    """Not an ``assert``, which ``python -O`` would drop."""
    if not holds:
        raise AssertionError(" ".join([promise, *map(repr, details)]))


# --- what a tier is tried with ------------------------------------------------------------------------------------


class _Bytes:
    """A source of blocks whose bytes follow from their keys; a guard is the number of the key."""

    def __init__(self, block_bytes: int, *, in_host: bool = True) -> None:
        self.block_bytes = block_bytes
        self.in_host = in_host
        self.keys: list[Key] = []
        self.buffers: list[bytearray] = []
        self.error: Exception | None = None
        self.started: threading.Event | None = None
        self.go_on: threading.Event | None = None

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        guards = list(range(len(self.keys), len(self.keys) + len(keys)))
        self.keys += keys
        self.buffers += [bytearray(payload_of(key, self.block_bytes)) for key in keys]
        return guards

    def release(self, guards: Sequence[int]) -> None:
        pass

    def views(self, guards: Sequence[int]) -> Pages | None:
        return pages_of([self.buffers[guard] for guard in guards]) if self.in_host else None

    def copy_out(self, guards: Sequence[int], pages: Pages) -> None:
        if self.started is not None and self.go_on is not None:
            self.started.set()
            self.go_on.wait()
        if self.error is not None:
            raise self.error
        copy_pages(pages, pages_of([self.buffers[guard] for guard in guards]))


class _Places:
    """A destination that can be looked at."""

    def __init__(self, n: int, block_bytes: int, *, in_host: bool = True) -> None:
        self.block_bytes = block_bytes
        self.in_host = in_host
        self.buffers = [bytearray(b"\xee" * block_bytes) for _ in range(n)]
        self.error: Exception | None = None
        self.started: threading.Event | None = None
        self.go_on: threading.Event | None = None

    def __len__(self) -> int:
        return len(self.buffers)

    def views(self) -> Pages | None:
        return pages_of(self.buffers) if self.in_host else None

    def copy_in(self, start: int, pages: Pages) -> None:
        if self.started is not None and self.go_on is not None:
            self.started.set()
            self.go_on.wait()
        if self.error is not None:
            raise self.error
        copy_pages(pages_of(self.buffers[start : start + len(pages)]), pages)


@attrs.define
class _Case:
    """One tier, and what the checks do with it again and again."""

    tier: Any
    block_bytes: int
    any_block_size: bool
    threads: bool
    damage: Callable[[Any, Key], object] | None

    @property
    def remote(self) -> bool:
        """Whether it is a :class:`~backends.abc.RemoteTier`: others change it, and it must be asked."""
        return iscoroutinefunction(self.tier.contains)

    def keys(self, n: int, name: str = "a") -> list[Key]:
        return [f"{name}{number}".encode() * 4 for number in range(n)]

    async def reserve(self, keys: Sequence[Key], when_full: WhenFull = "fail") -> Reservation:
        reservation: Reservation = await self.tier.reserve(keys, self.block_bytes, when_full)
        return reservation

    async def reserve_now(self, keys: Sequence[Key], when_full: WhenFull) -> Reservation:
        """What fits now. Only a tier that must be asked may say that this cannot be told without waiting."""
        try:
            reservation: Reservation = self.tier.reserve_nowait(keys, self.block_bytes, when_full)
        except trio.WouldBlock:
            _must(self.remote, "partial and fail never wait")
            return await self.reserve(keys, when_full)
        return reservation

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those that the tier says it has."""
        found: AbstractSet[Key] = await self.tier.contains(keys) if self.remote else self.tier.contains(keys)
        return found

    async def until(self, holds: Callable[[], bool], promise: str, *details: object) -> None:
        """It comes to hold, at once in a tier that asks nobody."""
        await trio.testing.wait_all_tasks_blocked()
        if self.remote:
            with trio.move_on_after(_PATIENCE):
                while not holds():  # noqa: ASYNC110  # what comes to hold is the tier's own affair
                    await trio.sleep(0.001)
        _must(holds(), promise, *details)

    async def store(self, keys: Sequence[Key], when_full: WhenFull = "fail", *, in_host: bool = True) -> list[Outcome]:
        reservation = await self.reserve(keys, when_full)
        _must(list(reservation.granted) == list(keys), "there must be room for", keys, reservation.granted)
        source = _Bytes(self.block_bytes, in_host=in_host)
        try:
            return list(await reservation.transfer(source, source.upgrade(keys)))
        finally:
            reservation.release()

    async def fill(self, n: int = _BLOCKS, name: str = "a") -> list[Key]:
        keys = self.keys(n, name)
        outcomes = await self.store(keys)
        _must(outcomes == [STORED] * n, "new blocks must be STORED", outcomes)
        return keys

    async def load(self, keys: Sequence[Key], *, in_host: bool = True) -> list[bytes | None]:
        """What is loaded for these keys, all of which are there; ``None`` for a miss."""
        places = _Places(len(keys), self.block_bytes, in_host=in_host)
        async with await self.tier.pin(keys) as lease:
            _must(list(lease.keys) == list(keys), "a lease must hold all that is there", keys, lease.keys)
            outcomes = await self.tier.load(lease, places)
        _must(len(outcomes) == len(keys), "one outcome per key of the lease", outcomes)
        _must(all(o == LOADED or isinstance(o, Missed) for o in outcomes), "LOADED or Missed", outcomes)
        return [bytes(b) if o == LOADED else None for b, o in zip(places.buffers, outcomes, strict=True)]

    async def holds(self, keys: Sequence[Key]) -> None:
        """These keys are there, with their bytes."""
        _must(await self.contains(keys) == set(keys), "what is stored must be found", keys)
        expected = [payload_of(key, self.block_bytes) for key in keys]
        _must(await self.load(keys) == expected, "what is loaded must be what was stored", keys)

    async def room(self) -> int:
        """How many blocks there is room for without evicting one."""
        reservation = await self.reserve_now(self.keys(_BLOCKS, "room"), "partial")
        reservation.release()
        return len(reservation.granted)

    def at_rest(self) -> None:
        statistics = self.tier.statistics()
        _must(statistics.reserved_blocks == 0, "no room may be left reserved", statistics)
        _must(statistics.held_blocks == 0, "no block may be left held", statistics)
        _must(0 <= statistics.used_bytes <= statistics.capacity_bytes, "a tier keeps within its capacity", statistics)


# --- the promises -------------------------------------------------------------------------------------------------


async def _stores_and_loads(case: _Case) -> None:
    for name, in_host in (("here", True), ("there", False)):
        keys = case.keys(3, name)
        _must(await case.contains(keys) == set(), "an empty tier contains nothing")
        _must(await case.store(keys, in_host=in_host) == [STORED] * 3, "new blocks must be STORED")
        await case.holds(keys)
        expected = [payload_of(key, case.block_bytes) for key in keys]
        _must(await case.load(keys, in_host=False) == expected, "a destination that is not in host memory is asked")
    statistics = case.tier.statistics()
    _must((statistics.stored, statistics.blocks, statistics.loaded) == (6, 6, 12), "blocks are counted", statistics)


async def _publishes_only_after_the_copy(case: _Case) -> None:
    keys = case.keys(3)
    reservation = await case.reserve(keys)
    _must(await case.contains(keys) == set(), "what is only reserved must not be found")
    _must(case.tier.statistics().reserved_blocks == 3, "reserved places are counted", case.tier.statistics())
    async with await case.tier.pin(keys) as lease:
        _must(not lease.keys, "what is only reserved cannot be pinned")
    reservation.release()
    reservation.release()
    _must(await case.contains(keys) == set() and await case.room() == _BLOCKS, "release gives the room back, once")


async def _keeps_a_part(case: _Case) -> None:
    keys = case.keys(_BLOCKS)
    reservation = await case.reserve(keys)
    _must(await case.room() == 0, "all is reserved")
    kept = [keys[1], keys[4], keys[5]]
    reservation.keep(kept)
    _must(list(reservation.granted) == kept, "what is granted is what was kept")
    _must(await case.room() == _BLOCKS - 3, "keep gives the rest back at once")
    source = _Bytes(case.block_bytes)
    outcomes = await reservation.transfer(source, source.upgrade(kept))
    reservation.release()
    _must(list(outcomes) == [STORED] * 3, "kept blocks are STORED", outcomes)
    _must(await case.contains(keys) == set(kept), "only kept blocks are there")
    await case.holds(kept)
    nothing = await case.reserve(case.keys(2, "b"))
    nothing.keep([])
    nothing.release()
    _must(await case.room() == _BLOCKS - 3, "nothing kept is nothing held")


async def _first_writer_wins(case: _Case) -> None:
    keys = await case.fill(4)
    mixed = [*case.keys(2, "b"), keys[1], keys[3]]
    reservation = await case.reserve(mixed)
    source = _Bytes(case.block_bytes)
    guards = source.upgrade(mixed)
    source.buffers[2:] = [bytearray(case.block_bytes)] * 2  # other bytes under the same keys
    outcomes = await reservation.transfer(source, guards)
    _must(list(outcomes) == [STORED, STORED, DUPLICATE, DUPLICATE], "a key that is there is a DUPLICATE", outcomes)
    reservation.release()
    await case.holds([*mixed[:2], *keys])
    _must(await case.room() == _BLOCKS - 6, "a duplicate takes no room")
    _must(case.tier.statistics().duplicates == 2, "duplicates are counted", case.tier.statistics())
    late = case.keys(1, "late")
    first, second = await case.reserve(late), await case.reserve(late)
    for reservation, outcome in ((first, STORED), (second, DUPLICATE)):
        guards = source.upgrade(late)
        _must(list(await reservation.transfer(source, guards)) == [outcome], "of two writers one wins")
        reservation.release()
    await case.holds(late)


async def _grants_what_fits(case: _Case) -> None:
    await case.fill(_BLOCKS - 2)
    keys = case.keys(4, "b")
    for when_full in ("partial", "fail"):
        reservation = await case.reserve(keys, when_full)
        _must(list(reservation.granted) == keys[:2], "partial and fail grant the prefix that fits", reservation.granted)
        nowait = await case.reserve_now(keys, when_full)
        _must(not nowait.granted, "a full place grants nothing", nowait.granted)
        nowait.release()
        reservation.release()
    _must(case.tier.statistics().evicted == 0, "only evict evicts")


async def _waits_for_room(case: _Case) -> None:
    keys = await case.fill()
    first, second = case.keys(3, "b"), case.keys(1, "c")
    try:
        case.tier.reserve_nowait(first, case.block_bytes, "wait").release()
    except trio.WouldBlock:
        pass
    else:
        _must(False, "reserve_nowait must raise WouldBlock where reserve waits")
    got: list[list[Key]] = []

    async def wait(wanted: list[Key]) -> None:
        reservation = await case.reserve(wanted, "wait")
        got.append(list(reservation.granted))
        reservation.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, second)
        await trio.testing.wait_all_tasks_blocked()
        await case.tier.delete(keys[:2])
        await trio.testing.wait_all_tasks_blocked()
        _must(got == [], "waiters are served in order: the second may not pass the first", got)
        partial = await case.reserve_now(case.keys(1, "d"), "partial")
        _must(not partial.granted, "nobody passes a waiter", partial.granted)
        partial.release()
        await case.tier.delete(keys[2:3])
    _must(got == [first, second], "waiters are served in order", got)
    _must(await case.room() == 3 and case.tier.statistics().evicted == 0, "wait does not evict")


async def _who_asks_for_less_keeps_his_turn(case: _Case) -> None:
    keys = await case.fill()
    first, second = case.keys(3, "b"), case.keys(1, "c")
    got: list[list[Key]] = []

    async def wait(wanted: list[Key]) -> None:
        reservation = await case.reserve(wanted, "wait")
        got.append(list(reservation.granted))
        reservation.release()

    _must(not case.tier.narrow(first, first[:1]), "nobody waits for these keys")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, second)
        await trio.testing.wait_all_tasks_blocked()
        asked = list(first)
        _must(not case.tier.narrow(asked, asked[:1]), "equal keys are not those that were asked for")
        can = case.tier.narrow(first, kept := first[1:])
        wanted = kept if can else first
        await case.tier.delete(keys[:1])
        await trio.testing.wait_all_tasks_blocked()
        _must(got == [], "asking for less, he neither loses his turn nor is he granted less than he asks for", got)
        await case.tier.delete(keys[1 : len(wanted)])
        await case.until(
            lambda: got == [wanted, second], "who asks for less keeps his turn, and gets what he asks for", got
        )
    if not can:
        return
    await case.store(case.keys(await case.room(), "d"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, first)
        await trio.testing.wait_all_tasks_blocked()
        await case.tier.delete(keys[3:4])
        _must(case.tier.narrow(first, kept := first[2:]), "once a tier narrows, it always does")
    _must(got[2:] == [kept], "less that fits already is granted at once", got)


async def _evicts_what_nobody_holds(case: _Case) -> None:
    keys = await case.fill()
    async with await case.tier.pin(keys[:2]):
        outcomes = await case.store(case.keys(4, "b"), "evict")
        _must(outcomes == [STORED] * 4, "evict makes room", outcomes)
        _must(await case.contains(keys) >= set(keys[:2]), "what is held is not evicted")
    statistics = case.tier.statistics()
    _must(statistics.evicted == 4 and statistics.blocks == _BLOCKS, "evictions are counted", statistics)
    await case.holds(case.keys(4, "b"))
    everything = [*keys[:2], *sorted(await case.contains(keys) - set(keys[:2])), *case.keys(4, "b")]
    granted = trio.Event()

    async def wait() -> None:
        (await case.reserve(case.keys(1, "c"), "evict")).release()
        granted.set()

    async with trio.open_nursery() as nursery:
        async with await case.tier.pin(everything) as lease:
            _must(len(lease.keys) == _BLOCKS, "all is held", lease.keys)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            _must(not granted.is_set(), "evict waits where everything is held")
        await granted.wait()


async def _refuses_what_cannot_fit(case: _Case) -> None:
    keys = case.keys(_BLOCKS + 1)
    for when_full in ("wait", "evict"):
        for reserve in (case.tier.reserve, case.tier.reserve_nowait):
            try:
                answer = reserve(keys, case.block_bytes, when_full)
                if isinstance(answer, Awaitable):
                    answer = await answer
            except CapacityError:
                continue
            _must(False, "more than fits into an empty place is a CapacityError", answer)
    if not case.any_block_size:
        try:
            case.tier.reserve_nowait(keys[:1], case.block_bytes + 1, "fail").release()
        except BlockSizeError:
            pass
        else:
            _must(False, "a block of another size is a BlockSizeError")
    _must(await case.room() == _BLOCKS, "what is refused takes no room")


async def _a_cancelled_wait_holds_nothing(case: _Case) -> None:
    await case.fill(_BLOCKS - 2)

    async def wait(scope: trio.CancelScope) -> None:
        with scope:
            (await case.reserve(case.keys(2, "b"), "wait")).release()

    for order in (
        "cancel",
        "cancel, free",
        "free, cancel",
    ):  # without a checkpoint between: granted and cancelled at once
        held = await case.reserve_now(case.keys(2, "c"), "fail")
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, scope)
            await trio.testing.wait_all_tasks_blocked()
            for action in order.split(", "):
                scope.cancel() if action == "cancel" else held.release()
        held.release()
        _must(
            await case.room() == 2,
            "room granted to a waiter that is cancelled must come back:",
            order,
            await case.room(),
        )
    _must(await case.store(case.keys(2, "d")) == [STORED] * 2, "and can be used")


async def _a_pin_holds(case: _Case) -> None:
    keys = await case.fill(4)
    gap = [keys[0], keys[1], *case.keys(1, "no"), keys[2]]
    lease = await case.tier.pin(gap)
    other = await case.tier.pin(keys[:1])
    _must(list(lease.keys) == keys[:2], "a lease holds the prefix before the first gap", lease.keys)
    _must(case.tier.statistics().held_blocks == 2, "held blocks are counted", case.tier.statistics())
    answers = await case.tier.delete([*keys[:3], *case.keys(1, "no")])
    expected = [Deletion.PINNED, Deletion.PINNED, Deletion.DELETED, Deletion.MISSING]
    _must(answers == expected, "delete answers pinned, deleted or missing", answers)
    _must(await case.contains(keys) == {keys[0], keys[1], keys[3]}, "a pinned block stays, a deleted one goes")
    await lease.release()
    await lease.release()
    _must(await case.tier.delete(keys[:2]) == [Deletion.PINNED, Deletion.DELETED], "each lease counts for itself")
    await other.release()
    _must(await case.tier.delete(keys[:1]) == [Deletion.DELETED], "what nobody holds can be deleted")
    _must(case.tier.statistics().deleted == 3, "deletions are counted", case.tier.statistics())
    async with await case.tier.pin(keys[:1]) as empty:
        _must(not empty.keys, "what is deleted cannot be pinned")
        _must(list(await case.tier.load(empty, _Places(1, case.block_bytes))) == [], "nothing held, nothing loaded")
    _must(await case.store(keys[:3]) == [STORED] * 3, "what was deleted can be stored anew")
    await case.holds(keys)


async def _a_damaged_block_is_a_miss(case: _Case) -> None:
    if case.damage is None:
        return
    keys = await case.fill(4)
    damaging = case.damage(case.tier, keys[2])
    if isinstance(damaging, Awaitable):
        await damaging
    loaded = await case.load(keys)
    expected = [payload_of(key, case.block_bytes) for key in keys]
    _must(loaded[2] is None, "a damaged block must not be loaded")
    _must(loaded[:2] + loaded[3:] == expected[:2] + expected[3:], "its neighbours are loaded")
    _must(await case.contains(keys) == {keys[0], keys[1], keys[3]}, "it is no longer found")
    statistics = case.tier.statistics()
    _must(sum(statistics.missed.values()) == 1 and statistics.loaded == 3, "it is counted", statistics)
    _must(await case.store([keys[2]]) == [STORED], "it can be stored anew")
    await case.holds(keys)
    _must(await case.room() == _BLOCKS - 4, "it takes no room")


async def _a_failing_source_leaves_nothing(case: _Case) -> None:
    keys = case.keys(3)
    reservation = await case.reserve(keys)
    source = _Bytes(case.block_bytes, in_host=False)
    source.error = OSError("the source is broken")
    guards = source.upgrade(keys)
    try:
        outcomes = await reservation.transfer(source, guards)
    except Exception:
        pass
    else:
        _must(all(isinstance(outcome, Failed) for outcome in outcomes), "nothing was stored", outcomes)
    reservation.release()
    _must(await case.contains(keys) == set(), "what failed is not found")
    _must(await case.room() == _BLOCKS, "what failed takes no room")
    await case.fill(3)


async def _a_failing_destination_leaves_all(case: _Case) -> None:
    keys = await case.fill(3)
    places = _Places(3, case.block_bytes, in_host=False)
    places.error = OSError("the destination is broken")
    async with await case.tier.pin(keys) as lease:
        try:
            outcomes = await case.tier.load(lease, places)
        except Exception:
            pass
        else:
            _must(all(isinstance(outcome, Failed) for outcome in outcomes), "nothing was loaded", outcomes)
    await case.holds(keys)


async def _a_cancelled_store_leaves_nothing(case: _Case) -> None:
    keys = case.keys(3)
    reservation = await case.reserve(keys)
    source = _Bytes(case.block_bytes, in_host=False)
    guards = source.upgrade(keys)
    cut_off = True
    with trio.CancelScope() as scope:
        if case.threads:
            source.started, source.go_on = threading.Event(), threading.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reservation.transfer, source, guards)
                await trio.to_thread.run_sync(source.started.wait)
                _must(await case.contains(keys) == set(), "a block must not be found before its bytes are there")
                scope.cancel()  # it leaves at once: its thread cannot end before go_on
        else:
            scope.cancel()
            await reservation.transfer(source, guards)
            cut_off = False  # a copy that waits for nothing may be over first
    if cut_off:
        _must(await case.contains(keys) == set(), "nothing of a cancelled copy may be found")
        _must(await case.room() == _BLOCKS - 3, "its room is not reused before its end is proven")
    if source.go_on is not None:
        source.go_on.set()
    reservation.release()
    if cut_off:
        _must(await case.room() == _BLOCKS, "then it is given back")
        await case.fill(3)
    await case.holds(keys)


async def _a_cancelled_load_leaves_when_it_is_over(case: _Case) -> None:
    keys = await case.fill(3)
    places = _Places(3, case.block_bytes, in_host=False)
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
                    await trio.to_thread.run_sync(places.started.wait)
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await trio.testing.wait_all_tasks_blocked()
                        _must(not over.is_set(), "a load may not leave while the destination is written")
                        places.go_on.set()
            else:
                scope.cancel()
                await case.tier.load(lease, places)
        _must(scope.cancelled_caught or not case.threads, "a load lets the cancellation through when it is over")
    places.started = places.go_on = None
    await case.holds(keys)


async def _async_means_checkpoint(case: _Case) -> None:
    keys = await case.fill(2)
    places = _Places(2, case.block_bytes)
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
    with trio.CancelScope() as scope:
        scope.cancel()
        await case.reserve(case.keys(1, "b"))
    _must(scope.cancelled_caught and await case.room() == _BLOCKS - 1, "a cancelled reserve holds nothing")
    with trio.CancelScope() as scope:
        scope.cancel()
        await case.tier.pin(keys[1:])
    _must(scope.cancelled_caught and case.tier.statistics().held_blocks == 0, "a cancelled pin holds nothing")


async def _is_a_source(case: _Case) -> None:
    tier = case.tier
    if not isinstance(tier, Source):
        return
    keys = await case.fill()
    _must(tier.block_bytes == case.block_bytes, "a source says how large its blocks are", tier.block_bytes)
    guards = tier.upgrade([keys[0], *case.keys(1, "no"), keys[1]])
    _must(guards[1] == EVICTED and guards[0] != EVICTED != guards[2], "what is not there is EVICTED", guards)
    again = tier.upgrade(keys[:1])
    held = [guards[0], guards[2]]
    views = tier.views(held)
    pages = pages_of([bytearray(case.block_bytes) for _ in held])
    await trio.to_thread.run_sync(tier.copy_out, held, pages)
    for shown in (pages, views):
        if shown is not None:
            expected = [payload_of(key, case.block_bytes) for key in keys[:2]]
            _must([bytes(page) for page in shown] == expected, "a source shows the bytes of its guards")
    await case.store(case.keys(_BLOCKS - 2, "b"), "evict")
    _must(await case.contains(keys) == set(keys[:2]), "a guard prevents eviction")
    tier.release(guards)
    answers = await case.tier.delete(keys[:2])
    _must(answers == [Deletion.PINNED, Deletion.DELETED], "guards are counted", answers)
    tier.release(again)
    _must(await case.tier.delete(keys[:1]) == [Deletion.DELETED], "without a guard a block can go")


_PROMISES: tuple[Callable[[_Case], Awaitable[None]], ...] = (
    _stores_and_loads,
    _publishes_only_after_the_copy,
    _keeps_a_part,
    _first_writer_wins,
    _grants_what_fits,
    _waits_for_room,
    _who_asks_for_less_keeps_his_turn,
    _evicts_what_nobody_holds,
    _refuses_what_cannot_fit,
    _a_cancelled_wait_holds_nothing,
    _a_pin_holds,
    _a_damaged_block_is_a_miss,
    _a_failing_source_leaves_nothing,
    _a_failing_destination_leaves_all,
    _a_cancelled_store_leaves_nothing,
    _a_cancelled_load_leaves_when_it_is_over,
    _async_means_checkpoint,
    _is_a_source,
)


async def check_tier(
    make_tier: MakeTier,
    *,
    block_bytes: int = 256,
    damage: Callable[[Any, Key], object] | None = None,
    any_block_size: bool = False,
    threads: bool = True,
) -> None:
    """Try every promise of :class:`backends.abc.Tier` on a tier of yours, and of :class:`backends.abc.Source` if it is one.

    A tier whose ``contains`` is async is a :class:`backends.abc.RemoteTier`: it may have to ask before it grants room, and what
    it is told may take a moment to arrive. All else it promises as well.

    A tier that forgets a waiter makes it wait for ever: bound it with :func:`trio.fail_after`.

    Args:
        make_tier: called as ``make_tier(blocks, block_bytes)`` for each promise: an empty tier for exactly so many blocks
            of this size. It is entered, if it is an async context manager, and closed by its ``close``, if it has one.
        block_bytes: the size of the blocks to try it with.
        damage: called as ``damage(tier, key)``, and awaited if that makes sense: change a byte of a stored block behind the
            tier's back. Without it, what a tier does with a damaged block is not tried.
        any_block_size: the tier takes blocks of any size.
        threads: the tier copies in threads, or otherwise waits for copies so that it can leave them. Say ``False`` of one
            that copies in place.

    Raises:
        AssertionError: a promise is not kept, and which.
    """
    for promise in _PROMISES:
        case = _Case(make_tier(_BLOCKS, block_bytes), block_bytes, any_block_size, threads, damage)
        try:
            async with AsyncExitStack() as stack:
                if hasattr(type(case.tier), "__aenter__"):
                    await stack.enter_async_context(case.tier)
                await promise(case)
                case.at_rest()
        except Exception as exc:
            exc.add_note(f"the promise: {promise.__name__.strip('_').replace('_', ' ')}; the tier: {case.tier!r}")
            raise
        finally:
            close = getattr(case.tier, "close", None)
            if close is not None:
                close()
