"""Caches on a CUDA device, over a driver in Python: copied in place by IPC handles, or through host memory where that fails."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from backends.base.copier import close_copiers
from maru.base.memory import pinning
from maru.fake_cuda import FakeCuda, use
from offload import NO_WAIT, OffloadError, Status
from offload.client import (
    DaemonRefused,
    DaemonTierFailed,
    SharedBlocks,
    SharedMemory,
    open_client,
    open_connection,
)
from offload.daemon._messages import CudaMemory, Registered, RegisterKVCache, TensorLayout
from tests.support.cuda_caches import BLOCKS, SIZE, WHOLE, CudaCache, in_thread, load, store
from tests.support.daemons import Process, daemon, until

DEVICE = "00000000-0000-0000-0000-000000000000"


@pytest.fixture(autouse=True)
def nothing_is_pinned_meanwhile(monkeypatch):
    """Pin no memory of clients, since these tests count the calls of the driver."""
    monkeypatch.setattr(pinning, "use_device", lambda: None)


@pytest.fixture
def fake():
    close_copiers()
    fake = FakeCuda()
    with use(fake) as fake.driver:
        yield fake
        close_copiers()
    assert not fake.wrong


def opened(fake):
    return sum(allocation.opened for allocation in fake.allocations.values())


async def nothing_open(server, fake):
    await until(lambda: not server.statistics()["device_allocations"], "memory of an engine stays open")
    assert not opened(fake)


@asynccontextmanager
async def serving(path, fake, **knobs):
    """A daemon at whose end nothing of an engine's is open."""
    async with daemon(path, **knobs) as server:
        yield server
        await until(lambda: not server.statistics()["sessions"], "a session stays")
        await nothing_open(server, fake)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "pass through host memory" in record.getMessage()]


# --- in place -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocations", [1, 4])
async def test_caches_on_a_device_are_copied_in_place(path, fake, caplog, allocations):
    cache = CudaCache(fake, fake.driver, allocations=allocations)
    async with serving(path, fake) as server, open_client(cache.tier, server.url) as engine:
        assert (await store(engine, cache)).status is Status.COMPLETE
        assert await load(engine, cache) == BLOCKS
        assert server.statistics()["device_allocations"] == allocations == opened(fake)
        assert server.statistics()["caches"] == 1  # no staging area
    assert warnings(caplog) == []


async def test_a_store_reads_what_was_computed_before_its_event(path, fake):
    cache, gate = CudaCache(fake, fake.driver), threading.Event()
    written = [bytes([at]) * SIZE for at in range(BLOCKS)]

    def compute():
        fake.driver.attach(0)
        stream, event = fake.driver.stream(), fake.driver.event()
        fake.kernel(stream, lambda: [cache.write(at, data) for at, data in enumerate(written)], gate)
        fake.driver.record(event, stream)
        return event

    class Computed:
        def __init__(self):
            self.cuda_event = in_thread(compute)

        def query(self):
            fake.driver.attach(0)  # as torch does
            fake.progress()
            return fake.driver.query(self.cuda_event)

        def synchronize(self):
            raise AssertionError("no thread is to wait in the driver")

    async with serving(path, fake) as server, open_client(cache.tier, server.url) as engine:
        keys = [b"computed %d" % at for at in range(BLOCKS)]
        handle = await engine.store(cache.tier.external(range(BLOCKS), keys), Computed())
        await trio.sleep(0.05)  # it waits: its blocks hold nothing yet
        assert not handle.status.terminal
        fake.open_gate(gate)
        assert (await handle.wait()).status is Status.COMPLETE
        async with await engine.lookup(keys) as hit:
            assert (
                await engine.load(hit, cache.tier.into(range(BLOCKS, 2 * BLOCKS)), precondition=NO_WAIT)
            ).loaded == BLOCKS
        assert [cache.read(BLOCKS + at) for at in range(BLOCKS)] == written


async def test_no_thread_of_the_engine_is_attached(path, fake):
    cache = CudaCache(fake, fake.driver)
    async with serving(path, fake) as server, open_client(cache.tier, server.url) as engine:
        assert (await store(engine, cache)).status is Status.COMPLETE
        with pytest.raises(Exception, match="INVALID_CONTEXT"):
            fake.driver.stream()


async def test_only_the_device_of_the_cache_gets_a_context(path):
    close_copiers()
    with use(fake := FakeCuda(devices=2)) as driver:
        cache = CudaCache(fake, driver)
        async with serving(path, fake) as server, open_client(cache.tier, server.url) as engine:
            assert (await store(engine, cache)).status is Status.COMPLETE
        close_copiers()
    assert fake.contexts == {0} and not fake.wrong


