"""Our own pipelines as a system under test, over the world's tiers.

The pipelines are real ones; the copies of their tiers go through the world. An instrument in each pipeline reports
imminent events to the ledger, then to the world. Each pipeline identifies its containers by numbers; this module maps
them to labels, also in the pipelines of a chain, into which no user stored them.
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
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from offload import NO_WAIT, Pipeline, PipelineClosed, PipelineFull, TransferHandle, open_pipeline
from offload._pipeline.container import OffloadBatch, OffloadContainer
from offload.abc import AsyncPolicy, Policy
from offload.instruments import Every

from ._fields import config_of
from ._invariants import at_rest, judge_share
from ._ledger import Ledger
from ._names import expand, first_destination, routes_of
from ._policies import make_policies
from ._systems import Refused, System, Ticket
from ._virtual_tier import VirtualTier

if TYPE_CHECKING:
    from ._systems import World
    from ._virtual_tier import TierModel
    from ._world import Request, VirtualWorld


class _HookInstrument(Every):
    """Instrument that notifies the ledger, then the world."""

    def __init__(self, ours: PipelineSystem, pipeline: Pipeline) -> None:
        self._system = ours
        self._pipeline = pipeline

    def saw(self, hook: str, subject: OffloadContainer | OffloadBatch | Sequence[OffloadContainer]) -> None:
        ours, world, pipeline = self._system, self._system.world, self._pipeline
        try:
            ours.ledger.saw(pipeline, hook, subject)
            if pipeline.name in ours._optional:
                judge_share(world, pipeline)
            if isinstance(subject, OffloadContainer):
                labels: Sequence[str] = (ours.label_of(pipeline, subject),)
                if hook == "admission":
                    world.this_is(labels[0])
            else:
                containers = subject.containers if isinstance(subject, OffloadBatch) else subject
                labels = [ours.label_of(pipeline, container) for container in containers]
                if hook == "xfer_start":
                    cast("VirtualTier", pipeline.destination).leaving = labels
            world.hook(hook, labels, pipeline.name)
        except Exception as error:
            world.crashed(error, f"the harness, at {hook},")


class PipelineSystem:
    """Our pipelines as a system under test."""

    def __init__(self, world: VirtualWorld) -> None:
        self.world = world
        self.ledger = world.ledger = Ledger()
        self.ledger.jumps = world.jumps
        self.tiers = {name: self._tier(model) for name, model in world.tier_models.items()}
        self.pipelines: dict[str, Pipeline] = {}
        self._filled = {spec.to for spec in world.pipelines.values()}
        self._optional = {route for spec in world.pipelines.values() for route in spec.optional_chain}
        self._labels: dict[OffloadContainer, str] = {}
        self._stored: dict[Blocks, str] = {}
        """Label of the container that has these blocks."""
        self._followed: Counter[tuple[str, str]] = Counter()
        self._external: dict[Key, int] = {}
        world.told = self.ended
        for name, tier in self.tiers.items():
            tier.model.content = tier
            self.ledger.damaged[tier] = tier.flipped
            tier.fill([key.encode() for key in expand(world.tiers[name].holds)])

    def __repr__(self) -> str:
        return f"<our pipelines: {', '.join(self.pipelines)}>"

    def _tier(self, model: TierModel) -> VirtualTier:
        return VirtualTier(model)

    def policies_of(self, pipeline: str) -> list[Policy | AsyncPolicy]:
        """Return the policies of a pipeline."""
        return make_policies(self.world, pipeline, lambda tier, keys: self.tiers[tier].contains_nowait(keys))

    # -- labels of containers ------------------------------------------------------------------------------------------

    def label_of(self, pipeline: Pipeline, container: OffloadContainer) -> str:
        """Return the scenario's label of a container.

        In the pipelines of a chain, it is the label under which the container was stored.
        """
        label = self._labels.get(container)
        if label is None:
            label = self._stored.get(container.blocks) or self._from_above(pipeline, container)
            label = self._labels[container] = label or f"{pipeline.name}#{container.number}"
        return label

    def _from_above(self, pipeline: Pipeline, container: OffloadContainer) -> str:
        """Return the label of the container above that stored these blocks.

        The first one of a pipeline above that stored just these.
        """
        if pipeline.name in self._optional:  # an optional route ends after the store, in parts
            return ""
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
        """Store a container with its kind, pipeline and precondition."""
        (ticket,) = await self._take_in([label])
        return ticket

    async def store_many(
        self, many: Mapping[str, Sequence[Key]], after: Callable[[], Awaitable[object]] | None
    ) -> Sequence[Ticket]:
        """Store several containers in one call."""
        return await self._take_in(list(many))

    async def _take_in(self, labels: Sequence[str]) -> Sequence[TransferHandle]:
        world, requests = self.world, [self.world.requests[label] for label in labels]
        pipeline = self.pipelines[requests[0].pipeline]
        mine: list[Blocks] = []
        try:
            for request in requests:
                self._keep_alive(request)
            for request in requests:
                mine.append(self._blocks(cast("VirtualTier", pipeline.source), request))
            given, mine = mine, []  # from here on the pipeline owns them, also when it raises
            handles = await _enqueue(pipeline, given, requests[0])
        except BaseException as error:
            for blocks in mine:
                blocks.release()
            for label in labels:
                self.ended(label)
            if isinstance(error, PipelineClosed) and world.closed_at is None and not world.stuck:
                self.ledger.wrong(f"I9: {', '.join(labels)} was refused by a pipeline that nobody closed")
            if isinstance(error, PipelineFull | PipelineClosed | CapacityError | MissingKeys | ValueError):
                raise Refused(type(error).__name__) from error
            raise
        for label, handle in zip(labels, handles, strict=True):
            if self.label_of(pipeline, handle._container) != label:
                self.ledger.wrong(f"I9: {label} got the handle of {self.label_of(pipeline, handle._container)}")
            # A container that ends within the call, as an empty one does, may have closed the pipeline: an observer may
            # do that.
            if pipeline._closed and not handle.status.terminal:
                self.ledger.wrong(f"S48: {label} got a handle from a closed pipeline")
            self.ledger.took(pipeline, handle)
        return handles

    def _blocks(self, source: VirtualTier, request: Request) -> Blocks:
        keys = request.keys
        if source.name not in self._filled:  # an engine stores blocks that it has just computed
            source.fill([key for key in keys if key not in source.pool._slot_of])
        blocks: Blocks
        if request.store.kind == "external":
            blocks = source.external(source.pool.slots(keys), keys)
        elif request.store.kind == "strong":
            blocks = source.strong(keys)
            self.ledger.strong.append(blocks)
        else:
            blocks = source.weak(keys)
        self._stored[blocks] = request.label
        return blocks

    def _keep_alive(self, request: Request) -> None:
        """Keep an external container's blocks alive until :meth:`ended`.

        The engine does that.
        """
        for key in request.keys if request.store.kind == "external" else ():
            self._external[key] = self._external.get(key, 0) + 1

    def ended(self, label: str) -> None:
        """Let the engine drop the blocks of this container."""
        request = self.world.requests[label]
        for key in request.keys if request.store.kind == "external" else ():
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
            todo = todo[len(held) + 1 :]  # keys after the present prefix are skipped
        return found

    @asynccontextmanager
    async def hold(
        self, tier_name: str, keys: Sequence[Key]
    ) -> AsyncIterator[Callable[[], Awaitable[Mapping[Key, bytes]]]]:
        """Hold the present prefix of these keys, to be read repeatedly."""
        tier = self.tiers[tier_name]
        async with await tier.pin(keys) as lease:
            held = list(lease.keys)
            self.ledger.reading[tier].append(held)

            async def read() -> Mapping[Key, bytes]:
                pages = new_pages(len(held), tier.block_bytes)
                outcomes = await tier.load(lease, PagesDestination(pages)) if held else []
                return {
                    key: bytes(page)
                    for key, page, outcome in zip(held, pages, outcomes, strict=True)
                    if outcome == LOADED
                }

            try:
                yield read
            finally:
                self.ledger.reading[tier].remove(held)

    def audit(self) -> Mapping[str, int]:
        """Return the resources that are still held."""
        held: Counter[str] = Counter()
        for pipeline in self.pipelines.values():
            for what, amount in at_rest(pipeline, quarantined=False).items():
                held[f"{pipeline.name}: {what}"] += amount
        held["locks"] = self.world.locks
        return dict(held)

    def close_now(self) -> None:
        """Close the top pipelines to new containers; then drain all pipelines.

        The top pipelines are those that are no route of a chain; the drain goes from first to last.
        """
        led_to = {route for spec in self.world.pipelines.values() for route in routes_of(spec)}
        for name, pipeline in self.pipelines.items():
            if name not in led_to:
                pipeline._stop_intake()
        self.world.background.start_soon(self._close)

    async def _close(self) -> None:
        for pipeline in reversed(list(self.pipelines.values())):
            await pipeline.aclose()

    async def drain(self, pipeline: str) -> None:
        """Wait until everything inside has settled."""
        await self.pipelines[pipeline].drain()

    def evict(self, tier: str, keys: Sequence[Key], again: bool) -> Sequence[Key]:
        """Take keys out of a source, and return the removed ones.

        Keys that the engine keeps alive stay.
        """
        source = self.tiers[tier]
        keys = [key for key in keys if key not in self._external]
        answers = source.pool.delete(keys)
        gone = [key for key, answer in zip(keys, answers, strict=True) if answer is Deletion.DELETED]
        if again:  # unless another took the room
            source.fill(gone[: source.free])
        return gone

    async def delete(self, tier: str, keys: Sequence[Key]) -> None:
        """Delete keys from a tier."""
        await self.tiers[tier].delete(keys)

    def found(self, tier: str) -> AbstractSet[Key]:
        """Return the keys that can be found in a tier."""
        return self.tiers[tier].pool._slot_of.keys()

    def release(self, pipeline: str) -> None:
        """Release all quarantined entries of a pipeline."""
        for entry in self.pipelines[pipeline].quarantine:
            entry.release()

    def statistics(self, pipeline: str) -> Any:
        """Return the statistics of a pipeline."""
        return self.pipelines[pipeline].statistics()


async def _enqueue(pipeline: Pipeline, many: Sequence[Blocks], request: Request) -> Sequence[TransferHandle]:
    """Enqueue blocks by the method that the scenario names.

    Several are stored alike.
    """
    precondition = NO_WAIT if request.after is None else request.after
    if request.store.how == "many":
        return pipeline.enqueue_many(many, precondition=precondition)
    if request.store.how == "now":
        return [pipeline.enqueue_nowait(many[0], precondition=precondition)]
    return [await pipeline.enqueue(many[0], precondition=precondition)]


@asynccontextmanager
async def open_pipelines(world: World) -> AsyncIterator[System]:
    """Open the pipelines of the scenario, later ones of a chain first.

    :func:`play` uses this factory by default. A factory of yours may wrap it, to add an instrument to each of
    ``pipelines``, by name.
    """
    async with running_pipelines(PipelineSystem(cast("VirtualWorld", world))) as ours:
        yield ours


@asynccontextmanager
async def running_pipelines(ours: PipelineSystem) -> AsyncIterator[PipelineSystem]:
    """Open all pipelines of a system."""
    async with AsyncExitStack() as stack:
        for name in ours.world.pipelines:
            await _open(ours, stack, name)
        yield ours


async def _open(ours: PipelineSystem, stack: AsyncExitStack, name: str) -> Pipeline:
    if name in ours.pipelines:
        return ours.pipelines[name]
    world = ours.world
    spec = world.pipelines[name]
    chain = [await _open(ours, stack, route) for route in spec.chain]
    optional_chain = [await _open(ours, stack, route) for route in spec.optional_chain]
    pipeline = await stack.enter_async_context(
        open_pipeline(
            ours.tiers[spec.source],
            ours.tiers[spec.to],
            policies=ours.policies_of(name),
            config=config_of(spec),
            chain=chain,
            optional_chain=optional_chain,
            name=name,
        )
    )
    ours.pipelines[name] = pipeline
    ours.ledger.know(pipeline)
    pipeline.add_instrument(_HookInstrument(ours, pipeline))
    return pipeline
