"""Rules of our own pipelines that need no watching.

* :func:`wrong_end`: the end of one container adds up (I2, I4, I5, I6).
* :class:`ReadyOrder`: containers leave for a batch first in, first out, and no batch is too large (S36, S38).
* :func:`late_batches`: no ready container waits longer than the flush interval while a transfer slot is idle (I9).
* :func:`at_rest`: nothing is held (I1), and :func:`tasks_of_the_package`: no task is left (I8).
* :class:`Causes`: the scenario has a reason for each container's end (I9). Possible ends are derived from the program,
  and from the faults that hit something; so an end that is caused by a neighbour, and could not happen to the container
  alone, has no reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, cast

import attrs

from backends import BackendError, DamagedBlock
from backends.abc import CapacityError, Key, StrongBlocks
from backends.testing import FakeTier
from offload import (
    DestinationFull,
    DrainUnproven,
    OffloadContainer,
    Pipeline,
    PipelineClosed,
    PolicyFailed,
    PreconditionFailed,
    Progress,
    Status,
    TransferFailed,
    TransferHandle,
    TransferResult,
)
from offload._pipeline.marks import marks_of

from ._clock import tasks
from ._fields import config_of
from ._names import expand
from ._program import TICK, PipelineSpec

if TYPE_CHECKING:
    from ._oracle import Oracle
    from ._world import Request, VirtualWorld


@attrs.define(eq=False)
class ContainerHistory:
    """Record of one container in the ledger."""

    container: OffloadContainer
    pipeline: Pipeline
    status: Status = Status.EVALUATING
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Numbers of passed blocks and of each end, at the last look."""
    route: bool = False
    """Whether it came down a chain, committed from the start."""
    committed: bool = False
    """Whether ``post_claim`` announced its commit."""
    copied: Sequence[Key] = ()
    """Keys with which the copy started."""
    over: bool = False
    """Whether the copy is over."""
    settled: int = 0

    @property
    def handle(self) -> TransferHandle:
        """Handle for inspection, equivalent to one that enqueue returned."""
        handle = object.__new__(TransferHandle)
        handle._container = self.container
        return handle

    def __repr__(self) -> str:
        return f"{self.pipeline.name}#{self.container.number}"


def wrong_end(history: ContainerHistory) -> Iterator[str]:
    """Yield the inconsistencies of a container's end, each with its rule."""
    container, result = history.container, history.handle.result
    if result is None:
        yield f"I2: {history} never ended: {container.status}"
        return
    if history.settled != 1:
        yield f"I2: {history} settled {history.settled} times"
    ends = (list(result.completed), list(result.filtered), list(result.failed), list(result.evicted))
    known = [key for end in ends for key in end]
    if len(set(known)) != len(known) or not set(known) <= set(container.blocks.keys):
        yield f"I5: {history}: its blocks did not end once each: {result}"
    completed, filtered, failed, evicted = map(len, ends)
    size = len(container.blocks.keys)
    passed = len(history.handle.passed_blocks)
    if history.committed:
        if passed + filtered != size:
            yield f"I6: {history}: {passed} passed + {filtered} filtered, of {size}"
        if completed + failed + evicted != passed:
            yield f"I6: {history}: {completed} + {failed} + {evicted} of {passed} that passed: {result}"
        if result.status is Status.CANCELLED:
            yield f"I4: {history} was cancelled after its commit"
    else:
        if history.copied or completed or evicted:
            yield f"I4: {history} was never committed, but {result}"
        if result.status is Status.COMPLETE and filtered != size:
            yield f"I6: {history} is complete without a commit: {result}"
    if result.status is Status.COMPLETE and (failed or result.error is not None):
        yield f"I5: {history} is complete, but {result}"
    if result.status is Status.FAILED and not failed and result.error is None:
        yield f"I9: {history} failed without a cause"
    if history.handle.progress != Progress(size, passed, filtered, completed, failed, evicted):
        yield f"S56: {history} ended with {history.handle.progress}, which is not its result {result}"


