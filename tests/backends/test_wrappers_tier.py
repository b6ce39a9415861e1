"""A tier in wrappers keeps the promises of a tier, and makes a counted miss of whatever is not what was stored."""

import ctypes
import os
import random

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import BlockSizeError, DamagedBlock
from backends.abc import (
    DUPLICATE,
    LOADED,
    STORED,
    Capabilities,
    Deletion,
    Failed,
    Missed,
    Rejected,
    RoomRequest,
    Tier,
)
from backends.base.damaged_blocks import DamagedBlocks
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.plugins import HostConfig, NativeTier
from backends.testing import FakeTier, check_tier
from backends.wrappers import (
    AesGcm,
    BrokenWrapper,
    Context,
    UnknownTenant,
    WrappedTier,
    Zstd,
    slot_bytes,
    wrap,
)
from tests.support.plugin_faults import PlayedConnector
from tests.support.wrapping import (
    EXACT,
    NAMES,
    PAGE,
    PLACES,
    SECRETS,
    Spy,
    at_rest,
    blocks_of,
    file_of,
    foreign,
    judge_lossy,
    load,
    make_tier,
    memory,
    oracle,
    page_store,
    sealed_again,
    source_of,
    store,
    stored_page,
    wrappers_of,
)

BLOCKS = blocks_of(4)
KEYS = list(BLOCKS)


# --- the contract -------------------------------------------------------------------------------------------------


def flip_memory(tier, key):
    stored_page(tier, key)[tier.chain.header_bytes] ^= 1


def flip_file(tier, key):
    path = file_of(tier, key)
    data = bytearray(path.read_bytes())
    data[512 + tier.chain.header_bytes] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
async def test_it_keeps_the_contract_of_a_tier(name, place, tmp_path, monkeypatch):
    wrappers = wrappers_of(name)
    judge_lossy(monkeypatch, wrappers)
    async with keep_threads():
        with trio.fail_after(60):
            await check_tier(
                lambda blocks, size: make_tier(place, tmp_path, wrappers, blocks, size),
                damage=flip_file if place.startswith("file") else flip_memory,
            )


async def flip_maru(tier, key):
    async with await tier.inner.pin([tier.stored_key(key)]) as lease:
        assert lease.keys
        address = lease.pages.addresses[0]
    ctypes.c_ubyte.from_address(address + tier.chain.header_bytes).value ^= 1


@pytest.mark.parametrize("checksums", [True, False], ids=["", "without checksums of its own"])
@pytest.mark.parametrize("name", ["zstd", "fp8-zstd-aes"])
async def test_the_page_store_keeps_it_too(name, checksums, monkeypatch):
    wrappers = wrappers_of(name)
    judge_lossy(monkeypatch, wrappers)
    async with page_store(checksums=checksums) as make:
        with trio.fail_after(60):
            await check_tier(
                lambda blocks, size: wrap(make(blocks), *wrappers, block_bytes=size),
                block_bytes=PAGE - 1024,
                damage=flip_maru,
            )


async def test_a_tier_that_copies_in_place_is_left_to_do_so():
    """In virtual time a wrapped fake starts no thread either: blocks are examined where it copies."""
    fake = FakeTier(8, slot_bytes(64, *wrappers_of("zstd-aes")))
    tier = wrap(fake, *wrappers_of("zstd-aes"), block_bytes=64)
    assert await store(tier, BLOCKS) == [STORED] * 4
    assert await load(tier, KEYS) == ([LOADED] * 4, list(BLOCKS.values()))


def test_it_is_the_same_kind_of_tier(tmp_path):
    wrappers = wrappers_of("zstd")
    size = slot_bytes(64, *wrappers)
    for inner in (MemoryTier(8 * size, size), FileTier(tmp_path, 8 * size)):
        tier = wrap(inner, *wrappers, block_bytes=64)
        able = tier.capabilities
        assert tier.source is not None and tier.name == inner.name and able == inner.capabilities
        assert not able.needs_tenants, "nobody needs to say whose a block is that is only compressed"
        assert memory(wrappers_of("zstd-aes")).capabilities.needs_tenants
        tier.close()

    class Queue(Tier):
        name = "queue"
        capabilities = Capabilities(pins=False)
        reserve = reserve_nowait = contains = pin = load = delete = statistics = lambda self, *args: None

    tier = wrap(Queue(), *wrappers, block_bytes=64)
    assert type(tier) is WrappedTier and tier.source is None
    assert (tier.name, tier.capabilities, tier.slot_bytes) == ("queue", Queue.capabilities, size)
    tier.close()


