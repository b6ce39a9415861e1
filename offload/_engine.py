"""The engine: tiers joined by pipelines. What an inference engine talks to.

    source --pipeline--> tiers[0] --pipeline--> tiers[1] ...        store: down the stairs
    destination <------- load ------- hit <------- lookup           read: each tier, the fastest first

It decides one thing: which tier a block of a prefix is read from. All else it composes: pipelines move, tiers hold.

Rule 1. A hit holds what it found: until it is released none of its blocks is evicted or deleted, wherever they lie. It ends
        with its engine at the latest: one that was forgotten is released then, and said to have been.
Rule 2. Only a gapless prefix is of use. What is missing or damaged at position p makes everything behind p unusable,
        and a load says so in one number.
Rule 3. What is pinned is given back on every path, also when the caller is cancelled at any await in here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from inspect import iscoroutinefunction
from itertools import cycle
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import attrs
import trio

from backends.abc import (
    LOADED,
    Blocks,
    BlockSizeError,
    Deletion,
    Destination,
    Failed,
    Key,
    Missed,
    Outcome,
    ReadLease,
    RemoteTier,
    Source,
    Tier,
    TierStatistics,
    Unproven,
)
from backends.pages import Pages

from ._config import PipelineConfig
from ._errors import OffloadError
from ._handle import TransferHandle
from ._pipeline import Pipeline, open_pipeline
from ._statistics import PipelineStatistics
from .abc import AsyncPolicy, Instrument, Policy, PreconditionLike
from .policies import PresenceFilter, RemotePresenceFilter

OnLoadFailure: TypeAlias = Literal["miss", "fail"]
"""What a load does about a block that was found and cannot be loaded: end the usable prefix there, or raise."""

BEHIND_A_GAP: Final = Missed("behind a gap")
"""The block was not tried: one before it could not be loaded."""

_NOTHING: Mapping[str, Exception] = MappingProxyType({})
_LONGEST_RELEASE: Final = 10.0
"""Seconds that the end of an engine waits for tiers that are slow to let go of forgotten hits."""
_log = logging.getLogger("offload.engine")


class LoadFailed(OffloadError):
    """A block that was found could not be loaded, and ``on_load_failure`` is ``fail``; the cause is the first error."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__(f"{result.loaded} of {len(result.outcomes)} blocks loaded: {result.outcomes[result.loaded]!r}")
        self.result = result
        """How far it came: the first ``result.loaded`` blocks are at the destination."""


@attrs.frozen
class LoadResult:
    """What a load has brought."""

    loaded: int
    """So many leading blocks are at the destination, and verified where the tier keeps checksums. Use exactly these."""
    outcomes: Sequence[Outcome]
    """One per key of the hit. What a load did not try is :class:`~backends.abc.Missed`, ``behind a gap``."""


@attrs.frozen
class EngineStatistics:
    """A snapshot of an engine. Counters count from its start."""

    pipelines: Mapping[str, PipelineStatistics]
    """Each pipeline, by the name of where it leads."""
    tiers: Mapping[str, TierStatistics]
    """Each tier, by name, from the fastest to the slowest."""
    lookups: int
    """Lookups that ended with an answer."""
    asked_blocks: int
    """Keys they asked for."""
    hit_blocks: int
    """Keys they found: the lengths of the prefixes."""
    loads: int
    """Loads that ended with an answer."""
    loaded_blocks: int
    """Blocks they brought, counted where the prefix has no gap before them."""
    load_failures: Mapping[str, int]
    """Blocks that were found and could not be loaded, by reason; those behind them are not counted."""
    lookup_failures: Mapping[str, int]
    """Lookups that had to leave out a tier because it raised, by its name."""
    open_hits: int
    """Hits that have not been released yet: what they found stays pinned."""


@attrs.frozen
class _Run:
    """Neighbouring blocks of a hit that lie in one tier."""

    name: str
    tier: Tier | RemoteTier
    lease: ReadLease
    blocks: int


