"""The result of a handle, and the progress of a container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backends.abc import Key

from .._errors import TransferCancelled, TransferFailed
from .lifecycle import Status


@attrs.frozen
class Progress:
    """Counts of one container's blocks by state.

    The size is constant. Counts only grow, except ``remaining``.
    """

    total: int
    """Blocks enqueued."""
    passed: int
    """Blocks that passed the policies (known once they have run)."""
    filtered: int
    """Blocks that a policy, a pending mark or an overflow filtered."""
    completed: int
    """Blocks that are at the destination."""
    failed: int
    """Blocks whose transfer failed or was rejected."""
    evicted: int
    """Weak blocks that were gone at the upgrade."""

    @property
    def remaining(self) -> int:
        """Blocks without an outcome yet."""
        return self.total - self.filtered - self.completed - self.failed - self.evicted


@attrs.frozen
class TransferResult:
    """The result of one container."""

    status: Status
    """COMPLETE, CANCELLED or FAILED.

    FAILED if any of its blocks failed, here or on a required route of the chain.
    """
    completed: Sequence[Key]
    """Blocks that are at the destination now.

    Blocks that were there before are included.
    """
    filtered: Mapping[Key, str]
    """Filtered blocks, each with the reason.

    A reason is ``present``, ``pending``, ``timeout``, ``overflow``, or a policy's own word; on a route that is not
    required also ``behind`` (no room in its share in time) and ``gone`` (evicted before).
    """
    failed: Mapping[Key, BaseException]
    """Blocks whose transfer failed or was rejected, each with the error."""
    evicted: Sequence[Key]
    """Weak blocks that were gone when they were upgraded."""
    error: BaseException | None
    """The error because of which the whole container failed, if it did."""
    routes: Mapping[str, TransferResult]
    """The results of the chain's required routes, by pipeline name.

    They are about the completed blocks. Results of the other routes come from ``await handle.wait_routes()``.
    """

    def raise_for_status(self) -> TransferResult:
        """Return the result if it is COMPLETE, else raise.

        It may be COMPLETE with filtered and evicted blocks.

        Raises:
            TransferCancelled: it was cancelled: nothing was copied.
            OffloadError: the container as a whole failed: PreconditionFailed, PolicyFailed, PipelineClosed or
                DrainUnproven.
            TransferFailed: some of its blocks failed; the cause is their error, a group if there are several.
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
