"""Generated loads: a seeded mix, a request trace, a recorded replay.

Rule 1. A scenario returned by :func:`unroll` has no load any more, and plays the same way in any process.
Rule 2. Drawn actions come while they matter: a cancel while its container is in progress, and nothing after
        ``limit_ms``.
Rule 3. The same site draws the same choice regardless of the rest of the mix: one container more leaves the others
        unchanged.

:func:`recorded` turns a replay of a request trace that was played for real into a scenario: its steps are those of the
real run, at the same milliseconds; its tiers are as large as those of the run, and take the measured time; and it
expects the counts of the run. Played in virtual time, the same blocks hit and miss, since the same pools evict in the
same order.

Rule 4. A request looks up the longest stored prefix. So it loads that prefix and the first block after it, which is
        missed, and stores the missing blocks, except those that a policy other than presence kept back.
Rule 5. Requests came one after another, and do so here: a step that would begin before the modelled time of the one
        before it is over (a real copy may take a tenth of a millisecond) begins at its end.
Rule 6. Labels are r0, r1, ... and keys b0, b1, ..., with the hash ids of the trace: as ``load.trace`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

import attrs
import msgspec

from offload._replay.trace import Request, TraceError, read_trace

from ._fields import config_of
from ._names import compress, load_of, mix_labels, pipelines_of, tiers_of, trace_labels
from ._program import (
    TICK,
    Expect,
    Fault,
    LoadStep,
    Mix,
    PipelineSpec,
    PolicySpec,
    Scenario,
    ScenarioError,
    Step,
    StoreStep,
    TierSpec,
    TraceLoad,
)
from ._rng import Rng

_USUAL: Final[tuple[Literal["weak", "strong"], ...]] = ("weak", "weak", "strong")


def unroll(scenario: Scenario, seed: int, base: Path | None = None) -> Scenario:
    """Return a scenario with its load as steps.

    A mix with cancels also becomes faults.

    Args:
        scenario: scenario as it was read.
        seed: seed that the mix is drawn from.
        base: directory that the path of a trace is relative to; by default the current one.

    Raises:
        ScenarioError: the trace cannot be read, or goes on for longer than the run.
    """
    load = scenario.load
    if load is None:
        return scenario
    steps, faults = list(scenario.step), list(scenario.fault)
    if load.mix is not None:
        _unroll_mix(load.mix, Rng(seed), _on_its_way(scenario), steps, faults)
    if load.trace is not None:
        _unroll_requests(_requests(load.trace, base), load.trace, scenario.limit_ms, steps)
    steps.sort(key=lambda step: step.at_ms)
    return msgspec.structs.replace(scenario, load=None, step=steps, fault=faults)


def _on_its_way(scenario: Scenario) -> int:
    """Return an undisturbed container's time in the pipeline, in virtual milliseconds.

    It waits for others, then it is copied.
    """
    spec = next(iter(pipelines_of(scenario).values()))
    return round(config_of(spec).batch_config.flush_interval / TICK) + tiers_of(scenario)[spec.to].latency_ms + 1


def _unroll_mix(mix: Mix, rng: Rng, way: int, steps: list[Step], faults: list[Fault]) -> None:
    span = max(mix.over_ms, 1)
    for label in mix_labels(mix):
        where = ("mix", label)
        at = rng.below(span, *where, "at")
        kind: Literal["weak", "strong", "external"] = rng.pick([*(mix.kinds or _USUAL)], *where, "kind")
        n = min(rng.below(mix.most + 1, *where, "n"), mix.keys)
        start = rng.below(mix.keys, *where, "start")
        # An engine that keeps blocks alive lets no other container have them under that key.
        own = kind == "external" or n == 0
        keys = [f"{label}.{i}" for i in range(n)] if own else [f"k{(start + i) % mix.keys}" for i in range(n)]
        steps.append(Step(at_ms=at, store=StoreStep(id=label, keys="" if own else compress(keys), per=n, kind=kind)))
        if keys and rng.chance(mix.loads, *where, "loaded"):
            later = at + 1 + rng.below(2 * span, *where, "loaded at")
            steps.append(Step(at_ms=later, load=LoadStep(id=load_of(label), keys=compress(keys))))
        if rng.chance(mix.cancels, *where, "cancelled"):
            soon = 1 + rng.below(way, *where, "cancelled within")  # batches that fill up leave sooner
            faults.append(Fault(do="cancel", who=label, at_ms=at + rng.below(soon, *where, "cancelled at")))


_NEVER_MS: Final = 1 << 62
"""Milliseconds that no run reaches.