class Hit:
    """The longest prefix that was found, pinned where it lies. Made by :meth:`Engine.lookup` only.

    An async context manager: leaving it releases, also when cancelled.
    """

    __slots__ = ("_live", "_loads", "_released", "_runs", "keys", "unavailable")

    def __init__(
        self, keys: Sequence[Key], runs: list[_Run], unavailable: Mapping[str, Exception], live: dict[Hit, None]
    ) -> None:
        self._runs = runs
        self._live = live
        live[self] = None
        self._loads = 0
        self._released = False
        self.keys: Sequence[Key] = keys
        """What was found, from the first key asked for to the last before the first that no tier has."""
        self.unavailable: Mapping[str, Exception] = unavailable
        """Tiers that were left out because they raised, by name. Not a miss: they may well have the blocks."""

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        where = ", ".join(f"{blocks} in {name}" for name, blocks in self.runs)
        return f"<Hit of {len(self.keys)} blocks: {where or 'nothing'}{', released' if self._released else ''}>"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Where the prefix lies, in order: the name of a tier, and how many blocks are read from it."""
        return [(run.name, run.blocks) for run in self._runs]

    @property
    def released(self) -> bool:
        """Whether it has been released."""
        return self._released

    async def __aenter__(self) -> Hit:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._release()

    async def _release(self) -> None:
        """Give the pins back, or leave that to the last load that still reads through them."""
        released, self._released = self._released, True
        self._live.pop(self, None)
        if not released and not self._loads:
            await _let_go(self._runs)


class Engine:
    """Stores blocks of one source into tiers, and finds and loads them again. Made by :func:`open_engine` only.

    Attributes:
        source: where blocks are stored from.
        tiers: where they are stored, by name, from the fastest to the slowest.
        pipelines: what moves them: the first one leads from the source to the first tier.
        on_load_failure: what a load does about a block that was found and cannot be loaded.
    """

    def __init__(
        self,
        source: Source,
        tiers: Mapping[str, Tier | RemoteTier],
        pipelines: Sequence[Pipeline],
        on_load_failure: OnLoadFailure,
    ) -> None:
        self.source = source
        self.tiers = tiers
        self.pipelines = pipelines
        self.on_load_failure = on_load_failure
        self._places = list(tiers.items())
        self._lookups = self._asked = self._hit = self._loads = self._loaded = 0
        self._load_failures: dict[str, int] = {}
        self._lookup_failures: dict[str, int] = {}
        self._live_hits: dict[Hit, None] = {}

    def __repr__(self) -> str:
        return f"<Engine: {self.source!r} to {', '.join(self.tiers)}>"

    # --- down -----------------------------------------------------------------------------------------------------

    async def store(self, blocks: Blocks, *, precondition: PreconditionLike) -> TransferHandle:
        """Take in blocks of the source, waiting for room; see :meth:`offload.Pipeline.enqueue`.

        The handle settles when they are in the first tier and, with a chain, in the tiers behind it.
        """
        return await self.pipelines[0].enqueue(blocks, precondition=precondition)

    def store_nowait(self, blocks: Blocks, *, precondition: PreconditionLike) -> TransferHandle:
        """Take in blocks of the source, or raise :class:`offload.PipelineFull`."""
        return self.pipelines[0].enqueue_nowait(blocks, precondition=precondition)

    async def drain(self) -> None:
        """The end of input: return when everything stored until now has settled, in every tier it was meant for."""
        for pipeline in self.pipelines:  # the first one waits for its chain; the others may have been fed directly
            await pipeline.drain()

    # --- back -----------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[Key]) -> Hit:
        """Find the longest prefix of ``keys`` over all tiers, each block in the fastest tier that has it, and pin it.

        The prefix may change between tiers any number of times. A tier that raises is left out and named in
        :attr:`Hit.unavailable`. Cancelled, nothing is pinned. Whoever gets the hit releases it:
        ``async with await engine.lookup(keys) as hit``.
        """
        runs: list[_Run] = []
        unavailable: dict[str, Exception] = {}
        found, wanted = 0, len(keys)
        asked_in_vain = 0  # tiers that were asked for the block at `found` and do not have it
        try:
            if not wanted:
                await trio.lowlevel.checkpoint()
            for speed, (name, tier) in cycle(enumerate(self._places)):
                if found == wanted or asked_in_vain == len(self._places):
                    break
                end = await self._end_of_run(speed, keys, found, unavailable) if speed else wanted
                if end == found:
                    continue  # a faster one has it
                asked_in_vain += 1
                if name in unavailable:
                    continue
                try:
                    lease = await tier.pin(keys[found:end] if end - found < wanted else keys)
                except Exception as error:
                    unavailable[name] = error
                    continue
                blocks = len(lease.keys)
                if not blocks:
                    await lease.__aexit__(None, None, None)
                    continue
                runs.append(_Run(name, tier, lease, blocks))
                found += blocks
                asked_in_vain = 0 if found == end else 1
        except BaseException:
            await _let_go(runs)
            raise
        self._lookups += 1
        self._asked += wanted
        self._hit += found
        for name in unavailable:
            _count(self._lookup_failures, name)
        return Hit(keys[:found], runs, unavailable or _NOTHING, self._live_hits)

    async def load(self, hit: Hit, destination: Destination) -> LoadResult:
        """Copy the blocks of a hit to ``destination``, position by position, and verify them.

        Run by run, and no further than the first block that cannot be loaded. Cancelled, it leaves only when no copy
        into ``destination`` is under way any more. A hit that is released meanwhile stays pinned until this is over.

        Raises:
            LoadFailed: a block could not be loaded, and ``on_load_failure`` is ``fail``.
            BlockSizeError: the destination has places of another size.
            ValueError: the hit was released, or the destination is too small.
            Unproven: a copy may still be going on: ``destination`` must not be used again.
        """
        wanted = len(hit.keys)
        if hit.released:
            raise ValueError(f"{hit!r} was released")
        if wanted > len(destination):
            raise ValueError(f"{wanted} blocks do not fit into {len(destination)} places")
        if wanted and destination.block_bytes != self.source.block_bytes:
            raise BlockSizeError(self, self.source.block_bytes, destination.block_bytes)
        outcomes: list[Outcome] = []
        loaded = 0
        hit._loads += 1
        try:
            if not wanted:
                await trio.lowlevel.checkpoint()
            for run in hit._runs:
                answers = await _load(run, loaded, destination)
                outcomes += answers
                good = run.blocks if answers.count(LOADED) == run.blocks else _leading(answers)
                loaded += good
                if good < run.blocks:
                    break
        finally:
            hit._loads -= 1
            if hit._released and not hit._loads:
                await _let_go(hit._runs)
        self._loads += 1
        self._loaded += loaded
        if loaded < wanted:
            self._count_failures(outcomes[loaded:])
            outcomes += [BEHIND_A_GAP] * (wanted - len(outcomes))
            result = LoadResult(loaded, outcomes)
            if self.on_load_failure == "fail":
                first = outcomes[loaded]
                raise LoadFailed(result) from (first.error if isinstance(first, Failed) else None)
            return result
        return LoadResult(loaded, outcomes)

    async def release(self, hit: Hit) -> None:
        """Give back what a hit holds. Idempotent; it has given it back even when cancelled."""
        await hit._release()
        await trio.lowlevel.checkpoint()

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Forget these keys in all tiers, the fastest first.

        Each answer speaks for all tiers: ``PINNED`` where one of them holds the block (it stays there, and has gone
        from the others), else ``DELETED`` where one had it, else ``MISSING``. Cancelled, some tiers may have forgotten.
        """
        answers = [Deletion.MISSING] * len(keys)
        for tier in self.tiers.values():
            for position, answer in enumerate(await tier.delete(keys)):
                if answer is Deletion.PINNED or answers[position] is Deletion.MISSING:
                    answers[position] = answer
        return answers

    def statistics(self) -> EngineStatistics:
        """An immutable snapshot."""
        return EngineStatistics(
            pipelines={pipeline.name: pipeline.statistics() for pipeline in self.pipelines},
            tiers={name: tier.statistics() for name, tier in self.tiers.items()},
            lookups=self._lookups,
            asked_blocks=self._asked,
            hit_blocks=self._hit,
            loads=self._loads,
            loaded_blocks=self._loaded,
            load_failures=dict(self._load_failures),
            lookup_failures=dict(self._lookup_failures),
            open_hits=len(self._live_hits),
        )

    async def _release_forgotten(self) -> None:
        """The end of the engine is the end of its hits."""
        forgotten = list(self._live_hits)
        if forgotten:
            _log.warning("%d hits were never released, among them %r", len(forgotten), forgotten[0])
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LONGEST_RELEASE):
            for hit in forgotten:
                try:
                    await hit._release()
                except Exception:
                    _log.exception("%r could not be released", hit)

    async def _end_of_run(self, speed: int, keys: Sequence[Key], found: int, unavailable: dict[str, Exception]) -> int:
        """Where a run in this tier ends at the latest: at the first block from ``found`` on that a faster tier has."""
        rest = keys[found:]
        faster: set[Key] = set()
        for name, tier in self._places[:speed]:
            if name not in unavailable:
                faster |= await self._contained(name, tier, rest, unavailable)
        return next((found + at for at, key in enumerate(rest) if key in faster), len(keys)) if faster else len(keys)

    async def _contained(
        self, name: str, tier: Tier | RemoteTier, keys: Sequence[Key], unavailable: dict[str, Exception]
    ) -> AbstractSet[Key]:
        """What a faster tier has of these. One that must be asked, and does not answer, is left out from here on."""
        if not iscoroutinefunction(tier.contains):
            found: Any = tier.contains(keys)
            return found  # type: ignore[no-any-return]
        try:
            return await tier.contains(keys)  # type: ignore[no-any-return]
        except Exception as error:
            unavailable[name] = error
            return frozenset()

    def _count_failures(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Missed):
                _count(self._load_failures, outcome.reason)
            elif isinstance(outcome, Failed):
                _count(self._load_failures, "failed")


