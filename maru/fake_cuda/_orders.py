"""Go through all orders in which the work of streams can progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Choose: TypeAlias = Callable[[int], int]
"""Picks one of so many possibilities, by its number. 0 is the latest that CUDA allows."""


def latest(n: int) -> int:
    """Let work progress no sooner than a synchronization needs it."""
    return 0


def every_order(run: Callable[[Choose], object], depth: int) -> int:
    """Call ``run`` once with each sequence of choices.

    Args:
        run: does the same with the same choices. It passes what it is given to :class:`FakeCuda`.
        depth: choices that are varied, from the first on; those behind them are :func:`latest`.

    Returns:
        How often it was called.
    """
    runs, choices = 0, list[int]()
    while True:
        sizes = list[int]()

        def choose(n: int, choices: list[int] = choices, sizes: list[int] = sizes) -> int:
            at = len(sizes)
            if at >= depth or n < 2:  # nothing to choose
                return 0
            sizes.append(n)
            if at == len(choices):
                choices.append(0)
            return choices[at]

        run(choose)
        runs += 1
        del choices[len(sizes) :]
        while choices and choices[-1] + 1 >= sizes[len(choices) - 1]:
            choices.pop()
        if not choices:
            return runs
        choices[-1] += 1
