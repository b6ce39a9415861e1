"""The published peers against each other: what a test of ours against them may rely on."""

import errno
import socket
import struct
import threading
import time

import pytest

from tests.support import published
from tests.support.published import (
    Ask,
    IpcError,
    PublishedAsyncClient,
    PublishedClient,
    PublishedRmClient,
    PublishedServer,
)
from tests.support.published_clients import impatient
from tests.support.published_wire import receive

MIB = 1 << 20


@pytest.fixture
def server(tmp_path):
    with PublishedServer(tmp_path) as server:
        yield server


@pytest.fixture(params=[PublishedClient, PublishedAsyncClient], ids=["sync", "async"])
def client(request, server):
    with request.param(server.address) as client:
        yield client


def region_of(client, instance="i1", size=4 * MIB):
    return client.ask(Ask.REQUEST_ALLOC, instance_id=instance, size=size)["handle"]


def register(client, key, region, offset=0, length=MIB):
    return client.ask(Ask.REGISTER_KV, key=key, region_id=region["region_id"], kv_offset=offset, kv_length=length)


def test_what_one_client_writes_another_reads_out_of_the_same_memory(server, client):
    handle = region_of(client)
    with PublishedRmClient(client.ask(Ask.HANDSHAKE)["rm_address"]) as rm:
        rm.map(handle)[MIB : MIB + 5] = b"hello"
        assert register(client, "k", handle, MIB, 5) == {"success": True, "is_new": True}
        with PublishedClient(server.address) as other, PublishedRmClient(server.rm_address) as its_rm:
            found = other.ask(Ask.LOOKUP_KV, key="k")
            assert found == {"found": True, "handle": handle, "kv_offset": MIB, "kv_length": 5}
            view = its_rm.map(found["handle"])
            assert view[MIB : MIB + 5] == b"hello"
            view[MIB] = ord("j")  # a reader of theirs can write
        assert rm.map(handle)[MIB : MIB + 5] == b"jello"


def test_the_first_writer_wins(client):
    handle = region_of(client)
    assert register(client, "k", handle, 0)["is_new"]
    assert not register(client, "k", handle, MIB)["is_new"]
    assert client.ask(Ask.LOOKUP_KV, key="k")["kv_offset"] == 0
    assert client.ask(Ask.LOOKUP_KV, key="nobody") == {"found": False}


def test_pins_count_and_keep_a_key_from_being_deleted(client):
    handle = region_of(client)
    register(client, "k", handle)
    assert not client.ask(Ask.UNPIN_KV, key="k")["success"]
    assert client.ask(Ask.PIN_KV, key="k")["exists"]
    assert client.ask(Ask.PIN_KV, key="k")["exists"]
    assert not client.ask(Ask.PIN_KV, key="nobody")["exists"]
    assert client.ask(Ask.UNPIN_KV, key="k")["success"]
    assert not client.ask(Ask.DELETE_KV, key="k")["success"]
    assert client.ask(Ask.UNPIN_KV, key="k")["success"]
    assert client.ask(Ask.DELETE_KV, key="k")["success"]
    assert not client.ask(Ask.DELETE_KV, key="k")["success"]
    assert not client.ask(Ask.EXISTS_KV, key="k")["exists"]


def test_batches(client):
    region_id = region_of(client)["region_id"]
    entries = [
        {"key": key, "region_id": region_id, "kv_offset": i * MIB, "kv_length": MIB} for i, key in enumerate("aba")
    ]
    assert client.ask(Ask.BATCH_REGISTER_KV, entries=entries) == {"success": True, "results": [True, True, False]}
    assert client.ask(Ask.BATCH_EXISTS_KV, keys=["a", "x", "b"]) == {"results": [True, False, True]}
    assert client.ask(Ask.BATCH_PIN_KV, keys=["a", "x", "b"]) == {"results": [True, False, False]}
    assert client.ask(Ask.BATCH_UNPIN_KV, keys=["b", "a", "a"]) == {"results": [False, True, False]}
    found = client.ask(Ask.BATCH_LOOKUP_KV, keys=["b", "x"])["entries"]
    assert [entry["found"] for entry in found] == [True, False]
    assert found[0]["kv_offset"] == MIB


