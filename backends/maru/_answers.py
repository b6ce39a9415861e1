"""Translation of the page store's answers into outcomes of a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from maru import Deleted
from maru import Stored as MaruStored

from .._errors import BackendError
from ..abc import DUPLICATE, STORED, Deletion, Failed, Key, Outcome, Rejected

if TYPE_CHECKING:
    from maru import MaruHandler

_OUTCOMES: Final[dict[MaruStored | None, Outcome]] = {
    MaruStored.NEW: STORED,
    MaruStored.DUPLICATE: DUPLICATE,
    MaruStored.FULL: Rejected("full"),
    MaruStored.QUOTA: Rejected("quota"),
}
_DELETIONS: Final = {
    Deleted.DELETED: Deletion.DELETED,
    Deleted.MISSING: Deletion.MISSING,
    Deleted.PINNED: Deletion.PINNED,
    Deleted.PROTECTED: Deletion.PINNED,
}


class NotStored(BackendError):
    """A block that the server did not take. Nothing of it remains.

    The text gives the reason.
    """


def outcomes_of(place: object, keys: Sequence[Key], answers: Sequence[MaruStored | None]) -> list[Outcome]:
    """Return the outcome of each key that was to be stored."""
    if answers.count(MaruStored.NEW) == len(keys):
        return [STORED] * len(keys)
    return [_OUTCOMES.get(answer) or _failed(place, key, answer) for key, answer in zip(keys, answers, strict=True)]


def _failed(place: object, key: Key, answer: MaruStored | None) -> Failed:
    why = "the answer to its store was lost: not stored" if answer is None else f"the server answered {answer.value}"
    return Failed(NotStored(f"{place!r} does not hold {key.hex()}: {why}"))


async def deletions_of(handler: MaruHandler, names: Sequence[str], answers: Sequence[Deleted]) -> list[Deletion]:
    """Return the result of deleting each key.

    If a published server did not distinguish missing from pinned, this asks which keys are there.

    Raises:
        maru.NoAnswer: the second question was not answered. The deleted blocks stay deleted.
    """
    if Deleted.MISSING_OR_PINNED not in answers:
        return [_DELETIONS[answer] for answer in answers]
    there = await handler.batch_exists(names)
    return [
        _DELETIONS.get(answer) or (Deletion.PINNED if is_there else Deletion.MISSING)
        for answer, is_there in zip(answers, there, strict=True)
    ]
