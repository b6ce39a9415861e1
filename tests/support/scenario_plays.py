"""Hand-made plays: what looks at runs is tested without a system, and with runs that really hang or die."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from offload.testing.scenarios import Fault, Moment, Outcome, Report, Scenario, Step, StoreStep, Violation


def unhurried() -> float:
    """A pace for a run on the clock of the wall: how much slower than by itself this thread computes just now.

    What a scenario has a hundred milliseconds apart takes two of them, so there is time enough, and so there is on a
    machine that has many other things to do: at a fraction of the pace, an eighth at most.
    """
    began, computed = time.perf_counter(), time.thread_time()
    while time.thread_time() - computed < 0.02:
        pass
    slower = (time.perf_counter() - began) / (time.thread_time() - computed)
    return 1.0 if slower < 1.5 else min(slower, 8.0)


def report_of(
    seed: int = 0,
    *,
    scenario: Scenario | None = None,
    moments: Sequence[Moment] = (),
    violations: Sequence[Violation] = (),
    fired: dict[str, int] | None = None,
    outcomes: dict[str, Outcome] | None = None,
) -> Report:
    scenario = Scenario(name="by hand") if scenario is None else scenario
    return Report(
        scenario=scenario,
        seed=seed,
        moments=tuple(moments) or (Moment(float(seed % 7), "step", "asked", ("a0",)),),
        violations=tuple(violations),
        outcomes=outcomes or {},
        planned=len(scenario.fault),
        fired=fired or {},
        counts={},
        reached=frozenset({"hook pre_claim", f"state {'FAILED' if violations else 'COMPLETE'}"}),
    )


def program(*, containers: int = 12, faults: Sequence[Fault] = ()) -> Scenario:
    """Containers s0, s1, ..., one each millisecond."""
    steps = [Step(at_ms=i, store=StoreStep(id=f"s{i}", per=2)) for i in range(containers)]
    return Scenario(name="by hand", step=steps, fault=list(faults))


def good(seed: int) -> Report:
    return report_of(seed)


def every_tenth_is_wrong(seed: int) -> Report:
    return report_of(
        seed, violations=[Violation("I4", f"seed {seed} moved what was cancelled")] if seed % 10 == 3 else []
    )


@attrs.frozen
class Strange:
    """Goes well but for one seed, which does something that no report can tell."""

    seed: int
    what: str
    """``hang``, ``die``, ``raise``, ``kill``."""
    once: Path | None = None
    """Only while this does not exist; it does afterwards."""

    def __call__(self, seed: int) -> Report:
        if seed == self.seed and self._now():
            if self.what == "hang":
                spin()
            elif self.what == "die":
                os._exit(3)
            elif self.what == "kill":
                os.kill(os.getpid(), 9)
            raise LookupError(f"seed {seed} makes no sense")
        return report_of(seed)

    def _now(self) -> bool:
        if self.once is None:
            return True
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def spin() -> None:
    """For ever, and never in anybody else's code."""
    while True:
        pass


@attrs.frozen
class Telling:
    """Writes down who played what."""

    directory: Path

    def __call__(self, seed: int) -> Report:
        (self.directory / f"{seed}").write_text(str(os.getpid()))
        return report_of(seed)
