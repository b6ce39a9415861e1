"""Scenario of a flight recording: same containers, tiers, timings and faults. Pure.

Rule 1. Each action of a user becomes a step at its time: stores in their order, lookups, deletions. A cancel during a
        copy is planted at the hook at which the copy starts; any other at its time.
Rule 2. Each action of a tier becomes a fault at its copy: how long the copy took, which blocks failed, how it ended.
        Blocks evicted from the source are evicted when a slot takes the batch that found them gone.
Rule 3. Actions of the pipelines themselves (their batches, evictions from a full tier, pending blocks) are not written
        into the scenario. They are to come about again.
Rule 4. Recorded times are stretched by a power of two until the median copy takes two virtual milliseconds, so that
        events a few microseconds apart do not coincide. Timeouts are stretched with them.
Rule 5. Stores of one tick are admitted together, which steps of a scenario are not: they wait for an event that is set
        then.
Rule 6. An engine is played as its pipelines, whose invariants are judged step by step; as an engine if it promoted, a
        tier of it broke, or it left blocks to be computed (``load_or_recompute``).
Rule 7. The duration of computing a block is the estimated one. From the time at which blocks of a tier are left to be
        computed, until it is loaded from again, its loads take longer than that: which part of a load was late is not
        recorded.
Rule 8. A container whose beginning the ring has forgotten is left out, and so are the containers that a chain fed into
        a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from offload._recorder.recording import Recording
from offload._recorder.records import (
    EngineDescription,
    LookedUp,
    PipelineDescription,
    TierDescription,
    hashes_of,
)
from offload._recorder.stories import Copied, Read, Stories, Story

from ._expectations import longest_wait_ms
from ._fields import FIELD_OF, wrong_knob
from ._names import compress
from ._program import (
    After,
    EngineSpec,
    Fault,
    FaultKind,
    KeysStep,
    LoadStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
)

_MOST_SCALE: Final = 64
_LEAST_MS: Final = 2
"""Minimum duration of the median copy, in virtual milliseconds."""
_SLACK_MS: Final = 4
"""Extra time for actions of pipelines, in virtual milliseconds.

They may come later than recorded: each step of a container is rounded by itself.
"""
_MORE_MS: Final = 60_000
"""Extra virtual milliseconds of a run after its longest wait."""
_MOST_BYTES: Final = 4_096
"""Maximum size of a block, in bytes.

Larger ones would only make a run slower, since in virtual time a copy takes its modelled time.
"""
_MOST_DELAYS: Final = 200
"""Maximum number of delayed copies.

Of the copies that took longer than most, the longest are delayed as they were.
"""
_OWN: Final = frozenset({"present", "pending", "overflow", "behind", "gone", "closed"})
"""Filter reasons that come about by themselves."""
_OVERRAN: Final = frozenset({"DrainUnproven", "DrainUnproven/Cancelled"})
"""Recorded errors of blocks whose copy took too long."""


class NothingRecorded(ValueError):
    """A recording without any container from its beginning on.

    No scenario can be made of it.
    """


def from_incident(recording: Recording, *, name: str = "an incident", last: float | None = None) -> Scenario:
    """Return a scenario of a flight recording.

    Args:
        recording: the flight recording.
        name: name of the scenario.
        last: use only the stores and reads of the last so many seconds; by default all.

    Raises:
        NothingRecorded: there is no container from its beginning on.
    """
    stories = Stories(recording, last)
    if not stories:
        raise NothingRecorded("the recording has no container from its beginning: nothing can be replayed")
    return _Mapping(recording, stories).scenario(name)


class _Times:
    """Conversion of recorded times to virtual milliseconds."""

    def __init__(self, stories: Stories) -> None:
        self._began = min([at for _, at, _ in stories.done])
        self.scale = 1
        while stories.middle * 1e3 * self.scale < _LEAST_MS and self.scale < _MOST_SCALE:
            self.scale *= 2
        self.of: dict[int, int] = {}
        """Time of each user's action, by its record.

        Stores of one tick are together, all other actions one by one.
        """
        last, open_burst = 0, False
        for order, at, burst in stories.done:
            if not (burst and open_burst):
                # Blocks found by a lookup must have arrived: here that may be some virtual milliseconds later than it
                # was.
                last = max(self.at(at) + (_SLACK_MS if burst is None else 0), last + 1)
            self.of[order], open_burst = last, order in stories.bursts

    def at(self, moment: float) -> int:
        """Return a moment of the recording's clock, in virtual milliseconds."""
        return self.long(moment - self._began)

    def part(self, seconds: float) -> float:
        """Return a duration per block, with fractions of a virtual millisecond."""
        return round(seconds * 1e3 * self.scale, 6)

    def long(self, seconds: float) -> int:
        """Return a duration, in virtual milliseconds."""
        return max(0, round(seconds * 1e3 * self.scale))


