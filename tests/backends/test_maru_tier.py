"""The page store as a tier, against real servers: in this process, in another one, behind a wire that loses answers."""

import ctypes
import itertools
import json
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import LOADED, STORED, BlockSizeError, CapacityError, Deletion, Failed, Missed, Rejected, RoomRequest
from backends.base.slots import PagesDestination
from backends.maru import MaruTier, PageSizeError
from backends.memory import MemoryTier
from backends.testing import check_tier, payload_of
from maru import LeaseLost, MaruError, MaruHandler
from maru.testing import Code, Fate, open_lossy_wire, open_test_server
from offload import from_thread
from tests.support.cuda_process import process_with_cuda
from tests.support.maru_actors import impatient
from tests.support.maru_processes import PATIENCE, Server, temporary_pool
from tests.support.pools import until

BLOCK = 256 << 10
"""Eight of them fill the smallest region there is."""
BLOCKS = 8
_names = itertools.count()


def handler_to(endpoint: str, **knobs: Any) -> MaruHandler:
    """With one region of eight pages, unless said otherwise."""
    defaults = {"chunk_size_bytes": BLOCK, "pool_size": BLOCKS * BLOCK, "auto_expand": False, "eager_map": False}
    defaults["timeout_ms"] = int(PATIENCE * 1_000)  # no call here goes without an answer unless it is said
    return MaruHandler(server_url=endpoint, **{**defaults, **knobs})


@asynccontextmanager
async def open_tier(**knobs: Any) -> AsyncIterator[MaruTier]:
    """A tier with a server of its own that evicts only when asked to."""
    async with (
        open_test_server(high_watermark=1.0) as server,
        MaruTier(handler_to(server.endpoints[0], **knobs)) as tier,
    ):
        yield tier


async def flip(tier: MaruTier, key: bytes) -> None:
    """Change a byte of a stored block. Its region is this process's own, so it may be written."""
    async with await tier.pin([key]) as lease:
        address = lease.pages.addresses[0]
    ctypes.c_ubyte.from_address(address).value ^= 1


# --- the contract -------------------------------------------------------------------------------------------------


async def test_it_keeps_the_contract_of_a_tier() -> None:
    async with open_test_server(high_watermark=1.0) as server:

        def make(blocks: int, block_bytes: int) -> MaruTier:
            return MaruTier(handler_to(server.endpoints[0], namespace=f"{next(_names)}"))

        with trio.fail_after(2 * PATIENCE):
            await check_tier(make, block_bytes=BLOCK, damage=flip)


# --- what a test needs --------------------------------------------------------------------------------------------


def keys_of(n: int, name: str = "k") -> list[bytes]:
    return [f"{name}{number}".encode() * 4 for number in range(n)]


def memory(keys: list[bytes]) -> MemoryTier:
    source = MemoryTier(max(1, len(keys)) * BLOCK, BLOCK)
    for key in keys:
        source.put(key, payload_of(key, BLOCK))
    return source


async def store(tier: MaruTier, keys: list[bytes], when_full: Any = "fail") -> list[Any]:
    source = memory(keys)
    reservation = await tier.reserve(RoomRequest(keys, BLOCK, when_full))
    try:
        reservation.keep(list(reservation.granted))
        return list(await reservation.transfer(source, source.upgrade(list(reservation.granted))))
    finally:
        reservation.release()


async def load(tier: MaruTier, keys: list[bytes]) -> tuple[list[Any], list[bytearray]]:
    buffers = [bytearray(BLOCK) for _ in keys]
    async with await tier.pin(keys) as lease:
        return list(await tier.load(lease, PagesDestination.over(buffers))), buffers


def payloads(keys: list[bytes]) -> list[bytearray]:
    return [bytearray(payload_of(key, BLOCK)) for key in keys]


async def all_is_free(*tiers: MaruTier, keys: list[bytes]) -> None:
    """Once all keys are deleted nothing is reserved, nothing pinned, and every page is free."""
    for tier in tiers:
        assert Deletion.PINNED not in await tier.delete(keys)
    for tier in tiers:
        await tier.handler.exists("")
        with trio.fail_after(PATIENCE):
            while (pages := tier.handler.statistics().pages).free != pages.pages:
                await tier.handler.healthcheck()
        statistics = tier.statistics()
        assert (statistics.reserved_blocks, statistics.held_blocks, statistics.blocks, pages.strays) == (0, 0, 0, 0)


# --- one process --------------------------------------------------------------------------------------------------


