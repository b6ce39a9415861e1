"""The backend as SGLang calls it: its answers, its names, its faults."""

import pytest
import torch

import offload
from offload.engines.sglang import HiCacheOffload
from tests.engines.sglang.backends import (
    FULL_PAGE,
    PAGE_TOKENS,
    LayerFirstPool,
    extra_config,
    hashes,
    open_backend,
    storage_config,
    tokens,
)
from tests.support.maru_processes import Server, temporary_pool


@pytest.fixture
def pool():
    pool = LayerFirstPool()
    for page in range(4):
        pool.fill(page)
    return pool


@pytest.fixture
def backend(pool):
    with open_backend(pool) as backend:
        yield backend


def failures(backend):
    return backend.report_status()["failures"]


# --- pages of the pool ------------------------------------------------------------------------------------------------


def test_pages_come_back_where_they_are_wanted_with_all_their_runs(pool, backend):
    keys = hashes(4)
    assert backend.batch_set_v1(keys, tokens(0, 1, 2, 3)) == [True] * 4
    assert backend.batch_exists([*keys, "another"]) == 4
    assert backend.batch_get_v1(keys, tokens(9, 7, 8, 5)) == [True] * 4
    for stored, loaded in enumerate([9, 7, 8, 5]):
        assert torch.equal(pool.page(stored), pool.page(loaded))
    assert failures(backend) == {}


def test_what_comes_is_a_prefix_and_other_pages_stay_as_they_are(pool, backend):
    keys = hashes(4)
    backend.batch_set_v1([keys[0], keys[1], keys[3]], tokens(0, 1, 3))
    assert backend.batch_exists(keys) == 2
    assert [backend.exists(key) for key in keys] == [True, True, False, True]
    assert backend.batch_get_v1(keys, tokens(8, 9, 10, 11)) == [True, True, False, False]
    assert not pool.page(10).any() and not pool.page(11).any()
    assert failures(backend) == {}


def test_pages_behind_a_lost_page_do_not_come(pool, tmp_path):
    """Gone between SGLang's question and its load: the pages behind are no prefix any more."""
    keys, directory = hashes(4), tmp_path / "kv"
    disk = {"type": "file", "directory": str(directory), "capacity_bytes": "1MiB"}
    with open_backend(pool, extra_config({"disk": disk})) as backend:
        for at, key in enumerate(keys):
            before = set(directory.glob("*/*.kv"))
            assert backend.batch_set_v1([key], tokens(at)) == [True]
            if at == 1:
                [lost] = set(directory.glob("*/*.kv")) - before
        assert backend.batch_exists(keys) == 4
        lost.unlink()
        assert backend.batch_get_v1(keys, tokens(8, 9, 10, 11)) == [True, False, False, False]


def test_what_is_there_already_is_stored(pool, backend):
    keys = hashes(2)
    assert backend.batch_set_v1(keys, tokens(0, 1)) == [True, True]
    assert backend.batch_set_v1(keys, tokens(2, 3)) == [True, True]
    backend.batch_get_v1(keys, tokens(8, 9))
    assert torch.equal(pool.page(8), pool.page(0))


def test_a_page_that_is_named_twice_is_stored_once(pool, backend):
    [key] = hashes(1)
    assert backend.batch_set_v1([key, key], tokens(0, 1)) == [True, True]
    assert backend.batch_get_v1([key], tokens(8)) == [True]
    assert torch.equal(pool.page(8), pool.page(0))


def test_no_pages_are_an_answer(backend):
    none = torch.tensor([], dtype=torch.int64)
    assert (backend.batch_exists([]), backend.batch_get_v1([], none), backend.batch_set_v1([], none)) == (0, [], [])
    assert (backend.batch_get([], []), backend.batch_set([], [])) == ([], True)


# --- flat pages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def generic(pool):
    with open_backend(pool, extra_config(interface_v1=0)) as backend:
        yield backend


