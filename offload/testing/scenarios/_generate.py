"""Random programs, one for each seed, for pipelines and engines. Pure.

The mix ``standard`` is for pipelines, ``engine`` for engines of several tiers.

Rule 1. Each choice is drawn by its site (:class:`Rng`), never from a stream.
Rule 2. Times are few and whole, so that many coincide. Faults are aimed by :class:`FaultPlan`.
Rule 3. Most loaded keys were stored before: a load that could never hit shows little. Some prefixes
        (:meth:`Draft._prefix`) are stored while no fault is aimed at them, read, deleted and stored again.
Rule 4. Every generated program passes :func:`check`.
Rule 5. A program for an engine is one for pipelines whose tiers are behind an engine. It adds the features of engines:
        tiers that break, are left alone and used again, promotion, retries in slower tiers, and readers of several
        tiers. No ledger looks into an engine; the oracle checks its visible results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec

from ._generate_faults import (
    SHARED,
    FaultPlan,
    PlannedStore,
    sample,
)
from ._names import compress, expand
from ._program import (
    After,
    CloseStep,
    EngineSpec,
    Fault,
    KeysStep,
    LoadStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    WhenFull,
)
from ._rng import Rng

BLOCK_BYTES: Final = 16
SPAN: Final = 24
"""Virtual milliseconds within which stores begin."""
AMPLE: Final = 200
"""Capacity that is never used up."""
AMPLE_BUDGET: Final = 4_096
HOLDS: Final = (0, 0, 0, 0, 6, 20)
"""Hold times of readers, in virtual milliseconds; mostly none."""
Below: TypeAlias = Mapping[str, tuple[str, str]]
_NOTHING_BELOW: Final[Below] = {}
_BELOW: Final[Sequence[Below]] = (
    {"route": ("host", "disk")},
    {"route": ("host", "disk")},
    {"route": ("host", "disk"), "other": ("host", "far")},
    {"route": ("host", "disk"), "other": ("host", "far")},
    {"route": ("host", "disk"), "on": ("disk", "far")},
)
"""Chains below the first pipeline, each route with its two tiers.

