"""An engine opens without a tier that is not there, goes on with it as a broken one, and enters it when that can be."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import LOADED, BlockSizeError, Deletion
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import FakeTier
from backends.wrappers import AesGcm
from maru import MaruHandler, NoAnswer, ServerRefused
from maru.eviction import LRU
from maru.testing import open_test_server
from offload import (
    NO_WAIT,
    BatchConfig,
    BreakerConfig,
    ConfigError,
    Engine,
    EngineConfig,
    HealthState,
    PipelineConfig,
    Route,
    Status,
    TierNotEntered,
    TierUnavailable,
    from_thread,
    with_breaker,
)
from offload._engine.late_tiers import PlaceholderTier
from tests.support import determinism
from tests.support.engine_places import SIZE, cancelled_at_checkpoint, keys_of, payloads, room
from tests.support.maru_actors import be_patient

BREAKER = BreakerConfig(first_wait=1.0, longest_wait=8.0, enter_timeout=5.0)
DOWN = ConnectionError("nobody listens")


class Late(FakeTier):
    """A tier whose first ``fails`` attempts to be entered raise, hang, or both."""

    def __init__(self, fails: int = 0, error: BaseException = DOWN, *, hangs: bool = False, **options: Any) -> None:
        super().__init__(options.pop("capacity", 64), options.pop("size", SIZE), **options)
        self.fails = fails
        self.error = error
        self.hangs = hangs
        self.tries: list[float] = []
        self.in_flight = 0
        self.news: list[str] = []
        """What happened to it, in order."""
        self.task: Any = None

    async def __aenter__(self) -> Late:
        assert not self.in_flight, "two at a time"
        self.tries.append(trio.current_time())
        self.in_flight += 1
        try:
            await trio.lowlevel.checkpoint()
            if len(self.tries) <= self.fails:
                if self.hangs:
                    await trio.sleep_forever()
                raise self.error
        except trio.Cancelled:
            self.news.append("cut off")
            raise
        finally:
            self.in_flight -= 1
        self.task = trio.lowlevel.current_task()
        self.news.append("entered")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert trio.lowlevel.current_task() is self.task
        self.news.append("left")
        await trio.lowlevel.checkpoint()


class Crashing(Late):
    """One with a task of its own, which ends when it is told to."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(fails)
        self.crash = trio.Event()
        self.dies_of: Exception = OSError("the line is cut")

    async def _work(self) -> None:
        await self.crash.wait()
        self.crash = trio.Event()
        raise self.dies_of

    async def __aenter__(self) -> Crashing:
        await super().__aenter__()
        self._life = trio.open_nursery()
        nursery = await self._life.__aenter__()
        self._nursery = nursery
        nursery.start_soon(self._work)
        return self

    async def __aexit__(self, *exc: Any) -> Any:
        assert trio.lowlevel.current_task() is self.task
        self.news.append("left")
        self._nursery.cancel_scope.cancel()
        return await self._life.__aexit__(*exc)


def filled(n: int = 24) -> tuple[FakeTier, list[bytes]]:
    source, keys = FakeTier(64, SIZE), keys_of(n)
    source.fill(keys)
    return source, keys


def opened(source: Any, tiers: dict[str, Any], **options: Any) -> Any:
    return offload.open_engine(source, tiers, **{"breaker": BREAKER, "on_enter_failure": "miss", **options})


async def stored(engine: Engine, keys: list[bytes], **options: Any) -> Any:
    handle = await engine.store(engine.source.weak(keys), precondition=NO_WAIT, **options)  # type: ignore[attr-defined]
    return await handle.wait()


async def routed(engine: Engine, keys: list[bytes], **options: Any) -> Any:
    """Store, and wait for the routes: the result of the store, and theirs."""
    handle = await engine.store(engine.source.weak(keys), precondition=NO_WAIT, **options)  # type: ignore[attr-defined]
    return await handle.wait(), await handle.wait_routes()


async def look(engine: Engine, keys: list[bytes]) -> tuple[list[tuple[str, int]], list[str], float]:
    """Where they are found and loaded from, who is left out, and how long it took."""
    before = trio.current_time()
    async with await engine.lookup(keys) as hit:
        buffers, destination = room(len(hit))
        assert (await engine.load(hit, destination)).loaded == len(hit)
        assert buffers == payloads(keys[: len(hit)])
        return hit.runs, list(hit.unavailable), trio.current_time() - before


