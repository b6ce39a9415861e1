"""The facts of an explanation: what there is now is asked for, and what was is noted when it happens.

Nothing is noted for a block that walks its way and arrives. An eviction is one note, whatever made room with it; a container of
which something was kept back is one note. Who asks for an explanation pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from backends.abc import Key, Tier
from backends.leaving import SpillingTier

from .._explaining import (
    Deletions,
    Differs,
    Elsewhere,
    Explanation,
    Facts,
    Failures,
    InFlight,
    KeyMaker,
    Refusals,
    Tombstones,
    allowed,
    explain,
)
from .._health.faults import describe
from .._keys import BlockKey
from .._pipeline.container import OffloadContainer
from .._pipeline.lifecycle import Status
from .._pipeline.pipeline import Pipeline
from .finding import Place


class History:
    """What has happened to blocks: the last that were evicted, deleted, kept back from a store, or whose store failed."""

    def __init__(self) -> None:
        self.tombstones: Tombstones = Tombstones()
        self.deletions: Deletions = Deletions()
        self.refusals: Refusals = Refusals()
        self.failures: Failures = Failures()

    def watch_tier(self, name: str, tier: object) -> Callable[[], None]:
        """Note what this place evicts, where it tells; returns what ends that."""
        if isinstance(tier, SpillingTier):
            return tier.on_evicted(partial(self._evicted, name))
        return lambda: None

    def watch_pipeline(self, name: str, pipeline: Pipeline) -> None:
        """Note what is kept back from this pipeline, and what fails in it."""
        pipeline._settlement.refused = partial(self._refused, name)

    def dropped(self, name: str, to: str) -> Callable[[Sequence[Key], str], None]:
        """What to tell of blocks that went from a tier without a copy in the next one."""
        return lambda keys, reason: self.tombstones.note(
            name, keys, trio.current_time(), f"not copied to {to}: {reason}"
        )

    def deleted(self, name: str, keys: Sequence[Key]) -> None:
        """Note that these were deleted from a tier."""
        if keys:
            self.deletions.note(name, keys, trio.current_time())

    def _evicted(self, name: str, keys: Sequence[Key]) -> None:
        self.tombstones.note(name, keys, trio.current_time())

    def _refused(self, name: str, reasons: Mapping[Key, str], failed: Mapping[Key, BaseException]) -> None:
        now = trio.current_time()
        if reasons:
            self.refusals.note(name, reasons, now)
        if failed:
            self.failures.note(name, {key: describe(error) for key, error in failed.items()}, now)


@attrs.frozen(eq=False)
class Witnesses:
    """All that can be asked about a block."""

    places: Sequence[Place]
    """The tiers, the fastest first."""
    ways: Sequence[tuple[str, Pipeline]]
    """The pipelines, each with the tier that it leads to."""
    history: History

    async def explain(self, keys: Sequence[Key], others: Sequence[tuple[KeyMaker, Sequence[Key]]] = ()) -> Explanation:
        """Why these blocks are, or are not, there.

        Args:
            keys: what was looked for.
            others: the same blocks under other keys, position by position.
        """
        there, unavailable = await self._where(keys)
        in_flight = self._in_flight(keys)
        missing = [at for at, key in enumerate(keys) if key not in there and key not in in_flight]
        elsewhere = await self._elsewhere(missing, others)
        gone = [keys[at] for at in missing]
        history = self.history
        evicted, deleted, refused, failed = [
            record.of(gone) for record in (history.tombstones, history.deletions, history.refusals, history.failures)
        ]
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
            )
            for at, key in enumerate(keys)
        ]
        return explain(facts, trio.current_time())

    async def _where(self, keys: Sequence[Key]) -> tuple[dict[Key, list[str]], dict[str, str]]:
        """Which tiers have which of these, and which do not say."""
        there: dict[Key, list[str]] = {}
        unavailable: dict[str, str] = {}
        await trio.lowlevel.checkpoint()
        for name, tier in self.places:
            place: Any = tier
            try:
                found = place.contains_nowait(keys) if isinstance(place, Tier) else await place.contains(keys)
            except Exception as error:
                unavailable[name] = str(error) or repr(error)
                continue
            for key in found:
                there.setdefault(key, []).append(name)
        return there, unavailable

    async def _elsewhere(
        self, missing: Sequence[int], others: Iterable[tuple[KeyMaker, Sequence[Key]]]
    ) -> dict[int, list[Elsewhere]]:
        """Under which other keys the missing ones are there, by position."""
        found: dict[int, list[Elsewhere]] = {}
        for maker, keys in others:
            there, _ = await self._where([keys[at] for at in missing if at < len(keys)])
            for at in missing:
                if at < len(keys) and keys[at] in there:
                    found.setdefault(at, []).append(Elsewhere(maker.name, maker.differs, there[keys[at]]))
        return found

    def _in_flight(self, keys: Sequence[Key]) -> dict[Key, list[InFlight]]:
        """Who is bringing which of these where: looks at all that is inside, of which there is a bound."""
        wanted = set(keys)
        found: dict[Key, list[InFlight]] = {}
        for name, pipeline in self.ways:
            for container in pipeline._settlement.live:
                for key in wanted.intersection(container.keys):
                    found.setdefault(key, []).append(InFlight(name, _room(pipeline, container)))
        return found


def _room(pipeline: Pipeline, container: OffloadContainer) -> str:
    """Where in a pipeline a container is."""
    if container.status is Status.EVALUATING:
        return "admission"
    if container.status is Status.TRANSFERRING:
        return "chain" if container.completed else "transfer"
    if container in pipeline._ready.parked:
        return "batching"
    return "transfer" if container.holder in pipeline._transfer.slots else "awaiting"


# --- keys of tokens ---------------------------------------------------------------------------------------------------


def asked(
    what: Key | Sequence[Key] | Sequence[int],
    naming: BlockKey | None,
    others: Sequence[BlockKey],
    tenant: str,
    *,
    operator: bool,
) -> tuple[Sequence[Key], list[tuple[KeyMaker, Sequence[Key]]]]:
    """The keys that are asked about; of tokens also those that other namings, which this caller may use, give them.

    Raises:
        TypeError: tokens without a naming.
        PermissionError: the naming is another tenant's.
    """
    if isinstance(what, bytes):
        return [what], []
    keys = [key for key in what if isinstance(key, bytes)]
    if len(keys) == len(what):
        return keys, []
    tokens = [token for token in what if not isinstance(token, bytes)]
    if naming is None or keys:
        raise TypeError("what is a key, keys, or tokens with a naming=, which says how their blocks are named")
    if not operator and naming.tenant not in ("", tenant):
        raise PermissionError(f"tenant {tenant!r} may not ask for the blocks of {naming.tenant!r}: operators only")
    makers = [_maker(other, naming) for other in others if other != naming]
    return naming.keys(tokens), [(maker, maker.make(tokens)) for maker in allowed(makers, tenant, operator=operator)]


def _aligned(other: BlockKey, naming: BlockKey, tokens: Sequence[int]) -> list[Key]:
    """The other keys, position by position: of blocks of another size the one in which ours ends."""
    keys = other.keys(tokens)
    ends = range(naming.block_size, len(tokens) + 1, naming.block_size)
    return [keys[at] for at in [(end - 1) // other.block_size for end in ends] if at < len(keys)]


def _maker(other: BlockKey, naming: BlockKey) -> KeyMaker:
    """Another naming, and what is different: whatever the bytes of a block depend on is its layout."""
    fields = [field.name for field in attrs.fields(BlockKey)]
    different = [name for name in fields if getattr(other, name) != getattr(naming, name)]
    name = ", ".join(f"{field} {getattr(other, field)!r}" for field in different)
    differs: Differs = "salt" if different == ["tenant"] else "layout"
    return KeyMaker(name, partial(_aligned, other, naming), differs, other.tenant)
