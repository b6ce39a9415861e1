"""Explanations of why a block is, or is not, in the tiers.

The first part is pure: facts go in, an explanation comes out. The second part collects the facts. The present state is
read from the tiers and pipelines at the time of the question; the past is recorded as it happens
(:mod:`offload._engine.history`). So blocks that are stored and found cost nothing, and the caller of an explanation
pays for it.

The explanation of a block is the first of these that is true:

1. It was found wrong, and a tier may still have it: it is not served.
2. It is in a tier.
3. It is on its way.
4. A tier that may have it does not answer.
5. It is stored under another key: the same tokens in another layout, or under another salt.
6. It was evicted from a tier or dropped on its way below, deleted, kept back from a store, found wrong, or its store
   failed: the latest of these.
7. Nothing is known of it: it was never stored, or is forgotten here.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal, TypeAlias

import attrs
import trio

from backends.abc import Key

from .._keys import BlockKey
from .._pipeline.container import OffloadContainer
from .._pipeline.lifecycle import Status
from .._pipeline.pipeline import Pipeline
from .history import Event, History
from .lookup import Place, ask_each

Differs: TypeAlias = Literal["nothing", "layout", "salt"]


# --- the facts --------------------------------------------------------------------------------------------------------


@attrs.frozen
class KeyMaker:
    """A way to make keys of tokens: one layout and one salt."""

    name: str
    """The name in explanations: ``llama-3-8b bfloat16 rank 1``."""
    make: Callable[[Sequence[int]], Sequence[Key]]
    """A function that makes the keys of all full blocks of tokens."""
    differs: Differs = "nothing"
    """The difference of its keys from those of the lookup."""
    tenant: str = ""
    """The tenant of its keys.

    Only this tenant or an operator may have it tried.
    """


def allowed(makers: Sequence[KeyMaker], tenant: str, *, operator: bool) -> list[KeyMaker]:
    """Return the key makers that this caller may use.

    They are the tenant's own, and those without a tenant.
    """
    return [maker for maker in makers if operator or maker.tenant in ("", tenant)]


@attrs.frozen
class Elsewhere:
    """A block of the same tokens that is stored under another key."""

    name: str
    """The name of the key maker."""
    differs: Differs
    """The difference of its key from the one in question."""
    tiers: Sequence[str]
    """The tiers that have it."""


@attrs.frozen
class InFlight:
    """A pipeline that has a block in flight."""

    pipeline: str
    """The tier that the pipeline leads to."""
    stage: str
    """The stage that the block is in."""


@attrs.frozen
class Facts:
    """Everything that is known about one block."""

    key: Key
    """Its key."""
    tiers: Sequence[str] = ()
    """The tiers that have it, the fastest first."""
    in_flight: Sequence[InFlight] = ()
    """The pipelines that have it in flight."""
    unavailable: Mapping[str, str] = attrs.field(factory=dict)
    """Tiers that did not answer whether they have it, with the error."""
    elsewhere: Sequence[Elsewhere] = ()
    """Blocks of the same tokens under other keys."""
    evicted: Sequence[Event] = ()
    """Its evictions, the latest first."""
    deleted: Sequence[Event] = ()
    """Its deletions, the latest first."""
    refused: Sequence[Event] = ()
    """Stores that filtered it, the latest first."""
    failed: Sequence[Event] = ()
    """Its failed stores with place and reason, the latest first."""
    left_out: Sequence[Event] = ()
    """Events in which it was found and left out, the latest first.

    Loading it was slower or late.
    """
    mismatched: Sequence[Event] = ()
    """Loads that found a wrong block, the latest first.

    Each has the tier, and the difference from the key's content.
    """
    withheld: bool = False
    """Whether it is not served now.

    A tier may still have the block that was found wrong.
    """


# --- the explanation --------------------------------------------------------------------------------------------------


class Cause(enum.Enum):
    """The explanation in a word."""

    FOUND = "found"
    IN_FLIGHT = "in flight"
    UNAVAILABLE = "unavailable"
    OTHER_LAYOUT = "other layout"
    OTHER_SALT = "other salt"
    EVICTED = "evicted"
    DELETED = "deleted"
    FILTERED = "filtered"
    FAILED = "failed"
    WITHHELD = "withheld"
    UNKNOWN = "unknown"


@attrs.frozen
class BlockExplanation:
    """The explanation for one block."""

    cause: Cause
    """The cause, in a word."""
    text: str
    """The explanation, in a sentence."""
    facts: Facts
    """Everything that is known about it."""


@attrs.frozen
class Explanation:
    """The reasons why blocks are, or are not, in the tiers.

    ``str()`` of it is for people, :meth:`as_json` for programs.
    """

    blocks: Sequence[BlockExplanation]
    """The explanation of each key, in order."""

    @property
    def usable(self) -> int:
        """The number of leading blocks that a lookup would find."""
        return next((at for at, block in enumerate(self.blocks) if block.cause is not Cause.FOUND), len(self.blocks))

    def __str__(self) -> str:
        if len(self.blocks) == 1:
            return self.blocks[0].text
        lines = [f"{self.usable} of {len(self.blocks)} blocks can be used"]
        for text, run in groupby(enumerate(self.blocks), key=lambda numbered: numbered[1].text):
            first, *others = [at for at, _ in run]
            lines.append(f"  {first}-{others[-1]}: {text}" if others else f"  {first}: {text}")
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return all facts as JSON, with keys as hexadecimal digits."""
        return json.dumps({"usable": self.usable, "blocks": list(map(_plain, self.blocks))})


