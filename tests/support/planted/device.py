"""Copies of a CUDA device that come too early, too late, or elsewhere. The tests over the fake driver find each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.copier import Pieces, copier_of
from backends.device import DeviceBlocks
from backends.pages import Pages


def pieces_are_loaded_in_another_order(patch: Any) -> None:
    """A block is read otherwise than it was written: its first half is loaded where the second one belongs."""

    def load(self: DeviceBlocks, slots: Sequence[int], pages: Pages) -> None:
        found = self._pieces.of(slots, pages)
        half = len(found) // 2
        order = [*range(half, len(found)), *range(half)]
        copier_of(self._device).load(Pieces(found.device[order], found.host, found.sizes))

    patch.setattr(DeviceBlocks, "copy_in", load)
