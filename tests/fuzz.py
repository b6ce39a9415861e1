"""A seeded fuzz of one pipeline (sometimes a chain of two) in virtual time.

Everything a run does is a function of its seed, and each choice is drawn from a hash of the seed and of the place where
it is made, so that one more choice somewhere does not change all others. All times are multiples of 1/1024 s, few of
them, so that many fall together. What is right is judged by :mod:`invariants` and, here, by causes: nothing may happen to
a container for which the plan has no reason (I9).

To repeat a seed and see what it does::

    python tests/fuzz.py SEED
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import determinism
import trio
from invariants import TICK, Ledger, config_of, keys_of

from backends.abc import CapacityError, Key, Unproven
from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    DestinationFull,
    DrainUnproven,
    Pipeline,
    PipelineClosed,
    PipelineFull,
    PolicyFailed,
    PreconditionFailed,
    PresenceFilter,
    Status,
    TransferFailed,
    TransferHandle,
    all_of,
    any_of,
    open_pipeline,
)
from offload._lifecycle import Phase
from offload.abc import AsyncPolicy, Leased
from offload.instruments import HOOKS, numbers_of
from offload.preconditions import ThreadEvent

HOUR = 3_600.0
STEPS = 100_000


class Dice:
    """Choices that depend on the seed and on where they are made, and on nothing else."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fraction(self, *where: object) -> float:
        digest = hashlib.blake2b(f"{self.seed}/{where}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def chance(self, p: float, *where: object) -> bool:
        return self.fraction(*where) < p

    def below(self, n: int, *where: object) -> int:
        return int(self.fraction(*where) * n)

    def pick(self, options: Sequence[Any], *where: object) -> Any:
        return options[self.below(len(options), *where)]

    def ticks(self, n: int, *where: object) -> float:
        return self.below(n, *where) * TICK


# --- the plan -----------------------------------------------------------------------------------------------------


@attrs.define
class Store:
    """One container to come."""

    label: str
    at: float
    keys: list[Key]
    kind: str
    how: str
    precondition: str
    opens: float
    cancel_at: float | None
    cancel_hook: tuple[str, int, bool] | None
    """At the n-th call of this hook; whom it is about, or, if not, this one."""
    twin: bool
    """It goes through the second pipeline into the same tier, if there is one."""
    abandons: float | None
    """Its waiter gives up so long after it began to wait."""


@attrs.define
class Plan:
    """Everything that will be done, and why anything may happen."""

    seed: int
    knobs: dict[str, Any]
    capacity: int
    latency: float
    policies: list[str]
    stores: list[Store]
    evictions: list[tuple[float, list[Key], bool]]
    deletions: list[tuple[float, list[Key]]]
    faults: list[tuple[float, float, str]]
    failing: list[Key]
    drain_at: float | None
    ending: tuple[str, float] | None
    route: dict[str, Any] | None
    twin: dict[str, Any] | None


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
    dice = Dice(seed)
    most = dice.pick([1, 2, 4, 8, 16], "max_batch_size")
    knobs = {
        "max_batch_size": most,
        "min_batch_size": 1 + dice.below(most, "min_batch_size"),
        "flush_interval": dice.pick([0.0, TICK, 4 * TICK, 10 * TICK], "flush_interval"),
        "policy_timeout": dice.pick([2, 4, 40], "policy_timeout") * TICK,
        "on_policy_error": dice.pick(["filter", "fail"], "on_policy_error"),
        "max_waiting_policies": dice.pick([1, 2, 64], "max_waiting_policies"),
        "precondition_timeout": dice.pick([8, 20, 200], "precondition_timeout") * TICK,
        "max_concurrent_transfers": dice.pick([1, 1, 2, 3], "slots"),
        "on_destination_full": dice.pick(["wait", "wait", "evict", "partial", "fail"], "full"),
        "destination_timeout": dice.pick([4, 10, 100], "destination_timeout") * TICK,
        "transfer_timeout": dice.pick([6, 20, 1000, 1000], "transfer_timeout") * TICK,
        "drain_timeout": dice.pick([0, 4, 100, 1000], "drain_timeout") * TICK,
        "budget_blocks": dice.pick([16, 24, 4096], "budget"),
        "on_overflow": dice.pick(["wait", "wait", "drop"], "overflow"),
    }
    shared = keys_of("k", 24)
    stores = []
    for i in range(3 + dice.below(16, "stores")):
        where = ("store", i)
        kind = dice.pick(["weak", "weak", "weak", "strong", "external"], *where, "kind")
        label = f"s{i}"
        n = dice.pick([0, 1, 1, 2, 2, 3, 4, 6], *where, "n")
        if kind == "external" or dice.chance(0.5, *where, "own"):
            keys = keys_of(f"{label}-", n)
        else:
            start = dice.below(len(shared), *where, "start")
            keys = (shared + shared)[start : start + n]
        hook = None
        if dice.chance(0.3, *where, "cancelled at a hook"):
            hook = (
                dice.pick(HOOKS, *where, "hook"),
                1 + dice.below(5, *where, "nth"),
                dice.chance(0.5, *where, "of the subject"),
            )
        stores.append(
            Store(
                label,
                at=dice.ticks(24, *where, "at"),
                keys=keys,
                kind=kind,
                how=dice.pick(["nowait", "wait", "wait", "many"], *where, "how"),
                precondition=dice.pick(
                    [
                        "none",
                        "none",
                        "none",
                        "set",
                        "trio",
                        "thread",
                        "sleep",
                        "raise",
                        "never",
                        "all",
                        "any",
                        "stubborn",
                    ],
                    *where,
                    "precondition",
                ),
                opens=dice.ticks(30, *where, "opens"),
                cancel_at=dice.ticks(40, *where, "cancel") if dice.chance(0.25, *where, "cancelled") else None,
                cancel_hook=hook,
                twin=dice.chance(0.4, *where, "twin"),
                abandons=dice.ticks(10, *where, "abandons") if dice.chance(0.3, *where, "abandoned") else None,
            )
        )
    policies = [
        dice.pick(["presence", "reject", "slow", "broken", "lock", "lock now", "meddler", "slow lock"], "policy", i)
        for i in range(dice.pick([0, 0, 1, 1, 2, 3], "policies"))
    ]
    faults = [
        (
            dice.ticks(40, "fault", i, "at"),
            (1 + dice.below(12, "fault", i, "for")) * TICK,
            dice.pick(
                ["error", "unproven", "hang", "gate", "room", "too few", "too many", "group"], "fault", i, "what"
            ),
        )
        for i in range(dice.pick([0, 0, 0, 1, 1, 2], "faults"))
    ]
    return Plan(
        seed,
        knobs,
        capacity=dice.pick([4, 8, 16, 200, 200], "capacity"),
        latency=dice.pick([0, 0, 1, 2, 5], "latency") * TICK,
        policies=policies,
        stores=stores,
        evictions=[
            (
                dice.ticks(40, "evict", i, "at"),
                [key for key in shared if dice.chance(0.4, "evict", i, key)],
                dice.chance(0.5, "evict", i, "again"),
            )
            for i in range(dice.below(4, "evictions"))
        ],
        deletions=[
            (dice.ticks(60, "delete", i, "at"), [key for key in shared if dice.chance(0.5, "delete", i, key)])
            for i in range(dice.below(3, "deletions"))
        ],
        faults=faults,
        failing=[key for key in shared if dice.chance(0.1, "failing", key)] if dice.chance(0.3, "failing") else [],
        drain_at=dice.ticks(40, "drain") if dice.chance(0.2, "drains") else None,
        ending=(dice.pick(["leave", "aclose", "cancel", "cancel", "raise"], "ending"), dice.ticks(50, "ends"))
        if dice.chance(0.4, "ends early")
        else None,
        route={
            "capacity": dice.pick([4, 200], "route capacity"),
            "latency": dice.ticks(4, "route latency"),
            "destination_timeout": dice.pick([4, 100], "route timeout") * TICK,
            "failing": [key for key in shared if dice.chance(0.1, "route failing", key)],
        }
        if dice.chance(0.15, "route")
        else None,
        twin={
            "destination_timeout": dice.pick([4, 100], "twin timeout") * TICK,
            "flush_interval": dice.pick([0.0, 4 * TICK], "twin flush"),
            "max_concurrent_transfers": 1 + dice.below(2, "twin slots"),
            "on_destination_full": dice.pick(["wait", "evict", "partial", "fail"], "twin full"),
        }
        if dice.chance(0.2, "twin")
        else None,
    )


# --- policies -----------------------------------------------------------------------------------------------------


def _odd(key: Key, modulus: int) -> bool:
    return hashlib.blake2b(key, digest_size=2).digest()[0] % modulus == 0


class _SlowPolicy(AsyncPolicy):
    def __init__(self, run: Run, locks: bool) -> None:
        self._run = run
        self._locks = locks

    @staticmethod
    def seconds(keys: Sequence[Key]) -> float:
        return len(keys) * TICK if _odd(keys[0], 2) else 0.0

    async def evaluate(self, keys: Sequence[Key]) -> Any:
        await trio.sleep(self.seconds(keys))
        return self._run.lock() if self._locks else {}


class Broken(LookupError):
    """What the fuzz's own policies and preconditions raise."""


# --- one run ------------------------------------------------------------------------------------------------------


@attrs.define
class Report:
    """How a seed went."""

    seed: int
    violations: list[str]
    fired: Counter[str]
    """What of the plan hit something alive."""
    ends: Counter[str]
    """How containers ended."""
    events: list[Any]


class Run:
    """One plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dice = Dice(plan.seed)
        self.source = FakeTier(512, 16)
        self.destination = FakeTier(plan.capacity, 16, latency=plan.latency)
        self.ledger = Ledger()
        self.fired: Counter[str] = Counter()
        self.handles: dict[str, TransferHandle] = {}
        self.numbers: dict[tuple[Pipeline, int], str] = {}
        self.cancelled: set[str] = set()
        self.in_time: set[str] = set()
        self.locked = 0
        self.pipeline: Pipeline = None  # type: ignore[assignment]
        self.route: Pipeline | None = None
        self.twin: Pipeline | None = None
        self.host = trio.CancelScope()
        self.started = 0.0
        self.shut = False

    # -- actors --------------------------------------------------------------------------------------------------------

    def lock(self) -> Leased:
        self.locked += 1
        self.fired["lock taken"] += 1
        return Leased({}, self._unlock)

    def _unlock(self) -> None:
        self.locked -= 1

    def policies(self) -> list[Any]:
        made: dict[str, Callable[[], Any]] = {
            "presence": lambda: PresenceFilter(self.destination),
            "reject": lambda: lambda keys: {key: "no" for key in keys if _odd(key, 4)},
            "slow": lambda: _SlowPolicy(self, locks=False),
            "slow lock": lambda: _SlowPolicy(self, locks=True),
            "broken": lambda: self._broken,
            "lock": lambda: _SlowPolicy(self, locks=True),
            "lock now": lambda: lambda keys: self.lock(),
            "meddler": lambda: self._meddle,
        }
        return [made[name]() for name in self.plan.policies]

    def _broken(self, keys: Sequence[Key]) -> Any:
        if _odd(keys[0], 3):
            self.fired["policy raised"] += 1
            raise Broken("policy")
        return {}

    def _meddle(self, keys: Sequence[Key]) -> Any:
        """A policy that cancels somebody, itself perhaps."""
        if self.dice.chance(0.2, "meddle", keys[0]):
            self.cancel(f"s{self.dice.below(len(self.plan.stores), 'meddled', keys[0])}", "cancel by a policy")
        return {}

    def may_fail(self, keys: Sequence[Key]) -> bool:
        """Whether the policies may raise or overrun for these."""
        if not keys:
            return False
        plan = self.plan
        # What a policy before it filtered may change whom it is asked about: then anything may.
        if len(plan.policies) > 1:
            return any(name in ("broken", "slow", "slow lock", "lock") for name in plan.policies)
        if "broken" in plan.policies:
            return _odd(keys[0], 3)
        return _SlowPolicy.seconds(keys) >= plan.knobs["policy_timeout"]

    def cancel(self, label: str, why: str) -> None:
        handle = self.handles.get(label)
        if handle is None:
            return
        self.fired[why] += not handle.status.terminal
        self.note_cancel(label, handle)
        handle.request_cancel()

    def note_cancel(self, label: str, handle: TransferHandle) -> None:
        """Whether a request that comes now comes in time: before the commit was announced, and before another end."""
        self.cancelled.add(label)
        container = handle._container
        announced = self.ledger.seen[container].committed
        if not announced and not handle.status.terminal and container.phase is not Phase.FAILED:
            self.in_time.add(label)

    async def at(self, seconds: float) -> None:
        await trio.sleep_until(self.started + seconds)

    # -- the pipeline --------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        self.started = trio.current_time()
        plan = self.plan
        for store in plan.stores:
            self.source.fill(store.keys)
        self.destination.faults.failing.update({key: OSError("torn") for key in plan.failing})
        with self.host:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    chain = []
                    if plan.route is not None:
                        self.below = FakeTier(plan.route["capacity"], 16, latency=plan.route["latency"])
                        self.below.faults.failing.update({key: OSError("torn") for key in plan.route["failing"]})
                        config = config_of(destination_timeout=plan.route["destination_timeout"])
                        self.route = await stack.enter_async_context(
                            open_pipeline(self.destination, self.below, config=config, name="route")
                        )
                        self.ledger.watch(self.route)
                        chain = [self.route]
                    if plan.twin is not None:
                        self.twin = await stack.enter_async_context(
                            open_pipeline(self.source, self.destination, config=config_of(**plan.twin), name="twin")
                        )
                        self.ledger.watch(self.twin)
                        self.twin.add_instrument(self.hooks(self.twin))
                    async with open_pipeline(
                        self.source,
                        self.destination,
                        policies=self.policies(),
                        config=config_of(**plan.knobs),
                        chain=chain,
                        name="main",
                    ) as self.pipeline:
                        self.ledger.watch(self.pipeline)
                        self.pipeline.add_instrument(self.hooks(self.pipeline))
                        await self.body()
                    self.shut = True
            except Broken:
                pass
        self.shut = True

    def hooks(self, pipeline: Pipeline) -> Any:
        """Cancels at hook points: the third ``pre_claim`` cancels ``s7``."""
        wanted: dict[tuple[str, int], list[Store]] = {}
        for store in self.plan.stores:
            if store.cancel_hook is not None:
                wanted.setdefault(store.cancel_hook[:2], []).append(store)
        visits: Counter[str] = Counter()

        def make(hook: str) -> Callable[[Any], None]:
            def call(subject: Any) -> None:
                visits[hook] += 1
                for store in wanted.get((hook, visits[hook]), ()):
                    label: str | None = store.label
                    if store.cancel_hook and store.cancel_hook[2] and (numbers := numbers_of(subject)):
                        label = self.numbers.get((pipeline, self.dice.pick(numbers, store.label, "of the subject")))
                    if label is not None:
                        self.cancel(label, f"cancel at {hook}")

            return call

        return SimpleNamespace(**{hook: make(hook) for hook in HOOKS})

    async def body(self) -> None:
        plan = self.plan
        async with trio.open_nursery() as nursery:
            for store in plan.stores:
                nursery.start_soon(self.producer, store)
            for eviction in plan.evictions:
                nursery.start_soon(self.evict, *eviction)
            for deletion in plan.deletions:
                nursery.start_soon(self.delete, *deletion)
            for fault in plan.faults:
                nursery.start_soon(self.fault, *fault)
            if plan.drain_at is not None:
                nursery.start_soon(self.drain, plan.drain_at)
            if plan.ending is not None:
                how, when = plan.ending
                await self.at(when)
                self.fired[f"ending: {how}"] += any(not handle.status.terminal for handle in self.handles.values())
                self.shut = True
                if how == "aclose":
                    await self.pipeline.aclose()
                elif how == "cancel":
                    self.host.cancel()
                elif how == "raise":
                    raise_in = nursery
                    raise_in.cancel_scope.cancel()
                else:
                    nursery.cancel_scope.cancel()
        if plan.ending is not None and plan.ending[0] == "raise":
            raise Broken("the body")
        for label, handle in self.handles.items():
            with trio.move_on_after(HOUR) as scope:
                await handle.wait()
            if scope.cancelled_caught:
                self.ledger.wrong(f"I9: {label} never ended: {handle!r}")

    async def producer(self, store: Store) -> None:
        await self.at(store.at)
        precondition = self.precondition(store)
        if store.kind == "external":
            blocks = self.source.external(self.source.pool.slots(store.keys), store.keys)
        elif store.kind == "strong" and not set(store.keys) - set(self.source.pool._slot_of):
            blocks = self.source.strong(store.keys)
            self.ledger.strong.append(blocks)
        else:
            blocks = self.source.weak(store.keys)
        pipeline = self.twin if self.twin is not None and store.twin else self.pipeline
        try:
            if store.how == "wait":
                handle = await pipeline.enqueue(blocks, precondition=precondition)
            elif store.how == "many":
                (handle,) = pipeline.enqueue_many([blocks], precondition=precondition)
            else:
                handle = pipeline.enqueue_nowait(blocks, precondition=precondition)
        except PipelineFull:
            self.fired["pipeline full"] += 1
            return
        except PipelineClosed:
            self.fired["pipeline closed"] += 1
            if not self.shut:
                self.ledger.wrong(f"I9: {store.label} was refused by a pipeline that nobody closed")
            return
        if pipeline._closed:
            self.ledger.wrong(f"S48: {store.label} got a handle from a closed pipeline")
        self.handles[store.label] = self.ledger.took(pipeline, handle)
        self.numbers[pipeline, handle.id] = store.label
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.waiter, store, handle)
            if store.cancel_at is not None:
                nursery.start_soon(self.canceller, store, handle)

    def precondition(self, store: Store) -> Any:
        opens = self.started + store.opens

        async def sleep() -> None:
            await trio.sleep_until(opens)

        async def broken() -> None:
            await trio.sleep_until(opens)
            raise Broken("precondition")

        async def stubborn() -> None:
            try:
                await trio.sleep_until(opens)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(2 * TICK)

        def event(make: Any, when: float = opens) -> Any:
            made = make()

            async def fire() -> None:
                with trio.CancelScope(shield=True):
                    await trio.sleep_until(when)
                made.set()

            trio.lowlevel.spawn_system_task(fire)
            return made

        def is_set() -> Any:
            made = trio.Event()
            made.set()
            return made

        made: dict[str, Callable[[], Any]] = {
            "none": lambda: NO_WAIT,
            "set": is_set,
            "trio": lambda: event(trio.Event),
            "thread": lambda: event(ThreadEvent),
            "sleep": lambda: sleep,
            "raise": lambda: broken,
            "never": trio.Event,
            "all": lambda: all_of(event(trio.Event), event(ThreadEvent, opens - TICK), sleep),
            "any": lambda: any_of(event(trio.Event), trio.Event(), stubborn),
            "stubborn": lambda: stubborn,
        }
        return made[store.precondition]()

    async def waiter(self, store: Store, handle: TransferHandle) -> None:
        if store.abandons is not None:
            with trio.move_on_after(store.abandons) as scope:
                await handle.wait()
            self.fired["waiter abandoned"] += scope.cancelled_caught
            return
        result = await handle.wait()
        self.confirmed(store, handle)
        if result != handle.result:
            self.ledger.wrong(f"I2: the result of {store.label} changed: {result} to {handle.result}")

    async def canceller(self, store: Store, handle: TransferHandle) -> None:
        await self.at(store.cancel_at or 0.0)
        self.fired["cancel at a time"] += not handle.status.terminal
        self.note_cancel(store.label, handle)
        if store.abandons is not None and self.dice.chance(0.5, store.label, "cancel abandoned"):
            with trio.move_on_after(store.abandons) as scope:
                with contextlib.suppress(DrainUnproven):
                    await handle.cancel()
            self.fired["cancel abandoned"] += scope.cancelled_caught
            return
        late, now = handle.committed or handle.status.terminal, trio.current_time()
        try:
            await handle.cancel()
        except DrainUnproven:
            self.fired["drain unproven"] += 1
        else:
            # Only code of the caller's own that unwinds slowly may keep a cancel waiting that came before the commit.
            unwinding = 2 * TICK if store.precondition in ("stubborn", "any") else 0.0
            if not late and trio.current_time() - now > unwinding:
                self.ledger.wrong(f"I9: the cancel of {store.label} took {trio.current_time() - now} s")
            self.confirmed(store, handle)
            if handle.result is not None and isinstance(handle.result.error, DrainUnproven):
                self.ledger.wrong(f"I3: the cancel of {store.label} returned, though its end is unproven")

    def confirmed(self, store: Store, handle: TransferHandle) -> None:
        if not handle.status.terminal:
            self.ledger.wrong(f"I3: {store.label} was confirmed while {handle.status}")

    # -- disturbances --------------------------------------------------------------------------------------------------

    async def evict(self, when: float, keys: list[Key], again: bool) -> None:
        await self.at(when)
        for deletion in self.source.pool.delete(keys):
            self.fired["evicted from the source"] += deletion.value == "deleted"
        if again:
            self.source.fill(keys)

    async def delete(self, when: float, keys: list[Key]) -> None:
        await self.at(when)
        await self.destination.delete(keys)

    async def fault(self, when: float, seconds: float, what: str) -> None:
        await self.at(when)
        faults = self.destination.faults
        count = len(self.destination.batches)
        if what == "error":
            faults.error = RuntimeError("the copy broke")
        elif what == "unproven":
            faults.error = Unproven("who knows")
        elif what == "group":
            faults.error = ExceptionGroup("two", [ValueError("one"), OSError("two")])
        elif what == "hang":
            faults.hang = True
        elif what == "too few":
            faults.extra_outcomes = -1
        elif what == "too many":
            faults.extra_outcomes = 2
        elif what == "gate":
            faults.gate = trio.Event()
        elif what == "room":
            faults.room = trio.Event()
        try:
            await trio.sleep(seconds)
        finally:
            if what in ("error", "unproven", "group"):
                faults.error = None
            elif what == "hang":
                faults.hang = False
            elif what in ("too few", "too many"):
                faults.extra_outcomes = 0
            elif what == "gate" and faults.gate is not None:
                faults.gate.set()
            elif what == "room" and faults.room is not None:
                faults.room.set()
        self.fired[f"tier: {what}"] += len(self.destination.batches) > count or what == "room"

    async def drain(self, when: float) -> None:
        await self.at(when)
        inside = [
            label
            for label, handle in self.handles.items()
            if not handle.status.terminal and self.numbers.get((self.pipeline, handle.id)) == label
        ]
        self.fired["drain"] += bool(inside)
        await self.pipeline.drain()
        for label in inside:
            if not self.handles[label].status.terminal:
                self.ledger.wrong(f"the drain is over, but {label} is not: {self.handles[label]!r}")

    # -- causes --------------------------------------------------------------------------------------------------------

    def judge_causes(self) -> None:
        """I9: whatever happened to a container, the plan has a reason for it."""
        plan = self.plan
        kinds = {what for _, _, what in plan.faults}
        tier_faults = bool(kinds & {"error", "group", "too few", "too many"})
        may_be_full = plan.capacity < 200 or "room" in kinds
        may_be_unproven = bool(kinds & {"unproven", "hang", "gate"}) or (
            self.shut or plan.latency >= plan.knobs["transfer_timeout"]
        )
        others = Counter(key for store in plan.stores if store.label in self.handles for key in store.keys)
        for store in plan.stores:
            handle = self.handles.get(store.label)
            result = handle.result if handle is not None else None
            if result is None:
                continue

            def wrong(what: object, store: Store = store) -> None:
                self.ledger.wrong(f"I9: {store.label} {what}, for which there is no reason")

            if result.status is not Status.CANCELLED and store.label in self.in_time:
                self.ledger.wrong(f"I4: {store.label} was cancelled in time, and ended {result}")
            if result.status is Status.CANCELLED and store.label not in self.cancelled:
                wrong("was cancelled")
            for error in [result.error, *result.failed.values()]:
                if error is None:
                    continue
                if isinstance(error, PolicyFailed):
                    fine = plan.knobs["on_policy_error"] == "fail" and self.may_fail(store.keys)
                elif isinstance(error, PreconditionFailed):
                    late = store.opens + 2 * TICK - store.at >= plan.knobs["precondition_timeout"]
                    fine = store.precondition in ("never", "raise") or (
                        store.precondition not in ("none", "set") and late
                    )
                elif isinstance(error, PipelineClosed):
                    fine = plan.ending is not None
                elif isinstance(error, DestinationFull):
                    fine = may_be_full or bool(plan.route and plan.route["capacity"] < 200)
                elif isinstance(error, DrainUnproven):
                    fine = may_be_unproven
                elif isinstance(error, TransferFailed):
                    fine = tier_faults or (
                        isinstance(error.__cause__, CapacityError)
                        and len(store.keys) > min(plan.capacity, plan.route["capacity"] if plan.route else 200)
                    )
                elif isinstance(error, OSError):
                    fine = bool(set(plan.failing) & set(store.keys)) or bool(plan.route and plan.route["failing"])
                else:
                    fine = False
                if not fine:
                    wrong(f"failed with {error!r}")
            for key, reason in result.filtered.items():
                fine = {
                    "no": "reject" in plan.policies,
                    "present": "presence" in plan.policies,
                    "pending": others[key] > 1,
                    "overflow": plan.knobs["on_overflow"] == "drop",
                    "error": "broken" in plan.policies,
                    "timeout": self.may_fail(store.keys),
                }
                if not fine.get(reason, False):
                    wrong(f"had {key!r} filtered as {reason}")
            evictable = {key for _, keys, _ in plan.evictions for key in keys}
            for key in result.evicted:
                if key not in evictable or store.kind == "external":
                    wrong(f"had {key!r} evicted")
        if self.locked:
            self.ledger.wrong(f"I1: {self.locked} locks are still held")


class _Steps(trio.abc.Instrument):
    """Ends a run that would go on for ever."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._left = STEPS

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if not self._left:
            self._run.ledger.wrong("it does not come to rest")
            self._run.host.cancel()


def play(seed: int, *, plan: Plan | None = None) -> Report:
    """Carry out the plan of a seed and say what was wrong with it."""
    run = Run(plan_of(seed) if plan is None else plan)

    async def main() -> None:
        await run.main()
        # Inside the run, since a quarantined copy is released here.
        with contextlib.suppress(AssertionError):
            run.ledger.judge()

    try:
        determinism.run(main, seed=seed, instruments=[_Steps(run)])
        run.judge_causes()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        run.ledger.wrong("".join(traceback.format_exception(error)))
    ends: Counter[str] = Counter()
    for handle in run.handles.values():
        result = handle.result
        ends[f"{handle.status.value} {type(result.error).__name__ if result and result.error else ''}".strip()] += 1
        if result is not None:
            ends.update({"blocks completed": len(result.completed), "blocks evicted": len(result.evicted)})
    return Report(seed, run.ledger.violations, run.fired, ends, run.ledger.events)


def play_many(seeds: Sequence[int]) -> tuple[list[Report], Counter[str]]:
    """Those that went wrong, and what fired in all of them."""
    bad: list[Report] = []
    fired: Counter[str] = Counter()
    for seed in seeds:
        report = play(seed)
        fired += report.fired
        fired += Counter({f"end: {end}": n for end, n in report.ends.items()})
        if report.violations:
            bad.append(report)
    return bad, fired


def complaint(bad: Sequence[Report]) -> str:
    """What a person reads: what is wrong, and the line that repeats it."""
    return "\n".join(
        line
        for report in bad[:3]
        for line in [*report.violations[:5], f"repeat it: python tests/fuzz.py {report.seed}", ""]
    )


def main(arguments: Sequence[str]) -> int:
    """``fuzz.py SEED`` plays one seed and shows it; ``fuzz.py FIRST LAST`` plays many."""
    numbers = [int(argument) for argument in arguments]
    if len(numbers) == 1:
        plan = plan_of(numbers[0])
        for name, value in attrs.asdict(plan, recurse=False).items():
            for one in value if name == "stores" else [value]:
                print(f"{name}: {one}")
        report = play(numbers[0])
        print(*[f"  {hook} {containers}" for hook, containers in report.events], sep="\n")
        print(dict(report.fired), dict(report.ends))
        print("\n".join(report.violations) or "nothing was wrong")
        return bool(report.violations)
    bad, fired = play_many(range(numbers[0], numbers[1]))
    print(*[f"{what:40} {n}" for what, n in sorted(fired.items())], sep="\n")
    print(complaint(bad), f"{len(bad)} of {numbers[1] - numbers[0]} seeds went wrong: {[one.seed for one in bad[:20]]}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