Dividing by a speed close to 0 gives times without bound.
"""


def _requests(trace: TraceLoad, base: Path | None) -> Sequence[Request]:
    path = (base or Path()) / trace.path
    try:
        return read_trace(path, trace.skip + trace.limit)[trace.skip :]
    except TraceError as error:
        raise ScenarioError("", None, "load.trace.path", str(error)) from error
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        problem = getattr(error, "strerror", None) or error
        why = f"{path} cannot be read: {problem}: name a path relative to the scenario's file"
        raise ScenarioError("", None, "load.trace.path", why) from error


def _unroll_requests(requests: Sequence[Request], trace: TraceLoad, limit_ms: int, steps: list[Step]) -> None:
    """Add steps of requests that store new blocks and load the others.

    A block is new if no earlier request asked for it.
    """
    seen: set[int] = set()
    for label, request in zip(trace_labels(trace), requests, strict=False):
        since = (request.timestamp - requests[0].timestamp) / trace.speed
        at = int(since) if since < _NEVER_MS else _NEVER_MS
        if at < 0:
            why = f"{label} came {-at} ms before the first request: sort the trace by its timestamps"
            raise ScenarioError("", None, "load.trace.path", why)
        if at > limit_ms:
            why = f"{label} comes at {at}, but the run ends at limit_ms = {limit_ms}"
            raise ScenarioError(
                "", None, "load.trace.limit", f"{why}: set fewer requests, more speed, or a larger limit_ms"
            )
        known = [one for one in request.hash_ids if one in seen]
        new = [one for one in request.hash_ids if one not in seen]
        seen.update(new)
        if known:
            steps.append(Step(at_ms=at, load=LoadStep(id=load_of(label), keys=_blocks(known))))
        if new:
            steps.append(Step(at_ms=at, store=StoreStep(id=label, keys=_blocks(new), per=len(new))))


def _blocks(hash_ids: Sequence[int]) -> str:
    return compress([f"b{one}" for one in hash_ids])


# --- a recorded replay ------------------------------------------------------------------------------------------------


@attrs.frozen
class RecordedTier:
    """A tier of a replay."""

    kind: Literal["memory", "file"]
    capacity: int
    """Capacity in blocks."""
    block_bytes: int
    checksums: bool = True


@attrs.frozen
class RecordedRequest:
    """One request of a replay and its result."""

    at_ms: float
    """Arrival time, in milliseconds since the first request began."""
    blocks: Sequence[int]
    """Hash ids of the prompt's blocks."""
    runs: Sequence[tuple[int, int]]
    """Tier and block count of each run of the prefix, in order."""
    kept_back: frozenset[int] = frozenset()
    """Blocks that a policy kept back, except those that were present."""
    store_time: float = 0.0
    """Seconds until its store had settled; 0.0 if it stored nothing."""

    @property
    def hit(self) -> int:
        """Number of blocks that were read."""
        return sum(blocks for _, blocks in self.runs)

    @property
    def stored(self) -> Sequence[int]:
        """Blocks that were to be stored."""
        return [block for block in self.blocks[self.hit :] if block not in self.kept_back]


def modelled(times: Sequence[tuple[int, float]]) -> tuple[int, int]:
    """Fit a line through copy times: a tier's ``latency_ms`` and ``bytes_per_ms``.

    Args:
        times: bytes and seconds of each copy.
    """
    points = [(nbytes, seconds * 1e3) for nbytes, seconds in times if nbytes and seconds > 0]
    if not points:
        return 0, 0
    mean_x, mean_y = fmean([x for x, _ in points]), fmean([y for _, y in points])
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if slope <= 0:  # all of one size, or too noisy: the bytes take all of the time
        slope = mean_y / mean_x
    latency = max(0, round(mean_y - slope * mean_x))
    return latency, max(1, round(1 / slope))


