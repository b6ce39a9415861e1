"""Chunks of a paged cache, as vLLM lays it out, to pages and back."""

import pytest
import torch

from backends.base.pages import Pages, checksums, new_pages
from backends.memory import MemoryTier
from offload import NO_WAIT, DrainUnproven, LayoutCheckFailed, Status, block_key, from_thread
from offload.engines.vllm import _chunks
from offload.engines.vllm._chunks import ChunkSource, GroupCaches, NoChunks, layout_of_caches
from offload.engines.vllm._naming import ChunkNaming
from offload.engines.vllm._worker import check_layout

BLOCKS, HEADS, TOKENS, DIM = 24, 2, 4, 8


def caches(
    layers: int = 3, dtype: torch.dtype = torch.bfloat16, blocks_outside: bool = False
) -> dict[str, torch.Tensor]:
    """All layers in one storage: layer by layer as on a CPU, or block by block with its layers together."""
    whole = torch.randn(layers, BLOCKS, HEADS, TOKENS, 2 * DIM).to(dtype)
    if blocks_outside:
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    return {f"model.layers.{at}.self_attn.attn": whole[at] for at in range(layers)}


@pytest.mark.parametrize("blocks_outside", [False, True])
@pytest.mark.parametrize("adjacent", [True, False])
def test_chunks_go_to_pages_and_into_other_blocks(blocks_outside, adjacent):
    cache = caches(blocks_outside=blocks_outside)
    source = ChunkSource([GroupCaches(cache, BLOCKS, 3)])
    assert source.block_bytes == 3 * 3 * HEADS * TOKENS * 2 * DIM * 2
    pages = new_pages(4, source.block_bytes)
    two = pages.part(0, 2) if adjacent else Pages([pages.addresses[3], pages.addresses[1]], source.block_bytes, pages)
    chunks = source.chunks([b"a", b"b"], [[5, 1, 9], [2, 20, 3]], first=7)
    assert list(chunks.depths) == [7, 8]
    source.copy_out(chunks.refs, two)
    destination = source.into([[10, 11, 12], [13, 14, 15]])
    assert (len(destination), destination.block_bytes, destination.views()) == (2, source.block_bytes, None)
    destination.copy_in(0, two)
    for layer in cache.values():
        assert torch.equal(layer[[10, 11, 12, 13, 14, 15]], layer[[5, 1, 9, 2, 20, 3]])


def test_blocks_that_are_not_wanted_stay_as_they_are():
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2)])
    pages = new_pages(2, source.block_bytes)
    chunks = source.chunks([b"a", b"b"], [[0, 1], [2, 3]], first=0)
    source.copy_out(chunks.refs, pages)
    before = {name: layer.clone() for name, layer in cache.items()}
    source.into([[None, 21], [22, None]]).copy_in(0, pages)
    for name, layer in cache.items():
        assert torch.equal(layer[[21, 22]], before[name][[1, 2]])
        rest = [at for at in range(BLOCKS) if at not in (21, 22)]
        assert torch.equal(layer[rest], before[name][rest])


def test_a_chunk_has_a_part_for_each_group():
    """Two groups in the same memory, as vLLM lays them out: a block belongs to one of them at a time."""
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2), GroupCaches(cache, BLOCKS, 1)])
    assert source.block_bytes == 3 * GroupCaches(cache, BLOCKS, 1).chunk_bytes
    pages = new_pages(3, source.block_bytes)
    for page in pages:
        page[:] = b"\xff" * len(page)
    stored = source.chunks([b"a", b"b", b"c"], [[0, 1, 2], [3, 4, 5], [6, 7, None]], first=0)
    source.copy_out(stored.refs, pages)
    assert (
        bytes(pages[2])[-source.block_bytes // 3 :].count(0) == source.block_bytes // 3
    )  # nothing of what was there before
    source.into([[10, 11, 12], [13, 14, None], [16, 17, None]]).copy_in(0, pages)
    for layer in cache.values():
        assert torch.equal(layer[[10, 11, 12, 13, 14, 16, 17]], layer[[0, 1, 2, 3, 4, 6, 7]])
    assert [one is None for one in source.plane_samples(stored.refs)] == [False, False, True]


@pytest.mark.parametrize("beside_bytes", [0, 1 << 30], ids=["two threads", "one thread"])
@pytest.mark.parametrize("warm_bytes", [1, 1 << 30], ids=["block by block", "whole chunks"])
def test_what_is_summed_while_it_is_copied_is_the_whole_of_each_page(beside_bytes, warm_bytes, monkeypatch):
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2), GroupCaches(cache, BLOCKS, 1)])
    pages = new_pages(3, source.block_bytes)
    source.copy_out(source.chunks([b"a", b"b", b"c"], [[0, 1, 2], [3, 4, 5], [6, 7, 8]], first=0).refs, pages)
    monkeypatch.setattr(_chunks, "BESIDE_BYTES", beside_bytes)
    monkeypatch.setattr(_chunks, "WARM_BYTES", warm_bytes)
    before = {name: layer.clone() for name, layer in cache.items()}
    destination = source.into([[9, 9, 9], [10, 11, 12], [None, 14, None], [None, None, 15]])
    assert destination.copy_in_and_sum(1, pages) == checksums(pages)
    written = [10, 11, 12, 14, 15]
    rest = [at for at in range(BLOCKS) if at not in written]
    for name, layer in cache.items():
        assert torch.equal(layer[written], before[name][[0, 1, 2, 4, 8]])
        assert torch.equal(layer[rest], before[name][rest])
    assert source.into([[1, 2, 3]]).copy_in_and_sum(0, pages.part(0, 1)) == checksums(pages.part(0, 1))


