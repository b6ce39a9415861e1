"""The opening of a pipeline for the length of a block.

It has the nursery of the pipeline, and ends it, whatever ends the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import cast

import trio

from backends.abc import Source, Tier, TransferExecutor
from maru.exception_groups import raise_unwrapped

from .._config import PipelineConfig
from .._instruments import attach
from ..abc import AsyncPolicy, Instrument, Policy, Watcher
from .marks import place_of
from .pipeline import Pipeline
from .priority import LoadPriority


class _OpenPipeline:
    """The lifetime of a pipeline, as an async context manager."""

    def __init__(self, pipeline: Pipeline, watchers: Sequence[Watcher] = ()) -> None:
        self._pipeline = pipeline
        self._watchers = watchers
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] = trio.open_nursery()
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Pipeline:
        self._nursery = nursery = await self._nursery_manager.__aenter__()
        try:
            # Shielded: if a start is cancelled, nursery.start waits for the end of its task, and ours does not end by
            # that.
            with trio.CancelScope(shield=True):
                await nursery.start(self._pipeline.run)
            attach(self._watchers, self._pipeline)
        except BaseException as error:
            self._pipeline.stop()
            await self._leave(error)
            raise
        return self._pipeline

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            await self._pipeline.aclose()
        except BaseException as cut_short:
            # Ctrl-C, while it drained: the remaining containers end now, and no nursery stays open after it.
            self._pipeline.stop()
            await self._leave(cut_short)
            raise
        self._pipeline.stop()
        return await self._leave(error)

    async def _leave(self, error: BaseException | None) -> bool:
        """End the nursery.

        An error of the body leaves as it came; an error of the stages is not wrapped in a group of one.
        """
        nursery, self._nursery = self._nursery, None
        assert nursery is not None
        if not nursery.cancel_scope.cancel_called:
            # The body was not cancelled from in here: its error leaves as it is, not in the nursery's group.
            await self._nursery_manager.__aexit__(None, None, None)
            return False
        with raise_unwrapped():
            kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
            return bool(await self._nursery_manager.__aexit__(kind, error, trace))


def open_pipeline(
    source: Source | Tier,
    destination: TransferExecutor,
    *,
    policies: Sequence[Policy | AsyncPolicy] = (),
    config: PipelineConfig | None = None,
    chain: Sequence[Pipeline] = (),
    instruments: Sequence[Instrument | object] = (),
    name: str = "",
    load_priority: LoadPriority | None = None,
    optional_chain: Sequence[Pipeline] = (),
) -> AbstractAsyncContextManager[Pipeline]:
    """Open a pipeline from a source to a destination.

    It is open for the length of an ``async with`` block. Leaving the block closes it (see :meth:`Pipeline.aclose`):
    containers that are not committed end as FAILED, copies under way drain, and no task, thread or reservation is left.
    ``await pipeline.drain()`` before that stores everything. Cancelling the scope around the block does the same,
    within ``drain_timeout``.

    Args:
        source: the place from which blocks are read; a tier stands for its :attr:`~backends.abc.Tier.source`. A page
            store is read only by a chain, or by :meth:`offload.Engine.pass_on`.
        destination: the place to which blocks are written.
        policies: called in order, once per container; all must let a block pass.
        config: the settings; the defaults are those of :class:`offload.PipelineConfig`.
        chain: pipelines out of ``destination`` that copy on everything stored there; opened before, closed after.
        instruments: observers; see :class:`offload.abc.Instrument` and :class:`offload.abc.Watcher`.
        name: its name in statistics, logs and the results of a chain; by default the destination's.
        load_priority: loads that go before its copies; shared by all pipelines that compete with the same loads.
        optional_chain: like ``chain``, but no store waits for these: a store has ended when the destination has it, and
            the results of these pipelines come from ``await handle.wait_routes()``. They take as much as they have room
            for (``route_share``), and drop and count the rest.

    Raises:
        TypeError: ``source`` is no source of blocks, or ``destination`` no :class:`backends.abc.TransferExecutor`.
        ValueError: a pipeline of ``chain`` does not start at ``destination``, or two of them have one name.
    """
    if not isinstance(destination, TransferExecutor):
        raise TypeError(f"the destination is {destination!r}, not a backends.abc.TransferExecutor")
    names = [route.name for route in (*chain, *optional_chain)]
    if len(set(names)) < len(names):
        raise ValueError(f"the pipelines of a chain need names of their own, not {names}: give each a name=")
    for route in (*chain, *optional_chain):
        if place_of(route.source) is not place_of(cast("object", destination)):
            raise ValueError(f"{route!r} starts at {route.source!r}, not at the destination, {destination!r}")
    name = name or destination.name or type(destination).__name__.lower()
    config = config or PipelineConfig()
    hooked = [one for one in instruments if not isinstance(one, Watcher)]
    watchers = [one for one in instruments if isinstance(one, Watcher)]
    pipeline = Pipeline(source, destination, policies, config, chain, hooked, name, load_priority, optional_chain)
    return _OpenPipeline(pipeline, watchers)
