"""Scenario as a value: tiers, pipelines, load, faults, and expectations. Pure.

A ``*.scenario.toml`` file is read into these classes, and a program in Python builds them. They are the table from
which the rest is derived: the JSON schema, the documentation of the fields, the defaults, the checks and the shrinking
of a program. The type of a field constrains its values and, as its *role*, the kind of thing that its names refer to;
:data:`KINDS` describes the effect of each kind of policy and of fault, and the fields it reads.

Rule 1. A virtual millisecond is 1/1024 s, exact in floats as are its multiples: equal times stay equal. All times of a
        scenario, timeouts included, are whole numbers of them.
Rule 2. Names of containers, keys and so on are written as a list with ranges: ``"a{0..3}, b"`` is a0, a1, a2, a3 and b.
Rule 3. A default is the value a reader would assume without looking: nothing is stored, nothing fails, nobody is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import attrs
from msgspec import Meta, Struct, field

from offload._errors import OffloadError

TICK: Final = 1 / 1024
"""Duration of a virtual millisecond, in seconds of the virtual clock."""

Ms: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40, description="virtual milliseconds, of 1/1024 s each")]
At: TypeAlias = Annotated[Ms, Meta(extra={"role": "time"})]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0, description="a probability")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 32)]

# One name, of something that exists.
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
"""Keys that several containers may share."""
SomeKeys: TypeAlias = Annotated[Names, Meta(extra={"role": "some keys"})]
"""Keys that select blocks; repetitions are allowed."""


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a scenario.

    Each subclass repeats ``frozen=True``, since type checkers do not inherit it.
    """


# --- places of blocks, and pipelines between them -----------------------------------------------------------------


class TierSpec(Part, frozen=True, kw_only=True):
    """A place for blocks, with modelled speed."""

    kind: Literal["memory", "file", "maru"] = "memory"
    """Backend with ``--real``.

    In virtual time every tier is host memory whose copies take modelled time, and a tier of kind ``maru``, a page store
    with a server of its own, cannot be played.
    """
    capacity: Annotated[int, Meta(ge=1, le=1 << 24, description="blocks")] = 64
    block_bytes: Annotated[int, Meta(ge=16, le=1 << 26)] = 64
    latency_ms: Ms = 0
    """Minimum duration of each copy."""
    bytes_per_ms: Annotated[int, Meta(ge=0, description="0: bytes take no time")] = 0
    holds: Keys = ""
    """Keys present when the run begins."""
    checksums: bool = True
    eviction: Literal["lru", "adaptive"] = "lru"
    """Eviction policy.

    lru: the least recently used block. adaptive: ``AdaptiveLRFU``, the default of the real tiers.
    """
    at_once: Share = 1.0
    """Behind an engine: probability of an answer without a wait.

    It applies if nothing prevents an immediate answer.
    """
    patience_ms: Annotated[int, Meta(ge=1, le=60_000, description="milliseconds of the wall")] = 500
    """How long a page store's client waits for its server's answer."""
    lease_ms: Annotated[int, Meta(ge=50, le=60_000, description="milliseconds of the wall")] = 2_000
    """How long the client may be silent before its holdings are reclaimed.

    The server reclaims them.
    """


PolicyKind: TypeAlias = Literal["reject", "present", "sleep", "raise", "lock", "cancel", "hang"]


class PolicySpec(Part, frozen=True, kw_only=True):
    """One policy of a pipeline.

    The policies of a list are asked in turn, until one has rejected everything.
    """

    do: PolicyKind
    keys: SomeKeys = ""
    """Keys that the policy is about; empty: all.

    ``reject`` filters only these; the others act if a container has one of these.
    """
    reason: str = "no"
    """Reason that ``reject`` gives."""
    tier: Tier = ""
    """Tier that ``present`` looks into; empty: the destination of the pipeline."""
    who: Containers = ""
    ms: Ms = 0
    """Delay before the answer; 0: none (except for ``sleep`` and ``hang``)."""
    p: Share = 1.0
    """Probability that the policy acts, drawn for each container."""
    at_once: Share = 0.0
    """Probability that a waiting policy answers at once, drawn for each container."""


WhenFull: TypeAlias = Literal["wait", "evict", "partial", "fail"]


