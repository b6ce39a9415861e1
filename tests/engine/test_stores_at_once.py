"""Stores that the calling thread makes itself, while the engine's thread waits for events."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

import pytest

import offload
from backends.abc import Deletion, Key
from backends.base.slots import PORTION_BYTES, PagesDestination, SlotTier
from backends.memory import MemoryTier
from offload import NO_WAIT, PassAll, PipelineConfig, Status, block_key, from_thread
from tests.support.maru_processes import eventually

SIZE = 64
SOON = 60.0
R = TypeVar("R")


def keys_of(n: int, start: int = 0) -> list[Key]:
    return [block_key(b"%d" % number) for number in range(start, start + n)]


def payload(key: Key) -> bytes:
    return (key * SIZE)[:SIZE]


def memory(blocks: int, **more: Any) -> MemoryTier:
    return MemoryTier(SIZE * blocks, SIZE, **more)


class Writer:
    """An engine's memory: blocks that it has written and keeps until their store has ended."""

    def __init__(self, n: int = 16) -> None:
        self.place = memory(n)
        self.slots = self.place.stage(n)

    def blocks(self, keys: Sequence[Key], at: int = 0) -> Any:
        slots = self.slots[at : at + len(keys)]
        pages = self.place.views(slots)
        assert pages is not None
        for place, key in zip(range(len(keys)), keys, strict=True):
            pages[place][:] = payload(key)
        return self.place.external(slots, keys)


def elsewhere(function: Callable[..., R], *args: Any) -> R:
    """Call a function in another thread than the main thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(SOON)


def wait_idle(engine: from_thread.Engine) -> None:
    """Until the engine's thread waits for events, and lets other threads act. Not in the main thread."""
    worker = engine._worker

    def is_idle() -> bool:
        if worker.mailbox.wake_pending or not worker.loop_lock.take_nowait():
            return False
        worker.loop_lock.release()
        return True

    if worker.engine.stores_at_once:  # elsewhere it lets nobody act, idle or not
        eventually(is_idle)


def store_idle(engine: from_thread.Engine, blocks: Any, **more: Any) -> Any:
    """Store in a thread, while the engine's thread waits for events."""

    def store() -> Any:
        wait_idle(engine)
        return engine.store(blocks, NO_WAIT, **more)

    return elsewhere(store)


@contextmanager
def sent(engine: from_thread.Engine) -> Iterator[list[Any]]:
    """The stores that are sent to the engine's thread meanwhile."""
    worker, seen = engine._worker, list[Any]()
    handle = worker._handle_message

    def see(message: Any) -> None:
        seen.append(message)
        handle(message)

    worker.mailbox._open = see
    try:
        yield seen
    finally:
        worker.mailbox._open = handle


def load(engine: from_thread.Engine, keys: Sequence[Key]) -> list[bytes]:
    buffers = [bytearray(SIZE) for _ in keys]
    with engine.lookup(keys, SOON) as hit:
        assert list(hit.keys) == list(keys)
        engine.load(hit, PagesDestination.over(buffers), SOON)
    return [bytes(buffer) for buffer in buffers]


def at_rest(engine: from_thread.Engine, *tiers: MemoryTier) -> None:
    statistics = engine.statistics(SOON)
    assert statistics.in_flight_blocks == statistics.unreleased_hits == statistics.unpolled_futures == 0
    for pipeline in statistics.engine.pipelines.values():
        assert (pipeline.used_blocks, pipeline.inside, pipeline.pending_marks, pipeline.quarantined) == (0, 0, 0, 0)
    for tier in tiers:
        assert (tier.statistics().held_blocks, tier.statistics().reserved_blocks) == (0, 0)


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [False, True])
def test_a_store_of_a_thread_into_memory_is_done_when_it_returns(checksums: bool) -> None:
    writer, host, keys = Writer(), memory(8, checksums=checksums), keys_of(3)
    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        with sent(engine) as messages:
            future = store_idle(engine, writer.blocks(keys))
            assert future.done()
            assert not messages
        assert future.result().status is Status.COMPLETE
        assert set(future.result().completed) == set(keys)
        assert load(engine, keys) == [payload(key) for key in keys]
        at_rest(engine, host)


def test_it_is_counted_as_one_that_was_sent() -> None:
    counted = []
    for here in (True, False):
        writer, host = Writer(), memory(4)
        with from_thread.open_engine(
            writer.place, {"host": host}, config=PipelineConfig(on_destination_full="evict")
        ) as engine:
            for keys in (keys_of(3), keys_of(1), keys_of(3, 3)):  # new, there already, two must go
                blocks = writer.blocks(keys)
                result = (store_idle(engine, blocks) if here else engine.store(blocks, NO_WAIT)).result(SOON)
                assert result.status is Status.COMPLETE
            there = engine.call(host.list_keys)
            counted.append((engine.statistics(SOON).engine.pipelines, host.statistics(), sorted(there)))
            gone = next(key for key in keys_of(6) if key not in there)
            assert "evicted" in str(engine.explain(gone, SOON))
    assert counted[0] == counted[1]


