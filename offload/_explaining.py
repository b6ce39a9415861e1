"""Why a block is, or is not, where it was looked for: facts go in, an explanation comes out. Pure.

What there is now is asked for when somebody wants to know. What was, nobody can ask for, so four records are kept, each of
the last 65,536 blocks: which were evicted, which were deleted, which were kept back from a store, and whose store failed.
Keeping them costs one note for a whole batch, whatever is in it; only an explanation reads them.

What explains a block, the first of these that is true:

1. It is in a tier.                              5. It was evicted from a tier, or dropped on its way below, or
2. It is on its way.                                deleted, kept back from a store, or its store failed: whatever came last.
3. A tier that may have it does not answer.      6. Nothing is known of it: never stored, or forgotten here.
4. It is there under another key: the same
   tokens in another layout, or under another salt.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Final, Literal, TypeAlias

import attrs

from backends.abc import Key

MOST_REMEMBERED: Final = 65_536
"""Blocks that each record remembers: some minutes of a busy engine, and about 10 MB."""

Differs: TypeAlias = Literal["nothing", "layout", "salt"]


# --- what is remembered -----------------------------------------------------------------------------------------------


@attrs.frozen
class Event:
    """Something that happened to a block."""

    where: str
    """The tier that it went from, or the pipeline that did not take it."""
    when: float
    """On trio's clock, in seconds."""
    why: str
    """In a word or two."""


@attrs.define(eq=False)
class _Entry:
    when: float
    where: str
    why: str
    """Of all, or in front of each one's own."""
    keys: Collection[Key]
    """With their own reasons, where it is a mapping."""
    skipped: int = 0

    def __iter__(self) -> Iterator[Key]:
        return islice(self.keys, self.skipped, None)

    def about(self, key: Key) -> Event:
        why = self.keys[key] if isinstance(self.keys, Mapping) else self.why
        return Event(self.where, self.when, why)


class Record:
    """The last blocks that something happened to. Bounded in blocks; adding many costs as much as adding one."""

    __slots__ = ("_entries", "_most", "_total")

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._total = 0
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return self._total

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._total} blocks>"

    def note(self, where: str, keys: Collection[Key], when: float, why: str = "") -> None:
        """It happened to these. The collection is kept, not copied; a mapping has each one's own reason."""
        self._entries.append(_Entry(when, where, why, keys))
        self._total += len(keys)
        while self._total > self._most:
            oldest = self._entries[0]
            excess, there = self._total - self._most, len(oldest.keys) - oldest.skipped
            if there <= excess:
                self._entries.popleft()
            else:
                oldest.skipped += excess
            self._total -= min(there, excess)

    def of(self, keys: Collection[Key]) -> dict[Key, list[Event]]:
        """What happened to these, the latest first, and once for each place. Reads all there is."""
        wanted = set(keys)
        found: dict[Key, dict[str, Event]] = {}
        for entry in reversed(self._entries):
            for key in entry:
                if key in wanted:
                    found.setdefault(key, {}).setdefault(entry.where, entry.about(key))
        return {key: list(events.values()) for key, events in found.items()}


class Tombstones(Record):
    """The last blocks that were evicted from a tier, or dropped on their way to the next one."""

    __slots__ = ()


class Deletions(Record):
    """The last blocks that were deleted from a tier by request."""

    __slots__ = ()


class Refusals(Record):
    """The last blocks that were kept back from a store: by a policy, a pending mark, or an overflow."""

    __slots__ = ()


class Failures(Record):
    """The last blocks whose store failed: a broken tier, a full one, a copy that went wrong."""

    __slots__ = ()


# --- the facts --------------------------------------------------------------------------------------------------------


@attrs.frozen
class KeyMaker:
    """A way to make keys of tokens: one layout, one salt."""

    name: str
    """What it stands for, as the explanation says it: ``llama-3-8b bfloat16 rank 1``."""
    make: Callable[[Sequence[int]], Sequence[Key]]
    """The keys of all full blocks of these tokens."""
    differs: Differs = "nothing"
    """What is different from the keys that a lookup asks for."""
    tenant: str = ""
    """Whose keys it makes: only he, or an operator, may have it tried."""


def allowed(makers: Sequence[KeyMaker], tenant: str, *, operator: bool) -> list[KeyMaker]:
    """The ways that this caller may have tried: his own, and those of nobody in particular."""
    return [maker for maker in makers if operator or maker.tenant in ("", tenant)]