class PipelineSpec(Part, frozen=True, kw_only=True):
    """A pipeline between two tiers.

    Its knobs are those of ``PipelineConfig``, with their times in ``_ms``.
    """

    source: Tier = field(default="device", name="from")
    to: Tier
    policies: list[PolicySpec] = []
    chain: list[str] = []
    """Required pipelines that continue with this one's stored blocks.

    They start from its destination.
    """
    optional_chain: list[str] = []
    """Optional pipelines that continue with this one's stored blocks.

    Nothing waits for them: blocks for which they have no room in time are dropped.
    """
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
    """Several tiers behind one engine.

    The engine stores into the first, feeds each from the one before, and reads from all.
    """

    tiers: list[str]
    """Tiers from the fastest to the slowest.

    Pipelines lead from ``device`` to the first and from each to the next; each is named after its destination, and
    ``[pipeline.NAME]``, if there is one, has the knobs of all.
    """
    required: bool = False
    """Whether a store waits for all tiers, and fails with any."""
    promote: bool = False
    """Whether a load also copies blocks from slower to faster tiers."""
    on_load_failure: Literal["miss", "retry"] = "miss"
    """Handling of a block that was found and cannot be loaded.

    miss: it is missed. retry: it is looked for in slower tiers.
    """
    max_faults: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Number of consecutive faults that break a tier.

    A broken tier is not asked for a while.
    """
    first_wait_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 1024
    """First pause of a broken tier; it doubles with each failed probe."""
    longest_wait_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 30 * 1024
    """Upper bound of the pause."""
    call_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 5 * 1024
    """Time limit for a tier's answer; a later answer is a fault."""
    lookup_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 5 * 1024
    """How long a reader waits for each tier's part of a lookup.

    It applies if it is shorter than ``call_ms``.
    """
    load_ms: Annotated[int, Meta(ge=2, le=1 << 20)] = 60 * 1024
    """How long a reader waits for each tier's part of a load."""
    recompute_ms: Annotated[float, Meta(ge=0.0, le=1 << 20, description="virtual milliseconds, or a part of one")] = 0.0
    """Duration of computing a block, for ``load_or_recompute``.

    Blocks whose load would take longer are left to be computed, and may be missed. 0: every found block is loaded.
    """


# --- steps of users -----------------------------------------------------------------------------------------------


class After(Part, frozen=True, kw_only=True):
    """A precondition: an event or a time, whichever comes first."""

    event: str = ""
    """Name of a step ``fire``."""
    ms: Ms | None = None
    """Delay after the store.

    Without this and ``event``, the precondition holds already for ``fire``, and fails at once for ``raise``.
    """
    do: Literal["fire", "raise", "never"] = "fire"
    """Outcome of the precondition.

    fire: it holds then. raise: it is known then that it never will. never: it stays unknown.
    """
    made_of: Literal["trio", "thread", "async", "stubborn"] = field(default="trio", name="as")
    """Implementation of the precondition.

    An event of trio or of a thread, or an async callable; a stubborn one takes 2 ms to unwind when it is cancelled.
    """


class StoreStep(Part, frozen=True, kw_only=True):
    """Containers to be stored: one for each name in ``id``."""

    id: NewContainers
    keys: DealtKeys = ""
    """Keys of the containers, dealt out in order.

    Empty: ``per`` keys of each container's own, ``<id>.0``, ``<id>.1``, ...
    """
    per: Count = 1
    """Number of blocks in each container."""
    kind: Literal["weak", "strong", "external"] = "weak"
    """Hold on the source blocks.

    weak: the blocks may be evicted meanwhile. strong: the container holds them. external: the engine itself keeps them
    alive.
    """
    pipeline: Pipeline = ""
    """Pipeline that stores the containers; empty: the first."""
    how: Literal["wait", "now", "many"] = "wait"
    """Kind of store call.

    wait: for room in the budget, one container after the other. now: refused if there is no room. many: all containers
    in one call, which accepts all of them or none.
    """
    after: list[After] = []
    """Preconditions that must all hold; with ``any_of``, one."""
    any_of: bool = False
    """Whether one of ``after`` is enough."""


class LoadStep(Part, frozen=True, kw_only=True):
    """Keys to be loaded.

    Each loaded block is compared with the payload of its key.
    """

    id: NewLoad = ""
    keys: Keys
    tier: Tier = ""
    """Tier to load from; empty: the destination of the first pipeline."""
    hold_ms: Ms = 0
    """How long the found blocks are held, and then read again.

    Nobody may have removed or overwritten them.
    """
    gives_up_ms: Ms = 0
    """Time after which an unfinished reader is cancelled; 0: never."""


class KeysStep(Part, frozen=True, kw_only=True):
    """Keys of a tier, for a step that evicts or deletes them."""

    tier: Tier = ""
    """Tier of the keys.

    Empty: the source of the first pipeline for ``evict``, its destination for ``delete``.
    """
    keys: Keys
    again: bool = False
    """Whether the keys are put back at once; for ``evict``.

    A block that is recomputed under the same key behaves like this.
    """


class CloseStep(Part, frozen=True, kw_only=True):
    """End of the system, even if it has work in progress."""

    how: Literal["leave", "close", "cancel", "raise"] = "close"
    """How the system ends.

    leave: leave the block. close: call ``close_now``. cancel: cancel the scope around it. raise: raise in the block.
    """


