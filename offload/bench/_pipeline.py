"""``offload bench pipeline``: what a container costs in a burst, alone and among many, and what the import costs."""

from __future__ import annotations

from collections.abc import Iterator

from maru.bench._measure import Effort, Row

from . import _burst, _growth, _idle, _imports, _watched


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goals 1, 2 and 6, of watching, and of the import."""
    for part in (_burst, _watched, _idle, _growth, _imports):
        yield from part.rows(effort)
