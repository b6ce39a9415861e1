"""A scenario as a value: tiers, pipelines, a load, faults on a timeline or at a hook, and what must hold. Pure.

The same classes are what a ``*.scenario.toml`` file is read into, and what a program in Python builds. They are the table from
which the rest comes: the JSON schema, the documentation of the fields, the defaults, the checks and the way a program is
shrunk. The type of a field says what may be in it and, as its *role*, what its names are names of; :data:`KINDS` says what each
kind of policy and of fault does, and which fields it looks at.

Rule 1. A virtual millisecond is 1/1024 s, exact in floats as are its multiples: what falls together, falls together. All
        times of a scenario, timeouts included, are whole numbers of them.
Rule 2. Names of containers, keys and so on are written as a list with ranges: ``"a{0..3}, b"`` is a0, a1, a2, a3 and b.
Rule 3. A default is what a reader would expect without looking: nothing is there, nothing goes wrong, nobody is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import attrs
from msgspec import Meta, Struct, field

from offload._errors import OffloadError

TICK: Final = 1 / 1024
"""A virtual millisecond, in seconds of the virtual clock."""

Ms: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40, description="virtual milliseconds, of 1/1024 s each")]
At: TypeAlias = Annotated[Ms, Meta(extra={"role": "time"})]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0, description="a probability")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 32)]

# One name, of something that is there.
Tier: TypeAlias = Annotated[str, Meta(extra={"role": "tier"})]
Pipeline: TypeAlias = Annotated[str, Meta(extra={"role": "pipeline"})]
Container: TypeAlias = Annotated[str, Meta(extra={"role": "container"})]
Hook: TypeAlias = Annotated[str, Meta(extra={"role": "hook"})]
Event: TypeAlias = Annotated[str, Meta(extra={"role": "event"})]
Counted: TypeAlias = Annotated[str, Meta(extra={"role": "counted"})]

# One name that is defined here.
NewName: TypeAlias = Annotated[str, Meta(extra={"role": "new name"})]

# Lists of names.
Names: TypeAlias = Annotated[str, Meta(description="names with ranges: 'a{0..3}, b' is a0, a1, a2, a3, b")]
NewContainers: TypeAlias = Annotated[Names, Meta(extra={"role": "new containers"})]
NewLoad: TypeAlias = Annotated[str, Meta(extra={"role": "new containers"})]
Containers: TypeAlias = Annotated[Names, Meta(extra={"role": "containers"})]
Keys: TypeAlias = Annotated[Names, Meta(extra={"role": "keys"})]
DealtKeys: TypeAlias = Annotated[Names, Meta(extra={"role": "dealt keys"})]
"""Keys that several containers may have."""
SomeKeys: TypeAlias = Annotated[Names, Meta(extra={"role": "some keys"})]
"""Keys that may be there twice: which ones something is about."""


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a scenario; that it is frozen is said again below, since type checkers do not inherit it."""


# --- where blocks live, and who moves them ------------------------------------------------------------------------


class TierSpec(Part, frozen=True, kw_only=True):
    """A place for blocks, with modelled speed."""

    kind: Literal["memory", "file", "maru"] = "memory"
    """What it is made of with ``--real``; in virtual time every tier is host memory whose copies take modelled time, and one of
    kind ``maru``, a page store with a server of its own, is not played."""
    capacity: Annotated[int, Meta(ge=1, le=1 << 24, description="blocks")] = 64
    block_bytes: Annotated[int, Meta(ge=16, le=1 << 26)] = 64
    latency_ms: Ms = 0
    """What each copy takes at least."""
    bytes_per_ms: Annotated[int, Meta(ge=0, description="0: bytes take no time")] = 0
    holds: Keys = ""
    """Keys that are there when the run begins."""
    checksums: bool = True
    eviction: Literal["lru", "adaptive"] = "lru"
    """Who makes room: the least recently used, or whom the default of the real tiers chooses, ``AdaptiveLRFU``."""
    at_once: Share = 1.0
    """Behind an engine: how likely it answers a question without being waited for, where nothing keeps it from that."""
    patience_ms: Annotated[int, Meta(ge=1, le=60_000, description="milliseconds of the wall")] = 500
    """How long the client of a page store waits for an answer of its server."""
    lease_ms: Annotated[int, Meta(ge=50, le=60_000, description="milliseconds of the wall")] = 2_000
    """For how long it may be silent before the server takes back what it holds."""


