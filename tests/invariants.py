"""The invariants I1..I9 of a pipeline as one judge, and the small world in which scenarios are played.

A :class:`Ledger` watches pipelines as an instrument does, notes what it sees, and never raises while they run: its
findings are in ``violations``, and :meth:`Ledger.judge` raises them when everything is over. It believes nobody's word
about the commit but the announcement ``post_claim``, and judges what was copied by the bytes themselves.

* I1 at rest there is no live source guard, pending mark, destination reservation, lock or limiter token.
* I2 each handle becomes terminal exactly once; its status never goes backwards.
* I3 confirmed implies I1 for that container, at that moment.
* I4 cancelled before commit implies zero bytes moved and nothing registered.
* I5 committed implies every block ends in exactly one of completed, failed, evicted.
* I6 once committed: passed + filtered = input; completed + failed + evicted = passed.
* I7 no key is transferred twice at the same time to one tier.
* I8 no task is left in the nursery.
* I9 a container's end has its own cause: no neighbour fails or waits because another was cancelled.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import attrs
import trio

from backends.abc import Blocks, Key, StrongBlocks
from backends.testing import FakeTier, payload_of
from offload import (
    NO_WAIT,
    BatchConfig,
    DrainUnproven,
    OffloadBatch,
    OffloadContainer,
    Pipeline,
    PipelineConfig,
    Progress,
    Status,
    TransferHandle,
    open_pipeline,
)
from offload._marks import marks_of
from offload.instruments import Every

TICK = 1 / 1024  # exact in floats, as are its multiples: what falls together, falls together

_RANK = {Status.EVALUATING: 0, Status.QUEUED: 1, Status.TRANSFERRING: 2}


def keys_of(label: str, n: int) -> list[Key]:
    """``a0``, ``a1``, ..."""
    return [f"{label}{i}".encode() for i in range(n)]


# --- at rest ------------------------------------------------------------------------------------------------------


def at_rest(pipeline: Pipeline, *tiers: FakeTier) -> dict[str, object]:
    """What a pipeline, or a tier, still holds: empty at rest (I1). Quarantined copies are released first."""
    statistics = pipeline.statistics()
    left: dict[str, object] = {
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
    for entry in pipeline.quarantine:
        entry.release()
    left["quarantined"] = pipeline.statistics().quarantined
    left["pending marks"] = len(marks_of(pipeline.destination))
    for tier in tiers or (pipeline.source, pipeline.destination):
        pool = tier.pool.statistics()
        left[f"guards in {tier!r}"] = pool.held
        left[f"reservations in {tier!r}"] = pool.staged
        left[f"waiting in {tier!r}"] = pool.waiting
        left[f"copies into {tier!r}"] = tier.copying
    return {what: amount for what, amount in left.items() if amount}


def tasks_of_the_package() -> list[str]:
    """The names of all tasks that run a function of ``offload`` (I8)."""
    found: list[str] = []
    root = trio.lowlevel.current_root_task()
    todo = [root] if root is not None else []
    while todo:
        task = todo.pop()
        if task.name.startswith("offload."):
            found.append(task.name)
        for nursery in task.child_nurseries:
            todo += nursery.child_tasks
    return found


# --- the ledger ---------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Seen:
    """What the ledger knows of one container."""

    container: OffloadContainer
    pipeline: Pipeline
    status: Status = Status.EVALUATING
    progress: Progress | None = None
    committed: bool = False
    """It was announced by ``post_claim``."""
    copied: Sequence[Key] = ()
    """What the copy started with."""
    over: bool = False
    """The copy is over."""
    settled: int = 0

    @property
    def handle(self) -> TransferHandle:
        """As good as any that enqueue returned, to look with."""
        handle = object.__new__(TransferHandle)
        handle._container = self.container
        return handle

    def __repr__(self) -> str:
        return f"{self.pipeline.name}#{self.container.number}"


class _Witness(Every):
    """The ledger's eye in one pipeline."""

    def __init__(self, ledger: Ledger, pipeline: Pipeline) -> None:
        self._ledger = ledger
        self._pipeline = pipeline

    def saw(self, hook: str, subject: Any) -> None:
        try:
            self._ledger.saw(self._pipeline, hook, subject)
        except Exception:
            self._ledger.wrong(f"the ledger itself broke:\n{traceback.format_exc()}")


