"""Caches that are not of trio as systems under test: of plain methods, of asyncio, of threads; right ones and broken ones."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio

from backends.abc import Key
from offload.testing.scenarios import (
    After,
    AsyncioWorld,
    CloseStep,
    Expect,
    Fault,
    KeysStep,
    LoadStep,
    NeedsRealTime,
    Outcome,
    PipelineSpec,
    PolicySpec,
    Refused,
    Scenario,
    Step,
    StoreStep,
    SyncWorld,
    ThreadWorld,
    TierSpec,
    Window,
    expand,
    from_asyncio,
    from_sync,
    from_threads,
    play,
    play_real,
)
from tests.support.maru_processes import eventually
from tests.support.scenario_plays import unhurried

# --- three caches that do the same ----------------------------------------------------------------------------------


class PlainCache:
    """A cache of plain methods."""

    def __init__(self, world: SyncWorld) -> None:
        self.world = world
        self.blocks: dict[Key, bytes] = {}
        self.room = 0
        self.unwanted: set[str] = set()

    def store(self, keys: Sequence[Key], label: str) -> Outcome:
        world = self.world
        rejected = dict(world.policy(keys))
        keys = [key for key in keys if key not in rejected]
        world.hook("before_copy", label)
        if label in self.unwanted:
            return Outcome("CANCELLED")
        self.room += len(keys)
        try:
            if not world.reserve("host", keys):
                return Outcome("FAILED", failed=dict.fromkeys(keys, "full"))
            arrived = world.copy("host", keys, [world.payload(key) for key in keys])
            self.blocks.update(zip(keys, arrived, strict=False))
        finally:
            self.room -= len(keys)
        world.hook("stored", label)
        return Outcome("COMPLETE", tuple(keys), rejected)

    def request_cancel(self, label: str) -> None:
        self.unwanted.add(label)

    def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        return {key: self.blocks.get(key) for key in keys}

    def audit(self) -> Mapping[str, int]:
        return {"room": self.room}

    def found(self, tier: str) -> Sequence[Key]:
        return list(self.blocks) if tier == "host" else []

    def delete(self, tier: str, keys: Sequence[Key]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def close_now(self) -> None:
        self.unwanted.update(self.world.scenario.tier)


class AsyncioTicket:
    def __init__(self, cache: AsyncioCache) -> None:
        self.cache = cache
        self.result: Outcome | None = None
        self.task: asyncio.Task[None] | None = None
        self.copying = False
        self.ended = asyncio.Event()

    async def wait(self) -> Outcome | None:
        await self.ended.wait()
        return self.result

    async def cancel(self) -> Outcome | None:
        self.request_cancel()
        return await self.wait()

    def request_cancel(self) -> None:
        if not self.copying and self.task is not None:
            self.task.cancel()


class AsyncioCache:
    """A cache of asyncio: a task for each container."""

    def __init__(self, world: AsyncioWorld) -> None:
        self.world = world
        self.blocks: dict[Key, bytes] = {}
        self.held: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    async def store(self, keys: Sequence[Key], after: Any, label: str) -> AsyncioTicket:
        if self.closed:
            raise Refused("closed")
        ticket = AsyncioTicket(self)
        ticket.task = asyncio.create_task(self.live(ticket, keys, after, label))
        self.tasks.add(ticket.task)
        ticket.task.add_done_callback(lambda task: self.over(ticket, task))
        return ticket

    def over(self, ticket: AsyncioTicket, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if task.cancelled():
            ticket.result = Outcome("CANCELLED")
        elif ticket.result is None:
            error = task.exception()
            ticket.result = Outcome("FAILED", error=type(error).__name__)
        ticket.ended.set()

    async def live(self, ticket: AsyncioTicket, keys: Sequence[Key], after: Any, label: str) -> None:
        world = self.world
        if after is not None:
            await after()
        rejected = dict(await world.policy(keys))
        keys = [key for key in keys if key not in rejected]
        world.hook("before_copy", label)
        await asyncio.sleep(0)  # where a cancel that was asked for in the hook arrives
        self.held["room"] += len(keys)
        try:
            await world.reserve("host", keys)
            ticket.copying = True
            arrived = await world.copy("host", keys, [world.payload(key) for key in keys])
        finally:
            self.held["room"] -= len(keys)
        self.blocks.update(zip(keys, arrived, strict=False))
        world.hook("stored", label)
        ticket.result = Outcome("COMPLETE", tuple(keys), rejected)

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        return {key: self.blocks.get(key) for key in keys}

    def audit(self) -> Mapping[str, int]:
        return {"tasks": len(self.tasks), **self.held}

    def found(self, tier: str) -> Sequence[Key]:
        return list(self.blocks) if tier == "host" else []

    async def delete(self, tier: str, keys: Sequence[Key]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def close_now(self) -> None:
        self.closed = True
        for task in self.tasks:
            task.cancel()


@asynccontextmanager
async def asyncio_cache(world: AsyncioWorld) -> Any:
    cache = AsyncioCache(world)
    try:
        yield cache
    finally:
        for task in list(cache.tasks):
            task.cancel()
        await asyncio.gather(*cache.tasks, return_exceptions=True)


class ThreadTicket:
    def __init__(self) -> None:
        self.result: Outcome | None = None
        self.ended = threading.Event()
        self.unwanted = threading.Event()

    def wait(self) -> Outcome | None:
        self.ended.wait()
        return self.result

    def cancel(self) -> Outcome | None:
        self.request_cancel()
        return self.wait()

    def request_cancel(self) -> None:
        self.unwanted.set()


class ThreadCache:
    """A cache of threads: one for each container."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self.lock = threading.Lock()
        self.blocks: dict[Key, bytes] = {}
        self.threads: list[threading.Thread] = []
        self.copying = 0

    def store(self, keys: Sequence[Key], after: Any, label: str) -> ThreadTicket:
        ticket = ThreadTicket()
        thread = threading.Thread(target=self.live, args=(ticket, keys, after, label), daemon=True)
        self.threads.append(thread)
        thread.start()
        return ticket

    def live(self, ticket: ThreadTicket, keys: Sequence[Key], after: Any, label: str) -> None:
        try:
            ticket.result = self.stored(ticket, keys, after, label)
        except Exception as error:
            ticket.result = Outcome("FAILED", error=type(error).__name__)
        finally:
            ticket.ended.set()

    def stored(self, ticket: ThreadTicket, keys: Sequence[Key], after: Any, label: str) -> Outcome:
        world = self.world
        while after is not None and not after(0.005):
            if ticket.unwanted.is_set():
                return Outcome("CANCELLED")
        rejected = dict(world.policy(keys))
        keys = [key for key in keys if key not in rejected]
        world.hook("before_copy", label)
        if ticket.unwanted.is_set():
            return Outcome("CANCELLED")
        with self.lock:
            self.copying += 1
        try:
            world.reserve("host", keys)
            arrived = world.copy("host", keys, [world.payload(key) for key in keys])
        finally:
            with self.lock:
                self.copying -= 1
        with self.lock:
            self.blocks.update(zip(keys, arrived, strict=False))
        world.hook("stored", label)
        return Outcome("COMPLETE", tuple(keys), rejected)

    def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        with self.lock:
            return {key: self.blocks.get(key) for key in keys}

    def audit(self) -> Mapping[str, int]:
        return {"copying": self.copying}

    def found(self, tier: str) -> Sequence[Key]:
        with self.lock:
            return list(self.blocks) if tier == "host" else []

    def delete(self, tier: str, keys: Sequence[Key]) -> None:
        with self.lock:
            for key in keys:
                self.blocks.pop(key, None)

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


