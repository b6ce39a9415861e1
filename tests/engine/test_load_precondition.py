"""A load writes to its destination once its precondition holds, and on a device it needs one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
import trio.testing

from backends.abc import Destination, Key
from backends.base.block_layout import TensorMemory
from backends.base.copier import close_copiers
from backends.base.pages import Pages, copy_pages, pages_of
from backends.base.slots import PagesDestination
from backends.device import DeviceTier
from backends.memory import MemoryTier
from backends.testing import FakeTier, payload_of
from backends.wrappers import Zstd, slot_bytes, wrap
from maru.fake_cuda import FakeCuda, use
from offload import NO_WAIT, PreconditionFailed, from_thread, open_engine
from offload.abc import Precondition
from tests.support.engine_places import SIZE, Places, cancelled_at_checkpoint, keys_of, payloads, room
from tests.support.maru_processes import eventually

SOON = 60.0
MISSING = r"precondition is missing: .* is on a device.* Pass an event .* or offload\.NO_WAIT"


class OnDevice(Destination):
    """Places that a device writes to; ``on_arrival`` is called as soon as a copy begins."""

    on_device = True
    block_bytes = SIZE

    def __init__(self, n: int) -> None:
        self.buffers = [bytearray(SIZE) for _ in range(n)]
        self.copies = 0

    def __len__(self) -> int:
        return len(self.buffers)

    def views(self) -> None:
        return None

    def copy_in(self, start: int, pages: Pages) -> None:
        self.copies += 1
        copy_pages(pages_of(self.buffers[start : start + len(pages)]), pages)


class Fails(Precondition):
    """Never holds, and says so."""

    def is_set(self) -> bool:
        return False

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError("the device is lost")


# --- what has to be said ----------------------------------------------------------------------------------------------


async def test_load_to_device_without_precondition_is_a_type_error() -> None:
    places, keys = Places(1), keys_of(2)
    places["a"].fill(keys)
    async with places.open() as engine, await engine.lookup(keys) as hit:
        there = OnDevice(2)
        with pytest.raises(TypeError, match=MISSING):
            await engine.load(hit, there)
        assert not there.copies
        assert (await engine.load(hit, there, precondition=NO_WAIT)).loaded == 2
        assert there.buffers == payloads(keys)
    places.assert_at_rest()


def test_threads_are_told_in_the_call_that_precondition_is_missing() -> None:
    with from_thread.open_engine(FakeTier(4, SIZE), [FakeTier(4, SIZE)]) as engine, engine.lookup([]) as hit:
        for load in (engine.load, engine.begin_load):
            with pytest.raises(TypeError, match=MISSING):
                load(hit, OnDevice(1))
            with pytest.raises(TypeError, match="not a precondition"):
                load(hit, room(1)[1], precondition=threading.Event())  # type: ignore[arg-type]
        assert engine.begin_load(hit, OnDevice(1), precondition=NO_WAIT).result(SOON).loaded == 0


def test_blocks_of_a_cache_say_whether_they_lie_on_a_device() -> None:
    tier = DeviceTier([torch.zeros(4, 16)])
    assert not tier.into([0]).on_device  # type: ignore[attr-defined]
    tier.device = 0
    assert tier.into([0]).on_device  # type: ignore[attr-defined]


class Asked(MemoryTier):
    """Notes what each load says of its destination."""

    told: bool | None = None

    async def load(self, lease, destination):  # type: ignore[no-untyped-def]
        self.told = getattr(destination, "on_device", False)
        return await super().load(lease, destination)


@pytest.mark.parametrize("on_device", [True, False])
async def test_a_tier_is_told_through_parts_breakers_and_wrappers(on_device: bool) -> None:
    keys, source = keys_of(4), FakeTier(64, SIZE)
    slot = slot_bytes(SIZE, Zstd())
    upper, lower = Asked(4 * SIZE, SIZE), Asked(4 * slot, slot)
    source.fill(keys)
    async with open_engine(source, {"upper": upper, "lower": wrap(lower, Zstd(), block_bytes=SIZE)}) as engine:
        await engine.store(source.strong(keys), NO_WAIT)
        await engine.drain()
        await upper.delete(keys[2:])
        async with await engine.lookup(keys) as hit:
            assert hit.runs == [("upper", 2), ("lower", 2)]
            there = OnDevice(4)
            there.on_device = on_device
            assert (await engine.load(hit, there, precondition=NO_WAIT)).loaded == 4
    assert (upper.told, lower.told) == (on_device, on_device)


# --- the order --------------------------------------------------------------------------------------------------------


async def test_nothing_is_copied_before_the_precondition_holds(autojump_clock: trio.testing.MockClock) -> None:
    places, keys = Places(2), keys_of(4)
    places["a"].fill(keys[:2])
    places["b"].fill(keys[2:])
    async with places.open() as engine, await engine.lookup(keys) as hit, trio.open_nursery() as nursery:
        there, computed = OnDevice(4), trio.Event()
        loaded: list[int] = []

        async def load() -> None:
            loaded.append((await engine.load(hit, there, precondition=computed)).loaded)

        nursery.start_soon(load)
        await trio.sleep(3600)
        for buffer in there.buffers:  # queued work of the engine on these blocks
            buffer[:] = bytes(SIZE)
        assert not there.copies and not loaded
        computed.set()
        await trio.sleep(1)
        assert loaded == [4] and there.buffers == payloads(keys)
    places.assert_at_rest()


async def test_load_to_host_memory_waits_for_its_precondition_also_if_it_could_be_read_at_once() -> None:
    host, keys, computed = MemoryTier(4 * SIZE, SIZE), keys_of(2), trio.Event()
    for key in keys:
        host.put(key, payload_of(key, SIZE))
    async with open_engine(FakeTier(4, SIZE), [host]) as engine, await engine.lookup(keys) as hit:
        assert engine.direct.serves
        buffers, destination = room(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: engine.load(hit, destination, precondition=computed))
            await trio.testing.wait_all_tasks_blocked()
            assert buffers == [bytearray(SIZE)] * 2
            computed.set()
        assert buffers == payloads(keys)


async def test_load_keeps_a_released_hit_pinned_while_it_waits() -> None:
    places, keys = Places(1), keys_of(2)
    places["a"].fill(keys)
    async with places.open() as engine:
        hit, computed = await engine.lookup(keys), trio.Event()
        buffers, destination = room(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: engine.load(hit, destination, precondition=computed))
            await trio.testing.wait_all_tasks_blocked()
            await engine.release(hit)
            assert places["a"].statistics().held_blocks == 2
            computed.set()
        assert buffers == payloads(keys)
    places.assert_at_rest()


async def test_a_failing_precondition_fails_the_load_and_nothing_is_copied() -> None:
    places, keys = Places(1), keys_of(2)
    places["a"].fill(keys)
    async with places.open() as engine:
        there = OnDevice(2)
        async with await engine.lookup(keys) as hit:
            with pytest.raises(PreconditionFailed, match="the device is lost") as raised:
                await engine.load(hit, there, precondition=Fails())
            assert isinstance(raised.value.__cause__, OSError)
        assert not there.copies and engine.statistics().loads == 0
    places.assert_at_rest()


async def test_a_cancelled_wait_gives_back_the_pins() -> None:
    places, keys = Places(1), keys_of(2)
    places["a"].fill(keys)
    async with places.open() as engine:
        there, hit = OnDevice(2), await engine.lookup(keys)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: engine.load(hit, there, precondition=trio.Event()))
                await trio.testing.wait_all_tasks_blocked()
                await engine.release(hit)
                scope.cancel()
        assert not there.copies
        places.assert_at_rest()


async def test_a_load_that_waits_may_be_cancelled_at_every_step() -> None:
    places, keys = Places(1), keys_of(2)
    places["a"].fill(keys)
    async with places.open() as engine:
        for step in range(100):
            there, computed = OnDevice(2), trio.Event()
            computed.set()
            hit = await engine.lookup(keys)

            async def load(hit=hit, there=there, computed=computed) -> None:  # type: ignore[no-untyped-def]
                async with hit:
                    await engine.load(hit, there, precondition=computed.wait)

            over = not await cancelled_at_checkpoint(step, load)
            places.assert_at_rest()
            if over:
                break
        assert over and there.buffers == payloads(keys)


async def test_a_store_does_not_yield_to_a_load_that_still_waits(autojump_clock: trio.testing.MockClock) -> None:
    places, keys, others = Places(1), keys_of(2), keys_of(8, "other")
    places["a"].fill(keys)
    places.source.fill(others)
    async with places.open() as engine, await engine.lookup(keys) as hit, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: engine.load(hit, OnDevice(2), precondition=trio.Event()))
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await (await engine.store(places.source.weak(others), NO_WAIT)).wait()
        assert trio.current_time() - began < 0.5  # of the second that a store yields to a load
        nursery.cancel_scope.cancel()


# --- a device ---------------------------------------------------------------------------------------------------------


class Recorded:
    """A torch.cuda.Event, recorded on a stream."""

    def __init__(self, driver: Any, stream: Any) -> None:
        self.device, self.cuda_event = SimpleNamespace(type="cuda", index=0), driver.event()
        self._driver = driver
        driver.record(self.cuda_event, stream)

    def query(self) -> bool:
        return self._driver.query(self.cuda_event)

    def synchronize(self) -> None:
        raise AssertionError("blocks")


async def test_what_is_loaded_is_not_zeroed_by_work_that_was_queued_before() -> None:
    keys, fake, reached = keys_of(2), FakeCuda(), threading.Event()
    with use(fake) as driver:
        driver.attach(0)
        address, compute = driver.allocate(4 * SIZE), driver.stream()
        cache = DeviceTier([TensorMemory(address, (4, SIZE), (SIZE, 1), 1, "uint8", 0, None)])
        host = MemoryTier(4 * SIZE, SIZE)
        for key in keys:
            host.put(key, payload_of(key, SIZE))
        try:
            async with open_engine(cache, [host], shadow_check=0) as engine, await engine.lookup(keys) as hit:
                with pytest.raises(TypeError, match=MISSING):
                    await engine.load(hit, cache.into([2, 1]))
                fake.kernel(compute, lambda: fake.write(address, bytes(4 * SIZE)), reached)
                computed = Recorded(driver, compute)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda: engine.load(hit, cache.into([2, 1]), precondition=computed))
                    await trio.to_thread.run_sync(lambda: eventually(lambda: fake.calls.count("cuEventQuery") > 3))
                    assert "cuMemcpyBatchAsync" not in fake.calls
                    fake.open_gate(reached)
                    fake.progress()
            fake.progress()
            found = [fake.read(address + at * SIZE, SIZE) for at in (2, 1)]
            assert found == payloads(keys)
        finally:
            close_copiers()
    assert not fake.wrong


# --- threads ----------------------------------------------------------------------------------------------------------


def threads_engine(keys: Sequence[Key]):  # type: ignore[no-untyped-def]
    host = MemoryTier(len(keys) * SIZE, SIZE)
    for key in keys:
        host.put(key, payload_of(key, SIZE))
    return host, from_thread.open_engine(FakeTier(4, SIZE), [host])


@pytest.mark.parametrize("holds", [True, False])
def test_a_thread_reads_itself_only_if_the_precondition_holds_already(holds: bool) -> None:
    keys, computed = keys_of(2), from_thread.Event()
    if holds:
        computed.set()
    _, opened = threads_engine(keys)
    with opened as engine, engine.lookup(keys) as hit:
        buffers, destination = room(2)
        load = engine.begin_load(hit, destination, precondition=computed)
        assert load.done() is holds
        engine.call(lambda: None)  # the engine's thread has seen it
        assert (buffers == payloads(keys)) is holds
        computed.set()
        assert load.result(SOON).loaded == 2 and buffers == payloads(keys)
        buffers, destination = room(2)
        assert engine.load(hit, destination, precondition=computed).loaded == 2 and buffers == payloads(keys)


def test_a_thread_cancels_a_load_that_waits_and_its_pins_are_gone() -> None:
    keys = keys_of(2)
    host, opened = threads_engine(keys)
    with opened as engine:
        there = OnDevice(2)
        with engine.lookup(keys) as hit:
            load = engine.begin_load(hit, there, precondition=from_thread.Event())
        load.cancel(SOON)
        with pytest.raises(from_thread.CallCancelled):
            load.result(0)
        assert engine.delete(keys) and not there.copies
        assert engine.call(host.statistics).held_blocks == 0


def test_the_timeout_of_a_load_bounds_its_wait() -> None:
    keys = keys_of(2)
    host, opened = threads_engine(keys)
    with opened as engine:
        there = OnDevice(2)
        with engine.lookup(keys) as hit, pytest.raises(from_thread.WaitTimeout):
            engine.load(hit, there, 0.01, precondition=from_thread.Event())
        assert engine.delete(keys) and not there.copies
        assert engine.call(host.statistics).held_blocks == 0


def test_a_precondition_that_fails_is_the_result_of_a_begun_load() -> None:
    keys = keys_of(2)
    _, opened = threads_engine(keys)
    with opened as engine, engine.lookup(keys) as hit:
        load = engine.begin_load(
            hit, PagesDestination.over([bytearray(SIZE)] * 1 + [bytearray(SIZE)]), precondition=Fails()
        )
        with pytest.raises(PreconditionFailed, match="the device is lost"):
            load.result(SOON)
