"""The other face of a wrapped tier: blocks go on from it, decoded on their way; and how it stands in an engine."""

import os

import pytest
import trio
import trio.testing

import offload
from backends import DamagedBlock, DuplicateKeys, MissingKeys, Unproven
from backends.abc import DUPLICATE, EVICTED, LOADED, STORED, Destination, RoomRequest, Source
from backends.base.blockfile import Directory
from backends.base.pages import pages_of
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import FakeTier, payload_of
from backends.wrappers import AesGcm, Fp8, Zstd, slot_bytes, wrap
from tests.support.wrapping import (
    NAMES,
    SECRETS,
    at_rest,
    blocks_of,
    file_of,
    load,
    make_tier,
    memory,
    oracle,
    source_of,
    store,
    stored_page,
    wrappers_of,
)

BLOCKS = blocks_of(4)
KEYS = list(BLOCKS)


async def copied_out(tier, refs):
    buffers = [bytearray(tier.block_bytes) for _ in refs]
    await trio.to_thread.run_sync(tier.source.copy_out, refs, pages_of(buffers))
    return [bytes(buffer) for buffer in buffers]


class Remote(Source):
    """A source that copies blocks itself. Its first copy does not end."""

    block_bytes = 64

    def __init__(self):
        self.lost = []

    def copy_out(self, refs, pages):
        self.copy(pages)

    def copy(self, pages):
        assert not any(set(pages.addresses) & set(lost.addresses) for lost in self.lost)
        if not self.lost:
            self.lost.append(pages)
            raise Unproven("it may go on")


class RemotePlaces(Destination):
    """A destination that copies blocks itself. Its first copy does not end."""

    block_bytes = 64

    def __init__(self):
        self.remote = Remote()

    def __len__(self):
        return len(KEYS)

    def views(self):
        return None

    def copy_in(self, start, pages):
        self.remote.copy(pages)


@pytest.mark.parametrize("name", ["zstd", "zstd-aes"])
async def test_working_memory_that_somebody_may_write_still_is_not_used_again(name):
    tier, remote = memory(wrappers_of(name)), Remote()
    reservation = await tier.reserve(RoomRequest(KEYS, 64, "fail"))
    with pytest.raises(Unproven):
        await reservation.transfer(remote, [0, 1, 2, 3])
    assert tier.wrapper_statistics().staging == 1
    reservation = await tier.reserve(RoomRequest(KEYS, 64, "fail"))
    assert await reservation.transfer(remote, [0, 1, 2, 3]) == [STORED] * 4
    assert tier.wrapper_statistics().staging == 2
    assert (await load(tier, KEYS))[0] == [LOADED] * 4
    assert tier.wrapper_statistics().staging == 2  # that one is used again


async def test_a_load_whose_end_is_unproven_says_so():
    tier, remote = memory(wrappers_of("zstd")), RemotePlaces()
    await store(tier, BLOCKS)
    async with await tier.pin(KEYS) as lease:
        with pytest.raises(Unproven):
            await tier.load(lease, remote)
        assert await tier.load(lease, remote) == [LOADED] * 4


# --- a source -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("name", NAMES)
async def test_what_is_read_from_it_is_what_was_stored(name, place, tmp_path):
    tier = make_tier(place, tmp_path, wrappers_of(name), 8, 64)
    await store(tier, BLOCKS)
    refs = tier.source.upgrade([KEYS[1], b"not there", KEYS[0]])
    assert refs[1] == EVICTED and tier.source.views([refs[0]]) is None
    expected = [oracle(tier.chain.wrappers, BLOCKS[key]) for key in (KEYS[1], KEYS[0])]
    assert await copied_out(tier, [refs[0], refs[2]]) == expected
    tier.source.release(refs)
    assert not tier._source.guarded
    at_rest(tier)
    tier.close()