async def test_a_block_must_fit_a_page_and_the_error_names_the_knob() -> None:
    handler = MaruHandler(chunk_size_bytes=4096)
    with pytest.raises(PageSizeError, match=r"chunk_size_bytes = 4096: .* 8192 bytes; .*chunk_size_bytes=8192 or more"):
        MaruTier(handler, block_bytes=8192)
    with pytest.raises(PageSizeError):
        MaruTier(handler, block_bytes=0)
    with pytest.raises(BlockSizeError):
        MaruTier(handler, block_bytes=512).reserve_nowait(RoomRequest([b"k"], 4096, "fail"))


async def test_its_memory_is_there_when_it_is_entered_so_that_no_store_waits_for_it() -> None:
    async with open_tier() as tier:
        assert tier.handler.free_pages == BLOCKS
        tier.reserve_nowait(RoomRequest(keys_of(BLOCKS), BLOCK, "fail")).release()


@pytest.mark.parametrize("knobs", [{"pool_size": 0}, {"auto_connect": True}])
async def test_who_owns_none_or_asks_nobody_before_it_must_takes_no_region_when_it_is_entered(knobs: Any) -> None:
    async with open_tier(**knobs) as tier:
        assert not tier.handler.get_owned_region_ids()


async def test_a_server_without_memory_for_a_region_is_entered_all_the_same() -> None:
    async with open_test_server(capacity_bytes=2 << 20, high_watermark=1.0) as server:
        url, keys = server.endpoints[0], keys_of(2)
        async with MaruTier(handler_to(url)) as tier, MaruTier(handler_to(url)) as other:
            assert await store(tier, keys) == [STORED] * 2
            assert not other.handler.get_owned_region_ids()
            assert await load(other, keys) == ([LOADED] * 2, payloads(keys))
            assert (await other.reserve(RoomRequest(keys_of(1, "n"), BLOCK, "fail"))).granted == []


@pytest.mark.parametrize(("bytes_per_second", "regions"), [(1, 0), (1 << 40, 1)])
async def test_who_has_a_deadline_takes_its_region_only_if_there_is_time_for_it(
    monkeypatch: pytest.MonkeyPatch, bytes_per_second: int, regions: int
) -> None:
    monkeypatch.setattr("backends.maru._tier._IN_PLACE_PER_SECOND", bytes_per_second)
    async with open_test_server(high_watermark=1.0) as server:
        tier = MaruTier(handler_to(server.endpoints[0]))
        with trio.fail_after(PATIENCE):
            async with tier:
                assert len(tier.handler.get_owned_region_ids()) == regions
                assert await store(tier, keys_of(1)) == [STORED]


async def test_what_another_process_has_left_does_not_go_before_something_is_stored() -> None:
    async with open_test_server(capacity_bytes=2 << 20, high_watermark=1.0) as server:
        url, keys = server.endpoints[0], keys_of(2)
        async with MaruTier(handler_to(url)) as before:
            assert await store(before, keys) == [STORED] * 2
        async with MaruTier(handler_to(url)) as tier:
            assert not tier.handler.get_owned_region_ids()
            assert await load(tier, keys) == ([LOADED] * 2, payloads(keys))
            assert await store(tier, keys_of(1, "n"), "evict") == [STORED]
            assert await tier.contains(keys) == set()


async def test_entering_that_is_cancelled_while_it_takes_its_region_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = trio.Event()

    async def take_region(handler: MaruHandler) -> bool:
        began.set()
        await trio.sleep_forever()
        return True

    async with open_test_server(high_watermark=1.0) as server:
        tier = MaruTier(handler_to(server.endpoints[0]))
        with monkeypatch.context() as patch:
            patch.setattr(MaruHandler, "take_region", take_region)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tier.__aenter__)
                await began.wait()
                nursery.cancel_scope.cancel()
        assert not tier.handler.is_open
        async with tier:
            assert tier.handler.free_pages == BLOCKS


async def test_blocks_smaller_than_a_page_leave_the_rest_of_it_alone() -> None:
    size, keys = 1000, keys_of(5)
    async with open_test_server() as server:
        handler = MaruHandler(server_url=server.endpoints[0], chunk_size_bytes=4096, pool_size=2 << 20)
        async with MaruTier(handler, block_bytes=size) as tier:
            source = MemoryTier(len(keys) * size, size)
            for key in keys:
                source.put(key, payload_of(key, size))
            reservation = await tier.reserve(RoomRequest(keys, size, "fail"))
            assert list(await reservation.transfer(source, source.upgrade(keys))) == [STORED] * 5
            buffers = [bytearray(size) for _ in keys]
            async with await tier.pin(keys) as lease:
                assert await tier.load(lease, PagesDestination.over(buffers)) == [LOADED] * 5
                assert [bytes(view) for view in lease.views] == [payload_of(key, size) for key in keys]
            assert buffers == [bytearray(payload_of(key, size)) for key in keys]


