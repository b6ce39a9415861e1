"""Random programs over the pages of a daemon and the tier behind them: engines at once, cancelled anywhere, with faults.

Each program is made of its seed: which engine does what, after how many turns of the loop it is cancelled, when an engine goes
and comes back, and what is wrong with the tier behind. Real pages and messages are not in one order for a seed, so what is
looked at holds in any order:

- what is found anywhere has the bytes of its key;
- a tenant never has more than its quota, nor less counted than is there;
- each block that was committed comes to one end behind the page store: passed on, gone, or not passed on;
- a session that is over commits nothing, whatever its engine had filled before it stood still;
- an engine with as many reservations as a session may have keeps no other engine out;
- nothing that is written waits for the tier behind, which in some programs stands still until all else is over;
- in the end nothing is announced, reserved, held or pinned: every block can be deleted.
"""

import contextlib
import gc
import random

import attrs
import pytest
import trio

from backends.abc import DUPLICATE, LOADED, STORED, Deletion
from backends.maru import MaruLease
from backends.testing import FakeTier
from maru.exception_groups import holds
from offload import BreakerConfig, open_engine
from offload.client import DaemonBusy, DaemonTier, DaemonUnavailable, SharedBlocks, SharedMemory
from offload.daemon._messages import Refusal
from tests.daemon.test_client import full_channel
from tests.daemon.test_pages import bytes_of, fill, keys_of, opened, until
from tests.daemon.test_pages_of_tenants import HIS, ROOM, tenants, used
from tests.daemon.test_pages_onward import chained, told
from tests.support.daemons import SIZE, directory
from tests.support.daemons import until as until_async
from tests.support.planted import daemon as planted

KEYS = keys_of(12)
ENGINES = 3
STEPS = 25
LONGEST = 60.0
"""Seconds that a program may take, by far."""
RESERVATIONS = 8
"""Reservations that a session may have at once."""


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch):
    """What an engine held when it left counts until its lease is over."""
    monkeypatch.setattr("offload.client._pages._LONGEST_LEASE", 2.0)


