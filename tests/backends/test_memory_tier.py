"""Host memory as a tier, and the pages and slots under it."""

import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import trio
import trio.testing

from backends import BlockSizeError, CapacityError, DuplicateKeys, MissingKeys, PlaceClosed
from backends.abc import (
    DUPLICATE,
    EVICTED,
    LOADED,
    STORED,
    Deletion,
    Destination,
    Missed,
    Rejected,
    RoomRequest,
    Source,
    Tier,
)
from backends.base.pages import checksums, copy_and_sum, copy_pages, new_pages, pages_of
from backends.base.slots import PORTION_BYTES, PagesDestination
from backends.base.threads import keep_threads
from backends.memory import HostPages, MemoryTier
from backends.testing import check_tier, payload_of
from maru.base.memory.cuda import find_driver
from maru.base.memory.huge_pages import why_no_huge_pages
from maru.base.memory.pinning import spans
from maru.eviction import LRU
from maru.fake_cuda import FakeCuda
from tests.support.cuda_process import process_with_cuda

SIZE = 4096
KEYS = [b"key %d" % number for number in range(8)]


def tier_of(n=8, **options):
    return MemoryTier(n * SIZE, SIZE, **options)


@pytest.fixture
def tier():
    tier = tier_of()
    for key in KEYS:
        assert tier.put(key, payload_of(key, SIZE))
    return tier


def damage(tier, key):
    tier.views(tier.pool.slots([key]))[0][-1] ^= 0x80


class InThreads(MemoryTier):
    inline_bytes = -1


@pytest.mark.parametrize("make", [MemoryTier, InThreads])
@pytest.mark.parametrize("block_bytes", [1, 256])
async def test_memory_keeps_the_contract_of_a_tier(make, block_bytes):
    async with keep_threads():
        await check_tier(lambda n, size: make(n * size, size), block_bytes=block_bytes, damage=damage)


