"""What of the expectations can be judged in a real run, and what cannot. Pure.

In virtual time a scenario says exactly what falls together and what does not. On the clock of the wall it says only what is at
least so far apart. So there is no verdict on

* the order of events of different containers: that of the events of each one is judged;
* how long something takes at most; at least, where it is counted from the start or from an event of the same container;
* how many batches there were, and how often a hook was visited: that depends on who came in time;
* figures of ``statistics()``;
* containers whose blocks met a full disk: in virtual time they wait for room;
* what a pipeline announced of containers whose process was killed meanwhile: nobody was there to announce it.

Everything else is judged as it is in virtual time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec

from .._files.knobs_of import config_of
from .._house import pipelines_of
from .._judging.expecting import Rest, judge
from .._program import TICK, Expect, Scenario, Window
from .._report import EVENTS, Moment, Report, Violation

_COUNTED: Final = frozenset({"copied", "loaded", "missed", "fired"})
_ROUNDING_MS: Final = 1


def judge_real(
    report: Report, rest: Rest, met_full: Collection[str] = (), died: Collection[str] = ()
) -> tuple[list[Violation], list[str]]:
    """What of the expectations does not hold, and what was not judged.

    Args:
        report: of a real run.
        rest: what was there at its end.
        met_full: the containers whose blocks met a full disk.
        died: those that were under way in a process when it was killed.
    """
    wrong: list[Violation] = []
    unjudged: list[str] = []
    ends = frozenset(met_full)
    for i, expect in enumerate(report.scenario.expect):
        path = f"expect[{i}]"
        for part in _parts(_but_for(expect, path, ends, frozenset(died), unjudged), path, ends, unjudged):
            scenario = msgspec.structs.replace(report.scenario, expect=[part])
            for one in judge(attrs.evolve(report, scenario=scenario), rest):
                wrong.append(Violation(one.rule, one.text.replace("expect[0]", f"expect[{i}]", 1)))
    return list(dict.fromkeys(wrong)), unjudged


def _but_for(
    expect: Expect, path: str, met_full: Collection[str], died: Collection[str], unjudged: list[str]
) -> Expect:
    """The same without events that have no meaning here: times of who met a full disk, and what the dead never announced."""

    def judged(event: str, where: str) -> bool:
        label, _, what = event.partition(" ")
        if label in met_full:
            unjudged.append(f"{path}.{where}: {label} met a full disk")
        elif label in died and what not in EVENTS:
            unjudged.append(f"{path}.{where}: the process of {label} was killed, and announced no {what!r}")
        else:
            return True
        return False

    return msgspec.structs.replace(
        expect,
        order=[event for i, event in enumerate(expect.order or ()) if judged(event, f"order[{i}]")] or None,
        time=[
            one
            for i, one in enumerate(expect.time or ())
            if judged(one.event, f"time[{i}]") and (not one.since or judged(one.since, f"time[{i}]"))
        ]
        or None,
    )


def _parts(expect: Expect, path: str, met_full: Collection[str], unjudged: list[str]) -> Iterator[Expect]:
    """What of an expectation is judged, in tables of which each is."""
    replaced: dict[str, Any] = {"order": None, "metric": None}
    for field in ("status", "result"):
        said: Mapping[str, Any] = getattr(expect, field) or {}
        for label in said:
            if label in met_full:
                unjudged.append(f"{path}.{field}.{label}: it met a full disk")
        replaced[field] = {label: wanted for label, wanted in said.items() if label not in met_full} or None
    for field in ("count", "at_most", "at_least"):
        counts: Mapping[str, int] = getattr(expect, field) or {}
        out = {name for name in counts if name not in _COUNTED}
        if met_full:
            out.add("copied")
        unjudged += [f"{path}.{field}.{name}: depends on who came in time" for name in counts if name in out]
        replaced[field] = {name: wanted for name, wanted in counts.items() if name not in out} or None
    replaced["time"] = [one for i, one in enumerate(expect.time or ()) if _least(one, f"{path}.time[{i}]", unjudged)]
    replaced["time"] = [
        Window(event=one.event, since=one.since, at_least_ms=max(0, one.at_least_ms - _ROUNDING_MS))
        for one in replaced["time"]
    ] or None
    if expect.metric:
        unjudged.append(f"{path}.metric: figures depend on who came in time")
    if met_full and expect.found:
        unjudged.append(f"{path}.found: blocks met a full disk")
        replaced["found"] = None
    yield msgspec.structs.replace(expect, **replaced)
    yield from _order(expect.order or (), path, unjudged)


def _least(window: Window, path: str, unjudged: list[str]) -> bool:
    if window.at_most_ms is not None:
        unjudged.append(f"{path}: at most {window.at_most_ms} ms")
    if not window.at_least_ms:
        return window.at_most_ms is None
    if window.since and _label(window.since) != _label(window.event):
        unjudged.append(f"{path}: between two containers")
        return False
    return True


def _order(events: Sequence[str], path: str, unjudged: list[str]) -> Iterator[Expect]:
    by_label: dict[str, list[str]] = {}
    for event in events:
        by_label.setdefault(_label(event), []).append(event)
    if len(by_label) > 1:
        unjudged.append(f"{path}.order: between {', '.join(by_label)}")
    for one in by_label.values():
        yield Expect(order=one)


def _label(event: str) -> str:
    return event.split()[0] if event.split() else ""


def rounded(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Times to a thousandth of a millisecond."""
    return tuple([attrs.evolve(moment, at_ms=round(moment.at_ms, 3)) for moment in moments])


def last_ms(scenario: Scenario) -> int:
    """When the last thing happens that the scenario has a time for."""
    times = [step.at_ms for step in scenario.step]
    times += [fault.at_ms + fault.for_ms for fault in scenario.fault if fault.at_ms is not None]
    return max(times, default=0)


def patience_ms(scenario: Scenario) -> int:
    """How long a scenario lets its pipelines wait for something that may never come."""
    waits = any(step.store is not None and step.store.after for step in scenario.step)
    longest = 0.0
    for spec in pipelines_of(scenario).values():
        config = config_of(spec)
        longest = max(
            longest,
            config.batch_config.flush_interval,
            config.policy_timeout,
            config.destination_timeout,
            config.transfer_timeout,
            config.drain_timeout,
            config.precondition_timeout if waits else 0.0,
        )
    return round(longest / TICK)