class Ledger:
    """Notes what happens in some pipelines, and what of it was wrong."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.log: list[tuple[float, Pipeline, str, tuple[int, ...]]] = []
        """The events, with time and place."""
        self.seen: dict[OffloadContainer, Seen] = {}
        self.pipelines: list[Pipeline] = []
        self.strong: list[StrongBlocks] = []
        self.before: dict[FakeTier, set[Key]] = {}
        """What was in a destination before anybody stored into it."""
        self.batches: dict[FakeTier, list[tuple[Key, ...]]] = defaultdict(list)
        self._flying: dict[FakeTier, dict[Key, Seen]] = defaultdict(dict)
        self._claimed: dict[OffloadContainer, Seen] = {}
        self._ending: dict[OffloadContainer, list[OffloadContainer]] = {}  # over, not settled: each with its batch
        self._reserving: dict[OffloadContainer, FakeTier] = {}  # in line for room: granted, they hold it for a tick
        self._reserved: dict[Pipeline, tuple[set[OffloadContainer], int]] = {}  # from a reservation to its keep()

    def wrong(self, text: str) -> None:
        """Note a violation."""
        if len(self.violations) < 20:
            self.violations.append(text)

    def watch(self, pipeline: Pipeline) -> None:
        """Watch a pipeline from now on; its destination holds nothing by its doing yet."""
        self.pipelines.append(pipeline)
        self.before.setdefault(pipeline.destination, set()).update(pipeline.destination.pool._slot_of)
        pipeline.add_instrument(_Witness(self, pipeline))

    def took(self, pipeline: Pipeline, handle: TransferHandle) -> TransferHandle:
        """The pipeline has just taken this in."""
        self._of(pipeline, handle._container)
        return handle

    def _of(self, pipeline: Pipeline, container: OffloadContainer) -> Seen:
        if container not in self.seen:
            self.seen[container] = Seen(container, pipeline)
        return self.seen[container]

    # -- while it runs -------------------------------------------------------------------------------------------------

    def saw(self, pipeline: Pipeline, hook: str, subject: Any) -> None:
        """An event."""
        if isinstance(subject, OffloadContainer):
            containers: Sequence[OffloadContainer] = [subject]
        else:
            containers = subject.containers if isinstance(subject, OffloadBatch) else subject
        seen = [self._of(pipeline, container) for container in containers]
        numbers = tuple([container.number for container in containers])
        self.events.append((hook, numbers))
        self.log.append((trio.current_time(), pipeline, hook, numbers))
        for one in seen:
            self._look(one, hook)
        # What drops out of a batch settles after keep(); an observer of the claim may settle somebody else before.
        if hook != "settled" and hook not in ("sweep_claim_gap", "post_claim"):
            self._reserved.pop(pipeline, None)
        elif hook == "settled" and containers[0] in self._reserved.get(pipeline, ((),))[0]:
            del self._reserved[pipeline]
        if hook == "transfer":
            self._reserving.update(dict.fromkeys(containers, pipeline.destination))
        elif hook == "pre_claim":
            for container in containers:
                self._reserving.pop(container, None)
            self._reserved[pipeline] = (set(containers), sum(len(one.container.keys) for one in seen))
        elif hook == "post_claim":
            self._claims(seen)
        elif hook == "xfer_start":
            self._starts(pipeline.destination, seen)
        elif hook == "xfer_end":
            self._ends(pipeline.destination, seen)
        elif hook == "settled":
            self._settles(seen[0])
            self._count(pipeline)

    def _look(self, seen: Seen, hook: str) -> None:
        old, new = seen.status, seen.container.status
        if old.terminal and hook == "settled" and seen.settled:
            self.wrong(f"I2: {seen} settled twice, {old} and {new}")
        elif old.terminal and old is not new:
            self.wrong(f"I2: {seen} was {old} and became {new}")
        elif not new.terminal and _RANK[new] < _RANK[old]:
            self.wrong(f"I2: {seen} went back from {old} to {new}")
        seen.status = new
        progress = seen.handle.progress
        if seen.progress is not None:
            for name in ("passed", "filtered", "completed", "failed", "evicted"):
                if getattr(progress, name) < getattr(seen.progress, name):
                    self.wrong(f"S56: {seen}: {name} went down, {seen.progress} to {progress}")
        seen.progress = progress

    def _claims(self, several: Iterable[Seen]) -> None:
        for seen in several:
            if seen.committed:
                self.wrong(f"I2: {seen} was announced as committed twice")
            if seen.settled:
                self.wrong(f"I2: {seen} was committed after it had settled")
            seen.committed = True
            self._claimed[seen.container] = seen

    def _starts(self, destination: FakeTier, several: Sequence[Seen]) -> None:
        self.batches[destination].append(tuple([key for seen in several for key in seen.container.keys]))
        flying = self._flying[destination]
        quarantined = self._quarantined("destination", destination)
        for seen in several:
            seen.copied = tuple(seen.container.keys)
            if not seen.committed:
                self.wrong(f"I4: the copy of {seen} started without its commit")
            for key in seen.copied:
                if key in flying:
                    self.wrong(f"I7: {key!r} is copied by {seen} while {flying[key]} copies it")
                if key in quarantined:
                    self.wrong(f"I7: {key!r} is copied by {seen} while it is quarantined")
                flying[key] = seen

    def _ends(self, destination: FakeTier, several: Sequence[Seen]) -> None:
        batch = [seen.container for seen in several]
        for seen in several:
            seen.over = True
            self._ending[seen.container] = batch
            for key in seen.copied:
                self._flying[destination].pop(key, None)

    def _settles(self, seen: Seen) -> None:
        seen.settled += 1
        self._claimed.pop(seen.container, None)
        self._reserving.pop(seen.container, None)
        if not seen.container.status.terminal:
            self.wrong(f"I2: {seen} settled as {seen.container.status}")
        if seen.container in self._ending:
            # What the copy held was released for the whole batch, before the first of it settled.
            for container in self._ending[seen.container]:
                self._claimed.pop(container, None)
                self._ending.pop(container, None)
        if isinstance(seen.container.error, DrainUnproven) and any(
            set(entry.keys).issuperset(seen.copied) for entry in seen.pipeline.quarantine
        ):
            return
        container, source, destination = seen.container, seen.pipeline.source, seen.pipeline.destination
        keys = container.blocks.keys
        if isinstance(container.blocks, StrongBlocks) and container.blocks.guards:
            self.wrong(f"I3: {seen} settled with its guards")
        held = {key for key in keys if source.pool._slot_of.get(key) in source.pool._held}
        if held and (held := held - self._may_be_held(source)):
            self.wrong(f"I3: {seen} settled, and the source still holds {sorted(held)}")
        marked = marks_of(destination)._pending.intersection(keys)
        if marked and (marked := marked - self._may_be_marked(destination)):
            self.wrong(f"I3: {seen} settled, and {sorted(marked)} are still marked")
        staged = destination.pool.statistics().staged
        if staged and staged > (most := self._may_be_staged(destination)):
            self.wrong(f"I3: {seen} settled, and {staged} places are reserved where {most} can have an owner")

    def _count(self, pipeline: Pipeline) -> None:
        statistics = pipeline.statistics()
        if not 0 <= statistics.used_blocks <= statistics.budget_blocks:
            self.wrong(f"I1: {pipeline!r} counts {statistics.used_blocks} of {statistics.budget_blocks} blocks")
        rooms = (
            statistics.in_admission,
            statistics.in_awaiting,
            statistics.in_batching,
            statistics.in_transfer,
            statistics.in_chain,
        )
        if min(rooms) < 0 or sum(rooms) > statistics.inside:
            self.wrong(f"I1: {pipeline!r} has {rooms} containers in its rooms, {statistics.inside} inside")

    def _quarantined(self, side: str, tier: FakeTier) -> set[Key]:
        return {
            key
            for pipeline in self.pipelines
            if getattr(pipeline, side) is tier
            for entry in pipeline.quarantine
            for key in entry.keys
        }

    def _may_be_held(self, source: FakeTier) -> set[Key]:
        allowed = self._quarantined("source", source)
        for blocks in self.strong:
            if blocks.guards and blocks.source is source:
                allowed.update(blocks.keys)
        for seen in self._claimed.values():
            if seen.pipeline.source is source:
                allowed.update(seen.container.keys)
        return allowed

    def _may_be_marked(self, destination: FakeTier) -> set[Key]:
        allowed = self._quarantined("destination", destination)
        for seen in self.seen.values():
            if not seen.settled and seen.pipeline.destination is destination:
                allowed.update(seen.container.keys)
        return allowed

    def _may_be_staged(self, destination: FakeTier) -> int:
        claimed = sum(
            len(seen.container.keys) for seen in self._claimed.values() if seen.pipeline.destination is destination
        )
        reserved = sum(
            places for pipeline, (_, places) in self._reserved.items() if pipeline.destination is destination
        )
        reserved += sum(len(container.keys) for container, tier in self._reserving.items() if tier is destination)
        return (
            claimed
            + reserved
            + sum(
                len(entry.keys)
                for pipeline in self.pipelines
                if pipeline.destination is destination
                for entry in pipeline.quarantine
            )
        )

    # -- when it is over -----------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Raise what was wrong, and what is wrong now that all pipelines are closed."""
        if tasks := tasks_of_the_package():
            self.wrong(f"I8: tasks are left: {tasks}")
        for seen in self.seen.values():
            self._judge_end(seen)
        tiers = {tier for pipeline in self.pipelines for tier in (pipeline.source, pipeline.destination)}
        for pipeline in self.pipelines:
            own = [seen for seen in self.seen.values() if seen.pipeline is pipeline]
            for entry in pipeline.quarantine:
                if not any(self._unproven(seen) and set(entry.keys).intersection(seen.copied) for seen in own):
                    self.wrong(f"I3: {entry!r} is the end of no handle")
                entry.release()
        for pipeline in self.pipelines:
            for what, amount in at_rest(pipeline).items():
                self.wrong(f"I1: {pipeline!r}: {what}: {amount}")
        for destination in self.before:
            self._judge_content(destination)
        for pipeline in self.pipelines:
            self._judge_patience(pipeline)
        for tier in tiers:
            for key in list(tier.pool._slot_of):
                if tier.get(key) != payload_of(key, tier.block_bytes):
                    self.wrong(f"{key!r} in {tier!r} is not what was stored")
        assert not self.violations, "\n".join(self.violations)

    @staticmethod
    def _unproven(seen: Seen) -> bool:
        return any(isinstance(error, DrainUnproven) for error in seen.container.failed.values())

    def _judge_end(self, seen: Seen) -> None:
        self._look(seen, "the end")
        container, result = seen.container, seen.handle.result
        if result is None:
            self.wrong(f"I2: {seen} never ended: {container.status}")
            return
        if seen.settled != 1:
            self.wrong(f"I2: {seen} settled {seen.settled} times")
        ends = (list(result.completed), list(result.filtered), list(result.failed), list(result.evicted))
        known = [key for end in ends for key in end]
        if len(set(known)) != len(known) or not set(known) <= set(container.blocks.keys):
            self.wrong(f"I5: {seen}: its blocks did not end once each: {result}")
        completed, filtered, failed, evicted = map(len, ends)
        size = len(container.blocks.keys)
        passed = len(seen.handle.passed_blocks)
        if seen.committed:
            if passed + filtered != size:
                self.wrong(f"I6: {seen}: {passed} passed + {filtered} filtered, of {size}")
            if completed + failed + evicted != passed:
                self.wrong(f"I6: {seen}: {completed} + {failed} + {evicted} of {passed} that passed: {result}")
            if result.status is Status.CANCELLED:
                self.wrong(f"I4: {seen} was cancelled after its commit")
        else:
            if seen.copied or completed or evicted:
                self.wrong(f"I4: {seen} was never committed, but {result}")
            if result.status is Status.COMPLETE and filtered != size:
                self.wrong(f"I6: {seen} is complete without a commit: {result}")
        if result.status is Status.COMPLETE and (failed or result.error is not None):
            self.wrong(f"I5: {seen} is complete, but {result}")
        if result.status is Status.FAILED and not failed and result.error is None:
            self.wrong(f"I9: {seen} failed without a cause")
        if seen.handle.progress != Progress(size, passed, filtered, completed, failed, evicted):
            self.wrong(f"S56: {seen} ended with {seen.handle.progress}, which is not its result {result}")

    def _judge_content(self, destination: FakeTier) -> None:
        started = {
            key for seen in self.seen.values() if seen.pipeline.destination is destination for key in seen.copied
        }
        unexplained = set(destination.pool._slot_of) - self.before[destination] - started
        if unexplained:
            self.wrong(f"I4: nobody's commit explains {sorted(unexplained)} in {destination!r}")
        if destination.batches != self.batches[destination]:
            self.wrong(
                f"I4: {destination!r} was given {destination.batches}, announced was {self.batches[destination]}"
            )

    def _judge_patience(self, pipeline: Pipeline) -> None:
        """Nobody who is ready waits longer than the flush interval while a slot has nothing to do."""
        ready: dict[int, float] = {}
        left: dict[int, float] = {}
        busy: list[list[float]] = []  # from when, until when a slot had a batch
        carried: dict[int, list[float]] = {}
        times: list[float] = []
        for time, where, hook, numbers in self.log:
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
            if when <= due:
                continue
            for earlier, later in pairwise([due, *[time for time in times if due < time < when], when]):
                if sum(start <= earlier and later <= end for start, end in busy) < slots:
                    self.wrong(
                        f"I9: {pipeline.name}#{number} was ready at {ready[number]}, a slot was idle from {earlier}"
                    )
                    break


