"""Why a block is, or is not, where it was looked for."""

from __future__ import annotations

import json

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Key
from backends.base.blocks import BlockPool
from backends.memory import MemoryTier
from backends.testing import FakeTier
from maru.eviction import LRU
from offload import (
    NO_WAIT,
    BatchConfig,
    BlockKey,
    Explanation,
    FrequencyFilter,
    PipelineConfig,
    Status,
    from_thread,
    open_engine,
)
from offload._engine.explain import Cause, Elsewhere, Facts, InFlight, KeyMaker, allowed, explain
from offload._engine.history import MOST_REMEMBERED, Event, Record
from offload.abc import AsyncPolicy

SIZE = 16
CONFIG = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0))


# --- the records ------------------------------------------------------------------------------------------------------


def test_a_record_remembers_the_last_ones_exactly():
    record = Record(5)
    for number in range(4):
        record.note("host", [b"%d.%d" % (number, at) for at in range(3)], float(number))
    assert len(record) == 5
    every = [b"%d.%d" % (number, at) for number in range(4) for at in range(3)]
    assert sorted(record.of(every)) == every[-5:]


def test_a_record_of_more_than_it_remembers_keeps_the_last_of_it():
    record = Record(5)
    record.note("host", [b"%d" % number for number in range(8)], 0.0)
    assert len(record) == 5
    assert sorted(record.of([b"%d" % number for number in range(8)])) == [b"3", b"4", b"5", b"6", b"7"]
    record.note("host", [b"x"], 1.0)
    assert sorted(record.of([b"3", b"4", b"x"])) == [b"4", b"x"]


def test_a_record_tells_the_latest_first_and_once_for_each_place():
    record = Record()
    record.note("host", [b"a"], 1.0)
    record.note("disk", [b"a", b"b"], 2.0, "full")
    record.note("host", [b"a"], 3.0)
    assert record.of([b"a"]) == {b"a": [Event("host", 3.0, ""), Event("disk", 2.0, "full")]}


def test_a_record_has_each_ones_own_reason():
    record = Record(3)
    record.note("host", {b"a": "present", b"b": "infrequent"}, 1.0)
    record.note("host", {b"c": "present", b"d": "timeout"}, 2.0)
    assert record.of([b"a", b"b", b"d"]) == {
        b"b": [Event("host", 1.0, "infrequent")],
        b"d": [Event("host", 2.0, "timeout")],
    }


class Counting(list):
    """Keys that count who looks at them."""

    looks = 0

    def __iter__(self):
        Counting.looks += 1
        return super().__iter__()

    def __getitem__(self, at):
        Counting.looks += 1
        return super().__getitem__(at)


