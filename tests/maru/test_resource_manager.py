"""The resource manager's endpoint: what published clients ask over TCP, and what nobody can spoil for the others."""

import errno
import os
import random
import struct
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from maru import CannotMap, NotOwner, PoolUnusable
from maru._pool.pool import MEMFD, open_pool
from maru._server.resource_manager import ByClient, ResourceManager
from maru._wire.capability import auth_token
from maru._wire.resource_manager import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    DaxType,
    RmAccessRequest,
    RmAccessResponse,
    RmAllocRequest,
    RmAllocResponse,
    RmErrorResponse,
    RmFreeRequest,
    RmHandle,
    RmPool,
    RmStatsRequest,
    RmStatsResponse,
    decode_rm_response,
    encode_rm,
    read_rm_header,
)
from maru.base.memory.mapping import map_region
from tests.support.pools import Stall, is_there, region_files, until

MIB2 = 2 << 20
ME, OTHER = "host:1", "host:2"


class Client:
    """A published client, as far as one connection goes: one request, one response."""

    def __init__(self, stream):
        self.stream = stream
        self.left = b""

    async def take(self, n):
        while len(self.left) < n:
            more = await self.stream.receive_some()
            if not more:
                raise EOFError
            self.left += more
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    async def receive(self):
        header = read_rm_header(await self.take(HEADER_BYTES))
        return decode_rm_response(header.kind, await self.take(header.length))

    async def ask(self, request):
        await self.stream.send_all(encode_rm(request))
        return await self.receive()

    async def allocate(self, size=MIB2, client_id=ME, dax_path=""):
        return await self.ask(RmAllocRequest(size, dax_path, client_id, 1))

    async def free(self, handle, client_id=ME):
        return (await self.ask(RmFreeRequest(handle, client_id, 2))).status

    async def access(self, handle, client_id=OTHER):
        return await self.ask(RmAccessRequest(handle, client_id))

    async def is_closed(self):
        with trio.fail_after(60):
            try:
                return not await self.stream.receive_some()
            except trio.BrokenResourceError:
                return True


@asynccontextmanager
async def an_endpoint(where, capacity_bytes=8 * MIB2, *, pool_options=None, regions=ByClient, **options):
    """A pool, its endpoint, and a way to connect."""
    async with await open_pool(where, capacity_bytes, **(pool_options or {})) as pool:
        await pool.adopt([])
        manager = ResourceManager(pool, regions(pool.allocate, pool.free), **options)
        async with trio.open_nursery() as nursery:
            address = await nursery.start(manager.run)
            host, _, port = address.rpartition(":")

            clients = []

            async def connect():
                clients.append(Client(await trio.open_tcp_stream(host, int(port))))
                return clients[-1]

            manager.connect, manager.pool, manager.cancel = connect, pool, nursery.cancel_scope.cancel
            try:
                yield manager
            finally:
                for client in clients:
                    await trio.aclose_forcefully(client.stream)
                nursery.cancel_scope.cancel()


# --- requests -----------------------------------------------------------------------------------------------------


