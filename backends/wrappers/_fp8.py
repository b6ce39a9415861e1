"""Quantization to 8-bit floats, with rounded values.

Half the size of 16-bit floats and a quarter of that of 32-bit floats.

    one scale for each row, 4 bytes each | one e4m3 value for each value

A row is a run of values that share a scale: its largest value becomes 448, the largest of e4m3. So a value is decoded to within
1/16 of itself, or of the smallest value of its row that is not rounded to zero (2**-10 of the scale, which is 1/448 of the
row's largest value).

The oracle: encoding a decoded block again gives the same bytes. So a block that is encoded many times loses precision once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ._chain import Context, Damaged, LossyNotChosen, MissingExtra
from ._coding import Pool

if TYPE_CHECKING:
    import torch

_ITEM_BYTES: Final = {"float16": 2, "bfloat16": 2, "float32": 4}
_SCALE_BYTES: Final = 4
_LARGEST: Final = 448.0
_SMALLEST_SCALE: Final = 2.0**-126
"""The smallest normal number.

The scale of a row of zeros, and of one with values next to zero.
"""
_COARSE_SCALE: Final = 2.0**-13
"""Scale below which float16 is coarser than e4m3 near zero.

The smallest e4m3 values are then closer to each other than float16 values.
"""
_ROUNDS: Final = 8
"""Most rounds of rounding back and forth.

Each comes closer, and two have always been enough.
"""
_AT_ONCE: Final = (1 << 15) - 1
"""Values at a time.

