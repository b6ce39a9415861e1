"""The published clients at our server, our clients at a published server, and both at one server: end to end.

The published peers are those of :mod:`published`, written from the specification alone. Bytes are compared in `test_maru_wire`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import pytest

from maru import NoAnswer
from tests.support.maru_actors import BE_PUBLISHED, FACES, PAGES, REGION, SIZE, PublishedOwner, client
from tests.support.maru_processes import TCP, Actor, Server, eventually, payload, temporary_pool
from tests.support.published import PublishedAsyncClient, PublishedClient, PublishedRmClient, PublishedServer
from tests.support.published_wire import HEADER, Ask


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


@pytest.fixture(params=FACES)
def face(request):
    return request.param


def keys_of(name: str, n: int = PAGES) -> list[str]:
    return [f"{name} {number}" for number in range(n)]


# --- published clients at our server: every message of the table --------------------------------------------------


class Published:
    """Either published client, and the resource manager's, at one server."""

    def __init__(self, kind: str, address: str):
        self.client: Any = (PublishedClient if kind == "sync" else PublishedAsyncClient)(address)
        self.codes: set[int] = set()
        self.rm = PublishedRmClient(self.ask(Ask.HANDSHAKE)["rm_address"])

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *_: object) -> None:
        self.rm.close()
        self.client.close()

    def ask(self, code: int, **body: Any) -> dict[str, Any]:
        self.codes.add(code)
        return self.client.ask(code, **body)


PLACES = ("ours", "theirs")


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    """Address of a server of either make: what is said of published clients must be true of both."""
    if request.param == "theirs":
        with PublishedServer(tmp_path) as theirs:
            yield theirs.address
        return
    with temporary_pool() as path, Server(path, *TCP) as ours:
        yield ours.tcp


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_published_client_is_served_with_every_message_of_the_table(place, kind):
    with Published(kind, place) as one, Published("sync", place) as two:
        ask = one.ask
        assert ask(Ask.HANDSHAKE, client_version="0.1.0", instance_id="one")["success"]
        assert ask(Ask.HANDSHAKE, client_version=3)["success"]
        handle = ask(Ask.REQUEST_ALLOC, instance_id="one", size=REGION)["handle"]
        assert set(handle) == {"region_id", "offset", "length", "auth_token"}
        assert ask(Ask.REQUEST_ALLOC, instance_id="one", size=1 << 50)["success"] is False
        assert [h["region_id"] for h in ask(Ask.LIST_ALLOCATIONS)["allocations"]] == [handle["region_id"]]
        assert ask(Ask.LIST_ALLOCATIONS, exclude_instance_id="one")["allocations"] == []

        memory = one.rm.map(handle)
        memory[100:105] = b"bytes"
        entry = {"region_id": handle["region_id"], "kv_offset": 100, "kv_length": 5}
        assert ask(Ask.REGISTER_KV, key="k", **entry) | {"epoch": 0} == {"success": True, "is_new": True, "epoch": 0}
        assert ask(Ask.REGISTER_KV, key="k", **{**entry, "kv_offset": 900})["is_new"] is False
        found = two.ask(Ask.LOOKUP_KV, key="k")
        assert (found["found"], found["kv_offset"], found["kv_length"]) == (True, 100, 5)
        assert found["handle"] == handle
        assert two.rm.map(found["handle"])[100:105] == b"bytes"
        assert two.ask(Ask.LOOKUP_KV, key="other")["found"] is False
        assert (ask(Ask.EXISTS_KV, key="k")["exists"], ask(Ask.EXISTS_KV, key="l")["exists"]) == (True, False)

        assert two.ask(Ask.PIN_KV, key="k")["exists"] and not two.ask(Ask.PIN_KV, key="l")["exists"]
        assert ask(Ask.DELETE_KV, key="k")["success"] is False
        assert ask(Ask.UNPIN_KV, key="k")["success"] is True  # over another connection than the pin
        assert ask(Ask.UNPIN_KV, key="k")["success"] is False
        assert ask(Ask.DELETE_KV, key="k")["success"] is True
        assert ask(Ask.DELETE_KV, key="k")["success"] is False

        entries = [
            {"key": key, "region_id": handle["region_id"], "kv_offset": at, "kv_length": 5}
            for key, at in (("a", 0), ("b", 10), ("a", 20))
        ]
        answer = ask(Ask.BATCH_REGISTER_KV, entries=entries)
        assert (answer["success"], answer["results"]) == (True, [True, True, False])
        looked_up = two.ask(Ask.BATCH_LOOKUP_KV, keys=["a", "x", "b"])["entries"]
        assert [one["found"] for one in looked_up] == [True, False, True]
        assert [one.get("kv_offset") for one in looked_up] == [0, None, 10]
        assert two.ask(Ask.BATCH_EXISTS_KV, keys=["a", "x", "b"])["results"] == [True, False, True]
        assert two.ask(Ask.BATCH_PIN_KV, keys=["a", "x", "b"])["results"] == [True, False, False]
        assert two.ask(Ask.BATCH_UNPIN_KV, keys=["a", "b"])["results"] == [True, False]

        report = {"client_id": "one", "op_type": "retrieve", "result": "hit", "size": 5, "latency_us": 10.0}
        assert ask(Ask.REPORT_STATS, entries=[report, {**report, "result": "miss"}])["success"]
        stats = ask(Ask.GET_STATS)
        assert stats["kv_manager"] == {"total_entries": 2, "total_size": 10}
        assert stats["allocation_manager"]["num_allocations"] == 1
        assert stats["allocation_manager"]["total_allocated"] == REGION
        tallies = stats["stats_manager"]["clients"]
        assert set(tallies) == {"_all", "one"}
        tally = tallies["_all"]["operations"]["retrieve"]
        assert (tally["count"], tally["hit_count"], tally["miss_count"], tally["avg_latency_us"]) == (2, 1, 1, 10.0)
        assert "interval_avg_us" in tally and "latency_sum_us" in tally
        usage = ask(Ask.GET_USAGE)
        assert usage["instances"] == [{"instance_id": "one", "regions": 1, "allocated": REGION, "used": 10}]
        assert 0 < usage["pool_free"] < usage["pool_total"]
        assert "error" not in ask(Ask.HEARTBEAT)
        assert "error" in ask(Ask.SHUTDOWN)
        assert ask(Ask.RETURN_ALLOC, instance_id="two", region_id=handle["region_id"])["success"] is False
        assert ask(Ask.RETURN_ALLOC, instance_id="one", region_id=handle["region_id"])["success"] is True
        assert ask(Ask.LIST_ALLOCATIONS)["allocations"] == []  # hidden, until its last key has gone
        assert ask(Ask.EXISTS_KV, key="a")["exists"]
        assert [ask(Ask.DELETE_KV, key=key)["success"] for key in "ab"] == [True, True]
        assert ask(Ask.GET_STATS)["allocation_manager"]["num_allocations"] == 0
        assert one.codes | two.codes == set(Ask)