def test_a_region_is_returned_by_its_owner_only_and_goes_with_its_last_key(tmp_path, client):
    handle = region_of(client)
    number = handle["region_id"]
    register(client, "k", handle)
    assert client.ask(Ask.LIST_ALLOCATIONS)["allocations"] == [handle]
    assert client.ask(Ask.LIST_ALLOCATIONS, exclude_instance_id="i1")["allocations"] == []
    assert not client.ask(Ask.RETURN_ALLOC, instance_id="i2", region_id=number)["success"]
    assert client.ask(Ask.RETURN_ALLOC, instance_id="i1", region_id=number)["success"]
    assert client.ask(Ask.LIST_ALLOCATIONS)["allocations"] == []
    assert client.ask(Ask.LOOKUP_KV, key="k")["found"]
    assert [path.name for path in tmp_path.glob("*.dat")] == [f"maru_{number}.dat"]
    client.ask(Ask.DELETE_KV, key="k")
    assert list(tmp_path.glob("*.dat")) == []


def test_regions_have_numbers_of_their_own_and_end_with_the_capacity(tmp_path):
    with PublishedServer(tmp_path, capacity=4 * MIB) as server, PublishedClient(server.address) as client:
        one, other = region_of(client, size=1), region_of(client, size=2 * MIB)
        assert one["length"] == other["length"] == 2 * MIB
        refused = client.ask(Ask.REQUEST_ALLOC, instance_id="i1", size=1)
        assert refused["success"] is False
        assert refused["error"]
        assert client.ask(Ask.RETURN_ALLOC, instance_id="i1", region_id=one["region_id"])["success"]
        assert region_of(client, size=1)["region_id"] == 3


def test_figures(server, client):
    handle = region_of(client)
    register(client, "k", handle, 0, 5)
    report = {"client_id": "c", "op_type": "retrieve", "result": "hit", "size": 5, "latency_us": 10.0}
    assert client.ask(Ask.REPORT_STATS, entries=[report, report | {"latency_us": 2.0}])["success"]
    stats = client.ask(Ask.GET_STATS)
    assert stats["kv_manager"] == {"total_entries": 1, "total_size": 5}
    assert stats["allocation_manager"] == {"num_allocations": 1, "total_allocated": 4 * MIB, "active_clients": 1}
    operation = stats["stats_manager"]["clients"]["_all"]["operations"]["retrieve"]
    assert (operation["count"], operation["hit_count"], operation["avg_latency_us"]) == (2, 2, 6.0)
    assert (operation["min_latency_us"], operation["max_latency_us"], operation["total_bytes"]) == (2.0, 10.0, 10)
    usage = client.ask(Ask.GET_USAGE)
    assert usage["instances"] == [{"instance_id": "i1", "regions": 1, "allocated": 4 * MIB, "used": 5}]
    assert (usage["pool_total"], usage["pool_free"]) == (1 << 30, (1 << 30) - 4 * MIB)
    assert client.ask(Ask.HEARTBEAT) == {}
    assert server.asked[Ask.HEARTBEAT] == 1


def test_shutdown_is_refused(server):
    with PublishedClient(server.address) as client:
        assert "error" in client.ask(Ask.SHUTDOWN)


def test_an_unknown_code_is_answered_with_sequence_0_which_only_a_synchronous_client_sees(server):
    with PublishedClient(server.address) as client:
        assert "error" in client.ask(0x40)
    with PublishedAsyncClient(server.address) as client:
        with impatient(client), pytest.raises(TimeoutError):
            client.ask(0x40)
        assert client.ask(Ask.HEARTBEAT) == {}


