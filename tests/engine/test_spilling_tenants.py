"""What a tier evicts is carried on as its tenant's: encrypted for him below, and read by nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import offload
from backends.abc import LOADED, Key
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.testing import FakeTier, payload_of
from backends.wrappers import AesGcm, slot_bytes, wrap
from maru.eviction import LRU
from offload import NO_WAIT, BatchConfig, Engine, PipelineConfig, Route, Status
from offload._engine.routes import PlannedRoute, tiers_to_index
from offload._engine.tenants import TenantIndex
from tests.support import determinism
from tests.support.wrapping import SECRETS

SIZE = 64
TENANTS = ("ann", "bob", "")
CONFIG = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))


def keys_of(tenant: str, n: int) -> list[Key]:
    return [offload.block_key(b"%d" % number, salt=tenant) for number in range(n)]


def plain(blocks: int = 2, **options: Any) -> FakeTier:
    return FakeTier(blocks, SIZE, eviction=LRU(), **options)


def sealed(blocks: int = 64) -> Any:
    """Over a fake, which encrypts in virtual time, too."""
    wrapper = AesGcm(SECRETS)
    slot = slot_bytes(SIZE, wrapper)
    return wrap(FakeTier(blocks, slot, eviction=LRU()), wrapper, block_bytes=SIZE)


def opened(tiers: dict[str, Any], **options: Any) -> Any:
    source = FakeTier(256, SIZE)
    for tenant in TENANTS:
        source.fill(keys_of(tenant, 16))
    return offload.open_engine(source, tiers, **{"chain": "on_evict", "config": CONFIG, **options})


async def store(engine: Engine, keys: Sequence[Key], tenant: str, **options: Any) -> Any:
    """One by one, so that each of them has to go for the next."""
    for key in keys:
        source: Any = engine.source
        handle = await engine.store(source.weak([key]), precondition=NO_WAIT, tenant=tenant, **options)
        result = await handle.wait()
        assert result.status is Status.COMPLETE, result
    return result


async def readers(tier: Any, key: Key) -> list[str]:
    """To whom this block is readable; its bytes are right, or it is none at all."""
    found: list[str] = []
    for tenant in TENANTS:
        end = tier.carry([key], tenant)
        async with await tier.pin([key]) as lease:
            assert len(lease.keys) == 1, "it is not there"
            place = bytearray(SIZE)
            if list(await tier.load(lease, PagesDestination.over([place]))) == [LOADED]:
                assert place == payload_of(key, SIZE)
                found.append(tenant)
        end()
    return found


def at_rest(engine: Engine, *tiers: Any) -> None:
    for tier in tiers:
        if hasattr(tier, "_tags"):
            assert len(tier._tags) == 0
    for name, owners in engine._tags._indexes.items():
        assert not owners._coming, name


def remembered(engine: Engine, name: str) -> dict[Key, str | None]:
    return dict(engine._tags._indexes[name]._there)


# --- whose they are below ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", TENANTS)
async def test_what_a_tenant_stored_is_encrypted_for_him_below_and_read_by_him_alone(tenant: str) -> None:
    upper, lower, keys = plain(), sealed(), keys_of(tenant, 8)
    async with opened({"upper": upper, "lower": lower}) as engine:
        await store(engine, keys, tenant)
        assert lower.contains_nowait(keys) == set(keys[:6]) and engine.statistics().spills["lower"].spilled == 6
        for key in keys[:6]:
            assert await readers(lower, key) == [tenant]
        for who in TENANTS:
            places = [bytearray(SIZE) for _ in keys]
            async with await engine.lookup(keys, tenant=who) as hit:
                result = await engine.load(hit, PagesDestination.over(places))
            assert result.loaded == (8 if who == tenant else 0)
            assert who != tenant or places == [payload_of(key, SIZE) for key in keys]
        at_rest(engine, lower)


async def test_tenants_that_take_turns_keep_what_is_theirs() -> None:
    upper, lower = plain(3), sealed()
    async with opened({"upper": upper, "lower": lower}) as engine:
        for number in range(8):
            for tenant in TENANTS:
                await store(engine, keys_of(tenant, 8)[number : number + 1], tenant)
        for tenant in TENANTS:
            for key in keys_of(tenant, 7):
                assert await readers(lower, key) == [tenant]
        at_rest(engine, lower)


async def test_several_tenants_victims_may_go_at_once(autojump_clock: object) -> None:
    upper, lower = plain(6), sealed()
    async with opened({"upper": upper, "lower": lower}) as engine:
        source: Any = engine.source
        for tenant in TENANTS:
            await store(engine, keys_of(tenant, 2), tenant)
        handle = await engine.store(source.weak(keys_of("ann", 8)[2:]), precondition=NO_WAIT, tenant="ann")
        assert (await handle.wait()).status is Status.COMPLETE
        for tenant in TENANTS:
            for key in keys_of(tenant, 2):
                assert await readers(lower, key) == [tenant]
        at_rest(engine, lower)


async def test_it_stays_his_however_many_tiers_it_walks_through() -> None:
    tiers = {"a": plain(), "b": plain(3), "c": sealed()}
    async with opened(tiers) as engine:
        await store(engine, keys_of("bob", 3), "bob")
        await store(engine, keys_of("ann", 9), "ann")
        below = [(tenant, key) for tenant in TENANTS for key in keys_of(tenant, 9) if tiers["c"].contains_nowait([key])]
        assert len(below) == 7
        for tenant, key in below:
            assert await readers(tiers["c"], key) == [tenant]
        assert len(remembered(engine, "a")) == 2 and len(remembered(engine, "b")) == 3
        at_rest(engine, tiers["c"])


@pytest.mark.parametrize("lower", ["sealed", "plain"])
async def test_what_is_encrypted_above_is_read_for_its_tenant_on_its_way_down(lower: str) -> None:
    upper, below = sealed(2), sealed() if lower == "sealed" else plain(64)
    async with opened({"upper": upper, "lower": below}) as engine:
        for tenant in TENANTS:
            await store(engine, keys_of(tenant, 4), tenant)
        assert engine.statistics().spills["lower"].spilled == 10 and not engine.statistics().spills["lower"].dropped
        for tenant in TENANTS:
            key = keys_of(tenant, 4)[0]
            if lower == "sealed":
                assert await readers(below, key) == [tenant]
            else:
                assert below.get(key) == payload_of(key, SIZE)
        at_rest(engine, upper, below)


async def test_what_is_promoted_for_a_tenant_and_goes_again_is_still_his() -> None:
    upper, lower, keys = plain(), sealed(), keys_of("ann", 8)
    async with opened({"upper": upper, "lower": lower}, promote=True) as engine:
        await store(engine, keys[:4], "ann")
        async with await engine.lookup(keys[:1], tenant="ann") as hit:
            await engine.load(hit, PagesDestination.over([bytearray(SIZE)]))
        await engine.drain()
        assert upper.contains_nowait(keys[:1]) and remembered(engine, "upper")[keys[0]] == "ann"
        await lower.delete(keys[:1])
        await store(engine, keys[4:], "ann")
        assert await readers(lower, keys[0]) == ["ann"]
        at_rest(engine, lower)


async def test_what_is_promoted_from_a_plain_tier_stays_whose_it_was_there(autojump_clock: object) -> None:
    """Whoever knows a key may load it from a tier that does not encrypt; that makes the block not his."""
    tiers, keys = {"a": plain(), "b": plain(8), "c": sealed()}, keys_of("ann", 16)
    async with opened(tiers, promote=True) as engine:
        await store(engine, keys[:4], "ann")
        tiers["b"].fill([b"stray"])
        for wanted in (keys[0], b"stray"):
            async with await engine.lookup([wanted], tenant="bob") as hit:
                assert hit.runs == [("b", 1)]
                await engine.load(hit, PagesDestination.over([bytearray(SIZE)]))
            await engine.drain()
            assert engine._tags._indexes["a"].of(wanted) is None
        await store(engine, keys[4:], "ann")
        assert await readers(tiers["c"], keys[0]) == ["ann"] and not tiers["c"].contains_nowait([b"stray"])
        at_rest(engine, tiers["c"])


# --- whose they are not -----------------------------------------------------------------------------------------------


async def test_what_nobody_said_anything_of_is_refused_block_by_block(caplog: pytest.LogCaptureFixture) -> None:
    upper, lower, keys = plain(4), sealed(), keys_of("ann", 8)
    upper.fill([b"before"])
    async with opened({"upper": upper, "lower": lower}) as engine:
        upper.fill([b"behind"])
        source: Any = engine.source
        await store(engine, keys[:2], "ann")
        handle = await engine.store(source.weak(keys[2:6]), precondition=NO_WAIT, tenant="ann")
        assert (await handle.wait()).status is Status.COMPLETE
        spills = engine.statistics().spills["lower"]
        assert (dict(spills.dropped), spills.spilled) == ({"tenant unknown": 2}, 2)
        assert lower.contains_nowait([b"before", b"behind"]) == set() and lower.contains_nowait(keys) == set(keys[:2])
        assert "not copied to lower: tenant unknown" in str(await engine.explain(b"behind"))
        assert "2 blocks were dropped instead of copied to lower: tenant unknown" in caplog.text
        at_rest(engine, lower)


async def test_the_first_tenant_of_a_key_keeps_it() -> None:
    upper, lower, keys = plain(4), sealed(), keys_of("ann", 8)
    async with opened({"upper": upper, "lower": lower}) as engine:
        await store(engine, keys[:1], "ann")
        await store(engine, keys[:1], "bob", to="upper")  # it is there already
        await store(engine, keys[1:], "ann")
        assert await readers(lower, keys[0]) == ["ann"]


async def test_who_stores_what_lies_there_of_nobody_does_not_make_it_his() -> None:
    upper, lower, keys = plain(2), sealed(), keys_of("ann", 4)
    upper.fill(keys[:1])
    async with opened({"upper": upper, "lower": lower}) as engine:
        await store(engine, keys[:1], "bob")
        await store(engine, keys[1:], "ann")
        assert not lower.contains_nowait(keys[:1]) and dict(engine.statistics().spills["lower"].dropped) == {
            "tenant unknown": 1
        }
        await store(engine, keys[:1], "ann")  # who stores it anew, once it has gone
        await store(engine, keys[1:3], "ann")
        assert await readers(lower, keys[0]) == ["ann"]


async def test_what_two_bring_at_once_is_nobodys(autojump_clock: object) -> None:
    upper, lower, keys = plain(2, latency=1.0), sealed(), keys_of("ann", 4)
    async with opened({"upper": upper, "lower": lower}) as engine:
        source: Any = engine.source
        hers = await engine.store(source.weak(keys[:1]), precondition=NO_WAIT, tenant="ann")
        his = await engine.store(source.weak([keys[0], keys_of("bob", 1)[0]]), precondition=trio.Event(), tenant="bob")
        await hers.wait()
        his.request_cancel()
        assert (await his.wait()).filtered == {keys[0]: "pending"}
        await store(engine, keys[1:], "ann")
        dropped = dict(engine.statistics().spills["lower"].dropped)
        assert dropped == {"tenant unknown": 1} and not lower.contains_nowait(keys[:1])
        at_rest(engine, lower)


async def test_who_looks_for_a_block_while_it_is_brought_takes_it_from_nobody(autojump_clock: object) -> None:
    upper, lower, keys = plain(2, latency=1.0), sealed(), keys_of("ann", 4)
    async with opened({"upper": upper, "lower": lower}) as engine:
        source: Any = engine.source
        hers = await engine.store(source.weak(keys[:1]), precondition=NO_WAIT, tenant="ann")
        async with await engine.lookup(keys[:1], tenant="bob"):
            await hers.wait()
        await store(engine, keys[1:], "ann")
        assert await readers(lower, keys[0]) == ["ann"]


async def test_a_tenant_without_a_secret_loses_his_blocks_and_nobody_elses() -> None:
    upper, lower = plain(), sealed()
    async with opened({"upper": upper, "lower": lower}) as engine:
        source: Any = engine.source
        source.fill([b"eve's"])
        await store(engine, [b"eve's"], "eve")
        await store(engine, keys_of("ann", 3), "ann")
        assert dict(engine.statistics().spills["lower"].dropped) == {"failed": 1}
        assert await readers(lower, keys_of("ann", 1)[0]) == ["ann"] and not lower.contains_nowait([b"eve's"])


# --- how much is remembered -------------------------------------------------------------------------------------------


async def test_no_more_is_remembered_than_the_tier_has() -> None:
    upper, lower, keys = plain(4), sealed(), keys_of("ann", 16)
    async with opened({"upper": upper, "lower": lower}) as engine:
        await store(engine, keys, "ann")
        assert remembered(engine, "upper") == dict.fromkeys(keys[12:], "ann")
        await engine.delete(keys[12:14])
        assert remembered(engine, "upper") == dict.fromkeys(keys[14:], "ann")
        async with await engine.lookup(keys, tenant="bob"):
            assert remembered(engine, "upper") == dict.fromkeys(keys[14:], "ann")  # who reads brings nothing
        at_rest(engine, lower)


async def test_where_nobody_must_know_nothing_is_remembered() -> None:
    async with opened({"upper": plain(), "lower": plain(64)}) as engine:
        await store(engine, keys_of("ann", 4), "ann")
        assert engine._tags is None
    async with opened({"upper": sealed(64), "lower": plain(64)}, chain="on_store", config=PipelineConfig()) as engine:
        assert engine._tags._indexes == {}


def test_it_is_remembered_where_victims_come_to_or_from_one_that_must_know() -> None:
    def planned(*steps: str) -> list[PlannedRoute]:
        return [PlannedRoute(to, to, above, Route(to), ()) for above, to in (step.split(">") for step in steps)]

    stairs = planned("source>a", "a>b", "b>c", "c>d")
    assert tiers_to_index(stairs, ["b", "c", "d"], ["c"]) == {"a", "b", "c"}
    assert tiers_to_index(stairs, ["b", "c", "d"], ["a"]) == {"a"}
    assert tiers_to_index(stairs, ["b", "c", "d"], []) == set()
    assert tiers_to_index(stairs, ["b", "d"], ["d"]) == {"c"}
    assert tiers_to_index(planned("source>a", "a>c", "source>b", "b>c"), ["c"], ["c"]) == {"a", "b"}


class Shelf:
    """What is there, and whether anybody can tell."""

    def __init__(self) -> None:
        self.there: set[Key] = set()
        self.broken = False

    def contains(self, keys: Sequence[Key]) -> set[Key]:
        if self.broken:
            raise OSError("no answer")
        return self.there & set(keys)


def test_what_went_in_another_way_is_found_out() -> None:
    shelf = Shelf()
    owners = TenantIndex(shelf.contains)
    for number in range(1000):
        end = owners.bring([b"%d" % number], "ann")
        shelf.there = {b"%d" % number}
        end()
        end()
        assert len(owners) <= 65
    assert owners.of(b"999") == "ann" and owners.of(b"5") is None


def test_a_tier_that_does_not_say_what_it_has_makes_nothing_anybodys() -> None:
    shelf = Shelf()
    owners = TenantIndex(shelf.contains)
    shelf.there, shelf.broken = {b"k", b"l"}, True
    end = owners.bring([b"k"], "ann")
    shelf.broken = False
    end()
    assert owners.of(b"k") is None
    owners.forget([b"k"])
    shelf.there = set()
    end = owners.bring([b"k"], "ann")
    shelf.there, shelf.broken = {b"k"}, True
    assert owners.of(b"k") == "ann"
    end()
    assert owners.of(b"k") is None and len(owners) == 0


def test_owners_against_what_is_to_be_said_of_each_block() -> None:
    """Bring, arrive, evict and delete in any order: a block is its one bringer's, or nobody's, and never another's."""
    for seed in range(200):
        chance, shelf = random.Random(seed), Shelf()
        owners = TenantIndex(shelf.contains)
        names = [b"%d" % number for number in range(4)]
        wrote: dict[Key, str] = {}  # who truly wrote what is there; nobody: a stray
        in_flight: list[tuple[list[Key], str, Callable[[], None]]] = []
        for _ in range(60):
            what = chance.randrange(5)
            if what == 0:
                keys, tenant = chance.sample(names, 2), chance.choice(TENANTS)
                in_flight.append((keys, tenant, owners.bring(keys, tenant)))
            elif what == 1 and in_flight:
                keys, tenant, _ = chance.choice(in_flight)
                for key in keys:
                    if key not in shelf.there and chance.random() < 0.7:
                        shelf.there.add(key)
                        wrote[key] = tenant
            elif what == 2 and in_flight:
                in_flight.pop(chance.randrange(len(in_flight)))[2]()
            elif what == 3 and shelf.there:
                gone = chance.choice(sorted(shelf.there))
                shelf.there.discard(gone)
                del wrote[gone]
                owners.forget([gone])
            elif what == 4:
                stray = chance.choice(names)
                if stray not in shelf.there and not any(stray in keys for keys, _, _ in in_flight):
                    shelf.there.add(stray)
                    wrote[stray] = "stray"
            for key in shelf.there:
                said = owners.of(key)
                assert said is None or said == wrote[key], (seed, key, said, wrote[key])
        while in_flight:
            in_flight.pop()[2]()
        assert not owners._coming and set(owners._there) <= shelf.there, seed


