"""A forked child owns nothing of its parent: it is told so, lets go of what it inherited, and never disturbs the parent.

Each test forks in a program of its own: pytest has threads, and what a child does at its end is part of the claim.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.maru_processes import PATIENCE, eventually
from tests.support.pinned_pools import address_of, server_in_thread
from tests.support.published_server import PublishedServer

PRELUDE = """
import gc, os, signal, sys, time, traceback

def in_child(check, leave=os._exit):
    "Fork, run the check there, and wait for the child's end."
    child = os.fork()
    if not child:
        signal.alarm(60)
        status = 1
        try:
            check()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        leave(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child has failed"

def refused(kind, *calls):
    "Each of these calls raises that."
    for call in calls:
        try:
            call()
        except kind as exc:
            assert f"process {os.getppid()}" in str(exc), exc
        else:
            raise AssertionError(f"{call} was done in a forked child")

class Sleeper:
    "A child that does nothing, until this process says so."
    def __init__(self):
        ours, self.write = os.pipe()
        ready, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.write(theirs, b"r")
            os.close(self.write)
            os.read(ours, 1)
            os._exit(0)
        os.read(ready, 1)
    def end(self):
        os.close(self.write)
        os.waitpid(self.pid, 0)
"""


def program(script: str) -> list[str]:
    # Newer versions warn of forking with threads. We mean to.
    return [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        PRELUDE + textwrap.dedent(script) + "\nprint('well')",
    ]


def run(script: str) -> None:
    done = subprocess.run(program(script), capture_output=True, text=True, timeout=2 * PATIENCE, env=environment())
    assert (done.stdout, done.stderr, done.returncode) == ("well\n", "", 0), done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


# --- pinned pools -----------------------------------------------------------------------------------------------------


def test_a_pool_of_this_process_is_refused_in_a_forked_child() -> None:
    run("""
        import torch
        from backends.pinned_pool import PinnedMemoryPool, PoolForked

        pool = PinnedMemoryPool(torch.uint8, 1, chunk_size=4096, pin="none")
        block = pool.alloc_same_pin_tensor(torch.zeros(4096, dtype=torch.uint8))
        block.copy_(torch.ones(4096, dtype=torch.uint8))
        dropped = pool.alloc_same_pin_tensor(torch.zeros(5000, dtype=torch.uint8))
        def check():
            global dropped
            refused(
                PoolForked,
                lambda: pool.alloc_same_pin_tensor(torch.zeros(1)),
                lambda: pool.free(block),
                lambda: block.copy_(torch.zeros(4096, dtype=torch.uint8)),
                block.to,
                block.as_tensor,
                pool.get_usage_info,
            )
            del dropped
            pool.close()
        in_child(check)
        assert pool.get_usage_info()["active_allocations"] == 2
        assert block.to("cpu").sum() == 4096
        assert pool.alloc_same_pin_tensor(torch.zeros(1)).chunk_indices == (3,)
        pool.close()
    """)


@pytest.mark.parametrize("shared", [True, False])
def test_a_session_with_a_server_outlives_what_a_forked_child_does_with_it(shared: bool) -> None:
    with server_in_thread() as server:
        run(f"""
            from backends.pinned_pool import PinnedPoolClient, PoolForked

            client = PinnedPoolClient({address_of(server)!r}, timeout={PATIENCE}, shared_memory={shared})
            client.allocate_pool_memory(1 << 20)
            client.allocate_from_pool(100)
            client.copy_to_pool(0, 0, b"x" * 100)
            def check():
                global client
                refused(
                    PoolForked,
                    client.check,
                    client.get_usage_info,
                    lambda: client.allocate_from_pool(1),
                    lambda: client.free_from_pool([0]),
                    lambda: client.copy_to_pool(0, 0, b"y"),
                    lambda: client.copy_from_pool(0, 0, bytearray(1)),
                )
                client.close()
                client.close()
                del client
            in_child(check)
            in_child(check, sys.exit)
            client.check()
            seen = bytearray(100)
            client.copy_from_pool(0, 0, seen)
            assert seen == b"x" * 100 and client.get_usage_info().active_allocations == 1
            client.close()
        """)


def test_a_lock_that_a_thread_held_at_the_fork_hangs_no_child() -> None:
    with server_in_thread() as server:
        run(f"""
            from backends.pinned_pool import PinnedPoolClient, PoolForked

            client = PinnedPoolClient({address_of(server)!r}, timeout={PATIENCE})
            client.allocate_pool_memory(1 << 20)
            with client._lock:  # as a thread that waits for an answer has it
                in_child(lambda: (refused(PoolForked, client.get_usage_info), client.close()))
            client.close()
        """)


def test_a_killed_client_loses_its_pool_though_its_forked_child_lives() -> None:
    with server_in_thread() as server:
        holder = subprocess.Popen(
            program(f"""
                from backends.pinned_pool import PinnedPoolClient

                client = PinnedPoolClient({address_of(server)!r}, timeout={PATIENCE})
                client.allocate_pool_memory(1 << 20)
                child = os.fork()
                if child:
                    print(child, flush=True)
                time.sleep(600)
            """),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        with holder:
            assert holder.stdout is not None
            child = int(holder.stdout.readline())
            child_of_holder = os.pidfd_open(child)
            try:
                assert server.statistics().pools == 1
                holder.kill()
                assert eventually(lambda: server.statistics().pools == 0)
            finally:
                holder.kill()
                signal.pidfd_send_signal(child_of_holder, signal.SIGKILL)
                os.close(child_of_holder)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_pages_are_the_childs_own_after_a_fork() -> None:
    run("""
        from backends.memory import HostPages
        from backends.base.pages import new_pages

        for pages in (new_pages(2, 5000), HostPages(2, 5000).pages([0, 1])):
            pages[0][:] = b"p" * 5000
            def check():
                assert bytes(pages[0]) == b"p" * 5000
                pages[0][:] = pages[1][:] = b"c" * 5000
            in_child(check)
            assert bytes(pages[0]) == b"p" * 5000 and bytes(pages[1]) == bytes(5000)
    """)


def test_a_forked_child_reads_a_region_and_cannot_write_it() -> None:
    run("""
        import mmap, signal
        from maru.base.memory.memory import Memory

        fd = os.memfd_create("region")
        os.truncate(fd, 2 * mmap.PAGESIZE)
        view = Memory(fd, 0, 2 * mmap.PAGESIZE, write=True).buffer()
        view[0] = 7
        child = os.fork()
        if not child:
            assert view[0] == 7
            view[0] = 9
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGSEGV, status
        view[1] = 8
        assert bytes(view[:2]) == bytes([7, 8])
    """)


CUDA = """
import logging
from maru.base.memory import pinning
from maru.base.memory.memory import Memory
from maru.fake_cuda import FakeCuda, use

fake = FakeCuda()
cuda = use(fake)
cuda.__enter__()
pinning._process.is_expected = True
logging.disable()
"""


def test_a_forked_child_unpins_nothing() -> None:
    run(f"""
        {textwrap.indent(CUDA, " " * 8).strip()}
        from backends.memory import MemoryTier

        tier = MemoryTier(4096, 4096)
        def check():
            global tier
            assert pinning.spans(0, 1 << 62) == [] and not pinning.statistics().wanted_bytes
            calls = len(fake.calls)
            tier.close()
            del tier
            gc.collect()
            assert fake.registered and len(fake.calls) == calls
        in_child(check)
        assert pinning.spans(0, 1 << 62)
        tier.close()
        assert not fake.registered
    """)


def test_pinned_private_memory_is_not_in_a_forked_child_which_unmaps_nothing_there() -> None:
    run(f"""
        {textwrap.indent(CUDA, " " * 8).strip()}
        import mmap
        from maru.base.memory.memory import _mmap

        memory, plain = Memory.private(2 << 20), Memory.private(2 << 20)
        pinning.Pin(memory).pin()
        start = memory.address
        def is_mapped(address):
            with open("/proc/self/maps") as maps:
                spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
            return any(start <= address < stop for start, stop in spans)
        def check():
            global memory, plain
            assert not is_mapped(start) and is_mapped(plain.address)
            own = _mmap(start, 4096, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)  # MAP_FIXED
            assert own == start
            address = plain.address
            del memory, plain
            gc.collect()
            assert is_mapped(start) and not is_mapped(address)
        in_child(check)
        del memory
        assert not is_mapped(start) and not fake.registered
    """)


def test_memory_whose_pinning_was_refused_is_in_a_forked_child() -> None:
    run(f"""
        {textwrap.indent(CUDA, " " * 8).strip()}
        fake.most_registered = 3 << 20
        pinning.CHUNK_BYTES = 2 << 20
        memory = Memory.private(6 << 20)
        memory.buffer()[:] = b"p" * (6 << 20)
        pin = pinning.Pin(memory)
        pin.pin()
        assert pin.why_not
        def check():
            assert bytes(memory.buffer()) == b"p" * (6 << 20)
        in_child(check)
    """)


def test_a_forked_child_pins_in_the_background_by_a_thread_of_its_own() -> None:
    run(f"""
        {textwrap.indent(CUDA, " " * 8).strip()}
        import threading
        from maru.base.memory.background import in_background, wait_prepared

        over = threading.Event()
        in_background(lambda: over.wait(60) and False)
        def check():
            done = []
            in_background(lambda: bool(done.append(1)))
            wait_prepared()
            assert done == [1]
        in_child(check)
        over.set()
        wait_prepared()
    """)


def test_a_child_forked_while_a_context_is_made_calls_no_driver() -> None:
    run(f"""
        {textwrap.indent(CUDA, " " * 8).strip()}
        import threading

        driver, begun, go_on = pinning.find_driver(), threading.Event(), threading.Event()
        retain = driver._calls["cuDevicePrimaryCtxRetain"]
        driver._calls["cuDevicePrimaryCtxRetain"] = lambda *args: (begun.set(), go_on.wait(60), retain(*args))[2]
        memory = Memory.private(2 << 20)
        thread = threading.Thread(target=pinning.Pin(memory).pin)
        thread.start()
        begun.wait()
        calls = len(fake.calls)
        def check():
            own = Memory.private(2 << 20)
            pin = pinning.Pin(own)
            pin.pin()
            assert "forked" in pin.why_not and len(fake.calls) == calls
        in_child(check)
        go_on.set()
        thread.join()
    """)


def test_a_forked_child_pins_nothing_that_its_parent_was_to_pin() -> None:
    run("""
        import os
        from maru.base.memory import pinning
        from maru.base.memory.memory import Memory
        from maru.base.memory.mapping import Mapping
        from maru.fake_cuda import FakeCuda, use

        fd = os.memfd_create("region")
        os.truncate(fd, 2 << 20)
        region = Mapping(Memory(fd, 0, 2 << 20, write=True))
        pinning.when_used(region.pin_soon)
        def check():
            fake = FakeCuda()
            with use(fake):
                pinning.use_device()
                pinning.background.wait_prepared()
            assert not fake.registered and not region.pinned
        in_child(check)
    """)


def test_a_forked_child_calls_no_driver() -> None:
    run(f"""
        {textwrap.indent(CUDA, " " * 8).strip()}
        import numpy
        from backends import BackendError
        from backends.base.copier import Pieces, copier_of
        from backends.base.copying import Bounce
        from maru.base.memory.mapping import Mapping

        driver = pinning.find_driver()
        driver.attach(0)
        memory = Memory.private(1 << 16)
        one = [numpy.array([value], numpy.uint64) for value in (driver.allocate(1 << 16), memory.address, 4096)]
        copier_of(0).store(Pieces(*one))
        older = Mapping(Memory.private(1 << 16))
        pinning._later[older] = Mapping.pin_soon
        calls = len(fake.calls)
        def check():
            Bounce().portion(2, 4096)
            try:
                copier_of(0).store(Pieces(*one))
                raise SystemExit("copied")
            except BackendError:
                pass
            pinning.background.wait_prepared()
            assert len(fake.calls) == calls, fake.calls[calls:]
        in_child(check)
    """)


def test_a_child_forked_while_a_thread_adds_an_event_waits_for_one_of_its_own() -> None:
    run("""
        import trio
        from offload import preconditions

        class Event:
            def query(self):
                return True
        with preconditions._watcher._lock:  # as a thread that adds an event has it
            in_child(lambda: trio.run(preconditions.CudaEvent(Event()).wait))
    """)


def test_a_child_forked_while_a_thread_shares_memory_shares_its_own() -> None:
    run("""
        from offload.client import _shared

        with _shared._lock:
            in_child(lambda: _shared.SharedMemory(4096))
    """)


# --- directories and their locks ----------------------------------------------------------------------------------------


def test_a_directory_of_blocks_is_not_held_by_a_forked_child(tmp_path: Path) -> None:
    run(f"""
        from backends import PlaceClosed, PlaceInUse
        from backends.base.blockfile import Directory

        directory = Directory({str(tmp_path)!r})
        def check():
            def enter():
                with directory.in_use():
                    pass
            refused(PlaceClosed, enter)
            directory.close()
        in_child(check)
        try:
            Directory({str(tmp_path)!r})
        except PlaceInUse:
            pass
        else:
            raise AssertionError("a child has let go of its parent's lock")
        child = Sleeper()
        directory.close()
        Directory({str(tmp_path)!r}).close()
        child.end()
    """)


def test_the_home_of_a_pool_is_not_held_by_a_forked_child(tmp_path: Path) -> None:
    run(f"""
        from maru.base.errors import PoolInUse
        from maru._pool.state_directory import StateDirectory

        home = StateDirectory({str(tmp_path / "pool")!r})
        in_child(home.close)
        try:
            StateDirectory({str(tmp_path / "pool")!r})
        except PoolInUse:
            pass
        else:
            raise AssertionError("a child has let go of its parent's lock")
        child = Sleeper()
        home.close()
        StateDirectory({str(tmp_path / "pool")!r}).close()
        child.end()
    """)


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_what_a_handler_has_begun_is_not_waited_for_in_a_forked_child(tmp_path: Path) -> None:
    with PublishedServer(tmp_path) as server:
        run(f"""
            from maru import HandlerClosed
            from maru.blocking import MaruHandler

            handler = MaruHandler(server_url={server.address!r}, chunk_size_bytes=4096, pool_size=2 << 20)
            handler.connect()
            handler.batch_put(["k"], [b"x"])
            stored = handler.begin.batch_put(["l"], [b"x"])
            found = handler.begin.exists("k")
            def check():
                try:
                    found.result()
                except HandlerClosed as exc:
                    assert "forked" in str(exc)
                else:
                    raise AssertionError("a forked child got an answer")
                assert not handler.connected
                assert handler.statistics().calls.waiting == 2
                handler.close()
            # As other threads may have them.
            with handler._lock, handler._driver.lock, handler._driver.connections._making:
                in_child(check)
            assert found.result() and stored.result()
            assert handler.exists("k")
            handler.close()
        """)


# --- at random points -------------------------------------------------------------------------------------------------

KINDS = ["pool", "server", "handler", "engine"]


def play(kind: str, seed: int, steps: int) -> None:
    """A program of its own that two threads play, and that forks between its steps: see ``forking_program.py``."""
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::ResourceWarning"]
    done = subprocess.run(
        [*command, str(Path(__file__).parents[1] / "support" / "forking_program.py"), kind, str(seed), str(steps)],
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
        env={**environment(), "OMP_NUM_THREADS": "1"},
    )
    assert (done.stdout.partition(" forks, ")[2], done.stderr, done.returncode) == ("and all is well\n", "", 0), (
        kind,
        seed,
        done.stderr,
    )


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind == "server")) for kind in KINDS])
def test_a_program_that_forks_now_and_then_does_what_it_did(kind: str) -> None:
    play(kind, 0, 12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_fork_at_random_points_do_what_they_did(kind: str, seed: int) -> None:
    play(kind, seed, 200)