async def test_what_another_layout_stored_ends_the_prefix() -> None:
    async with open_tier() as tier:
        keys = keys_of(3)
        assert await store(tier, [keys[0], keys[2]]) == [STORED] * 2
        await tier.handler.batch_put([keys[1].hex()], [b"a few bytes"])
        async with await tier.pin(keys) as lease:
            assert list(lease.keys) == keys[:1]
        assert tier.statistics().missed["size"] == 1
        assert tier.statistics().held_blocks == 0


async def test_a_block_of_an_earlier_size_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    [key] = keys_of(1)
    async with open_tier() as tier:
        await tier.handler.batch_put([key.hex()], [b"a few bytes"])
        assert await tier.contains([key]) == {key}
        async with await tier.pin([key]) as lease:
            assert not lease.keys
        assert await tier.contains([key]) == set()
        assert await store(tier, [key]) == [STORED]
        assert await load(tier, [key]) == ([LOADED], payloads([key]))
        assert caplog.text.count("another size (11 bytes)") == 1


async def test_a_block_of_another_size_under_a_text_stays() -> None:
    async with open_test_server() as server, MaruTier(handler_to(server.endpoints[0]), key_names="text") as tier:
        await tier.handler.batch_put(["theirs"], [b"a few bytes"])
        async with await tier.pin([b"theirs"]) as lease:
            assert not lease.keys
        assert await tier.contains([b"theirs"]) == {b"theirs"}


async def test_listed_keys_are_made_of_names_in_steps(monkeypatch) -> None:
    class Tasks(trio.abc.Instrument):
        steps = 0

        def before_task_step(self, task: object) -> None:
            self.steps += 1

    tasks = Tasks()
    monkeypatch.setattr("backends.maru._tier._NAMES", 3)
    async with open_tier() as tier:
        keys = keys_of(8)
        await store(tier, keys)
        naming, made = tier.naming, []

        def key(name: str) -> bytes:
            made.append(tasks.steps)
            return naming.key(name)

        tier.naming = attrs.evolve(naming, key=key)
        trio.lowlevel.add_instrument(tasks)
        assert await tier.list_stored(b"k") == keys
        trio.lowlevel.remove_instrument(tasks)
    assert [made.count(step) for step in dict.fromkeys(made)] == [3, 3, 2]


async def test_a_key_is_named_so_that_the_name_says_the_key_and_passes_for_no_salted_one() -> None:
    key = b"\x1f3:abc" + bytes(range(256))[:20]
    async with open_tier(tenant="abc") as tier:
        assert await store(tier, [key]) == [STORED]
        assert await tier.handler.exists(key.hex())
        assert bytes.fromhex(key.hex()) == key


async def test_views_are_read_only_and_say_when_they_mean_nothing_any_more() -> None:
    async with open_tier() as tier:
        keys = keys_of(2)
        await store(tier, keys)
        lease = await tier.pin(keys)
        [view, _] = lease.views
        lease.check()
        assert bytes(view) == payload_of(keys[0], BLOCK)
        with pytest.raises(TypeError):
            view[0] = 1
        await lease.release()
        with pytest.raises(LeaseLost):
            lease.check()
        assert (
            await tier.load(lease, PagesDestination.over([bytearray(BLOCK) for _ in range(2)])) == [Missed("lease")] * 2
        )
        assert bytes(view) == payload_of(keys[0], BLOCK)  # still mapped


async def test_it_says_what_it_refuses() -> None:
    async with open_tier() as tier, open_tier() as other:
        with pytest.raises(CapacityError, match="pool_size"):
            await tier.reserve(RoomRequest(keys_of(9), BLOCK, "evict"))
        async with await other.pin([]) as lease:
            with pytest.raises(ValueError, match="does not hold"):
                await tier.load(lease, PagesDestination.over([]))
        keys = keys_of(2)
        await store(tier, keys)
        async with await tier.pin(keys) as lease:
            with pytest.raises(BlockSizeError):
                await tier.load(lease, PagesDestination.over([bytearray(8) for _ in range(2)]))
            with pytest.raises(ValueError, match="do not fit"):
                await tier.load(lease, PagesDestination.over([bytearray(BLOCK)]))
        reservation = await tier.reserve(RoomRequest(keys_of(1, "n"), BLOCK, "fail"))
        source = memory(keys)
        with pytest.raises(ValueError, match="one ref per kept block"):
            await reservation.transfer(source, [0, 1])
        with pytest.raises(ValueError, match="were granted"):
            reservation.keep(keys_of(1, "other") * 0 + [b"a", b"b"])
        reservation.release()
        await all_is_free(tier, keys=keys)


