"""Our own pipelines as a system under test: real ones, over tiers whose copies go through the world.

An instrument in each pipeline tells the ledger, then the world, what is about to happen. Each pipeline calls its containers
by numbers; who is who is known here, also in the pipelines of a chain, where nobody has stored them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from backends import CapacityError, MissingKeys
from backends.abc import (
    LOADED,
    Blocks,
    Deletion,
    Key,
)
from backends.pages import new_pages
from backends.slots import PagesDestination
from offload import NO_WAIT, Pipeline, PipelineClosed, PipelineFull, open_pipeline
from offload._container import OffloadBatch, OffloadContainer
from offload.instruments import Every

from .._contract import Refused, System, Ticket
from .._files.knobs_of import config_of
from .._house import first_destination
from .._judging.ledger import Ledger
from .._judging.leftovers import at_rest
from .._names import expand
from .._world.policies import made_of
from .our_tiers import Tier as Tier

if TYPE_CHECKING:
    from .._contract import World
    from .._world.places import Place
    from .._world.world import VirtualWorld


class _Eye(Every):
    """Tells the ledger, then the world."""

    def __init__(self, ours: Ours, pipeline: Pipeline) -> None:
        self._ours = ours
        self._pipeline = pipeline

    def saw(self, hook: str, subject: OffloadContainer | OffloadBatch | Sequence[OffloadContainer]) -> None:
        ours, world, pipeline = self._ours, self._ours.world, self._pipeline
        try:
            ours.ledger.saw(pipeline, hook, subject)
            if isinstance(subject, OffloadContainer):
                labels: Sequence[str] = (ours.label_of(pipeline, subject),)
                if hook == "admission":
                    world.this_is(labels[0])
            else:
                containers = subject.containers if isinstance(subject, OffloadBatch) else subject
                labels = [ours.label_of(pipeline, container) for container in containers]
                if hook == "xfer_start":
                    cast("Tier", pipeline.destination).leaving = labels
            world.hook(hook, labels, pipeline.name)
        except Exception as error:
            world.crashed(error, f"the harness, at {hook},")


class Ours:
    """Our pipelines, behind the contract."""

    def __init__(self, world: VirtualWorld) -> None:
        self.world = world
        self.ledger = world.ledger = Ledger()
        self.ledger.jumps = world.jumps
        self.tiers = {name: self._tier(place) for name, place in world.places.items()}
        self.pipelines: dict[str, Pipeline] = {}
        self._filled = {spec.to for spec in world.pipelines.values()}
        self._labels: dict[OffloadContainer, str] = {}
        self._followed: Counter[tuple[str, str]] = Counter()
        self._external: dict[Key, int] = {}
        world.told = self.ended
        for name, tier in self.tiers.items():
            tier.place.content = tier
            self.ledger.damaged[tier] = tier.flipped
            tier.fill([key.encode() for key in expand(world.tiers[name].holds)])

    def __repr__(self) -> str:
        return f"<our pipelines: {', '.join(self.pipelines)}>"

    def _tier(self, place: Place) -> Tier:
        return Tier(place)

    # -- who is who ----------------------------------------------------------------------------------------------------

    def label_of(self, pipeline: Pipeline, container: OffloadContainer) -> str:
        """What the scenario calls a container; in the pipelines of a chain that is the one it was stored as."""
        label = self._labels.get(container)
        if label is None:
            # It is being taken in by this very task, or it comes down a chain.
            label = (
                self.world.label if self.world.label in self.world.storing else self._from_above(pipeline, container)
            )
            self._labels[container] = label or f"{pipeline.name}#{container.number}"
            return self._labels[container]
        return label

    def _from_above(self, pipeline: Pipeline, container: OffloadContainer) -> str:
        """The container whose blocks these are: the first one of a pipeline above that stored just these."""
        keys = tuple(container.blocks.keys)
        for other, label in list(self._labels.items()):
            if tuple(other.completed) == keys and not other.status.terminal:
                route = (label, pipeline.name)
                if not self._followed[route]:
                    self._followed[route] += 1
                    return label
        return ""

    # -- the contract --------------------------------------------------------------------------------------------------

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> Ticket:
        """Take in a container as the scenario has it: its kind, its pipeline, its precondition."""
        world = self.world
        parcel = world.parcels[label]
        store = parcel.store
        pipeline = self.pipelines[parcel.pipeline]
        precondition = NO_WAIT if parcel.after is None else parcel.after
        source = cast("Tier", pipeline.source)
        world.this_is(label)
        world.storing.add(label)
        try:
            blocks = self._blocks(source, keys, store.kind)
            if store.kind == "external":
                for key in keys:
                    self._external[key] = self._external.get(key, 0) + 1
            if store.how == "wait":
                handle = await pipeline.enqueue(blocks, precondition=precondition)
            elif world.dice.chance(0.5, "many", label):
                (handle,) = pipeline.enqueue_many([blocks], precondition=precondition)
            else:
                handle = pipeline.enqueue_nowait(blocks, precondition=precondition)
        except (PipelineFull, PipelineClosed, CapacityError, MissingKeys, ValueError) as error:
            if isinstance(error, PipelineClosed) and world.closed_at is None and not world.stuck:
                self.ledger.wrong(f"I9: {label} was refused by a pipeline that nobody closed")
            self._let_go(parcel.keys, store.kind)
            raise Refused(type(error).__name__) from error
        except BaseException:
            self._let_go(parcel.keys, store.kind)
            raise
        finally:
            world.storing.discard(label)
        # What ends within the call, as an empty one does, may be what closed the pipeline: an observer of it may.
        if pipeline._closed and not handle.status.terminal:
            self.ledger.wrong(f"S48: {label} got a handle from a closed pipeline")
        self._labels[handle._container] = label
        return self.ledger.took(pipeline, handle)

    def _blocks(self, source: Tier, keys: Sequence[Key], kind: str) -> Blocks:
        if source.name not in self._filled:  # an engine stores what it has just computed
            source.fill([key for key in keys if key not in source.pool._slot_of])
        if kind == "external":
            return source.external(source.pool.slots(keys), keys)
        if kind == "strong":
            blocks = source.strong(keys)
            self.ledger.strong.append(blocks)
            return blocks
        return source.weak(keys)

    def ended(self, label: str) -> None:
        """The engine need not keep the blocks of this container alive any more."""
        parcel = self.world.parcels[label]
        self._let_go(parcel.keys, parcel.store.kind)

    def _let_go(self, keys: Sequence[Key], kind: str) -> None:
        for key in keys if kind == "external" else ():
            if self._external.get(key, 0) <= 1:
                self._external.pop(key, None)
            else:
                self._external[key] -= 1

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Load from the destination of the first pipeline."""
        return await self.load_from(first_destination(self.world.scenario), keys)

    async def load_from(self, tier_name: str, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Load from a tier."""
        tier = self.tiers[tier_name]
        found: dict[Key, bytes | None] = dict.fromkeys(keys)
        todo = list(keys)
        while todo:
            async with await tier.pin(todo) as lease:
                held = list(lease.keys)
                if held:
                    self.ledger.reading[tier].append(held)
                    try:
                        pages = new_pages(len(held), tier.block_bytes)
                        outcomes = await tier.load(lease, PagesDestination(pages))
                    finally:
                        self.ledger.reading[tier].remove(held)
                    for key, page, outcome in zip(held, pages, outcomes, strict=True):
                        found[key] = bytes(page) if outcome == LOADED else None
            todo = todo[len(held) + 1 :]  # what comes after the prefix that is there is not
        return found

    def audit(self) -> Mapping[str, int]:
        """What is still held."""
        held: Counter[str] = Counter()
        for pipeline in self.pipelines.values():
            for what, amount in at_rest(pipeline, quarantined=False).items():
                held[f"{pipeline.name}: {what}"] += amount
        held["locks"] = self.world.locks
        return dict(held)

    def close_now(self) -> None:
        """Close the doors of the pipelines that nobody leads to; then drain everything, first to last."""
        led_to = {route for spec in self.world.pipelines.values() for route in spec.chain}
        for name, pipeline in self.pipelines.items():
            if name not in led_to:
                pipeline._close_door()
        self.world.background.start_soon(self._close)

    async def _close(self) -> None:
        for pipeline in reversed(list(self.pipelines.values())):
            await pipeline.aclose()

    async def drain(self, pipeline: str) -> None:
        """Wait until everything that is inside has settled."""
        await self.pipelines[pipeline].drain()

    def evict(self, tier: str, keys: Sequence[Key], again: bool) -> Sequence[Key]:
        """Take keys out of a source, but for those that the engine keeps alive. Returns those that were there."""
        source = self.tiers[tier]
        keys = [key for key in keys if key not in self._external]
        answers = source.pool.delete(keys)
        gone = [key for key, answer in zip(keys, answers, strict=True) if answer is Deletion.DELETED]
        if again:  # but where somebody waited for the room
            source.fill(gone[: source.free])
        return gone

    async def delete(self, tier: str, keys: Sequence[Key]) -> None:
        """Forget keys."""
        await self.tiers[tier].delete(keys)

    def found(self, tier: str) -> AbstractSet[Key]:
        """The keys that can be found in a tier."""
        return self.tiers[tier].pool._slot_of.keys()

    def release(self, pipeline: str) -> None:
        """Release what is in quarantine."""
        for entry in self.pipelines[pipeline].quarantine:
            entry.release()

    def statistics(self, pipeline: str) -> Any:
        """Figures of a pipeline."""
        return self.pipelines[pipeline].statistics()


@asynccontextmanager
async def open_ours(world: World) -> AsyncIterator[System]:
    """Open the pipelines of the scenario, those that others lead to first."""
    async with opened(Ours(cast("VirtualWorld", world))) as ours:
        yield ours


@asynccontextmanager
async def opened(ours: Ours) -> AsyncIterator[Ours]:
    """Open all of its pipelines."""
    async with AsyncExitStack() as stack:
        for name in ours.world.pipelines:
            await _open(ours, stack, name)
        yield ours


async def _open(ours: Ours, stack: AsyncExitStack, name: str) -> Pipeline:
    if name in ours.pipelines:
        return ours.pipelines[name]
    world = ours.world
    spec = world.pipelines[name]
    chain = [await _open(ours, stack, route) for route in spec.chain]
    pipeline = await stack.enter_async_context(
        open_pipeline(
            ours.tiers[spec.source],
            ours.tiers[spec.to],
            policies=made_of(world, name, lambda tier, keys: ours.tiers[tier].contains(keys)),
            config=config_of(spec),
            chain=chain,
            name=name,
        )
    )
    ours.pipelines[name] = pipeline
    ours.ledger.know(pipeline)
    pipeline.add_instrument(_Eye(ours, pipeline))
    return pipeline
