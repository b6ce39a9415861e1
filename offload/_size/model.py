"""KV bytes of a model's tokens, and pool sizes. Pure.

They come from its ``config.json``; a pool is sized for so many tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


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
"""Bytes of a number, by the names of its type.

Models and engines use these names.
"""

MIB: Final = 1 << 20
_WITH_KV: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that have KV for each token."""


_BEARS_ON_KV: Final = re.compile(
    r"kv|key_value|value_head|query_group|attn|attention|mamba|ssm|conv|linear_|recurrent|retention|rwkv|state|compress|"
    r"index_|heads?(_|$)|_heads|layers_|_layers|layer_(types|period|indices|offset|pattern)|_pattern|block_configs|"
    r"is_encoder_decoder"
)
"""Names of keys that may bear on the KV of a token.

One that is neither read nor known to be harmless is refused: a size that is silently wrong fills a pool with a fraction
of the tokens meant for it.
"""
_READ: Final = _words("""
    num_hidden_layers n_layer n_layers num_layers layer_types num_kv_shared_layers block_configs
    kv_lora_rank qk_rope_head_dim num_attention_heads n_head n_heads num_heads head_dim kv_channels v_head_dim
    num_key_value_heads num_kv_heads n_head_kv multi_query multi_query_attention multi_query_group_num
""")
_HARMLESS: Final = _words("""
    attention_bias attention_dropout attention_probs_dropout_prob attention_softmax_in_fp32 attention_types attention_layers
    attention_multiplier attention_out_bias attention_in_bias attention_chunk_size attention_factor attention_value_scale
    attention_logit_softcapping attention_qkv_bias attn_implementation _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal attn_pdrop attn_dropout attn_logit_softcapping attn_output_gate attn_scale
    attn_temperature_tuning attn_output_bias apply_query_key_layer_scaling use_attn_gate scale_attn_weights
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn add_qkv_bias qkv_bias clip_qkv use_qkv_bias
    add_swa_attention_sink_bias no_rope_layers no_rope_layer_interval nope_layer_interval num_nope_layers max_window_layers
    sliding_window_pattern mlp_only_layers moe_layers moe_layers_enum moe_layer_pattern num_nextn_predict_layers
    num_mtp_layers mtp_num_layers layers_per_stage qk_nope_head_dim qk_head_dim use_flash_attn use_flash_attention
""")
"""Scores, masks, positions and weights.

A token has the same keys and values with or without them.
"""


class UnknownModel(ValueError):
    """A configuration from which the size of its KV cannot be derived."""