async def test_a_quota_is_a_rejection_not_an_error() -> None:
    keys = keys_of(2)
    async with (
        open_test_server(quota_instance_bytes=2 * BLOCK, high_watermark=1.0) as server,
        MaruTier(handler_to(server.endpoints[0])) as tier,
    ):
        assert await store(tier, keys) == [STORED] * 2
        async with await tier.pin(keys):
            assert await store(tier, keys_of(1, "n")) == [Rejected("quota")]
        assert tier.statistics().reserved_blocks == 0


async def test_a_forgotten_reservation_and_a_forgotten_lease_give_back_what_they_hold() -> None:
    async with open_tier() as tier:
        keys = keys_of(3)
        await store(tier, keys)
        await tier.pin(keys)
        await tier.reserve(RoomRequest(keys_of(2, "n"), BLOCK, "fail"))
        await tier.contains(keys)
        await all_is_free(tier, keys=keys)


async def test_a_waiter_learns_of_room_that_another_process_makes() -> None:
    async with open_test_server(high_watermark=1.0) as server:
        url, keys = server.endpoints[0], keys_of(BLOCKS)
        async with MaruTier(handler_to(url)) as tier, MaruTier(handler_to(url)) as other:
            await store(tier, keys)
            lease = await other.pin(keys)
            with trio.move_on_after(0.2) as patience:
                await tier.reserve(RoomRequest(keys_of(1, "n"), BLOCK, "evict"))
            assert patience.cancelled_caught  # all of it is read over there
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store, tier, keys_of(2, "n"), "evict")
                await trio.sleep(0.1)
                await lease.release()
            assert await tier.contains(keys_of(2, "n")) == set(keys_of(2, "n"))
            await all_is_free(tier, other, keys=[*keys, *keys_of(2, "n")])


async def test_a_damaged_block_that_somebody_still_reads_is_not_found_here_and_goes_when_it_can() -> None:
    async with open_test_server() as server:
        url, keys = server.endpoints[0], keys_of(3)
        async with MaruTier(handler_to(url)) as tier, MaruTier(handler_to(url)) as other:
            await store(tier, keys)
            await flip(tier, keys[1])
            reader = await other.pin(keys)
            outcomes, _ = await load(tier, keys)
            assert outcomes == [LOADED, Missed("damaged"), LOADED]
            assert await tier.contains(keys) == {keys[0], keys[2]}
            async with await tier.pin(keys) as lease:
                assert list(lease.keys) == keys[:1]
            await reader.release()
            with trio.fail_after(PATIENCE):
                while await other.contains(keys) != {keys[0], keys[2]}:
                    await tier.purge()
            await all_is_free(tier, other, keys=keys)


async def test_few_damaged_blocks_are_deleted_before_a_question(monkeypatch) -> None:
    async with open_test_server() as server, MaruTier(handler_to(server.endpoints[0])) as tier:
        keys = keys_of(3_000)
        tier.damaged.add(types.SimpleNamespace(key=key, generation=1, era=tier.handler.era) for key in keys)
        asked, delete_pages = [], tier.handler.delete_pages

        def counted(names, generations):
            asked.append(len(names))
            return delete_pages(names, generations)

        monkeypatch.setattr(tier.handler, "delete_pages", counted)
        for _ in range(3):
            assert not await tier.contains(keys[:1])
        assert asked == [1_024, 1_024, 952]
        assert not tier.damaged


async def test_what_was_stored_anew_is_not_taken_for_the_damaged_one_that_went() -> None:
    async with open_test_server() as server:
        url, keys = server.endpoints[0], keys_of(3)
        async with MaruTier(handler_to(url)) as tier, MaruTier(handler_to(url)) as other:
            await store(tier, keys)
            await flip(tier, keys[1])
            reader = await other.pin(keys)
            assert (await load(tier, keys))[0] == [LOADED, Missed("damaged"), LOADED]
            await reader.release()
            with trio.fail_after(PATIENCE):
                while await other.delete(keys[1:2]) == [Deletion.PINNED]:  # another process comes first
                    pass
            assert await store(tier, keys[1:2]) == [STORED]
            assert await tier.contains(keys) == set(keys)
            assert await load(tier, keys) == ([LOADED] * 3, payloads(keys))
            await all_is_free(tier, other, keys=keys)


