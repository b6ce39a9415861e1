"""A block that is damaged where it lies is not copied elsewhere, where a checksum of its own would have it believed."""

from contextlib import AsyncExitStack

import pytest

from backends import DamagedBlock, UnreadableBlock
from backends.abc import LOADED, STORED, Failed, RoomRequest
from backends.base.slots import PagesDestination
from backends.testing import FakeTier, payload_of
from offload import with_breaker
from tests.support.damaged_places import DESTINATIONS, SIZE, SOURCES, fill, flip, opened, payload, store

KEYS = [b"key %d" % number for number in range(4)]


async def contained(tier, keys=KEYS):
    return await tier.contains(keys)


async def loaded(tier, keys):
    buffers = [bytearray(SIZE) for _ in keys]
    async with await tier.pin(keys) as lease:
        outcomes = await tier.load(lease, PagesDestination.over(buffers))
    assert outcomes == [LOADED] * len(keys)
    return buffers


@pytest.mark.parametrize("destination", DESTINATIONS)
async def test_a_damaged_block_fails_alone_whatever_it_comes_from_and_goes_to(destination, tmp_path):
    bad = KEYS[2]
    good = [key for key in KEYS if key != bad]
    for at, kind in enumerate(SOURCES):
        async with opened(kind, tmp_path / f"from {at}") as source, opened(destination, tmp_path / f"to {at}") as tier:
            await fill(source, KEYS)
            flip(source, bad)
            outcomes = await store(tier, source, KEYS)
            assert [outcomes[at] for at in (0, 1, 3)] == [STORED] * 3, (kind, outcomes)
            assert isinstance(outcomes[2], Failed), (kind, outcomes)
            assert isinstance(outcomes[2].error, DamagedBlock), (kind, outcomes)
            assert outcomes[2].error.key == bad
            assert await contained(tier) == set(good)
            assert await loaded(tier, good) == [payload(key) for key in good]
            assert await contained(source) == set(good)
            assert sum(source.statistics().missed.values()) == 1
            for place in (source, tier):
                assert (place.statistics().held_blocks, place.statistics().reserved_blocks) == (0, 0)
            await fill(source, [bad])  # what was forgotten can be stored anew, there and here
            assert await store(tier, source, [bad]) == [STORED]
            assert await loaded(tier, [bad]) == [payload(bad)]


def source_of(*damaged, **options):
    source = FakeTier(8, SIZE, **options)
    source.fill(KEYS)
    for key in damaged:
        source.damage(key)
    return source


@pytest.mark.parametrize("between", ["nothing", "a breaker", "a breaker before each"])
async def test_whoever_stands_between_passes_on_what_the_source_knows(between):
    source, destination = source_of(KEYS[2]), FakeTier(8, SIZE)
    first = source if between == "nothing" else with_breaker(source, "source")
    last = with_breaker(destination, "destination") if between == "a breaker before each" else destination
    outcomes = await store(last, first, KEYS)
    assert [type(outcome) for outcome in outcomes] == [type(STORED), type(STORED), Failed, type(STORED)]
    assert source.contains_nowait(KEYS) == {KEYS[0], KEYS[1], KEYS[3]} == destination.contains_nowait(KEYS)


@pytest.mark.parametrize("destination", DESTINATIONS)
async def test_one_that_was_found_damaged_while_it_was_held_is_not_copied_either(destination, tmp_path):
    source = source_of(KEYS[0])
    refs = source.upgrade(KEYS)
    assert source.get(KEYS[0]) is None  # found, and still held
    async with opened(destination, tmp_path) as tier:
        reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "wait"))
        outcomes = await reservation.transfer(source, refs)
        reservation.release()
        assert isinstance(outcomes[0], Failed)
        source.release(refs)
        assert await contained(tier) == set(KEYS[1:])


@pytest.mark.parametrize("destination", DESTINATIONS)
async def test_nothing_at_all_is_stored_of_a_batch_that_is_all_damaged(destination, tmp_path):
    async with opened(destination, tmp_path) as tier:
        outcomes = await store(tier, source_of(*KEYS), KEYS)
        assert [type(outcome) for outcome in outcomes] == [Failed] * len(KEYS)
        assert not await contained(tier)
        assert tier.statistics().reserved_blocks == 0
        assert await store(tier, source_of(), KEYS) == [STORED] * len(KEYS)


@pytest.mark.parametrize("destination", DESTINATIONS)
async def test_what_an_engine_writes_into_slots_of_its_own_has_no_checksum_to_be_compared_with(destination, tmp_path):
    source = source_of()
    source.pool.delete(KEYS)
    slots = source.stage(2)  # their checksums are those of the blocks that were there before
    for page, key in zip(source.views(slots), (b"new", b"newer"), strict=True):
        page[:] = payload_of(key, SIZE)
    async with opened(destination, tmp_path) as tier, AsyncExitStack() as stack:
        reservation = await tier.reserve(RoomRequest([b"new", b"newer"], SIZE, "fail"))
        stack.callback(reservation.release)
        assert list(await reservation.transfer(source, slots)) == [STORED] * 2
    source.unstage(slots)


async def test_a_source_without_checksums_knows_nothing_to_compare_with(tmp_path):
    async with opened("memory", tmp_path) as tier:
        assert await store(tier, source_of(KEYS[0], checksums=False), KEYS) == [STORED] * 4


class OnDevice(FakeTier):
    """Blocks outside of host memory, one of which cannot be read now."""

    unreadable = KEYS[2]

    def views(self, refs):
        return None

    def copy_out(self, refs, pages):
        if self.unreadable is not None and self.upgrade([self.unreadable])[0] in refs:
            raise UnreadableBlock("the device is busy")
        super().copy_out(refs, pages)


@pytest.mark.parametrize("destination", DESTINATIONS)
async def test_an_unreadable_block_fails_alone_and_stays_where_it_is(destination, tmp_path):
    source = OnDevice(8, SIZE)
    await fill(source, KEYS)
    async with opened(destination, tmp_path) as tier:
        outcomes = await store(tier, source, KEYS)
        assert [outcomes[at] for at in (0, 1, 3)] == [STORED] * 3
        assert isinstance(outcomes[2], Failed) and isinstance(outcomes[2].error, UnreadableBlock)
        source.unreadable = None
        assert await store(tier, source, [KEYS[2]]) == [STORED]
        assert await loaded(tier, KEYS) == [payload(key) for key in KEYS]