There is one route, two next to each other, or one after the other.
"""


def generate(seed: int) -> Scenario:
    """Return the random program of a seed."""
    return Draft(Rng(seed)).scenario()


@attrs.define
class Draft:
    """A program under construction."""

    rng: Rng
    engine: Below | None = None
    """Routes to an engine's tiers after its first one.

    ``None``: the program is for pipelines.
    """
    puts: list[PlannedStore] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)
    plain: list[PlannedStore] = attrs.Factory(list)
    """Containers without preconditions."""
    held: list[str] = attrs.Factory(list)
    """Keys that the first destination has from the start."""
    read: list[PlannedStore] = attrs.Factory(list)
    """Initial blocks that readers hold for a while."""
    drops: bool = False
    """Whether weak containers are dropped if the budget has no room."""
    loads: int = 0

    def scenario(self) -> Scenario:
        rng = self.rng
        below = self.engine
        twin = below is None and rng.chance(0.2, "twin")
        if below is None:
            below = rng.pick(_BELOW, "below") if rng.chance(0.2, "route") else _NOTHING_BELOW
        capacity = rng.pick([4, 8, 16, AMPLE, AMPLE, AMPLE], "capacity")
        main = self._main(capacity)
        budget = main.budget_blocks or AMPLE_BUDGET
        self.drops = main.on_overflow == "drop"
        self._stores(twin, budget)
        for i in range(rng.pick([1, 1, 1, 2], "prefixes")):
            self._prefix(i, min(capacity, budget))
        tiers = self._tiers(below, capacity)
        chain = _from("host", below)
        optional = [name for name in chain if self.engine is None and rng.chance(0.4, name, "optional")]
        pipelines = {
            "main": msgspec.structs.replace(
                main,
                chain=[name for name in chain if name not in optional],
                optional_chain=optional,
                policies=self._policies(),
            )
        }
        if twin:
            pipelines["twin"] = self._twin()
        for name, (source, to) in below.items():
            patience = rng.pick([4, 100], name, "timeout")
            pipelines[name] = PipelineSpec(
                source=source,
                to=to,
                chain=_from(to, below),
                destination_ms=patience,
                flush_ms=rng.pick([1, 10], name),
                route_share=rng.pick([0.25, 0.5, 1.0], name, "share") if name in optional else None,
                route_ms=rng.pick([0, 4, 40], name, "patience") if name in optional else None,
            )
        self._disturb(tiers)
        host = tiers["host"]
        return Scenario(
            name=f"seed {rng.seed}",
            seed=rng.seed,
            tier=tiers,
            pipeline=pipelines,
            step=sorted(self.steps, key=lambda step: step.at_ms),
            fault=FaultPlan(
                rng,
                self.puts,
                read=self.read,
                below=[to for _, to in below.values()],
                slots=2 if twin else main.max_concurrent_transfers or 1,
                budget=budget,
                copy_ms=host.latency_ms + (4 * BLOCK_BYTES // host.bytes_per_ms if host.bytes_per_ms else 0),
            ).all(),
        )

    # -- tiers and pipelines -------------------------------------------------------------------------------------------

    def _main(self, capacity: int) -> PipelineSpec:
        rng = self.rng
        budget = rng.pick([8, 16, 24, AMPLE_BUDGET, AMPLE_BUDGET], "budget")
        most = min(rng.pick([1, 2, 4, 8, 16], "max_batch_size"), budget)
        full: tuple[WhenFull, ...] = ("wait", "wait", "evict", "partial", "fail")
        if capacity < AMPLE:  # fewer blocks are deleted than stored
            full = ("wait", "evict", "evict", "partial", "fail")
        return PipelineSpec(
            to="host",
            max_batch_size=most,
            min_batch_size=1 + rng.below(most, "min_batch_size"),
            flush_ms=rng.pick([0, 1, 4, 10], "flush_interval"),
            policy_ms=rng.pick([2, 4, 40], "policy_timeout"),
            on_policy_error=rng.pick(["filter", "fail"], "on_policy_error"),
            max_waiting_policies=rng.pick([1, 2, 64], "max_waiting_policies"),
            precondition_ms=rng.pick([8, 20, 200, 200, 200], "precondition_timeout"),
            max_concurrent_transfers=rng.pick([1, 2, 2, 3], "slots"),
            on_destination_full=rng.pick(full, "full"),
            destination_ms=rng.pick([4, 10, 100, 100], "destination_timeout"),
            transfer_ms=rng.pick([6, 20, *[1000] * 10], "transfer_timeout"),
            drain_ms=rng.pick([0, 4, 100, 1000], "drain_timeout"),
            budget_blocks=budget,
            on_overflow=rng.pick(["wait", "wait", "drop"], "overflow"),
        )

    def _twin(self) -> PipelineSpec:
        rng = self.rng
        return PipelineSpec(
            to="host",
            destination_ms=rng.pick([4, 100], "twin timeout"),
            flush_ms=rng.pick([0, 4], "twin flush"),
            max_concurrent_transfers=1 + rng.below(2, "twin slots"),
            on_destination_full=rng.pick(["wait", "evict", "partial", "fail"], "twin full"),
        )

    def _tiers(self, below: Below, capacity: int) -> dict[str, TierSpec]:
        rng = self.rng
        held = self.held + (sample(rng, SHARED, 0.2, "held") if rng.chance(0.2, "holds") else [])
        tiers = {
            "device": TierSpec(capacity=512, block_bytes=BLOCK_BYTES),
            "host": TierSpec(
                capacity=capacity,
                block_bytes=BLOCK_BYTES,
                latency_ms=rng.pick([0, 1, 1, 2, 3, 5], "latency"),
                bytes_per_ms=rng.pick([0, 0, BLOCK_BYTES, 4 * BLOCK_BYTES], "bandwidth"),
                holds=compress(held[:capacity]),
            ),
        }
        for _, to in below.values():
            tiers[to] = TierSpec(
                capacity=rng.pick([4, AMPLE], to, "capacity"),
                block_bytes=BLOCK_BYTES,
                latency_ms=rng.below(4, to, "latency"),
            )
        return tiers

    def _policies(self) -> list[PolicySpec]:
        return [self._policy(i) for i in range(self.rng.pick([0, 0, 1, 1, 2, 3], "policies"))]

    def _policy(self, i: int) -> PolicySpec:
        rng, where = self.rng, ("policy", i)

        def keys_with(p: float) -> str:
            known = dict.fromkeys([*SHARED, *[key for put in self.puts for key in put.keys]])
            return compress(sample(rng, [*known], p, *where, "keys") or SHARED[:1])

        at_once = rng.pick([0.0, 0.0, 0.5, 1.0], *where, "at once")
        kinds = ["present", "reject", "sleep", "raise", "lock", "lock now", "cancel", "hang"]
        match rng.pick(kinds, *where):
            case "present":
                return PolicySpec(do="present", tier="host")
            case "reject":
                return PolicySpec(do="reject", keys=keys_with(0.25))
            case "sleep":
                ms = 1 + rng.below(6, *where, "ms")
                return PolicySpec(do="sleep", ms=ms, keys=keys_with(0.2), at_once=at_once)
            case "raise":
                ms = rng.pick([0, 0, 1, 3], *where, "ms")
                return PolicySpec(do="raise", keys=keys_with(0.08), ms=ms, at_once=at_once if ms else 0.0)
            case "lock":
                return PolicySpec(do="lock", ms=1 + rng.below(4, *where, "ms"), p=0.5, at_once=at_once)
            case "lock now":
                return PolicySpec(do="lock")
            case "cancel":
                who = [put.label for put in self.puts if rng.chance(0.3, *where, put.label)]
                return PolicySpec(do="cancel", who=compress(who or [self.puts[0].label]), p=0.2)
            case _:
                return PolicySpec(do="hang", keys=keys_with(0.03))

    # -- the load ------------------------------------------------------------------------------------------------------

    def _stores(self, twin: bool, budget: int) -> None:
        rng = self.rng
        for i in range(3 + rng.below(16, "stores")):
            where = ("store", i)
            pipeline = "twin" if twin and rng.chance(0.4, *where, "twin") else ""
            self._store(f"s{i}", rng.below(SPAN, *where, "at"), where, pipeline)
        if rng.chance(0.6 if budget < AMPLE_BUDGET else 0.2, "burst"):
            self._burst(budget)

    def _burst(self, budget: int) -> None:
        """Store several containers at once.

        With a small budget, more than fit in.
        """
        rng = self.rng
        least = budget // 4 if budget < AMPLE_BUDGET else 0
        labels = [f"b{i}" for i in range(2 + rng.below(6, "burst", "many"))]
        at, per = rng.below(SPAN, "burst", "at"), 1 + least + rng.below(2, "burst", "per")
        how: Any = rng.pick(["wait", "wait", "wait", "now", "many", "many"], "burst", "how")
        kind: Any = rng.pick(["weak", "weak", "strong"], "burst", "kind")
        self.puts += [
            PlannedStore(label, at, tuple([f"{label}.{n}" for n in range(per)]), waits=self._waits(how, kind))
            for label in labels
        ]
        self._at(at, store=StoreStep(id=compress(labels), per=per, how=how, kind=kind))

    def _waits(self, how: str, kind: str) -> bool:
        return how == "wait" and not (kind == "weak" and self.drops)

    def _prefix(self, i: int, room: int) -> None:
        """Add the steps of a prefix: stored, read, grown, deleted, stored again.

        At the end it is read again. No fault is aimed at it while it is stored.
        """
        rng, where = self.rng, ("prefix", i)
        keys = [f"p{i}.{n}" for n in range(min(2 + rng.below(4, *where, "n"), room))]
        at = 10 + rng.below(20, *where, "at")
        if rng.chance(0.5, *where, "held"):
            self.held += keys
            if rng.chance(0.8, *where, "held on to"):
                self._hold_on(keys, where)
        else:
            self._at(at, store=StoreStep(id=f"p{i}", per=len(keys)))  # and no fault is aimed at it
        read = at + 28 + rng.below(12, *where, "read")
        self._load(read, keys)
        if rng.chance(0.4, *where, "grows"):
            longer = [*keys, f"q{i}.0"][-room:]
            self._turn(f"q{i}", read + rng.below(6, *where, "grows at"), longer, where)
        if rng.chance(0.5, *where, "gone"):
            gone = read + 2 + rng.below(8, *where, "gone at")
            self._at(gone, delete=KeysStep(keys=compress(keys[rng.below(len(keys), *where, "from") :])))
            self._load(gone + rng.below(4, *where, "missed at"), keys)
            if rng.chance(0.6, *where, "again"):
                self._turn(f"r{i}", gone + 1 + rng.below(4, *where, "again at"), keys, where)
        for time in range(1 + rng.below(2, *where, "times")):
            self._load(read + 24 + rng.below(24, *where, "read again", time), keys)

    def _hold_on(self, keys: Sequence[str], where: tuple[object, ...]) -> None:
        """Hold initial blocks while other stores need the room.

        Perhaps a step tries to delete them meanwhile.
        """
        rng = self.rng
        at, hold = rng.below(8, *where, "early"), rng.pick([8, 24, 40], *where, "for")
        self._load(at, keys, hold=hold)
        self.read.append(PlannedStore("", at, tuple(keys), within=hold))
        if rng.chance(0.5, *where, "deleted"):
            self._at(at + 1 + rng.below(hold, *where, "deleted at"), delete=KeysStep(keys=compress(keys)))

    def _turn(self, label: str, at: int, keys: Sequence[str], where: tuple[object, ...]) -> None:
        kind: Any = self.rng.pick(["weak", "strong"], *where, label)
        self._at(at, store=StoreStep(id=label, keys=compress(keys), per=len(keys), kind=kind))
        self.puts.append(PlannedStore(label, at, tuple(keys)))

    def _load(self, at: int, keys: Sequence[str], tier: str = "", hold: int | None = None) -> None:
        """Load keys, and perhaps hold them for a while.

        Perhaps another reader of the same keys runs at the same time, which releases them before or after.
        """
        rng, where, long = self.rng, ("hold", self.loads), hold is not None
        if hold is None:
            hold = rng.pick(HOLDS, *where)
        self._read(at, keys, tier, hold)
        if hold and rng.chance(0.8 if long else 0.2, *where, "beside"):
            self._read(at + rng.below(hold, *where, "beside at"), keys, tier, rng.pick([2, 16], *where, "beside for"))

    def _read(self, at: int, keys: Sequence[str], tier: str, hold: int) -> None:
        self._at(at, load=LoadStep(id=f"l{self.loads}", keys=compress(keys), tier=tier, hold_ms=hold))
        self.loads += 1

    def _store(self, label: str, at: int, where: tuple[object, ...], pipeline: str) -> None:
        rng = self.rng
        kind: Any = rng.pick(["weak", "weak", "weak", "strong", "external"], *where, "kind")
        n = rng.pick([0, 1, 1, 2, 2, 3, 4, 6], *where, "n")
        own = kind == "external" or n == 0 or rng.chance(0.5, *where, "own")
        start = rng.below(len(SHARED), *where, "start")
        keys = [f"{label}.{i}" for i in range(n)] if own else [*SHARED, *SHARED][start : start + n]
        after, any_of = self._after(label, at, where)
        step = StoreStep(
            id=label,
            keys="" if own else compress(keys),
            per=n,
            kind=kind,
            pipeline=pipeline,
            how=rng.pick(["now", "many", "wait", "wait", "wait"], *where, "how"),
            after=after,
            any_of=any_of,
        )
        self._at(at, store=step)
        waits = self._waits(step.how, kind) and not pipeline
        put = PlannedStore(label, at, tuple(keys), kept=kind == "external", waits=waits)
        self.puts.append(put)
        if keys and not after:
            self.plain.append(put)

    def _after(self, label: str, at: int, where: tuple[object, ...]) -> tuple[list[After], bool]:
        """Draw a container's preconditions, and whether one of them suffices."""
        rng = self.rng
        ms = rng.below(rng.pick([6, 12, 30], *where, "opens within"), *where, "opens")
        kinds = [*["none"] * 8, "set", "trio", "thread", "sleep", "raise", "never", "all", "any", "stubborn", "shared"]
        match rng.pick(kinds, *where, "precondition"):
            case "none":
                return [], False
            case "set":
                return [After(made_of=rng.pick(["trio", "thread", "async"], *where, "as"))], False
            case "trio" | "thread" as made_of:
                if rng.chance(0.5, *where, "by an event"):
                    self._at(at + ms, fire=f"e-{label}")
                    return [After(event=f"e-{label}", made_of=made_of)], False
                return [After(ms=ms, made_of=made_of)], False
            case "sleep":
                return [After(ms=ms, made_of="async")], False
            case "raise":
                return [After(ms=ms, do="raise", made_of=rng.pick(["async", "stubborn"], *where, "as"))], False
            case "never":
                return [After(do="never", made_of=rng.pick(["trio", "async"], *where, "as"))], False
            case "all":
                return [After(ms=ms), After(ms=max(ms - 1, 0), made_of="thread"), After(ms=ms, made_of="async")], False
            case "any":
                return [After(ms=ms), After(do="never"), After(ms=ms, made_of="stubborn")], True
            case "stubborn":
                return [After(ms=ms, made_of="stubborn")], False
            case _:
                self._at(rng.below(40, "shared event"), fire="e")
                return [After(event="e")], False

    def _disturb(self, tiers: Mapping[str, TierSpec]) -> None:
        """Add evictions, deletions, loads, drains, and an early end."""
        rng, lower = self.rng, [name for name in tiers if name not in ("device", "host")]
        for i in range(rng.below(4, "evictions")):
            keys = sample(rng, SHARED, 0.4, "evict", i, "keys")
            if keys:
                again = rng.chance(0.5, "evict", i, "again")
                self._at(rng.below(40, "evict", i), evict=KeysStep(keys=compress(keys), again=again))
        for i in range(rng.below(3, "deletions")):
            keys = sample(rng, SHARED, 0.5, "delete", i, "keys")
            if keys:
                tier = rng.pick(lower, "delete", i, "which") if lower and rng.chance(0.3, "delete", i, "tier") else ""
                self._at(rng.below(60, "delete", i), delete=KeysStep(tier=tier, keys=compress(keys)))
        for i in range(rng.below(4, "loads") if self.plain else 0):
            put = rng.pick(self.plain, "load", i, "of")
            tier = rng.pick(lower, "load", i, "which") if lower and rng.chance(0.3, "load", i, "tier") else ""
            self._load(put.at_ms + 30 + rng.below(40, "load", i), put.keys, tier)
        if rng.chance(0.2, "drains"):
            self._at(rng.below(40, "drain"), drain="main")
        if rng.chance(0.1, "releases"):
            self._at(20 + rng.below(60, "release"), release="main")
        if rng.chance(0.2, "ends early"):
            how: Any = rng.pick(["leave", "close", "cancel", "cancel", "raise"], "ending")
            self._at(8 + rng.below(50, "ends"), close=CloseStep(how=how))

    def _at(self, at_ms: int, **verb: Any) -> None:
        step = Step(at_ms=at_ms, **verb)
        if step.fire is None or not any(step.fire == other.fire for other in self.steps):
            self.steps.append(step)


