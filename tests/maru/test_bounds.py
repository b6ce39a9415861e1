"""What may wait at a server, and what one request may cost: in bytes, in names, in steps. A good client never meets a bound."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque

import msgspec
import pytest
import trio
import zmq
from hypothesis import given
from hypothesis import strategies as st

from maru import ServerConfig, open_server
from maru._server import server as server_module
from maru._server.reports import INTERVAL, MAX_BYTES, Reports
from maru._wire import Code, ReportEntry, ReportRequest, StatsManagerStats, request
from maru.transport import SocketOptions, open_socket
from maru.transport._unread import Unread
from tests.maru.test_hostile import Attacker, Good
from tests.support.maru_processes import Server, temporary_pool
from tests.support.maru_sockets import eventually

MIB = 1 << 20

# --- what waits, as far as can be known ------------------------------------------------------------------------------


def test_what_waits_for_a_peer_is_at_most_its_last_messages():
    unread = Unread(3, 100, 1000)
    for size in (50, 10, 20, 30):
        unread.sent(b"a", size)
    assert (unread.of(b"a"), unread.of(b"b"), unread.total) == (60, 0, 60)
    unread.forget(b"a")
    assert (unread.of(b"a"), unread.total, len(unread)) == (0, 0, 0)


def test_who_meets_its_bound_is_looked_at_and_nobody_else():
    unread = Unread(10, 100, 1000)
    unread.sent(b"a", 60)
    unread.sent(b"b", 90)
    assert unread.crowd_out(b"a", 40) == []
    assert unread.crowd_out(b"a", 41) == [b"a"]


def test_one_message_is_taken_however_large_it_is():
    assert Unread(10, 100, 1000).crowd_out(b"a", 5000) == []


def test_over_the_bound_of_all_who_has_the_most_is_looked_at_first():
    unread = Unread(10, 600, 1000)
    for peer, size in ((b"a", 200), (b"b", 500), (b"c", 250)):
        unread.sent(peer, size)
    assert unread.crowd_out(b"d", 50) == []
    assert unread.crowd_out(b"d", 51) == [b"b", b"c", b"a"]


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(-1, 50)), max_size=60))
def test_sums_are_kept(steps):
    unread, model = Unread(4, 100, 200), {}
    for peer, size in steps:
        if size < 0:
            unread.forget(peer)
            model.pop(peer, None)
        else:
            unread.sent(peer, size)
            model.setdefault(peer, deque(maxlen=4)).append(size)
        assert {one: unread.of(one) for one in model} == {one: sum(sizes) for one, sizes in model.items()}
        assert unread.total == sum(map(sum, model.values()))


# --- sockets ----------------------------------------------------------------------------------------------------------

BOUNDS = SocketOptions(max_unread_bytes=4 * MIB, max_unread_bytes_together=8 * MIB, send_high_water_mark=1000)
PIECE = bytes(256 << 10)


@contextlib.asynccontextmanager
async def router(address="tcp://127.0.0.1:*"):
    """A router whose peers are tracked; with it, who has said something, and who is gone."""
    gone = []
    async with open_socket("router", bind=[address], options=BOUNDS, on_gone=gone.append) as socket:
        yield socket, gone


@contextlib.contextmanager
def deaf(address):
    """Somebody who says something once, and never reads."""
    with Attacker(address, rcvhwm=1, rcvbuf=4096) as peer:
        peer.send(b"here")
        yield peer


async def peer_of(socket):
    return (await socket.receive())[0]


@pytest.fixture(params=["tcp://127.0.0.1:*", "ipc://{}/s"])
def address(request, tmp_path_factory):
    return request.param.format(tmp_path_factory.mktemp("s"))


async def test_who_does_not_read_is_hung_up_on_at_its_bound(address):
    async with router(address) as (socket, gone):
        with deaf(socket.endpoints[0]), trio.fail_after(60):
            peer = await peer_of(socket)
            sent = 0
            while not socket.statistics().hung_up:
                sent += socket.send_nowait([peer, b"", PIECE])
                assert socket.statistics().unread_bytes <= 4 * MIB + len(PIECE)
                assert sent < 1000
            await eventually(lambda: not socket._tracker.peers.known or socket._look() or gone)


async def test_where_nobody_can_be_hung_up_on_the_answer_is_refused(address, monkeypatch):
    """It takes a descriptor."""
    async with router(address) as (socket, _):
        monkeypatch.setattr(socket._tracker, "hang_up", lambda peer: False)
        with deaf(socket.endpoints[0]), trio.fail_after(60):
            peer = await peer_of(socket)
            with pytest.raises(trio.WouldBlock):
                for _ in range(1000):
                    socket.send_nowait([peer, b"", PIECE])
            assert socket.statistics().unread_bytes <= 4 * MIB


async def test_who_reads_gets_all_of_it_however_much_that_is(address):
    async with router(address) as (socket, _):
        with Attacker(socket.endpoints[0]) as peer, trio.fail_after(60):
            for _ in range(200):  # 50 MiB, a dozen times the bound
                peer.send(b"more")
                identity = await peer_of(socket)
                assert socket.send_nowait([identity, b"", PIECE])
                assert len((await trio.to_thread.run_sync(peer.socket.recv_multipart))[-1]) == len(PIECE)
        assert socket.statistics().hung_up == 0


async def test_over_the_bound_of_all_who_does_not_read_goes_and_who_reads_stays(address):
    async with router(address) as (socket, _):
        with contextlib.ExitStack() as stack, trio.fail_after(60):
            reader = stack.enter_context(Attacker(socket.endpoints[0]))
            reader.send(b"here")
            good = await peer_of(socket)
            peers = []
            for _ in range(6):
                stack.enter_context(deaf(socket.endpoints[0]))
                peers.append(await peer_of(socket))
            for at in range(90):  # 3.75 MiB for each, 22.5 MiB for all
                socket.send_nowait([peers[at % 6], b"", PIECE])
                assert socket.send_nowait([good, b"", b"small"])
                assert (await trio.to_thread.run_sync(reader.socket.recv_multipart))[-1] == b"small"
                assert socket.statistics().unread_bytes <= 8 * MIB + len(PIECE)
            assert socket.statistics().hung_up >= 2


async def test_a_bound_of_all_that_was_only_met_by_who_has_read_costs_nobody_anything(address):
    async with router(address) as (socket, _):
        with contextlib.ExitStack() as stack, trio.fail_after(60):
            for _ in range(60):  # 15 MiB in all, and all of it read
                peer = stack.enter_context(Attacker(socket.endpoints[0]))
                peer.send(b"here")
                socket.send_nowait([await peer_of(socket), b"", PIECE])
                await trio.to_thread.run_sync(peer.socket.recv_multipart)
            assert socket.statistics().hung_up == 0


# --- statistics -------------------------------------------------------------------------------------------------------


def report(client, operation="get"):
    return ReportEntry(client, operation, "hit", (1 << 63) - 1, 9e14 / 7)


def test_the_table_of_what_clients_report_has_a_largest_size():
    reports = Reports()
    for client in range(100):
        for operation in range(40):
            entries = [report(f"{client:03}" + "\N{SNOWMAN}" * 250, f"{operation:03}" + "\N{SNOWMAN}" * 250)] * 2
            reports.add(entries)
    told = bytes(reports.tell(0.0))
    assert MAX_BYTES // 2 < len(told) <= MAX_BYTES
    clients = msgspec.msgpack.decode(told, type=StatsManagerStats).clients
    assert len(clients) == 65
    assert {len(one.operations) for one in clients.values()} == {16}


def test_small_table_of_reports_is_always_current():
    reports = Reports()
    for at in range(100):
        reports.add([report("c")])
        told = msgspec.msgpack.decode(bytes(reports.tell(at * 1e-6)), type=StatsManagerStats)
        assert told.clients["c"].operations["get"].count == at + 1
    assert reports.encoded == 100
    reports.tell(1.0)
    reports.tell(2.0)
    assert reports.encoded == 101  # its interval is over; after that nothing changes


def test_large_table_of_reports_is_encoded_rarely():
    reports = Reports()
    for client in range(100):
        reports.add([report(f"{client:03}" + "c" * 250, f"{operation:03}" + "o" * 250) for operation in range(40)])
    size = len(bytes(reports.tell(0.0)))
    for at in range(1000):
        reports.add([report("000" + "c" * 250)])
        reports.tell(INTERVAL * at / 100)
    assert 9 <= reports.encoded <= 2 + 10 * MAX_BYTES / size


# --- steps ------------------------------------------------------------------------------------------------------------


class Batches:
    """A router that has these batches of messages, and then nothing."""

    def __init__(self, batches):
        self._batches = iter(batches)
        self.most = []

    async def receive_batch(self, most):
        self.most.append(most)
        await trio.lowlevel.checkpoint()
        for batch in self._batches:
            return batch
        await trio.sleep_forever()


async def test_a_batch_of_large_requests_does_not_hold_the_loop(tmp_path, monkeypatch):
    """Others have their turn between steps, and a step asks and answers so much at most."""
    config = ServerConfig(host="", rm_address="", pool_path=str(tmp_path / "p"), capacity_bytes=4 * MIB)
    large = bytes(100 << 10)
    async with open_server(config) as server:
        steps = []
        turns = 0

        async def count_turns():
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        monkeypatch.setattr(server, "_router", Batches([[[b"p", b"", b"ask"]] * 64]))
        monkeypatch.setattr(server._service, "handle", lambda identity, frame, now: large)
        monkeypatch.setattr(server, "_step", lambda answers=(): steps.append((turns, sum(len(a) for _, a in answers))))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            nursery.start_soon(server._read, server._router)
            with trio.fail_after(60):
                while sum(size for _, size in steps) < 64 * len(large):  # noqa: ASYNC110
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        taken = [(turn, size) for turn, size in steps if size]
        assert max(size for _, size in taken) <= server_module._STEP_BYTES + len(large) + 3
        assert len(taken) > 20
        # The tasks of a round run in any order: so between three steps everybody had a turn.
        assert all(first[0] < third[0] for first, third in zip(taken, taken[2:], strict=False))
        monkeypatch.undo()


async def test_behind_large_requests_few_are_read_at_once(tmp_path, monkeypatch):
    """Who asks next waits for what was read before; so it is what a step had time for, and one more behind each short one."""
    config = ServerConfig(host="", rm_address="", pool_path=str(tmp_path / "p"), capacity_bytes=4 * MIB)
    async with open_server(config) as server:
        router = Batches([[[b"p", b"", b"ask"]] * 4] * 3)
        answers = iter([bytes(100 << 10)] * 4 + [b"small"] * 8)
        monkeypatch.setattr(server, "_router", router)
        monkeypatch.setattr(server._service, "handle", lambda identity, frame, now: next(answers))
        monkeypatch.setattr(server, "_step", lambda answers=(): None)
        with trio.move_on_after(0.5):
            await server._read(server._router)
        assert router.most == [64, 3, 4, 5]
        monkeypatch.undo()


async def test_a_batch_of_requests_that_take_long_does_not_hold_the_loop(tmp_path, monkeypatch):
    config = ServerConfig(host="", rm_address="", pool_path=str(tmp_path / "p"), capacity_bytes=4 * MIB)
    async with open_server(config) as server:
        clock = itertools.count()  # each look at it is one second later
        steps = []
        monkeypatch.setattr(server_module, "perf_counter", lambda: float(next(clock)))
        router = Batches([[[b"p", b"", b"ask"]] * 6])
        monkeypatch.setattr(server, "_router", router)
        monkeypatch.setattr(server._service, "handle", lambda identity, frame, now: b"answer")
        monkeypatch.setattr(server, "_step", lambda answers=(): steps.append(len(answers)))
        with trio.move_on_after(0.5):
            await server._read(server._router)
        assert [size for size in steps if size] == [1] * 6
        assert router.most == [64, 1], "a step may be over before its first request; one is read all the same"
        monkeypatch.undo()


async def test_the_reader_can_be_cancelled_between_two_steps(tmp_path, monkeypatch):
    """What was answered has left, and nothing else was asked of the service."""
    config = ServerConfig(host="", rm_address="", pool_path=str(tmp_path / "p"), capacity_bytes=4 * MIB)
    async with open_server(config) as server:
        handled, answered = [], []
        scope = trio.CancelScope()

        def handle(identity, frame, now):
            handled.append(frame)
            return bytes(server_module._STEP_BYTES)

        def step(answers=()):
            answered.extend(answers)
            if answers:
                scope.cancel()

        monkeypatch.setattr(server, "_router", Batches([[[b"p", b"", b"ask"]] * 10]))
        monkeypatch.setattr(server._service, "handle", handle)
        monkeypatch.setattr(server, "_step", step)
        with scope:
            await server._read(server._router)
        assert len(handled) == len(answered) == 1
        monkeypatch.undo()


# --- a server ---------------------------------------------------------------------------------------------------------


def fill_reports(attacker):
    """As much as a table of reports takes."""
    for client in range(1100):
        entries = [
            ReportEntry(f"{client} " + "x" * 240, f"{operation} " + "y" * 240, "hit", 1, 1.0) for operation in range(32)
        ]
        attacker.ask(Code.REPORT_STATS, ReportRequest(entries))


def test_who_asks_for_statistics_and_does_not_read_them_costs_no_memory_and_nobody_waits():
    with temporary_pool() as pool, Server(pool, "--max-unread-bytes", "16MiB") as server, Good(server):
        with Attacker(server.ipc) as attacker:
            fill_reports(attacker)
        before = server.process.private_bytes()
        frame = request(Code.GET_STATS, 1, None)
        deaf = [Attacker(server.ipc, rcvhwm=1, rcvbuf=4096) for _ in range(5)]
        try:
            for _ in range(50):
                for one in deaf:
                    one.socket.send_multipart([b"", frame], zmq.NOBLOCK)
            with Attacker(server.ipc) as other:
                for _ in range(3):
                    assert other.ask(Code.HEARTBEAT)
            assert server.process.private_bytes() - before < 64 * MIB
        finally:
            for one in deaf:
                one.__exit__()
