"""Planes: what the bytes of a block mean to the engine that computes them, read by indexing its tensors.

A block of a KV cache has keys and values, of several heads, in several layers: its *planes*. A checksum says whether the
bytes of a block are those that were stored. Whether they lie in the planes that they belong to, it cannot say: two planes of
one size that have changed places are the same bytes, in another layout. So planes are read here by the names of their axes,
and never by the code that copies blocks, which would read them back as it has written them.

Rule 1. Of a plane a few numbers are read, its *samples*: enough to tell one plane from another, and any request from any other
        one. Single bits are the business of checksums.
Rule 2. Samples are compared within a tolerance. A block may have passed through a codec that loses bits, or have been
        computed by another process for the same key, so that last bits differ.

torch is imported when planes are made, not with this module.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import attrs
import xxhash

if TYPE_CHECKING:
    import torch

SAMPLES: Final = 8
"""Numbers that are read of each plane, evenly apart."""


@attrs.frozen(eq=False)
class _Group:
    """The planes of one tensor."""

    view: torch.Tensor
    """Its axes: blocks, those that tell planes apart, the others."""
    names: tuple[str, ...]
    """Of the planes."""
    plane_shape: tuple[int, ...]
    """The sizes of the other axes."""
    positions: list[int]
    """Where the samples lie in a flat plane."""


@attrs.frozen(eq=False)
class _Gather:
    """Where the samples of all planes lie that are in one storage: read by one call, for each costs more than its numbers."""

    flat: torch.Tensor
    offsets: torch.Tensor
    """Of block 0, in items."""
    strides: torch.Tensor
    """From one block to the next, of each."""

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Of each block a row."""
        import torch

        numbers = torch.tensor(blocks, device=self.flat.device).unsqueeze(1)
        return self.flat[torch.addcmul(self.offsets, numbers, self.strides)]