def test_noting_looks_at_no_key_however_many_there_are(monkeypatch):
    """Counted, not timed: nothing depends on how many blocks an eviction takes, or how many are remembered."""
    monkeypatch.setattr(Counting, "looks", 0)
    record = Record()
    keys = Counting(b"%d" % number for number in range(1000))
    Counting.looks = 0
    for turn in range(2 * MOST_REMEMBERED // 1000):
        record.note("host", keys, float(turn))
    assert Counting.looks == 0
    assert len(record) == MOST_REMEMBERED
    record.of([b"1"])
    assert Counting.looks > 0


def test_nothing_is_noted_for_blocks_that_walk_their_way(autojump_clock):
    async def main():
        async with open_engine(*places(64, 64), config=CONFIG) as engine:
            await store(engine, [b"%d" % number for number in range(48)])
            history = engine._inspector.history
            assert (len(history.tombstones), len(history.refusals), len(history.deletions)) == (0, 0, 0)
            assert history.tombstones._entries == type(history.tombstones._entries)()

    trio.run(main)


# --- what the facts say -----------------------------------------------------------------------------------------------

KEY = b"\xab" * 4
FULL = Facts(
    KEY,
    tiers=["host", "disk"],
    in_flight=[InFlight("disk", "transfer"), InFlight("far", "awaiting")],
    unavailable={"far": "no answer"},
    elsewhere=[Elsewhere("rank 1", "layout", ["host"])],
    evicted=[Event("host", 7.0, "not copied to disk: full"), Event("disk", 2.0, "")],
    refused=[Event("host", 5.0, "infrequent")],
)


@pytest.mark.parametrize(
    ("without", "cause", "text"),
    [
        ([], Cause.FOUND, "in host and disk, on its way to far"),
        (["tiers"], Cause.IN_FLIGHT, "on its way to disk, in transfer and on its way to far, in awaiting"),
        (
            ["tiers", "in_flight"],
            Cause.UNAVAILABLE,
            "not known: no answer from far (no answer); "
            "evicted from host 3 s ago (not copied to disk: full) and from disk 8 s ago",
        ),
        (
            ["tiers", "in_flight", "unavailable"],
            Cause.OTHER_LAYOUT,
            "there under another layout: rank 1, in host",
        ),
        (
            ["tiers", "in_flight", "unavailable", "elsewhere"],
            Cause.EVICTED,
            "evicted from host 3 s ago (not copied to disk: full) and from disk 8 s ago",
        ),
        (
            ["tiers", "in_flight", "unavailable", "elsewhere", "evicted"],
            Cause.FILTERED,
            "kept back from host 5 s ago (infrequent)",
        ),
        (
            ["tiers", "in_flight", "unavailable", "elsewhere", "evicted", "refused"],
            Cause.UNKNOWN,
            "no record of it: never stored, or gone for longer than the records reach",
        ),
    ],
    ids=lambda value: value.value.replace(" ", "-") if isinstance(value, Cause) else None,
)
def test_the_first_that_is_true_explains_it(without, cause, text):
    empty = Facts(KEY)
    facts = attrs.evolve(FULL, **{name: getattr(empty, name) for name in without})
    [block] = explain([facts], 10.0).blocks
    assert (block.cause, block.text, block.facts) == (cause, text, facts)


def test_of_what_was_the_last_event_explains_it():
    evicted, refused, deleted = [Event("host", 3.0, "")], [Event("host", 5.0, "infrequent")], [Event("disk", 4.0, "")]

    def cause(**facts):
        return explain([Facts(KEY, **facts)], 10.0).blocks[0].cause

    assert cause(evicted=evicted, refused=refused, deleted=deleted) is Cause.FILTERED
    assert cause(evicted=evicted, deleted=deleted) is Cause.DELETED
    assert cause(evicted=evicted) is Cause.EVICTED


def test_another_tenants_salt_is_not_another_layout():
    [block] = explain([Facts(KEY, elsewhere=[Elsewhere("tenant 'b'", "salt", ["host"])])], 0.0).blocks
    assert (block.cause, block.text) == (Cause.OTHER_SALT, "there under another salt: tenant 'b', in host")


def test_a_prompt_is_told_in_runs():
    facts = [Facts(b"a", tiers=["host"]), Facts(b"b", tiers=["host"]), Facts(b"c"), Facts(b"d", tiers=["host"])]
    explanation = explain(facts, 0.0)
    assert explanation.usable == 2
    assert str(explanation).splitlines() == [
        "2 of 4 blocks can be used",
        "  0-1: in host",
        "  2: no record of it: never stored, or gone for longer than the records reach",
        "  3: in host",
    ]


def test_programs_are_told_all_facts():
    told = json.loads(explain([FULL], 10.0).as_json())
    assert told["usable"] == 1
    [block] = told["blocks"]
    assert (block["cause"], block["key"], block["tiers"]) == ("found", "abababab", ["host", "disk"])
    assert block["in_flight"][0] == {"pipeline": "disk", "stage": "transfer"}
    assert block["evicted"][0] == {"where": "host", "when": 7.0, "why": "not copied to disk: full"}
    assert block["elsewhere"] == [{"name": "rank 1", "differs": "layout", "tiers": ["host"]}]


def test_only_an_operator_may_have_another_tenants_keys_tried():
    makers = [KeyMaker(name, lambda tokens: [], tenant=name) for name in ("", "ours", "theirs")]
    assert [maker.name for maker in allowed(makers, "ours", operator=False)] == ["", "ours"]
    assert [maker.name for maker in allowed(makers, "ours", operator=True)] == ["", "ours", "theirs"]


# --- an engine --------------------------------------------------------------------------------------------------------


def places(*capacities: int) -> tuple[FakeTier, dict[str, FakeTier]]:
    names = ["host", "disk", "far"]
    tiers = [FakeTier(capacity, SIZE, eviction=LRU()) for capacity in capacities]
    return FakeTier(64, SIZE), dict(zip(names, tiers, strict=False))


async def store(engine, keys: list[Key]):
    engine.source.fill(keys)
    handle = await engine.store(engine.source.weak(keys), precondition=NO_WAIT)
    await handle.wait_routes()
    return await handle.wait()


async def told(engine, what, **options) -> list[tuple[str, str]]:
    explanation = await engine.explain(what, **options)
    assert isinstance(explanation, Explanation)
    return [(block.cause.value, block.text) for block in explanation.blocks]


async def test_which_tiers_have_it(autojump_clock):
    async with open_engine(*places(8, 8), config=CONFIG) as engine:
        await store(engine, [b"a", b"b"])
        engine.tiers["host"].pool.delete([b"b"])
        assert await told(engine, [b"a", b"b"]) == [("found", "in host and disk"), ("found", "in disk")]
        assert str(await engine.explain(b"a")) == "in host and disk"


class Sleepy(AsyncPolicy):
    async def evaluate(self, keys):
        await trio.sleep(0.05)
        return {}


async def test_where_it_is_on_its_way(autojump_clock):
    source, tiers = places(8, 8)
    ready = trio.Event()
    async with open_engine(source, tiers, config=CONFIG, policies=[Sleepy()]) as engine:
        source.fill([b"a", b"b"])
        handle = await engine.store(source.weak([b"a"]), precondition=ready)
        await wait_all_tasks_blocked()
        assert await told(engine, b"a") == [("in flight", "on its way to host, in admission")]
        await trio.sleep(0.1)
        assert await told(engine, b"a") == [("in flight", "on its way to host, in awaiting")]
        tiers["host"].faults.room = room = trio.Event()
        ready.set()
        await wait_all_tasks_blocked()
        assert await told(engine, b"a") == [("in flight", "on its way to host, in transfer")]
        later = await engine.store(source.weak([b"b"]), precondition=NO_WAIT)
        await trio.sleep(0.1)
        assert await told(engine, b"b") == [("in flight", "on its way to host, in batching")]
        tiers["disk"].faults.gate = gate = trio.Event()
        tiers["host"].faults.room = None
        room.set()
        await wait_all_tasks_blocked()
        assert await told(engine, b"a") == [("found", "in host, on its way to disk")]
        gate.set()
        for each in (handle, later):
            assert (await each.wait()).status is Status.COMPLETE


async def test_when_it_was_evicted_and_from_where(autojump_clock):
    async with open_engine(*places(2), config=CONFIG) as engine:
        await store(engine, [b"a", b"b"])
        await store(engine, [b"c"])
        await trio.sleep(3)
        assert await told(engine, b"b") == [("evicted", "evicted from host 3 s ago")]
        await store(engine, [b"b"])
        assert await told(engine, b"b") == [("found", "in host")]


async def test_what_was_dropped_on_its_way_down_and_why(autojump_clock):
    async with open_engine(*places(2, 8), config=CONFIG, chain="on_evict") as engine:
        await store(engine, [b"a", b"b"])
        await store(engine, [b"c"])
        assert await told(engine, b"b") == [("found", "in disk")]
        engine.tiers["disk"].faults.error = OSError("torn")
        await store(engine, [b"d"])
        await trio.sleep(2)
        assert await told(engine, b"a") == [
            (
                "evicted",
                "evicted from host 2 s ago (not copied to disk: failed); "
                "not stored in disk 2 s ago (TransferFailed: the copy failed: OSError('torn'))",
            )
        ]


async def test_what_a_policy_kept_back(autojump_clock):
    source, tiers = places(8)
    async with open_engine(source, tiers, config=CONFIG, policies=[FrequencyFilter(threshold=1)]) as engine:
        await store(engine, [b"a", b"b"])
        await trio.sleep(4)
        assert await told(engine, [b"a", b"x"]) == [
            ("filtered", "kept back from host 4 s ago (infrequent)"),
            ("unknown", "no record of it: never stored, or gone for longer than the records reach"),
        ]
        await store(engine, [b"a"])
        assert await told(engine, b"a") == [("found", "in host")]


async def test_what_was_deleted(autojump_clock):
    async with open_engine(*places(8, 8), config=CONFIG) as engine:
        await store(engine, [b"a"])
        await engine.delete([b"a"])
        await trio.sleep(1)
        assert await told(engine, b"a") == [("deleted", "deleted from disk 1 s ago and from host 1 s ago")]


class Remote(FakeTier):
    capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)

    async def contains(self, keys):
        await trio.lowlevel.checkpoint()
        raise OSError("no route to host")