# --- copies -------------------------------------------------------------------------------------------------------


class Slow(MemoryTier):
    """Its blocks must be asked for, in a thread, which waits until it may go on."""

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__(len(keys) * BLOCK, BLOCK)
        for key in keys:
            self.put(key, payload_of(key, BLOCK))
        self.began, self.go_on = threading.Event(), threading.Event()

    def views(self, refs: Any) -> None:
        return

    def copy_out(self, refs: Any, pages: Any) -> None:
        self.began.set()
        assert self.go_on.wait(PATIENCE)
        super().copy_out(refs, pages)


async def test_pages_that_a_thread_may_still_write_are_not_free_before_it_is_over() -> None:
    async with open_tier() as tier:
        keys = keys_of(4)
        source = Slow(keys)
        reservation = await tier.reserve(RoomRequest(keys, BLOCK, "fail"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reservation.transfer, source, source.upgrade(keys))
            await trio.to_thread.run_sync(source.began.wait)
            nursery.cancel_scope.cancel()
        assert tier.statistics().reserved_blocks == 4
        del reservation  # forgotten by whoever should have quarantined it
        assert await store(tier, keys_of(4, "other")) == [STORED] * 4
        assert tier.reserve_nowait(RoomRequest(keys_of(1), BLOCK, "partial")).granted == []
        source.go_on.set()
        with trio.fail_after(PATIENCE):
            while tier.statistics().reserved_blocks:
                await tier.contains(keys)
        assert await tier.contains(keys) == set()
        assert (await load(tier, keys_of(4, "other")))[1] == payloads(keys_of(4, "other"))
        await all_is_free(tier, keys=keys_of(4, "other"))


async def test_a_pipeline_that_cannot_prove_the_end_of_a_copy_quarantines_its_pages() -> None:
    async with open_tier() as tier:
        keys = keys_of(4)
        source = Slow(keys)
        config = offload.PipelineConfig(transfer_timeout=0.2)
        async with offload.open_pipeline(source, tier, config=config, policies=[]) as pipeline:
            handle = await pipeline.enqueue(source.weak(keys), precondition=offload.NO_WAIT)
            result = await handle.wait()
            assert result.status is offload.Status.FAILED
            assert tier.statistics().reserved_blocks == 4
            source.go_on.set()
            [entry] = pipeline.quarantine
            entry.release()
            assert tier.statistics().reserved_blocks == 0
        assert await tier.contains(keys) == set()
        await all_is_free(tier, keys=keys)


# --- pipelines and engines ----------------------------------------------------------------------------------------


async def test_a_pipeline_stores_into_it_and_an_engine_of_it_loads_back() -> None:
    keys = keys_of(6)
    source = memory(keys)
    async with open_test_server() as server:
        tier = MaruTier(handler_to(server.endpoints[0]))
        async with offload.open_engine(source, [tier]) as engine:  # which opens it
            handle = await engine.store(source.weak(keys), precondition=offload.NO_WAIT)
            assert sorted((await handle.wait()).completed) == sorted(keys)
            again = await engine.store(source.weak(keys), precondition=offload.NO_WAIT)
            assert set((await again.wait()).filtered.values()) == {"present"}
            buffers = [bytearray(BLOCK) for _ in keys]
            async with await engine.lookup([*keys, b"no such block"]) as hit:
                assert hit.runs == [("maru", 6)]
                assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == 6
            assert buffers == payloads(keys)
            assert set(await engine.delete(keys)) == {Deletion.DELETED}
        assert not tier.handler.connected


async def test_a_store_without_room_names_its_knobs() -> None:
    keys = keys_of(BLOCKS + 1)
    async with open_test_server(capacity_bytes=BLOCKS * BLOCK, high_watermark=1.0) as server:
        tier = MaruTier(handler_to(server.endpoints[0], auto_expand=True, pool_size=4 * BLOCK))
        # A busy machine may take the tenth of a second that a question about presence has by default.
        source, config = memory(keys), offload.PipelineConfig(destination_timeout=0.05, policy_timeout=60.0)
        async with offload.open_engine(source, [tier], config=config) as engine:
            handle = await engine.store(source.weak(keys[:BLOCKS]), precondition=offload.NO_WAIT)
            assert (await handle.wait()).status is offload.Status.COMPLETE
            handle = await engine.store(source.weak(keys[BLOCKS:]), precondition=offload.NO_WAIT)
            text = str((await handle.wait()).error)
    assert f"pool_size = {4 * BLOCK} at first (auto_expand)" in text and f"room for {BLOCKS} blocks in all" in text
    assert "destination_timeout = 0.05 s" in text and 'on_destination_full = "wait" evicts nothing: set "evict"' in text


async def test_whoever_leaves_it_last_closes_what_was_opened_by_entering_it() -> None:
    source = memory(keys_of(1))
    async with open_test_server() as server:
        tier = MaruTier(handler_to(server.endpoints[0]))
        async with tier:
            async with offload.open_engine(source, [tier]):
                pass
            assert tier.handler.connected
        assert not tier.handler.connected
        async with handler_to(server.endpoints[0]) as handler:
            async with offload.open_engine(source, [MaruTier(handler)]):
                pass
            assert handler.connected  # it was open before


async def test_who_has_opened_it_leaves_last_whichever_task_the_others_are() -> None:
    async with open_test_server() as server:
        tier = MaruTier(handler_to(server.endpoints[0]))
        entered, leave, left = trio.Event(), trio.Event(), trio.Event()

        async def first() -> None:
            async with tier:
                entered.set()
                await leave.wait()
            left.set()

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first)
                await entered.wait()
                async with tier:
                    leave.set()
                    await trio.sleep(0.01)
                    assert not left.is_set()
                    assert await tier.contains(keys_of(1)) == set()
            assert left.is_set() and not tier.handler.connected
            with pytest.raises(ExceptionGroup):
                async with trio.open_nursery() as nursery:

                    async def fails() -> None:
                        async with tier:
                            entered.set()
                            await leave.wait()
                            raise ValueError("as told")

                    entered, leave = trio.Event(), trio.Event()
                    nursery.start_soon(fails)
                    await entered.wait()
                    async with tier:
                        leave.set()
                        await trio.sleep_forever()
            assert not tier.handler.connected