class StandingStill(ThreadCache):
    """Its first container reaches a hook, behind one of nobody's, while the thread of the harness stands still."""

    def store(self, keys: Sequence[Key], after: Any, label: str) -> ThreadTicket:
        goes_on = threading.Event()
        token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
        token.run_sync_soon(goes_on.wait, 10)
        threading.Thread(target=self.world.hook, args=("stored", [])).start()
        eventually(lambda: self.hooks == 1)
        threading.Thread(target=self.let_go, args=(goes_on,)).start()
        return super().store(keys, after, label)

    def stored(self, ticket: ThreadTicket, keys: Sequence[Key], after: Any, label: str) -> Outcome:
        self.world.hook("before_copy", label)
        return Outcome("CANCELLED") if ticket.unwanted.is_set() else super().stored(ticket, keys, after, label)

    def let_go(self, goes_on: threading.Event) -> None:
        eventually(lambda: self.hooks == 2)
        goes_on.set()

    @property
    def hooks(self) -> int:
        """Those that wait for the harness."""
        return len(self.world._bridge._waiting)


# --- what they are put through ----------------------------------------------------------------------------------------


def program(*steps: Step, faults: Sequence[Fault] = (), expect: Sequence[Expect] = (), **rest: Any) -> Scenario:
    rest.setdefault("limit_ms", 8_000)
    return Scenario(name="a test", step=list(steps), fault=list(faults), expect=list(expect), **rest)