def recorded(
    name: str,
    tiers: Sequence[RecordedTier],
    requests: Sequence[RecordedRequest],
    counts: Mapping[str, int],
    *,
    presence: bool = True,
    about: str = "",
) -> Scenario:
    """Return a scenario that repeats a replay.

    Args:
        name: name of the scenario.
        tiers: from the fastest to the slowest; each was fed with the blocks that the one before it had stored.
        requests: in the order in which they were played.
        counts: expected counts from the run: ``loaded``, ``missed``, ``copied`` blocks.
        presence: whether blocks present in the first tier were kept from being stored again.
        about: purpose of the scenario, for a reader.
    """
    names = _names_of(tiers)
    routes = ["main", *[f"to-{name}" for name in names[1:]]]
    measured = [(len(one.stored) * tiers[0].block_bytes, one.store_time) for one in requests if one.store_time]
    latency, rate = modelled(measured)
    specs = {
        tier_name: TierSpec(
            kind=tier.kind,
            capacity=tier.capacity,
            block_bytes=tier.block_bytes,
            latency_ms=latency,
            bytes_per_ms=rate,
            checksums=tier.checksums,
            eviction="adaptive",  # like the tiers of a replay
        )
        for tier_name, tier in zip(names, tiers, strict=True)
    }
    most = max([len(one.blocks) for one in requests], default=1)
    pipelines = {
        route: PipelineSpec(
            source=names[i - 1] if i else "device",
            to=names[i],
            policies=[PolicySpec(do="present")] if presence or i else [],
            chain=routes[i + 1 : i + 2],
            min_batch_size=1,
            flush_ms=0,
            on_destination_full="evict",
            budget_blocks=max(most, _BUDGET),
        )
        for i, route in enumerate(routes)
    }
    steps = _Steps(specs, names)
    for i, request in enumerate(requests):
        steps.add(f"r{i}", request)
    return Scenario(
        name=name,
        about=about,
        tier=specs,
        pipeline=pipelines,
        step=steps.made,
        expect=[Expect(count=dict(counts))],
        limit_ms=max(steps.free_at + _MORE_MS, Scenario(name="").limit_ms),
    )


_BUDGET = 4096
_MORE_MS = 60_000


class _Steps:
    """Steps so far, and the earliest time of the next one."""

    def __init__(self, tiers: Mapping[str, TierSpec], names: Sequence[str]) -> None:
        self.made: list[Step] = []
        self.free_at = 0
        self._tiers = tiers
        self._names = names

    def add(self, label: str, request: RecordedRequest) -> None:
        """Add the steps of one request."""
        hit, at = request.hit, int(request.at_ms)
        start = 0
        runs = list(request.runs) or [(0, 0)]
        for part, (tier, blocks) in enumerate(runs):
            stop = start + blocks
            last = part == len(runs) - 1
            keys = request.blocks[start : stop + 1 if last else stop]  # the first missing block is asked for, too
            start = stop
            if keys:
                load = LoadStep(
                    id=load_of(label) + (str(part) if part else ""),
                    keys=_keys(keys),
                    tier=self._names[tier] if tier else "",
                )
                self._at(at, Step(load=load), self._duration(self._names[tier], blocks))
        stored = request.stored
        if stored:
            store = StoreStep(id=label, keys=_keys(stored), per=len(stored))
            # Blocks that are present already take no time, and are not known here.
            self._at(at, Step(store=store), sum(self._duration(name, len(stored)) for name in self._names))
        assert hit <= len(request.blocks)

    def _at(self, at: int, step: Step, duration: int) -> None:
        at = max(at, self.free_at)
        self.made.append(Step(at_ms=at, store=step.store, load=step.load))
        self.free_at = at + duration + 1

    def _duration(self, tier: str, blocks: int) -> int:
        """Return the duration of a copy, in virtual milliseconds."""
        spec = self._tiers[tier]
        nbytes = blocks * spec.block_bytes
        return spec.latency_ms + (-(-nbytes // spec.bytes_per_ms) if spec.bytes_per_ms else 0)


def _keys(hash_ids: Sequence[int]) -> str:
    return compress([f"b{one}" for one in hash_ids])


def _names_of(tiers: Sequence[RecordedTier]) -> list[str]:
    names: list[str] = []
    for tier in tiers:
        base = "host" if tier.kind == "memory" else "disk"
        names.append(base if base not in names else f"{base}{len(names) + 1}")
    return names