async def test_through_host_memory_and_chained_a_prefix_is_found_across_both() -> None:
    keys = keys_of(6)
    source, host = memory(keys), MemoryTier(6 * BLOCK, BLOCK)
    async with (
        open_test_server() as server,
        offload.open_engine(source, [host, MaruTier(handler_to(server.endpoints[0]))]) as engine,
    ):
        await (await engine.store(source.weak(keys), precondition=offload.NO_WAIT)).wait()
        await engine.drain()
        await host.delete([keys[0], keys[3]])
        buffers = [bytearray(BLOCK) for _ in keys]
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("maru", 1), ("memorytier", 2), ("maru", 1), ("memorytier", 2)]
            assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == 6
        assert buffers == payloads(keys)


async def test_the_page_store_may_be_the_faster_one_and_its_silence_leaves_it_out() -> None:
    keys = keys_of(4)
    source, slow = memory(keys), MemoryTier(4 * BLOCK, BLOCK)
    for key in keys:
        slow.put(key, payload_of(key, BLOCK))
    async with open_test_server() as server, open_lossy_wire(server.endpoints[0]) as wire:
        tier = MaruTier(handler_to(wire.endpoint, index="off"))  # or else it goes on without an answer
        async with offload.open_engine(source, [tier, slow], chain=False) as engine:
            await (await engine.store(source.weak(keys[:2]), precondition=offload.NO_WAIT)).wait()
            async with await engine.lookup(keys) as hit:
                assert hit.runs == [("maru", 2), ("memorytier", 2)]
            wire.decide = lambda code, number: Fate.LOSE_REQUEST
            async with impatient(tier.handler), await engine.lookup(keys) as hit:
                assert hit.runs == [("memorytier", 4)]
                assert list(hit.unavailable) == ["maru"]
            wire.decide = lambda code, number: Fate.PASS
            assert dict(engine.statistics().lookup_failures) == {"maru": 1}


async def test_from_device_tensors_in_one_hop_and_back() -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    from backends.device import DeviceTier

    layers = [
        torch.randint(-128, 127, (2, 16, 64, 64), dtype=torch.int8) for _ in range(4)
    ]  # 8 pieces of 4 KiB a block
    before = [layer.clone() for layer in layers]
    device = DeviceTier(layers, block_axis=1)
    keys = keys_of(8)
    async with open_test_server() as server:
        handler = handler_to(server.endpoints[0], chunk_size_bytes=device.block_bytes)
        async with offload.open_engine(device, [MaruTier(handler)]) as engine:
            stored = await engine.store(device.external(range(8), keys), precondition=offload.NO_WAIT)
            assert (await stored.wait()).status is offload.Status.COMPLETE
            async with await engine.lookup(keys) as hit:
                assert (await engine.load(hit, device.into(range(15, 7, -1)))).loaded == 8
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[:, 8:], was[:, :8].flip(1))
        assert torch.equal(layer[:, :8], was[:, :8])