# --- not there --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "unnamed", "default"])
async def test_by_default_the_engine_does_not_open_and_says_who_why_and_what_would_help(how: str) -> None:
    late, good, source = Late(99), Late(), FakeTier(64, SIZE)
    said: dict[str, Any] = {"fail": "fail", "unnamed": {"good": "miss"}}.get(how)  # type: ignore[assignment]
    options: dict[str, Any] = {} if said is None else {"on_enter_failure": said}
    with pytest.raises(TierNotEntered, match="late could not be entered: ConnectionError: nobody listens") as raised:
        async with offload.open_engine(source, {"good": good, "late": late}, **options):
            raise AssertionError("it opened")
    assert "on_enter_failure = 'miss'" in str(raised.value) and raised.value.__cause__ is DOWN
    assert raised.value.tier == "late" and isinstance(raised.value, OSError)
    assert good.news == ["entered", "left"]


async def test_a_tier_that_is_not_there_is_broken_and_takes_part_once_it_is(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    late, good, (source, keys) = Late(2), FakeTier(64, SIZE), filled()
    caplog.set_level(logging.INFO, "offload.health")
    async with opened(source, {"good": good, "late": late}) as engine:
        health = engine.statistics().health
        assert (health["good"].state, health["good"].entered) == (HealthState.CLOSED, True)
        assert (health["late"].state, health["late"].entered, health["late"].next_probe) == (HealthState.OPEN, False, 1)
        assert health["late"].cause == "it could not be entered: ConnectionError: nobody listens"
        assert engine.statistics().tiers["late"].capacity_bytes == 0
        assert "late counts as broken: it could not be entered: ConnectionError: nobody listens" in caplog.text

        result, routes = await routed(engine, keys[:4])
        assert result.completed == tuple(keys[:4]) and routes["late"].status is Status.FAILED
        assert isinstance(routes["late"].failed[keys[0]], TierUnavailable)
        assert await look(engine, keys[:4]) == ([("good", 4)], [], 0.0)
        async with await engine.lookup(keys[:5]) as hit:
            assert isinstance(hit.unavailable["late"], TierUnavailable) and "nobody listens" in str(
                hit.unavailable["late"]
            )
        assert "late" in str(await engine.explain(keys[5]))
        assert await engine.delete(keys[:1]) == [Deletion.UNAVAILABLE]
        assert late.tries == [0.0]

        await trio.sleep(3.5)
        assert late.tries == [0.0, 1.0, 3.0]
        health = engine.statistics().health
        assert (health["late"].state, health["late"].entered, health["late"].since) == (HealthState.CLOSED, True, 3.0)
        assert health["late"].faults == 0 and engine.statistics().tiers["late"].capacity_bytes == 64 * SIZE
        assert "late was entered, and is healthy" in caplog.text
        assert (await routed(engine, keys[4:8]))[1]["late"].status is Status.COMPLETE
        await good.delete(keys)
        assert await look(engine, keys[4:8]) == ([("late", 4)], [], 0.0)
        assert await engine.delete(keys[4:8]) == [Deletion.DELETED] * 4
    assert late.news == ["entered", "left"]
    assert caplog.text.count("counts as broken") == 1


async def test_attempts_are_bounded_one_at_a_time_ever_rarer_and_nobody_waits_for_one(autojump_clock: object) -> None:
    late, good, (source, keys) = Late(5, hangs=True), FakeTier(64, SIZE), filled()
    async with opened(source, {"good": good, "late": late}) as engine:
        assert trio.current_time() == 5.0  # the first one is waited for
        assert "TierTooSlow: it was not there within 5 s" in engine.statistics().health["late"].cause
        for _ in range(80):
            assert (await look(engine, keys[:4]))[1:] == (["late"], 0.0)
            await trio.sleep(0.5)
    waits = [after - before - 5.0 for before, after in zip(late.tries, late.tries[1:], strict=False)]
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert late.news == ["cut off"] * 5


async def test_the_bound_of_an_attempt_is_none_of_its_stay(autojump_clock: object) -> None:
    late, (source, keys) = Late(1), filled()
    async with opened(source, {"late": late}) as engine:
        await trio.sleep(100)
        assert (await stored(engine, keys[:4])).status is Status.COMPLETE and late.news == ["entered"]


async def test_while_an_attempt_is_under_way_the_tier_is_half_open_and_nobody_else_probes_it(
    autojump_clock: object,
) -> None:
    late, (source, keys) = Late(2, hangs=True), filled()
    async with opened(source, {"late": late}) as engine:
        await trio.sleep(1.5)
        health = engine.statistics().health["late"]
        assert (health.state, health.entered, health.next_probe) == (HealthState.HALF_OPEN, False, None)
        for _ in range(3):
            assert (await look(engine, keys))[1:] == (["late"], 0.0)
            assert (await stored(engine, keys[:2])).status is Status.FAILED
        assert late.batches == [] and len(late.tries) == 2
        async with await engine.lookup(keys) as hit:
            assert "is being tried again" in str(hit.unavailable["late"])


async def test_only_the_tiers_that_are_named_may_be_late(autojump_clock: object) -> None:
    first, second = Late(1), Late()
    async with opened(FakeTier(64, SIZE), {"a": first, "b": second}, on_enter_failure={"a": "miss"}) as engine:
        assert second.task is trio.lowlevel.current_task() and not engine.statistics().health["a"].entered
        await trio.sleep(1.1)
        assert engine.statistics().health["a"].entered and first.task is not second.task


async def test_a_tier_with_a_guard_of_its_own_is_kept_by_that(autojump_clock: object) -> None:
    late, (source, keys) = Late(1), filled()
    guard = with_breaker(late, "mine", breaker=attrs.evolve(BREAKER, first_wait=3.0))
    async with opened(source, {"a": guard}) as engine:
        await trio.sleep(2.5)
        assert not guard.health.entered and guard.statistics().capacity_bytes == 0
        await trio.sleep(1)
        assert guard.health.entered and (await stored(engine, keys[:2])).status is Status.COMPLETE
    late.tries, late.fails = [], 1
    async with opened(source, {"a": guard}) as engine:  # nothing is left of the engine before
        assert not guard.health.entered


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = [ValueError("no such size"), TypeError("not so"), ImportError("no extra"), ServerRefused("not you")]
IDS = [type(mistake).__name__ for mistake in MISTAKES]


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
async def test_a_mistake_is_nobodys_absence(mistake: Exception) -> None:
    good = Late()
    with pytest.raises(type(mistake)) as raised:
        async with opened(FakeTier(64, SIZE), {"good": good, "late": Late(9, mistake)}):
            raise AssertionError("it opened")
    assert raised.value is mistake and good.news == ["entered", "left"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
async def test_a_mistake_that_shows_late_is_refused_for_good(
    mistake: Exception, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    late, (source, keys) = Late(9), filled()
    async with opened(source, {"late": late}) as engine:
        late.error = mistake
        await trio.sleep(100)
        assert late.tries == [0.0, 1.0]
        health = engine.statistics().health["late"]
        assert (health.state, health.entered, health.next_probe) == (HealthState.OPEN, False, float("inf"))
        assert str(mistake) in health.cause and "late is refused, and not tried again" in caplog.text
        async with await engine.lookup(keys) as hit:
            assert "it is not tried again" in str(hit.unavailable["late"])


async def test_a_group_of_absences_is_one_and_any_mistake_in_it_is_a_mistake(autojump_clock: object) -> None:
    group = ExceptionGroup("both", [DOWN, TimeoutError("late")])
    async with opened(FakeTier(64, SIZE), {"late": Late(1, ExceptionGroup("one", [DOWN]))}) as engine:
        assert "ConnectionError: nobody listens" in engine.statistics().health["late"].cause
    async with opened(FakeTier(64, SIZE), {"late": Late(1, group)}):
        pass
    with pytest.raises(ExceptionGroup):
        async with opened(FakeTier(64, SIZE), {"late": Late(1, ExceptionGroup("both", [DOWN, TypeError()]))}):
            raise AssertionError("it opened")


class Sized(Late):
    """One that tells how large its blocks are once it is entered, and becomes what it is told to."""

    becomes: Callable[[Sized], None]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.block_bytes = 0

    async def __aenter__(self) -> Late:
        await super().__aenter__()
        self.block_bytes = 128
        self.becomes(self)
        return self


@pytest.mark.parametrize("fails", [0, 2])
async def test_blocks_of_another_size_are_a_mistake_whenever_they_show(fails: int, autojump_clock: object) -> None:
    late = Sized(fails)
    late.becomes = lambda tier: None
    if not fails:
        with pytest.raises(BlockSizeError):
            async with opened(FakeTier(64, SIZE), {"late": late}):
                raise AssertionError("it opened")
    else:
        async with opened(FakeTier(64, SIZE), {"late": late}) as engine:
            await trio.sleep(50)
            health = engine.statistics().health["late"]
            assert "BlockSizeError" in health.cause and health.next_probe == float("inf") and len(late.tries) == 3
    assert late.news == ["entered", "left"]


async def test_a_tier_of_another_kind_than_before_is_refused(autojump_clock: object) -> None:
    class Turning(Late):
        async def __aenter__(self) -> Late:
            await super().__aenter__()
            self.capabilities = attrs.evolve(self.capabilities, needs_tenants=True)
            return self

    late = Turning(1)
    async with opened(FakeTier(64, SIZE), {"late": late}) as engine:
        await trio.sleep(5)
        assert "its kind changed when it was entered" in engine.statistics().health["late"].cause
    assert late.news == ["entered", "left"]


async def test_a_tier_that_does_not_say_what_it_is_cannot_be_late() -> None:
    class Bare(Late):
        @property
        def capabilities(self) -> Any:
            raise RuntimeError("not connected")

    with pytest.raises(ConfigError, match="is unknown before it is entered") as raised:
        async with opened(FakeTier(64, SIZE), {"late": Bare()}):
            raise AssertionError("it opened")
    assert "on_enter_failure.late" in str(raised.value)


# --- taking part ------------------------------------------------------------------------------------------------------


async def test_a_late_tier_in_the_middle_is_fed_feeds_and_is_promoted_into(autojump_clock: object) -> None:
    late, last, (source, keys) = Late(1), FakeTier(64, SIZE), filled()
    last.fill(keys[8:12])
    tiers = {"a": FakeTier(64, SIZE), "late": late, "last": last}
    async with opened(source, tiers, promote="late") as engine:
        assert (await routed(engine, keys[:4]))[1]["late"].status is Status.FAILED
        await look(engine, keys[8:10])
        await engine.drain()
        assert engine.statistics().promotions_refused == {"unavailable": 2} and len(late) == 0
        await trio.sleep(1)
        assert (await routed(engine, keys[4:8]))[1]["late"].status is Status.COMPLETE
        await look(engine, keys[8:12])
        await engine.drain()
        assert late.contains_nowait(keys) == set(keys[4:12]) and last.contains_nowait(keys) == set(keys[4:12])
        assert engine.statistics().promoted_blocks == 4


@pytest.mark.parametrize("late_one", ["upper", "lower"])
async def test_a_late_tier_spills_and_is_spilled_into(late_one: str, autojump_clock: object) -> None:
    source, keys = filled()
    knobs = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))
    late = Late(1, capacity=4 if late_one == "upper" else 64, eviction=LRU())
    other = FakeTier(64 if late_one == "upper" else 4, SIZE, eviction=LRU())
    tiers = {"upper": late, "lower": other} if late_one == "upper" else {"upper": other, "lower": late}
    async with opened(source, tiers, chain="on_evict", config=knobs) as engine:
        for key in keys[:8]:
            await stored(engine, [key])
        spills = engine.statistics().spills["lower"]
        if late_one == "lower":
            assert dict(spills.dropped) == {"unavailable": 4}
            assert "not copied to lower: unavailable" in str(await engine.explain(keys[0]))
        await trio.sleep(1)
        for key in keys[8:20]:
            await stored(engine, [key])
        assert engine.statistics().spills["lower"].spilled == (8 if late_one == "upper" else 12)
        assert (await look(engine, keys[8:20]))[0] == [("lower", 8), ("upper", 4)]


# --- ending by itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [0, 1])
async def test_a_tier_with_a_nursery_is_entered_and_left_in_one_task_and_a_crash_is_no_error_of_the_engine(
    fails: int, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    late, (source, keys) = Crashing(fails), filled()
    async with opened(source, {"late": late}) as engine:
        await trio.sleep(2)
        assert (await stored(engine, keys[:4])).status is Status.COMPLETE
        late.crash.set()
        await trio.testing.wait_all_tasks_blocked()
        health = engine.statistics().health["late"]
        assert (health.state, health.entered) == (HealthState.OPEN, False)
        assert "it has ended: OSError: the line is cut" in health.cause and "late counts as broken" in caplog.text
        assert (await look(engine, keys[:4]))[1] == ["late"]
        await trio.sleep(2)
        assert engine.statistics().health["late"].entered and (await look(engine, keys[:4]))[0] == [("late", 4)]
    assert late.news == ["entered", "left"] * 2


async def test_who_waits_for_room_in_a_tier_that_ends_is_told(autojump_clock: object) -> None:
    late, (source, keys) = Crashing(), filled()
    async with opened(source, {"late": late}) as engine:
        late.faults.room = trio.Event()
        handle = await engine.store(source.weak(keys[:4]), precondition=NO_WAIT)
        await trio.sleep(0.1)
        late.crash.set()
        with trio.fail_after(1):
            assert isinstance((await handle.wait()).failed[keys[0]], TierUnavailable)


async def test_what_goes_wrong_while_it_is_left_is_raised_as_it_is() -> None:
    class Sticky(Late):
        async def __aexit__(self, *exc: object) -> None:
            await trio.lowlevel.checkpoint()
            raise OSError("it does not let go")

    with pytest.raises(OSError, match="it does not let go"):
        async with opened(FakeTier(64, SIZE), {"late": Sticky()}):
            pass
    with pytest.raises(OSError, match="it does not let go") as raised:
        async with opened(FakeTier(64, SIZE), {"late": Sticky()}):
            raise KeyError("mine")
    assert isinstance(raised.value.__context__, KeyError)


async def test_an_error_of_the_body_leaves_as_it_came(autojump_clock: object) -> None:
    for late in (Late(), Late(9)):
        with pytest.raises(KeyError, match="mine"):
            async with opened(FakeTier(64, SIZE), {"late": late}):
                raise KeyError("mine")


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [False, True])
async def test_late_tiers_are_left_when_their_pipelines_are_closed_the_last_one_first(
    cancelled: bool, autojump_clock: object
) -> None:
    (source, keys), order = filled(), list[str]()

    class Named(Late):
        name = ""

        async def __aexit__(self, *exc: object) -> None:
            order.append(f"left {self.name}")
            await super().__aexit__(*exc)

        async def write(self, *args: Any) -> Any:
            await trio.sleep(1)
            order.append(f"written {self.name}")
            return await super().write(*args)

    tiers = {name: Named(fails) for name, fails in (("a", 0), ("b", 1), ("c", 0))}
    for name, tier in tiers.items():
        tier.name = name
    with trio.CancelScope() as scope:
        hasty = PipelineConfig(batch_config=BatchConfig(flush_interval=0.0))
        async with opened(source, tiers, chain=False, config=hasty) as engine:
            await trio.sleep(2)
            await engine.store(source.weak(keys[:2]), precondition=NO_WAIT)
            await trio.testing.wait_all_tasks_blocked()
            if cancelled:
                scope.cancel()
    assert order == ["written a", "left c", "left b", "left a"]


@pytest.mark.parametrize("when", [0.0, 0.5, 1.5], ids=["the first attempt", "between two", "another attempt"])
async def test_the_end_waits_for_no_attempt(when: float, autojump_clock: object) -> None:
    late = Late(9, hangs=when != 0.5)
    with trio.move_on_after(1 if when == 0.0 else 100):
        async with opened(FakeTier(64, SIZE), {"late": late}):
            began = trio.current_time()
            await trio.sleep(when)
    assert trio.current_time() == (1.0 if when == 0.0 else began + when)
    assert late.in_flight == 0


async def test_a_tier_that_is_slow_to_be_left_is_cut_off_when_the_end_is_cancelled(autojump_clock: object) -> None:
    class Slow(Late):
        async def __aexit__(self, *exc: object) -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.news.append("cut off")

    late = Slow()
    with trio.move_on_after(2) as scope:
        async with opened(FakeTier(64, SIZE), {"late": late}):
            pass
    assert scope.cancelled_caught and trio.current_time() == 2.0 and late.news == ["entered", "cut off"]


@pytest.mark.parametrize("kind", [Late, Crashing])
@pytest.mark.parametrize("fails", [0, 1, 9])
async def test_cancelled_at_any_await_every_tier_that_was_entered_is_left(
    kind: type[Late], fails: int, autojump_clock: object
) -> None:
    caught, nth = 0, 0
    while True:
        late, good, (source, keys) = kind(fails), Late(), filled(4)

        async def body() -> None:
            async with opened(source, {"good": good, "late": late}) as engine:  # noqa: B023
                await trio.sleep(1.5)
                await stored(engine, keys)  # noqa: B023

        with trio.fail_after(60):
            was = await cancelled_at_checkpoint(nth, body)
        caught += was
        for tier in (late, good):
            assert tier.news.count("entered") == tier.news.count("left") and not tier.in_flight, nth
        nth += 1
        if not was and nth > 40:
            break
    assert caught > 10


async def never_an_error(seed: int) -> dict[str, int]:
    """Tiers that are late, hang and end, in any order: what is found is right, and nothing of the engine raises."""
    chance, (source, keys) = random.Random(seed), filled(16)
    tiers: dict[str, Any] = {name: Crashing(chance.choice([0, 1, 3])) for name in ("a", "b")}
    for tier in tiers.values():
        tier.hangs = chance.random() < 0.3
    tiers["c"] = FakeTier(64, SIZE)
    options = {"promote": chance.random() < 0.5, "on_load_failure": chance.choice(["miss", "retry"])}
    crashes = 0
    async with opened(source, tiers, **options) as engine:

        async def stores() -> None:
            for _ in range(15):
                handle = await engine.store(source.weak(chance.sample(keys, 3)), precondition=NO_WAIT)
                await trio.sleep(chance.choice([0.0, 0.3, 1.0]))
                if chance.random() < 0.2:
                    await handle.cancel()
                else:
                    await handle.wait()

        async def reads() -> None:
            for _ in range(20):
                wanted = chance.sample(keys, 3)
                async with await engine.lookup(wanted) as hit:
                    await trio.sleep(chance.choice([0.0, 0.5]))
                    buffers, destination = room(len(hit))
                    loaded = (await engine.load(hit, destination)).loaded
                    assert buffers[:loaded] == payloads(wanted[:loaded]), seed
                if chance.random() < 0.2:
                    await engine.delete(wanted[:1])

        async def ends() -> None:
            nonlocal crashes
            for _ in range(4):
                await trio.sleep(chance.choice([0.5, 2.0, 4.0]))
                crashed = chance.choice([tiers["a"], tiers["b"]])
                crashed.fails = len(crashed.tries) + chance.choice([0, 1])
                crashed.crash.set()
                crashes += crashed.news[-1:] == ["entered"]

        async with trio.open_nursery() as nursery:
            for task in (stores, stores, reads, reads, ends):
                nursery.start_soon(task)
        await trio.sleep(30)
        assert all(health.entered for health in engine.statistics().health.values()), (seed, engine.statistics().health)
        assert (await stored(engine, keys)).status is Status.COMPLETE
        await engine.drain()
        for tier in tiers.values():
            statistics = tier.statistics()
            assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0), seed
    for name in ("a", "b"):
        assert tiers[name].news.count("entered") == tiers[name].news.count("left"), seed
    return {"crashes": crashes, "tries": len(tiers["a"].tries) + len(tiers["b"].tries)}


