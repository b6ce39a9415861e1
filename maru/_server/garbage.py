"""Short garbage collections: a full one examines only new objects.

A server holds millions of objects that stay, in a few large tables: each full collection would examine all of them,
0.15 s with a million keys, and no request is answered meanwhile. Survivors of one are frozen, and the next leaves them
out. Those that become garbage in a cycle later, of which there are few, are found once in ``THOROUGH_EVERY``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Final

THOROUGH_EVERY: Final = 3600.0
"""Seconds between collections that examine all objects."""


@contextlib.contextmanager
def short_collections(clock: Callable[[], float]) -> Iterator[None]:
    """Keep full collections short for the length of the block.

    All objects that exist at its beginning are frozen.
    """
    thorough_at = clock() + THOROUGH_EVERY

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal thorough_at
        if info["generation"] < 2:
            return
        if phase == "stop":
            gc.freeze()
        elif clock() >= thorough_at:
            thorough_at = clock() + THOROUGH_EVERY
            gc.unfreeze()

    gc.freeze()
    gc.callbacks.append(on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(on_collection)
