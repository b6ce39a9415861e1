"""The mixes that a random program can be of, by name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

from .._program import Scenario
from .engines import generate_engine
from .generating import generate

Mix: TypeAlias = Literal["standard", "engine"]

MIXES: Final[Mapping[Mix, Callable[[int], Scenario]]] = {"standard": generate, "engine": generate_engine}
"""What makes the program of a seed."""
