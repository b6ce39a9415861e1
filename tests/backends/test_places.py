"""Places of a load that make no sense are refused before a byte is copied: nothing good is called damaged for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends import RepeatedPlaces
from backends.abc import LOADED, BlockSizeError, Destination
from backends.base.pages import Pages, pages_of
from backends.base.slots import PagesDestination
from backends.device import DeviceTier
from backends.memory import MemoryTier
from backends.testing import FakeTier
from offload import from_thread, open_engine
from tests.support.damaged_places import DESTINATIONS, SIZE, fill, opened, payload

KEYS = [b"key %d" % number for number in range(4)]


class Places(Destination):
    """A destination as somebody else would write it: it checks nothing."""

    block_bytes = SIZE

    def __init__(self, buffers, block_bytes=SIZE, in_host=True):
        self.pages = pages_of(buffers)
        self.block_bytes = block_bytes
        self.in_host = in_host

    def __len__(self):
        return len(self.pages)

    def views(self):
        return self.pages if self.in_host else None

    def copy_in(self, start, pages):
        for at, page in enumerate(pages, start):
            self.pages[at][:] = page


def repeated():
    page = bytearray(SIZE)
    return Places([page, bytearray(SIZE), page, page])


def overlapping():
    memory = bytearray(2 * SIZE)
    views = [memoryview(memory)[at : at + SIZE] for at in (0, SIZE, SIZE // 2)]
    return Places([*views, bytearray(SIZE)])


@pytest.mark.parametrize("places", [repeated, overlapping])
@pytest.mark.parametrize("kind", DESTINATIONS)
async def test_a_load_into_places_that_share_memory_is_refused_and_nothing_is_lost(kind, places, tmp_path):
    async with opened(kind, tmp_path) as tier:
        await fill(tier, KEYS)
        async with await tier.pin(KEYS) as lease:
            with pytest.raises(RepeatedPlaces, match=r"places 0 and 2|places 2 and 1"):
                await tier.load(lease, places())
            buffers = [bytearray(SIZE) for _ in KEYS]
            assert list(await tier.load(lease, PagesDestination.over(buffers))) == [LOADED] * 4
        assert buffers == [payload(key) for key in KEYS]
        statistics = tier.statistics()
        assert sum(statistics.missed.values()) == 0 and statistics.held_blocks == 0


@pytest.mark.parametrize("kind", DESTINATIONS)
async def test_a_load_into_too_few_places_or_smaller_ones_is_refused(kind, tmp_path):
    async with opened(kind, tmp_path) as tier:
        await fill(tier, KEYS)
        async with await tier.pin(KEYS) as lease:
            with pytest.raises(ValueError, match="4 blocks do not fit into 2 places"):
                await tier.load(lease, Places([bytearray(SIZE)] * 2))
            if "file" not in kind or "wrapped" in kind:  # a file knows how large it is itself
                with pytest.raises(BlockSizeError):
                    await tier.load(lease, Places([bytearray(8) for _ in KEYS], 8))


async def test_an_engine_refuses_them_over_all_its_tiers():
    source = FakeTier(8, SIZE)
    first, second = FakeTier(8, SIZE), FakeTier(8, SIZE)
    first.fill(KEYS[:2])
    second.fill(KEYS[2:])
    async with open_engine(source, {"a": first, "b": second}) as engine, await engine.lookup(KEYS) as hit:
        assert [blocks for _, blocks in hit.runs] == [2, 2]  # no tier sees the places of both
        with pytest.raises(RepeatedPlaces):
            await engine.load(hit, repeated())
        result = await engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in KEYS]))
        assert result.loaded == 4


def test_an_engine_in_a_thread_refuses_them():
    source, tier = FakeTier(8, SIZE), FakeTier(8, SIZE)
    tier.fill(KEYS)
    with (
        from_thread.open_engine(source, {"a": tier}) as engine,
        engine.lookup(KEYS) as hit,
        pytest.raises(RepeatedPlaces),
    ):
        engine.load(hit, repeated())


def test_pages_that_share_memory_are_no_destination():
    page = bytearray(SIZE)
    with pytest.raises(RepeatedPlaces, match="places 0 and 1 share memory"):
        PagesDestination.over([page, page])
    with pytest.raises(RepeatedPlaces):
        PagesDestination(Pages(range(4096, 4096 + 4 * 32, 32), SIZE, None))
    assert len(PagesDestination.over([memoryview(page)[:32], memoryview(page)[32:]])) == 2
    assert len(PagesDestination.over([bytearray(0), bytearray(0)])) == 2
    assert len(PagesDestination.over([])) == 0


@pytest.mark.parametrize(
    "one", [bytearray(SIZE), memoryview(bytearray(SIZE)), np.zeros(SIZE, np.uint8), "text", b"bytes"]
)
def test_one_buffer_in_place_of_a_list_is_a_type_error(one):
    with pytest.raises(TypeError, match="a list of buffers, one for each block"):
        PagesDestination.over(one)


@pytest.mark.parametrize("buffers", [[np.zeros(SIZE, np.uint8), 3], [{}], [None]])
def test_what_is_no_buffer_is_named(buffers):
    with pytest.raises(TypeError, match=r"buffers\[\d\] is .*, not a writable buffer"):
        PagesDestination.over(buffers)


def test_rows_of_an_array_are_buffers():
    array = np.zeros((3, SIZE), np.uint8)
    assert len(PagesDestination.over(array)) == len(PagesDestination.over(list(array))) == 3


# --- tensors ------------------------------------------------------------------------------------------------------


def test_a_tensor_in_place_of_a_list_is_a_type_error():
    tensor = torch.zeros(2, 8, 4, 16)
    with pytest.raises(TypeError, match=r"layers is one tensor.*\[tensor\]"):
        DeviceTier(tensor, block_axis=2)
    assert DeviceTier([tensor], block_axis=2).n == 4


@pytest.mark.parametrize("array", [np.zeros((4, 8)), memoryview(bytearray(8)), "text", 5, None])
def test_what_is_no_tensor_is_a_type_error_that_says_which(array):
    with pytest.raises(TypeError, match=r"layers\[1\] is .*, not a torch.Tensor"):
        DeviceTier([torch.zeros(4, 8), array])


@pytest.mark.parametrize("layers", [np.zeros((4, 8)), "text", 5, None])
def test_what_is_no_list_of_tensors_is_a_type_error(layers):
    with pytest.raises(TypeError, match="layers"):
        DeviceTier(layers)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"block_axis": [0]}, ValueError, "block_axis names 1 axes, but there are 2 tensors"),
        ({"block_axis": "0"}, TypeError, "block_axis"),
        ({"block_axis": [0, 0.5]}, TypeError, "block_axis"),
        ({"pool": [0, 1]}, TypeError, "pool is .*, but must be a range"),
        ({"pool": 4}, TypeError, "pool is 4, but must be a range"),
    ],
)
def test_what_is_said_of_the_tensors_must_make_sense(options, error, text):
    with pytest.raises(error, match=text):
        DeviceTier([torch.zeros(4, 8), torch.zeros(4, 8)], **options)


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), np.array([1, 2]), range(1, 3), (1, 2)])
def test_block_numbers_may_come_in_any_column(ids):
    tier = DeviceTier([torch.zeros(4, 8)])
    assert tier.external(ids, [b"a", b"b"]).refs == [1, 2]
    assert len(tier.into(ids)) == 2


@pytest.mark.parametrize("ids", [[0.0], ["0"], [None], 0])
def test_block_numbers_that_are_none_are_type_errors(ids):
    tier = DeviceTier([torch.zeros(4, 8)])
    for take in (lambda: tier.external(ids, [b"a"]), lambda: tier.into(ids)):
        with pytest.raises(TypeError):
            take()
    with pytest.raises(TypeError):
        MemoryTier(8, 8).external(ids, [b"a"])


def test_a_block_that_is_to_be_loaded_into_twice_is_named():
    with pytest.raises(RepeatedPlaces, match="places 0 and 2"):
        DeviceTier([torch.zeros(4, 8)]).into([1, 2, 1])


def test_tensors_in_host_memory_are_places_and_others_are_not() -> None:
    rows = torch.zeros((2, 4), dtype=torch.bfloat16)
    destination = PagesDestination.over(rows)
    assert (destination.block_bytes, len(destination)) == (8, 2)
    for page in destination.views():
        page[:] = b"\x80\x3f" * 4
    assert rows.tolist() == [[1.0] * 4] * 2
    with pytest.raises(ValueError, match="must be contiguous host memory"):
        PagesDestination.over([torch.zeros((2, 4)).t()])
    with pytest.raises(ValueError, match="on meta"):
        PagesDestination.over([torch.zeros(4, device="meta")])
    with pytest.raises(TypeError, match="a list of buffers"):
        PagesDestination.over(torch.zeros(4))
