"""``python -m tests.bench pipeline``: the cost of a container in a burst, alone and among many, and of the import."""

from __future__ import annotations

from collections.abc import Iterator

from maru.bench.measure import Effort, Row

from . import burst, growth, idle, imports, watched


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goals 1, 2 and 6, of watching, and of the import."""
    for part in (burst, watched, idle, growth, imports):
        yield from part.rows(effort)
