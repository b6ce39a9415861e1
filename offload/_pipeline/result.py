"""What a handle's waiter gets, and how far a container has come: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backends.abc import Key

from .._errors import TransferCancelled, TransferFailed
from .lifecycle import Status


@attrs.frozen
class Progress:
    """How many blocks of one container are where; constant size. Counts only grow, except ``remaining``."""

    total: int
    """Blocks enqueued."""
    passed: int
    """Blocks the policies let through (known once they have run)."""
    filtered: int
    """Blocks kept back by a policy, a pending mark or an overflow."""
    completed: int
    """Blocks that are in the destination."""
    failed: int
    """Blocks whose transfer failed or was rejected."""
    evicted: int
    """Weak blocks that were gone at the upgrade."""

    @property
    def remaining(self) -> int:
        """Blocks of which nothing is known yet."""
        return self.total - self.filtered - self.completed - self.failed - self.evicted


@attrs.frozen
class TransferResult:
    """How one container ended."""

    status: Status
    """COMPLETE, CANCELLED or FAILED (any of its blocks failed, here or on a route of the chain)."""
    completed: Sequence[Key]
    """Blocks that are in the destination now, those that were there before included."""
    filtered: Mapping[Key, str]
    """Blocks kept back, each with the reason: ``present``, ``pending``, ``timeout``, ``overflow``, a policy's own word."""
    failed: Mapping[Key, BaseException]
    """Blocks whose transfer failed or was rejected, each with the error."""
    evicted: Sequence[Key]
    """Weak blocks that were gone when they were upgraded."""
    error: BaseException | None
    """Why the container as a whole failed, if it did."""
    routes: Mapping[str, TransferResult]
    """How the completed blocks fared further down the chain, by the name of the pipeline; empty without a chain."""

    def raise_for_status(self) -> TransferResult:
        """The result itself where it is COMPLETE (blocks that were filtered or evicted included), else an exception.

        Raises:
            TransferCancelled: it was cancelled: nothing was copied.
            OffloadError: why the container as a whole failed: PreconditionFailed, PolicyFailed, PipelineClosed, DrainUnproven.
            TransferFailed: some of its blocks failed; the cause is why, a group where there are several reasons.
        """
        if self.status is Status.CANCELLED:
            raise TransferCancelled("the transfer was cancelled before its commit: nothing was copied")
        if self.error is not None:
            # Without the frames in which it was raised before: one result may be asked by many tasks.
            raise self.error.with_traceback(None)
        if self.failed:
            reasons = list(dict.fromkeys(self.failed.values()))
            failure = TransferFailed(f"{len(self.failed)} blocks failed, {len(self.completed)} are at the destination")
            errors = [reason for reason in reasons if isinstance(reason, Exception)]
            raise failure from (reasons[0] if len(errors) < 2 else ExceptionGroup("why blocks failed", errors))
        return self