def _from(tier: str, below: Below) -> list[str]:
    """Return the pipelines of a chain that start from a tier."""
    return [name for name, (source, _) in below.items() if source == tier]


# --- engines ----------------------------------------------------------------------------------------------------------


_TIERS: Final[Sequence[Below]] = (
    {"disk": ("host", "disk")},
    {"disk": ("host", "disk"), "far": ("disk", "far")},
)
_LAST: Final = 160
"""Latest start of a reader, in virtual milliseconds after the start."""
_LOOKUP_MS: Final = 12
"""Lookup timeout of a reader: shorter than a stalled tier takes."""


def generate_engine(seed: int) -> Scenario:
    """Return the random program of a seed, for an engine."""
    rng = Rng(seed)
    below = rng.pick(_TIERS, "engine")
    plain = Draft(rng, engine=below).scenario()
    main = msgspec.structs.replace(
        plain.pipeline["main"],
        chain=[],
        policies=[],
        route_share=rng.pick([0.25, 0.5, 1.0], "route_share"),
        route_ms=rng.pick([0, 4, 40], "route_patience"),
    )
    names = ["host", *below]
    tiers = _holding(rng, plain.tier, names)
    return msgspec.structs.replace(
        plain,
        name=f"engine, seed {seed}",
        engine=_engine(rng, names),
        tier=tiers,
        pipeline={"main": main},
        step=sorted([*map(_of_an_engine, plain.step), *_readers(rng, plain)], key=lambda step: step.at_ms),
        fault=[fault for fault in plain.fault if fault.do != "shut_down"] + list(_breaks(rng, names)),
    )


