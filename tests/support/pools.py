"""What the tests of pools, and of what stands on them, share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import trio


class Stall:
    """Stands in for fallocate: gets stuck ``stuck`` times, until it is let go."""

    def __init__(self, stuck: int = 1) -> None:
        self.stuck = stuck
        self.entered = threading.Semaphore(0)
        self.let_go = threading.Event()

    def __call__(self, fd: int, offset: int, length: int) -> None:
        if self.stuck:
            self.stuck -= 1
            self.entered.release()
            assert self.let_go.wait(60)
        os.posix_fallocate(fd, offset, length)

    async def is_stuck(self) -> None:
        await trio.to_thread.run_sync(self.entered.acquire)


async def until(holds: Callable[[], object]) -> None:
    """Wait for what another thread, process or socket brings about, of which no event can be had here."""
    for _ in range(60_000):
        if holds():
            return
        await trio.sleep(0.001)
    raise AssertionError("it never comes true")


def is_there(path: str | Path) -> bool:
    return Path(path).exists()


def region_files(directory: Path) -> set[str]:
    return {name for name in os.listdir(directory) if name.startswith("maru_")}
