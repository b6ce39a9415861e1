"""What is loaded is compared with what is no checksum; what is wrong is named, and not served until it is stored anew."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import torch
import trio

from backends import Unproven
from backends.abc import Destination, Key
from backends.base.forwarding import ForwardingDestination
from backends.base.pages import Pages
from backends.base.slots import PagesDestination
from backends.device import DeviceTier
from backends.memory import MemoryTier
from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    ConfigError,
    DrainUnproven,
    Engine,
    EngineConfig,
    LayoutCheckFailed,
    ShadowStatistics,
    block_key,
    from_thread,
    open_engine,
)
from offload.testing.reference_engine import PLANE_AXES, ModelConfig, Recomputation, ReferenceEngine
from tests.support.engine_places import SIZE, Places, cancelled_at_checkpoint, keys_of
from tests.support.kv_caches import KVCache, World
from tests.support.planted import shadow as P

PLANTED = [
    P.keys_are_loaded_as_values,
    P.heads_are_loaded_in_another_order,
    P.a_stale_page_is_served,
    P.another_requests_page_is_served,
]
LAYOUTS = PLANTED[:2]


# --- it finds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
async def test_a_planted_fault_is_found_within_200_loads(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load is of one of the last 20 prompts, so a page that is wrong is loaded some times before it is evicted."""
    world, rng = World(every=20, capacity=96), random.Random(1)
    async with world.open() as engine:
        prompts: list[list[Key]] = []
        for number in range(20):
            prompts.append(await world.store(engine, number))
        fault(monkeypatch)
        for loads in range(1, 201):
            prompts = [*prompts[1:], await world.store(engine, 100 + loads)]
            await world.load(engine, rng.choice(prompts))
            if world.seen.mismatches:
                break
        found = world.seen.mismatches
        assert found, f"not within {loads} loads"
        assert found[0].tier == "host"
        assert engine.statistics().shadow.mismatches == {found[0].found_by: len(found)}
        places = "planes are swapped" if fault in LAYOUTS else "planes are wrong"
        assert places in found[0].what


@pytest.mark.parametrize("loads", [400, pytest.param(10_000, marks=pytest.mark.long)])
async def test_clean_loads_raise_no_alarm(loads: int) -> None:
    """Of few and many blocks, evicted and stored anew with other last bits, promoted, deleted; one in 20 compared."""
    cache, rng = KVCache(), random.Random(0)
    host, below = cache.host(24), cache.host(220)
    config = EngineConfig.from_mapping(
        {"shadow_check": 20, "promote": True, "pipeline": {"on_destination_full": "evict"}}
    )
    config = EngineConfig(tiers={"host": host, "below": below}, shadow_check=20, promote=True, pipeline=config.pipeline)
    loaded = 0
    async with open_engine(cache.tier, config) as engine:
        for number in range(loads):
            prompt, n = rng.randrange(60), rng.randrange(1, 8)
            keys = [block_key(b"%d/%d" % (prompt, at)) for at in range(n)]
            async with await engine.lookup(keys) as hit:
                result = await engine.load(hit, cache.tier.into(range(32, 32 + len(hit))))
            assert result.loaded == len(hit)
            loaded += result.loaded
            if result.loaded < n:
                cache.compute(prompt, range(n), noise=0.01)
                await (await engine.store(cache.tier.external(range(n), keys), NO_WAIT)).wait()
            elif number % 50 == 0:
                await engine.delete(keys)
            if number % 50 == 0:
                assert cache.holds(prompt, range(32, 32 + result.loaded))
        shadow = engine.statistics().shadow
    assert shadow.mismatches == {}
    assert loaded > loads
    assert shadow.compared["stored"] > loads // 20
    assert shadow.compared["read again"] > loads // 20


