"""The memory of engines: what is mapped, what is read by calls, and that nothing an engine says or does ends the daemon."""

import errno
import fcntl
import os
import tempfile

import pytest

from backends import DamagedBlock
from backends.abc import STORED, RoomRequest
from backends.base.pages import new_pages
from backends.memory import MemoryTier
from offload.client import SharedMemory
from offload.daemon._layout import MAX_PIECES, BadLayout, check_layout, count_pieces
from offload.daemon._memory import Caches, FileMemory, MappedMemory, Shares, adopt
from offload.daemon._messages import TensorLayout

SIZE = 4096


def run_of(n, memory=0, offset=0):
    """Blocks of one run each."""
    return [TensorLayout(memory, offset, 1, [n, SIZE], [SIZE, 1], 0)]


def memfd(nbytes, seals=0):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


# --- what is mapped -----------------------------------------------------------------------------------------------------


def adopted(descriptor):
    """Memory of a session without any other."""
    with Shares() as shares:
        return adopt(descriptor, shares, 1)


def test_memory_that_is_sealed_against_shrinking_is_mapped():
    shared = SharedMemory(4 * SIZE)
    assert isinstance(adopted(os.dup(shared.descriptor)), MappedMemory)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_memory_that_could_shrink_is_never_mapped(seals):
    assert isinstance(adopted(memfd(4 * SIZE, seals)), FileMemory)


def test_a_shared_memory_file_is_read_by_calls():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4 * SIZE)
        assert isinstance(adopted(os.open(file.name, os.O_RDWR)), FileMemory)


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.pipe()[0],
        lambda: os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY),
        lambda: memfd(0),
        lambda: os.open(__file__, os.O_RDONLY),
        lambda: memfd(SIZE, fcntl.F_SEAL_WRITE) and os.open("/proc/self/mem", os.O_RDWR),
    ],
)
def test_what_is_no_memory_is_refused_and_its_descriptor_closed(make):
    descriptor = make()
    with pytest.raises(BadLayout):
        adopted(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_the_descriptor_that_was_handed_over_is_closed_when_it_is_mapped():
    shared = SharedMemory(SIZE)
    descriptor = os.dup(shared.descriptor)
    memory = adopted(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert memory.size == SIZE


# --- what is said of it -------------------------------------------------------------------------------------------------


def test_blocks_of_one_run_and_blocks_of_many_pieces_are_told_apart():
    one = check_layout(run_of(4), [4 * SIZE])
    assert (one.blocks, one.block_bytes, one.is_one_run) == (4, SIZE, True)
    many = check_layout([TensorLayout(0, 0, 2, [2, 8, 16], [128, 16, 1], 1)], [512])
    assert (many.blocks, many.block_bytes, many.is_one_run) == (8, 64, False)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (TensorLayout(0, 1, 1, [4, SIZE], [SIZE, 1], 0), "ends"),
        (TensorLayout(0, 0, 1, [5, SIZE], [SIZE, 1], 0), "ends"),
        (TensorLayout(0, 0, 1, [4, SIZE], [1 << 62, 1], 0), "ends"),
        (TensorLayout(0, 0, 1, [1 << 62, 1], [1 << 62, 1], 0), "ends"),
        (TensorLayout(1, 0, 1, [4, SIZE], [SIZE, 1], 0), "no memory 1"),
        (TensorLayout(0, 0, 1, [4, SIZE], [SIZE], 0), "strides"),
        (TensorLayout(0, 0, 1, [4, SIZE], [SIZE, 1], 2), "axis 2"),
        (TensorLayout(0, 0, 1, [4, SIZE], [0, 1], 0), "share memory"),
        (TensorLayout(0, 0, 1, [4, 0], [SIZE, 1], 0), "ends"),
        (TensorLayout(0, 3, 2, [4, 8], [8, 1], 0), "not a multiple of its item size, 2"),
    ],
)
def test_a_layout_outside_of_its_memory_is_refused(tensor, why):
    with pytest.raises(BadLayout, match=why):
        check_layout([tensor], [4 * SIZE])


