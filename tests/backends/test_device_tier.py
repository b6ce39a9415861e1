"""A paged KV cache in torch tensors as a tier: any layout, and every byte where it belongs."""

import random
import subprocess
import sys
import time

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import device as device_module
from backends.abc import LOADED, STORED, Destination, Missed, RoomRequest, Source, Tier, Unproven
from backends.base.block_layout import Plane, TensorMemory, check_disjoint, layout_of
from backends.base.pages import new_pages, pages_of
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads
from backends.device import DeviceTier
from backends.memory import MemoryTier
from backends.testing import check_tier, payload_of

torch = pytest.importorskip("torch")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ON_DEVICE = TensorMemory(1 << 40, (3, 4), (4, 1), 4, "torch.float32", 0, None)
N, TOKENS, HEADS, DIM, LAYERS = 6, 4, 2, 8, 3


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def layers_of(layout, device="cpu", dtype="bfloat16", n=N):
    """Tensors of one layout, and the axis that counts blocks."""
    dtype = getattr(torch, dtype)

    def zeros(*shape):
        return torch.zeros(shape, dtype=dtype, device=device)

    match layout:
        case "blocks first":
            return [zeros(n, TOKENS, HEADS, DIM) for _ in range(LAYERS)], 0
        case "keys and values apart":
            return [zeros(2, n, TOKENS, HEADS, DIM) for _ in range(LAYERS)], 1
        case "one storage of all layers":
            return list(zeros(LAYERS, 2, n, TOKENS, HEADS, DIM).unbind(0)), 1
        case "layers side by side in each block":
            return list(zeros(n, LAYERS, 2, TOKENS, HEADS, DIM).unbind(1)), 0
        case "heads before tokens, seen the other way round":
            return [zeros(n, HEADS, TOKENS, DIM).transpose(1, 2) for _ in range(LAYERS)], 0
        case "a gap behind each head":
            return [zeros(n, TOKENS, HEADS, 2 * DIM)[..., :DIM] for _ in range(LAYERS)], 0
        case "blocks last":
            return [zeros(TOKENS, HEADS, DIM, n) for _ in range(LAYERS)], -1
        case "every second block of another tensor":
            return [zeros(2 * n, TOKENS, HEADS, DIM)[::2] for _ in range(LAYERS)], 0
        case "layers of several sizes and types":
            return [zeros(n, TOKENS, DIM), torch.zeros(n, 3, dtype=torch.uint8, device=device), zeros(n, 5)], 0
        case "one tensor":
            return [zeros(n, LAYERS, TOKENS)], 0
        case _:
            raise AssertionError(layout)


LAYOUTS = [
    "blocks first",
    "keys and values apart",
    "one storage of all layers",
    "layers side by side in each block",
    "heads before tokens, seen the other way round",
    "a gap behind each head",
    "blocks last",
    "every second block of another tensor",
    "layers of several sizes and types",
    "one tensor",
]


def block_of(layers, axes, number):
    """The bytes of one block by definition: each tensor's slice, in memory order."""
    result = b""
    for layer, axis in zip(layers, axes, strict=True):
        part = layer.select(axis, number)
        order = sorted(range(part.ndim), key=lambda at: (-part.stride(at), at))
        items = torch.cat([part.permute(order).reshape(-1)]).cpu()
        result += bytes(items.view(torch.uint8).tolist())
    return result


