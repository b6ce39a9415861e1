"""What a client holds by its board, from both faces and from any thread, with a real server: no message, and nothing goes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import pytest
import trio

import maru
from maru import Deleted, HandlerClosed, LeaseLost, Loaded, MaruConfig, MaruHandler, ServerConfig, Stored, open_server
from maru._index.board import CELLS
from tests.maru.test_index_client import PAGE, PAGES, blank, client, put, requests, settled, value
from tests.support.maru_processes import Server, temporary_pool


@pytest.fixture
def server():
    with temporary_pool() as pool, Server(pool) as server:
        yield server


KEYS = [f"k{number}" for number in range(16)]


@attrs.define
class Lines:
    """Lines of the page store that this thread still is to pass, and whether it came there."""

    left: int
    reached: bool = False


@contextlib.contextmanager
def at_line(number: int, do: Callable[[], object]) -> Iterator[Lines]:
    """Do something before this thread's so manieth line in the page store."""
    lines = Lines(number)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if Path(maru.__file__).parent not in Path(frame.f_code.co_filename).parents:
            return None
        if event == "line" and not lines.reached:
            lines.left -= 1
            if lines.left < 0:
                lines.reached = True
                do()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


# --- without a message --------------------------------------------------------------------------------------------


def test_to_retrieve_and_to_release_sends_nothing(server: Server) -> None:
    with client(server, lease=60.0) as handler:
        put(handler, KEYS)
        settled(handler)
        before = requests(server)
        for _ in range(10):
            infos = handler.batch_retrieve([*KEYS, "never"])
            assert [bytes(info.view) for info in infos[:-1]] == [value(key) for key in KEYS] and infos[-1] is None
            for info in infos[:-1]:
                info.release()
            assert handler.batch_pin([*KEYS, "never"]) == [True] * 16 + [False]
            assert handler.batch_unpin(KEYS) == [True] * 16
        assert requests(server) == before + 1
        figures = handler.statistics()
        assert figures.board.held >= 10 * 16 and not figures.board.changed and not figures.pinned


def test_what_is_held_is_neither_deleted_nor_evicted_and_what_was_released_is(server: Server) -> None:
    with client(server) as owner, client(server, pool_size=0) as reader:
        keys = [f"k{number}" for number in range(PAGES)]
        put(owner, keys)
        settled(reader)
        reader.retrieve(keys[0]).release()  # maps the region
        held = [reader.retrieve(key) for key in keys[:8]]
        assert owner.batch_delete(keys[:8]) == [Deleted.PINNED] * 8
        for number in range(2 * PAGES):
            put(owner, [f"new {number}"])
        assert [bytes(info.view) for info in held] == [value(key) for key in keys[:8]]
        assert owner.batch_exists(keys) == [True] * 8 + [False] * (PAGES - 8)
        for info in held:
            info.release()
        assert owner.batch_delete(keys[:8]) == [Deleted.DELETED] * 8
        assert reader.statistics().board.held >= 8


def test_a_view_that_is_forgotten_lets_go_with_the_next_call(server: Server) -> None:
    with client(server) as handler:
        put(handler, ["a", "b"])
        settled(handler)
        info = handler.retrieve("a")
        assert handler.delete("a") is Deleted.PINNED
        del info
        assert handler.exists("b")
        assert handler.delete("a") is Deleted.DELETED


def test_what_has_no_cell_is_pinned_by_message_key_by_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(server) as handler:
        put(handler, KEYS)
        settled(handler)
        del handler._state.index.board._board._free[: CELLS - 4]  # so many are in use
        infos = handler.batch_retrieve(KEYS)
        assert [bytes(info.view) for info in infos] == [value(key) for key in KEYS]
        assert handler.statistics().board.full == 12
        assert handler.batch_delete(KEYS) == [Deleted.PINNED] * 16
        for info in infos:
            info.release()
        assert handler.batch_delete(KEYS) == [Deleted.DELETED] * 16


