"""The actions of a replay, as input for a scenario.

The scenario is made by :mod:`offload.testing.scenarios._loads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from backends.abc import Key, Tier, TierStatistics

from .replayer import Played
from .trace import Request

if TYPE_CHECKING:
    from ..testing.scenarios._program import Scenario


@attrs.frozen
class Recorded:
    """A tier of a replay, as a scenario file can describe it."""

    kind: str
    """``memory`` or ``file``."""
    capacity: int
    """Capacity in blocks."""


def not_recordable(kinds: Sequence[str]) -> str:
    """Return the first kind of tier that a scenario cannot describe.

    Empty if there is none.
    """
    return next((kind for kind in kinds if kind not in ("memory", "file")), "")


def not_empty(tiers: Mapping[str, Tier]) -> str:
    """Return the first tier that had blocks before the replay.

    Empty if there is none. A scenario could not describe how they got in.
    """
    return next((name for name, tier in tiers.items() if tier.statistics().used_bytes), "")


def scenario_of(
    name: str,
    requests: Sequence[Request],
    keys: Sequence[Sequence[Key]],
    played: Sequence[Played],
    tiers: Sequence[Recorded],
    statistics: Mapping[str, TierStatistics],
    *,
    block_bytes: int,
    checksums: bool,
    presence: bool,
) -> Scenario:
    """Make a scenario that repeats a replay.

    Args:
        name: name of the scenario.
        requests: the requests, in the order in which they were played.
        keys: the keys of each request.
        played: the result of each request.
        tiers: from the fastest to the slowest.
        statistics: of each tier, by the engine's name for it, in the same order.
        block_bytes: size of every block.
        checksums: whether loads were verified.
        presence: whether a presence filter kept blocks of the first tier from being stored again.
    """
    from ..testing.scenarios._loads import RecordedRequest as Done
    from ..testing.scenarios._loads import RecordedTier, recorded

    position = {name: i for i, name in enumerate(statistics)}
    began = played[0].began if played else 0.0
    done: list[Done] = []
    missed = 0
    for request, wanted, one in zip(requests, keys, played, strict=True):
        hash_of = dict(zip(wanted, request.hash_ids, strict=True))
        done.append(
            Done(
                at_ms=(one.began - began) * 1e3,
                blocks=request.hash_ids,
                runs=[(position[name], blocks) for name, blocks in _within(one.runs, one.hit)],
                kept_back=frozenset([hash_of[key] for key in one.kept_back]),
                store_time=one.store_time,
            )
        )
        missed += one.hit < one.blocks
    counts = {"loaded": sum(one.hit for one in played), "missed": missed}
    if presence:
        counts["copied"] = sum(tier.stored for tier in statistics.values())
    return recorded(
        name,
        [
            RecordedTier("file" if tier.kind == "file" else "memory", tier.capacity, block_bytes, checksums)
            for tier in tiers
        ],
        done,
        counts,
        presence=presence,
        about=(
            f"{len(played):,} requests as `offload replay` played them. Each loads the prefix that was there and asks for the "
            "block behind it, and stores what was missing. Where a real copy took less than a virtual millisecond, what "
            "follows begins later than it did."
        ),
    )


def _within(runs: Sequence[tuple[str, int]], blocks: int) -> list[tuple[str, int]]:
    """Return the runs of the first ``blocks`` blocks.

    A load that broke off did not read the others.
    """
    found: list[tuple[str, int]] = []
    for name, length in runs:
        if blocks > 0:
            found.append((name, min(length, blocks)))
            blocks -= length
    return found
