"""The stories of a pipeline's containers: their stages, with times.

    enqueued -> admission, awaiting, batching, transfer, copy, settlement -> settled

An exporter of traces derives from :class:`Stories`. It keeps an object of its own for each container, such as a row of a
picture or a span, and gets it back with the story when the container has settled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from .._pipeline.container import OffloadBatch, OffloadContainer

Kept = TypeVar("Kept")
"""The exporter's own object for a container."""
Mark: TypeAlias = tuple[str, float]
"""A stage, and the time at which it was entered."""


class Stories(ABC, Generic[Kept]):
    """The hooks of one pipeline, as the stories of its containers.

    Args:
        clock: returns the time; called once for each stage.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock: Callable[[], float] = clock
        self.inside: dict[OffloadContainer, tuple[Kept, list[Mark]]] = {}
        """The containers that have not settled."""

    @abstractmethod
    def begin(self, container: OffloadContainer, now: float) -> Kept | None:
        """Return the exporter's object for a new container.

        ``None``: the container is not followed.
        """

    @abstractmethod
    def end(self, container: OffloadContainer, kept: Kept, marks: Sequence[Mark]) -> None:
        """Export a container that has settled. The last mark is its end."""

    def enqueued(self, container: OffloadContainer) -> None:
        """Begin the story of a container."""
        now = self.clock()
        kept = self.begin(container, now)
        if kept is not None:
            self.inside[container] = kept, [("admission", now)]

    def awaiting(self, container: OffloadContainer) -> None:
        """Note that the container's policies have answered."""
        self._enter("awaiting", [container])

    def batching(self, container: OffloadContainer) -> None:
        """Note that the container's precondition holds."""
        self._enter("batching", [container])

    def transfer(self, batch: OffloadBatch) -> None:
        """Note that a slot has taken the batch."""
        self._enter("transfer", batch.containers)

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Note that the copy has begun."""
        self._enter("copy", batch.containers)

    def xfer_end(self, batch: OffloadBatch) -> None:
        """Note that the copy is over."""
        self._enter("settlement", batch.containers)

    def settled(self, container: OffloadContainer) -> None:
        """End the story of a container."""
        inside = self.inside.pop(container, None)
        if inside is not None:
            kept, marks = inside
            self.end(container, kept, [*marks, ("settled", self.clock())])

    def _enter(self, stage: str, containers: Sequence[OffloadContainer]) -> None:
        now = self.clock()
        for container in containers:
            inside = self.inside.get(container)  # None: it came before this instrument did
            if inside is not None:
                inside[1].append((stage, now))


def counts_of(container: OffloadContainer) -> dict[str, int]:
    """Return how many blocks a settled container had, and how they ended."""
    return {
        "blocks": len(container.blocks.keys),
        "completed": len(container.completed),
        "filtered": len(container.filtered),
        "failed": len(container.failed),
        "evicted": len(container.evicted),
    }
