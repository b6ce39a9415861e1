"""A request trace that was played for real, written down as a scenario. Pure.

What comes out is a program like any other: its steps are what the real run did, at the milliseconds at which it did it; its
tiers are as large as those of the run, and take the time that was measured; and it expects what the run showed. Played in
virtual time, the same blocks hit and miss, since the same pools evict in the same order: the tests count them.

Rule 1. A request looks up the longest prefix that is there. So it loads that prefix and the first block behind it, which is
        missed, and stores what is missing, but for what a policy other than presence kept back.
Rule 2. Requests came one after another, and do so here: where a step would begin before the modelled time of the one before it
        is over (a real copy may take a tenth of a millisecond), it begins then.
Rule 3. Labels are r0, r1, ... and keys b0, b1, ..., with the hash ids of the trace: as ``load.trace`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

import attrs

from .._house import load_of
from .._names import compress
from .._program import Expect, LoadStep, PipelineSpec, PolicySpec, Scenario, Step, StoreStep, TierSpec


@attrs.frozen
class Kept:
    """A tier of a replay."""

    kind: Literal["memory", "file"]
    capacity: int
    """Blocks."""
    block_bytes: int
    checksums: bool = True


@attrs.frozen
class Request:
    """What one request did."""

    at_ms: float
    """Since the first one began."""
    blocks: Sequence[int]
    """The hash ids of its prompt."""
    runs: Sequence[tuple[int, int]]
    """From which tier how many blocks of the prefix were read, in order."""
    kept_back: frozenset[int] = frozenset()
    """Blocks that a policy kept back, but for those that were present."""
    store_time: float = 0.0
    """Seconds until what it stored had settled; 0.0 where it stored nothing."""

    @property
    def hit(self) -> int:
        """Blocks that were read."""
        return sum(blocks for _, blocks in self.runs)

    @property
    def stored(self) -> Sequence[int]:
        """Blocks that were to be stored."""
        return [block for block in self.blocks[self.hit :] if block not in self.kept_back]


def modelled(times: Sequence[tuple[int, float]]) -> tuple[int, int]:
    """The line through what copies took: ``latency_ms`` and ``bytes_per_ms`` of a tier.

    Args:
        times: of each copy, its bytes and its seconds.
    """
    points = [(nbytes, seconds * 1e3) for nbytes, seconds in times if nbytes and seconds > 0]
    if not points:
        return 0, 0
    mean_x, mean_y = fmean([x for x, _ in points]), fmean([y for _, y in points])
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if slope <= 0:  # all of one size, or too noisy to tell: the bytes take all of the time
        slope = mean_y / mean_x
    latency = max(0, round(mean_y - slope * mean_x))
    return latency, max(1, round(1 / slope))


def recorded(
    name: str,
    tiers: Sequence[Kept],
    requests: Sequence[Request],
    counts: Mapping[str, int],
    *,
    presence: bool = True,
    about: str = "",
) -> Scenario:
    """A scenario that does what a replay did.

    Args:
        name: of the scenario.
        tiers: from the fastest to the slowest; each was fed what the one before it had stored.
        requests: in the order in which they were played.
        counts: what the run showed, to be expected: ``loaded``, ``missed``, ``copied`` blocks.
        presence: whether what the first tier had was kept from being stored again.
        about: what it shows, for a reader.
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
            eviction="adaptive",  # as the tiers of a replay have it
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
    """The steps so far, and when the next one may begin."""

    def __init__(self, tiers: Mapping[str, TierSpec], names: Sequence[str]) -> None:
        self.made: list[Step] = []
        self.free_at = 0
        self._tiers = tiers
        self._names = names

    def add(self, label: str, request: Request) -> None:
        """What one request did."""
        hit, at = request.hit, int(request.at_ms)
        start = 0
        runs = list(request.runs) or [(0, 0)]
        for part, (tier, blocks) in enumerate(runs):
            stop = start + blocks
            last = part == len(runs) - 1
            keys = request.blocks[start : stop + 1 if last else stop]  # the first that is not there is asked for, too
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
            # Those that are present already take no time, and are not known here.
            self._at(at, Step(store=store), sum(self._duration(name, len(stored)) for name in self._names))
        assert hit <= len(request.blocks)

    def _at(self, at: int, step: Step, duration: int) -> None:
        at = max(at, self.free_at)
        self.made.append(Step(at_ms=at, store=step.store, load=step.load))
        self.free_at = at + duration + 1

    def _duration(self, tier: str, blocks: int) -> int:
        """What a copy takes in virtual time."""
        spec = self._tiers[tier]
        nbytes = blocks * spec.block_bytes
        return spec.latency_ms + (-(-nbytes // spec.bytes_per_ms) if spec.bytes_per_ms else 0)


def _keys(hash_ids: Sequence[int]) -> str:
    return compress([f"b{one}" for one in hash_ids])


def _names_of(tiers: Sequence[Kept]) -> list[str]:
    names: list[str] = []
    for tier in tiers:
        base = "host" if tier.kind == "memory" else "disk"
        names.append(base if base not in names else f"{base}{len(names) + 1}")
    return names
