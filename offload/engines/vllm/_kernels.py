"""Arrangement of a cache by the kernels of this host. Imports vLLM.

Neither its shape nor its strides show it. Tried with vLLM 0.32.0: of one bfloat16 cache, the kernels for AMX write
other bytes than those for other processors.
"""

from __future__ import annotations

import platform

import torch
from vllm import envs
from vllm.platforms import current_platform


def kernel_text(dtype: object) -> str:
    """Return the kernels' part of a key's layout; empty for most.

    Args:
        dtype: of the model.
    """
    if current_platform.is_rocm():
        return "/shuffled" if getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False) else ""
    if not current_platform.is_cpu():
        return ""
    machine = platform.machine()
    if machine != "x86_64":
        return f"/{machine}"
    has_tiles = torch.cpu._is_amx_tile_supported()
    return "/amx" if has_tiles and "bfloat16" in f"{dtype}" else ""
