"""What an L2 adapter of LMCache is handed: keys, memory objects, layouts.

Where LMCache is loaded, as it is if the adapter's module imports it, these are its own classes, since adapters may
compare types and copy metadata. Elsewhere they are look-alikes with the same names and meanings, and nothing of LMCache
need be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ..abc import Key


@attrs.frozen
class ObjectKey:
    """The name of an object, as adapters know it."""

    chunk_hash: bytes
    """The content hash: our key."""
    model_name: str
    """Whose blocks these are; without an ``@``, which adapters join keys with."""
    kv_rank: int
    """Which part of the cache, of several ranks."""
    object_group_id: int = 0
    """Which group of layers."""
    cache_salt: str = ""
    """Whose. Our keys are salted already."""


@attrs.frozen
class Layout:
    """What an object looks like."""

    shapes: list[tuple[int, ...]]
    """One shape: the number of bytes."""
    dtypes: list[str]
    """One type: bytes."""


@attrs.frozen
class ObjectMetadata:
    """What is said of an object besides its bytes."""

    address: int
    """Where it starts."""
    phy_size: int
    """How many bytes it takes."""
    shape: tuple[int, ...]
    """The number of its bytes."""
    dtype: str = "uint8"
    """Bytes."""
    ref_count: int = 1
    """It lives as long as the operation that it was made for."""
    pin_count: int = 0
    """Nobody else pins it."""


class MemoryObject:
    """One page of a host's memory.

    Adapters read ``byte_array``, or write into it; it is theirs until their task is complete.
    """

    def __init__(self, page: memoryview, address: int) -> None:
        """Over one page."""
        self.byte_array: memoryview = page
        """The bytes, writable."""
        self.raw_data: memoryview = page
        """The bytes, writable."""
        self.data_ptr: int = address
        """Where they start."""
        self.meta: ObjectMetadata = ObjectMetadata(address, page.nbytes, (page.nbytes,))
        """What is said of them."""
        self.metadata: ObjectMetadata = self.meta
        """What is said of them."""

    def __repr__(self) -> str:
        return f"<object of {self.byte_array.nbytes} bytes>"

    def get_size(self) -> int:
        """How many bytes."""
        return self.byte_array.nbytes

    def get_physical_size(self) -> int:
        """How many bytes."""
        return self.byte_array.nbytes

    def get_shape(self) -> tuple[int, ...]:
        """The number of bytes."""
        return self.meta.shape

    def get_shapes(self) -> list[tuple[int, ...]]:
        """The number of bytes."""
        return [self.meta.shape]

    def is_valid(self) -> bool:
        """It is, as long as the operation lasts."""
        return True

    @property
    def tensor(self) -> Any:
        """The bytes as a tensor, without a copy. Imports torch."""
        import torch

        return torch.frombuffer(self.byte_array, dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def raw_tensor(self) -> Any:
        """The same."""
        return self.tensor

    def ref_count_up(self) -> None:
        """It lives as long as the operation."""

    def ref_count_down(self) -> None:
        """It lives as long as the operation."""


def key_maker(model_name: str, kv_rank: int) -> Callable[[Key], Any]:
    """Makes adapters' keys of ours."""
    api: Any = sys.modules.get("lmcache.v1.distributed.api")
    make: Any = ObjectKey if api is None else api.ObjectKey
    return lambda key: make(chunk_hash=key, model_name=model_name, kv_rank=kv_rank)


def object_maker() -> Callable[[memoryview, int], Any]:
    """Makes adapters' memory objects of pages and their addresses."""
    management: Any = sys.modules.get("lmcache.v1.memory_management")
    if management is None:
        return MemoryObject

    import torch  # LMCache has imported it

    def make(page: memoryview, address: int) -> Any:
        tensor = torch.frombuffer(page, dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]
        metadata = management.MemoryObjMetadata(
            shape=tensor.shape, dtype=torch.uint8, address=address, phy_size=page.nbytes, ref_count=1
        )
        return management.TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None)

    return make


def layouts(block_bytes: int) -> dict[int, Any]:
    """What objects look like, by their group: there is one."""
    api: Any = sys.modules.get("lmcache.v1.distributed.api")
    described: Any = getattr(api, "MemoryLayoutDesc", None)
    if described is None:
        return {0: Layout([(block_bytes,)], ["uint8"])}

    import torch  # LMCache has imported it

    return {0: described(shapes=[torch.Size([block_bytes])], dtypes=[torch.uint8])}


def bits_of(bitmap: Any) -> list[bool]:
    """A bitmap as a column: what has ``test`` and a length (or ``size``), or any sequence.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(bitmap, Sequence):
        return [bool(bit) for bit in bitmap]
    n = len(bitmap) if hasattr(type(bitmap), "__len__") else int(bitmap.size())
    return [bool(bitmap.test(at)) for at in range(n)]