PolicyKind: TypeAlias = Literal["reject", "present", "sleep", "raise", "lock", "cancel", "hang"]


class PolicySpec(Part, frozen=True, kw_only=True):
    """One policy of a pipeline. Those of a list are asked in turn, until one has rejected everything."""

    do: PolicyKind
    keys: SomeKeys = ""
    """Which keys it is about: ``reject`` filters only these; the others act where a container has one of these. Empty: all."""
    reason: str = "no"
    """What ``reject`` filters for."""
    tier: Tier = ""
    """Which one ``present`` looks into; empty: the destination of the pipeline."""
    who: Containers = ""
    ms: Ms = 0
    """How long it waits before it answers; 0: it answers at once (but for ``sleep`` and ``hang``)."""
    p: Share = 1.0
    """How likely it acts, drawn for each container."""
    at_once: Share = 0.0
    """How likely one that waits can tell without waiting after all, drawn for each container."""


WhenFull: TypeAlias = Literal["wait", "evict", "partial", "fail"]


class PipelineSpec(Part, frozen=True, kw_only=True):
    """A pipeline between two tiers. Its knobs are those of ``PipelineConfig``, with their times in ``_ms``."""

    source: Tier = field(default="device", name="from")
    to: Tier
    policies: list[PolicySpec] = []
    chain: list[str] = []
    """The pipelines that take on what this one has stored; they start from its destination."""
    optional_chain: list[str] = []
    """The same, for pipelines that nothing waits for: what they have no room for in time, they drop."""
    max_batch_size: Count | None = None
    min_batch_size: Count | None = None
    flush_ms: Ms | None = None
    policy_ms: Ms | None = None
    on_policy_error: Literal["filter", "fail"] | None = None
    max_waiting_policies: Count | None = None
    precondition_ms: Ms | None = None
    sweep_ms: Ms | None = None
    max_concurrent_transfers: Count | None = None
    on_destination_full: WhenFull | None = None
    destination_ms: Ms | None = None
    transfer_ms: Ms | None = None
    transfer_bytes_per_second: Count | None = None
    drain_ms: Ms | None = None
    budget_blocks: Count | None = None
    on_overflow: Literal["wait", "drop"] | None = None
    route_share: Annotated[float, Meta(ge=0.001, le=1.0)] | None = None
    route_ms: Ms | None = None


class EngineSpec(Part, frozen=True, kw_only=True):
    """Several tiers behind one engine: it stores into the first, feeds each from the one before, and reads from all."""

    tiers: list[str]
    """From the fastest to the slowest. Pipelines lead from ``device`` to the first and from each to the next; they are called
    after where they lead, and ``[pipeline.NAME]``, if there is one, has the knobs of all."""
    required: bool = False
    """Whether a store waits for all tiers, and fails where one of them fails."""
    promote: bool = False
    """Whether a load also writes what comes from slower tiers into the faster ones."""
    on_load_failure: Literal["miss", "retry"] = "miss"
    """What a load does about a block that was found and cannot be loaded: it is missed, or looked for in slower tiers."""
    max_faults: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """So many in a row break a tier: then it is not asked for a while."""
    first_wait_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 1024
    """For how long, at first; it doubles with each probe in vain."""
    longest_wait_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 30 * 1024
    """What it doubles up to."""
    call_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 5 * 1024
    """How long a tier may take to answer a question before that is a fault."""
    lookup_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 5 * 1024
    """How long a reader waits for each tier's part of a lookup, if that is less."""
    load_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 60 * 1024
    """The same for a load."""
    recompute_ms: Annotated[float, Meta(ge=0.0, le=1 << 20, description="virtual milliseconds, or a part of one")] = 0.0
    """What computing a block takes, for ``load_or_recompute``: what is loaded later than that is left to be computed, and may
    be missed. 0: everything that is found is loaded."""