def scribble(layers, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        noise = torch.randint(0, 100, layer.shape, generator=generator)
        layer.copy_(noise)


def tier_of(layout, device="cpu", n=N, **options):
    layers, axis = layers_of(layout, device, n=n)
    return DeviceTier(layers, block_axis=axis, **options), layers, [axis] * len(layers)


@pytest.fixture(params=[1, 1 << 30], ids=["long pieces", "short pieces"])
def pieces(request, monkeypatch):
    """From how many bytes on a piece is long."""
    monkeypatch.setattr(device_module, "_LONG_PIECE", request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_gathered_and_scattered_byte_for_byte(layout, device, pieces):
    tier, layers, axes = tier_of(layout, device)
    scribble(layers)
    before = [layer.clone() for layer in layers]
    ids = [4, 0, 5, 1]
    expected = [block_of(layers, axes, number) for number in ids]
    assert {len(block) for block in expected} == {tier.block_bytes}
    adjacent = new_pages(4, tier.block_bytes)
    scattered = pages_of([bytearray(tier.block_bytes) for _ in ids])
    for pages in (adjacent, scattered):
        tier.copy_out(ids, pages)
        assert [bytes(page) for page in pages] == expected
    for pages in (adjacent, scattered):
        for layer in layers:
            layer.zero_()
        destination = tier.into([2, 3, 0, 5])
        destination.copy_in(0, pages.part(0, 1))
        destination.copy_in(1, pages.part(1, 4))
        assert [block_of(layers, axes, number) for number in (2, 3, 0, 5)] == expected
        assert {*block_of(layers, axes, 1), *block_of(layers, axes, 4)} == {0}
        tier.into(ids).copy_in(0, adjacent)
        for layer, old, axis in zip(layers, before, axes, strict=True):
            for number in ids:
                assert torch.equal(layer.select(axis, number), old.select(axis, number))


@pytest.mark.parametrize("layout", ["layers side by side in each block", "a gap behind each head", "blocks last"])
def test_what_lies_between_the_blocks_is_left_alone(layout, pieces):
    layers, axis = layers_of(layout)
    whole = torch.empty(0, dtype=torch.uint8).set_(layers[0].untyped_storage())
    tier = DeviceTier(layers[:1], block_axis=axis)
    whole.fill_(7)
    pages = new_pages(1, tier.block_bytes)
    tier.into([3]).copy_in(0, pages)
    assert int((whole == 0).sum()) == tier.block_bytes
    assert int((whole == 7).sum()) == len(whole) - tier.block_bytes


@pytest.mark.parametrize("layout", ["one storage of all layers", "layers side by side in each block"])
def test_neighbouring_blocks_of_long_pieces_are_scattered_in_one_copy(layout, monkeypatch):
    import numpy

    monkeypatch.setattr(device_module, "_LONG_PIECE", 1)
    tier, layers, axes = tier_of(layout)
    copied, copyto = [], numpy.copyto
    monkeypatch.setattr(numpy, "copyto", lambda to, at: (copied.append(len(to)), copyto(to, at)))
    pages = new_pages(4, tier.block_bytes)
    for at, page in enumerate(pages):
        page[:] = bytes([at + 1]) * tier.block_bytes
    tier.into([2, 3, 5, 0]).copy_in(0, pages)
    assert copied == [2, 1, 1]
    assert [set(block_of(layers, axes, number)) for number in (2, 3, 5, 0)] == [{1}, {2}, {3}, {4}]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_strides_will_do(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "_LONG_PIECE", data.draw(st.sampled_from([1, 1 << 30])))
        any_strides_will_do(data)


def any_strides_will_do(data):
    n_axes = data.draw(st.integers(1, 4))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=n_axes, max_size=n_axes))
    steps = data.draw(st.lists(st.integers(1, 2), min_size=n_axes, max_size=n_axes))
    order = data.draw(st.permutations(range(n_axes)))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    axis = data.draw(st.integers(0, n_axes - 1))
    layers = []
    for _ in range(data.draw(st.integers(1, 3))):
        storage = torch.zeros([size * step for size, step in zip(shape, steps, strict=True)], dtype=dtype)
        layer = storage[tuple(slice(None, None, step) for step in steps)].permute(order)
        layers.append(layer)
    scribble(layers)
    tier = DeviceTier(layers, block_axis=axis)
    ids = data.draw(st.lists(st.integers(0, tier.n - 1), min_size=1, max_size=tier.n, unique=True))
    expected = [block_of(layers, [axis] * len(layers), number) for number in ids]
    pages = new_pages(len(ids), tier.block_bytes)
    tier.copy_out(ids, pages)
    assert [bytes(page) for page in pages] == expected
    shown = tier.views(ids)
    assert shown is None or [bytes(page) for page in shown] == expected
    for layer in layers:
        layer.zero_()
    tier.into(ids).copy_in(0, pages)
    assert [block_of(layers, [axis] * len(layers), number) for number in ids] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_pool_of_blocks_keeps_the_contract_of_a_tier(layout, device):
    def make(n, size):
        tier, _, _ = tier_of(layout, device, n=n + 3, pool=range(2, n + 2))
        return tier

    def damage(tier, key):
        page = new_pages(1, tier.block_bytes)
        slots = tier.pool.slots([key])
        tier.copy_out(slots, page)
        page[0][5] ^= 1
        tier.into(slots).copy_in(0, page)

    async with keep_threads():
        await check_tier(make, block_bytes=tier_of(layout)[0].block_bytes, damage=damage)