class Program:
    """The programs of all engines of one daemon, and what is wrong with the tier behind its page store."""

    def __init__(self, seed, running, disk, **options):
        self.seed, self.running, self.disk, self.options = seed, running, disk, options
        ends = ("stored", "read", "loaded", "deleted", "cancelled", "sessions", "full", "late", "busy")
        self.done = dict.fromkeys(ends, 0)
        running.sessions.limits = attrs.evolve(running.sessions.limits, holds=RESERVATIONS)

    async def run(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._break)
            with trio.move_on_after(LONGEST) as bound:
                async with trio.open_nursery() as engines:
                    for number in range(ENGINES):
                        engines.start_soon(self._engine, random.Random(f"{self.seed} {number}"))
            assert not bound.cancelled_caught, "an engine waits for the tier behind"
            nursery.cancel_scope.cancel()

    async def _break(self):
        rng, faults = random.Random(f"{self.seed} faults"), self.disk.faults
        try:
            if rng.random() < 0.3:
                faults.gate = trio.Event()
                await trio.sleep_forever()
            while True:
                faults.gate = trio.Event() if rng.random() < 0.3 else None
                faults.error = OSError("no disk") if rng.random() < 0.2 else None
                faults.failing = dict.fromkeys(rng.sample(KEYS, 3), OSError("a bad place"))
                for _ in range(rng.randrange(200)):
                    await trio.lowlevel.checkpoint()
                if faults.gate is not None:
                    faults.gate.set()
        finally:
            if faults.gate is not None:
                faults.gate.set()
            faults.gate = faults.error = None
            faults.failing = {}

    async def _engine(self, rng):
        steps = STEPS
        while steps:
            self.done["sessions"] += 1
            async with opened(self.running, **self.options) as pages:
                for _ in range(min(steps, rng.randrange(1, STEPS))):
                    steps -= 1
                    act = rng.choice((self._store, self._store, self._read, self._load, self._delete, self._take_all))
                    await self._cancelled(act, rng, pages)
                    if rng.random() < 0.1:
                        await self._stand_still(rng, pages)
                    assert not self.options or used(self.running) <= ROOM
                await until_async(lambda: self._is_told(pages), "a reservation that was given back is announced still")

    def _is_told(self, pages):
        """Whether the daemon knows of no more reservations of this engine than are open."""
        pages._connection.look()  # else the answer to a request that was cancelled is seen with the next heartbeat
        session = self.running.sessions.by_token(pages._connection.session.token)
        return len(session.announced) <= len(pages._open)

    async def _reserve(self, rng, pages):
        try:
            return await pages.reserve_write(rng.sample(KEYS, rng.randrange(1, 7)))
        except DaemonBusy as error:
            raise AssertionError("an engine is kept out that has few reservations") from error

    async def _cancelled(self, act, rng, pages):
        """Act, and be cancelled in the middle one time of two."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                if rng.random() < 0.5:
                    nursery.start_soon(self._cancel_later, scope, rng.randrange(40))
                if rng.random() < 0.3:
                    nursery.start_soon(self._fill_channel, pages._connection, rng.randrange(40), rng.randrange(40))
                await act(rng, pages)
                nursery.cancel_scope.cancel()
        self.done["cancelled"] += scope.cancelled_caught

    async def _cancel_later(self, scope, turns):
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async def _fill_channel(self, connection, after, turns):
        """Leave no room in the channel to the daemon for some turns."""
        for _ in range(after):
            await trio.lowlevel.checkpoint()
        with full_channel(connection):
            self.done["full"] += 1
            for _ in range(turns):
                await trio.lowlevel.checkpoint()

    async def _stand_still(self, rng, pages):
        """Commit what was filled in a session that is over by now, for the daemon or by the clock of this engine."""
        connection = pages._connection
        reservation = await self._reserve(rng, pages)
        fill(reservation)
        session = connection.session
        if rng.random() < 0.5:
            session.expires = trio.current_time()
        else:
            daemons = self.running.sessions.by_token(session.token)
            self.running._service.end(daemons, "a test")
            self.running._channel.hang_up(daemons.peer)
        with contextlib.suppress(DaemonUnavailable):
            await pages.commit(reservation)
        assert reservation.outcomes is None, "it was committed in a session that is over"
        self.done["late"] += 1
        session.expires = trio.current_time() + session.lease
        await connection.wait_session()

    async def _take_all(self, rng, pages):
        """Take reservations up to the bound of a session, hold them for some turns, and give them back."""
        taken = []
        try:
            with contextlib.suppress(DaemonBusy):
                while True:
                    taken.append(await pages.reserve_write(rng.sample(KEYS, 1)))
            self.done["busy"] += 1
            for _ in range(rng.randrange(40)):
                await trio.lowlevel.checkpoint()
        finally:
            with trio.CancelScope(shield=True):
                for reservation in taken:
                    await pages.release(reservation)

    async def _store(self, rng, pages):
        reservation = await self._reserve(rng, pages)
        fill(reservation)
        end = rng.random()
        if end < 0.7:
            outcomes = await pages.commit(reservation)
            assert len(outcomes) == len(reservation.keys) and set(outcomes) <= {STORED, DUPLICATE}
            self.done["stored"] += len(outcomes)
        elif end < 0.85:
            await pages.release(reservation)  # else it is forgotten, or goes with its session

    async def _read(self, rng, pages):
        lease = await pages.reserve_read(rng.sample(KEYS, rng.randrange(1, 7)))
        try:
            blocks = SharedBlocks(SharedMemory(max(1, len(lease.keys)) * SIZE), SIZE)
            outcomes = await pages.load(lease, blocks.into(range(len(lease.keys))))
            self._check(lease.keys, outcomes, blocks)
            self.done["read"] += len(outcomes)
        finally:
            with trio.CancelScope(shield=True):
                await pages.release(lease)

    async def _load(self, rng, pages):
        keys = rng.sample(KEYS, rng.randrange(1, 7))
        blocks = SharedBlocks(SharedMemory(len(keys) * SIZE), SIZE)
        tier = DaemonTier(self.running.url, **self.options)
        async with open_engine(blocks, [tier]) as engine, await engine.lookup(keys) as hit:
            result = await engine.load(hit, blocks.into(range(len(hit.keys))))
            self._check(hit.keys, result.outcomes, blocks)
            self.done["loaded"] += result.loaded

    async def _delete(self, rng, pages):
        blocks = SharedBlocks(SharedMemory(SIZE), SIZE)
        async with open_engine(blocks, [DaemonTier(self.running.url, **self.options)]) as engine:
            answers = await engine.delete(rng.sample(KEYS, rng.randrange(1, 4)))
            self.done["deleted"] += answers.count(Deletion.DELETED)

    def _check(self, keys, outcomes, blocks):
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if outcome == LOADED:
                assert blocks.read(at) == bytes_of(key), key


async def check_the_end(program):
    """What holds when all engines are gone, and all copies are over."""
    running = program.running
    service = running._service
    for entry in running.engine.quarantine:  # copies that the tier behind held up for longer than they had
        entry.release()
    await until(lambda: not running.statistics()["sessions"], "a session is left")
    await service.wait_given_back()
    await service.onward.wait_over()
    ends = {end: told(running, end) for end in ("passed_on", "gone", "not_passed_on")}
    # A duplicate is in the page store, too; and of what a session that has ended left open, the page store was asked.
    committed = told(running, "stored") + told(running, "duplicate") + told(running, "unknown")
    disk = running.engine.statistics().tiers["disk"]
    assert ends["passed_on"] == disk.stored + disk.duplicates
    assert sum(ends.values()) <= committed
    names = ("announced", "requests", "holds", "caches")
    assert not any(running.statistics().get(name) for name in names)
    held = running.engine.statistics()
    assert not any(tier.held_blocks or tier.reserved_blocks for tier in held.tiers.values())
    blocks = SharedBlocks(SharedMemory(len(KEYS) * SIZE), SIZE)
    async with open_engine(blocks, [DaemonTier(running.url, **program.options)]) as engine:
        await until_async(lambda: _is_whole(engine), "a tier is broken still")
        found = 0
        for key in KEYS:
            async with await engine.lookup([key]) as hit:
                assert not hit.unavailable
                result = await engine.load(hit, blocks.into(range(len(hit.keys))))
                assert result.loaded == len(hit.keys)
                found += result.loaded
                program._check(hit.keys, result.outcomes, blocks)
        if program.options:
            assert found <= used(running) <= ROOM
        await until_async(lambda: _are_gone(engine), "a block is pinned that nobody reads")
        if program.options:
            assert used(running) == 0


async def _are_gone(engine):
    return set(await engine.delete(KEYS)) <= {Deletion.DELETED, Deletion.MISSING}


async def _is_whole(engine):
    async with await engine.lookup([b"nobody's"]) as hit:
        return not hit.unavailable


@contextlib.asynccontextmanager
async def programs(seed, path, tmp_path, of_tenants):
    disk = FakeTier(256, SIZE)
    knobs, options = ({"tenants_file": tenants(tmp_path)}, {"credential": HIS}) if of_tenants else ({}, {})
    engine = {"breaker": BreakerConfig(first_wait=0.01, longest_wait=0.02)}
    async with chained(path, disk=disk, engine=engine, **knobs) as (running, _):
        yield Program(seed, running, disk, **options)


@pytest.mark.parametrize("of_tenants", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_engines_that_write_pages_lose_and_leak_nothing_whatever_they_do(seed, path, tmp_path, of_tenants):
    async with programs(seed, path, tmp_path, of_tenants) as program:
        await program.run()
        await check_the_end(program)
        assert program.done["stored"] and program.done["cancelled"]


@pytest.mark.long
async def test_a_thousand_programs_lose_and_leak_nothing(tmp_path):
    done = {}
    for seed in range(1_000, 2_000):
        with directory() as path:
            async with programs(seed, path, tmp_path, bool(seed % 2)) as program:
                await program.run()
                await check_the_end(program)
        done = {name: done.get(name, 0) + n for name, n in program.done.items()}
        gc.collect()  # a page store freezes what there is when it opens: garbage as well
    print(done)


def _counted_twice(program, monkeypatch):
    onward = program.running._service.onward
    count = onward._count
    onward._count = lambda *args: (count(*args), count(*args))


def _never_settled(program, monkeypatch):
    program.running._service.quotas.settled = lambda *args: None


def _pins_kept(program, monkeypatch):
    async def nothing(*args):
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr("tests.support.daemons.PATIENCE", 1.0)
    monkeypatch.setattr(MaruLease, "release", nothing)
    monkeypatch.setattr(MaruLease, "__aexit__", nothing)


def _committed_when_over(program, monkeypatch):
    planted.pages_are_committed_under_a_session_that_is_over(monkeypatch)


def _bounded_together(program, monkeypatch):
    """One engine takes what all may have."""
    service = program.running._service
    reserve = service.pages.reserve_nowait

    def reserve_nowait(session, *request):
        if sum(len(one.announced) for one in program.running.sessions) >= RESERVATIONS:
            raise Refusal("full", "a test")
        return reserve(session, *request)

    service.pages.reserve_nowait = reserve_nowait


def _dropped_when_full(program, monkeypatch):
    monkeypatch.setattr("tests.support.daemons.PATIENCE", 1.0)
    planted.a_release_is_dropped_if_the_channel_is_full(monkeypatch)


def _held_up_by_disk(program, monkeypatch):
    monkeypatch.setattr("tests.daemon.test_page_programs.LONGEST", 3.0)
    planted.commits_wait_for_copies_under_way(monkeypatch)


PLANTED = [
    _counted_twice,
    _never_settled,
    _pins_kept,
    _committed_when_over,
    _bounded_together,
    _dropped_when_full,
    _held_up_by_disk,
]


@pytest.mark.parametrize("fault", PLANTED)
async def test_a_fault_that_is_planted_is_found_within_some_programs(fault, tmp_path, monkeypatch):
    with pytest.raises(Exception) as found:  # by the nursery of a daemon, in a group
        for seed in range(20):
            with directory() as path:
                async with programs(seed, path, tmp_path, True) as program:
                    fault(program, monkeypatch)
                    await program.run()
                    await check_the_end(program)
    assert holds(found.value, AssertionError)