def explain(facts: Sequence[Facts], now: float) -> Explanation:
    """Explain each of these blocks; see the top of this module.

    ``now`` is on the clock of the events.
    """
    return Explanation([_explain(block, now) for block in facts])


def _explain(facts: Facts, now: float) -> BlockExplanation:
    cause, text = _judge(facts, now)
    return BlockExplanation(cause, text, facts)


def _judge(facts: Facts, now: float) -> tuple[Cause, str]:
    if facts.withheld:
        return Cause.WITHHELD, _withheld(facts, now)
    if facts.tiers:
        bringing = [flight.pipeline for flight in facts.in_flight if flight.pipeline not in facts.tiers]
        text = f"in {_and(facts.tiers)}" + (f", on its way to {_and(bringing)}" if bringing else "")
        left = [f"left to be computed {_ago(now, event)} ({event.why})" for event in facts.left_out[:1]]
        return Cause.FOUND, "; ".join([text, *left])
    if facts.in_flight:
        return Cause.IN_FLIGHT, _and(
            [f"on its way to {flight.pipeline}, in {flight.stage}" for flight in facts.in_flight]
        )
    history = _history(facts, now)
    if facts.unavailable:
        silent = [f"{tier} ({error})" for tier, error in facts.unavailable.items()]
        return Cause.UNAVAILABLE, "; ".join(
            [f"not known: no answer from {_and(silent)}", *[text for _, text in history]]
        )
    if facts.elsewhere:
        other = facts.elsewhere[0]
        cause = Cause.OTHER_LAYOUT if other.differs == "layout" else Cause.OTHER_SALT
        return cause, f"there under another {other.differs}: {other.name}, in {_and(other.tiers)}"
    if history:
        return history[0]
    return Cause.UNKNOWN, "no record of it: never stored, or gone for longer than the records reach"


def _withheld(facts: Facts, now: float) -> str:
    seen = [f"loaded {_one(event, now)}" for event in facts.mismatched[:1]]
    return "; ".join(["withheld until it is stored again: it does not match its key", *seen])


