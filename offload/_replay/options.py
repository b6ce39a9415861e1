"""Options of a replay: tiers, policy, pace and laps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from backends.abc import Tier

from .._engine import presence_filter
from .._errors import OffloadError
from ..abc import AsyncPolicy, Policy
from ..policies import FrequencyFilter
from .units import UNLIMITED


class ReplayError(OffloadError, ValueError):
    """Invalid options of a replay; the message has valid ones."""


@attrs.frozen
class TierSpec:
    """A tier to replay against."""

    kind: str
    """``memory``, ``file`` or ``maru``; or the type named in ``made``."""
    directory: str | None
    """The directory of a file tier."""
    capacity_bytes: float
    """Capacity in bytes; ``inf`` has room for all of the trace.

    For a tier with ``made``, it is the capacity in its table.
    """
    made: str | Mapping[str, Any] | None = None
    """The argument for :func:`backends.plugins.make_tier`, if any.

    ``None`` for the three kinds that a replay makes itself.
    """

    @property
    def name(self) -> str:
        """The specification, as it was given on the command line."""
        return self.kind if self.directory is None else f"{self.kind}:{self.directory}"

    @property
    def is_own(self) -> bool:
        """Whether the replay makes the tier, and removes it at the end."""
        return self.made is None and self.directory is None

    def blocks(self, block_bytes: int, unique: int, factor: float = 1.0) -> int:
        """Return the trace's blocks that fit ``factor`` times its capacity.

        Unlimited has room for all of them.
        """
        if self.capacity_bytes == UNLIMITED:
            return int(unique * factor)
        return int(self.capacity_bytes * factor) // block_bytes


@attrs.frozen
class ReplayOptions:
    """The options of a replay: its blocks, the tiers, policies and limits."""

    tiers: Sequence[TierSpec] = (TierSpec("memory", None, UNLIMITED),)
    """The tiers from fastest to slowest.

    Blocks that one tier has stored are stored in the next.
    """
    block_bytes: int = 4096
    """Size of every block in bytes."""
    policy: str = "presence"
    """Name of the policy that filters blocks.

    ``pass-all``, ``presence``, or ``frequency:N``, which keeps out blocks that are present or were seen at most N
    times.
    """
    speed: float = math.inf
    """Pace: 1.0 is the trace's own, N is N times as fast.

    ``inf`` is as fast as possible.
    """
    skip_idle: bool = False
    """Whether the clock skips the time between two requests.

    So days are simulated in minutes.
    """
    laps: int = 1
    """Number of times that the trace is played."""
    rename: float = 0.8
    """Share of its different blocks with new names in each later lap."""
    in_flight: int = 1
    """Number of requests that are played at once."""
    checksums: bool = True
    """Whether tiers compute checksums at stores, and verify them at loads."""
    what_if: Sequence[float] = ()
    """Factors of capacity to give hit rates for."""

    def __attrs_post_init__(self) -> None:
        name, colon, threshold = self.policy.partition(":")
        if not (self.policy in ("pass-all", "presence") or (name == "frequency" and colon and threshold.isdecimal())):
            raise ReplayError(f"--policy {self.policy!r}: must be pass-all, presence, or frequency:N")
        try:
            self.further_policies()
        except ValueError as error:
            raise ReplayError(f"--policy {self.policy!r}: {error}") from error

        if self.what_if and (made := [spec.name for spec in self.tiers if spec.made is not None]):
            raise ReplayError(f"--what-if: the eviction of {made[0]} is unknown: use memory, maru or file:DIR")
        if self.laps < 1 or not 0.0 <= self.rename <= 1.0:
            raise ReplayError(f"laps = {self.laps}, rename = {self.rename:g}: must be at least 1, and from 0 to 1")
        if self.in_flight < 1:
            raise ReplayError(f"in_flight = {self.in_flight}: must be at least 1")
        if self.skip_idle and self.speed == math.inf:
            raise ReplayError("--skip-idle needs a --speed other than max: at full speed there is no idle time to skip")

    def policies(self, first: Tier) -> list[Policy | AsyncPolicy]:
        """Return the policies that the option's name stands for."""
        return [] if self.policy == "pass-all" else [presence_filter(first), *self.further_policies()]

    def further_policies(self) -> list[Policy]:
        """Return the policies that decide after the presence filter."""
        _, counted, threshold = self.policy.partition(":")
        return [FrequencyFilter(int(threshold))] if counted else []