def test_tiers_that_come_and_go_are_never_an_error_of_the_engine() -> None:
    seen = {"crashes": 0, "tries": 0}
    for seed in range(8):
        for what, n in determinism.run(never_an_error, seed, seed=seed).items():
            seen[what] += n
    assert seen["crashes"] > 8 and seen["tries"] > 30, seen


# --- not even made ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def unmounted(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Engine, Path]]:
    """An engine over memory and a directory of files that cannot be made, as something else is in its way."""
    path = tmp_path / "disk"
    path.write_text("not mounted")
    config = EngineConfig(
        tiers={
            "host": {"type": "memory", "capacity_bytes": 4 * SIZE, "eviction": LRU()},
            "disk": {"type": "file", "directory": str(path), "capacity_bytes": 64 * SIZE, **options.pop("disk", {})},
        },
        on_enter_failure={"disk": "miss"},
        breaker=BreakerConfig(first_wait=0.02, longest_wait=0.05, enter_timeout=options.pop("enter_timeout", 30.0)),
        pipeline=PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0)),
        **options,
    )
    source = MemoryTier(64 * SIZE, SIZE)
    for key, payload in zip(keys_of(24), payloads(keys_of(24)), strict=True):
        source.put(key, payload)
    async with offload.open_engine(source, config) as engine:
        yield engine, path