# --- what is done -------------------------------------------------------------------------------------------------


class After(Part, frozen=True, kw_only=True):
    """A precondition: an event or a time, whichever comes first."""

    event: str = ""
    """A step ``fire`` of this name."""
    ms: Ms | None = None
    """So long after the store. Neither this nor ``event``: holds already for ``fire``, at once for ``raise``."""
    do: Literal["fire", "raise", "never"] = "fire"
    """fire: it holds then. raise: it is known then that it never will. never: nobody ever knows."""
    made_of: Literal["trio", "thread", "async", "stubborn"] = field(default="trio", name="as")
    """An event of trio or of a thread, or an async callable; a stubborn one takes 2 ms to unwind when it is cancelled."""


class StoreStep(Part, frozen=True, kw_only=True):
    """Containers to be stored: one for each name in ``id``."""

    id: NewContainers
    keys: DealtKeys = ""
    """Their keys, dealt out in order; empty: ``per`` keys of each container's own, ``<id>.0``, ``<id>.1``, ..."""
    per: Count = 1
    """Blocks in each container."""
    kind: Literal["weak", "strong", "external"] = "weak"
    """weak: its blocks may be evicted meanwhile. strong: it holds them. external: the engine itself keeps them alive."""
    pipeline: Pipeline = ""
    """Which one stores it; empty: the first."""
    how: Literal["wait", "now", "many"] = "wait"
    """wait: for room in the budget, one container after the other. now: refused where there is none. many: all containers
    in one call, which takes in all of them or none."""
    after: list[After] = []
    """All of these must hold; with ``any_of``, one."""
    any_of: bool = False
    """Whether one of ``after`` is enough."""


class LoadStep(Part, frozen=True, kw_only=True):
    """Keys to be loaded. What comes is compared with the payload of the key."""

    id: NewLoad = ""
    keys: Keys
    tier: Tier = ""
    """From which; empty: from the destination of the first pipeline."""
    hold_ms: Ms = 0
    """For how long what was found is held then, and read once more: nobody may have taken it away, or written over it."""
    gives_up_ms: Ms = 0
    """So long after it has begun the reader is cancelled, wherever it is, if it is not over; 0: it is not."""


class KeysStep(Part, frozen=True, kw_only=True):
    """Keys of a tier, for a step that evicts or deletes them."""

    tier: Tier = ""
    """Empty: the source of the first pipeline for ``evict``, its destination for ``delete``."""
    keys: Keys
    again: bool = False
    """Put them back at once, as a block that is recomputed under the same key is. (For ``evict``.)"""


class CloseStep(Part, frozen=True, kw_only=True):
    """The end of the system, while it may have work."""

    how: Literal["leave", "close", "cancel", "raise"] = "close"
    """leave the block; ``close_now``; cancel the scope around it; raise in it."""


class Step(Part, frozen=True, kw_only=True):
    """One thing a user does, at a time. Exactly one of the verbs is there."""

    at_ms: At = 0
    store: StoreStep | None = None
    load: LoadStep | None = None
    fire: NewName | None = None
    """Set an event that containers are stored ``after``."""
    evict: KeysStep | None = None
    """Take keys out of a source, as an engine does that needs the room."""
    delete: KeysStep | None = None
    drain: Pipeline | None = None
    """Wait until a pipeline has nothing left."""
    release: Pipeline | None = None
    """Release everything that a pipeline has in quarantine, as an operator would."""
    close: CloseStep | None = None


