"""What the published page store gets wrong, seen live: each of the 18 faults, against real servers and both of our clients.

Numbered as in the specification. Each test would fail if we had the fault; :mod:`test_maru_planted` plants them, and sees that
it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from maru import LeaseLost, MaruError, NoAnswer
from maru._wire import Code, HandshakeRequest, RegionRequest, StoreRequest, request
from tests.support.maru_actors import (
    BE,
    BE_PUBLISHED,
    FACES,
    PAGE,
    PAGES,
    REGION,
    SIZE,
    BlockingClient,
    PublishedOwner,
    client,
)
from tests.support.maru_processes import PATIENCE, Actor, Server, eventually, payload, temporary_pool, within
from tests.support.maru_wire import Wire
from tests.support.published import PublishedClient, PublishedServer
from tests.support.published_wire import Ask


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


@pytest.fixture(params=FACES)
def face(request):
    return request.param


def keys_of(name: str, n: int = PAGES) -> list[str]:
    return [f"{name} {number}" for number in range(n)]


def wrong(looks: list[str]) -> list[str]:
    return [look for look in looks if look not in ("right", "missing")]


def unanswered(call: Callable[[], Any]) -> None:
    with pytest.raises(NoAnswer):
        call()


# --- 1: a page is used again only once the fate of its registration is known ---------------------------------------


def test_fault_1_a_store_that_timed_out_shows_nobody_another_keys_bytes(pool, face):
    with (
        Server(pool) as server,
        client(face, server.ipc) as owner,
        client("blocking", server.ipc, pool_size=0) as reader,
    ):
        assert owner.put(["warm"]) == ["NEW"]
        everything = ["warm"]
        with server.stopped(), owner.impatient():
            used = set()
            for keys in (keys_of("a", 3), keys_of("b", 4)):  # what one store has used, the next one does not
                handles = owner.fill(keys)
                offsets = {handle.offset for handle in handles}
                assert not offsets & used
                used |= offsets
                unanswered(lambda keys=keys, handles=handles: owner.call("batch_store", keys, handles))
                everything += keys
            assert owner.pages().free == 0
            unanswered(lambda: owner.fill(["one too many"]))
        # Now what has waited at the server is done, while the owner writes into every page that it takes for free.
        for name in "cdef":
            keys = keys_of(name)
            eventually(lambda keys=keys: set(owner.put(keys)) <= {"NEW", "DUPLICATE"})
            everything += keys
            assert wrong(reader.get(everything)) == []
        assert owner.get(keys) == ["right"] * PAGES
        assert owner.pages().strays == 0


def test_fault_1_a_store_that_arrives_after_its_page_was_reused_is_refused(pool):
    """Two connections, and what was sent over one of them comes last: then a page is used again, and the old STORE arrives."""
    with (
        Server(pool) as server,
        Wire(server.ipc) as wire,
        client("blocking", wire.address, lease=60.0, checksums=False, index="off") as owner,
        client("blocking", server.ipc, pool_size=0, checksums=False) as reader,
    ):
        assert owner.put(["warm"]) == ["NEW"]
        [first] = wire.links
        wire.hold(first, up=True)
        before = first.up
        held_up = threading.Thread(target=lambda: owner.exist("warm"))
        held_up.start()
        wire.wait(lambda: first.up > before)
        assert owner.exist("warm") == [True]  # over a second connection
        second = wire.links[1]
        wire.let_go(first)
        held_up.join(PATIENCE)
        assert not held_up.is_alive()
        wire.hold(first, up=True)
        before = first.up
        [handle] = owner.fill(["late"])
        with owner.impatient():
            unanswered(lambda: owner.call("store", "late", handle))
            wire.wait(lambda: first.up > before)
            owner.handler._driver.connections._free.rotate()  # as if another thread had just used the second one
            wire.hold(second, down=True)
            unanswered(lambda: owner.exist("warm"))
        wire.let_go(second)
        assert owner.pages().in_doubt == 1
        seen, keys = ["warm", "late"], []
        while owner.pages().in_doubt:
            keys = keys_of(f"{len(seen)}")
            assert set(owner.put(keys)) == {"NEW"}
            seen += keys
        facts = server.facts("server")
        wire.let_go(first)
        eventually(
            lambda: server.facts("server")["requests"] > facts["requests"] + 4
        )  # it has arrived, beside what counts itself
        assert reader.get(keys) == ["right"] * PAGES
        assert wrong(reader.get(seen)) == []
        assert reader.get(["late"]) == ["missing"]
        assert server.facts("server")["refused"] == facts["refused"] + 1


class Mumbling(PublishedServer):
    """Does what it is asked for; whoever registers hears nothing of it."""

    def _register_and_say_nothing(self, **body: Any) -> dict[str, Any]:
        self.mute = True
        return self._batch_register(**body)

    _ANSWERS = {**PublishedServer._ANSWERS, Ask.BATCH_REGISTER_KV: _register_and_say_nothing}  # noqa: RUF012


def test_fault_1_what_a_published_server_did_not_answer_is_never_used_again(tmp_path, face):
    """It can be asked for nothing: so the page is given up until its region ends."""
    with (
        Mumbling(tmp_path) as server,
        client(face, server.address) as owner,
        PublishedOwner(server.address, "reader", region=0) as reader,
    ):

        def lose(key: str) -> None:
            handles = owner.fill([key])
            with owner.impatient():
                unanswered(lambda: owner.call("batch_store", [key], handles))
            eventually(lambda: server.mute)  # it has done it
            server.mute = False

        lose("lost")
        assert reader.get(["lost"]) == ["right"]
        for number in range(PAGES - 1):
            lose(f"other {number}")
            assert wrong(reader.get(["lost", *keys_of("other")])) == []
        assert owner.put(["beyond"]) == ["FULL"]
        assert owner.pages().quarantined == PAGES


# --- 2: a view is valid under its pin --------------------------------------------------------------------------------


def test_fault_2_a_view_under_a_pin_does_not_change_whatever_others_do(pool, face):
    with (
        Server(pool) as server,
        client("blocking", server.ipc) as owner,
        client(face, server.ipc, pool_size=0) as reader,
        client("blocking", server.ipc, pool_size=0) as stranger,
    ):
        owner.put(["k"])
        assert reader.hold("k") == [True]
        info, view = reader.held["k"][-1]
        for name in "abc":
            assert owner.delete(["k"]) == stranger.delete(["k"]) == ["PINNED"]
            assert owner.put(keys_of(name, 7)) == ["NEW"] * 7  # every page but that one
            assert reader.looks("k") == "right"
        assert owner.put(["beyond", *keys_of("d", 7)]).count("FULL") == 1
        reader.let_go("k")
        eventually(lambda: stranger.delete(["k"]) == ["DELETED"])
        assert owner.put(keys_of("e")) == ["NEW"] * PAGES
        assert bytes(view) != payload("k", SIZE), "this page was not used again: the test shows nothing"
        with pytest.raises(LeaseLost):
            info.check()
        owner.delete(keys_of("e"))
        owner.put(["k"])
        reader.hold("k")
        assert reader.held["k"][-1][0].generation > info.generation


@pytest.mark.parametrize("face", FACES)
def test_fault_2_a_reader_that_was_stopped_for_longer_than_its_lease_knows_that_its_view_is_lost(pool, face):
    with (
        Server(pool, "--lease-grace", "0.1") as server,
        client("blocking", server.ipc) as owner,
        Actor(BE, face, server.ipc, {"pool_size": 0, "lease": 0.25}) as reader,
    ):
        owner.put(["k"])
        assert reader.ask("hold", "k") == [True]
        with reader.process.stopped():
            eventually(lambda: owner.delete(["k"]) == ["DELETED"])
            owner.put(keys_of("other"))
            reader.tell("looks", "k")
        assert reader.hear() == "lost"


def test_fault_2_bytes_that_are_not_what_was_stored_are_not_handed_out(pool, face):
    with (
        Server(pool) as server,
        client("blocking", server.ipc) as owner,
        client(face, server.ipc, pool_size=0) as reader,
    ):
        owner.put(["a", "b"])
        reader.hold("a")
        region_id = owner.handler.get_owned_region_ids()[0]
        memory = owner.handler.get_buffer_view(region_id, 0, REGION)
        found = bytes(memory).find(payload("b", SIZE))
        memory[found + 10] ^= 1  # a stray write of the owner's
        assert reader.get(["a", "b"]) == ["right", "damaged"]
        with pytest.raises(MaruError, match="do not match its checksum"):
            reader.hold("b")


# --- 3: a reader cannot write -----------------------------------------------------------------------------------------


def test_fault_3_a_reader_can_write_nothing(pool, face):
    with (
        Server(pool) as server,
        client("blocking", server.ipc) as owner,
        client(face, server.ipc, pool_size=0) as reader,
    ):
        owner.put(["k"])
        reader.hold("k")
        info, view = reader.held["k"][-1]
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 0
        assert reader.handler.get_buffer_view(info.region_id, 0, 10).readonly
        with pytest.raises((TypeError, ValueError)):
            (ctypes.c_char * 10).from_buffer(view)
        with PublishedClient(server.ipc) as raw:
            session = raw.ask(Ask.HANDSHAKE, instance_id="another", extensions=1)["session"]
        answer = raw_ask(server, Code.REGION, RegionRequest(session, 0, info.region_id, True))
        assert isinstance(answer, dict) and answer["code"] == "refused", answer


def raw_ask(server: Server, code: int, message: Any) -> Any:
    """A message of ours over a bare socket, and its answer as msgpack has it."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(server.ipc)
        socket.send(request(code, 1, message))
        return msgspec.msgpack.decode(socket.recv()[16:])


