"""The oracle for any system: a small cache of another kind passes, and with one thing wrong it does not."""

import pytest

from offload.testing.scenarios import (
    After,
    Fault,
    KeysStep,
    LoadStep,
    Outcome,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    play,
)
from offload.testing.scenarios._rng import Rng
from offload.testing.scenarios._trace import NoOutcome, outcome_of
from tests.support.scenario_systems import BROKEN, factory, open_cache

SHARED = [f"k{i}" for i in range(6)]
HOOKS = ["before_commit", "committed", "settled"]
KINDS = [
    "cancel", "cancel", "cancel_waiter", "fail", "stall", "delay", "flip", "full", "duplicate", "reorder", "torn",
    "peer_death", "clock",
]  # fmt: skip


def program(seed):
    """A random program that uses only what the small cache has."""
    rng = Rng(seed)
    n = 2 + rng.below(6, "stores")
    steps = [_store(rng, i) for i in range(n)]
    steps += [
        Step(at_ms=rng.below(24, "load", i), load=LoadStep(keys=", ".join(SHARED)))
        for i in range(rng.below(4, "loads"))
    ]
    if rng.chance(0.3, "delete"):
        steps.append(Step(at_ms=rng.below(24, "delete at"), delete=KeysStep(keys="k0, k1")))
    if rng.chance(0.2, "drain"):
        steps.append(Step(at_ms=rng.below(24, "drain at"), drain="main"))
    policies = [PolicySpec(do="reject", keys="k5"), PolicySpec(do="sleep", ms=1)] if rng.chance(0.3, "policy") else []
    return Scenario(
        name=f"any {seed}",
        seed=seed,
        limit_ms=60_000,
        tier={"host": TierSpec(capacity=rng.pick([3, 16], "capacity"), latency_ms=rng.below(4, "latency"))},
        pipeline={"main": PipelineSpec(to="host", policies=policies)},
        step=sorted(steps, key=lambda step: step.at_ms),
        fault=[_fault(rng, n, i) for i in range(rng.below(8, "faults"))],
    )


def _store(rng, i):
    keys = [key for key in SHARED if rng.chance(0.4, "key", i, key)]
    made_of = rng.pick(["trio", "async", "thread", "stubborn"], "as", i)
    after = [After(ms=rng.below(8, "after", i), made_of=made_of)] if rng.chance(0.3, "waits", i) else []
    store = StoreStep(id=f"s{i}", keys=", ".join(keys), per=len(keys) or 1, after=after)
    return Step(at_ms=rng.below(10, "at", i), store=store)


def _fault(rng, n, i):
    kind = rng.pick(KINDS, "kind", i)
    told = {"do": kind}
    if kind.startswith("cancel"):
        told["who"] = f"s{rng.below(n, 'who', i)}"
    elif kind == "clock":
        told["ms"] = 2
    elif kind != "flip":
        told["for_ms"] = 1 + rng.below(6, "for", i)
    if rng.chance(0.5, "at a hook", i):
        told |= {"at_hook": rng.pick(HOOKS, "hook", i), "visit": 1 + rng.below(3, "visit", i)}
    else:
        told["at_ms"] = rng.below(20, "fault at", i)
    return Fault(**told)


def test_a_correct_cache_has_nothing_wrong():
    fired = 0
    for seed in range(150):
        report = play(program(seed), factory=open_cache)
        assert report.violations == (), seed
        fired += sum(report.fired.values())
    assert fired > 150


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_one_thing_wrong_is_found_by_its_rule(kind):
    for seed in range(150):
        report = play(program(seed), factory=factory(kind))
        if any(violation.rule == BROKEN[kind] for violation in report.violations):
            return
    raise AssertionError(f"{kind.__doc__} None of 150 seeds found it")


def test_what_another_system_did_is_in_its_trace():
    scenario = Scenario(
        name="one",
        tier={"host": TierSpec(latency_ms=3)},
        step=[Step(store=StoreStep(id="a", keys="k0, k1", per=2)), Step(at_ms=9, load=LoadStep(id="l", keys="k0, k7"))],
        fault=[Fault(do="cancel", at_hook="committed", who="a")],
    )
    report = play(scenario, factory=open_cache)
    assert report.violations == ()
    lines = [moment.line() for moment in report.moments]
    assert lines[:10] == [
        "0\tstep\tasked\ta\t\t",
        "0\tstep\ttaken\ta\t\t",
        "0\thook\tbefore_commit\ta\t\t",
        "0\thook\tcommitted\ta\t\t",
        "0\tfault\tcancel\ta\t\t",
        "0\tstep\tcancel asked\ta\t\t",
        "0\ttier\tcopy\ta\thost\tk0,k1",
        "3\ttier\tcopied\ta\thost\tk0,k1",
        "3\thook\tsettled\ta\t\t",
        "3\tend\tended\ta\tmain\tCOMPLETE",
    ]
    assert sorted(lines[10:12]) == ["3\tstep\tconfirmed\ta\t\t", "3\tstep\twaited\ta\t\t"]
    assert lines[12:] == ["9\tstep\tloaded\tl\thost\tk0", "9\tstep\tmissed\tl\thost\tk7"]
    assert report.counts["copied"] == 2
    assert report.reached >= {"hook committed", "state COMPLETE"}


def test_what_a_cache_copies_must_be_what_the_key_stands_for():
    from tests.support.scenario_systems import Cache

    class Garbles(Cache):
        async def copied(self, keys, filtered):
            await self.world.copy(self.tier, keys, [bytes(64) for _ in keys])
            return await super().copied(keys, filtered)

    report = play(
        Scenario(name="x", tier={"host": TierSpec()}, step=[Step(store=StoreStep(id="a"))]), factory=factory(Garbles)
    )
    assert {violation.rule for violation in report.violations} >= {"bytes"}


def test_a_system_that_raises_when_it_is_opened_is_a_crash():
    def broken(world):
        raise ZeroDivisionError("no cache today")

    report = play(Scenario(name="x"), factory=broken)
    assert [violation.rule for violation in report.violations] == ["crash"]
    assert "no cache today" in report.violations[0].text


def test_a_result_is_read_from_any_object_with_a_status():
    class Result:
        status = "FAILED"
        failed = {b"k": OSError("no")}  # noqa: RUF012
        error = TimeoutError()

    assert outcome_of(Result()) == Outcome("FAILED", failed={b"k": "OSError"}, error="TimeoutError")
    assert outcome_of(Outcome("COMPLETE")) == Outcome("COMPLETE")
    with pytest.raises(NoOutcome, match="one of COMPLETE, CANCELLED, FAILED, not 'done'"):
        outcome_of(type("Odd", (), {"status": "done"})())
