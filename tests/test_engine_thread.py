"""What an engine can do, from a thread that knows no trio: configurations, tenants, promotion, retries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from engine_places import SIZE, keys_of, payloads, room

from backends.abc import Key
from backends.testing import FakeTier
from offload import NO_WAIT, EngineConfig, PipelineConfig, Route, Status, from_thread

KEYS = keys_of(6)


class Ward(FakeTier):
    """A tier that is told whose blocks it is given."""

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
    with pytest.raises(TypeError, match="source = 'memory': must be the place itself"):
        from_thread.open_engine(named)
    with pytest.raises(TypeError, match="says all but the instruments"):
        from_thread.open_engine(source, EngineConfig(tiers={"a": tier}), promote=True)


def test_the_way_in_bounds_what_is_let_in() -> None:
    source, tier = source_with(KEYS), FakeTier(64, SIZE)
    narrow = PipelineConfig(budget_blocks=64)
    with from_thread.open_engine(source, {"a": tier}, routes=[Route("a", pipeline=narrow)]) as engine:
        assert engine.statistics().budget_blocks == 64
    assert EngineConfig(tiers={"a": tier}, pipeline=narrow).way_in is narrow


def test_a_tenant_is_told_with_a_store_and_with_a_lookup() -> None:
    source, ward = source_with(KEYS), Ward()
    with from_thread.open_engine(source, [ward]) as engine:
        ticket = engine.store(source.weak(KEYS), precondition=NO_WAIT, tenant="s")
        assert ticket.result(30).status is Status.COMPLETE and ticket.tenant == "s"
        with engine.lookup(KEYS, tenant="l") as hit:
            assert engine.call(lambda: ward.open) == 1 and len(hit) == 6
        engine.delete([])  # behind the release
        assert engine.call(lambda: ward.open) == 0
    assert ward.tenants == ["s", "l"]