class _Mapping:
    """Parts of a scenario, made of a recording."""

    def __init__(self, recording: Recording, stories: Stories) -> None:
        self._recording = recording
        self._stories = stories
        self._pipelines = recording.description.pipelines
        engine = recording.description.engine
        self._engine: EngineDescription | None = engine
        self._recompute = stories.recompute
        self._as_engine = engine is not None and bool(engine.promote or stories.broke or self._recompute)
        self._times = _Times(stories)
        self._names: dict[str, str] = {}  # names of keys, by their hashes
        waiting = Counter([story.enqueued.waits for story in stories])
        self._events = {one: f"e{i}" for i, one in enumerate([one for one in stories.set_by if waiting[one] > 1])}

    def scenario(self, name: str) -> Scenario:
        """Return the whole scenario."""
        stories, times = self._stories, self._times
        steps = [Step(at_ms=times.of[story.order], store=self._store(story)) for story in stories]
        for number, read in enumerate(stories.reads):
            steps += self._read(number, read)
        steps += [Step(at_ms=times.of[stories.set_by[one]], fire=event) for one, event in self._events.items()]
        steps += self._bursts()
        latencies = self._latencies()
        faults = [
            *[fault for story in stories for fault in self._faults_of(story)],
            *[fault for copied in stories.copies for fault in self._failure(copied)],
            *self._delays(latencies),
            *self._slow_loads(),
            *self._shut_down(),
        ]
        scenario = Scenario(
            name=name,
            about=self._about(),
            tier=self._tiers(latencies),
            pipeline=self._specs(),
            engine=self._engine_spec(),
            step=sorted(steps, key=lambda step: step.at_ms),
            fault=sorted(faults, key=lambda fault: fault.at_ms or 0),
        )
        limit = times.at(stories.end) + longest_wait_ms(scenario) + _MORE_MS * times.scale
        return msgspec.structs.replace(scenario, limit_ms=limit)

    def _about(self) -> str:
        text = f"{len(self._stories):,} containers of a flight recording of {self._recording.seconds:.3g} s"
        if self._times.scale > 1:
            text += f", one recorded millisecond in {self._times.scale} virtual ones"
        if self._stories.noted:
            text += f". Noted: {', '.join(dict.fromkeys([one.rule for one in self._stories.noted]))}"
        if self._stories.thinned:
            text += f". {self._stories.thinned:,} containers more were counted only"
        if self._recording.lost:
            text += f". {self._recording.lost:,} records could not be read"
        return f"{text}."

    def _keys(self, column: bytes) -> list[str]:
        names = self._names
        return [names.setdefault(one, f"k{len(names)}") for one in hashes_of(column)]

    def _label(self, story: Story) -> str:
        number, pipeline = story.enqueued.number, story.enqueued.pipeline
        return f"c{number}" if len(self._stories.own) == 1 else f"p{pipeline}c{number}"

    # -- tiers and pipelines -------------------------------------------------------------------------------------------

    def _tiers(self, latencies: Mapping[str, int]) -> dict[str, TierSpec]:
        wanted = dict.fromkeys([one.to for one in self._pipelines])
        if self._as_engine and self._engine is not None:
            wanted |= dict.fromkeys(self._engine.tiers)
        known = {tier.name: tier for tier in self._recording.description.tiers}
        held = self._held_before()
        size = min([_MOST_BYTES, *[tier.block_bytes for tier in known.values() if tier.block_bytes >= 16]])
        return {name: _tier_spec(known.get(name), size, latencies.get(name, 0), held.get(name, ())) for name in wanted}

    def _held_before(self) -> dict[str, list[str]]:
        """Return the keys that each tier had before the recording began.

        They were found there, and no recorded store put them there.
        """
        stored: set[str] = set()
        held: dict[str, dict[str, None]] = {}
        events: list[tuple[float, Story | Read]] = [(story.settled_at, story) for story in self._stories]
        events += [(read.at, read) for read in self._stories.reads]
        for _, event in sorted(events, key=lambda pair: pair[0]):
            if isinstance(event, Story):
                for reason, column in event.settled.filtered if event.settled is not None else ():
                    if reason == "present":
                        found = [key for key in self._keys(column) if key not in stored]
                        held.setdefault(self._pipelines[event.enqueued.pipeline].to, {}).update(dict.fromkeys(found))
                stored.update(self._keys(event.enqueued.keys))
            elif isinstance(event.record, LookedUp):
                for tier, found in self._found(event.record):
                    held.setdefault(tier, {}).update(dict.fromkeys([key for key in found if key not in stored]))
        return {tier: list(keys) for tier, keys in held.items()}

    def _found(self, record: LookedUp) -> Iterator[tuple[str, list[str]]]:
        """Yield the keys that a lookup has found, by tier."""
        keys = self._keys(record.keys)
        for tier, blocks in record.segments:
            found, keys = keys[:blocks], keys[blocks:]
            yield tier, found
        if record.left is not None:
            yield record.left.tier, keys[: record.left.blocks]

    def _specs(self) -> dict[str, PipelineSpec]:
        if self._as_engine and self._engine is not None:
            first = self._engine.tiers[0]
            described = next(one for one in self._pipelines if one.to == first)
            return {first: self._with_knobs(PipelineSpec(source=described.source, to=first), described)}
        specs: dict[str, PipelineSpec] = {}
        for at, one in enumerate(self._pipelines):
            spec = PipelineSpec(
                source=one.source, to=one.to, policies=list(self._policies(at)), chain=self._known(one.chain)
            )
            specs[one.name] = self._with_knobs(spec, one)
        return specs

    def _known(self, chain: Sequence[str]) -> list[str]:
        names = {one.name for one in self._pipelines}
        return [name for name in chain if name in names]

    def _with_knobs(self, spec: PipelineSpec, described: PipelineDescription) -> PipelineSpec:
        """Return a pipeline with its recorded knobs.

        A knob that cannot be stretched that far keeps its default.
        """
        for knob, value in described.knobs.items():
            field = FIELD_OF.get(knob)
            if field is None or knob == "sweep_interval":
                continue
            said = self._times.long(value) if field.endswith("_ms") else value
            tried = msgspec.structs.replace(spec, **{field: said})
            wrong = wrong_knob(tried)
            if wrong is None or wrong[0] != field:
                spec = tried
        return spec

    def _policies(self, pipeline: int) -> Iterator[PolicySpec]:
        """Yield policies that filter the blocks which were filtered."""
        by_reason: dict[str, dict[str, None]] = {}
        for story in self._stories:
            if story.enqueued.pipeline == pipeline and story.settled is not None:
                for reason, column in story.settled.filtered:
                    by_reason.setdefault(reason, {}).update(dict.fromkeys(self._keys(column)))
        if "present" in by_reason:
            yield PolicySpec(do="present")
        for reason, keys in by_reason.items():
            if reason == "timeout":
                yield PolicySpec(do="hang", keys=compress(keys))
            elif reason == "error":
                yield PolicySpec(do="raise", keys=compress(keys))
            elif reason not in _OWN:
                yield PolicySpec(do="reject", keys=compress(keys), reason=reason)

    def _engine_spec(self) -> EngineSpec | None:
        engine = self._engine
        if engine is None or not self._as_engine:
            return None
        return EngineSpec(
            tiers=engine.tiers,
            promote=engine.promote,
            on_load_failure="retry" if engine.on_load_failure == "retry" else "miss",
            max_faults=engine.breaker.get("max_faults", 3),
            recompute_ms=self._times.part(self._recompute),
        )

    # -- steps of users ------------------------------------------------------------------------------------------------

    def _store(self, story: Story) -> StoreStep:
        keys = list(dict.fromkeys(self._keys(story.enqueued.keys)))
        several = len(self._stories.own) > 1 and not self._as_engine
        burst = story.order in self._stories.bursts
        return StoreStep(
            id=self._label(story),
            keys=compress(keys),
            per=len(keys),
            kind=story.enqueued.blocks,
            pipeline=self._pipelines[story.enqueued.pipeline].name if several else "",
            how="now" if burst else "wait",
            after=[self._after(story)] if burst or story.enqueued.waits else [],
        )

    def _after(self, story: Story) -> After:
        waits, settled = story.enqueued.waits, story.settled
        if not waits:
            return After(event=f"b{self._stories.bursts[story.order]}")
        if waits in self._events:
            return After(event=self._events[waits])
        if "batching" in story.reached:
            return After(ms=self._times.long(story.reached["batching"] - story.at))
        if settled is None:  # the recording ended before
            return After(ms=self._times.long(self._stories.end - story.at) + 1)
        if settled.error.startswith("PreconditionFailed") and not settled.error.endswith("/TooSlowError"):
            return After(do="raise", ms=self._times.long(story.settled_at - story.at))
        return After(do="never")

    def _bursts(self) -> Iterator[Step]:
        """Yield events that make the stores of one tick ready together.

        They come after the cancels that preceded admission.
        """
        ready: dict[int, int] = {}
        for story in self._stories:
            if story.order in self._stories.bursts and not story.enqueued.waits:
                early = [self._times.of[order] + 1 for order, step in story.cancels if not step]
                burst = self._stories.bursts[story.order]
                ready[burst] = max([ready.get(burst, 0), self._times.of[story.order], *early])
        for burst, at_ms in ready.items():
            yield Step(at_ms=at_ms, fire=f"b{burst}")

    def _read(self, number: int, read: Read) -> Iterator[Step]:
        at_ms, keys = self._times.of[read.order], self._keys(read.record.keys)
        if not keys or self._engine is None:
            return
        if not isinstance(read.record, LookedUp):
            for tier in self._engine.tiers:
                yield Step(at_ms=at_ms, delete=KeysStep(tier=tier, keys=compress(keys)))
        elif self._as_engine:
            yield Step(at_ms=at_ms, load=LoadStep(id=f"r{number}", keys=compress(keys)))
        else:
            parts = list(self._found(read.record))
            held = self._times.long(self._stories.held_for(read, sum([len(found) for _, found in parts])))
            for part, (tier, found) in enumerate(parts):
                load = LoadStep(id=f"r{number}x{part}", keys=compress(found), tier=tier, hold_ms=held)
                yield Step(at_ms=at_ms, load=load)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _faults_of(self, story: Story) -> Iterator[Fault]:
        label = self._label(story)
        for order, step in story.cancels:
            if step in ("xfer_start", "post_claim"):
                yield Fault(do="cancel", who=label, at_hook=step)
            else:
                yield Fault(do="cancel", who=label, at_ms=self._times.of[order])
        if story.settled is not None and story.settled.evicted:
            gone = compress(self._keys(story.settled.evicted))
            source = self._pipelines[story.enqueued.pipeline].source
            yield Fault(do="evict", of=label, at_hook="transfer", keys=gone, tier=source)

    def _failure(self, copied: Copied) -> Iterator[Fault]:
        """Yield the fault of a failed copy, at its starting hook."""
        failed = [group for story in copied.stories if story.settled is not None for group in story.settled.failed]
        kinds = {text for text, _ in failed}
        if any(text.startswith("DrainUnproven") for text in kinds):
            yield self._at_copy(copied, "drop" if kinds <= _OVERRAN else "unproven")
        elif any(text.endswith("/Unproven") for text in kinds):
            yield self._at_copy(copied, "unproven")
        elif self._never_ended(copied):
            yield self._at_copy(copied, "drop")
        elif "TransferFailed" in kinds:  # without a cause: the number of outcomes was wrong
            yield self._at_copy(copied, "miscount")
        else:
            keys = [key for text, column in failed if text != "DestinationFull" for key in self._keys(column)]
            if keys:
                yield self._at_copy(copied, "fail", keys=compress(dict.fromkeys(keys)))

    def _at_copy(self, copied: Copied, do: FaultKind, *, keys: str = "", ms: int = 1) -> Fault:
        tier, of = self._pipelines[copied.pipeline].to, self._label(copied.stories[0])
        return Fault(do=do, at_hook="xfer_start", of=of, tier=tier, keys=keys, ms=ms)

    def _never_ended(self, copied: Copied) -> bool:
        """Return whether a copy went on for long, without a recorded end.

        That is much longer than copies take.
        """
        return copied.over is None and self._stories.end - copied.began > max(0.5, 20 * self._stories.middle)

    def _shut_down(self) -> Iterator[Fault]:
        """Yield the shutdown of pipelines, if it hit uncommitted containers."""
        closed = [one.settled_at for one in self._stories if one.settled and one.settled.error == "PipelineClosed"]
        if closed:
            yield Fault(do="shut_down", at_ms=self._times.at(min(closed)))

    # -- durations of copies -------------------------------------------------------------------------------------------

    def _slow_loads(self) -> Iterator[Fault]:
        """Yield slow loads by rule 7: longer than computing the left-out blocks."""
        for tier, first, until, seconds in self._stories.slow_loads():
            at_ms = max(0, self._times.of[first.order] - 1)
            end = self._times.at(self._stories.end) + _MORE_MS if until is None else self._times.of[until.order]
            ms = self._times.long(2 * seconds) + 1
            yield Fault(do="slow_loads", at_ms=at_ms, for_ms=max(1, end - at_ms - 1), tier=tier, ms=ms)

    def _durations(self) -> Iterator[tuple[Copied, str, int]]:
        """Yield each copy that ended, with its tier and virtual milliseconds."""
        for copied in self._stories.copies:
            if copied.over is not None:
                yield copied, self._pipelines[copied.pipeline].to, self._times.long(copied.over - copied.began)

    def _latencies(self) -> dict[str, int]:
        by_tier: dict[str, list[int]] = {}
        for _, tier, took in self._durations():
            by_tier.setdefault(tier, []).append(took)
        return {tier: round(median(took)) for tier, took in by_tier.items()}

    def _delays(self, latencies: Mapping[str, int]) -> Iterator[Fault]:
        late = [
            (took - latencies[tier], copied)
            for copied, tier, took in self._durations()
            if took > 2 * latencies[tier] + 1
        ]
        late.sort(key=lambda pair: -pair[0])
        for more, copied in late[:_MOST_DELAYS]:
            yield self._at_copy(copied, "delay", ms=more)


def _tier_spec(described: TierDescription | None, size: int, latency: int, holds: Sequence[str]) -> TierSpec:
    if described is None:
        return TierSpec(block_bytes=size, latency_ms=latency, holds=compress(holds))
    return TierSpec(
        kind="file" if described.kind == "file" else "memory",
        capacity=min(described.capacity or 1 << 24, 1 << 24),
        block_bytes=size,
        latency_ms=latency,
        checksums=described.checksums,
        holds=compress(holds[: described.capacity or None]),
        eviction="adaptive",  # like the tiers themselves
    )