def test_it_is_a_source_and_a_tier():
    tier: Tier = tier_of("one tensor")[0]
    source: Source = tier_of("one tensor")[0]
    destination: Destination = tier_of("one tensor")[0].into([1, 2])
    assert isinstance(source, Source)
    assert tier.statistics().capacity_bytes == 0  # all blocks are the engine's
    assert len(destination) == 2


async def test_an_engine_offloads_its_own_blocks_and_loads_them_elsewhere(device):
    tier, layers, axes = tier_of("keys and values apart", device)
    scribble(layers)
    host = MemoryTier(8 * tier.block_bytes, tier.block_bytes)
    keys = [b"a", b"b", b"c"]
    blocks = tier.external([1, 4, 2], keys)
    expected = [block_of(layers, axes, number) for number in (1, 4, 2)]
    async with keep_threads():
        reservation = await host.reserve(RoomRequest(blocks.keys, tier.block_bytes, "wait"))
        assert await reservation.transfer(tier, blocks.refs) == [STORED] * 3
        reservation.release()
        assert [host.get(key) for key in keys] == expected
        for layer in layers:
            layer.zero_()
        async with await host.pin(keys) as lease:
            assert await host.load(lease, tier.into([0, 5, 3])) == [LOADED] * 3
    assert [block_of(layers, axes, number) for number in (0, 5, 3)] == expected


async def test_a_block_that_is_one_run_is_seen_in_host_memory():
    tier, layers, axes = tier_of("one tensor")
    scribble(layers)
    assert [bytes(page) for page in tier.views([3, 1])] == [block_of(layers, axes, number) for number in (3, 1)]
    views = tier.into([2]).views()
    views[0][:] = bytes(tier.block_bytes)
    assert not layers[0][2].any()
    assert tier_of("blocks first")[0].views([0]) is None


async def test_blocks_that_the_engine_wrote_itself_are_loaded_without_a_checksum(device):
    tier, layers, _ = tier_of("blocks first", device, pool=range(N))
    slots = tier.stage(2)
    scribble(layers)
    tier.register(slots, [b"a", b"b"])
    places = PagesDestination(new_pages(2, tier.block_bytes))
    layers[0][slots[0]] += 1  # nobody can tell
    async with await tier.pin([b"a", b"b"]) as lease:
        assert await tier.load(lease, places) == [LOADED] * 2


async def test_a_checksum_from_an_earlier_block_in_the_slot_is_forgotten():
    tier, layers, _ = tier_of("blocks first", pool=range(1))
    tier.put(b"a", payload_of(b"a", tier.block_bytes))
    await tier.delete([b"a"])
    slots = tier.stage(1)
    scribble(layers)
    tier.register(slots, [b"b"])
    async with await tier.pin([b"b"]) as lease:
        assert await tier.load(lease, PagesDestination(new_pages(1, tier.block_bytes))) == [LOADED]
    tier, layers, _ = tier_of("blocks first", pool=range(1))
    tier.put(b"a", payload_of(b"a", tier.block_bytes))
    layers[0][0] += 1
    async with await tier.pin([b"a"]) as lease:
        assert await tier.load(lease, PagesDestination(new_pages(1, tier.block_bytes))) == [Missed("damaged")]


