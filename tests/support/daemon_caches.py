"""A cache of single runs in shared memory, for tests that need no torch: what `backends.device.DeviceTier` is over tensors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from backends.abc import EVICTED, ExternalBlocks
from backends.pages import Pages, copy_pages
from offload.client import CacheDescription, SharedMemory
from offload.daemon._messages import TensorLayout


class RunCache:
    """Blocks of one size, one behind the other, in shared memory."""

    def __init__(self, memory: SharedMemory, block_bytes: int) -> None:
        self.memory = memory
        self.block_bytes = block_bytes
        self.n = memory.nbytes // block_bytes
        self._view = memory.buffer()

    def description(self) -> CacheDescription:
        size = self.block_bytes
        return CacheDescription([TensorLayout(0, 0, 1, [self.n, size], [size, 1], 0)], [self.memory])

    def write(self, block: int, data: bytes) -> None:
        self._view[block * self.block_bytes : (block + 1) * self.block_bytes] = data

    def read(self, block: int) -> bytes:
        return bytes(self._view[block * self.block_bytes : (block + 1) * self.block_bytes])

    def external(self, ids: Sequence[int], keys: Sequence[bytes]) -> ExternalBlocks:
        return ExternalBlocks(self, keys, list(ids))

    def into(self, ids: Sequence[int]) -> Into:
        return Into(self, list(ids))

    def pages(self, ids: Sequence[int]) -> Pages:
        return self.memory.pages(self.block_bytes).at(ids)

    # Source, and NumberedSource:

    def upgrade(self, keys):
        return [EVICTED] * len(keys)

    def release(self, refs):
        pass

    def views(self, refs):
        return self.pages(refs)

    def copy_out(self, refs, pages):
        copy_pages(pages, self.pages(refs))

    def numbers_of(self, refs):
        return self, refs


@attrs.define(eq=False)
class Into:
    cache: RunCache
    ids: list[int]

    @property
    def block_bytes(self):
        return self.cache.block_bytes

    def __len__(self):
        return len(self.ids)

    def numbered(self):
        return self.cache, self.ids

    def views(self):
        return self.cache.pages(self.ids)

    def copy_in(self, start, pages):
        copy_pages(self.cache.pages(self.ids[start : start + len(pages)]), pages)