class Step(Part, frozen=True, kw_only=True):
    """One action of a user at a time.

    Exactly one of the verbs must be set.
    """

    at_ms: At = 0
    store: StoreStep | None = None
    load: LoadStep | None = None
    fire: NewName | None = None
    """Event to set; containers are stored ``after`` it."""
    evict: KeysStep | None = None
    """Keys to take out of a source, as an engine does."""
    delete: KeysStep | None = None
    drain: Pipeline | None = None
    """Pipeline to wait for until it has nothing left."""
    release: Pipeline | None = None
    """Pipeline whose quarantine is released completely, as an operator would."""
    close: CloseStep | None = None


class Mix(Part, frozen=True, kw_only=True):
    """A load that is generated from the seed."""

    containers: Annotated[int, Meta(ge=1, le=1 << 20)] = 16
    """Number of containers: ``m0``, ``m1``, ..."""
    over_ms: Ms = 24
    """Time span of the stores."""
    keys: Annotated[int, Meta(ge=1, le=1 << 24)] = 24
    """Number of keys to choose from: ``k0``, ``k1``, ..."""
    most: Annotated[int, Meta(ge=1, le=65_536)] = 6
    """Maximum number of blocks in a container; the minimum is 0."""
    kinds: list[Literal["weak", "strong", "external"]] = []
    """Kinds to draw from, each as often as it is named.

    Empty: two weak ones for each strong one.
    """
    loads: Share = 0.2
    """Probability that a container is loaded some time after its store."""
    cancels: Share = 0.0
    """Probability that a container is cancelled in progress."""


class TraceLoad(Part, frozen=True, kw_only=True):
    """A load from a request trace.

    Each request stores the blocks that are not stored yet, and loads the others.
    """

    path: str
    """Path of a Mooncake trace, relative to the scenario's file.

    JSON lines, also compressed with gzip.
    """
    limit: Annotated[int, Meta(ge=1, le=1 << 24)] = 100
    """Number of requests."""
    skip: Count = 0
    speed: Annotated[float, Meta(gt=0.0, description="2: twice as fast as it was recorded")] = 1.0


class Load(Part, frozen=True, kw_only=True):
    """Generated work, in place of single steps."""

    mix: Mix | None = None
    trace: TraceLoad | None = None


# --- faults -------------------------------------------------------------------------------------------------------

FaultKind: TypeAlias = Literal[
    "cancel", "abandon", "cancel_waiter", "cancel_host", "shut_down",
    "evict", "unproven", "fail", "stall", "drop", "delay", "duplicate", "miscount", "reorder", "torn", "flip", "full",
    "peer_death", "slow_loads", "clock",
]  # fmt: skip


class Fault(Part, frozen=True, kw_only=True):
    """A fault, at a time or at a hook."""

    do: FaultKind
    at_ms: At | None = None
    """Time of the fault. Exactly one of this and ``at_hook`` is set."""
    at_hook: Hook = ""
    """Hook of the fault."""
    of: Containers = ""
    """Containers whose visits of the hook count.

    Empty: those in ``who``, or, if that is empty, all.
    """
    visit: Annotated[int, Meta(ge=1)] = 1
    """Number of the counted visit at which the fault happens."""
    who: Containers = ""
    """Containers that the fault hits; empty: those that the hook is about."""
    times: Annotated[int, Meta(ge=1, le=65_536)] = 1
    """Number of hits for each container, one after the other.

    So many callers ask for its cancel.
    """
    tier: Tier = ""
    """Tier of the fault.

    Empty: the destination of the first pipeline (``evict``: its source).
    """
    keys: Keys = ""
    """Keys of the fault.

    Empty: all, or, at a hook, those of the containers it is about.
    """
    ms: Ms = 1
    """Amount of ``delay``, ``slow_loads`` and ``clock``."""
    for_ms: Ms = 1
    """Duration of a fault that lasts."""
    by: Annotated[int, Meta(ge=-65_536, le=65_536)] = 1
    """Number of surplus answers, or, if negative, of missing ones."""
    again: bool = False
    """Whether the keys are put back at once.

    They go to the places that are free then, like blocks that are computed again.
    """
    grouped: bool = False
    """Whether the errors of a copy come in an exception group.

    A copy that uses a nursery raises so. For ``drop``, the group comes when the copy is cancelled.
    """
    p: Share = 1.0
    """Probability that the fault happens at all, drawn from the seed."""


# --- expectations -------------------------------------------------------------------------------------------------


class Counts(Part, frozen=True, kw_only=True):
    """Expected ends of a container's blocks; absent fields are not checked."""

    completed: Count | None = None
    filtered: Count | None = None
    failed: Count | None = None
    evicted: Count | None = None
    error: str | None = None
    """Class name of the exception; empty: none."""
    reasons: list[str] | None = None
    """All reasons for which blocks were filtered."""


