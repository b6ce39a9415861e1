"""The names of LMCache 0.5 that the first level uses.

They are declared for type checkers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import enum

    class L1Error(enum.Enum):
        """The result for a key."""

        SUCCESS = 1
        KEY_NOT_EXIST = 2
        KEY_NOT_READABLE = 3
        KEY_NOT_WRITABLE = 4
        KEY_IN_WRONG_STATE = 5
        KEY_IS_LOCKED = 6
        OUT_OF_MEMORY = 7

    class L1BackendType(enum.Enum):
        """The kind of memory that holds objects."""

        DRAM = "dram"

    class L1ReconfigureError(RuntimeError):
        """A refused change of the memory."""

        def __init__(self, status_code: int, message: str) -> None: ...

    class MemoryFormat(enum.Enum):
        """The order of the axes."""

        UNDEFINED = 0

    class MemoryObjMetadata:
        """The description of an object besides its bytes."""

        def __init__(self, **fields: Any) -> None: ...

    class TensorMemoryObj:
        """An object over a tensor of bytes."""

        def __init__(self, raw_data: Any, metadata: MemoryObjMetadata, parent_allocator: Any) -> None: ...
        def set_l1_manager(self, owner_tag: int) -> None:
            """Set the manager that owns the object."""

    class MemoryAllocatorInterface:
        """Base class of allocators."""

        def _adapt_shapes_and_dtypes(self, shapes: Any, dtypes: Any) -> tuple[list[Any], list[Any]]: ...

    class MemoryLayoutDesc:
        """The layout of an object."""

        shapes: Sequence[Any]
        dtypes: Sequence[Any]

        def __init__(self, shapes: Sequence[Any], dtypes: Sequence[Any]) -> None: ...

    def next_l1_manager_id() -> int:
        """Return an id that no other first level of this process has."""
        ...
else:
    from lmcache.v1.distributed.api import L1BackendType as L1BackendType
    from lmcache.v1.distributed.api import MemoryLayoutDesc as MemoryLayoutDesc
    from lmcache.v1.distributed.error import L1Error as L1Error
    from lmcache.v1.distributed.error import L1ReconfigureError as L1ReconfigureError
    from lmcache.v1.distributed.l1_manager import next_l1_manager_id as next_l1_manager_id
    from lmcache.v1.memory_management import MemoryAllocatorInterface as MemoryAllocatorInterface
    from lmcache.v1.memory_management import MemoryFormat as MemoryFormat
    from lmcache.v1.memory_management import MemoryObjMetadata as MemoryObjMetadata
    from lmcache.v1.memory_management import TensorMemoryObj as TensorMemoryObj
