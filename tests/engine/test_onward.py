"""Routes lead on from a page store: what this engine or another process has stored there is copied on. In virtual time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import EVICTED, LOADED, STORED, Deletion, DuplicateKeys, RoomRequest
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.testing import FakeTier, payload_of
from offload import NO_WAIT, BatchConfig, DestinationFull, Engine, PipelineConfig, PreconditionFailed, Route, Status
from tests.support import determinism
from tests.support.maru_world import PAGE, Joined, World
from tests.support.steps import at_every_step, played

KEYS = [b"k%d" % at for at in range(6)]


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in virtual time, whose steps are the same each time."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        determinism.run(partial(test, *args, **options), seed=0)

    return run


AT_ONCE = PipelineConfig(
    batch_config=BatchConfig(min_batch_size=1, flush_interval=0.0), on_destination_full="evict", transfer_timeout=60.0
)
REQUIRED = (Route("disk", required=True),)


class Disk(FakeTier):
    """A slower tier, in whose copies something happens before the first byte."""

    async def nothing(self) -> None:
        """Does not happen."""

    happens = nothing

    async def off_thread(self, fn: Any, *args: Any) -> Any:
        await self.happens()
        return await super().off_thread(fn, *args)


@attrs.define(eq=False)
class Site:
    """An engine over host memory, a page store and a disk, and another process with pages in the same store."""

    world: World
    engine: Engine
    source: FakeTier
    disk: Disk
    store: MaruTier
    other: MaruTier
    wire: Joined

    async def commit(self, keys: list[bytes]) -> None:
        """What another process does: write pages of its own, and register them."""
        memory = FakeTier(len(keys), PAGE)
        memory.fill(keys)
        reservation = await self.other.reserve(RoomRequest(keys, PAGE, "evict"))
        try:
            assert list(await reservation.transfer(memory, memory.upgrade(keys))) == [STORED] * len(keys)
        finally:
            reservation.release()

    async def damage(self, key: bytes) -> None:
        async with await self.other.pin([key]) as lease:
            for region in self.world.memory.values():
                at = bytes(region).find(bytes(lease.views[0]))
                if at >= 0:
                    region[at] ^= 1

    async def pass_on(self, keys: list[bytes]) -> list[offload.TransferResult]:
        return [await handle.wait() for handle in await self.engine.onward.pass_on("store", keys)]

    async def assert_at_rest(self) -> None:
        """Nothing is pinned, and what the disk has is right."""
        for _ in range(4):  # what a late answer has pinned is released with the next question
            await self.store.contains(KEYS)
            await trio.sleep(0.01)
        assert self.world.service.directory.statistics().pinned == 0
        assert not len(self.store.held_pages)
        for key in KEYS:
            assert self.disk.get(key) in (None, payload_of(key, PAGE)), key
        assert (self.disk.statistics().held_blocks, self.disk.statistics().reserved_blocks) == (0, 0)


@contextlib.asynccontextmanager
async def open_site(
    *,
    capacity: int = 64,
    latency: float = 0.0,
    checksums: bool = True,
    index: str = "off",
    more: Any = (),
    **options: Any,
) -> AsyncIterator[Site]:
    world = World(capacity_regions=8)
    knobs = {"auto_expand": False, "checksums": checksums, "index": index}
    wire = Joined(world, "engine", **knobs)
    other = Joined(world, "other", **knobs)
    source, disk = FakeTier(64, PAGE), Disk(capacity, PAGE, latency=latency)
    options.setdefault("pipeline", AT_ONCE)
    if "chain" not in options:
        options.setdefault("routes", REQUIRED)
    async with MaruTier(other.handler) as others:
        store = MaruTier(wire.handler)
        config = offload.EngineConfig(tiers={"store": store, "disk": disk, **dict(more)}, **options)
        async with offload.open_engine(source, config) as engine:
            yield Site(world, engine, source, disk, store, others, wire)


# --- what is copied on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["off", "auto"])
@in_virtual_time
async def test_what_another_process_has_stored_is_copied_on_with_its_bytes(index: str) -> None:
    async with open_site(index=index) as site:
        await site.commit(KEYS)
        (result,) = await site.pass_on(KEYS)
        assert (result.status, set(result.completed)) == (Status.COMPLETE, set(KEYS))
        assert [site.disk.get(key) for key in KEYS] == [payload_of(key, PAGE) for key in KEYS]
        await site.assert_at_rest()


@in_virtual_time
async def test_what_is_stored_into_a_page_store_goes_on_before_its_handle_settles() -> None:
    async with open_site() as site:
        site.source.fill(KEYS)
        result = await (await site.engine.store(site.source.weak(KEYS), NO_WAIT)).wait()
        assert result.status is Status.COMPLETE
        assert set(result.routes["disk"].completed) == set(KEYS)
        assert site.disk.contains_nowait(KEYS) == set(KEYS)
        await site.assert_at_rest()


@in_virtual_time
async def test_it_is_found_in_the_disk_when_the_page_store_has_let_go_of_it() -> None:
    async with open_site() as site:
        await site.commit(KEYS)
        await site.pass_on(KEYS)
        await site.assert_at_rest()
        assert list(await site.other.delete(KEYS)) == [Deletion.DELETED] * len(KEYS)
        buffers = [bytearray(PAGE) for _ in KEYS]
        async with await site.engine.lookup(KEYS) as hit:
            assert hit.runs == [("disk", len(KEYS))]
            assert (await site.engine.load(hit, PagesDestination.over(buffers))).outcomes == [LOADED] * len(KEYS)
        assert buffers == [payload_of(key, PAGE) for key in KEYS]


@in_virtual_time
async def test_what_the_disk_has_is_not_copied_again_nor_held_for_it() -> None:
    async with open_site() as site:
        await site.commit(KEYS)
        site.disk.fill(KEYS[:4])
        (result,) = await site.pass_on(KEYS)
        assert result.filtered == dict.fromkeys(KEYS[:4], "present")
        assert set(result.completed) == set(KEYS[4:])
        assert site.disk.copied == KEYS[4:]


@in_virtual_time
async def test_two_routes_that_lead_on_have_the_same_pages() -> None:
    tape = FakeTier(64, PAGE, latency=1.0)
    routes = (*REQUIRED, Route("tape", source="store", required=True))
    async with open_site(more={"tape": tape}, latency=0.5, routes=routes) as site:
        await site.commit(KEYS)
        results = await site.pass_on(KEYS)
        assert [set(result.completed) for result in results] == [set(KEYS)] * 2
        assert tape.contains_nowait(KEYS) == site.disk.contains_nowait(KEYS) == set(KEYS)
        await site.assert_at_rest()


@in_virtual_time
async def test_an_optional_route_does_not_delay_a_required_one() -> None:
    small = attrs.evolve(
        AT_ONCE,
        budget_blocks=4,
        route_patience=50.0,
        batch_config=BatchConfig(max_batch_size=4, min_batch_size=1, flush_interval=0.0),
    )
    tape = FakeTier(64, PAGE)
    routes = (Route("disk", pipeline=small, required=False), Route("tape", source="store", required=True))
    async with open_site(more={"tape": tape}, routes=routes, latency=10.0) as site:
        await site.commit(KEYS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(site.pass_on, KEYS)
            await trio.sleep(1.0)
            assert tape.contains_nowait(KEYS) == set(KEYS)
            assert not site.disk.contains_nowait(KEYS)
        await site.assert_at_rest()


@in_virtual_time
async def test_more_blocks_than_a_route_has_room_for_go_in_portions() -> None:
    small = attrs.evolve(
        AT_ONCE, budget_blocks=2, batch_config=BatchConfig(max_batch_size=2, min_batch_size=1, flush_interval=0.0)
    )
    async with open_site(routes=(Route("disk", pipeline=small, required=True),), latency=0.1) as site:
        await site.commit(KEYS)
        results = await site.pass_on(KEYS)
        assert [list(result.completed) for result in results] == [KEYS[0:2], KEYS[2:4], KEYS[4:6]]


# --- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [[0], [2, 3], [5], [0, 2, 5], [0, 1, 2, 3, 4, 5]])
@in_virtual_time
async def test_what_is_gone_is_said_to_be_and_the_others_go_on(gone: list[int]) -> None:
    async with open_site() as site:
        missing = [KEYS[at] for at in gone]
        there = [key for key in KEYS if key not in missing]
        await site.commit(KEYS)
        await site.other.delete(missing)
        (result,) = await site.pass_on(KEYS)
        assert (set(result.completed), list(result.evicted)) == (set(there), missing)
        assert result.status is Status.COMPLETE
        assert site.disk.contains_nowait(KEYS) == set(there)
        told = await site.engine.explain(missing[0])
        assert "from store" in str(told) and "not copied to disk: gone" in str(told)
        await site.assert_at_rest()


@in_virtual_time
async def test_a_store_says_of_what_was_gone_behind_its_first_copy_that_it_failed_there() -> None:
    async with open_site() as site:
        site.source.fill(KEYS)
        handle = await site.engine.store(site.source.weak(KEYS), NO_WAIT)
        while not handle.completed_blocks:  # noqa: ASYNC110 - in virtual time, before the next question has arrived
            await trio.sleep(1e-4)
        directory = site.world.service.directory
        directory.delete(1, directory.list_keys()[:1], site.world.now)  # as a server does that makes room
        result = await handle.wait()
        assert result.status is Status.FAILED and len(result.routes["disk"].failed) == 1
        assert len(site.disk.contains_nowait(KEYS)) == len(KEYS) - 1


@pytest.mark.parametrize("checksums", [True, False])
@in_virtual_time
async def test_a_page_that_was_written_to_is_not_copied_on_where_it_was_summed(checksums: bool) -> None:
    async with open_site(checksums=checksums) as site:
        await site.commit(KEYS)
        if checksums:
            await site.damage(KEYS[2])
        (result,) = await site.pass_on(KEYS)
        bad = KEYS[2:3] if checksums else []
        assert (list(result.failed), site.disk.contains_nowait(KEYS)) == (bad, set(KEYS) - set(bad))
        assert site.store.statistics().missed["damaged"] == len(bad)
        assert await site.store.contains(KEYS) == set(KEYS) - set(bad)  # nor is it found there any more
        await site.assert_at_rest()


@in_virtual_time
async def test_a_page_store_that_does_not_answer_fails_them_and_does_not_say_that_they_are_gone() -> None:
    async with open_site() as site:
        await site.commit(KEYS)
        assert site.wire.socket is not None
        site.wire.socket.fate = lambda code: "lost"
        (result,) = await site.pass_on(KEYS)
        assert result.status is Status.FAILED and not result.evicted
        assert isinstance(result.error, PreconditionFailed)
        assert not site.disk.contains_nowait(KEYS)
        site.wire.socket.fate = lambda code: None


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("when", ["before the copy", "in the copy"])
@in_virtual_time
async def test_what_is_held_by_a_server_that_has_forgotten_it_is_not_copied_on(checksums: bool, when: str) -> None:
    async with open_site(checksums=checksums, latency=10.0) as site:

        async def forget() -> None:
            for region in site.world.memory.values():
                region[:] = bytes(len(region))  # of somebody else by now
            site.world.restart(forgets=True)
            await site.store.contains(KEYS)  # by which this side learns of it

        await site.commit(KEYS)
        handles = await site.engine.onward.pass_on("store", KEYS)
        await trio.sleep(5.0)
        assert len(site.store.held_pages) == len(KEYS)
        if when == "in the copy":
            site.disk.happens = forget  # type: ignore[method-assign,assignment]
        else:
            await forget()
        result = await handles[0].wait()
        assert result.status is Status.FAILED and not site.disk.contains_nowait(KEYS)
        assert site.store.statistics().missed["damaged"] == 0  # it was the pins that were lost
        assert site.engine.statistics().health["disk"].faults == 0
        assert not len(site.store.held_pages)


@in_virtual_time
async def test_a_pin_ends_with_the_last_of_its_blocks() -> None:
    async with open_site() as site:
        await site.commit(KEYS)
        pages = site.store.held_pages
        blocks = pages.take(await site.store.pin(KEYS))
        again = pages.upgrade([KEYS[0], b"nowhere"])
        assert again[1] == EVICTED
        assert [bytes(page) for page in pages.views(again[:1]) or ()] == [payload_of(KEYS[0], PAGE)]
        blocks.release()
        pages.release([again[1]])
        assert len(pages) == 1 and pages.upgrade(KEYS[1:2]) == [EVICTED]
        await site.store.contains(KEYS)
        assert await site.other.delete(KEYS) == [Deletion.PINNED] * len(KEYS)  # one pin for all of them
        pages.release(again)
        await site.assert_at_rest()
        empty = pages.take(await site.store.pin([b"nowhere"]))
        assert not empty.keys and not len(pages)


# --- what is in the way -----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_disk_without_room_refuses_them_and_nothing_stays_held() -> None:
    refuses = attrs.evolve(AT_ONCE, on_destination_full="partial")
    async with open_site(capacity=4, routes=(Route("disk", pipeline=refuses, required=True),)) as site:
        await site.commit(KEYS)
        (result,) = await site.pass_on(KEYS)
        assert (len(result.completed), len(result.failed)) == (4, 2)
        assert all(isinstance(error, DestinationFull) for error in result.failed.values())
        await site.assert_at_rest()


@in_virtual_time
async def test_what_is_being_copied_on_is_pinned_for_a_deletion_and_stays_in_the_disk_behind_it() -> None:
    async with open_site(latency=10.0) as site:
        await site.commit(KEYS)
        handles = await site.engine.onward.pass_on("store", KEYS)
        await trio.sleep(5.0)
        assert await site.engine.delete(KEYS) == [Deletion.PINNED] * len(KEYS)
        assert str(await site.engine.explain(KEYS[0])) == "in store, on its way to disk"
        assert set((await handles[0].wait()).completed) == set(KEYS)
        await site.assert_at_rest()
        assert await site.engine.delete(KEYS) == [Deletion.DELETED] * len(KEYS)


@in_virtual_time
async def test_held_pages_are_not_evicted_by_the_process_that_wrote_them() -> None:
    async with open_site(latency=10.0) as site:
        await site.commit(KEYS)
        handles = await site.engine.onward.pass_on("store", KEYS)
        await trio.sleep(5.0)
        new = [b"n%d" % at for at in range(3)]  # of eight pages two are left
        with trio.move_on_after(1.0) as scope:
            await site.commit(new)
        assert scope.cancelled_caught
        assert set((await handles[0].wait()).completed) == set(KEYS)
        await site.commit(new)


# --- which routes there are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "onward"),
    [
        ({}, True),
        ({"chain": "none"}, False),
        ({"chain": "on_evict"}, False),
        ({"routes": (Route("store", auto_chain=False),)}, False),
        ({"routes": (Route("disk", source="source"),)}, True),
    ],
)
@in_virtual_time
async def test_routes_lead_on_where_the_chain_feeds_what_is_stored(options: Any, onward: bool) -> None:
    async with open_site(**options) as site:
        await site.commit(KEYS)
        assert bool(site.engine.onward.of("store")) is onward
        assert bool(await site.pass_on(KEYS)) is onward
        assert bool(site.disk.contains_nowait(KEYS)) is onward


@in_virtual_time
async def test_what_cannot_be_passed_on_is_refused() -> None:
    async with open_site() as site:
        for bad, error in (
            (("disk", KEYS), ValueError),
            (("nowhere", KEYS), ValueError),
            (("store", b"k0"), TypeError),
        ):
            with pytest.raises(error):
                await site.engine.onward.pass_on(*bad)  # type: ignore[arg-type]
        with pytest.raises(DuplicateKeys):
            await site.engine.onward.pass_on("store", [KEYS[0]] * 2)


# --- cancelled --------------------------------------------------------------------------------------------------------


async def _pass_on_and_cancel(what: str, instrument: Any) -> None:
    with trio.CancelScope() as outside:
        async with open_site(latency=0.05, index="off") as site:
            await site.commit(KEYS)
            await site.other.delete(KEYS[1:2])
            handles: list[Any] = []
            with trio.CancelScope() as scope:
                if what == "call":
                    instrument.do = scope.cancel
                elif what == "outside":
                    instrument.do = outside.cancel
                elif what == "handle":
                    instrument.do = lambda: [handle.request_cancel() for handle in handles]
                handles += await site.engine.onward.pass_on("store", KEYS)
                for handle in handles:
                    result = await handle.wait()
                    assert set(result.completed) <= set(KEYS) - {KEYS[1]}
                    assert instrument.left <= 0 or set(result.completed) == set(KEYS) - {KEYS[1]}
            instrument.do = None
            await site.engine.drain()
            await site.assert_at_rest()
    instrument.do = None
    if outside.cancelled_caught:
        assert not len(site.store.held_pages)
        for key in KEYS:
            assert site.disk.get(key) in (None, payload_of(key, PAGE))


@pytest.mark.parametrize("what", ["call", "handle", "outside"])
def test_cancelled_at_every_step_nothing_stays_held_and_nothing_wrong_is_copied(what: str) -> None:
    at_every_step(lambda k: played(_pass_on_and_cancel, what, k=k, seed=k), most=3_000, least=10, name=what)


async def _store_and_cancel(instrument: Any) -> None:
    async with open_site(latency=0.05) as site:
        site.source.fill(KEYS)
        handle = await site.engine.store(site.source.weak(KEYS), NO_WAIT)
        instrument.do = handle.request_cancel
        result = await handle.wait()
        instrument.do = None
        assert result.status in (Status.COMPLETE, Status.CANCELLED)
        there = set(KEYS) if result.status is Status.COMPLETE else set()
        assert site.disk.contains_nowait(KEYS) == await site.store.contains(KEYS) == there
        await site.assert_at_rest()


def test_a_store_cancelled_at_every_step_is_in_both_tiers_or_in_none() -> None:
    at_every_step(partial(lambda k: played(_store_and_cancel, k=k, seed=k)), most=3_000, least=10, name="store")