# --- order of batches (S36, S38) --------------------------------------------------------------------------------------


class ReadyOrder:
    """Containers that are ready for a batch, by pipeline, in order."""

    def __init__(self) -> None:
        self._ready: dict[Pipeline, dict[OffloadContainer, None]] = {}

    def joins(self, pipeline: Pipeline, container: OffloadContainer) -> None:
        """Record that a container is ready for a batch."""
        self._ready.setdefault(pipeline, {})[container] = None

    def gone(self, pipeline: Pipeline, container: OffloadContainer) -> None:
        """Record that a container has settled; it leaves the order."""
        self._ready.get(pipeline, {}).pop(container, None)

    def leave(self, pipeline: Pipeline, batch: Sequence[OffloadContainer]) -> Iterator[str]:
        """Record a batch of containers that leave together.

        Yields the violations of order and size, each with its rule.
        """
        ready = self._ready.get(pipeline, {})
        # A container that was given back, since its neighbours were too large for the tier, left the line before: it
        # goes first.
        leaving = [container for container in batch if container in ready]
        first = list(islice(ready, len(leaving)))
        if first != leaving:
            late = [container.number for container in first if container not in leaving] or [first[0].number]
            yield f"S38: {pipeline.name}#{leaving[-1].number} leaves for a batch before {late}, ready earlier"
        for container in leaving:
            del ready[container]
        blocks, most = sum(len(container.keys) for container in batch), pipeline.config.batch_config.max_batch_size
        if blocks > most and len(batch) > 1:
            yield f"S36: a batch of {pipeline.name} has {blocks} blocks of {len(batch)} containers, and {most} are allowed"


# --- latency (I9) -----------------------------------------------------------------------------------------------------


def late_batches(
    pipeline: Pipeline,
    log: Sequence[tuple[float, Pipeline, str, tuple[int, ...]]],
    jumps: Sequence[tuple[float, float]] = (),
) -> Iterator[str]:
    """Yield the containers that waited too long in a pipeline.

    Args:
        pipeline: the pipeline.
        log: hooks of all pipelines, each with its time and the numbers of the containers.
        jumps: jumps of the clock, with start and end: no wait can be judged across one.
    """
    ready: dict[int, float] = {}
    left: dict[int, float] = {}
    busy: list[list[float]] = []  # start and end of each slot's use
    carried: dict[int, list[float]] = {}
    times: list[float] = []
    for time, where, hook, numbers in log:
        if where is not pipeline:
            continue
        times.append(time)
        if hook == "batching":
            ready[numbers[0]] = time
        elif hook == "transfer":
            busy.append(interval := [time, time])
            for number in numbers:
                left.setdefault(number, time)
                carried[number] = interval
        elif hook == "settled" and numbers[0] in carried:
            carried[numbers[0]][1] = time
    slots = pipeline.config.max_concurrent_transfers
    patience = pipeline.config.batch_config.flush_interval
    times = sorted(set(times))
    for number, when in left.items():
        due = ready[number] + patience
        if when <= due or any(since < when and to > ready[number] for since, to in jumps):
            continue
        for earlier, later in pairwise([due, *[time for time in times if due < time < when], when]):
            if sum(start <= earlier and later <= end for start, end in busy) < slots:
                yield f"{pipeline.name}#{number} was ready at {ready[number]}, a slot was idle from {earlier}"
                break


# --- leaks (I1, I8) ---------------------------------------------------------------------------------------------------


def source_of(pipeline: Pipeline) -> FakeTier:
    """Return the source of a pipeline, as a fake.

    All tiers that are checked here are fakes.
    """
    return cast("FakeTier", pipeline.source)


def destination_of(pipeline: Pipeline) -> FakeTier:
    """Return the destination of a pipeline, as a fake."""
    return cast("FakeTier", pipeline.destination)