@pytest.mark.parametrize("face", FACES)
def test_fault_3_a_reader_that_writes_all_the_same_dies_of_it(pool, face):
    with (
        Server(pool) as server,
        client("blocking", server.ipc) as owner,
        Actor(BE, face, server.ipc, {"pool_size": 0}) as reader,
    ):
        owner.put(["k"])
        reader.ask("hold", "k")
        reader.tell("scribble", "k")
        assert reader.process.wait() == -signal.SIGSEGV
        assert owner.get(["k"]) == ["right"]


# --- 4: the owner learns of every page it gets back ----------------------------------------------------------------


def test_fault_4_what_others_delete_is_stored_again_and_no_page_is_lost(pool, face):
    with (
        Server(pool) as server,
        client(face, server.ipc) as owner,
        client("blocking", server.ipc, pool_size=0) as stranger,
    ):
        keys = keys_of("k")
        for _ in range(5):
            assert owner.put(keys) == ["NEW"] * PAGES
            assert stranger.get(keys) == ["right"] * PAGES
            assert stranger.delete(keys) == ["DELETED"] * PAGES
            assert stranger.exist(*keys) == [False] * PAGES
        assert owner.pages().strays == 0


# --- 5: duplicates leak no page ---------------------------------------------------------------------------------------


def test_fault_5_keys_that_are_named_twice_or_there_already_cost_no_page(pool, face):
    with Server(pool) as server, client(face, server.ipc) as owner, client("blocking", server.ipc) as other:
        other.put(["theirs"])
        for number in range(4):
            assert owner.put([f"k{number}"] * 5) == ["NEW"] + ["DUPLICATE"] * 4
            assert owner.put(["theirs"] * 3) == ["DUPLICATE"] * 3
            assert owner.pages().free == PAGES - number - 1
        assert owner.get(["k0", "k3", "theirs"]) == ["right"] * 3
        assert server.facts()["entries"] == 5