def _history(facts: Facts, now: float) -> list[tuple[Cause, str]]:
    """Return the latest event of a block, with its cause.

    The list is empty without a record.
    """
    told = {
        Cause.EVICTED: facts.evicted,
        Cause.DELETED: facts.deleted,
        Cause.FILTERED: facts.refused,
        Cause.FAILED: facts.failed,
        Cause.WITHHELD: facts.mismatched,
    }
    last = max((cause for cause in told if told[cause]), key=lambda cause: told[cause][0].when, default=None)
    if last is None:
        return []
    failed = [f"not stored in {event.where} {_ago(now, event)} ({event.why})" for event in facts.failed[:1]]
    if last is Cause.FAILED:
        return [(last, failed[0])]
    if last is Cause.WITHHELD:
        return [(last, _withheld(facts, now))]
    how = "kept back" if last is Cause.FILTERED else last.value
    events = told[last][:1] if last is Cause.FILTERED else told[last]
    text = f"{how} {_and([_one(event, now) for event in events])}"
    # An evicted block that is in no other tier may have failed to get there.
    return [(last, "; ".join([text, *failed] if last is Cause.EVICTED else [text]))]


def _one(event: Event, now: float) -> str:
    return f"from {event.where} {_ago(now, event)}" + (f" ({event.why})" if event.why else "")


def _ago(now: float, event: Event) -> str:
    return f"{max(0.0, now - event.when):.3g} s ago"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _plain(block: BlockExplanation) -> dict[str, Any]:
    facts = attrs.asdict(block.facts, value_serializer=lambda _, __, value: _spelt(value))
    return {"cause": block.cause.value, "text": block.text, **facts}


