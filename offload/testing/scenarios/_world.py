"""World of one run in virtual time: its seams and its faults.

Everything passes through the world, so that it keeps the record (:class:`TraceLog`) and plants the faults: those at a
hook are found by its name, those at a time are called by the driver (`_users`).

Rule 1. The world raises only errors that a seam permits. Violations are recorded, and judged when the run is over:
        raised inside a copy they would look like a failed copy, raised inside trio they would corrupt later runs.
Rule 2. The effects of a hook happen within its call. Hooks nest: a cancel at a hook may settle a container, which is
        another hook.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import trio

from backends.abc import Key
from backends.testing import payload_of
from offload.abc import Precondition

from ._clock import wait_all_tasks_blocked
from ._faults import PlannedFault, plan_faults
from ._ledger import Ledger
from ._names import first_destination, keys_of, pipelines_of, stores_of, tiers_of
from ._oracle import Oracle
from ._policies import Events, WorldPolicies, unwinding, world_policies
from ._program import (
    TICK,
    PipelineSpec,
    Scenario,
    StoreStep,
    TierSpec,
)
from ._rng import Rng
from ._systems import Outcome, System, Ticket
from ._trace import TraceEntry, TraceLog, Violation, outcome_of
from ._virtual_tier import Copy, TierModel


class Clock(Protocol):
    """Clock of a world."""

    def current_time(self) -> float:
        """Return the seconds since the run began."""
        ...

    def jump(self, seconds: float) -> None:
        """Advance the time by so many seconds."""
        ...


_payload = lru_cache(maxsize=4_096)(payload_of)


class VirtualWorld:
    """World of one run."""

    slow = False
    """Whether any operation may take any time, as in real time."""

    def __init__(self, scenario: Scenario, seed: int, clock: Clock) -> None:
        self.scenario = scenario
        self.seed = seed
        self.clock = clock
        self.rng: Rng = Rng(seed)
        self.trace: TraceLog = TraceLog()
        self.violations: list[Violation] = []
        self.tiers: Mapping[str, TierSpec] = tiers_of(scenario)
        self.pipelines: Mapping[str, PipelineSpec] = pipelines_of(scenario)
        self.first: str = next(iter(self.pipelines))
        """First pipeline, the default if none is named."""
        self.tier_models: dict[str, TierModel] = {
            name: TierModel(name, spec, self.trace, self._owners) for name, spec in self.tiers.items()
        }
        for model in self.tier_models.values():
            model.begins = self._begins
        self.requests: dict[str, Request] = {}
        self._by_key: dict[Key, list[Request]] = {}
        for store in stores_of(scenario):
            for label, keys in keys_of(store).items():
                coded = tuple([key.encode() for key in keys])
                request = self.requests[label] = Request(label, coded, store, store.pipeline or self.first)
                for key in coded:
                    self._by_key.setdefault(key, []).append(request)
        self.visits: Counter[str] = Counter()
        self.states: dict[str, None] = {}
        """States that containers were seen in."""
        self.events: Events = Events(self._at)
        self.oracle: Oracle = Oracle(self)
        self.ledger: Ledger | None = None
        """Judge of our own systems; ``None`` for others."""
        self.raises = self.leaves = False
        """Whether the users leave by raising, or before everything is over."""
        self.stuck: bool = False
        """Whether the run was given up.

        It did not end, or did not come to rest.
        """
        self.locks = 0
        """Number of locks that policies hold."""
        self.system: System = None  # type: ignore[assignment]
        self.host: trio.CancelScope = trio.CancelScope()
        """Scope around the system."""
        self.background: trio.Nursery = None  # type: ignore[assignment]
        """Nursery of the world's own tasks, independent of the system."""
        self.askers: trio.Nursery = None  # type: ignore[assignment]
        """Nursery of the tasks that await the confirmation of a cancel."""
        self.told: Callable[[str], None] | None = None
        """Function called with the label of each container that has ended."""
        self.closed_at: float | None = None
        """Time at which a requested end of the system began."""
        self.jumps: list[tuple[float, float]] = []
        """Start and end of each jump of the clock."""
        self.evicted: dict[str, dict[Key, None]] = {}
        self.loaded = self.missed = 0
        self._labels: dict[trio.lowlevel.Task, str] = {}
        self._policies: WorldPolicies | None = None
        self.faults: list[PlannedFault] = []
        self._at_hook: dict[str, list[PlannedFault]] = {}
        for planned in plan_faults(scenario, self.rng):
            self.faults.append(planned)
            if planned.fault.at_hook:
                self._at_hook.setdefault(planned.fault.at_hook, []).append(planned)

    # -- the seams -----------------------------------------------------------------------------------------------------

    def hook(self, name: str, label: str | Sequence[str], where: str = "") -> None:
        """Record an event of these containers, and trigger its faults."""
        who = (label,) if isinstance(label, str) else tuple(label)
        self.visits[name] += 1
        self.trace.add("hook", name, who, where)
        for one in who:
            request = self.requests.get(one)
            if request is not None and request.outcome is None and request.ticket is not None:
                self.look(request)
        planned = self._at_hook.get(name)
        if planned is not None:
            for one_planned in planned:
                one_planned.visit(self, who, where)

    async def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Return whether there is room.

        Only the system knows the contents of a tier: so only keys that could never fit have no room.
        """
        model = self.tier_models[tier]
        await trio.lowlevel.checkpoint()
        model.check_peer()
        if self._waits_for_room(tier):
            await model.wait_for_room()
        elif model.withheld() is not None:
            return False
        return len(keys) <= model.spec.capacity

    def _waits_for_room(self, tier: str) -> bool:
        rules = [spec.on_destination_full for spec in self.pipelines.values() if spec.to == tier]
        return not rules or rules[0] in (None, "wait", "evict")

    async def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier, and return the bytes that arrived."""
        model = self.tier_models[tier]
        for key, block in zip(keys, data, strict=True):
            if bytes(block) != self.payload(key, tier):
                self.wrong("bytes", f"{key.decode()} is copied into {tier}, and is not what was stored under that key")

        async def move(copy: Copy) -> list[bytes]:
            torn, failing = copy.torn(), copy.failing()
            if torn is not None:
                raise OSError(f"a copy into {tier} broke off in the middle of {torn.decode()}")
            if failing:
                raise OSError(f"a copy into {tier} failed for {sorted(failing)}")
            arrived = [self._arrives(model, key, bytes(block)) for key, block in zip(keys, data, strict=True)]
            return copy.answers(arrived)

        await trio.lowlevel.checkpoint()
        return await model.run_copy(tuple(keys), move)

    def _arrives(self, model: TierModel, key: Key, block: bytes) -> bytes:
        entry = model.flip_on_arrival.pop(key, None)
        if entry is None:
            return block
        entry.fired = True
        model.flipped.add(key)
        return bytes([block[0] ^ 1]) + block[1:]

    async def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Return the keys that the policies of the first pipeline keep back."""
        if self._policies is None:
            self._policies = world_policies(self, self.first)
        return await self._policies.ask(keys)

    def payload(self, key: Key, tier: str = "") -> bytes:
        """Return the bytes of a key."""
        return _payload(key, self.tiers[tier or first_destination(self.scenario)].block_bytes)

    def asked(self, label: str) -> StoreStep:
        """Return the scenario's request for a container."""
        return self.requests[label].store

    # -- observations --------------------------------------------------------------------------------------------------

    def wrong(self, rule: str, text: str) -> None:
        """Record a violation; the first 20 are kept."""
        if len(self.violations) < 20:
            self.violations.append(Violation(rule, text))
            self.trace.add("violation", rule, note=text.partition("\n")[0])

    def crashed(self, error: BaseException, what: str) -> None:
        """Record an exception that must not be raised."""
        told = "".join(traceback.format_exception(error))
        self.wrong("crash", f"{what} raised {type(error).__name__}: {error}\n{told}")

    def step(self, name: str, label: str = "", note: str = "", where: str = "") -> None:
        """Record an action of a user, or a result for one."""
        self.trace.add("step", name, (label,) if label else (), where, note)

    def look(self, request: Request) -> None:
        """Record the end of a container, if it has ended."""
        ticket = request.ticket
        if request.outcome is not None or ticket is None:
            return
        result = ticket.result
        if result is None:
            return
        request.result = result
        request.outcome = outcome = outcome_of(result)
        request.ended_at = trio.current_time()
        self.trace.add("end", "ended", (request.label,), request.pipeline, outcome.status)
        self.states[outcome.status] = None
        self.oracle.ended(request)
        if self.told is not None:
            self.told(request.label)

    def confirmed(self, request: Request) -> None:
        """Check that a container whose user got a confirmation has ended."""
        assert request.ticket is not None
        if request.ticket.result is None:
            self.wrong("I3", f"{request.label} was confirmed, and has no result")
        self.look(request)

    def labels_of(self, keys: Sequence[Key]) -> list[Request]:
        """Return the requests of the containers with one of these keys."""
        return list(dict.fromkeys([request for key in keys for request in self._by_key.get(key, ())]))

    def _begins(self, model: TierModel, keys: Sequence[Key], who: Sequence[str] | None) -> None:
        """Check that each block of a beginning copy may be read already.

        It must belong to a container whose preconditions hold.
        """
        now = trio.current_time()
        for key in keys:
            sharing = [one for one in self._by_key.get(key, ()) if (one.state if who is None else one.label in who)]
            if sharing and not any(self.events.holds(one.store, one.asked_at, now) for one in sharing):
                what = f"{key.decode(errors='backslashreplace')} is copied into {model.name}"
                self.wrong("bytes", f"{what}, and what {sharing[0].label} waits for does not hold yet")

    def _owners(self, keys: Sequence[Key]) -> tuple[str, ...]:
        return tuple(
            [request.label for request in self.labels_of(keys) if request.state == "taken" and request.outcome is None]
        )

    def unconfirmed(self, request: Request, error: Exception) -> None:
        """Record that the confirmation of a cancel was refused.

        Only a container without a proven end may refuse it.
        """
        assert request.ticket is not None
        self.look(request)
        if request.outcome is None:
            self.wrong("I3", f"{request.label} has not ended, and its cancel raised {error!r}")

    def prompt(self, request: Request, began: float) -> None:
        """Check that a cancel before the commit was confirmed at once.

        Only the caller's own code may have delayed it.
        """
        took = trio.current_time() - began
        if took > unwinding(request.store.after) and not any(
            began <= to and since <= began + took for since, to in self.jumps
        ):
            self.wrong("I9", f"the cancel of {request.label} took {took / TICK:g} ms")

    @property
    def all_keys(self) -> Sequence[Key]:
        """All keys that the scenario stores."""
        return list(self._by_key)

    def busy(self) -> bool:
        """Return whether a container is in progress."""
        return any(request.alive for request in self.requests.values())

    # -- operations on the system --------------------------------------------------------------------------------------

    def close(self, how: str) -> None:
        """Begin to end the system at once; also from within a hook."""
        if self.closed_at is None:
            self.closed_at = trio.current_time()
        if how == "close":
            self.system.close_now()  # type: ignore[attr-defined]
        elif how == "cancel":
            self.host.cancel()

    def evict(self, tier: str, keys: Sequence[Key], *, again: bool) -> Sequence[Key]:
        """Take keys out of a source; all keys, if none is named.

        Returns:
            The removed keys if the system reports them, else all requested ones.
        """
        keys = tuple(keys) or tuple(self.all_keys)
        if self.ledger is None:
            gc.collect()  # keys found through weak references are collected at fixed points only
        gone: Any = self.system.evict(tier, keys, again)  # type: ignore[attr-defined]
        taken = keys if gone is None else tuple(gone)
        self.evicted.setdefault(tier, {}).update(dict.fromkeys(taken))
        self.oracle.taken_away(tier, taken)
        return taken

    def opened(self) -> None:
        """Begin the scenario's time: the system is open.

        In virtual time, nothing has passed.
        """

    async def quiet(self) -> None:
        """Wait until no task has anything left to do."""
        await wait_all_tasks_blocked()

    # -- a run that is given up ----------------------------------------------------------------------------------------

    def give_up(self, rule: str, text: str) -> None:
        """Record that the run does not end, and cancel the system."""
        self.stuck = True
        self.wrong(rule, text)
        self.host.cancel()
        self.askers.cancel_scope.cancel()

    def unfinished(self) -> str:
        """Return the unfinished containers as a text for a reader."""
        left = [f"{one.label} was {one.state}" for one in self.requests.values() if one.state == "asked" or one.alive]
        left += [
            f"{one.label} is over, and somebody waits for it"
            for one in self.requests.values()
            if one.waiting and not one.alive
        ]
        return ", ".join(left) if left else "all containers are, but not the system"

    def note_crash(self, error: BaseException) -> None:
        """Record that the run ended with an unexpected exception."""
        told = "".join(traceback.format_exception(error))
        self.violations.append(Violation("crash", f"the run ended with {type(error).__name__}: {error}\n{told}"))

    # -- containers of tasks -------------------------------------------------------------------------------------------

    def this_is(self, label: str) -> None:
        """Attribute this task's work to a container from now on."""
        self._labels[trio.lowlevel.current_task()] = label

    @property
    def label(self) -> str:
        """Container that this task works for; empty: unknown."""
        return self._labels.get(trio.lowlevel.current_task(), "")

    # -- time ----------------------------------------------------------------------------------------------------------

    def _at(self, time: float, call: Callable[[], object]) -> None:
        self.background.start_soon(self._later, time, call)

    async def _later(self, time: float, call: Callable[[], object]) -> None:
        await trio.sleep_until(time)
        call()

    def jump(self, seconds: float) -> None:
        """Make the clock jump ahead."""
        now = trio.current_time()
        self.clock.jump(seconds)
        self.jumps.append((now, now + seconds))

    def log_fault(self, planned: PlannedFault, who: Sequence[str], where: str, note: str) -> TraceEntry:
        """Record a fault that happens now; its effect is still unknown."""
        return self.trace.add("fault", planned.fault.do, who, where, note, fired=False)