def at_rest(pipeline: Pipeline, *tiers: FakeTier, quarantined: bool = True) -> dict[str, int]:
    """Return the holdings of a pipeline or tier: empty at rest (I1).

    Quarantined copies are released first, unless ``quarantined`` is false.
    """
    statistics = pipeline.statistics()
    left: dict[str, int] = {
        "budget": statistics.used_blocks,
        "waiting for room": statistics.waiting_enqueues,
        "inside": statistics.inside,
        "in admission": statistics.in_admission,
        "in awaiting": statistics.in_awaiting,
        "in batching": statistics.in_batching,
        "in transfer": statistics.in_transfer,
        "in chain": statistics.in_chain,
        "found by the safety net": statistics.swept_late,
    }
    for entry in pipeline.quarantine if quarantined else ():
        entry.release()
    left["quarantined"] = pipeline.statistics().quarantined
    left["pending marks"] = len(marks_of(pipeline.destination))
    for tier in tiers or (source_of(pipeline), destination_of(pipeline)):
        pool = tier.pool.statistics()
        left[f"refs in {tier!r}"] = pool.held
        left[f"reservations in {tier!r}"] = pool.staged
        left[f"waiting in {tier!r}"] = pool.waiting
        left[f"copies into {tier!r}"] = tier.copying
    return {what: amount for what, amount in left.items() if amount}


def judge_share(world: VirtualWorld, pipeline: Pipeline) -> None:
    """Check that an optional route keeps to its share of its source."""
    tier = source_of(pipeline)
    # A batch is in quarantine as a whole, while its containers settle one by one.
    quarantined = {key for entry in pipeline.quarantine for key in entry.keys}
    live = [one.blocks for one in pipeline._settlement.live]
    strong = [blocks for blocks in live if isinstance(blocks, StrongBlocks) and blocks.refs]
    held = pipeline.quarantined_blocks + len(
        [key for blocks in strong for key in blocks.keys if key not in quarantined]
    )
    most = max(1, int(tier.pool.capacity * pipeline.config.route_share))
    if held > most:
        world.wrong("I1", f"{pipeline!r} holds {held} blocks of {tier!r}, and its share is {most}")


def tasks_of_the_package() -> list[str]:
    """Return the names of all tasks of ``offload``, except ``offload.testing`` (I8)."""
    return [
        task.name
        for task in tasks()
        if task.name.startswith("offload.") and not task.name.startswith("offload.testing.")
    ]


# --- causes (I9) ------------------------------------------------------------------------------------------------------


_RAISE = frozenset({"fail", "torn", "duplicate", "miscount", "peer_death"})
"""Faults that make a copy raise."""
_SLACK = 4 * TICK
"""Time that unwinding and rounding may add, in seconds."""