def test_it_is_a_source_and_a_tier():
    tier: Tier = tier_of()
    source: Source = tier_of()
    destination: Destination = PagesDestination.over([])
    assert isinstance(source, Source)
    assert tier.statistics().capacity_bytes == 8 * SIZE
    assert len(destination) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity_bytes": 10, "block_bytes": 0}, "block_bytes is 0, but must be at least 1"),
        (
            {"capacity_bytes": 10, "block_bytes": 11},
            "capacity_bytes is 10, but must be at least block_bytes, which is 11",
        ),
        ({"capacity_bytes": -1, "block_bytes": 1}, "capacity_bytes is -1"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused_by_name_value_and_bound(options, says):
    with pytest.raises(ValueError, match=says):
        MemoryTier(**options)


def test_what_is_left_over_behind_the_last_block_is_not_used():
    tier = MemoryTier(3 * SIZE + 17, SIZE)
    assert (tier.free, tier.statistics().capacity_bytes) == (3, 3 * SIZE)


def test_an_engine_registers_what_it_wrote_and_finds_it_again(tier):
    assert not tier.put(KEYS[0], bytes(SIZE))  # first writer wins
    assert tier.get(KEYS[0]) == payload_of(KEYS[0], SIZE)
    assert tier.get(b"no such key") is None
    statistics = tier.statistics()
    assert (statistics.stored, statistics.duplicates, statistics.loaded, statistics.missed["gone"]) == (8, 1, 1, 1)


def test_put_evicts_the_least_recently_used_block_that_nobody_holds(tier):
    refs = tier.upgrade(KEYS[:1])
    tier.get(KEYS[1])
    assert tier.put(b"new", memoryview(payload_of(b"new", SIZE)))
    assert tier.contains_nowait([*KEYS, b"new"]) == {*KEYS, b"new"} - {KEYS[2]}
    tier.release(refs)


def test_put_says_when_every_block_is_held(tier):
    refs = tier.upgrade(KEYS)
    with pytest.raises(CapacityError, match="all blocks are held"):
        tier.put(b"new", bytes(SIZE))
    tier.release(refs)
    assert tier.put(b"new", bytes(SIZE))


def test_put_of_another_size_names_both_sizes(tier):
    with pytest.raises(BlockSizeError, match="4096 bytes, not of 5") as info:
        tier.put(b"new", b"short")
    assert (info.value.expected_bytes, info.value.got_bytes) == (SIZE, 5)


def test_a_damaged_block_is_not_given_out(tier):
    damage(tier, KEYS[3])
    assert tier.get(KEYS[3]) is None
    assert tier.contains_nowait(KEYS) == set(KEYS) - {KEYS[3]}
    assert tier.statistics().missed == {"gone": 0, "damaged": 1}
    assert tier.put(KEYS[3], payload_of(KEYS[3], SIZE))


def test_without_checksums_nothing_is_verified():
    tier = tier_of(checksums=False)
    tier.put(KEYS[0], payload_of(KEYS[0], SIZE))
    damage(tier, KEYS[0])
    assert tier.get(KEYS[0]) != payload_of(KEYS[0], SIZE)


def test_strong_blocks_hold_all_or_nothing(tier):
    blocks = tier.strong(KEYS[:2])
    assert tier.statistics().held_blocks == 2
    with pytest.raises(MissingKeys, match="does not have 1 of the keys: 6e6f") as info:
        tier.strong([KEYS[2], b"no"])
    assert info.value.keys == [b"no"]
    with pytest.raises(DuplicateKeys):
        tier.strong([KEYS[2], KEYS[2]])
    assert tier.statistics().held_blocks == 2
    blocks.release()
    blocks.release()
    assert tier.statistics().held_blocks == 0


def test_weak_blocks_hold_nothing(tier):
    assert tier.weak([KEYS[0], b"no"]).refs is None
    assert tier.statistics().held_blocks == 0


async def test_an_engine_writes_into_staged_slots_itself():
    tier = tier_of()
    slots = tier.stage(3)
    assert tier.statistics().reserved_blocks == 3
    for slot, page in zip(slots, tier.views(slots), strict=True):
        page[:] = payload_of(KEYS[slot], SIZE)
    blocks = tier.external(slots[:2], KEYS[:2])
    assert blocks.refs == slots[:2]
    assert tier.register(slots[:2], [KEYS[0], KEYS[0]]) == [STORED, DUPLICATE]
    tier.unstage(slots[2:])
    assert tier.free == 7
    assert tier.get(KEYS[0]) == payload_of(KEYS[0], SIZE)
    for wrong in (slots[:1], [7]):
        with pytest.raises(ValueError, match="not all of these slots are staged"):
            tier.register(wrong, KEYS[:1])
        with pytest.raises(ValueError, match="not all of these slots are staged"):
            tier.unstage(wrong)


def test_staging_evicts_and_says_when_it_cannot(tier):
    blocks = tier.strong(KEYS[:6])
    with pytest.raises(CapacityError):
        tier.stage(3)
    with pytest.raises(CapacityError):
        tier.stage(9)
    assert len(tier.stage(2)) == 2
    assert tier.contains_nowait(KEYS) == set(KEYS[:6])
    blocks.release()


def test_an_external_block_that_does_not_exist_is_refused(tier):
    for ids in ([8], [-1, 0]):
        with pytest.raises(ValueError, match=f"has no block {ids[0]}"):
            tier.external(ids, KEYS[: len(ids)])


async def transfer(source, tier, keys):
    refs = source.upgrade(keys)
    reservation = await tier.reserve(RoomRequest(keys, source.block_bytes, "wait"))
    try:
        return await reservation.transfer(source, refs)
    finally:
        source.release(refs)
        reservation.release()


async def test_a_small_copy_is_made_in_place_and_a_large_one_in_a_thread(monkeypatch):
    used = []
    real = copy_and_sum

    def spy(destination, source):
        used.append(threading.current_thread() is threading.main_thread())
        return real(destination, source)

    monkeypatch.setattr("backends.base.copying.copy_and_sum", spy)
    monkeypatch.setattr("backends.base.in_place.copy_and_sum", spy)
    for size in (PORTION_BYTES, PORTION_BYTES + 8):
        source, tier = MemoryTier(size, size), MemoryTier(size, size)
        source.put(b"a", bytes(size))
        assert await transfer(source, tier, [b"a"]) == [STORED]
    assert used == [True, False]


async def test_bytes_survive_scattered_slots_in_both_places():
    source, tier = tier_of(64), tier_of(64)
    keys = [b"%d" % number for number in range(64)]
    for key in keys:
        source.put(key, payload_of(key, SIZE))
    await tier.delete(keys)
    scattered = [*keys[::3], *keys[1::3], *keys[2::3]]
    holes = tier.stage(64)
    tier.unstage(holes[::2])
    assert await transfer(source, tier, scattered[:32]) == [STORED] * 32
    buffers = [bytearray(SIZE) for _ in range(32)]
    async with await tier.pin(scattered[:32]) as lease:
        assert await tier.load(lease, PagesDestination.over(buffers)) == [LOADED] * 32
    assert buffers == [payload_of(key, SIZE) for key in scattered[:32]]


class Gated(MemoryTier):
    """A source whose copies wait for a gate, each in its thread."""

    started, gate = None, None

    def views(self, refs):
        return None

    def copy_out(self, refs, pages):
        self.started.set()
        self.gate.wait()
        super().copy_out(refs, pages)


async def test_a_key_registered_while_its_copy_runs_is_a_duplicate(tier):
    source = Gated(SIZE, SIZE)
    source.started, source.gate = threading.Event(), threading.Event()
    source.put(b"new", bytes(SIZE))
    await tier.delete(KEYS[:2])
    reservation = await tier.reserve(RoomRequest([b"new"], SIZE, "wait"))
    outcomes = []

    async def copy():
        outcomes.extend(await reservation.transfer(source, [0]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy)
        await trio.to_thread.run_sync(source.started.wait)
        tier.put(b"new", b"x" * SIZE)
        source.gate.set()
    assert outcomes == [DUPLICATE]
    assert (tier.free, tier.get(b"new")) == (1, b"x" * SIZE)


class Refuses:
    """A policy that evicts nothing and takes nothing in that begins with a dash."""

    def use(self, keys):
        self.known = [*getattr(self, "known", []), *keys]

    def make_room(self, incoming, n, held):
        rejected = [key for key in incoming if key.startswith(b"-")][:n]
        victims = [self.known.pop(0) for _ in range(n - len(rejected))]
        return victims, rejected

    def discard(self, keys):
        self.known = [key for key in self.known if key not in keys]


async def test_what_the_eviction_policy_rejects_is_not_copied_and_said_so(tier):
    small = tier_of(2, eviction=Refuses())
    for key in KEYS[:2]:
        small.put(key, payload_of(key, SIZE))
    for key in (b"-no", b"-nor", b"yes"):
        tier.put(key, payload_of(key, SIZE))
    refs = tier.upgrade([b"-no", b"yes"])
    reservation = await small.reserve(RoomRequest([b"-no", b"yes"], SIZE, "evict"))
    assert await reservation.transfer(tier, refs) == [Rejected("not admitted"), STORED]
    reservation.release()
    tier.release(refs)
    assert small.get(b"yes") == payload_of(b"yes", SIZE)
    assert len(small) == 2
    with pytest.raises(CapacityError, match="not admitted"):
        small.put(b"-nor", payload_of(b"-nor", SIZE))
    with pytest.raises(CapacityError):
        tier_of(0 + 1, eviction=Refuses()).stage(2)
    assert small.statistics().reserved_blocks == 0


async def test_a_reservation_is_used_once_and_with_a_ref_for_each_key(tier):
    other = tier_of()
    reservation = await other.reserve(RoomRequest(KEYS[:2], SIZE, "wait"))
    with pytest.raises(ValueError, match="one ref per kept block"):
        await reservation.transfer(tier, [0])
    with pytest.raises(ValueError, match="1 keys to keep, of which 0 were granted"):
        reservation.keep([b"other"])
    with pytest.raises(BlockSizeError):
        await reservation.transfer(MemoryTier(8, 8), [0, 0])
    await reservation.transfer(tier, tier.pool.slots(KEYS[:2]))
    with pytest.raises(ValueError, match="once"):
        await reservation.transfer(tier, [])
    reservation.release()
    assert "room for 2 blocks in <MemoryTier 2 of 8 blocks of 4096 bytes>" in repr(reservation)


async def test_a_load_needs_a_live_lease_of_this_tier_and_room(tier):
    places = PagesDestination.over([bytearray(SIZE)])
    async with await tier.pin(KEYS[:2]) as lease:
        with pytest.raises(ValueError, match="2 blocks do not fit into 1 places"):
            await tier.load(lease, places)
        with pytest.raises(BlockSizeError):
            await tier.load(lease, PagesDestination.over([bytearray(1), bytearray(1)]))
        with pytest.raises(ValueError, match="does not hold blocks"):
            await tier_of().load(lease, places)
        larger = PagesDestination.over([bytearray(SIZE) for _ in range(3)])
        assert await tier.load(lease, larger) == [LOADED] * 2
    with pytest.raises(ValueError, match="does not hold blocks"):
        await tier.load(lease, places)


async def test_a_block_damaged_under_two_leases_is_missed_by_both_and_freed_by_the_last(tier):
    damage(tier, KEYS[0])
    first, second = await tier.pin(KEYS[:1]), await tier.pin(KEYS[:1])
    places = PagesDestination.over([bytearray(SIZE)])
    for lease in (first, second):
        assert await tier.load(lease, places) == [Missed("damaged")]
    assert tier.free == 0
    assert await tier.delete(KEYS[:1]) == [Deletion.MISSING]
    await first.release()
    assert tier.free == 0
    await second.release()
    assert (tier.free, tier.statistics().held_blocks) == (1, 0)


async def test_a_cancelled_release_has_let_go(tier):
    lease = await tier.pin(KEYS)
    with trio.CancelScope() as scope:
        scope.cancel()
        await lease.release()
    assert scope.cancelled_caught
    assert tier.statistics().held_blocks == 0


def test_after_closing_it_says_so_and_the_memory_goes_with_the_last_page(tier):
    pages = tier.views([0])
    gone = weakref.ref(pages.owner)
    tier.close()
    tier.close()
    with pytest.raises(PlaceClosed):
        tier.put(b"new", bytes(SIZE))
    with pytest.raises(PlaceClosed):
        tier.get(KEYS[7])
    assert bytes(pages[0]) == payload_of(KEYS[0], SIZE)  # never unmapped under somebody's feet
    page = pages[0]
    del pages
    gc.collect()
    assert gone() is not None
    assert page[0] == payload_of(KEYS[0], SIZE)[0]
    del page
    gc.collect()
    assert gone() is None


def test_collecting_a_tier_gives_its_memory_back():
    tier = tier_of()
    gone = weakref.ref(tier.views([0]).owner)
    del tier
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("madvise", ["works", "is refused"])
def test_populating_touches_every_page(madvise, monkeypatch):
    if madvise == "is refused":
        monkeypatch.setattr("backends.memory.MADV_POPULATE_WRITE", 9999)
        monkeypatch.setattr("backends.memory._MADV_HUGEPAGE", 9999)
        monkeypatch.setattr("maru.base.memory.huge_pages.MADV_POPULATE_WRITE", 9999)

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    n = 64 << 20
    before = resident()
    lazy = HostPages(n >> 12, 4096, populate=False)
    assert resident() - before < n // 2
    eager = HostPages(n >> 12, 4096)
    assert resident() - before > n * 3 // 4
    assert lazy.pages([0])[0][0] == eager.pages([0])[0][0] == 0


def test_pinning_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr("maru.base.memory.cuda.open_library", lambda: FakeCuda(devices=0).library)
    find_driver.cache_clear()
    with pytest.raises(ValueError, match="pin_memory is True, but the CUDA driver sees no device"):
        tier_of(pin_memory=True)
    find_driver.cache_clear()


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("populate", [True, False])
def test_memory_is_in_huge_pages_unless_that_is_turned_off(huge_pages, populate):
    if why_no_huge_pages():
        pytest.skip("this kernel makes no huge pages when told to")
    tier = MemoryTier(8 << 20, SIZE, huge_pages=huge_pages, populate=populate)
    for start in tier.unpopulated():
        tier.populate(start)
    found, inside, address = 0, False, tier.views([0]).addresses[0]
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in (first := line.split()[0]):
                start, stop = (int(end, 16) for end in first.split("-"))
                inside = start <= address < stop
            elif inside and first == "AnonHugePages:":
                found = int(line.split()[1]) << 10
    assert found >= 8 << 20 if huge_pages else not found
    tier.close()


@pytest.fixture
def cuda():
    with process_with_cuda() as fake:
        yield fake


@pytest.mark.parametrize("pin", [True, None])
def test_a_tier_is_pinned_until_it_is_closed(cuda, pin):
    tier = tier_of(16, pin_memory=pin)
    address = tier.views([0]).addresses[0]
    assert spans(address, 16 * SIZE) == [(address, address + 16 * SIZE)]
    tier.close()
    assert not cuda.registered


def test_a_tier_that_is_not_to_be_pinned_is_not(cuda):
    tier = tier_of(16, pin_memory=False)
    assert not cuda.registered
    tier.close()


def test_a_refusal_is_an_error_only_if_pinning_was_demanded(cuda):
    cuda.most_registered = 0
    tier = tier_of(16)
    assert "OUT_OF_MEMORY" in tier._pages.pin.why_not
    tier.close()
    with pytest.raises(
        MemoryError, match="cannot be pinned: cuMemHostRegister_v2 failed with CUDA_ERROR_OUT_OF_MEMORY"
    ):
        tier_of(16, pin_memory=True)


def test_memory_that_is_populated_later_is_pinned_after_its_last_portion(cuda, monkeypatch):
    monkeypatch.setattr("backends.memory.POPULATE_BYTES", 8 * SIZE)
    tier = tier_of(20, populate=False)
    *others, last = tier.unpopulated()
    for start in others:
        tier.populate(start)
    assert not cuda.registered
    tier.populate(last)
    assert cuda.registered
    tier.close()
    tier.populate(last)


def test_a_tier_imports_no_torch():
    code = "import sys, backends.memory as m; m.MemoryTier(4096, 4096); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- pages --------------------------------------------------------------------------------------------------------


def test_neighbouring_slots_are_one_run_and_others_keep_their_order():
    storage = HostPages(8, 16)
    base = storage.pages([0]).addresses[0]
    assert storage.pages([2, 3, 4]).addresses == range(base + 32, base + 80, 16)
    assert list(storage.pages([0, 2, 1, 3]).addresses) == [base, base + 32, base + 16, base + 48]
    assert list(storage.pages([]).addresses) == []


@pytest.mark.parametrize("size", [1, 100, 4096, 300_000])
@pytest.mark.parametrize("order", ["ascending", "shuffled", "runs"])
def test_copies_put_each_page_where_it_belongs(size, order):
    n = 9
    storage, other = HostPages(n, size), HostPages(n, size)
    slots = {"ascending": list(range(n)), "shuffled": [4, 0, 8, 2, 6, 1, 7, 3, 5], "runs": [6, 7, 8, 0, 1, 2, 3, 4, 5]}[
        order
    ]
    for number, page in enumerate(storage.pages(slots)):
        page[:] = payload_of(b"%d" % number, size)
    expected = [payload_of(b"%d" % number, size) for number in range(n)]
    copy_pages(other.pages(range(n)), storage.pages(slots))
    assert [bytes(page) for page in other.pages(range(n))] == expected
    fresh = new_pages(n, size)
    sums = copy_and_sum(fresh, storage.pages(slots))
    assert [bytes(page) for page in fresh] == expected
    assert sums == checksums(fresh) == checksums(pages_of([bytearray(one) for one in expected]))


@pytest.mark.parametrize("size", [(256 << 10) - 1, 256 << 10, (256 << 10) + 1, 600 << 10])
def test_a_large_page_is_summed_part_by_part_and_has_the_sum_of_the_whole(size):
    here = pages_of([bytearray(payload_of(b"%d" % number, size)) for number in range(2)])
    there = new_pages(2, size)
    assert copy_and_sum(there, here) == checksums(here) == checksums(there)
    assert [bytes(page) for page in there] == [bytes(page) for page in here]


def test_pages_that_do_not_match_are_refused():
    for copy in (copy_pages, copy_and_sum):
        with pytest.raises(ValueError, match="cannot copy"):
            copy(new_pages(2, 8), new_pages(3, 8))
        with pytest.raises(ValueError, match="cannot copy"):
            copy(new_pages(200, 4096), new_pages(201, 4096))
        with pytest.raises(ValueError, match="cannot copy"):
            copy(new_pages(2, 8), new_pages(2, 9))
        with pytest.raises(ValueError, match="cannot copy"):
            copy(new_pages(2, 300 << 10), new_pages(1, 300 << 10))
    with pytest.raises(ValueError, match="must have one size"):
        pages_of([bytearray(1), bytearray(2)])
    with pytest.raises(ValueError, match="writable"):
        pages_of([b"read-only"])


def test_no_pages_are_no_trouble():
    nothing = pages_of([])
    assert len(nothing) == 0
    copy_pages(nothing, nothing)
    assert copy_and_sum(nothing, nothing) == []
    assert len(new_pages(0, 5)) == 0


def test_evicted_is_no_slot():
    assert EVICTED == -1


def test_places_are_imported_when_they_are_asked_for():
    code = (
        "import sys, backends\n"
        "assert 'backends.file' not in sys.modules\n"
        "assert backends.FileTier.__module__ == 'backends.file'\n"
        "assert backends.DeviceTier and backends.MemoryTier and 'torch' not in sys.modules\n"
        "assert not hasattr(backends, 'NoSuchTier')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def resident_bytes(tier, blocks):
    """How much of the memory of a tier is in place, page by page: the kernel may join its mapping with another one."""
    first_page = tier.views([0]).addresses[0] // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), blocks * SIZE // mmap.PAGESIZE * 8, first_page * 8)
    present = np.frombuffer(entries, np.uint64) >> np.uint64(63)
    return int(present.sum()) * mmap.PAGESIZE


def test_memory_can_be_populated_later_in_portions_and_keeps_what_it_holds(monkeypatch):
    monkeypatch.setattr("backends.memory.POPULATE_BYTES", 256 * SIZE)
    tier = tier_of(1024, populate=False)
    assert tier.put(b"key", payload_of(b"key", SIZE))
    assert resident_bytes(tier, 1024) < 1024 * SIZE
    for start in tier.unpopulated():
        tier.populate(start)
    assert resident_bytes(tier, 1024) == 1024 * SIZE
    assert tier.get(b"key") == payload_of(b"key", SIZE)
    tier.close()
    tier.populate(0)  # beside its end: nothing is there to be populated


def test_memory_that_was_populated_when_it_was_made_has_nothing_left_to_populate():
    assert list(tier_of().unpopulated()) == []


# --- what a policy knows -------------------------------------------------------------------------------------------


async def test_a_block_evicted_at_the_end_of_its_read_is_unknown_to_the_policy():
    """The release of what was read serves a waiting request with this very block, once a thread has let go of another one."""
    tier = MemoryTier(2 * SIZE, SIZE, eviction=LRU())
    tier.put(b"first", bytes(SIZE))
    tier.put(b"second", bytes(SIZE))
    lease = tier.pin_from_thread([b"first"])

    async def wait_for_room():
        (await tier.reserve(RoomRequest([b"third", b"fourth"], SIZE, "evict"))).release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_room)
        await trio.testing.wait_all_tasks_blocked()
        lease.release_from_thread()
        assert tier.get(b"second") is not None
    for key in (b"fifth", b"sixth", b"seventh"):
        assert tier.put(key, bytes(SIZE))


def test_a_use_of_a_key_that_is_gone_leaves_no_victim_behind():
    pool = MemoryTier(SIZE, SIZE, eviction=LRU()).pool
    pool.register([b"first"], pool.take(1))
    pool.delete([b"first"])
    pool.use([b"first"])
    pool.register([b"second"], pool.take(1))
    assert pool.take_evicting([b"third"]) is not None


def test_columns_of_unequal_length_register_nothing_and_lose_no_slot():
    tier = MemoryTier(2 * SIZE, SIZE)
    slots = tier.stage(2)
    for keys, error in (([b"one"], ValueError), ([b"one", "two"], TypeError)):
        with pytest.raises(error):
            tier.register(slots, keys)
    assert tier.register(slots, [b"one", b"two"]) == [STORED, STORED]
