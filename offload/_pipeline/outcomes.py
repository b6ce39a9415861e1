"""The outcomes of a copy, by container of its batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from backends.abc import STORED, Duplicate, Failed, Key, Outcome, Rejected, Stored, Unproven
from maru.exception_groups import holds

from .._errors import DestinationFull, TransferFailed
from .container import FlatBlocks


def unproven_among(outcomes: Sequence[Outcome]) -> BaseException | None:
    """Return the error of a block whose copy may be going on.

    ``None`` if there is no such block.
    """
    if outcomes.count(STORED) == len(outcomes):
        return None
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, Failed)]
    return next((error for error in errors if holds(error, Unproven)), None)


def all_failed(flat: FlatBlocks, text: str, cause: BaseException | None) -> list[Outcome]:
    """Return the outcome that every block failed, for this reason."""
    error = TransferFailed(text)
    error.__cause__ = cause
    return [Failed(error)] * len(flat.keys)


def assign_outcomes(flat: FlatBlocks, outcomes: Sequence[Outcome]) -> None:
    """Give each container the outcomes of its span."""
    start = 0
    for container, size in zip(flat.containers, flat.sizes, strict=True):
        completed: list[Key] = []
        failed: dict[Key, BaseException] = dict(container.failed)
        for key, outcome in zip(container.keys, outcomes[start : start + size], strict=True):
            match outcome:
                case Stored() | Duplicate():
                    completed.append(key)
                case Failed(error):
                    failed[key] = error
                case Rejected(reason):
                    failed[key] = DestinationFull(f"rejected: {reason}")
                case _:
                    failed[key] = TransferFailed(f"{outcome!r} is not an outcome of a transfer")
        container.marked = False
        container.completed, container.failed = completed, failed
        start += size