async def until_entered(engine: Engine, name: str) -> None:
    with trio.fail_after(60):
        while not engine.statistics().health[name].entered:  # noqa: ASYNC110 - a file appears, or a server
            await trio.sleep(0.005)


@pytest.mark.parametrize("chain", ["on_store", "on_evict"])
async def test_a_file_tier_whose_disk_is_not_mounted_is_made_when_it_is(chain: str, tmp_path: Path) -> None:
    keys = keys_of(24)
    async with unmounted(tmp_path, chain=chain) as (engine, path):
        assert "StrayPath" in engine.statistics().health["disk"].cause
        for key in keys[:6]:
            await routed(engine, [key])
        assert (await look(engine, keys[2:6]))[:2] == ([("host", 4)], [])
        assert isinstance(engine.tiers["disk"], PlaceholderTier) and engine.tiers["disk"].made is None
        path.unlink()
        await until_entered(engine, "disk")
        for key in keys[6:18]:
            await routed(engine, [key])
        assert (await look(engine, keys[6:18]))[0] == [("disk", 8), ("host", 4)]
        made = engine.tiers["disk"].made
        assert isinstance(made, FileTier) and engine.statistics().tiers["disk"].blocks == len(made) >= 8
        assert await engine.delete(keys[6:7]) == [Deletion.DELETED]
    FileTier(path, 64 * SIZE).close()  # nobody has the directory any more


