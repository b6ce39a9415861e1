"""What passes through host memory on its way, when the end of its copy cannot be proven: that memory is not given back."""

import gc
import weakref

import pytest

from backends import Unproven
from backends.abc import STORED, Destination, RoomRequest, Source
from backends.base.pages import copy_pages, new_pages
from backends.base.slots import SlotTier
from backends.file import FileTier
from backends.testing import payload_of
from maru.exception_groups import holds
from tests.support.damaged_places import DESTINATIONS, fill, opened
from tests.support.damaged_places import SIZE as SMALL

SIZE = 1 << 20
KEYS = [b"a", b"b"]


class Aside:
    """Slots that are not in host memory, as far as anybody is told."""

    block_bytes = SIZE

    def __init__(self):
        self.memory = new_pages(4, SIZE)
        self.used = None

    def pages(self, slots):
        return None

    def copy_out(self, slots, pages):
        self.meet(pages)
        copy_pages(pages, self.of(slots))

    def copy_in(self, slots, pages):
        self.meet(pages)
        copy_pages(self.of(slots), pages)

    def of(self, slots):
        first = slots[0]
        assert list(slots) == list(range(first, first + len(slots)))
        return self.memory.part(first, first + len(slots))

    def meet(self, pages):
        if self.used is not None:
            self.used += pages.addresses
            raise Unproven("it may still go on")


class Place(Destination, Source):
    """A source and a destination that begins a copy, and does not know its end."""

    block_bytes = SIZE

    def __init__(self, grouped=False):
        self.unproven = False
        self.grouped = grouped
        self.used = []

    def __len__(self):
        return len(KEYS)

    def upgrade(self, keys):
        return list(range(len(keys)))

    def release(self, refs):
        pass

    def views(self, refs=()):
        return None

    def copy_out(self, refs, pages):
        self.meet(pages)
        for ref, page in zip(refs, pages, strict=True):
            page[:] = payload_of(KEYS[ref], SIZE)

    def copy_in(self, start, pages):
        self.meet(pages)

    def meet(self, pages):
        if self.unproven:
            self.used += pages.addresses
            error = Unproven("it may still go on")
            raise ExceptionGroup("of a nursery", [error]) if self.grouped else error


def mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= address < end for start, end in spans)


@pytest.fixture(params=["slots", "file"])
async def tier(request, tmp_path):
    tier = SlotTier(4, Aside()) if request.param == "slots" else FileTier(tmp_path / "kv", 4 * SIZE)
    try:
        yield tier
    finally:
        if request.param == "file":
            tier.close()


async def store(tier, place):
    reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "fail"))
    try:
        return list(await reservation.transfer(place, place.upgrade(KEYS)))
    finally:
        reservation.release()


async def load(tier, place):
    async with await tier.pin(KEYS) as lease:
        await tier.load(lease, place)


async def unproven(call, *arguments):
    with pytest.raises((Unproven, ExceptionGroup)) as caught:
        await call(*arguments)
    assert holds(caught.value, Unproven)
    del caught
    gc.collect()


@pytest.fixture(params=[False, True], ids=["alone", "in a group"])
def grouped(request):
    return request.param


async def test_what_a_source_may_still_write_to_stays(tier, grouped):
    place = Place(grouped)
    place.unproven = True
    await unproven(store, tier, place)
    assert len(place.used) == 2
    assert all(map(mapped, place.used))


async def test_what_a_destination_may_still_read_stays(tier, grouped):
    place = Place(grouped)
    assert await store(tier, place) == [STORED] * 2
    place.unproven = True
    await unproven(load, tier, place)
    assert len(place.used) == 2
    assert all(map(mapped, place.used))


@pytest.mark.parametrize("kind", DESTINATIONS)
async def test_a_load_without_a_proven_end_is_no_failed_load(kind, grouped, tmp_path):
    place = Small(grouped)
    async with opened(kind, tmp_path) as tier:
        await fill(tier, KEYS)
        place.unproven = True
        await unproven(load, tier, place)
        place.unproven = False
        await load(tier, place)


class Small(Place):
    block_bytes = SMALL


@pytest.mark.parametrize("call", [store, load])
async def test_what_a_storage_may_still_use_stays(call):
    storage = Aside()
    tier, place = SlotTier(4, storage), Place()
    if call is load:
        await store(tier, place)
    storage.used = []
    await unproven(call, tier, place)
    assert len(storage.used) == 2
    assert all(map(mapped, storage.used))


async def test_what_a_copy_was_over_with_is_given_back(tier):
    place = Place()
    owners = []
    place.meet = lambda pages: owners.append(weakref.ref(pages.owner))
    await store(tier, place)
    gc.collect()
    assert [owner() for owner in owners] == [None]