def test_a_client_goes_on_after_a_request_that_was_not_answered(server):
    with (
        PublishedClient(server.address) as one,
        PublishedAsyncClient(server.address) as other,
    ):
        server.mute = True
        for client in (one, other):
            with impatient(client), pytest.raises(TimeoutError):
                client.ask(Ask.REGISTER_KV, key="k", region_id=1, kv_offset=0, kv_length=1)
        while server.asked[Ask.REGISTER_KV] < 2:  # it has had them
            time.sleep(0.001)
        server.mute = False
        for client in (one, other):
            assert client.ask(Ask.EXISTS_KV, key="k")["exists"]


def test_sixty_four_requests_are_in_flight_and_no_more(server, monkeypatch):
    gate = threading.Event()
    monkeypatch.setitem(PublishedServer._ANSWERS, Ask.HEARTBEAT, lambda self, **_: {"waited": gate.wait(60)})
    with PublishedAsyncClient(server.address) as client:
        waiting = [client.submit(Ask.HEARTBEAT) for _ in range(64)]
        late = threading.Thread(target=lambda: waiting.append(client.submit(Ask.HEARTBEAT)))
        assert not client._places.acquire(blocking=False)
        late.start()
        assert len(waiting) == 64
        gate.set()
        late.join(60)
        assert [future.result(60) for future in waiting] == [{"waited": True}] * 65


def test_many_answers_in_flight_find_their_requests(server):
    with PublishedAsyncClient(server.address) as client:
        register(client, "7", region_of(client))
        answers = [client.submit(Ask.EXISTS_KV, key=str(i % 10)) for i in range(640)]
        assert [future.result(60)["exists"] for future in answers] == [i % 10 == 7 for i in range(640)]


def test_closing_fails_what_is_in_flight(server):
    with PublishedAsyncClient(server.address) as client:
        server.mute = True
        future = client.submit(Ask.HEARTBEAT)
    with pytest.raises(ConnectionError):
        future.result(60)


def test_the_resource_manager_allocates_maps_and_frees(server, tmp_path):
    with PublishedRmClient(server.rm_address, "host:1") as rm, PublishedRmClient(server.rm_address, "host:2") as other:
        [pool] = rm.stats()
        assert (pool.path, pool.dax_type, pool.total, pool.free, pool.align) == (
            str(tmp_path),
            1,
            1 << 30,
            1 << 30,
            2 * MIB,
        )
        region = rm.alloc(5)
        assert (region.status, region.access_type, region.requested_size) == (0, 1, 5)
        assert region.path == str(tmp_path / "maru_1.dat")
        assert region.handle["length"] == 2 * MIB
        access = other.get_access(region.handle)
        assert (access.status, access.path, access.offset, access.length) == (0, region.path, 0, 2 * MIB)
        rm.map(region.handle)[:2] = b"hi"
        assert other.map(region.handle)[:2] == b"hi"
        assert other.free(region.handle) == -errno.EINVAL
        assert rm.free(region.handle | {"auth_token": 1}) == -errno.EINVAL
        assert rm.free(region.handle) == 0
        assert rm.get_access(region.handle).status == -errno.ENOENT
        assert rm.alloc(1 << 40).status == -errno.ENOMEM
        assert list(tmp_path.glob("*.dat")) == []


def test_a_bad_frame_costs_its_connection(server):
    with PublishedRmClient(server.rm_address) as rm:
        with pytest.raises(IpcError):
            rm.ask(77, b"")
        with pytest.raises(ConnectionError):
            rm.stats()
    with socket.create_connection(server.rm_address.split(":"), 60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert struct.unpack("<IHHI", receive(connection, 12))[:3] == (0x4D415255, 2, 255)
    with PublishedRmClient(server.rm_address) as rm:
        assert rm.stats()


def test_everything_ends_that_was_started(tmp_path):
    before = set(threading.enumerate())
    with published.published(tmp_path) as (server, client, rm):
        assert rm.map(region_of(client))[:1] == b"\0"
        with PublishedAsyncClient(server.address) as other:
            assert other.ask(Ask.HEARTBEAT) == {}
    assert set(threading.enumerate()) == before