def open_engine(
    source: Source,
    tiers: Sequence[Tier | RemoteTier],
    *,
    policies: Sequence[Policy | AsyncPolicy] | None = None,
    config: PipelineConfig | None = None,
    chain: bool = True,
    instruments: Sequence[Instrument | object] = (),
    on_load_failure: OnLoadFailure = "miss",
) -> AbstractAsyncContextManager[Engine]:
    """Join tiers by pipelines, for the length of an ``async with`` block.

    A pipeline leads from the source to the first tier and, with ``chain``, from each tier that can be read from as a
    :class:`~backends.abc.Source` to the next one, which is fed everything that is stored before it. A tier that no
    pipeline leads to is only read. Leaving the block closes all of them, the first one first, as
    :func:`offload.open_pipeline` says; to have everything arrive, ``await engine.drain()`` before.

    Args:
        source: where the blocks are that an inference engine's forward pass writes.
        tiers: from the fastest to the slowest; all of the source's block size. One that is an async context manager, as
            :class:`backends.maru.MaruTier`, is entered for as long.
        policies: what may leave the source; by default what the first tier does not have yet. Behind it, a tier is
            offered what it does not have.
        config: the knobs of every pipeline.
        chain: feed what one tier has stored to the next.
        instruments: observers of every pipeline.
        on_load_failure: what a load does about a block that was found and cannot be loaded.

    Raises:
        ValueError: no tier, one twice, or the source as a tier.
        BlockSizeError: a tier holds blocks of another size than the source.
    """
    if not tiers:
        raise ValueError("an engine needs at least one tier")
    if len({id(place) for place in (source, *tiers)}) != len(tiers) + 1:
        raise ValueError(f"the source and the tiers must be different places: {source!r}, {list(tiers)!r}")
    if on_load_failure not in ("miss", "fail"):
        raise ValueError(f"on_load_failure = {on_load_failure!r}: must be miss or fail")
    for tier in tiers:
        size: int = getattr(tier, "block_bytes", 0)  # 0: any, so far
        if size and size != source.block_bytes:
            raise BlockSizeError(tier, size, source.block_bytes)
    return _open(source, _named(tiers), policies, config, chain, instruments, on_load_failure)


