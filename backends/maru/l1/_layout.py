"""Layout of one block's tensors in its page, without torch. Pure.

A block is the KV cache of one chunk of tokens in all layers: one tensor, or several, one after the other, each at a
multiple of its item's size. A page holds one block, and begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Size of an item in bytes, by torch's name of the dtype."""

PAGE_STEP_BYTES: Final = 64
"""Alignment of pages in bytes: a cache line.

No two blocks share one, and every dtype is aligned in every page.
"""


@attrs.frozen
class TensorPlace:
    """Place of one tensor of a block in its page."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the dtype, such as ``bfloat16``."""
    offset: int
    """Offset of its first byte in the page."""
    nbytes: int
    """Size in bytes."""


@attrs.frozen
class KVLayout:
    """The layout of every block of one engine. Made by :func:`layout_of`.

    Two equal values are the same layout.
    """

    tensors: tuple[TensorPlace, ...]
    """Tensors in the order of their offsets."""
    fmt: str = ""
    """The engine's name for the order of its axes; only compared."""
    chunk_size_in_tokens: int | None = None
    """Number of tokens of a block; only compared."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, which are registered and read."""
        last = self.tensors[-1]
        return last.offset + last.nbytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: those of a block, rounded up."""
        return -(-self.block_bytes // PAGE_STEP_BYTES) * PAGE_STEP_BYTES

    def __str__(self) -> str:
        tensors = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in self.tensors)
        named = f" ({self.fmt})" if self.fmt else ""
        of = f", {self.chunk_size_in_tokens} tokens" if self.chunk_size_in_tokens else ""
        return f"{tensors}{named}{of}: {self.block_bytes} bytes"


def layout_of(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[object] | object,
    *,
    fmt: object = "",
    chunk_size_in_tokens: int | None = None,
    full_chunk_size_bytes: int | None = None,
) -> KVLayout:
    """Return the layout of blocks that are made of such tensors.

    Args:
        shapes: shapes of the tensors of one block.
        dtypes: one for each, or one for all: torch's or numpy's own, or their names.
        fmt: the engine's name for the order of the axes.
        chunk_size_in_tokens: number of tokens of a block.
        full_chunk_size_bytes: expected size of a block, if the engine gives one.

    Raises:
        ValueError: no tensor, a tensor without bytes, another number of dtypes than of shapes, an unknown dtype, or
            another number of bytes than expected.
    """
    if isinstance(dtypes, Sequence) and not isinstance(dtypes, str):
        names = [_name_of(one) for one in dtypes]
    else:
        names = [_name_of(dtypes)] * len(shapes)
    if not shapes or len(names) != len(shapes):
        raise ValueError(
            f"{len(shapes)} shapes and {len(names)} dtypes: must be one of each per tensor, for at least one tensor"
        )
    tensors: list[TensorPlace] = []
    end = 0
    for shape, name in zip(shapes, names, strict=True):
        item = ITEM_BYTES[name]
        nbytes = math.prod(shape) * item
        if nbytes <= 0 or min(shape, default=1) < 0:
            raise ValueError(f"a tensor of shape {tuple(shape)} has no bytes")
        offset = -(-end // item) * item
        tensors.append(TensorPlace(tuple(map(int, shape)), name, offset, nbytes))
        end = offset + nbytes
    if full_chunk_size_bytes not in (None, end):
        raise ValueError(f"full_chunk_size_bytes is {full_chunk_size_bytes}, but these tensors have {end} bytes")
    return KVLayout(tuple(tensors), str(fmt), chunk_size_in_tokens)


def _name_of(dtype: Any) -> str:
    """Return torch's name of a dtype.

    For example of ``torch.bfloat16``, ``numpy.dtype("float16")``, ``numpy.float16`` or ``"float16"``.
    """
    text = (
        dtype
        if isinstance(dtype, str)
        else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    )
    name = str(text).rpartition(".")[2]
    if name not in ITEM_BYTES:
        raise ValueError(f"{dtype!r} is not a dtype of a KV cache; those are {', '.join(ITEM_BYTES)}")
    return name
