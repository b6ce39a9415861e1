"""Large requests in parts: so many keys are handled in a step, and everybody else has a turn before the next ones. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .._directory.slices import Slices
from .._wire import KEYS_AT_ONCE

T = TypeVar("T")


def in_parts(
    n: int,
    handle: Callable[[slice, float], list[T]],
    answer: Callable[[list[T]], bytes],
    now: float,
    *,
    last_first: bool = False,
) -> Slices[bytes]:
    """Handle ``n`` keys part by part, and answer.

    Args:
        n: how many keys there are.
        handle: handles those at these positions, at this time; raises if the request may not go on.
        answer: makes the answer of what came of all of them.
        now: the time.
        last_first: handle the last part first, so that of a prefix the head is used last, as within a part.
    """
    starts = range(0, max(n, 1), KEYS_AT_ONCE)
    results: list[T] = []
    for start in reversed(starts) if last_first else starts:
        if n > KEYS_AT_ONCE:  # also before the first part: decoding a large request is enough for one step
            now = yield
        some = handle(slice(start, start + KEYS_AT_ONCE), now)
        results = some + results if last_first else results + some
    return answer(results)
