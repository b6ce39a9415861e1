"""Finds leaked pages after days of a full pool.

These are pages still held at rest, and pages that do not become free when all is deleted. A single leaked page goes
unnoticed for hours; then the pool is smaller than it was, and in the end it is empty. So after the laps every tier is
checked twice: at rest, when nothing may be held or reserved; and, unless the tier belongs to the caller (a directory,
or a tier given as a SPEC), after every block that was played has been deleted, when all of it must be free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from backends.abc import Key, Tier

from .laps import Laps
from .options import ReplayOptions
from .replayer import TraceKeys

_AT_ONCE: Final = 512
"""The number of keys in one delete."""


async def left_over(tiers: Mapping[str, Tier], options: ReplayOptions, laps: Laps) -> Mapping[str, int]:
    """Return the leaked blocks, by tier and kind; empty if none.

    These are still held, reserved, or not free after everything was deleted. Deletes all blocks of the tiers that the
    replay made in this process.
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
    """Yield every key that was played, lap by lap.

    A key may come up in several laps, so that no set of all keys is kept.
    """
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
    """Return the resident memory of this process, in bytes; 0 if unknown.

    Shared memory is included.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
