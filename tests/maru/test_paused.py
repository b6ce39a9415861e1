"""A server that stood still: stopped, starved, or kept from reading. Nobody was silent while nobody listened."""

from __future__ import annotations

import contextlib
import time

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from maru import ServerConfig, open_server
from maru._wire import BeatRequest, Code, ErrorReply, body_of, decode_reply, read_header, request
from maru.base.served_time import ServedTime
from tests.support.maru_actors import BE, client
from tests.support.maru_processes import Actor, Server, eventually, temporary_pool

# --- the decision -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_time_in_which_the_server_looks_passes_as_it_does_for_all():
    clock = Clock()
    served = ServedTime(clock, 0.2)
    for _ in range(1000):
        clock.now += 0.19
        assert served.look() == pytest.approx(clock.now)
    assert served.away == 0.0


def test_a_pause_is_given_back_but_for_the_longest_time_between_two_looks():
    clock = Clock()
    served = ServedTime(clock, 0.2)
    clock.now += 3600.0
    assert served.now() == pytest.approx(100.2)
    assert served.look() == pytest.approx(100.2)
    assert served.away == pytest.approx(3599.8)
    clock.now += 0.1
    assert served.look() == pytest.approx(100.3)


def test_asking_for_the_time_is_no_look():
    """Tasks go on while the reader waits for the journal: they must not make it seem that somebody listened."""
    clock = Clock()
    served = ServedTime(clock, 0.2)
    for _ in range(100):
        clock.now += 0.1
        assert served.now() <= 100.2
    assert served.look() == pytest.approx(100.2)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.booleans()), max_size=50))
def test_served_time_never_goes_back_and_never_runs_ahead(steps):
    clock = Clock(0.0)
    served = ServedTime(clock, 0.2)
    last = 0.0
    for seconds, looks in steps:
        clock.now += seconds
        now = served.look() if looks else served.now()
        assert last <= now + 1e-9 and now <= clock.now
        last = now


# --- a server in this process, whose clock is moved -------------------------------------------------------------------


RATE = 50.0


class MovedClock(trio.abc.Clock):
    """Goes fast, and on by what it is told."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._began = time.monotonic()

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return RATE * (time.monotonic() - self._began) + self.ahead

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return (deadline - self.current_time()) / RATE


class Talker:
    """Frames for the service of a server in this process: as if they had just been read."""

    def __init__(self, server):
        self._server = server

    def beat(self, token):
        service = self._server._service
        frame = service.handle(b"peer", request(Code.BEAT, 1, BeatRequest(token, 0)), self._server._time.now())
        return decode_reply(Code.BEAT, body_of(frame, read_header(frame)))

    def open(self, lease):
        directory = self._server._storage.directory
        token = lease.hex().encode()[:16].ljust(16, b".")
        directory.open_session(token, "ours", "", lease, self._server._time.now())
        return token


@contextlib.asynccontextmanager
async def serving(pool, **knobs):
    config = ServerConfig(host="", rm_address="", pool_path=str(pool), watermark_interval=1.0, **knobs)
    async with open_server(config) as server:
        yield server


def in_moved_time(pool, main, **knobs):
    clock = MovedClock()

    async def run():
        with trio.fail_after(1e6):
            async with serving(pool, **knobs) as server:
                await main(server, clock)

    trio.run(run, clock=clock)


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


def test_a_server_that_stood_still_gives_the_time_back_and_hears_what_was_said_meanwhile(pool):
    async def main(server, clock):
        talker = Talker(server)
        token = talker.open(lease=30.0)
        for _ in range(4):
            clock.ahead += 60.0
            await trio.sleep(2 * server.config.watermark_interval)
            assert server.statistics().service.directory.sessions == 1
        assert not isinstance(talker.beat(token), ErrorReply)

    in_moved_time(pool, main)


def test_silence_that_was_listened_to_ends_a_lease(pool):
    async def main(server, clock):
        Talker(server).open(lease=5.0)
        while server.statistics().service.directory.sessions:  # noqa: ASYNC110
            await trio.sleep(0.5)
        # It lasted its lease and the grace: the clock began somewhere.
        assert server._time.now() - server._began >= 5.0 + server.config.lease_grace

    in_moved_time(pool, main)


def test_while_the_journal_cannot_be_written_no_lease_runs(pool, monkeypatch):
    """Frames lie unread then, signs of life among them."""

    async def main(server, clock):
        talker = Talker(server)
        token = talker.open(lease=5.0)
        committer = server._committer
        server._step()
        committer._unwritten.append(b"does not go")  # as it is while the disk is full
        monkeypatch.setattr(committer, "_write", lambda: False)
        began = trio.current_time()
        while trio.current_time() - began < 20.0:  # noqa: ASYNC110
            await trio.sleep(0.5)
        assert server.statistics().service.directory.sessions == 1
        committer._unwritten.clear()
        committer._changed.unpark_all()
        await trio.sleep(3 * server.config.watermark_interval)
        assert not isinstance(talker.beat(token), ErrorReply)

    in_moved_time(pool, main, drain_timeout=0.0)


# --- a real process, stopped ------------------------------------------------------------------------------------------

LEASE, GRACE = 1.0, 0.5
BOTH = [pytest.param("trio", marks=pytest.mark.long), "blocking"]


@pytest.mark.parametrize("face", BOTH)
def test_a_server_that_is_stopped_for_two_leases_ends_no_session_of_a_living_client(pool, face):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(pool, "--lease-grace", str(GRACE)))
        clients = [
            stack.enter_context(client(face, server.ipc, lease=LEASE, instance_id=f"c{number}", pool_size=0))
            for number in range(12)
        ]
        before = server.facts()["sessions"]
        assert before == 12
        with server.stopped():
            time.sleep(2 * LEASE + GRACE)
        for one in clients:
            assert eventually(lambda one=one: one.exist("k")) == [False]
        counters = [one.handler.statistics().counters for one in clients]
        assert [one.sessions_lost for one in counters] == [0] * 12
        assert server.facts()["sessions"] == 12
        assert server.facts("server")["stood still for"] > LEASE
    assert "is over" not in server.text


@pytest.mark.parametrize("face", BOTH)
def test_what_is_held_while_the_server_stands_still_is_held_afterwards(pool, face):
    with (
        Server(pool, "--lease-grace", str(GRACE)) as server,
        client(face, server.ipc, lease=LEASE) as owner,
        client(face, server.ipc, lease=LEASE, pool_size=0) as reader,
    ):
        owner.put(["k"])
        assert reader.hold("k") == [True]
        with server.stopped():
            time.sleep(2 * LEASE + GRACE)
            # By its own clock its lease is over, and it does not trust what nobody vouches for.
            assert reader.looks("k") == "lost"
        eventually(lambda: reader.exist("k") == [True])
        assert eventually(lambda: reader.looks("k") == "right")
        assert owner.delete(["k"]) == ["PINNED"]


def test_a_client_that_is_stopped_for_two_leases_does_lose_its_session(pool):
    """The other way round it is silence."""
    with (
        Server(pool, "--lease-grace", str(GRACE)) as server,
        Actor(BE, "blocking", server.ipc, {"lease": LEASE, "pool_size": 0}) as actor,
    ):
        assert actor.ask("exist", "k") == [False]
        with actor.process.stopped():
            eventually(lambda: server.facts()["sessions"] == 0)
        assert eventually(lambda: actor.ask("exist", "k")) == [False]
