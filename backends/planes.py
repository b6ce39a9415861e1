"""Planes: what the bytes of a block mean to the engine that computes them, read by indexing its tensors.

A block of a KV cache has keys and values, of several heads, in several layers: its *planes*. A checksum says whether the
bytes of a block are those that were stored. Whether they lie in the planes that they belong to, it cannot say: two planes of
one size that have changed places are the same bytes, in another layout. So planes are read here by the names of their axes,
and never by the code that copies blocks, which would read them back as it has written them.

Rule 1. Of a plane a few numbers are read, its *samples*: enough to tell one plane from another, and any request from any other
        one. Single bits are the business of checksums.
Rule 2. Samples are compared within a tolerance. A block may have passed through a codec that loses bits, or have been
        computed by somebody else for the same key, whose last bits differ.

torch is imported when planes are made, not with this module.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

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
    where: tuple[torch.Tensor, ...]
    """Where the samples lie, on each of the other axes."""
    positions: torch.Tensor
    """The same, as positions in a flat plane."""


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
        self.plane_names: tuple[str, ...] = tuple(name for group in self._groups for name in group.names)

    def __repr__(self) -> str:
        return f"<TensorPlanes: {len(self.plane_names)} in {len(self._groups)} tensors>"

    def samples(self, blocks: Sequence[int]) -> list[array[float]]:
        """The samples of each of these blocks, :data:`SAMPLES` for each plane. Any thread; waits for a device."""
        import torch

        with torch.inference_mode(), self._own_stream():
            parts = [_samples(group, blocks) for group in self._groups]
            rows = torch.cat([part.to("cpu", torch.float32) for part in parts], 1).contiguous()
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
                    pattern = [_pattern(f"{seed} {at} {name}", group.view, group.where) for name in group.names]
                    rest = group.view.shape[group.view.ndim - len(group.where) :]
                    target = group.view[block]
                    target.copy_(torch.stack(pattern).view(*target.shape[: target.ndim - len(rest)], *rest))
                    samples += [plane[group.positions.cpu()].to(torch.float32) for plane in pattern]
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
    import torch

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
    positions = torch.tensor([(2 * at + 1) * n // (2 * SAMPLES) for at in range(SAMPLES)], device=tensor.device)
    where = torch.unravel_index(positions, tuple(rest)) if rest else ()
    return _Group(view, names, tuple(where), positions)


def _samples(group: _Group, blocks: Sequence[int]) -> torch.Tensor:
    """Of each block a row: the samples of its first plane, of its second one."""
    import torch

    view, where = group.view, group.where
    index = torch.tensor(blocks, device=view.device)
    if not where:  # a plane is one number
        return view[index].reshape(len(blocks), -1, 1).expand(-1, -1, SAMPLES).reshape(len(blocks), -1)
    between: list[slice] = [slice(None)] * (view.ndim - 1 - len(where))
    # Only the samples are read: blocks are large, and this is asked for while others wait.
    index_of: Any = (index[:, None], *between, *[positions[None, :] for positions in where])
    read = view[index_of]
    if not between:
        return read
    return read.reshape(len(blocks), SAMPLES, -1).transpose(1, 2).reshape(len(blocks), -1)


def _pattern(name: str, view: torch.Tensor, where: Sequence[torch.Tensor]) -> torch.Tensor:
    """The numbers of one plane, flat, on the host: of the dtype of the tensor."""
    import torch

    n = math.prod(view.shape[view.ndim - len(where) :])
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    if view.dtype.is_floating_point:
        return (torch.rand(n, generator=generator) * 2 - 1).to(view.dtype)
    return torch.randint(0, 127, (n,), generator=generator).to(view.dtype)


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
