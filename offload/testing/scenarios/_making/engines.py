"""The mix ``engine`` of the fuzz: programs as those of the standard mix, whose tiers are behind one engine. Pure.

What an engine has beside pipelines is drawn here: tiers that break, are left alone and used again, what is promoted, what is
looked for once more below, and readers of several tiers. No ledger looks into an engine; the oracle judges it by what it shows.

Rule 1. A tier breaks, or stands still, for longer than any call waits for it, and is well again before the last reader comes.
Rule 2. Each tier holds something from the start that others need not have, so that there is something to promote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from .._dice import Dice
from .._names import compress, expand
from .._program import EngineSpec, Fault, LoadStep, Scenario, Step, TierSpec
from .aiming import some
from .generating import Below, Draft

_TIERS: Final[Sequence[Below]] = (
    {"disk": ("host", "disk")},
    {"disk": ("host", "disk"), "far": ("disk", "far")},
)
_LAST: Final = 160
"""The last readers come so many virtual milliseconds after the start."""
_LOOKUP_MS: Final = 12
"""A reader's patience: less than a tier that stands still takes."""


def generate_engine(seed: int) -> Scenario:
    """The program of a seed."""
    dice = Dice(seed)
    below = dice.pick(_TIERS, "engine")
    plain = Draft(dice, engine=below).scenario()
    main = msgspec.structs.replace(plain.pipeline["main"], chain=[], policies=[])
    names = ["host", *below]
    tiers = _holding(dice, plain.tier, names)
    return msgspec.structs.replace(
        plain,
        name=f"engine, seed {seed}",
        engine=_engine(dice, names),
        tier=tiers,
        pipeline={"main": main},
        step=sorted([*map(_of_an_engine, plain.step), *_readers(dice, plain)], key=lambda step: step.at_ms),
        fault=[fault for fault in plain.fault if fault.do != "shut_down"] + list(_breaks(dice, names)),
    )


def _engine(dice: Dice, names: list[str]) -> EngineSpec:
    wait = dice.pick([4, 8, 24], "first wait")
    return EngineSpec(
        tiers=names,
        promote=dice.chance(0.6, "promote"),
        on_load_failure=dice.pick(["miss", "retry"], "on_load_failure"),
        max_faults=dice.pick([1, 2, 3, 3], "max_faults"),
        first_wait_ms=wait,
        longest_wait_ms=wait * dice.pick([1, 2], "longest wait"),
        call_ms=dice.pick([4, 20, 5_120], "call"),
        lookup_ms=_LOOKUP_MS,
        load_ms=dice.pick([24, 60, 5_120], "load time"),
    )


def _holding(dice: Dice, tiers: Mapping[str, TierSpec], names: Sequence[str]) -> dict[str, TierSpec]:
    """What was to be in the first tier from the start is in some of them."""
    held = expand(tiers["host"].holds)
    return {
        name: msgspec.structs.replace(
            spec, holds=compress(some(dice, held, 0.6, "holds", name)[: spec.capacity]) if name in names else ""
        )
        for name, spec in tiers.items()
    }


def _of_an_engine(step: Step) -> Step:
    """A step as an engine can be asked for it."""
    changed: dict[str, Any] = {}
    if step.store is not None and step.store.how != "wait":
        changed["store"] = msgspec.structs.replace(step.store, how="wait")
    elif step.close is not None and step.close.how == "close":
        changed["close"] = msgspec.structs.replace(step.close, how="leave")
    elif step.drain is not None:
        changed["drain"] = "host"
    elif step.release is not None:
        changed["release"] = "host"
    return msgspec.structs.replace(step, **changed) if changed else step


def _readers(dice: Dice, plain: Scenario) -> Iterator[Step]:
    """Those who read what several have stored, while tiers break, and when all is well again."""
    read = [step.load.keys for step in plain.step if step.load is not None]
    for i in range(3 + dice.below(4, "readers")):
        where = ("reader", i)
        keys = dict.fromkeys([key for n in range(2) for key in expand(dice.pick(read, *where, n))])
        hold = dice.pick([0, 0, 6, 20], *where, "hold")
        yield Step(
            at_ms=dice.below(_LAST, *where, "at"), load=LoadStep(id=f"x{i}", keys=compress([*keys]), hold_ms=hold)
        )


def _breaks(dice: Dice, names: list[str]) -> Iterator[Fault]:
    """Tiers that do not answer for a while."""
    for i in range(dice.below(4, "breaks")):
        where = ("break", i)
        yield Fault(
            do=dice.pick(["peer_death", "peer_death", "stall"], *where),
            tier=dice.pick(names, *where, "tier"),
            at_ms=dice.below(_LAST - 60, *where, "at"),
            for_ms=dice.pick([3, 10, 50], *where, "for"),
        )