def test_a_published_client_with_many_requests_in_flight_gets_each_answer(pool):
    with Server(pool) as server, PublishedAsyncClient(server.ipc) as many, PublishedOwner(server.ipc, "o") as owner:
        for key in keys_of("k"):
            owner.put(key)
        asked = [(key, many.submit(Ask.EXISTS_KV, key=key)) for key in [*keys_of("k"), *keys_of("x")] * 40]
        assert all(future.result(5)["exists"] == key.startswith("k") for key, future in asked)


def test_extra_fields_are_there_and_disturb_nobody(pool):
    """What our server adds, and what a client may send that nobody knows."""
    with Server(pool) as server, PublishedOwner(server.ipc, "o") as owner:
        owner.put("k")
        hello = owner.ask(Ask.HANDSHAKE, something="unknown")
        assert {"success", "rm_address", "epoch", "codes"} <= set(hello) and hello["session"] is None
        assert owner.ask(Ask.EXISTS_KV, key="k", more=[1, {"deep": b"bytes"}])["exists"]
        found = owner.ask(Ask.LOOKUP_KV, key="k")
        assert found["generation"] > 0 and "checksum" in found and found["epoch"] == int(server.ready["epoch"], 16)


def test_flags_are_echoed_and_what_lies_behind_the_payload_is_ignored(pool):
    import zmq

    with Server(pool) as server, zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.linger, sock.rcvtimeo = 0, 5_000
        sock.connect(server.ipc)
        body = msgspec.msgpack.encode({"key": "k"})
        for flags in (0, 1, 2, 4, 8, 15):
            sock.send(HEADER.pack(0xCF00, 1, Ask.EXISTS_KV, flags, 0, 0, 0, 77 + flags, len(body)) + body + b"tail")
            reply = sock.recv()
            _, _, code, echoed, _, _, _, sequence, length = HEADER.unpack_from(reply)
            assert (code, echoed, sequence) == (Ask.EXISTS_KV | 0x80, flags, 77 + flags)
            assert msgspec.msgpack.decode(reply[16 : 16 + length])["exists"] is False