async def test_from_a_thread_the_engine_opens_it_in_its_own() -> None:
    keys = keys_of(4)
    source = memory(keys)

    def engine_thread(url: str) -> int:
        with from_thread.open_engine(source, [MaruTier(handler_to(url))]) as engine:
            engine.store(source.weak(keys), precondition=offload.NO_WAIT).result(PATIENCE)
            with engine.lookup(keys) as hit:
                buffers = [bytearray(BLOCK) for _ in hit.keys]
                loaded = engine.load(hit, PagesDestination.over(buffers)).loaded
            assert buffers == payloads(keys)
            return loaded

    async with open_test_server() as server:
        assert await trio.to_thread.run_sync(engine_thread, server.endpoints[0]) == 4


# --- lost answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", [Fate.LOSE_ANSWER, Fate.LOSE_REQUEST, Fate.HOLD_REQUEST, Fate.TWICE])
async def test_an_answer_that_is_lost_costs_no_page_and_tells_no_lie(fate: Fate) -> None:
    keys = keys_of(4)
    async with (
        open_test_server() as server,
        open_lossy_wire(server.endpoints[0]) as wire,
        MaruTier(handler_to(wire.endpoint)) as tier,
    ):
        await store(tier, keys_of(2, "before"))
        seen: list[int] = []

        def decide(code: int, number: int) -> Fate:
            if code != Code.STORE or seen:
                return Fate.PASS
            seen.append(number)
            return fate

        wire.decide = decide
        async with impatient(tier.handler, 0.15, Code.STORE):
            outcomes = await store(tier, keys)
        assert seen
        wire.release()  # the store that was fenced arrives all the same, and is refused
        if fate in (Fate.LOSE_ANSWER, Fate.TWICE):
            assert outcomes == [STORED] * 4
            assert (await load(tier, keys))[1] == payloads(keys)
        else:
            assert all(isinstance(outcome, Failed) for outcome in outcomes)
            assert await tier.contains(keys) == set()
            assert await store(tier, keys) == [STORED] * 4
        assert tier.statistics().reserved_blocks == 0
        await all_is_free(tier, keys=[*keys, *keys_of(2, "before")])


# --- processes ----------------------------------------------------------------------------------------------------

_READER = """
import json, sys, trio
from backends.abc import RoomRequest
from backends.maru import MaruTier
from backends.testing import payload_of
from maru import MaruHandler

async def main(url, size, keys):
    keys = [bytes.fromhex(key) for key in keys]
    async with MaruTier(MaruHandler(server_url=url, chunk_size_bytes=size, pool_size=0)) as tier:
        async with await tier.pin(keys) as lease:
            same = [bytes(view) == payload_of(key, size) for key, view in zip(keys, lease.views)]
            lease.check()
    print(json.dumps({"held": len(lease.keys), "same": same}))

trio.run(main, *json.loads(sys.argv[1]))
"""


async def test_another_process_reads_the_very_pages_without_a_copy() -> None:
    keys = keys_of(5)
    async with open_test_server() as server:
        url = server.endpoints[0]
        async with MaruTier(handler_to(url)) as tier:
            await store(tier, keys)
            job = json.dumps([url, BLOCK, [key.hex() for key in keys]])
            command = [sys.executable, "-c", _READER, job]
            done = await trio.run_process(command, capture_stdout=True)
            assert json.loads(done.stdout) == {"held": 5, "same": [True] * 5}
            await all_is_free(tier, keys=keys)


_OWNER = """
import json, sys, trio
from backends.abc import RoomRequest
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from maru import MaruHandler

async def main(url, size, keys):
    keys = [bytes.fromhex(key) for key in keys]
    source = MemoryTier(len(keys) * size, size)
    for key in keys:
        source.put(key, payload_of(key, size))
    handler = MaruHandler(server_url=url, chunk_size_bytes=size, pool_size=16 * size, lease=1.0)
    async with MaruTier(handler) as tier:
        requests = [RoomRequest(some, size, "fail") for some in (keys[:-2], keys[-2:])]
        stored, never = [await tier.reserve(request) for request in requests]
        await stored.transfer(source, source.upgrade(keys[:-2]))
        lease = await tier.pin(keys)
        print("has them", flush=True)
        await trio.sleep_forever()

trio.run(main, *json.loads(sys.argv[1]))
"""