def test_chunks_say_whether_they_lie_on_a_device():
    group = GroupCaches(caches(), BLOCKS, 2)
    assert not ChunkSource([group]).into([[0, 1]]).on_device
    group.blocks.device = 0
    assert ChunkSource([group]).into([[0, 1]]).on_device


def test_a_large_load_goes_in_by_halves(monkeypatch):
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2)])
    pages = new_pages(3, source.block_bytes)
    source.copy_out(source.chunks([b"a", b"b", b"c"], [[0, 1], [2, 3], [4, 5]], first=0).refs, pages)
    monkeypatch.setattr(_chunks, "BESIDE_BYTES", 0)
    source.into([[10, 11], [12, 13], [14, None]]).copy_in(0, pages)
    source.into([[20, None]]).copy_in(0, pages.part(2, 3))
    for layer in cache.values():
        assert torch.equal(layer[[10, 11, 12, 13, 14, 20]], layer[[0, 1, 2, 3, 4, 4]])


def test_a_part_of_a_destination_is_copied_from_where_it_starts():
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2)])
    pages = new_pages(1, source.block_bytes)
    source.copy_out(source.chunks([b"a"], [[0, 1]], first=0).refs, pages)
    source.into([[4, 5], [6, 7], [8, 9]]).copy_in(1, pages)
    for layer in cache.values():
        assert torch.equal(layer[[6, 7]], layer[[0, 1]]) and not torch.equal(layer[[4, 5]], layer[[0, 1]])


def test_kernels_that_count_smaller_blocks_are_grouped():
    cache = {name: layer.reshape(BLOCKS * 2, HEADS, TOKENS // 2, 2 * DIM) for name, layer in caches().items()}
    source = ChunkSource([GroupCaches(cache, BLOCKS, 1)])
    pages = new_pages(1, source.block_bytes)
    source.copy_out(source.chunks([b"a"], [[3]], first=0).refs, pages)
    source.into([[8]]).copy_in(0, pages)
    for layer in cache.values():
        assert torch.equal(layer[16:18], layer[6:8])
    with pytest.raises(ValueError, match="not a multiple of its"):
        ChunkSource([GroupCaches(cache, BLOCKS + 1, 1)])


def test_layers_that_share_their_memory_are_copied_once():
    cache = caches(layers=2)
    shared = {**cache, "model.layers.9.self_attn.attn": next(iter(cache.values()))}
    assert (
        ChunkSource([GroupCaches(shared, BLOCKS, 1)]).block_bytes
        == ChunkSource([GroupCaches(cache, BLOCKS, 1)]).block_bytes
    )


def test_a_block_in_pieces_is_copied_piece_by_piece():
    whole = torch.randn(BLOCKS, HEADS, 2 * TOKENS, DIM)
    source = ChunkSource([GroupCaches({"layer": whole[:, :, ::2]}, BLOCKS, 1)])
    pages, before = new_pages(1, source.block_bytes), whole.clone()
    source.copy_blocks_out([[3]], pages)
    source.copy_in([[8]], pages)
    assert torch.equal(whole[8, :, ::2], before[3, :, ::2])
    assert torch.equal(whole[8, :, 1::2], before[8, :, 1::2])


def test_the_order_of_heads_and_tokens_is_in_the_layout():
    one = caches()
    other = {name: layer.transpose(1, 2).contiguous().transpose(1, 2) for name, layer in one.items()}
    texts = {
        layout_of_caches([cache], BLOCKS, 64) for cache in (one, other, caches(dtype=torch.float16), caches(layers=2))
    }
    assert len(texts) == 4
    assert layout_of_caches([one], BLOCKS, 64) == layout_of_caches([caches()], BLOCKS, 64)


def test_a_whole_way_through_an_engine():
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2)])
    keys = [block_key(b"%d" % at) for at in range(3)]
    with from_thread.open_engine(source, [MemoryTier(1 << 20, source.block_bytes)]) as engine:
        chunks = source.chunks(keys, [[0, 1], [2, 3], [4, 5]], first=0)
        assert engine.store(chunks, NO_WAIT).result().status is Status.COMPLETE
        source.forget(chunks.refs)
        assert not source._chunks
        with engine.begin_lookup(keys).result() as hit:
            assert engine.begin_load(hit, source.into([[10, 11], [12, None], [14, 15]])).result().loaded == 3
    for layer in cache.values():
        assert torch.equal(layer[[10, 11, 12, 14, 15]], layer[[0, 1, 2, 4, 5]])
        assert not torch.equal(layer[13], layer[3])


