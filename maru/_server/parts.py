"""Large requests in parts, one per step. Pure.

A part has a fixed number of keys; other requests have a turn before the next part.
"""

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
        n: number of keys.
        handle: handles the keys at these positions, at this time; raises if the request may not continue.
        answer: makes the reply from the results of all keys.
        now: the time.
        last_first: handle the last part first, so that the head of a prefix is used last, as within a part.
    """
    starts = range(0, max(n, 1), KEYS_AT_ONCE)
    results: list[T] = []
    for start in reversed(starts) if last_first else starts:
        if n > KEYS_AT_ONCE:  # also before the first part: decoding a large request is enough for one step
            now = yield
        some = handle(slice(start, start + KEYS_AT_ONCE), now)
        results = some + results if last_first else results + some
    return answer(results)
