"""Keys of SGLang's pages. Pure.

SGLang's hash of a page covers every token before it, the adapter and the cache salt of the request. Everything else
that the bytes of a page depend on is added here: model, dtype, layout of the pool, ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias

import attrs

from backends.abc import Key

from ..._keys import BlockKey, block_key

Form: TypeAlias = Literal["runs", "flat"]
"""Order of a page's bytes in a block.

``runs``: run after run, as a pool lists them; ``flat``: as its flat page has them. The two differ if a pool keeps
layers apart: it lists K and V of each layer, and its flat page has all of K first.
"""


class Ranks(Protocol):
    """The part of a model's KV that a process holds.

    The attributes are those of SGLang's configuration of a storage backend.
    """

    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def attn_cp_rank(self) -> int: ...
    @property
    def attn_cp_size(self) -> int: ...
    @property
    def is_mla_model(self) -> bool: ...


_GEOMETRY: Final = (
    # The pool's own attributes. Two pools may have pages of one size, and differ in any of these.
    "layout",
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)


def layout_text(pool: object, run_bytes: Sequence[int]) -> str:
    """Return a text of everything that gives a page's bytes meaning.

    Args:
        pool: SGLang's host pool.
        run_bytes: the sizes of the runs of one page, in their order.
    """
    said = [f"{name}={getattr(pool, name)}" for name in _GEOMETRY if getattr(pool, name, None) is not None]
    return f"{type(pool).__name__} {' '.join(said)} runs={','.join(map(str, run_bytes))}"


def untagged(model: str | None, pool: object) -> str | None:
    """Return the model's configured name, without the tag of the pool.

    SGLang appends the format of a pool, which :func:`layout_text` has. With the tag, the path of a checkpoint leads
    nowhere, and its weights would have no fingerprint.
    """
    tag = getattr(pool, "storage_format_tag", None)
    if not model or not tag:
        return model
    return None if model == tag else model.removesuffix(f"-{tag}")


@attrs.frozen
class PageNaming:
    """The naming of one process's pages.

    It is a value, equal in every process that has the same model, layout and ranks.
    """

    model: str
    """Name of the model, with its revision."""
    dtype: str
    """Dtype of the stored KV."""
    layout: str
    """Arrangement of a page's bytes: :func:`layout_text`."""
    ranks: Ranks
    """Part of the model's KV."""
    tenant: str = ""
    """Tenant that may find the pages."""

    def keys(self, hashes: Sequence[str], form: Form = "runs") -> list[Key]:
        """Return one key for each page, by SGLang's hash of it."""
        salt = self._salt(form)
        return [block_key(one.encode(), salt=salt) for one in hashes]

    def title(self, form: Form = "runs") -> str:
        """Return a readable text that all processes with equal keys share."""
        naming = self._block_key(form)
        return f"{naming.model}/{naming.dtype}/{naming.layout}/{naming.rank}"

    def _salt(self, form: Form) -> bytes:
        return self._block_key(form).salt

    def _block_key(self, form: Form) -> BlockKey:
        ranks = self.ranks
        parts = f"pp {ranks.pp_rank}/{ranks.pp_size} cp {ranks.attn_cp_rank}/{ranks.attn_cp_size}"
        # With context parallelism of decoding, which releases before 0.5.23 may lack, ranks hold the tokens of a page
        # in turn.
        if getattr(ranks, "dcp_size", 1) > 1:
            parts += f" dcp {getattr(ranks, 'dcp_rank', 0)}/{getattr(ranks, 'dcp_size', 1)}"
        # If attention is latent (MLA), ranks of tensor parallelism hold the same: one of them stores, and all find it.
        if not ranks.is_mla_model:
            parts += f" tp {ranks.tp_size}"
        return BlockKey(
            1,
            model=self.model,
            dtype=self.dtype,
            layout=f"hicache {form} {self.layout} {parts}",
            rank=0 if ranks.is_mla_model else ranks.tp_rank,
            tenant=self.tenant,
        )