# --- whatever happens -------------------------------------------------------------------------------------------------


class Ward(FakeTier):
    """A tier that must know, and says whom it was told of."""

    capabilities = attrs.evolve(FakeTier.capabilities, needs_tenants=True)

    def __init__(self, refuses: bool = False, **options: Any) -> None:
        super().__init__(64, SIZE, **options)
        self.carried: list[tuple[Key, str]] = []
        self.wrote: dict[Key, list[str]] = {}
        self.refuses = refuses

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        if self.refuses and tenant == "ann":
            raise OSError("no book to write it in")
        mine = [(key, tenant) for key in keys]
        self.carried += mine
        return lambda: [self.carried.remove(one) for one in mine] and None  # type: ignore[func-returns-value]

    async def write(self, source: Any, refs: Any, keys: Sequence[Key], slots: Any) -> Any:
        for key in keys:
            self.wrote[key] = [tenant for carried, tenant in self.carried if carried == key]
        return await super().write(source, refs, keys, slots)


async def test_nothing_is_carried_any_longer_once_the_engine_has_ended(autojump_clock: object) -> None:
    for cut_at in (0.5, 1.5, 2.5, 100.0):
        ward = Ward(latency=1.0)
        with trio.move_on_after(cut_at):
            async with opened({"upper": plain(), "lower": ward}) as engine:
                await store(engine, keys_of("ann", 6), "ann")
        assert ward.carried == [] and all(tenants == ["ann"] for tenants in ward.wrote.values())
        at_rest(engine)


