"""SGLang's own controller of HiCache on a CPU, with its threads and pools: what stands between its radix tree and a backend."""

import threading
from contextlib import contextmanager

import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE_TOKENS = 4
PATIENCE = 60.0
"""Seconds after which something that must happen will not."""


COMMON = {
    "page_size": PAGE_TOKENS,
    "dtype": torch.bfloat16,
    "layer_num": 3,
    "device": "cpu",
    "enable_memory_saver": False,
}
HOST = {"host_to_device_ratio": 4.0, "host_size": 0, "page_size": PAGE_TOKENS, "pin_memory": False}


def device_pool(tokens=64, *, latent=False):
    """The pool that an engine computes in, here in host memory; of latent attention (MLA), or with K and V of each head."""
    if latent:
        return MLATokenToKVPool(tokens, kv_lora_rank=16, qk_rope_head_dim=8, **COMMON)
    return MHATokenToKVPool(tokens, head_num=2, head_dim=8, **COMMON)


def host_pool(device, layout):
    """SGLang's pool of pages in host memory, with something else in each."""
    shape = {"layout": layout, "device_capacity_tokens": device.size, "start_layer": 0, "end_layer": 2}
    if isinstance(device, MLATokenToKVPool):
        pool = MLATokenToKVPoolHost(device._mla_buffer_info(), target_layer_num=3, **HOST, **shape)
    else:
        pool = MHATokenToKVPoolHost(device._mha_buffer_info(), **HOST, **shape)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


class Instance:
    """A controller, and what the scheduler does with it."""

    def __init__(self, controller):
        self.controller = controller
        self.pool = controller.mem_pool_host

    def page(self, indices, page):
        """A page, whatever the layout."""
        return self.pool.get_data_page(int(indices[page * PAGE_TOKENS])).clone()

    def backup(self, tokens):
        """Write pages of a prompt to storage; where they are, and how many of their tokens have been stored."""
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
        indices = self.pool.alloc(len(tokens))
        self.controller.write_storage(indices, tokens, hash_value=hashes)
        return indices, self.controller.ack_backup_queue.get(timeout=PATIENCE).completed_tokens

    def prefetch(self, tokens):
        """Fetch what storage has of a prompt; where to, how many tokens were found, and how many have come."""
        self.controller.prefetch("request", tokens)
        operation = self.controller.prefetch_hit_queue.get(timeout=PATIENCE)
        found, come = operation.storage_hit_count, 0
        operation.host_indices = self.pool.alloc(found) if found else torch.tensor([], dtype=torch.int64)
        self.controller.prefetch_buffer.put(operation)
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=PATIENCE)).completed_req:
            come = ack.completed_tokens
        return operation.host_indices, found, come


@contextmanager
def instance(extra, layout="page_first", *, latent=False, **ranks):
    """One instance, with its backend attached as at the start of SGLang."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    device = device_pool(latent=latent)
    allocator = PagedTokenToKVPoolAllocator(device.size, PAGE_TOKENS, torch.bfloat16, "cpu", device, False)
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    with get_parallel().override(**{**alone, **ranks}):
        controller = HiCacheController(
            allocator,
            host_pool(device, layout),
            PAGE_TOKENS,
            torch.distributed.group.WORLD,
            threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=PAGE_TOKENS,
            model_name="org/model",
            storage_backend_extra_config=dict(extra),
        )
        try:
            yield Instance(controller)
        finally:
            controller.detach_storage_backend()