def test_an_engine_puts_and_gets_single_blocks(device):
    tier, _, _ = tier_of("keys and values apart", device, pool=range(1, 3))
    for key in (b"a", b"b", b"c"):
        assert tier.put(key, payload_of(key, tier.block_bytes))
    assert [tier.get(key) for key in (b"a", b"b")] == [None, payload_of(b"b", tier.block_bytes)]
    assert tier.free == 0


@pytest.mark.parametrize(
    ("error", "is_kept"), [(OSError("no"), False), (Unproven("left"), True)], ids=["failed", "unproven"]
)
def test_a_put_whose_copy_was_left_keeps_its_slot(monkeypatch, error, is_kept):
    tier, _, _ = tier_of("keys and values apart", pool=range(1, 3))

    def fail(slots, pages):
        raise error

    monkeypatch.setattr(tier._storage, "copy_in", fail)
    with pytest.raises(type(error)):
        tier.put(b"a", payload_of(b"a", tier.block_bytes))
    assert tier.free == 2 - is_kept


def test_the_fingerprint_says_what_the_bytes_mean():
    prints = {layout: tier_of(layout)[0].fingerprint for layout in LAYOUTS}
    same = {"blocks first", "every second block of another tensor", "a gap behind each head"}
    assert len({prints[layout] for layout in same}) == 1  # the same bytes in the same order
    assert prints["keys and values apart"] == prints["one storage of all layers"]
    assert prints["blocks first"] != prints["heads before tokens, seen the other way round"]
    assert prints["blocks first"] != prints["keys and values apart"]
    assert tier_of("blocks first", n=N + 5)[0].fingerprint == prints["blocks first"]
    other, _ = layers_of("blocks first", dtype="float16")
    assert DeviceTier(other).fingerprint != prints["blocks first"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DeviceTier([]), "layers is empty"),
        (lambda: DeviceTier([torch.zeros(3, 4)], block_axis=2), "block_axis is 2, but the tensor has 2 axes"),
        (lambda: DeviceTier([torch.zeros(3, 4), torch.zeros(4, 4)]), r"differ in their number of blocks: \[3, 4\]"),
        (lambda: DeviceTier([torch.zeros(3, 4, device="meta")]), r"layers\[0\] is on meta"),
        (lambda: DeviceTier([torch.zeros(3, 4), ON_DEVICE]), r"on several devices: \['cpu', 'cuda:0'\]"),
        (lambda: DeviceTier([torch.zeros(3, 0)]), "holds no blocks"),
        (lambda: DeviceTier([torch.zeros(3, 1).expand(3, 4)]), "share memory"),
        (lambda: DeviceTier([torch.zeros(3, 4)], pool=range(1, 4)), "within the 3 blocks"),
        (lambda: DeviceTier([torch.zeros(3, 4)], pool=range(0, 3, 2)), "within the 3 blocks"),
    ],
)
def test_tensors_that_hold_no_blocks_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_numbers_that_are_no_blocks_never_reach_memory():
    tier, _, _ = tier_of("blocks first")
    for ids in ([N], [-1], [0, 1 << 40]):
        with pytest.raises(ValueError, match="has no block"):
            tier.into(ids)
        with pytest.raises(ValueError, match="has no block"):
            tier.external(ids, [b"%d" % number for number in ids])
    with pytest.raises(ValueError, match="share memory"):
        tier.into([1, 1])


def test_a_layout_is_arithmetic():
    layout = layout_of((2, 5, 3, 4), (60, 12, 4, 1), 2, 1)
    assert (layout.n, layout.block_bytes, layout.order) == (5, 48, (0, 2, 3))
    assert [(plane.offset, plane.stride_bytes, plane.run_bytes) for plane in layout.planes] == [
        (0, 24, 24),
        (120, 24, 24),
    ]


