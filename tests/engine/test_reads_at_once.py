"""Lookups and loads in the trio thread that wait for nothing: no scope, no task, no call that has to be awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import assert_checkpoints

from backends.abc import Key
from backends.base.slots import PORTION_BYTES, PagesDestination
from backends.file import FileTier
from backends.memory import MemoryTier
from offload import NO_WAIT, Engine, from_thread, open_engine
from tests.engine.test_direct_reads import keys_of, load_all, memory, no_message, payload, places


@asynccontextmanager
async def engine_of(keys: Sequence[Key], tiers: dict[str, Any], **more: Any) -> AsyncIterator[Engine]:
    """An engine over these tiers, into which these keys were stored."""
    source = memory(len(keys))
    for key in keys:
        source.put(key, payload(key))
    async with open_engine(source, tiers, **more) as engine:
        await engine.store_nowait(source.weak(keys), precondition=NO_WAIT).wait()
        await engine.drain()
        yield engine


@pytest.fixture
def nothing_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaited(self: MemoryTier, *args: object, **more: object) -> None:
        raise AssertionError(f"{self!r} was awaited")

    monkeypatch.setattr(MemoryTier, "pin", awaited)
    monkeypatch.setattr(MemoryTier, "load", awaited)


async def test_what_is_in_memory_is_found_and_loaded_without_awaiting_its_tier(nothing_awaited: None) -> None:
    keys = keys_of(4)
    async with engine_of(keys, {"host": memory(8)}) as engine:
        with assert_checkpoints():
            hit = await engine.lookup([*keys, b"missing"])
        async with hit:
            buffers, there = places(4)
            with assert_checkpoints():
                result = await engine.load(hit, there)
        assert result.loaded == 4 and [bytes(buffer) for buffer in buffers] == list(map(payload, keys))
        counted = engine.statistics()
        assert (counted.lookups, counted.asked_blocks, counted.hit_blocks) == (1, 5, 4)
        assert (counted.loads, counted.loaded_blocks, counted.open_hits) == (1, 4, 0)
        assert counted.tiers["host"].loaded == 4 and counted.tiers["host"].held_blocks == 0


async def test_a_cancelled_lookup_pins_nothing_and_counts_nothing() -> None:
    keys = keys_of(2)
    async with engine_of(keys, {"host": memory(4)}) as engine:
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.lookup(keys)
        assert scope.cancelled_caught
        counted = engine.statistics()
        assert counted.lookups == counted.open_hits == counted.tiers["host"].held_blocks == 0


async def test_a_lookup_that_is_cancelled_when_it_has_found_is_answered() -> None:
    keys = keys_of(2)
    async with engine_of(keys, {"host": memory(4)}) as engine, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(scope_cancel, scope)  # runs in the checkpoint at its end
            hit = await engine.lookup(keys)
        assert len(hit) == 2 and engine.statistics().open_hits == 1
        await engine.release(hit)


async def scope_cancel(scope: trio.CancelScope) -> None:
    scope.cancel()


async def test_a_cancelled_load_touches_nothing_and_counts_nothing() -> None:
    keys = keys_of(2)
    async with engine_of(keys, {"host": memory(4)}) as engine, await engine.lookup(keys) as hit:
        buffers, there = places(2)
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.load(hit, there)
        assert scope.cancelled_caught and not any(map(any, buffers))
        assert engine.statistics().loads == 0


async def test_a_hit_that_is_released_while_it_is_loaded_is_loaded() -> None:
    keys = keys_of(2)
    async with engine_of(keys, {"host": memory(4)}) as engine, trio.open_nursery() as nursery:
        hit = await engine.lookup(keys)
        buffers, there = places(2)
        nursery.start_soon(engine.release, hit)
        assert (await engine.load(hit, there)).loaded == 2 and bytes(buffers[1]) == payload(keys[1])
    assert hit.released


async def test_a_load_of_more_than_a_portion_lets_others_run() -> None:
    keys, size = keys_of(9), PORTION_BYTES // 4
    source, turns = MemoryTier(9 * size, size, checksums=False), []
    for key in keys:
        source.put(key, bytes([len(turns)]) * size)
    async with open_engine(source, [MemoryTier(9 * size, size)]) as engine:
        await engine.store_nowait(source.weak(keys), precondition=NO_WAIT).wait()

        async def count() -> None:
            while True:
                turns.append(1)
                await trio.lowlevel.checkpoint()

        async with await engine.lookup(keys) as hit, trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await engine.load(hit, PagesDestination.over([bytearray(size) for _ in keys]))
            assert len(turns) >= 2
            nursery.cancel_scope.cancel()


async def test_files_are_found_at_once_and_read_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def direct(*args: object) -> None:
        raise AssertionError("a file was read on the trio thread")

    monkeypatch.setattr(FileTier, "load_from_thread", direct)
    keys = keys_of(3)
    async with engine_of(keys, {"disk": FileTier(tmp_path, 1 << 20)}) as engine:
        async with await engine.lookup(keys) as hit:
            buffers, there = places(3)
            assert (await engine.load(hit, there)).loaded == 3
        assert [bytes(buffer) for buffer in buffers] == list(map(payload, keys))


async def test_what_a_tier_raises_at_once_is_raised_and_counted_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise OSError("planted")

    keys = keys_of(2)
    async with engine_of(keys, {"host": memory(4)}) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryTier, "pin_from_thread", broken)
            async with await engine.lookup(keys) as hit:
                assert len(hit) == 2
        with monkeypatch.context() as patch:
            patch.setattr(MemoryTier, "load_from_thread", broken)
            async with await engine.lookup(keys) as hit:
                assert (await engine.load(hit, places(2)[1])).loaded == 2
        assert engine.statistics().lookups == 2 and engine.statistics().loads == 1


class Watching:
    """Notes what the hooks say."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def looked_up(self, keys: Sequence[Key], hit: Any) -> None:
        self.seen.append(("looked up", len(hit)))

    def loaded(self, hit: Any, result: Any, seconds: float) -> None:
        assert 0 <= seconds < 60
        self.seen.append(("loaded", result.loaded))


async def test_hooks_are_told_of_reads_at_once() -> None:
    keys, watching = keys_of(3), Watching()
    async with engine_of(keys, {"host": memory(4)}) as engine:
        engine.add_instrument(watching)
        async with await engine.lookup(keys) as hit:
            await engine.load(hit, places(3)[1])
    assert watching.seen == [("looked up", 3), ("loaded", 3)]


def test_hooks_are_told_of_reads_in_other_threads() -> None:
    keys, watching = keys_of(3), Watching()
    source = memory(3)
    for key in keys:
        source.put(key, payload(key))
    with from_thread.open_engine(source, {"host": memory(4)}) as engine:
        engine._worker.engine.add_instrument(watching)
        engine.store(source.weak(keys), precondition=NO_WAIT).result(60.0)
        with no_message():
            assert load_all(engine, keys) == list(map(payload, keys))
        engine.statistics()  # what is left to be counted is, by the engine's thread
    assert watching.seen == [("looked up", 3), ("loaded", 3)]