@pytest.mark.parametrize("chain", ["on_store", "on_evict"])
async def test_a_tier_that_encrypts_is_told_whose_its_blocks_are_also_of_those_that_were_on_their_way(
    chain: str, tmp_path: Path
) -> None:
    keys, secrets = keys_of(24), {"ann": bytes(32), "bob": bytes(16)}
    disk = {"wrappers": [AesGcm(secrets)]}
    async with unmounted(tmp_path, chain=chain, disk=disk) as (engine, path):
        source: Any = engine.source
        await stored(engine, keys[:6], tenant="ann")
        ready = trio.Event()
        early = await engine.store(source.weak(keys[6:10]), precondition=ready, tenant="ann")
        path.unlink()
        await until_entered(engine, "disk")
        ready.set()
        await early.wait()
        await stored(engine, keys[10:14], tenant="bob")
        await engine.drain()  # a store waits for no route to the disk
        late: Any = engine.tiers["disk"]
        for key in keys[6:10]:
            for tenant in ("ann", "bob"):
                buffers = [bytearray(SIZE)]
                end = late.carry([key], tenant)
                async with await late.pin([key]) as lease:
                    outcomes = list(await late.load(lease, PagesDestination.over(buffers)))
                end()
                assert (outcomes == [LOADED]) == (tenant == "ann"), (key, tenant)
        assert not late.made._tags._claims and not late._tags