def test_a_session_that_gets_no_board_uses_no_index_and_says_why(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("maru._index.boards.MOST_BOARDS", 0)
    pool = tmp_path / "pool"

    async def main() -> None:
        async with (
            open_server(ServerConfig(pool_path=str(pool), capacity_bytes=64 << 20)) as server,
            MaruHandler(
                MaruConfig(server_url=f"ipc://{pool}/maru.sock", pool_size=1 << 20, chunk_size_bytes=PAGE)
            ) as handler,
        ):
            assert await handler.batch_put(["k"], [value("k")]) == [Stored.NEW]
            assert len(await handler.hold_pages(["k"])) == 1
            assert (
                "boards already" in handler.statistics().why_no_index
                or "have a board" in handler.statistics().why_no_index
            )
            assert server.statistics().indexes.boards == 0

    trio.run(main)


# --- any thread ---------------------------------------------------------------------------------------------------


def test_pages_are_held_loaded_and_released_in_a_thread_while_the_trio_thread_stands_still(tmp_path: Path) -> None:
    pool = tmp_path / "pool"

    async def main() -> None:
        async with (
            open_server(ServerConfig(pool_path=str(pool), capacity_bytes=64 << 20)),
            MaruHandler(
                MaruConfig(server_url=f"ipc://{pool}/maru.sock", pool_size=1 << 20, chunk_size_bytes=PAGE, lease=60.0)
            ) as handler,
        ):
            assert handler.hold_pages_here(["k0"]) is None  # there is no index yet
            await handler.batch_put(KEYS, [value(key) for key in KEYS])
            with trio.fail_after(30):
                while handler.exist_here(["never"]) != [False]:
                    await handler.exists("never")
            seen: list[object] = []

            def read() -> None:
                assert handler.exist_here([*KEYS, "never"]) == [True] * 16 + [False]
                held = handler.hold_pages_here([*KEYS[:4], "never", *KEYS[4:]])
                held.check()
                seen.append((len(held), held.lengths[0], [held.generations[0] > 0]))
                seen.append(held)

            thread = threading.Thread(target=read)
            thread.start()
            thread.join(30)  # this thread, which is trio's, does nothing meanwhile
            assert seen[0] == (4, PAGE, [True])
            assert await handler.batch_delete(KEYS[:5]) == [Deleted.PINNED] * 4 + [Deleted.DELETED]
            thread = threading.Thread(target=seen[1].release)
            thread.start()
            thread.join(30)
            assert await handler.batch_delete(KEYS[:4]) == [Deleted.DELETED] * 4
        assert handler.hold_pages_here(["k5"]) is None  # closed

    trio.run(main)


def test_of_another_ones_region_that_is_not_mapped_yet_nothing_is_held_here(server: Server) -> None:
    with client(server) as owner, client(server, pool_size=0) as reader:
        put(owner, ["k"])
        settled(reader)
        assert reader.hold_pages_here(["k"]) is None
        assert owner.delete("k") is Deleted.DELETED  # it was let go of
        put(owner, ["k"])
        with reader.retrieve("k"):
            pass
        held = reader.hold_pages_here(["k"])
        assert len(held) == 1
        held.release()


@pytest.mark.parametrize("stride", [60, pytest.param(3, marks=pytest.mark.long)])
def test_what_a_thread_holds_while_its_handler_is_closed_is_held_or_was_let_go_of(server: Server, stride: int) -> None:
    """It is closed before each line of the hold (or every so manieth): what came of it counts until its lease ends."""
    with client(server) as owner:
        for number in itertools.count(0, stride):
            put(owner, [key for key in KEYS if not owner.exists(key)])
            with client(server, pool_size=0, lease=60.0) as reader:
                settled(reader)
                reader.retrieve("k0").release()
                closer = threading.Thread(target=reader.close)
                with at_line(number, lambda closer=closer: (closer.start(), closer.join())) as lines:
                    held = reader.hold_pages_here(KEYS)
            if not lines.reached:
                assert number > stride
                break
            assert reader.hold_pages_here(KEYS) is None
            if held is not None:
                assert owner.batch_delete(KEYS) == [Deleted.PINNED] * 16
                held.check()
                places = zip(held.addresses, held.lengths, strict=True)
                assert [ctypes.string_at(at, length) for at, length in places] == [value(key) for key in KEYS]
                held.release()
            assert owner.batch_delete(KEYS) == [Deleted.DELETED] * 16


# --- a server that is gone, a lease that is over ------------------------------------------------------------------


def test_holds_go_on_until_the_lease_ends_when_the_server_is_down(server: Server) -> None:
    with client(server, lease=2.0, timeout_ms=300) as handler:
        put(handler, ["k"])
        settled(handler)
        server.kill()
        info = handler.retrieve("k")
        assert bytes(info.view) == value("k")
        ends = time.monotonic() + 30
        with pytest.raises(LeaseLost):
            while time.monotonic() < ends:
                info.check()
                time.sleep(0.01)
        assert handler.hold_pages_here(["k"]) is None


def test_what_was_held_before_a_restart_is_pinned_again_and_stays_valid(server: Server) -> None:
    with client(server, lease=60.0) as owner, client(server, lease=60.0, pool_size=0) as reader:
        put(owner, KEYS)
        settled(reader)
        infos = [reader.retrieve(key) for key in KEYS]
        held = [reader.retrieve(key) for key in KEYS]
        assert reader.statistics().board.held >= 16
        server.restart()
        for handler in (owner, reader):
            for _ in range(2):  # it hears of the new server, and then comes back
                assert handler.exists("k0")
        for info in [*infos, *held]:
            assert bytes(info.view) == value(info.key)
        assert owner.batch_delete(KEYS) == [Deleted.PINNED] * 16
        for info in infos:
            info.release()
        assert owner.batch_delete(KEYS) == [Deleted.PINNED] * 16
        for info in held:
            info.release()
        settled(reader)
        assert owner.batch_delete(KEYS) == [Deleted.DELETED] * 16
        put(owner, ["again"])
        reader.retrieve("again").release()
        assert reader.hold_pages_here(["again"]) is not None  # with a board of the new server


def test_the_board_of_a_client_that_was_killed_holds_until_its_lease_ends_and_no_longer(tmp_path: Path) -> None:
    with temporary_pool() as pool, Server(pool) as server, client(server) as owner:
        put(owner, ["k"])
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                opened = client(server, pool_size=0, lease=1.0)
                handler = opened.__enter__()
                settled(handler)
                info = handler.retrieve("k")
                info2 = handler.retrieve("k")
                os.write(write, b"%d" % handler.statistics().board.held)
                time.sleep(60)
                info.check(), info2.check()
            finally:
                os._exit(1)
        os.close(write)
        assert int(os.read(read, 8)) >= 1
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert owner.delete("k") is Deleted.PINNED
        ends = time.monotonic() + 30
        while owner.delete("k") is Deleted.PINNED:
            assert time.monotonic() < ends
            time.sleep(0.02)
        assert not owner.exists("k")


def test_a_fork_of_a_reader_lets_go_of_nothing_that_its_parent_holds(server: Server) -> None:
    with client(server) as owner, client(server, pool_size=0) as reader:
        put(owner, ["k"])
        settled(reader)
        reader.retrieve("k").release()
        info, held = reader.retrieve("k"), reader.hold_pages_here(["k"])
        child = os.fork()
        if not child:
            try:
                assert reader.hold_pages_here(["k"]) is None
                with pytest.raises(HandlerClosed):
                    reader.retrieve("k")
                held.release()
                info.release()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert owner.delete("k") is Deleted.PINNED
        held.release()
        info.release()
        assert owner.delete("k") is Deleted.DELETED


# --- what is removed otherwise ------------------------------------------------------------------------------------


def test_uses_by_holds_keep_what_is_held_often(server: Server) -> None:
    with client(server) as handler:
        keys = [f"k{number}" for number in range(PAGES)]
        for key in keys:
            put(handler, [key])
        settled(handler)
        used = [key for key in keys[: PAGES // 2] if handler.exists(key)]
        assert len(used) > 10
        for info in handler.batch_retrieve(used):
            info.release()
        for number in range(PAGES // 4):
            put(handler, [f"new {number}"])
        assert handler.batch_exists(used) == [True] * len(used)
        assert handler.batch_get_into(used, blank(len(used))) == [Loaded.LOADED] * len(used)
