"""Host memory over the page store, read where its pages lie: a hit needs no row, and what a server loses is no hit."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.base.pages import Pages
from offload.engines.vllm._chunks import ChunkSource, GroupCaches
from offload.engines.vllm._copies import LostInPlace, RowCopies
from offload.engines.vllm._manager import HostMemory, open_host_memory
from offload.engines.vllm._rows import Answer
from offload.engines.vllm._settings import SpecSettings
from tests.engines import test_vllm_host_memory
from tests.engines.test_vllm_host_memory import KEYS, NAMES, NAMING, ROW, SOON, ask, bytes_of, nothing_is_held, write
from tests.support.maru_processes import Server, eventually, temporary_pool


@pytest.fixture
def server() -> Iterator[Server]:
    with temporary_pool() as pool, Server(pool) as server:
        yield server


@contextmanager
def opened(
    server: Server, rows: int = 8, in_place: bool = True, behind: dict[str, Any] | None = None, **more: Any
) -> Iterator[HostMemory]:
    tiers = {"maru": {"type": "maru", "server_url": server.ipc, "pool_size": "1M", **more}, **(behind or {})}
    # Patient, since what is tested here is not what a busy host makes of a second.
    said = {"engine": {"tiers": tiers}, "lookup_timeout": 30.0}
    table = {"cpu_bytes_to_use": rows * ROW, "offload": said}
    settings = SpecSettings.read(table, ROW)
    memory = open_host_memory(f"test-{os.getpid()}-{next(NAMES)}", ROW, NAMING, settings, in_place=lambda: in_place)
    try:
        yield memory
    finally:
        memory.close()


def pages(memory: HostMemory, places: Sequence[int]) -> list[bytes]:
    """As a worker sees them."""
    in_place = memory.table.placed.where(places)
    return [
        bytes(in_place[place][0].pages[in_place[place][1]] if place < 0 else memory.arena.pages([place])[0])
        for place in places
    ]


def load(memory: HostMemory, request: str, keys: list[bytes]) -> list[int]:
    """As a worker does. Returns the places."""
    places = memory.load(request, keys)
    assert pages(memory, places) == list(map(bytes_of, keys))
    memory.loaded(request, keys)
    return places


def nothing_is_pinned(memory: HostMemory) -> bool:
    return nothing_is_held(memory) and not len(memory.table.placed)


def damage(server: Server, key: bytes) -> None:
    for path in server.pool.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
                at = whole.find(bytes_of(key)[:64])
                if at >= 0:
                    whole[at] ^= 1
                    return
    raise AssertionError(f"{key!r} lies nowhere")


def test_what_another_instance_has_written_is_a_hit_where_it_lies(server: Server):
    with opened(server) as first:
        write(first, KEYS[:4])
    with opened(server, rows=4) as second:
        second.begin("b")
        assert ask(second, "b", KEYS[:6]) == [Answer.HERE] * 4 + [Answer.MISSING] * 2
        assert second.table.pool.free == 4, "no row is taken"
        assert max(load(second, "b", KEYS[:4])) < 0
        assert second.counts.snapshot()["chunks read in place"] == 4
        assert second.source("b", KEYS[0]) == "maru"
        second.end("b")
        assert nothing_is_pinned(second)


def test_workers_in_other_processes_get_rows(server: Server):
    with opened(server) as first:
        write(first, KEYS[:4])
    with opened(server, in_place=False) as second:
        second.begin("b")
        assert ask(second, "b", KEYS[:4]) == [Answer.HERE] * 4
        assert min(load(second, "b", KEYS[:4])) >= 0


def test_two_requests_hold_one_page_and_it_goes_with_the_last(server: Server):
    with opened(server) as first:
        write(first, KEYS[:2])
    with opened(server) as memory:
        for request in "ab":
            memory.begin(request)
        assert ask(memory, "a", KEYS[:2]) == [Answer.HERE] * 2
        assert ask(memory, "b", KEYS[:2]) == [Answer.HERE] * 2
        assert memory.counts.snapshot()["chunks asked for"] == 2, "the second one asks nobody"
        load(memory, "a", KEYS[:2])
        memory.end("a")
        assert len(memory.table.placed) == 2
        load(memory, "b", KEYS[:2])
        assert nothing_is_pinned(memory)


def test_what_a_request_had_in_the_cache_of_vllm_is_pinned_until_it_is_computed(server: Server):
    """Where there are several groups of KV caches, vLLM asks for more than it loads."""
    with opened(server) as first:
        write(first, KEYS[:4])
    with opened(server) as memory:
        memory.begin("a")
        assert ask(memory, "a", KEYS[:4]) == [Answer.HERE] * 4
        memory.planned((), ["a"])
        assert nothing_is_pinned(memory)


def test_no_more_is_held_in_place_than_there_are_rows(server: Server):
    with opened(server) as first:
        write(first, KEYS[:6])
    with opened(server, rows=4) as memory:
        memory.begin("a")
        assert ask(memory, "a", KEYS[:3]) == [Answer.HERE] * 3
        memory.begin("b")
        assert ask(memory, "b", KEYS[3:6]) == [Answer.HERE] * 3
        assert max(load(memory, "a", KEYS[:3])) < 0 <= min(load(memory, "b", KEYS[3:6]))


def test_a_damaged_page_is_never_a_hit(server: Server):
    with opened(server) as first:
        write(first, KEYS[:4])
        damage(server, KEYS[2])
        with opened(server) as memory:
            memory.begin("r")
            assert ask(memory, "r", KEYS[:4]) == [Answer.HERE] * 2 + [Answer.MISSING] * 2
            assert memory.counts.snapshot()["chunks found, and not loaded"] == 2
            write(memory, KEYS[2:4])  # vLLM has computed it, and stores it anew
            load(memory, "r", KEYS[:2])


def test_what_is_damaged_in_one_tier_comes_from_the_next_one_through_a_row(server: Server, tmp_path: Path):
    with test_vllm_host_memory.opened(test_vllm_host_memory.disk(tmp_path)) as first:
        write(first, KEYS[:4])
    with opened(server) as second:
        write(second, KEYS[:4])
    damage(server, KEYS[2])
    with opened(server, behind=test_vllm_host_memory.disk(tmp_path)["tiers"]) as memory:
        memory.begin("r")
        assert ask(memory, "r", KEYS[:4]) == [Answer.HERE] * 4
        assert [place < 0 for place in load(memory, "r", KEYS[:4])] == [True, True, False, False]
        memory.end("r")
        assert nothing_is_pinned(memory)


def test_a_request_that_ends_while_its_pages_are_verified_leaves_no_pin(server: Server):
    with opened(server) as first:
        write(first, KEYS[:4])
        with opened(server) as memory:
            for steps in range(8):
                memory.begin("r")
                for _ in range(steps):
                    [memory.where("r", key, at) for at, key in enumerate(KEYS[:4])]
                    memory.planned(("r",) if steps % 3 == 2 else ())
                memory.end("r")
            memory.engine.drain(SOON)
            assert eventually(lambda: nothing_is_pinned(memory))


def test_a_reset_lets_go_of_pages_and_of_those_being_loaded_some_steps_later(server: Server):
    with opened(server) as first:
        assert write(first, KEYS[:4]) == 4
    with opened(server) as memory:
        for request in "ab":
            memory.begin(request)
        assert ask(memory, "a", KEYS[:2]) == [Answer.HERE] * 2, memory.counts.snapshot()
        assert ask(memory, "b", KEYS[2:4]) == [Answer.HERE] * 2, memory.counts.snapshot()
        places = memory.load("a", KEYS[:2])
        memory.reset()
        assert len(memory.table.placed) == 2
        assert pages(memory, places) == list(map(bytes_of, KEYS[:2])), "a worker may copy it still"
        assert ask(memory, "b", KEYS[2:4]) == [Answer.MISSING] * 2
        assert eventually(lambda: nothing_is_pinned(memory))


def test_a_hit_whose_server_was_silent_for_a_lease_is_none_any_more(server: Server):
    with opened(server) as first:
        write(first, KEYS[:2])
    with opened(server, lease=0.5, timeout_ms=200) as memory:
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.HERE] * 2
        server.process.kill()
        eventually(lambda: _nowhere(memory))
        assert not len(memory.table.placed)


def _nowhere(memory: HostMemory) -> bool:
    memory.planned(())
    return Answer.HERE not in [memory.where("r", key, at) for at, key in enumerate(KEYS[:2])]


# --- what a worker copies -----------------------------------------------------------------------------------------


class Lying:
    """Pages of a tier, as the table hands them out."""

    def __init__(self, whole: Pages, unchanged: bool = True) -> None:
        self.pages = whole
        self._unchanged = unchanged

    def holds(self) -> bool:
        return self._unchanged

    def unchanged(self, positions: Sequence[int]) -> bool:
        return self._unchanged


@pytest.fixture
def copies(server: Server) -> Iterator[Callable[[], tuple[RowCopies, torch.Tensor, Pages]]]:
    made: list[RowCopies] = []

    def make() -> tuple[RowCopies, torch.Tensor, Pages]:
        cache = torch.zeros(8, 1, 4, ROW // 32)
        source = ChunkSource([GroupCaches({"a": cache}, 8, 2)])
        made.append(RowCopies(arena, 0, [source], tuple))
        rows = arena.pages(range(4))
        for at, row in enumerate(rows):
            row[:] = bytes([at + 1]) * source.block_bytes
        return made[-1], cache, rows

    with opened(server) as memory:
        arena = memory.arena
        yield make
    for one in made:
        one.close()


def test_a_worker_copies_from_rows_and_from_pages_in_one_job(copies: Any):
    one, cache, rows = copies()
    elsewhere = Pages(rows.addresses[2:], rows.page_bytes, rows)
    one.load(1, range(6), [6], [0], [0, -2, -3], {-2: (Lying(elsewhere), 1), -3: (Lying(elsewhere), 0)})
    one.wait({1})
    (copied,) = one.finished(idle=False)
    assert copied.error is None and copied.nbytes == 3 * rows.page_bytes
    assert [bytes(cache[at].numpy().tobytes())[0] for at in range(8)] == [1, 1, 4, 4, 3, 3, 0, 0]


def test_rows_of_narrow_chunks_keep_nothing_of_others(server: Server):
    with opened(server) as memory:
        wide, narrow = (
            ChunkSource([GroupCaches({"a": torch.ones(8, 1, 4, n)}, 8, 2)]) for n in (ROW // 32, ROW // 128)
        )
        one = RowCopies(memory.arena, 0, [wide, narrow], tuple)
        rows = memory.arena.pages([2, 3])
        for row in rows:
            row[:] = b"s" * ROW
        one.store(1, [1, 2, 3, 4], [2, 2], [0, 0], [2, 3])
        one.wait({1})
        one.close()
        assert b"s" not in bytes(rows[0])
        assert bytes(rows[1])[narrow.block_bytes :] == bytes(ROW - narrow.block_bytes)


def test_pages_that_changed_while_they_were_copied_are_an_error(copies: Any):
    one, _, rows = copies()
    one.load(1, range(2), [2], [0], [-2], {-2: (Lying(rows, unchanged=False), 0)})
    one.wait({1})
    (copied,) = one.finished(idle=False)
    assert isinstance(copied.error, LostInPlace)


def fail(one: RowCopies, times: int, error: type[BaseException]) -> None:
    """Let the next copies fail, so many of them."""
    left, pages = [times], one._pages

    def short(*args: Any) -> Pages:
        left[0] -= 1
        if left[0] >= 0:
            raise error("short of memory")
        return pages(*args)

    one._pages = short  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("times", "error"), [(1, MemoryError), (2, RuntimeError), (9, MemoryError), (9, RecursionError)]
)
def test_rows_that_worker_could_not_write_are_not_stored(server: Server, times: int, error: type[BaseException]):
    """vLLM is told that its store is over: it has no word for one that failed."""
    with opened(server) as memory:
        source = ChunkSource([GroupCaches({"a": torch.ones(8, 1, 4, ROW // 32)}, 8, 2)])
        one = RowCopies(memory.arena, 0, [source], tuple)
        fail(one, times, error)
        taken = memory.take_for_store(KEYS[:2])
        assert taken is not None
        one.store(1, range(4), [4], [0], taken[1])
        one.wait({1})
        (copied,) = one.finished(idle=False)
        assert copied.error is None
        memory.stored(KEYS[:2])
        memory.engine.drain(SOON)
        memory.begin("r")
        written = times < 3
        assert ask(memory, "r", KEYS[:2]) == [Answer.HERE if written else Answer.MISSING] * 2
        again = memory.take_for_store(KEYS[:2])
        assert again is not None and len(again[0]) == (0 if written else 2)
        memory.not_written(again[0])
        one.close()


@pytest.mark.parametrize("times", [1, 2, 9])
def test_load_that_fails_is_tried_again_and_never_passes(server: Server, times: int):
    with opened(server) as memory:
        cache = torch.zeros(8, 1, 4, ROW // 32)
        source = ChunkSource([GroupCaches({"a": cache}, 8, 2)])
        one = RowCopies(memory.arena, 0, [source], tuple)
        fail(one, times, MemoryError)
        memory.arena.pages([0])[0][:] = b"\1" * ROW
        one.load(1, range(2), [2], [0], [0], {})
        one.wait({1})
        (copied,) = one.finished(idle=False)
        assert (copied.error is None) == (times < 3)
        assert copied.error is not None or cache[:2].view(torch.uint8).eq(1).all()
        one.close()


def test_job_that_is_refused_is_never_done(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Its rows are given to another chunk when vLLM is told that it is over."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened(server) as memory:
        source = ChunkSource([GroupCaches({"a": torch.ones(8, 1, 4, ROW // 32)}, 8, 2)])
        one = RowCopies(memory.arena, 0, [source], tuple)
        [row] = memory.arena.pages([0])
        row[:] = b"\1" * ROW
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            patch.setattr(threading.Thread, "start", refuse)
            one.store(1, range(2), [2], [0], [0])
            one.wait({1})  # else it was refused, and is over
            row[:] = b"\1" * ROW
        one.store(2, range(2), [2], [0], [1])
        one.wait({2})
        assert bytes(row) == b"\1" * ROW
        one.close()


def test_rows_of_store_that_is_not_waited_for_are_not_stored(server: Server):
    with opened(server) as memory:
        source = ChunkSource([GroupCaches({"a": torch.ones(8, 1, 4, ROW // 32)}, 8, 2)])
        one = RowCopies(memory.arena, 0, [source], tuple)
        fail(one, 0, MemoryError)
        taken = memory.take_for_store(KEYS[:2])
        assert taken is not None
        one.store(1, range(4), [4], [0], taken[1])
        one.distrust({1})
        one.wait({1})
        one.fail_store(2, [taken[1][1]])
        assert sorted(copied.job_id for copied in one.finished(idle=False)) == [1, 2]
        memory.stored(KEYS[:2])
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.MISSING] * 2
        one.close()