async def test_a_tier_that_does_not_answer_is_no_miss(autojump_clock):
    source, tiers = places(2)
    async with open_engine(source, {**tiers, "far": Remote(8, SIZE)}, config=CONFIG, chain=False) as engine:
        await store(engine, [b"a", b"b"])
        await store(engine, [b"c"])
        await trio.sleep(1)
        assert await told(engine, b"b") == [
            ("unavailable", "not known: no answer from far (no route to host); evicted from host 1 s ago")
        ]


async def test_silent_tiers_are_asked_side_by_side(autojump_clock):
    asked = []

    class Silent(Remote):
        async def contains(self, keys):
            asked.append(keys)
            await trio.sleep_forever()

    source, tiers = places(2)
    far = {"far": Silent(8, SIZE), "farther": Silent(8, SIZE)}
    async with open_engine(source, {**tiers, **far}, config=CONFIG, chain=False) as engine:
        began = trio.current_time()
        naming = attrs.evolve(OURS, tenant="")
        explanation = await engine.explain(TOKENS, naming=naming, others=[attrs.evolve(naming, rank=1)])
        assert trio.current_time() - began == 5.0  # call_timeout, once for all
        assert len(asked) == 2
        (_, text), *_ = [(block.cause, block.text) for block in explanation.blocks]
        assert text.startswith("not known: no answer from far (") and "and farther (" in text


