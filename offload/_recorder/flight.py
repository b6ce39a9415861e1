"""FlightRecorder: observes pipelines and engines, and records their decisions.

It is an instrument of each pipeline, called on the trio thread, and encodes at once: an event is in the ring
when the hook returns. The cost is counted against an :class:`Allowance`. When that is spent, the recorder takes its
hooks of pipelines away, and a task that sleeps until there is enough again puts them back: meanwhile it costs nothing.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import attrs
import msgspec
import trio

from backends.abc import Failed, Key, Source, Tier, TransferExecutor
from backends.file import FileTier
from backends.memory import MemoryTier

from .._errors import ConfigError, DrainUnproven
from .._pipeline.container import OffloadBatch, OffloadContainer
from .._pipeline.marks import place_of
from .._pipeline.pipeline import Pipeline
from ..abc import Mismatch
from .allowance import Allowance
from .layout import RECORDING
from .recording import Recording, read_ring, to_bytes
from .records import (
    MOST_TEXT,
    AnyRecord,
    BatchReached,
    Blocks,
    CancelRequested,
    Deleted,
    Description,
    EngineDescription,
    Enqueued,
    Event,
    HealthChanged,
    KeyHasher,
    LeftBlocks,
    Loaded,
    LookedUp,
    Noted,
    PipelineDescription,
    Reached,
    Settled,
    Stage,
    Thinned,
    TierDescription,
    encode,
    error_text,
    grouped,
)
from .ring import MIB, Ring

if TYPE_CHECKING:
    from types import TracebackType

    from .._engine import Engine, Hit, LeftOut, LoadResult

_log = logging.getLogger("offload.recorder")
DEFAULT_BYTES: Final = 16 * MIB
"""Size of a ring: minutes of some hundred containers a second."""
_MOST_FILES: Final = 8
"""Incidents that one recorder saves by itself.