async def test_a_remote_tier_stays_one():
    async with page_store() as make:
        tier = wrap(make(), Zstd(), block_bytes=1000)
        assert type(tier) is WrappedTier and not tier.capabilities.answers_at_once
        assert tier.source is tier.held_pages is None
        assert (tier.name, tier.slot_bytes) == ("maru", PAGE)


@pytest.mark.parametrize(
    ("inner", "error", "says"),
    [
        (lambda: MemoryTier(8 * 64, 64), BlockSizeError, "holds blocks of 64 bytes, not of"),
        (lambda: object(), TypeError, "cannot be wrapped: it is not a backends.abc.Tier"),
        (lambda: trio.Event(), TypeError, "cannot be wrapped"),
    ],
)
def test_what_cannot_be_wrapped_is_told(inner, error, says):
    with pytest.raises(error, match=says):
        wrap(inner(), Zstd(), block_bytes=64)


def test_what_gives_out_its_pages_cannot_be_wrapped():
    from backends.maru.l1 import MaruL1

    with pytest.raises(TypeError, match="cannot be wrapped"):
        wrap(MaruL1(), Zstd(), block_bytes=64)


def test_slots_may_be_larger_than_they_must_be():
    tier = wrap(MemoryTier(8 * 200, 200), Zstd(), block_bytes=64)
    assert (tier.slot_bytes, tier.block_bytes, tier.statistics().capacity_bytes) == (200, 64, 1600)


async def test_a_place_of_any_size_takes_the_size_that_is_needed_whatever_it_holds(tmp_path):
    inner = FileTier(tmp_path, 1 << 20)
    source = source_of(blocks_of(1, 50, "other"))
    await (await inner.reserve(RoomRequest([b"other0"], 50, "fail"))).transfer(source, source.upgrade([b"other0"]))
    assert inner.block_bytes == 50
    tier = wrap(inner, Zstd(), block_bytes=64)
    assert tier.slot_bytes == slot_bytes(64, Zstd())
    assert await store(tier, BLOCKS) == [STORED] * 4
    assert (await load(tier, KEYS))[0] == [LOADED] * 4
    tier.close()


async def test_arguments_are_checked_as_a_tier_does():
    tier, other = memory(wrappers_of("zstd")), memory(wrappers_of("zstd"))
    await store(tier, BLOCKS)
    for call in (tier.reserve_nowait, tier.reserve):
        with pytest.raises(BlockSizeError, match="of 64 bytes, not of 65"):
            result = call(RoomRequest(KEYS, 65, "fail"))
            await result
    lease = await tier.pin(KEYS)
    with pytest.raises(ValueError, match="does not hold blocks in"):
        await other.load(lease, PagesDestination.over([bytearray(64) for _ in range(4)]))
    with pytest.raises(ValueError, match="does not hold blocks in"):
        await tier.load(lease.inner, PagesDestination.over([bytearray(64) for _ in KEYS]))
    with pytest.raises(BlockSizeError):
        await tier.load(lease, PagesDestination.over([bytearray(65) for _ in KEYS]))
    with pytest.raises(ValueError, match="4 blocks do not fit into 3 places"):
        await tier.load(lease, PagesDestination.over([bytearray(64) for _ in KEYS[:3]]))
    await lease.release()
    reservation = await tier.reserve(RoomRequest([b"new"], 64, "fail"))
    with pytest.raises(BlockSizeError):
        await reservation.transfer(MemoryTier(65, 65), [0])
    source = source_of(blocks_of(1))
    with pytest.raises(ValueError, match="one ref per kept block, once"):
        await reservation.transfer(source, [0, 1])
    refs = source.upgrade([b"k0"])
    await reservation.transfer(source, refs)
    with pytest.raises(ValueError, match="one ref per kept block, once"):
        await reservation.transfer(source, refs)
    reservation.release()
    at_rest(tier)


# --- what was changed is a miss ------------------------------------------------------------------------------------