async def test_who_cannot_be_told_gets_nothing_and_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    ward, upper = Ward(), plain()
    async with opened({"upper": upper, "lower": ward}) as engine:
        await store(engine, keys_of("bob", 2), "bob")
        await store(engine, keys_of("ann", 2), "ann")
        ward.refuses = True
        await store(engine, keys_of("bob", 4)[2:], "bob")
        assert dict(engine.statistics().spills["lower"].dropped) == {"failed": 2} and "no book" in caplog.text
        assert ward.wrote == {key: ["bob"] for key in keys_of("bob", 2)}
        at_rest(engine)
    assert ward.carried == []


async def never_anybody_elses(seed: int) -> dict[str, int]:
    """Whatever is stored, read, promoted, deleted and cancelled by whomever: what is below is its tenant's, or not there."""
    chance = random.Random(seed)
    middle = {"b": plain(chance.choice([3, 6]), latency=0.001)} if chance.random() < 0.5 else {}
    upper = plain(4) if chance.random() < 0.7 else sealed(4)
    tiers = {"a": upper, **middle, "z": sealed()}
    async with opened(tiers, promote=chance.random() < 0.7) as engine:
        source: Any = engine.source

        async def stores(tenant: str) -> None:
            for _ in range(12):
                keys = chance.sample(keys_of(tenant, 10), chance.randrange(1, 4))
                handle = await engine.store(source.weak(keys), precondition=NO_WAIT, tenant=tenant)
                await trio.sleep(chance.choice([0.0, 0.001, 0.01]))
                if chance.random() < 0.2:
                    await handle.cancel()
                if chance.random() < 0.1:
                    await engine.delete(keys[:1])

        async def reads(tenant: str) -> None:
            for _ in range(12):
                await trio.sleep(chance.choice([0.0, 0.002]))
                keys = chance.sample(keys_of(tenant, 10), 3)
                with trio.move_on_after(chance.choice([0.001, 10])):
                    places = [bytearray(SIZE) for _ in keys]
                    async with await engine.lookup(keys, tenant=tenant) as hit:
                        result = await engine.load(hit, PagesDestination.over(places))
                    assert places[: result.loaded] == [payload_of(key, SIZE) for key in keys[: result.loaded]]

        async with trio.open_nursery() as nursery:
            for tenant in TENANTS:
                nursery.start_soon(stores, tenant)
                nursery.start_soon(reads, tenant)
        await engine.drain()
        await trio.sleep(1)
        at_rest(engine, *tiers.values())
        below = [
            (tenant, key) for tenant in TENANTS for key in keys_of(tenant, 10) if tiers["z"].contains_nowait([key])
        ]
        for tenant, key in below:
            assert await readers(tiers["z"], key) == [tenant], seed
        dropped = sum(sum(spills.dropped.values()) for spills in engine.statistics().spills.values())
        return {"below": len(below), "promoted": engine.statistics().promoted_blocks, "dropped": dropped}


def test_what_is_below_is_its_tenants_whatever_happens() -> None:
    seen = {"below": 0, "promoted": 0, "dropped": 0}
    for seed in range(6):
        for what, n in determinism.run(never_anybody_elses, seed, seed=seed).items():
            seen[what] += n
    assert seen["below"] > 50 and seen["promoted"] > 10, seen
    assert not seen["dropped"], "whose they are was known of all of them"


# --- files ------------------------------------------------------------------------------------------------------------


async def test_files_of_an_earlier_engine_are_nobodys(tmp_path: Any) -> None:
    keys = keys_of("ann", 8)
    for number in range(2):
        files, lower = FileTier(tmp_path, 2 * SIZE, block_bytes=SIZE, eviction=LRU()), sealed()
        async with opened({"upper": files, "lower": lower}) as engine:
            await store(engine, keys[4 * number : 4 * number + 4], "ann")
            assert dict(engine.statistics().spills["lower"].dropped) == ({} if not number else {"tenant unknown": 2})
        files.close()