class Window(Part, frozen=True, kw_only=True):
    """Time window of an event.

    In virtual milliseconds since the start, or since another event.
    """

    event: Event
    """Event that must happen in the window: ``"a0 settled"``."""
    since: Event = ""
    """Another event; empty: the start."""
    at_least_ms: Ms = 0
    at_most_ms: Ms | None = None


class Expect(Part, frozen=True, kw_only=True):
    """Expectations of a run, beyond the invariants.

    Everything in one table must hold.
    """

    status: dict[Container, Literal["COMPLETE", "CANCELLED", "FAILED", "REFUSED", "ABANDONED"]] | None = None
    """Expected status by container.

    REFUSED: the system did not accept it; ABANDONED: its caller gave up before.
    """
    result: dict[Container, Counts] | None = None
    """Expected ends of blocks by container."""
    count: dict[Counted, Count] | None = None
    """Exact counts.

    ``copied`` blocks, ``batches``, ``loaded`` and ``missed`` blocks, ``fired`` faults, visits of a hook.
    """
    at_most: dict[Counted, Count] | None = None
    at_least: dict[Counted, Count] | None = None
    order: list[Event] | None = None
    """Events that must happen in this order.

    Others may happen in between: ``["a2 confirmed", "a0 settled"]``.
    """
    time: list[Window] | None = None
    found: dict[Tier, SomeKeys] | None = None
    """Keys that a tier must have at the end."""
    missing: dict[Tier, SomeKeys] | None = None
    """Keys that a tier must not have at the end."""
    metric: dict[Pipeline, dict[str, int | float]] | None = None
    """Expected figures of ``statistics()``, by pipeline."""
    never: list[Event] | None = None
    """Events that must not happen: ``"a0 post_claim"``."""


# --- the whole scenario -------------------------------------------------------------------------------------------


class Scenario(Part, frozen=True, kw_only=True):
    """A program that can be run again: load, faults, and expectations."""

    format: Literal[1] = 1
    name: str
    about: str = ""
    """Purpose of the scenario, for a reader."""
    upstream: list[str] = []
    """Upstream issues that it reproduces: ``"vLLM #43226"``."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    not_for_real: str = ""
    """Reason why it cannot hold in real time.

    ``--real`` then refuses to play it, with this text.
    """
    limit_ms: Ms = 3_600 * 1024
    """Virtual time after which an unfinished run counts as a lost wake-up."""
    tier: dict[NewName, TierSpec] = {}
    """Tiers by name.

    ``device`` and ``host`` exist without being named.
    """
    pipeline: dict[NewName, PipelineSpec] = {}
    """Pipelines by name; without any: ``main``, from ``device`` to ``host``."""
    engine: EngineSpec | None = None
    """Engine that stores and loads, instead of plain pipelines."""
    load: Load | None = None
    step: list[Step] = []
    fault: list[Fault] = []
    expect: list[Expect] = []


VERBS: Final = ("store", "load", "fire", "evict", "delete", "drain", "release", "close")
"""Verbs of a step."""


# --- effects of each kind -----------------------------------------------------------------------------------------

Seam: TypeAlias = Literal[
    "hook", "reserve", "copy", "policy", "after", "store_many", "close_now", "evict", "delete", "drain", "found", "hold"
]
"""Way in which a system calls the world, or is called.

See `_systems`.
"""


@attrs.frozen
class Kind:
    """A kind of fault or of policy."""

    text: str
    """Effect of the kind."""
    looks_at: tuple[str, ...] = ()
    """Fields that the kind reads, apart from time and probability."""
    needs: tuple[Seam, ...] = ()
    """Seams that a system must have."""
    page_store: bool = True
    """Whether the fault can be done to a page store.

    It matters only for faults of a tier.
    """


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
"""Meaning of each word of ``do``, by part."""


# --- problems of a scenario ---------------------------------------------------------------------------------------


@attrs.frozen
class Problem:
    """A mistake in a scenario."""

    path: str
    """Path of the mistake: ``fault[2].who``, positions counted from 0."""
    text: str
    """Description of the mistake, and a correction."""


class ScenarioError(OffloadError, ValueError):
    """A scenario that cannot be played: malformed, or contradictory.

    The text names the place, the mistake and the correction.
    """

    def __init__(self, file: str, line: int | None, path: str, text: str, others: Iterable[str] = ()) -> None:
        place = f"{file}:{line}" if line is not None else file
        super().__init__(": ".join([part for part in (place, path, text) if part]))
        self.file = file
        """File name; empty for a scenario made in Python."""
        self.line = line
        """Line number from 1; ``None`` if there is none."""
        self.path = path
        """Path within the scenario: ``fault[2].who``."""
        self.text = text
        """Description of the mistake, and the correction."""
        self.others: tuple[str, ...] = tuple(others)
        """Further mistakes, a line each."""
