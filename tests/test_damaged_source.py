"""A block that is damaged where it lies is not copied elsewhere, where a checksum of its own would have it believed."""

import pytest

from backends import DamagedBlock
from backends.abc import STORED, Failed
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import FakeTier, payload_of

SIZE = 64
KEYS = [b"k%d" % number for number in range(4)]


@pytest.fixture(params=["memory", "memory in a thread", "file"])
def destination(request, tmp_path):
    if request.param == "file":
        return FileTier(tmp_path, 16 * SIZE)
    tier = MemoryTier(16 * SIZE, SIZE)
    if request.param.endswith("thread"):
        tier.inline_bytes = -1
    return tier


def source_of(*damaged, **options):
    source = FakeTier(8, SIZE, **options)
    source.fill(KEYS)
    for key in damaged:
        source.damage(key)
    return source


async def transferred(source, destination, keys=KEYS, guards=None):
    reservation = await destination.reserve(keys, SIZE, "wait")
    held = source.upgrade(keys) if guards is None else guards
    outcomes = await reservation.transfer(source, held)
    if guards is None:
        source.release(held)
    reservation.release()
    return outcomes


async def test_a_damaged_block_fails_alone_and_is_no_longer_found(destination):
    source = source_of(KEYS[2])
    outcomes = await transferred(source, destination)
    assert [outcomes[at] for at in (0, 1, 3)] == [STORED] * 3
    assert isinstance(outcomes[2], Failed)
    assert isinstance(outcomes[2].error, DamagedBlock)
    assert outcomes[2].error.key == KEYS[2]
    assert destination.contains(KEYS) == {KEYS[0], KEYS[1], KEYS[3]}
    assert source.contains(KEYS) == {KEYS[0], KEYS[1], KEYS[3]}
    assert source.statistics().missed["damaged"] == 1
    assert source.pool.statistics().held == source.pool.statistics().staged == 0
    assert destination.statistics().reserved_blocks == 0


async def test_one_that_was_found_damaged_while_it_was_held_is_not_copied_either(destination):
    source = source_of(KEYS[0])
    guards = source.upgrade(KEYS)
    assert source.get(KEYS[0]) is None  # found, and still held
    outcomes = await transferred(source, destination, guards=guards)
    assert isinstance(outcomes[0], Failed)
    source.release(guards)
    assert destination.contains(KEYS) == set(KEYS[1:])


async def test_what_an_engine_writes_into_slots_of_its_own_has_no_checksum_to_be_compared_with(destination):
    source = source_of()
    source.pool.delete(KEYS)
    slots = source.stage(2)  # their checksums are those of the blocks that were there before
    for page, key in zip(source.views(slots), (b"new", b"newer"), strict=True):
        page[:] = payload_of(key, SIZE)
    assert list(await transferred(source, destination, [b"new", b"newer"], slots)) == [STORED] * 2
    source.unstage(slots)


async def test_without_checksums_nothing_is_compared(destination):
    source = source_of(KEYS[0], checksums=False)
    assert list(await transferred(source, destination)) == [STORED] * 4