def stores(label: str, at_ms: int = 0, **rest: Any) -> Step:
    return Step(at_ms=at_ms, store=StoreStep(id=label, **rest))


MUCH = program(
    stores("a{0..3}", per=2),
    stores("waits", per=2, after=[After(event="go")]),
    stores("unwanted", per=2, after=[After(do="never")]),
    Step(at_ms=400, fire="go"),
    Step(at_ms=800, load=LoadStep(keys="a0.0, a3.1, waits.0, unwanted.0")),
    Step(at_ms=900, delete=KeysStep(keys="a0.0")),
    tier={"host": TierSpec(latency_ms=2)},
    pipeline={"main": PipelineSpec(to="host", policies=[PolicySpec(do="reject", keys="a1.1", reason="dull")])},
    faults=[
        Fault(do="cancel", who="a2", at_hook="before_copy"),
        Fault(do="cancel", who="unwanted", at_ms=300),
        Fault(do="cancel_waiter", who="waits", at_ms=200),
    ],
    expect=[
        Expect(
            status={
                "a0": "COMPLETE",
                "a2": "CANCELLED",
                "a3": "COMPLETE",
                "waits": "COMPLETE",
                "unwanted": "CANCELLED",
            },
            count={"loaded": 3, "missed": 1, "copied": 7, "fired": 3},
            missing={"host": "a0.0, a1.1, a2.0"},
            order=["waits asked", "waits stored"],
        )
    ],
)


def test_a_cancel_at_a_hook_finds_its_container_although_the_harness_is_late():
    cancelled = program(
        stores("a", per=2),
        tier={"host": TierSpec()},
        faults=[Fault(do="cancel", who="a", at_hook="before_copy")],
        expect=[Expect(status={"a": "CANCELLED"}, missing={"host": "a.0, a.1"})],
    )
    report = play_real(cancelled, factory=from_threads(StandingStill))
    assert report.good, report.violations


@pytest.mark.parametrize(
    "factory",
    [from_sync(PlainCache), from_asyncio(asyncio_cache), from_asyncio(AsyncioCache), from_threads(ThreadCache)],
)
def test_a_right_cache_of_any_colour_passes_for_real(factory: Any) -> None:
    report = play_real(MUCH, factory=factory, pace=unhurried())
    assert report.good, report.violations
    assert "hook stored" in report.reached
    assert report.fired == {"cancel at before_copy": 1, "cancel": 1, "cancel_waiter": 1}