def test_one_that_was_there_is_filtered() -> None:
    writer, host, keys = Writer(), memory(4), keys_of(1)
    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        store_idle(engine, writer.blocks(keys))
        again = store_idle(engine, writer.blocks(keys))
        assert again.done()
        assert again.result().filtered == {keys[0]: "present"}
        at_rest(engine, host)


def test_each_is_polled_once_and_gives_its_room_back() -> None:
    writer, host = Writer(), memory(8)
    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        fd = engine.fileno()
        assert fd >= 0
        futures = [store_idle(engine, writer.blocks([key], at)) for at, key in enumerate(keys_of(3))]
        assert engine.statistics(SOON).in_flight_blocks == 3
        assert [future for future in engine.poll() if future in futures] == futures
        assert not engine.poll()
        at_rest(engine, host)


def test_a_callback_is_called_in_the_thread_that_stores() -> None:
    writer, host = Writer(), memory(8)
    called: list[threading.Thread] = []

    def store() -> threading.Thread:
        wait_idle(engine)
        future = engine.store(writer.blocks(keys_of(1)), NO_WAIT)
        future.add_done_callback(lambda _: called.append(threading.current_thread()))
        return threading.current_thread()

    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        thread = elsewhere(store)
        assert called == [thread]


# --- what is sent to the engine's thread instead --------------------------------------------------------------------------


class Observer:
    """An instrument that does not say that any thread may call it."""

    def settled(self, container: object) -> None:
        pass


class OwnPolicy:
    """A policy that does not say that any thread may call it."""

    def __call__(self, keys: Sequence[Key]) -> dict[Key, str]:
        assert threading.current_thread().name == "offload engine"
        return {}


@pytest.mark.parametrize(
    "why", ["instrument", "policy", "chain", "watched keys", "weak", "too large", "load under way", "main thread"]
)
def test_what_may_have_to_wait_is_sent(why: str) -> None:
    writer, host, keys = Writer(), memory(8), keys_of(2)
    tiers: dict[str, Any] = {"host": host}
    more: dict[str, Any] = {}
    if why == "instrument":
        more["instruments"] = [Observer()]
    elif why == "policy":
        more["policies"] = [OwnPolicy()]
    elif why == "chain":
        tiers["below"] = memory(8)
    blocks = writer.blocks(keys)
    if why == "weak":
        writer = Writer(1)
        writer.place.unstage(writer.slots)
        writer.place.put(keys[0], payload(keys[0]))
        keys = keys[:1]
        blocks = writer.place.weak(keys)
    elif why == "too large":
        size = PORTION_BYTES * 2
        place, host = MemoryTier(size, size), MemoryTier(size, size)
        tiers = {"host": host}
        keys = keys[:1]
        blocks = place.external(place.stage(1), keys)
    with from_thread.open_engine(blocks.source, tiers, **more) as engine, sent(engine) as messages:
        if why == "watched keys":

            class Watcher:
                def stored(self, keys: object) -> None: ...
                def removed(self, keys: object) -> None: ...
                def cleared(self) -> None: ...

            engine.watch_keys(lambda name: Watcher())
        loading = engine.call(lambda: engine._worker.engine._load_priority.loading()) if "load" in why else None
        if loading is not None:
            engine.call(loading.__enter__)
        messages.clear()
        future = engine.store(blocks, NO_WAIT) if why == "main thread" else store_idle(engine, blocks)
        if loading is not None:
            elsewhere(lambda: eventually(lambda: bool(messages)))
            engine.call(loading.__exit__, None, None, None)
        assert future.result(SOON).status is Status.COMPLETE
        assert future in messages
        engine.drain(SOON)
        at_rest(engine, host)


def test_a_store_while_the_engine_is_busy_is_sent() -> None:
    writer, host, keys = Writer(), memory(8), keys_of(1)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(SOON)

    with from_thread.open_engine(writer.place, {"host": host}) as engine, ThreadPoolExecutor(1) as pool:
        holder = pool.submit(engine.call, hold)
        assert held.wait(SOON)
        future = elsewhere(lambda: engine.store(writer.blocks(keys), NO_WAIT))
        assert not future.done()
        go_on.set()
        assert future.result(SOON).status is Status.COMPLETE
        holder.result(SOON)
        at_rest(engine, host)


def forked() -> int:
    """In a child: whether its main thread may act, though the engine's thread would let others do so."""
    child = os.fork()
    if not child:
        status = 2
        try:
            with from_thread.open_engine(Writer().place, {"host": memory(8)}) as engine:
                lock = engine._worker.loop_lock
                eventually(lambda: not lock._lock.locked())
                status = int(lock.take_nowait())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_thread_that_has_forked_is_the_main_thread_of_the_child() -> None:
    assert elsewhere(forked) == 0


