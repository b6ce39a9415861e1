"""The check of object layouts by a pattern, before first use.

An object of LMCache is bytes here, and its key contains neither shape nor dtype. So two servers may interpret the same
object
differently: bfloat16 and float16, another order of axes. From the shapes and dtypes that LMCache reports, a pattern is
written into memory of ours, which is stored, loaded, and read in the same way (:mod:`offload._engine.layout_check`).
LMCache reports neither a free object in its own memory, nor which part of its last axis is a head.

Rule 1. A model's objects of one rank and group are checked once. If their planes come back in other places, they are
    refused.
Rule 2. Objects that could not be checked, since no tier answered, are served, and checked again a while later.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from backends.abc import ExternalBlocks, Key
from backends.base.planes import TensorPlanes

from ..._errors import LayoutCheckFailed
from .._faults import AdapterError, FaultLog
from ._memory import MemoryObjects, ObjectPlaces, Span
from ._names import ObjectKey
from ._opening import OpenEngine

if TYPE_CHECKING:
    import torch

_LONGEST_CHECK: Final = 5.0
"""Seconds that the first request waits for the check of a layout.

It waits that long if a tier is slow to answer.
"""
_NEXT_CHECK: Final = 30.0
"""Seconds from an inconclusive check to the next one."""
_MOST_SPACES: Final = 1_024
"""Ranks and groups of models that are remembered.

Beyond that, the oldest is checked again.
"""
_MOST_PARTS: Final = 16
"""Parts of the last axis that are read separately.

There are about as many as heads.
"""

Space: TypeAlias = "tuple[str, int, int]"
"""Model, rank and group."""
Describe: TypeAlias = "Callable[[int], tuple[Sequence[Any], Sequence[Any]] | None]"
"""Function that returns an object's shapes and dtypes, if known.

Its argument is the position of the key.
"""


class WrongLayout(AdapterError):
    """Planes of these objects do not come back as they were stored."""

    fault_name = "layout"


@attrs.frozen
class ObjectLayout:
    """The layout of the objects of one space."""

    space: Space
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors in an object, in their order in memory."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the tensors in an object."""

    @property
    def name(self) -> str:
        """Name of the layout, equal in all servers whose keys are equal.

        Neither shapes nor dtypes are in a key.
        """
        model, rank, group = self.space
        numbers = sum(map(math.prod, self.shapes))
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))
        # Objects of other sizes have other keys, since a key depends on how many tokens are in a chunk.
        return f"{model}/rank {rank:08x}/group {group}/{numbers} numbers of {size} bytes"