# --- 6: a batch that times out -----------------------------------------------------------------------------------------


def test_fault_6_a_batch_that_timed_out_says_so_and_leaks_no_page(pool, face):
    with Server(pool) as server, client(face, server.ipc) as owner:
        owner.put(["warm"])
        for number in range(2):
            keys = keys_of(f"{number}", 7)
            owner.delete(["warm", *keys_of(f"{number - 1}", 7)])
            eventually(lambda: owner.call("healthcheck"))
            handles = owner.fill(keys)
            with server.stopped(), owner.impatient():
                unanswered(lambda keys=keys, handles=handles: owner.call("batch_store", keys, handles))
                unanswered(lambda: owner.call("batch_retrieve", keys_of("x", 20)))
            eventually(lambda keys=keys: owner.exist(*keys) == [True] * 7)
        assert set(owner.put(keys_of("last"))) == {"NEW"}
        pages = owner.pages()
        assert (pages.registered, pages.free, pages.in_doubt, pages.quarantined) == (PAGES, 0, 0, 0)
        assert server.facts()["entries"] == PAGES


# --- 7: a timeout is never a miss; a pin whose answer was lost does not stay -----------------------------------------


def test_fault_7_whatever_is_not_answered_is_no_answer(pool, face):
    calls: dict[str, tuple[Any, ...]] = {
        "retrieve": ("there",),
        "batch_retrieve": (["there", "not"],),
        "batch_get_into": (["there"], [bytearray(SIZE)]),
        "exists": ("there",),
        "batch_exists": (["there"],),
        "pin": ("there",),
        "batch_pin": (["there"],),
        "delete": ("there",),
        "batch_delete": (["there"],),
        "batch_put": (["new"], [b"bytes"]),
        "get_stats": (),
    }
    with Server(pool) as server, client(face, server.ipc) as owner:
        owner.put(["there", "other"])
        assert owner.call("healthcheck")
        with server.stopped(), owner.impatient(0.04):
            for name, arguments in calls.items():
                with pytest.raises(NoAnswer):
                    owner.call(name, *arguments)
            assert not owner.call("healthcheck")
            unanswered(lambda: owner.call("batch_alloc", 9, SIZE))
        assert owner.handler.statistics().counters.unanswered >= len(calls)


