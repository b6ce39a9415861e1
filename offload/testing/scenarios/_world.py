"""The world of one run in virtual time: what a system may ask it for, and what goes wrong meanwhile.

Everything that happens passes here, so that here it is written down (:class:`TraceLog`) and here the faults are
planted: those at a hook are found by its name, those at a time are the driver's (`_users`) to call.

Rule 1. Nothing is raised at a system but what its seam promises. What is found wrong is noted, and judged when the run is
        over: raised inside a copy it would look like a failed copy, raised inside trio it would corrupt later runs.
Rule 2. What a hook does happens within it. Hooks nest: a cancel at a hook may settle a container, which is another.
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
    """The clock of a world."""

    def current_time(self) -> float:
        """Seconds since the run began."""
        ...

    def jump(self, seconds: float) -> None:
        """Move the time ahead by so many seconds."""
        ...


_payload = lru_cache(maxsize=4_096)(payload_of)


class VirtualWorld:
    """The world of one run."""

    slow = False
    """Whether anything may take any time, as it may on the clock of the wall."""

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
        """The first pipeline, which everything is about where none is named."""
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
        """Where the system is ours: what judges it."""
        self.raises = self.leaves = False
        """How the users leave: by raising, and before everything is over."""
        self.stuck: bool = False
        """The run was given up: it did not end, or did not come to rest."""
        self.locks = 0
        """Locks of policies that are held."""
        self.system: System = None  # type: ignore[assignment]
        self.host: trio.CancelScope = trio.CancelScope()
        """The scope around the system."""
        self.background: trio.Nursery = None  # type: ignore[assignment]
        """Where what the world does goes on, whatever becomes of the system."""
        self.askers: trio.Nursery = None  # type: ignore[assignment]
        """Where those wait who asked for a cancel."""
        self.told: Callable[[str], None] | None = None
        """Who wants to know that a container has ended."""
        self.closed_at: float | None = None
        """When the end of the system began, if that was asked for."""
        self.jumps: list[tuple[float, float]] = []
        """The jumps of the clock, from when and to when."""
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
        """Something is about to happen to these containers."""
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
        """Whether there is room. What is in a tier only the system knows: so only what could never fit has none."""
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
        """Write blocks into a tier; what has arrived."""
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
        """What the policies of the first pipeline keep back."""
        if self._policies is None:
            self._policies = world_policies(self, self.first)
        return await self._policies.ask(keys)

    def payload(self, key: Key, tier: str = "") -> bytes:
        """The bytes of a key."""
        return _payload(key, self.tiers[tier or first_destination(self.scenario)].block_bytes)

    def asked(self, label: str) -> StoreStep:
        """What the scenario says of a container."""
        return self.requests[label].store

    # -- what is seen --------------------------------------------------------------------------------------------------

    def wrong(self, rule: str, text: str) -> None:
        """Note a violation; the first 20 are kept."""
        if len(self.violations) < 20:
            self.violations.append(Violation(rule, text))
            self.trace.add("violation", rule, note=text.partition("\n")[0])

    def crashed(self, error: BaseException, what: str) -> None:
        """Note that something raised what it must not."""
        told = "".join(traceback.format_exception(error))
        self.wrong("crash", f"{what} raised {type(error).__name__}: {error}\n{told}")

    def step(self, name: str, label: str = "", note: str = "", where: str = "") -> None:
        """Something that a user does, or is told."""
        self.trace.add("step", name, (label,) if label else (), where, note)

    def look(self, request: Request) -> None:
        """Note the end of a container, if it is there by now."""
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
        """A user was told that it is over: check that it is."""
        assert request.ticket is not None
        if request.ticket.result is None:
            self.wrong("I3", f"{request.label} was confirmed, and has no result")
        self.look(request)

    def labels_of(self, keys: Sequence[Key]) -> list[Request]:
        """The containers that have one of these keys, and are under way or never were."""
        return list(dict.fromkeys([request for key in keys for request in self._by_key.get(key, ())]))

    def _begins(self, model: TierModel, keys: Sequence[Key], who: Sequence[str] | None) -> None:
        """A copy begins: each of its blocks must belong to a container that need not wait for it any more."""
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
        """The confirmation of a cancel was refused: only what has no proven end may do that."""
        assert request.ticket is not None
        self.look(request)
        if request.outcome is None:
            self.wrong("I3", f"{request.label} has not ended, and its cancel raised {error!r}")

    def prompt(self, request: Request, began: float) -> None:
        """A cancel that came before the commit is confirmed: only the caller's own code may have kept it waiting."""
        took = trio.current_time() - began
        if took > unwinding(request.store.after) and not any(
            began <= to and since <= began + took for since, to in self.jumps
        ):
            self.wrong("I9", f"the cancel of {request.label} took {took / TICK:g} ms")

    @property
    def all_keys(self) -> Sequence[Key]:
        """Every key that is stored."""
        return list(self._by_key)

    def busy(self) -> bool:
        """Whether a container is under way."""
        return any(request.alive for request in self.requests.values())

    # -- what is done to the system ------------------------------------------------------------------------------------

    def close(self, how: str) -> None:
        """Begin to end the system, at once; also from within a hook."""
        if self.closed_at is None:
            self.closed_at = trio.current_time()
        if how == "close":
            self.system.close_now()  # type: ignore[attr-defined]
        elif how == "cancel":
            self.host.cancel()

    def evict(self, tier: str, keys: Sequence[Key], *, again: bool) -> Sequence[Key]:
        """Take keys out of a source, all of them where none is named. Returns those that it had, if the system says so."""
        keys = tuple(keys) or tuple(self.all_keys)
        if self.ledger is None:
            gc.collect()  # what a system finds through weak references is found out at fixed points, and only there
        gone: Any = self.system.evict(tier, keys, again)  # type: ignore[attr-defined]
        taken = keys if gone is None else tuple(gone)
        self.evicted.setdefault(tier, {}).update(dict.fromkeys(taken))
        self.oracle.taken_away(tier, taken)
        return taken

    def opened(self) -> None:
        """The system is open: the scenario's time begins. In virtual time, nothing has passed."""

    async def quiet(self) -> None:
        """Return once no task has anything to do any more."""
        await wait_all_tasks_blocked()

    # -- a run that is given up ----------------------------------------------------------------------------------------

    def give_up(self, rule: str, text: str) -> None:
        """It does not end by itself: note that, and cancel the system."""
        self.stuck = True
        self.wrong(rule, text)
        self.host.cancel()
        self.askers.cancel_scope.cancel()

    def unfinished(self) -> str:
        """Who has not ended, for a reader."""
        left = [f"{one.label} was {one.state}" for one in self.requests.values() if one.state == "asked" or one.alive]
        left += [
            f"{one.label} is over, and somebody waits for it"
            for one in self.requests.values()
            if one.waiting and not one.alive
        ]
        return ", ".join(left) if left else "all containers are, but not the system"

    def note_crash(self, error: BaseException) -> None:
        """The run ended with an unexpected exception."""
        told = "".join(traceback.format_exception(error))
        self.violations.append(Violation("crash", f"the run ended with {type(error).__name__}: {error}\n{told}"))

    # -- whose task this is --------------------------------------------------------------------------------------------

    def this_is(self, label: str) -> None:
        """What this task does from now on, it does for this container."""
        self._labels[trio.lowlevel.current_task()] = label

    @property
    def label(self) -> str:
        """The container for which this task does what it does; empty: it is not known."""
        return self._labels.get(trio.lowlevel.current_task(), "")

    # -- time ----------------------------------------------------------------------------------------------------------

    def _at(self, time: float, call: Callable[[], object]) -> None:
        self.background.start_soon(self._later, time, call)

    async def _later(self, time: float, call: Callable[[], object]) -> None:
        await trio.sleep_until(time)
        call()

    def jump(self, seconds: float) -> None:
        """The clock jumps ahead."""
        now = trio.current_time()
        self.clock.jump(seconds)
        self.jumps.append((now, now + seconds))

    def log_fault(self, planned: PlannedFault, who: Sequence[str], where: str, note: str) -> TraceEntry:
        """A fault happens now; whether it hits anything is not known yet."""
        return self.trace.add("fault", planned.fault.do, who, where, note, fired=False)


# --- containers -------------------------------------------------------------------------------------------------------


class Request:
    """One container, as its user sees it: what was asked, what came of it so far, and who waits for it."""

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
        """What it waits for, as our own pipelines have it."""
        self.state: str = ""
        """``asked``, then ``taken``, ``refused`` or ``abandoned``."""
        self.asked_at: float = 0.0
        self.storing: trio.CancelScope | None = None
        """What it waits in to be taken in, while it does."""
        self.ticket: Ticket | None = None
        self.waiting: list[trio.CancelScope] = []
        """Those who wait for its result or for the confirmation of its cancel."""
        self.result: Any = None
        """What the ticket showed first."""
        self.outcome: Outcome | None = None
        self.ended_at: float = 0.0
        self.cancelled: bool = False
        """Its cancel was asked for."""
        self.in_time: bool = False
        """It was, and came before the commit and before any other end."""

    @property
    def alive(self) -> bool:
        """Whether it was taken in and has not ended."""
        return self.ticket is not None and self.ticket.result is None