From 2**15 on torch spreads an operation over all cores, but a copy thread should use one, and its intermediate 32-bit
values should stay in the cache.
"""


class Fp8:
    """Lossy quantization of 16- or 32-bit floats to e4m3.

    Row by row. The only wrapper that makes fixed slots smaller.

    Infinities and NaN are decoded as NaN. Use separate keys for blocks that pass through it (:func:`layout_of`), since their
    values differ from the computed ones.

    Args:
        dtype: the type of the values: ``float16``, ``bfloat16`` or ``float32``; also as a torch dtype.
        row: number of neighbouring values that share a scale; the size of a head, for example. Fewer need more room and
            lose less.
        lossy: must be True, to confirm that values are rounded.

    Raises:
        LossyNotChosen: ``lossy`` is not True.
        MissingExtra: torch is not installed.
        ValueError: another dtype, or no row.
    """

    def __init__(self, dtype: str | torch.dtype, *, row: int = 128, lossy: bool = False) -> None:
        name = str(dtype).removeprefix("torch.")
        if name not in _ITEM_BYTES:
            raise ValueError(f"dtype is {name}, but must be one of {', '.join(_ITEM_BYTES)}")
        if row < 1:
            raise ValueError(f"row is {row}, but must be at least 1")
        if lossy is not True:
            raise LossyNotChosen("Fp8 changes values: set lossy=True to accept that")
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as exc:
            raise MissingExtra("Fp8", "torch", "torch") from exc
        self.dtype: str = name
        """Type of the values."""
        self.row: int = row
        """Number of values that share a scale."""
        self._item_bytes = _ITEM_BYTES[name]
        # A table lookup is three times as fast as a conversion.
        self._meaning: Any = _meanings(self._torch)
        self._rooms = Pool(lambda: _Room(self._torch, max(_AT_ONCE, row)))

    def __repr__(self) -> str:
        return f"Fp8({self.dtype!r}, row={self.row}, lossy=True)"

    @property
    def id(self) -> bytes:
        """Name of the format, with dtype and row length."""
        return f"fp8-e4m3/1:{self.dtype}:{self.row}".encode()

    @property
    def lossy(self) -> bool:
        """Whether decoded bytes may differ: True, values are rounded."""
        return True

    def bound(self, size: int) -> int:
        """Return the exact size of a quantized block.

        A byte for each value and four for each row.
        """
        values, rest = divmod(size, self._item_bytes)
        if rest:
            raise ValueError(f"{size} bytes are not a whole number of {self.dtype} values")
        return values + _SCALE_BYTES * -(-values // self.row)

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        """Quantize floats to e4m3, with one scale per row."""
        made = self.bound(src.nbytes)
        if made:
            scales, small = self._stored(dst[:made])
            values = self._values(src)
            with self._rooms.take() as room:
                self._quantize(values, scales, small, room)
                if not math.isfinite(scales.max().item()):  # rare: infinite values and NaN must not scale their row
                    self._quantize_finite(values, scales, small, room)
                if self.dtype == "float16" and self._coarse(scales):
                    self._settle(values, scales, small, room)
        return made

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        """Decode quantized values to 16- or 32-bit floats.

        Raises:
            Damaged: ``src`` has the wrong length. No other error can be found: every byte is a value.
        """
        if dst.nbytes % self._item_bytes or src.nbytes != self.bound(dst.nbytes):
            raise Damaged
        if dst.nbytes:
            scales, small = self._stored(src)
            numbers = small.view(self._torch.uint8)
            with self._rooms.take() as room:
                for rows, span, part in self._parts(self._values(dst)):
                    which, wide = room.which[: part.numel()], room.wide[: part.numel()]
                    which.copy_(numbers[span])
                    self._torch.index_select(self._meaning, 0, which, out=wide)
                    part.copy_(wide.view(part.shape).mul_(scales[rows, None]))

    def _quantize(self, values: Any, scales: Any, small: Any, room: _Room) -> None:
        """Quantize each row by its largest value.

        By the quotient none is larger than 448, except for a rounding that e4m3 rounds away.
        """
        torch = self._torch
        for rows, span, part in self._parts(values):
            wide, sizes = room.shaped(part.shape)
            scale = scales[rows]
            wide.copy_(part)
            torch.amax(torch.abs(wide, out=sizes), 1, out=scale)
            scale.div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
            small[span].copy_(wide.div_(scale[:, None]).view(-1))

    def _quantize_finite(self, values: Any, scales: Any, small: Any, room: _Room) -> None:
        """Quantize each row, with infinite values and NaN as NaN.

        They do not count for the scale.
        """
        torch = self._torch
        for rows, span, part in self._parts(values):
            wide, sizes = room.shaped(part.shape)
            scale = scales[rows]
            wide.copy_(part)
            finite = torch.isfinite(wide)
            sizes.copy_(torch.where(finite, wide, 0.0).abs_())
            torch.amax(sizes, 1, out=scale)
            scale.div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
            small[span].copy_(torch.where(finite, wide, torch.nan).div_(scale[:, None]).view(-1))

    def _coarse(self, scales: Any) -> bool:
        """Return whether a row is nearly zero, but not all zeros."""
        return bool(((scales < _COARSE_SCALE) & (scales > _SMALLEST_SCALE)).any().item())

    def _settle(self, values: Any, scales: Any, small: Any, room: _Room) -> None:
        """Choose values that decoding leaves unchanged near zero.

        There float16 is coarser than e4m3, so decoding rounds once more.
        """
        torch = self._torch
        for rows, span, part in self._parts(values):
            wide, _ = room.shaped(part.shape)
            scale, chosen = scales[rows, None], small[span]
            for _ in range(_ROUNDS):
                before = chosen.view(torch.uint8).clone()
                wide.copy_(chosen.view(part.shape))
                wide.copy_(wide.mul_(scale).to(torch.float16)).div_(scale)
                chosen.copy_(wide.view(-1))
                if torch.equal(before, chosen.view(torch.uint8)):
                    break

    def _parts(self, values: Any) -> Iterator[tuple[slice, slice, Any]]:
        """Yield portions of whole rows: row slice, value slice, values.

        A portion has as many rows as are worth one operation. The last row may be shorter.
        """
        row, n = self.row, values.numel()
        whole, step = n // row, max(1, _AT_ONCE // row)
        for start in range(0, whole, step):
            stop = min(whole, start + step)
            span = slice(start * row, stop * row)
            yield slice(start, stop), span, values[span].view(-1, row)
        if n > whole * row:
            span = slice(whole * row, n)
            yield slice(whole, whole + 1), span, values[span].view(1, -1)

    def _values(self, plain: memoryview) -> Any:
        return self._over(plain).view(getattr(self._torch, self.dtype))

    def _stored(self, stored: memoryview) -> tuple[Any, Any]:
        """Return the scales and the values of a stored block."""
        rows = -(-stored.nbytes // (self.row + _SCALE_BYTES))
        tensor = self._over(stored)
        cut = rows * _SCALE_BYTES
        return tensor[:cut].view(self._torch.float32), tensor[cut:].view(self._torch.float8_e4m3fn)

    def _over(self, memory: memoryview) -> Any:
        """Return a tensor over memory, which stays the caller's.

        Read-only memory is copied, since torch does not support it.
        """
        buffer = bytearray(memory) if memory.readonly else memory
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8)


class _Room:
    """The working memory of one thread.

    Fresh memory for each operation would cost more than the operation.
    """

    def __init__(self, torch: Any, n: int) -> None:
        self.wide = torch.empty(n, dtype=torch.float32)
        self.sizes = torch.empty(n, dtype=torch.float32)
        self.which = torch.empty(n, dtype=torch.int32)
        self._shape: Any = None
        self._shaped: tuple[Any, Any] = (None, None)

    def shaped(self, shape: Any) -> tuple[Any, Any]:
        """Return two tensors of this shape in the working memory.

        It mostly is the shape of the last call.
        """
        if shape != self._shape:
            n = shape.numel()
            self._shape, self._shaped = shape, (self.wide[:n].view(shape), self.sizes[:n].view(shape))
        return self._shaped


def _meanings(torch: Any) -> Any:
    """Return the values of the 256 bytes, as 32-bit floats."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