@attrs.frozen
class Elsewhere:
    """A block of the same tokens that is there under another key."""

    name: str
    """What that key stands for."""
    differs: Differs
    """From the key that was asked for."""
    tiers: Sequence[str]
    """Where it is."""


@attrs.frozen
class InFlight:
    """A pipeline that has a block."""

    pipeline: str
    """Where it leads."""
    stage: str
    """The room it is in."""


@attrs.frozen
class Facts:
    """What is known of one block."""

    key: Key
    """Its name."""
    tiers: Sequence[str] = ()
    """Where it is found, the fastest first."""
    in_flight: Sequence[InFlight] = ()
    """Who is bringing it where."""
    unavailable: Mapping[str, str] = attrs.field(factory=dict)
    """Tiers that did not say whether they have it, with the error."""
    elsewhere: Sequence[Elsewhere] = ()
    """Under which other keys it is there."""
    evicted: Sequence[Event] = ()
    """When it went, and from where; the latest first."""
    deleted: Sequence[Event] = ()
    """When it was deleted, and from where; the latest first."""
    refused: Sequence[Event] = ()
    """When it was kept back from a store, and by whom; the latest first."""
    failed: Sequence[Event] = ()
    """When it could not be stored, where, and why; the latest first."""


# --- the explanation --------------------------------------------------------------------------------------------------


class Cause(enum.Enum):
    """What explains a block, in a word."""

    FOUND = "found"
    IN_FLIGHT = "in flight"
    UNAVAILABLE = "unavailable"
    OTHER_LAYOUT = "other layout"
    OTHER_SALT = "other salt"
    EVICTED = "evicted"
    DELETED = "deleted"
    FILTERED = "filtered"
    FAILED = "failed"
    UNKNOWN = "unknown"


@attrs.frozen
class BlockExplanation:
    """Why one block is, or is not, there."""

    cause: Cause
    """In a word."""
    text: str
    """In a sentence."""
    facts: Facts
    """All that is known."""


@attrs.frozen
class Explanation:
    """Why blocks are, or are not, there. ``str()`` of it is for people, :meth:`as_json` for programs."""

    blocks: Sequence[BlockExplanation]
    """One for each key, in the order of the prompt."""

    @property
    def usable(self) -> int:
        """How many leading blocks are found: what a lookup would give."""
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
        """All facts; keys as hexadecimal digits."""
        return json.dumps({"usable": self.usable, "blocks": list(map(_plain, self.blocks))})


def explain(facts: Sequence[Facts], now: float) -> Explanation:
    """What explains each of these blocks: see the top of this module. ``now`` is on the clock of the events."""
    return Explanation([_explain(block, now) for block in facts])


def _explain(facts: Facts, now: float) -> BlockExplanation:
    cause, text = _judge(facts, now)
    return BlockExplanation(cause, text, facts)


def _judge(facts: Facts, now: float) -> tuple[Cause, str]:
    if facts.tiers:
        bringing = [flight.pipeline for flight in facts.in_flight if flight.pipeline not in facts.tiers]
        return Cause.FOUND, f"in {_and(facts.tiers)}" + (f", on its way to {_and(bringing)}" if bringing else "")
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
    return Cause.UNKNOWN, "no trace of it: never stored, or gone before all that is remembered"


def _history(facts: Facts, now: float) -> list[tuple[Cause, str]]:
    """What came last, as a cause and in words; nothing if nothing is remembered."""
    told = {
        Cause.EVICTED: facts.evicted,
        Cause.DELETED: facts.deleted,
        Cause.FILTERED: facts.refused,
        Cause.FAILED: facts.failed,
    }
    last = max((cause for cause in told if told[cause]), key=lambda cause: told[cause][0].when, default=None)
    if last is None:
        return []
    failed = [f"not stored in {event.where} {_ago(now, event)} ({event.why})" for event in facts.failed[:1]]
    if last is Cause.FAILED:
        return [(last, failed[0])]
    how = "kept back" if last is Cause.FILTERED else last.value
    events = told[last][:1] if last is Cause.FILTERED else told[last]
    text = f"{how} {_and([_one(event, now) for event in events])}"
    # Why it was nowhere else when it went.
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
