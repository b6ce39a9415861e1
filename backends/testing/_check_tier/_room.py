"""Promises about room: granting, order and eviction."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import trio
import trio.testing

from ..._errors import BlockSizeError, CapacityError
from ...abc import STORED, Key, Reservation, RoomRequest, WhenFull
from ._trying import BLOCKS, PATIENCE, Case, must


async def grants_what_fits(case: Case) -> None:
    await case.fill(BLOCKS - 2)
    keys = case.keys(4, "b")
    whens: tuple[WhenFull, ...] = ("partial", "fail")
    for when_full in whens:
        reservation = await case.reserve(keys, when_full)
        must(isinstance(reservation, Reservation), "room derives from backends.abc.Reservation", reservation)
        must(list(reservation.granted) == keys[:2], "partial and fail grant the prefix that fits", reservation.granted)
        nowait = await case.reserve_now(keys, when_full)
        must(not nowait.granted, "a full place grants nothing", nowait.granted)
        nowait.release()
        reservation.release()
    must(case.tier.statistics().evicted == 0, "only evict evicts")


async def waits_for_room(case: Case) -> None:
    occupied = await case.occupy()
    keys = occupied.keys
    first, second = case.keys(3, "b"), case.keys(1, "c")
    try:
        case.tier.reserve_nowait(case.request(first, "wait")).release()
    except trio.WouldBlock:
        pass
    else:
        must(False, "reserve_nowait must raise WouldBlock where reserve waits")
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
        await occupied.free(keys[:2])
        await trio.testing.wait_all_tasks_blocked()
        must(got == [], "waiters are served in order: the second may not pass the first", got)
        partial = await case.reserve_now(case.keys(1, "d"), "partial")
        must(not partial.granted, "nobody passes a waiter", partial.granted)
        partial.release()
        await occupied.free(keys[2:3])
    must(got == [first, second], "waiters are served in order", got)
    must(await case.room() == 3 and case.tier.statistics().evicted == 0, "wait does not evict")
    occupied.end()


async def a_request_that_shrinks_keeps_its_turn(case: Case) -> None:
    occupied = await case.occupy()
    keys = occupied.keys
    first, second = case.keys(3, "b"), case.keys(1, "c")
    got: list[list[Key]] = []

    async def wait(request: RoomRequest) -> None:
        reservation = await case.tier.reserve(request)
        must(list(reservation.granted) == list(request.keys), "granted is what the request wants by then", request)
        got.append(list(reservation.granted))
        reservation.release()

    request = case.request(first, "wait")
    must(not request.shrink(first[:1]) and request.keys == first, "what does not wait does not shrink")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, request)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, case.request(second, "wait"))
        await trio.testing.wait_all_tasks_blocked()
        can = request.shrink(first[1:])
        wanted = first[1:] if can else first
        must(list(request.keys) == wanted, "a request that cannot shrink stays as it was")
        await occupied.free(keys[:1])
        await trio.testing.wait_all_tasks_blocked()
        must(got == [], "a request that shrinks neither loses its turn nor is granted less than it wants", got)
        await occupied.free(keys[1 : len(wanted)])
        await case.until(
            lambda: got == [wanted, second], "a request that shrinks keeps its turn, and gets what it wants", got
        )
    must(not request.shrink(()), "what was granted does not shrink")
    if not can:
        occupied.end()
        return
    await occupied.more(case.keys(await case.room(), "d"))
    async with trio.open_nursery() as nursery:
        request = case.request(first, "wait")
        nursery.start_soon(wait, request)
        await trio.testing.wait_all_tasks_blocked()
        await occupied.free(keys[3:4])
        must(request.shrink(first[2:]), "where one request can shrink, any can")
    must(got[2:] == [first[2:]], "less that fits already is granted at once", got)
    occupied.end()


async def evicts_what_nobody_holds(case: Case) -> None:
    keys = await case.fill()
    if not case.capabilities.deletes:
        await _stays_full(case, keys)
        return
    async with await case.tier.pin(keys[:2]):
        outcomes = await case.store(case.keys(4, "b"), "evict")
        must(outcomes == [STORED] * 4, "evict makes room", outcomes)
        must(await case.contains(keys) >= set(keys[:2]), "what is held is not evicted")
    statistics = case.tier.statistics()
    must(statistics.evicted == 4 and statistics.blocks == BLOCKS, "evictions are counted", statistics)
    await case.holds(case.keys(4, "b"))
    everything = [*keys[:2], *sorted(await case.contains(keys) - set(keys[:2])), *case.keys(4, "b")]
    granted = trio.Event()

    async def wait() -> None:
        (await case.reserve(case.keys(1, "c"), "evict")).release()
        granted.set()

    async with trio.open_nursery() as nursery:
        async with await case.tier.pin(everything) as lease:
            must(len(lease.keys) == BLOCKS, "all is held", lease.keys)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            must(not granted.is_set(), "evict waits where everything is held")
        await granted.wait()


async def _stays_full(case: Case, keys: Sequence[Key]) -> None:
    """Check that no request waits in vain if nothing can be deleted."""
    whens: tuple[WhenFull, ...] = ("wait", "evict")
    for when_full in whens:
        with trio.move_on_after(PATIENCE):
            try:
                reservation = await case.reserve(case.keys(1, "b"), when_full)
            except CapacityError:
                continue
            reservation.release()
        must(False, "a tier that cannot delete is full for ever, which is a CapacityError", when_full)
    await case.holds(keys)
    must(case.tier.statistics().evicted == 0, "a tier that cannot delete evicts nothing", case.tier.statistics())


async def refuses_what_cannot_fit(case: Case) -> None:
    keys = case.keys(BLOCKS + 1)
    whens: tuple[WhenFull, ...] = ("wait", "evict")
    for when_full in whens:
        for reserve in (case.tier.reserve, case.tier.reserve_nowait):
            try:
                answer = reserve(case.request(keys, when_full))
                if isinstance(answer, Awaitable):
                    answer = await answer
            except CapacityError:
                continue
            must(False, "more than fits into an empty place is a CapacityError", answer)
    if not case.any_block_size:
        try:
            case.tier.reserve_nowait(RoomRequest(keys[:1], case.block_bytes + 1, "fail")).release()
        except BlockSizeError:
            pass
        else:
            must(False, "a block of another size is a BlockSizeError")
    must(await case.room() == BLOCKS, "what is refused takes no room")


async def a_cancelled_wait_holds_nothing(case: Case) -> None:
    await case.fill(BLOCKS - 2)

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
        must(
            await case.room() == 2,
            "room granted to a waiter that is cancelled must come back:",
            order,
            await case.room(),
        )
    must(await case.store(case.keys(2, "d")) == [STORED] * 2, "and can be used")