class Mix(Part, frozen=True, kw_only=True):
    """A load that is generated from the seed."""

    containers: Annotated[int, Meta(ge=1, le=1 << 20)] = 16
    """How many: ``m0``, ``m1``, ..."""
    over_ms: Ms = 24
    """Stores fall into this time."""
    keys: Annotated[int, Meta(ge=1, le=1 << 24)] = 24
    """How many keys there are to choose from: ``k0``, ``k1``, ..."""
    most: Annotated[int, Meta(ge=1, le=65_536)] = 6
    """Blocks in a container: 0 to this."""
    kinds: list[Literal["weak", "strong", "external"]] = []
    """Drawn from these, each as often as it is named; empty: two weak ones for each strong one."""
    loads: Share = 0.2
    """How likely a container is loaded again, some time after it was stored."""
    cancels: Share = 0.0
    """How likely it is cancelled, while it is on its way."""


class TraceLoad(Part, frozen=True, kw_only=True):
    """A load from a request trace: each request stores the blocks that are not there, and loads those that are."""

    path: str
    """A Mooncake trace (JSON lines, also compressed with gzip), relative to the scenario's file."""
    limit: Annotated[int, Meta(ge=1, le=1 << 24)] = 100
    """Requests."""
    skip: Count = 0
    speed: Annotated[float, Meta(gt=0.0, description="2: twice as fast as it was recorded")] = 1.0


class Load(Part, frozen=True, kw_only=True):
    """Work that is generated instead of written down step by step."""

    mix: Mix | None = None
    trace: TraceLoad | None = None


# --- what goes wrong ----------------------------------------------------------------------------------------------

FaultKind: TypeAlias = Literal[
    "cancel", "abandon", "cancel_waiter", "cancel_host", "shut_down",
    "evict", "unproven", "fail", "stall", "drop", "delay", "duplicate", "miscount", "reorder", "torn", "flip", "full",
    "peer_death", "slow_loads", "clock",
]  # fmt: skip


class Fault(Part, frozen=True, kw_only=True):
    """Something that goes wrong, at a time or at a hook."""

    do: FaultKind
    at_ms: At | None = None
    """When. Exactly one of this and ``at_hook`` is there."""
    at_hook: Hook = ""
    """At which hook."""
    of: Containers = ""
    """Only visits about one of these containers count; empty: those about ``who``, or, without, all."""
    visit: Annotated[int, Meta(ge=1)] = 1
    """At which of those visits."""
    who: Containers = ""
    """The containers it hits; empty: those whom the hook is about."""
    times: Annotated[int, Meta(ge=1, le=65_536)] = 1
    """How often each of them is hit, one time after the other: so many ask for its cancel."""
    tier: Tier = ""
    """Empty: the destination of the first pipeline (``evict``: its source)."""
    keys: Keys = ""
    """Empty: all, or, at a hook, those of the containers it is about."""
    ms: Ms = 1
    """How much, for ``delay``, ``slow_loads`` and ``clock``."""
    for_ms: Ms = 1
    """For how long, for what has a duration."""
    by: Annotated[int, Meta(ge=-65_536, le=65_536)] = 1
    """How many answers too many, or, negative, too few."""
    again: bool = False
    """Whether the keys are put back at once, in the places that are free then, as blocks that are computed again are."""
    grouped: bool = False
    """Whether what a copy raises comes in an exception group, as from one that copies in a nursery; of ``drop``, when left."""
    p: Share = 1.0
    """How likely it happens at all, drawn from the seed."""


# --- what must hold -----------------------------------------------------------------------------------------------


class Counts(Part, frozen=True, kw_only=True):
    """How many blocks of a container ended how; what is not said is not looked at."""

    completed: Count | None = None
    filtered: Count | None = None
    failed: Count | None = None
    evicted: Count | None = None
    error: str | None = None
    """Name of the exception's class; empty: none."""
    reasons: list[str] | None = None
    """Why blocks were filtered: all reasons that occur."""