def test_the_embedded_resource_manager_is_one_and_needs_no_root(pool):
    with (
        Server(pool, "--capacity-bytes", "8MiB") as server,
        PublishedRmClient(server.ready["rm_address"]) as rm,
        PublishedOwner(server.ipc, "o") as owner,
    ):
        [there] = rm.stats()
        assert (there.total, there.free, there.dax_type, there.align) == (8 << 20, 6 << 20, 1, 2 << 20)
        given = rm.alloc(1)
        assert (given.status, given.access_type, given.requested_size) == (0, 1, 1)
        assert given.handle["length"] == 2 << 20
        assert given.path == f"{there.path}/maru_{given.handle['region_id']}.dat"
        access = rm.get_access(owner.handle)
        assert access.status == 0 and os.path.getsize(access.path) == access.length == REGION
        assert rm.get_access({**owner.handle, "auth_token": 1}).status < 0
        assert rm.free(given.handle) == 0
        assert rm.free(given.handle) < 0
        assert rm.alloc(100 << 20).status < 0


# --- our clients at a published server -----------------------------------------------------------------------------


def test_our_client_at_a_published_server_does_what_it_does_at_ours(tmp_path, face):
    with PublishedServer(tmp_path) as theirs:
        with (
            client(face, theirs.address) as owner,
            client("blocking", theirs.address, pool_size=0) as reader,
        ):
            keys = keys_of("k")
            assert owner.put(keys[:4]) == ["NEW"] * 4
            assert owner.put([keys[0], "l", "l"]) == ["DUPLICATE", "NEW", "DUPLICATE"]
            [handle] = owner.fill(["m"])
            assert owner.call("store", "m", handle).name == "NEW"
            assert reader.get([*keys[:4], "l", "m", "x"]) == ["right"] * 6 + ["missing"]
            assert reader.hold("l", "x") == [True, False]
            assert reader.looks("l") == "right" and reader.held["l"][-1][1].readonly
            assert owner.delete(["l", "x"]) == ["MISSING_OR_PINNED"] * 2
            reader.let_go("l")
            eventually(lambda: owner.delete(["l"]) == ["DELETED"])
            assert reader.pin("m", "x", keys[0]) == [True, False, False]
            assert reader.unpin("m") == [True]
            assert owner.exist("m", "x") == [True, False]
            assert owner.call("exists", "m") and owner.call("pin", "m") and owner.call("unpin", "m")
            assert owner.call("healthcheck")
            assert owner.call("get_stats")["kv_manager"]["total_entries"] == 5
            assert owner.delete([*keys[:4], "m"]) == ["DELETED"] * 5
            assert owner.put(keys_of("n")) == ["NEW"] * PAGES  # no page was lost on the way
            assert owner.put(["beyond"]) == ["FULL"]
        assert {code for code in theirs.asked if 0x40 <= code <= 0x4F} == set()
        assert theirs.asked[Ask.RETURN_ALLOC] == 1


def test_our_client_at_a_published_server_says_so_when_it_does_not_answer(tmp_path, face):
    with PublishedServer(tmp_path) as theirs, client(face, theirs.address) as owner:
        owner.put(["k"])
        theirs.mute = True
        with owner.impatient():
            for name, arguments in (
                ("retrieve", ("k",)),
                ("batch_exists", (["k"],)),
                ("batch_put", (["l"], [b"bytes"])),
                ("batch_pin", (["k"],)),
                ("delete", ("x",)),
            ):
                with pytest.raises(NoAnswer):
                    owner.call(name, *arguments)
        theirs.mute = False
        assert owner.get(["k"]) == ["right"]


