"""A scenario as a value: tiers, pipelines, a load, faults on a timeline or at a hook, and what must hold. Pure.

The same classes are what a ``*.scenario.toml`` file is read into, what its JSON schema is made from, and what a program in
Python builds. What is checked here is a single value at a time; what only makes sense together (a name that is used but
not defined) is checked by `checking`.

Rule 1. A virtual millisecond is 1/1024 s, exact in floats as are its multiples: what falls together, falls together. All
        times of a scenario, timeouts included, are whole numbers of them.
Rule 2. Names of containers, keys and so on are written as a list with ranges: ``"a{0..3}, b"`` is a0, a1, a2, a3 and b.
Rule 3. A default is what a reader would expect without looking: nothing is there, nothing goes wrong, nobody is slow.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct, field

TICK: Final = 1 / 1024
"""A virtual millisecond, in seconds of the virtual clock."""

Ms: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40, description="virtual milliseconds, of 1/1024 s each")]
Names: TypeAlias = Annotated[str, Meta(description="names with ranges: 'a{0..3}, b' is a0, a1, a2, a3, b")]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0, description="a probability")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 32)]


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
    holds: Names = ""
    """Keys that are there when the run begins."""
    checksums: bool = True
    eviction: Literal["lru", "adaptive"] = "lru"
    """Who makes room: the least recently used, or whom the default of the real tiers chooses, ``AdaptiveLRFU``."""
    patience_ms: Annotated[int, Meta(ge=1, le=60_000, description="milliseconds of the wall")] = 500
    """How long the client of a page store waits for an answer of its server."""
    lease_ms: Annotated[int, Meta(ge=50, le=60_000, description="milliseconds of the wall")] = 2_000
    """For how long it may be silent before the server takes back what it holds."""


class PolicySpec(Part, frozen=True, kw_only=True):
    """One policy of a pipeline. Those of a list are asked in turn, until one has rejected everything."""

    do: Literal["reject", "present", "sleep", "raise", "lock", "cancel", "hang"]
    """reject: filters ``keys``. present: filters what ``tier`` has. sleep: passes, after ``ms``. raise: raises. lock: takes
    a lock that the container holds. cancel: asks for the cancel of ``who``, and passes. hang: never answers."""
    keys: Names = ""
    """Which keys it is about: ``reject`` filters only these; the others act where a container has one of these. Empty: all."""
    reason: str = "no"
    """What ``reject`` filters for."""
    tier: str = ""
    """Which one ``present`` looks into; empty: the destination of the pipeline."""
    who: Names = ""
    ms: Ms = 0
    """How long it waits before it answers; 0: it answers at once (but for ``sleep`` and ``hang``)."""
    p: Share = 1.0
    """How likely it acts, drawn for each container."""


WhenFull: TypeAlias = Literal["wait", "evict", "partial", "fail"]


class PipelineSpec(Part, frozen=True, kw_only=True):
    """A pipeline between two tiers. Its knobs are those of ``PipelineConfig``, with their times in ``_ms``."""

    source: str = field(default="device", name="from")
    to: str
    policies: list[PolicySpec] = []
    chain: list[str] = []
    """The pipelines that take on what this one has stored; they start from its destination."""
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
    drain_ms: Ms | None = None
    budget_blocks: Count | None = None
    on_overflow: Literal["wait", "drop"] | None = None


class EngineSpec(Part, frozen=True, kw_only=True):
    """Several tiers behind one engine: it stores into the first, feeds each from the one before, and reads from all."""

    tiers: list[str]
    """From the fastest to the slowest. Pipelines lead from ``device`` to the first and from each to the next; they are called
    after where they lead, and ``[pipeline.NAME]``, if there is one, has the knobs of all."""
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


# --- what is done -------------------------------------------------------------------------------------------------


class After(Part, frozen=True, kw_only=True):
    """What must hold before the bytes of a container may be read. The one it is told of first wins: ``event`` or ``ms``."""

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

    id: Names
    keys: Names = ""
    """Their keys, dealt out in order; empty: ``per`` keys of each container's own, ``<id>.0``, ``<id>.1``, ..."""
    per: Count = 1
    """Blocks in each container."""
    kind: Literal["weak", "strong", "external"] = "weak"
    """weak: its blocks may be evicted meanwhile. strong: it holds them. external: the engine itself keeps them alive."""
    pipeline: str = ""
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

    id: str = ""
    keys: Names
    tier: str = ""
    """From which; empty: from the destination of the first pipeline."""
    hold_ms: Ms = 0
    """For how long what was found is held then, and read once more: nobody may have taken it away, or written over it."""


class KeysStep(Part, frozen=True, kw_only=True):
    """Keys of a tier, for a step that evicts or deletes them."""

    tier: str = ""
    """Empty: the source of the first pipeline for ``evict``, its destination for ``delete``."""
    keys: Names
    again: bool = False
    """Put them back at once, as a block that is recomputed under the same key is. (For ``evict``.)"""


class CloseStep(Part, frozen=True, kw_only=True):
    """The end of the system, while it may have work."""

    how: Literal["leave", "close", "cancel", "raise"] = "close"
    """leave the block; ``close_now``; cancel the scope around it; raise in it."""