def _engine(rng: Rng, names: list[str]) -> EngineSpec:
    wait = rng.pick([4, 8, 24], "first wait")
    return EngineSpec(
        tiers=names,
        required=rng.chance(0.4, "required"),
        promote=rng.chance(0.6, "promote"),
        on_load_failure=rng.pick(["miss", "retry"], "on_load_failure"),
        max_faults=rng.pick([1, 2, 3, 3], "max_faults"),
        first_wait_ms=wait,
        longest_wait_ms=wait * rng.pick([1, 2], "longest wait"),
        call_ms=rng.pick([4, 20, 5_120], "call"),
        lookup_ms=_LOOKUP_MS,
        load_ms=rng.pick([24, 60, 5_120], "load time"),
    )


def _holding(rng: Rng, tiers: Mapping[str, TierSpec], names: Sequence[str]) -> dict[str, TierSpec]:
    """Spread the first tier's initial keys over some of the engine's tiers."""
    held = expand(tiers["host"].holds)
    # A third of the engines waits for all answers; in the others, tiers answer at once always, or more often than not.
    shares = rng.pick([[0.0], [0.8, 1.0], [1.0]], "at once")
    made = dict(tiers)
    for name in names:
        holds = compress(sample(rng, held, 0.6, "holds", name)[: tiers[name].capacity])
        at_once = rng.pick(shares, "at once", name)
        made[name] = msgspec.structs.replace(tiers[name], holds=holds, at_once=at_once)
    return made


