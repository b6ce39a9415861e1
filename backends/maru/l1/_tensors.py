"""Pages as torch tensors, without a copy.

torch and numpy are imported when the first tensor is made. The tensors are made from numpy arrays, which hold an
*export* of the page's memory: as long as a tensor lives, its page stays mapped, and a page that is being written does
not become free. (``torch.frombuffer`` holds a reference, but no export.)

A tensor of a page that is read looks writable, since torch has no other ones. Writing another owner's page ends the
process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ._layout import KVLayout


def tensors_over(pages: Iterable[memoryview], layout: KVLayout) -> list[tuple[torch.Tensor, ...]]:
    """Return the tensors of each page, in the order of the layout.

    Args:
        pages: writable, of at least ``layout.block_bytes`` bytes each.
        layout: the layout of the pages.

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