def test_the_module_imports_no_torch():
    code = "import sys, backends.device; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_of_trio_is_not_needed_to_make_one():
    with pytest.raises(RuntimeError):
        trio.lowlevel.current_task()
    tier_of("one tensor")


# --- blocks that share memory -------------------------------------------------------------------------------------


def drawn_pieces(rng):
    """Pieces of a few blocks in little memory, so that many share some and many do not."""
    stride = rng.randint(1, 12)
    return rng.randint(1, 4), [
        (
            rng.randint(0, 40),
            Plane(rng.randint(0, 8), stride if rng.random() < 0.9 else rng.randint(1, 12), rng.randint(1, 6)),
        )
        for _ in range(rng.randint(1, 4))
    ]


def test_pieces_that_share_memory_are_found_as_by_painting():
    found = set()
    for seed in range(20_000):
        n, pieces = drawn_pieces(random.Random(seed))
        painted = [
            byte
            for address, plane in pieces
            for block in range(n)
            for byte in range(
                address + plane.offset + block * plane.stride_bytes,
                address + plane.offset + block * plane.stride_bytes + plane.run_bytes,
            )
        ]
        shared, alike = len(painted) != len(set(painted)), len({plane.stride_bytes for _, plane in pieces}) == 1
        try:
            check_disjoint(pieces, n)
            refused = False
        except ValueError:
            refused = True
        assert refused == shared or (refused and not alike), (seed, n, pieces)
        found.add((refused, alike))
    assert len(found) == 4


def test_a_cache_with_very_many_pieces_is_checked_in_time():
    pieces = [
        (layer << 30 | kv << 29, Plane(head * 256, 256 * 64, 256))
        for layer in range(128)
        for kv in (0, 1)
        for head in range(64)
    ]
    began = time.process_time()
    check_disjoint(pieces, 10_000)
    with pytest.raises(ValueError):
        check_disjoint([*pieces, pieces[-1]], 10_000)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "tensors",
    [
        lambda base: [base.as_strided((4, 2, 32), (16, 1024, 1))],
        lambda base: [base[:256].view(4, 64), base[:256].view(4, 64)],
        lambda base: [base[:256].view(4, 64), base[32:288].view(4, 64)],
        lambda base: [base.as_strided((4, 64), (32, 1))],
    ],
)
def test_a_cache_whose_blocks_share_memory_is_refused(tensors):
    with pytest.raises(ValueError, match="share memory"):
        DeviceTier(tensors(torch.zeros(4096, dtype=torch.uint8)))


@pytest.mark.parametrize(
    "tensors",
    [
        lambda base: [base.view(2, 4, 512)[kv] for kv in (0, 1)],  # keys, then values
        lambda base: [base.view(4, 2, 512)[:, kv] for kv in (0, 1)],  # of each block, keys and values
        lambda base: [base.view(4, 8, 2, 64)[:, layer] for layer in range(8)],  # of each block, all layers
        lambda base: [base.view(8, 2, 4, 64)[layer].transpose(0, 1) for layer in range(8)],
        lambda base: [base.view(8, 512)[::2], base.view(8, 512)[1::2]],
        lambda base: [base.view(4, 16, 64).transpose(0, 1)[at : at + 1].transpose(0, 1) for at in range(16)],
    ],
)
def test_a_cache_whose_pieces_are_interleaved_is_taken(tensors):
    DeviceTier(tensors(torch.zeros(4096, dtype=torch.uint8)))


@pytest.mark.long
def test_the_check_of_many_pieces_takes_time_in_proportion():
    """Pieces side by side: each is compared with its neighbour alone."""
    n = 1 << 14
    began = time.process_time()
    check_disjoint([(2 * at, Plane(0, 2 * n, 1)) for at in range(n)], 8)
    small = time.process_time() - began
    began = time.process_time()
    check_disjoint([(2 * at, Plane(0, 16 * n, 1)) for at in range(8 * n)], 8)
    assert time.process_time() - began < 30 * max(small, 0.01)  # 64 times if it were quadratic
