"""The views of an engine: what they say of a snapshot, and how fast it goes."""

from __future__ import annotations

import msgspec
import pytest
import trio

from backends.testing import FakeTier
from offload import NO_WAIT, Engine, open_engine
from offload.instruments import StageTimes
from offload.status import EngineStatus, NoSuchKey, Rates, StatusView
from tests.support.engine_places import keys_of

SIZE = 64


async def look(engine: Engine, keys: list[bytes]) -> None:
    async with await engine.lookup(keys):
        pass


async def test_rates_are_those_since_the_view_before(autojump_clock: object) -> None:
    source, tier, times = FakeTier(64, SIZE), FakeTier(64, SIZE), StageTimes()
    keys = keys_of(8)
    source.fill(keys[:4])
    async with open_engine(source, [tier], instruments=[times]) as engine:
        status = EngineStatus(engine, times)
        assert status.view().rates == Rates()
        await (await engine.store(source.weak(keys[:4]), precondition=NO_WAIT)).wait()
        await look(engine, keys)
        await trio.sleep(2)
        rates = status.view().rates
        await trio.sleep(1)
        assert status.view().rates == Rates(seconds=1.0)
    assert (rates.lookups, rates.asked_blocks, rates.hit_blocks) == pytest.approx((0.5, 4, 2), rel=0.1)
    assert (rates.stored_blocks, rates.copied_bytes) == pytest.approx((2, 2 * SIZE), rel=0.1)


async def waiting_view(**waits: trio.Event) -> StatusView:
    """A view of an engine with one container that waits: for ``ready``, or for ``room`` at the tier."""
    source, tier, times = FakeTier(64, SIZE), FakeTier(64, SIZE), StageTimes()
    source.fill(keys_of(6))
    tier.faults.room = waits.get("room")
    tier.faults.gate = waits.get("gate")
    async with open_engine(source, {"host": tier}, instruments=[times]) as engine:
        await engine.store(source.weak(keys_of(6)), precondition=waits.get("ready", NO_WAIT))
        await trio.sleep(5)
        view = EngineStatus(engine, times).view()
        for event in waits.values():
            event.set()
    return view


@pytest.mark.parametrize(
    ("waits", "stage", "told"),
    [
        ("ready", "awaiting", "its precondition, TrioEvent(<trio.Event>)"),
        ("room", "transfer", "room in the tier"),
        ("gate", "transfer", "its copy"),
    ],
)
async def test_a_container_says_what_it_waits_for(waits: str, stage: str, told: str, autojump_clock: object) -> None:
    (one,) = (await waiting_view(**{waits: trio.Event()})).oldest
    assert (one.stage, one.waits_for, one.blocks) == (stage, told, 6)
    assert one.keys == [key.hex() for key in keys_of(4)]
    assert one.age == pytest.approx(5, rel=0.01)


async def test_a_view_is_json(autojump_clock: object) -> None:
    view = await waiting_view(ready=trio.Event())
    told = msgspec.json.decode(msgspec.json.encode(view))
    assert told["pipelines"][0]["stages"] == {"admission": 0, "awaiting": 1, "batching": 0, "transfer": 0, "chain": 0}
    assert told["tiers"][0]["state"] == "closed"


async def test_at_most_64_containers_are_told_whatever_is_inside(autojump_clock: object) -> None:
    source, tier, times = FakeTier(256, SIZE), FakeTier(256, SIZE), StageTimes()
    keys = keys_of(200)
    source.fill(keys)
    ready = trio.Event()
    async with open_engine(source, [tier], instruments=[times]) as engine:
        for key in keys:
            await engine.store(source.weak([key]), precondition=ready)
        await trio.sleep(1)
        view = EngineStatus(engine, times).view()
        ready.set()
    assert [one.number for one in view.oldest] == list(range(1, 65))
    assert view.pipelines[0].stages["awaiting"] == 200


@pytest.mark.parametrize("digits", ["", "  ", "abc", "zz", "0x12", "ab" * 5000])
async def test_what_is_no_key_is_refused(digits: str) -> None:
    async with open_engine(FakeTier(8, SIZE), [FakeTier(8, SIZE)]) as engine:
        with pytest.raises(NoSuchKey, match="hexadecimal"):
            await EngineStatus(engine, StageTimes()).explain(digits)


async def test_a_key_is_explained() -> None:
    async with open_engine(FakeTier(8, SIZE), [FakeTier(8, SIZE)]) as engine:
        told = await EngineStatus(engine, StageTimes()).explain(f" {b'key'.hex().upper()} ")
    assert told["cause"] == "unknown"