async def test_a_client_allocates_another_one_maps_and_the_first_frees(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        mine, other = await manager.connect(), await manager.connect()
        granted = await mine.allocate(MIB2 + 1)
        assert isinstance(granted, RmAllocResponse)
        assert (granted.status, granted.access_type, granted.requested_size) == (0, DaxType.FS_DAX, MIB2 + 1)
        handle = granted.handle
        assert (handle.offset, handle.length) == (0, 2 * MIB2)
        assert handle.auth_token == auth_token(manager.pool.secret, handle.region_id, handle.length)
        assert granted.path == str(tmp_path / "pool" / f"maru_{handle.region_id}.dat")

        access = await other.access(handle)
        assert access == RmAccessResponse(0, granted.path, 0, 2 * MIB2, "")
        own = map_region(granted.path, handle.length, write=True)
        own.view(7, 4)[:] = b"seen"
        assert bytes(map_region(access.path, access.length, access.offset).view(7, 4)) == b"seen"

        assert await other.free(handle, OTHER) == -errno.EPERM
        assert await mine.free(handle) == 0
        assert not is_there(granted.path)
        assert await mine.free(handle) == -errno.ENOENT
        assert (await other.access(handle)) == RmAccessResponse(-errno.ENOENT)
        assert manager.statistics().requests == 6


async def test_stats_tell_the_pool(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        client = await manager.connect()
        await client.allocate(3 * MIB2)
        pool = RmPool(str(tmp_path / "pool"), DaxType.FS_DAX, 8 * MIB2, 5 * MIB2, MIB2)
        assert await client.ask(RmStatsRequest()) == RmStatsResponse((pool,))


async def test_regions_of_a_memfd_and_of_a_device_are_named_so_that_they_can_be_mapped(tmp_path):
    options = {"home": tmp_path / "home"}
    async with an_endpoint(MEMFD, pool_options=options) as manager:
        granted = await (await manager.connect()).allocate()
        assert granted.path.startswith(f"/proc/{os.getpid()}/fd/") and granted.access_type == DaxType.FS_DAX
        fd = os.open(granted.path, os.O_RDONLY)  # by a published client: ours follows no link, and takes a descriptor
        assert not any(map_region(fd, MIB2).view())
        os.close(fd)
        with pytest.raises(CannotMap, match="symbolic link"):
            map_region(granted.path, MIB2)
    device = tmp_path / "device"
    device.touch(0o600)
    device.write_bytes(bytes(4 * MIB2))
    async with an_endpoint(device, None, pool_options=options) as manager:
        client = await manager.connect()
        await client.allocate()
        granted = await client.allocate()
        assert (granted.path, granted.handle.offset, granted.access_type) == (str(device), MIB2, DaxType.DEV_DAX)
        access = await client.access(granted.handle)
        assert (access.path, access.offset, access.length) == (str(device), MIB2, MIB2)
        map_region(access.path, access.length, access.offset, write=True).view(0, 3)[:] = b"dax"
        assert device.read_bytes()[MIB2 : MIB2 + 3] == b"dax"
        [pool] = (await client.ask(RmStatsRequest())).pools
        assert (pool.dax_type, pool.path, pool.free) == (DaxType.DEV_DAX, str(device), 2 * MIB2)


async def test_what_cannot_be_allocated_is_answered_with_an_errno_and_empty_fields(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        client = await manager.connect()
        for size, path, code in [
            (0, "", errno.EINVAL),
            (9 * MIB2, "", errno.ENOMEM),
            ((1 << 64) - 1, "", errno.ENOMEM),
            (MIB2, "/dev/dax0.0", errno.ENODEV),
        ]:
            assert await client.allocate(size, dax_path=path) == RmAllocResponse(-code)
        assert (await client.allocate(MIB2, dax_path=str(tmp_path / "pool"))).status == 0
        await manager.pool.aclose()
        assert await client.allocate() == RmAllocResponse(-errno.ESHUTDOWN)


async def test_a_pool_that_fails_is_an_io_error_to_the_client(tmp_path, caplog):
    def fail(fd, offset, length):
        raise OSError(errno.EIO, "broken")

    async with an_endpoint(tmp_path / "pool", pool_options={"reserve": fail}) as manager:
        assert (await (await manager.connect()).allocate()).status == -errno.EIO
    assert "broken" in caplog.text


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"region_id": 99}, errno.ENOENT),
        ({"region_id": (1 << 64) - 1}, errno.ENOENT),
        ({"offset": MIB2}, errno.EINVAL),
        ({"length": 2 * MIB2}, errno.EINVAL),
        ({"length": 0}, errno.EINVAL),
        ({"auth_token": 0}, errno.EACCES),
    ],
)
async def test_a_handle_that_was_never_given_gets_nothing(tmp_path, change, code):
    async with an_endpoint(tmp_path / "pool") as manager:
        client = await manager.connect()
        right = (await client.allocate()).handle
        fields = {name: getattr(right, name) for name in ("region_id", "offset", "length", "auth_token")}
        wrong = RmHandle(**(fields | change))
        assert await client.access(wrong) == RmAccessResponse(-code)
        assert await client.free(wrong) == -code
        assert (await client.access(right)).status == 0


