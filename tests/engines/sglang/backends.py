"""A backend over real tiers, and a pool of pages that it is for."""

from contextlib import contextmanager
from hashlib import sha256

import torch

from offload.engines.sglang import HiCacheOffload

PAGE_TOKENS = 4
LAYERS, HEADS, HEAD_DIM = 3, 2, 8
FULL_PAGE = 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD_DIM * 2
"""Bytes of a page, of all its runs: K and V, in bfloat16."""


class LayerFirstPool:
    """Pages as SGLang's pool of layout `layer_first` has them: a run for K and one for V in each layer."""

    def __init__(self, pages=16, *, head_dim=HEAD_DIM, dtype=torch.bfloat16, page_size=PAGE_TOKENS):
        self.page_size, self.layout, self.dtype = page_size, "layer_first", dtype
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, head_dim
        self.size = pages * page_size
        self.kv_buffer = torch.zeros((2, LAYERS, self.size, HEADS, head_dim), dtype=dtype)

    def alloc(self, need_size):
        """Its last page, which no test uses."""
        return torch.arange(self.size - need_size, self.size)

    def free(self, indices):
        return len(indices)

    def get_page_buffer_meta(self, indices):
        itemsize = self.dtype.itemsize
        token = self.head_num * self.head_dim * itemsize
        pointers = [
            self.kv_buffer.data_ptr() + ((which * self.layer_num + layer) * self.size + first) * token
            for first in indices.tolist()[:: self.page_size]
            for layer in range(self.layer_num)
            for which in range(2)
        ]
        return pointers, [self.page_size * token] * len(pointers)

    def fill(self, page):
        """Write what only this page has."""
        here = self.kv_buffer[:, :, page * self.page_size : (page + 1) * self.page_size]
        here.copy_(torch.randn(here.shape, generator=torch.Generator().manual_seed(page)).to(self.dtype))

    def page(self, page):
        return self.kv_buffer[:, :, page * self.page_size : (page + 1) * self.page_size].clone()

    def get_data_page(self, index, flat=True):
        page = self.kv_buffer[:, :, index : index + self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index, data_page):
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))


def tokens(*pages, page_size=PAGE_TOKENS):
    """The numbers of all tokens of these pages, as SGLang hands them in."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def hashes(n, prompt="prompt"):
    """What SGLang calls the pages of a prompt."""
    return [sha256(f"{prompt} {at}".encode()).hexdigest() for at in range(n)]


def storage_config(extra=None, **fields):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "org/model",
        "extra_config": extra_config() if extra is None else extra,
    }
    return HiCacheStorageConfig(**{**values, **fields})


def extra_config(tiers=None, **more):
    """What a user says, as SGLang hands it on."""
    return {
        "backend_name": "offload",
        "module_path": "offload.engines.sglang",
        "class_name": "HiCacheOffload",
        "interface_v1": 1,
        "engine": {"tiers": tiers or {"host": {"type": "memory", "capacity_bytes": "1MiB"}}},
        **more,
    }


@contextmanager
def open_backend(pool, extra=None, **fields):
    backend = HiCacheOffload(storage_config(extra, **fields), {})
    try:
        backend.register_mem_pool_host(pool)
        yield backend
    finally:
        backend.close()