def _of_an_engine(step: Step) -> Step:
    """Return a step that an engine supports in place of any step."""
    changed: dict[str, Any] = {}
    if step.store is not None and step.store.how != "wait":
        changed["store"] = msgspec.structs.replace(step.store, how="wait")
    elif step.close is not None and step.close.how == "close":
        changed["close"] = msgspec.structs.replace(step.close, how="leave")
    elif step.drain is not None:
        changed["drain"] = "host"
    elif step.release is not None:
        changed["release"] = "host"
    return msgspec.structs.replace(step, **changed) if changed else step


def _readers(rng: Rng, plain: Scenario) -> Iterator[Step]:
    """Yield readers of keys from several stores.

    They read while tiers break, and after the tiers have recovered.
    """
    read = [step.load.keys for step in plain.step if step.load is not None]
    for i in range(3 + rng.below(4, "readers")):
        where = ("reader", i)
        keys = dict.fromkeys([key for n in range(2) for key in expand(rng.pick(read, *where, n))])
        hold = rng.pick([0, 0, 6, 20], *where, "hold")
        gives_up = rng.pick([0, 0, 0, 0, 1, 2, 4, 8], *where, "gives up")
        load = LoadStep(id=f"x{i}", keys=compress([*keys]), hold_ms=hold, gives_up_ms=gives_up)
        yield Step(at_ms=rng.below(_LAST, *where, "at"), load=load)


def _breaks(rng: Rng, names: list[str]) -> Iterator[Fault]:
    """Yield faults of tiers that do not answer for a while."""
    for i in range(rng.below(4, "breaks")):
        where = ("break", i)
        yield Fault(
            do=rng.pick(["peer_death", "peer_death", "stall"], *where),
            tier=rng.pick(names, *where, "tier"),
            at_ms=rng.below(_LAST - 60, *where, "at"),
            for_ms=rng.pick([3, 10, 50], *where, "for"),
        )


# --- mixes ------------------------------------------------------------------------------------------------------------


Mix: TypeAlias = Literal["standard", "engine"]

MIXES: Final[Mapping[Mix, Callable[[int], Scenario]]] = {"standard": generate, "engine": generate_engine}
"""Generator of each mix."""
