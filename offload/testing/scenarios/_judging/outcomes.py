"""How a container ended, read from whatever a system shows as its result. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from .._contract import Outcome, Status

STATUSES: Final = ("COMPLETE", "CANCELLED", "FAILED")


class NoOutcome(TypeError):
    """What a ticket shows as its result has no status that is one."""


def outcome_of(result: Any) -> Outcome:
    """The outcome of a result: its ``status`` (a word, or the member of an enum), and what else it has of an ``Outcome``.

    Raises:
        NoOutcome: it has no such status.
    """
    if isinstance(result, Outcome):
        return result
    status = getattr(result, "status", None)
    name = getattr(status, "name", status)
    if name not in STATUSES:
        raise NoOutcome(f"a result has a status, one of {', '.join(STATUSES)}, not {status!r}: {result!r}")
    return Outcome(
        status=cast("Status", name),
        completed=tuple(getattr(result, "completed", ())),
        filtered=dict(getattr(result, "filtered", None) or {}),
        failed={key: name_of(error) for key, error in _items(getattr(result, "failed", None))},
        evicted=tuple(getattr(result, "evicted", ())),
        error=name_of(getattr(result, "error", None)),
    )


def name_of(error: object) -> str:
    """What an error is called: its class; a text is its own name."""
    if error is None:
        return ""
    return error if isinstance(error, str) else type(error).__name__


def _items(failed: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(failed, Mapping):
        return failed.items()
    return [(key, "") for key in cast("Iterable[Any]", failed or ())]