def test_a_scheduler_has_no_chunks():
    none = NoChunks(64)
    assert (none.upgrade([b"a"]), none.views([0]), none.release([0])) == ([-1], None, None)
    with pytest.raises(AssertionError):
        none.copy_out([], new_pages(0, 64))


def swapped(block: torch.Tensor) -> torch.Tensor:
    """Keys as values: both are packed into the last axis."""
    return block.roll(DIM, -1)


def engine_over(source: ChunkSource, host: MemoryTier) -> from_thread.Engine:
    return from_thread.open_engine(source, {"host": host}, shadow_check=1)


def test_a_layout_that_is_read_otherwise_than_written_is_found_at_the_start(monkeypatch):
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2)])
    before = {name: layer.clone() for name, layer in cache.items()}
    with engine_over(source, MemoryTier(1 << 20, source.block_bytes)) as engine:
        check = engine.check_layout(source.canary([5, 9]), "a name")
        assert (check.round_trip, check.shared, check.inconclusive) == (True, True, "")
        others = [at for at in range(BLOCKS) if at not in (5, 9)]
        for name, layer in cache.items():
            assert not layer[[5, 9]].any()
            assert torch.equal(layer[others], before[name][others])
        copy_in = ChunkSource.copy_in_and_sum

        def otherwise(self, chunks, pages):
            sums = copy_in(self, chunks, pages)
            for layer in cache.values():
                layer[[5, 9]] = swapped(layer[[5, 9]])
            return sums

        monkeypatch.setattr(ChunkSource, "copy_in_and_sum", otherwise)
        with pytest.raises(LayoutCheckFailed):
            engine.check_layout(source.canary([5, 9]), "a name")


class Answers:
    """An engine whose check ends so."""

    def __init__(self, error):
        self.error, self.closed = error, False

    def check_layout(self, canary, layout, timeout, precondition):
        raise self.error

    def close(self):
        self.closed = True


def test_start_goes_on_without_a_check_only_if_that_has_ended(caplog):
    naming = ChunkNaming("model", "float32", "layout")
    check_layout(Answers(from_thread.WaitTimeout("slow")), None, naming)
    assert "was not checked: slow" in caplog.text
    check_layout(wrong := Answers(LayoutCheckFailed("other planes")), None, naming)
    assert wrong.closed
    with pytest.raises(DrainUnproven):
        check_layout(Answers(DrainUnproven("a copy")), None, naming)


@pytest.mark.parametrize("blocks", [[[10, 11], [12, 13]], [[None, 11], [12, 13]]], ids=["whole", "a part is there"])
def test_a_chunk_that_is_loaded_otherwise_than_stored_is_found(blocks, monkeypatch):
    cache = caches()
    source = ChunkSource([GroupCaches(cache, BLOCKS, 2)])
    host = MemoryTier(1 << 20, source.block_bytes)
    keys = [block_key(b"a"), block_key(b"b")]
    with engine_over(source, host) as engine:
        engine.store(source.chunks(keys, [[0, 1], [2, 3]], first=0), NO_WAIT).result(10)
        with engine.lookup(keys) as hit:
            assert engine.load(hit, source.into(blocks)).loaded == 2
        assert engine.statistics().engine.shadow.mismatches == {}
        copy_in = ChunkSource.copy_in_and_sum

        def otherwise(self, chunks, pages):
            sums = copy_in(self, chunks, pages)
            for layer in cache.values():
                layer[10:14] = swapped(layer[10:14])
            return sums

        monkeypatch.setattr(ChunkSource, "copy_in_and_sum", otherwise)
        with engine.lookup(keys) as hit:
            assert engine.load(hit, source.into(blocks)).loaded == (0 if blocks[0][0] else 1)
        assert engine.statistics().engine.shadow.mismatches["stored"] == (2 if blocks[0][0] else 1)