def test_blocks_in_more_pieces_than_are_copied_are_refused_before_they_are_listed():
    fine = TensorLayout(0, 0, 1, [2, 1 << 40], [1, 2], 0)
    with pytest.raises(BadLayout, match=f"{1 << 40} pieces: at most {MAX_PIECES}"):
        check_layout([fine], [1 << 50])


def test_pieces_of_all_tensors_are_counted_before_any_is_listed(monkeypatch):
    listed = []
    monkeypatch.setattr("offload.daemon._layout.layout_of", lambda *args: listed.append(args))
    cut = TensorLayout(0, 0, 1, [1, MAX_PIECES, 1], [0, 2, 1], 0)
    with pytest.raises(BadLayout, match=f"{512 * MAX_PIECES} pieces: at most {MAX_PIECES}"):
        check_layout([cut] * 512, [2 * MAX_PIECES])
    assert not listed


@pytest.mark.parametrize(
    ("shape", "strides"), [([4, 64], [64, 1]), ([2, 8, 16], [128, 16, 1]), ([3, 1, 5, 2], [40, 40, 8, 2])]
)
def test_pieces_are_counted_as_they_are_listed(shape, strides):
    tensor = TensorLayout(0, 0, 1, shape, strides, len(shape) - 2)
    layout = check_layout([tensor], [1 << 20])
    assert count_pieces([tensor], [1 << 20]) == sum(len(one.planes) for one in layout.layouts)


