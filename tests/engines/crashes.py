"""Instances of an inference engine that are killed with -9, one after the other, over one page store."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import object_counts as object_counts_of
from tests.support.maru_processes import Server, eventually, forge, temporary_pool

LEASE = 0.5
"""Seconds until what a killed instance held is given back."""

a_few_and_fifty = pytest.mark.parametrize("crashes", [3, pytest.param(50, marks=pytest.mark.long)])


@contextmanager
def page_store(*options: str, lease: float = LEASE) -> Iterator[Server]:
    with temporary_pool() as pool:
        setup = f"tests.support.object_counts:answer:{_counts_at(pool)}"
        with Server(pool, "--session-lease", f"{lease}", *options, setup=setup) as server:
            yield server


def object_counts(server: Server) -> dict[str, int]:
    """What such a server holds in Python."""
    return object_counts_of.ask_at_rest(_counts_at(server.pool))


def _counts_at(pool: Path) -> str:
    return f"{pool}.counts"


def wait_to_be_killed(channel: int) -> None:
    """In a child: say that it is where it is to be killed."""
    os.write(channel, b"!")
    signal.pause()


def crash(entry: str, *args: object) -> None:
    """Run ``entry`` in a child until it waits to be killed, and kill it. Its first argument is the channel."""
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as log:
        child = forge().start(entry, *args, channel=theirs, errors=log.fileno())
        os.close(theirs)
        told = os.read(ours, 1)
        log.seek(0)
        assert told == b"!", log.read().decode()
        child.kill()
    os.close(ours)


def crash_often(
    server: Server, crashes: int, entry: str, behind: Callable[[int], None] = lambda number: None
) -> list[int]:
    """Crash so often, each time until nothing is pinned any more, and call ``behind``.

    Returns how many files of regions there were behind each crash.
    """
    regions = []
    for number in range(crashes):
        crash(entry, server.ipc, number)
        eventually(lambda: server.facts()["pinned"] == 0)
        behind(number)
        regions.append(len(server.region_files()))
    return regions