async def every_byte_changed_is_a_miss(name):
    """Every byte of header and body, one at a time: a counted miss, never other bytes, never an exception."""
    wrappers = wrappers_of(name)
    tier = memory(wrappers, block_bytes=32)
    blocks = blocks_of(1, 32)
    await store(tier, blocks)
    used = tier.chain.used_bytes(stored_page(tier, b"k0"))
    for at in range(used):
        stored_page(tier, b"k0")[at] ^= 0x10
        outcomes, [place] = await load(tier, [b"k0"])
        assert outcomes == [Missed("damaged")], at
        assert place == bytes(32), "what could not be verified is not left lying there"
        assert tier.contains_nowait([b"k0"]) == set(), "and is not found any more"
        assert await store(tier, blocks) == [STORED]
    assert await load(tier, [b"k0"]) == ([LOADED], [oracle(wrappers, blocks[b"k0"])])
    assert tier.statistics().missed["damaged"] == tier.wrapper_statistics().missed["damaged"] == used > 40
    at_rest(tier)


@pytest.mark.parametrize("name", NAMES)
async def test_every_byte_changed_is_a_miss(name):
    async with keep_threads():
        await every_byte_changed_is_a_miss(name)


async def no_wrapper_sees_what_was_not_verified():
    spy = Spy()
    tier = memory(wrappers_of("zstd-spy", spy=spy))
    await store(tier, BLOCKS)
    for at in (0, 8, 24, 30, tier.chain.header_bytes, tier.chain.header_bytes + 20):
        stored_page(tier, KEYS[0])[at] ^= 1
        assert (await load(tier, KEYS[:1]))[0] == [Missed("damaged")]
        await store(tier, {KEYS[0]: BLOCKS[KEYS[0]]})
    assert spy.decoded == []


async def test_no_wrapper_sees_what_was_not_verified():
    await no_wrapper_sees_what_was_not_verified()


async def no_length_is_believed():
    """Whoever can write the checksum as well may lie about lengths: it is a miss, and no wrapper is asked."""
    spy = Spy()
    tier = memory(wrappers_of("zstd-spy", spy=spy), block_bytes=64)
    for first, last in [(65, 66), (66, 65), (0, 200), (2**63, 1), (1, 2**64 - 1), (2**64 - 1, 65)]:
        assert await store(tier, {KEYS[0]: os.urandom(64)}) == [STORED]
        page = stored_page(tier, KEYS[0])
        page[24:40] = first.to_bytes(8, "little") + last.to_bytes(8, "little")
        sealed_again(tier.chain, KEYS[0], page)
        assert await load(tier, KEYS[:1]) == ([Missed("damaged")], [bytes(64)]), (first, last)
    assert spy.decoded == []
    at_rest(tier)


async def test_no_length_is_believed():
    await no_length_is_believed()


@pytest.mark.parametrize("name", ["aes", "zstd-aes", "fp8-zstd-aes"])
async def test_who_can_write_the_checksum_as_well_cannot_change_what_is_encrypted(name):
    wrappers = wrappers_of(name)
    tier = memory(wrappers, block_bytes=32)
    blocks = blocks_of(1, 32)
    await store(tier, blocks)
    good, head = bytes(stored_page(tier, b"k0")), tier.chain.header_bytes
    reasons = []
    for at in range(head, len(good)):
        page = stored_page(tier, b"k0")
        page[:] = good
        if at >= tier.chain.used_bytes(page):
            break
        page[at] ^= 0x10
        sealed_again(tier.chain, b"k0", page)
        [outcome], [place] = await load(tier, [b"k0"])
        assert isinstance(outcome, Missed) and place == bytes(32)
        reasons.append(outcome.reason)
        await tier.delete([b"k0"])
        await store(tier, blocks)
        good = bytes(stored_page(tier, b"k0"))
    assert reasons[:8] == ["foreign"] * 8 and reasons[8:16] == ["secret"] * 8 and set(reasons[16:]) == {"tag"}
    assert tier.wrapper_statistics().bad_tags == len(reasons) - 16
    assert tier.statistics().missed["tag"] == len(reasons) - 16


async def swapped_blocks_are_misses(name, *, repaired):
    tier = memory(wrappers_of(name))
    await store(tier, BLOCKS)
    first, second = stored_page(tier, KEYS[0]), stored_page(tier, KEYS[1])
    first[:], second[:] = bytes(second), bytes(first)
    if repaired:
        sealed_again(tier.chain, KEYS[0], first)
        sealed_again(tier.chain, KEYS[1], second)
    outcomes, places = await load(tier, KEYS)
    assert outcomes == [Missed("tag" if repaired else "damaged")] * 2 + [LOADED] * 2
    assert places[:2] == [bytes(64)] * 2 and places[2:] == [
        oracle(tier.chain.wrappers, BLOCKS[key]) for key in KEYS[2:]
    ]
    assert tier.contains_nowait(KEYS) == set(KEYS[2:])


