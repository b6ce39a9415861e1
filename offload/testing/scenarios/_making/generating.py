"""The standard mix of the fuzz: a random program for each seed. Pure.

Rule 1. Each choice is drawn by its site (:class:`Dice`), never from a stream.
Rule 2. Times are few and whole, so that many fall together. What goes wrong is aimed by :class:`Faults`.
Rule 3. What comes out passes :func:`check`.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import msgspec

from .._dice import Dice
from .._names import compress
from .._program import (
    After,
    CloseStep,
    KeysStep,
    LoadStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    WhenFull,
)
from .aiming import SHARED, Faults, Put, some

BLOCK_BYTES: Final = 16
SPAN: Final = 24
"""Stores fall into so many virtual milliseconds."""
AMPLE: Final = 200
"""A capacity that is never used up."""
AMPLE_BUDGET: Final = 4_096


def generate(seed: int) -> Scenario:
    """The program of a seed."""
    return _Draft(Dice(seed)).scenario()


@attrs.define
class _Draft:
    """A program while it is being written."""

    dice: Dice
    puts: list[Put] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)

    def scenario(self) -> Scenario:
        dice = self.dice
        twin, route = dice.chance(0.2, "twin"), dice.chance(0.15, "route")
        capacity = dice.pick([4, 8, 16, AMPLE, AMPLE, AMPLE], "capacity")
        main = self._main(["route"] if route else [], capacity)
        pipelines = {"main": main}
        if twin:
            pipelines["twin"] = self._twin()
        self._stores(twin)
        tiers = self._tiers(route, capacity)
        if route:
            timeout = dice.pick([4, 100], "route timeout")
            pipelines["route"] = PipelineSpec(source="host", to="disk", destination_ms=timeout)
        pipelines["main"] = msgspec.structs.replace(main, policies=self._policies())
        self._disturb(route)
        slots = 2 if twin else main.max_concurrent_transfers or 1
        return Scenario(
            name=f"seed {dice.seed}",
            seed=dice.seed,
            tier=tiers,
            pipeline=pipelines,
            step=sorted(self.steps, key=lambda step: step.at_ms),
            fault=Faults(dice, self.puts, route, slots, tight=pipelines["main"].budget_blocks != AMPLE_BUDGET).all(),
        )

    # -- the house -----------------------------------------------------------------------------------------------------

    def _main(self, chain: list[str], capacity: int) -> PipelineSpec:
        dice = self.dice
        budget = dice.pick([8, 16, 24, AMPLE_BUDGET, AMPLE_BUDGET], "budget")
        most = min(dice.pick([1, 2, 4, 8, 16], "max_batch_size"), budget)
        full: tuple[WhenFull, ...] = ("wait", "wait", "evict", "partial", "fail")
        if capacity < AMPLE:  # nobody deletes as much as is stored
            full = ("wait", "evict", "evict", "partial", "fail")
        return PipelineSpec(
            to="host",
            chain=chain,
            max_batch_size=most,
            min_batch_size=1 + dice.below(most, "min_batch_size"),
            flush_ms=dice.pick([0, 1, 4, 10], "flush_interval"),
            policy_ms=dice.pick([2, 4, 40], "policy_timeout"),
            on_policy_error=dice.pick(["filter", "fail"], "on_policy_error"),
            max_waiting_policies=dice.pick([1, 2, 64], "max_waiting_policies"),
            precondition_ms=dice.pick([8, 20, 200, 200, 200], "precondition_timeout"),
            max_concurrent_transfers=dice.pick([1, 1, 2, 3], "slots"),
            on_destination_full=dice.pick(full, "full"),
            destination_ms=dice.pick([4, 10, 100, 100], "destination_timeout"),
            transfer_ms=dice.pick([6, 20, *[1000] * 10], "transfer_timeout"),
            drain_ms=dice.pick([0, 4, 100, 1000], "drain_timeout"),
            budget_blocks=budget,
            on_overflow=dice.pick(["wait", "wait", "drop"], "overflow"),
        )

    def _twin(self) -> PipelineSpec:
        dice = self.dice
        return PipelineSpec(
            to="host",
            destination_ms=dice.pick([4, 100], "twin timeout"),
            flush_ms=dice.pick([0, 4], "twin flush"),
            max_concurrent_transfers=1 + dice.below(2, "twin slots"),
            on_destination_full=dice.pick(["wait", "evict", "partial", "fail"], "twin full"),
        )

    def _tiers(self, route: bool, capacity: int) -> dict[str, TierSpec]:
        dice = self.dice
        held = some(dice, SHARED, 0.2, "held") if dice.chance(0.2, "holds") else []
        tiers = {
            "device": TierSpec(capacity=512, block_bytes=BLOCK_BYTES),
            "host": TierSpec(
                capacity=capacity,
                block_bytes=BLOCK_BYTES,
                latency_ms=dice.pick([0, 1, 1, 2, 3, 5], "latency"),
                bytes_per_ms=dice.pick([0, 0, BLOCK_BYTES, 4 * BLOCK_BYTES], "bandwidth"),
                holds=compress(held[:capacity]),
            ),
        }
        if route:
            tiers["disk"] = TierSpec(
                capacity=dice.pick([4, AMPLE], "route capacity"),
                block_bytes=BLOCK_BYTES,
                latency_ms=dice.below(4, "route latency"),
            )
        return tiers

    def _policies(self) -> list[PolicySpec]:
        return [self._policy(i) for i in range(self.dice.pick([0, 0, 1, 1, 2, 3], "policies"))]

    def _policy(self, i: int) -> PolicySpec:
        dice, where = self.dice, ("policy", i)

        def keys_with(p: float) -> str:
            known = dict.fromkeys([*SHARED, *[key for put in self.puts for key in put.keys]])
            return compress(some(dice, [*known], p, *where, "keys") or SHARED[:1])

        kinds = ["present", "reject", "sleep", "raise", "lock", "lock now", "cancel", "hang"]
        match dice.pick(kinds, *where):
            case "present":
                return PolicySpec(do="present", tier="host")
            case "reject":
                return PolicySpec(do="reject", keys=keys_with(0.25))
            case "sleep":
                return PolicySpec(do="sleep", ms=1 + dice.below(6, *where, "ms"), keys=keys_with(0.2))
            case "raise":
                return PolicySpec(do="raise", keys=keys_with(0.08), ms=dice.pick([0, 0, 1, 3], *where, "ms"))
            case "lock":
                return PolicySpec(do="lock", ms=1 + dice.below(4, *where, "ms"), p=0.5)
            case "lock now":
                return PolicySpec(do="lock")
            case "cancel":
                who = [put.label for put in self.puts if dice.chance(0.3, *where, put.label)]
                return PolicySpec(do="cancel", who=compress(who or [self.puts[0].label]), p=0.2)
            case _:
                return PolicySpec(do="hang", keys=keys_with(0.03))

    # -- the load ------------------------------------------------------------------------------------------------------

    def _stores(self, twin: bool) -> None:
        dice = self.dice
        for i in range(4 + dice.below(18, "stores")):
            where = ("store", i)
            pipeline = "twin" if twin and dice.chance(0.4, *where, "twin") else ""
            self._store(f"s{i}", dice.below(SPAN, *where, "at"), where, pipeline)
        if dice.chance(0.25, "burst"):
            labels = [f"b{i}" for i in range(2 + dice.below(6, "burst", "many"))]
            at, per = dice.below(SPAN, "burst", "at"), 1 + dice.below(3, "burst", "per")
            self.puts += [Put(label, at, tuple([f"{label}.{n}" for n in range(per)])) for label in labels]
            how: Any = dice.pick(["wait", "now"], "burst", "how")
            self._at(at, store=StoreStep(id=compress(labels), per=per, how=how))

    def _store(self, label: str, at: int, where: tuple[object, ...], pipeline: str) -> None:
        dice = self.dice
        kind: Any = dice.pick(["weak", "weak", "weak", "strong", "external"], *where, "kind")
        n = dice.pick([0, 1, 1, 2, 2, 3, 4, 6], *where, "n")
        own = kind == "external" or n == 0 or dice.chance(0.5, *where, "own")
        start = dice.below(len(SHARED), *where, "start")
        keys = [f"{label}.{i}" for i in range(n)] if own else [*SHARED, *SHARED][start : start + n]
        after, any_of = self._after(label, at, where)
        step = StoreStep(
            id=label,
            keys="" if own else compress(keys),
            per=n,
            kind=kind,
            pipeline=pipeline,
            how=dice.pick(["now", "wait", "wait"], *where, "how"),
            after=after,
            any_of=any_of,
        )
        self._at(at, store=step)
        self.puts.append(Put(label, at, tuple(keys), kept=kind == "external"))

    def _after(self, label: str, at: int, where: tuple[object, ...]) -> tuple[list[After], bool]:
        """What must hold before a container may be read, and whether one of it is enough."""
        dice = self.dice
        ms = dice.below(dice.pick([6, 12, 30], *where, "opens within"), *where, "opens")
        kinds = [*["none"] * 8, "set", "trio", "thread", "sleep", "raise", "never", "all", "any", "stubborn", "shared"]
        match dice.pick(kinds, *where, "precondition"):
            case "none":
                return [], False
            case "set":
                return [After(made_of=dice.pick(["trio", "thread", "async"], *where, "as"))], False
            case "trio" | "thread" as made_of:
                if dice.chance(0.5, *where, "by an event"):
                    self._at(at + ms, fire=f"e-{label}")
                    return [After(event=f"e-{label}", made_of=made_of)], False
                return [After(ms=ms, made_of=made_of)], False
            case "sleep":
                return [After(ms=ms, made_of="async")], False
            case "raise":
                return [After(ms=ms, do="raise", made_of=dice.pick(["async", "stubborn"], *where, "as"))], False
            case "never":
                return [After(do="never", made_of=dice.pick(["trio", "async"], *where, "as"))], False
            case "all":
                return [After(ms=ms), After(ms=max(ms - 1, 0), made_of="thread"), After(ms=ms, made_of="async")], False
            case "any":
                return [After(ms=ms), After(do="never"), After(ms=ms, made_of="stubborn")], True
            case "stubborn":
                return [After(ms=ms, made_of="stubborn")], False
            case _:
                self._at(dice.below(40, "shared event"), fire="e")
                return [After(event="e")], False

    def _disturb(self, route: bool) -> None:
        """What else is done meanwhile: it takes away, reads, waits, and ends."""
        dice = self.dice
        for i in range(dice.below(4, "evictions")):
            keys = some(dice, SHARED, 0.4, "evict", i, "keys")
            if keys:
                again = dice.chance(0.5, "evict", i, "again")
                self._at(dice.below(40, "evict", i), evict=KeysStep(keys=compress(keys), again=again))
        for i in range(dice.below(3, "deletions")):
            keys = some(dice, SHARED, 0.5, "delete", i, "keys")
            if keys:
                tier = "disk" if route and dice.chance(0.3, "delete", i, "tier") else ""
                self._at(dice.below(60, "delete", i), delete=KeysStep(tier=tier, keys=compress(keys)))
        for i in range(1 + dice.below(8, "loads")):
            put = dice.pick(self.puts, "load", i, "of")
            keys = [*put.keys] or [*SHARED[:2]]
            tier = "disk" if route and dice.chance(0.3, "load", i, "tier") else ""
            at = put.at_ms + 8 + dice.below(50, "load", i)
            self._at(at, load=LoadStep(id=f"l{i}", keys=compress(keys), tier=tier))
        if dice.chance(0.2, "drains"):
            self._at(dice.below(40, "drain"), drain="main")
        if dice.chance(0.1, "releases"):
            self._at(20 + dice.below(60, "release"), release="main")
        if dice.chance(0.2, "ends early"):
            how: Any = dice.pick(["leave", "close", "cancel", "cancel", "raise"], "ending")
            self._at(8 + dice.below(50, "ends"), close=CloseStep(how=how))

    def _at(self, at_ms: int, **verb: Any) -> None:
        step = Step(at_ms=at_ms, **verb)
        if step.fire is None or not any(step.fire == other.fire for other in self.steps):
            self.steps.append(step)
