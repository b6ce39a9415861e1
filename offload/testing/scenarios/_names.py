"""Names in a scenario: lists, ranges, implied tiers and pipelines. Pure.

Rule 1. Names are separated by commas; spaces around them do not matter. No name at all is the empty list.
        ``"a{0..3}, b"`` is a0, a1, a2, a3 and b.
Rule 2. A range is of numbers, counts up, and includes both ends. If its first end has a leading zero, each number has
        as many digits: ``"k{08..10}"`` is k08, k09, k10. Several ranges in a name are all combinations.
Rule 3. A name has no space, comma or brace in it, since an event is written ``"<name> <what happened>"``.
Rule 4. ``device`` and ``host`` exist without being named, ``main`` if no pipeline is named.
Rule 5. A tier that is not described has the block size of the described ones, and a source has capacity for all keys
        that are stored from it.
Rule 6. The containers of ``load.mix`` are called m0, m1, ..., those of ``load.trace`` r0, r1, ... in the order of its
        requests; the load of ``m0`` is called ``m0-load``.
Rule 7. An empty name of a pipeline means the first one; an empty name of a tier the destination of the first, for
        ``evict`` its source.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import structs

from ._program import EngineSpec, Fault, Mix, PipelineSpec, Scenario, Step, StoreStep, TierSpec, TraceLoad

MOST: Final = 1 << 20
"""Maximum number of names in one list.

A longer list is a typing error.
"""

_RANGE: Final = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_NAME: Final = re.compile(r"(?:[^\s{},]|\{[0-9]{1,18}\.\.[0-9]{1,18}\})+")
_COUNTED: Final = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})")


@functools.lru_cache(maxsize=4_096)  # the same few lists are expanded again and again while a scenario runs
def expand(names: str) -> tuple[str, ...]:
    """Return all names of a list, in order, with repetitions.

    Raises:
        ValueError: the list is malformed; the text names the place and a valid form.
    """
    if not names.strip():
        return ()
    parts = [_part(word.strip(), names) for word in names.split(",")]
    if sum([math.prod(map(len, ranges)) for _, ranges, _ in parts]) > MOST:
        raise ValueError(f"{_short(names)} stands for more than {MOST:,} names")
    found: list[str] = []
    for texts, ranges, width in parts:
        for numbers in itertools.product(*ranges):
            counted = [
                f"{number:0{digits}d}{text}" for number, digits, text in zip(numbers, width, texts[1:], strict=True)
            ]
            found.append(texts[0] + "".join(counted))
    return tuple(found)


def compress(names: Iterable[str]) -> str:
    """Return a list that expands to these names, with ranges.

    Three or more names that count up make a range.
    """
    words: list[str] = []
    for run in _runs(names):
        if len(run) < 3:
            words += run
        else:
            stem, first = _counted(run[0])
            words.append(f"{stem}{{{first}..{first + len(run) - 1}}}")
    return ", ".join(words)


def _part(word: str, names: str) -> tuple[list[str], list[range], list[int]]:
    """Parse one name: its texts, its ranges, and their minimum digits."""
    if not word:
        raise ValueError(f"{_short(names)} has a comma without a name next to it")
    if _NAME.fullmatch(word) is None:
        raise ValueError(f"{_short(word)} is not a name: it must have no spaces, and braces only as in 'a{{0..3}}'")
    pieces = _RANGE.split(word)  # text, low, high, text, low, high, text ...
    ends = [(low, high) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
    for low, high in ends:
        if int(low) > int(high):
            raise ValueError(f"{_short(word)} counts down: write {{{high}..{low}}}")
    ranges = [range(int(low), int(high) + 1) for low, high in ends]
    return pieces[0::3], ranges, [len(low) if low.startswith("0") else 0 for low, _ in ends]


def _runs(names: Iterable[str]) -> list[list[str]]:
    """Split names into runs within which only the last number counts up."""
    runs: list[list[str]] = []
    wanted: tuple[str, int] | None = None
    for name in names:
        counted = _counted(name)
        if counted[1] >= 0 and counted == wanted:
            runs[-1].append(name)
        else:
            runs.append([name])
        wanted = (counted[0], counted[1] + 1)
    return runs


def _counted(name: str) -> tuple[str, int]:
    """Return the text before the final number, and the number.

    The number is -1 if there is none.
    """
    match = _COUNTED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, -1)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def shown(keys: Iterable[bytes], separator: str = ",") -> str:
    """Return keys as readable text; bytes that are no text are escaped."""
    return separator.join([key.decode(errors="backslashreplace") for key in keys])


# --- implied tiers and pipelines --------------------------------------------------------------------------------------


def pipelines_of(scenario: Scenario) -> Mapping[str, PipelineSpec]:
    """Return all pipelines by name, the first one first."""
    if scenario.engine is not None and scenario.engine.tiers:
        return _of_engine(scenario.engine, scenario.pipeline)
    return scenario.pipeline or {"main": PipelineSpec(to="host")}


def routes_of(spec: PipelineSpec) -> list[str]:
    """Return the pipelines that continue from this one, required or not."""
    return [*spec.chain, *spec.optional_chain]


def _of_engine(engine: EngineSpec, said: Mapping[str, PipelineSpec]) -> Mapping[str, PipelineSpec]:
    """Return an engine's pipelines, from ``device`` down through its tiers.

    All have the same knobs.
    """
    tiers = engine.tiers
    knobs = next(iter(said.values()), PipelineSpec(to=tiers[0]))
    above = ["device", *tiers]
    return {
        tier: structs.replace(knobs, source=above[at], to=tier, chain=tiers[at + 1 : at + 2])
        for at, tier in enumerate(tiers)
    }


def tiers_of(scenario: Scenario) -> Mapping[str, TierSpec]:
    """Return all tiers by name, described or implied."""
    said = scenario.tier
    plain = TierSpec(block_bytes=next(iter(said.values())).block_bytes) if said else TierSpec()
    tiers = dict(said)
    for name in ("device", "host"):
        if name not in tiers:
            tiers[name] = plain
    if "device" not in said:
        needed = len(stored_from(scenario, "device"))
        if needed > plain.capacity:
            tiers["device"] = TierSpec(block_bytes=plain.block_bytes, capacity=needed)
    return tiers


def first_source(scenario: Scenario) -> str:
    """Return the tier that ``evict`` uses if none is named."""
    return next(iter(pipelines_of(scenario).values())).source


def first_destination(scenario: Scenario) -> str:
    """Return the tier that everything but ``evict`` uses if none is named."""
    return next(iter(pipelines_of(scenario).values())).to


def keys_of(store: StoreStep) -> dict[str, tuple[str, ...]]:
    """Return the keys of each container of a step, by its label.

    Raises:
        ValueError: a list of names is malformed.
    """
    labels, per = expand(store.id), store.per
    if not store.keys:
        return {label: tuple([f"{label}.{i}" for i in range(per)]) for label in labels}
    keys = expand(store.keys)
    return {label: keys[i * per : (i + 1) * per] for i, label in enumerate(labels)}


def stores_of(scenario: Scenario) -> Iterator[StoreStep]:
    """Yield every store of a scenario, in order."""
    for step in scenario.step:
        if step.store is not None:
            yield step.store


def stored_from(scenario: Scenario, tier: str) -> set[str]:
    """Return all keys that a tier initially holds or is stored from.

    Raises:
        ValueError: a list of names is malformed.
    """
    pipelines = pipelines_of(scenario)
    first = next(iter(pipelines))
    held = scenario.tier[tier].holds if tier in scenario.tier else ""
    found = set(expand(held))
    for store in stores_of(scenario):
        spec = pipelines.get(store.pipeline or first)
        if spec is not None and spec.source == tier:
            found.update(*keys_of(store).values())
    return found


def mix_labels(mix: Mix) -> list[str]:
    """Return the names of a mix's containers."""
    return [f"m{i}" for i in range(mix.containers)]


