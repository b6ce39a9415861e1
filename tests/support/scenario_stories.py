"""Reports made by hand, for what is drawn from reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from offload.testing.scenarios import (
    Fault,
    Moment,
    Outcome,
    Report,
    Scenario,
    Step,
    StoreStep,
    Violation,
    generate,
    play,
)


class Story:
    """Moments written down one after the other."""

    def __init__(self, name: str = "S20 cancel one of four in a batch", **about: Any) -> None:
        self.name = name
        self.about = about
        self.now = 0.0
        self.moments: list[Moment] = []
        self.outcomes: dict[str, Outcome] = {}
        self.fired: dict[str, int] = {}
        self.violations: list[Violation] = []
        self.steps: list[Step] = []

    def at(self, ms: float) -> Story:
        self.now = ms
        return self

    def step(self, name: str, *who: str, note: str = "") -> Story:
        self.moments.append(Moment(self.now, "step", name, who, note=note))
        return self

    def hook(self, name: str, *who: str, where: str = "main") -> Story:
        self.moments.append(Moment(self.now, "hook", name, who, where))
        return self

    def asked(self, *who: str) -> Story:
        for label in who:
            self.steps.append(Step(at_ms=int(self.now), store=StoreStep(id=label)))
            self.step("asked", label).step("taken", label)
        return self

    def fault(self, name: str, *who: str, where: str = "", fired: bool = True, note: str = "") -> Story:
        self.moments.append(Moment(self.now, "fault", name, who, where, note, fired))
        if fired:
            self.fired[name] = self.fired.get(name, 0) + 1
        return self

    def tier(self, name: str, where: str, keys: str) -> Story:
        self.moments.append(Moment(self.now, "tier", name, (), where, keys))
        return self

    def ended(self, label: str, status: str = "COMPLETE", hook: bool = True) -> Story:
        if hook:
            self.hook("settled", label)
        self.moments.append(Moment(self.now, "end", "ended", (label,), note=status))
        key = f"{label}.0".encode()
        self.outcomes[label] = {
            "COMPLETE": Outcome("COMPLETE", completed=(key,)),
            "CANCELLED": Outcome("CANCELLED"),
            "FAILED": Outcome("FAILED", failed={key: "TransferFailed"}, error="TransferFailed"),
        }[status]
        return self

    def wrong(self, rule: str, text: str) -> Story:
        self.violations.append(Violation(rule, text))
        return self

    def report(self, seed: int = 7) -> Report:
        scenario = Scenario(
            name=self.name,
            seed=seed,
            step=self.steps,
            fault=[
                Fault(do=moment.name, at_ms=int(moment.at_ms))  # type: ignore[arg-type]
                for moment in self.moments
                if moment.kind == "fault"
            ],
            **self.about,
        )
        return Report(
            scenario=scenario,
            seed=seed,
            moments=tuple(self.moments),
            violations=tuple(self.violations),
            outcomes=self.outcomes,
            planned=len(scenario.fault),
            fired=self.fired,
            counts={"copied": 3, "batches": 1},
            reached=frozenset({f"hook {moment.name}" for moment in self.moments if moment.kind == "hook"}),
        )


def cancel_one_of_four() -> Report:
    """The example of the design: four containers in a batch, one is cancelled between the sweep and the claims."""
    four = ("a0", "a1", "a2", "a3")
    three = ("a0", "a1", "a3")
    story = Story(about="The neighbours of a cancelled container go on.", upstream=["vLLM #43226"])
    story.asked(*four)
    for hook in ("admission", "awaiting", "batching"):
        for label in four:
            story.hook(hook, label)
    story.at(2).hook("transfer", *four).hook("pre_claim", *four).hook("sweep_claim_gap", *four)
    story.fault("cancel", "a2").step("cancel asked", "a2")
    story.hook("post_claim", *three).hook("xfer_start", *three).tier("copy", "host", "a0.0,a1.0,a3.0")
    story.ended("a2", "CANCELLED").step("confirmed", "a2")
    story.at(3).fault("flip", where="host", fired=False, note="k9")
    story.at(4).tier("copied", "host", "a0.0,a1.0,a3.0").hook("xfer_end", *three)
    for label in three:
        story.ended(label).step("waited", label)
    return story.report()


def a_bad_run() -> Report:
    """Things that went wrong in every way that a picture must show."""
    story = Story('broken <b>claims</b> & "quotes" \x00\x1b[31m', about="</style><script>alert(1)</script>")
    story.asked("a", "b").step("asked", "c").at(1).step("abandoned", "c").step("asked", "d").step("refused", "d")
    story.hook("admission", "a").hook("admission", "b").hook("awaiting", "b").hook("awaiting", "a").at(4).hook(
        "batching", "a"
    )
    story.hook("transfer", "a").hook("pre_claim", "a").hook("post_claim", "a").hook("xfer_start", "a")
    story.tier("copy", "host", "a.0").fault("stall", where="host", note="for 9 ms")
    story.at(5).step("cancel asked", "a").step("waiter gone", "a").at(2000).step("unconfirmed", "a").ended(
        "a", "FAILED"
    )
    story.step("loaded", "l0", note="a.0").step("missed", "l1", note="b.0").step("close")
    story.at(3_600_000)
    story.moments.append(Moment(story.now, "violation", "I9", ("b",), "", "b never ended"))
    story.wrong("I9", "b never ended, for which there is no reason").wrong("hang", "the run was not over by 3686400 ms")
    return story.report(seed=41)


def many(n: int = 200) -> Report:
    """A run of the size that a generated mix has."""
    story = Story(f"a mix of {n}")
    labels = [f"s{number}" for number in range(n)]
    ready: list[str] = []
    for number, label in enumerate(labels):
        story.at(number // 9).asked(label).hook("admission", label).hook("awaiting", label)
        if number % 11 == 3:
            story.fault("cancel", label).step("cancel asked", label).ended(label, "CANCELLED").step("confirmed", label)
            continue
        story.hook("batching", label)
        ready.append(label)
        if len(ready) == 8:
            _carry(story, ready, broken=number % 5 == 1)
            ready = []
    _carry(story, ready, broken=False)
    return story.report(seed=n)


def _carry(story: Story, who: Sequence[str], *, broken: bool) -> None:
    keys = ",".join(f"{label}.0" for label in who)
    for hook in ("transfer", "pre_claim", "sweep_claim_gap", "post_claim", "xfer_start"):
        story.hook(hook, *who)
    story.tier("copy", "host", keys)
    if broken:
        story.fault("fail", where="host")
    story.at(story.now + 2).tier("copied", "host", keys).hook("xfer_end", *who)
    for label in who:
        story.ended(label, "FAILED" if broken else "COMPLETE")


def played(seed: int) -> Report:
    """A random program, really run."""
    return play(generate(seed))


STORIES: dict[str, Callable[[], Report]] = {
    "one of four": cancel_one_of_four,
    "bad": a_bad_run,
    "many": many,
    "none": lambda: Story("nothing").report(),
}
STORIES |= {f"seed {seed}": partial(played, seed) for seed in range(12)}
