"""Promises of a cache, each with the scenarios that test it. Pure.

A promise needs seams: for a system that lacks one, the promise is not judged. The judgements of every run (bytes, the
model, the invariants, that it ends) are not repeated here; a scenario only adds its own expectations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from ._program import (
    After,
    Expect,
    Fault,
    KeysStep,
    LoadStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Seam,
    Step,
    StoreStep,
    TierSpec,
    Window,
)
from ._variants import Action

TIMES: Final = range(9)
"""Virtual milliseconds of the trials without a hook.

From before a copy to after it.
"""
LATE: Final = 2_048
"""Virtual milliseconds after which everything is over.

The time is virtual, so that it costs nothing.
"""


@attrs.frozen
class Promise:
    """A promise of a cache."""

    short: str
    """Short name, for names of files."""
    name: str
    needs: tuple[Seam, ...]
    trials: tuple[Scenario, ...]
    explored: bool = False
    """Whether its trial is repeated with each of ``actions`` at every hook."""
    actions: tuple[Action, ...] = ()

    def lacking(self, seams: Sequence[Seam]) -> list[Seam]:
        """Return the needed seams that a system lacks."""
        return [seam for seam in self.needs if seam not in seams]


def promises() -> list[Promise]:
    """Return all promises, in the order of presentation."""
    return list(_promises())


def _promises() -> Iterator[Promise]:
    yield _promise("stored", "what was stored is loaded, byte for byte", (), [_stored()])
    yield _promise(
        "missed", "what nobody stored is missed", (), [_load("nobody.0, nobody.1", count={"loaded": 0, "missed": 2})]
    )
    yield _promise(
        "twice", "the same keys twice, together or one after the other", (), [_twice(0), _twice(1), _twice(LATE)]
    )
    yield _promise("many", "several containers in one call", ("store_many",), [_many()])
    yield _promise("crowded", "more than fits in", (), [_crowded()])
    yield _promise(
        "cancel", "a cancel at any time is confirmed, and leaves nothing behind", (), _each_time("cancel", who="b")
    )
    yield _promise("waiter", "who stops waiting changes nothing", (), _each_time("cancel_waiter", who="b"))
    yield _promise("host", "the scope around it may be cancelled at any time", (), _each_time("cancel_host"))
    base = _scenario("every cancel at every hook", [_four()])
    yield _promise(
        "cancel-at-hook", "a cancel at any hook is confirmed, and leaves nothing behind", ("hook",), [base], ("cancel",)
    )
    yield _promise(
        "host-at-hook", "the scope around it may be cancelled at any hook", ("hook",), [base], ("cancel_host",)
    )
    yield _promise(
        "fail", "a copy that fails fails whom it belongs to, and can be tried again", ("copy",), _again("fail")
    )
    yield _promise("torn", "half a block is never found", ("copy",), _again("torn"))
    yield _promise("flip", "a flipped bit is never handed out", ("copy",), [_flipped()])
    yield _promise("slow", "a copy that takes long is waited for", ("copy",), [_slow("stall"), _slow("delay")])
    yield _promise(
        "duplicate",
        "an end that is told twice, or in another order, is one end",
        ("copy",),
        [_slow("duplicate", settles=False), _slow("reorder")],
    )
    yield _promise("silent", "a copy whose end is never told can be given up", ("copy",), [_silent()])
    yield _promise("peer-death", "a tier that dies and comes back", ("copy",), [_slow("peer_death", settles=False)])
    yield _promise(
        "full", "without room it waits, refuses or fails, and goes on", ("reserve",), [_slow("full", settles=False)]
    )
    yield _promise("after", "no byte is read before it may be", ("after",), list(_preconditions()))
    yield _promise("policy", "what a policy keeps back is not stored", ("policy",), [_kept_back()])
    yield _promise("shutdown", "a shutdown at any time ends everything", ("close_now",), _each_time("shut_down"))
    yield _promise(
        "shutdown-at-hook", "a shutdown at any hook ends everything", ("close_now", "hook"), [base], ("shut_down",)
    )
    yield _promise("evict", "keys that leave the source meanwhile", ("evict",), _each_time("evict", keys="b.0"))
    yield _promise("delete", "what was deleted is missed", ("delete",), [_deleted()])
    crowd = [_store("b{0..15}", LATE + 2, per=2)]
    yield _promise("hold", "what a reader holds stays, whoever needs the room", ("hold",), [_held(crowd)])
    gone = [Step(at_ms=LATE + 2, delete=KeysStep(keys="a.0")), Step(at_ms=LATE + 3, load=LoadStep(keys="a.1"))]
    yield _promise("hold-deleted", "what a reader holds stays, whoever deletes it", ("hold", "delete"), [_held(gone)])
    yield _promise(
        "drain",
        "drained is drained",
        ("drain",),
        [_scenario("drain with work inside", [_four(), Step(at_ms=1, drain="main")])],
    )


def _promise(
    short: str, name: str, needs: tuple[Seam, ...], trials: Sequence[Scenario], actions: tuple[Action, ...] = ()
) -> Promise:
    return Promise(short, name, needs, tuple(trials), bool(actions), actions)


# --- the scenarios ------------------------------------------------------------------------------------------------


def _scenario(name: str, steps: Sequence[Step], faults: Sequence[Fault] = (), **rest: Any) -> Scenario:
    tier = rest.pop("tier", {"host": TierSpec(capacity=64, latency_ms=2)})
    return Scenario(name=name, tier=tier, step=list(steps), fault=list(faults), **rest)


def _store(label: str, at_ms: int = 0, **rest: Any) -> Step:
    return Step(at_ms=at_ms, store=StoreStep(id=label, **rest))


def _four() -> Step:
    return _store("a, b, c, d", per=2)


def _ended(**ends: str) -> list[Expect]:
    return [Expect(status=dict(ends))]  # type: ignore[arg-type]


def _load(keys: str, **expected: Any) -> Scenario:
    return _scenario("load what is not there", [Step(load=LoadStep(keys=keys))], expect=[Expect(**expected)])


def _stored() -> Scenario:
    steps = [_four(), Step(at_ms=LATE, load=LoadStep(keys="a.0, a.1, b.0, b.1, c.0, d.1"))]
    ends = Expect(status=dict.fromkeys("abcd", "COMPLETE"))
    return _scenario("store, then load", steps, expect=[ends, Expect(count={"loaded": 6})])


def _many() -> Scenario:
    steps = [
        _store("a, b, c", per=2, how="many"),
        _store("d, e", 3, keys="d.0, a.1, a.1, e.0", per=2, how="many"),
        Step(at_ms=LATE, load=LoadStep(keys="a.0, a.1, b.1, c.0, d.0, e.0")),
    ]
    return _scenario("three in one call, then two", steps, expect=[Expect(count={"loaded": 6})])


def _twice(later: int) -> Scenario:
    steps = [
        _store("a", keys="k0, k1, k2", per=3),
        _store("b", later, keys="k1, k2, k3", per=3),
        Step(at_ms=2 * LATE, load=LoadStep(keys="k0, k1, k2, k3")),
    ]
    return _scenario(f"the same keys again {later} ms later", steps, expect=_ended(a="COMPLETE", b="COMPLETE"))


def _crowded() -> Scenario:
    steps = [_store("a{0..15}", per=2), Step(at_ms=LATE, load=LoadStep(keys="a0.0, a7.1, a15.0"))]
    return _scenario("32 blocks for 8 places", steps, tier={"host": TierSpec(capacity=8, latency_ms=2)})


def _each_time(do: Any, **about: Any) -> list[Scenario]:
    return [
        _scenario(
            f"{do} at {at_ms} ms",
            [
                _store("a, b, c", per=2),
                _store("d", 3, per=2),
                Step(at_ms=LATE, load=LoadStep(keys="a.0, b.0")),
            ],
            [Fault(do=do, at_ms=at_ms, **about)],
        )
        for at_ms in TIMES
    ]


def _again(do: Any) -> list[Scenario]:
    """Return a trial in which a store fails, and its retry succeeds.

    A block of b has the fault.
    """
    steps = [
        _store("a, b, c", per=2),
        _store("again", LATE, keys="b.0, b.1", per=2),
        Step(at_ms=LATE // 2, load=LoadStep(keys="a.0, b.0, b.1")),
        Step(at_ms=2 * LATE, load=LoadStep(keys="b.0, b.1")),
    ]
    fault = Fault(do=do, at_ms=0, keys="b.0", for_ms=LATE // 4)
    ends = _ended(b="FAILED", again="COMPLETE")
    return [_scenario(f"{do}, then again", steps, [fault], expect=ends)]


def _flipped() -> Scenario:
    steps = [_store("a, b", per=2), Step(at_ms=LATE, load=LoadStep(keys="a.0, a.1, b.0, b.1"))]
    return _scenario("a bit flips", steps, [Fault(do="flip", at_ms=0, keys="b.0")])


def _slow(do: Any, *, settles: bool = True) -> Scenario:
    steps = [_four(), _store("e", LATE, per=2), Step(at_ms=2 * LATE, load=LoadStep(keys="a.0, d.1, e.0"))]
    ends = dict.fromkeys("abcde" if settles else "e", "COMPLETE")
    faults = [Fault(do=do, at_ms=0, for_ms=40, ms=20 if do == "delay" else 1)]
    return _scenario(f"{do} for 40 ms", steps, faults, expect=_ended(**ends))


def _silent() -> Scenario:
    faults = [Fault(do="drop", at_ms=0, for_ms=1), Fault(do="cancel", at_ms=LATE, who="a")]
    return _scenario("no end of a copy, then a cancel", [_store("a", per=2), _store("b", 2 * LATE)], faults)


def _preconditions() -> Iterator[Scenario]:
    at_40 = Window(event="a ended", at_least_ms=40)
    steps = [_store("a", after=[After(event="e")]), Step(at_ms=40, fire="e")]
    yield _scenario("not before the event", steps, expect=[*_ended(a="COMPLETE"), Expect(time=[at_40])])
    raising = [_store("a", after=[After(ms=3, do="raise", made_of="async")]), _store("b", 0)]
    yield _scenario("it never will be", raising, expect=_ended(a="FAILED", b="COMPLETE"))
    never = [_store("a", after=[After(do="never")]), _store("b", 1)]
    faults = [Fault(do="cancel", at_ms=20, who="a")]
    yield _scenario("a cancel while it waits", never, faults, expect=_ended(a="CANCELLED", b="COMPLETE"))


def _kept_back() -> Scenario:
    steps = [_store("a", keys="k0, k1", per=2), Step(at_ms=LATE, load=LoadStep(keys="k0, k1"))]
    main = PipelineSpec(to="host", policies=[PolicySpec(do="reject", keys="k1")])
    return _scenario(
        "one of two is kept back", steps, pipeline={"main": main}, expect=[Expect(count={"loaded": 1, "missed": 1})]
    )


def _deleted() -> Scenario:
    steps = [
        _store("a, b", per=2),
        Step(at_ms=LATE, delete=KeysStep(keys="a.0")),
        Step(at_ms=2 * LATE, load=LoadStep(keys="a.0, a.1, b.0")),
    ]
    return _scenario("delete one of four", steps, expect=[Expect(count={"loaded": 2, "missed": 1})])


def _held(meanwhile: Sequence[Step]) -> Scenario:
    """Return a trial whose reader holds two blocks for a while.

    Every run with a hold checks that they are unchanged at its end.
    """
    steps = [
        _store("a", per=2),
        Step(at_ms=LATE, load=LoadStep(id="reader", keys="a.0, a.1", hold_ms=100)),
        *meanwhile,
    ]
    held = Expect(order=["a ended", "reader loaded"])
    return _scenario("read, hold, read again", steps, tier={"host": TierSpec(capacity=8, latency_ms=2)}, expect=[held])