@pytest.mark.parametrize("name", NAMES)
async def test_a_block_under_another_key_is_a_miss(name):
    await swapped_blocks_are_misses(name, repaired=False)


@pytest.mark.parametrize("name", ["aes", "zstd-aes"])
async def test_a_block_under_another_key_is_a_miss_even_with_a_new_checksum(name):
    await swapped_blocks_are_misses(name, repaired=True)


async def test_what_lies_behind_the_stored_bytes_is_zero_and_means_nothing():
    tier = memory(wrappers_of("zstd"), block_bytes=4096, blocks=1)
    assert await store(tier, {b"a": os.urandom(4096)}) == [STORED]
    assert await store(tier, {b"b": bytes(4096)}, "evict") == [STORED]
    page = stored_page(tier, b"b")
    used = tier.chain.used_bytes(page)
    assert used < 100 and bytes(page[used:]) == bytes(len(page) - used)
    page[used] ^= 1
    assert await load(tier, [b"b"]) == ([LOADED], [bytes(4096)])


async def test_what_is_held_by_another_reader_is_no_longer_found_and_may_be_stored_anew_beside_him():
    tier = memory(wrappers_of("zstd"))
    await store(tier, BLOCKS)
    flip_memory(tier, KEYS[1])
    other = await tier.pin(KEYS)
    assert (await load(tier, KEYS))[0] == [LOADED, Missed("damaged"), LOADED, LOADED]
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[2], KEYS[3]}
    assert await store(tier, {KEYS[1]: BLOCKS[KEYS[1]]}) == [STORED]
    assert tier.inner.statistics().used_bytes == 5 * tier.slot_bytes
    assert (await load(tier, KEYS)) == ([LOADED] * 4, list(BLOCKS.values()))
    await other.release()
    assert tier.inner.statistics().used_bytes == 4 * tier.slot_bytes
    assert tier.statistics().deleted == 0 and not tier.damaged
    at_rest(tier)


async def test_where_the_tier_below_cannot_be_told_what_another_reader_holds_goes_with_him():
    tier = foreign(wrappers_of("zstd"))
    await store(tier, BLOCKS)
    flip_memory(tier, KEYS[1])
    other = await tier.pin(KEYS)
    assert (await load(tier, KEYS))[0] == [LOADED, Missed("damaged"), LOADED, LOADED]
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[2], KEYS[3]}
    async with await tier.pin(KEYS) as lease:
        assert list(lease.keys) == KEYS[:1]
    assert await store(tier, {KEYS[1]: BLOCKS[KEYS[1]]}) == [Rejected("damaged")], "not a duplicate of that"
    assert tier.inner.statistics().blocks == 4
    await other.release()
    assert tier.inner.statistics().blocks == 3
    assert tier.statistics().deleted == 0, "nobody asked for that"
    assert await store(tier, {KEYS[1]: BLOCKS[KEYS[1]]}) == [STORED]
    assert (await load(tier, KEYS))[0] == [LOADED] * 4


async def condemned_and_held():
    """A block that could not be decoded, and that somebody below holds."""
    tier = foreign(wrappers_of("zstd"), blocks=4)
    await store(tier, BLOCKS)
    flip_memory(tier, KEYS[1])
    lease = await tier.inner.pin([tier.stored_key(KEYS[1])])
    assert (await load(tier, KEYS[1:2]))[0] == [Missed("damaged")]
    await lease.release()
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[2], KEYS[3]} and tier.inner.statistics().blocks == 4
    return tier


async def test_what_made_room_below_may_be_stored_anew():
    tier = await condemned_and_held()
    await tier.inner.delete([tier.stored_key(KEYS[1])])
    reservation = tier.reserve_nowait(RoomRequest(KEYS[1:2], 64, "fail"))
    source = source_of(BLOCKS)
    assert await reservation.transfer(source, source.upgrade(KEYS[1:2])) == [STORED]
    assert tier.contains_nowait(KEYS) == set(KEYS)
    assert (await load(tier, KEYS))[0] == [LOADED] * 4


