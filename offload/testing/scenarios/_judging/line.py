"""The line for a batch of our own pipelines: first in, first out, and no batch that is larger than allowed (S36, S38). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from offload import OffloadContainer, Pipeline


class Line:
    """Who is ready for a batch, in each pipeline, in the order in which they became it."""

    def __init__(self) -> None:
        self._ready: dict[Pipeline, dict[OffloadContainer, None]] = {}

    def joins(self, pipeline: Pipeline, container: OffloadContainer) -> None:
        """It is ready now."""
        self._ready.setdefault(pipeline, {})[container] = None

    def gone(self, pipeline: Pipeline, container: OffloadContainer) -> None:
        """It has settled, wherever it stood."""
        self._ready.get(pipeline, {}).pop(container, None)

    def leave(self, pipeline: Pipeline, batch: Sequence[OffloadContainer]) -> Iterator[str]:
        """These leave together. What is wrong with that, each with its rule."""
        ready = self._ready.get(pipeline, {})
        # One that was given back, as its neighbours were too large for the tier, has left the line before: it goes first.
        leaving = [container for container in batch if container in ready]
        first = list(islice(ready, len(leaving)))
        if first != leaving:
            late = [container.number for container in first if container not in leaving] or [first[0].number]
            yield f"S38: {pipeline.name}#{leaving[-1].number} leaves for a batch before {late}, ready earlier"
        for container in leaving:
            del ready[container]
        blocks, most = sum(len(container.keys) for container in batch), pipeline.config.batch_config.max_batch_size
        if blocks > most and len(batch) > 1:
            yield f"S36: a batch of {pipeline.name} has {blocks} blocks of {len(batch)} containers, and {most} are allowed"