@pytest.mark.parametrize(("face", "at_once"), [("trio", 40), pytest.param("blocking", 1, marks=pytest.mark.long)])
def test_fault_7_whoever_asks_a_server_that_is_away_for_long_is_not_kept_for_ever(pool, face, at_once):
    """What is sent to nobody waits in a queue, until that is full. Sending then waits no longer than for an answer."""
    with Server(pool) as server, client(face, server.ipc, lease=60.0) as owner:
        assert owner.put(["k"]) == ["NEW"]
        server.kill()
        outcomes: list[Any] = []

        def ask_and_ask() -> None:
            for _ in range(1_200 // at_once):
                outcomes.append(_answered(lambda: owner.call("exists", "k")))

        threads = [threading.Thread(target=ask_and_ask, daemon=True) for _ in range(at_once)]
        with owner.impatient(0.02):
            for thread in threads:
                thread.start()
            eventually(lambda: not any(thread.is_alive() for thread in threads))
        assert outcomes == [None] * 1_200
        server.start()
        eventually(lambda: _answered(lambda: owner.get(["k"])) == ["right"])


def _answered(call: Callable[[], Any]) -> Any:
    """What it answers; ``None`` if nothing is."""
    try:
        return call()
    except NoAnswer:
        return None


def test_fault_7_a_pin_whose_answer_was_lost_is_given_back(pool, face):
    with (
        Server(pool) as server,
        client("blocking", server.ipc) as owner,
        client(face, server.ipc, pool_size=0, lease=60.0, index="off") as reader,
    ):
        keys = keys_of("k")
        owner.put(keys)
        reader.hold(keys[0])
        reader.let_go(keys[0])
        with server.stopped(), reader.impatient():
            unanswered(lambda: reader.pin(*keys))
            unanswered(lambda: reader.call("batch_retrieve", keys))
            unanswered(lambda: reader.get(keys))
        eventually(lambda: server.facts()["found"] >= 3 * PAGES)  # all three were done
        # The reader hears of it with whatever it does next, and gives it back.
        eventually(lambda: reader.call("healthcheck") and reader.exist("x") and server.facts()["pinned"] == 0)
        assert owner.delete(keys) == ["DELETED"] * PAGES


@pytest.mark.parametrize("face", FACES)
def test_fault_7_a_pin_of_whoever_never_speaks_again_ends_with_its_lease(pool, face):
    with (
        Server(pool, skips=True) as server,
        Wire(server.ipc) as wire,
        client("blocking", server.ipc, lease=60.0) as owner,
        Actor(BE, face, wire.address, {"pool_size": 0, "lease": 10.0}) as reader,
    ):
        owner.put(["k"])
        assert reader.ask("exist", "k") == [True]
        [link] = wire.links
        with server.stopped():
            before = link.up
            reader.tell("pin", "k")
            wire.wait(lambda: link.up > before)  # it is on its way
            reader.kill()
        eventually(lambda: server.facts()["pinned"] == 1)
        server.skip(20.0)
        eventually(lambda: server.facts()["sessions"] == 1)
        assert server.facts()["pinned"] == 0
        assert owner.delete(["k"]) == ["DELETED"]


# --- 8: a restart keeps what was acknowledged --------------------------------------------------------------------------


def test_fault_8_a_restart_keeps_every_key_and_stores_go_on_for_real(pool, face):
    with (
        Server(pool) as server,
        client(face, server.ipc) as owner,
        client("blocking", server.ipc, pool_size=0) as reader,
    ):
        keys = keys_of("k", 5)
        owner.put(keys)
        epoch = server.ready["epoch"]
        for number in range(2):
            server.kill()
            with owner.impatient():
                unanswered(lambda number=number: owner.put([f"while it is away {number}"]))
            server.start()
            assert server.ready["epoch"] != epoch
            assert reader.get(keys) == ["right"] * 5
            assert owner.put([f"after {number}"]) == ["NEW"]
            assert reader.get([f"after {number}"]) == ["right"]
            assert wrong(reader.get(["while it is away 0", "while it is away 1"])) == []
        assert owner.handler.statistics().counters.restarts == 2
        assert owner.handler.statistics().counters.sessions_lost == 0


def test_fault_8_a_server_that_has_forgotten_everything_is_told_again_and_no_store_is_a_lie(pool, face):
    """Without a journal. What was stored is registered again by its owner; until then it is a miss."""
    with (
        Server(pool, "--no-journal") as server,
        client(face, server.ipc) as owner,
        client("blocking", server.ipc, pool_size=0) as reader,
    ):
        keys = keys_of("k", 5)
        owner.put(keys)
        server.restart()
        assert server.ready["keys"] == 0
        assert owner.put(["new"]) == ["NEW"]
        assert reader.get(["new"]) == ["right"]
        owner.beat()
        assert reader.get(keys) == ["right"] * 5
        assert owner.handler.statistics().counters.sessions_lost == 1


def test_fault_8_a_view_outlives_a_restart_or_says_that_it_did_not(pool, face):
    with (
        Server(pool) as server,
        client("blocking", server.ipc) as owner,
        client(face, server.ipc, pool_size=0) as reader,
    ):
        owner.put(["k"])
        reader.hold("k")
        server.restart()
        assert reader.looks("k") == "right"  # nobody may touch it yet
        assert owner.delete(["k"]) in (["PROTECTED"], ["PINNED"])
        assert reader.exist("k") == [True]  # with this it has heard of the new epoch
        assert reader.looks("k") in ("right", "lost")
        assert owner.exist("k") == [True]
        if reader.looks("k") == "right":
            assert owner.delete(["k"]) == ["PINNED"]


# --- 9: a client that has died ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_fault_9_pins_and_regions_of_a_killed_client_go_with_its_lease(pool, face):
    with (
        Server(pool, "--capacity-bytes", "4MiB", skips=True) as server,
        client("blocking", server.ipc, lease=60.0) as owner,
        Actor(BE, face, server.ipc, {"lease": 10.0}) as victim,
    ):
        assert owner.put(["k"]) == victim.ask("put", ["v"]) == ["NEW"]
        assert victim.ask("pin", "k") == victim.ask("hold", "v") == [True]
        assert server.facts()["sessions"] == server.facts()["pinned"] == 2
        assert owner.delete(["k"]) == ["PINNED"]
        victim.kill()
        server.skip(20.0)
        eventually(lambda: server.facts()["sessions"] == 1)
        facts = server.facts()
        assert (facts["pinned"], facts["regions"], facts["abandoned"]) == (0, 2, 1)
        assert owner.get(["v"]) == ["right"]  # what it has left is of use as long as there is room
        assert owner.delete(["k"]) == ["DELETED"]
        with client("blocking", server.ipc) as successor:
            assert successor.put(["w"]) == ["NEW"]  # and then it makes room
            assert successor.exist("v", "w") == [False, True]
            assert len(server.region_files()) == 2


def test_fault_9_a_killed_published_client_leaves_nothing_behind_but_for_its_grace(pool):
    with (
        Server(pool, "--v1-read-grace", "0.2", "--capacity-bytes", "4MiB", skips=True) as server,
        Actor(BE_PUBLISHED, server.ipc, "victim") as victim,
        client("blocking", server.ipc, lease=60.0) as other,
    ):
        assert victim.ask("put", "v") is True
        assert victim.ask("pin", "v") is True
        with PublishedClient(server.ipc) as raw:
            raw.ask(Ask.HANDSHAKE, instance_id="one of ours that is silent", extensions=1)
            assert server.facts()["sessions"] == 3
            server.skip(20.0)  # more than a lease of silence
            eventually(lambda: server.facts()["sessions"] < 3)
            assert server.facts()["sessions"] == 2
        assert other.put(["k"]) == ["NEW"]
        victim.kill()
        theirs = other.handler.statistics().calls.sockets
        eventually(lambda: server.facts("server")["connections"] == theirs + 1)  # and that over which it is asked
        server.skip(20.0)
        eventually(lambda: server.facts()["sessions"] == 1 and server.facts()["pinned"] == 0)
        assert other.get(["v"]) == ["right"]
        with client("blocking", server.ipc) as successor:
            eventually(lambda: successor.put(["w"]) == ["NEW"])


# --- 10: nothing slow on the metadata loop ----------------------------------------------------------------------------


def test_fault_10_a_stalled_pool_stalls_who_waits_for_memory_and_nobody_else(pool, face):
    gate = pool.parent / "stalled"
    with (
        Server(pool, setup=f"tests.support.maru_setups:stall:{gate}") as server,
        client(face, server.ipc) as other,
        client("blocking", server.ipc, pool_size=0) as reader,
        client(face, server.ipc) as waiting,
    ):
        other.put(["k"])
        waiting.call("healthcheck")
        gate.touch()
        outcome: list[Any] = []

        def wait_for_memory() -> None:
            try:
                outcome.append(waiting.put(["w"]))
            except MaruError as exc:
                outcome.append(exc)

        thread = threading.Thread(target=wait_for_memory)
        thread.start()
        eventually(lambda: server.facts("server")["waiting for memory"] == 1)
        for number in range(20):
            assert other.put([f"{number}"]) == ["NEW"]
            assert reader.get(["k", f"{number}"])[1] == "right"
        # The same client: it asks for the index, and maps another owner's region.
        assert waiting.call("healthcheck") and waiting.call("exists", "k")
        assert waiting.get(["k", "19", "w"]) == ["right", "right", "missing"]
        with client(face, server.ipc, pool_size=0) as newcomer:  # who maps what is there already
            assert newcomer.get(["19"]) == ["right"]
        with PublishedOwner(server.ipc, "theirs", region=0) as published:
            assert published.get(["19"]) == ["right"]
        assert not outcome
        gate.unlink()
        thread.join(PATIENCE)
        assert outcome == [["NEW"]]


# --- 11: close neither hangs nor aborts --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["running", "stopped", "killed"])
def test_fault_11_close_ends_soon_whatever_the_server_does(pool, face, how):
    with Server(pool) as server:
        closing = client(face, server.ipc, index="off")
        closing.put(["k", "l"])
        closing.hold("k")
        [view] = [view for _, view in closing.held["k"]]
        closing.fill(["half done"])
        waits: list[Any] = []

        def wait_for_an_answer() -> None:
            try:
                waits.append(closing.exist("k"))
            except MaruError as exc:
                waits.append(exc)
            except Exception as exc:  # the trio run may be over
                waits.append(exc)

        if how == "killed":
            server.kill()
        elif how == "stopped":
            server.process.send(signal.SIGSTOP)
        thread = threading.Thread(target=wait_for_an_answer)
        if how != "running":
            thread.start()
            eventually(lambda: closing.handler.statistics().calls.waiting)
        within(None, closing.close)  # far sooner than any call's patience ends: so it does not wait for that
        within(None, closing.close)
        if how != "running":
            thread.join(PATIENCE / 4)  # the call's own patience is all of it
            assert not thread.is_alive(), "a call goes on waiting for a server, for a handler that is closed"
            assert isinstance(waits[0], Exception) and not isinstance(waits[0], AssertionError)
        assert bytes(view) == payload("k", SIZE)  # still mapped, and still what it was
        with pytest.raises((MaruError, Exception)):
            closing.exist("k")
        assert not closing.handler.connected
        del view
        closing.held.clear()


PROGRAM = """
import sys, threading, trio
from maru.{module} import MaruHandler
knobs = dict(server_url=sys.argv[1], pool_size={region}, chunk_size_bytes={page}, timeout_ms=60_000)
def use(handler):
    handler.connect()
    handler.batch_put(["k"], [b"bytes"])
    info = handler.retrieve("k")
    return handler, info, info.view
{main}
print("the end", flush=True)
"""
ENDS = {
    "forgotten": "kept = use(MaruHandler(**knobs))",
    "in a cycle": "kept = use(MaruHandler(**knobs)); kept = [kept]; kept.append(kept)",
    "while a thread waits": (  # for an answer: with the index it would hardly ask
        "kept = use(MaruHandler(**knobs, index='off'))\n"
        "threading.Thread(target=lambda: [kept[0].exists('k') for _ in range(1_000_000)], daemon=True).start()\n"
        "while not kept[0].statistics().calls.waiting: pass"
    ),
    "on the way out of an error": "kept = use(MaruHandler(**knobs)); print('the end', flush=True); sys.exit(0)",
    "dropped before its view": "handler, info, view = use(MaruHandler(**knobs)); del handler; del info; bytes(view)",
    "in a trio run that is cancelled": """
from maru._client.handler import MaruHandler
async def main():
    with trio.CancelScope() as scope:
        async with MaruHandler(**knobs) as handler:
            await handler.batch_put(["k"], [b"bytes"])
            info = await handler.retrieve("k")
            kept.append(info.view)
            scope.cancel()
            await trio.sleep_forever()
kept = []
trio.run(main)
assert bytes(kept[0]) == b"bytes"
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_fault_11_a_process_that_never_closed_ends_all_the_same(pool, end):
    with Server(pool, "--min-lease", "0.1", "--lease-grace", "0.1") as server:
        program = PROGRAM.format(module="_client.blocking", region=REGION, page=PAGE, main=ENDS[end])
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, server.ipc], capture_output=True, text=True, timeout=PATIENCE
        )
        assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["the end"]), done.stderr
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


def test_fault_11_a_process_ends_while_its_server_is_stopped(pool):
    with (
        Server(pool) as server,
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM.format(
                    module="_client.blocking",
                    region=REGION,
                    page=PAGE,
                    main="kept = use(MaruHandler(**knobs)); print('here', flush=True); sys.stdin.read()",
                ),
                server.ipc,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "here\n"
            with server.stopped():
                process.stdin.close()
                assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


# --- 12: a torn journal ------------------------------------------------------------------------------------------------


def test_fault_12_a_torn_journal_costs_at_most_what_was_never_acknowledged(pool):
    with Server(pool) as server:
        keys = _six_keys(server)
        kept = _journal_files(pool)
        live = max((name for name in kept if name.startswith("journal.")), key=lambda name: int(name.split(".")[1]))
        whole = kept[live]
        begin = whole.rfind(keys[-1].encode())
        assert begin > 0, "the last key is not in the live segment"
        # Whatever end a write(2) had that was cut short. The last record begins some dozens of bytes before its key.
        for end in [begin - 20, begin, begin + 1, *range(begin + 3, len(whole), 17), len(whole) - 1, len(whole)]:
            _put_back(pool, {**kept, live: whole[:end]})
            server.start()
            survive = 6 if end == len(whole) else 5
            with client("blocking", server.ipc, pool_size=0) as reader:
                assert reader.get(keys) == ["right"] * survive + ["missing"] * (6 - survive), end
            server.kill()


def test_fault_12_a_damaged_journal_stops_no_start_and_nothing_wrong_is_found(pool):
    """What was not cut short but changed may have been acknowledged. It is missed honestly, and kept for whoever looks."""
    with Server(pool) as server:
        keys = _six_keys(server)
        kept = _journal_files(pool)
        live = max((name for name in kept if name.startswith("journal.")), key=lambda name: int(name.split(".")[1]))
        whole, region_files = kept[live], {name: (pool / name).read_bytes() for name in server.region_files()}
        changed = bytes([whole[-1] ^ 0x55])
        middle = len(whole) // 2
        for damaged in (
            whole[:-1] + changed,
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            whole + whole[-40:],
            whole + b"\xff" * 300,
            b"somebody's poem\n" * 100,
            b"",
        ):
            _put_back(pool, {**kept, live: damaged})
            for name, content in region_files.items():
                (pool / name).write_bytes(content)
            server.start()
            with client("blocking", server.ipc) as owner:
                assert set(owner.get(keys)) <= {"right", "missing"}
                assert owner.put(["new"]) == ["NEW"]
                assert owner.get(["new"]) == ["right"]
            if owner.pages().regions and damaged:
                assert (pool / f"lost.{live}").read_bytes() == damaged
            server.kill()


def _six_keys(server: Server) -> list[str]:
    """Stored one by one, and then the server is killed: before the owner's farewell, which would be a record too."""
    keys = keys_of("k", 6)
    with client("blocking", server.ipc) as owner:
        for key in keys:
            assert owner.put([key]) == ["NEW"]
        server.kill()
    return keys


def _journal_files(pool: Path) -> dict[str, bytes]:
    names = [name for name in os.listdir(pool) if name.startswith(("journal.", "snapshot.", "lost."))]
    return {name: (pool / name).read_bytes() for name in names}


def _put_back(pool: Path, files: dict[str, bytes]) -> None:
    for name in _journal_files(pool):
        (pool / name).unlink()
    for name, content in files.items():
        (pool / name).write_bytes(content)
        (pool / name).chmod(0o600)


# --- 13: nothing looks at all keys -----------------------------------------------------------------------------------


class Unlooked(dict):
    """Where keys are kept: whoever walks through all of them is found out."""

    def __iter__(self):
        raise AssertionError("somebody looks at all keys")

    def values(self):
        raise AssertionError("somebody looks at all keys")

    items = values

    def __len__(self):
        return super().__len__()


def test_fault_13_neither_statistics_nor_freeing_looks_at_all_keys(pool, monkeypatch):
    """At the heart of the server: the maps of all keys are replaced by such as cannot be walked through."""
    from tests.support.maru_world import World

    world = World(v1_read_grace=0.0)
    directory = world.service.directory
    directory._state.located = directory._located = Unlooked()
    actor = _Raw(world)
    session = actor.handshake()
    region = actor.region(session)
    keys = keys_of("k", 100)
    actor.store(session, region, keys)
    empty = actor.region(session)
    actor.ask(Code.GET_STATS)
    actor.ask(Code.GET_USAGE)
    actor.ask(Code.DESCRIBE)
    assert world.service.directory.statistics().entries == 100
    assert actor.give_back(session, empty)["success"]  # free() of theirs scans every key
    assert actor.give_back(session, region)["success"]
    assert actor.drop(session, keys[:50]) == [0] * 50
    world.service.directory.drop_region(region)
    assert world.service.directory.statistics().entries == 0


class _Raw:
    """Asks a :class:`World` and reads bare msgpack."""

    def __init__(self, world: Any):
        self.world = world

    def ask(self, code: int, message: Any = None) -> Any:
        frame = self.world.arrive(b"raw", request(code, 1, message))
        answer = msgspec.msgpack.decode(frame[16:])
        assert not (isinstance(answer, dict) and answer.get("error")), answer
        return answer

    def handshake(self) -> bytes:
        return self.ask(Code.HANDSHAKE, HandshakeRequest(extensions=1, instance_id="raw"))["session"]

    def region(self, session: bytes) -> int:
        from maru._wire import AllocRequest

        return self.ask(Code.REQUEST_ALLOC, AllocRequest("raw", 1 << 20, session))["handle"]["region_id"]

    def store(self, session: bytes, region: int, keys: list[str]) -> None:
        offsets = list(range(0, 100 * len(keys), 100))
        answer = self.ask(Code.STORE, StoreRequest(session, 0, 1, region, keys, offsets, 100, None))
        assert answer[2] == [0] * len(keys)

    def give_back(self, session: bytes, region: int) -> dict[str, Any]:
        from maru._wire import ReturnRequest

        return self.ask(Code.RETURN_ALLOC, ReturnRequest("raw", region, session))

    def drop(self, session: bytes, keys: list[str]) -> list[int]:
        from maru._wire import DropRequest

        return self.ask(Code.DROP, DropRequest(session, 0, 1, keys))[2]


def test_fault_13_what_statistics_say_is_as_long_for_many_keys_as_for_few(pool):
    with (
        Server(pool) as server,
        client("blocking", server.ipc, chunk_size_bytes=256, checksums=False) as owner,
        PublishedClient(server.ipc) as raw,
    ):
        lengths = []
        for number in (10, 5000):
            owner.put(keys_of("k", number), 100)
            lengths.append(
                [len(msgspec.msgpack.encode(raw.ask(code))) for code in (Ask.GET_STATS, Ask.GET_USAGE, 0x49)]
            )
        assert server.facts()["entries"] == 5000
        assert all(abs(many - few) < 100 for few, many in zip(*lengths, strict=True)), lengths


# --- 14: eviction ------------------------------------------------------------------------------------------------------


def test_fault_14_a_full_owner_evicts_what_was_used_least_recently_and_never_what_is_pinned(pool, face):
    with (
        Server(pool, "--high-watermark", "1.0", "--low-watermark", "1.0") as server,
        client(face, server.ipc) as owner,
        client("blocking", server.ipc, pool_size=0) as reader,
    ):
        keys = keys_of("k")
        for key in keys:
            owner.put([key])
        assert reader.pin(keys[1]) == [True]
        assert reader.get([keys[0]]) == ["right"]  # a use
        reader.exist(keys[2])  # none
        assert owner.put(["x", "y", "z"]) == ["NEW"] * 3
        assert reader.exist(*keys) == [True, True, False, False, False, True, True, True]
        reader.pin(*keys[5:], keys[0])
        reader.pin(keys[0], "x", "y", "z")
        assert owner.put(["beyond"]) == ["FULL"]
        reader.unpin(keys[1])
        assert eventually(lambda: owner.put(["beyond"]) == ["NEW"])
        assert reader.exist(keys[1], keys[0]) == [False, True]
        assert server.facts()["evicted"] == 4


def test_fault_14_watermarks_and_quotas_evict_ahead_of_need(pool, face):
    with (
        Server(pool, "--high-watermark", "0.6", "--low-watermark", "0.3", "--watermark-interval", "0.02") as server,
        client(face, server.ipc) as owner,
    ):
        owner.put(keys_of("k"), PAGE)
        eventually(lambda: server.facts()["entries"] == 2)
        assert owner.exist(*keys_of("k")).count(True) == 2
    with (
        Server(pool / "q", "--instance-quotas", f"modest={3 * SIZE}") as server,
        client(face, server.ipc, instance_id="modest") as modest,
        client(face, server.ipc) as other,
    ):
        for key in keys_of("k"):
            assert modest.put([key]) == other.put([f"o{key}"]) == ["NEW"]
        assert modest.exist(*keys_of("k")) == [False] * 5 + [True] * 3
        assert other.exist(*[f"o{key}" for key in keys_of("k")]) == [True] * PAGES
        modest.pin(*keys_of("k")[5:])
        assert modest.put(["beyond"]) == ["QUOTA"]


# --- 15: what cannot be is refused -------------------------------------------------------------------------------------


IMPOSSIBLE = {
    "an unknown region": {"region_id": 999},
    "region 0": {"region_id": 0},
    "a negative region": {"region_id": -1},
    "a region of somebody else": {"region_id": None},
    "a negative offset": {"kv_offset": -1},
    "an offset behind the end": {"kv_offset": REGION},
    "an offset beyond all bounds": {"kv_offset": 2**63},
    "a length over the end": {"kv_offset": REGION - 10, "kv_length": 11},
    "an offset and a length that overflow": {"kv_offset": 2**63, "kv_length": 2**63},
    "no length": {"kv_length": 0},
    "a negative length": {"kv_length": -5},
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_fault_15_impossible_registrations_are_refused(shared, what):
    server, owner, other = shared
    entry = {"key": what, "region_id": owner.handle["region_id"], "kv_offset": 0, "kv_length": 10, **IMPOSSIBLE[what]}
    if entry["region_id"] is None:
        entry["region_id"] = other.handle["region_id"]
    before = server.facts()["entries"]
    answer = owner.ask(Ask.REGISTER_KV, **entry)
    assert not answer.get("success") and not answer.get("is_new") and answer["error"]
    good = {"key": "good", "region_id": owner.handle["region_id"], "kv_offset": 100, "kv_length": 10}
    batch = owner.ask(Ask.BATCH_REGISTER_KV, entries=[good, entry])
    assert not batch.get("success") and True not in batch.get("results", []) and batch["error"]
    session = owner.ask(Ask.HANDSHAKE, instance_id="x", extensions=1)["session"]
    try:
        message = StoreRequest(
            session, 0, 1, entry["region_id"], ["s"], [entry["kv_offset"]], [entry["kv_length"]], None
        )
        answer = raw_ask(server, Code.STORE, message)
    except OverflowError:  # no such number can be said
        pass
    else:
        assert isinstance(answer, dict) or answer[2][0] > 1, answer
    assert owner.ask(Ask.BATCH_EXISTS_KV, keys=[what, "good", "s"])["results"] == [False] * 3
    assert server.facts()["entries"] == before


@pytest.fixture(scope="module")
def shared():
    """A server with two published owners, which nothing here changes."""
    with (
        temporary_pool() as path,
        Server(path) as server,
        PublishedOwner(server.ipc, "a") as owner,
        PublishedOwner(server.ipc, "b") as other,
    ):
        yield server, owner, other


# --- 16: one round trip -------------------------------------------------------------------------------------------------


def test_fault_16_a_store_is_one_request_whatever_becomes_of_it(pool, face):
    with (
        Server(pool) as server,
        client(face, server.ipc, chunk_size_bytes=4096, lease=60.0, index="off") as owner,
        client("blocking", server.ipc, pool_size=0, lease=60.0, index="off") as reader,
    ):
        owner.put(["warm"])
        reader.hold("warm")

        def asked(work: Callable[[], Any]) -> int:
            before = server.requests()
            work()
            return server.requests() - before - 1

        keys = keys_of("k", 64)
        [handle] = owner.fill(["one"])
        assert asked(lambda: owner.call("store", "one", handle)) == 1
        assert asked(lambda: owner.put(keys)) == 1
        assert asked(lambda: owner.put(keys[:32] + keys_of("l", 32))) == 1  # half of them are there already
        assert asked(lambda: owner.fill(keys_of("m", 64))) == 0
        assert asked(lambda: reader.hold(*keys)) == 1
        assert asked(lambda: reader.hold(*keys)) == 0  # pinned already
        assert asked(lambda: reader.looks(keys[0])) == 0
        assert asked(lambda: owner.exist(*keys)) == 1
        assert asked(lambda: owner.delete(keys_of("l", 32))) == 1


# --- 17: no page for markers; keys of two layouts never meet --------------------------------------------------------


def test_fault_17_a_key_costs_one_page_and_nothing_else(pool, face):
    with Server(pool) as server, client(face, server.ipc) as owner:
        assert owner.put(keys_of("k")) == ["NEW"] * PAGES
        facts = server.facts()
        assert (facts["entries"], facts["used_bytes"]) == (PAGES, PAGES * SIZE)
        assert owner.pages().registered == PAGES


def test_fault_17_equal_keys_of_two_models_or_tenants_never_meet(pool, face):
    names = [
        ("", ""),
        ("llama fp16 r0", ""),
        ("llama fp16 r1", ""),
        ("", "alice"),
        ("llama fp16 r0", "alice"),
        ("a", "bc"),
        ("ab", "c"),
    ]
    with Server(pool) as server:
        for namespace, tenant in names:
            with client(face, server.ipc, namespace=namespace, tenant=tenant) as one:
                assert one.exist("k") == [False]
                own = f"{namespace}/{tenant}".encode().ljust(SIZE)
                assert one.call("batch_put", ["k"], [own])[0].name == "NEW"
        for namespace, tenant in names:
            with client(face, server.ipc, namespace=namespace, tenant=tenant, pool_size=0) as one:
                buffer = bytearray(SIZE)
                assert one.call("batch_get_into", ["k"], [buffer])[0].name == "LOADED"
                assert buffer.rstrip() == f"{namespace}/{tenant}".encode()
        with client(face, server.ipc, pool_size=0) as bare:
            bare.delete(["k"])
        assert server.facts()["entries"] == len(names) - 1


# --- 18: SIGTERM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["idle", "busy", "unread"])
def test_fault_18_sigterm_ends_the_server(pool, load):
    _sigterm(pool, load)


@pytest.mark.long  # a machine that has more to do than this may take longer
@pytest.mark.parametrize("load", ["idle", "busy", "unread"])
def test_fault_18_sigterm_ends_the_server_within_a_second(pool, load):
    assert _sigterm(pool, load) < 1.0


def _sigterm(pool: Path, load: str) -> float:
    """How long it takes to end, after which it is whole when it is started again."""
    with Server(pool) as server, client("blocking", server.ipc) as owner:
        owner.put(["k"])
        stop = threading.Event()

        def work() -> None:
            with BlockingClient(server.ipc) as busy, busy.impatient(0.3):
                number = 0
                while not stop.is_set():
                    number += 1
                    with contextlib.suppress(MaruError, OSError):
                        busy.put([f"{threading.get_ident()} {number}"])
                        busy.get(["k"])

        threads = [threading.Thread(target=work) for _ in range(3 if load == "busy" else 0)]
        for thread in threads:
            thread.start()
        flood = _flood(server) if load == "unread" else None
        try:
            if load == "busy":
                eventually(lambda: server.facts()["entries"] > 20)
            began = time.monotonic()
            server.process.send(signal.SIGTERM)
            assert server.process.wait() == 0
            took = time.monotonic() - began
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
            if flood is not None:
                flood()
        assert not any(thread.is_alive() for thread in threads)
        assert not {"maru.sock", "channel.sock", "descriptors.sock"} & set(os.listdir(pool))
        server.start()
        assert eventually(lambda: owner.get(["k"])) == ["right"]
        return took


def _flood(server: Server) -> Callable[[], None]:
    """Ask for much and read nothing."""
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.rcvhwm = 0, 10
    socket.connect(server.ipc)
    frame = request(Code.GET_STATS, 1, None)
    for _ in range(20_000):
        try:
            socket.send_multipart([b"", frame], zmq.NOBLOCK)
        except zmq.Again:
            break

    def close() -> None:
        socket.close()
        context.term()

    return close


def test_fault_18_sigterm_ends_a_server_whose_pool_is_stalled(pool):
    gate = pool.parent / "stalled"
    with (
        Server(pool, setup=f"tests.support.maru_setups:stall:{gate}") as server,
        client("blocking", server.ipc) as owner,
        client("blocking", server.ipc) as waiting,
    ):
        owner.put(["k"])
        gate.touch()
        with waiting.impatient():
            unanswered(lambda: waiting.put(["w"]))
        began = time.monotonic()
        server.process.send(signal.SIGTERM)
        assert server.process.wait() == 0
        print(f"SIGTERM with a stalled pool: {time.monotonic() - began:.2f} s")