# --- tokens -----------------------------------------------------------------------------------------------------------

TOKENS = list(range(12))
OURS = BlockKey(4, model="m", dtype="bf16", layout="paged", tenant="ours")


async def test_tokens_that_are_there_in_another_layout_or_under_another_salt(autojump_clock):
    fp8, rank, shared = (attrs.evolve(OURS, **change) for change in ({"dtype": "fp8"}, {"rank": 1}, {"tenant": ""}))
    async with open_engine(*places(16), config=CONFIG) as engine:
        await store(engine, fp8.keys(TOKENS)[:1])
        await store(engine, shared.keys(TOKENS)[:2])
        others = [OURS, fp8, rank, shared]
        assert await told(engine, TOKENS, naming=OURS, others=others, tenant="ours") == [
            ("other layout", "there under another layout: dtype 'fp8', in host"),
            ("other salt", "there under another salt: tenant '', in host"),
            ("unknown", "no record of it: never stored, or gone for longer than the records reach"),
        ]
        await store(engine, OURS.keys(TOKENS))
        assert (await engine.explain(TOKENS, naming=OURS, others=others, tenant="ours")).usable == 3


async def test_blocks_of_another_size_are_compared_where_they_end(autojump_clock):
    larger = attrs.evolve(OURS, block_size=6)
    async with open_engine(*places(16), config=CONFIG) as engine:
        await store(engine, larger.keys(TOKENS)[:1])
        causes = await told(engine, TOKENS, naming=OURS, others=[larger], tenant="ours")
        assert [cause for cause, _ in causes] == ["other layout", "unknown", "unknown"]
        await store(engine, larger.keys(TOKENS))
        causes = await told(engine, TOKENS, naming=OURS, others=[larger], tenant="ours")
        assert [cause for cause, _ in causes] == ["other layout"] * 3


async def test_of_other_tenants_only_an_operator_is_told(autojump_clock):
    theirs = attrs.evolve(OURS, tenant="theirs")
    async with open_engine(*places(16), config=CONFIG) as engine:
        await store(engine, theirs.keys(TOKENS))
        causes = await told(engine, TOKENS, naming=OURS, others=[theirs], tenant="ours")
        assert [cause for cause, _ in causes] == ["unknown"] * 3
        causes = await told(engine, TOKENS, naming=OURS, others=[theirs], tenant="ours", operator=True)
        assert [cause for cause, _ in causes] == ["other salt"] * 3
        with pytest.raises(PermissionError, match="only operators may"):
            await engine.explain(TOKENS, naming=theirs, tenant="ours")
        assert (await engine.explain(TOKENS, naming=theirs, operator=True)).usable == 3


