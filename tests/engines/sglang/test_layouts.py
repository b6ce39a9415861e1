"""Whether planes of SGLang's pages come back where they belong: a pattern at the start, and some of the loads."""

import random
import time
import zlib

import pytest
import torch

from offload import DrainUnproven
from offload.engines.sglang._planes import free_page
from tests.engines.sglang.backends import (
    FULL_PAGE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE_TOKENS,
    LayerFirstPool,
    extra_config,
    hashes,
    open_backend,
    tokens,
)
from tests.support.planted import shadow as P

LAYOUTS = [P.hicache_keys_are_loaded_as_values, P.hicache_heads_are_loaded_in_another_order]
PLANTED = [*LAYOUTS, P.a_stale_page_is_served, P.another_requests_page_is_served]
WAYS = pytest.mark.parametrize("interface", [1, 0], ids=["zero copy", "generic"])


def name_of(fault):
    return fault.__name__


def failures(backend):
    return backend.report_status()["failures"]


def checking_one_in(every, pages=None, **more):
    """The memory tier, and a shadow check of one load in so many."""
    host = {"type": "memory", "capacity_bytes": (pages or 96) * FULL_PAGE}
    extra = extra_config({"host": host}, **more)
    extra["engine"].update(shadow_check=every, pipeline={"on_destination_full": "evict"})
    return extra


def shared_with(directory, interface=1):
    tier = {"type": "file", "directory": str(directory / "kv")}
    return extra_config({"disk": tier}, interface_v1=interface)


# --- before the first request -----------------------------------------------------------------------------------------


@WAYS
def test_a_pool_that_is_read_as_it_is_written_passes_and_its_pages_stay(interface, tmp_path):
    pool = LayerFirstPool()
    for page in range(15):
        pool.fill(page)
    before = pool.kv_buffer.clone()
    with open_backend(pool, shared_with(tmp_path, interface)) as backend:
        assert failures(backend) == {}
        assert torch.equal(pool.kv_buffer[:, :, : 15 * PAGE_TOKENS], before[:, :, : 15 * PAGE_TOKENS])
        assert backend.batch_set_v1(hashes(2), tokens(0, 1)) == [True, True]


@pytest.mark.long  # it looks at the clock
@WAYS
def test_a_pool_is_tried_within_a_second(interface, tmp_path):
    began = time.perf_counter()
    with open_backend(LayerFirstPool(), shared_with(tmp_path, interface)) as backend:
        assert time.perf_counter() - began < 1
        assert failures(backend) == {}


@pytest.mark.parametrize("fault", LAYOUTS, ids=name_of)
def test_a_layout_that_is_loaded_otherwise_than_stored_is_found_at_the_start(fault, monkeypatch):
    fault(monkeypatch)
    with open_backend(LayerFirstPool()) as backend:
        assert failures(backend) == {"start: layout": 1}
        assert "planes are swapped" in backend.report_status()["last_failures"]["layout"]
        assert backend.batch_set_v1(hashes(2), tokens(0, 1)) == [False, False]
        assert backend.batch_exists(hashes(2)) == 0
        assert backend.batch_get_v1(hashes(2), tokens(8, 9)) == [False, False]


class ValuesFirstPool(LayerFirstPool):
    """A pool that says the same of itself, and lists the run of values before that of keys."""

    def get_page_buffer_meta(self, indices):
        pointers, sizes = super().get_page_buffer_meta(indices)
        return [pointers[at ^ 1] for at in range(len(pointers))], sizes


class ValuesFirstInFlatPages(LayerFirstPool):
    """The same, without the zero-copy interface."""

    def get_data_page(self, index, flat=True):
        page = super().get_data_page(index, flat=False)
        return page.flip(0).flatten() if flat else page

    def set_from_flat_data_page(self, index, data_page):
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape).flip(0))


# The class is part of a layout's name: these have the same one.
ValuesFirstPool.__name__ = ValuesFirstInFlatPages.__name__ = LayerFirstPool.__name__


