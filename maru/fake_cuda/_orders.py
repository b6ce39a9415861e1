"""Enumeration of all orders in which the work of streams can progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Choose: TypeAlias = Callable[[int], int]
"""Function that picks one of ``n`` possibilities, by its number.

0 is the latest that CUDA allows.
"""


def latest(n: int) -> int:
    """Delay work until a synchronization needs it."""
    return 0


def every_order(run: Callable[[Choose], object], depth: int) -> int:
    """Call ``run`` once with each sequence of choices.

    Args:
        run: must do the same with the same choices. It makes its argument :attr:`FakeCuda.choose` where the part that
            it tests begins: choices made before would use up the depth.
        depth: choices that are varied, from the first on; later ones are :func:`latest`.

    Returns:
        Number of calls.
    """
    runs, choices = 0, list[int]()
    while True:
        sizes = list[int]()

        def choose(n: int, choices: list[int] = choices, sizes: list[int] = sizes) -> int:
            at = len(sizes)
            if at >= depth or n < 2:  # there is no choice
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