async def test_what_is_asked_must_be_keys_or_tokens_with_a_naming(autojump_clock):
    async with open_engine(*places(16), config=CONFIG) as engine:
        for what, naming in ((TOKENS, None), ([b"a", 1], OURS)):
            with pytest.raises(TypeError, match="naming"):
                await engine.explain(what, naming=naming, tenant="ours")
        assert str(await engine.explain([])) == "0 of 0 blocks can be used"


async def test_an_explanation_holds_nothing_and_is_no_use_of_anything(autojump_clock):
    async with open_engine(*places(2), config=CONFIG) as engine:
        await store(engine, [b"a", b"b"])
        order = list(engine.tiers["host"].pool._policy._order)
        await engine.explain([b"b", b"a", b"x"])
        assert list(engine.tiers["host"].pool._policy._order) == order
        assert engine.tiers["host"].statistics().held_blocks == 0


async def test_cancelled_at_its_awaits_it_leaves_nothing(autojump_clock):
    class Slow(FakeTier):
        capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)

        async def contains(self, keys):
            await trio.sleep_forever()

    source, tiers = places(8)
    async with open_engine(source, {**tiers, "far": Slow(8, SIZE)}, config=CONFIG, chain=False) as engine:
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.explain(b"a")
        assert scope.cancelled_caught
        with trio.move_on_after(0.01) as scope:
            await engine.explain(b"a")
        assert scope.cancelled_caught
        assert engine.statistics().open_hits == 0


async def test_when_the_engine_has_ended_its_places_tell_it_nothing_more(autojump_clock):
    source, tiers = places(2)
    async with open_engine(source, tiers, config=CONFIG) as engine:
        await store(engine, [b"a", b"b"])
    tiers["host"].fill([b"c"])
    assert len(engine._inspector.history.tombstones) == 0
    assert tiers["host"].pool._evictions.listeners == source.pool._evictions.listeners == ()


def test_a_thread_that_knows_no_trio_is_told_the_same():
    source, tiers = places(8)
    source.fill(OURS.keys(TOKENS))
    with from_thread.open_engine(source, tiers, config=CONFIG) as engine:
        engine.store(source.weak(OURS.keys(TOKENS)[:2]), precondition=NO_WAIT).result()
        assert str(engine.explain(OURS.keys(TOKENS)[0])) == "in host"
        assert engine.explain(TOKENS, naming=OURS, tenant="ours").usable == 2
        with pytest.raises(PermissionError):
            engine.explain(TOKENS, naming=OURS)


# --- faults planted ---------------------------------------------------------------------------------------------------


def planted_evictions_are_told_to_nobody(patch):
    patch.setattr(BlockPool, "on_evicted", lambda self, listener: lambda: None)


def planted_refusals_are_forgotten(patch):
    from offload._engine.history import History

    patch.setattr(History, "watch_pipeline", lambda self, name, pipeline: None)


def planted_other_tenants_are_told(patch):
    from offload._engine import explain

    patch.setattr(explain, "allowed", lambda makers, tenant, operator: list(makers))


def planted_deletions_are_forgotten(patch):
    from offload._engine.history import History

    patch.setattr(History, "deleted", lambda self, name, keys, why="": None)


@pytest.mark.parametrize(
    ("plant", "finds"),
    [
        (planted_evictions_are_told_to_nobody, test_when_it_was_evicted_and_from_where),
        (planted_refusals_are_forgotten, test_what_a_policy_kept_back),
        (planted_other_tenants_are_told, test_of_other_tenants_only_an_operator_is_told),
        (planted_deletions_are_forgotten, test_what_was_deleted),
    ],
    ids=lambda value: value.__name__.removeprefix("planted_") if value.__name__.startswith("planted") else "found",
)
async def test_a_planted_fault_is_found(plant, finds, autojump_clock, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        await finds(autojump_clock)


def test_a_memory_tier_tells_of_its_evictions_too():
    tier, gone = MemoryTier(2 * SIZE, SIZE), []
    tier.on_evicted(gone.extend)
    for key in (b"a", b"b", b"c"):
        tier.put(key, key * SIZE)
    assert len(gone) == 1
