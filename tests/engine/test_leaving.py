"""Leaving an engine has an end, whatever hangs: each of its waits is bounded by ``drain_timeout``."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import backends.base._unproven
import offload
from backends import Unproven
from backends.base.blockfile import Directory
from backends.base.threads import wait_abandoned
from backends.file import FileTier
from backends.testing import FakeTier
from offload import NO_WAIT, BatchConfig, PipelineConfig
from tests.support.engine_places import SIZE, Places, keys_of, room

KEYS = keys_of(2)


class Disk:
    """Reads of a file hang, from the one with this number on."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int) -> None:
        self.hung, self.over = threading.Event(), threading.Event()
        self.reads = 0
        read = Directory.read

        def hanging(*args: Any) -> Any:
            self.reads += 1
            if self.reads >= nth:
                self.hung.set()
                self.over.wait(60)
            return read(*args)

        patch.setattr(Directory, "read", hanging)
        threading.Timer(20.0, self.over.set).start()  # where nobody leaves, the test fails instead of hanging


@asynccontextmanager
async def promoting_from(disk: Disk, root: Path, **knobs: Any) -> AsyncIterator[offload.Engine]:
    """An engine whose promotion reads from a disk that hangs."""
    source, host = FakeTier(8, SIZE), FakeTier(8, SIZE)
    source.fill(KEYS)
    config = PipelineConfig(batch_config=BatchConfig(flush_interval=0.0), **knobs)  # time stands still
    async with offload.open_engine(
        source, {"host": host, "disk": FileTier(root / "blocks", 1 << 20)}, config=config, promote=True
    ) as engine:
        await (await engine.store(source.weak(KEYS), precondition=NO_WAIT)).wait_routes()
        host.pool.delete(KEYS)
        async with await engine.lookup(KEYS) as hit:
            assert (await engine.load(hit, room(2)[1])).loaded == 2
        assert await trio.to_thread.run_sync(disk.hung.wait, 20)
        yield engine


@pytest.mark.parametrize("drain_timeout", [0.0, 0.5])
async def test_leaving_does_not_wait_for_a_promotion_whose_disk_hangs(
    mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drain_timeout: float
) -> None:
    disk, kept = Disk(monkeypatch, 3), len(backends.base._unproven._kept)  # the load's own two reads go well
    began = 0.0
    async with trio.open_nursery() as nursery:

        async def jump() -> None:
            await trio.testing.wait_all_tasks_blocked(0.02)
            mock_clock.jump(drain_timeout)

        async with promoting_from(disk, tmp_path, drain_timeout=drain_timeout):
            began = trio.current_time()
            nursery.start_soon(jump)
        assert not disk.over.is_set()
        assert trio.current_time() - began == drain_timeout
    assert len(backends.base._unproven._kept) == kept + 1  # the memory that it reads into is nobody else's
    disk.over.set()
    await wait_abandoned()


async def test_what_a_promotion_reads_into_is_kept_where_the_end_is_unknown(autojump_clock: object) -> None:
    places, kept = Places(), len(backends.base._unproven._kept)
    places["b"].fill(KEYS)
    async with places.open(promote=True) as engine:
        async with await engine.lookup(KEYS) as hit:
            assert (await engine.load(hit, room(2)[1], promote=False)).loaded == 2
            places["b"].faults.load_error = ExceptionGroup("of a copy", [Unproven("it may still write")])
            engine._promoter.promote(KEYS, [1, 1], True, "")
        await engine.drain()
        assert engine.statistics().promotions_refused == {"failed": 2}
    assert len(backends.base._unproven._kept) == kept + 1
    places.assert_at_rest()
