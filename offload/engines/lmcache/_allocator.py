"""An LMCache allocator of pages of the page store, without keys."""

from __future__ import annotations

from typing import Any, Final

from .._guard import NOTHING, guarded
from ._l1 import MaruL1Manager
from ._lmcache_l1 import L1Error, MemoryAllocatorInterface, MemoryFormat, MemoryLayoutDesc, TensorMemoryObj

_HOOKS: Final = {
    "allocate": NOTHING,
    "batched_allocate": NOTHING,
    "get_by_location": NOTHING,
    "free": NOTHING,
    "batched_free": NOTHING,
}


@guarded(_HOOKS)
class MaruMemoryAllocator(MemoryAllocatorInterface):
    """Allocator of pages of the pool as memory objects without a key.

    Args:
        manager: owner of the pages.
    """

    def __init__(self, manager: MaruL1Manager) -> None:
        self._manager = manager

    def allocate(
        self, shapes: Any, dtypes: Any, fmt: MemoryFormat = MemoryFormat.UNDEFINED, allocator_type: str | None = None
    ) -> TensorMemoryObj | None:
        """Take one page; ``None`` if none is free."""
        items = self.batched_allocate(shapes, dtypes, 1, fmt, allocator_type)
        return None if items is None else items[0]

    def batched_allocate(
        self,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        allocator_type: str | None = None,
    ) -> list[TensorMemoryObj] | None:
        """Take several pages; ``None`` if not all are free."""
        layout = MemoryLayoutDesc(*self._adapt_shapes_and_dtypes(shapes, dtypes))
        error, items = self._manager.allocate(layout, batch_size)
        return items if error is L1Error.SUCCESS else None

    def get_by_location(self, region_id: int, page_index: int) -> TensorMemoryObj | None:
        """Return the object in a page of a region, of any process.

        ``None`` unless it is pinned for reading here.
        """
        return self._manager.read_at(region_id, page_index)

    def free(self, memory_obj: TensorMemoryObj, allocator_type: str | None = None) -> None:
        """Give a page back."""
        self._manager.free([memory_obj])

    def batched_free(
        self, memory_objs: list[TensorMemoryObj], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        """Give pages back."""
        self._manager.free(memory_objs)
