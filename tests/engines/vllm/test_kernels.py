"""Kernels that arrange caches of one shape in their own ways."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch

from offload.engines.vllm import _kernels
from offload.engines.vllm._kernels import kernel_text


def on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here = SimpleNamespace(is_rocm=lambda: name == "rocm", is_cpu=lambda: name == "cpu")
    monkeypatch.setattr(_kernels, "current_platform", here)


@pytest.mark.parametrize(("is_shuffled", "text"), [(True, "/shuffled"), (False, "")])
def test_shuffled_caches_are_told_apart(monkeypatch: pytest.MonkeyPatch, is_shuffled: bool, text: str) -> None:
    on(monkeypatch, "rocm")
    monkeypatch.setattr(_kernels.envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", is_shuffled)
    assert kernel_text("bfloat16") == text


@pytest.mark.parametrize(
    ("machine", "has_tiles", "dtype", "text"),
    [
        ("x86_64", True, torch.bfloat16, "/amx"),
        ("x86_64", True, "bfloat16", "/amx"),
        ("x86_64", True, torch.float32, ""),
        ("x86_64", False, torch.bfloat16, ""),
        ("aarch64", False, torch.bfloat16, "/aarch64"),
    ],
)
def test_processors_are_told_apart_by_their_kernels(
    monkeypatch: pytest.MonkeyPatch, machine: str, has_tiles: bool, dtype: object, text: str
) -> None:
    on(monkeypatch, "cpu")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert kernel_text(dtype) == text
    on(monkeypatch, "cuda")
    assert kernel_text(dtype) == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="both kernels are for x86")
def test_kernels_write_one_cache_in_two_ways() -> None:
    import vllm._custom_ops as ops

    keys = torch.arange(32 * 2 * 64).reshape(32, 2, 64).to(torch.bfloat16)
    written = []
    for kernels in ("vec", "amx"):
        k_cache, v_cache = torch.zeros(2, 2, 2, 32, 64, dtype=torch.bfloat16)
        ops.cpu_attn_reshape_and_cache(keys, keys, k_cache, v_cache, torch.arange(32), kernels)
        written.append(k_cache)
    assert not torch.equal(*written)
