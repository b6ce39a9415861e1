"""The small world in which scenarios of one pipeline are played by hand, and judged by the ledger of the scenarios.

What holds is I1..I9: see :mod:`offload.testing.scenarios._ledger`.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from backends.abc import Blocks, Key
from backends.testing import FakeTier
from offload import NO_WAIT, BatchConfig, CancellationToken, Pipeline, PipelineConfig, TransferHandle, open_pipeline
from offload.testing.scenarios import TICK as TICK
from offload.testing.scenarios._invariants import ContainerHistory as ContainerHistory
from offload.testing.scenarios._invariants import at_rest as at_rest
from offload.testing.scenarios._invariants import tasks_of_the_package as tasks_of_the_package
from offload.testing.scenarios._ledger import Ledger as Ledger


def keys_of(label: str, n: int) -> list[Key]:
    """``a0``, ``a1``, ..."""
    return [f"{label}{i}".encode() for i in range(n)]


# --- the world ----------------------------------------------------------------------------------------------------


def config_of(**knobs: Any) -> PipelineConfig:
    """A configuration from one flat set of knobs. The safety net is far away, so that it hides nothing."""
    batch = {name: knobs.pop(name) for name in ("max_batch_size", "min_batch_size", "flush_interval") if name in knobs}
    batch.setdefault("flush_interval", 10 * TICK)
    batch.setdefault("max_batch_size", min(64, knobs.get("budget_blocks", 64)))
    batch.setdefault("min_batch_size", min(8, batch["max_batch_size"]))
    knobs.setdefault("sweep_interval", 60.0)
    knobs.setdefault("policy_timeout", 100 * TICK)
    return PipelineConfig(batch_config=BatchConfig(**batch), **knobs)


class World:
    """A source, a destination, and what was stored from one into the other."""

    def __init__(self, *, capacity: int = 64, latency: float = 0.0, block_bytes: int = 16) -> None:
        self.source = FakeTier(512, block_bytes)
        self.destination = FakeTier(capacity, block_bytes, latency=latency)
        self.ledger = Ledger()
        self.pipeline: Pipeline = None  # type: ignore[assignment]
        self.handles: dict[str, TransferHandle] = {}

    @property
    def faults(self) -> Any:
        """The dials of the destination."""
        return self.destination.faults

    @property
    def events(self) -> list[tuple[str, tuple[int, ...]]]:
        """What happened, with the numbers of the containers, over all pipelines."""
        return self.ledger.events

    def happened(self, hook: str) -> list[tuple[int, ...]]:
        """The containers of each event of this name."""
        return [numbers for name, numbers in self.events if name == hook]

    # -- storing -------------------------------------------------------------------------------------------------------

    def blocks(self, label: str, n: int = 1, *, kind: str = "weak", keys: Sequence[Key] | None = None) -> Blocks:
        """Blocks of the source, which has them."""
        keys = keys_of(label, n) if keys is None else keys
        self.source.fill(keys)
        if kind == "weak":
            return self.source.weak(keys)
        if kind == "external":
            return self.source.external(self.source.pool.slots(keys), keys)
        blocks = self.source.strong(keys)
        self.ledger.strong.append(blocks)
        return blocks

    def store(
        self,
        label: str,
        n: int = 1,
        *,
        kind: str = "weak",
        precondition: Any = NO_WAIT,
        keys: Any = None,
        cancel_token: CancellationToken | None = None,
    ) -> TransferHandle:
        """Enqueue ``n`` blocks called ``label0``, ``label1``, ... at once."""
        blocks = self.blocks(label, n, kind=kind, keys=keys)
        return self._took(label, self.pipeline.enqueue_nowait(blocks, precondition, cancel_token=cancel_token))

    async def enqueue(
        self,
        label: str,
        n: int = 1,
        *,
        kind: str = "weak",
        precondition: Any = NO_WAIT,
        cancel_token: CancellationToken | None = None,
    ) -> TransferHandle:
        """Enqueue, waiting for room."""
        blocks = self.blocks(label, n, kind=kind)
        return self._took(label, await self.pipeline.enqueue(blocks, precondition, cancel_token=cancel_token))

    def _took(self, label: str, handle: TransferHandle) -> TransferHandle:
        self.handles[label] = handle
        return self.ledger.took(self.pipeline, handle)

    async def stored(self, label: str, n: int = 1, **options: Any) -> Any:
        """Store, and wait for the result."""
        return await self.store(label, n, **options).wait()

    def found(self) -> set[Key]:
        """What is in the destination."""
        return set(self.destination.pool._slot_of)

    def evict(self, *keys: Key) -> None:
        """Take blocks out of the source."""
        self.source.pool.delete(keys)

    # -- watching ------------------------------------------------------------------------------------------------------

    def at(self, hook: str, do: Callable[[Any], object], *, nth: int = 1) -> None:
        """Call ``do`` when this hook is called for the ``nth`` time. What it raises is a violation."""
        calls = 0

        def call(subject: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                try:
                    do(subject)
                except Exception:
                    self.ledger.wrong(traceback.format_exc())

        self.pipeline.add_instrument(SimpleNamespace(**{hook: call}))

    def at_rest(self) -> dict[str, object]:
        """What is still held."""
        return at_rest(self.pipeline)


@asynccontextmanager
async def open_world(
    *,
    policies: Sequence[Any] = (),
    chain: Sequence[Pipeline] = (),
    capacity: int = 64,
    latency: float = 0.0,
    world: World | None = None,
    **knobs: Any,
) -> AsyncIterator[World]:
    """A world with an open pipeline; what happened in it is judged when it has closed."""
    world = world or World(capacity=capacity, latency=latency)
    try:
        async with open_pipeline(
            world.source, world.destination, policies=policies, config=config_of(**knobs), chain=chain, name="main"
        ) as world.pipeline:
            world.ledger.watch(world.pipeline)
            yield world
    finally:
        if not chain:  # the routes are still open: whoever opened them judges
            world.ledger.judge()
