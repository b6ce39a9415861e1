"""``offload size``: what so many tokens of a model take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offload._size.model import ModelShape, PoolSize, UnknownModel
from offload.cli import main

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
FALCON_40B = {
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "multi_query": True,
}
GROUPS = {"attention": {"n_heads_in_group": 8, "no_op": False}}
NO_OP = {"attention": {"n_heads_in_group": None, "no_op": True}}


def size(path: Path, config: dict[str, Any], *options: str) -> Result:
    (path / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(main, ["size", str(path), *options])


@pytest.mark.parametrize(
    ("config", "ranks", "per_token"),
    [
        (LLAMA_8B, 1, 32 * 8 * 128 * 2 * 2),
        (LLAMA_8B, 4, 32 * 2 * 128 * 2 * 2),
        (LLAMA_8B, 16, 32 * 1 * 128 * 2 * 2),  # a head is on two ranks
        ({**LLAMA_8B, "head_dim": 64}, 1, 32 * 8 * 64 * 2 * 2),
        ({"text_config": LLAMA_8B, "vision_config": {}}, 1, 32 * 8 * 128 * 2 * 2),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float16"}, 1, 12 * 12 * 64 * 2 * 2),
        (DEEPSEEK_V3, 8, 61 * 576 * 2),  # each rank has all of it
        # Falcon, old and new, StarCoder, GLM-4, Nemotron, Gemma 3n: heads of keys by other names, layers without any.
        ({"hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True}, 1, 32 * 64 * 2 * 2),
        ({**FALCON_40B, "new_decoder_architecture": True}, 1, 60 * 8 * 64 * 2 * 2),
        ({**FALCON_40B, "new_decoder_architecture": False}, 1, 60 * 64 * 2 * 2),
        ({**FALCON_40B, "new_decoder_architecture": False, "multi_query": False}, 1, 60 * 128 * 64 * 2 * 2),
        (
            {**LLAMA_8B, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 64},
            1,
            32 * 2 * 64 * 2 * 2,
        ),
        ({**LLAMA_8B, "num_key_value_heads": None, "block_configs": [GROUPS] * 3 + [NO_OP]}, 1, 3 * 4 * 128 * 2 * 2),
        ({"text_config": {**LLAMA_8B, "num_kv_shared_layers": 12}}, 1, 20 * 8 * 128 * 2 * 2),
        (
            {**LLAMA_8B, "attention_bias": True, "max_window_layers": 28, "sliding_window": 4096},
            1,
            32 * 8 * 128 * 2 * 2,
        ),
    ],
)
def test_bytes_for_each_token_are_those_of_the_model(config: dict[str, Any], ranks: int, per_token: int):
    assert ModelShape.from_config(config).bytes_per_token(2, ranks) == per_token


def test_a_pool_holds_whole_chunks_of_all_tokens(tmp_path: Path):
    said = size(tmp_path, LLAMA_8B, "--tokens", "100000", "--chunk-tokens", "300", "--json")
    assert said.exit_code == 0
    answer = json.loads(said.stdout)
    assert (answer["chunk_tokens"], answer["chunks"]) == (288, 348)
    assert answer["chunk_bytes"] == 288 * 131072
    assert answer["pool_bytes"] % (1 << 20) == 0
    assert 0 <= answer["pool_bytes"] - answer["chunks"] * answer["chunk_bytes"] < 1 << 20


def test_people_read_what_to_set(tmp_path: Path):
    said = size(tmp_path, LLAMA_8B, "--tokens", "64K", "--tensor-parallel", "2", "--dtype", "fp8")
    assert said.stdout.splitlines() == [
        "32,768 bytes of KV for each token of each worker, in chunks of 256 tokens",
        "256 chunks of 8,388,608 bytes",
        "maru_pool_size: 2 GiB of each worker",
        "of all 2 workers: 4 GiB",
    ]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, [], "has no num_hidden_layers"),
        ({**LLAMA_8B, "torch_dtype": None}, [], "set that of the cache with --dtype"),
        ({**LLAMA_8B, "layer_types": ["full_attention", "linear_attention"]}, [], "linear_attention"),
        ({**LLAMA_8B, "full_attention_interval": 4}, [], "has full_attention_interval, which may change the KV"),
        ({**LLAMA_8B, "attn_layer_period": 8, "mamba_d_state": 16}, [], "has attn_layer_period, mamba_d_state, which"),
        ({**LLAMA_8B, "hybrid_override_pattern": "M-M*"}, [], "hybrid_override_pattern"),
        ({**LLAMA_8B, "attn_type_list": [0, 1]}, [], "attn_type_list"),
        ({**LLAMA_8B, "linear_attn_config": {"kda_layers": [1]}}, [], "linear_attn_config"),
        (
            {**LLAMA_8B, "global_head_dim": 512, "num_global_key_value_heads": 2},
            [],
            "global_head_dim, num_global_key_value_heads",
        ),
        ({**DEEPSEEK_V3, "index_head_dim": 128, "index_topk": 2048}, [], "index_head_dim, index_topk"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, [], "is_encoder_decoder"),
        ({**LLAMA_8B, "v_head_dim": 64}, [], "v_head_dim is 64, but keys have 128"),
        (
            {**LLAMA_8B, "block_configs": [GROUPS, {"attention": {"n_heads_in_group": 4}}]},
            [],
            "different numbers of KV heads",
        ),
        ({**LLAMA_8B, "block_configs": [{}]}, [], "block_configs is not a list of blocks"),
        (
            {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
            [],
            "that of the cache with --dtype",
        ),
        (LLAMA_8B, ["--tensor-parallel", "3"], "cannot be divided among 3 ranks"),
        (LLAMA_8B, ["--tokens", "many"], "must be a positive number"),
    ],
)
def test_what_cannot_be_told_is_said(tmp_path: Path, config: dict[str, Any], options: list[str], message: str):
    said = size(tmp_path, config, "--tokens", "1000", *options)
    assert said.exit_code != 0 and message in f"{said.output}{said.exception}"


def test_a_model_without_heads_is_none():
    with pytest.raises(UnknownModel, match="num_attention_heads or n_head"):
        ModelShape.from_config({"num_hidden_layers": 2})
    with pytest.raises(ValueError, match="cannot be divided among 5 ranks"):
        shape = ModelShape.from_config(LLAMA_8B)
        PoolSize.of(shape, 1, item_bytes=2, block_size=16, chunk_tokens=256, tensor_parallel=5)


def test_groups_of_two_sizes_take_whole_pages():
    said = CliRunner().invoke(main, ["size", "--tokens", "64K", "--object-bytes", "64KiB,8KiB", "--json"])
    assert said.exit_code == 0, said.output
    answer = json.loads(said.stdout)
    assert (answer["chunks"], answer["chunk_bytes"], answer["page_bytes"]) == (256, 72 << 10, 64 << 10)
    assert answer["pool_bytes"] == 256 * 2 * (64 << 10) and round(answer["pages_to_bytes"], 2) == 1.78
    text = CliRunner().invoke(main, ["size", "--tokens", "64K", "--object-bytes", "64KiB,8KiB"]).output
    assert "the pool is 1.78 times the bytes of the objects" in text and "capacity_bytes: 32 MiB" in text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "name either CONFIG"),
        (["--object-bytes", "64KiB,"], "must be positive sizes"),
        (["--object-bytes", "0"], "must be positive sizes"),
        ([".", "--object-bytes", "64KiB"], "name either CONFIG"),
    ],
)
def test_sizes_of_objects_are_checked(options: list[str], why: str):
    said = CliRunner().invoke(main, ["size", "--tokens", "64K", *options], standalone_mode=False)
    assert why in str(said.exception)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"head_dim": -128}, "no head_dim or kv_channels, a positive number"),
        ({"head_dim": [64]}, "no head_dim or kv_channels, a positive number"),
        ({"head_dim": 0.5}, "no head_dim or kv_channels, a positive number"),
        ({"hidden_size": 16}, "the hidden size is smaller than the number of heads, 32"),
        ({"num_kv_shared_layers": 32}, "none has KV of its own"),
        ({"num_kv_shared_layers": 40}, "none has KV of its own"),
        ({"quantization_config": "fp8"}, "quantization_config is not a table"),
        ({"text_config": "x"}, "text_config is not a table"),
        ({"layer_types": 7}, "layer_types is not a list of names"),
        ({"layer_types": [["a"], "b"]}, "layer_types is not a list of names"),
    ],
)
def test_a_size_that_cannot_be_is_refused(tmp_path: Path, changed: dict[str, Any], why: str):
    said = size(tmp_path, LLAMA_8B | changed, "--tokens", "1000")
    assert said.exit_code == 2 and why in said.output


def test_a_configuration_nested_too_deeply_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    said = CliRunner().invoke(main, ["size", str(tmp_path), "--tokens", "1000"])
    assert said.exit_code == 2 and "nested too deeply" in said.output
