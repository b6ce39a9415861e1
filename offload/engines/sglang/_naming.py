"""What a page is called. Pure.

SGLang's hash of a page covers every token before it, the adapter and the cache salt of the request. Everything else that the
bytes of a page depend on is said here: model, dtype, layout of the pool, ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias

import attrs

from backends.abc import Key

from ..._keys import BlockKey, block_key

Form: TypeAlias = Literal["runs", "flat"]
"""In which order the bytes of a page stand in a block: run behind run as a pool lists them, or as its flat page has them.

The two differ where a pool keeps layers apart: it lists K and V of each layer, and its flat page has all of K first.
"""


class Ranks(Protocol):
    """Which part of a model's KV a process holds, as SGLang's configuration of a storage backend says it."""

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
    # What a pool says of itself. Two pools may have pages of one size, and differ in any of these.
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
    """All that says what the bytes of a page of this pool mean.

    Args:
        pool: SGLang's host pool.
        run_bytes: the sizes of the runs of one page, in their order.
    """
    said = [f"{name}={getattr(pool, name)}" for name in _GEOMETRY if getattr(pool, name, None) is not None]
    return f"{type(pool).__name__} {' '.join(said)} runs={','.join(map(str, run_bytes))}"


def untagged(model: str | None, pool: object) -> str | None:
    """Return the model's name as a user has said it: SGLang appends the format of a pool to it, which :func:`layout_text` has.

    With it, the path of a checkpoint leads nowhere, and its weights would have no fingerprint.
    """
    tag = getattr(pool, "storage_format_tag", None)
    if not model or not tag:
        return model
    return None if model == tag else model.removesuffix(f"-{tag}")


@attrs.frozen
class PageNaming:
    """How the pages of one process are named: a value, the same in every process that has the same model, layout and ranks."""

    model: str
    """A name with its revision."""
    dtype: str
    """Of the stored KV."""
    layout: str
    """How the bytes of a page are arranged: :func:`layout_text`."""
    ranks: Ranks
    """Which part of the model's KV it is."""
    tenant: str = ""
    """Who may find it."""

    def keys(self, hashes: Sequence[str], form: Form = "runs") -> list[Key]:
        """One key for each page, by SGLang's hash of it."""
        salt = self._salt(form)
        return [block_key(one.encode(), salt=salt) for one in hashes]

    def title(self, form: Form = "runs") -> str:
        """All of it in words: what two processes whose pages have the same names agree on."""
        naming = self._block_key(form)
        return f"{naming.model}/{naming.dtype}/{naming.layout}/{naming.rank}"

    def _salt(self, form: Form) -> bytes:
        return self._block_key(form).salt

    def _block_key(self, form: Form) -> BlockKey:
        ranks = self.ranks
        parts = f"pp {ranks.pp_rank}/{ranks.pp_size} cp {ranks.attn_cp_rank}/{ranks.attn_cp_size}"
        # With context parallelism of decoding, which releases before 0.5.23 may lack, ranks hold the tokens of a page in turn.
        if getattr(ranks, "dcp_size", 1) > 1:
            parts += f" dcp {getattr(ranks, 'dcp_rank', 0)}/{getattr(ranks, 'dcp_size', 1)}"
        # Ranks of tensor parallelism hold the same where attention is latent (MLA): one of them stores, and all find it.
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