def last_of(mix: Mix) -> int:
    """Return the last virtual millisecond of a mix's stores and loads.

    Its loads come up to twice its time later.
    """
    span = max(mix.over_ms, 1)
    return span - 1 + (2 * span if mix.loads else 0)


def trace_labels(trace: TraceLoad) -> list[str]:
    """Return the names of the containers that a trace's requests may store."""
    return [f"r{i}" for i in range(trace.limit)]


def load_of(label: str) -> str:
    """Return the name of the load of a mix's or trace's container."""
    return f"{label}-load"


# --- references to removed parts --------------------------------------------------------------------------------------


def tidy(scenario: Scenario) -> Scenario:
    """Remove references to containers, events, pipelines and tiers that are gone."""
    labels = {label for store in stores_of(scenario) for label in expand(store.id)}
    fired = {step.fire for step in scenario.step if step.fire is not None}
    waited = {after.event for store in stores_of(scenario) for after in store.after}
    pipelines = set(scenario.pipeline) or {"main"}
    steps = [
        _not_waiting(step, fired)
        for step in scenario.step
        if (step.fire is None or step.fire in waited)
        and (step.drain is None or step.drain in pipelines)
        and (step.release is None or step.release in pipelines)
        and (step.store is None or step.store.id)
    ]
    about = functools.partial(_about, labels=labels)
    faults = [fault for old in scenario.fault if (fault := about(about(old, "who"), "of")) is not None]
    tiers = {"device", "host", *scenario.tier}
    faults = [fault for fault in faults if not fault.tier or fault.tier in tiers]
    return structs.replace(scenario, step=steps, fault=faults, pipeline=_tidy_pipelines(scenario, labels))


def _not_waiting(step: Step, fired: set[str]) -> Step:
    """Remove waits for events that no step fires.

    Otherwise every program could be made to hang.
    """
    if step.store is None or all(not after.event or after.event in fired for after in step.store.after):
        return step
    after = [one for one in step.store.after if not one.event or one.event in fired]
    any_of = step.store.any_of and len(after) > 1
    return structs.replace(step, store=structs.replace(step.store, after=after, any_of=any_of))


def _about(fault: Fault | None, field: str, labels: set[str]) -> Fault | None:
    if fault is None or not getattr(fault, field):
        return fault
    names = expand(getattr(fault, field))
    left = [name for name in names if name in labels]
    if len(left) == len(names):
        return fault
    return structs.replace(fault, **{field: compress(left)}) if left else None


def _tidy_pipelines(scenario: Scenario, labels: set[str]) -> dict[str, PipelineSpec]:
    found = {}
    for name, spec in scenario.pipeline.items():
        policies = []
        for policy in spec.policies:
            who = [label for label in expand(policy.who) if label in labels]
            if who or not policy.who:
                policies.append(structs.replace(policy, who=compress(who)) if policy.who else policy)
        chain, optional = (
            [other for other in routes if other in scenario.pipeline] for routes in (spec.chain, spec.optional_chain)
        )
        found[name] = structs.replace(spec, policies=policies, chain=chain, optional_chain=optional)
    return found