# --- through host memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["no plain allocation", "a part of a block of memory"])
async def test_a_cache_that_cannot_be_shared_passes_through_host_memory(path, fake, caplog, why):
    fake.shares = why != "no plain allocation"
    cache = CudaCache(fake, fake.driver, nbytes=WHOLE if not fake.shares else WHOLE // 2)
    async with serving(path, fake) as server, open_client(cache.tier, server.url) as engine:
        for first in (0, 100):
            assert (await store(engine, cache, first)).status is Status.COMPLETE
            assert await load(engine, cache, first) == BLOCKS
        assert not opened(fake)
    assert len(warnings(caplog)) == 1


PROGRAM = """
import sys
sys.modules["torch"] = None
if {without_numpy}:
    sys.modules["numpy"] = None
from maru.fake_cuda import FakeCuda, use
from offload.cli import main
with use(FakeCuda()):
    main()
"""


@pytest.mark.parametrize("without_numpy", [False, True])
async def test_a_daemon_without_torch_serves_caches_on_a_device_and_without_numpy_says_so(
    path, fake, caplog, without_numpy
):
    command = ("serve", "--runtime-dir", path, "--maru-pool-size-gb", "0", "--host-bytes", "16 MiB")
    with Process("-c", PROGRAM.format(without_numpy=without_numpy), *command) as process:
        assert "is ready" in await trio.to_thread.run_sync(process.line)
        cache = CudaCache(fake, fake.driver)
        async with open_client(cache.tier, f"ipc://{path}/daemon.sock") as engine:
            assert (await store(engine, cache)).status is Status.COMPLETE
            assert await load(engine, cache) == BLOCKS
    assert len(warnings(caplog)) == without_numpy
    assert not without_numpy or "pip install 'trio-offload[cuda]'" in warnings(caplog)[0]


# --- claims of an engine ------------------------------------------------------------------------------------------------

LAYOUT = [TensorLayout(0, 0, 1, [2 * BLOCKS, SIZE], [SIZE, 1], 0)]


async def test_wrong_claims_of_an_engine_are_refused_and_leave_nothing_open(path, fake):
    cache = CudaCache(fake, fake.driver)

    def share():
        fake.driver.attach(0)
        return fake.driver.share(cache.allocations[0])

    handle, size = in_thread(share), 2 * BLOCKS * SIZE
    there = CudaMemory(DEVICE, handle, 0, size)
    elsewhere = CudaMemory("00000000-0000-0000-0000-000000000007", handle, 0, size)
    overlapping = [TensorLayout(at, 0, 1, [BLOCKS, SIZE // 2], [SIZE // 2, 1], 0) for at in range(2)]
    claims = [
        (DaemonRefused, "of an allocation of 2097152", LAYOUT, [CudaMemory(DEVICE, handle, WHOLE - 1, size)]),
        (DaemonRefused, "several devices", LAYOUT, [there, elsewhere]),
        (DaemonRefused, "share memory", overlapping, [there, there]),
        (DaemonRefused, "there is no memory 1", [TensorLayout(1, 0, 1, [4, SIZE], [SIZE, 1], 0)], [there]),
        (DaemonTierFailed, "does not see device", LAYOUT, [elsewhere]),
        (DaemonTierFailed, "cuIpcOpenMemHandle", LAYOUT, [CudaMemory(DEVICE, bytes(64), 0, size)]),
    ]
    async with serving(path, fake, block_bytes=SIZE) as server, open_connection(server.url) as connection:
        for error, text, layout, memories in claims:
            with pytest.raises(error, match=text):
                await connection.ask(lambda seq, one=layout, two=memories: RegisterKVCache(seq, one, two), Registered)
            await nothing_open(server, fake)
        await connection.ask(lambda seq: RegisterKVCache(seq, LAYOUT, [there]), Registered)
        assert opened(fake) == 1


async def test_memory_of_a_device_that_the_daemon_does_not_see_is_refused(path, monkeypatch):
    def no_library():
        raise OSError("there is no libcuda")

    monkeypatch.setattr("ctypes.CDLL", lambda name: no_library())
    async with daemon(path) as server, open_connection(server.url) as connection:
        memory = [CudaMemory(DEVICE, bytes(64), 0, 2 * BLOCKS * SIZE)]
        with pytest.raises(DaemonTierFailed, match="sees no device: no CUDA driver"):
            await connection.ask(lambda seq: RegisterKVCache(seq, LAYOUT, memory), Registered)


# --- errors of the device -----------------------------------------------------------------------------------------------


async def lives(path, number):
    """An engine lives with its call of this number refused, and another one after it. Returns how many calls the first made."""
    close_copiers()
    with use(fake := FakeCuda()) as driver:
        async with serving(path, fake) as server:
            cache, other = CudaCache(fake, driver), CudaCache(fake, driver)
            begun = len(fake.calls)
            fake.fail(begun + number)
            async with open_client(cache.tier, server.url) as engine:
                stored = await store(engine, cache)
                assert not any("Damaged" in repr(error) for error in stored.failed.values())
                with suppress(OffloadError, OSError):
                    await load(engine, cache)
            await until(lambda: not server.statistics()["sessions"], "a session stays")
            if not server.statistics()["failed_device_closes"]:
                await until(
                    lambda: server.statistics()["failed_device_closes"] or not opened(fake), "memory stays open"
                )
            n_calls = len(fake.calls) - begun
            async with open_client(other.tier, server.url) as engine:
                assert (await store(engine, other, 100)).status is Status.COMPLETE
                assert await load(engine, other, 100) == BLOCKS
            assert not server.degradations.texts() and not server.statistics()["quarantined"]
        close_copiers()
        assert not fake.wrong and not fake.streams and not fake.events and not fake.registered
    return n_calls


async def test_no_call_that_fails_once_leaks_or_gives_wrong_bytes(path):
    n_calls = await lives(path, 1_000_000)
    assert n_calls > 20
    for number in range(n_calls):
        await lives(path, number)


async def test_memory_that_cannot_be_closed_is_closed_with_the_next_one(path, fake, caplog):
    async with serving(path, fake) as server:
        for first in (0, 100):
            cache = CudaCache(fake, fake.driver)
            async with open_client(cache.tier, server.url) as engine:
                assert (await store(engine, cache, first)).status is Status.COMPLETE
                if first == 0:
                    fake.fail(len(fake.calls) + 2)  # behind the two of attaching
            await until(lambda: not server.statistics()["sessions"], "a session stays")
            await until(lambda: server.statistics()["failed_device_closes"] == 1, "it was closed")
            if first == 0:
                assert server.statistics()["device_allocations"] == opened(fake) == 1
    assert "device memory of an engine could not be closed: cuIpcCloseMemHandle failed" in caplog.text


# --- an engine in a process of its own ----------------------------------------------------------------------------------


class Engine(Process):
    """An engine with a cache on a device, which does as it is told."""

    def __init__(self, url):
        super().__init__("-m", "tests.support.cuda_caches", url)

    async def do(self, line):
        self.say(line)
        return await trio.to_thread.run_sync(self.event)


async def test_an_engine_that_dies_leaves_nothing_open(path, fake):
    async with serving(path, fake) as server:
        with Engine(server.url) as engine:
            assert await engine.do("store 0") == {"status": "Status.COMPLETE", "shared": 1, "wrong": 0}
            assert await engine.do("load 0") == {"loaded": BLOCKS, "shared": 1, "wrong": 0}
            assert opened(fake) == 1
            engine.kill()
        await nothing_open(server, fake)
        with Engine(server.url) as engine:
            assert (await engine.do("load 0"))["loaded"] == BLOCKS


@pytest.mark.parametrize("way", ["store 100", "load 0"])
async def test_a_lost_device_ends_its_sessions_and_no_others_and_is_said(path, fake, monkeypatch, way):
    monkeypatch.setattr("offload.daemon._degraded.INTERVAL", 0.01)
    host = SharedBlocks(SharedMemory(BLOCKS * SIZE), SIZE)
    async with daemon(path) as server, open_client(host, server.url, name="host") as other:
        with Engine(server.url) as engine:
            assert (await engine.do("store 0"))["status"] == "Status.COMPLETE"
            fake.lose(0)  # of the daemon's process alone
            said = await engine.do(way)
            assert said.get("status") != "Status.COMPLETE" and not said.get("loaded")
            await until(lambda: f"lost_device {DEVICE}" in server.degradations.texts(), "nothing is said")
            await until(lambda: server.statistics()["sessions_given_back"] == 1, "its session goes on")

            async def is_loaded():
                return (await engine.do("load 0"))["loaded"] == BLOCKS

            await until(is_loaded, "its next session does not begin")
            assert (await engine.do("store 200"))["status"] == "Status.COMPLETE"
            assert (await engine.do("load 200"))["loaded"] == BLOCKS
            assert "is lost to this daemon" in engine.errors()
        keys = [b"host %d" % at for at in range(BLOCKS)]
        handle = await other.store(host.external(range(BLOCKS), keys), NO_WAIT)
        assert (await handle.wait()).status is Status.COMPLETE
        async with await other.lookup(keys) as hit:
            assert (await other.load(hit, host.into(range(BLOCKS)))).loaded == BLOCKS
        assert other.tiers["daemon"].connection.sessions == 1
