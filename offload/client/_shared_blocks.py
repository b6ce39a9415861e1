"""Blocks in shared memory, which a daemon copies in place.

Each is one run of bytes. A cache for programs without torch: a source of stores and a destination of loads, as
:class:`backends.device.DeviceTier` is over tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from backends.abc import Destination, ExternalBlocks, Key, Source
from backends.base.pages import Pages, copy_pages

from ..daemon._messages import TensorLayout
from ._places import CacheDescription
from ._shared import SharedMemory


class SharedBlocks(Source):
    """Blocks of one size in shared memory, one after the other.

    There are as many as the memory has room for. Their owner keeps them unchanged.

    Args:
        memory: the memory of the blocks.
        block_bytes: the size of one.
        n: how many there are, if the memory has room for something else after them.
    """

    block_bytes: int = 0
    """The size of one, in bytes."""

    def __init__(self, memory: SharedMemory, block_bytes: int, n: int | None = None) -> None:
        self.memory: SharedMemory = memory
        self.block_bytes = block_bytes
        pages = memory.pages(block_bytes)
        self._pages = pages if n is None else pages.part(0, n)

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"<SharedBlocks: {len(self)} of {self.block_bytes} bytes>"

    def write(self, block: int, data: bytes) -> None:
        """Fill a block."""
        self._pages[block][:] = data

    def read(self, block: int) -> bytes:
        """Return the bytes of a block."""
        return bytes(self._pages[block])

    def external(self, ids: Sequence[int], keys: Sequence[Key]) -> ExternalBlocks:
        """Return these blocks as blocks to store under these keys."""
        return ExternalBlocks(self, keys, list(ids))

    def into(self, ids: Sequence[int]) -> IntoSharedBlocks:
        """Return these blocks as a destination of a load."""
        return IntoSharedBlocks(self, list(ids))

    def pages(self, ids: Sequence[int]) -> Pages:
        """Return the addresses of these blocks."""
        return self._pages.at(ids)

    # --- SharedPlace, Source ----------------------------------------------------------------------------------------

    def description(self) -> CacheDescription:
        """See :class:`~offload.client.SharedPlace`."""
        size = self.block_bytes
        return CacheDescription([TensorLayout(0, 0, 1, [len(self), size], [size, 1], 0)], [self.memory])

    def numbers_of(self, refs: Sequence[int]) -> tuple[object, Sequence[int]]:
        """See :meth:`backends.abc.Source.numbers_of`."""
        return self, refs

    def views(self, refs: Sequence[int]) -> Pages:
        """See :class:`~backends.abc.Source`."""
        return self.pages(refs)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """See :class:`~backends.abc.Source`."""
        copy_pages(pages, self.pages(refs))


@attrs.define(eq=False)
class IntoSharedBlocks(Destination):
    """Blocks to load into. Made by :meth:`SharedBlocks.into`."""

    blocks: SharedBlocks
    ids: Sequence[int]

    @property
    def block_bytes(self) -> int:
        """The size of one block."""
        return self.blocks.block_bytes

    def __len__(self) -> int:
        return len(self.ids)

    def numbered(self) -> tuple[object, Sequence[int]]:
        """See :class:`~backends.abc.Destination`."""
        return self.blocks, self.ids

    def views(self) -> Pages:
        """See :class:`~backends.abc.Destination`."""
        return self.blocks.pages(self.ids)

    def copy_in(self, start: int, pages: Pages) -> None:
        """See :class:`~backends.abc.Destination`."""
        copy_pages(self.blocks.pages(self.ids[start : start + len(pages)]), pages)