@asynccontextmanager
async def _open(
    source: Source,
    tiers: dict[str, Tier | RemoteTier],
    policies: Sequence[Policy | AsyncPolicy] | None,
    config: PipelineConfig | None,
    chain: bool,
    instruments: Sequence[Instrument | object],
    on_load_failure: OnLoadFailure,
) -> AsyncIterator[Engine]:
    places = list(tiers.items())
    pipelines: list[Pipeline] = []
    async with AsyncExitStack() as stack:
        for tier in tiers.values():  # first in, last out: pipelines and hits go before the places they are of
            if hasattr(type(tier), "__aenter__"):
                await stack.enter_async_context(tier)  # type: ignore[arg-type]
        for at in range(_reach(places) if chain else 0, -1, -1):  # a route is opened before what leads to it
            name, tier = places[at]
            above = places[at - 1][1] if at else source
            assert isinstance(above, Source)
            opened = open_pipeline(
                above,
                tier,
                policies=policies if at == 0 and policies is not None else [presence_filter(tier)],
                config=config,
                chain=pipelines[:1],
                instruments=instruments,
                name=name,
            )
            pipelines.insert(0, await stack.enter_async_context(opened))
        engine = Engine(source, tiers, pipelines, on_load_failure)
        stack.push_async_callback(engine._release_forgotten)  # called first, and also when the block is cancelled
        yield engine