@attrs.frozen
class ModelShape:
    """Properties of a model that determine its KV cache."""

    layers: int
    """Number of layers with KV."""
    kv_heads: int
    """Heads of keys and values; 0 if they share a vector.

    All heads share one compressed vector then (multi-head latent attention).
    """
    numbers: int
    """Numbers of one layer and one token, for one KV head.

    Both keys and values count. If all heads share a vector, these are its numbers.
    """
    dtype: str
    """Type of the weights; empty if the configuration does not name it."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a ``config.json`` of a text model.

        A model that has a ``text_config`` in it is read as well.

        Raises:
            UnknownModel: it lacks a needed setting, or has layers without KV for each token.
        """
        config = {**config, **_table(config, "text_config")}
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if _table(config, "quantization_config").get("kv_cache_scheme"):
            dtype = ""  # the cache has another type than the weights
        layers = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        kinds = config.get("layer_types") or []
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise UnknownModel("layer_types is not a list of names")
        others = sorted(set(kinds) - _WITH_KV)
        if others:
            raise UnknownModel(f"layers of the kinds {', '.join(others)} have no KV for each token")
        unknown = sorted(
            key for key, value in config.items() if value and _BEARS_ON_KV.search(key) and key not in _READ | _HARMLESS
        )
        if unknown:
            raise UnknownModel(
                f"the configuration has {', '.join(unknown)}, which may change the KV of a token in an unknown way: "
                "ask the engine, which logs the size of its KV cache in tokens at its start"
            )
        if config.get("num_kv_shared_layers"):
            shared = _number(config, "num_kv_shared_layers")
            if shared >= layers:
                raise UnknownModel(f"num_kv_shared_layers is {shared}, of {layers} layers: none has KV of its own")
            layers -= shared
        if config.get("kv_lora_rank"):
            return cls(layers, 0, _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim"), dtype)
        heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        if any(config.get(name) for name in ("head_dim", "kv_channels")):
            width = _number(config, "head_dim", "kv_channels")
        else:
            width = _number(config, "hidden_size", "n_embd") // heads
        if not width:
            raise UnknownModel(f"the hidden size is smaller than the number of heads, {heads}")
        if config.get("v_head_dim", width) != width:
            raise UnknownModel(
                f"v_head_dim is {config['v_head_dim']}, but keys have {width}: engines lay such heads out differently"
            )
        kv_heads = _kv_heads(config, heads)
        if config.get("block_configs"):
            layers, kv_heads = _of_blocks(config["block_configs"], heads)
        return cls(layers, kv_heads, 2 * width, dtype)

    def bytes_per_token(self, item_bytes: int, tensor_parallel: int = 1) -> int:
        """Return the bytes of KV of one rank for each token.

        Raises:
            ValueError: the heads of this model cannot be shared out among so many ranks.
        """
        if not self.kv_heads:
            return self.layers * self.numbers * item_bytes  # each rank has the whole vector
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads cannot be divided among {tensor_parallel} ranks")
        return self.layers * max(1, self.kv_heads // tensor_parallel) * self.numbers * item_bytes


@attrs.frozen
class PoolSize:
    """Bytes of a pool for so many tokens."""

    bytes_per_token: int
    """Bytes of one worker for each token."""
    chunk_tokens: int
    """Tokens in a chunk: a multiple of the engine's block size."""
    chunk_bytes: int
    """Bytes of a chunk of one worker.

    That is a page, if the connector stores into the page store.
    """
    chunks: int
    """Chunks of one worker, for all tokens."""
    pool_bytes: int
    """Bytes of the pool of one worker, whole MiB.

    ``maru_pool_size``, or the ``capacity_bytes`` of a tier.
    """
    workers: int
    """Ranks of tensor parallelism, each with a pool of its own."""
    total_bytes: int
    """Bytes of the pools of all workers."""

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
        """Compute the pool for ``tokens`` that share no prefixes.

        Args:
            model: the model.
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


@attrs.frozen
class GroupSize:
    """Bytes of a pool for so many tokens, by groups of layers.

    Each chunk has an object for each group of layers.
    """

    tokens: int
    """Tokens that shall be there at once."""
    groups: int
    """Objects of a chunk."""
    chunks: int
    """Chunks of one worker, for all tokens."""
    chunk_bytes: int
    """Bytes of the objects of a chunk."""
    page_bytes: int
    """Bytes of a page: those of the largest object."""
    pages_to_bytes: float
    """Bytes of all pages for each byte of the objects."""
    pool_bytes: int
    """Bytes of the pool of one worker, whole MiB."""
    workers: int
    """Ranks of tensor parallelism, each with a pool of its own."""

    @classmethod
    def of(cls, tokens: int, object_bytes: Sequence[int], chunk_tokens: int, tensor_parallel: int) -> GroupSize:
        """Compute the pool for objects of these sizes.

        There is one object for each group of layers.
        """
        chunks, chunk, page, n = -(-tokens // chunk_tokens), sum(object_bytes), max(object_bytes), len(object_bytes)
        pool = -(-chunks * n * page // MIB) * MIB
        return cls(tokens, n, chunks, chunk, page, n * page / chunk, pool, tensor_parallel)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):  # Falcon has multi_query as well then, and does not read it
        return _number(config, "num_kv_heads", "n_head_kv")
    if "new_decoder_architecture" in config:
        return 1 if config.get("multi_query") else heads
    if config.get("multi_query_attention"):
        return _number(config, "multi_query_group_num")
    if config.get("multi_query"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    return _number(config, *names) if any(config.get(name) for name in names) else heads


def _of_blocks(blocks: Any, heads: int) -> tuple[int, int]:
    """Return the number of layers with KV, and of their KV heads.

    They come from the configuration of each block.
    """
    try:
        groups = [block["attention"].get("n_heads_in_group") for block in blocks if not block["attention"].get("no_op")]
    except (TypeError, KeyError, AttributeError):
        raise UnknownModel("block_configs is not a list of blocks with an attention each") from None
    if len(set(groups)) != 1 or not groups[0] or heads % groups[0]:
        raise UnknownModel(
            "the layers of block_configs have different numbers of KV heads: a token has a different size in each layer"
        )
    return len(groups), heads // groups[0]


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise UnknownModel(f"{name} is not a table")
    return table


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise UnknownModel(f"the configuration has no {' or '.join(names)}, a positive number")
