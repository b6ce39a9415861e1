"""The standard mix of the fuzz."""

import subprocess
import sys
from collections import Counter
from functools import cache

from offload.instruments import HOOKS
from offload.testing.scenarios import check, expand, generate, play
from offload.testing.scenarios._generate import SPAN
from offload.testing.scenarios._names import keys_of, routes_of, stores_of
from offload.testing.scenarios._program import FAULT_KINDS

SEEDS = range(400)


@cache
def programs():
    return [generate(seed) for seed in SEEDS]


@cache
def played():
    """How the first of them went."""
    return [play(program) for program in programs()[:120]]


def test_whatever_is_generated_makes_sense():
    assert [(program.seed, check(program)) for program in programs() if check(program)] == []


def test_a_seed_is_one_program_in_any_process():
    code = "from offload.testing.scenarios._generate import generate; print([repr(generate(s)) for s in range(20)])"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": one}, capture_output=True, text=True, check=True
        ).stdout
        for one in ("1", "2")
    }
    assert said == {f"{[repr(program) for program in programs()[:20]]}\n"}


def test_programs_differ():
    assert len({repr(program) for program in programs()}) == len(programs())


def test_about_forty_four_faults_are_planned():
    assert 40 < sum(len(program.fault) for program in programs()) / len(programs()) < 50


def test_every_kind_of_fault_occurs_at_times_and_at_hooks():
    kinds = Counter([(fault.do, bool(fault.at_hook)) for program in programs() for fault in program.fault])
    drawn = FAULT_KINDS.keys() - {"slow_loads"}  # of an engine's loads
    assert {kind for kind, _ in kinds} == drawn
    assert {kind for kind, at_hook in kinds if at_hook} == drawn - {"abandon"}
    assert {fault.at_hook for program in programs() for fault in program.fault} == {*HOOKS, ""}


def test_no_program_has_every_kind_of_fault_for_an_excuse():
    assert max(len({fault.do for fault in program.fault}) for program in programs()) < len(FAULT_KINDS)


def test_every_verb_policy_and_way_of_storing_occurs():
    steps = [step for program in programs() for step in program.step]
    for verb in ("store", "load", "fire", "evict", "delete", "drain", "release", "close"):
        assert any(getattr(step, verb) is not None for step in steps)
    stores = [store for program in programs() for store in stores_of(program)]
    assert {(store.kind, store.how) for store in stores} == {
        (kind, how) for kind in ("weak", "strong", "external") for how in ("wait", "now", "many")
    }  # fmt: skip
    assert {len(keys) for store in stores for keys in keys_of(store).values()} >= {0, 1, 2, 3, 4, 6}
    assert {after.do for store in stores for after in store.after} == {"fire", "raise", "never"}
    assert {after.made_of for store in stores for after in store.after} == {"trio", "thread", "async", "stubborn"}
    assert any(store.any_of for store in stores) and any(len(store.after) > 2 for store in stores)
    assert any(after.event for store in stores for after in store.after)
    policies = [policy for program in programs() for policy in program.pipeline["main"].policies]
    assert {policy.do for policy in policies} == {"reject", "present", "sleep", "raise", "lock", "cancel", "hang"}
    assert {(policy.do, policy.at_once) for policy in policies if policy.ms} == {
        (do, share) for do in ("sleep", "raise", "lock") for share in (0.0, 0.5, 1.0)
    }
    assert {step.close.how for step in steps if step.close} == {"leave", "close", "cancel", "raise"}
    assert {step.evict.again for step in steps if step.evict} == {True, False}


def test_several_are_stored_in_one_call():
    several = [
        store
        for program in programs()
        for store in stores_of(program)
        if store.how == "many" and len(keys_of(store)) > 1
    ]
    assert {store.kind for store in several} == {"weak", "strong"}


def test_copies_answer_for_too_many_or_too_few_and_what_they_raise_may_come_in_a_group():
    faults = [fault for program in programs() for fault in program.fault]
    by = {fault.by for fault in faults if fault.do == "miscount"}
    assert min(by) < 0 < max(by)
    assert {fault.do for fault in faults if fault.grouped} == {"fail", "torn", "unproven", "drop"}
    assert any(fault.times > 1 for fault in faults)