class Step(Part, frozen=True, kw_only=True):
    """One thing a user does, at a time. Exactly one of the verbs is there."""

    at_ms: Ms = 0
    store: StoreStep | None = None
    load: LoadStep | None = None
    fire: str | None = None
    """Set an event that containers are stored ``after``."""
    evict: KeysStep | None = None
    """Take keys out of a source, as an engine does that needs the room."""
    delete: KeysStep | None = None
    drain: str | None = None
    """Wait until a pipeline has nothing left."""
    release: str | None = None
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
    "peer_death", "clock",
]  # fmt: skip


class Fault(Part, frozen=True, kw_only=True):
    """Something that goes wrong, at a time or at a hook.

    What each kind does::

        | do | what happens | on |
        |---|---|---|
        | cancel | the container's cancel is asked for, and its confirmation awaited | ``who``, ``times`` |
        | abandon | who waits in ``store`` for room gives up | ``who`` |
        | cancel_waiter | who waits for the result, or for the confirmation of a cancel, gives up | ``who`` |
        | cancel_host | the scope around the whole system is cancelled | |
        | shut_down | ``close_now`` | |
        | evict | keys leave a source | ``tier``, ``keys`` |
        | unproven | copies end without anybody knowing how, and an engine's loads | ``tier``, ``for_ms``, ``grouped`` |
        | fail | copies raise; with ``keys``: these blocks fail, and only these | ``tier``, ``keys``, ``for_ms``, ``grouped`` |
        | stall | copies that begin wait until it is over | ``tier``, ``for_ms`` |
        | drop | the end of a copy is never announced | ``tier``, ``for_ms``, ``grouped`` |
        | delay | copies take ``ms`` more | ``tier``, ``ms``, ``for_ms`` |
        | duplicate | the end of a copy is announced twice | ``tier``, ``for_ms`` |
        | miscount | copies answer for ``by`` blocks too many, or, negative, too few | ``tier``, ``by``, ``for_ms`` |
        | reorder | copies end in another order than they began in | ``tier``, ``for_ms`` |
        | torn | half of a block is written, then the copy raises | ``tier``, ``keys``, ``for_ms``, ``grouped`` |
        | flip | a bit of a stored block is flipped | ``tier``, ``keys`` |
        | full | nobody is granted room | ``tier``, ``for_ms`` |
        | peer_death | whatever is asked of the tier raises | ``tier``, ``for_ms`` |
        | clock | the clock jumps ahead by ``ms``: whatever was due in between is due together | ``ms`` |
    """

    do: FaultKind
    at_ms: Ms | None = None
    """When. Exactly one of this and ``at_hook`` is there."""
    at_hook: str = ""
    """At which hook."""
    of: Names = ""
    """Only visits about one of these containers count; empty: those about ``who``, or, without, all."""
    visit: Annotated[int, Meta(ge=1)] = 1
    """At which of those visits."""
    who: Names = ""
    """The containers it hits; empty: those whom the hook is about."""
    times: Annotated[int, Meta(ge=1, le=65_536)] = 1
    """How often each of them is hit, one time after the other: so many ask for its cancel."""
    tier: str = ""
    """Empty: the destination of the first pipeline (``evict``: its source)."""
    keys: Names = ""
    """Empty: all, or, at a hook, those of the containers it is about."""
    ms: Ms = 1
    """How much, for ``delay`` and ``clock``."""
    for_ms: Ms = 1
    """For how long, for what has a duration."""
    by: Annotated[int, Meta(ge=-65_536, le=65_536)] = 1
    """How many answers too many, or, negative, too few."""
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

    event: str
    """``"a0 settled"``"""
    since: str = ""
    """Another event; empty: the start."""
    at_least_ms: Ms = 0
    at_most_ms: Ms | None = None


class Expect(Part, frozen=True, kw_only=True):
    """What must hold when everything is over, beyond the invariants. Everything in one table must."""

    status: dict[str, Literal["COMPLETE", "CANCELLED", "FAILED", "REFUSED", "ABANDONED"]] | None = None
    """By container. REFUSED: the system did not take it in; ABANDONED: who stored it gave up before."""
    result: dict[str, Counts] | None = None
    """By container."""
    count: dict[str, Count] | None = None
    """Exactly: ``copied`` blocks, ``batches``, ``loaded`` and ``missed`` blocks, ``fired`` faults, visits of a hook."""
    at_most: dict[str, Count] | None = None
    at_least: dict[str, Count] | None = None
    order: list[str] | None = None
    """Events that must happen in this order; others may happen in between: ``["a2 confirmed", "a0 settled"]``."""
    time: list[Window] | None = None
    found: dict[str, Names] | None = None
    """Keys that a tier must have at the end."""
    missing: dict[str, Names] | None = None
    """Keys that it must not have."""
    metric: dict[str, dict[str, int | float]] | None = None
    """Figures of ``statistics()``, by pipeline."""
    never: list[str] | None = None
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
    tier: dict[str, TierSpec] = {}
    """Tiers by name. ``device`` and ``host`` are there without being named."""
    pipeline: dict[str, PipelineSpec] = {}
    """Pipelines by name; without any: ``main``, from ``device`` to ``host``."""
    engine: EngineSpec | None = None
    """What stores and loads, where it is more than pipelines."""
    load: Load | None = None
    step: list[Step] = []
    fault: list[Fault] = []
    expect: list[Expect] = []


VERBS: Final = ("store", "load", "fire", "evict", "delete", "drain", "release", "close")
"""The verbs of a step."""
