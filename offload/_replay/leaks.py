"""What is left when days of a full pool are over: nothing that somebody holds, and all of the room when all is deleted.

A page that nobody gives back is not missed for hours; then a pool is smaller than it was, and some day it is empty. So after
laps every tier is looked at twice: as it is, when nothing may be held or reserved, and then, but for what is the caller's
(a directory, or a tier that was specified), with every block deleted that was ever played, when all of it must be free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from backends.abc import Key, ReadableTier

from .laps import Laps
from .options import ReplayOptions
from .replayer import TraceKeys

_AT_ONCE: Final = 512
"""Keys in one delete."""


async def left_over(tiers: Mapping[str, ReadableTier], options: ReplayOptions, laps: Laps) -> Mapping[str, int]:
    """What is held, reserved, or not to be had again, by tier and kind; empty where nothing is.

    All blocks of tiers of this process are deleted.
    """
    found: dict[str, int] = {}
    for name, tier in tiers.items():
        statistics = tier.statistics()
        found[f"{name}: held"] = statistics.held_blocks
        found[f"{name}: reserved"] = statistics.reserved_blocks
    own = {name: tier for (name, tier), spec in zip(tiers.items(), options.tiers, strict=True) if spec.is_own}
    if own:
        for keys in _all_keys(laps):
            for tier in own.values():
                await tier.delete(keys)
    for name, tier in own.items():
        statistics = tier.statistics()
        found[f"{name}: not deleted"] = statistics.blocks
        found[f"{name}: not free"] = -(-statistics.used_bytes // options.block_bytes)
    return {what: blocks for what, blocks in found.items() if blocks}


def _all_keys(laps: Laps) -> Iterator[Sequence[Key]]:
    """Every key that was played; some of them more than once, so that nobody need remember them all."""
    for lap in laps:
        names = TraceKeys()
        seen: dict[Key, None] = {}
        for request in lap:
            seen.update(dict.fromkeys(names.of(request)))
        yield from _pieces(seen)


def _pieces(keys: Iterable[Key]) -> Iterator[Sequence[Key]]:
    column = list(keys)
    for at in range(0, len(column), _AT_ONCE):
        yield column[at : at + _AT_ONCE]


def resident_bytes() -> int:
    """How much memory this process has now, shared memory included; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