@pytest.mark.parametrize(("other", "interface"), [(ValuesFirstPool, 1), (ValuesFirstInFlatPages, 0)])
def test_another_meaning_of_the_same_layout_is_found_at_the_start(other, interface, tmp_path):
    """Each of the two reads what it has written: only what another process has stored shows it."""
    extra = shared_with(tmp_path, interface)
    with open_backend(LayerFirstPool(), extra) as backend:
        assert failures(backend) == {}
    with open_backend(other(), extra) as backend:
        assert failures(backend) == {"start: layout": 1}
    with open_backend(LayerFirstPool(), extra) as backend:
        assert failures(backend) == {}


class UnknownLayout(LayerFirstPool):
    def __init__(self):
        super().__init__()
        self.layout = "page_sorted"


class NoFreePage(LayerFirstPool):
    def alloc(self, need_size):
        return None


@pytest.mark.parametrize(
    ("pool", "why"),
    [(UnknownLayout, "the axes of a pool with layout page_sorted"), (NoFreePage, "no page of the pool")],
)
def test_what_cannot_be_tried_at_the_start_is_named_and_served(pool, why):
    with open_backend(pool()) as backend:
        assert why in backend.report_status()["last_failures"]["layout not checked"]
        assert backend.batch_set_v1(hashes(1), tokens(0)) == [True]
        assert backend.batch_get_v1(hashes(1), tokens(8)) == [True]


def test_no_server_at_the_start_is_no_wrong_layout(tmp_path):
    tier = {"type": "maru", "server_url": f"ipc://{tmp_path}/nobody.sock", "pool_size": "1MiB", "timeout_ms": 100}
    with open_backend(LayerFirstPool(), extra_config({"maru": tier}, lookup_timeout=0.5)) as backend:
        assert set(failures(backend)) == {"start: layout not checked"}


# --- while it runs ----------------------------------------------------------------------------------------------------


def stored(backend, pool, prompt, n=4):
    """Compute pages of a prompt, the same each time, and store them."""
    generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
    for page in range(n):
        here = pool.kv_buffer[:, :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        here.copy_(torch.randn(2, LAYERS, PAGE_TOKENS, HEADS, HEAD_DIM, generator=generator).to(pool.dtype))
    assert backend.batch_set_v1(hashes(n, prompt), tokens(*range(n))) == [True] * n


@pytest.mark.parametrize("fault", PLANTED, ids=name_of)
def test_a_planted_fault_is_found_within_200_loads(fault, monkeypatch):
    pool, rng = LayerFirstPool(), random.Random(1)
    with open_backend(pool, checking_one_in(20)) as backend:
        prompts = [f"{number}" for number in range(20)]
        for prompt in prompts:
            stored(backend, pool, prompt)
        fault(monkeypatch)
        for load in range(200):
            prompts = [*prompts[1:], f"later {load}"]
            stored(backend, pool, prompts[-1])
            backend.batch_get_v1(hashes(4, rng.choice(prompts)), tokens(8, 9, 10, 11))
            if failures(backend):
                break
        assert failures(backend).keys() == {"load: mismatch"}


@pytest.mark.parametrize("loads", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_clean_loads_raise_no_alarm(loads):
    """Evicted and stored anew, and loaded again and again; one in 20 is compared."""
    pool, rng = LayerFirstPool(), random.Random(0)
    with open_backend(pool, checking_one_in(20, pages=64)) as backend:
        loaded = 0
        while loaded < loads:
            prompt = f"{rng.randrange(24)}"
            come = backend.batch_get_v1(hashes(4, prompt), tokens(8, 9, 10, 11))
            if not all(come):
                stored(backend, pool, prompt)
            loaded += all(come)
        assert failures(backend) == {}


class FreePages:
    """The part of a pool that gives out free pages."""

    page_size = PAGE_TOKENS

    def __init__(self) -> None:
        self.freed: list[torch.Tensor] = []

    def alloc(self, n: int) -> torch.Tensor:
        return torch.arange(n)

    def free(self, tokens: torch.Tensor) -> None:
        self.freed.append(tokens)


@pytest.mark.parametrize(("error", "freed"), [(OSError, 1), (DrainUnproven, 0)])
def test_a_page_goes_back_unless_a_copy_may_still_use_it(error, freed):
    pool = FreePages()
    with pytest.raises(error), free_page(pool):
        raise error("the check has failed")
    assert len(pool.freed) == freed