async def test_what_cannot_be_decoded_can_be_deleted_by_request():
    tier = await condemned_and_held()
    assert await tier.delete(KEYS[:2]) == [Deletion.DELETED] * 2
    assert not tier.damaged and tier.statistics().deleted == 2


@pytest.mark.parametrize("deletes", [True, False])
async def test_a_plugin_that_deletes_nothing_is_not_asked_to_again_and_again(deletes):
    connector, wrappers = PlayedConnector(deletes=deletes), wrappers_of("zstd")
    inner = NativeTier(connector, slot_bytes(64, *wrappers), HostConfig(checksums=False))
    async with wrap(inner, *wrappers, block_bytes=64) as tier:
        await store(tier, BLOCKS)
        name = next(name for name in connector.blocks if name.endswith(tier.stored_key(KEYS[1]).hex()))
        connector.blocks[name] = bytes(reversed(connector.blocks[name]))
        assert (await load(tier, KEYS))[0] == [LOADED, Missed("damaged"), LOADED, LOADED]
        asked = connector.ids
        assert await tier.contains(KEYS) == {KEYS[0], KEYS[2], KEYS[3]}
        assert connector.ids == asked + 1
        assert (name in connector.blocks) is not deletes


def test_the_damaged_blocks_are_bounded():
    damaged = DamagedBlocks(2)
    for key in KEYS:
        damaged.add([Context(key, "", b"")])
    with damaged.claim(9) as contexts:
        assert [context.key for context in contexts] == KEYS[-2:]
        with damaged.claim(9) as others:
            assert others == []


@pytest.mark.parametrize("kind", [memory, foreign])
async def test_what_is_another_tenants_is_not_damaged(kind):
    tier = kind(wrappers_of("aes"))
    end = tier.carry(KEYS, "ann")
    await store(tier, BLOCKS)
    end()
    end = tier.carry(KEYS, "bob")
    assert (await load(tier, KEYS))[0] == [Missed("foreign")] * 4
    end()
    assert not tier.damaged and tier.inner.statistics().blocks == 4


async def test_a_plugin_with_larger_slots_is_wrapped_before_it_is_open():
    wrappers = wrappers_of("zstd")
    inner = NativeTier(PlayedConnector(), 4096)
    async with wrap(inner, *wrappers, block_bytes=64) as tier:
        assert tier.slot_bytes == 4096
        assert await store(tier, BLOCKS) == [STORED] * 4
        assert (await load(tier, KEYS)) == ([LOADED] * 4, list(BLOCKS.values()))


async def test_what_goes_wrong_here_is_a_failure_and_no_miss():
    spy = Spy()
    tier = memory([spy])
    await store(tier, BLOCKS)
    spy.error = MemoryError("no room to decode")
    outcomes, _ = await load(tier, KEYS)
    assert outcomes == [Failed(spy.error)] * 4
    spy.error = None
    assert (await load(tier, KEYS))[0] == [LOADED] * 4


@pytest.mark.parametrize("says", [-1, 65, 1 << 40])
async def test_a_wrapper_that_lies_about_what_it_made_stores_nothing(says):
    spy = Spy()
    spy.says = says
    tier = memory([spy])
    with pytest.raises(BrokenWrapper, match=f"returned {says} bytes, but its bound is"):
        await store(tier, BLOCKS)
    assert tier.contains_nowait(KEYS) == set()
    at_rest(tier)


async def test_a_source_that_knows_its_block_to_be_damaged_fails_that_one_alone():
    for name, in_host in (("zstd", True), ("aes", True), ("zstd", False)):
        tier, source = memory(wrappers_of(name)), source_of(BLOCKS)
        source.views(source.pool.slots(KEYS[2:3]))[0][0] ^= 1
        if not in_host:
            source.views = lambda refs: None
        outcomes = await store(tier, BLOCKS, source=source)
        assert [outcomes[at] for at in (0, 1, 3)] == [STORED] * 3
        assert isinstance(outcomes[2], Failed) and isinstance(outcomes[2].error, DamagedBlock)
        assert source.contains_nowait(KEYS) == tier.contains_nowait(KEYS) == {KEYS[0], KEYS[1], KEYS[3]}
        assert source.statistics().missed["damaged"] == 1
        assert (await load(tier, KEYS[3:]))[1] == [BLOCKS[KEYS[3]]]
        at_rest(tier)