async def test_more_than_is_staged_at_once_comes_in_portions():
    size = 1 << 20
    tier = memory(wrappers_of("zstd"), blocks=10, block_bytes=size)
    blocks = {key: os.urandom(512) * (size // 512) for key in blocks_of(10)}
    await store(tier, blocks)
    refs = tier.source.upgrade(list(blocks))
    assert await copied_out(tier, refs) == list(blocks.values())
    tier.source.release(refs)
    file = FakeTier(10, size)  # its destination is not in host memory: blocks pass through a staging there, too
    reservation = await file.reserve(RoomRequest(list(blocks), size, "fail"))
    assert await reservation.transfer(tier.source, tier.source.upgrade(list(blocks))) == [STORED] * 10
    assert [file.get(key) for key in blocks] == list(blocks.values())


@pytest.mark.parametrize("place", ["memory", "file"])
async def test_what_is_not_in_host_memory_is_staged(place, tmp_path):
    """From a file into a wrapped tier, and out of it to somewhere that copies by itself."""
    size = 1 << 20
    blocks = {key: os.urandom(size) for key in blocks_of(6)}
    below = FileTier(tmp_path / "below", 6 * size)
    reservation = await below.reserve(RoomRequest(list(blocks), size, "fail"))
    plain = source_of(blocks)
    await reservation.transfer(plain, plain.upgrade(list(blocks)))
    tier = make_tier(place, tmp_path, wrappers_of("zstd-aes"), 6, size)
    assert await store(tier, blocks, source=below) == [STORED] * 6

    class Elsewhere(PagesDestination):
        def views(self):
            return None

    buffers = [bytearray(size) for _ in blocks]
    async with await tier.pin(list(blocks)) as lease:
        outcomes = await tier.load(lease, Elsewhere(pages_of(buffers)))
    assert list(outcomes) == [LOADED] * 6
    assert buffers == list(blocks.values())
    below.close()
    tier.close()


@pytest.mark.parametrize("place", ["memory without checksums", "file"])
async def test_a_block_that_cannot_be_decoded_is_not_copied_on_and_no_longer_found(place, tmp_path):
    tier = make_tier(place, tmp_path, wrappers_of("zstd"), 8, 64)
    await store(tier, BLOCKS)
    if place == "file":
        path = file_of(tier, KEYS[1])
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        stored_page(tier, KEYS[1])[50] ^= 1
    refs = tier.source.upgrade(KEYS)
    with pytest.raises(DamagedBlock) as caught:
        await copied_out(tier, refs)
    assert caught.value.reason == "damaged"
    tier.source.release(refs)
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[2], KEYS[3]}
    assert tier.source.upgrade(KEYS[1:2]) == [EVICTED]
    assert tier.statistics().missed["damaged"] == 1
    await tier.purge()
    assert tier.statistics().blocks == 3
    assert await store(tier, {KEYS[1]: BLOCKS[KEYS[1]]}) == [STORED]
    at_rest(tier)
    tier.close()


async def test_it_is_read_as_whoever_held_it_said():
    tier = memory(wrappers_of("aes"))
    end = tier.carry(KEYS, "ann")
    await store(tier, BLOCKS)
    hers = tier.source.upgrade(KEYS)
    end()
    assert await copied_out(tier, hers) == list(BLOCKS.values()), "however long ago she said so"
    tier.source.release(hers)
    end = tier.carry(KEYS, "bob")
    his = tier.source.upgrade(KEYS[:1])
    with pytest.raises(DamagedBlock, match="foreign"):
        await copied_out(tier, his)
    tier.source.release(his)
    end()
    assert tier.contains_nowait(KEYS) == set(KEYS)


async def test_one_hold_for_two_tenants_is_nobodys():
    tier = memory(wrappers_of("aes"))
    end = tier.carry(KEYS, "ann")
    await store(tier, BLOCKS)
    hers = tier.source.upgrade(KEYS[:1])
    end()
    his = tier.source.upgrade(KEYS[:1])
    with pytest.raises(DamagedBlock, match="foreign"):
        await copied_out(tier, his)
    tier.source.release(his)
    tier.source.release(hers)
    assert not tier._source.guarded
    at_rest(tier)


async def two_holds_are_two():
    tier = memory(wrappers_of("zstd"))
    await store(tier, BLOCKS)
    first, second = tier.source.upgrade(KEYS[:1]), tier.source.upgrade(KEYS[:1])
    assert first == second
    tier.source.release(first)
    assert await copied_out(tier, second) == [BLOCKS[KEYS[0]]]
    tier.source.release(second)
    assert not tier._source.guarded
    at_rest(tier)


async def test_two_holds_are_two():
    await two_holds_are_two()


async def test_weak_and_strong_blocks_are_those_of_a_tier():
    tier = memory(wrappers_of("zstd"))
    await store(tier, BLOCKS)
    assert tier.source.weak(KEYS).refs is None
    with tier_held(tier, tier.source.strong(KEYS[:2])):
        assert tier.statistics().held_blocks == 2
    with pytest.raises(MissingKeys, match="does not have 1 of the keys"):
        tier.source.strong([KEYS[0], b"not there"])
    with pytest.raises(DuplicateKeys):
        tier.source.strong([KEYS[0], KEYS[0]])
    at_rest(tier)


class tier_held:
    def __init__(self, tier, blocks):
        self.tier, self.blocks = tier, blocks

    def __enter__(self):
        return self.blocks

    def __exit__(self, *exc):
        self.blocks.release()


def test_encoded_blocks_say_how_much_of_a_page_they_use():
    tier = memory(wrappers_of("zstd"))
    source = source_of(BLOCKS)
    encoded = tier.encoding(source, source.upgrade(KEYS), tier.contexts(KEYS)).as_source()
    assert encoded.block_bytes == tier.slot_bytes
    assert encoded.upgrade(tier.names([KEYS[2], KEYS[0]])) == [2, 0]
    assert encoded.views([0]) is None and encoded.release([0]) is None
    assert "k0" not in repr(encoded) and "Zstd" in repr(encoded)
    pages = pages_of([bytearray(b"\xff" * tier.slot_bytes) for _ in range(2)])
    encoded.copy_out([3, 1], pages)
    for page, key in zip(pages, (KEYS[3], KEYS[1]), strict=True):
        used = encoded.used_bytes(page)
        assert bytes(page[used:]) == bytes(tier.slot_bytes - used)
        assert tier.chain.read_header(key, page)[-1] == used - tier.chain.header_bytes


# --- evictions ----------------------------------------------------------------------------------------------------


async def test_evictions_are_told_by_the_names_that_blocks_have_here():
    tier = memory(wrappers_of("zstd"), blocks=4)
    told, spilled = [], []
    end = tier.on_evicted(lambda keys: told.extend(keys))
    await store(tier, BLOCKS)
    await store(tier, blocks_of(1, name="a"), "evict")
    assert len(told) == 1 and told[0] in KEYS
    end()

    def spill(spill):
        spilled.append((list(spill.keys), spill.held))
        assert tier.contains_nowait(spill.keys) == set(spill.keys)
        spilled.append(list(spill.over()))
        assert not spill.held and not spill.over()

    end = tier.spill_to(spill)
    with pytest.raises(ValueError, match="already"):
        tier.spill_to(spill)
    await store(tier, blocks_of(1, name="b"), "evict")
    [(victims, held), went] = spilled
    assert held and victims == went and victims[0] in KEYS
    end()
    await store(tier, blocks_of(1, name="c"), "evict")
    assert len(told) == 1 and len(spilled) == 2
    at_rest(tier)


# --- pipelines and engines ----------------------------------------------------------------------------------------


async def test_blocks_walk_through_wrapped_tiers_and_back():
    """Memory, quantized and encrypted; behind it a file, compressed and encrypted; both by a chain, both read again."""
    size = 256
    device = FakeTier(16, size)
    keys = [offload.block_key(bytes([number]), salt="ann") for number in range(12)]
    device.fill(keys)
    near = memory([Fp8("float32", row=16, lossy=True), AesGcm(SECRETS)], blocks=16, block_bytes=size)
    far = memory([Zstd(), AesGcm(SECRETS)], blocks=16, block_bytes=size)
    async with offload.open_engine(device, [near, far]) as engine:
        handle = await engine.store(device.weak(keys), precondition=offload.NO_WAIT, tenant="ann")
        result = await handle.wait()
        assert result.status is offload.Status.COMPLETE
        await engine.drain()
        assert near.contains_nowait(keys) == far.contains_nowait(keys) == set(keys)
        expected = [oracle(near.chain.wrappers, payload_of(key, size)) for key in keys]
        places = [bytearray(size) for _ in keys]
        await near.delete(keys[:5])
        async with await engine.lookup(keys, tenant="ann") as hit:
            assert [blocks for _, blocks in hit.runs] == [5, 7]
            loaded = await engine.load(hit, PagesDestination.over(places))
        assert loaded.loaded == 12 and places == expected, "what was lost was lost once: encoded again it is the same"
        async with await engine.lookup(keys) as hit:
            loaded = await engine.load(hit, PagesDestination.over(places))
        assert loaded.loaded == 0 and len(hit) == 12, "nobody in particular is not ann"
    at_rest(near)
    at_rest(far)


async def test_a_pipeline_from_a_wrapped_tier_reports_what_was_damaged_meanwhile():
    tier = memory(wrappers_of("zstd"))
    await store(tier, BLOCKS)
    stored_page(tier, KEYS[0])[50] ^= 1
    below = MemoryTier(8 * 64, 64)
    async with offload.open_pipeline(tier, below) as pipeline:
        handle = await pipeline.enqueue(tier.source.weak(KEYS), precondition=offload.NO_WAIT)
        result = await handle.wait()
        assert result.status is offload.Status.FAILED
        handle = await pipeline.enqueue(tier.source.weak(KEYS), precondition=offload.NO_WAIT)
        result = await handle.wait()
    assert list(result.evicted) == KEYS[:1] and set(result.completed) == set(KEYS[1:])
    assert [below.get(key) for key in KEYS[1:]] == [BLOCKS[key] for key in KEYS[1:]]


# --- files --------------------------------------------------------------------------------------------------------


async def test_blocks_are_there_after_a_restart(tmp_path):
    for name in ("zstd", "zstd-aes"):
        wrappers = wrappers_of(name)
        size = slot_bytes(64, *wrappers)
        tier = wrap(FileTier(tmp_path, 64 * size, block_bytes=size), *wrappers, block_bytes=64)
        assert tier.contains_nowait(KEYS) == set(), "what another chain has stored is not found"
        assert await store(tier, BLOCKS) == [STORED] * 4
        tier.close()
        tier = wrap(FileTier(tmp_path, 64 * size, block_bytes=size), *wrappers_of(name), block_bytes=64)
        assert tier.contains_nowait(KEYS) == set(KEYS)
        assert await load(tier, KEYS) == ([LOADED] * 4, list(BLOCKS.values()))
        assert await store(tier, BLOCKS) == [DUPLICATE] * 4
        tier.close()


async def test_a_file_takes_only_what_is_used(tmp_path):
    size = 1 << 20
    wrappers = wrappers_of("zstd")
    slot = slot_bytes(size, *wrappers)
    tier = wrap(FileTier(tmp_path, 8 * slot), *wrappers, block_bytes=size)
    blocks = {b"small": os.urandom(4096) * (size // 4096), b"large": os.urandom(size)}
    assert await store(tier, blocks) == [STORED] * 2
    small, large = (file_of(tier, key).stat() for key in blocks)
    assert small.st_size == large.st_size == 512 + slot, "a hole is read as zeros"
    assert small.st_blocks * 512 < 64 << 10 and large.st_blocks * 512 >= size
    assert tier.statistics().used_bytes == 2 * slot, "the capacity counts slots"
    assert await load(tier, list(blocks)) == ([LOADED] * 2, list(blocks.values()))
    tier.close()


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("left", [0, 100, 511, 512, 530, 600, -1])
async def test_a_file_that_was_torn_is_a_miss(left, checksums, tmp_path):
    wrappers = wrappers_of("zstd-aes")
    size = slot_bytes(4096, *wrappers)
    tier = wrap(FileTier(tmp_path, 8 * size, checksums=checksums), *wrappers, block_bytes=4096)
    blocks = {key: os.urandom(4096) for key in KEYS}
    await store(tier, blocks)
    path = file_of(tier, KEYS[1])
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    [first, second, *_], places = await load(tier, KEYS)
    assert first == LOADED and second != LOADED
    assert places[0] == blocks[KEYS[0]]
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[2], KEYS[3]}
    assert sum(tier.statistics().missed.values()) == 1
    tier.close()


@pytest.mark.parametrize("lost", ["header", "middle", "tag"])
async def test_what_a_crash_of_the_machine_left_as_a_hole_is_a_miss(lost, tmp_path):
    """Without fsync a renamed file may lack pages. The file's own checksum is off, so the chain must find it."""
    wrappers = wrappers_of("aes")
    tier = wrap(FileTier(tmp_path, 1 << 20, checksums=False), *wrappers, block_bytes=12_000)
    blocks = {key: os.urandom(12_000) for key in KEYS}
    await store(tier, blocks)
    at = {"header": 512, "middle": 512 + 4096, "tag": -16}[lost]
    path = file_of(tier, KEYS[2])
    data = bytearray(path.read_bytes())
    data[at : at + 16 if at + 16 else None] = bytes(16)
    path.write_bytes(data)
    tier.close()
    tier = wrap(FileTier(tmp_path, 1 << 20, checksums=False), *wrappers_of("aes"), block_bytes=12_000)
    outcomes, places = await load(tier, KEYS)
    assert [outcome == LOADED for outcome in outcomes] == [True, True, False, True]
    assert places[2] == bytes(12_000)
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[1], KEYS[3]}
    tier.close()


async def test_a_full_disk_fails_the_block_alone(tmp_path, monkeypatch):
    tier = make_tier("file", tmp_path, wrappers_of("zstd"), 8, 64)
    lost = tier.stored_key(KEYS[1]).hex()
    write = Directory.write

    def full(self, name, *args):
        if lost in name:
            raise OSError(28, "No space left on device")
        write(self, name, *args)

    monkeypatch.setattr(Directory, "write", full)
    async with keep_threads():
        outcomes = await store(tier, BLOCKS)
    assert [outcome == STORED for outcome in outcomes] == [True, False, True, True]
    assert (await load(tier, [KEYS[0]]))[0] == [LOADED]
    at_rest(tier)
    tier.close()