def test_flat_pages_come_back(generic):
    [key] = hashes(1)
    page = torch.randn(FULL_PAGE // 2).to(torch.bfloat16)
    place = torch.zeros_like(page)
    assert generic.set(key, page)
    assert generic.exists(key)
    assert generic.get(key, place) is place
    assert torch.equal(place, page)


def test_of_flat_pages_the_prefix_comes(generic):
    keys = hashes(3)
    pages = [torch.full((FULL_PAGE // 2,), value, dtype=torch.bfloat16) for value in range(3)]
    assert generic.batch_set([keys[0], keys[2]], [pages[0], pages[2]])
    places = [torch.zeros_like(page) for page in pages]
    first, *others = generic.batch_get(keys, places)
    assert first is places[0] and others == [None, None]


def test_a_flat_page_is_never_taken_for_the_runs_of_one(pool, backend):
    """Their bytes are in another order."""
    [key] = hashes(1)
    assert backend.set(key, pool.page(0).flatten())
    assert backend.batch_exists([key]) == 0
    assert backend.batch_get_v1([key], tokens(8)) == [False]


@pytest.mark.parametrize("value", [None, b"bytes", torch.zeros(3), torch.zeros(FULL_PAGE // 4, 2)[:, 0]])
def test_what_is_no_flat_page_is_not_stored(generic, value):
    assert not generic.set("key", value)
    assert generic.get("key", value) is None
    assert sum(failures(generic).values()) == 2


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    return {"disk": {"type": "file", "directory": str(tmp_path / "kv")}}


OTHERS = {
    "model": ({"model_name": "org/other"}, {}, {}),
    "model as set": ({}, {"model": "org/model, another revision"}, {}),
    "dtype": ({}, {}, {"dtype": torch.float16}),
    "dtype as set": ({}, {"kv_dtype": "fp8_e5m2"}, {}),
    "tenant": ({}, {"tenant": "bob"}, {}),
    "rank": ({"tp_rank": 1, "tp_size": 2}, {}, {}),
    "number of ranks": ({"tp_size": 2}, {}, {}),
    "pipeline stage": ({"pp_rank": 1, "pp_size": 2}, {}, {}),
    "part of the context": ({"attn_cp_rank": 1, "attn_cp_size": 2}, {}, {}),
    "tokens in a page": ({}, {}, {"page_size": 2 * PAGE_TOKENS, "head_dim": 4}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_pages_of_another_process_are_found_only_if_their_bytes_mean_the_same(pool, directory, other):
    keys = hashes(2)
    with open_backend(pool, extra_config(directory)) as backend:
        backend.batch_set_v1(keys, tokens(0, 1))
    with open_backend(LayerFirstPool(), extra_config(directory)) as backend:
        assert backend.batch_exists(keys) == 2
    fields, said, shape = OTHERS[other]
    with open_backend(LayerFirstPool(**shape), extra_config(directory, **said), **fields) as backend:
        assert backend.batch_exists(keys) == 0


def test_ranks_that_hold_the_same_find_what_one_of_them_has_stored(pool, directory):
    with open_backend(pool, extra_config(directory), is_mla_model=True, tp_size=2) as backend:
        backend.batch_set_v1(hashes(2), tokens(0, 1))
    mine = LayerFirstPool()
    with open_backend(mine, extra_config(directory), is_mla_model=True, tp_rank=1, tp_size=2) as backend:
        assert backend.batch_get_v1(hashes(2), tokens(4, 5)) == [True, True]
    assert torch.equal(mine.page(4), pool.page(0))


def test_ranks_that_hold_tokens_in_turn_do_not_find_each_others_pages(pool, directory):
    shards = {"is_mla_model": True, "tp_size": 2, "dcp_size": 2, "logical_page_size": 2 * PAGE_TOKENS}
    with open_backend(pool, extra_config(directory), dcp_rank=0, **shards) as backend:
        backend.batch_set_v1(hashes(2), tokens(0, 1))
        assert backend.batch_exists(hashes(2)) == 2
    with open_backend(LayerFirstPool(), extra_config(directory), tp_rank=1, dcp_rank=1, **shards) as backend:
        assert backend.batch_exists(hashes(2)) == 0


class TaggedPool(LayerFirstPool):
    storage_format_tag = "unified-token-major"


def test_replaced_weights_miss_though_sglang_tags_their_path(directory, tmp_path):
    model = tmp_path / "model"
    model.mkdir()

    def found(weights, stores=False):
        (model / "weights.safetensors").write_bytes(weights)
        pool = TaggedPool()
        with open_backend(pool, extra_config(directory), model_name=f"{model}-{pool.storage_format_tag}") as backend:
            if stores:
                backend.batch_set_v1(hashes(2), tokens(0, 1))
            return backend.batch_exists(hashes(2))

    assert found(b"first", stores=True) == 2
    assert found(b"other") == 0
    assert found(b"first") == 2


def test_pools_of_a_model_without_a_name_are_refused(directory):
    backend = HiCacheOffload(storage_config(extra_config(directory), model_name=TaggedPool.storage_format_tag), {})
    with pytest.raises(offload.ConfigError, match="model"):
        backend.register_mem_pool_host(TaggedPool())


# --- what is set wrongly ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "fields", "named"),
    [
        ({}, {}, "hicache_storage_backend_extra_config.engine"),
        (extra_config(lookup_timeout="soon"), {}, "lookup_timeout"),
        (extra_config(lokup_timeout=1), {}, "lookup_timeout"),
        (extra_config({"host": {"type": 3}}), {}, "tiers.host.type"),
        (extra_config(), {"model_name": None}, "model"),
    ],
)
def test_what_is_set_wrongly_is_named_when_the_backend_is_made(extra, fields, named):
    with pytest.raises(offload.ConfigError, match=named):
        HiCacheOffload(storage_config(extra, **fields), {})


def test_a_pool_of_mere_bytes_needs_to_be_told_what_they_are():
    pool = LayerFirstPool(dtype=torch.uint8)
    backend = HiCacheOffload(storage_config(), {})
    with pytest.raises(offload.ConfigError, match="kv_dtype"):
        backend.register_mem_pool_host(pool)
    with open_backend(pool, extra_config(kv_dtype="fp8_e4m3")) as backend:
        assert backend.batch_set_v1(hashes(1), tokens(0)) == [True]


def test_pools_of_anything_but_kv_are_refused(pool, backend):
    backend.register_mem_host_pool_v2(pool, "kv")
    with pytest.raises(offload.ConfigError, match="mamba"):
        backend.register_mem_host_pool_v2(pool, "mamba")


def test_clearing_is_not_pretended(pool, backend):
    backend.batch_set_v1(hashes(1), tokens(0))
    with pytest.raises(NotImplementedError):
        backend.clear()
    assert backend.exists(*hashes(1))


# --- faults -----------------------------------------------------------------------------------------------------------


def everything(backend):
    """What each call answers."""
    keys, flat = hashes(2), [torch.zeros(FULL_PAGE // 2, dtype=torch.bfloat16) for _ in range(2)]
    return (
        backend.batch_set_v1(keys, tokens(0, 1)),
        backend.batch_exists(keys),
        backend.batch_get_v1(keys, tokens(8, 9)),
        backend.batch_set(keys, flat),
        backend.batch_get(keys, flat),
        backend.set(keys[0], flat[0]),
        backend.get(keys[0], flat[0]),
        backend.exists(keys[0]),
    )


NOTHING = ([False, False], 0, [False, False], False, [None, None], False, None, False)


def test_a_backend_without_a_pool_has_nothing(pool):
    backend = HiCacheOffload(storage_config(), {})
    assert everything(backend) == NOTHING
    backend.register_mem_pool_host(pool)
    backend.close()
    assert everything(backend) == NOTHING
    assert {name.partition(": ")[2] for name in failures(backend)} == {"no pool"}


def test_without_its_server_nothing_is_cached_and_that_is_named(pool, tmp_path):
    tier = {"type": "maru", "server_url": f"ipc://{tmp_path}/nobody.sock", "pool_size": "1MiB", "timeout_ms": 100}
    with open_backend(pool, extra_config({"maru": tier}, lookup_timeout=0.5, store_timeout=2.0)) as backend:
        assert everything(backend) == NOTHING
        assert {name.partition(": ")[0] for name in failures(backend)} == {"start", "store", "lookup"}
        assert {name.partition(": ")[2] for name in failures(backend)} <= {
            "unavailable",
            "timeout",
            "layout not checked",
        }
        assert "maru" in backend.report_status()["unavailable_tiers"]


def test_a_full_tier_takes_what_it_has_room_for_and_the_rest_is_named(pool):
    """Nothing may go from it. One page is that of the check at the start, which others compare with."""
    host = {"type": "memory", "capacity_bytes": 3 * FULL_PAGE}
    extra = extra_config({"host": host})
    extra["engine"]["pipeline"] = {"on_destination_full": "fail"}
    with open_backend(pool, extra) as backend:
        assert backend.batch_set_v1(hashes(2), tokens(0, 1)) == [True, True]
        assert backend.batch_set_v1(hashes(2, "another"), tokens(2, 3)) == [False, False]
        assert failures(backend) == {"store: full": 2}
        assert backend.batch_exists(hashes(2)) == 2


def test_a_page_that_was_damaged_does_not_come_and_is_named(pool, tmp_path, directory):
    keys = hashes(2)
    with open_backend(pool, extra_config(directory)) as backend:
        backend.batch_set_v1(keys, tokens(0, 1))
        for file in (tmp_path / "kv").rglob("*"):
            if file.is_file() and file.stat().st_size > FULL_PAGE:
                content = bytearray(file.read_bytes())
                content[-FULL_PAGE // 2] ^= 1
                file.write_bytes(content)
        assert backend.batch_get_v1(keys, tokens(8, 9)) == [False, False]
        assert any("damaged" in name for name in failures(backend))


@pytest.mark.parametrize("indices", [tokens(0), tokens(0, 1, 2), torch.arange(5)])
def test_pages_that_do_not_fit_their_names_are_not_touched(backend, indices):
    assert backend.batch_set_v1(hashes(2), indices) == [False, False]
    assert backend.batch_get_v1(hashes(2), indices) == [False, False]
    assert failures(backend) == {"store: wrong pages": 2, "load: wrong pages": 2}


def test_a_second_instance_finds_what_the_first_one_has_stored(pool):
    with temporary_pool() as directory, Server(directory) as server:
        extra = extra_config({"maru": {"type": "maru", "server_url": server.ipc, "pool_size": "1MiB"}})
        with open_backend(pool, extra) as first:
            assert first.batch_set_v1(hashes(4), tokens(0, 1, 2, 3)) == [True] * 4
        mine = LayerFirstPool()
        with open_backend(mine, extra) as second:
            assert second.batch_exists(hashes(4)) == 4
            assert second.batch_get_v1(hashes(4), tokens(4, 5, 6, 7)) == [True] * 4
            assert failures(second) == {}
    for page in range(4):
        assert torch.equal(mine.page(4 + page), pool.page(page))


# --- weights ----------------------------------------------------------------------------------------------------------


def test_pages_of_replaced_weights_are_not_found(pool, tmp_path):
    """A checkpoint that was copied is found under any path; one that was replaced is another."""
    model, copy = tmp_path / "model", tmp_path / "copy"
    disk = {"disk": {"type": "file", "directory": str(tmp_path / "kv"), "capacity_bytes": "1MiB"}}
    for path in (model, copy):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"weights")
    keys = hashes(2)

    def found(path, **more):
        with open_backend(pool, extra_config(disk, model=str(path), **more)) as backend:
            there = backend.batch_exists(keys)
            backend.batch_set_v1(keys, tokens(0, 1))
            return there

    assert [found(model), found(copy)] == [0, 2]
    (model / "model.safetensors").write_bytes(b"replaced")
    assert [found(model), found(model), found(copy)] == [0, 2, 2]
    assert [found(copy, weights_version="1"), found(copy, weights_version="2")] == [0, 0]