async def test_where_all_are_damaged_nothing_is_copied():
    tier, source = memory(wrappers_of("zstd")), source_of(BLOCKS)
    for page in source.views(source.pool.slots(KEYS)):
        page[0] ^= 1
    assert all(isinstance(outcome, Failed) for outcome in await store(tier, BLOCKS, source=source))
    assert tier.contains_nowait(KEYS) == source.contains_nowait(KEYS) == set()
    at_rest(tier)


# --- whose a block is ----------------------------------------------------------------------------------------------


async def as_tenant(tier, tenant, doing, *args):
    end = tier.carry(KEYS, tenant)
    try:
        return await doing(tier, *args)
    finally:
        end()


@pytest.mark.parametrize("place", ["memory", "file"])
async def test_a_block_is_its_tenants(place, tmp_path):
    tier = make_tier(place, tmp_path, wrappers_of("zstd-aes"), 8, 64)
    assert await as_tenant(tier, "ann", store, BLOCKS) == [STORED] * 4
    assert await as_tenant(tier, "ann", load, KEYS) == ([LOADED] * 4, list(BLOCKS.values()))
    for other in ("bob", "", "stranger"):
        assert await as_tenant(tier, other, load, KEYS) == ([Missed("foreign")] * 4, [bytes(64)] * 4)
    assert await load(tier, KEYS) == ([Missed("foreign")] * 4, [bytes(64)] * 4)
    assert tier.contains_nowait(KEYS) == set(KEYS), "it stays: to its owner it is good"
    assert await as_tenant(tier, "ann", load, KEYS) == ([LOADED] * 4, list(BLOCKS.values()))
    assert tier.statistics().missed["foreign"] == tier.wrapper_statistics().missed["foreign"] == 16
    assert tier.wrapper_statistics().bad_tags == 0
    tier.close()


async def test_whoever_claims_anothers_key_at_the_same_time_gets_nothing():
    tier = memory(wrappers_of("aes"))
    await as_tenant(tier, "ann", store, BLOCKS)
    end = tier.carry(KEYS, "ann")
    async with await tier.pin(KEYS) as before:
        assert await as_tenant(tier, "bob", load, KEYS) == ([Missed("foreign")] * 4, [bytes(64)] * 4)
        end_other = tier.carry(KEYS, "bob")
        places = [bytearray(64) for _ in KEYS]
        assert list(await tier.load(before, PagesDestination.over(places))) == [LOADED] * 4, "she was there before"
        outcomes = await store(tier, blocks_of(1, name="new") | {KEYS[0]: BLOCKS[KEYS[0]]})
        end_other()
    assert outcomes[0] == STORED and isinstance(outcomes[1], Failed)
    assert (await load(tier, KEYS))[0] == [LOADED] * 4
    end()
    end()
    at_rest(tier)


async def test_a_tenant_without_a_secret_fails_alone():
    tier = memory(wrappers_of("aes", secrets={"ann": b"a" * 16}))
    end = tier.carry(KEYS[:2], "ann")
    outcomes = await store(tier, BLOCKS)
    end()
    assert outcomes[:2] == [STORED] * 2
    assert all(isinstance(outcome, Failed) and isinstance(outcome.error, UnknownTenant) for outcome in outcomes[2:])
    assert tier.contains_nowait(KEYS) == set(KEYS[:2])
    at_rest(tier)


async def test_a_secret_may_be_changed_while_blocks_are_there():
    secrets = {"ann": b"1" * 32}
    tier = memory(wrappers_of("aes", secrets=secrets))
    await as_tenant(tier, "ann", store, dict(list(BLOCKS.items())[:2]))
    secrets["ann"] = [b"2" * 32, b"1" * 32]
    await as_tenant(tier, "ann", store, BLOCKS)
    assert (await as_tenant(tier, "ann", load, KEYS))[0] == [LOADED] * 4
    secrets["ann"] = [b"2" * 32]
    assert (await as_tenant(tier, "ann", load, KEYS))[0] == [Missed("secret")] * 2 + [LOADED] * 2
    assert tier.contains_nowait(KEYS) == set(KEYS[2:]), "what nobody can read makes room for what can be read"
    assert await as_tenant(tier, "ann", store, BLOCKS) == [STORED] * 2 + [DUPLICATE] * 2
    assert await as_tenant(tier, "ann", load, KEYS) == ([LOADED] * 4, list(BLOCKS.values()))