class Window(Part, frozen=True, kw_only=True):
    """When an event must happen: in virtual milliseconds since the start, or since another event."""

    event: Event
    """``"a0 settled"``"""
    since: Event = ""
    """Another event; empty: the start."""
    at_least_ms: Ms = 0
    at_most_ms: Ms | None = None


class Expect(Part, frozen=True, kw_only=True):
    """Expectations of a run, beyond the invariants. Everything in one table must hold."""

    status: dict[Container, Literal["COMPLETE", "CANCELLED", "FAILED", "REFUSED", "ABANDONED"]] | None = None
    """By container. REFUSED: the system did not take it in; ABANDONED: who stored it gave up before."""
    result: dict[Container, Counts] | None = None
    """By container."""
    count: dict[Counted, Count] | None = None
    """Exactly: ``copied`` blocks, ``batches``, ``loaded`` and ``missed`` blocks, ``fired`` faults, visits of a hook."""
    at_most: dict[Counted, Count] | None = None
    at_least: dict[Counted, Count] | None = None
    order: list[Event] | None = None
    """Events that must happen in this order; others may happen in between: ``["a2 confirmed", "a0 settled"]``."""
    time: list[Window] | None = None
    found: dict[Tier, SomeKeys] | None = None
    """Keys that a tier must have at the end."""
    missing: dict[Tier, SomeKeys] | None = None
    """Keys that it must not have."""
    metric: dict[Pipeline, dict[str, int | float]] | None = None
    """Figures of ``statistics()``, by pipeline."""
    never: list[Event] | None = None
    """Events that must not happen: ``"a0 post_claim"``."""


# --- all of it ----------------------------------------------------------------------------------------------------