async def test_what_another_engine_has_stored_is_found_wrong_where_it_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known here of what was stored: the engine that loads has come later."""
    config = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, num_blocks=64)
    prompts = [bytes([65 + number]) * 60 for number in range(12)]
    first, second, recompute = ReferenceEngine(config), ReferenceEngine(config), Recomputation(config)
    source, target = cache_of(first), cache_of(second)
    host = MemoryTier(64 * source.block_bytes, source.block_bytes)
    async with open_engine(source, {"host": host}) as engine:
        for prompt in prompts:
            sequence = first.add_sequence(prompt)
            list(first.prefill(sequence))
            keys = first.prefix_keys(prompt)
            await (await engine.store(source.external(sequence.block_ids[: len(keys)], keys), NO_WAIT)).wait()
            first.free(sequence)
    for prompt in prompts:
        recompute.remember(prompt)
    async with open_engine(target, {"host": host}, shadow_check=20, recompute=recompute) as engine:
        for at in range(60):
            assert (await restored(engine, second, target, prompts[at % 12])) == 3
        assert engine.statistics().shadow.compared["recomputed"] == 9
        P.another_requests_page_is_served(monkeypatch)
        wanting = [await restored(engine, second, target, prompts[at % 12]) for at in range(40)]
        assert engine.statistics().shadow.mismatches == {"recomputed": 6}
        assert wanting.count(0) >= 2


def cache_of(engine: ReferenceEngine) -> DeviceTier:
    return DeviceTier(engine.kv_caches, block_axis=1, plane_axes=PLANE_AXES)


async def restored(engine: Engine, model: ReferenceEngine, tier: DeviceTier, prompt: bytes) -> int:
    sequence = model.add_sequence(prompt)
    try:
        async with await engine.lookup(model.prefix_keys(prompt)) as hit:
            return (await engine.load(hit, tier.into(sequence.block_ids[: len(hit)]))).loaded
    finally:
        model.free(sequence)


class Beside(Destination):
    """A destination that puts what it is given one place further."""

    def __init__(self, n: int) -> None:
        self.places = [bytearray(SIZE) for _ in range(n)]

    @property
    def block_bytes(self) -> int:
        return SIZE

    def __len__(self) -> int:
        return len(self.places)

    def views(self) -> None:
        return None

    def copy_in(self, start: int, pages: Pages) -> None:
        for at, page in enumerate(pages, start):
            self.places[(at + 1) % len(self.places)][:] = page

    @property
    def is_readable(self) -> bool:
        return True

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        for at, page in zip(positions, pages, strict=True):
            page[:] = self.places[at]


async def test_a_copy_that_went_to_another_place_is_found_when_it_is_read_again() -> None:
    places, keys = Places(1), keys_of(4)
    places["a"].fill(keys)
    async with places.open(shadow_check=1) as engine:
        async with await engine.lookup(keys) as hit:
            result = await engine.load(hit, Beside(4))
        assert result.loaded == 0
        assert engine.statistics().shadow.mismatches == {"read again": 4}
        assert engine.statistics().load_failures == {"mismatch": 4}


# --- what is wrong is not served ----------------------------------------------------------------------------------------


async def test_what_is_wrong_is_not_served_until_it_is_stored_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(every=1)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        with monkeypatch.context() as planted:
            P.another_requests_page_is_served(planted)
            await world.store(engine, 2)
            result = await world.load(engine, keys)
            assert result.loaded == 0
            assert [outcome.reason for outcome in result.outcomes] == ["mismatch"] * 4  # type: ignore[attr-defined]
        async with await engine.lookup(keys) as hit:
            assert len(hit) == 0
        assert await world.host.contains(keys) == set()
        await world.store(engine, 1)
        assert (await world.load(engine, keys)).loaded == 4
        assert world.cache.holds(1, range(32, 36))
        assert engine.statistics().shadow.withheld == 0


async def test_the_prefix_before_what_is_wrong_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(every=1)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        world.host.pool.release(refs := world.host.pool.upgrade(keys[2:3]))
        (page,) = world.host.views(refs)
        page[:] = bytes(len(page))
        world.host.note_checksums(refs, [0x5EED])  # what is not verified is believed
        monkeypatch.setattr(world.host, "checksums", False)
        result = await world.load(engine, keys)
        assert result.loaded == 2
        async with await engine.lookup(keys) as hit:
            assert hit.keys == keys[:2]


async def test_a_copy_in_another_tier_goes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache()
    host, below = cache.host(16), cache.host(16)
    async with open_engine(cache.tier, {"host": host, "below": below}, shadow_check=1) as engine:
        keys = cache.compute(1, range(4))
        await (await engine.store(cache.tier.external(range(4), keys), NO_WAIT)).wait()
        await engine.drain()
        assert await below.contains(keys) == set(keys)
        with monkeypatch.context() as planted:
            P.keys_are_loaded_as_values(planted)
            async with await engine.lookup(keys) as hit:
                assert (await engine.load(hit, cache.tier.into(range(32, 36)))).loaded == 0
        assert not await host.contains(keys)
        assert not await below.contains(keys)


async def test_what_a_tier_cannot_delete_now_is_withheld_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache()
    host, below = cache.host(16), cache.host(16)
    async with open_engine(cache.tier, {"host": host, "below": below}, shadow_check=1) as engine:
        keys = cache.compute(1, range(4))
        await (await engine.store(cache.tier.external(range(4), keys), NO_WAIT)).wait()
        await engine.drain()
        async with await below.pin(keys):
            with monkeypatch.context() as planted:
                P.keys_are_loaded_as_values(planted)
                async with await engine.lookup(keys) as hit:
                    await engine.load(hit, cache.tier.into(range(32, 36)))
            assert engine.statistics().shadow.withheld == 4
            assert await below.contains(keys) == set(keys)
            async with await engine.lookup(keys) as hit:
                assert len(hit) == 0
            told = (await engine.explain(keys)).blocks[0]
            assert told.cause.value == "withheld"
            assert told.facts.tiers == ["below"]
            assert "loaded from host" in told.text
        async with await engine.lookup(keys) as hit:  # and asks for the deletion once more
            assert len(hit) == 0
        assert engine.statistics().shadow.withheld == 0
        assert not await below.contains(keys)


async def test_an_older_hit_of_what_turned_out_wrong_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(every=2)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        async with await engine.lookup(keys) as older:
            with monkeypatch.context() as planted:
                P.keys_are_loaded_as_values(planted)
                for _ in range(2):
                    await world.load(engine, keys)
            assert world.seen.mismatches
            result = await engine.load(older, world.cache.tier.into(range(32, 36)))
            assert result.loaded == 0
            assert result.outcomes[0].reason == "withheld"  # type: ignore[attr-defined]


async def test_explain_says_when_it_was_found_wrong_where_and_what_was_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(every=1)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        with monkeypatch.context() as planted:
            P.keys_are_loaded_as_values(planted)
            await world.load(engine, keys)
        (told, *_) = (await engine.explain(keys)).blocks
        assert told.cause.value == "withheld"
        assert told.text.startswith("withheld until it is stored again: it does not match its key; loaded from host")
        assert "16 of 16 planes are swapped" in told.text
        await world.store(engine, 1)
        assert {block.cause.value for block in (await engine.explain(keys)).blocks} == {"found"}


async def test_whoever_watches_is_told_and_one_that_raises_is_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        calls = 0

        def mismatch(self, mismatch: object) -> None:
            self.calls += 1
            raise RuntimeError("no")

    failing, world = Failing(), World(every=1)
    world.options["instruments"] = [failing, world.seen]
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        P.keys_are_loaded_as_values(monkeypatch)
        await world.load(engine, keys)
    assert failing.calls == 1
    assert {seen.key for seen in world.seen.mismatches} == set(keys)
    assert f"block {keys[0].hex()} from host does not match its key" in caplog.text


# --- what it costs and does not do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
async def test_it_can_be_left_out(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(every=every)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        P.keys_are_loaded_as_values(monkeypatch)
        assert (await world.load(engine, keys)).loaded == (0 if every else 4)
        assert (engine.statistics().shadow == ShadowStatistics()) is not bool(every)


async def test_a_block_that_everybody_loads_is_not_compared_each_time() -> None:
    world = World(every=100)
    async with world.open() as engine:
        for number in range(60):
            keys = await world.store(engine, number)
        for _ in range(10):
            for number in range(60):
                keys = [block_key(b"%d/%d" % (number, at)) for at in range(4)]
                await world.load(engine, keys)
        shadow = engine.statistics().shadow
        # 240 blocks were stored, so 2 are known, or 3: each is compared in its loads 1, 2, 4 and 8 of 10.
        assert 4 * 2 <= shadow.compared["stored"] <= 4 * 3
        assert shadow.compared["read again"] == 6 * 4


async def test_a_recomputation_that_fails_says_nothing_about_a_block() -> None:
    def failing(*args: object) -> Sequence[array[float] | None]:
        raise RuntimeError("out of blocks")

    world = World(every=1, recompute=failing)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        assert (await world.load(engine, keys)).loaded == 4
        assert engine.statistics().shadow.inconclusive == {"not recomputed": 4}


class NotReadToTheEnd(ForwardingDestination):
    """A destination on a device, whose copies to host memory have no proven end."""

    def __init__(self, inner: Destination, names: Sequence[str]) -> None:
        super().__init__(inner)
        self.names = names

    @property
    def plane_names(self) -> Sequence[str]:
        return self.names

    def views(self) -> Pages | None:
        return None

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        raise Unproven("the device does not answer")

    def plane_samples(self, positions: Sequence[int]) -> Sequence[array[float] | None]:
        raise Unproven("the device does not answer")


@pytest.mark.parametrize("how", ["planes", "bytes", "recomputed"])
async def test_a_comparison_without_a_proven_end_is_no_load(how: str) -> None:
    def unproven(*args: object) -> Sequence[array[float] | None]:
        raise Unproven("the device does not answer")

    world = World(every=1, recompute=unproven if how == "recomputed" else None)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        destination: Destination = world.cache.tier.into(list(range(len(keys))))
        if how != "recomputed":
            destination = NotReadToTheEnd(destination, destination.plane_names if how == "planes" else ())
        async with await engine.lookup(keys) as hit:
            with pytest.raises(Unproven):
                await engine.load(hit, destination)


async def test_wrong_blocks_beside_a_copy_without_a_proven_end_are_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    def unproven(*args: object) -> Sequence[array[float] | None]:
        raise Unproven("the device does not answer")

    world = World(every=1, recompute=unproven)
    async with world.open() as engine:
        P.a_stale_page_is_served(monkeypatch)
        keys = await world.store(engine, 1)
        with pytest.raises(Unproven):
            await world.load(engine, keys)
        assert engine.statistics().shadow.mismatches == {"stored": 4}
        async with await engine.lookup(keys) as hit:
            assert not hit.keys


async def test_a_destination_without_planes_is_compared_by_its_bytes() -> None:
    world = World(every=1)
    async with world.open() as engine:
        keys = await world.store(engine, 1)
        async with await engine.lookup(keys) as hit:
            buffers = [bytearray(world.cache.tier.block_bytes) for _ in keys]
            assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == 4
        shadow = engine.statistics().shadow
        assert shadow.compared == {"read again": 4}
        assert shadow.inconclusive == {"no planes at the destination": 4}


async def test_a_tier_that_is_silent_when_it_is_asked_again_costs_a_load_a_second(
    autojump_clock: trio.abc.Clock,
) -> None:
    places, keys = Places(1), keys_of(2)
    places["a"].fill(keys)
    async with places.open(shadow_check=1) as engine:
        async with await engine.lookup(keys) as hit:

            async def silent(*args: object) -> None:
                await trio.sleep_forever()

            places["a"].pin = silent  # type: ignore[method-assign, assignment]
            began = trio.current_time()
            buffers = [bytearray(SIZE) for _ in keys]
            assert (await engine.load(hit, PagesDestination.over(buffers))).loaded == 2
        assert trio.current_time() - began == pytest.approx(1)
        assert engine.statistics().shadow.inconclusive == {"too slow": 2}


async def load_beside(engine: Engine, keys: Sequence[Key]) -> None:
    async with await engine.lookup(keys) as hit:
        await engine.load(hit, Beside(len(hit)))


async def test_cancelled_at_any_await_nothing_is_held() -> None:
    for nth in range(200):
        places, keys = Places(2), keys_of(4)
        places["a"].fill(keys[:2])
        places["b"].fill(keys)

        async with places.open(shadow_check=1) as engine:
            cancelled = await cancelled_at_checkpoint(nth, partial(load_beside, engine, keys))
        places.assert_at_rest()
        if not cancelled:
            break
    assert nth > 10


@pytest.mark.parametrize("value", [-1, 1.5, "often", True])
def test_how_often_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="shadow_check"):
        EngineConfig.from_mapping({"shadow_check": value})


def test_the_environment_says_how_often() -> None:
    assert EngineConfig().shadow_check == 1_000
    assert EngineConfig.from_toml("", environ={"OFFLOAD_ENGINE__SHADOW_CHECK": "0"}).shadow_check == 0


# --- before the first request -----------------------------------------------------------------------------------------


async def test_a_layout_that_is_read_as_it_is_written_passes_within_a_second() -> None:
    world = World()
    async with world.open() as engine:
        began = time.perf_counter()
        check = await engine.check_layout(world.cache.tier.canary(7), "our layout")
        assert time.perf_counter() - began < 1
        assert (check.round_trip, check.shared, check.inconclusive) == (True, True, "")
        assert len(world.host) == 1  # what others compare with


@pytest.mark.parametrize("fault", LAYOUTS, ids=lambda fault: fault.__name__)
async def test_a_layout_that_is_read_otherwise_than_written_is_found_at_the_start(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    fault(monkeypatch)
    async with world.open() as engine:
        began = time.perf_counter()
        with pytest.raises(LayoutCheckFailed, match="planes are swapped"):
            await engine.check_layout(world.cache.tier.canary(7), "our layout")
        assert time.perf_counter() - began < 1
        assert [seen.found_by for seen in world.seen.mismatches] == ["layout"]
        assert engine.statistics().shadow.mismatches == {"layout": 1}


@pytest.mark.parametrize(
    "axes", [{"kv": 3, "head": 0}, {"kv": 0, "head": 3}], ids=["keys where heads are", "the same axes"]
)
async def test_a_layout_of_the_same_shape_that_another_process_has_stored_is_found_at_the_start(
    axes: dict[str, int],
) -> None:
    """With two heads, (kv, blocks, tokens, heads, ...) and (heads, blocks, tokens, kv, ...) are one shape."""
    ours, theirs = KVCache(heads=2), KVCache(heads=2, axes=axes)
    assert ours.tier.block_bytes == theirs.tier.block_bytes
    shared = ours.host(16)
    async with open_engine(theirs.tier, {"host": shared}) as engine:
        assert (await engine.check_layout(theirs.tier.canary(0), "one name")).shared
    async with open_engine(ours.tier, {"host": shared}) as engine:
        if axes == {"kv": 0, "head": 3}:
            assert (await engine.check_layout(ours.tier.canary(0), "one name")).shared
        else:
            with pytest.raises(LayoutCheckFailed, match="8 planes are swapped"):
                await engine.check_layout(ours.tier.canary(0), "one name")
            assert (await engine.check_layout(ours.tier.canary(0), "another name")).shared


async def test_the_check_of_a_layout_begins_once_its_precondition_holds() -> None:
    world, untouched = World(), list[bool]()
    world.cache.compute(3, [7])
    before = [layer.clone() for layer in world.cache.layers]

    async def computed() -> None:
        await trio.lowlevel.checkpoint()
        untouched.append(all(torch.equal(*layers) for layers in zip(world.cache.layers, before, strict=True)))

    async with world.open() as engine:
        await engine.check_layout(world.cache.tier.canary(7), "our layout", precondition=computed)
    assert untouched == [True]


@attrs.define(eq=False)
class OverwrittenCanary:
    """A canary that something overwrites after one of its writes."""

    canary: Any
    overwritten: int
    writes: int = 0

    def write(self, key: bytes, seed: str) -> Any:
        written = self.canary.write(key, seed)
        self.writes += 1
        if self.writes == self.overwritten:
            self.canary.clear()
        return written

    def clear(self) -> Any:
        return self.canary.clear()


@pytest.mark.parametrize("write", [1, 4], ids=["its own", "for others"])
async def test_a_pattern_that_was_stored_wrong_is_not_left_to_other_processes(write: int) -> None:
    world = World()
    async with world.open() as engine:
        with pytest.raises(LayoutCheckFailed):
            await engine.check_layout(OverwrittenCanary(world.cache.tier.canary(7), write), "our layout")
        assert not len(world.host)
        assert (await engine.check_layout(world.cache.tier.canary(7), "our layout")).shared


async def test_a_layout_is_not_known_where_no_tier_takes_the_block() -> None:
    world = World(config=None, policies=[lambda keys: dict.fromkeys(keys, "infrequent")])
    async with world.open() as engine:
        check = await engine.check_layout(world.cache.tier.canary(7), "our layout")
        assert (check.round_trip, check.shared) == (False, False)
        assert check.inconclusive == "not stored: infrequent"


async def test_the_check_of_a_layout_leaves_the_blocks_of_others_alone() -> None:
    world = World()
    world.cache.compute(3, range(7))
    before = [layer.clone() for layer in world.cache.layers]
    async with world.open() as engine:
        await engine.check_layout(world.cache.tier.canary(7), "our layout")
    others = [at for at in range(64) if at != 7]
    for layer, was in zip(world.cache.layers, before, strict=True):
        assert torch.equal(layer[:, others], was[:, others])


# --- from a thread ----------------------------------------------------------------------------------------------------


def test_a_thread_has_it_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(every=1)
    with from_thread.open_engine(world.cache.tier, {"host": world.host}, **world.options) as engine:
        assert engine.check_layout(world.cache.tier.canary(7), "our layout").shared
        keys = world.cache.compute(1, range(4))
        engine.store(world.cache.tier.external(range(4), keys), NO_WAIT).result(10)
        P.heads_are_loaded_in_another_order(monkeypatch)
        with engine.lookup(keys) as hit:
            assert engine.load(hit, world.cache.tier.into(range(32, 36))).loaded == 0
        assert engine.statistics().engine.shadow.mismatches == {"stored": 4}
        assert {block.cause.value for block in engine.explain(keys).blocks} == {"withheld"}
        with pytest.raises(LayoutCheckFailed):
            engine.check_layout(world.cache.tier.canary(7), "our layout")


class LoadWaits(FakeTier):
    """A load waits for the gate, whoever has given up waiting for it."""

    async def load(self, lease: Any, destination: Any) -> Any:
        if self.faults.gate is not None:
            self.copying += 1
            with trio.CancelScope(shield=True):
                await self.faults.gate.wait()
            self.copying -= 1
        return await super().load(lease, destination)


@pytest.mark.parametrize("kind", [FakeTier, LoadWaits], ids=["store", "load"])
def test_a_check_out_of_time_uses_the_block_no_more_when_a_thread_learns_of_it(kind: type[FakeTier]) -> None:
    world = World()
    host, gate = kind(64, world.cache.tier.block_bytes), trio.Event()
    with from_thread.open_engine(world.cache.tier, {"host": host}) as engine:
        assert engine.check_layout(world.cache.tier.canary(7), "our layout").shared
        host.faults.gate = gate
        over = threading.Event()

        def open_gate() -> None:
            """Once the check has been given up while its copy waits."""
            calls = engine._worker._pending_calls
            while not over.wait(1e-3):
                if host.copying and any([call.stop is not None and call.stop.is_set() for call in list(calls)]):
                    break
            engine.call(gate.set)

        opener = threading.Thread(target=open_gate)
        opener.start()
        with pytest.raises(from_thread.WaitTimeout):
            engine.check_layout(world.cache.tier.canary(7), "our layout", 0.2)
        assert not host.copying
        over.set()
        opener.join()


def test_a_check_that_does_not_end_is_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.from_thread._worker.LEAVE_TIMEOUT", 0.05)
    world = World()
    host, gate = LoadWaits(64, world.cache.tier.block_bytes), trio.Event()
    with from_thread.open_engine(world.cache.tier, {"host": host}) as engine:
        assert engine.check_layout(world.cache.tier.canary(7), "our layout").shared
        host.faults.gate = gate
        with pytest.raises(DrainUnproven):
            engine.check_layout(world.cache.tier.canary(7), "our layout", 0.05)
        engine.call(gate.set)


async def test_a_check_may_be_cancelled_at_every_step_and_its_store_is_over() -> None:
    world = World()
    host = FakeTier(64, world.cache.tier.block_bytes, latency=1e-4)
    async with open_engine(world.cache.tier, {"host": host}) as engine:
        for step in range(400):
            over = not await cancelled_at_checkpoint(
                step, lambda: engine.check_layout(world.cache.tier.canary(7), "our layout")
            )
            assert not host.copying
            assert all(pipeline.statistics().used_blocks == 0 for pipeline in engine.pipelines)
            if over:
                break
        assert over and step > 10


def test_loads_in_the_calling_thread_are_compared_as_often() -> None:
    world = World(every=20)
    keys = [b"a", b"b"]
    with from_thread.open_engine(world.cache.tier, {"host": world.host}, **world.options) as engine:
        for key in keys:
            engine.call(world.host.put, key, bytes(world.cache.tier.block_bytes))
        buffers = [bytearray(world.cache.tier.block_bytes) for _ in keys]
        for _ in range(200):
            with engine.lookup(keys) as hit:
                assert engine.load(hit, PagesDestination.over(buffers)).loaded == 2
            shadow = engine.statistics().engine.shadow  # the thread learns now of what was loaded without it
        assert 9 <= shadow.checked_loads <= 10
        assert shadow.compared == {"read again": 2 * shadow.checked_loads}