@pytest.mark.parametrize(
    "tensors",
    [
        [TensorLayout(0, 0, 1, [4, SIZE], [SIZE // 2, 1], 0)],
        [TensorLayout(0, 0, 1, [4, 2, 8], [4, 2 * SIZE, 1], 0)],
        [*run_of(4), *run_of(4)],
    ],
)
def test_pieces_that_share_memory_are_refused(tensors):
    with pytest.raises(BadLayout, match=r"memory 0: .* share memory"):
        check_layout(tensors, [8 * SIZE])


def test_tensors_of_one_cache_have_the_same_blocks():
    with pytest.raises(BadLayout, match="differ"):
        check_layout([*run_of(4), *run_of(3)], [8 * SIZE])


# --- copies -------------------------------------------------------------------------------------------------------------


def caches_over(memory, n):
    caches = Caches(SIZE)
    layout = check_layout(run_of(n), [memory.size])
    return caches, caches.add(memory.storage(layout, [memory]), n)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK])
def test_blocks_are_copied_from_and_to_memory_of_both_kinds(seals):
    descriptor = memfd(4 * SIZE, seals)
    os.pwrite(descriptor, b"\1" * SIZE, SIZE)
    caches, cache = caches_over(adopted(os.dup(descriptor)), 4)
    pages = new_pages(1, SIZE)
    blocks = caches.blocks(cache, [1], [b"key"], None)
    caches.copy_out(blocks.refs, pages)
    assert bytes(pages[0]) == b"\1" * SIZE
    caches.into(cache, [3]).copy_in(0, pages)
    assert os.pread(descriptor, SIZE, 3 * SIZE) == b"\1" * SIZE
    os.close(descriptor)


def test_memory_that_is_cut_off_fails_its_blocks_and_ends_nothing():
    descriptor = memfd(4 * SIZE)
    caches, cache = caches_over(adopted(os.dup(descriptor)), 4)
    blocks = caches.blocks(cache, [3], [b"key"], None)
    os.ftruncate(descriptor, SIZE)
    pages = new_pages(1, SIZE)
    with pytest.raises(DamagedBlock):
        caches.copy_out(blocks.refs, pages)
    with pytest.raises(OSError):
        caches.into(cache, [3]).copy_in(0, pages)
    assert os.fstat(descriptor).st_size == SIZE  # nor is it made longer again
    os.close(descriptor)


@pytest.mark.parametrize("order", [[3, 0, 1], [0, 3, 1], [0, 1, 3]])
def test_clearing_memory_that_is_cut_off_leaves_none_of_the_rest(order):
    """An engine says which of its blocks come first, and where it cuts its memory off."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"x" * 4 * SIZE)
        file.flush()
        caches, number = caches_over(adopted(os.open(file.name, os.O_RDWR)), 4)
        os.truncate(file.name, 3 * SIZE)
        with pytest.raises(OSError, match="ends before"):
            caches.into(number, order).clear(range(3))
        file.seek(0)
        assert file.read() == bytes(2 * SIZE) + b"x" * SIZE


@pytest.mark.parametrize("most", [1, SIZE // 2 + 1])
def test_short_writes_and_reads_leave_whole_blocks(monkeypatch, most):
    descriptor = memfd(4 * SIZE)
    caches, cache = caches_over(adopted(os.dup(descriptor)), 4)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:most]], at))
    pages = new_pages(1, SIZE)
    pages[0][:] = data = os.urandom(SIZE)
    caches.into(cache, [2]).copy_in(0, pages)
    assert os.pread(descriptor, SIZE, 2 * SIZE) == data
    pages[0][:] = bytes(SIZE)
    caches.copy_out(caches.blocks(cache, [2], [b"key"], None).refs, pages)
    assert bytes(pages[0]) == data
    os.close(descriptor)


def test_a_file_that_cannot_grow_fails_the_block(monkeypatch):
    caches, cache = caches_over(adopted(memfd(4 * SIZE)), 4)
    pwrite, room = os.pwrite, [SIZE // 2]

    def fills_up(fd, data, at):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[: room.pop()], at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with pytest.raises(OSError, match="No space left"):
        caches.into(cache, [2]).copy_in(0, new_pages(1, SIZE))


def test_blocks_that_a_cache_does_not_have_cannot_be_named():
    caches, cache = caches_over(adopted(memfd(4 * SIZE)), 4)
    for ids in ([4], [1 << 31]):
        with pytest.raises(ValueError):
            caches.blocks(cache, ids, [b"key"], None)
        with pytest.raises(ValueError):
            caches.into(cache, ids)
    with pytest.raises(ValueError):
        caches.into(cache, [1, 1])
    caches.remove(cache)
    with pytest.raises(ValueError):
        caches.blocks(cache, [1], [b"key"], None)


def test_a_copy_that_is_under_way_keeps_the_memory_of_a_cache_that_is_gone():
    shared = SharedMemory(4 * SIZE)
    caches, cache = caches_over(adopted(os.dup(shared.descriptor)), 4)
    pages = caches.views(caches.blocks(cache, [1, 2], [b"a", b"b"], None).refs)
    caches.remove(cache)
    assert bytes(pages[0]) == bytes(SIZE)


def test_blocks_of_several_engines_are_copied_in_one_batch():
    caches = Caches(SIZE)
    numbers = []
    for fill in (1, 2):
        descriptor = memfd(2 * SIZE, fcntl.F_SEAL_SHRINK if fill == 1 else 0)
        os.pwrite(descriptor, bytes([fill]) * 2 * SIZE, 0)
        memory = adopted(descriptor)
        numbers.append(caches.add(memory.storage(check_layout(run_of(2), [memory.size]), [memory]), 2))
    refs = [caches.blocks(number, [1], [b"key"], None).refs[0] for number in (numbers[1], numbers[0], numbers[1])]
    pages = new_pages(3, SIZE)
    assert caches.views(refs) is None
    caches.copy_out(refs, pages)
    assert [page[0] for page in pages] == [2, 1, 2]


async def test_blocks_of_a_missing_cache_fail_alone():
    caches, cache = caches_over(adopted(memfd(4 * SIZE)), 4)
    number = caches.add(caches._storages[cache], 4)
    refs = [caches.blocks(one, [1], [b"key"], None).refs[0] for one in (cache, number)]
    caches.remove(cache)
    tier = MemoryTier(4 * SIZE, SIZE)
    reservation = await tier.reserve(RoomRequest([b"a", b"b"], SIZE, "evict"))
    missing, there = await reservation.transfer(caches, refs)
    assert isinstance(missing.error, DamagedBlock) and there == STORED