class Scenario(Part, frozen=True, kw_only=True):
    """A program that can be run again: load, faults, and what must hold."""

    format: Literal[1] = 1
    name: str
    about: str = ""
    """What it shows, for a reader."""
    upstream: list[str] = []
    """Issues elsewhere that it tells again: ``"vLLM #43226"``."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    not_for_real: str = ""
    """Why it cannot hold on the clock of the wall. Then ``--real`` does not play it, and answers this."""
    limit_ms: Ms = 3_600 * 1024
    """What is not over by then, virtual time, is a lost wake-up."""
    tier: dict[NewName, TierSpec] = {}
    """Tiers by name. ``device`` and ``host`` are there without being named."""
    pipeline: dict[NewName, PipelineSpec] = {}
    """Pipelines by name; without any: ``main``, from ``device`` to ``host``."""
    engine: EngineSpec | None = None
    """What stores and loads, where it is more than pipelines."""
    load: Load | None = None
    step: list[Step] = []
    fault: list[Fault] = []
    expect: list[Expect] = []


VERBS: Final = ("store", "load", "fire", "evict", "delete", "drain", "release", "close")
"""The verbs of a step."""


# --- what each kind does ------------------------------------------------------------------------------------------

Seam: TypeAlias = Literal[
    "hook", "reserve", "copy", "policy", "after", "store_many", "close_now", "evict", "delete", "drain", "found", "hold"
]
"""A way in which a system under test asks the world for something, or can be asked: see `_systems`."""


@attrs.frozen
class Kind:
    """A kind of fault or of policy."""

    text: str
    """What it does."""
    looks_at: tuple[str, ...] = ()
    """The fields that it looks at, besides when and how likely."""
    needs: tuple[Seam, ...] = ()
    """The seams that a system must have."""
    page_store: bool = True
    """Whether it can be done to a page store, if it is done to a tier at all."""


_COPY: Final[tuple[Seam, ...]] = ("copy",)

FAULT_KINDS: Final[Mapping[FaultKind, Kind]] = {
    "cancel": Kind("the container's cancel is asked for, and its confirmation awaited", ("who", "times")),
    "abandon": Kind("who waits in ``store`` for room gives up", ("who",)),
    "cancel_waiter": Kind("who waits for the result, or for the confirmation of a cancel, gives up", ("who",)),
    "cancel_host": Kind("the scope around the whole system is cancelled"),
    "shut_down": Kind("``close_now``", (), ("close_now",)),
    "evict": Kind("keys leave a source", ("tier", "keys", "again"), ("evict",)),
    "unproven": Kind(
        "copies end without anybody knowing how, and an engine's loads", ("tier", "for_ms", "grouped"), _COPY, False
    ),
    "fail": Kind(
        "copies raise; with ``keys``: these blocks fail, and only these", ("tier", "keys", "for_ms", "grouped"), _COPY
    ),
    "stall": Kind("copies that begin wait until it is over", ("tier", "for_ms"), _COPY),
    "drop": Kind("the end of a copy is never announced", ("tier", "for_ms", "grouped"), _COPY),
    "delay": Kind("copies take ``ms`` more", ("tier", "ms", "for_ms"), _COPY),
    "duplicate": Kind("the end of a copy is announced twice", ("tier", "for_ms"), _COPY),
    "miscount": Kind(
        "copies answer for ``by`` blocks too many, or, negative, too few", ("tier", "by", "for_ms"), _COPY, False
    ),
    "reorder": Kind("copies end in another order than they began in", ("tier", "for_ms"), _COPY, False),
    "torn": Kind(
        "half of a block is written, then the copy raises", ("tier", "keys", "for_ms", "grouped"), _COPY, False
    ),
    "flip": Kind("a bit of a stored block is flipped", ("tier", "keys"), _COPY),
    "full": Kind("nobody is granted room", ("tier", "for_ms"), ("reserve",)),
    "peer_death": Kind("whatever is asked of the tier raises", ("tier", "for_ms"), _COPY),
    "slow_loads": Kind(
        "loads that begin take ``ms`` more, in virtual time; one that is cancelled meanwhile is over at once",
        ("tier", "ms", "for_ms"),
        _COPY,
        False,
    ),
    "clock": Kind("the clock jumps ahead by ``ms``: whatever was due in between is due together", ("ms",)),
}

POLICY_KINDS: Final[Mapping[PolicyKind, Kind]] = {
    "reject": Kind("filters ``keys``", ("keys", "reason", "ms", "at_once")),
    "present": Kind("filters what ``tier`` has", ("keys", "tier", "ms", "at_once")),
    "sleep": Kind("passes, after ``ms``", ("keys", "ms", "at_once")),
    "raise": Kind("raises", ("keys", "ms", "at_once")),
    "lock": Kind("takes a lock that the container holds", ("keys", "ms", "at_once")),
    "cancel": Kind("asks for the cancel of ``who``, and passes", ("keys", "who", "ms", "at_once")),
    "hang": Kind("never answers", ("keys",)),
}

KINDS: Final[Mapping[type[Part], Mapping[Any, Kind]]] = {Fault: FAULT_KINDS, PolicySpec: POLICY_KINDS}
"""Of the parts with a field ``do``: what each of its words means."""


# --- why a scenario cannot be played ------------------------------------------------------------------------------


@attrs.frozen
class Problem:
    """Something in a scenario that makes no sense."""

    path: str
    """Where: ``fault[2].who``, positions counted from 0."""
    text: str
    """What is wrong, and what to say instead."""


class ScenarioError(OffloadError, ValueError):
    """A scenario cannot be played: it is no such file, or it makes no sense. The text says where, what, and the way out."""

    def __init__(self, file: str, line: int | None, path: str, text: str, others: Iterable[str] = ()) -> None:
        place = f"{file}:{line}" if line is not None else file
        super().__init__(": ".join([part for part in (place, path, text) if part]))
        self.file = file
        """Its name; empty for one that was made in Python."""
        self.line = line
        """From 1; ``None`` where there is none."""
        self.path = path
        """Where in the scenario: ``fault[2].who``."""
        self.text = text
        """What is wrong, and the way out."""
        self.others: tuple[str, ...] = tuple(others)
        """What else is wrong, a line each."""