They are the first ones, since those that follow are most often their consequence.
"""
_PAY_AT: Final = 0.0005
"""Seconds of recording after which the allowance is checked."""
_MANY: Final = 1 << 32
"""Range of the numbers that distinguish preconditions."""
_KINDS: Final[dict[str, Blocks]] = {"WeakBlocks": "weak", "StrongBlocks": "strong", "ExternalBlocks": "external"}


@attrs.frozen
class RecorderStatistics:
    """A snapshot of a recorder."""

    records: int
    """Records written, those that the ring has forgotten included."""
    thinned: bool
    """Whether only numbers are recorded now."""
    thinned_containers: int
    """Containers of which only the number was recorded."""
    noted: int
    """Violations and exceptions."""
    incidents: int
    """Files saved because of them."""


class FlightRecorder:
    """Keeps recent decisions of pipelines and engines in a ring.

    Give it to :func:`offload.open_pipeline` or :func:`offload.open_engine` as one of the ``instruments``. Everything is
    called on one trio thread. Keys are hashed with a secret of this recording; tokens and bytes are not recorded at
    all.

    Args:
        path: a file for the ring, which ``offload incident save`` reads while this process runs or after it was killed.
            An existing file is kept as ``path.before``. ``None``: in memory.
        ring_bytes: size of the ring, from 1 to 64 MiB.
        most_share: the share of the thread's time that recording may take; the rest is recorded as numbers only. 1.0:
            everything is recorded.
        incidents: a directory; the recording is saved there when something is noted (:meth:`note`), eight times at
            most.
        clock: gives the time of a record, by default trio's.

    Raises:
        ConfigError: ``ring_bytes`` or ``most_share`` is out of range, or ``path`` is a file that is no recording.
        RecorderBusy: another process records into ``path``.
        OSError: the file cannot be made, or the disk has no room for it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ring_bytes: int = DEFAULT_BYTES,
        most_share: float = 0.01,
        incidents: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        if not 0.0 < most_share <= 1.0:
            raise ConfigError("most_share", most_share, "must be above 0 and at most 1")
        self._ring = Ring(path, ring_bytes)
        self._clock = clock
        self._hasher = KeyHasher()
        self._record_cost, self._key_cost = _costs(self._hasher)
        self._allowance = Allowance(most_share)
        self._timer: Callable[[], float] = perf_counter
        self._limited = most_share < 1.0
        self._spent = 0.0
        self._resumes_at = math.inf
        self._thinned_since = 0.0
        self._thinned_containers = 0
        self._is_waiting = False
        self._noted = 0
        self._incidents = None if incidents is None else Path(incidents)
        self._saved: list[Path] = []
        self._closed = False
        self._description = Description(version=_version())
        self._names: dict[object, str] = {}
        self._watched: list[_PipelineWatch] = []
        self._describe()

    def __repr__(self) -> str:
        where = "memory" if self._ring.path is None else os.fspath(self._ring.path)
        return f"<FlightRecorder in {where}: {len(self._watched)} pipelines>"

    # -- observation ---------------------------------------------------------------------------------------------------

    def watch(self, opened: Pipeline | Engine) -> None:
        """Observe a pipeline, or an engine with its pipelines.

        Giving the recorder as an instrument does this.
        """
        if isinstance(opened, Pipeline):
            self._watch_pipeline(opened)
        else:
            self._watch_engine(opened)
        self._describe()

    def _watch_pipeline(self, pipeline: Pipeline) -> None:
        if not self._watched:
            self._ring.begin(self._clock())
        source, to = self._tier(pipeline.source), self._tier(pipeline.destination, pipeline.name)
        chain = [] if pipeline._chain is None else pipeline._chain.names
        knobs = attrs.asdict(pipeline.config)
        knobs |= knobs.pop("batch_config")
        described = PipelineDescription(name=pipeline.name, source=source, to=to, chain=chain, knobs=knobs)
        self._description = msgspec.structs.replace(
            self._description, pipelines=[*self._description.pipelines, described]
        )
        watch = _PipelineWatch(self, len(self._watched), pipeline)
        self._watched.append(watch)
        if self._resumes_at == math.inf:
            pipeline.add_instrument(watch)
        else:
            self._begin_waiting()  # the run in which that began may be over

    def _watch_engine(self, engine: Engine) -> None:
        for name, tier in engine.tiers.items():
            self._tier(tier, name)
        described = EngineDescription(
            tiers=list(engine.tiers),
            promote=bool(engine.promote),
            on_load_failure=engine.on_load_failure,
            breaker=attrs.asdict(next(iter(engine._breaker_tiers.values()))._config),
            load_or_recompute={} if engine._choice is None else attrs.asdict(engine._choice.config),
        )
        self._description = msgspec.structs.replace(self._description, engine=described)
        for pipeline in engine.pipelines:
            self._watch_pipeline(pipeline)
        engine.add_instrument(_EngineWatch(self, engine))

    def _tier(self, place: object, name: str = "") -> str:
        """Return the name of a place; describe it when it is new."""
        place = place_of(place)
        if place in self._names:
            return self._names[place]
        stem = (place.name if isinstance(place, TransferExecutor) else "") or name or "device"
        known = {tier.name for tier in self._description.tiers}
        name = next(one for one in (stem, *[f"{stem}-{n}" for n in range(2, 1_000)]) if one not in known)
        self._names[place] = name
        described = _described(place, name)
        self._description = msgspec.structs.replace(self._description, tiers=[*self._description.tiers, described])
        return name

    def _describe(self) -> None:
        try:
            self._ring.describe(msgspec.json.encode(self._description))
        except ValueError as error:  # no reason for a pipeline not to open
            _log.warning("%s: the pipelines opened last are recorded without a name", error)

    # -- records
    # ---------------------------------------------------------------------------------------------------------

    def note(self, rule: str, text: str = "") -> None:
        """Record a fault, and save the recording if configured.

        Args:
            rule: the broken rule, or the name of an exception. A scenario that is made of the recording is to break the
                same.
            text: more about it. It is in the recording as it is: have no key and no token in it.
        """
        self._noted += 1
        if not self._closed:
            self._ring.append(self._now(), encode(Noted(rule[:MOST_TEXT], text[:MOST_TEXT])))
            self._spent += self._record_cost
        if self._incidents is None or len(self._saved) >= _MOST_FILES:
            return
        path = self._incidents / f"{os.getpid()}-{len(self._saved) + 1}.incident"
        try:
            self.save(path)
        except OSError:
            _log.exception("the recording could not be saved as %s", path)
            return
        self._saved.append(path)
        _log.error("%s was noted, and the recording saved as %s", rule, path)

    def mismatch(self, mismatch: Mismatch) -> None:
        """Record that a load differed from its key's content.

        It is the hook of :class:`offload.abc.EngineInstrument`.
        """
        self.note("bytes", f"{mismatch.tier}, found by what was {mismatch.found_by}")

    def recording(self) -> Recording:
        """Return the current content of the ring."""
        return read_ring(memoryview(self._ring.memory))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the current content of the ring as a file.

        It is closed to other users as the ring is.

        Raises:
            OSError: it cannot be written, or there is a file that is no recording.
        """
        RECORDING.write(path, to_bytes(self.recording()))

    def statistics(self) -> RecorderStatistics:
        """Return a snapshot."""
        return RecorderStatistics(
            records=self._ring.records,
            thinned=self._resumes_at < math.inf,
            thinned_containers=self._thinned_containers,
            noted=self._noted,
            incidents=len(self._saved),
        )

    def close(self) -> None:
        """Stop recording. A file stays as it is. Idempotent."""
        if not self._closed:
            self._closed = True
            self._ring.close()

    def __enter__(self) -> FlightRecorder:
        """Return the recorder, which is closed when the block is left.

        An exception that leaves the block is recorded, unless it is a cancel.
        """
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.note("exception", error_text(error))
        self.close()

    def _now(self) -> float:
        """Return the time; outside of trio, that of the last record.

        Only trio knows the time.
        """
        try:
            return self._clock()
        except RuntimeError:
            recording = self.recording()
            return recording.entries[-1].at if recording.entries else recording.began

    def _write(self, record: AnyRecord, keys: int) -> None:
        if self._closed:
            return
        self._ring.append(self._clock(), encode(record))
        self._spent = spent = self._spent + self._record_cost + keys * self._key_cost
        if spent > _PAY_AT:
            self.pay()

    # -- cost ----------------------------------------------------------------------------------------------------------

    def pay(self) -> None:
        """Charge the allowance; begin or end thinning if it requires so."""
        now = self._timer()
        if not self._limited:
            self._spent = 0.0
            return
        spent, self._spent = self._spent, 0.0
        left = self._allowance.pay(now, spent)
        if self._resumes_at == math.inf:
            if left < 0:
                self._thin(now)
        elif now >= self._resumes_at:
            if left > 0:
                self._resume(now)
            else:
                self._resumes_at = self._allowance.resumes_at(now)

    def _thin(self, now: float) -> None:
        self._thinned_since = now
        self._resumes_at = self._allowance.resumes_at(now)
        for watch in self._watched:
            watch.leave()
        self._begin_waiting()
        # A pipeline rearranges its hooks, which takes as long as dozens of records.
        self._spent += self._timer() - now

    def _begin_waiting(self) -> None:
        """Start a task that waits until there is enough allowance again.

        It is of this trio run: a hook for that would cost each batch.
        """
        if not self._is_waiting:
            self._is_waiting = True
            trio.lowlevel.spawn_system_task(self._wait)

    async def _wait(self) -> None:
        try:
            while self._resumes_at < math.inf and not self._closed:
                await trio.sleep(max(0.0, self._resumes_at - self._timer()))
                self.pay()
        except Exception:  # in a system task it would end the run; as with an instrument, it only ends the details
            _log.exception("%r no longer records details", self)
        finally:
            self._is_waiting = False

    def _resume(self, now: float) -> None:
        self._resumes_at = math.inf
        counts = [watch.come_back() for watch in self._watched]
        containers, batches = sum([one for one, _ in counts]), sum([one for _, one in counts])
        self._thinned_containers += containers
        self._write(Thinned(now - self._thinned_since, containers, batches), 0)
        self._spent += self._timer() - now


# --- hooks ---------------------------------------------------------------------------------------------------------------


class _PipelineWatch:
    """The hooks of one pipeline that record details."""

    def __init__(self, recorder: FlightRecorder, index: int, pipeline: Pipeline) -> None:
        self._index = index
        self._pipeline = pipeline
        self._write = recorder._write
        self._column = recorder._hasher.column
        self._recorder = recorder
        self._queue = pipeline._admission.inbound.parked
        self._left = (0, 0)

    def __repr__(self) -> str:
        return f"{self._recorder!r} at {self._pipeline.name}"

    def leave(self) -> None:
        """Record nothing of this pipeline from now on."""
        self._left = (self._pipeline._enqueued, self.batches)
        self._pipeline.remove_instrument(self)

    def come_back(self) -> tuple[int, int]:
        """Record again. Returns the numbers of containers and batches meanwhile."""
        self._pipeline.add_instrument(self)
        containers, batches = self._left
        return self._pipeline._enqueued - containers, self.batches - batches

    @property
    def batches(self) -> int:
        """Number of batches that were copied so far."""
        return self._pipeline._transfer.batches

    def enqueued(self, container: OffloadContainer) -> None:
        blocks = container.blocks
        keys = blocks.keys
        record = Enqueued(
            self._index,
            container.number,
            _KINDS.get(type(blocks).__name__, "weak"),
            len(keys),
            0 if container.precondition is None else 1 + hash(container.precondition) % _MANY,
            self._column(keys),
            len(self._queue),
        )
        self._write(record, len(keys))

    def cancel_requested(self, container: OffloadContainer) -> None:
        self._write(CancelRequested(self._index, container.number), 0)

    def awaiting(self, container: OffloadContainer) -> None:
        if container.precondition is not None:
            self._reached(container, "awaiting")

    def batching(self, container: OffloadContainer) -> None:
        if container.precondition is not None:
            self._reached(container, "batching")

    def _reached(self, container: OffloadContainer, stage: Stage) -> None:
        self._write(Reached(self._index, container.number, stage), 0)

    def transfer(self, batch: OffloadBatch) -> None:
        self._batch("transfer", batch.containers)

    def post_claim(self, containers: Sequence[OffloadContainer]) -> None:
        self._batch("post_claim", containers)

    def xfer_start(self, batch: OffloadBatch) -> None:
        self._batch("xfer_start", batch.containers)

    def xfer_end(self, batch: OffloadBatch) -> None:
        self._batch("xfer_end", batch.containers)

    def _batch(self, event: Event, containers: Sequence[OffloadContainer]) -> None:
        self._write(BatchReached(self._index, event, [container.number for container in containers[:4_096]]), 0)

    def settled(self, container: OffloadContainer) -> None:
        size, completed = len(container.blocks.keys), len(container.completed)
        if completed == size and container.error is None:
            self._write(Settled(self._index, container.number, "COMPLETE", size, size), 0)
            return
        hasher, error = self._recorder._hasher, container.error
        record = Settled(
            self._index,
            container.number,
            container.status.name,  # type: ignore[arg-type]  # a terminal one
            size,
            completed,
            error_text(error),
            grouped(container.filtered, hasher),
            grouped(container.failed, hasher),
            hasher.column(container.evicted),
        )
        self._write(record, size)
        if isinstance(error, DrainUnproven):
            self._recorder.note("unproven", error_text(error))


class _EngineWatch:
    """The hooks of one engine."""

    def __init__(self, recorder: FlightRecorder, engine: Engine) -> None:
        self._recorder = recorder
        self._engine = engine
        self._states = dict.fromkeys(engine.tiers, "closed")

    def looked_up(self, keys: Sequence[Key], hit: Hit) -> None:
        segments = [(segment.name[:MOST_TEXT], segment.blocks) for segment in hit._segments[:64]]
        unavailable = [(name[:MOST_TEXT], error_text(error)) for name, error in islice(hit.unavailable.items(), 64)]
        column = self._recorder._hasher.column(keys)
        self._recorder._write(LookedUp(column, len(keys), segments, unavailable, _left(hit.left_out)), len(keys))
        self._note_health()

    def loaded(self, hit: Hit, result: LoadResult, seconds: float) -> None:
        asked, first = len(hit.keys), result.outcomes[result.loaded] if result.loaded < len(hit.keys) else None
        error = first.error if isinstance(first, Failed) else first
        text = "" if error is None else error_text(error if isinstance(error, BaseException) else type(error).__name__)
        column = self._recorder._hasher.column(hit.keys)
        self._recorder._write(Loaded(column, asked, result.loaded, seconds, text, _left(result.left_out)), asked)
        self._note_health()

    def deleted(self, keys: Sequence[Key]) -> None:
        self._recorder._write(Deleted(self._recorder._hasher.column(keys), len(keys)), len(keys))

    def _note_health(self) -> None:
        for name, tier in self._engine._breaker_tiers.items():
            state = tier.health.state.value
            if state != self._states[name]:
                self._states[name] = state
                self._recorder._write(HealthChanged(name[:MOST_TEXT], state), 0)


def _left(left: LeftOut | None) -> LeftBlocks | None:
    if left is None:
        return None
    return LeftBlocks(
        left.why, left.tier[:MOST_TEXT], left.start, left.blocks, left.load_seconds, left.recompute_seconds
    )


# --- descriptions and costs ------------------------------------------------------------------------------------------------


def _described(place: object, name: str) -> TierDescription:
    block_bytes = place.block_bytes if isinstance(place, Source | Tier) else 0
    capacity = place.statistics().capacity_bytes if isinstance(place, Tier) and block_bytes else 0
    kind = "memory" if isinstance(place, MemoryTier) else "file" if isinstance(place, FileTier) else "other"
    return TierDescription(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        capacity=capacity // block_bytes if block_bytes else 0,
        block_bytes=block_bytes,
        checksums=bool(getattr(place, "checksums", True)),
    )


def _version() -> str:
    try:
        return version("trio-offload")
    except PackageNotFoundError:  # run from a tree that was never installed
        return ""


_TRIALS: Final = 64
_COLD: Final = 3.0
"""Factor by which a record takes longer than in a warm loop.

Measured were 2.1 to 2.2, and the limit must be kept.
"""


def _costs(hasher: KeyHasher) -> tuple[float, float]:
    """Measure the seconds that a record, and each key, cost here.

    Machines differ by a factor of five.
    """
    ring = Ring(None, MIB)
    keys = [number.to_bytes(16, "little") for number in range(64)]
    try:
        best = [min([_seconds(ring, hasher, keys[:n]) for _ in range(3)]) / _TRIALS for n in (0, len(keys))]
    finally:
        ring.close()
    # In a pipeline there are the calls of the hook and of the clock, and cold caches.
    return _COLD * best[0], max(0.0, _COLD * (best[1] - best[0])) / len(keys)


def _seconds(ring: Ring, hasher: KeyHasher, keys: Sequence[Key]) -> float:
    began = perf_counter()
    for number in range(_TRIALS):
        ring.append(began, encode(Enqueued(0, number, "weak", len(keys), 0, hasher.column(keys))))
    return perf_counter() - began