# --- containers -------------------------------------------------------------------------------------------------------


class Request:
    """One container from its user's view: request, result, and waiters."""

    __slots__ = (
        "after", "asked_at", "cancelled", "ended_at", "in_time", "keys", "label", "outcome", "pipeline", "result", "state",
        "store", "storing", "ticket", "waiting",
    )  # fmt: skip

    def __init__(self, label: str, keys: tuple[Key, ...], store: StoreStep, pipeline: str) -> None:
        self.label: str = label
        self.keys: tuple[Key, ...] = keys
        self.store: StoreStep = store
        self.pipeline: str = pipeline
        self.after: Precondition | None = None
        """Precondition, in the form of our own pipelines."""
        self.state: str = ""
        """State of the request: ``asked``, then ``taken``, ``refused`` or ``abandoned``."""
        self.asked_at: float = 0.0
        self.storing: trio.CancelScope | None = None
        """Cancel scope of the store call while it waits."""
        self.ticket: Ticket | None = None
        self.waiting: list[trio.CancelScope] = []
        """Scopes of those who wait for its result or its cancel's confirmation."""
        self.result: Any = None
        """First result that the ticket showed."""
        self.outcome: Outcome | None = None
        self.ended_at: float = 0.0
        self.cancelled: bool = False
        """Whether its cancel was requested."""
        self.in_time: bool = False
        """Whether its cancel came before the commit and any other end."""

    @property
    def alive(self) -> bool:
        """Whether it was accepted and has not ended."""
        return self.ticket is not None and self.ticket.result is None