def test_a_plain_cache_passes_in_virtual_time_too_and_is_repeated_exactly() -> None:
    report = play(MUCH, factory=from_sync(PlainCache))
    assert report.good, report.violations
    assert play(MUCH, factory=from_sync(PlainCache)).trace == report.trace
    times = [one.at_ms for one in report.moments if one.kind == "tier" and one.name == "copied"]
    assert times[0] == 2  # the copy took the tier's virtual time


# --- broken ones, and what happens to them ---------------------------------------------------------------------------


class LosesCancels(AsyncioCache):
    """Whoever cancels is told at once that it is done. It is not."""

    async def store(self, keys: Sequence[Key], after: Any, label: str) -> AsyncioTicket:
        ticket = await super().store(keys, after, label)

        async def cancel() -> None:
            return None

        ticket.cancel = cancel  # type: ignore[assignment, method-assign]
        ticket.request_cancel = lambda: None  # type: ignore[method-assign]
        return ticket


class ShowsHalfABlock(ThreadCache):
    """A key can be found while its bytes are still on the way."""

    def stored(self, ticket: ThreadTicket, keys: Sequence[Key], after: Any, label: str) -> Outcome:
        with self.lock:
            for key in keys:
                self.blocks[key] = self.world.payload(key)[:8] + bytes(56)
        return super().stored(ticket, keys, after, label)


class KeepsRoom(PlainCache):
    """Room is not given back when the copy fails."""

    def store(self, keys: Sequence[Key], label: str) -> Outcome:
        self.room += 1
        outcome = super().store(keys, label)
        self.room -= 1
        return outcome


def rules(report: Any) -> set[str]:
    return {violation.rule for violation in report.violations}


def test_a_cancel_that_an_asyncio_cache_loses_is_seen() -> None:
    scenario = program(
        stores("a", after=[After(event="go")]),
        Step(at_ms=200, fire="go"),
        faults=[Fault(do="cancel", who="a", at_ms=60)],
    )
    report = play_real(scenario, factory=from_asyncio(LosesCancels))
    assert rules(report) == {"I3"}
    assert play_real(scenario, factory=from_asyncio(AsyncioCache)).good


def test_a_block_that_a_threaded_cache_shows_too_early_is_seen() -> None:
    scenario = program(
        stores("a", per=2),
        Step(at_ms=100, load=LoadStep(keys="a.0, a.1")),
        tier={"host": TierSpec(latency_ms=1)},
        faults=[Fault(do="stall", at_ms=0, for_ms=250)],
    )
    assert "bytes" in rules(play_real(scenario, factory=from_threads(ShowsHalfABlock)))
    assert play_real(scenario, factory=from_threads(ThreadCache)).good


@pytest.mark.parametrize("played", [play, play_real])
def test_room_that_a_plain_cache_keeps_is_seen(played: Callable[..., Any]) -> None:
    scenario = program(
        stores("a", per=2), faults=[Fault(do="fail", at_ms=0, for_ms=50)], tier={"host": TierSpec(latency_ms=5)}
    )
    assert rules(played(scenario, factory=from_sync(KeepsRoom))) == {"I1"}
    report = played(scenario, factory=from_sync(PlainCache))
    assert report.good, report.violations
    assert report.outcomes["a"].status == "FAILED"


@pytest.mark.parametrize("factory", [from_asyncio(AsyncioCache), from_threads(ThreadCache)])
def test_a_system_that_does_not_follow_virtual_time_says_what_to_do(factory: Any) -> None:
    with pytest.raises(NeedsRealTime, match="--real"):
        play(MUCH, factory=factory)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [(from_asyncio(AsyncioCache), "file"), (from_threads(ThreadCache), "file"), (from_sync(PlainCache), "memory")],
)
def test_faults_of_copies_reach_a_cache_of_any_colour(factory: Any, kind: Any) -> None:
    """At hooks, since a busy machine may begin a copy long after its time has come."""
    scenario = program(
        stores("fails", per=2),
        stores("slow", per=2),
        stores("whole", per=2),
        tier={"host": TierSpec(kind=kind, latency_ms=1)},
        faults=[
            Fault(do="fail", at_hook="before_copy", of="fails", for_ms=5_000),
            Fault(do="stall", at_hook="before_copy", of="slow", for_ms=500),
        ],
        expect=[
            Expect(
                status={"fails": "FAILED", "slow": "COMPLETE", "whole": "COMPLETE"},
                count={"fired": 2},
                time=[Window(event="slow ended", since="slow before_copy", at_least_ms=499)],
            )
        ],
    )
    report = play_real(scenario, factory=factory)
    assert report.good, report.violations


