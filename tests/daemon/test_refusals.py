"""The environment refuses one call of a server: one request is answered with that, the service goes on, and nothing is left.

A server is a row of the table: how it is served in a process of its own, and a program of requests that its clients make. For
each kind of call and each of its numbers in that program the program runs once more, with that call refused; then a client that
comes new must be served, and the server must hold no more than before.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio

from backends.pinned_pool import PinnedPoolConfig, PinnedPoolError
from backends.pinned_pool import open_server as open_pinned_pool
from backends.pinned_pool._client import PinnedPoolClient
from maru import Loaded, MaruError, ServerConfig, Stored, open_server
from maru._server import indexes
from maru.blocking import MaruHandler
from offload import NO_WAIT, OffloadError
from offload.client import SharedBlocks, SharedMemory, open_client
from offload.daemon import DaemonConfig, open_daemon
from tests.support.daemons import engine_config
from tests.support.refusals import KINDS, RefusingServer

PAGE = 4096
REST = 10.0
"""Seconds in which a server has let go of what its clients had."""
LONGEST = 20.0
"""Seconds of a program with a refused call: a client that is answered is done long before."""

# --- the page store -----------------------------------------------------------------------------------------------------


async def serve_pages(directory: str, ready: Callable[..., None]) -> None:
    config = ServerConfig(
        pool_path=f"{directory}/pool",
        capacity_bytes=64 << 20,
        segment_bytes=64 << 10,
        lease_grace=0.1,
        session_lease=1.0,
    )
    indexes._LOOK = 0.05  # seconds: else an index of a client that has gone counts as left
    async with open_server(config) as server:

        def held() -> dict[str, Any]:
            told = server.statistics()
            assert told.channel is not None
            names = os.listdir(f"{directory}/pool")
            return {
                "sessions": server._storage.directory.session_count,
                "connections": told.channel.connections + told.descriptors.connections,
                "regions without a file": told.pool.regions - sum(name.endswith(".dat") for name in names),
                "temporary": sum(name.endswith(".tmp") and not name.startswith("snapshot") for name in names),
                "pending": told.pool.pending,
            }

        ready(server.endpoints[-1], held)
        await trio.sleep_forever()


def page_handler(address: str, **options: Any) -> MaruHandler:
    return MaruHandler(
        server_url=address, pool_size=2 << 20, chunk_size_bytes=PAGE, timeout_ms=2000, lease=1.0, **options
    )


def use_pages(address: str, strict: bool, clients: int = 10) -> None:
    """Ten clients with some twenty requests each."""
    for number in range(clients):
        keys = [f"k{number} {at}" for at in range(4)]
        pages = [key.encode().ljust(PAGE, b".") for key in keys]
        with _errors(strict, MaruError, OSError), page_handler(address, tenant=f"t{number % 3}") as handler:
            stored = handler.batch_put(keys, pages)
            assert not strict or set(stored) <= {Stored.NEW, Stored.DUPLICATE}
            into = [bytearray(PAGE) for _ in keys]
            for answer, page, expected in zip(handler.batch_get_into(keys, into), into, pages, strict=True):
                assert answer is not Loaded.LOADED or page == expected, "wrong bytes"
                assert not strict or answer is Loaded.LOADED
            handler.exists(keys[0])
            handler.batch_exists([f"{'long':200} {at}" for at in range(1000)])  # more than a packet holds
            handler.delete(keys[0])
            handler.batch_put(keys[:1], pages[:1])


# --- the pinned pool ----------------------------------------------------------------------------------------------------


async def serve_pinned(directory: str, ready: Callable[..., None]) -> None:
    config = PinnedPoolConfig(runtime_dir=directory, port=0, pool_memory_size=16, chunk_size=PAGE, pin="none")
    async with open_pinned_pool(config) as server:

        def held() -> dict[str, Any]:
            told = server.statistics()
            return {"clients": told.clients, "pools": told.pools, "pending": server.workers.statistics().pending}

        ready(server.address, held)
        await trio.sleep_forever()


def use_pinned(address: str, strict: bool, clients: int = 20) -> None:
    """Twenty clients with ten requests each."""
    for number in range(clients):
        with (
            _errors(strict, PinnedPoolError, OSError),
            contextlib.closing(
                PinnedPoolClient(address, timeout=2, shared_memory=None if number % 2 else False)
            ) as one,
        ):
            try:
                one.allocate_pool_memory(64 << 10)
            except PinnedPoolError:
                if strict:
                    raise
                one.allocate_pool_memory(64 << 10)  # a refused request costs nothing: the next one is good
            for length in (100, 9000):
                block = one.allocate_from_pool(length)
                assert block is not None
                data, back = os.urandom(length), bytearray(length)
                one.copy_to_pool(block.allocation_id, 0, data)
                one.copy_from_pool(block.allocation_id, 0, back)
                assert back == data, "wrong bytes"
                one.free_from_pool([block.allocation_id])
            one.get_usage_info()


# --- the daemon ---------------------------------------------------------------------------------------------------------


async def serve_daemon(directory: str, ready: Callable[..., None]) -> None:
    tiers = {
        "host": {"type": "memory", "capacity_bytes": 64 * PAGE},
        "disk": {"type": "file", "directory": f"{directory}/disk", "capacity_bytes": 4 << 20},
        "maru": {"type": "maru", "server_url": f"ipc://{directory}/run/maru/maru.sock", "pool_size": 4 << 20},
    }
    os.mkdir(f"{directory}/disk", 0o700)
    config = DaemonConfig(runtime_dir=f"{directory}/run", block_bytes=PAGE)
    maru = ServerConfig(rm_address="", pool_path=f"{directory}/run/maru", capacity_bytes=64 << 20)
    async with open_daemon(config, engine_config(tiers=tiers), maru=maru) as daemon:

        def held() -> dict[str, Any]:
            values = daemon.statistics()
            return {
                name: values.get(name, 0)
                for name in ("sessions", "requests", "holds", "memories", "caches", "open_hits", "connections")
            }

        ready(daemon.url, held)
        await trio.sleep_forever()


def use_daemon(address: str, strict: bool, clients: int = 10) -> None:
    """Ten engines with some twenty requests each."""

    async def main() -> None:
        for number in range(clients):
            cache = SharedBlocks(SharedMemory(16 * PAGE), PAGE)
            keys = [b"k%d %d" % (number, at) for at in range(4)]
            for at, key in enumerate(keys):
                cache.write(at, key.ljust(PAGE, b"."))
            with _errors(strict, OffloadError, OSError), trio.fail_after(LONGEST):
                async with open_client(cache, address) as engine:
                    for _ in range(4):
                        handle = await engine.store(cache.external(range(4), keys), NO_WAIT)
                        result = await handle.wait()
                        assert not strict or len(result.completed) == 4
                        async with await engine.lookup(keys) as hit:
                            loaded = await engine.load(hit, cache.into(range(8, 8 + len(hit.keys))))
                        for at in range(loaded.loaded):
                            assert cache.read(8 + at) == keys[at].ljust(PAGE, b"."), "wrong bytes"
                        assert not strict or loaded.loaded == 4
                        await engine.delete(keys[:1])

    trio.run(main)


# --- all of them --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _errors(strict: bool, *kinds: type[BaseException]):
    """Let typed errors pass where a call is refused; all others are failures, and so is each without a refusal."""
    try:
        yield
    except kinds:
        if strict:
            raise


@attrs.frozen
class Row:
    """A server, and what its clients do."""

    serve: str
    use: Callable[..., None]
    """Makes the requests; told where, and whether every one has to succeed."""


ROWS = {
    "page store": Row("serve_pages", use_pages),
    "pinned pool": Row("serve_pinned", use_pinned),
    "daemon": Row("serve_daemon", use_daemon),
}


def at_rest(server: RefusingServer, holds: dict[str, Any], descriptors: int) -> dict[str, Any]:
    """Wait until it holds no more than that; what it holds."""
    ends = time.monotonic() + REST
    while True:
        told = server.tell()
        more = {name: value for name, value in told["held"].items() if value > holds.get(name, 0)}
        if told["descriptors"] > descriptors:
            more["descriptors"] = told["descriptors"]
        if not more:
            return told
        assert time.monotonic() < ends, f"it still holds {more}, and {descriptors} descriptors before"
        time.sleep(0.02)


@pytest.fixture(scope="module", params=ROWS)
def refusing(request):
    """A server that has been used, its row, and how many calls of each kind the program makes."""
    row = ROWS[request.param]
    with (
        tempfile.TemporaryDirectory(prefix="rf-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path,
        RefusingServer(f"{__name__}:{row.serve}", path) as server,
    ):
        for _ in range(2):
            server.arm()
            row.use(server.address, True)
        counts = server.tell()["counts"]
        time.sleep(2.0)
        told = server.tell()
        yield server, row, counts, told["held"], told["descriptors"]


def check_refusal(refusing, kind: str, at: int, **some: int) -> str:
    """Run the program with one call refused, and then as if nothing had been."""
    server, row, _, holds, descriptors = refusing
    server.arm(kind, at)
    began = time.monotonic()
    row.use(server.address, False, **some)
    took = time.monotonic() - began
    refused = server.tell()["refused"]
    server.arm()
    try:
        assert took < LONGEST
        row.use(server.address, True, clients=1)
        at_rest(server, holds, descriptors)
    except BaseException as exc:
        exc.add_note(f"{kind} {at}, refused at {refused}; {server.said()[-2000:]}")
        raise
    return refused


@pytest.mark.parametrize("kind", KINDS)
def test_refused_call_ends_no_service(refusing, kind):
    _, _, counts, _, _ = refusing
    if counts[kind]:
        check_refusal(refusing, kind, 2, clients=2)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_refused_call_ends_no_service(refusing, kind):
    _, _, counts, _, _ = refusing
    for at in range(1, counts[kind] + 1):
        check_refusal(refusing, kind, at)
