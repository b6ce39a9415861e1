"""Pages as torch tensors, without a copy. torch and numpy are imported here, when the first tensor is touched.

Made by way of numpy, whose array holds an *export* of the page's memory: as long as a tensor lives, its page stays mapped, and
one that is being written does not become free. (``torch.frombuffer`` holds a reference, but no export.)

What is read looks writable as a tensor, since torch knows no other ones. Writing another owner's page ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ._layout import KVLayout


def tensors_over(pages: Iterable[memoryview], layout: KVLayout) -> list[tuple[torch.Tensor, ...]]:
    """For each page its tensors, in the order of the layout.

    Args:
        pages: writable, of at least ``layout.block_bytes`` bytes each.
        layout: what they hold.

    Raises:
        ImportError: the torch extra is not installed.
    """
    import numpy
    import torch

    columns = [(place, getattr(torch, place.dtype)) for place in layout.tensors]
    made: list[tuple[torch.Tensor, ...]] = []
    for page in pages:
        flat = torch.from_numpy(numpy.frombuffer(page, dtype=numpy.uint8))
        made.append(
            tuple(
                flat[place.offset : place.offset + place.nbytes].view(dtype).view(place.shape)
                for place, dtype in columns
            )
        )
    return made