def test_an_engine_that_makes_no_such_stores_has_no_lock_to_pay_for() -> None:
    writer, host, below = Writer(), memory(8), memory(8)
    with from_thread.open_engine(writer.place, {"host": host, "below": below}) as engine:
        future = elsewhere(engine.store, writer.blocks(keys_of(1)), NO_WAIT)
        assert future.result(SOON).status is Status.COMPLETE
        assert not elsewhere(engine._worker.loop_lock.take_nowait)


def test_policies_of_ours_may_be_asked_in_any_thread() -> None:
    writer, host = Writer(), memory(8)
    with from_thread.open_engine(writer.place, {"host": host}, policies=[PassAll()]) as engine:
        assert store_idle(engine, writer.blocks(keys_of(1))).done()


# --- no room: from there on the ordinary way --------------------------------------------------------------------------------


class Asked:
    """Counts how often it is asked."""

    in_any_thread = True

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, keys: Sequence[Key]) -> dict[Key, str]:
        self.times += 1
        return {}


@contextmanager
def full(policy: Any) -> Iterator[tuple[from_thread.Engine, MemoryTier, from_thread.Hit, Any]]:
    """An engine whose only block is held, and a store that waits for its room."""
    writer, host, keys = Writer(), memory(1), keys_of(2)
    config = PipelineConfig(on_destination_full="evict", destination_timeout=SOON)
    with from_thread.open_engine(writer.place, {"host": host}, policies=[policy], config=config) as engine:
        assert store_idle(engine, writer.blocks(keys[:1])).done()
        hit = engine.lookup(keys[:1])
        policy.times = 0
        future = store_idle(engine, writer.blocks(keys[1:], 1))
        yield engine, host, hit, future
        hit.release()


def test_what_finds_no_room_waits_for_it_and_its_policies_are_asked_once() -> None:
    policy = Asked()
    with full(policy) as (engine, host, hit, future):
        assert not future.done()
        hit.release()
        assert future.result(SOON).status is Status.COMPLETE
        assert policy.times == 1
        assert load(engine, keys_of(1, 1)) == [payload(key) for key in keys_of(1, 1)]
        at_rest(engine, host)


def test_what_waits_for_room_so_can_be_cancelled() -> None:
    with full(Asked()) as (engine, host, hit, future):
        future.cancel(SOON)
        assert future.result(0).status is Status.CANCELLED
        hit.release()
        at_rest(engine, host)


def test_a_cancel_before_the_engine_has_gone_on_with_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancel comes between the thread that has admitted it, and the engine's thread that goes on with it."""
    writer, host, keys = Writer(), memory(1), keys_of(2)
    config = PipelineConfig(on_destination_full="evict", destination_timeout=SOON)
    with from_thread.open_engine(writer.place, {"host": host}, config=config) as engine:
        store_idle(engine, writer.blocks(keys[:1]))
        hit = engine.lookup(keys[:1])
        pipeline = engine._worker.engine.pipelines[0]
        resume = pipeline.resume

        def cancelled_before(handle: Any) -> None:
            handle.request_cancel()
            resume(handle)

        monkeypatch.setattr(pipeline, "resume", cancelled_before)
        future = store_idle(engine, writer.blocks(keys[1:], 1))
        assert future.result(SOON).status is Status.CANCELLED
        hit.release()
        at_rest(engine, host)


def test_closing_ends_what_waits_for_room_so() -> None:
    with full(Asked()) as (engine, _, _, future):
        engine.close(SOON)
        assert future.result(0).status is Status.FAILED


# --- the lock of the loop ---------------------------------------------------------------------------------------------------


def test_no_store_is_made_in_the_main_thread_nor_behind_the_end() -> None:
    writer, host = Writer(), memory(8)
    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        lock = engine._worker.loop_lock
        elsewhere(wait_idle, engine)
        assert not lock.take_nowait()
    assert not elsewhere(lock.take_nowait)
    with pytest.raises(offload.PipelineClosed):
        elsewhere(engine.store, writer.blocks(keys_of(1)), NO_WAIT)