async def test_a_token_of_another_region_is_refused(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        client = await manager.connect()
        first, second = [(await client.allocate()).handle for _ in range(2)]
        mixed = RmHandle(first.region_id, 0, MIB2, second.auth_token)
        assert (await client.access(mixed)).status == -errno.EACCES


async def test_regions_allocated_another_way_are_found_here_and_freed_only_by_their_account(tmp_path):
    """One registry stands behind both ways to ask: what the server allocates over ZeroMQ, clients map through this."""

    class Registry(ByClient):
        async def free(self, client_id, region_id):
            if region_id == theirs.region_id:
                raise NotOwner("allocated over ZeroMQ")
            if client_id == "broken":
                raise PoolUnusable("no")
            await super().free(client_id, region_id)

    async with an_endpoint(tmp_path / "pool", regions=Registry) as manager:
        theirs = await manager.pool.allocate(MIB2)
        token = auth_token(manager.pool.secret, theirs.region_id, theirs.length)
        handle = RmHandle(theirs.region_id, theirs.offset, theirs.length, token)
        client = await manager.connect()
        assert (await client.access(handle)).path == theirs.path
        assert await client.free(handle) == -errno.EPERM
        mine = (await client.allocate()).handle
        assert await client.free(mine, "broken") == -errno.EIO


async def test_a_region_is_freed_with_the_connection_that_asked_for_it(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        mine, other = await manager.connect(), await manager.connect()
        kept, given_back = (await mine.allocate()).handle, (await mine.allocate()).handle
        others = (await other.allocate(client_id=OTHER)).handle
        assert await other.free(given_back, ME) == 0  # its client may say so over any connection
        await trio.aclose_forcefully(mine.stream)
        await until(lambda: region_files(manager.pool.home) == {f"maru_{others.region_id}.dat"})
        assert (await other.access(kept)).status == -errno.ENOENT
        assert (await other.access(others)).status == 0
        assert manager.pool.totals().regions == 1


async def test_a_region_that_was_not_asked_for_here_outlives_who_mapped_it(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        region = await manager.pool.allocate(MIB2)
        token = auth_token(manager.pool.secret, region.region_id, region.length)
        client = await manager.connect()
        assert not (await client.access(RmHandle(region.region_id, region.offset, region.length, token))).status
        await trio.aclose_forcefully(client.stream)
        await until(lambda: manager.statistics().connections == 0)
        assert manager.pool.totals().regions == 1


async def test_who_has_a_region_may_be_silent_for_ever(tmp_path, autojump_clock):
    async with an_endpoint(tmp_path / "pool", idle=100) as manager:
        client = await manager.connect()
        handle = (await client.allocate()).handle
        with trio.move_on_after(100_000):
            await client.stream.receive_some()
            raise AssertionError("it was hung up on")
        assert await client.free(handle) == 0
        began = trio.current_time()
        assert not await client.stream.receive_some()
        assert trio.current_time() - began == pytest.approx(100, abs=1)


async def test_a_server_that_ends_while_a_connection_gives_back_leaves_nothing_running(tmp_path):
    """Cancelled there, what was not freed yet is removed by the next start: nobody lists it."""
    began = trio.Event()
    with trio.fail_after(60):
        async with an_endpoint(tmp_path / "pool") as manager:
            client = await manager.connect()
            await client.allocate()

            async def free(client_id, region_id):
                began.set()
                await trio.sleep_forever()

            manager._regions.free = free
            await trio.aclose_forcefully(client.stream)
            await began.wait()
            manager.cancel()


# --- connections --------------------------------------------------------------------------------------------------


async def test_a_stalled_allocation_stalls_its_own_connection_and_no_other(tmp_path):
    stall = Stall(1)
    async with an_endpoint(tmp_path / "pool", pool_options={"reserve": stall}) as manager:
        waiting, other = await manager.connect(), await manager.connect()
        async with trio.open_nursery() as nursery:
            granted = []

            async def wait():
                granted.append(await waiting.allocate())

            nursery.start_soon(wait)
            await stall.is_stuck()
            handle = (await other.allocate()).handle
            assert (await other.access(handle)).status == 0
            assert (await other.ask(RmStatsRequest())).pools[0].free == 6 * MIB2
            assert await other.free(handle) == 0
            assert not granted
            stall.let_go.set()
        assert granted[0].status == 0


async def test_when_all_the_pools_threads_are_stuck_what_is_known_is_still_answered(tmp_path):
    stall = Stall(0)
    async with an_endpoint(tmp_path / "pool", 64 * MIB2, pool_options={"reserve": stall, "threads": 2}) as manager:
        client = await manager.connect()
        handle = (await client.allocate()).handle
        stall.stuck = 2
        others = [await manager.connect() for _ in range(4)]
        for other in others:
            await other.stream.send_all(encode_rm(RmAllocRequest(MIB2, "", OTHER, 1)))
        for _ in range(2):
            await stall.is_stuck()
        for _ in range(10):
            assert (await client.access(handle)).status == 0
            assert (await client.ask(RmStatsRequest())).pools[0].total == 64 * MIB2
        stall.let_go.set()
        assert [(await other.receive()).status for other in others] == [0] * 4


async def test_a_client_that_leaves_a_stalled_allocation_leaves_no_region(tmp_path):
    stall = Stall(1)
    async with an_endpoint(tmp_path / "pool", pool_options={"reserve": stall}) as manager:
        client = await manager.connect()
        await client.stream.send_all(encode_rm(RmAllocRequest(MIB2, "", ME, 1)))
        await stall.is_stuck()
        await client.stream.aclose()  # published clients wait for two seconds
        await until(lambda: manager.statistics().connections == 0)
        stall.let_go.set()
        await manager.pool._memory.wait_idle()
        assert manager.pool.totals().allocated_bytes == 0
        assert not region_files(tmp_path / "pool")


@pytest.mark.parametrize("why", ["the client is gone", "the endpoint is cancelled"])
async def test_a_region_whose_answer_cannot_leave_is_freed(tmp_path, why):
    class JustThen(ByClient):
        async def allocate(self, client_id, length):
            region = await super().allocate(client_id, length)
            just_then()
            return region

    async with an_endpoint(tmp_path / "pool", regions=JustThen) as manager:
        client = await manager.connect()

        def just_then():
            if why == "the client is gone":
                client.stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.stream.socket.close()  # a reset
            else:
                manager.cancel()

        await client.stream.send_all(encode_rm(RmAllocRequest(MIB2, "", ME, 1)))
        with trio.CancelScope(shield=True):
            await until(lambda: manager.statistics().requests and not manager.statistics().connections)
            assert manager.pool.totals().allocated_bytes == 0
            assert not region_files(tmp_path / "pool")


async def test_requests_that_come_in_pieces_or_all_at_once_are_answered_in_order(tmp_path):
    async with an_endpoint(tmp_path / "pool") as manager:
        client = await manager.connect()
        frames = encode_rm(RmAllocRequest(MIB2, "", ME, 1)) + encode_rm(RmStatsRequest()) * 2
        await client.stream.send_all(frames)
        kinds = [type(await client.receive()) for _ in range(3)]
        assert kinds == [RmAllocResponse, RmStatsResponse, RmStatsResponse]
        for at in range(len(frames)):
            await client.stream.send_all(frames[at : at + 1])
        assert [type(await client.receive()) for _ in range(3)] == kinds


async def test_a_bad_body_is_answered_and_costs_nothing_and_a_bad_header_costs_the_connection(tmp_path):
    header = encode_rm(RmStatsRequest())
    async with an_endpoint(tmp_path / "pool") as manager:
        client = await manager.connect()
        alloc = encode_rm(RmAllocRequest(MIB2, "", ME, 1))
        too_short = alloc[:8] + (len(alloc) - HEADER_BYTES - 1).to_bytes(4, "little") + alloc[HEADER_BYTES:-1]
        unknown = header[:6] + (77).to_bytes(2, "little") + header[8:]
        response_kind = header[:6] + (6).to_bytes(2, "little") + header[8:]
        for frame in (too_short, unknown, response_kind):
            await client.stream.send_all(frame)
            answer = await client.receive()
            assert isinstance(answer, RmErrorResponse) and answer.status == -errno.EINVAL and answer.message
        assert (await client.allocate()).status == 0
        too_long = header[:8] + (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little")
        for frame in (bytes(12), too_long, header[:4] + b"\x01\x00" + header[6:]):
            client = await manager.connect()
            await client.stream.send_all(frame + b"rubbish" * 30_000)  # unread bytes must not take the answer back
            answer = await client.receive()
            assert isinstance(answer, RmErrorResponse) and answer.status == -errno.EPROTO
            assert await client.stream.receive_some() == b""  # and no reset
        assert manager.statistics().bad == 6


@pytest.mark.parametrize("rounds", [60, pytest.param(5_000, marks=pytest.mark.long)])
async def test_the_endpoint_goes_on_answering_whatever_it_is_sent(tmp_path, rounds):
    """Mutated frames, whole or cut: a good client is answered throughout, and nothing is left in the end."""
    rng = random.Random(3)
    handle = RmHandle(1, 0, MIB2, 5)
    seeds = [
        encode_rm(request)
        for request in (
            RmAllocRequest(MIB2, "/dev/shm/x", ME, 1),
            RmFreeRequest(handle, ME, 2),
            RmStatsRequest(),
            RmAccessRequest(handle, ME),
        )
    ]
    async with an_endpoint(tmp_path / "pool", 2 * MIB2, idle=60, frame_time=60) as manager:
        good = await manager.connect()
        kept = (await good.allocate()).handle
        for _ in range(rounds):
            bad = await manager.connect()
            frames = bytearray(b"".join(rng.choices(seeds, k=20)))
            for _ in range(rng.randrange(1, 12)):
                at = rng.randrange(len(frames))
                match rng.randrange(3):
                    case 0:
                        frames[at] = rng.randrange(256)
                    case 1:
                        del frames[at : at + rng.randrange(1, 9)]
                    case 2:
                        frames[at:at] = rng.randbytes(rng.randrange(1, 9))
            try:
                await bad.stream.send_all(frames)
                await bad.stream.send_eof()
                while not await bad.is_closed():  # what is answered is read
                    pass
            except trio.BrokenResourceError:
                pass
            await bad.stream.aclose()
            assert (await good.access(kept)).status == 0
        await until(lambda: manager.statistics().connections == 1)
        statistics = manager.statistics()
        assert statistics.bad > rounds // 2 and statistics.refused == 0
        assert manager.pool.totals().pending == 0
        assert await good.free(kept) == 0


async def test_too_many_connections_are_closed_at_once_and_the_others_go_on(tmp_path):
    async with an_endpoint(tmp_path / "pool", max_connections=2) as manager:
        clients = [await manager.connect() for _ in range(2)]
        for client in clients:
            await client.ask(RmStatsRequest())
        assert await (await manager.connect()).is_closed()
        assert (manager.statistics().connections, manager.statistics().refused) == (2, 1)
        for client in clients:
            await client.ask(RmStatsRequest())
        await clients[0].stream.aclose()
        await until(lambda: manager.statistics().connections == 1)
        await (await manager.connect()).ask(RmStatsRequest())


async def test_silent_connections_keep_no_client_out(tmp_path):
    async with an_endpoint(tmp_path / "pool", max_connections=2) as manager:
        silent = [await manager.connect() for _ in range(2)]
        await until(lambda: manager.statistics().connections == 2)
        await (await manager.connect()).ask(RmStatsRequest())
        assert await silent[0].is_closed()
        await silent[1].ask(RmStatsRequest())


async def test_silence_between_requests_is_allowed_and_silence_within_one_is_not(tmp_path, autojump_clock):
    async with an_endpoint(tmp_path / "pool", idle=100, frame_time=5) as manager:
        # The one who speaks stays: real sockets, but the time is virtual, and jumps while nobody has anything to do.
        ends = {}

        async def end(name, sent):
            client = await manager.connect()
            await client.stream.send_all(sent)
            began = trio.current_time()
            assert await wait_closed(client)
            ends[name] = trio.current_time() - began

        async def wait_closed(client):
            return not await client.stream.receive_some()

        frame = encode_rm(RmStatsRequest())
        for name, sent in [("nothing", b""), ("half a header", frame[:5])]:
            await end(name, sent)
        assert ends == {"nothing": pytest.approx(100, abs=1), "half a header": pytest.approx(5, abs=1)}


async def test_a_client_that_reads_no_answers_is_left(tmp_path, autojump_clock):
    async with an_endpoint(tmp_path / "pool", frame_time=5) as manager:
        client = await manager.connect()
        frames = encode_rm(RmStatsRequest()) * 1_000
        with pytest.raises(trio.BrokenResourceError):
            for _ in range(1_000):
                await client.stream.send_all(frames)
        assert manager.statistics().connections == 0


async def test_it_listens_on_the_loopback_interface_only(tmp_path):
    async with await open_pool(tmp_path / "pool", MIB2) as pool:
        await pool.adopt([])
        manager = ResourceManager(pool, ByClient(pool.allocate, pool.free))
        with pytest.raises(ValueError, match="reachable from other hosts"):
            await manager.run("0.0.0.0")
        async with trio.open_nursery() as nursery:
            for host, shown in [("localhost", ("127.0.0.1:", "[::1]:")), ("127.0.0.1", "127.0.0.1:")]:
                address = await nursery.start(manager.run, host)
                assert address.startswith(shown)
            address = await nursery.start(
                lambda task_status: manager.run("0.0.0.0", insecure=True, task_status=task_status)
            )
            assert address.startswith("0.0.0.0:")
            nursery.cancel_scope.cancel()


async def test_an_error_of_ours_costs_one_connection(tmp_path, caplog):
    class Broken(ByClient):
        async def allocate(self, client_id, length):
            raise RuntimeError("ours")

    async with an_endpoint(tmp_path / "pool", regions=Broken) as manager:
        good, unlucky = await manager.connect(), await manager.connect()
        with pytest.raises(EOFError):
            await unlucky.allocate()
        assert "ours" in caplog.text
        await good.ask(RmStatsRequest())