async def test_of_an_owner_that_is_killed_what_it_committed_is_read_and_the_rest_is_nowhere() -> None:
    keys = keys_of(6)
    async with open_test_server() as server, trio.open_nursery() as nursery:
        url = server.endpoints[0]
        command = [sys.executable, "-c", _OWNER, json.dumps([url, BLOCK, [key.hex() for key in keys]])]
        start = partial(trio.run_process, command, capture_stdout=False, stdout=subprocess.PIPE, check=False)
        owner: trio.Process = await nursery.start(start)
        assert owner.stdout is not None
        assert await owner.stdout.receive_some()
        directory = server.statistics().service.directory
        assert (directory.entries, directory.pinned) == (4, 4)
        began = trio.current_time()
        owner.kill()
        await owner.wait()
        async with MaruTier(handler_to(url)) as tier:
            outcomes, buffers = await load(tier, keys)
            assert outcomes == [LOADED] * 4
            assert buffers[:4] == payloads(keys[:4])
            assert await tier.contains(keys) == set(keys[:4])
            with trio.fail_after(PATIENCE):
                while Deletion.PINNED in await tier.delete(keys):  # noqa: ASYNC110
                    await trio.sleep(0.1)
                assert trio.current_time() - began > 0.6  # the dead one's pins: as long as its lease
                while (directory := server.statistics().service.directory).regions > 1:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            assert (directory.entries, directory.pinned, directory.abandoned) == (0, 0, 0)
            assert await store(tier, keys) == [STORED] * 6
            await all_is_free(tier, keys=keys)


async def test_a_server_that_is_killed_while_we_store_loses_nothing_that_was_acknowledged() -> None:
    with temporary_pool() as pool, Server(pool, "--high-watermark", "1.0") as server:
        knobs = {"pool_size": 32 * BLOCK, "lease": 5.0}
        async with MaruTier(handler_to(server.ipc, **knobs)) as tier:
            acknowledged = keys_of(1, "before")
            assert await store(tier, acknowledged, "evict") == [STORED]
            tried = acknowledged[:]

            async def store_on() -> None:
                for number in range(24):
                    key = f"number {number:04}".encode()
                    tried.append(key)
                    try:
                        outcomes = await store(tier, [key], "evict")
                    except MaruError:  # the server is away
                        continue
                    acknowledged.extend([key] if outcomes == [STORED] else [])
                    await trio.sleep(0.005)

            async with impatient(tier.handler, 0.3), trio.open_nursery() as nursery:
                nursery.start_soon(store_on)
                for _ in range(2):
                    least = len(tried) + 4
                    await until(lambda least=least: len(tried) > min(least, 23))  # type: ignore[misc]
                    await trio.to_thread.run_sync(server.restart)
            with trio.fail_after(PATIENCE):
                while tier.statistics().reserved_blocks:
                    await tier.contains(tried)
                    await trio.sleep(0.05)
            assert await tier.contains(acknowledged) == set(acknowledged)
            for key in await tier.contains(tried):
                outcomes, [found] = await load(tier, [key])
                assert outcomes == [LOADED]
                assert found == payload_of(key, BLOCK)
            with trio.fail_after(PATIENCE):
                while Deletion.PINNED in await tier.delete(tried):  # quiet time: nothing goes right after a restart
                    await tier.handler.healthcheck()
            await all_is_free(tier, keys=tried)


# --- a device that copies by itself -------------------------------------------------------------------------------


async def test_pages_are_registered_with_cuda_where_it_is_those_of_others_to_be_read() -> None:
    keys = keys_of(3)
    with process_with_cuda() as cuda:
        async with open_test_server() as server:
            url = server.endpoints[0]
            async with MaruTier(handler_to(url)) as tier, MaruTier(handler_to(url, pool_size=0)) as other:
                reservation = await tier.reserve(RoomRequest(keys_of(1, "n"), BLOCK, "fail"))
                [own] = cuda.registered.values()
                assert all(own.address <= at < own.address + own.nbytes for at in reservation.pages.addresses)
                reservation.release()
                await store(tier, keys)
                assert (await load(other, keys))[1] == payloads(keys)
                assert sorted(span.read_only for span in cuda.registered.values()) == [False, True]
                del reservation
