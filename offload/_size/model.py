"""How many bytes of KV a model has for each token, from its ``config.json``, and what a pool for so many tokens takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Bytes of a number, by the names that models and engines have for its type."""

MIB: Final = 1 << 20
_WITH_KV: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that have KV for each token."""


class UnknownModel(ValueError):
    """A configuration from which the size of its KV cannot be told."""


@attrs.frozen
class ModelShape:
    """What of a model its KV cache depends on."""

    layers: int
    """With KV."""
    kv_heads: int
    """Heads of keys and values; 0 where all heads share one compressed vector (multi-head latent attention)."""
    numbers: int
    """Of one layer and one token, for one head of keys and its values; for all heads where they share a vector."""
    dtype: str
    """Of the weights; empty where the configuration does not say it."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a ``config.json``, of a text model or of one that has a ``text_config`` in it.

        Raises:
            UnknownModel: it lacks what is needed, or has layers without KV for each token.
        """
        config = {**config, **(config.get("text_config") or {})}
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        layers = _number(config, "num_hidden_layers", "n_layer", "num_layers")
        kinds = config.get("layer_types") or []
        others = sorted(set(kinds) - _WITH_KV)
        if others:
            raise UnknownModel(f"layers of the kinds {', '.join(others)} have no KV for each token")
        if config.get("kv_lora_rank"):
            return cls(layers, 0, _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim"), dtype)
        heads = _number(config, "num_attention_heads", "n_head")
        kv_heads = _number(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
        width = config.get("head_dim") or _number(config, "hidden_size", "n_embd") // heads
        return cls(layers, kv_heads, 2 * int(width), dtype)

    def bytes_per_token(self, item_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes of KV that one of so many ranks has for each token.

        Raises:
            ValueError: the heads of this model cannot be shared out among so many ranks.
        """
        if not self.kv_heads:
            return self.layers * self.numbers * item_bytes  # each rank has all of it
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise ValueError(f"{self.kv_heads} heads of keys cannot be shared out among {tensor_parallel} ranks")
        return self.layers * max(1, self.kv_heads // tensor_parallel) * self.numbers * item_bytes


@attrs.frozen
class PoolSize:
    """What so many tokens take."""

    bytes_per_token: int
    """Of one worker."""
    chunk_tokens: int
    """Tokens in a chunk: a multiple of the engine's block size."""
    chunk_bytes: int
    """A chunk of one worker: a page, where the connector stores into the page store."""
    chunks: int
    """Of one worker, for all tokens."""
    pool_bytes: int
    """Of one worker, whole MiB: ``maru_pool_size``, or the ``capacity_bytes`` of a tier."""
    workers: int
    """Ranks of tensor parallelism, each with a pool of its own."""
    total_bytes: int
    """Of all workers."""

    @classmethod
    def of(
        cls,
        model: ModelShape,
        tokens: int,
        *,
        item_bytes: int,
        block_size: int,
        chunk_tokens: int,
        tensor_parallel: int,
    ) -> PoolSize:
        """What ``tokens`` take, none of which is another one's prefix twice.

        Args:
            model: whose.
            tokens: how many shall be there at once.
            item_bytes: bytes of a number in the cache.
            block_size: tokens in a block of the engine.
            chunk_tokens: tokens in a chunk; taken down to a multiple of ``block_size``, as the connectors do.
            tensor_parallel: ranks.

        Raises:
            ValueError: the heads of this model cannot be shared out among so many ranks.
        """
        chunk_tokens = max(block_size, chunk_tokens // block_size * block_size)
        per_token = model.bytes_per_token(item_bytes, tensor_parallel)
        chunk_bytes, chunks = per_token * chunk_tokens, -(-tokens // chunk_tokens)
        pool = -(-chunk_bytes * chunks // MIB) * MIB
        return cls(per_token, chunk_tokens, chunk_bytes, chunks, pool, tensor_parallel, pool * tensor_parallel)


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise UnknownModel(f"the configuration has no {' or '.join(names)}, a positive number")