def _spelt(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


# --- asking ------------------------------------------------------------


@attrs.frozen(eq=False)
class BlockInspector:
    """A collector of the facts about blocks."""

    places: Sequence[Place]
    """The tiers, the fastest first."""
    ways: Sequence[tuple[str, Pipeline]]
    """The pipelines, each with the tier that it leads to."""
    history: History
    withheld: Container[Key] = frozenset()
    """Keys that are not served now."""

    async def explain(self, keys: Sequence[Key], others: Sequence[tuple[KeyMaker, Sequence[Key]]] = ()) -> Explanation:
        """Explain these blocks.

        Args:
            keys: the keys in question.
            others: the same blocks under other keys, position by position.
        """
        there, unavailable = await self._where(keys, self.places)
        in_flight = self.in_flight(keys)
        missing = [at for at, key in enumerate(keys) if key not in there and key not in in_flight]
        # A tier that did not answer is not asked again for each naming: each time costs its timeout.
        answering = [place for place in self.places if place[0] not in unavailable]
        elsewhere = await self._elsewhere(missing, others, answering)
        gone = [keys[at] for at in missing] + [key for key in keys if key in self.withheld]
        history = self.history
        records = (history.tombstones, history.deletions, history.refusals, history.failures, history.mismatches)
        evicted, deleted, refused, failed, mismatched = [record.of(gone) for record in records]
        left_out = history.left_outs.of([key for key in keys if key in there])
        facts = [
            Facts(
                key,
                there.get(key, ()),
                in_flight.get(key, ()),
                unavailable,
                elsewhere.get(at, ()),
                evicted.get(key, ()),
                deleted.get(key, ()),
                refused.get(key, ()),
                failed.get(key, ()),
                left_out.get(key, ()),
                mismatched.get(key, ()),
                key in self.withheld,
            )
            for at, key in enumerate(keys)
        ]
        return explain(facts, trio.current_time())

    async def _where(self, keys: Sequence[Key], places: Sequence[Place]) -> tuple[dict[Key, list[str]], dict[str, str]]:
        """Find which tiers have these keys, and which did not answer."""
        there: dict[Key, list[str]] = {}
        found, silent = await ask_each(places, keys)
        for name, _ in places:
            for key in found.get(name, ()):
                there.setdefault(key, []).append(name)
        return there, {name: str(error) or repr(error) for name, error in silent.items()}

    async def _elsewhere(
        self, missing: Sequence[int], others: Iterable[tuple[KeyMaker, Sequence[Key]]], places: Sequence[Place]
    ) -> dict[int, list[Elsewhere]]:
        """Find other keys of the missing blocks that are stored, by position."""
        found: dict[int, list[Elsewhere]] = {}
        for maker, keys in others:
            there, _ = await self._where([keys[at] for at in missing if at < len(keys)], places)
            for at in missing:
                if at < len(keys) and keys[at] in there:
                    found.setdefault(at, []).append(Elsewhere(maker.name, maker.differs, there[keys[at]]))
        return found

    def in_flight(self, keys: Sequence[Key]) -> dict[Key, list[InFlight]]:
        """Return the pipelines that have these keys in flight.

        It reads all containers, whose number is bounded.
        """
        wanted = set(keys)
        found: dict[Key, list[InFlight]] = {}
        for name, pipeline in self.ways:
            for container in pipeline._settlement.live:
                for key in wanted.intersection(container.keys):
                    found.setdefault(key, []).append(InFlight(name, _stage_of(pipeline, container)))
        return found


def _stage_of(pipeline: Pipeline, container: OffloadContainer) -> str:
    """Return the stage of a container."""
    if container.status is Status.EVALUATING:
        return "admission"
    if container.status is Status.TRANSFERRING:
        return "chain" if container.completed else "transfer"
    if container in pipeline._ready.parked:
        return "batching"
    return "transfer" if container.holder in pipeline._transfer.slots else "awaiting"


# --- keys of tokens ---------------------------------------------------------------------------------------------------


def keys_in_question(
    what: Key | Sequence[Key] | Sequence[int],
    naming: BlockKey | None,
    others: Sequence[BlockKey],
    tenant: str,
    *,
    operator: bool,
) -> tuple[Sequence[Key], list[tuple[KeyMaker, Sequence[Key]]]]:
    """Return the keys in question, and the keys of other namings.

    The others are only for tokens, and only of namings that this caller may use.

    Raises:
        TypeError: tokens without a naming.
        PermissionError: the naming belongs to another tenant.
    """
    if isinstance(what, bytes):
        return [what], []
    keys = [key for key in what if isinstance(key, bytes)]
    if len(keys) == len(what):
        return keys, []
    tokens = [token for token in what if not isinstance(token, bytes)]
    if naming is None or keys:
        raise TypeError("what must be a key, keys, or tokens with naming=, which makes their keys")
    if not operator and naming.tenant not in ("", tenant):
        raise PermissionError(f"tenant {tenant!r} may not explain blocks of {naming.tenant!r}: only operators may")
    makers = [_maker(other, naming) for other in others if other != naming]
    return naming.keys(tokens), [(maker, maker.make(tokens)) for maker in allowed(makers, tenant, operator=operator)]


def _aligned(other: BlockKey, naming: BlockKey, tokens: Sequence[int]) -> list[Key]:
    """Return the other keys, position by position.

    With another block size, a position has the key of the block in which ours ends.
    """
    keys = other.keys(tokens)
    ends = range(naming.block_size, len(tokens) + 1, naming.block_size)
    return [keys[at] for at in [(end - 1) // other.block_size for end in ends] if at < len(keys)]


def _maker(other: BlockKey, naming: BlockKey) -> KeyMaker:
    """Return a key maker of another naming, with its difference.

    All fields on which the bytes of a block depend count as its layout.
    """
    fields = [field.name for field in attrs.fields(BlockKey)]
    different = [name for name in fields if getattr(other, name) != getattr(naming, name)]
    name = ", ".join(f"{field} {getattr(other, field)!r}" for field in different)
    differs: Differs = "salt" if different == ["tenant"] else "layout"
    return KeyMaker(name, partial(_aligned, other, naming), differs, other.tenant)