async def test_one_who_must_know_below_is_told_too():
    below = memory(wrappers_of("aes"), block_bytes=200)
    tier = wrap(below, Zstd(), block_bytes=64)
    assert await as_tenant(tier, "ann", store, BLOCKS) == [STORED] * 4
    assert (await as_tenant(tier, "ann", load, KEYS))[0] == [LOADED] * 4
    assert (await as_tenant(tier, "bob", load, KEYS))[0] == [Missed("foreign")] * 4
    assert not len(tier._tags) and not len(below._tags)


async def test_blocks_of_two_chains_do_not_meet_in_one_place():
    inner = MemoryTier(16 * 200, 200)
    first, second = wrap(inner, Zstd(), block_bytes=64), wrap(inner, AesGcm(SECRETS), block_bytes=64)
    await store(first, BLOCKS)
    assert second.contains_nowait(KEYS) == inner.contains_nowait(KEYS) == set()
    assert await store(second, BLOCKS) == [STORED] * 4
    assert await load(first, KEYS) == await load(second, KEYS) == ([LOADED] * 4, list(BLOCKS.values()))
    assert await first.delete(KEYS[:1]) == [Deletion.DELETED]
    assert second.contains_nowait(KEYS) == set(KEYS)


# --- what is counted ------------------------------------------------------------------------------------------------


async def test_what_it_gains_is_counted():
    tier = memory(wrappers_of("zstd"), block_bytes=4096)
    blocks = {key: bytes(4096) for key in KEYS[:2]} | {key: os.urandom(4096) for key in KEYS[2:]}
    await store(tier, blocks)
    await load(tier, KEYS)
    statistics = tier.wrapper_statistics()
    assert (statistics.encoded, statistics.decoded, statistics.plain_bytes) == (4, 4, 4 * 4096)
    assert 2 * 4096 < statistics.stored_bytes == statistics.read_bytes < 2.1 * 4096
    assert statistics.ratio == statistics.stored_bytes / (4 * 4096)
    assert (statistics.missed, statistics.bad_tags) == ({}, 0)
    assert memory(wrappers_of("zstd")).wrapper_statistics().ratio == 1.0
    below = tier.statistics()
    assert (below.stored, below.loaded, below.blocks) == (4, 4, 4)
    assert below.used_bytes == 4 * tier.slot_bytes, "fixed slots: no room is gained"


@pytest.mark.parametrize("name", NAMES)
async def test_memory_between_is_bounded_and_used_again(name):
    async with keep_threads():
        tier = memory(wrappers_of(name), blocks=64)
        for number in range(8):
            assert await store(tier, blocks_of(8, name=f"{number}-")) == [STORED] * 8
            assert (await load(tier, list(blocks_of(8, name=f"{number}-"))))[0] == [LOADED] * 8
        assert tier.wrapper_statistics().staging == 1


async def test_it_can_be_entered_and_closed_as_the_tier_below():
    events = []

    class Inner(FakeTier):
        async def __aenter__(self):
            events.append("enter")
            return self

        async def __aexit__(self, kind, error, trace):
            events.append("exit" if error is None else f"exit with {error!r}")

        def close(self):
            events.append("close")

    tier = wrap(Inner(8, slot_bytes(64, Zstd())), Zstd(), block_bytes=64)
    async with tier as same, tier:
        assert same is tier
    tier.close()
    assert events == ["enter", "enter", "exit", "exit", "close"]
    events.clear()
    with pytest.raises(KeyError):
        async with tier:
            raise KeyError("mine")
    assert events == ["enter", "exit with KeyError('mine')"], "who fails need not wait for others"


# --- any bytes -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    size=st.integers(1, 700),
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    in_host=st.booleans(),
)
def test_blocks_of_any_size_and_any_bytes_come_back(name, size, seed, share, in_host):
    size = size if name in EXACT else 4 * size
    dice = random.Random(seed)
    noise = round(share * size)
    blocks = {key: dice.randbytes(noise) + bytes(size - noise) for key in KEYS}
    wrappers = wrappers_of(name)
    tier = memory(wrappers, block_bytes=size)

    async def there_and_back():
        source = source_of(blocks)
        if not in_host:
            source.views = lambda refs: None
        assert await store(tier, blocks, source=source) == [STORED] * 4
        assert await load(tier, KEYS) == ([LOADED] * 4, [oracle(wrappers, block) for block in blocks.values()])

    trio.run(there_and_back)
    at_rest(tier)
