"""Pages of published connectors: their names, their bytes, and a peer that writes and reads them over the published protocol.

The peer is written from the published description and knows nothing of our code: a page ``kv_{hash}_L{n}`` has what layer ``n``
holds of a chunk's tokens, by slots, as ``extract`` and ``inject`` have it.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch

from backends.base.block_layout import TensorMemory, memory_of
from backends.base.copier import close_copiers
from backends.base.pages import new_pages
from maru.fake_cuda import FakeCuda, use
from offload import NO_WAIT, ConfigError, from_thread
from offload.engines.vllm._naming import ChunkNaming
from offload.engines.vllm._page_kinds import PageKind, WorkerPages, kind_of
from offload.engines.vllm._plans import LoadPlan, StepPlan, StorePlan
from offload.engines.vllm._published import LayerNaming, TokenHashes
from offload.engines.vllm._requests import BlockGroup, RequestTable
from offload.engines.vllm._scheduler import SchedulerHalf
from offload.engines.vllm._settings import MaruSettings
from offload.engines.vllm._worker import WorkerHalf
from tests.support.maru_processes import TCP, Server, eventually, temporary_pool
from tests.support.published import Ask, PublishedClient, PublishedRmClient

BLOCKS, HEADS, BLOCK, DIM, CHUNK = 24, 2, 4, 8, 12
LAYERS = (0, 3)
SOON = 30.0

# --- the names ------------------------------------------------------------------------------------------------------


def tokens_of(n: int) -> list[int]:
    return [7 * at % 50_000 for at in range(n)]


def blake2b(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(struct.pack(f"={len(tokens)}q", *tokens), digest_size=8).hexdigest()


def md5(tokens: Sequence[int]) -> str:
    return hashlib.md5(struct.pack(f"={len(tokens)}q", *tokens), usedforsecurity=False).hexdigest()[:16]


@pytest.mark.parametrize(("names", "of"), [("published-blake2b", blake2b), ("published-md5", md5)])
def test_a_hash_is_of_all_tokens_up_to_the_end_of_its_block(names, of):
    tokens = tokens_of(10)
    hashes = TokenHashes(tokens, BLOCK, names)
    assert len(hashes) == 2
    assert hashes[1].decode() == of(tokens[:8])
    assert hashes[0].decode() == of(tokens[:4])  # also one that is asked for later
    tokens += tokens_of(30)
    assert len(hashes) == 10
    assert [one.decode() for one in hashes[4:10:3]] == [of(tokens[: 4 * (at + 1)]) for at in (4, 7)]
    assert hashes[-1].decode() == of(tokens)
    with pytest.raises(IndexError):
        hashes[10]


def test_a_chunk_has_a_key_for_each_layer():
    naming = LayerNaming(LAYERS)
    assert naming.keys([b"aa", b"bb"], "a generation") == [b"kv_aa_L0", b"kv_aa_L3", b"kv_bb_L0", b"kv_bb_L3"]
    assert [one.keys([b"aa"]) for one in naming.by_layer()] == [[b"kv_aa_L0"], [b"kv_aa_L3"]]


# --- the bytes ------------------------------------------------------------------------------------------------------

SHAPES = {
    "latent": (BLOCKS, BLOCK, DIM),
    "blocks first": (BLOCKS, HEADS, BLOCK, DIM),
    "keys and values first": (2, BLOCKS, BLOCK, HEADS, DIM),
}


def extract(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What a published connector stores of these slots, by the three forms of a cache that it knows."""
    if cache.ndim == 3:
        return cache.reshape(BLOCKS * BLOCK, -1)[slots]
    if cache.ndim == 4:
        return cache[slots // BLOCK, :, slots % BLOCK]
    return cache.reshape(2, BLOCKS * BLOCK, -1)[:, slots]


def inject(cache: torch.Tensor, slots: torch.Tensor, page: bytes) -> None:
    """What it does with a page that it loads."""
    source = torch.frombuffer(bytearray(page), dtype=cache.dtype)
    if cache.ndim == 3:
        cache.view(BLOCKS * BLOCK, -1)[slots] = source.reshape(len(slots), -1)
    elif cache.ndim == 4:
        cache[slots // BLOCK, :, slots % BLOCK] = source.reshape(len(slots), cache.shape[1], -1)
    else:
        cache.view(2, BLOCKS * BLOCK, -1)[:, slots] = source.reshape(2, len(slots), -1)


def slots_of(blocks: Sequence[int]) -> torch.Tensor:
    return torch.tensor([block * BLOCK + at for block in blocks for at in range(BLOCK)])


def page_of(cache: torch.Tensor, blocks: Sequence[int]) -> bytes:
    return bytes(extract(cache, slots_of(blocks)).contiguous().view(torch.uint8).flatten().tolist())


def caches(shape: Sequence[int], fill: bool = True) -> dict[str, torch.Tensor]:
    new = torch.randn if fill else torch.zeros
    return {f"model.layers.{at}.self_attn.attn": new(*shape).to(torch.bfloat16) for at in LAYERS}


def kind(names: str = "published-blake2b", groups: int = 1, workers: int = 1) -> PageKind:
    settings = MaruSettings.read({"maru_key_names": names, "maru_kv_chunk_tokens": CHUNK}, BLOCK, 1 << 10, len(LAYERS))
    return kind_of(settings, [BlockGroup(BLOCK)] * groups, BLOCK, workers)


def pages_of(layers: dict[str, torch.Tensor], names: str = "published-blake2b") -> WorkerPages:
    return kind(names).of_worker([layers], BLOCKS, OURS)


def chunks_of(layers: dict[str, torch.Tensor]) -> Any:
    return pages_of(layers).source


OURS = ChunkNaming(model="m", dtype="bfloat16", layout="l")


@contextmanager
def on_a_device(layers: dict[str, torch.Tensor]) -> Iterator[tuple[FakeCuda, dict[str, TensorMemory]]]:
    """The same caches in the memory of a fake device."""
    close_copiers()
    fake = FakeCuda()
    with use(fake) as driver:
        driver.attach(0)
        there = {}
        for name, layer in layers.items():
            memory = memory_of(name, layer)
            address = driver.allocate(layer.untyped_storage().nbytes())
            fake.write(address, held_by(memory.address, layer))
            there[name] = attrs.evolve(memory, address=address, device=0, owner=None)
        yield fake, there
        close_copiers()
    assert not fake.wrong


def held_by(address: int, layer: torch.Tensor) -> bytes:
    return ctypes.string_at(address, layer.untyped_storage().nbytes())


LAID_OUT = {
    **{name: (shape, tuple(range(len(shape)))) for name, shape in SHAPES.items()},
    "tokens first in memory": ((BLOCKS, HEADS, BLOCK, DIM), (0, 2, 1, 3)),
    "heads before tokens in memory": ((2, BLOCKS, BLOCK, HEADS, DIM), (0, 1, 3, 2, 4)),
    "blocks first in memory": ((2, BLOCKS, BLOCK, HEADS, DIM), (1, 0, 2, 3, 4)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16], ids=str)
@pytest.mark.parametrize(("shape", "order"), LAID_OUT.values(), ids=LAID_OUT)
def test_pages_of_a_device_are_those_of_host_memory(shape, order, dtype):
    def laid_out() -> dict[str, torch.Tensor]:
        sizes, back = [shape[axis] for axis in order], [order.index(axis) for axis in range(len(order))]
        item = dtype.itemsize
        return {
            f"layers.{at}": torch.randint(0, 256, (*sizes[:-1], sizes[-1] * item), dtype=torch.uint8)
            .view(dtype)
            .permute(back)
            for at in LAYERS
        }

    host, blocks = laid_out(), [[5, 6, 9], [2, None, 3]]
    source = chunks_of(host)
    stored = source.chunks(source.naming.keys([b"a", b"b"]), blocks, first=0)
    pages, again = new_pages(4, source.block_bytes), new_pages(4, source.block_bytes)
    source.copy_out(stored.refs, pages)
    with on_a_device(host) as (fake, there):
        cache = chunks_of(there)
        found = cache.chunks(cache.naming.keys([b"a", b"b"]), blocks, first=0)
        ctypes.memset(again.addresses[0], 7, 4 * source.block_bytes)
        cache.copy_out(found.refs, again)
        assert [bytes(page) for page in again] == [bytes(page) for page in pages]
        assert fake.calls.count("cuMemcpyBatchAsync") == fake.calls.count("cuEventSynchronize") == 1
        places, others = [[7, None, 0], [11, 10, 20]], cache.into([[7, None, 0], [11, 10, 20]])
        source.into(places).copy_in(0, pages)
        others.copy_in(0, again.part(0, 1))
        others.copy_in(1, again.part(1, 4))
        for name, layer in host.items():
            nbytes = layer.untyped_storage().nbytes()
            assert fake.read(there[name].address, nbytes) == held_by(layer.data_ptr(), layer)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_page_is_what_a_published_connector_stores_and_loads(shape):
    layers, blocks = caches(shape), [[5, 1, 9], [2, 20, 3]]
    source = chunks_of(layers)
    stored = source.chunks(source.naming.keys([b"a", b"b"]), blocks, first=4)
    assert list(stored.depths) == [4, 4, 5, 5]
    pages = new_pages(4, source.block_bytes)
    source.copy_out(stored.refs, pages)
    expected = [page_of(layer, chunk) for chunk in blocks for layer in layers.values()]
    assert [bytes(page) for page in pages] == expected
    ours, theirs = caches(shape, fill=False), caches(shape, fill=False)
    places = chunks_of(ours).into(blocks)
    assert (len(places), places.block_bytes, places.views()) == (4, source.block_bytes, None)
    places.copy_in(0, pages.part(0, 3))
    places.copy_in(3, pages.part(3, 4))
    for at, page in enumerate(expected):
        inject(list(theirs.values())[at % 2], slots_of(blocks[at // 2]), page)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    source.forget(stored.refs)
    assert not source._chunks


def test_layers_of_chunks_say_whether_they_lie_on_a_device():
    source = chunks_of(caches(next(iter(SHAPES.values()))))
    assert not source.into([[5, 1, 9]]).on_device
    source.on_device = True
    assert source.into([[5, 1, 9]]).on_device


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_that_are_there_already_are_not_written_to(shape):
    layers = caches(shape)
    source = chunks_of(layers)
    pages = new_pages(2, source.block_bytes)
    source.copy_out(source.chunks([b"kv_a_L0", b"kv_a_L3"], [[5, 1, 9]], first=0).refs, pages)
    before = {name: layer.clone() for name, layer in layers.items()}
    source.into([[None, 21, None]]).copy_in(0, pages)
    for name, layer in layers.items():
        assert page_of(layer, [21]) == page_of(before[name], [1])
        rest = [at for at in range(BLOCKS) if at != 21]
        assert page_of(layer, rest) == page_of(before[name], rest)


def test_a_marker_comes_behind_all_layers_of_its_chunk_and_has_no_bytes():
    source = chunks_of(caches(SHAPES["latent"]))
    keys = source.naming.keys([b"a", b"b"])
    stored = source.chunks(keys, [[5, 1, 9], [2, 20, 3]], first=0)
    assert source.behind(stored, frozenset([keys[0], keys[3]])) is None
    behind = source.behind(stored, frozenset(keys[1:]))
    assert behind is not None and list(behind.keys) == [b"kv_b_DONE"]
    page = new_pages(1, source.block_bytes)
    page[0][:] = b"x" * source.block_bytes
    source.copy_out(behind.refs, page)
    assert bytes(page[0]) == bytes(source.block_bytes)


def test_a_cache_that_no_published_page_has_is_refused():
    for shape in ((BLOCKS, BLOCK), (BLOCKS + 1, HEADS, BLOCK, DIM), (BLOCKS, BLOCK, HEADS, DIM)):
        with pytest.raises(ValueError, match="which no published page has"):
            chunks_of(caches(shape))
    with pytest.raises(ValueError, match="published pages have one size"):
        chunks_of({"layers.0": torch.zeros(BLOCKS, BLOCK, 8), "layers.1": torch.zeros(BLOCKS, BLOCK, 4)})
    with pytest.raises(ValueError, match="has no number"):
        chunks_of({"attn": torch.zeros(BLOCKS, BLOCK, 8)})


# --- what is set ----------------------------------------------------------------------------------------------------


def test_a_page_of_published_names_holds_one_layer():
    settings = MaruSettings.read({"maru_key_names": "published-md5"}, 16, 4 << 10, 4)
    tier = settings.engine["tiers"]["maru"]
    assert (settings.published_names, tier["key_names"]) == ("published-md5", "text")
    assert tier["chunk_size_bytes"] == 16 << 10
    assert MaruSettings.read({}, 16, 4 << 10, 4).published_names is None
    with pytest.raises(ConfigError, match="published pages have no tenant"):
        MaruSettings.read({"maru_key_names": "published-md5", "tenant": "a"}, 16, 4 << 10, 4)
    with pytest.raises(ConfigError, match="maru_key_names"):
        MaruSettings.read({"maru_key_names": "kv"}, 16, 4 << 10, 4)


class Request:
    """What vLLM says of a request."""

    def __init__(self, **more: Any) -> None:
        self.all_token_ids, self.block_hashes = tokens_of(2 * BLOCK), [b"one", b"two"]
        self.lora_request = self.cache_salt = self.prompt_embeds = None
        self.mm_features: list[object] = []
        self.__dict__.update(more)


def test_ours_are_named_by_all_and_published_ones_by_tokens():
    ours, published = kind("hashed"), kind()
    assert (ours.names_blocks, ours.has_generations) == (True, True)
    assert (published.names_blocks, published.has_generations) == (False, False)
    tokens = Request().all_token_ids
    assert [one.decode() for one in published.hashes(Request())] == [blake2b(tokens[:BLOCK]), blake2b(tokens)]
    assert [one.decode() for one in kind("published-md5").hashes(Request())] == [md5(tokens[:BLOCK]), md5(tokens)]
    more: list[dict[str, Any]] = [
        {"lora_request": object()},
        {"cache_salt": "a"},
        {"mm_features": [object()]},
        {"prompt_embeds": torch.zeros(1)},
    ]
    for one in more:
        assert ours.hashes(Request(**one)) == [b"one", b"two"]
        assert published.hashes(Request(**one)) == ()  # no name says what it differs by


def test_a_worker_has_one_name_for_a_chunk_of_ours_and_one_for_each_published_layer():
    layers = caches(SHAPES["blocks first"])
    ours, published = pages_of(layers, "hashed"), pages_of(layers)
    assert ours.naming is OURS and list(ours.parts) == [OURS]
    assert [part.keys([b"aa"]) for part in published.parts] == [[b"kv_aa_L0"], [b"kv_aa_L3"]]
    assert ours.source.block_bytes == len(LAYERS) * published.source.block_bytes
    assert ours.canary is not None and published.canary is None  # a layout is no part of what the latter are called
    few = {name: layer[: CHUNK // BLOCK] for name, layer in layers.items()}
    assert kind("hashed").of_worker([few], CHUNK // BLOCK, OURS).canary is None  # vLLM keeps a block for itself


def test_published_pages_are_of_one_group_and_one_worker():
    for more in ({"groups": 2}, {"workers": 2}):
        assert kind("hashed", **more).names_blocks
        with pytest.raises(ValueError, match="one group of KV caches and one worker; use hashed"):
            kind(**more)


# --- a peer ---------------------------------------------------------------------------------------------------------


class Peer:
    """A published instance of vLLM, as far as pages are concerned."""

    def __init__(self, url: str, shape: Sequence[int]) -> None:
        self.caches = caches(shape)
        self._client = PublishedClient(url)
        self._rm = PublishedRmClient(self._client.ask(Ask.HANDSHAKE)["rm_address"])
        self._region = self._client.ask(Ask.REQUEST_ALLOC, instance_id="theirs", size=1 << 20)["handle"]
        self._memory = self._rm.map(self._region)
        self._used = 0

    def close(self) -> None:
        self._rm.close()
        self._client.close()

    def keys(self, tokens: Sequence[int]) -> list[str]:
        return [f"kv_{blake2b(tokens[:stop])}" for stop in range(CHUNK, len(tokens) + 1, CHUNK)]

    def store(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """As its worker: layer by layer, and a marker of one byte once a chunk has all."""
        for at, key in enumerate(self.keys(tokens)):
            chunk = blocks[at * CHUNK // BLOCK : (at + 1) * CHUNK // BLOCK]
            for layer, cache in zip(LAYERS, self.caches.values(), strict=True):
                self._put(f"{key}_L{layer}", page_of(cache, chunk))
            self._put(f"{key}_DONE", b"\0")

    def _put(self, key: str, data: bytes) -> None:
        self._memory[self._used : self._used + len(data)] = data
        place = {"region_id": self._region["region_id"], "kv_offset": self._used, "kv_length": len(data)}
        assert self._client.ask(Ask.REGISTER_KV, key=key, **place)["is_new"]
        self._used += 4096

    def matched(self, tokens: Sequence[int]) -> int:
        """As its scheduler: so many leading chunks are there."""
        there = [self._client.ask(Ask.EXISTS_KV, key=f"{key}_DONE")["exists"] for key in self.keys(tokens)]
        return [*there, False].index(False)

    def load(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        for at in range(self.matched(tokens)):
            slots = slots_of(blocks[at * CHUNK // BLOCK : (at + 1) * CHUNK // BLOCK])
            for layer, cache in zip(LAYERS, self.caches.values(), strict=True):
                found = self._client.ask(Ask.LOOKUP_KV, key=f"{self.keys(tokens)[at]}_L{layer}")
                start, length = found["kv_offset"], found["kv_length"]
                inject(cache, slots, self._rm.map(found["handle"])[start : start + length])


class Ours:
    """The two halves of our connector, with published names, and vLLM's part of a request."""

    def __init__(self, url: str, shape: Sequence[int]) -> None:
        self.caches = caches(shape)
        pages = pages_of(self.caches)
        source = pages.source
        said = {"maru_server_url": url, "maru_pool_size": "1M", "maru_key_names": "published-blake2b"}
        said |= {"maru_kv_chunk_tokens": CHUNK}
        settings = MaruSettings.read(said, BLOCK, len(LAYERS) * source.block_bytes * BLOCK // CHUNK, len(LAYERS))
        self.engine = from_thread.open_engine(source, settings.engine_config(), when_full="drop").start()
        options = {"lookup_timeout": SOON, "load_timeout": SOON}
        self.worker = WorkerHalf(
            self.engine, source, pages.naming, room_knob=settings.room_knob, computed=lambda: NO_WAIT, **options
        )
        self.table = RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK)
        self.scheduler = SchedulerHalf(self.engine, pages.parts, self.table, lookup_timeout=SOON)

    def matched(self, name: str, tokens: Sequence[int]) -> int:
        hashes, deadline = TokenHashes(tokens, BLOCK, "published-blake2b"), time.monotonic() + SOON
        while (found := self.scheduler.matched(name, hashes, len(tokens), 0)) is None:
            assert time.monotonic() < deadline
        return found

    def load(self, name: str, tokens: Sequence[int], blocks: Sequence[int]) -> int:
        found = self.matched(name, tokens)
        plan = self.table.allocated(self.table.records[name], [blocks], found)
        if plan is not None:
            self.worker.load(StepPlan(loads=[plan]))
            eventually(lambda: name in self.worker.received(frozenset()))
        return found

    def store(self, tokens: Sequence[int], blocks: Sequence[int], *, drain: bool = True) -> None:
        hashes, per_chunk = TokenHashes(tokens, BLOCK, "published-blake2b"), CHUNK // BLOCK
        chunks = range(len(tokens) // CHUNK)
        plan = StorePlan(
            "r",
            [hashes[(at + 1) * per_chunk - 1] for at in chunks],
            [blocks[at * per_chunk : (at + 1) * per_chunk] for at in chunks],
            0,
        )
        self.worker.store(StepPlan(stores=[plan]))
        if drain:
            self.engine.drain()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@contextmanager
def both(shape: Sequence[int]) -> Iterator[tuple[Peer, Ours]]:
    with temporary_pool() as pool, Server(pool, *TCP) as server:
        peer, ours = Peer(server.tcp, shape), Ours(server.ipc, shape)
        try:
            yield peer, ours
        finally:
            ours.close()
            peer.close()


TOKENS = tokens_of(2 * CHUNK + 5)


def test_what_a_published_instance_has_stored_is_loaded():
    with both(SHAPES["blocks first"]) as (peer, ours):
        peer.store(TOKENS, [5, 1, 9, 2, 20, 3])
        assert ours.load("r", TOKENS, [10, 11, 12, 13, 14, 15, 16]) == 2 * CHUNK
        for name, cache in ours.caches.items():
            assert page_of(cache, [10, 11, 12, 13, 14, 15]) == page_of(peer.caches[name], [5, 1, 9, 2, 20, 3])
        assert not ours.worker.failed_blocks()
        assert ours.worker.counts.snapshot()["chunks loaded"] == 2
        other = [*TOKENS[:CHUNK], *tokens_of(CHUNK)[::-1], 1]
        assert ours.matched("another", other) == CHUNK  # what they share


def test_what_is_stored_here_a_published_instance_loads():
    with both(SHAPES["keys and values first"]) as (peer, ours):
        assert peer.matched(TOKENS) == 0
        ours.store(TOKENS, [5, 1, 9, 2, 20, 3])
        ours.engine.drain()  # the markers, which are stored behind
        assert peer.matched(TOKENS) == 2
        peer.load(TOKENS, [10, 11, 12, 13, 14, 15])
        for name, cache in peer.caches.items():
            assert page_of(cache, [10, 11, 12, 13, 14, 15]) == page_of(ours.caches[name], [5, 1, 9, 2, 20, 3])
        assert ours.worker.counts.snapshot()["chunks stored"] == 2


def test_the_end_of_a_worker_lets_markers_arrive():
    with both(SHAPES["latent"]) as (peer, ours):
        ours.store(TOKENS, [5, 1, 9, 2, 20, 3], drain=False)
        ours.close()
        assert peer.matched(TOKENS) == 2


def test_a_chunk_of_which_a_layer_is_missing_is_no_hit():
    with both(SHAPES["latent"]) as (peer, ours):
        key = peer.keys(TOKENS)[0]
        peer._put(f"{key}_L0", page_of(peer.caches["model.layers.0.self_attn.attn"], [5, 1, 9]))
        assert ours.matched("r", TOKENS) == 0


def test_a_packed_page_of_several_layers_is_no_hit():
    """As newer published releases store it unless told otherwise: under the hash, without a layer."""
    with both(SHAPES["latent"]) as (peer, ours):
        for key in peer.keys(TOKENS):
            peer._put(key, b"".join(page_of(cache, [5, 1, 9]) for cache in peer.caches.values()))
        assert ours.matched("r", TOKENS) == 0
        ours.store(TOKENS, [5, 1, 9, 2, 20, 3])
        ours.engine.drain()
        assert peer.matched(TOKENS) == 2  # what is stored here is beside the packed pages, a page for each layer


def test_pages_of_another_size_are_no_hit():
    with both(SHAPES["latent"]) as (peer, ours):
        for layer in LAYERS:
            peer._put(f"{peer.keys(TOKENS)[0]}_L{layer}", b"short")
        assert ours.matched("r", TOKENS) == 0


def test_what_was_lost_on_the_way_is_computed():
    """The second chunk goes between the lookup and the load, and the first is of use all the same."""
    with both(SHAPES["latent"]) as (peer, ours):
        peer.store(TOKENS[:CHUNK], [5, 1, 9])
        hashes = TokenHashes(TOKENS, BLOCK, "published-blake2b")
        plan = LoadPlan("r", [hashes[2], hashes[5]], [[10, 11, 12], [13, 14, 15]])
        ours.worker.load(StepPlan(loads=[plan]))
        eventually(lambda: "r" in ours.worker.received(frozenset()))
        assert ours.worker.failed_blocks() == {13, 14, 15}