def test_readers_hold_what_they_have_found_while_others_store_delete_and_damage_it():
    longest, beside, deleted, flipped = 0, 0, 0, 0
    for program in programs():
        holds = [(step.at_ms, step.at_ms + step.load.hold_ms, {*expand(step.load.keys)})
                 for step in program.step if step.load is not None and step.load.hold_ms]  # fmt: skip
        longest += any(end - start > SPAN // 2 and start < SPAN // 2 for start, end, _ in holds)
        beside += any(
            first is not other and first[0] <= other[0] < first[1] and first[2] & other[2]
            for first in holds
            for other in holds
        )
        gone = [(step.at_ms, {*expand(step.delete.keys)}) for step in program.step if step.delete is not None]
        damaged = [(one.at_ms, {*expand(one.keys)}) for one in program.fault if one.do == "flip" and not one.at_hook]
        deleted += any(start <= at < end and held & keys for at, keys in gone for start, end, held in holds)
        flipped += any(start <= at < end and held & keys for at, keys in damaged for start, end, held in holds)
    assert min(longest, beside, deleted, flipped) > len(programs()) / 8, (longest, beside, deleted, flipped)


def test_chains_have_one_route_or_two_side_by_side_or_one_behind_the_other():
    chains = Counter(
        [(len(routes_of(program.pipeline["main"])), any(one.source == "disk" for one in program.pipeline.values()))
         for program in programs()]
    )  # fmt: skip
    assert chains[1, False] > 20 and chains[2, False] > 20 and chains[1, True] > 8
    optional = [len(program.pipeline["main"].optional_chain) for program in programs()]
    assert optional.count(1) > 20 and optional.count(2) > 2
    assert chains[0, False] > 250, "most have none, since a chain costs time"


def test_twins_and_routes_occur_and_so_does_every_choice_of_a_knob():
    assert {tuple(program.pipeline) for program in programs()} >= {
        ("main",), ("main", "twin"), ("main", "route"), ("main", "twin", "route")
    }  # fmt: skip
    mains = [program.pipeline["main"] for program in programs()]
    assert {main.on_destination_full for main in mains} == {"wait", "evict", "partial", "fail"}
    assert {main.on_policy_error for main in mains} == {"filter", "fail"}
    assert {main.on_overflow for main in mains} == {"wait", "drop"}
    for name in (
        "flush_ms",
        "policy_ms",
        "max_waiting_policies",
        "precondition_ms",
        "drain_ms",
        "max_concurrent_transfers",
    ):
        assert len({getattr(main, name) for main in mains}) > 2


def test_blocks_that_an_engine_keeps_alive_are_never_taken_away():
    for program in programs():
        external = [store for store in stores_of(program) if store.kind == "external"]
        kept = {key for store in external for keys in keys_of(store).values() for key in keys}
        taken = [step.evict.keys for step in program.step if step.evict]
        taken += [fault.keys for fault in program.fault if fault.do == "evict"]
        assert all(taken)
        assert kept.isdisjoint({key for keys in taken for key in expand(keys)})


def test_many_things_fall_together():
    together = 0
    for program in programs():
        times = Counter(
            [step.at_ms for step in program.step] + [one.at_ms for one in program.fault if one.at_ms is not None]
        )
        together += sum(count for count in times.values() if count > 1)
    assert together / len(programs()) > 12


def test_about_twenty_faults_hit_something_alive_and_nothing_goes_wrong():
    reports = played()
    assert [(report.seed, report.violations) for report in reports if report.violations] == []
    assert sum(sum(report.fired.values()) for report in reports) / len(reports) > 17
    fired = Counter([kind.split(" at ")[0] for report in reports for kind in report.fired])
    assert len(fired) > 14
    assert fired["abandon"] > 15 and fired["reorder"] > 8, "they need others in the right places"


def test_a_good_share_of_what_is_read_is_found():
    loaded, missed = (sum(report.counts[what] for report in played()) for what in ("loaded", "missed"))
    assert 0.3 < loaded / (loaded + missed) < 0.8