@pytest.mark.parametrize("factory", [from_asyncio(AsyncioCache), from_asyncio(asyncio_cache)])
def test_an_asyncio_cache_is_cancelled_with_the_scope_around_it(factory: Any) -> None:
    scenario = program(
        stores("a", after=[After(do="never")]), faults=[Fault(do="cancel_host", at_ms=50)], limit_ms=5_000
    )
    report = play_real(scenario, factory=factory)
    assert report.good, report.violations
    assert report.fired == {"cancel_host": 1}
    assert report.outcomes["a"].status == "CANCELLED"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offload-scenario")]


def test_a_shutdown_reaches_the_cache_in_its_own_thread() -> None:
    seen: list[str] = []

    class Told(AsyncioCache):
        def close_now(self) -> None:
            seen.append(threading.current_thread().name)
            super().close_now()

    scenario = program(
        stores("a", after=[After(do="never")]), Step(at_ms=50, close=CloseStep()), stores("b", at_ms=100)
    )
    report = play_real(scenario, factory=from_asyncio(Told))
    assert report.good, report.violations
    assert seen == ["offload-scenario-asyncio"]
    assert {"state CANCELLED", "state REFUSED"} <= report.reached


def test_a_cache_that_hangs_is_given_up_and_named() -> None:
    class Hangs(ThreadCache):
        def stored(self, ticket: ThreadTicket, keys: Sequence[Key], after: Any, label: str) -> Outcome:
            ticket.unwanted.wait(1)
            return Outcome("CANCELLED")

    @contextmanager
    def open_hanging(world: ThreadWorld) -> Any:
        cache = Hangs(world)
        yield cache
        cache.close()

    report = play_real(program(stores("a"), limit_ms=200), factory=from_threads(open_hanging))
    assert "hang" in rules(report)
    assert "a was taken" in report.violations[0].text


def test_what_a_cache_raises_is_a_violation_and_ends_the_run() -> None:
    class Raises(AsyncioCache):
        async def store(self, keys: Sequence[Key], after: Any, label: str) -> AsyncioTicket:
            raise LookupError("no such block")

    def cannot_be_opened(world: Any) -> Any:
        raise LookupError("no memory")

    report = play_real(program(stores("a")), factory=from_asyncio(Raises))
    assert rules(report) == {"crash"}
    assert "no such block" in report.violations[0].text
    for factory in (from_asyncio(cannot_be_opened), from_threads(cannot_be_opened), from_sync(cannot_be_opened)):
        report = play_real(program(stores("a")), factory=factory)
        assert "crash" in rules(report)
        assert any("no memory" in violation.text for violation in report.violations)


def test_a_plain_cache_is_asked_one_call_at_a_time() -> None:
    class Counted(PlainCache):
        inside = most = 0

        def store(self, keys: Sequence[Key], label: str) -> Outcome:
            Counted.inside += 1
            Counted.most = max(Counted.most, Counted.inside)
            try:
                return super().store(keys, label)
            finally:
                Counted.inside -= 1

    scenario = program(stores("a{0..9}", per=1), tier={"host": TierSpec(latency_ms=3)})
    report = play(scenario, factory=from_sync(Counted))
    assert report.good, report.violations
    assert Counted.most == 1
    ends = [one.at_ms for one in report.moments if one.kind == "end"]
    assert ends == [3 * (i + 1) for i in range(10)]
    assert len(expand("a{0..9}")) == len(ends)