def presence_filter(tier: Tier | RemoteTier) -> Policy | AsyncPolicy:
    """What a tier has already stays out of it."""
    remote: Any = tier
    return RemotePresenceFilter(remote) if iscoroutinefunction(tier.contains) else PresenceFilter(remote)


def _reach(places: Sequence[tuple[str, Tier | RemoteTier]]) -> int:
    """The last tier that can be reached from the first by going from source to source."""
    at = 0
    while at + 1 < len(places) and isinstance(places[at][1], Source) and hasattr(places[at][1], "weak"):
        at += 1
    return at


def _named(tiers: Sequence[Tier | RemoteTier]) -> dict[str, Tier | RemoteTier]:
    """A name of its own for each tier: the one it has, or its type's."""
    named: dict[str, Tier | RemoteTier] = {}
    for tier in tiers:
        name = stem = str(getattr(tier, "name", "") or type(tier).__name__.lower())
        number = 1
        while name in named:
            number += 1
            name = f"{stem}-{number}"
        named[name] = tier
    return named


async def _let_go(runs: Sequence[_Run]) -> None:
    """Release all leases, whatever one of them raises. Leaving a lease releases it by contract, also when cancelled."""
    for at, run in enumerate(runs):
        try:
            await run.lease.__aexit__(None, None, None)
        except BaseException:
            await _let_go(runs[at + 1 :])
            raise


async def _load(run: _Run, start: int, destination: Destination) -> Sequence[Outcome]:
    """Load one run into the places from ``start`` on; an ordinary error is every block's outcome."""
    whole = start == 0 and run.blocks == len(destination)
    try:
        answers = await run.tier.load(run.lease, destination if whole else _Part(destination, start, run.blocks))
        if len(answers) != run.blocks:
            raise RuntimeError(f"{run.tier!r} answered {len(answers)} outcomes for {run.blocks} blocks")
    except Unproven:
        raise
    except Exception as error:
        return [Failed(error)] * run.blocks
    return answers


def _leading(outcomes: Sequence[Outcome]) -> int:
    """How many blocks are loaded before the first that is not."""
    return next(at for at, outcome in enumerate(outcomes) if outcome != LOADED)


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


class _Part:
    """Some neighbouring places of a destination."""

    __slots__ = ("_n", "_start", "_whole")

    def __init__(self, whole: Destination, start: int, n: int) -> None:
        self._whole = whole
        self._start = start
        self._n = n

    def __len__(self) -> int:
        return self._n

    @property
    def block_bytes(self) -> int:
        return self._whole.block_bytes

    def views(self) -> Pages | None:
        views = self._whole.views()
        return None if views is None else views.part(self._start, self._start + self._n)

    def copy_in(self, start: int, pages: Pages) -> None:
        self._whole.copy_in(self._start + start, pages)