async def test_what_is_made_too_late_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Tardy(FileTier):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            began.set()
            assert go.wait(60)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr("backends.file.FileTier", Tardy)
    async with unmounted(tmp_path) as (engine, path):
        path.unlink()
        assert await trio.to_thread.run_sync(began.wait, 60)
        assert (await look(engine, keys_of(3)))[1] == ["disk"]  # nobody is held up
    assert not closed.is_set()
    go.set()
    assert await trio.to_thread.run_sync(closed.wait, 60)


@pytest.mark.parametrize("routes", [{}, {"routes": (Route("last", source="disk"),), "chain": False}])
async def test_nothing_leads_on_from_a_tier_that_could_not_be_made(routes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_text("not mounted")
    tiers = {"disk": {"type": "file", "directory": str(path)}, "last": FakeTier(64, SIZE)}
    with pytest.raises(
        ConfigError, match="disk could not be made, so it is unknown whether it can be read from"
    ) as told:
        async with opened(FakeTier(64, SIZE), tiers, **routes):
            raise AssertionError("it opened")
    for said in ("on_enter_failure.disk = 'miss'", "put it last, or set chain = 'none'", "StrayPath: ", str(path)):
        assert said in str(told.value)
    async with opened(FakeTier(64, SIZE), tiers, chain=False) as engine:
        assert len(engine.pipelines) == 1
    with pytest.raises(TierNotEntered, match="disk could not be entered: StrayPath"):
        async with offload.open_engine(FakeTier(64, SIZE), tiers, chain=False):
            raise AssertionError("it opened")


@pytest.mark.parametrize("said", ["fail", "miss"])
async def test_a_name_that_is_none_is_a_mistake(said: str) -> None:
    with pytest.raises(LookupError, match="no kind of tier is named"):
        async with opened(FakeTier(64, SIZE), {"late": "no such kind"}, on_enter_failure=said):
            raise AssertionError("it opened")


async def test_a_disk_that_hangs_has_one_thread_however_often_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, making = threading.Event(), list[int]()

    class Hanging(FileTier):
        def __init__(self, *args: Any, **more: Any) -> None:
            if making or not (tmp_path / "disk").is_file():
                making.append(1)
                assert go.wait(60)
            super().__init__(*args, **more)

    monkeypatch.setattr("backends.file.FileTier", Hanging)
    try:
        async with unmounted(tmp_path, enter_timeout=0.02) as (engine, path):
            path.unlink()
            with trio.fail_after(60):
                while engine.statistics().health["disk"].faults < 4:  # noqa: ASYNC110 - a thread hangs
                    await trio.sleep(0.005)
            assert len(making) == 1 and "TierTooSlow" in engine.statistics().health["disk"].cause
    finally:
        go.set()


def sealed(block_bytes: int, directory: str, *, fails: list[Exception]) -> Any:
    """A tier that encrypts, of a kind of its own."""
    from backends.wrappers import AesGcm, slot_bytes, wrap

    if fails:
        raise fails.pop()
    aes = AesGcm({"ann": bytes(32)})
    size = slot_bytes(block_bytes, aes)
    return wrap(MemoryTier(64 * size, size), aes, block_bytes=block_bytes)


async def test_a_tier_that_encrypts_must_say_so_before_it_is_made() -> None:
    fails: list[Exception] = [DOWN]
    tier = {"type": "tests.engine.test_entering:sealed", "directory": "x", "fails": fails}
    async with opened(FakeTier(64, SIZE), {"late": tier}, breaker=BreakerConfig(first_wait=0.01)) as engine:
        with trio.move_on_after(60):
            while engine.statistics().health["late"].next_probe != float("inf"):  # noqa: ASYNC110 - a thread makes it
                await trio.sleep(0.005)
        assert "needs tenants" in engine.statistics().health["late"].cause


# --- for real ---------------------------------------------------------------------------------------------------------


async def test_a_page_store_that_comes_up_after_the_engine(tmp_path: Path) -> None:
    url, keys = f"ipc://{tmp_path}/maru.sock", keys_of(12)
    source, host = MemoryTier(64 * 4096, 4096), MemoryTier(64 * 4096, 4096)
    for key in keys:
        source.put(key, key[:1] * 4096)
    tier = MaruTier(MaruHandler(server_url=url, chunk_size_bytes=4096, pool_size=2 << 20, timeout_ms=100))
    breaker = BreakerConfig(first_wait=0.02, longest_wait=0.1)
    async with offload.open_engine(
        source, {"host": host, "maru": tier}, on_enter_failure={"maru": "miss"}, breaker=breaker
    ) as engine:
        health = engine.statistics().health["maru"]
        assert not health.entered and "NoAnswer" in health.cause
        async with await engine.lookup(keys) as hit:
            assert len(hit) == 0 and list(hit.unavailable) == ["maru"]
        result, routes = await routed(engine, keys[:4])
        assert result.completed == tuple(keys[:4]) and routes["maru"].status is Status.FAILED
        async with open_test_server(host="", runtime_dir=str(tmp_path)) as server:
            be_patient(tier.handler)
            await until_entered(engine, "maru")
            assert (await routed(engine, keys[4:]))[1]["maru"].status is Status.COMPLETE
            await host.delete(keys)
            buffers = [bytearray(4096) for _ in keys[4:]]
            async with await engine.lookup(keys[4:]) as hit:
                assert hit.runs == [("maru", 8)] and not hit.unavailable
                assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == 8
            assert buffers == [key[:1] * 4096 for key in keys[4:]]
            assert url in server.endpoints
            assert engine.statistics().tiers["maru"].blocks == 8
            assert await engine.delete(keys[4:]) == [Deletion.DELETED] * 8


async def test_a_handler_that_was_opened_in_vain_may_be_opened_again(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/maru.sock"
    handler = MaruHandler(server_url=url, chunk_size_bytes=4096, pool_size=2 << 20, timeout_ms=50)
    regions, freed = list[int](), list[int]()
    handler.set_on_region_added(lambda region, pages: regions.append(pages))
    handler.on_pages_freed(lambda: freed.append(1))
    for _ in range(2):
        with pytest.raises(NoAnswer):
            async with handler:
                raise AssertionError("nobody is there")
        assert not handler.connected
    for nth in range(2):
        assert await cancelled_at_checkpoint(nth, handler.__aenter__)
    be_patient(handler)
    async with open_test_server(host="", runtime_dir=str(tmp_path)), handler:
        handle = await handler.alloc(4096)
        assert handler.connected and handle is not None and regions == [512]
        handler.free(handle)
        assert freed and handler.statistics().counters.unanswered >= 2
        with pytest.raises(RuntimeError, match="is already open"):
            await handler.__aenter__()


async def test_without_the_knob_a_page_store_that_is_down_says_what_would_help(tmp_path: Path) -> None:
    handler = MaruHandler(server_url=f"ipc://{tmp_path}/maru.sock", chunk_size_bytes=SIZE, timeout_ms=50)
    with pytest.raises(TierNotEntered, match="maru could not be entered: NoAnswer"):
        async with offload.open_engine(FakeTier(64, SIZE), [MaruTier(handler)]):
            raise AssertionError("it opened")


# --- said -------------------------------------------------------------------------------------------------------------

TOML = """
[engine]
[engine.tiers.host]
type = "memory"
[engine.tiers.far]
type = "memory"
"""


def test_it_is_said_for_all_tiers_or_for_some_in_a_file_or_the_environment() -> None:
    def read(text: str = TOML, **environ: str) -> list[bool]:
        config = EngineConfig.from_toml(
            text, environ={f"OFFLOAD_ENGINE__{name}": value for name, value in environ.items()}
        )
        return [config.opens_without(name) for name in ("host", "far")]

    assert read() == [False, False]
    assert read(TOML.replace("[engine]", '[engine]\non_enter_failure = "miss"')) == [True, True]
    assert read(TOML + '[engine.on_enter_failure]\nfar = "miss"\n') == [False, True]
    assert read(ON_ENTER_FAILURE="miss") == [True, True]
    assert read(ON_ENTER_FAILURE="host=miss, far=fail") == [True, False]
    assert read(TOML + '[engine.on_enter_failure]\nfar = "miss"\n', ON_ENTER_FAILURE="fail") == [False, False]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("wait", "on_enter_failure = 'wait': must be one of fail, miss"),
        ({"far": "wait"}, "on_enter_failure.far = 'wait'"),
        ({"nowhere": "miss"}, "on_enter_failure = 'nowhere': must be the name of a tier: a"),
        (None, "on_enter_failure = None"),
        (["a"], "on_enter_failure = "),
        ("a=", "on_enter_failure.a = ''"),
    ],
    ids=["word", "word of one", "name", "none", "list", "text"],
)
def test_what_cannot_be_said(said: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(tiers={"a": FakeTier()}, on_enter_failure=said)
    assert complaint in str(raised.value)


def test_an_engine_in_a_thread_takes_it_too() -> None:
    late = Late(99)
    with from_thread.open_engine(FakeTier(64, SIZE), {"late": late}, on_enter_failure="miss") as engine:
        assert not engine.statistics().engine.health["late"].entered
    with pytest.raises(TypeError, match="replaces all"):
        offload.open_engine(FakeTier(), EngineConfig(tiers={"a": FakeTier()}), on_enter_failure="miss")  # type: ignore[call-overload]
