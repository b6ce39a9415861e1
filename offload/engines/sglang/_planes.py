"""The axes of SGLang's pool, which give its pages' bytes their meaning.

A page is stored and loaded as runs of bytes, whose addresses SGLang's pool computes. Whether they end where a kernel
reads them, only its tensors show: which layer, head, and whether a key or a value. So a pattern is written into a free
page by the axes, stored and loaded as any other page, and read by the axes (:class:`PageCanary`); and pages that are
loaded are compared by them now and then (``plane_samples`` of :mod:`._pages`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from backends.abc import ExternalBlocks, Key
from backends.base.planes import TensorPlanes

from ..._errors import DrainUnproven
from ._pages import HostPages, LentPages

if TYPE_CHECKING:
    import torch

    from ._sglang import HostKVCache

_AXES: Final = {
    # By the pool's layout: the axes of its keys, and of its values, followed by the numbers of one head.
    "layer_first": ("layer", "token", "head"),
    "page_first": ("token", "layer", "head"),
    "page_first_direct": ("page", "layer", "token", "head"),
    "page_head": ("page", "head", "token", "layer"),
}


def pool_planes(pool: HostKVCache) -> TensorPlanes | None:
    """Return the planes of a pool's pages.

    A plane has the keys or values of one head in one layer.

    ``None`` for an unknown layout.
    """
    axes = _AXES.get(getattr(pool, "layout", ""))
    if axes is None:
        return None
    tensors = {name: tensor for name, tensor in _tensors(pool).items() if tensor.ndim == len(axes) + 1}
    if not tensors:
        return None
    if "page" not in axes:
        at = axes.index("token")
        axes = (*axes[:at], "page", *axes[at:])
        tensors = {
            name: tensor.unflatten(at, (-1, pool.page_size))  # type: ignore[no-untyped-call]
            for name, tensor in tensors.items()
        }
    plane_axes = {axis: axes.index(axis) for axis in ("layer", "head")}
    return TensorPlanes(tensors, block_axis=axes.index("page"), plane_axes=plane_axes)


def _tensors(pool: Any) -> dict[str, torch.Tensor]:
    """Return keys and values, or one latent tensor (MLA)."""
    both = pool.kv_buffer
    if isinstance(both, tuple | list):  # heads of values have another size than those of keys
        keys, values = both
        return {"key": keys, "value": values}
    if both.ndim == len(_AXES[pool.layout]) + 2:
        return {"key": both[0], "value": both[1]}
    return {"latent": both}


@contextmanager
def free_page(pool: HostKVCache) -> Iterator[torch.Tensor | None]:
    """Allocate a page, and yield its tokens.

    ``None`` if no page is free. The page is given back when the context exits, unless a copy may still use it.
    """
    tokens = pool.alloc(pool.page_size)
    try:
        yield tokens
    except DrainUnproven:
        tokens = None
        raise
    finally:
        if tokens is not None:
            pool.free(tokens)


@attrs.define(eq=False)
class PageCanary:
    """A free page of the pool; see :class:`backends.abc.Canary`."""

    _source: HostPages
    _planes: TensorPlanes
    _page: int
    _stored_from: Callable[[], LentPages]
    """Returns the pages that SGLang would pass to store the page."""
    _loaded_into: Callable[[], LentPages]
    """Returns the pages that SGLang would pass to load it."""
    _blocks: ExternalBlocks | None = None

    def write(self, key: Key, seed: str) -> tuple[ExternalBlocks, array[float]]:
        """Write the pattern into the page."""
        self.end()
        [samples] = self._planes.fill([self._page], seed)
        self._blocks = self._source.lend([key], self._stored_from(), [0])
        return self._blocks, samples

    def clear(self) -> LentPages:
        """Write zeros into the page."""
        self.end()
        self._planes.clear([self._page])
        return self._loaded_into()

    def end(self) -> None:
        """End the store of the page, before the next one. Idempotent."""
        if self._blocks is not None:
            self._source.take_back(self._blocks)
            self._blocks = None


class FlatPage(LentPages):
    """A flat page to load into, copied to the pool for sampling.

    Args:
        pool: SGLang's pool.
        planes: of its pages.
        first: the first token of the page.
        block_bytes: the size of a page.
    """

    def __init__(self, pool: HostKVCache, planes: TensorPlanes, first: int, block_bytes: int) -> None:
        flat = pool.get_dummy_flat_data_page()
        super().__init__(
            [flat.data_ptr()], [block_bytes], 1, block_bytes, flat, planes=planes, numbers=[first // pool.page_size]
        )
        self._put = partial(pool.set_from_flat_data_page, first, flat)

    def plane_samples(self, refs: Sequence[int]) -> list[array[float] | None]:
        """Put the page into the pool, and return its samples."""
        self._put()
        return super().plane_samples(refs)