# --- the world ----------------------------------------------------------------------------------------------------


def config_of(**knobs: Any) -> PipelineConfig:
    """A configuration from one flat set of knobs. The safety net is far away, so that it hides nothing."""
    batch = {name: knobs.pop(name) for name in ("max_batch_size", "min_batch_size", "flush_interval") if name in knobs}
    batch.setdefault("flush_interval", 10 * TICK)
    batch.setdefault("max_batch_size", min(64, knobs.get("budget_blocks", 64)))
    batch.setdefault("min_batch_size", min(8, batch["max_batch_size"]))
    knobs.setdefault("sweep_interval", 60.0)
    knobs.setdefault("policy_timeout", 100 * TICK)
    return PipelineConfig(batch_config=BatchConfig(**batch), **knobs)


class World:
    """A source, a destination, and what was stored from one into the other."""

    def __init__(self, *, capacity: int = 64, latency: float = 0.0, block_bytes: int = 16) -> None:
        self.source = FakeTier(512, block_bytes)
        self.destination = FakeTier(capacity, block_bytes, latency=latency)
        self.ledger = Ledger()
        self.pipeline: Pipeline = None  # type: ignore[assignment]
        self.handles: dict[str, TransferHandle] = {}

    @property
    def faults(self) -> Any:
        """The dials of the destination."""
        return self.destination.faults

    @property
    def events(self) -> list[tuple[str, tuple[int, ...]]]:
        """What happened, with the numbers of the containers, over all pipelines."""
        return self.ledger.events

    def happened(self, hook: str) -> list[tuple[int, ...]]:
        """The containers of each event of this name."""
        return [numbers for name, numbers in self.events if name == hook]

    # -- storing -------------------------------------------------------------------------------------------------------

    def blocks(self, label: str, n: int = 1, *, kind: str = "weak", keys: Sequence[Key] | None = None) -> Blocks:
        """Blocks of the source, which has them."""
        keys = keys_of(label, n) if keys is None else keys
        self.source.fill(keys)
        if kind == "weak":
            return self.source.weak(keys)
        if kind == "external":
            return self.source.external(self.source.pool.slots(keys), keys)
        blocks = self.source.strong(keys)
        self.ledger.strong.append(blocks)
        return blocks

    def store(
        self, label: str, n: int = 1, *, kind: str = "weak", precondition: Any = NO_WAIT, keys: Any = None
    ) -> TransferHandle:
        """Enqueue ``n`` blocks called ``label0``, ``label1``, ... at once."""
        blocks = self.blocks(label, n, kind=kind, keys=keys)
        return self._took(label, self.pipeline.enqueue_nowait(blocks, precondition=precondition))

    async def enqueue(
        self, label: str, n: int = 1, *, kind: str = "weak", precondition: Any = NO_WAIT
    ) -> TransferHandle:
        """Enqueue, waiting for room."""
        blocks = self.blocks(label, n, kind=kind)
        return self._took(label, await self.pipeline.enqueue(blocks, precondition=precondition))

    def _took(self, label: str, handle: TransferHandle) -> TransferHandle:
        self.handles[label] = handle
        return self.ledger.took(self.pipeline, handle)

    async def stored(self, label: str, n: int = 1, **options: Any) -> Any:
        """Store, and wait for the result."""
        return await self.store(label, n, **options).wait()

    def found(self) -> set[Key]:
        """What is in the destination."""
        return set(self.destination.pool._slot_of)

    def evict(self, *keys: Key) -> None:
        """Take blocks out of the source."""
        self.source.pool.delete(keys)

    # -- watching ------------------------------------------------------------------------------------------------------

    def at(self, hook: str, do: Callable[[Any], object], *, nth: int = 1) -> None:
        """Call ``do`` when this hook is called for the ``nth`` time. What it raises is a violation."""
        calls = 0

        def call(subject: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                try:
                    do(subject)
                except Exception:
                    self.ledger.wrong(traceback.format_exc())

        self.pipeline.add_instrument(SimpleNamespace(**{hook: call}))

    def at_rest(self) -> dict[str, object]:
        """What is still held."""
        return at_rest(self.pipeline)


@asynccontextmanager
async def open_world(
    *,
    policies: Sequence[Any] = (),
    chain: Sequence[Pipeline] = (),
    capacity: int = 64,
    latency: float = 0.0,
    world: World | None = None,
    **knobs: Any,
) -> AsyncIterator[World]:
    """A world with an open pipeline; what happened in it is judged when it has closed."""
    world = world or World(capacity=capacity, latency=latency)
    try:
        async with open_pipeline(
            world.source, world.destination, policies=policies, config=config_of(**knobs), chain=chain, name="main"
        ) as world.pipeline:
            world.ledger.watch(world.pipeline)
            yield world
    finally:
        if not chain:  # the routes are still open: whoever opened them judges
            world.ledger.judge()