class LayoutChecks:
    """Record of the checked layouts. Thread-safe.

    Args:
        faults: counts failures.
        clock: seconds.
    """

    def __init__(self, faults: FaultLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._faults = faults
        self._clock = clock
        self._again_at: dict[Space, float] = {}
        self._wrong: dict[Space, WrongLayout] = {}

    def due(self, keys: Sequence[ObjectKey], rows: Sequence[range], describe: Describe) -> list[ObjectLayout]:
        """Return the layouts of these keys that must be checked first.

        Mostly this is one look into a table for each row of keys.
        """
        firsts: dict[Space, int] = {}
        for row in rows:
            space = _space(keys[row.start])
            if self._again_at.get(space) != math.inf:
                firsts.setdefault(space, row.start)
        found: list[ObjectLayout] = []
        for space, at in firsts.items():
            said = describe(at) if self._is_due(space) else None
            if said is not None:
                found.append(ObjectLayout(space, tuple(map(tuple, said[0])), tuple(said[1])))
        return found

    def refusal(self, keys: Sequence[ObjectKey]) -> WrongLayout | None:
        """Return the error that makes these keys unservable (rule 1), if any."""
        if not self._wrong:
            return None
        return next((self._wrong[space] for space in map(_space, keys) if space in self._wrong), None)

    def check(self, layouts: Sequence[ObjectLayout], opened: OpenEngine) -> None:
        """Check these layouts, one by one. Waits, and does not raise."""
        for layout in layouts:
            if not self._is_due(layout.space):  # another task has had it checked meanwhile
                continue
            again_at, why = math.inf, ""
            try:
                canary = ObjectCanary(opened.source, layout)
                with canary:
                    why = opened.engine.check_layout(canary, layout.name, timeout=_LONGEST_CHECK).inconclusive
            except LayoutCheckFailed as error:
                self._wrong[layout.space] = WrongLayout(f"{error}: its objects are neither stored nor loaded")
                self._faults.note("start", self._wrong[layout.space])
            except Exception as error:
                why = f"{error!r}"
            if why:
                again_at = self._clock() + _NEXT_CHECK
                self._faults.count("start", "layout not checked", why)
            self._again_at[layout.space] = again_at
            while len(self._again_at) > _MOST_SPACES:
                del self._again_at[next(iter(self._again_at))]

    def _is_due(self, space: Space) -> bool:
        return self._again_at.get(space, -math.inf) <= self._clock()


class ObjectCanary:
    """An object in memory of ours; see :class:`backends.abc.Canary`.

    A context manager: when it exits, the object is no longer being stored.

    Args:
        source: of the engine.
        layout: of the object.

    Raises:
        ValueError: the object does not fit a page, or its layout is invalid.
    """

    def __init__(self, source: MemoryObjects, layout: ObjectLayout) -> None:
        import torch  # LMCache has imported it

        self._source = source
        self._memory = torch.zeros(source.block_bytes, dtype=torch.uint8)
        self._planes = TensorPlanes(_tensors(self._memory, layout), plane_axes=None)
        self._pattern: tuple[torch.Tensor, array[float]] | None = None
        self._blocks: ExternalBlocks | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self._take_back()

    def write(self, key: Key, seed: str) -> tuple[ExternalBlocks, array[float]]:
        """Write the pattern into the object."""
        self._take_back()
        if self._pattern is None:  # a check uses one seed, and asks several times
            [samples] = self._planes.fill([0], seed)
            self._pattern = self._memory.clone(), samples
        self._memory.copy_(self._pattern[0])
        self._blocks = self._source.lend([key], [self._span])
        return self._blocks, self._pattern[1]

    def clear(self) -> PlanarPlaces:
        """Write zeros into the object."""
        self._take_back()
        self._memory.zero_()
        return PlanarPlaces(self._span, self._source.block_bytes, self._planes)

    @property
    def _span(self) -> Span:
        size = self._source.block_bytes
        return Span(self._memory.data_ptr(), size, size, self._memory)

    def _take_back(self) -> None:
        if self._blocks is not None:
            self._source.take_back(self._blocks)
            self._blocks = None


class PlanarPlaces(ObjectPlaces):
    """One object to load into, whose planes are read."""

    def __init__(self, span: Span, block_bytes: int, planes: TensorPlanes) -> None:
        super().__init__([span], block_bytes)
        self._planes = planes

    @property
    def plane_names(self) -> Sequence[str]:
        """The planes of the object by its shapes."""
        return self._planes.plane_names

    def plane_samples(self, positions: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of the object."""
        return list(self._planes.samples([0] * len(positions)))


def _space(key: ObjectKey) -> Space:
    return key.model_name, key.kv_rank, key.object_group_id


def _tensors(memory: torch.Tensor, layout: ObjectLayout) -> dict[str, torch.Tensor]:
    """Return the planes of an object, by axes.

    A plane is one index of all axes but the last two, and one part of the last axis.
    """
    found: dict[str, torch.Tensor] = {}
    start = 0
    for at, (shape, dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
        size = math.prod(shape) * dtype.itemsize
        if not size or start + size > len(memory):
            raise ValueError(f"shapes {layout.shapes} of {layout.dtypes} do not fit {len(memory)} bytes")
        tensor = memory[start : start + size].view(dtype).reshape(shape)
        outer = math.prod(shape[:-2])
        width = shape[-1] // math.gcd(shape[-1], _MOST_PARTS)
        rows = tensor.reshape(outer, -1, shape[-1])
        for plane in range(outer):
            for part in range(shape[-1] // width):
                name = f"tensor {at} plane {plane} part {part}"
                found[name] = rows[plane, :, part * width : (part + 1) * width].unsqueeze(0)
        start += size
    return found
