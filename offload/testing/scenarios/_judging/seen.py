"""What the ledger knows of one container of ours, and whether its end adds up (I2, I4, I5, I6). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from backends.abc import Key
from offload import OffloadContainer, Pipeline, Progress, Status, TransferHandle


@attrs.define(eq=False)
class Seen:
    """What the ledger knows of one container."""

    container: OffloadContainer
    pipeline: Pipeline
    status: Status = Status.EVALUATING
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """How many blocks passed, and how many ended how, when it was last looked at."""
    route: bool = False
    """It came down a chain, committed from the start."""
    committed: bool = False
    """It was announced by ``post_claim``."""
    copied: Sequence[Key] = ()
    """What the copy started with."""
    over: bool = False
    """The copy is over."""
    settled: int = 0

    @property
    def handle(self) -> TransferHandle:
        """As good as any that enqueue returned, to look with."""
        handle = object.__new__(TransferHandle)
        handle._container = self.container
        return handle

    def __repr__(self) -> str:
        return f"{self.pipeline.name}#{self.container.number}"


def wrong_end(seen: Seen) -> Iterator[str]:
    """What does not add up, each with its rule."""
    container, result = seen.container, seen.handle.result
    if result is None:
        yield f"I2: {seen} never ended: {container.status}"
        return
    if seen.settled != 1:
        yield f"I2: {seen} settled {seen.settled} times"
    ends = (list(result.completed), list(result.filtered), list(result.failed), list(result.evicted))
    known = [key for end in ends for key in end]
    if len(set(known)) != len(known) or not set(known) <= set(container.blocks.keys):
        yield f"I5: {seen}: its blocks did not end once each: {result}"
    completed, filtered, failed, evicted = map(len, ends)
    size = len(container.blocks.keys)
    passed = len(seen.handle.passed_blocks)
    if seen.committed:
        if passed + filtered != size:
            yield f"I6: {seen}: {passed} passed + {filtered} filtered, of {size}"
        if completed + failed + evicted != passed:
            yield f"I6: {seen}: {completed} + {failed} + {evicted} of {passed} that passed: {result}"
        if result.status is Status.CANCELLED:
            yield f"I4: {seen} was cancelled after its commit"
    else:
        if seen.copied or completed or evicted:
            yield f"I4: {seen} was never committed, but {result}"
        if result.status is Status.COMPLETE and filtered != size:
            yield f"I6: {seen} is complete without a commit: {result}"
    if result.status is Status.COMPLETE and (failed or result.error is not None):
        yield f"I5: {seen} is complete, but {result}"
    if result.status is Status.FAILED and not failed and result.error is None:
        yield f"I9: {seen} failed without a cause"
    if seen.handle.progress != Progress(size, passed, filtered, completed, failed, evicted):
        yield f"S56: {seen} ended with {seen.handle.progress}, which is not its result {result}"
