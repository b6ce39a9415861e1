"""The limit a replay is measured against, a :class:`.driver.Cache`.

It is a dictionary in LRU order, and one copy per block. It neither pins, cancels, verifies nor waits, and nothing else
runs next to it. Its memory is of the same kind as that of the tier it is compared with: one shared mapping, populated
before the first request.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence

from backends.abc import Key
from backends.memory import HostPages


class Baseline:
    """Blocks by key in LRU order, over one pool of memory.

    Nothing in it waits.

    Args:
        blocks: its capacity in blocks.
        block_bytes: size of each.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._pool = HostPages(blocks, block_bytes)
        self._size = block_bytes
        self._free = list(self._pool.pages(range(blocks)).addresses)[::-1]
        self._address_of: OrderedDict[Key, int] = OrderedDict()

    async def load(self, keys: Sequence[Key], to: Sequence[int]) -> int:
        """Copy the blocks of the longest prefix to these addresses.

        Returns their number.
        """
        address_of, size, memmove = self._address_of, self._size, ctypes.memmove
        found = 0
        for key in keys:
            address = address_of.get(key)
            if address is None:
                break
            memmove(to[found], address, size)
            found += 1
        for key in keys[:found][::-1]:
            address_of.move_to_end(key)
        return found

    async def store(self, keys: Sequence[Key], at: Sequence[int]) -> int:
        """Copy in the new blocks among those at these addresses.

        The first block of the prefix becomes the most recent.

        Returns the number of new blocks.
        """
        address_of, free, size, memmove = self._address_of, self._free, self._size, ctypes.memmove
        new = [(key, source) for key, source in zip(keys, at, strict=True) if key not in address_of]
        while len(free) < len(new):
            free.append(address_of.popitem(last=False)[1])
        for key, source in reversed(new):
            address = free.pop()
            memmove(address, source, size)
            address_of[key] = address
        return len(new)