class TensorPlanes:
    """The planes of blocks in tensors.

    Args:
        tensors: tensors of any dtype, by name: one for each layer say. Where keys and values are packed into one axis, a
            slice of it for each.
        block_axis: the axis that counts blocks, in all of them.
        plane_axes: the axes that tell planes apart, by name: ``{"kv": 0, "head": 3}``. None: each tensor is one plane.

    Raises:
        ValueError: no tensor, no such axis, one axis twice, or a tensor that holds nothing.

    Attributes:
        plane_names: the name of each plane, in the order of their samples.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        block_axis: int = 0,
        plane_axes: Mapping[str, int] | None = None,
    ) -> None:
        axes = dict(plane_axes or {})
        self._stream: torch.cuda.Stream | None = None
        self._groups = [_group(name, tensor, block_axis, axes) for name, tensor in tensors.items()]
        if not self._groups:
            raise ValueError("tensors is empty, but a block has at least one plane")
        self._gathers = [_gather(list(groups)) for _, groups in itertools.groupby(self._groups, _storage_of)]
        self.plane_names: tuple[str, ...] = tuple(name for group in self._groups for name in group.names)

    def __repr__(self) -> str:
        return f"<TensorPlanes: {len(self.plane_names)} in {len(self._groups)} tensors>"

    def samples(self, blocks: Sequence[int]) -> list[array[float]]:
        """The samples of each of these blocks, :data:`SAMPLES` for each plane. Any thread; waits for a device."""
        import torch

        with torch.inference_mode(), self._own_stream():
            parts = [gather.read(blocks).to("cpu", torch.float32) for gather in self._gathers]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return [array("f", row.numpy().tobytes()) for row in rows]

    def fill(self, blocks: Sequence[int], seed: str) -> list[array[float]]:
        """Write a pattern into these blocks, another one into each plane of each, and return the samples that it has.

        What is written follows from the names of the planes, the position of the block and ``seed`` alone: it is the same in
        every process whose planes have the same names and shapes, wherever they lie.
        """
        import torch

        expected: list[array[float]] = []
        with torch.inference_mode(), self._own_stream():
            for at, block in enumerate(blocks):
                samples: list[torch.Tensor] = []
                for group in self._groups:
                    n = math.prod(group.plane_shape)
                    pattern = [_pattern(f"{seed} {at} {name}", n, group.view.dtype) for name in group.names]
                    target = group.view[block]
                    target.copy_(torch.stack(pattern).view(target.shape))
                    samples += [plane[group.positions].to(torch.float32) for plane in pattern]
                expected.append(array("f", torch.cat(samples).numpy().tobytes()))
        return expected

    def clear(self, blocks: Sequence[int]) -> None:
        """Write zeros into these blocks."""
        import torch

        with torch.inference_mode(), self._own_stream():
            for group in self._groups:
                for block in blocks:
                    group.view[block].zero_()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a device, beside what it computes; what was begun in here is over behind it.

        On the stream of the forward pass, a few numbers would be read behind all that is queued there.
        """
        device = self._groups[0].view.device
        if device.type != "cuda":
            yield
            return
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _group(name: str, tensor: torch.Tensor, block_axis: int, plane_axes: Mapping[str, int]) -> _Group:

    chosen = [block_axis, *plane_axes.values()]
    if not all(-tensor.ndim <= axis < tensor.ndim for axis in chosen):
        raise ValueError(f"axes {chosen} of {name}, which has {tensor.ndim} axes")
    first = [axis % tensor.ndim for axis in chosen]
    if len(set(first)) < len(first):
        raise ValueError(f"axes {chosen} of {name}: each of another meaning")
    if not tensor.numel():
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} holds no blocks")
    view = tensor.permute(*first, *[axis for axis in range(tensor.ndim) if axis not in first])
    split, rest = view.shape[1 : len(first)], view.shape[len(first) :]
    names = tuple(
        " ".join([name, *[f"{axis} {at}" for axis, at in zip(plane_axes, index, strict=True)]])
        for index in itertools.product(*map(range, split))
    )
    n = math.prod(rest)
    # In the middle of equal parts: a first and a last number are what a fault at an edge would leave alone.
    return _Group(view, names, tuple(rest), [(2 * at + 1) * n // (2 * SAMPLES) for at in range(SAMPLES)])


def _storage_of(group: _Group) -> tuple[object, ...]:
    return group.view.untyped_storage().data_ptr(), group.view.dtype, group.view.device


def _gather(groups: Sequence[_Group]) -> _Gather:
    """The samples of groups that share a storage."""
    import torch

    view = groups[0].view
    storage = view.untyped_storage()
    flat = torch.empty(0, dtype=view.dtype, device=view.device).set_(
        storage, 0, (storage.nbytes() // view.element_size(),), (1,)
    )
    places = [_offsets(group) for group in groups]
    strides = [group.view.stride(0) for group, offsets in zip(groups, places, strict=True) for _ in range(len(offsets))]
    offsets = torch.tensor([offset for column in places for offset in column], device=view.device)
    return _Gather(flat, offsets, torch.tensor(strides, device=view.device))


def _offsets(group: _Group) -> list[int]:
    """Where the samples of block 0 lie in the storage, in items, plane by plane."""
    view, inner = group.view, len(group.plane_shape)
    split = view.ndim - 1 - inner
    planes = itertools.product(*[range(size) for size in view.shape[1 : 1 + split]])
    starts = [sum(map(operator.mul, index, view.stride()[1 : 1 + split])) for index in planes]
    within: list[int] = []
    for position in group.positions:
        offset = 0
        for size, stride in zip(reversed(group.plane_shape), reversed(view.stride()[1 + split :]), strict=True):
            position, at = divmod(position, size)
            offset += at * stride
        within.append(offset)
    return [view.storage_offset() + start + offset for start in starts for offset in within]


def _pattern(name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of one plane, flat, on the host."""
    import torch

    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    if dtype.is_floating_point:
        return (torch.rand(n, generator=generator) * 2 - 1).to(dtype)
    return torch.randint(0, 127, (n,), generator=generator).to(dtype)


# --- comparing, which needs no tensor -----------------------------------------------------------------------------------

TOLERANCE: Final = 0.25
"""How far apart the samples of a plane may be, as a share of their lengths together. Two planes that have nothing to do with
each other are 0.7 apart; fp8 and back moves one by 0.03, and computing it in another batch by less."""

_MOST_NAMED: Final = 16
"""Planes that are looked for in each other's places."""


def difference(names: Sequence[str], expected: array[float], found: array[float]) -> str | None:
    """What is different between the samples of a block that were expected and those that were found; ``None`` if nothing is.

    Args:
        names: of the planes.
        expected: what the block has to be.
        found: what it is.
    """
    if len(expected) != len(found) or len(expected) % max(1, len(names)):
        return f"{len(found)} samples in place of {len(expected)}"
    if expected.tobytes() == found.tobytes():
        return None
    size = len(expected) // len(names)
    was = [expected[at : at + size] for at in range(0, len(expected), size)]
    now = [found[at : at + size] for at in range(0, len(found), size)]
    wrong = [at for at in range(len(names)) if not _alike(was[at], now[at])]
    if not wrong:
        return None
    moved = {
        at: next((to for to in wrong if to != at and _alike(was[to], now[at])), None) for at in wrong[:_MOST_NAMED]
    }
    at, to = wrong[0], moved[wrong[0]]
    if to is not None and None not in moved.values():
        return f"{len(wrong)} of {len(names)} planes are in each other's places: {names[at]} holds {names[to]}"
    return f"{len(wrong)} of {len(names)} planes are other ones, the first of them {names[at]}"


def _alike(one: array[float], other: array[float]) -> bool:
    if one == other:
        return True
    apart, lengths = math.dist(one, other), math.hypot(*one) + math.hypot(*other)
    if math.isfinite(apart) and math.isfinite(lengths):
        return apart <= TOLERANCE * lengths
    # A number that is none: compared is what is one on both sides, if the same are none.
    pairs = list(zip(one, other, strict=True))
    if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return False
    finite = [(a, b) for a, b in pairs if math.isfinite(a)]
    return _alike(array("f", [a for a, _ in finite]), array("f", [b for _, b in finite])) if finite else True
