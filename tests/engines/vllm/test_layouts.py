"""What vLLM hands over of a cache in each layout, without an engine around it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from offload.engines.vllm._spec import RowWorker


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_worker_refuses_blocks_of_which_vllm_hands_over_a_part(layout: str) -> None:
    """As its own connector does with heads outside of blocks: one run of the first head."""
    first_head = torch.zeros(8, 64, dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(first_head, 64)], [[CanonicalKVCacheRef(0, 64)]])
    config: Any = SimpleNamespace(
        kv_cache_layout=layout,
        worker_kv_bytes_per_block=4 * 64,
        cache=SimpleNamespace(blocks_per_chunk=1),
        engine_id="",
        parallel=SimpleNamespace(world_size=2, rank=0),
    )
    with pytest.raises(ValueError, match="64 of 256 bytes") if layout == "LHBNC" else nullcontext():
        RowWorker(object(), 4 * 64, caches, config)  # type: ignore[arg-type]