def test_our_client_notices_that_a_published_server_has_forgotten_everything(tmp_path, face):
    """Published stores would say True from then on, and store nothing. Ours did not hear an answer, and so looks."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = PublishedServer(tmp_path / "one")
    with client(face, first.address) as owner:
        assert owner.put(["k"]) == ["NEW"]
        first.close()
        with owner.impatient(), pytest.raises(NoAnswer):
            owner.put(["lost"])
        with PublishedServer(tmp_path / "two", address=first.address) as second:
            with owner.impatient():
                eventually(lambda: owner.call("healthcheck"))
            assert owner.put(["l"]) == ["NEW"]
            with PublishedOwner(second.address, "reader", region=0) as reader:
                assert reader.get(["l"]) == ["right"]


# --- both at one server ----------------------------------------------------------------------------------------------


def test_what_either_stores_the_other_reads(place, face):
    with (
        client(face, place) as ours,
        PublishedOwner(place, "theirs") as theirs,
        client("blocking", place, pool_size=0) as our_reader,
        PublishedOwner(place, "their reader", region=0) as their_reader,
    ):
        assert ours.put(keys_of("ours", 4)) == ["NEW"] * 4
        assert [theirs.put(key) for key in keys_of("theirs", 4)] == [True] * 4
        keys = keys_of("ours", 4) + keys_of("theirs", 4)
        for reader in (ours, our_reader, theirs, their_reader):
            assert reader.get(keys) == ["right"] * 8
        assert our_reader.hold(*keys) == [True] * 8
        assert all(our_reader.looks(key) == "right" for key in keys)
        assert theirs.put("ours 0") is False and ours.put(["theirs 0"]) == ["DUPLICATE"]  # the first writer wins
        assert theirs.ask(Ask.DELETE_KV, key="ours 0")["success"] is False  # pinned by our reader
        our_reader.let_go(*keys)
        eventually(lambda: theirs.ask(Ask.DELETE_KV, key="ours 0")["success"])
        assert ours.put(["ours 0"]) == ["NEW"]  # and really so: its owner knew
        assert their_reader.get(["ours 0"]) == ["right"]


def test_pages_of_ours_that_a_published_client_deletes_come_back(pool, face):
    with Server(pool) as server, client(face, server.ipc) as owner, PublishedOwner(server.ipc, "x", region=0) as other:
        for _ in range(4):
            assert owner.put(keys_of("k")) == ["NEW"] * PAGES
            assert all(other.ask(Ask.DELETE_KV, key=key)["success"] for key in keys_of("k"))
        assert owner.pages().strays == 0


# --- published clients under our rules ------------------------------------------------------------------------------


RULES = ("--session-lease", "10", "--capacity-bytes", "4MiB")


def test_silence_does_not_end_a_published_client_and_its_connection_does(pool):
    with Server(pool, *RULES, "--v1-read-grace", "0", skips=True) as server:
        with PublishedOwner(server.ipc, "theirs") as owner, PublishedClient(server.ipc) as raw:
            owner.put("k")
            raw.ask(Ask.HANDSHAKE, instance_id="one of ours that is silent", extensions=1)
            assert server.facts()["sessions"] == 2
            server.skip(30.0)  # three leases
            eventually(lambda: server.facts()["sessions"] < 2)
            assert server.facts()["sessions"] == 1
            assert owner.put("l") is True
        eventually(lambda: server.facts("server")["connections"] == 1)  # that over which it is asked
        assert server.facts()["sessions"] == 1
        server.skip(30.0)
        eventually(lambda: server.facts()["sessions"] == 0)
        facts = server.facts()
        assert (facts["abandoned"], facts["entries"]) == (1, 2)
        with client("blocking", server.ipc, pool_size=2 * REGION) as successor:
            eventually(lambda: successor.put(["m"]) == ["NEW"])
            assert successor.exist("k", "l", "m") == [False, False, True]


def test_a_published_client_that_makes_its_socket_anew_is_the_same_client(pool):
    """Its REQ socket is a new one after each timeout: another connection, from which it goes on in its region."""
    with (
        Server(pool) as server,
        PublishedOwner(server.ipc, "theirs") as owner,
    ):
        owner.put("k")
        with server.stopped(), owner.impatient(), pytest.raises(TimeoutError):
            owner.put("lost")
        assert owner.put("l") is True
        eventually(lambda: server.facts("server")["connections"] == 2)  # with the one that asks this
        facts = server.facts()
        assert (facts["sessions"], facts["abandoned"]) == (1, 0)
        assert owner.get(["k", "l"]) == ["right"] * 2


def test_keys_of_a_connected_published_owner_are_neither_evicted_nor_deleted_by_others(pool, face):
    with (
        Server(pool, *RULES, "--v1-read-grace", "0", skips=True) as server,
        PublishedOwner(server.ipc, "theirs") as owner,
        client(face, server.ipc, lease=60.0) as other,
        PublishedOwner(server.ipc, "another", region=0) as another,
    ):
        for key in keys_of("k"):
            assert owner.put(key)
        assert other.delete(keys_of("k")) == ["PROTECTED"] * PAGES
        answer = another.ask(Ask.DELETE_KV, key="k 0")
        assert answer["success"] is False and "protected" in answer["error"]
        assert other.put(keys_of("o")) == ["NEW"] * PAGES
        assert other.put(keys_of("p")) == ["NEW"] * PAGES  # what is evicted is its own
        with client(face, server.ipc) as third:
            assert third.put(["x"]) == ["FULL"]
        assert other.exist(*keys_of("k")) == [True] * PAGES
        assert owner.ask(Ask.DELETE_KV, key="k 0")["success"]  # it may itself
        before = server.facts("server")["connections"]
        owner.close()
        eventually(lambda: server.facts("server")["connections"] < before)
        server.skip(30.0)
        eventually(lambda: other.delete(["k 1"]) == ["DELETED"])


def test_a_key_that_a_published_client_looked_up_is_not_evicted_for_a_while(pool, face):
    """It reads without a pin, and would not learn of it."""
    with (
        Server(pool, "--v1-read-grace", "10", "--high-watermark", "1.0", skips=True) as server,
        client(face, server.ipc, lease=60.0) as owner,
        PublishedOwner(server.ipc, "reader", region=0) as reader,
    ):
        owner.put(keys_of("k"))
        assert reader.get(["k 0"]) == ["right"]
        found = reader.ask(Ask.LOOKUP_KV, key="k 0")
        view = reader.map(found["handle"])
        for name in "abc":
            assert owner.put(keys_of(name, 7)) == ["NEW"] * 7
            assert view[found["kv_offset"] : found["kv_offset"] + SIZE] == payload("k 0", SIZE)
        assert owner.put(["beyond", *keys_of("d", 7)]).count("NEW") == 7
        assert owner.exist("k 0") == [True]
        server.skip(20.0)
        eventually(lambda: owner.put(keys_of(f"{time.monotonic()}")) == ["NEW"] * PAGES)
        assert owner.exist("k 0") == [False]


@pytest.mark.parametrize("face", FACES)
def test_what_a_published_client_reads_stays_for_its_grace_when_our_server_is_killed(pool, face):
    """The owner is back at once. The reader says nothing, and reads on."""
    with (
        Server(pool, "--v1-read-grace", "1000", "--high-watermark", "1.0", skips=True) as server,
        client(face, server.ipc, lease=3600.0) as owner,
        PublishedOwner(server.ipc, "reader", region=0) as reader,
    ):
        owner.put(keys_of("k"))
        found = reader.ask(Ask.LOOKUP_KV, key="k 0")
        view = reader.map(found["handle"])
        server.restart()
        eventually(lambda: owner.exist("k 0") == [True])
        owner.beat()
        assert "NEW" not in owner.put(keys_of("a", 7))
        assert owner.delete(["k 0"]) == ["PROTECTED"]
        assert view[found["kv_offset"] : found["kv_offset"] + SIZE] == payload("k 0", SIZE)
        server.skip(1001.0)
        eventually(lambda: owner.put(keys_of(f"{time.monotonic()}")) == ["NEW"] * PAGES)


def test_a_key_that_a_killed_published_client_pinned_is_free_after_its_grace(pool):
    with (
        Server(pool, "--v1-read-grace", "10", skips=True) as server,
        client("blocking", server.ipc, lease=60.0) as owner,
        Actor(BE_PUBLISHED, server.ipc, "victim") as victim,
    ):
        owner.put(["k"])
        assert victim.ask("pin", "k")
        before = server.facts("server")["connections"]
        victim.kill()
        eventually(lambda: server.facts("server")["connections"] < before)
        assert owner.delete(["k"]) == ["PINNED"]
        server.skip(20.0)
        eventually(lambda: owner.delete(["k"]) == ["DELETED"])


def test_a_published_client_goes_on_after_a_restart_of_our_server(pool):
    with Server(pool, skips=True) as server, PublishedOwner(server.ipc, "theirs") as owner:
        owner.put("k")
        server.restart()
        with owner.impatient():
            eventually(lambda: _answered(owner))
        assert owner.get(["k"]) == ["right"]
        assert owner.put("l") is True
        assert owner.get(["k", "l"]) == ["right"] * 2
        assert not owner.ask(Ask.DELETE_KV, key="k")["success"]  # in quiet time: somebody may be reading it
        server.skip(60)
        eventually(lambda: owner.ask(Ask.DELETE_KV, key="k")["success"])


def _answered(owner: PublishedOwner) -> bool:
    try:
        return "error" not in owner.ask(Ask.HEARTBEAT)
    except TimeoutError:
        return False
