"""What is asked of a store that is compared: how much it holds, of which blocks. No store is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import attrs

from offload.replay import Cache, Place


@attrs.frozen
class Setting:
    """One comparison."""

    capacity_bytes: int
    """Of blocks; what a store needs beside them is its own affair."""
    block_bytes: int
    most_blocks: int
    """Of a request."""
    in_flight: int = 1
    """Requests at once."""
    checkout: str = ""
    """Where the published page store is, if that is compared."""

    @property
    def blocks(self) -> int:
        """How many blocks fit."""
        return self.capacity_bytes // self.block_bytes


Opened: TypeAlias = tuple[Cache, Sequence[Place]]
"""A store that is open, and the memory of each request in flight."""

Opener: TypeAlias = Callable[[Setting], AbstractAsyncContextManager[Opened]]


class Unavailable(Exception):
    """A store cannot be run here; the text says what it needs."""
