"""What an engine can do, from a thread that knows no trio: configurations, tenants, promotion, retries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import pytest

from backends.abc import Key
from backends.testing import FakeTier
from offload import NO_WAIT, DrainUnproven, EngineConfig, PipelineClosed, PipelineConfig, Route, Status, from_thread
from offload.from_thread._calls import CallFuture
from offload.from_thread._worker import EngineWorker
from tests.support.engine_places import SIZE, keys_of, payloads, room

KEYS = keys_of(6)


class Ward(FakeTier):
    """A tier that is told whose blocks it is given."""

    capabilities = attrs.evolve(FakeTier.capabilities, needs_tenants=True)

    def __init__(self) -> None:
        super().__init__(64, SIZE)
        self.tenants: list[str] = []
        self.open = 0

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        self.tenants.append(tenant)
        self.open += 1

        def end() -> None:
            self.open -= 1

        return end


def source_with(keys: Sequence[Key]) -> FakeTier:
    source = FakeTier(64, SIZE)
    source.fill(keys)
    return source


def test_an_engine_from_a_config_stores_loads_and_promotes() -> None:
    source, upper, lower = source_with(KEYS), FakeTier(64, SIZE), FakeTier(64, SIZE)
    config = EngineConfig(tiers={"upper": upper, "lower": lower}, promote=True, on_load_failure="retry")
    with from_thread.open_engine(source, config) as engine:
        assert engine.store(source.weak(KEYS), precondition=NO_WAIT).result(30).status is Status.COMPLETE
        engine.drain()
        upper.pool.delete(KEYS[2:])  # nothing is under way that could see it
        upper.damage(KEYS[0])
        for promote in (False, None):
            buffers, destination = room(6)
            with engine.lookup(KEYS) as hit:
                assert engine.load(hit, destination, promote=promote).loaded == 6
            assert buffers == payloads(KEYS)
        engine.drain()
        statistics = engine.statistics().engine
        assert (statistics.recovered_blocks, statistics.promoted_blocks) == (1, 5)
        assert list(statistics.health) == ["upper", "lower"]


def test_a_config_may_bring_the_source_itself_but_not_its_name() -> None:
    source, tier = source_with(KEYS), FakeTier(64, SIZE)
    with from_thread.open_engine(EngineConfig(source=source, tiers={"a": tier})) as engine:
        assert engine.store(source.weak(KEYS), precondition=NO_WAIT).result(30).status is Status.COMPLETE
    named = EngineConfig(source="memory", block_bytes=SIZE, tiers={"a": tier})
    with pytest.raises(TypeError, match="source = 'memory': must be the source object"):
        from_thread.open_engine(named)
    with pytest.raises(TypeError, match="replaces all arguments but the instruments"):
        from_thread.open_engine(source, EngineConfig(tiers={"a": tier}), promote=True)


def test_the_way_in_bounds_what_is_let_in() -> None:
    source, tier = source_with(KEYS), FakeTier(64, SIZE)
    narrow = PipelineConfig(budget_blocks=64)
    with from_thread.open_engine(source, {"a": tier}, routes=[Route("a", pipeline=narrow)]) as engine:
        assert engine.statistics().budget_blocks == 64
    assert EngineConfig(tiers={"a": tier}, pipeline=narrow).first_pipeline is narrow


def test_a_tenant_is_told_with_a_store_and_with_a_lookup() -> None:
    source, ward = source_with(KEYS), Ward()
    with from_thread.open_engine(source, [ward]) as engine:
        future = engine.store(source.weak(KEYS), precondition=NO_WAIT, tenant="s")
        assert future.result(30).status is Status.COMPLETE and future.tenant == "s"
        with engine.lookup(KEYS, tenant="l") as hit:
            assert engine.call(lambda: ward.open) == 1 and len(hit) == 6
        engine.delete([])  # behind the release
        assert engine.call(lambda: ward.open) == 0
    assert ward.tenants == ["s", "l"]


# --- a close that ran out of time, and the thread that goes on ----------------------------------------------------


def thread_of() -> EngineWorker:
    manager: Any = None  # it is never started
    return EngineWorker(source_with(KEYS), manager, budget_blocks=8, drops=False, timeout=1.0, close_timeout=1.0)


def asked(thread: EngineWorker, function: Callable[[], Awaitable[str]], disposed: list[str]) -> CallFuture[str]:
    call = CallFuture(thread, function, thread.deadline(None), dispose=disposed.append)
    call.begin()
    thread._pending_calls[call] = None
    return call


async def test_an_answer_behind_a_close_that_ran_out_of_time_is_let_go_of() -> None:
    """It was a hit that stayed pinned, handed to a thread that had been told of an error."""
    thread, disposed, error = thread_of(), list[str](), DrainUnproven("not ended")

    async def late() -> str:
        thread._settle_all(error)  # the other thread
        return "a hit"

    call = asked(thread, late, disposed)
    await thread._answer(call)
    assert disposed == ["a hit"]
    with pytest.raises(PipelineClosed):
        call.result(0)


async def test_a_close_that_ran_out_of_time_and_an_answer_at_once_answer_once() -> None:
    """The call was looked for, was taken out by the other thread, and its second removal ended the engine."""
    thread, disposed = thread_of(), list[str]()

    class Contested(dict[Any, None]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            thread._settle_all(DrainUnproven("not ended"))
            return found

    thread._pending_calls = Contested()

    async def answer() -> str:
        return "a hit"

    call = asked(thread, answer, disposed)
    await thread._answer(call)
    assert call.done()
    assert (call._value, disposed) in (("a hit", []), (None, ["a hit"]))


def test_what_another_thread_empties_meanwhile_is_empty() -> None:
    class Emptied(dict[Any, Any]):
        def __bool__(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1

    thread = thread_of()
    thread._futures, thread._pending_calls = Emptied(), Emptied()
    thread._settle_all(DrainUnproven("not ended"))
