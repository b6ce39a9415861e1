"""Choice of a temporary pool's place: in memory, or on a disk.

A disk is chosen only if there is not enough memory, and with a note. Commands that make a temporary pool choose before
they begin, since a pool that is too small shows minutes later, as a wait for a page that never ends. The directory of a
server is a setting of its configuration, and is used as it is.

Rule 1. The first place is chosen that has enough space and memory by the doctor's rules (:mod:`.doctor`).
Rule 2. If that is not the first candidate, the note names it, and the reason against the others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Final

import attrs

from ..base.errors import PoolUnusable
from ..base.findings import Finding
from .doctor import Facts, Wanted, examine_space
from .facts import read_facts

MEMORY: Final = "/dev/shm"
_JOURNAL_BYTES: Final = 4 << 20
"""Bytes that a pool takes next to its regions.

This is for one run of a command.
"""


@attrs.frozen
class Placement:
    """Place of the directory of a pool."""

    parent: str
    """The directory that it is to be made in."""
    note: str = ""
    """A note for the user, if not in memory; else empty."""


def choose_place(places: Sequence[tuple[str, Facts]], nbytes: int) -> Placement:
    """Return the first place with room for a pool of ``nbytes``. Pure.

    Raises:
        PoolUnusable: none of them has; the text names the lack of each of them.
    """
    wanted = Wanted(capacity_bytes=nbytes)
    lacking: list[str] = []
    for parent, facts in places:
        failed = [found for found in examine_space(facts, wanted) if found.verdict == "fail"]
        if not failed:
            note = f"the pool is in {parent}, on a disk, which is slower: {'; '.join(lacking)}" if lacking else ""
            return Placement(parent, note)
        lacking.append(f"{parent} has {_lack(failed)}")
    raise PoolUnusable(f"there is no place for a pool: {'; '.join(lacking) or 'no directory can be written'}")


def find_place(nbytes: int, parents: Sequence[str] = ()) -> Placement:
    """Return the place for a temporary pool of ``nbytes``. Blocking, briefly.

    It is ``/dev/shm``, or else the directory of temporary files.

    Args:
        nbytes: of all its regions together.
        parents: the directories to try instead.

    Raises:
        PoolUnusable: there is no room for it anywhere; the text names the lack of each place, and the remedy.
    """
    parents = parents or (MEMORY, tempfile.gettempdir())
    places = [parent for parent in dict.fromkeys(parents) if os.access(parent, os.W_OK)]
    return choose_place([(parent, read_facts(f"{parent}/pool")) for parent in places], nbytes + _JOURNAL_BYTES)


def _lack(failed: Sequence[Finding]) -> str:
    return ", ".join(f"{found.found} of {found.needed} ({found.way_out})" for found in failed)
