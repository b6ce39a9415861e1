"""Invariants I1..I9 of our own pipelines, checked during and after a run.

A :class:`Ledger` watches pipelines as an instrument does, records their events, and never raises while they run: its
findings are in ``violations``, and :meth:`Ledger.judge` raises them when everything is over. About the commit it trusts
only the announcement ``post_claim``, and it checks copies by the bytes themselves.

* I1 at rest there is no live source ref, pending mark, destination reservation, lock or limiter token.
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
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from backends.abc import ExternalBlocks, Key, StrongBlocks
from backends.testing import FakeTier, payload_of
from offload import (
    DrainUnproven,
    OffloadBatch,
    OffloadContainer,
    Pipeline,
    Status,
    TransferHandle,
    open_pipeline,
)
from offload._pipeline.lifecycle import Phase
from offload._pipeline.marks import marks_of
from offload.instruments import Every

from ._invariants import (
    ContainerHistory,
    ReadyOrder,
    at_rest,
    destination_of,
    late_batches,
    source_of,
    tasks_of_the_package,
    wrong_end,
)
from ._names import expand
from ._program import TICK

_RANK = {Status.EVALUATING: 0, Status.QUEUED: 1, Status.TRANSFERRING: 2}
_COUNTS = ("passed", "filtered", "completed", "failed", "evicted")


# --- the ledger ---------------------------------------------------------------------------------------------------


class _LedgerInstrument(Every):
    """Instrument that passes the hooks of one pipeline to the ledger."""

    def __init__(self, ledger: Ledger, pipeline: Pipeline) -> None:
        self._ledger = ledger
        self._pipeline = pipeline

    def saw(self, hook: str, subject: Any) -> None:
        try:
            self._ledger.saw(self._pipeline, hook, subject)
        except Exception:
            self._ledger.wrong(f"the ledger itself broke:\n{traceback.format_exc()}")


class Ledger:
    """Record of some pipelines' events, with the violations among them."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.log: list[tuple[float, Pipeline, str, tuple[int, ...]]] = []
        """Events, with their time and pipeline."""
        self.histories: dict[OffloadContainer, ContainerHistory] = {}
        self.pipelines: list[Pipeline] = []
        self.strong: list[StrongBlocks] = []
        self.states: set[str] = {Status.EVALUATING.name}
        """States that containers were seen in."""
        self.damaged: dict[FakeTier, set[Key]] = defaultdict(set)
        """Blocks with a flipped bit: they may differ from the stored bytes."""
        self.reading: dict[FakeTier, list[Sequence[Key]]] = defaultdict(list)
        """Keys held by loads in progress."""
        self.jumps: Sequence[tuple[float, float]] = ()
        """Jumps of the clock: no wait can be judged across one."""
        self.before: dict[FakeTier, set[Key]] = {}
        """Keys in each destination before its first store."""
        self.batches: dict[FakeTier, list[tuple[Key, ...]]] = defaultdict(list)
        self._ready_order = ReadyOrder()
        self._flying: dict[FakeTier, dict[Key, ContainerHistory]] = defaultdict(dict)
        self._claimed: dict[OffloadContainer, ContainerHistory] = {}
        self._ending: dict[OffloadContainer, list[OffloadContainer]] = {}  # copied, not settled: each with its batch
        self._reserving: dict[OffloadContainer, FakeTier] = {}  # waiting for room: once granted, held for a tick
        self._reserved: dict[Pipeline, tuple[set[OffloadContainer], int]] = {}  # from a reservation to its keep()

    def wrong(self, text: str) -> None:
        """Record a violation."""
        if len(self.violations) < 20:
            self.violations.append(text)

    def know(self, pipeline: Pipeline) -> None:
        """Add a pipeline whose hooks will be passed to :meth:`saw`.

        Its destination holds nothing stored by the pipeline yet.
        """
        self.pipelines.append(pipeline)
        tier = destination_of(pipeline)
        self.before.setdefault(tier, set()).update(tier.pool._slot_of)

    def watch(self, pipeline: Pipeline) -> None:
        """Watch a pipeline from now on."""
        self.know(pipeline)
        pipeline.add_instrument(_LedgerInstrument(self, pipeline))

    def cancel_is_in_time(self, ticket: object) -> bool:
        """Return whether a cancel now precedes the commit and any other end.

        The commit is the announced one.
        """
        if not isinstance(ticket, TransferHandle):
            return False
        container = ticket._container
        history = self.histories.get(container)
        if history is None or history.committed or ticket.status.terminal:
            return False
        return container.phase is not Phase.FAILED

    def took(self, pipeline: Pipeline, handle: TransferHandle) -> TransferHandle:
        """Record a handle that the pipeline has just accepted."""
        self._of(pipeline, handle._container)
        return handle

    def _of(self, pipeline: Pipeline, container: OffloadContainer) -> ContainerHistory:
        if container not in self.histories:
            self.histories[container] = ContainerHistory(container, pipeline, route=container.phase is Phase.COMMITTED)
        return self.histories[container]

    # -- while it runs -------------------------------------------------------------------------------------------------

    def saw(self, pipeline: Pipeline, hook: str, subject: Any) -> None:
        """Record one hook call of a pipeline, and run the checks due."""
        if isinstance(subject, OffloadContainer):
            containers: Sequence[OffloadContainer] = [subject]
        else:
            containers = subject.containers if isinstance(subject, OffloadBatch) else subject
        histories = [self._of(pipeline, container) for container in containers]
        numbers = tuple([container.number for container in containers])
        self.events.append((hook, numbers))
        self.log.append((trio.current_time(), pipeline, hook, numbers))
        for one in histories:
            self._look(one, hook)
        # Containers that drop out of a batch settle after keep(); an observer of the claim may settle another container
        # before.
        if hook != "settled" and hook not in ("sweep_claim_gap", "post_claim"):
            self._reserved.pop(pipeline, None)
        elif hook == "settled" and containers[0] in self._reserved.get(pipeline, ((),))[0]:
            del self._reserved[pipeline]
        if hook == "batching":
            self._ready_order.joins(pipeline, containers[0])
        elif hook == "transfer":
            for text in self._ready_order.leave(pipeline, containers):
                self.wrong(text)
            self._reserving.update(dict.fromkeys(containers, destination_of(pipeline)))
        elif hook == "pre_claim":
            for container in containers:
                self._reserving.pop(container, None)
            self._reserved[pipeline] = (set(containers), sum(len(one.container.keys) for one in histories))
        elif hook == "post_claim":
            self._claims(histories)
        elif hook == "xfer_start":
            self._starts(destination_of(pipeline), histories)
        elif hook == "xfer_end":
            self._ends(destination_of(pipeline), histories)
        elif hook == "settled":
            self._ready_order.gone(pipeline, containers[0])
            self._settles(histories[0])
            self._count(pipeline)

    def _look(self, history: ContainerHistory, hook: str) -> None:
        container = history.container
        old, new = history.status, container.status
        if old is not new:
            self.states.add(new.name)
            if old.terminal:
                self.wrong(f"I2: {history} was {old} and became {new}")
            elif not new.terminal and _RANK[new] < _RANK[old]:
                self.wrong(f"I2: {history} went back from {old} to {new}")
            history.status = new
        elif old.terminal and hook == "settled" and history.settled:
            self.wrong(f"I2: {history} settled twice, {old} and {new}")
        filtered = len(container.filtered)
        counts = (
            len(container.blocks.keys) - filtered if container.evaluated else 0,
            filtered,
            len(container.completed),
            len(container.failed),
            len(container.evicted),
        )
        if counts != history.counts:
            for name, before, now in zip(_COUNTS, history.counts, counts, strict=True):
                if now < before:
                    self.wrong(f"S56: {history}: {name} went down, from {before} to {now}")
            history.counts = counts

    def _claims(self, several: Iterable[ContainerHistory]) -> None:
        for history in several:
            if history.committed:
                self.wrong(f"I2: {history} was announced as committed twice")
            if history.settled:
                self.wrong(f"I2: {history} was committed after it had settled")
            if history.pipeline._closed and not history.route:
                self.wrong(f"S47: {history} was committed after the door was shut")
            history.committed = True
            self._claimed[history.container] = history

    def _starts(self, destination: FakeTier, several: Sequence[ContainerHistory]) -> None:
        self.batches[destination].append(tuple([key for history in several for key in history.container.keys]))
        in_flight = self._flying[destination]
        quarantined = self._quarantined("destination", destination)
        for history in several:
            history.copied = tuple(history.container.keys)
            if not history.committed:
                self.wrong(f"I4: the copy of {history} started without its commit")
            for key in history.copied:
                if key in in_flight:
                    self.wrong(f"I7: {key!r} is copied by {history} while {in_flight[key]} copies it")
                if key in quarantined:
                    self.wrong(f"I7: {key!r} is copied by {history} while it is quarantined")
                in_flight[key] = history

    def _ends(self, destination: FakeTier, several: Sequence[ContainerHistory]) -> None:
        batch = [history.container for history in several]
        for history in several:
            history.over = True
            if bare := self._bare(history):
                self.wrong(f"I3: the copy of {history} reads {bare}, which nobody holds in the source")
            self._ending[history.container] = batch
            for key in history.copied:
                self._flying[destination].pop(key, None)

    def _bare(self, history: ContainerHistory) -> list[Key]:
        """Return the keys that are copied without a ref in the source.

        An engine keeps external blocks alive itself; damaged ones are found by no key.
        """
        if isinstance(history.container.blocks, ExternalBlocks):
            return []
        pool, damaged = source_of(history.pipeline).pool, self.damaged[source_of(history.pipeline)]
        return [key for key in history.copied if pool._slot_of.get(key, -1) not in pool._held and key not in damaged]

    def _settles(self, history: ContainerHistory) -> None:
        history.settled += 1
        self._claimed.pop(history.container, None)
        self._reserving.pop(history.container, None)
        if not history.container.status.terminal:
            self.wrong(f"I2: {history} settled as {history.container.status}")
        if history.container in self._ending:
            # Refs and marks of the copy were released for the whole batch, before the first of it settled.
            for container in self._ending[history.container]:
                self._claimed.pop(container, None)
                self._ending.pop(container, None)
        if isinstance(history.container.error, DrainUnproven) and any(
            set(entry.keys).issuperset(history.copied) for entry in history.pipeline.quarantine
        ):
            return
        container, source, destination = (
            history.container,
            source_of(history.pipeline),
            destination_of(history.pipeline),
        )
        keys = container.blocks.keys
        if isinstance(container.blocks, StrongBlocks) and container.blocks.refs:
            self.wrong(f"I3: {history} settled with its refs")
        held = {key for key in keys if source.pool._slot_of.get(key) in source.pool._held}
        if held and (held := held - self._may_be_held(source)):
            self.wrong(f"I3: {history} settled, and the source still holds {sorted(held)}")
        marked = marks_of(destination)._pending.intersection(keys)
        if marked and (marked := marked - self._may_be_marked(destination)):
            self.wrong(f"I3: {history} settled, and {sorted(marked)} are still marked")
        staged = destination.pool.statistics().staged
        if staged and staged > (most := self._may_be_staged(destination)):
            self.wrong(f"I3: {history} settled, and {staged} places are reserved where {most} can have an owner")

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
            if blocks.refs and blocks.source is source:
                allowed.update(blocks.keys)
        for history in self._claimed.values():
            if history.pipeline.source is source:
                allowed.update(history.container.keys)
        for keys in self.reading.get(source, ()):
            allowed.update(keys)
        for history in self.histories.values():
            if history.settled:
                continue
            # In the middle of a chain: held for its unfinished routes, each by refs of its own.
            if history.container.completed and destination_of(history.pipeline) is source:
                allowed.update(history.container.completed)
            if isinstance(history.container.blocks, StrongBlocks) and source_of(history.pipeline) is source:
                allowed.update(history.container.blocks.keys)
        return allowed

    def _may_be_marked(self, destination: FakeTier) -> set[Key]:
        allowed = self._quarantined("destination", destination)
        for history in self.histories.values():
            if not history.settled and history.pipeline.destination is destination:
                allowed.update(history.container.keys)
        return allowed

    def _may_be_staged(self, destination: FakeTier) -> int:
        claimed = sum(
            len(history.container.keys)
            for history in self._claimed.values()
            if history.pipeline.destination is destination
        )
        reserved = sum(
            tier_models for pipeline, (_, tier_models) in self._reserved.items() if pipeline.destination is destination
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
        """Raise all violations, those after the close included.

        All pipelines must be closed.
        """
        self.close()
        assert not self.violations, "\n".join(self.violations)

    def close(self) -> None:
        """Check the state after all pipelines have closed.

        Quarantined copies are released.
        """
        if left := tasks_of_the_package():
            self.wrong(f"I8: tasks are left: {left}")
        for history in self.histories.values():
            self._look(history, "the end")
            for text in wrong_end(history):
                self.wrong(text)
        tiers = dict.fromkeys(tier for one in self.pipelines for tier in (source_of(one), destination_of(one)))
        for pipeline in self.pipelines:
            own = [history for history in self.histories.values() if history.pipeline is pipeline]
            for entry in pipeline.quarantine:
                if not any(self._unproven(history) and set(entry.keys).intersection(history.copied) for history in own):
                    self.wrong(f"I3: {entry!r} is the end of no handle")
                entry.release()
        for pipeline in self.pipelines:
            for what, amount in at_rest(pipeline).items():
                self.wrong(f"I1: {pipeline!r}: {what}: {amount}")
        for destination in self.before:
            self._judge_content(destination)
        for pipeline in self.pipelines:
            for text in late_batches(pipeline, self.log, self.jumps):
                self.wrong(f"I9: {text}")
        for tier in tiers:
            damaged = self.damaged[tier]
            for key in list(tier.pool._slot_of):
                if key not in damaged and tier.get(key) != payload_of(key, tier.block_bytes):
                    self.wrong(f"bytes: {key!r} in {tier!r} is not what was stored")

    @staticmethod
    def _unproven(history: ContainerHistory) -> bool:
        return any(isinstance(error, DrainUnproven) for error in history.container.failed.values())

    def _judge_content(self, destination: FakeTier) -> None:
        started = {
            key
            for history in self.histories.values()
            if history.pipeline.destination is destination
            for key in history.copied
        }
        unexplained = set(destination.pool._slot_of) - self.before[destination] - started
        if unexplained:
            self.wrong(f"I4: nobody's commit explains {sorted(unexplained)} in {destination!r}")
        if destination.batches != self.batches[destination]:
            self.wrong(
                f"I4: {destination!r} was given {destination.batches}, announced was {self.batches[destination]}"
            )


# --- a pipeline in a test, checked by a ledger ------------------------------------------------------------------------


def fake_tier(
    capacity: int = 64,
    block_bytes: int = 64,
    *,
    holds: str = "",
    latency_ms: float = 0,
    bytes_per_ms: float = 0,
    **options: Any,
) -> FakeTier:
    """Return a host-memory tier with modelled copies, as in scenario files.

    Copies take modelled time and fail on request.

    Args:
        capacity: capacity in blocks.
        block_bytes: size of each block.
        holds: keys that are stored from the start: ``"k{0..3}"``.
        latency_ms: minimum duration of each copy, in virtual milliseconds of 1/1024 s.
        bytes_per_ms: 0: bytes take no time.
        **options: options of the :class:`~backends.testing.FakeTier` itself.
    """
    options.setdefault("bytes_per_second", bytes_per_ms / TICK if bytes_per_ms else float("inf"))
    tier = FakeTier(capacity, block_bytes, latency=latency_ms * TICK, **options)
    if holds:
        tier.fill([name.encode() for name in expand(holds)])
    return tier


@asynccontextmanager
async def judged_pipeline(
    source: FakeTier | None = None, destination: FakeTier | None = None, **options: Any
) -> AsyncIterator[Pipeline]:
    """Open a pipeline; after its close, raise if invariants were broken.

    The ``AssertionError`` lists them. To be used in virtual time: the ledger compares times exactly.

    Args:
        source: by default an empty fake of 512 blocks.
        destination: by default a fake of 64 blocks.
        **options: options of :func:`offload.open_pipeline`.
    """
    ledger = Ledger()
    odd: set[Key] = set()
    tiers = [_reporting_to(fake_tier(512) if source is None else source, ledger, odd)]
    tiers.append(_reporting_to(fake_tier(64) if destination is None else destination, ledger, odd))
    async with open_pipeline(*tiers, **{"name": "main", **options}) as pipeline:
        ledger.watch(pipeline)
        yield pipeline
    for tier in tiers:
        ledger.damaged[tier] |= odd
    ledger.judge()


def _reporting_to(tier: FakeTier, ledger: Ledger, odd: set[Key]) -> FakeTier:
    """Return the same tier, which from now on reports to a ledger."""
    put, strong = tier.put, tier.strong

    def telling_put(key: Key, data: bytes | bytearray | memoryview) -> bool:
        if tier in ledger.before:
            ledger.before[tier].add(key)
        if bytes(data) != payload_of(key, tier.block_bytes):
            odd.add(key)
        return put(key, data)

    def telling_strong(keys: Sequence[Key]) -> StrongBlocks:
        blocks = strong(keys)
        ledger.strong.append(blocks)
        return blocks

    setattr(tier, "put", telling_put)  # noqa: B010  # mypy cannot type a method of one object
    setattr(tier, "strong", telling_strong)  # noqa: B010
    return tier