def test_the_engine_waits_for_the_thread_that_stores_and_lets_no_second_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, host, keys = Writer(), memory(8), keys_of(2)
    inside, go_on = threading.Event(), threading.Event()
    write = SlotTier.write

    async def slow(self: Any, *args: Any) -> Any:
        if threading.current_thread().name != "offload engine":
            inside.set()
            assert go_on.wait(SOON)
        return await write(self, *args)

    monkeypatch.setattr(SlotTier, "write", slow)
    with from_thread.open_engine(writer.place, {"host": host}) as engine, ThreadPoolExecutor(2) as pool:
        lock = engine._worker.loop_lock
        first = pool.submit(lambda: (wait_idle(engine), engine.store(writer.blocks(keys[:1]), NO_WAIT))[1])
        assert inside.wait(SOON)
        called = pool.submit(engine.call, lambda: "called")
        eventually(lambda: lock._wanted)
        assert not called.done()
        assert not elsewhere(lock.take_nowait)
        second = elsewhere(lambda: engine.store(writer.blocks(keys[1:], 1), NO_WAIT))
        assert not second.done()
        go_on.set()
        assert first.result(SOON).done()
        assert called.result(SOON) == "called"
        assert second.result(SOON).status is Status.COMPLETE
        at_rest(engine, host)


def test_a_store_in_the_middle_of_a_store_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may store, and may run anywhere."""
    writer, host, keys = Writer(), memory(8), keys_of(2)
    nested: list[Any] = []
    reserve = MemoryTier.reserve_nowait

    def store_too(self: Any, request: Any) -> Any:
        if not nested:
            nested.append(None)
            nested[0] = engine.store(writer.blocks(keys[1:], 1), NO_WAIT)
            assert not nested[0].done()
        return reserve(self, request)

    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        monkeypatch.setattr(MemoryTier, "reserve_nowait", store_too)
        assert store_idle(engine, writer.blocks(keys[:1])).done()
        assert nested[0].result(SOON).status is Status.COMPLETE
        assert load(engine, keys) == [payload(key) for key in keys]
        at_rest(engine, host)


# --- what goes wrong --------------------------------------------------------------------------------------------------------


def test_a_copy_that_raises_fails_its_store_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, host, keys = Writer(), memory(8), keys_of(2)

    async def broken(self: Any, *args: Any) -> Any:
        raise OSError("broken")

    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(SlotTier, "write", broken)
            future = store_idle(engine, writer.blocks(keys[:1]))
        assert future.done()
        assert future.result().status is Status.FAILED
        assert store_idle(engine, writer.blocks(keys[1:])).result().status is Status.COMPLETE
        assert not engine.lookup(keys[:1]).keys
        at_rest(engine, host)


@types.coroutine
def pause() -> Generator[str, object, None]:
    yield "a trap that no trio run answers"


def test_a_copy_that_waits_all_the_same_is_in_quarantine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, host, keys = Writer(), memory(8), keys_of(2)

    async def waits(self: Any, *args: Any) -> Any:
        await pause()

    with from_thread.open_engine(writer.place, {"host": host}) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(SlotTier, "write", waits)
            future = store_idle(engine, writer.blocks(keys[:1]))
        assert isinstance(future.result(SOON).error, offload.DrainUnproven)
        assert "has waited" in caplog.text
        assert store_idle(engine, writer.blocks(keys[1:], 1)).result(SOON).status is Status.COMPLETE
        [entry] = engine.call(lambda: engine._worker.engine.pipelines[0].quarantine)
        engine.call(entry.release)
        at_rest(engine, host)


# --- all at once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_store_load_and_delete_lose_and_mix_up_nothing(seed: int) -> None:
    """Some stores are made by their threads and some are sent; lookups, evictions and deletes go on meanwhile."""
    host, threads, turns = memory(24), 3, 150
    source = memory(threads * 4)
    slots = source.stage(threads * 4)
    config = PipelineConfig(on_destination_full="evict")
    with from_thread.open_engine(source, {"host": host}, config=config) as engine:

        def work(mine: int) -> int:
            random, here = Random(f"{seed}/{mine}"), 0
            for _ in range(turns):
                keys = keys_of(random.randrange(1, 5), random.randrange(60))
                place = slots[mine * 4 : mine * 4 + len(keys)]
                pages = source.views(place)
                assert pages is not None
                for at, key in enumerate(keys):
                    pages[at][:] = payload(key)
                future = engine.store(source.external(place, keys), NO_WAIT)
                here += future.done()
                assert future.result(SOON).status is Status.COMPLETE
                wanted = keys_of(3, random.randrange(60))
                buffers = [bytearray(SIZE) for _ in wanted]
                with engine.lookup(wanted, SOON) as hit:
                    if hit.keys:
                        engine.load(hit, PagesDestination.over(buffers[: len(hit.keys)]), SOON)
                    assert [bytes(one) for one in buffers[: len(hit.keys)]] == [payload(key) for key in hit.keys]
                if random.random() < 0.1:
                    answers = engine.delete(wanted, SOON)
                    assert Deletion.UNAVAILABLE not in answers
            return here

        with ThreadPoolExecutor(threads) as pool:
            here = sum(pool.map(work, range(threads)))
        assert here > 0
        pipeline = engine.statistics(SOON).engine.pipelines["host"]
        assert pipeline.enqueued == pipeline.complete == threads * turns
        at_rest(engine, host)