class Causes:
    """Possible causes of each end; ends without one are violations.

    They are derived from the scenario and from the events of the run.
    """

    def __init__(self, world: VirtualWorld, oracle: Oracle) -> None:
        self._world = world
        self._oracle = oracle
        self._hit: dict[str, set[str]] = {}
        """Kinds of faults that hit something in each tier."""
        self._failing: dict[str, set[Key]] = {}
        """Blocks that a fault made fail, in each tier."""
        self._stored: dict[str, int] = {}
        """Blocks that may need room in each tier."""
        self._shared: dict[tuple[str, Key], int] = {}
        for planned in world.faults:
            if planned.entry is not None and planned.entry.fired and planned.entry.where in world.tier_models:
                self._hit.setdefault(planned.entry.where, set()).add(planned.fault.do)
        for name, model in world.tier_models.items():
            self._failing[name] = set(model.failed)
            self._stored[name] = len(expand(model.spec.holds))
        for request in world.requests.values():
            if request.state:
                for tier in oracle.below(request.pipeline):
                    self._stored[tier] += len(request.keys)
                    for key in request.keys:
                        self._shared[tier, key] = self._shared.get((tier, key), 0) + 1
        self._jumped = bool(world.jumps)
        self._fires = {step.fire: step.at_ms * TICK for step in world.scenario.step if step.fire}

    def all(self) -> Iterator[tuple[str, str]]:
        """Yield the ends without a reason, each with its broken rule."""
        for request in self._world.requests.values():
            if isinstance(request.result, TransferResult):
                yield from self._one(request, request.result)
        if self._world.locks:
            yield "I1", f"{self._world.locks} locks are still held"

    def _one(self, request: Request, result: TransferResult) -> Iterator[tuple[str, str]]:
        if request.in_time and result.status is not Status.CANCELLED:
            yield "I4", f"{request.label} was cancelled in time, and ended {result}"
        if result.status is Status.CANCELLED and not request.cancelled:
            yield "I9", f"{request.label} was cancelled, and nobody asked for that"
        spec = self._world.pipelines[request.pipeline]
        tiers = self._oracle.required_below(request.pipeline)
        for key, error in [(None, result.error), *result.failed.items()]:
            if error is not None and not self._may_fail(request, spec, tiers, key, error):
                cause = f" because of {error.__cause__!r}" if error.__cause__ is not None else ""
                about = "" if key is None else f" for {key.decode()}"
                yield "I9", f"{request.label} failed{about} with {error!r}{cause}, for which there is no reason"
        for key, reason in result.filtered.items():
            if not self._may_filter(request, spec, key, reason):
                yield "I9", f"{request.label} had {key.decode()} filtered as {reason!r}, for which there is no reason"
        if result.completed and request.label in self._world.tier_models[spec.to].miscounted:
            yield "S34", f"{request.label} believes a copy that did not answer once for each block: {result}"
        missing = [route for route in spec.chain if route not in result.routes] if result.completed else []
        if missing:
            yield "I5", f"{request.label} has ended, and nothing is known of its way through {', '.join(missing)}"
        owed = [route for route in spec.optional_chain if route in result.routes]
        if owed:
            yield "I5", f"{request.label} has waited for {', '.join(owed)}, which is not required"
        gone = self._world.evicted.get(spec.source, {})
        filled = any(spec.source == other.to for other in self._world.pipelines.values())
        for key in result.evicted:
            if request.store.kind != "weak" or not (key in gone or filled):
                yield "I9", f"{request.label} had {key.decode()} evicted, for which there is no reason"

    # -- errors --------------------------------------------------------------------------------------------------------

    def _may_fail(
        self, request: Request, spec: PipelineSpec, tiers: tuple[str, ...], key: Key | None, error: BaseException
    ) -> bool:
        hit = set().union(*[self._hit.get(tier, set()) for tier in tiers])
        match error:
            case PolicyFailed():
                return any(
                    one.on_policy_error == "fail" and (self._may_raise(one, request) or self._may_overrun(one, request))
                    for one in self._on_its_way(spec)
                )
            case PreconditionFailed():
                return self._may_not_hold(spec, request)
            case PipelineClosed():
                return self._world.closed_at is not None or self._world.stuck
            case DestinationFull():
                return "full" in hit or any(self._may_be_full(tier) for tier in tiers)
            case DrainUnproven():
                return self._may_be_unproven(request, tiers, hit)
            case TransferFailed():
                return bool(hit & (_RAISE | self._silent(tiers))) or _too_large(
                    error, request, min(self._world.tiers[tier].capacity for tier in tiers)
                )
            case DamagedBlock():  # found on its way out of a tier in which one of its bits was flipped
                return any(error.key in model.flipped for model in self._world.tier_models.values())
            case OSError():
                return any(key in self._failing[tier] for tier in tiers) or (key is None and "fail" in hit)
            case BackendError():  # a page store reports that a store was not done, and that nothing of it is left
                return bool(hit & self._silent(tiers))
            case ValueError():  # a route whose budget is smaller than its chain's containers can never accept them
                return any(
                    one.budget_blocks is not None and len(request.keys) > one.budget_blocks
                    for one in self._on_its_way(spec)
                )
            case _:
                return False

    def _on_its_way(self, spec: PipelineSpec) -> Iterator[PipelineSpec]:
        """Yield a pipeline and, after it, all routes below it."""
        yield spec
        for route in spec.chain:
            yield from self._on_its_way(self._world.pipelines[route])

    def _silent(self, tiers: tuple[str, ...]) -> set[str]:
        """Return the kinds of faults that keep a page store from answering.

        They fail the request; other tiers only take longer.
        """
        kinds = {self._world.tiers[tier].kind for tier in tiers}
        return {"stall", "drop", "peer_death"} if "maru" in kinds else set()

    def _may_raise(self, spec: PipelineSpec, request: Request) -> bool:
        return any(policy.do == "raise" and _about(policy.keys, request) for policy in spec.policies)

    def _may_overrun(self, spec: PipelineSpec, request: Request) -> bool:
        waiting = [policy for policy in spec.policies if policy.ms or policy.do in ("sleep", "hang")]
        if waiting and self._jumped:
            return True
        acting = [policy for policy in waiting if _about(policy.keys, request)]
        needed = sum(policy.ms for policy in acting) * TICK
        return any(policy.do == "hang" for policy in acting) or needed >= config_of(spec).policy_timeout

    def _may_not_hold(self, spec: PipelineSpec, request: Request) -> bool:
        patience = config_of(spec).precondition_timeout
        for after in request.store.after:
            if after.do in ("raise", "never") or self._world.slow or self._jumped:
                return True
            times = [request.asked_at + after.ms * TICK] if after.ms is not None else []
            if after.event:
                times.append(self._fires.get(after.event, float("inf")))
            if times and min(times) + _SLACK >= request.asked_at + patience:
                return True
            if times and (self._world.leaves or self._world.closed_at is not None):
                return True  # the step that fires it may never be done
        return False

    def _may_be_full(self, tier: str) -> bool:
        return self._stored[tier] > self._world.tiers[tier].capacity

    def _may_be_unproven(self, request: Request, tiers: tuple[str, ...], hit: set[str]) -> bool:
        world = self._world
        if hit & {"unproven", "drop", "stall", "delay", "reorder"} or world.closed_at is not None or self._jumped:
            return True
        for spec in world.pipelines.values():
            if spec.to in tiers:
                config, size = config_of(spec), world.tiers[spec.to].block_bytes
                most = max(config.batch_config.max_batch_size, *[len(one.keys) for one in world.requests.values()])
                if world.tier_models[spec.to].duration(most * size) >= config.transfer_timeout:
                    return True
        return False

    # -- filtered ------------------------------------------------------------------------------------------------------

    def _may_filter(self, request: Request, spec: PipelineSpec, key: Key, reason: str) -> bool:
        policies = spec.policies
        if any(one.do == "reject" and one.reason == reason and _about_key(one.keys, key) for one in policies):
            return True
        if reason == "present":
            return any(one.do == "present" for one in policies)
        if reason == "pending":
            return self._shared.get((spec.to, key), 0) > 1
        if reason == "overflow":
            return spec.on_overflow == "drop" and request.store.kind == "weak"
        if reason == "error":
            return spec.on_policy_error != "fail" and self._may_raise(spec, request)
        if reason == "timeout":
            return spec.on_policy_error != "fail" and self._may_overrun(spec, request)
        return False


def _too_large(error: BaseException, request: Request, capacity: int) -> bool:
    return isinstance(error.__cause__, CapacityError) and len(request.keys) > capacity


def _about(keys: str, request: Request) -> bool:
    return not keys or not {key.encode() for key in expand(keys)}.isdisjoint(request.keys)


def _about_key(keys: str, key: Key) -> bool:
    return not keys or key in {one.encode() for one in expand(keys)}
